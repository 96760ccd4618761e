"""The Linen layer: equal to the core to the bit, to a NumPy model within rounding; tables are apart from "params"."""

import functools
import re

import compiled_cases
import jax
import jax.numpy as jnp
import layer_cases as cases
import numpy as np
import optax
import pytest
from flax import linen as nn, serialization
from flax.training import train_state
from hypothesis import given, settings, strategies as st

import jaxsok
from jaxsok.layers import linen as layers

TRAINING = ["tables", "plans"]

# A layer makes its state itself; index and all are compared with the core's.
pytestmark = pytest.mark.usefixtures("one_salt", "quickly", "looks_ahead")


@pytest.fixture(autouse=True)
def world_of_users():
    """Allows promotion of dtypes and ranks, which Flax and Optax use."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nn.Module):
    """A model of embeddings and one linear layer."""

    collection: jaxsok.Collection

    def setup(self):
        self.embed = layers.Embeddings(self.collection)
        self.out = nn.Dense(1)

    def __call__(self, features):
        return self.out(cases.join(self.embed(features)))[:, 0]


@functools.cache
def variables_of(model):
    """Returns variables as `init` makes them."""
    return model.init(jax.random.key(0), model.collection.batch(cases.raw_batches(1)[0]).features)


def declare(collection, tx=None):
    """Returns a model, its train state and its tables."""
    model = Model(collection)
    variables = jax.tree.map(jnp.copy, variables_of(model))
    tx = optax.sgd(cases.RATE) if tx is None else tx
    params = cases.everywhere(collection, variables["params"])
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(opt_state=cases.everywhere(collection, state.opt_state))
    return model, state, variables["tables"]


def gradients_of(model, params, tables, batch):
    """Returns (loss, updates), (g_params, g_taps)."""

    def loss_fn(params, taps):
        variables = {"params": params, "sparse_taps": taps, "tables": tables}
        scores, updates = model.apply(variables, batch.features, mutable=TRAINING)
        return cases.loss_of(scores, batch["label"]), updates

    taps = layers.zero_taps(model, {"params": params, "tables": tables}, batch.features)
    return jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(params, taps)


@functools.cache
def train(model, donate=True):
    """Returns a step as a Linen user writes it."""

    def step(state, tables, batch):
        (loss, updates), (g_params, g_taps) = gradients_of(model, state.params, tables, batch)
        tables, stats = layers.apply_updates(updates, g_taps)
        return state.apply_gradients(grads=g_params), tables, loss, stats["embed"]

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())


@functools.cache
def train_twice(model):
    """Returns a step of two micro-batches."""

    def step(state, tables, first, second):
        (loss, updates), (g_params, g_taps) = gradients_of(model, state.params, tables, first)
        (more, others), (its_params, its_taps) = gradients_of(model, state.params, updates["tables"], second)
        tables, stats = layers.apply_updates([updates, others], [g_taps, its_taps])
        state = state.apply_gradients(grads=jax.tree.map(jnp.add, g_params, its_params))
        return state, tables, (loss, more), stats["embed"]

    return jax.jit(step, donate_argnums=(0, 1))


@functools.cache
def evaluate(model):
    """Returns the loss in evaluation."""
    return jax.jit(
        lambda params, tables, batch: cases.loss_of(
            model.apply({"params": params, "tables": tables}, batch.features), batch["label"]
        )
    )


# Agreement with the oracle and the core ---------------------------------------------------------------------------


@settings(max_examples=6)  # each example compiles programs of its own
@given(
    ops=st.lists(
        st.tuples(st.sampled_from(["train", "train twice", "evaluate", "grow"]), st.integers(0, 10**6)), max_size=6
    )
)
def test_any_run_is_that_of_the_oracle(ops):
    """Steps, micro-batches, evaluations and growth run in any order (law 1)."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    oracle = cases.Oracle(state.params["out"]["kernel"], state.params["out"]["bias"])
    for op, seed in ops:
        raw, other = cases.raw_batches(2, seed, num_samples=5)
        batch = collection.batch(raw)
        if op == "train":
            state, tables, loss, stats = train(model)(state, tables, batch)
            np.testing.assert_allclose(loss, oracle.step(raw)[0], rtol=1e-4)
            stats.check()
        elif op == "train twice":
            state, tables, losses, stats = train_twice(model)(state, tables, batch, collection.batch(other))
            np.testing.assert_allclose(losses, oracle.step(raw, other), rtol=1e-4)
            stats.check()
        elif op == "evaluate":
            np.testing.assert_allclose(evaluate(model)(state.params, tables, batch), oracle.loss(raw), rtol=1e-4)
        else:
            tables = layers.grow(collection, tables)
    oracle.assert_tables(collection, tables["embed"]["state"])
    np.testing.assert_allclose(state.params["out"]["kernel"][:, 0], oracle.kernel, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_like_the_core_to_the_bit(num_devices):
    """Losses, tables, counts and parameters have the same bits, since the same functions run."""
    collection = cases.collection_of(num_devices, optimizer=jaxsok.optim.adam(0.1))
    tx = optax.adam(1e-2)
    model, dense, tables = declare(collection, tx=tx)
    params, opt_state = jax.tree.map(jnp.copy, (dense.params, dense.opt_state))
    out = nn.Dense(1)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def core(state, params, opt_state, batch):
        embeddings, state, plan = collection.lookup(state, batch.features)

        def loss_of_dense(params, embeddings):
            scores = out.apply({"params": params["out"]}, cases.join(embeddings))[:, 0]
            return cases.loss_of(scores, batch["label"])

        loss, (g_params, g_embeddings) = jax.value_and_grad(loss_of_dense, (0, 1))(params, embeddings)
        state, stats = collection.update(state, plan, g_embeddings)
        updates, opt_state = tx.update(g_params, opt_state, params)
        return state, optax.apply_updates(params, updates), opt_state, loss, stats

    state = collection.init(seed=0)
    cases.assert_equal(tables["embed"]["state"], state)
    for raw in cases.raw_batches(2 if num_devices > 1 else 4):
        batch = collection.batch(raw)
        dense, tables, loss, stats = train(model)(dense, tables, batch)
        state, params, opt_state, wanted, counts = core(state, params, opt_state, batch)
        assert float(loss) == float(wanted)
        assert stats.to_dict() == counts.to_dict()
    cases.assert_equal(tables["embed"]["state"], state)
    cases.assert_equal(dense.params, params)


def test_gradient_of_taps_is_that_of_the_embeddings():
    """The gradient of sum(c * e ** 2) is 2 c e."""
    collection = cases.one_device()
    layer = layers.Embeddings(collection)
    features = collection.batch(cases.raw_batches(1)[0]).features
    tables = layer.init(jax.random.key(0), features)["tables"]
    factors = {"user": 1.0, "history": 2.0, "ads": 3.0}

    def loss(taps):
        embeddings, updates = layer.apply({"tables": tables, "sparse_taps": taps}, features, mutable=TRAINING)
        return sum(factors[name] * jnp.sum(value**2) for name, value in embeddings.items()), (embeddings, updates)

    taps = layers.zero_taps(layer, {"tables": tables}, features)
    gradients, (embeddings, updates) = jax.grad(loss, has_aux=True)(taps)
    (of_lookup,) = gradients["taps"]
    for name, factor in factors.items():
        np.testing.assert_array_equal(of_lookup[name], 2 * factor * np.asarray(embeddings[name]))
    _, stats = layers.apply_updates(updates, gradients)
    assert stats[""].to_dict()["user"]["num_inserted"] > 0


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_as_the_core_clips(max_norm):
    """The clipped gradients have the core's bits and keep their form."""
    collection = cases.one_device()
    batch = collection.batch(cases.raw_batches(1)[0])
    model, dense, tables = declare(collection)
    (_, updates), (g_params, g_taps) = gradients_of(model, dense.params, tables, batch)
    clipped, of_params, norm = layers.clip_by_global_norm(updates, g_taps, max_norm, g_params)
    _, state, plan = collection.lookup(collection.init(seed=0), batch.features)
    wanted = collection.clip_by_global_norm(state, plan, g_taps["embed"]["taps"][0], max_norm, g_params)
    assert norm == wanted[2] and norm > 0.5
    cases.assert_equal((clipped["embed"]["taps"][0], of_params), wanted[:2])
    cases.assert_equal(layers.clip_by_global_norm(updates, g_taps, max_norm)[1], None)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_clipped_as_dense_optax_clips(num_batches):
    """Keys repeat within and between micro-batches, and the norm is that of whole tables, not that of single uses."""
    collection = cases.one_device()
    raws = cases.raw_batches(num_batches, num_keys=3)
    model, state, tables = declare(collection)
    dense = cases.dense_gradients(state.params["out"]["kernel"], state.params["out"]["bias"], raws)
    wanted, _ = optax.clip_by_global_norm(0.5).update(dense, optax.EmptyState())

    @jax.jit
    def step(params, tables, batches):
        updates, of_params, of_taps = [], [], []
        for batch in batches:
            (_, update), (g_params, g_taps) = gradients_of(model, params, tables, batch)
            tables = update["tables"]
            updates.append(update), of_params.append(g_params), of_taps.append(g_taps)
        if num_batches == 1:
            (updates,), (of_taps,) = updates, of_taps
        of_params = jax.tree.map(lambda *leaves: sum(leaves), *of_params)
        unclipped = optax.tree.norm((of_taps, of_params))
        of_taps, of_params, norm = layers.clip_by_global_norm(updates, of_taps, 0.5, of_params)
        return layers.apply_updates(updates, of_taps)[0], of_params, norm, unclipped

    tables, of_params, norm, unclipped = step(state.params, tables, [collection.batch(raw) for raw in raws])
    np.testing.assert_allclose(norm, optax.tree.norm(dense), rtol=1e-5)
    assert norm > 0.5 and abs(norm - unclipped) > 0.01 * norm  # Optax's norm of the layer's gradients differs
    np.testing.assert_allclose(of_params["out"]["kernel"][:, 0], wanted["kernel"], rtol=1e-4, atol=1e-7)
    cases.assert_stepped(collection, tables["embed"]["state"], wanted)


def test_clipping_refuses_what_does_not_fit():
    """The error names the function."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    batch = collection.batch(cases.raw_batches(1)[0])
    (_, updates), (_, g_taps) = gradients_of(model, state.params, tables, batch)
    for updated, gradients, max_norm, text in (
        (updates, {}, 1.0, "clip_by_global_norm: got nothing at 'embed'"),
        (updates, [g_taps, g_taps], 1.0, "clip_by_global_norm: gradients: got 2 for 1 updates"),
        ({"tables": tables}, g_taps, 1.0, "clip_by_global_norm: updates: got ['tables']"),
        (updates, g_taps, 0.0, "clip_by_global_norm: max_norm: got 0.0"),
    ):
        assert text in message(ValueError, functools.partial(layers.clip_by_global_norm, updated, gradients, max_norm))


# Collections of variables -----------------------------------------------------------------------------------------


def test_init_gives_empty_tables_beside_params():
    """They equal those of Collection.init, under jit or not; dense tools see "params" alone."""
    collection = cases.one_device()
    model, state, tables = declare(collection, tx=optax.adam(1e-2))
    num_dense = cases.WIDTH + 1
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == num_dense
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * num_dense + 1
    features = collection.batch(cases.raw_batches(1)[0]).features
    for variables in (model.init(jax.random.key(0), features), jax.jit(model.init)(jax.random.key(0), features)):
        assert sorted(variables) == ["params", "tables"]
        cases.assert_equal(variables["tables"]["embed"]["state"], collection.init(seed=0))
    seeded = layers.Embeddings(collection, seed=5).init(jax.random.key(0), features)["tables"]["state"]
    cases.assert_equal(seeded, collection.init(seed=5))


def test_checkpoints(tmp_path):
    """A train state without tables and the tables' state are restored separately, and training continues alike."""
    orbax = pytest.importorskip("orbax.checkpoint")
    collection = cases.collection_of(optimizer=jaxsok.optim.adam(0.1))
    model, state, tables = declare(collection)
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    for batch in batches[:2]:
        state, tables, _, _ = train(model)(state, tables, batch)
    assert len(serialization.to_bytes(state)) < 1024 < sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tables", tables)
        checkpointer.save(tmp_path / "params", state.params)
    _, fresh, empty = declare(collection)
    with orbax.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "tables", empty)
        fresh = fresh.replace(params=checkpointer.restore(tmp_path / "params", fresh.params))
    step = train(model, donate=False)
    _, other, its_loss, _ = step(fresh, restored, batches[2])
    _, tables, loss, _ = step(state, tables, batches[2])
    assert loss == its_loss
    cases.assert_equal(other, tables)


# In place, one program --------------------------------------------------------------------------------------------


def test_donated_tables_stay_where_they_are():
    """Donated tables keep their buffers (law 9), and one program serves all batches of a size."""
    collection = cases.collection_of()
    model, state, tables = declare(collection)
    step = train(model)
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    small = [collection.batch(raw) for raw in cases.raw_batches(2, num_samples=4)]
    # In a new TrainState the step number is a Python integer, and later an array, so two steps are taken.
    for batch in batches[:2]:
        state, tables, _, _ = step(state, tables, batch)
    before, num_programs = cases.addresses(tables), step._cache_size()
    for batch in [*batches, *small, *batches]:
        state, tables, _, stats = step(state, tables, batch)
        stats.check()
        assert cases.addresses(tables) == before
    assert step._cache_size() == num_programs + 1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_no_table_sized_copy(num_devices):
    """The program that XLA makes of a step holds no copy of a table."""
    capacity = 1 << 12
    collection = cases.collection_of(num_devices, capacity=capacity)
    model, state, tables = declare(collection)
    text = train(model).lower(state, tables, collection.batch(cases.raw_batches(1)[0])).compile().as_text()
    assert "jaxsok_update" in text
    assert not compiled_cases.table_copies(text, capacity * 3 * 4)


def test_a_clock_of_ones_own():
    """Last uses are those of the clock, which is an argument of the step, and rows leave by it."""
    collection = cases.collection_that_evicts()
    model, left = layers.Embeddings(collection), []
    batches = {clock: collection.batch({"item": np.array(keys)}) for clock, keys in cases.CLOCKED.items()}
    tables = model.init(jax.random.key(0), batches[500].features)["tables"]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tables, features, clock):
        def loss(taps):
            variables = {"tables": tables, "sparse_taps": taps}
            embeddings, updates = model.apply(variables, features, clock=clock, mutable=["tables", "plans"])
            return embeddings["item"].sum(), updates

        taps = layers.zero_taps(model, {"tables": tables}, features, clock=clock)["taps"]
        gradients, updates = jax.grad(loss, has_aux=True)({"taps": taps})
        tables, stats = layers.apply_updates(updates, gradients)
        return tables, stats[""]

    for clock, batch in batches.items():
        tables = layers.grow(collection, tables, batch, clock=clock, hand_over=lambda *records: left.append(records))
        tables, stats = step(tables, batch.features, np.uint32(clock))
        stats.check()
    cases.assert_clocked(collection, tables["state"], left)


def test_growth_between_steps():
    """A table grows from 4 rows to many; nothing is refused, and all rows learn."""
    collection = cases.collection_of(capacity=4)
    raws = cases.raw_batches(3, num_keys=200)
    model, state, tables = declare(collection)
    oracle = cases.Oracle(state.params["out"]["kernel"], state.params["out"]["bias"])
    for raw in raws:
        batch = collection.batch(raw)
        tables = layers.grow(collection, tables)
        state, tables, _, stats = train(model)(state, tables, batch)
        stats.check()
        oracle.step(raw)
    assert tables["embed"]["state"].stores[0].capacity > 4
    oracle.assert_tables(collection, tables["embed"]["state"])


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_growth_finds_its_program(num_devices, by_doubling):
    """With the state in a train state, no growth makes a call wait for a compilation."""
    collection = cases.collection_of(num_devices, capacity=32)
    model, state, tables = declare(collection)
    step = collection.ahead(train(model))
    capacities, waits = set(), []
    for number in range(18 if num_devices == 1 else 30):
        batch = cases.new_users(collection, number)
        tables = layers.grow(collection, tables, batch)
        with cases.compiled_on_the_spot("step") as threads:
            state, tables, _, stats = step(state, tables, batch)
        stats.check()
        waits.append(len(threads))
        capacities.add(tables["embed"]["state"].stores[0].capacity)
        step.wait()
    # On a mesh, the second step has Flax's count of steps as an array there, no longer as a number.
    assert waits == [1, num_devices - 1] + [0] * (len(waits) - 2)
    assert len(capacities) == 3 and step.num_hits_ahead == 2 and max(step.stalls_s[num_devices:]) < 1


def test_scan_over_steps():
    """lax.scan with train state and tables as carry is a loop of steps in place."""
    collection = cases.one_device()
    batches = [collection.batch(raw) for raw in cases.raw_batches(3)]
    model, state, tables = declare(collection)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(state, tables, stacked):
        def body(carry, batch):
            *carry, loss, _ = train(model, donate=False)(*carry, batch)
            return tuple(carry), loss

        return jax.lax.scan(body, (state, tables), stacked)

    before = cases.addresses(tables)
    (_, scanned), losses = steps(state, tables, jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
    assert cases.addresses(scanned) == before
    _, state, tables = declare(collection)
    for batch, loss in zip(batches, losses, strict=True):
        state, tables, wanted, _ = train(model)(state, tables, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for spec in collection.tables:
        own, other = (
            collection.export_table(variables["embed"]["state"], spec.name) for variables in (scanned, tables)
        )
        np.testing.assert_array_equal(own["keys"], other["keys"])
        np.testing.assert_allclose(own["rows"], other["rows"], rtol=1e-5)


# Several lookups --------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """A layer that is called twice."""

    collection: jaxsok.Collection

    @nn.compact
    def __call__(self, features, others):
        embed = layers.Embeddings(self.collection, name="embed")
        return sum(jnp.sum(cases.join(embed(batch_features)) ** 2) for batch_features in (features, others))


class Pair(nn.Module):
    """Two layers over two collections."""

    collections: tuple

    @nn.compact
    def __call__(self, raw, only=None):
        scores = []
        for i, collection in enumerate(self.collections):
            if only in (None, i):
                embeddings = layers.Embeddings(collection, name=f"tower{i}")(collection.batch(raw).features)
                scores.append(jnp.sum(cases.join(embeddings) ** 2))
        return sum(scores)


def step_of_sum(model, tables, *args):
    """Runs one step, without a dense part, of a model whose output is its loss."""

    def loss(taps):
        return model.apply({"tables": tables, "sparse_taps": taps}, *args, mutable=TRAINING)

    gradients, updates = jax.grad(loss, has_aux=True)(layers.zero_taps(model, {"tables": tables}, *args))
    return layers.apply_updates(updates, gradients)


def test_two_lookups_in_one_step():
    """Rows that both calls use step once with the sum of both gradients, like core's update with two plans."""
    collection = cases.collection_of(optimizer=jaxsok.optim.adam(0.1))
    model = Twins(collection)
    first, second = (collection.batch(raw).features for raw in cases.raw_batches(2))
    tables = model.init(jax.random.key(0), first, second)["tables"]
    tables, stats = step_of_sum(model, tables, first, second)
    embeddings, state, plan = collection.lookup(collection.init(seed=0), first)
    others, state, other_plan = collection.lookup(state, second)
    gradients = [jax.tree.map(lambda e: 2 * e, values) for values in (embeddings, others)]
    state, counts = collection.update(state, [plan, other_plan], gradients)
    cases.assert_equal(tables["embed"]["state"], state)
    assert stats["embed"].to_dict() == counts.to_dict() and int(state.step) == 1


class Tower(nn.Module):
    """A layer whose output is a loss."""

    collection: jaxsok.Collection

    @nn.compact
    def __call__(self, features):
        return jnp.sum(cases.join(layers.Embeddings(self.collection, name="embed")(features)) ** 2)


class Towers(nn.Module):
    """Two towers, the first of a class that may be `nn.jit`'s."""

    kind: type
    collections: tuple

    @nn.compact
    def __call__(self, features, others):
        first, second = self.collections
        return self.kind(first, name="first")(features) + Tower(second, name="second")(others)


@pytest.mark.parametrize("mutable", [TRAINING, True])
def test_nn_jit_keeps_traces(mutable):
    """Steps by a module that is not traced again learn as without `nn.jit`."""
    batches = [cases.raw_batches(3, seed=seed) for seed in (1, 2)]

    def train(kind):
        collections = cases.collection_of(), cases.collection_of()
        model, tables = Towers(kind, collections), None
        for raws in zip(*batches, strict=True):
            features = [collection.batch(raw).features for collection, raw in zip(collections, raws, strict=True)]
            tables = model.init(jax.random.key(0), *features)["tables"] if tables is None else tables

            def loss(taps, tables=tables, features=features):
                return model.apply({"tables": tables, "sparse_taps": taps}, *features, mutable=mutable)

            taps = layers.zero_taps(model, {"tables": tables}, *features)
            gradients, updates = jax.grad(loss, has_aux=True)(taps)
            tables, _ = layers.apply_updates(updates, gradients)
        return tables

    cases.assert_equal(train(nn.jit(Tower)), train(Tower))


def test_a_layer_that_changes_what_it_returns():
    """Its taps are those of the lookup that it calls."""

    class Users(layers.Embeddings):
        def __call__(self, features):
            return super().__call__(features)["user"]

    class Scores(nn.Module):
        @nn.compact
        def __call__(self, features):
            return nn.Dense(1)(Users(collection, name="embed")(features))

    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", table="user")])
    model, features = Scores(), collection.batch({"user": np.arange(5)}).features
    variables = model.init(jax.random.key(0), features)
    taps = layers.zero_taps(model, variables, features)
    assert jax.tree.map(jnp.shape, taps) == {"embed": {"taps": ({"user": (5, 4)},)}}
    scores, updates = model.apply({**variables, "sparse_taps": taps}, features, mutable=["tables", "plans"])
    assert scores.shape == (5, 1) and collection.num_rows(updates["tables"]["embed"]["state"]) == {"user": 5}


def test_two_layers():
    """Each layer has its state; update and grow cover all layers that looked something up."""
    collections = cases.collection_of(), cases.collection_of()
    raw = {"user": np.arange(3), "history": np.arange(3), "ads": np.zeros((3, 2), np.int64)}
    model = Pair(collections)
    tables = model.init(jax.random.key(0), raw)["tables"]
    by_path = {f"tower{i}": collection for i, collection in enumerate(collections)}
    tables = layers.grow(by_path, tables, dict.fromkeys(by_path, 12), steps=2)
    assert "got one for 2 layers" in message(ValueError, lambda: layers.grow(by_path, tables, 12))
    assert "got batches for ['tower2']" in message(ValueError, lambda: layers.grow(by_path, tables, {"tower2": 12}))
    tables, stats = step_of_sum(model, tables, raw, None)
    assert sorted(stats) == ["tower0", "tower1"]
    tables, stats = step_of_sum(model, tables, raw, 1)
    assert sorted(stats) == ["tower1"]
    assert [int(tables[name]["state"].step) for name in ("tower0", "tower1")] == [1, 2]
    assert "got one collection for the layers ['tower0', 'tower1']" in message(
        ValueError, lambda: layers.grow(collections[0], tables)
    )
    assert "got none for the layer 'tower1'" in message(
        ValueError, lambda: layers.grow({"tower0": collections[0]}, tables)
    )


def test_growth_that_fails_in_the_second_layer(monkeypatch):
    """The first layer has grown, and its old tables are gone, so the error has the new ones."""
    collections = cases.collection_of(capacity=4), cases.collection_of(capacity=4)
    raw = {"user": np.arange(3), "history": np.arange(3), "ads": np.zeros((3, 2), np.int64)}
    tables = Pair(collections).init(jax.random.key(0), raw)["tables"]
    by_path = {f"tower{i}": collection for i, collection in enumerate(collections)}

    def fail(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError) as caught:
        patch.setattr(collections[1], "grow", fail)
        layers.grow(by_path, tables)
    tables = layers.grow(by_path, caught.value.tables)
    assert all(tables[name]["state"].stores[0].capacity > 4 for name in by_path)
    assert [collection.num_rows(tables[name]["state"])["user"] for name, collection in by_path.items()] == [0, 0]


@pytest.mark.filterwarnings("error:grow")
def test_growth_that_fails_after_it_has_evicted():
    """The error has the tables that are left; those before are gone."""
    collection, raws = cases.full_and_young()
    tables = layers.Embeddings(collection).init(jax.random.key(0), collection.batch(raws[0]).features)["tables"]
    for raw in raws[:2]:
        batch = collection.batch(raw)
        tables = {"state": cases.step_of(collection, layers.grow(collection, tables, batch)["state"], batch)}
    with pytest.raises(RuntimeWarning, match="after eviction by TimeToLive") as caught:
        layers.grow(collection, tables, collection.batch(raws[2]))
    assert collection.num_rows(caught.value.tables["state"]) == {"item": 28}


def test_variables_without_tables_are_refused():
    """Params in place of tables would grow nothing, and keys would be refused later."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    for call in (
        lambda: layers.grow(collection, state.params),
        lambda: layers.grow(collection, {}),
        lambda: layers.drain(state.params),
        lambda: layers.discard({"tables": state.params}),
    ):
        assert "got variables without tables" in message(ValueError, call)
    by_path = {"embed": collection, "typo": cases.collection_of()}
    assert "grow: collection: got some for ['typo']" in message(ValueError, lambda: layers.grow(by_path, tables))


def test_a_batch_that_is_looked_up_twice_in_a_step():
    """Its second lookup would take the next batch out of those in flight."""
    raws = [{"clicked": np.random.default_rng(step).integers(0, 30, 8)} for step in range(3)]
    table = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, features):
            embed = layers.Embeddings(collection, name="embed")
            return embed(features)["clicked"] - embed(features)["clicked"]

    model = Twice()
    _, plan = next(iter(collection.pipeline(raws, lookahead=1)))
    tables = model.init(jax.random.key(0), plan)["tables"]
    taps = layers.zero_taps(model, {"tables": tables}, plan)
    apply = jax.jit(
        lambda taps, tables, plan: model.apply({"sparse_taps": taps, "tables": tables}, plan, mutable=TRAINING)
    )
    assert "got a batch that this step has looked up already" in message(ValueError, lambda: apply(taps, tables, plan))


def test_micro_batches_are_chained():
    """Micro-batches on the same tables or in another order are refused: their row ids belong to different states."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    first, second = (collection.batch(raw) for raw in cases.raw_batches(2))
    (_, updates), (_, g_taps) = gradients_of(model, state.params, tables, first)
    (_, apart), (_, its_taps) = gradients_of(model, state.params, tables, second)
    (_, chained), (_, more_taps) = gradients_of(model, state.params, updates["tables"], second)
    for several, of_taps in (([updates, apart], [g_taps, its_taps]), ([chained, updates], [more_taps, g_taps])):
        for call in (layers.apply_updates, functools.partial(layers.clip_by_global_norm, max_norm=1.0)):
            assert "micro-batches that were applied to the same tables at 'embed'" in message(
                ValueError, functools.partial(call, several, of_taps)
            )
    # The first one would learn nothing.
    assert "or not all since the last update" in message(
        ValueError, functools.partial(layers.apply_updates, chained, more_taps)
    )
    new, _ = layers.apply_updates([updates, chained], [g_taps, more_taps])
    assert jax.tree.structure(new) == jax.tree.structure(tables)
    (_, alone), (_, its_taps) = gradients_of(model, state.params, layers.discard(updates), second)
    layers.apply_updates(alone, its_taps)


def test_a_step_that_is_passed_over():
    """The rows of a discarded step stay as they were made, and the next step runs the same program."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    raw = cases.raw_batches(1)[0]
    (_, updates), _ = gradients_of(model, state.params, tables, collection.batch(raw))
    left = layers.discard(updates)
    assert "discard: updates: got ['embed']" in message(ValueError, lambda: layers.discard(updates["tables"]))
    assert jax.tree.structure(left) == jax.tree.structure(tables)
    (_, updates), _ = gradients_of(model, state.params, layers.drain(tables), collection.batch(raw))
    assert jax.tree.structure(layers.discard(updates)) == jax.tree.structure(tables), "draining ends with the step"
    assert layers.discard({"tables": layers.drain(tables)})["embed"]["state"].drains, "no step was taken"
    oracle = cases.Oracle(state.params["out"]["kernel"], state.params["out"]["bias"])
    oracle.loss(raw, insert=True)
    oracle.assert_tables(collection, left["embed"]["state"])


def test_micro_batches_of_different_layers_are_chained():
    """The last tables must know the rows of the first micro-batch, also of a layer that the last one did not call."""
    collections = cases.collection_of(), cases.collection_of()
    raw = {"user": np.arange(3), "history": np.arange(3), "ads": np.zeros((3, 2), np.int64)}
    model = Pair(collections)
    tables = model.init(jax.random.key(0), raw)["tables"]

    def gradients(tables, only):
        variables = {"tables": tables, "sparse_taps": layers.zero_taps(model, {"tables": tables}, raw, only)}
        of_taps = lambda taps: model.apply({**variables, "sparse_taps": taps}, raw, only, mutable=TRAINING)  # noqa: E731
        return jax.grad(of_taps, has_aux=True)(variables["sparse_taps"])[::-1]

    first, g_taps = gradients(tables, 0)
    apart, its_taps = gradients(tables, 1)
    assert "at 'tower0'" in message(ValueError, lambda: layers.apply_updates([first, apart], [g_taps, its_taps]))
    chained, its_taps = gradients(first["tables"], 1)
    _, stats = layers.apply_updates([first, chained], [g_taps, its_taps])
    assert sorted(stats) == ["tower0", "tower1"]


# Evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing():
    """Evaluation changes nothing, whether "tables" is not mutable or evaluation is requested."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    state, tables, _, _ = train(model)(state, tables, collection.batch(cases.raw_batches(1)[0]))
    before = cases.snapshot(tables)
    new = collection.batch(cases.raw_batches(1, seed=1, num_keys=10**6)[0])
    found, stats = collection.find(tables["embed"]["state"], new.features)
    assert stats.to_dict()["user"]["num_missing"] == 8
    layer, variables = layers.Embeddings(collection), {"tables": tables["embed"]}
    cases.assert_equal(layer.apply(variables, new.features), found)
    for frozen, options in ((layer, {"deterministic": True}), (layers.Embeddings(collection, deterministic=True), {})):
        embeddings, changed = frozen.apply(variables, new.features, **options, mutable=TRAINING)
        cases.assert_equal(embeddings, found)
        assert not changed.get("plans")
        cases.assert_equal(changed["tables"], variables["tables"])
    model.apply({"params": state.params, "tables": tables}, new.features)
    cases.assert_equal(cases.snapshot(tables), before)


# Other transformations --------------------------------------------------------------------------------------------


def test_remat_around_a_lookup_looks_up_twice():
    """The numbers are the same, as docs/flax.md says, but the program has a second lookup."""
    collection = cases.one_device()
    batch = collection.batch(cases.raw_batches(1)[0])

    class Squared(Model):
        def __call__(self, features):
            return super().__call__(features) ** 2

    seen = []
    for make in (Squared, nn.remat(Squared)):
        model = make(collection)
        _, state, tables = declare(collection)
        step = train(model, donate=False)
        _, tables, loss, stats = step(state, tables, batch)
        text = step.lower(state, declare(collection)[2], batch).as_text()
        seen.append((text.count("@jaxsok_lookup"), float(loss), stats.to_dict(), tables))
    (once, loss, counts, tables), (twice, its_loss, its_counts, its_tables) = seen
    assert (once, twice) == (2, 4)  # for each of two stores
    assert (loss, counts) == (its_loss, its_counts)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), tables, its_tables)


# Errors -----------------------------------------------------------------------------------------------------------


def message(error, call):
    """Returns the message of a refusal on one line."""
    with pytest.raises(error) as info:
        call()
    return re.sub(r"\s+", " ", str(info.value))


def test_errors():
    """Each error says what to do, and nothing has changed."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    batch, small = (collection.batch(cases.raw_batches(1, num_samples=size)[0]) for size in (8, 4))
    variables = {"params": state.params, "tables": tables}
    taps = layers.zero_taps(model, variables, batch.features)
    stranger = jaxsok.Collection([jaxsok.TableSpec("x", 2, jaxsok.optim.sgd(0.1))], [jaxsok.FeatureSpec("x", "x")])
    foreign = stranger.batch({"x": np.array([7])}).features
    before = cases.snapshot(tables)

    def apply(variables=variables, features=batch.features, mutable=TRAINING, layer=model):
        return layer.apply(variables, features, mutable=mutable)

    assert "got a lookup in training with taps for 0" in message(ValueError, apply)
    assert 'got no "plans"' in message(ValueError, lambda: apply(mutable=["tables"]))
    # With taps a training step is intended; a frozen lookup would silently give them no gradient.
    for mutable in (False, ["batch_stats"], ["plans"]):
        assert 'got no "tables"' in message(
            ValueError, lambda mutable=mutable: apply({**variables, "sparse_taps": taps}, mutable=mutable)
        )
    frozen = layers.Embeddings(collection, deterministic=True)
    of_frozen = {"tables": tables["embed"], "sparse_taps": taps["embed"]}
    apply(of_frozen, mutable=False, layer=frozen)
    training = layers.Embeddings(collection, deterministic=False)
    of_layer = {"tables": tables["embed"]}
    assert 'got no "tables"' in message(ValueError, lambda: apply(of_layer, mutable=False, layer=training))
    assert 'got none of "tables"' in message(ValueError, lambda: apply({"params": state.params}))
    assert "wanted a jaxsok.Collection" in message(
        TypeError, lambda: layers.Embeddings("item").init(jax.random.key(0), batch.features)
    )
    for call in (
        lambda: apply({**variables, "sparse_taps": taps}, foreign),
        lambda: layers.zero_taps(model, variables, foreign),
    ):
        assert "collection with other specs" in message(ValueError, call)
    assert "lookup: features: got dict, wanted Features" in message(
        TypeError, lambda: layers.zero_taps(model, variables, {"user": np.arange(8)})
    )
    wrong = {**variables, "sparse_taps": layers.zero_taps(model, variables, small.features)}
    assert "got a tap of float32[4, 2, 3], wanted that of its embedding, float32[8, 2, 3]" in message(
        ValueError, lambda: apply(wrong)
    )
    dense = nn.Dense(1)
    of_dense = dense.init(jax.random.key(0), jnp.ones(3))
    assert "looks nothing up" in message(ValueError, lambda: layers.zero_taps(dense, of_dense, jnp.ones(3)))

    _, updates = apply({**variables, "sparse_taps": taps})
    assert "got nothing at 'embed'" in message(ValueError, lambda: layers.apply_updates(updates, {}))
    assert "got nothing at 'embed/taps'" in message(ValueError, lambda: layers.apply_updates(updates, {"embed": {}}))
    none = {"embed": {"taps": ()}}
    assert "got none for lookup 1 of 1" in message(ValueError, lambda: layers.apply_updates(updates, none))
    twice = {"embed": {"taps": taps["embed"]["taps"] * 2}}
    assert "those of 2 taps for 1 lookups" in message(ValueError, lambda: layers.apply_updates(updates, twice))
    assert "got 2 for 1 updates" in message(ValueError, lambda: layers.apply_updates(updates, [taps, taps]))
    for nothing in ({"tables": tables}, {"plans": {}}, None):
        assert 'wanted the variables "tables" and "plans"' in message(
            ValueError, lambda nothing=nothing: layers.apply_updates(nothing, taps)
        )
    assert "learning_rate" in message(TypeError, lambda: layers.apply_updates(updates, taps, learning_rate="fast"))
    assert "collection: got str" in message(TypeError, lambda: layers.grow("item", tables))
    assert "got none for the layer 'embed'" in message(ValueError, lambda: layers.grow({}, tables))
    assert "state: got one of other specs" in message(ValueError, lambda: layers.grow(stranger, tables))
    cases.assert_equal(cases.snapshot(tables), before)
    _, stats = layers.apply_updates(updates, taps, learning_rate=jnp.float32(0.5))
    assert stats["embed"].to_dict()["user"]["num_inserted"] > 0


def test_vmap_over_a_lookup_is_refused():
    """A table has one state, so no lookup per element of a batch exists."""
    collection = cases.one_device()
    model, state, tables = declare(collection)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[collection.batch(r) for r in cases.raw_batches(2)])
    variables = {"params": state.params, "tables": tables}
    with pytest.raises((NotImplementedError, TypeError, ValueError), match="vmap"):
        jax.vmap(lambda features: model.apply(variables, features))(stacked.features)


def test_lookups_ahead_need_no_other_step():
    """A model's loop is the same as without lookups ahead, with the same losses; `drain` ends the lookups."""
    raws = [{"clicked": np.random.default_rng(step).integers(0, 30, 8)} for step in range(6)]

    def train(**options):
        table = jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.1), capacity=64)
        collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])

        class Model(nn.Module):
            @nn.compact
            def __call__(self, features):
                return nn.Dense(1)(layers.Embeddings(collection, name="embed")(features)["clicked"])

        model = Model()
        variables = model.init(jax.random.key(0), collection.batch(raws[0]).features)
        params, tables, losses = variables["params"], variables["tables"], []

        def loss_fn(params, taps, tables, plan):
            variables = {"params": params, "sparse_taps": taps, "tables": tables}
            scores, updates = model.apply(variables, plan, mutable=["tables", "plans"])
            return jnp.mean((scores - 1.0) ** 2), updates

        @jax.jit
        def step(params, tables, plan):
            taps = layers.zero_taps(model, {"params": params, "tables": tables}, plan)
            differentiated = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
            (loss, updates), (of_params, of_taps) = differentiated(params, taps, tables, plan)
            tables, stats = layers.apply_updates(updates, of_taps)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, of_params), tables, loss, stats

        for number, (batch, plan) in enumerate(collection.pipeline(raws, **options)):
            tables = layers.grow(collection, tables, batch)
            tables = layers.drain(tables) if number == 3 else tables
            params, tables, loss, stats = step(params, tables, plan)
            stats["embed"].check()
            losses.append(float(loss))
            if number == 3:
                collection.find(tables["embed"]["state"], batch.features)
        return losses

    assert train() == train(lookahead=1)
