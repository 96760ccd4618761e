"""A Flax NNX layer over a collection: looks up in a model's `__call__`, learns from the gradient of its taps.

Tables, taps and plans lie in Variables of their own types, which filters by `nnx.Param` (optimizers, gradients,
checkpoints) do not see. Graph and tree mode both work. Import it by `from jaxsok.layers import nnx as layers`; the
calls that need no Flax are in tap.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float32

from jaxsok import collection as collection_lib
from jaxsok.collection import Collection
from jaxsok.evict import HandOver
from jaxsok.features import Features
from jaxsok.layers import tap
from jaxsok.plan import Plan
from jaxsok.settings import modes_of_flax
from jaxsok.stats import Stats
from jaxsok.store import State

__all__ = [
    "Embeddings",
    "PlanVariable",
    "TableVariable",
    "TapVariable",
    "clip_by_global_norm",
    "grow",
    "update",
    "value_and_grad",
]


class TableVariable(nnx.Variable):
    """The `State` of a collection: rows, index, optimizer state. Never differentiated; donate it with the model."""


class TapVariable(nnx.Variable):
    """The taps of a step: for each lookup, zeros by feature. Differentiate with respect to them and to `nnx.Param`."""


class PlanVariable(nnx.Variable):
    """The plans of the lookups since the last update."""


class Embeddings(nnx.Module):
    """The tables of a collection as a layer: features in, embeddings by feature out.

    In training mode a call is `Collection.lookup`: unseen keys get rows, and `update` makes the rows learn. It needs
    taps, which `value_and_grad` of this module makes, or `set_taps`. In evaluation mode (`model.eval()`, or
    `deterministic=True`) a call is `Collection.find`, which changes nothing.

    One update takes all calls of a step. A collection follows the growth of one state: two layers need two collections.

    Example:
      >>> import jax.numpy as jnp, jaxsok, numpy as np, optax
      >>> from flax import nnx
      >>> from jaxsok.layers import nnx as layers
      >>> tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.embed, self.out = layers.Embeddings(collection), nnx.Linear(4, 1, rngs=rngs)
      ...     def __call__(self, features):
      ...         return self.out(self.embed(features)["clicked"])
      >>> model = Model(nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> batch = collection.batch({"clicked": np.array([7, 9, 7])})
      >>> loss, grads = layers.value_and_grad(lambda model: jnp.mean(model(batch.features)))(model)
      >>> _ = optimizer.update(model, grads)
      >>> model.embed.update(grads).to_dict()["item"]["num_inserted"]
      2

    Source: decision D7 of the design.
    """

    def __init__(self, collection: Collection, *, seed: int = 0, deterministic: bool = False):
        if not isinstance(collection, Collection):
            raise TypeError(f"Embeddings: collection: got {type(collection).__name__}, wanted a jaxsok.Collection.")
        self.collection = collection
        self.deterministic = deterministic
        self.tables = TableVariable(collection.init(seed))
        # What a step leaves behind is what it found, nothing, so one program serves all steps.
        self.taps = TapVariable(())
        self.plans = PlanVariable(())
        self._is_probe = False  # true while a loss is traced for its lookups alone: then they are the plans

    def __call__(
        self, features: Features | Plan, *, deterministic: bool | None = None, clock: Any = None
    ) -> dict[str, Array]:
        """Looks up a batch or a plan: embeddings by feature, as `Collection.lookup`, with the clock of that.

        `deterministic` replaces the layer's own.

        Raises:
          ValueError: in training mode, taps that are missing or of other features; features of another collection.

        Example:
          `x = jnp.concatenate(list(self.embed(features).values()), axis=-1)`
        """
        if self.deterministic if deterministic is None else deterministic:
            return self.find(features)[0]
        taps, plans = self.taps.get_value(), self.plans.get_value()
        if self._is_probe:
            self.plans.set_value((*plans, tap.Asked.of(self.collection, features)))
            return tap.zero_taps(self.collection, features)
        if len(plans) >= len(taps):
            num_taps = sum(own is not None for own in taps)
            raise ValueError(
                f"Embeddings: got a lookup in training mode with taps for {num_taps}, wanted taps for each; "
                "differentiate with jaxsok.layers.nnx.value_and_grad, or call set_taps(features) before the gradient. "
                "To evaluate: model.eval()."
            )
        embeddings, state, plan = tap.lookup(
            "Embeddings", self.collection, self.tables.get_value(), features, taps[len(plans)], clock, plans
        )
        self.tables.set_value(state)
        self.plans.set_value((*plans, plan))
        return embeddings

    def set_view(self, deterministic: bool | None = None):
        """Sets the mode for `nnx.view`; deterministic lookups find and insert nothing."""
        if deterministic is not None:
            self.deterministic = deterministic

    def set_taps(self, *features: Features | Plan, accumulate: bool = False) -> None:
        """Makes the taps of a step for Flax's own transformations; `value_and_grad` of this module does it by itself.

        `features` are what the differentiated function will look up, in order; differentiate it with respect to
        `nnx.Any(nnx.Param, TapVariable)`. With `accumulate` earlier micro-batches of the step may wait for their
        update; otherwise, and for features of another collection, it raises a ValueError. Under `jit` it costs nothing.

        Example:
          `layer.set_taps(features)`, then `nnx.grad(loss, argnums=nnx.DiffState(0, layers.TapVariable))(layer)`
        """
        self._set_taps([tap.zero_taps(self.collection, of_lookup) for of_lookup in features], accumulate)

    def _set_taps(self, taps: Sequence[tap.Taps], accumulate: bool) -> None:
        waiting = len(self.plans.get_value())
        if waiting and not accumulate:
            raise ValueError(
                f"Embeddings: got {waiting} lookups without an update, wanted none before the next step; call "
                "update(grads) in each step, or pass accumulate=True if one update is to take them all, or discard() "
                "to pass over them."
            )
        self.taps.set_value((*[None] * waiting, *taps))

    def update(self, gradients: Any, *, learning_rate: Any = None) -> Stats:
        """Calls `Collection.update`: every row that was looked up since the last update steps once.

        `gradients` are what `value_and_grad` gave, for this layer or a model with this one layer (of several:
        `update(model, grads)`, or `grads["path"]["to"]["layer"]`); or a list for several calls. `learning_rate`, a
        scalar, perhaps traced, replaces that of the tables. No later step donates the result.

        Raises:
          ValueError: no lookup since the last update; gradients that are missing, or of other lookups.
        """
        several = gradients if isinstance(gradients, (list, tuple)) else [gradients]
        state, stats = self._update_tables([_only_taps(of_call) for of_call in several], learning_rate)
        self._take(state)
        return stats

    def _update_tables(self, gradients: Sequence[Any], learning_rate: Any) -> tuple[State, Stats]:
        state, plans = self.tables.get_value(), self.plans.get_value()
        by_plan = tap.gradients_by_plan("Embeddings.update", plans, gradients)
        return self.collection.update(state, plans, by_plan, learning_rate=learning_rate)

    def _take(self, state: State) -> None:
        self.tables.set_value(state)
        self.taps.set_value(())
        self.plans.set_value(())

    def discard(self) -> None:
        """Skips the lookups since the last update: rows that they inserted stay, and have learned nothing."""
        state = self.tables.get_value()
        self._take(self.collection.discard(state) if self.plans.get_value() else state)

    def drain(self) -> None:
        """Calls `Collection.drain`, before the step after which no lookup is to be in flight."""
        self.tables.set_value(self.collection.drain(self.tables.get_value()))

    def find(self, features: Features | Plan) -> tuple[dict[str, Array], Stats]:
        """Calls `Collection.find`, the evaluation lookup with counts."""
        return self.collection.find(self.tables.get_value(), features)

    def grow(self, batch: Any = None, *, steps: int = 1, clock: Any = None, hand_over: HandOver | None = None) -> None:
        """Calls `Collection.grow`, which has the arguments, between steps, outside `jit`.

        If it raises after it has consumed the state, the layer has the `state` of the error.
        """
        options = {"steps": steps, "clock": clock, "hand_over": hand_over}
        for state in tap.grow_one(self.collection, self.tables.get_value(), batch, **options):
            self.tables.set_value(state)


def value_and_grad(
    f: Callable[..., Any], *, wrt: Any = None, has_aux: bool = False, accumulate: bool = False
) -> Callable[..., Any]:
    """Does `nnx.value_and_grad` for models with `Embeddings`, and differentiates with respect to their taps too.

    The gradients hold a TapVariable for each layer and those of `wrt` (None: `nnx.Param`); `nnx.Optimizer.update`
    takes out its own, and `clip_by_global_norm` of this module clips them together. `f` takes the model and more
    arguments, and returns the loss, or (loss, aux) with `has_aux`. `accumulate` is that of `Embeddings.set_taps`: a
    further micro-batch before one update of all.

    Raises:
      TypeError, ValueError: a model without `Embeddings`; lookups of the last step that were not updated.

    Cost:
      `f` is traced once more, without lookups, to see what it looks up; nothing at run time under `jit`. Not jitted,
      `f` must not look at values.

    Example:
      >>> import jaxsok, numpy as np
      >>> tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.5), capacity=16)]
      >>> layer = Embeddings(jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")]))
      >>> features = layer.collection.batch({"clicked": np.array([7])}).features
      >>> loss, grads = value_and_grad(lambda layer: 2.0 * layer(features)["clicked"].sum())(layer)
      >>> grads["taps"].get_value()[0]["clicked"].tolist()
      [[2.0, 2.0, 2.0, 2.0]]
    """
    wrt = nnx.Any(nnx.Param if wrt is None else wrt, TapVariable)

    @functools.wraps(f)
    def with_taps(model: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _layers("value_and_grad", model)
        if not layers:
            raise ValueError(
                "value_and_grad: model: got one without jaxsok.layers.nnx.Embeddings, wanted at least one; "
                "without them use nnx.value_and_grad."
            )
        found = _lookups(f, (model, *args), kwargs)
        before = [(layer, layer.taps.get_value()) for layer, *_ in layers.values()]
        try:
            for path, (layer, *_) in layers.items():
                layer._set_taps([asked.zero_taps() for asked in found[path]], accumulate)
            # In graph mode, the only one of older Flax, transformations take `DiffState` and carry new Variables out.
            if all(mode.current_value() for mode in modes_of_flax()):
                differentiated = nnx.value_and_grad(f, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)
                return differentiated(model, *args, **kwargs)
            return _value_and_grad_of_tree(f, wrt, has_aux, model, args, kwargs)
        except BaseException:
            for layer, taps in before:
                layer.taps.set_value(taps)
            raise

    return with_taps


def update(model: Any, gradients: Any, *, learning_rate: Any = None) -> dict[str, Stats]:
    """Calls `Embeddings.update` for all layers of a model that looked something up: Stats by path, joined by dots.

    `gradients` are of the whole model, as `value_and_grad` gives them, or a list of them.

    Raises:
      ValueError: no layer looked anything up; gradients that are missing. No layer has changed then.

    Example:
      `stats = layers.update(model, grads)["embed"]`
    """
    waiting = _find_waiting("update", model, _calls_of("update", model, gradients))
    # All before the first takes its own: one that is refused leaves none a step ahead.
    updated = [layer._update_tables(of_layer, learning_rate) for _, layer, of_layer in waiting]
    stats = {}
    for (path, layer, _), (state, of_layer) in zip(waiting, updated, strict=True):
        layer._take(state)
        stats[".".join(map(str, path))] = of_layer
    return stats


def clip_by_global_norm(model: Any, gradients: Any, max_norm: Any) -> tuple[Any, Float32[Array, ""]]:
    """Does `Collection.clip_by_global_norm` for a model: scales rows of all tables and dense parameters together.

    The norm is that of dense tables: each row counts once, with the sum over its uses. Optax's norm of the same
    gradients counts each use by itself.

    `gradients` are of the whole model, as `value_and_grad` gives them; all but taps is dense. Of a list, for the
    micro-batches of one step, dense gradients are summed, as are those of rows. `max_norm` is a positive scalar,
    perhaps traced. Returns the gradients in their form, and the norm before clipping, float32.

    Raises:
      TypeError, ValueError: no layer looked anything up; gradients that are missing; `max_norm` not a positive scalar.

    Example:
      `grads, norm = layers.clip_by_global_norm(model, grads, 1.0)`, before `layers.update(model, grads)`
    """
    op = "clip_by_global_norm"
    several, lookups = _calls_of(op, model, gradients), []
    for _, layer, of_layer in _find_waiting(op, model, several):
        plans = layer.plans.get_value()
        lookups.append((layer.collection, layer.tables.get_value(), plans, tap.gradients_by_plan(op, plans, of_layer)))
    drop_tap = lambda leaf: None if _is_tap(leaf) else leaf  # noqa: E731
    without_taps = [jax.tree.map(drop_tap, of_call, is_leaf=_is_tap) for of_call in several]
    if len({jax.tree.structure(dense) for dense in without_taps}) > 1:
        raise ValueError(
            f"{op}: gradients: got {len(several)} of different dense parameters, wanted those of the same in each "
            "micro-batch."
        )
    dense = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *without_taps)
    return collection_lib.clip_by_global_norm(lookups, gradients, max_norm, dense)


def grow(
    model: Any, batch: Any = None, *, steps: int = 1, clock: Any = None, hand_over: HandOver | None = None
) -> None:
    """Calls `Embeddings.grow` for all layers of a model, between steps, outside `jit`.

    With several layers `batch` is a mapping by the path of the layer, parts joined by "."; a layer that it does not
    name is grown without a batch. The other arguments are those of `Collection.grow`.

    Raises:
      ValueError: a model without layers; two layers over one collection, which can follow the growth of one state only;
        a path without a layer.
    """
    layers = {".".join(map(str, path)): layer for path, (layer, *_) in _layers("grow", model).items()}
    states = {path: layer.tables.get_value() for path, layer in layers.items()}
    collections = {path: layer.collection for path, layer in layers.items()}
    for path, state in tap.grow(states, collections, batch, steps=steps, clock=clock, hand_over=hand_over):
        layers[path].tables.set_value(state)


def _layers(op: str, model: Any) -> dict[tuple[Any, ...], list[Embeddings]]:
    """Finds the layers of a model by their first path: the modules of each, of which `nnx.view` makes several."""
    found: dict[tuple[Any, ...], list[Embeddings]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Embeddings):
            same = [modules for modules in found.values() if modules[0].plans is node.plans]
            modules = same[0] if same else found.setdefault(path, [])
            modules.append(node)
    paths_of: dict[int, list[str]] = {}
    for path, (layer, *_) in found.items():
        paths_of.setdefault(id(layer.tables), []).append(".".join(map(str, path)))
    for paths in paths_of.values():
        if len(paths) > 1:
            raise ValueError(
                f"{op}: model: got one TableVariable for the layers {paths}, wanted one layer that is used in all of "
                "these places."
            )
    return found


def _calls_of(op: str, model: Any, gradients: Any) -> Sequence[Any]:
    """Returns the gradients of each call; those of one call are a tuple or list, too, if the model is one."""
    if not isinstance(gradients, (list, tuple)):
        return [gradients]
    is_one = any(_find_taps(gradients, path) is not None for path in _layers(op, model))
    return [gradients] if is_one else gradients


def _find_waiting(op: str, model: Any, gradients: Sequence[Any]) -> list[tuple[tuple[Any, ...], Embeddings, list[Any]]]:
    """Returns the layers with lookups since the last update: path, layer, and gradients of its taps from each call."""
    waiting = [(path, layer) for path, (layer, *_) in _layers(op, model).items() if layer.plans.get_value()]
    if not waiting:
        raise ValueError(f"{op}: model: got one without lookups since the last update, wanted at least one.")
    return [(path, layer, [_taps_at(op, of_call, path) for of_call in gradients]) for path, layer in waiting]


def _lookups(f: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[tuple[Any, ...], Sequence[tap.Asked]]:
    """Finds what `f` asks of each layer of the model, `args[0]`, in order."""
    graphdef, state = nnx.split((args, dict(kwargs)))
    found: dict[tuple[Any, ...], Sequence[tap.Asked]] = {}

    def probe() -> None:
        # A copy keeps what f does to its modules from them. Nothing is an argument of what is traced: a flag stays one.
        args, kwargs = nnx.merge(graphdef, state, copy=True)
        layers = _layers("value_and_grad", args[0])
        for modules in layers.values():
            modules[0].plans.set_value(())
            for layer in modules:
                layer._is_probe = True
        f(*args, **kwargs)
        for path, (layer, *_) in layers.items():
            found[path] = layer.plans.get_value()

    jax.eval_shape(probe)
    return found


def _value_and_grad_of_tree(f: Callable, wrt: Any, has_aux: bool, model: Any, args: tuple, kwargs: Any) -> Any:
    """Differentiates in tree mode, which has no `DiffState`: the model goes in as two states, and comes out as one."""
    graphdef, diff, rest = nnx.split(model, wrt, ...)

    def pure(diff: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        copy = nnx.merge(graphdef, diff, rest, copy=True)
        out = f(copy, *args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        return loss, (aux, nnx.state(copy, nnx.Not(wrt)))

    (loss, (aux, rest)), grads = nnx.value_and_grad(pure, has_aux=True)(diff, rest, *args, **kwargs)
    nnx.update(model, rest)
    return ((loss, aux), grads) if has_aux else (loss, grads)


def _is_tap(node: Any) -> bool:
    return isinstance(node, TapVariable)


def _only_taps(gradients: Any) -> Any:
    taps = [leaf for leaf in jax.tree.leaves(gradients, is_leaf=_is_tap) if _is_tap(leaf)]
    if len(taps) != 1:
        raise ValueError(
            f"Embeddings.update: gradients: got {len(taps)} TapVariables, wanted that of the layer; differentiate with "
            "jaxsok.layers.nnx.value_and_grad, or with respect to nnx.Any(nnx.Param, TapVariable). With several "
            "layers: jaxsok.layers.nnx.update(model, grads)."
        )
    return taps[0].get_value()


def _find_taps(gradients: Any, path: tuple[Any, ...]) -> Any:
    """Finds the gradients of a layer's taps; None: there are none."""
    node = gradients
    for part in (*path, "taps"):
        parts = dict(enumerate(node)) if isinstance(node, (list, tuple)) else node
        if not isinstance(parts, Mapping) or part not in parts:
            return None
        node = parts[part]
    return node.get_value() if isinstance(node, TapVariable) else node


def _taps_at(op: str, gradients: Any, path: tuple[Any, ...]) -> Any:
    taps = _find_taps(gradients, path)
    if taps is None:
        raise ValueError(
            f"{op}: gradients: got none for the taps of {'.'.join(map(str, path))!r}, wanted them; differentiate "
            "with jaxsok.layers.nnx.value_and_grad, or with respect to nnx.Any(nnx.Param, TapVariable)."
        )
    return taps
