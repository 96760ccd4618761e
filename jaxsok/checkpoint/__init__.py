"""Checkpoints and exports: rows with their keys, streamed into files and back, onto any mesh.

`TablesSave` and `TablesRestore` go through Orbax. `export_full` and `export_delta` write folders of the same files
(docs/checkpoint_format.md) without it; `load` makes a state of them.
"""

from typing import TYPE_CHECKING, Any

from jaxsok.checkpoint.export_folders import Exported, begin_export_delta, export_delta, export_full
from jaxsok.checkpoint.files import CorruptFileError
from jaxsok.checkpoint.restore import apply_delta, load
from jaxsok.checkpoint.save import SaveReport

if TYPE_CHECKING:
    from jaxsok.checkpoint.handler import TablesCheckpointHandler, TablesRestore, TablesSave

_OF_ORBAX = ("TablesCheckpointHandler", "TablesRestore", "TablesSave")

__all__ = [
    "CorruptFileError",
    "Exported",
    "SaveReport",
    "TablesCheckpointHandler",
    "TablesRestore",
    "TablesSave",
    "apply_delta",
    "begin_export_delta",
    "export_delta",
    "export_full",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports Orbax at its first use: it takes seconds, and exports do without it."""
    if name in _OF_ORBAX:
        from jaxsok.checkpoint import handler

        return getattr(handler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
