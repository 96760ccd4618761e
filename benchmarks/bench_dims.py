"""Rows of every width: do odd dims lose, do wide rows keep the bandwidth, what do 16 bits gain?

Question: which share of a copy's bandwidth do find + gather and a step reach, by dim and by dtype of the rows?
Workload: one table, 1 Mi uniform keys a call without bags, all present; as many rows as 4 GiB of float32 hold, between
          4 and 32 Mi; SGD and rowwise Adagrad.
          One program runs all key sets, so that the host's dispatch weighs a third.
Limit:    bytes of `limits.forward_bytes` and `limits.update_bytes` at the bandwidth of a copy.
Command:  `python -m jaxsok bench --only dims`
Last result: docs/performance.md (H200, commit 7db9096).

36 and 68 are there as the next multiples of 4 of 33 and 65. A dtype that this version does not know is skipped.
"""

import gc

import numpy as np

from . import limits, records
from .one_table import OneTable, draw
from .records import Record, Recorder
from .timing import Protocol
from .workloads import state_dims

DIMS = (64, 63, 65, 68, 33, 36, 128, 127, 126, 512, 1024, 256, 100, 32, 16, 8)
"""The order of measurement: dims that targets name come first."""

NARROW = (("bfloat16", 128), ("bfloat16", 64), ("float16", 128), ("float16", 64))
"""Dtypes and dims of rows of 16 bits."""

OPTIMIZERS = ("rowwise_adagrad", "sgd")

NUM_KEYS = 1 << 20
ROW_BYTES = 4 << 30
LEAST_ROWS, MOST_ROWS = 4 << 20, 32 << 20


def measure(
    recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, scale: float, is_quick: bool = False
) -> None:
    """Measures every dim; find + gather under the first optimizer, the step under each."""
    chosen = [("float32", dim) for dim in DIMS]
    chosen[7:7] = NARROW
    if is_quick:
        chosen = [("float32", 8), ("float32", 33), NARROW[1]]
    for dtype, dim in chosen:
        label = f"dims {dim} {dtype}"
        if not recorder.has_time(label):
            continue
        num_rows = max(16, round(rows_of(dim) * scale))
        try:
            tables = [OneTable(num_rows, dim, optimizer, dtype) for optimizer in OPTIMIZERS]
        except (TypeError, ValueError) as error:
            if dtype == "float32":
                raise
            recorder.skip(label, f"not supported by this version ({error})")
            continue
        for table in tables:
            with recorder.attempt(f"{label} {table.optimizer}"):
                _measure(table, dtype, recorder, protocol, seed, copy_gb_s, max(16, round(NUM_KEYS * scale)))
            table.state = None
            gc.collect()


def rows_of(dim: int) -> int:
    """Returns the number of rows: that of the next multiple of 4, so that both dims have the same index.

    Example:
      >>> rows_of(63) == rows_of(64) == 16 << 20
      True
    """
    row_bytes = -(-dim // 4) * 4 * limits.FLOAT_BYTES
    return min(MOST_ROWS, max(LEAST_ROWS, ROW_BYTES // row_bytes))


def _measure(table, dtype, recorder, protocol, seed, copy_gb_s, num_keys) -> None:
    table.fill(4 * num_keys)
    id_sets = draw(table.num_rows, num_keys, protocol.num_key_sets, seed)
    num_unique = np.unique(id_sets[0]).size
    shape = (num_keys, num_unique, num_keys, table.dim)
    itemsize = table.store.rows[0].dtype.itemsize
    whats = (records.FIND_AND_GATHER, records.STEP) if table.optimizer == OPTIMIZERS[0] else (records.STEP,)
    for what in whats:
        timing = table.measure_in_a_row(what, table.inputs(what, id_sets), protocol)
        moved = limits.forward_bytes(*shape, training=what == records.STEP, itemsize=itemsize)
        if what == records.STEP:
            moved += limits.update_bytes(*shape, state_dims(table.optimizer, table.dim), itemsize)
        recorder.add(
            Record(
                "dims",
                what,
                "jaxsok",
                timing,
                optimizer=table.optimizer if what == records.STEP else "",
                variant=f"{table.dim} {dtype}",
                num_keys=num_keys,
                num_unique=num_unique,
                moved_bytes=moved,
                limit_ms=moved / copy_gb_s * 1e-6,
                load=table.load,
                notes={"part": "dims", "dim": table.dim, "dtype": dtype, "num_rows": table.num_rows},
            )
        )
