"""Tickets: a plan acts once, on a descendant of the state that its lookup returned (decision D18).

Row ids mean something only in the state that gave them out, and in the states that came from it. So every lookup makes
a ticket. It goes into the plan and into a ring of open tickets in the state. An update looks for the ticket of each
plan among the open ones and takes it out. A plan whose ticket is not there changes nothing and is counted: it belongs
to another branch, was used before, or is older than the last `RING` lookups of the state.

A ticket is a hash of the ticket before it, of the state's lineage and of the keys looked up, each with its position. So
two branches of one state have different tickets as soon as their batches differ. Branches that look up the same keys
make the same rows and the same ticket, and either plan is right for both. On a mesh the digests of all shards are
exchanged with the requests (exchange.py), every shard holds the same ring, and all shards decide alike.

Lookups and updates call this module; `find` does not, and `gradient_norm` looks without taking the ticket out.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from jaxsok import plan as plan_lib
from jaxsok.features import Features
from jaxsok.plan import Plan
from jaxsok.store import State

RING = 256  # open tickets of a state: as many lookups may come between a lookup and its update

Tickets = UInt32[Array, "num_shards num_tickets_plus_1 2"]
"""For each shard the same lines: the ticket of the last lookup, then the open ones, newest first; zeros where none."""


def no_tickets(num_shards: int) -> Tickets:
    """The tickets of a new state: none is open."""
    return jnp.zeros((num_shards, 1 + RING, 2), jnp.uint32)


def issue(state: State, running: Tickets, features: Features) -> tuple[Tickets, UInt32[Array, "1 2"]]:
    """Makes the ticket of a lookup.

    Args:
      state: before the lookup.
      running: its tickets, the digest of the batch's keys added to the first line.
      features: of the batch; the boundaries between its features take part in the ticket.

    Returns:
      The tickets after the lookup, and the new one.

    Cost:
      One small kernel.
    """
    layouts = [[(one.table, one.key_start, one.num_keys) for one in part.layouts] for part in features.stores]
    return _issue(running, state.lineage, np.uint32(zlib.crc32(repr(layouts).encode())))


@functools.partial(jax.jit, inline=True)  # one call where a user does not jit the step
def _issue(running: Tickets, lineage: UInt32[Array, "2"], layout: Any) -> tuple[Tickets, UInt32[Array, "1 2"]]:
    low, high = running[:, 0, 0] ^ lineage[0] ^ layout, running[:, 0, 1] ^ lineage[1]
    low, high = plan_lib.mixed_words(*plan_lib.plus(low, high, 1))
    ticket = jnp.stack([low | jnp.uint32(1), high], axis=-1)  # never zeros, which stand for none
    line = ticket[:, None, :]
    return jnp.concatenate([line, line, running[:, 1:-1]], axis=1), ticket


def redeem(tickets: Tickets, plans: Sequence[Plan]) -> tuple[Tickets, list[Bool[Array, ""]]]:
    """Takes the tickets of plans out of the open ones.

    Args:
      tickets: of a state.
      plans: of lookups, in the order in which they are used.

    Returns:
      The tickets that stay open, and for each plan whether its ticket was open. Of two plans with one ticket the first
      has it.
    """
    found = []
    for plan in plans:
        tickets, is_open = _redeem(tickets, plan.ticket)
        found.append(is_open)
    return tickets, found


@functools.partial(jax.jit, inline=True)
def _redeem(tickets: Tickets, ticket: UInt32[Array, "1 2"]) -> tuple[Tickets, Bool[Array, ""]]:
    is_open_line = np.arange(1 + RING)[None, :] > 0
    # Word by word: a reduction over the two words would be a kernel more.
    is_same = (tickets[..., 0] == ticket[:, :1]) & (tickets[..., 1] == ticket[:, 1:]) & is_open_line
    return jnp.where(is_same[..., None], jnp.uint32(0), tickets), is_same.any()
