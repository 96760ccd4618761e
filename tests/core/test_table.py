"""jaxsok.table: keys to row ids on one shard, against a dict. The kernels' cases are in test_kernels.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsok
from jaxsok import keys, store, table
from jaxsok.types import COUNTS

CAPACITY = 8
SPEC = jaxsok.StoreSpec(
    tuple(jaxsok.TableSpec(name, dim=4, optimizer=jaxsok.optim.adagrad(0.1), capacity=CAPACITY // 2) for name in "ab")
)
SEED = np.array([3, 0], np.uint32)
SALT = np.array([7, 0], np.uint32)


@pytest.fixture
def empty() -> store.StoreState:
    """Returns a store of eight rows with two tables."""
    jaxsok.Collection(SPEC.tables, [])  # refuses invalid declarations
    return store.init_store(SPEC, SALT)


def insert(state, values, tables):
    """Runs find_or_insert with NumPy keys."""
    seed = jnp.asarray(SEED)
    words = keys.to_words(np.asarray(values, np.uint64), "test")
    return table.find_or_insert(SPEC, state, seed, words, np.asarray(tables, np.uint32))


def find(state, values, tables):
    """Runs find with NumPy keys."""
    words = keys.to_words(np.asarray(values, np.uint64), "test")
    return np.asarray(table.find(state, words, np.asarray(tables, np.uint32))).tolist()


def test_rows_by_first_occurrence(empty):
    """Repeats share a row; equal keys of two tables do not."""
    state, row_ids, counts = insert(empty, [9, 7, 9, 9], [0, 0, 0, 1])
    assert np.asarray(row_ids).tolist() == [0, 1, 0, 2]
    assert np.asarray(counts)[:, COUNTS.index("num_inserted")].tolist() == [2, 1]
    assert np.asarray(counts)[:, COUNTS.index("num_found")].tolist() == [1, 0]
    assert find(state, [7, 9, 9, 8], [0, 0, 1, 1]) == [1, 0, 2, jaxsok.NO_ROW]


def test_padding_finds_and_inserts_nothing(empty):
    """PADDING_KEY has no row before or after an insert."""
    state, row_ids, counts = insert(empty, [jaxsok.PADDING_KEY, 1], [0, 0])
    assert np.asarray(row_ids).tolist() == [jaxsok.NO_ROW, 0]
    assert np.asarray(counts)[0, COUNTS.index("num_padding")] == 1
    assert find(state, [jaxsok.PADDING_KEY], [0]) == [jaxsok.NO_ROW]


def test_keys_are_counted_once_where_xla_works_out_rows():
    """Such tables take two calls, of which the second skips keys that have a row (law 5)."""
    initializer = jaxsok.initializers.function(lambda words, columns: columns.astype(jnp.float32), "columns")
    table_spec = jaxsok.TableSpec("a", 4, jaxsok.optim.sgd(0.1), initializer=initializer, capacity=CAPACITY)
    spec, words = jaxsok.StoreSpec((table_spec,)), keys.to_words(np.array([9, 7, 9, -1]), "test")
    state = store.init_store(spec, SALT)
    for wanted in ({"num_found": 1, "num_inserted": 2, "num_padding": 1}, {"num_found": 3, "num_padding": 1}):
        state, _, counts = table.find_or_insert(spec, state, jnp.asarray(SEED), words, np.zeros(4, np.uint32))
        assert {name: int(count) for name, count in zip(COUNTS, counts[0], strict=True) if count} == wanted


def test_the_first_keys_get_the_last_rows(empty):
    """With ten new keys and eight rows, the last two by position are refused."""
    state, row_ids, counts = insert(empty, range(100, 110), [0] * 10)
    assert np.asarray(row_ids).tolist() == [*range(8), jaxsok.NO_ROW, jaxsok.NO_ROW]
    assert np.asarray(counts)[0, COUNTS.index("num_refused")] == 2
    assert int(state.num_rows()) == CAPACITY


def test_erased_rows_come_back_in_ascending_order(empty):
    """Freed rows are reused before new rows; the state of a freed row is initial again."""
    state, *_ = insert(empty, [1, 2, 3, 4], [0, 0, 0, 0])
    state, num_erased = table.erase(SPEC, state, keys.to_words(np.array([3, 1, 3, 99]), "test"), np.zeros(4, np.uint32))
    assert int(num_erased) == 2 and int(state.generation) == 1
    assert find(state, [1, 2, 3, 4], [0] * 4) == [jaxsok.NO_ROW, 1, jaxsok.NO_ROW, 3]
    state, row_ids, _ = insert(state, [10, 11, 12], [1, 1, 1])
    assert np.asarray(row_ids).tolist() == [0, 2, 4]


def test_rebuild_keeps_every_row(empty):
    """An index of another size finds the same rows."""
    state, row_ids, _ = insert(empty, [1, 2, 3], [0, 1, 0])
    index, counters = jax.jit(table.kernels.rebuild, static_argnums=2)(state.counters, state.records, 64)
    assert index.shape == (64, 16)
    words = keys.to_words(np.array([1, 2, 3]), "test")
    found = table.kernels.find(index, counters, jnp.asarray(words), jnp.asarray(np.array([0, 1, 0], np.uint32)))
    assert np.asarray(found).tolist() == np.asarray(row_ids).tolist()
