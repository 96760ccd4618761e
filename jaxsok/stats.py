"""Stats: counts that depend on the data of a step, made on the device and returned; `check` raises on the host."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxsok.types import COUNTS, ByTable, NonFiniteGradientError, StalePlanError, TableCounts, TableFullError

PER_TABLE = (*COUNTS, "num_nonfinite", "num_rows", "num_evicted")
PER_STORE = ("longest_probe", "num_unplaced", "num_rounds")
PER_STEP = ("num_stale", "num_misused_plans")
LATEST = ("num_rows", *PER_STORE)
"""Several steps combine to the last one's count."""
TO_DATE = ("num_evicted",)
"""Counts since the state was made, modulo 2**32; a window takes the difference."""

Words = Int32[Array | np.ndarray, "*steps num_words"]


class _Count(property):
    """A count of `Stats` by the name of its attribute: int32 `[*steps, num_tables or num_stores]`, or `[*steps]`."""

    def __init__(self, meaning: str) -> None:
        super().__init__(lambda stats: stats.count(self.attribute))
        self.__doc__ = meaning  # until Python 3.12, `doc` would stay behind that of the class

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Counts of one step, per table in the order of `tables`; on a mesh those of all shards together.

    The first five count occurrences, as if the keys were looked up one after the other, and add up to the keys asked
    (law 5).

    All counts lie in one array, so that a step has one result more and one transfer brings them. Each name gives its
    part of that array, under `jit` and outside; a scan's Stats have an axis of the steps in front. Where other
    processes have devices of the mesh, it is the part on a device of this one.

    `to_dict`, `scalars` and `check` of a scan's Stats combine all of its steps, as `+` does: counts are added, but
    `num_rows`, `num_evicted`, `longest_probe`, `num_unplaced` and `num_rounds` are those of the later step.
    """

    words: Words
    """All counts, packed by `pack_words`; `jax.device_get(stats)` brings them to the host."""

    tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Rows allocated in each table's store."""
    stores: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The number of each table's store."""
    entries: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Entries of the index of each table's store."""
    num_shards: int = dataclasses.field(default=1, metadata={"static": True})
    """Shards over which the tables are split."""

    num_found = _Count("By table: the key had a row (repeats of a new key in its first batch included).")
    num_inserted = _Count("By table: the key was new and got a row.")
    num_missing = _Count("By table, `find` only: the key has no row.")
    num_refused = _Count(
        "By table: the key was new and got no row, as its store is full or it is not admitted yet; it learns nothing.",
    )
    num_padding = _Count("By table: PADDING_KEY, and the unused tail of a key buffer.")
    num_unadmitted = _Count("By table, of the refused: those that the table's admission kept out.")
    num_nonfinite = _Count("By table: rows whose summed gradient was infinite or NaN; they were left alone.")
    num_rows = _Count("By table: rows in use after the step, up to 2**31 - 1 (`Collection.num_rows` counts further).")
    num_evicted = _Count(
        "By table: rows that `evict` or `grow` ever evicted, uint32, modulo 2**32; 0 where its store has no policy.",
    )
    longest_probe = _Count(
        "By store: buckets of the longest walk to a row since the index was last built; may differ between GPU runs.",
    )
    num_unplaced = _Count(
        "By store, of the refused since the index was last built: occurrences that found no entry within the probe "
        "bound, there or among the keys that wait for a row (`AdmitByCount`).",
    )
    num_stale = _Count(
        "Uses that changed nothing because their plan was left out: it is older than the last erase or eviction, or "
        "one of `num_misused_plans`.",
    )
    num_misused_plans = _Count(
        "Plans that changed nothing because they have no open ticket in the state: their lookup does not belong to its "
        "history, an update has used them before, or 256 or more lookups came in between.",
    )
    num_rounds = _Count(
        "By store: passes of the exchange between shards, of the lookup that had most; 0 where nothing was exchanged.",
    )

    def count(self, name: str) -> Any:
        """Returns a count by its name; in NumPy after `jax.device_get(stats)`."""
        words = self.words
        if isinstance(words, jax.Array) and not isinstance(words, jax.core.Tracer) and not words.is_fully_addressable:
            words = words.addressable_data(0)
        part = words[..., _places(self.stores, self.num_shards)[name]]
        if name in PER_STEP:
            return part[..., 0]
        if name == "longest_probe":
            return part.reshape(*part.shape[:-1], self.num_shards, -1).max(axis=-2)
        return part.astype(np.uint32) if name in TO_DATE else part

    def __repr__(self) -> str:
        counts = [f"{name}={self.count(name)}" for name in (*PER_TABLE, *PER_STORE, *PER_STEP)]
        return f"Stats({', '.join(counts)}, tables={self.tables})"

    def __add__(self, other: "Stats") -> "Stats":
        if not isinstance(other, Stats):
            return NotImplemented
        if self.tables != other.tables:
            raise ValueError(f"Stats: +: got tables {other.tables}, wanted {self.tables}.")
        words = jnp.where(_is_latest(other), 0, self.words) + other.words
        return dataclasses.replace(other, words=words)

    def __radd__(self, other: int) -> "Stats":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # with which `sum` begins

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Returns the counts by table, as Python integers, of all steps of a scan (waits for the device)."""
        host = read_on_host(self)
        counts = {name: host.count(name) for name in PER_TABLE}
        return {table: {name: int(count[i]) for name, count in counts.items()} for i, table in enumerate(self.tables)}

    def scalars(self, prefix: str = "jaxsok") -> dict[str, float]:
        """Returns the counts as floats by "prefix/table/count", for writers of scalars; counts of a step have no table.

        For each table its counts, and those of its store: `longest_probe`, `num_unplaced`, `num_rounds`. In addition
        `hit_rate`, the share of the keys asked (without padding) that had a row, absent where none was asked; `fill`,
        the rows of the table's store over its capacity; `load`, the same rows over the entries of its index.

        Waits for the step, with one transfer from the device; `StatsWindow` does not wait.
        """
        return scalars_of(self, columns(read_on_host(self)), prefix)

    def check(self) -> None:
        """Raises if anything was refused for want of room, skipped or stale (waits for the device).

        Call it after a step or a `lax.scan` of steps, or every hundred steps on the sum of their stats.

        Raises:
          TableFullError: admitted keys were refused; names table, capacity and how many.
          NonFiniteGradientError: row gradients were skipped.
          StalePlanError: a plan was left out; says why.
        """
        host = read_on_host(self)
        counts = host.to_dict()
        stale, misused = int(host.count("num_stale")), int(host.count("num_misused_plans"))
        if misused:  # first, since rows of another batch do not count
            raise StalePlanError(
                f"update: plan: got {misused} plans that are not open in this state ({stale} uses), wanted plans whose "
                "lookup this state came from, each in one update only, at most 255 lookups later; they changed "
                "nothing. Pass on the state that lookup returns: `embeddings, state, plan = collection.lookup(state, "
                "...)`, then `state, stats = collection.update(state, plan, ...)`. With lookups ahead, step each "
                "batch that the pipeline hands out, and go on with the same pipeline; before another one, call "
                "collection.drain(state)."
            )
        num_full = {table: c["num_refused"] - c["num_unadmitted"] for table, c in counts.items()}
        refused, also = [], ""
        for table, capacity, s in zip(self.tables, self.capacities, self.stores, strict=True):
            if num_full[table]:
                neighbours = [name for name, store in zip(self.tables, self.stores, strict=True) if store == s]
                names = ", ".join(f'"{name}"' for name in neighbours)
                num_rows = sum(counts[name]["num_rows"] for name in neighbours)
                refused.append(
                    f'table "{table}": {num_full[table]} keys refused, its store of capacity {capacity} rows '
                    f"(tables {names}) holds {num_rows}"
                )
                if num_rows < capacity:
                    also = " If plans have a send_capacity of their own, keys beyond it are refused, too."
        if refused:
            unplaced = int(host.count("num_unplaced").sum())
            if unplaced:
                also = f" {unplaced} of them found no index entry within the probe bound."
            raise TableFullError(
                f"lookup: {'; '.join(refused)}.{also} Call collection.grow between steps, or raise max_capacity."
            )
        nonfinite = {table: c["num_nonfinite"] for table, c in counts.items() if c["num_nonfinite"]}
        if nonfinite:
            raise NonFiniteGradientError(
                f"update: gradients: infinite or NaN for {nonfinite} rows (by table); those rows were left alone. "
                "Look for overflow in the loss, or lower the learning rate."
            )
        if stale:
            raise StalePlanError(
                f"update: plan: {stale} uses came from a plan made before the last erase or eviction; they "
                "changed nothing. Look the batch up again after rows have left."
            )


# The words ------------------------------------------------------------------------------------------------------------


def pack_words(
    *,
    counts: TableCounts,
    num_nonfinite: ByTable,
    num_rows: ByTable,
    num_evicted: ByTable,
    num_unplaced: Int32[Array, " num_stores"],
    num_rounds: Int32[Array, " num_stores"],
    num_stale: Int32[Array, ""],
    num_misused_plans: Int32[Array, ""],
    longest_probe: Int32[Array, "num_shards num_stores"],
) -> Int32[Array, " num_words"]:
    """Packs all counts into one array, by store; on a mesh they are parts of sums, with `longest_probe` per shard."""
    by_table = counts, num_nonfinite, num_rows, num_evicted
    others = num_unplaced, num_rounds, num_stale, num_misused_plans, longest_probe
    return jnp.concatenate([part.reshape(-1) for part in (*by_table, *others)])


@functools.cache
def _places(stores: tuple[int, ...], num_shards: int) -> dict[str, Any]:
    """Returns the index of each count in `pack_words`, by name."""
    num_tables, num_stores, num_counts = len(stores), len(set(stores)), len(COUNTS)
    lines = np.empty(num_tables, np.int64)
    lines[np.argsort(stores, kind="stable")] = np.arange(num_tables)
    is_ordered = bool((lines == np.arange(num_tables)).all())  # the usual case: a slice, and not a gather
    places, begin = {}, num_tables * num_counts
    for i, name in enumerate(COUNTS):
        places[name] = slice(i, begin, num_counts) if is_ordered else lines * num_counts + i
    for name in ("num_nonfinite", "num_rows", "num_evicted"):
        places[name] = slice(begin, begin + num_tables) if is_ordered else begin + lines
        begin += num_tables
    widths = {"num_unplaced": num_stores, "num_rounds": num_stores, "num_stale": 1, "num_misused_plans": 1}
    for name, width in (widths | {"longest_probe": num_shards * num_stores}).items():
        places[name] = slice(begin, begin + width)
        begin += width
    return places


def move_to_one_device(stats: Stats) -> Stats:
    """Moves counts to one device of this process, so that reading them is no collective; TypeError: traced."""
    words = stats.words
    if isinstance(words, jax.core.Tracer):
        raise TypeError(
            "Stats: got counts that are being traced, wanted those of a step that was dispatched; give the Stats "
            "out of the jitted function."
        )
    if isinstance(words, jax.Array) and len(words.sharding.device_set) > 1:
        return dataclasses.replace(stats, words=words.addressable_data(0))  # every device has all counts
    return stats


def read_on_host(stats: Stats) -> Stats:
    """Brings counts to NumPy, with the steps of a scan added (in int64); waits for one transfer."""
    words = np.asarray(move_to_one_device(stats).words)
    if words.ndim > 1:
        steps = words.reshape(-1, words.shape[-1])
        last = steps[-1] if len(steps) else 0
        words = np.where(_is_latest(stats), last, steps.sum(axis=0, dtype=np.int64))
    return dataclasses.replace(stats, words=words)


def _is_latest(stats: Stats) -> np.ndarray:
    """Marks the words of `LATEST` and `TO_DATE`: sums take those of the last step."""
    is_latest = np.zeros(stats.words.shape[-1], bool)
    for name in (*LATEST, *TO_DATE):
        is_latest[_places(stats.stores, stats.num_shards)[name]] = True
    return is_latest


# Writers of scalars ----------------------------------------------------------------------------------------------


def columns(stats: Stats) -> dict[str, np.ndarray]:
    """Returns counts on the host by name: int64 `[..., num_tables or num_stores or 1]`."""
    every = {name: stats.count(name).astype(np.int64) for name in (*PER_TABLE, *PER_STORE, *PER_STEP)}
    return {name: count[..., None] if name in PER_STEP else count for name, count in every.items()}


def scalars_of(stats: Stats, counts: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    """Does `Stats.scalars` for int64 counts `[num_tables or num_stores or 1]` by name, of one step or several."""
    scalars: dict[str, float] = {f"{prefix}/{name}": float(counts[name][0]) for name in PER_STEP}
    stores = np.array(stats.stores)
    for i, table in enumerate(stats.tables):
        of_table = {
            name: float(column[stats.stores[i] if name in PER_STORE else i])
            for name, column in counts.items()
            if name not in PER_STEP
        }
        num_asked = sum(of_table[name] for name in ("num_found", "num_inserted", "num_missing", "num_refused"))
        if num_asked:
            of_table["hit_rate"] = of_table["num_found"] / num_asked
        of_store = float(counts["num_rows"][stores == stats.stores[i]].sum())
        of_table["fill"] = of_store / stats.capacities[i]
        of_table["load"] = of_store / stats.entries[i]
        scalars |= {f"{prefix}/{table}/{name}": value for name, value in of_table.items()}
    return scalars
