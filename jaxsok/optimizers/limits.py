"""Bounds around a step of any optimizer: on the row gradient before it, on the row after it.

A limit sees one row at a time; norms over all gradients are not here. The optimizers of this package derive from
`Limited` and declare their hyper-parameters with the checks below.
"""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsok import checks
from jaxsok.optimizers.protocol import PROGRAM, Optimizer, RowInputs, RowOutputs, RowState

# The smallest normal number: zeros divided by it are zeros.
_TINY = 2.0**-126


Parameters = ParamSpec("Parameters")
Made = TypeVar("Made", bound=Optimizer)

# Hyper-parameters -----------------------------------------------------------------------------------------------------

# Steps compute in float32, in which smaller numbers are 0, and larger shares 1.
_POSITIVE = functools.partial(checks.number, low=_TINY, high=checks.LARGEST_FLOAT32, wanted="a positive number")
_SHARE = functools.partial(checks.number, low=0.0, high=1 - 2.0**-24, wanted="a number in [0.0, 1.0)")


def positive(default: float) -> Any:
    """Declares a hyper-parameter above 0."""
    return checks.declare(default, _POSITIVE)


def not_negative(default: float) -> Any:
    """Declares a hyper-parameter of at least 0."""
    return checks.declare(default, checks.number, low=0.0, high=checks.LARGEST_FLOAT32, wanted="a number in [0.0, inf)")


def share(default: float | None) -> Any:
    """Declares a hyper-parameter of at least 0 and below 1, or None where that is the default."""
    return checks.declare(default, checks.optional(_SHARE) if default is None else _SHARE)


def flag(default: bool) -> Any:
    """Declares a hyper-parameter that is True or False."""
    return checks.declare(default, checks.flag)


# Limits ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """CowClip: a bound on the norm of a row gradient that grows with the row and with how often it was used.

    The L2 norm of the row gradient is at most `num_uses * max(ratio * ||row||, lower)`: one use moves a row by no more
    than a share of itself, and n uses by n times as much. Meant for `row_gradient="sum"`.

    Source: Zheng et al., "CowClip: Reducing CTR Prediction Model Training Time from 12 hours to 10 minutes on 1 GPU",
    2022, where ratio is r and lower is ζ.
    """

    ratio: float = positive(1.0)
    """The share of the row's L2 norm that one use may bring."""
    lower: float = positive(1e-5)
    """The least bound on one use, so that a row of zeros can leave zero."""

    def __post_init__(self) -> None:
        checks.check_fields(self, "AdaptiveClip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on a step, given to an optimizer as `limits`. None: no bound.

    In this order: `clip_value`, `clip_row_norm`, `adaptive_clip` on the row gradient after `row_gradient`; then the
    optimizer's step, its weight decay included; then `max_row_norm` on the row. Rows and gradients within their bounds
    keep their bits; a norm of zero stays zero. Norms do not overflow.

    Example:
      `optim.adam(1e-3, limits=Limits(clip_row_norm=1.0, max_row_norm=10.0))`

    Source: per-row forms of `optax.clip` and `optax.clip_by_global_norm`; `max_norm` of `tf.nn.embedding_lookup`, which
    bounds rows when they are read.
    """

    clip_value: float | None = checks.declare(None, checks.optional(_POSITIVE))
    """Each number of a row gradient lies in [-clip_value, clip_value]."""
    clip_row_norm: float | None = checks.declare(None, checks.optional(_POSITIVE))
    """A row gradient of greater L2 norm is scaled down to it."""
    adaptive_clip: AdaptiveClip | None = None
    max_row_norm: float | None = checks.declare(None, checks.optional(_POSITIVE))
    """A row of greater L2 norm after a step is scaled down to it. For rows of 16 bits, before they are rounded."""

    def __post_init__(self) -> None:
        checks.check_fields(self, "Limits")
        if not isinstance(self.adaptive_clip, AdaptiveClip | None):
            raise TypeError(
                f"Limits: adaptive_clip: got {self.adaptive_clip!r}, wanted None or optim.AdaptiveClip(ratio, lower)."
            )

    def around(self, step: Callable[[RowInputs], RowOutputs], inputs: RowInputs) -> RowOutputs:
        """Runs `step`, the `step_row` of an optimizer without limits, within these."""
        gradient = inputs.gradient
        if self.clip_value is not None:
            gradient = jnp.minimum(jnp.maximum(gradient, -self.clip_value), self.clip_value)
        if self.clip_row_norm is not None:
            gradient = with_norm_at_most(gradient, self.clip_row_norm)
        if self.adaptive_clip is not None:
            greatest, _, length = _by_greatest(inputs.row)
            share = greatest * (self.adaptive_clip.ratio * length)
            bound = inputs.num_uses * jnp.maximum(share, self.adaptive_clip.lower)
            gradient = with_norm_at_most(gradient, bound)
        outputs = step(inputs._replace(gradient=gradient))
        if self.max_row_norm is not None:
            outputs = outputs._replace(row=with_norm_at_most(outputs.row, self.max_row_norm))
        return outputs


@dataclasses.dataclass(frozen=True)
class Limited(Optimizer):
    """An optimizer whose steps may have limits, and which may have its own kernel for when there are none."""

    _own_kernel: ClassVar[int] = PROGRAM
    """The number of its row update; it applies where `_is_plain()`."""
    _states: ClassVar[tuple[str, ...]] = ()
    """Names of its state, where that has a number for each column, 0 at first."""
    _needs_positive_rate: ClassVar[bool] = False

    limits: Limits | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.limits, Limits | None):
            raise TypeError(
                f"optim.{self.name}: limits: got {self.limits!r}, wanted None or optim.Limits(...), as "
                "optim.Limits(clip_row_norm=1.0)."
            )
        if self.limits == Limits():
            object.__setattr__(self, "limits", None)
        checks.check_fields(self, f"optim.{self.name}")
        if self._needs_positive_rate and not callable(self.learning_rate) and not self.learning_rate > 0:
            raise ValueError(
                f"optim.{self.name}: learning_rate: got {self.learning_rate!r}, wanted a positive number or a schedule."
            )
        if getattr(self, "nesterov", False) and self.momentum is None:
            raise ValueError(f"optim.{self.name}: nesterov: got True without momentum; give momentum=0.9, say.")

    @property
    def kernel(self) -> int:
        """The number of the row update in `ffi/core/row_update.h`: its own, or PROGRAM."""
        return self._own_kernel if self.limits is None and self._is_plain() else PROGRAM

    def _is_plain(self) -> bool:
        """Returns whether its own kernel does all that the options ask for."""
        return True

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return tuple(RowState(name, dim, 0.0) for name in self._states)

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Returns the learning rate, and the number of updates of the collection, this one included."""
        return (learning_rate, jnp.asarray(step).astype(jnp.float32) + 1)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        return self._step(inputs) if self.limits is None else self.limits.around(self._step, inputs)

    @abc.abstractmethod
    def _step(self, inputs: RowInputs) -> RowOutputs:
        """Steps one row without limits."""


def function_of(kind: Callable[Parameters, Made]) -> Callable[Parameters, Made]:
    """Makes the function of `jaxsok.optim` for an optimizer's class: its arguments, under its `name`."""

    def make(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Made:
        return kind(*args, **kwargs)

    functools.update_wrapper(make, kind, assigned=("__module__", "__doc__"), updated=())
    make.__name__ = make.__qualname__ = kind.name  # pyright: ignore[reportFunctionMemberAccess]
    make.__signature__ = inspect.signature(kind).replace(return_annotation=kind)
    kind.__init__.__qualname__ = kind.name  # so that Python's messages about arguments name what was called
    return make


# Norms ----------------------------------------------------------------------------------------------------------------


def norm(row: Float[Array, " dim"]) -> Float[Array, ""]:
    """Computes the L2 norm."""
    return jnp.sqrt(jnp.sum(row * row))


def _by_greatest(row: Float[Array, " dim"]) -> tuple[Float[Array, ""], Float[Array, " dim"], Float[Array, ""]]:
    """Returns the greatest number of a row, and row and norm in units of it: the square of 1e20 would be infinite."""
    greatest = jnp.max(jnp.abs(row))
    unit = row / jnp.maximum(greatest, _TINY)
    return greatest, unit, norm(unit)


def with_norm_at_most(row: Float[Array, " dim"], bound: Float[Array, ""] | float) -> Float[Array, " dim"]:
    """Scales a row down to an L2 norm of `bound` if its own is greater."""
    greatest, unit, length = _by_greatest(row)
    return jnp.where(greatest * length > bound, unit * (bound / length), row)
