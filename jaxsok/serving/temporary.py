"""Temporary folders that go with their process, or, if that was killed, when a later one makes one of the kind."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time

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
        self._lock = os.open(self.name, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_left(prefix: str) -> None:
    """Removes the folders of a prefix that no process has locked."""
    for entry in os.scandir(tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # it is locked, or gone
            status = entry.stat(follow_symlinks=False)
            is_own = entry.is_dir(follow_symlinks=False) and status.st_uid == os.getuid()
            if (
                not is_own
                or time.time() - status.st_ctime < _YOUNG_S
                or not re.fullmatch(f"{prefix}.{{8}}", entry.name)
            ):
                continue
            folder = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(folder)
