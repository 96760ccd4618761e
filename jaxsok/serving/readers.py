"""Where the rows of a served model are read: all on its device, or some in its cache over host memory.

A `RowReader` answers lookups and predictions that `Served` has checked, from one version each, whole. It owns the
versions of the tables and the programs that are compiled for them.
"""

import abc
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.serving import artifact, backing
from jaxsok.serving import cache as cache_lib
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenTable, FrozenTables
from jaxsok.serving.fused import LookupInput, lookup_with_counts
from jaxsok.serving.padding import key_words
from jaxsok.serving.predictions import (
    Prediction,
    PredictRequest,
    count_found,
    first_predictions,
    keys_in,
    lookups_of,
    words_in,
)
from jaxsok.serving.ready import Ready
from jaxsok.serving.sources import TableSource
from jaxsok.serving.updates import Version, Versions
from jaxsok.types import COUNTS, PADDING_KEY

_log = logging.getLogger(__name__)

LEAST_SAMPLES = 16  # requests are padded to as many samples, or twice as many, up to `max_batch_size`

_HITS_AND_MISSING = [COUNTS.index(name) for name in ("num_found", "num_missing")]

_NO_KEYS = np.zeros(0, np.uint64)

MOST_SETS = 16
"""Sets of tables with programs of their own. Another request looks up all tables of its model, or, where that makes too
many rows, each of its own by itself.
"""

MOST_EXTRA_BYTES = 64 << 20  # rows that a program may make beyond those of the request, in bytes

Lookup: TypeAlias = tuple[tuple[str, int], ...]  # a program of lookups: tables, and to how many keys each is padded

Program: TypeAlias = Lookup | Prediction

Given: TypeAlias = Sequence[tuple[FrozenTable, TableSource]]

ReadInputs: TypeAlias = Callable[[artifact.ServedModel | None], PredictRequest]  # checks inputs for a dense model


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer of a reader."""

    values: dict[str, np.ndarray]
    version: int
    counts: dict[str, tuple[int, ...]]
    """Keys by table, and of them hits, missing, padding. A cache counts hits and missing itself: 0 here."""


class RowReader(abc.ABC):
    """Answers what `Served` has checked. All methods may be called from many threads at the same time."""

    def __init__(self, config: ModelConfig, versions: Versions, *, warm_up: bool) -> None:
        self.config, self.versions, self.is_warmed_up = config, versions, warm_up
        self.ready: Ready[Program] = Ready(self._compile)
        self.levels = levels_of(config.max_batch_size)
        self.per_sample = {table.name: table.max_keys_per_sample for table in config.tables}
        self.names = tuple(versions.current.tables.tables)

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int: ...  # device memory
    @abc.abstractmethod
    def lookup(self, keys: Mapping[str, np.ndarray]) -> Found: ...  # of uint64 keys by table
    @abc.abstractmethod
    def predict(self, read: ReadInputs) -> Found: ...
    @abc.abstractmethod  # the inputs whose keys count for the limits of each table
    def inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]: ...
    @abc.abstractmethod  # what the programs of a version are compiled for, as a value
    def place_of(self, version: Version) -> Any: ...
    @abc.abstractmethod  # those that are compiled before requests come
    def first_programs(self, served: artifact.ServedModel | None) -> list[Program]: ...
    @abc.abstractmethod
    def _compile(self, place: Any, program: Program) -> None: ...

    # What an update calls, in this order; see `Versions.update`.

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
        """Reads a whole new version from here on; by itself a reader takes the latest under `Versions.reading`.

        `changed` has the keys of each table that changed or went.
        """

    def settle(self, now: Version) -> None:
        """Forgets the programs of versions other than the served one; also called after a failure."""
        self.ready.keep([self.place_of(now)])

    def refresh(self) -> None:  # noqa: B027
        """Reads cached rows anew; without a cache there is no tier below."""

    def add_stats(self, stats: dict[str, Any]) -> None:  # noqa: B027
        """Adds what the reader counts itself to the statistics of `Session.stats`; each answer has its own counts."""

    def stop(self) -> None:
        """Begins nothing more beside requests."""
        self.ready.beside.stop()

    def close(self, until: float | None = None) -> bool:
        """Stops, waits for what runs until a time of `time.monotonic`, and returns whether all has ended."""
        return self.ready.beside.close(_rest_s(until))


def levels_of(max_batch_size: int) -> tuple[int, ...]:
    """The numbers of samples that programs are made for: powers of two from LEAST_SAMPLES, and the maximum."""
    num_doubled = max(0, math.ceil(math.log2(max_batch_size / LEAST_SAMPLES)))
    return (*(LEAST_SAMPLES << step for step in range(num_doubled)), max_batch_size)


class DeviceReader(RowReader):
    """Reads rows that all lie on one device, or on the host."""

    def __init__(self, config: ModelConfig, versions: Versions, *, warm_up: bool) -> None:
        super().__init__(config, versions, warm_up=warm_up)
        self._dims = {table.name: table.dim for table in config.tables}
        self._sets_lock = threading.Lock()
        # Sets of tables with programs of their own, MOST_SETS at most: read and changed under `_sets_lock`.
        self._sets = {self.names}
        if warm_up:
            self._warm_up(self.versions.current)

    @property
    def num_bytes(self) -> int:
        return self.versions.current.tables.num_bytes

    def lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
        num_keys = {name: array.size for name, array in keys.items()}
        while True:
            place = self.place_of(self.versions.current)
            programs = self._programs(place, num_keys)  # compiled here: not while an update waits for its readers
            words = [
                np.concatenate([key_words(keys.get(name, _NO_KEYS).reshape(-1), size) for name, size in program])
                for program in programs
            ]
            with self.versions.reading() as version:
                if self.place_of(version) == place:
                    pairs = zip(words, programs, strict=True)
                    calls = [look_up_words(version.tables, mine, program) for mine, program in pairs]
                    break
        # The results of a program are the caller's: an update need not wait until they are copied.
        for rows, counts in calls:
            for array in (counts, *(rows[name] for name in keys if name in rows)):
                array.copy_to_host_async()
        found, total = {}, np.zeros((len(self.names), len(COUNTS)), np.int64)
        for rows, counts in calls:
            found |= {name: np.asarray(value) for name, value in rows.items() if name in keys}
            total += np.asarray(counts)
        values = {}
        for name, array in keys.items():
            rows = found[name][: array.size]
            values[name] = rows.reshape(*array.shape, rows.shape[-1])
        by_name = dict(zip(self.names, total[:, _HITS_AND_MISSING].tolist(), strict=True))
        return Found(values, version.number, _counted(num_keys, by_name))

    def _programs(self, place: Any, num_keys: Mapping[str, int]) -> list[Lookup]:
        """Compiled programs that look up so many keys of some tables: one, or one for each table if they are not fused.

        If only the program for all tables is compiled, it answers, and that for these tables is compiled beside.
        `MOST_SETS` sets of tables get one. No program makes `MOST_EXTRA_BYTES` of rows beyond the request's.
        """
        names = tuple(name for name in self.names if name in num_keys)
        samples = max(-(-num_keys[name] // self.per_sample[name]) for name in names)
        level = next(level for level in self.levels if level >= samples)
        mine, all_ = self._program(names, level), self._program(self.names, level)
        if not self.config.is_fused:
            programs = [(size,) for size in mine]
        else:
            with self._sets_lock:
                if names not in self._sets and len(self._sets) < MOST_SETS:
                    self._sets.add(names)
                is_known = names in self._sets
            programs = [mine if is_known else all_]
            if self._row_bytes(all_) - self._row_bytes(mine) > MOST_EXTRA_BYTES:
                programs = [mine] if is_known else [(size,) for size in mine]
            elif is_known and not self.ready.has(place, mine) and self.ready.has(place, all_):
                self.ready.make_beside(place, mine)
                return [all_]
        for program in programs:
            if not self.ready.has(place, program):
                self.ready.make(place, program)
        return programs

    def _program(self, names: Sequence[str], level: int) -> Lookup:
        return tuple((name, level * self.per_sample[name]) for name in names)

    def _row_bytes(self, program: Lookup) -> int:
        return sum(4 * size * self._dims[name] for name, size in program)

    def predict(self, read: ReadInputs) -> Found:
        while True:
            with self.versions.reading() as version:
                request, place = read(version.served), self.place_of(version)
                if self.ready.has(place, request.program):
                    out = request.served.run(version.tables, request.leaves)
                    counts = count_found(version.tables, request.leaves, lookups_of(request.served))
                    counts.copy_to_host_async()
                    break
            self.ready.make(place, request.program)  # not while an update may wait for it, and others for the update
        values, num_keys = request.cut(out), {table: keys.size for table, keys in request.keys().items()}
        by_name = dict(zip(num_keys, np.asarray(counts).tolist(), strict=True))
        return Found(values, version.number, _counted(num_keys, by_name))

    def inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]:
        tables: dict[str, list[str]] = {}
        for name, spec in served.inputs.items():
            if hasattr(spec, "table"):
                tables.setdefault(spec.table, []).append(name)
        return tables

    def place_of(self, version: Version) -> Any:
        return version.form, version.served

    def first_programs(self, served: artifact.ServedModel | None) -> list[Program]:
        programs: list[Program] = []
        for level in self.levels:
            sizes = self._program(self.names, level)
            programs += [sizes] if self.config.is_fused else [(size,) for size in sizes]
        return programs + first_predictions(served, self.levels)

    def _compile(self, place: tuple[Any, Any], program: Program) -> None:
        form, served = place
        if isinstance(program, Prediction):
            leaves = served.leaves_of(program.sizes)
            served.compile(form.tree, leaves)
            count_found.lower(form.tree, leaves, lookups_of(served)).compile()
        else:
            words = jax.ShapeDtypeStruct((sum(size for _, size in program), 2), np.uint32)
            look_up_words.lower(form.tree, words, program).compile()

    def _warm_up(self, version: Version) -> None:
        place = self.place_of(version)
        for program in self.first_programs(version.served):
            self.ready.make(place, program)
            if isinstance(program, Prediction):
                shapes = version.served.leaves_of(program.sizes)
                leaves = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
                jax.block_until_ready(version.served.run(version.tables, leaves))
                jax.block_until_ready(count_found(version.tables, leaves, lookups_of(version.served)))
            else:
                words = keys_lib.padding_words((sum(size for _, size in program),))
                jax.block_until_ready(look_up_words(version.tables, words, program))


class CacheReader(RowReader):
    """Reads rows through a cache on the device; all of them lie in host memory."""

    def __init__(self, config: ModelConfig, versions: Versions, device: Any, *, warm_up: bool) -> None:
        """Fills the cache, and begins to refresh it, as the configuration says."""
        super().__init__(config, versions, warm_up=warm_up)
        first = versions.current
        self._rows = backing.HostRows(first.tables, first.maps, version=first.number)
        # The dense models of the last versions, for predictions that run. Replaced whole, by updates alone.
        self._history = {first.number: first.served}
        self._num_warm_ups = 0
        self._is_closed = threading.Event()
        self._clock = threading.Thread(target=self._refresh_by_the_clock, name="jaxsok-refresh", daemon=True)
        self.cache = cache_lib.DeviceCache(
            self._rows,
            fraction=config.gpucacheper,
            hit_rate_threshold=config.hit_rate_threshold,
            refresh_fraction=config.cache_refresh_percentage_per_iteration,
            device=device,
        )
        try:
            if config.is_filled_at_start:
                self.cache.fill()
            if warm_up:
                self._warm_up(first)
        except BaseException:
            self.close()
            raise
        if config.is_refreshed:
            self._clock.start()  # last: a failure above leaves no thread

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes

    def lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
        if self.config.is_fused:
            found = self.cache.lookup(keys)
            return Found(found.rows, found.version, _padding_of(keys))
        while True:
            parts = {name: self.cache.lookup({name: array}) for name, array in keys.items()}
            versions = {part.version for part in parts.values()}
            if len(versions) == 1:  # else an update came between two tables
                rows = {name: part.rows[name] for name, part in parts.items()}
                return Found(rows, versions.pop(), _padding_of(keys))

    def predict(self, read: ReadInputs) -> Found:
        served = self.versions.current.served
        while True:
            request = read(served)
            place, program = (None, request.served), request.program
            if not self.ready.has(place, program):
                self.ready.make(place, program)
            found = self.cache.lookup_tables(
                {
                    table: np.concatenate([keys_in(request.leaves[name]) for name in names])
                    for table, names in lookups_of(request.served)
                }
            )
            history = self._history
            if found.version not in history:
                served = self.versions.current.served
                continue  # many updates came meanwhile
            served = history[found.version]
            if served is request.served:
                values = request.cut(served.run(found.tables, request.leaves))
                return Found(values, found.version, _padding_of(request.keys()))
            # Else the dense model is another one by now, which may read other keys.

    def inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]:
        return {table: names or () for table, names in served.lookups.items()}  # other rows are not fetched

    def place_of(self, version: Version) -> Any:
        return None, version.served  # the arrays of the cache keep their shapes

    def first_programs(self, served: artifact.ServedModel | None) -> list[Program]:
        return list(first_predictions(served, self.levels))

    def _compile(self, place: tuple[Any, Any], program: Program) -> None:
        assert isinstance(program, Prediction)  # lookups are the cache's own
        served, leaves = place[1], place[1].leaves_of(program.sizes)
        num_keys = {
            table: sum(math.prod(words_in(leaves[name]).shape[:-1]) for name in names)
            for table, names in self.inputs_of(served).items()
        }
        self.cache.warm_up([num_keys], as_tables=True)
        served.compile(self.cache.tables_like(num_keys), leaves)

    def _warm_up(self, version: Version) -> None:
        sets = [self.names] if self.config.is_fused else [(name,) for name in self.names]
        self.cache.warm_up(
            [{name: level * self.per_sample[name] for name in names} for names in sets for level in self.levels]
        )
        for level in self.levels:
            padding = {name: np.full(level * n, np.uint64(PADDING_KEY)) for name, n in self.per_sample.items()}
            self.cache.lookup(padding)
            self._num_warm_ups += 1
        for program in self.first_programs(version.served):
            self.ready.make(self.place_of(version), program)

    def publish(self, new: Version, changed: Mapping[str, np.ndarray]) -> None:
        rows = backing.HostRows(new.tables, new.maps, version=new.number)
        rows.ready_as(self._rows)  # else the first misses would wait for a compiler
        # Before any answer can be of the new version. Without the tables of old ones, which are large.
        history = {number: served for number, served in self._history.items() if number > new.number - 4}
        self._history = {**history, new.number: new.served}
        self.cache.swap(rows, changed)
        self._rows = rows

    def refresh(self) -> None:
        self.cache.refresh()

    def _refresh_by_the_clock(self) -> None:
        wait_s = self.config.refresh_delay
        while not self._is_closed.wait(wait_s):
            wait_s = self.config.refresh_interval
            try:
                self.cache.refresh()
            except Exception:  # any tier may fail; the next refresh may succeed
                if not self._is_closed.is_set():
                    _log.exception('model "%s": the refresh of the cache failed, wanted its rows', self.config.model)

    def add_stats(self, stats: dict[str, Any]) -> None:
        of_cache = self.cache.stats()
        of_cache.lookups -= self._num_warm_ups
        for name, counts in self.cache.table_counts().items():
            stats["tables"][name] |= {**dataclasses.asdict(counts), "hit_rate": counts.hit_rate}
        cached = {**dataclasses.asdict(of_cache), "hit_rate": of_cache.hit_rate, "num_rows": self.cache.num_rows}
        stats |= {name: cached[name] for name in ("distinct", "hits", "misses", "missing", "hit_rate")}
        stats["cache"] = cached

    def stop(self) -> None:
        self._is_closed.set()
        super().stop()
        self.cache.stop_compiling()

    def close(self, until: float | None = None) -> bool:
        self.stop()
        if self._clock.is_alive():
            self._clock.join(_rest_s(until))
        has_ended = super().close(until) and not self._clock.is_alive()
        return self.cache.close(_rest_s(until)) and has_ended


def require_room_for_cache(config: ModelConfig, given: Given, device: Any, free: int | None) -> None:
    """Refuses a cache that is larger than the free bytes of its device."""
    num_rows = {
        table: max(cache_lib.MIN_ROWS, math.ceil(config.gpucacheper * source.num_rows)) for table, source in given
    }
    needed = sum(cache_lib.cache_bytes(num_rows).values())
    if free is not None and needed > free:
        raise ServingError(
            f'open: model "{config.model}": memory: got {free} bytes free on {device}, wanted {needed} for '
            f"its cache; take a gpucacheper below {config.gpucacheper}."
        )


def _counted(num_keys: Mapping[str, int], found: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Counts keys by table: those that are there and those that are missing; the rest is padding."""
    return {name: (n, *found[name], n - sum(found[name])) for name, n in num_keys.items()}


def _padding_of(keys: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    padding = np.uint64(PADDING_KEY)
    return {name: (array.size, 0, 0, int((array == padding).sum())) for name, array in keys.items()}


def _rest_s(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


@functools.partial(jax.jit, static_argnums=2)
def look_up_words(
    tables: FrozenTables, words: jaxtyping.UInt32[Any, "num_keys 2"], sizes: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Array], Array]:
    """Looks up the keys of some tables, which lie behind each other; gives rows and counts."""
    inputs, start = {}, 0
    for name, size in sizes:
        inputs[name] = LookupInput(name, words[start : start + size])
        start += size
    return lookup_with_counts(tables, inputs)
