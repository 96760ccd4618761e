"""Restoring: saved rows go into a state, each to the shard that owns its key, whatever mesh saved them.

A new state comes from a chain of exports, or one goes forward by the next delta. A process reads the batches that may
have keys of its shards' partitions.
"""

import contextlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import enlarge, grow, processes
from jaxsok.checkpoint import manifest as manifest_lib, non_row_state
from jaxsok.checkpoint.chain import Path, chain_of, check_link, find_keys, padded_batches
from jaxsok.checkpoint.files import LOG, key_batches
from jaxsok.checkpoint.place import Restoring, place, shards_of_partitions
from jaxsok.checkpoint.save import time_of
from jaxsok.checkpoint.saved import OptimizerState, Source, check_forms
from jaxsok.collection import Collection
from jaxsok.operations import check_placed, locate
from jaxsok.plan import partitions_of
from jaxsok.specs import TableRef, name_word
from jaxsok.store import State
from jaxsok.table_import import rows_in_use
from jaxsok.types import NUM_PARTITIONS, TableFullError

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
        check_placed(op, collection, state)  # None too: it would begin a new state
        source = Source.of(op, pathlib.Path(path))
        is_path = not isinstance(after, str) or re.fullmatch("[0-9a-f]{32}", after) is None
        if is_path or (pathlib.Path(after) / manifest_lib.NAME).exists():
            before = Source.of(op, pathlib.Path(after), "after").manifest["uuid"]
        else:
            before = after
        check_link(op, source, before, f'"{after}"')
    return restore([source], collection, state, tables, optimizer_state, clock, follows=True)


def restore(
    chain: Sequence[Source],
    collection: Collection,
    state: State | None = None,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: Any = None,
    *,
    follows: bool = False,
) -> State:
    """Restores tables from a full export and its deltas, in order, as `load`; or a delta that `follows` the state."""
    full, is_new, now = chain[0], state is None, None
    op, is_whole = full.op, is_new or (follows and tables is None)
    with processes.fail_together(op):
        if state is not None:
            check_placed(op, collection, state)
            now = None if is_whole and clock is None else time_of(op, state, clock)
        taken = [check_forms(source, collection, tables, optimizer_state) for source in chain]
        names = list(taken[0])
        for source in chain:
            if state is None:
                source.check(names)
            else:  # before rows of the state go: a damaged batch must not cost them
                source.verify(names)
    _require_same(chain, tables, optimizer_state, now if state is not None else "of a new state")
    if state is None:
        low, high = full.manifest["seed"]
        state = collection.init(seed=low | high << 32)
    held = Restoring(state, collection, optimizer_state, is_whole=is_whole, now=now)
    if is_new:
        non_row_state.add_store_words(full, held)
    note = f"The state was donated, and is changed: tables {names} have part of what was to come; restore them again."
    collection.growth.forget()  # its bound on the rows in use holds for steps alone
    with contextlib.nullcontext() if is_new else held.kept_on_errors(note):
        for source, of_link in zip(chain, taken, strict=True):
            _apply_link(source, held, of_link)
        if tables is None:
            non_row_state.restore_looks(chain[-1], held)
    return held.state


def _require_same(chain: Sequence[Source], tables: Any, optimizer_state: str, now: Any) -> None:
    """Requires all processes to read the same: each reads the rows of its own shards alone."""
    exports = [source.manifest["uuid"] for source in chain]
    given = {"exports": exports, "tables": tables, "optimizer_state": optimizer_state, "clock": now}
    processes.require_same(chain[0].op, [f"{name}: {value}" for name, value in given.items()])


def _apply_link(source: Source, held: Restoring, taken: Mapping[str, Sequence[str]]) -> None:
    """Applies a full export or a delta, checked already; `taken` has the optimizer state to restore, by table."""
    collection, is_delta = held.collection, source.manifest["kind"] == "delta"
    if held.is_whole:
        non_row_state.note_keys(source, collection)
    # Before anything goes: a refusal changes nothing. Rows that leave make room for new ones: a table that evicts may
    # be full at both ends of a delta.
    rows = {name: (_more_rows if is_delta else _all_rows)(source, held, name) for name in taken}
    _make_room(source, held, rows, is_new=held.is_whole and not is_delta)
    for name in taken:
        if is_delta:
            for keys, _ in padded_batches(source.op, key_batches(source.files(name, manifest_lib.TOMBSTONES))):
                held.change(lambda state, name=name, keys=keys: collection.erase(state, name, keys)[0])
        elif not held.is_whole:
            held.change(lambda state, name=name: collection.clear(state, name)[0])
    for name in taken:
        place(source, held, name, taken[name])
    non_row_state.add(source, held, list(taken))


def _all_rows(source: Source, held: Restoring, name: str) -> np.ndarray:
    """Counts the rows of a full export in each shard, less those that are there: int64[num_shards]."""
    table = locate(source.op, held.collection, name)
    rows = manifest_lib.unpack(source.manifest["tables"][name]["partition_rows"])
    there = held.collection.shards.read(held.state.stores[table.store].table_rows).reshape(-1, len(table.spec.tables))
    return _rows_by_shard(held.collection, table, rows) - there[:, table.number].astype(np.int64)


def _more_rows(source: Source, held: Restoring, name: str) -> np.ndarray:
    """Counts the rows that a delta adds to each shard, less those that it removes: int64[num_shards]."""
    op, collection, more = source.op, held.collection, np.zeros(NUM_PARTITIONS, np.int64)
    for kind, sign in ((manifest_lib.ROWS, 1), (manifest_lib.TOMBSTONES, -1)):
        for keys, found in find_keys(op, collection, held.state, name, key_batches(source.files(name, kind))):
            changed = keys[found if sign < 0 else ~found]
            partitions = partitions_of(changed, name_word(name)).astype(np.int64)
            more += sign * np.bincount(partitions, minlength=NUM_PARTITIONS)
    return _rows_by_shard(collection, locate(op, collection, name), more)


def _make_room(source: Source, held: Restoring, rows: Mapping[str, np.ndarray], *, is_new: bool = False) -> None:
    """Grows the state for `rows`, the net gain of each shard: int64[num_shards] by table.

    A new state also gets room for one step's new keys, if memory allows. A store that evicts may exceed its
    `max_capacity` until the next `grow`: with fewer shards, uneven hashes need more room.
    """
    collection, state = held.collection, held.state
    capacities, roomy = {}, {}
    for s, spec in enumerate(collection.stores):
        parts = (rows[table.name] for table in spec.tables if table.name in rows)
        coming = sum(parts, np.zeros(spec.num_shards, np.int64))
        if not coming.any():
            continue
        needed = int((rows_in_use(spec, state.stores[s], collection.shards) + coming).max())
        if spec.max_capacity is not None and needed > spec.max_capacity:
            declared = {table.name: table.max_capacity for table in spec.tables}
            text = (
                f"{source.op}: max_capacity: got {declared}, {spec.max_capacity} rows for a shard, wanted {needed} for "
                "a shard, as was saved; "
            )
            if spec.tables[0].eviction is None:
                enough = needed if spec.is_replicated else needed * spec.num_shards
                raise TableFullError(f"{text}{enough} for these tables together are enough.")
            LOG.warning("%sthe next call of grow evicts.", text)
        capacity = state.stores[s].capacity // spec.num_shards
        if needed > capacity:
            capacities[s] = needed
        with_step = max(needed, min(spec.most_rows, needed + _keys_of_step(collection, s, needed)))
        if is_new and with_step > capacity:
            roomy[s] = with_step
    room = enlarge.agree_on_room([collection.stores[s] for s in roomy], collection.shards)
    if enlarge.fits(enlarge.rows_to_add(collection.stores, state, capacities | roomy), *room):
        capacities |= roomy
    held.change(lambda state: enlarge.grow_to(source.op, collection.stores, state, capacities, collection.shards))


def _keys_of_step(collection: Collection, s: int, num_rows: int) -> int:
    """Returns the keys of a step on a shard; where no step was counted before the save, guesses its new rows."""
    if keys := collection.growth.per_step()[s]:
        return keys
    names = {table.name for table in collection.stores[s].tables}
    declared = sum(feature.max_keys or 0 for feature in collection.features if feature.table in names)
    return max(LEAST_ROOM, declared, num_rows // grow.SLACK_SHARE)


def _rows_by_shard(collection: Collection, table: TableRef, rows: np.ndarray) -> np.ndarray:
    """Sums rows by partition to rows by shard: int64[num_shards]."""
    if table.spec.is_replicated:
        return np.full(table.spec.num_shards, rows.sum(), np.int64)
    counts = np.zeros(table.spec.num_shards, np.int64)
    np.add.at(counts, shards_of_partitions(collection, table), rows.astype(np.int64))
    return counts
