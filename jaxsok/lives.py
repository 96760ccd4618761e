"""Lives of states: facts about a state that a process knows and its arrays cannot hold.

A state lives from `init`, or from the folder it was made of, until it is lost. Two runs of one program have the same
bits, so after `init` the words in `State.lineage` follow from the seed, the specs, and how many states of both `init`
has made in the process. Exports need a name that no other run has, and must know which exports a state came from.
docs/decisions/0016-lives-belong-to-the-process.md says why the process keeps all this.
"""

import dataclasses
import threading
import time
from collections import Counter

import numpy as np

Ancestors = tuple[tuple[str, int], ...]
"""The name of each earlier life, and the number of the export at which the next one began; oldest first."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A life as exports record it."""

    name: str
    """16 hexadecimal digits."""
    ancestors: Ancestors = ()


class Lives:
    """The lives that began in one process, by the `State.lineage` words of their states."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All change under `_lock`. An entry never changes or goes, so that `life_of` reads without it.
        self._by_words: dict[str, Life] = {}
        self._last_order = 0
        self._num_inits: Counter[tuple[int, ...]] = Counter()

    def begin_init(self, own: tuple[int, ...], drawn: np.ndarray) -> np.ndarray:
        """Begins the life of a state that `init` makes, of a seed, specs and number of processes; returns its words."""
        with self._lock:
            number = self._num_inits[own]
            self._num_inits[own] += 1
        words = np.random.SeedSequence([*own, number]).generate_state(2)
        self.begin(words, drawn)
        return words

    def begin(self, words: np.ndarray, drawn: np.ndarray, ancestors: Ancestors = ()) -> None:
        """Names the life of the states with these words by random ones, the same in a job."""
        with self._lock:
            self._by_words[_hexadecimal(words)] = Life(_hexadecimal(drawn), ancestors)

    def life_of(self, words: np.ndarray) -> Life:
        """Returns the life of a state; one that did not begin in this process is named by its words."""
        own = _hexadecimal(words)
        return self._by_words.get(own) or Life(own)

    def next_order(self) -> int:
        """Numbers an export; numbers rise within a process, and usually from one process to the next."""
        with self._lock:
            self._last_order = max(self._last_order + 1, time.time_ns())
            return self._last_order


IN_THIS_PROCESS = Lives()


def _hexadecimal(words: np.ndarray) -> str:
    low, high = (int(word) for word in np.asarray(words).reshape(-1))
    return f"{high << 32 | low:016x}"
