"""Finds from its jaxpr, not from examples, whether a function of a block of rows treats each row alone.

Examples miss branches that they do not take: clipping by a global norm of 1e9 looks harmless. Here every value is
followed from the inputs to the outputs. Feeds `lift.py`; knows nothing of Optax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Coupled:
    """A value made of several rows together, or by an operation that is not understood."""

    reason: str
    """The cause: "sums over the rows"."""


@dataclasses.dataclass(frozen=True)
class Positional:
    """A value that uses no row's data, but differs from row to row: noise, a count along the block."""


Dependence = int | Coupled | Positional | None
"""The dependence of a value on the block: the axis along which its rows lie; None: the same for all rows."""

BY_PLACE = "depends on the place of a row in the block"
BY_NUMBER = "depends on the number of rows"

_BY_COLUMN = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min "
    "mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
_CALLS = frozenset("jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call".split())
_REDUCTIONS = {
    "reduce_sum": "sums over the rows",
    "reduce_max": "takes a maximum over the rows",
    "reduce_min": "takes a minimum over the rows",
    "reduce_prod": "multiplies over the rows",
    "reduce_and": "asks something of all rows together",
    "reduce_or": "asks something of all rows together",
    "argmax": "takes a maximum over the rows",
    "argmin": "takes a minimum over the rows",
}
_RESHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"])


def dependences(closed: core.ClosedJaxpr, inputs: Sequence[Dependence], num_rows: int) -> list[Dependence]:
    """Finds how the outputs of a traced function of a block depend on its rows, given how the inputs do.

    An axis is a promise: row i of the output is a function of row i of the inputs, the same for all i. `Coupled` names
    what may break that. No other axis may be as long as the block, `num_rows`.
    """
    of_constant = functools.partial(_dependence_of_constant, num_rows=num_rows)
    return interpret(closed, inputs, of_constant, functools.partial(_dependences_of_equation, num_rows=num_rows))


def interpret(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Value],
    of_constant: Callable[[Any], Value],
    of_equation: Callable[[Any, list[Value]], Sequence[Value]],
) -> list[Value]:
    """Runs a traced function on values of another kind: `of_equation` gives those of an equation's results."""
    jaxpr = closed.jaxpr
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(of_constant, closed.consts), strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        return of_constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, of_equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called_function(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns the function that an equation merely calls: jit, remat, one with its own derivative."""
    if eqn.primitive.name not in _CALLS:
        return None
    bodies = [eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params]
    return _close(bodies[0]) if bodies else None


def formula_of(closed: core.ClosedJaxpr, num_rows: int | None = None) -> tuple[Any, ...]:
    """Describes a traced function without the sizes of blocks; with `num_rows` other sizes count, too."""
    places: dict[Any, int] = {}
    for var in itertools.chain(
        closed.jaxpr.constvars, closed.jaxpr.invars, *(eqn.outvars for eqn in closed.jaxpr.eqns)
    ):
        places[var] = len(places)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [_numbers(atom.val) if isinstance(atom, core.Literal) else places[atom] for atom in atoms]

    words: list[Any] = [*map(_numbers, closed.consts), *read(closed.jaxpr.outvars)]
    for eqn in closed.jaxpr.eqns:
        plain = [(key, value) for key, value in eqn.params.items() if isinstance(value, (bool, int, float, str))]
        if num_rows is not None and not _rows_in(eqn.invars, num_rows) and not _rows_in(eqn.outvars, num_rows):
            tuples = [(key, value) for key, value in eqn.params.items() if isinstance(value, tuple)]
            plain += [(key, value) for key, value in tuples if all(isinstance(number, int) for number in value)]
        inner = [formula_of(body, num_rows) for body in _bodies(eqn)]
        words.append((eqn.primitive.name, *read(eqn.invars), *sorted(plain), *inner))
    return tuple(words)


def _numbers(value: Any) -> Any:
    """Returns the numbers of a constant; where they are equal along an axis, once."""
    if jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis) if size else array
        if np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return str(array.dtype), array.tobytes()


def _bodies(eqn: Any) -> list[core.ClosedJaxpr]:
    """Returns the functions that an equation holds: calls, branches, condition and body of a loop."""
    params = [value if isinstance(value, tuple) else (value,) for _, value in sorted(eqn.params.items())]
    values = itertools.chain.from_iterable(params)
    return [_close(value) for value in values if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]


def _rows_in(atoms: Sequence[Any], num_rows: int) -> int:
    """Returns the most axes as long as the block that any of the atoms has."""
    return max((list(getattr(atom.aval, "shape", ())).count(num_rows) for atom in atoms), default=0)


def _counts_rows(eqn: Any, num_rows: int) -> bool:
    """Returns whether an axis as long as the block ends in an equation: a sum of ones is the number of rows."""
    if _rows_in(eqn.invars, num_rows) > _rows_in(eqn.outvars, num_rows):
        return True
    return any(_counts_rows(inner, num_rows) for body in _bodies(eqn) for inner in body.jaxpr.eqns)


def _dependence_of_constant(value: Any, num_rows: int) -> Dependence:
    """Finds how a constant depends on the block: an axis of the same length may distinguish rows."""
    shape = np.shape(value)
    for axis in [axis for axis, size in enumerate(shape) if size == num_rows]:
        parts = np.moveaxis(np.asarray(value), axis, 0)
        if not all(np.array_equal(part, parts[0]) for part in parts):
            return Positional()
    return None


def _dependences_of_equation(eqn: Any, ins: list[Dependence], num_rows: int) -> list[Dependence]:
    name, params = eqn.primitive.name, eqn.params
    num_outs = len(eqn.outvars)
    body = called_function(eqn)
    if body is not None:
        return dependences(body, ins, num_rows)
    if name == "cond":
        choice, operands = ins[0], ins[1:]
        if choice is None:
            branches = [dependences(_close(branch), operands, num_rows) for branch in params["branches"]]
            return [_join(list(outs)) for outs in zip(*branches, strict=True)]
    for value in ins:
        if isinstance(value, Coupled):
            return [value] * num_outs
    axes = {value for value in ins if isinstance(value, int)}
    is_plain = name in _BY_COLUMN or name in _RESHAPES or name in _REDUCTIONS
    if not axes:
        if not any(isinstance(value, Positional) for value in ins) and _counts_rows(eqn, num_rows):
            return [Coupled(BY_NUMBER)] * num_outs
        if name in _RESHAPES and isinstance(moved := _check_all_move(eqn, num_rows), Coupled):
            return [moved] * num_outs
        may_differ = any(isinstance(value, Positional) for value in ins) or not is_plain
        return [
            Positional() if may_differ and (num_rows in out.aval.shape or any(ins)) else None for out in eqn.outvars
        ]
    if any(isinstance(value, Positional) for value in ins):
        return [Coupled(BY_PLACE)] * num_outs
    if len(axes) > 1:
        return [Coupled("sets rows against columns")] * num_outs
    (axis,) = axes
    if name in _BY_COLUMN:
        return [axis] * num_outs
    if name in _REDUCTIONS:
        gone = params["axes"]
        return [Coupled(_REDUCTIONS[name]) if axis in gone else axis - sum(place < axis for place in gone)] * num_outs
    if name in _RESHAPES:
        return [_move(name, params, axis, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)]
    return [Coupled(f"takes {name} of them")] * num_outs


def _move(name: str, params: Any, axis: int, old: tuple[int, ...], new: tuple[int, ...]) -> Dependence:
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return int(list(params["permutation"]).index(axis))
    # Rows stay whole where as many numbers lie before their axis, and the axis is as long.
    for place, size in enumerate(new):
        if size == old[axis] and math.prod(new[:place]) == math.prod(old[:axis]):
            return place
    return Coupled("lays the rows end to end")


def _check_all_move(eqn: Any, num_rows: int) -> Coupled | None:
    """Returns None if a value that is the same for all rows still is so after a change of shape."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    moves = [_move(eqn.primitive.name, eqn.params, axis, old, new) for axis, n in enumerate(old) if n == num_rows]
    return next((moved for moved in moves if isinstance(moved, Coupled)), None)


def _join(values: list[Dependence]) -> Dependence:
    distinct = [value for i, value in enumerate(values) if value is not None and value not in values[:i]]
    if not distinct:
        return None
    couplings = [value for value in distinct if isinstance(value, Coupled)]
    if couplings:
        return couplings[0]
    return distinct[0] if len(distinct) == 1 else Coupled("sets rows against columns")


def _close(body: Any) -> core.ClosedJaxpr:
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())
