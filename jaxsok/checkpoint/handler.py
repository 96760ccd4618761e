"""The Orbax handler: tables as an item of a checkpoint, with dense parameters or alone.

Orbax makes the folder, waits for all processes and commits; save.py writes the files and restore.py reads them.
`async_save` returns as soon as the state is on the host; a thread writes the files.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxsok import checks, processes, published

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    wanted = "for checkpoints; pip install 'jaxsok[checkpoint]'"
    raise checks.import_error("jaxsok.checkpoint: orbax-checkpoint", error, wanted) from error

from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.restore import restore
from jaxsok.checkpoint.save import HOST_BYTES, PIECE_BYTES, SaveOptions, SaveReport, Saving
from jaxsok.checkpoint.saved import OptimizerState, Source
from jaxsok.collection import Collection
from jaxsok.operations import check_placed
from jaxsok.store import State

SAVE, RESTORE = "TablesSave", "TablesRestore"
PATIENCE_S = 600  # for Orbax to make the folder


class TablesCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores tables; Orbax finds it by the arguments, `TablesSave` and `TablesRestore`. All processes call.

    Example:
      `ocp.AsyncCheckpointer(TablesCheckpointHandler()).save(path, args=TablesSave(collection, state))`
    """

    def __init__(self) -> None:
        self.report: SaveReport | None = None

    async def async_save(self, directory: Any, args: "TablesSave") -> list[Any]:
        """Copies the state to the host and returns; files are written later."""
        with processes.fail_together(SAVE):
            saving = args.make_saving()
            self.report = args.report
        copied = processes.Vote(SAVE)
        votes = processes.Vote(SAVE), processes.Vote(SAVE)  # of the files, and of the manifest
        try:
            # The folder may be on its way: a commit future waits for it, in its thread, and then writes.
            writing, began = _write(saving, directory, votes), time.monotonic()
            commit = ocp.future.CommitFutureAwaitingContractedSignals(writing, name="jaxsok_tables")

            def is_alive() -> None:
                try:
                    commit.result(timeout=0.001)
                except TimeoutError:
                    if time.monotonic() - began > PATIENCE_S:
                        raise

            # Not on the loop's thread: other items are copied at the same time.
            await asyncio.to_thread(saving.feed, is_alive)
            copied.report(None)
            # Here, and not in a thread: Orbax goes on to a barrier, which a process that raised does not reach.
            await asyncio.to_thread(copied.wait)
        except BaseException as error:
            copied.report(error)
            votes[0].report(error)
            saving.stop(error)
            raise
        return [commit]

    def save(self, directory: Any, args: "TablesSave") -> None:
        with processes.fail_together(SAVE):
            saving = args.make_saving()
            self.report = args.report
            with published.naming(directory):
                saving.begin(directory).result()
        with processes.fail_together(SAVE):
            _join(directory)

    def restore(self, directory: Any, args: "TablesRestore | None" = None) -> State:
        """Restores a state of the arguments' collection."""
        if not isinstance(args, TablesRestore):
            raise TypeError(
                f"{RESTORE}: args: got {args!r}, wanted TablesRestore(collection): a collection says where rows go."
            )
        with processes.fail_together(RESTORE):
            source = Source.of(RESTORE, directory)
        return restore([source], args.collection, args.state, args.tables, args.optimizer_state, args.clock)

    def metadata(self, directory: Any) -> dict[str, Any]:
        """Returns the manifest without the lists of files."""
        manifest = manifest_lib.read(RESTORE, directory)
        kept = ("form", "num_rows", "num_nonfinite", "num_evicted")
        tables = {name: {field: table[field] for field in kept} for name, table in manifest["tables"].items()}
        return {**{name: manifest[name] for name in ("step", "clock", "uuid", "mesh", "kind")}, "tables": tables}


async def _write(saving: Saving, directory: Any, votes: tuple[processes.Vote, processes.Vote]) -> None:
    """Writes, and waits for all processes: Orbax would wait for those that failed until its timeout."""
    for vote, write in zip(votes, (saving.write, _join), strict=True):
        try:
            with published.naming(directory):
                write(directory)
        except BaseException as error:
            vote.report(error)
            raise
        vote.report(None)
        # The future has a thread and an event loop of its own: nothing else waits for it.
        vote.wait()


def _join(directory: Any) -> None:
    if jax.process_index() == 0:
        manifest_lib.join_parts(SAVE, directory)


@ocp.args.register_with_handler(TablesCheckpointHandler, for_save=True)
@dataclasses.dataclass
class TablesSave(ocp.args.CheckpointArgs):
    """The arguments of a save, for `CheckpointManager.save` and the like, alone or in `ocp.args.Composite`.

    The options are those of `SaveOptions`. When `save` has returned, the state may be donated; `report.pause_s` says
    how long that took. What does not fit into `host_bytes` is written before `save` returns.

    Example:
      `manager.save(step, args=ocp.args.Composite(tables=TablesSave(collection, state), params=...))`
    """

    collection: Collection
    state: State
    _: dataclasses.KW_ONLY
    compression: str = "none"
    host_bytes: int = HOST_BYTES
    piece_bytes: int = PIECE_BYTES
    clock: int | None = None
    """The time, where lookups have a clock; None: the state's step."""
    report: SaveReport | None = dataclasses.field(default=None, init=False)
    """The result of the save; `total_s` and `file_bytes` once it has ended."""

    def __post_init__(self) -> None:
        """Refuses what cannot be saved. Once `save` has begun, a thread of Orbax would keep the process from ending."""
        if jax.process_count() == 1:  # several processes raise together, in the save
            self._check()

    def _check(self) -> SaveOptions:
        if not isinstance(self.collection, Collection):
            raise TypeError(f"{SAVE}: collection: got {type(self.collection).__name__}, wanted a jaxsok.Collection.")
        options = SaveOptions(self.compression, self.host_bytes, self.piece_bytes)
        options.check(SAVE)
        check_placed(SAVE, self.collection, self.state)
        return options

    def make_saving(self) -> Saving:
        """Makes the save of these arguments; for the handler."""
        saving = Saving(SAVE, self.collection, self.state, self._check(), clock=self.clock)
        self.report = saving.report
        return saving


@ocp.args.register_with_handler(TablesCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class TablesRestore(ocp.args.CheckpointArgs):
    """The arguments of a restore.

    Example:
      `state = manager.restore(step, args=ocp.args.Composite(tables=TablesRestore(collection)))["tables"]`
    """

    collection: Collection
    """Its mesh, capacities, grouping into stores and row dtypes may differ from those of the save."""
    _: dataclasses.KW_ONLY
    state: State | None = None
    """Donated, and keeps its seed and step; None: a new one, with those of the save."""
    tables: Sequence[str] | None = None
    """Names; None: all, and the checkpoint must have no others."""
    optimizer_state: OptimizerState = "require"
    """"require": as it was saved, refused if the optimizer is of another form; "matching": what has equal name and dim,
    the rest initial; "initial": none of it."""
    clock: int | None = None
    """The current clock of a given state whose lookups have one; None: its step. Entering rows count as used then."""
