"""What the tests share: collections, batches in the library's and in the oracle's words, programs jitted once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import strategies

import jaxsok
from jaxsok.kernels import table as table_door

PADDING = jaxsok.PADDING_KEY


# --------------------------------------------------------------------------------------------------------------
# Programs, compiled once per collection


@functools.cache
def lookup(collection):
    """Jitted `collection.lookup`."""
    return jax.jit(collection.lookup)


@functools.cache
def plan(collection):
    """Jitted `collection.plan`."""
    return jax.jit(collection.plan)


@functools.cache
def find(collection):
    """Jitted `collection.find`."""
    return jax.jit(collection.find)


@functools.cache
def update(collection):
    """Jitted `collection.update`."""
    return jax.jit(collection.update)


def loss_of(embeddings):
    """A loss that is not linear in the embeddings."""
    return sum(jnp.sum(jnp.tanh(embedding) ** 2) for embedding in embeddings.values())


def train_step(collection, loss=loss_of):
    """One whole step: lookup, loss and its gradients, update."""

    def step(state, features):
        embeddings, state, plan_ = collection.lookup(state, features)
        value, gradients = jax.value_and_grad(loss)(embeddings)
        state, stats = collection.update(state, plan_, gradients)
        return state, value, stats

    return step


@functools.cache
def donated_step(collection):
    """Jitted `train_step` that gives its state away."""
    return jax.jit(train_step(collection), donate_argnums=0)


# --------------------------------------------------------------------------------------------------------------
# Collections


def one_table(
    *,
    dim=4,
    optimizer=None,
    combiner="sum",
    weighted=False,
    max_keys=None,
    max_hotness=None,
    key_dtype="int64",
    name="user",
    **spec,
):
    """A collection of one table with one feature; both are called `name`."""
    optimizer = jaxsok.optim.sgd(1.0) if optimizer is None else optimizer
    spec = {"capacity": 64, **spec}
    table = jaxsok.TableSpec(name, dim, optimizer, **spec)
    feature = jaxsok.FeatureSpec(
        name,
        name,
        combiner=combiner,
        weighted=weighted,
        max_keys=max_keys,
        max_hotness=max_hotness,
        key_dtype=key_dtype,
    )
    return jaxsok.Collection([table], [feature])


def batch(collection, **raw):
    """The features of a batch."""
    return collection.batch(raw).features


def as_array(keys):
    """Python integers as uint64, whatever their sign bit."""
    return np.array([int(key) % 2**64 for key in np.ravel(np.asarray(keys, object))], np.uint64).reshape(
        np.shape(np.asarray(keys, object))
    )


def words(keys):
    """Keys as the words JAX holds: uint32[..., 2], low word first."""
    keys = as_array(keys)
    return np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], -1).astype(np.uint32)


def to_bags(bags):
    """The oracle's ragged bags as `jaxsok.Bags` with lengths."""
    pairs = [oracle.keys_and_weights(bag) for bag in bags]
    flat = as_array([key for keys, _ in pairs for key in keys]).reshape(-1)
    lengths = np.array([len(keys) for keys, _ in pairs], np.int32)
    if not any(isinstance(entry, tuple) for bag in bags for entry in bag):
        return jaxsok.Bags(flat, lengths=lengths)
    weights = np.array([weight for _, weights in pairs for weight in weights], np.float32)
    return jaxsok.Bags(flat, lengths=lengths, weights=weights)


def learn(collection, state, features, gradient=1.0):
    """One lookup and one update with the same gradient for every embedding; returns state and stats."""
    embeddings, state, plan_ = lookup(collection)(state, features)
    gradients = jax.tree.map(lambda e: jnp.full(e.shape, gradient, e.dtype), embeddings)
    return update(collection)(state, plan_, gradients)


def insert(collection, state, keys, *, name="user", grow=False):
    """Looks up an array of keys, one key a sample, and returns the state; `grow` is called before, if asked for."""
    features = batch(collection, **{name: as_array(keys)})
    if grow:  # after the batch was packed: a collection learns from its batches how much one step may insert
        state = collection.grow(state)
    _, state, _ = lookup(collection)(state, features)
    return state


# --------------------------------------------------------------------------------------------------------------
# Reading results


def exported(collection, state, name="user"):
    """A table as a dict from key to (row id, row, [state arrays])."""
    table = collection.export_table(state, name)
    states = list(table["state"].values())
    return {
        int(key): (int(row_id), row, [array[i] for array in states])
        for i, (key, row, row_id) in enumerate(zip(table["keys"], table["rows"], table["row_ids"], strict=True))
    }


def rows_of(collection, state, name="user"):
    """A table as a dict from key to row."""
    return {key: row for key, (_, row, _) in exported(collection, state, name).items()}


def counts(stats, table="user"):
    """The five counts of law 5 of one table, as Python integers."""
    return {name: int(stats.to_dict()[table][name]) for name in oracle.COUNTS}


def total(stats, name):
    """One field of the statistics, summed over tables or stores."""
    return int(np.sum(np.asarray(getattr(stats, name))))


def state_leaves(state):
    """(path, leaf) of every array in a state."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


def assert_same_state(first, second, *, index=True):
    """Bitwise equality of two states; without the index if the order of its entries may differ (law 3)."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), (_, b) in zip(state_leaves(first), state_leaves(second), strict=True):
        if index or "index" not in path:
            np.testing.assert_array_equal(bits(a), bits(b), err_msg=path)


def bits(array):
    """The bits of an array, so that equality sees -0 and NaN."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "f" else array


def assert_same_tables(collection, first, second):
    """Equality of what two states export, to the bit."""
    for table in collection.tables:
        a, b = collection.export_table(first, table.name), collection.export_table(second, table.name)
        np.testing.assert_array_equal(a["keys"], b["keys"])
        np.testing.assert_array_equal(a["row_ids"], b["row_ids"])
        np.testing.assert_array_equal(bits(a["rows"]), bits(b["rows"]))
        assert a["state"].keys() == b["state"].keys()
        for name in a["state"]:
            np.testing.assert_array_equal(bits(a["state"][name]), bits(b["state"][name]), err_msg=name)


# --------------------------------------------------------------------------------------------------------------
# Initial rows

_CHUNK = 256  # keys asked at once: one compilation per table


@functools.cache
def _initial_row_finder(name, dim, initializer, seed):
    table = jaxsok.TableSpec(name, dim, jaxsok.optim.sgd(1.0), initializer=initializer, capacity=16)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("probe", name)])
    return collection, collection.init(seed=seed)


def initial_rows(name, dim, keys, *, initializer=None, seed=0):
    """What new rows hold, asked from `find` on a fresh state: float32[n, dim]."""
    initializer = jaxsok.initializers.uniform() if initializer is None else initializer
    collection, state = _initial_row_finder(name, dim, initializer, seed)
    keys = as_array(keys)
    rows = []
    for start in range(0, len(keys), _CHUNK):
        chunk = np.full(_CHUNK, PADDING, np.uint64)
        part = keys[start : start + _CHUNK]
        chunk[: len(part)] = part
        embeddings, _ = find(collection)(state, batch(collection, probe=chunk))
        rows.append(np.asarray(embeddings["probe"])[: len(part)])
    return np.concatenate(rows) if rows else np.zeros((0, dim), np.float32)


def initial_row(name, dim, **options):
    """The oracle's callback: key -> initial row, each key asked once."""
    cache = {}

    def row(key):
        if key not in cache:
            cache[key] = initial_rows(name, dim, [key], **options)[0]
        return cache[key]

    return row


# --------------------------------------------------------------------------------------------------------------
# The one look inside: where keys of one bucket have to be aimed


def index_of(collection, state, store=0):
    """(num_buckets, salt) of a store's index, for `strategies.keys_of_one_bucket`."""
    store = state.stores[store]
    counters = np.asarray(store.counters)
    return store.index.shape[0], int(counters[6]) | int(counters[7]) << 32


def aimed_keys(collection, state, num_keys, *, table_id=0, bucket=1, **options):
    """Keys of a table of the first store whose home is one bucket of the index as it is now."""
    num_buckets, salt = index_of(collection, state)
    return strategies.keys_of_one_bucket(
        table_door.home_bucket,
        num_keys,
        table_id=table_id,
        salt=salt,
        num_buckets=num_buckets,
        bucket=bucket,
        **options,
    )
