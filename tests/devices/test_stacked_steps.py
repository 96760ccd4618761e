"""`steps_per_call`: calls that scan over stacked batches give the bits of a loop over batches."""

import dataclasses
import functools
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from compiled_cases import addresses, table_copies
from jax.sharding import AxisType
from test_joined_steps import BAGS, bags_of_three, rectangular
from test_pipeline import GRADIENTS, NUM_SHARDS, TABLES, collection, even, make_skewed

import jaxsok
from jaxsok.pipeline import PLANS_AHEAD

pytestmark = pytest.mark.usefixtures("looks_ahead")

DECLARED = TABLES, BAGS  # those of `rectangular`, which needs several devices


@functools.cache
def declare(num_shards, axis_type=programs.AXIS_TYPE):
    """Returns the collection over so many devices; with None, on one device."""
    return (
        jaxsok.Collection(*DECLARED)
        if num_shards is None
        else programs.over(num_shards, *DECLARED, axis_type=axis_type)
    )


def step_of(declared, state, batch, plan):
    """Does a step whose gradients depend on an entry of the batch."""
    embeddings, state, plan = declared.lookup(state, plan)
    state, stats = declared.update(state, plan, jax.tree.map(lambda rows: batch["scale"] * rows, GRADIENTS))
    return state, (embeddings, stats)


@functools.cache
def single_step(declared):
    """Returns the jitted step of a loop over batches."""
    return jax.jit(functools.partial(step_of, declared), donate_argnums=0, compiler_options=programs.quickly())


def with_scales(raws):
    """Gives each batch a number of its own."""
    return [raw | {"scale": np.float32(1 + number / 8)} for number, raw in enumerate(raws)]


def train(declared, raws, steps_per_call, *, is_joined=False, grows=False, drains_at=(), unroll=1, **options):
    """Trains on all batches, draining before some calls.

    Returns the state, the results of each step, the pipeline, and for each call its steps and the lookups in flight
    after it.
    """
    state, results, lengths, in_flight = declared.init(seed=3), [], [], []
    pipeline = declared.pipeline(with_scales(raws), steps_per_call=steps_per_call, **options)

    def call(state, batch, plan):
        return jaxsok.scan(lambda state, pair: step_of(declared, state, *pair), state, (batch, plan), unroll=unroll)

    if steps_per_call == 1:
        call = single_step(declared)
    else:
        call = (pipeline.jit if is_joined else jax.jit)(call, donate_argnums=0, compiler_options=programs.quickly())
    for batch, plan in pipeline:
        state = declared.drain(state) if len(lengths) in drains_at else state
        state = declared.grow(state, batch) if grows else state
        state, (embeddings, stats) = call(state, batch, plan)
        stats.check()
        in_flight.append(len(state.ahead))
        embeddings = jax.tree.map(np.asarray, embeddings)
        lengths.append(1 if steps_per_call == 1 else len(batch["scale"]))
        for step in range(lengths[-1]):
            results.append(embeddings if steps_per_call == 1 else jax.tree.map(lambda rows: rows[step], embeddings))  # noqa: B023
    return state, results, pipeline, lengths, in_flight


def assert_same(declared, raws, steps_per_call, **options):
    """Compares calls of several steps with a loop over batches; returns the rest of what `train` does."""
    state, results, *others = train(declared, raws, steps_per_call, **options)
    wanted, of_steps, *_ = train(declared, raws, 1, grows=options.get("grows", False))
    jax.tree.map(np.testing.assert_array_equal, results, of_steps)
    programs.assert_same_state(state, wanted, index=False)
    return others


WAYS = {
    "apart": {},
    "joined": {"prefetch": 0, "is_joined": True},
    "ahead": {"lookahead": 1},
    "ahead, joined": {"lookahead": 1, "prefetch": 0, "is_joined": True},
}
# Every way on one device and on several. A mesh of one device plans as one device does, and the type of its axes makes
# no other call: each goes one way that plans and one that does not.
PLACES = {
    "one device": (None, AxisType.Auto, WAYS),
    "1-Auto": (1, AxisType.Auto, ["ahead"]),
    "1-Explicit": (1, AxisType.Explicit, ["joined"]),
    f"{NUM_SHARDS}-Auto": (NUM_SHARDS, AxisType.Auto, WAYS),
    f"{NUM_SHARDS}-Explicit": (NUM_SHARDS, AxisType.Explicit, ["apart", "ahead, joined"]),
}


@pytest.mark.parametrize(
    ("way", "num_shards", "axis_type"),
    [pytest.param(way, *where, id=f"{way}-{place}") for place, (*where, ways) in PLACES.items() for way in ways],
)
def test_no_bit_changes(way, num_shards, axis_type):
    """The last call has fewer steps."""
    options, declared = WAYS[way], declare(num_shards, axis_type)
    _, lengths, in_flight = assert_same(declared, [bags_of_three(step) for step in range(8)], 3, **options)
    assert lengths == [3, 3, 2]
    assert in_flight == ([1, 1, 0] if "lookahead" in options else [0, 0, 0])


@pytest.mark.parametrize(("num_shards", "lookahead"), [(None, 1), (2, 0)])
def test_rows_in_host_memory_have_the_same_bits(num_shards, lookahead):
    """With a cache smaller than a batch, as on the device."""
    results = []
    for memory, per_call in ((None, 1), (jaxsok.HostMemory(device_rows=32), 3)):
        tables = [dataclasses.replace(table, memory=memory, placement=jaxsok.SHARDED) for table in DECLARED[0]]
        declared = (
            programs.over(num_shards, tables, DECLARED[1]) if num_shards else jaxsok.Collection(tables, DECLARED[1])
        )
        options = {"lookahead": lookahead} if per_call > 1 else {}
        state, of_steps, *_ = train(declared, [bags_of_three(step) for step in range(8)], per_call, **options)
        exports = [declared.export_table(state, table.name) for table in tables]
        results.append((of_steps, [(each["keys"], each["rows"]) for each in exports]))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_batch_too_skewed_for_one_round(monkeypatch, lookahead):
    """All batches of its call go in rounds; nothing is looked up ahead for them."""
    most = jaxsok.pipeline.most_send_capacity
    monkeypatch.setattr(
        "jaxsok.pipeline.most_send_capacity", lambda spec, part: 24 if spec.dim == 4 else most(spec, part)
    )
    raws = [make_skewed(number) if number == 4 else even(number) for number in range(17)]
    pipeline, lengths, in_flight = assert_same(collection(), raws, 3, lookahead=lookahead)
    assert lengths == [3] * 5 + [2]
    assert pipeline.num_replanned == 1
    assert in_flight == [0, 0, 0, 0, lookahead, 0]  # the calls planned meanwhile have two capacities


def test_a_call_of_another_form_is_not_looked_up_ahead():
    """Stacks of plans need one send capacity and one form; the lookup in flight still lands."""
    raws = [make_skewed(number) if number == 4 else even(number) for number in range(17)]
    pipeline, _, in_flight = assert_same(collection(), raws, 3, lookahead=1)
    assert pipeline.send_capacities[0] == [16, 32]
    assert in_flight == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_a_drained_call_looks_nothing_up_ahead(num_shards):
    """The one after it does again."""
    raws = [bags_of_three(step) for step in range(10)]
    *_, in_flight = assert_same(declare(num_shards), raws, 2, lookahead=1, drains_at=(0, 2), unroll=2)
    assert in_flight == [0, 1, 0, 1, 0]


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
    pipeline, lengths, _ = assert_same(rectangular(), raws, 3)
    assert lengths == [3, 3]
    assert pipeline.num_replanned == 1


@pytest.mark.parametrize("lookahead", [0, 1])
def test_growth_makes_room_for_a_call(lookahead):
    """Tables that begin small refuse no key."""
    tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.adagrad(0.1), capacity=8)]
    declared = programs.over(NUM_SHARDS, tables, [jaxsok.FeatureSpec("user", "item"), jaxsok.FeatureSpec("ad", "item")])
    raws = [{"user": np.arange(128) + 128 * step, "ad": np.arange(128)} for step in range(5)]
    gradients = {name: np.ones((128, 4), np.float32) for name in ("user", "ad")}
    pipeline = declared.pipeline(raws, steps_per_call=2, lookahead=lookahead)
    state = declared.init(seed=0)

    @functools.partial(pipeline.jit, donate_argnums=0)
    def call(state, plans):
        def step(state, plan):
            _, state, plan = declared.lookup(state, plan)
            return declared.update(state, plan, gradients)

        return jaxsok.scan(step, state, plans)

    for batch, plan in pipeline:
        state, stats = call(declared.grow(state, batch), plan)
        stats.check()
    assert declared.num_rows(state) == {"item": 128 * 5}


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_full_table_drains_before_rows_leave(num_shards):
    """No key is refused and no gradient is lost: rows leave between calls, when no lookup is in flight."""
    eviction = jaxsok.policies.LeastRecentlyUsed()
    tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(1.0), capacity=1024, max_capacity=1024, eviction=eviction)]
    features = [jaxsok.FeatureSpec("user", "item")]
    declared = programs.over(num_shards, tables, features) if num_shards else jaxsok.Collection(tables, features)
    raws = [{"user": np.concatenate([np.arange(32), np.arange(32) + 32 * step])} for step in range(60)]
    pipeline, in_flight = declared.pipeline(raws, steps_per_call=4, lookahead=1), []
    state = declared.init(seed=0)

    @functools.partial(pipeline.jit, donate_argnums=0)
    def call(state, plans):
        def step(state, plan):
            _, state, plan = declared.lookup(state, plan)
            return declared.update(state, plan, {"user": np.ones((64, 4), np.float32)})

        return jaxsok.scan(step, state, plans)

    for batch, plans in pipeline:
        state = declared.grow(state, batch)
        state, stats = call(state, plans)
        stats.check()
        in_flight.append(len(state.ahead))
    assert stats.to_dict()["item"]["num_evicted"] > 0 and set(in_flight) == {0, 1}
    # All batches have these keys, the first one twice: the sum of their gradients is 61.
    initial, _ = declared.find(declared.init(seed=0), declared.batch({"user": np.arange(32)}).features)
    trained, _ = declared.rows_of(state, "item", np.arange(32))
    np.testing.assert_allclose(trained, np.asarray(initial["user"]) - 61, atol=1e-3)


class Numbered:
    """An iterator with a state, which may fail once."""

    def __init__(self, raws, fails_at=None):
        self.raws, self.fails_at, self.number = raws, fails_at, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.fails_at:
            self.fails_at = None
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
@pytest.mark.parametrize(("steps_per_call", "lengths"), [(1, [1] * 9), (3, [3, 1, 3, 2])])
def test_a_later_loop_goes_on_behind_an_error(num_shards, steps_per_call, lengths):
    """The error is raised once, between the batches before it and those after it."""
    raws = [{name: np.arange(128) for name in ("user", "ad")} | {"number": number} for number in range(9)]
    pipeline = collection(num_shards).pipeline(Numbered(raws, fails_at=4), steps_per_call=steps_per_call)
    numbers, found, num_failed = [], [], 0
    for _ in range(2):
        try:
            for batch, _ in pipeline:
                numbers += np.atleast_1d(batch["number"]).tolist()
                found.append(np.size(batch["number"]))
        except RuntimeError:
            num_failed += 1
            assert numbers == list(range(4))
    assert numbers == list(range(9)) and found == lengths and num_failed == 1


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_call_copies_no_table_and_stays_within_the_estimate(num_shards, lookahead):
    """All arrays of the stores keep their buffers (law 9), and XLA's memory is within `memory_estimate`."""
    specs, features = [jaxsok.TableSpec("user", 16, jaxsok.optim.adam(0.05), capacity=1 << 14)], BAGS[:1]
    declared = programs.over(num_shards, specs, features) if num_shards else jaxsok.Collection(specs, features)
    gradients = {"user": np.ones((256, 16), np.float32)}
    raws = ({"user": np.arange(256) + step} for step in range(12))
    calls = list(declared.pipeline(raws, steps_per_call=4, lookahead=lookahead))

    def step(state, plan):
        _, state, plan = declared.lookup(state, plan)
        return declared.update(state, plan, gradients)

    call = jax.jit(
        lambda state, plans: jaxsok.scan(step, state, plans), donate_argnums=0, compiler_options=programs.in_place()
    )
    state = declared.init(seed=0)
    if lookahead:  # the first call begins with none in flight, and the last looks nothing up ahead
        state, _ = call(state, calls.pop(0)[1])
        calls.pop()
    compiled = call.lower(state, calls[0][1]).compile()
    num_shards = num_shards or 1
    assert not table_copies(compiled.as_text(), (1 << 14) * 16 * 4 // num_shards)
    before = addresses(state)
    for _, plan in calls:
        state, stats = compiled(state, plan)
        stats.check()
    assert addresses(state) == before
    batch = calls[0][0]
    estimate = declared.memory_estimate(state, batch, steps_per_call=4, lookahead=lookahead)
    calls = calls if num_shards > 1 else calls[:2]  # that the pipeline holds at a time
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(calls)) // num_shards
    assert held + compiled.memory_analysis().temp_size_in_bytes <= estimate.step_bytes
    assert declared.memory_estimate(state, batch, lookahead=lookahead).step_bytes == estimate.step_bytes
    of_one = declared.memory_estimate(state, declared.batch({"user": np.arange(256)}))
    assert of_one.step_bytes < estimate.step_bytes


@pytest.mark.parametrize(
    ("options", "what"),
    [({"staleness": 2}, "staleness 2"), ({"lookahead": 1, "micro_batches": 2}, "micro_batches 2 and lookups ahead")],
)
def test_other_lookups_ahead_are_refused(options, what):
    with pytest.raises(ValueError, match=rf"pipeline: steps_per_call: got 2 with {what}, wanted 1"):
        rectangular().pipeline([], steps_per_call=2, **options)


def test_other_entries_are_stacked_where_they_are():
    """NumPy's stay there, with all their bits; others are not copied to the host."""
    raws = [
        {
            "user": np.arange(128),
            "ad": np.arange(128),
            "name": f"batch {number}",
            "time": 1_700_000_000_000 + number,
            "ids": (np.array(["a", "bc"]),),
            "nested": {"array": jnp.arange(3) + number, "none": None},
        }
        for number in range(4)
    ]
    for declared in (collection(), collection(None)):
        for number, (batch, _) in enumerate(declared.pipeline(raws, steps_per_call=2)):
            assert batch["name"].tolist() == [f"batch {2 * number}", f"batch {2 * number + 1}"]
            assert (batch["time"] - 1_700_000_000_000).tolist() == [2 * number, 2 * number + 1]
            assert batch["ids"][0].tolist() == [["a", "bc"]] * 2
            assert isinstance(batch["nested"]["array"], jax.Array) and batch["nested"]["none"] is None
            assert batch["nested"]["array"][:, 0].tolist() == [2 * number, 2 * number + 1]


def test_entries_of_one_process_are_refused_in_their_turn(monkeypatch):
    """Their form is known to one process alone: other processes would end calls elsewhere, and wait for ever."""
    raws = [bags_of_three(step) for step in range(9)]
    raws[7]["names"] = (np.array(["a", "b"]),)
    lengths, pipeline = [], rectangular().pipeline(raws, steps_per_call=2)
    monkeypatch.setattr(type(rectangular().shards), "num_processes", 2)
    message = r'pipeline: steps_per_call: entry "names" of a batch: got one of this process alone \(shape \[2\]\)'
    with pytest.raises(TypeError, match=message):
        for batch, _ in pipeline:
            lengths.append(len(batch.features.stores[0].keys))
    assert lengths == [2, 2, 2, 1]


class Pressing:
    """An iterator during which Ctrl-C is pressed."""

    def __init__(self, num_batches, pressed_at):
        self.left, self.pressed_at = list(range(num_batches)), pressed_at

    def __iter__(self):
        return self

    def __next__(self):
        if self.left and self.left[0] == self.pressed_at:
            self.pressed_at = None
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)  # the calling thread waits for this batch
        if not self.left:
            raise StopIteration
        return {name: np.arange(128) for name in ("user", "ad")} | {"number": self.left.pop(0)}


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_ctrl_c_loses_no_batch(num_shards, prefetch):
    """Batches of a call that is not complete are those of a later loop."""
    pipeline = collection(num_shards).pipeline(Pressing(12, 9), steps_per_call=4, prefetch=prefetch)
    numbers, num_pressed = [], 0
    for _ in range(2):
        try:
            for batch, _ in pipeline:
                numbers += batch["number"].tolist()
        except KeyboardInterrupt:
            num_pressed += 1
    assert num_pressed == 1 and numbers == list(range(12))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("num_shards", "num_planned"), [(None, 0), (NUM_SHARDS, PLANS_AHEAD)])
def test_a_call_is_handed_out_when_all_batches_of_the_next_one_are_sent(num_shards, num_planned, prefetch, monkeypatch):
    """A copy that began after the step was dispatched would wait for it."""
    declared, sent = collection(num_shards), []
    send = declared.packer.send

    def slow(packed):
        time.sleep(0.005)
        sent.append(packed)
        return send(packed)

    monkeypatch.setattr(declared.packer, "send", slow)
    raws = ({name: np.arange(128) for name in ("user", "ad")} for _ in range(20))
    seen = [len(sent) for _ in declared.pipeline(raws, steps_per_call=4, prefetch=prefetch)]
    assert len(seen) == 5
    assert all(num >= min(20, 4 * (call + 2 + num_planned)) for call, num in enumerate(seen))


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_batches_of_a_pipeline_stay_within_the_estimate(num_shards, lookahead):
    """Keys of all batches that are alive while calls are handed out, those that are packed ahead included."""
    declared = collection(num_shards)
    size = 136 + 8 * lookahead  # no other test's
    raws = ({name: np.arange(size) + number for name in ("user", "ad")} for number in range(64))
    pipeline, most = declared.pipeline(raws, steps_per_call=4, lookahead=lookahead), 0
    call = pipeline.jit(lambda plan: plan.features.stores[0].keys.sum())
    for batch, plan in pipeline:
        call(plan)
        time.sleep(0.02)  # while the reader packs what it may
        shape = batch.features.stores[0].keys.shape
        # No list: it would keep them alive.
        most = max(most, sum(array.nbytes for array in jax.live_arrays() if array.shape in (shape, shape[1:])))
        estimate = declared.memory_estimate(batch=batch, lookahead=lookahead)
    assert most <= sum(store.step["batch"] for store in estimate.stores) * (num_shards or 1)
