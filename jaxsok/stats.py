"""Stats: what depended on the data of a step, counted on the device and returned; `check` raises on the host."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxsok.types import NonFiniteGradientError, StalePlanError, TableFullError

_PER_TABLE = (
    "num_found",
    "num_inserted",
    "num_missing",
    "num_refused",
    "num_padding",
    "num_unadmitted",
    "num_nonfinite",
    "num_rows",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one step, per table in the order of `tables`; on a mesh those of all shards together.

    The first five count occurrences, as if the keys were looked up one after the other, and add up to the keys
    asked (law 5).
    """

    num_found: Int32[Array, " num_tables"]
    """The key had a row (repeats of a new key in its first batch included)."""
    num_inserted: Int32[Array, " num_tables"]
    """The key was new and got a row."""
    num_missing: Int32[Array, " num_tables"]
    """`find` only: the key has no row."""
    num_refused: Int32[Array, " num_tables"]
    """The key was new and got no row, as its store was full or as it is not admitted yet: it learns nothing."""
    num_padding: Int32[Array, " num_tables"]
    """PADDING_KEY, and the unused tail of a key buffer."""
    num_unadmitted: Int32[Array, " num_tables"]
    """Of the refused: those that the table's admission kept out."""
    num_nonfinite: Int32[Array, " num_tables"]
    """Rows whose summed gradient was infinite or NaN; they were left alone."""
    num_rows: Int32[Array, " num_tables"]
    """Rows in use after the step; int32, so up to 2**31 - 1 (`Collection.num_rows` counts further)."""
    longest_probe: Int32[Array, " num_stores"]
    """Buckets of the longest walk to a row since the index was last built; may differ between runs on a GPU."""
    num_unplaced: Int32[Array, " num_stores"]
    """Of the refused since the index was last built: occurrences that found no entry within the probe bound."""
    num_stale: Int32[Array, ""]
    """Uses that changed nothing because their plan is older than the last erase."""
    num_rounds: Int32[Array, " num_stores"]
    """Passes of the exchange between shards, of the lookup that had most; 0 where nothing was exchanged."""

    tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Rows allocated in each table's store."""
    stores: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The number of each table's store."""

    def __add__(self, other: "Stats") -> "Stats":
        """Adds counts; of `num_rows`, `longest_probe`, `num_unplaced` and `num_rounds` the later (other) stands.

        Example:
          `total = stats_of_step_1 + stats_of_step_2`
        """
        if not isinstance(other, Stats):
            return NotImplemented
        if self.tables != other.tables:
            raise ValueError(f"Stats: +: got tables {other.tables}, wanted {self.tables}.")
        summed = {name: getattr(self, name) + getattr(other, name) for name in (*_PER_TABLE[:-1], "num_stale")}
        return dataclasses.replace(other, **summed)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """The counts by table, as Python integers (waits for the device).

        Example:
          `stats.to_dict()["user"]["num_inserted"]`
        """
        columns = {name: np.asarray(getattr(self, name)) for name in _PER_TABLE}
        return {
            table: {name: int(column[i]) for name, column in columns.items()} for i, table in enumerate(self.tables)
        }

    def check(self) -> None:
        """Raises if anything was refused for want of room, skipped or stale (waits for the device).

        Raises:
          TableFullError: keys were refused that were admitted; names table, capacity and how many.
          NonFiniteGradientError: row gradients were skipped.
          StalePlanError: uses of a stale plan were left out.

        Example:
          `stats.check()` after a step, or every hundred steps on the sum of their stats.
        """
        counts = self.to_dict()
        num_full = {table: c["num_refused"] - c["num_unadmitted"] for table, c in counts.items()}
        refused = [
            f'table "{table}": {num_full[table]} keys refused, its store of capacity {capacity} rows '
            f"(tables {self._neighbours(i)}) holds {self._rows_of_store(counts, i)}"
            for i, (table, capacity) in enumerate(zip(self.tables, self.capacities, strict=True))
            if num_full[table]
        ]
        if refused:
            unplaced = int(np.asarray(self.num_unplaced).sum())
            also = f" {unplaced} of them found no index entry within the probe bound." if unplaced else ""
            raise TableFullError(
                f"lookup: {'; '.join(refused)}.{also} Call collection.grow between steps, or raise max_capacity."
            )
        nonfinite = {table: c["num_nonfinite"] for table, c in counts.items() if c["num_nonfinite"]}
        if nonfinite:
            raise NonFiniteGradientError(
                f"update: gradients: infinite or NaN for {nonfinite} rows (by table); those rows were left alone. "
                "Look for overflow in the loss, or lower the learning rate."
            )
        stale = int(np.asarray(self.num_stale))
        if stale:
            raise StalePlanError(
                f"update: plan: {stale} uses came from a plan made before the last erase; they changed nothing. "
                "Look the batch up again after erasing."
            )

    def _neighbours(self, i: int) -> str:
        return ", ".join(f'"{t}"' for t, s in zip(self.tables, self.stores, strict=True) if s == self.stores[i])

    def _rows_of_store(self, counts: dict[str, Any], i: int) -> int:
        return sum(counts[t]["num_rows"] for t, s in zip(self.tables, self.stores, strict=True) if s == self.stores[i])
