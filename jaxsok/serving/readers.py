"""The models of a session by where their rows are read: all on a device, or some in its cache over host memory."""

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.initializers import InitialRows
from jaxsok.serving import artifact, backing, row_map, sources, updates
from jaxsok.serving import cache as cache_lib
from jaxsok.serving.config import Config, ModelConfig, TableConfig
from jaxsok.serving.databases import Connected
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenTable, FrozenTables, SizedRecords
from jaxsok.serving.fused import LookupInput, lookup_with_counts
from jaxsok.serving.padding import key_words
from jaxsok.serving.predictions import (
    Prediction,
    count_found,
    first_predictions,
    keys_in,
    load_dense_model,
    lookups_of,
    words_in,
)
from jaxsok.serving.served import Found, Lookup, Program, Served, rest_s
from jaxsok.serving.stored import StoredVersion, StoredVersions
from jaxsok.serving.updates import Version, Versions
from jaxsok.types import COUNTS, PADDING_KEY

_log = logging.getLogger(__name__)

_HITS_AND_MISSING = [COUNTS.index(name) for name in ("num_found", "num_missing")]

_NO_KEYS = np.zeros(0, np.uint64)

MOST_SETS = 16
"""Sets of tables with programs of their own. Another request looks up all tables of its model, or, where that makes too
many rows, each of its own by itself.
"""

MOST_EXTRA_BYTES = 64 << 20  # rows that a program may make beyond those of the request, in bytes


class OnDevice(Served):
    """A model whose rows all lie on one device, or on the host."""

    def __init__(self, config: ModelConfig, versions: Versions, device: Any, *, warm_up: bool) -> None:
        super().__init__(config, versions, device, warm_up=warm_up)
        self._dims = {table.name: table.dim for table in config.tables}
        self._sets_lock = threading.Lock()
        # Sets of tables with programs of their own, MOST_SETS at most: read and changed under `_sets_lock`.
        self._sets = {self.names}
        if warm_up:
            self._warm_up(self.versions.current)

    @property
    def num_bytes(self) -> int:
        return self.versions.current.tables.num_bytes

    def _lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
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
        return values, version.number, _counted(num_keys, by_name)

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

    def _predict(self, inputs: Any) -> Found:
        while True:
            with self.versions.reading() as version:
                request, place = self._read_inputs(version.served, inputs), self.place_of(version)
                if self.ready.has(place, request.program):
                    out = request.served.run(version.tables, request.leaves)
                    counts = count_found(version.tables, request.leaves, lookups_of(request.served))
                    counts.copy_to_host_async()
                    break
            self.ready.make(place, request.program)  # not while an update may wait for it, and others for the update
        values, num_keys = request.cut(out), {table: keys.size for table, keys in request.keys().items()}
        by_name = dict(zip(num_keys, np.asarray(counts).tolist(), strict=True))
        return values, version.number, _counted(num_keys, by_name)

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


class Cached(Served):
    """A model whose rows are read through a cache on the device; all of them lie in host memory, or in databases.

    Without `gpucache` rows of databases are read through a cache that keeps none.
    """

    def __init__(self, config: ModelConfig, versions: Versions | StoredVersions, device: Any, *, warm_up: bool) -> None:
        """Fills the cache, and begins to refresh it, as the configuration says."""
        super().__init__(config, versions, device, warm_up=warm_up)
        self._num_warm_ups = 0
        self._is_closed = threading.Event()
        self._clock = threading.Thread(target=self._refresh_by_the_clock, name="jaxsok-refresh", daemon=True)
        self.cache = cache_lib.DeviceCache(
            _rows_of(versions.current),
            fraction=config.gpucacheper if config.gpucache else 1e-9,
            hit_rate_threshold=config.hit_rate_threshold if config.gpucache else math.inf,
            refresh_fraction=config.cache_refresh_percentage_per_iteration,
            keeps_rows=config.gpucache,
            device=device,
        )
        try:
            if config.is_filled_at_start:
                self.cache.fill()
            if warm_up:
                self._warm_up(versions.current)
        except BaseException:
            self.close()
            raise
        if config.is_refreshed:
            self._clock.start()  # last: a failure above leaves no thread

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes

    def _lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
        if self.config.is_fused:
            found = self.cache.lookup(keys)
            return found.rows, found.version, _padding_of(keys)
        while True:
            parts = {name: self.cache.lookup({name: array}) for name, array in keys.items()}
            versions = {part.version for part in parts.values()}
            if len(versions) == 1:  # else an update came between two tables
                rows = {name: part.rows[name] for name, part in parts.items()}
                return rows, versions.pop(), _padding_of(keys)

    def _predict(self, inputs: Any) -> Found:
        served = self.versions.current.served
        while True:
            request = self._read_inputs(served, inputs)
            place, program = (None, request.served), request.program
            if not self.ready.has(place, program):
                self.ready.make(place, program)
            found = self.cache.lookup_tables(
                {
                    table: np.concatenate([keys_in(request.leaves[name]) for name in names])
                    for table, names in lookups_of(request.served)
                }
            )
            served = found.source.served
            if served is request.served:
                values = request.cut(served.run(found.tables, request.leaves))
                return values, found.version, _padding_of(request.keys())
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
        rows = _rows_of(new)
        rows.ready_as(self.cache.source)  # else the first misses would wait for a compiler
        if isinstance(new, StoredVersion) and new.replaced:  # a database may have lost rows that are cached
            cached = self.cache.cached_keys()
            changed = {**changed, **{name: np.append(changed[name], cached[name]) for name in new.replaced}}
        self.cache.swap(rows, changed)

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

    def stats(self) -> dict[str, Any]:
        stats, of_cache = super().stats(), self.cache.stats()
        of_cache.lookups -= self._num_warm_ups
        for name, counts in self.cache.table_counts().items():
            stats["tables"][name] |= {**dataclasses.asdict(counts), "hit_rate": counts.hit_rate}
        cached = {**dataclasses.asdict(of_cache), "hit_rate": of_cache.hit_rate, "num_rows": self.cache.num_rows}
        stats |= {name: cached[name] for name in ("distinct", "hits", "misses", "missing", "hit_rate")}
        return {**stats, "cache": cached}

    def stop(self) -> None:
        self._is_closed.set()
        super().stop()
        self.cache.stop_compiling()

    def close(self, until: float | None = None) -> bool:
        self.stop()
        if self._clock.is_alive():
            self._clock.join(rest_s(until))
        has_ended = super().close(until) and not self._clock.is_alive()
        return self.cache.close(rest_s(until)) and has_ended


def open_model(
    whole: Config,
    config: ModelConfig,
    device: Any,
    room: Callable[[], int | None],
    memory: threading.Lock,
    databases: Connected,
    *,
    warm_up: bool,
) -> Served:
    """Opens the files of a model, one of a whole configuration, and serves it.

    `room` gives the device's free bytes; None: not known. `memory` is held while some of the device is taken, by all
    models that share it.
    """
    given = [_open_table(config, table, whole.key_bits) for table in config.tables]
    dense_model = None
    if config.dense_file:
        tables = {table.name: table for table, _ in given}
        dense_model = load_dense_model("open", config, config.dense_file, tables, device)
    is_cached = config.tier == "cache"
    if any(databases) and config.tier != "device":
        stored = StoredVersions(whole, config, given, databases, dense_model)
        if is_cached:
            counts = stored.current.num_rows
            sized = [(table, SizedRecords(counts[table.name], ())) for table, _ in given]
            _require_room_for_cache(config, sized, device, room())
        return Cached(config, stored, device, warm_up=warm_up)
    if is_cached:
        _require_room_for_cache(config, given, device, room())
    versions = Versions(
        config,
        given,
        key_bits=whole.key_bits,
        device=row_map.host_device() if is_cached else device,
        room=room if config.tier == "device" else lambda: updates.host_free_bytes(),
        can_donate=not is_cached,
        served=dense_model,
        memory=memory,
    )
    served = (Cached if is_cached else OnDevice)(config, versions, device, warm_up=warm_up)
    for of_store in versions.current.maps:
        of_store.frequencies = None  # only the first filling of a cache needs them
    return served


def _open_table(
    config: ModelConfig, table: TableConfig, key_bits: sources.KeyBits
) -> tuple[FrozenTable, sources.TableSource]:
    source = sources.open_table(
        table.file, table=table.name, dim=table.dim, key_bits=key_bits, hotness=config.is_filled_at_start, op="open"
    )
    dtype: Any = config.row_dtype or source.dtype
    if table.default is not None:
        source = dataclasses.replace(source, unknown=None)  # the configuration counts
        return FrozenTable(table.name, table.dim, table.default, dtype), source
    unknown = source.unknown
    if isinstance(unknown, str):
        raise ServingError(
            f'open: model "{config.model}": table "{table.name}": default_value_for_each_table: got no number, and in '
            f'training of "{source.path}" a key without a row reads {unknown}, which served tables cannot work '
            "out; wanted the number that they serve."
        )
    default, initial = (0.0, unknown) if isinstance(unknown, InitialRows) else (unknown or 0.0, None)
    return FrozenTable(table.name, table.dim, default, dtype, initial), source


def _require_room_for_cache(
    config: ModelConfig, given: Sequence[tuple[FrozenTable, Any]], device: Any, free: int | None
) -> None:
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


def _rows_of(version: Version) -> backing.RowSource:
    if isinstance(version, StoredVersion):
        return version.rows()
    return backing.HostRows(version.tables, version.maps, version=version.number, served=version.served)


def _counted(num_keys: Mapping[str, int], found: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Counts keys by table: those that are there and those that are missing; the rest is padding."""
    return {name: (n, *found[name], n - sum(found[name])) for name, n in num_keys.items()}


def _padding_of(keys: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    padding = np.uint64(PADDING_KEY)
    return {name: (array.size, 0, 0, int((array == padding).sum())) for name, array in keys.items()}


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
