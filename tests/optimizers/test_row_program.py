"""Row programs: what compiles, what is refused, and the kernels' agreement with the JAX function."""

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import optim
from jaxsok.optimizers import program
from jaxsok.optimizers.protocol import PROGRAM, Optimizer, RowInputs, RowOutputs, RowState

DIMS = (1, 2, 3, 7, 8, 12, 16, 33, 64, 100, 128, 200, 256, 513, 1024)
CPU_DIMS = (1, 3, 33, 1024)  # on a CPU the columns of a row are one loop, on a GPU they are divided among lanes
only_on_gpus = programs.only_on_gpus


@dataclasses.dataclass(frozen=True)
class Custom(Optimizer):
    """An optimizer whose step is any function, with two row-wide states and one state of one number."""

    name: ClassVar[str] = "custom"
    function: Callable[[RowInputs], tuple[Any, ...]] = None

    def state_specs(self, dim):
        return RowState("a", dim, 0.5), RowState("b", dim, -1.0), RowState("c", 1, 2.0)

    def hyper(self, step, learning_rate):
        return learning_rate, jnp.asarray(step).astype(jnp.float32) + 1

    def step_row(self, inputs):
        row, *states = self.function(inputs)
        return RowOutputs(row, tuple(states))


def as_program(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer without its kernel."""
    cls = type(optimizer)
    other = dataclasses.make_dataclass(cls.__name__, [], bases=(cls,), frozen=True, namespace={"kernel": PROGRAM})
    return other(**{field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)})


def train(optimizer, dim, batches, dtype="float32", capacity=600, **table):
    """Trains on batches, (keys, gradients) each, and returns the content of the table; keys [n]."""
    tables = [jaxsok.TableSpec("t", dim, optimizer, capacity=capacity, dtype=dtype, **table)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("f", table="t", combiner=None)])
    state = collection.init(0)
    for keys, gradients in batches:
        embeddings, state, plan = collection.lookup(state, collection.batch({"f": keys}).features)
        state, stats = collection.update(state, plan, {"f": jnp.asarray(gradients, embeddings["f"].dtype)})
    return collection.export_table(state, "t"), stats


def random_batches(dim, num_batches=4, size=700, seed=0):
    """Returns keys used once, a few times, more than a run, a chunk, eight chunks; gradients of many sizes."""
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        keys = np.r_[np.full(300, 3), np.full(40, 5), np.full(12, 8), rng.integers(10, 200, size - 352)]
        gradients = rng.normal(size=(size, dim)) * 10.0 ** rng.integers(-3, 3, (size, 1))
        yield rng.permutation(keys), gradients.astype(np.float32)


def assert_close(got, other):
    np.testing.assert_array_equal(got["keys"], other["keys"])
    np.testing.assert_allclose(got["rows"], other["rows"], rtol=2e-6, atol=1e-7)
    for name, state in got["state"].items():
        np.testing.assert_allclose(state, other["state"][name], rtol=2e-6)


def assert_same_bits(got, other):
    np.testing.assert_array_equal(got["keys"], other["keys"])
    np.testing.assert_array_equal(got["rows"], other["rows"])
    for name, state in got["state"].items():
        np.testing.assert_array_equal(state, other["state"][name])


# Kernels and programs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "make"),
    [
        # Column by column.
        *((3, make) for make in (optim.sgd, optim.adagrad, optim.adam)),
        *itertools.starmap(only_on_gpus, itertools.product((1, 8, 33, 200), (optim.sgd, optim.adagrad))),
        *((8, optim.adam), (1024, optim.adagrad)),
        *itertools.starmap(only_on_gpus, [*((dim, optim.adam) for dim in (1, 33, 200, 1024)), (1024, optim.sgd)]),
        *((dim, optim.rowwise_adagrad) for dim in CPU_DIMS),
        *(only_on_gpus(dim, optim.rowwise_adagrad) for dim in DIMS if dim not in CPU_DIMS),
    ],
)
def test_program_equals_kernel(dim, make):
    """The bits are equal, unless a sum over the columns has another order of lanes."""
    batches = list(random_batches(dim, num_batches=2))
    of_kernel, _ = train(make(0.1), dim, batches)
    of_program, _ = train(as_program(make(0.1)), dim, batches)
    (assert_close if make is optim.rowwise_adagrad else assert_same_bits)(of_kernel, of_program)


# On a CPU each dtype runs once with each rounding.
ROWS_OF_16_BITS = [(3, "nearest", "bfloat16"), (33, "stochastic", "bfloat16"), (33, "nearest", "float16")]
ROWS_OF_16_BITS += [(3, "stochastic", "float16")]


@pytest.mark.parametrize(
    ("dim", "rounding", "dtype"),
    [
        case if case in ROWS_OF_16_BITS else only_on_gpus(*case)
        for case in itertools.product((3, 8, 33, 200), ("nearest", "stochastic"), ("bfloat16", "float16"))
    ],
)
def test_rows_of_16_bits(dim, rounding, dtype):
    batches = [(keys, gradients / 100) for keys, gradients in random_batches(dim, num_batches=2)]
    for make in (optim.adagrad, optim.adam):
        of_kernel, _ = train(make(0.01), dim, batches, dtype, rounding=rounding)
        of_program, _ = train(as_program(make(0.01)), dim, batches, dtype, rounding=rounding)
        assert_same_bits(of_kernel, of_program)


@pytest.mark.parametrize("row_gradient", ["sum", "mean", "sqrt"])
def test_row_gradient(row_gradient):
    batches = list(random_batches(12))
    of_kernel, _ = train(optim.adagrad(0.1), 12, batches, row_gradient=row_gradient)
    of_program, _ = train(as_program(optim.adagrad(0.1)), 12, batches, row_gradient=row_gradient)
    assert_same_bits(of_kernel, of_program)


def test_gradient_that_is_not_finite_is_skipped_and_counted():
    keys = np.repeat(np.arange(50), 2)
    gradients = np.ones((100, 8), np.float32)
    gradients[7, 3], gradients[40, 0], gradients[90, 7] = np.inf, np.nan, -np.inf
    rows, stats = train(as_program(optim.adam(0.1)), 8, [(keys, gradients)])
    assert int(stats.num_nonfinite[0]) == 3
    moved = (rows["state"]["m"] != 0).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~moved), [3, 20, 45])


# Operations ----------------------------------------------------------------------------------------------------------


def sums(x):
    g, row, (a, b, c), _, _ = x
    return row + jnp.sum(g) / 64, a + jnp.mean(row), b - jnp.linalg.norm(g), c + jnp.max(a) - jnp.min(g)


def products(x):
    g, row, (a, b, c), _, _ = x
    return (
        row * g + jnp.vdot(row, g),
        a / (jnp.abs(g) + 1),
        b.reshape(1, -1).T.reshape(b.shape) * c,
        c * 0.5 + row.sum(keepdims=True) ** 2,
    )


def share_product(x):
    g, row, (a, b, c), _, _ = x
    product = row * g  # of a difference, and of others
    return row - product, a + jnp.abs(product), product, c


def roots(x):
    g, row, (a, b, c), _, _ = x
    return jnp.sqrt(jnp.abs(g)), jax.lax.rsqrt(jnp.abs(row) + 1e-3), jnp.cbrt(g), jnp.sqrt(c)


def powers(x):
    g, row, (a, b, c), _, (rate, count) = x
    size = jnp.abs(g) + 1e-3
    return size**0.37, size**-0.5, jnp.abs(row) ** count, c**3 + c**-2


def exponentials(x):
    g, row, (a, b, c), _, _ = x
    return jnp.exp(-jnp.abs(g)), jnp.log(jnp.abs(g)), jnp.expm1(row), jnp.log1p(c)


def squash(x):
    g, row, (a, b, c), _, _ = x
    return jnp.tanh(g), jax.nn.sigmoid(g), jnp.log1p(jnp.abs(row)), jnp.tanh(c / 8)


def choices(x):
    g, row, (a, b, c), _, _ = x
    inside = (g > -1) & (g <= 1) | (row == a)
    return (
        jnp.where(inside, g, row),
        jnp.clip(g, -0.5, 0.25),
        jnp.maximum(jnp.minimum(g, row), -b),
        jnp.where(jnp.any(jnp.isfinite(c)) if False else c > 2, c - 1, c + 1),
    )


def signs(x):
    g, row, (a, b, c), _, _ = x
    return jnp.sign(g) - row, jnp.floor(g * 3), -jnp.square(row), jnp.where(jnp.logical_not(jnp.isfinite(c)), 1.0, -c)


def count_uses(x):
    g, row, (a, b, c), num_uses, (rate, count) = x
    return row - rate * g / num_uses, a + num_uses, b + count, c + num_uses * count


def swap_states(x):
    g, row, (a, b, c), _, _ = x
    return g, b, a, row[:1] * 0 + c if row.shape == (1,) else c + 1


def constants(x):
    g, row, (a, b, c), _, (rate, count) = x
    return jnp.zeros_like(row), jnp.full_like(a, 3.0) * rate, jnp.broadcast_to(c, b.shape), jnp.ones(1) * count


def nest_calls(x):
    g, row, (a, b, c), _, (_, count) = x
    clipped = jax.jit(lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)))(g)
    chosen = jax.lax.cond(count > 2, lambda r: r + 1, lambda r: r * 2, row)
    chosen = jax.lax.cond(jnp.sum(g) > 0, lambda r, c: r - c, lambda r, c: r * 3, chosen, c)
    chosen = chosen + (g > 0).astype(jnp.int32).astype(jnp.float32)
    return chosen, a + jax.lax.stop_gradient(clipped), jax.nn.relu(g), c


def halves(x):
    g, row, (a, b, c), _, _ = x
    wide = jnp.float32
    return (
        g.astype(jnp.bfloat16).astype(wide),
        row.astype(jnp.float16).astype(wide),
        (g.astype(jnp.bfloat16) * jnp.bfloat16(0.3)).astype(wide),
        c,
    )


def overflows(x):
    g, row, (a, b, c), _, _ = x
    wide = jnp.float32
    ends = jnp.where(g > 0, 3.3961776e38, 3.3961773e38)  # the least that bfloat16 rounds to infinity, and the one below
    return (
        (g * 65520.0).astype(jnp.float16).astype(wide),
        (g * 3.4e38).astype(jnp.bfloat16).astype(wide),
        (jnp.sign(g) * ends).astype(jnp.bfloat16).astype(wide),
        c,
    )


FUNCTIONS = (
    sums,
    products,
    share_product,
    roots,
    powers,
    exponentials,
    squash,
    choices,
    signs,
    count_uses,
    constants,
    nest_calls,
    halves,
    overflows,
)


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        *((function, 8) for function in FUNCTIONS),
        *((function, 1) for function in (sums, products, constants, nest_calls)),  # a column that is a whole row
        *(only_on_gpus(f, 1) for f in FUNCTIONS if f not in (sums, products, constants, nest_calls)),
        *((function, 33) for function in (sums, products)),
        *itertools.starmap(only_on_gpus, itertools.product((sums, products), (3, 128, 1024))),
        *(only_on_gpus(powers, dim) for dim in (3, 33, 128, 1024)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_kernel_does_what_the_function_says(function, dim):
    """In each step the function of the table's content before gives its content after."""
    optimizer = Custom(0.1, function=function)
    rng = np.random.default_rng(dim)
    tables = [jaxsok.TableSpec("t", dim, optimizer, capacity=64)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("f", table="t", combiner=None)])
    state = collection.init(0)
    keys = np.repeat(np.arange(30), np.r_[1:7].tolist() * 5)
    gradients = rng.normal(size=(30, dim)).astype(np.float32)
    gradients[:, 0] = np.tile([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30], 5)
    num_uses = np.bincount(keys)
    # Only the last use of each key has a nonzero gradient.
    of_use = np.zeros((keys.size, dim), np.float32)
    of_use[np.cumsum(num_uses) - 1] = gradients
    for step in range(2):
        _, state, plan = collection.lookup(state, collection.batch({"f": keys}).features)
        before = collection.export_table(state, "t")
        state, _ = collection.update(state, plan, {"f": jnp.asarray(of_use)})
        after = collection.export_table(state, "t")
        states = tuple(before["state"].values())
        hyper = jnp.float32(0.1), jnp.float32(step + 1)
        inputs = RowInputs(gradients + 0.0, before["rows"], states, num_uses.astype(np.float32), hyper)
        wanted = jax.vmap(optimizer.step_row, in_axes=(RowInputs(0, 0, 0, 0, None),))(inputs)
        size = np.abs(wanted.row).max(where=np.isfinite(wanted.row), initial=1.0)
        tolerance = {"rtol": 4e-6, "atol": 1e-6 * size}
        np.testing.assert_allclose(after["rows"], wanted.row, **tolerance)
        for name, array in zip("abc", wanted.states, strict=True):
            np.testing.assert_allclose(after["state"][name], array, **tolerance, err_msg=name)


def test_states_may_change_places():
    collection_rows, _ = train(Custom(0.1, function=swap_states), 8, [(np.arange(4), np.ones((4, 8)))] * 3)
    np.testing.assert_array_equal(collection_rows["rows"], np.ones((4, 8)))
    np.testing.assert_array_equal(collection_rows["state"]["a"], np.full((4, 8), -1.0))
    np.testing.assert_array_equal(collection_rows["state"]["b"], np.full((4, 8), 0.5))
    np.testing.assert_array_equal(collection_rows["state"]["c"], np.full((4, 1), 5.0))


def test_learning_rate_and_schedule_are_operands():
    """Other numbers do not make another program: nothing is compiled again."""
    optimizer = as_program(optim.adam(lambda step: 0.1 / (1 + step)))
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("t", 4, optimizer, capacity=16)], [jaxsok.FeatureSpec("f", table="t", combiner=None)]
    )
    traces = []

    @jax.jit
    def step(state, features, rate):
        traces.append(1)
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings, learning_rate=rate)[0]

    state = collection.init(0)
    features = collection.batch({"f": np.arange(5)}).features
    moved = []
    for rate in (0.0, 0.5):
        before = collection.export_table(state, "t")["rows"] if moved else None
        state = step(state, features, rate)
        moved.append(collection.export_table(state, "t")["rows"])
        assert before is None or not np.array_equal(before, moved[-1])
    assert len(traces) == 1


# Both back ends ------------------------------------------------------------------------------------------------------


def on_both(run):
    """Makes a run on the CPU and on the GPU; returns both results."""
    results = []
    for device in (jax.devices("cpu")[0], jax.devices("gpu")[0]):
        with jax.default_device(device):
            results.append(run())
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
def test_law_10_cpu_and_cuda_give_the_same_bits(dim, dtype):
    """Rows with one use and with hundreds, sums over the columns, and programs that also are kernels agree."""
    import optax

    batches = [(keys, gradients / 100) for keys, gradients in random_batches(dim, num_batches=3)]
    for optimizer in (
        as_program(optim.rowwise_adagrad(0.01)),
        optim.adamw(0.01, limits=optim.Limits(clip_row_norm=1.0, max_row_norm=2.0)),
        optim.lamb(0.01),
        optim.group_ftrl(0.01, learning_rate_power=-0.37, l1=0.1, l21=0.1),
        optim.lift(optax.chain(optax.clip(0.5), optax.adabelief(optax.cosine_decay_schedule(0.1, 10)))),
    ):
        (on_cpu, _), (on_gpu, _) = on_both(functools.partial(train, optimizer, dim, batches, dtype))
        assert_same_bits(on_cpu, on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_law_10_of_every_operation(function):
    for dim in (1, 8, 33, 200):
        batches = list(random_batches(dim, num_batches=2))
        (on_cpu, _), (on_gpu, _) = on_both(functools.partial(train, Custom(0.1, function=function), dim, batches))
        assert_same_bits(on_cpu, on_gpu)


@pytest.mark.parametrize("dim", [3, 8, 128])
def test_law_3_two_runs_give_the_same_bits(dim):
    batches = list(random_batches(dim))
    first, second = (train(optim.lamb(0.1), dim, batches)[0] for _ in range(2))
    assert_same_bits(first, second)


# Refusals ------------------------------------------------------------------------------------------------------------


def of(function, states="abc"):
    """Returns a step that changes only the row."""
    return Custom(0.1, function=lambda x: (function(x), *x.states))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: jnp.sort(x.row), "the operation sort"),
        (lambda x: jnp.cumsum(x.row), "the operation cumsum"),
        (lambda x: x.row[::-1], "the operation rev"),
        (lambda x: jnp.outer(x.row, x.row)[0], r"\[8, 8\]|64"),
        (
            lambda x: x.row - x.gradient.reshape(2, 4).T.reshape(8),
            r"transpose with axes of a row in the order \[1, 0\]",
        ),
        (lambda x: x.row - jax.lax.reshape(x.gradient.reshape(2, 4), (8,), (1, 0)), "reshape with axes of a row"),
        (lambda x: x.row * jnp.einsum("iaj,jia->", *[x.row.reshape(2, 1, 4), x.row.reshape(4, 2, 1)]), "dot_general"),
        (lambda x: x.row * jnp.arange(8.0), "an array of 8 numbers besides the row"),
        (lambda x: x.row.astype(jnp.int32).astype(jnp.float32), "as int32"),
        (lambda x: x.row * jax.lax.div(jnp.where(x.num_uses > 1, 7, 4), 2).astype(jnp.float32), "select_n on .* int32"),
        (lambda x: x.row * jnp.sum(x.row > 0).astype(jnp.float32), "reduce_sum on a row as int32"),
        (lambda x: x.row * jax.lax.cond(x.num_uses > 1, lambda: 7, lambda: 4).astype(jnp.float32), "cond on .* int32"),
        (lambda x: x.row.astype(jnp.bfloat16), "outputs"),
        (lambda x: x.row[:4], "wanted|outputs"),
        (lambda x: sum(x.row * (i + 0.5) ** 2 + jnp.sqrt(x.row + i) for i in range(200)), "operations"),
    ],
    ids=[
        "sort",
        "cumsum",
        "reverse",
        "outer",
        "transpose",
        "reshape",
        "product",
        "columns",
        "int",
        "chosen int",
        "count",
        "cond int",
        "dtype",
        "shape",
        "long",
    ],
)
def test_refusals(function, message):
    with pytest.raises(program.NotARowProgram, match=message):
        program.compile_row_program(of(function), 8)


def test_refused_when_the_table_is_declared():
    """The error does not wait for the first update."""
    with pytest.raises(program.NotARowProgram, match=r"optim\.custom: step_row: got the operation sort"):
        jaxsok.TableSpec("t", 8, of(lambda x: jnp.sort(x.row)))


@dataclasses.dataclass(frozen=True)
class ManyStates(Optimizer):
    """Gradient descent with a given number of state arrays."""

    name: ClassVar[str] = "many_states"
    num_states: int = 8

    def state_specs(self, dim):
        return tuple(RowState(f"s{i}", dim, 0.0) for i in range(self.num_states))

    def hyper(self, step, learning_rate):
        return (learning_rate,)

    def step_row(self, inputs):
        row = inputs.row - inputs.hyper[0] * inputs.gradient
        return RowOutputs(row, tuple(state + inputs.gradient for state in inputs.states))


def test_number_of_states():
    held, _ = train(ManyStates(0.1, num_states=8), 4, [(np.arange(3), np.ones((3, 4)))])
    assert len(held["state"]) == 8 and all((state == 1).all() for state in held["state"].values())
    with pytest.raises(ValueError, match=r'TableSpec "t": optimizer: got optim\.many_states with 9 .*at most 8'):
        jaxsok.TableSpec("t", 4, ManyStates(0.1, num_states=9))


def test_too_many_registers():
    def many(x):
        parts = [jnp.sqrt(x.row + i) for i in range(40)]
        total = parts[0]
        for part in parts[1:]:
            total = total * part + part
        for part in parts:
            total = total - part / (total + 1)
        return total

    with pytest.raises(program.NotARowProgram, match="registers"):
        program.compile_row_program(of(many), 8)


def test_what_no_row_has_part_in_is_left_to_xla():
    """A schedule that contains a loop is one scalar of the program."""

    def step(x):
        factor = jax.lax.fori_loop(0, 5, lambda i, f: f * x.hyper[0], 1.0)
        return x.row - factor * x.gradient

    compiled = program.compile_row_program(of(step), 8)
    assert str(compiled) == "r0 = multiply_subtract s0, r0, r1\nrow = output r0"
    np.testing.assert_allclose(compiled.scalars((jnp.float32(0.5), jnp.float32(1.0))), [0.5**5])


def test_zeros_of_both_signs_are_two_scalars():
    optimizer = Custom(0.1, function=lambda x: (jnp.where(x.row > 0, jnp.float32(0.0), jnp.float32(-0.0)), *x.states))
    scalars = program.compile_row_program(optimizer, 8).scalars((jnp.float32(0.5), jnp.float32(1.0)))
    assert np.signbit(scalars).tolist() in ([False, True], [True, False])


def test_long_schedules():
    """A hundred operations may precede the first scalar; only what the scalars need is computed."""
    import optax

    schedule = optax.piecewise_constant_schedule(1.0, {10 * i: 0.5 for i in range(1, 100)})
    optimizer = optim.lift(optax.sgd(schedule))
    compiled = program.compile_row_program(optimizer, 8)
    for count in (0, 15, 995):
        hyper, _ = optimizer.advance((np.int32(count),), None, None, 8)
        np.testing.assert_allclose(compiled.scalars(hyper), [-schedule(count)], rtol=1e-6)


def test_long_sums_beside_the_row():
    def step(x):
        factor = x.hyper[0]
        for _ in range(3000):
            factor = factor + 1
        return x.row * factor

    compiled = program.compile_row_program(of(step), 8)
    np.testing.assert_array_equal(compiled.scalars((jnp.float32(0.5), jnp.float32(1.0))), [3000.5])


def test_what_has_no_output_is_not_computed():
    def step(x):
        jnp.exp(x.row)
        return x.row + x.gradient

    assert [program.OPS[op[0]] for op in program.compile_row_program(of(step), 8).ops] == ["add", "output"]


def test_example_of_the_module():
    """The compiler makes the documented program from the function."""

    def step(x):
        m = 0.9 * x.states[0] + 0.1 * x.gradient
        return x.row - x.hyper[0] * m, m, *x.states[1:]

    lines = str(program.compile_row_program(Custom(0.1, function=step), 8)).splitlines()
    documented = re.findall(r"(?:r\d|row|state 0) = [a-z_]+ [rs]\d[rs\d, ]*\b", program.__doc__)
    assert [line.strip() for line in documented] == lines


def test_operations_are_those_of_the_header():
    header = (pathlib.Path(__file__).parents[2] / "ffi/core/row_program.h").read_text()
    names = re.search(r"enum RowOp : int \{(.*?)\};", header, re.S).group(1)
    names = re.findall(r"^\s*kRow(\w+)", re.sub(r"//.*", "", names), re.M)
    snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names]
    assert [name.replace("_", "") for name in snake] == [name.replace("_", "") for name in program.OPS]
    for constant, value in (("kMaxRowOps", program.MAX_OPS), ("kMaxRegisters", program.MAX_REGISTERS)):
        assert int(re.search(rf"{constant} = (\d+)", header).group(1)) == value
