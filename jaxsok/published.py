"""Publishes files and folders as a whole: they are written under a name of the writer's own, then renamed.

Several processes, of one host or of several, may write to one path at the same time: one of them succeeds, and the
others get an error. Readers never look at the names that a dead writer leaves.
"""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import IO

_log = logging.getLogger(__name__)
_OF_DISKS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS

ENDING = ".writing"
"""Ends the names of unpublished folders."""


def unfinished_path(path: pathlib.Path, token: str) -> pathlib.Path:
    """Returns the name under which the writer with this token fills a folder: "monday.0badcafe.writing"."""
    return path.with_name(f"{path.name}.{token}{ENDING}")


def list_unfinished(path: pathlib.Path) -> list[str]:
    """Lists folders begun for a path and not published: their writers still write, or died."""
    begin = f"{path.name}."
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(path.name for path in there if path.name.startswith(begin) and path.name.endswith(ENDING))


def publish(op: str, folder: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a complete, nonempty folder within its parent; FileExistsError: another writer was faster."""
    sync(folder)
    mine = folder.stat()
    try:
        # Atomic, also on a network file system; it fails if the target is a nonempty folder (POSIX, rename).
        os.rename(folder, path)
    except OSError as error:
        # A network file system may report an error after success: the reply was lost, and the request was repeated.
        if not path.exists() or not os.path.samestat(mine, path.stat()):
            if os.path.lexists(path):
                raise FileExistsError(
                    f'{op}: path: got "{path}", which another process has written in the meantime, wanted a new one; '
                    "what was written here is removed."
                ) from error
            raise
    with noting_complete(op, path):
        sync(path.absolute().parent)


@contextlib.contextmanager
def noting_complete(op: str, path: pathlib.Path) -> Iterator[None]:
    """Notes in an error that what it interrupts has its name already."""
    try:
        yield
    except BaseException as error:
        error.add_note(f'{op}: "{path}" is complete, and stays; remove it before you write it again.')
        raise


def remove(folder: pathlib.Path) -> None:
    """Removes a folder that is not published; a warning says if the system does not let it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _log.warning('"%s": of a writer that failed; it was not removed whole: remove it.', folder)


def require_new(op: str, path: str | os.PathLike[str]) -> None:
    """Refuses a path that is taken (FileExistsError)."""
    if os.path.lexists(path):
        raise FileExistsError(f"{op}: path: got {path}, which exists, wanted a new folder.")


@contextlib.contextmanager
def new_folder(op: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to fill, and publishes it; FileExistsError: the path is taken. After an error nothing is left."""
    require_new(op, path)
    folder = unfinished_path(path, secrets.token_hex(8))
    try:
        folder.mkdir(parents=True)
        with naming(path):
            yield folder
            for file in folder.iterdir():
                with file.open("rb") as written:
                    to_disk(written.fileno())
            publish(op, folder, path)
    except BaseException:
        remove(folder)
        raise


def sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to the disk, where the file system allows it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # the folder is write-only
    try:
        to_disk(descriptor)
    finally:
        os.close(descriptor)


def to_disk(descriptor: int) -> None:
    """Waits until a file or folder is on the disk, where the file system can tell; an error means that it is lost."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Names what is being written in errors of the system, which do not: a full disk is met in an open file."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_DISKS and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def lock_folder(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder's lock, where its file system locks folders (NFS does not)."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def place_new(partial: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a complete file its name; FileExistsError: the name is taken."""
    try:
        os.link(partial, path)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(partial, path)
    else:
        partial.unlink()


@contextlib.contextmanager
def partial_files(
    op: str, paths: Sequence[pathlib.Path], *, overwrite: bool, stale: Callable[[], Sequence[pathlib.Path]] = tuple
) -> Iterator[list[IO[bytes]]]:
    """Opens the files of one export as `<name>.<random>.partial`, and renames them once all are complete.

    A reader needs the first file, so it is removed first and appears last: there is the old export, the new one, or
    none. If a new file cannot get its name then, the partial files stay, and a note of the error names them. Existing
    files are refused unless they may go; `stale` finds other files of the export, now and at the end.
    """

    def find_stale() -> list[pathlib.Path]:
        return [path for path in stale() if path not in paths]

    refuse_existing(op, [*paths, *find_stale()], overwrite)
    # Two writers of one name must not write into one file.
    end = f".{secrets.token_hex(4)}.partial"
    partials = [path.with_name(path.name + end) for path in paths]
    try:
        with naming(paths[0]), contextlib.ExitStack() as stack:
            paths[0].parent.mkdir(parents=True, exist_ok=True)  # of all of them
            opened = [stack.enter_context(open(partial, "x+b")) for partial in partials]
            yield opened
            for file in opened:
                file.flush()
                to_disk(file.fileno())
        refuse_existing(op, [*paths, *find_stale()], overwrite)
    except BaseException:
        _remove(partials)
        raise
    placed: list[pathlib.Path] = []
    with lock_folder(paths[0].parent):
        try:
            refuse_existing(op, [*paths, *find_stale()], overwrite)
            others = find_stale() if overwrite else []  # while the first file can be asked whose they are
            if overwrite and (paths[1:] or others):
                paths[0].unlink(missing_ok=True)
                sync(paths[0].parent)
                _remove(others)
            for partial, path in zip([*partials[1:], partials[0]], [*paths[1:], paths[0]], strict=True):
                (os.replace if overwrite else place_new)(partial, path)
                placed.append(path)
            sync(paths[0].parent)
        except FileExistsError:  # another writer was faster: one of the two succeeds with all files
            _remove([*placed, *partials])
            refuse_existing(op, paths, overwrite)
            raise
        except BaseException as failure:
            kept = [str(partial) for partial in partials if partial.exists()]
            failure.add_note(f"{op}: the new files are complete; those without their names yet stay: {kept}.")
            raise


def _remove(paths: Sequence[pathlib.Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def refuse_existing(op: str, paths: Sequence[pathlib.Path], overwrite: bool) -> None:
    """Refuses paths that are taken, unless they may go, and can."""
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise FileExistsError(f"{op}: {there[0]}: is there already; pass overwrite=True, or another place.")
    for path in filter(os.path.lexists, paths):
        if path.is_dir():
            raise IsADirectoryError(f"{op}: {path}: got a folder, wanted a file, or none.")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(f"{op}: {path}: may not be replaced: its folder is read-only.")
