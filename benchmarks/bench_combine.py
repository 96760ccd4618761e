"""Turning gradients of embeddings into gradients of rows: the transpose of combining.

Question: what does the transpose, which has to group the uses of a row, cost alone?
Workload: W5 (bags of 20), with the gradients of all bags.
Limit:    its bytes over the bandwidth of a copy (gradients of the bags in, once, and of the rows out); grouping is not
          counted.
Command:  `python -m jaxsok bench --only combine --workloads W5`
Last result: docs/performance.md (H200, commit 3ba843f4).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok.features import FeatureLayout
from jaxsok.kernels import combine

from . import limits, records
from .records import Batches, Recorder
from .timing import Protocol, Step

WORKLOADS = ("W5",)


def measure(batches: Batches, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
    """Measures the transpose, and XLA's scatter-add, under one key distribution."""
    workload, key_sets = batches.workload, batches.key_sets
    hotness, dim = workload.hotness, workload.dim
    num_bags, num_keys = workload.num_embeddings, workload.num_keys
    num_unique = max(key_set.num_unique for key_set in key_sets)
    layout = FeatureLayout(
        name="bags",
        table=0,
        combiner="sum",
        num_keys=num_keys,
        num_bags=num_bags,
        hotness=0,
        embedding_shape=(num_bags,),
        num_offsets=num_bags + 1,
    )
    offsets = jnp.arange(num_bags + 1, dtype=jnp.int32) * hotness
    bags = offsets, jnp.zeros(0, jnp.float32), np.array([layout.words()], np.int32)
    inverses = [
        jnp.asarray(np.searchsorted(key_set.unique_rows, key_set.stacked_rows.reshape(-1)).astype(np.int32))
        for key_set in key_sets
    ]
    gradients = limits.varied_floats((num_bags, dim))

    def scatter(gradients, inverse):
        of_key = jax.lax.iota(jnp.int32, num_keys) // hotness
        return jnp.zeros((num_unique, dim), jnp.float32).at[inverse].add(gradients[of_key])

    def transpose(gradients, inverse):
        return combine.combine_transpose([gradients], inverse, bags, num_unique, layout.num_tiles)[0]

    moved = limits.gather_bytes(num_keys, num_unique, num_bags, dim)
    limit_ms = moved / copy_gb_s * 1e-6
    for subject, function in (("xla", scatter), ("jaxsok", transpose)):
        timing, _ = Step(function, donates=False).measure(gradients, inverses, protocol)
        recorder.add(batches.record(records.TRANSPOSE, subject, timing, moved_bytes=moved, limit_ms=limit_ms))
