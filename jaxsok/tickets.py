"""Tickets: a plan acts once, on a descendant of the state that its lookup returned (decision D18).

Row ids mean something only in the state that gave them out, and in the states that came from it. So every lookup makes
a ticket, for the plan and for a ring of open tickets in the state. An update looks for each plan's ticket among the
open ones and takes it out. A plan without an open ticket changes nothing and is counted: it belongs to another branch,
was used before, or is older than the last `RING` lookups of the state.

A ticket is a hash of the ticket before it, of the state's lineage and of the keys looked up, each with its position. So
two branches of one state have different tickets as soon as their batches differ. On a mesh the digests of all shards
are exchanged with the requests (exchange.py), every shard holds the same ring, and all shards decide alike.
"""

import zlib
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok.features import Features
from jaxsok.kernels import tickets as kernels
from jaxsok.plan import Plan
from jaxsok.store import State, StoreState
from jaxsok.types import Digest

RING = 256  # open tickets of a state: as many lookups may come between a lookup and its update
NUM_LINES = kernels.NUM_TICKET_LINES + RING

Tickets = UInt32[Array, "num_shards num_lines 2"]
"""The tickets, the same on each shard: the last lookup's ticket, the number of lookups, and a ring of open tickets, in
which a lookup overwrites the oldest; zeros where none is open."""


def no_tickets(num_shards: int) -> Tickets:
    """Returns the tickets of a new state: none is open."""
    return jnp.zeros((num_shards, NUM_LINES, 2), jnp.uint32)


def issue(
    state: State, stores: Sequence[StoreState], features: Features, digests: Sequence[Digest]
) -> tuple[Tickets, kernels.Ticket]:
    """Makes the ticket of a lookup: returns the tickets after it, and the new one.

    `state` is from before the lookup, and its tickets are donated; `stores` are from after it. `digests` are of the
    keys looked up, by store, over all shards if they were exchanged.
    """
    layouts = [[(each.table, each.key_start, each.num_keys) for each in part.layouts] for part in features.stores]
    layout = zlib.crc32(repr(layouts).encode())
    counters = [store.counters for store in stores]
    return kernels.tickets_issue(state.tickets, state.lineage, counters, digests, layout=layout)


def redeem(state: State, plans: Sequence[Plan]) -> tuple[Tickets, Bool[Array, " num_plans"], Int32[Array, ""]]:
    """Takes the tickets of plans, in the order of their use, out of the state's open tickets, which are donated.

    Also marks the plans that act: their ticket is open, and no row of their stores has left since their lookup; and
    counts those without an open ticket. A plan over several stores acts as a whole or not at all. Of two plans with one
    ticket the first has it.
    """
    uses = [(p, s) for p, plan in enumerate(plans) for s, part in enumerate(plan.features.stores) if part.layouts]
    counters = [store.counters for store in state.stores]
    return kernels.tickets_redeem(state.tickets, counters, [plan.ticket for plan in plans], uses)
