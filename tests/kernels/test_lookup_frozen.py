"""The frozen lookup's target: several stores in one call, also rows of 8 bits; the exact bits of kernel_model.py.

The reference is the NumPy model of the kernels, which shares no code with them, over rows that are widened here:
float32(number) * scale. The tests run on the CPU and on CUDA.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import kernel_model
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from kernel_model import BF16, F16, F32, MEAN, PADDING_KEY, SQRTN, SUM
from strategies import CORNER_KEYS

from jaxsok.kernels import lookup
from jaxsok.kernels.call import StoreArrays
from jaxsok.kernels.lookup import FrozenOperands
from jaxsok.serving import quantize

BACK_ENDS = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
INT8, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = (F32, BF16, F16, INT8, FP8)
SEED = np.array([11, 12], np.uint32)


# --------------------------------------------------------------------------------------------------------------
# Stores and batches


@dataclasses.dataclass
class Frozen:
    """A store, and the model's view of it with widened rows."""

    model: kernel_model.Store
    rows: np.ndarray
    scales: np.ndarray | None
    keys: np.ndarray
    """Those that have rows."""
    tables: np.ndarray


def numbers_of(rng, dtype, shape) -> np.ndarray:
    """Returns random numbers of a dtype; for 8 bits all finite codes."""
    if dtype == INT8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    if dtype == FP8:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        return np.where(codes & 0x7F == 0x7F, np.uint8(0x40), codes).view(FP8)
    return rng.standard_normal(shape).astype(dtype)


def frozen_store(rng, dtype, dim, num_tables=2, num_keys=60) -> Frozen:
    """Returns a store three quarters full, with corner keys; equal keys are in several tables."""
    pool = np.concatenate([kernel_model.as_keys(CORNER_KEYS), rng.integers(0, 2**63, num_keys // 2, np.uint64)])
    keys, tables = np.meshgrid(pool, np.arange(num_tables))
    chosen = rng.permutation(keys.size)[:num_keys]
    keys, tables = keys.reshape(-1)[chosen], tables.reshape(-1)[chosen]
    is_quantized = dtype in (INT8, FP8)
    model = kernel_model.Store(
        slabs=(num_keys + 3,),
        dim=dim,
        num_tables=num_tables,
        num_buckets=max(16, num_keys // 3),
        dtype=F32 if is_quantized else dtype,
        embedding_dtype=F32,
    )
    model.find_or_insert(keys, tables, np.ones(len(keys), bool))
    rows, scales = numbers_of(rng, dtype, (model.capacity, dim)), None
    model.rows = rows
    if is_quantized:
        scales = np.exp(rng.uniform(-9, 9, model.capacity)).astype(F32)
        model.rows = rows.astype(F32) * scales[:, None]
    return Frozen(model, rows, scales, keys, tables)


def some_keys(rng, frozen: Frozen, table: int, num: int) -> np.ndarray:
    """Returns keys of one table, of others, of none, and padding; some repeat."""
    of_table = frozen.keys[frozen.tables == table]
    pools = (of_table if len(of_table) else frozen.keys, frozen.keys, rng.integers(2**62, 2**63, 8, np.uint64))
    pools = (*pools, kernel_model.as_keys([PADDING_KEY]))
    which = rng.choice(len(pools), num, p=[0.6, 0.15, 0.15, 0.1])
    return np.array([rng.choice(pools[w]) for w in which], np.uint64)


def weights_of(rng, num: int) -> np.ndarray:
    """Returns weights, some zero, some negative."""
    return (rng.integers(-2, 3, num) + rng.standard_normal(num) * rng.integers(0, 2, num)).astype(F32)


def all_kinds(rng, frozen: Frozen, num_bags=9) -> kernel_model.Batch:
    """Returns single keys, bags of one size and ragged bags, all combiners, weights; tables are read repeatedly."""
    draw, last = functools.partial(some_keys, rng, frozen), frozen.model.num_tables - 1
    num_ragged = 4 * num_bags
    offsets = np.sort(rng.integers(0, num_ragged + 1, num_bags + 1))
    return kernel_model.Batch(
        kernel_model.single(draw(0, num_bags), 0),
        kernel_model.make_fixed(draw(last, 3 * num_bags), last, SUM, 3),
        kernel_model.make_ragged(draw(0, num_ragged), 0, MEAN, offsets),
        kernel_model.single(draw(0, 5), 0),
        kernel_model.make_fixed(draw(last, 2 * num_bags), last, SQRTN, 2, weights_of(rng, 2 * num_bags)),
        kernel_model.make_ragged(draw(last, num_ragged), last, MEAN, offsets, weights_of(rng, num_ragged)),
        kernel_model.single(draw(last, num_bags), last, unknown_zeros=True),
        kernel_model.make_fixed(draw(0, 70), 0, SUM, 70, unknown_zeros=True),
    )


def kinds_of(batch: kernel_model.Batch) -> int:
    """Returns the FeatureKind bits of ffi/core/layout.h."""
    combiners = [f.combiner for f in batch.features]
    return (1 if kernel_model.NONE in combiners else 0) | (2 if any(combiners) else 0)


def words_of(batch: kernel_model.Batch) -> np.ndarray:
    return np.array(batch.words(), np.int32).reshape(-1, 12)


def operands(frozen: Frozen, batch: kernel_model.Batch, words=None) -> FrozenOperands:
    """Returns the door's operands as NumPy arrays."""
    given = batch.operands()
    return FrozenOperands(
        index=frozen.model.index,
        counters=frozen.model.counters,
        tables=frozen.model.tables,
        keys=(given["keys"],),
        bags=(given["offsets"], given["weights"], words_of(batch) if words is None else words),
        rows=frozen.rows,
        scales=frozen.scales,
        host_rows=(),
        embedding_shapes=batch.shapes(frozen.model.dim),
        kinds=kinds_of(batch),
    )


def keys_apart(batch: kernel_model.Batch) -> list[np.ndarray]:
    """Returns the keys of a batch, an array for each feature."""
    return [kernel_model.words(feature.keys) for feature in batch.features]


def device_of(back_end: str):
    return jax.devices("cpu" if back_end == "cpu" else "gpu")[0]


ARRAYS = ("index", "counters", "keys", "bags", "rows", "scales")


def run(stores: list[FrozenOperands], back_end: str = "cpu"):
    """Returns counts, and embeddings by store."""
    arrays = [{name: getattr(store, name) for name in ARRAYS} for store in stores]

    @jax.jit
    def call(arrays, seed):
        return lookup.lookup_frozen([dataclasses.replace(s, **a) for s, a in zip(stores, arrays, strict=True)], seed)

    counts, embeddings = call(*jax.device_put((arrays, SEED), device_of(back_end)))
    return np.asarray(counts), [[np.asarray(array) for array in of_store] for of_store in embeddings]


def assert_bits(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Checks that type, shape and bits are equal."""
    assert got.dtype == want.dtype and got.shape == want.shape, what
    word = f"u{want.dtype.itemsize}"
    if not np.array_equal(got.view(word), want.view(word)):
        np.testing.assert_array_equal(got.astype(F32), want.astype(F32), err_msg=what)
        raise AssertionError(f"{what}: equal numbers, other bits")


def assert_as_model(given: list[tuple[Frozen, kernel_model.Batch]], counts, embeddings) -> None:
    """Checks that the results equal the model's, store by store."""
    want_counts = []
    for s, ((frozen, batch), got) in enumerate(zip(given, embeddings, strict=True)):
        want, of_store = frozen.model.lookup_find(batch)
        want_counts.append(of_store)
        for f, (array, expected) in enumerate(zip(got, want, strict=True)):
            assert_bits(array, expected, f"store {s}, {frozen.rows.dtype}[{frozen.model.dim}], feature {f}")
    np.testing.assert_array_equal(counts, np.concatenate(want_counts))


# --------------------------------------------------------------------------------------------------------------
# Results


@pytest.fixture(scope="module")
def mixed() -> list[tuple[Frozen, kernel_model.Batch]]:
    """Returns stores of all dtypes, twice each, of even and odd dims."""
    rng = np.random.default_rng(1)
    dims = {F32: (16, 7), BF16: (64, 5), F16: (1, 24), INT8: (128, 33), FP8: (20, 9)}
    stores = [frozen_store(rng, dtype, dim, num_tables=3) for dtype in DTYPES for dim in dims[dtype]]
    return [(store, all_kinds(rng, store)) for store in stores]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_mixed(mixed, back_end):
    """Ten stores of five dtypes in one call give the model's bits, with missing keys, padding, weights and all bags."""
    counts, embeddings = run([operands(*store) for store in mixed], back_end)
    assert_as_model(mixed, counts, embeddings)
    assert (counts[:, [kernel_model.FOUND, kernel_model.MISSING, kernel_model.PADDED]].sum(axis=0) > 0).all()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_keys_of_each_feature(mixed, back_end):
    """Keys may come as an array for each feature, of some stores or of all, with the same bits."""
    given = [operands(*store_and_batch) for store_and_batch in mixed]
    apart = [dataclasses.replace(store, keys=keys_apart(batch)) for store, (_, batch) in zip(given, mixed, strict=True)]
    for stores in (apart, [*apart[:1], *given[1:]]):
        assert_as_model(mixed, *run(stores, back_end))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_fused_is_unfused(mixed, back_end):
    """One call for all stores and one per store give the same bits."""
    fused_counts, fused = run([operands(*store) for store in mixed], back_end)
    apart = [run([operands(*store)], back_end) for store in mixed]
    np.testing.assert_array_equal(fused_counts, np.concatenate([counts for counts, _ in apart]))
    for got, (_, (want,)) in zip(fused, apart, strict=True):
        for array, other in zip(got, want, strict=True):
            assert_bits(array, other)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", [np.dtype(F32), BF16, F16], ids=str)
def test_is_find_of_training(dtype, back_end):
    """For rows of floats, frozen lookups give the bits of `lookup_find` (law 8)."""
    rng = np.random.default_rng(2)
    given = []
    for dim in (12, 3):
        store = frozen_store(rng, dtype, dim)
        given.append((store, all_kinds(rng, store)))
    stores = [operands(*store) for store in given]
    counts, embeddings = run(stores, back_end)

    @functools.partial(jax.jit, static_argnums=1)
    def find(arrays, s):
        num_tiles = given[s][1].num_tiles
        batch = (*arrays["keys"], *arrays["bags"][:2], stores[s].bags[2])
        no_table_rows = jnp.zeros(0, jnp.uint32)
        shapes = stores[s].embedding_shapes
        return lookup.lookup_find(
            StoreArrays(arrays["index"], arrays["counters"], no_table_rows, (arrays["rows"],), ()),
            lookup.Reading(stores[s].tables, jnp.asarray(SEED), batch, num_tiles, shapes),
        )

    want_counts = []
    for s, store in enumerate(stores):
        arrays = {name: getattr(store, name) for name in ARRAYS}
        of_store, want = find(jax.device_put(arrays, device_of(back_end)), s)
        want_counts.append(of_store)
        for got, array in zip(embeddings[s], want, strict=True):
            assert_bits(got, np.asarray(array))
    np.testing.assert_array_equal(counts, np.concatenate(want_counts))


EVEN_DIMS = (4, 8, 12, 32, 60, 64, 100, 128, 132, 256, 260, 512, 768, 1000, 1024)
ODD_DIMS = (1, 2, 3, 5, 7, 9, 31, 33, 66, 127, 129, 255, 257, 513, 1022, 1023)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dims", [EVEN_DIMS, ODD_DIMS], ids=["even", "odd"])
def test_dims(dims, back_end):
    """Every shape of lanes, of both dtypes of 8 bits, works in one call."""
    rng = np.random.default_rng(3)
    stores = [frozen_store(rng, dtype, dim, num_keys=20) for dtype in (INT8, FP8) for dim in dims]
    given = [(store, all_kinds(rng, store, num_bags=4)) for store in stores]
    assert_as_model(given, *run([operands(*store) for store in given], back_end))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dim", [256, 255])
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_all_codes(dtype, dim, back_end):
    """All 256 codes work, in every place of a load, as single keys and in bags; NaN stays NaN."""
    model = kernel_model.Store(slabs=(256,), dim=dim, num_buckets=90, dtype=F32)
    keys = kernel_model.as_keys(range(256))
    model.find_or_insert(keys, np.zeros(256, np.int64), np.ones(256, bool))
    codes = (np.arange(256)[:, None] + np.arange(dim)).astype(np.uint8).view(dtype)
    store = Frozen(model, codes, np.ones(256, F32), keys, np.zeros(256, np.int64))
    batch = kernel_model.Batch(
        kernel_model.single(keys), kernel_model.make_fixed(keys, 0, SUM, 1), kernel_model.make_fixed(keys, 0, SUM, 2)
    )
    _, ((rows, sums, pairs),) = run([operands(store, batch)], back_end)
    want = codes.astype(F32)
    assert np.isnan(want).any() == (dtype == FP8)
    for got in (rows, sums):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        assert_bits(np.where(np.isnan(got), F32(0), got), np.where(np.isnan(want), F32(0), want))
    np.testing.assert_array_equal(pairs, want[::2] + want[1::2])


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_one_rounding(back_end):
    """A number times its scale is rounded before a weight multiplies it: weight times scale never comes first."""
    model = kernel_model.Store(slabs=(4,), dim=4, num_buckets=16, dtype=F32)
    keys = kernel_model.as_keys([1])
    model.find_or_insert(keys, np.zeros(1, np.int64), np.ones(1, bool))
    numbers, scales = np.full((4, 4), 113, np.int8), np.full(4, 1 / 3, F32)
    weights = np.random.default_rng(0).standard_normal(50).astype(F32)
    batch = kernel_model.Batch(kernel_model.make_fixed(keys.repeat(50), 0, SUM, 1, weights))
    _, ((got,),) = run([operands(Frozen(model, numbers, scales, keys, np.zeros(1)), batch)], back_end)
    value = F32(113) * scales[0]
    want = weights * value
    assert (want != F32(113) * (weights * scales[0])).any()
    assert_bits(got, np.repeat(want[:, None], 4, axis=1))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_default_is_not_rounded(back_end):
    """A missing key reads its table's constant unchanged, whatever the rows are."""
    rng = np.random.default_rng(4)
    default = F32(0.123456789)
    stores = []
    for dtype in (INT8, FP8):
        store = frozen_store(rng, dtype, 6, num_tables=1)
        store.model.tables[0, 2:5] = kernel_model.CONSTANT, default.view(np.uint32), 0
        stores.append(store)
    missing = kernel_model.as_keys([77, 78, 79])
    batch = kernel_model.Batch(kernel_model.single(missing), kernel_model.make_fixed(missing, 0, MEAN, 1))
    counts, embeddings = run([operands(store, batch) for store in stores], back_end)
    for of_store in embeddings:
        for array in of_store:
            assert_bits(array, np.full((3, 6), default))
    np.testing.assert_array_equal(counts[:, kernel_model.MISSING], [6, 6])


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_hundred_tables(back_end):
    """One store has 100 tables with a feature each, and another store is not read."""
    rng = np.random.default_rng(5)
    store, idle = frozen_store(rng, F32, 16, num_tables=100, num_keys=900), frozen_store(rng, INT8, 8)
    batch = kernel_model.Batch(*(kernel_model.single(some_keys(rng, store, t, 13), t) for t in range(100)))
    given = [(idle, kernel_model.Batch()), (store, batch)]
    counts, embeddings = run([operands(*store) for store in given], back_end)
    assert_as_model(given, counts, embeddings)
    assert not counts[:2].any() and (counts[2:].sum(axis=1) == 13).all()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", [F32, INT8], ids=["float32", "int8"])
def test_many_tiles(dtype, back_end):
    """Features may have several tiles, or no whole tile."""
    rng = np.random.default_rng(6)
    store = frozen_store(rng, dtype, 8)
    draw = functools.partial(some_keys, rng, store)
    batch = kernel_model.Batch(
        kernel_model.single(draw(0, 600), 0),
        kernel_model.make_fixed(draw(1, 1030), 1, SUM, 2),
        kernel_model.single(draw(1, 1), 1),
        kernel_model.make_ragged(draw(0, 900), 0, MEAN, np.sort(rng.integers(0, 901, 258))),
        kernel_model.single(draw(1, 256), 1),
    )
    assert_as_model([(store, batch)], *run([operands(store, batch)], back_end))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("has_tiles", [False, True], ids=["no tiles of empty features", "a tile each"])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_empty_features(dtype, has_tiles, back_end):
    """Features may have no keys, no bags, or only empty bags, under both rules of tile starts."""
    rng = np.random.default_rng(7)
    store = frozen_store(rng, dtype, 12)
    draw, none = functools.partial(some_keys, rng, store), np.zeros(0, np.uint64)
    batch = kernel_model.Batch(
        kernel_model.single(none, 0),
        kernel_model.make_ragged(draw(0, 700), 0, SUM, [0]),  # keys without any bag: padding
        kernel_model.single(draw(1, 300), 1),
        kernel_model.single(none, 1),
        kernel_model.make_ragged(draw(1, 20), 1, MEAN, [5] * 8),  # empty bags
        kernel_model.make_fixed(none, 0, SUM, 3),
        kernel_model.make_ragged(draw(0, 900), 0, SUM, [300, 310, 310, 600]),
        kernel_model.single(none, 0),
        kernel_model.make_fixed(none, 1, SUM, 2),
    )
    words = words_of(batch)
    if has_tiles:
        tiles = [max(1, -(-f.num_bags // kernel_model.BAGS_PER_TILE)) for f in batch.features]
        words[:, 9] = np.cumsum([0, *tiles])[:-1]
    counts, embeddings = run([operands(store, batch, words=words)], back_end)
    assert_as_model([(store, batch)], counts, embeddings)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_empty_batch(back_end):
    """A batch may have no keys at all."""
    rng = np.random.default_rng(8)
    store, none = frozen_store(rng, INT8, 4), np.zeros(0, np.uint64)
    for features in (
        (),
        (kernel_model.single(none),),
        (kernel_model.single(none, 1), kernel_model.make_ragged(none, 0, SUM, [0, 0, 0])),
    ):
        given = [(store, kernel_model.Batch(*features))]
        assert_as_model(given, *run([operands(*store) for store in given], back_end))


@functools.cache
def draw_store(dtype) -> Frozen:
    return frozen_store(np.random.default_rng(9), dtype, 6, num_tables=2)


@functools.cache
def compile_call(back_end: str):
    """Returns one compilation for all examples: features, offsets and weights are operands."""
    stores = [draw_store(INT8), draw_store(FP8)]

    @jax.jit
    def call(batches, seed):
        given = []
        for store, batch in zip(stores, batches, strict=True):
            operand = operands(store, kernel_model.Batch())
            shapes = [(6, 6), (6, 6), (4, 6)]
            keys, *bags = batch
            read = {"keys": keys, "bags": tuple(bags)}
            given.append(dataclasses.replace(operand, **read, embedding_shapes=shapes, kinds=3))
        return lookup.lookup_frozen(given, seed)

    return lambda batches: call(*jax.device_put((batches, SEED), device_of(back_end)))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@hypothesis.given(data=st.data())
def test_any_batch(back_end, data):
    """Any keys, offsets, weights, combiners and tables give the model's bits."""
    given, batches = [], []
    for dtype, are_apart in ((INT8, False), (FP8, True)):
        store = draw_store(dtype)
        key = st.sampled_from((*store.keys.tolist()[:12], 2**62 + 1, 2**62 + 2, PADDING_KEY))

        def draw(num, key=key):
            return kernel_model.as_keys(data.draw(st.lists(key, min_size=num, max_size=num)))

        table, combiner = st.integers(0, 1), st.sampled_from((SUM, MEAN, SQRTN))
        offsets = np.sort(data.draw(st.lists(st.integers(-1, 13), min_size=5, max_size=5)))
        weights = np.array(data.draw(st.lists(st.sampled_from((-1.5, 0.0, 0.3, 1.0)), min_size=12, max_size=12)), F32)
        batch = kernel_model.Batch(
            kernel_model.single(draw(6), data.draw(table)),
            kernel_model.make_fixed(draw(12), data.draw(table), data.draw(combiner), 2, np.abs(weights)),
            kernel_model.make_ragged(draw(12), data.draw(table), SUM, offsets, weights),
        )
        given.append((store, batch))
        parts = batch.operands()
        keys = keys_apart(batch) if are_apart else (parts["keys"],)
        batches.append((keys, parts["offsets"], parts["weights"], words_of(batch)))
    counts, embeddings = compile_call(back_end)(batches)
    assert_as_model(given, np.asarray(counts), [[np.asarray(array) for array in of_store] for of_store in embeddings])


# --------------------------------------------------------------------------------------------------------------
# Programs of any batch size


def test_symbolic_batch():
    """One exported program serves batches of every size, on both platforms; it computes the features inside."""
    rng = np.random.default_rng(10)
    stores = [frozen_store(rng, dtype, 8, num_tables=2) for dtype in (BF16, INT8)]
    held = [operands(store, kernel_model.Batch()) for store in stores]

    def call(keys, bags, arrays):
        given = []
        for number, (store, array) in enumerate(zip(held, arrays, strict=True)):
            b, h = bags.shape[:2]
            tiles = jax.core.max_dim((b + 255) // 256, 1)
            #       table combiner key_start num_keys bag_start num_bags hotness offsets weights tile_start
            lines = [[0, 0, 0, b, 0, b, 1, 0, -1, 0, 0, 0], [1, MEAN, b, b * h, b, b, h, 0, -1, tiles, 0, 0]]
            words = jnp.stack([jnp.stack([jnp.asarray(w, jnp.int32) for w in line]) for line in lines])
            of_features = (keys, bags.reshape(-1, 2))
            read = {
                "keys": of_features if number == 0 else (jnp.concatenate(of_features),),
                "bags": (jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32), words),
            }
            shapes = [(b, 8), (b, 8)]
            given.append(dataclasses.replace(store, **array, **read, embedding_shapes=shapes, kinds=3))
        return lookup.lookup_frozen(given, jnp.asarray(SEED))

    arrays = [{name: getattr(s, name) for name in ARRAYS if name not in ("keys", "bags")} for s in held]
    b, h = jax.export.symbolic_shape("b, h")
    shapes = [jax.ShapeDtypeStruct(shape, np.uint32) for shape in ((b, 2), (b, h, 2))]
    exported = jax.export.export(
        jax.jit(call),
        platforms=["cpu", "cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxsok_lookup_frozen")],
    )(*shapes, arrays)
    served = jax.jit(jax.export.deserialize(exported.serialize()).call)
    for num, hotness in ((1, 1), (7, 3), (300, 2)):
        keys, bags = some_keys(rng, stores[0], 0, num), some_keys(rng, stores[1], 1, num * hotness)
        batch = kernel_model.Batch(kernel_model.single(keys, 0), kernel_model.make_fixed(bags, 1, MEAN, hotness))
        given = [(store, batch) for store in stores]
        words = kernel_model.words(bags).reshape(num, hotness, 2)
        counts, embeddings = served(*jax.device_put((kernel_model.words(keys), words, arrays)))
        assert_as_model(given, np.asarray(counts), [[np.asarray(array) for array in s] for s in embeddings])


# --------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture(scope="module")
def one_store() -> tuple[FrozenOperands, FrozenOperands]:
    """Returns operands with float rows, and with rows of 8 bits."""
    rng = np.random.default_rng(11)
    floats, quantized = (frozen_store(rng, dtype, 4) for dtype in (BF16, INT8))
    batch = kernel_model.Batch(kernel_model.single(some_keys(rng, floats, 0, 5)))
    return operands(floats, batch), operands(quantized, batch)


def test_keys_go_with_features(one_store):
    """There is an array for each feature, as long as the feature says."""
    floats, _ = one_store
    (keys,) = floats.keys
    with pytest.raises(jax.errors.JaxRuntimeError, match="features: got 1, wanted 2, one for each array of keys"):
        run([dataclasses.replace(floats, keys=[keys, keys])])
    words = np.repeat(floats.bags[2], 2, axis=0)
    words[1, 2] = words[1, 4] = len(keys)
    bags, shapes = (*floats.bags[:2], words), [*floats.embedding_shapes] * 2
    two = dataclasses.replace(floats, keys=[keys, keys[1:]], bags=bags, embedding_shapes=shapes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="keys: got 4 of feature 1, wanted 5"):
        run([two])
    words[1, 2] = 10**6
    beyond = dataclasses.replace(two, keys=[keys, keys], bags=(*floats.bags[:2], words))
    with pytest.raises(jax.errors.JaxRuntimeError, match="features: lines do not lie one after the other"):
        run([beyond])
    with pytest.raises(ValueError, match="keys: got 65 arrays, wanted at most 64; join them"):
        run([dataclasses.replace(floats, keys=[keys] * 65)])


def test_scales_go_with_rows(one_store):
    """Rows of 8 bits need scales, other rows have none."""
    floats, quantized = one_store
    scales = np.ones(len(floats.rows), F32)
    with pytest.raises(ValueError, match=r"stores\[1\]: scales: got None, wanted float32\[capacity\] for rows of int8"):
        run([floats, dataclasses.replace(quantized, scales=None)])
    with pytest.raises(ValueError, match=r"stores\[0\]: scales: got an array of shape .*wanted None .*bfloat16"):
        run([dataclasses.replace(floats, scales=scales)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="lookup_frozen: scales: got shape"):
        run([dataclasses.replace(quantized, scales=quantized.scales[1:])])


def test_rows_of_other_dtypes(one_store):
    """Dtypes that rows cannot have are refused."""
    floats, _ = one_store
    rows = floats.rows.astype(np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows: wanted float32, bfloat16, float16, int8 or float8_e4"):
        run([dataclasses.replace(floats, rows=rows)])


@pytest.mark.parametrize("number", [0, 1])
def test_lines_that_features_contradict(one_store, number):
    """On the CPU, whose words the host can read, no memory beyond an embedding is written."""
    store = one_store[number]
    short = dataclasses.replace(store, embedding_shapes=[(4, 4)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="another number of bags than the embedding has lines"):
        run([short])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the last axis is not that of the rows"):
        run([dataclasses.replace(store, embedding_shapes=[(5, 3)])])


# --------------------------------------------------------------------------------------------------------------
# Rows from quantize.py


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_lookups_stay_within_the_bound(dtype, back_end):
    """The result equals `dequantized` to the bit, and is as close to the row as the oracle's bound."""
    rng = np.random.default_rng(12)
    store = frozen_store(rng, F32, 24, num_tables=1)
    rows = (rng.standard_normal(store.rows.shape) * np.exp(rng.uniform(-9, 9, (len(store.rows), 1)))).astype(F32)
    numbers, scales = quantize.quantize_rows(rows, dtype)
    frozen = dataclasses.replace(store, rows=numbers, scales=scales)
    batch = kernel_model.Batch(kernel_model.single(store.keys))
    _, ((got,),) = run([operands(frozen, batch)], back_end)
    ids = store.model.find(store.keys, store.tables)
    assert_bits(got, quantize.dequantize_rows(numbers, scales)[ids])
    bound = oracle.quantization_error_bound(dtype, np.abs(rows).max(axis=1)[:, None], rows)[ids]
    assert (np.abs(got.astype(np.float64) - rows[ids]) <= bound).all()
