"""The readers of a model's rows: all on a device, or some in its cache over host memory."""

import abc
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.kernels import table as table_kernels
from jaxsok.kernels.reader import Asked, Reader, Stores
from jaxsok.keys import PADDING_WORD
from jaxsok.serving import artifact, cache as cache_lib
from jaxsok.serving.artifact.inputs import LEAST_BATCH, BagsInput
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.frozen import SEED, FrozenTables
from jaxsok.serving.model.versions import AnyVersions, Version, Versions
from jaxsok.serving.padding import padded_size
from jaxsok.serving.ready import Ready, Repeated, rest_s
from jaxsok.types import COUNTS, NO_ROW, PADDING_KEY

LEAST_SAMPLES = 16  # of lookups through a cache whose programs are made first; then twice as many, and so on
# Names of tables, and a line of numbers for each: keys, and of them hits, missing (both 0: a cache counts), padding.
Counts: TypeAlias = tuple[tuple[str, ...], np.ndarray]
Found: TypeAlias = tuple[dict[str, np.ndarray], int, Counts]  # values by name, their version, and what was read
ReadInputs: TypeAlias = Callable[[artifact.ServedModel | None], "PredictRequest"]  # checks inputs for a dense model

_MOST_ASKED = 256
_HITS_AND_MISSING = [COUNTS.index(name) for name in ("num_found", "num_missing")]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A program of a dense model."""

    inputs: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[int, int], ...]  # `artifact.ServedModel.sizes`


@dataclasses.dataclass(frozen=True)
class PredictRequest:
    """A checked prediction, in its program's form."""

    served: artifact.ServedModel
    leaves: Mapping[str, Any]
    num_samples: int

    @property
    def program(self) -> Prediction:
        return Prediction(tuple(self.served.inputs.items()), self.served.sizes(self.leaves))

    def keys(self) -> dict[str, np.ndarray]:
        """Reads the known keys of each table, without padding."""

        def read(leaves: Any) -> np.ndarray:
            is_bags, words = isinstance(leaves, tuple), words_in(leaves)
            return keys_in(words)[: leaves[1][-1] if is_bags else self.num_samples * math.prod(words.shape[1:-1])]

        lookups = self.served.known_lookups
        return {table: np.concatenate([read(self.leaves[name]) for name in names]) for table, names in lookups}

    def cut(self, out: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """Copies results to the host, without the rows of padding samples."""
        return self.served.cut({name: np.asarray(value) for name, value in out.items()}, self.num_samples)


class _Programs(abc.ABC):
    """A reader's programs, which are compiled for each version before it is read."""

    is_warmed_up = False

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.ready: Ready[Prediction] = Ready(self._compile)
        num_doubled = max(0, math.ceil(math.log2(config.max_batch_size / LEAST_SAMPLES)))
        # The numbers of samples that programs of lookups are made for before requests come.
        self._levels = *(LEAST_SAMPLES << step for step in range(num_doubled)), config.max_batch_size

    @abc.abstractmethod
    def place_of(self, version: Version) -> Any: ...  # what the programs of a version are compiled for, as a value
    @abc.abstractmethod
    def _compile(self, place: Any, program: Prediction) -> None: ...

    def _padding(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields a request of padding in all tables for each level."""
        for level in self._levels:
            sizes = {table.name: level * table.max_keys_per_sample for table in self._config.tables}
            yield {name: np.full(size, np.uint64(PADDING_KEY)) for name, size in sizes.items()}

    def _first_programs(self, served: artifact.ServedModel | None) -> list[Prediction]:
        """Lists the programs that are compiled before requests come, one for each number of samples."""
        if served is None or not served.is_per_sample:  # other models are compiled for each size
            return []
        inputs = tuple(served.inputs.items())
        num_sizes = (padded_size(self._config.max_batch_size, LEAST_BATCH) // LEAST_BATCH).bit_length()
        sizes = [LEAST_BATCH << step for step in range(num_sizes)]  # also as many keys of bags
        has_bags = [isinstance(spec, BagsInput) for _, spec in inputs]
        return [Prediction(inputs, tuple((size, size * bags) for bags in has_bags)) for size in sizes]

    def prepare(self, old: Version, new: Version) -> None:
        """Compiles for a new version the programs that requests have used; raises if it cannot be served."""
        place, old_place = self.place_of(new), self.place_of(old)
        if place == old_place:
            return
        self.ready.keep([old_place, place])
        inputs = None if new.served is None else tuple(new.served.inputs.items())
        wanted = [*(self._first_programs(new.served) if self.is_warmed_up else []), *self.ready.list_used()]
        for _ in range(2):  # requests go on meanwhile, and use more: what comes later still, they wait for
            for program in wanted:
                if program.inputs == inputs:
                    self.ready.make(place, program)
            wanted = self.ready.list_used()

    def settle(self, now: Version) -> None:
        """Forgets the programs of versions other than the served one; also called after a failure."""
        self.ready.keep([self.place_of(now)])


class DeviceRows(_Programs):
    """Reads rows of some parts of each version, by their numbers: of one that has all rows, or of all that share them.

    Lookups run no program of JAX, which would take their thread several times as long (decision 0034).
    """

    def __init__(self, config: ModelConfig, versions: Versions, parts: Sequence[int]) -> None:
        super().__init__(config)
        self._versions, self._parts = versions, parts
        tables = self._tables_of(versions.current)
        self._ask = functools.lru_cache(_MOST_ASKED)(self._ask)
        self._spec = tables[0].spec
        devices = [next(iter(jax.tree.leaves(mine)[0].devices())) for mine in tables]
        self._reader = Reader(devices)
        self._words = [jax.device_put((self._spec.words, SEED), device) for device in devices]
        # Held while addresses are read. Where two threads asked one array for the first time, JAX 0.10.2 said that it
        # was sharded: it seems to note the parts of an array twice then, for good.
        self._describing = threading.Lock()
        self.settle(versions.current)

    @property
    def num_bytes(self) -> int:
        return sum(mine.num_bytes for mine in self._tables_of(self._versions.current))

    def _tables_of(self, version: Version) -> list[FrozenTables]:
        return [version.parts[part].tables for part in self._parts]

    def _describe(self, version: Version) -> Stores:
        tables = zip(self._tables_of(version), self._words, strict=True)
        parts = [(mine.stores, *of_device) for mine, of_device in tables]
        with self._describing:
            return Stores(parts)

    def lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
        names, asked = self._ask(tuple(keys))
        mine = [keys[name] for name in names]
        with self._versions.reading() as version:  # nothing is written into its arrays before this ends
            kept, stores = self._kept
            if kept is not version:  # an update is about to end
                stores = self._describe(version)
            rows, counts = self._reader.lookup(stores, asked, mine)
        values = dict(zip(names, rows, strict=True))
        counts = _count_keys([array.size for array in mine], counts[:, _HITS_AND_MISSING])
        return {name: values[name] for name in keys}, version.number, (names, counts)

    def _ask(self, given: tuple[str, ...]) -> tuple[tuple[str, ...], Asked]:
        """Describes the tables of a request, as the reader takes them."""
        places, stores = self._spec.places, self._spec.stores
        names = tuple(sorted(given, key=places.__getitem__))
        return names, Asked(
            [places[name] for name in names], [store[0].dim for store in stores], list(map(len, stores))
        )

    def predict(self, read: ReadInputs) -> Found:
        while True:
            with self._versions.reading() as version:
                request, place = read(version.served), self.place_of(version)
                if self.ready.has(place, request.program):
                    tables = self._tables_of(version)[0]  # the only ones: split tables have no dense model
                    out = request.served.run(tables, request.leaves)
                    counts = count_found(tables, request.leaves, request.served.known_lookups)
                    counts.copy_to_host_async()
                    break
            self.ready.make(place, request.program)  # not while an update may wait for it, and others for the update
        values, num_keys = request.cut(out), {table: keys.size for table, keys in request.keys().items()}
        return values, version.number, (tuple(num_keys), _count_keys(list(num_keys.values()), np.asarray(counts)))

    def place_of(self, version: Version) -> Any:
        return version.parts[self._parts[0]].form, version.served

    def settle(self, now: Version) -> None:
        super().settle(now)
        self._kept = now, self._describe(now)  # where its arrays lie

    def _compile(self, place: tuple[Any, Any], program: Prediction) -> None:
        form, served = place
        leaves = served.leaves_of(program.sizes)
        served.compile(form.tree, leaves)
        count_found.lower(form.tree, leaves, served.known_lookups).compile()

    def start(self, *, warm_up: bool) -> None:
        """Compiles the first programs, and runs each of them once; called before the first request."""
        version, self.is_warmed_up = self._versions.current, warm_up
        tables = self._tables_of(version)[0]
        for program in self._first_programs(version.served) if warm_up else ():
            self.ready.make(self.place_of(version), program)
            shapes = version.served.leaves_of(program.sizes)
            leaves = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
            jax.block_until_ready(version.served.run(tables, leaves))
            jax.block_until_ready(count_found(tables, leaves, version.served.known_lookups))
        if warm_up:
            self.lookup(next(self._padding()))

    # Each request takes the latest version, and there are neither a tier below nor threads.
    def publish(self, new: Version, changed: Mapping[str, np.ndarray]) -> None: ...
    def withdraw(self, old: Version) -> None: ...
    def refresh(self) -> None: ...
    def stop(self) -> None: ...
    def close(self, until: float | None) -> bool:
        return True


class CachedRows(_Programs):
    """Reads rows of host memory or of databases through a cache on the device, which without `gpucache` keeps none."""

    def __init__(self, config: ModelConfig, versions: AnyVersions, device: Any) -> None:
        super().__init__(config)
        self._versions = versions
        self.num_warm_ups = 0
        self.clock = Repeated("jaxsok-refresh", self._refresh_by_the_clock, config.refresh_delay)
        self.cache = cache_lib.DeviceCache(
            versions.current.rows(),
            fraction=config.gpucacheper if config.gpucache else 1e-9,
            hit_rate_threshold=config.hit_rate_threshold if config.gpucache else math.inf,
            refresh_fraction=config.cache_refresh_percentage_per_iteration,
            keeps_rows=config.gpucache,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes

    def lookup(self, keys: Mapping[str, np.ndarray]) -> Found:
        found = self.cache.lookup(keys)
        return found.rows, found.version, _padding_of(keys)

    def predict(self, read: ReadInputs) -> Found:
        served = self._versions.current.served
        while True:
            request = read(served)
            self.ready.need((None, request.served), request.program)
            lookups, leaves = request.served.known_lookups, request.leaves
            keys = {table: np.concatenate([keys_in(leaves[name]) for name in names]) for table, names in lookups}
            tables, source = self.cache.lookup_tables(keys)
            served = source.served
            if served is request.served:
                values = request.cut(served.run(tables, request.leaves))
                return values, source.version, _padding_of(request.keys())
            # Else the dense model is another one by now, which may read other keys.

    def place_of(self, version: Version) -> Any:
        return None, version.served  # the arrays of the cache keep their shapes

    def _compile(self, place: tuple[Any, Any], program: Prediction) -> None:
        served, leaves = place[1], place[1].leaves_of(program.sizes)
        sizes = {name: math.prod(words_in(leaf).shape[:-1]) for name, leaf in leaves.items()}
        num_keys = {table: sum(sizes[name] for name in names) for table, names in served.known_lookups}
        self.cache.warm_up([num_keys], as_tables=True)
        served.compile(self.cache.tables_like(num_keys), leaves)

    def start(self, *, warm_up: bool) -> None:
        """Fills the cache, compiles the first programs, and begins to refresh, as the configuration says."""
        self.is_warmed_up = warm_up
        if self._config.is_filled_at_start:
            self.cache.fill()
        if warm_up:
            self.cache.warm_up({name: array.size for name, array in keys.items()} for keys in self._padding())
            for keys in self._padding():
                self.lookup(keys)
            self.num_warm_ups = self.cache.stats().lookups
            version = self._versions.current
            for program in self._first_programs(version.served):
                self.ready.make(self.place_of(version), program)
        if self._config.is_refreshed:
            self.clock.start()  # last: a failure above leaves no thread

    def publish(self, new: Version, changed: Mapping[str, np.ndarray]) -> None:
        rows = new.rows()
        rows.ready_as(self.cache.source)  # else the first misses would wait for a compiler
        if new.replaced:  # a database may have lost rows that are cached
            cached = self.cache.cached_keys()
            changed = {**changed, **{name: np.append(changed[name], cached[name]) for name in new.replaced}}
        self.cache.swap(rows, changed)

    def withdraw(self, old: Version) -> None:
        """Goes back to a version after the next one was published to some readers alone: all rows leave the cache."""
        self.cache.swap(old.rows(), None)

    def refresh(self) -> None:
        self.cache.refresh()

    def _refresh_by_the_clock(self) -> float:
        try:
            self.cache.refresh()
        except Exception:  # any tier may fail; the next refresh may succeed
            if not self.clock.is_stopping():
                _log.exception('model "%s": the refresh of the cache failed, wanted its rows', self._config.model)
        return self._config.refresh_interval

    def stop(self) -> None:
        self.clock.stop()
        self.cache.stop_compiling()

    def close(self, until: float | None) -> bool:
        """Waits until a time of `time.monotonic`, and returns whether all has ended."""
        self.stop()
        has_ended = self.clock.close(until)
        return self.cache.close(rest_s(until)) and has_ended


# Each reads the rows of a model's tables, from many threads; each result is of one version, whole.
RowReader: TypeAlias = DeviceRows | CachedRows


def add_cache_stats(stats: dict[str, Any], readers: Sequence[CachedRows]) -> None:
    """Adds up the counts of caches, without those of the warm-up."""
    of_cache = _total([reader.cache.stats() for reader in readers])
    of_cache.lookups -= sum(reader.num_warm_ups for reader in readers)
    for name in stats["tables"]:
        counts = _total([reader.cache.table_counts()[name] for reader in readers])
        stats["tables"][name] |= {**dataclasses.asdict(counts), "hit_rate": counts.hit_rate}
    num_rows = [reader.cache.num_rows for reader in readers]
    cached = {**dataclasses.asdict(of_cache), "hit_rate": of_cache.hit_rate}
    cached["num_rows"] = {name: sum(mine[name] for mine in num_rows) for name in num_rows[0]}
    stats |= {name: cached[name] for name in ("distinct", "hits", "misses", "missing", "hit_rate")}
    stats["cache"] = cached


def _total(counts: Sequence[Any]) -> Any:
    fields = [field.name for field in dataclasses.fields(counts[0])]
    return type(counts[0])(**{name: sum(getattr(mine, name) for mine in counts) for name in fields})


def _count_keys(num_keys: Sequence[int], found: np.ndarray) -> np.ndarray:
    """Counts keys by table: those that are there and those that are missing; the rest is padding."""
    lines = np.empty((len(num_keys), 4), np.int64)
    lines[:, 0] = num_keys
    lines[:, 1:3] = found
    lines[:, 3] = lines[:, 0] - lines[:, 1] - lines[:, 2]
    return lines


def _padding_of(keys: Mapping[str, np.ndarray]) -> Counts:
    padding = np.uint64(PADDING_KEY)
    lines = [(array.size, 0, 0, int((array == padding).sum())) for array in keys.values()]
    return tuple(keys), np.array(lines, np.int64).reshape(-1, 4)


def words_in(leaves: Any) -> Any:
    return leaves[0] if isinstance(leaves, tuple) else leaves


def keys_in(leaves: Any) -> np.ndarray:
    return keys_lib.from_words(words_in(leaves)).reshape(-1)


@functools.partial(jax.jit, static_argnums=2)
def count_found(
    tables: FrozenTables, leaves: Mapping[str, Any], lookups: tuple[tuple[str, tuple[str, ...]], ...]
) -> jaxtyping.Int32[Array, "num_lookups 2"]:
    """Counts, by lookup, the keys of a prediction's inputs that are there and that are not."""
    counts = []
    for table, names in lookups:
        words = jnp.concatenate([jnp.reshape(words_in(leaves[name]), (-1, 2)) for name in names])
        s, number = tables.spec.places[table]
        store, ids = tables.stores[s], jnp.full(words.shape[0], np.uint32(number))
        is_there = table_kernels.find(store.index, store.counters, words, ids) != np.uint32(NO_ROW)
        is_real = (words != PADDING_WORD).any(axis=1)
        counts.append([jnp.sum(is_there, dtype=jnp.int32), jnp.sum(is_real & ~is_there, dtype=jnp.int32)])
    return jnp.array(counts, jnp.int32).reshape(-1, 2)
