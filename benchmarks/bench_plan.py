"""The distinct keys of a batch, apart from any table: what each shard of a mesh makes before it exchanges keys.

Question: what do the requests of a batch cost, with one owner for all?
Workload: the keys of W1, W5 and W6.
Limit:    the bytes of keys in and plan out over the bandwidth of a copy (`limits.plan_bytes`); the scratch index that
          finds equal keys comes on top, and a sort in its place would move more.
Command:  `python -m jaxsok bench --only plan --workloads W1`
Last result: docs/performance.md (H200, commit 3ba843f4).

The peer is `jnp.unique` of the static rows with inverse and counts, which sorts: 32 bits a key where jaxsok has 64 and
a table.
"""

import jax
import jax.numpy as jnp

from jaxsok import plan as plan_lib

from . import limits, records
from .fill import collection_of, pack
from .records import Batches, Recorder
from .timing import Protocol, Step

WORKLOADS = ("W1", "W5", "W6")


def measure(batches: Batches, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
    """Measures requests and their peer under one key distribution."""
    workload, key_sets = batches.workload, batches.key_sets
    collection = collection_of(workload, workload.runs[0].optimizer)
    sets = [pack(collection, workload, key_set.ids) for key_set in key_sets]
    idle = pack(collection, workload, key_sets[0].ids[:, :1])
    owners = jnp.asarray(plan_lib.default_owners(1))

    def request(_, features):
        parts = zip(collection.stores, features.stores, strict=True)
        return [plan_lib.requests_of(spec, part, owners) for spec, part in parts if part.layouts]

    plan = Step(request, donates=False)
    _, requests = plan.run((), sets[0])
    found = sum(int(jax.device_get(of_store.starts)[-1]) for of_store in requests)
    if found != key_sets[0].num_unique:
        raise RuntimeError(f"{workload.name}: plan found {found} distinct keys, wanted {key_sets[0].num_unique}.")
    timing, _ = plan.measure((), sets, protocol, idle)

    def unique(_, rows):
        return jnp.unique(rows, return_inverse=True, return_counts=True, size=rows.size, fill_value=-1)

    rows = [jnp.asarray(key_set.stacked_rows.reshape(-1)) for key_set in key_sets]
    xla, _ = Step(unique, donates=False).measure((), rows, protocol, rows[0][: workload.num_tables])
    moved = limits.plan_bytes(workload.num_keys)
    for subject, measured in (("xla", xla), ("jaxsok", timing)):
        limit_ms = moved / copy_gb_s * 1e-6
        recorder.add(batches.record(records.PLAN, subject, measured, moved_bytes=moved, limit_ms=limit_ms))
