"""The laws of the design that name no implementation: 3, 4, 5, 9, 10 and 14 (1 and 5 also in test_machine.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import strategies
from hypothesis import given, strategies as st

import jaxsok
from jaxsok.features import FeatureLayout
from jaxsok.kernels import combine as combine_door, lookup as lookup_door
from jaxsok.types import COUNTERS, NO_ROW

BIG_LEAF_BYTES = 64 << 10  # smaller leaves are counters, which XLA may move


def three_tables(capacity=1 << 16):
    """Declares two stores, three tables, weights, and bags of all kinds."""
    adagrad, adam = jaxsok.optim.rowwise_adagrad(0.1), jaxsok.optim.adam(0.01)
    return jaxsok.Collection(
        [
            jaxsok.TableSpec("user", 8, adagrad, capacity=capacity),
            jaxsok.TableSpec("item", 8, adagrad, capacity=capacity, initializer=jaxsok.initializers.normal(0.1)),
            jaxsok.TableSpec("ad", 16, adam, capacity=capacity),
        ],
        [
            jaxsok.FeatureSpec("user", "user"),
            jaxsok.FeatureSpec("history", "item", combiner="mean", weighted=True, max_keys=4096),
            jaxsok.FeatureSpec("basket", "item", combiner="sqrtn"),
            jaxsok.FeatureSpec("ad", "ad", combiner="sum"),
        ],
    )


def big_batch(collection, rng, num_bags=512):
    """Returns a batch of Zipf keys: some rows are used hundreds of times and most once."""
    lengths = rng.multinomial(rng.integers(0, 4096), np.full(num_bags, 1 / num_bags)).astype(np.int32)
    return collection.batch(
        {
            "user": rng.integers(0, 2**63, num_bags),
            "history": jaxsok.Bags(
                rng.zipf(1.2, lengths.sum()).astype(np.int64) << 20,
                lengths=lengths,
                weights=rng.uniform(0.1, 2.0, lengths.sum()).astype(np.float32),
            ),
            "basket": np.where(rng.random((num_bags, 4)) < 0.2, -1, rng.zipf(1.1, (num_bags, 4)) % 1000),
            "ad": rng.zipf(1.05, (num_bags, 8)),
        }
    ).features


def run(collection, seed, num_steps=4, salt=None):
    """Trains a few steps; returns all embeddings and the last state."""
    rng, state, embeddings = np.random.default_rng(seed), collection.init(seed=seed, salt=salt), []
    for i in range(num_steps):
        features = big_batch(collection, rng)
        found, state, plan = programs.lookup(collection)(state, features)
        embeddings.append(found)
        gradients = {
            name: jnp.asarray(rng.normal(size=array.shape).astype(np.float32)) for name, array in found.items()
        }
        state, _ = programs.update(collection)(state, plan, gradients)
        if i == 2:
            state, _ = collection.erase(state, "item", np.arange(1, 50) << 20)
    return embeddings, state


def test_law_3_two_runs_give_the_same_bits():
    """Embeddings are equal, and so is the state except for the order of entries in the index."""
    collection = three_tables()
    (first, first_state), (second, second_state) = run(collection, 3), run(collection, 3)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(programs.bits(a), programs.bits(b))
    programs.assert_same_state(first_state, second_state, index=False)


def test_law_3_state_has_an_index_to_leave_out():
    """The comparison above excludes only the index: rows, records and counters are compared."""
    paths = [path for path, _ in programs.state_leaves(three_tables(256).init(seed=0))]
    assert any("index" in path for path in paths)
    assert sum("index" not in path for path in paths) >= 6  # rows, records and optimizer state of two stores


@pytest.mark.parametrize("num_uses", [1, 3, 31, 64, 1000])
def test_a_sum_depends_only_on_the_uses_of_its_row(num_uses):
    """Other keys, their positions, and the division of the batch into plans change no bit of a row (decision D8)."""
    collection = programs.one_table(dim=8, capacity=8192)
    rng = np.random.default_rng(num_uses)
    own = rng.normal(size=(num_uses, 8)).astype(np.float32)

    def row_after(places, keys, cuts):
        keys, gradients = keys.copy(), rng.normal(size=(len(keys), 8)).astype(np.float32)
        keys[places], gradients[places] = 7, own
        state, plans, parts = collection.init(seed=0), [], []
        for part in np.split(np.arange(len(keys)), cuts):
            _, state, plan = collection.lookup(state, programs.batch(collection, user=keys[part]))
            plans.append(plan)
            parts.append({"user": jnp.asarray(gradients[part])})
        state, _ = collection.update(state, plans, parts)
        return programs.bits(programs.rows_of(collection, state)[7])

    size = 2 * num_uses + 6
    strangers, one_stranger = rng.integers(100, 4000, size), np.full(size, 100)
    want = row_after(np.arange(num_uses), strangers, [])
    np.testing.assert_array_equal(want, row_after(size - num_uses + np.arange(num_uses), one_stranger, []))
    scattered = np.sort(rng.permutation(size)[:num_uses])
    np.testing.assert_array_equal(want, row_after(scattered, strangers, []))
    np.testing.assert_array_equal(want, row_after(scattered, strangers, [size // 3, size // 2]))


NUM_UNIQUE, NUM_KEYS, NUM_BAGS, DIM = 5, 16, 4, 3


@st.composite
def combinations(draw):
    """Draws (inverse, offsets): some keys are padding (out of range), some bags are empty."""
    inverse = draw(st.lists(st.integers(0, NUM_UNIQUE), min_size=NUM_KEYS, max_size=NUM_KEYS))
    cuts = sorted(draw(st.lists(st.integers(0, NUM_KEYS), min_size=NUM_BAGS, max_size=NUM_BAGS)))
    return np.array(inverse, np.int32), np.array([0, *cuts], np.int32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@given(case=combinations(), seed=st.integers(0, 2**31))
def test_law_4_combine_and_its_transpose(combiner, weighted, case, seed):
    """<combine(x), y> = <x, transpose(y)>, and combining agrees with the oracle."""
    inverse, offsets = case
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(NUM_UNIQUE, DIM)).astype(np.float32)
    gradients = rng.normal(size=(NUM_BAGS, DIM)).astype(np.float32)
    weights = rng.uniform(0.5, 2.0, NUM_KEYS).astype(np.float32) if weighted else None
    both = _combine_and_transpose(combiner, weighted)(rows, gradients, inverse, offsets, weights)
    embeddings, row_gradients = (np.asarray(array, np.float64) for array in both)
    # Both sides add at most 16 * 3 products of size <= 16 in float32: 48 * 16 * 2^-24 < 1e-4.
    np.testing.assert_allclose(np.vdot(embeddings, gradients), np.vdot(rows, row_gradients), rtol=1e-4, atol=1e-4)

    for bag in range(NUM_BAGS):
        span = range(offsets[bag], offsets[bag + 1])
        keys = [int(inverse[i]) if inverse[i] < NUM_UNIQUE else oracle.PADDING_KEY for i in span]
        bag_weights = [1.0 if weights is None else float(weights[i]) for i in span]
        factors = oracle.bag_factors(keys, bag_weights, combiner, weighted)
        bag_rows = [rows[key] if key != oracle.PADDING_KEY else np.zeros(DIM) for key in keys]
        want = oracle.combine(bag_rows, factors, DIM)
        np.testing.assert_allclose(embeddings[bag], want, rtol=1e-5, atol=1e-5)  # 16 float32 additions of size <= 16


@pytest.fixture(scope="module", autouse=True)
def _free_programs():
    yield
    _PROGRAMS.clear()


_PROGRAMS = {}


def _combine_and_transpose(combiner, weighted):
    """Returns a program of both directions, for one ragged feature."""
    key = combiner, weighted
    if key not in _PROGRAMS:
        layout = FeatureLayout(
            name="bags",
            table=0,
            combiner=combiner,
            num_keys=NUM_KEYS,
            num_bags=NUM_BAGS,
            hotness=0,
            embedding_shape=(NUM_BAGS,),
            num_offsets=NUM_BAGS + 1,
            weights_start=0 if weighted else -1,
        )
        words, tables = np.array([layout.words()], np.int32), programs.one_table(dim=DIM).stores[0].table_words()

        def both(rows, gradients, inverse, offsets, weights):
            bags = offsets, weights if weighted else jnp.zeros(0, jnp.float32), words
            is_padding = inverse >= NUM_UNIQUE
            keys = jnp.where(is_padding[:, None], programs.words(oracle.PADDING_KEY), jnp.uint32(0))
            row_ids = jnp.where(is_padding, jnp.uint32(NO_ROW), inverse.astype(jnp.uint32))
            counters, seed = jnp.zeros(len(COUNTERS), jnp.uint32), jnp.zeros(2, jnp.uint32)
            shapes = [(NUM_BAGS, DIM)]
            reading = lookup_door.Reading(tables, seed, (keys, *bags), layout.num_tiles, shapes)
            _, _, (embeddings,) = lookup_door.lookup_planned(counters, reading, row_ids, [rows])
            row_gradients, _ = combine_door.combine_transpose([gradients], inverse, bags, NUM_UNIQUE, layout.num_tiles)
            return embeddings, row_gradients

        _PROGRAMS[key] = jax.jit(both)
    return _PROGRAMS[key]


def test_law_4_through_lookup_and_update():
    """The gradient that reaches a row (sgd, rate 1) is the derivative of the embeddings with respect to the row."""
    for combiner in ("sum", "mean", "sqrtn"):
        collection = programs.one_table(combiner=combiner, weighted=True, dim=2)
        keys = np.array([[3, 5, 3], [5, 9, -1]])
        weights = np.array([[1.0, 0.5, 2.0], [1.0, -0.25, 7.0]], np.float32)
        features = programs.batch(collection, user=jaxsok.Bags(keys, weights=weights))
        _, state, plan = collection.lookup(collection.init(seed=1), features)
        before = programs.rows_of(collection, state)
        gradient = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)
        state, _ = collection.update(state, plan, {"user": jnp.asarray(gradient)})
        after = programs.rows_of(collection, state)
        want = {key: np.zeros(2) for key in before}
        for bag in range(2):
            bag_keys = [int(key) % 2**64 for key in keys[bag]]
            for key, factor in zip(
                bag_keys, oracle.bag_factors(bag_keys, weights[bag].tolist(), combiner, True), strict=True
            ):
                if key != oracle.PADDING_KEY:
                    want[key] = want[key] + factor * gradient[bag]
        for key in before:
            # The values are differences of float32 numbers of size <= 10: a few units of 2^-24 * 10.
            np.testing.assert_allclose(before[key] - after[key], want[key], atol=5e-6)


@given(data=st.data())
def test_law_5_every_key_is_counted_once(data):
    """Asked = found + inserted + missing + refused + padding, with refusals: the store has 4 rows."""
    collection = _full_soon()
    bags = data.draw(strategies.ragged_bags(strategies.CORNER_KEYS, 4, 8, padding=True))
    user = data.draw(strategies.key_lists(strategies.CORNER_KEYS, 4, padding=True))
    features = programs.batch(collection, user=programs.as_array(user), history=programs.to_bags(bags))
    _, state, plan = programs.lookup(collection)(collection.init(seed=0), features)
    _, stats = programs.update(collection)(state, plan, {name: jnp.zeros((4, 4)) for name in ("user", "history")})
    counts = programs.counts(stats)
    assert sum(counts.values()) == 4 + 8
    distinct = {*user, *(key for bag in bags for key in bag)} - {oracle.PADDING_KEY}
    assert counts["num_inserted"] == min(4, len(distinct))
    _, stats = programs.find(collection)(state, features)
    found = programs.counts(stats)
    assert sum(found.values()) == 4 + 8
    assert found["num_missing"] == counts["num_refused"]
    assert found["num_refused"] == found["num_inserted"] == 0


def _full_soon():
    if "full" not in _PROGRAMS:
        _PROGRAMS["full"] = jaxsok.Collection(
            [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=4, max_capacity=4)],
            [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("history", "user", max_keys=8)],
        )
    return _PROGRAMS["full"]


def pointers(state):
    """Returns the address of each large leaf."""
    return {
        path: leaf.unsafe_buffer_pointer()
        for path, leaf in programs.state_leaves(state)
        if leaf.nbytes >= BIG_LEAF_BYTES
    }


def test_law_9_a_donated_step_keeps_every_address():
    """All addresses stay when lookup, update and all between run in one program, several times."""
    collection, rng = three_tables(), np.random.default_rng(0)
    state = collection.init(seed=0)
    before = pointers(state)
    assert len(before) >= 8  # index, records, rows and optimizer state of two stores
    for _ in range(3):
        state, _, _ = programs.donated_step(collection)(state, big_batch(collection, rng))
        assert pointers(state) == before


def test_law_9_donated_lookup_update_and_scan_keep_every_address():
    """All addresses stay for each op alone, and for a scan over steps."""
    collection, rng = three_tables(), np.random.default_rng(1)
    state = collection.init(seed=0)
    before = pointers(state)
    features = big_batch(collection, rng)
    embeddings, state, plan = jax.jit(collection.lookup, donate_argnums=0)(state, features)
    assert pointers(state) == before
    state, _ = jax.jit(collection.update, donate_argnums=0)(state, plan, embeddings)
    assert pointers(state) == before

    def body(state, features):
        state, loss, _ = programs.train_step(collection)(state, features)
        return state, loss

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[big_batch(collection, rng) for _ in range(3)])
    state, _ = jax.jit(lambda state, xs: jax.lax.scan(body, state, xs), donate_argnums=0)(state, stacked)
    assert pointers(state) == before


def test_law_9_erase_keeps_every_address():
    """Erase rebuilds the index in place."""
    collection, rng = three_tables(), np.random.default_rng(2)
    state, _, _ = programs.donated_step(collection)(collection.init(seed=0), big_batch(collection, rng))
    before = pointers(state)
    erase = jax.jit(lambda state, keys: collection.erase(state, "item", keys), donate_argnums=0)
    state, num_erased = erase(state, jnp.asarray(programs.words(np.arange(1, 100))))
    assert int(num_erased) > 0
    assert pointers(state) == before


def test_without_donation_the_old_state_stays():
    """Without donation the same programs change a copy of the state."""
    collection, rng = three_tables(1 << 10), np.random.default_rng(3)
    state = collection.init(seed=0)
    kept = jax.tree.map(lambda leaf: np.array(leaf), state)
    features = big_batch(collection, rng, num_bags=64)
    _, new_state, plan = programs.lookup(collection)(state, features)
    programs.assert_same_state(kept, state)
    middle = jax.tree.map(lambda leaf: np.array(leaf), new_state)
    embeddings, _ = programs.find(collection)(new_state, features)
    programs.update(collection)(new_state, plan, embeddings)
    jax.jit(lambda state: collection.erase(state, "user", np.arange(5)))(new_state)
    programs.assert_same_state(middle, new_state)


@pytest.mark.gpu
def test_law_10_cpu_and_cuda_agree():
    """Both back ends agree on equal steps: integers exactly, floats to the bit (looser bounds would hide an order)."""
    results = []
    for device in (jax.devices("cpu")[0], jax.devices("gpu")[0]):
        with jax.default_device(device):
            embeddings, state = run(three_tables(), 5, salt=0)
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(state))
            results.append((jax.device_get(embeddings), jax.device_get(state)))
    (cpu_embeddings, cpu_state), (gpu_embeddings, gpu_state) = results
    for (path, a), (_, b) in zip(programs.state_leaves(cpu_state), programs.state_leaves(gpu_state), strict=True):
        if "index" in path:
            continue
        a, b = programs.without_lineage(path, a), programs.without_lineage(path, b)
        if a.dtype.kind == "f":
            # Both back ends use the same correctly rounded operations in the same order; 1e-6 is 8 roundings, for
            # a compiler that contracts a product and a sum.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=path)
        else:
            np.testing.assert_array_equal(a, b, err_msg=path)
    for a, b in zip(jax.tree.leaves(cpu_embeddings), jax.tree.leaves(gpu_embeddings), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_law_10_to_the_bit():
    """The shared core promises equality, not closeness."""
    leaves = []
    for device in (jax.devices("cpu")[0], jax.devices("gpu")[0]):
        with jax.default_device(device):
            embeddings, state = run(three_tables(), 6, salt=0)
            leaves.append([jax.device_get(embeddings), dict(programs.state_leaves(jax.device_get(state)))])
    for a, b in zip(jax.tree.leaves(leaves[0][0]), jax.tree.leaves(leaves[1][0]), strict=True):
        np.testing.assert_array_equal(programs.bits(a), programs.bits(b))
    for path, leaf in leaves[0][1].items():
        if "index" not in path:
            a, b = (programs.bits(programs.without_lineage(path, each)) for each in (leaf, leaves[1][1][path]))
            np.testing.assert_array_equal(a, b, err_msg=path)


# Law 14: an operation that raises before it is dispatched has changed nothing ----------------------------------------


class Injected(Exception):
    """The error that a test injects."""


def fail(*args, **kwargs):
    """Raises in place of a function."""
    raise Injected


def scores_that_fail(facts):
    """Fails as the score of a user's policy, for the rows of a store and not for those few that a declaration tries."""
    if facts.keys.shape[0] >= 256:
        raise Injected
    return facts.last_step


def failing_stores(num_shards=None, capacity=64):
    """Declares a store that evicts, whose waiting keys need room; a store that grows; and one whose policy fails."""
    sgd = jaxsok.optim.sgd(0.5)
    lru, count = jaxsok.policies.LeastRecentlyUsed(), jaxsok.policies.AdmitByCount(2)
    worst = jaxsok.policies.LowestScore(scores_that_fail)
    tables = [
        jaxsok.TableSpec("full", 4, sgd, capacity=capacity, max_capacity=capacity, eviction=lru, admission=count),
        jaxsok.TableSpec("open", 3, sgd, capacity=capacity),
        jaxsok.TableSpec("worst", 2, sgd, capacity=256, max_capacity=300, eviction=worst),
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    if num_shards is None:
        return jaxsok.Collection(tables, features)
    return programs.over(num_shards, tables, features)


def filled_stores(collection, num_keys):
    """Returns a state whose first two stores are full; each key occurs twice, and so is admitted."""
    state = collection.init(seed=0)
    for keys in np.split(np.arange(num_keys), 4):
        batch = collection.batch(dict.fromkeys(("full", "open", "worst"), np.repeat(keys, 2)))
        _, state, _ = collection.lookup(state, batch.features)
    return state


FAILING = {
    "memory of a slab": ("grow", "jaxsok.enlarge.new_slab"),
    "index": ("grow", "jaxsok.kernels.table.rebuild"),
    "waiting keys": ("grow", "jaxsok.kernels.table.wait"),
    "hand over": ("grow", None),
    "eviction": ("grow", "jaxsok.kernels.evict.release"),
    "a policy": ("evict", None),
    "pieces": ("stack", None),
    "room": ("import_table", None),
}


@pytest.mark.parametrize("where", FAILING)
def test_law_14_what_raises_has_changed_nothing(where, monkeypatch):
    """When the last of several stores or parts of an operation fails, all arrays exist with their contents."""
    monkeypatch.setattr("jaxsok.store.MIN_SIGHTINGS", 8)
    # Each case has its own capacity: a program that was traced before would not fail.
    capacity = 64 + 4 * list(FAILING).index(where)
    collection = failing_stores(2 if where == "pieces" else None, capacity)
    state = filled_stores(collection, capacity)
    before = jax.tree.map(np.array, state)
    op, target = FAILING[where]
    with monkeypatch.context() as patch, pytest.raises((Injected, ValueError, jaxsok.TableFullError)):
        if target is not None:
            patch.setattr(target, fail)
        if op == "grow":
            collection.grow(state, hand_over=fail if where == "hand over" else None)
        elif op == "evict":
            collection.evict(state, num_rows=10)
        elif op == "stack":
            collection.stack((state, jnp.zeros(3)))
        else:
            records = jaxsok.Records(np.arange(500, dtype=np.uint64), np.zeros((500, 2), np.float32))
            collection.import_table(state, "worst", records, num_rows=500)
    programs.assert_same_state(before, state)
    # Without the fault the operation works.
    state = collection.grow(state)
    assert collection.growth.num_grown == 1 and state.stores[1].capacity > capacity
    assert programs.rows_of(collection, state, "open").keys() == set(range(capacity))
    assert programs.rows_of(collection, state, "full").keys() < set(range(capacity))


def test_stacking_an_array_that_stands_twice():
    """It is stacked once."""
    collection = failing_stores(2)
    array = jax.device_put(np.arange(8.0, dtype=np.float32), collection.shards.split)
    first, second = collection.unstack(collection.stack([array, array]))
    np.testing.assert_array_equal(first, np.arange(8.0))
    np.testing.assert_array_equal(second, first)
