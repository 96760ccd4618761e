"""Which kind of file a path has, and which tables are in it: found by content, not by name.

A line of `KINDS` has a function that recognises a path, and one that opens it as tables, each a function that begins to
read its records. A new kind is one more line.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxsok import published
from jaxsok.checkpoint import manifest
from jaxsok.checkpoint.source import Source
from jaxsok.interchange import columns, hps, npz, sok, sok_files
from jaxsok.records import Records

_UNFINISHED = (published.ENDING, ".partial")  # how names of what is still being written end

Read = Callable[[], Iterable[Records]]


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a path holds; `facts` and `table_facts` are what the files say of themselves and of tables."""

    kind: str
    tables: Mapping[str, Read]
    """By name, a function that begins to read the records."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table_facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    clock: int | None = None
    """The step, or the user's time, of the files."""


class Kind(NamedTuple):
    """A kind of file or folder; messages describe it by `wanted`."""

    name: str
    wanted: str
    recognises: Callable[[pathlib.Path], bool]
    open: Callable[[pathlib.Path], Opened]


def open_tables(path: pathlib.Path) -> Opened:
    """Opens a file or folder of any kind, or a folder of files, each a table; errors are those of `inspect`."""
    if not path.exists():
        raise FileNotFoundError(f"inspect: {path}: got no such file or folder, wanted {_wanted()}.")
    kind = _kind_of(path)
    if kind is not None:
        return kind.open(path)
    children = sorted(child for child in path.iterdir() if child.suffix not in _UNFINISHED) if path.is_dir() else []
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


def _is_saved(path: pathlib.Path) -> bool:
    return bool(_saved_folders(path))


def _saved_folders(path: pathlib.Path) -> list[pathlib.Path]:
    """Finds folders of saved tables: the path itself, or below an Orbax step or its manager's last step."""
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
    return f'"{manifest.FORMAT}"'.encode() in _head(path / manifest.NAME, 4096)


def _open_saved(path: pathlib.Path) -> Opened:
    folders = _saved_folders(path)
    if len(folders) > 1:
        raise ValueError(
            f"inspect: {path}: got several folders of tables, {[str(folder) for folder in folders]}, wanted one; give "
            "the path of one of them."
        )
    (folder,) = folders
    source = Source.of("inspect", folder)
    saved = source.manifest
    names = ("kind", "step", "clock", "mesh", "base")
    facts = {name: saved[name] for name in names if saved.get(name) not in (None, "")}
    if folder != path:
        facts = {"folder": str(folder.relative_to(path)), **facts}
    tables = {name: functools.partial(_saved_records, source, name) for name in saved["tables"]}
    table_facts = {}
    for name, table in saved["tables"].items():
        counts = {
            "keys that wait for a row": sum(file["num_rows"] for file in table["waiting"]),
            "keys that are gone": sum(file["num_rows"] for file in table["tombstones"]),
            "rows evicted so far": table["num_evicted"],
        }
        some = {what: number for what, number in counts.items() if number}
        table_facts[name] = {"optimizer": table["form"]["optimizer"], **some}
    return Opened("jaxsok", tables, facts, table_facts, saved["clock"])


def _saved_records(source: Source, table: str) -> Iterator[Records]:
    """Reads the rows of a table, after an empty chunk that shows dim, dtype and state where there are no rows."""
    form = source.form(table)
    statistics = np.empty(0, np.uint32) if form.statistics else None
    # NumPy knows bfloat16 from ml_dtypes, which comes with JAX.
    rows = np.empty((0, form.dim), jnp.dtype(form.dtype))
    state = {name: np.empty((0, width), np.float32) for name, width, _ in form.states}
    yield Records(np.empty(0, np.uint64), rows, state, statistics, statistics)
    yield from source.records(table)


def _is_hps(path: pathlib.Path) -> bool:
    return (path / "key").is_file() and (path / "emb_vector").is_file()


def _open_hps(path: pathlib.Path) -> Opened:
    # The files do not tell the dim; where the sizes make none, the reader says what is wrong with them.
    num_keys = (path / "key").stat().st_size // 8
    dim = max(1, (path / "emb_vector").stat().st_size // (4 * max(1, num_keys)))
    has_hotness = (path / "meta").is_file()
    read = functools.partial(hps.read_hps, path, dim=dim, hotness=has_hotness)
    return Opened("HPS", {path.resolve().name: read})


def _is_sok(path: pathlib.Path) -> bool:
    return bool(sok_files.key_files(path))


def _open_sok(path: pathlib.Path) -> Opened:
    tables = sok_files.tables_in(path)
    return Opened("SOK", {name: functools.partial(sok.read_sok, path, name, **how) for name, how in tables.items()})


def _begins_with(magic: bytes) -> Callable[[pathlib.Path], bool]:
    return lambda path: _head(path, len(magic)) == magic


def _opens_one_table(kind: str, read: Callable[[pathlib.Path], Iterable[Records]]) -> Callable[..., Opened]:
    return lambda path: Opened(kind, {path.stem: functools.partial(read, path)})


KINDS = (  # in the order in which they are asked
    Kind("jaxsok", f"a checkpoint or an export of jaxsok (a folder with {manifest.NAME})", _is_saved, _open_saved),
    Kind("HPS", "a folder of HPS (key and emb_vector)", _is_hps, _open_hps),
    Kind("SOK", "a dump of SOK (<table>-key and <table>-weight)", _is_sok, _open_sok),
    Kind("Parquet", "a Parquet file", _begins_with(b"PAR1"), _opens_one_table("Parquet", columns.read_parquet)),
    Kind("Arrow", "an Arrow file", _begins_with(b"ARROW1\0\0"), _opens_one_table("Arrow", columns.read_arrow)),
    Kind("npz", "an .npz file", _begins_with(b"PK\x03\x04"), _opens_one_table("npz", npz.read_npz)),
)
