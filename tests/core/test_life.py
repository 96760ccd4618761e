"""The whole life of tables against dicts: every operation in random order, on one device, in host memory, on meshes.

Keys are inserted by lookup (admitted at once, by count, by Bloom filter), by `assign` and by import. They leave by
`erase`, `clear`, `evict`, and by `grow` if a store is at its maximum. Tables move to other collections and back, and
through exports, in full and by deltas, from which the life continues. After each rule the tables equal the
dicts: keys, waiting keys, frequency and last step exactly, rows and optimizer state within rounding. Row ids are not
compared: test_machine.py compares those of one device.
"""

import collections
import copy
import dataclasses
import functools
import os
import pathlib
import tempfile
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import strategies
import test_admission
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxsok
from jaxsok import checkpoint, policies

SEED = 7
PADDING = oracle.PADDING_KEY
NUM_SAMPLES = 8
FEW = 4  # per operation by key

# Values are sums of at most a few hundred float32 terms of size 2; the oracle adds in float64. Rates are powers of two.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
RATES = {"user": 0.25, "ad": 0.125, "tag": 0.5}  # by the first table of a store
SMALL = 0.04  # a row of dim 2 with uniform(-0.05, 0.05) is shorter half of the time

ADAGRAD = jaxsok.optim.rowwise_adagrad(RATES["user"])
ADAM = jaxsok.optim.adam(RATES["ad"])
SGD = jaxsok.optim.sgd(RATES["tag"])
# No key is admitted early: 48 keys in a filter for a thousand, and false positives of one in 10**9.
BLOOM = policies.AdmitByBloom(2, num_keys=1000, false_positive_rate=1e-9, unadmitted=-1.0)
KEYS = (*strategies.CORNER_KEYS, *range(70, 78))


def tables_of(max_capacity, capacity, statistics, device_rows):
    """Declares a store that evicts when full, a store without a maximum, and a store that refuses.

    `max_capacity`: for tables of the first and last stores; `capacity`: for those of the first and second;
    `statistics`: for the last; `device_rows`: of caches of tables in host memory, None on the device.
    """
    tables = _tables_on_the_device(max_capacity, capacity, statistics)
    memory = None if device_rows is None else jaxsok.HostMemory(device_rows=device_rows)
    return [dataclasses.replace(table, memory=memory) for table in tables]


def _tables_on_the_device(max_capacity, capacity, statistics):
    evicting = {"max_capacity": max_capacity[0], "capacity": capacity[0], "eviction": policies.LeastRecentlyUsed()}
    return [
        jaxsok.TableSpec("user", 4, ADAGRAD, admission=policies.AdmitByCount(3, unadmitted=0.5), **evicting),
        jaxsok.TableSpec("item", 4, ADAGRAD, unknown="zeros", **evicting),
        jaxsok.TableSpec("ad", 3, ADAM, capacity=capacity[1], statistics=True, admission=BLOOM),
        jaxsok.TableSpec(
            "shop", 3, ADAM, capacity=capacity[1], admission=policies.AdmitByCount(2, unadmitted="initial")
        ),
        jaxsok.TableSpec(
            "tag",
            2,
            SGD,
            capacity=max_capacity[1],
            max_capacity=max_capacity[1],
            admission=policies.AdmitByCount(2),
            statistics=statistics,
        ),
    ]


def other_tables():
    """Declares the same names for imports: other capacities, admission, statistics; user and item in two stores."""
    return [
        jaxsok.TableSpec("user", 4, ADAGRAD, capacity=16, statistics=True),
        jaxsok.TableSpec("item", 4, ADAGRAD, capacity=200, eviction=policies.LeastFrequentlyUsed()),
        jaxsok.TableSpec("ad", 3, ADAM, capacity=8, admission=policies.AdmitByCount(9), statistics=True),
        jaxsok.TableSpec("shop", 3, ADAM, capacity=8),
        jaxsok.TableSpec("tag", 2, SGD, capacity=40, statistics=True),
    ]


FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("history", "user", combiner="mean", max_keys=2 * NUM_SAMPLES),
    jaxsok.FeatureSpec("item", "item", combiner="sqrtn"),
    jaxsok.FeatureSpec("ad", "ad", combiner="mean", weighted=True, max_keys=2 * NUM_SAMPLES),
    jaxsok.FeatureSpec("shop", "shop"),
    jaxsok.FeatureSpec("tag", "tag", combiner=None),
]
OF_ORACLE = [
    oracle.Feature("user", "user", "sum", NUM_SAMPLES),
    oracle.Feature("history", "user", "mean", 2 * NUM_SAMPLES),
    oracle.Feature("item", "item", "sqrtn", 2 * NUM_SAMPLES),
    oracle.Feature("ad", "ad", "mean", 2 * NUM_SAMPLES, weighted=True),
    oracle.Feature("shop", "shop", "sum", NUM_SAMPLES),
    oracle.Feature("tag", "tag", None, NUM_SAMPLES),
]
NAMES = ("user", "item", "ad", "shop", "tag")
DIMS = {"user": 4, "item": 4, "ad": 3, "shop": 3, "tag": 2}
KEYS_OF_A_STEP = 5 * NUM_SAMPLES  # for the first store


@functools.cache
def collection_of(num_shards, max_capacity=None, capacity=None, statistics=False, device_rows=None):
    """Returns the collection, or with `max_capacity=None` the target of imports; `num_shards=None`: no mesh."""
    tables = other_tables() if max_capacity is None else tables_of(max_capacity, capacity, statistics, device_rows)
    if num_shards is None:
        return jaxsok.Collection(tables, FEATURES)
    return programs.over(num_shards, tables, FEATURES)


@functools.cache
def jit_method(collection, name, **options):
    """Returns a jitted method of a collection, with a donated state if it returns one."""
    donated = 0 if name in ("lookup", "update") else ()
    return jax.jit(getattr(collection, name), donate_argnums=donated, compiler_options=programs.quickly())


@functools.cache
def initial_row(table):
    """Returns what a new row of a table holds."""
    return programs.initial_row(table, DIMS[table], seed=SEED)


# --------------------------------------------------------------------------------------------------------------
# The oracle: dicts


@dataclasses.dataclass(eq=False)
class Line:
    """The data of a key that has a row."""

    row: np.ndarray
    states: list[np.ndarray]
    last_step: int = 0
    frequency: int = 0


@dataclasses.dataclass(eq=False)
class Table:
    """Keys with rows, and the counts of keys without one."""

    name: str
    number: int
    num_sightings: int | None = None
    is_bloom: bool = False
    unadmitted: float | None = None  # what a lookup reads for a key without a row; None: its initial row
    unknown: str = "initial"
    lines: dict[int, Line] = dataclasses.field(default_factory=dict)
    seen: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    num_evicted: int = 0

    @property
    def waiting(self):
        """Returns the keys with exact counts below the threshold."""
        if self.num_sightings is None or self.is_bloom:
            return {}
        return {key: num for key, num in self.seen.items() if num < self.num_sightings}

    def forget(self, is_asked=lambda key: True):
        """Resets the exact counts of admitted keys where `is_asked`, after rows were removed."""
        if not self.is_bloom:
            kept = {key: num for key, num in self.seen.items() if key in self.waiting or not is_asked(key)}
            self.seen = collections.Counter(kept)

    def drop(self, keys):
        """Forgets the exact counts of keys."""
        if not self.is_bloom:
            for key in keys:
                self.seen.pop(key, None)

    def give_rows(self, keys):
        """Admits waiting keys directly, as if they had been seen often enough, even without room."""
        self.seen.update({key: self.num_sightings - self.seen[key] for key in keys if key in self.waiting})

    def initial(self, key):
        """Returns a new row in float64."""
        return np.asarray(initial_row(self.name)(key), np.float64)

    def unread(self, key):
        """Returns what a lookup gives for a key without a row."""
        return self.initial(key) if self.unadmitted is None else np.full(DIMS[self.name], self.unadmitted, np.float64)


@dataclasses.dataclass(eq=False)
class Store:
    """Tables that share their rows."""

    tables: dict[str, Table]
    optimizer: object
    rate: float
    state_names: tuple[str, ...]
    keeps_statistics: bool
    dim: int
    generation: int = 0

    def new_line(self, table, key):
        """Returns the data of a row that was never used."""
        return Line(table.initial(key), self.optimizer.initial_state(self.dim))

    def rank_rows(self, names, policy):
        """Returns (rank, table, key) of the rows of some tables, the first to leave first, and their names."""
        rank = {
            policies.LeastRecentlyUsed: lambda line: (line.last_step,),
            policies.LeastFrequentlyUsed: lambda line: (line.frequency, line.last_step),
        }[type(policy)]
        lines = [
            (*rank(line), self.tables[name].number, key, name)
            for name in names
            for key, line in self.tables[name].lines.items()
        ]
        return [(name, key) for *_, key, name in sorted(lines)]


class Life(oracle.CollectionOracle):
    """All stores. `let_in(store, new (table, key) pairs)` decides which keys get a row if not all fit."""

    def __init__(self, statistics):
        tables = [
            Table("user", 0, 3, unadmitted=0.5),
            Table("item", 1, unknown="zeros"),
            Table("ad", 0, 2, is_bloom=True, unadmitted=-1.0),
            Table("shop", 1, 2),
            Table("tag", 0, 2, unadmitted=0.0),
        ]
        self.tables = {table.name: table for table in tables}
        parts = [
            (("user", "item"), oracle.RowwiseAdagrad(), ("accumulator",), True),
            (("ad", "shop"), oracle.Adam(), ("m", "v"), True),
            (("tag",), oracle.Sgd(), (), statistics),
        ]
        stores = [
            Store({n: self.tables[n] for n in names}, rule, RATES[names[0]], states, keeps, DIMS[names[0]])
            for names, rule, states, keeps in parts
        ]
        super().__init__(stores, OF_ORACLE)

    def lookup(self, batch, clock, let_in):
        """Returns embeddings, a plan, and unadmitted by table; the whole batch is seen before any key is admitted."""
        occurrences = {name: collections.Counter() for name in NAMES}
        for feature in self.features:
            for bag in batch[feature.name]:
                keys, _ = oracle.keys_and_weights(bag)
                occurrences[feature.table].update(key for key in keys if key != PADDING)
        kept_out, inserted = {name: set() for name in NAMES}, set()
        for store in self.stores:
            new = []
            for name, table in store.tables.items():
                for key, num in occurrences[name].items():
                    if key in table.lines:
                        continue
                    if table.num_sightings is not None:
                        table.seen[key] += num
                        if table.seen[key] < table.num_sightings:
                            kept_out[name].add(key)
                            continue
                    new.append((name, key))
            for name, key in let_in(store, new):
                store.tables[name].lines[key] = store.new_line(store.tables[name], key)
                inserted.add((name, key))
            for name, table in store.tables.items():
                for key, num in occurrences[name].items():
                    if key in table.lines:
                        table.lines[key].last_step = clock
                        table.lines[key].frequency += num
        num_unadmitted = collections.Counter()

        def resolve(store, name, key):
            table = store.tables[name]
            if key not in table.lines:
                num_unadmitted[name] += key in kept_out[name]
                return None, table.unread(key), "refused"
            is_new = (name, key) in inserted  # the first of its uses; the others find it
            inserted.discard((name, key))
            return table.lines[key], table.lines[key].row, "inserted" if is_new else "found"

        embeddings, uses, counts = self._walk(batch, resolve)
        return embeddings, oracle.Plan(uses, tuple(s.generation for s in self.stores), counts), num_unadmitted

    def find(self, batch):
        """Reads only."""

        def resolve(store, name, key):
            table = store.tables[name]
            if key in table.lines:
                return table.lines[key], table.lines[key].row, "found"
            return None, np.zeros(store.dim) if table.unknown == "zeros" else table.initial(key), "missing"

        embeddings, _, counts = self._walk(batch, resolve)
        return embeddings, counts

    def update(self, plan, gradients):
        """Steps each row once, or nothing if the plan is stale (rows of a store left). Returns whether it is stale."""
        is_stale = any(g != store.generation for g, store in zip(plan.generations, self.stores, strict=True))
        sums = {}
        for use in plan.uses:
            if use.row_id is not None and not is_stale:
                share = use.factor * np.asarray(gradients[use.feature][use.output], np.float64)
                sums[use.row_id] = (self.store_of(use.table), sums.get(use.row_id, (None, 0.0))[1] + share)
        for line, (store, total) in sums.items():
            line.row, line.states = store.optimizer.step(line.row, line.states, total, store.rate, self.step)
        self.step += 1
        return is_stale


# --------------------------------------------------------------------------------------------------------------
# Batches


def single():
    """Draws one key per sample, some of them padding."""
    return strategies.key_lists(KEYS, NUM_SAMPLES, padding=True).map(lambda keys: [[key] for key in keys])


@st.composite
def bags_of_two(draw):
    """Draws bags of at most two keys: on a mesh any shard's part of them fits its share of the buffer."""
    lengths = draw(st.lists(st.integers(0, 2), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES))
    flat = iter(draw(strategies.key_lists(KEYS, 2 * NUM_SAMPLES, padding=True)))
    return [[next(flat) for _ in range(length)] for length in lengths]


@st.composite
def batches(draw):
    """Draws one batch in the oracle's form."""
    return {
        "user": draw(single()),
        "history": draw(bags_of_two()),
        "item": draw(strategies.padded_bags(KEYS, NUM_SAMPLES, 2)),
        "ad": draw(bags_of_two().flatmap(lambda bags: strategies.weights_for(bags, (0.25, 1.0, 2.0)))),
        "shop": draw(single()),
        "tag": draw(single()),
    }


def raw_of(batch):
    """Converts it to the library's form."""
    raw = {name: programs.as_array([key for (key,) in batch[name]]) for name in ("user", "shop", "tag")}
    ad = programs.to_bags(batch["ad"])
    if ad.weights is None:  # there is no key at all
        ad = jaxsok.Bags(ad.keys, lengths=ad.lengths, weights=np.zeros(0, np.float32))
    return raw | {"history": programs.to_bags(batch["history"]), "item": programs.as_array(batch["item"]), "ad": ad}


def gradients_of(expected, shift):
    """Returns positive numbers that differ by feature, output and column, so that no sum cancels."""
    return {
        name: (0.25 * (1 + (np.arange(array.size).reshape(array.shape) + shift + i) % 4)).astype(np.float32)
        for i, (name, array) in enumerate(expected.items())
    }


def few_keys():
    """Draws keys for operations by key."""
    return strategies.key_lists(KEYS, FEW, padding=True)


def clocks():
    """Draws how far the user's clock advances."""
    return st.sampled_from([0, 1, 1, 3])


def random_records(seed, store, keys, now, with_state=True, with_statistics=True):
    """Returns records of a store's table, last used at some time up to now."""
    rng, size = np.random.default_rng(seed), len(keys)
    widths = {"accumulator": 1, "m": store.dim, "v": store.dim}
    states = {
        name: rng.uniform(0.5, 1.0, (size, widths[name])).astype(np.float32) for name in store.state_names if with_state
    }
    words = [rng.integers(0, most + 1, size, np.uint32) for most in (now, 20)] if with_statistics else (None, None)
    rows = rng.uniform(-1, 1, (size, store.dim)).astype(np.float32)
    return jaxsok.Records(programs.as_array(keys).reshape(-1), rows, states, *words)


# --------------------------------------------------------------------------------------------------------------
# The machine


@dataclasses.dataclass
class Saved:
    """The content at the time an export was written."""

    oracle: Life
    clock: int | None
    now: int
    bits: dict[str, dict[str, np.ndarray]]


class LifeMachine(RuleBasedStateMachine):
    """All operations, in any order."""

    num_shards: int | None = None
    """None: no mesh."""
    max_capacity = (28, 8)
    first_capacity = (20, 28)
    statistics = True
    """Whether the store that refuses keeps statistics; the others do in any case."""
    other_shards: int | None = None
    device_rows: int | None = None
    """The rows of the cache of each store in host memory; None: on the device."""

    @initialize(has_clock=st.booleans(), first=batches(), second=batches())
    def start(self, has_clock, first, second):
        """Makes two steps from an empty state, so that later rules find rows."""
        declared = self.max_capacity, self.first_capacity, self.statistics, self.device_rows
        self.collection = collection_of(self.num_shards, *declared)
        self.state = self.collection.init(seed=SEED)
        self.oracle = Life(self.statistics)
        self.clock = 0 if has_clock else None
        self.pending = []
        self.folder = tempfile.TemporaryDirectory()
        self.num_exports = 0
        self.chain = []
        """An export in full and its deltas: folders."""
        self.saved = None
        """What there was at its end."""
        empty = {name: [[PADDING]] * NUM_SAMPLES for name in ("user", "shop", "tag")}
        empty |= {"history": [[]] * NUM_SAMPLES, "item": [[PADDING] * 2] * NUM_SAMPLES, "ad": [[]] * NUM_SAMPLES}
        self.collection.batch(raw_of(empty))  # the collection learns the size of the batches
        self.train(first, 1)
        self.train(second, 1)

    def teardown(self):
        """Deletes the files."""
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # Helpers

    @property
    def now(self):
        """Returns the value that last steps get."""
        return self.oracle.step if self.clock is None else self.clock

    @property
    def options(self):
        """Returns `clock=` for operations that take it."""
        return {} if self.clock is None else {"clock": self.clock}

    def tick(self, ticks):
        """Advances the user's clock."""
        if self.clock is not None:
            self.clock += ticks

    def shard_of(self, name, key):
        """Returns the shard of a key by the definition of owners."""
        return 0 if self.num_shards is None else int(programs.owner_of([key], name, self.num_shards)[0])

    def by_shard(self, pairs):
        """Groups (table, key) pairs by shard."""
        parts = [[] for _ in range(self.num_shards or 1)]
        for name, key in pairs:
            parts[self.shard_of(name, key)].append((name, key))
        return parts

    def in_use(self, store):
        """Returns the rows in use on each shard."""
        return [len(part) for part in self.by_shard(pairs_of(store))]

    def capacity(self, store):
        """Returns the present capacity of a shard."""
        return self.state.stores[self.oracle.stores.index(store)].capacity // (self.num_shards or 1)

    def let_in(self, store, new):
        """Returns which new keys get a row: the first on one device; on a full shard as many as fit."""
        entered = []
        parts = zip(self.by_shard(new), self.in_use(store), strict=True)
        for part, num_rows in parts:
            room = self.capacity(store) - num_rows
            if len(part) > room:
                hypothesis.event("a full store refuses")
                assert store is self.oracle.store_of("tag") or self.may_refuse, "grow had made room"
                if self.num_shards is not None:
                    there = [pair for pair in part if self.has_row(*pair)]
                    assert len(there) == room
                    part = there
            entered += part[:room]
        return entered

    def has_row(self, name, key):
        """Reads from the library whether a key has a row."""
        return bool(self.collection.contains(self.state, name, programs.as_array([key]))[0])

    may_refuse = False

    # Lookups and updates

    @precondition(lambda self: len(self.pending) < 2)
    @rule(batch=batches(), ticks=clocks())
    def lookup(self, batch, ticks):
        """Looks up: keys are inserted, wait, or are refused; compares embeddings, and law 5 with the update."""
        self.tick(ticks)
        features = self.collection.batch(raw_of(batch)).features
        self.grow()
        options = {name: jnp.uint32(value) for name, value in self.options.items()}  # traced: one program for all
        embeddings, self.state, plan = jit_method(self.collection, "lookup")(self.state, features, **options)
        expected, expected_plan, num_unadmitted = self.oracle.lookup(batch, self.now, self.let_in)
        self.compare(embeddings, expected)
        self.pending.append((plan, expected_plan, num_unadmitted, expected, self.now))

    def compare(self, embeddings, expected):
        for name, want in expected.items():
            np.testing.assert_allclose(np.asarray(embeddings[name]), want.astype(np.float32), err_msg=name, **TOLERANCE)

    @precondition(lambda self: self.pending)
    @rule(shift=st.integers(0, 3))
    def update(self, shift):
        """Updates with the oldest plan, stale or not."""
        plan, expected_plan, num_unadmitted, expected, looked_up_at = self.pending.pop(0)
        gradients = gradients_of(expected, shift)
        self.state, stats = jit_method(self.collection, "update")(self.state, plan, gradients)
        is_stale = self.oracle.update(expected_plan, gradients)
        counted = stats.to_dict()
        num_uses = sum(use.row_id is not None for use in expected_plan.uses)
        assert int(stats.num_stale) == num_uses * is_stale
        hypothesis.event(f"update: stale: {is_stale}")
        if self.chain and looked_up_at < self.saved.now:
            self.chain = []  # rows moved whose last step is before the export: no delta includes them
        for name, table in self.oracle.tables.items():
            counts = programs.counts(stats, name)
            assert counts == expected_plan.counts[name], name
            assert sum(counts.values()) == sum(f.num_positions for f in OF_ORACLE if f.table == name)  # law 5
            assert counted[name]["num_unadmitted"] == num_unadmitted[name]
            assert counted[name]["num_rows"] == len(table.lines)
            assert counted[name]["num_evicted"] == table.num_evicted
            assert counted[name]["num_nonfinite"] == 0

    @rule(batch=batches(), ticks=clocks())
    def train(self, batch, ticks):
        """Makes a step; waiting plans come first, stale or not."""
        while self.pending:
            self.update(0)
        self.lookup(batch, ticks)
        self.update(1)

    @rule(batches=st.lists(batches(), min_size=2, max_size=3))
    def train_on(self, batches):
        """Makes some steps, because rules are drawn evenly and most of a life is training."""
        for batch in batches:
            self.train(batch, 1)

    @rule(batch=batches())
    def find(self, batch):
        """Finds; changes nothing, statistics and counts of sightings included, as the next invariant checks."""
        features = self.collection.batch(raw_of(batch)).features
        embeddings, stats = jit_method(self.collection, "find")(self.state, features)
        expected, counts = self.oracle.find(batch)
        self.compare(embeddings, expected)
        for name in NAMES:
            assert programs.counts(stats, name) == counts[name]
            assert stats.to_dict()[name]["num_unadmitted"] == 0

    # Growth

    @rule()
    def grow(self):
        """Adds rows or, at the first store's maximum, removes some. `hand_over` receives the removed rows."""
        jax.block_until_ready(self.state)  # so that grow reads the number of rows
        store = self.oracle.stores[0]
        limit = self.collection.stores[0].max_capacity
        handed, growth = [], self.collection.growth
        in_use, num_evictions = self.in_use(store), growth.num_evictions
        with warnings.catch_warnings():
            # A collection warns once that keys were refused, and lives share their collections.
            warnings.filterwarnings("ignore", r"grow: table .* keys refused so far")
            self.state = self.collection.grow(
                self.state, hand_over=lambda name, records: handed.append((name, records)), **self.options
            )
        for model_store, capacity in zip(
            self.oracle.stores[1:], (None, self.collection.stores[2].max_capacity), strict=True
        ):
            assert capacity is None or self.capacity(model_store) == capacity
        if growth.num_evictions == num_evictions:
            assert not handed
            if self.num_shards is None:
                assert in_use[0] + KEYS_OF_A_STEP <= self.capacity(store)
            return
        hypothesis.event("evicted by grow")
        assert self.capacity(store) == limit
        leaving = self.check_taken(handed)
        parts = self.by_shard(leaving)
        num_kept = [had - len(part) for had, part in zip(in_use, parts, strict=True)]
        if self.num_shards is None:  # docs/growth.md
            assert in_use[0] > limit - KEYS_OF_A_STEP
            assert num_kept == [min(in_use[0], max(limit // 4, limit - KEYS_OF_A_STEP - (limit + 15) // 16))]
        else:  # each shard down to the same number
            most = max(num_kept)
            assert all(kept == most or kept == had for kept, had in zip(num_kept, in_use, strict=True))
        self.leave(store, leaving, self.lowest(store, tuple(store.tables), store_policy(store), num_kept))

    # Rows leave

    def check_taken(self, handed):
        """Checks the (table, key) pairs that a hand-over received: each once, with all its data in the dicts."""
        pairs = []
        for name, records in handed:
            table, store = self.oracle.tables[name], self.oracle.store_of(name)
            assert records.num_rows
            lines = [table.lines[key] for key in records.keys.tolist()]
            self.compare_lines(store, name, lines, records.rows, records.state, records.last_step, records.frequency)
            pairs += [(name, key) for key in records.keys.tolist()]
        assert len(set(pairs)) == len(pairs)
        return pairs

    def lowest(self, store, names, policy, num_kept):
        """Returns the rows that leave if each shard keeps so many."""
        parts = self.by_shard(store.rank_rows(names, policy))
        return [pair for part, kept in zip(parts, num_kept, strict=True) for pair in part[: len(part) - kept]]

    def leave(self, store, got, wanted):
        """Removes rows from the dicts."""
        assert set(got) == set(wanted)
        for name, key in wanted:
            del store.tables[name].lines[key]
            if store is self.oracle.stores[0]:  # the store with a policy
                store.tables[name].num_evicted += 1
        self.lose(store, wanted)

    def lose(self, store, gone):
        """Handles removed rows: if there are any, earlier plans are stale and their shards forget admitted keys."""
        store.generation += bool(gone)
        shards = {self.shard_of(*pair) for pair in gone}
        for name, table in store.tables.items():
            table.forget(lambda key, name=name: self.shard_of(name, key) in shards)

    @rule(
        whose=st.sampled_from([None, "user", "item", "ad", "shop"]),
        policy=st.sampled_from([policies.LeastRecentlyUsed(), policies.LeastFrequentlyUsed()]),
        is_own=st.booleans(),
        num_rows=st.sampled_from([0, 2, 5, 9, 14, 100]),
        is_handed=st.booleans(),
    )
    def evict_to_a_budget(self, whose, policy, is_own, num_rows, is_handed):
        """Evicts from a table, or from all of the store with a policy, by its own policy or the call's."""
        if whose is None or (is_own and whose in ("user", "item")):
            policy = None
        store = self.oracle.stores[0] if whose is None else self.oracle.store_of(whose)
        names = tuple(store.tables) if whose is None else (whose,)
        asked = [pair for pair in pairs_of(store) if pair[0] in names]
        handed, before = [], {name: self.keys_of(name) for name in store.tables}
        hand_over = {"hand_over": lambda name, records: handed.append((name, records))} if is_handed else {}
        self.state, evicted = self.collection.evict(
            self.state, whose, policy, num_rows=num_rows, **self.options, **hand_over
        )
        after = {name: self.keys_of(name) for name in store.tables}
        left = [(name, key) for name in names for key in before[name] - after[name]]
        had = [len(part) for part in self.by_shard(asked)]
        num_kept = [n - len(part) for n, part in zip(had, self.by_shard(left), strict=True)]
        assert sum(num_kept) == min(num_rows, len(asked))
        for kept, num in zip(num_kept, had, strict=True):  # as equal as possible
            assert kept == num or max(num_kept) <= kept + 1
        self.check_counts(evicted, left)
        hypothesis.event(f"evicted to a budget: {bool(left)}")
        if is_handed:  # evicted and kept rows are all rows
            assert set(self.check_taken(handed)) == set(left)
        self.leave(store, left, self.lowest(store, names, policy or store_policy(store), num_kept))

    def keys_of(self, name):
        """Returns the keys as exported."""
        keys = [key for chunk in self.collection.export_chunks(self.state, name) for key in chunk.keys.tolist()]
        assert len(set(keys)) == len(keys)
        return set(keys)

    def check_counts(self, evicted, left):
        numbers = collections.Counter(name for name, _ in left)
        assert evicted.to_dict() == {name: numbers[name] for name in NAMES}

    @rule(whose=st.sampled_from(["user", "item", "ad", "shop"]), steps=st.sampled_from([0, 1, 3]))
    def evict_by_time(self, whose, steps):
        """Evicts rows not used for longer than `steps`; a last use ahead of the clock counts as recent."""
        store = self.oracle.store_of(whose)
        lines = store.tables[whose].lines
        left = [(whose, key) for key, line in lines.items() if self.now - line.last_step > steps]
        handed = []
        self.state, evicted = self.collection.evict(
            self.state,
            whose,
            policies.TimeToLive(steps),
            hand_over=lambda name, records: handed.append((name, records)),
            **self.options,
        )
        self.check_counts(evicted, left)
        hypothesis.event(f"evicted by time: {bool(left)}")
        self.leave(store, self.check_taken(handed), left)

    @rule()
    def evict_small_rows(self):
        """Evicts from a table without statistics."""
        store = self.oracle.store_of("tag")
        norms = {key: float(np.sqrt((line.row**2).sum())) for key, line in store.tables["tag"].lines.items()}
        self.state, evicted = self.collection.evict(self.state, "tag", policies.SmallNorm(SMALL))
        after = self.keys_of("tag")
        left = [("tag", key) for key in norms if key not in after]
        self.check_counts(evicted, left)
        wanted = {key for key, norm in norms.items() if norm < SMALL}
        is_close = {key for key, norm in norms.items() if abs(norm - SMALL) < 1e-4}  # rounding decides
        assert {key for _, key in left} - is_close == wanted - is_close
        self.leave(store, left, left)

    @rule(name=st.sampled_from(NAMES), keys=few_keys())
    def erase(self, name, keys):
        """Erases keys, also those that wait; padding and absent keys have no effect."""
        store = self.oracle.store_of(name)
        gone = {key for key in keys if key in store.tables[name].lines}
        self.state, num_erased = self.collection.erase(self.state, name, programs.as_array(keys))
        assert int(num_erased) == len(gone)
        for key in gone:
            del store.tables[name].lines[key]
        store.tables[name].drop(keys)
        self.lose(store, [(name, key) for key in gone])

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name):
        """Removes all keys, including waiting keys, and empties the table's part of the filter."""
        self.state, num_erased = self.collection.clear(self.state, name)
        assert int(num_erased) == len(self.oracle.tables[name].lines)
        self.clear_rows(name)

    def clear_rows(self, name):
        """Clears a table in the dicts."""
        table, store = self.oracle.tables[name], self.oracle.store_of(name)
        gone = [(name, key) for key in table.lines]
        table.lines, table.seen = {}, collections.Counter()
        self.lose(store, gone)

    # By key

    @rule(name=st.sampled_from(NAMES), keys=few_keys())
    def read(self, name, keys):
        """Compares `contains` and `rows_of`."""
        table = self.oracle.tables[name]
        is_there = self.collection.contains(self.state, name, programs.as_array(keys))
        rows, also = self.collection.rows_of(self.state, name, programs.as_array(keys))
        want = [key in table.lines for key in keys]
        assert np.asarray(is_there).tolist() == np.asarray(also).tolist() == want
        zeros = np.zeros(DIMS[name])
        wanted = np.array([table.lines[key].row if key in table.lines else zeros for key in keys])
        np.testing.assert_allclose(np.asarray(rows), wanted, **TOLERANCE)

    @rule(name=st.sampled_from(NAMES), keys=few_keys(), seed=st.integers(0, 9), ticks=clocks())
    def assign(self, name, keys, seed, ticks):
        """Sets rows, regardless of admission; nothing grows."""
        self.tick(ticks)
        table, store = self.oracle.tables[name], self.oracle.store_of(name)
        rows = np.random.default_rng(seed).uniform(-1, 1, (FEW, DIMS[name])).astype(np.float32)
        self.state, num_inserted, num_refused = self.collection.assign(
            self.state, name, programs.as_array(keys), rows, **self.options
        )
        new = [(name, key) for key in dict.fromkeys(keys) if key != PADDING and key not in table.lines]
        new.sort(key=lambda pair: pair[1] not in table.waiting)  # those that wait for admission come first
        self.may_refuse = True
        entered = self.let_in(store, new)
        self.may_refuse = False
        table.give_rows(key for _, key in new)
        for _, key in entered:
            table.lines[key] = store.new_line(table, key)
        assert int(num_inserted) == len(entered)
        refused = {key for _, key in new} - {key for _, key in entered}
        assert int(num_refused) == sum(key in refused for key in keys)
        for key, row in zip(keys, rows, strict=True):
            if key in table.lines:
                table.lines[key].row, table.lines[key].last_step = np.asarray(row, np.float64), self.now

    # Import and export

    @rule(
        name=st.sampled_from(NAMES),
        keys=st.lists(st.sampled_from(KEYS), max_size=8, unique=True),
        seed=st.integers(0, 9),
        with_state=st.booleans(),
        with_statistics=st.booleans(),
        reset_state=st.booleans(),
    )
    def import_records(self, name, keys, seed, with_state, with_statistics, reset_state):
        """Imports; what the records lack stays or is initial, and a chunk that does not fit changes nothing."""
        table, store = self.oracle.tables[name], self.oracle.store_of(name)
        records = random_records(seed, store, keys, self.now, with_state, with_statistics)
        new = self.by_shard((name, key) for key in keys if key not in table.lines)
        limit = self.collection.stores[self.oracle.stores.index(store)].max_capacity
        fits = limit is None or all(n + len(p) <= limit for n, p in zip(self.in_use(store), new, strict=True))
        options = {"reset_state": reset_state, **self.options}
        hypothesis.event(f"import fits: {fits}")
        if not fits:
            with pytest.raises(jaxsok.TableFullError, match="nothing of the chunk was entered") as caught:
                self.collection.import_table(self.state, name, records, **options)
            self.state = getattr(caught.value, "state", self.state)
            return
        self.state = self.collection.import_table(self.state, name, records, **options)
        if self.chain and with_statistics and (records.last_step < self.saved.now).any():
            self.chain = []  # as documented, a full export is needed next
        self.enter(name, records, reset_state)

    def enter(self, name, records, reset_state=False):
        """Imports records into the dicts."""
        table, store = self.oracle.tables[name], self.oracle.store_of(name)
        table.give_rows(key for key in records.keys.tolist() if key not in table.lines)
        for i, key in enumerate(records.keys.tolist()):
            line = table.lines.get(key)
            if line is None or reset_state:
                fresh = store.new_line(table, key)
                line = table.lines.setdefault(key, fresh)
                line.states = fresh.states
            line.row, line.last_step = np.asarray(records.rows[i], np.float64), self.now
            if records.state:
                line.states = [np.asarray(records.state[n][i], np.float64) for n in store.state_names]
            if records.last_step is not None:
                line.last_step, line.frequency = int(records.last_step[i]), int(records.frequency[i])
        store.generation += records.num_rows > 0

    @rule(name=st.sampled_from(NAMES), chunk_rows=st.sampled_from([3, 100]), comes_back=st.booleans())
    def move(self, name, chunk_rows, comes_back):
        """Moves a table to another collection and perhaps back, to the bit, whatever the mesh, capacity or store."""
        store = self.oracle.store_of(name)
        other = collection_of(self.other_shards)
        there = other.init(seed=1)
        there = other.import_table(
            there, name, self.collection.export_chunks(self.state, name, chunk_rows=chunk_rows), clock=5
        )
        first, second = bits_by_key(self.collection, self.state, name), bits_by_key(other, there, name)
        for column, bits in first.items():
            np.testing.assert_array_equal(bits, second[column], err_msg=column)
        if not store.keeps_statistics:  # then records have none
            assert (second["last_step"] == 5).all() and (second["frequency"] == 0).all()
        assert sum(other.num_rows(there).values()) == len(self.oracle.tables[name].lines)
        if not comes_back:
            return
        lines = self.oracle.tables[name].lines
        self.clear(name)
        self.state = self.collection.import_table(self.state, name, other.export_chunks(there, name, chunk_rows=7))
        self.oracle.tables[name].lines = lines
        store.generation += len(lines) > 0
        third = bits_by_key(self.collection, self.state, name)
        assert first.keys() == third.keys()
        for column, bits in first.items():
            np.testing.assert_array_equal(bits, third[column], err_msg=column)

    # Exports

    def save(self, write, *args):
        """Writes a new link of the chain, and keeps the present content."""
        self.num_exports += 1
        folder = pathlib.Path(self.folder.name) / str(self.num_exports)
        exported = write(folder, self.collection, self.state, *args, **self.options)
        assert exported.clock == self.now
        self.chain.append(folder)
        bits = {name: bits_by_key(self.collection, self.state, name) for name in NAMES}
        self.saved = Saved(copy.deepcopy(self.oracle), self.clock, self.now, bits)
        return exported

    @rule()
    def export_full(self):
        """Exports everything."""
        self.chain = []
        exported = self.save(checkpoint.export_full)
        assert exported.num_rows == {name: len(table.lines) for name, table in self.oracle.tables.items()}

    @precondition(lambda self: self.chain and self.statistics)
    @rule()
    def export_delta(self):
        """Exports the changes and the removed keys."""
        before = self.saved.oracle.tables
        exported = self.save(checkpoint.export_delta, self.chain[-1])
        for name, table in self.oracle.tables.items():
            gone = set(before[name].lines) - set(table.lines)
            assert exported.num_tombstones[name] >= len(gone)
            hypothesis.event(f"tombstones: {bool(gone)}")

    @precondition(lambda self: self.chain)
    @rule(is_elsewhere=st.booleans(), one_by_one=st.booleans())
    def load(self, is_elsewhere, one_by_one):
        """Loads into the other collection, or into this collection, which continues from there."""
        collection = collection_of(self.other_shards) if is_elsewhere else self.collection
        if one_by_one:
            state = checkpoint.load(self.chain[0], collection)
            for base, delta in zip(self.chain, self.chain[1:], strict=False):
                state = checkpoint.apply_delta(delta, collection, state, after=base)
        else:
            state = checkpoint.load(self.chain[-1], collection)
        hypothesis.event(f"loaded {len(self.chain)} links, elsewhere: {is_elsewhere}")
        for name in NAMES:
            loaded = bits_by_key(collection, state, name)
            for column, bits in self.saved.bits[name].items():
                np.testing.assert_array_equal(loaded[column], bits, err_msg=f"{name}: {column}")
        if is_elsewhere:
            return
        self.state, self.clock, self.pending = state, self.saved.clock, []
        self.oracle = copy.deepcopy(self.saved.oracle)
        for table in self.oracle.tables.values():
            table.forget()  # only waiting keys are saved

    # Invariants after each rule

    def compare_lines(self, store, name, lines, rows, states, last_steps, frequencies):
        """Compares statistics exactly, numbers within rounding."""
        if lines:
            want = np.array([line.row for line in lines], np.float32)
            np.testing.assert_allclose(rows, want, err_msg=name, **TOLERANCE)
        assert tuple(states) == store.state_names
        for i, array in enumerate(states.values()):
            for line, part in zip(lines, array, strict=True):
                np.testing.assert_allclose(part, line.states[i].astype(np.float32), err_msg=name, **TOLERANCE)
        assert (last_steps is not None) == (frequencies is not None) == store.keeps_statistics
        if store.keeps_statistics:
            assert last_steps.tolist() == [line.last_step for line in lines]
            assert frequencies.tolist() == [line.frequency for line in lines]

    @invariant()
    def all_agrees(self):
        """Keys, owners, rows, optimizer state, statistics, waiting keys and the step agree."""
        if not hasattr(self, "state"):
            return
        assert int(self.state.step) == self.oracle.step
        assert self.collection.num_rows(self.state) == {n: len(t.lines) for n, t in self.oracle.tables.items()}
        for name, table in self.oracle.tables.items():
            store = self.oracle.store_of(name)
            got = self.collection.export_table(self.state, name)
            keys = got["keys"].tolist()
            assert len(keys) == len(table.lines) and set(keys) == set(table.lines)
            if self.num_shards is not None:
                np.testing.assert_array_equal(got["shards"], programs.owner_of(got["keys"], name, self.num_shards))
            lines = [table.lines[key] for key in keys]
            statistics = got.get("last_step"), got.get("frequency")
            self.compare_lines(store, name, lines, got["rows"], got["state"], *statistics)
            assert test_admission.waiting(self.collection, self.state, name) == table.waiting, name


def pairs_of(store):
    """Returns (table, key) of all rows."""
    return [(name, key) for name, table in store.tables.items() for key in table.lines]


def store_policy(store):
    """Returns the policy of the only store that has one."""
    assert "user" in store.tables
    return policies.LeastRecentlyUsed()


def bits_by_key(collection, state, name):
    """Returns all columns of a table's export except row ids and shards, in the order of the keys."""
    table = collection.export_table(state, name)
    order = np.argsort(table["keys"])
    columns = {"keys": table["keys"], "rows": table["rows"], **table["state"]}
    columns |= {column: table[column] for column in ("last_step", "frequency") if column in table}
    return {column: programs.bits(array[order]) for column, array in columns.items()}


class LifeOverTwo(LifeMachine):
    """The same machine over two shards; tags have no statistics. Stores begin large, so programs are few."""

    num_shards, max_capacity, first_capacity, statistics = 2, (32, 2), (32, 100), False


class LifeOverFour(LifeMachine):
    """The same machine over four shards; moved tables go to two."""

    num_shards, max_capacity, first_capacity, other_shards = 4, (44, 2), (44, 100), 2


class LifeInHostMemory(LifeMachine):
    """The same machine over tables in host memory, with caches of fewer rows than a batch uses."""

    device_rows = 5


def settings_of(num_examples):
    """Returns settings for few, repeatable lives; with JAXSOK_SLOW=1 for many longer, random lives, with shrinking."""
    if os.environ.get("JAXSOK_SLOW") == "1":
        return hypothesis.settings(max_examples=15 + 15 * num_examples, stateful_step_count=40)
    phases = (hypothesis.Phase.generate,)  # shrinking takes minutes
    return hypothesis.settings(max_examples=num_examples, stateful_step_count=10, derandomize=True, phases=phases)


def needs(num_devices):
    """Returns a mark that skips a test if there are too few devices."""
    return pytest.mark.skipif(len(jax.devices()) < num_devices, reason=f"needs {num_devices} devices")


TestLife = LifeMachine.TestCase
TestLife.settings = settings_of(4)
TestLifeInHostMemory = LifeInHostMemory.TestCase
TestLifeInHostMemory.settings = settings_of(1)
TestLifeOverTwo = needs(2)(LifeOverTwo.TestCase)
TestLifeOverTwo.settings = settings_of(1)
TestLifeOverFour = needs(4)(LifeOverFour.TestCase)
TestLifeOverFour.settings = settings_of(1)


def test_a_count_goes_with_a_row_that_was_assigned():
    """`assign` bypasses admission: a waiting key stops waiting, and starts from zero after that row is removed."""
    policy = policies.AdmitByCount(3)
    collection = programs.one_table(admission=policy)
    state = programs.insert(collection, collection.init(seed=SEED), [7])
    state, *_ = collection.assign(state, "user", np.array([7]), np.ones((1, 4), np.float32))
    state, _ = collection.erase(state, "user", np.array([7]))
    assert test_admission.waiting(collection, state, "user") == {}
    state = programs.insert(collection, state, [7, 7])
    assert collection.num_rows(state) == {"user": 0}
    state = programs.insert(collection, state, [7])
    assert collection.num_rows(state) == {"user": 1}
    state, _ = collection.erase(state, "user", np.array([7]))
    assert test_admission.waiting(collection, state, "user") == {}


def test_waiting_keys_get_the_last_rows():
    """`assign` to a table with a single row left gives it to the first key that waits for admission."""
    collection = programs.one_table(admission=policies.AdmitByCount(3), capacity=4, max_capacity=4)
    state = programs.insert(collection, collection.init(seed=SEED), [1, 1, 1, 2, 2, 2, 3, 3, 3, 8, 9])
    assert test_admission.waiting(collection, state, "user") == {8: 1, 9: 1}
    state, num_inserted, num_refused = collection.assign(
        state, "user", np.array([7, 1, 9, 8]), np.ones((4, 4), np.float32)
    )
    assert (int(num_inserted), int(num_refused)) == (1, 2)
    assert set(collection.export_table(state, "user")["keys"].tolist()) == {1, 2, 3, 9}


def test_a_key_that_waited_learns_nothing_later():
    """A use before the key had a row steps no row, even if the update follows after the key got one."""
    policy = policies.AdmitByCount(2)
    table = jaxsok.TableSpec("user", 2, jaxsok.optim.sgd(1.0), admission=policy, capacity=64)
    for num_shards in (None, *(n for n in (2,) if len(jax.devices()) >= n)):
        features = [jaxsok.FeatureSpec("user", "user")]
        collection = (
            jaxsok.Collection([table], features) if num_shards is None else programs.over(num_shards, [table], features)
        )
        state = collection.init(seed=SEED)
        batch = collection.batch({"user": np.array([7, 8])}).features
        first, state, waiting = collection.lookup(state, batch)
        second, state, _ = collection.lookup(state, batch)
        ones = jax.tree.map(jnp.ones_like, second)
        state, _ = collection.update(state, waiting, ones)
        rows, is_there = collection.rows_of(state, "user", np.array([7, 8]))
        assert np.asarray(is_there).all() and (np.asarray(first["user"]) == 0).all()
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(second["user"]), err_msg=f"{num_shards} shards")
