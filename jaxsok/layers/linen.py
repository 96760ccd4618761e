"""A Flax Linen layer over a collection: looks up in a model's `apply`, learns from the gradient of its taps.

It adds three collections of variables to "params": "tables", the state of the tables; "sparse_taps", the taps of a
step, made by `zero_taps` and differentiated; "plans", what `apply` hands to `apply_updates` of the same step. Import it
by `from jaxsok.layers import linen as layers`; the calls that need no Flax are in tap.py.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float32

from jaxsok import collection as collection_lib
from jaxsok.collection import Collection
from jaxsok.evict import HandOver
from jaxsok.features import Features
from jaxsok.layers import tap
from jaxsok.plan import Plan
from jaxsok.stats import Stats
from jaxsok.store import State

__all__ = ["Embeddings", "apply_updates", "clip_by_global_norm", "discard", "drain", "grow", "zero_taps"]

_TABLES, _TAPS, _PLANS = "tables", "sparse_taps", "plans"

OneOrSeveral = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Variables of one `apply`, or a list of those of several micro-batches."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Waiting:
    """The contents of "tables" between lookup and update, without arrays; shows whether micro-batches are chained."""

    num_lookups: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Lookups:
    """The plans of a layer's calls in one `apply`, in "plans"; `num_before` lookups waited for their update before."""

    plans: tuple[Plan, ...]
    collection: Collection = dataclasses.field(metadata={"static": True})
    num_before: int = dataclasses.field(metadata={"static": True})


class Embeddings(nn.Module):
    """The tables of a collection as a layer: features in, embeddings by feature out.

    In training, `apply` with `mutable=["tables", "plans"]` and taps, a call is `Collection.lookup`: unseen keys get
    rows, and `apply_updates` makes the rows learn. In evaluation a call is `Collection.find`, which changes nothing.
    `init` makes empty tables and looks nothing up.

    One update takes all calls of a step. A collection follows the growth of one state: two layers need two collections.

    Example:
      >>> import jax.numpy as jnp, jaxsok, numpy as np
      >>> from flax import linen as nn
      >>> from jaxsok.layers import linen as layers
      >>> tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, features):
      ...         return nn.Dense(1)(layers.Embeddings(collection, name="embed")(features)["clicked"])
      >>> model, batch = Model(), collection.batch({"clicked": np.array([7, 9, 7])})
      >>> variables = model.init(jax.random.key(0), batch.features)
      >>> sorted(variables)
      ['params', 'tables']
      >>> def loss_fn(params, taps, tables):
      ...     variables = {"params": params, "sparse_taps": taps, "tables": tables}
      ...     scores, updates = model.apply(variables, batch.features, mutable=["tables", "plans"])
      ...     return jnp.mean(scores), updates
      >>> taps = layers.zero_taps(model, variables, batch.features)
      >>> of_params_and_taps = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)
      >>> (g_params, g_taps), updates = of_params_and_taps(variables["params"], taps, variables["tables"])
      >>> tables, stats = layers.apply_updates(updates, g_taps)
      >>> stats["embed"].to_dict()["item"]["num_inserted"]
      2

    Source: decision D7 of the design.
    """

    collection: Collection
    seed: int = 0
    deterministic: bool | None = None
    """True: evaluation. None: evaluation where "tables" is not mutable and there are no taps."""

    def __call__(
        self, features: Features | Plan, deterministic: bool | None = None, clock: Any = None
    ) -> dict[str, Array]:
        """Looks up a batch or a plan: embeddings by feature, as `Collection.lookup`, with the clock of that.

        In `init` they are zeros. `deterministic` replaces the layer's own.

        Raises:
          ValueError: in training, taps that are missing or of other features, or "plans" that is not mutable; variables
            without tables; features of another collection.

        Example:
          `x = jnp.concatenate(list(self.embed(features).values()), axis=-1)`
        """
        if not isinstance(self.collection, Collection):
            raise TypeError(
                f"Embeddings: collection: got {type(self.collection).__name__}, wanted a jaxsok.Collection."
            )
        if self.is_initializing():
            if not self.has_variable(_TABLES, "state"):
                self.put_variable(_TABLES, "state", self.collection.init(self.seed))
            return tap.zero_taps(self.collection, features)
        if not self.has_variable(_TABLES, "state"):
            raise ValueError(
                f'Embeddings: variables: got none of "{_TABLES}" at {self.path}, wanted those that model.init made.'
            )
        state = self.get_variable(_TABLES, "state")
        is_mutable = self.is_mutable_collection(_TABLES)
        deterministic = self.deterministic if deterministic is None else deterministic
        # Taps are of a step: a lookup that gave them no gradient would be a step that learns nothing.
        is_step = is_mutable or self.has_variable(_TAPS, "taps")
        if deterministic or (deterministic is None and not is_step):
            return self.collection.find(state, features)[0]
        if not is_mutable or not self.is_mutable_collection(_PLANS):
            raise ValueError(
                f'Embeddings: mutable: got no "{_PLANS if is_mutable else _TABLES}", wanted '
                f'mutable=["{_TABLES}", "{_PLANS}"] in training; or deterministic=True.'
            )
        num_waiting = self.get_variable(_TABLES, "waiting", _Waiting(0)).num_lookups
        lookups = self.get_variable(_PLANS, "lookups", _Lookups((), self.collection, num_waiting))
        taps, number = self.get_variable(_TAPS, "taps", ()), len(lookups.plans)
        if number >= len(taps):
            raise ValueError(
                f"Embeddings: got a lookup in training with taps for {len(taps)}, wanted taps for each; pass "
                f'"{_TAPS}": zero_taps(model, variables, ...) among the variables, and "{_PLANS}" in `mutable` alone.'
            )
        embeddings, state, plan = tap.lookup(
            "Embeddings", self.collection, state, features, taps[number], clock, lookups.plans
        )
        self.put_variable(_TABLES, "state", state)
        self.put_variable(_TABLES, "waiting", _Waiting(num_waiting + 1))
        self.put_variable(_PLANS, "lookups", dataclasses.replace(lookups, plans=(*lookups.plans, plan)))
        return embeddings


def zero_taps(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Makes the taps of one `apply`: the variables "sparse_taps", nested as variables are, by lookup and feature.

    `args` and `kwargs` are those of `model.apply` in the step, with `rngs` and `method`; `mutable` is not needed.

    Raises:
      ValueError: a model that looks nothing up in this call.

    Cost:
      The call is traced once, without lookups; nothing at run time under `jit`.

    Example:
      `taps = layers.zero_taps(model, {"params": params, "tables": tables}, batch.features)`
    """
    lookup = inspect.unwrap(Embeddings.__call__)

    def probe(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if getattr(context.orig_method, "func", None) is not lookup:  # of a subclass, or of another module
            return call(*args, **kwargs)

        def record_lookup(features: Features | Plan, deterministic: bool | None = None, clock: Any = None) -> Any:
            deterministic = layer.deterministic if deterministic is None else deterministic
            if not deterministic:
                before = layer.get_variable(_PLANS, "asked", ())
                layer.put_variable(_PLANS, "asked", (*before, tap.Asked.of(layer.collection, features)))
            return tap.zero_taps(layer.collection, features)

        return record_lookup(*args, **kwargs)

    # nn.jit keeps the trace of a module, where this is not called again: what it found is among the trace's variables.
    # Its key has what is mutable, which is so for no other call.
    kwargs["mutable"] = nn.DenyList("zero_taps")

    def apply() -> Any:
        with nn.intercept_methods(probe):
            return model.apply(variables, *args, **kwargs)[1].get(_PLANS, {})

    # Nothing is an argument of what is traced: a flag that the model looks at stays one.
    found = {path[:-1]: asked for path, asked in _flatten(jax.eval_shape(apply)).items() if path[-1] == "asked"}
    if not found:
        raise ValueError(
            "zero_taps: model: got one that looks nothing up in this call, wanted jaxsok.layers.linen.Embeddings "
            "called in training."
        )
    return unflatten_dict({(*path, "taps"): tuple(one.zero_taps() for one in asked) for path, asked in found.items()})


def apply_updates(
    updates: OneOrSeveral, gradients: OneOrSeveral, *, learning_rate: Any = None
) -> tuple[dict[str, Any], dict[str, Stats]]:
    """Calls `Collection.update` for all layers of a model: every row that was looked up steps once.

    `updates` are the variables that `apply` returned, and `gradients` those of the taps; or lists of both for several
    micro-batches, each applied to the tables of the one before it. `learning_rate`, a scalar, perhaps traced, replaces
    that of the tables. Returns the new variables "tables", and Stats by path of the layer, its parts joined by "/".

    Raises:
      TypeError, ValueError: no lookup; gradients that are missing, or of other lookups; micro-batches that were not
        applied to the tables of the one before. Raised when traced.
    """
    tables, waiting = _join_micro_batches("apply_updates", updates, gradients)
    flat, stats = _flatten(tables), {}
    for path, (collection, *lookups) in waiting.items():
        state, stats["/".join(path)] = collection.update(*lookups, learning_rate=learning_rate)
        flat[(*path, "state")] = state
        del flat[(*path, "waiting")]
    return unflatten_dict(flat), stats


def clip_by_global_norm(
    updates: OneOrSeveral, gradients: OneOrSeveral, max_norm: Any, dense: Any = None
) -> tuple[Any, Any, Float32[Array, ""]]:
    """Does `Collection.clip_by_global_norm` for a model: scales rows of all tables and dense parameters together.

    The norm is that of dense tables: each row counts once, with the sum over its uses. Optax's norm of the gradients of
    taps counts each use by itself.

    `updates` and `gradients` are as for `apply_updates`; `max_norm` is a positive scalar, perhaps traced; `dense` has
    the gradients of the parameters, summed over micro-batches. Returns gradients and dense gradients in their form, and
    the norm before clipping, float32.

    Raises:
      TypeError, ValueError: no lookup; gradients that are missing; `max_norm` not a positive scalar.

    Example:
      `g_taps, g_params, norm = layers.clip_by_global_norm(updates, g_taps, 1.0, g_params)`, before `apply_updates`
    """
    _, waiting = _join_micro_batches("clip_by_global_norm", updates, gradients)
    lookups = list(waiting.values())
    (gradients, scaled), norm = collection_lib.clip_by_global_norm(lookups, (gradients, dense), max_norm, dense)
    return gradients, scaled, norm


def discard(updates: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables "tables" of a step that is skipped: new rows stay, and have learned nothing.

    `updates` are the variables that `apply` returned, of the last micro-batch; without tables they are a ValueError.
    """
    if not isinstance(updates, Mapping) or _TABLES not in updates:
        got = sorted(updates) if isinstance(updates, Mapping) else type(updates).__name__
        raise ValueError(f'discard: updates: got {got}, wanted the variables that apply returned, with "{_TABLES}".')
    flat = _flatten(updates[_TABLES])
    _find_states("discard", "updates", updates[_TABLES])
    for path in [path for path, leaf in flat.items() if type(leaf) is _Waiting]:
        del flat[path]
        where = (*path[:-1], "state")
        flat[where] = flat[where].end_step()
    return unflatten_dict(flat)


def grow(
    collection: Collection | Mapping[str, Collection],
    tables: Mapping[str, Any],
    batch: Any = None,
    *,
    steps: int = 1,
    clock: Any = None,
    hand_over: HandOver | None = None,
) -> dict[str, Any]:
    """Calls `Collection.grow` for the tables of a model, between steps, outside `jit`; returns the variables "tables".

    With several layers, `collection` and `batch` are mappings by the path of the layer, its parts joined by "/"; a
    layer that `batch` does not name is grown without one. `tables` are consumed where they grow; the other arguments
    are those of `Collection.grow`.

    Raises:
      TypeError, ValueError: variables without tables; a layer without a collection, two layers over one, or a
        collection at another path.
      MemoryError: as `Collection.grow`. All tables, grown or not, are in the error's `tables`.
    """
    found = {"/".join(path): (path, state) for path, state in _find_states("grow", "tables", tables).items()}
    states = {name: state for name, (_, state) in found.items()}
    if isinstance(collection, Collection):
        collection = dict.fromkeys(states, collection)
    elif not isinstance(collection, Mapping):
        raise TypeError(
            f"grow: collection: got {type(collection).__name__}, wanted a jaxsok.Collection, or one by path of a layer."
        )
    for name in states:
        if not isinstance(collection.get(name), Collection):
            raise ValueError(f"grow: collection: got none for the layer {name!r}, wanted one for each: {list(states)}.")
    if unknown := sorted(map(str, collection.keys() - states.keys())):
        raise ValueError(f"grow: collection: got some for {unknown}, wanted one by path of a layer: {list(states)}.")
    new = _flatten(tables)
    try:
        for name, state in tap.grow(states, collection, batch, steps=steps, clock=clock, hand_over=hand_over):
            new[(*found[name][0], "state")] = state
    except BaseException as error:  # the layers before this one may have been consumed
        error.add_note(
            'grow: the variables "tables", as far as they have grown, are the `tables` attribute of this error.'
        )
        error.tables = unflatten_dict(new)  # pyright: ignore[reportAttributeAccessIssue]
        raise
    return unflatten_dict(new)


def drain(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Does what `Collection.drain` does, for the tables of a model; returns the variables "tables".

    Variables without tables are a ValueError.

    Example:
      `tables = layers.drain(tables)`, before the step after which they are saved
    """
    drained = {(*path, "state"): state.drain() for path, state in _find_states("drain", "tables", tables).items()}
    return unflatten_dict(_flatten(tables) | drained)


def _flatten(variables: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Flattens nested variables; empty nodes stay."""
    return flatten_dict(dict(variables), keep_empty_nodes=True)


def _find_values(variables: Mapping[str, Any], name: str, kind: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values of one name and kind among nested variables, with the path of their layer."""
    return (
        (path[:-1], leaf) for path, leaf in _flatten(variables).items() if path[-1] == name and isinstance(leaf, kind)
    )


def _find_states(op: str, argument: str, tables: Mapping[str, Any]) -> dict[tuple[str, ...], State]:
    """Finds the states of all layers by path; refuses variables that have none."""
    states = dict(_find_values(tables, "state", State))
    if not states:
        raise ValueError(
            f'{op}: {argument}: got variables without tables of jaxsok.layers.linen.Embeddings, wanted "{_TABLES}" of '
            "the model that has them."
        )
    return states


def _join_micro_batches(
    op: str, updates: OneOrSeveral, gradients: OneOrSeveral
) -> tuple[dict[str, Any], dict[tuple[str, ...], tuple[Collection, State, list[Plan], list[tap.Taps]]]]:
    """Returns the last micro-batch's tables, and by layer its collection, state, plans, and the gradients of each."""
    several = list(updates) if isinstance(updates, (list, tuple)) else [updates]
    of_taps = list(gradients) if isinstance(gradients, (list, tuple)) else [gradients]
    if not several or len(several) != len(of_taps):
        raise ValueError(
            f"{op}: gradients: got {len(of_taps)} for {len(several)} updates, wanted one for each, at least 1."
        )
    for variables in several:
        if not isinstance(variables, Mapping) or _TABLES not in variables or _PLANS not in variables:
            got = sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__
            raise ValueError(
                f'{op}: updates: got {got}, wanted the variables "{_TABLES}" and "{_PLANS}" that '
                f'apply(..., mutable=["{_TABLES}", "{_PLANS}"]) returned from a lookup in training.'
            )
    waiting: dict[tuple[str, ...], tuple[Collection, list[Plan], list[Any]]] = {}
    num_seen: dict[tuple[str, ...], int] = {}
    for variables, grads in zip(several, of_taps, strict=True):
        for path, lookups in _find_values(variables[_PLANS], "lookups", _Lookups):
            _, plans, by_lookup = waiting.setdefault(path, (lookups.collection, [], []))
            if num_seen.setdefault(path, 0) != lookups.num_before:
                raise ValueError(_describe_broken_chain(op, path))
            num_seen[path] += len(lookups.plans)
            own = _at(op, grads, (*path, "taps"))
            # Behind the lookups of earlier micro-batches.
            by_lookup.append((*[None] * len(plans), *own))
            plans.extend(lookups.plans)
    tables = dict(several[-1][_TABLES])
    num_waiting = {path: state.num_lookups for path, state in _find_values(tables, "waiting", _Waiting)}
    for path in (*num_seen, *num_waiting):
        if num_waiting.get(path) != num_seen.get(path):
            raise ValueError(_describe_broken_chain(op, path))
    return tables, {
        path: (collection, _at(op, tables, (*path, "state")), plans, tap.gradients_by_plan(op, plans, by_lookup))
        for path, (collection, plans, by_lookup) in waiting.items()
    }


def _describe_broken_chain(op: str, path: tuple[str, ...]) -> str:
    return (
        f"{op}: updates: got micro-batches that were applied to the same tables at {'/'.join(path)!r}, or not all "
        f'since the last update, wanted each applied to the tables that the one before returned, updates["{_TABLES}"], '
        "and all given in that order, or discarded (layers.discard); else new rows of one would be rows of other keys "
        "in the next, or learn nothing."
    )


def _at(op: str, node: Any, path: tuple[str, ...]) -> Any:
    for i, name in enumerate(path):
        if not isinstance(node, Mapping) or name not in node:
            raise ValueError(
                f"{op}: got nothing at {'/'.join(path[: i + 1])!r}, wanted the tables and the gradients of "
                "the taps of every layer that looked something up; differentiate with respect to zero_taps(...)."
            )
        node = node[name]
    return node
