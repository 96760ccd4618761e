"""Agreement between processes, before any of them acts. One process agrees with itself at no cost."""

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

MESSAGE_BYTES = 1024  # of an error that other processes see
POLL_S = 5
END_POLLS = 12  # for which a process that has failed waits for the others to come as far
KEPT_VOTES = 64
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


def require_same(op: str, lines: Sequence[str]) -> None:
    """Raises ValueError in every process if `lines` differ, addresses of objects aside; costs two small collectives."""
    if jax.process_count() == 1:
        return
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines)).encode()
    lengths = _gather(np.array([len(text)], np.int32))[:, 0]
    rows = _gather(_pad(text, int(lengths.max())))
    texts = [bytes(row[:length]).decode().split("\n") for row, length in zip(rows, lengths, strict=True)]
    for process, other in enumerate(texts):
        if other == texts[0]:
            continue
        pairs = zip([*texts[0], "(nothing)"], [*other, "(nothing)"], strict=False)
        first, second = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{op}: got {second!r} in process {process} and {first!r} in process 0, wanted the same in all "
            f"{len(texts)} processes; declare the same everywhere."
        )


def least(value: int) -> int:
    """Returns the least of all processes' values."""
    return min(_gather_integers(value))


def greatest(value: int) -> int:
    """Returns the greatest of all processes' values."""
    return max(_gather_integers(value))


def total(value: int) -> int:
    """Adds up all processes' values."""
    return sum(_gather_integers(value))


def _gather_integers(value: int) -> list[int]:
    if jax.process_count() == 1:
        return [value]
    # As words: JAX without x64 would narrow an int64.
    words = _gather(np.array([value >> 31, value & 0x7FFFFFFF], np.int32))
    return [(int(high) << 31) | int(low) for high, low in words]


def _gather(array: np.ndarray) -> np.ndarray:
    """Gathers an array of one axis: a row for each process."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), array.size)


def _pad(text: bytes, size: int) -> np.ndarray:
    return np.frombuffer(text[:size].ljust(size, b"\0"), np.uint8)


def draw_words(*, is_shared: bool, num_words: int = 2) -> np.ndarray:
    """Draws random 32-bit words; if `is_shared`, all processes must call, and get the words of the first."""
    words = np.frombuffer(os.urandom(4 * num_words), np.uint32)
    return _gather(words)[0] if is_shared and jax.process_count() > 1 else words


def gather(topic: str, message: str) -> list[str]:
    """Gathers a message of each process, in one order everywhere, through JAX's coordination service: milliseconds."""
    if jax.process_count() == 1:
        return [message]
    client, number = _client(), next(_gatherings)
    # The value must not be empty.
    client.key_value_set(f"jaxsok/gather/{number}/{jax.process_index()}", f"{topic}:{message}")
    client.key_value_delete(f"jaxsok/gather/{number - KEPT_VOTES}/{jax.process_index()}")  # all would be kept
    keys = [f"jaxsok/gather/{number}/{process}" for process in range(jax.process_count())]
    return [_read(client, key).partition(":")[2] for key in keys]


_gatherings = itertools.count()


def _read(client: Any, key: str, tell: Callable[[int], None] = lambda num_late: None) -> str:
    """Waits for a value, as long as `tell` does not raise; it is called with the number of waits in vain."""
    num_late = 0
    while True:
        try:
            return client.blocking_key_value_get(key, POLL_S * 1000)
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
    if jax.process_count() == 1:
        return None
    global _num_met
    client, number, own, others, but = _client(), _num_met, jax.process_index(), [], _describe(failure)
    own_text, error = f"{what}, but {but}" if but else what, None
    # After a Ctrl-C this is done again, under the same number.
    client.key_value_set(f"jaxsok/meet/{number}/{own}", f":{own_text}", allow_overwrite=True)
    client.key_value_delete(f"jaxsok/meet/{number - KEPT_VOTES}/{own}")  # the coordinator would keep all
    for process in range(jax.process_count()):
        tell = functools.partial(_tell_of_meeting, op, what, failure, process)
        others.append(_read(client, f"jaxsok/meet/{number}/{process}", tell)[1:])
    _num_met = number + 1
    for process, other in enumerate(others):
        if other != own_text:
            error = ValueError(
                f"{op}: batches: got {own_text} in process {own} and {other} in process {process}, wanted the same in "
                f"all {jax.process_count()}; give them as many batches, of as many samples (pad_to)."
            )
            if other != what and not other.startswith(f"{what}, but "):
                raise error
    return error


_num_met = 0


def _tell_of_meeting(op: str, what: str, failure: BaseException | None, process: int, num_late: int) -> None:
    if num_late == 2:
        rest = (
            f"but {_describe(failure)}. It waits for process {process} to come as far, for {END_POLLS * POLL_S} "
            "seconds, and then raises that, which ends all processes."
        )
        if failure is None:
            rest = (
                f"and waits for process {process} to have the same. If that goes on with other data, both wait for "
                "ever: give all processes as many batches, of as many samples (pad_to)."
            )
        _log.log(logging.ERROR if failure else logging.WARNING, "%s: this process has %s, %s", op, what, rest)
    if failure is not None and num_late == END_POLLS:
        raise failure


def agree(op: str, error: Exception | None) -> None:
    """Raises in every process if one of them has an error: its own, else that of the first failed process."""
    if jax.process_count() > 1:
        has_failed = _gather(np.array([error is not None], np.int32))[:, 0]
        if has_failed.any():
            messages = _gather(_pad(_describe(error).encode(), MESSAGE_BYTES))
            if error is None:
                first = int(np.flatnonzero(has_failed)[0])
                raise _failure(op, first, bytes(messages[first]).rstrip(b"\0").decode(errors="ignore"))
    if error is not None:
        raise error


@contextlib.contextmanager
def fail_together(
    op: str, *, is_shared: bool = True, agree: Callable[[str, Exception | None], None] = agree
) -> Iterator[None]:
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
        # The value must not be empty.
        client, process = _client(), jax.process_index()
        client.key_value_set(self._key(self._own_number, process), f"{error is None}:{_describe(error)}")
        # The coordinator would keep all votes; no process still waits for one so old.
        client.key_value_delete(self._key(self._own_number - KEPT_VOTES, process))

    def wait(self) -> None:
        """Waits until all have reported; RuntimeError: another process failed."""
        if jax.process_count() == 1:
            return
        for process in range(jax.process_count()):
            is_well, _, message = _read(_client(), self._key(self._own_number, process)).partition(":")
            if is_well == "False" and process != jax.process_index():
                raise _failure(self.op, process, message)

    @staticmethod
    def _key(number: int, process: int) -> str:
        return f"jaxsok/vote/{number}/{process}"


def _client() -> Any:
    from jax._src import distributed

    return distributed.global_state.client


def _describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _failure(op: str, process: int, message: str) -> Exception:
    kind = MemoryError if message.startswith(MemoryError.__name__) else RuntimeError
    return kind(f"{op}: process {process} failed: {message}")
