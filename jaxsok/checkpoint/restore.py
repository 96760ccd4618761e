"""Restoring: saved rows go into a state, each to the shard that owns its key, whatever mesh saved them.

A new state comes from a chain of exports, or one goes forward by the next delta. A process reads the batches that may
have keys of its shards' partitions.
"""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsok import enlarge, grow, processes
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint import non_row_state
from jaxsok.checkpoint.chain import KEYS_AT_A_TIME, Path, chain_of, check_link, find_keys, pad_keys
from jaxsok.checkpoint.files import CorruptFileError, key_batches
from jaxsok.checkpoint.place import place_records
from jaxsok.checkpoint.save import time_of
from jaxsok.checkpoint.saved import OptimizerState, Source, check_forms, choose_tables
from jaxsok.collection import Collection
from jaxsok.operations import check_state, check_untraced, locate
from jaxsok.plan import partitions_of
from jaxsok.records import Records, round_to
from jaxsok.specs import StoreSpec, TableSpec, name_word
from jaxsok.store import State
from jaxsok.table_import import Held, rows_in_use
from jaxsok.types import MAX_CAPACITY, NUM_PARTITIONS, TableFullError

LOG = logging.getLogger("jaxsok.checkpoint")

LEAST_ROOM = 1024  # rows of a shard that a restored state has for new keys, if nothing says how many a step has


def load(
    path: Path | Sequence[Path],
    collection: Collection,
    *,
    state: State | None = None,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: int | None = None,
) -> State:
    """Makes a state of an export, or of a full one and its deltas in order.

    `path` is of an export, next to the links that it rests on, or all links in order. `collection` may have any mesh,
    capacities and grouping into stores; with `tables` (names; None: all) the export may have others. A given `state` is
    donated and keeps its seed and step; a new one has those of the last link. `optimizer_state` is "require",
    "matching" or "initial" (see `TablesRestore`). Rows that enter a given state count as used now: at `clock`, where
    its lookups have a clock, else at its step.

    Raises:
      ValueError: tables do not fit, or links are not in order.
      CorruptFileError: files are damaged; a given state is unchanged.
      TableFullError, MemoryError: there is no room.
      Exception: once a given state is changed, any error has what there is of it as `state`.

    Example:
      `state = load(["monday", "tuesday"], collection)`
    """
    with processes.fail_together("load"):
        chain = chain_of("load", path)
    return restore(chain, collection, state, tables, optimizer_state, clock)


def apply_delta(
    path: Path,
    collection: Collection,
    state: State,
    *,
    after: str | Path,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: int | None = None,
) -> State:
    """Brings a state that holds an export forward by the delta at `path`, which comes next.

    The state is donated. `after` says what it holds, as path or `uuid` of that export; these tables were not changed
    since. `tables` are names (None: all); `optimizer_state` is as the state was loaded. `clock` is now, where lookups
    have a clock: rows count as used now. None, with `tables`: the state's step. Without both the state gets the step of
    the delta, and the rows keep theirs.

    Raises:
      ValueError, CorruptFileError, Exception: as `load`; or the delta rests on another export.

    Example:
      `state = apply_delta("wednesday", collection, state, after="tuesday")`
    """
    op = "apply_delta"
    with processes.fail_together(op):
        check_state(op, collection, state)
        check_untraced(op, state)
        source = Source.of(op, pathlib.Path(path))
        is_path = not isinstance(after, str) or (pathlib.Path(after) / manifest_lib.NAME).exists()
        held = Source.of(op, pathlib.Path(after)).manifest["uuid"] if is_path else after
        check_link(op, source, held, f'"{after}"')
        names = choose_tables(source, collection, tables)
        check_forms(source, collection, names, optimizer_state)
        now = time_of(op, state, clock) if tables is not None or clock is not None else None
        source.verify(names)
    with hold_state(collection, state, names) as held:
        apply_link(source, collection, held, tables, optimizer_state, is_whole=tables is None, now=now)
    if tables is None:
        non_row_state.restore_looks(source, collection, held.state)
    return held.state


def restore(
    chain: Sequence[Source],
    collection: Collection,
    state: State | None = None,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: Any = None,
) -> State:
    """Restores tables from a full export and its deltas, in order, as `load`."""
    full, is_new, now = chain[0], state is None, None
    op = full.op
    with processes.fail_together(op):
        names = choose_tables(full, collection, tables)
        if state is not None:
            check_state(op, collection, state)
            check_untraced(op, state)
            now = time_of(op, state, clock)
        taken = check_forms(full, collection, names, optimizer_state)
        full.check(names)
        if state is not None:
            # Before rows of the state go: a damaged batch must not cost them.
            for delta in chain[1:]:
                choose_tables(delta, collection, tables)
                check_forms(delta, collection, names, optimizer_state)
            for source in chain:
                source.verify(names)
    if state is None:
        low, high = full.manifest["seed"]
        state = collection.init(seed=low | high << 32)
        state = non_row_state.with_store_words(full, collection, state)
        non_row_state.note_keys(full, collection)
    rows = {}
    for name in names:
        by_partition = manifest_lib.unpack(full.manifest["tables"][name]["partition_rows"])
        rows[name] = _rows_by_shard(op, collection, name, by_partition)
        if not is_new:
            s, number = locate(op, collection, name)
            there = collection.shards.read(state.stores[s].table_rows).reshape(-1, len(collection.stores[s].tables))
            rows[name] -= there[:, number].astype(np.int64)
    with hold_state(collection, state, names, is_new=is_new) as held:
        # Before anything goes: a refusal changes nothing.
        held.state = with_room(full, collection, state, rows, is_new=is_new)
        for name in () if is_new else names:
            held.state, _ = collection.clear(held.state, name)
        for name in names:
            place(full, collection, held, name, taken[name], now)
        non_row_state.add(full, collection, held, names, is_whole=is_new, optimizer_state=optimizer_state)
        for delta in chain[1:]:
            apply_link(delta, collection, held, tables, optimizer_state, is_whole=is_new, now=now)
    if tables is None:
        non_row_state.restore_looks(chain[-1], collection, held.state)
    return held.state


@contextlib.contextmanager
def hold_state(collection: Collection, state: State, names: Sequence[str], *, is_new: bool = False) -> Iterator[Held]:
    """Wraps calls that donate a state bit by bit: an error carries the last whole state, unless the state `is_new`."""
    held = Held(state)
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
    """Places a table's saved rows over those of the same keys, with last steps of `now` at least (None: as saved)."""
    op = source.op
    s, number = locate(op, collection, name)
    spec = collection.stores[s]
    table = spec.tables[number]
    owners = _owners_of(collection, spec, table)
    clock, dtype = np.uint32(source.manifest["clock"]), jnp.dtype(table.dtype)

    def fit(records: Records) -> Records:
        """Converts saved rows to the dtype, optimizer state and statistics of the table."""
        num_rows = records.num_rows
        state = {
            state.name: records.state[state.name]
            if state.name in taken
            else np.full((num_rows, state.dim), state.initial_value, np.float32)
            for state in spec.state_specs
        }
        last_step, frequency = records.last_step, records.frequency
        if spec.keeps_statistics and last_step is None:
            # Unknown: they count as used when they were saved, so that none of them is the first to leave.
            last_step, frequency = np.full(num_rows, clock), np.zeros(num_rows, np.uint32)
        if now is not None and last_step is not None:
            last_step = np.maximum(last_step, np.uint32(now))
        return Records(records.keys, round_to(records.rows, dtype), state, last_step, frequency)

    def read_shard(shard: int) -> Iterator[Records]:
        wanted = None if spec.is_replicated or (owners == shard).all() else owners == shard
        if wanted is None or wanted.any():
            yield from map(fit, source.records(name, wanted))

    num_placed = place_records(op, collection, s, number, held, read_shard)
    saved = source.manifest["tables"][name]["num_rows"]
    with processes.fail_together(op):
        if num_placed != saved:
            raise CorruptFileError(
                f'{op}: table "{name}": got {num_placed} rows in "{source.folder}", wanted {saved}; files of other '
                "saves were mixed."
            )


def apply_link(
    source: Source,
    collection: Collection,
    held: Held,
    tables: Sequence[str] | None,
    optimizer_state: OptimizerState,
    *,
    is_whole: bool,
    now: int | None,
) -> None:
    """Applies a delta; its place in the chain is checked already."""
    with processes.fail_together(source.op):
        names = choose_tables(source, collection, tables)
        taken = check_forms(source, collection, names, optimizer_state)
    if is_whole:
        non_row_state.note_keys(source, collection)
    # Removed rows make room for new ones: a table that evicts may be full at both ends of a delta.
    more = {name: _more_rows(source, collection, held.state, name) for name in names}
    held.state = with_room(source, collection, held.state, more)
    for name in names:
        for keys in processes.iterate_together(source.op, key_batches(source.files(name, manifest_lib.TOMBSTONES))):
            for start in range(0, keys.size, KEYS_AT_A_TIME):
                erased = pad_keys(keys[start : start + KEYS_AT_A_TIME])
                held.state, _ = collection.erase(held.state, name, erased)
    for name in names:
        place(source, collection, held, name, taken[name], now)
    non_row_state.add(source, collection, held, names, is_whole=is_whole, optimizer_state=optimizer_state)


def _more_rows(source: Source, collection: Collection, state: State, table: str) -> np.ndarray:
    """Counts the rows that a delta adds to each shard, less those that it removes: int64[num_shards]."""
    more = np.zeros(NUM_PARTITIONS, np.int64)
    for keys, found in find_keys(source.op, collection, state, table, key_batches(source.files(table))):
        more += _keys_by_partition(table, keys[~found])
    tombstones = key_batches(source.files(table, manifest_lib.TOMBSTONES))
    for keys, found in find_keys(source.op, collection, state, table, tombstones):
        more -= _keys_by_partition(table, keys[found])
    return _rows_by_shard(source.op, collection, table, more)


def with_room(
    source: Source, collection: Collection, state: State, rows: Mapping[str, np.ndarray], *, is_new: bool = False
) -> State:
    """Grows a state, which is donated, for `rows`, the net gain of each shard: int64[num_shards] by table.

    A new state also gets room for one step's new keys, if memory allows. A store that evicts may exceed its
    `max_capacity` until the next `grow`: with fewer shards, uneven hashes need more room.
    """
    capacities, roomy = {}, {}
    for s, spec in enumerate(collection.stores):
        parts = (rows[table.name] for table in spec.tables if table.name in rows)
        coming = sum(parts, np.zeros(spec.num_shards, np.int64))
        if not coming.any():
            continue
        needed = int((rows_in_use(spec, state.stores[s], collection.shards) + coming).max())
        if spec.max_capacity is not None and needed > spec.max_capacity:
            if spec.tables[0].eviction is None:
                raise TableFullError(
                    f"{source.op}: store of tables {[table.name for table in spec.tables]}: max_capacity: got "
                    f"{spec.max_capacity} rows for a shard, wanted {needed} for what was saved; raise it."
                )
            text = "%s: store of tables %s: max_capacity: got %d rows for a shard, wanted %d for what was saved; the "
            text += "next call of grow evicts."
            LOG.warning(text, source.op, [table.name for table in spec.tables], spec.max_capacity, needed)
        capacity = state.stores[s].capacity // spec.num_shards
        if needed > capacity:
            capacities[s] = needed
        limit = min(spec.max_capacity or MAX_CAPACITY, MAX_CAPACITY)
        with_step = max(needed, min(limit, needed + _keys_of_step(collection, s, needed)))
        if is_new and with_step > capacity:
            roomy[s] = with_step
    room = enlarge.agree_on_room([collection.stores[s] for s in roomy], collection.shards)
    if enlarge.fits(enlarge.rows_to_add(collection.stores, state, capacities | roomy), *room):
        capacities |= roomy
    return enlarge.grow_to(source.op, collection.stores, state, capacities, collection.shards)


def _keys_of_step(collection: Collection, s: int, num_rows: int) -> int:
    """Guesses the new rows of a step on a shard, where the files do not say how many keys steps had."""
    if keys := collection.growth.per_step()[s]:
        return keys
    names = {table.name for table in collection.stores[s].tables}
    declared = sum(feature.max_keys or 0 for feature in collection.features if feature.table in names)
    return max(LEAST_ROOM, declared, num_rows // grow.SLACK_SHARE)


def _rows_by_shard(op: str, collection: Collection, name: str, rows: np.ndarray) -> np.ndarray:
    """Sums rows by partition to rows by shard: int64[num_shards]."""
    s, number = locate(op, collection, name)
    spec = collection.stores[s]
    if spec.is_replicated:
        return np.full(spec.num_shards, rows.sum(), np.int64)
    counts = np.zeros(spec.num_shards, np.int64)
    np.add.at(counts, _owners_of(collection, spec, spec.tables[number]), rows.astype(np.int64))
    return counts


def _keys_by_partition(name: str, keys: np.ndarray) -> np.ndarray:
    return np.bincount(partitions_of(keys, name_word(name)).astype(np.int64), minlength=NUM_PARTITIONS)


def _owners_of(collection: Collection, spec: StoreSpec, table: TableSpec) -> np.ndarray:
    if spec.num_shards == 1 or table.placement.kind == "on":
        return np.full(NUM_PARTITIONS, table.placement.shard if spec.num_shards > 1 else 0, np.int64)
    return np.asarray(collection.partition_owners, np.int64)
