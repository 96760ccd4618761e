"""Records into a table: each is placed by its key, whatever mesh, capacity or store it came from.

A chunk of records is checked on the host, then dealt to the shards that own its keys. Room is made before anything of
it is entered. Entering is one program that searches, inserts and writes in place; the host prepares a chunk while the
one before it is on its way.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxsok import enlarge, keys as keys_lib, plan as plan_lib, processes, table as table_lib
from jaxsok.exchange import rounded_capacity
from jaxsok.interrupts import Held, held_back
from jaxsok.records import Records, convert_to
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec, TableRef
from jaxsok.store import State, StoreState, with_store
from jaxsok.table_export import default_chunk_rows
from jaxsok.types import COUNTERS, COUNTS, PADDING_KEY, Clock, TableFullError

LEAST_ROWS = 256  # per call: fewer are padded to it, more by an eighth at most, so that programs are few
SALTS = 3  # tried for a chunk, at most, if keys find no entry in the index

_WORD = {name: i for i, name in enumerate(COUNTERS)}
_REFUSED = COUNTS.index("num_refused")


def import_table(
    specs: tuple[StoreSpec, ...],
    held: Held[State],
    table: TableRef,
    chunks: Iterable[Records],
    *,
    clock: Clock | None,
    num_rows: int | None,
    reset_state: bool,
) -> None:
    """Enters records into a table of the state in `held`; see `Collection.import_table`."""
    state = held.state
    now = np.asarray(state.step if clock is None else clock)  # outlives the state, which is donated
    writer = RecordWriter("import_table", specs, table, held, clock=now, is_reset=reset_state)
    importing = _Import(writer, num_rows)
    note = "import_table: the state was donated, and is changed: the chunks before this one are entered."
    with held.kept_on_errors(note):
        try:
            how = f"clock={int(now)}, num_rows={num_rows}, reset_state={reset_state}"
            for arrays in _read_chunks(table, chunks, how):
                importing.enter(arrays)
            writer.settle()
        except BaseException as error:
            if held.state is not state:
                _settle_after(error, writer)
            raise


def _settle_after(error: BaseException, writer: "RecordWriter") -> None:
    """Does `settle` where that can be done alone; else, or if it fails, the error says what may be missing."""
    lacking = "Keys of the last chunk that was entered may be missing"
    if writer.table.shards.num_processes > 1:
        # The other processes may not have failed: waiting for them could last forever.
        error.add_note(f"{lacking}, if they found no entry in the index: import it again.")
        return
    try:
        writer.settle()
    except Exception as other:
        error.add_note(f"{lacking} ({type(other).__name__}: {other})")


def _read_chunks(table: TableRef, chunks: Iterable[Records], how: str) -> Iterator[dict[str, np.ndarray]]:
    """Yields chunks that are checked. Several processes must have the same, as `how`: what one raises, all raise."""
    left, is_shared = iter(chunks), table.shards.num_processes > 1
    while True:
        arrays, own = None, "no further chunk"
        with processes.fail_together("import_table", is_shared=is_shared):
            for records in itertools.islice(left, 1):
                arrays = check_chunk(table.spec, table.number, records)
                if is_shared:
                    sums = [f"{name} of checksum {_checksum(array):08x}" for name, array in sorted(arrays.items())]
                    own = f"{len(arrays['keys'])} records ({', '.join(sums)}) with {how}"
        if is_shared:
            processes.require_same("import_table", [f'chunks of table "{table.declared.name}": {own}'])
        if arrays is None:
            return
        yield arrays


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))


def check_chunk(spec: StoreSpec, number: int, records: Any) -> dict[str, np.ndarray]:
    """Checks a chunk; returns "keys" (uint64), "rows" (as the store's or float32), "state.<name>", "statistics"."""
    table = spec.tables[number]
    what = f'import_table: table "{table.name}"'
    if not isinstance(records, Records):
        raise TypeError(f"{what}: chunks: got {type(records).__name__}, wanted jaxsok.Records.")
    fields = {name: getattr(records, name) for name in ("keys", "rows", "last_step", "frequency")}
    keys_lib.require_unmasked(what, fields)
    keys_lib.require_unmasked(f"{what}: state", records.state)
    keys = np.asarray(records.keys)
    if keys.ndim != 1:
        raise ValueError(f"{what}: keys: got shape {list(keys.shape)}, wanted [num_rows].")
    size = len(keys)
    keys = keys_lib.from_words(keys_lib.to_words(keys, what))
    if (keys == np.uint64(PADDING_KEY)).any():
        raise ValueError(f"{what}: keys: got PADDING_KEY (2**64 - 1, or int64 -1), wanted other keys: it has no row.")
    ordered = np.sort(keys)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ValueError(f"{what}: keys: got {twice[0]} more than once in a chunk, wanted distinct keys.")
    arrays = {"keys": keys, "rows": _floats(f"{what}: rows", records.rows, (size, spec.dim), spec.dtype)}
    widths = {state.name: state.dim for state in spec.state_specs}
    for name, array in records.state.items():
        if name not in widths:
            raise ValueError(
                f"{what}: state: got {name!r}, wanted names of optim.{spec.optimizer.name}, {list(widths)}; leave out "
                "what is of another optimizer: Records(keys, rows, state={})."
            )
        arrays[f"state.{name}"] = _floats(f"{what}: state {name!r}", array, (size, widths[name]), "float32")
    unusable = set(records.state) - set(spec.optimizer.usable_states(spec.dim, list(records.state)))
    if unusable:
        raise ValueError(
            f"{what}: state: got {sorted(unusable)} with {sorted(set(records.state) - unusable)} alone, wanted all of "
            f"{list(widths)}, or none: it says that the rest has begun."
        )
    given = {"last_step": records.last_step, "frequency": records.frequency}
    statistics = {name: np.asarray(words) for name, words in given.items() if words is not None}
    if len(statistics) == 1:
        raise ValueError(f"{what}: last_step, frequency: got one of them, wanted both or None.")
    for name, words in statistics.items():
        if words.dtype != np.uint32 or words.shape != (size,):
            raise ValueError(f"{what}: {name}: got {words.dtype}{list(words.shape)}, wanted uint32[{size}].")
    if spec.keeps_statistics and statistics:
        arrays["statistics"] = np.stack(list(statistics.values()), axis=1)
    return arrays


def _floats(what: str, array: Any, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Converts to a dtype, or to float32 on the way to it: the device rounds."""
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape != shape:
        raise ValueError(f"{what}: got {array.dtype}{list(array.shape)}, wanted floats{list(shape)}.")
    return array if array.dtype == jnp.dtype(dtype) else convert_to(what, array, np.dtype(np.float32))


@dataclasses.dataclass
class RecordWriter:
    """Writes records into a table, in place of what was there under the same keys."""

    op: str
    specs: Sequence[StoreSpec]
    table: TableRef
    held: Held[State]
    clock: Any
    is_reset: bool = False
    _refused: list[Array] = dataclasses.field(default_factory=list, init=False)
    _pieces: Callable[[], Iterable[dict[str, Any]]] = dataclasses.field(default=tuple, init=False)

    def write(self, pieces: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Writes what `pieces` yields, which may be called again; `settle` ends it."""
        self._refused, self._pieces = [], pieces
        for piece in pieces():
            self.held.change(functools.partial(self._enter, piece))

    def _enter(self, piece: dict[str, Any], state: State) -> State:
        s = self.table.store
        store, num_refused = enter_records(self.table, self.is_reset, state.stores[s], state.seed, self.clock, piece)
        self._refused.append(num_refused)
        return with_store(state, s, store)

    def settle(self) -> None:
        """Waits for what was written last; keys that found no entry in the index get one under another salt."""
        for _ in range(SALTS):
            if not self._has_refused():
                self._refused = []
                return
            with held_back():  # what was refused stays known until it is written
                self.held.state = enlarge.resalt_index(self.specs, self.held.state, self.table.store, self.table.shards)
                self.write(self._pieces)
        has_refused, self._refused = self._has_refused(), []
        if has_refused:
            raise TableFullError(
                f'{self.op}: table "{self.table.declared.name}": got keys without an entry in the index under {SALTS} '
                "salts, wanted one for each; declare a larger capacity, so that the index is larger."
            )

    def _has_refused(self) -> bool:
        return any(self.table.shards.read(num_refused).any() for num_refused in self._refused)


def take_padded(array: np.ndarray, lines: np.ndarray, size: int) -> np.ndarray:
    """Returns some rows of an array, and zeros up to `size` rows; keys become words, and are padded as such."""
    block = np.empty((size, *array.shape[1:]), array.dtype)
    # With this mode NumPy writes into `out` without a copy first.
    np.take(array, lines, axis=0, out=block[: len(lines)], mode="clip")
    block[len(lines) :] = PADDING_KEY if array.dtype == np.uint64 else 0
    return keys_lib.to_words(block) if array.dtype == np.uint64 else block


class _Import:
    def __init__(self, writer: RecordWriter, num_expected: int | None):
        self.writer, self.table = writer, writer.table
        self.spec, self.shards = writer.table.spec, writer.table.shards
        self.owners = np.asarray(writer.held.state.partition_owners)  # outlive the state, which is donated
        self.in_use = rows_in_use(self.spec, self.store, self.shards)
        """Rows in use of each shard, at most."""
        self.num_expected = num_expected
        """Rows that will come; None: not known, or made room for."""

    @property
    def store(self) -> StoreState:
        return self.writer.held.state.stores[self.table.store]

    @property
    def capacity(self) -> int:
        return self.store.capacity // self.spec.num_shards

    def enter(self, arrays: dict[str, np.ndarray]) -> None:
        """Enters a checked chunk, all of it or, if an error is raised, nothing."""
        if len(arrays["keys"]):
            dealt = self._deal(arrays)
            self.writer.settle()
            self._make_room(arrays, dealt)
            self.writer.write(functools.partial(self._pieces, arrays, dealt))

    def _deal(self, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
        keys, num_shards = arrays["keys"], self.spec.num_shards
        if num_shards == 1 or self.spec.is_replicated:
            return [np.arange(len(keys))] * num_shards
        owners = plan_lib.owners_of(self.spec, self.table.number, keys, self.owners)
        order = np.argsort(owners, kind="stable")
        return np.split(order, np.cumsum(np.bincount(owners, minlength=num_shards))[:-1])

    def _pieces(self, arrays: dict[str, np.ndarray], dealt: list[np.ndarray]) -> Iterable[dict[str, Any]]:
        """Yields the operands of one call after the other, as arrays that are split over the shards."""
        most = max(len(lines) for lines in dealt)
        size = min(default_chunk_rows(self.spec), max(LEAST_ROWS, rounded_capacity(most)))
        for begin in range(0, most, size):
            places = {shard: dealt[shard][begin : begin + size] for shard in self.shards.local()}
            yield {
                name: self.shards.put({shard: take_padded(array, lines, size) for shard, lines in places.items()})
                for name, array in arrays.items()
            }

    def _make_room(self, arrays: dict[str, np.ndarray], dealt: list[np.ndarray]) -> None:
        """Grows until each shard has rows for its part of a chunk, and for the records that were announced."""
        asked = np.array([len(lines) for lines in dealt])
        if (self.in_use + asked > self.capacity).any():
            self.in_use = rows_in_use(self.spec, self.store, self.shards)
        if (self.in_use + asked > self.capacity).any():
            # Many of the keys may have rows.
            pieces = self._pieces({"keys": arrays["keys"]}, dealt)
            absent = [_count_absent(self.table, self.store, piece["keys"]) for piece in pieces]
            asked = sum(self.shards.read(counts).astype(np.int64) for counts in absent)
        needed, limit = int((self.in_use + asked).max()), self.spec.most_rows
        if needed > max(limit, self.capacity):
            names = ", ".join(f'"{table.name}"' for table in self.spec.tables)
            raise TableFullError(
                f'import_table: table "{self.table.declared.name}": got a chunk of {len(arrays["keys"])} '
                f"keys with which a shard of the store of {names} would have {needed} rows, wanted at most its "
                f"max_capacity, {limit}; nothing of the chunk was entered. Raise max_capacity, or evict first."
            )
        expected = 0  # rows of a shard when all announced records have come, within its maximum
        if self.num_expected is not None:
            rows = [self.num_expected if number == self.table.number else 0 for number in range(len(self.spec.tables))]
            expected, self.num_expected = min(int(self.in_use.max()) + self.spec.rows_of_shard(rows), limit), None
        if max(needed, expected) > self.capacity:
            room = enlarge.agree_on_room([self.spec], self.shards)
            capacity = enlarge.next_capacity(self.spec, self.capacity, needed, *room)
            sizes, writer = {self.table.store: expected if expected >= needed else capacity}, self.writer
            writer.held.change(lambda state: enlarge.grow_to("import_table", writer.specs, state, sizes, self.shards))
        self.in_use = self.in_use + asked


def rows_in_use(spec: StoreSpec, store: StoreState, shards: Shards) -> np.ndarray:
    """Counts the rows in use of each shard: int64[num_shards] (waits for the device)."""
    words = shards.read(store.counters).reshape(spec.num_shards, len(COUNTERS)).astype(np.int64)
    return words[:, _WORD["num_allocated"]] - words[:, _WORD["free_end"]] + words[:, _WORD["free_begin"]]


# On the device -------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def enter_records(
    table: TableRef, is_reset: bool, store: StoreState, seed: Array, clock: Array, piece: dict[str, Array]
) -> tuple[StoreState, Array]:
    """Enters records into the store, and counts the records that each shard refused."""
    spec, shards = table.spec, table.shards

    def part(store: StoreState, seed: Array, clock: Array, piece: dict[str, Array]) -> tuple[StoreState, Array]:
        num_keys = piece["keys"].shape[0]
        states = {}
        for state in spec.state_specs:
            if f"state.{state.name}" in piece:
                states[state.name] = piece[f"state.{state.name}"]
            elif is_reset:
                states[state.name] = jnp.full((num_keys, state.dim), np.float32(state.initial_value))
        ids, statistics = table.ids(num_keys), piece.get("statistics")
        store, _, counts = table_lib.assign(
            spec, store, seed, clock, piece["keys"], ids, piece["rows"], states, statistics, is_distinct=True
        )
        # Gradients of rows as they were do not fit what is there now.
        counters = store.counters.at[_WORD["generation"]].add(jnp.uint32(1))
        return dataclasses.replace(store, counters=counters), counts[table.number, _REFUSED][None]

    args, split = (store, seed, clock, piece), shards.spec
    return shards.run(part, args, (split, P(), P(), split), (split, split))


@functools.partial(jax.jit, static_argnums=0)
def _count_absent(table: TableRef, store: StoreState, keys: Array) -> Array:
    def part(store: StoreState, keys: Array) -> Array:
        row_ids = table_lib.find(store, keys, table.ids(keys.shape[0]))
        is_absent = table_lib.is_key(keys) & (row_ids == jnp.uint32(table_lib.NO_ROW))
        return is_absent.sum(dtype=jnp.int32)[None]

    split = table.shards.spec
    return table.shards.run(part, (store, keys), (split, split), split)
