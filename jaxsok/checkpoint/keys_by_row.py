"""The keys of all rows at one time, in host memory: a later export finds the keys that left by comparing.

Without them it reads all keys of the chain of exports that it rests on, whose number grows with each delta.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt8, UInt32

from jaxsok.checkpoint.chain import find_keys
from jaxsok.checkpoint.snapshot import cuts_of, shard_parts
from jaxsok.collection import Collection
from jaxsok.keys import PADDING_WORD, from_words, to_words
from jaxsok.rows import cut_lines, read_lines
from jaxsok.shards import without_mesh
from jaxsok.store import State
from jaxsok.table_export import fetch, unpack_bits
from jaxsok.types import PADDING_KEY

READ_ROWS = 1 << 20  # at a time: 16 MiB of records
COMPARED_ROWS = 1 << 22  # at a time: 36 MiB of keys and tables go to the device


class Rows(NamedTuple):
    """The keys and tables of some rows, a line for each."""

    keys: np.ndarray
    tables: np.ndarray


class MovedRows(NamedTuple):
    """The rows of a shard whose keys are others than they were; the shard has `num_rows` by now."""

    row_ids: np.ndarray
    rows: Rows
    num_rows: int


Moved = dict[tuple[int, int], MovedRows]  # by store and shard


@dataclasses.dataclass(frozen=True, eq=False)
class KeysByRow:
    """The key and the table of each row of a state, row by row; free rows have PADDING_KEY."""

    names: tuple[tuple[str, ...], ...]
    """The tables of each store: another collection may arrange them in another way."""
    rows: dict[tuple[int, int], Rows]
    """By store and shard."""

    @classmethod
    def of(cls, collection: Collection, state: State) -> "KeysByRow":
        """Reads the records of all rows: 16 bytes each from the device, of which at least 9 stay."""
        rows = {}
        for (s, shard), slabs in _slabs_of(collection, state).items():
            small = np.min_scalar_type(len(collection.stores[s].tables))
            blocks = (
                (None, cut_lines(slab, np.int32(first), size), lines)
                for slab in slabs
                for first, size, lines in cuts_of(slab.shape[0], READ_ROWS)
            )
            columns = [(from_words(words[:, :2]), words[:, 2].astype(small)) for _, words in fetch(blocks)]
            rows[s, shard] = Rows(*map(np.concatenate, zip(*columns, strict=True)))
        return cls(_names_of(collection), rows)

    def compare(self, collection: Collection, state: State) -> Moved | None:
        """Finds the rows whose keys have changed: devices compare the keys of all, and send those of these alone.

        None: the state has other tables in its stores, other shards, or fewer rows, as one that was restored may have.
        """
        slabs = _slabs_of(collection, state)
        if self.names != _names_of(collection) or slabs.keys() != self.rows.keys():
            return None
        if any(sum(map(len, slabs[place])) < rows.keys.size for place, rows in self.rows.items()):
            return None
        return {place: _compare(slabs[place], rows) for place, rows in self.rows.items()}

    def find_gone(self, op: str, collection: Collection, state: State, moved: Moved) -> dict[str, np.ndarray]:
        """Finds the keys that a state no longer has, by what `compare` gave: uint64 by table, ascending.

        A key that is gone is not in its row any more. Those that are elsewhere by now are looked for in the tables.
        """
        gone = {}
        for s, spec in enumerate(collection.stores):
            left = [_left(self.rows[place], found.row_ids) for place, found in moved.items() if place[0] == s]
            for number, table in enumerate(spec.tables):
                keys = np.concatenate([np.zeros(0, np.uint64), *(rows.keys[rows.tables == number] for rows in left)])
                pairs = find_keys(op, collection, state, table.name, iter([keys]))
                gone[table.name] = np.unique(np.concatenate([keys[:0], *(part[~found] for part, found in pairs)]))
        return gone

    def after(self, moved: Moved) -> "KeysByRow":
        """Returns the keys of the state with which `compare` has compared these."""
        rows = {place: _lengthen(self.rows[place], found.num_rows) for place, found in moved.items()}
        for place, found in moved.items():
            for column, lines in zip(rows[place], found.rows, strict=True):
                column[found.row_ids] = lines
        return KeysByRow(self.names, rows)


def _slabs_of(collection: Collection, state: State) -> dict[tuple[int, int], tuple[Array, ...]]:
    """Finds the records that this process saves, by store and shard."""
    return {
        (s, shard): slabs
        for s, (spec, store) in enumerate(zip(collection.stores, state.stores, strict=True))
        for shard, slabs in shard_parts(store.records, spec, collection.shards).items()
    }


def _compare(slabs: tuple[Array, ...], rows: Rows) -> MovedRows:
    start, found = 0, []
    for records in slabs:
        end = start + len(records)
        for places in _find_moved(records, Rows(rows.keys[start:end], rows.tables[start:end])):
            # Few sizes, few programs.
            padded = np.resize(places, 1 << (places.size - 1).bit_length()) if places.size else places
            lines = np.asarray(read_lines(records, padded))[: places.size]
            row_ids = places.astype(np.uint32) + np.uint32(start)
            found.append((row_ids, from_words(lines[:, :2]), lines[:, 2].astype(rows.tables.dtype)))
        start = end
    row_ids, keys, tables = map(np.concatenate, zip(*found, strict=True))
    return MovedRows(row_ids, Rows(keys, tables), start)


def _left(rows: Rows, row_ids: np.ndarray) -> Rows:
    """Returns the keys that some rows had, and their tables."""
    row_ids = row_ids[row_ids < rows.keys.size]
    row_ids = row_ids[rows.keys[row_ids] != np.uint64(PADDING_KEY)]
    return Rows(rows.keys[row_ids], rows.tables[row_ids])


def _names_of(collection: Collection) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(table.name for table in spec.tables) for spec in collection.stores)


def _lengthen(rows: Rows, size: int) -> Rows:
    """Copies rows, and appends free ones: the greatest numbers, of which that of 64 bits is PADDING_KEY."""
    return Rows(*(np.pad(old, (0, size - old.size), constant_values=np.iinfo(old.dtype).max) for old in rows))


def _find_moved(records: Array, rows: Rows) -> Iterator[np.ndarray]:
    """Yields the rows of a device whose keys are not those of the host, block by block: their places, int32, ascending.

    The host may have fewer rows than the device: those beyond were free.
    """
    (device,) = records.devices()

    def compare() -> Iterator[tuple[tuple[int, int, slice], Array, slice]]:
        for first, size, lines in cuts_of(records.shape[0], COMPARED_ROWS):
            old = Rows(*(column[first : first + size] for column in rows))
            old = old if old.keys.size == size else _lengthen(old, size)
            bits = _is_moved(records, np.int32(first), *jax.device_put((to_words(old.keys), old.tables), device))
            yield (first, size, lines), bits, slice(0, len(bits))

    for (first, size, lines), bits in fetch(compare()):
        yield np.flatnonzero(unpack_bits(bits, size)[lines]).astype(np.int32) + np.int32(first + lines.start)


@without_mesh
@jax.jit
def _is_moved(
    records: UInt32[Array, "num_rows 4"], first: Int32[Array, ""], words: UInt32[Array, "size 2"], tables: Array
) -> UInt8[Array, " _"]:
    now = lax.dynamic_slice_in_dim(records, first, words.shape[0])
    was_free, is_free = (words == PADDING_WORD).all(axis=1), (now[:, :2] == PADDING_WORD).all(axis=1)
    differs = (now[:, :2] != words).any(axis=1) | (now[:, 2] != tables.astype(jnp.uint32))
    return jnp.packbits(differs & ~(was_free & is_free))
