"""Refuses JAX transformations that a table cannot go through, and names the call.

A kernel call has no derivative and no batch axis, and JAX would say so in terms of FFI. An op passes its arguments
through `refuse_transforms`: an identity whose rules for `jax.grad` and `jax.vmap` raise. JAX asks a rule only if an
argument is differentiated or mapped over, however deep below `jit`, `scan` or `shard_map`; compiled programs are the
same. Each array passes alone, so that a program does not take those that it does not read.
"""

import functools
import re
import warnings
from typing import Any

import jax

_BY_EMBEDDINGS = "Differentiate the loss by the embeddings that lookup gave, and pass the result to update."
_TO_LEARN_WEIGHTS = "To learn weights, look up with combiner=None and weight the embeddings in the model."
_REMEDIES = dict.fromkeys(("features", "keys", "offsets", "weights"), _TO_LEARN_WEIGHTS) | {
    "tables": "A frozen table has no gradients."
}  # by argument; else `_BY_EMBEDDINGS`

# Arrays whose end was expected, as JAX writes them: it names all of a step in one warning, also of several collections.
_ENDING = set[str]()


def refuse_transforms(op: str, **arguments: Any) -> tuple[Any, ...]:
    """Returns arguments unchanged; differentiating by them or mapping over them raises TypeError when traced."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        return tuple(arguments.values())
    return tuple(jax.tree.map(functools.partial(_pass, op, name), tree) for name, tree in arguments.items())


def expect_the_end_of(tree: Any, num_shards: int) -> None:
    """Keeps JAX from warning that a step, while it is traced, cannot use the memory of these donated arrays."""
    if not tree:
        return
    leaves = jax.tree.leaves(tree)
    # Where axes are explicit, JAX names the part of a shard.
    shapes = [(leaf.dtype, leaf.shape[0] // parts, *leaf.shape[1:]) for leaf in leaves for parts in (1, num_shards)]
    _ENDING.update(f"{dtype}[{','.join(map(str, shape))}]" for dtype, *shape in shapes)
    aval = f"(?:{'|'.join(map(re.escape, sorted(_ENDING.copy())))})"  # a copy: `Collection.ahead` traces in a thread
    message = rf"Some donated buffers were not usable: {aval}(?:, {aval})*\."
    warnings.filterwarnings("ignore", message, UserWarning)


def _pass(op: str, name: str, leaf: Any) -> Any:
    return _guard(op, name)(leaf) if isinstance(leaf, jax.core.Tracer) else leaf


@functools.cache
def _guard(op: str, name: str) -> Any:
    """Returns an identity that JAX traces once for arrays of a type and shape, and that leaves no call in a program."""

    @jax.custom_batching.custom_vmap
    def guard_map(leaf: Any) -> Any:
        return leaf

    @guard_map.def_vmap
    def refuse_map(axis_size: int, in_batched: Any, leaf: Any) -> Any:
        del in_batched, leaf
        raise TypeError(
            f"{op}: {name}: got arrays that jax.vmap maps over ({axis_size} of them), wanted one call for all: a table "
            "has no batch axis. Put the keys of all into one batch, a line or a bag for each; or loop with lax.scan."
        )

    @jax.custom_jvp
    def constant(leaf: Any) -> Any:
        return guard_map(leaf)

    @constant.defjvp
    def refuse_derivative(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise TypeError(
            f"{op}: {name}: got a derivative with respect to it, wanted none: {op} is no step of jax.grad. "
            f"{_REMEDIES.get(name, _BY_EMBEDDINGS)}"
        )

    return jax.jit(constant, inline=True)
