"""`steps_per_call`: calls that scan over stacked batches give the bits of a loop over batches."""

import functools

import jax
import numpy as np
import programs
import pytest
from compiled_cases import addresses, table_copies
from jax import lax
from jax.sharding import AxisType
from test_joined_steps import BAGS, bags_of_three, rectangular
from test_pipeline import GRADIENTS, NUM_SHARDS, collection, even, make_skewed

import jaxsok


def step_of(declared, state, batch, plan):
    """Does a step whose gradients depend on an entry of the batch."""
    embeddings, state, plan = declared.lookup(state, plan)
    state, stats = declared.update(state, plan, jax.tree.map(lambda rows: batch["scale"] * rows, GRADIENTS))
    return state, (embeddings, stats)


def with_scales(raws):
    """Gives each batch a number of its own."""
    return [raw | {"scale": np.float32(1 + number / 8)} for number, raw in enumerate(raws)]


def train(declared, raws, steps_per_call, *, is_joined=False, grows=False, **options):
    """Trains on all batches; returns the state, the results of each step, the pipeline, and the steps of each call."""
    state, results, lengths = declared.init(seed=3), [], []
    pipeline = declared.pipeline(with_scales(raws), steps_per_call=steps_per_call, **options)

    def call(state, batch, plan):
        if steps_per_call == 1:
            return step_of(declared, state, batch, plan)
        return lax.scan(lambda state, pair: step_of(declared, state, *pair), state, (batch, plan))

    call = (pipeline.jit if is_joined else jax.jit)(call, donate_argnums=0, compiler_options=programs.quickly())
    for batch, plan in pipeline:
        state = declared.grow(state, batch) if grows else state
        state, (embeddings, stats) = call(state, batch, plan)
        stats.check()
        embeddings = jax.tree.map(np.asarray, embeddings)
        lengths.append(1 if steps_per_call == 1 else len(batch["scale"]))
        for step in range(lengths[-1]):
            results.append(embeddings if steps_per_call == 1 else jax.tree.map(lambda rows: rows[step], embeddings))  # noqa: B023
    return state, results, pipeline, lengths


def assert_same(declared, raws, steps_per_call, **options):
    """Compares calls of several steps with a loop over batches; returns the pipeline and the steps of each call."""
    state, results, pipeline, lengths = train(declared, raws, steps_per_call, **options)
    wanted, of_steps, _, _ = train(declared, raws, 1, grows=options.get("grows", False))
    jax.tree.map(np.testing.assert_array_equal, results, of_steps)
    programs.assert_same_state(state, wanted, index=False)
    return pipeline, lengths


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("num_shards", [None, 1, NUM_SHARDS])
@pytest.mark.parametrize("options", [{}, {"prefetch": 0, "is_joined": True}], ids=["apart", "joined"])
def test_no_bit_changes(num_shards, options, axis_type):
    """The last call has fewer steps."""
    if num_shards is None:
        if axis_type == AxisType.Explicit:
            pytest.skip("one device has no axis")
        declared = jaxsok.Collection(*DECLARED)
    else:
        declared = programs.over(num_shards, *DECLARED, axis_type=axis_type)
    _, lengths = assert_same(declared, [bags_of_three(step) for step in range(8)], 3, **options)
    assert lengths == [3, 3, 2]


DECLARED = [list(rectangular().tables), list(rectangular().features)]


def test_a_batch_too_skewed_for_one_round():
    """All batches of its call go in rounds."""
    raws = [even(0), even(1), make_skewed(2), *map(even, range(3, 8))]
    pipeline, lengths = assert_same(collection(), raws, 3)
    assert lengths == [3, 3, 2]
    assert pipeline.num_replanned == 1


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_batches_of_other_forms_come_in_other_calls(num_shards):
    """No batch is lost, and none comes twice."""
    declared, raws = collection(num_shards), []
    for number, size in enumerate([64, 64, 128, 64, 64, 64, 64, 128, 128]):
        raws.append({name: np.arange(size) + 1000 * number for name in ("user", "ad")} | {"number": number})
    lengths, numbers = [], []
    for batch, plan in declared.pipeline(raws, steps_per_call=3):
        lengths.append(len(batch["number"]))
        numbers += batch["number"].tolist()
        keys = np.asarray(batch.features.stores[0].keys)[:, 0, 0]
        np.testing.assert_array_equal(keys, 1000 * np.asarray(batch["number"]))
        assert plan.features is batch.features
    assert lengths == [2, 1, 3, 1, 2]
    assert numbers == list(range(9))


def test_the_largest_load_of_a_call_decides():
    """Batches of a call have one send capacity, which has room for each of them."""
    raws = [bags_of_three(step) for step in range(6)]
    skewed = programs.keys_of_owner(2, len(raws[0]["user"]) // 2, "user", NUM_SHARDS)
    raws[4]["user"] = np.concatenate([skewed, raws[4]["user"][len(skewed) :].astype(skewed.dtype)])
    pipeline, lengths = assert_same(rectangular(), raws, 3)
    assert lengths == [3, 3]
    assert pipeline.num_replanned == 1


def test_growth_makes_room_for_a_call():
    """Tables that begin small refuse no key."""
    tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.adagrad(0.1), capacity=8)]
    declared = programs.over(NUM_SHARDS, tables, [jaxsok.FeatureSpec("user", "item"), jaxsok.FeatureSpec("ad", "item")])
    raws = [{"user": np.arange(128) + 128 * step, "ad": np.arange(128)} for step in range(5)]
    gradients = {name: np.ones((128, 4), np.float32) for name in ("user", "ad")}
    pipeline, state = declared.pipeline(raws, steps_per_call=2), declared.init(seed=0)

    @functools.partial(pipeline.jit, donate_argnums=0)
    def call(state, plans):
        def step(state, plan):
            _, state, plan = declared.lookup(state, plan)
            return declared.update(state, plan, gradients)

        return lax.scan(step, state, plans)

    for batch, plan in pipeline:
        state, stats = call(declared.grow(state, batch), plan)
        stats.check()
    assert declared.num_rows(state) == {"item": 128 * 5}


class Numbered:
    """An iterator with a state, which may fail."""

    def __init__(self, raws, fails_at=None):
        self.raws, self.fails_at, self.number = raws, fails_at, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.fails_at:
            raise RuntimeError("no further batch can be read")
        if self.number == len(self.raws):
            raise StopIteration
        self.number += 1
        return self.raws[self.number - 1]

    def get_state(self):
        return self.number


def test_the_state_of_the_reader_is_that_after_a_call():
    """Resuming reads no batch twice, also where a batch waits for the next call because of its form."""
    raws = [{name: np.arange(size) for name in ("user", "ad")} for size in (64, 64, 128, 64)]
    pipeline = collection().pipeline(Numbered(raws), steps_per_call=3)
    assert [pipeline.get_state() for _ in pipeline] == [2, 3, 4]


def test_an_error_comes_after_the_batches_before_it():
    """They come as a shorter call."""
    pipeline, lengths = rectangular().pipeline(Numbered([bags_of_three(0)] * 9, fails_at=4), steps_per_call=3), []
    with pytest.raises(RuntimeError, match="no further batch"):
        for batch, _ in pipeline:
            lengths.append(batch.features.stores[0].keys.shape[0])
    assert lengths == [3, 1]


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_a_call_copies_no_table_and_stays_within_the_estimate(num_shards):
    """All arrays of the stores keep their buffers (law 9), and XLA's memory is within `memory_estimate`."""
    specs, features = [jaxsok.TableSpec("user", 16, jaxsok.optim.adam(0.05), capacity=1 << 14)], BAGS[:1]
    declared = programs.over(num_shards, specs, features) if num_shards else jaxsok.Collection(specs, features)
    gradients = {"user": np.ones((256, 16), np.float32)}
    calls = list(declared.pipeline(({"user": np.arange(256) + step} for step in range(12)), steps_per_call=4))

    def step(state, plan):
        _, state, plan = declared.lookup(state, plan)
        return declared.update(state, plan, gradients)

    call = jax.jit(
        lambda state, plans: lax.scan(step, state, plans), donate_argnums=0, compiler_options=programs.in_place()
    )
    state = declared.init(seed=0)
    compiled = call.lower(state, calls[0][1]).compile()
    num_shards = num_shards or 1
    assert not table_copies(compiled.as_text(), (1 << 14) * 16 * 4 // num_shards)
    before = addresses(state)
    for _, plan in calls:
        state, stats = compiled(state, plan)
        stats.check()
    assert addresses(state) == before
    batch = calls[0][0]
    estimate = declared.memory_estimate(state, batch, steps_per_call=4)
    calls = calls if num_shards > 1 else calls[:2]  # that the pipeline holds at a time
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(calls)) // num_shards
    assert held + compiled.memory_analysis().temp_size_in_bytes <= estimate.step_bytes
    assert declared.memory_estimate(state, batch).step_bytes < estimate.step_bytes


@pytest.mark.parametrize("options", [{"lookahead": 1}, {"staleness": 2}])
def test_lookups_ahead_are_refused(options):
    with pytest.raises(ValueError, match=r"pipeline: steps_per_call: got 2 with lookups ahead, wanted 1"):
        rectangular().pipeline([], steps_per_call=2, **options)


def test_entries_that_are_no_arrays_are_refused():
    raws = [bags_of_three(step) | {"name": "a"} for step in range(4)]
    with pytest.raises(TypeError, match=r'pipeline: steps_per_call: entry "name" of a batch: got str, wanted arrays'):
        next(iter(rectangular().pipeline(raws, steps_per_call=2)))
