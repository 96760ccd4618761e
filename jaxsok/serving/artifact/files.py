"""The files of an artifact: programs as `jax.export` writes them, and a manifest that is checked when it is read."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

import jaxsok
from jaxsok import manifests, published
from jaxsok.initializers import InitialRows
from jaxsok.manifests import entries, integer, list_of, text
from jaxsok.serving.artifact.inputs import KINDS, InputSpec, input_to_json
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenTable, FrozenTables
from jaxsok.types import MAX_DIM

FORMAT = "jaxsok-model"
VERSION = 1
MANIFEST = "model.json"
PROGRAMS = {"program": "model.stablehlo", "unfused": "model_unfused.stablehlo"}
"""The file of each program, by its entry in the manifest. An unfused one makes a call for each input of a lookup; it is
there only where it is another one."""


class ArtifactError(ServingError):
    """A folder that is no artifact, is damaged, or was made for something else. Names the file."""


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
        "inputs": [{"name": name, **input_to_json(spec)} for name, spec in inputs.items()],
        "outputs": outputs,
        "stores": stores,
    }


def store_from_json(store: Mapping[str, Any]) -> tuple[FrozenTable, ...]:
    tables = []
    for entry in store["tables"]:
        initial = InitialRows.from_json(entry["initial"]) if "initial" in entry else None
        tables.append(FrozenTable(entry["name"], store["dim"], entry["default"], store["dtype"], initial))
    return tuple(tables)


_NAME = text(".+", "a name")
_AXIS: manifests.Check = lambda size: (text() if isinstance(size, str) else integer())(size)  # noqa: E731
_TABLE = entries({"name": _NAME, "default": manifests.number})  # `InitialRows.from_json` checks what it reads
_PROGRAM = entries({"bytes": integer(), "sha256": text()})
_MODEL = entries(
    {
        "jax": text(),
        "inputs": list_of(entries({"name": _NAME, "kind": manifests.one_of(tuple(KINDS))})),
        "outputs": list_of(entries({"name": _NAME, "shape": list_of(_AXIS), "dtype": text()})),
        "stores": list_of(entries({"dim": integer(1, MAX_DIM), "dtype": text(), "tables": list_of(_TABLE)})),
        "program": _PROGRAM,
    },
    {"lookups": manifests.by_name(manifests.optional(list_of(_NAME))), "unfused": _PROGRAM},
)  # the schema of a manifest; the rest of an input is checked where it is made


def write(path: pathlib.Path, programs: Mapping[str, bytes], manifest: dict[str, Any]) -> None:
    """Writes the programs, by their entries, and the manifest into a temporary folder, which then gets its name."""
    for entry, program in programs.items():
        manifest = {**manifest, entry: {"bytes": len(program), "sha256": hashlib.sha256(program).hexdigest()}}
    manifest["sha256"] = _digest(manifest)
    with published.new_folder("export_model", path) as folder:
        for entry, program in programs.items():
            (folder / PROGRAMS[entry]).write_bytes(program)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(op: str, path: pathlib.Path) -> dict[str, Any]:
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


def read_program(op: str, file: pathlib.Path, wanted: Mapping[str, Any]) -> bytes:
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{op}: {file}: got no such file, wanted the program of the manifest next to it."
        ) from error
    if size != wanted["bytes"]:
        raise ArtifactError(f"{op}: {file}: got {size} bytes, wanted {wanted['bytes']}; it was cut or changed.")
    program = file.read_bytes()
    if hashlib.sha256(program).hexdigest() != wanted["sha256"]:
        raise ArtifactError(f"{op}: {file}: got another checksum than the manifest has; it was changed.")
    return program
