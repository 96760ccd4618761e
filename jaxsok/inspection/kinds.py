"""Which kind of file is this, and which tables are in it: told by content, not by the ending of a name.

`KINDS` has a line for each: a function that recognises a path, and one that opens it as tables, each a function that
begins to read its records. A new kind is one more line. Nothing of a format is told here that its reader knows.
"""

import dataclasses
import functools
import pathlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxsok import published
from jaxsok.records import Records

MANIFEST = "manifest.json"
FORMAT = "jaxsok tables"
_UNFINISHED = (published.ENDING, ".partial")  # how names of what is still being written end
_SOK_HEADER_BYTES = 296
_SOK_ITEM_BYTES = {4: 2, 5: 4, 6: 8}  # by the number of the dtype in a header: float16, float32, float64

Read = Callable[[], Iterable[Records]]


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a path holds."""

    kind: str
    tables: Mapping[str, Read]
    """By name, what begins to read the records of one."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the files say of themselves."""
    table_facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """What they say of a table beside its records."""
    clock: int | None = None
    """The step, or the user's time, at which they were written."""


class Kind(NamedTuple):
    """A kind of file or folder."""

    name: str
    wanted: str
    """What it looks like, for messages."""
    recognises: Callable[[pathlib.Path], bool]
    open: Callable[[pathlib.Path], Opened]


def opened(path: pathlib.Path) -> Opened:
    """Opens a file or folder of any kind, or a folder of them, each of which is a table then.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: it is of no known kind, or its reader refuses it.
      ImportError: a package that the kind needs is missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"inspect: {path}: got no such file or folder, wanted {_wanted()}.")
    kind = _kind_of(path)
    if kind is not None:
        return kind.open(path)
    children = sorted(one for one in path.iterdir() if one.suffix not in _UNFINISHED) if path.is_dir() else []
    found = {child: kind for child in children if (kind := _kind_of(child)) is not None}
    if not found:
        raise ValueError(f"inspect: {path}: got {_content(path)}, wanted {_wanted()}.")
    tables: dict[str, Read] = {}
    for child, kind in found.items():
        for name, read in kind.open(child).tables.items():
            if name in tables:
                raise ValueError(
                    f'inspect: {path}: got two tables "{name}", the second in {child.name}, wanted one of a name; '
                    "give the path of one."
                )
            tables[name] = read
    return Opened(" and ".join(dict.fromkeys(kind.name for kind in found.values())), tables)


def _kind_of(path: pathlib.Path) -> Kind | None:
    return next((kind for kind in KINDS if kind.recognises(path)), None)


def _wanted() -> str:
    return ", ".join(kind.wanted for kind in KINDS[:-1]) + f" or {KINDS[-1].wanted}"


def _content(path: pathlib.Path) -> str:
    """What there is instead."""
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir())
        return f"a folder of {names[:5]}{'...' if len(names) > 5 else ''}" if names else "an empty folder"
    head = _head(path, 8)
    return f"a file of {path.stat().st_size:,} bytes that begins with {head!r}"


def _head(path: pathlib.Path, num_bytes: int) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(num_bytes)


# Checkpoints and exports of jaxsok ------------------------------------------------------------------------------------


def _is_saved(path: pathlib.Path) -> bool:
    return bool(_saved_folders(path))


def _saved_folders(path: pathlib.Path) -> list[pathlib.Path]:
    """The folders of saved tables: the path itself; below a step of Orbax; or below the last step of its manager."""
    if _has_manifest(path):
        return [path]
    if not path.is_dir():
        return []
    # What is not committed has a name of its own.
    below = [
        child
        for child in sorted(path.iterdir())
        if child.is_dir() and "orbax-checkpoint-tmp" not in child.name and child.suffix not in _UNFINISHED
    ]
    folders = [child for child in below if _has_manifest(child)]
    if folders:
        return folders
    steps = [(int(found[1]), child) for child in below if (found := re.fullmatch(r"(?:.*_)?(\d+)", child.name))]
    for _, step in sorted(steps, reverse=True):
        folders = [child for child in sorted(step.iterdir()) if _has_manifest(child)]
        if folders:
            return folders
    return []


def _has_manifest(path: pathlib.Path) -> bool:
    return f'"{FORMAT}"'.encode() in _head(path / MANIFEST, 4096)


def _open_saved(path: pathlib.Path) -> Opened:
    folders = _saved_folders(path)
    if len(folders) > 1:
        raise ValueError(
            f"inspect: {path}: got several folders of tables, {[str(folder) for folder in folders]}, wanted one; give "
            "the path of one of them."
        )
    from jaxsok.checkpoint.source import Source

    (folder,) = folders
    source = Source.of("inspect", folder)
    manifest = source.manifest
    facts = {
        name: manifest[name]
        for name in ("kind", "step", "clock", "mesh", "base")
        if manifest.get(name) not in (None, "")
    }
    if folder != path:
        facts = {"folder": str(folder.relative_to(path)), **facts}
    tables = {name: functools.partial(_saved_records, source, name) for name in manifest["tables"]}
    table_facts = {}
    for name, table in manifest["tables"].items():
        counts = {
            "keys that wait for a row": sum(file["num_rows"] for file in table["waiting"]),
            "keys that are gone": sum(file["num_rows"] for file in table["tombstones"]),
            "rows evicted so far": table["num_evicted"],
        }
        some = {what: number for what, number in counts.items() if number}
        table_facts[name] = {"optimizer": table["form"]["optimizer"], **some}
    return Opened("jaxsok", tables, facts, table_facts, manifest["clock"])


def _saved_records(source: Any, table: str) -> Iterator[Records]:
    """The rows of a table; before them none, which tell dim, dtype and state of a table without rows."""
    form = source.form(table)
    statistics = np.empty(0, np.uint32) if form.statistics else None
    # NumPy knows bfloat16 from ml_dtypes, which comes with JAX.
    rows = np.empty((0, form.dim), jnp.dtype(form.dtype))
    state = {name: np.empty((0, width), np.float32) for name, width, _ in form.states}
    yield Records(np.empty(0, np.uint64), rows, state, statistics, statistics)
    yield from source.records(table)


# Files of other systems -----------------------------------------------------------------------------------------------


def _is_hps(path: pathlib.Path) -> bool:
    return (path / "key").is_file() and (path / "emb_vector").is_file()


def _open_hps(path: pathlib.Path) -> Opened:
    from jaxsok.interchange import hps

    # The files do not tell the dim; where the sizes make none, the reader says what is wrong with them.
    num_keys = (path / "key").stat().st_size // 8
    dim = max(1, (path / "emb_vector").stat().st_size // (4 * max(1, num_keys)))
    has_hotness = (path / "meta").is_file()
    read = functools.partial(hps.read_hps, path, dim=dim, hotness=has_hotness)
    return Opened("HPS", {path.resolve().name: read})


def _sok_keys(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of keys of a dump."""
    names = sorted(path.glob("*-key")) if path.is_dir() else []
    return [name for name in names if _sok_header(name)[0] == 0]


def _sok_header(path: pathlib.Path) -> tuple[int, int, str]:
    """What a file holds and its dtype, as numbers, and the table's name; -1, -1 if it has no header."""
    head = _head(path, _SOK_HEADER_BYTES)
    if len(head) < _SOK_HEADER_BYTES:
        return -1, -1, ""
    (holds,), (dtype,) = struct.unpack(">I", head[256:260]), struct.unpack(">I", head[292:296])
    if holds > 2 or dtype > 6:
        return -1, -1, ""
    return holds, dtype, head[:256].decode(errors="replace").lstrip(" ")


def _open_sok(path: pathlib.Path) -> Opened:
    from jaxsok.interchange import sok

    tables: dict[str, Read] = {}
    for keys in _sok_keys(path):
        prefix = keys.name.removesuffix("-key")
        name = _sok_header(keys)[2] or prefix
        key_bytes = 4 if _sok_header(keys)[1] in (0, 2) else 8
        num_rows = (keys.stat().st_size - _SOK_HEADER_BYTES) // key_bytes
        rows = path / f"{prefix}-weight"
        item_bytes = _SOK_ITEM_BYTES.get(_sok_header(rows)[1], 4)
        size = rows.stat().st_size - _SOK_HEADER_BYTES if rows.is_file() else 0
        dim = max(1, size // (item_bytes * max(1, num_rows)))
        ends = {
            state.name.removeprefix(f"{prefix}-"): state
            for state in sorted(path.glob(f"{prefix}-*-*"))
            if state.suffix != ".partial"
        }
        tables[name] = functools.partial(
            sok.read_sok,
            path,
            name,
            dim=dim,
            optimizer={end: end for end in ends} or None,
            widths={end: _sok_width(state, num_rows, dim) for end, state in ends.items()},
        )
    return Opened("SOK", tables)


def _sok_width(path: pathlib.Path, num_rows: int, dim: int) -> int:
    """Numbers a row of a file of state: dim, unless its size tells another width and is not some lines of dim."""
    num_numbers = (path.stat().st_size - _SOK_HEADER_BYTES) // _SOK_ITEM_BYTES.get(_sok_header(path)[1], 4)
    width, rest = divmod(num_numbers, max(1, num_rows))
    # SOK writes fewer lines where rows were never trained; the reader tells what to do then.
    return width if not rest and (width == 1 or num_numbers % dim) else dim


def _begins_with(magic: bytes) -> Callable[[pathlib.Path], bool]:
    return lambda path: _head(path, len(magic)) == magic


def _open_parquet(path: pathlib.Path) -> Opened:
    from jaxsok.interchange import columns

    return Opened("Parquet", {path.stem: functools.partial(columns.read_parquet, path)})


def _open_arrow(path: pathlib.Path) -> Opened:
    from jaxsok.interchange import columns

    return Opened("Arrow", {path.stem: functools.partial(columns.read_arrow, path)})


def _open_npz(path: pathlib.Path) -> Opened:
    from jaxsok.interchange import npz

    return Opened("npz", {path.stem: functools.partial(npz.read_npz, path)})


KINDS = (
    Kind("jaxsok", f"a checkpoint or an export of jaxsok (a folder with {MANIFEST})", _is_saved, _open_saved),
    Kind("HPS", "a folder of HPS (key and emb_vector)", _is_hps, _open_hps),
    Kind("SOK", "a dump of SOK (<table>-key and <table>-weight)", lambda path: bool(_sok_keys(path)), _open_sok),
    Kind("Parquet", "a Parquet file", _begins_with(b"PAR1"), _open_parquet),
    Kind("Arrow", "an Arrow file", _begins_with(b"ARROW1\0\0"), _open_arrow),
    Kind("npz", "an .npz file", _begins_with(b"PK\x03\x04"), _open_npz),
)
"""In the order in which they are asked."""
