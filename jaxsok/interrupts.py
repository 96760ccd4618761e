"""Ctrl-C, held back where it would lose a state: between a call that donates it and the assignment of its result."""

# As `signal`, without the conversions to enumerations, which took most of the time of a block.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Kept = TypeVar("Kept")

_SIGNALS = signal.SIGINT, signal.SIGTERM  # whose handlers usually raise


class _Holder:
    """A handler that keeps one signal for later, in place of other handlers."""

    def __init__(self, handlers: Mapping[int, Callable[..., Any]]) -> None:
        self.handlers, self.is_over = handlers, False
        self._held: list[tuple[int, Any]] = []

    def __call__(self, number: int, frame: Any) -> None:
        self._held.append((number, frame))
        if self.is_over or len(self._held) > 1:
            self.deliver()

    def deliver(self) -> None:
        """Calls the handlers of all signals that were held, in order; later signals pass."""
        self.is_over = True
        while self._held:
            number, frame = self._held.pop(0)
            self.handlers[number](number, frame)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends, and SIGTERM where it has a handler.

    Python acts on signals in the main thread, also when a call into C++ returns: its result would be lost. A second
    signal comes at once, because the block may never end; the state is then lost. Blocks within others do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {
        number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))
    }
    is_within = any(isinstance(handler, _Holder) and not handler.is_over for handler in handlers.values())
    if not handlers or is_within:
        yield
        return
    holder = _Holder(handlers)
    try:
        for number in handlers:
            _signal.signal(number, holder)
        yield
    finally:
        holder.is_over = True  # if a signal comes between these lines and a holder stays, signals pass through it
        for number, handler in handlers.items():
            if _signal.getsignal(number) is holder:  # else a handler that was called has set another one
                _signal.signal(number, handler)
        holder.deliver()


@dataclasses.dataclass
class Held(Generic[Kept]):
    """The state that call after call donates; if a call fails, it holds the last whole one."""

    state: Kept

    def change(self, change: Callable[[Kept], Kept]) -> None:
        """Calls what takes the state over, and keeps its result; Ctrl-C cannot come between the two."""
        with held_back():
            self.state = change(self.state)

    @contextlib.contextmanager
    def kept_on_errors(self, note: str) -> Iterator[None]:
        """Surrounds such calls: what is raised gets the last whole state as its `state`, unless that is the given one.

        `note` says what happened to the state.
        """
        given = self.state
        try:
            yield
        except BaseException as error:  # Ctrl-C too must not lose a state that was donated
            if self.state is not given:
                error.add_note(f"{note} What there is now is the `state` attribute of this error.")
                error.state = self.state  # pyright: ignore[reportAttributeAccessIssue]
            raise
