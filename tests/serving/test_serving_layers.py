"""Frozen lookup layers of NNX and Linen agree with HPS's layers, by NumPy, and have the bits of training layers."""

import dataclasses
import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_layer_cases import PADDING, draw_bags, draw_keys, make_tables

import jaxsok
from jaxsok import keys as keys_lib
from jaxsok.layers import linen as training_linen, nnx as training_nnx
from jaxsok.serving import frozen, group, linen, nnx
from jaxsok.serving.errors import RequestError, UnknownTableError

DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
COMBINERS = ["sum", "mean", "sqrtn"]
NORMS = [None, 0.0, 0.1, 10.0]

FLAXES = ["nnx", "linen"]


def call(flax, layer, tables, *args, **kwargs):
    """Calls a layer of either Flax: `layer` makes it, given a module of layers."""
    if flax == "nnx":
        return layer(nnx)(*args, tables=tables, **kwargs)
    return layer(linen).apply({}, *args, tables=tables, **kwargs)


@functools.cache
def tables_of(dtype):
    """Returns two tables over one store, and one of another dim."""
    declared = [
        frozen.FrozenTable("user", 6, default=-0.5, dtype=dtype),
        frozen.FrozenTable("item", 6, dtype=dtype),
        frozen.FrozenTable("ad", 3, default=0.25, dtype=dtype),
    ]
    return make_tables(declared)


@pytest.fixture(autouse=True)
def _whole_products():
    """Sets full precision of matrix products, which a GPU reduces by default."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("flax", FLAXES)
@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_key_reads_its_row(flax, dtype, max_norm):
    tables, known = tables_of(dtype)
    rng = np.random.default_rng(1)
    for number, name in enumerate(known):
        for shape in [(7,), (4, 3), (2, 3, 2)]:
            keys = draw_keys(rng, number, shape)
            got = call(flax, lambda layers, name=name: layers.LookupLayer(name), tables, keys, max_norm)
            assert got.dtype == jnp.float32
            # The rounding of a norm, a quotient and a product separates a clipped row from its own.
            np.testing.assert_allclose(got, known[name].each(keys, max_norm), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flax", FLAXES)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("max_norm", NORMS)
def test_bags_are_combined(flax, combiner, max_norm, is_weighted):
    tables, known = tables_of("float32")
    rng = np.random.default_rng(2)
    layer = lambda layers: layers.SparseLookupLayer("user", combiner)  # noqa: E731
    bags, pairs = draw_bags(rng, 0, 9, is_weighted)
    got = call(flax, layer, tables, bags, max_norm=max_norm)
    wanted = known["user"].bags(pairs, combiner, max_norm)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    apart = call(flax, layer, tables, bags.keys, bags.weights, offsets=bags.offsets, max_norm=max_norm)
    np.testing.assert_array_equal(apart, got)
    padded = draw_keys(rng, 0, (5, 3))
    weights = (rng.integers(1, 8, padded.shape) / 4).astype(np.float32) if is_weighted else None
    got = call(flax, layer, tables, padded, weights, max_norm=max_norm)
    factors = np.ones(padded.shape) if weights is None else weights
    pairs = [list(zip(keys, line, strict=True)) for keys, line in zip(padded.tolist(), factors, strict=True)]
    np.testing.assert_allclose(got, known["user"].bags(pairs, combiner, max_norm), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flax", FLAXES)
def test_a_group_is_one_call_and_has_the_bits_of_its_parts(flax, dtype):
    tables, known = tables_of(dtype)
    rng = np.random.default_rng(3)
    bags, pairs = draw_bags(rng, 1, 6, is_weighted=True)
    clipped, clipped_pairs = draw_bags(rng, 2, 6)
    inputs = {"who": draw_keys(rng, 0, (6, 2)), "seen": bags, "ads": clipped, "again": draw_keys(rng, 0, 6)}
    specs = {
        "who": "user",
        "seen": group.LookupSpec("item", "mean", dim=6),
        "ads": group.LookupSpec("ad", "sum", max_norm=1.0),
        "again": group.LookupSpec("user", max_norm=0.5),
    }
    layer = lambda layers: layers.LookupLayers(specs)  # noqa: E731
    got = call(flax, layer, tables, inputs)
    wanted = {
        "who": known["user"].each(inputs["who"]),
        "seen": known["item"].bags(pairs, "mean"),
        "ads": known["ad"].bags(clipped_pairs, "sum", 1.0),
        "again": known["user"].each(inputs["again"], 0.5),
    }
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    parts = {
        "who": call(flax, lambda layers: layers.LookupLayer("user"), tables, inputs["who"]),
        "seen": call(flax, lambda layers: layers.SparseLookupLayer("item"), tables, bags),
        "ads": call(flax, lambda layers: layers.SparseLookupLayer("ad", "sum"), tables, clipped, max_norm=1.0),
        "again": call(flax, lambda layers: layers.LookupLayer("user"), tables, inputs["again"], 0.5),
    }
    for name, array in parts.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    some = call(flax, layer, tables, {"again": inputs["again"]})
    np.testing.assert_array_equal(some["again"], got["again"])
    text = jax.jit(lambda tables: call(flax, layer, tables, inputs)).lower(tables).as_text()
    assert text.count("jaxsok_lookup_frozen") == 2  # Rows of clipped bags come first, and another call combines them.


# Laws ----------------------------------------------------------------------------------------------------------------


def _train(dtype):
    """Returns a collection and a state whose rows are trained, and a batch of keys that are all present."""
    tables = [
        jaxsok.TableSpec("user", 6, jaxsok.optim.sgd(0.3), capacity=64, dtype=dtype),
        jaxsok.TableSpec("item", 5, jaxsok.optim.sgd(0.3), capacity=64, dtype=dtype),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user", combiner=None),
        *(
            jaxsok.FeatureSpec(combiner, "item", combiner=combiner, weighted=True, max_keys=64)
            for combiner in COMBINERS
        ),
    ]
    collection = jaxsok.Collection(tables, features)
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 4, 8)
    raw = {"user": rng.integers(0, 20, (8, 2))}
    for combiner in COMBINERS:
        weights = rng.normal(size=lengths.sum()).astype(np.float32)
        keys = rng.integers(0, 2**62, 12)[rng.integers(0, 12, lengths.sum())]
        raw[combiner] = jaxsok.Bags(keys, lengths=lengths, weights=weights)
    batch = collection.batch(raw)
    state = collection.init(seed=3)
    for _ in range(2):
        embeddings, state, plan = collection.lookup(state, batch.features)
        gradients = jax.tree.map(lambda rows: jnp.cos(rows * jnp.asarray(9, rows.dtype)), embeddings)
        state, _ = collection.update(state, plan, gradients)
    return collection, state, batch, raw


@pytest.mark.parametrize("flax", FLAXES)
def test_a_group_of_a_collection_gives_what_find_gives(flax):
    """`from_collection` gives each feature a spec whose results have the bits of the evaluation lookup."""
    collection, state, batch, raw = _train("float32")
    tables = frozen.freeze(collection, state)
    got = call(flax, lambda layers: layers.LookupLayers.from_collection(collection), tables, raw)
    want, _ = collection.find(state, batch.features)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flax", FLAXES)
def test_layers_give_the_bits_of_training_layers(flax, dtype):
    collection, state, batch, raw = _train(dtype)
    tables = frozen.freeze(collection, state)
    if flax == "nnx":
        layer = training_nnx.Embeddings(collection, deterministic=True)
        layer.tables.set_value(state)
        wanted = layer(batch.features)
    else:
        layer = training_linen.Embeddings(collection, deterministic=True)
        wanted = layer.apply({"tables": {"state": state}}, batch.features)
    specs = {"user": group.LookupSpec("user")} | {name: group.LookupSpec("item", name) for name in COMBINERS}
    got = call(flax, lambda layers: layers.LookupLayers(specs), tables, raw)
    for name, array in wanted.items():
        # Training rounds its embeddings to the dtype of its rows; serving returns the numbers before that.
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name].astype(array.dtype), array, err_msg=name)
    if dtype == "float32":
        single = call(flax, lambda layers: layers.LookupLayer("user"), tables, raw["user"])
        np.testing.assert_array_equal(single, wanted["user"])


# Models --------------------------------------------------------------------------------------------------------------


class NnxModel(flax.nnx.Module):
    """A model of a fused group and of a layer that reads a part of the group's result."""

    def __init__(self, tables=None):
        specs = {"user": "user", "seen": group.LookupSpec("item", "sum")}
        self.embed = nnx.LookupLayers(specs, tables=tables)
        self.ad = nnx.LookupLayer("ad", tables=self.embed.tables)
        self.out = flax.nnx.Linear(15, 2, rngs=flax.nnx.Rngs(0))

    def __call__(self, user, seen, ad):
        found = self.embed({"user": user, "seen": seen})
        return self.out(jnp.concatenate([found["user"], found["seen"], self.ad(ad)], axis=-1))


class LinenModel(flax.linen.Module):
    """The same model in Linen."""

    @flax.linen.compact
    def __call__(self, user, seen, ad):
        specs = {"user": group.LookupSpec("user", dim=6), "seen": group.LookupSpec("item", "sum", dim=6)}
        found = linen.LookupLayers(specs, name="embed")({"user": user, "seen": seen})
        ads = linen.LookupLayer("ad", dim=3, name="ad")(ad)
        return flax.linen.Dense(2)(jnp.concatenate([found["user"], found["seen"], ads], axis=-1))


def _inputs(seed=5, num_samples=6):
    rng = np.random.default_rng(seed)
    bags, pairs = draw_bags(rng, 1, num_samples)
    return {"user": draw_keys(rng, 0, num_samples), "seen": bags, "ad": draw_keys(rng, 2, num_samples)}, pairs


def _scores(known, inputs, pairs, kernel, bias):
    parts = [known["user"].each(inputs["user"]), known["item"].bags(pairs, "sum"), known["ad"].each(inputs["ad"])]
    return np.concatenate(parts, axis=-1) @ np.asarray(kernel, np.float64) + np.asarray(bias, np.float64)


@pytest.mark.parametrize("is_graph", [True, False])
def test_an_nnx_model_takes_other_tables(is_graph):
    with flax.nnx.set_graph_mode(is_graph):
        tables, known = tables_of("float32")
        inputs, pairs = _inputs()
        if not is_graph:  # Linen has no shared Variables: each layer has its own.
            model = NnxModel()
            model.ad = nnx.LookupLayer("ad")
        else:
            model = NnxModel()
            assert model.ad.tables is model.embed.tables
        nnx.set_tables(model, tables)
        dense = model.out.kernel[...], model.out.bias[...]
        np.testing.assert_allclose(model(**inputs), _scores(known, inputs, pairs, *dense), rtol=1e-4, atol=1e-5)
        params = flax.nnx.state(model, flax.nnx.Param)
        assert len(jax.tree.leaves(params)) == 2
        larger, known = make_tables(list(tables.tables.values()), seed=1, num_rows=100)
        wanted = _scores(known, inputs, pairs, *dense)
        function = nnx.as_function(model)
        np.testing.assert_allclose(function(larger, inputs), wanted, rtol=1e-4, atol=1e-5)
        jitted = jax.jit(lambda tables: function(tables, inputs))
        np.testing.assert_allclose(jitted(larger), wanted, rtol=1e-4, atol=1e-5)
        assert model.embed.tables.get_value().stores[0].capacity == tables.stores[0].capacity


@pytest.mark.parametrize("kind", ["batch norm", "dropout"])
def test_a_model_in_training_mode_is_not_served(kind):
    """Else a sample's score would depend on the samples of others, or on nothing that a client gives."""
    tables, _ = tables_of("float32")
    rngs = flax.nnx.Rngs(0)

    class Ranker(flax.nnx.Module):
        def __init__(self):
            self.user = nnx.LookupLayer("user", tables=tables)
            of_kind = {"batch norm": lambda: flax.nnx.BatchNorm(tables.tables["user"].dim, rngs=rngs)}
            self.layers = flax.nnx.List([of_kind.get(kind, lambda: flax.nnx.Dropout(0.5, rngs=rngs))()])

        def __call__(self, user):
            return self.layers[0](self.user(user))

    model, keys = Ranker(), np.arange(4)
    with pytest.raises(ValueError, match=r"layers\.0 in training mode .*call model\.eval\(\) first"):
        nnx.as_function(model)
    model.eval()
    function = nnx.as_function(model)
    together = function(tables, {"user": keys})
    np.testing.assert_array_equal(function(tables, {"user": keys[:1]}), together[:1])


def test_a_linen_model_takes_other_tables():
    tables, known = tables_of("float32")
    inputs, pairs = _inputs()
    model = LinenModel()
    variables = model.init(jax.random.key(0), **inputs)
    assert sorted(variables) == ["params", "tables"]
    assert jax.tree.leaves(variables["tables"]) == []
    dense = variables["params"]["Dense_0"]["kernel"], variables["params"]["Dense_0"]["bias"]
    bound = linen.set_tables(variables, tables)
    np.testing.assert_allclose(
        model.apply(bound, **inputs), _scores(known, inputs, pairs, *dense), rtol=1e-4, atol=1e-5
    )
    larger, known = make_tables(list(tables.tables.values()), seed=1, num_rows=100)
    wanted = _scores(known, inputs, pairs, *dense)
    for of in (variables, bound):
        got = linen.as_function(model, of)(larger, inputs)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="got none, wanted FrozenTables"):
        model.apply(variables, **inputs)
    words = jnp.asarray(keys_lib.to_words(inputs["user"], "test"))
    ids = flax.linen.jit(linen.LookupLayer)("user").apply({"tables": {"frozen": tables}}, words)
    np.testing.assert_array_equal(ids, linen.LookupLayer("user").apply({}, inputs["user"], tables=tables))


def test_a_linen_layer_may_be_called_twice():
    """Its second call of `init`, too, has neither tables nor a place for them yet."""

    class Twice(flax.linen.Module):
        def setup(self):
            self.user = linen.LookupLayer("user", dim=tables.tables["user"].dim)

        def __call__(self, shown, bought):
            return self.user(shown) - self.user(bought)

    tables, _ = tables_of("float32")
    shown, bought = np.array([3, 4]), np.array([4, 3])
    variables = Twice().init(jax.random.key(0), shown, bought)
    one = linen.LookupLayer("user").apply({}, shown, tables=tables)
    np.testing.assert_array_equal(
        linen.as_function(Twice(), variables)(tables, {"shown": shown, "bought": bought}), one - one[::-1]
    )
    with pytest.raises(ValueError, match="got none, wanted FrozenTables"):
        Twice().apply(variables, shown, bought)


def test_words_and_integers_are_the_same_keys():
    tables, known = tables_of("float32")
    keys = np.array([3, 9, 2**63 + 3, PADDING, 10**9], np.uint64)
    words = jnp.asarray(keys_lib.to_words(keys, "test"))
    wanted = known["user"].each(keys)
    for given in (keys, keys.view(np.int64), words):
        np.testing.assert_allclose(nnx.LookupLayer("user", tables=tables)(given), wanted, rtol=1e-6)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flax", FLAXES)
def test_what_cannot_be_meant_is_refused(flax):
    tables, _ = tables_of("float32")
    keys = np.arange(4)

    def expect_refusal(kind, message, layer, *args, tables=tables, **kwargs):
        with pytest.raises(kind, match=message):
            call(flax, layer, tables, *args, **kwargs)

    user = lambda layers: layers.LookupLayer("user")  # noqa: E731
    bags = lambda layers: layers.SparseLookupLayer("user")  # noqa: E731
    several = lambda layers: layers.LookupLayers({"a": "user"})  # noqa: E731
    expect_refusal(UnknownTableError, "'usr', wanted one of", lambda layers: layers.LookupLayer("usr"), keys)
    expect_refusal(ValueError, "of dim 6, wanted 7", lambda layers: layers.LookupLayer("user", 7), keys)
    expect_refusal(ValueError, "tables: got none", user, keys, tables=None)
    expect_refusal(TypeError, "tables: got int", user, keys, tables=3)
    expect_refusal(RequestError, "keys must be integers|keys: got", user, keys / 2)
    expect_refusal(RequestError, "max_norm: got -1", user, keys, -1.0)
    expect_refusal(RequestError, "Bags without a combiner", user, jaxsok.Bags(keys))
    expect_refusal(RequestError, "inverse: got one", bags, jaxsok.Bags(keys, inverse=np.zeros(9, int)))
    expect_refusal(RequestError, "offsets or weights as well", bags, jaxsok.Bags(keys), offsets=np.array([0, 4]))
    expect_refusal(RequestError, "both lengths and offsets", bags, jaxsok.Bags(keys, lengths=[4], offsets=[0, 4]))
    expect_refusal(
        RequestError, "lengths: got -1, wanted no negative number", bags, jaxsok.Bags(keys, lengths=np.array([5, -1]))
    )
    expect_refusal(RequestError, "weights: got shape", bags, keys, np.ones(3, np.float32))
    expect_refusal(RequestError, "got 'b', wanted some of", several, {"b": keys})
    expect_refusal(RequestError, "wanted a mapping", several, [keys])
    expect_refusal(ValueError, "specs: got none", lambda layers: layers.LookupLayers({}), {})
    expect_refusal(TypeError, "wanted a LookupSpec", lambda layers: layers.LookupLayers({"a": 3}), {"a": keys})
    expect_refusal(ValueError, "combiner: got None", lambda layers: layers.SparseLookupLayer("user", None), keys)
    expect_refusal(ValueError, "combiner: got 'max'", lambda layers: layers.SparseLookupLayer("user", "max"), keys)


def test_specs_are_refused_when_declared():
    for kind, message, options in [
        (TypeError, "table: got ''", {"table": ""}),
        (ValueError, "combiner: got 'max'", {"combiner": "max"}),
        (ValueError, "max_norm: got nan", {"max_norm": float("nan")}),
        (ValueError, "max_norm: got True", {"max_norm": True}),
        (ValueError, "dim: got 0", {"dim": 0}),
    ]:
        with pytest.raises(kind, match=message):
            group.LookupSpec(**{"table": "user", **options})


def test_models_without_frozen_layers_are_refused():
    tables, _ = tables_of("float32")
    plain = flax.nnx.Linear(2, 2, rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match="set_tables: model"):
        nnx.set_tables(plain, tables)
    with pytest.raises(ValueError, match="as_function: model"):
        nnx.as_function(plain)
    with pytest.raises(ValueError, match="set_tables: variables"):
        linen.set_tables({"params": {}}, tables)
    with pytest.raises(ValueError, match="as_function: variables"):
        linen.as_function(flax.linen.Dense(2), {"params": {}})
    with pytest.raises(ValueError, match="neither tables nor a dim"):
        linen.LookupLayer("user").init(jax.random.key(0), np.arange(3))
    variables = linen.LookupLayer("user").init(jax.random.key(0), np.arange(3), tables=tables)
    assert jax.tree.leaves(variables) == []


def test_gradients_of_frozen_tables_are_refused():
    tables, _ = tables_of("float32")
    layer = nnx.LookupLayer("user")
    floats = lambda rows: layer(np.arange(3), tables=_with_rows(tables, rows)).sum()  # noqa: E731
    with pytest.raises(TypeError, match="lookup: tables: got a derivative"):
        jax.grad(floats)(tables.stores[0].rows)


def _with_rows(tables, rows):
    stores = (dataclasses.replace(tables.stores[0], rows=rows), *tables.stores[1:])
    return dataclasses.replace(tables, stores=stores)
