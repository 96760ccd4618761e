"""Serving: trained tables, frozen, several of them fused into one lookup, from files, behind an HPS configuration.

`open` serves the models of a configuration; `freeze` and `lookup` need none. Import by name what needs other packages,
`nnx` and `linen` (Flax), `artifact` (exported models), `http` (the server) and `streams` (Redis), and the parts
`cache`, `backing` and `folders`.
"""

from jaxsok.serving.config import Config, ModelConfig, TableConfig, read as read_config, write as write_config
from jaxsok.serving.errors import (
    ConfigError,
    DatabaseError,
    RequestError,
    RequestTooLargeError,
    ServingError,
    StreamFullError,
    UnknownModelError,
    UnknownTableError,
)
from jaxsok.serving.frozen import (
    FrozenStore,
    FrozenTable,
    FrozenTables,
    SizedRecords,
    freeze,
    freeze_records,
    frozen_bytes,
)
from jaxsok.serving.frozen_files import export_frozen
from jaxsok.serving.fused import LookupInput, find_rows, lookup, lookup_with_counts
from jaxsok.serving.model.served import Answer, Model, load_tables
from jaxsok.serving.session import Session, open

__all__ = [
    "Answer",
    "Config",
    "ConfigError",
    "DatabaseError",
    "FrozenStore",
    "FrozenTable",
    "FrozenTables",
    "LookupInput",
    "Model",
    "ModelConfig",
    "RequestError",
    "RequestTooLargeError",
    "ServingError",
    "Session",
    "SizedRecords",
    "StreamFullError",
    "TableConfig",
    "UnknownModelError",
    "UnknownTableError",
    "export_frozen",
    "find_rows",
    "freeze",
    "freeze_records",
    "frozen_bytes",
    "load_tables",
    "lookup",
    "lookup_with_counts",
    "open",
    "read_config",
    "write_config",
]
