"""Frozen tables and their row map, against dicts; frozen lookups against NumPy and against training (law 8)."""

import dataclasses
import functools
import inspect
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import strategies
from hypothesis import stateful
from serving_cases import ASKED, INITIALIZERS, KNOWN, TRACED, UNKNOWN_DIM, declare_untrained, find_in_training

import jaxsok
from jaxsok import Records, keys
from jaxsok.serving import frozen, row_map
from jaxsok.serving.errors import RequestError, UnknownTableError
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze, freeze_records
from jaxsok.serving.fused import LookupInput, find_rows, lookup, lookup_with_counts
from jaxsok.serving.row_map import SALT, RowMap
from jaxsok.types import COUNTS, NO_ROW, PADDING_KEY

SEED = np.random.default_rng(7)


# Row maps ------------------------------------------------------------------------------------------------------------


class Machine(stateful.RuleBasedStateMachine):
    """A state machine over two tables of few keys in a small store, compared with a dict."""

    def __init__(self):
        super().__init__()
        self.map = RowMap(num_tables=2, capacity=12)
        self.rows = {}
        self.capacity = 12

    some_keys = st.lists(st.integers(0, 20), max_size=10)
    tables = st.integers(0, 1)

    @stateful.rule(table=tables, given=some_keys)
    def place(self, table, given):
        given = np.array(given, np.uint64)
        new = {(table, int(key)) for key in given} - set(self.rows)
        if len(new) > self.capacity - len(self.rows):
            with pytest.raises(ValueError, match="rows that are free"):
                self.map.place(table, given)
            return
        for key, row in zip(given.tolist(), self.map.place(table, given).tolist(), strict=True):
            assert self.rows.setdefault((table, key), row) == row
        assert len(set(self.rows.values())) == len(self.rows)
        assert all(row < self.capacity for row in self.rows.values())

    @stateful.rule(table=tables, given=some_keys)
    def remove(self, table, given):
        gone = {(table, key) for key in given} & set(self.rows)
        assert self.map.remove(table, np.array(given, np.uint64)) == len(gone)
        for pair in gone:
            del self.rows[pair]

    @stateful.rule(more=st.integers(0, 3))
    def grow(self, more):
        self.capacity += more
        self.map.grow(self.capacity)

    @stateful.rule()
    def copy(self):
        old, self.map = self.map, self.map.copy()
        old.remove(0, np.arange(21, dtype=np.uint64))  # The copy keeps its rows.

    @stateful.invariant()
    def agrees(self):
        for table in (0, 1):
            wanted = [self.rows.get((table, key), NO_ROW) for key in range(21)]
            assert self.map.find(table, np.arange(21, dtype=np.uint64)).tolist() == wanted
            named, rows = self.map.keys_of(table)
            assert {(table, int(key)): int(row) for key, row in zip(named, rows, strict=True)} == {
                pair: row for pair, row in self.rows.items() if pair[0] == table
            }
        assert self.map.table_rows.tolist() == [sum(pair[0] == table for pair in self.rows) for table in (0, 1)]


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis.settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_padding_has_no_row():
    """PADDING_KEY is never inserted."""
    rows = RowMap(num_tables=1, capacity=2)
    assert rows.place(0, np.array([PADDING_KEY, 5], np.uint64)).tolist() == [NO_ROW, 0]
    assert rows.find(0, np.array([PADDING_KEY], np.uint64)).tolist() == [NO_ROW]


def test_aimed_keys_get_another_salt():
    """A map takes a new salt when more keys belong into one bucket than the kernels probe."""
    rows = RowMap(num_tables=1, capacity=4096)
    salt = int(np.asarray(rows.index(jax.devices()[0])[1])[SALT].view(np.uint64)[0])
    candidates = np.arange(1, 1_000_000, dtype=np.uint64)
    words = keys.to_words(candidates)
    home = strategies.home_bucket(words, np.zeros(len(candidates), np.uint32), salt, rows.num_buckets)
    aimed = candidates[home < 1][:600]
    assert len(aimed) > 4 * 64
    before = rows.num_buckets
    placed = rows.place(0, aimed)
    assert sorted(placed.tolist()) == list(range(len(aimed)))
    assert rows.find(0, aimed).tolist() == placed.tolist()
    assert rows.num_buckets > before


def test_an_index_that_was_given_out_stays():
    """Later updates of the map do not change the index that an earlier version reads."""
    rows = RowMap(num_tables=1, capacity=8)
    rows.place(0, np.array([3], np.uint64))
    index, counters = rows.index(jax.devices()[0])
    before = np.array(index)
    rows.place(0, np.arange(10, 14, dtype=np.uint64))
    rows.remove(0, np.array([3], np.uint64))
    assert (np.asarray(index) == before).all()
    assert np.asarray(counters).shape == (len(jaxsok.types.COUNTERS),)


@pytest.mark.parametrize("num_changed", [0, 1, 30, 300, 2000])
def test_the_index_of_the_next_version(num_changed, monkeypatch):
    """The next index on a device equals the map's, whether changed buckets or all of them are sent; the old one stays.

    Few changes send few buckets, and a map of another size or salt all of them.
    """
    monkeypatch.setattr(row_map, "BUCKETS_AT_A_TIME", 20)
    old, rng = RowMap(num_tables=2, capacity=3000), np.random.default_rng(num_changed)
    held = rng.choice(10**6, 2500, replace=False).astype(np.uint64)
    for table, some in enumerate((held[:1500], held[1500:])):
        old.place(table, some)
    index, _ = old.index(jax.devices()[0])
    before, new = np.array(index), old.copy()
    new.remove(0, held[:num_changed])
    new.place(1, np.arange(10**6, 10**6 + num_changed, dtype=np.uint64))
    wanted = [np.array(array) for array in new.index(jax.devices()[0])]
    sent, index_of = [], RowMap.index
    monkeypatch.setattr(RowMap, "index", lambda *arguments: (sent.append("all"), index_of(*arguments))[1])
    monkeypatch.setattr(
        row_map, "_set_buckets", lambda *a, real=row_map._set_buckets: (sent.append("some"), real(*a))[1]
    )
    for found, words in zip(new.next_index(old, index), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(found), words)
    np.testing.assert_array_equal(np.asarray(index), before)
    num_different = (before != wanted[0]).any(axis=1).sum()
    assert sent == (["some"] * -(-num_different // 20) if num_different <= len(before) // 4 else ["all"])
    for other in (RowMap(num_tables=2, capacity=3000), RowMap(num_tables=2, capacity=5000)):
        np.testing.assert_array_equal(np.asarray(other.next_index(old, index)[0]), np.asarray(index_of(other, None)[0]))


# Frozen tables -------------------------------------------------------------------------------------------------------


def numbers(*shape):
    return SEED.normal(size=shape).astype(np.float32)


def frozen_of(tables, contents, **kwargs):
    """Freezes dicts from key to row."""
    sources = []
    for table in tables:
        content = contents[table.name]
        rows = np.array(list(content.values()), np.float32).reshape(-1, table.dim)
        sources.append((table, SizedRecords(len(content), [Records(np.array(list(content), np.uint64), rows)])))
    return freeze_records(sources, **kwargs)


def test_bytes_are_as_counted():
    """`frozen_bytes` equals the bytes that are allocated."""
    tables = [FrozenTable("a", 8), FrozenTable("b", 8, dtype="bfloat16"), FrozenTable("c", 6, dtype="float16")]
    made, _ = frozen_of(
        tables, {name: {k: numbers(d) for k in range(50)} for name, d in (("a", 8), ("b", 8), ("c", 6))}
    )
    for store, (table,) in zip(made.stores, made.spec.stores, strict=True):
        counted = frozen.frozen_bytes(table, 50)
        assert store.rows.nbytes == counted["rows"]
        assert store.index.nbytes == counted["index"]
        assert sum(scale.nbytes for scale in store.scales) == counted["scales"]
    assert row_map.buckets_of(10**6) * 64 < 25 * 10**6  # 32 in training.


def test_a_later_row_of_a_key_counts():
    """The last row of a key counts, within a chunk and among chunks."""
    first = Records(np.array([1, 2, 1], np.uint64), np.array([[1.0], [2.0], [3.0]], np.float32))
    second = Records(np.array([2], np.uint64), np.array([[4.0]], np.float32))
    tables, _ = freeze_records([(FrozenTable("a", 1), SizedRecords(4, [first, second]))])
    assert np.asarray(lookup(tables, {"a": np.array([1, 2])})["a"]).tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a", "dim": 0}, r'FrozenTable "a": dim: got 0, wanted 1 to 1024'),
        ({"name": "a", "dim": 4, "dtype": "int4"}, r"dtype: got 'int4'"),
        ({"name": "a", "dim": 4, "default": float("nan")}, r"default: got nan"),
        ({"name": "", "dim": 4}, r"name: got ''"),
        ({"name": "a", "dim": True}, r"dim: got True"),
    ],
)
def test_tables_that_cannot_be(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FrozenTable(**arguments)


def test_records_that_do_not_fit():
    """Records with wrong dims, no tables, or two tables of one name are refused."""
    records = SizedRecords(1, [Records(np.array([1], np.uint64), np.zeros((1, 3), np.float32))])
    with pytest.raises(ValueError, match=r'table "a": rows: got shape \[1, 3\], wanted \[1, 4\]'):
        freeze_records([(FrozenTable("a", 4), records)])
    with pytest.raises(ValueError, match="got no tables"):
        freeze_records([])
    with pytest.raises(ValueError, match='got "a" more than once'):
        freeze_records([(FrozenTable("a", 3), records), (FrozenTable("a", 3), records)])


# Lookups -------------------------------------------------------------------------------------------------------------

FEATURES = [
    jaxsok.FeatureSpec("rows", table="a", combiner=None),
    jaxsok.FeatureSpec("sum", table="b", combiner="sum"),
    jaxsok.FeatureSpec("mean", table="a", combiner="mean"),
    jaxsok.FeatureSpec("weighted", table="c", combiner="sqrtn", weighted=True),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_equals_training(dtype):
    """Frozen lookups have the bits of training (law 8): all combiners, mixed dims, ragged bags, weights."""
    specs = [
        jaxsok.TableSpec(name, dim, jaxsok.optim.adagrad(0.1), dtype=dtype, embedding_dtype="float32", capacity=256)
        for name, dim in (("a", 8), ("b", 8), ("c", 5))
    ]
    collection = jaxsok.Collection(specs, FEATURES)
    num_samples = 33
    offsets = np.full(num_samples + 1, 40)  # The last bags are empty.
    offsets[:4] = [0, 3, 3, 10]
    raw = {
        "rows": SEED.integers(0, 60, num_samples),
        "sum": SEED.integers(0, 60, (num_samples, 4)),
        "mean": jaxsok.Bags(SEED.integers(0, 60, 40), offsets=offsets),
        "weighted": jaxsok.Bags(SEED.integers(0, 60, 40), offsets=offsets, weights=numbers(40)),
    }
    batch = collection.batch(raw)
    embeddings, state, plan = collection.lookup(collection.init(seed=3), batch.features)
    state, _ = collection.update(state, plan, embeddings)
    wanted, _ = collection.find(state, batch.features)
    tables = freeze(collection, state)
    given = {
        "rows": LookupInput("a", raw["rows"]),
        "sum": LookupInput("b", raw["sum"], combiner="sum"),
        "mean": LookupInput("a", raw["mean"].keys, combiner="mean", offsets=offsets),
        "weighted": LookupInput(
            "c", raw["weighted"].keys, combiner="sqrtn", offsets=offsets, weights=raw["weighted"].weights
        ),
    }
    got = lookup(tables, given)
    jitted = jax.jit(lookup)(tables, jax.tree.map(jnp.asarray, _as_words(given)))
    for name, value in wanted.items():
        assert np.array_equal(np.asarray(got[name]), np.asarray(value)), name
        assert np.array_equal(np.asarray(jitted[name]), np.asarray(value)), name
    alone = {name: lookup(tables, {name: lookup_input})[name] for name, lookup_input in given.items()}
    for name in given:
        assert np.array_equal(np.asarray(alone[name]), np.asarray(got[name])), name


def _as_words(inputs):
    """Returns keys in the form that passes a jit boundary."""
    import dataclasses

    return {
        name: dataclasses.replace(lookup_input, keys=keys.to_words(lookup_input.keys))
        for name, lookup_input in inputs.items()
    }


def test_what_keys_read():
    """Lookups agree with dicts: missing keys, padding, equal keys of two tables, tables with several or no inputs."""
    tables = [FrozenTable("a", 2, default=0.5), FrozenTable("b", 2, default=-1.0), FrozenTable("c", 3)]
    contents = {name: {key: numbers(dim) for key in range(0, 40, 2)} for name, dim in (("a", 2), ("b", 2), ("c", 3))}
    made, _ = frozen_of(tables, contents, spare_rows=3)
    asked = {"x": ("a", SEED.integers(0, 44, (4, 3))), "y": ("b", SEED.integers(0, 44, 9)), "z": ("a", np.arange(5))}
    got, counts = lookup_with_counts(made, {name: LookupInput(*words) for name, words in asked.items()})
    default = {"a": 0.5, "b": -1.0}
    for name, (table, given) in asked.items():
        wanted = [contents[table].get(int(key), np.full(2, default[table], np.float32)) for key in given.reshape(-1)]
        assert np.array_equal(np.asarray(got[name]), np.array(wanted).reshape(*given.shape, 2))
    counts = dict(zip(made.tables, np.asarray(counts), strict=True))
    for name in "ab":
        given = np.concatenate([words.reshape(-1) for table, words in asked.values() if table == name])
        found = sum(int(key) in contents[name] for key in given)
        assert counts[name][COUNTS.index("num_found")] == found
        assert counts[name][COUNTS.index("num_missing")] == len(given) - found
    assert counts["c"].sum() == 0
    padded = lookup(made, {"a": np.array([0, -1])})["a"]
    assert np.asarray(padded)[1].tolist() == [0.0, 0.0]


def _by_hand(content, bags, combiner, max_norm, default, weights):
    """Computes a bag by hand, in float64."""
    out, at = [], 0
    for bag in bags:
        total, divisor = np.zeros(3), 0.0
        for key in bag:
            row = np.array(content.get(int(key), np.full(3, default)), np.float64)
            norm = np.sqrt((row**2).sum())
            if max_norm is not None and norm > max_norm:
                row = row * max_norm / norm
            weight = 1.0 if weights is None else float(weights[at])
            total, at = total + weight * row, at + 1
            divisor += weight**2 if combiner == "sqrtn" else weight
        divisor = {"sum": 1.0, "mean": divisor, "sqrtn": np.sqrt(divisor)}[combiner]
        out.append(total / divisor if len(bag) and divisor else np.zeros(3))
    return np.array(out)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.1, 10.0])
def test_max_norm_and_combiners(combiner, max_norm):
    """`max_norm` and combiners follow `tf.nn.embedding_lookup_sparse`, worked out by hand, also for empty bags."""
    content = {key: numbers(3) for key in range(10)}
    made, _ = frozen_of([FrozenTable("a", 3, default=0.25)], {"a": content})
    bags = [[1, 1, 2], [], [99], [3, 4, 5, 6]]
    flat = np.array([key for bag in bags for key in bag], np.int64)
    offsets = np.cumsum([0, *map(len, bags)])
    for weights in (None, np.abs(numbers(len(flat)))):
        given = LookupInput("a", flat, combiner=combiner, offsets=offsets, weights=weights, max_norm=max_norm)
        wanted = _by_hand(content, bags, combiner, max_norm, 0.25, weights)
        np.testing.assert_allclose(np.asarray(lookup(made, {"x": given})["x"]), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1.0, 1e19, 1e37])
def test_max_norm_of_rows_of_any_size(size):
    """The squares of their numbers may be infinite, or zero."""
    made, _ = frozen_of([FrozenTable("a", 2)], {"a": {1: np.array([3 * size, 4 * size], np.float32)}})
    for combiner in (None, "sum"):
        for max_norm, length in ((size / 8, size / 8), (6 * size, 5 * size)):
            keys = np.array([1], np.int64)
            given = LookupInput("a", keys if combiner is None else keys[:, None], combiner=combiner, max_norm=max_norm)
            found = np.asarray(lookup(made, {"x": given})["x"], np.float64)
            np.testing.assert_allclose(found, [[0.6 * length, 0.8 * length]], rtol=2e-6)


def test_a_hundred_tables():
    """One fused lookup reads 100 tables x 10,000 keys x 16 floats, HPS's published integration case."""
    contents = [(np.arange(n, n + 10_000, dtype=np.uint64) * 7, numbers(10_000, 16)) for n in range(100)]
    sources = [
        (FrozenTable(f"t{n}", 16), SizedRecords(10_000, [Records(*content)])) for n, content in enumerate(contents)
    ]
    tables, _ = freeze_records(sources)
    picks = SEED.integers(0, 10_000, (100, 64))
    got = jax.jit(lookup)(
        tables,
        {f"t{n}": LookupInput(f"t{n}", keys.to_words(contents[n][0][picks[n]])) for n in range(100)},
    )
    for n, (_, rows) in enumerate(contents):
        assert np.array_equal(np.asarray(got[f"t{n}"]), rows[picks[n]])


def test_find_rows():
    """`find_rows` returns rows and whether they are there."""
    made, _ = frozen_of([FrozenTable("a", 2, default=3.0)], {"a": {7: [1.0, 2.0]}})
    rows, found = find_rows(made, "a", np.array([7, 8, -1]))
    assert np.asarray(rows).tolist() == [[1.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    assert np.asarray(found).tolist() == [True, False, False]


@pytest.mark.parametrize("size", [1, 2, 300])
def test_symbolic_batch(size):
    """One exported program serves every batch size, with the tables as arguments."""
    made, _ = frozen_of(
        [FrozenTable("a", 2), FrozenTable("b", 3)],
        {"a": {key: numbers(2) for key in range(50)}, "b": {key: numbers(3) for key in range(50)}},
    )

    leaves, structure = jax.tree.flatten(made)

    def model(leaves, single, bags):
        tables = jax.tree.unflatten(structure, leaves)
        return lookup(tables, {"single": LookupInput("a", single), "bags": LookupInput("b", bags, combiner="mean")})

    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    word = jnp.uint32
    exported = jax.export.export(
        jax.jit(model),
        platforms=["cpu", "cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxsok_lookup_frozen")],
    )(shapes, jax.ShapeDtypeStruct((batch, 2), word), jax.ShapeDtypeStruct((batch, 4, 2), word))
    again = jax.export.deserialize(exported.serialize())
    single, bags = SEED.integers(0, 60, size), SEED.integers(0, 60, (size, 4))
    got = again.call(leaves, keys.to_words(single), keys.to_words(bags))
    wanted = lookup(made, {"single": LookupInput("a", single), "bags": LookupInput("b", bags, combiner="mean")})
    for name, value in wanted.items():
        assert np.array_equal(np.asarray(got[name]), np.asarray(value))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (LookupInput("z", np.arange(2)), UnknownTableError, r"table: got 'z', wanted one of \['a'\]"),
        (LookupInput("a", np.arange(2.0)), RequestError, "keys must be integers"),
        (LookupInput("a", np.arange(2), combiner="max"), RequestError, "combiner: got 'max'"),
        (LookupInput("a", np.arange(2), offsets=np.array([0, 2])), RequestError, "offsets: got some without"),
        (LookupInput("a", np.arange(2), weights=np.ones(2)), RequestError, "weights: got some without"),
        (LookupInput("a", np.arange(2), combiner="sum", weights=np.ones(3)), RequestError, r"wanted that of the keys"),
        (LookupInput("a", np.arange(2), combiner="sum", offsets=np.array([0, 3])), RequestError, "past the end"),
        (LookupInput("a", np.zeros((2, 0), int), combiner="sum"), RequestError, "at least one column"),
        (LookupInput("a", np.zeros((2, 2, 2), int), combiner="sum"), RequestError, "wanted .num_bags."),
        (LookupInput("a", np.arange(2), max_norm=-1.0), RequestError, "max_norm: got -1.0"),
        (LookupInput("a", jaxsok.Bags(np.arange(2))), RequestError, "Bags without a combiner"),
        (LookupInput("a", jaxsok.Bags(np.arange(2), inverse=np.arange(2)), "sum"), RequestError, "inverse: got one"),
    ],
)
def test_requests_that_cannot_be(given, kind, message):
    made, _ = frozen_of([FrozenTable("a", 2)], {"a": {7: [1.0, 2.0]}})
    with pytest.raises(kind, match=message):
        lookup(made, {"x": given})


def test_bags_have_their_own_weights():
    made, _ = frozen_of([FrozenTable("a", 1)], {"a": {7: [1.0], 9: [2.0]}})
    bags = jaxsok.Bags(np.array([7, 9, 7]), lengths=np.array([2, 1]), weights=np.array([1.0, 10.0, 100.0], np.float32))
    assert lookup(made, {"x": LookupInput("a", bags, "sum")})["x"].tolist() == [[21.0], [100.0]]


# Keys without a row: serving reads what `find` reads -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_missing_keys_read_what_find_reads(dtype):
    """Missing keys read what `find` reads, to the bit: every initializer, both values of `unknown`, also in bags."""
    collection, state = declare_untrained(dtype)
    wanted = find_in_training(collection, state)
    tables = freeze(collection, state)
    served = lookup(tables, {name: ASKED for name in wanted})
    bags = lookup(tables, {name: LookupInput(name, ASKED.reshape(2, 4), "sum") for name in wanted})
    for name, rows in wanted.items():
        np.testing.assert_array_equal(np.asarray(served[name]), rows, err_msg=name)
        sums = [functools.reduce(np.add, some) for some in rows.reshape(2, 4, -1)]
        np.testing.assert_allclose(np.asarray(bags[name]), sums, rtol=1e-6, err_msg=name)
        rows_found, is_found = find_rows(tables, name, ASKED)
        np.testing.assert_array_equal(np.asarray(rows_found), rows)
        assert np.asarray(is_found).tolist() == np.isin(ASKED, KNOWN).tolist()
    assert len({rows[1].tobytes() for rows in wanted.values()}) >= 7  # The initializers differ.


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_constant_keeps_the_rounding_of_training(dtype):
    """Rows of bfloat16 that are served in another dtype keep their rounding: 0.3 is read as bfloat16 holds it."""
    collection, state = declare_untrained("bfloat16")
    served = lookup(freeze(collection, state, tables=["constant"], dtype=dtype), {"constant": np.array([5])})
    wanted = find_in_training(collection, state, np.array([5]))["constant"]
    np.testing.assert_array_equal(np.asarray(served["constant"]), wanted)
    assert wanted[0, 0] != np.float32(0.3)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_missing_keys_of_quantized_tables_read_what_find_reads(dtype):
    """Missing keys of quantized tables read the bits of `find`: initial rows are not quantized."""
    collection, state = declare_untrained()
    wanted = find_in_training(collection, state)
    served = lookup(freeze(collection, state, dtype=dtype), {name: ASKED for name in wanted})
    is_missing = ~np.isin(ASKED, KNOWN)
    for name, rows in wanted.items():
        np.testing.assert_array_equal(np.asarray(served[name])[is_missing], rows[is_missing], err_msg=name)


def test_tables_of_several_seeds_are_served_together():
    """Each table keeps its own seed when one call looks up several tables."""
    wanted, sources = {}, []
    for number, seed in enumerate((0, 1, 2**64 - 1)):
        collection, state = declare_untrained(seed=seed)
        wanted[f"item{number}"] = find_in_training(collection, state)["normal"]
        table = freeze(collection, state, tables=["normal"]).tables["normal"]
        sources.append((dataclasses.replace(table, name=f"item{number}"), SizedRecords(0, [])))
    tables, _ = freeze_records(sources)
    served = lookup(tables, {name: ASKED for name in wanted})
    is_missing = ~np.isin(ASKED, KNOWN)
    for name, rows in wanted.items():
        np.testing.assert_array_equal(np.asarray(served[name])[is_missing], rows[is_missing])


def test_a_default_that_is_given_counts():
    collection, state = declare_untrained()
    tables = freeze(collection, state, defaults={"normal": 2.5}).tables
    assert (tables["normal"].default, tables["normal"].initial) == (2.5, None)
    assert tables["uniform"].initial.seed == 2**40 + 7
    assert {table.default for table in freeze(collection, state, defaults=1.0).tables.values()} == {1.0}


@pytest.mark.parametrize("name", TRACED)
def test_initial_rows_that_cannot_be_served_are_refused(name):
    spec = jaxsok.TableSpec("item", UNKNOWN_DIM, jaxsok.optim.sgd(0.1), initializer=TRACED[name], capacity=8)
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("item", table="item")])
    state = collection.init()
    with pytest.raises(
        ValueError, match=rf'freeze: defaults: got none for table "item", .*{name}\(.*defaults={{"item"'
    ):
        freeze(collection, state)
    assert freeze(collection, state, defaults=0.5).tables["item"].default == 0.5


@pytest.mark.parametrize("default", [1e39, -1e39, np.inf, np.nan])
def test_defaults_that_float32_does_not_hold_are_refused(default):
    with pytest.raises(ValueError, match='FrozenTable "a": default: got'):
        FrozenTable("a", dim=1, default=default)


def test_initial_rows_and_a_default_are_refused():
    rows = jaxsok.initializers.InitialRows(jaxsok.initializers.uniform(), "a", 0)
    with pytest.raises(ValueError, match=r"default: got 1\.0 with initial rows"):
        FrozenTable("a", dim=4, default=1.0, initial=rows)
    with pytest.raises(TypeError, match="initial: got 0"):
        FrozenTable("a", dim=4, initial=0)


def test_initial_rows_in_files():
    """Initial rows come back from JSON unchanged; anything else is refused."""
    manifest = pytest.importorskip("jaxsok.checkpoint.manifest")
    collection, _ = declare_untrained()
    for table in collection.tables:
        wanted = table.unknown_reads(2**64 - 1)
        got = manifest.unknown_from_json(json.loads(json.dumps(manifest.unknown_to_json(table, 2**64 - 1))))
        assert got == wanted
    good = jaxsok.initializers.InitialRows(jaxsok.initializers.normal(), "t", 7).to_json()
    wrong = [
        *({"initial": {**good, **some}} for some in BAD_INITIAL),
        *({"initial": {key: value for key, value in good.items() if key != name}} for name in good),
        *({"value": value} for value in (None, "0", True, float("nan"), float("inf"), [0.0], 10**400)),
        *({"traced": 1}, {"initial": None}, {"initial": []}, {"other": 0.0}, {}, {**{"value": 0.0}, "traced": ""}),
        *([], 0.0, "value", [["value", 0.0]], None),
    ]  # fmt: skip
    for value in wrong:
        with pytest.raises(manifest.Wrong, match="wanted one of initial, value and traced"):
            manifest.unknown_from_json(value)


BAD_INITIAL = [
    *({"kind": kind} for kind in (-1, 4, True, None, 1.0, "1", 2**80)),
    *({name: value} for name in ("a", "b") for value in (None, "0", True, float("nan"), float("inf"), [], 10**400)),
    *({"seed": seed} for seed in (-1, 2**64, True, None, 1.0)),
    *({"table": name} for name in ("", None, 7)),
]


def test_every_initializer_is_served_or_refused():
    """Every initializer is in `serving_cases`, so a new one must be served or refused for keys without a row."""
    public = {name for name, value in vars(jaxsok.initializers).items() if inspect.isfunction(value) and name[0] != "_"}
    public = {name for name in public if getattr(jaxsok.initializers, name).__module__ == "jaxsok.initializers"}
    covered = {"truncated_normal" if name == "truncated" else name.split("_")[0] for name in INITIALIZERS | TRACED}
    assert public == {"fan_in" if name == "fan" else name for name in covered}


def test_tables_go_to_the_default_device():
    """Where JAX has one; the platform alone says as little as nothing."""
    devices = jax.local_devices()
    table, records = FrozenTable("item", 4), Records(np.array([7], np.uint64), np.ones((1, 4), np.float32))
    for default, wanted in ((devices[-1], devices[-1]), (devices[0].platform, devices[0]), (None, devices[0])):
        with jax.default_device(default):
            tables, _ = freeze_records([(table, SizedRecords(1, [records]))])
        assert tables.stores[0].rows.devices() == tables.stores[0].index.devices() == {wanted}


def test_states_of_a_mesh_are_served_alike():
    """Initial rows do not depend on the mesh that made them."""
    tables = [
        jaxsok.TableSpec(name, UNKNOWN_DIM, jaxsok.optim.sgd(0.1), initializer=initializer, capacity=64)
        for name, initializer in INITIALIZERS.items()
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name, combiner=None) for table in tables]
    collection = programs.over(4, tables, features)
    state = collection.init(seed=2**40 + 7)
    wanted = find_in_training(collection, state)
    served = lookup(freeze(collection, state), {name: ASKED for name in wanted})
    one_device = find_in_training(*declare_untrained())
    for name, rows in wanted.items():
        np.testing.assert_array_equal(np.asarray(served[name]), rows, err_msg=name)
        np.testing.assert_array_equal(rows, one_device[name])


def test_transforms_of_lookups_are_refused_by_name():
    """As those of tables in training, and not in terms of FFI; derivatives of what follows a lookup are none of it."""
    source = Records(np.arange(4, dtype=np.uint64), np.ones((4, 2), np.float32))
    tables, _ = freeze_records([(FrozenTable("item", 2), SizedRecords(4, [source]))])
    words = jnp.asarray(keys.to_words(np.arange(4, dtype=np.uint64))).reshape(2, 2, 2)
    bags = functools.partial(LookupInput, "item", np.arange(4), "sum", offsets=np.array([0, 4]))

    def weighted(weights):
        return lookup(tables, {"bags": bags(weights=weights)})["bags"].sum()

    with pytest.raises(TypeError, match=r"lookup: keys: got arrays that jax.vmap maps over \(2 of them\)"):
        jax.vmap(lambda mine: lookup(tables, {"item": mine})["item"])(words)
    with pytest.raises(TypeError, match=r"find_rows: keys: got arrays that jax.vmap maps over \(2 of them\)"):
        jax.vmap(lambda mine: find_rows(tables, "item", mine)[0])(words)
    with pytest.raises(
        TypeError, match=r"lookup: weights: got a derivative .*To learn weights, look up with combiner=None"
    ):
        jax.grad(weighted)(jnp.ones(4))
    assert jax.grad(lambda scale: scale * weighted(jnp.ones(4)))(2.0) == 8.0
