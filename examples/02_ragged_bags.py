"""Ragged bags: a history of any length becomes one vector, by combiner and with weights.

    python examples/02_ragged_bags.py

Walks one tiny batch with numbers, then shows two features that read one table. Rows begin at a known value, so that
every result can be worked out by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok

ITEMS = jaxsok.TableSpec("item", 2, jaxsok.optim.sgd(0.5), initializer=jaxsok.initializers.constant(1.0))


def combiners():
    """Three samples with the bags [7, 7, 9], [] and [8]: an empty bag gives zeros."""
    features = [
        jaxsok.FeatureSpec("sum", table="item", combiner="sum"),
        jaxsok.FeatureSpec("mean", table="item", combiner="mean"),
        jaxsok.FeatureSpec("sqrtn", table="item", combiner="sqrtn"),
    ]
    collection = jaxsok.Collection([ITEMS], features)
    bags = jaxsok.Bags(np.array([7, 7, 9, 8]), lengths=np.array([3, 0, 1]))
    batch = collection.batch({"sum": bags, "mean": bags, "sqrtn": bags})
    embeddings, state, _ = collection.lookup(collection.init(seed=0), batch.features)
    for name, expected in {"sum": 3.0, "mean": 1.0, "sqrtn": np.sqrt(3.0)}.items():
        print(f"{name:>6}: {embeddings[name].tolist()}")
        np.testing.assert_allclose(embeddings[name], np.array([[expected] * 2, [0.0] * 2, [1.0] * 2]), rtol=1e-6)
    print("  rows:", collection.num_rows(state))  # one table for both features: keys 7, 8 and 9
    assert collection.num_rows(state) == {"item": 3}


def weights_and_sharing():
    """A weighted history and a single item read one table; a row's gradient is the sum over all its uses."""
    features = [
        jaxsok.FeatureSpec("history", table="item", combiner="mean", weighted=True),
        jaxsok.FeatureSpec("item", table="item"),
    ]
    collection = jaxsok.Collection([ITEMS], features)
    history = jaxsok.Bags(np.array([7, 9, 9]), lengths=np.array([2, 1]), weights=np.array([3.0, 1.0, 2.0], np.float32))
    batch = collection.batch({"history": history, "item": np.array([7, jaxsok.PADDING_KEY], np.uint64)})

    @jax.jit
    def step(state, batch):
        embeddings, state, plan = collection.lookup(state, batch.features)
        gradients = jax.grad(lambda e: jnp.sum(e["history"]) + jnp.sum(e["item"]))(embeddings)
        return collection.update(state, plan, gradients)

    state, stats = step(collection.init(seed=0), batch)
    stats.check()
    table = collection.export_table(state, "item")
    rows = dict(zip(table["keys"].tolist(), table["rows"].tolist(), strict=True))
    print("  rows after a step:", rows)
    # Key 7: weight 3/4 of the first bag, and 1 as an item: 1 - 0.5 * 1.75. Key 9: 1/4, and all of the second bag.
    # The second sample has no item: PADDING_KEY finds nothing, inserts nothing, learns nothing.
    assert rows == {7: [0.125, 0.125], 9: [0.375, 0.375]}


def main():
    combiners()
    weights_and_sharing()


if __name__ == "__main__":
    main()
