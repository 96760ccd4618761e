"""Global arrays with an axis of shards in front, as `jax.pmap` takes them, and the way back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok.operations import is_deleted, specs_of
from jaxsok.settings import compile_ahead
from jaxsok.shards import Shards
from jaxsok.store import State


def restack(op: str, shards: Shards, tree: Any, *, is_stacking: bool) -> Any:
    """Adds the axis of shards to each array of a tree, or takes it away; consumes the states in it."""
    if not shards.is_mesh:
        raise ValueError(f"{op}: tree: got arrays of one device, wanted a collection with a mesh.")
    nodes, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, State))
    specs = [specs_of(shards, node) if isinstance(node, State) else shards.spec for node in nodes]
    specs = jax.tree.leaves(jax.tree.broadcast(specs, nodes))
    leaves, inner = jax.tree.flatten(nodes)
    if any(is_deleted(leaf) for leaf in leaves):
        raise ValueError(
            f"{op}: tree: got arrays that are deleted: they were donated to a step, or consumed by {op} or grow; "
            f"wanted those that such a call returned, as in state = collection.{op}(state)."
        )
    consumed = {id(leaf) for node in nodes if isinstance(node, State) for leaf in jax.tree.leaves(node)}
    # All is compiled before anything is consumed. One array may occur several times.
    programs = {
        id(leaf): compile_ahead(_restack, leaf, shards, spec, is_stacking)
        for leaf, spec in zip(leaves, specs, strict=True)
    }
    new = {}
    for old in leaves:
        if id(old) not in new:
            new[id(old)] = programs[id(old)](old)
            if id(old) in consumed:
                old.delete()  # at once: never two copies of all tables
    return jax.tree.unflatten(structure, jax.tree.unflatten(inner, [new[id(old)] for old in leaves]))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _restack(leaf: Array, shards: Shards, spec: P, is_stacking: bool) -> Array:
    if is_stacking:
        return shards.run(lambda part: part[None], (leaf,), (spec,), shards.spec)

    def unstack(part: Array) -> Array:
        # Arrays that are the same everywhere are taken from the first shard.
        return part[0] if spec == shards.spec else lax.psum(jnp.where(shards.index() == 0, part[0], 0), shards.axis)

    return shards.run(unstack, (leaf,), (shards.spec,), spec)
