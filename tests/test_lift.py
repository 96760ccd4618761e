"""`optim.lift`: against dense Optax on the touched rows, against the classifier of the reference, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax_cases
import programs
import pytest

import jaxsok

lift = jaxsok.optim.lift
DIM = 5
RATE = 0.05
NUM_KEYS = 11
NUM_STEPS = 20


# Dense Optax ---------------------------------------------------------------------------------------------------------


def standard(function):
    """Optax mixes int32 counts with floats."""

    @functools.wraps(function)
    def call(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args)

    return call


@standard
def dense_step(tx, table, state, gradient, touched):
    """One step of a dense table; rows that are not touched are put back, with what the state holds for them."""
    updates, after = optax.with_extra_args_support(tx).update(gradient, state, table)

    def put_back(new, old):
        old, new = jnp.asarray(old), jnp.asarray(new)
        if new.ndim == 0 or new.shape[0] != len(table):
            return new
        return jnp.where(touched.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return put_back(optax.apply_updates(table, updates), table), jax.tree.map(put_back, after, state)


def batches(num_steps=NUM_STEPS, seed=0, dim=DIM):
    """Gradients of all rows and which are touched: rows that come late, stay away, come back, are never used."""
    rng = np.random.default_rng(seed)
    touched = rng.random((num_steps, NUM_KEYS)) < rng.choice([0.2, 0.5, 0.9], NUM_KEYS)
    touched[:, 0], touched[:, 1], touched[:8, 2], touched[3:9, 3] = True, False, False, False
    gradients = rng.normal(size=(num_steps, NUM_KEYS, dim)) * 10.0 ** rng.uniform(-2, 1, (num_steps, NUM_KEYS, 1))
    return np.where(touched[..., None], gradients, 0).astype(np.float32), touched


def initial_table(dim=DIM):
    """Rows with numbers of both signs."""
    return np.random.default_rng(7).normal(size=(NUM_KEYS, dim)).astype(np.float32)


def dense_run(tx, table, gradients, touched):
    """All steps of dense Optax: rows after each."""

    def step(carry, batch):
        carry = dense_step(tx, *carry, *batch)
        return carry, carry[0]

    state = jax.tree.map(jnp.asarray, standard(tx.init)(table))
    return jax.lax.scan(step, (table, state), (gradients, touched))[1]


def lifted_run(optimizer, table, gradients, touched):
    """All steps of the lifted optimizer on its rows, those of a step alone: rows after each."""
    dim = table.shape[1]

    def step(carry, batch):
        table, states, global_state, number = carry
        gradient, used = batch
        hyper, global_state = optimizer.advance(global_state, number, None, dim)

        def one(gradient, row, states, used):
            new = optimizer.step_row(jaxsok.optim.RowInputs(gradient, row, states, jnp.float32(1), hyper))
            return jax.tree.map(lambda a, b: jnp.where(used, a, b), tuple(new), (row, states))

        table, states = jax.vmap(one)(gradient, table, states, used)
        return (table, states, global_state, number + 1), (table, states)

    states = tuple(jnp.full((len(table), s.dim), s.initial_value) for s in optimizer.state_specs(dim))
    carry = table, states, tuple(map(jnp.asarray, optimizer.init_globals(dim))), jnp.int32(0)
    return jax.lax.scan(step, carry, (gradients, touched))[1]


EXACT = {
    f"{name.removesuffix(call.partition('(')[0])}{call}": make
    for name, calls in optax_cases.cases().items()
    for call, make in calls.items()
    if optax_cases.verdict(make).kind == "exact"
}


@pytest.mark.parametrize("call", EXACT)
def test_rows_alone_are_dense_optax(call):
    """Law 7, without the kernel: 20 steps with rows that are new, absent, and come back."""
    tx = optax_cases.made(EXACT[call])
    args = initial_table(), *batches()
    run = jax.jit(
        lambda *args: (dense_run(tx, *args), lifted_run(lift(tx), *args)[0]), compiler_options=programs.quickly()
    )
    want, got = run(*map(jnp.asarray, args))
    assert np.isfinite(want).all()
    # Formulas are the same; XLA may round a product and a sum as one in the one program and not in the other.
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
