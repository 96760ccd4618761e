"""Checks of numbers and flags that a caller passes: each returns the value, or raises with the value and its limits.

NumPy's scalars are accepted and returned as Python's, which print alike everywhere and go into JSON. A bool is neither
an integer nor a number. `what` names the operation and its argument: "grow: steps".
"""

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

ABOVE_ZERO = math.ulp(0.0)  # the least positive float: `low` of positive numbers
LARGEST = sys.float_info.max
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

Value = TypeVar("Value")


def not_none(value: Value | None) -> Value:
    """Returns a value that is not None here, which its type cannot say."""
    assert value is not None, "jaxsok: got None where there is always a value; please report it."
    return value


def module(what: str, name: str, wanted: str) -> Any:
    """Imports a module of an optional package; ImportError: it is not installed, or does not load."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise import_error(what, error, wanted) from error


def import_error(what: str, error: ImportError, wanted: str) -> ImportError:
    """Makes the error of an optional package that was not imported, by the reason for that."""
    got = "no such module" if isinstance(error, ModuleNotFoundError) else f"one that does not load ({error})"
    return ImportError(f"{what}: got {got}, wanted it {wanted}.", name=error.name)


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number, infinity and NaN included."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Returns whether a value is an integer from `low` to `high`."""
    return is_number(value) and isinstance(value, (int, np.integer)) and low <= int(value) <= high


def integer(
    what: str, value: Any, low: float = -math.inf, high: float = math.inf, wanted: str = "", kind: str = ""
) -> int:
    """Checks an integer from `low` to `high`; messages ask for `wanted`, or that interval.

    With `kind` a value that is no integer raises TypeError and the message asks for `kind`; all else is a ValueError.
    """
    if kind and not is_integer(value):
        raise TypeError(f"{what}: got {value!r}, wanted {kind}.")
    if not is_integer(value, low, high):
        interval = f"an integer of at least {low}" if high == math.inf else f"an integer from {low} to {high}"
        raise ValueError(f"{what}: got {value!r}, wanted {wanted or interval}.")
    return int(value)


def number(what: str, value: Any, low: float = -LARGEST, high: float = LARGEST, wanted: str = "") -> float:
    """Checks a number from `low` to `high`, by default any finite one; messages ask for `wanted`, or that interval."""
    plain = value.item() if isinstance(value, np.generic) else value
    if not is_number(value) or not low <= plain <= high:
        interval = "a finite number" if (low, high) == (-LARGEST, LARGEST) else f"a number from {low} to {high}"
        raise ValueError(f"{what}: got {value!r}, wanted {wanted or interval}.")
    return plain


def scalar(what: str, value: Any) -> None:
    """Refuses values that are not one real number, traced or not."""
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    is_real = is_array and (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer))
    if not (is_number(value) or is_real) or np.shape(value) != ():
        got = f"{value.dtype}{list(value.shape)}" if is_array else repr(value)
        raise TypeError(f"{what}: got {got}, wanted a scalar.")


def flag(what: str, value: Any) -> bool:
    """Checks a bool; anything else raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{what}: got {value!r}, wanted True or False.")
    return value


def one_of(what: str, value: Any, choices: Collection[str | None], wanted: str = "") -> str | None:
    """Checks one of some strings or None; a dtype is its name. Messages ask for `wanted`, or list the choices."""
    value = value.name if isinstance(value, np.dtype) else value
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{what}: got {value!r}, wanted {wanted or f'one of {list(choices)}'}.")
    return value


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the check of a value that may be None."""
    return lambda what, value, **kwargs: None if value is None else check(what, value, **kwargs)


def declare(default: Any, check: Callable[..., Any], **kwargs: Any) -> Any:
    """Declares a field of a frozen dataclass with its default and the check that `check_fields` applies."""
    return dataclasses.field(default=default, metadata={"check": functools.partial(check, **kwargs)})


def check_fields(spec: Any, op: str) -> None:
    """Checks the fields that were declared with `declare`."""
    for declared in dataclasses.fields(spec):
        if "check" in declared.metadata:
            field(spec, op, declared.name, declared.metadata["check"])


def field(spec: Any, op: str, name: str, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Checks a field of a frozen dataclass and stores what the check returns."""
    object.__setattr__(spec, name, check(f"{op}: {name}", getattr(spec, name), *args, **kwargs))
