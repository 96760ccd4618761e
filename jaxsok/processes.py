"""Agreement between processes, before any of them acts. One process agrees with itself at no cost."""

import collections
import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

POLL_S = 5
LATE_POLLS = 12  # after which the log names the process that one waits for
END_POLLS = 12  # for which a process that has failed waits for the others to come as far
KEPT_VOTES = 64
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


def require_same(op: str, lines: Sequence[str]) -> None:
    """Raises ValueError in every process if `lines` differ, addresses of objects aside; costs milliseconds."""
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))
    texts = [other.split("\n") for other in gather(op, text)]
    for process, other in enumerate(texts):
        if other == texts[0]:
            continue
        pairs = zip([*texts[0], "(nothing)"], [*other, "(nothing)"], strict=False)
        first, second = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{op}: got {second!r} in process {process} and {first!r} in process 0, wanted the same in all "
            f"{len(texts)} processes; give the same everywhere."
        )


def least(op: str, value: int) -> int:
    """Returns the least of all processes' values."""
    return min(map(int, gather(op, str(value))))


def greatest(op: str, value: int) -> int:
    """Returns the greatest of all processes' values."""
    return max(map(int, gather(op, str(value))))


def total(op: str, value: int) -> int:
    """Adds up all processes' values."""
    return sum(map(int, gather(op, str(value))))


def draw_words(op: str, *, is_shared: bool, num_words: int = 2) -> np.ndarray:
    """Draws random 32-bit words; if `is_shared`, all processes must call, and get the words of the first."""
    words = os.urandom(4 * num_words)
    return np.frombuffer(bytes.fromhex(gather(op, words.hex())[0]) if is_shared else words, np.uint32)


def gather(topic: str, message: str, tell: Callable[[int, int], None] | None = None) -> list[str]:
    """Gathers a message of each process through JAX's coordination service: milliseconds.

    All processes come here in the same order, with the same topics; those of OWN_CHANNELS apart. `tell` is called with
    the number of a process, and of the waits for it in vain; what it raises ends the wait.

    Raises:
      ValueError: another process came here with another topic; raised in both.
    """
    if jax.process_count() == 1:
        return [message]
    channel, tell = topic if topic in OWN_CHANNELS else "calls", tell or functools.partial(_tell_of_wait, topic)
    number = _num_gathered[channel]
    # After a Ctrl-C the call is made again: what it gave may have been read.
    message = _given.setdefault(channel, f"{topic}:{message}".encode(errors="backslashreplace").decode())
    _post(f"gather/{channel}", number, message)
    is_over = channel == "window"  # which goes on after a Ctrl-C
    try:
        read = functools.partial(_read, f"gather/{channel}", number)
        pairs = [
            read(process, functools.partial(tell, process)).partition(":") for process in range(jax.process_count())
        ]
        is_over = True
    finally:
        if is_over:
            _num_gathered[channel] = number + 1
            del _given[channel]
    for process, (other, _, _) in enumerate(pairs):
        if other != topic:
            raise ValueError(
                f'{topic}: got a call of "{other}" in process {process}, wanted the same calls in the same order in '
                "all processes; after one that was interrupted, make the next ones in all processes again."
            )
    return [text for _, _, text in pairs]


OWN_CHANNELS = ("pipeline", "window")
"""Topics of their own order: of loops that go on after other calls, and of threads that trace."""
_num_gathered = collections.Counter[str]()
_given: dict[str, str] = {}  # what was given by gatherings that are not over, by channel


def _tell_of_wait(topic: str, process: int, num_late: int) -> None:
    if num_late == LATE_POLLS:
        rest = "a call such as save, restore or grow must be made in all processes, or the process is slow"
        _log.warning('jaxsok waits for process %d to come as far ("%s"): %s.', process, topic, rest)


def _post(topic: str, number: int, message: str) -> None:
    """Gives a message to all processes; an old one goes, for which none waits: the coordinator would keep all."""
    client, own = _client(), jax.process_index()
    # The value must not be empty.
    client.key_value_set(f"jaxsok/{topic}/{number}/{own}", f":{message}", allow_overwrite=True)
    client.key_value_delete(f"jaxsok/{topic}/{number - KEPT_VOTES}/{own}")


def _read(topic: str, number: int, process: int, tell: Callable[[int], None]) -> str:
    """Waits for a message of a process, as long as `tell` does not raise."""
    client, num_late = _client(), 0
    while True:
        try:
            return client.blocking_key_value_get(f"jaxsok/{topic}/{number}/{process}", POLL_S * 1000)[1:]
        except jax.errors.JaxRuntimeError as error:
            # A dead process ends this one; this waits for a process that is late.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        num_late += 1
        tell(num_late)


def meet(op: str, what: str, failure: BaseException | None = None) -> ValueError | None:
    """Raises ValueError in every process if they come here with something else; the log says whom one waits for.

    If only their `failure` differs, the error is returned. A process that does not come, because its data go on
    otherwise, waits for this one in a collective: for ever. With a `failure` this one waits for END_POLLS alone and
    then raises it, since its end ends the others.
    """
    own, but, error = jax.process_index(), _describe(failure), None
    own_text = f"{what}, but {but}" if but else what
    others = gather(op, own_text, functools.partial(_tell_of_meeting, op, what, failure))
    own_text = others[min(own, len(others) - 1)]
    for process, other in enumerate(others):
        if other == own_text:
            continue
        if other != what and not other.startswith(f"{what}, but "):
            raise ValueError(
                f"{op}: batches: got {own_text} in process {own} and {other} in process {process}, wanted the same in "
                f"all {jax.process_count()}; give them as many batches, of as many samples (pad_to), "
                "with entries of the same dtypes."
            )
        error = ValueError(f"{op}: batches: got {own_text} in process {own}, but {other} in process {process}.")
    return error


def _tell_of_meeting(op: str, what: str, failure: BaseException | None, process: int, num_late: int) -> None:
    if num_late == 2:
        rest = (
            f"but {_describe(failure)}. It waits for process {process} to come as far, for {END_POLLS * POLL_S} "
            "seconds, and then raises that, which ends all processes."
        )
        if failure is None:
            rest = (
                f"and waits for process {process} to have the same. If that goes on with other data, both wait for "
                "ever: give all processes as many batches, of as many samples (pad_to), with entries of the same "
                "dtypes."
            )
        _log.log(logging.ERROR if failure else logging.WARNING, "%s: this process has %s, %s", op, what, rest)
    if failure is not None and num_late == END_POLLS:
        raise failure


def agree(op: str, error: Exception | None) -> None:
    """Raises in every process if one of them has an error: its own, else that of the first failed process."""
    messages = gather(op, _describe(error))
    if error is not None:
        raise error
    for process, message in enumerate(messages):
        if message:
            raise _failure(op, process, message)


@contextlib.contextmanager
def fail_together(op: str, *, is_shared: bool = True) -> Iterator[None]:
    """Surrounds work of each process, which must not wait for others: if one fails, all of them raise (`agree`)."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if is_shared:
        agree(op, error)
    elif error is not None:
        raise error


def iterate_together(op: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yields items that each process reads for itself, equally many in each; if one fails, all of them raise."""
    while True:
        item: list[Item] = []
        with fail_together(op):
            item += itertools.islice(items, 1)
        if not item:
            return
        yield item[0]


class Vote:
    """An `agree` for threads, through JAX's coordination service; processes make their votes in the same order."""

    _number = itertools.count()

    def __init__(self, op: str):
        self.op, self._own_number = op, next(Vote._number)
        self._has_reported = False

    def report(self, error: BaseException | None) -> None:
        """Reports this process's result to the others; only the first call counts."""
        if jax.process_count() == 1 or self._has_reported:
            return
        self._has_reported = True
        _post("vote", self._own_number, f"{error is None}:{_describe(error)}")

    def wait(self) -> None:
        """Waits until all have reported; RuntimeError: another process failed."""
        if jax.process_count() == 1:
            return
        for process in range(jax.process_count()):
            is_well, _, message = _read("vote", self._own_number, process, lambda num_late: None).partition(":")
            if is_well == "False" and process != jax.process_index():
                raise _failure(self.op, process, message)


def _client() -> Any:
    from jax._src import distributed

    return distributed.global_state.client


def _describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _failure(op: str, process: int, message: str) -> Exception:
    kind = MemoryError if message.startswith(MemoryError.__name__) else RuntimeError
    return kind(f"{op}: process {process} failed: {message}")
