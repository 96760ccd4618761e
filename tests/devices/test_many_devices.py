"""Many devices: results depend neither on the mesh (law 2) nor on the run (law 3), and every key is counted (law 5)."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import strategies
from jax.sharding import AxisType

import jaxsok
from jaxsok import exchange
from jaxsok.stats import PER_STEP, PER_STORE, PER_TABLE

NUM_SAMPLES = 16
MESHES = (1, 2, 4, 8)
SEED = 11

# --------------------------------------------------------------------------------------------------------------
# The cover: every pair of values of every two choices occurs in some case

AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)
WIRES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
PATHS = ("rounds", "pipeline")
OPTIMIZERS = (
    jaxsok.optim.sgd(0.02),
    jaxsok.optim.adagrad(0.02),
    jaxsok.optim.rowwise_adagrad(0.02),
    jaxsok.optim.adam(0.02),
)
ROW_GRADIENTS = ("sum", "mean", "sqrt")
PLACEMENTS = ("sharded", "on", "replicated")
# name, combiner, weighted, keys per bag in a rectangle (0: ragged)
KINDS = (
    ("one", "sum", False, 1),
    ("rows", None, False, 2),
    ("ragged_rows", None, False, 0),
    ("sum", "sum", False, 3),
    ("ragged_weighted_sum", "sum", True, 0),
    ("ragged_mean", "mean", False, 0),
    ("weighted_mean", "mean", True, 3),
    ("ragged_weighted_sqrtn", "sqrtn", True, 0),
    ("sqrtn", "sqrtn", False, 2),
)
MAX_HOTNESS = 3
MAX_KEYS = 8 * 6 * MAX_HOTNESS  # keys of ragged features: bags of 3 fit on 8 shards as on 1
DIMS = (4, 5, 3)
REPLICATED_STORE = (0, 1, 1, 2)  # by shape, so that every optimizer and every row_gradient is replicated once


def orthogonal(mesh, shape):
    """Returns wire dtypes, path and axis type by the orthogonal array of 16 runs over the field of four elements."""
    times_two = (0, 2, 3, 1)
    rows, gradients, path = mesh ^ shape, mesh ^ times_two[shape], mesh ^ times_two[times_two[shape]]
    return WIRES[rows], WIRES[gradients], AXIS_TYPES[path % 2], PATHS[path // 2]


CASES = [(num_shards, shape, *orthogonal(m, shape)) for m, num_shards in enumerate(MESHES) for shape in range(4)]
# The whole array takes minutes, so the daily cases show each mesh, optimizer, placement and path once. Explicit
# axes have tests of their own (test_axis_types.py), and so have narrow wires (test_exchange.py, test_rows16.py).
QUICK_CASES = {(1, 0), (2, 1), (4, 3), (8, 1)}
CASE_PARAMS = [
    pytest.param(
        (n, shape, *others),
        id=f"{n} shards-shape {shape}-{'-'.join(map(str, others))}",
        marks=() if (n, shape) in QUICK_CASES else pytest.mark.slow,
    )
    for n, shape, *others in CASES
]


def declared_tables(shape, num_shards):
    """Returns tables of three stores of different dims; one store is replicated, the others sharded or on one shard."""
    tables = []
    for j, dim in enumerate(DIMS):
        optimizer = OPTIMIZERS[(shape + j) % 4]
        options = {
            "initializer": jaxsok.initializers.uniform(0.5, 1.0),
            "row_gradient": ROW_GRADIENTS[j],
            "capacity": 256,
        }
        if j == REPLICATED_STORE[shape]:
            tables.append(jaxsok.TableSpec(f"replicated{j}", dim, optimizer, placement=jaxsok.REPLICATED, **options))
            continue
        tables.append(jaxsok.TableSpec(f"sharded{j}", dim, optimizer, **options))
        placement = jaxsok.on((shape + j) % num_shards)
        tables.append(jaxsok.TableSpec(f"on{j}", dim, optimizer, placement=placement, **options))
    return tables


def declared_features(shape):
    """Returns every kind of feature over every store: [(store, placement, spec, hotness)]."""
    features = []
    for j in range(len(DIMS)):
        for i, (kind, combiner, weighted, hotness) in enumerate(KINDS):
            placement = "replicated" if j == REPLICATED_STORE[shape] else ("sharded", "on")[(i + j + shape) % 2]
            options = {} if hotness else {"max_keys": MAX_KEYS}
            if combiner is None and not hotness:
                options["max_hotness"] = MAX_HOTNESS
            spec = jaxsok.FeatureSpec(f"{kind}{j}", f"{placement}{j}", combiner=combiner, weighted=weighted, **options)
            features.append((j, placement, spec, hotness))
    return features


def test_the_cover_is_pairwise():
    """Every two values of every two choices occur together."""
    seen, values = set(), {}
    for num_shards, shape, rows, gradients, axis_type, path in CASES:
        for j, placement, spec, hotness in declared_features(shape):
            element = {
                "mesh": num_shards,
                "rows": rows,
                "gradients": gradients,
                "axis_type": str(axis_type),
                "path": path,
                "optimizer": OPTIMIZERS[(shape + j) % 4],
                "row_gradient": ROW_GRADIENTS[j],
                "placement": placement,
                "kind": (spec.combiner, spec.weighted, hotness),
            }
            for name, value in element.items():
                values.setdefault(name, set()).add(value)
            seen |= set(itertools.combinations(sorted(element.items(), key=lambda item: item[0]), 2))
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(sorted(values), 2)
        for x, y in itertools.product(values[a], values[b])
    }
    assert wanted <= seen, sorted(map(str, wanted - seen))[:10]


def raw_batches(shape, num_steps=3):
    """Makes the same batches for all meshes: recurring and new keys, empty bags, padding in rectangles."""
    rng = np.random.default_rng(shape)
    pool = programs.as_array([*strategies.CORNER_KEYS, *rng.integers(0, 2**63, 24).tolist()])
    batches = []
    for _ in range(num_steps):
        raw = {}
        for _, _, spec, hotness in declared_features(shape):
            if hotness:
                size = (NUM_SAMPLES, hotness) if hotness > 1 else (NUM_SAMPLES,)
                keys = np.where(rng.random(size) < 0.1, np.uint64(jaxsok.PADDING_KEY), rng.choice(pool, size))
                weights = rng.uniform(0.5, 2.0, size).astype(np.float32)
                raw[spec.name] = jaxsok.Bags(keys, weights=weights) if spec.weighted else keys
                continue
            lengths = rng.integers(0, MAX_HOTNESS + 1, NUM_SAMPLES)
            keys = rng.choice(pool, lengths.sum())
            weights = rng.uniform(0.5, 2.0, lengths.sum()).astype(np.float32) if spec.weighted else None
            raw[spec.name] = jaxsok.Bags(keys, lengths=lengths, weights=weights)
        batches.append(raw)
    return batches


def make_gradients(shape, num_steps=3):
    """Makes gradients of one sign: neither sums nor moments cancel, so relative errors stay relative."""
    rng = np.random.default_rng(100 + shape)
    batches = []
    for _ in range(num_steps):
        gradients = {}
        for j, _, spec, hotness in declared_features(shape):
            middle = () if spec.combiner is not None else (hotness or MAX_HOTNESS,)
            values = rng.uniform(0.5, 2.0, (NUM_SAMPLES, *middle, DIMS[j]))
            gradients[spec.name] = values.astype(np.float32)
        batches.append(gradients)
    return batches


@functools.cache
def collection_of(num_shards, shape, rows, gradients, axis_type):
    """Returns the collection of a case; with None, on one device without a mesh."""
    features = [spec for _, _, spec, _ in declared_features(shape)]
    if num_shards is None:
        return jaxsok.Collection(declared_tables(shape, 8), features)
    wire = {"rows": rows, "gradients": gradients}
    return programs.over(num_shards, declared_tables(shape, num_shards), features, axis_type=axis_type, **wire)


def train(collection, shape, path):
    """Trains three steps; returns the state and each step's results on the host."""
    state, results = collection.init(seed=SEED), []
    if path == "pipeline":
        inputs = ((batch.features, plan) for batch, plan in collection.pipeline(raw_batches(shape)))
    else:
        inputs = ((batch.features, batch.features) for batch in map(collection.batch, raw_batches(shape)))
    for (_, asked), gradients in zip(inputs, make_gradients(shape), strict=True):
        state, embeddings, stats = programs.fed_step(collection)(state, asked, gradients)
        results.append((jax.device_get(embeddings), jax.device_get(stats)))
    return state, results


@functools.cache
def train_once(num_shards, shape, rows="float32", gradients="float32", axis_type=AxisType.Auto, path="rounds"):
    """Runs `train` once for each case."""
    collection = collection_of(num_shards, shape, rows, gradients, axis_type)
    return collection, *train(collection, shape, path)


# One rounding to the wire's dtype, relative to the number: half a unit of the last place of 8, 11 and 4 bits.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}
# Sums of at most 70 positive float32 numbers in another order, and the optimizer's arithmetic on them
SUM_ROUNDING = 70 * 2.0**-24


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_law_2_tables_do_not_depend_on_the_mesh(case):
    """After three steps, rows and optimizer state by key equal one device's, within the rounding of the wire."""
    num_shards, shape, _, gradients, *_ = case
    collection, state, _ = train_once(*case)
    reference, wanted_state, _ = train_once(None, shape)
    # A shard's partial sum is rounded once; an optimizer divides two numbers with that error each. On one
    # shard nothing is sent.
    error = SUM_ROUNDING + (ROUNDING[gradients] if num_shards > 1 else 0.0)
    for spec in collection.tables:
        got = programs.by_key(collection, state, spec.name)
        want = programs.by_key(reference, wanted_state, spec.name)
        np.testing.assert_array_equal(got.pop("keys"), want.pop("keys"), err_msg=spec.name)
        assert got.keys() == want.keys()
        moved = 1 - want["rows"]  # rows start below 1, and all gradients push them down
        error_of_rows = np.abs(got.pop("rows") - want.pop("rows"))
        assert (error_of_rows <= 2.1 * error * moved + 4 * 2.0**-24).all(), (spec.name, error_of_rows.max())
        for column in want:
            np.testing.assert_allclose(got[column], want[column], rtol=2.1 * error + error**2, err_msg=column)


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_law_2_embeddings_do_not_depend_on_the_mesh(case):
    """Before the first update, embeddings show only the wire's rounding of rows; afterwards that of gradients too."""
    num_shards, shape, rows, gradients, *_ = case
    collection, _, results = train_once(*case)
    reference, wanted_state, wanted = train_once(None, shape)
    lowest = min(programs.by_key(reference, wanted_state, spec.name)["rows"].min() for spec in reference.tables)
    of_gradients = SUM_ROUNDING + (ROUNDING[gradients] if num_shards > 1 else 0.0)
    for step, ((got, _), (want, _)) in enumerate(zip(results, wanted, strict=True)):
        assert got.keys() == want.keys()
        for _, placement, spec, _ in declared_features(shape):
            is_local = num_shards == 1 or placement == "replicated"
            of_rows = SUM_ROUNDING + (0.0 if is_local else ROUNDING[rows])
            # Bags add at most 3 rows of weight at most 2, each with the error of the earlier updates.
            of_table = 6 * 2.1 * of_gradients * (1 - lowest) if step else 0.0
            np.testing.assert_allclose(
                got[spec.name], want[spec.name], rtol=of_rows, atol=of_table, err_msg=f"step {step}: {spec.name}"
            )


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_law_5_counts_do_not_depend_on_the_mesh(case):
    """Found, inserted, padding and rows of every step agree; the number of rounds is as expected."""
    num_shards, shape, *_, path = case
    collection, _, results = train_once(*case)
    _, _, wanted = train_once(None, shape)
    for (_, stats), (_, want) in zip(results, wanted, strict=True):
        assert stats.to_dict() == want.to_dict()
        rounds = np.asarray(stats.num_rounds)
        assert rounds.shape == (len(collection.stores),)
        if num_shards == 1:
            assert (rounds == 0).all()
        elif path == "pipeline":
            assert (rounds == 1).all()
        else:
            assert (rounds >= 1).all()


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_law_3_two_runs_on_a_mesh_give_the_same_bits(case):
    """Embeddings of every step and the whole state agree, except for values that depend on the salts drawn by init."""
    collection, state, results = train_once(*case)
    again, other = train(collection, case[1], case[-1])
    programs.assert_same_state(state, again, index=False)
    for (embeddings, stats), (others, counts) in zip(results, other, strict=True):
        for a, b in zip(jax.tree.leaves(embeddings), jax.tree.leaves(others), strict=True):
            np.testing.assert_array_equal(programs.bits(a), programs.bits(b))
        for name in (*PER_TABLE, *PER_STORE, *PER_STEP):
            if name != "longest_probe":  # two salts place the keys differently
                np.testing.assert_array_equal(stats.count(name), counts.count(name), err_msg=name)


@pytest.mark.parametrize("case", [case for case in CASE_PARAMS if case.values[0][0] > 1])
def test_replicas_stay_equal(case):
    """Every shard of a replicated store holds the same bits in rows, records and counters."""
    collection, state, _ = train_once(*case)
    (number,) = [s for s, store in enumerate(collection.stores) if store.is_replicated]
    for path, parts in programs.replicas(collection, state, number):
        if "index" in path and jax.default_backend() != "cpu":
            continue
        for part in parts[1:]:
            np.testing.assert_array_equal(programs.bits(parts[0]), programs.bits(part), err_msg=path)


# --------------------------------------------------------------------------------------------------------------
# Skew

NUM_SHARDS = 8
SEND_CAPACITY = 3
ADAM = jaxsok.optim.adam(0.05)
SKEW_TABLES = [
    jaxsok.TableSpec("user", 4, ADAM, capacity=512),
    jaxsok.TableSpec("item", 4, ADAM, capacity=512),
]
SKEW_FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("history", "item", combiner="mean", max_keys=NUM_SHARDS * 16),
]


@functools.cache
def skew_collection(num_shards):
    """Returns two tables of one store whose shards send three keys a round; with None, on one device."""
    if num_shards is None:
        return jaxsok.Collection(SKEW_TABLES, SKEW_FEATURES)
    return programs.over(num_shards, SKEW_TABLES, SKEW_FEATURES, send_capacity=SEND_CAPACITY)


def make_bags(keys, lengths):
    """Makes bags of these lengths from the keys in order, starting over at their end."""
    return jaxsok.Bags(np.resize(programs.as_array(keys), int(np.sum(lengths))), lengths=np.asarray(lengths))


def one_owner(owner, step):
    """Makes a batch in which every key of both tables belongs to one shard."""
    user = programs.keys_of_owner(owner, 16, "user", NUM_SHARDS, start=step)
    return {
        "user": user,
        "history": make_bags(programs.keys_of_owner(owner, 48, "item", NUM_SHARDS, start=step), [3] * 16),
    }


def one_slice(step, start=(5 << 60) + (1 << 33)):
    """Makes consecutive round hashes: only their lowest bits separate the rounds, and owners vary little."""
    hashes = [start + 7 * step + i for i in range(48)]
    user, item = (programs.keys_of_round_hashes(hashes, table) for table in ("user", "item"))
    return {"user": user[:16], "history": make_bags(item, [3] * 16)}


def same_high_word(step):
    """Makes keys with one owner and one high word of the round hash, in both tables."""
    hashes = [(9 << 40) + ((step + i) << 12) + 0x801 for i in range(48)]
    user, item = (programs.keys_of_round_hashes(hashes, table) for table in ("user", "item"))
    return {"user": user[:16], "history": make_bags(item, [3] * 16)}


def one_key(step):
    """Makes a batch with a single key in all bags of both tables."""
    return {"user": np.full(16, 77), "history": make_bags([77], [3] * 16)}


def empty_on_some(step):
    """Makes a batch in which devices 0, 3 and 7 have no key."""
    user = np.arange(16) % 5 + step
    lengths = np.full(16, 3)
    for device in (0, 3, 7):
        user[2 * device : 2 * device + 2] = -1
        lengths[2 * device : 2 * device + 2] = 0
    return {"user": user, "history": make_bags(np.arange(20), lengths)}


def empty(step):
    """Makes a batch without keys."""
    return {"user": np.full(16, -1), "history": make_bags([0], [0] * 16)}


def unlike_hotness(step):
    """Makes bags of i keys on device i; those of device 7 are all new."""
    lengths = np.repeat(np.arange(8), 2)
    return {"user": np.arange(16) + 8 * step, "history": make_bags(np.arange(40, 500, 3) + step, lengths)}


def all_on_one_device(step):
    """Makes a batch whose keys are all on one device."""
    user, lengths = np.full(16, -1), np.zeros(16, int)
    user[10:12], lengths[10:12] = (3, 4), (9, 7)
    return {"user": user, "history": make_bags(np.arange(16) * 5 + step, lengths)}


def first_and_last_hashes(step):
    """Makes keys at both ends of the range of hashes, where a bound could wrap around, except the very last hash."""
    hashes = [0, 1, 2, 3, 4, 5, 6, 7, *(2**64 - 2 - i for i in range(8))]
    user, item = (programs.keys_of_round_hashes(hashes, table) for table in ("user", "item"))
    return {"user": user, "history": make_bags(item, [3] * 16)}


SKEWS = {
    "one owner: the first": functools.partial(one_owner, 0),
    "one owner: the last": functools.partial(one_owner, 7),
    "one owner: another each step": lambda step: one_owner((3, 6, 3)[step], step),
    "one slice": one_slice,
    "same high word": same_high_word,
    "one key": one_key,
    "empty on some": empty_on_some,
    "empty": empty,
    "unlike hotness": unlike_hotness,
    "all on one device": all_on_one_device,
    "first and last hashes": first_and_last_hashes,
}


def mean_loss(embeddings, label):
    """Returns a global mean over samples that is not linear."""
    score = sum(jnp.tanh(embedding * 20.0).sum(axis=1) for embedding in embeddings.values())
    return jnp.mean((score - label) ** 2)


@functools.cache
def skew_step(collection):
    """Returns a jitted, donating step on the mean loss."""

    def step(state, features, label):
        embeddings, state, plan = collection.lookup(state, features)
        loss, gradients = jax.value_and_grad(mean_loss)(embeddings, label)
        state, stats = collection.update(state, plan, gradients)
        return state, loss, embeddings, stats

    return jax.jit(step, donate_argnums=0, compiler_options=programs.quickly())


LABEL = np.linspace(-1.0, 1.0, 16).astype(np.float32)


def train_on_skew(collection, make, *, is_pipelined=False):
    """Trains three steps on a skewed log."""
    raws = [{**make(step), "label": LABEL} for step in range(3)]
    state, results = collection.init(seed=SEED), []
    if is_pipelined:
        inputs = collection.pipeline(raws)
    else:
        inputs = ((batch, batch.features) for batch in map(collection.batch, raws))
    for batch, asked in inputs:
        state, *result = skew_step(collection)(state, asked, batch["label"])
        results.append(jax.device_get(result))
    return state, results


def assert_like_one_device(collection, state, results, make):
    """Compares tables, embeddings, losses and counts of a skewed log with those of one device."""
    reference = skew_collection(None)
    wanted_state, wanted = train_on_skew(reference, make)
    # Adam divides the first moment by the root of the second, so it passes on a sum's rounding (48 terms, 3e-6) to a
    # gradient that nearly cancels; a thousandth of a step (0.05) bounds that.
    programs.assert_close_tables((reference, collection), (wanted_state, state), rtol=1e-4, atol=5e-5)
    for (loss, embeddings, stats), (want_loss, want_embeddings, want_stats) in zip(results, wanted, strict=True):
        np.testing.assert_allclose(loss, want_loss, rtol=1e-4)
        for name in embeddings:
            np.testing.assert_allclose(embeddings[name], want_embeddings[name], rtol=1e-4, atol=1e-4, err_msg=name)
        assert stats.to_dict() == want_stats.to_dict()


def requests_by_shard(raw, num_shards):
    """Returns the ascending round hashes of requests by (shard, owner), derived independently."""
    keys, lengths = np.asarray(raw["history"].keys), np.asarray(raw["history"].lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bounds = np.arange(num_shards + 1) * (16 // num_shards)
    requests = {}
    for shard in range(num_shards):
        first, last = bounds[shard], bounds[shard + 1]
        asked = {
            "user": programs.as_array(raw["user"])[first:last],
            "item": programs.as_array(keys[offsets[first] : offsets[last]]),
        }
        for table, part in asked.items():
            part = np.unique(part[part != np.uint64(jaxsok.PADDING_KEY)])
            owners, hashes = programs.owner_of(part, table, num_shards), programs.round_hash(part, table)
            for owner in range(num_shards):
                requests.setdefault((shard, owner), []).extend(hashes[owners == owner].tolist())
    return {pair: sorted(hashes) for pair, hashes in requests.items()}


def rounds_of(requests, send_capacity):
    """Counts rounds until all is sent, if a round ends at the least hash that exceeds a capacity anywhere."""
    waiting, num_rounds = list(requests.values()), 0
    while True:
        num_rounds += 1
        too_many = [hashes[send_capacity] for hashes in waiting if len(hashes) > send_capacity]
        if not too_many:
            return num_rounds
        waiting = [[code for code in hashes if code >= min(too_many)] for hashes in waiting]


@pytest.mark.parametrize("name", SKEWS)
def test_skew_in_rounds(name):
    """However keys spread over owners, devices and hashes, Adam on 8 devices is Adam on one; rounds are counted."""
    collection = skew_collection(NUM_SHARDS)
    state, results = train_on_skew(collection, SKEWS[name])
    assert_like_one_device(collection, state, results, SKEWS[name])
    for step, (*_, stats) in enumerate(results):
        raw = SKEWS[name](step)
        requests = requests_by_shard(raw, NUM_SHARDS)
        most = max(map(len, requests.values()))
        assert int(stats.num_rounds[0]) == max(1, -(-most // SEND_CAPACITY))
        features = collection.batch({**raw, "label": LABEL}).features
        num_rounds = np.asarray(rounds_by_hash(collection)(features)).tolist()
        assert num_rounds == [rounds_of(requests, SEND_CAPACITY)] * NUM_SHARDS


@functools.cache
def rounds_by_hash(collection):
    """Returns a jitted count, by shard, of the rounds for gradients whose owners lack room."""
    (spec,), shards = collection.stores, collection.shards

    def count(features):
        order = exchange.HashOrder.of(spec, features.stores[0], SEND_CAPACITY)
        between = exchange.Exchange(shards, collection.exchange)
        return exchange.over_rounds(between, spec, [order], lambda number, _: number + 1, jnp.zeros(1, jnp.int32))

    return jax.jit(lambda features: shards.run(count, (features,), (shards.spec,), shards.spec))


def test_skew_forces_rounds():
    """The logs above need rounds: keys of one owner take several rounds of three keys."""
    for name in ("one owner: the first", "one slice", "same high word", "all on one device", "first and last hashes"):
        assert rounds_of(requests_by_shard(SKEWS[name](0), NUM_SHARDS), SEND_CAPACITY) > 1, name


@pytest.mark.parametrize("name", ["one owner: another each step", "one key", "empty on some", "unlike hotness"])
def test_skew_in_a_pipeline(name):
    """The capacity follows the plan's counts: one round gives the same tables."""
    collection = skew_collection(NUM_SHARDS)
    state, results = train_on_skew(collection, SKEWS[name], is_pipelined=True)
    assert_like_one_device(collection, state, results, SKEWS[name])
    assert all(int(stats.num_rounds[0]) == 1 for *_, stats in results)


def test_skew_of_the_default_capacity():
    """With the default capacity, keys that all have one owner take more rounds, and nothing is lost."""
    tables, features = [SKEW_TABLES[0]], [jaxsok.FeatureSpec("user", "user", combiner=None)]
    collections = jaxsok.Collection(tables, features), programs.over(2, tables, features)
    keys = programs.keys_of_owner(1, 2 * 64, "user", 2).reshape(2, 64)
    gradients, states = {"user": np.ones((2, 64, 4), np.float32)}, []
    for collection in collections:
        state, _, stats = programs.fed_step(collection)(
            collection.init(seed=SEED), programs.batch(collection, user=keys), gradients
        )
        assert programs.counts(stats) == {**dict.fromkeys(oracle.COUNTS, 0), "num_inserted": 128}
        states.append(state)
    # A shard has 64 keys, of which the first round sends a quarter more than half.
    assert int(stats.num_rounds[0]) == 2
    programs.assert_close_tables(collections, states, rtol=1e-6, atol=1e-7)


def test_the_very_last_hash():
    """With two keys of the greatest hash and a capacity of one, the loop ends although no greater bound exists."""
    keys = programs.keys_of_round_hashes([2**64 - 2, 2**64 - 1], "user")
    code = f"""
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np, jaxsok
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
collection = jaxsok.Collection(
    [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=64)],
    [jaxsok.FeatureSpec("user", "user")], mesh=mesh, axis="data", exchange=jaxsok.ExchangeSpec(send_capacity=1),
)
keys = np.array({keys.tolist() * 2}, np.uint64)
embeddings, state, plan = collection.lookup(collection.init(seed=0), collection.batch({{"user": keys}}).features)
state, stats = collection.update(state, plan, embeddings)
print(int(stats.num_rounds[0]), collection.num_rows(state)["user"])
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxsok.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["2", "2"], done.stderr[-2000:]


# --------------------------------------------------------------------------------------------------------------
# Refused keys


def full_tables(num_shards):
    """Returns stores that fill up: one sharded, one on a shard, one replicated."""
    options = {"capacity": 8, "max_capacity": 8}
    tables = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), **options),
        jaxsok.TableSpec("item", 3, jaxsok.optim.sgd(1.0), placement=jaxsok.on(min(2, num_shards - 1)), **options),
        jaxsok.TableSpec("ad", 4, jaxsok.optim.sgd(1.0), placement=jaxsok.REPLICATED, **options),
    ]
    return programs.over(num_shards, tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])


@pytest.mark.parametrize("path", PATHS)
def test_law_5_refused_keys_are_counted_not_lost(path):
    """In full stores, asked = found + inserted + refused + padding; refused keys read initial rows and never learn."""
    collection = full_tables(4)
    rng, state = np.random.default_rng(5), collection.init(seed=0)
    names = [table.name for table in collection.tables]
    num_inserted = dict.fromkeys(names, 0)
    raws = [{name: rng.integers(0, 60, 32) - 1 for name in names} for _ in range(3)]
    inputs = collection.pipeline(raws) if path == "pipeline" else ((b, b.features) for b in map(collection.batch, raws))
    gradients = {table.name: np.ones((32, table.dim), np.float32) for table in collection.tables}
    for raw, (_, asked) in zip(raws, inputs, strict=True):
        state, embeddings, stats = programs.fed_step(collection)(state, asked, gradients)
        for table in collection.tables:
            counts, keys = programs.counts(stats, table.name), raw[table.name]
            assert sum(counts.values()) == 32
            assert counts["num_padding"] == (keys < 0).sum()
            num_inserted[table.name] += counts["num_inserted"]
            rows = programs.rows_of(collection, state, table.name)
            assert num_inserted[table.name] == len(rows) == stats.to_dict()[table.name]["num_rows"]
            is_refused = np.array([key >= 0 and key not in rows for key in keys.tolist()])
            assert counts["num_refused"] == is_refused.sum()
            initial = programs.initial_rows(table.name, table.dim, keys[is_refused])
            np.testing.assert_array_equal(np.asarray(embeddings[table.name])[is_refused], initial)
    assert num_inserted["item"] == num_inserted["ad"] == 8  # exactly the declared capacity; shares of "user" round up
    assert counts["num_refused"] > 0 and num_inserted["user"] >= 8
    features = programs.batch(collection, **raws[-1])
    _, stats = programs.find(collection)(state, features)
    for name in names:
        found, rows = programs.counts(stats, name), programs.rows_of(collection, state, name)
        assert found["num_missing"] == sum(key >= 0 and key not in rows for key in raws[-1][name].tolist())
        assert sum(found.values()) == 32
        assert found["num_inserted"] == found["num_refused"] == 0


# --------------------------------------------------------------------------------------------------------------
# Row ids

ID_CAPACITY, NUM_ID_SAMPLES, ID_SEND_CAPACITY = 12, 48, 3  # rows of a shard; samples of all four shards
ID_PATHS = {
    "lookup": {},
    "plan": {"plan": None},
    "plan that sends": {"plan": (24,) * 2},
    "rounds": {"send_capacity": ID_SEND_CAPACITY},
    "plan, rounds": {"send_capacity": ID_SEND_CAPACITY, "plan": None},
}


@functools.cache
def small_tables(send_capacity=None):
    """Returns a sharded table and one on shard 2 in one store, and a replicated one, all too small for the keys."""
    options = {"capacity": 4 * ID_CAPACITY, "max_capacity": 4 * ID_CAPACITY}
    on_a_shard = {"capacity": ID_CAPACITY, "max_capacity": ID_CAPACITY}
    sgd = jaxsok.optim.sgd(1.0)
    tables = [
        jaxsok.TableSpec("user", 4, sgd, **options),
        jaxsok.TableSpec("item", 4, sgd, placement=jaxsok.on(2), **on_a_shard),
        jaxsok.TableSpec("ad", 4, sgd, placement=jaxsok.REPLICATED, **on_a_shard),
    ]
    features = [
        jaxsok.FeatureSpec("user", "user", combiner="mean"),
        jaxsok.FeatureSpec("item", "item", combiner=None),
        jaxsok.FeatureSpec("ad", "ad", combiner=None),
    ]
    return programs.over(4, tables, features, **({} if send_capacity is None else {"send_capacity": send_capacity}))


def crowd(seed):
    """Makes more keys than rows, with padding between them."""
    rng = np.random.default_rng(seed)
    raw = {
        "user": rng.integers(0, 400, (NUM_ID_SAMPLES, 2)),
        "item": rng.integers(0, 40, NUM_ID_SAMPLES),
        "ad": rng.integers(0, 40, NUM_ID_SAMPLES),
    }
    return {name: np.where(rng.random(keys.shape) < 0.1, -1, keys) for name, keys in raw.items()}


def arrivals_of(raw, store):
    """Returns an owner's distinct (table, key) by source shard and first occurrence in its part, feature after feature.

    An owner of a replicated store is any of its shards.
    """
    by_owner = [[] for _ in range(4)]
    for shard in range(4):
        for table in ("user", "item") if store == 0 else ("ad",):
            for key in np.split(raw[table], 4)[shard].reshape(-1).tolist():
                if key >= 0:
                    owner = int(programs.owner_of([key], table, 4)[0]) if table == "user" else 2
                    by_owner[owner].append((table, key))
    return [list(dict.fromkeys(pairs)) for pairs in by_owner]


class Ids:
    """The row ids of one store: by owner, the keys with rows and the free ids."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.num_used, self.free = capacity, [{} for _ in range(4)], [0] * 4, [[]] * 4

    def insert(self, by_owner):
        """Gives new pairs free ids, the least first, then fresh ids while there are any."""
        for owner, pairs in enumerate(by_owner):
            for pair in pairs:
                if pair in self.rows[owner]:
                    continue
                if self.free[owner]:
                    self.rows[owner][pair] = self.free[owner].pop(0)
                elif self.num_used[owner] < self.capacity:
                    self.rows[owner][pair] = self.num_used[owner]
                    self.num_used[owner] += 1

    def erase(self, pairs):
        """Removes rows and frees their ids."""
        for owner, rows in enumerate(self.rows):
            self.free[owner] = sorted([*self.free[owner], *(rows.pop(pair) for pair in pairs if pair in rows)])

    def of(self, table):
        """Returns the row id of each key in its shard."""
        return {key: row_id for rows in self.rows for (name, key), row_id in rows.items() if name == table}


@pytest.mark.parametrize("path", ID_PATHS)
def test_row_ids_follow_source_shard_and_first_occurrence(path):
    """Refused keys and row ids do not depend on the path by which keys reach their owners."""
    options = ID_PATHS[path]
    declared = small_tables(options.get("send_capacity"))
    state, most_rounds = declared.init(seed=0), 0
    model = [Ids(store.capacity // 4) for store in state.stores]
    for step in range(3):
        raw = crowd(step)
        asked = declared.batch(raw).features
        if "plan" in options:
            asked = declared.plan(asked, send_capacity=options["plan"])
        embeddings, state, plan = programs.lookup(declared)(state, asked)
        num_refused = 0
        for s, ids in enumerate(model):
            by_owner = arrivals_of(raw, s)
            ids.insert(by_owner)
            num_refused += sum(
                pair not in rows for pairs, rows in zip(by_owner, ids.rows, strict=True) for pair in pairs
            )
        assert num_refused > 0 or step == 0
        for table, ids, store in zip(("user", "item", "ad"), (model[0], model[0], model[1]), (0, 0, 1), strict=True):
            exported = declared.export_table(state, table)
            capacity = state.stores[store].capacity // 4
            got = dict(zip(exported["keys"].tolist(), (exported["row_ids"] % capacity).tolist(), strict=True))
            assert got == ids.of(table), (step, table)
        gradients = jax.tree.map(jnp.ones_like, embeddings)
        state, stats = programs.update(declared)(state, plan, gradients)
        most_rounds = max(most_rounds, np.asarray(stats.num_rounds).max())
        for table, ids in zip(("user", "item", "ad"), (model[0], model[0], model[1]), strict=True):
            gone = [key for key in list(ids.of(table)) if key % 3 == step]
            state, num_erased = declared.erase(state, table, np.array(gone, np.int64))
            assert int(num_erased) == len(gone) > 0
            ids.erase([(table, key) for key in gone])
    assert (most_rounds > 1) == ("rounds" in path)


# --------------------------------------------------------------------------------------------------------------
# Growth, erase, several plans


def test_growth_on_a_mesh_refuses_nothing():
    """With small tables and batches full of new keys, 8 devices hold the same rows as one."""
    tables = [jaxsok.TableSpec("user", 4, ADAM, capacity=16), jaxsok.TableSpec("item", 4, ADAM, capacity=16)]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item")]
    collections = jaxsok.Collection(tables, features), programs.over(8, tables, features)
    states, num_grown = [], []
    for collection in collections:
        state, before = collection.init(seed=SEED), None
        for step in range(8):
            keys = np.arange(32) + 24 * step
            features_of_step = programs.batch(collection, user=keys, item=keys // 2)
            state = collection.grow(state)
            if before is not None:  # growing loses no row and changes none
                after = programs.by_key(collection, state, "user")
                for column in before:
                    np.testing.assert_array_equal(before[column], after[column])
            gradients = {name: np.full((32, 4), 0.5 + step, np.float32) for name in ("user", "item")}
            state, _, stats = programs.fed_step(collection)(state, features_of_step, gradients)
            stats.check()
            before = programs.by_key(collection, state, "user")
        states.append(state)
        num_grown.append(collection.growth.num_grown)
    assert min(num_grown) >= 1
    assert collections[0].num_rows(states[0]) == collections[1].num_rows(states[1]) == {"user": 200, "item": 100}
    programs.assert_close_tables(collections, states, rtol=1e-5, atol=1e-6)


@functools.cache
def two_stores(num_shards):
    """Returns a sharded and a replicated store; with None, on one device."""
    tables = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.5), capacity=128),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.sgd(0.5), capacity=128, placement=jaxsok.REPLICATED),
    ]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("ad", "ad", combiner="mean")]
    return jaxsok.Collection(tables, features) if num_shards is None else programs.over(num_shards, tables, features)


TWO_STORES_GRADIENTS = {"user": np.ones((16, 4), np.float32), "ad": np.ones((16, 3), np.float32)}


def two_stores_raw(step=0):
    """Returns a batch for `two_stores`."""
    rng = np.random.default_rng(step)
    return {"user": rng.integers(0, 40, 16), "ad": rng.integers(-1, 20, (16, 2))}


@pytest.mark.parametrize("table", ["user", "ad"])
def test_erase_makes_a_plan_stale_on_all_shards(table):
    """After the erase of one row on one shard, the plan moves no row anywhere, and all its uses are counted."""
    counted = []
    for collection in (two_stores(None), two_stores(NUM_SHARDS)):
        raw = two_stores_raw()
        _, state, plan = programs.lookup(collection)(collection.init(seed=0), programs.batch(collection, **raw))
        victim = int(raw[table].reshape(-1)[0])
        state, num_erased = collection.erase(state, table, np.array([victim, 10**6]))
        assert int(num_erased) == 1
        before = {name: programs.rows_of(collection, state, name) for name in ("user", "ad")}
        assert victim not in before[table]
        state, stats = programs.update(collection)(state, plan, TWO_STORES_GRADIENTS)
        for name, rows in before.items():
            after = programs.rows_of(collection, state, name)
            assert after.keys() == rows.keys()
            for key in rows:
                np.testing.assert_array_equal(after[key], rows[key])
        assert int(state.step) == 1
        counted.append(int(stats.num_stale))
    assert counted[0] == counted[1] > 0


def test_erase_of_nothing_leaves_plans_alone():
    """After the erase of absent keys the plan still works."""
    collection = two_stores(NUM_SHARDS)
    _, state, plan = programs.lookup(collection)(
        collection.init(seed=0), programs.batch(collection, **two_stores_raw())
    )
    state, num_erased = collection.erase(state, "user", np.array([10**6, 10**7]))
    assert int(num_erased) == 0
    before = programs.rows_of(collection, state)
    state, stats = programs.update(collection)(state, plan, TWO_STORES_GRADIENTS)
    stats.check()
    after = programs.rows_of(collection, state)
    assert all((after[key] < before[key]).all() for key in before)


def test_erased_keys_come_back_as_new():
    """Erased rows are gone on every shard, return as initial rows, and are counted on their shards."""
    for collection in (two_stores(None), two_stores(NUM_SHARDS)):
        features = programs.batch(collection, user=np.arange(16), ad=np.arange(32).reshape(16, 2))
        state, _, _ = programs.fed_step(collection)(collection.init(seed=0), features, TWO_STORES_GRADIENTS)
        state, num_erased = collection.erase(state, "ad", np.arange(4, 40))
        assert int(num_erased) == 28
        state, num_erased = collection.erase(state, "user", np.arange(8))
        assert int(num_erased) == 8
        assert collection.num_rows(state) == {"user": 8, "ad": 4}
        embeddings, state, _ = programs.lookup(collection)(state, features)
        np.testing.assert_array_equal(embeddings["user"][:8], programs.initial_rows("user", 4, np.arange(8)))
        assert collection.num_rows(state) == {"user": 16, "ad": 32}


# A plan made ahead goes in one round, as those of the first way do; test_partial_bags.py has several of them, too.
@pytest.mark.parametrize("path", [pytest.param("planned", marks=pytest.mark.slow), "lookups", "one in rounds"])
def test_several_plans_in_one_update(path):
    """One step of two micro-batches moves shared rows once, as on one device, though one plan may need more rounds."""
    tables = [
        jaxsok.TableSpec("user", 4, ADAM, capacity=128, row_gradient="mean"),
        jaxsok.TableSpec("ad", 3, ADAM, capacity=128, placement=jaxsok.REPLICATED),
    ]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("ad", "ad", combiner="mean")]
    exchange_of = {"send_capacity": 1} if path == "one in rounds" else {}
    collections = jaxsok.Collection(tables, features), programs.over(4, tables, features, **exchange_of)
    raws = [two_stores_raw(0), two_stores_raw(1)]
    if path == "one in rounds":
        raws[1]["user"][np.arange(16) % 4 != 0] = -1  # one key per shard
        raws[1]["ad"][np.arange(32).reshape(16, 2) % 8 != 0] = -1
    states, counts = [], []
    for collection in collections:
        state, plans = collection.init(seed=0), []
        for raw in raws:
            asked = programs.batch(collection, **raw)
            if path == "planned" and collection.shards.is_mesh:
                asked = collection.plan(asked, send_capacity=(16, 32))
            _, state, plan = programs.lookup(collection)(state, asked)
            plans.append(plan)
        if collection.shards.is_mesh:
            is_several = [[int(found.num_rounds[0]) > 1 for found in plan.found] for plan in plans]
            assert is_several == [[path == "one in rounds"] * 2, [False] * 2]
        gradients = [jax.tree.map(lambda g, k=k: g * k, TWO_STORES_GRADIENTS) for k in (np.float32(1), np.float32(3))]
        state, stats = programs.update(collection)(state, plans, gradients)
        states.append(state)
        counts.append(stats.to_dict())
        assert int(state.step) == 1
    assert counts[0] == counts[1]
    programs.assert_close_tables(collections, states, rtol=1e-5, atol=1e-6)
