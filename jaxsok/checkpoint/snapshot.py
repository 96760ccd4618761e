"""Arrays of a state on their way to the host, piece by piece, before a step changes them in place.

Each piece is a range of a shard's dense arrays, live rows and others; the writer picks the rows. Two pieces are under
way at a time, so that the link is busy while the host works.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Array

from jaxsok.checks import not_none
from jaxsok.keys import from_words
from jaxsok.rows import RowSlab, cut_lines, slabs_of
from jaxsok.shards import Shards, local_parts, read_on_host
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.table_export import prefetch
from jaxsok.types import COUNTERS, PADDING_KEY

UNDER_WAY = 2  # pieces between device and host


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
            for start in range(0, min(slab.size, end - slab.start), most):
                stop = min(start + most, slab.size, end - slab.start)
                if since is None:
                    yield _UnderWay(make, *_whole(slab, start, stop, most))
                else:
                    yield from _start_since(make, slab, start, stop, most, since)


def _start_since(
    make: Callable[..., Piece], slab: RowSlab, start: int, stop: int, most: int, since: int
) -> Iterator["_UnderWay"]:
    # A delta usually has few rows. The keys and statistics of all rows say which.
    cut, lines = _cut((slab.records, not_none(slab.statistics)), start, stop, most)
    words, seen = (np.asarray(array)[lines] for array in cut)
    is_wanted = (from_words(words[:, :2]) != np.uint64(PADDING_KEY)) & (seen[:, 0] >= np.uint32(since))
    wanted = np.flatnonzero(is_wanted)
    if wanted.size == 0:
        return
    if 2 * wanted.size < stop - start:
        size = 1 << (int(wanted.size) - 1).bit_length()  # few sizes, few programs
        picked = slab.read(np.resize((wanted + start).astype(np.int32), size))
        yield _UnderWay(make, tuple(jax.tree.leaves(picked)), slice(0, wanted.size))
    else:
        yield _UnderWay(make, *_whole(slab, start, stop, most))


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    make: Callable[..., Piece]
    arrays: tuple[Array, ...]
    lines: slice

    def __post_init__(self) -> None:
        for array in self.arrays:
            array.copy_to_host_async()

    def wait(self) -> Piece:
        wholes = [np.asarray(array) for array in self.arrays]
        # A part in memory of its own: it would keep the whole, and its bytes are what the queue counts.
        is_part = self.lines != slice(0, wholes[0].shape[0])
        return self.make(*(whole[self.lines].copy() if is_part else whole for whole in wholes))


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
