"""Interrupts a training, continues it elsewhere, and lets a server follow it.

    python examples/04_checkpoint.py

Eight devices train and save tables and a dense parameter every few steps, while they go on. Then the machine is lost:
two devices restore the last checkpoint and go on, with what they would have had. A third copy, on one device, loads an
export and keeps up by deltas: what changed, and what was evicted or erased. Without GPUs eight devices are made of the
CPU; with fewer GPUs than that, those that are there take part.
"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType

import jaxsok
from jaxsok import checkpoint

BATCH_SIZE = 256
NUM_USERS = 1000

tables = [jaxsok.TableSpec("user", dim=4, optimizer=jaxsok.optim.adagrad(0.5), capacity=2048, statistics=True)]
features = [jaxsok.FeatureSpec("user", table="user")]


def collection_on(num_devices):
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data")


def make_step(collection):
    def loss_fn(embeddings, bias, rating):
        return jnp.mean((embeddings["user"].sum(axis=1) + bias - rating) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, bias, batch):
        embeddings, state, plan = collection.lookup(state, batch.features)
        gradients, by_bias = jax.grad(loss_fn, (0, 1))(embeddings, bias, batch["rating"])
        state, stats = collection.update(state, plan, gradients)
        return state, bias - 0.1 * by_bias, stats

    return step


def train(collection, state, bias, num_steps, manager=None):
    """Goes on from where the state is; saves every second step, if there is a manager."""
    step = make_step(collection)
    for number in range(int(state.step), int(state.step) + num_steps):
        rng = np.random.default_rng(number)  # the batch of a step, wherever it is made
        users = rng.integers(0, NUM_USERS, BATCH_SIZE)
        batch = collection.batch({"user": users, "rating": (users % 5).astype(np.float32)})
        state = collection.grow(state, batch)
        state, bias, stats = step(state, bias, batch)
        stats.check()
        if manager is not None and number % 2 == 1:
            save = checkpoint.TablesSave(collection, state, compression="lz4")
            params = ocp.args.StandardSave({"bias": bias})
            manager.save(number + 1, args=ocp.args.Composite(tables=save, params=params))
            print(f"step {number + 1}: {save.report.num_bytes} bytes on the host, steps go on")
    return state, bias


def rows_by_key(collection, state):
    table = collection.export_table(state, "user")
    order = np.argsort(table["keys"])
    return table["keys"][order], table["rows"][order]


def main():
    eight, two, single = collection_on(8), collection_on(2), jaxsok.Collection(tables, features)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with ocp.CheckpointManager(folder / "checkpoints") as manager:
            state, bias = train(eight, eight.init(seed=0), jnp.zeros(()), 4, manager)
            went_on, _ = train(eight, state, bias, 2)  # steps that were not saved

        with ocp.CheckpointManager(folder / "checkpoints") as manager:
            items = ocp.args.Composite(
                tables=checkpoint.TablesRestore(two),
                params=ocp.args.StandardRestore({"bias": np.zeros((), np.float32)}),
            )
            restored = manager.restore(manager.latest_step(), args=items)
        state = restored["tables"]
        print(f"restored step {int(state.step)} on {two.shards.num_shards} devices: {two.num_rows(state)}")
        state, bias = train(two, state, jnp.asarray(restored["params"]["bias"]), 2)
        (keys, rows), (wanted_keys, wanted_rows) = rows_by_key(two, state), rows_by_key(eight, went_on)
        assert (keys == wanted_keys).all()
        print(f"largest difference to the training that went on: {np.abs(rows - wanted_rows).max():.1e}")

        checkpoint.export_full(folder / "monday", two, state)
        serving = checkpoint.load(folder / "monday", single)
        state, bias = train(two, state, bias, 1)
        state, _ = two.erase(state, "user", np.arange(50))  # users who asked to be forgotten
        exported = checkpoint.export_delta(folder / "tuesday", two, state, base=folder / "monday")
        serving = checkpoint.apply_delta(folder / "tuesday", single, serving, after=folder / "monday")
        print(f"a delta of {exported.num_rows['user']} rows and {exported.num_tombstones['user']} keys that went")
        for live, served in zip(rows_by_key(two, state), rows_by_key(single, serving), strict=True):
            np.testing.assert_array_equal(live, served)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # before the devices are first asked for; GPUs ignore it
    main()
