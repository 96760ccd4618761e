"""Places rows into a state, round by round: some for each shard at a time, those of keys that it owns.

Sharding model: a round is one program over all shards. Each process gives the rows of its own shards, padded to one
size, and all make equally many rounds. (`import_table` takes the same records in all processes.)
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsok import processes
from jaxsok.checkpoint.files import CorruptFileError
from jaxsok.checkpoint.saved import OptimizerState, Source
from jaxsok.checks import not_none
from jaxsok.collection import Collection
from jaxsok.interrupts import Held
from jaxsok.operations import locate
from jaxsok.records import Records, join_records, regroup
from jaxsok.shards import parts_of
from jaxsok.specs import StoreSpec, TableRef
from jaxsok.store import State, row_bytes
from jaxsok.table_import import RecordWriter, take_padded
from jaxsok.types import NUM_PARTITIONS

ROUND_BYTES = 32 << 20  # of all shards of a process together: host memory stays at a few times that
MOST_LINES = 1 << 20  # of a shard in a round
FAILED = 1 << 41  # rows: more than any process has


@dataclasses.dataclass
class Restoring(Held[State]):
    """A state that tables are restored into, one folder after the other."""

    collection: Collection
    optimizer_state: OptimizerState
    is_whole: bool
    """True if the state also gets what belongs to no table: the step, a life, optimizer state of no row."""
    now: int | None
    """The last step of rows that come in, at least; None: as saved."""


def place(source: Source, held: Restoring, name: str, taken: Sequence[str]) -> None:
    """Places a table's saved rows over those of the same keys; the state has room for all of them."""
    op, collection = source.op, held.collection
    table = locate(op, collection, name)
    spec, shards, is_once = table.spec, collection.shards, table.spec.is_replicated
    local, owners = shards.local(), shards_of_partitions(collection, table)

    def read_shard(shard: int) -> Iterator[Records]:
        wanted = None if is_once or (owners == shard).all() else owners == shard
        if wanted is None or wanted.any():
            yield from source.records(name, wanted)

    lines = ROUND_BYTES // (row_bytes(spec) * len(local))
    # A power of two: a few programs, whatever the number of rows.
    most_lines = min(MOST_LINES, 1 << max(6, lines.bit_length() - 1))
    # Each process reads a replicated store in full.
    streams = {shard: regroup(read_shard(shard), most_lines, join_records) for shard in local[: 1 if is_once else None]}
    writer = RecordWriter(op, collection.stores, table, held, clock=np.uint32(0), is_reset=True)
    none, total = source.form(name).no_records(), 0
    # Along axes that are not named shards are repeated, also in other processes: one of them counts their rows.
    counters = held.state.stores[table.store].counters
    counted = streams.keys() if is_once else {shard for shard, _ in parts_of(counters, spec.num_shards, is_once=True)}
    while True:
        blocks, most, error = {}, FAILED, None
        try:
            blocks = {shard: next(stream, none) for shard, stream in streams.items()}
            most = max(block.num_rows for block in blocks.values())
        except Exception as failure:
            error = failure
        # The size of a round, like their number, is what the process with most to do needs.
        most = processes.greatest(op, most)
        if most == FAILED:
            # All processes are here.
            writer.settle()
            processes.agree(op, error)
        if most == 0:
            break
        size = min(most_lines, 1 << max(6, (most - 1).bit_length()))
        total += sum(block.num_rows for shard, block in blocks.items() if shard in counted)
        arrays = {shard: _pad(source, held, spec, block, taken, size) for shard, block in blocks.items()}
        if is_once:
            arrays = dict.fromkeys(local, arrays[local[0]])
        piece = {name: shards.put({shard: arrays[shard][name] for shard in local}) for name in arrays[local[0]]}
        writer.settle()
        writer.write(functools.partial(iter, [piece]))
    writer.settle()
    num_placed = total if is_once or shards.num_processes == 1 else processes.total(op, total)
    saved = source.manifest["tables"][name]["num_rows"]
    with processes.fail_together(op):
        if num_placed != saved:
            raise CorruptFileError(
                f'{op}: table "{name}": got {num_placed} rows in "{source.folder}", wanted {saved}; files of other '
                "saves were mixed."
            )


def shards_of_partitions(collection: Collection, table: TableRef) -> np.ndarray:
    """Returns the shard of each partition of a table's keys: int64[4096]."""
    placement, num_shards = table.declared.placement, table.spec.num_shards
    if num_shards == 1 or placement.kind == "on":
        return np.full(NUM_PARTITIONS, placement.shard if num_shards > 1 else 0, np.int64)
    return np.asarray(collection.partition_owners, np.int64)


def _pad(
    source: Source, held: Restoring, spec: StoreSpec, records: Records, taken: Sequence[str], size: int
) -> dict[str, np.ndarray]:
    """Makes operands of saved rows, padded to `size`. The device rounds rows, and fills state that is not taken."""
    rows = records.rows if records.rows.dtype == jnp.dtype(spec.dtype) else records.rows.astype(np.float32)
    arrays = {"keys": records.keys, "rows": rows} | {f"state.{name}": records.state[name] for name in taken}
    if spec.keeps_statistics:
        last_step, frequency = records.last_step, records.frequency
        if last_step is None:
            # Unknown: they count as used when they were saved, so that none of them is the first to leave.
            last_step = np.full(records.num_rows, np.uint32(source.manifest["clock"]))
            frequency = np.zeros_like(last_step)
        if held.now is not None:
            last_step = np.full_like(last_step, np.uint32(held.now))
        arrays["statistics"] = np.stack([last_step, not_none(frequency)], axis=1)
    return {name: take_padded(array, np.arange(records.num_rows), size) for name, array in arrays.items()}
