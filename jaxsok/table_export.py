"""Streams a table out of its store as records: key, row, optimizer state, statistics; NumPy arrays on the host.

The device says which rows are the table's, a bit for each; only those are gathered there and cross to the host, some
ahead of the reader. So the host holds a few chunks, whatever the table, and a table in a store of many costs its own
rows.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt8, UInt32

from jaxsok.checks import not_none
from jaxsok.keys import PADDING_WORD, from_words
from jaxsok.records import Records, join_records
from jaxsok.rows import RowLines, RowSlab, slabs_of
from jaxsok.shards import HOST_KIND, parts_of, read_on_host, view_on_host, without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState

CHUNK_BYTES = 64 << 20  # rows and state of a chunk: large enough for the full speed of a link to the host
UNPACKED_ROWS = 1 << 23  # whose bits are looked through at a time; whole bytes
AHEAD = 2  # parts that are on their way to the host while another one is in the reader's hands
_LEAST_ROWS = 1024  # per gather: the last chunk of a slab is padded to a power of two, so that programs are few

Tag = TypeVar("Tag")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some rows of one table and shard."""

    shard: int
    row_ids: np.ndarray
    """uint32, within the shard, ascending."""
    records: Records


def default_chunk_rows(spec: StoreSpec, *, with_state: bool = True) -> int:
    """Returns the number of rows in a chunk of about `CHUNK_BYTES`."""
    row_bytes = spec.itemsize * spec.dim + (4 * sum(state.dim for state in spec.state_specs) if with_state else 0)
    return max(1, CHUNK_BYTES // row_bytes)


def export_chunks(
    spec: StoreSpec,
    store: StoreState,
    seed: Array,
    number: int,
    *,
    chunk_rows: int | None = None,
    since: int | None = None,
    with_state: bool = True,
) -> Iterator[Chunk]:
    """Streams one table of a store: this process's shards one after the other, rows by row id. `seed` is the state's.

    The store must not be donated before the last chunk. A chunk ends with its slab. With `since` only rows with at
    least this `last_step` come, of stores with statistics.
    """
    num_rows = chunk_rows or default_chunk_rows(spec, with_state=with_state)
    names = [state.name for state in spec.state_specs] if with_state else []
    if since is not None:
        if since >= 2**32:
            return  # no last step is as late
        since = max(since, 0)

    def gather() -> Iterator[tuple[tuple[int, np.ndarray], RowLines, slice]]:
        # One shard of a replicated store has all rows.
        for shard, part in itertools.islice(parts_of(store, spec.num_shards), 1 if spec.is_replicated else None):
            for slab in slabs_of(spec, part, read_on_host(seed)):
                for places in find_rows(slab, num_rows, number=number, since=since):
                    place = shard, (places + slab.start).astype(np.uint32)
                    yield place, gather_rows(slab, places, num_rows, with_state), slice(0, len(places))

    yield from itertools.starmap(lambda place, lines: Chunk(*place, to_records(lines, names)), fetch(gather()))


def export_table(spec: StoreSpec, store: StoreState, seed: Array, number: int) -> dict[str, Any]:
    """Collects the rows of one table of a store by shard and row id: keys, rows, row ids, state, statistics, shards."""
    chunks = [Chunk(0, np.zeros(0, np.uint32), no_records(spec)), *export_chunks(spec, store, seed, number)]
    records = join_records([chunk.records for chunk in chunks])
    row_ids = np.concatenate([chunk.row_ids for chunk in chunks])
    table: dict[str, Any] = {"keys": records.keys, "rows": records.rows, "row_ids": row_ids, "state": records.state}
    if spec.keeps_statistics:
        table |= {"last_step": records.last_step, "frequency": records.frequency}
    if spec.num_shards > 1:
        table["shards"] = np.repeat(np.uint32([chunk.shard for chunk in chunks]), [len(c.row_ids) for c in chunks])
    return table


def to_records(lines: RowLines, names: Sequence[str]) -> Records:
    """Makes records of rows on the host; `names` are those of the optimizer state that comes along."""
    last_step, frequency = (None, None) if lines.statistics is None else lines.statistics.T
    states = dict(zip(names, lines.states, strict=True))
    return Records(from_words(lines.records[:, :2]), lines.rows, states, last_step, frequency)


def no_records(spec: StoreSpec) -> Records:
    """Returns no rows, in the dtypes and widths of a store."""
    none = np.zeros(0, np.uint32) if spec.keeps_statistics else None
    states = {state.name: np.zeros((0, state.dim), np.float32) for state in spec.state_specs}
    return Records(np.zeros(0, np.uint64), np.zeros((0, spec.dim), jnp.dtype(spec.dtype)), states, none, none)


def fetch(parts: Iterator[tuple[Tag, Any, slice]]) -> Iterator[tuple[Tag, Any]]:
    """Copies the given lines of trees of arrays to the host; begins with the next `AHEAD` while the reader has one."""

    def start(tag: Tag, arrays: Any, lines: slice) -> tuple[Tag, Any, slice]:
        for array in jax.tree.leaves(arrays):
            if array.sharding.memory_kind != HOST_KIND:
                array.copy_to_host_async()
        return tag, arrays, lines

    def receive(tag: Tag, arrays: Any, lines: slice) -> tuple[Tag, Any]:
        return tag, jax.tree.map(lambda array: _take(view_on_host(array), lines), arrays)

    started = itertools.starmap(start, parts)
    under_way = collections.deque(itertools.islice(started, AHEAD + 1))
    while under_way:
        yield receive(*under_way.popleft())  # nothing holds the arrays of the device any more
        under_way.extend(itertools.islice(started, 1))


def _take(whole: np.ndarray, lines: slice) -> np.ndarray:
    # A small part in memory of its own: it would keep the whole, and its bytes are what a save counts. Of others it
    # counts up to a sixth too little.
    return whole[lines].copy() if 7 * (lines.stop - lines.start) < 6 * len(whole) else whole[lines]


def find_rows(slab: RowSlab, most: int, *, number: int | None = None, since: int | None = None) -> Iterator[np.ndarray]:
    """Finds rows of a slab, of one table or used since then if so asked; see `places_of`."""
    words = (None if word is None else np.uint32(word) for word in (number, since))
    return places_of(_mark_rows(slab.records, slab.statistics, *words), slab.size, most)


def places_of(marks: UInt8[Array, " _"], size: int, most: int) -> Iterator[np.ndarray]:
    """Yields the places of marks, a bit for each row of a slab (`jnp.packbits`): int32, ascending, `most` at a time."""
    bits, waiting = np.asarray(marks), np.zeros(0, np.int32)
    for start in range(0, size, UNPACKED_ROWS):
        end = min(start + UNPACKED_ROWS, size)
        found = np.flatnonzero(unpack_bits(bits[start // 8 :], end - start)).astype(np.int32) + np.int32(start)
        waiting = np.concatenate([waiting, found])
        while waiting.size >= (1 if end == size else most):
            yield waiting[:most]
            waiting = waiting[most:]


@without_mesh
@jax.jit
def _mark_rows(
    records: UInt32[Array, "size 4"], statistics: UInt32[Array, "size 2"] | None, number: Any, since: Any
) -> UInt8[Array, " _"]:
    is_marked = (records[:, :2] != PADDING_WORD).any(axis=1)
    if number is not None:
        is_marked &= records[:, 2] == number
    if since is not None:
        is_marked &= not_none(statistics)[:, 0] >= since
    return jnp.packbits(is_marked)


def unpack_bits(bits: UInt8[Array, " _"], size: int) -> Bool[np.ndarray, " size"]:
    """Reads what `jnp.packbits` has packed."""
    return np.unpackbits(np.asarray(bits), count=size).view(np.bool_)


def gather_rows(slab: RowSlab, places: np.ndarray, num_rows: int, with_state: bool = True) -> RowLines:
    """Reads rows of a slab by place, at most `num_rows`, with some twice behind them so that programs are few."""
    padded = np.resize(places, min(num_rows, max(_LEAST_ROWS, 1 << (len(places) - 1).bit_length())))
    return slab.read(padded, with_state=with_state)
