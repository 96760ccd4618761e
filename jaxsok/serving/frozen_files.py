"""Frozen tables as a folder, which C and C++ programs open (include/jaxsok.h) by mapping its files.

`frozen.json` describes the stores, and its first line has a checksum of the rest. `store_<s>.index`, `.rows` and
`.scales` are the arrays of a FrozenStore as they are, with `host_rows` after `rows`. ffi/c_interface/frozen_folder.cc
reads them.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

import jaxsok
from jaxsok import published
from jaxsok.host_slabs import bytes_of
from jaxsok.serving.frozen import SEED, FrozenTables, require_tables
from jaxsok.types import COUNTERS


def export_frozen(path: str | os.PathLike[str], tables: FrozenTables) -> None:
    """Writes frozen tables into a new folder, which `jaxsok_open` of the C interface opens.

    The folder is there as a whole or not at all. Lookups of the C interface give the bits of `lookup`. Rows that lie in
    host memory (`freeze`, `device_share`) stay there where a GPU serves the folder.

    Raises:
      FileExistsError: the path is taken, or another process took it while this one wrote.
      TypeError: `tables` are not FrozenTables.
      ValueError: the name of a table has a NUL character, which ends a name in C.

    Cost:
      Disk: the bytes of the tables. Host: the largest array of a store, where it lies on another device.

    Example:
      >>> import tempfile
      >>> from jaxsok import Records
      >>> from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
      >>> records = Records(np.array([7, 9], np.uint64), np.ones((2, 4), np.float32))
      >>> tables, _ = freeze_records([(FrozenTable("item", dim=4), SizedRecords(2, [records]))])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     export_frozen(f"{folder}/tables", tables)
      ...     sorted(file.name for file in pathlib.Path(folder, "tables").iterdir())
      ['frozen.json', 'store_0.index', 'store_0.rows']
    """
    require_tables("export_frozen", tables)
    for name in tables.tables:
        if "\0" in name:
            raise ValueError(
                f"export_frozen: tables: got the name {name!r}, wanted one without NUL, which ends it in C."
            )
    with published.new_folder("export_frozen", pathlib.Path(path)) as folder:
        stores = [_write_store(folder, s, tables) for s in range(len(tables.stores))]
        body = {
            "format": "jaxsok-frozen",
            "version": 1,
            "jaxsok": jaxsok.__version__,
            "seed": SEED.tolist(),
            "stores": stores,
        }
        rest = json.dumps(body, ensure_ascii=False).removeprefix("{").encode() + b"\n"
        (folder / "frozen.json").write_bytes(b'{"checksum": %d,\n%b' % (zlib.crc32(rest), rest))


def _write_store(folder: pathlib.Path, s: int, tables: FrozenTables) -> dict[str, Any]:
    store, spec, words = tables.stores[s], tables.spec.stores[s], tables.spec.words[s]
    index = np.asarray(store.index)
    arrays = {"index": (index,), "rows": (store.rows, *map(bytes_of, store.host_rows))}
    arrays |= {"scales": store.scales} if store.scales else {}
    owners, counters = index.reshape(-1, 4)[:, 3], np.asarray(store.counters)  # entries: key, row id, table
    num_rows = np.bincount(owners[owners < len(spec)], minlength=len(spec)).tolist()
    return {
        "dim": spec[0].dim,
        "dtype": spec[0].dtype,
        "capacity": store.capacity,
        "num_device_rows": len(store.rows),
        "num_buckets": len(index),
        "salt": [int(counters[COUNTERS.index(name)]) for name in ("salt_low", "salt_high")],
        "checksums": {name: _write(folder / f"store_{s}.{name}", parts) for name, parts in arrays.items()},
        "tables": [
            {"name": table.name, "missing": table.missing, "num_rows": rows, "words": line.tolist()}
            for table, rows, line in zip(spec, num_rows, words, strict=True)
        ],
    }


def _write(path: pathlib.Path, arrays: Iterable[Any]) -> int:
    """Writes the bytes of arrays, one after the other; returns their CRC-32."""
    checksum = 0
    with path.open("wb") as file:
        for array in arrays:
            data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            file.write(data)
            checksum = zlib.crc32(data, checksum)
    return checksum
