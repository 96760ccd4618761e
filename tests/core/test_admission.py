"""Admission: which unseen keys get a row, when, and what the others read; against dicts, on one and many devices.

kernel_model.py defines the exact results of the kernels, including counters of the filter and draws.
"""

import collections
import dataclasses
import functools

import compiled_cases
import hypothesis
import jax
import jax.numpy as jnp
import kernel_model
import numpy as np
import oracle
import programs
import pytest
import strategies
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from jax.sharding import AxisType

import jaxsok
from jaxsok import admission, checkpoint, operations, policies
from jaxsok.shards import local_parts
from jaxsok.store import MIN_SIGHTINGS

SEED = 7
SGD = jaxsok.optim.sgd(0.5)


# --------------------------------------------------------------------------------------------------------------
# The meaning, by dicts


def line_of(spec, name):
    """Returns the words of a table that the model of the kernels reads: its name and its admission."""
    table = next(table for table in spec.tables if table.name == name)
    words = np.zeros(16, np.uint32)
    hashed = int(programs._word_of_name(name))
    words[:2] = hashed & 0xFFFFFFFF, hashed >> 32
    if isinstance(table.admission, policies.AdmitByProbability):
        words[8] = int(table.admission.probability * 2**32)
    if isinstance(table.admission, policies.AdmitByBloom):
        words[8] = table.admission.num_sightings + table.admission.delayed
        words[10:12] = table.admission.num_counters(table.admission.num_keys), table.admission.num_hashes
    return words


SEED_WORDS = np.array([SEED, 0], np.uint32)


class Counted:
    """Admission by count: a dict."""

    def __init__(self, num_sightings):
        self.num_sightings, self.counts = num_sightings, collections.Counter()

    def see(self, uses):
        """Counts all occurrences of unseen keys in a batch."""
        for key, num in uses.items():
            self.counts[key] = min(self.counts[key] + num, self.num_sightings)

    def lets_in(self, key, step):
        """Decides after the whole batch was seen."""
        return self.counts[key] >= self.num_sightings

    def forget(self):
        """Resets admitted keys when rows are removed."""
        self.counts = collections.Counter({k: n for k, n in self.counts.items() if n < self.num_sightings})

    def drop(self, keys):
        """Forgets keys that are erased by name."""
        for key in keys:
            self.counts.pop(key, None)


class Filtered:
    """Admission by counting Bloom filter: an array, with positions from the model of the kernels."""

    def __init__(self, num_sightings, line):
        self.num_sightings, self.line = num_sightings, line
        self.counters = np.zeros(int(line[10]), np.int64)

    def see(self, uses):
        """Counts as `Counted.see` does."""
        for key, num in uses.items():
            for at in kernel_model.bloom_counters(self.line, SEED_WORDS, key):
                self.counters[at] = min(self.counters[at] + num, 255)

    def lets_in(self, key, step):
        """Compares the least of a key's counters."""
        return self.counters[kernel_model.bloom_counters(self.line, SEED_WORDS, key)].min() >= self.num_sightings

    def forget(self):
        """Does nothing: counters never decrease."""

    def drop(self, keys):
        """Does nothing: keys share counters."""


@dataclasses.dataclass
class Drawn:
    """Admission by probability."""

    line: np.ndarray

    def see(self, uses):
        """Does nothing: this policy counts no keys."""

    def lets_in(self, key, step):
        """Draws for each key and step."""
        return kernel_model.is_drawn(self.line, SEED_WORDS, key, step)

    def forget(self):
        """Does nothing."""

    def drop(self, keys):
        """Does nothing."""


class AdmittingOracle(oracle.CollectionOracle):
    """Tables that exclude unseen keys: `admissions` by table, and what a key without a row reads (None: initial)."""

    def __init__(self, stores, features, admissions, unadmitted):
        super().__init__(stores, features)
        self.admissions, self.unadmitted = admissions, unadmitted
        self.num_unadmitted = collections.Counter()

    def lookup(self, batch):
        """Sees the whole batch first, then finds keys or inserts the admitted ones."""
        uses = {table: collections.Counter() for table in self.admissions}
        for feature in self.features:
            if feature.table not in self.admissions:
                continue
            for bag in batch[feature.name]:
                keys = [key for key in oracle.keys_and_weights(bag)[0] if key != oracle.PADDING_KEY]
                unseen = [key for key in keys if self.store_of(feature.table).find(feature.table, key) is None]
                uses[feature.table].update(unseen)
        for table, policy in self.admissions.items():
            policy.see(uses[table])
        kept_out = {
            (table, key)
            for table, policy in self.admissions.items()
            for key in uses[table]
            if not policy.lets_in(key, self.step)
        }
        self.num_unadmitted = collections.Counter()

        def resolve(store, table, key):
            row_id, outcome = None, "refused"
            if (table, key) in kept_out:
                self.num_unadmitted[table] += 1
            else:
                row_id, outcome = store.find_or_insert(table, key)
            if row_id is not None:
                return row_id, store.rows[row_id], outcome
            value = self.unadmitted.get(table)
            row = store.tables[table].initial_row(key) if value is None else np.full(store.dim, value)
            return None, np.asarray(row, np.float64), outcome

        embeddings, plan_uses, counts = self._walk(batch, resolve)
        return embeddings, oracle.Plan(plan_uses, tuple(s.generation for s in self.stores), counts)

    def erase(self, table, keys):
        """Erases rows, with the counts of all admitted keys if there were some, and those of the named keys."""
        num_erased = super().erase(table, keys)
        if table in self.admissions:
            self.admissions[table].drop(keys)
        for name in self.store_of(table).tables:
            if name in self.admissions:
                self.admissions[name].forget()
        return num_erased


# --------------------------------------------------------------------------------------------------------------
# One collection for the dict and for many devices: all policies, plain tables, all kinds of features

NUM_SAMPLES, MAX_KEYS = 8, 24
BLOOM = policies.AdmitByBloom(1, num_keys=16, false_positive_rate=0.1, unadmitted=-1.0, delayed=True)
DELAYED = policies.AdmitByCount(1, unadmitted="initial", delayed=True)


def specs(placement=jaxsok.SHARDED, **options):
    """Declares tables and features."""
    options = {"capacity": 16, "placement": placement, **options}
    tables = [
        jaxsok.TableSpec("user", 4, SGD, admission=policies.AdmitByCount(3, unadmitted=0.5), **options),
        jaxsok.TableSpec("plain", 4, SGD, **options),
        jaxsok.TableSpec("item", 4, SGD, admission=policies.AdmitByProbability(0.3), unknown="zeros", **options),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.adam(0.125), admission=BLOOM, **options),
        jaxsok.TableSpec("tag", 3, jaxsok.optim.adam(0.125), admission=DELAYED, **options),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("friends", "user", combiner="mean", weighted=True, max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("plain", "plain"),
        jaxsok.FeatureSpec("basket", "item", combiner="sqrtn"),
        jaxsok.FeatureSpec("ad", "ad", combiner="mean", max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("tag", "tag", combiner=None),
    ]
    return tables, features


COLLECTION = jaxsok.Collection(*specs())
FEATURES = [
    oracle.Feature("user", "user", "sum", NUM_SAMPLES),
    oracle.Feature("friends", "user", "mean", MAX_KEYS, weighted=True),
    oracle.Feature("plain", "plain", "sum", NUM_SAMPLES),
    oracle.Feature("basket", "item", "sqrtn", NUM_SAMPLES * 2),
    oracle.Feature("ad", "ad", "mean", MAX_KEYS),
    oracle.Feature("tag", "tag", None, NUM_SAMPLES),
]
NAMES = [table.name for table in COLLECTION.tables]
INITIAL_ROWS = {table.name: programs.initial_row(table.name, table.dim, seed=SEED) for table in COLLECTION.tables}
KEYS = (*strategies.CORNER_KEYS, *range(5, 11))


def new_oracle():
    """Returns an empty oracle of everything COLLECTION declares."""
    tables = {
        table.name: oracle.TableOracle(table.name, INITIAL_ROWS[table.name], table.unknown)
        for table in COLLECTION.tables
    }
    stores = [
        oracle.StoreOracle(4, oracle.Sgd(), 0.5, 2**31, {name: tables[name] for name in ("user", "plain", "item")}),
        oracle.StoreOracle(3, oracle.Adam(), 0.125, 2**31, {name: tables[name] for name in ("ad", "tag")}),
    ]
    first, second = COLLECTION.stores
    admissions = {
        "user": Counted(3),
        "item": Drawn(line_of(first, "item")),
        "ad": Filtered(2, line_of(second, "ad")),
        "tag": Counted(2),
    }
    return AdmittingOracle(stores, FEATURES, admissions, {"user": 0.5, "item": 0.0, "ad": -1.0})


def raw_of(batch):
    """Converts a batch of the oracle to the library's form."""
    friends = programs.to_bags(batch["friends"])
    if friends.weights is None:
        friends = jaxsok.Bags(friends.keys, lengths=friends.lengths, weights=np.zeros(0, np.float32))
    return {
        "user": programs.as_array([bag[0] for bag in batch["user"]]),
        "friends": friends,
        "plain": programs.as_array([bag[0] for bag in batch["plain"]]),
        "basket": programs.as_array(batch["basket"]),
        "ad": programs.to_bags(batch["ad"]),
        "tag": programs.as_array([bag[0] for bag in batch["tag"]]),
    }


@st.composite
def batches(draw, keys=KEYS):
    """Draws one batch in the oracle's form."""
    single = functools.partial(strategies.key_lists, keys, NUM_SAMPLES, padding=True)
    ragged = strategies.ragged_bags(keys, NUM_SAMPLES, MAX_KEYS, padding=True)
    return {
        "user": [[key] for key in draw(single())],
        "friends": draw(ragged.flatmap(lambda bags: strategies.weights_for(bags, (0.0, 0.25, 1.0, 2.0)))),
        "plain": [[key] for key in draw(single())],
        "basket": draw(strategies.padded_bags(keys, NUM_SAMPLES, 2)),
        "ad": draw(ragged),
        "tag": [[key] for key in draw(single())],
    }


def compare(embeddings, expected):
    """Checks closeness: the values are sums of a few numbers of size one."""
    for name, want in expected.items():
        np.testing.assert_allclose(np.asarray(embeddings[name]), want.astype(np.float32), 1e-5, 2e-5, err_msg=name)


class AdmissionMachine(RuleBasedStateMachine):
    """Lookups, finds, updates, erases and growth, in any order."""

    @initialize()
    def start(self):
        """Starts without any key seen."""
        self.state = COLLECTION.init(seed=SEED)
        self.oracle = new_oracle()
        self.pending, self.changed = [], True
        empty = oracle.PADDING_KEY
        bags = {name: [[empty]] * NUM_SAMPLES for name in ("user", "plain", "tag")}
        bags |= {"friends": [[]] * NUM_SAMPLES, "ad": [[]] * NUM_SAMPLES, "basket": [[empty] * 2] * NUM_SAMPLES}
        COLLECTION.batch(raw_of(bags))  # the collection learns the size of the batches

    @precondition(lambda self: len(self.pending) < 2)
    @rule(batch=batches())
    def lookup(self, batch):
        """Looks up; keys that are not admitted read the table's default."""
        features = COLLECTION.batch(raw_of(batch)).features
        self.state = COLLECTION.grow(self.state)
        embeddings, self.state, plan = programs.lookup(COLLECTION)(self.state, features)
        expected, expected_plan = self.oracle.lookup(batch)
        compare(embeddings, expected)
        self.pending.append((plan, expected_plan, dict(self.oracle.num_unadmitted), expected))
        self.changed = True

    @rule(batch=batches())
    def find(self, batch):
        """Finds: counts and admits nothing, and gives the value that `unknown` declares."""
        embeddings, stats = programs.find(COLLECTION)(self.state, COLLECTION.batch(raw_of(batch)).features)
        expected, counts = self.oracle.find(batch)
        compare(embeddings, expected)
        for name in NAMES:
            assert programs.counts(stats, name) == counts[name]
            assert stats.to_dict()[name]["num_unadmitted"] == 0
        self.changed = True

    @precondition(lambda self: self.pending)
    @rule()
    def update(self):
        """Updates with all plans that wait; law 5, with the unadmitted keys among the refused."""
        plans, expected_plans, num_unadmitted, expected = zip(*self.pending, strict=True)
        self.pending = []
        gradients = [
            {name: np.full(array.shape, 0.25 * (1 + i), np.float32) for i, (name, array) in enumerate(part.items())}
            for part in expected
        ]
        self.state, stats = programs.update(COLLECTION)(self.state, list(plans), gradients)
        self.oracle.update(expected_plans, gradients)
        for name in NAMES:
            counts = programs.counts(stats, name)
            assert counts == {
                what: sum(plan.counts[name][what] for plan in expected_plans) for what in oracle.COUNTS
            }, name
            positions = sum(feature.num_positions for feature in FEATURES if feature.table == name)
            assert sum(counts.values()) == len(plans) * positions
            assert stats.to_dict()[name]["num_unadmitted"] == sum(counts.get(name, 0) for counts in num_unadmitted)
        stats.check()  # keys that are not admitted cause no error
        self.changed = True

    @rule(table=st.sampled_from(NAMES), keys=strategies.key_lists(KEYS, 4, padding=True))
    def erase(self, table, keys):
        """Erases; keys that return start from zero, except in the filter."""
        if self.pending:
            self.update()
        self.state, num_erased = COLLECTION.erase(self.state, table, programs.as_array(keys))
        assert int(num_erased) == self.oracle.erase(table, [key for key in keys if key != oracle.PADDING_KEY])
        self.changed = True

    @invariant()
    def tables_and_counts_agree(self):
        """Row ids, keys and counts agree exactly, rows within rounding."""
        if not getattr(self, "changed", False):
            return
        self.changed = False
        for name in NAMES:
            got, want = COLLECTION.export_table(self.state, name), self.oracle.export_table(name)
            assert got["row_ids"].tolist() == [row_id for row_id, _, _, _ in want]
            assert got["keys"].tolist() == [key for _, key, _, _ in want]
            if want:
                np.testing.assert_allclose(got["rows"], np.array([row for _, _, row, _ in want]), 1e-5, 2e-5)
        for name in ("user", "tag"):
            policy = self.oracle.admissions[name]
            want = {key: num for key, num in policy.counts.items() if 0 < num < policy.num_sightings}
            assert waiting(COLLECTION, self.state, name) == want
        counters = np.asarray(self.state.stores[1].bloom[0]).view(np.uint8)
        np.testing.assert_array_equal(counters, self.oracle.admissions["ad"].counters)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = hypothesis.settings(max_examples=12)


def waiting_keys(spec, store, number):
    """Returns the keys of a table that wait for a row, and their counts, on all shards; replicas once."""
    parts = list(local_parts(store.sightings[0], spec.num_shards).values()) if store.sightings else []
    found = [
        admission.waiting_in(spec, np.asarray(part), number) for part in parts[: 1 if spec.is_replicated else None]
    ]
    none = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    return tuple(map(np.concatenate, zip(none, *found, strict=True)))


def waiting(collection, state, name):
    """Returns the waiting keys of a table and their counts, over all shards."""
    found = operations.locate("test", collection, name)
    keys, counts = waiting_keys(found.spec, state.stores[found.store], found.number)
    assert len(set(keys.tolist())) == len(keys)
    return dict(zip(keys.tolist(), counts.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------------------
# Many devices


def without_filter(placement):
    """Returns `specs` without the filter, whose size depends on how many keys a shard owns."""
    tables, features = specs(placement, capacity=256)
    return [t for t in tables if t.name != "ad"], [f for f in features if f.table != "ad"]


@functools.cache
def on_one_device():
    """Returns the results of `random_raws` on one device, without states."""
    return run_steps(jaxsok.Collection(*without_filter(jaxsok.SHARDED)), "fused")


def random_raws(num_steps=4):
    """Returns batches in which many keys occur twice or three times, on different devices."""
    rng = np.random.default_rng(3)
    raws = []
    for _ in range(num_steps):
        lengths = np.full(NUM_SAMPLES, 2)
        raws.append(
            {
                "user": rng.integers(0, 12, NUM_SAMPLES),
                "friends": jaxsok.Bags(
                    rng.integers(-1, 12, 2 * NUM_SAMPLES),
                    lengths=lengths,
                    weights=rng.integers(1, 4, 2 * NUM_SAMPLES).astype(np.float32),
                ),
                "plain": rng.integers(0, 30, NUM_SAMPLES),
                "basket": rng.integers(-1, 20, (NUM_SAMPLES, 2)),
                "tag": rng.integers(0, 20, NUM_SAMPLES),
            }
        )
    return raws


def run_steps(collection, path):
    """Returns embeddings and statistics of each step, then tables by key and the waiting keys."""
    state, seen = collection.init(seed=SEED), []
    dims = {feature.name: 3 if feature.table == "tag" else 4 for feature in collection.features}
    gradients = {name: np.ones((NUM_SAMPLES, dim), np.float32) for name, dim in dims.items()}
    raws = random_raws()
    if path == "pipeline":
        inputs = [plan for _, plan in collection.pipeline(raws)]
    else:
        inputs = [collection.batch(raw).features for raw in raws]
        inputs = [programs.plan(collection)(batch) for batch in inputs] if path == "planned" else inputs
    for asked in inputs:
        state, embeddings, stats = programs.fed_step(collection)(collection.grow(state), asked, gradients)
        seen.append((jax.tree.map(np.asarray, embeddings), stats.to_dict()))
    names = [table.name for table in collection.tables]
    return (
        seen,
        {n: programs.by_key(collection, state, n) for n in names},
        {n: waiting(collection, state, n) for n in names},
    )


@pytest.mark.parametrize(
    ("num_shards", "placement", "path"),
    [
        (None, jaxsok.SHARDED, "planned"),
        pytest.param(1, jaxsok.SHARDED, "rounds", marks=pytest.mark.slow),
        (2, jaxsok.SHARDED, "rounds"),
        (4, jaxsok.SHARDED, "pipeline"),
        pytest.param(4, jaxsok.SHARDED, "rounds", marks=pytest.mark.slow),
        pytest.param(2, jaxsok.REPLICATED, "pipeline", marks=pytest.mark.slow),
        (4, jaxsok.REPLICATED, "rounds"),
        (2, jaxsok.on(1), "pipeline"),
    ],
)
def test_results_do_not_depend_on_the_mesh(num_shards, placement, path):
    """Law 2: admission, its time, the waiting keys with their counts, and all embeddings are equal."""
    declared = without_filter(placement)
    collection = jaxsok.Collection(*declared) if num_shards is None else programs.over(num_shards, *declared)
    (want_seen, want_tables, want_waiting), (seen, tables, waits) = on_one_device(), run_steps(collection, path)
    for step, ((embeddings, stats), (want, want_stats)) in enumerate(zip(seen, want_seen, strict=True)):
        for name, array in want.items():
            np.testing.assert_allclose(embeddings[name], array, 1e-5, 1e-5, err_msg=f"step {step}: {name}")
        assert stats == want_stats, step
    assert waits == want_waiting and any(want_waiting.values())
    for name, columns in want_tables.items():
        assert len(columns["keys"]), name
        np.testing.assert_array_equal(tables[name]["keys"], columns["keys"], err_msg=name)
        np.testing.assert_allclose(tables[name]["rows"], columns["rows"], 1e-5, 1e-5, err_msg=name)
    kept_out = {name: sum(stats[name]["num_unadmitted"] for _, stats in want_seen) for name in want_tables}
    assert min(kept_out[name] for name in ("user", "item", "tag")) > 0 == kept_out["plain"]


def test_rounds_count_every_use():
    """Small send capacities give several rounds; each round has all uses of its keys."""
    declared = without_filter(jaxsok.SHARDED)
    seen, _, waits = run_steps(programs.over(2, *declared, send_capacity=6), "rounds")
    want_seen, _, want_waiting = on_one_device()
    assert [stats for _, stats in seen] == [stats for _, stats in want_seen] and waits == want_waiting


# --------------------------------------------------------------------------------------------------------------
# By Bloom filter


def one_table(policy, num_shards=None, dim=1, **options):
    """Declares a table with one feature of single keys."""
    options = {"capacity": 64, **options}
    tables, features = (
        [jaxsok.TableSpec("user", dim, SGD, admission=policy, **options)],
        [jaxsok.FeatureSpec("user", "user")],
    )
    if num_shards is None:
        return jaxsok.Collection(tables, features)
    axis_type = AxisType.Explicit if num_shards == 2 else AxisType.Auto
    return programs.over(num_shards, tables, features, axis_type=axis_type)


def stats_of_lookup(collection, state, keys):
    """Returns the state and counts of one lookup."""
    features = collection.batch({"user": np.asarray(keys)}).features
    state, _, stats = programs.fed_step(collection)(
        collection.grow(state), features, {"user": np.zeros((len(keys), collection.tables[0].dim), np.float32)}
    )
    return state, stats.to_dict()["user"]


@pytest.mark.parametrize(("num_shards", "num_sightings", "rate"), [(None, 2, 0.02), (None, 4, 0.005), (4, 2, 0.02)])
def test_false_positives_of_the_filter(num_shards, num_sightings, rate):
    """With the expected number of keys, early admissions are about as many as stated; no key is admitted late."""
    num_keys = 20_000
    policy = policies.AdmitByBloom(num_sightings, num_keys=num_keys, false_positive_rate=rate)
    collection = one_table(policy, num_shards, capacity=num_keys)
    state, keys = collection.init(seed=SEED), np.random.default_rng(0).permutation(1 << 20)[:num_keys]
    num_early = 0
    for sighting in range(1, num_sightings):
        state, counts = stats_of_lookup(collection, state, keys)
        num_early += counts["num_inserted"]
        assert counts["num_unadmitted"] == counts["num_refused"] == num_keys - num_early
        assert num_early < 1.5 * rate * num_keys, f"sighting {sighting}"
    if num_sightings == 2:
        assert num_early > rate * num_keys / 3  # the filter is no larger than necessary
    state, counts = stats_of_lookup(collection, state, keys)
    assert counts["num_found"] + counts["num_inserted"] == num_keys


def test_a_filter_too_large_is_refused():
    """Counters are numbered with 32 bits, so a larger filter is refused."""
    with pytest.raises(
        ValueError, match=r"policies\.AdmitByBloom: num_keys: got 2000000000 .*wanted at most 4294967292"
    ):
        policies.AdmitByBloom(num_keys=2_000_000_000, false_positive_rate=1e-6)


# --------------------------------------------------------------------------------------------------------------
# By probability


def test_chance_is_as_stated_and_drawn_anew():
    """Each step admits about its share of the excluded keys; equal keys of two tables get different draws."""
    options = {"admission": policies.AdmitByProbability(0.25), "capacity": 1 << 15}
    tables = [jaxsok.TableSpec(name, 1, SGD, **options) for name in ("user", "item")]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(t.name, t.name) for t in tables])
    state, keys = collection.init(seed=SEED), np.arange(10_000)
    num_out = 10_000
    for _ in range(3):
        state, stats = programs.learn(collection, state, programs.batch(collection, user=keys, item=keys))
        num_in = programs.counts(stats)["num_inserted"]
        assert abs(num_in - num_out / 4) < 5 * (num_out * 0.25 * 0.75) ** 0.5
        num_out -= num_in
    rows = [set(programs.rows_of(collection, state, name)) for name in ("user", "item")]
    both = len(rows[0] & rows[1]) / 10_000
    assert abs(both - (1 - 0.75**3) ** 2) < 0.02


@pytest.mark.parametrize(("probability", "share"), [(0.0, 0), (1.0, 1)])
def test_certainties(probability, share):
    """Probability 0 admits no key and probability 1 admits every key."""
    collection = one_table(policies.AdmitByProbability(probability))
    _, counts = stats_of_lookup(collection, collection.init(seed=SEED), np.arange(32))
    assert counts["num_inserted"] == 32 * share and counts["num_unadmitted"] == 32 * (1 - share)


# --------------------------------------------------------------------------------------------------------------
# Keys that wait: growth, out and in


@pytest.mark.parametrize("num_shards", [None, 2])
def test_growth_keeps_every_count(num_shards):
    """More keys wait than there was room for at first; entries of admitted keys become free."""
    collection = one_table(policies.AdmitByCount(3), num_shards)
    state, num_keys = collection.init(seed=SEED), 30_000
    keys = np.arange(num_keys)
    for start in range(0, num_keys, 10_000):
        state, _ = stats_of_lookup(collection, state, keys[start : start + 10_000])
        (sightings,) = state.stores[0].sightings
        is_taken = (np.asarray(sightings).reshape(-1, 4)[:, :2] != 0xFFFFFFFF).any(axis=1)
        assert is_taken.sum() == start + 10_000 <= len(is_taken) / 2
    assert waiting(collection, state, "user") == dict.fromkeys(range(num_keys), 1)
    num_buckets = [state.stores[0].sightings[0].shape[0]]
    assert num_buckets[0] > MIN_SIGHTINGS * (num_shards or 1)
    state, counts = stats_of_lookup(collection, state, np.repeat(keys[:5_000], 2))
    assert counts["num_inserted"] == 5_000 and counts["num_unadmitted"] == 0
    assert waiting(collection, state, "user") == dict.fromkeys(range(5_000, num_keys), 1)
    for step in range(6):  # other keys come and go: entries of admitted keys are reused
        others = np.repeat(np.arange(4_000) + 10**6 * (step + 1), 3)[:10_000]
        state, counts = stats_of_lookup(collection, state, others)
    assert waiting(collection, state, "user").items() >= dict.fromkeys(range(5_000, num_keys), 1).items()


def test_another_salt_keeps_every_count():
    """If keys found no entry, the index is rebuilt under another salt; keys that wait are found again."""
    collection = one_table(policies.AdmitByCount(2))
    state = collection.init(seed=SEED)
    state, _ = stats_of_lookup(collection, state, np.arange(500))
    store = state.stores[0]
    unplaced, salt = store.counters.at[4].set(1), int(store.counters[6])
    state = dataclasses.replace(state, stores=(dataclasses.replace(store, counters=unplaced),))
    state = collection.grow(state)
    assert int(state.stores[0].counters[4]) == 0 and int(state.stores[0].counters[6]) != salt
    state, counts = stats_of_lookup(collection, state, np.arange(500))
    assert counts["num_inserted"] == 500


def test_without_growth_keys_without_an_entry_give_a_warning():
    """With full buckets the lookup ends, no key is admitted by mistake, and keys without an entry count as refused."""
    collection = one_table(policies.AdmitByCount(2))
    state, num_keys = collection.init(seed=SEED), 5 * MIN_SIGHTINGS
    features = collection.batch({"user": np.arange(num_keys)}).features
    for _ in range(2):
        _, state, plan = programs.lookup(collection)(state, features)
    counts = np.asarray(plan.found[0].counts)[0]
    is_full = np.asarray(state.stores[0].counters)[8] == 4 * MIN_SIGHTINGS
    assert is_full and counts[1] <= 64 and counts[1] + counts[3] == num_keys
    embeddings, state, plan = programs.lookup(collection)(state, features)
    state, stats = programs.update(collection)(state, plan, embeddings)
    of_table = stats.to_dict()["user"]
    assert of_table["num_refused"] - of_table["num_unadmitted"] >= num_keys - 4 * MIN_SIGHTINGS
    assert int(stats.num_unplaced[0]) >= 3 * (num_keys - 4 * MIN_SIGHTINGS)
    with pytest.raises(jaxsok.TableFullError, match="found no index entry"):
        stats.check()
    with pytest.warns(RuntimeWarning, match=r"keys refused so far for want of room.*rebuilds the index"):
        state = collection.grow(state)  # as many keys as one batch has can wait now, and none is lost
    _, state, plan = programs.lookup(collection)(state, features)
    assert np.asarray(state.stores[0].counters)[4] == 0


def test_as_many_keys_wait_at_first_as_there_are_rows():
    """In the first batches, before `grow` has seen any, all keys are counted and get their rows."""
    collection = one_table(policies.AdmitByCount(2), capacity=32768)
    state, features = collection.init(seed=SEED), collection.batch({"user": np.arange(30000)}).features
    for _ in range(2):
        _, state, _ = programs.lookup(collection)(state, features)
    assert collection.num_rows(state) == {"user": 30000}


@pytest.mark.parametrize(("before", "after"), [(None, 4), (4, 2), pytest.param(4, None, marks=pytest.mark.slow)])
def test_waiting_keys_move_to_another_mesh(before, after):
    """Waiting keys exported from one state and imported into another keep their counts."""
    policy, rng = policies.AdmitByCount(4), np.random.default_rng(0)
    old, new = one_table(policy, before), one_table(policy, after)
    state, _ = stats_of_lookup(old, old.init(seed=SEED), rng.integers(0, 40, 64))
    state, _ = stats_of_lookup(old, state, rng.integers(2**63, 2**63 + 40, 64, np.uint64))
    want, rows = waiting(old, state, "user"), programs.rows_of(old, state)
    other = new.init(seed=SEED)
    keys, counts = waiting_keys(old.stores[0], state.stores[0], 0)
    store = admission.with_waiting(
        new.stores[0],
        other.stores[0],
        0,
        keys,
        counts,
        None if after is None else programs.owner_of(keys, "user", after),
        new.shards,
    )
    assert int(np.asarray(store.counters).reshape(-1, 9)[:, 8].sum()) == len(want)
    other = dataclasses.replace(other, stores=(store,))
    assert waiting(new, other, "user") == want and want and rows
    again = np.array(list(want), np.uint64).repeat([3 - n for n in want.values()])  # each key needs one more sighting
    again = np.resize(again, 256) if len(again) == 0 else np.r_[again, np.full(256 - len(again), 2**64 - 1, np.uint64)]
    other, counts = stats_of_lookup(new, other, again)
    assert counts["num_inserted"] == 0 and set(waiting(new, other, "user").values()) <= {3}
    last = np.r_[np.array(list(want), np.uint64), np.full(256 - len(want), 2**64 - 1, np.uint64)]
    other, counts = stats_of_lookup(new, other, last)
    assert counts["num_inserted"] == len(want) == counts["num_rows"] and not waiting(new, other, "user")


def test_waiting_keys_of_a_replicated_table_are_saved_once(tmp_path):
    """The keys of one shard represent all shards: their counts do not add up."""
    options = {"admission": policies.AdmitByCount(4), "placement": jaxsok.REPLICATED, "capacity": 64}
    table = jaxsok.TableSpec("user", 4, SGD, **options)
    collection = programs.over(2, [table], [jaxsok.FeatureSpec("user", "user")])
    features = programs.batch(collection, user=np.array([5, 5, 9, 7]))
    _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
    checkpoint.export_full(tmp_path / "saved", collection, state)
    again = checkpoint.load(tmp_path / "saved", collection)
    assert waiting(collection, again, "user") == waiting(collection, state, "user") == {5: 2, 7: 1, 9: 1}


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("make", [policies.AdmitByCount, functools.partial(policies.AdmitByBloom, num_keys=10_000)])
@pytest.mark.parametrize("num_shards", [None, 4])
def test_lookups_that_read_the_default(num_shards, make, delayed):
    """With a key once per batch these are lookups 1 to n with `delayed`, as in DeepRec, and 1 to n - 1 without."""
    policy = make(3, unadmitted=9.0, delayed=delayed)
    collection = one_table(policy, num_shards)
    state, features = collection.init(seed=SEED), programs.batch(collection, user=np.arange(8))
    read = []
    for _ in range(6):
        embeddings, state, _ = programs.lookup(collection)(state, features)
        is_default = np.asarray(embeddings["user"]) == 9.0
        assert is_default.all() or not is_default.any()
        read.append(bool(is_default.all()))
    assert read == [True] * (3 if delayed else 2) + [False] * (3 if delayed else 4)


@pytest.mark.parametrize("num_shards", [None, pytest.param(4, marks=pytest.mark.slow)])
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_delayed_keys_through_checkpoints(num_shards, data, tmp_path_factory):
    """Lookups of any keys, erases and restores (with the same policy or the other) agree with a dict."""
    checkpoint = pytest.importorskip("jaxsok.checkpoint")
    both = {delayed: one_table(policies.AdmitByCount(2, delayed=delayed), num_shards) for delayed in (False, True)}
    is_delayed, counts, rows = data.draw(st.booleans()), collections.Counter(), set()
    state = both[is_delayed].init(seed=SEED)
    for number in range(data.draw(st.integers(1, 6))):
        collection = both[is_delayed]
        threshold = 3 if is_delayed else 2
        what = data.draw(st.sampled_from(["lookup", "lookup", "erase", "restore"]))
        if what == "erase":
            gone = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True))
            state, num_erased = collection.erase(state, "user", np.array(gone))
            assert int(num_erased) == len(rows & set(gone))
            rows -= set(gone)
            counts = collections.Counter({key: count for key, count in counts.items() if key not in gone})
        elif what == "restore":
            folder = tmp_path_factory.mktemp("delayed") / str(number)
            checkpoint.export_full(folder, collection, state)
            is_delayed = data.draw(st.booleans())
            state = checkpoint.load(folder, both[is_delayed])
            most = 2 if is_delayed else 1  # a key seen often enough for a lower threshold waits for one more sighting
            counts = collections.Counter({key: min(count, most) for key, count in counts.items()})
        else:
            keys = data.draw(st.lists(st.integers(0, 5), min_size=8, max_size=8))
            _, state, _ = programs.lookup(collection)(state, programs.batch(collection, user=np.array(keys)))
            counts.update(key for key in keys if key not in rows)
            rows |= {key for key, count in counts.items() if count >= threshold}
            counts = collections.Counter({key: count for key, count in counts.items() if key not in rows})
        assert set(programs.rows_of(both[is_delayed], state)) == rows
        assert waiting(both[is_delayed], state, "user") == dict(counts)


def test_declarations_of_delayed_admission():
    """The option is visible and bounded, and like the number of sightings it may change between runs."""
    assert "num_sightings=3, delayed=True" in repr(policies.AdmitByCount(3, delayed=True))
    for kind, most in ((policies.AdmitByCount, 2**31 - 1), (policies.AdmitByBloom, 255)):
        assert kind(most).threshold == most == kind(most - 1, delayed=True).threshold
        with pytest.raises(ValueError, match=f"num_sightings: got {most}, wanted an integer from 1 to {most - 1}"):
            kind(most, delayed=True)
        with pytest.raises(TypeError, match="delayed: got 1, wanted True or False"):
            kind(3, delayed=1)
    plain, delayed = (one_table(policies.AdmitByCount(2, delayed=delayed)) for delayed in (False, True))
    assert plain.fingerprint == delayed.fingerprint and plain.stores != delayed.stores
    assert [collection.stores[0].sighting_floors().tolist() for collection in (plain, delayed)] == [[2], [3]]


def test_waiting_keys_of_other_tables_are_refused():
    """Only tables that count have waiting keys."""
    collection = one_table(policies.AdmitByProbability(0.5))
    state = collection.init(seed=SEED)
    assert len(waiting_keys(collection.stores[0], state.stores[0], 0)[0]) == 0
    with pytest.raises(ValueError, match='with_waiting: table "user": admission: got AdmitByProbability'):
        admission.with_waiting(collection.stores[0], state.stores[0], 0, np.arange(3), np.ones(3))


@pytest.mark.parametrize("op", ["erase", "evict"])
def test_nothing_is_forgotten_where_nothing_goes(op):
    """A key that had its sightings while the store was full keeps them after an erase or eviction of no row."""
    collection = one_table(policies.AdmitByCount(2), capacity=2, max_capacity=2, eviction=policies.LeastRecentlyUsed())
    features = programs.batch(collection, user=np.array([1, 1, 2, 2, 3, 3]))
    _, state, _ = programs.lookup(collection)(collection.init(seed=SEED), features)
    before = np.asarray(state.stores[0].sightings[0])
    if op == "erase":
        state, num_gone = collection.erase(state, "user", np.array([99]))
        assert int(num_gone) == 0
    else:
        state, evicted = collection.evict(state, num_rows=2)
        assert evicted.to_dict() == {"user": 0}
    np.testing.assert_array_equal(np.asarray(state.stores[0].sightings[0]), before)
    state, _ = collection.evict(state, num_rows=1)
    assert not np.array_equal(np.asarray(state.stores[0].sightings[0]), before)


@pytest.mark.parametrize(("num_shards", "is_traced"), [(None, True), (4, False)])
def test_an_erased_key_waits_no_longer(num_shards, is_traced, tmp_path):
    """Nothing of it is in later exports, and its count starts from zero; other keys and tables keep theirs."""
    checkpoint = pytest.importorskip("jaxsok.checkpoint")
    options = {"admission": policies.AdmitByCount(3), "capacity": 16, "statistics": True}
    tables = [jaxsok.TableSpec(name, 1, SGD, **options) for name in ("user", "item")]
    features = [jaxsok.FeatureSpec(t.name, t.name) for t in tables]
    collection = programs.over(num_shards, tables, features) if num_shards else jaxsok.Collection(tables, features)
    look = programs.lookup(collection)

    def look_up(state, keys):
        return look(state, programs.batch(collection, user=np.array(keys), item=np.array(keys)))[1]

    forgotten = 0x1234_5678_9ABC_DEF0
    state = look_up(collection.init(seed=SEED), [forgotten, forgotten, 5, 6])
    checkpoint.export_full(tmp_path / "full", collection, state)
    jitted = jax.jit(lambda state, keys: collection.erase(state, "user", keys), donate_argnums=0)
    keys = [forgotten, 5, 99, oracle.PADDING_KEY, forgotten]
    if is_traced:
        state, num_erased = jitted(state, jnp.asarray(programs.words(keys)))
    else:
        state, num_erased = collection.erase(state, "user", programs.as_array(keys))
    assert int(num_erased) == 0
    assert waiting(collection, state, "user") == {6: 1}
    assert waiting(collection, state, "item") == {forgotten: 2, 5: 1, 6: 1}
    checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full")
    state, _ = collection.erase(state, "item", programs.as_array([forgotten]))
    checkpoint.export_full(tmp_path / "later", collection, state)
    words = np.array([forgotten], np.uint64).tobytes()
    assert not [file for file in (tmp_path / "later").iterdir() if words in file.read_bytes()]
    admitted = look_up(jax.tree.map(jnp.copy, state), [forgotten] * 4)
    base = checkpoint.export_full(tmp_path / "admitted", collection, admitted)
    for name in ("user", "item"):
        admitted, num_erased = collection.erase(admitted, name, programs.as_array([forgotten]))
        assert int(num_erased) == 1
    delta = checkpoint.export_delta(tmp_path / "gone", collection, admitted, base).path
    named = {file.name for file in delta.iterdir() if words in file.read_bytes()}
    assert named == {f"table_{number:04d}.tombstones.arrow" for number in range(2)}
    chained = checkpoint.load([tmp_path / "full", tmp_path / "delta"], collection)
    assert waiting(collection, chained, "user") == {6: 1}
    state = look_up(state, [forgotten, forgotten, 6, 6])
    assert collection.contains(state, "user", programs.as_array([forgotten, 6])).tolist() == [False, True]


def test_clearing_a_table_forgets_those_that_wait():
    """`forget` with a table removes its counts; those of other tables stay."""
    tables = [jaxsok.TableSpec(n, 1, SGD, admission=policies.AdmitByCount(3), capacity=16) for n in ("user", "item")]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(t.name, t.name) for t in tables])
    _, state, _ = programs.lookup(collection)(
        collection.init(seed=SEED), programs.batch(collection, user=np.arange(4), item=np.arange(4))
    )
    store = admission.forget(collection.stores[0], state.stores[0], jnp.uint32(0), cleared=0)
    state = dataclasses.replace(state, stores=(store,))
    assert waiting(collection, state, "user") == {} and waiting(collection, state, "item") == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("op", ["assign", "import_table"])
def test_keys_that_are_given_a_row_wait_no_longer(op, num_shards):
    """Keys that get a row no longer wait; after an erase their counts start from zero."""
    tables = [jaxsok.TableSpec(n, 1, SGD, admission=policies.AdmitByCount(3), capacity=16) for n in ("user", "item")]
    features = [jaxsok.FeatureSpec(t.name, t.name) for t in tables]
    collection = programs.over(num_shards, tables, features) if num_shards else jaxsok.Collection(tables, features)
    look = programs.lookup(collection)

    def look_up(state, keys):
        return look(state, programs.batch(collection, user=np.array(keys), item=np.array(keys)))[1]

    state = look_up(collection.init(seed=SEED), [1, 2, 2, 3])
    keys, rows = np.array([2, 9, 1]), np.array([[2.0], [9.0], [1.0]], np.float32)
    if op == "assign":
        state, num_inserted, num_refused = collection.assign(state, "user", keys, rows)
        assert (int(num_inserted), int(num_refused)) == (3, 0)
    else:
        state = collection.import_table(state, "user", jaxsok.Records(keys.astype(np.uint64), rows))
    assert waiting(collection, state, "user") == {3: 1} and waiting(collection, state, "item") == {1: 1, 2: 2, 3: 1}
    np.testing.assert_array_equal(np.asarray(collection.rows_of(state, "user", keys)[0]), rows)
    state, _ = collection.erase(state, "user", np.array([2]))
    state = look_up(state, [2, 2, 7, 7])
    assert collection.contains(state, "user", np.array([1, 2, 9, 7])).tolist() == [True, False, True, False]
    assert collection.contains(state, "item", np.array([2])).tolist() == [True]
    state = look_up(state, [2, 8, 8, 8])
    assert collection.contains(state, "user", np.array([2])).tolist() == [True]


# --------------------------------------------------------------------------------------------------------------
# What is read, what is reported, what it costs


def row_of_key(words, columns):
    """Returns the low word plus the column."""
    return (words[0] % jnp.uint32(7)).astype(jnp.float32) + columns.astype(jnp.float32)


@pytest.mark.parametrize("unadmitted", [0.25, "initial"])
def test_rows_that_xla_works_out(unadmitted):
    """With a traced initializer, new rows are written; excluded keys read the constant or their initial row."""
    initializer = jaxsok.initializers.function(row_of_key, "of_key")
    policy = policies.AdmitByCount(2, unadmitted=unadmitted)
    table = jaxsok.TableSpec("user", 3, SGD, admission=policy, initializer=initializer, capacity=16)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user", combiner=None)])
    features = programs.batch(collection, user=np.array([5, 9, 5, 11]))
    embeddings, state, _ = programs.lookup(collection)(collection.init(seed=SEED), features)
    initial = np.array([5, 9 % 7, 5, 11 % 7])[:, None] + np.arange(3)[None, :]
    want = np.where(np.array([True, False, True, False])[:, None], initial, 0.25 if unadmitted == 0.25 else initial)
    np.testing.assert_allclose(np.asarray(embeddings["user"]), want)
    assert set(programs.rows_of(collection, state)) == {5}
    found, _ = programs.find(collection)(state, features)
    np.testing.assert_allclose(np.asarray(found["user"]), initial)


def test_a_full_store_is_counted_apart():
    """An admitted key without room is an error; an excluded key is not. Both read the table's default."""
    collection = one_table(policies.AdmitByCount(2, unadmitted=3.0), capacity=2, max_capacity=2)
    features = programs.batch(collection, user=np.array([1, 1, 2, 2, 3, 3, 4, 5]))
    embeddings, state, plan = programs.lookup(collection)(collection.init(seed=SEED), features)
    np.testing.assert_array_equal(np.asarray(embeddings["user"])[4:, 0], 3.0)
    state, stats = programs.update(collection)(state, plan, embeddings)
    counts = stats.to_dict()["user"]
    assert (counts["num_inserted"], counts["num_refused"], counts["num_unadmitted"]) == (2, 4, 2)
    with pytest.raises(jaxsok.TableFullError, match='table "user": 2 keys refused'):
        stats.check()
    assert (stats + stats).to_dict()["user"]["num_unadmitted"] == 4


def test_bytes_are_counted():
    """The numbers of memory_estimate equal those of the arrays."""
    state = COLLECTION.init(seed=SEED)
    estimate = COLLECTION.memory_estimate()
    for of_store, store in zip(estimate.stores, state.stores, strict=True):
        want = sum(array.nbytes for array in (*store.sightings, *store.bloom))
        assert of_store.state["admission"] == want > 0
        assert sum(of_store.state.values()) == sum(leaf.nbytes for leaf in jax.tree.leaves(store))


def test_changed_in_place():
    """Sightings, filter and rows stay at their addresses (law 9), and no large array is copied."""
    collection = jaxsok.Collection(*specs(capacity=1 << 14))
    batch = {name: [[1]] * NUM_SAMPLES for name in ("user", "plain", "tag")}
    batch |= {"friends": [[(1, 1.0)]] * NUM_SAMPLES, "ad": [[1]] * NUM_SAMPLES, "basket": [[1, 2]] * NUM_SAMPLES}
    features = collection.batch(raw_of(batch)).features
    step = jax.jit(programs.train_step(collection), donate_argnums=0)
    erase = jax.jit(lambda state, keys: collection.erase(state, "user", keys), donate_argnums=0)
    state = collection.init(seed=SEED)
    text = step.lower(state, features).compile().as_text()
    assert not compiled_cases.table_copies(text, (1 << 14) * 4) and not compiled_cases.host_calls(text)

    def places(state):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.stores, state.step))[:-1]]

    before = places(state)
    state, _, _ = step(state, features)
    state, _ = erase(state, jnp.asarray(programs.words([1])))
    assert places(state) == before


def test_stores_without_admission_pay_nothing():
    """Such stores have no additional operand or array."""
    collection = programs.one_table()
    state = collection.init(seed=SEED)
    assert state.stores[0].sightings == state.stores[0].bloom == ()
    features = programs.batch(collection, user=np.arange(4))
    text = jax.jit(collection.lookup).lower(state, features).as_text()
    (call,) = [line for line in text.splitlines() if "@jaxsok_lookup(" in line]
    # index, counters, table_rows, tables, seed; keys, offsets, weights, features; a slab of rows, one of records
    assert call.split("@jaxsok_lookup(")[1].split(")")[0].count("%") == 11
    assert "admission = 0 : i32" in call


@pytest.mark.parametrize("unadmitted", [float("inf"), float("nan"), 1e39, "zeros", True, None])
def test_what_cannot_be_read_is_refused(unadmitted):
    """The default must be a finite float32 or "initial"."""
    with pytest.raises(ValueError, match=r"policies\.AdmitByCount: unadmitted: got "):
        policies.AdmitByCount(2, unadmitted=unadmitted)


def test_clearing_a_table_empties_its_filter():
    """Only the table's own part is emptied: its keys start from zero, those of other tables keep their counts."""
    policy = policies.AdmitByBloom(2, num_keys=64)
    tables = [jaxsok.TableSpec(n, 1, SGD, admission=policy, capacity=16) for n in ("user", "item")]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(t.name, t.name) for t in tables])
    features = programs.batch(collection, user=np.arange(4), item=np.arange(4))
    _, state, _ = programs.lookup(collection)(collection.init(seed=SEED), features)
    state, _ = collection.clear(state, "user")
    _, state, _ = programs.lookup(collection)(state, features)
    assert collection.num_rows(state) == {"user": 0, "item": 4}
