"""Tables that change while they are served: versions, copied or in place.

A version is a value. An update *copies* the arrays of the stores that change, and swaps one reference. Where two copies
do not fit, it works *in place*: it scatters changed rows into donated arrays while readers wait. Either way it checks
everything first, a reader sees all tables of one version, and after a failure the old version is served.
"""

import abc
import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxsok import host_limits
from jaxsok.interrupts import held_back
from jaxsok.serving import backing, folders, frozen
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.errors import ServingError, require_table
from jaxsok.serving.folders import KeyBits, TableSource
from jaxsok.serving.frozen import FrozenStore, FrozenTables
from jaxsok.serving.model.store_plans import Change, Part, StorePlan, split_sources
from jaxsok.serving.ready import SHORT_TURNS, rest_s
from jaxsok.serving.row_map import RowMap
from jaxsok.types import MAX_CAPACITY

InPlace = bool | Literal["auto"]
Source = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of the tables and the dense model."""

    number: int  # 1 at first; each update adds one
    parts: tuple[Part, ...]  # by device
    is_split: bool  # whether each part has the keys that it owns; otherwise all have all rows, and the same maps
    files: Mapping[str, str]  # the folder that changed each table last
    uuids: Mapping[str, str | None]  # which export each table holds; None: no delta can follow
    unknowns: Mapping[str, Any]  # what the first files say of keys without a row (`TableSource.unknown`)
    served: Any = None  # the dense model (`artifact.ServedModel`), or None
    dense_file: str = ""
    stored: Any = None  # `DatabaseRows`, where the rows lie in databases: then `tables` have no arrays
    stored_rows: Mapping[str, int] | None = None  # by table in these databases, counted when the version was made
    replaced: frozenset[str] = frozenset()  # tables that this version has replaced whole in a database
    # By table, the exports up to that with which it was opened; none after its update.
    opened: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def tables(self) -> FrozenTables:
        """The tables on the first device."""
        return self.parts[0].tables

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """The parts with rows that no part before them has."""
        return self.parts if self.is_split else self.parts[:1]

    @classmethod
    def first(
        cls, config: ModelConfig, given: Sequence[folders.Frozen], served: Any, parts: Sequence[Part]
    ) -> "Version":
        """Makes the first version, of the files of a configuration."""
        opened = {table.name: source for table, source in given}
        unknowns = {name: source.unknown for name, source in opened.items()}
        before = cls(number=0, parts=tuple(parts), is_split=config.is_split, files={}, uuids={}, unknowns=unknowns)
        made = before.make_next(opened, (served, str(config.dense_file or "")))
        return dataclasses.replace(made, opened={name: source.links for name, source in opened.items()})

    def make_next(self, opened: Mapping[str, TableSource], dense_model: tuple[Any, str] | None) -> "Version":
        """Makes the next version of an update: of some tables, and of a dense model and its file."""
        served, dense_file = dense_model or (self.served, self.dense_file)
        return dataclasses.replace(
            self,
            number=self.number + 1,
            files={**self.files, **{name: str(found.path) for name, found in opened.items()}},
            uuids={**self.uuids, **{name: found.uuid for name, found in opened.items()}},
            opened={name: links for name, links in self.opened.items() if name not in opened},
            served=served,
            dense_file=dense_file,
        )

    def rows(self) -> backing.RowSource:
        """Returns the tier below a cache, with the rows and the dense model of this version."""
        if self.stored is None:
            return backing.HostRows(self.tables, self.parts[0].maps, version=self.number, served=self.served)
        rows = copy.copy(self.stored)
        rows.version, rows.served = self.number, self.served
        return rows

    def with_stores(self, stores: Sequence[Sequence[frozen.FrozenStore]]) -> "Version":
        """Makes this version over other arrays by part."""
        parts = (part.over(mine, part.maps) for part, mine in zip(self.parts, stores, strict=True))
        return dataclasses.replace(self, parts=tuple(parts))

    @functools.cached_property
    def num_rows(self) -> dict[str, int]:
        if self.stored_rows is not None:  # requests ask for this on the event loop, also while no database answers
            return dict(self.stored_rows)
        places, parts = self.tables.spec.places, self.own_parts
        return {name: sum(int(part.maps[s].table_rows[n]) for part in parts) for name, (s, n) in places.items()}


class Gate:
    """Admits many readers, or one writer, which comes before later readers.

    Readers take no lock while there is no writer: with many threads, each lock is one more at which they queue.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # A reader adds itself before it looks at `_is_closed`, and the writer sets that before it looks for readers, so
        # one of them sees the other. Who leaves or gives way while it is closed tells the writer.
        self._readers: set[object] = set()  # whose changes are atomic
        self._is_closed = False  # written under `_changed`

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        reader = object()
        try:
            self._readers.add(reader)
            while self._is_closed:
                self._leave(reader)
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_closed)
                self._readers.add(reader)
            yield
        finally:  # also after Ctrl-C
            self._leave(reader)

    def _leave(self, reader: object) -> None:
        self._readers.discard(reader)
        if self._is_closed:
            with self._changed:
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        try:
            with self._changed:
                self._is_closed = True
                self._changed.wait_for(lambda: not self._readers)
            yield
        finally:  # also after Ctrl-C
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """The memory of some devices, or of the host, that models share."""

    devices: Sequence[Any]
    free: Callable[[], int | None]  # gives the free bytes of the device that has the fewest, or None: not known
    lock: threading.Lock  # held while some of it is taken

    def require(self, op: str, model: str, free: int | None, needed: int, why: str) -> None:
        if free is not None and needed > free:
            raise ServingError(
                f'{op}: model "{model}": memory: got {free} bytes free on {" and ".join(map(str, self.devices))}, '
                f"wanted {needed} for {why}."
            )


_HOST = Memory(["the host"], lambda: host_limits.available_bytes(), threading.Lock())


class AnyVersions(abc.ABC):
    """The versions of one model's tables, wherever their rows lie; a subclass makes the first one."""

    current: Version  # the latest one, to inspect
    held_bytes = 0  # device memory of a version that is not served yet

    def __init__(self, model: str, key_bits: KeyBits) -> None:
        self.name, self.num_in_place = model, 0
        self.key_bits: KeyBits = key_bits
        self._updating = threading.Lock()  # held by one update at a time: it alone sets `current`
        self._is_closed = False

    def update(
        self, source: Source | None, *, in_place: InPlace, dense_model: tuple[Any, str] | None, readers: Sequence[Any]
    ) -> Version:
        """Makes the next version, with another dense model and its file if given; `RowReader`s serve it."""
        if not (isinstance(in_place, bool) or in_place == "auto"):
            raise ServingError(f'update: in_place: got {in_place!r}, wanted True, False or "auto".')
        self._check(source, in_place)
        with self._updating, SHORT_TURNS:
            if self._is_closed:  # while the dense model was loaded, or another update ran
                raise ServingError("update: session: got one that is closed, wanted an open one.")
            try:
                old = self.current
                opened = {} if source is None else open_update(self.name, source, old, self.key_bits)
                changes = [Change.of(old.tables.tables[name], found) for name, found in opened.items()]
                self._update(old, old.make_next(opened, dense_model), changes, in_place, readers)
                return self.current
            finally:
                for reader in readers:
                    reader.settle(self.current)

    def stop(self) -> None:
        """Refuses later updates."""
        self._is_closed = True

    def close(self, until: float | None) -> bool:
        """Refuses later updates, and waits for one until a time of `time.monotonic`; returns whether none runs."""
        self.stop()
        rest = rest_s(until)
        has_ended = self._updating.acquire(timeout=-1 if rest is None else rest)
        if has_ended:
            self._updating.release()
        return has_ended

    @abc.abstractmethod
    def _check(self, source: Source | None, in_place: InPlace) -> None:
        """Refuses updates that these versions do not take."""

    @abc.abstractmethod
    def _update(
        self, old: Version, new: Version, changes: Sequence[Change], in_place: InPlace, readers: Sequence[Any]
    ) -> None:
        """Changes rows, and sets `current`; `new` still has the rows of `old`."""


def publish(readers: Sequence[Any], old: Version, new: Version, changed: Mapping[str, np.ndarray]) -> None:
    """Publishes a version to all readers, or after a failure to none."""
    for number, reader in enumerate(readers, 1):
        try:
            reader.publish(new, changed)
        except BaseException:
            for published in readers[:number]:
                published.withdraw(old)
            raise


class Versions(AnyVersions):
    """The versions of one model's tables, whose rows all lie in one memory. Loads the first one."""

    def __init__(
        self, config: ModelConfig, given: Sequence[folders.Frozen], key_bits: KeyBits, memory: Memory, served: Any
    ) -> None:
        super().__init__(config.model, key_bits)
        self._memory, self._spare_rows = memory, config.spare_rows
        self._can_donate = config.tier != "cache"  # a cache reads the rows below it apart from `reading`
        self._can_copy = config.device_share == 1  # else host memory would have to hold most rows twice
        self._gate = Gate()  # an update closes it; arrays of `current` are donated only while it is closed
        self._to_undo = list["_Write"]()  # what a failed update in place has written; changed while the gate is closed
        owned = split_sources(given, len(memory.devices)) if config.is_split else [given]
        needed = max(sum(_bytes_of(config, table, source.num_rows) for table, source in mine) for mine in owned)
        why = "its tables; take a smaller row_dtype, or, where they lie on a device, a gpucacheper below 1"
        memory.require("open", self.name, memory.free(), needed, why)
        options = {"spare_rows": config.spare_rows, "device_share": config.device_share}
        by_device = zip(owned, memory.devices, strict=False)
        parts = [Part(*frozen.freeze_records(mine, device=device, **options)) for mine, device in by_device]
        others = memory.devices[len(parts) :]  # which get copies
        parts += [dataclasses.replace(parts[0], tables=jax.device_put(parts[0].tables, device)) for device in others]
        self.current = Version.first(config, given, served, parts)

    @property
    def host_bytes(self) -> int:
        """Bytes of the maps of rows, and of rows below a cache."""
        num_bytes = 0 if self._can_donate else self.current.tables.num_bytes
        for part in self.current.own_parts:
            num_bytes += part.tables.host_bytes + sum(row_map.num_bytes for row_map in part.maps)
        return num_bytes

    @contextlib.contextmanager
    def reading(self) -> Iterator[Version]:
        """Gives a version whose arrays are not donated until work over them is dispatched."""
        with self._gate.reading():
            if self._to_undo:
                raise RuntimeError(
                    f'model "{self.name}": rows: got some of a failed update in place, which could not be put back for '
                    "want of memory, wanted those of one version; update it again, or open the tables again."
                )
            yield self.current

    def _check(self, source: Source | None, in_place: InPlace) -> None:
        if in_place is True and not self._can_donate:
            raise ServingError(
                f'update: in_place: got True for model "{self.name}", whose rows lie in host memory below a cache, '
                'wanted False or "auto"; only rows on the device are changed where they lie.'
            )
        if in_place is False and not self._can_copy:
            raise ServingError(
                f'update: in_place: got False for model "{self.name}", some of whose rows the device reads in host '
                'memory (uvm), wanted True or "auto"; such rows are changed where they lie.'
            )

    def _update(
        self, old: Version, new: Version, changes: Sequence[Change], in_place: InPlace, readers: Sequence[Any]
    ) -> None:
        with self._memory.lock:  # not while programs are compiled, which may take minutes
            if self._to_undo:
                with held_back(), self._gate.writing():
                    self._undo()
                old, new = self.current, dataclasses.replace(new, parts=self.current.parts)
            plans, is_in_place = self._plan(old, changes, in_place)
            writes, parts = list[_Write](), list[Part]()
            for number, part in enumerate(old.own_parts):
                device, maps, stores = self._memory.devices[number], list(part.maps), list(part.tables.stores)
                for plan in (plan for plan in plans if plan.part is part):
                    stores[plan.store], maps[plan.store] = plan.write(device, is_in_place), plan.row_map
                    for row_ids, after in plan.lines() if is_in_place else ():
                        before = frozen.read_lines(plan.old, row_ids)
                        writes.append(_Write(number, plan.store, row_ids, after, before))
                parts.append(part.over(stores, maps))
            for number in range(len(parts), len(old.parts)):  # copies of the first part
                copied = _copy(parts[0].tables, old.tables, old.parts[number].tables, self._memory.devices[number])
                parts.append(dataclasses.replace(parts[0], tables=copied))
                writes += [dataclasses.replace(write, part=number) for write in writes if write.part == 0]
            jax.block_until_ready([part.tables for part in parts])  # failures are raised here, and no reader waits
            new = dataclasses.replace(new, parts=tuple(parts))
            self.held_bytes = _most_bytes(old.own_parts, plans, is_in_place)
        try:
            for reader in readers:
                reader.prepare(old, new)
            if is_in_place:
                for write in writes:
                    frozen.ready_to_write(new.parts[write.part].tables.stores[write.store], len(write.row_ids))
                with self._memory.lock:
                    why = "a piece of rows to update in place; another model has taken them meanwhile"
                    needed = max((plan.piece_bytes for plan in plans), default=0)
                    self._memory.require("update", self.name, self._memory.free(), needed, why)
                    self._write_in_place(old, new, writes)
                self.num_in_place += 1
            else:
                changed = {name: keys for plan in plans for name, keys in plan.changed.items()}
                publish(readers, old, new, changed)  # caches read what has changed, and are never over several parts
                self.current = new
        finally:
            self.held_bytes = 0

    def _plan(self, old: Version, changes: Sequence[Change], in_place: InPlace) -> tuple[list[StorePlan], bool]:
        """Plans each store of own parts that changes, and whether in place; refuses impossible updates."""
        parts, plans, free, copy_bytes = old.own_parts, list[StorePlan](), None, 0
        for is_roomy in (True, False):
            plans = [plan for number in range(len(parts)) for plan in self._plans_of(parts, number, changes, is_roomy)]
            copy_bytes = _most_bytes(parts, plans, is_in_place=False)
            free = self._memory.free()
            if free is None or copy_bytes <= free or not any(plan.is_grown for plan in plans):
                break  # otherwise try without room to grow further
        fits = self._can_copy and (free is None or copy_bytes <= free)
        if in_place is False or (in_place == "auto" and (fits or not self._can_donate)):
            remedy = "rows below a cache are not changed where they lie; open the tables again, or with more memory"
            if self._can_donate:
                remedy = 'pass in_place=True (or "auto"), which changes rows where they lie'
            self._memory.require("update", self.name, free, copy_bytes, f"a copy of what changes; {remedy}")
            return plans, False
        for plan in plans:
            if plan.is_grown:
                names = ", ".join(f'"{table.name}"' for table in old.tables.spec.stores[plan.store])
                is_choice = in_place is not True and self._can_copy
                also = f" A copy needs {copy_bytes} bytes, and {free} are free." if is_choice else ""
                raise ServingError(
                    f'update: model "{self.name}": rows: got {plan.num_needed} for the tables {names}, wanted at most '
                    f"{plan.old.capacity} to update in place; open with more spare_rows.{also}"
                )
        piece = max((plan.piece_bytes for plan in plans), default=0)
        within = _most_bytes(parts, plans, is_in_place=True) + piece
        why = f"an index and a piece of rows to update in place, or {copy_bytes} for a copy of what changes"
        self._memory.require("update", self.name, free, within, why)
        why = "the changed rows, as they were and as they will be; bring the changes in several deltas"
        _HOST.require("update", self.name, _HOST.free(), 2 * sum(plan.changed_bytes for plan in plans), why)
        return plans, True

    def _plans_of(
        self, parts: Sequence[Part], number: int, changes: Sequence[Change], is_roomy: bool
    ) -> Iterator[StorePlan]:
        part, of_store = parts[number], dict[int, list[Change]]()
        for change in (change.take_owned(number, len(parts)) for change in changes):
            if not change.is_empty:
                of_store.setdefault(part.tables.spec.places[change.table.name][0], []).append(change)
        for s, mine in of_store.items():
            capacity = functools.partial(self._capacity, part.maps[s], is_roomy)
            yield StorePlan(part, s, mine, capacity, keeps_places=not self._can_copy)

    def _capacity(self, row_map: RowMap, is_roomy: bool, num_needed: int) -> int:
        """Chooses the rows of a store: as many as it has, so that programs stay, unless those are too few."""
        if num_needed <= row_map.capacity or not is_roomy:
            return max(num_needed, row_map.capacity)
        more = max(row_map.num_tables * self._spare_rows, num_needed // 16)  # so that not each update is too many
        return max(num_needed, min(num_needed + more, MAX_CAPACITY))

    def _write_in_place(self, old: Version, new: Version, writes: Sequence["_Write"]) -> None:
        """Scatters changed rows into the arrays that are served."""
        parts = [list(part.tables.stores) for part in new.parts]
        with held_back(), self._gate.writing():
            try:
                for write in writes:
                    write.put(parts, write.after)
                    self._to_undo.append(write)
                jax.block_until_ready(parts)
            except BaseException:
                for stores, part in zip(parts, old.parts, strict=True):
                    for s, was in enumerate(part.tables.stores):
                        stores[s] = dataclasses.replace(stores[s], index=was.index, counters=was.counters)
                self.current = old.with_stores(parts)  # the arrays of `old` are gone
                self._undo()
                raise
            self.current = new.with_stores(parts)
            self._to_undo.clear()

    def _undo(self) -> None:
        """Puts rows back that a failed update in place has changed; until this succeeds none are served."""
        parts = [list(part.tables.stores) for part in self.current.parts]
        try:
            while self._to_undo:
                self._to_undo[-1].put(parts, self._to_undo[-1].before)
                jax.block_until_ready(parts)
                self._to_undo.pop()
        finally:
            self.current = self.current.with_stores(parts)


@dataclasses.dataclass(frozen=True)
class _Write:
    """A piece of an update in place, made ready on the host before readers are stopped."""

    part: int
    store: int
    row_ids: np.ndarray
    after: Sequence[np.ndarray]  # as `lines_of` gives them
    before: Sequence[np.ndarray]

    def put(self, parts: Sequence[list[FrozenStore]], lines: Sequence[np.ndarray]) -> None:
        stores = parts[self.part]
        stores[self.store] = frozen.write_lines(stores[self.store], self.row_ids, lines)


def open_update(model: str, source: Source, version: Version, key_bits: KeyBits) -> dict[str, TableSource]:
    """Opens and checks an update by table: a folder, folders in order, or by table, that comes after a version."""
    tables, op = version.tables.tables, "update"
    is_list = isinstance(source, Sequence) and not isinstance(source, str)
    if "" in (source.values() if isinstance(source, Mapping) else source if is_list else [source]):
        raise ServingError(f'{op}: source: got "", wanted a folder.')  # pathlib takes it for the working directory
    if isinstance(source, Mapping):
        if not source:
            raise ServingError(f"{op}: source: got no tables, wanted a folder for at least one.")
        for name in source:
            require_table(op, name, tables, f'model "{model}"')
        opened = {name: folders.open_either(op, path, tables[name], key_bits) for name, path in source.items()}
    elif is_list:
        opened = folders.open_links(op, model, source, tables, key_bits)
    else:
        opened = folders.open_all(op, model, pathlib.Path(source), tables, key_bits)
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
            holds = f'holds {held}, from "{version.files[name]}"' if held else "holds no export that a delta follows"
            again = " (it was applied already)" if found.uuid == held else ""
            raise ServingError(
                f'{op}: table "{name}": source: got the delta "{found.path}", which rests on {found.base}{again}, but '
                f"the table {holds}; apply deltas in order, and none of them twice, or a full export."
            )
    return opened


def _bytes_of(config: ModelConfig, table: frozen.FrozenTable, num_rows: int) -> int:
    """Counts the device memory of a table's rows, spare ones included; those in host memory take none but the index."""
    num_on_device = frozen.rows_on_device(num_rows, config.device_share) if config.device_share < 1 else None
    return sum(frozen.frozen_bytes(table, num_rows + config.spare_rows, num_on_device).values())


def _most_bytes(parts: Sequence[Part], plans: Sequence[StorePlan], is_in_place: bool) -> int:
    """Computes the additional device memory of the next version, for the part that takes most."""
    of_parts = ([plan for plan in plans if plan.part is part] for part in parts)
    return max(sum(plan.index_bytes if is_in_place else plan.copy_bytes for plan in mine) for mine in of_parts)


def _copy(new: FrozenTables, old: FrozenTables, copy: FrozenTables, device: Any) -> FrozenTables:
    """Copies the changed stores to another device, which has a copy of the old tables."""
    pick = lambda after, before, there: there if after is before else jax.device_put(after, device)  # noqa: E731
    return jax.tree.map(pick, new, old, copy)
