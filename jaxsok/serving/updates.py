"""Tables that change while they are served: versions, side by side or in place.

A version is a value. An update makes the next one *beside* it, which copies the arrays of the stores that change and
swaps one reference. Where two copies do not fit, it works *in place*: it scatters changed rows into donated arrays
while readers wait. Either way it reads and checks everything before it changes anything, a reader sees all tables of
one version, and after a failure the old version is served.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok.records import Records
from jaxsok.serving import sources as sources_lib
from jaxsok.serving.errors import ServingError, UnknownTableError
from jaxsok.serving.frozen import (
    FrozenStore,
    FrozenTable,
    FrozenTables,
    SizedRecords,
    check_records,
    freeze_records,
    frozen_bytes,
    lines_of,
    ready_to_write,
    write_lines,
)
from jaxsok.serving.gate import Gate
from jaxsok.serving.padding import fill_up, padded_size
from jaxsok.serving.ready import Form
from jaxsok.serving.row_map import RowMap
from jaxsok.serving.sources import TableSource
from jaxsok.types import MAX_CAPACITY, NO_ROW

InPlace = bool | Literal["auto"]
Source = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]

PIECE_BYTES = 32 * 2**20  # rows cross to the device in such pieces

_HPS_FILES = ("key", "emb_vector")


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of the tables and the dense model."""

    number: int  # 1 at first; each update adds one
    tables: FrozenTables
    num_rows: Mapping[str, int]  # by table
    files: Mapping[str, str]  # the folder that changed each table last
    uuids: Mapping[str, str | None]  # which export each table holds; None: no delta can follow
    unknowns: Mapping[str, Any]  # what the first files say of keys without a row (`TableSource.unknown`)
    served: Any = None  # the dense model (`artifact.ServedModel`), or None
    dense_file: str = ""

    @functools.cached_property
    def form(self) -> Form:
        """The form of the arrays: programs are compiled for it."""
        return Form(self.tables)


@dataclasses.dataclass(frozen=True)
class Change:
    """What an update does to one table."""

    table: FrozenTable
    source: TableSource

    @property
    def is_whole(self) -> bool:
        """Whether it brings all rows: rows of other keys go."""
        return self.source.base is None

    @property
    def is_empty(self) -> bool:
        """Whether it leaves the table as it is."""
        return not self.is_whole and self.source.num_rows == 0 and self.source.num_tombstones == 0

    def pieces(self) -> Iterator[Records]:
        """Its rows in pieces, small enough for one write."""
        most = max(1, PIECE_BYTES // self.table.row_bytes)
        for records in self.source.chunks():
            check_records("update", self.table, records)
            for start in range(0, records.num_rows, most):
                yield records.take(slice(start, start + most))


Publish = Callable[[Version, tuple[RowMap, ...], Mapping[str, np.ndarray]], None]


class Versions:
    """The versions of one model's tables, whose rows all lie on one device. Loads the first one.

    `room` is the free bytes on the device; None: not known. `spare_rows` of each table are for updates in place.
    `can_donate` is False if others read the rows beside `reading`; rows then may not change where they lie. `memory`
    is a lock of all who share the device, held while an update takes some of it, not while it compiles.
    ServingError: there is no room.
    """

    def __init__(
        self,
        name: str,
        given: Sequence[tuple[FrozenTable, TableSource]],
        *,
        device: Any,
        key_bits: sources_lib.KeyBits,
        spare_rows: int,
        room: Callable[[], int | None],
        served: Any = None,
        dense_file: str = "",
        can_donate: bool = True,
        memory: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self.name, self.device, self.spare_rows = name, device, spare_rows
        self.key_bits: sources_lib.KeyBits = key_bits
        self._room, self._can_donate = room, can_donate
        # One update at a time holds `_updating`, and it alone sets `_current` and `_maps`. Arrays of `_current` are
        # donated only while the gate is held for writing.
        self._gate, self._updating = Gate(), threading.Lock()
        self._memory = contextlib.nullcontext() if memory is None else memory
        needed = sum(sum(frozen_bytes(table, source.num_rows + spare_rows).values()) for table, source in given)
        free = room()
        if free is not None and needed > free:
            raise ServingError(
                f'open: model "{name}": memory: got {free} bytes free on {device}, wanted {needed} for its tables; '
                "take a smaller row_dtype, or, where they lie on a device, a gpucacheper below 1."
            )
        tables, maps = freeze_records(
            [(table, SizedRecords(source.num_rows, source.chunks())) for table, source in given],
            spare_rows=spare_rows,
            device=device,
        )
        self._maps: tuple[RowMap, ...] = maps
        self._current = Version(
            number=1,
            tables=tables,
            num_rows=_num_rows(tables, maps),
            files={table.name: str(source.path) for table, source in given},
            uuids={table.name: source.uuid for table, source in given},
            unknowns={table.name: source.unknown for table, source in given},
            served=served,
            dense_file=dense_file,
        )
        self.num_in_place = 0
        self.held_bytes = 0  # device memory of a version that is not served yet

    @property
    def current(self) -> Version:
        """The latest version, to inspect; look up under `reading`."""
        return self._current

    @property
    def host_bytes(self) -> int:
        """Bytes of the maps of rows."""
        return sum(row_map.num_bytes for row_map in self._maps)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Version]:
        """Gives a version whose arrays are not donated until work over them is dispatched."""
        with self._gate.reading():
            yield self._current

    def update(
        self,
        source: Source | None,
        *,
        in_place: InPlace,
        served: Any = None,
        dense_file: str | None = None,
        prepare: Callable[[Version, Version], None] = lambda old, new: None,
        publish: Publish = lambda new, maps, changed: None,
        settle: Callable[[Version], None] = lambda now: None,
    ) -> Version:
        """Makes the next version and serves it; see `Session.update`.

        Args:
          source: None: tables stay.
          in_place: see `Session.update`.
          served: another dense model; None: it stays.
          dense_file: where `served` came from.
          prepare: called with the old and the new version before the new one is served; raises if it cannot be.
          publish: called with the new version when it is whole, the maps of its stores, and the keys of each table that
            changed or went, for readers that do not use `reading`.
          settle: called at the end, also after a failure, with the served version; no update runs meanwhile.

        Raises:
          ServingError: it cannot be done; nothing has changed.
        """
        if not (isinstance(in_place, bool) or in_place == "auto"):
            raise ServingError(f'update: in_place: got {in_place!r}, wanted True, False or "auto".')
        if in_place is True and not self._can_donate:
            raise ServingError(
                f'update: in_place: got True for model "{self.name}", whose rows lie in host memory below a cache, '
                'wanted False or "auto"; only rows on the device are changed where they lie.'
            )
        with self._updating:
            try:
                old = self._current
                changes = [] if source is None else read_changes(self.name, source, old, self.key_bits)
                new = dataclasses.replace(
                    old,
                    number=old.number + 1,
                    files={**old.files, **{change.table.name: str(change.source.path) for change in changes}},
                    uuids={**old.uuids, **{change.table.name: change.source.uuid for change in changes}},
                    served=old.served if dense_file is None else served,
                    dense_file=old.dense_file if dense_file is None else dense_file,
                )
                return self._updated(old, new, changes, in_place, prepare, publish)
            finally:
                settle(self._current)

    def _updated(
        self,
        old: Version,
        new: Version,
        changes: Sequence[Change],
        in_place: InPlace,
        prepare: Callable[[Version, Version], None],
        publish: Publish,
    ) -> Version:
        maps = list(self._maps)
        with self._memory:  # not while programs are compiled, which may take minutes
            plans, is_in_place = self._planned(old.tables, changes, in_place)
            for plan in plans:
                maps[plan.store] = plan.row_map
            staged = _Staged.of(old.tables, plans) if is_in_place else None
            if is_in_place:
                indices = {plan.store: plan.row_map.index(self.device) for plan in plans}
                tables, held_bytes = _with_indices(old.tables, indices), sum(plan.index_bytes for plan in plans)
            else:
                stores = list(old.tables.stores)
                for plan in plans:
                    stores[plan.store] = plan.copied(stores[plan.store], self.device)
                tables = _with_stores(old.tables, stores)
                held_bytes = sum(plan.bytes_beside(old.tables.stores[plan.store]) for plan in plans)
            jax.block_until_ready(tables)  # failures are raised here, and no reader waits
            new = dataclasses.replace(new, num_rows=_num_rows(old.tables, maps), tables=tables)
            self.held_bytes = held_bytes
        try:
            prepare(old, new)
            if staged is not None:
                staged.make_ready()
                with self._memory:
                    self._require_room(max((plan.piece_bytes for plan in plans), default=0))
                    self._write_in_place(old, new, staged)
                self.num_in_place += 1
            else:
                publish(new, tuple(maps), {name: keys for plan in plans for name, keys in plan.changed.items()})
                self._current = new
        finally:
            self.held_bytes = 0
        self._maps = tuple(maps)
        return self._current

    def _require_room(self, needed: int) -> None:
        """Refuses if other models took the memory for a piece of rows while programs were compiled."""
        free = self._room()
        if free is not None and needed > free:
            raise ServingError(
                f'update: model "{self.name}": memory: got {free} bytes free on {self.device}, wanted {needed} for a '
                "piece of rows to update in place; another model has taken them meanwhile."
            )

    @property
    def maps(self) -> tuple[RowMap, ...]:
        """The maps of the rows of the latest version; not to be changed."""
        return self._maps

    # Planning --------------------------------------------------------------------------------------------------------

    def _planned(
        self, tables: FrozenTables, changes: Sequence[Change], in_place: InPlace
    ) -> tuple[list["_StorePlan"], bool]:
        """Plans each store that changes, and whether in place. Reads all keys; refuses impossible updates."""
        of_store: dict[int, list[Change]] = {}
        for change in changes:
            if not change.is_empty:
                of_store.setdefault(tables.spec.places[change.table.name][0], []).append(change)
        free, beside = None, 0
        for is_roomy in (True, False):
            plans = [self._plan(tables, s, mine, is_roomy) for s, mine in of_store.items()]
            beside = sum(plan.bytes_beside(tables.stores[plan.store]) for plan in plans)
            free = self._room()
            is_grown = any(plan.row_map.capacity > tables.stores[plan.store].capacity for plan in plans)
            if free is None or beside <= free or not is_grown:
                break  # otherwise try without room to grow further
        within = sum(plan.index_bytes for plan in plans) + max((p.piece_bytes for p in plans), default=0)
        fits = free is None or beside <= free
        if in_place is False or (in_place == "auto" and (fits or not self._can_donate)):
            if not fits:
                help_ = 'pass in_place=True (or "auto"), which changes rows where they lie'
                if not self._can_donate:
                    help_ = (
                        "rows below a cache are not changed where they lie; open the tables anew, or with more memory"
                    )
                raise ServingError(
                    f'update: model "{self.name}": memory: got {free} bytes free on {self.device}, wanted {beside} for '
                    f"a copy of what changes; {help_}."
                )
            return plans, False
        too_many = [plan for plan in plans if plan.row_map.capacity > tables.stores[plan.store].capacity]
        for plan in too_many:
            names = ", ".join(f'"{table.name}"' for table in tables.spec.stores[plan.store])
            also = "" if in_place is True else f" A copy needs {beside} bytes, and {free} are free."
            raise ServingError(
                f'update: model "{self.name}": rows: got {plan.num_needed} for the tables {names}, wanted at most '
                f"{tables.stores[plan.store].capacity} to update in place; open with more spare_rows.{also}"
            )
        if free is not None and within > free:
            raise ServingError(
                f'update: model "{self.name}": memory: got {free} bytes free on {self.device}, wanted {within} for an '
                f"index and a piece of rows to update in place, or {beside} for a copy of what changes."
            )
        return plans, True

    def _plan(self, tables: FrozenTables, s: int, changes: Sequence[Change], is_roomy: bool) -> "_StorePlan":
        """Makes the new map of a store's rows; if it grows, with room to grow further or without."""
        old, spec = self._maps[s], tables.spec.stores[s]
        number_of = {table.name: number for number, table in enumerate(spec)}
        keys = {change.table.name: _all_keys(change) for change in changes}
        is_fresh = len(changes) == len(spec) and all(change.is_whole for change in changes)
        changed = dict(keys)
        if is_fresh:
            for name in keys:
                changed[name] = np.concatenate([keys[name], old.keys_of(number_of[name])[0]])
            num_needed = sum(len(mine) for mine in keys.values())
            row_map = RowMap(len(spec), self._capacity(old.capacity, num_needed, len(spec), is_roomy))
        else:
            row_map = old.copy()
            for change in changes:
                number = number_of[change.table.name]
                gone = _gone(row_map, number, change, keys[change.table.name])
                row_map.remove(number, gone)
                changed[change.table.name] = np.concatenate([keys[change.table.name], gone])
            num_new = sum(int((row_map.find(number_of[name], mine) == NO_ROW).sum()) for name, mine in keys.items())
            num_needed = int(row_map.table_rows.sum()) + num_new
            row_map.grow(self._capacity(old.capacity, num_needed, len(spec), is_roomy))
        for name, mine in keys.items():
            row_map.place(number_of[name], mine)
        return _StorePlan(s, row_map, list(changes), number_of, num_needed, is_fresh, changed)

    def _capacity(self, now: int, num_needed: int, num_tables: int, is_roomy: bool) -> int:
        """The rows of a store: as many as it has, so that programs stay, unless those are too few."""
        if num_needed <= now:
            return now
        if not is_roomy:
            return num_needed
        more = max(num_tables * self.spare_rows, num_needed // 16)  # so that not each update is too many
        return max(num_needed, min(num_needed + more, MAX_CAPACITY))

    # In place --------------------------------------------------------------------------------------------------------

    def _write_in_place(self, old: Version, new: Version, staged: "_Staged") -> None:
        """Scatters changed rows into the arrays that are served."""
        stores, done = list(old.tables.stores), 0
        with self._gate.writing():
            try:
                for s, row_ids, lines, scales in staged.after:
                    stores[s] = write_lines(stores[s], row_ids, lines, scales, donate=True)
                    done += 1
                jax.block_until_ready([store.rows for store in stores])
            except BaseException:
                for (s, row_ids, _, _), was in zip(staged.after[:done], staged.before[:done], strict=True):
                    stores[s] = write_lines(stores[s], row_ids, *was, donate=True)
                self._current = dataclasses.replace(old, tables=_with_stores(old.tables, stores))
                raise
            indices = {s: (store.index, store.counters) for s, store in enumerate(new.tables.stores)}
            self._current = dataclasses.replace(new, tables=_with_indices(_with_stores(old.tables, stores), indices))


@dataclasses.dataclass(frozen=True)
class _Staged:
    """The writes of an update in place, made ready on the host before readers are stopped."""

    stores: Sequence[FrozenStore]  # written to
    after: list[tuple[int, np.ndarray, np.ndarray, np.ndarray | None]]  # store, row ids, lines and scales of each piece
    before: list[tuple[np.ndarray, np.ndarray | None]]  # lines and scales as they are

    @classmethod
    def of(cls, tables: FrozenTables, plans: Sequence["_StorePlan"]) -> "_Staged":
        after = [(plan.store, *piece) for plan in plans for piece in plan.lines()]
        return cls(tables.stores, after, [_lines_at(tables.stores[s], row_ids) for s, row_ids, _, _ in after])

    def make_ready(self) -> None:
        """Compiles the writes."""
        for s, row_ids, _, _ in self.after:
            ready_to_write(self.stores[s], len(row_ids))


@dataclasses.dataclass(frozen=True)
class _StorePlan:
    """The next version of one store."""

    store: int
    row_map: RowMap  # of the next version
    changes: list[Change]
    number_of: Mapping[str, int]  # by table in the store
    num_needed: int  # rows in use
    is_fresh: bool  # whether no row of the old store stays
    changed: Mapping[str, np.ndarray]  # the keys of each table that have other rows, or none any more

    @property
    def piece_bytes(self) -> int:
        """Device memory for writing a piece of rows."""
        most = max((change.source.num_rows * change.table.row_bytes for change in self.changes), default=0)
        return 2 * min(PIECE_BYTES, most)  # padded to a power of two

    @property
    def index_bytes(self) -> int:
        return 64 * self.row_map.num_buckets

    def bytes_beside(self, old: FrozenStore) -> int:
        """Bytes of a copy of the store."""
        table = self.changes[0].table
        has_rows = any(change.source.num_rows for change in self.changes) or self.row_map.capacity != old.capacity
        return (self.row_map.capacity * table.row_bytes + self.piece_bytes) * has_rows + self.index_bytes

    def lines(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """The changed rows as they are stored: row ids, lines and scales."""
        for change in self.changes:
            for records in change.pieces():
                row_ids = self.row_map.find(self.number_of[change.table.name], records.keys)
                if (row_ids == NO_ROW).any():
                    raise ServingError(
                        f'update: table "{change.table.name}": path: "{change.source.path}" changed while it was read; '
                        "write a new folder for each update."
                    )
                yield row_ids, *lines_of(change.table, records.rows)

    def copied(self, old: FrozenStore, device: Any) -> FrozenStore:
        """The next version of the store, beside it; shares the rows if none changes."""
        capacity, store, is_mine = self.row_map.capacity, old, False
        if self.is_fresh or capacity != old.capacity:
            with jax.default_device(device):
                longer = _zeros_of if self.is_fresh else _longer
                rows, scales = longer(old.rows, capacity), tuple(longer(scales, capacity) for scales in old.scales)
            store, is_mine = dataclasses.replace(old, rows=rows, scales=scales), True
        for row_ids, lines, scales in self.lines():
            store = write_lines(store, row_ids, lines, scales, donate=is_mine)
            is_mine = True
        index, counters = self.row_map.index(device)
        return dataclasses.replace(store, index=index, counters=counters)


# Sources -------------------------------------------------------------------------------------------------------------


def read_changes(model: str, source: Source, version: Version, key_bits: sources_lib.KeyBits) -> list[Change]:
    """Opens and checks an update: a folder, or folders by table, that comes after a version.

    Raises ServingError for a delta of another base, or without tables of the model; and as `open_table`.
    """
    tables, op = version.tables.tables, "update"
    if isinstance(source, Mapping):
        if not source:
            raise ServingError(f"{op}: source: got no tables, wanted a folder for at least one.")
        for name in source:
            if name not in tables:
                raise UnknownTableError.of(op, name, tables, f'model "{model}"')
        opened = {name: _opened(op, path, tables[name], key_bits) for name, path in source.items()}
    else:
        opened = _of_folder(op, model, pathlib.Path(source), tables, key_bits)
    for name, found in opened.items():
        reads = version.unknowns[name]
        if reads is not None and found.unknown not in (None, reads):
            raise ServingError(
                f'{op}: table "{name}": source: got "{found.path}", in which a key without a row reads '
                f"{found.unknown}, wanted {reads}, as in the files that the session was opened with; open another "
                "session."
            )
        held = version.uuids[name]
        if found.base is not None and found.base != held:
            holds = f'holds {held}, from "{version.files[name]}"' if held else "holds no export"
            again = " (it was applied already)" if found.uuid == held else ""
            raise ServingError(
                f'{op}: table "{name}": source: got the delta "{found.path}", which rests on {found.base}{again}, but '
                f"the table {holds}; apply deltas in order, and none of them twice, or a full export."
            )
    return [Change(tables[name], found) for name, found in opened.items()]


def _opened(op: str, path: str | os.PathLike[str], table: FrozenTable, key_bits: sources_lib.KeyBits) -> TableSource:
    open_one = sources_lib.open_delta if sources_lib.is_delta(path) else sources_lib.open_table
    return open_one(path, table=table.name, dim=table.dim, key_bits=key_bits, op=op)


def _of_folder(
    op: str, model: str, folder: pathlib.Path, tables: Mapping[str, FrozenTable], key_bits: sources_lib.KeyBits
) -> dict[str, TableSource]:
    """The tables of a model in a folder: an export, a checkpoint, HPS directories by name, or one HPS directory."""
    if any((folder / name).is_file() for name in _HPS_FILES):
        if len(tables) > 1:
            raise ServingError(
                f'{op}: source: got the HPS directory "{folder}", which does not name its table, wanted a mapping from '
                f"tables to folders: the model has {sorted(tables)}."
            )
        return {name: _opened(op, folder, table, key_bits) for name, table in tables.items()}
    below = {
        name: table for name, table in tables.items() if any((folder / name / file).is_file() for file in _HPS_FILES)
    }
    if below:
        return {name: _opened(op, folder / name, table, key_bits) for name, table in below.items()}
    found, refused = {}, None
    for name, table in tables.items():
        try:
            found[name] = _opened(op, folder, table, key_bits)
        except UnknownTableError as error:
            refused = error
    if not found and refused is not None:
        raise UnknownTableError(
            f'{op}: model "{model}": source: got "{folder}" without any of its tables: {refused}'
        ) from refused
    return found


def _all_keys(change: Change) -> np.ndarray:
    """Reads all rows of a change, so that damage and misfits are found here; gives their keys."""
    keys = [records.keys.copy() for records in change.pieces()]
    return np.concatenate(keys) if keys else np.zeros(0, np.uint64)


def _gone(row_map: RowMap, number: int, change: Change, keys: np.ndarray) -> np.ndarray:
    """Keys that a change takes away."""
    if not change.is_whole:
        tombstones = [keys.copy() for keys in change.source.tombstones()]
        return np.concatenate(tombstones) if tombstones else np.zeros(0, np.uint64)
    row_ids = row_map.find(number, keys)
    stays = np.zeros(row_map.capacity, bool)
    stays[row_ids[row_ids != NO_ROW]] = True
    held, rows = row_map.keys_of(number)
    return held[~stays[rows]]


# Arrays --------------------------------------------------------------------------------------------------------------


def free_bytes(device: Any, limit: int | None, used: int) -> int | None:
    """Free bytes of a device's memory, with a limit what is left of it beside `used`; None: not known, as on CPUs."""
    if limit is not None:
        return max(0, limit - used)
    found = device.memory_stats()
    if not found or "bytes_limit" not in found:
        return None
    return max(0, found["bytes_limit"] - found["bytes_in_use"])


def host_free_bytes() -> int | None:
    """Free memory by Linux's MemAvailable; None: not known."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def _num_rows(tables: FrozenTables, maps: Sequence[RowMap]) -> dict[str, int]:
    return {name: int(maps[s].table_rows[number]) for name, (s, number) in tables.spec.places.items()}


def _with_stores(tables: FrozenTables, stores: Sequence[FrozenStore]) -> FrozenTables:
    return dataclasses.replace(tables, stores=tuple(stores))


def _with_indices(tables: FrozenTables, indices: Mapping[int, tuple[Array, Array]]) -> FrozenTables:
    stores = list(tables.stores)
    for s, (index, counters) in indices.items():
        stores[s] = dataclasses.replace(stores[s], index=index, counters=counters)
    return _with_stores(tables, stores)


def _lines_at(store: FrozenStore, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Copies stored rows to the host."""
    ids = fill_up(np.asarray(row_ids, np.uint32), padded_size(len(row_ids), 1024))
    lines, scales = _taken(store.rows, store.scales, ids)
    return np.asarray(lines)[: len(row_ids)], np.asarray(scales[0])[: len(row_ids)] if scales else None


@jax.jit
def _taken(rows: Array, scales: tuple[Array, ...], row_ids: Array) -> tuple[Array, tuple[Array, ...]]:
    return rows[row_ids], tuple(array[row_ids] for array in scales)


def _zeros_of(array: Array, capacity: int) -> Array:
    return jax.device_put(jnp.zeros((capacity, *array.shape[1:]), array.dtype), array.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _longer(array: Array, capacity: int) -> Array:
    return jnp.zeros((capacity, *array.shape[1:]), array.dtype).at[: array.shape[0]].set(array)
