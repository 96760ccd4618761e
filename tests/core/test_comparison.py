"""`jaxsok.parity`: its comparisons and its reports."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsok


class Peer:
    """Gradient descent on one array per table; it forgets a column of one row in one step."""

    def __init__(self, collection, forgets):
        self.rows = {table.name: np.zeros((10, 2), np.float32) for table in collection.tables}
        self.forgets, self.num_steps = forgets, 0

    def step(self, keys):
        self.num_steps += 1
        for table, rows in self.rows.items():
            np.subtract.at(rows, keys, 1)
            if (self.num_steps, table) == self.forgets[:2]:
                rows[self.forgets[2], 1] += 0.5
        return float(self.num_steps)

    def read(self, table, keys):
        return self.rows[table][keys.astype(int)]


@pytest.fixture(scope="module")
def collection():
    zeros = jaxsok.initializers.zeros()
    names = ["user", "item"]
    tables = [jaxsok.TableSpec(name, 2, jaxsok.optim.sgd(1.0), initializer=zeros, capacity=16) for name in names]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in names])


def run(collection, forgets):
    def step(state, keys):
        _, state, plan = collection.lookup(state, collection.batch({"user": keys, "item": keys}).features)
        state, _ = collection.update(state, plan, {name: jnp.ones((3, 2)) for name in ("user", "item")})
        return state, state.step

    peer = Peer(collection, forgets)
    batches = [np.array([1, 2, 2]), np.array([9, 4, 7]), np.array([3, 3, 4])]
    return jaxsok.parity(collection, collection.init(), step, peer.step, peer.read, batches)


@pytest.mark.parametrize("forgets", [(1, "item", 2), (2, "user", 4), (3, "item", 1)])
def test_the_first_difference_is_found(collection, forgets):
    """A row is reported in the step in which it first differs, even if that step does not use it."""
    found = run(collection, forgets)
    assert (found.num_steps, found.table, found.key) == forgets
    np.testing.assert_array_equal(found.theirs - found.ours, [0, 0.5])
    assert str(found).startswith(f'after step {forgets[0]}: table "{forgets[1]}", key {forgets[2]}: row[1] is')
    assert int(found.state.step) == found.num_steps


def test_equal_steps_agree(collection):
    """Without a difference all batches are used, and the losses of both sides are kept."""
    found = run(collection, (0, "", 0))
    assert found.table is None and str(found) == "3 steps agree"
    np.testing.assert_array_equal(found.losses, [[1, 1], [2, 2], [3, 3]])


def test_rows_of_another_shape(collection):
    """A peer that returns rows of another shape is refused."""
    state = collection.init()
    _, state, _ = collection.lookup(state, collection.batch({"user": np.array([1]), "item": np.array([1])}).features)
    with pytest.raises(ValueError, match=r'parity: peer_rows: "user": got shape \(1, 3\), wanted \(1, 2\)'):
        jaxsok.parity(collection, state, None, None, lambda table, keys: np.ones((1, 3)), [])
