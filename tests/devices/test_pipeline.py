"""The pipeline: the same results as without it, sufficient capacities, plans some batches ahead."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import threading
import time
import weakref
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jaxsok
from jaxsok import pipeline as pipeline_lib
from jaxsok.pipeline import PACKED_AHEAD, PLANS_AHEAD

NUM_SHARDS, NUM_SAMPLES = 4, 128
TABLES = [
    jaxsok.TableSpec("user", 4, jaxsok.optim.adagrad(0.1), capacity=2048),
    jaxsok.TableSpec("ad", 3, jaxsok.optim.sgd(0.1), capacity=256, placement=jaxsok.REPLICATED),
    jaxsok.TableSpec("unused", 2, jaxsok.optim.sgd(0.1), capacity=8),
]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("ad", "ad", combiner="mean", max_keys=4 * NUM_SAMPLES),
]
GRADIENTS = {"user": np.ones((NUM_SAMPLES, 4), np.float32), "ad": np.ones((NUM_SAMPLES, 3), np.float32)}


@functools.cache
def collection(num_shards=NUM_SHARDS):
    """Returns a sharded store, a replicated one, and one that no feature reads; with None, on one device."""
    return jaxsok.Collection(TABLES, FEATURES) if num_shards is None else programs.over(num_shards, TABLES, FEATURES)


def even(step):
    """Makes evenly spread keys."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4, NUM_SAMPLES)
    return {
        "user": rng.integers(0, 2**40, NUM_SAMPLES),
        "ad": jaxsok.Bags(rng.integers(0, 60, lengths.sum()), lengths=lengths),
    }


def make_skewed(step):
    """Makes the same batch, but all keys of the sharded table belong to one shard."""
    return {**even(step), "user": programs.keys_of_owner(2, NUM_SAMPLES, "user", NUM_SHARDS, start=1000 * step)}


def single_step(declared, state, asked):
    """Runs one step on features from outside."""
    return programs.fed_step(declared)(state, asked, GRADIENTS)


@pytest.mark.parametrize("num_shards", [None, 1, NUM_SHARDS])
def test_results_are_those_of_lookups_without_plans(num_shards):
    """Embeddings, statistics and tables agree, with skew and without; only the rounds may differ."""
    declared = collection(num_shards)
    raws = [even(0), make_skewed(1), even(2), even(0)]
    states = [declared.init(seed=3), declared.init(seed=3)]
    for raw, (_, plan) in zip(raws, declared.pipeline(raws), strict=True):
        states[0], got, stats = single_step(declared, states[0], plan)
        states[1], want, want_stats = single_step(declared, states[1], declared.batch(raw).features)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)
        assert stats.to_dict() == want_stats.to_dict()
        assert np.asarray(stats.num_rounds).tolist() == ([1, 1, 0] if num_shards == NUM_SHARDS else [0, 0, 0])
    programs.assert_close_tables((declared, declared), states, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_shards", [None, 1])
def test_on_one_shard_plans_are_left_to_the_lookup(num_shards):
    """The fused lookup is faster there than a separate plan."""
    pipeline = collection(num_shards).pipeline([even(0), even(1)])
    plans = [plan for _, plan in pipeline]
    assert len(plans) == 2
    assert all(plan.asked is None and not plan.is_looked_up for plan in plans)
    assert pipeline.num_replanned == 0 and pipeline.send_capacities == [[], [], []]


def loads_of(plan):
    """Returns, for each store that is read, the most requests from one shard to one owner."""
    return [int(np.asarray(asked.load)[0, 0]) for asked in plan.asked if asked is not None]


def test_capacities_suffice_and_are_few():
    """Each plan has room for its most loaded pair; batches of one kind share a capacity, and so a program."""
    pipeline = collection().pipeline(even(step) for step in range(8))
    for _, plan in pipeline:
        sizes = [asked.send_capacity for asked in plan.asked if asked is not None]
        assert all(size >= load for size, load in zip(sizes, loads_of(plan), strict=True))
        assert all(size in in_use for size, in_use in zip(sizes, pipeline.send_capacities, strict=False))
    assert all(len(sizes) <= 2 for sizes in pipeline.send_capacities[:2])
    assert pipeline.send_capacities[2] == []
    # A shard has 32 keys and an owner's even share is 8, so no owner receives nearly all of them.
    assert max(pipeline.send_capacities[0]) <= 24


def test_a_batch_more_skewed_than_the_one_before_is_planned_again():
    """The new plan is counted and has room; a return to even batches needs no new plan."""
    raws = [even(0), make_skewed(1), even(2), even(3), even(4)]
    pipeline = collection().pipeline(raws)
    seen = []
    for _, plan in pipeline:
        assert plan.asked[0].send_capacity >= loads_of(plan)[0]
        seen.append(pipeline.num_replanned)
    assert seen == [0, 1, 1, 1, 1]
    assert len(pipeline.send_capacities[0]) == 2


@pytest.mark.parametrize("prefetch", [0, PACKED_AHEAD])
@pytest.mark.parametrize(("num_shards", "num_plans"), [(NUM_SHARDS, PLANS_AHEAD), (1, 0), (None, 0)])
def test_the_next_batches_are_under_way_before_the_step(num_shards, num_plans, prefetch):
    """When batch k is handed out, its followers have been drawn; by a thread, or without one no fewer."""
    num_ahead = num_plans + PACKED_AHEAD
    drawn = []

    def raws():
        for step in range(5):
            drawn.append(step)
            yield even(step)

    pipeline = collection(num_shards).pipeline(raws(), prefetch=prefetch)
    assert drawn == []
    for step, _ in enumerate(pipeline):
        assert min(step + num_ahead, 5) <= len(drawn) <= min(step + 1 + num_ahead, 5)


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_without_a_thread_batches_are_packed_while_steps_are_dispatched(num_shards, monkeypatch):
    """The batch behind the next one is packed during the step; it begins before the next one is sent, not after."""
    declared, events = collection(num_shards), []
    packer = declared.packer

    def note(name, method):
        def call(*args):
            events.append(name)
            return method(*args)

        monkeypatch.setattr(packer, name, call)

    for name in ("begin", "complete", "send"):
        note(name, getattr(packer, name))

    def raws():
        for step in range(8):
            events.append("read")
            yield even(step)

    seen = []
    for _ in declared.pipeline(raws(), prefetch=0):
        seen.append(events.copy())
        events.clear()
        events.append("step")
    num_ahead = PACKED_AHEAD + (PLANS_AHEAD if num_shards else 0)
    assert seen[1 : 8 - num_ahead] == [["step", "complete", "read", "begin", "send"]] * (7 - num_ahead)
    assert seen[8 - num_ahead :] == [["step", "complete", "send"]] + [["step"]] * (num_ahead - 1)


@pytest.mark.parametrize("prefetch", [0, PACKED_AHEAD])
@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_a_reader_may_use_its_arrays_again(num_shards, prefetch):
    """A raw batch is fully read before the next one is requested, although other threads pack."""
    keys, label = np.empty(40_000, np.int64), np.empty(40_000, np.float32)

    def raws():
        for i in range(12):
            keys[:] = label[:] = i
            yield {"user": keys, "label": label}

    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
    features = [jaxsok.FeatureSpec("user", "user")]
    declared = (
        jaxsok.Collection([table], features) if num_shards is None else programs.over(num_shards, [table], features)
    )
    read = [
        (set(np.asarray(b.features.keys("user"))[:, 0]), set(np.asarray(b["label"])))
        for b, _ in declared.pipeline(raws(), prefetch=prefetch)
    ]
    assert read == [({i}, {i}) for i in range(12)]


@pytest.mark.parametrize("other", ["big-endian", "inverse", "of a device"])
@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_a_reader_may_use_the_arrays_again_that_numpy_packs(num_shards, other):
    """A feature that the threads do not pack leaves the whole batch to NumPy, and devices may read its arrays late."""
    items = np.arange(64)
    given = {
        "big-endian": items.astype(">i8"),
        "inverse": jaxsok.Bags(items, lengths=np.ones(64, np.int64), inverse=items),
        "of a device": jax.numpy.asarray(jaxsok.keys.to_words(items)),
    }[other]
    aligned = np.empty(64 + 8, np.int64)
    aligned = aligned[(-aligned.ctypes.data % 64) // 8 :][:64]  # JAX keeps such memory without a copy
    weights = np.empty(64, np.float32)

    def raws():
        for i in range(8):
            aligned[:] = weights[:] = i
            yield {"user": jaxsok.Bags(aligned, weights=weights), "item": given}

    tables = [jaxsok.TableSpec(name, dim, jaxsok.optim.sgd(0.1)) for name, dim in (("user", 4), ("item", 8))]
    features = [jaxsok.FeatureSpec("user", "user", combiner="sum", weighted=True), jaxsok.FeatureSpec("item", "item")]
    declared = (
        jaxsok.Collection(tables, features) if num_shards is None else programs.over(num_shards, tables, features)
    )
    batches = [declared.batch(raw) for raw in raws()]
    assert [set(np.asarray(b.features.keys("user"))[:, 0]) for b in batches] == [{i} for i in range(8)]
    weights_of = [store.weights for batch in batches for store in batch.features.stores if store.weights is not None]
    assert [set(np.asarray(found)) for found in weights_of] == [{i} for i in range(8)]


class Pair(NamedTuple):
    """A container of a user's own."""

    first: object
    second: object


def test_a_reader_may_use_nested_arrays_again():
    """Entries that are no features are kept as they come, with copies of their arrays."""
    label, context, other = np.empty(4, np.float32), np.empty(4), np.empty(4, np.int64)

    def raws():
        for i in range(6):
            label[:] = context[:] = other[:] = i
            yield {
                "user": np.arange(4),
                "y": (label, [context]),
                "x": Pair(context, OrderedDict(b=context)),
                "z": jaxsok.Bags(other),
            }

    table, feature = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1)), jaxsok.FeatureSpec("user", "user")
    for i, (batch, _) in enumerate(jaxsok.Collection([table], [feature]).pipeline(raws(), prefetch=2)):
        (given_label, (given_context,)), pair, bags = batch["y"], batch["x"], batch["z"]
        assert (type(pair), type(pair.second)) == (Pair, OrderedDict)
        for array in (given_label, given_context, pair.first, pair.second["b"], bags.keys):
            assert set(np.asarray(array)) == {i}


@pytest.mark.parametrize("prefetch", [0, PACKED_AHEAD])
@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_nothing_reads_the_iterator_after_a_break(num_shards, prefetch):
    """The caller has the reader back, which continues where the pipeline stopped reading."""
    running, steps = [], iter(range(100))

    def raws():
        for step in steps:
            running.append(step)
            time.sleep(0.01)
            running.remove(step)
            yield even(step)

    reader = raws()
    for _ in collection(num_shards).pipeline(reader, prefetch=prefetch):
        break
    assert not running
    time.sleep(0.05)
    assert next(reader) is not None and not running


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_reader_comes_in_its_turn(prefetch):
    """The batches before it are handed out first; then it is raised, and the thread has ended."""

    def raws():
        yield even(0)
        yield even(1)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch, _ in collection(NUM_SHARDS).pipeline(raws(), prefetch=prefetch):
            seen.append(batch)
    assert len(seen) == 2


def test_the_settings_of_the_caller_hold_where_batches_are_packed():
    """The packing thread has the caller's settings: labels have 64 bits if x64 is on."""
    raws = [{**even(step), "label": np.full(NUM_SAMPLES, step, np.float64)} for step in range(3)]
    with jax.enable_x64(True):
        dtypes = [batch["label"].dtype for batch, _ in collection(1).pipeline(raws)]
    assert dtypes == [np.float64] * 3
    assert [batch["label"].dtype for batch, _ in collection(1).pipeline(raws)] == [np.float32] * 3


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_a_second_loop_goes_on_where_the_first_broke_off(num_shards, prefetch):
    class Reader(list):
        def __iter__(self):
            return self

        def __next__(self):
            if not self:
                raise StopIteration
            return self.pop(0)

        def get_state(self):
            return len(self)

    raws = Reader({**even(0), "number": np.full(NUM_SAMPLES, i)} for i in range(7))
    pipeline = collection(num_shards).pipeline(raws, prefetch=prefetch)
    seen = []
    for most in (2, 1, 7):
        for batch, _ in itertools.islice(pipeline, most):
            seen.append((int(np.asarray(batch["number"])[0]), pipeline.get_state()))
    assert seen == [(i, 6 - i) for i in range(7)]


def test_an_empty_log():
    """An empty log gives no batch, no plan and no error."""
    assert list(collection().pipeline([])) == list(collection(None).pipeline([])) == []


def test_ctrl_c_while_the_caller_reads_is_raised_at_once():
    """Without a thread that reads, it comes from the reader; no batch is handed out first."""

    def raws():
        yield even(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(collection(NUM_SHARDS).pipeline(raws(), prefetch=0)))


@pytest.mark.parametrize("stage", ["begin", "complete", "send"])
def test_ctrl_c_while_a_batch_is_packed_leaves_none_out(stage, monkeypatch):
    """It is raised at once; a second loop packs the batch again."""
    declared, calls = jaxsok.Collection(TABLES, FEATURES), itertools.count()
    run = getattr(declared.packer, stage)

    def interrupted(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(declared.packer, stage, interrupted)
    pipeline, seen = declared.pipeline(Log(6), prefetch=0), []
    with pytest.raises(KeyboardInterrupt):
        seen += (number_of(batch) for batch, _ in pipeline)
    assert len(seen) < 3
    seen += (number_of(batch) for batch, _ in pipeline)
    assert seen == list(range(6))


def test_a_short_last_batch_is_padded():
    """`pad_to` reaches every batch, and each mask marks the real samples."""
    short = {"user": np.arange(5), "ad": jaxsok.Bags(np.arange(3), lengths=np.array([0, 1, 0, 2, 0]))}
    for declared in (collection(), collection(None)):
        batches = list(declared.pipeline([even(0), short], pad_to=NUM_SAMPLES))
        assert [int(batch.mask.sum()) for batch, _ in batches] == [NUM_SAMPLES, 5]
        _, state, plan = programs.lookup(declared)(declared.init(seed=0), batches[1][1])
        assert declared.num_rows(state) == {"user": 5, "ad": 3, "unused": 0}


def test_the_labels_come_with_their_batch():
    """All other entries of a raw batch are in its packed batch."""
    raws = [{**even(step), "label": np.full(NUM_SAMPLES, step, np.float32)} for step in range(3)]
    assert [float(batch["label"][0]) for batch, _ in collection().pipeline(raws)] == [0.0, 1.0, 2.0]


def test_growth_reserves_what_a_plan_has_counted():
    """If skewed keys fill one shard, growth learns their number from the plan, and nothing is refused."""
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
    declared = programs.over(NUM_SHARDS, [table], [jaxsok.FeatureSpec("user", "user")])
    keys = programs.keys_of_owner(3, 2 * NUM_SAMPLES, "user", NUM_SHARDS)
    # Every shard asks the same owner for different keys, far more than an even share of the batch.
    raws = [{"user": part} for part in np.split(keys, 2)]
    state = declared.init(seed=0)
    for _, plan in declared.pipeline(raws):
        assert declared.growth.keys_per_step[0] >= NUM_SAMPLES
        state = declared.grow(state)
        _, state, plan = programs.lookup(declared)(state, plan)
        state, stats = programs.update(declared)(state, plan, {"user": jnp.ones((NUM_SAMPLES, 4))})
        stats.check()
        assert programs.counts(stats) == {**dict.fromkeys(oracle.COUNTS, 0), "num_inserted": NUM_SAMPLES}
    assert declared.num_rows(state) == {"user": 2 * NUM_SAMPLES}


def test_capacities_in_use_are_kept_by_several_pipelines_apart():
    """Each pipeline chooses its own capacities, so an epoch of another kind does not inherit the last one's."""
    first, second = collection().pipeline([make_skewed(0)]), collection().pipeline([even(0)])
    for pipeline in (first, second):
        assert len(list(pipeline)) == 1
    assert max(second.send_capacities[0]) < min(first.send_capacities[0])


def test_a_step_compiles_once_for_each_combination_of_capacities():
    """The host chooses the capacities; for one choice, new contents compile nothing."""
    declared = collection()
    step = jax.jit(declared.lookup, donate_argnums=0, compiler_options=programs.quickly())
    state, combinations = declared.init(seed=0), set()
    for _, plan in declared.pipeline([even(0), even(1), make_skewed(2), even(3)]):
        combinations.add(tuple(asked and asked.send_capacity for asked in plan.asked))
        _, state, _ = step(state, plan)
    assert step._cache_size() == len(combinations)


def test_the_program_that_plans_a_batch_again_plans_later_ones(monkeypatch):
    """Also where a store has no features, whose capacity means nothing, but is an option of the program."""
    declared, asked = collection(), []
    plan = type(declared).plan_with_loads

    def recording(self, features, send_capacity):
        asked.append(tuple(send_capacity))
        return plan(self, features, send_capacity)

    monkeypatch.setattr(type(declared), "plan_with_loads", recording)
    assert len(list(declared.pipeline([even(0)] * 4))) == 4
    first, again, *later = asked
    assert first != again and set(later) == {again}


@pytest.mark.parametrize("prefetch", [0, PACKED_AHEAD])
@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_what_threads_refuse_is_raised_in_its_turn(num_shards, prefetch):
    """Keys that only their reading shows to be bad: NumPy's message, after the batches before; then reading stopped."""
    keys, ones = np.arange(NUM_SAMPLES), np.ones(NUM_SAMPLES, int)
    good = {"user": keys, "ad": jaxsok.Bags(keys, lengths=ones)}
    bad = {"user": keys, "ad": jaxsok.Bags(keys, lengths=np.where(keys < 5, ones, 0))}
    raws, seen = iter([good, good, good, bad, good, good]), []
    with pytest.raises(ValueError, match=f'"ad": lengths: got an end at 5 of {NUM_SAMPLES} keys'):
        for batch, _ in collection(num_shards).pipeline(raws, prefetch=prefetch):
            seen.append(batch)
    assert len(seen) == 3 and len(list(raws)) == 2


def test_batches_before_a_bad_one_are_handed_out():
    """The pipeline reads ahead, but raises an error only at the batch that has it."""
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
    collection = programs.over(4, [table], [jaxsok.FeatureSpec("user", "user")])
    raws = [{"user": np.arange(8)}] * 3 + [{"user": np.arange(7)}]
    seen = 0
    with pytest.raises(ValueError, match="wanted a multiple of 4"):
        for _ in collection.pipeline(raws):
            seen += 1
    assert seen == 3


def test_one_owner_of_everything_goes_in_rounds():
    """A single round would take the memory of all batches, so the plan takes rounds as large as two batches."""
    num_shards, num_keys = 8, 4096
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64, placement=jaxsok.on(0))
    collection = programs.over(num_shards, [table], [jaxsok.FeatureSpec("user", "user")])
    (_, plan), *_ = collection.pipeline([{"user": np.arange(num_shards * num_keys)}])
    (asked,) = plan.asked
    assert asked.listed is not None
    assert num_shards * asked.send_capacity <= max(2 * num_keys, num_shards * 1024)


# --------------------------------------------------------------------------------------------------------------
# Ctrl-C


class Log:
    """A log of batches that reports how many were read."""

    def __init__(self, num_batches):
        self.num_batches, self.num_read = num_batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_read == self.num_batches:
            raise StopIteration
        self.num_read += 1
        return {**even(self.num_read - 1), "number": np.full(NUM_SAMPLES, self.num_read - 1)}

    def get_state(self):
        return self.num_read


def number_of(batch):
    return int(batch["number"][0])


class SlowLog(Log):
    """The same, read slowly."""

    def __next__(self):
        time.sleep(0.05)
        return super().__next__()


def pressing(number, counts):
    """Returns a profiler that presses Ctrl-C where the pipeline calls something; `counts[0]` counts these places.

    Python looks for signals when a function begins, when one has returned, and nowhere else without a loop.
    """

    def profile(frame, event, _):
        caller = frame.f_back if event == "call" and frame.f_back is not None else frame
        # What a finalizer raises is not heard.
        is_left_out = (
            event == "return" and frame.f_code.co_name == "__iter__"
        ) or frame.f_code.co_filename == weakref.__file__
        if pipeline_lib.__file__ not in (frame.f_code.co_filename, caller.f_code.co_filename) or is_left_out:
            return
        counts[0] += 1
        if counts[0] == number:
            raise KeyboardInterrupt

    return profile


@pytest.mark.parametrize(
    ("num_shards", "memory", "options", "num_ahead"),
    [
        (None, None, {"lookahead": 1}, 0),
        (None, None, {"lookahead": 1, "micro_batches": 2}, 0),
        (None, None, {"staleness": 1}, 1),
        (None, jaxsok.HostMemory(device_rows=0.5), {"lookahead": 1}, 1),
        (1, None, {"lookahead": 1}, 1),
    ],
)
def test_nothing_is_looked_up_ahead_that_no_model_can_hide(num_shards, memory, options, num_ahead):
    """One device runs a lookup in its own memory and the model one after the other; staleness changes results."""
    tables = [TABLES[0], dataclasses.replace(TABLES[2], memory=memory)]
    declared = (
        programs.over(num_shards, tables, FEATURES[:1]) if num_shards else jaxsok.Collection(tables, FEATURES[:1])
    )
    raws = [{"user": np.arange(NUM_SAMPLES)} for _ in range(3)]
    assert [len(plan.following) for _, plan in declared.pipeline(raws, **options)] == [num_ahead, num_ahead, 0]


WAYS = {
    "one device": (None, {}),
    "one device, without a thread": (None, {"prefetch": 0}),
    "one device, lookups ahead": (None, {"prefetch": 0, "lookahead": 1}),
    "one device, several steps a call": (None, {"steps_per_call": 2, "lookahead": 1}),
    "a mesh": (NUM_SHARDS, {}),
    "a mesh, lookups ahead": (NUM_SHARDS, {"prefetch": 0, "lookahead": 1}),
    "a mesh, several steps a call": (NUM_SHARDS, {"steps_per_call": 2, "prefetch": 0}),
}


@pytest.mark.usefixtures("looks_ahead")
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_at_any_call_loses_no_batch(way):
    """A second loop goes on with the batch that would have come."""
    num_shards, options = WAYS[way]
    declared, num_batches = collection(num_shards), 4

    def run(number):
        log, seen, counts, presses = Log(num_batches), [], [0], 0
        pipeline = declared.pipeline(log, **options)
        for _ in range(4):
            before = sys.getprofile()
            sys.setprofile(pressing(number, counts))
            try:
                for batch, _ in pipeline:
                    numbers = np.asarray(batch["number"]).reshape(-1, NUM_SAMPLES)[:, 0].tolist()
                    seen += numbers
                    assert pipeline.get_state() == seen[-1] + 1
                break
            except KeyboardInterrupt:
                presses += 1
            finally:
                sys.setprofile(before)
        return seen, presses, counts[0]

    seen, presses, num_places = run(0)
    assert (seen, presses) == (list(range(num_batches)), 0)
    num_pressed = 0
    for number in range(1, num_places, 4):  # batches make the same calls, of which each begins elsewhere
        seen, presses, _ = run(number)
        num_pressed += presses  # a run has fewer places if no batch was planned again
        assert seen == list(range(num_batches)) and presses <= 1
    assert num_pressed > num_places // 8


def test_ctrl_c_while_the_reader_is_told_to_read():
    """The batch comes although its reading was never begun, and no two threads read at the same time."""
    pipeline = collection(None).pipeline(Log(6))
    executor, calls = pipeline._reader._executor, itertools.count()
    submit = executor.submit

    def pressed(*args):
        if (number := next(calls)) == 2:
            raise KeyboardInterrupt
        future = submit(*args)
        if number == 4:
            raise KeyboardInterrupt
        return future

    executor.submit, seen = pressed, []
    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            for batch, _ in pipeline:
                seen.append(number_of(batch))
    assert seen == list(range(6))


def test_an_older_iterator_that_goes_ends_no_newer_loop():
    """One peeks at the first batch, forgets the iterator, and loops."""
    pipeline = collection(None).pipeline(Log(8))
    peek = iter(pipeline)
    seen = [number_of(next(peek)[0])]
    for batch, _ in pipeline:
        seen.append(number_of(batch))
        if len(seen) == 3:
            del peek
    assert seen == list(range(8))


def press_twice(pipeline, monkeypatch, seen):
    """Loops until Ctrl-C comes in the loop, and again where its end waits."""
    kind = type(pipeline._reader)
    wait, calls = kind._wait_for, itertools.count()

    def pressed(self, packed):
        if next(calls) in (3, 4):
            raise KeyboardInterrupt
        return wait(self, packed)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "_wait_for", pressed)
        with pytest.raises(KeyboardInterrupt):
            seen += (number_of(batch) for batch, _ in pipeline)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ctrl_c_twice_ends_no_later_loop_early(prefetch, monkeypatch):
    """A later loop reads on: slots that the interrupted loop left empty are not the end of the log."""
    pipeline, seen = collection(None).pipeline(SlowLog(9), prefetch=prefetch), []
    press_twice(pipeline, monkeypatch, seen)
    time.sleep(0.2)  # the reader finds that the loop is over
    assert len(seen) < 5
    seen += (number_of(batch) for batch, _ in pipeline)
    assert seen == list(range(9))


def test_a_newer_loop_that_ends_ends_no_older_one():
    """Within a loop one peeks at the next batch; the loop goes on behind it."""
    pipeline, seen = collection(None).pipeline(Log(12)), []
    for batch, _ in pipeline:
        seen.append(number_of(batch))
        if len(seen) == 3:
            seen.append(number_of(next(iter(pipeline))[0]))
    assert seen == list(range(12))


def test_a_pipeline_that_is_forgotten_leaves_no_batch():
    """Nothing refers to itself, so batches go without a garbage collection."""
    pipeline = collection(None).pipeline(Log(9), prefetch=0)
    for _, _ in zip(pipeline, range(2), strict=False):
        pass
    gone = weakref.ref(pipeline), weakref.ref(pipeline._reader)
    gc.disable()
    try:
        del pipeline
        assert [there() for there in gone] == [None, None]
    finally:
        gc.enable()


def test_an_end_within_a_submission_waits_for_nothing():
    """A loop may be collected wherever Python is, also where an executor holds its lock: its end must not take it."""
    loop = iter(collection(None).pipeline(SlowLog(20)))  # the next batch is being read
    next(loop)
    ended = threading.Event()

    def end():
        with concurrent.futures.thread._global_shutdown_lock:
            loop.close()
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    assert ended.wait(10)


def test_a_loop_that_the_reader_collects_waits_for_nothing():
    """It would wait for the batch that its own thread is reading; a later loop goes on."""
    loops, seen, is_suspended = [], [], threading.Event()

    class Reader(Log):
        def __next__(self):
            if self.num_read == 4:
                is_suspended.wait(10)
                loops.clear()  # as a garbage collection does in this thread
            return super().__next__()

    pipeline = collection(None).pipeline(Reader(9))
    loops.append(iter(pipeline))
    for _ in range(3):
        seen.append(number_of(next(loops[0])[0]))
    is_suspended.set()

    def go_on():
        while loops:
            time.sleep(0.01)
        seen.extend(number_of(batch) for batch, _ in pipeline)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(20)
    assert seen == list(range(9))
