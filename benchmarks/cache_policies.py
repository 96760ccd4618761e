"""Simulates which rows a cache of rows in host memory should keep; no device and no jaxsok is needed.

Question: how many rows would cross the link by LRU-2, which the cache follows (decision 0033), and how many if the
          least recently used row left, or a new row counted as older than it is until its next use (decision 0029)?
Workload: one of the 26 tables of `bench_tiers.py`: 1,000,000 rows, 8,192 draws a step from Zipf 1.05; the cache begins
          with its most frequent rows. With drift, the ranks move by 2% of the rows every 60 steps.
Limit:    a cache that always holds the most frequent rows ("best"): it knows the distribution.
Command:  `python -m benchmarks.cache_policies`, about two minutes on one core.
Last result: docs/decisions/0033-which-rows-leave-the-cache.md and 0029-placing-in-one-kernel.md.

Time counts calls, three a step with lookups ahead. The cache of decision 0029 distinguished ages up to 1,023 calls.
"""

import argparse

import numpy as np

NUM_ROWS, NUM_DRAWS, EXPONENT = 1_000_000, 8_192, 1.05
NUM_TABLES = 26
CALLS_PER_STEP = 3
MOST_AGE = 1_023
FIRST_SINGLE = 864  # bins of age of rows with a single use come after all others
DRIFT_STEPS, DRIFT_ROWS = 60, NUM_ROWS // 50


class Draws:
    """A source of each step's distinct rows."""

    def __init__(self, seed: int, drifts: bool):
        weights = np.arange(1, NUM_ROWS + 1) ** -EXPONENT
        self._sums = np.cumsum(weights) / weights.sum()
        self._rng, self._rows, self._drifts = np.random.default_rng(seed), np.arange(NUM_ROWS), drifts

    def draw(self, step: int) -> np.ndarray:
        """Returns the distinct rows of a step."""
        if self._drifts and step % DRIFT_STEPS == 0:
            self._rows = np.roll(self._rows, DRIFT_ROWS)
        ranks = np.searchsorted(self._sums, self._rng.random(NUM_DRAWS))
        return self._rows[np.unique(ranks)]


def simulate(share: float, penalty: int | None, num_steps: int, drifts: bool = False) -> float:
    """Returns the rows that a step brings, of all tables, on average over the last third of the steps.

    `penalty`: calls by which a new row counts as older than it is, until its next use; 0: the least recently used row
    leaves; None: no row ever leaves.
    """
    num_slots, draws = round(NUM_ROWS * share), Draws(0, drifts)
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


def simulate_lru_2(share: float, num_steps: int, drifts: bool = False) -> float:
    """Returns the rows that a step brings if the use before the last one decides which row leaves."""
    num_slots, draws = round(NUM_ROWS * share), Draws(0, drifts)
    is_cached, last, before, limit = np.zeros(NUM_ROWS, bool), np.zeros(NUM_ROWS, int), np.zeros(NUM_ROWS, int), 0
    slot = np.full(NUM_ROWS, -1)
    is_cached[:num_slots] = True
    slot[:num_slots] = np.arange(num_slots)[::-1]
    counts, of_last_step = [], np.zeros(0, int)
    for step in range(1, num_steps + 1):
        now, rows = step * CALLS_PER_STEP, draws.draw(step)
        missing = rows[~is_cached[rows]]
        counts.append(missing.size)
        before[rows], last[rows] = last[rows], now
        before[missing] = np.where(_bins(now - before[missing], 32) < limit, before[missing], 0)
        others = np.setdiff1d(np.flatnonzero(is_cached), np.union1d(rows, of_last_step), assume_unique=True)
        singles = FIRST_SINGLE + _bins(now - last[others], 8)
        ages = np.where(before[others] > 0, _bins(now - before[others], 32), singles)
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
    options = parser.parse_args()
    penalties = (0, 150, 300, 600, 1000)
    print("rows a step | " + " | ".join(["LRU-2", "best", *(f"penalty {penalty}" for penalty in penalties)]))
    for share in options.shares:
        for drifts in (False, True):
            found = [simulate(share, penalty, options.steps, drifts) for penalty in (None, *penalties)]
            cells = [
                f"{simulate_lru_2(share, options.steps, drifts):,.0f}",
                "-" if drifts else f"{found[0]:,.0f}",
                *(f"{count:,.0f}" for count in found[1:]),
            ]
            print(f"{share:.0%}{', drift' if drifts else ''} | " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
