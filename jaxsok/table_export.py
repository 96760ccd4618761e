"""Streams a table out of its store as records: key, row, optimizer state, statistics; NumPy arrays on the host.

The records of the shards are read block by block. They say which rows are the table's, and only those are gathered on
their device and cross to the host, some ahead of the reader. So the host holds a few chunks, whatever the table, and a
table in a store of many costs its own rows.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import records as records_lib
from jaxsok.keys import from_words
from jaxsok.records import Records
from jaxsok.rows import RowSlab, cut_lines, slabs_of
from jaxsok.shards import parts_of, read_on_host
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState
from jaxsok.types import PADDING_KEY

CHUNK_BYTES = 64 << 20  # rows and state of a chunk: large enough for the full speed of a link to the host
BLOCK_ROWS = 1 << 20  # records that are looked through at once: 16 MiB, 24 with statistics
AHEAD = 2  # chunks, and blocks, that are on their way while another one is in the reader's hands
_LEAST_ROWS = 1024  # per gather: the last chunk of a slab is padded to a power of two, so that programs are few

Item = TypeVar("Item")


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

    def send() -> Iterator[tuple]:
        # One shard of a replicated store has all rows.
        for shard, part in itertools.islice(parts_of(store, spec.num_shards), 1 if spec.is_replicated else None):
            for slab in slabs_of(spec, part, read_on_host(seed)):
                lines = _lines_of(slab.records, slab.statistics, number, since)
                for piece in records_lib.regroup(lines, num_rows, _join):
                    yield shard, slab.start, piece, _gather(slab, piece.places, num_rows, with_state), names

    # Nothing holds the device arrays of a chunk while the reader has the chunk, the last ones included.
    yield from itertools.starmap(_receive, prefetch(send()))


def export_table(spec: StoreSpec, store: StoreState, seed: Array, number: int) -> dict[str, Any]:
    """Collects the rows of one table of a store by shard and row id: keys, rows, row ids, state, statistics, shards."""
    chunks = [Chunk(0, np.zeros(0, np.uint32), no_records(spec)), *export_chunks(spec, store, seed, number)]
    records = records_lib.join_records([chunk.records for chunk in chunks])
    row_ids = np.concatenate([chunk.row_ids for chunk in chunks])
    table: dict[str, Any] = {"keys": records.keys, "rows": records.rows, "row_ids": row_ids, "state": records.state}
    if spec.keeps_statistics:
        table |= {"last_step": records.last_step, "frequency": records.frequency}
    if spec.num_shards > 1:
        table["shards"] = np.repeat(np.uint32([chunk.shard for chunk in chunks]), [len(c.row_ids) for c in chunks])
    return table


def no_records(spec: StoreSpec) -> Records:
    """Returns no rows, in the dtypes and widths of a store."""
    none = np.zeros(0, np.uint32) if spec.keeps_statistics else None
    states = {state.name: np.zeros((0, state.dim), np.float32) for state in spec.state_specs}
    return Records(np.zeros(0, np.uint64), np.zeros((0, spec.dim), jnp.dtype(spec.dtype)), states, none, none)


def prefetch(items: Iterable[Item], num_ahead: int = AHEAD) -> Iterator[Item]:
    """Passes items on once the next `num_ahead` of them are on their way to the host, too."""
    rest = iter(items)
    under_way = collections.deque(itertools.islice(rest, num_ahead + 1))
    while under_way:
        yield under_way.popleft()
        under_way.extend(itertools.islice(rest, 1))


# Choosing rows -------------------------------------------------------------------------------------------------------


class _Lines(NamedTuple):
    """The rows of a slab that are exported."""

    places: np.ndarray
    """Within the slab, ascending."""
    keys: np.ndarray
    statistics: np.ndarray | None

    @property
    def num_rows(self) -> int:
        return len(self.places)

    def take(self, lines: slice) -> "_Lines":
        return jax.tree.map(lambda array: array[lines], self)


def _lines_of(records: Array, statistics: Array | None, number: int, since: int | None) -> Iterator[_Lines]:
    arrays = (records,) if statistics is None else (records, statistics)
    for start, (words, *kept) in blocks_of(arrays):
        keys = from_words(words[:, :2])
        is_mine = (keys != np.uint64(PADDING_KEY)) & (words[:, 2] == number)
        if since is not None:
            is_mine &= kept[0][:, 0] >= since
        mine = np.flatnonzero(is_mine)
        yield _Lines(mine + start, keys[mine], kept[0][mine] if kept else None)


def blocks_of(arrays: tuple[Array, ...]) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields all rows of arrays, a block at a time, as NumPy, with the number of the first row."""

    def send() -> Iterator[tuple[int, slice, tuple[Array, ...]]]:
        for first, size, lines in cuts_of(arrays[0].shape[0], BLOCK_ROWS):
            parts = cut_lines(arrays, np.int32(first), size)
            for part in parts:
                part.copy_to_host_async()
            yield first + lines.start, lines, parts

    def receive(start: int, lines: slice, parts: tuple[Array, ...]) -> tuple[int, list[np.ndarray]]:
        return start, [np.asarray(part)[lines] for part in parts]

    yield from itertools.starmap(receive, prefetch(send()))


def cuts_of(num_lines: int, most: int, end: int | None = None) -> Iterator[tuple[int, int, slice]]:
    """Yields first line and size of blocks that hold all lines before `end`, and where the new lines of each are.

    All blocks have one size, so that one program cuts them: the last one begins earlier.
    """
    size, end = min(most, num_lines), num_lines if end is None else min(num_lines, end)
    for start in range(0, end, size):
        first = min(start, num_lines - size)
        yield first, size, slice(start - first, min(start + size, end) - first)


def _join(pieces: list[_Lines]) -> _Lines:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *pieces)


# Contents of chunks --------------------------------------------------------------------------------------------------


def _receive(shard: int, start: int, lines: _Lines, arrays: tuple[Array, ...], names: list[str]) -> Chunk:
    """Makes the chunk of some rows of a slab that begins with row id `start`; waits for its arrays."""
    rows, *states = (np.asarray(array)[: len(lines.places)] for array in arrays)
    statistics = (None, None) if lines.statistics is None else lines.statistics.T
    records = Records(lines.keys, rows, dict(zip(names, states, strict=True)), *statistics)
    return Chunk(shard, (lines.places + start).astype(np.uint32), records)


def _gather(slab: RowSlab, places: np.ndarray, num_rows: int, with_state: bool) -> tuple[Array, ...]:
    padded = min(num_rows, max(_LEAST_ROWS, 1 << (len(places) - 1).bit_length()))
    rows, states = slab.read_numbers(np.resize(places, padded), with_state=with_state)
    for array in (rows, *states):
        array.copy_to_host_async()
    return rows, *states
