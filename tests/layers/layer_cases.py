"""Shared parts of the Flax layers' tests: collections, raw batches, and the model in NumPy alone."""

import contextlib
import functools
import logging

import jax
import numpy as np
import programs

import jaxsok

RATE, ROW_RATE, START = 0.05, 0.2, 0.25
WIDTH = 4 + 4 + 2 * 3  # columns of the model's input: user, mean of history, two ads


def collection_of(num_devices=1, *, optimizer=None, capacity=64, axis_type=None, **options):
    """Returns two stores; a table that two features read; a ragged bag, single keys, rows without a combiner."""
    optimizer = jaxsok.optim.sgd(ROW_RATE) if optimizer is None else optimizer
    options = {"initializer": jaxsok.initializers.constant(START), "capacity": capacity, **options}
    tables = [
        jaxsok.TableSpec("user", 4, optimizer, **options),
        jaxsok.TableSpec("item", 4, optimizer, **options),
        jaxsok.TableSpec("ad", 3, optimizer, **options),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("history", "item", combiner="mean", max_keys=32),
        jaxsok.FeatureSpec("ads", "ad", combiner=None),
    ]
    if num_devices == 1 and axis_type is None:
        return jaxsok.Collection(tables, features)
    mesh = programs.mesh(num_devices, **({} if axis_type is None else {"axis_type": axis_type}))
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data")


@functools.cache
def one_device():
    """Returns the collection of most tests, so that programs are compiled once for it."""
    return collection_of()


def raw_batch(rng, num_samples=8, num_keys=12):
    """Makes keys of a small pool, so that rows recur; different tables share numbers."""
    lengths = rng.integers(0, 3, num_samples)
    return {
        "user": rng.integers(0, num_keys, num_samples),
        "history": jaxsok.Bags(rng.integers(0, num_keys, lengths.sum()), lengths=lengths),
        "ads": rng.integers(0, num_keys, (num_samples, 2)),
        "label": rng.normal(size=num_samples).astype(np.float32),
    }


def raw_batches(num_steps, seed=0, **options):
    """Makes `num_steps` raw batches."""
    rng = np.random.default_rng(seed)
    return [raw_batch(rng, **options) for _ in range(num_steps)]


def join(embeddings):
    """Returns the input of the dense part: [num_samples, WIDTH]."""
    ads = embeddings["ads"]
    return jax.numpy.concatenate([embeddings["user"], embeddings["history"], ads.reshape(ads.shape[0], -1)], axis=-1)


def loss_of(scores, label):
    """Returns the mean squared error."""
    return ((scores - label) ** 2).mean()


class Oracle:
    """The model in float64: a dict of rows, gradients by formula, plain SGD for rows and for the dense part."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = np.array(kernel, np.float64).reshape(-1), float(np.ravel(bias)[0])
        self.rows = {}

    def keys_of(self, raw):
        """Yields, for each sample, the (table, key, share, first column) of its uses."""
        ends = np.cumsum(raw["history"].lengths)
        for i, user in enumerate(raw["user"]):
            uses = [("user", int(user), 1.0, 0)]
            bag = raw["history"].keys[ends[i] - raw["history"].lengths[i] : ends[i]]
            uses += [("item", int(key), 1.0 / len(bag), 4) for key in bag]
            uses += [("ad", int(key), 1.0, 8 + 3 * j) for j, key in enumerate(raw["ads"][i])]
            yield uses

    def row(self, table, key, *, insert):
        """Returns a row; a new row is made, and kept on request."""
        new = np.full(3 if table == "ad" else 4, START)
        return self.rows.setdefault((table, key), new) if insert else self.rows.get((table, key), new)

    def forward(self, raw, *, insert):
        """Returns inputs and scores."""
        x = np.zeros((len(raw["user"]), WIDTH))
        for line, uses in zip(x, self.keys_of(raw), strict=True):
            for table, key, share, first in uses:
                row = self.row(table, key, insert=insert)
                line[first : first + len(row)] += share * row
        return x, x @ self.kernel + self.bias

    def loss(self, raw, *, insert=False):
        """Returns the mean squared error."""
        return np.mean((self.forward(raw, insert=insert)[1] - raw["label"]) ** 2)

    def step(self, *raws):
        """Runs one update from the summed gradients of several batches; returns the loss of each."""
        losses, g_kernel, g_bias, g_rows = [], np.zeros(WIDTH), 0.0, {}
        for raw in raws:
            x, scores = self.forward(raw, insert=True)
            g_scores = 2 * (scores - raw["label"]) / len(scores)
            losses.append(np.mean((scores - raw["label"]) ** 2))
            g_kernel, g_bias = g_kernel + g_scores @ x, g_bias + g_scores.sum()
            for g_score, uses in zip(g_scores, self.keys_of(raw), strict=True):
                for table, key, share, first in uses:
                    row = self.rows[table, key]
                    g_row = share * g_score * self.kernel[first : first + len(row)]
                    g_rows[table, key] = g_rows.get((table, key), 0.0) + g_row
        self.kernel, self.bias = self.kernel - RATE * g_kernel, self.bias - RATE * g_bias
        for name, g_row in g_rows.items():
            self.rows[name] = self.rows[name] - ROW_RATE * g_row
        return losses

    def assert_tables(self, collection, state):
        """Asserts that the tables have these keys and, within the rounding of float32 sums, these rows."""
        for spec in collection.tables:
            table = programs.by_key(collection, state, spec.name)
            mine = {key: row for (name, key), row in self.rows.items() if name == spec.name}
            assert table["keys"].tolist() == sorted(mine), spec.name
            for key, row in zip(table["keys"].tolist(), table["rows"], strict=True):
                np.testing.assert_allclose(row, mine[key], rtol=1e-4, atol=1e-6, err_msg=f"{spec.name} {key}")


def dense_gradients(kernel, bias, raws, num_keys=12):
    """Returns the gradients for Optax: of the model over whole tables of fresh rows, summed over batches."""
    params = {name: jax.numpy.full((num_keys, dim), START) for name, dim in (("user", 4), ("item", 4), ("ad", 3))}
    params |= {"kernel": jax.numpy.reshape(kernel, -1), "bias": jax.numpy.reshape(bias, ())}

    def loss(params, raw):
        bags = raw["history"]
        means = np.zeros((len(bags.lengths), num_keys), np.float32)
        for i, end in enumerate(np.cumsum(bags.lengths)):
            for key in bags.keys[end - bags.lengths[i] : end]:
                means[i, key] += 1 / bags.lengths[i]
        ads = params["ad"][raw["ads"]].reshape(len(means), -1)
        x = jax.numpy.concatenate([params["user"][raw["user"]], means @ params["item"], ads], axis=-1)
        return loss_of(x @ params["kernel"] + params["bias"], raw["label"])

    gradients = [jax.grad(loss)(params, raw) for raw in raws]
    return jax.tree.map(lambda *leaves: sum(leaves), *gradients)


def assert_stepped(collection, state, gradients):
    """Asserts that the rows in use are fresh rows after plain SGD on dense gradients."""
    for spec in collection.tables:
        table = programs.by_key(collection, state, spec.name)
        wanted = START - ROW_RATE * np.asarray(gradients[spec.name])[table["keys"].astype(np.int64)]
        np.testing.assert_allclose(table["rows"], wanted, rtol=1e-5, err_msg=spec.name)


def everywhere(collection, tree):
    """Puts a pytree's arrays on all devices of the collection's mesh, if it has a mesh."""
    return collection.shards.replicate(tree)


def addresses(tree):
    """Returns the addresses of a pytree's buffers on every device."""
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def snapshot(tree):
    """Copies a pytree's arrays to the host."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def assert_equal(first, second):
    """Asserts that two pytrees are equal to the bit, but for the lineages of states."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, leaf), two in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        name = jax.tree_util.keystr(path)
        both = (programs.without_lineage(name, np.asarray(each)) for each in (leaf, two))
        np.testing.assert_array_equal(*both, err_msg=name)


@contextlib.contextmanager
def compiled_on_the_spot(name):
    """Lists the threads that wait for XLA to compile the jitted function `name`; background threads do not log."""
    threads = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith(f"Finished XLA compilation of jit({name})"):
                threads.append(record.threadName)

    logger, handler = logging.getLogger("jax._src.dispatch"), Handler()
    logger.addHandler(handler)
    try:
        with jax.log_compiles():  # logs of this thread alone
            yield threads
    finally:
        logger.removeHandler(handler)


def new_users(collection, number):
    """Returns a batch of eight users that occur in no other batch."""
    raw = raw_batch(np.random.default_rng(number), num_keys=4)
    return collection.batch({**raw, "user": np.arange(8) + 8 * number})


def collection_that_evicts():
    """Returns a table of eight rows, of which the least recently used leave, and its collection."""
    table = jaxsok.TableSpec(
        "item", 4, jaxsok.optim.sgd(0.1), capacity=8, max_capacity=8, eviction=jaxsok.policies.LeastRecentlyUsed()
    )
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("item", "item")])


CLOCKED = {500: [0, 1, 2, 3], 100: [4, 5, 6, 7], 600: [0, 8]}
"""Keys by the clock of their step, in order of the steps: the clock goes back once."""


def assert_clocked(collection, state, left):
    """Asserts that rows left by the clock, and were handed over with it, and that the others have theirs."""
    assert [name for name, _ in left] == ["item"] * len(left)
    gone = {int(key): int(at) for _, records in left for key, at in zip(records.keys, records.last_step, strict=True)}
    kept = collection.export_table(state, "item")
    kept = dict(zip(kept["keys"].tolist(), kept["last_step"].tolist(), strict=True))
    assert gone and set(gone.values()) == {100} and gone.keys() <= {4, 5, 6, 7}
    assert kept == {0: 600, 1: 500, 2: 500, 3: 500, 8: 600} | {key: 100 for key in {4, 5, 6, 7} - gone.keys()}


def full_and_young():
    """Returns a collection whose full table evicts by age, too little for the last of the raw batches."""
    evicts = {"max_capacity": 32, "eviction": jaxsok.policies.TimeToLive(steps=1)}
    table = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=32, **evicts)
    raws = [{"item": np.arange(first, last)} for first, last in ((0, 4), (4, 32), (40, 66))]
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("item", "item")]), raws


def step_of(collection, state, batch):
    """Steps once, without a layer."""
    embeddings, state, plan = collection.lookup(state, batch.features)
    return collection.update(state, plan, embeddings)[0]
