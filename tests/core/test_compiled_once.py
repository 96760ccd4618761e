"""Equal collections share programs: programs depend on specs and shapes, not on objects."""

import contextlib

import jax
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import checkpoint

TABLES = [
    jaxsok.TableSpec("user", 4, jaxsok.optim.adagrad(0.1), capacity=72, admission=jaxsok.policies.AdmitByCount(3)),
    jaxsok.TableSpec("item", 8, jaxsok.optim.adam(0.1), capacity=72, eviction=jaxsok.policies.LeastRecentlyUsed()),
]
FEATURES = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item")]
CHECKPOINTS = checkpoint.TablesCheckpointHandler()


class Compilations:
    """The names of the programs that JAX compiles."""

    def __init__(self):
        self.names = None
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event, seconds, *, fun_name="a program", **_):
        if self.names is not None and "backend_compile" in event:
            self.names.append(fun_name)

    @contextlib.contextmanager
    def note(self):
        """Yields a list that grows with each compilation."""
        self.names = []
        try:
            yield self.names
        finally:
            self.names = None


COMPILATIONS = Compilations()


def init(collection, _):
    """Makes a state, with new salts, lineage and seed."""
    for seed in (1, 2):
        collection.init(seed=seed)


def batch(collection, _):
    """Packs keys that are already on the devices."""
    keys = jax.numpy.asarray(programs.words(np.arange(16)))
    collection.batch({"user": keys, "item": keys})


def grow(collection, _):
    """Adds rows, enlarges the index and the room for waiting keys, and counts rows."""
    state = collection.init(seed=1)
    features = programs.batch(collection, user=np.arange(1024), item=np.arange(1024))
    collection.num_rows(collection.grow(state, features))


def restore(collection, folder):
    """Restores a state with keys that wait for a row."""
    CHECKPOINTS.restore(folder, checkpoint.TablesRestore(collection))


@pytest.mark.parametrize("num_shards", (None, 4))
@pytest.mark.parametrize("operation", (init, batch, grow, restore))
def test_an_equal_collection_compiles_nothing(operation, num_shards, tmp_path):
    """An operation compiles nothing the second time, with a collection of its own."""

    def declare():
        return programs.over(num_shards, TABLES, FEATURES) if num_shards else jaxsok.Collection(TABLES, FEATURES)

    if operation is restore:
        collection = declare()
        features = programs.batch(collection, user=np.arange(16), item=np.arange(16))
        _, state, _ = jax.jit(collection.lookup)(collection.init(seed=1), features)
        CHECKPOINTS.save(tmp_path, checkpoint.TablesSave(collection, state))
    operation(declare(), tmp_path)
    with COMPILATIONS.note() as names:
        operation(declare(), tmp_path)
    assert names == []


def test_deltas_of_other_sizes_compile_nothing(tmp_path):
    """Keys that a delta erases, and keys that are looked up, are padded to few sizes."""
    collection = jaxsok.Collection(TABLES[1:], FEATURES[1:])
    state = programs.insert(collection, collection.init(seed=1), range(40), name="item")
    checkpoint.export_full(tmp_path / "full", collection, state)
    num_compiled = []
    for num_erased in (3, 7):
        state, _ = collection.erase(state, "item", np.arange(num_erased))
        delta = tmp_path / f"{num_erased}"
        with COMPILATIONS.note() as names:
            checkpoint.export_delta(delta, collection, state, tmp_path / "full")
            restored = checkpoint.load([tmp_path / "full", delta], collection)
        num_compiled.append(len(names))
        assert sorted(programs.rows_of(collection, restored, "item")) == list(range(num_erased, 40))
    assert num_compiled[0] > 0
    assert names == []
