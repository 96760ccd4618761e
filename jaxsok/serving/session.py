"""A session: the models of a configuration, opened, looked up in from many threads, and updated while they are.

Tables come from the folders that the configuration names (sources.py), lie where it says (frozen.py on a device or on
the host), are read by programs of few sizes (lookup.py), and change in versions (updates.py). Each answer is of one
version, whole.
"""

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.serving import config as config_lib
from jaxsok.serving import lookup as lookup_lib
from jaxsok.serving import sources, updates
from jaxsok.serving.config import Config, ModelConfig
from jaxsok.serving.errors import (
    ConfigError,
    RequestError,
    RequestTooLargeError,
    ServingError,
    UnknownModelError,
    UnknownTableError,
)
from jaxsok.serving.frozen import FrozenTable, FrozenTables, frozen_bytes
from jaxsok.serving.updates import InPlace, Source, Version, Versions
from jaxsok.types import COUNTS, PADDING_KEY

LEAST_SAMPLES = 16
"""Of a program: requests are padded to this many samples, or twice as many, and so on up to `max_batch_size`."""

_NO_KEYS = np.zeros(0, np.uint64)

MOST_SETS = 16
"""Sets of tables that have programs of their own; a request for yet another one looks up all tables of its model."""


class Answer(dict):
    """Arrays by name, all of one version.

    Example:
      >>> answer = Answer({"user": np.zeros((2, 4), np.float32)}, version=3)
      >>> answer.version, answer["user"].shape
      (3, (2, 4))
    """

    def __init__(self, values: Mapping[str, Any], *, version: int) -> None:
        """Of some arrays and their version."""
        super().__init__(values)
        self.version = version


@dataclasses.dataclass(frozen=True)
class Model:
    """What is known of a served model at one time."""

    name: str
    tables: Mapping[str, FrozenTable]
    num_rows: Mapping[str, int]
    """Of each table."""
    max_batch_size: int
    """Samples in a request."""
    max_keys: Mapping[str, int]
    """Keys of each table in a request: `max_batch_size` times keys of a sample."""
    key_bits: int
    """64, or 32: then keys are 0 to 2**32 - 1."""
    inputs: Mapping[str, Any] | None
    """Of `predict`, by name (`artifact.ServedModel.inputs`); None: there is no dense model."""
    version: int


def open(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    device: Any = None,
    *,
    warm_up: bool = True,
    memory_limit: int | None = None,
) -> "Session":
    """Opens all models of a configuration.

    Args:
      config: the path of an HPS JSON file, what is in one, or what `config.read` gave.
      device: of JAX; None: the one whose number is the last of `deployed_device_list`.
      warm_up: whether the programs of lookups are compiled now, so that no request waits for one.
      memory_limit: bytes of the device's memory that tables may take; None: all that the device says that is free.

    Raises:
      ConfigError: the configuration, or a device that is not there.
      ServingError, FileNotFoundError, CorruptFileError, ValueError: files; see `sources.open_table`. Or no room.

    Cost:
      Reads all files. Memory of a model: `frozen_bytes` of its tables, and 45 bytes a row on the host.

    Example:
      >>> import tempfile
      >>> from jaxsok import Records
      >>> from jaxsok.interchange.hps import write_hps
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = write_hps(folder, Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32)))
      ...     session = open({
      ...         "supportlonglong": True,
      ...         "models": [{
      ...             "model": "dlrm",
      ...             "sparse_files": [folder],
      ...             "embedding_table_names": ["user"],
      ...             "embedding_vecsize_per_table": [1],
      ...             "maxnum_catfeature_query_per_table_per_sample": [2],
      ...             "default_value_for_each_table": [-1.0],
      ...             "deployed_device_list": [0],
      ...             "gpucacheper": 1.0,
      ...         }],
      ...     })
      >>> answer = session.lookup({"user": np.array([[7, 8], [9, 9]])})
      >>> answer["user"].tolist(), answer.version
      ([[[1.0], [-1.0]], [[2.0], [2.0]]], 1)
    """
    read = config_lib.read(config)
    if memory_limit is not None and (isinstance(memory_limit, bool) or memory_limit < 0):
        raise ConfigError(f"open: memory_limit: got {memory_limit!r}, wanted bytes, or None.")
    return Session(read, device, warm_up=warm_up, memory_limit=memory_limit)


class Session:
    """Models that are served. Made by `open`; all methods may be called from many threads at the same time."""

    def __init__(self, config: Config, device: Any = None, *, warm_up: bool = True, memory_limit: int | None = None):
        """Opens the models; see `open`."""
        self.config = config
        self._memory_limit = memory_limit
        self._is_closed = False
        self._models: dict[str, _Served] = {}
        try:
            for number, model in enumerate(config.models):
                if model.tier == "cache":
                    raise ConfigError(
                        f"open: models[{number}].gpucacheper: got {model.gpucacheper}, wanted 1.0 or more: a cache "
                        "over host memory is not there yet.",
                        path=f"models[{number}].gpucacheper",
                    )
                at = _device(number, model, device)
                self._models[model.model] = _Served(
                    model, config.key_bits, at, functools.partial(self._room, at), warm_up=warm_up
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        """Itself; closed at the end."""
        return self

    def __exit__(self, *args: object) -> None:
        """Closes."""
        self.close()

    @property
    def models(self) -> Mapping[str, Model]:
        """The models as they are now, by name."""
        return {name: served.described() for name, served in self._models.items()}

    def lookup(self, keys: Mapping[str, Any], model: str | None = None) -> Answer:
        """Reads rows.

        Args:
          keys: NumPy integers of any shape by table; not every table needs some. Negative int64 are the uint64 of the
            same bits; PADDING_KEY (-1) reads zeros.
          model: its name; None, if there is one.

        Returns:
          float32 `[*shape, dim]` by table, read-only; keys that are not there read the default of their table.

        Raises:
          UnknownModelError, UnknownTableError: there is none.
          RequestError: keys of the wrong type, or that do not fit 32 bits where keys have so many.
          RequestTooLargeError: more keys of a table than `Model.max_keys`.
        """
        return self._served("lookup", model).lookup(keys)

    def predict(self, inputs: Mapping[str, Any], model: str | None = None) -> Answer:
        """Runs the dense model over the tables.

        Args:
          inputs: by name, as `Model.inputs` tells.
          model: its name; None, if there is one.

        Returns:
          Its outputs, by name.

        Raises:
          UnknownModelError: there is none, or it has no dense model.
          RequestError, RequestTooLargeError: inputs that are missing, of the wrong type or shape, or too many.
        """
        return self._served("predict", model).predict(inputs)

    def update(
        self,
        source: Source | None,
        *,
        model: str | None = None,
        dense_file: str | os.PathLike[str] | None = None,
        in_place: InPlace = "auto",
    ) -> int:
        """Brings tables, and the dense model if one is given, to a new version, while lookups go on.

        A lookup reads all its tables before the update or all after it. Where anything is refused or fails, what was
        served before is served still.

        Args:
          source: a folder: an export of `jaxsok.checkpoint` (a delta must follow what is served), a step of an Orbax
            checkpoint, or HPS directories in folders of the tables' names. Or a mapping from tables to such folders, or
            to HPS directories. Tables that are not there stay. None: only the dense model changes.
          model: its name; None, if there is one.
          dense_file: an artifact that takes the place of the dense model in the same instant; None: it stays.
          in_place: False: the new version is made beside the old one, in new arrays for what changes. True: rows are
            changed where they lie; lookups wait meanwhile, and new keys take spare rows. "auto": in place where two
            copies do not fit.

        Returns:
          The number of the version.

        Raises:
          ServingError: it does not fit what is served, or there is no room; the message has the bytes or the rows.
          UnknownModelError, UnknownTableError: there is none.
          FileNotFoundError, CorruptFileError, ValueError: of files, as `sources.open_table`.

        Cost:
          Beside: a copy of the rows of each store that changes (tables of one dim and dtype share a store). In place:
          the changed rows, old and new, in host memory. Both: a copy of the store's map of rows (45 bytes a row) on the
          host, and a new index (25 bytes a row) on the device.
        """
        return self._served("update", model).update(source, dense_file, in_place)

    def refresh(self, model: str | None = None) -> None:
        """Reads the rows of a device's cache anew from the tier below; without a cache there is nothing to do.

        Args:
          model: its name; None, if there is one.
        """
        self._served("refresh", model).refresh()

    def stats(self, model: str | None = None) -> dict[str, Any]:
        """What was done, in numbers.

        Args:
          model: its name; None, if there is one.

        Returns:
          `version` and `source` (the folders of its tables); `lookups`, `predicts`, `updates`; of lookups `keys`,
          `hits`, `missing` (read the default), `padding` and `hit_rate`; `bytes` of the device and `host_bytes`; and
          `tables`: the same of each.
        """
        return self._served("stats", model).stats()

    def report(self) -> str:
        """What was loaded, as text: tables, memory, limits, and keys of the configuration without effect."""
        self._require_open("report")
        lines = list(self.config.summary())
        for served in self._models.values():
            lines += served.report()
        return "\n".join(lines)

    def close(self) -> None:
        """Gives the memory back. Lookups that run end; later ones are refused."""
        self._is_closed = True
        models, self._models = self._models, {}
        for served in models.values():
            served.close()

    def _require_open(self, op: str) -> None:
        if self._is_closed:
            raise ServingError(f"{op}: session: got one that is closed, wanted an open one.")

    def _served(self, op: str, model: str | None) -> "_Served":
        models = self._models
        self._require_open(op)
        if model is None and len(models) == 1:
            return next(iter(models.values()))
        if not isinstance(model, str) or model not in models:
            raise UnknownModelError.of(op, model, models)
        return models[model]

    def _room(self, device: Any) -> int | None:
        used = sum(served.num_bytes for served in self._models.values() if served.device == device)
        return updates.free_bytes(device, self._memory_limit, used)


class _Served:
    """One model of a session."""

    def __init__(
        self,
        config: ModelConfig,
        key_bits: sources.KeyBits,
        device: Any,
        room: Callable[[], int | None],
        *,
        warm_up: bool,
    ) -> None:
        self.config, self.key_bits, self.device, self.is_warmed_up = config, key_bits, device, warm_up
        given = []
        for table in config.tables:
            source = sources.open_table(table.file, table=table.name, dim=table.dim, key_bits=key_bits, op="open")
            dtype: Any = config.row_dtype or source.dtype
            given.append((FrozenTable(table.name, table.dim, default=table.default, dtype=dtype), source))
        served = _dense_model(config.dense_file) if config.dense_file else None
        self.versions = Versions(
            config.model,
            given,
            device=device,
            key_bits=key_bits,
            spare_rows=config.spare_rows,
            room=room,
            served=served,
            dense_file=config.dense_file,
        )
        self.workers = threading.BoundedSemaphore(config.num_of_worker_buffer_in_pool)
        self.names = tuple(self.versions.current.tables.tables)
        self.per_sample = {table.name: table.max_keys_per_sample for table in config.tables}
        self.counts = _Counts(self.names)
        self._sets, self._lock = {self.names}, threading.Lock()
        if warm_up:
            self.warm_up(self.versions.current.tables)

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return self.versions.current.tables.num_bytes

    def described(self) -> Model:
        version = self.versions.current
        return Model(
            name=self.config.model,
            tables=version.tables.tables,
            num_rows=version.num_rows,
            max_batch_size=self.config.max_batch_size,
            max_keys=self.config.max_keys,
            key_bits=self.key_bits,
            inputs=None if version.served is None else version.served.inputs,
            version=version.number,
        )

    # Lookups ---------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Mapping[str, Any]) -> Answer:
        arrays = self._read_keys(keys)
        sizes = self._sizes({name: array.size for name, array in arrays.items()})
        words = [
            _padded(arrays[name], size) if name in arrays else keys_lib.padding_words((size,)) for name, size in sizes
        ]
        with self.workers:
            with self.versions.reading() as version:
                calls = self._dispatched(version.tables, words, sizes)
            # What the arrays of a version give is the caller's: nobody waits for the copies.
            for leaf in jax.tree.leaves(calls):
                leaf.copy_to_host_async()
            found, counts = {}, np.zeros((len(self.names), len(COUNTS)), np.int64)
            for values, of_call in calls:
                found |= {name: np.asarray(value) for name, value in values.items() if name in arrays}
                counts += np.asarray(of_call)
        values = {}
        for name, array in arrays.items():
            rows = found[name][: array.size]
            values[name] = rows.reshape(*array.shape, rows.shape[-1])
        self.counts.add(counts, {name: array.size for name, array in arrays.items()})
        return Answer(values, version=version.number)

    def _dispatched(
        self, tables: FrozenTables, words: Sequence[np.ndarray], sizes: tuple[tuple[str, int], ...]
    ) -> list[tuple[dict[str, Array], Array]]:
        """The calls that look up all tables: one, or if they are not fused one for each."""
        if self.config.is_fused:
            return [_looked_up(tables, np.concatenate(words), sizes)]
        return [_looked_up(tables, mine, (size,)) for mine, size in zip(words, sizes, strict=True)]

    def _sizes(self, num_keys: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Tables that are looked up, and to how many keys each is padded."""
        names = tuple(name for name in self.names if name in num_keys)
        with self._lock:
            if names not in self._sets and len(self._sets) < MOST_SETS:
                self._sets.add(names)
            is_known = names in self._sets
        # Single tables have programs of their own, which the tables of other sets share.
        chosen = names if is_known or not self.config.is_fused else self.names
        samples = max(-(-num_keys[name] // self.per_sample[name]) for name in names)
        level = next(level for level in self.levels if level >= samples)
        return tuple((name, level * self.per_sample[name]) for name in chosen)

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Samples that programs are made for."""
        most = self.config.max_batch_size
        doubled = [LEAST_SAMPLES << step for step in range(max(0, math.ceil(math.log2(most / LEAST_SAMPLES))))]
        return (*doubled, most)

    def warm_up(self, tables: FrozenTables) -> None:
        """Compiles the programs of lookups in all tables."""
        for level in self.levels:
            sizes = tuple((name, level * self.per_sample[name]) for name in self.names)
            words = [keys_lib.padding_words((size,)) for _, size in sizes]
            jax.block_until_ready(self._dispatched(tables, words, sizes))

    def _read_keys(self, keys: Any) -> dict[str, np.ndarray]:
        """The keys of a request as uint64, checked."""
        op = "lookup"
        if not isinstance(keys, Mapping):
            raise RequestError(f"{op}: keys: got {type(keys).__name__}, wanted a mapping from tables to keys.")
        if not keys:
            raise RequestError(f"{op}: keys: got no tables, wanted at least one of {sorted(self.names)}.")
        limits, arrays = self.config.max_keys, {}
        for name, given in keys.items():
            if not isinstance(name, str) or name not in limits:
                raise UnknownTableError.of(op, name, self.names, f'model "{self.config.model}"')
            what = f'{op}: table "{name}"'
            array = _integers(given, what)
            if array.size > limits[name]:
                raise RequestTooLargeError(
                    f"{what}: keys: got {array.size}, wanted at most {limits[name]}: max_batch_size "
                    f"({self.config.max_batch_size}) times {self.per_sample[name]} of a sample."
                )
            arrays[name] = self._of_bits(array, what)
        return arrays

    def _of_bits(self, array: np.ndarray, what: str) -> np.ndarray:
        """Keys as uint64."""
        keys = array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)
        if self.key_bits == 32:
            wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
            if wrong.any():
                raise RequestError(
                    f"{what}: keys: got {array[wrong].flat[0]}, wanted 0 to 4294967295: keys have 32 bits, since "
                    "supportlonglong is false."
                )
        return keys

    # The dense model -------------------------------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Answer:
        op = "predict"
        if self.versions.current.served is None:
            raise UnknownModelError(
                f'{op}: model: got "{self.config.model}", which has no dense_file, wanted one that has; lookup reads '
                "its tables."
            )
        with self.workers:
            with self.versions.reading() as version:
                checked = self._read_inputs(version, inputs)
                values = version.served.call(version.tables, checked)
            values = {name: np.asarray(value) for name, value in values.items()}
        self.counts.add_predict()
        return Answer(values, version=version.number)

    def _read_inputs(self, version: Version, inputs: Any) -> dict[str, Any]:
        raise NotImplementedError

    # Versions --------------------------------------------------------------------------------------------------------

    def update(self, source: Source | None, dense_file: str | os.PathLike[str] | None, in_place: InPlace) -> int:
        served = None if dense_file is None else _dense_model(dense_file)
        version = self.versions.update(
            source,
            in_place=in_place,
            served=served,
            dense_file=None if dense_file is None else str(dense_file),
            prepare=self._prepare,
        )
        self.counts.add_update()
        return version.number

    def _prepare(self, old: Version, new: Version) -> None:
        """Compiles what a new version needs, before it is served."""
        if self.is_warmed_up and jax.tree.map(np.shape, old.tables) != jax.tree.map(np.shape, new.tables):
            self.warm_up(new.tables)

    def refresh(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        version = self.versions.current
        found = self.counts.stats()
        for name, of_table in found["tables"].items():
            of_table |= {"num_rows": version.num_rows[name], "source": version.files[name]}
        return {
            "version": version.number,
            "source": dict(version.files),
            "dense_file": version.dense_file,
            **found,
            "in_place_updates": self.versions.num_in_place,
            "bytes": version.tables.num_bytes,
            "host_bytes": self.versions.host_bytes,
        }

    def report(self) -> list[str]:
        version = self.versions.current
        lines = [
            f'model "{self.config.model}", version {version.number}: {version.tables.num_bytes:,} bytes on '
            f"{self.device}, {self.versions.host_bytes:,} bytes of maps on the host"
        ]
        for name, table in version.tables.tables.items():
            num_rows = version.num_rows[name]
            lines.append(
                f'  table "{name}": {num_rows:,} rows of {table.dim} x {table.dtype}, default {table.default:g}, '
                f"{sum(frozen_bytes(table, num_rows).values()):,} bytes, at most {self.config.max_keys[name]:,} keys "
                f"in a request, from {version.files[name]}"
            )
        return lines

    def close(self) -> None:
        pass


class _Counts:
    """Numbers of a model, added up."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._lock = tuple(names), threading.Lock()
        self._counts = np.zeros((len(names), len(COUNTS)), np.int64)
        self._keys = dict.fromkeys(names, 0)
        self._lookups = self._predicts = self._updates = 0

    def add(self, counts: np.ndarray, num_keys: Mapping[str, int]) -> None:
        """A lookup."""
        with self._lock:
            self._counts += counts
            self._lookups += 1
            for name, count in num_keys.items():
                self._keys[name] += count

    def add_predict(self) -> None:
        """A prediction."""
        with self._lock:
            self._predicts += 1

    def add_update(self) -> None:
        """An update."""
        with self._lock:
            self._updates += 1

    def stats(self) -> dict[str, Any]:
        """All of it."""
        with self._lock:
            counts, keys = self._counts.copy(), dict(self._keys)
            done = {"lookups": self._lookups, "predicts": self._predicts, "updates": self._updates}
        tables = {}
        for name, line in zip(self._names, counts, strict=True):
            of = dict(zip(COUNTS, line.tolist(), strict=True))
            tables[name] = _rates(keys[name], of["num_found"], of["num_missing"])
        names = ("keys", "hits", "missing", "padding")
        total = {name: sum(table[name] for table in tables.values()) for name in names}
        return {**done, **_rates(total["keys"], total["hits"], total["missing"]), "tables": tables}


def _rates(keys: int, hits: int, missing: int) -> dict[str, Any]:
    """Keys that are found, and those that are not; the rest is padding."""
    rate = hits / (hits + missing) if hits + missing else 1.0
    return {"keys": keys, "hits": hits, "missing": missing, "padding": keys - hits - missing, "hit_rate": rate}


@functools.partial(jax.jit, static_argnums=2)
def _looked_up(
    tables: FrozenTables, words: jaxtyping.UInt32[Any, "num_keys 2"], sizes: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Array], Array]:
    """The rows of the keys of some tables, that lie behind each other, and what became of them."""
    inputs, start = {}, 0
    for name, size in sizes:
        inputs[name] = lookup_lib.LookupInput(name, words[start : start + size])
        start += size
    return lookup_lib.lookup_with_counts(tables, inputs)


def _padded(keys: np.ndarray, size: int) -> np.ndarray:
    """Keys as words, filled up with padding."""
    words = keys_lib.padding_words((size,))
    words[: keys.size] = keys_lib.to_words(keys.reshape(-1))
    return words


def _integers(given: Any, what: str) -> np.ndarray:
    """Keys as an array of integers."""
    if isinstance(given, jax.Array):
        raise RequestError(
            f"{what}: keys: got a jax.Array, which may be an int64 that JAX narrowed, wanted NumPy integers."
        )
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{what}: keys: got no array ({error}), wanted NumPy integers.") from error
    if array.dtype.kind not in "iu":
        raise RequestError(
            f"{what}: keys: got {array.dtype}{list(array.shape)}, wanted integers; pass NumPy int64 or uint64."
        )
    if array.ndim == 0:
        raise RequestError(f"{what}: keys: got a scalar, wanted an array of at least one axis.")
    return array


def _device(number: int, model: ModelConfig, given: Any) -> Any:
    """Where the rows of a model lie."""
    if model.tier == "host":
        return jax.local_devices(backend="cpu")[0]
    if given is not None:
        return given
    devices = jax.local_devices()
    if model.device_id >= len(devices):
        raise ConfigError(
            f"open: models[{number}].deployed_device_list: got {model.device_id}, wanted 0 to {len(devices) - 1}, the "
            "devices that are there; or pass device=.",
            path=f"models[{number}].deployed_device_list",
        )
    return devices[model.device_id]


def _dense_model(path: str | os.PathLike[str]) -> Any:
    from jaxsok.serving import artifact

    return artifact.load_model(path)
