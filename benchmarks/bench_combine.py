"""Combining rows into embeddings, and turning gradients of embeddings into gradients of rows.

Question: what do combining and its transpose, which has to group the uses of a row, cost alone?
Workload: W5 (bags of 20), with given rows of the distinct keys.
Limit:    combine: the bare gather with the bags added up. Transpose: its bytes over the bandwidth of a copy (gradients
          of the bags in, once, and of the rows out); grouping is not counted.
Command:  `python -m jaxsok bench --only combine --workloads W5`
Last result: docs/performance.md (H200, commit 7db9096).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import combine

from . import limits, records
from .records import Batches, Recorder
from .timing import Protocol, Step

WORKLOADS = ("W5",)


def measure(batches: Batches, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
    """Measures combine and its transpose, and XLA's, under one key distribution."""
    workload, key_sets = batches.workload, batches.key_sets
    hotness, dim = workload.hotness, workload.dim
    num_bags, num_keys = workload.num_embeddings, workload.num_keys
    num_unique = max(key_set.num_unique for key_set in key_sets)
    offsets = jnp.arange(num_bags + 1, dtype=jnp.int32) * hotness
    inverses = [
        jnp.asarray(np.searchsorted(key_set.unique_rows, key_set.stacked_rows.reshape(-1)).astype(np.int32))
        for key_set in key_sets
    ]
    rows = limits.varied_floats((num_unique, dim))
    gradients = limits.varied_floats((num_bags, dim))

    def add(what, subject, timing, moved, limit_ms):
        recorder.add(batches.record(what, subject, timing, moved_bytes=moved, limit_ms=limit_ms))

    limit, _ = limits.gather(rows, [inverse.reshape(num_bags, hotness) for inverse in inverses], protocol)
    moved = limits.gather_bytes(num_keys, num_unique, num_bags, dim)
    xla = Step(lambda rows, inverse: jnp.take(rows, inverse.reshape(-1, hotness), axis=0).sum(axis=1), donates=False)
    timing, _ = xla.measure(rows, inverses, protocol)
    add(records.COMBINE, "xla", timing, moved, limit.ms)
    ours = Step(lambda rows, inverse: combine.combine(rows, inverse, offsets, "sum"), donates=False)
    timing, _ = ours.measure(rows, inverses, protocol)
    add(records.COMBINE, "jaxsok", timing, moved, limit.ms)

    def scatter(gradients, inverse):
        bags = jax.lax.iota(jnp.int32, num_keys) // hotness
        return jnp.zeros((num_unique, dim), jnp.float32).at[inverse].add(gradients[bags])

    what = f"{records.COMBINE}, transpose"
    timing, _ = Step(scatter, donates=False).measure(gradients, inverses, protocol)
    limit_ms = moved / copy_gb_s * 1e-6
    add(what, "xla", timing, moved, limit_ms)
    ours = Step(
        lambda gradients, inverse: combine.combine_transpose(gradients, inverse, offsets, "sum", num_unique),
        donates=False,
    )
    timing, _ = ours.measure(gradients, inverses, protocol)
    add(what, "jaxsok", timing, moved, limit_ms)
