"""What a new row holds: declarations, each a function of (seed, table name, key, column) and of nothing else.

The values are worked out inside the kernels (`ffi/core/initialize.h`), so a key gets the same row on every mesh,
in every run and on both back ends. Random numbers are counter-based: SplitMix64 of the key's stream and the column.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Initializer:
    """A kind that the kernels know, with its two parameters. Made by the functions of this module."""

    kind: int
    a: float
    b: float = 0.0


def _finite(name: str, **parameters: float) -> None:
    for parameter, value in parameters.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"initializers.{name}: {parameter}: got {value!r}, wanted a finite number.")


def zeros() -> Initializer:
    """Every column 0.

    Example:
      >>> zeros()
      Initializer(kind=0, a=0.0, b=0.0)
    """
    return Initializer(0, 0.0)


def constant(value: float) -> Initializer:
    """Every column `value`.

    Example:
      >>> constant(0.5).a
      0.5
    """
    _finite("constant", value=value)
    return Initializer(0, float(value))


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Uniform over [low, high), 24 bits.

    Raises:
      ValueError: not finite, or `low > high`.

    Example:
      >>> uniform(-1.0, 1.0).kind
      1
    """
    _finite("uniform", low=low, high=high)
    if low > high:
        raise ValueError(f"initializers.uniform: low: got {low} above high = {high}; swap them.")
    return Initializer(1, float(low), float(high))


def normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal with the given mean and standard deviation.

    Source: the quantile function AS 241 (Wichura 1988) of a 23-bit uniform, so no value lies beyond 5.3 deviations.

    Example:
      >>> normal(0.1).b
      0.1
    """
    _finite("normal", stddev=stddev, mean=mean)
    if stddev < 0:
        raise ValueError(f"initializers.normal: stddev: got {stddev}, wanted at least 0.")
    return Initializer(2, float(mean), float(stddev))


def truncated_normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal, drawn again in effect where it lies more than two standard deviations off.

    `stddev` is the deviation before the cut, as in `jax.nn.initializers.truncated_normal`.

    Example:
      >>> truncated_normal(0.1).kind
      3
    """
    _finite("truncated_normal", stddev=stddev, mean=mean)
    if stddev < 0:
        raise ValueError(f"initializers.truncated_normal: stddev: got {stddev}, wanted at least 0.")
    return Initializer(3, float(mean), float(stddev))
