"""Optimizers that drive rows to zero: FTRL, and the sparse group lasso on FTRL and on Adam.

They hold, for each column, a sum z of gradients, and a row follows from it in closed form: the minimum of
`z·x + scale/2·x² + l1·|x| + l2·x² + l21·sqrt(dim)·||x||`. Where z is small that minimum is exactly zero. All are row
programs. A learning rate of zero, as a schedule may begin with, leaves a row and its z as they are.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxsok import checks
from jaxsok.optimizers.fused import average, bias_correction
from jaxsok.optimizers.limits import Limited, function_of, norm, not_negative, positive, share
from jaxsok.optimizers.protocol import RowInputs, RowOutputs, RowState


def _minimum(z: Array, scale: Array, l1: float, l2: float, l21: float) -> Array:
    """Returns the row that a sum of gradients stands for; zeros at a scale of zero. NaN stays NaN."""
    kept = jnp.where(jnp.abs(z) <= l1, 0.0, l1 * jnp.sign(z) - z)
    if l21 > 0:
        length, threshold = norm(kept), l21 * math.sqrt(z.shape[-1])
        factor = 1 - threshold / jnp.where(length <= threshold, 1.0, length)
        kept = jnp.where(length <= threshold, 0.0, kept * factor)
    divisor = scale + 2 * l2
    return jnp.where(divisor <= 0, 0.0, kept / jnp.where(divisor <= 0, 1.0, divisor))


@dataclasses.dataclass(frozen=True)
class Ftrl(Limited):
    """FTRL-Proximal: the row that is best for all gradients so far, under L1 and L2.

    With `p(acc) = acc^-learning_rate_power`: `z += g + 2 · l2_shrinkage · row - (p(acc + g²) - p(acc)) / lr · row;
    acc += g²; row = -(z - l1 · sign(z)) / ((p(acc) + beta) / lr + 2 · l2)`, zero where `|z| <= l1`.

    A new row has z = 0, as in TensorFlow: its first step keeps the share `1 - p(initial_accumulator_value) / p(acc)` of
    its initial numbers, all of them if that value is 0, none if its gradient is zero. After that it is exact, but for
    `l2_shrinkage` and changes of the learning rate, which act only in the steps that use the row: a gradient of zero
    changes neither acc, nor z, nor the row.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule; positive.
      learning_rate_power: at most 0; -0.5 is the paper's.
      initial_accumulator_value: the accumulators of a new row.
      l1: strength of `l1 · |row|`, which makes single numbers zero.
      l2: strength of `l2 · row²`, added to the sum that a row minimises.
      l2_shrinkage: strength of `l2_shrinkage · row²`, added to the loss of a step.
      beta: makes first steps shorter, as eps does elsewhere.
      limits: bounds around the step. z does not know a bound on the row: the next step starts from z.

    Example:
      >>> [(state.name, state.initial_value) for state in ftrl(0.1, l1=1e-3).state_specs(dim=64)]
      [('accumulator', 0.1), ('z', 0.0)]

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013; the form of TensorFlow's
    FtrlOptimizer, `l1`, `l2`, `l2_shrinkage` being its regularization strengths. DeepRec's FtrlOptimizer on an
    EmbeddingVariable bounds the norm of a row by `l1`, not single numbers: that is `group_ftrl`.
    """

    name: ClassVar[str] = "ftrl"
    _needs_positive_rate: ClassVar[bool] = True
    l21 = 0.0  # a field of GroupFtrl; not annotated here, so that it is none of this class
    learning_rate_power: float = checks.declare(-0.5, checks.number, high=0, wanted="a number not above 0")
    initial_accumulator_value: float = not_negative(0.1)
    l1: float = not_negative(0.0)
    l2: float = not_negative(0.0)
    l2_shrinkage: float = not_negative(0.0)
    beta: float = not_negative(0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return (RowState("accumulator", dim, self.initial_accumulator_value), RowState("z", dim, 0.0))

    def _power(self, accumulator: Array) -> Array:
        if self.learning_rate_power == -0.5:
            return jnp.sqrt(accumulator)
        return jnp.power(accumulator, -self.learning_rate_power)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (accumulator, z), _, (learning_rate, _) = inputs
        stays = learning_rate <= 0
        rate = jnp.where(stays, 1.0, learning_rate)
        more = accumulator + gradient * gradient
        power = self._power(more)
        pull = gradient if self.l2_shrinkage == 0 else gradient + 2 * self.l2_shrinkage * row
        new_z = z + pull - (power - self._power(accumulator)) / rate * row
        new_row = _minimum(new_z, (power + self.beta) / rate, self.l1, self.l2, self.l21)
        states = jnp.where(stays, accumulator, more), jnp.where(stays, z, new_z)
        return RowOutputs(jnp.where(stays, row, new_row), states)


@dataclasses.dataclass(frozen=True)
class GroupFtrl(Ftrl):
    """`ftrl` with a group lasso on rows: rows that bring too little become zero, all of their numbers at once.

    acc and z as in `ftrl`; `s = z - l1 · sign(z)`, zero where `|z| <= l1`; the row is zero if
    `||s|| <= l21 · sqrt(dim)`, else `-(1 - l21 · sqrt(dim) / ||s||) · s / ((p(acc) + beta) / lr + 2 · l2)`. With
    `l21 = 0` it is `ftrl`, and as lazy as that.

    Args:
      l21: strength of the lasso on rows; DeepRec's `l1_regularization_strength` is `l21 · sqrt(dim)`. The other
        arguments are those of `ftrl`.

    Source: Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", 2021; the
    form of TFPlus's SparseGroupFtrl. With `l21 = l1 / sqrt(dim)` also DeepRec's FtrlOptimizer of strength l1 on an
    EmbeddingVariable.
    """

    name: ClassVar[str] = "group_ftrl"
    l21: float = not_negative(0.0)


@dataclasses.dataclass(frozen=True)
class GroupAdam(Limited):
    """Adam with a sparse group lasso: rows that bring too little become zero, all of their numbers at once.

    With the moments of `adam` and `q = (sqrt(v̂) + eps) / lr`: `z = held + m̂ - q · row`; `s = z - l1 · sign(z)`, zero
    where `|z| <= l1`; the row is zero if `||s|| <= l21 · sqrt(dim)`, else
    `-(1 - l21 · sqrt(dim) / ||s||) · s / (q + 2 · l2)`; then `held = z + q · row`, which the regularisers hold back.

    With `l1 = l2 = l21 = 0` it is `adam`, at any schedule. Lazy as `adam`: the regularisers also act only in the steps
    that use the row.

    Args:
      learning_rate: positive, as for `ftrl`.
      b1, b2, eps: as for `adam`.
      l1: strength of the lasso on single numbers.
      l2: strength of `l2 · row²`, added to the sum that a row minimises.
      l21: strength of the lasso on rows.
      limits: bounds around the step; `held` does not know one on the row.

    Source: Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", 2021, its
    Group Adam.
    """

    name: ClassVar[str] = "group_adam"
    _needs_positive_rate: ClassVar[bool] = True
    _states: ClassVar[tuple[str, ...]] = ("m", "v", "held")
    b1: float = share(0.9)
    b2: float = share(0.999)
    eps: float = positive(1e-8)
    l1: float = not_negative(0.0)
    l2: float = not_negative(0.0)
    l21: float = not_negative(0.0)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        # The paper keeps z and adds m̂ - (q_t - q_{t-1}) * row. It is held_{t-1} - q_{t-1} * row before the step, so
        # keeping `held` gives the same without q_{t-1}, which a row last used in another step does not know.
        gradient, row, (m, v, held), _, (learning_rate, count) = inputs
        stays = learning_rate <= 0
        m = average(m, gradient, self.b1)
        v = average(v, gradient * gradient, self.b2)
        scale = (jnp.sqrt(v / bias_correction(count, self.b2)) + self.eps) / jnp.where(stays, 1.0, learning_rate)
        z = held + m / bias_correction(count, self.b1) - scale * row
        new_row = _minimum(z, scale, self.l1, self.l2, self.l21)
        new_held = z + scale * new_row
        return RowOutputs(jnp.where(stays, row, new_row), (m, v, jnp.where(stays, held, new_held)))


ftrl = function_of(Ftrl)
group_ftrl = function_of(GroupFtrl)
group_adam = function_of(GroupAdam)
