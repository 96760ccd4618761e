"""Admission and eviction policies, declared.

`lookup` admits (ffi/core/admission.h), `evict.py` ranks rows and takes them away. A policy is frozen and hashable, so
that specs can hold it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxsok import checks
from jaxsok.types import Clock, Keys

MAX_SIGHTINGS = 255  # what a counter of the Bloom filter holds
MAX_BLOOM_COUNTERS = 2**32 - 4  # of a table: their places are 32-bit numbers


def _check_unadmitted(what: str, value: Any) -> Any:
    if value == "initial":
        return value
    return checks.number(what, value, -checks.LARGEST_FLOAT32, checks.LARGEST_FLOAT32, 'a finite float32 or "initial"')


# Admission -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Admission:
    """Decides which unseen keys get a row; the others are refused, and counted as `num_unadmitted`.

    A key without admission reads `unadmitted` and learns nothing. Use `AdmitByCount`, `AdmitByBloom` or
    `AdmitByProbability`.
    """

    kind: ClassVar[int] = 0
    """AdmissionKind in ffi/core/layout.h."""

    @property
    def threshold(self) -> int:
        """Sightings that it takes, or the probability times 2**32, as the kernels compare it."""
        return 1

    _: dataclasses.KW_ONLY
    unadmitted: float | Literal["initial"] = checks.declare(0.0, _check_unadmitted)
    """Each number that a key without admission reads; "initial": the row that it would get. Keys without a row read it
    in `lookup`, also where the store is full; in `find` they read the table's `unknown`."""

    def __post_init__(self) -> None:
        checks.check_fields(self, f"policies.{type(self).__name__}")


@dataclasses.dataclass(frozen=True)
class _BySightings(Admission):
    """Admission of keys that were seen often enough."""

    most: ClassVar[int]
    num_sightings: int = 2
    delayed: bool = dataclasses.field(default=False, kw_only=True)
    """True lets the `num_sightings`-th occurrence still read `unadmitted`, and the next one get the row, as with
    DeepRec's filters: with a key once in a batch, lookups 1 to num_sightings read it; else 1 to num_sightings - 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.field(self, f"policies.{type(self).__name__}", "delayed", checks.flag)
        most = self.most - self.delayed
        checks.field(self, f"policies.{type(self).__name__}", "num_sightings", checks.integer, 1, most)

    @property
    def threshold(self) -> int:
        """The occurrence that gets a row."""
        return self.num_sightings + self.delayed


@dataclasses.dataclass(frozen=True)
class AdmitByCount(_BySightings):
    """A key gets a row in the batch of its `num_sightings`-th occurrence, for all uses of that batch.

    With `delayed` it is the batch of the occurrence after that one. Occurrences are counted exactly, in 32 to 128 bytes
    for each waiting key; `grow` makes room for more. The count of a key starts at 0 again when it is erased, with a row
    or without, or its row is evicted. So does that of a key with enough sightings that found the store full, when rows
    of its shard go; and that of a waiting key that got a row by `assign` or an import, when that row goes.
    """

    kind: ClassVar[int] = 1
    most: ClassVar[int] = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AdmitByBloom(_BySightings):
    """Admission as by `AdmitByCount`, with a counting Bloom filter: memory is bounded, and a few keys come in early.

    Once `num_keys` different keys have been seen, an unseen key is taken for one of them with `false_positive_rate`;
    beyond it more often. A shard counts the keys that it owns. Counts never go back: a key whose row was evicted is
    admitted again at its next sighting, with a new row.

    Source: L. Fan et al., Summary Cache, 2000 (counting Bloom filters); DeepRec's CBFFilter.
    """

    kind: ClassVar[int] = 2
    most: ClassVar[int] = MAX_SIGHTINGS
    num_keys: int = checks.declare(1_000_000, checks.integer, low=1, high=2**31 - 1)
    """Different keys expected, on all shards together."""
    false_positive_rate: float = checks.declare(0.01, checks.number, low=1e-9, high=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_counters(self.num_keys) > MAX_BLOOM_COUNTERS:
            raise ValueError(
                f"policies.AdmitByBloom: num_keys: got {self.num_keys} at a false_positive_rate of "
                f"{self.false_positive_rate}, which take {self.num_counters(self.num_keys)} counters, wanted at most "
                f"{MAX_BLOOM_COUNTERS}; raise the rate or expect fewer keys."
            )

    @property
    def num_hashes(self) -> int:
        """Counters that a key increments."""
        return max(1, round(-math.log2(self.false_positive_rate)))

    def num_counters(self, num_keys: int) -> int:
        """Returns the number of counters, of one byte each, for `num_keys` keys: a multiple of 4."""
        bits = -num_keys * math.log(self.false_positive_rate) / math.log(2) ** 2
        return max(64, -(-math.ceil(bits) // 4) * 4)


@dataclasses.dataclass(frozen=True)
class AdmitByProbability(Admission):
    """An unseen key gets a row with a probability, drawn at each step from (seed, table, key, step).

    Source: SOK's low-frequency filter (`filter_ratio`).
    """

    kind: ClassVar[int] = 3
    probability: float = checks.declare(0.5, checks.number, low=0.0, high=1.0)

    @property
    def threshold(self) -> int:
        """The probability in 32 bits; 2**32 for certainty."""
        return int(self.probability * 2**32)


# Eviction ------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowFacts:
    """The facts that a policy sees of each row of a slab; some rows may not be in use."""

    keys: Keys
    last_step: UInt32[Array, " num_rows"]
    """The step (or the user's clock) of the last lookup that used the row."""
    frequency: UInt32[Array, " num_rows"]
    """Occurrences in lookups since the row was made, at most 2**32 - 1."""
    rows: Float[Array, "num_rows dim"]
    clock: Clock
    """Now: the state's step, or the user's clock."""


Scores = UInt32[Array, " num_rows"] | tuple[UInt32[Array, " num_rows"], UInt32[Array, " num_rows"]]
"""Rows with the lowest score leave first; of two arrays the first is more significant. Ties break by (table, key)."""


@dataclasses.dataclass(frozen=True)
class Eviction:
    """Decides which rows leave: expired rows (`expired`), or those of lowest score, down to a budget of rows."""

    needs_statistics: ClassVar[bool] = True
    has_score: ClassVar[bool] = True
    """True if `scores` ranks rows; otherwise `expired` decides."""

    def __post_init__(self) -> None:
        checks.check_fields(self, f"policies.{type(self).__name__}")

    def scores(self, facts: RowFacts) -> Scores:
        """Ranks rows: a pure JAX function, row by row."""
        raise TypeError(f"evict: policy: got {self!r}, which ranks no rows; use one with a score.")

    def expired(self, facts: RowFacts) -> Bool[Array, " num_rows"]:
        """Marks the rows whose time has come: a pure JAX function, row by row."""
        raise TypeError(f"evict: policy: got {self!r}, whose rows do not expire; say how many shall stay.")

    def check(self, op: str, dim: int, dtype: str) -> None:
        """Refuses scores or marks, which may be the user's own, that are of another form for rows of a table."""
        word = jax.ShapeDtypeStruct((3,), jnp.uint32)
        keys, rows = word.update(shape=(3, 2)), jax.ShapeDtypeStruct((3, dim), dtype)
        facts = RowFacts(keys, word, word, rows, word.update(shape=()))
        judge = self.scores if self.has_score else self.expired
        jax.eval_shape(lambda facts: self.check_judged(op, judge(facts), 3), facts)

    def check_judged(self, op: str, judged: Any, num_rows: int) -> tuple[Array, ...]:
        """Checks scores or marks; returns one or two arrays of scores, or a mask of bytes."""
        words = judged if self.has_score and isinstance(judged, tuple) else (judged,)
        what, wanted, more = "", f"bool[{num_rows}]", ""
        if self.has_score:
            what, wanted, more = "scores ", f"uint32[{num_rows}]", ", or two of them"
        for word in words:
            got = f"{word.dtype}{list(word.shape)}" if hasattr(word, "dtype") else type(word).__name__
            if got != wanted:
                raise TypeError(f"{op}: got {what}{got} of {self!r}, wanted {wanted}{more}.")
        if not 1 <= len(words) <= 2:
            raise TypeError(f"{op}: got {len(words)} scores of {self!r}, wanted {wanted}, or two.")
        return words if self.has_score else (judged.astype(jnp.uint8),)


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed(Eviction):
    """Rows leave in the order of their last use."""

    def scores(self, facts: RowFacts) -> Scores:
        return facts.last_step


@dataclasses.dataclass(frozen=True)
class LeastFrequentlyUsed(Eviction):
    """Rows leave in the order of their number of uses, then least recently used first."""

    def scores(self, facts: RowFacts) -> Scores:
        return facts.frequency, facts.last_step


@dataclasses.dataclass(frozen=True)
class EpochLeastFrequentlyUsed(Eviction):
    """Rows not used in the latest epochs leave first; within an epoch those with the fewest uses.

    Source: HierarchicalKV's kEpochLfu.
    """

    epoch_steps: int = checks.declare(1000, checks.integer, low=1, high=2**31 - 1)
    """Steps (or ticks of the user's clock) of an epoch."""

    def scores(self, facts: RowFacts) -> Scores:
        return facts.last_step // jnp.uint32(self.epoch_steps), facts.frequency


@dataclasses.dataclass(frozen=True)
class EpochLeastRecentlyUsed(Eviction):
    """Rows not used in the latest epochs leave first; within an epoch in the order of the keys: a coarse, cheap clock.

    Source: HierarchicalKV's kEpochLru.
    """

    epoch_steps: int = checks.declare(1000, checks.integer, low=1, high=2**31 - 1)

    def scores(self, facts: RowFacts) -> Scores:
        return facts.last_step // jnp.uint32(self.epoch_steps)


@dataclasses.dataclass(frozen=True)
class LowestScore(Eviction):
    """Rows leave in the order of a score of the user's own."""

    score: Callable[[RowFacts], Scores] | None = None
    """A pure JAX function of module level, so that equal specs compare equal."""

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise TypeError(f"policies.LowestScore: score: got {self.score!r}, wanted a function of RowFacts.")

    def scores(self, facts: RowFacts) -> Scores:
        assert self.score is not None
        return self.score(facts)


@dataclasses.dataclass(frozen=True)
class TimeToLive(Eviction):
    """Rows that were not used for more than `steps` steps (or ticks of the user's clock) leave.

    Source: DeepRec's GlobalStepEvict.
    """

    has_score: ClassVar[bool] = False
    steps: int = checks.declare(1000, checks.integer, low=0, high=2**31 - 1)

    def expired(self, facts: RowFacts) -> Bool[Array, " num_rows"]:
        # A last use ahead of the clock does not expire.
        age = facts.clock - facts.last_step
        return (facts.clock >= facts.last_step) & (age > jnp.uint32(self.steps))


@dataclasses.dataclass(frozen=True)
class SmallNorm(Eviction):
    """Rows whose L2 norm is below a threshold leave. Needs no statistics.

    Source: DeepRec's L2WeightEvict.
    """

    needs_statistics: ClassVar[bool] = False
    has_score: ClassVar[bool] = False
    threshold: float = checks.declare(1e-6, checks.number, low=0.0, high=math.inf)

    def expired(self, facts: RowFacts) -> Bool[Array, " num_rows"]:
        rows = facts.rows.astype(jnp.float32)
        return jnp.sqrt((rows * rows).sum(axis=1)) < jnp.float32(self.threshold)
