"""Reads a configuration: checks parsed JSON key by key (keys.py) and makes values of it (values.py)."""

import dataclasses
import difflib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxsok.serving.config.keys import (
    JAXSOK_KEYS,
    MODEL_KEYS,
    OLDER_BLOCK_KEYS,
    PER_TABLE,
    PERSISTENT_KEYS,
    REQUIRED,
    TOP_KEYS,
    UPDATE_KEYS,
    VOLATILE_KEYS,
    WRONG,
    Key,
    Kind,
)
from jaxsok.serving.config.values import (
    Config,
    ModelConfig,
    PersistentDatabase,
    TableConfig,
    UpdateSource,
    VolatileDatabase,
    WithoutEffect,
    idle_keys,
    steps_of,
)
from jaxsok.serving.errors import ConfigError

_BLOCKS = {
    "the whole": TOP_KEYS,
    "a model": MODEL_KEYS,
    "a model's block jaxsok": JAXSOK_KEYS,
    "volatile_db": VOLATILE_KEYS,
    "persistent_db": PERSISTENT_KEYS,
    "update_source": UPDATE_KEYS,
}
_NO_VOLATILE = {
    "redis_cluster": "Redis is not there yet: rows lie in memory of this process",
    "multi_process_hash_map": "memory shared by processes is not there: serve from one",
    "rocks_db": "RocksDB is not there yet, and is no volatile database",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_MODEL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")


def read(source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
    """Reads a configuration, checks all of it and fills in HPS's defaults.

    Args:
      source: the path of a JSON file, its parsed content, or a Config made by hand. No file that it names is opened.

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: malformed JSON (with line and column), a missing, unknown or repeated key, a value of the wrong type,
        or what jaxsok does not have (Redis, RocksDB, Kafka, remote files...).

    Example:
      >>> config = read({
      ...     "supportlonglong": True,
      ...     "models": [{
      ...         "model": "dlrm",
      ...         "sparse_files": ["/models/dlrm/user", "/models/dlrm/item"],
      ...         "embedding_vecsize_per_table": [16, 16],
      ...         "maxnum_catfeature_query_per_table_per_sample": [2, 26],
      ...         "default_value_for_each_table": [0.0, 1.0],
      ...         "deployed_device_list": [0],
      ...         "thread_pool_size": 8,
      ...     }],
      ... })
      >>> config.models[0].tier, config.models[0].max_keys
      ('cache', {'sparse_embedding0': 128, 'sparse_embedding1': 1664})
      >>> print(config.without_effect[0])
      models[0].thread_pool_size = 8: threads are those of XLA and of the server

    Source: the JSON parser of HugeCTR 24.06, whose defaults these are.
    """
    if isinstance(source, Config):
        return dataclasses.replace(read(source.to_json()), file=source.file)
    if isinstance(source, Mapping):
        return _Reader("").config(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"config.read: source: got {type(source).__name__}, wanted the path of a JSON file, a mapping or a Config."
        )
    path = pathlib.Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"config.read: source: got {str(path)!r}, which is no file, wanted a JSON file.")
    return _Reader(str(path)).config(_parsed(path))


class _Twice(dict):
    """A JSON object that has a key more than once."""

    key = ""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made, seen = dict(pairs), set()
    for key, _ in pairs:
        if key in seen:
            twice = _Twice(made)
            twice.key = key
            return twice
        seen.add(key)
    return made


def _parsed(path: pathlib.Path) -> Any:
    what = f'config: file "{path}"'

    def refused(name: str) -> NoReturn:
        raise ConfigError(f"{what}: got {name}, wanted a number: JSON has no other; write one out.")

    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what}: byte {error.start}: got {data[error.start]:#04x}, wanted text in UTF-8; save it as such."
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_object_of, parse_constant=refused)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{what}: line {error.lineno}, column {error.colno}: got malformed JSON ({error.msg}), wanted what HPS "
            "reads; commas before a closing bracket and comments are not JSON."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{what}: got brackets nested too deeply, wanted what HPS reads.") from error
    except ConfigError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{what}: got a number that cannot be read ({error}), wanted a shorter one.") from error


class _Reader:
    """Makes a configuration of parsed JSON, and collects notes for the report."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.without: dict[str, WithoutEffect] = {}
        self.notes: list[str] = []

    def config(self, given: Mapping[str, Any]) -> Config:
        if not isinstance(given, Mapping):
            self.refuse("", given, "an object with supportlonglong and models")
        top = self.block("", given, TOP_KEYS)
        if not top["models"]:
            self.refuse("models", [], "at least one model")
        volatile = self.volatile(top)
        self.persistent(top)
        self.update_source(top)
        for name in ("cpu_memory_db", "distributed_db"):
            if top[name] is not None:
                self.block(name, top[name], OLDER_BLOCK_KEYS)
        models = tuple(self.model(f"models[{i}]", model, top) for i, model in enumerate(top["models"]))
        places: dict[str, str] = {}
        for i, model in enumerate(models):
            before = places.setdefault(model.model, f"models[{i}]")
            if before != f"models[{i}]":
                self.refuse(
                    f"models[{i}].model", model.model, f"a name that {before} does not have", "rename one of them"
                )
        self.database_of(models, volatile, is_written="volatile_db" in given)
        values = {name: given[name] for name in ("volatile_db", "persistent_db", "update_source") if name in given}
        return Config(
            models=models,
            supportlonglong=top["supportlonglong"],
            fuse_embedding_table=top["fuse_embedding_table"],
            volatile_db=_filled(VolatileDatabase, values.get("volatile_db", {}), type=volatile),
            persistent_db=_filled(PersistentDatabase, values.get("persistent_db", {}), type="disabled"),
            update_source=_filled(UpdateSource, values.get("update_source", {}), type=None),
            without_effect=tuple(sorted(self.without.values(), key=lambda key: _order(key.path))),
            notes=tuple(self.notes),
            file=self.file,
        )

    # One block --------------------------------------------------------------------------------------------------------

    def fail(self, path: str, text: str) -> NoReturn:
        file = f'file "{self.file}": ' if self.file else ""
        place = f"{path}: " if path else ""
        raise ConfigError(f"config: {file}{place}{text}.", path=path)

    def refuse(self, path: str, got: Any, wanted: str, remedy: str = "") -> NoReturn:
        shown = "null" if got is None else json.dumps(got, default=str) if _is_plain(got) else _shown(got)
        if path.endswith("password"):
            shown = "something else"
        end = f"; {remedy}" if remedy else ""
        self.fail(path, f"got {shown}, wanted {wanted}{end}")

    def block(self, path: str, given: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
        """Checks the values of a block and fills in defaults; notes keys without effect."""
        if isinstance(given, _Twice):
            self.fail(
                _joined(path, given.key),
                "got the key twice, wanted it once; which one counts depends on the reader: take one out",
            )
        for name in given:
            if name not in keys:
                self.unknown(path, name, keys)
        values: dict[str, Any] = {}
        for name, key in keys.items():
            at = _joined(path, name)
            if name in given:
                values[name] = self.value(at, given[name], key.kind)
                if key.reason:
                    self.no_effect(at, given[name], key.reason)
            elif key.default is REQUIRED:
                self.fail(at, f"got nothing, wanted {key.kind.wanted}; the key is required")
            else:
                values[name] = key.default
        return values

    def value(self, path: str, given: Any, kind: Kind) -> Any:
        parsed = kind.parse(given)
        if parsed is WRONG:
            is_quoted = isinstance(given, str) and kind.parse(_unquoted(given)) is not WRONG
            self.refuse(path, given, kind.wanted, "write it without quotes" if is_quoted else "")
        if kind.items is not None:
            return tuple(self.value(f"{path}[{i}]", item, kind.items) for i, item in enumerate(parsed))
        return parsed

    def unknown(self, path: str, name: Any, keys: Mapping[str, Key]) -> NoReturn:
        near = difflib.get_close_matches(str(name), keys, 1, 0.6)
        elsewhere = [block for block, others in _BLOCKS.items() if name in others]
        meant = ""
        if near:
            meant = f'did you mean "{near[0]}"? '
        elif elsewhere:
            meant = f"it is a key of {elsewhere[0]}: move it there. "
        self.fail(
            _joined(path, str(name)),
            f"got an unknown key, wanted one of HPS 24.06 or jaxsok; {meant}HPS would ignore it: take it out if "
            "nothing is meant",
        )

    def no_effect(self, path: str, value: Any, reason: str) -> None:
        """Notes a key; the first reason stands."""
        self.without.setdefault(path, WithoutEffect(path, _frozen(value), reason))

    # The blocks -------------------------------------------------------------------------------------------------------

    def volatile(self, top: Mapping[str, Any]) -> str:
        if top["volatile_db"] is None:
            return "parallel_hash_map"
        kind = self.block("volatile_db", top["volatile_db"], VOLATILE_KEYS)["type"]
        if kind in _NO_VOLATILE:
            self.refuse(
                "volatile_db.type", kind, 'one of "hash_map", "parallel_hash_map", "disabled"', _NO_VOLATILE[kind]
            )
        return kind

    def persistent(self, top: Mapping[str, Any]) -> None:
        if top["persistent_db"] is not None:
            kind = self.block("persistent_db", top["persistent_db"], PERSISTENT_KEYS)["type"]
            if kind != "disabled":
                remedy = "RocksDB is not there yet: " if kind == "rocks_db" else ""
                self.refuse(
                    "persistent_db.type",
                    kind,
                    '"disabled"',
                    f"{remedy}leave the block out; rows come from sparse_files and lie in host memory",
                )

    def update_source(self, top: Mapping[str, Any]) -> None:
        if top["update_source"] is not None:
            kind = self.block("update_source", top["update_source"], UPDATE_KEYS)["type"]
            if kind is not None:
                self.refuse(
                    "update_source.type",
                    kind,
                    "null",
                    "Kafka is not there yet: leave the block out, and bring updates by Session.update or by "
                    "`python -m jaxsok serve --watch`",
                )

    def database_of(self, models: tuple[ModelConfig, ...], kind: str, *, is_written: bool) -> None:
        """Refuses models whose rows would have no place; notes where a database stays empty."""
        for i, model in enumerate(models):
            if kind == "disabled" and model.tier != "device":
                what = "without gpucache" if model.tier == "host" else f"with gpucacheper {model.gpucacheper:g}"
                self.refuse(
                    "volatile_db.type",
                    "disabled",
                    '"parallel_hash_map"',
                    f"models[{i}] {what} has rows that are not on the device: without a database lookups would answer "
                    'the default value for them. Or set gpucacheper to 1.0. A block without a type is "disabled"',
                )
            if kind == "disabled" and model.embedding_cache_type == "dynamic":
                self.notes.append(
                    f"models[{i}]: without a database HPS answers default values; here all rows are on the device."
                )
        if is_written and kind != "disabled" and all(model.tier == "device" for model in models):
            self.no_effect("volatile_db.type", kind, "all rows of all models are on the device")

    # A model ----------------------------------------------------------------------------------------------------------

    def model(self, path: str, given: Mapping[str, Any], top: Mapping[str, Any]) -> ModelConfig:
        values = self.block(path, given, MODEL_KEYS)
        name = values["model"]
        if not _MODEL_NAME.fullmatch(name):
            self.refuse(f"{path}.model", name, "1 to 120 letters, digits, _ and -")
        tables = self.tables(path, values)
        self.refuse_remote(f"{path}.dense_file", values["dense_file"])
        if not values["deployed_device_list"]:
            self.refuse(f"{path}.deployed_device_list", [], "the number of a device, as [0]")
        if len(set(values["deployed_device_list"])) > 1:
            self.notes.append(
                f"{path}.deployed_device_list: a session serves from one device, {values['deployed_device_list'][-1]}; "
                "open one for each of the others."
            )
        self.cache_type(path, given, values)
        interval = values["refresh_interval"]
        if interval != given.get("refresh_interval", interval):
            got = given["refresh_interval"]
            self.notes.append(f"{path}.refresh_interval: got {got:g}, read as {interval}: whole seconds, as in HPS.")
        row_dtype, spare_rows = self.of_jaxsok(path, values)
        fuse = self.fuse(path, given, top)
        fields = {field.name for field in dataclasses.fields(ModelConfig)}
        kept = {key: value for key, value in values.items() if key in fields}
        kept |= {"tables": tables, "row_dtype": row_dtype, "spare_rows": spare_rows, "fuse_embedding_table": fuse}
        model = ModelConfig(**kept)
        for key, reason in idle_keys(model).items():
            if key in given:
                self.no_effect(f"{path}.{key}", given[key], reason)
        return model

    def tables(self, path: str, values: dict[str, Any]) -> tuple[TableConfig, ...]:
        files = values["sparse_files"]
        if not files:
            self.refuse(f"{path}.sparse_files", [], "at least one path")
        if values["embedding_table_names"] is None:
            values["embedding_table_names"] = tuple(f"sparse_embedding{i}" for i in range(len(files)))
        short = len(files) - len(values["default_value_for_each_table"])
        if short > 0:
            values["default_value_for_each_table"] += (None,) * short
            self.notes.append(
                f"{path}.default_value_for_each_table: {short} of {len(files)} entries are not there; what training "
                "reads where the files tell it, else 0.0, as in HPS."
            )
        for key in PER_TABLE:
            if len(values[key]) != len(files):
                self.refuse(
                    f"{path}.{key}",
                    list(values[key]),
                    f"{len(files)} entries, one for each of sparse_files",
                    "" if key != "embedding_table_names" else "or leave the key out",
                )
        for i, file in enumerate(files):
            self.refuse_remote(f"{path}.sparse_files[{i}]", file)
        names = values["embedding_table_names"]
        for i, name in enumerate(names):
            if name in names[:i]:
                self.refuse(
                    f"{path}.embedding_table_names[{i}]",
                    name,
                    f"a name that entry {names.index(name)} does not have",
                    "requests tell tables apart by it",
                )
        columns = zip(*(values[key] for key in PER_TABLE), strict=True)
        return tuple(TableConfig(**dict(zip(PER_TABLE.values(), column, strict=True))) for column in columns)

    def refuse_remote(self, path: str, file: str) -> None:
        if _SCHEME.match(file):
            self.refuse(path, file, "a path of this machine", "copy the files here: no remote storage is read")
        if "\0" in file:
            self.refuse(path, file, "a path of this machine", "a path has no zero byte")

    def cache_type(self, path: str, given: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Sets the kind of cache; refuses unknown kinds."""
        kind, at = values["embedding_cache_type"], f"{path}.embedding_cache_type"
        if values["use_static_table"]:
            if "embedding_cache_type" in given and kind != "static":
                self.no_effect(at, kind, "use_static_table makes it static, as in HPS")
            values["embedding_cache_type"] = kind = "static"
        if kind == "uvm":
            self.refuse(
                at,
                kind,
                '"dynamic" or "static"',
                "unified memory is not there: take dynamic, whose rows beyond gpucacheper lie in host memory, or "
                "static if all of them fit",
            )
        if kind == "stochastic":
            self.refuse(at, kind, '"dynamic" or "static"', "HPS has disabled it, too: take dynamic")
        if kind == "dynamic" and values["gpucache"] and values["gpucacheper"] == 0.0:
            self.refuse(
                f"{path}.gpucacheper",
                given.get("gpucacheper"),
                "a number above 0 for a dynamic cache",
                "set gpucache to false to read all rows from host memory",
            )
        if kind == "static" and not values["gpucache"]:
            self.refuse(
                f"{path}.gpucache",
                False,
                "true for a static table",
                "a static table lies on the device alone; take a dynamic one to read from host memory",
            )

    def of_jaxsok(self, path: str, values: dict[str, Any]) -> tuple[str | None, int]:
        own = self.block(f"{path}.jaxsok", values["jaxsok"] or {}, JAXSOK_KEYS)
        row_dtype = own["row_dtype"]
        is_static = values["embedding_cache_type"] == "static"
        if values["enable_pagelock"] and is_static:
            self.refuse(
                f"{path}.enable_pagelock",
                True,
                "false",
                "static tables lie in device memory; take a dynamic cache, whose rows lie in host memory, if they do "
                "not fit",
            )
        values["enable_pagelock"] = False
        values["fp8_quant"] &= is_static
        if values["fp8_quant"]:
            if row_dtype not in (None, "float8_e4m3fn"):
                self.refuse(
                    f"{path}.jaxsok.row_dtype",
                    row_dtype,
                    '"float8_e4m3fn", as fp8_quant says',
                    "take one of the two keys out",
                )
            row_dtype = "float8_e4m3fn"
        return row_dtype, own["spare_rows"]

    def fuse(self, path: str, given: Mapping[str, Any], top: Mapping[str, Any]) -> bool | None:
        every, at = top["fuse_embedding_table"], f"{path}.fuse_embedding_table"
        own = given.get("fuse_embedding_table")
        if own is True and every is False:
            self.no_effect(at, own, "the key of the whole configuration is false, and a model can only opt out")
            return False
        return every if own is None else own


# Small things --------------------------------------------------------------------------------------------------------


def _filled(kind: Any, given: Mapping[str, Any], **resolved: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: _frozen(value) for name, value in given.items() if name in names}
    return kind(**{**values, **resolved})


def _order(path: str) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (-1, step) for step in steps_of(path)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float | list)


def _shown(value: Any) -> str:
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _unquoted(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return WRONG
