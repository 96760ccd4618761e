"""Rows into a state, round by round: some for each shard at a time, those of keys that it owns.

Sharding model: a round is one program over all shards. Each process gives the lines of its own shards, padded to one
size, and all make equally many rounds. (`import_table` takes the same records in all processes.)
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import grow as grow_lib
from jaxsok import imports as imports_lib
from jaxsok import processes
from jaxsok.collection import Collection
from jaxsok.keys import padding_words, to_words
from jaxsok.records import Records, joined
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec
from jaxsok.store import NUM_STATISTICS, State, StoreState, row_bytes
from jaxsok.types import TableFullError

ROUND_BYTES = 32 << 20  # of all shards of a process together: host memory stays at a few times that
MOST_LINES = 1 << 20  # of a shard in a round
FAILED = 1 << 41  # lines: more than any process has


@dataclasses.dataclass
class Held:
    """The state that call after call donates; if a call fails, it holds the last whole one."""

    state: State


def with_store(state: State, s: int, store: StoreState) -> State:
    """Replaces store `s` of a state."""
    return dataclasses.replace(state, stores=(*state.stores[:s], store, *state.stores[s + 1 :]))


class Placer:
    """Places records of table `number` of store `s`, in place of what was there under the same keys."""

    def __init__(self, op: str, collection: Collection, s: int, number: int):
        self.op, self.collection, self.s, self.number = op, collection, s, number
        self.spec: StoreSpec = collection.stores[s]
        self.shards: Shards = collection.shards
        self.local = self.shards.local()
        lines = ROUND_BYTES // (row_bytes(self.spec) * len(self.local))
        # A power of two: a few programs, whatever the number of rows.
        self.most_lines = min(MOST_LINES, 1 << max(6, int(lines).bit_length() - 1))

    def place(self, held: Held, of_shard: Callable[[int], Iterator[Records]]) -> int:
        """Places all records, and returns how many there were on all shards.

        `held` has room for all of them; its state is donated and replaced. `of_shard` reads the records of a shard of
        this process; for a replicated store those of one shard. Keys that are refused raise TableFullError. What
        `of_shard` raises is a RuntimeError in the other processes.
        """
        streams = {shard: _Stream(of_shard(shard)) for shard in self.local[: 1 if self.spec.is_replicated else None]}
        total, unsettled = 0, None
        while True:
            blocks, error = {}, None
            try:
                blocks = {shard: stream.take(self.most_lines) for shard, stream in streams.items()}
                most = max(block.num_rows if block else 0 for block in blocks.values())
            except Exception as failure:
                error, most = failure, FAILED
            # The size of a round, like their number, is what the process with most to do needs.
            most = processes.greatest(most)
            if most == FAILED:
                # All processes are here.
                self._settle(held, unsettled)
                processes.agree(self.op, error)
            if most == 0:
                break
            size = min(self.most_lines, 1 << max(6, (most - 1).bit_length()))
            total += sum(block.num_rows for block in blocks.values() if block)
            piece = self._piece(blocks, size)
            self._settle(held, unsettled)
            unsettled = piece, self._enter(held, piece)
        self._settle(held, unsettled)
        # Each process reads a replicated store in full.
        return total if self.spec.is_replicated or self.shards.num_processes == 1 else processes.total(total)

    def _enter(self, held: Held, piece: dict[str, Any]) -> Array:
        state = held.state
        store, refused = imports_lib.entered(
            self.spec, self.number, self.shards, False, state.stores[self.s], state.seed, np.uint32(0), piece
        )
        held.state = with_store(state, self.s, store)
        return refused

    def _settle(self, held: Held, unsettled: tuple[dict[str, Any], Array] | None) -> None:
        """Ends a round: keys that found no entry in the index get one under another salt."""
        if unsettled is None:
            return
        for _ in range(imports_lib.SALTS):
            if not self._has_refused(unsettled[1]):
                return
            held.state = grow_lib.resalted(self.collection.stores, held.state, self.s, self.shards)
            unsettled = unsettled[0], self._enter(held, unsettled[0])
        if not self._has_refused(unsettled[1]):
            return
        raise TableFullError(
            f'{self.op}: table "{self.spec.tables[self.number].name}": got keys without an entry in the index under '
            f"{imports_lib.SALTS} salts, wanted one for each; declare a larger capacity, so that the index is larger."
        )

    def _has_refused(self, refused: Array) -> bool:
        return bool(self.shards.read(refused).any())

    def _piece(self, blocks: dict[int, Records | None], size: int) -> dict[str, Any]:
        padded = {shard: self._padded(block, size) for shard, block in blocks.items()}
        if self.spec.is_replicated:
            padded = dict.fromkeys(self.local, padded[self.local[0]])
        first = padded[self.local[0]]
        return {name: self.shards.put({shard: padded[shard][name] for shard in self.local}) for name in first}

    def _padded(self, records: Records | None, size: int) -> dict[str, np.ndarray]:
        spec, count = self.spec, 0 if records is None else records.num_rows
        arrays = {"keys": padding_words((size,)), "rows": np.zeros((size, spec.dim), jnp.dtype(spec.dtype))}
        arrays |= {f"state.{state.name}": np.zeros((size, state.dim), np.float32) for state in spec.state_specs}
        if spec.keeps_statistics:
            arrays["statistics"] = np.zeros((size, NUM_STATISTICS), np.uint32)
        if records is not None:
            arrays["keys"][:count], arrays["rows"][:count] = to_words(records.keys), records.rows
            for state in spec.state_specs:
                arrays[f"state.{state.name}"][:count] = records.state[state.name]
            if spec.keeps_statistics:
                arrays["statistics"][:count, 0], arrays["statistics"][:count, 1] = records.last_step, records.frequency
        return arrays


class _Stream:
    """Turns records in pieces of any size into pieces of a given size."""

    def __init__(self, pieces: Iterator[Records]):
        self.pieces, self.rest = pieces, None

    def take(self, most: int) -> Records | None:
        parts, count = [], 0
        while count < most:
            piece = self.rest if self.rest is not None else next(self.pieces, None)
            self.rest = None
            if piece is None:
                break
            if count + piece.num_rows > most:
                self.rest = piece.take(slice(most - count, None))
                piece = piece.take(slice(0, most - count))
            if piece.num_rows:
                parts.append(piece)
                count += piece.num_rows
        return joined(parts) if parts else None
