"""Keys: always 64 bits, never narrowed; identity is (table, key)."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import strategies
from hypothesis import given, strategies as st

import jaxsok

PADDING = jaxsok.PADDING_KEY


def keys_in(collection, value):
    """Looks up one array of keys on a new state, and returns the table's keys in the order of their rows."""
    features = programs.batch(collection, user=value)
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
    return collection.export_table(state, "user")["keys"].tolist()


@pytest.fixture(scope="module")
def collection():
    """Returns a collection of one table with one key per sample."""
    return programs.one_table()


def test_constants():
    """The two reserved values are as documented."""
    assert jaxsok.PADDING_KEY == 2**64 - 1
    assert jaxsok.NO_ROW == 2**32 - 1


@given(keys=st.lists(strategies.any_key(), min_size=8, max_size=8))
def test_every_64_bit_key_is_itself(keys):
    """No key is narrowed, folded or changed in sign, as uint64, as int64 and as words."""
    collection = _shared_collection()
    distinct = list(dict.fromkeys(keys))
    array = programs.as_array(keys)
    assert keys_in(collection, array) == distinct
    assert keys_in(collection, array.view(np.int64)) == distinct
    assert keys_in(collection, jnp.asarray(programs.words(keys))) == distinct


_SHARED = {}


def _shared_collection():
    if "collection" not in _SHARED:
        _SHARED["collection"] = programs.one_table()
    return _SHARED["collection"]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_signed_numpy_keys_are_widened_by_sign(collection, dtype):
    """In every width -2 is 2**64 - 2 and -1 is padding."""
    smallest = np.iinfo(dtype).min
    keys = np.array([0, 5, -2, smallest, np.iinfo(dtype).max, -1], dtype)
    assert keys_in(collection, keys) == [0, 5, 2**64 - 2, smallest % 2**64, np.iinfo(dtype).max]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_numpy_keys_are_widened_with_zeros(collection, dtype):
    """All ones in 8, 16 or 32 bits is an ordinary key; in 64 bits it is padding."""
    largest = np.iinfo(dtype).max
    keys = np.array([0, 5, largest - 1, largest], dtype)
    want = [0, 5, largest - 1, largest]
    assert keys_in(collection, keys) == [key for key in want if key != PADDING]


def test_keys_in_any_memory_order(collection):
    """Strided, reversed, byte-swapped and read-only NumPy arrays of keys are read by value."""
    base = np.array([3, 99, 2**40, 99, 7, 99], np.int64)
    assert keys_in(collection, base[::2]) == [3, 2**40, 7]
    assert keys_in(collection, base[::-2]) == [99]
    assert keys_in(collection, base.astype(">i8")[::2]) == [3, 2**40, 7]
    base.setflags(write=False)
    assert keys_in(collection, base) == [3, 99, 2**40, 7]
    columns = np.asfortranarray(np.array([[1, 2**33], [3, 2**34]]))
    assert keys_in(collection, columns) == [1, 2**33, 3, 2**34]


def test_words_of_padded_features(collection):
    """uint32[batch, hotness, 2] is a padded feature."""
    keys = np.array([[2**63 + 1, -1 % 2**64], [2**32, 1]], np.uint64)
    embeddings, state, _ = collection.lookup(
        collection.init(seed=0), programs.batch(collection, user=jnp.asarray(programs.words(keys)))
    )
    assert embeddings["user"].shape == (2, 4)
    assert collection.export_table(state, "user")["keys"].tolist() == [2**63 + 1, 2**32, 1]


def test_int32_keys_on_the_device_need_to_be_declared():
    """With key_dtype="int32" an int32 jax.Array is widened by sign; NumPy keys of the same feature stay 64-bit."""
    collection = programs.one_table(key_dtype="int32")
    assert keys_in(collection, jnp.array([5, -2, -1, 2**31 - 1], jnp.int32)) == [5, 2**64 - 2, 2**31 - 1]
    assert keys_in(collection, np.array([5, 2**40, -1])) == [5, 2**40]


def test_int64_keys_on_the_device_with_x64(collection):
    """With x64 on, a jax.Array of int64 is read as 64-bit keys."""
    with jax.enable_x64(True):
        keys = jnp.array([2**62 + 5, 5, -1, -2], jnp.int64)
        assert keys.dtype == np.int64
        features = programs.batch(collection, user=keys)
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
    assert collection.export_table(state, "user")["keys"].tolist() == [2**62 + 5, 5, 2**64 - 2]


def test_everything_works_with_x64_on():
    """With x64 on, rows are float32 and ids are equal; the state has no float64 or int64."""
    collection = programs.one_table(combiner="mean", optimizer=jaxsok.optim.adam(0.1))
    keys = programs.as_array([[3, 2**63], [3, PADDING]])

    def steps():
        state = collection.init(seed=0)
        embeddings, state, plan = collection.lookup(state, programs.batch(collection, user=keys))
        state, stats = collection.update(state, plan, embeddings)
        stats.check()
        return collection.grow(state), embeddings

    with jax.enable_x64(True):
        wide, wide_embeddings = steps()
        assert not any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(wide))
        assert wide_embeddings["user"].dtype == np.float32
    narrow, narrow_embeddings = steps()
    np.testing.assert_array_equal(wide_embeddings["user"], narrow_embeddings["user"])
    programs.assert_same_tables(collection, wide, narrow)


def test_padding_finds_nothing_and_inserts_nothing(collection):
    """Padding gives zeros, inserts nothing and is counted; its gradient reaches no row."""
    features = programs.batch(collection, user=np.array([-1, 4, -1]))
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    np.testing.assert_array_equal(np.asarray(embeddings["user"])[[0, 2]], 0)
    state, stats = collection.update(state, plan, {"user": jnp.array([[9.0] * 4, [0.0] * 4, [9.0] * 4])})
    assert programs.counts(stats) == {
        "num_found": 0,
        "num_inserted": 1,
        "num_missing": 0,
        "num_refused": 0,
        "num_padding": 2,
    }
    rows = programs.rows_of(collection, state)
    assert list(rows) == [4]
    np.testing.assert_array_equal(rows[4], programs.initial_rows("user", 4, [4])[0])


def test_twins_that_differ_in_one_word_are_strangers(collection):
    """Keys with equal low words, equal high words or swapped words are different keys."""
    twins = [5, 2**32 + 5, 5 * 2**32, 5 * 2**32 + 5, 2**63 + 5, 2**32 * 5 + 2**31]
    assert keys_in(collection, programs.as_array(twins)) == twins
    rows = programs.initial_rows("user", 4, twins)
    assert len({row.tobytes() for row in rows}) == len(twins)


@pytest.mark.parametrize("stride", [1, 2**31, 2**32])
def test_strangers_that_meet_in_one_bucket(collection, stride):
    """Keys of one bucket that differ in the low word, in the middle bits, or in the high word alone are distinct."""
    state = collection.init(seed=0)
    keys = programs.aimed_keys(collection, state, 12, stride=stride, start=5)
    assert keys_in(collection, keys) == keys.tolist()
    state = programs.insert(collection, state, keys[:6])
    _, stats = programs.find(collection)(state, programs.batch(collection, user=keys))
    assert programs.counts(stats)["num_found"] == 6 and programs.counts(stats)["num_missing"] == 6
    state, num_erased = collection.erase(state, "user", keys[3:9])
    assert int(num_erased) == 3
    assert list(programs.rows_of(collection, state)) == keys[:3].tolist()


def test_equal_keys_of_two_tables_meet_in_one_bucket():
    """The walk of one table passes entries of the other table that hold the same key."""
    sgd = jaxsok.optim.sgd(1.0)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("user", 4, sgd, capacity=32), jaxsok.TableSpec("item", 4, sgd, capacity=32)],
        [jaxsok.FeatureSpec("u", "user"), jaxsok.FeatureSpec("i", "item")],
    )
    state = collection.init(seed=0)
    # One in 32 of the 4,096 keys of a bucket in the first table has the same home in the second.
    homes = [set(programs.aimed_keys(collection, state, 4096, table_id=number).tolist()) for number in (0, 1)]
    keys = np.array(sorted(homes[0] & homes[1])[:8], np.uint64)
    assert len(keys) == 8
    features = programs.batch(collection, u=keys, i=np.full(8, -1))
    _, state, _ = programs.lookup(collection)(state, features)
    embeddings, stats = programs.find(collection)(state, programs.batch(collection, u=keys, i=keys))
    assert programs.counts(stats, "item")["num_missing"] == programs.counts(stats, "user")["num_found"] == 8
    np.testing.assert_array_equal(embeddings["i"], programs.initial_rows("item", 4, keys))
    both = programs.batch(collection, u=keys, i=keys[::-1].copy())
    _, state, plan = programs.lookup(collection)(state, both)
    state, stats = programs.update(collection)(state, plan, {"u": jnp.ones((8, 4)), "i": jnp.zeros((8, 4))})
    assert programs.counts(stats, "item")["num_inserted"] == programs.counts(stats, "user")["num_found"] == 8
    rows = programs.rows_of(collection, state, "item")
    np.testing.assert_array_equal(np.stack([rows[key] for key in keys.tolist()]), embeddings["i"])
    state, num_erased = collection.erase(state, "user", keys[:4])
    assert int(num_erased) == 4
    assert set(programs.rows_of(collection, state, "user")) == set(keys[4:].tolist())
    assert set(programs.rows_of(collection, state, "item")) == set(keys.tolist())


@pytest.mark.parametrize("share_a_store", [True, False])
def test_equal_keys_in_two_tables_are_strangers(share_a_store):
    """Each table has its own row of key 5; erasing the key in one table keeps it in the other."""
    second = jaxsok.optim.sgd(1.0 if share_a_store else 2.0)
    collection = jaxsok.Collection(
        [
            jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=16),
            jaxsok.TableSpec("item", 4, second, capacity=16),
        ],
        [jaxsok.FeatureSpec("u", "user"), jaxsok.FeatureSpec("i", "item")],
    )
    assert len(collection.stores) == (1 if share_a_store else 2)
    features = programs.batch(collection, u=np.array([5, 0]), i=np.array([5, 0]))
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    assert not np.any(np.asarray(embeddings["u"]) == np.asarray(embeddings["i"]))
    gradients = {"u": jnp.ones((2, 4)), "i": jnp.zeros((2, 4))}
    state, _ = collection.update(state, plan, gradients)
    np.testing.assert_array_equal(programs.rows_of(collection, state, "item")[5], embeddings["i"][0])
    np.testing.assert_array_equal(programs.rows_of(collection, state, "user")[5], embeddings["u"][0] - 1.0)
    state, num_erased = collection.erase(state, "user", np.array([5]))
    assert int(num_erased) == 1
    assert list(programs.rows_of(collection, state, "user")) == [0]
    assert list(programs.rows_of(collection, state, "item")) == [5, 0]
