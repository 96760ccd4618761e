"""Stats of the last steps, added on the host without waiting for the device; and writers that log them."""

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxsok import checks
from jaxsok.stats import PER_TABLE, TO_DATE, Stats, columns, move_to_one_device, read_on_host, scalars_of


class StatsWindow:
    """Counts over the last `num_steps` steps that have arrived on the host: exact, and without a wait.

    `push` starts the transfer of a step's counts and takes in those that have come. Sums are Python integers, so they
    do not overflow. `num_rows`, `longest_probe`, `num_unplaced` and `num_rounds` are those of the last step. Evictions,
    which Stats count since the state was made, are those since the step before the window; at the beginning, since the
    first step pushed. Make a new window for a restored state, which brings its evictions along. The first time that
    keys of a table were refused for want of room, a RuntimeWarning says so.

    A host object: keep it out of jitted functions. A step holds a few hundred bytes until it leaves the window.

    Example:
      `window.push(stats)` after each step; `window.scalars()` every hundredth.
    """

    def __init__(self, num_steps: int = 100) -> None:
        self.num_steps = checks.integer("StatsWindow: num_steps", num_steps, 1)
        self.num_pushed = 0
        # In order. The first is the step before the window, if any: the window subtracts its counts to date.
        self._steps: collections.deque[Stats] = collections.deque()
        self._unchecked: collections.deque[Stats] = collections.deque()
        self._warned: set[str] = set()

    def push(self, stats: Stats) -> None:
        """Hands in the counts of one step, of the same tables as all before; does not wait for them.

        Warns once for each table (RuntimeWarning), if steps that have arrived refused keys for want of room. Starts one
        transfer of some hundred bytes.

        Raises:
          TypeError: not Stats, or traced.
          ValueError: of other tables, or several steps stacked by a scan: add those up, or push each of them.
        """
        if not isinstance(stats, Stats):
            raise TypeError(f"StatsWindow: push: stats: got {type(stats).__name__}, wanted the Stats of a step.")
        if self._steps and stats.tables != self._steps[-1].tables:
            raise ValueError(f"StatsWindow: push: stats: got tables {stats.tables}, wanted {self._steps[-1].tables}.")
        if np.ndim(stats.words) > 1:
            raise ValueError(
                f"StatsWindow: push: stats: got {stats.words.shape[0]} steps stacked, wanted one step; push "
                "jax.tree.map(lambda count: count[i], stats) for each i."
            )
        step = move_to_one_device(stats)
        step.words.copy_to_host_async()
        self._steps.append(step)
        self._unchecked.append(step)
        self.num_pushed += 1
        self._warn_of_refusals()
        # Once the step behind a full window has arrived, the first is not needed.
        while len(self._steps) > self.num_steps + 1 and _has_arrived(self._steps[self.num_steps + 1]):
            self._steps.popleft()

    def _warn_of_refusals(self) -> None:
        while self._unchecked and self._unchecked[0].words.is_ready():
            step = self._unchecked.popleft()
            host = dataclasses.replace(step, words=np.asarray(step.words))
            num_full = host.num_refused - host.num_unadmitted
            for table, count in zip(step.tables, num_full.tolist(), strict=True) if num_full.any() else ():
                if not count or table in self._warned:
                    continue
                self._warned.add(table)
                warnings.warn(
                    f'StatsWindow: push: stats: got {count} keys of table "{table}" refused in one step for want of '
                    "room, wanted none; they learned nothing. Call state = collection.grow(state, batch) before every "
                    "step, or raise max_capacity.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def wait(self) -> None:
        """Waits until all that was pushed has arrived."""
        jax.block_until_ready([step.words for step in self._steps])

    def sums(self) -> dict[str, dict[str, int]]:
        """Returns the counts by table over the steps in the window, as `Stats.to_dict`; empty before any arrived."""
        steps = self._list_arrived()
        if not steps:
            return {}
        counts = self._add(steps)
        return {table: {name: int(counts[name][i]) for name in PER_TABLE} for i, table in enumerate(steps[-1].tables)}

    def scalars(self, prefix: str = "jaxsok") -> dict[str, float]:
        """Returns `Stats.scalars` over the steps in the window, and "prefix/num_steps"; empty before any arrived."""
        steps = self._list_arrived()
        if not steps:
            return {}
        num_steps = {f"{prefix}/num_steps": float(min(len(steps), self.num_steps))}
        return num_steps | scalars_of(steps[-1], self._add(steps), prefix)

    def _list_arrived(self) -> list[Stats]:
        """Returns the last steps that have arrived without a gap, and the one before them if it is known."""
        # The transfer was started with the step: what is ready on the device is here in microseconds.
        steps = list(itertools.takewhile(_has_arrived, self._steps))
        return steps[-self.num_steps - 1 :]

    def _add(self, steps: list[Stats]) -> dict[str, np.ndarray]:
        """Sums counts over the window; takes the last value of counts that are not summed."""
        known = dataclasses.replace(steps[-1], words=np.stack([np.asarray(step.words) for step in steps]))
        added = columns(read_on_host(dataclasses.replace(known, words=known.words[-self.num_steps :])))
        for name in TO_DATE:
            column = known.count(name).astype(np.int64)
            more = np.diff(column, axis=0) % 2**32
            # A count that fell belongs to a new state: it does not wrap around by 2**31 in a step.
            added[name] = np.where(more < 2**31, more, column[1:]).sum(axis=0)
        return added


def _has_arrived(step: Stats) -> bool:
    # Asking a deleted array whether it is ready ends the process (jaxlib 0.10.2).
    if step.words.is_deleted():
        raise ValueError(
            "StatsWindow: stats: got counts that were donated after they were pushed, wanted counts that stay; leave "
            "Stats out of donate_argnums, or push a copy: jax.tree.map(jnp.copy, stats)."
        )
    return step.words.is_ready()


def write_scalars(
    writer: Any, step: int, stats: Stats | StatsWindow | Mapping[str, float], *, prefix: str = "jaxsok"
) -> None:
    """Logs counts with a writer of either kind; TypeError: the writer has neither method.

    Args:
      writer: has `write_scalars(step, scalars)`, as clu's metric writers, or `add_scalar(name, value, step)`, as
        TensorBoard's `SummaryWriter`.
      step: of the log.
      stats: of one step (waits for it), of a window (does not), or a dict of numbers.
      prefix: of every name; a dict keeps its names.

    Example:
      >>> class Writer:
      ...     def write_scalars(self, step, scalars):
      ...         print(step, scalars)
      >>> write_scalars(Writer(), 100, {"loss": 0.5})
      100 {'loss': 0.5}
    """
    scalars = dict(stats) if isinstance(stats, Mapping) else stats.scalars(prefix)
    if callable(getattr(writer, "write_scalars", None)):
        writer.write_scalars(step, scalars)
    elif callable(getattr(writer, "add_scalar", None)):
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    else:
        raise TypeError(
            f"write_scalars: writer: got {type(writer).__name__}, wanted one with write_scalars(step, scalars) or "
            "add_scalar(name, value, step)."
        )
