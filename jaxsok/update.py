"""The way back: plans and gradients → state. Each row that was used steps once, with the sum of its gradients."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxsok.features import StoreFeatures
from jaxsok.kernels import update as kernels
from jaxsok.plan import Plan
from jaxsok.specs import StoreSpec
from jaxsok.store import State, StoreState
from jaxsok.types import NUM_FEATURE_WORDS, ROW_GRADIENTS

Gradients = Mapping[str, Float32[Array, "..."]]
"""By feature, in the shape of its embedding."""


def update(
    specs: Sequence[StoreSpec], state: State, plans: Sequence[Plan], gradients: Sequence[Gradients], learning_rate: Any
) -> tuple[State, list[Int32[Array, " num_tables"]], Int32[Array, ""]]:
    """Steps every row that the plans used, once, and advances the step.

    Args:
      specs: of the stores.
      state: donated: the result has its buffers.
      plans: of the lookups of this step.
      gradients: one for each plan.
      learning_rate: a scalar in place of the optimizers' own, or None.

    Returns:
      The state; rows with non-finite gradients by store and table; uses that came from a stale plan.
    """
    for plan, grads in zip(plans, gradients, strict=True):
        _check_names(plan, grads)
    live = [_is_live(plan, state) for plan in plans]
    stores, nonfinite = [], []
    stale = jnp.zeros((), jnp.int32)
    for s, (spec, store) in enumerate(zip(specs, state.stores, strict=True)):
        used = [i for i, plan in enumerate(plans) if plan.features.stores[s].layouts]
        if not used:
            stores.append(store)
            nonfinite.append(jnp.zeros(len(spec.tables), jnp.int32))
            continue
        hyper = spec.optimizer.hyper_operand(state.step, learning_rate)
        store, one_nonfinite, one_stale = _update_store(
            spec, store, s, [plans[i] for i in used], [gradients[i] for i in used], hyper, [live[i] for i in used]
        )
        stores.append(store)
        nonfinite.append(one_nonfinite)
        stale = stale + one_stale
    state = dataclasses.replace(state, stores=tuple(stores), step=state.step + jnp.uint32(1))
    return state, nonfinite, stale


def _update_store(
    spec: StoreSpec,
    store: StoreState,
    s: int,
    plans: Sequence[Plan],
    gradients: Sequence[Gradients],
    hyper: Array,
    live: Sequence[Array | None],
) -> tuple[StoreState, Array, Array]:
    parts = [plan.features.stores[s] for plan in plans]
    batch, num_tiles = _joined(parts)
    row_ids = _concatenate([plan.found[s].row_ids for plan in plans])
    generations = jnp.stack(
        [
            plan.found[s].generation if one is None else jnp.where(one, store.generation, ~store.generation)
            for plan, one in zip(plans, live, strict=True)
        ]
    )
    flat = [
        _gradient(grads, layout, spec) for part, grads in zip(parts, gradients, strict=True) for layout in part.layouts
    ]
    rows, states, num_nonfinite, num_stale = kernels.update(
        store.counters,
        generations,
        batch,
        row_ids,
        hyper,
        store.rows,
        store.states,
        store.records,
        flat,
        num_tables=len(spec.tables),
        num_tiles=num_tiles,
        optimizer=spec.optimizer.kernel,
        row_gradient=ROW_GRADIENTS[spec.row_gradient],
    )
    return dataclasses.replace(store, rows=rows, states=states), num_nonfinite, num_stale


def _check_names(plan: Plan, gradients: Gradients) -> None:
    known = {layout.name for part in plan.features.stores for layout in part.layouts}
    unknown = sorted(set(gradients) - known)
    if unknown:
        raise ValueError(f"update: gradients: got features {unknown}, wanted only those of the plan: {sorted(known)}.")


def _is_live(plan: Plan, state: State) -> Array | None:
    """Whether no store of a plan was erased from since its lookup; None where the kernel can tell by itself.

    A plan over several stores is stale as a whole: half a step would be worse than none.
    """
    used = [s for s, part in enumerate(plan.features.stores) if part.layouts]
    if len(used) < 2:
        return None
    same = [plan.found[s].generation == state.stores[s].generation for s in used]
    return jnp.stack(same).all()


def _gradient(gradients: Gradients, layout: Any, spec: StoreSpec) -> Array:
    what = f'update: gradients: feature "{layout.name}"'
    if layout.name not in gradients:
        raise ValueError(f"{what}: got none, wanted one; there are {sorted(gradients)}.")
    gradient = gradients[layout.name]
    wanted = (*layout.embedding_shape, spec.dim)
    if not hasattr(gradient, "shape") or not jnp.issubdtype(gradient.dtype, jnp.floating):
        got = f"{gradient.dtype}{list(gradient.shape)}" if hasattr(gradient, "shape") else type(gradient).__name__
        raise TypeError(f"{what}: got {got}, wanted a float array of shape {list(wanted)}.")
    if gradient.shape != wanted:
        raise ValueError(f"{what}: got shape {list(gradient.shape)}, wanted that of its embedding, {list(wanted)}.")
    return jnp.asarray(gradient, jnp.float32)


def _concatenate(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _joined(parts: Sequence[StoreFeatures]) -> tuple[kernels.Batch, int]:
    """Several plans' features as one batch, each feature knowing its plan."""
    words, num_keys, num_bags, num_offsets, num_weights, num_tiles = [], 0, 0, 0, 0, 0
    for number, part in enumerate(parts):
        for layout in part.layouts:
            moved = dataclasses.replace(
                layout,
                key_start=layout.key_start + num_keys,
                bag_start=layout.bag_start + num_bags,
                offsets_start=layout.offsets_start + num_offsets,
                weights_start=layout.weights_start + num_weights if layout.weights_start >= 0 else -1,
                tile_start=layout.tile_start + num_tiles,
            )
            words.append(moved.words(plan=number))
        num_keys += part.keys.shape[0]
        num_bags += sum(layout.num_bags for layout in part.layouts)
        num_offsets += part.offsets.shape[0]
        num_weights += part.weights.shape[0]
        num_tiles += part.num_tiles
    features = np.array(words, np.int32).reshape(-1, NUM_FEATURE_WORDS)
    keys = _concatenate([part.keys for part in parts])
    offsets = _concatenate([part.offsets for part in parts])
    weights = _concatenate([part.weights for part in parts])
    return (keys, offsets, weights, features), num_tiles
