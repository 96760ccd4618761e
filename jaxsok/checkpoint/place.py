"""Places rows into a state, round by round: some for each shard at a time, those of keys that it owns.

Sharding model: a round is one program over all shards. Each process gives the rows of its own shards, padded to one
size, and all make equally many rounds. (`import_table` takes the same records in all processes.)
"""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from jaxsok import processes
from jaxsok.checks import not_none
from jaxsok.collection import Collection
from jaxsok.records import Records, join_records, regroup
from jaxsok.specs import StoreSpec
from jaxsok.store import row_bytes
from jaxsok.table_export import no_records
from jaxsok.table_import import Held, RecordWriter, take_padded

ROUND_BYTES = 32 << 20  # of all shards of a process together: host memory stays at a few times that
MOST_LINES = 1 << 20  # of a shard in a round
FAILED = 1 << 41  # rows: more than any process has


def place_records(
    op: str, collection: Collection, s: int, number: int, held: Held, read_shard: Callable[[int], Iterator[Records]]
) -> int:
    """Places records of table `number` of store `s`, and returns how many there were on all shards.

    `held` has room for all of them; its state is donated and replaced. `read_shard` reads the records of a shard of
    this process; for a replicated store those of one shard. If it raises, other processes raise a RuntimeError.
    """
    spec, shards = collection.stores[s], collection.shards
    local = shards.local()
    lines = ROUND_BYTES // (row_bytes(spec) * len(local))
    # A power of two: a few programs, whatever the number of rows.
    most_lines = min(MOST_LINES, 1 << max(6, lines.bit_length() - 1))
    is_once = spec.is_replicated
    streams = {shard: regroup(read_shard(shard), most_lines, join_records) for shard in local[: 1 if is_once else None]}
    writer = RecordWriter(op, collection.stores, s, number, shards, held, clock=np.uint32(0))
    none, total = no_records(spec), 0
    while True:
        blocks, most, error = {}, FAILED, None
        try:
            blocks = {shard: next(stream, none) for shard, stream in streams.items()}
            most = max(block.num_rows for block in blocks.values())
        except Exception as failure:
            error = failure
        # The size of a round, like their number, is what the process with most to do needs.
        most = processes.greatest(most)
        if most == FAILED:
            # All processes are here.
            writer.settle()
            processes.agree(op, error)
        if most == 0:
            break
        size = min(most_lines, 1 << max(6, (most - 1).bit_length()))
        total += sum(block.num_rows for block in blocks.values())
        arrays = {shard: _pad(spec, block, size) for shard, block in blocks.items()}
        if is_once:
            arrays = dict.fromkeys(local, arrays[local[0]])
        piece = {name: shards.put({shard: arrays[shard][name] for shard in local}) for name in arrays[local[0]]}
        writer.settle()
        writer.write(functools.partial(iter, [piece]))
    writer.settle()
    # Each process reads a replicated store in full.
    return total if is_once or shards.num_processes == 1 else processes.total(total)


def _pad(spec: StoreSpec, records: Records, size: int) -> dict[str, np.ndarray]:
    arrays = {"keys": records.keys, "rows": records.rows}
    arrays |= {f"state.{state.name}": records.state[state.name] for state in spec.state_specs}
    if spec.keeps_statistics:
        arrays["statistics"] = np.stack([not_none(records.last_step), not_none(records.frequency)], axis=1)
    return {name: take_padded(array, np.arange(records.num_rows), size) for name, array in arrays.items()}
