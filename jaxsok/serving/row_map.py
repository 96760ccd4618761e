"""The map from (table, key) to row of a frozen store: kept on the host, apart from the rows.

A frozen store has an index and no records, so its device cannot find a free row. The map has both, on the CPU, for
about 41 bytes a row, changed by the kernels of training: updates touch only the rows that change.
"""

import copy
import dataclasses
import secrets
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxsok import keys as keys_lib, types
from jaxsok.kernels import evict as evict_kernels, table as kernels
from jaxsok.kernels.call import StoreArrays
from jaxsok.serving.devices import host_device
from jaxsok.serving.padding import fill_up, key_words, padded_size, slices

# Entries in use ÷ entries of an index when every row is in use: 24.6 bytes a row. Walks are still short, and less than
# one key in 10^9 finds no entry within the kernels' bound; then the index is made larger.
LOAD: float = 0.65

Arrays = TypeVar("Arrays", bound=StoreArrays)
KEYS_AT_A_TIME = 1 << 20  # in one program, to bound scratch memory
_LEAST_KEYS = 1024  # in a call, padded to a power of two, so that programs are few
BUCKETS_AT_A_TIME = 1 << 16  # that are sent to a device, 4 MiB: lookups wait for a copy that is under way
_BUCKETS_COMPARED = 1 << 15  # at a time: what is computed of them stays in a processor's cache
_LEAST_SAVED = 4  # an index is sent whole if more than a quarter of its buckets differ
UNUSED = np.uint32(0xFFFFFFFF)
SALT = np.array([types.COUNTERS.index("salt_low"), types.COUNTERS.index("salt_high")])


class RowMap:
    """The rows of one frozen store by (table, key). Changed in place by one thread at a time."""

    def __init__(self, num_tables: int, capacity: int) -> None:
        _check_capacity(capacity)
        self.num_tables = num_tables
        self.frequencies: np.ndarray | None = None  # uses of each row, uint32; None: not known, or not needed any more
        counters = np.zeros(len(types.COUNTERS), np.uint32)
        counters[SALT] = draw_salt()
        self._arrays = StoreArrays(
            index=_on_host(np.full((buckets_of(capacity), types.BUCKET_WORDS), UNUSED)),
            counters=_on_host(counters),
            table_rows=_on_host(np.zeros(num_tables, np.uint32)),
            rows=(),  # a `FrozenStore` has them
            records=(_on_host(np.full((capacity, types.RECORD_WORDS), UNUSED)),),
        )

    @property
    def capacity(self) -> int:
        return self._arrays.records[0].shape[0]

    @property
    def num_buckets(self) -> int:
        return self._arrays.index.shape[0]

    @property
    def table_rows(self) -> np.ndarray:
        return np.asarray(self._arrays.table_rows)

    @property
    def num_free(self) -> int:
        return self.capacity - int(self.table_rows.sum())

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves((self._arrays, self.frequencies)))

    def find(self, table: int, keys: np.ndarray) -> np.ndarray:
        """Finds the row of each key (uint64) of a table, by its number: uint32; NO_ROW where it has none."""
        found = [
            np.asarray(_find(self._arrays.index, self._arrays.counters, words, ids))[:count]
            for words, ids, count in self._parts(table, keys)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.uint32)

    def place(self, table: int, keys: np.ndarray) -> np.ndarray:
        """Gives each key a row, uint32; new keys get free rows, in the order in which they were freed."""
        keys = np.asarray(keys)
        self._require_room(table, keys)
        placed = []
        for words, ids, count in self._parts(table, keys):
            is_padding = keys_lib.from_words(words) == np.uint64(types.PADDING_KEY)
            while True:
                self._arrays, row_ids, _ = _place(self._arrays, words, ids)
                row_ids = np.asarray(row_ids)
                if not ((row_ids == types.NO_ROW) & ~is_padding).any():
                    break
                # A key found no entry: aimed keys, or bad luck. Both end with another salt and more room.
                counters = np.array(self._arrays.counters)
                counters[SALT] = draw_salt()
                self._rebuild(_on_host(counters), self.num_buckets + self.num_buckets // 4 + 1)
            placed.append(row_ids[:count])
        return np.concatenate(placed) if placed else np.zeros(0, np.uint32)

    def remove(self, table: int, keys: np.ndarray) -> int:
        """Frees the rows of keys and counts them; ignores keys without a row."""
        removed = 0
        for words, ids, _ in self._parts(table, keys):
            self._arrays, count = _remove(self._arrays, words, ids)
            removed += int(count)
        return removed

    def keys_of(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Lists the keys of a table and their rows, by row: uint64 and uint32."""
        records = np.asarray(self._arrays.records[0])
        keys = keys_lib.from_words(records[:, :2])
        rows = np.flatnonzero((keys != np.uint64(types.PADDING_KEY)) & (records[:, 2] == table))
        return keys[rows], rows.astype(np.uint32)

    def set_frequencies(self, row_ids: np.ndarray, values: np.ndarray) -> None:
        """Sets the frequencies of some rows; NO_ROW is ignored."""
        if self.frequencies is None:
            self.frequencies = np.zeros(self.capacity, np.uint32)
        is_row = row_ids != types.NO_ROW
        self.frequencies[row_ids[is_row]] = values[is_row]

    def grow(self, capacity: int) -> None:
        """Adds free rows; those in use keep their places."""
        if capacity <= self.capacity:
            return
        _check_capacity(capacity)
        records = _on_host(fill_up(np.asarray(self._arrays.records[0]), capacity, UNUSED))
        self._arrays = dataclasses.replace(self._arrays, records=(records,))
        self._rebuild(self._arrays.counters, max(self.num_buckets, buckets_of(capacity)))

    def index(self, device: Any) -> tuple[UInt32[Array, "num_buckets 16"], UInt32[Array, " num_counters"]]:
        """Copies index and counters to a device, as a lookup reads them."""
        arrays = self._arrays.index, self._arrays.counters  # of NumPy views JAX would give back the arrays themselves
        copies = jax.device_put(arrays, device, may_alias=False)
        return jax.block_until_ready(copies)  # before a change of the map donates what is copied

    def next_index(
        self, old: "RowMap", index: UInt32[Array, "num_buckets 16"]
    ) -> tuple[UInt32[Array, "num_buckets 16"], UInt32[Array, " num_counters"]]:
        """Makes the index on the device of an older one, and sends only the buckets that differ if they are few."""
        (device,) = index.devices()
        most = self.num_buckets // _LEAST_SAVED
        changed = self._buckets_unlike(old, most) if self.num_buckets == old.num_buckets else None
        if changed is None:
            return self.index(device)
        lines, index = np.asarray(self._arrays.index), jnp.copy(index)
        for some in slices(len(changed), BUCKETS_AT_A_TIME):
            numbers = fill_up(changed[some], padded_size(len(changed[some]), _LEAST_KEYS), UNUSED)
            sent = numbers, lines[np.minimum(numbers, np.uint32(self.num_buckets - 1))]
            index = _set_buckets(index, *jax.block_until_ready(jax.device_put(sent, device)))
        return index, jax.block_until_ready(jax.device_put(self._arrays.counters, device, may_alias=False))

    def _buckets_unlike(self, other: "RowMap", most: int) -> np.ndarray | None:
        """Lists the buckets whose words differ, uint32; None: there are more than `most`."""
        mine, theirs = (np.asarray(one._arrays.index).view(np.uint64) for one in (self, other))
        found, num_found = list[np.ndarray](), 0
        for some in slices(self.num_buckets, _BUCKETS_COMPARED):
            differs = np.bitwise_or.reduce(mine[some] ^ theirs[some], axis=1) != 0
            found.append((np.flatnonzero(differs) + some.start).astype(np.uint32))
            num_found += len(found[-1])
            if num_found > most:
                return None
        return np.concatenate(found)

    def copy(self) -> "RowMap":
        other = copy.copy(self)
        other._arrays = jax.device_put(self._arrays, host_device(), may_alias=False)
        return other

    def _parts(self, table: int, keys: np.ndarray) -> Any:
        """Pads keys and table ids in parts; gives them with the number of real keys."""
        for part in (keys[some] for some in slices(len(keys), KEYS_AT_A_TIME)):
            size = padded_size(len(part), _LEAST_KEYS)
            yield key_words(part, size), np.full(size, table, np.uint32), len(part)

    def _require_room(self, table: int, keys: np.ndarray) -> None:
        if len(keys) <= self.num_free:
            return
        is_new = (self.find(table, keys) == types.NO_ROW) & (keys != np.uint64(types.PADDING_KEY))
        num_new = len(np.unique(keys[is_new]))
        if num_new > self.num_free:
            raise ValueError(
                f"RowMap: keys: got {num_new} that have no row, wanted at most {self.num_free}, the rows that are free "
                f"of {self.capacity}; freeze with more spare_rows, or grow."
            )

    def _rebuild(self, counters: Array, num_buckets: int) -> None:
        index, counters = _rebuild(counters, self._arrays.records, num_buckets)
        self._arrays = dataclasses.replace(self._arrays, index=index, counters=counters)


def _check_capacity(capacity: int) -> None:
    if not 1 <= capacity <= types.MAX_CAPACITY:
        raise ValueError(f"RowMap: capacity: got {capacity} rows in one store, wanted 1 to {types.MAX_CAPACITY}.")


def draw_salt() -> np.ndarray:
    """Draws the 64 bits that are mixed into the hashes of an index: an attacker cannot choose keys that collide."""
    return np.frombuffer(secrets.token_bytes(8), np.uint32)


def buckets_of(capacity: int) -> int:
    """Counts the buckets of the index of a frozen store."""
    return max(4, -(-int(capacity / LOAD + 1) // types.ENTRIES_PER_BUCKET))


def _on_host(array: np.ndarray) -> Array:
    """Commits an array to the CPU, so that programs over it run there."""
    return jax.device_put(array, host_device(), may_alias=False)


def release(arrays: StoreArrays, words: Array, ids: Array) -> tuple[StoreArrays, UInt32[Array, ""]]:
    """Frees the rows of those keys that have one, and counts them; to be compiled. The arrays are donated."""
    row_ids = kernels.find(arrays.index, arrays.counters, words, ids)
    flags = jnp.zeros(arrays.records[0].shape[0], jnp.uint8).at[row_ids].set(jnp.uint8(1), mode="drop")
    arrays, num_released = evict_kernels.release(arrays, flags)
    return arrays, num_released.sum(dtype=jnp.uint32)


def find_or_insert(arrays: Arrays, words: Array, ids: Array) -> tuple[Arrays, Array, Array]:
    """Gives the arrays, row ids, and counts; to be compiled. Rows of new keys, if there are rows, mean nothing yet."""
    no_words = np.zeros((arrays.table_rows.shape[0], types.NUM_TABLE_WORDS), np.uint32)
    return kernels.find_or_insert(arrays, no_words, jnp.zeros(2, jnp.uint32), words, ids)


_find = jax.jit(kernels.find)
_place = jax.jit(find_or_insert, donate_argnums=0)
_remove = jax.jit(release, donate_argnums=0)
_set_buckets = jax.jit(lambda index, numbers, lines: index.at[numbers].set(lines, mode="drop"), donate_argnums=0)
_rebuild = jax.jit(kernels.rebuild, static_argnums=2, donate_argnums=0)
