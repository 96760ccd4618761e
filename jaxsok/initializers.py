"""What a new row holds: declarations, each a function of (seed, table name, key, column) and of nothing else.

Most are worked out inside the kernels (`ffi/core/initialize.h`), so a key gets the same row on every mesh, in every run
and on both back ends. Random numbers are counter-based: SplitMix64 of the key's stream and the column.

`matrix` and `function` are traced: XLA computes their rows outside the kernels and writes those of new keys. They are
functions of key and column alone. A store with such a table looks up by several calls in place of one (table.py,
lookup.py); its other tables get the same rows as ever.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

from jaxsok import checks


@dataclasses.dataclass(frozen=True)
class Initializer:
    """A kind that the kernels know, with its two parameters. Made by the functions of this module."""

    is_traced: ClassVar[bool] = False
    """True if XLA works the rows out (`rows`), and not the kernels."""

    kind: int
    a: float
    b: float = 0.0

    def for_dim(self, dim: int) -> "Initializer":
        """Returns the initializer for rows of `dim` numbers, which the kernels are given."""
        return self

    def require(self, dim: int, what: str) -> None:
        """Refuses a table whose rows this cannot fill: a matrix of other columns, a function of other results."""

    def rows(self, words: UInt32[Array, "num_keys 2"], dim: int) -> Float32[Array, "num_keys dim"]:
        """Returns the rows of keys, if `is_traced`."""
        raise TypeError(f"Initializer.rows: got {self!r}, whose rows the kernels work out.")


def zeros() -> Initializer:
    """Every column 0."""
    return Initializer(0, 0.0)


def ones() -> Initializer:
    """Every column 1."""
    return Initializer(0, 1.0)


def _float32(what: str, value: Any, low: float = -checks.LARGEST_FLOAT32) -> float:
    return checks.number(what, value, low, checks.LARGEST_FLOAT32)


def constant(value: float) -> Initializer:
    """Every column `value`."""
    return Initializer(0, float(_float32("initializers.constant: value", value)))


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Uniform over [low, high), 24 bits.

    Raises:
      ValueError: not finite, or `low > high`.
    """
    _float32("initializers.uniform: low", low)
    _float32("initializers.uniform: high", high)
    _float32("initializers.uniform: high - low", high - low)
    if low > high:
        raise ValueError(f"initializers.uniform: low: got {low} above high = {high}; swap them.")
    return Initializer(1, float(low), float(high))


def normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal with the given mean and standard deviation.

    Source: the quantile function AS 241 (Wichura 1988) of a 23-bit uniform, so no value lies beyond 5.3 deviations.
    """
    _float32("initializers.normal: mean", mean)
    _float32("initializers.normal: stddev", stddev, low=0)
    return Initializer(2, float(mean), float(stddev))


def truncated_normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal, drawn again in effect where it lies more than two standard deviations off.

    `stddev` is the deviation before the cut, as in `jax.nn.initializers.truncated_normal`.

    Example:
      >>> uniform(-1.0, 1.0), normal(0.1).b, truncated_normal(0.1).kind
      (Initializer(kind=1, a=-1.0, b=1.0), 0.1, 3)
    """
    _float32("initializers.truncated_normal: mean", mean)
    _float32("initializers.truncated_normal: stddev", stddev, low=0)
    return Initializer(3, float(mean), float(stddev))


def fan_in(
    scale: float = 1.0, distribution: Literal["uniform", "normal", "truncated_normal"] = "uniform"
) -> Initializer:
    """Mean 0 and variance `scale / dim`, by the table's dim: variance scaling of a row that a layer multiplies.

    The same as `jax.nn.initializers.variance_scaling(scale, "fan_in", distribution, in_axis=1, out_axis=0)` of a
    `[num_rows, dim]` table, which Flax gives to `nnx.Embed` with scale 1 and "normal". A scale of 1 keeps the length of
    a row near 1. The distribution is "uniform" over +-sqrt(3 scale / dim), "normal", or "truncated_normal" at two
    standard deviations before the cut, which is wider by 1 / 0.8796 so that the variance after it is the same.

    Raises:
      ValueError: a negative scale, another distribution.

    Example:
      >>> fan_in(3.0).for_dim(4)
      Initializer(kind=1, a=-1.5, b=1.5)
    """
    _float32("initializers.fan_in: scale", scale, low=0)
    wanted = '"uniform", "normal" or "truncated_normal"'
    checks.one_of("initializers.fan_in: distribution", distribution, ("uniform", "normal", "truncated_normal"), wanted)
    deviation = math.sqrt(scale)
    if distribution == "uniform":
        return _FanIn(1, -math.sqrt(3.0 * scale), math.sqrt(3.0 * scale))
    if distribution == "normal":
        return _FanIn(2, 0.0, deviation)
    return _FanIn(3, 0.0, deviation / _DEVIATION_WITHIN_TWO)


# The standard deviation of the standard normal distribution between -2 and 2.
_DEVIATION_WITHIN_TWO = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


class _FanIn(Initializer):
    """An initializer whose parameters hold for rows of one number; they shrink with the root of the dim."""

    def for_dim(self, dim: int) -> Initializer:
        return Initializer(self.kind, self.a / math.sqrt(dim), self.b / math.sqrt(dim))


BY_NAME: Mapping[str, Callable[[], Initializer]] = {
    maker.__name__: maker for maker in (zeros, ones, uniform, normal, truncated_normal, fan_in)
}
"""The names that `TableSpec(initializer=)` takes; each stands for the call without arguments."""

# Apart from a state --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InitialRows:
    """The initial rows of one table apart from its state: a function of (seed, table name, key, column).

    Exports and served tables carry it, so that a key without a row reads there what `Collection.find` gives. Raises
    TypeError or ValueError for an argument that does not fit, and names it.
    """

    initializer: Initializer
    """One that the kernels work out, with the parameters of the table's dim."""
    table: str
    """The name that the table was trained under."""
    seed: int
    """The seed of the training state."""

    def __post_init__(self) -> None:
        if type(self.initializer) is not Initializer:
            raise TypeError(f"InitialRows: initializer: got {self.initializer!r}, wanted one that kernels work out.")
        checks.integer("InitialRows: initializer.kind", self.initializer.kind, 0, 3)
        parameters = (self.initializer.a, self.initializer.b)
        if not all(map(checks.is_number, parameters)):
            raise TypeError(f"InitialRows: initializer: got parameters {parameters}, wanted numbers.")
        if not all(abs(parameter) < 2.0**128 for parameter in parameters):  # JSON has integers that no float holds
            raise ValueError("InitialRows: initializer: got parameters beyond float32, wanted finite numbers.")
        if not isinstance(self.table, str) or not self.table:
            raise TypeError(f"InitialRows: table: got {self.table!r}, wanted a name.")
        checks.field(self, "InitialRows", "seed", checks.integer, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1")

    def __str__(self) -> str:
        name = ("constant", "uniform", "normal", "truncated_normal")[self.initializer.kind]
        parameters = f"{self.initializer.a:g}, {self.initializer.b:g}"
        return f'the initial row: {name}({parameters}) of table "{self.table}", seed {self.seed}'

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object for manifests."""
        declared = self.initializer
        return {"kind": declared.kind, "a": declared.a, "b": declared.b, "table": self.table, "seed": self.seed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "InitialRows":
        """Reads what `to_json` gave; TypeError, ValueError or KeyError: it is not that."""
        if not isinstance(value, Mapping):
            raise TypeError(f"InitialRows: got {value!r}, wanted an object.")
        return cls(Initializer(value["kind"], value["a"], value["b"]), value["table"], value["seed"])


# Traced ------------------------------------------------------------------------------------------------------------


def matrix(values: Any) -> Initializer:
    """Rows of a matrix by key: key k, as an unsigned 64-bit number, gets row `k mod num_values`.

    Args:
      values: finite floats `[num_values, dim]`, kept as float32. They are a constant of every program that looks the
        table up: thousands of rows, not millions.

    Raises:
      TypeError, ValueError: not floats, not two axes, no rows, not finite; another dim than the table's.

    Cost:
      As for `function`, and each row of the matrix is also read twice.

    Source: DeepRec, embedding variables with `InitializerOption(default_value_dim=num_values)`.

    Example:
      >>> matrix(np.array([[0.0, 1.0], [2.0, 3.0]])).rows(jnp.array([[7, 0]], jnp.uint32), dim=2).tolist()
      [[2.0, 3.0]]
    """
    given = np.asarray(values)
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise TypeError(f"initializers.matrix: values: got {given.dtype}{list(given.shape)}, wanted floats.")
    if given.ndim != 2 or 0 in given.shape:
        raise ValueError(
            f"initializers.matrix: values: got shape {list(given.shape)}, wanted [num_values, dim], at least one row."
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        kept = np.array(given, np.float32, order="C")
    if not np.isfinite(kept).all():
        raise ValueError("initializers.matrix: values: got infinite or NaN in float32, wanted finite numbers.")
    kept.flags.writeable = False
    digest = hashlib.blake2b(kept.tobytes(), digest_size=16).hexdigest()
    return _Matrix(values=kept, text=f"matrix([{kept.shape[0]}, {kept.shape[1]}] {digest})")


def function(fn: Callable[[Array, Array], Array], name: str) -> Initializer:
    """The user's own pure function of a key and the columns.

    It is called for one key and mapped over the keys of a batch (`jax.vmap`), so that no key can depend on the others.
    Integer arithmetic and single roundings give the same bits everywhere. For a float product in a sum, or a
    transcendental function, XLA may give other last bits in another program or on another back end; a written row
    stays.

    Values are written unchecked. A row that is not finite is read as such and no lookup counts it. If its gradients are
    not finite, each update leaves the row alone and counts it in `Stats.num_nonfinite`, and `stats.check()` raises.

    Args:
      fn: takes the key's words `uint32[2]` (low, high) and the columns `int32[dim]` (0, 1, ...); gives `float32[dim]`.
        It must not read anything that changes.
      name: stands for the function in the fingerprint of a state: give another name to another function.

    Raises:
      TypeError, ValueError: not callable, no name; results of another shape or dtype, when the table is declared.

    Cost:
      For a store with such a table a lookup costs several calls in place of one, and for each of its keys a row is
      worked out and written twice: once for keys that got a row, once next to the rows for keys that have none.

    Example:
      >>> def parity(words, columns):
      ...     return (words[0] % 2).astype(jnp.float32) * jnp.ones(columns.shape)
      >>> function(parity, "parity").rows(jnp.array([[7, 0], [4, 0]], jnp.uint32), dim=2).tolist()
      [[1.0, 1.0], [0.0, 0.0]]
    """
    if not callable(fn):
        raise TypeError(f"initializers.function: fn: got {fn!r}, wanted a function of (words, columns).")
    if not isinstance(name, str) or not name:
        raise TypeError(f"initializers.function: name: got {name!r}, wanted a string that names the function.")
    return _Function(fn=fn, text=f"function({name!r})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced(Initializer):
    """An initializer for which the kernels fill new rows with zeros, and XLA writes over them."""

    is_traced: ClassVar[bool] = True

    kind: int = 0
    a: float = 0.0
    text: str

    def __repr__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Matrix(_Traced):
    """A matrix by key; equal to others of the same shape and bits, which its text names."""

    values: np.ndarray = dataclasses.field(compare=False)

    def require(self, dim: int, what: str) -> None:
        if self.values.shape[1] != dim:
            raise ValueError(
                f"{what}: initializer: got a matrix of {self.values.shape[1]} columns, wanted dim = {dim} of them."
            )

    def rows(self, words: UInt32[Array, "num_keys 2"], dim: int) -> Float32[Array, "num_keys dim"]:
        return jnp.asarray(self.values).at[_modulo(words, self.values.shape[0])].get(mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _Function(_Traced):
    """A function of the user's own; equal to others of the same function and name."""

    fn: Callable[[Array, Array], Array]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and (self.fn is other.fn and self.text == other.text)

    def __hash__(self) -> int:
        return hash((id(self.fn), self.text))

    def require(self, dim: int, what: str) -> None:
        shapes = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((dim,), jnp.int32)
        made = jax.eval_shape(self.fn, *shapes)
        if not hasattr(made, "shape") or (made.shape, made.dtype) != ((dim,), jnp.float32):
            got = f"{made.dtype}{list(made.shape)}" if hasattr(made, "shape") else type(made).__name__
            raise TypeError(
                f"{what}: initializer: got {self!r} that gives {got} for words uint32[2] and columns int32[{dim}], "
                f"wanted float32[{dim}]."
            )

    def rows(self, words: UInt32[Array, "num_keys 2"], dim: int) -> Float32[Array, "num_keys dim"]:
        columns = jnp.arange(dim, dtype=jnp.int32)
        return jax.vmap(lambda key: self.fn(key, columns))(words)


def _modulo(words: UInt32[Array, "num_keys 2"], divisor: int) -> UInt32[Array, " num_keys"]:
    """Computes unsigned 64-bit keys modulo a number below 2**31, in 32-bit arithmetic, by long division."""
    num_bits = 32 - (divisor - 1).bit_length()  # (divisor - 1) * 2**num_bits + 2**num_bits - 1 is below 2**32
    rest = jnp.zeros(words.shape[:1], jnp.uint32)
    for word in (words[:, 1], words[:, 0]):
        left = 32
        while left:
            taken = min(num_bits, left)
            left -= taken
            if taken == 32:  # divisor 1
                return rest
            digit = (word >> jnp.uint32(left)) & jnp.uint32(2**taken - 1)
            rest = ((rest << jnp.uint32(taken)) | digit) % jnp.uint32(divisor)
    return rest
