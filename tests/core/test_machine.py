"""Laws 1 and 5: any sequence of lookup, find, update, erase and grow agrees with a dict of NumPy arrays."""

import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import strategies
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxsok

BATCH = 4
MAX_KEYS = 8
SEED = 7
MOVES_BY_SGD = 0.5
MOVES_BY_ADAM = 0.125
# The machine's store of sgd rows holds at most 28 of the 38 pairs of table and key: it fills up and refuses keys.
MAX_CAPACITY = 14

# Rows are sums of at most a few hundred float32 terms of size <= 2 (the oracle adds in float64); Adam divides by a
# root of such sums. Gradients are positive, so nothing cancels: 1e-5 relative is 80 roundings of 2^-24.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}

SGD = jaxsok.optim.sgd(MOVES_BY_SGD)
ADAM = jaxsok.optim.adam(MOVES_BY_ADAM)
TABLES = [
    jaxsok.TableSpec("user", 4, SGD, capacity=4, max_capacity=MAX_CAPACITY),
    jaxsok.TableSpec("item", 4, SGD, capacity=4, max_capacity=MAX_CAPACITY, unknown="zeros"),
    jaxsok.TableSpec("ad", 3, ADAM, capacity=32),  # at most 19 keys: grows once, to 64
]
COLLECTION = jaxsok.Collection(
    TABLES,
    [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("history", "item", combiner="mean", max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("basket", "item", combiner="sqrtn"),
        jaxsok.FeatureSpec("friends", "user", combiner="sum", weighted=True, max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("ad", "ad", combiner=None, max_keys=MAX_KEYS),
        jaxsok.FeatureSpec("slot", "ad", combiner="mean", weighted=True),
    ],
)


def meeting_keys():
    """Returns keys of one bucket: two with the same home in both tables of a store, and a twin in the high word."""
    state = COLLECTION.init(seed=SEED)
    homes = [programs.aimed_keys(COLLECTION, state, 512, table_id=number).tolist() for number in (0, 1)]
    both = sorted(set(homes[0]) & set(homes[1]))[:2]
    twins = programs.aimed_keys(COLLECTION, state, 2, start=both[0], stride=2**32).tolist()
    return (*both, twins[1])


KEYS = (*strategies.CORNER_KEYS, *meeting_keys())
FEATURES = [
    oracle.Feature("user", "user", "sum", BATCH),
    oracle.Feature("history", "item", "mean", MAX_KEYS),
    oracle.Feature("basket", "item", "sqrtn", BATCH * 3),
    oracle.Feature("friends", "user", "sum", MAX_KEYS, weighted=True),
    oracle.Feature("ad", "ad", None, MAX_KEYS),
    oracle.Feature("slot", "ad", "mean", BATCH * 2, weighted=True),
]
INITIAL_ROWS = {table.name: programs.initial_row(table.name, table.dim, seed=SEED) for table in TABLES}
DIMS = {"user": 4, "history": 4, "basket": 4, "friends": 4, "ad": 3, "slot": 3}
# The largest number of keys of one store in one batch, which `grow` reserves for a step.
KEYS_OF_A_STEP = {"sgd": BATCH + MAX_KEYS + BATCH * 3 + MAX_KEYS, "adam": MAX_KEYS + BATCH * 2}


def signed_weights(bags):
    """Draws weights of any sign, for a row with a linear update rule: no divisor may cancel."""
    return strategies.weights_for(bags, (-1.0, 0.0, 0.5, 2.0))


def weights_with_zero(bags):
    """Draws weights whose sum may be zero, so that their bag is zeros and updates nothing, but never nearly zero."""
    return strategies.weights_for(bags, (0.0, 0.25, 1.0, 2.0))


@st.composite
def batches(draw):
    """Draws one batch in the oracle's form."""
    return {
        "user": [[key] for key in draw(strategies.key_lists(KEYS, BATCH, padding=True))],
        "history": draw(strategies.ragged_bags(KEYS, BATCH, MAX_KEYS, padding=True)),
        "basket": draw(strategies.padded_bags(KEYS, BATCH, 3)),
        "friends": draw(strategies.ragged_bags(KEYS, BATCH, MAX_KEYS).flatmap(signed_weights)),
        "ad": draw(strategies.ragged_bags(KEYS, BATCH, MAX_KEYS)),
        "slot": draw(strategies.padded_bags(KEYS, BATCH, 2).flatmap(weights_with_zero)),
    }


def raw_of(batch):
    """Converts the batch to the library's form."""
    slot = [oracle.keys_and_weights(bag) for bag in batch["slot"]]
    return {
        "user": programs.as_array([bag[0] for bag in batch["user"]]),
        "history": programs.to_bags(batch["history"]),
        "basket": programs.as_array(batch["basket"]),
        "friends": _weight(batch["friends"]),
        "ad": programs.to_bags(batch["ad"]),
        "slot": jaxsok.Bags(
            programs.as_array([keys for keys, _ in slot]),
            weights=np.array([weights for _, weights in slot], np.float32),
        ),
    }


def _weight(bags):
    """Returns ragged bags with weights, also if they are all empty."""
    bags_ = programs.to_bags(bags)
    if bags_.weights is None:
        return jaxsok.Bags(bags_.keys, lengths=bags_.lengths, weights=np.zeros(0, np.float32))
    return bags_


def gradient_values():
    """Draws one small gradient for all outputs of all features; see `gradients_of`."""
    return st.tuples(st.sampled_from([0.25, 0.5, 1.0]), st.integers(0, 3))


def gradients_of(values, num_outputs):
    """Returns gradients that differ by feature, output and column, as float32[num_outputs, dim]."""
    scale, shift = values
    return {
        name: (scale * (1 + (np.arange(rows * DIMS[name]).reshape(rows, DIMS[name]) + shift + i) % 4)).astype(
            np.float32
        )
        for i, (name, rows) in enumerate(num_outputs.items())
    }


PADDING = oracle.PADDING_KEY
EMPTY = {
    "user": [[PADDING]] * BATCH,
    "history": [[]] * BATCH,
    "basket": [[PADDING] * 3] * BATCH,
    "friends": [[]] * BATCH,
    "ad": [[]] * BATCH,
    "slot": [[(PADDING, 1.0)] * 2] * BATCH,
}


class TableMachine(RuleBasedStateMachine):
    """Two stores, three tables, six features; `grow` runs before every lookup that might need it."""

    @initialize()
    def start(self):
        """Starts with an empty collection and an empty oracle."""
        self.state = COLLECTION.init(seed=SEED)
        COLLECTION.batch(raw_of(EMPTY))  # the collection learns the size of the batches
        tables = {
            table.name: oracle.TableOracle(table.name, INITIAL_ROWS[table.name], table.unknown) for table in TABLES
        }
        self.sgd_store = oracle.StoreOracle(
            4, oracle.Sgd(), MOVES_BY_SGD, 2 * MAX_CAPACITY, {name: tables[name] for name in ("user", "item")}
        )
        self.adam_store = oracle.StoreOracle(3, oracle.Adam(), MOVES_BY_ADAM, 2**31, {"ad": tables["ad"]})
        self.oracle = oracle.CollectionOracle([self.sgd_store, self.adam_store], FEATURES)
        self.pending = []
        self.reserved = {"sgd": 0, "adam": 0}
        self.changed = True

    def _grow_if_needed(self):
        rows = {"sgd": self.sgd_store.num_rows, "adam": self.adam_store.num_rows}
        if any(rows[name] + KEYS_OF_A_STEP[name] > self.reserved[name] for name in rows):
            self.grow(steps=1)

    @rule(steps=st.sampled_from([1, 2]))
    def grow(self, steps):
        """Grows; no row, id or count changes."""
        self.state = COLLECTION.grow(self.state, steps=steps)
        self.reserved = {
            "sgd": self.sgd_store.num_rows + steps * KEYS_OF_A_STEP["sgd"],
            "adam": self.adam_store.num_rows + steps * KEYS_OF_A_STEP["adam"],
        }
        self.changed = True

    def _compare(self, embeddings, expected):
        for feature in FEATURES:
            got, want = np.asarray(embeddings[feature.name]), expected[feature.name]
            if feature.name == "ad":  # jagged: zeros past the end
                np.testing.assert_array_equal(got[len(want) :], 0)
                got = got[: len(want)]
            np.testing.assert_allclose(got, want.astype(np.float32), err_msg=feature.name, **TOLERANCE)

    @precondition(lambda self: len(self.pending) < 3)
    @rule(batch=batches(), values=gradient_values())
    def lookup(self, batch, values):
        """Looks up."""
        features = COLLECTION.batch(raw_of(batch)).features
        self._grow_if_needed()
        embeddings, self.state, plan = programs.lookup(COLLECTION)(self.state, features)
        expected, expected_plan = self.oracle.lookup(batch)
        self._compare(embeddings, expected)
        gradients = gradients_of(values, {name: len(array) for name, array in expected.items()})
        self.pending.append((plan, expected_plan, gradients))
        self.changed = True

    @rule(batch=batches())
    def find(self, batch):
        """Finds; reads only."""
        features = COLLECTION.batch(raw_of(batch)).features
        embeddings, stats = programs.find(COLLECTION)(self.state, features)
        expected, counts = self.oracle.find(batch)
        self._compare(embeddings, expected)
        for table in TABLES:
            assert programs.counts(stats, table.name) == counts[table.name]

    def _update(self, num_plans, as_list):
        chosen, self.pending = self.pending[:num_plans], self.pending[num_plans:]
        plans = [plan for plan, _, _ in chosen]
        gradients = [
            {name: jnp.asarray(_pad(name, array)) for name, array in gradient.items()} for _, _, gradient in chosen
        ]
        self.state, stats = programs.update(COLLECTION)(
            self.state, plans if as_list else plans[0], gradients if as_list else gradients[0]
        )
        _, num_stale = self.oracle.update([plan for _, plan, _ in chosen], [gradient for _, _, gradient in chosen])
        assert (int(stats.num_stale) > 0) == (num_stale > 0)
        assert programs.total(stats, "num_nonfinite") == 0
        if num_stale == 0:
            for table in TABLES:
                want = {name: sum(plan.counts[table.name][name] for _, plan, _ in chosen) for name in oracle.COUNTS}
                got = programs.counts(stats, table.name)
                assert got == want, (table.name, got, want)
                positions = sum(f.num_positions for f in FEATURES if f.table == table.name)
                assert sum(got.values()) == num_plans * positions  # law 5
        self.changed = True

    @precondition(lambda self: len(self.pending) >= 1)
    @rule(as_list=st.booleans())
    def update(self, as_list):
        """Updates with the oldest plan."""
        self._update(1, as_list)

    @precondition(lambda self: len(self.pending) >= 2)
    @rule()
    def update_two_plans(self):
        """Updates with two plans at once: each row steps once."""
        self._update(2, True)

    # Erasing makes waiting plans stale for their store, so waiting plans are used up before. test_plan.py tests what a
    # stale plan over two stores does to the other store.
    @rule(table=st.sampled_from(["user", "item", "ad"]), keys=strategies.key_lists(KEYS, 4, padding=True))
    def erase(self, table, keys):
        """Erases keys; keys without a row, and padding, have no effect."""
        while self.pending:
            self._update(1, False)
        self.state, num_erased = COLLECTION.erase(self.state, table, programs.as_array(keys))
        assert int(num_erased) == self.oracle.erase(table, [key for key in keys if key != oracle.PADDING_KEY])
        self.changed = True

    @invariant()
    def tables_agree(self):
        """Keys, row ids and counts agree exactly; rows and optimizer state within rounding."""
        if not getattr(self, "changed", False):
            return
        self.changed = False
        assert COLLECTION.num_rows(self.state) == {
            table.name: len(self.oracle.store_of(table.name).tables[table.name].row_ids) for table in TABLES
        }
        assert int(self.state.step) == self.oracle.step
        for table in TABLES:
            got = COLLECTION.export_table(self.state, table.name)
            want = self.oracle.export_table(table.name)
            assert got["row_ids"].tolist() == [row_id for row_id, _, _, _ in want]
            assert got["keys"].tolist() == [key for _, key, _, _ in want]
            if want:
                rows = np.array([row for _, _, row, _ in want], np.float32)
                np.testing.assert_allclose(got["rows"], rows, **TOLERANCE)
                for i, array in enumerate(got["state"].values()):
                    expected = np.array([state[i] for _, _, _, state in want], np.float32)
                    np.testing.assert_allclose(array.reshape(expected.shape), expected, **TOLERANCE)


def _pad(name, array):
    """Pads gradients of the jagged feature to its buffer; the values past the end must not matter."""
    if name != "ad":
        return array
    full = np.full((MAX_KEYS, array.shape[1]), 1e6, np.float32)
    full[: len(array)] = array
    return full


TestTableMachine = pytest.mark.filterwarnings("ignore:grow. table .* keys refused so far:RuntimeWarning")(
    TableMachine.TestCase
)  # its tables are full at times
