"""Optimizers that drive rows to zero: FTRL, and the sparse group lasso on FTRL and on Adam.

They hold, for each column, a sum z of gradients, and a row follows from it in closed form: the minimum of
`z·x + scale/2·x² + l1·|x| + l2·x² + l21·sqrt(dim)·||x||`. Where z is small that minimum is exactly zero. All are row
programs. A learning rate of zero, as a schedule may begin with, leaves a row and its z as they are.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxsok import checks
from jaxsok.optimizers.fused import average, bias_correction
from jaxsok.optimizers.limits import Limited, Limits, norm
from jaxsok.optimizers.protocol import LearningRate, RowInputs, RowOutputs, RowState


def _minimum(z: Array, scale: Array, l1: float, l2: float, l21: float) -> Array:
    """The row that a sum of gradients stands for; zeros where nothing holds it, at a scale of zero."""
    kept = jnp.where(jnp.abs(z) > l1, l1 * jnp.sign(z) - z, 0.0)
    if l21 > 0:
        length, threshold = norm(kept), l21 * math.sqrt(z.shape[-1])
        share = 1 - threshold / jnp.where(length > threshold, length, 1.0)
        kept = jnp.where(length > threshold, kept * share, 0.0)
    divisor = scale + 2 * l2
    return jnp.where(divisor > 0, kept / jnp.where(divisor > 0, divisor, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class Ftrl(Limited):
    """See `ftrl`."""

    name: ClassVar[str] = "ftrl"
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check_positive_rate()
        what, wanted = f"optim.{self.name}", "a number not above 0"
        checks.field(self, what, "learning_rate_power", checks.number, high=0, wanted=wanted)
        for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta"):
            self._check(name, 0.0)

    @property
    def _group_lasso(self) -> float:
        return 0.0

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """Of each column the sum of squared gradients and that of gradients."""
        return (RowState("accumulator", dim, self.initial_accumulator_value), RowState("z", dim, 0.0))

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """The learning rate."""
        return (learning_rate,)

    def _power(self, accumulator: Array) -> Array:
        if self.learning_rate_power == -0.5:
            return jnp.sqrt(accumulator)
        return jnp.power(accumulator, -self.learning_rate_power)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        """`z += g - (new - old) / lr * row`, `new` and `old` being `acc^-power` after and before `acc += g²`."""
        gradient, row, (accumulator, z), _, (learning_rate,) = inputs
        moves = learning_rate > 0
        rate = jnp.where(moves, learning_rate, 1.0)
        more = accumulator + gradient * gradient
        power = self._power(more)
        pull = gradient if self.l2_shrinkage == 0 else gradient + 2 * self.l2_shrinkage * row
        new_z = z + pull - (power - self._power(accumulator)) / rate * row
        new_row = _minimum(new_z, (power + self.beta) / rate, self.l1, self.l2, self._group_lasso)
        states = jnp.where(moves, more, accumulator), jnp.where(moves, new_z, z)
        return RowOutputs(jnp.where(moves, new_row, row), states)


@dataclasses.dataclass(frozen=True)
class GroupFtrl(Ftrl):
    """See `group_ftrl`."""

    name: ClassVar[str] = "group_ftrl"
    l21: float = 0.0

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check("l21", 0.0)

    @property
    def _group_lasso(self) -> float:
        return self.l21


@dataclasses.dataclass(frozen=True)
class GroupAdam(Limited):
    """See `group_adam`."""

    name: ClassVar[str] = "group_adam"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check_positive_rate()
        self._check("b1", 0.0, 1.0)
        self._check("b2", 0.0, 1.0)
        self._check_positive("eps")
        for name in ("l1", "l2", "l21"):
            self._check(name, 0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """Of each column first and second moment, and what the regularisers hold back."""
        return (RowState("m", dim, 0.0), RowState("v", dim, 0.0), RowState("held", dim, 0.0))

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Learning rate, the bias corrections."""
        return (learning_rate, bias_correction(step, self.b1), bias_correction(step, self.b2))

    def _step(self, inputs: RowInputs) -> RowOutputs:
        """`z = held + m̂ - q * row; row = minimum(z, q); held = z + q * row`, `q` being `(sqrt(v̂) + eps) / lr`."""
        # The paper keeps z and adds m̂ - (q_t - q_{t-1}) * row. It is held_{t-1} - q_{t-1} * row before the step, so
        # keeping `held` gives the same without q_{t-1}, which a row last used in another step does not know.
        gradient, row, (m, v, held), _, (learning_rate, correct1, correct2) = inputs
        moves = learning_rate > 0
        m = average(m, gradient, self.b1)
        v = average(v, gradient * gradient, self.b2)
        scale = (jnp.sqrt(v / correct2) + self.eps) / jnp.where(moves, learning_rate, 1.0)
        z = held + m / correct1 - scale * row
        new_row = _minimum(z, scale, self.l1, self.l2, self.l21)
        new_held = z + scale * new_row
        return RowOutputs(jnp.where(moves, new_row, row), (m, v, jnp.where(moves, new_held, held)))


def ftrl(
    learning_rate: LearningRate,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1: float = 0.0,
    l2: float = 0.0,
    l2_shrinkage: float = 0.0,
    beta: float = 0.0,
    *,
    limits: Limits | None = None,
) -> Ftrl:
    """FTRL-Proximal: the row that is best for all gradients so far, under L1 and L2.

    With `p(acc) = acc^-learning_rate_power`: `z += g + 2 · l2_shrinkage · row - (p(acc + g²) - p(acc)) / lr · row;
    acc += g²; row = -(z - l1 · sign(z)) / ((p(acc) + beta) / lr + 2 · l2)`, zero where `|z| <= l1`.

    A new row has z = 0, as in TensorFlow: of its initial numbers its first step keeps the share
    `1 - p(initial_accumulator_value) / p(acc)`, all of them if that value is 0, and none if its gradient is zero. After
    its first step it is exact, but for `l2_shrinkage` and changes of the learning rate: a gradient of zero changes
    neither acc, nor z, nor the row. Both of these act in the steps that use the row.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule; positive.
      learning_rate_power: at most 0; -0.5 is the paper's.
      initial_accumulator_value: what the accumulators of a new row hold.
      l1: strength of `l1 · |row|`, which makes single numbers zero.
      l2: strength of `l2 · row²` in what a row minimises.
      l2_shrinkage: strength of `l2_shrinkage · row²`, added to the loss of a step.
      beta: makes first steps shorter, as eps does elsewhere.
      limits: bounds around the step. A bound on the row is not known to z: the next step starts from z.

    Example:
      >>> [(state.name, state.initial_value) for state in ftrl(0.1, l1=1e-3).state_specs(dim=64)]
      [('accumulator', 0.1), ('z', 0.0)]

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013; the form of TensorFlow's
    FtrlOptimizer, `l1`, `l2`, `l2_shrinkage` being its regularization strengths. DeepRec's FtrlOptimizer on an
    EmbeddingVariable bounds the norm of a row by `l1`, not single numbers: that is `group_ftrl`.
    """
    return Ftrl(
        learning_rate, learning_rate_power, initial_accumulator_value, l1, l2, l2_shrinkage, beta, limits=limits
    )


def group_ftrl(
    learning_rate: LearningRate,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1: float = 0.0,
    l2: float = 0.0,
    l2_shrinkage: float = 0.0,
    beta: float = 0.0,
    l21: float = 0.0,
    *,
    limits: Limits | None = None,
) -> GroupFtrl:
    """`ftrl` with a group lasso on rows: rows that bring too little become zero, all of their numbers at once.

    acc and z as in `ftrl`; `s = z - l1 · sign(z)`, zero where `|z| <= l1`; the row is zero if
    `||s|| <= l21 · sqrt(dim)`, else `-(1 - l21 · sqrt(dim) / ||s||) · s / ((p(acc) + beta) / lr + 2 · l2)`. With
    `l21 = 0` it is `ftrl`, and as lazy as that.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule; positive.
      learning_rate_power: at most 0; -0.5 is the paper's.
      initial_accumulator_value: what the accumulators of a new row hold.
      l1: strength of the lasso on single numbers.
      l2: strength of `l2 · row²` in what a row minimises.
      l2_shrinkage: strength of `l2_shrinkage · row²`, added to the loss of a step.
      beta: makes first steps shorter.
      l21: strength of the lasso on rows; DeepRec's `l1_regularization_strength` is `l21 · sqrt(dim)`.
      limits: bounds around the step. A bound on the row is not known to z: the next step starts from z.

    Example:
      >>> [state.name for state in group_ftrl(0.1, l21=1e-3).state_specs(dim=64)]
      ['accumulator', 'z']

    Source: Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", 2021; the
    form of TFPlus's SparseGroupFtrl. With `l21 = l1 / sqrt(dim)` also DeepRec's FtrlOptimizer of strength l1 on an
    EmbeddingVariable.
    """
    return GroupFtrl(
        learning_rate, learning_rate_power, initial_accumulator_value, l1, l2, l2_shrinkage, beta, l21, limits=limits
    )


def group_adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    l1: float = 0.0,
    l2: float = 0.0,
    l21: float = 0.0,
    *,
    limits: Limits | None = None,
) -> GroupAdam:
    """Adam with a sparse group lasso: rows that bring too little become zero, all of their numbers at once.

    With the moments of `adam` and `q = (sqrt(v̂) + eps) / lr`: `z = held + m̂ - q · row`; `s = z - l1 · sign(z)`, zero
    where `|z| <= l1`; the row is zero if `||s|| <= l21 · sqrt(dim)`, else
    `-(1 - l21 · sqrt(dim) / ||s||) · s / (q + 2 · l2)`; then `held = z + q · row`, what the regularisers hold back.

    With `l1 = l2 = l21 = 0` nothing is held back and it is `adam`, at any schedule. Lazy as `adam`: the regularisers,
    too, act only in the steps that use the row.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule; positive.
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.
      l1: strength of the lasso on single numbers.
      l2: strength of `l2 · row²` in what a row minimises.
      l21: strength of the lasso on rows.
      limits: bounds around the step. A bound on the row is not known to `held`.

    Example:
      >>> [state.name for state in group_adam(1e-3, l21=1e-3).state_specs(dim=64)]
      ['m', 'v', 'held']

    Source: Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", 2021, its
    Group Adam.
    """
    return GroupAdam(learning_rate, b1, b2, eps, l1, l2, l21, limits=limits)
