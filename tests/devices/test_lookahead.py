"""Lookups ahead: the bits of a loop without them, exactly the requested staleness, and drained states."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from compiled_cases import addresses, table_copies
from jax.sharding import AxisType

import jaxsok
from jaxsok import checkpoint, grow, policies, serving
from jaxsok.stats import PER_STEP, PER_STORE, PER_TABLE

pytestmark = pytest.mark.usefixtures("looks_ahead")

NUM_SAMPLES = 16
NUM_STEPS = 6
LRU = policies.LeastRecentlyUsed()


def row_of_key(words, columns):
    """Computes a row from the low word and the column."""
    return (words[0] % jnp.uint32(7)).astype(jnp.float32) / 8 + columns.astype(jnp.float32)


def tables(**options):
    """Declares two tables whose rows recur in later batches, and a replicated one."""
    return [
        jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=512, **options),
        jaxsok.TableSpec("item", 3, jaxsok.optim.adagrad(0.05), capacity=512, row_gradient="mean"),
        jaxsok.TableSpec("shop", 2, jaxsok.optim.sgd(0.1), capacity=512, placement=jaxsok.REPLICATED),
    ]


FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("history", "item", combiner="mean", max_keys=8 * NUM_SAMPLES, weighted=True),
    jaxsok.FeatureSpec("shops", "shop", combiner="sqrtn"),
]
BAGS = [FEATURES[0], dataclasses.replace(FEATURES[1], exchange="bags"), FEATURES[2]]
CASES = {
    "plain": (tables(), FEATURES),
    "statistics": (tables(statistics=True), FEATURES),
    "admission by count": (tables(admission=policies.AdmitByCount(3)), FEATURES),
    "admission by chance": (tables(admission=policies.AdmitByProbability(0.5)), FEATURES),
    "initial rows by XLA": (
        tables(initializer=jaxsok.initializers.function(row_of_key, "of_key")),
        FEATURES,
    ),
    "full": ([jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=16, max_capacity=16)], FEATURES[:1]),
    "partial bags": (tables(), BAGS),
}
NUM_SHARDS = (None, 1, 4)


@functools.cache
def collection_of(case, num_shards):
    """Makes a case's collection over `num_shards` devices; None means one device."""
    specs, features = CASES[case]
    return jaxsok.Collection(specs, features) if num_shards is None else programs.over(num_shards, specs, features)


def raw_batches(features, num_steps=NUM_STEPS, num_keys=30):
    """Makes batches that repeat many keys of the batch before."""
    rng = np.random.default_rng(7)
    batches = []
    for step in range(num_steps):
        pool = np.arange(num_keys, dtype=np.int64) + 5 * step
        raw = {}
        for spec in features:
            if spec.combiner is None:
                raw[spec.name] = rng.choice(pool, NUM_SAMPLES)
                continue
            lengths = rng.integers(0, 4, NUM_SAMPLES) if spec.max_keys else np.full(NUM_SAMPLES, 2)
            weights = rng.uniform(0.5, 2.0, lengths.sum()).astype(np.float32) if spec.weighted else None
            raw[spec.name] = jaxsok.Bags(rng.choice(pool, lengths.sum()), lengths=lengths, weights=weights)
        batches.append(raw)
    return batches


@programs.for_equals
def step_of(collection):
    """Jits a step whose gradients depend on the embeddings, so that a row read too early changes all later steps."""

    def step(state, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        gradients = jax.tree.map(lambda rows: rows + jnp.asarray(0.1, rows.dtype), embeddings)
        state, stats = collection.update(state, plan, gradients)
        return state, embeddings, stats

    return jax.jit(step, donate_argnums=0)


def run_loop(collection, raws, *, grows=True, **options):
    """Runs a loop; returns its state and the results of each step."""
    state, results = collection.init(seed=3, salt=5), []
    for batch, plan in collection.pipeline(raws, **options):
        state = collection.grow(state, batch) if grows else state
        state, embeddings, stats = step_of(collection)(state, plan)
        results.append(jax.device_get((embeddings, stats)))
    return state, results


def assert_same_results(first, second):
    """Compares embeddings by their bits, and all counts."""
    for (embeddings, stats), (others, counts) in zip(first, second, strict=True):
        for name in embeddings:
            np.testing.assert_array_equal(programs.bits(embeddings[name]), programs.bits(others[name]), err_msg=name)
        for name in (*PER_TABLE, *PER_STORE, *PER_STEP):
            if name != "longest_probe":  # the index may be larger a step earlier
                np.testing.assert_array_equal(stats.count(name), counts.count(name), err_msg=name)


# On a mesh of one device the plain case suffices. On several devices the micro-batches below keep statistics, and
# policies admit and evict; rows that XLA computes from keys do not depend on the mesh.
FAST = {*((case, None) for case in CASES), ("plain", 1), *((case, 4) for case in ("plain", "full", "partial bags"))}
EXACT_CASES = [
    pytest.param(case, num_shards, marks=() if (case, num_shards) in FAST else pytest.mark.slow)
    for case in CASES
    for num_shards in NUM_SHARDS
]


@pytest.mark.parametrize(("case", "num_shards"), EXACT_CASES)
def test_an_exact_lookup_ahead_changes_no_bit(case, num_shards):
    """Embeddings and counts of every step and the final state have the same bits."""
    collection = collection_of(case, num_shards)
    raws = raw_batches(collection.features)
    want, results = run_loop(collection, raws, grows=case != "full")
    got, ahead = run_loop(collection, raws, grows=case != "full", lookahead=1)
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)
    assert got.ahead == ()
    assert case != "full" or sum(programs.total(stats, "num_refused") for _, stats in ahead) > 0


@pytest.mark.parametrize("num_shards", [None, 4])
def test_rows_leave_at_the_step_at_which_they_would_without_lookups_ahead(num_shards):
    """A full store drains before it evicts, so the bits stay, and no gradient is lost."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=32, max_capacity=48, eviction=LRU)
    make = jaxsok.Collection if num_shards is None else functools.partial(programs.over, num_shards)
    raws = [{"user": np.arange(NUM_SAMPLES) % 11 + 7 * step} for step in range(24)]
    plain, pipelined = make([spec], FEATURES[:1]), make([spec], FEATURES[:1])
    want, results = run_loop(plain, raws)
    got, ahead = run_loop(pipelined, raws, lookahead=1)
    assert plain.growth.num_evictions == pipelined.growth.num_evictions >= 2
    assert_same_results(results, ahead)
    for _, stats in ahead:
        stats.check()
    programs.assert_same_state(want, got, index=False)


def late_batches(num_batches):
    """Returns batches of which a part is new at each step, for a table that is large against them."""
    sizes, places = np.random.default_rng(2).integers(2, 9, num_batches), np.arange(NUM_SAMPLES)
    return [{"user": np.where(places < size, 8 * k, 8 * max(0, k - 5)) + places} for k, size in enumerate(sizes)]


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_large_store_evicts_at_the_same_steps(num_shards, monkeypatch):
    """A store that decides by the counters of earlier batches keeps its bits too, whatever has arrived."""
    rows = 24 * NUM_SAMPLES * (num_shards or 1) + 64
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=rows, max_capacity=rows, eviction=LRU)
    make = jaxsok.Collection if num_shards is None else functools.partial(programs.over, num_shards)
    raws = late_batches(rows // 5)
    plain, pipelined, busy = (make([spec], FEATURES[:1]) for _ in range(3))
    want, results = run_loop(plain, raws)
    got, ahead = run_loop(pipelined, raws, lookahead=1)
    assert plain.growth.num_evictions == pipelined.growth.num_evictions >= 2
    assert plain.growth.looks[0] and pipelined.growth.looks[0]  # the rule was used
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)
    monkeypatch.setattr(grow, "is_at_rest", lambda state, shards: False)
    got, ahead = run_loop(busy, raws, lookahead=1)
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


@pytest.mark.filterwarnings("ignore:grow")
@pytest.mark.parametrize(
    ("num_shards", "eviction", "admission"),
    [
        (None, policies.SmallNorm(0.5), None),
        (None, policies.TimeToLive(2), policies.AdmitByCount(2, delayed=True)),
        (4, policies.TimeToLive(2), policies.AdmitByProbability(0.5)),
        (None, policies.LeastFrequentlyUsed(), policies.AdmitByBloom(2, num_keys=100)),
    ],
)
def test_policies_see_what_they_would_without_lookups_ahead(num_shards, eviction, admission):
    """The bits are the same also if too few rows leave and keys are refused."""
    options = {"capacity": 48, "max_capacity": 48, "eviction": eviction, "admission": admission}
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), **options)
    make = jaxsok.Collection if num_shards is None else functools.partial(programs.over, num_shards)
    rng = np.random.default_rng(5)
    raws = [{"user": rng.integers(0, 14, NUM_SAMPLES) + 4 * step} for step in range(40)]
    plain, pipelined = make([spec], FEATURES[:1]), make([spec], FEATURES[:1])
    want, results = run_loop(plain, raws)
    got, ahead = run_loop(pipelined, raws, lookahead=1)
    assert plain.growth.num_evictions == pipelined.growth.num_evictions >= 1
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


def test_a_loop_that_breaks_off_is_drained_and_saved(tmp_path):
    """It is drained with the batches in flight, by the same pipeline."""
    collection = collection_of("plain", None)
    handed_out = collection.pipeline(raw_batches(collection.features), staleness=2)
    state = collection.init(seed=3, salt=5)
    for number, (batch, plan) in enumerate(handed_out):
        state, *_ = step_of(collection)(collection.grow(state, batch), plan)
        if number == 1:
            break
    state = collection.drain(state)
    for _, (batch, plan) in zip(state.ahead, handed_out, strict=False):
        state, _, stats = step_of(collection)(collection.grow(state, batch), plan)
        stats.check()
    checkpoint.export_full(tmp_path / "run", collection, state)


@pytest.mark.parametrize(("num_shards", "staleness"), [(None, 1), (None, 4), (4, 2)])
def test_rows_miss_as_many_updates_as_asked(num_shards, staleness):
    """Batch k reads rows after the update k - staleness; the oracle is a dict with SGD."""
    make = jaxsok.Collection if num_shards is None else functools.partial(programs.over, num_shards)
    collection = make([jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=64)], FEATURES[:1])
    rng = np.random.default_rng(1)
    raws = [{"user": rng.integers(0, 12, NUM_SAMPLES)} for _ in range(9)]
    _, results = run_loop(collection, raws, staleness=staleness)
    every = np.unique(np.concatenate([raw["user"] for raw in raws]))
    initial = programs.initial_rows("user", 2, every, seed=3)
    rows = [dict(zip(every.tolist(), initial, strict=True))]  # after each update
    for k, raw in enumerate(raws):
        read = rows[max(0, k - staleness)]
        embeddings = np.stack([read[key] for key in raw["user"].tolist()])
        np.testing.assert_allclose(results[k][0]["user"], embeddings, rtol=1e-5, err_msg=f"batch {k}")
        after = dict(rows[-1])
        for key, embedding in zip(raw["user"].tolist(), embeddings, strict=True):
            after[key] = after[key] - np.float32(0.5) * (embedding + np.float32(0.1))
        rows.append(after)


@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_gradient_is_lost_when_rows_leave(staleness):
    """All lookups in flight take their steps before a full store evicts."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=32, max_capacity=48, eviction=LRU)
    collection = jaxsok.Collection([spec], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + 9 * step} for step in range(30)]
    state, results = run_loop(collection, raws, staleness=staleness)
    assert collection.growth.num_evictions >= 3 and state.ahead == ()
    for _, stats in results:
        stats.check()
        assert stats.num_stale == stats.num_misused_plans == 0 and programs.total(stats, "num_refused") == 0


def test_one_and_several_devices_agree_when_stale():
    """After stale lookups, the tables agree by key."""
    raws = raw_batches(FEATURES)
    reference, collection = collection_of("plain", None), collection_of("plain", 4)
    states = [run_loop(tables, raws, staleness=2)[0] for tables in (reference, collection)]
    programs.assert_close_tables((reference, collection), states, rtol=1e-5, atol=1e-6)


@programs.for_equals
def step_of_two(collection):
    """Jits a step of two micro-batches."""

    @jax.jit
    def step(state, first, second):
        embeddings, plans = [None, None], [None, None]
        for i, plan in enumerate((first, second)):
            embeddings[i], state, plans[i] = collection.lookup(state, plan)
        gradients = [jax.tree.map(lambda rows: rows + jnp.asarray(0.1, rows.dtype), rows) for rows in embeddings]
        state, stats = collection.update(state, plans, gradients)
        return state, embeddings, stats

    return step


def trained_by_two(collection, raws, drained=(), **options):
    """Runs steps of two micro-batches each; returns state and results. Some steps leave a drained state."""
    step = step_of_two(collection)
    state, results = collection.init(seed=3, salt=5), []
    handed_out = iter(collection.pipeline(raws, **options))
    for number, (first, second) in enumerate(zip(handed_out, handed_out, strict=True)):
        state = collection.drain(state) if number in drained else state
        state = collection.grow(state, [first[0], second[0]])
        state, embeddings, stats = step(state, first[1], second[1])
        assert number not in drained or (state.ahead == () and not state.drains)
        results += [(embeddings[0], stats), (embeddings[1], stats)]
    return state, results


@pytest.mark.parametrize("num_shards", [None, 4])
def test_micro_batches(num_shards):
    """The second lookup of a step comes before its update, and the first of the next one after it."""
    collection = collection_of("statistics", num_shards)
    raws = raw_batches(collection.features)
    want, results = trained_by_two(collection, raws)
    got, ahead = trained_by_two(collection, raws, drained=(1,), lookahead=1, micro_batches=2)
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


def test_rows_leave_between_steps_of_micro_batches():
    """There is room for all batches of the next step before the first of them is looked up."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=64, eviction=LRU, max_capacity=64)
    raws = [{"user": np.arange(NUM_SAMPLES) % 11 + 6 * step} for step in range(24)]
    plain, pipelined = (jaxsok.Collection([spec], FEATURES[:1]) for _ in range(2))
    want, results = trained_by_two(plain, raws)
    got, ahead = trained_by_two(pipelined, raws, lookahead=1, micro_batches=2)
    assert plain.growth.num_evictions == pipelined.growth.num_evictions >= 3
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


@pytest.mark.parametrize("options", [{"lookahead": 1}, {"staleness": 2}])
def test_a_first_batch_that_is_larger(options):
    """The first decision of a store does not count rows as seen that its batch has yet to insert."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.05), capacity=1200, max_capacity=1200, eviction=LRU)
    sizes = [300, *[25] * 50]
    starts = np.cumsum([0, *sizes])
    raws = [{"user": start + np.arange(size)} for start, size in zip(starts[:-1], sizes, strict=True)]
    plain, pipelined = (jaxsok.Collection([spec], FEATURES[:1]) for _ in range(2))
    want, results = run_loop(plain, raws)
    got, ahead = run_loop(pipelined, raws, **options)
    for _, stats in (*results, *ahead):
        assert programs.total(stats, "num_refused") == 0
    if "lookahead" in options:
        assert_same_results(results, ahead)
        programs.assert_same_state(want, got, index=False)
    assert plain.growth.num_evictions >= 3


def test_a_large_store_evicts_between_the_same_steps_of_micro_batches():
    """Two batches of a step are decided about together, looked up ahead or not."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=800, max_capacity=800, eviction=LRU)
    plain, pipelined = (jaxsok.Collection([spec], FEATURES[:1]) for _ in range(2))
    raws = late_batches(160)
    want, results = trained_by_two(plain, raws)
    got, ahead = trained_by_two(pipelined, raws, lookahead=1, micro_batches=2)
    assert plain.growth.num_evictions == pipelined.growth.num_evictions >= 2
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


GROWS = {
    "none": lambda tables, state, batch, _, number: tables.grow(state),
    "a number": lambda tables, state, batch, _, number: tables.grow(state, NUM_SAMPLES),
    "features": lambda tables, state, batch, _, number: tables.grow(state, batch.features),
    "a plan": lambda tables, state, _, plan, number: tables.grow(state, plan),
    "twice": lambda tables, state, batch, _, number: tables.grow(tables.grow(state, batch), batch),
    "two steps": lambda tables, state, batch, _, number: state if number % 2 else tables.grow(state, batch, steps=2),
}


# Each form of `grow`'s argument and each distance of lookups ahead occurs at least once.
@pytest.mark.parametrize(
    ("form", "fetches", "options"),
    [
        *((form, False, {"lookahead": 1}) for form in GROWS),
        ("features", True, {"lookahead": 1}),
        ("features", True, {"staleness": 2}),
        ("none", False, {"staleness": 2}),
        ("two steps", False, {"staleness": 2}),
    ],
)
def test_growth_makes_room_for_the_batches_ahead(form, fetches, options):
    """No key of a batch that is looked up ahead is refused, whatever `grow` receives."""
    collection = jaxsok.Collection([jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=16)], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + NUM_SAMPLES * step} for step in range(6)]
    state, handed_out = collection.init(seed=3), collection.pipeline(raws, **options)
    # Each batch has its own followers, also if a caller fetches several beforehand.
    for number, (batch, plan) in enumerate(list(handed_out) if fetches else handed_out):
        state, _, stats = step_of(collection)(GROWS[form](collection, state, batch, plan, number), plan)
        assert programs.total(stats, "num_refused") == 0
    assert collection.num_rows(state) == {"user": 6 * NUM_SAMPLES}


FOR_TWO_STEPS = {
    "steps": lambda tables, state, batches: tables.grow(state, batches[0], steps=2),
    "a list": lambda tables, state, batches: tables.grow(state, batches),
    "no batch": lambda tables, state, batches: tables.grow(state, steps=2),
}


@pytest.mark.parametrize("drained", [None, 0, 1])
@pytest.mark.parametrize("options", [{"lookahead": 1}, {"staleness": 2}], ids=str)
@pytest.mark.parametrize("form", FOR_TWO_STEPS)
def test_a_full_table_evicts_where_grow_is_called_for_two_steps(form, options, drained):
    """A lookup would be in flight at each call of `grow`, if the second step looked ahead again, also after a drain."""
    spec = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=64, max_capacity=64, eviction=LRU)
    collection = jaxsok.Collection([spec], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + NUM_SAMPLES * step} for step in range(24)]
    state, handed_out = collection.init(seed=3), iter(collection.pipeline(raws, **options))
    for (first, plan), (second, other_plan) in zip(handed_out, handed_out, strict=True):
        state = FOR_TWO_STEPS[form](collection, state, [first, second])
        for number, each in enumerate((plan, other_plan)):
            if number == drained:
                state = collection.drain(state)
            state, _, stats = step_of(collection)(state, each)
            assert programs.total(stats, "num_refused") == stats.num_stale == 0
    assert collection.growth.num_evictions > 1 and not state.ahead
    last = np.arange(NUM_SAMPLES) + NUM_SAMPLES * 23
    assert np.asarray(collection.contains(state, "user", last)).all()


@pytest.mark.parametrize("options, ahead", [({"lookahead": 1}, 1), ({"staleness": 3}, 3)], ids=str)
def test_a_drain_before_grow_is_kept_where_the_state_has_drained_for_an_eviction(options, ahead):
    """The loop of docs/lookups_ahead.md: `drain`, `grow`, the step, and an operation that needs a drained state."""
    spec = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=256, max_capacity=256, eviction=LRU)
    collection, num_found = jaxsok.Collection([spec], FEATURES[:1]), 0
    raws, state = [{"user": np.arange(16) + 8 * step} for step in range(80)], collection.init(seed=0)
    for number, (batch, plan) in enumerate(collection.pipeline(raws, **options), start=1):
        if number % 4 == 0 or number % 4 > 4 - ahead:
            state = collection.drain(state)
        state = collection.grow(state, batch)
        state, _, stats = step_of(collection)(state, plan)
        stats.check()
        if number % 4 == 0:
            _, found = collection.find(state, batch.features)
            num_found += found.to_dict()["user"]["num_found"]
    assert num_found == 20 * 16 and collection.growth.num_evictions > 3


def test_growth_for_several_steps_asks_for_no_more_where_no_row_leaves():
    spec = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=40 * NUM_SAMPLES)
    collection = jaxsok.Collection([spec], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) % 7} for _ in range(48)]
    state = collection.init(seed=3)
    for number, (batch, plan) in enumerate(collection.pipeline(raws, lookahead=1)):
        state = collection.grow(state, batch, steps=24) if number % 24 == 0 else state
        state, *_ = step_of(collection)(state, plan)
    assert state.stores[0].capacity == collection.init(seed=3).stores[0].capacity


def test_growth_makes_room_ahead_for_a_batch_of_other_arrays():
    """A batch that the caller has mapped counts as the one that was handed out last."""
    collection = jaxsok.Collection([jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=8)], FEATURES[:1])
    raws = [{"user": np.arange(64) + 64 * step} for step in range(36)]
    state = collection.init(seed=3)
    for batch, plan in collection.pipeline(raws, lookahead=1):
        state = collection.grow(state, jax.tree.map(jnp.copy, batch))
        state, _, stats = step_of(collection)(state, plan)
        assert programs.total(stats, "num_refused") == 0


def test_growth_makes_room_for_the_batch_after_stacked_ones():
    """The last step of a scan looks up a batch that was not stacked."""
    spec = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=48)
    collection = jaxsok.Collection([spec], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + NUM_SAMPLES * (step if step else 1)} for step in range(5)]
    batches, plans = zip(*itertools.islice(collection.pipeline(raws, lookahead=1), 4), strict=True)
    state, *_ = step_of(collection)(collection.init(seed=3), plans[0])
    stacked, of_steps = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *some[1:]) for some in (batches, plans))
    state = collection.grow(state, stacked)
    state, _ = jax.lax.scan(lambda state, plan: (step_of(collection)(state, plan)[0], None), state, of_steps)
    assert collection.num_rows(state) == {"user": 4 * NUM_SAMPLES}


@pytest.mark.parametrize("is_over", [True, False])
def test_batches_of_no_pipeline_follow_a_loop_that_was_drained(is_over):
    """Nothing is looked up ahead of them: a full table evicts for them alone, in steps of one scan."""
    spec = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=64, max_capacity=64, eviction=LRU)
    collection = jaxsok.Collection([spec], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + NUM_SAMPLES * step} for step in range(24)]
    state, loop = collection.init(seed=3), iter(collection.pipeline(raws, lookahead=1))
    for number, (batch, plan) in enumerate(itertools.islice(loop, 2)):
        state = collection.drain(state) if number == 1 else state
        state, *_ = step_of(collection)(collection.grow(state, batch), plan)
    if is_over:
        loop.close()

    def step(state, features):
        state, _, stats = step_of(collection)(state, features)
        return state, stats

    for first in range(2, 24, 2):
        batches = [collection.batch(raw) for raw in raws[first : first + 2]]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state = collection.grow(state, stacked)
        assert not state.drains
        state, stats = jax.lax.scan(step, state, stacked.features)
        assert programs.total(stats, "num_refused") == 0


def test_a_table_that_cannot_grow_says_so_at_its_own_step(monkeypatch):
    """If memory does not suffice for the batch ahead, the step before it is trained, and the state is drained."""
    collection = jaxsok.Collection([jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(0.5), capacity=16)], FEATURES[:1])
    raws = [{"user": np.arange(NUM_SAMPLES) + NUM_SAMPLES * step} for step in range(3)]
    handed_out = iter(collection.pipeline(raws, lookahead=1))
    (batch, plan), state = next(handed_out), collection.init(seed=3)
    monkeypatch.setattr("jaxsok.enlarge.free_bytes", lambda: 0)
    state, _, stats = step_of(collection)(collection.grow(state, batch), plan)
    stats.check()
    with pytest.raises(MemoryError, match="grow"):
        collection.grow(state, next(handed_out)[0])
    assert state.ahead == () and collection.num_rows(state) == {"user": NUM_SAMPLES}


def test_lookups_in_flight_are_stacked_and_unstacked():
    """Stacking to `jax.pmap`'s form and back keeps every bit."""
    collection = collection_of("plain", 4)
    _, plan = next(iter(collection.pipeline(raw_batches(collection.features), lookahead=1)))
    state, *_ = step_of(collection)(collection.init(seed=3, salt=5), plan)
    want = jax.device_get(state)
    programs.assert_same_state(want, collection.unstack(collection.stack(state)))


def test_explicit_axes(recwarn):
    """The bits are the same, and JAX does not warn of the arrays that end with the last step."""
    collection = programs.over(4, *CASES["plain"], axis_type=AxisType.Explicit)
    raws = raw_batches(collection.features)
    want, results = run_loop(collection, raws)
    got, ahead = run_loop(collection, raws, lookahead=1)
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)
    assert not [warning for warning in recwarn if "donated" in str(warning.message)]


def test_two_collections_whose_lookups_end_in_one_step(recwarn):
    """JAX names the arrays of both in one warning, which does not come."""
    collections = [
        jaxsok.Collection(
            [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.5), capacity=64)],
            [jaxsok.FeatureSpec("user", "user", combiner="sum", max_keys=max_keys)],
        )
        for max_keys in (28, 44)
    ]
    steps = [jax.jit(step_of(collection)) for collection in collections]
    step = jax.jit(
        lambda states, plans: [f(*each)[0] for f, *each in zip(steps, states, plans, strict=True)], donate_argnums=0
    )
    states = [collection.init(seed=0) for collection in collections]
    raws = [{"user": jaxsok.Bags(np.arange(8) + i, lengths=np.full(4, 2))} for i in range(3)]
    for given in zip(*[collection.pipeline(raws, lookahead=1) for collection in collections], strict=True):
        states = [c.grow(state, batch) for c, state, (batch, _) in zip(collections, states, given, strict=True)]
        states = step(states, [plan for _, plan in given])
    assert not any(state.ahead for state in states)
    assert not [warning for warning in recwarn if "donated" in str(warning.message)]


@pytest.mark.parametrize("num_shards", [None, 4])
def test_steps_in_a_scan(num_shards):
    """After the first step, which fills the state, the steps have one form and can be scanned."""
    collection = collection_of("plain", num_shards)
    raws = raw_batches(collection.features)
    want, _ = run_loop(collection, raws, grows=False)
    plans = [plan for _, plan in collection.pipeline(raws, lookahead=1)]
    state, *_ = step_of(collection)(collection.init(seed=3, salt=5), plans[0])
    of_one_form = [plan for plan in plans[1:] if jax.tree.structure(plan) == jax.tree.structure(plans[1])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_one_form)
    state, _ = jax.lax.scan(lambda state, plan: (step_of(collection)(state, plan)[0], None), state, stacked)
    for plan in plans[1 + len(of_one_form) :]:
        state, *_ = step_of(collection)(state, plan)
    programs.assert_same_state(want, state, index=False)


def test_operations_that_need_a_drained_state_say_so(tmp_path):
    """With a lookup in flight they raise and change nothing; after `drain` and a step they work."""
    collection = collection_of("statistics", None)
    raws = raw_batches(collection.features)
    handed_out = iter(collection.pipeline(raws, lookahead=1))
    batch, plan = next(handed_out)
    state, *_ = step_of(collection)(collection.grow(collection.init(seed=3, salt=5), batch), plan)
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state)]
    keys = np.array([3, 4])
    calls = {
        "find": lambda: collection.find(state, batch.features),
        "erase": lambda: collection.erase(state, "user", keys),
        "assign": lambda: collection.assign(state, "user", keys, np.zeros((2, 4), np.float32)),
        "clear": lambda: collection.clear(state, "user"),
        "evict": lambda: collection.evict(state, policy=LRU, num_rows=1),
        "export_table": lambda: collection.export_table(state, "user"),
        "import_table": lambda: collection.import_table(state, "user", []),
        "export_full": lambda: checkpoint.export_full(tmp_path / "run", collection, state),
        "freeze": lambda: serving.freeze(collection, state),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: state: got one with 1 lookups in flight.*drain"):
            call()
    for old, leaf in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, np.asarray(leaf))

    batch, plan = next(handed_out)
    state, *_ = step_of(collection)(collection.drain(state), plan)
    assert state.ahead == () and not state.drains
    embeddings, _ = collection.find(state, batch.features)
    assert embeddings["user"].shape == (NUM_SAMPLES, 4)
    for _, plan in handed_out:  # lookups ahead continue by themselves
        state, _, stats = step_of(collection)(state, plan)
        stats.check()
    want, _ = run_loop(collection, raws)
    programs.assert_same_state(want, state, index=False)


def test_a_saved_run_goes_on_with_the_same_bits(tmp_path):
    """A run that is drained, saved, restored and continued has the bits of an unbroken run."""
    collection = collection_of("admission by count", None)
    raws = raw_batches(collection.features, num_steps=8)
    want, results = run_loop(collection, raws)
    state = collection.init(seed=3, salt=5)
    for number, (batch, plan) in enumerate(collection.pipeline(raws, lookahead=1)):
        state = collection.drain(state) if number == 3 else state
        state, *_ = step_of(collection)(collection.grow(state, batch), plan)
        if number == 3:
            checkpoint.export_full(tmp_path / "run", collection, state)
            break
    state = checkpoint.load(tmp_path / "run", collection)
    ahead = []
    for batch, plan in collection.pipeline(raws[4:], lookahead=1):
        state, embeddings, stats = step_of(collection)(collection.grow(state, batch), plan)
        ahead.append((jax.device_get(embeddings), stats))
    assert_same_results(results[4:], ahead)
    for spec in collection.tables:
        expected, got = programs.by_key(collection, want, spec.name), programs.by_key(collection, state, spec.name)
        assert expected.keys() == got.keys()
        for name, column in expected.items():
            np.testing.assert_array_equal(programs.bits(column), programs.bits(got[name]), err_msg=name)


def test_an_error_of_the_reader_comes_in_its_turn_and_leaves_a_drained_state():
    """The batches before it are trained, the last of them without a lookup ahead."""

    def reader():
        yield from raw_batches(FEATURES)[:3]
        raise OSError("the disk is gone")

    collection = collection_of("plain", None)
    state, num_steps = collection.init(seed=3, salt=5), 0
    with pytest.raises(OSError, match="the disk is gone"):
        for batch, plan in collection.pipeline(reader(), lookahead=1):
            state, *_ = step_of(collection)(collection.grow(state, batch), plan)
            num_steps += 1
    assert num_steps == 3
    want, _ = run_loop(collection, raw_batches(FEATURES)[:3])
    programs.assert_same_state(want, state, index=False)


@pytest.mark.parametrize("num_shards", [None, 4])
def test_the_plan_of_another_batch_changes_no_row(num_shards):
    """A step with another batch than the one in flight is counted, and `check` raises."""
    collection = collection_of("plain", num_shards)
    raws = raw_batches(collection.features)
    (_, first), (_, second), (_, third), *_ = collection.pipeline(raws, lookahead=1)
    state, *_ = step_of(collection)(collection.init(seed=3, salt=5), first)
    rows = [np.asarray(slab) for store in state.stores for slab in store.rows]
    wrong = dataclasses.replace(third, following=())
    state, _, stats = step_of(collection)(state, wrong)
    assert stats.num_misused_plans == 1
    with pytest.raises(jaxsok.StalePlanError):
        stats.check()
    for old, slab in zip(rows, [slab for store in state.stores for slab in store.rows], strict=True):
        np.testing.assert_array_equal(old, np.asarray(slab))
    if num_shards is not None:
        state, *_ = step_of(collection)(collection.init(seed=3, salt=5), first)
        with pytest.raises(ValueError, match="lookup: features: got those of a batch where lookups are in flight"):
            step_of(collection)(state, second.features)


def test_a_skipped_batch_that_begins_as_the_next_one_does():
    """Batches are told apart by all of their keys."""
    features = [jaxsok.FeatureSpec("weekday", "day"), jaxsok.FeatureSpec("item", "day")]
    collection = jaxsok.Collection([jaxsok.TableSpec("day", 1, jaxsok.optim.sgd(0.5), capacity=1 << 14)], features)
    raws = [{"weekday": np.full(4096, 7), "item": np.arange(4096) + 4096 * step} for step in range(3)]
    state = collection.init(seed=3)
    for number, (_, plan) in enumerate(collection.pipeline(raws, lookahead=1)):
        if number != 1:
            state, _, stats = step_of(collection)(state, plan)
    assert stats.num_misused_plans == 1


@pytest.mark.parametrize(("num_shards", "options"), [(None, {"lookahead": 1}), (4, {"staleness": 1})])
def test_a_batch_of_another_size_than_the_one_in_flight_is_refused(num_shards, options):
    """A batch of another pipeline may have such a size."""
    collection = collection_of("full", num_shards)
    sizes = (NUM_SAMPLES, NUM_SAMPLES // 2)
    first, second = ([{"user": np.arange(size) + step} for step in range(2)] for size in sizes)
    _, plan = next(iter(collection.pipeline(first, **options)))
    state, *_ = step_of(collection)(collection.init(seed=3, salt=5), plan)
    _, plan = next(iter(collection.pipeline(second, **options)))
    with pytest.raises(ValueError, match=r"lookup: features: got Features.*wanted the batch in flight"):
        step_of(collection)(state, plan)


@pytest.mark.parametrize("num_shards", [None, 4])
def test_an_update_that_is_left_out(num_shards):
    """If a condition on the device skips an update, as for a non-finite loss, the next batch reads the old rows.

    Draining ends with such a step as with others.
    """
    collection = collection_of("plain", num_shards)

    @jax.jit
    def step(state, plan, is_updated):
        embeddings, state, plan = collection.lookup(state, plan)
        gradients = jax.tree.map(jnp.ones_like, embeddings)
        updated = jax.lax.cond(
            is_updated, lambda state: collection.update(state, plan, gradients)[0], collection.discard, state
        )
        return updated, embeddings

    def loop(**options):
        state, results = collection.init(seed=3, salt=5), []
        for number, (_, plan) in enumerate(collection.pipeline(raw_batches(collection.features), **options)):
            state = collection.drain(state) if options and number in (1, 4) else state
            state, embeddings = step(state, plan, number not in (2, 4))
            assert not state.drains and bool(state.ahead) == (bool(options) and number not in (1, 4, NUM_STEPS - 1))
            results.append(embeddings)
        return state, results

    (want, results), (got, ahead) = loop(), loop(lookahead=1)
    jax.tree.map(np.testing.assert_array_equal, results, ahead)
    programs.assert_same_state(want, got, index=False)


def test_requests_that_need_rounds_wait_for_their_turn():
    """A batch whose keys all belong to one shard is looked up by its own step, and the bits stay."""
    specs, features = CASES["plain"]
    collection = programs.over(4, specs, features, send_capacity=2)
    raws = raw_batches(features)
    raws[3]["user"] = programs.keys_of_owner(2, NUM_SAMPLES, "user", 4)
    want, results = run_loop(collection, raws)
    pipeline = collection.pipeline(raws, lookahead=1)
    num_following = [len(plan.following) for _, plan in pipeline]
    assert num_following[:2] == [1, 1] and num_following[-1] == 0
    got, ahead = run_loop(collection, raws, lookahead=1)
    assert_same_results(results, ahead)
    programs.assert_same_state(want, got, index=False)


def test_arguments_of_the_pipeline_are_checked():
    """Each message names the argument and the expected value."""
    collection = collection_of("plain", None)
    for options, message in (
        ({"lookahead": 2}, "pipeline: lookahead: got 2 with staleness 0, wanted at most 1"),
        ({"lookahead": -1}, "pipeline: lookahead"),
        ({"staleness": 1.5}, "pipeline: staleness"),
        ({"prefetch": -1}, "pipeline: prefetch"),
        ({"staleness": 1, "micro_batches": 2}, "pipeline: micro_batches"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            collection.pipeline([], **options)
    raws = raw_batches(collection.features)
    _, plan = next(iter(collection.pipeline(raws, lookahead=1)))
    with pytest.raises(ValueError, match="lookup: clock: got one with lookups ahead"):
        collection.lookup(collection.init(seed=0), plan, clock=7)


@pytest.mark.parametrize(("num_shards", "options"), [(None, {"lookahead": 1}), (4, {"staleness": 2})])
def test_a_step_with_lookups_in_flight_copies_no_table_and_stays_within_the_estimate(num_shards, options):
    """All arrays of the stores keep their buffers (law 9), and XLA's memory is within `memory_estimate`."""
    specs = [jaxsok.TableSpec("user", 16, jaxsok.optim.adam(0.05), capacity=1 << 14)]
    features = [jaxsok.FeatureSpec("user", "user")]
    make = jaxsok.Collection if num_shards is None else functools.partial(programs.over, num_shards)
    collection = make(specs, features)
    raws = [{"user": np.arange(256) + step} for step in range(6)]
    batches, plans = zip(*collection.pipeline(raws, **options), strict=True)
    step = functools.partial(jax.jit, donate_argnums=0, compiler_options=programs.in_place())
    first = step(programs.train_step(collection))
    state, *_ = first(collection.init(seed=0), plans[0])
    compiled = step(programs.train_step(collection)).lower(state, plans[1]).compile()
    num_shards = num_shards or 1
    assert not table_copies(compiled.as_text(), (1 << 14) * 16 * 4 // num_shards)
    before = addresses(dataclasses.replace(state, ahead=()))
    for plan in plans[1:3]:
        state, *_ = compiled(state, plan)
    assert addresses(dataclasses.replace(state, ahead=())) == before
    estimate = collection.memory_estimate(state, batches[0], lookahead=max(options.values()))
    plain = collection.memory_estimate(state, batches[0])
    assert plain.step_bytes < estimate.step_bytes
    in_flight = sum(leaf.nbytes for leaf in jax.tree.leaves(state.ahead)) // num_shards
    assert compiled.memory_analysis().temp_size_in_bytes + in_flight <= estimate.step_bytes
