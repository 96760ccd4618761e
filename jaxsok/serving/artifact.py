"""A whole model as a file: the program and its dense parameters, for any batch size; the tables stay outside.

A folder of two files. `model.stablehlo` has what `jax.export` wrote; `model.json` says what goes in and comes out,
which tables are wanted, and the checksums. The program takes the arrays of the tables as arguments, of any number of
rows and buckets, and their defaults and numbers likewise: tables can be replaced by larger ones, by ones that lie
beside others in their stores, or in another order. What is fixed is the name, the dim and the row dtype of each.

Loading needs jaxsok and JAX, and nothing of the code that made the model.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import jaxsok
from jaxsok import checks, manifests, published
from jaxsok import keys as keys_lib
from jaxsok.features import Bags
from jaxsok.initializers import InitialRows
from jaxsok.kernels import library
from jaxsok.serving import key_paths
from jaxsok.serving.errors import RequestError, ServingError, UnknownTableError
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTable, FrozenTables
from jaxsok.types import COUNTERS, MAX_DIM, PADDING_KEY

__all__ = [
    "ArrayInput",
    "ArtifactError",
    "BagsInput",
    "KeysInput",
    "OutputSpec",
    "ServedModel",
    "export_model",
    "load_model",
]

FORMAT = "jaxsok-model"
VERSION = 1
PROGRAM, MANIFEST = "model.stablehlo", "model.json"

BATCH = "b"
"""The batch size in shapes."""

PLATFORMS: tuple[str, ...] = ("cpu", "cuda")

_PADDING_WORD = np.uint32(PADDING_KEY & 0xFFFFFFFF)
_LEAST_BATCH = 8  # of a padded call

Function: TypeAlias = Callable[[FrozenTables, Mapping[str, Any]], Any]


class ArtifactError(ServingError):
    """A folder that is no artifact, is damaged, or was made for something else. Names the file."""


# What goes in --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KeysInput:
    """Keys, as many for each sample: a caller gives integers `[b, *shape]`, the model gets `uint32[b, *shape, 2]`."""

    table: str
    """Whose keys they are."""
    shape: tuple[int, ...] = ()
    """Of one sample."""

    def __post_init__(self) -> None:
        _check_table(self)
        _check_shape(self)


@dataclasses.dataclass(frozen=True)
class BagsInput:
    """A bag of keys for each sample: the model gets `jaxsok.Bags` with offsets, and so does a caller give them.

    Example:
      >>> BagsInput("item", is_weighted=True).table
      'item'
    """

    table: str
    """Whose keys they are."""
    is_weighted: bool = False
    """Whether each key has a weight."""

    def __post_init__(self) -> None:
        _check_table(self)


@dataclasses.dataclass(frozen=True)
class ArrayInput:
    """Numbers: `[b, *shape]`.

    Example:
      >>> ArrayInput((13,)).dtype
      'float32'
    """

    shape: tuple[int, ...] = ()
    """Of one sample."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_shape(self)
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError as error:
            raise TypeError(f"ArrayInput: dtype: got {self.dtype!r}, wanted a dtype of numbers.") from error
        if dtype.itemsize > 4 or not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
            raise ValueError(f"ArrayInput: dtype: got {self.dtype!r}, wanted numbers of at most 32 bits.")
        object.__setattr__(self, "dtype", dtype.name)


InputSpec: TypeAlias = KeysInput | BagsInput | ArrayInput

_KINDS: dict[str, type] = {"keys": KeysInput, "bags": BagsInput, "array": ArrayInput}


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One of the results of a model."""

    shape: tuple[int | str, ...]
    """A number, or a formula of "b", the batch size."""
    dtype: str

    @property
    def is_batched(self) -> bool:
        """Whether it has a line for each sample."""
        return bool(self.shape) and self.shape[0] == BATCH


def _check_table(one: Any) -> None:
    if not isinstance(one.table, str) or not one.table:
        raise TypeError(f"{type(one).__name__}: table: got {one.table!r}, wanted the name of a table.")


def _check_shape(one: Any) -> None:
    try:
        shape = tuple(one.shape)
    except TypeError as error:
        raise TypeError(f"{type(one).__name__}: shape: got {one.shape!r}, wanted that of one sample.") from error
    if not all(checks.is_integer(size, 1) for size in shape):
        raise ValueError(f"{type(one).__name__}: shape: got {shape}, wanted that of one sample, sizes from 1.")
    object.__setattr__(one, "shape", tuple(map(int, shape)))


# Tables as arguments -------------------------------------------------------------------------------------------------


class _TracedSpec(FrozenSpec):
    """A spec whose table numbers and words are arguments of the program.

    Compared by identity: it is static in traces, and two traces have other arguments.
    """

    def __init__(self, stores: Any, numbers: Sequence[Any], words: Sequence[Any]) -> None:
        super().__init__(stores)
        self.__dict__["places"] = {
            table.name: (s, numbers[s][i]) for s, tables in enumerate(stores) for i, table in enumerate(tables)
        }
        self.__dict__["words"] = tuple(words)

    def read_by(self, table: str, words: Any) -> Any:
        return key_paths.mark(table, words)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@functools.lru_cache(maxsize=32)
def _rebound(
    wanted: tuple[tuple[FrozenTable, ...], ...], given: FrozenSpec
) -> tuple[tuple[int, ...], tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Finds the tables that a program wants: by store, its number, the tables' numbers, its words."""
    op, there = "call", {table.name: table for tables in given.stores for table in tables}
    stores, numbers, words = [], [], []
    for tables in wanted:
        places = []
        for table in tables:
            if table.name not in there:
                raise UnknownTableError(f'{op}: tables: got {sorted(there)}, wanted "{table.name}" among them.')
            got = there[table.name]
            if (got.dim, got.dtype) != (table.dim, table.dtype):
                raise ServingError(
                    f'{op}: tables: got "{table.name}" of {got.dtype}[{got.dim}], wanted {table.dtype}[{table.dim}], '
                    "of which the model was exported; freeze with that dtype, or export again."
                )
            places.append(given.places[table.name])
        if len({store for store, _ in places}) != 1:
            names = [table.name for table in tables]
            raise ServingError(f"{op}: tables: got {names} in several stores, wanted one, as freeze makes it.")
        stores.append(places[0][0])
        numbers.append(np.array([number for _, number in places], np.int32))
        words.append(given.words[places[0][0]])
    return tuple(stores), tuple(numbers), tuple(words)


def _arrays(store: FrozenStore) -> tuple[Any, ...]:
    return store.index, store.counters, store.rows, store.scales


# Exporting -----------------------------------------------------------------------------------------------------------


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
      path: of a new folder, which is there as a whole or not at all.
      model: a function of (tables, inputs by name), a module of Flax NNX, or one of Linen. A module is called with the
        inputs by keyword. It gives an array, or arrays by name. What it closes over, dense parameters too, is in the
        file, so below 2 GB.
      tables: of the names, dims and row dtypes that will be served; their rows do not go into the file.
      inputs: by name.
      variables: of a Linen module, as `init` made them, with "params" as trained.
      platforms: "cpu" and "cuda"; neither needs to be there now.

    Raises:
      FileExistsError: the path is taken, or another process took it while this one wrote.
      ImportError: without the package flatbuffers.
      TypeError, ValueError: names the argument; or JAX's words for what it cannot trace with an unknown batch size.

    Note:
      Sessions pad batches, and the server joins those of several clients, where every result has the batch as its first
      axis. Such a model has to treat each sample by itself: a mean or a softmax over the batch would see the others. A
      model with any other result (a mean over the batch, a constant) is called with each request as it is, and compiled
      for each size that comes.

    Cost:
      The model is traced and lowered once.

    Example:
      >>> import tempfile
      >>> from jaxsok import Records
      >>> from jaxsok.serving import frozen
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
    if os.path.lexists(path):
        raise FileExistsError(f"{op}: path: got {path}, which exists, wanted a new folder.")
    if not isinstance(tables, FrozenTables):
        raise TypeError(f"{op}: tables: got {type(tables).__name__}, wanted FrozenTables, as freeze gives them.")
    platforms = _check_platforms(op, platforms)
    inputs = _check_inputs(op, inputs, tables)
    export, function = _jax_export(op), _function_of(op, model, variables)
    stores = tables.spec.stores

    def program(arrays: Any, numbers: Any, words: Any, given: Mapping[str, Any]) -> dict[str, Array]:
        bound = FrozenTables(tuple(FrozenStore(*one) for one in arrays), _TracedSpec(stores, numbers, words))
        out = function(bound, {name: _from_leaves(inputs[name], leaves) for name, leaves in given.items()})
        return _named(op, out)

    checks = [export.DisabledSafetyCheck.custom_call(target) for target, _ in library.TARGETS]
    shapes, jitted = _argument_shapes(export, tables, inputs), jax.jit(program)
    lookups = _lookups(jitted.trace(*shapes).jaxpr, shapes, tables, inputs)
    exported = export.export(jitted, platforms=platforms, disabled_checks=checks)(*shapes)
    _write(path, _serialized(op, exported), {**_manifest(exported, tables, inputs), "lookups": lookups})


def _lookups(
    jaxpr: Any, shapes: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]
) -> dict[str, tuple[str, ...] | None]:
    names: list[str | None] = []
    raw: list[Sequence[str]] = []
    for path, leaf in jax.tree.flatten_with_path(shapes)[0]:
        what, which, rest = path[0].idx, path[1], [one.idx for one in path[2:]]
        is_keys = what == 3 and not isinstance(inputs[which.key], ArrayInput) and rest in ([], [0])
        names.append(which.key if is_keys else None)
        is_rows = what == 0 and rest[0] >= 2  # rows and scales
        raw.append([table.name for table in tables.spec.stores[which.idx]] if is_rows else [])
        del leaf
    return key_paths.found(jaxpr, names, raw, list(tables.tables))


def _function_of(op: str, model: Any, variables: Mapping[str, Any] | None) -> Function:
    """A model of any of three kinds as a function; Flax is not imported for it."""
    flax = {name: sys.modules.get(f"flax.{name}") for name in ("nnx", "linen")}
    if flax["linen"] is not None and isinstance(model, flax["linen"].Module):
        from jaxsok.serving import linen

        if variables is None:
            raise TypeError(f"{op}: variables: got none, wanted those of the Linen module, as init made them.")
        return linen.as_function(model, variables)
    if variables is not None:
        raise TypeError(f"{op}: variables: got some for {type(model).__name__}, wanted them for a Linen module alone.")
    if flax["nnx"] is not None and isinstance(model, flax["nnx"].Module):
        from jaxsok.serving import nnx

        return nnx.as_function(model)
    if not callable(model):
        raise TypeError(
            f"{op}: model: got {type(model).__name__}, wanted a function of (tables, inputs), or a Flax module."
        )
    return model


def _check_platforms(op: str, platforms: Sequence[str]) -> tuple[str, ...]:
    if isinstance(platforms, str) or not platforms or not set(platforms) <= set(PLATFORMS):
        raise ValueError(f"{op}: platforms: got {platforms!r}, wanted some of {list(PLATFORMS)}.")
    return tuple(dict.fromkeys(platforms))


def _check_inputs(op: str, inputs: Any, tables: FrozenTables) -> dict[str, InputSpec]:
    if not isinstance(inputs, Mapping) or not inputs:
        raise TypeError(
            f"{op}: inputs: got {inputs!r}, wanted a mapping from names to KeysInput, BagsInput or ArrayInput."
        )
    for name, spec in inputs.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{op}: inputs: got the name {name!r}, wanted a string.")
        if not isinstance(spec, tuple(_KINDS.values())):
            raise TypeError(
                f'{op}: inputs["{name}"]: got {type(spec).__name__}, wanted KeysInput, BagsInput or ArrayInput.'
            )
        if not isinstance(spec, ArrayInput) and spec.table not in tables.tables:
            raise UnknownTableError.of(f'{op}: inputs["{name}"]', spec.table, tables.tables)
    return dict(inputs)


def _argument_shapes(export: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]) -> tuple[Any, ...]:
    """The shapes that the program is traced with; every size that may differ later is a symbol."""
    scope = export.SymbolicScope()

    def symbol(name: str) -> Any:
        return export.symbolic_shape(name, scope=scope)[0]

    shape = jax.ShapeDtypeStruct
    arrays, numbers, words = [], [], []
    for s, (store, spec) in enumerate(zip(tables.stores, tables.spec.stores, strict=True)):
        capacity = symbol(f"rows_{s}")
        arrays.append(
            (
                shape((symbol(f"buckets_{s}"), store.index.shape[1]), jnp.uint32),
                shape((len(COUNTERS),), jnp.uint32),
                shape((capacity, store.rows.shape[1]), store.rows.dtype),
                tuple(shape((capacity,), one.dtype) for one in store.scales),
            )
        )
        numbers.append(shape((len(spec),), jnp.int32))
        words.append(shape((symbol(f"tables_{s}"), tables.spec.words[s].shape[1]), jnp.uint32))
    batch, given = symbol(BATCH), {}
    for i, (name, one) in enumerate(inputs.items()):
        if isinstance(one, KeysInput):
            given[name] = shape((batch, *one.shape, 2), jnp.uint32)
        elif isinstance(one, BagsInput):
            num_keys = symbol(f"keys_{i}")
            weights = (shape((num_keys,), jnp.float32),) if one.is_weighted else ()
            given[name] = (shape((num_keys, 2), jnp.uint32), shape((batch + 1,), jnp.int32), *weights)
        else:
            given[name] = shape((batch, *one.shape), jnp.dtype(one.dtype))
    return tuple(arrays), tuple(numbers), tuple(words), given


def _from_leaves(spec: InputSpec, leaves: Any) -> Any:
    if not isinstance(spec, BagsInput):
        return leaves
    words, offsets, *weights = leaves
    return Bags(words, offsets=offsets, weights=weights[0] if weights else None)


def _named(op: str, out: Any) -> dict[str, Array]:
    if not isinstance(out, Mapping):
        out = {"output": out}
    if not out:
        raise ValueError(f"{op}: model: got no results from it, wanted an array, or arrays by name.")
    for name, one in out.items():
        if not isinstance(name, str) or not isinstance(one, (jax.Array, np.ndarray)):
            raise TypeError(
                f"{op}: model: got {type(one).__name__} as its result {name!r}, wanted an array, or arrays by name."
            )
    return {name: jnp.asarray(one) for name, one in out.items()}


def _manifest(exported: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]) -> dict[str, Any]:
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return {
        "format": FORMAT,
        "version": VERSION,
        "jaxsok": jaxsok.__version__,
        "jax": jax.__version__,
        "calling_convention": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "inputs": [{"name": name, **_input_to_json(one)} for name, one in inputs.items()],
        "outputs": [
            {
                "name": name,
                "shape": [size if isinstance(size, int) else str(size) for size in aval.shape],
                "dtype": aval.dtype.name,
            }
            for name, aval in outputs.items()
        ],
        "stores": [
            {"dim": store[0].dim, "dtype": store[0].dtype, "tables": [_table_to_json(table) for table in store]}
            for store in tables.spec.stores
        ],
    }


def _table_to_json(table: FrozenTable) -> dict[str, Any]:
    initial = {} if table.initial is None else {"initial": table.initial.to_json()}
    return {"name": table.name, "default": float(table.default), **initial}


def _table_from_json(value: dict[str, Any], dim: Any, dtype: Any) -> FrozenTable:
    initial = InitialRows.from_json(value["initial"]) if "initial" in value else None
    return FrozenTable(value["name"], dim, value["default"], dtype, initial)


def _size_of_axis(value: Any) -> None:
    (manifests.text() if isinstance(value, str) else manifests.integer())(value)


def _check_initial(value: Any) -> None:
    try:
        InitialRows.from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise manifests.Wrong(value, f"what InitialRows.to_json gives ({error})") from error


_NAME = manifests.text(".+", "a name")
_MODEL = manifests.entries(
    {
        "jax": manifests.text(),
        "inputs": manifests.list_of(manifests.entries({"name": _NAME, "kind": manifests.one_of(tuple(_KINDS))})),
        "outputs": manifests.list_of(
            manifests.entries({"name": _NAME, "shape": manifests.list_of(_size_of_axis), "dtype": manifests.text()})
        ),
        "stores": manifests.list_of(
            manifests.entries(
                {
                    "dim": manifests.integer(1, MAX_DIM),
                    "dtype": manifests.text(),
                    "tables": manifests.list_of(
                        manifests.entries({"name": _NAME, "default": manifests.number}, {"initial": _check_initial})
                    ),
                }
            )
        ),
        "program": manifests.entries({"bytes": manifests.integer(), "sha256": manifests.text()}),
    },
    {"lookups": manifests.by_name(manifests.optional(manifests.list_of(_NAME)))},
)
"""What a manifest has; the rest of an input is checked where it is made."""


def _input_to_json(spec: InputSpec) -> dict[str, Any]:
    (kind,) = (kind for kind, one in _KINDS.items() if type(spec) is one)
    fields = dataclasses.asdict(spec)
    return {"kind": kind, **{name: list(one) if isinstance(one, tuple) else one for name, one in fields.items()}}


def _jax_export(op: str) -> Any:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{op}: flatbuffers: got no such module, wanted it for the files of jax.export; pip install "
            "'jaxsok[serving]'."
        ) from error
    from jax import export

    return export


def _serialized(op: str, exported: Any) -> bytes:
    try:
        return bytes(exported.serialize())
    except (OverflowError, ValueError) as error:
        raise ValueError(
            f"{op}: model: got one that jax.export cannot write ({error}), wanted one below 2 GB."
        ) from error


def _write(path: pathlib.Path, program: bytes, manifest: dict[str, Any]) -> None:
    """Writes both files into a folder of this writer's own, which then gets its name."""
    manifest = {**manifest, "program": {"bytes": len(program), "sha256": hashlib.sha256(program).hexdigest()}}
    manifest["sha256"] = _digest(manifest)
    folder = published.unfinished(path, secrets.token_hex(8))
    try:
        folder.mkdir(parents=True)
        for name, content in ((PROGRAM, program), (MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())):
            with open(folder / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        published.publish("export_model", folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _digest(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest without its own."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# Loading -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that was exported: what it wants, and the call. Made by `load_model`; equal to itself alone."""

    inputs: dict[str, InputSpec]
    """By name, in the order of the export."""
    outputs: dict[str, OutputSpec]
    """By name."""
    tables: dict[str, FrozenTable]
    """That `call` wants, by name. Keys without a row read what the tables that are given say, not what these say."""
    lookups: dict[str, tuple[str, ...] | None]
    """By table the inputs whose keys it is looked up by; None: keys are worked out by the model, or it is not known."""
    platforms: tuple[str, ...]
    """That it has a program for."""
    path: str
    """Where it was read from."""
    _stores: tuple[tuple[FrozenTable, ...], ...] = dataclasses.field(repr=False)
    _program: Any = dataclasses.field(repr=False)
    """Of arrays of tables, numbers, words and leaves; jitted."""

    @property
    def is_per_sample(self) -> bool:
        """Whether every result has a line for each sample; else batches are neither padded nor joined with others."""
        return all(one.is_batched for one in self.outputs.values())

    def call(self, tables: FrozenTables, inputs: Mapping[str, Any], *, pad: bool = False) -> dict[str, Array]:
        """Runs the model; gives arrays by name.

        Args:
          tables: with those that it wants among them, of any number of rows; on one device, where it runs.
          inputs: all of them, of one batch size. Keys are NumPy integers or `uint32[..., 2]` words, bags are
            `jaxsok.Bags`, the others NumPy or JAX arrays.
          pad: whether the batch, and the keys of bags, are filled up to a power of two, and results cut to the batch:
            so a few programs serve all sizes. Only for models that treat each sample by itself (`is_per_sample` is the
            least of it): others would count padding as samples.

        Raises:
          RequestError: inputs that are missing, unknown, of another dtype or shape, or an empty batch without `pad`.
          UnknownTableError, ServingError: tables that are missing, or of another dim or dtype.

        Cost:
          One dispatch; for each new size of batch, bags or tables a program is compiled.
        """
        if not isinstance(tables, FrozenTables):
            raise TypeError(f"call: tables: got {type(tables).__name__}, wanted FrozenTables, as freeze gives them.")
        bound = self._bound(tables)
        leaves, num_samples = self.read(inputs)
        if num_samples == 0 and not pad:
            raise RequestError("call: inputs: got a batch of no samples, wanted one at least; or pad=True.")
        out = self._program(*bound, self.padded(leaves, num_samples) if pad else leaves)
        return {
            name: out[name][:num_samples] if pad and one.is_batched else out[name] for name, one in self.outputs.items()
        }

    def run(self, tables: FrozenTables, leaves: Mapping[str, Any]) -> dict[str, Array]:
        """Runs the program over what `read` gave, or `padded`; results have as many lines as that has samples."""
        out = self._program(*self._bound(tables), leaves)
        return {name: out[name] for name in self.outputs}

    def compile(self, tables: FrozenTables, leaves: Mapping[str, Any]) -> None:
        """Compiles the program for tables and leaves (`leaves_of`), whose arrays may be `jax.ShapeDtypeStruct`."""
        self._program.lower(*self._bound(tables), leaves).compile()

    def leaves_of(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Shapes of what the program gets, by what `sizes` gives."""
        shape, leaves = jax.ShapeDtypeStruct, {}
        for (name, spec), (num_samples, num_keys) in zip(self.inputs.items(), sizes, strict=True):
            if isinstance(spec, KeysInput):
                leaves[name] = shape((num_samples, *spec.shape, 2), jnp.uint32)
            elif isinstance(spec, BagsInput):
                weights = (shape((num_keys,), jnp.float32),) if spec.is_weighted else ()
                leaves[name] = (shape((num_keys, 2), jnp.uint32), shape((num_samples + 1,), jnp.int32), *weights)
            else:
                leaves[name] = shape((num_samples, *spec.shape), jnp.dtype(spec.dtype))
        return leaves

    def sizes(self, leaves: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Of each input the samples, and the keys of its bags (0 of other inputs): a program is compiled for each."""
        return tuple(
            (one[1].shape[0] - 1, one[0].shape[0]) if isinstance(one, tuple) else (one.shape[0], 0)
            for one in (leaves[name] for name in self.inputs)
        )

    def padded(self, leaves: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        """What `read` gave, filled up to a power of two of samples, and of keys of bags."""
        size = _padded_size(num_samples, _LEAST_BATCH)
        return {name: _padded(one, num_samples, size) for name, one in leaves.items()}

    def _bound(self, tables: FrozenTables) -> tuple[Any, Any, Any]:
        stores, numbers, words = _rebound(self._stores, tables.spec)
        return tuple(_arrays(tables.stores[store]) for store in stores), numbers, words

    def read(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Checks the inputs of a call; gives what the program gets, before it is padded, and the batch size.

        Raises:
          RequestError: names input, got and wanted.
        """
        if not isinstance(inputs, Mapping):
            raise RequestError(f"call: inputs: got {type(inputs).__name__}, wanted a mapping from names to arrays.")
        if inputs.keys() != self.inputs.keys():
            raise RequestError(f"call: inputs: got {sorted(inputs)}, wanted {sorted(self.inputs)}.")
        leaves, sizes = {}, {}
        for name, spec in self.inputs.items():
            leaves[name], sizes[name] = _read(f'call: inputs["{name}"]', spec, inputs[name])
        if len(set(sizes.values())) != 1:
            raise RequestError(f"call: inputs: got batch sizes {sizes}, wanted one.")
        return leaves, next(iter(sizes.values()))


def load_model(path: str | os.PathLike, device: Any = None) -> ServedModel:
    """Reads what `export_model` wrote; without the code that made the model.

    Args:
      path: of the folder.
      device: of JAX, where the tables lie and it will run; None: the default one.

    Raises:
      FileNotFoundError: there is none.
      ArtifactError: it is no artifact, damaged, of a newer version, or not for the platform of the device.
      ImportError: without the package flatbuffers.
    """
    op, path = "load_model", pathlib.Path(path)
    export = _jax_export(op)
    manifest = _read_manifest(op, path)
    program = _read_program(op, path / PROGRAM, manifest["program"])
    try:
        exported = export.deserialize(bytearray(program))
    except Exception as error:  # of many kinds, flatbuffers' own among them
        raise ArtifactError(
            f"{op}: {path / PROGRAM}: got a program that JAX {jax.__version__} does not read ({error}), wanted one of "
            f"its time; it was made by JAX {manifest['jax']}. Export again."
        ) from error
    device = jax.devices()[0] if device is None else device
    here = {"gpu": "cuda"}.get(device.platform, device.platform)
    if here not in exported.platforms:
        raise ArtifactError(
            f"{op}: {path}: got a program for {list(exported.platforms)}, wanted one for {here!r}, the platform of "
            f"{device}, where it is to run; export with it in `platforms`."
        )
    try:
        inputs = {one["name"]: _input_from_json(one) for one in manifest["inputs"]}
        outputs = {one["name"]: OutputSpec(tuple(one["shape"]), one["dtype"]) for one in manifest["outputs"]}
        stores = tuple(
            tuple(_table_from_json(one, store["dim"], store["dtype"]) for one in store["tables"])
            for store in manifest["stores"]
        )
        tables = {table.name: table for store in stores for table in store}
        known = manifest.get("lookups", {})
        lookups = {name: None if known.get(name) is None else tuple(known[name]) for name in tables}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{op}: {path / MANIFEST}: got {error}, wanted what export_model writes.") from error
    library.register()
    platforms = tuple(exported.platforms)
    return ServedModel(inputs, outputs, tables, lookups, platforms, str(path), stores, jax.jit(exported.call))


def _read_manifest(op: str, path: pathlib.Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise FileNotFoundError(f"{op}: path: got {path}, where there is no folder, wanted one of export_model.")
    if not file.is_file():
        raise ArtifactError(f"{op}: {path}: got a folder without {MANIFEST}, wanted one of export_model.")
    manifest = manifests.parsed(op, file, ArtifactError)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(f"{op}: {file}: got format {manifest.get('format')!r}, wanted {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise ArtifactError(
            f"{op}: {file}: got version {manifest.get('version')!r}, wanted {VERSION}; export again, or update jaxsok."
        )
    if manifest.get("sha256") != _digest(manifest):
        raise ArtifactError(f"{op}: {file}: got another checksum than it names; it was changed.")
    manifests.checked(op, file, manifest, _MODEL, ArtifactError)
    return manifest


def _read_program(op: str, file: pathlib.Path, wanted: Mapping[str, Any]) -> bytes:
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise ArtifactError(f"{op}: {file}: got no such file, wanted the program of the manifest beside it.") from error
    if size != wanted["bytes"]:
        raise ArtifactError(f"{op}: {file}: got {size} bytes, wanted {wanted['bytes']}; it was cut or changed.")
    program = file.read_bytes()
    if hashlib.sha256(program).hexdigest() != wanted["sha256"]:
        raise ArtifactError(f"{op}: {file}: got another checksum than the manifest has; it was changed.")
    return program


def _input_from_json(one: Mapping[str, Any]) -> InputSpec:
    kind = _KINDS[one["kind"]]
    fields = {field.name: one[field.name] for field in dataclasses.fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


# Inputs of a call ----------------------------------------------------------------------------------------------------


def _read(what: str, spec: InputSpec, given: Any) -> tuple[Any, int]:
    """Checks an input; gives it as the program gets it, and its batch size."""
    if isinstance(spec, KeysInput):
        words = _words(what, given)
        if words.ndim < 2 or words.shape[1:-1] != spec.shape:
            wanted = [BATCH, *spec.shape]
            raise RequestError(f"{what}: got keys of shape {list(words.shape[:-1])}, wanted {_told(wanted)}.")
        return words, words.shape[0]
    if isinstance(spec, BagsInput):
        return _read_bags(what, spec, given)
    array = given if isinstance(given, jax.Array) else np.asarray(given)
    wanted = jnp.dtype(spec.dtype)
    if not _fits(array.dtype, wanted):
        raise RequestError(f"{what}: got {array.dtype}{list(array.shape)}, wanted {spec.dtype}.")
    if array.ndim == 0 or array.shape[1:] != spec.shape:
        raise RequestError(f"{what}: got shape {list(array.shape)}, wanted {_told([BATCH, *spec.shape])}.")
    made = array.astype(wanted)
    if jnp.issubdtype(wanted, jnp.integer) and not np.can_cast(array.dtype, wanted, "safe"):
        wrong = np.asarray((made != array) | ((made < 0) != (array < 0)))
        if wrong.any():
            limits = jnp.iinfo(wanted)
            raise RequestError(
                f"{what}: got {np.asarray(array)[wrong][0]}, wanted {limits.min} to {limits.max}, as {spec.dtype} has."
            )
    return made, array.shape[0]


def _read_bags(what: str, spec: BagsInput, given: Any) -> tuple[Any, int]:
    if not isinstance(given, Bags):
        raise RequestError(f"{what}: got {type(given).__name__}, wanted jaxsok.Bags.")
    if given.inverse is not None:
        raise RequestError(f"{what}: inverse: got one, wanted none.")
    if (given.weights is not None) != spec.is_weighted:
        got, wanted = ("none", "one for each key") if spec.is_weighted else ("some", "none")
        raise RequestError(f"{what}: weights: got {got}, wanted {wanted}.")
    words = _words(what, given.keys)
    shape, offsets = words.shape[:-1], given.offsets
    if given.lengths is not None and offsets is not None:
        raise RequestError(f"{what}: got both lengths and offsets, wanted one of them.")
    if given.lengths is not None:
        lengths = _integers(f"{what}: lengths", given.lengths)
        if (lengths < 0).any():
            raise RequestError(f"{what}: lengths: got negative ones, wanted numbers from 0.")
        offsets = np.concatenate([[0], np.cumsum(lengths)])
    elif offsets is not None:
        offsets = _integers(f"{what}: offsets", offsets)
    else:
        if len(shape) not in (1, 2):
            raise RequestError(f"{what}: got keys of shape {list(shape)}, wanted [{BATCH}] or [{BATCH}, hotness].")
        offsets = np.arange(shape[0] + 1) * (shape[1] if len(shape) == 2 else 1)
        words = words.reshape(-1, 2)
    if words.ndim != 2:
        raise RequestError(f"{what}: got keys of shape {list(shape)} with lengths or offsets, wanted [num_keys].")
    num_keys = words.shape[0]
    if not len(offsets) or (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > num_keys:
        raise RequestError(
            f"{what}: offsets: got some that do not rise from 0 to at most {num_keys}, the keys there are."
        )
    leaves = [words, offsets.astype(np.int32)]
    if spec.is_weighted:
        weights = given.weights if isinstance(given.weights, jax.Array) else np.asarray(given.weights)
        if weights.shape != shape or not _fits(weights.dtype, jnp.dtype("float32")):
            raise RequestError(
                f"{what}: weights: got {weights.dtype}{list(weights.shape)}, wanted float32{list(shape)}, as the keys."
            )
        if isinstance(weights, np.ndarray) and not np.isfinite(weights).all():
            raise RequestError(f"{what}: weights: got infinite or NaN, wanted finite numbers.")
        leaves.append(weights.astype(jnp.float32).reshape(-1))
    if num_keys == 0:  # a size of a program is 1 at least; the key is beyond the last bag
        leaves = [_filled(leaves[0], 1, _PADDING_WORD), leaves[1], *(_filled(one, 1, 0) for one in leaves[2:])]
    return tuple(leaves), len(offsets) - 1


def _words(what: str, keys: Any) -> Any:
    try:
        return keys_lib.words_of(keys, "int32", what)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def _integers(what: str, given: Any) -> np.ndarray:
    given = np.asarray(given)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise RequestError(f"{what}: got {given.dtype}{list(given.shape)}, wanted integers of one axis.")
    return given.astype(np.int64)


def _fits(got: Any, wanted: Any) -> bool:
    """Whether numbers of one dtype may be given for another: the same kind, or integers for floats."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    rank = lambda dtype: next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), -1)  # noqa: E731
    if rank(got) == -1 or (rank(got) == 0) != (rank(wanted) == 0):
        return got == wanted
    return rank(got) <= rank(wanted) and (rank(wanted) == 2 or np.can_cast(got, wanted, "safe") or got == np.int64)


def _padded_size(size: int, least: int) -> int:
    return max(least, 1 << max(0, size - 1).bit_length())


def _padded(leaves: Any, num_samples: int, size: int) -> Any:
    """Fills an input up to `size` samples: with PADDING_KEY, empty bags, or 0."""
    if isinstance(leaves, tuple):
        words, offsets, *weights = leaves
        num_keys = _padded_size(words.shape[0], _LEAST_BATCH)
        last = offsets[-1] if len(offsets) else 0
        return (
            _filled(words, num_keys, _PADDING_WORD),
            _filled(offsets, size + 1, last),
            *(_filled(one, num_keys, 0) for one in weights),
        )
    return _filled(leaves, size, _PADDING_WORD if leaves.dtype == jnp.uint32 else 0)


def _filled(array: Any, size: int, value: Any) -> Any:
    more = size - array.shape[0]
    if more == 0:
        return array
    numbers = jnp if isinstance(array, jax.Array) else np
    return numbers.concatenate([array, numbers.full((more, *array.shape[1:]), value, array.dtype)])


def _told(shape: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
