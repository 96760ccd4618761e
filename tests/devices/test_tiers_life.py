"""Tables in host memory through a random life with lookups ahead, next to the same tables on the device (law 11).

Two collections do the same: train, with the next batch looked up ahead or not, grow, evict, erase, assign, clear, find
and export. Embeddings, norms, counts and answers have the same bits after each step, and at times all arrays outside
the tier. Batches draw from few keys, so that rows leave and come back, and released row ids get new rows. On a GPU rows
are read and written while later work runs, so that a missing wait shows here.
"""

import os

import hypothesis
import jax
import numpy as np
import pytest
import test_tiers
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import jaxsok
from jaxsok import growth
from jaxsok.plan import Plan
from jaxsok.records import Records

NUM_KEYS = 90
"""Keys of all batches; both stores hold fewer."""
CACHES = (0, 1, 24, 40, 90)
EVICTING = {"capacity": 48, "max_capacity": 64, "eviction": test_tiers.LRU}
TABLES = [
    jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.05), **EVICTING),
    jaxsok.TableSpec("item", 4, jaxsok.optim.adam(0.05), row_gradient="sum", unknown="zeros", **EVICTING),
    jaxsok.TableSpec("half", 5, test_tiers.LIFTED, dtype="bfloat16", **EVICTING),
]
NAMES = [table.name for table in TABLES]
test_tiers.SPECS["random life"] = TABLES

seeds = st.integers(0, 2**20)
keys = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=12, unique=True).map(np.array)
names = st.sampled_from(NAMES)


class TieredLife(RuleBasedStateMachine):
    """Both collections, what each returned, and the batch that both have looked up ahead."""

    staleness = 0

    @initialize(device_rows=st.sampled_from(CACHES))
    def start(self, device_rows):
        """Makes both states, empty."""
        self.collections = [test_tiers.collection_of("random life", rows) for rows in (None, device_rows)]
        for each in self.collections:  # what other lives taught them must not decide when they grow
            each.growth = growth.GrowthTracker.of(each.stores, each.tables, each.shards)
        self.states = [collection.init(seed=3, salt=5) for collection in self.collections]
        self.ahead = None
        """Raw features of the batch in flight."""

    def raw(self, seed):
        """Draws a batch, whose keys are few neighbours and some others."""
        rng = np.random.default_rng(seed)
        near, raw = (rng.integers(0, NUM_KEYS) + np.arange(20)) % NUM_KEYS, {}
        for name in NAMES:
            lengths = rng.integers(0, 4, test_tiers.NUM_SAMPLES)
            weights = rng.uniform(0.5, 2.0, lengths.sum()).astype(np.float32)
            raw[name] = rng.choice(near, test_tiers.NUM_SAMPLES)
            raw[f"{name}_bag"] = jaxsok.Bags(rng.choice(near, lengths.sum()), lengths=lengths, weights=weights)
        return raw

    def do(self, operation):
        """Does an operation of (collection, state), which returns a state and more, twice; compares what it said."""
        out = []
        for place, collection in enumerate(self.collections):
            self.states[place], *said = operation(collection, self.states[place])
            out.append(jax.device_get(said))
        jax.tree.map(test_tiers.assert_same_bits, *out)

    def step(self, raw, following=None):
        """Makes a step of a batch, in which another one is looked up ahead."""
        results = []
        for place, collection in enumerate(self.collections):
            features = [collection.batch(each).features for each in (raw, following) if each is not None]
            plan = Plan(features[0], following=tuple(map(Plan, features[1:])), staleness=self.staleness)
            state = collection.grow(self.states[place], plan)
            state, *out = test_tiers.step_of(collection)(state, plan)
            self.states[place] = state
            results.append(jax.device_get(out))
        # A drained state looks nothing up ahead: `grow` drains it where rows must leave.
        numbers = {len(state.ahead) for state in self.states}
        assert len(numbers) == 1
        self.ahead = following if numbers.pop() else None
        test_tiers.assert_same_results([results[0]], [results[1]])

    def land(self):
        """Steps the batch in flight, so that nothing is."""
        if self.ahead is not None:
            self.step(self.ahead)
        assert not any(state.ahead for state in self.states)

    def train_once(self, seed, is_ahead):
        """Steps the batch in flight or a new one."""
        raw = self.raw(seed) if self.ahead is None else self.ahead
        self.step(raw, self.raw(seed + 1) if is_ahead else None)

    @rule(seed=seeds, is_ahead=st.booleans())
    def train(self, seed, is_ahead):
        """Makes a step."""
        self.train_once(seed, is_ahead)

    @rule(seed=seeds, num_steps=st.integers(2, 5))
    def train_ahead(self, seed, num_steps):
        """Makes some steps with lookups ahead, since rules are drawn evenly and most of a life is training."""
        for number in range(num_steps):
            self.train_once(seed + 7 * number, True)

    @rule(name=names, num_rows=st.integers(0, 48))
    def evict(self, name, num_rows):
        """Keeps the rows that were used last."""
        self.land()

        def evict(collection, state):
            state, evicted = collection.evict(state, name, num_rows=num_rows)
            return state, evicted.to_dict()

        self.do(evict)

    @rule(name=names, keys=keys)
    def erase(self, name, keys):
        """Releases row ids, which later keys get."""
        self.land()
        self.do(lambda collection, state: collection.erase(state, name, keys))

    @rule(name=names, keys=keys, seed=seeds)
    def assign(self, name, keys, seed):
        """Sets rows, new ones as well, where there is room."""
        self.land()
        dim = next(table.dim for table in TABLES if table.name == name)
        rows = np.random.default_rng(seed).normal(size=(keys.size, dim)).astype(np.float32)
        self.do(lambda collection, state: collection.assign(state, name, keys, rows))

    @rule(name=names)
    def clear(self, name):
        """Releases all rows of a table."""
        self.land()
        self.do(lambda collection, state: collection.clear(state, name))

    @rule(name=names, keys=keys)
    def bring_in(self, name, keys):
        """Imports records without optimizer state; a full table refuses them and stays as it is."""
        self.land()
        spec = next(table for table in TABLES if table.name == name)
        records = Records(keys.astype(np.uint64), np.ones((keys.size, spec.dim), np.dtype(spec.dtype)))
        said = set()
        for place, collection in enumerate(self.collections):
            try:
                self.states[place] = collection.import_table(self.states[place], name, [records])
                said.add("")
            except jaxsok.TableFullError as error:
                said.add(str(error))
        assert len(said) == 1

    @rule(seed=seeds)
    def find(self, seed):
        """Evaluates a batch."""
        self.land()
        raw = self.raw(seed)
        self.do(lambda collection, state: (state, collection.find(state, collection.batch(raw).features)))

    @rule()
    def compare(self):
        """Compares everything outside the tier."""
        self.land()
        (plain, tiered), (state, other) = self.collections, self.states
        test_tiers.assert_law(plain, state, tiered, other)
        (cache, *_) = tiered.cache_stats(other)
        assert cache.num_cached <= cache.num_slots

    def teardown(self):
        """Compares once more."""
        if hasattr(self, "states"):
            self.compare()


class StaleTieredLife(TieredLife):
    """The same, where rows looked up ahead miss the update before."""

    staleness = 1


def settings_of(num_examples):
    """Returns settings for few, repeatable lives; with JAXSOK_SLOW=1 for many longer, random lives, with shrinking."""
    if os.environ.get("JAXSOK_SLOW") == "1":
        return hypothesis.settings(max_examples=20 * num_examples, stateful_step_count=40)
    phases = (hypothesis.Phase.generate,)  # shrinking takes minutes
    return hypothesis.settings(max_examples=num_examples, stateful_step_count=10, derandomize=True, phases=phases)


TestTieredLife = pytest.mark.filterwarnings("ignore:grow")(TieredLife.TestCase)
TestTieredLife.settings = settings_of(3)
TestStaleTieredLife = pytest.mark.filterwarnings("ignore:grow")(StaleTieredLife.TestCase)
TestStaleTieredLife.settings = settings_of(1)
