"""Tables sharded over eight devices learn what one device learns.

    python examples/03_many_devices.py

The tables and each batch are split over the devices of a mesh: keys travel to the devices that own them, rows travel
back, and gradients after them. The train step is the one that a single device runs. On a machine without GPUs eight
devices are made of its CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxsok

BATCH_SIZE = 512
NUM_STEPS = 30

tables = [
    jaxsok.TableSpec("user", dim=4, optimizer=jaxsok.optim.adagrad(0.5), capacity=1024),  # split by key: the default
    jaxsok.TableSpec(
        "day", dim=4, optimizer=jaxsok.optim.adagrad(0.5), capacity=8, placement=jaxsok.REPLICATED
    ),  # whole on every device
]
features = [jaxsok.FeatureSpec("user", table="user"), jaxsok.FeatureSpec("day", table="day")]


def make_step(collection, pipeline):
    def loss_fn(embeddings, rating):
        return jnp.mean(((embeddings["user"] + embeddings["day"]).sum(axis=1) - rating) ** 2)  # over the whole batch

    # On a mesh this program also plans a later batch: its keys travel while earlier steps run.
    @functools.partial(pipeline.jit, donate_argnums=0)
    def step(state, batch, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        loss, gradients = jax.value_and_grad(loss_fn)(embeddings, batch["rating"])
        state, stats = collection.update(state, plan, gradients)
        return state, loss, stats

    return step


def train(collection):
    """Trains on the same batches, whatever the mesh."""
    state, pipeline = collection.init(seed=0), collection.pipeline(clicks())
    step = make_step(collection, pipeline)
    for batch, plan in pipeline:
        state = collection.grow(state, batch)
        state, loss, stats = step(state, batch, plan)
        stats.check()
    return state, float(loss)


def clicks():
    rng = np.random.default_rng(0)
    users = rng.integers(0, 2**63, 1000)
    ratings = rng.integers(1, 6, 1000).astype(np.float32)
    for _ in range(NUM_STEPS):
        chosen, day = rng.integers(0, 1000, BATCH_SIZE), rng.integers(0, 7, BATCH_SIZE)
        yield {"user": users[chosen], "day": day, "rating": ratings[chosen] + day.astype(np.float32)}


def main():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    single = jaxsok.Collection(tables, features)
    many = jaxsok.Collection(tables, features, mesh=mesh, axis="data")
    results = {}
    for collection in (single, many):
        state, loss = train(collection)
        table = collection.export_table(state, "user")
        results[collection] = table["rows"][np.argsort(table["keys"])]
        num_devices = len(state.stores[0].rows[0].sharding.device_set)
        print(f"{num_devices} device(s): loss of the last batch {loss:.6f}, {collection.num_rows(state)}")
    difference = np.abs(results[single] - results[many]).max()
    print(f"largest difference between their rows: {difference:.1e}")
    assert difference < 1e-3  # sums in another order, over all steps


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # before the devices are first asked for; GPUs do not mind
    main()
