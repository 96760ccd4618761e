"""Partial bags: if owners of rows sum the bags of a feature, every path gives the results of one device."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import programs
import pytest
import strategies
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import checkpoint, policies
from jaxsok.checkpoint import TablesRestore, TablesSave
from jaxsok.plan import Uses

SEED = 5
NUM_SAMPLES = 12  # divisible by every mesh in use
MESHES = (pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow))  # below: four shards
MAX_KEYS = 48
SMALL = 3  # a send capacity that takes many rounds

# --------------------------------------------------------------------------------------------------------------
# Agreement with one device


def row_of_word(words, columns):
    """Computes rows in XLA from the low word of the key."""
    return (words[0] % jnp.uint32(7)).astype(jnp.float32) * 0.25 + columns.astype(jnp.float32)


ADAGRAD, SGD = jaxsok.optim.adagrad(0.1), jaxsok.optim.sgd(0.1)
LIFTED = jaxsok.optim.lift(optax.sgd(0.1, momentum=0.9))
TABLES = (
    jaxsok.TableSpec("one", 4, ADAGRAD, capacity=128, statistics=True),
    jaxsok.TableSpec("user", 4, ADAGRAD, capacity=128, initializer=jaxsok.initializers.uniform(0.5, 1.0)),
    jaxsok.TableSpec("item", 4, SGD, capacity=128, placement=jaxsok.on(1), unknown="zeros"),
    jaxsok.TableSpec("ad", 4, SGD, capacity=128),
    jaxsok.TableSpec(
        "half",
        8,
        jaxsok.optim.adam(0.05),
        capacity=128,
        dtype="bfloat16",
        rounding="nearest",
        row_gradient="mean",
        initializer=jaxsok.initializers.function(row_of_word, "of_word"),
    ),
    jaxsok.TableSpec(
        "lifted", 3, LIFTED, capacity=128, row_gradient="sqrt", admission=policies.AdmitByCount(2, unadmitted=0.25)
    ),
)
# Feature -> table, combiner, positions of a bag in a rectangle (0: ragged), weights to draw from
POSITIVE, SIGNED = (0.0, 0.25, 1.0, 2.0), (-1.0, 0.0, 0.5, 1.0)
FEATURES = {
    "one": ("one", "sum", 0, SIGNED),
    "user_mean": ("user", "mean", 0, None),
    "user_sum": ("user", "sum", 3, None),
    "item_mean": ("item", "mean", 0, SIGNED),
    "ad_sqrtn": ("ad", "sqrtn", 2, SIGNED),
    "half": ("half", "mean", 0, POSITIVE),
    "lifted": ("lifted", "sqrtn", 3, None),
    "lifted_one": ("lifted", "sum", 1, None),
}
OF_FEATURE = {name: next(t for t in TABLES if t.name == table) for name, (table, *_) in FEATURES.items()}
# Samples of "user_sum" share bags of one shard, whatever the mesh; shards have different numbers of empty bags.
NUM_SHARED, INVERSE = 8, np.array([0, 0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 6])


def features_of(exchange):
    """Returns the features of FEATURES with one form of exchange."""
    return [
        jaxsok.FeatureSpec(
            name,
            table,
            combiner=combiner,
            weighted=weights is not None,
            max_keys=None if hotness else MAX_KEYS,
            exchange=exchange,
        )
        for name, (table, combiner, hotness, weights) in FEATURES.items()
    ]


@functools.cache
def collection(num_shards, exchange="bags", **options):
    """Returns the collection over `num_shards` devices; with None, on one device without a mesh."""
    if num_shards is None:
        return jaxsok.Collection(TABLES, features_of(exchange))
    return programs.over(num_shards, TABLES, features_of(exchange), **options)


@functools.cache
def step_of(declared):
    """Returns a jitted lookup, norm and update by given gradients; it gives state, embeddings, norm and statistics."""

    def step(state, asked, gradients):
        embeddings, state, plan = declared.lookup(state, asked)
        norm = declared.gradient_norm(state, plan, gradients)
        state, stats = declared.update(state, plan, gradients)
        return state, embeddings, norm, stats

    return jax.jit(step, compiler_options=programs.quickly())


@st.composite
def raw_batches(draw):
    """Draws a raw batch that fits any mesh: ragged bags that each fit a twelfth of the keys."""
    raw = {}
    for name, (_, _, hotness, values) in FEATURES.items():
        num_bags = NUM_SHARED if name == "user_sum" else NUM_SAMPLES
        if hotness:
            bags = draw(strategies.padded_bags(strategies.CORNER_KEYS, num_bags, hotness))
        else:
            parts = [draw(strategies.ragged_bags(strategies.CORNER_KEYS, 1, 4)) for _ in range(num_bags)]
            bags = [bag for part in parts for bag in part]
        if values is not None:
            bags = draw(strategies.weights_for(bags, values))
        raw[name] = as_bags(bags, hotness, values is not None)
    return with_inverse(raw)


def as_bags(bags, hotness, weighted):
    """Returns the oracle's bags as `jaxsok.Bags`: a rectangle, or ragged (hotness 0)."""
    pairs = [oracle.keys_and_weights(bag) for bag in bags]
    shape = (-1, hotness) if hotness else (-1,)
    keys = programs.as_array([key for of_bag, _ in pairs for key in of_bag]).reshape(shape)
    weights = np.array([w for _, of_bag in pairs for w in of_bag], np.float32).reshape(shape) if weighted else None
    return jaxsok.Bags(keys, weights=weights, lengths=None if hotness else np.array([len(bag) for bag in bags]))


def with_inverse(raw):
    """Adds an inverse so that the samples share the bags of "user_sum"."""
    return {**raw, "user_sum": jaxsok.Bags(raw["user_sum"].keys[:NUM_SHARED], inverse=INVERSE)}


@st.composite
def trainings(draw, num_steps=2):
    """Draws batches, and gradients of one sign."""
    steps = []
    for _ in range(num_steps):
        raw = draw(raw_batches())
        gradients = {name: draw(strategies.gradients((NUM_SAMPLES, spec.dim))) for name, spec in OF_FEATURE.items()}
        steps.append((raw, gradients))
    return steps


def fixed_training(num_steps=3, seed=0):
    """Makes batches and gradients without Hypothesis."""
    rng = np.random.default_rng(seed)
    pool = programs.as_array([*strategies.CORNER_KEYS, *rng.integers(0, 2**63, 30).tolist()])
    steps = []
    for _ in range(num_steps):
        raw = {}
        for name, (_, _, hotness, values) in FEATURES.items():
            lengths = rng.integers(0, 5, NUM_SAMPLES)
            size = (NUM_SAMPLES, hotness) if hotness else (lengths.sum(),)
            keys = rng.choice(pool, size)
            weights = None if values is None else rng.choice(values, size).astype(np.float32)
            more = {} if hotness else {"lengths": lengths}
            raw[name] = jaxsok.Bags(keys, weights=weights, **more)
        gradients = {
            name: rng.choice([0.25, 0.5, 1.0], (NUM_SAMPLES, s.dim)).astype(np.float32)
            for name, s in OF_FEATURE.items()
        }
        steps.append((with_inverse(raw), gradients))
    return steps


def train(declared, training, path="lookup", state=None):
    """Trains on a path: "lookup", "plan" with enough capacity, or "pipeline"; returns the state and all results."""
    state = declared.init(seed=SEED, salt=3) if state is None else state
    if path == "pipeline":
        asked = [plan for _, plan in declared.pipeline([raw for raw, _ in training])]
    else:
        asked = [declared.batch(raw).features for raw, _ in training]
    results = []
    for features, (_, gradients) in zip(asked, training, strict=True):
        if path == "plan":
            features = programs_plan(declared)(features)
        state, *out = step_of(declared)(state, features, gradients)
        results.append(jax.device_get(out))
    return state, results


@functools.cache
def programs_plan(declared):
    """Returns a jitted `plan` whose send capacity is the number of keys of a shard."""
    return jax.jit(lambda features: declared.plan(features, send_capacity=[96] * len(declared.stores)))


# Sums of at most 100 numbers of size 2 in another order; with bfloat16, a number may round the other way.
TOLERANCE = {"float32": {"rtol": 1e-5, "atol": 2e-5}, "bfloat16": {"rtol": 2.0**-6, "atol": 2.0**-6}}


def assert_trained_alike(declared, got, other, want):
    """Compares embeddings, norms and statistics of each step, and the stored records by key."""
    for (embeddings, norm, stats), (wanted, wanted_norm, wanted_stats) in zip(got[1], want[1], strict=True):
        counts, wanted_counts = stats.to_dict(), wanted_stats.to_dict()
        assert counts["user"].pop("num_padding") >= wanted_counts["user"].pop("num_padding")
        assert counts == wanted_counts
        np.testing.assert_allclose(norm, wanted_norm, rtol=1e-5)
        for name, spec in OF_FEATURE.items():
            a, b = (np.asarray(values[name], np.float32) for values in (embeddings, wanted))
            np.testing.assert_allclose(a, b, **TOLERANCE[spec.dtype], err_msg=name)
    for spec in TABLES:
        a, b = programs.by_key(declared, got[0], spec.name), programs.by_key(other, want[0], spec.name)
        assert a.keys() == b.keys()
        np.testing.assert_array_equal(a["keys"], b["keys"])
        for column, values in b.items():
            found, wanted = a[column].astype(np.float64), values.astype(np.float64)
            if spec.name == "one":  # without sharing or divisors, gradients are summed in batch order
                np.testing.assert_array_equal(found, wanted, err_msg=column)
            else:
                np.testing.assert_allclose(found, wanted, **TOLERANCE[spec.dtype], err_msg=f"{spec.name}: {column}")


def assert_same_bits(got, want):
    """Compares embeddings, counts and states without index positions; norms sum different numbers of squares."""
    programs.assert_same_state(got[0], want[0], index=False)
    for (embeddings, norm, stats), (wanted, wanted_norm, wanted_stats) in zip(got[1], want[1], strict=True):
        assert stats.to_dict() == wanted_stats.to_dict()
        np.testing.assert_allclose(norm, wanted_norm, rtol=1e-6)
        for name in wanted:
            np.testing.assert_array_equal(programs.bits(embeddings[name]), programs.bits(wanted[name]), err_msg=name)


@pytest.mark.parametrize("num_shards", MESHES)
@hypothesis.settings(max_examples=max(4, hypothesis.settings.default.max_examples // 6))
@given(training=trainings())
def test_as_one_device(num_shards, training):
    """Embeddings, norms, statistics and tables by key agree for any batch."""
    declared, other = collection(num_shards), collection(None)
    assert_trained_alike(declared, train(declared, training), other, train(other, training))


def test_all_paths_give_the_same_bits():
    """Rounds of any capacity, plans made ahead, the pipeline and a second run, which repeats the norms too, agree."""
    declared, training = collection(4), fixed_training()
    first = train(declared, training)
    assert_trained_alike(declared, first, collection(None), train(collection(None), training))
    again, planned, ahead = (
        train(declared, training),
        train(declared, training, "plan"),
        train(declared, training, "pipeline"),
    )
    in_rounds = train(collection(4, send_capacity=SMALL), training)
    for other in (again, planned, ahead, in_rounds):
        assert_same_bits(other, first)
    assert [norm for _, norm, _ in again[1]] == [norm for _, norm, _ in first[1]]
    for *_, stats in (*planned[1], *ahead[1]):
        assert np.asarray(stats.num_rounds).tolist() == [1] * len(declared.stores)
    assert max(np.asarray(stats.num_rounds).max() for *_, stats in in_rounds[1]) > 3


# --------------------------------------------------------------------------------------------------------------
# Full tables and capacities

NUM_SHARDS, POSITIONS = 4, 12  # per shard: 3 bags of up to 4 keys
FULL_TABLES = [
    jaxsok.TableSpec("user", 4, SGD, capacity=16, unknown="zeros"),
    jaxsok.TableSpec("item", 4, SGD, capacity=8, placement=jaxsok.on(2)),
]


@functools.cache
def full(**exchange):
    """Returns two tables of one store with room for six keys per shard."""
    features = [jaxsok.FeatureSpec(name, name, combiner="mean", exchange="bags") for name in ("user", "item")]
    return programs.over(NUM_SHARDS, FULL_TABLES, features, **exchange)


def owner_of(table, key):
    """Returns the owner of a key, derived independently."""
    return 2 if table == "item" else int(programs.owner_of([key], table, NUM_SHARDS)[0])


def arrivals(raw):
    """Returns the uses (shard, table, key) by owner, in the order of shards, features and positions."""
    uses = [
        (shard, table, int(key))
        for shard, lines in enumerate(np.split(np.arange(NUM_SAMPLES), NUM_SHARDS))
        for table in ("user", "item")
        for key in raw[table][lines].reshape(-1)
        if key != oracle.PADDING_KEY
    ]
    return [[use for use in uses if owner_of(*use[1:]) == owner] for owner in range(NUM_SHARDS)]


def make_crowded_bags(seed, num_keys=60):
    """Makes bags of four keys with padding in between, too many for the tables."""
    rng = np.random.default_rng(seed)
    keys = [rng.integers(0, num_keys, (NUM_SAMPLES, 4)).astype(np.uint64) for _ in FULL_TABLES]
    return {
        table.name: np.where(rng.random(k.shape) < 0.2, np.uint64(oracle.PADDING_KEY), k)
        for table, k in zip(FULL_TABLES, keys, strict=True)
    }


def means_of(raw, row_of):
    """Computes embeddings from a function of (table, key) that returns a row, or None for a use that never arrived."""
    wanted = {}
    for table, keys in raw.items():
        wanted[table] = np.zeros((len(keys), 4))
        for sample, bag in enumerate(keys):
            bag = [int(key) for key in bag if key != oracle.PADDING_KEY]
            rows = [row_of(sample, table, key) for key in bag]
            wanted[table][sample] = sum(rows, np.zeros(4)) / max(len(bag), 1)
    return wanted


def initial_of(raw):
    """Returns a map from (table, key) to the initial row."""
    keys = {table: sorted({int(key) for key in bags.reshape(-1)}) for table, bags in raw.items()}
    return {
        (table, key): row
        for table, of_table in keys.items()
        for key, row in zip(of_table, programs.initial_rows(table, 4, of_table), strict=True)
    }


@pytest.mark.parametrize("path", ["rounds", "few rounds", "plan"])
def test_a_full_table_refuses_by_shard_and_first_occurrence(path):
    """The same keys get rows over any exchange; a refused key reads its initial row and counts in its bag."""
    declared = full(send_capacity=SMALL) if path == "rounds" else full()
    raw = make_crowded_bags(0)
    asked = declared.batch(raw).features
    asked = declared.plan(asked, send_capacity=[24]) if path == "plan" else asked
    embeddings, state, plan = programs.lookup(declared)(declared.init(seed=0), asked)
    capacity = state.stores[0].capacity // NUM_SHARDS
    wanted, num_refused = {}, 0
    for uses in arrivals(raw):
        distinct = list(dict.fromkeys(use[1:] for use in uses))
        wanted |= {pair: row_id for row_id, pair in enumerate(distinct[:capacity])}
        num_refused += sum(use[1:] in distinct[capacity:] for use in uses)
    assert num_refused > 5
    got = {
        (table, int(key)): int(row_id) % capacity
        for table in raw
        for key, row_id in zip(
            *(declared.export_table(state, table)[name] for name in ("keys", "row_ids")), strict=True
        )
    }
    assert got == wanted
    initial = initial_of(raw)
    for name, values in means_of(raw, lambda _, *pair: initial[pair]).items():
        np.testing.assert_allclose(embeddings[name], values, rtol=1e-5, atol=1e-6)
    gradients = jax.tree.map(jnp.ones_like, embeddings)
    norm = declared.gradient_norm(state, plan, gradients)
    state, stats = programs.update(declared)(state, plan, gradients)
    assert sum(programs.counts(stats, table)["num_refused"] for table in raw) == num_refused
    most_sent = max(sum(use[0] == shard for use in uses) for uses in arrivals(raw) for shard in range(NUM_SHARDS))
    assert np.asarray(stats.num_rounds).item() == (-(-most_sent // SMALL) if path == "rounds" else 1)
    moved = [initial[pair] - programs.rows_of(declared, state, pair[0])[pair[1]] for pair in wanted]
    np.testing.assert_allclose(np.linalg.norm(moved), 0.1 * norm, rtol=1e-5)


@pytest.mark.parametrize("is_find", [False, True])
def test_a_send_capacity_that_is_too_small(is_find):
    """Uses beyond it add nothing to their bags but count in the divisor and in Stats; the plan reports the load."""
    declared, raw, capacity, state = full(), make_crowded_bags(1, num_keys=9), 4, full().init(seed=0)
    whole = declared.plan(declared.batch(raw).features)
    if is_find:
        _, state, _ = programs.lookup(declared)(state, whole)
    plan = declared.plan(declared.batch(raw).features, send_capacity=[capacity])
    sent = {}  # (shard, owner) -> uses, of which the first are sent
    for owner, uses in enumerate(arrivals(raw)):
        for use in uses:
            sent.setdefault((use[0], owner), []).append(use[1:])
    counts = np.array([[len(sent.get((s, o), [])) for o in range(NUM_SHARDS)] for s in range(NUM_SHARDS)])
    for some in (plan, whole):
        assert isinstance(some.asked[0], Uses)
        assert np.asarray(some.asked[0].load).tolist() == [[counts.max(), counts.sum(axis=0).max()]] * NUM_SHARDS
    num_lost = np.maximum(counts - capacity, 0).sum()
    assert num_lost > 5
    initial, left = initial_of(raw), {pair: list(uses[:capacity]) for pair, uses in sent.items()}

    def row_of(sample, *pair):
        arrived = left[sample // 3, owner_of(*pair)]
        if arrived and arrived[0] == pair:
            return initial[arrived.pop(0)]
        return np.zeros(4)

    # Uses are sent, and added here, in the order of features, bags and positions.
    wanted = {}
    for table in raw:
        wanted |= means_of({table: raw[table]}, row_of)
    if is_find:
        embeddings, stats = programs.find(declared)(state, plan)
    else:
        embeddings, state, plan = programs.lookup(declared)(state, plan)
        state, stats = programs.update(declared)(state, plan, embeddings)
    for name, values in wanted.items():
        np.testing.assert_allclose(embeddings[name], values, rtol=1e-5, atol=1e-6)
    found = [programs.counts(stats, table) for table in raw]
    assert sum(count["num_refused"] for count in found) == num_lost
    assert sum(sum(count.values()) for count in found) == 2 * NUM_SAMPLES * 4


# --------------------------------------------------------------------------------------------------------------
# Several plans, loops, evaluation

LIGHT_TABLES = [
    jaxsok.TableSpec("user", 4, ADAGRAD, capacity=64, initializer=jaxsok.initializers.uniform(0.5, 1.0)),
    jaxsok.TableSpec("item", 4, ADAGRAD, capacity=64, unknown="zeros"),
]


@functools.cache
def light(num_shards, forms=("bags", "bags"), tables=tuple(LIGHT_TABLES), **exchange):
    """Returns a table of ragged means and a table of sums of pairs, in these forms; with None, on one device."""
    features = [
        jaxsok.FeatureSpec("user", "user", combiner="mean", weighted=True, max_keys=MAX_KEYS, exchange=forms[0]),
        jaxsok.FeatureSpec("item", "item", exchange=forms[1]),
    ]
    if num_shards is None:
        return jaxsok.Collection(tables, features)
    return programs.over(num_shards, tables, features, **exchange)


def light_batch(seed, num_keys=20):
    """Makes a batch with some empty bags and some divisors of zero."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, NUM_SAMPLES)
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], lengths.sum()).astype(np.float32)
    return {
        "user": jaxsok.Bags(rng.integers(0, num_keys, lengths.sum()), lengths=lengths, weights=weights),
        "item": rng.integers(-1, num_keys, (NUM_SAMPLES, 2)),
    }


def ones(declared, factor=1.0):
    """Returns equal gradients for all features."""
    return {spec.name: np.full((NUM_SAMPLES, 4), factor, np.float32) for spec in declared.features}


def assert_alike(collections, states, rtol=1e-5):
    """Compares rows and optimizer state by key."""
    programs.assert_close_tables(collections, states, rtol=rtol, atol=rtol)


def test_several_plans_in_one_update():
    """One step takes consecutive lookups, in rounds and with a plan made ahead; a third plan is stale."""
    outcomes = []
    for declared in (light(2), light(None)):
        batches = [declared.batch(light_batch(seed)).features for seed in range(3)]
        _, state, stale = programs.lookup(declared)(declared.init(seed=1), batches[2])
        state, num_erased = declared.erase(state, "user", np.arange(3))
        _, state, first = programs.lookup(declared)(state, batches[0])
        ahead = (
            declared.plan(batches[1])
            if declared.shards.num_shards == 1
            else declared.plan(batches[1], send_capacity=[48])
        )
        _, state, second = programs.lookup(declared)(state, ahead)
        plans, gradients = [first, stale, second], [ones(declared), ones(declared, 5.0), ones(declared, 2.0)]
        gradients[0]["item"][3] = np.inf  # its rows are skipped and counted
        norm = declared.gradient_norm(state, plans, gradients)
        state, stats = declared.update(state, plans, gradients)
        again, misused = declared.update(state, first, ones(declared))
        outcomes.append((declared, state, norm, stats, misused))
        assert int(num_erased) > 0 and int(stats.num_stale) > 10 and int(misused.num_misused_plans) == 1
        for table in ("user", "item"):
            np.testing.assert_array_equal(*(declared.export_table(s, table)["rows"] for s in (again, state)))
    (declared, state, norm, stats, _), (other, wanted, wanted_norm, wanted_stats, _) = outcomes
    assert stats.to_dict() == wanted_stats.to_dict() and int(stats.num_stale) == int(wanted_stats.num_stale)
    np.testing.assert_allclose(norm, wanted_norm, rtol=1e-5)
    assert_alike((declared, other), (state, wanted))


def test_a_scan_of_steps():
    """A scan gives the bits of single steps, with the rounds inside the loop."""
    declared = light(2, send_capacity=SMALL)
    batches = [declared.batch(light_batch(seed)).features for seed in range(3)]
    gradients = ones(declared)

    def step(state, features):
        embeddings, state, plan = declared.lookup(state, features)
        state, stats = declared.update(state, plan, gradients)
        return state, (embeddings, stats.words)

    scanned = jax.jit(lambda state, features: jax.lax.scan(step, state, features), compiler_options=programs.quickly())
    state, (embeddings, _) = scanned(
        declared.init(seed=2, salt=0), jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    )
    wanted = declared.init(seed=2, salt=0)
    for number, features in enumerate(batches):
        wanted, values, _ = programs.fed_step(declared)(wanted, features, gradients)
        for name in values:
            np.testing.assert_array_equal(embeddings[name][number], values[name])
    programs.assert_same_state(state, wanted, index=False)


def test_find_changes_nothing():
    """`find` reads trained rows, and the initial row or zeros for absent keys, with a plan and without."""
    raw, unseen = light_batch(0), light_batch(1, num_keys=60)
    results = []
    for declared in (light(2), light(None)):
        state, _, _ = programs.fed_step(declared)(declared.init(seed=1), declared.batch(raw).features, ones(declared))
        before = jax.tree.map(np.asarray, state)
        features = declared.batch(unseen).features
        results.append(programs.find(declared)(state, features))
        programs.assert_same_state(before, state)
        if declared.shards.num_shards > 1:
            for asked in (declared.plan(features), declared.plan(features, send_capacity=[48])):
                found, stats = programs.find(declared)(state, asked)
                assert stats.to_dict() == results[0][1].to_dict()
                for name in found:
                    np.testing.assert_array_equal(found[name], results[0][0][name])
    (got, stats), (want, wanted_stats) = results
    assert stats.to_dict() == wanted_stats.to_dict() and programs.counts(stats)["num_missing"] > 3
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------
# The wire, mixed forms, growth, checkpoints

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_dtypes_of_the_wire(dtype):
    """Each partial sum and each gradient is rounded once, relative to the largest number of its row."""
    declared, other = light(2, rows=dtype, gradients=dtype), light(None)
    raw = light_batch(0)
    rng = np.random.default_rng(0)
    gradients = {name: rng.uniform(0.5, 1.0, (NUM_SAMPLES, 4)).astype(np.float32) for name in ("user", "item")}
    (state, got, _), (wanted, want, _) = (
        programs.fed_step(c)(c.init(seed=1), c.batch(raw).features, gradients) for c in (declared, other)
    )
    for name in ("user", "item"):
        error = np.abs(np.asarray(got[name]) - np.asarray(want[name]))
        # Weights are positive, and so are the rows of "user"; those of "item" are below 1, and bags have two.
        bound = ROUNDING[dtype] * (np.abs(want["user"]).max() if name == "user" else 2.0) + 1e-6
        assert error.max() <= bound and (dtype == "float16" or error.max() > 1e-5), name
        a, b = programs.by_key(declared, state, name), programs.by_key(other, wanted, name)
        (squares,) = set(a) - {"keys", "rows"}
        np.testing.assert_allclose(a[squares], b[squares], rtol=2.1 * ROUNDING[dtype] * 2)
        # The first step is at most the rate, 0.1, and a gradient at least half of the largest one of its row.
        np.testing.assert_allclose(a["rows"], b["rows"], rtol=0, atol=0.1 * 2 * ROUNDING[dtype] + 1e-6)


@pytest.mark.parametrize("forms", [("bags", "rows"), ("rows", "bags")])
def test_forms_side_by_side(forms):
    """Tables of different forms do not share a store; both give the results of one device."""
    declared, other = light(2, forms), light(None)
    assert [store.sends_bags for store in declared.stores] == [form == "bags" for form in forms]
    states = [declared.init(seed=1), other.init(seed=1)]
    for seed in range(2):
        for i, c in enumerate((declared, other)):
            states[i], *_ = programs.fed_step(c)(states[i], c.batch(light_batch(seed)).features, ones(c))
    assert_alike((declared, other), states)


@pytest.mark.parametrize("embedding_dtype", ["float16", "float32"])
def test_float16_rows_that_xla_computes(embedding_dtype):
    """Rows are read as float32 for sums sent in that dtype; absent keys read their own initial row, or zeros."""
    initializer = jaxsok.initializers.function(row_of_word, "of_word")
    options = {"dtype": "float16", "embedding_dtype": embedding_dtype, "initializer": initializer}
    tables = tuple(dataclasses.replace(table, optimizer=SGD, **options) for table in LIGHT_TABLES)
    results = []
    for num_shards in (2, None):
        declared = light(num_shards, tables=tables)
        found = [programs.find(declared)(declared.init(seed=1), declared.batch(light_batch(0)).features)[0]]
        found.append(programs.lookup(declared)(declared.init(seed=1), declared.batch(light_batch(0)).features)[0])
        results.append(found)
    for got, want in zip(*results, strict=True):
        for name in want:
            assert got[name].dtype == want[name].dtype == embedding_dtype
            np.testing.assert_allclose(*(np.asarray(result[name], np.float32) for result in (got, want)), rtol=2.0**-10)


def living(exchange, num_shards=2):
    """Returns tables that grow, evict and keep statistics."""
    options = {"capacity": 8, "max_capacity": 24, "eviction": policies.LeastRecentlyUsed(), "statistics": True}
    tables = tuple(dataclasses.replace(table, **options) for table in LIGHT_TABLES)
    return light(num_shards, (exchange, exchange), tables)


def train_living(declared, num_steps=3):
    """Trains on new keys in every step, with growth and eviction between steps."""
    state = declared.init(seed=1)
    for step in range(num_steps):
        raw = light_batch(step, num_keys=15)
        raw["user"] = dataclasses.replace(raw["user"], keys=raw["user"].keys + 10 * step)
        raw["item"] = np.where(raw["item"] < 0, -1, raw["item"] + 10 * step)
        batch = declared.batch(raw)
        state = declared.grow(state, batch)
        state, _, stats = programs.fed_step(declared)(state, batch.features, ones(declared))
        stats.check()
        if step == 1:
            state, _ = declared.evict(state, "user", num_rows=10)
    return state, stats


def test_growth_and_eviction():
    """Rows, optimizer state and statistics by key are those of the other form."""
    (state, stats), (wanted, wanted_stats) = (train_living(living(form)) for form in ("bags", "rows"))
    assert state.stores[0].capacity > 16 and programs.total(stats, "num_evicted") > 0
    assert_alike((living("bags"), living("rows")), (state, wanted))
    assert stats.to_dict() == wanted_stats.to_dict()


def test_a_checkpoint_knows_no_form(tmp_path):
    """A state saved with bags on four shards loads with rows on two and on one device, and trains alike."""
    declared = light(4)
    state, _, _ = programs.fed_step(declared)(
        declared.init(seed=1), declared.batch(light_batch(0)).features, ones(declared)
    )
    ocp.Checkpointer(checkpoint.TablesCheckpointHandler()).save(tmp_path / "saved", args=TablesSave(declared, state))
    state, _, _ = programs.fed_step(declared)(state, declared.batch(light_batch(1)).features, ones(declared))
    for other in (light(2, ("rows", "rows")), light(None)):
        again = checkpoint.TablesCheckpointHandler().restore(tmp_path / "saved", args=TablesRestore(other))
        again, _, _ = programs.fed_step(other)(again, other.batch(light_batch(1)).features, ones(other))
        assert_alike((other, declared), (again, state))


# --------------------------------------------------------------------------------------------------------------
# Numerical limits


def one_bag(form, num_shards, value, weights=None, combiner="sum", hotness=2, **options):
    """Returns the embedding of a bag whose rows have this value, on shards or on one device."""
    table = jaxsok.TableSpec("item", 1, SGD, capacity=16, initializer=jaxsok.initializers.constant(value))
    feature = jaxsok.FeatureSpec("item", "item", combiner=combiner, weighted=weights is not None, exchange=form)
    if num_shards is None:
        declared = jaxsok.Collection([table], [feature])
    else:
        declared = programs.over(num_shards, [table], [feature], **options)
    keys, lengths = np.arange(2 * hotness), np.array([hotness, hotness])
    weights = None if weights is None else np.array([*weights, *weights], np.float32)
    raw = {"item": jaxsok.Bags(keys, lengths=lengths, weights=weights)}
    return np.asarray(programs.lookup(declared)(declared.init(seed=0), declared.batch(raw).features)[0]["item"])[0, 0]


def test_finite_sums_stay_finite_on_a_narrow_wire():
    """float32's largest numbers would round to bfloat16's infinity; they become its largest number, as rows do."""
    got = one_bag("bags", 2, 3.4e38, hotness=1, rows="bfloat16")
    assert np.isfinite(got) and got == pytest.approx(3.4e38, rel=2**-7)


@pytest.mark.parametrize(("weights", "want"), [((1.0, -1.0), 0.0), ((3e38, 3e38), np.nan)])
def test_divisors_of_zero_and_infinity(weights, want):
    """A divisor of zero gives zeros; an overflowing sum of weights gives NaN instead."""
    for form, num_shards in (("rows", None), ("bags", 2)):
        np.testing.assert_equal(one_bag(form, num_shards, 2.0, weights, "mean"), np.float32(want))


def test_with_x64_on():
    """Planned or not, in several rounds, the numbers are the same, and no array has 64 bits."""
    for planned in (False, True):
        results = []
        for is_on in (False, True):
            with jax.enable_x64(is_on):
                declared = light(2, send_capacity=8)
                state, features = declared.init(seed=1, salt=0), declared.batch(light_batch(0)).features
                asked = declared.plan(features, send_capacity=[64] * len(declared.stores)) if planned else features
                embeddings, state, plan = declared.lookup(state, asked)
                state, stats = declared.update(state, plan, embeddings)
                assert all(leaf.dtype.itemsize <= 4 for leaf in jax.tree.leaves((state, plan, stats)))
                results.append([np.asarray(embeddings[name]) for name in sorted(embeddings)])
        np.testing.assert_array_equal(*results)


# --------------------------------------------------------------------------------------------------------------
# Declarations


def test_a_plan_of_the_other_form():
    """A plan must come from the collection that looks up."""
    for forms in (("bags", "bags"), ("rows", "rows")):
        declared, other = light(2, forms), light(2, ("rows" if forms[0] == "bags" else "bags",) * 2)
        plan = other.plan(other.batch(light_batch(0)).features)
        with pytest.raises(ValueError, match=f'exchange ".*", wanted "{forms[0]}"'):
            declared.lookup(declared.init(seed=1), plan)


def test_more_plans_than_kernels_take():
    """Each plan adds a feature for each shard."""
    declared = light(2)
    state, features = declared.init(seed=1), declared.batch(light_batch(0)).features
    embeddings, state, plan = jax.eval_shape(declared.lookup, state, features)
    with pytest.raises(ValueError, match=r"update: plans: got 513 for tables .* wanted at most 512"):
        jax.eval_shape(declared.update, state, [plan] * 513, [embeddings] * 513)


@pytest.mark.parametrize("num_shards", [None, 1, 2])
def test_without_effect_where_no_rows_travel(num_shards):
    """One device, a mesh of one and replicated tables have the same bits and the same stores."""
    tables = tuple(dataclasses.replace(table, placement=jaxsok.REPLICATED) for table in LIGHT_TABLES)
    tables = tables if num_shards == 2 else tuple(LIGHT_TABLES)
    results = []
    for form in ("bags", "rows"):
        declared = light(num_shards, (form, form), tables)
        assert not any(store.sends_bags for store in declared.stores)
        results.append(
            programs.fed_step(declared)(
                declared.init(seed=1, salt=0), declared.batch(light_batch(0)).features, ones(declared)
            )
        )
    programs.assert_same_state(results[0][0], results[1][0], index=False)
    for name, values in results[0][1].items():
        np.testing.assert_array_equal(values, results[1][1][name])


def test_declarations_that_are_refused():
    """A missing combiner, two forms of one table, and unknown words are refused."""
    with pytest.raises(ValueError, match=r'FeatureSpec.*"user".*exchange: got "bags" with combiner None'):
        jaxsok.FeatureSpec("user", "user", combiner=None, exchange="bags")
    with pytest.raises(ValueError, match=r'exchange: got .partial., wanted "rows" or "bags"'):
        jaxsok.FeatureSpec("user", "user", exchange="partial")
    features = [jaxsok.FeatureSpec("user", "user", exchange="bags"), jaxsok.FeatureSpec("friends", "user")]
    for order in (features, features[::-1]):
        with pytest.raises(ValueError, match=r'feature "friends": exchange: got "rows".*\[.user.\] of table "user"'):
            jaxsok.Collection(LIGHT_TABLES[:1], order)
