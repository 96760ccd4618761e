"""Declarations of tables, placements and features, and the stores that follow from them (decision D4)."""

import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok import checks, initializers, policies
from jaxsok.checks import not_none
from jaxsok.optimizers import program
from jaxsok.optimizers.protocol import PROGRAM, Optimizer, RowState
from jaxsok.shards import Shards
from jaxsok.types import (
    COMBINERS,
    MAX_CAPACITY,
    MAX_DIM,
    MAX_ROWS,
    MAX_SLABS,
    MAX_STATES,
    NO_ROW,
    NUM_TABLE_WORDS,
    ROUNDINGS,
    ROW_DTYPES,
    ROW_GRADIENTS,
    Combiner,
    Rounding,
    RowDtype,
    RowGradient,
)

Spec = TypeVar("Spec")

# Argument names of other libraries (torch, TorchRec, Keras, Flax, TensorFlow, HugeCTR, dynamicemb), by jaxsok's own.
_OF_TABLES = {
    "dim": ("embedding_dim", "embedding_size", "embedding_vec_size", "output_dim", "dimension", "features"),
    "capacity": (
        *("num_embeddings", "vocabulary_size", "vocab_size", "input_dim", "num_rows", "init_capacity", "cardinality"),
        *("max_vocabulary_size", "max_vocabulary_size_per_gpu", "bucket_size"),
    ),
    "initializer": ("init_fn", "embedding_init", "embeddings_initializer", "initializer_args"),
    "dtype": ("data_type", "param_dtype", "value_dtype"),
    "optimizer": ("optim", "tx", "learning_rate"),
    "admission": ("filter_option", "entry"),
    "eviction": ("evict_option", "evict_strategy", "score_strategy"),
    "memory": ("local_hbm_for_values", "cache_load_factor", "cache_params", "compute_kernel", "location", "caching"),
    "FeatureSpec(name, table=...)": ("feature_names", "feature_name"),
    "FeatureSpec(combiner=...)": ("combiner", "pooling", "mode"),
    "FeatureSpec(key_dtype=...)": ("key_dtype",),
}
_OF_FEATURES = {
    "table": ("table_name", "table_spec", "table_description", "table_id"),
    "combiner": ("pooling", "pooling_type", "mode"),
    "max_hotness": ("max_sequence_length", "max_seq_len", "max_nnz", "hotness"),
    "weighted": ("is_weighted",),
    "key_dtype": ("dtype",),
}


def _refuse_unknown_arguments(others: Mapping[str, Sequence[str]]) -> Callable[[type[Spec]], type[Spec]]:
    """Makes a spec refuse an unknown argument with the name to use; `others` has the names in other libraries."""
    own_of = {name: own for own, names in others.items() for name in names}

    def decorate(spec: type[Spec]) -> type[Spec]:
        init, fields = spec.__init__, [name for name in inspect.signature(spec).parameters if name != "_"]

        @functools.wraps(init)
        def init_checked(self: Spec, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in fields:
                    wanted = [own_of[name]] if name in own_of else difflib.get_close_matches(name, fields, 1) or fields
                    raise TypeError(
                        f"{spec.__name__}: {name}: got an argument of that name, wanted {', '.join(wanted)}."
                    )
            init(self, *args, **kwargs)

        spec.__init__ = init_checked
        return spec

    return decorate


def _from_1_to(most: int) -> dict[str, Any]:
    return {"low": 1, "high": most, "wanted": f"1 to {most}", "kind": "an integer"}


_ROWS = _from_1_to(MAX_ROWS)
"""Limits for numbers of rows on all shards; those of a shard depend on how many there are (declaration.py)."""

_KEYS = _from_1_to(MAX_CAPACITY)
"""Limits for numbers of keys."""


def _describe_non_optimizer(value: object) -> str:
    if hasattr(value, "init") and hasattr(value, "update"):
        name = type(value).__name__
        return f"an Optax {name}, wanted one of jaxsok.optim; wrap it: optimizer=jaxsok.optim.lift(...)"
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return f"{name} itself, wanted an optimizer; call it, as jaxsok.optim.adam(1e-3)"
    return f"{value!r}, wanted one of jaxsok.optim, as optim.adam(1e-3)"


def _name(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what}: name: got {value!r}, wanted a string.")
    if not value:
        raise ValueError(f"{what}: name: got an empty string, wanted a name.")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of a table on a mesh: `SHARDED`, `REPLICATED` or `on(device)`. On one device all are the same."""

    kind: Literal["sharded", "on", "replicated"]
    shard: int = 0
    """The shard that has the whole table, for kind "on"."""

    def __repr__(self) -> str:
        return f"on({self.shard})" if self.kind == "on" else self.kind.upper()


SHARDED = Placement("sharded")
"""Rows are spread over all shards by the hash of their keys."""

REPLICATED = Placement("replicated")
"""Every shard has all rows, and moves them alike: for small tables that every batch reads."""


def on(device: int) -> Placement:
    """Puts the whole table on one shard, by its number along the collection's axis, from 0: `placement=on(2)`."""
    return Placement("on", checks.integer("on: device", device, 0, wanted="the number of a shard, from 0"))


def _device_rows(what: str, value: Any) -> int | float:
    if isinstance(value, (float, np.floating)):
        return checks.number(what, value, checks.ABOVE_ZERO, 1, "a share above 0, at most 1.0")
    return checks.integer(what, value, 0, MAX_ROWS, f"rows, 0 to {MAX_ROWS}, or a share of the capacity")


@dataclasses.dataclass(frozen=True, eq=False)
class HostMemory:
    """Puts rows and optimizer state of a table in host memory, with a cache of some rows on each device.

    Index, keys and statistics stay on the device. A call brings the rows that it uses into the cache, in place of those
    whose mean use is the oldest; what does not fit there is staged for the call alone. Results have the
    same bits as those of a table on the device. On a CPU all of this is ordinary memory.

    Raises:
      ValueError: when declared; the message names the argument.

    Example:
      >>> HostMemory(device_rows=0.25)
      HostMemory(device_rows=0.25)
    """

    device_rows: int | float | None = checks.declare(None, checks.optional(_device_rows))
    """Rows of the cache of a store, on all shards together; as a float up to 1.0, a share of the store's declared
    capacity. 0: no cache, every row that is used crosses the link. None: a tenth of the declared capacity."""

    def __post_init__(self) -> None:
        checks.check_fields(self, "HostMemory")

    @property
    def _key(self) -> tuple[bool, int | float | None]:
        """Returns what equal declarations have: 1 is equal to 1.0, but it is a row, and 1.0 is all of them."""
        return isinstance(self.device_rows, float), self.device_rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostMemory) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


_WIRE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_ON_WIRE = {"choices": (None, *_WIRE_DTYPES), "wanted": f"None or one of {_WIRE_DTYPES}"}


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """The form in which rows and gradients travel between shards. Arithmetic is float32 at both ends.

    The dense wire is XLA's all-to-all. The window wire writes straight into the memory of other GPUs, where the GPUs of
    one host reach each other's memory. Both give the same bits.

    By default rows travel as they are stored and lose nothing, and gradients as float32. float16 and float8_e4m3fn
    carry a scale with each row, a power of two, so that rows of any size keep their mantissa: 10 and 3 bits. bfloat16
    has 7 and needs no scale. A wrong declaration raises ValueError.
    """

    rows: str | None = checks.declare(None, checks.one_of, **_ON_WIRE)
    """Dtype of rows on the wire: float32, bfloat16, float16 or float8_e4m3fn; None: that of the table's rows."""
    gradients: str | None = checks.declare(None, checks.one_of, **_ON_WIRE)
    """Dtype of row gradients on the wire, likewise; None: float32."""
    send_capacity: int | None = checks.declare(None, checks.optional(checks.integer), **_KEYS)
    """Keys for one destination in one round, of each store, where no plan says better; None: a quarter more than
    uniform owners need."""
    wire: Literal["auto", "dense", "window"] = checks.declare(
        "auto", checks.one_of, choices=("auto", "dense", "window"), wanted='"auto", "dense" or "window"'
    )
    """The wire between shards: "auto" takes windows where they are available."""

    def __post_init__(self) -> None:
        checks.check_fields(self, "ExchangeSpec")


@_refuse_unknown_arguments(_OF_TABLES)
@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table: a named map from 64-bit keys to rows of `dim` numbers.

    Tables with the same dim, dtype, embedding_dtype, rounding, optimizer, row_gradient, eviction and memory share one
    store; on a mesh replicated tables, and those of partial bags, share none with others. Equal keys in different
    tables never collide. Rows of 16 bits take half the memory; optimizer state and arithmetic are float32 all the same.

    Raises:
      TypeError, ValueError: when declared; the message names the table and the argument.
      NotARowProgram: when declared; the message names the optimizer and what its step does.

    Example:
      >>> from jaxsok import optim
      >>> TableSpec("user", dim=64, optimizer=optim.adam(1e-3), capacity=1_000_000).dim
      64
    """

    name: str
    """Unique in its collection; new rows depend on it."""
    dim: int
    """Numbers in a row: 1 to 1024."""
    optimizer: Optimizer
    """The optimizer of its rows, from `jaxsok.optim`."""
    _: dataclasses.KW_ONLY
    initializer: initializers.Initializer = dataclasses.field(default_factory=initializers.uniform)
    """The numbers of a new row: from `jaxsok.initializers`, or a name, as "ones", for the call without arguments."""
    capacity: int = checks.declare(65_536, checks.integer, **_ROWS)
    """Rows at first, on all shards together; the tables of a store pool theirs. `collection.grow` adds more, and may do
    so before the first step; `max_capacity` is the limit."""
    max_capacity: int | None = checks.declare(None, checks.optional(checks.integer), **_ROWS)
    """Rows at most; None: until memory ends. A store's is the sum, or None if one of its tables has None."""
    dtype: RowDtype = checks.declare("float32", checks.one_of, choices=tuple(ROW_DTYPES))
    """Dtype of the stored rows: float32, bfloat16 or float16. New rows are rounded to nearest."""
    embedding_dtype: RowDtype | None = None
    """Dtype of embeddings and their gradients: float32, or the rows' own; None: the rows' own."""
    rounding: Rounding = checks.declare("stochastic", checks.one_of, choices=tuple(ROUNDINGS))
    """Rounding of a step's float32 result to a row of 16 bits: "stochastic", up or down at random so that the mean is
    kept, or "nearest", which loses steps below a row's last bit. Ignored for float32 rows."""
    row_gradient: RowGradient = checks.declare("sum", checks.one_of, choices=tuple(ROW_GRADIENTS))
    """The gradient of a row: the sum over its uses, their mean, or the sum over the root of their number."""
    unknown: Literal["initial", "zeros"] = checks.declare(
        "initial", checks.one_of, choices=("initial", "zeros"), wanted='"initial" or "zeros"'
    )
    """The result of `find` and serving for a key without a row: the row it would get, or zeros."""
    placement: Placement = SHARDED
    """Its place on a mesh: SHARDED, REPLICATED or on(device)."""
    admission: policies.Admission | None = None
    """The policy, from `jaxsok.policies`, by which unseen keys get a row; None: all get one."""
    eviction: policies.Eviction | None = None
    """The policy, from `jaxsok.policies`, by which rows leave when the store is full at its `max_capacity`; None: no
    row leaves. If a table of the store has no `max_capacity`, the store grows instead, and only `collection.evict` uses
    the policy."""
    statistics: bool = checks.declare(False, checks.flag)
    """True keeps the frequency and last step of each row: 8 bytes. They are also kept if `eviction` needs them, or if
    another table of the store asks for them."""
    memory: HostMemory | None = None
    """The memory of its rows and optimizer state: `jaxsok.HostMemory(...)`; None: the device's."""

    def __post_init__(self) -> None:
        _name("TableSpec", self.name)
        what = f'TableSpec "{self.name}"'
        checks.field(self, what, "dim", checks.integer, 1, MAX_DIM, f"1 to {MAX_DIM}", "an integer")
        checks.check_fields(self, what)
        if self.max_capacity is not None and self.max_capacity < self.capacity:
            raise ValueError(
                f"{what}: max_capacity: got {self.max_capacity}, wanted at least capacity = {self.capacity}."
            )
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"{what}: optimizer: got {_describe_non_optimizer(self.optimizer)}.")
        kind, fields = type(self.optimizer), {field.name for field in dataclasses.fields(self.optimizer)}
        is_cached = lambda name: isinstance(getattr(kind, name, None), functools.cached_property)  # noqa: E731
        others = sorted(name for name in vars(self.optimizer).keys() - fields if not is_cached(name))
        if others and "__eq__" not in vars(kind):  # two that step differently would be equal
            raise TypeError(
                f"{what}: optimizer: got {type(self.optimizer).__name__} with attributes that are no fields, {others}, "
                "wanted a class under @dataclasses.dataclass(frozen=True) with its numbers as fields."
            )
        states = [(state.name, state.dim) for state in self.optimizer.state_specs(self.dim)]
        names, num_states = [name for name, _ in states], len(states)
        if len(set(names)) < num_states or any(width not in (1, self.dim) for _, width in states):
            raise ValueError(
                f"{what}: optimizer: got optim.{self.optimizer.name} with state {states}, wanted different names, each "
                f"of dim {self.dim} or 1."
            )
        if num_states > MAX_STATES:
            raise ValueError(
                f"{what}: optimizer: got optim.{self.optimizer.name} with {num_states} arrays of state by row, wanted "
                f"at most {MAX_STATES}."
            )
        if self.optimizer.kernel == PROGRAM:
            program.compile_row_program(self.optimizer, self.dim)
        if isinstance(self.initializer, str) and self.initializer in initializers.BY_NAME:
            object.__setattr__(self, "initializer", initializers.BY_NAME[self.initializer]())
        if not isinstance(self.initializer, initializers.Initializer):
            raise TypeError(
                f"{what}: initializer: got {self.initializer!r}, wanted one of jaxsok.initializers, as "
                f"initializers.uniform(-0.05, 0.05), or a name: {list(initializers.BY_NAME)}."
            )
        self.initializer.require(self.dim, what)
        embedding_dtypes = list(dict.fromkeys([self.dtype, "float32"]))
        wanted = f"None or one of {embedding_dtypes} with rows of {self.dtype}"
        checks.one_of(f"{what}: embedding_dtype", self.embedding_dtype, (None, *embedding_dtypes), wanted)
        if not isinstance(self.placement, Placement):
            raise TypeError(
                f"{what}: placement: got {self.placement!r}, wanted jaxsok.SHARDED, jaxsok.REPLICATED or "
                "jaxsok.on(device)."
            )
        for name, kind in (("admission", policies.Admission), ("eviction", policies.Eviction)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or type(value) is kind):
                raise TypeError(f"{what}: {name}: got {value!r}, wanted None or one of jaxsok.policies.")
        if self.eviction is not None:
            self.eviction.check(f"{what}: eviction", self.dim, self.dtype)
        if self.memory is None:
            return
        if not isinstance(self.memory, HostMemory):
            raise TypeError(f"{what}: memory: got {self.memory!r}, wanted None or jaxsok.HostMemory(device_rows=...).")
        if self.placement.kind == "replicated":
            raise ValueError(
                f"{what}: memory: got {self.memory!r} with placement REPLICATED, wanted None: every batch reads a "
                "replicated table; spread it (SHARDED) or put it on one device (jaxsok.on(device))."
            )

    @property
    def refused_read_initial(self) -> bool:
        """True if a key without a row reads its initial row in a lookup, not a constant."""
        return self.admission is None or self.admission.unadmitted == "initial"

    def unknown_reads(self, seed: int) -> "float | initializers.InitialRows | initializers.Initializer":
        """Returns the row of `find` for a key without one, as files and served tables can carry it.

        A number, in every column; InitialRows of the state's seed; or the initializer, if only XLA computes its rows.
        """
        initializer = self.initializer.for_dim(self.dim)
        if self.unknown == "zeros":
            return 0.0
        if initializer.is_traced:
            return initializer
        if initializer.kind != 0:
            return initializers.InitialRows(initializer, self.name, seed)
        largest = float(jnp.finfo(self.dtype).max)
        return float(np.clip(np.float32(initializer.a), -largest, largest).astype(jnp.dtype(self.dtype)))


@_refuse_unknown_arguments(_OF_FEATURES)
@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """A feature: a named part of the batch that reads one table.

    A wrong declaration raises TypeError or ValueError; the message names the feature and the argument.

    Example:
      >>> FeatureSpec("history", table="item", combiner="mean", max_keys=20 * 1024).combiner
      'mean'
    """

    name: str
    table: str
    """The name of a TableSpec; several features may read one table."""
    _: dataclasses.KW_ONLY
    combiner: Combiner | None = checks.declare("sum", checks.one_of, choices=tuple(COMBINERS))
    """The operation that makes a bag's embedding of its rows; None: every key keeps its own row."""
    weighted: bool = checks.declare(False, checks.flag)
    """True if each key comes with a float32 weight."""
    max_keys: int | None = checks.declare(None, checks.optional(checks.integer), **_KEYS)
    """Keys of a ragged batch at most: the static size of its buffer, on a mesh shared out evenly among the shards.
    None: each batch's next power of two."""
    max_hotness: int | None = checks.declare(None, checks.optional(checks.integer), **_KEYS)
    """The width of the embedding `[num_bags, max_hotness, dim]`, in place of `[max_keys, dim]`, for combiner None and
    ragged bags."""
    key_dtype: Literal["int64", "int32"] = checks.declare(
        "int64", checks.one_of, choices=("int64", "int32"), wanted='"int64" or "int32"'
    )
    """"int32" lets a `jax.Array` of int32 keys in, which otherwise could be a narrowed int64."""
    exchange: Literal["rows", "bags"] = checks.declare(
        "rows", checks.one_of, choices=("rows", "bags"), wanted='"rows" or "bags"'
    )
    """The form in which rows travel between shards: each distinct row of a shard's batch, or the sum of a bag over the
    rows of each owner. "bags" needs a combiner, and is the same for all features of a table. It sends less where the
    bags of a shard times the shards are fewer than its distinct keys, and rows are long against the 8 bytes of a use
    (16 with weights); `propose` counts. It has no effect on one device and on replicated tables."""

    def __post_init__(self) -> None:
        _name("FeatureSpec", self.name)
        what = f'FeatureSpec "{self.name}"'
        _name(f"{what}: table", self.table)
        checks.check_fields(self, what)
        if self.weighted and self.combiner is None:
            raise ValueError(f"{what}: weighted: got True with combiner None; weights need a combiner to act in.")
        if self.exchange == "bags" and self.combiner is None:
            raise ValueError(f'{what}: exchange: got "bags" with combiner None, wanted "rows": there are no bags.')
        if self.max_hotness is not None and self.combiner is not None:
            raise ValueError(
                f"{what}: max_hotness: got {self.max_hotness} with combiner {self.combiner!r}; it is for combiner None."
            )


def _common(name: str, meaning: str) -> Any:
    """Declares a property of a StoreSpec that all of its tables have in common."""
    return property(lambda store: getattr(store.tables[0], name), doc=meaning)


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """Tables of one store: the same in all that `group_into_stores` looks at; all or none replicated."""

    tables: tuple[TableSpec, ...]
    num_shards: int = 1
    sends_bags: bool = False
    """True if shards exchange partial bags, not rows; never on one shard, nor of replicated tables."""

    dim = _common("dim", "Numbers in a row.")
    dtype = _common("dtype", "Dtype of the rows.")
    rounding = _common("rounding", "Rounding of a step's result to a row of 16 bits.")
    optimizer = _common("optimizer", "The optimizer of the rows.")
    row_gradient = _common("row_gradient", "The gradient of a row, made of those of its uses.")
    memory = _common("memory", "The memory of rows and optimizer state; None: the device's.")

    @property
    def itemsize(self) -> int:
        """Bytes of a number of a row."""
        return 4 if self.dtype == "float32" else 2

    @property
    def embedding_dtype(self) -> RowDtype:
        """Dtype of embeddings and their gradients."""
        return self.tables[0].embedding_dtype or self.dtype

    @property
    def state_specs(self) -> tuple[RowState, ...]:
        """The optimizer state of a row."""
        return self.optimizer.state_specs(self.dim)

    @property
    def num_slots(self) -> int:
        """Rows of a shard's cache, where rows lie in host memory."""
        asked = not_none(self.memory).device_rows
        asked = 0.1 if asked is None else asked
        slots = math.ceil(asked * self.capacity) if isinstance(asked, float) else -(-asked // self.num_shards)
        return min(slots, self.most_rows)

    @property
    def keeps_statistics(self) -> bool:
        """True if its rows have `last_step` and `frequency`."""
        return any(
            table.statistics or (table.eviction is not None and table.eviction.needs_statistics)
            for table in self.tables
        )

    @property
    def counts_sightings(self) -> bool:
        """True if some table admits by exact count."""
        return any(isinstance(table.admission, policies.AdmitByCount) for table in self.tables)

    def bloom_segments(self) -> list[tuple[int, int]]:
        """Returns begin and size of each table's part of a shard's Bloom filter, in counters; size 0: it has none."""
        segments, begin = [], 0
        for table in self.tables:
            size = 0
            if isinstance(table.admission, policies.AdmitByBloom):
                is_spread = self.num_shards > 1 and table.placement.kind == "sharded"
                num_keys = -(-table.admission.num_keys // self.num_shards) if is_spread else table.admission.num_keys
                size = table.admission.num_counters(num_keys)
            segments.append((begin, size))
            begin += size
        return segments

    @property
    def traced_tables(self) -> tuple[int, ...]:
        """The numbers of the tables whose new rows XLA computes."""
        return tuple(number for number, table in enumerate(self.tables) if table.initializer.is_traced)

    @property
    def max_slabs(self) -> int:
        """Slabs of rows at most: lookups add one, of initial rows, where XLA computes those."""
        return MAX_SLABS - bool(self.traced_tables)

    @property
    def is_replicated(self) -> bool:
        """True if every shard has all rows."""
        return self.num_shards > 1 and self.tables[0].placement.kind == "replicated"

    @property
    def capacity(self) -> int:
        """Rows of a shard at first."""
        return self.rows_of_shard([table.capacity for table in self.tables])

    @functools.cached_property
    def max_capacity(self) -> int | None:
        """Rows of a shard at most; None: until memory ends."""
        limits = [table.max_capacity for table in self.tables]
        return None if None in limits else min(self.rows_of_shard(limits), MAX_CAPACITY)

    @property
    def most_rows(self) -> int:
        """Rows of a shard at most: its `max_capacity`, else `MAX_CAPACITY`."""
        return self.max_capacity or MAX_CAPACITY

    def rows_of_shard(self, rows: Sequence[int]) -> int:
        """Returns the rows of a shard with which the tables together have room for `rows` each."""
        if self.num_shards == 1 or self.is_replicated:
            return sum(rows)
        pinned, spread = sum_pinned_and_spread(zip(self.tables, rows, strict=True), self.num_shards)
        share = spread / self.num_shards
        # A share varies by its root: with four of them on top a shard overflows before the tables are full about once
        # in 30,000 times.
        return min(spread, math.ceil(share + 4 * math.sqrt(share))) + pinned

    def table_words(self) -> np.ndarray:
        """Describes the tables to the kernels: uint32[num_tables, NUM_TABLE_WORDS] (TableWord in layout.h)."""
        words = np.zeros((len(self.tables), NUM_TABLE_WORDS), np.uint32)
        for line, table, (begin, size) in zip(words, self.tables, self.bloom_segments(), strict=True):
            name = int(name_word(table.name))
            initializer = table.initializer.for_dim(table.dim)
            line[:3] = name & 0xFFFFFFFF, name >> 32, initializer.kind
            line[3:5] = np.array([initializer.a, initializer.b], np.float32).view(np.uint32)
            # In a replicated store each shard owns all rows.
            line[5] = 0 if self.is_replicated else table.placement.shard if table.placement.kind == "on" else NO_ROW
            line[6] = table.unknown == "zeros"
            admission = table.admission
            if admission is None or admission.threshold >= 2**32:
                continue
            line[7:9] = admission.kind, admission.threshold
            if isinstance(admission, policies.AdmitByBloom):
                line[9:12] = begin // 4, size, admission.num_hashes
        return words

    def refused_words(self) -> np.ndarray:
        """Returns `table_words` with the initializers that keys without a row read in a lookup."""
        words = self.table_words()
        for line, table in zip(words, self.tables, strict=True):
            if not table.refused_read_initial:
                constant = initializers.constant(float(not_none(table.admission).unadmitted))
                line[2:5] = constant.kind, *np.array([constant.a, constant.b], np.float32).view(np.uint32)
        return words

    def sighting_floors(self, cleared: int | None = None) -> np.ndarray:
        """Returns by table the count at which a key is admitted and stops waiting; 1 for the table `cleared`."""
        floors = np.ones(len(self.tables), np.uint32)
        for number, table in enumerate(self.tables):
            if isinstance(table.admission, policies.AdmitByCount) and number != cleared:
                floors[number] = table.admission.threshold
        return floors


@dataclasses.dataclass(frozen=True)
class TableRef:
    """A table of a collection; hashable, since programs are compiled for each."""

    spec: StoreSpec
    store: int
    """The store's number in the state."""
    number: int
    """The table's number in the store."""
    shards: Shards

    @property
    def declared(self) -> TableSpec:
        """Its declaration."""
        return self.spec.tables[self.number]

    def ids(self, num_keys: int) -> np.ndarray:
        """Returns the table id of each key."""
        return np.full(num_keys, self.number, np.uint32)

    def total(self, words: Array) -> Array:
        """Sums over shards; a replicated store counts once."""
        return self.shards.total(words, is_replicated=self.spec.is_replicated)


def sum_pinned_and_spread(amounts: Iterable[tuple[TableSpec, Any]], num_shards: int) -> tuple[Any, Any]:
    """Sums amounts of tables: those of the shard to which most are pinned, and those that are spread by hash."""
    pinned, spread = [0] * num_shards, 0
    for table, amount in amounts:
        if table.placement.kind == "on":
            pinned[table.placement.shard if num_shards > 1 else 0] += amount
        else:
            spread += amount
    return max(pinned), spread


def name_word(table: str) -> np.uint64:
    """Returns the word by which a table's name enters hashes."""
    return np.uint64(int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little"))


def bag_tables(features: Iterable[FeatureSpec]) -> frozenset[str]:
    """Returns the names of the tables whose features exchange partial bags."""
    return frozenset(feature.table for feature in features if feature.exchange == "bags")


def check_declarations(
    op: str,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    num_shards: int,
    exchange: ExchangeSpec | None = None,
) -> None:
    """Refuses what no collection can be made of."""
    checks.integer(f"{op}: num_shards", num_shards, 1, wanted="the number of devices, at least 1")
    for kind, specs, wanted in (("tables", tables, TableSpec), ("features", features, FeatureSpec)):
        if not isinstance(specs, Iterable):
            raise TypeError(f"{op}: {kind}: got {type(specs).__name__}, wanted a sequence of {wanted.__name__}s.")
        for spec in specs:
            if not isinstance(spec, wanted):
                raise TypeError(f"{op}: {kind}: got {spec!r}, wanted {wanted.__name__}s.")
        names = [spec.name for spec in specs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{op}: {kind}: got {twice} more than once, wanted one spec for each name.")
    if not tables:
        raise ValueError(f"{op}: tables: got none, wanted at least one TableSpec.")
    known, of_bags = [table.name for table in tables], bag_tables(features)
    for feature in features:
        if feature.table not in known:
            raise ValueError(f'{op}: feature "{feature.name}": table: got "{feature.table}", wanted one of {known}.')
        if feature.table in of_bags and feature.exchange != "bags":
            others = [other.name for other in features if other.table == feature.table and other.exchange == "bags"]
            raise ValueError(
                f'{op}: feature "{feature.name}": exchange: got "{feature.exchange}", but features {others} of '
                f'table "{feature.table}" have "bags"; declare the same for all features of a table.'
            )
    if exchange is not None and not isinstance(exchange, ExchangeSpec):
        raise TypeError(f"{op}: exchange: got {exchange!r}, wanted a jaxsok.ExchangeSpec.")
    for table in tables:
        require_shard(op, table.name, table.placement, num_shards)


def require_shard(op: str, name: str, placement: Placement, num_shards: int) -> None:
    """Refuses a table on a device that there is not."""
    if placement.kind == "on" and placement.shard >= num_shards > 1:
        raise ValueError(
            f'{op}: table "{name}": placement: got {placement}, wanted a device from 0 to {num_shards - 1}.'
        )


def group_into_stores(
    tables: Sequence[TableSpec], num_shards: int = 1, of_bags: frozenset[str] = frozenset()
) -> tuple[StoreSpec, ...]:
    """Groups tables by the properties that stores share, in the order of their first table; `of_bags`: `bag_tables`."""
    groups: dict[tuple, list[TableSpec]] = {}
    for table in tables:
        is_replicated = num_shards > 1 and table.placement.kind == "replicated"
        sends_bags = num_shards > 1 and not is_replicated and table.name in of_bags
        is_wide = table.dtype == "float32"
        form = (table.dtype, table.embedding_dtype or table.dtype, None if is_wide else table.rounding)
        # A store's capacity is one budget, as is its cache: its tables share one eviction policy and one memory.
        key = (sends_bags, table.dim, form, table.optimizer, table.row_gradient, is_replicated, table.eviction)
        key += (table.memory,)
        groups.setdefault(key, []).append(table)
    return tuple(StoreSpec(tuple(group), num_shards, key[0]) for key, group in groups.items())


def fingerprint(stores: Sequence[StoreSpec]) -> str:
    """Hashes the form of a state: its tables, stores, placements, dims, dtypes, optimizer states, new rows and caches.

    Capacities, learning rates, schedules and rounding may change between runs; they are not in it.
    """
    return hashlib.blake2b("\n".join(describe(stores)).encode(), digest_size=8).hexdigest()


def declarations(tables: Sequence[TableSpec]) -> list[str]:
    """Lists the texts by which processes compare all that tables declare; `describe` has what states depend on."""
    lines = []
    for table in tables:
        values = {field.name: repr(getattr(table, field.name)) for field in dataclasses.fields(table)}
        values["optimizer"] = table.optimizer.describe()
        lines += [f"{name} of {table.name}: {line}" for name, text in values.items() for line in text.splitlines()]
    return lines


def describe(stores: Sequence[StoreSpec]) -> list[str]:
    """Lists the texts that the fingerprint hashes: one per table, then those of stores with more than plain rows."""
    dtypes = [
        store.dtype if store.embedding_dtype == store.dtype else f"{store.dtype} as {store.embedding_dtype}"
        for store in stores
    ]
    lines = [
        f"{s}:{table.name}:{table.dim}:{dtypes[s]}:{store.optimizer.state_form(store.dim)}:{store.state_specs}:{table.initializer.for_dim(table.dim)}"
        for s, store in enumerate(stores)
        for table in store.tables
    ]
    lines += [
        f"{s}:kept:{store.keeps_statistics}:{[_describe_admission(table) for table in store.tables]}"
        for s, store in enumerate(stores)
        if store.keeps_statistics or any(table.admission is not None for table in store.tables)
    ]
    lines += [
        f"{s}:globals:{[(leaf.shape, str(leaf.dtype)) for leaf in map(np.asarray, globals_)]}"
        for s, store in enumerate(stores)
        if (globals_ := store.optimizer.init_globals(store.dim))
    ]
    lines += [f"{s}:{store.memory}" for s, store in enumerate(stores) if store.memory is not None]
    if stores[0].num_shards == 1:
        return lines
    placements = [f":{table.placement} of {store.num_shards}" for store in stores for table in store.tables]
    return [line + placement for line, placement in itertools.zip_longest(lines, placements, fillvalue="")]


def _describe_admission(table: TableSpec) -> str:
    admission = table.admission
    if isinstance(admission, policies.AdmitByBloom):
        return f"bloom of {admission.num_keys}, {admission.false_positive_rate}"
    return "count" if isinstance(admission, policies.AdmitByCount) else "none"
