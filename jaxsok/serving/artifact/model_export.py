"""Exporting: a Flax module or a function becomes one program, which takes tables and inputs of any size."""

import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import published
from jaxsok.features import Bags
from jaxsok.kernels import library
from jaxsok.serving.artifact import key_paths
from jaxsok.serving.artifact.inputs import BATCH, KINDS, ArrayInput, BagsInput, InputSpec, input_shapes
from jaxsok.serving.artifact.model import jax_export, manifest_of, write_files
from jaxsok.serving.errors import require_table
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTables, require_tables
from jaxsok.shards import without_mesh
from jaxsok.types import COUNTERS

PLATFORMS: tuple[str, ...] = ("cpu", "cuda")

Function: TypeAlias = Callable[[FrozenTables, Mapping[str, Any]], Any]


class _TracedSpec(FrozenSpec):
    """A spec whose table numbers and words are arguments of the program; compared by identity, as two traces differ."""

    def __init__(self, stores: Any, numbers: Sequence[Any], words: Sequence[Any]) -> None:
        super().__init__(stores)
        self.__dict__["places"] = {
            table.name: (s, numbers[s][i]) for s, tables in enumerate(stores) for i, table in enumerate(tables)
        }
        self.__dict__["words"] = tuple(words)

    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    def read_by(self, table: str, words: Any) -> Any:
        return key_paths.mark(table, words)


@without_mesh
def export_model(
    path: str | os.PathLike,
    model: Any,
    tables: FrozenTables,
    inputs: Mapping[str, InputSpec],
    *,
    variables: Mapping[str, Any] | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes a model for serving: one program for every batch size and tables of every number of rows.

    Args:
      path: a new folder, which appears complete or not at all.
      model: a function of (tables, inputs by name), a module of Flax NNX, or one of Linen. A module is called with the
        inputs by keyword. It gives an array, or arrays by name. What it closes over, dense parameters too, is in the
        file, so below 2 GB. Parameters of a module may be on a mesh; pass those of a function through `jax.device_get`.
      tables: with the names, dims and row dtypes that will be served; their rows do not go into the file.
      inputs: by name.
      variables: of a Linen module, as `init` made them, with "params" as trained.
      platforms: "cpu" and "cuda"; neither needs to be there now.

    Raises:
      FileExistsError: the path is taken, or another process took it while this one wrote.
      ImportError: without the package flatbuffers.
      TypeError, ValueError: names the argument; or JAX's words for what it cannot trace with an unknown batch size.

    Note:
      Sessions pad batches, and the server joins batches of clients, if every result has the batch as its first axis.
      Such a model must treat each sample by itself: a mean or a softmax over the batch would see the others. A model
      with any other result is called with each request as it is, and compiled for each size that comes.

    Cost:
      The model is traced once, and lowered for each platform.

    Example:
      >>> import tempfile
      >>> from jaxsok import Records
      >>> from jaxsok.serving import frozen
      >>> from jaxsok.serving.artifact import ArrayInput, KeysInput, load_model
      >>> from jaxsok.serving.fused import lookup
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> table = frozen.FrozenTable("item", dim=1)
      >>> tables, _ = frozen.freeze_records([(table, frozen.SizedRecords(2, [records]))])
      >>> def model(tables, inputs):
      ...     return lookup(tables, {"item": inputs["item"]})["item"] * inputs["scale"][:, None]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     export_model(f"{folder}/model", model, tables, {"item": KeysInput("item"), "scale": ArrayInput()})
      ...     served = load_model(f"{folder}/model")
      >>> served.call(tables, {"item": np.array([9, 7, 8]), "scale": np.array([1.0, 10.0, 1.0])})["output"].tolist()
      [[2.0], [10.0], [0.0]]
    """
    op, path = "export_model", pathlib.Path(path)
    published.require_new(op, path)
    require_tables(op, tables, on_device=True)
    if isinstance(platforms, str) or not platforms or not set(platforms) <= set(PLATFORMS):
        raise ValueError(f"{op}: platforms: got {platforms!r}, wanted some of {list(PLATFORMS)}.")
    _check_inputs(op, inputs, tables)
    export, function = jax_export(op), _function_of(op, model, variables)
    stores = tables.spec.stores

    def program(arrays: Any, numbers: Any, words: Any, given: Mapping[str, Any]) -> dict[str, Array]:
        spec = _TracedSpec(stores, numbers, words)
        bound = FrozenTables(tuple(FrozenStore(*store) for store in arrays), spec)
        inner = dict(given)
        for name, leaves in given.items():
            if isinstance(leaves, tuple):
                inner[name] = Bags(leaves[0], offsets=leaves[1], weights=(*leaves, None)[2])
        return _name_results(op, function(bound, inner))

    checks = [export.DisabledSafetyCheck.custom_call(target) for target, _ in library.TARGETS]
    shapes = _argument_shapes(export, tables, inputs)
    jitted = jax.jit(program)
    platforms = tuple(dict.fromkeys(platforms))
    exported = export.export(jitted, platforms=platforms, disabled_checks=checks)(*shapes)
    if exported.nr_devices != 1:
        raise ValueError(
            f"{op}: model: got one for {exported.nr_devices} devices, wanted one for a single device: it has arrays or "
            "shardings of a mesh; pass its parameters through jax.device_get, and leave constraints of sharding out."
        )
    try:
        serialized = bytes(exported.serialize())
    except (OverflowError, ValueError) as error:
        wanted = "wanted one below 2 GB"
        raise ValueError(f"{op}: model: got one that jax.export cannot write ({error}), {wanted}.") from error
    lookups = _lookups(jitted.trace(*shapes).jaxpr, shapes, tables, inputs)
    write_files(path, serialized, {**manifest_of(exported, tables, inputs), "lookups": lookups})


def _lookups(
    jaxpr: Any, shapes: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]
) -> dict[str, tuple[str, ...] | None]:
    labels: list[key_paths.Label] = []
    for path, _ in jax.tree.flatten_with_path(shapes)[0]:
        argument, which, rest = path[0].idx, path[1], [step.idx for step in path[2:]]
        label = None
        if argument == 0 and rest[0] >= 2:  # rows and scales
            label = key_paths.Rows(table.name for table in tables.spec.stores[which.idx])
        elif argument == 3 and not isinstance(inputs[which.key], ArrayInput) and rest in ([], [0]):
            label = frozenset([which.key])
        labels.append(label)
    return key_paths.find_inputs(jaxpr, labels, list(tables.tables))


def _function_of(op: str, model: Any, variables: Mapping[str, Any] | None) -> Function:
    """Makes a function of a model of any kind; does not import Flax."""

    def is_module(kind: str) -> bool:
        flax = sys.modules.get(f"flax.{kind}")
        return flax is not None and isinstance(model, flax.Module)

    if is_module("linen"):
        from jaxsok.serving import linen

        if variables is None:
            raise TypeError(f"{op}: variables: got none, wanted those of the Linen module, as init made them.")
        return linen.as_function(model, variables)
    if variables is not None:
        raise TypeError(f"{op}: variables: got some for {type(model).__name__}, wanted them for a Linen module alone.")
    if is_module("nnx"):
        from jaxsok.serving import nnx

        return nnx.as_function(model)
    if not callable(model):
        wanted = "a function of (tables, inputs), or a Flax module"
        raise TypeError(f"{op}: model: got {type(model).__name__}, wanted {wanted}.")
    return model


def _check_inputs(op: str, inputs: Any, tables: FrozenTables) -> None:
    kinds = "KeysInput, BagsInput or ArrayInput"
    if not isinstance(inputs, Mapping) or not inputs:
        raise TypeError(f"{op}: inputs: got {inputs!r}, wanted a mapping from names to {kinds}.")
    for name, spec in inputs.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{op}: inputs: got the name {name!r}, wanted a string.")
        if not isinstance(spec, tuple(KINDS.values())):
            raise TypeError(f'{op}: inputs["{name}"]: got {type(spec).__name__}, wanted {kinds}.')
        if not isinstance(spec, ArrayInput):
            require_table(f'{op}: inputs["{name}"]', spec.table, tables.tables)


def _argument_shapes(export: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]) -> tuple[Any, ...]:
    """Describes the program's arguments; every size that may differ later is a symbol."""
    scope, shape = export.SymbolicScope(), jax.ShapeDtypeStruct
    symbol = lambda name: export.symbolic_shape(name, scope=scope)[0]  # noqa: E731
    arrays, numbers, words = [], [], []
    for s, (store, spec) in enumerate(zip(tables.stores, tables.spec.stores, strict=True)):
        capacity = symbol(f"rows_{s}")
        index = shape((symbol(f"buckets_{s}"), store.index.shape[1]), jnp.uint32)
        rows = shape((capacity, store.rows.shape[1]), store.rows.dtype)
        scales = tuple(shape((capacity,), of_store.dtype) for of_store in store.scales)
        arrays.append((index, shape((len(COUNTERS),), jnp.uint32), rows, scales))
        numbers.append(shape((len(spec),), jnp.int32))
        words.append(shape((symbol(f"tables_{s}"), tables.spec.words[s].shape[1]), jnp.uint32))
    batch = symbol(BATCH)
    given = {
        name: input_shapes(spec, batch, symbol(f"keys_{i}") if isinstance(spec, BagsInput) else 0)
        for i, (name, spec) in enumerate(inputs.items())
    }
    return tuple(arrays), tuple(numbers), tuple(words), given


def _name_results(op: str, out: Any) -> dict[str, Array]:
    out = out if isinstance(out, Mapping) else {"output": out}
    if not out:
        raise ValueError(f"{op}: model: got no results from it, wanted an array, or arrays by name.")
    for name, result in out.items():
        if not isinstance(name, str) or not isinstance(result, (jax.Array, np.ndarray)):
            got = f"{type(result).__name__} as its result {name!r}"
            raise TypeError(f"{op}: model: got {got}, wanted an array, or arrays by name.")
    return {name: jnp.asarray(result) for name, result in out.items()}
