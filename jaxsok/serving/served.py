"""One model of a session, wherever its rows are read."""

import abc
import collections
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxsok.serving import artifact
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.errors import RequestError, RequestTooLargeError, UnknownModelError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable, frozen_bytes
from jaxsok.serving.predictions import Prediction, PredictRequest, keys_in, load_dense_model
from jaxsok.serving.ready import Ready
from jaxsok.serving.updates import InPlace, Source, Version, Versions
from jaxsok.types import PADDING_KEY

LEAST_SAMPLES = 16  # requests are padded to as many samples, or twice as many, up to `max_batch_size`

Lookup: TypeAlias = tuple[tuple[str, int], ...]  # a program of lookups: tables, and to how many keys each is padded
Program: TypeAlias = Lookup | Prediction
Counts: TypeAlias = dict[str, tuple[int, ...]]
"""Keys by table, and of them hits, missing, padding. A cache counts hits and missing itself: 0 here."""
Found: TypeAlias = tuple[dict[str, np.ndarray], int, Counts]  # values by name, their version, and what was read


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
    num_rows: Mapping[str, int]  # by table
    max_batch_size: int  # samples in a request
    max_keys: Mapping[str, int]  # keys of each table in a request: `max_batch_size` times keys of a sample
    key_bits: int  # 64, or 32: then keys are 0 to 2**32 - 1
    inputs: Mapping[str, Any] | None  # `artifact.ServedModel.inputs`, for `predict`; None: no dense model
    outputs: Mapping[str, Any] | None  # `artifact.ServedModel.outputs`, likewise
    version: int


class Served(abc.ABC):
    """One model of a session: checks and counts requests, answers each from one version, and makes the next one.

    Many threads call it at the same time. Subclasses (readers.py) say where its rows are read. `device` is where these
    lie, or are cached.
    """

    def __init__(self, config: ModelConfig, versions: Versions, device: Any, *, warm_up: bool) -> None:
        self.config, self.versions, self.device, self.is_warmed_up = config, versions, device, warm_up
        self.ready: Ready[Program] = Ready(self._compile)
        num_doubled = max(0, math.ceil(math.log2(config.max_batch_size / LEAST_SAMPLES)))
        self.levels = *(LEAST_SAMPLES << step for step in range(num_doubled)), config.max_batch_size
        """The numbers of samples that programs are made for: powers of two, and the most there may be."""
        self.per_sample = {table.name: table.max_keys_per_sample for table in config.tables}
        self.names = tuple(versions.current.tables.tables)
        self.workers = threading.BoundedSemaphore(config.num_of_worker_buffer_in_pool)
        self.counts = _Counts(self.names)

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int: ...  # device memory
    @abc.abstractmethod
    def _lookup(self, keys: Mapping[str, np.ndarray]) -> Found: ...  # of uint64 keys by table
    @abc.abstractmethod
    def _predict(self, inputs: Any) -> Found: ...
    @abc.abstractmethod  # the inputs whose keys count for the limits of each table
    def inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]: ...
    @abc.abstractmethod  # what the programs of a version are compiled for, as a value
    def place_of(self, version: Version) -> Any: ...
    @abc.abstractmethod  # those that are compiled before requests come
    def first_programs(self, served: artifact.ServedModel | None) -> list[Program]: ...
    @abc.abstractmethod
    def _compile(self, place: Any, program: Program) -> None: ...

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory, with those of a version that is not served yet."""
        return self.num_bytes + (self.versions.held_bytes if self.config.tier == "device" else 0)

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
        )

    # Requests --------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Mapping[str, Any]) -> Answer:
        arrays = self._read_keys(keys)
        return self._answer("lookups", lambda: self._lookup(arrays))

    def predict(self, inputs: Any) -> Answer:
        return self._answer("predicts", lambda: self._predict(inputs))

    def _answer(self, done: str, read: Callable[[], Found]) -> Answer:
        with self.workers:
            values, version, counts = read()
        self.counts.add(done, counts)
        return Answer(values, version=version)

    def _read_keys(self, keys: Any) -> dict[str, np.ndarray]:
        op = "lookup"
        if not isinstance(keys, Mapping):
            raise RequestError(f"{op}: keys: got {type(keys).__name__}, wanted a mapping from tables to keys.")
        if not keys:
            raise RequestError(f"{op}: keys: got no tables, wanted at least one of {sorted(self.names)}.")
        arrays = {}
        for name, given in keys.items():
            if not isinstance(name, str) or name not in self.names:
                raise UnknownTableError.of(op, name, self.names, f'model "{self.config.model}"')
            what = f'{op}: table "{name}"'
            array = _integers(given, what)
            self._check_number(what, name, array.size)
            keys64 = array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)
            self._check_bits(what, keys64)
            arrays[name] = keys64
        return arrays

    def _read_inputs(self, served: artifact.ServedModel | None, inputs: Any) -> PredictRequest:
        op = "predict"
        if served is None:
            raise UnknownModelError(
                f'{op}: model: got "{self.config.model}", which has no dense_file, wanted one that has; lookup reads '
                "its tables."
            )
        leaves, num_samples = served.read(inputs)
        if num_samples > self.config.max_batch_size:
            raise RequestTooLargeError(
                f"{op}: inputs: got {num_samples} samples, wanted at most {self.config.max_batch_size}, the "
                "max_batch_size."
            )
        if num_samples == 0 and not served.is_per_sample:
            raise RequestError(f"{op}: inputs: got a batch of no samples, wanted one at least.")
        given = {name: keys_in(leaves[name]) for name, spec in served.inputs.items() if hasattr(spec, "table")}
        for name, keys in given.items():
            self._check_bits(f'{op}: inputs["{name}"]', keys)
        for table, names in self.inputs_of(served).items():
            self._check_number(f'{op}: table "{table}"', table, sum(given[name].size for name in names))
        if served.is_per_sample:
            leaves = served.padded(leaves, num_samples)
        return PredictRequest(served, leaves, num_samples)

    def _check_number(self, what: str, table: str, num_keys: int) -> None:
        most = self.config.max_keys[table]
        if num_keys > most:
            raise RequestTooLargeError(
                f"{what}: keys: got {num_keys}, wanted at most {most}: max_batch_size ({self.config.max_batch_size}) "
                f"times {most // self.config.max_batch_size} of a sample."
            )

    def _check_bits(self, what: str, keys: np.ndarray) -> None:
        if self.versions.key_bits == 64:
            return
        wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
        if wrong.any():
            raise RequestError(
                f"{what}: keys: got {keys[wrong].view(np.int64)[0]}, wanted 0 to 4294967295: keys have 32 bits, since "
                "supportlonglong is false."
            )

    # Versions --------------------------------------------------------------------------------------------------------

    def update(self, source: Source | None, dense_file: str | os.PathLike[str] | None, in_place: InPlace) -> int:
        served = None
        if dense_file is not None:
            tables = self.versions.current.tables.tables
            served = load_dense_model("update", self.config, dense_file, tables, self.device)
        version = self.versions.update(
            source,
            in_place=in_place,
            served=served,
            dense_file=None if dense_file is None else str(dense_file),
            reader=self,
        )
        self.counts.add("updates", {})
        return version.number

    def prepare(self, old: Version, new: Version) -> None:
        """Compiles for a new version the programs that requests have used; raises if it cannot be served."""
        place, old_place = self.place_of(new), self.place_of(old)
        if place == old_place:
            return
        self.ready.keep([old_place, place])
        wanted = [*(self.first_programs(new.served) if self.is_warmed_up else []), *self.ready.used()]
        for _ in range(2):  # requests go on meanwhile, and use more: what comes later still, they wait for
            for program in wanted:
                if not isinstance(program, Prediction) or program.fits(new.served):
                    self.ready.make(place, program)
            wanted = self.ready.used()

    def publish(self, new: Version, changed: Mapping[str, np.ndarray]) -> None:  # noqa: B027
        """Reads a whole new version from here on; without a cache each request takes the latest.

        `changed` has the keys of each table that changed or went.
        """

    def settle(self, now: Version) -> None:
        """Forgets the programs of versions other than the served one; also called after a failure."""
        self.ready.keep([self.place_of(now)])

    def refresh(self) -> None:  # noqa: B027
        """Reads cached rows anew; without a cache there is no tier below."""

    # Reports ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        version, stats = self.versions.current, self.counts.stats()
        for name, of_table in stats["tables"].items():
            of_table |= {"num_rows": version.num_rows[name], "source": version.files[name]}
        return {
            "version": version.number,
            "source": dict(version.files),
            "dense_file": version.dense_file,
            **stats,
            "in_place_updates": self.versions.num_in_place,
            "bytes": self.num_bytes,
            "host_bytes": self.versions.host_bytes,
        }

    def report(self) -> list[str]:
        version = self.versions.current
        lines = [
            f'model "{self.config.model}", version {version.number}: {self.num_bytes:,} bytes on {self.device}, '
            f"{self.versions.host_bytes:,} bytes of host memory beside"
        ]
        for name, table in version.tables.tables.items():
            num_rows = version.num_rows[name]
            lines.append(
                f'  table "{name}": {num_rows:,} rows of {table.dim} x {table.dtype}, {table.missing}, '
                f"{sum(frozen_bytes(table, num_rows).values()):,} bytes, at most {self.config.max_keys[name]:,} keys "
                f"in a request, from {version.files[name]}"
            )
        if version.served is not None:
            lines.append(f"  dense model of inputs {list(version.served.inputs)}, from {version.dense_file}")
        return lines

    # The end ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begins nothing more beside requests."""
        self.ready.beside.stop()

    def close(self, until: float | None = None) -> bool:
        """Stops, waits for what runs until a time of `time.monotonic`, and returns whether all has ended."""
        return self.ready.beside.close(rest_s(until))


_KINDS: tuple[str, ...] = ("keys", "hits", "missing", "padding")


class _Counts:
    """Sums of what a model did."""

    def __init__(self, names: Sequence[str]) -> None:
        self._lock = threading.Lock()
        # Changed and read under `_lock`, so that the sums of one answer are seen together.
        self._done = collections.Counter(lookups=0, predicts=0, updates=0)
        self._tables = {name: collections.Counter(dict.fromkeys(_KINDS, 0)) for name in names}

    def add(self, done: str, tables: Mapping[str, Sequence[int]]) -> None:
        """Counts one of "lookups", "predicts" and "updates", and the keys that it read: by table, in `_KINDS`."""
        with self._lock:
            self._done[done] += 1
            for name, numbers in tables.items():
                self._tables[name].update(dict(zip(_KINDS, numbers, strict=True)))

    def stats(self) -> dict[str, Any]:
        with self._lock:
            done, tables = dict(self._done), {name: dict(table) for name, table in self._tables.items()}
        total = {kind: sum(table[kind] for table in tables.values()) for kind in _KINDS}
        return {**done, **_with_rate(total), "tables": {name: _with_rate(table) for name, table in tables.items()}}


def _with_rate(counts: Mapping[str, int]) -> dict[str, Any]:
    real = counts["hits"] + counts["missing"]
    return {**counts, "hit_rate": counts["hits"] / real if real else 1.0}


def _integers(given: Any, what: str) -> np.ndarray:
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


def rest_s(until: float | None) -> float | None:
    """Seconds until a time of `time.monotonic`."""
    return None if until is None else max(0.0, until - time.monotonic())
