"""Trains one table, one key a sample: rows appear when a key is first seen, and learn.

    python examples/01_one_table.py

Each user has a hidden rating; a model that is nothing but a table of one number a user finds it. The keys are 64-bit
numbers from anywhere in their range; they need no vocabulary and no renumbering.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok

BATCH_SIZE = 256
NUM_STEPS = 200

tables = [jaxsok.TableSpec("user", dim=1, optimizer=jaxsok.optim.adagrad(1.0), capacity=256)]
features = [jaxsok.FeatureSpec("user", table="user")]
collection = jaxsok.Collection(tables, features)  # declares; holds no arrays


def loss_fn(embeddings, rating):
    return jnp.sum((embeddings["user"][:, 0] - rating) ** 2)


@functools.partial(jax.jit, donate_argnums=0)  # donated: the tables are changed in place
def step(state, batch):
    embeddings, state, plan = collection.lookup(state, batch.features)  # inserts unseen keys
    loss, gradients = jax.value_and_grad(loss_fn)(embeddings, batch["rating"])
    state, stats = collection.update(state, plan, gradients)
    return state, loss, stats


def main():
    state = collection.init(seed=0)  # the arrays: a pytree
    rng = np.random.default_rng(0)
    users = rng.integers(0, 2**63, 1000)
    ratings = rng.integers(1, 6, 1000).astype(np.float32)
    total = None
    for i in range(NUM_STEPS):
        chosen = rng.integers(0, 1000, BATCH_SIZE)
        batch = collection.batch({"user": users[chosen], "rating": ratings[chosen]})
        state = collection.grow(state, batch)  # makes room for its keys; almost always returns at once
        state, loss, stats = step(state, batch)
        total = stats if total is None else total + stats
        if i % 40 == 0 or i == NUM_STEPS - 1:
            total.check()  # raises if any step lost anything; waits for the device, so not at every step
            print(f"step {i:3d}: mean loss {loss / BATCH_SIZE:8.5f}, {collection.num_rows(state)['user']:4d} users")

    # Evaluation inserts nothing: the last of these keys was never seen, and counts as missing.
    asked = np.array([users[0], users[1], 12345])
    embeddings, stats = collection.find(state, collection.batch({"user": asked}).features)
    print("ratings", ratings[:2], "learned", np.asarray(embeddings["user"][:2, 0]).round(2))
    print("stats", stats.to_dict()["user"])
    assert loss / BATCH_SIZE < 0.01
    assert stats.to_dict()["user"]["num_missing"] == 1


if __name__ == "__main__":
    main()
