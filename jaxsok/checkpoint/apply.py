"""Exports into states: a new state from a chain, or one that goes forward by the next delta."""

import pathlib
from collections.abc import Sequence

from jaxsok import processes
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.chain import Path, chain_of, check_link
from jaxsok.checkpoint.restore import apply_link, held_on, restore
from jaxsok.checkpoint.save import time_of
from jaxsok.checkpoint.source import OptimizerState, Source, check_forms, choose_tables
from jaxsok.collection import Collection
from jaxsok.operations import check_state, check_untraced
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

    `path` is of an export, beside the links that it rests on, or all links in order. `collection` may have any mesh,
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
    with processes.together("load"):
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
    with processes.together(op):
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
    with held_on(collection, state, names) as held:
        apply_link(source, collection, held, tables, optimizer_state, is_whole=tables is None, now=now)
    return held.state
