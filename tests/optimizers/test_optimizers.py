"""Optimizers on rows: common properties, and the four with their own kernels against the oracle.

Every optimizer against its formula is in test_optimizer_formulas.py.
"""

import dataclasses
import functools
import inspect
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jaxsok
from jaxsok import specs

DIM = 5
RATE = 0.05
OPTIMIZERS = [jaxsok.optim.sgd, jaxsok.optim.adagrad, jaxsok.optim.rowwise_adagrad, jaxsok.optim.adam]
# All names that jaxsok.optim makes; lifted optimizers have separate tests.
MAKERS = {
    name: make
    for name in jaxsok.optim.__all__
    if inspect.isfunction(make := getattr(jaxsok.optim, name)) and name != "lift"
}
# Arguments besides the learning rate, so that all of its state exists.
OPTIONS = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "rmsprop": {"centered": True, "momentum": 0.9, "initial_scale": 0.5},
    "adagrad_decay": {"decay_step": 2},
    "lars": {"weight_decay": 0.1, "trust_coefficient": 0.5},
    "ftrl": {"l1": 0.01, "l2_shrinkage": 0.1},
    "group_ftrl": {"l21": 0.01, "initial_accumulator_value": 0.5},
    "group_adam": {"l21": 0.01},
}
# Ten steps of about ten roundings each, rows and states of size <= 10 in float32 against float64.
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
    """Makes steps with random keys (or always the same) and gradients; yields (keys, gradients) and the last state."""
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
    """Rows and all their state agree after ten steps of keys that are new, absent and back, with lazy rows."""
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
    got = programs.export(collection, state)
    assert got.keys() == rows.keys()
    for key, (_, row, row_state) in got.items():
        np.testing.assert_allclose(row, rows[key], err_msg=f"key {key}", **TOLERANCE)
        assert len(row_state) == len(states[key])
        for a, b in zip(row_state, states[key], strict=True):
            np.testing.assert_allclose(np.reshape(a, b.shape), b, err_msg=f"state of key {key}", **TOLERANCE)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_dense_optax_on_touched_rows(name):
    """If every row is touched in every step, lazy optimizers are dense."""
    import optax

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
    # Both are float32: ten steps of about ten roundings of numbers of size <= 1.
    np.testing.assert_allclose(got, dense, rtol=1e-5, atol=1e-6)


def with_all(rate, **more):
    """Returns a collection with a table and a feature for each optimizer, both of its name."""
    tables = [
        jaxsok.TableSpec(name, DIM, make(rate, **OPTIONS.get(name, {}), **more), capacity=16)
        for name, make in MAKERS.items()
    ]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in MAKERS])


def learn_all(collection, state, keys, gradient=1.0, learning_rate=None):
    """Makes one lookup and one update of all tables with equal keys and one gradient for every embedding."""
    features = collection.batch(dict.fromkeys(MAKERS, np.asarray(keys))).features
    return _learn_all(collection)(state, features, jnp.float32(gradient), learning_rate)


@functools.cache
def _learn_all(collection):
    def step(state, features, gradient, learning_rate):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.tree.map(lambda embedding: jnp.full(embedding.shape, gradient), embeddings)
        state, _ = collection.update(state, plan, gradients, learning_rate=learning_rate)
        return state

    return jax.jit(step, compiler_options=programs.quickly())


def test_untouched_rows_do_not_move():
    """Untouched rows have no decay of moments, no step and no weight decay, whatever happens to others."""
    collection = with_all(RATE)
    state = learn_all(collection, collection.init(seed=0), [1, 2])
    before = {name: programs.export(collection, state, name) for name in MAKERS}
    for _ in range(3):
        state = learn_all(collection, state, [2, 3])
    for name in MAKERS:
        old, new = before[name], programs.export(collection, state, name)
        np.testing.assert_array_equal(old[1][1], new[1][1], err_msg=name)
        for a, b in zip(old[1][2], new[1][2], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        assert np.any(old[2][1] != new[2][1]), name  # a row that was used moves


def test_adam_counts_the_steps_of_the_collection():
    """A row first used in step 3 is corrected for three steps: its moments count as zero since the start."""
    collection = programs.one_table(dim=DIM, optimizer=jaxsok.optim.adam(RATE))
    state = collection.init(seed=0)
    for _ in range(2):
        state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([1])))
    state, _ = programs.learn(collection, state, programs.batch(collection, user=np.array([9])))
    model, initial = oracle.Adam(), programs.initial_rows("user", DIM, [9])[0].astype(np.float64)
    want, _ = model.step(initial, model.initial_state(DIM), np.ones(DIM), RATE, 2)
    np.testing.assert_allclose(programs.rows_of(collection, state)[9], want, **TOLERANCE)
    first_step, _ = model.step(initial, model.initial_state(DIM), np.ones(DIM), RATE, 0)
    assert np.all(np.abs(want - first_step) > 0.01)  # the test can distinguish them


def test_adagrad_with_zero_accumulator_and_zero_gradient_stays():
    """As in Optax, there is no division by zero."""
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
    """A number, an array and a constant schedule give equal rows."""
    import optax

    rate = {"number": RATE, "array": jnp.float32(RATE), "schedule": optax.constant_schedule(RATE)}[kind]
    results = []
    for given in (RATE, rate):
        collection = programs.one_table(dim=DIM, optimizer=make(given))
        state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.array([1])))
        results.append(programs.rows_of(collection, state)[1])
    # RATE is float32 in both cases; equal except for one rounding if a schedule is a product.
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_schedule_is_called_with_the_step():
    """The step is 0 at the first update, and traced, so one program serves all steps; lookups do not count."""
    import optax

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


EDGES = (2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)  # of a step: int32 ends, uint32 ends


@pytest.mark.parametrize("step", EDGES)
def test_a_schedule_that_has_ended_does_not_begin_anew(step):
    """A finished decay stays at its end, and a rate that keeps falling is that of step 2**31 - 1."""
    import optax

    ended = [
        optax.linear_schedule(1.0, 0.25, 10),
        optax.cosine_decay_schedule(1.0, 10, alpha=0.25),
        optax.piecewise_constant_schedule(1.0, {10: 0.25}),
        optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 10, 0.25),
    ]
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes int32 counts with floats
        for schedule in ended:
            rate = jax.jit(jaxsok.optim.sgd(schedule).rate_at)(jnp.uint32(step))
            np.testing.assert_allclose(rate, 0.25, rtol=1e-6)
        halving = jaxsok.optim.sgd(lambda count: 1.0 / (1.0 + count))
        wanted = 1.0 / (1.0 + min(step, 2**31 - 1))
        np.testing.assert_allclose(jax.jit(halving.rate_at)(jnp.uint32(step)), wanted, rtol=1e-6)


@pytest.mark.parametrize("step", EDGES)
def test_the_step_stays_at_its_end(step):
    """Updates continue after step 2**32 - 1, at the rate with which the schedule ended."""
    import optax

    optimizer = jaxsok.optim.adam(optax.linear_schedule(1.0, 0.25, 10), eps=0.0)
    collection = programs.one_table(dim=DIM, optimizer=optimizer, initializer=jaxsok.initializers.zeros())
    state = dataclasses.replace(collection.init(seed=0), step=jnp.uint32(step))
    features = programs.batch(collection, user=np.array([1]))
    with jax.numpy_dtype_promotion("standard"):
        state, stats = programs.learn(collection, state, features)
    stats.check()
    assert int(state.step) == min(step + 1, 2**32 - 1)
    # Adam's first step of a row, long after the bias corrections have become 1, is 0.1 / sqrt(0.001) rates.
    np.testing.assert_allclose(programs.rows_of(collection, state)[1], -0.25 * 0.1 / np.sqrt(0.001), rtol=1e-5)


def test_learning_rate_of_update_wins_over_a_schedule():
    """The rate given to update is used unchanged."""
    import optax

    collection = programs.one_table(
        dim=DIM,
        optimizer=jaxsok.optim.sgd(optax.linear_schedule(1.0, 0.0, 10)),
        initializer=jaxsok.initializers.zeros(),
    )
    _, state, plan = collection.lookup(collection.init(seed=0), programs.batch(collection, user=np.array([1])))
    state, _ = collection.update(state, plan, {"user": jnp.ones((1, DIM))}, learning_rate=0.125)
    np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, -0.125))


def test_learning_rate_of_update_is_that_of_every_optimizer():
    """Given to update, a rate has the effect of a declared rate."""
    states = []
    for declared, given in ((0.25, None), (RATE, 0.25)):
        collection = with_all(declared)
        state = collection.init(seed=0)
        for keys in ([1, 2], [2, 3]):
            state = learn_all(collection, state, keys, 0.5, None if given is None else jnp.float32(given))
        states.append({name: programs.export(collection, state, name) for name in MAKERS})
    for name in MAKERS:
        for key in (1, 2, 3):
            (_, row, row_states), (_, other, other_states) = (state[name][key] for state in states)
            # XLA computes constants with another program: a few roundings of a scalar.
            np.testing.assert_allclose(row, other, rtol=1e-5, atol=1e-7, err_msg=name)
            for a, b in zip(row_states, other_states, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_new_rows_begin_with_initial_state():
    """State has the names and initial values of state_specs(), with one row per table row, before any update."""
    collection = with_all(0.1)
    features = collection.batch(dict.fromkeys(MAKERS, np.array([3, 4]))).features
    _, state, _ = jax.jit(collection.lookup)(collection.init(seed=0), features)
    wanted = {
        "sgd": {"trace": (DIM, 0.0)},
        "adagrad": {"accumulator": (DIM, 0.1)},
        "rowwise_adagrad": {"accumulator": (1, 0.0)},
        "adam": {"m": (DIM, 0.0), "v": (DIM, 0.0)},
        "adamw": {"m": (DIM, 0.0), "v": (DIM, 0.0)},
        "rowwise_adam": {"m": (DIM, 0.0), "v": (1, 0.0)},
        "nadam": {"m": (DIM, 0.0), "v": (DIM, 0.0)},
        "adamax": {"m": (DIM, 0.0), "u": (DIM, 0.0)},
        "lion": {"m": (DIM, 0.0)},
        "rmsprop": {"v": (DIM, 0.5), "m": (DIM, 0.0), "trace": (DIM, 0.0)},
        "adadelta": {"v": (DIM, 0.0), "u": (DIM, 0.0)},
        "adagrad_decay": {"accumulator": (DIM, 0.1), "num_decays": (1, 0.0)},
        "lamb": {"m": (DIM, 0.0), "v": (DIM, 0.0)},
        "lars": {"trace": (DIM, 0.0)},
        "ftrl": {"accumulator": (DIM, 0.1), "z": (DIM, 0.0)},
        "group_ftrl": {"accumulator": (DIM, 0.5), "z": (DIM, 0.0)},
        "group_adam": {"m": (DIM, 0.0), "v": (DIM, 0.0), "held": (DIM, 0.0)},
    }
    assert wanted.keys() == MAKERS.keys()
    for table in collection.tables:
        got = collection.export_table(state, table.name)["state"]
        specs = {spec.name: (spec.dim, spec.initial_value) for spec in table.optimizer.state_specs(DIM)}
        assert specs == wanted[table.name] and got.keys() == specs.keys()
        for name, (size, value) in specs.items():
            np.testing.assert_array_equal(got[name].reshape(2, size), np.full((2, size), value, np.float32))
    assert jaxsok.optim.sgd(0.1).state_specs(DIM) == ()
    assert [spec.name for spec in jaxsok.optim.rmsprop(0.1).state_specs(DIM)] == ["v"]


SHARE = ("[0.0, 1.0)", [-0.1, 1.0, float("nan"), "0.5", True])
AT_LEAST_0 = ("[0.0, inf)", [-0.1, float("inf"), float("nan"), None, True])
POSITIVE = ("positive", [0.0, -0.1, float("inf"), float("nan"), None, True])
MOMENTS = {"b1": SHARE, "b2": SHARE}
HYPER = {
    "sgd": {"momentum": SHARE, "weight_decay": AT_LEAST_0},
    "adagrad": {"initial_accumulator_value": AT_LEAST_0, "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0},
    "rowwise_adagrad": {"initial_accumulator_value": AT_LEAST_0, "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0},
    "adam": {**MOMENTS, "eps": AT_LEAST_0},
    "adamw": {**MOMENTS, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "rowwise_adam": {**MOMENTS, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "nadam": {**MOMENTS, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "adamax": {**MOMENTS, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "lion": {**MOMENTS, "weight_decay": AT_LEAST_0},
    "rmsprop": {"decay": SHARE, "eps": POSITIVE, "initial_scale": AT_LEAST_0, "momentum": SHARE},
    "adadelta": {"rho": SHARE, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "adagrad_decay": {
        "initial_accumulator_value": POSITIVE,
        "decay_step": ("positive integer", [0, -1, 2.0, None, True, 2**32]),
        "decay_rate": ("number", [0.0, 1.0, -0.1, float("nan"), True]),
        "weight_decay": AT_LEAST_0,
    },
    "lamb": {**MOMENTS, "eps": POSITIVE, "weight_decay": AT_LEAST_0},
    "lars": {"weight_decay": AT_LEAST_0, "trust_coefficient": POSITIVE, "eps": AT_LEAST_0, "momentum": SHARE},
    "ftrl": {
        "learning_rate_power": ("not above 0", [0.5, float("-inf"), float("nan"), None, True]),
        **dict.fromkeys(("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta"), AT_LEAST_0),
    },
    "group_adam": {**MOMENTS, "eps": POSITIVE, **dict.fromkeys(("l1", "l2", "l21"), AT_LEAST_0)},
}
HYPER["group_ftrl"] = {**HYPER["ftrl"], "l21": AT_LEAST_0}
FLAGS = {
    "adagrad": ["eps_in_sqrt"],
    "rowwise_adagrad": ["eps_in_sqrt"],
    "sgd": ["nesterov"],
    "lars": ["nesterov"],
    "rmsprop": ["eps_in_sqrt", "centered", "nesterov", "bias_correction"],
}


@pytest.mark.parametrize("name", MAKERS)
def test_signatures(name):
    """Python's messages about arguments name the called function, and its signature states what it makes."""
    make = MAKERS[name]
    for arguments in ({}, {"learning_rate": RATE, "lr": RATE}):
        with pytest.raises(TypeError, match=rf"^{name}\(\) "):
            make(**arguments)
    assert inspect.signature(make).return_annotation is type(make(RATE))


@pytest.mark.parametrize("name", MAKERS)
def test_refused_hyper_parameters(name):
    """All are tested below, above and at the ends; the message names optimizer, argument, actual and expected value."""
    make, hyper, flags = MAKERS[name], HYPER[name], FLAGS.get(name, [])
    assert {*hyper, *flags, "learning_rate", "limits"} == set(inspect.signature(make).parameters)
    for argument, (wanted, values) in hyper.items():
        for value in values:
            if value is None and argument == "momentum":
                continue
            with pytest.raises(ValueError, match=rf"^optim\.{name}: {argument}: got .*, wanted a.*") as caught:
                make(0.1, **{argument: value})
            assert repr(value) in str(caught.value) and wanted in str(caught.value)
    for flag in flags:
        with pytest.raises(TypeError, match=rf"^optim\.{name}: {flag}: got 1, wanted True or False\.$"):
            make(0.1, **{flag: 1})


@pytest.mark.parametrize("name", MAKERS)
def test_refused_learning_rates(name):
    """Rates that are neither numbers nor schedules are refused; so are rates of at most 0 if they are divisors."""
    make = MAKERS[name]
    for value in ("fast", None, float("nan"), float("inf")):
        with pytest.raises(TypeError, match=rf"^optim\.{name}: learning_rate: got {re.escape(repr(value))}, wanted"):
            make(value)
    with pytest.raises(ValueError, match=rf"^optim\.{name}: learning_rate: got shape \[2\], wanted a scalar"):
        make(np.ones(2))
    with pytest.raises(TypeError, match=rf"^optim\.{name}: learning_rate: got a traced value"):
        jax.jit(make)(0.1)
    if name in ("ftrl", "group_ftrl", "group_adam"):
        with pytest.raises(ValueError, match=rf"^optim\.{name}: learning_rate: got 0\.0, wanted a positive number"):
            make(0.0)
    else:
        assert make(0.0).learning_rate == 0
    assert make(jnp.float32(0.5)) == make(np.float64(0.5)) == make(0.5)
    assert hash(make(0.5)) == hash(make(0.5)) and make(0.5) != make(0.25)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("result", "got"), [(np.ones(1), "float64[1]"), (None, "None"), (jnp.complex64(1), "complex64[]")]
)
def test_refused_results_of_a_schedule(name, result, got):
    """One that is no real scalar is named when the step is traced."""
    optimizer = MAKERS[name](lambda step: result)
    wanted = re.escape(f"optim.{name}: learning_rate: result of the schedule: got {got}")
    with pytest.raises(TypeError, match=f"^{wanted}.*, wanted a scalar"):
        optimizer.rate_at(0)


@pytest.mark.parametrize("name", ["ftrl", "group_ftrl", "group_adam"])
def test_a_schedule_that_gives_nan_is_noticed(name):
    """Rows become NaN; only a rate of 0 or less leaves them as they are."""
    for rate, moved in ((float("nan"), float("nan")), (0.0, 0.0), (-1.0, 0.0)):
        optimizer = MAKERS[name](lambda step, rate=rate: jnp.float32(rate))
        collection = programs.one_table(dim=DIM, optimizer=optimizer, initializer=jaxsok.initializers.zeros())
        features = programs.batch(collection, user=np.array([1]))
        _, state, _ = programs.lookup(collection)(collection.init(seed=0), features)
        state, _ = programs.learn(collection, state, features)
        np.testing.assert_array_equal(programs.rows_of(collection, state)[1], np.full(DIM, moved, np.float32))


class NoDataclass(jaxsok.optim.Optimizer):
    """An optimizer with a number that is no field: two with other numbers would be equal."""

    name = "no_dataclass"

    def __init__(self, scale):
        super().__init__(0.1)
        object.__setattr__(self, "scale", scale)

    def state_specs(self, dim):
        return ()

    def hyper(self, step, learning_rate):
        return (learning_rate,)

    def step_row(self, inputs):
        return jaxsok.optim.RowOutputs(inputs.row - self.scale * inputs.gradient, ())


@dataclasses.dataclass(frozen=True)
class Stated(jaxsok.optim.Optimizer):
    """An optimizer with state of any names and widths, which it does not use."""

    name: ClassVar[str] = "stated"
    states: tuple = ()

    def state_specs(self, dim):
        return tuple(jaxsok.optim.RowState(name, width, 0.0) for name, width in self.states)

    def hyper(self, step, learning_rate):
        return (learning_rate,)

    def step_row(self, inputs):
        return jaxsok.optim.RowOutputs(inputs.row, inputs.states)


@pytest.mark.parametrize("states", [(("a", 4), ("a", 1)), (("a", 3),)], ids=["twice", "width"])
def test_states_of_an_optimizer_are_checked_when_declared(states):
    jaxsok.TableSpec("item", 4, Stated(0.1, (("a", 4), ("b", 1))))
    message = re.escape(f"optimizer: got optim.stated with state {list(states)}, wanted different names, each of dim 4")
    with pytest.raises(ValueError, match=message):
        jaxsok.TableSpec("item", 4, Stated(0.1, states))


@dataclasses.dataclass(frozen=True)
class Derived(jaxsok.optim.Optimizer):
    """An optimizer with numbers that follow from its fields."""

    name: ClassVar[str] = "derived"
    scale: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "half", self.scale / 2)

    @functools.cached_property
    def twice(self):
        return 2 * self.scale

    def state_specs(self, dim):
        return ()

    def hyper(self, step, learning_rate):
        return (learning_rate,)

    def step_row(self, inputs):
        return jaxsok.optim.RowOutputs(inputs.row - self.twice * self.half * inputs.gradient, ())


def test_numbers_that_follow_from_fields_are_no_others():
    """Two tables share an optimizer whose step has kept some."""
    optimizer = Derived(0.1, 2.0)
    for name in ("item", "user"):
        assert jaxsok.TableSpec(name, DIM, optimizer, capacity=16).optimizer.twice == 4.0


def test_a_number_that_is_no_field_is_refused():
    """Else its step would be that of the first one with an equal learning rate."""
    assert NoDataclass(1.0) == NoDataclass(100.0)
    wanted = r"optimizer: got NoDataclass with attributes that are no fields, \['scale'\]"
    with pytest.raises(TypeError, match=wanted):
        jaxsok.TableSpec("item", DIM, NoDataclass(100.0), capacity=16)


@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_nesterov_needs_momentum(name):
    """Nesterov without momentum is refused."""
    with pytest.raises(ValueError, match=rf"^optim\.{name}: nesterov: got True without momentum; give momentum=0\.9"):
        MAKERS[name](0.1, nesterov=True)


@pytest.mark.parametrize("dim", [1, 33])
def test_other_dims(dim):
    """Sums over the columns, and states of one number next to wide states, give the step of `step_row` alone."""
    tables = [
        jaxsok.TableSpec(name, dim, make(RATE, **OPTIONS.get(name, {})), capacity=16) for name, make in MAKERS.items()
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in MAKERS])
    features = collection.batch(dict.fromkeys(MAKERS, np.array([7]))).features
    state = collection.init(seed=0)
    initial, _ = jax.jit(collection.find)(state, features)
    rows = {name: row[0] for name, row in initial.items()}
    states = {
        table.name: [np.full(s.dim, s.initial_value) for s in table.optimizer.state_specs(dim)] for table in tables
    }
    rng = np.random.default_rng(dim)
    for step in range(3):
        gradient = rng.normal(size=dim).astype(np.float32)
        given = dict.fromkeys(MAKERS, jnp.asarray(gradient)[None])
        state, _, _ = programs.fed_step(collection)(state, features, given)
        for table in tables:
            hyper = table.optimizer.hyper(np.int32(step), RATE)
            hyper = tuple(jnp.asarray(word, jnp.float32) for word in hyper)
            old = tuple(jnp.asarray(state, jnp.float32) for state in states[table.name])
            inputs = jaxsok.optim.RowInputs(jnp.asarray(gradient), rows[table.name], old, jnp.float32(1), hyper)
            rows[table.name], states[table.name] = table.optimizer.step_row(inputs)
    for table in tables:
        got = collection.export_table(state, table.name)
        # Sums over up to 33 columns in another order, three times.
        np.testing.assert_allclose(got["rows"][0], rows[table.name], rtol=1e-5, atol=1e-6, err_msg=table.name)
        for spec, old_state in zip(table.optimizer.state_specs(dim), states[table.name], strict=True):
            np.testing.assert_allclose(
                got["state"][spec.name].reshape(-1),
                old_state,
                rtol=1e-5,
                atol=1e-5,
                err_msg=f"{table.name}: {spec.name}",
            )


def test_states_fit_other_strengths_but_no_other_state():
    """The fingerprint of a state has its form, without rates, strengths and limits."""
    optim = jaxsok.optim

    def same(left, other):
        first, second = (programs.one_table(dim=DIM, optimizer=optimizer) for optimizer in (left, other))
        return specs.fingerprint(first.stores) == specs.fingerprint(second.stores)

    assert same(optim.adam(0.1), optim.adam(0.2, b1=0.5, limits=optim.Limits(clip_value=1.0)))
    assert same(optim.group_adam(0.1), optim.group_adam(0.1, l1=0.5, l21=0.5))
    assert same(optim.sgd(0.1, momentum=0.9), optim.sgd(0.1, momentum=0.5, nesterov=True, weight_decay=0.1))
    assert not same(optim.sgd(0.1), optim.sgd(0.1, momentum=0.9))
    assert not same(optim.rmsprop(0.1), optim.rmsprop(0.1, centered=True))
    assert not same(optim.adam(0.1), optim.adamw(0.1))
    assert not same(optim.ftrl(0.1), optim.ftrl(0.1, initial_accumulator_value=0.5))


def test_optimizers_are_declarations():
    """Fields can be read and replaced."""
    adam = jaxsok.optim.adam(0.1, b1=0.8)
    assert dataclasses.replace(adam, b1=0.9) == jaxsok.optim.adam(0.1)
    assert adam != jaxsok.optim.adam(0.1)


def test_a_hot_row_through_many_steps():
    """Hundreds of uses in each of fifty steps cause no drift from the oracle and no overflow."""
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
