"""Arrays of a state on their way to the host, piece by piece, before a step changes them in place.

Each piece is a range of a shard's dense arrays, as they lie: whoever takes it picks the rows out of it. Two pieces are
under way at a time, so that the link is busy while the host works.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxsok.keys import from_words
from jaxsok.shards import Shards, local_parts, without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import COUNTERS, PADDING_KEY

UNDER_WAY = 2  # pieces between device and host


@dataclasses.dataclass(frozen=True)
class RowsPiece:
    """Some lines of a shard's slabs, live or not."""

    store: int
    records: np.ndarray
    rows: np.ndarray
    states: tuple[np.ndarray, ...]
    statistics: np.ndarray | None

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        statistics = 0 if self.statistics is None else self.statistics.nbytes
        return self.records.nbytes + self.rows.nbytes + sum(one.nbytes for one in self.states) + statistics


@dataclasses.dataclass(frozen=True)
class WordsPiece:
    """A range of what decides about admission: buckets of waiting keys, or words of a Bloom filter."""

    store: int
    kind: str
    """"waiting" or "bloom"."""
    shard: int
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return self.words.nbytes


Piece = RowsPiece | WordsPiece


def shard_parts(array: Array, spec: StoreSpec, shards: Shards) -> dict[int, Array]:
    """The parts of a store's array that this process is to save, by shard, each on its device.

    Every part is saved once: where the mesh has other axes it lies on several devices, and of a replicated store all
    shards have the same.
    """
    if not shards.is_mesh:
        # Every process has a state of its own then, and the first one's is saved.
        return {0: array.addressable_data(0)} if jax.process_index() == 0 else {}
    parts = local_parts(array, spec.num_shards, is_once=True)
    return {shard: part for shard, part in parts.items() if shard == 0 or not spec.is_replicated}


def pieces(
    number: int,
    spec: StoreSpec,
    store: StoreState,
    shards: Shards,
    *,
    piece_bytes: int,
    since: int | None = None,
) -> Iterator[Piece]:
    """All pieces of a store that this process is to save.

    Args:
      number: of the store.
      spec: of the store.
      store: must not be donated before the last piece has come.
      shards: over which it is split.
      piece_bytes: of a piece at most, give or take a row.
      since: only rows whose last step is this or later; of a store with statistics. A piece then has the rows that
        were picked on the device, where they are few.
    """
    waiting: collections.deque[_UnderWay] = collections.deque()

    def started() -> Iterator["_UnderWay"]:
        yield from _started_rows(number, spec, store, shards, piece_bytes, since)
        for kind, arrays in (("waiting", store.sightings), ("bloom", store.bloom)):
            for array in arrays:
                for shard, part in shard_parts(array, spec, shards).items():
                    yield from _started_words(number, kind, shard, part, piece_bytes)

    for one in started():
        waiting.append(one)
        if len(waiting) > UNDER_WAY:
            yield waiting.popleft().arrived()
    while waiting:
        yield waiting.popleft().arrived()


def num_allocated(spec: StoreSpec, store: StoreState, shards: Shards) -> dict[int, int]:
    """Row ids that were ever given out, by shard: rows lie below."""
    word = COUNTERS.index("num_allocated")
    return {shard: int(np.asarray(part)[word]) for shard, part in shard_parts(store.counters, spec, shards).items()}


def _started_rows(
    number: int, spec: StoreSpec, store: StoreState, shards: Shards, piece_bytes: int, since: int | None
) -> Iterator["_UnderWay"]:
    line_bytes = max(1, sum(slabs[0].nbytes // slabs[0].shape[0] for slabs in _per_row(store)))
    most = max(1, piece_bytes // line_bytes)
    used = num_allocated(spec, store, shards)
    slabs = [[shard_parts(array, spec, shards) for array in arrays] for arrays in zip(*_per_row(store), strict=True)]
    for shard, end in used.items():
        begin = 0
        for slab in slabs:
            arrays = tuple(parts[shard] for parts in slab)
            size = arrays[0].shape[0]
            for start in range(0, min(size, end - begin), most):
                yield from _started_piece(
                    number, spec, arrays, start, min(start + most, size, end - begin), most, since
                )
            begin += size


def _per_row(store: StoreState) -> list[tuple[Array, ...]]:
    """The slabs of all that there is by row."""
    return [slabs for slabs in (store.records, store.rows, *store.states, store.statistics) if slabs]


def _started_piece(
    number: int, spec: StoreSpec, arrays: tuple[Array, ...], start: int, stop: int, most: int, since: int | None
) -> Iterator["_UnderWay"]:
    if since is not None:
        # What a delta has is few as a rule: the keys and statistics of all rows tell which.
        cut, lines = _cut((arrays[0], arrays[-1]), start, stop, most)
        words, seen = (np.asarray(array)[lines] for array in cut)
        is_wanted = (from_words(words[:, :2]) != np.uint64(PADDING_KEY)) & (seen[:, 0] >= np.uint32(since))
        wanted = np.flatnonzero(is_wanted)
        if wanted.size == 0:
            return
        if 2 * wanted.size < stop - start:
            size = 1 << (int(wanted.size) - 1).bit_length()  # few sizes, few programs
            picked = _picked(arrays, np.resize((wanted + start).astype(np.int32), size))
            yield _UnderWay(number, spec, picked, slice(0, wanted.size))
            return
    yield _UnderWay(number, spec, *_cut(arrays, start, stop, most))


def _started_words(number: int, kind: str, shard: int, words: Array, piece_bytes: int) -> Iterator["_UnderWay"]:
    most = max(1, piece_bytes // max(1, words.nbytes // words.shape[0]))
    for start in range(0, words.shape[0], most):
        cut, lines = _cut((words,), start, min(start + most, words.shape[0]), most)
        yield _UnderWay(number, (kind, shard), cut, lines)


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A piece on its way to the host."""

    number: int
    what: StoreSpec | tuple[str, int]
    """Rows of a store of this spec; else the kind of words, and the shard."""
    arrays: tuple[Array, ...]
    lines: slice
    """Of the arrays, that belong to the piece."""

    def __post_init__(self) -> None:
        """Sends it off."""
        for array in self.arrays:
            array.copy_to_host_async()

    def arrived(self) -> Piece:
        """Waits for it."""
        wholes = [np.asarray(array) for array in self.arrays]
        # A part in memory of its own: it would keep the whole, and its bytes are what the queue counts.
        is_part = self.lines != slice(0, wholes[0].shape[0])
        arrays = [whole[self.lines].copy() if is_part else whole for whole in wholes]
        if isinstance(self.what, tuple):
            return WordsPiece(self.number, *self.what, arrays[0])
        records, rows, *rest = arrays
        num_states = len(self.what.state_specs)
        return RowsPiece(self.number, records, rows, tuple(rest[:num_states]), rest[-1] if rest[num_states:] else None)


def _cut(arrays: tuple[Array, ...], start: int, stop: int, most: int) -> tuple[tuple[Array, ...], slice]:
    """A range of arrays, in memory of its own, and where it lies in there.

    What is cut is always as long, so that there is one program for a slab: the last one begins earlier.
    """
    size = min(most, arrays[0].shape[0])
    first = min(start, arrays[0].shape[0] - size)
    return _cut_of(arrays, np.int32(first), size), slice(start - first, stop - first)


@without_mesh
@functools.partial(jax.jit, static_argnums=2)
def _cut_of(arrays: tuple[Array, ...], start: Array, size: int) -> tuple[Array, ...]:
    return tuple(lax.dynamic_slice_in_dim(array, start, size) for array in arrays)


@without_mesh
@jax.jit
def _picked(arrays: tuple[Array, ...], lines: Array) -> tuple[Array, ...]:
    return tuple(array[lines] for array in arrays)
