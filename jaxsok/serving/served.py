"""One model of a session: its versions, the programs that its requests use, what a request gets and what is refused.

`Served`: all rows lie on its device. `CachedServed`: some do, over all of them in host memory. session.py opens them.
"""

import dataclasses
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.features import Bags
from jaxsok.initializers import InitialRows
from jaxsok.kernels import table as table_kernels
from jaxsok.serving import artifact, backing, row_map, sources, updates
from jaxsok.serving import cache as cache_lib
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.config_values import TableConfig
from jaxsok.serving.errors import (
    RequestError,
    RequestTooLargeError,
    ServingError,
    UnknownModelError,
    UnknownTableError,
)
from jaxsok.serving.frozen import FrozenSpec, FrozenTable, FrozenTables, frozen_bytes
from jaxsok.serving.fused import LookupInput, lookup_with_counts
from jaxsok.serving.ready import Ready
from jaxsok.serving.row_map import RowMap
from jaxsok.serving.updates import InPlace, Source, Version, Versions
from jaxsok.types import COUNTS, NO_ROW, PADDING_KEY

_log = logging.getLogger(__name__)

LEAST_SAMPLES = 16
"""Of a program: requests are padded to this many samples, or twice as many, and so on up to `max_batch_size`."""

_MET = [COUNTS.index(name) for name in ("num_found", "num_missing")]  # of keys that stand for some

_NO_KEYS = np.zeros(0, np.uint64)

MOST_SETS = 16
"""Sets of tables that have programs of their own; a request for yet another one looks up all tables of its model, or,
where that makes too many rows, each of its own by itself."""

MOST_EXTRA_BYTES = 64 << 20
"""Of rows that nobody asked for: a request for some tables is answered by the program for all, if it makes no more."""


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
    outputs: Mapping[str, Any] | None
    """Of `predict`, by name (`artifact.ServedModel.outputs`)."""
    version: int


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """Which program of a dense model."""

    inputs: tuple[tuple[str, Any], ...]
    """Of the model."""
    sizes: tuple[tuple[int, int], ...]
    """Of what it gets (`artifact.ServedModel.sizes`)."""

    def fits(self, served: artifact.ServedModel | None) -> bool:
        """Whether a model has such a program."""
        return served is not None and self.inputs == tuple(served.inputs.items())


_Lookup: TypeAlias = tuple[tuple[str, int], ...]
"""Which program of lookups: tables, and to how many keys each is padded."""

_Program: TypeAlias = _Lookup | _Prediction


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A prediction that is checked, as the program gets it."""

    served: artifact.ServedModel
    leaves: Mapping[str, Any]
    num_samples: int

    @property
    def program(self) -> _Prediction:
        """That answers it."""
        return _Prediction(tuple(self.served.inputs.items()), self.served.sizes(self.leaves))

    def keys(self) -> dict[str, np.ndarray]:
        """The keys that are read of each table, as far as they are known, without those that fill up the program."""
        return {
            table: np.concatenate([_keys_of(self.leaves[name])[self._places(name)] for name in names])
            for table, names in _lookups_of(self.served)
        }

    def num_keys(self) -> dict[str, int]:
        """How many these are."""
        places = {table: map(self._places, names) for table, names in _lookups_of(self.served)}
        return {table: sum(one.stop - one.start for one in mine) for table, mine in places.items()}

    def _places(self, name: str) -> slice:
        """Of an input's keys that are read: of bags those inside of them."""
        leaves = self.leaves[name]
        if isinstance(leaves, tuple):
            return slice(int(leaves[1][0]), int(leaves[1][-1]))
        return slice(0, self.num_samples * math.prod(leaves.shape[1:-1]))

    def cut(self, out: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """What the program gave, without the lines of samples that are padding."""
        arrays = {name: np.asarray(value) for name, value in out.items()}
        return {
            name: value[: self.num_samples] if self.served.outputs[name].is_batched else value
            for name, value in arrays.items()
        }


class Served:
    """One model of a session, whose rows all lie on its device."""

    def __init__(
        self,
        config: ModelConfig,
        key_bits: sources.KeyBits,
        device: Any,
        room: Callable[[], int | None],
        memory: threading.Lock,
        *,
        warm_up: bool,
    ) -> None:
        """Opens it.

        Args:
          config: of the model.
          key_bits: of all keys of the session.
          device: where its rows lie, or are cached.
          room: bytes of the device that are free; None: not known.
          memory: held while some of the device is taken: of all models that share it.
          warm_up: whether programs are compiled before they are asked for.
        """
        self._memory = memory
        self.config, self.device, self.is_warmed_up = config, device, warm_up
        self.key_bits: sources.KeyBits = key_bits
        given = []
        for table in config.tables:
            source = sources.open_table(
                table.file,
                table=table.name,
                dim=table.dim,
                key_bits=key_bits,
                hotness=config.is_filled_at_start,
                op="open",
            )
            dtype: Any = config.row_dtype or source.dtype
            if table.default is not None:
                source = dataclasses.replace(source, unknown=None)  # what the configuration says counts
            default, initial = _missing("open", config, table, source)
            given.append((FrozenTable(table.name, table.dim, default, dtype, initial), source))
        self.per_sample = {table.name: table.max_keys_per_sample for table in config.tables}
        self._dims = {table.name: table.dim for table in config.tables}
        self.workers = threading.BoundedSemaphore(config.num_of_worker_buffer_in_pool)
        served = None
        if config.dense_file:
            served = _dense_model(
                "open", config, config.dense_file, self._seen(FrozenSpec.of([one for one, _ in given])), device
            )
        self.versions = self._loaded(given, room, served)
        self.names = tuple(self.versions.current.tables.tables)
        self.counts = _Counts(self.names)
        self._sets, self._lock = {self.names}, threading.Lock()
        self.ready: Ready[_Program] = Ready(self._compile)
        if warm_up:
            self.warm_up(self.versions.current)

    def _loaded(self, given: Sequence[Any], room: Callable[[], int | None], served: Any) -> Versions:
        """The first version, in its place."""
        return Versions(
            self.config.model,
            given,
            device=self.device,
            key_bits=self.key_bits,
            spare_rows=self.config.spare_rows,
            room=room if self.config.gpucache else _host_room,
            served=served,
            dense_file=self.config.dense_file,
            memory=self._memory,
        )

    def _seen(self, spec: FrozenSpec) -> FrozenSpec:
        """The tables as a dense model sees them."""
        return spec

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return self.versions.current.tables.num_bytes

    @property
    def held_bytes(self) -> int:
        """Of the device, for a version that is not served yet."""
        return self.versions.held_bytes

    @property
    def host_bytes(self) -> int:
        """Of maps of rows, and of rows below a cache."""
        return self.versions.host_bytes

    def described(self) -> Model:
        """As it is now."""
        version = self.versions.current
        return Model(
            name=self.config.model,
            tables=version.tables.tables,
            num_rows=version.num_rows,
            max_batch_size=self.config.max_batch_size,
            max_keys=self.config.max_keys,
            key_bits=self.key_bits,
            inputs=None if version.served is None else version.served.inputs,
            outputs=None if version.served is None else version.served.outputs,
            version=version.number,
        )

    # Lookups ---------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Mapping[str, Any]) -> Answer:
        """Rows of keys; see `Session.lookup`."""
        arrays = self._read_keys(keys)
        with self.workers:
            return self._looked_up(arrays)

    def _looked_up(self, arrays: Mapping[str, np.ndarray]) -> Answer:
        num_keys = {name: array.size for name, array in arrays.items()}
        while True:
            where = self._where(self.versions.current)
            programs = self._programs(where, num_keys)  # compiled here, not while an update waits for its readers
            words = [
                np.concatenate([_padded(arrays.get(name, _NO_KEYS), size) for name, size in program])
                for program in programs
            ]
            with self.versions.reading() as version:
                if self._where(version) == where:
                    pairs = zip(words, programs, strict=True)
                    calls = [_looked_up(version.tables, mine, program) for mine, program in pairs]
                    break
        # What a program gave is the caller's: an update need not wait until it is copied.
        for rows, of_call in calls:
            for array in (of_call, *(rows[name] for name in arrays if name in rows)):
                array.copy_to_host_async()
        found, counts = {}, np.zeros((len(self.names), len(COUNTS)), np.int64)
        for values, of_call in calls:
            found |= {name: np.asarray(value) for name, value in values.items() if name in arrays}
            counts += np.asarray(of_call)
        values = {}
        for name, array in arrays.items():
            rows = found[name][: array.size]
            values[name] = rows.reshape(*array.shape, rows.shape[-1])
        met = dict(zip(self.names, counts, strict=True))
        self.counts.add("lookups", num_keys, {name: met[name][_MET] for name in num_keys})
        return Answer(values, version=version.number)

    def _programs(self, where: Any, num_keys: Mapping[str, int]) -> list[_Lookup]:
        """What looks up so many keys of some tables: one program, or if they are not fused one for each; compiled.

        Where the one for all tables is compiled and that for these alone is not, it does, and the other one is compiled
        beside. `MOST_SETS` sets of tables get one. No program makes `MOST_EXTRA_BYTES` of rows that nobody asked for.
        """
        names = tuple(name for name in self.names if name in num_keys)
        samples = max(-(-num_keys[name] // self.per_sample[name]) for name in names)
        level = next(level for level in self.levels if level >= samples)
        mine, all_ = (tuple((name, level * self.per_sample[name]) for name in some) for some in (names, self.names))
        if not self.config.is_fused:
            programs = [(size,) for size in mine]
        else:
            with self._lock:
                if names not in self._sets and len(self._sets) < MOST_SETS:
                    self._sets.add(names)
                is_known = names in self._sets
            programs = [mine if is_known else all_]
            if self._row_bytes(all_) - self._row_bytes(mine) > MOST_EXTRA_BYTES:
                programs = [mine] if is_known else [(size,) for size in mine]
            elif is_known and not self.ready.has(where, mine) and self.ready.has(where, all_):
                self.ready.make_beside(where, mine)
                return [all_]
        for program in programs:
            if not self.ready.has(where, program):
                self.ready.make(where, program)
        return programs

    def _row_bytes(self, program: _Lookup) -> int:
        """Of what it gives."""
        return sum(4 * size * self._dims[name] for name, size in program)

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Samples that programs are made for."""
        most = self.config.max_batch_size
        doubled = [LEAST_SAMPLES << step for step in range(max(0, math.ceil(math.log2(most / LEAST_SAMPLES))))]
        return (*doubled, most)

    def warm_up(self, version: Version) -> None:
        """Compiles the programs of lookups in all tables, and of the dense model, and runs each once."""
        where = self._where(version)
        for program in self._first_programs(version.served):
            self.ready.make(where, program)
            if isinstance(program, _Prediction):
                leaves = jax.tree.map(
                    lambda one: np.zeros(one.shape, one.dtype), version.served.leaves_of(program.sizes)
                )
                jax.block_until_ready(version.served.run(version.tables, leaves))
                jax.block_until_ready(_met(version.tables, leaves, _lookups_of(version.served)))
            else:
                words = keys_lib.padding_words((sum(size for _, size in program),))
                jax.block_until_ready(_looked_up(version.tables, words, program))

    def _first_programs(self, served: artifact.ServedModel | None) -> list[_Program]:
        """Those that are compiled before they are asked for."""
        programs: list[_Program] = []
        for level in self.levels:
            sizes = tuple((name, level * self.per_sample[name]) for name in self.names)
            programs += [sizes] if self.config.is_fused else [(size,) for size in sizes]
        return programs + self._first_predictions(served)

    def _first_predictions(self, served: artifact.ServedModel | None) -> list[_Program]:
        if served is None or not served.is_per_sample:  # others are compiled for each size
            return []
        found: list[_Program] = []
        for level in self.levels:
            leaves, num_samples = served.read({name: _example(spec, level) for name, spec in served.inputs.items()})
            found.append(_Asked(served, served.padded(leaves, num_samples), num_samples).program)
        return found

    def _where(self, version: Version) -> tuple[Any, Any]:
        """What programs are compiled for."""
        return version.form, version.served

    def _compile(self, where: tuple[Any, Any], program: _Program) -> None:
        form, served = where
        if isinstance(program, _Prediction):
            leaves = served.leaves_of(program.sizes)
            served.compile(form.tree, leaves)
            _met.lower(form.tree, leaves, _lookups_of(served)).compile()
        else:
            words = jax.ShapeDtypeStruct((sum(size for _, size in program), 2), np.uint32)
            _looked_up.lower(form.tree, words, program).compile()

    def _read_keys(self, keys: Any) -> dict[str, np.ndarray]:
        """The keys of a request as uint64, checked."""
        op = "lookup"
        if not isinstance(keys, Mapping):
            raise RequestError(f"{op}: keys: got {type(keys).__name__}, wanted a mapping from tables to keys.")
        if not keys:
            raise RequestError(f"{op}: keys: got no tables, wanted at least one of {sorted(self.names)}.")
        arrays = {}
        for name, given in keys.items():
            if not isinstance(name, str) or name not in self.per_sample:
                raise UnknownTableError.of(op, name, self.names, f'model "{self.config.model}"')
            what = f'{op}: table "{name}"'
            array = _integers(given, what)
            self._check_number(what, name, array.size)
            keys64 = array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)
            self._check_bits(what, keys64)
            arrays[name] = keys64
        return arrays

    def _check_number(self, what: str, table: str, num_keys: int) -> None:
        most = self.config.max_keys[table]
        if num_keys > most:
            raise RequestTooLargeError(
                f"{what}: keys: got {num_keys}, wanted at most {most}: max_batch_size ({self.config.max_batch_size}) "
                f"times {self.per_sample[table]} of a sample."
            )

    def _check_bits(self, what: str, keys: np.ndarray) -> None:
        if self.key_bits == 64:
            return
        wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
        if wrong.any():
            raise RequestError(
                f"{what}: keys: got {keys[wrong].view(np.int64)[0]}, wanted 0 to 4294967295: keys have 32 bits, since "
                "supportlonglong is false."
            )

    # The dense model -------------------------------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Answer:
        """What the dense model gives; see `Session.predict`."""
        with self.workers:
            values, version = self._predicted(inputs)
        return Answer(values, version=version)

    def _predicted(self, inputs: Any) -> tuple[dict[str, np.ndarray], int]:
        while True:
            with self.versions.reading() as version:
                asked, where = self._read_inputs(version.served, inputs), self._where(version)
                if self.ready.has(where, asked.program):
                    out = asked.served.run(version.tables, asked.leaves)
                    met = _met(version.tables, asked.leaves, _lookups_of(asked.served))
                    met.copy_to_host_async()
                    break
            self.ready.make(where, asked.program)  # not while an update may wait for it, and others for the update
        answer = asked.cut(out)
        num_keys = asked.num_keys()
        self.counts.add("predicts", num_keys, dict(zip(num_keys, np.asarray(met), strict=True)))
        return answer, version.number

    def _read_inputs(self, served: artifact.ServedModel | None, inputs: Any) -> _Asked:
        """A prediction, when all of it is checked."""
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
        given = {name: _keys_of(leaves[name]) for name, spec in served.inputs.items() if hasattr(spec, "table")}
        for name, keys in given.items():
            self._check_bits(f'{op}: inputs["{name}"]', keys)
        for table, names in self._inputs_of(served).items():
            self._check_number(f'{op}: table "{table}"', table, sum(given[name].size for name in names))
        if served.is_per_sample:
            leaves = served.padded(leaves, num_samples)
        return _Asked(served, leaves, num_samples)

    def _inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]:
        """The inputs whose keys count for each table: as they are declared."""
        tables: dict[str, list[str]] = {}
        for name, spec in served.inputs.items():
            if hasattr(spec, "table"):
                tables.setdefault(spec.table, []).append(name)
        return tables

    # Versions --------------------------------------------------------------------------------------------------------

    def update(self, source: Source | None, dense_file: str | os.PathLike[str] | None, in_place: InPlace) -> int:
        """The next version; see `Session.update`."""
        served = None
        if dense_file is not None:
            spec = self._seen(self.versions.current.tables.spec)
            served = _dense_model("update", self.config, dense_file, spec, self.device)
        version = self.versions.update(
            source,
            in_place=in_place,
            served=served,
            dense_file=None if dense_file is None else str(dense_file),
            prepare=self._prepare,
            publish=self._publish,
            settle=lambda now: self.ready.keep([self._where(now)]),
        )
        self.counts.add("updates")
        return version.number

    def _prepare(self, old: Version, new: Version) -> None:
        """Compiles for a new version what requests have used, before it is served."""
        where = self._where(new)
        if where == self._where(old):
            return
        self.ready.keep([self._where(old), where])
        wanted = [*(self._first_programs(new.served) if self.is_warmed_up else []), *self.ready.used()]
        for _ in range(2):  # requests go on meanwhile, and use more: what comes later still, they wait for
            for program in wanted:
                if not isinstance(program, _Prediction) or program.fits(new.served):
                    self.ready.make(where, program)
            wanted = self.ready.used()

    def _publish(self, new: Version, maps: tuple[RowMap, ...], changed: Mapping[str, np.ndarray]) -> None:
        """Nothing: readers take the latest version."""

    def refresh(self) -> None:
        """Nothing: there is no tier below."""

    def stats(self) -> dict[str, Any]:
        """See `Session.stats`."""
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
            "bytes": self.num_bytes,
            "host_bytes": self.host_bytes,
        }

    def report(self) -> list[str]:
        """As lines."""
        version = self.versions.current
        lines = [
            f'model "{self.config.model}", version {version.number}: {self.num_bytes:,} bytes on {self.device}, '
            f"{self.host_bytes:,} bytes of host memory beside"
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

    def stop(self) -> None:
        """Begins nothing more beside requests."""
        if hasattr(self, "ready"):  # else opening failed
            self.ready.stop()

    def close(self, until: float | None = None) -> bool:
        """Nothing is left running, unless it takes longer than until then; whether that is so."""
        return not hasattr(self, "ready") or self.ready.close(_rest_s(until))


class CachedServed(Served):
    """One model of a session, some of whose rows are cached on its device; all of them lie in host memory."""

    def __init__(self, config: ModelConfig, *args: Any, **options: Any) -> None:
        self._is_closed = threading.Event()
        self._clock = threading.Thread(target=self._refresh_by_the_clock, name="jaxsok-refresh", daemon=True)
        self._num_warm_ups = 0
        try:
            super().__init__(config, *args, **options)
        except BaseException:
            self.close()
            raise
        if config.is_refreshed:
            self._clock.start()  # last: what fails above leaves no thread

    def _loaded(self, given: Sequence[Any], room: Callable[[], int | None], served: Any) -> Versions:
        config = self.config
        num_rows = {
            table: max(cache_lib.MIN_ROWS, math.ceil(config.gpucacheper * source.num_rows)) for table, source in given
        }
        needed, free = sum(cache_lib.cache_bytes(num_rows).values()), room()
        if free is not None and needed > free:
            raise ServingError(
                f'open: model "{config.model}": memory: got {free} bytes free on {self.device}, wanted {needed} for '
                f"its cache; take a gpucacheper below {config.gpucacheper}."
            )
        uses = _Uses()
        versions = Versions(
            config.model,
            [(table, uses.of(table.name, source)) for table, source in given] if config.is_filled_at_start else given,
            device=row_map.host_device(),
            key_bits=self.key_bits,
            spare_rows=config.spare_rows,
            room=_host_room,
            served=served,
            dense_file=config.dense_file,
            can_donate=False,
            memory=self._memory,
        )
        first = versions.current
        self._history = {first.number: first.served}
        frequencies = uses.by_row(first.tables, versions.maps) if config.is_filled_at_start else None
        self._rows = backing.HostRows(first.tables, versions.maps, version=first.number, frequencies=frequencies)
        self.cache = cache_lib.DeviceCache(
            self._rows,
            fraction=config.gpucacheper,
            hit_rate_threshold=config.hit_rate_threshold,
            refresh_fraction=config.cache_refresh_percentage_per_iteration,
            device=self.device,
        )
        if config.is_filled_at_start:
            self.cache.fill()
        return versions

    def _seen(self, spec: FrozenSpec) -> FrozenSpec:
        return cache_lib.cached_spec(table for tables in spec.stores for table in tables)

    @property
    def num_bytes(self) -> int:
        """Of the device: the cache."""
        return self.cache.num_bytes

    @property
    def held_bytes(self) -> int:
        """None: versions are made on the host."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Of maps of rows, and of all rows."""
        return self.versions.host_bytes + self.versions.current.tables.num_bytes

    def _looked_up(self, arrays: Mapping[str, np.ndarray]) -> Answer:
        if self.config.is_fused:
            found = self.cache.lookup(arrays)
            rows, version = found.rows, found.version
        else:
            rows, version = self._looked_up_one_by_one(arrays)
        self._count("lookups", arrays)
        return Answer(rows, version=version)

    def _count(self, done: str, keys: Mapping[str, np.ndarray]) -> None:
        """Counts keys; what became of them the cache counts."""
        padding = {name: int((array == np.uint64(PADDING_KEY)).sum()) for name, array in keys.items()}
        self.counts.add(done, {name: array.size for name, array in keys.items()}, padding=padding)

    def _looked_up_one_by_one(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
        while True:
            found = {name: self.cache.lookup({name: array}) for name, array in arrays.items()}
            versions = {one.version for one in found.values()}
            if len(versions) == 1:  # else an update came between two tables
                return {name: one.rows[name] for name, one in found.items()}, versions.pop()

    def warm_up(self, version: Version) -> None:
        """Compiles the programs of lookups in all tables, and of the dense model, without keys that would count."""
        sets = [self.names] if self.config.is_fused else [(name,) for name in self.names]
        self.cache.warm_up(
            [{name: level * self.per_sample[name] for name in names} for names in sets for level in self.levels]
        )
        for level in self.levels:
            self.cache.lookup(
                {name: np.full(level * self.per_sample[name], np.uint64(PADDING_KEY)) for name in self.names}
            )
            self._num_warm_ups += 1
        for program in self._first_programs(version.served):
            self.ready.make(self._where(version), program)

    def _first_programs(self, served: artifact.ServedModel | None) -> list[_Program]:
        return self._first_predictions(served)

    def _where(self, version: Version) -> tuple[Any, Any]:
        """The dense model alone: the arrays of the cache keep their shapes."""
        return None, version.served

    def _compile(self, where: tuple[Any, Any], program: _Program) -> None:
        assert isinstance(program, _Prediction)  # lookups are the cache's own
        served, leaves = where[1], where[1].leaves_of(program.sizes)
        num_keys = {
            table: sum(math.prod(_words_of(leaves[name]).shape[:-1]) for name in names)
            for table, names in self._inputs_of(served).items()
        }
        self.cache.warm_up([num_keys], as_tables=True)
        served.compile(self.cache.tables_like(num_keys), leaves)

    def _inputs_of(self, served: artifact.ServedModel) -> Mapping[str, Sequence[str]]:
        """The inputs that each table is looked up by: as the export saw; other rows are not fetched."""
        return {table: names or () for table, names in served.lookups.items()}

    def _predicted(self, inputs: Any) -> tuple[dict[str, np.ndarray], int]:
        served = self.versions.current.served
        while True:
            asked = self._read_inputs(served, inputs)
            where, program = (None, asked.served), asked.program
            if not self.ready.has(where, program):
                self.ready.make(where, program)
            found = self.cache.lookup_tables(
                {
                    table: np.concatenate([_keys_of(asked.leaves[name]) for name in names])
                    for table, names in self._inputs_of(asked.served).items()
                    if names
                }
            )
            history = self._history
            if found.version not in history:
                served = self.versions.current.served
                continue  # many updates came meanwhile
            served = history[found.version]
            if served is asked.served:
                answer = asked.cut(served.run(found.tables, asked.leaves))
                self._count("predicts", asked.keys())
                return answer, found.version
            # Else the dense model is another one by now, which may read other keys.

    def _publish(self, new: Version, maps: tuple[RowMap, ...], changed: Mapping[str, np.ndarray]) -> None:
        # Before any answer can be of it; the last ones are for predictions that run. Without the tables: large ones.
        rows = backing.HostRows(new.tables, maps, version=new.number)
        rows.ready_as(self._rows)  # else the first misses would wait for a compiler
        history = {number: served for number, served in self._history.items() if number > new.number - 4}
        self._history = {**history, new.number: new.served}
        self.cache.swap(rows, changed)
        self._rows = rows

    def refresh(self) -> None:
        """Reads the cached rows anew."""
        self.cache.refresh()

    def _refresh_by_the_clock(self) -> None:
        wait_s = self.config.refresh_delay
        while not self._is_closed.wait(wait_s):
            wait_s = self.config.refresh_interval
            try:
                self.cache.refresh()
            except Exception:  # of any tier; the next one may do
                if not self._is_closed.is_set():
                    _log.exception('model "%s": the refresh of the cache failed, wanted its rows', self.config.model)

    def stats(self) -> dict[str, Any]:
        """See `Session.stats`."""
        stats, of_cache = super().stats(), self.cache.stats()
        of_cache.lookups -= self._num_warm_ups
        for name, counts in self.cache.table_counts().items():
            rate = counts.hits / counts.distinct if counts.distinct else 1.0
            stats["tables"][name] |= {**dataclasses.asdict(counts), "hit_rate": rate}
        cached = {**dataclasses.asdict(of_cache), "hit_rate": of_cache.hit_rate, "num_rows": self.cache.num_rows}
        total = {name: cached[name] for name in ("distinct", "hits", "misses", "missing", "hit_rate")}
        return {**stats, **total, "cache": cached}

    def stop(self) -> None:
        """Nor a refresh."""
        self._is_closed.set()
        super().stop()
        if hasattr(self, "cache"):  # else it was not made: opening failed
            self.cache.stop_compiling()

    def close(self, until: float | None = None) -> bool:
        """Ends the threads of the cache."""
        self.stop()
        if self._clock.is_alive():
            self._clock.join(_rest_s(until))
        has_ended = super().close(until) and not self._clock.is_alive()
        return (not hasattr(self, "cache") or self.cache.close(_rest_s(until))) and has_ended


class _Uses:
    """How often keys were used, as files tell it while rows are read: for the rows that a cache begins with."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def of(self, table: str, source: sources.TableSource) -> sources.TableSource:
        """A source that is listened to."""

        def chunks() -> Iterator[Any]:
            seen, is_known = self._seen.setdefault(table, []), True
            for records in source.chunks():
                if records.frequency is None:
                    is_known = False
                    seen.clear()
                elif is_known:
                    seen.append((records.keys.copy(), np.array(records.frequency, np.uint32)))
                yield records

        return dataclasses.replace(source, start=chunks)

    def by_row(self, tables: FrozenTables, maps: Sequence[RowMap]) -> list[np.ndarray | None]:
        """Of each store's rows; None: no file of its tables tells."""
        return backing.frequencies_by_row(tables, maps, self._seen)


_KINDS: tuple[str, ...] = ("keys", "hits", "missing", "padding")


class _Counts:
    """Numbers of a model, added up."""

    def __init__(self, names: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, int] = dict.fromkeys(("lookups", "predicts", "updates"), 0)
        self._tables: dict[str, dict[str, int]] = {name: dict.fromkeys(_KINDS, 0) for name in names}

    def add(
        self,
        done: str,
        num_keys: Mapping[str, int] | None = None,
        met: Mapping[str, np.ndarray] | None = None,
        padding: Mapping[str, int] | None = None,
    ) -> None:
        """Counts something that was done, and the keys that it read.

        Args:
          done: "lookups", "predicts" or "updates".
          num_keys: by table, padding among them.
          met: by table, how many are there and how many are not; None: that is counted elsewhere.
          padding: by table; None: the rest.
        """
        with self._lock:
            self._done[done] += 1
            for name, number in (num_keys or {}).items():
                hits, missing = (0, 0) if met is None else map(int, met[name])
                rest = number - hits - missing if padding is None else padding[name]
                for kind, more in zip(_KINDS, (number, hits, missing, rest), strict=True):
                    self._tables[name][kind] += more

    def stats(self) -> dict[str, Any]:
        """All of it."""
        with self._lock:
            done, tables = dict(self._done), {name: dict(table) for name, table in self._tables.items()}
        total = {kind: sum(table[kind] for table in tables.values()) for kind in _KINDS}
        return {**done, **_rated(total), "tables": {name: _rated(table) for name, table in tables.items()}}


def _rest_s(until: float | None) -> float | None:
    """Seconds until a time of `time.monotonic`; None: any number."""
    return None if until is None else max(0.0, until - time.monotonic())


def _rated(counts: Mapping[str, int]) -> dict[str, Any]:
    """Counts, and the part of the keys that are there."""
    real = counts["hits"] + counts["missing"]
    return {**counts, "hit_rate": counts["hits"] / real if real else 1.0}


@functools.partial(jax.jit, static_argnums=2)
def _looked_up(
    tables: FrozenTables, words: jaxtyping.UInt32[Any, "num_keys 2"], sizes: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Array], Array]:
    """The rows of the keys of some tables, that lie behind each other, and what became of them."""
    inputs, start = {}, 0
    for name, size in sizes:
        inputs[name] = LookupInput(name, words[start : start + size])
        start += size
    return lookup_with_counts(tables, inputs)


def _lookups_of(served: artifact.ServedModel) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Tables, and the inputs that they are looked up by; without tables whose keys the model works out."""
    return tuple((table, names) for table, names in served.lookups.items() if names)


@functools.partial(jax.jit, static_argnums=2)
def _met(
    tables: FrozenTables, leaves: Mapping[str, Any], lookups: tuple[tuple[str, tuple[str, ...]], ...]
) -> jaxtyping.Int32[Array, "num_lookups 2"]:
    """Counts, for each lookup, the keys of a prediction's inputs that are there and those that are not.

    The exported program gives outputs alone, so the keys are searched for once more, on its device.
    """
    counts = []
    for table, names in lookups:
        words = jnp.concatenate([_read_words(leaves[name]) for name in names])
        s, number = tables.spec.places[table]
        store, ids = tables.stores[s], jnp.full(words.shape[0], np.uint32(number))
        is_there = table_kernels.find(store.index, store.counters, words, ids) != np.uint32(NO_ROW)
        is_real = (words != np.uint32(0xFFFFFFFF)).any(axis=1)
        counts.append([jnp.sum(is_there, dtype=jnp.int32), jnp.sum(is_real & ~is_there, dtype=jnp.int32)])
    return jnp.array(counts, jnp.int32).reshape(-1, 2)


def _read_words(leaves: Any) -> Any:
    """The keys of an input that are read, as words: those outside of all bags become padding."""
    if not isinstance(leaves, tuple):
        return jnp.reshape(leaves, (-1, 2))
    words, offsets, *_ = leaves
    place = jnp.arange(words.shape[0], dtype=jnp.int32)
    is_inside = (place >= offsets[0]) & (place < offsets[-1])
    return jnp.where(is_inside[:, None], words, np.uint32(0xFFFFFFFF))


def _padded(keys: np.ndarray, size: int) -> np.ndarray:
    """Keys as words, filled up with padding."""
    words = keys_lib.padding_words((size,))
    words[: keys.size] = keys_lib.to_words(keys.reshape(-1))
    return words


def _words_of(leaves: Any) -> Any:
    """The keys of an input of a program."""
    return leaves[0] if isinstance(leaves, tuple) else leaves


def _keys_of(leaves: Any) -> np.ndarray:
    return keys_lib.from_words(_words_of(leaves)).reshape(-1)


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


def _host_room() -> int | None:
    return updates.host_free_bytes()


def _missing(
    op: str, config: ModelConfig, table: TableConfig, source: sources.TableSource
) -> tuple[float, InitialRows | None]:
    """What a key without a row reads: the default, or the initial row in its place."""
    if table.default is not None:
        return table.default, None
    if isinstance(source.unknown, str):
        raise ServingError(
            f'{op}: model "{config.model}": table "{table.name}": default_value_for_each_table: got no number, and in '
            f'training of "{source.path}" a key without a row reads {source.unknown}, which served tables cannot work '
            "out; wanted the number that they serve."
        )
    if isinstance(source.unknown, InitialRows):
        return 0.0, source.unknown
    return source.unknown or 0.0, None


def _dense_model(
    op: str, config: ModelConfig, path: str | os.PathLike[str], spec: FrozenSpec, device: Any
) -> artifact.ServedModel:
    """An artifact, checked to fit the tables, and the tier and the device that they lie in."""
    served = artifact.load_model(path, device)
    tables = {table.name: table for table in itertools.chain(*spec.stores)}
    for name, wanted in served.tables.items():
        what = f'{op}: model "{config.model}": dense_file: got "{path}", which wants'
        if name not in tables:
            raise UnknownTableError(f'{what} a table "{name}", wanted one of tables among {sorted(tables)}.')
        got = tables[name]
        if (got.dim, got.dtype) != (wanted.dim, wanted.dtype):
            raise ServingError(
                f'{what} table "{name}" of {wanted.dtype}[{wanted.dim}], wanted {got.dtype}[{got.dim}], as it is '
                "served; export the model over tables of that dtype."
            )
    unknown = [name for name, inputs in served.lookups.items() if inputs is None]
    if config.tier == "cache" and unknown:
        raise ServingError(
            f'{op}: model "{config.model}": dense_file: got "{path}", which reads {unknown} by keys that are not the '
            "keys of an input (it works them out, or was exported before that was written down), wanted inputs alone: "
            "over a cache only their rows are fetched. Give those keys as a KeysInput or BagsInput and export again, "
            "or take a gpucacheper of 1.0, where all rows are on the device."
        )
    return served


def _example(spec: artifact.InputSpec, num_samples: int) -> Any:
    """An input to compile programs with: no keys, and zeros."""
    if isinstance(spec, artifact.BagsInput):
        keys = np.full(num_samples, np.uint64(PADDING_KEY))
        weights = np.zeros(num_samples, np.float32) if spec.is_weighted else None
        return Bags(keys, offsets=np.arange(num_samples + 1), weights=weights)
    if isinstance(spec, artifact.KeysInput):
        return np.full((num_samples, *spec.shape), np.uint64(PADDING_KEY))
    return np.zeros((num_samples, *spec.shape), spec.dtype)
