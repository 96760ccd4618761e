"""Layers under transformations of the step as a whole: second derivatives, shard_map and pmap, against the core."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec as P

import jaxsok
from jaxsok.layers import linen as linen_layers, nnx as nnx_layers

NUM_SHARDS, DIM = 2, 4
TABLES = [jaxsok.TableSpec("item", DIM, jaxsok.optim.adagrad(0.3), capacity=64)]
FEATURES = [jaxsok.FeatureSpec("one", "item"), jaxsok.FeatureSpec("some", "item", combiner="mean")]


def raws():
    rng = np.random.default_rng(0)
    return [{"one": rng.integers(0, 20, 8), "some": rng.integers(0, 30, (8, 3))} for _ in range(3)]


def join(embeddings):
    return jnp.concatenate([embeddings["one"], embeddings["some"]], axis=-1)


class Linen(nn.Module):
    """A model that hands its embeddings out."""

    collection: jaxsok.Collection

    @nn.compact
    def __call__(self, features):
        return join(linen_layers.Embeddings(self.collection, name="embed")(features))


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, collection):
        self.embed = nnx_layers.Embeddings(collection, seed=0)

    def __call__(self, features):
        return join(self.embed(features))


def content(collection, state):
    exported = collection.export_table(state, "item")
    order = np.argsort(exported["keys"])
    return exported["keys"][order], exported["rows"][order]


def train_core():
    """Trains on one device, without a layer."""
    collection = jaxsok.Collection(TABLES, FEATURES)

    @jax.jit
    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.grad(lambda embeddings: ((join(embeddings) - 1) ** 2).sum())(embeddings)
        return collection.update(state, plan, gradients)[0]

    state = collection.init(seed=0)
    for raw in raws():
        state = step(state, collection.batch(raw).features)
    return content(collection, state)


def linen_step(model):
    def step(state, features):
        tables = {"embed": {"state": state}}
        taps = linen_layers.zero_taps(model, {"tables": tables}, features)

        def loss(taps):
            variables = {"sparse_taps": taps, "tables": tables}
            found, updates = model.apply(variables, features, mutable=["tables", "plans"])
            return ((found - 1) ** 2).sum(), updates

        (_, updates), gradients = jax.value_and_grad(loss, has_aux=True)(taps)
        return linen_layers.apply_updates(updates, gradients)[0]["embed"]["state"]

    return step


def nnx_step(model):
    definition, _ = nnx.split(model)

    def step(variables, features):
        model = nnx.merge(definition, variables)
        _, gradients = nnx_layers.value_and_grad(lambda model: ((model(features) - 1) ** 2).sum())(model)
        model.embed.update(gradients)
        return nnx.state(model)

    return step


@pytest.mark.parametrize(("kind", "checked"), [("linen", False), ("nnx", True)])
def test_inside_shard_map(kind, checked):
    """Taps vary over the axis of the tables, as the embeddings do."""
    collection = programs.over(NUM_SHARDS, TABLES, FEATURES)
    if kind == "linen":
        model = Linen(collection)
        state = model.init(jax.random.key(0), collection.batch(raws()[0]).features)["tables"]["embed"]["state"]
        step = linen_step(model)
    else:
        model = Nnx(collection)
        state, step = nnx.split(model)[1], nnx_step(model)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    options = {"mesh": collection.shards.mesh, "in_specs": (specs, P("data")), "out_specs": specs, "check_vma": checked}
    mapped = jax.jit(jax.shard_map(step, **options))
    for raw in raws():
        state = mapped(state, collection.batch(raw).features)
    if kind == "nnx":
        nnx.update(model, state)
        state = model.embed.tables.get_value()
    for got, wanted in zip(content(collection, state), train_core(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def test_inside_pmap():
    collection = programs.over(NUM_SHARDS, TABLES, FEATURES)
    model, (first, *_) = Linen(collection), (collection.batch(raw) for raw in raws())
    state = model.init(jax.random.key(0), first.features)["tables"]["embed"]["state"]
    parallel = jax.pmap(linen_step(model), axis_name="data")
    for raw in raws():
        batch = collection.batch(raw)
        state = collection.unstack(parallel(collection.stack(state), collection.stack(batch.features)))
    for got, wanted in zip(content(collection, state), train_core(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def test_second_derivatives_go_through_the_taps():
    """Products with the Hessian and gradients of a penalty are those of the core, where embeddings are an argument."""
    collection = jaxsok.Collection(TABLES, FEATURES)
    model, features = Linen(collection), collection.batch(raws()[0]).features
    variables = model.init(jax.random.key(0), features)
    taps = linen_layers.zero_taps(model, variables, features)
    weights = jnp.linspace(-1.0, 1.0, 2 * DIM)

    def head(weights, found):
        return (jnp.tanh(found) @ weights - 1) ** 2

    def by_taps(weights, taps):
        found, _ = model.apply({"sparse_taps": taps, **variables}, features, mutable=["tables", "plans"])
        return head(weights, found).sum()

    def by_embeddings(weights, embeddings):
        return head(weights, join(embeddings)).sum()

    embeddings, _, _ = collection.lookup(variables["tables"]["embed"]["state"], features)

    def derivatives(loss, argument):
        gradient, arguments = jax.grad(loss, argnums=(0, 1)), (weights, argument)
        ones = jax.tree.map(jnp.ones_like, arguments)

        def penalty(*arguments):
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient(*arguments)))

        forward, reverse = jax.jvp(gradient, arguments, ones)[1], jax.vjp(gradient, *arguments)[1](ones)
        return jax.tree.leaves([forward, reverse, jax.grad(penalty, argnums=(0, 1))(*arguments)])

    results = derivatives(by_taps, taps), derivatives(by_embeddings, embeddings)
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(wanted)).max() > 0.01
