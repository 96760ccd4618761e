"""The dense part of MLPerf's DLRM, so that a sharded step can be measured with the model around it.

Bottom MLP 13-512-256-dim, dot interaction of its output with the embeddings, top MLP 1024-1024-512-256-1; parameters
and sums in float32, matrices multiplied in bfloat16. Written with arrays alone: what is measured is the step, not a
library of layers.

Fed by nothing; feeds `bench_exchange.py`. Not here: tables.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

NUM_DENSE = 13
"""Numbers of a sample in addition to its keys."""

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


def _mlp(layers: Layers, x: jax.Array) -> jax.Array:
    for number, (weights, biases) in enumerate(layers):
        x = x @ weights.astype(x.dtype) + biases.astype(x.dtype)[None]
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
    return x
