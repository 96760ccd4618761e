"""Row programs: an optimizer's `step_row` as a short list of operations that the update kernel runs on each row.

`step_row` is traced once for each dim. Values that do not depend on the row (schedules, bias corrections, counts) are
left to XLA, which computes them once a step; they are the program's scalars. The rest becomes operations on registers
as wide as a row: `ffi/core/row_program.h` defines each of them, for both back ends.

    m = 0.9 * m + 0.1 * g        r2 = multiply s0, r2                  registers: r0 gradient, r1 row, r2 and on the
                                 r0 = multiply_add s1, r0, r2          states, then temporaries, in whatever is free
    row = row - lr * m           r1 = multiply_subtract s2, r0, r1     scalars: s0 = 0.9, s1 = 0.1, s2 = lr
                                 row = output r1
                                 state 0 = output r0

A number for each row (a sum over the columns, a state of one number) is a register whose columns are equal.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxsok.optimizers import separable
from jaxsok.optimizers.protocol import Optimizer, RowInputs

MAX_OPS: int = 256
MAX_REGISTERS: int = 24
MAX_SCALARS: int = 256

# RowOp in ffi/core/row_program.h, in this order.
OPS: tuple[str, ...] = tuple(
    (
        "copy negate abs sign sqrt rsqrt exp log log1p expm1 tanh logistic floor cbrt is_finite not to_bfloat16 "
        "to_float16 add subtract multiply divide maximum minimum power equal not_equal less less_equal and or select "
        "multiply_add multiply_subtract sum max min output"
    ).split()
)
_CODES = {name: code for code, name in enumerate(OPS)}

_SAME_NAME = "abs sign sqrt rsqrt exp log log1p expm1 tanh logistic floor cbrt is_finite not"
_UNARY = {"neg": "negate"} | {name: name for name in _SAME_NAME.split()}
_BINARY = {
    "add": "add",
    "add_any": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "max": "maximum",
    "min": "minimum",
    "pow": "power",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "and": "and",
    "or": "or",
}
_SWAPPED = {"gt": "less", "ge": "less_equal"}
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
_SAME_VALUE = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p", "transpose", "stop_gradient")
_NO_INTEGERS = (
    "{what}: got the operation {name} on a row as {dtype}, wanted float32, bfloat16, float16 or bool; make it float32 "
    "first, and choose with jnp.where."
)
_ON_COLUMNS = {*_UNARY, *_BINARY, *_SWAPPED, "select_n", "clamp", "square", "integer_pow", "convert_element_type"}


_Op = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """A compiled step of one row."""

    ops: tuple[_Op, ...]
    """Code, destination, operands. An operand r >= 0 is register r, -1 the number of uses, -2 - i scalar i."""
    num_registers: int
    num_states: int
    scalars: Callable[..., Float[Array, " num_scalars"]] = dataclasses.field(repr=False)
    """A function from the optimizer's hyper to the program's scalars."""

    @property
    def counts_uses(self) -> bool:
        """True if the step depends on the number of uses of the row."""
        return any(-1 in operands for _, _, *operands in self.ops)

    def words(self) -> np.ndarray:
        """Returns the operations as the handler takes them: int32[5 * num_ops]."""
        return np.array(self.ops, np.int32).reshape(-1)

    def __str__(self) -> str:
        def operand(number: int) -> str:
            return f"r{number}" if number >= 0 else "num_uses" if number == -1 else f"s{-2 - number}"

        names = ["row", *(f"state {k}" for k in range(self.num_states))]
        lines = []
        for code, to, *operands in self.ops:
            shown = ", ".join(map(operand, operands[: _num_operands(code)]))
            lines.append(f"{names[to] if OPS[code] == 'output' else f'r{to}'} = {OPS[code]} {shown}")
        return "\n".join(lines)


class NotARowProgram(ValueError):
    """The error of a `step_row` that row programs cannot run."""


@functools.lru_cache(maxsize=1024)
def compile_row_program(optimizer: Optimizer, dim: int) -> RowProgram:
    """Compiles an optimizer's step for rows of `dim` numbers; NotARowProgram names what it cannot run, and a remedy.

    Example:
      >>> from jaxsok import optim
      >>> print(compile_row_program(optim.sgd(0.5), 8))
      r0 = multiply_subtract s0, r0, r1
      row = output r0
    """
    what = f"optim.{optimizer.name}: step_row"
    states, hyper = optimizer.state_specs(dim), optimizer.hyper_shapes(dim)
    wide, scalar = jax.ShapeDtypeStruct((dim,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    row_states = tuple(jax.ShapeDtypeStruct((state.dim,), jnp.float32) for state in states)
    inputs = RowInputs(wide, wide, row_states, scalar, hyper)
    closed, outputs = jax.make_jaxpr(lambda inputs: tuple(optimizer.step_row(inputs)), return_shape=True)(inputs)
    shapes = [(tuple(out.shape), jnp.dtype(out.dtype)) for out in jax.tree.leaves(outputs)]
    wanted = [((dim,), jnp.dtype("float32"))] + [((state.dim,), jnp.dtype("float32")) for state in states]
    if shapes != wanted:
        raise NotARowProgram(f"{what}: got outputs {shapes}, wanted the row and its states as they came, {wanted}.")

    def compile_with(hyper: Any) -> tuple[tuple[_Op, ...], int, Float[Array, " num_scalars"]]:
        return _Compiler(what, dim, len(states)).run(closed, jax.tree.leaves(hyper))

    compiled: list[Any] = []
    jax.eval_shape(lambda hyper: compiled.extend(compile_with(hyper)[:2]), hyper)
    return RowProgram(*compiled, len(states), lambda hyper: compile_with(hyper)[2])


# Compiling -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Global:
    """A value that XLA computes, since it does not depend on the row; one number may stand for a row of equal ones."""

    value: Any


@dataclasses.dataclass(frozen=True)
class _Literal:
    """A number by its float32 bits: 0.0 and -0.0 differ."""

    bits: int

    @classmethod
    def of(cls, value: Any) -> "_Literal":
        return cls(int(np.float32(value).view(np.uint32)))

    @property
    def value(self) -> float:
        return float(np.uint32(self.bits).view(np.float32))


@dataclasses.dataclass(frozen=True)
class _Row:
    number: int


@dataclasses.dataclass(frozen=True)
class _NumUses:
    """The number of uses of the row."""


_Value = _Global | _Literal | _Row | _NumUses


class _Compiler:
    """A compiler of one jaxpr: operations in single assignment, then registers.

    It runs on the values of the hyper, so that what XLA computes is computed on the way: the operations and their
    scalars depend on the jaxpr alone.
    """

    def __init__(self, what: str, dim: int, num_states: int):
        self.what, self.dim, self.num_states = what, dim, num_states
        self.num_values = 2 + num_states
        self.steps: list[tuple[str, int, tuple[_Value, ...]]] = []

    def run(self, closed: Any, hyper: Sequence[Any]) -> tuple[tuple[_Op, ...], int, Float[Array, " num_scalars"]]:
        """Returns the operations, the number of registers, and the scalars."""
        inputs = [*map(_Row, range(self.num_values)), _NumUses(), *map(_Global, hyper)]
        return self._allocate(self._inline(closed, inputs))

    # Equations to operations.

    def _inline(self, closed: Any, inputs: Sequence[_Value]) -> list[_Value]:
        return separable.interpret(closed, inputs, _constant, self._equation)

    def _equation(self, equation: Any, values: Sequence[_Value]) -> list[_Value]:
        name = equation.primitive.name
        if (body := separable.called_function(equation)) is not None:
            return self._inline(body, values)
        if not any(isinstance(value, (_Row, _NumUses)) for value in values):
            if name in _SAME_VALUE and _size_of(values[0]) == 1:
                # A scalar made as long as a row is still that scalar.
                return [values[0]]
            return _leave_to_xla(equation, values)
        self._refuse_integers(name, equation, values)
        if name == "cond":
            return self._both_branches(equation, values)
        shape = equation.outvars[0].aval.shape
        if int(np.prod(shape)) not in (1, self.dim):
            raise NotARowProgram(
                f"{self.what}: got {name} that makes {list(shape)} of one row, wanted arrays of {self.dim} or of 1."
            )
        result, dtype = self._operation(name, equation, values), equation.outvars[0].aval.dtype
        if dtype in (jnp.bfloat16, jnp.float16) and name != "convert_element_type":
            # Registers are float32; the result of 16-bit numbers keeps their bits.
            return [self._emit(f"to_{dtype.name}", result)]
        return [result]

    def _refuse_integers(self, name: str, equation: Any, values: Sequence[_Value]) -> None:
        """Refuses integers, since registers are float32 and 7 // 2 would be 3.5. Truth values may choose."""
        if name in (*_SAME_VALUE, "convert_element_type"):
            return
        of_row = [
            atom.aval.dtype
            for place, (atom, value) in enumerate(zip(equation.invars, values, strict=True))
            if isinstance(value, (_Row, _NumUses)) and not (name == "cond" and place == 0)
        ]
        # Other results of a choice, a count say, are left to XLA.
        made = [] if name == "cond" else [var.aval.dtype for var in equation.outvars]
        for dtype in [*of_row, *made]:
            if jnp.issubdtype(dtype, jnp.integer):
                raise NotARowProgram(_NO_INTEGERS.format(what=self.what, name=name, dtype=dtype.name))

    def _operation(self, name: str, equation: Any, values: Sequence[_Value]) -> _Value:
        if name in _SAME_VALUE:
            moved = equation.params.get({"transpose": "permutation", "reshape": "dimensions"}.get(name)) or ()
            self._refuse_moves(name, [axis for axis in moved if equation.invars[0].aval.shape[axis] != 1])
            return values[0]
        if name in _UNARY:
            return self._emit(_UNARY[name], values[0])
        if name in _BINARY:
            return self._emit(_BINARY[name], *values)
        if name in _SWAPPED:
            return self._emit(_SWAPPED[name], values[1], values[0])
        if name in _REDUCTIONS:
            shape = equation.invars[0].aval.shape
            over = [axis for axis in equation.params["axes"] if shape[axis] != 1]
            return self._emit(_REDUCTIONS[name], values[0]) if over else values[0]
        if name == "dot_general":
            return self._dot(equation, values)
        if name == "select_n" and len(values) == 3:
            condition, when_false, when_true = values
            return self._emit("select", condition, when_true, when_false)
        if name == "clamp":
            low, value, high = values
            return self._emit("minimum", self._emit("maximum", value, low), high)
        if name == "square":
            return self._emit("multiply", values[0], values[0])
        if name == "integer_pow":
            return self._integer_power(values[0], equation.params["y"])
        if name == "convert_element_type":
            return self._convert(equation, values[0])
        raise NotARowProgram(
            f"{self.what}: got the operation {name} on what depends on the row, wanted arithmetic, comparisons, where, "
            "roots, powers, exp, log, and sums, maxima or minima over the columns."
        )

    def _refuse_moves(self, name: str, axes: Sequence[int]) -> None:
        """Refuses axes in another order, since an operation takes numbers of one column."""
        if list(axes) != sorted(axes):
            raise NotARowProgram(
                f"{self.what}: got {name} with axes of a row in the order {list(axes)}, wanted columns in their places."
            )

    def _dot(self, equation: Any, values: Sequence[_Value]) -> _Value:
        left, right = (atom.aval.shape for atom in equation.invars)
        (contracted, partners), _ = equation.params["dimension_numbers"]
        size = int(np.prod([left[axis] for axis in contracted]))
        if equation.outvars[0].aval.size != 1 or int(np.prod(left)) != int(np.prod(right)) or size not in (1, self.dim):
            raise NotARowProgram(f"{self.what}: got a product of {list(left)} and {list(right)}, wanted that of rows.")
        pairs = sorted(zip(contracted, partners, strict=True))
        self._refuse_moves("dot_general", [partner for axis, partner in pairs if left[axis] != 1])
        product = self._emit("multiply", *values)
        return product if size == 1 else self._emit("sum", product)

    def _integer_power(self, value: _Value, exponent: int) -> _Value:
        if exponent == 0:
            return _Literal.of(1.0)
        result: _Value | None = None
        factor, rest = value, abs(exponent)
        while rest:
            if rest & 1:
                result = factor if result is None else self._emit("multiply", result, factor)
            rest >>= 1
            if rest:
                factor = self._emit("multiply", factor, factor)
        return result if exponent > 0 else self._emit("divide", _Literal.of(1.0), result)

    def _convert(self, equation: Any, value: _Value) -> _Value:
        old, new = equation.invars[0].aval.dtype, jnp.dtype(equation.params["new_dtype"])
        if new == jnp.bool_:
            return value if old == jnp.bool_ else self._emit("not_equal", value, _Literal.of(0.0))
        is_choice = old == jnp.bool_ or jnp.issubdtype(old, jnp.integer)
        if new == jnp.float32 or (is_choice and jnp.issubdtype(new, jnp.integer)):
            return value
        if new in (jnp.bfloat16, jnp.float16):
            return self._emit(f"to_{new.name}", value)
        raise NotARowProgram(f"{self.what}: got a row as {new.name}, wanted float32, bfloat16, float16 or bool.")

    def _both_branches(self, equation: Any, values: Sequence[_Value]) -> list[_Value]:
        branches = equation.params["branches"]
        if len(branches) != 2:
            raise NotARowProgram(f"{self.what}: got a choice of {len(branches)} branches, wanted 2.")
        index, *operands = values
        results = [self._inline(branch, operands) for branch in branches]
        chosen: list[_Value] = []
        for var, false, true in zip(equation.outvars, *results, strict=True):
            if not any(isinstance(value, (_Row, _NumUses)) for value in (index, false, true)):
                where = jnp.where(jnp.asarray(index.value) != 0, true.value, false.value)
                chosen.append(_Global(where.astype(var.aval.dtype)))
                continue
            if jnp.issubdtype(var.aval.dtype, jnp.integer):
                raise NotARowProgram(_NO_INTEGERS.format(what=self.what, name="cond", dtype=var.aval.dtype.name))
            on_row = _Global(jnp.asarray(index.value).astype(jnp.float32)) if isinstance(index, _Global) else index
            chosen.append(self._emit("select", on_row, true, false))
        return chosen

    def _emit(self, name: str, *operands: _Value) -> _Row:
        result = _Row(self.num_values)
        self.num_values += 1
        self.steps.append((name, result.number, operands))
        return result

    # Registers.

    def _allocate(self, outputs: Sequence[_Value]) -> tuple[tuple[_Op, ...], int, Float[Array, " num_scalars"]]:
        steps = self._fuse(self._select_live(outputs), outputs)
        steps += [("output", slot, (value,)) for slot, value in enumerate(outputs) if value != _Row(1 + slot)]
        last_use: dict[int, int] = {}
        for at, (_, _, operands) in enumerate(steps):
            last_use.update({value.number: at for value in operands if isinstance(value, _Row)})
        place: dict[int, int] = {i: i for i in range(2 + self.num_states)}
        free = sorted((i for i in place if i not in last_use), reverse=True)
        num_registers = len(place)
        scalars: list[_Value] = []
        ops = []

        def operand(value: _Value) -> int:
            if isinstance(value, _Row):
                return place[value.number]
            if isinstance(value, _NumUses):
                return -1
            if (size := _size_of(value)) != 1:
                raise NotARowProgram(f"{self.what}: got an array of {size} numbers besides the row, wanted scalars.")
            if value not in scalars:
                scalars.append(value)
            return -2 - scalars.index(value)

        for at, (name, result, operands) in enumerate(steps):
            numbers = [operand(value) for value in operands]
            ended = {value.number for value in operands if isinstance(value, _Row) and last_use[value.number] == at}
            free += [place[number] for number in ended]
            to = result
            if name != "output":
                free.sort(reverse=True)
                if not free:
                    free.append(num_registers)
                    num_registers += 1
                to = place[result] = free.pop()
            ops.append((_CODES[name], to, *numbers, *[0] * (3 - len(numbers))))
        for count, most, of in (
            (len(ops), MAX_OPS, "operations"),
            (num_registers, MAX_REGISTERS, "registers"),
            (len(scalars), MAX_SCALARS, "scalars"),
        ):
            if count > most:
                raise NotARowProgram(f"{self.what}: got {count} {of}, wanted at most {most}; make the step simpler.")
        values = [jnp.asarray(value.value).astype(jnp.float32).reshape(()) for value in scalars]
        return tuple(ops), num_registers, jnp.stack(values) if values else jnp.zeros(1, jnp.float32)

    def _select_live(self, outputs: Sequence[_Value]) -> list[tuple[str, int, tuple[_Value, ...]]]:
        needed = {value.number for value in outputs if isinstance(value, _Row)}
        live = []
        for step in reversed(self.steps):
            if step[1] in needed:
                needed |= {value.number for value in step[2] if isinstance(value, _Row)}
                live.append(step)
        return live[::-1]

    def _fuse(self, steps: list, outputs: Sequence[_Value]) -> list:
        """Joins products with the one sum or difference that takes them; each is still rounded."""
        used = itertools.chain(outputs, *(operands for _, _, operands in steps))
        num_uses = collections.Counter(value.number for value in used if isinstance(value, _Row))
        products = {
            result: operands for name, result, operands in steps if name == "multiply" and num_uses[result] == 1
        }
        joined: set[int] = set()
        fused = []
        for name, result, operands in steps:
            step = (name, result, operands)
            numbers = [value.number if isinstance(value, _Row) else None for value in operands]
            if name == "add":
                for product, other in ((1, 0), (0, 1)):
                    if numbers[product] in products:
                        joined.add(numbers[product])
                        step = ("multiply_add", result, (*products[numbers[product]], operands[other]))
                        break
            elif name == "subtract" and numbers[1] in products:
                joined.add(numbers[1])
                step = ("multiply_subtract", result, (*products[numbers[1]], operands[0]))
            fused.append(step)
        return [step for step in fused if step[1] not in joined]


# Values that XLA computes ---------------------------------------------------------------------------------------------


def _constant(value: Any) -> _Global | _Literal:
    is_literal = np.ndim(value) == 0 and np.asarray(value).dtype in (np.float32, np.bool_)
    return _Literal.of(value) if is_literal else _Global(value)


def _size_of(value: _Value) -> int:
    return math.prod(np.shape(value.value)) if isinstance(value, _Global) else 1


def _leave_to_xla(equation: Any, values: Sequence[_Global | _Literal]) -> list[_Value]:
    # Where all numbers of every array are equal, one of each is enough.
    is_narrow = equation.primitive.name in _ON_COLUMNS and all(_size_of(value) == 1 for value in values)
    operands = []
    for value, aval in zip(values, (atom.aval for atom in equation.invars), strict=True):
        operand = value.value
        if _size_of(value) == 1:
            operand = jnp.asarray(operand, aval.dtype).reshape(())
            operand = operand if is_narrow else jnp.broadcast_to(operand, aval.shape)
        operands.append(operand)
    params = equation.primitive.get_bind_params(equation.params)
    out = equation.primitive.bind(*vary_alike(operands), **params)
    return [_Global(value) for value in (out if equation.primitive.multiple_results else [out])]


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Makes operands vary over the same axes, as a primitive inside shard_map requires."""
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    everything = frozenset().union(*varying)
    return [
        jax.lax.pcast(operand, tuple(everything - axes), to="varying") if everything - axes else operand
        for operand, axes in zip(operands, varying, strict=True)
    ]


def _num_operands(code: int) -> int:
    name = OPS[code]
    if name in ("select", "multiply_add", "multiply_subtract"):
        return 3
    return 2 if name in _BINARY.values() else 1
