"""The tiers below the device, which have the rows that a device cache lacks.

A tier is a `RowSource`: rows in host memory (`HostRows`), or a database. Tiers stack (`Layered`): the first that has a
key gives its row.
"""

import abc
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, UInt64

from jaxsok.kernels import table as table_kernels
from jaxsok.records import Records
from jaxsok.serving import quantize
from jaxsok.serving.errors import UnknownTableError
from jaxsok.serving.frozen import (
    FrozenStore,
    FrozenTable,
    FrozenTables,
    RecordSource,
    check_records,
    freeze_records,
    write_rows,
)
from jaxsok.serving.fused import find_rows
from jaxsok.serving.gate import Gate
from jaxsok.serving.padding import fill_up, key_words, padded_size
from jaxsok.serving.ready import Form
from jaxsok.serving.row_map import RowMap, host_device
from jaxsok.types import MAX_CAPACITY, NO_ROW, PADDING_KEY

KEYS_AT_A_TIME = 1 << 20  # in one fetch, to bound scratch memory
_LEAST_KEYS = 256  # keys are padded to a power of two, so that programs are few
_WARN_S = 60.0  # between two warnings of rows of one source and table that cannot be quantized
_log = logging.getLogger(__name__)
_GROWTH = 1.25  # factor of a store's rows, when an update brings more keys than there is room for

Keys: TypeAlias = UInt64[np.ndarray, " num_keys"]
Rows: TypeAlias = Float32[np.ndarray, "num_keys dim"]
IsFound: TypeAlias = Bool[np.ndarray, " num_keys"]


class SourceReplacedError(RuntimeError):
    """An update in place gave the rows of this source to a newer version: ask that one."""


_SHARING = threading.Lock()  # held while the `_holders` of any HostRows are read or changed: versions share these sets


class RowSource(abc.ABC):
    """The rows of some tables, by key, read by many threads: a tier below the device, as host memory or a database.

    A source has one version, which its owner raises when rows change. Where the rows of a version never change, a
    reader that holds the source holds the version (`HostRows`). A database whose rows change beneath its readers keeps
    its version: a device cache then has new rows after `DeviceCache.refresh`.
    """

    version: int = 0  # of the rows; part of each answer

    @property
    @abc.abstractmethod
    def tables(self) -> Mapping[str, FrozenTable]:
        """The tables by name."""

    @abc.abstractmethod
    def num_rows(self, table: str) -> int:
        """The rows of a table, or somewhat more: caches are sized by it."""

    @abc.abstractmethod
    def fetch(
        self, table: str, keys: Keys
    ) -> tuple[Float32[np.ndarray, "num_keys dim"], Bool[np.ndarray, " num_keys"]]:
        """The rows of uint64 keys, and which of them are there. Keys may repeat; PADDING_KEY is never there.

        Rows have the precision of the table's dtype: a row of an int8 table is its numbers times its scale. Rows of
        missing keys may hold anything. Arrays are read only, or the caller's own.
        """

    def fetch_quantized(self, table: str, keys: Keys) -> tuple[np.ndarray, np.ndarray, IsFound]:
        """Fetches from a table that `is_quantized`: its numbers, their float32 scales, and which are there.

        A device cache stores these. Unless a source overrides it, this quantizes what `fetch` gives; a row that is not
        finite counts as not found, and is logged.
        """
        rows, is_found = self.fetch(table, keys)
        with np.errstate(over="ignore"):  # numbers too large for float32 have no scale either
            rows = rows.astype(np.float32, copy=False)
        is_broken = is_found & ~np.isfinite(rows).all(axis=1)
        if is_broken.any():
            is_found = is_found & ~is_broken
            self._warn_broken(table, np.asarray(keys)[is_broken])
        numbers, scales = quantize.quantized(np.where(is_found[:, None], rows, 0), self.tables[table].dtype)
        return numbers, scales, is_found

    @functools.cached_property
    def _warned_at(self) -> dict[str, float]:
        """The time of the last warning of rows that cannot be quantized, by table."""
        return {}

    def _warn_broken(self, table: str, keys: np.ndarray) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(table, -_WARN_S) >= _WARN_S:
            self._warned_at[table] = now
            _log.warning(
                '%s.fetch: table "%s": got %d rows that are not finite, the first of key %d, wanted numbers to be '
                "quantized; they count as not found. Not told again for %g s.",
                *(type(self).__name__, table, len(keys), keys[0], _WARN_S),
            )

    @abc.abstractmethod
    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        """All rows of a table, at most `chunk_rows` at a time, to fill a cache. With frequencies, if they are known."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Releases what it holds."""


class HostRows(RowSource):
    """Rows in host memory: frozen tables on JAX's CPU device, read by threaded kernels.

    `maps` of the rows serve `scan` and `updated`; they belong to this object from now on. `frequencies` are by store,
    uint32 by row id; None, or all 0 in a table: not known.
    """

    def __init__(
        self,
        tables: FrozenTables,
        maps: Sequence[RowMap],
        *,
        version: int = 0,
        frequencies: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        if len(maps) != len(tables.stores):
            raise ValueError(f"HostRows: maps: got {len(maps)}, wanted one for each of {len(tables.stores)} stores.")
        self.version = version
        self._tables = tables
        self._maps = tuple(maps)
        self._frequencies = (None,) * len(maps) if frequencies is None else tuple(frequencies)
        self._gate = Gate()
        self._is_gone = False  # set under the gate's `writing`: the rows belong to a newer version
        # Sizes of which a fetch is compiled: of a table, or of a store for its numbers and scales.
        self._asked: dict[tuple[str | int, int], None] = {}
        # By store: the versions that read it, of which none is given away. Versions share what does not change.
        self._holders: tuple[weakref.WeakSet[HostRows], ...] = tuple(weakref.WeakSet([self]) for _ in maps)

    @classmethod
    def of(
        cls, sources: Sequence[tuple[FrozenTable, RecordSource]], *, spare_rows: int = 0, version: int = 0
    ) -> "HostRows":
        """Reads streams of records; keeps the frequencies of tables all of whose records have them.

        `spare_rows` of each table are for updates in place. ValueError: as `freeze_records`.
        """
        uses = [(table, RecordedUses(source)) for table, source in sources]
        tables, maps = freeze_records(uses, spare_rows=spare_rows, device=host_device())
        seen = {table.name: source.seen for table, source in uses}
        return cls(tables, maps, version=version, frequencies=frequencies_by_row(tables, maps, seen))

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        """The tables by name."""
        return self._tables.tables

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory: rows, index and maps."""
        frequencies = sum(array.nbytes for array in self._frequencies if array is not None)
        return self._tables.num_bytes + sum(row_map.num_bytes for row_map in self._maps) + frequencies

    def num_rows(self, table: str) -> int:
        """The rows of a table."""
        store, number = self._place("num_rows", table)
        return int(self._maps[store].table_rows[number])

    def fetch(
        self, table: str, keys: Keys
    ) -> tuple[Float32[np.ndarray, "num_keys dim"], Bool[np.ndarray, " num_keys"]]:
        """See `RowSource.fetch`. Keys that are not there have the table's default.

        Raises SourceReplacedError after `updated(..., in_place=True)`. Costs a bucket (64 bytes) and a row for each
        key, on all cores.
        """
        self._place("fetch", table)
        rows, is_found = self._in_parts("fetch", table, keys, lambda words: _fetch(self._tables, table, words))
        return rows, is_found

    def fetch_quantized(self, table: str, keys: Keys) -> tuple[np.ndarray, np.ndarray, IsFound]:
        """See `RowSource.fetch_quantized`; gives the stored bits."""
        s, number = self._place("fetch_quantized", table)
        number_there = jax.device_put(np.uint32(number), host_device())
        numbers, scales, is_found = self._in_parts(
            "fetch_quantized", s, keys, lambda words: _fetch_quantized(self._tables.stores[s], words, number_there)
        )
        return numbers, scales, is_found

    def _in_parts(
        self, op: str, what: str | int, keys: Keys, fetch: Callable[[Any], tuple[Any, ...]]
    ) -> Sequence[np.ndarray]:
        """Fetches padded keys in parts, and joins the results."""
        keys, parts = np.asarray(keys, np.uint64), []
        for start in range(0, max(1, len(keys)), KEYS_AT_A_TIME):
            part = keys[start : start + KEYS_AT_A_TIME]
            padded = key_words(part, padded_size(len(part), _LEAST_KEYS))
            self._asked[what, len(padded)] = None
            with self._reading(op):
                found = fetch(jax.device_put(padded, host_device()))
            parts.append([np.asarray(array)[: len(part)] for array in found])
        return parts[0] if len(parts) == 1 else [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def ready_as(self, older: "HostRows") -> None:
        """Compiles the fetches that an older version was asked for: by table and power of two of keys."""
        form, place = Form(self._tables).tree, jax.sharding.SingleDeviceSharding(host_device())
        for what, size in list(older._asked):
            words = jax.ShapeDtypeStruct((size, 2), np.uint32, sharding=place)
            if isinstance(what, str):
                _fetch.lower(form, what, words).compile()
            else:
                number = jax.ShapeDtypeStruct((), np.uint32, sharding=place)
                _fetch_quantized.lower(form.stores[what], words, number).compile()
            self._asked[what, size] = None

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        """See `RowSource.scan`; in the order in which the keys came."""
        store, number = self._place("scan", table)
        with self._reading("scan"):
            keys, row_ids = self._maps[store].keys_of(number)
        of_store = self._frequencies[store]
        frequency = None if of_store is None else of_store[row_ids]
        if frequency is not None and not frequency.any():
            frequency = None
        for start in range(0, len(keys), chunk_rows):
            lines = slice(start, start + chunk_rows)
            rows, _ = self.fetch(table, keys[lines])
            yield Records(keys[lines], rows, frequency=None if frequency is None else frequency[lines])

    def updated(
        self,
        changed: Mapping[str, Records],
        erased: Mapping[str, Keys] | None = None,
        *,
        version: int | None = None,
        in_place: bool = False,
    ) -> "HostRows":
        """Makes a newer version: some rows set, some gone.

        Args:
          changed: rows by table; keys that are new get rows. Of a repeated key the last row counts.
          erased: keys that go, by table; missing keys are ignored, and those in `changed` stay.
          version: of the result; None: one more.
          in_place: whether rows are written where they lie. This object can then be read no more: `fetch` raises
            SourceReplacedError, also if the update fails halfway. Else it stays what it is, and stores that change are
            copied. A store that another version shares is copied in place too: drop versions that are not needed.

        Raises:
          UnknownTableError, ValueError: a table that is not there, rows of another dim, PADDING_KEY as a key, or in
            place more new keys than spare rows. Nothing has changed then.
          SourceReplacedError: this object was updated in place before.

        Cost:
          Each changed row; a copy of the changed stores (and of their maps) unless in place; their index anew.
        """
        erased = erased or {}
        for table in {**changed, **erased}:
            self._place("updated", table)
        for table, records in changed.items():
            check_records("updated", self.tables[table], records)
            if (np.asarray(records.keys) == np.uint64(PADDING_KEY)).any():
                raise ValueError(f'updated: table "{table}": keys: got PADDING_KEY, wanted keys, which it is not.')
            if self.tables[table].is_quantized and not np.isfinite(records.rows).all():
                raise ValueError(f'updated: table "{table}": rows: got infinite or NaN, wanted numbers to quantize.')
        touched = sorted({self._tables.spec.places[table][0] for table in {**changed, **erased}})
        with self._reading("updated"):
            self._require_room(touched, changed, erased, in_place)
            if not in_place:  # copying does not take arrays away
                return self._updated(touched, changed, erased, version, frozenset())
        with self._gate.writing():
            if self._is_gone:
                raise SourceReplacedError("HostRows: updated: got a version that was updated in place already.")
            self._is_gone = True  # for good, also if the update fails: what was read may be half changed
        with _SHARING:  # none joins: versions that share a store with this one are made while it can be read
            own = frozenset(s for s in touched if set(self._holders[s]) <= {self})
        newer = self._updated(touched, changed, erased, version, own)
        with _SHARING:
            for holders in self._holders:
                holders.discard(self)
        return newer

    def _updated(
        self,
        touched: Sequence[int],
        changed: Mapping[str, Records],
        erased: Mapping[str, Keys],
        version: int | None,
        own: Collection[int],
    ) -> "HostRows":
        """Makes the newer version: takes the arrays and maps of `own` stores, and copies the others."""
        stores, maps = list(self._tables.stores), list(self._maps)
        frequencies = list(self._frequencies)
        for s in touched:
            tables = self._tables.spec.stores[s]
            is_own = s in own
            row_map = maps[s] = maps[s] if is_own else maps[s].copy()
            for number, table in enumerate(tables):
                if table.name in erased:
                    row_map.remove(number, _without(erased[table.name], changed.get(table.name)))
            num_more = max(0, sum(_num_new(row_map, n, changed.get(t.name)) for n, t in enumerate(tables)))
            if num_more > row_map.num_free:
                capacity = max(row_map.capacity + num_more - row_map.num_free, int(_GROWTH * row_map.capacity))
                row_map.grow(min(capacity, MAX_CAPACITY))
                stores[s], is_own = _grown(stores[s], row_map.capacity), True
            used = frequencies[s]
            if used is not None:
                used = frequencies[s] = fill_up(used, row_map.capacity)
            for number, table in enumerate(tables):
                records = changed.get(table.name)
                if records is None or not records.num_rows:
                    continue
                row_ids = row_map.place(number, records.keys)
                stores[s] = write_rows(stores[s], table, row_ids, np.asarray(records.rows), donate=is_own)
                is_own = True
                if used is not None and records.frequency is not None:
                    _put(used, row_ids, records.frequency)
            index, counters = row_map.index(host_device())
            old = stores[s]
            stores[s] = FrozenStore(index, counters, old.rows, old.scales)
        tables = FrozenTables(tuple(stores), self._tables.spec)
        version = self.version + 1 if version is None else version
        newer = HostRows(tables, maps, version=version, frequencies=frequencies)
        with _SHARING:
            holders = list(newer._holders)
            for s in set(range(len(stores))).difference(touched):
                holders[s] = self._holders[s]
                holders[s].add(newer)
            newer._holders = tuple(holders)
        return newer

    def _require_room(
        self, touched: Sequence[int], changed: Mapping[str, Records], erased: Mapping[str, Keys], in_place: bool
    ) -> None:
        for s in touched:
            row_map, tables = self._maps[s], self._tables.spec.stores[s]
            num_new = sum(_num_new(row_map, n, changed.get(table.name)) for n, table in enumerate(tables))
            num_gone = 0
            for number, table in enumerate(tables):
                if table.name in erased:
                    gone = np.unique(_without(erased[table.name], changed.get(table.name)))
                    num_gone += int((row_map.find(number, gone) != NO_ROW).sum())
            room = row_map.num_free + num_gone
            most = room if in_place else room + MAX_CAPACITY - row_map.capacity
            if num_new > most:
                raise ValueError(
                    f"updated: changed: got {num_new} new keys of tables {[table.name for table in tables]}, wanted at "
                    f"most {most}, the rows that are free"
                    + ("; update with in_place=False, or begin with more spare_rows." if in_place else " in one store.")
                )

    @contextlib.contextmanager
    def _reading(self, op: str) -> Iterator[None]:
        with self._gate.reading():
            if self._is_gone:
                raise SourceReplacedError(
                    f"HostRows: {op}: version {self.version} was given to an update in place; ask the source that "
                    "`updated` returned, or if it failed load the rows again."
                )
            yield

    def _place(self, op: str, table: str) -> tuple[int, int]:
        if table not in self._tables.spec.places:
            raise UnknownTableError.of(op, table, self.tables, "this source")
        return self._tables.spec.places[table]


class Layered(RowSource):
    """Tiers in an order: the first that has a key gives its row. All have the same tables.

    As HPS: rows in host memory, then a database, then the default value.
    """

    def __init__(self, layers: Sequence[RowSource]) -> None:
        if not layers:
            raise ValueError("Layered: layers: got none, wanted at least one.")
        self._layers = tuple(layers)
        for layer in layers[1:]:
            if dict(layer.tables) != dict(layers[0].tables):
                raise ValueError(
                    f"Layered: layers: got tables {list(layer.tables.values())} below {list(layers[0].tables.values())}"
                    ", wanted the same in all."
                )

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - follows its layers
        """The sum of the layers' versions: it rises when one of them does."""
        return sum(layer.version for layer in self._layers)

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        """The tables of each layer."""
        return self._layers[0].tables

    def num_rows(self, table: str) -> int:
        """The rows of the layer that has most: the upper ones are usually a part of the last."""
        return max(layer.num_rows(table) for layer in self._layers)

    def fetch(
        self, table: str, keys: Keys
    ) -> tuple[Float32[np.ndarray, "num_keys dim"], Bool[np.ndarray, " num_keys"]]:
        """See `RowSource.fetch`: asks each layer for the keys that those before it do not have."""
        rows, is_found = self._first_found(keys, lambda layer, some: layer.fetch(table, some))
        return rows, is_found

    def fetch_quantized(self, table: str, keys: Keys) -> tuple[np.ndarray, np.ndarray, IsFound]:
        """See `RowSource.fetch_quantized`; as `fetch`."""
        numbers, scales, is_found = self._first_found(keys, lambda layer, some: layer.fetch_quantized(table, some))
        return numbers, scales, is_found

    def _first_found(
        self, keys: Keys, fetch: Callable[[RowSource, Keys], tuple[np.ndarray, ...]]
    ) -> tuple[np.ndarray, ...]:
        parts = fetch(self._layers[0], keys)
        for layer in self._layers[1:]:
            missing = np.flatnonzero(~parts[-1])
            if not len(missing):
                break
            more = fetch(layer, np.asarray(keys)[missing])
            is_there = more[-1]
            parts = tuple(map(np.array, parts))
            for mine, its in zip(parts, more, strict=True):
                mine[missing[is_there]] = its[is_there]
        return parts

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        """See `RowSource.scan`: goes by layer, without the keys of the layers before, which are asked."""
        for number, layer in enumerate(self._layers):
            for records in layer.scan(table, chunk_rows):
                is_new = np.ones(records.num_rows, bool)
                for before in self._layers[:number]:
                    is_new &= ~before.fetch(table, records.keys)[1]
                if is_new.any():
                    yield records if is_new.all() else records.take(is_new)

    def close(self) -> None:
        """Closes the layers."""
        for layer in self._layers:
            layer.close()


def frequencies_by_row(
    tables: FrozenTables, maps: Sequence[RowMap], seen: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
) -> list[np.ndarray | None]:
    """The frequencies of rows by store, uint32 by row id; None: none of its tables has any in `seen`."""
    found: list[np.ndarray | None] = [None] * len(maps)
    for name, some in seen.items():
        store, number = tables.spec.places[name]
        for keys, values in some:
            of_store = found[store]
            if of_store is None:
                of_store = found[store] = np.zeros(maps[store].capacity, np.uint32)
            _put(of_store, maps[store].find(number, keys), values)
    return found


@functools.partial(jax.jit, static_argnums=1)
def _fetch(tables: FrozenTables, table: str, words: Any) -> Any:
    return find_rows(tables, table, words)


@jax.jit
def _fetch_quantized(store: FrozenStore, words: Any, table: Any) -> tuple[Any, Any, Any]:
    row_ids = table_kernels.find(store.index, store.counters, words, jnp.full(words.shape[0], table))
    numbers = store.rows.at[row_ids].get(mode="fill", fill_value=0)
    return numbers, store.scales[0].at[row_ids].get(mode="fill", fill_value=0), row_ids != jnp.uint32(NO_ROW)


def _without(keys: Any, records: Records | None) -> np.ndarray:
    keys = np.asarray(keys, np.uint64)
    return keys if records is None else keys[~np.isin(keys, records.keys)]


def _num_new(row_map: RowMap, number: int, records: Records | None) -> int:
    if records is None or not records.num_rows:
        return 0
    return int((row_map.find(number, np.unique(np.asarray(records.keys, np.uint64))) == NO_ROW).sum())


def _put(lines: np.ndarray, row_ids: np.ndarray, values: np.ndarray) -> None:
    is_row = row_ids != NO_ROW
    lines[row_ids[is_row]] = values[is_row]


def _grown(store: FrozenStore, capacity: int) -> FrozenStore:
    def longer(array: Any) -> Any:
        return jax.device_put(fill_up(np.asarray(array), capacity), host_device(), may_alias=False)

    return FrozenStore(store.index, store.counters, longer(store.rows), tuple(map(longer, store.scales)))


class RecordedUses:
    """Streams records, and keeps their keys and frequencies in `seen`, as far as all of them have frequencies."""

    def __init__(self, source: RecordSource) -> None:
        self._source = source
        self._has_frequencies = True
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def num_rows(self) -> int:
        """The number of records."""
        return self._source.num_rows

    def __iter__(self) -> Iterator[Records]:
        for records in self._source:
            if records.frequency is None:
                self._has_frequencies, self.seen = False, []
            elif self._has_frequencies:
                self.seen.append((records.keys.copy(), np.array(records.frequency, np.uint32)))
            yield records
