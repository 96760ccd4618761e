"""Refuses JAX transformations that a table cannot go through, and names the call.

A kernel call has no derivative and no batch axis, and JAX would say so in terms of FFI. An op passes its arguments
through `refuse_transforms`: an identity, a primitive whose rules for `jax.grad` and `jax.vmap` raise. JAX asks a rule
only if an argument is differentiated or mapped over, however deep below `jit`, `scan` or `shard_map`; compiled programs
are the same. Each array passes alone, so that a program does not take those that it does not read.
"""

import functools
import re
import warnings
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

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
    return GUARD.bind(leaf, op=op, name=name) if isinstance(leaf, jax.core.Tracer) else leaf


def _refuse_derivative(primals: Any, tangents: Any, *, op: str, name: str) -> Any:
    del primals, tangents
    raise TypeError(
        f"{op}: {name}: got a derivative with respect to it, wanted none: {op} is no step of jax.grad. "
        f"{_REMEDIES.get(name, _BY_EMBEDDINGS)}"
    )


def _refuse_map(leaves: Any, axes: Any, *, op: str, name: str) -> Any:
    axis_size = leaves[0].shape[axes[0]]
    raise TypeError(
        f"{op}: {name}: got arrays that jax.vmap maps over ({axis_size} of them), wanted one call for all: a table "
        "has no batch axis. Put the keys of all into one batch, a line or a bag for each; or loop with lax.scan."
    )


GUARD = core.Primitive("jaxsok_refuse_transforms")
"""An identity that leaves nothing in a compiled program."""

GUARD.def_impl(lambda leaf, **params: leaf)
GUARD.def_abstract_eval(lambda aval, **params: aval)
ad.primitive_jvps[GUARD] = _refuse_derivative
batching.primitive_batchers[GUARD] = _refuse_map
mlir.register_lowering(GUARD, lambda ctx, leaf, **params: [leaf])
