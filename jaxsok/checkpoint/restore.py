"""Restoring: saved rows into a state, each to the shard that owns its key, whatever the mesh that saved them was.

A process reads the batches that may have keys of its shards' partitions. Everything that can be told from the manifest
is checked before anything is read, and all that is read against its checksum before it is used.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxsok import admission as admission_lib
from jaxsok import grow as grow_lib
from jaxsok import policies, processes
from jaxsok.checkpoint import lineage as lineage_lib
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.files import CorruptFileError, SavedFile, TableForm, name_word
from jaxsok.checkpoint.place import Held, Placer
from jaxsok.checkpoint.save import admission_of, time_of
from jaxsok.collection import Collection
from jaxsok.plan import owners_of as owners_of_keys
from jaxsok.plan import partitions_of
from jaxsok.records import Records
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec, TableSpec
from jaxsok.store import State, StoreState
from jaxsok.types import COUNTERS, NUM_PARTITIONS, TableFullError

LOG = logging.getLogger("jaxsok.checkpoint")
OptimizerState = Literal["require", "matching", "initial"]
OPTIMIZER_STATES: tuple[str, ...] = ("require", "matching", "initial")


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of saved tables, and its manifest."""

    op: str
    folder: Any
    manifest: dict[str, Any]

    @classmethod
    def of(cls, op: str, folder: Any) -> "Source":
        """Reads the manifest."""
        return cls(op, folder, manifest_lib.read(op, folder))

    def form(self, table: str) -> TableForm:
        """Of a saved table."""
        return TableForm.from_json(self.manifest["tables"][table]["form"])

    def files(self, table: str, kind: str = manifest_lib.ROWS) -> list[SavedFile]:
        """Of a saved table."""
        return manifest_lib.table_files(self.op, self.folder, self.manifest, table, kind)

    def records(self, table: str, wanted: np.ndarray | None = None) -> Iterator[Records]:
        """The rows of a table with keys of wanted partitions, batch by batch.

        Args:
          table: its name.
          wanted: bool[4096]; None: all.
        """
        form, word = self.form(table), name_word(table)
        for file in self.files(table):
            for batch in file.batches(wanted):
                records = form.from_batch(batch)
                if wanted is not None:
                    is_wanted = wanted[partitions_of(records.keys, word).astype(np.int64)]
                    records = records if is_wanted.all() else records.take(is_wanted)
                yield records

    def waiting(self, table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys of a table that wait for a row, and how often they were seen."""
        for file in self.files(table, manifest_lib.WAITING):
            for batch in file.batches():
                yield tuple(batch.column(name).to_numpy(zero_copy_only=False) for name in ("key", "count"))

    def check(self, tables: Sequence[str]) -> None:
        """Refuses some tables, if a file is not there or of another size, or counts of the manifest do not agree.

        Raises:
          CorruptFileError: names the file, or the table.
        """
        for table in tables:
            for kind in (manifest_lib.ROWS, manifest_lib.WAITING, manifest_lib.TOMBSTONES):
                for file in self.files(table, kind):
                    file.check_size()
            entry = self.manifest["tables"][table]
            files = sum(sum(batch[3] for batch in file["batches"]) for file in entry[manifest_lib.ROWS])
            partitions = int(manifest_lib.unpacked(entry["partition_rows"]).sum())
            if not files == partitions == entry["num_rows"]:
                raise CorruptFileError(
                    f'{self.op}: table "{table}": got {files} rows in the files and {partitions} in the partitions of '
                    f'"{self.folder}", wanted {entry["num_rows"]} of both; manifests of other saves were mixed.'
                )
        for file, _ in self._bloom_files({self.store_of(table)[0] for table in tables}):
            file.check_size()

    def verify(self, tables: Sequence[str]) -> None:
        """Reads all files of some tables against their checksums."""
        self.check(tables)
        for table in tables:
            for kind in (manifest_lib.ROWS, manifest_lib.WAITING, manifest_lib.TOMBSTONES):
                for file in self.files(table, kind):
                    file.verify()
        for file, pieces in self._bloom_files({self.store_of(table)[0] for table in tables}):
            for _ in file.ranges(piece[:3] for piece in pieces):
                pass  # nothing of it is kept

    def _bloom_files(self, stores: set[int]) -> Iterator[tuple[SavedFile, list[list[int]]]]:
        """The files of the Bloom filters of some stores, and the pieces of each."""
        for entry in self.manifest["bloom"]:
            if entry["store"] in stores:
                yield SavedFile(self.op, self.folder, entry, None), entry["pieces"]

    def bloom(self, store: int, shard: int) -> np.ndarray:
        """The words of a shard's Bloom filter, as they were saved."""
        parts = []
        for file, pieces in self._bloom_files({store}):
            mine = [piece[:3] for piece in pieces if piece[3] == shard]
            parts += [np.frombuffer(data, "<u4").astype(np.uint32) for data in file.ranges(mine)]
        return np.concatenate(parts)

    def store_of(self, table: str) -> tuple[int, dict[str, Any]]:
        """The number of the store that a table was saved from, and what the manifest says of it."""
        return next((s, store) for s, store in enumerate(self.manifest["stores"]) if table in store["tables"])


# Before anything is read ---------------------------------------------------------------------------------------------


def chosen_tables(source: Source, collection: Collection, tables: Sequence[str] | None) -> list[str]:
    """The names of the tables to restore.

    Raises:
      ValueError: names differ, and none were chosen; or a chosen one is missing.
    """
    op, saved = source.op, list(source.manifest["tables"])
    declared = [table.name for table in collection.tables]
    if tables is None:
        if set(saved) != set(declared):
            raise ValueError(
                f'{op}: path: got "{source.folder}" with tables {sorted(saved)}, wanted those of the collection, '
                f"{sorted(declared)}; pass tables=[...] to restore some of them."
            )
        return declared
    if isinstance(tables, str):
        raise TypeError(f"{op}: tables: got {tables!r}, wanted a list of names.")
    for name in tables:
        if name not in declared:
            raise ValueError(f'{op}: tables: got "{name}", wanted some of {declared}, the tables of the collection.')
        if name not in saved:
            raise ValueError(f'{op}: tables: got "{name}", wanted some of {saved}, the tables in "{source.folder}".')
    return list(tables)


def check_forms(
    source: Source, collection: Collection, names: Sequence[str], optimizer_state: OptimizerState
) -> dict[str, tuple[str, ...]]:
    """Refuses tables that do not fit; the pieces of optimizer state to restore, by table.

    Raises:
      ValueError: another dim, or optimizer state of another form that nobody said to leave; names the table.
    """
    op = source.op
    if optimizer_state not in OPTIMIZER_STATES:
        raise ValueError(f"{op}: optimizer_state: got {optimizer_state!r}, wanted one of {list(OPTIMIZER_STATES)}.")
    taken: dict[str, tuple[str, ...]] = {}
    for name in names:
        s, number = collection._locate(op, name)
        spec, form = collection.stores[s], source.form(name)
        table = spec.tables[number]
        wanted = TableForm.of(spec, table)
        if form.dim != wanted.dim:
            raise ValueError(f'{op}: table "{name}": dim: got {form.dim} in "{source.folder}", wanted {wanted.dim}.')
        saved, declared = ({one: dim for one, dim, _ in states} for states in (form.states, wanted.states))
        if optimizer_state == "require" and (form.state_form, saved) != (wanted.state_form, declared):
            raise ValueError(
                f'{op}: table "{name}": optimizer: got state of optim.{form.optimizer} ({form.state_form}: {saved}) in '
                f'"{source.folder}", wanted that of optim.{wanted.optimizer} ({wanted.state_form}: {declared}); pass '
                'optimizer_state="initial" to restore the rows alone, or "matching" to restore the state of equal name '
                "and dim."
            )
        if optimizer_state == "require":
            _check_globals(source, collection, name)
        taken[name] = tuple(one for one in declared if optimizer_state != "initial" and saved.get(one) == declared[one])
        if form.dtype != wanted.dtype:
            LOG.warning('%s: table "%s": rows of %s become %s, rounded to nearest.', op, name, form.dtype, wanted.dtype)
    return taken


def _check_globals(source: Source, collection: Collection, name: str) -> None:
    """Refuses optimizer state of no row that has another form; tables of one store must have been saved with one."""
    s, _ = collection._locate(source.op, name)
    spec = collection.stores[s]
    wanted = [(str(leaf.dtype), list(leaf.shape)) for leaf in map(np.asarray, spec.optimizer.init_globals(spec.dim))]
    saved = [(leaf["dtype"], leaf["shape"]) for leaf in source.store_of(name)[1]["globals"]]
    if saved != wanted:
        raise ValueError(
            f'{source.op}: table "{name}": optimizer: got state of no row {saved} in '
            f'"{source.folder}", wanted {wanted}; pass optimizer_state="initial" to begin it anew.'
        )


def rows_by_shard(source: Source, collection: Collection, name: str) -> np.ndarray:
    """The saved rows of a table that each shard gets: int64[num_shards]."""
    s, number = collection._locate(source.op, name)
    spec = collection.stores[s]
    rows = manifest_lib.unpacked(source.manifest["tables"][name]["partition_rows"])
    return _by_shard(collection, spec, spec.tables[number], rows)


def keys_by_shard(collection: Collection, spec: StoreSpec, table: TableSpec, keys: np.ndarray) -> np.ndarray:
    """How many of some keys of a table belong to each shard: int64[num_shards]."""
    rows = np.bincount(partitions_of(keys, name_word(table.name)).astype(np.int64), minlength=NUM_PARTITIONS)
    return _by_shard(collection, spec, table, rows)


def _by_shard(collection: Collection, spec: StoreSpec, table: TableSpec, rows: np.ndarray) -> np.ndarray:
    """Of numbers by partition."""
    if spec.is_replicated:
        return np.full(spec.num_shards, rows.sum(), np.int64)
    counts = np.zeros(spec.num_shards, np.int64)
    np.add.at(counts, owners_of(collection, spec, table), rows.astype(np.int64))
    return counts


def owners_of(collection: Collection, spec: StoreSpec, table: TableSpec) -> np.ndarray:
    """The shard of each partition of a table: int64[4096]."""
    if spec.num_shards == 1 or table.placement.kind == "on":
        return np.full(NUM_PARTITIONS, table.placement.shard if spec.num_shards > 1 else 0, np.int64)
    return np.asarray(collection.partition_owners, np.int64)


def local_shards(collection: Collection) -> list[int]:
    """The shards of this process."""
    return [0] if collection.shards is None else collection.shards.local()


def local_parts(array: Any, spec: StoreSpec) -> dict[int, Any]:
    """The parts of a split array that this process has, by shard."""
    size = array.shape[0] // spec.num_shards
    parts = {(part.index[0].start or 0) // size: part.data for part in array.addressable_shards}
    return {shard: parts[shard] for shard in sorted(parts)}


# Into a state --------------------------------------------------------------------------------------------------------


def restored(
    source: Source,
    collection: Collection,
    state: State | None = None,
    tables: Sequence[str] | None = None,
    optimizer_state: OptimizerState = "require",
    clock: Any = None,
) -> State:
    """Restores tables into a new state, or into one that there is, whose rows of these tables go.

    Args:
      source: what was saved.
      collection: of any mesh, capacities and optimizers.
      state: donated; None: a new one, with step and seed of the save. One that is given keeps its own.
      tables: names; None: all, and there must be no others.
      optimizer_state: "require", "matching" or "initial".
      clock: now, for a given state whose lookups are told one; None: its step. Rows that come into a given state
        count as used now, or the next delta would not see that they changed.

    Raises:
      ValueError: tables do not fit.
      CorruptFileError: files are damaged. A given state is unchanged.
      TableFullError, MemoryError: there is no room. A given state is unchanged.
      Exception: what else fails, when a given state is changed already, has what there is of it as `state`.
    """
    op = source.op
    is_new = state is None
    with processes.together(op):
        names = chosen_tables(source, collection, tables)
        taken = check_forms(source, collection, names, optimizer_state)
        source.check(names)
        now = None if state is None else time_of(op, state, clock)
        if state is not None:
            collection._check_state(op, state)
            # What is in the state would be gone when a damaged batch is met.
            source.verify(names)
    if state is None:
        seed = source.manifest["seed"]
        state = collection.init(seed=seed[0] | seed[1] << 32)
        state = _with_store_words(source, collection, state)
    rows = {name: rows_by_shard(source, collection, name) for name in names}
    if not is_new:
        rows = {name: coming - _table_rows(collection, state, name) for name, coming in rows.items()}
    with held_on(collection, state, names, is_new=is_new) as held:
        # Before anything goes: a refusal changes nothing.
        held.state = with_room(source, collection, state, rows)
        for name in () if is_new else names:
            held.state, _ = collection.clear(held.state, name)
        for name in names:
            place(source, collection, held, name, taken[name], now)
        add_small_parts(source, collection, held, names, is_whole=is_new, optimizer_state=optimizer_state)
    return held.state


@contextlib.contextmanager
def held_on(
    collection: Collection, state: State | None, names: Sequence[str], *, is_new: bool = False
) -> Iterator[Held]:
    """Around what donates a state bit by bit: an error gives the caller what there is, if that is another one by then.

    Args:
      collection: of the state.
      state: as it is before.
      names: of the tables that change.
      is_new: whether nobody else has the state, and nobody misses it.
    """
    held = Held(state)  # pyright: ignore[reportArgumentType]  # None until there is one
    try:
        yield held
    except BaseException as error:  # Ctrl-C too must not lose a state that was donated
        if not is_new and held.state is not state:
            error.add_note(
                f"The state was donated, and is changed: tables {list(names)} have part of what was to come. What "
                "there is now is the `state` attribute of this error; restore these tables into it again."
            )
            error.state = held.state  # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        collection.growth.forget()  # its bound on the rows in use holds for steps alone


def add_small_parts(
    source: Source,
    collection: Collection,
    held: Held,
    names: Sequence[str],
    *,
    is_whole: bool,
    optimizer_state: OptimizerState,
) -> None:
    """Adds what is saved beside rows.

    Args:
      source: what was saved.
      collection: of the state.
      held: a state whose rows are restored.
      names: of the tables that are.
      is_whole: whether the state is what was saved, and has its step.
      optimizer_state: as the rows were restored.
    """
    _add_admission(source, collection, held, names)
    if is_whole:
        state, step = held.state, jnp.asarray(source.manifest["step"], jnp.uint32)
        if collection.shards is not None:
            step = jax.device_put(step, state.step.sharding)
        state = dataclasses.replace(state, step=step)
        state = _with_evicted(source, collection, state, names)
        if optimizer_state != "initial":
            state = _with_globals(source, collection, state, names)
        is_exact = optimizer_state == "require"
        held.state = lineage_lib.begun(collection, state, source.manifest, is_exact=is_exact)


def with_room(source: Source, collection: Collection, state: State, rows: Mapping[str, np.ndarray]) -> State:
    """The state, with capacity for the rows that are to come.

    Args:
      source: named in errors.
      collection: of the state.
      state: donated.
      rows: of each table, that each shard gets, less those that it loses before: int64[num_shards].

    Raises:
      TableFullError: a store's `max_capacity` is below that.
    """
    capacities = {}
    for s, spec in enumerate(collection.stores):
        coming = sum((rows[one.name] for one in spec.tables if one.name in rows), np.zeros(spec.num_shards, np.int64))
        if not coming.any():
            continue
        needed = int((_rows_in_use(collection, spec, state.stores[s]) + coming).max())
        if spec.max_capacity is not None and needed > spec.max_capacity:
            raise TableFullError(
                f"{source.op}: store of tables {[table.name for table in spec.tables]}: max_capacity: got "
                f"{spec.max_capacity} rows for a shard, wanted {needed} for what was saved; raise it."
            )
        if needed > state.stores[s].capacity // spec.num_shards:
            capacities[s] = needed
    return grow_lib.grow_to(source.op, collection.stores, state, capacities, collection.shards)


def _table_rows(collection: Collection, state: State, name: str) -> np.ndarray:
    """Rows of a table, of each shard: int64[num_shards]; waits for the device."""
    s, number = collection._locate("restore", name)
    spec, shards, words = collection.stores[s], collection.shards, state.stores[s].table_rows
    is_spread = shards is not None and shards.num_processes > 1
    words = np.asarray(shards.gathered(words) if is_spread else words)
    return words.reshape(spec.num_shards, len(spec.tables))[:, number].astype(np.int64)


def _rows_in_use(collection: Collection, spec: StoreSpec, store: StoreState) -> np.ndarray:
    """Of each shard: int64[num_shards]; waits for the device."""
    shards = collection.shards
    is_spread = shards is not None and shards.num_processes > 1
    words = np.asarray(shards.gathered(store.counters) if is_spread else store.counters)
    words = words.reshape(spec.num_shards, len(COUNTERS)).astype(np.int64)
    allocated, begin, end = (words[:, COUNTERS.index(name)] for name in ("num_allocated", "free_begin", "free_end"))
    return allocated - (end - begin)


def place(source: Source, collection: Collection, held: Held, name: str, taken: Sequence[str], now: int | None) -> None:
    """Places the saved rows of a table; a key that has a row gets the saved one.

    `now`: the earliest last step that the rows get; None: they keep the saved one.
    """
    op = source.op
    s, number = collection._locate(op, name)
    spec = collection.stores[s]
    table = spec.tables[number]
    owners = owners_of(collection, spec, table)
    fitted = _fitter(source, spec, table, taken, now)

    def of_shard(shard: int) -> Iterator[Records]:
        wanted = None if spec.is_replicated or (owners == shard).all() else owners == shard
        if wanted is None or wanted.any():
            yield from map(fitted, source.records(name, wanted))

    num_placed = Placer(op, collection, s, number).place(held, of_shard)
    saved = source.manifest["tables"][name]["num_rows"]
    with processes.together(op):
        if num_placed != saved:
            raise CorruptFileError(
                f'{op}: table "{name}": got {num_placed} rows in "{source.folder}", wanted {saved}; files of other '
                "saves were mixed."
            )


def _fitter(
    source: Source, spec: StoreSpec, table: TableSpec, taken: Sequence[str], now: int | None
) -> Callable[[Records], Records]:
    """Makes saved rows those of the table: in its dtype, with its optimizer state and statistics."""
    clock = np.uint32(source.manifest["clock"])
    dtype = np.dtype(ml_dtypes.bfloat16) if table.dtype == "bfloat16" else np.dtype(table.dtype)

    def fitted(records: Records) -> Records:
        rows, num_rows = records.rows, records.num_rows
        if rows.dtype != dtype:
            wide = rows.astype(np.float32)
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            rows = np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)
        state = {
            one.name: records.state[one.name]
            if one.name in taken
            else np.full((num_rows, one.dim), one.initial_value, np.float32)
            for one in spec.state_specs
        }
        last_step, frequency = records.last_step, records.frequency
        if spec.keeps_statistics and last_step is None:
            # Unknown: as if used when they were saved, so that none of them is the first to leave.
            last_step, frequency = np.full(num_rows, clock), np.zeros(num_rows, np.uint32)
        if now is not None and last_step is not None:
            last_step = np.maximum(last_step, np.uint32(now))
        return Records(records.keys, rows, state, last_step, frequency)

    return fitted


# What is small -------------------------------------------------------------------------------------------------------


def _put(collection: Collection, blocks: Callable[[int], np.ndarray]) -> Any:
    """An array of a store, made anew, of each shard's block."""
    if collection.shards is None:
        return jnp.asarray(blocks(0))
    return collection.shards.put({shard: blocks(shard) for shard in local_shards(collection)})


def _with_store(state: State, s: int, **arrays: Any) -> State:
    store = dataclasses.replace(state.stores[s], **arrays)
    return dataclasses.replace(state, stores=(*state.stores[:s], store, *state.stores[s + 1 :]))


def _with_store_words(source: Source, collection: Collection, state: State) -> State:
    """Salts and generations as they were, where the same tables share a store; the index must be empty."""
    for s, spec in enumerate(collection.stores):
        names = [table.name for table in spec.tables]
        saved = next((one for one in source.manifest["stores"] if one["tables"] == names), None)
        if saved is None:
            continue
        words = np.zeros(len(COUNTERS), np.uint32)
        words[[COUNTERS.index(name) for name in ("salt_low", "salt_high")]] = saved["salt"]
        words[COUNTERS.index("generation")] = saved["generation"]
        state = _with_store(state, s, counters=_put(collection, lambda _, words=words: words.copy()))
    return state


def _with_globals(source: Source, collection: Collection, state: State, names: Sequence[str]) -> State:
    """Optimizer state that belongs to no row, of the store that the first restored table of each store was in."""
    for s, spec in enumerate(collection.stores):
        name = next((table.name for table in spec.tables if table.name in names), None)
        leaves = state.stores[s].globals_
        if name is None or not leaves:
            continue
        saved = [manifest_lib.array_from_json(one) for one in source.store_of(name)[1]["globals"]]
        if [(one.shape, one.dtype) for one in saved] != [(leaf.shape[1:], leaf.dtype) for leaf in leaves]:
            continue  # of another optimizer, which "matching" lets pass
        put = tuple(_put(collection, lambda _, one=one: one[None]) for one in saved)
        state = _with_store(state, s, globals_=put)
    return state


def _with_evicted(source: Source, collection: Collection, state: State, names: Sequence[str]) -> State:
    """Counts of evicted rows, on the first shard (of replicated stores: on all)."""
    for s, spec in enumerate(collection.stores):
        if not state.stores[s].table_evicted:
            continue
        tables = source.manifest["tables"]
        counts = np.array(
            [tables[one.name]["num_evicted"] if one.name in names else 0 for one in spec.tables], np.uint64
        ).astype(np.uint32)
        none = np.zeros_like(counts)

        def block(shard: int, spec: Any = spec, counts: Any = counts, none: Any = none) -> np.ndarray:
            return (counts if shard == 0 or spec.is_replicated else none).copy()

        state = _with_store(state, s, table_evicted=(_put(collection, block),))
    return state


# Admission -----------------------------------------------------------------------------------------------------------

WAITING_AT_A_TIME = 1 << 22  # keys that wait for a row: 64 MiB on the host


def _add_admission(source: Source, collection: Collection, held: Held, names: Sequence[str]) -> None:
    """Keys that wait for a row, and Bloom filters, as they were saved."""
    for name in names:
        s, number = collection._locate(source.op, name)
        table = collection.stores[s].tables[number]
        was, now = source.manifest["tables"][name]["admission"], admission_of(collection.stores[s], table)
        if was and now and was["by"] != now["by"]:
            LOG.warning(
                '%s: table "%s": admission by %s was saved, wanted by %s: keys without a row are counted from 0.',
                source.op,
                name,
                was["by"],
                now["by"],
            )
        if isinstance(table.admission, policies.AdmitByCount):
            _add_waiting(source, collection, held, s, number)
        if isinstance(table.admission, policies.AdmitByBloom):
            with processes.together(source.op):
                held.state = _with_bloom(source, collection, held.state, s, number)


def _add_waiting(source: Source, collection: Collection, held: Held, s: int, number: int) -> None:
    """Each key to its owner, in place of those that waited."""
    spec, shards = collection.stores[s], collection.shards

    def hold(store: StoreState) -> None:
        stores = held.state.stores
        held.state = dataclasses.replace(held.state, stores=(*stores[:s], store, *stores[s + 1 :]))

    hold(_forgotten(spec, number, shards, held.state.stores[s]))
    for keys, counts in processes.in_step(source.op, _gathered(source.waiting(spec.tables[number].name))):
        # Who was seen often enough for a lower threshold waits for one more sight.
        counts = np.minimum(counts, np.uint32(spec.tables[number].admission.num_sightings - 1))
        owners = owners_of_keys(spec, number, keys, collection.partition_owners)
        hold(admission_lib.with_waiting(spec, held.state.stores[s], number, keys, counts, owners, shards))


def _forgotten(spec: StoreSpec, number: int, shards: Shards | None, store: StoreState) -> StoreState:
    """The store, without keys of a table that wait."""

    def part(store: StoreState) -> StoreState:
        return admission_lib.forget(spec, store, jnp.zeros((), jnp.uint32), cleared=number)

    if shards is None:
        return jax.jit(part, donate_argnums=0)(store)
    return jax.jit(lambda store: shards.run(part, (store,), (shards.spec,), shards.spec), donate_argnums=0)(store)


def _gathered(batches: Iterator[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches, put together to large ones: each costs a pass over all that wait."""
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        parts.append(batch)
        if sum(keys.size for keys, _ in parts) >= WAITING_AT_A_TIME:
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))
            parts = []
    if parts:
        yield tuple(map(np.concatenate, zip(*parts, strict=True)))


def _with_bloom(source: Source, collection: Collection, state: State, s: int, number: int) -> State:
    """The table's part of the filter, where the shards are the same: it has no keys to deal it out by."""
    spec = collection.stores[s]
    table = spec.tables[number]
    begin, size = spec.bloom_segments()[number]
    saved_s, saved = source.store_of(table.name)
    old_begin, old_size = saved["bloom_segments"][saved["tables"].index(table.name)]
    was = source.manifest["tables"][table.name]["admission"]
    is_same = was == admission_of(spec, table) and old_size == size
    if not is_same and old_size:
        LOG.warning(
            '%s: table "%s": its Bloom filter begins anew: %s was saved, wanted %s, and counters without keys '
            "cannot be dealt to other shards. Keys without a row are counted from 0.",
            source.op,
            table.name,
            was,
            admission_of(spec, table),
        )
    (bloom,) = state.stores[s].bloom
    blocks = {}
    for shard, part in local_parts(bloom, spec).items():
        counters = np.array(part).view(np.uint8)
        counters[begin : begin + size] = 0
        if is_same:
            words = source.bloom(saved_s, 0 if spec.is_replicated else shard)
            counters[begin : begin + size] = words.view(np.uint8)[old_begin : old_begin + old_size]
        blocks[shard] = counters.view(np.uint32)
    return _with_store(state, s, bloom=(_put(collection, blocks.__getitem__),))
