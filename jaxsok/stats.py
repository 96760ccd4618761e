"""Stats: what depended on the data of a step, counted on the device and returned; `check` raises on the host."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

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
    "num_evicted",
)
PER_STORE = ("longest_probe", "num_unplaced", "num_rounds")
PER_STEP = ("num_stale",)
LATEST = ("num_rows", *PER_STORE)
"""Of several steps the last one's stands."""
TO_DATE = ("num_evicted",)
"""Counts since the state was made, modulo 2**32: of several steps the difference tells."""


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
    num_evicted: UInt32[Array, " num_tables"]
    """Rows that were ever evicted, by `evict` or by `grow`, modulo 2**32; 0 where the table's store has no policy."""
    longest_probe: Int32[Array, " num_stores"]
    """Buckets of the longest walk to a row since the index was last built; may differ between runs on a GPU."""
    num_unplaced: Int32[Array, " num_stores"]
    """Of the refused since the index was last built: occurrences that found no entry within the probe bound, there or
    among the keys that wait for a row (`AdmitByCount`)."""
    num_stale: Int32[Array, ""]
    """Uses that changed nothing because their plan is older than the last erase or eviction."""
    num_rounds: Int32[Array, " num_stores"]
    """Passes of the exchange between shards, of the lookup that had most; 0 where nothing was exchanged."""

    tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Rows allocated in each table's store."""
    stores: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The number of each table's store."""
    entries: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Entries of the index of each table's store."""

    def __add__(self, other: "Stats") -> "Stats":
        """Adds counts; of those that are not of one step the later (other) stands.

        Those are `num_rows`, `num_evicted`, `longest_probe`, `num_unplaced` and `num_rounds`.

        Example:
          `total = stats_of_step_1 + stats_of_step_2`
        """
        if not isinstance(other, Stats):
            return NotImplemented
        if self.tables != other.tables:
            raise ValueError(f"Stats: +: got tables {other.tables}, wanted {self.tables}.")
        summed = {
            name: getattr(self, name) + getattr(other, name)
            for name in (*_PER_TABLE, "num_stale")
            if name not in (*LATEST, *TO_DATE)
        }
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

    def scalars(self, prefix: str = "jaxsok") -> dict[str, float]:
        """The counts as a flat dict that any writer of scalars takes, with what follows from them.

        For each table its counts, and those of its store: `longest_probe`, `num_unplaced`, `num_rounds`. Besides
        `hit_rate`, the share of the keys asked (padding left out) that had a row, absent where none was asked; `fill`,
        the rows of the table's store over its capacity; `load`, the same rows over the entries of its index.

        Args:
          prefix: of every name.

        Returns:
          Numbers by "prefix/table/count"; `num_stale` has no table.

        Cost:
          Waits for the step; one transfer from the device for all. `StatsWindow` does not wait.

        Example:
          `stats.scalars()["jaxsok/user/hit_rate"]`
        """
        facts = facts_of(self)
        counts = unpacked(facts, np.asarray(packed(self))[None])
        return scalars_of(facts, {name: column[0] for name, column in counts.items()}, prefix)

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
                f"update: plan: {stale} uses came from a plan made before the last erase or eviction; they "
                "changed nothing. Look the batch up again after rows have left."
            )

    def _neighbours(self, i: int) -> str:
        return ", ".join(f'"{t}"' for t, s in zip(self.tables, self.stores, strict=True) if s == self.stores[i])

    def _rows_of_store(self, counts: dict[str, Any], i: int) -> int:
        return sum(counts[t]["num_rows"] for t, s in zip(self.tables, self.stores, strict=True) if s == self.stores[i])


# For writers of scalars ----------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What Stats tell beside their counts: see there."""

    names: tuple[str, ...]
    """Of the counts, in the order of `packed`."""
    tables: tuple[str, ...]
    capacities: tuple[int, ...]
    stores: tuple[int, ...]
    entries: tuple[int, ...]


def facts_of(stats: Stats) -> Facts:
    """What holds no array."""
    return Facts(_arrays_of(type(stats)), stats.tables, stats.capacities, stats.stores, stats.entries)


def packed(stats: Stats) -> Array:
    """All counts in one array on one device, int32[num_counts], so that one transfer brings them."""
    arrays = [getattr(stats, name) for name in _arrays_of(type(stats))]
    if isinstance(stats.num_stale, jax.core.Tracer):
        raise TypeError(
            "Stats: got counts that are being traced, wanted those of a step that was dispatched; give the Stats out "
            "of the jitted function."
        )
    if isinstance(stats.num_stale, jax.Array) and len(stats.num_stale.sharding.device_set) > 1:
        # Every device has all counts: one of this process is enough, and no other process has to take part.
        arrays = [array.addressable_data(0) for array in arrays]
    return _concatenated(arrays)


@jax.jit
def _concatenated(arrays: list[Array]) -> Array:
    return jnp.concatenate([lax.bitcast_convert_type(array, jnp.int32).reshape(-1) for array in arrays])


def unpacked(facts: Facts, words: np.ndarray) -> dict[str, np.ndarray]:
    """What `packed` has packed, for several steps: each count int64[num_steps, num_tables or num_stores or 1].

    Args:
      facts: of the Stats that were packed.
      words: int32[num_steps, num_counts].
    """
    num_stores = len(set(facts.stores))
    widths = [1 if name in PER_STEP else num_stores if name in PER_STORE else len(facts.tables) for name in facts.names]
    columns = np.split(words, np.cumsum(widths)[:-1], axis=1)
    return {
        name: (np.ascontiguousarray(column).view(np.uint32) if name in TO_DATE else column).astype(np.int64)
        for name, column in zip(facts.names, columns, strict=True)
    }


def scalars_of(facts: Facts, counts: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    """See `Stats.scalars`.

    Args:
      facts: of the Stats.
      counts: int64[num_tables or num_stores or 1] by name; of one step, or added over several.
      prefix: of every name.
    """
    scalars: dict[str, float] = {f"{prefix}/{name}": float(counts[name][0]) for name in PER_STEP}
    stores = np.array(facts.stores)
    for i, table in enumerate(facts.tables):
        of_table = {
            name: float(column[facts.stores[i] if name in PER_STORE else i])
            for name, column in counts.items()
            if name not in PER_STEP
        }
        num_asked = sum(of_table[name] for name in ("num_found", "num_inserted", "num_missing", "num_refused"))
        if num_asked:
            of_table["hit_rate"] = of_table["num_found"] / num_asked
        of_store = float(counts["num_rows"][stores == facts.stores[i]].sum())
        of_table["fill"] = of_store / facts.capacities[i]
        of_table["load"] = of_store / facts.entries[i]
        scalars |= {f"{prefix}/{table}/{name}": value for name, value in of_table.items()}
    return scalars


@functools.cache
def _arrays_of(kind: type[Stats]) -> tuple[str, ...]:
    """The names of the counts."""
    return tuple(field.name for field in dataclasses.fields(kind) if not field.metadata.get("static"))
