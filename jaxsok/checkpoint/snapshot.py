"""Arrays of a state on their way to the host, piece by piece, before a step changes them in place.

Each piece is a range of a shard's dense arrays, live rows and others, of which the writer picks the rows; or, of a
delta, the rows that changed, which the device finds.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxsok.rows import cut_lines, slabs_of
from jaxsok.shards import Shards, parts_of, read_on_host, without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.table_export import fetch, find_rows
from jaxsok.types import COUNTERS


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a shard of a store, on the host."""

    store: int
    kind: str  # "rows", live or not; "waiting": buckets of waiting keys; "bloom": words of a Bloom filter
    shard: int
    arrays: Any  # `RowLines` of rows, else words

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self.arrays))


def shard_parts(tree: Any, spec: StoreSpec, shards: Shards) -> dict[int, Any]:
    """Finds the parts of a store's arrays that this process saves, each once, by shard and on its device."""
    if shards.is_of_each_process and jax.process_index() > 0:
        return {}
    if not shards.is_mesh:
        return {0: jax.tree.map(lambda array: array.addressable_data(0), tree)}
    parts = parts_of(tree, spec.num_shards, is_once=True)
    return {shard: part for shard, part in parts if shard == 0 or not spec.is_replicated}


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

    def cut_all() -> Iterator[tuple[tuple[str, int], Any, slice]]:
        for shard, part in shard_parts(store, spec, shards).items():
            for arrays, lines in _cut_rows(spec, part, seed, piece_bytes, since):
                yield ("rows", shard), arrays, lines
        for kind, slabs in (("waiting", store.sightings), ("bloom", store.bloom)):
            for array in slabs:
                for shard, words in shard_parts(array, spec, shards).items():
                    most = max(1, piece_bytes // max(1, words.nbytes // words.shape[0]))
                    for first, size, lines in cuts_of(words.shape[0], most):
                        yield (kind, shard), cut_lines(words, np.int32(first), size), lines

    return itertools.starmap(lambda place, arrays: Piece(number, *place, arrays), fetch(cut_all()))


def _cut_rows(
    spec: StoreSpec, part: StoreState, seed: Array, piece_bytes: int, since: int | None
) -> Iterator[tuple[Any, slice]]:
    """Copies ranges of the rows of a shard, and says which lines of each copy are new."""
    line_bytes = 16 + spec.itemsize * spec.dim + 4 * sum(state.dim for state in spec.state_specs)
    most = max(1, piece_bytes // (line_bytes + 8 * spec.keeps_statistics))
    # Rows lie below the row ids that were ever given out.
    end = int(np.asarray(part.counters)[COUNTERS.index("num_allocated")])
    for slab in slabs_of(spec, part, read_on_host(seed)):
        if since is None:
            for first, size, lines in cuts_of(slab.size, most, end - slab.start):
                yield slab.cut(first, size), lines
            continue
        for places in find_rows(slab, most, since=since):
            # Few sizes, few programs.
            padded = np.resize(places, min(most, 1 << (places.size - 1).bit_length()))
            yield _to_host(slab.read(padded)), slice(0, places.size)


def cuts_of(num_lines: int, most: int, end: int | None = None) -> Iterator[tuple[int, int, slice]]:
    """Yields first line and size of blocks that hold all lines before `end`, and where the new lines of each are.

    All blocks have one size, so that one program cuts them: the last one begins earlier.
    """
    size, end = min(most, num_lines), num_lines if end is None else min(num_lines, end)
    for start in range(0, end, size):
        first = min(start, num_lines - size)
        yield first, size, slice(start - first, min(start + size, end) - first)


def _to_host(arrays: Any) -> Any:
    """Begins to copy arrays of a GPU to pinned memory, which JAX keeps for the next ones."""
    (device,) = jax.tree.leaves(arrays)[0].devices()
    return arrays if device.platform == "cpu" else _copy_to_host(arrays)


@without_mesh
@jax.jit
def _copy_to_host(arrays: Any) -> Any:
    return jax.device_put(arrays, jax.memory.Space.Host)
