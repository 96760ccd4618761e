"""Axes of a mesh as shards: one or several, Auto and Explicit, in shard_map and pmap, with dense layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxsok
from jaxsok.shards import ONE_DEVICE, Shards

NUM_SAMPLES, DIM, HIDDEN, NUM_STEPS = 16, 4, 8, 3
ADAGRAD = jaxsok.optim.adagrad(0.1)
TABLES = [
    jaxsok.TableSpec("user", DIM, ADAGRAD, capacity=128),
    jaxsok.TableSpec("item", DIM, ADAGRAD, capacity=128, placement=jaxsok.on(1)),
    jaxsok.TableSpec("ad", DIM, ADAGRAD, capacity=128, placement=jaxsok.REPLICATED),
]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("item", "item", combiner="mean"),
    jaxsok.FeatureSpec("ad", "ad", combiner="sqrtn", max_keys=12 * NUM_SAMPLES),
]
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@functools.cache
def mesh_of(kind="auto"):
    """Returns a mesh of two axes; a collection is sharded over one or both."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(TYPES[kind],) * 2, devices=jax.devices()[:4])


@functools.cache
def collection_on(axis, kind="auto"):
    """Returns the same tables over these axes; with None, on one device."""
    if axis is None:
        return jaxsok.Collection(TABLES, FEATURES)
    return jaxsok.Collection(TABLES, FEATURES, mesh=mesh_of(kind), axis=axis)


def raw_batches():
    """Returns batches with a target."""
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        lengths = rng.integers(0, 4, NUM_SAMPLES)
        yield {
            "user": rng.integers(0, 40, NUM_SAMPLES),
            "item": rng.integers(-1, 30, (NUM_SAMPLES, 2)),
            "ad": jaxsok.Bags(rng.integers(0, 20, lengths.sum()), lengths=lengths),
            "target": rng.normal(size=NUM_SAMPLES).astype(np.float32),
        }


def first_params():
    """Returns the parameters of a dense layer."""
    rng = np.random.default_rng(1)
    return {"w": rng.normal(size=(DIM, HIDDEN)).astype(np.float32), "v": rng.normal(size=HIDDEN).astype(np.float32)}


def loss_of(params, embeddings, target):
    """Computes a model on top of the embeddings; returns the mean loss over the given samples."""
    with jax.default_matmul_precision("highest"):  # TF32 on a GPU keeps 10 bits and chooses kernels by shape
        hidden = jnp.tanh(sum(embeddings.values()) @ params["w"])
        return jnp.mean((hidden @ params["v"] - target) ** 2)


def dense_step(collection, gather):
    """Returns a whole step, dense layer included; `gather` tells JAX how to gather the parameters."""

    def step(state, params, features, target):
        embeddings, state, plan = collection.lookup(state, features)
        loss, (g_params, g_embeddings) = jax.value_and_grad(
            lambda params, embeddings: loss_of(gather(params), embeddings, target), (0, 1)
        )(params, embeddings)
        state, stats = collection.update(state, plan, g_embeddings)
        return state, jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, g_params), loss, stats

    return jax.jit(step, donate_argnums=(0, 1), compiler_options=programs.quickly())


def train(collection, placed=None, gather=lambda params: params):
    """Trains three steps; returns state, parameters, losses and counts."""
    state, params = collection.init(seed=2), jax.tree.map(jnp.asarray, first_params())
    if placed is not None:
        places = {name: NamedSharding(collection.shards.mesh, spec) for name, spec in placed.items()}
        params = {name: jax.device_put(params[name], places[name]) for name in params}
    step, results = dense_step(collection, gather), []
    for raw in raw_batches():
        batch = collection.batch(raw)
        state, params, loss, stats = step(collection.grow(state), params, batch.features, batch["target"])
        results.append((float(loss), stats.to_dict()))
    assert step._cache_size() == 1  # outputs of a step have the shardings of its inputs
    return state, params, results


@functools.cache
def on_one_device():
    """Returns the results that all meshes must reproduce."""
    return train(collection_on(None))


def assert_like_one_device(collection, state, params=None, results=None):
    """Compares tables and, if given, the dense layer, losses and counts, within the rounding of sums."""
    want_state, want_params, want_results = on_one_device()
    programs.assert_close_tables((collection, collection_on(None)), (state, want_state), rtol=1e-4, atol=1e-5)
    for name in params or ():
        np.testing.assert_allclose(params[name], want_params[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for (loss, counts), (want_loss, want_counts) in zip(results or (), want_results, strict=bool(results)):
        np.testing.assert_allclose(loss, want_loss, rtol=1e-4)
        assert counts == want_counts


# --------------------------------------------------------------------------------------------------------------
# Axes

# Two forms of one sharding: JAX itself returns the second for unsharded arrays, and another form recompiles the step.
REPLICATED = {"auto": {"w": P(), "v": P()}, "explicit": {"w": P(None, None), "v": P(None)}}
AXES = {"data": ("data",), "model": ("model",), "both": ("data", "model"), "swapped": ("model", "data")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model", "auto"),
        ("both", "auto"),
        pytest.param("data", "explicit", marks=pytest.mark.slow),
        ("swapped", "explicit"),
    ],
)
def test_one_of_two_axes_or_both(name, kind):
    """Data is repeated along other axes; several axes act as one, in the order in which they are named."""
    collection = collection_on(AXES[name], kind)
    assert collection.shards.num_shards == (4 if len(AXES[name]) == 2 else 2)
    state, params, results = train(collection, REPLICATED[kind])
    assert_like_one_device(collection, state, params, results)
    rows = state.stores[0].rows[0]
    parts = {part.data.shape[0] for part in rows.addressable_shards}
    assert parts == {rows.shape[0] // collection.shards.num_shards}


def test_a_step_by_itself_on_a_mesh():
    """The same methods work outside jit and without a dense layer."""
    collection = collection_on(("data",), "explicit")
    batch = collection.batch(next(raw_batches()))
    embeddings, state, plan = collection.lookup(collection.init(seed=2), batch.features)
    state, stats = collection.update(state, plan, embeddings)
    found, _ = collection.find(state, batch.features)
    assert {name: value.shape for name, value in found.items()} == dict.fromkeys(found, (NUM_SAMPLES, DIM))
    stats.check()
    assert collection.num_rows(state) == {name: counts["num_rows"] for name, counts in stats.to_dict().items()}


def test_gradients_that_are_not_split():
    """A gradient that is equal everywhere is sharded before the exchange; an explicit mesh does not do so by itself."""
    collections, states = (collection_on(None), collection_on(("data",), "explicit")), []
    for collection in collections:

        @functools.partial(jax.jit, compiler_options=programs.quickly())
        def step(state, features, collection=collection):
            embeddings, state, plan = collection.lookup(state, features)
            gradients = {name: jnp.ones(embedding.shape) for name, embedding in embeddings.items()}
            return collection.update(state, plan, gradients)

        state, _ = step(collection.init(seed=2), collection.batch(next(raw_batches())).features)
        states.append(state)
    programs.assert_close_tables(collections, states, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------
# Dense layers


@pytest.mark.parametrize("kind", TYPES)
def test_fsdp_style_dense_parameters(kind):
    """Parameters sharded over the samples' axis are gathered for use, and their gradients are sharded again."""
    collection = collection_on(("data",), kind)
    placed = {"w": P(None, "data"), "v": P("data")}

    def gather(params):  # an explicit mesh needs this call; elsewhere XLA infers it
        whole = NamedSharding(collection.shards.mesh, P())
        return jax.tree.map(lambda p: jax.sharding.reshard(p, whole), params) if kind == "explicit" else params

    state, params, results = train(collection, placed, gather)
    assert_like_one_device(collection, state, params, results)
    assert params["w"].addressable_shards[0].data.shape == (DIM, HIDDEN // 2)


def test_tensor_parallel_dense_parameters():
    """Tables are sharded over one axis, the layer over the other."""
    collection = collection_on(("data",))
    state, params, results = train(collection, {"w": P(None, "model"), "v": P("model")})
    assert_like_one_device(collection, state, params, results)


# --------------------------------------------------------------------------------------------------------------
# In shard_map and pmap


def part_step(collection):
    """Returns a step on one shard's part; the loss is this shard's share of the global mean."""
    num_shards = collection.shards.num_shards

    def step(state, features, target):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.grad(lambda embeddings: loss_of(first_params(), embeddings, target) / np.float32(num_shards))(
            embeddings
        )
        state, stats = collection.update(state, plan, gradients)
        return state, stats

    return step


@functools.cache
def fixed_layer():
    """Runs three steps on one device with a dense layer that does not move."""
    collection = collection_on(None)
    state, counts = collection.init(seed=2), []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features, target):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.grad(lambda embeddings: loss_of(first_params(), embeddings, target))(embeddings)
        return collection.update(state, plan, gradients)

    for raw in raw_batches():
        batch = collection.batch(raw)
        state, stats = step(state, batch.features, batch["target"])
        counts.append(stats.to_dict())
    return state, counts


def test_inside_shard_map():
    """Methods take parts where the caller sees parts; axes that are not named are unaffected."""
    collection = collection_on(("data",))
    state, counts = collection.init(seed=2), []
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    split = P("data")
    step = jax.shard_map(part_step(collection), mesh=mesh_of(), in_specs=(specs, split, split), out_specs=(specs, P()))
    step = jax.jit(step, donate_argnums=0, compiler_options=programs.quickly())
    for raw in raw_batches():
        batch = collection.batch(raw)
        state, stats = step(state, batch.features, batch["target"])
        counts.append(stats.to_dict())
    want_state, want_counts = fixed_layer()
    assert counts == want_counts
    programs.assert_close_tables((collection, collection_on(None)), (state, want_state), rtol=1e-4, atol=1e-5)


def test_inside_pmap():
    """`stack` adds a leading axis of devices, and `unstack` removes it."""
    collection = programs.over(4, TABLES, FEATURES)
    state, counts = collection.stack(collection.init(seed=2)), []
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {4}
    step = jax.pmap(part_step(collection), axis_name="data", donate_argnums=0, devices=jax.devices()[:4])
    for raw in raw_batches():
        batch = collection.batch(raw)
        state, stats = step(state, collection.stack(batch.features), collection.stack(batch["target"]))
        counts.append(jax.tree.map(lambda leaf: leaf[0], stats).to_dict())
        assert stats.to_dict() == counts[-1]  # every device has the global counts, so they are not added
    state = collection.unstack(state)
    want_state, want_counts = fixed_layer()
    assert counts == want_counts
    programs.assert_close_tables((collection, collection_on(None)), (state, want_state), rtol=1e-4, atol=1e-5)
    assert int(state.step) == NUM_STEPS


@functools.cache
def one_table(kind="auto"):
    """Returns the sharded table alone, over four shards."""
    return programs.over(4, TABLES[:1], FEATURES[:1], axis_type=TYPES[kind])


@pytest.mark.parametrize("kind", TYPES)
def test_unstack_undoes_stack(kind):
    """The result has the same bits, and the shardings that a step expects."""
    collection = one_table(kind)
    _, state, _ = programs.lookup(collection)(collection.init(seed=2), programs.batch(collection, user=np.arange(48)))
    before = jax.device_get(state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    state = collection.unstack(collection.stack(state))
    programs.assert_same_state(before, state)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_stack_consumes_states_alone():
    """A batch can be stacked again; a state that was consumed is refused by name, and what came with it stays."""
    collection = one_table()
    features = programs.batch(collection, user=np.arange(48))
    state = collection.init(seed=2)
    stacked, first = collection.stack((state, features))
    second = collection.stack(features)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="stack: tree: got arrays that are deleted"):
        collection.stack((features, state))
    with pytest.raises(ValueError, match="unstack: tree: got arrays that are deleted"):
        collection.unstack((stacked, state))
    features.stores[0].keys.delete()
    with pytest.raises(ValueError, match="unstack: tree: got arrays that are deleted"):
        collection.unstack((stacked, features))
    assert collection.num_rows(collection.unstack(stacked)) == {"user": 0}


# --------------------------------------------------------------------------------------------------------------
# Placements and refusals


def test_a_table_on_one_shard_lies_there():
    """Rows of on(d) are on shard d alone; a state of one placement does not fit another."""
    for shard in (0, 3):  # the first and the last
        table = jaxsok.TableSpec("user", DIM, ADAGRAD, capacity=64, placement=jaxsok.on(shard))
        collection = programs.over(4, [table], [jaxsok.FeatureSpec("user", "user")])
        features = programs.batch(collection, user=np.arange(16))
        _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
        assert np.asarray(state.stores[0].table_rows).tolist() == [16 if i == shard else 0 for i in range(4)]
        with pytest.raises(ValueError, match="lookup: state: got one of other specs"):
            one_table().lookup(state, programs.batch(one_table(), user=np.arange(48)))


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 1_796_000_000_000_000])
def test_entries_that_would_be_cut_are_refused(number):
    """JAX makes 32 bits of them, without a word."""
    collection, keys = one_table(), np.arange(4)
    entry = np.array([1, number, 2, 3])
    with pytest.raises(ValueError, match=rf'batch: entry "time": got .*{number}.*, wanted numbers of int32, to which'):
        collection.batch({"user": keys, "time": entry})
    wanted = np.clip(entry, -(2**31), 2**31 - 1)
    assert np.asarray(collection.batch({"user": keys, "time": wanted})["time"]).tolist() == wanted.tolist()


def test_rows_lie_where_their_hash_says():
    """Each shard has the keys of its partitions, and no others."""
    collection, keys = one_table(), np.arange(48)
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), programs.batch(collection, user=keys))
    wanted = np.bincount(programs.owner_of(keys, "user", 4), minlength=4)
    assert np.asarray(state.stores[0].table_rows).tolist() == wanted.tolist()
    for shard, records in enumerate(np.split(np.asarray(state.stores[0].records[0]), 4)):
        used = records[: wanted[shard]].astype(np.uint64)
        stored = used[:, 0] | used[:, 1] << np.uint64(32)
        assert sorted(stored.tolist()) == keys[programs.owner_of(keys, "user", 4) == shard].tolist()


@pytest.mark.parametrize("axis_type", TYPES.values(), ids=TYPES)
def test_tables_that_jit_makes_are_split(axis_type, one_salt):
    """Each device has its shard alone, as of `init` outside `jit`; the state can be grown."""
    collection = programs.over(4, TABLES, FEATURES, axis_type=axis_type)
    with jax.set_mesh(collection.shards.mesh):
        made, wanted = jax.jit(lambda: collection.init(seed=3))(), collection.init(seed=3)
    programs.assert_same_state(made, wanted)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    programs.batch(collection, **next(raw_batches()))
    collection.grow(made)


def test_shards_of_a_mesh_are_numbered_along_the_axes():
    """(data, model) and (model, data) are two orders; the message names the axes with their sizes."""
    for axis in (("data", "model"), ("model", "data")):
        shards = Shards.of(mesh_of(), axis)
        assert (shards.num_shards, shards.local(), shards.num_processes) == (4, [0, 1, 2, 3], 1)
        assert str(shards) == f"{axis[0]}=2, {axis[1]}=2"
        blocks = {i: np.full((1, 2), i) for i in range(4)}
        assert np.asarray(shards.put(blocks))[:, 0].tolist() == [0, 1, 2, 3]
    assert Shards.of(None, None) == ONE_DEVICE and not ONE_DEVICE.is_mesh


def test_axes_of_several_types_are_refused():
    """An array sharded over both would have no single type."""
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.sharding.Mesh(mesh_of().devices, ("data", "model"), axis_types=types)
    with pytest.raises(ValueError, match=r"Collection: axis: got axes of several types, .* wanted one type"):
        jaxsok.Collection(TABLES, FEATURES, mesh=mesh, axis=("data", "model"))
    assert jaxsok.Collection(TABLES, FEATURES, mesh=mesh, axis="model").shards.num_shards == 2


def test_a_shard_map_over_a_part_of_the_axes_is_refused():
    """A shard_map over some of the collection's axes is refused."""
    collection = collection_on(("data", "model"))
    state = collection.init(seed=0)
    features = programs.batch(collection, **next(raw_batches()))

    def body(state, features):
        return collection.find(state, features)[0]

    half = jax.shard_map(
        body, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    with pytest.raises(ValueError, match=r"axis: got a shard_map over \['data'\] alone"):
        jax.jit(half)(state, features)
