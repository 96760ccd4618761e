"""Reads and writes configurations: checks parsed JSON key by key, and makes values of it (values.py)."""

import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxsok.published import partial_files
from jaxsok.serving import strict_json
from jaxsok.serving.config import values as values_lib
from jaxsok.serving.config.keys import BLOCK, REQUIRED, SECRETS, URL_OF_REDIS, WRONG, Keys, Kind, is_url_of_redis
from jaxsok.serving.config.values import Config, ModelConfig, PersistentDb, TableConfig, UpdateSource, VolatileDb
from jaxsok.serving.errors import ConfigError

_BLOCKS = {
    "the whole": values_lib.TOP_KEYS,
    "a model": values_lib.MODEL_KEYS,
    "a model's block jaxsok": values_lib.MODEL_KEYS["jaxsok"],
    **values_lib.DATABASE_KEYS,
}
MOST_IN_REDIS = 2**18 - 1  # keys in a command: with more, HPS's manual warns of obscure errors
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")


def read(source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
    """Reads a configuration, checks all of it and fills in HPS's defaults.

    Args:
      source: the path of a JSON file, its parsed content, or a Config, which is given back. No file that it names is
        opened.

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: malformed JSON (with line and column), a missing, unknown or repeated key, a value of the wrong type,
        or what jaxsok does not have (Kafka, remote files...).

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
        return source
    if isinstance(source, Mapping):
        return _Reader("").config(source)
    if not isinstance(source, str | os.PathLike):
        wanted = "the path of a JSON file, a mapping or a Config"
        raise ConfigError(f"config.read: source: got {type(source).__name__}, wanted {wanted}.")
    path = pathlib.Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"config.read: source: got {str(path)!r}, which is no file, wanted a JSON file.")
    return _Reader(str(path)).config(_parse_file(path))


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
      >>> table = TableConfig("user", dim=16, file="/models/user", default=0.0, max_keys_per_sample=2)
      >>> config = Config((ModelConfig("dlrm", (table,), deployed_device_list=(0,)),), supportlonglong=True)
      >>> with tempfile.NamedTemporaryFile() as file:
      ...     write(file.name, config)
      ...     read(file.name) == config
      True
    """
    given = _json_of(config) if isinstance(config, Config) else config
    read(given)
    place, text = pathlib.Path(os.path.realpath(path)), json.dumps(given, indent=1) + "\n"
    os.stat(place.parent)  # refuses a folder that is not there, which `partial_files` would make
    if place.exists() and not place.is_file():  # as a pipe, which cannot be replaced
        place.write_text(text)
        return
    with partial_files("write_config", [place], overwrite=True) as (file,):
        if place.exists():  # it may have a password, for few to read
            os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
        file.write(text.encode())


def _parse_file(path: pathlib.Path) -> Any:
    try:
        return strict_json.parse(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(
            f'config: file "{path}": got malformed or ambiguous JSON ({error}), wanted what HPS reads; commas before a '
            "closing bracket and comments are not JSON, and each key stands once."
        ) from error


class _Reader:
    """Makes a configuration of parsed JSON, and collects notes for the report."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.without: dict[str, values_lib.WithoutEffect] = {}
        self.notes: list[str] = []

    def config(self, given: Mapping[str, Any]) -> Config:
        if not isinstance(given, Mapping):
            self.refuse("", given, "an object with supportlonglong and models")
        top = self.block("", given, values_lib.TOP_KEYS)
        self.note_unfused("", given)
        if not top["models"]:
            self.refuse("models", [], "at least one model")
        of_block = {name: self.block(name, top[name], keys) for name, keys in values_lib.DATABASE_KEYS.items()}
        volatile_db = _make(VolatileDb, of_block["volatile_db"]) if "volatile_db" in given else Config.volatile_db
        persistent_db = _make(PersistentDb, of_block["persistent_db"])
        update_source = _make(UpdateSource, of_block["update_source"])
        models = tuple(self.model(f"models[{i}]", model) for i, model in enumerate(top["models"]))
        self.check_distinct([model.model for model in models], "models[{}].model", "models[{}]", "rename one of them")
        if volatile_db.type == persistent_db.type == "disabled":
            for i, model in enumerate(models):
                self.check_place_of_rows(f"models[{i}]", model)
        self.check_updates(given, update_source)
        self.check_databases(given, volatile_db, persistent_db, all(model.tier == "device" for model in models))
        return Config(
            models=models,
            supportlonglong=top["supportlonglong"],
            volatile_db=volatile_db,
            persistent_db=persistent_db,
            update_source=update_source,
            without_effect=tuple(sorted(self.without.values(), key=lambda key: _order(key.path))),
            notes=tuple(self.notes),
            file=self.file,
        )

    def fail(self, path: str, text: str) -> NoReturn:
        file = f'file "{self.file}": ' if self.file else ""
        place = f"{path}: " if path else ""
        raise ConfigError(f"config: {file}{place}{text}.", path=path)

    def refuse(self, path: str, got: Any, wanted: str, remedy: str = "") -> NoReturn:
        shown = "an object" if isinstance(got, Mapping) else f"a {type(got).__name__}"
        if path.endswith(SECRETS):
            shown = "something else"
        elif got is None or isinstance(got, str | bool | int | float | list):
            shown = json.dumps(got, default=str)
        end = f"; {remedy}" if remedy else ""
        self.fail(path, f"got {shown}, wanted {wanted}{end}")

    def check_distinct(self, names: Sequence[str], path: str, other: str, remedy: str) -> None:
        """Refuses a name that an earlier entry has; `path` and `other` say where entries stand, by number."""
        for i, name in enumerate(names):
            first = names.index(name)
            if first != i:
                self.refuse(path.format(i), name, f"a name that {other.format(first)} does not have", remedy)

    def block(self, path: str, given: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
        """Checks the values of a block and of the blocks below it, and fills in defaults; notes keys without effect."""
        for name in given:
            if name not in keys:
                self.refuse_unknown(path, name, keys)
        values: dict[str, Any] = {}
        for name, key in keys.items():
            at = _join(path, name)
            if isinstance(key, Mapping):
                values |= self.block(at, self.value(at, given.get(name, {}), BLOCK), key)
            elif name in given:
                values[name] = self.value(at, given[name], key.kind)
                if key.reason:
                    self.note_no_effect(at, given[name], key.reason)
            elif key.default is REQUIRED:
                self.fail(at, f"got nothing, wanted {key.kind.wanted}; the key is required")
            else:
                values[name] = key.default
        return values

    def value(self, path: str, given: Any, kind: Kind) -> Any:
        parsed = kind.parse(given)
        if parsed is WRONG:
            unquoted = WRONG
            with contextlib.suppress(ValueError, RecursionError):
                unquoted = json.loads(given) if isinstance(given, str) else WRONG
            is_quoted = kind.parse(unquoted) is not WRONG
            self.refuse(path, given, kind.wanted, "write it without quotes" if is_quoted else "")
        if isinstance(parsed, str) and parsed in kind.refused:
            self.refuse(path, parsed, kind.wanted, kind.refused[parsed])
        if kind.items is not None:
            return tuple(self.value(f"{path}[{i}]", item, kind.items) for i, item in enumerate(parsed))
        return parsed

    def refuse_unknown(self, path: str, name: Any, keys: Keys) -> NoReturn:
        near = difflib.get_close_matches(str(name), keys, 1, 0.6)
        elsewhere = [block for block, others in _BLOCKS.items() if name in others]
        meant = f"it is a key of {elsewhere[0]}: move it there. " if elsewhere else ""
        meant = f'did you mean "{near[0]}"? ' if near else meant
        text = f"got an unknown key, wanted one of HPS 24.06 or jaxsok; {meant}HPS would ignore it: take it out if "
        self.fail(_join(path, str(name)), f"{text}nothing is meant")

    def note_no_effect(self, path: str, value: Any, reason: str) -> None:
        self.without.setdefault(path, values_lib.WithoutEffect(path, _freeze(value), reason))

    def note_block(self, name: str, given: Mapping[str, Any], reason: str) -> None:
        """Notes all keys of a block but `type`."""
        for key in set(given.get(name, ())) - {"type"}:
            self.note_no_effect(f"{name}.{key}", given[name][key], reason)

    def note_unfused(self, path: str, given: Mapping[str, Any]) -> None:
        if given.get("fuse_embedding_table") is False:
            reason = "one call looks up all tables of a request, and its bits are those of a call for each"
            self.note_no_effect(_join(path, "fuse_embedding_table"), False, reason)

    def check_updates(self, given: Mapping[str, Any], updates: UpdateSource) -> None:
        """Refuses a stream without a server; notes keys that set nothing without a stream."""
        if updates.type is None:
            self.note_block("update_source", given, "update_source has no type")
        elif not is_url_of_redis(updates.brokers):
            self.refuse("update_source.brokers", updates.brokers, URL_OF_REDIS, "Redis keeps the stream there")

    def check_databases(
        self, given: Mapping[str, Any], volatile: VolatileDb, persistent: PersistentDb, is_unused: bool
    ) -> None:
        """Refuses databases that do not fit each other; notes keys that set nothing in these."""
        for name, database in (("volatile_db", volatile), ("persistent_db", persistent)):
            if name in given and is_unused and database.type != "disabled":
                self.note_no_effect(f"{name}.type", database.type, "all rows of all models are on the device")
            if database.type not in ("redis_cluster", "rocks_db"):
                self.note_block(name, given, f"it is of a database, and {name} is {database.type}")
        is_rocks = persistent.type == "rocks_db"
        if is_rocks and volatile.type in ("hash_map", "parallel_hash_map") and not is_unused:
            remedy = 'a map (as without the block) holds every row in host memory: write {"type": "disabled"}'
            self.refuse("volatile_db.type", volatile.type, '"redis_cluster" or "disabled" above rocks_db', remedy)
        if volatile.type != "redis_cluster":
            return
        if volatile.max_batch_size > MOST_IN_REDIS:
            self.refuse("volatile_db.max_batch_size", volatile.max_batch_size, f"at most {MOST_IN_REDIS} for Redis")
        if volatile.initial_cache_rate < 1 and not is_rocks:
            remedy = "the other rows would be nowhere; take a persistent_db, which has them all"
            self.refuse("volatile_db.initial_cache_rate", volatile.initial_cache_rate, "1.0", remedy)
        if "num_partitions" not in given["volatile_db"]:
            took = f"{volatile.num_partitions}, the lesser of 16 and this machine's cores, as HPS"
            self.notes.append(
                f"volatile_db.num_partitions: took {took}; all who share the database must have the same: write it out."
            )

    def check_place_of_rows(self, path: str, model: ModelConfig) -> None:
        """Refuses a model whose rows need a database; notes where HPS would need one."""
        if model.tier != "device":
            what = "without gpucache" if model.tier == "host" else f"with gpucacheper {model.gpucacheper:g}"
            remedy = f"{path} {what} has rows that are not on the device: without a database lookups would answer the "
            remedy += 'default value for them. Or set gpucacheper to 1.0. A block without a type is "disabled"'
            self.refuse("volatile_db.type", "disabled", '"parallel_hash_map"', remedy)
        if model.embedding_cache_type == "dynamic":
            reason = "without a database HPS answers default values; here all rows are on the device"
            self.notes.append(f"{path}: {reason}.")

    def model(self, path: str, given: Mapping[str, Any]) -> ModelConfig:
        values = self.block(path, given, values_lib.MODEL_KEYS)
        values["tables"] = self.tables(path, values)
        self.refuse_remote(f"{path}.dense_file", values["dense_file"])
        interval = values["refresh_interval"]
        if not values["deployed_device_list"]:
            self.refuse(f"{path}.deployed_device_list", [], "the number of a device, as [0]")
        self.resolve_cache_type(path, given, values)
        got = given.get("refresh_interval", interval)
        if interval != got:
            self.notes.append(f"{path}.refresh_interval: got {got:g}, read as {interval}: whole seconds, as in HPS.")
        self.resolve_row_dtype(path, values)
        self.note_unfused(path, given)
        model = _make(ModelConfig, values)
        if model.is_split and model.tier != "device":
            remedy = "a split table lies on its devices; set gpucacheper to 1.0, or serve replicas of a cache"
            self.refuse(f"{path}.jaxsok.is_split", True, "false for rows below a cache or on the host", remedy)
        for key, reason in values_lib.idle_keys(model).items():
            if key in given:
                self.note_no_effect(f"{path}.{key}", given[key], reason)
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
        for key in values_lib.PER_TABLE:
            if len(values[key]) != len(files):
                wanted = f"{len(files)} entries, one for each of sparse_files"
                remedy = "or leave the key out" if key == "embedding_table_names" else ""
                self.refuse(f"{path}.{key}", list(values[key]), wanted, remedy)
        for i, file in enumerate(files):
            self.refuse_remote(f"{path}.sparse_files[{i}]", file)
        at, names = f"{path}.embedding_table_names[{{}}]", values["embedding_table_names"]
        self.check_distinct(names, at, "entry {}", "requests tell tables apart by it")
        columns = zip(*(values[key] for key in values_lib.PER_TABLE), strict=True)
        return tuple(TableConfig(**dict(zip(values_lib.PER_TABLE.values(), column, strict=True))) for column in columns)

    def refuse_remote(self, path: str, file: str) -> None:
        if _SCHEME.match(file) or "\0" in file:
            remedy = "a path has no zero byte" if "\0" in file else "copy the files here: no remote storage is read"
            self.refuse(path, file, "a path of this machine", remedy)

    def resolve_cache_type(self, path: str, given: Mapping[str, Any], values: dict[str, Any]) -> None:
        kind, at = values["embedding_cache_type"], f"{path}.embedding_cache_type"
        if values["use_static_table"]:
            if "embedding_cache_type" in given and kind != "static":
                self.note_no_effect(at, kind, "use_static_table makes it static, as in HPS")
            values["embedding_cache_type"] = kind = "static"
        if kind == "dynamic" and values["gpucache"] and values["gpucacheper"] == 0.0:
            at, remedy = f"{path}.gpucacheper", "set gpucache to false to read all rows from host memory"
            self.refuse(at, given.get("gpucacheper"), "a number above 0 for a dynamic cache", remedy)
        if kind != "dynamic" and not values["gpucache"]:
            remedy = f"a {kind} table has rows on the device; take a dynamic one without a cache"
            self.refuse(f"{path}.gpucache", False, f"true for a {kind} table", remedy)
        if kind != "uvm" or values["gpucacheper"] >= 1.0:
            return
        if values["dense_file"]:
            remedy = "exported models read tables whose rows are all on the device; take a dynamic cache"
            self.refuse(f"{path}.dense_file", values["dense_file"], "none with uvm", remedy)
        if len(set(values["deployed_device_list"])) > 1 and not values["is_split"]:
            at, remedy = f"{path}.deployed_device_list", "or set jaxsok.is_split, so that each device has its own rows"
            self.refuse(at, list(values["deployed_device_list"]), "one device with uvm", remedy)

    def resolve_row_dtype(self, path: str, values: dict[str, Any]) -> None:
        is_static = values["embedding_cache_type"] == "static"
        if values["enable_pagelock"] and is_static:
            remedy = "take a dynamic cache, whose rows lie in host memory, if they do not fit"
            self.refuse(f"{path}.enable_pagelock", True, "false", f"static tables lie in device memory; {remedy}")
        values["fp8_quant"] &= is_static
        if values["fp8_quant"]:
            if values["row_dtype"] not in (None, "float8_e4m3fn"):
                wanted = '"float8_e4m3fn", as fp8_quant says'
                self.refuse(f"{path}.jaxsok.row_dtype", values["row_dtype"], wanted, "take one of the two keys out")
            values["row_dtype"] = "float8_e4m3fn"


def _order(path: str) -> list[tuple[int, str]]:
    """Sorts lists by number, other names by letter."""
    return [(int(number), "") if number else (-1, name) for number, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)]


def _make(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _freeze(value: Any) -> Any:
    value = list(value.items()) if isinstance(value, Mapping) else value
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _json_of(config: Config) -> dict[str, Any]:
    models = []
    for model in config.models:
        lists = {key: [getattr(table, field) for table in model.tables] for key, field in values_lib.PER_TABLE.items()}
        models.append({**_keys_of(model), **lists})
    found: dict[str, Any] = {"supportlonglong": config.supportlonglong, "models": models}
    # Defaults that depend on the machine are written out.
    partitions = ("num_partitions",) if config.volatile_db.type == "redis_cluster" else ()
    for name, always in (("volatile_db", ("type", *partitions)), ("persistent_db", ("path",)), ("update_source", ())):
        value = getattr(config, name)
        if value != getattr(Config, name):
            found[name] = _keys_of(value, always)
    return found


def _keys_of(value: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """Gives the keys of a block that differ from their defaults or are in `always`, and those of the block `jaxsok`."""
    blocks: dict[str, dict[str, Any]] = {"": {}, "jaxsok": {}}
    for field in dataclasses.fields(value):
        key, given = field.metadata.get("key"), getattr(value, field.name)
        if key is not None and (given != key.default or field.name in always):
            blocks[field.metadata["block"]][field.name] = given
    return {**blocks[""], **({"jaxsok": blocks["jaxsok"]} if blocks["jaxsok"] else {})}
