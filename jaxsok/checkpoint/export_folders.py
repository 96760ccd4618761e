"""Exports: a folder of saved tables without Orbax, in full or with what changed since another.

A delta has every row whose last step is that of its base or later, whole, and the keys that are gone: those that the
base and what it rests on have, and the tables have not.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence

import jax

from jaxsok import processes, published
from jaxsok.checkpoint import lineage as lineage_lib, manifest as manifest_lib
from jaxsok.checkpoint.chain import Path, chain_of, find_gone_keys
from jaxsok.checkpoint.files import LOG
from jaxsok.checkpoint.keys_by_row import KeysByRow
from jaxsok.checkpoint.save import HOST_BYTES, PIECE_BYTES, SaveOptions, SaveReport, Saving, time_of
from jaxsok.checkpoint.saved import Source, check_forms
from jaxsok.collection import Collection
from jaxsok.operations import check_placed
from jaxsok.store import State


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: pathlib.Path
    uuid: str
    kind: str
    """"full" or "delta"."""
    step: int
    clock: int
    """The step, or the caller's time: a delta on top of this has what changed then and later."""
    num_rows: dict[str, int]
    num_tombstones: dict[str, int]
    report: SaveReport
    keys: KeysByRow | None = dataclasses.field(default=None, repr=False)
    """The keys of all rows, if they were to be kept."""


def export_full(
    path: Path,
    collection: Collection,
    state: State,
    *,
    clock: int | None = None,
    compression: str = "none",
    host_bytes: int = HOST_BYTES,
    piece_bytes: int = PIECE_BYTES,
    keeps_keys: bool = False,
) -> Exported:
    """Writes all tables into a new folder, which is there as a whole or not at all.

    All processes call, with the same `path` on a file system that they share. The state must not be donated before this
    returns. `clock` is the time, where lookups have a clock; None: the state's step. `compression` is "none", "lz4" or
    "zstd"; `host_bytes` the host memory that a process may take; `piece_bytes` are copied from the device at a time.
    With `keeps_keys` the result has the keys of all rows, 9 bytes of host memory each, for a delta that rests on it.

    Raises:
      FileExistsError: the path is taken, or another process took it while this one wrote.
      FileNotFoundError: processes of this job have different paths, or share no file system.
      ValueError: a row has a later last step than `clock`: lookups had another one.

    Cost:
      Every row in use goes to the host and to the files once.

    Example:
      >>> import tempfile
      >>> import jaxsok, numpy as np
      >>> from jaxsok import checkpoint
      >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("item", table="item")])
      >>> batch = collection.batch({"item": np.array([7, 9, 7])})
      >>> _, state, _ = collection.lookup(collection.init(seed=0), batch.features)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     exported = export_full(f"{folder}/monday", collection, state)
      ...     again = checkpoint.load(f"{folder}/monday", collection)
      >>> exported.num_rows, collection.num_rows(again)
      ({'item': 2}, {'item': 2})
    """
    options = SaveOptions(compression, host_bytes, piece_bytes)
    return _begin_export("export_full", path, collection, state, None, options, clock, keeps_keys=keeps_keys)()


def export_delta(
    path: Path,
    collection: Collection,
    state: State,
    base: Path | Sequence[Path] | Exported,
    *,
    clock: int | None = None,
    compression: str = "none",
    host_bytes: int = HOST_BYTES,
    piece_bytes: int = PIECE_BYTES,
    keeps_keys: bool = False,
) -> Exported:
    """Writes the changes since another export: rows whose last step is the base's or later, and keys that left.

    Applied to what the base holds, it gives the tables as they are: rows, optimizer state, statistics. Call it where a
    step has ended: an update after the export, by a plan of an earlier step, is not seen. All tables keep statistics
    (`TableSpec.statistics`). `base` is a folder of an export, or the tables' folder of a checkpoint; what it rests on
    lies next to it, else give all links in order. Or it is what an export has returned: with `keeps_keys` that spares
    this one reading the chain. The other arguments are those of `export_full`.

    Raises:
      FileExistsError, FileNotFoundError: as `export_full`.
      ValueError: as `export_full`; or a table keeps no statistics, or the base is of other tables, of a later time, or
        of a state that this one did not come from (it was lost, and this one was restored from before the base).
      CorruptFileError: the base is damaged.

    Cost:
      A bit of each row, and the rows that changed, go to the host. If a row went since the base, or the state was
      restored since, all files of the chain are read, and their keys looked for in the tables; with a base that has
      kept its keys, of the same tables in the same order, in a single process, these go to the device, 9 bytes of each
      row, and only the keys that left their rows are looked for. On a GPU the rows go to pinned memory, which JAX keeps
      for later ones.

    Example:
      `export_delta("tuesday", collection, state, base="monday")`, then `load(["monday", "tuesday"], collection)`
    """
    options, op = SaveOptions(compression, host_bytes, piece_bytes), "export_delta"
    _require_base(op, base)
    return _begin_export(op, path, collection, state, base, options, clock, keeps_keys=keeps_keys)()


def begin_export_delta(
    path: Path,
    collection: Collection,
    state: State,
    base: Path | Sequence[Path] | Exported,
    *,
    clock: int | None = None,
    compression: str = "none",
    host_bytes: int = HOST_BYTES,
    piece_bytes: int = PIECE_BYTES,
    keeps_keys: bool = False,
) -> "concurrent.futures.Future[Exported]":
    """Does `export_delta` in a single process, and returns as soon as the state may be donated.

    By then the rows that changed are on the host; a thread writes their files, and the future has what `export_delta`
    returns or raises. Python's end waits for the thread. The next delta takes the result as its base, so at most one is
    under way.

    Raises:
      ValueError: there are several processes, whose threads could not agree on errors. And what `export_delta` raises
        before it writes.

    Cost:
      The caller waits for the copy of the rows to the host, or, where they have more than `host_bytes`, for files too.

    Example:
      `tuesday = begin_export_delta("tuesday", collection, state, base)`, then steps, then `base = tuesday.result()`
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"begin_export_delta: got {jax.process_count()} processes, wanted one; call export_delta, which waits for "
            "the files of all."
        )
    options = SaveOptions(compression, host_bytes, piece_bytes)
    op = "begin_export_delta"
    _require_base(op, base)
    begun: concurrent.futures.Future[Callable[[], Exported]] = concurrent.futures.Future()
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(1, "jaxsok.export")
        stack.callback(pool.shutdown, wait=False)
        exported = pool.submit(lambda: begun.result()())  # first of all: the system may have no thread for it
        stack.callback(begun.cancel)  # unless it has a result
        begun.set_result(_begin_export(op, path, collection, state, base, options, clock, keeps_keys=keeps_keys))
    return exported


def _require_base(op: str, base: object) -> None:
    if base is None:
        raise TypeError(
            f"{op}: base: got None, wanted a folder, or what an export returned; export_full begins a chain."
        )


def _open_base(
    op: str,
    collection: Collection,
    state: State,
    base: Path | Sequence[Path] | Exported,
    clock: int | None,
    *,
    has_keys: bool,
) -> list[Source]:
    """Opens the chain that a delta rests on, or, if the base has its keys, only its last link.

    Refuses what is not a base of this state.
    """
    folder = base.path if isinstance(base, Exported) else base
    chain = [Source.of(op, folder, "base")] if has_keys else chain_of(op, folder, "base")
    last = chain[-1].manifest
    if isinstance(base, Exported) and last["uuid"] != base.uuid:
        raise ValueError(
            f'{op}: base: got the export {base.uuid}, whose folder "{base.path}" has {last["uuid"]} by now, wanted '
            "the folder as it was written; pass the path of the export that the delta is to rest on."
        )
    for source in chain:
        check_forms(source, collection, None, "require")
    now = time_of(op, state, clock)
    if now < last["clock"]:
        raise ValueError(
            f'{op}: base: got "{chain[-1].folder}" of time {last["clock"]}, wanted one of {now} or earlier: the '
            "state is older than it, or lookups have a clock, which exports take too: pass clock=."
        )
    lineage_lib.check(op, collection, state, chain[-1].folder, last)
    return chain


def _begin_export(
    op: str,
    path: Path,
    collection: Collection,
    state: State,
    base: Path | Sequence[Path] | Exported | None,
    options: SaveOptions,
    clock: int | None,
    *,
    keeps_keys: bool,
) -> Callable[[], Exported]:
    """Begins to write, with a base a delta on it, under another name; fails in all processes if in one.

    Returns once the rows are on the host, with a function that waits for the files and gives them their name.
    """
    for spec in () if base is None else collection.stores:
        if not spec.keeps_statistics:
            raise ValueError(
                f'{op}: table "{spec.tables[0].name}": statistics: got False, wanted True: what changed follows from '
                "the last step of each row; declare TableSpec(statistics=True)."
            )
    check_placed(op, collection, state)
    final, chain, rests_on = pathlib.Path(os.path.abspath(path)), [], None  # a writer may go on after os.chdir
    # Processes have rows of their own, and all of them must look for the same keys.
    kept = base.keys if isinstance(base, Exported) and jax.process_count() == 1 else None
    if base is not None:
        with processes.fail_together(op):
            chain = _open_base(op, collection, state, base, clock, has_keys=kept is not None)
        last, base_path = chain[-1].manifest, os.path.relpath(chain[-1].folder.resolve(), final.parent.resolve())
        if any("\ud800" <= letter <= "\udfff" for letter in base_path):  # what Python makes of other bytes
            raise ValueError(f"{op}: base: got a folder at {base_path!r}, wanted a path in UTF-8: files name it.")
        rests_on = {"base": last["uuid"], "base_path": base_path, "since": last["clock"]}
    # Each process writes the rows of its own shards.
    processes.require_same(op, [f"clock: {clock}", f"bases: {[source.manifest['uuid'] for source in chain]}"])
    token = processes.draw_words(op, is_shared=True).tobytes().hex()  # the processes of a job write into one folder
    folder, saving = published.unfinished_path(final, token), None
    try:
        with processes.fail_together(op):
            # The first one alone: another host's network file system would remember that there is no such name.
            if jax.process_index() == 0:
                if os.path.lexists(final):
                    raise FileExistsError(f'{op}: path: got "{final}", which exists, wanted a new one.')
                if others := published.list_unfinished(final):
                    text = '%s: path: next to "%s" are %s: of exports that are being written, or of processes that '
                    LOG.warning(text + "died; remove those that no process writes.", op, final, others)
                folder.mkdir(parents=True)
            moved = kept.compare(collection, state) if kept else None
            if isinstance(base, Exported) and kept and moved is None:  # of other tables, or the state was restored
                chain = chain_of(op, base.path, "base")
            keys = KeysByRow.of(collection, state) if keeps_keys and moved is None else None
        if kept and moved is not None:
            gone = kept.find_gone(op, collection, state, moved)
        else:
            gone = {table.name: find_gone_keys(op, collection, state, chain, table.name) for table in collection.tables}
        with processes.fail_together(op):
            if not folder.is_dir():
                raise manifest_lib.unshared_error(op, final, jax.process_index(), 0)
            kind = "delta" if chain else "full"
            saving = Saving(op, collection, state, options, kind, clock=clock, rests_on=rests_on, tombstones=gone)
            written = saving.begin(folder)
            if jax.process_count() > 1:  # if one of them fails, the others have ended when the folder is removed
                concurrent.futures.wait([written])
    except BaseException as error:
        _abandon(folder, saving, error)
        raise
    # Most rows keep their keys; to copy them takes a while, which the caller need not wait for.
    keys_later = functools.partial(kept.after, moved) if keeps_keys and kept and moved is not None else lambda: keys
    return functools.partial(_finish, saving, written, folder, final, keys_later)


def _finish(
    saving: Saving,
    written: "concurrent.futures.Future[None]",
    folder: pathlib.Path,
    final: pathlib.Path,
    keys: Callable[[], KeysByRow | None],
) -> Exported:
    op = saving.op
    try:
        with processes.fail_together(op), published.naming(final):
            written.result()
        # The latest step of all processes, so that all of them refuse.
        latest = processes.greatest(op, saving.latest)
        if latest > saving.part["clock"]:
            raise ValueError(
                f"{op}: clock: got {saving.part['clock']}, wanted {latest} or later, the latest last step of a row: "
                "lookups got another clock, or rows were imported with later last steps; pass clock= to all of lookup, "
                "assign, import_table and exports, or to none, and import rows of a longer training without last_step."
            )
        with processes.fail_together(op), published.naming(final):
            kept = keys()
            if jax.process_index() == 0:
                manifest_lib.join_parts(op, folder)
                published.publish(op, folder, final)
    except BaseException as error:
        _abandon(folder, saving, error)
        raise
    with published.noting_complete(op, final):
        manifest = manifest_lib.read(op, final)
    facts = {name: manifest[name] for name in ("uuid", "kind", "step", "clock")}
    num_rows = {name: table["num_rows"] for name, table in manifest["tables"].items()}
    tombstones = {name: table[manifest_lib.TOMBSTONES] for name, table in manifest["tables"].items()}
    num_tombstones = {name: sum(file["num_rows"] for file in files) for name, files in tombstones.items()}
    counts = {"num_rows": num_rows, "num_tombstones": num_tombstones}
    return Exported(final, **facts, **counts, report=saving.report, keys=kept)


def _abandon(folder: pathlib.Path, saving: Saving | None, error: BaseException) -> None:
    """Ends an export and removes its folder; after Ctrl-C in one of several processes others may still write there."""
    if saving is not None:
        saving.stop(error)
    if jax.process_index() == 0 and (isinstance(error, Exception) or jax.process_count() == 1):
        published.remove(folder)
