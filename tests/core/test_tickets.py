"""Plans act once, on a descendant of the state that their lookup returned, or not at all (law 14, decision D18)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import jaxsok
from jaxsok.kernels import tickets as kernels
from jaxsok.types import COUNTERS, PADDING_KEY

NUM_KEYS = 4
OPEN_LOOKUPS = 256  # as in docs/training.md
ONES = {"user": np.ones((NUM_KEYS, 4), np.float32)}


@pytest.fixture(scope="module")
def collection():
    """Returns a collection of one table that counts the steps of each row: each step subtracts the gradient."""
    return programs.one_table(optimizer=jaxsok.optim.adagrad(1.0), capacity=512)


@functools.cache
def two_stores(num_shards, **exchange):
    """Returns a collection of a sharded and a replicated table, with different dims."""
    tables = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=128),
        jaxsok.TableSpec("ad", 3, jaxsok.optim.adam(0.1), capacity=128, placement=jaxsok.REPLICATED),
    ]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("ad", "ad", combiner="mean")]
    if num_shards is None:
        return jaxsok.Collection(tables, features)
    return programs.over(num_shards, tables, features, **exchange)


def look_up_keys(collection, state, *keys):
    """Returns state and plan after a lookup of some keys."""
    _, state, plan = programs.lookup(collection)(state, programs.batch(collection, user=np.array(keys)))
    return state, plan


def assert_left_out(collection, state, plans, gradients=ONES, *, num_misused=1):
    """Checks that an update by these plans changes no row, counts them, and fails check() with the reason."""
    gradients = gradients if isinstance(plans, jaxsok.Plan) else [gradients] * len(plans)
    after, stats = programs.update(collection)(state, plans, gradients)
    programs.assert_same_tables(collection, state, after)
    assert int(stats.num_misused_plans) == num_misused
    assert int(stats.num_stale) > 0
    with pytest.raises(jaxsok.StalePlanError, match="not open in this state"):
        stats.check()


def test_a_forgotten_state_cannot_move_the_rows_of_other_keys(collection):
    """Both branches insert two keys into the same rows; the plan of the abandoned branch must not move them."""
    start = collection.init(seed=0)
    _, first = look_up_keys(collection, start, 5, 6, 5, 6)
    state, second = look_up_keys(collection, start, 15, 16, 15, 16)
    gradients = [{"user": np.float32(100) * ONES["user"]}, {"user": 0 * ONES["user"]}]
    after, stats = programs.update(collection)(state, [first, second], gradients)
    programs.assert_same_tables(collection, state, after)
    assert int(stats.num_misused_plans) == 1
    with pytest.raises(jaxsok.StalePlanError, match="got 1 plans"):
        stats.check()


def test_a_plan_does_not_act_on_the_state_before_its_lookup(collection):
    """The accumulator of an orphan row does not reach the key that gets the row next."""
    start = collection.init(seed=0)
    _, plan = look_up_keys(collection, start, 5, 6, 7, 8)
    assert_left_out(collection, start, plan)
    after, _ = programs.update(collection)(start, plan, ONES)
    state, _ = look_up_keys(collection, after, 15, 16, 17, 18)
    for _, _, (accumulator,) in programs.export(collection, state).values():
        np.testing.assert_array_equal(accumulator, np.float32([0.1] * 4))
    np.testing.assert_array_equal(programs.rows_of(collection, state)[15], programs.initial_rows("user", 4, [15])[0])


def test_keys_that_have_rows_already_make_no_difference(collection):
    """Branches that insert nothing are different, too."""
    start, _ = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    _, first = look_up_keys(collection, start, 1, 2, 1, 2)
    for other in ((3, 4, 3, 4), (2, 1, 2, 1), (1, 1, 2, 2)):
        state, second = look_up_keys(collection, start, *other)
        assert_left_out(collection, state, first)
        programs.update(collection)(state, second, ONES)[1].check()


def test_equal_keys_in_other_features_are_another_batch():
    """Bags of one key and of two, in both orders, are different batches although the sequence of keys is equal."""
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(1.0), capacity=16)
    features = [jaxsok.FeatureSpec(name, "user", combiner="sum") for name in ("a", "b")]
    collection = jaxsok.Collection([table], features)
    start, gradients = collection.init(seed=0), {name: np.ones((2, 4), np.float32) for name in "ab"}
    _, _, plan = collection.lookup(start, programs.batch(collection, a=np.array([1, 2]), b=np.array([[3, 4], [5, 6]])))
    _, state, _ = collection.lookup(start, programs.batch(collection, a=np.array([[1, 2], [3, 4]]), b=np.array([5, 6])))
    assert_left_out(collection, state, plan, gradients)


def test_a_plan_is_used_once(collection):
    """A plan acts once if given twice, not in a second update, and once on another branch."""
    state, plan = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    once, stats = programs.update(collection)(state, plan, ONES)
    stats.check()
    twice, stats = programs.update(collection)(state, [plan, plan], [ONES, ONES])
    programs.assert_same_tables(collection, once, twice)
    assert (int(stats.num_misused_plans), int(stats.num_stale)) == (1, 4)
    assert_left_out(collection, once, plan)
    assert_left_out(collection, twice, plan)
    branch, stats = programs.update(collection)(state, plan, ONES)
    stats.check()
    programs.assert_same_tables(collection, once, branch)


def test_plans_may_be_used_in_any_order_and_after_growth(collection):
    """Several lookups precede one update with their plans in another order; growth does not affect plans."""
    collection = programs.one_table(capacity=8)
    state, first = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    state, second = look_up_keys(collection, state, 1, 2, 5, 6)
    state = collection.grow(state, steps=50)
    before = programs.rows_of(collection, state)
    state, stats = programs.update(collection)(state, [second, first], [ONES, ONES])
    stats.check()
    uses = {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
    for key, row in programs.rows_of(collection, state).items():
        np.testing.assert_array_equal(row, before[key] - np.float32(uses[key]))


def test_the_last_256_lookups_are_open(collection):
    """The oldest of so many plans still acts; after one more lookup it is skipped and counted."""

    @functools.partial(jax.jit, static_argnums=2)
    def after_lookups(state, features, num_lookups):
        def body(state, _):
            return collection.lookup(state, features)[1], None

        return jax.lax.scan(body, state, length=num_lookups)[0]

    state, plan = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    features = programs.batch(collection, user=np.array([1, 2, 3, 5]))
    last = after_lookups(state, features, OPEN_LOOKUPS - 1)
    programs.update(collection)(last, plan, ONES)[1].check()
    assert_left_out(collection, after_lookups(last, features, 1), plan)


def test_gradient_norm_leaves_plans_open(collection):
    """It ignores plans that an update would skip, and uses up no plan."""
    start = collection.init(seed=0)
    state, plan = look_up_keys(collection, start, 1, 2, 3, 4)
    assert float(collection.gradient_norm(state, plan, ONES)) == 4.0
    assert float(collection.gradient_norm(start, plan, ONES)) == 0.0
    assert float(collection.gradient_norm(state, [plan, plan], [ONES, ONES])) == 4.0
    programs.update(collection)(state, plan, ONES)[1].check()


def test_a_plan_of_no_keys_is_counted(collection):
    """A batch of only padding uses no row, but the plan counts as misused."""
    state, plan = look_up_keys(collection, collection.init(seed=0), *[-1] * NUM_KEYS)
    state, stats = programs.update(collection)(state, plan, ONES)
    stats.check()
    _, stats = programs.update(collection)(state, plan, ONES)
    assert (int(stats.num_misused_plans), int(stats.num_stale)) == (1, 0)
    with pytest.raises(jaxsok.StalePlanError):
        stats.check()


def test_a_restored_state_has_no_open_plans(collection, tmp_path):
    """This holds even if the same keys were looked up before and after."""
    checkpoint = pytest.importorskip("jaxsok.checkpoint")
    state, plan = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    checkpoint.export_full(tmp_path / "saved", collection, state)
    restored = checkpoint.load(tmp_path / "saved", collection)
    assert_left_out(collection, restored, plan)
    again, _ = look_up_keys(collection, collection.init(seed=0), 1, 2, 3, 4)
    assert_left_out(collection, again, plan)  # neither has another state of the same seed
    restored, _ = look_up_keys(collection, restored, 1, 2, 3, 4)
    assert_left_out(collection, restored, plan)


# Many devices --------------------------------------------------------------------------------------------------------

GRADIENTS = {"user": np.ones((16, 4), np.float32), "ad": np.ones((16, 3), np.float32)}
USERS = np.arange(16)
ADS = np.arange(32).reshape(16, 2) % 5


@pytest.mark.parametrize(("num_shards", "path"), [(1, "rounds"), (4, "rounds"), (4, "several rounds"), (4, "planned")])
def test_all_shards_decide_alike(num_shards, path):
    """If batches differ in one key of one shard, the plan is skipped on all shards, on every path."""
    exchange = {"send_capacity": 2} if path == "several rounds" else {}
    collection = two_stores(num_shards, **exchange)

    def lookup(state, users, ads):
        asked = programs.batch(collection, user=users, ad=ads)
        if path == "planned":
            asked = collection.plan(asked, send_capacity=(16, 32))
        return programs.lookup(collection)(state, asked)[1:]

    start = collection.init(seed=0)
    others = (np.where(USERS == 13, 99, USERS), ADS), (USERS, np.where(np.arange(16)[:, None] == 2, 7, ADS))
    mine, plan = lookup(start, USERS, ADS)
    swapped = np.concatenate([USERS[12:], USERS[4:12], USERS[:4]])  # the same parts on other shards
    for other in (*others, (swapped, ADS)):
        state, _ = lookup(start, *other)
        assert_left_out(collection, state, plan, GRADIENTS)
    mine, stats = programs.update(collection)(mine, plan, GRADIENTS)
    stats.check()
    assert_left_out(collection, mine, plan, GRADIENTS)
    lines = np.asarray(mine.tickets)
    assert lines.shape[0] == num_shards and (lines == lines[:1]).all()


def test_tickets_inside_pmap():
    """Stacked states include their tickets; a used plan is skipped on all shards."""
    collection = two_stores(4)

    @functools.partial(jax.pmap, axis_name="data", devices=jax.devices()[:4])
    def step(state, features, gradients):
        _, state, plan = collection.lookup(state, features)
        state, first = collection.update(state, plan, gradients)
        state, second = collection.update(state, plan, gradients)
        return state, first.num_misused_plans, second.num_misused_plans

    state = collection.stack(collection.init(seed=0))
    features = collection.stack(programs.batch(collection, user=USERS, ad=ADS))
    gradients = {name: gradient.reshape(4, 4, -1) for name, gradient in GRADIENTS.items()}
    _, first, second = step(state, features, gradients)
    assert (np.asarray(first) == 0).all() and (np.asarray(second) == 1).all()


# Kernels -------------------------------------------------------------------------------------------------------------

WORD = 2**64
GENERATION = COUNTERS.index("generation")


def mix64(x):
    """Computes Mix64 of ffi/core/hash.h on Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def digest(keys):
    mixes = [mix64((key + (i + 1) * 0x9E3779B97F4A7C15) % WORD) for i, key in enumerate(keys) if key != PADDING_KEY]
    return sum(mixes) % WORD


def words(*numbers):
    return np.array(numbers, np.uint64).view(np.uint32).reshape(-1, 2)


def numbers(array):
    return np.ascontiguousarray(array).view(np.uint64).ravel().tolist()


@pytest.mark.parametrize(("num_digests", "num_stores"), [(0, 2), (1, 1), (1, 3), (64, 64), (3, 150), (150, 3), (0, 0)])
def test_tickets_are_issued_as_their_formula_says(num_digests, num_stores):
    """Tickets are written in place, in a ring of three that wraps; from digests of several stores, of one, of none."""
    rng = np.random.default_rng(num_digests)
    tickets, lineage, layout = jnp.zeros((1, 5, 2), jnp.uint32), rng.integers(0, 2**32, 2, np.uint32), 0xF000000F
    issue = jax.jit(functools.partial(kernels.tickets_issue, layout=layout), donate_argnums=0)
    last, ring = 0, [0, 0, 0]
    for count in range(5):
        digests = rng.integers(0, WORD, num_digests, np.uint64).tolist()
        counters = [jnp.asarray(rng.integers(0, 2**32, len(COUNTERS), np.uint32)) for _ in range(num_stores)]
        tickets, ticket = issue(
            tickets, jnp.asarray(lineage), counters, [jnp.asarray(words(digest)) for digest in digests]
        )
        last += sum(digests)
        last = mix64(((last % WORD ^ numbers(lineage)[0] ^ layout) + 1) % WORD) | 1
        ring[count % 3] = last
        assert numbers(ticket[:, :2]) == [last]
        assert ticket[0, 2:].tolist() == [int(line[GENERATION]) for line in counters]
        assert numbers(tickets) == [last, count + 1, *ring]


@pytest.mark.parametrize("num_keys", [0, 1, 255, 3000, 300_001])
def test_digests_of_keys(num_keys):
    keys = np.random.default_rng(0).integers(0, WORD, num_keys, np.uint64)
    keys[::7] = PADDING_KEY
    assert numbers(kernels.tickets_digest(jnp.asarray(words(*keys)))) == [digest(keys.tolist())]


@pytest.mark.parametrize("num_plans", [1, 3, 40, 130])
def test_tickets_are_redeemed_in_order(num_plans):
    """Plans may be open, unknown, zero or repeated; if a store's generation changed, its plan is idle, not misused."""
    rng = np.random.default_rng(num_plans)
    is_open = np.where(rng.random(300) < 0.8, rng.integers(1, WORD, 300, np.uint64), np.uint64(0))
    plans = [
        int(rng.choice([rng.choice(is_open), np.uint64(77), np.uint64(0)], p=[0.8, 0.1, 0.1])) for _ in range(num_plans)
    ]
    plans[-1] = plans[0]
    uses = sorted({(int(p), int(rng.integers(0, 3))) for p in rng.integers(0, num_plans, 2 * num_plans)})
    generations = rng.integers(0, 2**32, 3, np.uint32)
    counters = np.zeros((3, len(COUNTERS)), np.uint32)
    counters[:, GENERATION] = generations
    at_lookup = np.where(rng.random((num_plans, 3)) < 0.9, generations, generations + np.uint32(1))
    tickets, is_live, num_misused = kernels.tickets_redeem(
        jnp.asarray(words(5, 6, *is_open))[None],
        [jnp.asarray(line) for line in counters],
        [jnp.concatenate([words(plan), then[None]], axis=1) for plan, then in zip(plans, at_lookup, strict=True)],
        uses,
    )
    left, want, misused = is_open.tolist(), [], 0
    for ticket in plans:
        want.append(ticket != 0 and ticket in left)
        misused += not want[-1]
        if want[-1]:
            left[left.index(ticket)] = 0
    for p, s in uses:
        want[p] &= bool(at_lookup[p, s] == generations[s])
    assert np.asarray(is_live).tolist() == want and int(num_misused) == misused
    assert numbers(tickets) == [5, 6, *left]


# Any tree of states --------------------------------------------------------------------------------------------------


class Branches(RuleBasedStateMachine):
    """Lookups and updates on any of the earlier states, with any of the earlier plans.

    The oracle keeps for each state the batches that were looked up on its path, and which plans of the path were
    used. Two plans are equal if they have the same batch after the same path.
    """

    @initialize()
    def begin(self):
        """Starts with one empty state."""
        self.collection = _table_of_branches()
        self.states = [(self.collection.init(seed=0), (), frozenset())]
        self.plans = []
        self.learned = [{}]

    @rule(data=st.data())
    def look_up(self, data):
        """Looks up a batch on one of the states, and keeps that state."""
        state, way, used = self._choose(data, self.states)
        learned = self.learned[self._at]
        batch = data.draw(st.lists(st.sampled_from([1, 2, 3, 2**40]), min_size=NUM_KEYS, max_size=NUM_KEYS))
        state, plan = look_up_keys(self.collection, state, *batch)
        way = (*way, tuple(batch))
        self.states.append((state, way, used))
        self.learned.append(learned | {key: learned.get(key, 0) for key in batch})
        self.plans.append((plan, way))

    @rule(data=st.data())
    def update(self, data):
        """Updates one of the states with one or two plans."""
        if not self.plans:
            return
        state, way, used = self._choose(data, self.states)
        learned = dict(self.learned[self._at])
        chosen = [self._choose(data, self.plans) for _ in range(data.draw(st.integers(1, 2)))]
        num_misused = 0
        for _, of_plan in chosen:
            is_open = of_plan == way[: len(of_plan)] and of_plan not in used
            num_misused += not is_open
            if is_open:
                used = used | {of_plan}
                for key in of_plan[-1]:
                    learned[key] += 1
        plans = [plan for plan, _ in chosen]
        state, stats = programs.update(self.collection)(state, plans, [ONES] * len(plans))
        assert int(stats.num_misused_plans) == num_misused
        rows = programs.rows_of(self.collection, state)
        assert {key: int(-row[0]) for key, row in rows.items()} == learned
        self.states.append((state, way, used))
        self.learned.append(learned)

    def _choose(self, data, things):
        self._at = data.draw(st.integers(0, len(things) - 1))
        return things[self._at]


@functools.cache
def _table_of_branches():
    return programs.one_table(initializer=jaxsok.initializers.zeros(), capacity=16)


TestBranches = Branches.TestCase
TestBranches.settings = settings(max_examples=15, stateful_step_count=12)


def test_a_step_in_place_keeps_its_tickets(collection):
    """A donated step that looks up and updates leaves no ticket open, and the next step works."""
    step = programs.donated_step(collection)
    state = collection.init(seed=0)
    for i in range(3):
        state, _, stats = step(state, programs.batch(collection, user=np.arange(4) + i))
        stats.check()
        tickets = np.asarray(state.tickets)
        assert tickets[:, 0].any() and tickets[0, 1].tolist() == [i + 1, 0] and not tickets[:, 2:].any()
    assert jnp.asarray(tickets).dtype == jnp.uint32
