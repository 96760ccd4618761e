"""Restoring: saved rows into a state, each to the shard that owns its key, whatever the mesh that saved them was.

A process reads the batches that may have keys of its shards' partitions.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxsok import grow as grow_lib
from jaxsok import processes
from jaxsok.checkpoint import beside_rows
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.files import CorruptFileError, name_word
from jaxsok.checkpoint.place import Held, Placer
from jaxsok.checkpoint.save import time_of
from jaxsok.checkpoint.source import OptimizerState, Source, check_forms, chosen_tables
from jaxsok.collection import Collection
from jaxsok.operations import check_state, check_untraced, locate
from jaxsok.plan import partitions_of
from jaxsok.records import Records
from jaxsok.specs import StoreSpec, TableSpec
from jaxsok.store import State, StoreState, row_bytes
from jaxsok.types import COUNTERS, MAX_CAPACITY, NUM_PARTITIONS, TableFullError

LEAST_ROOM = 1024  # rows of a shard that a restored state has for new keys, if nothing says how many a step has


def restored(
    source: Source,
    collection: Collection,
    state: State | None = None,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: Any = None,
) -> State:
    """Restores tables into a new state, or into one that there is, whose rows of these tables go.

    Args:
      source: what was saved.
      collection: of any mesh, capacities and optimizers.
      state: donated; None: a new one, with step and seed of the save. One that is given keeps its own.
      tables: names; None: all, and there must be no others.
      optimizer_state: "require", "matching" or "initial".
      clock: now, for a given state whose lookups have a clock; None: its step. Rows that come into a given state
        count as used now, or the next delta would not see that they changed.

    Raises:
      ValueError, CorruptFileError, TableFullError, MemoryError: tables do not fit, files are damaged, or there is no
        room. A given state is unchanged.
      Exception: what else fails, when a given state is changed already, has what there is of it as `state`.
    """
    op = source.op
    is_new = state is None
    with processes.together(op):
        names = chosen_tables(source, collection, tables)
        taken = check_forms(source, collection, names, optimizer_state)
        source.check(names)
        now = None if state is None else time_of(op, state, clock)
        if state is not None:
            check_state(op, collection, state)
            check_untraced(op, state)
            # Before rows of the state go: a damaged batch must not cost them.
            source.verify(names)
    if state is None:
        seed = source.manifest["seed"]
        state = collection.init(seed=seed[0] | seed[1] << 32)
        state = beside_rows.with_store_words(source, collection, state)
        beside_rows.note_keys(source, collection)
    rows = {name: _rows_by_shard(source, collection, name) for name in names}
    if not is_new:
        rows = {name: coming - _table_rows(collection, state, name) for name, coming in rows.items()}
    with held_on(collection, state, names, is_new=is_new) as held:
        # Before anything goes: a refusal changes nothing.
        held.state = with_room(source, collection, state, rows, is_new=is_new)
        for name in () if is_new else names:
            held.state, _ = collection.clear(held.state, name)
        for name in names:
            place(source, collection, held, name, taken[name], now)
        beside_rows.add(source, collection, held, names, is_whole=is_new, optimizer_state=optimizer_state)
    return held.state


@contextlib.contextmanager
def held_on(
    collection: Collection, state: State | None, names: Sequence[str], *, is_new: bool = False
) -> Iterator[Held]:
    """Surrounds what donates a state bit by bit: an error gives the caller the last state that is whole.

    Args:
      collection: of the state.
      state: as it is before.
      names: of the tables that change.
      is_new: whether the caller has no state that could be lost.
    """
    held = Held(state)  # pyright: ignore[reportArgumentType]  # None until there is one
    try:
        yield held
    except BaseException as error:  # Ctrl-C too must not lose a state that was donated
        if not is_new and held.state is not state:
            error.add_note(
                f"The state was donated, and is changed: tables {list(names)} have part of what was to come. What "
                "there is now is the `state` attribute of this error; restore these tables into it again."
            )
            error.state = held.state  # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        collection.growth.forget()  # its bound on the rows in use holds for steps alone


def place(source: Source, collection: Collection, held: Held, name: str, taken: Sequence[str], now: int | None) -> None:
    """Places the saved rows of a table; a key that has a row gets the saved one.

    `now` is the earliest last step that the rows get; None: they keep the saved one.
    """
    op = source.op
    s, number = locate(op, collection, name)
    spec = collection.stores[s]
    table = spec.tables[number]
    owners = owners_of(collection, spec, table)
    fitted = _fitter(source, spec, table, taken, now)

    def of_shard(shard: int) -> Iterator[Records]:
        wanted = None if spec.is_replicated or (owners == shard).all() else owners == shard
        if wanted is None or wanted.any():
            yield from map(fitted, source.records(name, wanted))

    num_placed = Placer(op, collection, s, number).place(held, of_shard)
    saved = source.manifest["tables"][name]["num_rows"]
    with processes.together(op):
        if num_placed != saved:
            raise CorruptFileError(
                f'{op}: table "{name}": got {num_placed} rows in "{source.folder}", wanted {saved}; files of other '
                "saves were mixed."
            )


def _fitter(
    source: Source, spec: StoreSpec, table: TableSpec, taken: Sequence[str], now: int | None
) -> Callable[[Records], Records]:
    """Makes a function that gives saved rows the dtype, optimizer state and statistics of the table."""
    clock = np.uint32(source.manifest["clock"])
    dtype = jnp.dtype(table.dtype)

    def fitted(records: Records) -> Records:
        rows, num_rows = records.rows, records.num_rows
        if rows.dtype != dtype:
            wide = rows.astype(np.float32)
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            rows = np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)
        state = {
            state.name: records.state[state.name]
            if state.name in taken
            else np.full((num_rows, state.dim), state.initial_value, np.float32)
            for state in spec.state_specs
        }
        last_step, frequency = records.last_step, records.frequency
        if spec.keeps_statistics and last_step is None:
            # Unknown: as if used when they were saved, so that none of them is the first to leave.
            last_step, frequency = np.full(num_rows, clock), np.zeros(num_rows, np.uint32)
        if now is not None and last_step is not None:
            last_step = np.maximum(last_step, np.uint32(now))
        return Records(records.keys, rows, state, last_step, frequency)

    return fitted


# Room ----------------------------------------------------------------------------------------------------------------


def with_room(
    source: Source, collection: Collection, state: State, rows: Mapping[str, np.ndarray], *, is_new: bool = False
) -> State:
    """Grows a state for the rows that are to come.

    Args:
      source: named in errors.
      collection: of the state.
      state: donated.
      rows: of each table, that each shard gets, less those that it loses before: int64[num_shards].
      is_new: whether the state is new: then it also gets room for one step's new keys, if there is memory for that.

    Raises:
      TableFullError: a store's `max_capacity` is below that.
    """
    capacities, roomy = {}, {}
    for s, spec in enumerate(collection.stores):
        parts = (rows[table.name] for table in spec.tables if table.name in rows)
        coming = sum(parts, np.zeros(spec.num_shards, np.int64))
        if not coming.any():
            continue
        needed = int((_rows_in_use(collection, spec, state.stores[s]) + coming).max())
        if spec.max_capacity is not None and needed > spec.max_capacity:
            raise TableFullError(
                f"{source.op}: store of tables {[table.name for table in spec.tables]}: max_capacity: got "
                f"{spec.max_capacity} rows for a shard, wanted {needed} for what was saved; raise it."
            )
        capacity = state.stores[s].capacity // spec.num_shards
        if needed > capacity:
            capacities[s] = needed
        limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
        with_step = min(limit, needed + _keys_of_step(collection, s, needed))
        if is_new and with_step > capacity:
            roomy[s] = with_step
    free = grow_lib.agreed_free_bytes(collection.shards) if roomy else None
    more = [
        (rows - state.stores[s].capacity // collection.stores[s].num_shards) * row_bytes(collection.stores[s])
        for s, rows in (capacities | roomy).items()
    ]
    if free is None or sum(more) <= free:
        capacities |= roomy
    return grow_lib.grow_to(source.op, collection.stores, state, capacities, collection.shards)


def _keys_of_step(collection: Collection, s: int, num_rows: int) -> int:
    """Guesses the rows of a shard that one step may need, where the files do not say how many keys steps had."""
    if keys := collection.growth.per_step()[s]:
        return keys
    names = {table.name for table in collection.stores[s].tables}
    declared = sum(feature.max_keys or 0 for feature in collection.features if feature.table in names)
    return max(LEAST_ROOM, declared, num_rows // grow_lib.SLACK_SHARE)


def _table_rows(collection: Collection, state: State, name: str) -> np.ndarray:
    """Counts a table's rows of each shard: int64[num_shards]; waits for the device."""
    s, number = locate("restore", collection, name)
    spec, shards, words = collection.stores[s], collection.shards, state.stores[s].table_rows
    return shards.read(words).reshape(spec.num_shards, len(spec.tables))[:, number].astype(np.int64)


def _rows_in_use(collection: Collection, spec: StoreSpec, store: StoreState) -> np.ndarray:
    """Counts the rows of each shard: int64[num_shards]; waits for the device."""
    words = collection.shards.read(store.counters).reshape(spec.num_shards, len(COUNTERS)).astype(np.int64)
    allocated, begin, end = (words[:, COUNTERS.index(name)] for name in ("num_allocated", "free_begin", "free_end"))
    return allocated - (end - begin)


def _rows_by_shard(source: Source, collection: Collection, name: str) -> np.ndarray:
    """Counts the saved rows of a table that each shard gets: int64[num_shards]."""
    s, number = locate(source.op, collection, name)
    spec = collection.stores[s]
    rows = manifest_lib.unpacked(source.manifest["tables"][name]["partition_rows"])
    return _by_shard(collection, spec, spec.tables[number], rows)


def keys_by_shard(collection: Collection, spec: StoreSpec, table: TableSpec, keys: np.ndarray) -> np.ndarray:
    """Counts the keys of a table that belong to each shard: int64[num_shards]."""
    rows = np.bincount(partitions_of(keys, name_word(table.name)).astype(np.int64), minlength=NUM_PARTITIONS)
    return _by_shard(collection, spec, table, rows)


def _by_shard(collection: Collection, spec: StoreSpec, table: TableSpec, rows: np.ndarray) -> np.ndarray:
    """Sums numbers by partition over the partitions of each shard."""
    if spec.is_replicated:
        return np.full(spec.num_shards, rows.sum(), np.int64)
    counts = np.zeros(spec.num_shards, np.int64)
    np.add.at(counts, owners_of(collection, spec, table), rows.astype(np.int64))
    return counts


def owners_of(collection: Collection, spec: StoreSpec, table: TableSpec) -> np.ndarray:
    """Returns the shard of each partition of a table: int64[4096]."""
    if spec.num_shards == 1 or table.placement.kind == "on":
        return np.full(NUM_PARTITIONS, table.placement.shard if spec.num_shards > 1 else 0, np.int64)
    return np.asarray(collection.partition_owners, np.int64)
