"""Limits: bounds on the row gradient before a step and on the row after it, around every optimizer."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import optim
from jaxsok.optimizers.limits import with_norm_at_most
from jaxsok.optimizers.protocol import PROGRAM, RowInputs

DIM = 4
ALL = optim.Limits(clip_value=0.8, clip_row_norm=1.0, adaptive_clip=optim.AdaptiveClip(0.9, 1e-3), max_row_norm=0.5)
MAKERS = [make for name in optim.__all__ if inspect.isfunction(make := getattr(optim, name)) and name != "lift"]


def norm(row):
    """Returns the norm in float64."""
    return float(np.sqrt(np.sum(np.asarray(row, np.float64) ** 2)))


def make_step(optimizer, gradient, row, num_uses=1.0, states=None, step=0):
    """Makes one step of one row, by `step_row`."""
    hyper = tuple(jnp.asarray(word, jnp.float32) for word in optimizer.hyper(jnp.uint32(step), optimizer.learning_rate))
    gradient, row = jnp.asarray(gradient, jnp.float32), jnp.asarray(row, jnp.float32)
    if states is None:
        states = tuple(jnp.full(spec.dim, spec.initial_value) for spec in optimizer.state_specs(row.shape[0]))
    return optimizer.step_row(RowInputs(gradient, row, states, jnp.float32(num_uses), hyper))


def move_row(limits, gradient, row=(0.0, 0.0), num_uses=1.0):
    """Returns by how much gradient descent with rate 1 moves a row."""
    new = make_step(optim.sgd(1.0, limits=limits), gradient, row, num_uses).row
    return (np.asarray(row, np.float32) - np.asarray(new)).tolist()


# One limit at a time ---------------------------------------------------------------------------------------------


def test_clip_value():
    """Each number is clipped separately; numbers within the bound do not change."""
    assert move_row(optim.Limits(clip_value=1.0), [3.0, -0.25]) == [1.0, -0.25]
    assert move_row(optim.Limits(clip_value=1.0), [-3.0, 1.0]) == [-1.0, 1.0]


def test_clip_row_norm():
    """The row is scaled as a whole; rows within the bound do not change."""
    np.testing.assert_allclose(move_row(optim.Limits(clip_row_norm=1.0), [3.0, -4.0]), [0.6, -0.8], rtol=1e-6)
    assert move_row(optim.Limits(clip_row_norm=5.0), [3.0, -4.0]) == [3.0, -4.0]


def test_adaptive_clip():
    """The bound grows with the row's norm and with the number of uses, and has a lower end."""
    limits = optim.Limits(adaptive_clip=optim.AdaptiveClip(ratio=0.5, lower=0.25))
    for row, num_uses, bound in (
        ([0.0, 0.0], 1, 0.25),
        ([0.0, 0.0], 4, 1.0),
        ([3.0, 4.0], 1, 2.5),
        ([3.0, 4.0], 3, 7.5),
    ):
        np.testing.assert_allclose(norm(move_row(limits, [60.0, -80.0], row, num_uses)), bound, rtol=1e-6)
        within = [bound * 0.375, -bound * 0.5]
        assert move_row(limits, within, (0.0, 0.0) if row == [0.0, 0.0] else row, num_uses) == pytest.approx(within)


@pytest.mark.parametrize("size", [1e20, 1e-20])
def test_adaptive_clip_of_rows_whose_squares_overflow(size):
    """The bound is a fraction of the row's norm, not infinity or zero."""
    limits = optim.Limits(adaptive_clip=optim.AdaptiveClip(ratio=0.5, lower=1e-30))
    row = np.array([3.0, 4.0], np.float32) * np.float32(size)
    # Gradient descent would lose the step in the row's last bits; a trace shows the step's input.
    sgd = optim.sgd(1e-3, momentum=0.5, limits=limits)
    trace = make_step(sgd, [60 * size, -80 * size], row, num_uses=2).states[0]
    np.testing.assert_allclose(norm(trace), 5 * size, rtol=1e-5)


def test_max_row_norm():
    """The row after the step is bounded, even if the step alone would have been short."""
    limits = optim.Limits(max_row_norm=1.0)
    for row, gradient in (([0.0, 0.0], [-30.0, -40.0]), ([30.0, 40.0], [0.0, 0.0]), ([0.6, 0.8], [-0.06, -0.08])):
        new = make_step(optim.sgd(1.0, limits=limits), gradient, row).row
        np.testing.assert_allclose(new, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(make_step(optim.sgd(1.0, limits=limits), [0.0, 0.0], [0.25, 0.5]).row, [0.25, 0.5])


def test_weight_decay_is_no_part_of_what_is_clipped():
    """Weight decay belongs to the step; the bound on the row follows it."""
    limits = optim.Limits(clip_value=0.5)
    new = make_step(optim.sgd(0.5, weight_decay=0.5, limits=limits), [100.0, 0.0], [8.0, 4.0]).row
    np.testing.assert_array_equal(new, [8 - 0.5 * (0.5 + 4), 4 - 0.5 * 2])


# Norms -----------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(row=st.lists(NUMBERS, min_size=1, max_size=6), bound=st.floats(2.0**-20, 2.0**20, width=32))
def test_norms_at_most(row, bound):
    """For all numbers, even if their squares are infinite, the bound holds, and the direction stays."""
    row = np.array(row, np.float32)
    got = np.asarray(with_norm_at_most(jnp.asarray(row), bound))
    length = norm(row)
    if length < bound * (1 - 1e-5):
        np.testing.assert_array_equal(got, row)
    elif length > bound * (1 + 1e-5):
        np.testing.assert_allclose(norm(got), bound, rtol=1e-5)
        np.testing.assert_allclose(got, row.astype(np.float64) * (bound / length), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("limits", [ALL, optim.Limits(max_row_norm=1.0), optim.Limits(clip_row_norm=1.0)], ids=repr)
def test_nothing_is_divided_by_a_norm_of_zero(limits):
    """A row of zeros with a gradient of zero stays."""
    assert move_row(limits, [0.0, 0.0]) == [0.0, 0.0]


# Around every optimizer ------------------------------------------------------------------------------------------


def clip(gradient, row, num_uses):
    """Clips a gradient by `ALL`, in NumPy."""
    gradient = np.clip(np.asarray(gradient, np.float64), -0.8, 0.8)
    for bound in (1.0, num_uses * max(0.9 * norm(row), 1e-3)):
        gradient = gradient * min(1.0, bound / norm(gradient))
    return gradient


@pytest.mark.parametrize("make", MAKERS)
def test_every_optimizer_takes_limits(make):
    """Clipping, then a step without limits, then bounding, is the step within limits, in three steps."""
    free, limited = make(0.2), make(0.2, limits=ALL)
    assert limited.limits == ALL and limited.kernel == PROGRAM
    assert free != limited and free.state_specs(DIM) == limited.state_specs(DIM)
    rng = np.random.default_rng(0)
    row, states = np.array([0.3, -0.2, 0.1, 0.05], np.float32), None
    for step in range(3):
        gradient, num_uses = rng.normal(size=DIM), step + 1
        got = make_step(limited, gradient, row, num_uses, states, step)
        want = make_step(free, clip(gradient, row, num_uses), row, num_uses, states, step)
        bounded = np.asarray(want.row, np.float64) * min(1.0, 0.5 / max(norm(want.row), 1e-30))
        # About ten roundings in float32 of numbers up to 10.
        np.testing.assert_allclose(got.row, bounded, rtol=1e-5, atol=1e-6)
        for state, other in zip(got.states, want.states, strict=True):
            np.testing.assert_allclose(state, other, rtol=1e-5, atol=1e-6)
        row, states = got.row, got.states


# Through a collection --------------------------------------------------------------------------------------------


def uses_of_three_keys(collection):
    """Returns the rows after one update: key 1 used once, key 2 twice, key 3 five times, by gradients of 10."""
    keys = np.array([1, 2, 2, 3, 3, 3, 3, 3])
    state, stats = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=keys), 10.0)
    stats.check()
    return programs.rows_of(collection, state)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("row_gradient", ["sum", "mean"])
def test_uses_are_counted(row_gradient, num_devices):
    """CowClip's bound of a row counts all its uses, on all shards, however gradients are scaled."""
    limits = optim.Limits(adaptive_clip=optim.AdaptiveClip(ratio=1.0, lower=0.5))
    sgd, zeros = optim.sgd(1.0, limits=limits), jaxsok.initializers.zeros()
    table = jaxsok.TableSpec("user", DIM, sgd, initializer=zeros, capacity=64, row_gradient=row_gradient)
    feature = jaxsok.FeatureSpec("user", table="user")
    collection = jaxsok.Collection([table], [feature]) if num_devices == 1 else programs.over(2, [table], [feature])
    rows = uses_of_three_keys(collection)
    assert {key: round(norm(row), 5) for key, row in rows.items()} == {1: 0.5, 2: 1.0, 3: 2.5}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_are_bounded_before_rounding(dtype):
    """Rows exceed the bound by at most their last bit."""
    optimizer = optim.sgd(1.0, limits=optim.Limits(max_row_norm=1.0))
    collection = programs.one_table(dim=DIM, optimizer=optimizer, dtype=dtype, capacity=16)
    features = programs.batch(collection, user=np.array([1]))
    state, _ = programs.learn(collection, collection.init(seed=0), features, -7.0)
    np.testing.assert_allclose(norm(programs.rows_of(collection, state)[1].astype(np.float32)), 1.0, rtol=2**-8)


# Declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip_value", "clip_row_norm", "max_row_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "1", np.ones(1)])
def test_refused_bounds(name, value):
    """A bound must be a positive number."""
    with pytest.raises(ValueError, match=rf"^Limits: {name}: got .*, wanted a positive number\.$"):
        optim.Limits(**{name: value})


@pytest.mark.parametrize("kwargs", [{"ratio": 0.0}, {"lower": 0.0}, {"lower": -1.0}, {"ratio": float("nan")}])
def test_refused_adaptive_clips(kwargs):
    """With a lower end of zero a row of zeros would never move."""
    (name,) = kwargs
    with pytest.raises(ValueError, match=rf"^AdaptiveClip: {name}: got .*, wanted a positive number\.$"):
        optim.AdaptiveClip(**kwargs)


def test_refused_kinds():
    """The message states what to write."""
    with pytest.raises(TypeError, match=r"^Limits: adaptive_clip: got 1\.0, wanted None or optim\.AdaptiveClip"):
        optim.Limits(adaptive_clip=1.0)
    with pytest.raises(TypeError, match=r"^optim\.ftrl: limits: got 1\.0, wanted None or optim\.Limits\(\.\.\.\)"):
        optim.ftrl(0.1, limits=1.0)


def test_tables_share_a_store_if_their_limits_are_equal():
    """Limits are part of the optimizer; they change no state."""
    optimizer, same, other = (optim.adam(0.1, limits=optim.Limits(clip_value=bound)) for bound in (1.0, 1.0, 2.0))
    tables = [jaxsok.TableSpec(name, DIM, adam) for name, adam in zip("abc", (optimizer, same, other), strict=True)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in "abc"])
    assert [[table.name for table in store.tables] for store in collection.stores] == [["a", "b"], ["c"]]
    assert optim.adam(0.1, limits=optim.Limits()) == optim.adam(0.1)


def test_limits_under_jit_and_donation():
    """A whole step within limits compiles once and runs in its own buffers."""
    collection = programs.one_table(dim=DIM, optimizer=optim.adam(0.1, limits=ALL), capacity=16)
    state, features = collection.init(seed=0), programs.batch(collection, user=np.arange(8))
    for _ in range(3):
        state, value, stats = programs.donated_step(collection)(state, features)
        stats.check()
    assert np.isfinite(value) and jax.tree.all(jax.tree.map(lambda leaf: not leaf.is_deleted(), state))
    assert max(norm(row) for row in programs.rows_of(collection, state).values()) <= 0.5 * (1 + 1e-6)
