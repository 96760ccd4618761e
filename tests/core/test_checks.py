"""Checks of numbers and flags: accepted values, returned values and messages."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsok
from jaxsok import checks


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.uint64(3)])
def test_integers_come_back_as_pythons(value):
    """NumPy's scalars and Python's give Python integers."""
    assert type(checks.integer("op: argument", value, 3, 3)) is int


def test_a_package_that_does_not_load_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise ImportError('libstdc++.so.6: version not found')")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = r"op: got one that does not load \(libstdc\+\+.so.6: version not found\), wanted it to read"
    with pytest.raises(ImportError, match=wanted):
        checks.module("op", "broken_package", "to read; pip install it")
    with pytest.raises(ImportError, match="op: got no such module, wanted it to read"):
        checks.module("op", "missing_package", "to read; pip install it")


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.int8(1)])
def test_numbers_come_back_as_pythons(value):
    """An integer stays an integer."""
    got = checks.number("op: argument", value)
    assert got == value and type(got) in (int, float)


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, np.array(3), np.array([3])])
def test_what_is_no_integer(value):
    """With a kind the error is a TypeError that states the kind, otherwise a ValueError that states the interval."""
    assert not checks.is_integer(value)
    with pytest.raises(ValueError, match=r"^op: argument: got .*, wanted an integer of at least 1\.$"):
        checks.integer("op: argument", value, 1)
    with pytest.raises(TypeError, match=r"^op: argument: got .*, wanted an integer or None\.$"):
        checks.integer("op: argument", value, 1, wanted="at least 1", kind="an integer or None")


@pytest.mark.parametrize("value", [0, 8, -1, np.int64(8), 10**400])
def test_integers_outside(value):
    """A value out of range is a ValueError, also with a kind."""
    with pytest.raises(ValueError, match=r"wanted an integer from 1 to 7\."):
        checks.integer("op: argument", value, 1, 7, kind="an integer")
    assert checks.is_integer(value) and not checks.is_integer(value, 1, 7)


def test_the_largest_words():
    """Bounds are compared as integers: no float holds 2**64 - 1."""
    assert checks.integer("op: argument", np.uint64(2**64 - 1), 0, 2**64 - 1) == 2**64 - 1
    assert not checks.is_integer(2**64, 0, 2**64 - 1)


@pytest.mark.parametrize("value", [True, np.True_, 1j, np.complex64(1), "1", None, np.ones(1), math.nan, 10**400])
def test_what_is_no_finite_number(value):
    """Other values are refused; so is infinity, if no bound allows it."""
    for got in (value, math.inf, np.float32(-math.inf)):
        with pytest.raises(ValueError, match=r"^op: argument: got .*, wanted a finite number"):
            checks.number("op: argument", got)


def test_bounds_of_numbers():
    """Bounds are closed, but ABOVE_ZERO excludes zero."""
    assert checks.number("op: argument", 1, 0, 1) == 1
    assert checks.number("op: argument", math.inf, 0, math.inf) == math.inf
    assert checks.number("op: argument", 5e-324, checks.ABOVE_ZERO) == 5e-324
    with pytest.raises(ValueError, match=r"got 1\.5, wanted a number from 0 to 1\."):
        checks.number("op: argument", 1.5, 0, 1)
    for zero in (0, 0.0, -0.0):
        with pytest.raises(ValueError, match="wanted a positive number"):
            checks.number("op: argument", zero, checks.ABOVE_ZERO, wanted="a positive number")


@pytest.mark.parametrize("value", [0, 1, "True", None, np.True_])
def test_what_is_no_flag(value):
    """Only Python's bools are flags."""
    assert checks.flag("op: argument", True) is True and checks.flag("op: argument", False) is False
    with pytest.raises(TypeError, match=r"^op: argument: got .*, wanted True or False\.$"):
        checks.flag("op: argument", value)


def test_fields_keep_what_a_check_returns():
    """Frozen specs made from NumPy's scalars print and save like specs made from Python's."""

    @dataclasses.dataclass(frozen=True)
    class Spec:
        steps: int

        def __post_init__(self):
            checks.field(self, "Spec", "steps", checks.integer, 1)

    assert repr(Spec(np.int64(3))) == repr(Spec(3)) and type(Spec(np.int64(3)).steps) is int
    with pytest.raises(ValueError, match=r"^Spec: steps: got 0, wanted an integer of at least 1\.$"):
        Spec(0)


def test_a_dtype_is_its_name():
    """A dtype becomes its name in NumPy and JAX; other values are refused."""
    assert checks.one_of("op: dtype", np.dtype("int32"), ("int64", "int32")) == "int32"
    assert jaxsok.ExchangeSpec(rows=jnp.dtype("bfloat16")).rows == "bfloat16"
    for value in (np.dtype("int8"), 32, ["int32"]):
        with pytest.raises(ValueError, match=r"op: dtype: got .*, wanted one of \['int64', 'int32'\]"):
            checks.one_of("op: dtype", value, ("int64", "int32"))
