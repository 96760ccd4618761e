"""Optimizers on rows: against formulas written anew in float64, and against dense Optax on touched rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import programs
import pytest

import jaxsok

DIM = 5
RATE = 0.05
OPTIMIZERS = [jaxsok.optim.sgd, jaxsok.optim.adagrad, jaxsok.optim.rowwise_adagrad, jaxsok.optim.adam]
# Ten steps of some ten roundings each, rows and states of size <= 10 in float32 against float64.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

FORMULAS = {
    "sgd": (lambda rate: jaxsok.optim.sgd(rate), oracle.Sgd()),
    "adagrad": (lambda rate: jaxsok.optim.adagrad(rate), oracle.Adagrad()),
    "adagrad_other": (lambda rate: jaxsok.optim.adagrad(rate, 0.5, 1e-3), oracle.Adagrad(0.5, 1e-3)),
    "rowwise_adagrad": (lambda rate: jaxsok.optim.rowwise_adagrad(rate), oracle.RowwiseAdagrad()),
    "rowwise_adagrad_other": (
        lambda rate: jaxsok.optim.rowwise_adagrad(rate, initial_accumulator_value=0.25, eps=1e-2),
        oracle.RowwiseAdagrad(0.25, 1e-2),
    ),
    "adam": (lambda rate: jaxsok.optim.adam(rate), oracle.Adam()),
    "adam_other": (lambda rate: jaxsok.optim.adam(rate, b1=0.5, b2=0.75, eps=1e-2), oracle.Adam(0.5, 0.75, 1e-2)),
}


def train(collection, num_steps, *, keys=None, seed=0):
    """Steps with random keys (or always the same) and gradients; yields (keys, gradients) and the last state."""
    rng, state, history = np.random.default_rng(seed), collection.init(seed=0), []
    for _ in range(num_steps):
        batch_keys = rng.integers(0, 12, 8) if keys is None else np.asarray(keys)
        gradients = rng.normal(size=(8, DIM)).astype(np.float32)
        _, state, plan = programs.lookup(collection)(state, programs.batch(collection, user=batch_keys))
        state, stats = programs.update(collection)(state, plan, {"user": jnp.asarray(gradients)})
        stats.check()
        history.append((batch_keys, gradients))
    return history, state


@pytest.mark.parametrize("row_gradient", ["sum", "mean"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name, row_gradient):
    """Ten steps, keys that come, stay away and come back: lazy rows, rows and all their state."""
    make, model = FORMULAS[name]
    collection = programs.one_table(dim=DIM, optimizer=make(RATE), row_gradient=row_gradient)
    history, state = train(collection, 10)
    rows, states = {}, {}
    for step, (keys, gradients) in enumerate(history):
        for key in dict.fromkeys(keys.tolist()):
            if key not in rows:
                rows[key] = programs.initial_rows("user", DIM, [key])[0].astype(np.float64)
                states[key] = model.initial_state(DIM)
            gradient = gradients[keys == key].astype(np.float64).sum(axis=0)
            if row_gradient == "mean":
                gradient /= np.sum(keys == key)
            rows[key], states[key] = model.step(rows[key], states[key], gradient, RATE, step)
    got = programs.exported(collection, state)
    assert got.keys() == rows.keys()
    for key, (_, row, row_state) in got.items():
        np.testing.assert_allclose(row, rows[key], err_msg=f"key {key}", **TOLERANCE)
        assert len(row_state) == len(states[key])
        for a, b in zip(row_state, states[key], strict=True):
            np.testing.assert_allclose(np.reshape(a, b.shape), b, err_msg=f"state of key {key}", **TOLERANCE)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_dense_optax_on_touched_rows(name):
    """Where every row is touched in every step, lazy is dense."""
    make, tx = {
        "sgd": (jaxsok.optim.sgd, optax.sgd(RATE)),
        "adagrad": (jaxsok.optim.adagrad, optax.adagrad(RATE)),
        "adam": (jaxsok.optim.adam, optax.adam(RATE)),
    }[name]
    collection = programs.one_table(dim=DIM, optimizer=make(RATE))
    keys = np.arange(8)
    history, state = train(collection, 10, keys=keys)
    dense = jnp.asarray(programs.initial_rows("user", DIM, keys))
    opt_state = tx.init(dense)
    for _, gradients in history:
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes int32 counts with floats
            updates, opt_state = tx.update(jnp.asarray(gradients), opt_state, dense)
        dense = optax.apply_updates(dense, updates)
    got = np.stack([programs.rows_of(collection, state)[key] for key in keys.tolist()])
    # Both are float32: ten steps of some ten roundings of numbers of size <= 1.
    np.testing.assert_allclose(got, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_untouched_rows_do_not_move(make):
    """Lazy: no decay of moments, no step, whatever happens to others."""
    collection = programs.one_table(dim=DIM, optimizer=make(RATE))
    state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.array([1, 2])))
    before = programs.exported(collection, state)[1]
    for _ in range(3):
        state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([2, 3])))
    after = programs.exported(collection, state)[1]
    np.testing.assert_array_equal(before[1], after[1])
    for a, b in zip(before[2], after[2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_adam_counts_the_steps_of_the_collection():
    """A row first seen in step 3 is corrected for three steps: its moments began at zero long ago."""
    collection = programs.one_table(dim=DIM, optimizer=jaxsok.optim.adam(RATE))
    state = collection.init(seed=0)
    for _ in range(2):
        state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([1])))
    state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([9])))
    model, initial = oracle.Adam(), programs.initial_rows("user", DIM, [9])[0].astype(np.float64)
    want, _ = model.step(initial, model.initial_state(DIM), np.ones(DIM), RATE, 2)
    np.testing.assert_allclose(programs.rows_of(collection, state)[9], want, **TOLERANCE)
    first_step, _ = model.step(initial, model.initial_state(DIM), np.ones(DIM), RATE, 0)
    assert np.all(np.abs(want - first_step) > 0.01)  # the test can tell the two apart


def test_adagrad_with_zero_accumulator_and_zero_gradient_stays():
    """As in Optax: nothing is divided by zero."""
    for make in (jaxsok.optim.adagrad, jaxsok.optim.rowwise_adagrad):
        collection = programs.one_table(dim=DIM, optimizer=make(RATE, initial_accumulator_value=0.0, eps=1e-7))
        state, stats = programs.learn(
            collection, collection.init(seed=0), programs.batch(collection, user=np.array([1])), gradient=0.0
        )
        stats.check()
        np.testing.assert_array_equal(
            programs.rows_of(collection, state)[1], programs.initial_rows("user", DIM, [1])[0]
        )


@pytest.mark.parametrize("kind", ["number", "array", "schedule"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_learning_rate_kinds(make, kind):
    """A number, an array or a constant schedule: the same rows."""
    rate = {"number": RATE, "array": jnp.float32(RATE), "schedule": optax.constant_schedule(RATE)}[kind]
    results = []
    for given in (RATE, rate):
        collection = programs.one_table(dim=DIM, optimizer=make(given))
        state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.array([1])))
        results.append(programs.rows_of(collection, state)[1])
    # RATE as float32 either way; equal but for one rounding where a schedule is a product.
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_schedule_is_called_with_the_step():
    """0 at the first update; traced, so that one program serves all steps; lookups do not count."""
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 3: 0.5})
    collection = programs.one_table(
        dim=DIM, optimizer=jaxsok.optim.sgd(schedule), initializer=jaxsok.initializers.zeros()
    )
    state, moved = collection.init(seed=0), []
    features = programs.batch(collection, user=np.array([1]))
    for step in range(6):
        _, state, _ = programs.lookup(collection)(state, features)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes int32 counts with floats
            state, _ = programs.learn(collection, state, features)
        moved.append(-programs.rows_of(collection, state)[1][0])
        assert int(state.step) == step + 1
    rates = [1.0, 0.5, 0.5, 0.25, 0.25, 0.25]
    np.testing.assert_array_equal(np.diff([0.0, *moved]), rates)


def test_learning_rate_of_update_wins_over_a_schedule():
    """What is given to update is used as it is."""
    collection = programs.one_table(
        dim=DIM,
        optimizer=jaxsok.optim.sgd(optax.linear_schedule(1.0, 0.0, 10)),
        initializer=jaxsok.initializers.zeros(),
    )
    _, state, plan = collection.lookup(collection.init(seed=0), programs.batch(collection, user=np.array([1])))
    state, _ = collection.update(state, plan, {"user": jnp.ones((1, DIM))}, learning_rate=0.125)
    np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, -0.125))


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [
        (jaxsok.optim.sgd(0.1), []),
        (jaxsok.optim.adagrad(0.1, initial_accumulator_value=0.5), [(DIM, 0.5)]),
        (jaxsok.optim.rowwise_adagrad(0.1, initial_accumulator_value=0.25), [(1, 0.25)]),
        (jaxsok.optim.adam(0.1), [(DIM, 0.0), (DIM, 0.0)]),
    ],
)
def test_new_rows_begin_with_initial_state(optimizer, sizes):
    """By name, one line a row, before any update; state_specs() says so."""
    collection = programs.one_table(dim=DIM, optimizer=optimizer)
    state = programs.insert(collection, collection.init(seed=0), [3, 4])
    table = collection.export_table(state, "user")["state"]
    specs = optimizer.state_specs(DIM)
    assert list(table) == [spec.name for spec in specs]
    assert len(set(table)) == len(sizes) == len(specs)
    for spec, (size, value) in zip(specs, sizes, strict=True):
        assert spec.initial_value == value
        np.testing.assert_array_equal(table[spec.name].reshape(2, size), np.full((2, size), value, np.float32))


def test_optimizers_are_declarations():
    """Fields can be read, and replaced."""
    adam = jaxsok.optim.adam(0.1, b1=0.8)
    assert dataclasses.replace(adam, b1=0.9) == jaxsok.optim.adam(0.1)
    assert adam != jaxsok.optim.adam(0.1)


def test_a_hot_row_through_many_steps():
    """Hundreds of uses in each of fifty steps: no drift from the oracle, nothing explodes."""
    collection = programs.one_table(dim=DIM, optimizer=jaxsok.optim.rowwise_adagrad(RATE))
    rng, model = np.random.default_rng(0), oracle.RowwiseAdagrad()
    row, row_state = programs.initial_rows("user", DIM, [7])[0].astype(np.float64), model.initial_state(DIM)
    state = collection.init(seed=0)
    features = programs.batch(collection, user=np.full(500, 7))
    for step in range(50):
        gradients = rng.normal(0.5, 1.0, size=(500, DIM)).astype(np.float32)
        _, state, plan = programs.lookup(collection)(state, features)
        state, _ = programs.update(collection)(state, plan, {"user": jnp.asarray(gradients)})
        row, row_state = model.step(row, row_state, gradients.astype(np.float64).sum(axis=0), RATE, step)
    # Sums of 500 numbers of size 4 that reach 250: at most 500 * 2^-24 relative each, divided by their own root.
    np.testing.assert_allclose(programs.rows_of(collection, state)[7], row, rtol=1e-4, atol=1e-5)
    assert jax.device_get(state.step) == 50
