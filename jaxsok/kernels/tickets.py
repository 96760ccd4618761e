"""Doors of the tickets noun: a lookup opens a ticket, an update redeems it (tickets.py)."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.table import result
from jaxsok.types import Keys

NUM_TICKET_LINES = 2
"""Lines of a state's tickets before the open ones: the last ticket, and the number of lookups (`TicketsView`)."""
NUM_TICKET_WORDS = 2
"""Words of a ticket before the generations of stores."""

Counters = UInt32[Array, " num_counters"]
Ticket = UInt32[Array, "1 num_words"]
"""Low word, high word, and the generation of each store."""


def tickets_digest(keys: Keys) -> UInt32[Array, "1 2"]:
    """The digest of a batch's keys. See `LaunchTicketsDigest`."""
    library.register()
    call = jax.ffi.ffi_call("jaxsok_tickets_digest", result(keys, (1, 2), "uint32"))
    return call(keys)


def tickets_issue(
    tickets: UInt32[Array, "1 num_lines 2"],
    lineage: UInt32[Array, "2"],
    counters: Sequence[Counters],
    digests: Sequence[UInt32[Array, "1 2"]],
    *,
    layout: int,
) -> tuple[UInt32[Array, "1 num_lines 2"], Ticket]:
    """Makes the ticket of a lookup and opens it. See `LaunchTicketsIssue` in ffi/kernels/tickets.h.

    Args:
      tickets: donated.
      lineage: of the state.
      counters: of all stores.
      digests: of the keys that are looked up, in any number of parts.
      layout: mixed into the ticket, a number of 32 bits.

    Returns:
      tickets, ticket.
    """
    library.register()
    results = jax.typeof(tickets), result(tickets, (1, NUM_TICKET_WORDS + len(counters)), "uint32")
    call = jax.ffi.ffi_call("jaxsok_tickets_issue", results, input_output_aliases={0: 0})
    return tuple(call(tickets, lineage, *counters, *digests, layout=np.uint32(layout).astype(np.int32)))


def tickets_redeem(
    tickets: UInt32[Array, "1 num_lines 2"],
    counters: Sequence[Counters],
    plans: Sequence[Ticket],
    uses: Sequence[tuple[int, int]],
) -> tuple[UInt32[Array, "1 num_lines 2"], Bool[Array, " num_plans"], Int32[Array, ""]]:
    """Takes the tickets of plans out of the open ones. See `LaunchTicketsRedeem` in ffi/kernels/tickets.h.

    Args:
      tickets: donated.
      counters: of all stores.
      plans: the ticket of each.
      uses: number of a plan, number of a store that it used.

    Returns:
      tickets, is_live, num_misused.
    """
    library.register()
    results = jax.typeof(tickets), result(tickets, (len(plans),), "bool"), result(tickets, (), "int32")
    call = jax.ffi.ffi_call("jaxsok_tickets_redeem", results, input_output_aliases={0: 0})
    plan_of_use, store_of_use = np.array(uses, np.int32).reshape(-1, 2).T
    return tuple(call(tickets, *counters, *plans, plan_of_use=plan_of_use, store_of_use=store_of_use))
