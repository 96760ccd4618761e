"""The dense part of MLPerf's DLRM, so that a sharded step can be measured with the model around it.

Bottom MLP 13-512-256-dim, dot interaction of its output with the embeddings, top MLP 1024-1024-512-256-1; parameters
and sums in float32, matrices multiplied in bfloat16. Written with arrays alone: what is measured is the step, not a
library of layers.

Fed by nothing; feeds `bench_exchange.py`, `bench_tiers.py` and `processes.py`. Not here: tables.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxsok

NUM_DENSE = 13
"""Numbers of a sample in addition to its keys."""

OPTIMIZER = optax.adagrad(0.01)
"""The optimizer of the dense part."""

BOTTOM = (512, 256)
TOP = (1024, 1024, 512, 256)

Layers = list[tuple[jax.Array, jax.Array]]
"""Weights [num_in, num_out] and biases of each layer."""


def init(rng: jax.Array, num_features: int, dim: int) -> dict[str, Layers]:
    """Returns parameters for embeddings of `num_features` features: Glorot weights, biases of zero."""
    num_pairs = (num_features + 1) * num_features // 2
    widths = {"bottom": (NUM_DENSE, *BOTTOM, dim), "top": (num_pairs + dim, *TOP, 1)}
    glorot = jax.nn.initializers.glorot_normal()
    params: dict[str, Layers] = {}
    for name, sizes in widths.items():
        rng, *rngs = jax.random.split(rng, len(sizes))
        shapes = zip(rngs, sizes[:-1], sizes[1:], strict=True)
        params[name] = [(glorot(rng, (a, b), jnp.float32), jnp.zeros(b, jnp.float32)) for rng, a, b in shapes]
    return params


def loss(params: dict[str, Layers], embeddings: Mapping[str, jax.Array], dense: jax.Array, labels: jax.Array):
    """Returns the mean cross entropy of a click over all samples.

    Args:
      params: of `init`.
      embeddings: float32 [num_samples, dim] by feature.
      dense: float32 [num_samples, 13].
      labels: float32 [num_samples], 0 or 1.
    """
    bottom = jax.nn.relu(_mlp(params["bottom"], dense.astype(jnp.bfloat16)))
    vectors = jnp.stack([bottom, *(embedding.astype(jnp.bfloat16) for embedding in embeddings.values())], axis=1)
    products = jnp.einsum("nid,njd->nij", vectors, vectors)
    (weights, biases), *top = params["top"]
    dim, num_vectors = bottom.shape[1], vectors.shape[1]
    rows, columns = np.tril_indices(num_vectors, -1)
    # The pairs below the diagonal are chosen in the weights, which are small: choosing them in the products would turn
    # the backward pass into a scatter of all samples.
    of_pairs = jnp.zeros((num_vectors * num_vectors, weights.shape[1]), weights.dtype)
    of_pairs = of_pairs.at[rows * num_vectors + columns].set(weights[dim:], unique_indices=True)
    inputs = jnp.concatenate([bottom, products.reshape(-1, num_vectors * num_vectors)], axis=1)
    first = jnp.concatenate([weights[:dim], of_pairs])
    logits = _mlp([(first, biases), *top], inputs)[:, 0].astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def init_for(collection: jaxsok.Collection, dim: int) -> tuple[Any, Any]:
    """Returns parameters and the state of their optimizer, the same on each device of a collection."""

    @jax.jit
    def make() -> tuple[Any, Any]:
        params = init(jax.random.key(0), len(collection.features), dim)
        return _on_all(collection, (params, OPTIMIZER.init(params)))

    return make()


def step_of(collection: jaxsok.Collection, jit: Callable = jax.jit) -> Callable[..., tuple]:
    """Returns a training step: (state, params, opt_state), plan, dense numbers, labels -> the same, (loss, stats)."""

    @functools.partial(jit, donate_argnums=0)
    def step(carry: tuple, plan: Any, dense: jax.Array, labels: jax.Array) -> tuple:
        state, params, opt_state = carry
        embeddings, state, plan = collection.lookup(state, plan)
        mean, (g_params, g_embeddings) = jax.value_and_grad(loss, (0, 1))(params, embeddings, dense, labels)
        state, stats = collection.update(state, plan, g_embeddings)
        updates, opt_state = OPTIMIZER.update(g_params, opt_state, params)
        stepped = optax.apply_updates(params, updates), opt_state
        return (state, *_on_all(collection, stepped)), (mean, stats)

    return step


def call_of(collection: jaxsok.Collection, jit: Callable = jax.jit) -> Callable[..., tuple]:
    """Returns the same for several steps in one call, whose batches are stacked."""
    step = step_of(collection, lambda step, **_: step)

    @functools.partial(jit, donate_argnums=0)
    def call(carry: tuple, *stacked: Any) -> tuple:
        return jaxsok.scan(lambda carry, inputs: step(carry, *inputs), carry, stacked)

    return call


def _on_all(collection: jaxsok.Collection, tree: Any) -> Any:
    """Makes arrays the same on each device of a collection, inside a program."""
    shards = collection.shards
    return tree if shards.num_shards == 1 else lax.with_sharding_constraint(tree, shards.same)


def _mlp(layers: Layers, x: jax.Array) -> jax.Array:
    for number, (weights, biases) in enumerate(layers):
        x = x @ weights.astype(x.dtype) + biases.astype(x.dtype)[None]
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
    return x
