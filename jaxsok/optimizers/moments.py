"""Optimizers of moments: relatives of Adam that look at each column, or at the mean over a row, by itself.

All are row programs and lazy: a row that no key of the step uses keeps row and moments.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxsok.optimizers.fused import Adam, average, bias_correction
from jaxsok.optimizers.limits import Limited, function_of, not_negative, positive, share
from jaxsok.optimizers.protocol import PROGRAM, RowInputs, RowOutputs, RowState


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """Lazy Adam with decoupled weight decay: `row -= lr · (m̂ / (sqrt(v̂) + eps) + weight_decay · row)`.

    The moments are those of `adam`. Lazy: a row shrinks only in the steps that use it; dense AdamW shrinks all rows in
    every step. A row used in every step is equal in both.

    Args:
      b1, b2, eps: as for `adam`.
      weight_decay: the share of the row, times the learning rate, that a step takes away.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019; the form of `optax.adamw`.
    """

    _own_kernel: ClassVar[int] = PROGRAM
    name: ClassVar[str] = "adamw"
    eps: float = positive(1e-8)
    weight_decay: float = not_negative(1e-4)

    def _update(self, inputs: RowInputs) -> tuple[Array, tuple[Array, Array]]:
        update, states = super()._update(inputs)
        return update + self.weight_decay * inputs.row, states


@dataclasses.dataclass(frozen=True)
class RowwiseAdam(AdamW):
    """Lazy Adam with one second moment a row: `v = b2 v + (1 - b2) mean(g²)`. Nearly half the state of `adam`.

    `m = b1 m + (1 - b1) g; row -= lr · (m̂ / (sqrt(v̂) + eps) + weight_decay · row)`, with the bias corrections of
    `adam`. Lazy as `adamw`, with the same arguments.

    Example:
      >>> [(state.name, state.dim) for state in rowwise_adam(1e-3).state_specs(dim=64)]
      [('m', 64), ('v', 1)]

    Source: FBGEMM's PARTIAL_ROWWISE_ADAM.
    """

    name: ClassVar[str] = "rowwise_adam"
    weight_decay: float = not_negative(0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return (RowState("m", dim, 0.0), RowState("v", 1, 0.0))

    def _squares(self, gradient: Array) -> Array:
        return jnp.mean(gradient * gradient)


@dataclasses.dataclass(frozen=True)
class NAdam(AdamW):
    """Lazy Adam with Nesterov's momentum: `row -= lr · (n / (sqrt(v̂) + eps) + weight_decay · row)`.

    The moments and `v̂` are those of `adam`, and `n = b1 m / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t)` looks a step
    ahead. Lazy as `adamw`, with the same arguments.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016; the form of `optax.nadam` and `optax.nadamw`.
    TensorFlow's Nadam differs: it also warms `b1` up.
    """

    name: ClassVar[str] = "nadam"
    weight_decay: float = not_negative(0.0)

    def _direction(self, m: Array, gradient: Array, count: Array) -> Array:
        correct, correct_ahead = bias_correction(count, self.b1), bias_correction(count + 1, self.b1)
        return self.b1 * (m / correct_ahead) + (1 - self.b1) * (gradient / correct)


@dataclasses.dataclass(frozen=True)
class Adamax(Limited):
    """Adamax: `u = max(b2 u, |g| + eps); row -= lr · (m̂ / u + weight_decay · row)`.

    `m` and `m̂` are those of `adam`. Lazy: m and u of an unused row do not decay, and the row does not move. Weight
    decay is decoupled.

    Args:
      b1, b2: decays of the first and the infinite moment.
      eps: added to the gradient's magnitude.
      weight_decay: as for `adamw`.

    Source: Kingma, Ba, "Adam", 2015, section 7.1; the form of `optax.adamax` and `optax.adamaxw`.
    """

    name: ClassVar[str] = "adamax"
    _states: ClassVar[tuple[str, ...]] = ("m", "u")  # first and infinite moment of each column
    b1: float = share(0.9)
    b2: float = share(0.999)
    eps: float = positive(1e-8)
    weight_decay: float = not_negative(0.0)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (m, u), _, (learning_rate, count) = inputs
        m = average(m, gradient, self.b1)
        u = jnp.maximum(self.b2 * u, jnp.abs(gradient) + self.eps)
        update = (m / bias_correction(count, self.b1)) / u + self.weight_decay * row
        return RowOutputs(row - learning_rate * update, (m, u))


@dataclasses.dataclass(frozen=True)
class Lion(Limited):
    """Lion: `row -= lr · (sign(b1 m + (1 - b1) g) + weight_decay · row); m = b2 m + (1 - b2) g`.

    Every column moves by the learning rate, whatever its gradient is, or not at all where the sign is of zero. Lazy: an
    unused row keeps its moment and stays, where dense Lion would carry it on at full speed. Weight decay is decoupled.

    Args:
      b1, b2: share of the moment in the direction, and its decay.
      weight_decay: as for `adamw`.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023; the form of `optax.lion`.
    """

    name: ClassVar[str] = "lion"
    _states: ClassVar[tuple[str, ...]] = ("m",)  # first moment of each column
    b1: float = share(0.9)
    b2: float = share(0.99)
    weight_decay: float = not_negative(1e-3)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (m,), _, (learning_rate, _) = inputs
        update = jnp.sign(average(m, gradient, self.b1)) + self.weight_decay * row
        return RowOutputs(row - learning_rate * update, (average(m, gradient, self.b2),))


adamw = function_of(AdamW)
rowwise_adam = function_of(RowwiseAdam)
nadam = function_of(NAdam)
adamax = function_of(Adamax)
lion = function_of(Lion)
