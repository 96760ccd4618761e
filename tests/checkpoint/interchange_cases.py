"""Records for the tests of other systems' files, a small table in every format, and independent writers.

The writers follow the descriptions of the layouts, through struct and NumPy alone.
"""

import contextlib
import functools
import hashlib
import pathlib
import struct
import tempfile

import jax.numpy as jnp
import numpy as np

from jaxsok.interchange import columns, hps, npz, sok
from jaxsok.records import Records

BFLOAT16 = np.dtype(jnp.bfloat16)


def bits(*parts):
    """Returns numbers that depend on all arguments, as the bytes of a hash do."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def numbers(keys, width, what, dtype=np.float32):
    """Returns a number for each key and column, exact in every dtype, so that a misplaced row shows."""
    line = [[bits(int(key), column, what) % 255 - 127 for column in range(width)] for key in keys]
    return np.array(line, np.float32).reshape(len(keys), width).astype(dtype)


def make_records(keys, dim=3, states=(), dtype=np.float32, statistics=False):
    """Makes records of some keys."""
    keys = np.array(keys, np.uint64)
    state = {name: numbers(keys, width, name) for name, width in dict(states).items()}
    kept = [np.array([bits(int(key), what) for key in keys], np.uint32) if statistics else None for what in "lf"]
    return Records(keys, numbers(keys, dim, "row", dtype), state, *kept)


def split(records, sizes):
    """Splits records into chunks of these sizes; the rest is the last chunk."""
    begin = 0
    for size in [*sizes, records.num_rows]:
        yield records.take(slice(begin, begin + size))
        begin += size


def by_key(chunks):
    """Returns the values of each key as plain Python."""
    content = {}
    for chunk in chunks:
        for i, key in enumerate(chunk.keys.tolist()):
            assert key not in content
            state = {name: array[i].tolist() for name, array in chunk.state.items()}
            kept = [None if array is None else int(array[i]) for array in (chunk.last_step, chunk.frequency)]
            content[key] = (chunk.rows[i].tolist(), chunk.rows.dtype.name, state, *kept)
    return content


@contextlib.contextmanager
def folder():
    """Makes a directory for one example of a property test."""
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)


def put(path, content):
    """Writes a file with these bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def hps_bytes(keys, rows):
    """Returns the files `key` and `emb_vector`, number by number."""
    return (
        b"".join(struct.pack("<q", int(key) - 2**64 if key >= 2**63 else int(key)) for key in keys),
        b"".join(struct.pack("<f", float(number)) for row in rows for number in row),
    )


def sok_bytes(kind, code, array, name=b"", slot=b""):
    """Returns a file of SOK: 296 bytes of header, then the numbers."""
    head = name.rjust(256) + struct.pack(">I", kind) + slot.rjust(32) + struct.pack(">I", code)
    assert len(head) == 296
    letter = {0: "i", 1: "q", 2: "I", 3: "Q", 4: "e", 5: "f", 6: "d"}[code]
    flat = [value for value in np.asarray(array).reshape(-1).tolist()]
    return head + struct.pack(f"<{len(flat)}{letter}", *flat)


def write_all(path):
    """A small table in every format: by format its reader, and its files."""
    records = make_records([7, 2**40 + 5, 9], 2, {"m": 2, "v": 2})
    hps.write_hps(path / "hps", make_records(records.keys, 2, statistics=True), hotness=True)
    sok.write_sok(path / "sok", "user:0", records, optimizer="adam")
    columns.write_parquet(path / "t.parquet", split(records, [2]))
    npz.write_npz(path / "t.npz", records)
    read_sok = functools.partial(sok.read_sok, path / "sok", "user:0", dim=2, optimizer="adam")
    return {
        "hps": (functools.partial(hps.read_hps, path / "hps", dim=2, hotness=True), sorted((path / "hps").iterdir())),
        "sok": (read_sok, sorted((path / "sok").iterdir())),
        "parquet": (functools.partial(columns.read_parquet, path / "t.parquet"), [path / "t.parquet"]),
        "npz": (functools.partial(npz.read_npz, path / "t.npz"), [path / "t.npz"]),
    }
