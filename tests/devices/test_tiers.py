"""Tables in host memory have the bits of tables on the device, whatever their cache holds (law 11)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest

import jaxsok
from jaxsok import checkpoint, growth, policies, tiers
from jaxsok.kernels import tier as tier_kernels
from jaxsok.records import Records
from jaxsok.stats import PER_STEP, PER_STORE, PER_TABLE
from jaxsok.types import TIER_COUNTERS

NUM_SAMPLES = 16
NUM_STEPS = 20
CACHES = (0, 1, 24, 1 << 16)  # rows: none, one of a shard, some of a step's rows, all
LRU = policies.LeastRecentlyUsed()


def row_of_key(words, columns):
    """Computes a row in XLA from the low word and the column."""
    return (words[0] % jnp.uint32(7)).astype(jnp.float32) / 8 + columns.astype(jnp.float32)


def norm_of(facts):
    """Scores a row by its norm, like a user's score that reads rows."""
    return (jnp.abs(facts.rows.astype(jnp.float32)).sum(axis=1) * 1000).astype(jnp.uint32)


LIFTED = jaxsok.optim.lift(optax.adam(0.05))
UNIFORM = jaxsok.initializers.uniform(0.5, 1.0)
BIG = {"capacity": 64, "statistics": True}
TWO = [
    jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), **BIG),
    jaxsok.TableSpec("half", 5, LIFTED, capacity=64, dtype="bfloat16"),
]
SPECS = {
    "two": TWO,
    "two that need not grow": [dataclasses.replace(spec, capacity=4096) for spec in TWO],
    "statistics": [jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), **BIG)],
    "one table": [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)],
    "stores": [
        jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), initializer=UNIFORM, **BIG),
        jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.05), row_gradient="sum", unknown="zeros", **BIG),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.rowwise_adagrad(0.05), capacity=64, row_gradient="mean"),
        jaxsok.TableSpec("half", 5, LIFTED, capacity=64, dtype="bfloat16"),
    ],
    "rows of 16 bits": [
        jaxsok.TableSpec("user", 7, jaxsok.optim.sgd(0.1), capacity=64, dtype="float16", embedding_dtype="float32"),
        jaxsok.TableSpec("half", 7, jaxsok.optim.adagrad(0.1), capacity=64, dtype="bfloat16"),
    ],
    "rows by XLA": [
        jaxsok.TableSpec(
            "user",
            4,
            jaxsok.optim.adam(0.05),
            capacity=64,
            initializer=jaxsok.initializers.function(row_of_key, "of_key"),
        ),
        jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.05), capacity=64, admission=policies.AdmitByCount(2)),
    ],
}
EVICTIONS = {
    "least recently used": LRU,
    "least frequently used": policies.LeastFrequentlyUsed(),
    "a score that reads rows": policies.LowestScore(norm_of),
    "time to live": policies.TimeToLive(2),
    "small norm": policies.SmallNorm(0.9),
}
FAST_EVICTIONS = ("least recently used", "a score that reads rows", "small norm")
SPECS |= {
    name: [jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), capacity=48, max_capacity=96, eviction=policy)]
    for name, policy in EVICTIONS.items()
}


def features_of(specs, exchange):
    """Declares a feature of single keys and another of weighted bags for each table."""
    single = [jaxsok.FeatureSpec(spec.name, spec.name, exchange=exchange) for spec in specs]
    options = {"max_keys": 4 * NUM_SAMPLES, "weighted": True, "exchange": exchange}
    return single + [jaxsok.FeatureSpec(f"{spec.name}_bag", spec.name, combiner="mean", **options) for spec in specs]


@functools.cache
def collection_of(name, device_rows=None, num_shards=None, exchange="rows", **options):
    """Makes a collection of tables in host memory whose cache has `device_rows` rows; with None, on the device."""
    memory = None if device_rows is None else jaxsok.HostMemory(device_rows=device_rows)
    specs = [dataclasses.replace(spec, memory=memory) for spec in SPECS[name]]
    features = features_of(specs, exchange)
    if num_shards is None:
        return jaxsok.Collection(specs, features)
    return programs.over(num_shards, specs, features, **options)


def raw_batches(collection, num_steps=NUM_STEPS, num_keys=30):
    """Makes batches that repeat keys of the batches before and add new ones."""
    rng, batches = np.random.default_rng(7), []
    for step in range(num_steps):
        pool, raw = np.arange(num_keys, dtype=np.int64) + 6 * step, {}
        for spec in collection.features:
            if not spec.weighted:
                raw[spec.name] = rng.choice(pool, NUM_SAMPLES)
                continue
            lengths = rng.integers(0, 4, NUM_SAMPLES)
            weights = rng.uniform(0.5, 2.0, lengths.sum()).astype(np.float32)
            raw[spec.name] = jaxsok.Bags(rng.choice(pool, lengths.sum()), lengths=lengths, weights=weights)
        batches.append(raw)
    return batches


@functools.cache
def step_of(collection):
    """Jits a step whose gradients depend on the embeddings, so that a wrong row changes all later steps."""

    def step(state, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        gradients = jax.tree.map(lambda rows: rows + jnp.asarray(0.1, rows.dtype), embeddings)
        norm = collection.gradient_norm(state, plan, gradients)
        state, stats = collection.update(state, plan, gradients)
        return state, embeddings, norm, stats

    return jax.jit(step, donate_argnums=0, compiler_options=programs.quickly())


def run_loop(collection, raws, between=lambda number, state: state, state=None, **options):
    """Runs a loop from the given state or from the beginning; returns its state and the results of each step."""
    if state is None:
        # Counts learned from batches of other tests must not decide when it grows.
        collection.growth = growth.GrowthTracker.of(collection.stores, collection.tables, collection.shards)
        state = collection.init(seed=3, salt=5)
    results = []
    for number, (batch, plan) in enumerate(collection.pipeline(raws, **options)):
        state = between(number, collection.grow(state, batch))
        state, *out = step_of(collection)(state, plan)
        results.append(jax.device_get(out))
    return state, results


def assert_same_results(first, second):
    """Compares embeddings and norms by their bits, and all counts."""
    for (embeddings, norm, stats), (others, other_norm, counts) in zip(first, second, strict=True):
        jax.tree.map(assert_same_bits, (embeddings, norm), (others, other_norm))
        for name in (*PER_TABLE, *PER_STORE, *PER_STEP):
            if name == "longest_probe":  # `grow` may know a step earlier that the index is too small
                continue
            np.testing.assert_array_equal(stats.count(name), counts.count(name), err_msg=name)


def assert_same_bits(a, b, message=""):
    np.testing.assert_array_equal(programs.bits(a), programs.bits(b), err_msg=message)


def assert_law(plain, state, tiered, other):
    """Compares a state on the device with a state in host memory: tables, and all arrays outside the tier."""
    for spec in plain.tables:
        columns, others = plain.export_table(state, spec.name), tiered.export_table(other, spec.name)
        assert columns.keys() == others.keys()
        for name in columns:
            jax.tree.map(
                functools.partial(assert_same_bits, message=f"{spec.name}: {name}"), columns[name], others[name]
            )
    for store, in_host in zip(state.stores, other.stores, strict=True):
        assert in_host.tier and not store.tier
        names = ("rows", "states", "tier")
        kept = [dataclasses.replace(state, **dict.fromkeys(names, ())) for state in (store, in_host)]
        programs.assert_same_state(*kept, index=False)


# --------------------------------------------------------------------------------------------------------- any cache


def some_fast(fast, *axes):
    """Combines some axes; combinations that `fast` does not name are slow."""
    return [
        pytest.param(*values, marks=() if values in fast else pytest.mark.slow) for values in itertools.product(*axes)
    ]


TRAINED = ["one table", "stores", "rows of 16 bits", "rows by XLA"]
ALL_CACHES = [("one table", device_rows) for device_rows in CACHES]


@functools.cache
def on_device(name, num_shards=None, exchange="rows", num_steps=NUM_STEPS):
    """Runs the training on the device that the others are compared with."""
    plain = collection_of(name, None, num_shards, exchange)
    return plain, *run_loop(plain, raw_batches(plain, num_steps))


@pytest.mark.parametrize(
    ("name", "device_rows"), some_fast([*ALL_CACHES, *((name, 24) for name in TRAINED)], TRAINED, CACHES)
)
def test_a_tiered_table_is_the_same_table(name, device_rows):
    """The bits agree with new keys, growth, several tables, optimizers and dtypes, single keys and weighted bags."""
    (plain, want, results), tiered = on_device(name), collection_of(name, device_rows)
    got, others = run_loop(tiered, raw_batches(tiered))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    assert all(len(store.records) > 1 for store in got.stores)


@functools.cache
def bringing(collection):
    """Returns a jitted function that brings rows of every store into the cache by row id and changes none."""

    def bring(state, row_ids):
        stores = []
        for spec, store, wanted in zip(collection.stores, state.stores, row_ids, strict=True):
            store, view, *_ = tiers.bring_rows(spec, store, state.seed, wanted)
            stores.append(tiers.give_back(store, view))
        return dataclasses.replace(state, stores=tuple(stores))

    return jax.jit(bring, donate_argnums=0)


def used_rows(store):
    """Returns the row ids of a store's rows."""
    records = np.concatenate([np.asarray(slab) for slab in store.records])
    return np.flatnonzero((records[:, :2] != 2**32 - 1).any(axis=1)).astype(np.uint32)


def write_cache(store):
    """Writes the rows of a cache to host memory, too."""
    (cache,) = store.tier
    host = tier_kernels.give_back(cache, store.rows, cache.rows, cache.states, cache.owners)[1]
    return dataclasses.replace(store, rows=host)


@pytest.mark.parametrize("device_rows", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_another_cache_at_each_step(device_rows):
    """Between steps, any rows are brought, and at times the whole cache is written to host memory."""
    (plain, want, results), tiered = on_device("stores"), collection_of("stores", device_rows)
    rng = np.random.default_rng(11)

    def between(number, state):
        asked = [np.r_[used_rows(store), np.uint32(2**32 - 1)] for store in state.stores]
        state = bringing(tiered)(state, [rng.choice(row_ids, 12) for row_ids in asked])
        if number % 5 == 4:
            state = dataclasses.replace(state, stores=tuple(map(write_cache, state.stores)))
        return state

    got, others = run_loop(tiered, raw_batches(tiered), between)
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    clocks = [int(store.tier[0].counters[0]) for store in got.stores]
    assert all(clock >= 3 * NUM_STEPS for clock in clocks)  # brought, looked up, updated


def records_of(tier):
    """Returns the record of host memory of each row, and the row of each record."""
    homes = np.concatenate([np.asarray(slab) for slab in tier.homes])
    ids = np.arange(len(homes), dtype=np.uint32)
    return homes[:, 0] + ids, (homes[:, 1] + ids) & np.uint32(2**31 - 1)


def test_rows_leave_for_the_pages_of_those_that_come():
    """A row that will leave gets a record in the 64 KiB of one that will come; contents follow their rows."""
    num_rows, dim = 4096, 1000
    memory = jaxsok.HostMemory(device_rows=1024)
    table = jaxsok.TableSpec("user", dim, jaxsok.optim.sgd(0.1), capacity=num_rows, memory=memory)
    tiered = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user", combiner=None)])
    bring_ahead = jax.jit(functools.partial(tiers.bring_rows_ahead, tiered.stores[0]), donate_argnums=0)
    rng, values = np.random.default_rng(2), np.arange(num_rows, dtype=np.float32)

    def assign(state, keys):
        return tiered.assign(state, "user", keys, np.repeat(values[keys, None], dim, axis=1))[0]

    state = tiered.init(seed=0)
    for keys in np.split(np.arange(num_rows), 4):
        state = assign(state, keys)  # the row id of a key is the key
    state = assign(state, rng.choice(num_rows, 1024, replace=False))  # every page has records without content
    num_leaving = num_near = 0
    for _ in range(12):
        keys = rng.choice(num_rows, 64, replace=False)
        store, _ = bring_ahead(state.stores[0], jnp.asarray(keys, jnp.uint32))
        (tier,) = store.tier
        coming, slots = np.asarray(tier.foreseen)[: tier.counters[TIER_COUNTERS.index("num_foreseen")], :2].T
        leaving = np.asarray(tier.owners)[slots, 3]
        records, row_ids = records_of(tier)
        np.testing.assert_array_equal(records[row_ids], np.arange(num_rows))
        pages = records * 4 * dim // (64 << 10)
        num_leaving += len(leaving)
        num_near += np.isin(pages[leaving], pages[coming]).sum()
        values[keys] += 1
        state = assign(dataclasses.replace(state, stores=(store,)), keys)
    assert num_leaving > 400 and num_near > 0.9 * num_leaving, (num_leaving, num_near)
    rows = tiered.rows_of(state, "user", np.arange(num_rows))[0]
    np.testing.assert_array_equal(rows, np.repeat(values[:, None], dim, axis=1))


def test_the_cache_is_used():
    """With room for all rows, a row crosses the link only once."""
    tiered = collection_of("one table", 1 << 16)
    state, _ = run_loop(tiered, raw_batches(tiered))
    counters = dict(zip(TIER_COUNTERS, np.asarray(state.stores[0].tier[0].counters), strict=True))
    assert counters["num_hits"] > 0 and counters["num_fetched"] == counters["num_written"] == 0


# ------------------------------------------------------------------------------------------------- rows leave, or come


@pytest.mark.filterwarnings("ignore:grow")
@pytest.mark.parametrize(
    ("name", "device_rows"),
    # A score of statistics reads nothing in a tier, so one such case suffices; the others read rows.
    some_fast([(name, 24) for name in FAST_EVICTIONS], EVICTIONS, CACHES),
)
def test_rows_leave_by_policy(name, device_rows):
    """Rows leave in `grow` and on request; evicted rows are handed over with their values, and row ids are reused."""

    def run(collection):
        handed = []
        raws = [{"user": raw["user"], "user_bag": raw["user_bag"]} for raw in raw_batches(collection, num_keys=20)]
        state, results = run_loop(collection, raws)
        evicted = functools.partial(collection.evict, hand_over=lambda table, records: handed.append((table, records)))
        has_score = EVICTIONS[name].has_score
        state, gone = evicted(state, num_rows=30) if has_score else evicted(state, clock=NUM_STEPS + 1)
        state, more = run_loop(collection, raws[-4:], state=state)
        return state, results + more, handed, gone.to_dict()

    plain, tiered = collection_of(name), collection_of(name, device_rows)
    want, results, handed, gone = run(plain)
    got, others, handed_too, gone_too = run(tiered)
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    assert gone == gone_too and handed
    assert plain.growth.num_evictions == tiered.growth.num_evictions >= 1
    for (_, records), (_, other) in zip(handed, handed_too, strict=True):
        jax.tree.map(assert_same_bits, vars(records), vars(other))


@pytest.mark.parametrize("device_rows", [24, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (0, 1, 1 << 16))])
def test_other_operations(device_rows):
    """Find, erase, assign, clear and import run between steps; freed row ids are used again."""

    def run(collection):
        raws = raw_batches(collection, num_steps=8)
        state, results = run_loop(collection, raws[:4])
        found, counts = collection.find(state, collection.batch(raws[5]).features)
        state, num_erased = collection.erase(state, "user", np.arange(10, 25))
        rows = np.arange(24, dtype=np.float32).reshape(6, 4)
        state, *num_assigned = collection.assign(state, "user", np.array([0, 1, 2, 900, 901, 902]), rows)
        state, num_cleared = collection.clear(state, "item")
        half = Records(np.arange(40, 60, dtype=np.uint64), np.ones((20, 5), jnp.bfloat16))
        state = collection.import_table(state, "half", [half])
        state, more = run_loop(collection, raws[4:], state=state)
        return state, results + more, (found, counts, num_erased, num_assigned, num_cleared)

    plain, tiered = collection_of("stores"), collection_of("stores", device_rows)
    (want, results, said), (got, others, said_too) = run(plain), run(tiered)
    assert_same_results(results, others)
    jax.tree.map(assert_same_bits, said, said_too)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize("device_rows", [24, 1 << 16])
def test_a_stale_plan_brings_nothing(device_rows):
    """The rows of the plan have left; later their ids belong to other keys, which get rows of their own."""

    def run(collection):
        raws = raw_batches(collection, num_steps=3)
        state, _ = run_loop(collection, raws[:1])
        embeddings, state, plan = programs.lookup(collection)(state, collection.batch(raws[0]).features)
        state, num_erased = collection.erase(state, "user", np.arange(30))
        assert num_erased > 10
        state, stats = programs.update(collection)(state, plan, embeddings)
        assert stats.num_stale.sum() > 0
        return run_loop(collection, raws[1:], state=state)

    plain, tiered = collection_of("one table"), collection_of("one table", device_rows)
    (want, results), (got, others) = run(plain), run(tiered)
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize("num_others", [0, 1, 2])
def test_a_step_between_a_lookup_and_its_update(num_others):
    """Rows of other batches take slots that the plan knows, and may be the rows that stay."""

    def run(collection):
        raws = raw_batches(collection, num_steps=12)  # the first and the last have no key in common
        state, _ = run_loop(collection, raws[:1])
        for _ in range(2):
            embeddings, state, plan = programs.lookup(collection)(state, collection.batch(raws[0]).features)
            state, results = run_loop(collection, raws[12 - num_others :], state=state)
            state, stats = programs.update(collection)(state, plan, embeddings)
            stats.check()
        return state, results

    plain, tiered = collection_of("one table"), collection_of("one table", 40)
    (want, results), (got, others) = run(plain), run(tiered)
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize("device_rows", [40, 24])
def test_the_plan_of_another_branch(device_rows):
    """Branches of a state that look up the same keys have the same plan (decision 0011), not the same rows cached."""

    def run(collection):
        lookup, update = programs.lookup(collection), programs.update(collection)

        def batch(first):
            keys = np.arange(first, first + NUM_SAMPLES)
            ones = {"lengths": np.ones(NUM_SAMPLES, int), "weights": np.ones(NUM_SAMPLES, np.float32)}
            bags = {True: jaxsok.Bags(keys, **ones), False: keys}
            return collection.batch({feature.name: bags[feature.weighted] for feature in collection.features}).features

        def step(state, first):
            embeddings, state, plan = lookup(state, batch(first))
            return update(state, plan, embeddings)[0]

        state = functools.reduce(step, (0, 16, 32), collection.init(0))
        embeddings, state, of_first = lookup(state, batch(0))
        state = functools.reduce(step, (16, 32), state)  # in a small cache, the rows of the first batch leave
        other = jax.tree.map(jnp.copy, state)
        # One branch brings the rows of an update first, and the other those of a lookup.
        state = update(state, jax.tree.map(jnp.copy, of_first), embeddings)[0]
        ones, state, plan = lookup(state, batch(8))
        _, other, _ = lookup(other, batch(8))
        other = update(other, of_first, embeddings)[0]
        other, stats = update(other, plan, jax.tree.map(jnp.ones_like, ones))
        stats.check()
        assert stats.num_misused_plans == 0
        return other

    plain, tiered = collection_of("one table"), collection_of("one table", device_rows)
    assert_law(plain, run(plain), tiered, run(tiered))


# ------------------------------------------------------------------------------------------------------ execution modes


@pytest.mark.parametrize(("device_rows", "kind"), some_fast([(24, "staleness")], CACHES, ("lookahead", "staleness")))
def test_lookups_ahead(device_rows, kind):
    """Rows that a lookup in flight found may leave the cache before they are read."""
    plain, tiered = collection_of("two"), collection_of("two", device_rows)
    (want, results), (got, others) = (run_loop(each, raw_batches(each, 8), **{kind: 1}) for each in (plain, tiered))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize(("num_shards", "device_rows"), some_fast([(None, 90), (2, 90)], (None, 2, 4), (84, 90, 120)))
def test_rows_brought_ahead(num_shards, device_rows):
    """With a cache of one batch, rows of the next batch are read, and others written, while a step runs."""
    plain, tiered = (collection_of("two that need not grow", rows, num_shards) for rows in (None, device_rows))
    (want, results), (got, others) = (run_loop(each, 2 * raw_batches(each), lookahead=1) for each in (plain, tiered))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)
    fetched, ahead = (
        sum(
            int(np.asarray(store.tier[0].counters).reshape(-1, len(TIER_COUNTERS))[:, at].sum()) for store in got.stores
        )
        for at in map(TIER_COUNTERS.index, ("num_fetched", "num_ahead"))
    )
    assert ahead <= fetched and fetched > 0
    if jax.default_backend() == "gpu" and num_shards is None:
        assert ahead > fetched / 2 > 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="copies a state, which on a GPU leaves the library's memory")
def test_a_row_id_that_was_foreseen_gets_another_row():
    """A row that takes the id of one that was released has its own numbers, though the former row was to come."""
    spec = dataclasses.replace(SPECS["one table"][0], memory=jaxsok.HostMemory(device_rows=8))
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("user", "user")])

    def look_up(state, keys):
        return collection.lookup(state, programs.batch(collection, user=np.asarray(keys)))

    state = collection.init(seed=3, salt=5)
    for first in (0, 4, 8, 12, 16, 20, 20, 20, 20):  # by then the first rows of the cache may leave
        embeddings, state, plan = look_up(state, first + np.arange(4))
        state, _ = collection.update(state, plan, jax.tree.map(jnp.ones_like, embeddings))
    (row_id,) = np.flatnonzero((np.asarray(state.stores[0].records[0])[:, :2] == 0).all(axis=1))
    store = jax.tree.map(jnp.copy, state.stores[0])
    store, _ = tiers.bring_rows_ahead(collection.stores[0], store, jnp.asarray([row_id], jnp.uint32))
    assert np.asarray(store.tier[0].counters)[TIER_COUNTERS.index("num_foreseen")] == 1
    results = []
    for each in (state, dataclasses.replace(state, stores=(store,))):
        each, _ = collection.erase(each, "user", np.array([0]))
        embeddings, each, _ = look_up(each, [1000])
        assert np.asarray(each.stores[0].records[0])[row_id, 0] == 1000
        results.append(embeddings)
    jax.tree.map(assert_same_bits, *results)


def test_the_last_lookup_waits_for_rows_on_their_way():
    """Rows that were written ahead are in host memory when a step has looked nothing up ahead: others may read them."""
    declared = collection_of("two that need not grow", 90)
    calls, state = [], declared.init(seed=0)
    lookup = jax.jit(declared.lookup, donate_argnums=0)
    for _, plan in declared.pipeline(raw_batches(declared, 3), lookahead=1):
        text = lookup.lower(state, plan).as_text()
        calls.append([name in text for name in ("jaxsok_tier_write_ahead", "jaxsok_tier_wait")])
        embeddings, state, plan = lookup(state, plan)
        state, _ = declared.update(state, plan, embeddings)
    assert calls == [[True, False], [True, False], [False, True]]
    assert "jaxsok_tier_wait" not in lookup.lower(state, dataclasses.replace(plan, following=())).as_text()


@pytest.mark.parametrize("device_rows", [24, pytest.param(0, marks=pytest.mark.slow)])
def test_micro_batches(device_rows):
    """One update of the plans of three lookups steps each row once."""

    def run(collection):
        @jax.jit
        def step(state, parts):
            plans, gradients = [], []
            for features in parts:
                embeddings, state, plan = collection.lookup(state, features)
                plans.append(plan)
                gradients.append(embeddings)
            state, stats = collection.update(state, plans, gradients)
            return state, gradients, stats

        raws, state, results = raw_batches(collection, num_steps=12, num_keys=20), collection.init(seed=3, salt=5), []
        for number in range(0, 12, 3):
            batches = [collection.batch(raw) for raw in raws[number : number + 3]]
            state = collection.grow(state, batches)
            state, embeddings, stats = step(state, [batch.features for batch in batches])
            results.append((embeddings, 0.0, stats))
        return state, results

    plain, tiered = collection_of("two"), collection_of("two", device_rows)
    (want, results), (got, others) = run(plain), run(tiered)
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize(
    ("num_shards", "device_rows", "exchange"),
    some_fast([(2, 24, "bags")], (1, 2, 4), (0, 4, 24, 1 << 16), ("rows", "bags")),
)
def test_shards(num_shards, device_rows, exchange):
    """Each shard has a cache of its own; rows or partial bags are sent."""
    plain, want, results = on_device("two", num_shards, exchange, 8)
    tiered = collection_of("two", device_rows, num_shards, exchange)
    got, others = run_loop(tiered, raw_batches(tiered, 8))
    assert_same_results(results, others)
    assert_law(plain, want, tiered, got)


@pytest.mark.parametrize("num_shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rounds_and_evictions_on_shards(num_shards):
    """Requests in several rounds bring their rows in each round; then rows leave by a score of their values."""
    plain = collection_of("small norm", None, num_shards, send_capacity=2)
    tiered = collection_of("small norm", 24, num_shards, send_capacity=2)
    (want, results), (got, others) = (run_loop(each, raw_batches(each, 8, num_keys=16)) for each in (plain, tiered))
    assert_same_results(results, others)
    (want, gone), (got, gone_too) = (collection.evict(state) for collection, state in ((plain, want), (tiered, got)))
    assert gone.to_dict() == gone_too.to_dict() and 0 < gone.to_dict()["user"]
    assert_law(plain, want, tiered, got)


# ---------------------------------------------------------------------------------------------------------- saved state


@pytest.mark.parametrize(
    ("saved_rows", "restored_rows"), [(24, None), (None, 24), pytest.param(24, 0, marks=pytest.mark.slow)]
)
def test_a_checkpoint_does_not_depend_on_memory(tmp_path, saved_rows, restored_rows):
    """A tiered table is saved and restored like a plain one, and the reverse; the run continues with the same bits."""
    saved, restored = collection_of("stores", saved_rows), collection_of("stores", restored_rows)
    raws = raw_batches(saved)
    state, _ = run_loop(saved, raws[:6])
    checkpoint.export_full(tmp_path / "full", saved, state)
    state, _ = run_loop(saved, raws[6:8], state=state)
    other = checkpoint.load(tmp_path / "full", restored)
    other, _ = run_loop(restored, raws[6:8], state=other)
    for spec in saved.tables:
        columns, others = (programs.by_key(*pair, spec.name) for pair in ((saved, state), (restored, other)))
        jax.tree.map(assert_same_bits, columns, others)


@pytest.mark.parametrize("num_shards", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_files_of_tiered_tables_are_those_of_plain_ones(tmp_path, num_shards):
    """The files are equal to the byte, for any cache."""
    folders = []
    for device_rows in (None, 24):
        collection = collection_of("stores", device_rows, num_shards)
        state, _ = run_loop(collection, raw_batches(collection, 6))
        folders.append(tmp_path / str(device_rows))
        checkpoint.export_full(folders[-1], collection, state)
    first, second = (sorted(folder.rglob("*.arrow")) for folder in folders)
    assert len(first) == len(second) == len(SPECS["stores"])
    for leaf, other in zip(first, second, strict=True):
        assert leaf.name == other.name and leaf.read_bytes() == other.read_bytes(), leaf.name


def test_deltas(tmp_path):
    """A delta of few rows, which are picked, and one of most rows go from a tiered table to a plain one, and back."""
    tiered, plain = collection_of("statistics", 24), collection_of("statistics")
    raws = raw_batches(tiered, 6)
    few = {"user": np.arange(NUM_SAMPLES) % 3, "user_bag": raws[0]["user_bag"]}
    for first, second in ((tiered, plain), (plain, tiered)):
        folders = [tmp_path / f"{name} of {first.stores[0].memory}" for name in ("full", "few", "most")]
        state, _ = run_loop(first, raws)
        checkpoint.export_full(folders[0], first, state)
        for before, folder, more in zip(folders, folders[1:], ([few], raws), strict=False):
            state, _ = run_loop(first, more, state=state)
            checkpoint.export_delta(folder, first, state, before)
        other = checkpoint.load(folders[-1], second)
        columns, others = (programs.by_key(*pair, "user") for pair in ((first, state), (second, other)))
        jax.tree.map(assert_same_bits, columns, others)


@pytest.mark.parametrize("device_rows", [pytest.param(0, marks=pytest.mark.slow), 24])
def test_chunks(device_rows):
    """Chunks have any size, with optimizer state or without, and may hold only rows used since a step."""
    (plain, want, _), tiered = on_device("statistics"), collection_of("statistics", device_rows)
    got, _ = run_loop(tiered, raw_batches(tiered))
    before = jax.tree.map(np.asarray, got)
    for options in ({"chunk_rows": 7}, {"with_state": False}, {"since": 15, "chunk_rows": 10}):
        chunks, others = (
            list(collection.export_chunks(state, "user", **options))
            for collection, state in ((plain, want), (tiered, got))
        )
        assert len(chunks) == len(others) >= 1
        for chunk, other in zip(chunks, others, strict=True):
            jax.tree.map(assert_same_bits, vars(chunk), vars(other))
    programs.assert_same_state(before, got)


def test_flax_layers():
    """A model's layer trains tables in host memory like tables on a device."""
    nnx = pytest.importorskip("flax.nnx")
    from jaxsok.layers import nnx as layers

    def train(memory):
        tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.1), capacity=64, memory=memory)]
        collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])

        class Model(nnx.Module):
            def __init__(self):
                self.embed = layers.Embeddings(collection, seed=0)

        model, losses = Model(), []

        @functools.partial(nnx.jit, donate_argnums=0)
        def step(model, batch):
            loss, grads = layers.value_and_grad(lambda m: jnp.mean((m.embed(batch.features)["clicked"] - 1) ** 2))(
                model
            )
            return loss, model.embed.update(grads)

        for number in range(6):
            batch = collection.batch({"clicked": np.random.default_rng(number).integers(0, 90, 40)})
            model.embed.grow(batch)
            loss, stats = step(model, batch)
            stats.check()
            losses.append(float(loss))
        return losses, collection.export_table(model.embed.tables.get_value(), "item")

    losses, plain = train(None)
    tiered_losses, tiered = train(jaxsok.HostMemory(device_rows=24))
    assert tiered_losses == losses and losses[-1] < losses[0]
    for name in ("keys", "rows"):
        np.testing.assert_array_equal(tiered[name], plain[name])
