"""The fused lookup of frozen tables: any inputs, of any tables and dims, in one call.

Works under `jax.jit`, and under `jax.export` with symbolic sizes. Nothing is inserted: a missing key reads its table's
default, or its initial row in training.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxsok import checks, guards, keys as keys_lib, raw_features, types
from jaxsok.features import Bags
from jaxsok.kernels import lookup as kernels, table as table_kernels
from jaxsok.serving.errors import RequestError, refusals, require_mapping
from jaxsok.serving.frozen import SEED, FrozenSpec, FrozenStore, FrozenTable, FrozenTables, require_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupInput:
    """Keys that read one table, and how they fall into bags.

    Example:
      >>> bags = LookupInput("item", np.array([7, 7, 9]), combiner="mean", offsets=np.array([0, 2, 3]))
      >>> bags.combiner
      'mean'
    """

    table: str = dataclasses.field(metadata={"static": True})
    keys: Any
    """`[num_bags]`, `[num_bags, hotness]` filled up with PADDING_KEY, or with offsets `[num_keys]`. Without a combiner
    of one axis or more. NumPy integers; a `jax.Array` is `uint32[..., 2]` words, int64 with x64 on, or int32, which
    counts by its sign."""
    combiner: types.Combiner | None = dataclasses.field(default=None, metadata={"static": True})
    """The operation on the rows of a bag; None: every key reads its own row."""
    offsets: Any = None
    """`[num_bags + 1]`: where each bag begins, and where the last one ends."""
    weights: Any = None
    """One float for each key, in the shape of `keys`; with a combiner."""
    max_norm: float | None = dataclasses.field(default=None, metadata={"static": True})
    """The L2 norm that longer rows are scaled down to; None: rows stay."""


def lookup(tables: FrozenTables, inputs: Mapping[str, LookupInput]) -> dict[str, Array]:
    """Looks up all inputs in one call.

    Args:
      tables: frozen.
      inputs: by the names that the results get. An array of keys stands for `LookupInput(name, keys)`.

    Returns:
      float32 by name: `[*keys.shape, dim]` without a combiner, else `[num_bags, dim]`. Missing keys read the default of
      their table or their initial row. PADDING_KEY and empty bags read zeros. A mean divides by the keys of a bag, or
      by the sum of their weights; zeros where that is 0.

    Raises:
      UnknownTableError, RequestError: names input, argument, got and wanted.

    Cost:
      One call: a key's bucket (64 bytes) and row are read once, an embedding is written once. Bags with `max_norm` need
      another call: their rows are written, and read twice, for the norms and to be combined.

    Example:
      >>> from jaxsok import Records
      >>> from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
      >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
      >>> table = FrozenTable("item", dim=1, default=-1.0)
      >>> tables, _ = freeze_records([(table, SizedRecords(2, [records]))])
      >>> bags = LookupInput("item", np.array([7, 9, 7]), combiner="sum", offsets=np.array([0, 2, 2, 3]))
      >>> found = lookup(tables, {"item": np.array([9, 8]), "bags": bags})
      >>> found["item"].tolist(), found["bags"].tolist()
      ([[2.0], [-1.0]], [[3.0], [0.0], [1.0]])
    """
    return _look_up(tables, inputs, is_counted=False)[0]


def lookup_with_counts(
    tables: FrozenTables, inputs: Mapping[str, LookupInput]
) -> tuple[dict[str, Array], Int32[Array, "num_tables num_counts"]]:
    """Looks up as `lookup`, and counts by table in the order of `tables.tables`; columns are `jaxsok.types.COUNTS`."""
    return _look_up(tables, inputs, is_counted=True)


def _look_up(
    tables: FrozenTables, inputs: Mapping[str, LookupInput], *, is_counted: bool
) -> tuple[dict[str, Array], Int32[Array, "num_tables num_counts"] | None]:
    require_tables("lookup", tables)
    require_mapping("lookup: inputs", inputs, "names to keys")
    (stores,) = guards.refuse_transforms("lookup", tables=tables.stores)
    tables = dataclasses.replace(tables, stores=stores)
    parts = [_read(tables, name, given).guard() for name, given in inputs.items()]
    all_counts = len(tables.tables), len(types.COUNTS)
    if not parts:
        return {}, jnp.zeros(all_counts, jnp.int32) if is_counted else None
    embeddings, _, counts = _call(tables, parts, is_counted=is_counted)
    read = {part.store for part in parts}
    asked = np.array([i for i, (s, _) in enumerate(tables.spec.places.values()) if s in read])
    if counts is not None and len(asked) < len(tables.tables):
        counts = jnp.zeros(all_counts, jnp.int32).at[asked].set(counts)
    clipped = [part for part in parts if part.is_clipped_in_bags]
    finished = {part.name: part.finish(embeddings[part.name]) for part in parts if not part.is_clipped_in_bags}
    finished |= _combine_clipped(tables, clipped, embeddings) if clipped else {}
    return {name: finished[name] for name in inputs}, counts


def _call(
    tables: FrozenTables, parts: "Sequence[_Part]", *more: kernels.FrozenOperands, is_counted: bool = False
) -> tuple[dict[str, Array], list[list[Array]], Array | None]:
    """Looks up inputs in one call; gives their results by name, those of `more` operands, and counts."""
    by_store = {s: [part for part in parts if part.store == s] for s in sorted({part.store for part in parts})}
    for of_store in by_store.values():
        if len(of_store) > (most := types.MAX_FEATURES):
            raise RequestError(f"lookup: inputs: got {len(of_store)} over one store, wanted at most {most}.")
    operands = [_operands(tables.stores[s], tables.spec.words[s], of_store) for s, of_store in by_store.items()]
    counts, values = kernels.lookup_frozen([*operands, *more], jnp.asarray(SEED), is_counted=is_counted)
    names = [part.name for of_store in by_store.values() for part in of_store]
    found = itertools.chain(*values[: len(operands)])
    return dict(zip(names, found, strict=True)), values[len(operands) :], counts


def _operands(store: FrozenStore, words: np.ndarray, parts: "Sequence[_Part]") -> kernels.FrozenOperands:
    """Packs one store's inputs, with their kinds (FeatureKind in ffi/core/layout.h)."""
    lines, kinds = [], 0
    starts: list[Any] = [0] * 5  # of keys, bags, offsets, weights and tiles
    for part in parts:
        num_keys, is_bag = part.words.shape[0], part.combiner is not None
        kinds |= 2 if is_bag else 1
        is_weighted, is_ragged = is_bag and part.weights is not None, is_bag and part.offsets is not None
        key, bag, offset, weight, tile = starts
        line = [part.table, types.COMBINERS[part.combiner], key, num_keys, bag, part.num_bags]
        lines.append([*line, part.hotness if is_bag else 1, offset, weight if is_weighted else -1, tile, 0, 0])
        num_bags = part.num_bags
        sizes = num_keys, num_bags, is_ragged * (num_bags + 1), is_weighted * num_keys, num_tiles(num_bags)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    bags = [part for part in parts if part.combiner is not None]
    # Joining few arrays would cost a kernel of its own.
    keys = [part.words for part in parts]
    keys = keys if len(keys) <= kernels.MOST_KEY_ARRAYS else [raw_features.join(keys)]
    offsets = raw_features.join([part.offsets for part in bags if part.offsets is not None] or [np.zeros(0, np.int32)])
    weights = raw_features.join(
        [part.weights for part in bags if part.weights is not None] or [np.zeros(0, np.float32)]
    )
    return kernels.FrozenOperands(
        index=store.index,
        counters=store.counters,
        tables=words,
        keys=[jnp.asarray(words) for words in keys],
        bags=(jnp.asarray(offsets), jnp.asarray(weights), _features(lines)),
        rows=store.rows,
        scales=store.scales[0] if store.scales else None,
        host_rows=store.host_rows,
        embedding_shapes=[(part.num_bags, store.rows.shape[1]) for part in parts],
        kinds=kinds,
    )


def find_rows(
    tables: FrozenTables, table: str, keys: Any
) -> tuple[Float32[Array, "num_keys dim"], Bool[Array, " num_keys"]]:
    """Reads the rows of keys `[num_keys]` (as `LookupInput.keys`) of one table, and which of them are there.

    Missing keys have the rows that `lookup` gives; PADDING_KEY is not there, and has zeros.
    """
    place = tables.spec.place_of("find_rows", table)
    with refusals():
        words = keys_lib.words_of(keys, "int32", f'find_rows: table "{table}"').reshape(-1, 2)
    (words,) = guards.refuse_transforms("find_rows", keys=words)
    store = tables.stores[place[0]]
    ids = jnp.full(words.shape[0], jnp.uint32(place[1]))
    row_ids = table_kernels.find(store.index, store.counters, jnp.asarray(words), ids)
    rows = lookup(tables, {table: LookupInput(table, words if isinstance(words, jax.Array) else jnp.asarray(words))})
    return rows[table], row_ids != jnp.uint32(types.NO_ROW)


@dataclasses.dataclass(frozen=True)
class _Part:
    name: str
    store: int
    table: int
    combiner: str | None  # what the kernel does
    words: Any
    offsets: Any
    weights: Any
    num_bags: Any
    hotness: Any  # keys of each bag; 0: ragged
    shape: tuple[Any, ...]  # of the result, without its last axis
    given: LookupInput

    @property
    def is_clipped_in_bags(self) -> bool:
        """True if rows are clipped before they are combined, which takes another call."""
        return self.given.max_norm is not None and self.given.combiner is not None

    def guard(self) -> "_Part":
        """Returns a part whose arrays refuse `jax.grad` and `jax.vmap`, by their names."""
        arrays = {"keys": self.words, "offsets": self.offsets, "weights": self.weights}
        words, offsets, weights = guards.refuse_transforms("lookup", **arrays)
        return dataclasses.replace(self, words=words, offsets=offsets, weights=weights)

    def finish(self, value: Float32[Array, "num_lines dim"]) -> Array:
        if self.given.max_norm is not None and self.given.combiner is None:
            value = value * _factors(value, self.given.max_norm)[:, None]
        return value.reshape(*self.shape, value.shape[-1])


@refusals()
def _read(tables: FrozenTables, name: str, given: Any) -> _Part:
    given = given if isinstance(given, LookupInput) else LookupInput(name, given)
    what = f'lookup: input "{name}"'
    store, table = tables.spec.place_of(what, given.table)
    if given.combiner not in types.COMBINERS:
        raise RequestError(f"{what}: combiner: got {given.combiner!r}, wanted one of {list(types.COMBINERS)}.")
    if given.max_norm is not None and not (checks.is_number(given.max_norm) and 0 <= given.max_norm < math.inf):
        raise RequestError(f"{what}: max_norm: got {given.max_norm!r}, wanted a number from 0, or None.")
    bags = given.keys if isinstance(given.keys, Bags) else Bags(given.keys, offsets=given.offsets)
    if bags is given.keys:
        if bags.inverse is not None:
            raise RequestError(f"{what}: inverse: got one, wanted none: a frozen lookup gives a line for each bag.")
        if given.combiner is None:
            raise RequestError(f"{what}: keys: got Bags without a combiner, wanted an array of keys, or a combiner.")
        if given.offsets is not None or (given.weights is not None and bags.weights is not None):
            raise RequestError(f"{what}: got Bags, and offsets or weights as well, wanted each of them once.")
    words = tables.spec.read_by(given.table, keys_lib.words_of(bags.keys, "int32", what))
    shape, weights = words.shape[:-1], bags.weights if given.weights is None else given.weights
    if weights is not None:
        if given.combiner is None:
            raise RequestError(f"{what}: weights: got some without a combiner, in which they would act.")
        weights = raw_features.read_weights(weights, shape, what)
    if bags.offsets is not None or bags.lengths is not None:
        if given.combiner is None:
            raise RequestError(f"{what}: offsets: got some without a combiner, wanted none: every key has its own row.")
        offsets = raw_features.read_offsets(bags, words, what)
        shape = (offsets.shape[0] - 1,)
        hotness: Any = 0
    elif given.combiner is not None:
        if len(shape) not in (1, 2):
            raise RequestError(f"{what}: keys: got shape {list(shape)}, wanted [num_bags] or [num_bags, hotness].")
        offsets, hotness, shape = None, shape[1] if len(shape) == 2 else 1, shape[:1]
        if isinstance(hotness, int) and hotness == 0:
            raise RequestError(f"{what}: keys: got shape {[*shape, 0]}, wanted at least one column.")
    else:
        offsets, hotness = None, 1
    words = words.reshape(-1, 2)
    weights = None if weights is None else weights.reshape(-1)
    combiner = given.combiner
    is_single = offsets is None and isinstance(hotness, int) and hotness == 1 and weights is None
    if is_single or given.max_norm is not None:
        combiner = None
    num_bags = shape[0] if combiner else words.shape[0]
    return _Part(name, store, table, combiner, words, offsets, weights, num_bags, hotness, shape, given)


def num_tiles(num_bags: Any) -> Any:
    """Counts the tiles of a feature's bags, at least one; `num_bags` may be symbolic."""
    tiles = (num_bags + types.BAGS_PER_TILE - 1) // types.BAGS_PER_TILE
    return max(tiles, 1) if isinstance(tiles, int) else jax.core.max_dim(tiles, 1)


def _features(lines: Sequence[Sequence[Any]]) -> Int32[Array, "num_features 12"]:
    """Builds the features operand; the program computes it where sizes are symbolic."""
    if all(isinstance(word, int) for line in lines for word in line):
        return jnp.asarray(np.array(lines, np.int32).reshape(-1, types.NUM_FEATURE_WORDS))
    return jnp.stack([jnp.stack([jnp.asarray(word, jnp.int32) for word in line]) for line in lines])


def _factors(rows: Float32[Array, "_ dim"], max_norm: float) -> Float32[Array, " _"]:
    greatest = jnp.abs(rows).max(axis=-1, initial=0.0)
    units = rows / jnp.where(greatest > 0, greatest, 1.0)[:, None]  # the square of 1e20 would be infinite
    lengths = jnp.sqrt((units * units).sum(axis=-1))
    is_longer = greatest * lengths > max_norm
    return jnp.where(
        is_longer, max_norm / jnp.where(is_longer, lengths, 1.0) / jnp.where(is_longer, greatest, 1.0), 1.0
    )


def _combine_clipped(tables: FrozenTables, parts: Sequence[_Part], rows: Mapping[str, Array]) -> dict[str, Array]:
    """Combines known rows in the order of the kernels.

    Rows are read again with weights that clip them. A store without keys, whose rows read 1, sums weights to divisors.
    """
    bags = [_sum_bags(part, _factors(rows[part.name], part.given.max_norm)) for part in parts]
    divided = [part for part in parts if part.given.combiner != "sum"]
    operands = []
    if divided:
        factors = [part.weights if part.given.combiner == "sqrtn" else None for part in divided]
        ones = [_sum_bags(dataclasses.replace(part, table=0), f) for part, f in zip(divided, factors, strict=True)]
        no_keys = FrozenStore(
            index=jnp.full((1, types.BUCKET_WORDS), jnp.uint32(0xFFFFFFFF)),
            counters=jnp.zeros(len(types.COUNTERS), jnp.uint32),
            rows=jnp.zeros((1, 1), jnp.float32),
        )
        operands.append(_operands(no_keys, _ONES.words[0], ones))
    sums, of_ones, _ = _call(tables, bags, *operands)
    for part, line in zip(divided, itertools.chain(*of_ones), strict=True):
        divisor = jnp.sqrt(line) if part.given.combiner == "sqrtn" else line
        factor = 1.0 / jnp.where(divisor == 0, 1.0, divisor)
        sums[part.name] = jnp.where(divisor != 0, sums[part.name] * factor, 0.0)
    return sums


_ONES = FrozenSpec(((FrozenTable("one", dim=1, default=1.0),),))


def _sum_bags(part: _Part, factors: Any) -> _Part:
    """Describes the input whose bags are sums, by its weights times some factors; None: 1."""
    known = [jnp.asarray(weights) for weights in (factors, part.weights) if weights is not None]
    weights = math.prod(known, start=jnp.ones(part.words.shape[0], jnp.float32))
    return dataclasses.replace(part, combiner="sum", weights=weights, num_bags=part.shape[0])
