"""Arrays of a state on their way to the host, piece by piece, before a step changes them in place.

Each piece is a range of a shard's dense arrays, live rows and others, of which the writer picks the rows; or, of a
delta, the rows that changed, which the device finds. Two pieces are under way at a time, so that the link is busy while
the host works.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt8, UInt32

from jaxsok.checks import not_none
from jaxsok.keys import PADDING_WORD
from jaxsok.rows import RowSlab, cut_lines, slabs_of
from jaxsok.shards import HOST_KIND, Shards, local_parts, read_on_host, view_on_host, without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.table_export import prefetch
from jaxsok.types import COUNTERS

UNDER_WAY = 2  # pieces between device and host
UNPACKED_ROWS = 1 << 23  # whose bits are looked through at a time; whole bytes


@dataclasses.dataclass(frozen=True)
class RowsPiece:
    """Some rows of a shard's slabs, live or not."""

    store: int
    records: np.ndarray
    rows: np.ndarray
    states: tuple[np.ndarray, ...]
    statistics: np.ndarray | None

    @property
    def nbytes(self) -> int:
        statistics = 0 if self.statistics is None else self.statistics.nbytes
        return self.records.nbytes + self.rows.nbytes + sum(state.nbytes for state in self.states) + statistics


@dataclasses.dataclass(frozen=True)
class WordsPiece:
    """A range of admission data: buckets of waiting keys, or words of a Bloom filter."""

    store: int
    kind: str  # "waiting" or "bloom"
    shard: int
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


Piece = RowsPiece | WordsPiece


def shard_parts(array: Array, spec: StoreSpec, shards: Shards) -> dict[int, Array]:
    """Finds the parts of a store's array that this process saves, each once, by shard and on its device."""
    if not shards.is_mesh:
        # Every process has a state of its own then, and the first one's is saved.
        return {0: array.addressable_data(0)} if jax.process_index() == 0 else {}
    parts = local_parts(array, spec.num_shards, is_once=True)
    return {shard: part for shard, part in parts.items() if shard == 0 or not spec.is_replicated}


def pieces(
    number: int,
    spec: StoreSpec,
    store: StoreState,
    seed: Array,
    shards: Shards,
    *,
    piece_bytes: int,
    since: int | None = None,
) -> Iterator[Piece]:
    """Copies all pieces of a store that this process saves; it must not be donated before the last has come.

    A piece has about `piece_bytes`. With `since`, only rows with a later or equal last step are kept.
    """

    def start_all() -> Iterator[_UnderWay]:
        yield from _start_rows(number, spec, store, seed, shards, piece_bytes, since)
        for kind, arrays in (("waiting", store.sightings), ("bloom", store.bloom)):
            for array in arrays:
                for shard, words in shard_parts(array, spec, shards).items():
                    size = words.shape[0]
                    most = max(1, piece_bytes // max(1, words.nbytes // size))
                    make = functools.partial(WordsPiece, number, kind, shard)
                    for start in range(0, size, most):
                        yield _UnderWay(make, *_cut((words,), start, min(start + most, size), most))

    return map(_UnderWay.wait, prefetch(start_all(), UNDER_WAY))


def _start_rows(
    number: int, spec: StoreSpec, store: StoreState, seed: Array, shards: Shards, piece_bytes: int, since: int | None
) -> Iterator["_UnderWay"]:
    line_bytes = 16 + spec.itemsize * spec.dim + 4 * sum(state.dim for state in spec.state_specs)
    most = max(1, piece_bytes // (line_bytes + 8 * spec.keeps_statistics))
    num_states = len(spec.state_specs)

    def make(records: np.ndarray, rows: np.ndarray, *rest: np.ndarray) -> RowsPiece:
        return RowsPiece(number, records, rows, rest[:num_states], rest[-1] if rest[num_states:] else None)

    leaves, structure = jax.tree.flatten(store)
    parts_of = [shard_parts(leaf, spec, shards) for leaf in leaves]
    for shard in parts_of[0]:
        part = jax.tree.unflatten(structure, [parts[shard] for parts in parts_of])
        # Rows lie below the row ids that were ever given out.
        end = int(np.asarray(part.counters)[COUNTERS.index("num_allocated")])
        for slab in slabs_of(spec, part, read_on_host(seed)):
            if since is not None:
                yield from _start_since(make, slab, most, since)
                continue
            for start in range(0, min(slab.size, end - slab.start), most):
                stop = min(start + most, slab.size, end - slab.start)
                yield _UnderWay(make, *_whole(slab, start, stop, most))


def _start_since(make: Callable[..., Piece], slab: RowSlab, most: int, since: int) -> Iterator["_UnderWay"]:
    """Copies the rows with this last step or a later one; only a bit of each other row goes to the host."""
    bits = np.asarray(_is_changed(slab.records, not_none(slab.statistics), np.uint32(since)))
    waiting = np.zeros(0, np.int32)
    for start in range(0, slab.size, UNPACKED_ROWS):
        end = min(start + UNPACKED_ROWS, slab.size)
        found = np.flatnonzero(unpack_bits(bits[start // 8 :], end - start)).astype(np.int32) + np.int32(start)
        waiting = np.concatenate([waiting, found])
        while waiting.size >= (1 if end == slab.size else most):
            picked, waiting = waiting[:most], waiting[most:]
            # Few sizes, few programs.
            size = min(most, 1 << (picked.size - 1).bit_length())
            read = slab.read(np.resize(picked, size))
            yield _UnderWay(make, _to_host(tuple(jax.tree.leaves(read))), slice(0, picked.size))


@without_mesh
@jax.jit
def _is_changed(
    records: UInt32[Array, "size 4"], statistics: UInt32[Array, "size 2"], since: UInt32[Array, ""]
) -> UInt8[Array, " _"]:
    return jnp.packbits((records[:, :2] != PADDING_WORD).any(axis=1) & (statistics[:, 0] >= since))


def unpack_bits(bits: UInt8[Array, " _"], size: int) -> Bool[np.ndarray, " size"]:
    """Reads what `jnp.packbits` has packed."""
    return np.unpackbits(np.asarray(bits), count=size).view(np.bool_)


def _to_host(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Begins to copy arrays of a GPU to pinned memory, which JAX keeps for the next ones."""
    (device,) = arrays[0].devices()
    return arrays if device.platform == "cpu" else _copy_to_host(arrays)


@without_mesh
@jax.jit
def _copy_to_host(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return jax.device_put(arrays, jax.memory.Space.Host)


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    make: Callable[..., Piece]
    arrays: tuple[Array, ...]
    lines: slice

    def __post_init__(self) -> None:
        for array in self.arrays:
            if array.sharding.memory_kind != HOST_KIND:
                array.copy_to_host_async()

    def wait(self) -> Piece:
        wholes = [view_on_host(array) for array in self.arrays]
        num_lines = self.lines.stop - self.lines.start
        # A small part in memory of its own: it would keep the whole, and its bytes are what the queue counts. Of others
        # the queue counts up to a sixth too little.
        is_small = 7 * num_lines < 6 * wholes[0].shape[0]
        return self.make(*(whole[self.lines].copy() if is_small else whole[self.lines] for whole in wholes))


def _cut(arrays: tuple[Array, ...], start: int, stop: int, most: int) -> tuple[tuple[Array, ...], slice]:
    """Copies a range of arrays, and returns where it lies in the copy; all copies have one length, for one program."""
    first, size, lines = _range(arrays[0].shape[0], start, stop, most)
    return cut_lines(arrays, np.int32(first), size), lines


def _whole(slab: RowSlab, start: int, stop: int, most: int) -> tuple[tuple[Array, ...], slice]:
    """Copies as `_cut` all that a slab has."""
    first, size, lines = _range(slab.size, start, stop, most)
    return tuple(jax.tree.leaves(slab.cut(first, size))), lines


def _range(num_lines: int, start: int, stop: int, most: int) -> tuple[int, int, slice]:
    size = min(most, num_lines)
    first = min(start, num_lines - size)
    return first, size, slice(start - first, stop - first)
