"""The manifest of a folder of saved tables: what there is, where it lies, and how to see that it is whole.

Every process writes a part about its own files; the first joins them when all are there, as the folder's last file.
"""

import base64
import binascii
import json
import math
import reprlib
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import manifests
from jaxsok.checkpoint.files import CorruptFileError, write_and_sync
from jaxsok.initializers import InitialRows
from jaxsok.manifests import Wrong, entries, integer, list_of, number, optional, text, tuple_of
from jaxsok.specs import TableSpec
from jaxsok.types import NUM_PARTITIONS

FORMAT = "jaxsok tables"
VERSION = 1  # the format's version; a reader takes its own and older ones
NAME = "manifest.json"
KINDS = ROWS, WAITING, TOMBSTONES = "files", "waiting", "tombstones"
BLOOM = "bloom"


def _part_of(folder: Any, process: int) -> Any:
    return folder / f"manifest.process_{process:05d}.json"


def write_part(folder: Any, process: int, part: Mapping[str, Any]) -> None:
    write_and_sync(_part_of(folder, process), _seal(part))


def unshared_error(op: str, folder: Any, process: int, other: int) -> FileNotFoundError:
    """Makes the error of a process that does not find what another one has written."""
    return FileNotFoundError(
        f'{op}: path: got "{folder}", where process {process} does not find what process {other} has made, wanted one '
        "path for all processes, on a file system that they share."
    )


def join_parts(op: str, folder: Any) -> None:
    """Joins the parts of all processes to the manifest, and removes them; FileNotFoundError: one is missing."""
    first = _read(op, _part_of(folder, 0), _PART)
    others = range(1, first["num_processes"])
    if missing := [n for n in others if not _part_of(folder, n).exists()]:
        raise unshared_error(op, folder, 0, missing[0])
    parts = [first, *(_read(op, _part_of(folder, n), _PART) for n in others)]
    for n, part in enumerate(parts):
        if part["tables"].keys() != first["tables"].keys():
            what = f"tables: got {list(part['tables'])}, wanted {list(first['tables'])}, as process 0 saved"
            raise manifests.damage_error(op, _part_of(folder, n), what, CorruptFileError)
        for name in ("clock", "step", "seed"):
            if part[name] != first[name]:
                raise ValueError(
                    f"{op}: {name}: got {part[name]} in process {n} and {first[name]} in process 0, wanted the same in "
                    "all processes; of a clock, take the time in one of them and send it to the others."
                )
    whole = {name: value for name, value in first.items() if name not in ("tables", "bloom", "pause_s")}
    whole |= {"uuid": uuid.uuid4().hex, "pauses_s": [part["pause_s"] for part in parts], "tables": {}}
    whole[BLOOM] = [entry for part in parts for entry in part[BLOOM]]
    for name, table in first["tables"].items():
        entries_of = [part["tables"][name] for part in parts]
        counts = ("num_rows", "num_nonfinite", "num_evicted")
        joined = table | {count: sum(entry[count] for entry in entries_of) for count in counts}
        joined["partition_rows"] = pack(sum(unpack(entry["partition_rows"]) for entry in entries_of))
        joined |= {kind: [file for entry in entries_of for file in entry[kind]] for kind in KINDS}
        whole["tables"][name] = joined
    # First away and then written: a folder with a manifest is whole.
    for n in range(len(parts)):
        _part_of(folder, n).unlink()
    temporary = folder / f"{NAME}.writing"
    write_and_sync(temporary, _seal(whole))
    temporary.rename(folder / NAME)


def read(op: str, folder: Any, argument: str = "path") -> dict[str, Any]:
    """Reads and checks a folder's manifest; a missing, a damaged and a newer one have errors of their own."""
    path = folder / NAME
    if not path.exists():
        raise FileNotFoundError(
            f'{op}: {argument}: got "{folder}", which has no {NAME}, wanted a folder of saved tables; a save that did '
            "not end leaves none."
        )
    return _read(op, path, _WHOLE)


def pack(values: np.ndarray) -> str:
    """Packs a number for each partition into a short text."""
    return base64.b64encode(zlib.compress(np.asarray(values, "<i8").tobytes())).decode()


def unpack(value: str) -> np.ndarray:
    """Reads what `pack` wrote; anything else raises Wrong."""
    wanted = f"{NUM_PARTITIONS} counts, packed"
    try:
        stream, size = zlib.decompressobj(), 8 * NUM_PARTITIONS
        data = stream.decompress(base64.b64decode(value, validate=True), size + 1)  # no more, whatever it claims
    except (zlib.error, ValueError, TypeError) as error:
        raise Wrong(value, f"{wanted} ({error})") from error
    if len(data) != size or not stream.eof or stream.unused_data:
        raise Wrong(value, wanted)
    counts = np.frombuffer(data, "<i8").astype(np.int64)
    if counts.min() < 0 or counts.max() >= 2**48:  # so that they can be added
        raise Wrong(value, f"{wanted}, none of them negative or above 2**48")
    return counts


def unknown_to_json(table: TableSpec, seed: int) -> dict[str, Any]:
    """Returns what `find` gives for a key without a row."""
    reads = table.unknown_reads(seed)
    if isinstance(reads, InitialRows):
        return {"initial": reads.to_json()}
    return {"value": reads} if isinstance(reads, float) else {"traced": repr(reads)}


def unknown_from_json(value: Any) -> float | InitialRows | str:
    """Reads what `unknown_to_json` wrote; anything else raises Wrong."""
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
    raise Wrong(value, "one of initial, value and traced, as a save writes it")


def array_to_json(array: np.ndarray) -> dict[str, Any]:
    """Encodes a small array bit for bit."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def array_from_json(value: Mapping[str, Any]) -> np.ndarray:
    """Reads what `array_to_json` wrote; anything else raises Wrong."""
    dtype, shape = np.dtype(value["dtype"]), value["shape"]
    try:
        data = base64.b64decode(value["data"], validate=True)
    except binascii.Error as error:
        raise Wrong(value["data"], f"bytes as base64 ({error})", "data") from error
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise Wrong(f"{len(data)} bytes", f"{dtype}{shape}", "data")
    try:
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except ValueError as error:  # NumPy bounds axes, and their sizes also where one is 0
        raise Wrong(shape, f"sizes of axes ({error})", "shape") from error


def _seal(body: Mapping[str, Any]) -> str:
    """Writes JSON with a checksum of its own, a line for each part."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    sealed = "{\n" + ",\n".join([f'"checksum": {zlib.crc32(_canonical(body))}', *lines]) + "\n}\n"
    if len(sealed) > manifests.MOST_BYTES:
        raise ValueError(
            f"save: piece_bytes: got a manifest of {len(sealed)} bytes, wanted at most {manifests.MOST_BYTES}: it "
            "tells of each batch of rows; pass larger piece_bytes, so that they are fewer."
        )
    return sealed


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _read(op: str, path: Any, form: manifests.Check) -> dict[str, Any]:
    """Reads a manifest or a part of one, and checks its checksum, version and every value."""
    try:
        body = manifests.read_json(op, path, CorruptFileError)
    except FileNotFoundError as error:
        raise CorruptFileError(
            f'{op}: file "{path}", byte 0: got no such file, wanted what a process of the save wrote.'
        ) from error
    checksum = body.pop("checksum", None)
    found = zlib.crc32(_canonical(body))
    if found != checksum:
        what = f"byte 0: got checksum {found} instead of {reprlib.repr(checksum)}, wanted the JSON that was written"
        raise manifests.damage_error(op, path, what, CorruptFileError)
    if body.get("format") != FORMAT:
        raise CorruptFileError(f'{op}: file "{path}", byte 0: got no manifest of jaxsok, wanted format "{FORMAT}".')
    manifests.check_value(op, path, body, entries({"version": integer(1)}), CorruptFileError)
    if body["version"] > VERSION:
        raise ValueError(
            f'{op}: file "{path}": got version {body["version"]} of the format, wanted at most {VERSION}; use the '
            "jaxsok that wrote it, or a newer one."
        )
    manifests.check_value(op, path, body, form, CorruptFileError)
    return body


def _check_tiles(ranges: Sequence[Sequence[int]], size: int) -> None:
    """Refuses pieces of a file (offset and size) with gaps or overlaps."""
    end = 0
    for offset, num_bytes, *_ in ranges:
        if offset != end:
            raise Wrong(f"a piece at byte {offset}", f"one at byte {end}, where the one before it ends")
        end += num_bytes
    if end != size:
        raise Wrong(f"pieces of {end} bytes", f"{size} bytes, as the file has")


def _check_file(value: Any) -> None:
    _check_tiles([[0, *value["head"]], *value["batches"], value["foot"]], value["size"])
    num_rows = sum(batch[3] for batch in value["batches"])
    if num_rows != value["num_rows"]:
        raise Wrong(f"batches of {num_rows} rows", f"{value['num_rows']} rows, as the file has")
    for batch in value["batches"]:
        if batch[4] > batch[5]:
            raise Wrong(f"partitions {batch[4]} to {batch[5]}", "the first one first")


def _check_bloom(value: Any) -> None:
    _check_tiles(value["pieces"], value["size"])
    if any(piece[1] % 4 for piece in value["pieces"]):
        raise Wrong([piece[1] for piece in value["pieces"]], "pieces of whole words of 4 bytes")


def _check_whole(value: Any) -> None:
    files = [file["name"] for table in value["tables"].values() for kind in KINDS for file in table[kind]]
    files += [file["name"] for file in value[BLOOM]]
    if len(set(files)) != len(files):
        raise Wrong(files, "each file once", "tables")
    for name, table in value["tables"].items():
        if table["form"]["name"] != name:
            raise Wrong(table["form"]["name"], f"{name!r}, as the table is called", "tables")
        if [name in store["tables"] for store in value["stores"]].count(True) != 1:
            raise Wrong(name, "each table in one store", "stores")
    for store in value["stores"]:
        if len(store["bloom_segments"]) != len(store["tables"]):
            raise Wrong(store["bloom_segments"], f"one for each of {store['tables']}", "stores")
    for entry in value[BLOOM]:
        if entry["store"] >= len(value["stores"]):
            raise Wrong(entry["store"], f"one of {len(value['stores'])} stores", BLOOM)
    if value["kind"] == "delta":
        _DELTA(value)


_WORD, _COUNT, _SIZE = integer(0, 2**32 - 1), integer(), integer(0, 2**62)
_PARTITION = integer(0, NUM_PARTITIONS - 1)
# A name, not a path: nothing outside the folder is read.
_FILE_NAME = text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", "the name of a file in this folder")
_BATCH = tuple_of(_SIZE, _SIZE, _WORD, _SIZE, _PARTITION, _PARTITION)
_FILE = {"name": _FILE_NAME, "size": _SIZE, "num_rows": _SIZE, "head": tuple_of(_SIZE, _WORD)}
_FILE |= {"batches": list_of(_BATCH), "foot": tuple_of(_SIZE, _SIZE, _WORD)}
_FILES = list_of(manifests.also(entries(_FILE), _check_file))
_BLOOM_PIECES = list_of(tuple_of(_SIZE, _SIZE, _WORD, integer(0, 2**20)))
_BLOOM_FILE = {"store": integer(0, 2**20), "name": _FILE_NAME, "size": _SIZE, "pieces": _BLOOM_PIECES}
_DIM = integer(1, 2**20)
_FORM = entries(
    {
        "name": text(".+", "a name"),
        "dim": _DIM,
        "dtype": manifests.one_of(("float32", "float16", "bfloat16")),
        "optimizer": text(),
        "state_form": text(),
        "states": list_of(tuple_of(text(".+", "a name"), _DIM, number)),
        "statistics": manifests.boolean,
    }
)
_TABLE = entries(
    {
        "form": _FORM,
        "admission": manifests.optional(entries({"by": text()})),
        "num_rows": _SIZE,
        "num_nonfinite": _SIZE,
        "num_evicted": _COUNT,
        "partition_rows": manifests.also(text(), unpack),
        "unknown": unknown_from_json,
        **dict.fromkeys(KINDS, _FILES),
    }
)
_DTYPES = ("bool", "bfloat16", *(f"float{bits}" for bits in (16, 32, 64)))
_DTYPES += tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_GLOBAL = {"name": optional(text()), "dtype": manifests.one_of(_DTYPES), "shape": list_of(integer(0, 2**31))}
_GLOBAL |= {"data": text(most=manifests.MOST_BYTES)}
_STORE = entries(
    {
        "tables": list_of(text(".+", "a name")),
        "salt": tuple_of(_WORD, _WORD),
        "generation": _WORD,
        "is_replicated": manifests.boolean,
        "globals": list_of(manifests.also(entries(_GLOBAL), array_from_json)),
        "bloom_segments": list_of(tuple_of(_SIZE, _SIZE)),
        "num_evicted": list_of(_COUNT),
        "keys_per_step": _COUNT,
        "assigned_per_step": _COUNT,
        "looks": list_of(tuple_of(_COUNT, _COUNT, _COUNT)),
        "most_positions": _COUNT,
    },
)
_BOTH = {
    "kind": manifests.one_of(("checkpoint", "full", "delta")),
    "num_processes": integer(1, 2**20),
    "step": _WORD,
    "clock": _WORD,
    "seed": tuple_of(_WORD, _WORD),
    "mesh": text(),
    "num_shards": integer(1, 2**20),
    "stores": list_of(_STORE),
    "tables": manifests.by_name(_TABLE),
    BLOOM: list_of(manifests.also(entries(_BLOOM_FILE), _check_bloom)),
    "lineage": entries({"word": text(), "order": _COUNT, "ancestors": list_of(tuple_of(text(), _COUNT))}),
}
_DELTA = entries({"base": text(), "base_path": text(r"[^/\0][^\0]*", "a relative path"), "since": _WORD})
_PART = manifests.also(entries({**_BOTH, "pause_s": number}), _check_whole)
_WHOLE = manifests.also(entries({**_BOTH, "uuid": text(), "pauses_s": list_of(number)}), _check_whole)
