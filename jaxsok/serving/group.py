"""The inputs and results of a Flax layer, without Flax: nnx.py and linen.py say where their tables come from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import checks
from jaxsok.collection import Collection
from jaxsok.features import Bags
from jaxsok.raw_features import count_samples
from jaxsok.serving.errors import RequestError, require_mapping
from jaxsok.serving.frozen import FrozenTables, require_tables
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.types import COMBINERS, MAX_DIM, Combiner


@dataclasses.dataclass(frozen=True)
class LookupSpec:
    """An input of a fused group: the table that its keys read, and the combiner of its bags.

    Raises:
      TypeError, ValueError: when declared; names the argument.

    Example:
      >>> LookupSpec("item", combiner="mean").max_norm is None
      True
    """

    table: str
    combiner: Combiner | None = checks.declare(None, checks.one_of, choices=COMBINERS)
    """The operation on the rows of a bag; None: a row for each key, as of `LookupLayer`."""
    max_norm: float | None = checks.declare(
        None, checks.optional(checks.number), low=0, wanted="a number from 0, or None"
    )
    """The L2 norm that longer rows are scaled down to before they are combined."""
    dim: int | None = checks.declare(
        None, checks.optional(checks.integer), low=1, high=MAX_DIM, wanted=f"1 to {MAX_DIM}, or None"
    )
    """The dim of the table, checked where it is given; Linen's `init` without tables needs it."""

    def __post_init__(self) -> None:
        if not isinstance(self.table, str) or not self.table:
            raise TypeError(f"LookupSpec: table: got {self.table!r}, wanted the name of a table.")
        checks.check_fields(self, f'LookupSpec "{self.table}"')


def read_specs(op: str, given: Any) -> tuple[tuple[str, LookupSpec], ...]:
    """Returns the specs of a group by name, as a hashable value; the name of a table stands for a row for each key.

    TypeError, ValueError: no mapping, an empty one, or other values.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{op}: specs: got {type(given).__name__}, wanted a mapping from names to LookupSpecs.")
    if not given:
        raise ValueError(f"{op}: specs: got none, wanted at least one.")
    for name, spec in given.items():
        if not isinstance(spec, LookupSpec | str):
            got = type(spec).__name__
            raise TypeError(f'{op}: specs["{name}"]: got {got}, wanted a LookupSpec or the name of a table.')
    return tuple((name, LookupSpec(spec) if isinstance(spec, str) else spec) for name, spec in given.items())


def specs_of_features(collection: Collection) -> dict[str, LookupSpec]:
    """Gives the specs of a training collection's features, by their names."""
    dims = {table.name: table.dim for table in collection.tables}
    return {
        feature.name: LookupSpec(feature.table, feature.combiner, dim=dims[feature.table])
        for feature in collection.features
    }


def require_combiner(op: str, spec: LookupSpec) -> LookupSpec:
    """Gives a spec as it is, if it has a combiner; otherwise raises ValueError."""
    if spec.combiner is None:
        raise ValueError(f'{op} "{spec.table}": combiner: got None, wanted "sum", "mean" or "sqrtn".')
    return spec


def embedding(op: str, spec: LookupSpec, tables: FrozenTables | None, keys: Any, **more: Any) -> Array:
    """Computes the result of a layer of one input, from keys or `jaxsok.Bags`.

    Without tables it gives zeros of the same shape, for Linen's `init`. `more` has offsets and weights, and replaces
    the spec's combiner and max_norm where it is not None.
    """
    own = {"combiner": spec.combiner, "max_norm": spec.max_norm}
    given = LookupInput(spec.table, keys, **own | {name: value for name, value in more.items() if value is not None})
    return _look_up(op, {spec.table: spec}, tables, {spec.table: given})[spec.table]


def embeddings(op: str, specs: Mapping[str, LookupSpec], tables: FrozenTables | None, inputs: Any) -> dict[str, Array]:
    """Computes the results of a layer of several inputs, which are keys of some or all specs by name, in one call."""
    require_mapping(f"{op}: inputs", inputs, "names to keys")
    for name in inputs:
        if name not in specs:
            raise RequestError(f"{op}: inputs: got {name!r}, wanted some of {list(specs)}.")
    used = {name: specs[name] for name in inputs}
    given = {
        name: LookupInput(spec.table, inputs[name], spec.combiner, max_norm=spec.max_norm)
        for name, spec in used.items()
    }
    return _look_up(op, used, tables, given)


def check_tables(op: str, tables: Any) -> FrozenTables:
    """Refuses other things than FrozenTables (TypeError), and None (ValueError)."""
    if tables is None or isinstance(tables, tuple):
        raise ValueError(f"{op}: tables: got none, wanted FrozenTables: bind them with set_tables, or pass tables=.")
    require_tables(op, tables)
    return tables


def off_mesh(tree: Any) -> Any:
    """Takes arrays on several devices to the host, as parameters of a training: serving has devices of its own."""

    def take(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        is_numbers = is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return jax.device_get(leaf) if is_numbers and len(leaf.sharding.device_set) > 1 else leaf

    return jax.tree.map(take, tree)


def _look_up(
    op: str, specs: Mapping[str, LookupSpec], tables: FrozenTables | None, inputs: Mapping[str, LookupInput]
) -> dict[str, Array]:
    for name, spec in specs.items():
        if tables is None and spec.dim is None:
            raise ValueError(
                f'{op}: "{name}": got neither tables nor a dim, wanted one of them: init makes zeros of that '
                "shape. Give the layer its dim, or pass tables to init."
            )
        found = tables.tables.get(spec.table) if tables is not None else None
        if found is not None and spec.dim not in (None, found.dim):
            raise ValueError(f'{op}: "{name}": got table "{spec.table}" of dim {found.dim}, wanted {spec.dim}.')
    if tables is not None:
        return lookup(tables, inputs)
    return {name: jnp.zeros((*_shape(read), specs[name].dim), jnp.float32) for name, read in inputs.items()}


def _shape(given: LookupInput) -> tuple[Any, ...]:
    keys = given.keys
    if given.combiner is not None:
        return (count_samples(keys if given.offsets is None else Bags(keys, offsets=given.offsets)),)
    is_words = isinstance(keys, jax.Array) and keys.dtype == jnp.uint32
    return np.shape(keys)[:-1] if is_words else np.shape(keys)
