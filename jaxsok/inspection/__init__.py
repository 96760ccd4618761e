"""Reads what is in a checkpoint, an export or a file of another system; draws what a collection will take.

`inspect` reads any of them, `report` any records, `read_spec` declarations of tables. The command line is
`python -m jaxsok inspect` and `estimate`. Import it by `from jaxsok import inspection`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsok.inspection.counts import Bin
from jaxsok.inspection.declared import Declared, read_batches, read_spec
from jaxsok.inspection.kinds import open_tables
from jaxsok.inspection.pictures import draw_cache_estimates, draw_estimate, draw_reports
from jaxsok.inspection.report import Ages, Norms, TableReport, Uses, overview, report

__all__ = [
    "Ages",
    "Bin",
    "Declared",
    "Inspection",
    "Norms",
    "TableReport",
    "Uses",
    "draw_cache_estimates",
    "draw_estimate",
    "draw_reports",
    "inspect",
    "read_batches",
    "read_spec",
    "report",
]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result of `inspect` for a path. `str` makes text of it, `to_json` plain numbers."""

    path: str
    kind: str
    """"jaxsok", "HPS", "SOK", "Parquet" or "npz"."""
    facts: Mapping[str, Any]
    """Facts in the files, as the step."""
    tables: tuple[TableReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns dicts, lists and numbers."""
        tables = [table.to_json() for table in self.tables]
        return {"path": self.path, "kind": self.kind, "facts": dict(self.facts), "tables": tables}

    def __str__(self) -> str:
        facts = "".join(f", {name} {value}" for name, value in self.facts.items())
        lines = [f"{self.path}: {self.kind}{facts}", "", *overview(self.tables)]
        for table in self.tables:
            lines += ["", str(table)]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str], tables: Sequence[str] | None = None) -> Inspection:
    """Goes through the tables of a checkpoint, an export, or files of another system, once.

    `path` is a folder of `jaxsok.checkpoint`, a step or the root of an Orbax checkpoint (its last step then), a folder
    of HPS or SOK, a `.parquet` or `.npz` file, or a folder of such files. The kind is found by content.
    `tables` chooses some by name.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: of no known kind, damaged, or without a table of a name.
      ImportError: a package that the kind needs is missing.

    Cost:
      Reads everything; host memory holds a chunk of records, and what the reader of the kind holds.

    Example:
      `print(inspect("exports/monday"))`
    """
    found = open_tables(pathlib.Path(path))
    names = list(found.tables if tables is None else dict.fromkeys(tables))
    for name in names:
        if name not in found.tables:
            raise ValueError(f'inspect: {path}: table: got "{name}", wanted one of {list(found.tables)}.')
    reports = []
    for name in names:
        of_table = report(found.tables[name](), name=name, clock=found.clock)
        reports.append(dataclasses.replace(of_table, facts=dict(found.table_facts.get(name, {}))))
    return Inspection(str(path), found.kind, found.facts, tuple(reports))
