"""The ticket of a lookup, made and redeemed: it makes a plan act once.

Question: what does a step pay for the check that its plan belongs to its state?
Workload: the keys of W1, W5 and W6.
Limit:    the bytes of keys in over the bandwidth of a copy (`limits.tickets_bytes`).
Command:  `python -m jaxsok bench --only tickets --workloads W1`
Last result: none on a GPU yet; docs/performance.md, "What tickets cost", has a step with tickets and one without.

Nothing else has tickets, so there is no peer.
"""

import jax.numpy as jnp

from jaxsok import tickets
from jaxsok.kernels import tickets as kernels
from jaxsok.types import COUNTERS

from . import limits, records
from .fill import collection_of, pack
from .records import Batches, Recorder
from .timing import Protocol, Step

WORKLOADS = ("W1", "W5", "W6")


def measure(batches: Batches, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
    """Measures issue and redeem under one key distribution."""
    workload, key_sets = batches.workload, batches.key_sets
    collection = collection_of(workload, workload.runs[0].optimizer)
    sets = [pack(collection, workload, key_set.ids) for key_set in key_sets]
    idle = pack(collection, workload, key_sets[0].ids[:, :1])
    lineage = jnp.zeros(2, jnp.uint32)
    counters = [jnp.zeros(len(COUNTERS), jnp.uint32) for _ in collection.stores]

    def step(opened, features):
        keys = [store.keys for store in features.stores]
        opened, ticket = kernels.tickets_issue(opened, lineage, counters, keys, layout=0)
        uses = [(0, s) for s in range(len(counters))]
        opened, is_live, num_misused = kernels.tickets_redeem(opened, counters, [ticket], uses)
        return opened, (is_live, num_misused)

    both = Step(step, donates=True)
    opened, (is_live, num_misused) = both.run(tickets.no_tickets(1), sets[0])
    if not is_live.all() or num_misused:
        raise RuntimeError(f"{workload.name}: the ticket of a lookup was not open in its state.")
    timing, _ = both.measure(opened, sets, protocol, idle)
    moved = limits.tickets_bytes(workload.num_keys)
    limit_ms = moved / copy_gb_s * 1e-6
    recorder.add(batches.record(records.TICKETS, "jaxsok", timing, moved_bytes=moved, limit_ms=limit_ms))
