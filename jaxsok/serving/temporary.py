"""Temporary folders that go with their process, or, if that was killed, when a later one makes one of the kind."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref

_YOUNG_S = 60.0  # such a folder may have no lock yet


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A folder in the system's temporary folder, locked by its process; `kind` is in its name.

    First it removes what killed processes of this user have left of the kind, but for the last minute. Where the file
    system locks no folders (NFS), that stays.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"jaxsok-{kind}-"
        _remove_left(prefix)
        super().__init__(prefix=prefix)
        lock = os.open(self.name, os.O_RDONLY)
        weakref.finalize(self, os.close, lock)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)


def _remove_left(prefix: str) -> None:
    """Removes the folders of a prefix that no process has locked."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:  # it may not be readable
        for entry in entries:
            with contextlib.suppress(OSError):  # it is locked, or gone
                status = entry.stat(follow_symlinks=False)
                is_own = entry.is_dir(follow_symlinks=False) and status.st_uid == os.getuid()
                is_old = time.time() - status.st_ctime >= _YOUNG_S
                if is_own and is_old and re.fullmatch(f"{prefix}.{{8}}", entry.name):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)
