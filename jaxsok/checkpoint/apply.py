"""Exports into states: a new state from a chain, or one that goes forward by the next delta."""

import pathlib
from collections.abc import Sequence

import numpy as np

from jaxsok import processes
from jaxsok.checkpoint import beside_rows
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint import restore as restore_lib
from jaxsok.checkpoint.chain import KEYS_AT_A_TIME, Path, chain_of, check_link, looked_for
from jaxsok.checkpoint.files import key_batches
from jaxsok.checkpoint.place import Held
from jaxsok.checkpoint.save import time_of
from jaxsok.checkpoint.source import OptimizerState, Source, check_forms, chosen_tables
from jaxsok.collection import Collection
from jaxsok.operations import check_state, check_untraced, locate
from jaxsok.store import State


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

    Args:
      path: of an export; the links that a delta rests on are looked for beside it. Or all links in order.
      collection: of any mesh, capacities and grouping into stores.
      state: donated; None: a new one, with the seed and the step of the last link. One that is given keeps its own.
      tables: names; None: all, and there must be no others.
      optimizer_state: "require", "matching" or "initial" (see `TablesRestore`).
      clock: now, for a given state whose lookups have a clock; None: its step. Rows that come into a given state
        count as used now.

    Raises:
      ValueError: tables do not fit, or links are not in order.
      CorruptFileError: files are damaged; a given state is unchanged.
      TableFullError, MemoryError: there is no room.
      Exception: what fails when a given state is changed already has what there is of it as `state`.

    Example:
      `state = load(["monday", "tuesday"], collection)`
    """
    op = "load"
    is_new = state is None
    with processes.together(op):
        chain = chain_of(op, path)
        names = chosen_tables(chain[0], collection, tables)
        if state is not None:
            # Nothing is changed before all of it is known to be whole.
            check_state(op, collection, state)
            check_untraced(op, state)
            for source in chain:
                chosen_tables(source, collection, tables)
                check_forms(source, collection, names, optimizer_state)
                source.verify(names)
        now = None if state is None else time_of(op, state, clock)
    base = restore_lib.restored(chain[0], collection, state, tables, optimizer_state, now)
    with restore_lib.held_on(collection, state, names, is_new=is_new) as held:
        held.state = base
        for source in chain[1:]:
            _apply(source, collection, held, tables, optimizer_state, is_whole=is_new, now=now)
    return held.state


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
    """Brings a state that holds an export forward by the delta that comes next.

    Args:
      path: of the delta.
      collection: of the state.
      state: donated; it holds what `after` says, and nothing else was done to these tables since.
      after: what the state holds: the path of that export, or its `uuid`.
      tables: names; None: all.
      optimizer_state: as the state was loaded.
      clock: now, where lookups of the state have a clock; None, with `tables`: its step. Rows count as used
        now; without both the state gets the step of the delta, and the rows keep theirs.

    Raises:
      ValueError, CorruptFileError, Exception: as `load`; or the delta rests on another export.

    Example:
      `state = apply_delta("wednesday", collection, state, after="tuesday")`
    """
    op = "apply_delta"
    with processes.together(op):
        check_state(op, collection, state)
        check_untraced(op, state)
        source = Source.of(op, pathlib.Path(path))
        is_path = not isinstance(after, str) or (pathlib.Path(after) / manifest_lib.NAME).exists()
        held = Source.of(op, pathlib.Path(after)).manifest["uuid"] if is_path else after
        check_link(op, source, held, f'"{after}"')
        names = chosen_tables(source, collection, tables)
        check_forms(source, collection, names, optimizer_state)
        now = time_of(op, state, clock) if tables is not None or clock is not None else None
        source.verify(names)
    with restore_lib.held_on(collection, state, names) as held:
        _apply(source, collection, held, tables, optimizer_state, is_whole=tables is None, now=now)
    return held.state


def _apply(
    source: Source,
    collection: Collection,
    held: Held,
    tables: Sequence[str] | None,
    optimizer_state: OptimizerState,
    *,
    is_whole: bool,
    now: int | None,
) -> None:
    """Applies a delta whose place in the chain was checked."""
    with processes.together(source.op):
        names = chosen_tables(source, collection, tables)
        taken = check_forms(source, collection, names, optimizer_state)
    if is_whole:
        beside_rows.note_keys(source, collection)
    # What goes makes room for what comes: a table that evicts may be full at both ends of a delta.
    more = {name: _more_rows(source, collection, held.state, name) for name in names}
    held.state = restore_lib.with_room(source, collection, held.state, more)
    for name in names:
        for keys in processes.in_step(source.op, key_batches(source.files(name, manifest_lib.TOMBSTONES))):
            for start in range(0, keys.size, KEYS_AT_A_TIME):
                held.state, _ = collection.erase(held.state, name, keys[start : start + KEYS_AT_A_TIME])
    for name in names:
        restore_lib.place(source, collection, held, name, taken[name], now)
    beside_rows.add(source, collection, held, names, is_whole=is_whole, optimizer_state=optimizer_state)


def _more_rows(source: Source, collection: Collection, state: State, table: str) -> np.ndarray:
    """Counts the rows that a delta adds to each shard, less those that it takes away: int64[num_shards]."""
    s, number = locate(source.op, collection, table)
    spec = collection.stores[s]
    counts = np.zeros(spec.num_shards, np.int64)
    for keys, found in looked_for(source.op, collection, state, table, key_batches(source.files(table))):
        counts += restore_lib.keys_by_shard(collection, spec, spec.tables[number], keys[~found])
    tombstones = key_batches(source.files(table, manifest_lib.TOMBSTONES))
    for keys, found in looked_for(source.op, collection, state, table, tombstones):
        counts -= restore_lib.keys_by_shard(collection, spec, spec.tables[number], keys[found])
    return counts
