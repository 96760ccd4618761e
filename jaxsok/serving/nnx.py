"""Flax NNX layers over frozen tables: `LookupLayer` and `SparseLookupLayer` as in HPS, and a fused group of both.

Tables lie in Variables of their own type, apart from the dense parameters, and can be taken out of a model and replaced
(`set_tables`, `nnx.split(model, FrozenTablesVariable, ...)`). Nothing here is trained; `jaxsok.layers` is for training.
Imported by the user: `from jaxsok.serving import nnx as layers`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float32

from jaxsok.collection import Collection
from jaxsok.serving import group
from jaxsok.serving.frozen import FrozenTables
from jaxsok.serving.group import LookupSpec
from jaxsok.types import Combiner

__all__ = [
    "FrozenTablesVariable",
    "LookupLayer",
    "LookupLayers",
    "LookupSpec",
    "SparseLookupLayer",
    "as_function",
    "set_tables",
]

_TRAINING_FLAGS = ("deterministic", "use_running_average")  # what Flax's modules have false in training mode


class FrozenTablesVariable(nnx.Variable):
    """`FrozenTables`, or `()` before there are some. Never differentiated; one can be shared by several layers."""


Tables = FrozenTables | FrozenTablesVariable | None
"""The tables of a layer: some, a Variable of them that several layers share, or nothing yet."""


class LookupLayer(nnx.Module):
    """A row for each key, of one table: one call for this layer. Use `LookupLayers` where a model has several inputs.

    `dim` is checked where it is given. A call takes keys of one axis or more (as `LookupInput.keys`), `max_norm`,
    to which longer rows (L2) are scaled down, and `tables` in place of the bound ones. It gives float32
    `[*keys.shape, dim]`; a missing key reads its table's default, PADDING_KEY zeros.

    Raises:
      TypeError, ValueError: when declared: no name, no dim, or no tables.
      UnknownTableError, RequestError, ValueError: when called: an unknown table, malformed keys, or no tables.

    Example:
      >>> import numpy as np
      >>> from jaxsok import Records
      >>> from jaxsok.serving import frozen
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> table = frozen.FrozenTable("item", dim=1, default=-1.0)
      >>> tables, _ = frozen.freeze_records([(table, frozen.SizedRecords(2, [records]))])
      >>> LookupLayer("item", tables=tables)(np.array([[9, 8]])).tolist()
      [[[2.0], [-1.0]]]

    Source: HPS's `LookupLayer`.
    """

    def __init__(self, table: str, dim: int | None = None, *, tables: Tables = None):
        self.spec = LookupSpec(table, dim=dim)
        self.tables = _variable("LookupLayer", tables)

    def __call__(self, keys: Any, max_norm: float | None = None, *, tables: FrozenTables | None = None) -> Array:
        return group.embedding("LookupLayer", self.spec, _tables(self, tables), keys, max_norm=max_norm)


class SparseLookupLayer(nnx.Module):
    """An embedding for each bag of keys, of one table: one call for this layer. `LookupLayers` fuses several.

    `combiner` is "sum", "mean" or "sqrtn"; `dim` is checked where it is given. A call takes keys: `jaxsok.Bags`,
    `[num_bags, hotness]` filled up with PADDING_KEY, or `[num_keys]` with `offsets` `[num_bags + 1]`; `weights`, a
    float for each key; and `combiner`, `max_norm` and `tables` in place of the layer's. It gives float32
    `[num_bags, dim]`, zeros for an empty bag. Errors are those of `LookupLayer`.

    Example:
      >>> import numpy as np
      >>> from jaxsok import Bags, Records
      >>> from jaxsok.serving import frozen
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> table = frozen.FrozenTable("item", dim=1)
      >>> tables, _ = frozen.freeze_records([(table, frozen.SizedRecords(2, [records]))])
      >>> bags = Bags(np.array([7, 9, 9]), lengths=np.array([2, 0, 1]))
      >>> SparseLookupLayer("item", tables=tables)(bags).tolist()
      [[1.5], [0.0], [2.0]]

    Source: HPS's `SparseLookupLayer`.
    """

    def __init__(self, table: str, combiner: Combiner = "mean", dim: int | None = None, *, tables: Tables = None):
        self.spec = group.require_combiner("SparseLookupLayer", LookupSpec(table, combiner, dim=dim))
        self.tables = _variable("SparseLookupLayer", tables)

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
        more = {"weights": weights, "offsets": offsets, "combiner": combiner, "max_norm": max_norm}
        return group.embedding("SparseLookupLayer", self.spec, _tables(self, tables), keys, **more)


class LookupLayers(nnx.Module):
    """Several inputs in one fused call, of any tables, dims and combiners. Use it for models with many tables.

    In `specs` the name of a table stands for a row for each key. A call takes keys of some or all of the specs by name,
    `jaxsok.Bags` where there is a combiner, and `tables` in place of the bound ones. It gives float32 by name, as the
    other two layers. Errors are those of `LookupLayer`.

    Example:
      >>> import numpy as np
      >>> from jaxsok import Bags, Records
      >>> from jaxsok.serving import frozen
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> source = frozen.SizedRecords(2, [records])
      >>> tables, _ = frozen.freeze_records([(frozen.FrozenTable(name, dim=1), source) for name in ("item", "user")])
      >>> layers = LookupLayers({"who": "user", "seen": LookupSpec("item", combiner="sum")}, tables=tables)
      >>> found = layers({"who": np.array([9, 8]), "seen": Bags(np.array([7, 9, 9]), lengths=np.array([2, 1]))})
      >>> found["who"].tolist(), found["seen"].tolist()
      ([[2.0], [0.0]], [[3.0], [2.0]])
    """

    def __init__(self, specs: Mapping[str, LookupSpec | str], *, tables: Tables = None):
        self.specs = group.read_specs("LookupLayers", specs)
        self.tables = _variable("LookupLayers", tables)

    @classmethod
    def from_collection(cls, collection: Collection, *, tables: Tables = None) -> "LookupLayers":
        """Makes the layer for the features of a training collection, with their names, tables and combiners.

        Example:
          `LookupLayers.from_collection(collection, tables=freeze(collection, state))`
        """
        return cls(group.specs_of_features(collection), tables=tables)

    def __call__(self, inputs: Mapping[str, Any], *, tables: FrozenTables | None = None) -> dict[str, Array]:
        return group.embeddings("LookupLayers", dict(self.specs), _tables(self, tables), inputs)


def set_tables(model: Any, tables: FrozenTables) -> None:
    """Binds all layers of a model to tables, such as a new version.

    Compiled programs are used again for tables of the same sizes. ValueError: the model has no layers of this module.
    """
    tables = group.check_tables("set_tables", tables)
    variables = [node for _, node in nnx.iter_graph(model) if isinstance(node, FrozenTablesVariable)]
    if not variables:
        raise ValueError(
            "set_tables: model: got one without layers of jaxsok.serving.nnx, wanted at least one that is bound."
        )
    for variable in variables:
        variable.set_value(tables)


def as_function(model: Any, method: Callable[..., Any] | None = None) -> Callable[[FrozenTables, Mapping], Any]:
    """Returns the model, as it is now, as a function of tables and inputs by name, as `export_model` takes it.

    Its parameters are inside. `method` is called as `method(model, **inputs)`; None: `model(**inputs)`. ValueError: the
    model has no layers of this module, or some module's `deterministic` or `use_running_average` is false: call
    `model.eval()` first. In training mode batch normalization would mix samples of several clients, and padding.

    Example:
      `scores = jax.jit(layers.as_function(model))(tables, {"user": words})`
    """
    graphdef, bound, others = nnx.split(model, FrozenTablesVariable, ...)
    if not nnx.to_flat_state(bound):
        raise ValueError(
            "as_function: model: got one without layers of jaxsok.serving.nnx, wanted at least one; put "
            "LookupLayers.from_collection(collection, tables=tables) in the place of jaxsok.layers.nnx.Embeddings."
        )
    for path, node in nnx.iter_graph(model):
        is_module = isinstance(node, nnx.Module)
        flags = [name for name in _TRAINING_FLAGS if is_module and getattr(node, name, None) in (False, 0)]
        if flags:
            raise ValueError(
                f"as_function: model: got {type(node).__name__} {'.'.join(map(str, path))} in training mode "
                f"({flags[0]}=False), wanted one that serves; call model.eval() first."
            )
    others = group.off_mesh(others)

    def function(tables: FrozenTables, inputs: Mapping[str, Any]) -> Any:
        copy = nnx.merge(graphdef, bound, others, copy=True)
        set_tables(copy, tables)
        return copy(**inputs) if method is None else method(copy, **inputs)

    return function


def _variable(op: str, tables: Tables) -> FrozenTablesVariable:
    if isinstance(tables, FrozenTablesVariable):
        return tables
    return FrozenTablesVariable(() if tables is None else group.check_tables(op, tables))


def _tables(layer: Any, given: FrozenTables | None) -> FrozenTables:
    return group.check_tables(type(layer).__name__, layer.tables.get_value() if given is None else given)
