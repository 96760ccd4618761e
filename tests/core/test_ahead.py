"""Programs compiled before growth: ready in time, with equal results and buffers; nothing is lost if one fails."""

import logging
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import ahead as ahead_lib

pytestmark = pytest.mark.usefixtures("by_doubling")

BATCH = 8


def new_keys(collection, step):
    """Returns a batch of keys that no earlier step had."""
    return programs.batch(collection, user=np.arange(step * BATCH, (step + 1) * BATCH))


def run(collection, step, num_steps, *, state=None, wait=True):
    """Trains on new keys only; `wait`: for the program under compilation after each step."""
    state = collection.init(seed=0) if state is None else state
    values = []
    for i in range(num_steps):
        features = new_keys(collection, i)
        state = collection.grow(state, features)
        state, value, _ = step(state, features)
        values.append(value)
        jax.block_until_ready(state)  # so that `grow` sees what the step inserted
        if wait and hasattr(step, "wait"):
            step.wait()
    return state, values


def ahead(collection, step=None):
    """Returns the usual step with its programs compiled ahead."""
    step = programs.train_step(collection) if step is None else step
    return collection.ahead(jax.jit(step, donate_argnums=0))


def in_background():
    """Returns whether the compiling thread traces this code."""
    return threading.current_thread() is not threading.main_thread()


# --------------------------------------------------------------------------------------------------------------
# Ready in time, and equal


def test_three_growths_find_their_programs():
    """From 16 rows to 128, only the first program is compiled in a call; results equal those of the plain step."""
    optimizer = jaxsok.optim.adam(0.1)
    collection = programs.one_table(capacity=16, optimizer=optimizer, statistics=True)
    step = ahead(collection)
    state, values = run(collection, step, 16)
    assert state.stores[0].capacity == 128 and collection.growth.num_grown == 3
    assert (step.num_compiled, step.num_hits_ahead) == (1, 3)
    assert step.num_ahead == 4  # also for 256 rows
    assert len(step.stalls_s) == 4 and max(step.stalls_s[1:]) < step.stalls_s[0]
    other = programs.one_table(capacity=16, optimizer=optimizer, statistics=True)
    expected, expected_values = run(other, jax.jit(programs.train_step(other), donate_argnums=0), 16)
    programs.assert_same_state(state, expected, index=False)
    np.testing.assert_array_equal(values, expected_values)


def test_growth_that_comes_early_waits_for_the_rest():
    """The program under compilation is not compiled a second time."""
    collection = programs.one_table(capacity=16)
    train_step = programs.train_step(collection)

    def step(state, features):
        if in_background():
            time.sleep(0.5)
        return train_step(state, features)

    step = ahead(collection, step)
    state, _ = run(collection, step, 3, wait=False)
    assert state.stores[0].capacity == 32
    assert (step.num_compiled, step.num_ahead, step.num_hits_ahead) == (1, 1, 1)


def test_stores_that_grow_apart_and_together():
    """A program is ready whether one store grows alone or both grow in one call."""
    sgd, dims = jaxsok.optim.sgd(0.1), (2, 4)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec(f"dim {dim}", dim, sgd, capacity=8 * dim) for dim in dims],
        [jaxsok.FeatureSpec(f"dim {dim}", f"dim {dim}") for dim in dims],
    )
    step = ahead(collection)
    state, grown = collection.init(seed=0), []
    for i in range(9):
        keys = np.arange(i // 2 * BATCH, (i // 2 + 1) * BATCH)  # two calls for each batch: time for two programs
        features = programs.batch(collection, **{f"dim {dim}": keys for dim in dims})
        before = [store.capacity for store in state.stores]
        state = collection.grow(state)
        grown.append([store.capacity > old for store, old in zip(state.stores, before, strict=True)])
        state, _, stats = step(state, features)
        stats.check()
        step.wait()
    assert [flags for flags in grown if any(flags)] == [[True, False], [True, True]]
    assert (step.num_compiled, step.num_hits_ahead) == (1, 2)


def test_a_state_on_a_device_of_its_own():
    """A new slab is committed to the state's device only by the step; there is still one program per capacity."""
    device = jax.devices()[-1]
    with jax.default_device(device):
        collection = programs.one_table(capacity=16)
        step = ahead(collection)
        state, _ = run(collection, step, 8, state=jax.device_put(collection.init(seed=0), device))
    assert state.stores[0].capacity == 64 and all(leaf.committed for leaf in jax.tree.leaves(state))
    assert (step.num_compiled, step.num_hits_ahead) == (1, 2)


def test_buffers_are_given_away():
    """The program compiled ahead donates like the step: same addresses, and the old state is deleted."""
    collection = programs.one_table(capacity=16, optimizer=jaxsok.optim.adagrad(0.1))
    step = ahead(collection)
    state, _ = run(collection, step, 2)
    state = collection.grow(state)
    assert state.stores[0].capacity == 32
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.stores)]
    after, _, _ = step(state, new_keys(collection, 2))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.stores)] == before
    assert step.num_hits_ahead == 1 and all(leaf.is_deleted() for leaf in jax.tree.leaves(state.stores))


@pytest.mark.filterwarnings("ignore:grow. table:RuntimeWarning")
def test_nothing_is_compiled_for_stores_that_will_not_grow():
    """Stores that are half empty or at their maximum cause no compilation."""
    collection = programs.one_table(capacity=128)
    step = ahead(collection)
    run(collection, step, 6)
    assert (step.num_compiled, step.num_ahead) == (1, 0)
    collection = programs.one_table(capacity=16, max_capacity=32)
    step = ahead(collection)
    state, _ = run(collection, step, 6)
    assert state.stores[0].capacity == 32
    assert (step.num_compiled, step.num_ahead, step.num_hits_ahead) == (1, 1, 1)


def test_each_program_is_logged(caplog):
    """The log states where a program was compiled, and how long the call waited."""
    caplog.set_level(logging.INFO, logger="jaxsok.ahead")
    collection = programs.one_table(capacity=16)
    run(collection, ahead(collection), 3)
    first, second = (record.getMessage() for record in caplog.records if record.name == "jaxsok.ahead")
    assert "[16]" in first and "on the spot" in first
    assert "[32]" in second and "in the background" in second


# --------------------------------------------------------------------------------------------------------------
# Unpredicted growth and failures


def test_growth_that_goes_elsewhere():
    """With a reserve for 100 steps the capacity differs from the prediction; the call compiles, results are right."""
    collection = programs.one_table(capacity=16)
    step = ahead(collection)
    state, _ = run(collection, step, 2)
    assert step.num_ahead == 1
    state = collection.grow(state, steps=100)
    state, _, stats = step(state, new_keys(collection, 2))
    stats.check()
    assert state.stores[0].capacity == 16 + 100 * BATCH
    assert (step.num_compiled, step.num_hits_ahead) == (2, 0)
    assert collection.num_rows(state) == {"user": 3 * BATCH}


def test_other_shapes_and_numbers():
    """Each batch size has its program, ahead as well; a number may change its value but not its type."""
    collection = programs.one_table(capacity=16)
    train_step = programs.train_step(collection)

    def scaled_step(state, features, *, scale):
        state, value, stats = train_step(state, features)
        return state, value * scale, stats

    step = ahead(collection, scaled_step)
    state = collection.init(seed=0)
    for scale in (1.0, 2.0, 3):
        _, expected, _ = jax.jit(train_step)(state, new_keys(collection, 0))
        state, value, _ = step(collection.grow(state), new_keys(collection, 0), scale=scale)
        np.testing.assert_allclose(value, expected * np.float32(scale), rtol=1e-6)  # one more product
    assert step.num_compiled == 2  # float and int
    small = programs.batch(collection, user=np.arange(4))
    state, _, _ = step(state, small, scale=1.0)
    assert step.num_compiled == 3
    step.wait()
    for features in (small, new_keys(collection, 1), new_keys(collection, 2)):
        state, _, _ = step(collection.grow(state), features, scale=1.0)
        step.wait()
    assert state.stores[0].capacity == 32 and step.num_compiled == 3


def test_a_failure_in_the_background_is_reported():
    """The next call warns; the program is compiled when it is needed."""
    collection = programs.one_table(capacity=16)
    train_step = programs.train_step(collection)

    def step(state, features):
        if in_background():
            raise RuntimeError("no tracing here")
        return train_step(state, features)

    step = ahead(collection, step)
    state, _ = run(collection, step, 2)
    state = collection.grow(state)
    with pytest.warns(RuntimeWarning, match=r"ahead.*\[32\].*RuntimeError: no tracing here"):
        state, _, _ = step(state, new_keys(collection, 2))
    assert (step.num_compiled, step.num_ahead, step.num_hits_ahead) == (2, 0, 0)
    step.wait()
    with pytest.warns(RuntimeWarning, match=r"\[64\]"):
        state, _, _ = step(state, new_keys(collection, 2))
    for _ in range(2):  # reported once, and not tried again
        state, _, _ = step(state, new_keys(collection, 2))
        step.wait()


def test_a_failure_before_tracing_holds_no_call_up(monkeypatch):
    """A thread that fails before tracing, or that cannot start, delays no call."""

    def fail(*_):
        raise RuntimeError("not today")

    for place, name in ((ahead_lib, "in_settings"), (threading.Thread, "start")):
        collection = programs.one_table(capacity=16)
        step = ahead(collection)
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fail)
            state, _ = run(collection, step, 2)
        state = collection.grow(state)
        with pytest.warns(RuntimeWarning, match=r"ahead.*\[32\].*not today"):
            state, _, _ = step(state, new_keys(collection, 2))
        assert (step.num_compiled, step.num_hits_ahead) == (2, 0)
        step.wait()


def test_a_failure_on_the_spot_is_raised():
    """The original error is raised every time; the state still exists."""
    collection = programs.one_table(capacity=16)

    def step(state, features):
        raise RuntimeError("a mistake in the model")

    step = ahead(collection, step)
    state = collection.grow(collection.init(seed=0), new_keys(collection, 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a mistake in the model"):
            step(state, new_keys(collection, 0))
    assert step.num_compiled == 0 and collection.num_rows(state) == {"user": 0}


def test_settings_of_the_caller():
    """The thread traces under the caller's settings; other settings with the same shapes give another program."""
    collection = programs.one_table(capacity=16)
    train_step, seen = programs.train_step(collection), []

    def step(state, features):
        seen.append((in_background(), jax.default_matmul_precision.value, jax.sharding.get_abstract_mesh().shape))
        return train_step(state, features)

    step = ahead(collection, step)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        state, _ = run(collection, step, 3)
    assert step.num_hits_ahead == 1
    assert seen == [(background, "highest", {"d": 1}) for background in (False, True, True)]
    step(state, new_keys(collection, 2))
    step.wait()
    assert step.num_compiled == 2 and seen[3][:2] == (False, None)


def test_inside_another_trace_and_under_debugging():
    """Inside another trace and under debugging the step itself runs, with its own errors."""
    collection = programs.one_table(capacity=64)
    step = ahead(collection)
    state, features = collection.init(seed=0), new_keys(collection, 0)
    _, expected, _ = jax.jit(programs.train_step(collection))(state, features)
    _, value, _ = jax.jit(lambda state, features: step(state, features))(state, features)
    np.testing.assert_array_equal(value, expected)
    assert jax.eval_shape(step, state, features)[1].shape == ()
    undefined = collection.ahead(jax.jit(lambda state: jnp.log(-jnp.ones(3))))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        undefined(state)
    with jax.disable_jit():
        assert np.isnan(undefined(state)).all()
    assert undefined.num_compiled == step.num_compiled == 0


def test_the_interpreter_ends_while_a_program_is_under_way():
    """The interpreter waits for the program, without a deadlock or an abort."""
    script = """
import threading, time, jax, numpy as np, jaxsok
jaxsok.grow.FIRST_CALLS = 0  # it fills up soon
table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=4)
collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])
@jax.jit
def step(state, features):
    if threading.current_thread() is not threading.main_thread():
        print("tracing", flush=True)
        time.sleep(1)
    embeddings, state, plan = collection.lookup(state, features)
    return collection.update(state, plan, embeddings)
step, state = collection.ahead(step), collection.init()
for i in range(2):
    features = collection.batch({"user": np.arange(2) + 2 * i}).features
    state, _ = step(collection.grow(state, features), features)
    jax.block_until_ready(state)  # otherwise the second `grow` may not see what the first step inserted
assert step._thread is not None
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr and "Traceback" not in done.stderr
    assert "tracing" in done.stdout and "end" in done.stdout


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_script_may_end_within_a_loop_over_a_pipeline(prefetch):
    """Its iterator, in a global name, is collected when the modules are gone."""
    script = f"""
import numpy as np, jaxsok
table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=64)
collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])
batches = iter(collection.pipeline(({{"user": np.arange(8) + i}} for i in range(99)), prefetch={prefetch}))
for _ in range(3):
    next(batches)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Exception" not in done.stderr, done.stderr


# --------------------------------------------------------------------------------------------------------------
# Bad input


def test_bad_steps():
    """A function that is not jitted and arguments that are not arrays are refused."""
    collection = programs.one_table()
    train_step = programs.train_step(collection)
    with pytest.raises(TypeError, match=r"ahead: step: got step, .*\.lower, wanted a jitted function"):
        collection.ahead(train_step)
    with pytest.raises(TypeError, match=r"ahead: step: got NoneType,"):
        collection.ahead(None)
    step = collection.ahead(jax.jit(train_step))
    features = new_keys(collection, 0)
    with pytest.raises(TypeError, match=r"ahead: state: got arguments \['NoneType', 'Features'\], wanted the State of"):
        step(None, features)
    stranger = jaxsok.Collection([jaxsok.TableSpec("x", 2, jaxsok.optim.sgd(0.1))], [jaxsok.FeatureSpec("x", "x")])
    with pytest.raises(TypeError, match=r"ahead: state: got arguments \['State', 'Features'\]"):
        step(state=stranger.init(seed=0), features=features)


def test_the_state_may_stand_anywhere():
    """The state may be in a dict, a keyword or among static arguments; each has its own program."""
    collection = programs.one_table(capacity=16)
    train_step = programs.train_step(collection)

    def step(mode, train, features):
        assert mode in ("train", "more")
        state, value, stats = train_step(train["tables"], features)
        return {"tables": state}, value, stats

    jitted = collection.ahead(jax.jit(step, static_argnums=0, donate_argnames="train"))
    train = {"tables": collection.init(seed=0)}
    for i in range(5):
        features = new_keys(collection, i)
        train = {"tables": collection.grow(train["tables"], features)}
        train, _, _ = jitted("train", train=train, features=features)
        jax.block_until_ready(train)
        jitted.wait()
    assert train["tables"].stores[0].capacity == 64
    assert (jitted.num_compiled, jitted.num_hits_ahead) == (1, 2)
    jitted("more", train=train, features=new_keys(collection, 4))
    assert jitted.num_compiled == 2
