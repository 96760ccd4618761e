"""What several processes must agree on, before any of them acts on it. One process agrees with itself at no cost."""

from collections.abc import Sequence

import jax
import numpy as np


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
