"""The pair of files of HugeCTR's Hierarchical Parameter Server (HPS): `key` and `emb_vector` in a directory per table.

`key` is raw little-endian int64, whatever the server's key type; `emb_vector` is raw float32, `[num_rows, dim]`, in the
same order. Without headers, only sizes show a whole file. An optional `meta` has an int64 for each key, its
hotness, by which the server fills its cache. There is no optimizer state and no last step.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import checks, published
from jaxsok.collection import Collection
from jaxsok.interchange import files
from jaxsok.interchange.files import RawArray, RecordChunks, RecordsIn
from jaxsok.records import Records, convert_to
from jaxsok.store import State

_KEY, _ROW = np.dtype("<i8"), np.dtype("<f4")
WITHOUT_HOTNESS = "; read it with hotness=False, or take the file away."  # how an error about `meta` ends


def write_hps(path: str | os.PathLike, records: RecordsIn, *, hotness: bool = False, overwrite: bool = False) -> int:
    """Writes a table as HPS reads it; returns the number of rows.

    `path` is the directory; it is made. `hotness` writes `meta` from `records.frequency`. Rows of 16 bits become
    float32, which is exact. Keys of 2**63 and above are written as the negative int64 with the same bits. A server with
    `supportlonglong: false` cuts keys to their low 32 bits: it is for keys below 2**32.

    Raises:
      ValueError: no rows, which HPS refuses to read; or `hotness` of records without frequency. Nothing is written.
      FileExistsError: there are files, and `overwrite` is False.

    Example:
      >>> import tempfile
      >>> records = Records(np.array([7, 9], np.uint64), np.ones((2, 4), np.float32))
      >>> with tempfile.TemporaryDirectory() as path:
      ...     write_hps(path, records), sorted(os.listdir(path))
      (2, ['emb_vector', 'key'])

    Source: the raw model loader of HugeCTR 24.06.
    """
    op, (key, rows, meta), num_rows = "write_hps", _paths(path), 0
    form, chunks = files.check_records(op, records)
    if hotness and "frequency" not in form.statistics:
        raise ValueError(f"{op}: hotness: got True with records without frequency, wanted records with it.")
    paths = [key, rows, meta] if hotness else [key, rows]
    with published.partial_files(op, paths, overwrite=overwrite, stale=lambda: [meta]) as opened:
        for chunk in chunks:
            files.write_array(opened[0], chunk.keys.view(np.int64).astype(_KEY, copy=False))
            numbers = convert_to(f"{op}: records.rows", chunk.rows, np.dtype(np.float32))
            files.write_array(opened[1], numbers.astype(_ROW, copy=False))
            if hotness and chunk.frequency is not None:
                files.write_array(opened[2], chunk.frequency.astype(_KEY))
            num_rows += chunk.num_rows
        if num_rows == 0:
            raise ValueError(f"{op}: records: got none for {path}, wanted at least one: HPS reads no empty table.")
    return num_rows


def read_hps(
    path: str | os.PathLike, *, dim: int, chunk_rows: int | None = None, hotness: bool = False
) -> RecordChunks:
    """Reads a table of HPS: float32 rows without state, of the given `dim`; with `hotness`, `meta` as frequencies.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: empty or mis-sized files, PADDING_KEY, or a key that occurs twice; names file and byte. A table that
        was cut off in both files, at the same row, looks like a whole one.

    Example:
      `rows = np.concatenate([chunk.rows for chunk in read_hps("model/user_embeddings/user", dim=64)])`
    """
    return open_hps(path, dim=dim, chunk_rows=chunk_rows, hotness=hotness)[1]


def open_hps(
    path: str | os.PathLike, *, dim: int, chunk_rows: int | None = None, hotness: bool = False
) -> tuple[RawArray, RecordChunks]:
    """Does `read_hps`, and also gives the keys, which can be read without the rows.

    Example:
      `keys, chunks = open_hps("model/user_embeddings/user", dim=64)`, then `keys.read_keys(0, chunks.num_rows)`
    """
    op, (key_path, rows_path, meta_path) = "read_hps", _paths(files.follow_links(path))
    files.check_dim(op, dim)
    num_rows = files.rows_in(op, key_path, _KEY.itemsize)
    if num_rows == 0:
        raise ValueError(f"{op}: {key_path}: byte 0: got the end of the file, wanted at least one key.")
    keys = RawArray(op, key_path, _KEY, (num_rows,))
    rows = RawArray(op, rows_path, _ROW, (num_rows, int(dim)), keys=key_path)
    meta = RawArray(op, meta_path, _KEY, (num_rows,), keys=key_path) if hotness else None
    at_once = files.rows_of_chunk(op, chunk_rows, keys.row_bytes + rows.row_bytes)
    files.check_raw_keys(keys)
    if meta is not None:
        for start in range(0, num_rows, at_once):
            _frequency(meta, start, start + at_once)

    def chunks() -> Iterator[Records]:
        for start in range(0, num_rows, at_once):
            stop = start + at_once
            frequency = None if meta is None else _frequency(meta, start, stop)
            yield Records(keys.read_keys(start, stop), rows.read(start, stop), frequency=frequency)

    return keys, RecordChunks(num_rows, int(dim), {}, chunks)


def save(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    defaults: float | Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> dict[str, int]:
    """Writes tables of a collection, each into a directory of its own below the given one.

    `jaxsok.interchange` has the other arguments and errors. `defaults` is what the server's configuration, not the
    files, gives for keys without a row (`default_value_for_each_table`), for all tables or by name. None, or a table
    that is not named: 0.0, which `Collection.find` has to give as well.

    Raises:
      ValueError: a table has no rows; or `find` gives other than zeros for its keys without a row, and `defaults`
        has no number for it.

    Example:
      `hps.save(collection, state, "model/user_embeddings", tables=["user"], defaults=0.0)`
    """
    op, places = "hps.save", files.paths_of("hps.save", collection, directory, tables, "")
    files.refuse_processes(op, collection, "write_hps")
    _check_defaults(op, collection, list(places), defaults)
    num_rows = collection.num_rows(state)
    for table, place in places.items():
        published.refuse_existing(op, _paths(place), overwrite)
        if num_rows[table] == 0:
            raise ValueError(f"{op}: tables: got {table!r}, which has no rows; HPS reads no empty table: leave it out.")
    return {
        table: write_hps(place, collection.export_chunks(state, table, with_state=False), overwrite=overwrite)
        for table, place in places.items()
    }


def load(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    reset_state: bool = False,
    chunk_rows: int | None = None,
) -> State:
    """Enters the rows of HPS directories into tables; `jaxsok.interchange` has arguments and errors.

    A directory may have the name as it is given, or as `save` spells it: `user/age:0` is `user_age_0`.

    Example:
      `state = hps.load(collection, state, "model/user_embeddings")`
    """
    chunks, names = {}, files.names_of("hps.load", collection, tables)
    for table, path in files.paths_of("hps.load", collection, directory, tables, "").items():
        named = pathlib.Path(directory) / names[table]  # as another program named it
        path = named if named.is_dir() else path
        chunks[table] = read_hps(path, dim=files.spec_of(collection, table).dim, chunk_rows=chunk_rows)
    return files.import_all("hps.load", collection, state, chunks, reset_state=reset_state)


def _check_defaults(op: str, collection: Collection, tables: list[str], defaults: Any) -> None:
    """Refuses tables whose keys without a row would read other numbers in HPS, unless `defaults` says so."""
    by_name = defaults if isinstance(defaults, Mapping) else {} if defaults is None else dict.fromkeys(tables, defaults)
    for name, value in by_name.items():
        if name not in tables:
            raise ValueError(f'{op}: defaults: got "{name}", wanted one of {tables}.')
        checks.number(f'{op}: defaults["{name}"]', value)
    for name in tables:
        spec = files.spec_of(collection, name)
        reads = spec.unknown_reads(0)
        if name not in by_name and reads != 0.0:
            number = reads if isinstance(reads, float) else 0.0
            raise ValueError(
                f'{op}: defaults: got none for table "{name}", in which keys without a row read {spec.initializer!r}; '
                f'HPS answers one number for all of them. Pass defaults={{"{name}": {number:g}}}, or another number, '
                "and write it into default_value_for_each_table of the server's configuration."
            )


def _paths(path: str | os.PathLike) -> list[pathlib.Path]:
    return [pathlib.Path(path) / name for name in ("key", "emb_vector", "meta")]


def _frequency(meta: RawArray, start: int, stop: int) -> np.ndarray:
    hotness = meta.read(start, stop)
    wrong = np.flatnonzero((hotness < 0) | (hotness >= 2**32))
    if wrong.size:
        raise ValueError(
            f"{meta.op}: {meta.path}: byte {meta.byte_of(start + int(wrong[0]))}: hotness: got "
            f"{hotness[wrong[0]]}, wanted 0 to 2**32 - 1{WITHOUT_HOTNESS}"
        )
    return hotness.astype(np.uint32)
