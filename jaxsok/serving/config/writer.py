"""Writes a configuration as the JSON that HPS reads: the reader's inverse."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxsok.serving.config import reader
from jaxsok.serving.config.values import PER_TABLE, Config, ModelConfig, PersistentDb, UpdateSource, VolatileDb


def write(path: str | os.PathLike[str], config: Config | Mapping[str, Any]) -> None:
    """Writes a configuration as a JSON file, which HPS and `serving.open` read; a file that is there is replaced.

    Keys that have their defaults are left out. What only jaxsok knows is in blocks called `jaxsok`, which HPS ignores.
    A default of None becomes `null`, which HPS does not read: give each TableConfig a number for HPS.

    Args:
      path: of the file.
      config: a `Config` of ModelConfigs and TableConfigs, or a mapping as HPS has it. It is checked as it is read.

    Raises:
      ConfigError: what `read_config` raises; nothing is written.

    Example:
      >>> import tempfile
      >>> from jaxsok.serving.config import TableConfig
      >>> table = TableConfig("user", dim=16, file="/models/user", default=0.0, max_keys_per_sample=2)
      >>> config = Config((ModelConfig("dlrm", (table,), deployed_device_list=(0,)),), supportlonglong=True)
      >>> with tempfile.NamedTemporaryFile() as file:
      ...     write(file.name, config)
      ...     reader.read(file.name) == config
      True
    """
    given = _json_of(config) if isinstance(config, Config) else config
    reader.read(given)
    pathlib.Path(path).write_text(json.dumps(given, indent=1) + "\n")


def _json_of(config: Config) -> dict[str, Any]:
    fused = {} if config.fuse_embedding_table is None else {"fuse_embedding_table": config.fuse_embedding_table}
    models = [_model(model) for model in config.models]
    found: dict[str, Any] = {"supportlonglong": config.supportlonglong, **fused, "models": models}
    if config.volatile_db != VolatileDb("parallel_hash_map"):
        found["volatile_db"] = {"type": config.volatile_db.type, **_block(config.volatile_db)}
        if config.volatile_db.type == "redis_cluster":  # its default depends on the machine
            found["volatile_db"]["num_partitions"] = config.volatile_db.num_partitions
    if config.persistent_db != PersistentDb():
        found["persistent_db"] = {**_block(config.persistent_db), "path": config.persistent_db.path}
    if config.update_source != UpdateSource():
        found["update_source"] = _block(config.update_source)
    return found


def _model(model: ModelConfig) -> dict[str, Any]:
    lists = {name: [getattr(table, field) for table in model.tables] for name, field in PER_TABLE.items()}
    return {"model": model.model, **lists, **_block(model)}


def _block(value: Any) -> dict[str, Any]:
    """Gives the keys of a block that differ from their defaults, with those of its block `jaxsok`."""
    blocks: dict[str, dict[str, Any]] = {"": {}, "jaxsok": {}}
    for field in dataclasses.fields(value):
        if "key" in field.metadata and getattr(value, field.name) != field.metadata["key"].default:
            blocks[field.metadata["block"]][field.name] = getattr(value, field.name)
    return {**blocks[""], **({"jaxsok": blocks["jaxsok"]} if blocks["jaxsok"] else {})}
