"""Auto and Explicit axes: every public operation and refusal. The same program gives the same bits on both."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType

import jaxsok
from jaxsok import policies, serving, store as store_lib

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NUM_SAMPLES, DIM = 16, 4
LRU = policies.LeastRecentlyUsed()


pytestmark = pytest.mark.usefixtures("quickly")

# Axes of the mesh, and whether it is also the context (`jax.set_mesh`). The collection is sharded over "data".
MESHES = {
    "auto": ({"data": AUTO}, False),
    "explicit": ({"data": EXPLICIT}, False),
    "explicit and auto": ({"data": EXPLICIT, "model": AUTO}, True),
    "auto and explicit": ({"data": AUTO, "model": EXPLICIT}, True),
}


def mesh_of(kind):
    """Makes a mesh of two shards, and of other axes if the kind has any."""
    types, _ = MESHES[kind]
    if len(jax.devices()) < 2 ** len(types):
        pytest.skip(f"needs {2 ** len(types)} devices")
    devices = jax.devices()[: 2 ** len(types)]
    return jax.make_mesh((2,) * len(types), tuple(types), axis_types=tuple(types.values()), devices=devices)


@contextlib.contextmanager
def in_context(kind):
    """Sets the mesh as JAX's context if the kind asks for it."""
    with jax.set_mesh(mesh_of(kind)) if MESHES[kind][1] else contextlib.nullcontext():
        yield


def collection_of(kind):
    """Returns a store with both filters that evicts, and a replicated store that grows."""
    options = {"capacity": 60, "max_capacity": 60, "eviction": LRU}
    tables = [
        jaxsok.TableSpec("user", DIM, jaxsok.optim.adam(0.1), admission=policies.AdmitByCount(2), **options),
        jaxsok.TableSpec(
            "item",
            DIM,
            jaxsok.optim.adam(0.1),
            admission=policies.AdmitByBloom(2, num_keys=200),
            placement=jaxsok.on(1),
            **options,
        ),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.adagrad(0.1), capacity=128, placement=jaxsok.REPLICATED),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("item", "item", combiner="mean", max_keys=4 * NUM_SAMPLES),
        jaxsok.FeatureSpec("ad", "ad", combiner=None),
    ]
    return jaxsok.Collection(tables, features, mesh=mesh_of(kind), axis="data")


def raw_batch(step):
    """Returns keys of all features, new ones in each step; each occurs twice or more, so that it is admitted."""
    rng = np.random.default_rng(step)
    keys = np.repeat(rng.integers(100 * step, 100 * step + 60, NUM_SAMPLES // 2), 2)
    lengths = rng.integers(0, 4, NUM_SAMPLES)
    return {
        "user": keys,
        "item": jaxsok.Bags(rng.integers(100 * step, 100 * step + 30, lengths.sum()), lengths=lengths),
        "ad": rng.integers(20 * step, 20 * step + 20, (NUM_SAMPLES, 2)),
    }


def on_host(tree):
    """Converts arrays to NumPy."""
    return jax.tree.map(np.asarray, tree)


def export_tables(collection, state):
    """Returns all tables by key."""
    return {table.name: programs.by_key(collection, state, table.name) for table in collection.tables}


def train(kind):
    """Runs steps in which stores grow, evict and make room for waiting keys; returns all results."""
    collection, seen = collection_of(kind), {}
    state = collection.init(seed=3, salt=0)  # runs are compared to the bit

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features, clock=state.step + jnp.uint32(1))
        gradients = jax.grad(programs.loss_of)(embeddings)
        gradients, _, norm = collection.clip_by_global_norm(state, plan, gradients, 1.0)
        state, stats = collection.update(state, plan, gradients, learning_rate=0.05)
        return state, embeddings, norm, stats

    run = collection.ahead(jax.jit(step, donate_argnums=0))
    handed = []
    for number in range(8):
        batch = collection.batch(raw_batch(number))
        state = collection.grow(state, hand_over=lambda name, records: handed.append((name, records.keys.tolist())))
        state, embeddings, norm, stats = run(state, batch.features)
        seen[f"step {number}"] = on_host((embeddings, norm)), stats.to_dict()
    seen["handed over"] = handed
    assert collection.growth.num_grown > 0 and collection.growth.num_evictions > 0 and handed
    return collection, state, seen


def test_every_operation_runs_on_explicit_axes(tmp_path, monkeypatch):
    """Every operation runs with a further axis in the mesh, and with the mesh as context.

    Other tests compare the bits with those of Auto axes, operation by operation: checkpoints move between axes of both
    types, and trainings, evictions and imports on Explicit axes are compared (test_many_devices.py, test_processes.py).
    """
    seen = walk("explicit and auto", tmp_path, monkeypatch)
    for table, rows in seen["tables"].items():
        assert rows["keys"].size == seen["num_rows"][table] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit and auto", "explicit", "auto and explicit"])
def test_every_operation_gives_the_same_on_all_meshes(kind, tmp_path, monkeypatch, reference):
    """Results agree on Auto, Explicit and mixed axes, with the mesh as context and without."""
    seen = walk(kind, tmp_path, monkeypatch)
    assert seen.keys() == reference.keys()
    for name, want in reference.items():
        got = jax.tree.map(programs.bits, jax.tree.leaves(seen[name]))
        for a, b in zip(got, map(programs.bits, jax.tree.leaves(want)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, quickly):
    """Returns the results that every mesh must reproduce."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return walk("auto", tmp_path_factory.mktemp("auto"), monkeypatch)


def walk(kind, folder, monkeypatch):
    """Runs all public operations in sequence; returns {name: result on the host}."""
    monkeypatch.setattr(store_lib, "MIN_SIGHTINGS", 8)
    with in_context(kind):
        collection, state, seen = train(kind)
        seen["tables"], seen["state"] = export_tables(collection, state), on_host(jax.tree.leaves(state.stores))
        batch = collection.batch(raw_batch(8), pad_to=NUM_SAMPLES + 2)
        seen["mask"] = np.asarray(batch.mask)

        # Reading
        embeddings, stats = collection.find(state, batch.features)
        seen["find"] = on_host(embeddings), stats.to_dict()
        keys = np.arange(700, 760)
        for table in ("user", "ad"):
            seen[f"contains {table}"] = np.asarray(collection.contains(state, table, keys))
            seen[f"rows_of {table}"] = on_host(collection.rows_of(state, table, keys))
        seen["num_rows"] = collection.num_rows(state)
        seen["memory"] = collection.memory_estimate(state, batch).total
        seen["chunks"] = [on_host(dict(chunk.state)) for chunk in collection.export_chunks(state, "user", chunk_rows=5)]
        frozen = serving.freeze(collection, state)

        # A plan made ahead, and a plan with a send capacity, outside jit
        (_, plan), *_ = collection.pipeline([raw_batch(7), raw_batch(8)])
        embeddings, state, plan = collection.lookup(state, plan)
        state, _ = collection.update(state, plan, embeddings)
        plan = collection.plan(batch.features, send_capacity=(64,) * len(collection.stores))
        embeddings, state, plan = collection.lookup(state, plan)
        seen["norm"] = np.asarray(collection.gradient_norm(state, plan, embeddings))
        state, stats = collection.update(state, [plan], [embeddings])
        seen["planned"] = on_host(embeddings), stats.to_dict()

        # To pmap's form and back
        before = on_host(jax.tree.leaves(state))
        state = collection.unstack(collection.stack(state))
        for a, b in zip(before, jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))

        # Files
        seen |= save_and_load(collection, state, folder)

        # Rows by key
        rows = np.linspace(0, 1, 5 * DIM, dtype=np.float32).reshape(5, DIM)
        state, *counts = collection.assign(state, "user", np.arange(5) + 10**6, rows)
        state, num_erased = collection.erase(state, "ad", keys)
        state, evicted = collection.evict(state, num_rows=10)
        state, others = collection.evict(state, "ad", policies.SmallNorm(0.01), hand_over=lambda *_: None)
        records = list(collection.export_chunks(state, "user"))
        state, num_cleared = collection.clear(state, "user")
        state = collection.import_table(state, "user", records)
        seen["by key"] = on_host((counts, num_erased, num_cleared)), evicted.to_dict(), others.to_dict()
        seen["by key: tables"] = export_tables(collection, state)
        seen |= run_layers(collection)
    # Frozen tables are ordinary arrays on one device, which programs in the context of another mesh must not read.
    return seen | {"frozen": on_host(serving.lookup(frozen, {"ad": serving.LookupInput("ad", np.arange(140, 180))}))}


def save_and_load(collection, state, folder):
    """Saves a full export and a delta; loads both onto the same mesh and into an existing state."""
    pytest.importorskip("pyarrow")
    from jaxsok import checkpoint

    checkpoint.export_full(folder / "full", collection, state, clock=100)
    again = checkpoint.load(folder / "full", collection)
    seen = {"loaded": export_tables(collection, again)}
    again = collection.grow(again)
    embeddings, again, plan = collection.lookup(again, collection.batch(raw_batch(9)).features, clock=100)
    again, _ = collection.update(again, plan, embeddings)
    again = checkpoint.load(folder / "full", collection, state=again, tables=["user", "ad"], clock=200)
    return seen | {"loaded again": export_tables(collection, again)}


def run_layers(collection):
    """Runs a step of the NNX layer and of the Linen layer."""
    pytest.importorskip("flax")
    from flax import linen as nn, nnx

    from jaxsok.layers import linen as linen_layers, nnx as nnx_layers

    features = collection.batch(raw_batch(0)).features
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer = nnx_layers.Embeddings(collection)
        layer.grow()

        @nnx.jit
        def step(layer, features):
            loss, gradients = nnx_layers.value_and_grad(lambda layer: programs.loss_of(layer(features)))(layer)
            layer.update(gradients)
            return loss

        seen = {"nnx": (np.asarray(step(layer, features)), export_tables(collection, layer.tables.get_value()))}

        class Model(nn.Module):
            @nn.compact
            def __call__(self, features):
                return programs.loss_of(linen_layers.Embeddings(collection)(features))

        model = Model()
        variables = model.init(jax.random.key(0), features)
        taps = linen_layers.zero_taps(model, variables, features)

        def loss_of(taps, tables):
            variables = {"tables": tables, "sparse_taps": taps}
            return model.apply(variables, features, mutable=["tables", "plans"])

        (loss, updates), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(taps, variables["tables"])
        tables, _ = linen_layers.apply_updates(updates, gradients)
        (state,) = jax.tree.leaves(tables, is_leaf=lambda node: isinstance(node, jaxsok.State))
        return seen | {"linen": (np.asarray(loss), export_tables(collection, state))}
