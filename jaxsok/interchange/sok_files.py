"""The bytes of SOK's files: their headers, and which tables a folder of them has.

Each file is a header of 296 bytes and a raw array:

| bytes | |
|---|---|
| 0 to 255 | the table's name, right-justified with spaces; SOK leaves it blank |
| 256 to 259 | what the file holds, big-endian: 0 keys, 1 rows, 2 optimizer state |
| 260 to 291 | the name of the slot, right-justified with spaces; blank for keys and rows |
| 292 to 295 | dtype, big-endian: 0 int32, 1 int64, 2 uint32, 3 uint64, 4 float16, 5 float32, 6 float64 |
| 296 on | keys `[num_rows]` or rows `[num_rows, dim]`, little-endian |
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from jaxsok.interchange import files

HEADER_BYTES: int = 296
KINDS = {0: "keys", 1: "rows", 2: "optimizer state"}
DTYPES = {0: "int32", 1: "int64", 2: "uint32", 3: "uint64", 4: "float16", 5: "float32", 6: "float64"}
KEY_DTYPES, ROW_DTYPES = ("int32", "int64", "uint32", "uint64"), ("float16", "float32", "float64")
_NAME, _KIND, _SLOT, _DTYPE = slice(0, 256), slice(256, 260), slice(260, 292), slice(292, 296)


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a file, if it has one."""

    table: str
    slot: str
    kind: int  # one of KINDS; -1: this is no header
    num_numbers: int

    @classmethod
    def of(cls, path: pathlib.Path) -> "Header":
        try:
            with open(path, "rb") as file:
                words, num_bytes = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        except FileNotFoundError:  # of a dump that is being replaced
            words, num_bytes = b"", 0
        table, slot = (words[place].decode(errors="replace").lstrip(" ") for place in (_NAME, _SLOT))
        kind, code = (int.from_bytes(words[place], "big") for place in (_KIND, _DTYPE))
        is_header = len(words) == HEADER_BYTES and kind in KINDS and code in DTYPES
        item_bytes = np.dtype(DTYPES.get(code, "float32")).itemsize
        num_numbers = max(0, num_bytes - HEADER_BYTES) // item_bytes
        return cls(table, slot, kind if is_header else -1, num_numbers)


def tables_in(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Finds the tables of a dump: by name, the arguments by which `read_sok` reads all of one, as sizes show them."""
    tables: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*-key")) if directory.is_dir() else ():
        if not path.is_file() or (header := Header.of(path)).kind != 0:
            continue
        prefix = path.name.removesuffix("-key")
        num_rows, weight = max(1, header.num_numbers), directory / f"{prefix}-weight"
        dim = max(1, Header.of(weight).num_numbers // num_rows) if weight.is_file() else 1
        widths = {}
        for state in sorted(directory.glob(f"{prefix}-*-*")):
            if state.suffix != ".partial" and state.is_file():
                # The width is dim, unless the size shows another and is not some rows of dim: SOK leaves out rows that
                # were never trained. The reader says what to do then.
                num_numbers = Header.of(state).num_numbers
                width, rest = divmod(num_numbers, num_rows)
                is_other = not rest and (width == 1 or num_numbers % dim)
                widths[state.name.removeprefix(f"{prefix}-")] = width if is_other else dim
        optimizer = {end: end for end in widths} or None
        tables[header.table or prefix] = {"dim": dim, "optimizer": optimizer, "widths": widths}
    return tables


def header_bytes(op: str, table: str, kind: int, slot: str, dtype: str) -> bytes:
    """Makes the header of a file; a name that is too long is a ValueError."""
    code = next(code for code, name in DTYPES.items() if name == dtype)
    names = _text(op, "table", table, 256), _text(op, "slot", slot, 32)
    return b"".join([names[0], kind.to_bytes(4, "big"), names[1], code.to_bytes(4, "big")])


def _text(op: str, what: str, name: str, size: int) -> bytes:
    encoded = name.encode()
    if len(encoded) > size:
        raise ValueError(f"{op}: {what}: got a name of {len(encoded)} bytes, wanted at most {size}: {name!r}.")
    if encoded.startswith(b" "):
        raise ValueError(f"{op}: {what}: got {name!r}, wanted a name that does not begin with a blank: blanks fill up.")
    return encoded.rjust(size)


def read_header(op: str, path: pathlib.Path, table: str, kind: int, slot: str) -> np.dtype:
    """Returns the dtype of a file; refuses one without the wanted header, and names file and byte."""
    size = files.size_of(op, path, "" if kind < 2 else " Pass optimizer=None (with_state=False) for rows alone.")
    if size < HEADER_BYTES:
        raise ValueError(
            f"{op}: {path}: byte {size}: got the end of the file, wanted a header of {HEADER_BYTES} bytes; truncated."
        )
    with open(path, "rb") as file:
        words = file.read(HEADER_BYTES)
    found = int.from_bytes(words[_KIND], "big")
    if found != kind:
        raise ValueError(
            f"{op}: {path}: bytes 256 to 259: kind of file: got {found} ({KINDS.get(found, 'unknown')}), wanted "
            f"{kind} ({KINDS[kind]})."
        )
    for what, place, wanted in (("table", _NAME, table), ("slot", _SLOT, slot)):
        try:
            name = words[place].decode().lstrip(" ")
        except UnicodeDecodeError as error:
            raise ValueError(f"{op}: {path}: byte {place.start + error.start}: {what}: got no UTF-8.") from error
        if name and files.spell_name(name) != files.spell_name(wanted):
            raise ValueError(
                f"{op}: {path}: bytes {place.start} to {place.stop - 1}: {what}: got {name!r}, wanted {wanted!r} or "
                "blanks."
            )
    code, wanted = int.from_bytes(words[_DTYPE], "big"), KEY_DTYPES if kind == 0 else ROW_DTYPES
    if DTYPES.get(code) not in wanted:
        known = {code: name for code, name in DTYPES.items() if name in wanted}
        raise ValueError(
            f"{op}: {path}: bytes 292 to 295: dtype: got {code} ({DTYPES.get(code, 'unknown')}), wanted one of {known}."
        )
    return np.dtype(DTYPES[code]).newbyteorder("<")
