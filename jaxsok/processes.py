"""What several processes must agree on, before any of them acts on it. One process agrees with itself at no cost."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

MESSAGE_BYTES = 1024  # of an error, for the other processes
POLL_S = 5
KEPT_VOTES = 64
Item = TypeVar("Item")


def require_same(op: str, lines: Sequence[str]) -> None:
    """Refuses, in every process, what differs between processes.

    Args:
      op: named in the error.
      lines: what this process has.

    Raises:
      ValueError: names the first line that differs, and the processes.

    Cost:
      Two small collectives over all processes, on the host; none in one process.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    text = "\n".join(lines).encode()
    lengths = np.asarray(multihost_utils.process_allgather(np.array([len(text)], np.int32))).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    texts = [bytes(row[:length]).decode().split("\n") for row, length in zip(gathered, lengths, strict=True)]
    for process, other in enumerate(texts):
        if other == texts[0]:
            continue
        pairs = zip([*texts[0], "(nothing)"], [*other, "(nothing)"], strict=False)
        first, second = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{op}: specs: got {second!r} in process {process} and {first!r} in process 0, wanted the same in all "
            f"{len(texts)} processes; declare the same tables, features, capacities and seed everywhere."
        )


def least(value: int) -> int:
    """The least of all processes' values.

    Example:
      >>> least(5)
      5
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    # As words: JAX without x64 would narrow an int64.
    words = np.array([value >> 31, value & 0x7FFFFFFF], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(words)).reshape(-1, 2)
    return min((int(high) << 31) | int(low) for high, low in gathered)


def drawn(*, is_shared: bool, num_words: int = 2) -> np.ndarray:
    """Random words of 32 bits.

    Args:
      is_shared: whether all processes get those of the first; all of them call then.
      num_words: how many.

    Example:
      >>> drawn(is_shared=False).dtype
      dtype('uint32')
    """
    words = np.frombuffer(os.urandom(4 * num_words), np.uint32)
    if is_shared and jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = np.asarray(multihost_utils.process_allgather(words)).reshape(-1, num_words)[0]
    return words


_LIVES: dict[str, str] = {}  # of states that `init` made in this process: what is the same on every run -> what is not


def begin_life(words: np.ndarray, drawn: np.ndarray) -> None:
    """Gives the lives of states that begin here a name that those of no other run have.

    Args:
      words: of the state, two of 32 bits; of one seed the same again, and then the name is, too.
      drawn: 64 random bits, as `drawn` gives them.
    """
    _LIVES.setdefault(_hexadecimal(words), _hexadecimal(drawn))


def life_of(words: np.ndarray) -> str:
    """The name of a state's life, 16 hexadecimal digits: what `begin_life` was given, else its own words.

    Example:
      >>> life_of(np.array([0xDEADBEEF, 0], np.uint32))
      '00000000deadbeef'
    """
    own = _hexadecimal(words)
    return _LIVES.get(own, own)


def _hexadecimal(words: np.ndarray) -> str:
    low, high = (int(word) for word in np.asarray(words).reshape(-1))
    return f"{high << 32 | low:016x}"


def agree(op: str, error: Exception | None) -> None:
    """Raises in every process, if one of them has an error; all wait here for each other.

    Args:
      op: named in the error.
      error: of this process; None: it has none.

    Raises:
      Exception: `error` itself, where there is one.
      RuntimeError: in the other processes; has the number of the first process with an error, and its message.

    Cost:
      One small collective over all processes, two if there is an error; none in one process.

    Example:
      >>> agree("load", None)
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = np.asarray(multihost_utils.process_allgather(np.array([error is not None], np.int32))).reshape(-1)
        if failed.any():
            padded = np.zeros(MESSAGE_BYTES, np.uint8)
            text = np.frombuffer(_told(error).encode()[:MESSAGE_BYTES], np.uint8)
            padded[: text.size] = text
            messages = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, MESSAGE_BYTES)
            if error is None:
                first = int(np.flatnonzero(failed)[0])
                raise _failed(op, first, bytes(messages[first]).rstrip(b"\0").decode(errors="ignore"))
    if error is not None:
        raise error


@contextlib.contextmanager
def together(op: str) -> Iterator[None]:
    """Around what each process does for itself: if it fails in one, all of them raise at its end (`agree`).

    What is inside must not wait for other processes.

    Example:
      >>> with together("load"):
      ...     number = int("7")
      >>> number
      7
    """
    error = None
    try:
        yield
    except Exception as one:
        error = one
    agree(op, error)


def in_step(op: str, items: Iterator[Item]) -> Iterator[Item]:
    """Items that each process reads for itself, all equally many; if reading fails in one, all of them raise.

    Example:
      >>> list(in_step("load", iter([1, 2])))
      [1, 2]
    """
    while True:
        item: list[Item] = []
        with together(op):
            item += itertools.islice(items, 1)
        if not item:
            return
        yield item[0]


class Vote:
    """What `agree` does, for threads: through JAX's coordination service, and no device.

    Made in all processes in the same order. Whoever fails says so at once, and need not wait for the others.
    """

    _number = itertools.count()

    def __init__(self, op: str):
        """Takes the next name."""
        self.op, self._of = op, next(Vote._number)
        self._has_told = False

    def tell(self, error: BaseException | None) -> None:
        """Says to the others how it went here; only the first call counts."""
        if jax.process_count() == 1 or self._has_told:
            return
        self._has_told = True
        # Not empty, which might be no value.
        _client().key_value_set(self._key(self._of, jax.process_index()), f"{error is None}:{_told(error)}")
        # The coordinator would keep them all; nobody waits for one so old.
        _client().key_value_delete(self._key(self._of - KEPT_VOTES, jax.process_index()))

    def wait(self) -> None:
        """Waits until all have told.

        Raises:
          RuntimeError: another one failed.
        """
        if jax.process_count() == 1:
            return
        for process in range(jax.process_count()):
            is_well, _, message = self._heard(process).partition(":")
            if is_well == "False" and process != jax.process_index():
                raise _failed(self.op, process, message)

    @staticmethod
    def _key(number: int, process: int) -> str:
        return f"jaxsok/vote/{number}/{process}"

    def _heard(self, process: int) -> str:
        while True:
            try:
                return _client().blocking_key_value_get(self._key(self._of, process), POLL_S * 1000)
            except jax.errors.JaxRuntimeError as error:
                # A process that died ends this one; one that still writes is waited for.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _client() -> Any:
    from jax._src import distributed

    return distributed.global_state.client


def _told(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _failed(op: str, process: int, message: str) -> RuntimeError:
    return RuntimeError(f"{op}: process {process} failed: {message}")
