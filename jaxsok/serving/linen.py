"""Flax Linen layers over frozen tables: `LookupLayer`, `SparseLookupLayer`, and a fused group of both.

Tables reach a layer as an argument of its call, or by the collection "tables", which `set_tables` fills; they are never
in "params". Nothing here is trained; `jaxsok.layers` is for training. Imported by the user:
`from jaxsok.serving import linen as layers`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float32

from jaxsok.collection import Collection
from jaxsok.serving import group
from jaxsok.serving.frozen import FrozenTables
from jaxsok.serving.group import LookupSpec
from jaxsok.types import Combiner

__all__ = ["LookupLayer", "LookupLayers", "LookupSpec", "SparseLookupLayer", "as_function", "set_tables"]

_TABLES, _FROZEN = "tables", "frozen"


class LookupLayer(nn.Module):
    """A layer of single keys in Linen; see `jaxsok.serving.nnx.LookupLayer`. `init` without tables needs `dim`.

    Example:
      `LookupLayer("item").apply({}, np.array([[9, 8]]), tables=tables)`
    """

    table: str
    dim: int | None = None
    """The dim of the table, checked where it is given; `init` without tables needs it."""

    def __call__(self, keys: Any, max_norm: float | None = None, *, tables: FrozenTables | None = None) -> Array:
        spec = LookupSpec(self.table, dim=self.dim)
        return group.embedding("LookupLayer", spec, _tables(self, tables), keys, max_norm=max_norm)


class SparseLookupLayer(nn.Module):
    """A layer of bags in Linen; see `jaxsok.serving.nnx.SparseLookupLayer`. `init` without tables needs `dim`.

    Example:
      `SparseLookupLayer("item").apply({}, Bags(np.array([7, 9, 9]), lengths=np.array([2, 0, 1])), tables=tables)`
    """

    table: str
    combiner: Combiner = "mean"
    """Either "sum", "mean" or "sqrtn"."""
    dim: int | None = None
    """The dim of the table, checked where it is given; `init` without tables needs it."""

    def __call__(
        self,
        keys: Any,
        weights: Any = None,
        *,
        offsets: Any = None,
        combiner: Combiner | None = None,
        max_norm: float | None = None,
        tables: FrozenTables | None = None,
    ) -> Float32[Array, "num_bags dim"]:
        op = "SparseLookupLayer"
        spec = group.require_combiner(op, LookupSpec(self.table, self.combiner, dim=self.dim))
        more = {"weights": weights, "offsets": offsets, "combiner": combiner, "max_norm": max_norm}
        return group.embedding(op, spec, _tables(self, tables), keys, **more)


class LookupLayers(nn.Module):
    """A fused group of inputs in Linen; see `jaxsok.serving.nnx.LookupLayers`.

    Example:
      `LookupLayers({"who": "user", "seen": LookupSpec("item", "sum")}).apply({}, inputs, tables=tables)`
    """

    specs: Mapping[str, LookupSpec | str]
    """The specs by input; the name of a table stands for a row for each key."""

    @classmethod
    def from_collection(cls, collection: Collection, name: str | None = None) -> "LookupLayers":
        """Makes the layer for the features of a training collection, with their names, tables and combiners."""
        return cls(group.specs_of_features(collection), name=name)

    def __call__(self, inputs: Mapping[str, Any], *, tables: FrozenTables | None = None) -> dict[str, Array]:
        op = "LookupLayers"
        return group.embeddings(op, dict(group.read_specs(op, self.specs)), _tables(self, tables), inputs)


def set_tables(variables: Mapping[str, Any], tables: FrozenTables) -> dict[str, Any]:
    """Gives variables whose collection "tables" has the tables at each layer.

    The variables may come from `init`, or have another version of the tables, of any sizes. ValueError: they have no
    collection "tables"; TypeError: `tables` are no FrozenTables.

    Example:
      `scores = model.apply(layers.set_tables(variables, tables), **inputs)`
    """
    tables = group.check_tables("set_tables", tables)
    places = _places("set_tables", variables)
    is_place = lambda node: isinstance(node, (tuple, FrozenTables))  # noqa: E731
    return {**variables, _TABLES: jax.tree.map(lambda _: tables, places, is_leaf=is_place)}


def as_function(
    model: nn.Module, variables: Mapping[str, Any], method: Any = None
) -> Callable[[FrozenTables, Mapping[str, Any]], Any]:
    """Returns the model with its parameters as a function of tables and inputs by name, as `export_model` takes it.

    `variables` come from `init`, with "params" as trained; ValueError: without the collection "tables". `method` of the
    model is called in place of `__call__`, with `**inputs`.

    Example:
      `scores = jax.jit(layers.as_function(model, variables))(tables, {"user": words})`
    """
    _places("as_function", variables)
    variables = group.off_mesh(variables)

    def function(tables: FrozenTables, inputs: Mapping[str, Any]) -> Any:
        return model.apply(set_tables(variables, tables), **inputs, method=method)

    return function


def _places(op: str, variables: Mapping[str, Any]) -> Any:
    places = variables.get(_TABLES)
    if not places:
        raise ValueError(
            f'{op}: variables: got {sorted(variables)}, wanted "{_TABLES}" among them, as model.init makes it '
            "for layers of jaxsok.serving.linen."
        )
    return places


def _tables(layer: nn.Module, given: FrozenTables | None) -> FrozenTables | None:
    """Finds the tables of the call, or those in the collection; None in `init` without any."""
    op = type(layer).__name__
    if layer.is_initializing() and not layer.has_variable(_TABLES, _FROZEN):
        layer.put_variable(_TABLES, _FROZEN, ())  # keeps a place for them
        return None if given is None else group.check_tables(op, given)
    if given is None and layer.has_variable(_TABLES, _FROZEN):
        given = layer.get_variable(_TABLES, _FROZEN)
        if layer.is_initializing() and isinstance(given, tuple):  # the place that the layer's first call has kept
            return None
    return group.check_tables(op, given)
