"""`optim.lift` against dense Optax on touched rows and against the reference's classifier, and its refusals."""

import contextlib
import dataclasses
import functools
import io
import os
import re
import subprocess
import sys
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax_cases
import programs
import pytest
from hypothesis import given

import jaxsok
from jaxsok.optimizers import separable

lift = jaxsok.optim.lift
DIM = 5
RATE = 0.05
NUM_KEYS = 11
NUM_STEPS = 20


# Dense Optax ---------------------------------------------------------------------------------------------------------


def standard(function):
    """Allows the standard dtype promotion, since Optax mixes int32 counts with floats."""

    @functools.wraps(function)
    def call(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args)

    return call


@standard
def dense_step(tx, table, state, gradient, touched):
    """Makes one step of a dense table; restores rows that are not touched, and their state."""
    updates, after = optax.with_extra_args_support(tx).update(gradient, state, table)

    def put_back(new, old):
        old, new = jnp.asarray(old), jnp.asarray(new)
        if new.ndim == 0 or new.shape[0] != len(table):
            return new
        return jnp.where(touched.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return put_back(optax.apply_updates(table, updates), table), jax.tree.map(put_back, after, state)


def batches(num_steps=NUM_STEPS, seed=0, dim=DIM):
    """Returns gradients of all rows and touched flags: rows that start late, are absent, return, are never used."""
    rng = np.random.default_rng(seed)
    touched = rng.random((num_steps, NUM_KEYS)) < rng.choice([0.2, 0.5, 0.9], NUM_KEYS)
    touched[:, 0], touched[:, 1], touched[:8, 2], touched[3:9, 3] = True, False, False, False
    gradients = rng.normal(size=(num_steps, NUM_KEYS, dim)) * 10.0 ** rng.uniform(-2, 1, (num_steps, NUM_KEYS, 1))
    return np.where(touched[..., None], gradients, 0).astype(np.float32), touched


def initial_table(dim=DIM):
    """Returns rows with numbers of both signs."""
    return np.random.default_rng(7).normal(size=(NUM_KEYS, dim)).astype(np.float32)


def dense_run(tx, table, gradients, touched):
    """Makes all steps of dense Optax; returns the rows after each."""

    def step(carry, batch):
        carry = dense_step(tx, *carry, *batch)
        return carry, carry[0]

    state = jax.tree.map(jnp.asarray, standard(tx.init)(table))
    return jax.lax.scan(step, (table, state), (gradients, touched))[1]


def lifted_run(optimizer, table, gradients, touched):
    """Makes all steps of the lifted optimizer on only the rows of each step; returns the rows after each."""
    dim = table.shape[1]

    def step(carry, batch):
        table, states, global_state, number = carry
        gradient, used = batch
        hyper, global_state = optimizer.advance(global_state, number, None, dim)

        def step_row(gradient, row, states, used):
            new = optimizer.step_row(jaxsok.optim.RowInputs(gradient, row, states, jnp.float32(1), hyper))
            return jax.tree.map(lambda a, b: jnp.where(used, a, b), tuple(new), (row, states))

        table, states = jax.vmap(step_row)(gradient, table, states, used)
        return (table, states, global_state, number + 1), (table, states)

    states = tuple(jnp.full((len(table), s.dim), s.initial_value, jnp.float32) for s in optimizer.state_specs(dim))
    carry = table, states, tuple(map(jnp.asarray, optimizer.init_globals(dim))), jnp.int32(0)
    return jax.lax.scan(step, carry, (gradients, touched))[1]


CASES = {
    f"{name.removesuffix(call.partition('(')[0])}{call}": make
    for name, calls in optax_cases.cases().items()
    for call, make in calls.items()
}
# Transformations that are also part of an alias run only in the long run.
ALL = [pytest.param(call, marks=[pytest.mark.slow] if ".scale_by_" in call else []) for call in CASES]

# Formulas are equal; XLA may round a product and a sum once in one program and twice in the other.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def transformation(call):
    """Returns the transformation of a case."""
    return optax_cases.make_quietly(CASES[call])


@pytest.mark.parametrize("call", ALL)
def test_rows_alone_are_dense_optax(call):
    """Twenty steps with rows that are new, absent, and return agree, without the kernel (law 7).

    A row-wise variant is dense Optax on tables of one row each.
    """
    tx, kind = transformation(call), optax_cases.verdict(CASES[call]).kind
    if kind == "refused":
        with pytest.raises(ValueError, match="refused"):
            lift(tx, rowwise=True)
        return

    def run(table, gradients, touched):
        if kind == "exact":
            want = dense_run(tx, table, gradients, touched)
        else:
            alone = jax.vmap(lambda *row: dense_run(tx, *row), in_axes=(0, 1, 1), out_axes=1)
            want = alone(table[:, None], gradients[:, :, None], touched[:, :, None])[:, :, 0]
        return want, lifted_run(lift(tx, rowwise=kind != "exact"), table, gradients, touched)[0]

    want, got = jax.jit(run, compiler_options=programs.quickly())(initial_table(), *batches())
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, **TOLERANCE)


# Examples give wrong verdicts for these, since they cannot see:
MISLED = {
    "optax.MultiSteps(sgd, 2)": "exact",  # only the effect on rows that the last micro-step does not use
    "optax.apply_every(2)": "exact",
    "optax.contrib.sam(sgd, sgd)": "exact",
    "optax.clip_by_global_norm(1e9)": "exact",  # a branch that is not taken
    "optax.adafactor(lr, multiply_by_parameter_scale=False, clipping_threshold=None)": "exact",  # large tables
    "optax.scale_by_factored_rms()": "exact",
    "optax.add_noise(0.1, 0.1, key)": "row-wise variant",  # noise that no other row shares
    "optax.noisy_sgd(lr)": "row-wise variant",
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CASES)
def test_examples_judge_alike(call):
    """A jaxpr and examples give the same verdict, except in the cases that examples are known to miss."""
    assert judged_by_examples(transformation(call)) == MISLED.get(call, optax_cases.verdict(CASES[call]).kind)


@pytest.mark.parametrize("call", [call for call in MISLED if "noise" not in call and "sgd" not in call])
def test_examples_judge_these(call):
    """A few of them run in the short run."""
    judged = judged_by_examples(transformation(call))
    assert judged == MISLED.get(call, optax_cases.verdict(CASES[call]).kind)
    assert call not in MISLED or judged != optax_cases.verdict(CASES[call]).kind


@standard
def judged_by_examples(tx, num_rows=6, dim=4, num_steps=3):
    """Judges by numbers: do some rows of a block move as they do alone, and in another order?"""
    tx = optax.with_extra_args_support(tx)
    some = np.array([4, 1])
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(num_rows, dim)), jnp.float32)
    try:
        small, large = (jax.eval_shape(tx.init, jax.ShapeDtypeStruct((n, dim), jnp.float32)) for n in (num_rows, 10))
        kinds = jax.tree.map(
            lambda a, b: "all" if a.shape == b.shape else "row" if b.shape == (10, *a.shape[1:]) else "neither",
            small,
            large,
        )
        if "neither" in jax.tree.leaves(kinds):
            return "refused"
        axes = jax.tree.map(lambda kind: 0 if kind == "row" else None, kinds)
        # The trace fails if a value shared by all rows depends on the data of one row.
        jax.eval_shape(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes)), table, small, table)
        block, part = (table, tx.init(table)), (table[some], tx.init(table[some]))
        for _ in range(num_steps):
            sizes = 10.0 ** rng.uniform(-1, 1, (num_rows, 1))
            gradient = jnp.asarray(rng.normal(size=(num_rows, dim)) * sizes, jnp.float32)
            first, state = tx.update(gradient, block[1], block[0])
            second, other = tx.update(gradient[some], part[1], part[0])
            if not jnp.allclose(first[some], second, rtol=1e-5, atol=1e-7):
                return "row-wise variant"
            block = optax.apply_updates(block[0], first), state
            part = optax.apply_updates(part[0], second), other
    except (TypeError, ValueError, AttributeError):
        return "refused"
    return "exact"


def test_table_of_the_page():
    """docs/optax.md has a row for everything that Optax makes; for another Optax, for what both have."""
    text, version = optax_cases.read_section()
    if version == optax.__version__:
        assert text == optax_cases.section(), "run: PYTHONPATH=. python tests/optimizers/optax_cases.py"
        return
    listed = dict(re.findall(r"^\| `(.*?)` \| ([^|]*) \|", text, re.MULTILINE))
    found = dict(re.findall(r"^\| `(.*?)` \| ([^|]*) \|", "\n".join(optax_cases.lines()), re.MULTILINE))
    both = listed.keys() & found.keys()
    assert len(both) > 100
    assert {call: listed[call] for call in both} == {call: found[call] for call in both}


# Refusals ------------------------------------------------------------------------------------------------------------


def noise_by_place():
    """Returns a user's own noise, which no class of state reveals."""

    def update(updates, state, params=None):
        return updates + jax.random.normal(jax.random.key(0), updates.shape), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_count():
    """Returns a mean over the table, without a sum."""
    return optax.stateless(lambda updates, params: updates / updates.shape[0])


def over(count):
    """Returns a mean over the table, without a sum of row data."""
    return lambda: optax.stateless(lambda updates, params: updates / count(updates))


def ones_along(block):
    return jnp.ones(block.shape[0])


def counted_up(block):
    """Loops for as many rounds as there are rows."""
    return jax.lax.while_loop(lambda i: i < block.shape[0], lambda i: i + 1.0, jnp.float32(0))


def summed_up(block):
    """Sums ones inside a loop."""
    return jax.lax.while_loop(lambda i: i < 3, lambda i: i + ones_along(block).sum(), jnp.float32(1))


def by_initial_count():
    """Returns state that is shared by all rows, and starts as their number."""
    return optax.GradientTransformation(
        lambda params: jnp.float32(params.shape[0]), lambda updates, state, params=None: (updates / state, state)
    )


TABLE_OF_NUMBERS = np.arange(5000, dtype=np.float32) + 1
COUNTS = {
    "a sum of ones": lambda block: jnp.sum(jnp.ones_like(block)),
    "a product of ones": lambda block: ones_along(block) @ ones_along(block),
    "squares of ones": lambda block: jnp.sum(jnp.ones((block.shape[0],) * 2), axis=1, keepdims=True),
    "ones of another length": lambda block: jnp.ones(2 * block.shape[0]).sum(),
    "a constant": lambda block: np.array([[block.shape[0]]], np.float32),
    "a constant for each row": lambda block: np.full((block.shape[0], 1), block.shape[0], np.float32),
    "the end of a loop": counted_up,
    "inside a loop": summed_up,
    "a place in a constant": lambda block: jnp.asarray(TABLE_OF_NUMBERS)[block.shape[0]],
}


def normalized_late():
    """Couples rows, but not before step 1000."""
    return optax.conditionally_transform(optax.clip_by_global_norm(1.0), lambda step: step > 1000)


REFUSED = {
    "couples": (lambda: optax.lamb(RATE), "sums over the rows.*rowwise=True"),
    "in a chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)), "clip by a global norm out"),
    "a branch not taken": (lambda: optax.clip_by_global_norm(1e9), "sums over the rows"),
    "a branch not taken yet": (normalized_late, "sums over the rows"),
    "factored": (lambda: transformation(next(c for c in MISLED if "adafactor" in c)), "factored=False"),
    "global state of rows": (
        lambda: optax.contrib.prodigy(RATE),
        "estim_lr is one for all rows, yet depends on their data",
    ),
    "state by column": (lambda: optax.sm3(RATE), r"mu\[1\] is one for all rows"),
    "flat state": (lambda: optax.flatten(optax.adam(RATE)), r"mu is \[104\] for 13 rows of 8"),
    "micro-steps": (lambda: transformation("optax.MultiSteps(sgd, 2)"), "MultiStepsState.*several plans"),
    "nested": (
        lambda: optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.chain(optax.adam(RATE)), 3)),
        "ApplyIfFiniteState",
    ),
    "noise": (lambda: optax.noisy_sgd(RATE, seed=0), "AddNoiseState"),
    "noise without a name": (noise_by_place, "place of the row"),
    "number of rows": (by_count, "number of rows"),
    "number of rows in the state": (by_initial_count, "number of rows"),
    **{f"number of rows by {name}": (over(count), "number of rows") for name, count in COUNTS.items()},
    "needs the loss": (lambda: optax.polyak_sgd(), "'value'.*needs the loss"),
    "mask of a tree": (lambda: optax.masked(optax.sgd(RATE), {"a": True}), "init fails on a table.*single array"),
    "nine arrays of state": (
        lambda: optax.chain(*[optax.trace(0.9)] * 9),
        "it has 9 arrays of state by row.*at most 8",
    ),
    "columns that move": (
        lambda: optax.stateless(lambda g, _: -g.reshape(g.shape[0], 2, -1).swapaxes(1, 2).reshape(g.shape)),
        "transpose with axes of a row",
    ),
    "half state": (lambda: optax.adam(RATE, mu_dtype=jnp.float16), "mu is float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    """The message names the cause and the remedy."""
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s)optim.lift: refused: .*{message}"):
        lift(optax_cases.make_quietly(make))


def test_rowwise_lifts_no_more_than_what_couples_rows():
    """Noise, micro-steps and global estimates stay refused."""
    for name in ("noise", "noise without a name", "micro-steps", "global state of rows", "nested", "needs the loss"):
        with pytest.raises(ValueError, match="refused"):
            lift(optax_cases.make_quietly(REFUSED[name][0]), rowwise=True)
    for name in ("couples", "in a chain", "a branch not taken", "factored", "number of rows"):
        assert lift(optax_cases.make_quietly(REFUSED[name][0]), rowwise=True).rowwise


def test_arguments():
    """An argument that is not a transformation raises a clear error."""
    with pytest.raises(TypeError, match=r"got MultiSteps, wanted .*gradient_transformation\(\)"):
        lift(optax.MultiSteps(optax.sgd(RATE), 2))
    with pytest.raises(TypeError, match="got float"):
        lift(0.1)
    with pytest.raises(TypeError, match="rowwise: got 1"):
        lift(optax.sgd(RATE), rowwise=1)
    with pytest.raises(TypeError, match="learning_rate"):
        lift(optax.sgd(RATE), learning_rate=0.1)


def test_made_inside_jit():
    """It is declared outside, like other optimizers."""
    for make in (optax.sgd, optax.inject_hyperparams(optax.adam), optax.contrib.schedule_free_sgd):
        with pytest.raises(TypeError, match="traced values; an optimizer is declared outside jit"):
            jax.jit(lambda rate, make=make: lift(make(rate)) and rate)(0.1)


@pytest.mark.parametrize("first", [jnp.int32(1), jnp.zeros((), bool), jnp.bfloat16(1)])
def test_a_state_that_changes_its_dtype_is_refused(first):
    """The stored state has one dtype: the next update would begin with another number than Optax's."""
    tx = optax.GradientTransformation(lambda _: first, lambda g, state, _=None: (g, state.astype(jnp.float32) * 0.5))
    with pytest.raises(ValueError, match=f"changes its dtype in an update, from {first.dtype} to float32"):
        lift(tx).state_specs(DIM)


def test_a_rate_that_was_an_integer_takes_no_other():
    """Optax keeps it as int32, in which 0.25 is 0."""
    table = jaxsok.TableSpec("item", 1, lift(optax.inject_hyperparams(optax.sgd)(learning_rate=1)), capacity=16)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("clicked", "item")])
    batch = collection.batch({"clicked": np.array([7])})
    _, state, plan = collection.lookup(collection.init(seed=0), batch.features)
    with pytest.raises(ValueError, match=r"learning_rate: got one, but .* made int32 .* write 1\.0 in place of 1"):
        collection.update(state, plan, {"clicked": jnp.ones((1, 1))}, learning_rate=0.25)


# State ---------------------------------------------------------------------------------------------------------------


def specs(tx, dim=DIM, **options):
    """Returns (name, dim, initial value) of each row state."""
    return [dataclasses.astuple(state) for state in lift(tx, **options).state_specs(dim)]


def test_names_and_initial_values():
    """Names are those of Optax, and values are those of its init."""
    tenth, small = float(np.float32(0.1)), float(np.float32(1e-6))
    assert specs(optax.sgd(RATE)) == []
    assert specs(optax.adagrad(RATE)) == [("sum_of_squares", DIM, tenth)]
    assert specs(optax.yogi(RATE)) == [("mu", DIM, small), ("nu", DIM, small)]
    assert specs(optax.chain(optax.trace(0.9), optax.trace(0.5))) == [("trace", DIM, 0.0), ("trace_2", DIM, 0.0)]
    assert specs(optax.contrib.schedule_free_sgd(RATE)) == [("z", DIM, 0.0), ("started", 1, 0.0)]


@pytest.mark.parametrize("dim", [1, 2, 13, 17, 64, 1024])
def test_dims(dim):
    """State follows the dim, also if it is as large as a block that lift analysed."""
    assert specs(optax.adamw(RATE), dim) == [("mu", dim, 0.0), ("nu", dim, 0.0)]
    (count,) = lift(optax.adamw(RATE)).init_globals(dim)
    assert count.dtype == np.int32 and count.shape == ()


def norm_by_row():
    """Returns a user's transformation: one number per row, kept as [num_rows] or [num_rows, 1], and a flag."""

    def init(params):
        return {
            "sum": jnp.zeros(params.shape[0]),
            "largest": jnp.ones((params.shape[0], 1)),
            "was_negative": jnp.zeros(params.shape[0], bool),
        }

    def update(updates, state, params=None):
        state = {
            "sum": state["sum"] + jnp.sum(updates**2, axis=1),
            "largest": jnp.maximum(state["largest"], jnp.max(jnp.abs(updates), axis=1, keepdims=True)),
            "was_negative": state["was_negative"] | (jnp.min(updates, axis=1) < 0),
        }
        step = updates / (jnp.sqrt(state["sum"])[:, None] + state["largest"])
        return -RATE * jnp.where(state["was_negative"][:, None], step, 2 * step), state

    return optax.GradientTransformation(init, update)


def test_one_number_a_row():
    """Row-wise state of a user's transformation takes one number."""
    tx = norm_by_row()
    assert specs(tx) == [("largest", 1, 1.0), ("sum", 1, 0.0), ("was_negative", 1, 0.0)]
    args = initial_table(), *batches()
    np.testing.assert_allclose(
        lifted_run(lift(tx), *args)[0], jax.jit(lambda *a: dense_run(tx, *a))(*args), **TOLERANCE
    )


def test_bfloat16_state_is_stored_exactly():
    """With mu_dtype=bfloat16 the float32 state holds numbers of bfloat16."""
    optimizer = lift(optax.adam(RATE, mu_dtype=jnp.bfloat16))
    _, (mu, nu) = lifted_run(optimizer, initial_table(), *batches())
    assert mu.dtype == nu.dtype == jnp.float32
    np.testing.assert_array_equal(mu, mu.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.any(np.asarray(nu != nu.astype(jnp.bfloat16).astype(jnp.float32)))


def test_state_of_large_rows():
    """State that init gives to only some rows is not treated as the state of all rows."""

    def init(params):
        return {"large": jnp.where(jnp.abs(params) > 1e6, 1.0, 0.0), "small": params * 0 + 0.5}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    optimizer = lift(tx)
    names = [spec.name for spec in optimizer.state_specs(DIM)]
    assert names == ["large", "small", "started"]
    zeros = jnp.zeros(DIM)
    inputs = jaxsok.optim.RowInputs(zeros, zeros + 1e7, (zeros, zeros, jnp.zeros(1)), jnp.float32(1), ())
    large, small, _ = optimizer.step_row(inputs).states
    np.testing.assert_array_equal(large, np.ones(DIM))
    np.testing.assert_array_equal(small, np.full(DIM, 0.5))


def test_rows_begin_where_they_are_first_stepped():
    """State that Optax copies from the parameters is the row at its first step, whatever its number."""
    optimizer = lift(optax.contrib.schedule_free_sgd(RATE))
    hyper, _ = optimizer.advance(optimizer.init_globals(DIM), 0, None, DIM)
    row, gradient = jnp.arange(1.0, DIM + 1), jnp.ones(DIM)
    inputs = jaxsok.optim.RowInputs(gradient, row, (jnp.zeros(DIM), jnp.zeros(1)), jnp.float32(1), hyper)
    _, (z, started) = optimizer.step_row(inputs)
    np.testing.assert_allclose(z, row - RATE * gradient, rtol=1e-6)
    np.testing.assert_array_equal(started, [1.0])
    # After it has started, its own z counts.
    _, (z, _) = optimizer.step_row(inputs._replace(states=(jnp.zeros(DIM), started)))
    np.testing.assert_allclose(z, -RATE * gradient, rtol=1e-6)


def test_declarations():
    """Declarations are frozen and hashable; the same object lifted the same way is equal, so tables share a store."""
    tx = optax.adam(RATE)
    assert lift(tx) == lift(tx) and hash(lift(tx)) == hash(lift(tx))
    assert lift(tx) != lift(optax.adam(RATE)) and lift(tx) != lift(tx, rowwise=True)
    tables = [jaxsok.TableSpec(name, DIM, lift(tx)) for name in "ab"]
    assert len(jaxsok.Collection(tables, []).stores) == 1


def test_first_look_inside_jit():
    """A new dim may be analysed while tracing."""
    optimizer = lift(optax.contrib.schedule_free_adamw(RATE))
    names = []
    jax.jit(lambda x: names.extend(s.name for s in optimizer.state_specs(3)) or x)(0)
    assert names == ["nu", "z", "started"]


def test_with_x64():
    """Rows and global state have 32 bits in every session."""
    with jax.enable_x64(True):
        optimizer = lift(optax.contrib.schedule_free_adamw(optax.linear_schedule(RATE, 0.0, 100)))
        assert {leaf.dtype for leaf in optimizer.init_globals(DIM)} == {np.dtype("float32"), np.dtype("int32")}
        args = [jnp.asarray(a) for a in (initial_table(), *batches(3))]
        wide, _ = jax.jit(lambda *a: lifted_run(optimizer, *a))(*args)
    args = initial_table(), *batches(3)
    np.testing.assert_allclose(wide, lifted_run(optimizer, *args)[0], **TOLERANCE)


# Through the kernel --------------------------------------------------------------------------------------------------

THROUGH = {
    "sgd": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, 5, 30)),
    "adam bfloat16": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "adamw": lambda: optax.adamw(RATE, weight_decay=0.1),
    "adagrad": lambda: optax.adagrad(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "lion": lambda: optax.lion(RATE),
    "rprop": lambda: optax.rprop(RATE),
    "adopt": lambda: optax.contrib.adopt(RATE),
    "adafactor": lambda: transformation(
        "optax.adafactor(lr, factored=False, multiply_by_parameter_scale=False, clipping_threshold=None)"
    ),
    "madgrad": lambda: optax.contrib.madgrad(RATE),
    "cocob": lambda: optax.contrib.cocob(RATE),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(RATE, warmup_steps=3),
    "chain": lambda: optax.chain(
        optax.clip(0.5), optax.centralize(), optax.add_decayed_weights(0.1), optax.inject_hyperparams(optax.adam)(RATE)
    ),
    "every second step": lambda: optax.conditionally_transform(optax.adam(RATE), lambda step: step % 2 == 0),
    "optimistic": lambda: optax.optimistic_adam_v2(RATE),
    "one number a row": norm_by_row,
}


def step_of(collection, **options):
    """Returns a jitted lookup and update with given gradients."""

    def step(state, features, gradients):
        _, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, {"user": gradients}, **options)

    return jax.jit(step, donate_argnums=0, compiler_options=programs.quickly())


def dense_batches(keys, gradients):
    """Makes the dense gradients of batches `[num_steps, num_uses]` of keys below NUM_KEYS; others are padding."""
    num_steps, _, dim = gradients.shape
    dense, touched = np.zeros((num_steps, NUM_KEYS, dim), np.float32), np.zeros((num_steps, NUM_KEYS), bool)
    for step in range(num_steps):
        for key, gradient in zip(keys[step], gradients[step], strict=True):
            if key < NUM_KEYS:
                dense[step, key] += gradient
                touched[step, key] = True
    return dense, touched


def check_against_dense(tx, optimizer, keys, gradients, tolerance):
    """Runs the steps through a collection and dense Optax; checks that only used keys have rows, and equal rows."""
    num_steps, num_uses, dim = gradients.shape
    collection = programs.one_table(dim=dim, optimizer=optimizer)
    state, step = collection.init(seed=0), step_of(collection)
    for keys_of_step, gradient in zip(keys, gradients, strict=True):
        padded = np.where(keys_of_step < NUM_KEYS, keys_of_step, -1)
        state, stats = step(state, programs.batch(collection, user=padded), gradient)
    stats.check()
    table = programs.initial_rows("user", dim, np.arange(NUM_KEYS))
    dense, touched = dense_batches(keys, gradients)
    run = jax.jit(lambda *args: dense_run(tx, *args), compiler_options=programs.quickly())
    want = np.asarray(run(table, dense, touched))[-1]
    got = programs.rows_of(collection, state)
    assert sorted(got) == np.flatnonzero(touched.any(axis=0)).tolist()
    for key, row in got.items():
        np.testing.assert_allclose(row, want[key], err_msg=f"key {key}", **tolerance)
    return collection, state


def uses(num_steps, num_uses, dim, seed):
    """Returns batches with keys that repeat, start late and are absent, padding, and gradients of several sizes."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 4 + np.arange(num_steps)[:, None] // 2, (num_steps, num_uses)) % (NUM_KEYS + 1)
    sizes = 10.0 ** rng.uniform(-1, 1, (num_steps, num_uses, 1))
    return keys, (rng.normal(size=(num_steps, num_uses, dim)) * sizes).astype(np.float32)


# bfloat16 has 8 bits: XLA may keep more of them between two operations, while the kernel rounds each.
LOOSE = {"rtol": 1e-2, "atol": 1e-3}


@pytest.mark.parametrize("name", THROUGH)
def test_lifted_is_dense_optax(name):
    """Twenty steps with repeated, new and absent keys agree, through lookup and update (law 7)."""
    tx = THROUGH[name]()
    collection, state = check_against_dense(
        tx, lift(tx), *uses(NUM_STEPS, 8, DIM, 1), LOOSE if "bfloat16" in name else TOLERANCE
    )
    states = collection.export_table(state, "user")["state"]
    assert sorted(states) == sorted(spec.name for spec in lift(tx).state_specs(DIM))


@pytest.mark.slow
@pytest.mark.parametrize("call", CASES)
def test_all_of_optax_through_the_kernel(call):
    """The law holds for everything that can be lifted."""
    tx = transformation(call)
    if optax_cases.verdict(CASES[call]).kind != "exact":
        with pytest.raises(ValueError, match="refused"):
            lift(tx)
        return
    check_against_dense(tx, lift(tx), *uses(6, 8, DIM, 5), LOOSE if "bfloat16" in call else TOLERANCE)


@pytest.mark.parametrize("dim", [3, 33, *map(programs.only_on_gpus, (1, 8, 200))])
def test_lifted_is_dense_optax_for_dims(dim):
    """Any dim works, also with sums over columns."""
    tx = optax.chain(optax.centralize(), optax.adamw(RATE))
    check_against_dense(tx, lift(tx), *uses(5, 8, dim, dim), TOLERANCE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.lamb(RATE),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE)),
        lambda: optax.adafactor(RATE),
    ],
)
def test_rowwise_variant_through_the_kernel(make):
    """Each row is a separate table, compared with dense Optax on that table."""
    tx, (keys, gradients) = make(), uses(10, 8, DIM, 2)
    collection = programs.one_table(dim=DIM, optimizer=lift(tx, rowwise=True))
    state, step = collection.init(seed=0), step_of(collection)
    for keys_of_step, gradient in zip(keys, gradients, strict=True):
        padded = np.where(keys_of_step < NUM_KEYS, keys_of_step, -1)
        state, _ = step(state, programs.batch(collection, user=padded), gradient)
    table = programs.initial_rows("user", DIM, np.arange(NUM_KEYS))
    dense, touched = dense_batches(keys, gradients)
    alone = jax.jit(jax.vmap(lambda *row: dense_run(tx, *row), in_axes=(0, 1, 1), out_axes=1))
    want = np.asarray(alone(table[:, None], dense[:, :, None], touched[:, :, None]))[-1, :, 0]
    for key, row in programs.rows_of(collection, state).items():
        np.testing.assert_allclose(row, want[key], err_msg=f"key {key}", **TOLERANCE)


@functools.cache
def random_program(name):
    """Returns one transformation, collection and programs for many examples."""
    tx = THROUGH[name]()
    collection = programs.one_table(dim=2, optimizer=lift(tx))
    dense = jax.jit(lambda *args: dense_run(tx, *args), compiler_options=programs.quickly())
    return tx, collection, step_of(collection), dense


@pytest.mark.parametrize("name", ["adamw", "schedule_free"])
@given(data=st.data())
def test_any_history(name, data):
    """In any history rows equal those of dense Optax with untouched rows restored."""
    num_steps, num_uses = 6, 4
    _, collection, step, dense = random_program(name)
    key = st.integers(0, NUM_KEYS)
    keys = np.array(data.draw(st.lists(st.lists(key, min_size=4, max_size=4), min_size=6, max_size=6)))
    seed = data.draw(st.integers(0, 2**16))
    gradients = np.random.default_rng(seed).normal(size=(num_steps, num_uses, 2)).astype(np.float32)
    state = collection.init(seed=0)
    for keys_of_step, gradient in zip(keys, gradients, strict=True):
        features = programs.batch(collection, user=np.where(keys_of_step < NUM_KEYS, keys_of_step, -1))
        state, _ = step(state, features, gradient)
    table = programs.initial_rows("user", 2, np.arange(NUM_KEYS))
    args = dense_batches(keys, gradients)
    want = np.asarray(dense(table, *args))[-1]
    got = programs.rows_of(collection, state)
    assert sorted(got) == np.flatnonzero(args[1].any(axis=0)).tolist()
    for keys_of_step, row in got.items():
        np.testing.assert_allclose(row, want[keys_of_step], **TOLERANCE)


def test_erased_rows_begin_anew():
    """A key that returns starts from its own row again, not from the erased row's copy."""
    collection = programs.one_table(dim=DIM, optimizer=lift(optax.contrib.schedule_free_sgd(RATE)))
    state = collection.init(seed=0)
    features = programs.batch(collection, user=np.array([7]))
    state, _ = programs.learn(collection, state, features)
    assert collection.export_table(state, "user")["state"]["started"].ravel().tolist() == [1.0]
    state, _ = collection.erase(state, "user", np.array([7]))
    _, state, _ = programs.lookup(collection)(state, features)
    states = collection.export_table(state, "user")["state"]
    assert states["started"].ravel().tolist() == [0.0] and not states["z"].any()


def test_learning_rate_of_update():
    """collection.update(learning_rate=) reaches the injected hyper-parameter, and nothing else."""
    injected = optax.inject_hyperparams(optax.sgd)(0.5)
    zeros = jaxsok.initializers.zeros()
    collection = programs.one_table(dim=DIM, optimizer=lift(injected), initializer=zeros)
    state, features = collection.init(seed=0), programs.batch(collection, user=np.array([1]))
    rows = []
    for options in ({}, {"learning_rate": 0.125}, {}):
        state, _ = step_of(collection, **options)(state, features, jnp.ones((1, DIM)))
        rows.append(-float(programs.rows_of(collection, state)[1][0]))
    assert np.diff([0.0, *rows]).tolist() == [0.5, 0.125, 0.5]
    collection = programs.one_table(dim=DIM, optimizer=lift(optax.sgd(0.5)))
    with pytest.raises(ValueError, match=r"learning_rate: got one.*inject_hyperparams"):
        features = programs.batch(collection, user=np.array([1]))
        step_of(collection, learning_rate=0.1)(collection.init(seed=0), features, jnp.ones((1, DIM)))


def test_lifted_adam_is_the_fused_one():
    """Both optimizers give equal rows."""
    keys, gradients = uses(10, 8, DIM, 3)
    rows = []
    for optimizer in (jaxsok.optim.adam(RATE), lift(optax.adam(RATE))):
        collection = programs.one_table(dim=DIM, optimizer=optimizer)
        state, step = collection.init(seed=0), step_of(collection)
        for keys_of_step, gradient in zip(keys, gradients, strict=True):
            state, _ = step(state, programs.batch(collection, user=keys_of_step), gradient)
        rows.append(programs.rows_of(collection, state))
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[0].items():
        np.testing.assert_allclose(rows[1][key], row, rtol=1e-5, atol=1e-6)


def test_tables_share_counts_with_their_store():
    """A row first used late is corrected for all steps of the collection, as in dense Optax."""
    collection = programs.one_table(dim=DIM, optimizer=lift(optax.adam(RATE)))
    state, step = collection.init(seed=0), step_of(collection)
    for key in (1, 1, 9):
        state, _ = step(state, programs.batch(collection, user=np.array([key])), jnp.ones((1, DIM)))
    assert [int(leaf[0]) for leaf in state.stores[0].globals_] == [3]
    moved = programs.initial_rows("user", DIM, [9])[0] - programs.rows_of(collection, state)[9]
    first, second = (1 - 0.9) / (1 - 0.9**3), (1 - 0.999) / (1 - 0.999**3)
    np.testing.assert_allclose(moved, RATE * first / np.sqrt(second), rtol=1e-4)


@pytest.mark.parametrize("num_devices", [2])
def test_on_a_mesh(num_devices):
    """Split over shards, the rows are those of one device."""
    keys, gradients = uses(6, 8, DIM, 4)
    table = [jaxsok.TableSpec("user", DIM, lift(optax.contrib.schedule_free_adamw(RATE)), capacity=64)]
    feature = [jaxsok.FeatureSpec("user", "user")]
    rows = []
    for collection in (jaxsok.Collection(table, feature), programs.over(num_devices, table, feature)):
        state, step = collection.init(seed=0), step_of(collection)
        for keys_of_step, gradient in zip(keys, gradients, strict=True):
            state, _ = step(state, programs.batch(collection, user=keys_of_step), gradient)
        rows.append(programs.by_key(collection, state, "user"))
    for column in rows[0]:
        np.testing.assert_allclose(rows[1][column], rows[0][column], rtol=1e-5, atol=1e-6, err_msg=column)


FORMS = """
import optax, jaxsok
from jaxsok import specs
for tx, options in (
    (optax.adam(0.1), {}),
    (optax.adam(0.2), {}),
    (optax.adabelief(0.1), {}),
    (optax.adabelief(0.1), {"rowwise": True}),
    (optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.1, 5)), {}),
    (optax.partition({"a": optax.masked(optax.adam(0.1), lambda x: True)}, "a"), {}),
):
    table = jaxsok.TableSpec("t", 4, jaxsok.optim.lift(tx, **options))
    print(specs.describe(specs.group_into_stores([table])))
"""


def test_fingerprints():
    """Another transformation changes the form, another rate does not; the form is equal in every run."""
    env, here = {**os.environ, "JAX_PLATFORMS": "cpu"}, io.StringIO()
    done = subprocess.run([sys.executable, "-c", FORMS], env=env, capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(here):
        exec(FORMS, {})
    first, second = done.stdout, here.getvalue()
    assert first == second and " at 0x" not in first
    adam, faster, belief, rowwise, *others = first.splitlines()
    assert adam == faster
    assert len({adam, belief, rowwise, *others}) == 5


# Global state --------------------------------------------------------------------------------------------------------


def test_global_state_advances_once_a_step():
    """Counts and schedules advance with and without rows."""
    optimizer = lift(optax.adam(optax.linear_schedule(1.0, 0.0, 10)))
    state = optimizer.init_globals(DIM)
    for step in range(3):
        hyper, after = optimizer.advance(state, step, None, DIM)
        assert [int(count) for count in hyper] == [step, step]
        assert [leaf.dtype for leaf in after] == [leaf.dtype for leaf in state]
        state = after
    assert [int(count) for count in state] == [3, 3]


def move_row(optimizer, state, learning_rate):
    """Returns how far a row with gradient 1 moves, and the global state afterwards."""
    hyper, state = optimizer.advance(state, 0, learning_rate, DIM)
    row = jnp.zeros(DIM)
    inputs = jaxsok.optim.RowInputs(jnp.ones(DIM), row, (), jnp.float32(1), hyper)
    return float(-optimizer.step_row(inputs).row[0]), state


def test_learning_rate_goes_to_injected_hyperparameters():
    """It applies only to the step; then the declared rate returns."""
    optimizer = lift(optax.chain(optax.clip(2.0), optax.inject_hyperparams(optax.sgd)(0.5)))
    state = optimizer.init_globals(DIM)
    first, state = move_row(optimizer, state, None)
    second, state = move_row(optimizer, state, jnp.float32(0.125))
    third, state = move_row(optimizer, state, 0.25)
    fourth, _ = move_row(optimizer, state, None)
    assert [first, second, third, fourth] == [0.5, 0.125, 0.25, 0.5]


class Halving(NamedTuple):
    """A state whose numbers are its own, though their field has the name of Optax's."""

    hyperparams: dict


def test_numbers_that_a_transformation_changes_are_state():
    """They are not those of the declaration at each step, nor a rate that an update replaces."""

    def update(gradients, state, params=None):
        rate = state.hyperparams["learning_rate"]
        return jax.tree.map(lambda g: -rate * g, gradients), Halving({"learning_rate": rate / 2})

    tx = optax.GradientTransformation(lambda params: Halving({"learning_rate": jnp.float32(1.0)}), update)
    optimizer = lift(optax.chain(tx, optax.inject_hyperparams(optax.scale)(0.5)))
    state, moved = optimizer.init_globals(DIM), []
    for _ in range(3):
        distance, state = move_row(optimizer, state, None)
        moved.append(distance)
    assert moved == [0.5, 0.25, 0.125] and None in optimizer.global_names(DIM)


def test_injected_numbers_are_those_of_the_declaration():
    """A state that goes on with other numbers learns with these, as one that is restored does."""
    before, after = (lift(optax.inject_hyperparams(optax.adam)(rate, b1=b1)) for rate, b1 in ((0.5, 0.9), (0.25, 0.0)))
    _, state = before.advance(before.init_globals(DIM), 0, None, DIM)
    globals_, kept = after.advance(state, 1, None, DIM)
    assert None in after.global_names(DIM)
    for i, name in enumerate(after.global_names(DIM)):
        if name is None:
            assert float(globals_[i]) == float(kept[i]) == float(after.init_globals(DIM)[i])
        else:
            assert int(globals_[i]) == 1 and int(kept[i]) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(RATE),
        lambda: optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(RATE)),
        lambda: optax.inject_hyperparams(optax.scale)(step_size=RATE),
    ],
)
def test_learning_rate_without_a_place_to_go(make):
    """It is an error, not a step with another rate; a scheduled rate would ignore it."""
    optimizer = lift(make())
    with pytest.raises(ValueError, match=r"learning_rate: got one.*inject_hyperparams"):
        optimizer.advance(optimizer.init_globals(DIM), 0, 0.1, DIM)


# The analysis --------------------------------------------------------------------------------------------------------

N, D = 13, 4
BLOCK = jnp.zeros((N, D))
TABLE = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
ALONE = {
    "elementwise": lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1),
    "over columns": lambda x: x - x.mean(axis=1, keepdims=True),
    "there and back": lambda x: (x.T * 2).T.reshape(N, 1, D)[:, 0],
    "a constant by column": lambda x: x + np.arange(D, dtype=np.float32)[None],
    "nested": lambda x: jax.jit(jax.nn.silu)(x),
    "in a loop": lambda x: x * jax.lax.fori_loop(0, 3, lambda i, f: f * 2, jnp.float32(1)),
    "one of two": lambda x: jax.lax.cond(jnp.ones(()) > 0, lambda x: x * 2, lambda x: x, x),
}
TOGETHER = {
    "sum": lambda x: x - x.mean(),
    "over rows": lambda x: x / jnp.max(x, axis=0, keepdims=True),
    "end to end": lambda x: jnp.sort(x.ravel()).reshape(N, D),
    "one row for all": lambda x: x + x[:1],
    "reversed": lambda x: x[::-1],
    "shifted": lambda x: jnp.roll(x, 1, axis=0),
    "a running sum": lambda x: jnp.cumsum(x, axis=0),
    "product of tables": lambda x: x @ x.T @ x,
    "by place": lambda x: x * jnp.arange(N, dtype=jnp.float32)[:, None],
    "a constant by place": lambda x: x * TABLE,
    "columns laid along the rows": lambda x: x + jnp.broadcast_to(jnp.arange(4.0), (N, D)).reshape(D, N).T,
    "in a branch": lambda x: jax.lax.cond(jnp.ones(()) > 0, lambda x: x, lambda x: x / jnp.sum(x), x),
    "condition on all": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda x: x, lambda x: -x, x),
}


@pytest.mark.parametrize("name", ALONE)
def test_rows_alone(name):
    """Functions that keep rows separate are recognized, and are row-wise in numbers."""
    function = ALONE[name]
    assert separable.dependences(jax.make_jaxpr(function)(BLOCK), [0], N) == [0]
    changed = TABLE.copy()
    changed[3] = np.nan
    differ = np.asarray(function(jnp.asarray(TABLE)) != function(jnp.asarray(changed))).any(axis=1)
    assert differ.tolist() == [row == 3 for row in range(N)]


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_together(name):
    """Functions that mix rows, or distinguish them by place, are reported as coupled."""
    (found,) = separable.dependences(jax.make_jaxpr(TOGETHER[name])(BLOCK), [0], N)
    assert isinstance(found, separable.Coupled) and found.reason


def test_what_knows_no_row():
    """Shapes are no data; noise is no data either, but is distinguished."""
    found = separable.dependences(
        jax.make_jaxpr(
            lambda x: (x.shape[0] * jnp.ones(()), jnp.zeros_like(x), jax.random.uniform(jax.random.key(0), x.shape))
        )(BLOCK),
        [0],
        N,
    )
    assert found == [None, None, separable.Positional()]
