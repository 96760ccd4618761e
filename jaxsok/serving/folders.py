"""The sources of frozen tables: folders on this machine, as streams of rows with their keys.

A folder is an HPS directory (`key`, `emb_vector`), an export of `jaxsok.checkpoint`, or a step of an Orbax checkpoint
with such tables below it. Sizes, checksums and keys are checked when it is opened.
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxsok import host_limits, published
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.chain import chain_of, check_link
from jaxsok.checkpoint.files import key_batches
from jaxsok.checkpoint.saved import Source
from jaxsok.initializers import InitialRows
from jaxsok.interchange import files as files_lib, hps as hps_lib
from jaxsok.records import Records
from jaxsok.serving.errors import ServingError, require_table
from jaxsok.serving.frozen import FrozenTable, table_that_reads
from jaxsok.serving.padding import NO_KEYS

Path = str | os.PathLike[str]
KeyBits = Literal[32, 64]
Tables = Mapping[str, FrozenTable]
# Deltas of a chain are held in memory while they are applied, if they have so many bytes at most, and a quarter of what
# the host has left; others are read again for their rows.
HELD_BYTES = 2 * 2**30
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a folder that Orbax has not committed


@dataclasses.dataclass(frozen=True)
class TableSource:
    """Rows of one table in checked files. What is not held in memory is read again; changed files are refused."""

    table: str
    path: pathlib.Path  # the folder with the files; for a chain, the last link's
    dim: int
    dtype: str  # "float32", "bfloat16" or "float16"; float32 for a chain whose links differ
    num_rows: int  # given by `chunks`; of a chain, without rows that a later link replaces or removes
    chunks: Callable[[], Iterator[Records]] = dataclasses.field(repr=False)
    """Gives the rows in chunks: distinct keys (uint64), rows, and statistics where they were kept."""
    keys: Callable[[], Iterator[np.ndarray]] = dataclasses.field(repr=False)
    """Gives the keys (uint64) of the rows alone, in the same order."""
    uuid: str | None = None  # names the base of the next delta; None: an HPS directory, or cut keys: no delta follows
    base: str | None = None  # the `uuid` that the delta rests on; None: it is no delta, but all of a table
    links: tuple[str, ...] = ()  # the exports of the chain, or of the deltas, in their order; empty: an HPS directory
    unknown: float | InitialRows | str | None = None
    """The row of an absent key in training: a number in every column, or its initial row; a text describes rows that
    served tables cannot compute; None: the files do not say."""
    tombstones: Callable[[], Iterator[np.ndarray]] = dataclasses.field(default=lambda: iter(()), repr=False)
    """Gives distinct keys (uint64) in chunks that are gone since the base. None of them is among the rows."""

    def __iter__(self) -> Iterator[Records]:
        return self.chunks()


def open_table(
    path: Path,
    *,
    table: str,
    dim: int,
    key_bits: KeyBits = 64,
    hotness: bool = False,
    alone: bool = False,
    op: str = "open_table",
) -> TableSource:
    """Opens all rows of a table: `path` is one of the folders above, for a delta with its chain next to it.

    With `alone` a delta is opened by itself, for a server of its `base`: new or replaced rows, and keys that go.
    `table` is its name in an export or a checkpoint; an HPS directory has one table, without a name. With 32 `key_bits`
    keys are cut to their low 32 bits, as in HPS. `hotness` reads `meta` of HPS as frequencies. Errors name `op`.

    Raises:
      FileNotFoundError, UnknownTableError: there is nothing of the kind, or other tables.
      ServingError: another dim, or several folders of tables.
      ValueError: HPS files that are empty or of odd size, repeated keys (also when they are cut), a delta without its
        chain, or a `meta` that does not fit.
      CorruptFileError: files of an export are damaged.

    Cost:
      Reads all files of the table once (of HPS: all keys), and cut keys again, of an export twice. Memory: a chunk (64
      MiB), 8 bytes a key twice (512 MiB at most), and as long as the result lives 17 bytes for each key of deltas, and
      all of their rows with optimizer state if these have HELD_BYTES at most: then their files are not read again.
    """
    files_lib.check_dim(op, dim)
    folder, is_hps = _find(op, path, table)
    if is_hps:
        return _open_hps(op, folder, table, int(dim), key_bits, hotness)
    links = [Source.of(op, folder)] if alone else chain_of(op, folder)
    return _read_links(links, folder, table, int(dim), key_bits)


def _read_links(links: Sequence[Source], folder: pathlib.Path, table: str, dim: int, key_bits: KeyBits) -> TableSource:
    """Checks a chain, or deltas that follow each other; gives its rows."""
    for link in links:
        require_table(link.op, table, link.manifest["tables"], f'"{link.folder}"')
        got = link.form(table).dim
        if got != dim:
            raise ServingError(f'{link.op}: table "{table}": dim: got {got} in "{link.folder}", wanted {dim}.')
        link.check([table])
    chain, first, last = _Chain(links, table), links[0].manifest, links[-1].manifest
    source = TableSource(
        table,
        folder,
        dim,
        chain.dtype,
        chain.num_rows,
        chain.records,
        chain.keys,
        uuid=last["uuid"],
        base=first["base"] if first["kind"] == "delta" else None,
        links=tuple(link.manifest["uuid"] for link in links),
        unknown=manifest_lib.unknown_from_json(last["tables"][table]["unknown"]),
        tombstones=chain.gone,
    )
    where = lambda number: f'"{links[-1].folder}": table "{table}": row {number}'  # noqa: E731
    return _cut_keys(links[0].op, source, where) if key_bits == 32 else source


def open_either(op: str, path: Path, table: FrozenTable, key_bits: KeyBits) -> TableSource:
    """Opens a delta alone, or all rows of a table."""
    return open_table(path, table=table.name, dim=table.dim, key_bits=key_bits, alone=True, op=op)


Frozen: TypeAlias = tuple[FrozenTable, TableSource]


def to_frozen(what: str, source: TableSource, dtype: Any = None, default: float | None = None) -> Frozen:
    """Describes how a table is served: its rows have `dtype`, absent keys read `default`; None: as it was saved."""
    absent = source.unknown if default is None else default
    if isinstance(absent, str):
        raise ServingError(
            f'{what}: got no number, and in training of "{source.path}" a key without a row reads {absent}, which '
            "served tables cannot work out; wanted the number that they serve: default_value_for_each_table of a "
            'configuration that names the folder, or unknown="zeros" in training.'
        )
    if default is not None:
        source = dataclasses.replace(source, unknown=None)  # what the files say does not count
    return table_that_reads(source.table, source.dim, dtype or source.dtype, absent or 0.0), source


def open_saved(op: str, path: Path) -> list[TableSource]:
    """Opens all tables of an export, a delta (with its chain) or a step of a checkpoint."""
    folder, is_hps = _find(op, path)
    if is_hps:
        raise ServingError(
            f'{op}: source: got the HPS directory "{folder}", which does not name its table, wanted the HPS '
            "configuration (.json) that does."
        )
    saved = Source.of(op, folder)
    return [open_table(folder, table=name, dim=saved.form(name).dim, op=op) for name in saved.manifest["tables"]]


def open_all(op: str, model: str, folder: pathlib.Path, tables: Tables, key_bits: KeyBits) -> dict[str, TableSource]:
    """Opens the tables of a model: in an export, a checkpoint, HPS directories by name, or one HPS directory."""
    is_one = _is_hps(folder)
    if is_one and len(tables) > 1:
        raise ServingError(
            f'{op}: source: got the HPS directory "{folder}", which does not name its table, wanted a mapping from '
            f"tables to folders: the model has {sorted(tables)}."
        )
    hps = {name: path for name in tables if _is_hps(path := folder if is_one else folder / name)}
    if hps:
        return {name: open_either(op, path, tables[name], key_bits) for name, path in hps.items()}
    return open_links(op, model, [_find(op, folder)[0]], tables, key_bits)


def open_links(op: str, model: str, paths: Sequence[Path], tables: Tables, key_bits: KeyBits) -> dict[str, TableSource]:
    """Opens exports that follow each other, deltas or a full one and deltas, as one source for each table."""
    links = [Source.of(op, pathlib.Path(path)) for path in paths]
    if not links:
        raise ServingError(f"{op}: source: got no folders, wanted exports that follow each other.")
    for before, link in itertools.pairwise(links):
        check_link(op, link, before.manifest["uuid"], f'"{before.folder}"')
    saved = links[-1].manifest["tables"]
    if tables.keys().isdisjoint(saved):
        require_table(op, next(iter(tables)), saved, f'"{links[-1].folder}", in an update of "{model}"')
    return {
        name: _read_links(links, links[-1].folder, name, table.dim, key_bits)
        for name, table in tables.items()
        if name in saved
    }


def _find(op: str, path: Path, table: str | None = None) -> tuple[pathlib.Path, bool]:
    folder = pathlib.Path(path)
    what = f'{op}: source: got "{folder}"' if table is None else f'{op}: table "{table}": path: got "{folder}"'
    wanted = (
        "a folder with the files key and emb_vector (HPS), an export of jaxsok.checkpoint, or a step of an Orbax "
        "checkpoint"
    )
    if not folder.is_dir():
        kind = "which is a file" if folder.exists() else "which is not there"
        raise FileNotFoundError(f"{what}, {kind}, wanted {wanted}.")
    if (folder / manifest_lib.NAME).is_file():
        return folder, False
    if _is_hps(folder):
        return folder, True
    has_tables = lambda path: (path / manifest_lib.NAME).is_file()  # noqa: E731
    below = sorted(filter(has_tables, _folders(folder)))
    if len(below) == 1:
        return below[0], False
    if below:
        names = [path.name for path in below]
        raise ServingError(
            f"{what} with saved tables in {names}, wanted one folder of them; name the one that is meant."
        )
    steps = sorted(step.name for step in _folders(folder) if any(map(has_tables, _folders(step))))
    if steps:
        raise ServingError(f"{what}, which has checkpoints in {steps}, wanted one of them; name the step's folder.")
    raise FileNotFoundError(f"{what}, which has none of that, wanted {wanted}; a save that did not end leaves none.")


def _is_hps(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in ("key", "emb_vector"))


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the folders directly below that Orbax or an export has committed."""
    return [
        path
        for path in folder.iterdir()
        if path.is_dir() and _ORBAX_TEMPORARY not in path.name and not path.name.endswith(published.ENDING)
    ]


def _open_hps(op: str, folder: pathlib.Path, table: str, dim: int, key_bits: KeyBits, hotness: bool) -> TableSource:
    meta = files_lib.follow_links(folder) / "meta"
    try:
        file, chunks = hps_lib.open_hps(meta.parent, dim=dim, hotness=hotness and meta.exists())
    except ValueError as error:
        if not str(error).startswith(f"read_hps: {meta}:"):
            raise
        what = str(error).removesuffix(hps_lib.WITHOUT_HOTNESS).removesuffix(".")
        raise ValueError(
            f'{op}: table "{table}": {what}; take the file away, or give a model with a dynamic cache init_ec: '
            "false, so that it is not filled by it."
        ) from error
    at_once = files_lib.CHUNK_BYTES // file.row_bytes

    def keys() -> Iterator[np.ndarray]:
        return (file.read_keys(start, start + at_once) for start in range(0, chunks.num_rows, at_once))

    source = TableSource(table, folder, dim, "float32", chunks.num_rows, lambda: iter(chunks), keys)
    where = lambda number: f"{file.path}: byte {file.byte_of(number)}"  # noqa: E731
    return _cut_keys(op, source, where) if key_bits == 32 else source


def _cut_keys(op: str, source: TableSource, where: Callable[[int], str]) -> TableSource:
    """Cuts keys to their low 32 bits; refuses rows whose keys are equal then, and names them by `where`.

    A delta may not have wider keys, nor follow rows that have: a row is served under its cut key alone, so that of two
    with one cut key the wrong one would be replaced.
    """
    most = np.uint64(2**32 - 1)
    cut = lambda keys: keys & most  # noqa: E731
    is_wide = source.uuid is not None and any((keys > most).any() for keys in source.keys())
    if source.base is not None and (is_wide or any((keys > most).any() for keys in source.tombstones())):
        raise ServingError(
            f'{op}: table "{source.table}": source: got the delta "{source.path}" with keys of more than 32 bits, '
            "wanted a full export: it is not known which of the served rows they replace; or serve the model with "
            "supportlonglong."
        )

    def chunks() -> Iterator[Records]:
        return (dataclasses.replace(records, keys=cut(records.keys)) for records in source.chunks())

    def keys() -> Iterator[np.ndarray]:
        return map(cut, source.keys())

    files_lib.check_keys(f"{op}: keys cut to 32 bits", source.num_rows, keys, where)
    uuid = None if is_wide else source.uuid
    return dataclasses.replace(source, chunks=chunks, keys=keys, uuid=uuid)


class _Chain:
    """A table in the links of a chain, or in deltas that follow each other: the last link that names a key decides.

    It reads all files once, against their checksums: all rows and tombstones, but neither keys that wait for a row nor
    Bloom filters, since nothing of them is served.
    """

    def __init__(self, links: Sequence[Source], table: str) -> None:
        self._links, self._table = links, table
        dtypes = {link.form(table).dtype for link in links}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else "float32"  # which holds all of them exactly
        self._num_full = int(links[0].manifest["kind"] != "delta")  # of the links, at most the first
        deltas = links[self._num_full :]
        # Of all tables of a folder, since an update may change all of them.
        names = [(link, name) for link in deltas for name in link.manifest["tables"]]
        num_bytes = sum(link.form(name).row_bytes * link.manifest["tables"][name]["num_rows"] for link, name in names)
        available = host_limits.available_bytes()
        most = HELD_BYTES if available is None else min(HELD_BYTES, available // 4)
        self._rows: list[list[Records]] | None = [] if num_bytes <= most else None
        keys, gone = list[np.ndarray](), list[np.ndarray]()  # of the rows and of the tombstones of each delta
        for link in deltas:
            # A delta may have many small batches: their keys alone do not keep the bytes of their rows.
            records = (dataclasses.replace(some, state={}) for some in link.records(table))
            if self._rows is not None:
                self._rows.append(records := list(records))
            keys.append(np.concatenate([NO_KEYS, *(some.keys.copy() for some in records)]))
            gone.append(np.concatenate([NO_KEYS, *key_batches(link.files(table, manifest_lib.TOMBSTONES))]))
        self._keys, (self._named, self._are_live, are_gone) = keys, _find_last(keys, gone)
        self._gone = np.concatenate([NO_KEYS, *(some[mask] for some, mask in zip(gone, are_gone, strict=True))])
        num_rows = [keys.size for keys in self._full_keys()] if self._num_full else []
        self.num_rows = sum(num_rows) + sum(int(np.count_nonzero(are_live)) for are_live in self._are_live)

    def records(self) -> Iterator[Records]:
        dtype = files_lib.ROW_DTYPES[self.dtype]
        for number, link in enumerate(self._links):
            of_delta, start = number - self._num_full, 0
            for records in self._rows[of_delta] if self._rows and of_delta >= 0 else link.records(self._table):
                some = slice(start, start := start + records.num_rows)
                is_live = self._are_live[of_delta][some] if of_delta >= 0 else self._stays(records.keys)
                if not is_live.all():
                    records = records.take(is_live)
                if records.num_rows:
                    yield dataclasses.replace(records, rows=records.rows.astype(dtype, copy=False), state={})

    def keys(self) -> Iterator[np.ndarray]:
        of_deltas = (keys[are_live] for keys, are_live in zip(self._keys, self._are_live, strict=True))
        return itertools.chain(self._full_keys() if self._num_full else (), of_deltas)

    def gone(self) -> Iterator[np.ndarray]:
        yield self._gone

    def _full_keys(self) -> Iterator[np.ndarray]:
        return (keys[self._stays(keys)] for keys in key_batches(self._links[0].files(self._table)))

    def _stays(self, keys: np.ndarray) -> np.ndarray:
        """Finds the rows of a full export that no delta replaces or removes: bool[num_keys]."""
        if not self._named.size:
            return np.ones(keys.shape, bool)
        places = np.minimum(np.searchsorted(self._named, keys), self._named.size - 1)
        return self._named[places] != keys


def _find_last(
    keys: Sequence[np.ndarray], gone: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Finds the last delta that names each key, by one sort.

    Takes, by delta, the keys of its rows and those that it removes, which it does first. Returns all keys, ascending,
    and masks of both, by delta: which of them nothing later names.
    """
    parts = [part for of_delta in zip(gone, keys, strict=True) for part in of_delta]
    together = np.concatenate([NO_KEYS, *reversed(parts)])  # the last delta first
    order = np.argsort(together)  # equal keys in any order, which takes a quarter of the time
    ordered = together[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    is_last = np.zeros(len(together), bool)
    if len(starts):
        is_last[np.minimum.reduceat(order, starts)] = True
    ends = np.cumsum([len(part) for part in reversed(parts)])
    masks = np.split(is_last, ends)[: len(parts)][::-1]
    return ordered[starts], masks[1::2], masks[::2]
