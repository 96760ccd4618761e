"""The manifest of a folder of saved tables: what there is, where it lies, and how to see that it is whole.

Every process writes a part that tells of its own files; the first one joins the parts, when all are there. The manifest
is the last file of a folder: without it there is nothing to read.
"""

import base64
import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok.checkpoint.files import CorruptFileError, SavedFile, TableForm, keys_schema, write_synced
from jaxsok.initializers import InitialRows
from jaxsok.specs import TableSpec
from jaxsok.types import NUM_PARTITIONS

FORMAT = "jaxsok tables"
VERSION = 1
"""Of the format; a reader takes its own and older ones."""
NAME = "manifest.json"
ROWS, WAITING, TOMBSTONES, BLOOM = "files", "waiting", "tombstones", "bloom"


def part_name(process: int) -> str:
    """Of the part of one process."""
    return f"manifest.process_{process:05d}.json"


def write_part(folder: Any, process: int, part: Mapping[str, Any]) -> None:
    """Writes what one process has to say."""
    write_synced(folder / part_name(process), _sealed(dict(part)))


def join_parts(op: str, folder: Any) -> dict[str, Any]:
    """Makes the manifest of the parts of all processes, and takes those away.

    Raises:
      CorruptFileError: a part is missing.
    """
    first = _unsealed(op, folder / part_name(0))
    parts = [first, *(_unsealed(op, folder / part_name(n)) for n in range(1, first["num_processes"]))]
    whole = {name: value for name, value in first.items() if name not in ("tables", "bloom", "pause_s")}
    whole |= {"uuid": uuid.uuid4().hex, "pauses_s": [part["pause_s"] for part in parts], "tables": {}}
    whole[BLOOM] = [entry for part in parts for entry in part[BLOOM]]
    for name, table in first["tables"].items():
        ones = [part["tables"][name] for part in parts]
        joined = dict(table)
        for count in ("num_rows", "num_nonfinite", "num_evicted"):
            joined[count] = sum(one[count] for one in ones)
        joined["partition_rows"] = packed(sum(unpacked(one["partition_rows"]) for one in ones))
        for kind in (ROWS, WAITING, TOMBSTONES):
            joined[kind] = [entry for one in ones for entry in one[kind]]
        whole["tables"][name] = joined
    # First away and then written: a folder with a manifest is whole.
    for n in range(len(parts)):
        (folder / part_name(n)).unlink()
    temporary = folder / f"{NAME}.writing"
    write_synced(temporary, _sealed(whole))
    temporary.rename(folder / NAME)
    return whole


def read(op: str, folder: Any) -> dict[str, Any]:
    """The manifest of a folder, checked.

    Raises:
      FileNotFoundError: there is none.
      CorruptFileError: it is damaged.
      ValueError: it is of a newer format.
    """
    path = folder / NAME
    if not path.exists():
        raise FileNotFoundError(
            f'{op}: path: got "{folder}", which has no {NAME}, wanted a folder of saved tables; a save that did not '
            "end leaves none."
        )
    manifest = _unsealed(op, path)
    if manifest.get("format") != FORMAT:
        raise CorruptFileError(f'{op}: file "{path}", byte 0: got no manifest of jaxsok, wanted format "{FORMAT}".')
    if manifest["version"] > VERSION:
        raise ValueError(
            f'{op}: file "{path}": got version {manifest["version"]} of the format, wanted at most {VERSION}; use the '
            "jaxsok that wrote it, or a newer one."
        )
    return manifest


def table_files(op: str, folder: Any, manifest: Mapping[str, Any], table: str, kind: str = ROWS) -> list[SavedFile]:
    """The files of a table of one kind."""
    entry = manifest["tables"][table]
    schema = TableForm.from_json(entry["form"]).schema if kind == ROWS else keys_schema(kind == WAITING)
    return [SavedFile(op, folder, file, schema) for file in entry[kind]]


def packed(values: np.ndarray) -> str:
    """Integers as a short text."""
    return base64.b64encode(zlib.compress(np.asarray(values, "<i8").tobytes())).decode()


def unpacked(text: str) -> np.ndarray:
    """What `packed` was given.

    Example:
      >>> unpacked(packed(np.array([3, 0, 1]))).tolist()
      [3, 0, 1]
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").astype(np.int64)


def unknown_to_json(table: TableSpec, seed: int) -> dict[str, Any]:
    """What `find` gives for a key of a table without a row; one entry, by what it is."""
    reads = table.unknown_reads(seed)
    if isinstance(reads, InitialRows):
        return {"initial": reads.to_json()}
    return {"value": reads} if isinstance(reads, float) else {"traced": repr(reads)}


def unknown_from_json(op: str, path: Any, table: str, value: Any) -> float | InitialRows | str | None:
    """What `unknown_to_json` gave: a number, initial rows, or the words for what no other program can work out.

    Args:
      op: named in errors.
      path: of the manifest, likewise.
      table: the name of the table, likewise.
      value: None: of a manifest that does not tell.

    Raises:
      CorruptFileError: it is something else.
    """
    if value is None:
        return None
    try:
        ((kind, inner),) = value.items()
        if kind == "initial":
            return InitialRows.from_json(inner)
        if kind == "value" and type(inner) in (int, float) and abs(inner) < 2.0**128:
            return float(inner)
        if kind == "traced" and isinstance(inner, str):
            return inner
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise CorruptFileError(
        f'{op}: file "{path}": table "{table}": unknown: got {str(value)[:200]}, wanted one of initial, value and '
        "traced, as a save writes it; use another copy."
    )


def array_to_json(array: np.ndarray) -> dict[str, Any]:
    """A small array, to the bit."""
    array = np.asarray(array)
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
    }


def array_from_json(value: Mapping[str, Any]) -> np.ndarray:
    """What `array_to_json` was given."""
    data = base64.b64decode(value["data"])
    return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()


def rows_by_partition(tables: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Rows of each partition, of some tables of a manifest together: int64[4096]."""
    return sum((unpacked(table["partition_rows"]) for table in tables), np.zeros(NUM_PARTITIONS, np.int64))


def _sealed(body: dict[str, Any]) -> str:
    """JSON with a checksum of its own, a line for each part."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    return "{\n" + ",\n".join([f'"checksum": {zlib.crc32(_canonical(body))}', *lines]) + "\n}\n"


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _unsealed(op: str, path: Any) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptFileError(
            f'{op}: file "{path}", byte 0: got no such file, wanted what a process of the save wrote.'
        ) from error
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
    except UnicodeDecodeError as error:
        raise CorruptFileError(_not_sealed(op, path, error.start, "no text")) from error
    except json.JSONDecodeError as error:
        raise CorruptFileError(_not_sealed(op, path, error.pos, error.msg)) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptFileError(_not_sealed(op, path, 0, "no checksum")) from error
    if zlib.crc32(_canonical(body)) != checksum:
        raise CorruptFileError(
            _not_sealed(op, path, 0, f"checksum {zlib.crc32(_canonical(body))} instead of {checksum}")
        )
    return body


def _not_sealed(op: str, path: Any, byte: int, got: str) -> str:
    return (
        f'{op}: file "{path}", byte {byte}: got {got}, wanted the JSON that was written; the file is damaged, use '
        "another copy."
    )
