"""Training that stops at a batch and resumes with new objects equals uninterrupted training."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import programs
import pyarrow as pa
import pyarrow.parquet
import pytest

import jaxsok
from jaxsok import checkpoint
from jaxsok.data import ArraySource, ArrowSource, Batches, iterate

BATCH_SIZE, NUM_BATCHES = 32, 5
TABLES = [jaxsok.TableSpec(name, 4, jaxsok.optim.adagrad(0.1), capacity=64) for name in ("user", "tag")]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("tags", "tag", combiner="mean", max_keys=4 * BATCH_SIZE),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Writes clicks in row groups that are no multiple of the batch, and a few more than an epoch's batches take."""
    rng = np.random.default_rng(0)
    num_samples = BATCH_SIZE * NUM_BATCHES + 7
    columns = {
        "user": pa.array(rng.integers(0, 2**40, num_samples)),
        "tags": pa.array([rng.integers(0, 60, rng.integers(0, 4)).tolist() for _ in range(num_samples)]),
        "label": pa.array(rng.integers(0, 2, num_samples).astype(np.float32)),
    }
    path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    pa.parquet.write_table(pa.table(columns), path, row_group_size=50)
    return path


@programs.for_equals
def step_of(collection):
    """Returns the jitted step of all runs."""

    def step(state, batch, plan):
        def loss_fn(embeddings):
            score = embeddings["user"].sum(axis=1) + embeddings["tags"].sum(axis=1)
            return jnp.mean((score - batch["label"]) ** 2)

        embeddings, state, plan = collection.lookup(state, plan)
        return collection.update(state, plan, jax.grad(loss_fn)(embeddings))

    return jax.jit(step, donate_argnums=0)


class Run:
    """A training loop with all its objects."""

    def __init__(self, path, num_shards, **options):
        is_one = num_shards is None
        self.collection = jaxsok.Collection(TABLES, FEATURES) if is_one else programs.over(num_shards, TABLES, FEATURES)
        batches = Batches(ArrowSource(path), BATCH_SIZE, seed=7, process_index=0, process_count=1)
        self.batches = iterate(batches.repeat(2), **options)
        self.state = self.collection.init(seed=0)
        self.trained = []

    def train(self, num_batches=None):
        """Trains on some batches, or on all that are left; returns the pipeline."""
        pipeline = self.collection.pipeline(self.batches)
        for batch, plan in itertools.islice(pipeline, num_batches):
            self.state = self.collection.grow(self.state, batch)
            self.state, stats = step_of(self.collection)(self.state, batch, plan)
            stats.check()
            self.trained.append(np.asarray(batch.features.keys("user")).tolist())
        return pipeline

    def save(self, folder, pipeline):
        """Saves the tables together with the place in the data."""
        with ocp.CheckpointManager(folder) as manager:
            save = checkpoint.TablesSave(self.collection, self.state)
            manager.save(1, args=ocp.args.Composite(tables=save, data=ocp.args.JsonSave(pipeline.get_state())))

    def restore(self, folder):
        """Restores the tables and the place in the data."""
        with ocp.CheckpointManager(folder) as manager:
            items = ocp.args.Composite(tables=checkpoint.TablesRestore(self.collection), data=ocp.args.JsonRestore())
            restored = manager.restore(1, args=items)
        self.state = restored["tables"]
        self.batches.set_state(restored["data"])

    def tables(self):
        """Returns keys, rows and optimizer state in the order of the keys."""
        found = {}
        for name in ("user", "tag"):
            table = self.collection.export_table(self.state, name)
            order = np.argsort(table["keys"])
            found[name] = {part: jax.tree.map(lambda column, order=order: column[order], table[part])
                           for part in ("keys", "rows", "state")}  # fmt: skip
        return found


def _assert_same_tables(first, second):
    jax.tree.map(np.testing.assert_array_equal, first.tables(), second.tables())


@functools.cache
def train_without_stop(path, num_shards):
    """Trains two epochs without a stop."""
    run = Run(path, num_shards)
    run.train()
    assert len(run.trained) == 2 * NUM_BATCHES
    assert run.trained[:NUM_BATCHES] != run.trained[NUM_BATCHES:]
    return run


# The reader alone decides where a run resumes, and it knows no mesh, so a mesh is tested at a single place.
@pytest.mark.parametrize(
    ("num_shards", "stop"), [*((None, stop) for stop in (0, 3, NUM_BATCHES, 8, 2 * NUM_BATCHES)), (4, 3)]
)
def test_training_goes_on_at_the_next_batch(num_shards, path, tmp_path, stop):
    """A run stops before, within, between and after epochs, while the pipeline has read further."""
    whole = train_without_stop(path, num_shards)
    first = Run(path, num_shards)
    pipeline = first.train(stop)
    assert pipeline.get_state()["next_index"] == stop
    if 0 < stop < 8:
        assert first.batches.get_state()["next_index"] > stop, "the pipeline reads ahead"
    first.save(tmp_path, pipeline)
    second = Run(path, num_shards, num_threads=1)
    second.restore(tmp_path)
    second.train()
    assert first.trained + second.trained == whole.trained
    _assert_same_tables(second, whole)


@pytest.mark.slow
def test_training_goes_on_with_worker_processes(path, tmp_path):
    """The saved state holds a state for each worker."""
    whole = Run(path, None)
    whole.train()
    first = Run(path, None, num_workers=2)
    first.save(tmp_path, first.train(3))
    first.batches.close()
    second = Run(path, None, num_workers=2)
    second.restore(tmp_path)
    second.train()
    second.batches.close()
    assert first.trained + second.trained == whole.trained
    _assert_same_tables(second, whole)


def test_batches_without_a_state():
    """A list or a generator has no state to save."""
    collection = jaxsok.Collection(TABLES[:1], FEATURES[:1])
    for batches in ([{"user": np.arange(4)}] * 3, ({"user": np.arange(4)} for _ in range(3))):
        pipeline = collection.pipeline(batches)
        assert pipeline.get_state() is None
        assert [pipeline.get_state() for _ in pipeline] == [None] * 3


def test_the_state_belongs_to_the_batch_handed_out():
    """The state is correct even if the next batch is bad or reading it failed."""

    class Reader:
        def __init__(self):
            self.number = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.number += 1
            if self.number == 5:
                raise OSError("the disk is gone")
            return {"user": np.full(4, self.number)}

        def get_state(self):
            return self.number

    pipeline = jaxsok.Collection(TABLES[:1], FEATURES[:1]).pipeline(Reader())
    states = [pipeline.get_state()]
    with pytest.raises(OSError, match="the disk is gone"):
        for batch, _ in pipeline:
            assert np.asarray(batch.features.keys("user"))[0, 0] == len(states)
            states.append(pipeline.get_state())
    assert states == [0, 1, 2, 3, 4]
    assert pipeline.get_state() == 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_could_not_be_read_comes_in_the_next_loop(prefetch):
    """Grain reads batches ahead and would leave those out that failed; its state would name others."""
    is_away = True

    class Source(ArraySource):
        def take(self, positions):
            if is_away and positions.stop > 12:
                raise OSError("the disk is away")
            return super().take(positions)

    reader = iterate(Batches(Source({"user": np.arange(40)}), 4, process_index=0, process_count=1))
    pipeline, firsts = jaxsok.Collection(TABLES[:1], FEATURES[:1]).pipeline(reader, prefetch=prefetch), []

    def run():
        for batch, _ in pipeline:
            firsts.append(int(np.asarray(batch.features.keys("user"))[0, 0]))

    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            run()
        assert firsts == [0, 4, 8] and pipeline.get_state()["next_index"] == 3
    is_away = False
    run()
    assert firsts == list(range(0, 40, 4)) and pipeline.get_state()["next_index"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_that_no_worker_could_read_comes_in_the_next_loop(tmp_path, num_workers):
    """After an error of a worker Grain's iterator would be at its end."""
    for number in range(4):
        table = pa.table({"user": np.arange(8 * number, 8 * number + 8)})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    batches = Batches(ArrowSource(str(tmp_path / "*.parquet")), 4, process_index=0, process_count=1)
    reader, firsts = iterate(batches, num_workers=num_workers), []
    (tmp_path / "1.parquet").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            firsts += (int(batch["user"][0]) for batch in reader)
        assert firsts == [0, 4]
    (tmp_path / "away").rename(tmp_path / "1.parquet")
    assert [0, 4] + [int(batch["user"][0]) for batch in reader] == list(range(0, 32, 4))
