"""The zero tap: zeros whose gradient is that of the embeddings of a lookup.

A layer looks up inside the differentiated function, so its embeddings are no argument of it. Each call therefore passes
them through taps, zeros of their shape that are an argument: values keep their bits, and the gradient of the taps is
that of the embeddings. Feeds nnx.py and linen.py; knows no Flax.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsok.collection import Collection
from jaxsok.features import Features
from jaxsok.lookup import Embeddings
from jaxsok.operations import check_features
from jaxsok.plan import Plan
from jaxsok.store import State

Taps = Mapping[str, Array]
"""Zeros of the shape and dtype of each feature's embedding in one lookup."""


@jax.custom_jvp
def attach_taps(embeddings: Embeddings, taps: Taps) -> Embeddings:
    """Returns the embeddings; their gradient goes to the taps.

    `embeddings + taps` would turn -0.0 into 0.0.

    Example:
      >>> taps = {"item": jnp.zeros(2)}
      >>> loss = lambda taps: (attach_taps({"item": jnp.array([3.0, 4.0])}, taps)["item"] ** 2).sum()
      >>> jax.value_and_grad(loss)(taps)
      (Array(25., dtype=float32), {'item': Array([6., 8.], dtype=float32)})

    Source: decision D7 of the design.
    """
    return dict(embeddings)


@attach_taps.defjvp
def _attach_taps_jvp(primals: Any, tangents: Any) -> tuple[Embeddings, Embeddings]:
    # The embeddings are no argument of the differentiated function. Derivatives of any order go through the taps.
    return attach_taps(*primals), dict(tangents[1])


def _features_of(op: str, collection: Collection, features: Features | Plan) -> Features:
    """Returns the features that a lookup reads; refuses what is neither features nor a plan of this collection."""
    if isinstance(features, Plan):
        features = features.features
    check_features(op, collection, features)
    return features


def zero_taps(collection: Collection, features: Features | Plan) -> dict[str, Array]:
    """Makes the taps of one lookup, split as its embeddings are; under `jit` no operation reads the zeros."""
    features = _features_of("zero_taps", collection, features)
    shards = collection.shards
    is_global = not shards.sees_parts()
    taps = {}
    for spec, part in zip(collection.stores, features.stores, strict=True):
        for layout in part.layouts:
            num_lines, *others = layout.embedding_shape
            shape = (num_lines * (features.num_parts if is_global else 1), *others, spec.dim)
            # On a mesh, outside jit made where they belong; inside, of the embeddings' type.
            zeros = jnp.zeros(shape, spec.embedding_dtype, device=shards.place(len(shape)) if is_global else None)
            if is_global:
                zeros = shards.reshard(shards.spec, zeros)
            elif shards.is_mesh:  # inside shard_map, which tells values that vary over an axis from others
                axes = {*shards.axis, *jax.typeof(part.keys).manual_axis_type.varying}
                zeros = jax.lax.pcast(zeros, tuple(sorted(axes)), to="varying")
            taps[layout.name] = zeros
    return taps


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Asked:
    """A lookup that a trace met: its collection, the structure of its features, and the shapes of their arrays.

    It is part of the structure of what is traced, so a trace that JAX has keeps it.
    """

    collection: Collection
    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, collection: Collection, features: Features | Plan) -> "Asked":
        """Records what a lookup reads."""
        _features_of("lookup", collection, features)
        leaves, structure = jax.tree.flatten(features)
        return cls(collection, structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))

    def zero_taps(self) -> dict[str, Array]:
        """Makes the taps of the lookup, outside the trace that met it."""
        return zero_taps(self.collection, jax.tree.unflatten(self.structure, self.leaves))


def lookup(
    op: str,
    collection: Collection,
    state: State,
    features: Features | Plan,
    taps: Taps,
    clock: Any,
    before: Sequence[Plan],
) -> tuple[Embeddings, State, Plan]:
    """Calls `Collection.lookup` and taps the embeddings.

    `before` are the plans of earlier lookups of the step. Refuses, when traced, taps of another shape, and a batch of
    `before` while others are looked up ahead: the state then expects the next batch.
    """
    batch = _features_of("lookup", collection, features)
    if state.ahead and any(_are_same(batch, plan.features) for plan in before):
        raise ValueError(
            f"{op}: features: got a batch that this step has looked up already, with lookups ahead in flight, wanted "
            "each batch once; call the layer once for a batch, and use its embeddings as often as needed."
        )
    embeddings, state, plan = collection.lookup(state, features, clock=clock)
    wanted = {name: f"{value.dtype}{list(value.shape)}" for name, value in embeddings.items()}
    got = {name: f"{value.dtype}{list(value.shape)}" for name, value in taps.items()}
    for name in sorted(wanted.keys() | got.keys()):
        if got.get(name) != wanted.get(name):
            raise ValueError(
                f'{op}: feature "{name}": got a tap of {got.get(name, "no shape")}, wanted that of its embedding, '
                f"{wanted.get(name, 'none')}; make the taps of a step from the features that it looks up, in order."
            )
    # The features are returned as they came; a batch that comes again is known by its arrays.
    return attach_taps(embeddings, taps), state, dataclasses.replace(plan, features=batch)


def _are_same(batch: Features, other: Features) -> bool:
    """Returns whether the arrays of two batches, perhaps traced, are the same objects."""
    leaves, others = jax.tree.leaves(batch), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def gradients_by_plan(op: str, plans: Sequence[Plan], gradients: Sequence[Sequence[Taps | None]]) -> list[Taps]:
    """Returns the gradients of each lookup since the last update, as `Collection.update` takes them.

    `gradients` has those of each differentiated call, by lookup; None for those of other calls. It raises a ValueError
    where there was no lookup, or one without gradients.
    """
    if not plans:
        raise ValueError(
            f"{op}: got no lookup to update, wanted one since the last update; call the layer in training mode inside "
            "the differentiated function first."
        )
    found: list[Taps | None] = [None] * len(plans)
    for by_lookup in gradients:
        if len(by_lookup) > len(plans):
            raise ValueError(
                f"{op}: gradients: got those of {len(by_lookup)} taps for {len(plans)} lookups, wanted one for each; "
                "make taps for the lookups of the step alone."
            )
        for i, of_lookup in enumerate(by_lookup):
            if of_lookup is None:
                continue
            if found[i] is not None:
                raise ValueError(f"{op}: gradients: got lookup {i + 1} of {len(plans)} twice, wanted it once.")
            found[i] = of_lookup
    missing = [i + 1 for i, taps in enumerate(found) if taps is None]
    if missing:
        raise ValueError(
            f"{op}: gradients: got none for lookup {missing[0]} of {len(plans)}, wanted those of its taps; "
            "differentiate with respect to the taps as well, and pass the gradients of all calls."
        )
    return found


def grow(
    states: Mapping[str, State], collections: Mapping[str, Collection], batch: Any, **options: Any
) -> Iterator[tuple[str, State]]:
    """Calls `Collection.grow` for the layers of a model, one after the other: yields path and new state.

    `batch` is that of the only layer, or a mapping by path; `options` are the same for all. Before anything grows, it
    raises a ValueError where there is no layer, for other paths, and for layers that share a collection, which can
    follow the growth of one state only. If a growth fails and the error has a state, it yields that one first.
    """
    if not states:
        raise ValueError("grow: got no tables of a layer, wanted those of at least one jaxsok layer.")
    batches = dict(batch) if isinstance(batch, Mapping) else dict.fromkeys(states, batch)
    unknown = sorted(map(str, batches.keys() - set(states)))
    if unknown or (batch is not None and not isinstance(batch, Mapping) and len(states) > 1):
        got = f"batches for {unknown}" if unknown else f"one for {len(states)} layers"
        raise ValueError(f"grow: batch: got {got}, wanted one by path of a layer: {sorted(states)}.")
    paths_of: dict[int, list[str]] = {}
    for path in states:
        paths_of.setdefault(id(collections[path]), []).append(path)
    for paths in paths_of.values():
        if len(paths) > 1:
            raise ValueError(
                f"grow: got one collection for the layers {paths}, wanted a collection for each, since it follows the "
                "growth of one state; or share the layer."
            )
    for path, state in states.items():
        yield from ((path, new) for new in grow_one(collections[path], state, batches.get(path), **options))


def grow_one(collection: Collection, state: State, batch: Any, **options: Any) -> Iterator[State]:
    """Calls `Collection.grow`: yields the new state, or before it raises that of the error, if the error has one."""
    try:
        grown = collection.grow(state, batch, **options)
    except BaseException as error:
        if isinstance(left := getattr(error, "state", None), State):
            yield left
        raise
    yield grown
