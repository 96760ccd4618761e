"""Ctrl-C, held back where it would lose a state: between a call that donates it and the assignment of its result."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_SIGNALS = signal.SIGINT, signal.SIGTERM  # whose handlers usually raise


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends, and SIGTERM where it has a handler; the second of them comes at once.

    Python acts on signals in the main thread, also when a call into C++ returns: its result would be lost. Who presses
    Ctrl-C again may wait for a block that does not end.
    """
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return
    held: list[Any] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(held) == 1:
            handlers[held[0][0]](*held[0])
