"""Finds which kind of file a path has, and which tables are in it: by content, not by name.

An entry of `KINDS` has a function that opens a path as tables, each a function that begins to read its records, or
returns None where the path is of another kind. A new kind is one more entry.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxsok import published
from jaxsok.checkpoint import manifest
from jaxsok.checkpoint.saved import Source
from jaxsok.interchange import columns, hps, npz, sok, sok_files
from jaxsok.records import Records

_UNFINISHED = (published.ENDING, ".partial")  # how names of what is still being written end

Read = Callable[[], Iterable[Records]]


@dataclasses.dataclass(frozen=True)
class Opened:
    """The tables of a path; `facts` and `table_facts` are what the files say of themselves and of tables."""

    kind: str
    tables: Mapping[str, Read]  # by name, a function that begins to read the records
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table_facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    clock: int | None = None  # the step, or the user's time, of the files


def open_tables(path: pathlib.Path) -> Opened:
    """Opens a file or folder of any kind, or a folder of files, each a table; errors are those of `inspect`."""
    if not path.exists():
        raise FileNotFoundError(f"inspect: {path}: got no such file or folder, wanted {_list_kinds()}.")
    opened = _open(path)
    if opened is not None:
        return opened
    children = sorted(child for child in path.iterdir() if child.suffix not in _UNFINISHED) if path.is_dir() else []
    found = {child: opened for child in children if (opened := _open(child)) is not None}
    if not found:
        content = f"a file of {path.stat().st_size:,} bytes that begins with {_head(path, 8)!r}"
        if path.is_dir():
            names = sorted(child.name for child in path.iterdir())
            content = f"a folder of {names[:5]}{'...' if len(names) > 5 else ''}" if names else "an empty folder"
        raise ValueError(f"inspect: {path}: got {content}, wanted {_list_kinds()}.")
    tables: dict[str, Read] = {}
    for child, opened in found.items():
        for name, read in opened.tables.items():
            if name in tables:
                raise ValueError(
                    f'inspect: {path}: got two tables "{name}", the second in {child.name}, wanted one of a name; '
                    "give the path of one."
                )
            tables[name] = read
    return Opened(" and ".join(dict.fromkeys(opened.kind for opened in found.values())), tables)


def _open(path: pathlib.Path) -> Opened | None:
    return next((opened for _, open_kind in KINDS if (opened := open_kind(path)) is not None), None)


def _list_kinds() -> str:
    *wanted, last = (wanted for wanted, _ in KINDS)
    return f"{', '.join(wanted)} or {last}"


def _head(path: pathlib.Path, num_bytes: int) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(num_bytes)


def _find_saved(path: pathlib.Path) -> list[pathlib.Path]:
    """Finds folders of saved tables: the path itself, or below an Orbax step or its manager's last step."""
    if _has_manifest(path):
        return [path]
    if not path.is_dir():
        return []
    # Uncommitted folders have other names.
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
    is_ours = f'"{manifest.FORMAT}"'.encode() in _head(path / manifest.NAME, 4096)
    return is_ours or ((path / manifest.NAME).is_file() and any(path.glob("table_*.process_*.arrow")))  # damaged


def _open_saved(path: pathlib.Path) -> Opened | None:
    folders = _find_saved(path)
    if not folders:
        return None
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
    tables = {name: functools.partial(_read_saved, source, name) for name in saved["tables"]}
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


def _read_saved(source: Source, table: str) -> Iterator[Records]:
    """Reads the rows of a table, after an empty chunk that shows dim, dtype and state where there are no rows."""
    yield source.form(table).no_records()
    yield from source.records(table)


def _open_hps(path: pathlib.Path) -> Opened | None:
    if not (path / "key").is_file() or not (path / "emb_vector").is_file():
        return None
    # The dim follows from the sizes; where the sizes make none, the reader says what is wrong with them.
    num_keys = (path / "key").stat().st_size // 8
    dim = max(1, (path / "emb_vector").stat().st_size // (4 * max(1, num_keys)))
    has_hotness = (path / "meta").is_file()
    read = functools.partial(hps.read_hps, path, dim=dim, hotness=has_hotness)
    return Opened("HPS", {path.resolve().name: read})


def _open_sok(path: pathlib.Path) -> Opened | None:
    tables = sok_files.tables_in(path)
    reads = {name: functools.partial(sok.read_sok, path, name, **how) for name, how in tables.items()}
    return Opened("SOK", reads) if reads else None


def _open_file(kind: str, magic: bytes, read: Callable[..., Iterable[Records]], path: pathlib.Path) -> Opened | None:
    is_kind = _head(path, len(magic)) == magic
    return Opened(kind, {path.stem: functools.partial(read, path)}) if is_kind else None


KINDS = (  # in the order in which they are asked
    (f"a checkpoint or an export of jaxsok (a folder with {manifest.NAME})", _open_saved),
    ("a folder of HPS (key and emb_vector)", _open_hps),
    ("a dump of SOK (<table>-key and <table>-weight)", _open_sok),
    ("a Parquet file", functools.partial(_open_file, "Parquet", b"PAR1", columns.read_parquet)),
    ("an .npz file", functools.partial(_open_file, "npz", b"PK\x03\x04", npz.read_npz)),
)
