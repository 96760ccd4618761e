"""Publishes files and folders as a whole: they are written under a name of the writer's own, then renamed.

Several processes, of one host or of several, may write to one path at the same time: one of them succeeds, and the
others get an error. Readers never look at the names that a dead writer leaves.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

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
    sync(path.absolute().parent)


@contextlib.contextmanager
def new_folder(op: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to fill, and publishes it; FileExistsError: the path is taken. After an error nothing is left."""
    if os.path.lexists(path):
        raise FileExistsError(f"{op}: path: got {path}, which exists, wanted a new folder.")
    folder = unfinished_path(path, secrets.token_hex(8))
    try:
        folder.mkdir(parents=True)
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        publish(op, folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to the disk, where the file system allows it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # the folder is write-only
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


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
