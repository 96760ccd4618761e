"""The vocabulary as types and constants; everything else imports from here.

A test compares the words with `ffi/core/layout.h`.
"""

from typing import Literal, TypeAlias

from jaxtyping import Array, Int32, UInt8, UInt32

PADDING_KEY: int = 2**64 - 1
"""The one reserved key (int64 -1): it finds nothing, inserts nothing and contributes zeros."""

NO_ROW: int = 2**32 - 1
"""The row id that means "absent"."""

MAX_DIM: int = 1024
"""The widest row that the kernels hold in registers."""

MAX_SLABS: int = 24
"""The most slabs a store can have; doubling from 65,536 rows, 16 slabs reach the last row id."""

MAX_STATES: int = 8
"""The most arrays of optimizer state of a row."""

MAX_FEATURES: int = 1024
"""The most features over one store: their buffers are the kernels' parameters."""

NUM_PARTITIONS: int = 4096
"""Classes of keys by hash; a small map gives the shard of each."""

MAX_CAPACITY: int = 2**31 - 1
"""Row ids stay below 2**31 per shard."""

MAX_ROWS: int = 2**40
"""The most rows that a table may declare, on all shards together."""

ENTRIES_PER_BUCKET: int = 4
BUCKET_WORDS: int = 16
RECORD_WORDS: int = 4
KEY_WORDS: int = 2
REQUEST_WORDS: int = 4
COUNTERS: tuple[str, ...] = (
    "num_allocated",
    "free_begin",
    "free_end",
    "generation",
    "num_unplaced",
    "longest_probe",
    "salt_low",
    "salt_high",
    "num_sightings",
)
"""The words of a store's counters, in order."""

FRESH: int = 2**32 - 1
"""The place of a row in host memory that was never written: it is what its table's initializer says."""

IN_HOST: int = 2**32 - 2
"""The place of a row that only host memory has."""

MAX_SLOTS: int = 2**30 - 1
"""The most rows in the cache of a shard."""

TIER_COUNTERS: tuple[str, ...] = (
    "clock",
    "num_hits",
    "num_fetched",
    "num_written",
    "ticket",
    "num_ahead",
    "num_foreseen",
    "window",
)
"""The words of the counters of a store in host memory, in order."""

COUNTS: tuple[str, ...] = (
    "num_found",
    "num_inserted",
    "num_missing",
    "num_refused",
    "num_padding",
    "num_unadmitted",
)
"""The words of a table's counts, in order; the unadmitted are a part of the refused."""

BAGS_PER_TILE: int = 256
"""Bags of one feature in a thread block."""

NUM_FEATURE_WORDS: int = 12
NUM_TABLE_WORDS: int = 16
NUM_HYPER: int = 8

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
COMBINERS: dict[str | None, int] = {None: 0, "sum": 1, "mean": 2, "sqrtn": 3}

RowGradient: TypeAlias = Literal["sum", "mean", "sqrt"]
ROW_GRADIENTS: dict[str, int] = {"sum": 0, "mean": 1, "sqrt": 2}

RowDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
ROW_DTYPES: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Dtypes of stored rows. Handlers see them by the buffers."""

Rounding: TypeAlias = Literal["nearest", "stochastic"]
ROUNDINGS: dict[str, int] = {"nearest": 0, "stochastic": 1}

Keys: TypeAlias = UInt32[Array, "num_keys 2"]
"""64-bit keys as (low, high) words."""

RowIds: TypeAlias = UInt32[Array, " num_keys"]
TableIds: TypeAlias = UInt32[Array, " num_keys"]
Inverse: TypeAlias = Int32[Array, " num_keys"]

Seed: TypeAlias = UInt32[Array, "2"]
Clock: TypeAlias = UInt32[Array, ""]
"""A step, or the time of a user's own clock."""

Counters: TypeAlias = UInt32[Array, " num_counters"]
TableCounts: TypeAlias = Int32[Array, "num_tables num_counts"]
ByTable: TypeAlias = Int32[Array, " num_tables"]
RowFlags: TypeAlias = UInt8[Array, " capacity"]
PartitionOwners: TypeAlias = UInt32[Array, " num_partitions"]
Digest: TypeAlias = UInt32[Array, "1 2"]
"""Digest of the keys of a batch, for its ticket."""


class TableFullError(RuntimeError):
    """Keys were refused because their store is full."""


class StalePlanError(RuntimeError):
    """An update was given a plan whose rows may have been erased since."""


class NonFiniteGradientError(FloatingPointError):
    """Row gradients were infinite or NaN, and skipped."""
