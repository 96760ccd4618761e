"""Global arrays with an axis of shards in front, as `jax.pmap` takes them, and the way back."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok.settings import compile_ahead
from jaxsok.shards import Shards
from jaxsok.store import State


def restack(op: str, shards: Shards, tree: Any, *, is_stacking: bool) -> Any:
    """Adds the axis of shards to each array of a tree, or takes it away; consumes the tree."""
    if not shards.is_mesh:
        raise ValueError(f"{op}: tree: got arrays of one device, wanted a collection with a mesh.")
    nodes, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, State))
    is_split = jax.tree.leaves([_is_split(node) for node in nodes])
    leaves, inner = jax.tree.flatten(nodes)
    # All is compiled before anything is consumed. One array may occur several times.
    programs = {
        id(leaf): compile_ahead(_restack, leaf, shards, is_part, is_stacking)
        for leaf, is_part in zip(leaves, is_split, strict=True)
    }
    new = {}
    for old in leaves:
        if id(old) not in new:
            new[id(old)] = programs[id(old)](old)
            old.delete()  # at once: never two copies of everything
    return jax.tree.unflatten(structure, jax.tree.unflatten(inner, [new[id(old)] for old in leaves]))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _restack(leaf: Array, shards: Shards, is_split: bool, is_stacking: bool) -> Array:
    if is_stacking:
        return shards.run(lambda part: part[None], (leaf,), (shards.spec if is_split else P(),), shards.spec)

    def unstack(part: Array) -> Array:
        # Arrays that are the same everywhere are taken from the first shard.
        return part[0] if is_split else lax.psum(jnp.where(shards.index() == 0, part[0], 0), shards.axis)

    return shards.run(unstack, (leaf,), (shards.spec,), shards.spec if is_split else P())


def _is_split(node: Any) -> Any:
    """Marks the arrays of a state, or anything else, of which each shard has a part."""
    if not isinstance(node, State):
        return True
    others = dict.fromkeys(("step", "seed", "partition_owners", "lineage", "num_refused"), False)
    stores, ahead = jax.tree.map(lambda _: True, (node.stores, node.ahead))
    return dataclasses.replace(node, stores=stores, tickets=True, ahead=ahead, **others)
