"""The files of an exported model: its program and a manifest. Loads one, and calls it with tables and inputs."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import jaxsok
from jaxsok import checks, manifests, published
from jaxsok.initializers import InitialRows
from jaxsok.kernels import library
from jaxsok.manifests import entries, integer, list_of, text
from jaxsok.serving.artifact import inputs as inputs_lib
from jaxsok.serving.artifact.inputs import LEAST_BATCH, InputSpec, OutputSpec
from jaxsok.serving.devices import device_or_default
from jaxsok.serving.errors import RequestError, ServingError, UnknownTableError, require_mapping
from jaxsok.serving.frozen import FrozenSpec, FrozenTable, FrozenTables, require_tables
from jaxsok.serving.padding import padded_size
from jaxsok.types import MAX_DIM

FORMAT = "jaxsok-model"
VERSION = 1
MANIFEST = "model.json"
PROGRAM = "model.stablehlo"  # earlier versions wrote another one, with a call for each input; it is not read


class ArtifactError(ServingError):
    """A folder that is no artifact, is damaged, or was made for something else. Names the file."""


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

    @property
    def is_per_sample(self) -> bool:
        """True if every result has a row for each sample; else batches are neither padded nor joined with others."""
        return all(output.is_batched for output in self.outputs.values())

    @property
    def known_lookups(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The tables that are looked up by keys of inputs, and these inputs."""
        return tuple((table, names) for table, names in self.lookups.items() if names)

    def call(self, tables: FrozenTables, inputs: Mapping[str, Any], *, pad: bool = False) -> dict[str, Array]:
        """Runs the model; gives arrays by name.

        Args:
          tables: include those that it needs, of any number of rows; on one device, where it runs.
          inputs: all of them, of one batch size. Keys are NumPy integers or a `jax.Array` of `uint32[..., 2]` words,
            bags are `jaxsok.Bags`, the others NumPy or JAX arrays.
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
        out = self._program(*self._bind(tables), leaves)
        return {name: out[name] for name in self.outputs}

    def compile(self, tables: FrozenTables, leaves: Mapping[str, Any]) -> None:
        """Compiles the program for tables and leaves (`leaves_of`), whose arrays may be `jax.ShapeDtypeStruct`."""
        self._program.lower(*self._bind(tables), leaves).compile()

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

    def _bind(self, tables: FrozenTables) -> tuple[Any, ...]:
        """Gives the operands of the program but the inputs."""
        require_tables("call", tables, on_device=True)
        numbers_of_stores, *of_tables = _find_tables(self._stores, tables.spec)
        stores = [tables.stores[number] for number in numbers_of_stores]
        arrays = tuple((store.index, store.counters, store.rows, store.scales) for store in stores)
        return arrays, *of_tables

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
    manifest = _read_manifest(op, path)
    program = bytearray(_read_program(op, path / PROGRAM, manifest["program"]))
    try:
        exported = export.deserialize(program)
    except Exception as error:  # of many kinds, some of flatbuffers
        raise ArtifactError(
            f"{op}: {path / PROGRAM}: got a program that JAX {jax.__version__} does not read ({error}), wanted one of "
            f"its time; it was made by JAX {manifest['jax']}. Export again."
        ) from error
    platforms = tuple(exported.platforms)
    device = device_or_default(device)
    here = {"gpu": "cuda"}.get(device.platform, device.platform)
    if here not in platforms:
        raise ArtifactError(
            f"{op}: {path}: got a program for {list(platforms)}, wanted one for {here!r}, the platform of "
            f"{device}, where it is to run; export with it in `platforms`."
        )
    try:
        inputs = {entry["name"]: inputs_lib.input_from_json(entry) for entry in manifest["inputs"]}
        outputs = {entry["name"]: OutputSpec(tuple(entry["shape"]), entry["dtype"]) for entry in manifest["outputs"]}
        stores = tuple(map(_store_from_json, manifest["stores"]))
        tables = {table.name: table for store in stores for table in store}
        known = manifest.get("lookups", {})
        lookups = {name: None if known.get(name) is None else tuple(known[name]) for name in tables}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{op}: {path / MANIFEST}: got {error}, wanted what export_model writes.") from error
    library.register()
    return ServedModel(inputs, outputs, tables, lookups, platforms, str(path), stores, jax.jit(exported.call))


def jax_export(op: str) -> Any:
    """Imports `jax.export`; ImportError: flatbuffers is missing, with which it writes files."""
    wanted = "for the files of jax.export; pip install 'jaxsok[serving]'"
    checks.module(f"{op}: flatbuffers", "flatbuffers", wanted)
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
    there = {table.name: table for tables in given.stores for table in tables}
    stores, numbers, words = [], [], []
    for tables in wanted:
        require_fit("call: tables", tables, there)
        places = [given.places[table.name] for table in tables]
        if len({store for store, _ in places}) != 1:
            names = [table.name for table in tables]
            raise ServingError(f"call: tables: got {names} in several stores, wanted one, as freeze makes it.")
        stores.append(places[0][0])
        numbers.append(np.array([number for _, number in places], np.int32))
        words.append(given.words[places[0][0]])
    return tuple(stores), tuple(numbers), tuple(words)


def manifest_of(exported: Any, tables: FrozenTables, inputs: Mapping[str, InputSpec]) -> dict[str, Any]:
    """Describes an exported program: the manifest without its checksums."""
    outputs, stores = [], []
    for name, aval in jax.tree.unflatten(exported.out_tree, exported.out_avals).items():
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        outputs.append({"name": name, "shape": shape, "dtype": aval.dtype.name})
    for of_store in tables.spec.stores:
        named = [
            {"name": table.name, "default": float(table.default)}
            | ({} if table.initial is None else {"initial": table.initial.to_json()})
            for table in of_store
        ]
        stores.append({"dim": of_store[0].dim, "dtype": of_store[0].dtype, "tables": named})
    return {
        "format": FORMAT,
        "version": VERSION,
        "jaxsok": jaxsok.__version__,
        "jax": jax.__version__,
        "calling_convention": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "inputs": [{"name": name, **inputs_lib.input_to_json(spec)} for name, spec in inputs.items()],
        "outputs": outputs,
        "stores": stores,
    }


def _store_from_json(store: Mapping[str, Any]) -> tuple[FrozenTable, ...]:
    tables = []
    for entry in store["tables"]:
        initial = InitialRows.from_json(entry["initial"]) if "initial" in entry else None
        tables.append(FrozenTable(entry["name"], store["dim"], entry["default"], store["dtype"], initial))
    return tuple(tables)


_NAME = text(".+", "a name")
_AXIS: manifests.Check = lambda size: (text() if isinstance(size, str) else integer())(size)  # noqa: E731
_TABLE = entries({"name": _NAME, "default": manifests.number})  # `InitialRows.from_json` checks what it reads
_MODEL = entries(
    {
        "jax": text(),
        "inputs": list_of(entries({"name": _NAME, "kind": manifests.one_of(tuple(inputs_lib.KINDS))})),
        "outputs": list_of(entries({"name": _NAME, "shape": list_of(_AXIS), "dtype": text()})),
        "stores": list_of(entries({"dim": integer(1, MAX_DIM), "dtype": text(), "tables": list_of(_TABLE)})),
        "program": entries({"bytes": integer(), "sha256": text()}),
    },
    {"lookups": manifests.by_name(manifests.optional(list_of(_NAME)))},
)  # the schema of a manifest; the rest of an input is checked where it is made


def write_files(path: pathlib.Path, program: bytes, manifest: Mapping[str, Any]) -> None:
    """Writes the program and the manifest into a temporary folder, which then gets its name."""
    manifest = {**manifest, "program": {"bytes": len(program), "sha256": hashlib.sha256(program).hexdigest()}}
    manifest["sha256"] = _digest(manifest)
    with published.new_folder("export_model", path) as folder:
        (folder / PROGRAM).write_bytes(program)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_manifest(op: str, path: pathlib.Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise FileNotFoundError(f"{op}: path: got {path}, where there is no folder, wanted one of export_model.")
    if not file.is_file():
        raise ArtifactError(f"{op}: {path}: got a folder without {MANIFEST}, wanted one of export_model.")
    manifest = manifests.read_json(op, file, ArtifactError)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(f"{op}: {file}: got format {manifest.get('format')!r}, wanted {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        got = f"version {manifest.get('version')!r}"
        raise ArtifactError(f"{op}: {file}: got {got}, wanted {VERSION}; export again, or update jaxsok.")
    if manifest.get("sha256") != _digest(manifest):
        raise ArtifactError(f"{op}: {file}: got another checksum than it names; it was changed.")
    manifests.check_value(op, file, manifest, _MODEL, ArtifactError)
    return manifest


def _read_program(op: str, file: pathlib.Path, wanted: Mapping[str, Any]) -> bytes:
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        wrong = "got no such file, wanted the program of the manifest next to it."
        raise ArtifactError(f"{op}: {file}: {wrong}") from error
    if size != wanted["bytes"]:
        raise ArtifactError(f"{op}: {file}: got {size} bytes, wanted {wanted['bytes']}; it was cut or changed.")
    program = file.read_bytes()
    if hashlib.sha256(program).hexdigest() != wanted["sha256"]:
        raise ArtifactError(f"{op}: {file}: got another checksum than the manifest has; it was changed.")
    return program
