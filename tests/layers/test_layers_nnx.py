"""The NNX layer: equal to the core to the bit, to a NumPy model within rounding; filters on `nnx.Param` skip tables."""

import functools
import re

import compiled_cases
import hypothesis
import jax
import jax.numpy as jnp
import layer_cases as cases
import numpy as np
import optax
import programs
import pytest
from flax import nnx
from hypothesis import given, strategies as st
from jax.sharding import AxisType

import jaxsok
from jaxsok.layers import nnx as layers

MODES = ("graph", "tree")

# A layer makes its state itself; index and all are compared with the core's.
pytestmark = pytest.mark.usefixtures("one_salt", "quickly", "looks_ahead")


@pytest.fixture(autouse=True)
def world_of_users():
    """Allows promotion of dtypes and ranks, which Flax and Optax use."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["graph", pytest.param("tree", marks=pytest.mark.slow)])
def mode(request):
    """Sets Flax's graph mode or, in the long run, its tree mode.

    The layer never asks for the mode: `test_any_run_in_tree_mode` and `test_like_the_core` see both every time.
    """
    with in_mode(request.param):
        yield request.param


def in_mode(name):
    """Sets a mode of Flax temporarily; "no updates" is graph mode that carries no new Variables out."""
    return nnx.set_graph_updates(False) if name == "no updates" else nnx.set_graph_mode(name == "graph")


class Model(nnx.Module):
    """A model of embeddings and one linear layer."""

    def __init__(self, collection, rngs):
        self.embed = layers.Embeddings(collection)
        self.out = nnx.Linear(cases.WIDTH, 1, rngs=rngs)

    def __call__(self, features):
        return self.out(cases.join(self.embed(features)))[:, 0]


def loss_fn(model, batch):
    return cases.loss_of(model(batch.features), batch["label"])


def declare(collection, tx=None):
    """Returns a model and its optimizer."""
    model = Model(collection, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(cases.RATE) if tx is None else tx, wrt=nnx.Param)


def train(model, optimizer, batch):
    """Runs a step as a Flax user writes it."""
    loss, grads = layers.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss, model.embed.update(grads)


def train_twice(model, optimizer, first, second):
    """Runs a step of two micro-batches."""
    loss, grads = layers.value_and_grad(loss_fn)(model, first)
    more, others = layers.value_and_grad(loss_fn, accumulate=True)(model, second)
    of_params = jax.tree.map(jnp.add, nnx.state(grads, nnx.Param), nnx.state(others, nnx.Param))
    optimizer.update(model, of_params)
    return loss, more, model.embed.update([grads, others])


@functools.cache
def jit_once(function, mode, donate=True):
    """Jits a function once for all tests of a mode."""
    return nnx.jit(function, donate_argnums=(0, 1) if donate else ())


def state_of(model):
    """Returns the jaxsok state of a model."""
    return model.embed.tables.get_value()


def oracle_of(model):
    """Returns the same model in NumPy."""
    return cases.Oracle(model.out.kernel[...], model.out.bias[...])


# Agreement with the oracle and the core ---------------------------------------------------------------------------

OPS = st.lists(
    st.tuples(st.sampled_from(["train", "train twice", "evaluate", "discard", "grow"]), st.integers(0, 10**6)),
    min_size=1,
    max_size=6,
)


def lookup_alone(model, batch):
    """Runs a step that is skipped."""
    layers.value_and_grad(loss_fn)(model, batch)
    model.embed.discard()


@hypothesis.settings(max_examples=10)
@given(ops=OPS)
def test_any_run_is_that_of_the_oracle(ops):
    """Any run in graph mode agrees with the oracle; see `check_any_run`."""
    check_any_run("graph", ops)


@hypothesis.settings(max_examples=5)
@given(ops=OPS)
def test_any_run_in_tree_mode(ops):
    """Any run in tree mode agrees too; a few runs suffice, since the layer itself does not ask for the mode."""
    check_any_run("tree", ops)


def check_any_run(name, ops):
    """Runs steps, micro-batches, evaluations, skipped steps and growth in any order (law 1)."""
    with in_mode(name):
        collection = cases.one_device()
        model, optimizer = declare(collection)
        oracle = oracle_of(model)
        for op, seed in ops:
            raw, other = cases.raw_batches(2, seed, num_samples=5)
            batch = collection.batch(raw)
            if op == "train":
                loss, stats = jit_once(train, name)(model, optimizer, batch)
                np.testing.assert_allclose(loss, oracle.step(raw)[0], rtol=1e-4)
                stats.check()
            elif op == "train twice":
                *losses, stats = jit_once(train_twice, name)(model, optimizer, batch, collection.batch(other))
                np.testing.assert_allclose(losses, oracle.step(raw, other), rtol=1e-4)
                stats.check()
            elif op == "evaluate":
                model.eval()
                loss = jit_once(loss_fn, name, donate=False)(model, batch)
                np.testing.assert_allclose(loss, oracle.loss(raw), rtol=1e-4)
                model.train()
            elif op == "discard":
                oracle.loss(raw, insert=True)
                jit_once(lookup_alone, name, donate=False)(model, batch)
            else:
                layers.grow(model)
        oracle.assert_tables(collection, state_of(model))
        np.testing.assert_allclose(model.out.kernel[...][:, 0], oracle.kernel, rtol=1e-4, atol=1e-6)


def core_step(graphdef, collection, tx):
    """Returns a step by the core's two calls, with the same dense part."""

    def step(state, params, opt_state, batch):
        embeddings, state, plan = collection.lookup(state, batch.features)

        def loss_of_dense(params, embeddings):
            out = nnx.merge(graphdef, params)
            return cases.loss_of(out(cases.join(embeddings))[:, 0], batch["label"])

        loss, (g_params, g_embeddings) = jax.value_and_grad(loss_of_dense, (0, 1))(params, embeddings)
        state, stats = collection.update(state, plan, g_embeddings)
        updates, opt_state = tx.update(g_params, opt_state, params)
        return state, optax.apply_updates(params, updates), opt_state, loss, stats

    return jax.jit(step, donate_argnums=(0, 1, 2))


def assert_like_core(collection, num_steps=4):
    """Compares losses, tables, counts and dense parameters of both, to the bit."""
    tx = optax.adam(1e-2)
    model, optimizer = declare(collection, tx)
    graphdef, params = nnx.split(jax.tree.map(jnp.copy, model.out))
    state, opt_state = collection.init(seed=0), tx.init(params)
    # The variables have the form that a step returns; otherwise the second step is another program.
    params, opt_state = cases.everywhere(collection, (params, opt_state))
    for dense in (model.out, optimizer):
        nnx.update(dense, cases.everywhere(collection, nnx.state(dense)))
    step, core = nnx.jit(train, donate_argnums=(0, 1)), core_step(graphdef, collection, tx)
    for raw in cases.raw_batches(num_steps):
        batch = collection.batch(raw)
        loss, stats = step(model, optimizer, batch)
        state, params, opt_state, wanted, counts = core(state, params, opt_state, batch)
        assert float(loss) == float(wanted)
        assert stats.to_dict() == counts.to_dict()
    cases.assert_equal(state_of(model), state)
    cases.assert_equal(jax.tree.leaves(nnx.state(model.out)), jax.tree.leaves(params))


@pytest.mark.parametrize("name", [*MODES, "no updates"])
def test_like_the_core_to_the_bit(name):
    """The same functions run, so the bits are the same."""
    with in_mode(name):
        assert_like_core(cases.collection_of(optimizer=jaxsok.optim.adam(0.1)))


@pytest.mark.parametrize("num_devices, name", [(2, "tree"), (4, "graph")])
def test_like_the_core_on_a_mesh(num_devices, name):
    """Tables and taps are sharded over devices."""
    collection = cases.collection_of(num_devices, optimizer=jaxsok.optim.rowwise_adagrad(0.1))
    with in_mode(name):
        assert_like_core(collection, num_steps=2)
    taps = layers.Embeddings(collection)
    taps.set_taps(collection.batch(cases.raw_batches(1)[0]).features)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(taps.taps.get_value())} == {num_devices}


def test_on_an_explicit_mesh():
    """If shardings are part of types, the gradient of a tap has the sharding of the embedding."""
    collection = cases.collection_of(2, axis_type=AxisType.Explicit)
    layer = layers.Embeddings(collection)
    batch = collection.batch(cases.raw_batches(1)[0])

    def loss_of(embeddings):
        return sum(jnp.sum(embedding**2) for embedding in embeddings.values())

    @nnx.jit
    def step(layer, features):
        loss, grads = layers.value_and_grad(lambda layer: loss_of(layer(features)))(layer)
        layer.update(grads)
        return loss

    @jax.jit
    def core(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        loss, gradients = jax.value_and_grad(loss_of)(embeddings)
        return collection.update(state, plan, gradients)[0], loss

    with jax.set_mesh(collection.shards.mesh):
        state, loss = core(collection.init(seed=0), batch.features)
        assert step(layer, batch.features) == loss
    cases.assert_equal(layer.tables.get_value(), state)


# Gradients --------------------------------------------------------------------------------------------------------


def test_gradient_of_taps_is_that_of_the_embeddings(mode):
    """The gradient of sum(c * e ** 2) is 2 c e."""
    collection = cases.one_device()
    layer = layers.Embeddings(collection)
    features = collection.batch(cases.raw_batches(1)[0]).features
    factors = {"user": 1.0, "history": 2.0, "ads": 3.0}

    def loss(layer):
        embeddings = layer(features)
        return sum(factors[name] * jnp.sum(value**2) for name, value in embeddings.items()), embeddings

    (_, embeddings), grads = layers.value_and_grad(loss, has_aux=True)(layer)
    (taps,) = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, layers.TapVariable))
    (of_lookup,) = taps.get_value()
    assert of_lookup.keys() == embeddings.keys() == factors.keys()
    for name, factor in factors.items():
        np.testing.assert_array_equal(of_lookup[name], 2 * factor * np.asarray(embeddings[name]))


def test_flax_s_own_transformation():
    """set_taps and nnx.value_and_grad with DiffState do the same as value_and_grad."""
    collection = cases.one_device()
    batch = collection.batch(cases.raw_batches(1)[0])
    (own, optimizer), (other, its_optimizer) = declare(collection), declare(collection)

    @nnx.jit
    def step(model, optimizer, batch):
        model.embed.set_taps(batch.features)
        wrt = nnx.DiffState(0, nnx.Any(nnx.Param, layers.TapVariable))
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, batch)
        optimizer.update(model, grads)
        model.embed.update(grads)
        return loss

    assert step(own, optimizer, batch) == jit_once(train, "graph")(other, its_optimizer, batch)[0]
    cases.assert_equal(state_of(own), state_of(other))
    cases.assert_equal(*(jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (own, other)))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_as_the_core_clips(mode, max_norm):
    """The clipped gradients have the core's bits and keep their form."""
    collection = cases.one_device()
    batch = collection.batch(cases.raw_batches(1)[0])
    model, _ = declare(collection)
    _, grads = layers.value_and_grad(loss_fn)(model, batch)
    clipped, norm = layers.clip_by_global_norm(model, grads, max_norm)
    assert jax.tree.structure(clipped) == jax.tree.structure(grads) and norm > 0.5
    _, state, plan = collection.lookup(collection.init(seed=0), batch.features)
    dense = jax.tree.leaves(nnx.state(grads, nnx.Param))
    of_taps, dense, wanted = collection.clip_by_global_norm(state, plan, _taps(grads), max_norm, dense)
    assert norm == wanted
    cases.assert_equal(_taps(clipped), of_taps)
    cases.assert_equal(jax.tree.leaves(nnx.state(clipped, nnx.Param)), dense)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_clipped_as_dense_optax_clips(mode, num_batches):
    """Keys repeat within and between micro-batches, and the norm is that of whole tables, not that of single uses."""
    collection = cases.one_device()
    raws = cases.raw_batches(num_batches, num_keys=3)
    model, optimizer = declare(collection)
    dense = cases.dense_gradients(model.out.kernel[...], model.out.bias[...], raws)
    wanted, _ = optax.clip_by_global_norm(0.5).update(dense, optax.EmptyState())
    kernel = np.array(model.out.kernel[...])[:, 0]

    @nnx.jit
    def step(model, optimizer, batches):
        grads = []
        for batch in batches:
            grads.append(layers.value_and_grad(loss_fn, accumulate=True)(model, batch)[1])
        unclipped = optax.tree.norm(grads)
        grads, norm = layers.clip_by_global_norm(model, grads if num_batches > 1 else grads[0], 0.5)
        several = grads if num_batches > 1 else [grads]
        summed = jax.tree.map(lambda *leaves: sum(leaves), *[nnx.state(grads, nnx.Param) for grads in several])
        optimizer.update(model, summed)
        model.embed.update(grads)
        return norm, unclipped

    norm, unclipped = step(model, optimizer, [collection.batch(raw) for raw in raws])
    np.testing.assert_allclose(norm, optax.tree.norm(dense), rtol=1e-5)
    assert norm > 0.5 and abs(norm - unclipped) > 0.01 * norm  # Optax's norm of the layer's gradients differs
    np.testing.assert_allclose(model.out.kernel[...][:, 0], kernel - cases.RATE * wanted["kernel"], rtol=1e-5)
    cases.assert_stepped(collection, state_of(model), wanted)


def test_two_layers_are_clipped_together(mode):
    """One norm covers the tables of both layers."""
    model = nnx.Dict(one=layers.Embeddings(cases.collection_of()), two=layers.Embeddings(cases.collection_of()))
    features = model["one"].collection.batch(cases.raw_batches(1)[0]).features

    def loss(model):
        return sum(scale * jnp.sum(cases.join(model[name](features)) ** 2) for scale, name in ((1, "one"), (2, "two")))

    _, grads = layers.value_and_grad(loss)(model)
    of_layers = []
    for name in ("one", "two"):
        collection = model[name].collection
        _, state, plan = collection.lookup(collection.init(seed=0), features)
        (taps,) = grads[name]["taps"].get_value()
        of_layers.append(float(collection.gradient_norm(state, plan, taps)))
    clipped, norm = layers.clip_by_global_norm(model, grads, 0.5)
    np.testing.assert_allclose(norm, np.hypot(*of_layers), rtol=1e-6)
    for leaf, two in zip(jax.tree.leaves(clipped), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(leaf, two * (0.5 / norm), rtol=1e-6)


def test_clipping_refuses_what_does_not_fit(mode):
    """A refusal changes nothing."""
    collection = cases.one_device()
    model, _ = declare(collection)
    batch = collection.batch(cases.raw_batches(1)[0])
    assert "clip_by_global_norm: model: got one without lookups" in message(
        ValueError, lambda: layers.clip_by_global_norm(model, {}, 1.0)
    )
    _, grads = layers.value_and_grad(loss_fn)(model, batch)
    before = cases.snapshot(nnx.state(model))
    of_params = nnx.state(grads, nnx.Param)
    for wrong, text in (
        (of_params, "clip_by_global_norm: gradients: got none for the taps of 'embed'"),
        ([grads, grads], "got lookup 1 of 1 twice"),
        ([grads, {"embed": {"taps": ()}}], "got 2 of different dense parameters"),
    ):
        assert text in message(ValueError, lambda wrong=wrong: layers.clip_by_global_norm(model, wrong, 1.0))
    for max_norm, error in ((0.0, ValueError), ("large", TypeError)):
        assert "clip_by_global_norm: max_norm" in message(
            error, lambda max_norm=max_norm: layers.clip_by_global_norm(model, grads, max_norm)
        )
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)


def _taps(grads):
    (taps,) = [leaf for leaf in jax.tree.leaves(grads, is_leaf=_is_tap) if _is_tap(leaf)]
    return taps.get_value()[0]


def _is_tap(node):
    return isinstance(node, layers.TapVariable)


def test_a_negative_zero_stays_one():
    """The tap returns the looked-up embedding to the bit; x + 0 would lose the sign of a zero."""
    tables = [jaxsok.TableSpec("item", 2, jaxsok.optim.sgd(1.0), initializer=jaxsok.initializers.constant(-0.0))]
    layer = layers.Embeddings(jaxsok.Collection(tables, [jaxsok.FeatureSpec("item", "item")]))
    features = layer.collection.batch({"item": np.array([7])}).features
    (_, row), _ = layers.value_and_grad(lambda layer: (layer(features)["item"].sum(), layer(features)), has_aux=True)(
        layer
    )
    assert np.signbit(row["item"]).all()


def test_a_loss_is_traced_for_its_lookups_without_a_trace_left(mode):
    """The extra trace leaves random numbers and metrics of the step drawn and counted once."""

    class Noisy(Model):
        def __init__(self, collection, rngs):
            super().__init__(collection, rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, features):
            return self.out(self.drop(cases.join(self.embed(features))))[:, 0]

    def loss(model, seen, batch, is_seen, name):
        value = loss_fn(model, batch)
        if is_seen and name == "loss":  # flags are not traced
            seen.update(loss=value)
        return value

    collection = cases.one_device()
    batch = collection.batch(cases.raw_batches(1)[0])
    model, seen = Noisy(collection, nnx.Rngs(0)), nnx.metrics.Average("loss")
    before = int(model.drop.rngs.count[...])
    value, _ = layers.value_and_grad(loss)(model, seen, batch, True, name="loss")
    assert int(model.drop.rngs.count[...]) == before + 1
    assert int(seen.count[...]) == 1 and seen.compute() == value


# Filters on nnx.Param skip tables ---------------------------------------------------------------------------------


def test_dense_tools_do_not_see_tables(mode):
    """Optimizer state, nnx.split, nnx.state and counts hold the linear layer alone."""
    collection = cases.one_device()
    model, optimizer = declare(collection, optax.adam(1e-2))
    num_dense = cases.WIDTH + 1

    def count(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    def assert_apart():
        params = nnx.state(model, nnx.Param)
        assert count(params) == num_dense
        assert count(optimizer.opt_state) == 2 * num_dense + 1
        _, dense, tables, taps, plans, rest = nnx.split(
            model, nnx.Param, layers.TableVariable, layers.TapVariable, layers.PlanVariable, ...
        )
        assert count(dense) == num_dense and count(taps) == count(plans) == count(rest) == 0
        assert jax.tree.leaves(tables) == jax.tree.leaves(state_of(model))

    assert_apart()
    train(model, optimizer, collection.batch(cases.raw_batches(1)[0]))
    assert_apart()


def test_checkpoints(mode, tmp_path):
    """Parameters and the tables' state are restored separately into a new model, which continues training alike."""
    orbax = pytest.importorskip("orbax.checkpoint")
    collection = cases.collection_of(optimizer=jaxsok.optim.adam(0.1))
    model, optimizer = declare(collection)
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    for batch in batches[:2]:
        train(model, optimizer, batch)
    params, tables = nnx.state(model, nnx.Param), nnx.state(model, layers.TableVariable)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", nnx.to_pure_dict(params))
        checkpointer.save(tmp_path / "tables", tables)
        checkpointer.save(tmp_path / "model", nnx.state(model))
    written = sum(path.stat().st_size for path in (tmp_path / "params").rglob("*") if path.is_file())
    assert written < 32 * 1024 < sum(leaf.nbytes for leaf in jax.tree.leaves(tables)) * 4
    other, _ = declare(collection)
    other.out.kernel[...] = jnp.zeros_like(other.out.kernel[...])
    with orbax.StandardCheckpointer() as checkpointer:
        wanted = nnx.to_pure_dict(nnx.state(other, nnx.Param))
        assert set(checkpointer.metadata(tmp_path / "params").item_metadata.tree) == {"out"}
        nnx.update(other, checkpointer.restore(tmp_path / "params", wanted))
        nnx.update(other, checkpointer.restore(tmp_path / "tables", nnx.state(other, layers.TableVariable)))
        whole, _ = declare(collection)
        nnx.update(whole, checkpointer.restore(tmp_path / "model", nnx.state(whole)))
    losses = [float(train(ranker, optimizer, batches[2])[0]) for ranker in (model, other, whole)]
    assert losses == losses[:1] * 3
    cases.assert_equal(state_of(other), state_of(model))
    cases.assert_equal(state_of(whole), state_of(model))


# In place, one program --------------------------------------------------------------------------------------------


def test_donated_tables_stay_where_they_are(mode):
    """Donated tables keep their buffers (law 9), and each size of batches has one program."""
    collection = cases.collection_of()
    model, optimizer = declare(collection)
    traced = []

    def count_traces(model, optimizer, batch):
        traced.append(batch["label"].shape)
        return train(model, optimizer, batch)

    step = nnx.jit(count_traces, donate_argnums=(0, 1))
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    small = [collection.batch(raw) for raw in cases.raw_batches(2, num_samples=4)]
    step(model, optimizer, batches[0])
    before = cases.addresses(state_of(model))
    for batch in [*batches, *small, *batches]:
        step(model, optimizer, batch)[1].check()
        assert cases.addresses(state_of(model)) == before
    assert traced == [(8,), (4,)]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_no_table_sized_copy(num_devices):
    """The program that XLA makes of a step holds no copy of a table."""
    capacity = 1 << 12
    collection = cases.collection_of(num_devices, capacity=capacity)
    model, optimizer = declare(collection)
    batch = collection.batch(cases.raw_batches(1)[0])
    text = nnx.jit(train, donate_argnums=(0, 1)).lower(model, optimizer, batch).compile().as_text()
    assert "jaxsok_update" in text
    assert not compiled_cases.table_copies(text, capacity * 3 * 4)


def test_growth_between_steps(mode):
    """A table grows from 4 rows to many; nothing is refused, and all rows learn."""
    collection = cases.collection_of(capacity=4)
    model, optimizer = declare(collection)
    oracle = oracle_of(model)
    for raw in cases.raw_batches(3, num_keys=200):
        batch = collection.batch(raw)
        model.embed.grow()
        _, stats = train(model, optimizer, batch)
        stats.check()
        oracle.step(raw)
    assert state_of(model).stores[0].capacity > 4
    oracle.assert_tables(collection, state_of(model))


@pytest.mark.parametrize("by_path", [False, True])
def test_a_clock_of_ones_own(by_path):
    """Last uses are those of the clock, which is an argument of the step, and rows leave by it."""
    collection = cases.collection_that_evicts()
    layer, left = layers.Embeddings(collection), []

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(layer, features, clock):
        loss = lambda layer: layer(features, clock=clock)["item"].sum()  # noqa: E731
        return layer.update(layers.value_and_grad(loss)(layer)[1])

    for clock, keys in cases.CLOCKED.items():
        batch = collection.batch({"item": np.array(keys)})
        options = {"clock": clock, "hand_over": lambda *records: left.append(records)}
        layers.grow(layer, {"": batch}, **options) if by_path else layer.grow(batch, **options)
        step(layer, batch.features, np.uint32(clock)).check()
    cases.assert_clocked(collection, layer.tables.get_value(), left)


@pytest.mark.parametrize(
    "name, num_devices", [("graph", 1), ("tree", 1), pytest.param("graph", 2, marks=pytest.mark.slow)]
)
def test_growth_finds_its_program(name, num_devices, by_doubling):
    """Two growths make no call wait for a compilation; losses and tables are those of the plain step."""
    with in_mode(name):
        runs = []
        for is_ahead in (True, False) if num_devices == 1 else (True,):
            collection = cases.collection_of(num_devices, capacity=32)
            model, optimizer = declare(collection)
            for dense in (model.out, optimizer):
                nnx.update(dense, cases.everywhere(collection, nnx.state(dense)))
            step = nnx.jit(train, donate_argnums=(0, 1))
            step = collection.ahead(step) if is_ahead else step
            losses, waits, capacities = [], [], set()
            for number in range(18 if num_devices == 1 else 30):
                batch = cases.new_users(collection, number)
                model.embed.grow(batch)
                with cases.compiled_on_the_spot("train") as threads:
                    loss, stats = step(model, optimizer, batch)
                stats.check()
                losses.append(float(loss))
                waits.append(len(threads))
                capacities.add(state_of(model).stores[0].capacity)
                if is_ahead:
                    step.wait()
            assert len(capacities) == 3 and sum(waits) == (1 if is_ahead else 3)
            runs.append((losses, collection.export_table(state_of(model), "user")))
            if is_ahead:
                assert (step.num_compiled, step.num_hits_ahead) == (1, 2) and max(step.stalls_s[1:]) < 1
        cases.assert_equal(runs[0], runs[-1])


def test_two_layers_and_a_shared_part_find_their_program(by_doubling):
    """Collections grow separately in a model whose modules share a module."""
    collections = cases.collection_of(capacity=32), cases.collection_of(capacity=64)

    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = (layers.Embeddings(collection) for collection in collections)
            self.out = self.again = nnx.Linear(cases.WIDTH, 1, rngs=rngs)

        def __call__(self, batch):
            first, two = (cases.join(layer(batch.features)) for layer in (self.one, self.two))
            return (self.out(first) + self.again(two))[:, 0]

    @nnx.jit
    def step(model, batch):
        loss, grads = layers.value_and_grad(lambda model: cases.loss_of(model(batch), batch["label"]))(model)
        return loss, layers.update(model, grads)

    step, model = collections[0].ahead(step, collections[1]), Pair(nnx.Rngs(0))
    for number in range(18):
        batch = cases.new_users(collections[0], number)
        layers.grow(model, {"one": batch, "two": batch})
        with cases.compiled_on_the_spot("step") as threads:
            step(model, batch)
        assert len(threads) == (number == 0)
        step.wait()
    assert step.num_compiled == 1 and step.num_hits_ahead == 2
    assert [layer.tables.get_value().stores[0].capacity for layer in (model.one, model.two)] == [256, 256]


def test_scans_over_steps(mode):
    """nnx.scan with the model as carry and lax.scan over its split state are loops of steps in place."""
    collection = cases.one_device()
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    ((stacked, _),) = collection.pipeline(cases.raw_batches(3), steps_per_call=3)
    looped = declare(collection)
    wanted = [float(train(*looped, batch)[0]) for batch in batches]

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def by_nnx(carry, batch):
        return carry, train(*carry, batch)[0]

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def steps(model, optimizer, stacked):
        return by_nnx((model, optimizer), stacked)[1]

    scanned = declare(collection)
    before = cases.addresses(state_of(scanned[0]))
    np.testing.assert_allclose(steps(*scanned, stacked), wanted, rtol=1e-6)
    assert cases.addresses(state_of(scanned[0])) == before

    again = declare(collection)
    graphdef, state = nnx.split(again)

    def by_lax(state, batch):
        merged = nnx.merge(graphdef, state, copy=True)
        loss, _ = train(*merged, batch)
        return nnx.state(merged), loss

    state, losses = jax.lax.scan(by_lax, state, stacked)
    nnx.update(again, state)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for model, _ in (scanned, again):
        for spec in collection.tables:
            own, other = (collection.export_table(state_of(ranker), spec.name) for ranker in (model, looped[0]))
            np.testing.assert_array_equal(own["keys"], other["keys"])
            np.testing.assert_allclose(own["rows"], other["rows"], rtol=1e-5)


def test_scans_look_up_ahead(mode):
    """`jaxsok.scan` over the split state of model and optimizer does what a loop does, on a CPU to the bit."""
    collection = cases.one_device()

    @nnx.jit
    def step(model, optimizer, batch, plan):
        loss, grads = layers.value_and_grad(lambda model: cases.loss_of(model(plan), batch["label"]))(model)
        optimizer.update(model, grads)
        return loss, model.embed.update(grads)

    @nnx.jit
    def call(model, optimizer, batches, plans):
        graphdef, state = nnx.split((model, optimizer))

        def body(state, pair):
            merged = nnx.merge(graphdef, state, copy=True)
            return nnx.state(merged), step(*merged, *pair)

        state, results = jaxsok.scan(body, state, (batches, plans))
        nnx.update((model, optimizer), state)
        return results

    runs = []
    for run, options in ((step, {}), (call, {"lookahead": 1, "steps_per_call": 2})):
        declared, losses, in_flight = declare(collection), [], []
        for batch, plan in collection.pipeline(cases.raw_batches(6), **options):
            declared[0].embed.grow(batch)
            loss, stats = run(*declared, batch, plan)
            stats.check()
            losses += np.ravel(loss).tolist()
            in_flight.append(len(state_of(declared[0]).ahead))
        assert in_flight == ([1, 1, 0] if options else [0] * 6)
        exports = [collection.export_table(state_of(declared[0]), spec.name) for spec in collection.tables]
        runs.append((losses, [(each["keys"], each["rows"]) for each in exports]))
    if jax.default_backend() == "cpu":
        jax.tree.map(np.testing.assert_array_equal, *runs)
    else:  # XLA fuses the sums of the two programs in different ways
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *runs)


# Several lookups --------------------------------------------------------------------------------------------------


class Twins(nnx.Module):
    """A layer that is called twice."""

    def __init__(self, collection, rngs):
        self.embed = layers.Embeddings(collection)
        self.out = nnx.Linear(2 * cases.WIDTH, 1, rngs=rngs)

    def __call__(self, features, others):
        joined = [cases.join(self.embed(batch_features)) for batch_features in (features, others)]
        return self.out(jnp.concatenate(joined, axis=-1))[:, 0]


def test_two_lookups_in_one_step(mode):
    """Rows that both calls use step once with the sum of both gradients, like core's update with two plans."""
    collection = cases.collection_of(optimizer=jaxsok.optim.adam(0.1))
    model = Twins(collection, nnx.Rngs(0))
    first, second = (collection.batch(raw) for raw in cases.raw_batches(2))

    def loss(model):
        return cases.loss_of(model(first.features, second.features), first["label"])

    value, grads = layers.value_and_grad(loss)(model)
    kernel, bias = model.out.kernel[...], model.out.bias[...]
    model.embed.update(grads)

    embeddings, state, plan = collection.lookup(collection.init(seed=0), first.features)
    others, state, other_plan = collection.lookup(state, second.features)

    def loss_of_embeddings(embeddings, others):
        x = jnp.concatenate([cases.join(embeddings), cases.join(others)], axis=-1)
        return cases.loss_of((x @ kernel + bias)[:, 0], first["label"])

    wanted, gradients = jax.value_and_grad(loss_of_embeddings, (0, 1))(embeddings, others)
    state, _ = collection.update(state, [plan, other_plan], list(gradients))
    assert value == wanted
    cases.assert_equal(state_of(model), state)
    assert int(state.step) == 1


def test_two_layers(mode):
    """In a model with two collections, update and grow cover all layers and name them by path."""

    class Pair(nnx.Module):
        def __init__(self):
            self.towers = nnx.List([layers.Embeddings(cases.collection_of(), seed=seed) for seed in (0, 1)])

        def __call__(self, features, only=None):
            used = self.towers if only is None else [self.towers[only]]
            return sum(jnp.sum(cases.join(tower(features)) ** 2) for tower in used)

    model = Pair()
    features = model.towers[0].collection.batch(cases.raw_batches(1)[0]).features
    layers.grow(model, dict.fromkeys(("towers.0", "towers.1"), features), steps=2)
    with pytest.raises(ValueError, match=r"grow: batch: got one for 2 layers, wanted one by path of a layer"):
        layers.grow(model, features)
    with pytest.raises(ValueError, match=r"grow: batch: got batches for \['towers.2'\]"):
        layers.grow(model, {"towers.2": features})
    _, grads = layers.value_and_grad(lambda model: model(features))(model)
    stats = layers.update(model, grads)
    assert sorted(stats) == ["towers.0", "towers.1"]
    assert {int(tower.tables.get_value().step) for tower in model.towers} == {1}
    _, grads = layers.value_and_grad(lambda model: model(features, only=1))(model)
    with pytest.raises(ValueError, match="2 TapVariables"):
        model.towers[1].update(grads)
    assert sorted(layers.update(model, grads)) == ["towers.1"]
    _, grads = layers.value_and_grad(lambda model: model(features, only=0))(model)
    model.towers[0].update(grads["towers"][0])
    assert [int(tower.tables.get_value().step) for tower in model.towers] == [2, 2]


def test_two_layers_step_together_or_not_at_all(mode):
    """Outside jit too, a layer without gradients leaves the others unchanged, with their lookups."""
    model = nnx.Dict(one=layers.Embeddings(cases.collection_of()), two=layers.Embeddings(cases.collection_of()))
    features = model["one"].collection.batch(cases.raw_batches(1)[0]).features

    def loss(model):
        return sum(jnp.sum(cases.join(model[name](features)) ** 2) for name in ("one", "two"))

    _, grads = layers.value_and_grad(loss)(model)
    before = cases.snapshot(nnx.state(model))
    wrong = jax.tree.map(lambda leaf: leaf, grads)
    wrong["two"]["taps"] = layers.TapVariable(())
    assert "got none for lookup 1 of 1" in message(ValueError, lambda: layers.update(model, wrong))
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)
    (taps,) = grads["two"]["taps"].get_value()
    wrong["two"]["taps"] = layers.TapVariable(({**taps, "user": taps["user"][:, :1]},))
    assert "user" in message(ValueError, lambda: layers.update(model, wrong))
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)
    assert sorted(layers.update(model, grads)) == ["one", "two"]


# Evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing(mode):
    """eval(), nnx.view and the argument are equal; keys without a row count as missing and get none."""
    collection = cases.one_device()
    model, optimizer = declare(collection)
    known, new = cases.raw_batches(1)[0], cases.raw_batches(1, seed=1, num_keys=10**6)[0]
    train(model, optimizer, collection.batch(known))
    oracle = oracle_of(model)
    for spec in collection.tables:
        table = collection.export_table(state_of(model), spec.name)
        for key, row in zip(table["keys"].tolist(), table["rows"], strict=True):
            oracle.rows[spec.name, key] = row.astype(np.float64)
    before = cases.snapshot(nnx.state(model))
    features = collection.batch(new).features
    scores = oracle.forward(new, insert=False)[1]
    view = nnx.view(model, deterministic=True)
    assert view.embed.deterministic and not model.embed.deterministic
    model.eval()
    for evaluated in (view, model):
        np.testing.assert_allclose(nnx.jit(lambda model, features: model(features))(evaluated, features), scores, 1e-4)
    model.train()
    assert model.embed.deterministic is False
    embeddings = model.embed(features, deterministic=True)
    found, stats = model.embed.find(features)
    cases.assert_equal(embeddings, found)
    assert stats.to_dict()["user"]["num_missing"] == 8
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)


def test_evaluation_in_a_gradient(mode):
    """With a frozen layer and trained dense parameters, no lookup waits, so there is none to update."""
    collection = cases.one_device()
    model, optimizer = declare(collection)
    model.eval()
    before = cases.snapshot(state_of(model))
    kernel = np.array(model.out.kernel[...])
    _, grads = layers.value_and_grad(loss_fn)(model, collection.batch(cases.raw_batches(1)[0]))
    optimizer.update(model, grads)
    assert not np.array_equal(kernel, model.out.kernel[...])
    cases.assert_equal(cases.snapshot(state_of(model)), before)
    with pytest.raises(ValueError, match="got no lookup to update"):
        model.embed.update(grads)


# Other transformations --------------------------------------------------------------------------------------------


def remat_of_all(model, batch):
    """Recomputes the lookup too."""
    scores = nnx.remat(lambda model, features: model(features) ** 2)(model, batch.features)
    return cases.loss_of(scores, batch["label"])


def remat_of_dense(model, batch):
    """Recomputes the dense part alone."""
    scores = nnx.remat(lambda out, x: out(x)[:, 0] ** 2)(model.out, cases.join(model.embed(batch.features)))
    return cases.loss_of(scores, batch["label"])


def no_remat(model, batch):
    """Recomputes nothing."""
    return cases.loss_of(model(batch.features) ** 2, batch["label"])


def test_remat_around_a_lookup_looks_up_twice():
    """The numbers are the same, as docs/flax.md says; remat around a lookup adds a second one, elsewhere none."""
    collection = cases.collection_of(capacity=1 << 12)
    batch = collection.batch(cases.raw_batches(1)[0])
    seen = {}
    for loss in (no_remat, remat_of_all, remat_of_dense):

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def step(model, optimizer, batch, loss=loss):
            value, grads = layers.value_and_grad(loss)(model, batch)
            optimizer.update(model, grads)
            return value, model.embed.update(grads)

        model, optimizer = declare(collection)
        text = step.lower(model, optimizer, batch).as_text()
        value, stats = step(model, optimizer, batch)
        seen[loss] = text.count("@jaxsok_lookup"), float(value), stats.to_dict(), cases.snapshot(state_of(model).stores)
    (once, *numbers, tables), (twice, *same, its_tables), (again, *also, other_tables) = seen.values()
    assert (once, twice, again) == (2, 4, 2)  # for each of two stores
    assert numbers == same == also
    for other in (its_tables, other_tables):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), tables, other)


def test_vmap_over_a_lookup_is_refused():
    """A table has one state, so no lookup per element of a batch exists."""
    collection = cases.one_device()
    model, _ = declare(collection)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[collection.batch(r) for r in cases.raw_batches(2)])

    def loss(model, batch):
        return nnx.vmap(lambda model, features: model(features), in_axes=(None, 0))(model, batch.features).sum()

    model.eval()
    with pytest.raises((NotImplementedError, TypeError, ValueError), match="vmap"):
        loss(model, stacked)


def test_made_inside_jit_and_in_the_abstract():
    """nnx.jit makes a model, nnx.eval_shape its shapes."""
    collection = cases.one_device()
    made = nnx.jit(lambda: Model(collection, nnx.Rngs(0)))()
    cases.assert_equal(state_of(made), collection.init(seed=0))
    shapes = nnx.eval_shape(lambda: Model(collection, nnx.Rngs(0)))
    assert [leaf.shape for leaf in jax.tree.leaves(state_of(shapes))] == [
        leaf.shape for leaf in jax.tree.leaves(state_of(made))
    ]


def test_a_layer_shared_by_two_modules():
    """In graph mode it is one layer, found once, and its lookups are one update."""
    collection = cases.one_device()
    embed = layers.Embeddings(collection)
    model = nnx.Dict(one=nnx.Dict(embed=embed), two=nnx.Dict(embed=embed))
    features = collection.batch(cases.raw_batches(1)[0]).features

    def loss(model):
        return sum(jnp.sum(cases.join(model[name].embed(features))) for name in ("one", "two"))

    _, grads = layers.value_and_grad(loss)(model)
    assert len(embed.plans.get_value()) == 2
    (stats,) = layers.update(model, grads).values()
    assert stats.to_dict()["user"]["num_found"] > stats.to_dict()["user"]["num_inserted"] > 0


# Errors -----------------------------------------------------------------------------------------------------------


def message(error, call):
    """Returns the message of a refusal on one line."""
    with pytest.raises(error) as info:
        call()
    return re.sub(r"\s+", " ", str(info.value))


def test_errors_of_a_step_change_nothing(mode):
    """Each error says what to do, and the model is unchanged."""
    collection = cases.one_device()
    model, optimizer = declare(collection)
    batch, other = (collection.batch(raw) for raw in cases.raw_batches(2))
    small = collection.batch(cases.raw_batches(1, num_samples=4)[0])
    before = cases.snapshot(nnx.state(model))
    stranger = jaxsok.Collection([jaxsok.TableSpec("x", 2, jaxsok.optim.sgd(0.1))], [jaxsok.FeatureSpec("x", "x")])
    foreign = stranger.batch({"x": np.array([7])}).features

    assert "call set_taps(features) before the gradient" in message(ValueError, lambda: model(batch.features))
    assert "To evaluate: model.eval()" in message(ValueError, lambda: model(batch.features))
    for call in (lambda: model.embed.update({}), lambda: model.embed.update([])):
        assert "Embeddings.update" in message(ValueError, call)
    assert "got 0 TapVariables" in message(ValueError, lambda: model.embed.update(nnx.state(model, nnx.Param)))
    assert "update: model: got one without lookups" in message(ValueError, lambda: layers.update(model, {}))
    for call in (lambda: model.embed.set_taps(foreign), lambda: model.embed.find(foreign)):
        assert "features: got those of a collection with other specs" in message(ValueError, call)
    assert "collection with other specs" in message(
        ValueError, lambda: layers.value_and_grad(lambda model: jnp.sum(model(foreign)))(model)
    )
    assert "lookup: features: got dict, wanted Features" in message(
        TypeError, lambda: layers.value_and_grad(lambda model: jnp.sum(model({"user": np.arange(8)})))(model)
    )
    assert "value_and_grad: model: got one without" in message(
        ValueError, lambda: layers.value_and_grad(lambda out: out(jnp.ones(cases.WIDTH)).sum())(model.out)
    )
    assert "collection: got State" in message(TypeError, lambda: layers.Embeddings(collection.init()))
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)

    def failing(model):
        model(batch.features)
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        layers.value_and_grad(failing)(model)
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)

    model.embed.set_taps(small.features)
    assert "wanted that of its embedding, float32[8, 2, 3]" in message(ValueError, lambda: model(batch.features))
    model.embed.set_taps()
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)

    _, grads = layers.value_and_grad(loss_fn)(model, batch)
    looked_up = cases.snapshot(nnx.state(model))
    of_params = nnx.state(grads, nnx.Param)
    assert "got 0 TapVariables" in message(ValueError, lambda: model.embed.update(of_params))
    assert "got none for the taps of 'embed'" in message(ValueError, lambda: layers.update(model, of_params))
    assert "got lookup 1 of 1 twice" in message(ValueError, lambda: model.embed.update([grads, grads]))
    assert "got none for lookup 1 of 1" in message(ValueError, lambda: model.embed._update_tables([()], None))
    assert "learning_rate" in message(TypeError, lambda: model.embed.update(grads, learning_rate="fast"))
    pending = message(ValueError, lambda: layers.value_and_grad(loss_fn)(model, other))
    assert "got 1 lookups without an update" in pending and "accumulate=True" in pending and "discard()" in pending
    cases.assert_equal(cases.snapshot(nnx.state(model)), looked_up)
    assert model.embed.update(grads, learning_rate=jnp.float32(0.5)).to_dict()["user"]["num_inserted"] > 0
    assert "got no lookup to update" in message(ValueError, lambda: model.embed.update(grads))


def test_gradients_of_other_taps_are_refused(mode):
    """More taps than lookups mean that the taps belong to another step."""
    collection = cases.one_device()
    model, _ = declare(collection)
    batch = collection.batch(cases.raw_batches(1)[0])
    _, grads = layers.value_and_grad(loss_fn)(model, batch)
    taps = jax.tree.map(lambda leaf: leaf, _taps(grads))
    assert "got those of 2 taps for 1 lookups" in message(
        ValueError, lambda: model.embed._update_tables([(taps, taps)], None)
    )


def test_one_collection_grows_with_one_state():
    """Two layers over one collection would disagree about the rows in use."""
    collection = cases.one_device()
    model = nnx.Dict(one=layers.Embeddings(collection), two=layers.Embeddings(collection))
    assert "got one collection for the layers ['one', 'two']" in message(ValueError, lambda: layers.grow(model))


@pytest.mark.filterwarnings("error:grow")
@pytest.mark.parametrize("is_model", [False, True])
def test_growth_that_fails_after_it_has_evicted(is_model):
    """The layer has the state that is left; that before is gone."""
    collection, raws = cases.full_and_young()
    layer = layers.Embeddings(collection)
    grow = functools.partial(layers.grow, nnx.Dict(embed=layer)) if is_model else layer.grow
    for raw in raws[:2]:
        grow(collection.batch(raw))
        layer.tables.set_value(cases.step_of(collection, layer.tables.get_value(), collection.batch(raw)))
    with pytest.raises(RuntimeWarning, match="after eviction by TimeToLive"):
        grow(collection.batch(raws[2]))
    assert collection.num_rows(layer.tables.get_value()) == {"item": 28}


def test_growth_of_a_model_without_layers():
    """A model that was not meant would grow nothing."""
    assert "grow: got no tables of a layer" in message(
        ValueError, lambda: layers.grow(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    )


@pytest.mark.parametrize("options", [{}, {"lookahead": 1}, {"staleness": 1}])
def test_a_batch_that_is_looked_up_twice_in_a_step(options):
    """Its second lookup would take the next batch out of those in flight; without lookups ahead it finds the same."""
    raws = [{"clicked": np.random.default_rng(step).integers(0, 30, 8)} for step in range(3)]
    table = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])
    model = layers.Embeddings(collection)

    @nnx.jit
    def step(model, plan):
        difference = lambda model: jnp.abs(model(plan)["clicked"] - model(plan)["clicked"]).sum()  # noqa: E731
        loss, grads = layers.value_and_grad(difference)(model)
        return loss, model.update(grads)

    for batch, plan in collection.pipeline(raws, **options):
        model.grow(batch)
        if options:
            assert "got a batch that this step has looked up already" in message(ValueError, lambda: step(model, plan))  # noqa: B023
            break
        loss, stats = step(model, plan)
        stats.check()
        assert loss == 0.0


def test_layers_that_share_tables_alone_are_refused(mode):
    """Each would step from the old rows. Flax's modules in tree mode share nothing."""
    if mode == "tree":
        return
    collection = cases.one_device()
    model = nnx.Dict(one=layers.Embeddings(collection), two=layers.Embeddings(collection))
    model.two.tables = model.one.tables
    features = collection.batch(cases.raw_batches(1)[0]).features
    before = cases.snapshot(nnx.state(model))
    differentiate = layers.value_and_grad(lambda model: jnp.sum(cases.join(model.one(features))))
    for call in (lambda: differentiate(model), lambda: layers.update(model, {}), lambda: layers.grow(model)):
        assert "got one TableVariable for the layers ['one', 'two'], wanted one layer" in message(ValueError, call)
    cases.assert_equal(cases.snapshot(nnx.state(model)), before)


@pytest.mark.parametrize("names", [("model", "view"), ("model", "eval_model")])
def test_a_view_of_a_layer_is_the_same_layer(names):
    """A module may hold a model and a view of it, in any order."""
    collection = cases.one_device()
    model, _ = declare(collection)
    alone, _ = declare(collection)
    batch = collection.batch(cases.raw_batches(1)[0])
    both = nnx.Dict(zip(names, (model, nnx.view(model, deterministic=True)), strict=True))

    def loss(both, batch):
        found = both[names[1]].embed(batch.features)  # a lookup that finds nothing yet
        return loss_fn(both[names[0]], batch) + 0.0 * jnp.sum(cases.join(found))

    layers.grow(both, batch)
    value, grads = layers.value_and_grad(loss)(both, batch)
    stats = layers.update(both, grads)
    wanted, its_grads = layers.value_and_grad(loss_fn)(alone, batch)
    alone.embed.update(its_grads)
    assert value == wanted and len(stats) == 1
    got, wanted = (programs.by_key(collection, state_of(each), "user") for each in (model, alone))
    np.testing.assert_array_equal(programs.bits(got["rows"]), programs.bits(wanted["rows"]))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_model_that_is_a_list_or_a_tuple(mode, kind):
    """One gradient and those of two micro-batches, clipped and taken, as for a model that is a module."""
    collection = cases.one_device()
    batches = [collection.batch(raw) for raw in cases.raw_batches(2)]

    def run(model, of_model, num_batches):
        loss = lambda model, batch: loss_fn(of_model(model), batch)  # noqa: E731
        grads = [
            layers.value_and_grad(loss, accumulate=number > 0)(model, batch)[1]
            for number, batch in enumerate(batches[:num_batches])
        ]
        grads, norm = layers.clip_by_global_norm(model, grads if num_batches > 1 else grads[0], 0.5)
        (stats,) = layers.update(model, grads).values()
        return norm, stats.to_dict(), state_of(of_model(model))

    for num_batches in (1, 2):
        first, second, third = (declare(collection)[0] for _ in range(3))
        wanted = run(first, lambda model: model, num_batches)
        cases.assert_equal(run(kind([nnx.Linear(1, 1, rngs=nnx.Rngs(0)), second]), lambda m: m[1], num_batches), wanted)
        cases.assert_equal(run(kind([kind([third])]), lambda m: m[0][0], num_batches), wanted)


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat])
def test_two_lookups_by_one_inner_function(wrap):
    """JAX traces it once for both, and in later steps not at all."""
    collection = cases.one_device()
    encode = wrap(lambda model, features: model(features))
    batches = [collection.batch(raw) for raw in cases.raw_batches(4)]

    def run(encode):
        model, _ = declare(collection)
        for first, second in (batches[:2], batches[2:]):
            loss = lambda model, x, y: jnp.sum(encode(model, x.features) * encode(model, y.features))  # noqa: E731
            _, grads = layers.value_and_grad(loss)(model, first, second)
            model.embed.update(grads).check()
        return programs.by_key(collection, state_of(model), "user")

    got, wanted = run(encode), run(lambda model, features: model(features))
    np.testing.assert_array_equal(got["keys"], wanted["keys"])
    np.testing.assert_allclose(got["rows"], wanted["rows"], rtol=1e-5, atol=1e-6)


def test_a_step_that_a_condition_skips_may_drain():
    """Both branches leave a model of one structure, also in the step with which draining ends."""
    raws = [{"clicked": np.random.default_rng(step).integers(0, 30, 8)} for step in range(6)]
    table = jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.1), capacity=64)

    def train(**options):
        collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])
        model = layers.Embeddings(collection)

        @nnx.jit
        def step(model, plan, is_updated):
            loss, grads = layers.value_and_grad(lambda model: jnp.mean((model(plan)["clicked"] - 1.0) ** 2))(model)
            take = lambda model, grads: (model.update(grads), None)[1]  # noqa: E731
            nnx.cond(is_updated, take, lambda model, grads: model.discard(), model, grads)
            return loss

        losses = []
        for number, (batch, plan) in enumerate(collection.pipeline(raws, **options)):
            if options and number in (1, 3):
                model.drain()
            model.grow(batch)
            losses.append(float(step(model, plan, np.array(number not in (2, 3)))))
        assert not model.tables.get_value().drains
        return losses, programs.by_key(collection, model.tables.get_value(), "item")["rows"]

    cases.assert_equal(train(lookahead=1), train())


@pytest.mark.parametrize("options", [{"lookahead": 1}, {"staleness": 2}], ids=["exact", "stale"])
def test_lookups_ahead_need_no_other_step(options):
    """A model's loop is the same as without lookups ahead; exact lookups give its bits, and `drain` ends them."""
    raws = [{"clicked": np.random.default_rng(step).integers(0, 30, 8)} for step in range(6)]

    def train(**options):
        table = jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.1), capacity=64)
        collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.embed, self.out = layers.Embeddings(collection), nnx.Linear(4, 1, rngs=rngs)

            def __call__(self, features):
                return self.out(self.embed(features)["clicked"])

        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, plan):
            loss, grads = layers.value_and_grad(lambda model: jnp.mean((model(plan) - 1.0) ** 2))(model)
            optimizer.update(model, grads)
            return loss, model.embed.update(grads)

        losses = []
        for number, (batch, plan) in enumerate(collection.pipeline(raws, **options)):
            layers.grow(model, batch)
            if number == 4 - max(options.values(), default=0):
                model.embed.drain()
            loss, stats = step(model, optimizer, plan)
            stats.check()
            losses.append(float(loss))
            if number == 3:  # the lookup is drained
                model.embed.find(batch.features)
        return losses, programs.by_key(collection, model.embed.tables.get_value(), "item")["rows"]

    (want, rows), (got, others) = train(), train(**options)
    if "lookahead" in options:
        assert want == got
        np.testing.assert_array_equal(programs.bits(rows), programs.bits(others))
    else:
        assert want[0] == got[0] and want != got
