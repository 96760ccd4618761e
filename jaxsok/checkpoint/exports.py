"""Exports: a folder of saved tables without Orbax, in full or with what changed since another; and states made of them.

A delta has every row whose last step is that of its base or later, whole, and the keys that are gone: those that the
base and what it rests on have, and the tables have not. A chain is a full export (or a checkpoint) and its deltas, in
order; each link knows its base by name and by a number of its own, so that none can be left out or put in twice.
"""

import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxsok import processes
from jaxsok.checkpoint import lineage as lineage_lib
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint import restore as restore_lib
from jaxsok.checkpoint.files import key_batches
from jaxsok.checkpoint.restore import OptimizerState, Source
from jaxsok.checkpoint.save import HOST_BYTES, PIECE_BYTES, SaveOptions, SaveReport, Saving, saved_now, time_of
from jaxsok.collection import Collection
from jaxsok.store import State

KEYS_AT_A_TIME = 1 << 18  # 2 MiB of keys: enough for a device to be busy, few enough for a host
Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: pathlib.Path
    uuid: str
    """By which deltas know it."""
    kind: str
    """"full" or "delta"."""
    step: int
    clock: int
    """The step, or the time that the caller gave: a delta on top of this has what changed at this time and later."""
    num_rows: dict[str, int]
    """Rows written, by table."""
    num_tombstones: dict[str, int]
    """Keys that are gone, by table."""
    report: SaveReport
    """Of this process."""


def export_full(
    path: Path,
    collection: Collection,
    state: State,
    *,
    clock: int | None = None,
    compression: str = "none",
    host_bytes: int = HOST_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Exported:
    """Writes all tables into a new folder, which is there as a whole or not at all.

    Args:
      path: of the folder; it must not exist. In several processes all of them call, and share the file system.
      collection: that made the state.
      state: not donated before this returns.
      clock: the time, where lookups are told one; None: the state's step.
      compression: "none", "lz4" or "zstd".
      host_bytes: host memory that a process may take.
      piece_bytes: what is copied from the device at a time.

    Raises:
      FileExistsError: the path is taken.
      ValueError: a row has a later last step than `clock`: lookups were told another one.

    Cost:
      Every row in use goes to the host and to the files once.

    Example:
      >>> import tempfile
      >>> import jaxsok
      >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("item", table="item")])
      >>> batch = collection.batch({"item": np.array([7, 9, 7])})
      >>> _, state, _ = collection.lookup(collection.init(seed=0), batch.features)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     exported = export_full(f"{folder}/monday", collection, state)
      ...     again = load(f"{folder}/monday", collection)
      >>> exported.num_rows, collection.num_rows(again)
      ({'item': 2}, {'item': 2})
    """
    op = "export_full"
    options = SaveOptions(compression, host_bytes, piece_bytes)
    return _export(op, path, lambda _: Saving(op, collection, state, options, kind="full", clock=clock))


def export_delta(
    path: Path,
    collection: Collection,
    state: State,
    base: Path | Sequence[Path],
    *,
    clock: int | None = None,
    compression: str = "none",
    host_bytes: int = HOST_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Exported:
    """Writes what changed since another export: rows whose last step is that of the base or later, and keys that went.

    Whoever applies it to what the base holds has the tables as they are: rows, optimizer state, statistics.

    Args:
      path: of the folder; it must not exist.
      collection: that made the state; all its tables keep statistics (`TableSpec.statistics`).
      state: not donated before this returns.
      base: a folder of `export_full` or `export_delta`, or the tables' folder of a checkpoint. The chain that a delta
        rests on is looked for beside it; else give all links in order.
      clock: the time, where lookups are told one; None: the state's step.
      compression: "none", "lz4" or "zstd".
      host_bytes: host memory that a process may take.
      piece_bytes: what is copied from the device at a time.

    A row that an update moves after the export, by a plan looked up before an earlier step, is not seen to change: call
    this where a step has ended.

    Raises:
      FileExistsError: the path is taken.
      ValueError: a table keeps no statistics, the base is of other tables, of a later time, or of a state that this
        one did not come from (one that was lost, when this one was restored from before the base); or a row has a later
        last step than `clock`.
      CorruptFileError: the base is damaged.

    Cost:
      The keys and statistics of all rows, and the rows that changed, go to the host. All keys of the chain are read and
      looked for in the tables.

    Example:
      `export_delta("tuesday", collection, state, base="monday")`, then `load(["monday", "tuesday"], collection)`
    """
    op = "export_delta"
    for spec in collection.stores:
        if not spec.keeps_statistics:
            raise ValueError(
                f'{op}: table "{spec.tables[0].name}": statistics: got False, wanted True: what changed is told by the '
                "last step of each row; declare TableSpec(statistics=True)."
            )
    collection._check_state(op, state)
    with processes.together(op):
        chain = chain_of(op, base)
        last = chain[-1].manifest
        for source in chain:
            names = restore_lib.chosen_tables(source, collection, None)
            restore_lib.check_forms(source, collection, names, "require")
        now = time_of(op, state, clock)
        if now < last["clock"]:
            raise ValueError(
                f'{op}: base: got "{chain[-1].folder}" of time {last["clock"]}, wanted one of {now} or earlier: the '
                "state is older than it."
            )
        lineage_lib.check(op, collection, state, chain[-1].folder, last)
    options = SaveOptions(compression, host_bytes, piece_bytes)
    path = pathlib.Path(path)
    more = {
        "base": last["uuid"],
        "base_path": os.path.relpath(chain[-1].folder, path.absolute().parent),
        "since": last["clock"],
    }

    def gone() -> dict[str, np.ndarray]:
        return {table.name: _gone(op, collection, state, chain, table.name) for table in collection.tables}

    def saving(tombstones: dict[str, np.ndarray]) -> Saving:
        return Saving(
            op,
            collection,
            state,
            options,
            kind="delta",
            clock=now,
            since=last["clock"],
            tombstones=tombstones,
            more=more,
        )

    return _export(op, path, saving, gone)


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
      clock: now, for a given state whose lookups are told one; None: its step. Rows that come into a given state
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
        names = restore_lib.chosen_tables(chain[0], collection, tables)
        if state is not None:
            # Nothing is changed before all of it is known to be whole.
            collection._check_state(op, state)
            for source in chain:
                restore_lib.chosen_tables(source, collection, tables)
                restore_lib.check_forms(source, collection, names, optimizer_state)
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
      clock: now, where lookups of the state are told one; None, with `tables`: its step. Rows count as used now;
        without both the state gets the step of the delta, and the rows keep theirs.

    Raises:
      ValueError: the delta rests on another export, or tables do not fit.
      CorruptFileError: files are damaged; the state is unchanged.
      Exception: what fails when the state is changed already has what there is of it as `state`.

    Example:
      `state = apply_delta("wednesday", collection, state, after="tuesday")`
    """
    op = "apply_delta"
    with processes.together(op):
        collection._check_state(op, state)
        source = Source.of(op, pathlib.Path(path))
        is_path = not isinstance(after, str) or (pathlib.Path(after) / manifest_lib.NAME).exists()
        held = Source.of(op, pathlib.Path(after)).manifest["uuid"] if is_path else after
        _check_link(op, source, held, f'"{after}"')
        names = restore_lib.chosen_tables(source, collection, tables)
        restore_lib.check_forms(source, collection, names, optimizer_state)
        now = time_of(op, state, clock) if tables is not None or clock is not None else None
        source.verify(names)
    with restore_lib.held_on(collection, state, names) as held:
        _apply(source, collection, held, tables, optimizer_state, is_whole=tables is None, now=now)
    return held.state


# Chains --------------------------------------------------------------------------------------------------------------


def chain_of(op: str, path: Path | Sequence[Path]) -> list[Source]:
    """The links of a chain, first the full one, checked to follow each other.

    Raises:
      ValueError: a link is missing or of another chain.
    """
    if isinstance(path, (str, os.PathLike)):
        links = [Source.of(op, pathlib.Path(path))]
        while links[0].manifest["kind"] == "delta":
            delta = links[0]
            folder = (delta.folder.absolute().parent / delta.manifest["base_path"]).resolve()
            if not (folder / manifest_lib.NAME).exists():
                raise ValueError(
                    f'{op}: path: got the delta "{delta.folder}" alone, whose base "{folder}" is not there; give all '
                    "links in order, the full export first."
                )
            links.insert(0, Source.of(op, folder))
    else:
        links = [Source.of(op, pathlib.Path(one)) for one in path]
        if not links:
            raise ValueError(f"{op}: path: got no folders, wanted a full export and its deltas, in order.")
    if links[0].manifest["kind"] == "delta":
        raise ValueError(f'{op}: path: got the delta "{links[0].folder}" first, wanted the full export it rests on.')
    for before, link in itertools.pairwise(links):
        _check_link(op, link, before.manifest["uuid"], f'"{before.folder}"')
    return links


def _check_link(op: str, link: Source, uuid: str, before: str) -> None:
    manifest = link.manifest
    if manifest["kind"] != "delta":
        raise ValueError(
            f'{op}: path: got "{link.folder}", a {manifest["kind"]} export, wanted a delta after {before}.'
        )
    if manifest["base"] != uuid:
        raise ValueError(
            f'{op}: path: got the delta "{link.folder}", which rests on {manifest["base"]} '
            f'("{manifest["base_path"]}"), after {before}, which is {uuid}; apply deltas in '
            "order, and none of them twice."
        )


def _gone(op: str, collection: Collection, state: State, chain: Sequence[Source], table: str) -> np.ndarray:
    """The keys that a chain has and a table has not: uint64, ascending."""
    gone = np.zeros(0, np.uint64)
    for source in chain:
        with processes.together(op):
            tombstones = list(key_batches(source.files(table, manifest_lib.TOMBSTONES)))
        if tombstones:
            gone = np.setdiff1d(gone, np.concatenate(tombstones))
        absent = [
            keys[~found] for keys, found in _looked_for(op, collection, state, table, key_batches(source.files(table)))
        ]
        gone = np.union1d(gone, np.concatenate(absent)) if absent else gone
    return gone


def _looked_for(
    op: str, collection: Collection, state: State, table: str, batches: Iterator[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys, and which of them have a row; few at a time. All processes read the same."""
    for batch in processes.in_step(op, batches):
        for start in range(0, batch.size, KEYS_AT_A_TIME):
            keys = batch[start : start + KEYS_AT_A_TIME]
            size = 1 << (keys.size - 1).bit_length()  # few sizes, few programs
            padded = np.full(size, np.uint64(2**64 - 1))
            padded[: keys.size] = keys
            yield keys, np.asarray(collection.contains(state, table, padded))[: keys.size]


# Applying ------------------------------------------------------------------------------------------------------------


def _apply(
    source: Source,
    collection: Collection,
    held: restore_lib.Held,
    tables: Sequence[str] | None,
    optimizer_state: OptimizerState,
    *,
    is_whole: bool,
    now: int | None,
) -> None:
    """Brings a state forward by a delta whose place in the chain was checked."""
    with processes.together(source.op):
        names = restore_lib.chosen_tables(source, collection, tables)
        taken = restore_lib.check_forms(source, collection, names, optimizer_state)
    # What goes makes room for what comes: a table that evicts may be full at both ends of a delta.
    more = {name: _more_rows(source, collection, held.state, name) for name in names}
    held.state = restore_lib.with_room(source, collection, held.state, more)
    for name in names:
        for keys in processes.in_step(source.op, key_batches(source.files(name, manifest_lib.TOMBSTONES))):
            for start in range(0, keys.size, KEYS_AT_A_TIME):
                held.state, _ = collection.erase(held.state, name, keys[start : start + KEYS_AT_A_TIME])
    for name in names:
        restore_lib.place(source, collection, held, name, taken[name], now)
    restore_lib.add_small_parts(source, collection, held, names, is_whole=is_whole, optimizer_state=optimizer_state)


def _more_rows(source: Source, collection: Collection, state: State, table: str) -> np.ndarray:
    """Rows that a delta adds to each shard, less those that it takes away: int64[num_shards]."""
    s, number = collection._locate(source.op, table)
    spec = collection.stores[s]
    counts = np.zeros(spec.num_shards, np.int64)
    for keys, found in _looked_for(source.op, collection, state, table, key_batches(source.files(table))):
        counts += restore_lib.keys_by_shard(collection, spec, spec.tables[number], keys[~found])
    tombstones = key_batches(source.files(table, manifest_lib.TOMBSTONES))
    for keys, found in _looked_for(source.op, collection, state, table, tombstones):
        counts -= restore_lib.keys_by_shard(collection, spec, spec.tables[number], keys[found])
    return counts


# Writing -------------------------------------------------------------------------------------------------------------


def _export(
    op: str,
    path: Path,
    saving_of: Callable[[dict[str, np.ndarray]], Saving],
    tombstones_of: Callable[[], dict[str, np.ndarray]] = dict,
) -> Exported:
    """Writes into a folder of another name, and gives it its own when all of it is on the disk.

    What fails in one process fails in all of them, and what was written goes.
    """
    final = pathlib.Path(path)
    folder = final.with_name(f"{final.name}.writing")
    is_first = jax.process_index() == 0
    with processes.together(op):
        if final.exists():
            raise FileExistsError(f'{op}: path: got "{final}", which exists, wanted a new one.')
    try:
        with processes.together(op):
            if is_first:
                shutil.rmtree(folder, ignore_errors=True)  # of an export that did not end
                folder.mkdir(parents=True)
        tombstones = tombstones_of()
        with processes.together(op):
            saving = saving_of(tombstones)
            saved_now(saving, folder)
        # Of all processes, so that all of them refuse.
        latest = 2**32 - processes.least(2**32 - saving.latest)
        if latest > saving.part["clock"]:
            raise ValueError(
                f"{op}: clock: got {saving.part['clock']}, wanted {latest} or later, the latest last step of a row: "
                "lookups were told another clock; pass clock= to all of lookup, assign, import_table and "
                "exports, or to none."
            )
        with processes.together(op):
            if is_first:
                manifest_lib.join_parts(op, folder)
                _sync(folder)
                folder.rename(final)
                _sync(final.absolute().parent)
    except Exception:
        # All processes are here: nobody writes into it any more.
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    manifest = manifest_lib.read(op, final)
    return Exported(
        path=final,
        uuid=manifest["uuid"],
        kind=manifest["kind"],
        step=manifest["step"],
        clock=manifest["clock"],
        num_rows={name: table["num_rows"] for name, table in manifest["tables"].items()},
        num_tombstones={
            name: sum(file["num_rows"] for file in table[manifest_lib.TOMBSTONES])
            for name, table in manifest["tables"].items()
        },
        report=saving.report,
    )


def _sync(folder: pathlib.Path) -> None:
    """Has the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
