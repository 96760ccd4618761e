"""Simulates which rows a cache of rows in host memory should keep; no device and no jaxsok is needed.

Question: how many rows would cross the link by the mean use of rows, which the cache follows (decision 0040), by LRU-2
          (decision 0033), and how many if the least recently used row left, or a new row counted as older than it is
          until its next use (decision 0029)?
Workload: one of the 26 tables of `bench_tiers.py`: 1,000,000 rows, 8,192 draws a step from Zipf 1.05; the cache begins
          with its most frequent rows. With drift, the ranks move by some rows every 60 steps.
Limit:    a cache that always holds the most frequent rows ("best"): it knows the distribution.
Command:  `python -m benchmarks.cache_policies`, some minutes on one core.
Last result: docs/decisions/0040-the-mean-use-of-rows.md, 0033-which-rows-leave-the-cache.md and
          0029-placing-in-one-kernel.md.

Time counts calls, three a step with lookups ahead. The cache of decision 0029 distinguished ages up to 1,023 calls.
"""

import argparse

import numpy as np

NUM_ROWS, NUM_DRAWS, EXPONENT = 1_000_000, 8_192, 1.05
NUM_TABLES = 26
CALLS_PER_STEP = 3
MOST_AGE = 1_023
FIRST_SINGLE = 864  # bins of age of rows with a single use come after all others
DRIFT_STEPS = 60


class Draws:
    """A source of each step's distinct rows."""

    def __init__(self, seed: int, drift: int):
        weights = np.arange(1, NUM_ROWS + 1) ** -EXPONENT
        self._sums = np.cumsum(weights) / weights.sum()
        self._rng, self._rows, self._drift = np.random.default_rng(seed), np.arange(NUM_ROWS), drift

    def draw(self, step: int) -> np.ndarray:
        """Returns the distinct rows of a step."""
        if step % DRIFT_STEPS == 0:
            self._rows = np.roll(self._rows, self._drift)
        ranks = np.searchsorted(self._sums, self._rng.random(NUM_DRAWS))
        return self._rows[np.unique(ranks)]


def simulate(share: float, penalty: int | None, num_steps: int, drift: int = 0) -> float:
    """Returns the rows that a step brings, of all tables, on average over the last third of the steps.

    `penalty`: calls by which a new row counts as older than it is, until its next use; 0: the least recently used row
    leaves; None: no row ever leaves.
    """
    num_slots, draws = round(NUM_ROWS * share), Draws(0, drift)
    is_cached, is_young = np.zeros(NUM_ROWS, bool), np.zeros(NUM_ROWS, bool)
    last_use, slot = np.full(NUM_ROWS, -MOST_AGE), np.full(NUM_ROWS, -1)
    is_cached[:num_slots] = is_young[:num_slots] = True
    slot[:num_slots] = np.arange(num_slots)[::-1]
    counts = []
    for step in range(1, num_steps + 1):
        now, rows = step * CALLS_PER_STEP, draws.draw(step)
        hits, missing = rows[is_cached[rows]], rows[~is_cached[rows]]
        counts.append(missing.size)
        if penalty is None:
            continue
        last_use[hits], is_young[hits] = now, False
        others = np.flatnonzero(is_cached & (last_use != now))
        ages = np.minimum(now - last_use[others] + penalty * is_young[others], MOST_AGE)
        leaving = others[np.argpartition(slot[others] - ages * NUM_ROWS, missing.size - 1)[: missing.size]]
        slot[missing] = slot[leaving]
        is_cached[leaving], is_cached[missing] = False, True
        last_use[missing], is_young[missing] = now, True
    return float(np.mean(counts[-num_steps // 3 :])) * NUM_TABLES


def simulate_uses(share: float, num_steps: int, drift: int = 0, *, is_mean: bool) -> float:
    """Returns the rows that a step brings if the mean use of a row decides which row leaves.

    Without `is_mean` it is the use before the last one (LRU-2), and a row that comes counts as new if that is older
    than those of the rows that stay.
    """
    num_slots, draws = round(NUM_ROWS * share), Draws(0, drift)
    is_cached, last, deciding, limit = np.zeros(NUM_ROWS, bool), np.zeros(NUM_ROWS, int), np.zeros(NUM_ROWS, int), 0
    slot = np.full(NUM_ROWS, -1)
    is_cached[:num_slots] = True
    slot[:num_slots] = np.arange(num_slots)[::-1]
    counts, of_last_step = [], np.zeros(0, int)
    for step in range(1, num_steps + 1):
        now, rows = step * CALLS_PER_STEP, draws.draw(step)
        missing = rows[~is_cached[rows]]
        counts.append(missing.size)
        if is_mean:
            deciding[rows] = np.where(deciding[rows] > 0, now - (now - deciding[rows]) // 2, last[rows])
        else:
            deciding[rows] = last[rows]
            deciding[missing] = np.where(_bins(now - deciding[missing], 32) < limit, deciding[missing], 0)
        last[rows] = now
        others = np.setdiff1d(np.flatnonzero(is_cached), np.union1d(rows, of_last_step), assume_unique=True)
        singles = FIRST_SINGLE + _bins(now - last[others], 8)
        ages = np.where(deciding[others] > 0, _bins(now - deciding[others], 32), singles)
        at = np.argpartition(slot[others] - ages * NUM_ROWS, missing.size - 1)[: missing.size]
        leaving, limit = others[at], ages[at].min()
        slot[missing] = slot[leaving]
        is_cached[leaving], is_cached[missing] = False, True
        of_last_step = rows
    return float(np.mean(counts[-num_steps // 3 :])) * NUM_TABLES


def _bins(ages: np.ndarray, per_octave: int) -> np.ndarray:
    """Returns bins of ages, as many in each octave."""
    shifts = np.maximum(np.floor(np.log2(np.maximum(ages, 1))).astype(int) - (per_octave.bit_length() - 1), 0)
    return shifts * per_octave + (ages >> shifts)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--shares", type=float, nargs="*", default=(0.5, 0.1, 0.02))
    parser.add_argument("--drifts", type=int, nargs="*", default=(0, 1_000, 20_000))
    options = parser.parse_args()
    penalties = (0, 150, 300, 600, 1000)
    names = ["mean use", "LRU-2", "best", *(f"penalty {penalty}" for penalty in penalties)]
    print("rows a step | " + " | ".join(names))
    for share in options.shares:
        for drift in options.drifts:
            found = [simulate_uses(share, options.steps, drift, is_mean=is_mean) for is_mean in (True, False)]
            found += [simulate(share, penalty, options.steps, drift) for penalty in (None, *penalties)]
            cells = [f"{count:,.0f}" for count in found]
            if drift:
                cells[names.index("best")] = "-"
            print(f"{share:.0%}, drift of {drift:,} | " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
