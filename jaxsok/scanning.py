"""A `lax.scan` over several steps with lookups ahead.

A step with lookups ahead takes a state with the lookup of its batch in flight, and returns one with the next. The first
step has none to take, and in a call without lookups ahead only the first takes one. So only a first step changes the
structure of the state: `scan` runs it before the loop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsok.plan import Plan
from jaxsok.store import State


def scan(step: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, unroll: int | bool = 1) -> tuple[Any, Any]:
    """Does `lax.scan(step, init, xs)` where the first step may begin or end lookups ahead.

    `pipeline(..., lookahead=1, steps_per_call=n)` needs it; without lookups ahead it is `lax.scan`. Where the state
    drains (`Collection.drain`), no step of the call looks anything up ahead.

    Args:
      step: (carry, x) to (carry, y). Traced once more than by `lax.scan`.
      init: a pytree with the state of a collection, as for `lax.scan`.
      xs: a pytree of arrays and plans, stacked along a leading axis.
      unroll: as for `lax.scan`.

    Returns:
      The carry after the last step, and the results of all steps, stacked.

    Raises:
      TypeError: another step than the first changes the structure of the carry; `lax.scan` raises it.

    Example:
      >>> import numpy as np
      >>> import jaxsok
      >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
      >>> raws = ({"clicked": np.arange(i, i + 4)} for i in range(6))
      >>> def step(state, plan):
      ...     embeddings, state, plan = collection.lookup(state, plan)
      ...     return collection.update(state, plan, embeddings)
      >>> call = jax.jit(lambda state, plans: jaxsok.scan(step, state, plans), donate_argnums=0)
      >>> state = collection.init(seed=0)
      >>> for batch, plans in collection.pipeline(raws, lookahead=1, steps_per_call=2):
      ...     state = collection.grow(state, batch)
      ...     state, stats = call(state, plans)
      >>> state.step
      Array(6, dtype=uint32)
    """
    nodes = jax.tree.leaves(init, is_leaf=lambda node: isinstance(node, State))
    if any(isinstance(node, State) and not node.looks_ahead for node in nodes):
        xs = jax.tree.map(_without_following, xs, is_leaf=lambda node: isinstance(node, Plan))
    first = jax.tree.map(lambda stacked: stacked[0], xs)
    after, _ = jax.eval_shape(step, init, first)
    if jax.tree.structure(after) == jax.tree.structure(init):
        return lax.scan(step, init, xs, unroll=unroll)
    carry, y = step(init, first)
    others = jax.tree.map(lambda stacked: stacked[1:], xs)
    carry, ys = lax.scan(step, carry, others, unroll=unroll)
    return carry, jax.tree.map(lambda one, rest: jnp.concatenate([jnp.asarray(one)[None], rest]), y, ys)


def _without_following(node: Any) -> Any:
    """Returns a plan without those that its lookup looks up ahead; other leaves as they are."""
    return dataclasses.replace(node, following=()) if isinstance(node, Plan) else node
