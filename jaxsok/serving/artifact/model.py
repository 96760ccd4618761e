"""Loading an exported model, and calling it with tables and inputs."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxsok.kernels import library
from jaxsok.serving.artifact import files, inputs as inputs_lib
from jaxsok.serving.artifact.files import ArtifactError
from jaxsok.serving.artifact.inputs import LEAST_BATCH, InputSpec, OutputSpec
from jaxsok.serving.errors import RequestError, ServingError, UnknownTableError, require_mapping
from jaxsok.serving.frozen import FrozenSpec, FrozenTable, FrozenTables, require_tables
from jaxsok.serving.padding import padded_size


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """An exported model: its tables, its inputs, and its call. Made by `load_model`; equal to itself alone."""

    inputs: dict[str, InputSpec]
    """The inputs by name, in the order of the export."""
    outputs: dict[str, OutputSpec]
    """The results by name."""
    tables: dict[str, FrozenTable]
    """The tables that `call` wants. Keys without a row read what the tables of the call say, not what these say."""
    lookups: dict[str, tuple[str, ...] | None]
    """The inputs whose keys each table is looked up by; None: the model computes keys, or they are not known."""
    platforms: tuple[str, ...]
    """The platforms with a program in the file."""
    path: str
    """The folder that it was read from."""
    _stores: tuple[tuple[FrozenTable, ...], ...] = dataclasses.field(repr=False)
    _program: Any = dataclasses.field(repr=False)  # jitted; takes arrays of tables, numbers, words and leaves
    _unfused: Any = dataclasses.field(repr=False)  # the same with a call for each input of a lookup

    @property
    def is_per_sample(self) -> bool:
        """True if every result has a row for each sample; else batches are neither padded nor joined with others."""
        return all(output.is_batched for output in self.outputs.values())

    @property
    def known_lookups(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The tables that are looked up by keys of inputs, and these inputs."""
        return tuple((table, names) for table, names in self.lookups.items() if names)

    def call(self, tables: FrozenTables, inputs: Mapping[str, Any], *, pad: bool = False) -> dict[str, Array]:
        """Runs the model; gives arrays by name. Its lookups are fused if `tables.is_fused`.

        Args:
          tables: include those that it needs, of any number of rows; on one device, where it runs.
          inputs: all of them, of one batch size. Keys are NumPy integers or `uint32[..., 2]` words, bags are
            `jaxsok.Bags`, the others NumPy or JAX arrays.
          pad: whether the batch, and the keys of bags, are filled up to a power of two, and results cut to the batch,
            so that a few programs serve all sizes. Only for models that treat each sample by itself: others, even if
            `is_per_sample`, would count padding as samples.

        Raises:
          RequestError: inputs that are missing, unknown, of another dtype or shape, or an empty batch without `pad`.
          UnknownTableError, ServingError: tables that are missing, or of another dim or dtype.

        Cost:
          One dispatch; for each new size of batch, bags or tables a program is compiled.
        """
        require_tables("call", tables)
        leaves, num_samples = self.read(inputs)
        if num_samples == 0 and not pad:
            raise RequestError("call: inputs: got a batch of no samples, wanted one at least; or pad=True.")
        if not pad:
            return self.run(tables, leaves)
        return self.cut(self.run(tables, self.pad(leaves, num_samples)), num_samples)

    def run(self, tables: FrozenTables, leaves: Mapping[str, Any]) -> dict[str, Array]:
        """Runs the program over what `read` or `pad` gave; results have a row for each of its samples."""
        out = self._program_for(tables)(*self._bind(tables), leaves)
        return {name: out[name] for name in self.outputs}

    def compile(self, tables: FrozenTables, leaves: Mapping[str, Any]) -> None:
        """Compiles the program for tables and leaves (`leaves_of`), whose arrays may be `jax.ShapeDtypeStruct`."""
        self._program_for(tables).lower(*self._bind(tables), leaves).compile()

    def unfuse(self) -> "ServedModel":
        """Returns the model whose lookups make a call for each input, whatever the tables say."""
        return dataclasses.replace(self, _program=self._unfused)

    def _program_for(self, tables: FrozenTables) -> Any:
        return self._program if tables.is_fused else self._unfused

    def leaves_of(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Returns the shapes of the program's inputs, from what `sizes` gives."""
        return {
            name: inputs_lib.input_shapes(spec, num_samples, num_keys)
            for (name, spec), (num_samples, num_keys) in zip(self.inputs.items(), sizes, strict=True)
        }

    def sizes(self, leaves: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Counts the samples of each input, and the keys of its bags (else 0): a program is compiled for each."""
        return tuple(
            (leaf[1].shape[0] - 1, leaf[0].shape[0]) if isinstance(leaf, tuple) else (leaf.shape[0], 0)
            for leaf in (leaves[name] for name in self.inputs)
        )

    def pad(self, leaves: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        """Pads what `read` gave to powers of two of samples, and of keys of bags."""
        size = padded_size(num_samples, LEAST_BATCH)
        return {name: inputs_lib.pad_input(leaf, size) for name, leaf in leaves.items()}

    def cut(self, out: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
        """Takes the rows of padding samples from results of `run`."""
        return {name: value[:num_samples] if self.outputs[name].is_batched else value for name, value in out.items()}

    def _bind(self, tables: FrozenTables) -> tuple[Any, Any, Any]:
        require_tables("call", tables, on_device=True)
        stores, numbers, words = _find_tables(self._stores, tables.spec)
        arrays = tuple(tables.stores[store] for store in stores)
        return tuple((store.index, store.counters, store.rows, store.scales) for store in arrays), numbers, words

    def read(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Checks the inputs of a call (RequestError); gives the program's inputs, unpadded, and the batch size."""
        require_mapping("call: inputs", inputs, "names to arrays")
        if inputs.keys() != self.inputs.keys():
            raise RequestError(f"call: inputs: got {sorted(inputs)}, wanted {sorted(self.inputs)}.")
        leaves, sizes = {}, {}
        for name, spec in self.inputs.items():
            leaves[name], sizes[name] = inputs_lib.read_input(f'call: inputs["{name}"]', spec, inputs[name])
        if len(set(sizes.values())) != 1:
            raise RequestError(f"call: inputs: got batch sizes {sizes}, wanted one.")
        return leaves, next(iter(sizes.values()))


def load_model(path: str | os.PathLike, device: Any = None) -> ServedModel:
    """Reads what `export_model` wrote, without the code that made the model.

    `device` is where the tables lie and the model will run; None: JAX's default device.

    Raises:
      FileNotFoundError: there is no such folder.
      ArtifactError: it is no artifact, damaged, of a newer version, or not for the platform of the device.
      ImportError: without the package flatbuffers.
    """
    op, path = "load_model", pathlib.Path(path)
    export = jax_export(op)
    manifest = files.read_manifest(op, path)
    programs = {}
    for entry, file in ((entry, path / name) for entry, name in files.PROGRAMS.items() if entry in manifest):
        program = bytearray(files.read_program(op, file, manifest[entry]))
        try:
            programs[entry] = export.deserialize(program)
        except Exception as error:  # of many kinds, some of flatbuffers
            raise ArtifactError(
                f"{op}: {file}: got a program that JAX {jax.__version__} does not read ({error}), wanted one of its "
                f"time; it was made by JAX {manifest['jax']}. Export again."
            ) from error
    exported = programs["program"]
    device = jax.devices()[0] if device is None else device
    here = {"gpu": "cuda"}.get(device.platform, device.platform)
    if here not in exported.platforms:
        raise ArtifactError(
            f"{op}: {path}: got a program for {list(exported.platforms)}, wanted one for {here!r}, the platform of "
            f"{device}, where it is to run; export with it in `platforms`."
        )
    try:
        inputs = {entry["name"]: inputs_lib.input_from_json(entry) for entry in manifest["inputs"]}
        outputs = {entry["name"]: OutputSpec(tuple(entry["shape"]), entry["dtype"]) for entry in manifest["outputs"]}
        stores = tuple(map(files.store_from_json, manifest["stores"]))
        tables = {table.name: table for store in stores for table in store}
        known = manifest.get("lookups", {})
        lookups = {name: None if known.get(name) is None else tuple(known[name]) for name in tables}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{op}: {path / files.MANIFEST}: got {error}, wanted what export_model writes.") from error
    library.register()
    platforms = tuple(exported.platforms)
    fused, unfused = jax.jit(exported.call), programs.get("unfused")
    unfused = fused if unfused is None else jax.jit(unfused.call)
    return ServedModel(inputs, outputs, tables, lookups, platforms, str(path), stores, fused, unfused)


def jax_export(op: str) -> Any:
    """Imports `jax.export`; ImportError: flatbuffers is missing, with which it writes files."""
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        wanted = "wanted it for the files of jax.export; pip install 'jaxsok[serving]'"
        raise ImportError(f"{op}: flatbuffers: got no such module, {wanted}.") from error
    from jax import export

    return export


def require_fit(what: str, wanted: Iterable[FrozenTable], given: Mapping[str, FrozenTable]) -> None:
    """Refuses to run a model that wants some tables over others: UnknownTableError, or of another dim or dtype."""
    for table in wanted:
        if table.name not in given:
            raise UnknownTableError(f'{what}: got {sorted(given)}, wanted "{table.name}" among them.')
        got = given[table.name]
        if (got.dim, got.dtype) != (table.dim, table.dtype):
            raise ServingError(
                f'{what}: got "{table.name}" of {got.dtype}[{got.dim}], wanted {table.dtype}[{table.dim}], as '
                "the model was exported; freeze, or serve, with that dtype, or export again."
            )


@functools.lru_cache(maxsize=32)
def _find_tables(
    wanted: tuple[tuple[FrozenTable, ...], ...], given: FrozenSpec
) -> tuple[tuple[int, ...], tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Finds the tables that a program wants, by store: its number, the tables' numbers, and its words."""
    op, there = "call", {table.name: table for tables in given.stores for table in tables}
    stores, numbers, words = [], [], []
    for tables in wanted:
        require_fit(f"{op}: tables", tables, there)
        places = [given.places[table.name] for table in tables]
        if len({store for store, _ in places}) != 1:
            names = [table.name for table in tables]
            raise ServingError(f"{op}: tables: got {names} in several stores, wanted one, as freeze makes it.")
        stores.append(places[0][0])
        numbers.append(np.array([number for _, number in places], np.int32))
        words.append(given.words[places[0][0]])
    return tuple(stores), tuple(numbers), tuple(words)
