"""A training step with and without tickets: the cost of the check that a plan belongs to its state.

Question: is a plan that acts once, on the right state, worth its time?
Workload: the tables and keys of W1 and W6, all keys present; steps with and without, in turn.
Limit:    the step without tickets. Its lookup kernel still adds up the digest of the keys.
Command:  `python -m jaxsok bench --only tickets --workloads W1`
Last result: docs/performance.md, "What tickets cost".

Nothing else has tickets, so there is no peer.
"""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp

from jaxsok.kernels import tickets as kernels

from . import records
from .fill import Filled, programs_of
from .records import Batches, Recorder
from .timing import Protocol, Timing

WORKLOADS = ("W1", "W6")

NUM_RUNS = 5
"""Measurements of each of the two; the median counts."""


def measure(filled: Filled, batches: Batches, recorder: Recorder, protocol: Protocol) -> None:
    """Measures both steps under one key distribution."""
    sets = filled.inputs(records.STEP, [key_set.ids for key_set in batches.key_sets])
    steps = [programs_of(filled.collection)[records.STEP] for _ in range(2)]
    timings: list[list[Timing]] = [[], []]
    for _ in range(NUM_RUNS):
        for way, step, of_way in zip((contextlib.nullcontext(), _without_tickets()), steps, timings, strict=True):
            with way:
                timing, filled.state = step.measure(filled.state, sets, protocol)
            of_way.append(timing)
    with_tickets, without = (sorted(of_way, key=lambda timing: timing.ms)[NUM_RUNS // 2] for of_way in timings)
    recorder.add(
        batches.record(records.TICKETS, "jaxsok", with_tickets, optimizer=filled.optimizer, limit_ms=without.ms)
    )


@contextlib.contextmanager
def _without_tickets() -> Iterator[None]:
    """Removes the calls for tickets from programs that are traced inside, so every plan acts."""

    def issue(tickets, lineage, counters, digests, *, layout):
        return tickets, jnp.zeros((1, kernels.NUM_TICKET_WORDS + len(counters)), jnp.uint32)

    def redeem(tickets, counters, plans, uses):
        return tickets, jnp.ones(len(plans), bool), jnp.int32(0)

    before = kernels.tickets_issue, kernels.tickets_redeem
    kernels.tickets_issue, kernels.tickets_redeem = issue, redeem
    try:
        yield
    finally:
        kernels.tickets_issue, kernels.tickets_redeem = before
