"""Doors of the tickets noun: a lookup opens a ticket, an update redeems it (tickets.py)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok.kernels.call import call, result
from jaxsok.types import Counters, Digest, Keys

NUM_TICKET_LINES = 2
"""Entries of a state's tickets before the open ones: the last ticket, and the number of lookups (`TicketsView`)."""
NUM_TICKET_WORDS = 2
"""Words of a ticket before the generations of stores."""

Ticket = UInt32[Array, "1 num_words"]
"""Low word, high word, and the generation of each store."""


def tickets_digest(keys: Keys) -> Digest:
    """Computes the digest of a batch's keys. See `LaunchTicketsDigest`."""
    return call("jaxsok_tickets_digest", {"keys": keys}, {"digest": result(keys, (1, 2), "uint32")})["digest"]


def tickets_issue(
    tickets: UInt32[Array, "1 num_lines 2"],
    lineage: UInt32[Array, "2"],
    counters: Sequence[Counters],
    digests: Sequence[Digest],
    *,
    layout: int,
) -> tuple[UInt32[Array, "1 num_lines 2"], Ticket]:
    """Makes the ticket of a lookup and opens it; donates the tickets. See `LaunchTicketsIssue` in tickets.h."""
    operands = {"tickets": tickets, "lineage": lineage, "counters": counters, "digests": digests}
    results = {"ticket": result(tickets, (1, NUM_TICKET_WORDS + len(counters)), "uint32")}
    words = np.uint32(layout).astype(np.int32)
    out = call("jaxsok_tickets_issue", operands, results, in_place=("tickets",), layout=words)
    return out["tickets"], out["ticket"]


def tickets_redeem(
    tickets: UInt32[Array, "1 num_lines 2"],
    counters: Sequence[Counters],
    plans: Sequence[Ticket],
    uses: Sequence[tuple[int, int]],
) -> tuple[UInt32[Array, "1 num_lines 2"], Bool[Array, " num_plans"], Int32[Array, ""]]:
    """Takes the tickets of plans out of the open, donated ones; returns tickets, is_live and num_misused.

    `uses` are pairs: number of a plan, number of a store that it used. See `LaunchTicketsRedeem` in tickets.h.
    """
    operands = {"tickets": tickets, "counters": counters, "plans": plans}
    results = {"is_live": result(tickets, (len(plans),), "bool"), "num_misused": result(tickets, (), "int32")}
    plan_of_use, store_of_use = np.array(uses, np.int32).reshape(-1, 2).T
    attributes = {"plan_of_use": plan_of_use, "store_of_use": store_of_use}
    out = call("jaxsok_tickets_redeem", operands, results, in_place=("tickets",), **attributes)
    return out["tickets"], out["is_live"], out["num_misused"]
