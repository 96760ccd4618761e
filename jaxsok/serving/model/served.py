"""A model of a session, wherever its rows are read."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib
from jaxsok.interrupts import held_back
from jaxsok.serving import artifact, cache as cache_lib, errors, folders
from jaxsok.serving.artifact.model import require_fit
from jaxsok.serving.config import Config, ModelConfig, TableConfig, read as read_config
from jaxsok.serving.databases import Connected
from jaxsok.serving.frozen import FrozenTable, FrozenTables, freeze_records, frozen_bytes, rows_on_device
from jaxsok.serving.model.readers import (
    CachedRows,
    DeviceRows,
    Found,
    PredictRequest,
    RowReader,
    add_cache_stats,
    keys_in,
)
from jaxsok.serving.model.stored import StoredVersions
from jaxsok.serving.model.versions import AnyVersions, InPlace, Memory, Source, Versions
from jaxsok.serving.ready import rest_s
from jaxsok.types import PADDING_KEY

_LOOK_S = 0.002  # between two looks whether the last request has ended


class Answer(dict):
    """Arrays by name, all of one version.

    Example:
      >>> answer = Answer({"user": np.zeros((2, 4), np.float32)}, version=3)
      >>> answer.version, answer["user"].shape
      (3, (2, 4))
    """

    def __init__(self, values: Mapping[str, Any], *, version: int) -> None:
        super().__init__(values)
        self.version = version


@dataclasses.dataclass(frozen=True)
class Model:
    """A served model as it is at one time."""

    name: str
    tables: Mapping[str, FrozenTable]
    num_rows: Mapping[str, int]
    """The rows of each table."""
    max_batch_size: int
    """Samples in a request."""
    max_keys: Mapping[str, int]
    """Keys of each table in a request: `max_batch_size` times keys of a sample."""
    key_bits: int
    """Either 64, or 32: then keys are 0 to 2**32 - 1."""
    inputs: Mapping[str, Any] | None
    """The inputs of `predict` (`artifact.ServedModel.inputs`); None: no dense model."""
    outputs: Mapping[str, Any] | None
    """The outputs of `predict` (`artifact.ServedModel.outputs`); None: no dense model."""
    version: int
    exports: Mapping[str, str | None]
    """The `uuid` of the export that each table holds; None: no delta can follow what it holds."""
    opened: Mapping[str, Sequence[str]]
    """The `uuid`s of the exports, up to this one, with which each table was opened; none after its update."""


class Served:
    """A model of a session: checks and counts requests, answers each from one version, and makes the next version.

    Many threads call it. It starts and owns `readers`, which read the rows that lie, or are cached, on `devices`.
    A request goes to the reader with the fewest requests. A version is published to one cache after the other, so for
    that moment requests get answers of both; each is whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        versions: AnyVersions,
        devices: Sequence[Any],
        readers: Sequence[RowReader],
        *,
        warm_up: bool,
    ) -> None:
        self.config, self.versions, self.devices, self.readers = config, versions, devices, readers
        self.names = tuple(versions.current.tables.tables)
        self._max_keys = config.max_keys  # each access of it computes all of them
        self.workers = _Workers(config.num_of_worker_buffer_in_pool * len(devices))
        self.counts = _Counts(self.names)
        self._lock = threading.Lock()
        # Under `_lock`: the requests of each reader that have begun, and whose turn it is among equals.
        self._running, self._turn = [0] * len(readers), 0
        try:
            for reader in readers:
                reader.start(warm_up=warm_up)
        except BaseException:
            for reader in readers:
                reader.close(None)
            raise

    def close(self, until: float | None) -> bool:
        """Waits for calls that run, until a time of `time.monotonic`, then ends; returns whether all has ended."""
        have_ended = [self.workers.close(until), self.versions.close(until)]
        return all([*have_ended, *(reader.close(until) for reader in self.readers)])

    @property
    def num_bytes(self) -> int:
        return sum(reader.num_bytes for reader in self.readers)

    @property
    def device_bytes(self) -> int:
        """Bytes of each device's memory, with those of a version that is not served yet."""
        each = -(-self.num_bytes // len(self.devices))
        return each + (self.versions.held_bytes if self.config.tier == "device" else 0)

    def describe(self) -> Model:
        version = self.versions.current
        return Model(
            name=self.config.model,
            tables=version.tables.tables,
            num_rows=version.num_rows,
            max_batch_size=self.config.max_batch_size,
            max_keys=self.config.max_keys,
            key_bits=self.versions.key_bits,
            inputs=None if version.served is None else version.served.inputs,
            outputs=None if version.served is None else version.served.outputs,
            version=version.number,
            exports=version.uuids,
            opened=version.opened,
        )

    def lookup(self, keys: Mapping[str, Any]) -> Answer:
        arrays = self._read_keys(keys)
        return self._answer("lookups", lambda reader: reader.lookup(arrays))

    def predict(self, inputs: Any) -> Answer:
        return self._answer("predicts", lambda reader: reader.predict(functools.partial(self._read_inputs, inputs)))

    def _answer(self, done: str, read: Callable[[RowReader], Found]) -> Answer:
        is_one = len(self.readers) == 1
        # Ctrl-C on the way in or out would lose a worker, or leave a reader that updates wait for.
        with (
            held_back(),
            self.workers,
            contextlib.nullcontext(self.readers[0]) if is_one else self._least_busy() as reader,
        ):
            values, version, (names, lines) = read(reader)
        self.counts.add(done, names, lines)
        return Answer(values, version=version)

    @contextlib.contextmanager
    def _least_busy(self) -> Iterator[RowReader]:
        count = len(self.readers)
        with self._lock:
            turns = ((self._turn + step) % count for step in range(1, count + 1))
            self._turn = number = min(turns, key=self._running.__getitem__)
            self._running[number] += 1
        try:
            yield self.readers[number]
        finally:
            with self._lock:
                self._running[number] -= 1

    def _read_keys(self, keys: Any) -> dict[str, np.ndarray]:
        op = "lookup"
        errors.require_mapping(f"{op}: keys", keys, "tables to keys")
        if not keys:
            raise errors.RequestError(f"{op}: keys: got no tables, wanted at least one of {sorted(self.names)}.")
        arrays = {}
        for name, given in keys.items():
            if type(given) is np.ndarray and given.dtype == np.uint64 and self._is_ready(name, given):
                arrays[name] = given
                continue
            errors.require_table(op, name, self.names, f'model "{self.config.model}"')
            what = f'{op}: table "{name}"'
            if type(given) is np.ndarray and given.dtype == np.uint64 and given.ndim > 0:
                arrays[name] = np.ascontiguousarray(given)
            else:
                with errors.refusals():
                    arrays[name] = keys_lib.from_words(keys_lib.words_of(given, "int64", what))
            self._check_number(what, name, arrays[name].size)
            check_bits(what, arrays[name], self.versions.key_bits)
        return arrays

    def _is_ready(self, name: Any, given: np.ndarray) -> bool:
        """Returns whether nothing has to be done or refused for an array of uint64, in less time than to do it."""
        most = self._max_keys.get(name, -1) if isinstance(name, str) else -1
        return given.size <= most and given.ndim > 0 and given.flags.c_contiguous and self.versions.key_bits == 64

    def _read_inputs(self, inputs: Any, served: artifact.ServedModel | None) -> PredictRequest:
        op = "predict"
        if served is None:
            raise errors.UnknownModelError(
                f'{op}: model: got "{self.config.model}", which has no dense_file, wanted one that has; lookup reads '
                "its tables."
            )
        leaves, num_samples = served.read(inputs)
        if num_samples > self.config.max_batch_size:
            wanted = f"at most {self.config.max_batch_size}, the max_batch_size"
            raise errors.RequestTooLargeError(f"{op}: inputs: got {num_samples} samples, wanted {wanted}.")
        if num_samples == 0 and not served.is_per_sample:
            raise errors.RequestError(f"{op}: inputs: got a batch of no samples, wanted one at least.")
        num_keys: collections.Counter[str] = collections.Counter()
        for name, spec in served.inputs.items():
            if not isinstance(spec, artifact.ArrayInput):
                keys = keys_in(leaves[name])
                check_bits(f'{op}: inputs["{name}"]', keys, self.versions.key_bits)
                num_keys[spec.table] += keys.size
        for table, number in num_keys.items():
            self._check_number(f'{op}: table "{table}"', table, number)
        if served.is_per_sample:
            leaves = served.pad(leaves, num_samples)
        return PredictRequest(served, leaves, num_samples)

    def _check_number(self, what: str, table: str, num_keys: int) -> None:
        most = self._max_keys[table]
        if num_keys > most:
            raise errors.RequestTooLargeError(
                f"{what}: keys: got {num_keys}, wanted at most {most}: max_batch_size ({self.config.max_batch_size}) "
                f"times {most // self.config.max_batch_size} of a sample."
            )

    def update(self, source: Source | None, dense_file: str | os.PathLike[str] | None, in_place: InPlace) -> int:
        dense_model = None
        if source is None and dense_file is None:
            raise errors.ServingError("update: source: got None without a dense_file, wanted at least one of the two.")
        if dense_file is not None:
            tables = self.versions.current.tables.tables
            dense_model = load_dense_model("update", self.config, dense_file, tables, self.devices[0]), str(dense_file)
        version = self.versions.update(source, in_place=in_place, dense_model=dense_model, readers=self.readers)
        self.counts.add("updates")
        return version.number

    def stats(self) -> dict[str, Any]:
        version, stats = self.versions.current, self.counts.stats()
        for name, of_table in stats["tables"].items():
            of_table |= {"num_rows": version.num_rows[name], "source": version.files[name]}
        stats = {
            "version": version.number,
            "source": dict(version.files),
            "dense_file": version.dense_file,
            **stats,
            "in_place_updates": self.versions.num_in_place,
            "bytes": self.num_bytes,
            "host_bytes": self.versions.host_bytes,
        }
        caches = [reader for reader in self.readers if isinstance(reader, CachedRows)]
        if caches:
            add_cache_stats(stats, caches)
        return stats

    def report(self) -> list[str]:
        version = self.versions.current
        lines = [
            f'model "{self.config.model}", version {version.number}: {self.num_bytes:,} bytes on '
            f"{' and '.join(map(str, self.devices))}, {self.versions.host_bytes:,} bytes of host memory; of them"
        ]
        for name, table in version.tables.tables.items():
            num_rows = version.num_rows[name]
            size = ""
            if self.config.tier != "cache":  # a cache has some of the rows
                on_device = frozen_bytes(table, num_rows, rows_on_device(num_rows, self.config.device_share))
                size = f"{sum(on_device.values()):,} bytes, "
            lines.append(
                f'  table "{name}": {num_rows:,} rows of {table.dim} x {table.dtype}, {table.missing}, {size}'
                f"at most {self._max_keys[name]:,} keys in a request, from {version.files[name]}"
            )
        if version.served is not None:
            lines.append(f"  dense model of inputs {list(version.served.inputs)}, from {version.dense_file}")
        return lines


def check_bits(what: str, keys: np.ndarray, key_bits: int) -> None:
    """Refuses keys above 32 bits, other than PADDING_KEY, if the model's keys have 32 bits."""
    if key_bits == 64:
        return
    wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
    if wrong.any():
        raise errors.RequestError(
            f"{what}: keys: got {keys[wrong].view(np.int64)[0]}, wanted 0 to 4294967295: keys have 32 bits, since "
            "supportlonglong is false."
        )


_KINDS: tuple[str, ...] = ("keys", "hits", "missing", "padding")


class _Workers:
    """A semaphore that lets threads in one after the other, in the order in which they came.

    With `threading.Semaphore` a thread that asks again at once keeps others out, for as long as it goes on.
    """

    def __init__(self, number: int) -> None:
        self._number, self._lock = number, threading.Lock()
        # Under `_lock`: how many may come in at once, and the locks at which others wait. There are none while some are
        # free, since who leaves hands its place to the first. If it is closed, no thread comes in or begins to wait.
        self._num_free, self._waiting, self._is_closed = number, collections.deque[Any](), False

    def close(self, until: float | None) -> bool:
        """Refuses later threads, and waits for those inside and those that wait; returns whether all have left."""
        with self._lock:
            self._is_closed = True
        while self._num_free < self._number:
            if rest_s(until) == 0:
                return False
            time.sleep(_LOOK_S)
        return True

    def __enter__(self) -> None:
        with self._lock:
            if self._is_closed:
                raise errors.ServingError("lookup, predict: session: got one that is closed, wanted an open one.")
            if self._num_free:
                self._num_free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while it waits
            with self._lock:
                is_waiting = turn in self._waiting
                if is_waiting:
                    self._waiting.remove(turn)
            if not is_waiting:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._num_free += 1


class _Counts:
    def __init__(self, names: Sequence[str]) -> None:
        self._lock = threading.Lock()
        # Changed and read under `_lock`, so that the sums of one answer are seen together.
        self._done = collections.Counter(lookups=0, predicts=0, updates=0)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._sums = np.zeros((len(names), len(_KINDS)), np.int64)

    def add(self, done: str, names: tuple[str, ...] = (), lines: np.ndarray | None = None) -> None:
        """Counts one of "lookups", "predicts" and "updates", and the keys that it read: a line of `_KINDS` by table."""
        numbers = [self._numbers[name] for name in names]  # distinct ones
        with self._lock:
            self._done[done] += 1
            if lines is not None:
                self._sums[numbers] += lines

    def stats(self) -> dict[str, Any]:
        with self._lock:
            done, sums = dict(self._done), self._sums.copy()
        tables = {name: _with_rate(sums[number]) for name, number in self._numbers.items()}
        return {**done, **_with_rate(sums.sum(axis=0)), "tables": tables}


def _with_rate(numbers: Any) -> dict[str, Any]:
    counts = dict(zip(_KINDS, numbers.tolist(), strict=True))
    real = counts["hits"] + counts["missing"]
    return {**counts, "hit_rate": counts["hits"] / real if real else 1.0}


def open_model(
    whole: Config, config: ModelConfig, device: Memory, host: Memory, databases: Connected, *, warm_up: bool
) -> Served:
    """Opens the files of a model, and serves it from a device; other rows lie on the host, or in databases."""
    given = [_open_table(config, table, whole.key_bits) for table in config.tables]
    dense_model = None
    if config.dense_file:
        tables = {table.name: table for table, _ in given}
        dense_model = load_dense_model("open", config, config.dense_file, tables, device.devices[0])
    is_cached = config.tier == "cache"
    num_rows, stored = {table: source.num_rows for table, source in given}, None
    if any(databases) and config.tier != "device":
        stored = StoredVersions(whole, config, given, databases, dense_model)
        num_rows = {table: stored.current.num_rows[table.name] for table, _ in given}
    if is_cached:
        rows = {table: max(cache_lib.MIN_ROWS, math.ceil(config.gpucacheper * n)) for table, n in num_rows.items()}
        needed, why = cache_lib.cache_bytes(rows).values(), f"its cache; take a gpucacheper below {config.gpucacheper}"
        device.require("open", config.model, device.free(), sum(needed), why)
    if config.device_share < 1:
        share, needed = config.device_share, 0
        for table, number in num_rows.items():
            needed += (number + config.spare_rows - rows_on_device(number, share)) * table.row_bytes
        why = f"rows that the device reads in host memory; take a gpucacheper above {config.gpucacheper}"
        host.require("open", config.model, host.free(), needed, why)
    memory = device if config.tier == "device" else host
    versions = stored or Versions(config, given, whole.key_bits, memory, dense_model)
    if is_cached or isinstance(versions, StoredVersions):
        readers = [CachedRows(config, versions, at) for at in device.devices]
    else:
        parts = range(len(versions.current.parts))
        together = [parts] if config.is_split else [[part] for part in parts]
        readers = [DeviceRows(config, versions, numbers) for numbers in together]
    served = Served(config, versions, device.devices, readers, warm_up=warm_up)
    for part in versions.current.own_parts:
        for of_store in part.maps:
            of_store.frequencies = None  # only the first filling of a cache needs them
    return served


def load_dense_model(
    op: str, config: ModelConfig, path: str | os.PathLike[str], tables: Mapping[str, FrozenTable], device: Any
) -> artifact.ServedModel:
    """Loads an artifact; refuses one that does not fit the tables, their tier or their device."""
    served = artifact.load_model(path, device)
    what = f'{op}: model "{config.model}": dense_file: "{path}"'
    require_fit(f"{what}: tables", served.tables.values(), tables)
    if config.is_split:
        raise errors.ServingError(
            f"{what}: got a dense model over tables that are split over devices (jaxsok.split), wanted none: it reads "
            "tables of one device. Look rows up, or serve replicas, or a cache."
        )
    if config.device_share < 1:
        raise errors.ServingError(
            f"{what}: got a dense model over tables some of whose rows the device reads in host memory (uvm), wanted "
            "none: exported models read tables whose rows are all on the device. Take a dynamic cache."
        )
    unknown = [name for name, inputs in served.lookups.items() if inputs is None]
    if config.tier == "cache" and unknown:
        raise errors.ServingError(
            f"{what}: got a model that reads {unknown} by keys that are not the keys of an input (it works them out, "
            "or was exported before that was written down), wanted inputs alone: over a cache only their rows are "
            "fetched. Give those keys as a KeysInput or BagsInput and export again, or take a gpucacheper of 1.0, "
            "where all rows are on the device."
        )
    return served


def _open_table(
    config: ModelConfig, table: TableConfig, key_bits: folders.KeyBits, op: str = "open", *, hotness: bool = False
) -> folders.Frozen:
    hotness = hotness or config.chooses_by_uses
    source = folders.open_table(table.file, table=table.name, dim=table.dim, key_bits=key_bits, hotness=hotness, op=op)
    what = f'{op}: model "{config.model}": table "{table.name}": default_value_for_each_table'
    return folders.to_frozen(what, source, config.row_dtype, table.default)


def open_for_export(
    op: str, path: str, model: str | None = None, dtype: Any = None, *, hotness: bool = False
) -> list[folders.Frozen]:
    """Opens the tables of an export, a delta or a checkpoint, or those of a model of an HPS configuration (.json).

    `hotness` reads how often each row was used, also where the configuration has no use for it.
    """
    if not path.endswith(".json"):
        if model is not None:
            raise errors.ServingError(f'{op}: model: got "{model}", wanted none: "{path}" is no configuration (.json).')
        saved = folders.open_saved(op, path)
        return [folders.to_frozen(f'{op}: table "{source.table}": default', source, dtype) for source in saved]
    config = read_config(path)
    chosen = choose_model(op, config, model)
    chosen = dataclasses.replace(chosen, row_dtype=dtype or chosen.row_dtype)
    return [_open_table(chosen, table, config.key_bits, op, hotness=hotness) for table in chosen.tables]


def choose_model(op: str, config: Config, model: str | None) -> ModelConfig:
    """Returns the model of a name, or the only one (None); UnknownModelError: there is none."""
    found = [entry for entry in config.models if model in (None, entry.model)]
    if len(found) != 1:
        raise errors.UnknownModelError.of(op, model, [entry.model for entry in config.models])
    return found[0]


def load_tables(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    model: str | None = None,
    *,
    tables: Sequence[str] | None = None,
    device: Any = None,
) -> FrozenTables:
    """Loads the tables of a model of an HPS configuration, for programs that need no session.

    All rows go to the device, wherever the configuration has them, in its dtypes and with its defaults.

    Args:
      config: the path of an HPS JSON file, its parsed content, or a `Config`.
      model: its name; None, if there is one.
      tables: names of those to load; None: all.
      device: where they go; None: JAX's default device.

    Raises:
      ConfigError: the configuration.
      UnknownModelError, UnknownTableError: there is none of that name.
      FileNotFoundError, ServingError, CorruptFileError, ValueError: files, as `open`.

    Cost:
      Reads the files of these tables. On the device: `frozen_bytes`.

    Example:
      `tables = load_tables("8_table.json"); found = lookup(tables, {"table0": keys, "table1": others})`
    """
    op, whole = "load_tables", read_config(config)
    chosen = choose_model(op, whole, model)
    by_name = {table.name: table for table in chosen.tables}
    for name in tables or ():
        errors.require_table(op, name, by_name, f'model "{chosen.model}"')
    given = [_open_table(chosen, by_name[name], whole.key_bits, op) for name in tables or by_name]
    return freeze_records(given, spare_rows=chosen.spare_rows, device=device)[0]
