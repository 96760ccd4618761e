"""Every optimizer against its formula (formulas.py, float64) and, where Optax has it, against Optax on touched rows.

All use one history: twenty steps of keys that are new, repeated in a step, absent and back, with some gradients of
zero, under a changing learning rate. `step_row` is tested alone and through a collection: one collection with a table
for each optimizer, so that everything is compiled once.
"""

import dataclasses
import functools

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import optim
from jaxsok.optimizers.protocol import PROGRAM, RowInputs

DIM, NUM_KEYS, NUM_STEPS, NUM_USES = 5, 12, 20, 10
# Twenty steps of about twenty roundings each, of rows and states up to 30, float32 against float64.
TOLERANCE = {"rtol": 5e-5, "atol": 1e-5}


def rate_of(step):
    """Returns the learning rate: a schedule for JAX, a number for NumPy."""
    if isinstance(step, jax.Array):
        return jnp.float32(0.05) / (jnp.float32(1) + jnp.float32(0.1) * step.astype(jnp.float32))
    return 0.05 / (1 + 0.1 * step)


def decay(weight_decay, tx):
    """Returns Optax with coupled weight decay."""
    return optax.chain(optax.add_decayed_weights(weight_decay), tx)


CLIPPED = {"clip_value": 0.8, "clip_row_norm": 1.0, "adaptive_clip": (0.9, 1e-3), "max_row_norm": 0.6}


def within(**limits):
    """Returns limits under the library's names."""
    if "adaptive_clip" in limits:
        limits["adaptive_clip"] = optim.AdaptiveClip(*limits["adaptive_clip"])
    return optim.Limits(**limits)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, its formula, and the optimizer of Optax."""

    optimizer: optim.Optimizer
    formula: tuple
    tx: optax.GradientTransformation | None = None


CASES = {
    "sgd": Case(optim.sgd(rate_of), formulas.sgd(), optax.sgd(rate_of)),
    "sgd_decayed": Case(
        optim.sgd(rate_of, weight_decay=0.3), formulas.sgd(weight_decay=0.3), decay(0.3, optax.sgd(rate_of))
    ),
    "momentum": Case(optim.sgd(rate_of, momentum=0.8), formulas.sgd(0.8), optax.sgd(rate_of, 0.8)),
    "nesterov": Case(
        optim.sgd(rate_of, momentum=0.8, nesterov=True, weight_decay=0.3),
        formulas.sgd(0.8, True, 0.3),
        decay(0.3, optax.sgd(rate_of, 0.8, True)),
    ),
    "adagrad": Case(optim.adagrad(rate_of), formulas.adagrad(), optax.adagrad(rate_of)),
    "adagrad_decayed": Case(
        optim.adagrad(rate_of, 0.3, 1e-3, weight_decay=0.3),
        formulas.adagrad(0.3, 1e-3, 0.3),
        decay(0.3, optax.adagrad(rate_of, 0.3, 1e-3)),
    ),
    "adagrad_eps_outside": Case(
        optim.adagrad(rate_of, 0.0, 0.3, eps_in_sqrt=False), formulas.adagrad(0.0, 0.3, eps_in_sqrt=False)
    ),
    "rowwise_adagrad_eps_inside": Case(
        optim.rowwise_adagrad(rate_of, 0.0, 0.3, eps_in_sqrt=True), formulas.rowwise_adagrad(0.0, 0.3, eps_in_sqrt=True)
    ),
    "rowwise_adagrad": Case(optim.rowwise_adagrad(rate_of), formulas.rowwise_adagrad()),
    "rowwise_adagrad_decayed": Case(
        optim.rowwise_adagrad(rate_of, 0.2, 1e-3, weight_decay=0.3), formulas.rowwise_adagrad(0.2, 1e-3, 0.3)
    ),
    "adam": Case(optim.adam(rate_of), formulas.adamw(), optax.adam(rate_of)),
    "adamw": Case(optim.adamw(rate_of), formulas.adamw(weight_decay=1e-4), optax.adamw(rate_of)),
    "adamw_other": Case(
        optim.adamw(rate_of, 0.7, 0.9, 1e-3, 0.3),
        formulas.adamw(0.7, 0.9, 1e-3, 0.3),
        optax.adamw(rate_of, 0.7, 0.9, 1e-3, weight_decay=0.3),
    ),
    "rowwise_adam": Case(optim.rowwise_adam(rate_of), formulas.rowwise_adam()),
    "rowwise_adam_other": Case(
        optim.rowwise_adam(rate_of, 0.7, 0.9, 1e-3, 0.3), formulas.rowwise_adam(0.7, 0.9, 1e-3, 0.3)
    ),
    "nadam": Case(optim.nadam(rate_of), formulas.nadam(), optax.nadam(rate_of)),
    "nadam_other": Case(
        optim.nadam(rate_of, 0.7, 0.9, 1e-3, 0.3),
        formulas.nadam(0.7, 0.9, 1e-3, 0.3),
        optax.nadamw(rate_of, 0.7, 0.9, 1e-3, weight_decay=0.3),
    ),
    "adamax": Case(optim.adamax(rate_of), formulas.adamax(), optax.adamax(rate_of)),
    "adamax_other": Case(
        optim.adamax(rate_of, 0.7, 0.8, 1e-3, 0.3),
        formulas.adamax(0.7, 0.8, 1e-3, 0.3),
        optax.adamaxw(rate_of, 0.7, 0.8, 1e-3, 0.3),
    ),
    "lion": Case(optim.lion(rate_of), formulas.lion(), optax.lion(rate_of)),
    "lion_other": Case(
        optim.lion(rate_of, 0.6, 0.8, 0.3),
        formulas.lion(0.6, 0.8, 0.3),
        optax.lion(rate_of, 0.6, 0.8, weight_decay=0.3),
    ),
    "rmsprop": Case(optim.rmsprop(rate_of), formulas.rmsprop(), optax.rmsprop(rate_of)),
    "rmsprop_centered": Case(
        optim.rmsprop(rate_of, 0.8, 1e-3, 0.5, eps_in_sqrt=False, centered=True, momentum=0.7, nesterov=True),
        formulas.rmsprop(0.8, 1e-3, 0.5, False, True, 0.7, True),
        optax.rmsprop(rate_of, 0.8, 1e-3, 0.5, False, True, 0.7, True),
    ),
    "rmsprop_corrected": Case(
        # In a row's first steps the square of the mean is nearly the mean square: eps keeps the rounding small.
        optim.rmsprop(rate_of, eps=0.1, centered=True, momentum=0.7, bias_correction=True),
        formulas.rmsprop(eps=0.1, centered=True, momentum=0.7, correct=True),
        optax.rmsprop(rate_of, eps=0.1, centered=True, momentum=0.7, bias_correction=True),
    ),
    "adadelta": Case(optim.adadelta(rate_of), formulas.adadelta(), optax.adadelta(rate_of)),
    "adadelta_other": Case(
        optim.adadelta(rate_of, 0.7, 1e-2, 0.3),
        formulas.adadelta(0.7, 1e-2, 0.3),
        optax.adadelta(rate_of, 0.7, 1e-2, weight_decay=0.3),
    ),
    "adagrad_decay": Case(optim.adagrad_decay(rate_of, 0.3, 3, 0.5), formulas.adagrad_decay(0.3, 3, 0.5)),
    "adagrad_decay_decayed": Case(
        optim.adagrad_decay(rate_of, 0.1, 2, 0.9, 0.3), formulas.adagrad_decay(0.1, 2, 0.9, 0.3)
    ),
    "lamb": Case(optim.lamb(rate_of), formulas.lamb(), optax.lamb(rate_of)),
    "lamb_other": Case(
        optim.lamb(rate_of, 0.7, 0.9, 1e-3, 0.3),
        formulas.lamb(0.7, 0.9, 1e-3, 0.3),
        optax.lamb(rate_of, 0.7, 0.9, 1e-3, weight_decay=0.3),
    ),
    "lars": Case(optim.lars(rate_of), formulas.lars(), optax.lars(rate_of)),
    "lars_other": Case(
        optim.lars(rate_of, 0.3, 0.9, 0.1, 0.7, True),
        formulas.lars(0.3, 0.9, 0.1, 0.7, True),
        optax.lars(rate_of, 0.3, trust_coefficient=0.9, eps=0.1, momentum=0.7, nesterov=True),
    ),
    "ftrl": Case(optim.ftrl(rate_of), formulas.ftrl()),
    "ftrl_other": Case(
        optim.ftrl(rate_of, -0.3, 0.2, 0.5, 0.3, 0.1, 0.2), formulas.ftrl(-0.3, 0.2, 0.5, 0.3, 0.1, 0.2)
    ),
    "group_ftrl": Case(optim.group_ftrl(rate_of, l21=0.8), formulas.ftrl(l21=0.8)),
    "group_ftrl_other": Case(
        optim.group_ftrl(rate_of, -0.4, 0.2, 0.2, 0.3, 0.1, 0.2, 0.5),
        formulas.ftrl(-0.4, 0.2, 0.2, 0.3, 0.1, 0.2, 0.5),
    ),
    "group_adam": Case(
        # 1 - 0.999 has 14 good bits in float32, and `held` is a difference of values divided by it.
        optim.group_adam(rate_of, b2=0.99, l21=0.8),
        formulas.group_adam(b2=0.99, l21=0.8),
    ),
    "group_adam_other": Case(
        optim.group_adam(rate_of, 0.7, 0.9, 1e-2, 0.2, 0.3, 0.4), formulas.group_adam(0.7, 0.9, 1e-2, 0.2, 0.3, 0.4)
    ),
    "group_adam_free": Case(optim.group_adam(rate_of), formulas.group_adam(), optax.adam(rate_of)),
    **{
        f"limits_{name}": Case(
            optim.adagrad(rate_of, limits=within(**{name: value})),
            formulas.limit(formulas.adagrad(), **{name: value}),
        )
        for name, value in CLIPPED.items()
    },
    "limits_all": Case(optim.adam(rate_of, limits=within(**CLIPPED)), formulas.limit(formulas.adamw(), **CLIPPED)),
    "limits_momentum": Case(
        optim.sgd(rate_of, momentum=0.8, limits=within(**CLIPPED)), formulas.limit(formulas.sgd(0.8), **CLIPPED)
    ),
}


@functools.cache
def history():
    """Returns the keys of each step, `[steps, uses]`, and for each use a gradient that is equal for all optimizers."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, NUM_KEYS, (NUM_STEPS, NUM_USES))
    keys[:8][keys[:8] == 7] = 3  # it starts late
    keys[3:15][keys[3:15] == 2] = 4  # it is absent, and returns
    keys[0, 0], keys[15, 0], keys[16, 0] = 2, 2, 7
    gradients = rng.normal(size=(NUM_STEPS, NUM_USES, DIM)).astype(np.float32)
    gradients[keys == 5] = 0  # it is used, with zero gradients
    return keys, gradients


def test_the_history_has_what_it_should():
    """Keys repeat in a step, new keys start late, and absent keys return."""
    keys, gradients = history()
    used = [{step for step in range(NUM_STEPS) if key in keys[step]} for key in range(NUM_KEYS)]
    assert any(len(set(line)) < NUM_USES for line in keys.tolist())
    assert min(used[7]) >= 8 and not used[2] & set(range(3, 15)) and {0, 15} <= used[2]
    assert used[5] and not gradients[keys == 5].any()


def sum_gradients(keys, gradients):
    """Returns the distinct keys of a step, with the sum of their gradients and the number of their uses."""
    for key in dict.fromkeys(keys.tolist()):
        uses = gradients[keys == key].astype(np.float64)
        yield key, uses.sum(axis=0), len(uses)


def by_formula(name, initial_rows):
    """Returns (row, state) of each key at the end."""
    initial_state, step = CASES[name].formula
    rows = {}
    for t, (keys, gradients) in enumerate(zip(*history(), strict=True)):
        for key, gradient, num_uses in sum_gradients(keys, gradients):
            row, state = rows.get(key, (initial_rows[key].astype(np.float64), initial_state(DIM)))
            more = (num_uses,) if name.startswith("limits_") else ()
            rows[key] = step(row, state, gradient, rate_of(t), t + 1, *more)
    if name.startswith("group_adam"):
        rows = {key: (row, [m, v, z + q * row]) for key, (row, (m, v, z, q)) in rows.items()}
    return rows


def assert_close(got, want):
    """Checks rows and all their state."""
    assert got.keys() == want.keys()
    for key, (row, state) in want.items():
        np.testing.assert_allclose(got[key][0], row, err_msg=f"key {key}", **TOLERANCE)
        assert len(got[key][1]) == len(state)
        for array, other in zip(got[key][1], state, strict=True):
            np.testing.assert_allclose(np.reshape(array, other.shape), other, err_msg=f"key {key}", **TOLERANCE)


def where_used(used, new, old):
    """Returns new values for used rows, and old values for the others."""
    return jax.tree.map(lambda a, b: jnp.where(used.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), new, old)


def step_rows(optimizer, rows, states, gradients, num_uses, step, learning_rate=None):
    """Makes one step of all rows, by only `step_row`."""
    rate = learning_rate
    if rate is None:
        rate = (
            optimizer.learning_rate(jnp.int32(step)) if callable(optimizer.learning_rate) else optimizer.learning_rate
        )
    hyper = tuple(jnp.asarray(word, jnp.float32) for word in optimizer.hyper(jnp.uint32(step), rate))

    def step_one_row(gradient, row, state, uses):
        return optimizer.step_row(RowInputs(gradient, row, state, uses, hyper))

    return jax.vmap(step_one_row)(gradients, rows, states, num_uses)


def initial_states(optimizer, num_rows, dim=DIM):
    """Returns the state of new rows."""
    return tuple(jnp.full((num_rows, spec.dim), spec.initial_value) for spec in optimizer.state_specs(dim))


@functools.cache
def some_rows():
    return np.random.default_rng(1).uniform(-0.3, 0.3, (NUM_KEYS, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_step_row(name):
    """`step_row`, from which a row program is made, agrees with the formula."""
    optimizer = CASES[name].optimizer
    rows, states = jnp.asarray(some_rows()), initial_states(optimizer, NUM_KEYS)
    for step, (keys, gradients) in enumerate(zip(*history(), strict=True)):
        sums, uses = np.zeros((NUM_KEYS, DIM)), np.zeros(NUM_KEYS)
        for key, gradient, num_uses in sum_gradients(keys, gradients):
            sums[key], uses[key] = gradient, num_uses
        new = step_rows(optimizer, rows, states, jnp.asarray(sums, jnp.float32), jnp.asarray(uses, jnp.float32), step)
        assert [state.shape for state in new.states] == [state.shape for state in states]
        rows, states = where_used(jnp.asarray(uses > 0), (new.row, new.states), (rows, states))
    seen = sorted(set(history()[0].ravel().tolist()))
    got = {key: (np.asarray(rows[key]), [np.asarray(state[key]) for state in states]) for key in seen}
    assert_close(got, by_formula(name, some_rows()))


@functools.cache
def train():
    """Returns the collection of all cases after the history: (collection, initial rows by table, state)."""
    tables = [jaxsok.TableSpec(name, DIM, case.optimizer, capacity=16) for name, case in CASES.items()]
    features = [jaxsok.FeatureSpec(name, table=name, combiner=None) for name in CASES]
    collection = jaxsok.Collection(tables, features)
    state = collection.init(seed=0)
    everything = collection.batch({name: np.resize(np.arange(NUM_KEYS), 20) for name in CASES}).features
    initial, _ = jax.jit(collection.find)(state, everything)
    initial = {name: np.asarray(rows)[:NUM_KEYS] for name, rows in initial.items()}
    for keys, gradients in zip(*history(), strict=True):
        batch = collection.batch(dict.fromkeys(CASES, keys))
        given = dict.fromkeys(CASES, jnp.asarray(gradients))
        state, _, stats = programs.fed_step(collection)(state, batch.features, given)
        stats.check()
    return collection, initial, state


@pytest.mark.parametrize("name", CASES)
def test_through_a_collection(name):
    """After twenty steps of lookup and update, rows and all their state agree with the formula."""
    collection, initial, state = train()
    table = collection.export_table(state, name)
    states = [table["state"][spec.name] for spec in CASES[name].optimizer.state_specs(DIM)]
    assert len(states) == len(table["state"])
    got = {key: (table["rows"][i], [array[i] for array in states]) for i, key in enumerate(table["keys"].tolist())}
    assert_close(got, by_formula(name, initial[name]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tx is not None])
def test_dense_optax_on_touched_rows(name):
    """Optax has one parameter per row; if a row is not used, the row and its Optax state are restored."""
    collection, initial, state = train()
    tx, dense = CASES[name].tx, jnp.asarray(initial[name])
    opt_state = jax.vmap(tx.init)(dense)

    @jax.jit
    def step(dense, opt_state, gradients, used):
        updates, new = jax.vmap(tx.update)(gradients, opt_state, dense)
        # Counts count updates of the collection; all other state belongs to the row.
        new = jax.tree.map(
            lambda a, b: a if jnp.issubdtype(a.dtype, jnp.integer) else where_used(used, a, b), new, opt_state
        )
        return where_used(used, optax.apply_updates(dense, updates), dense), new

    for keys, gradients in zip(*history(), strict=True):
        sums = np.zeros((NUM_KEYS, DIM))
        np.add.at(sums, keys, gradients)
        used = np.isin(np.arange(NUM_KEYS), keys)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            dense, opt_state = step(dense, opt_state, jnp.asarray(sums, jnp.float32), jnp.asarray(used))
    rows = programs.rows_of(collection, state, name)
    for key, row in rows.items():
        np.testing.assert_allclose(row, dense[key], err_msg=f"key {key}", **TOLERANCE)


def test_rows_of_the_group_lasso_are_zero():
    """Some rows are exactly zero, and never partly, so that eviction can detect them; others are not."""
    collection, _, state = train()
    for name in ("group_ftrl", "group_adam"):
        rows = programs.rows_of(collection, state, name)
        gone = [key for key, row in rows.items() if not row.any()]
        assert 0 < len(gone) < len(rows), name
        for key in gone:
            np.testing.assert_array_equal(row_bits := programs.bits(rows[key]), np.zeros_like(row_bits))  # no -0


def test_a_zero_row_returns():
    """A row zeroed by the group lasso is not lost: steady gradients in one direction bring it back."""
    for optimizer in (optim.group_ftrl(0.1, l21=3.0), optim.group_adam(0.1, l21=3.0)):
        rows, states = jnp.ones((1, DIM)) * 0.01, initial_states(optimizer, 1)
        alive = []
        for step in range(10):
            rows, states = step_rows(optimizer, rows, states, jnp.ones((1, DIM)), jnp.ones(1), step)
            alive.append(bool(rows.any()))
        assert alive[0] is False and alive[-1] is True
        assert bool((rows < 0).all())


def test_no_group_lasso_is_ftrl_and_adam():
    """Strengths of zero change nothing: to the bit for FTRL, up to the rounding of another form for Adam."""
    collection, initial, state = train()
    rows, same = programs.rows_of(collection, state, "group_adam_free"), by_formula("adam", initial["group_adam_free"])
    for key, row in rows.items():
        np.testing.assert_allclose(row, same[key][0], **TOLERANCE)
    for kwargs in ({}, {"l1": 0.2, "l2": 0.1}):
        results = []
        for optimizer in (optim.ftrl(0.1, **kwargs), optim.group_ftrl(0.1, **kwargs)):
            rows, states = jnp.asarray(some_rows()), initial_states(optimizer, NUM_KEYS)
            results.append(step_rows(optimizer, rows, states, rows + 1, jnp.ones(NUM_KEYS), 0))
        jax.tree.map(np.testing.assert_array_equal, *results)


def deeprec_ftrl(row, accumulator, linear, gradient, rate, l1, l2, power=-0.5):
    """Computes DeepRec's FTRL on a row of an EmbeddingVariable, in float64 NumPy: l1 bounds the norm of the row."""
    total = accumulator + gradient**2
    linear = linear + gradient - (total**-power - accumulator**-power) / rate * row
    length = np.sqrt((linear**2).sum())
    if length <= l1:
        return np.zeros_like(row), total, linear
    return (l1 - length) / ((total**-power / rate + 2 * l2) * length) * linear, total, linear


@pytest.mark.parametrize(("num_uses", "wanted"), [(3, 0.8282884), (2, 0.7927219)])
def test_ftrl_of_deeprec_is_group_ftrl(num_uses, wanted):
    """DeepRec's own test agrees: rows of three ones, a gradient of 2 for each use, rate 0.1, l1 = 2, l2 = 1e-5."""
    dim, l1, l2 = 3, 2.0, 1e-5
    optimizer = optim.group_ftrl(0.1, l2=l2, l21=l1 / np.sqrt(dim))
    state = np.ones(dim), np.full(dim, 0.1), np.zeros(dim)
    assert deeprec_ftrl(*state, np.full(dim, 2.0 * num_uses), 0.1, l1, l2)[0] == pytest.approx(wanted, abs=1e-7)
    rows, states = jnp.ones((1, dim)), initial_states(optimizer, 1, dim)
    sums = jnp.full((1, dim), 2.0 * num_uses)
    np.testing.assert_allclose(step_rows(optimizer, rows, states, sums, jnp.ones(1), 0).row[0], wanted, rtol=1e-6)
    other = optim.ftrl(0.1, l1=l1, l2=l2)
    row = step_rows(other, rows, initial_states(other, 1, dim), sums, jnp.ones(1), 0).row[0]
    assert abs(float(row[0]) - wanted) > 0.01  # a bound on single numbers differs
    rng, state = np.random.default_rng(num_uses), (np.array([0.5, -1.0, 2.0]), *state[1:])
    rows = jnp.asarray(state[0][None], jnp.float32)
    for step in range(6):
        gradient = rng.normal(size=dim) * (1 + step)
        state = deeprec_ftrl(*state, gradient, 0.1, l1, l2)
        rows, states = step_rows(optimizer, rows, states, jnp.float32(gradient)[None], jnp.ones(1), step)
        np.testing.assert_allclose(rows[0], state[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [optim.ftrl, optim.group_ftrl])
def test_a_new_row_under_ftrl_and_a_gradient_of_zero(make):
    """The row becomes zero, as docs/optimizers.md states; after a step of another gradient it stays."""
    rows, states = jnp.ones((2, DIM)), initial_states(make(0.1), 2)
    gradients = jnp.stack([jnp.zeros(DIM), jnp.ones(DIM)])
    rows, states = step_rows(make(0.1), rows, states, gradients, jnp.ones(2), 0)
    assert not rows[0].any() and rows[1].all()
    again = step_rows(make(0.1), rows, states, jnp.zeros((2, DIM)), jnp.ones(2), 1)
    jax.tree.map(np.testing.assert_array_equal, tuple(again), (rows, states))


@given(decay_step=st.integers(1, 7), decay_rate=st.floats(0.1, 0.99), uses=st.lists(st.integers(0, 40), max_size=6))
def test_adagrad_decay_is_exact(decay_step, decay_rate, uses):
    """After its next use, a row that missed decays equals the dense optimizer's row, step by step."""
    optimizer = optim.adagrad_decay(0.1, 0.2, decay_step, decay_rate)
    row, accumulator = np.zeros(1), np.full(1, 0.2)
    rows, states = jnp.zeros((1, 1)), initial_states(optimizer, 1, 1)
    for t in range(1, 42):
        gradient = 1.5 if t - 1 in uses else 0.0
        if t % decay_step == 0:
            accumulator = np.maximum(accumulator * decay_rate, 0.2)
        accumulator = accumulator + gradient**2
        row = row - 0.1 * gradient / np.sqrt(accumulator)
        if gradient or t == 41:
            rows, states = step_rows(optimizer, rows, states, jnp.full((1, 1), gradient), jnp.ones(1), t - 1)
            np.testing.assert_allclose(states[0][0], accumulator, rtol=1e-4)
            assert states[1][0, 0] == t // decay_step
    np.testing.assert_allclose(rows[0], row, rtol=1e-4, atol=1e-6)


EDGES = (2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)  # of a step: int32 ends, uint32 ends


@pytest.mark.parametrize("name", [name for name in CASES if "decay_step" not in CASES[name].optimizer.__dict__])
def test_late_steps_are_like_those_of_a_million(name):
    """Bias corrections have long become 1, so the effect of a step no longer depends on its number."""
    optimizer = CASES[name].optimizer
    rows, states = jnp.asarray(some_rows()), initial_states(optimizer, NUM_KEYS)
    late = [
        step_rows(optimizer, rows, states, rows + 1, jnp.ones(NUM_KEYS), step, learning_rate=0.1)
        for step in (10**6, *EDGES)
    ]
    for new in late:
        jax.tree.map(np.testing.assert_array_equal, new, late[0])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize("decay_step", [1, 2, 3, 100_000, 2**31 - 1, 2**31, 2**32 - 1])
def test_decays_are_counted_to_the_last_step(decay_step):
    """The count includes decays due by update step + 1, whose number may be 2**32."""
    optimizer = optim.adagrad_decay(0.1, 0.2, decay_step, 0.5)
    for step in (0, decay_step - 2, decay_step - 1, decay_step, *EDGES):
        if 0 <= step < 2**32:
            _, num_due = optimizer.hyper(jnp.uint32(step), 0.1)
            assert num_due == np.float32((step + 1) // decay_step)


def test_adagrad_decay_with_another_decay_step():
    """A state with more decays than the new declaration implies neither grows nor stays undecayed."""
    optimizer = optim.adagrad_decay(0.1, 0.2, 10, 0.5)
    states = (jnp.full((1, 1), 8.0), jnp.full((1, 1), 100.0))
    (_, (accumulator, num_decays)) = step_rows(optimizer, jnp.zeros((1, 1)), states, jnp.zeros((1, 1)), jnp.ones(1), 14)
    assert accumulator[0, 0] == 8 and num_decays[0, 0] == 1
    states = (accumulator, num_decays)
    (_, (accumulator, num_decays)) = step_rows(optimizer, jnp.zeros((1, 1)), states, jnp.zeros((1, 1)), jnp.ones(1), 39)
    assert accumulator[0, 0] == 1 and num_decays[0, 0] == 4


@pytest.mark.parametrize("make", [optim.ftrl, optim.group_ftrl, optim.group_adam])
def test_a_learning_rate_of_zero_moves_no_row(make):
    """Warm-up schedules start at zero, and these optimizers divide by the rate."""
    optimizer = make(lambda step: 0.0 * step, l1=0.1)
    rows, states = jnp.asarray(some_rows()), initial_states(optimizer, NUM_KEYS)
    new = step_rows(optimizer, rows, states, rows + 1, jnp.ones(NUM_KEYS), 0, learning_rate=0.0)
    np.testing.assert_array_equal(new.row, rows)
    np.testing.assert_array_equal(new.states[-1], states[-1])
    moved = step_rows(optimizer, *new, rows + 1, jnp.ones(NUM_KEYS), 1, learning_rate=0.1)
    assert np.isfinite(moved.row).all() and (moved.row != rows).any()


@pytest.mark.parametrize("name", CASES)
def test_zero_gradients_give_finite_rows(name):
    """A norm, root or moment of zero is never a divisor; without decay, memory or lasso the row stays to the bit."""
    optimizer = CASES[name].optimizer
    zeros = jnp.zeros((NUM_KEYS, DIM))
    for rows in (zeros, jnp.asarray(some_rows())):
        new = step_rows(optimizer, rows, initial_states(optimizer, NUM_KEYS), zeros, jnp.ones(NUM_KEYS), 0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
        stays = {
            "sgd",
            "momentum",
            "adagrad",
            "rowwise_adagrad",
            "adam",
            "rowwise_adam",
            "nadam",
            "adamax",
            "rmsprop",
            "adadelta",
        }
        stays |= {"adagrad_decay", "lamb", "lars", "rmsprop_centered", "group_adam_free"}
        if name in stays or not rows.any():
            np.testing.assert_allclose(new.row, rows, rtol=1e-6 if name == "group_adam_free" else 0)


@pytest.mark.parametrize("name", ["lamb", "lamb_other", "lars", "lars_other"])
def test_rows_of_zeros_can_leave_zero(name):
    """With a norm of zero the step is not scaled, as in the formula and in Optax."""
    case = CASES[name]
    row, gradient = np.zeros(DIM), np.arange(DIM) - 1.5
    initial_state, step = case.formula
    want, _ = step(row, initial_state(DIM), gradient, rate_of(0), 1)
    gradients = jnp.asarray(gradient, jnp.float32)[None]
    new = step_rows(case.optimizer, jnp.zeros((1, DIM)), initial_states(case.optimizer, 1), gradients, jnp.ones(1), 0)
    assert (np.abs(new.row[0]) > 1e-3).all()
    np.testing.assert_allclose(new.row[0], want, **TOLERANCE)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = case.tx.update(gradients[0], case.tx.init(jnp.zeros(DIM)), jnp.zeros(DIM))
    np.testing.assert_allclose(new.row[0], updates, **TOLERANCE)


def test_a_deviation_of_nothing_but_rounding():
    """For constant gradients, centered RMSProp's square of the mean can round above the mean square."""
    optimizer = optim.rmsprop(1e-3, decay=0.7, centered=True)
    rows, states, gradients = jnp.zeros((64, DIM)), initial_states(optimizer, 64), some_large_numbers()
    differences = []
    for step in range(60):
        rows, states = step_rows(optimizer, rows, states, gradients, jnp.ones(64), step)
        differences.append(states[0] - states[1] * states[1])
    assert np.isfinite(rows).all() and (np.array(differences) < -optimizer.eps).any()


def some_large_numbers():
    return jnp.asarray(np.random.default_rng(2).uniform(1e3, 1e4, (64, DIM)), jnp.float32)


def test_kernels_of_their_own():
    """The four have their own kernels unless an option requires more; all others are programs."""
    own = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
    for name, number in own.items():
        make = getattr(optim, name)
        assert make(0.1).kernel == make(0.1, limits=optim.Limits()).kernel == number
        assert make(0.1, limits=optim.Limits(clip_value=1.0)).kernel == PROGRAM
        if name != "adam":
            assert make(0.1, weight_decay=0.1).kernel == PROGRAM
    assert optim.sgd(0.1, momentum=0.9).kernel == PROGRAM
    makers = [make for name in optim.__all__ if callable(make := getattr(optim, name)) and name.islower()]
    assert {make.__name__ for make in makers if make.__name__ != "lift" and make(0.1).kernel != PROGRAM} == set(own)
