"""A training step with tickets and without: what a step pays for the check that its plan belongs to its state.

Question: is a plan that acts once, on the right state, worth its time?
Workload: the tables and keys of W1 and W6, all keys present; steps with and without, in turn.
Limit:    the step without tickets. Its lookup kernel still adds up the digest of the keys.
Command:  `python -m jaxsok bench --only tickets --workloads W1`
Last result: docs/performance.md, "What tickets cost".

Nothing else has tickets, so there is no peer.
"""

import contextlib
import statistics
from collections.abc import Iterator

import jax.numpy as jnp

from jaxsok.kernels import tickets as kernels

from . import records
from .fill import Filled, programs_of
from .records import Batches, Recorder
from .timing import Protocol

WORKLOADS = ("W1", "W6")

NUM_RUNS = 5
"""Measurements of each of the two; the one with the median time is recorded."""


def measure(filled: Filled, batches: Batches, recorder: Recorder, protocol: Protocol) -> None:
    """Measures both steps under one key distribution."""
    sets = filled.inputs(records.STEP, [key_set.ids for key_set in batches.key_sets])
    steps = {what: programs_of(filled.collection)[records.STEP] for what in (records.TICKETS, records.NO_TICKETS)}
    timings = {what: [] for what in steps}
    for _ in range(NUM_RUNS):
        for what, step in steps.items():
            with _without_tickets() if what == records.NO_TICKETS else contextlib.nullcontext():
                timing, filled.state = step.measure(filled.state, sets, protocol)
            timings[what].append(timing)
    for what, all_of_one in timings.items():
        median = statistics.median_low(timing.ms for timing in all_of_one)
        timing = next(timing for timing in all_of_one if timing.ms == median)
        recorder.add(batches.record(what, "jaxsok", timing, optimizer=filled.optimizer))


@contextlib.contextmanager
def _without_tickets() -> Iterator[None]:
    """Programs that are traced inside have no calls for tickets: every plan acts."""

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
