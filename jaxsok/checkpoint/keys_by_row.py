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
from jaxsok.checkpoint.snapshot import shard_parts, unpack_bits
from jaxsok.collection import Collection
from jaxsok.keys import PADDING_WORD, from_words, to_words
from jaxsok.rows import read_lines
from jaxsok.shards import without_mesh
from jaxsok.store import State
from jaxsok.table_export import blocks_of, prefetch
from jaxsok.types import PADDING_KEY

COMPARED_ROWS = 1 << 22  # at a time: 36 MiB of keys and tables go to the device


class MovedRows(NamedTuple):
    """The rows of a shard whose keys are others than they were, a line for each; their number is `num_rows` by now."""

    row_ids: np.ndarray
    keys: np.ndarray
    tables: np.ndarray
    num_rows: int


Moved = tuple[dict[int, MovedRows], ...]  # by store and shard


@dataclasses.dataclass(frozen=True, eq=False)
class KeysByRow:
    """The key and the table of each row of a state, by store and shard, row by row; free rows have PADDING_KEY."""

    names: tuple[tuple[str, ...], ...]
    """The tables of each store: another collection may arrange them in another way."""
    keys: tuple[dict[int, np.ndarray], ...]
    tables: tuple[dict[int, np.ndarray], ...]

    @classmethod
    def of(cls, collection: Collection, state: State) -> "KeysByRow":
        """Reads the records of all rows: 16 bytes each from the device, of which at least 9 stay."""
        keys, tables = [], []
        for spec, store in zip(collection.stores, state.stores, strict=True):
            small = np.min_scalar_type(len(spec.tables))
            found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
            for slab in store.records:
                for shard, part in shard_parts(slab, spec, collection.shards).items():
                    blocks = (
                        (from_words(words[:, :2]), words[:, 2].astype(small)) for _, (words,) in blocks_of((part,))
                    )
                    found.setdefault(shard, []).extend(blocks)
            columns = {shard: tuple(map(np.concatenate, zip(*parts, strict=True))) for shard, parts in found.items()}
            keys.append({shard: of_shard[0] for shard, of_shard in columns.items()})
            tables.append({shard: of_shard[1] for shard, of_shard in columns.items()})
        return cls(_names_of(collection), tuple(keys), tuple(tables))

    def compare(self, collection: Collection, state: State) -> Moved | None:
        """Finds the rows whose keys have changed: devices compare the keys of all, and send those of these alone.

        None: the state has other tables in its stores, other shards, or fewer rows, as one that was restored may have.
        """
        parts = [
            [shard_parts(slab, spec, collection.shards) for slab in store.records]
            for spec, store in zip(collection.stores, state.stores, strict=True)
        ]
        shards = [set(of_store[0]) for of_store in parts]
        if self.names != _names_of(collection) or shards != [set(of_store) for of_store in self.keys]:
            return None
        for of_store, keys in zip(parts, self.keys, strict=True):
            if any(sum(slab[shard].shape[0] for slab in of_store) < keys[shard].size for shard in keys):
                return None
        return tuple(
            {shard: self._compare(s, shard, [of_slab[shard] for of_slab in of_store]) for shard in of_store[0]}
            for s, of_store in enumerate(parts)
        )

    def _compare(self, s: int, shard: int, slabs: list[Array]) -> MovedRows:
        keys, tables, start, found = self.keys[s][shard], self.tables[s][shard], 0, []
        for records in slabs:
            rows = slice(start, start + records.shape[0])
            for places in _find_moved(records, keys[rows], tables[rows]):
                # Few sizes, few programs.
                padded = np.resize(places, 1 << (places.size - 1).bit_length()) if places.size else places
                lines = np.asarray(read_lines(records, padded))[: places.size]
                row_ids = places.astype(np.uint32) + np.uint32(start)
                found.append((row_ids, from_words(lines[:, :2]), lines[:, 2].astype(tables.dtype)))
            start = rows.stop
        row_ids, new_keys, new_tables = map(np.concatenate, zip(*found, strict=True))
        return MovedRows(row_ids, new_keys, new_tables, start)

    def find_gone(self, op: str, collection: Collection, state: State, moved: Moved) -> dict[str, np.ndarray]:
        """Finds the keys that a state no longer has, by what `compare` gave: uint64 by table, ascending.

        A key that is gone is not in its row any more. Those that are elsewhere by now are looked for in the tables.
        """
        gone = {}
        for s, spec in enumerate(collection.stores):
            left = [self._left(s, shard, rows.row_ids) for shard, rows in moved[s].items()]
            for number, table in enumerate(spec.tables):
                keys = np.concatenate([np.zeros(0, np.uint64), *(keys[of == number] for keys, of in left)])
                pairs = find_keys(op, collection, state, table.name, iter([keys]))
                gone[table.name] = np.unique(np.concatenate([keys[:0], *(part[~found] for part, found in pairs)]))
        return gone

    def _left(self, s: int, shard: int, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys that some rows had, and their tables."""
        keys, tables = self.keys[s][shard], self.tables[s][shard]
        row_ids = row_ids[row_ids < keys.size]
        row_ids = row_ids[keys[row_ids] != np.uint64(PADDING_KEY)]
        return keys[row_ids], tables[row_ids]

    def after(self, moved: Moved) -> "KeysByRow":
        """Returns the keys of the state with which `compare` has compared these."""
        of_stores = list(enumerate(moved))
        keys = ({n: _change(self.keys[s][n], rows, rows.keys) for n, rows in store.items()} for s, store in of_stores)
        tables = (
            {n: _change(self.tables[s][n], rows, rows.tables) for n, rows in store.items()} for s, store in of_stores
        )
        return KeysByRow(self.names, tuple(keys), tuple(tables))


def _names_of(collection: Collection) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(table.name for table in spec.tables) for spec in collection.stores)


def _change(old: np.ndarray, moved: MovedRows, lines: np.ndarray) -> np.ndarray:
    """Copies a column, with the lines of rows that moved."""
    new = _lengthen(old, moved.num_rows)
    new[moved.row_ids] = lines
    return new


def _lengthen(column: np.ndarray, size: int) -> np.ndarray:
    """Copies a column, and appends lines of free rows: the greatest number, which is PADDING_KEY of 64 bits."""
    longer = np.empty(size, column.dtype)
    longer[: column.size] = column
    longer[column.size :] = np.iinfo(column.dtype).max
    return longer


def _find_moved(records: Array, keys: np.ndarray, tables: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the rows of a device whose keys are not those of the host, block by block: their places, int32, ascending.

    The host may have fewer rows than the device: those beyond were free.
    """
    (device,) = records.devices()
    num_rows = records.shape[0]
    size = min(COMPARED_ROWS, num_rows)

    def send() -> Iterator[tuple[int, int, Array]]:
        for start in range(0, num_rows, size):
            first = min(start, num_rows - size)  # all have one size, so that one program compares them
            old = [column[first : first + size] for column in (keys, tables)]
            old_keys, old_tables = (part if part.size == size else _lengthen(part, size) for part in old)
            bits = _is_moved(records, np.int32(first), *jax.device_put((to_words(old_keys), old_tables), device))
            bits.copy_to_host_async()
            yield first, start - first, bits

    for first, skipped, bits in prefetch(send()):
        yield np.flatnonzero(unpack_bits(bits, size)[skipped:]).astype(np.int32) + np.int32(first + skipped)


@without_mesh
@jax.jit
def _is_moved(
    records: UInt32[Array, "num_rows 4"], first: Int32[Array, ""], words: UInt32[Array, "size 2"], tables: Array
) -> UInt8[Array, " _"]:
    now = lax.dynamic_slice_in_dim(records, first, words.shape[0])
    was_free, is_free = (words == PADDING_WORD).all(axis=1), (now[:, :2] == PADDING_WORD).all(axis=1)
    differs = (now[:, :2] != words).any(axis=1) | (now[:, 2] != tables.astype(jnp.uint32))
    return jnp.packbits(differs & ~(was_free & is_free))
