"""A lock for many readers or one writer."""

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Admits many readers, or one writer; a waiting writer comes before later readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Under `_changed`: no thread reads while `_is_writing`, and no reader enters while writers wait.
        self._readers, self._writers, self._is_writing = 0, 0, False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writers += 1
            try:
                self._changed.wait_for(lambda: not self._readers and not self._is_writing)
            except BaseException:  # Ctrl-C: readers must not wait for this writer
                self._writers -= 1
                self._changed.notify_all()
                raise
            self._is_writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writers, self._is_writing = self._writers - 1, False
                self._changed.notify_all()
