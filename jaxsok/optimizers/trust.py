"""Optimizers with a trust ratio: a row moves in proportion to its own norm, as a layer does in the papers.

Both are row programs and lazy: a row that no key of the step uses keeps row and state.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxsok.optimizers.fused import with_decay, with_momentum
from jaxsok.optimizers.limits import Limited, flag, function_of, norm, not_negative, positive, share
from jaxsok.optimizers.moments import AdamW
from jaxsok.optimizers.protocol import RowInputs, RowOutputs


def _scale_to_row(update: Array, row: Array, coefficient: float = 1.0, eps: float = 0.0) -> Array:
    """Scales an update by `coefficient * ||row|| / (||update|| + eps)`; leaves it where one of the norms is zero."""
    of_row, of_update = norm(row), norm(update)
    is_zero = jnp.logical_or(of_row == 0, of_update == 0)
    return update * jnp.where(is_zero, 1.0, coefficient * of_row / jnp.where(is_zero, 1.0, of_update + eps))


@dataclasses.dataclass(frozen=True)
class Lamb(AdamW):
    """LAMB, with a row in the place of a layer: `u = m̂ / (sqrt(v̂) + eps) + weight_decay · row`, scaled to the row.

    `row -= lr · ||row|| / ||u|| · u`, or `lr · u` where one of the norms is zero. The moments are those of `adam`. Lazy
    in moments and weight decay, which is decoupled and part of what is scaled.

    Args:
      b1, b2, eps: as for `adam`.
      weight_decay: the share of the row that is added to the update.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020; the form of
    `optax.lamb` with each row a parameter of its own, as FBGEMM's LAMB.
    """

    name: ClassVar[str] = "lamb"
    eps: float = positive(1e-6)
    weight_decay: float = not_negative(0.0)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        update, states = self._update(inputs)
        return RowOutputs(inputs.row - inputs.hyper[0] * _scale_to_row(update, inputs.row), states)


@dataclasses.dataclass(frozen=True)
class Lars(Limited):
    """LARS, with a row in the place of a layer: gradient descent whose steps are scaled to the row, with momentum.

    `u = lr · trust_coefficient · ||row|| / (||g|| + eps) · g`, or `lr · g` where one of the norms is zero;
    `trace = u + momentum · trace; row -= trace`. Weight decay is coupled: `g` is `g + weight_decay * row` from the
    start. Lazy: the trace of an unused row does not carry it on, and the row does not shrink.

    Args:
      weight_decay: as for `sgd`.
      trust_coefficient: how far a step takes a row, in units of its norm and of the learning rate.
      eps: added to the norm of the gradient.
      momentum, nesterov: as for `sgd`.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017; the form of `optax.lars` with
    each row a parameter of its own.
    """

    name: ClassVar[str] = "lars"
    _states: ClassVar[tuple[str, ...]] = ("trace",)  # the trace of each column
    weight_decay: float = not_negative(0.0)
    trust_coefficient: float = positive(0.001)
    eps: float = not_negative(0.0)
    momentum: float = share(0.9)
    nesterov: bool = flag(False)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (trace,), _, (learning_rate, _) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        update = learning_rate * _scale_to_row(gradient, row, self.trust_coefficient, self.eps)
        update, trace = with_momentum(update, trace, self.momentum, self.nesterov)
        return RowOutputs(row - update, (trace,))


lamb = function_of(Lamb)
lars = function_of(Lars)
