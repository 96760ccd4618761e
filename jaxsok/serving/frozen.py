"""Frozen tables: rows and an index to read them by, without the other arrays of training.

Tables of one dim and dtype share a store; one call looks up all stores (fused.py). Frozen tables are an immutable
pytree: a reader that holds it reads one version.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped, UInt8, UInt32

from jaxsok import checks, initializers, optimizers, plan
from jaxsok.collection import Collection
from jaxsok.host_slabs import bytes_of, new_host_rows
from jaxsok.interchange.files import RecordChunks
from jaxsok.kernels import table as kernels
from jaxsok.kernels.lookup import QUANTIZED_DTYPES
from jaxsok.keys import to_words
from jaxsok.operations import check_placed
from jaxsok.records import Records, hottest_rows, round_to
from jaxsok.serving import quantize
from jaxsok.serving.devices import device_or_default
from jaxsok.serving.errors import ServingError, require_table
from jaxsok.serving.padding import fill_up, padded_size
from jaxsok.serving.row_map import RowMap, buckets_of
from jaxsok.shards import without_mesh
from jaxsok.specs import StoreSpec, TableSpec
from jaxsok.store import State
from jaxsok.types import BUCKET_WORDS, COUNTERS, MAX_DIM, NO_ROW, ROW_DTYPES

FrozenDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]

DTYPES: tuple[str, ...] = (*ROW_DTYPES, *QUANTIZED_DTYPES)
# The seed of all lookups: tables of other seeds have other names in their words. Zeros, or 0 and 1, XLA would fill in
# by a kernel of its own.
SEED: np.ndarray = np.array([2, 1], np.uint32)
_LEAST_ROWS = 1024  # in a write, padded to a power of two, so that programs are few


@dataclasses.dataclass(frozen=True)
class FrozenTable:
    """A table as it is served.

    Raises:
      TypeError, ValueError: when declared; names the table and the argument.

    Example:
      >>> FrozenTable("user", dim=128, default=0.0, dtype="int8").row_bytes
      132
    """

    name: str
    dim: int
    """Numbers in a row: 1 to 1024."""
    default: float = checks.declare(0.0, checks.number, low=-checks.LARGEST_FLOAT32, high=checks.LARGEST_FLOAT32)
    """The number that a missing key reads, in every column."""
    dtype: FrozenDtype = checks.declare("float32", checks.one_of, choices=DTYPES)
    """The dtype of stored rows; embeddings are float32."""
    initial: initializers.InitialRows | None = None
    """The row of such a key in training, read in place of `default`. Rounded to rows of 16 bits, not of 8."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"FrozenTable: name: got {self.name!r}, wanted a name.")
        what = f'FrozenTable "{self.name}"'
        checks.field(self, what, "dim", checks.integer, 1, MAX_DIM, f"1 to {MAX_DIM}", "an integer")
        checks.check_fields(self, what)
        if self.initial is not None and not isinstance(self.initial, initializers.InitialRows):
            raise TypeError(f"{what}: initial: got {self.initial!r}, wanted InitialRows or None.")
        if self.initial is not None and self.default != 0.0:
            raise ValueError(f"{what}: default: got {self.default} with initial rows, wanted one of the two.")

    @property
    def is_quantized(self) -> bool:
        """True if each row has a scale."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def missing(self) -> str:
        """Text for reports: what a key without a row reads."""
        return f"default {self.default:g}" if self.initial is None else str(self.initial)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its scale."""
        return self.dim * jnp.dtype(self.dtype).itemsize + (4 if self.is_quantized else 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenStore:
    """The arrays of the tables of one dim and dtype."""

    index: UInt32[Array, "num_buckets 16"]
    """The map (table, key) → row id, as in training (`StoreState.index`), but fuller."""
    counters: UInt32[Array, " num_counters"]
    """The counters of the store, of which a lookup reads the salt."""
    rows: Shaped[Array, "num_device_rows dim"]
    scales: tuple[Float32[Array, " capacity"], ...] = ()
    """One array where rows are quantized: a row is its numbers times its scale."""
    host_rows: tuple[UInt8[Array, "num_host_rows row_bytes"], ...] = ()
    """One array, if some rows lie in host memory: the bytes of those whose row ids are beyond `rows`."""

    @property
    def capacity(self) -> int:
        """The rows there is room for."""
        return self.rows.shape[0] + sum(part.shape[0] for part in self.host_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self)) - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the device reads."""
        return sum(part.nbytes for part in self.host_rows)


@dataclasses.dataclass(frozen=True)
class FrozenSpec:
    """The tables by store."""

    stores: tuple[tuple[FrozenTable, ...], ...]

    def __post_init__(self) -> None:
        names = [table.name for table in itertools.chain(*self.stores)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'FrozenTables: tables: got "{name}" more than once, wanted distinct names.')

    @classmethod
    def of(cls, tables: Sequence[FrozenTable]) -> "FrozenSpec":
        """Groups tables of one dim and dtype into stores, in the order of their first table."""
        groups: dict[tuple, list[FrozenTable]] = {}
        for table in tables:
            groups.setdefault((table.dim, table.dtype), []).append(table)
        return cls(tuple(map(tuple, groups.values())))

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """The store of each table, and its number there."""
        return {table.name: (s, number) for s, store in enumerate(self.stores) for number, table in enumerate(store)}

    @functools.cached_property
    def words(self) -> tuple[np.ndarray, ...]:
        """The operand of kernels with the tables of each store (`StoreSpec.table_words`)."""
        return tuple(map(_table_words, self.stores))

    def place_of(self, op: str, table: Any, where: str = "") -> tuple[int, int]:
        """Returns a place of `places`. UnknownTableError: there is none; `where` says whose tables these are."""
        require_table(op, table, self.places, where)
        return self.places[table]

    def read_by(self, table: str, words: Any) -> Any:
        """Gives back the keys of a lookup; an export records them here."""
        del table
        return words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenTables:
    """Tables as they are served: an immutable pytree of arrays. Made by `freeze` and `freeze_records`."""

    stores: tuple[FrozenStore, ...]
    spec: FrozenSpec = dataclasses.field(metadata={"static": True})

    @property
    def tables(self) -> dict[str, FrozenTable]:
        """The tables by name, in the order of the stores."""
        return {table.name: table for table in itertools.chain(*self.spec.stores)}

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(store.num_bytes for store in self.stores)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the device reads."""
        return sum(store.host_bytes for store in self.stores)


def require_tables(op: str, tables: Any, *, on_device: bool = False) -> None:
    if not isinstance(tables, FrozenTables):
        raise TypeError(f"{op}: tables: got {type(tables).__name__}, wanted FrozenTables, as freeze gives them.")
    if on_device and any(store.host_rows for store in tables.stores):
        raise ValueError(
            f"{op}: tables: got some with rows in host memory, wanted all rows on the device; freeze them without a "
            "device_share."
        )


class RecordSource(Protocol):
    """Rows of one table, streamed, as `RecordChunks` and `SizedRecords`."""

    @property
    def num_rows(self) -> int:
        """The number of rows, or more."""
        ...

    def __iter__(self) -> Iterator[Records]: ...


@dataclasses.dataclass(frozen=True)
class SizedRecords:
    """Chunks of records whose number of rows is known."""

    num_rows: int
    chunks: Iterable[Records]

    def __iter__(self) -> Iterator[Records]:
        return iter(self.chunks)


def freeze(
    collection: Collection,
    state: State,
    *,
    tables: Sequence[str] | None = None,
    dtype: FrozenDtype | Mapping[str, FrozenDtype] | None = None,
    defaults: float | Mapping[str, float] | None = None,
    spare_rows: int = 0,
    device_share: float = 1.0,
    device: Any = None,
) -> FrozenTables:
    """Freezes tables of a training state: their rows and a denser index, without optimizer state and statistics.

    Args:
      collection: that made the state, on any mesh of one process.
      state: not donated.
      tables: names; None: all.
      dtype: of the rows, for all tables or by name; None, or a table that is not named: as they are trained.
      defaults: what keys without a row read in every column, for all tables or by name; None, or a table that is not
        named: what `Collection.find` gives by the table's `unknown`.
      spare_rows: rows of each table that later updates may add in place.
      device_share: the share of each table's rows that lie on the device: those used most, where the table counts uses,
        else the first. The others lie in host memory, pinned on a GPU, and lookups read them over the link.
      device: where they go; None: the default one.

    Raises:
      MemoryError: the host has no room.
      ValueError: a mesh over several processes, an unknown table or dtype, rows to be quantized that are not finite,
        or no default for a table whose initial rows XLA computes (`initializers.matrix` and `function`).

    Cost:
      Each row crosses to the host and back once, in chunks of 64 MiB; with a `device_share` below 1 to the host twice.
      On the device: `frozen_bytes`.

    Example:
      >>> import jaxsok
      >>> specs = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(specs, [jaxsok.FeatureSpec("item", table="item")])
      >>> batch = collection.batch({"item": np.array([7, 9, 7])})
      >>> _, state, _ = collection.lookup(collection.init(seed=0), batch.features)
      >>> print(freeze(collection, state).tables["item"].missing)
      the initial row: uniform(-0.05, 0.05) of table "item", seed 0
    """
    if collection.shards.num_processes > 1:
        raise ValueError(
            f"freeze: collection: got a mesh over {collection.shards.num_processes} processes, wanted one process, "
            "which has all rows; export with jaxsok.checkpoint, and serve the folder."
        )
    check_placed("freeze", collection, state)
    specs = {table.name: table for table in collection.tables}
    names = list(specs) if tables is None else list(tables)
    for argument, given in (("tables", names), ("dtype", dtype), ("defaults", defaults)):
        for name in given if isinstance(given, (list, Mapping)) else ():
            if name not in specs:
                raise ValueError(f'freeze: {argument}: got "{name}", wanted one of {list(specs)}.')
    num_rows = collection.num_rows(state)
    seed = int.from_bytes(np.asarray(state.seed, "<u4").tobytes(), "little")
    sources = []
    for name in names:
        default = defaults.get(name) if isinstance(defaults, Mapping) else defaults
        default = specs[name].unknown_reads(seed) if default is None else default
        if isinstance(default, initializers.Initializer):
            got = f'none for table "{name}", in which a key without a row reads {default!r}, which served tables cannot'
            wanted = f'pass defaults={{"{name}": 0.0}}, or another number, to state what they serve'
            raise ValueError(f"freeze: defaults: got {got} work out; {wanted}.")
        stored = (dtype.get(name) if isinstance(dtype, Mapping) else dtype) or specs[name].dtype
        table = table_that_reads(name, specs[name].dim, stored, default)
        export = functools.partial(collection.export_chunks, state, name, with_state=False)
        sources.append((table, RecordChunks(num_rows[name], table.dim, {}, export)))
    return freeze_records(sources, spare_rows=spare_rows, device_share=device_share, device=device)[0]


def table_that_reads(name: str, dim: int, dtype: Any, absent: float | initializers.InitialRows) -> FrozenTable:
    if isinstance(absent, initializers.InitialRows):
        return FrozenTable(name, dim, dtype=dtype, initial=absent)
    return FrozenTable(name, dim, absent, dtype)


@without_mesh
def freeze_records(
    sources: Sequence[tuple[FrozenTable, RecordSource]],
    *,
    spare_rows: int = 0,
    device_share: float = 1.0,
    device: Any = None,
) -> tuple[FrozenTables, tuple[RowMap, ...]]:
    """Makes frozen tables of streams of records; gives the tables, and the map of each store's rows, for updates.

    `spare_rows` of each table are for later updates in place. With a `device_share` below 1 (see `freeze`) streams are
    read twice, first for the keys that are used most. `device` None is the default one.

    Raises:
      MemoryError: the host has no room for the rows that do not lie on the device.
      ValueError: no tables, two of one name, a share outside of 0 to 1, or records that do not fit theirs.

    Cost:
      Host: a chunk of records, the maps, and rows that do not lie on the device. Device: `frozen_bytes`.

    Example:
      >>> records = Records(np.array([7, 9], np.uint64), np.ones((2, 4), np.float32))
      >>> tables, _ = freeze_records([(FrozenTable("item", dim=4), SizedRecords(2, [records]))])
      >>> tables.stores[0].rows.shape
      (2, 4)
    """
    if not sources:
        raise ValueError("freeze_records: sources: got no tables, wanted at least one.")
    checks.integer("freeze_records: spare_rows", spare_rows, 0, wanted="a number of rows, from 0")
    checks.number("freeze_records: device_share", device_share, 0, 1)
    spec = FrozenSpec.of([table for table, _ in sources])
    of_table = {table.name: source for table, source in sources}
    device = device_or_default(device)
    stores, maps = [], []
    for tables in spec.stores:
        capacity = max(1, sum(of_table[table.name].num_rows + spare_rows for table in tables))
        shares = [rows_on_device(of_table[table.name].num_rows, device_share) for table in tables]
        num_on_device = max(1, sum(shares)) if device_share < 1 else capacity
        store = _empty_store(tables[0], num_on_device, capacity - num_on_device, device)
        row_map = RowMap(len(tables), capacity)
        if device_share < 1:  # the first row ids are those on the device
            for number, (table, share) in enumerate(zip(tables, shares, strict=True)):
                row_map.place(number, hottest_rows(map(_without_rows, of_table[table.name]), share).keys)
        num_hot = int(row_map.table_rows.sum())
        is_written = np.zeros(num_hot, bool)
        for number, table in enumerate(tables):
            uses: list[tuple[np.ndarray, np.ndarray]] | None = []  # None: not all records have frequencies
            for records in of_table[table.name]:
                check_records("freeze_records", table, records)
                row_ids = row_map.place(number, records.keys)
                is_written[row_ids[row_ids < num_hot]] = True
                store = write_rows(store, table, row_ids, records)
                if uses is None or records.frequency is None:
                    uses = None
                else:
                    uses.append((row_ids, np.array(records.frequency, np.uint32)))
            for row_ids, frequency in uses or ():
                row_map.set_frequencies(row_ids, frequency)
        if not is_written.all():
            names, lost = [table.name for table in tables], np.count_nonzero(~is_written)
            raise ValueError(
                f"freeze_records: sources: got {lost} keys of tables {names} that did not come when the records were "
                "read again, wanted streams that can be read twice, as a device_share needs."
            )
        index, counters = row_map.index(device)
        stores.append(dataclasses.replace(store, index=index, counters=counters))
        maps.append(row_map)
    return FrozenTables(tuple(stores), spec), tuple(maps)


def rows_on_device(num_rows: int, device_share: float) -> int:
    """Returns how many of a table's rows lie on the device, without spare ones."""
    return math.ceil(device_share * num_rows)


def _without_rows(records: Records) -> Records:
    return dataclasses.replace(records, rows=np.zeros((records.num_rows, 1), np.float32), state={})


def write_rows(store: FrozenStore, table: FrozenTable, row_ids: np.ndarray, records: Records) -> FrozenStore:
    """Writes rows of any float dtype into a donated store, as its table stores them; the last of a row id counts."""
    last = len(row_ids) - 1 - np.unique(row_ids[::-1], return_index=True)[1]
    if len(last) != len(row_ids):
        last.sort()
        row_ids, records = row_ids[last], Records(records.keys[last], records.rows[last])
    return write_lines(store, row_ids, lines_of(table, records))


def lines_of(table: FrozenTable, records: Records) -> tuple[np.ndarray, ...]:
    """Rounds or quantizes rows as a table stores them, with scales if quantized (ServingError: not finite)."""
    if not table.is_quantized:
        return (round_to(records.rows, jnp.dtype(table.dtype)),)
    try:
        return quantize.quantize_rows(records.rows, table.dtype)
    except ValueError as error:
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(records.rows.astype(np.float32)).all(axis=1)
        raise ServingError(
            f'table "{table.name}": key {records.keys[is_finite.argmin()]}: got a row with NaN or infinity, wanted '
            f"finite numbers for {table.dtype}, which scales each row. Repair it, or serve the table in float32."
        ) from error


def write_lines(store: FrozenStore, row_ids: np.ndarray, lines: Sequence[np.ndarray]) -> FrozenStore:
    """Sets some rows of a donated store to what `lines_of` gave, where they lie; row ids are distinct."""
    size = padded_size(len(row_ids), _LEAST_ROWS)
    ids = fill_up(np.asarray(row_ids, np.uint32), size, np.uint32(NO_ROW))
    padded = tuple(fill_up(array, size) for array in lines)
    arrays = store.rows, store.host_rows, store.scales
    sent = jax.device_put((ids, padded), store.rows.sharding)
    # A program that is dispatched before its operands have arrived stops the device's later ones, lookups among them.
    rows, host_rows, scales = _write(arrays, *jax.block_until_ready(sent))
    return dataclasses.replace(store, rows=rows, host_rows=host_rows, scales=scales)


def read_lines(store: FrozenStore, row_ids: np.ndarray) -> list[np.ndarray]:
    """Reads some rows as they are stored, wherever they lie: what `write_lines` takes. Waits for the device."""
    ids = fill_up(np.asarray(row_ids, np.uint32), padded_size(len(row_ids), _LEAST_ROWS))
    lines = [np.array(array[ids])[: len(row_ids)] for array in (store.rows, *store.scales)]
    for slab in store.host_rows:
        beyond = row_ids >= store.rows.shape[0]
        there = bytes_of(slab)[row_ids[beyond] - store.rows.shape[0]]
        lines[0][beyond] = there.view(lines[0].dtype)
    return lines


def ready_to_write(store: FrozenStore, num_rows: int) -> None:
    """Compiles `write_lines` for this many rows on their device (JAX keeps the programs)."""
    size = padded_size(num_rows, _LEAST_ROWS)
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=store.rows.sharding)
    lines = tuple(shape((size, *array.shape[1:]), array.dtype) for array in (store.rows, *store.scales))
    _write.lower((store.rows, store.host_rows, store.scales), shape((size,), np.uint32), lines).compile()


def check_records(op: str, table: FrozenTable, records: Records) -> None:
    if records.rows.shape != (records.num_rows, table.dim):
        raise ValueError(
            f'{op}: table "{table.name}": rows: got shape {list(records.rows.shape)}, wanted '
            f"[{records.num_rows}, {table.dim}]."
        )


def frozen_bytes(table: FrozenTable, num_rows: int, num_on_device: int | None = None) -> dict[str, int]:
    """Counts the bytes of device memory of `num_rows` rows of a table, spare ones included, by array.

    `num_on_device` of the rows lie on the device, None: all of them; scales and index always do.

    Example:
      >>> frozen_bytes(FrozenTable("user", dim=128, dtype="int8"), 1_000_000)
      {'rows': 128000000, 'scales': 4000000, 'index': 24615424}
    """
    num_on_device = num_rows if num_on_device is None else num_on_device
    return {
        "rows": num_on_device * table.dim * jnp.dtype(table.dtype).itemsize,
        "scales": 4 * num_rows if table.is_quantized else 0,
        "index": 64 * buckets_of(num_rows),
    }


def _table_words(tables: Sequence[FrozenTable]) -> np.ndarray:
    """Describes the tables as the kernels of training know them, under `SEED`: an absent key reads its initial row."""
    optimizer = optimizers.sgd(0.0)
    specs = [
        TableSpec(table.name, table.dim, optimizer, initializer=initializers.constant(float(table.default)))
        if table.initial is None
        else TableSpec(table.initial.table, table.dim, optimizer, initializer=table.initial.initializer)
        for table in tables
    ]
    words = StoreSpec(tuple(specs)).table_words()
    seed = int(SEED[0]) | int(SEED[1]) << 32
    for line, table in zip(words, tables, strict=True):
        if table.initial is not None:
            # The stream of a key begins with Mix64(seed + golden) ^ name (ffi/core/initialize.h): by other names one
            # call, which has one seed, looks up tables of several seeds.
            mixed = plan.mix(np.array([seed, table.initial.seed], np.uint64) + np.uint64(plan.GOLDEN))
            line[:2] ^= to_words(mixed[:1] ^ mixed[1:])[0]
    return words


def _empty_store(table: FrozenTable, num_on_device: int, num_in_host: int, device: Any) -> FrozenStore:
    with jax.default_device(device):
        store = FrozenStore(
            index=jnp.zeros((0, BUCKET_WORDS), jnp.uint32),
            counters=jnp.zeros(len(COUNTERS), jnp.uint32),
            rows=jnp.zeros((num_on_device, table.dim), table.dtype),
            scales=(jnp.zeros(num_on_device + num_in_host, jnp.float32),) if table.is_quantized else (),
        )
        row_bytes = table.dim * jnp.dtype(table.dtype).itemsize
        host_rows = (new_host_rows(device, num_in_host, row_bytes),) if num_in_host else ()
    return dataclasses.replace(jax.device_put(store, device), host_rows=host_rows)


@functools.partial(jax.jit, donate_argnums=0)
def _write(
    arrays: tuple[Array, tuple[Array, ...], tuple[Array, ...]], row_ids: Array, lines: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    (rows, host_rows, scales), (new_rows, *new_scales) = arrays, lines
    scales = tuple(old.at[row_ids].set(new, mode="drop") for old, new in zip(scales, new_scales, strict=True))
    if host_rows:
        no_row, num_on_device = jnp.uint32(NO_ROW), rows.shape[0]
        is_beyond = (row_ids >= num_on_device) & (row_ids != no_row)
        beyond = jnp.where(is_beyond, row_ids - jnp.uint32(num_on_device), no_row)
        as_bytes = jax.lax.bitcast_convert_type(new_rows, jnp.uint8).reshape(new_rows.shape[0], -1)
        host_rows = kernels.scatter(beyond, as_bytes, host_rows)
        row_ids = jnp.where(is_beyond, no_row, row_ids)
    return kernels.scatter(row_ids, new_rows, (rows,))[0], host_rows, scales
