"""Optimizers that divide by a running measure of squared gradients: RMSProp, Adadelta, Adagrad with decay.

All are row programs. RMSProp and Adadelta are lazy; Adagrad with decay is exact: it makes up for missed steps.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxsok import checks
from jaxsok.optimizers.fused import average, bias_correction, with_decay, with_momentum
from jaxsok.optimizers.limits import Limited, flag, function_of, not_negative, positive, share
from jaxsok.optimizers.protocol import RowInputs, RowOutputs, RowState

_DECAY_STEP = "a positive integer below 2**32: updates from one decay to the next"


@dataclasses.dataclass(frozen=True)
class RmsProp(Limited):
    """RMSProp: `v = decay v + (1 - decay) g²; row -= lr · g / sqrt(v + eps)`.

    Centered: `m = decay m + (1 - decay) g`, and `v - m²`, at least 0, stands for v. With momentum:
    `trace = lr · g / sqrt(v + eps) + momentum · trace; row -= trace`. With bias correction v and m are divided by
    `1 - decay^t`, t the number of updates of the collection, this one included.

    Lazy: v, m and trace of an unused row do not decay. In dense RMSProp its v would sink and its next step be longer.

    Args:
      decay: of the mean square, and of the mean.
      eps: added under the root, or without `eps_in_sqrt` to it.
      initial_scale: the mean square of a new row.
      centered: whether to divide by the deviation in place of the root of the mean square.
      momentum, nesterov: as for `sgd`.
      bias_correction: whether to correct for moments that began at zero.

    Example:
      >>> [state.name for state in rmsprop(1e-3, centered=True, momentum=0.9).state_specs(dim=64)]
      ['v', 'm', 'trace']

    Source: Tieleman, Hinton, "Lecture 6.5", 2012; centered as in Graves, "Generating Sequences With Recurrent Neural
    Networks", 2013; the form of `optax.rmsprop`.
    """

    name: ClassVar[str] = "rmsprop"
    decay: float = share(0.9)
    eps: float = positive(1e-8)
    initial_scale: float = not_negative(0.0)
    eps_in_sqrt: bool = flag(True)
    centered: bool = flag(False)
    momentum: float | None = share(None)
    nesterov: bool = flag(False)
    bias_correction: bool = flag(False)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        more = ["m"] * self.centered + ["trace"] * (self.momentum is not None)
        return (RowState("v", dim, self.initial_scale), *(RowState(name, dim, 0.0) for name in more))

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (v, *others), _, (learning_rate, count) = inputs
        correct = bias_correction(count, self.decay)
        v = average(v, gradient * gradient, self.decay)
        states, square = [v], v / correct if self.bias_correction else v
        if self.centered:
            m = average(others[0], gradient, self.decay)
            mean = m / correct if self.bias_correction else m
            # Except for rounding, a mean square is at least the square of the mean.
            square = jnp.maximum(square - mean * mean, 0.0)
            states.append(m)
        root = jnp.sqrt(square + self.eps) if self.eps_in_sqrt else jnp.sqrt(square) + self.eps
        update = learning_rate * (gradient / root)
        if self.momentum is not None:
            update, trace = with_momentum(update, others[-1], self.momentum, self.nesterov)
            states.append(trace)
        return RowOutputs(row - update, tuple(states))


@dataclasses.dataclass(frozen=True)
class Adadelta(Limited):
    """Adadelta: steps in the unit of the row, as long as those before them.

    `v = rho v + (1 - rho) g²; d = g · sqrt(u + eps) / sqrt(v + eps); u = rho u + (1 - rho) d²; row -= lr · d`, with u
    from before the step in d. Weight decay is coupled: `g` is `g + weight_decay * row` from the start.

    Lazy: v and u of an unused row do not decay, and the row does not shrink. The paper's `learning_rate` is 1.0.

    Args:
      rho: decay of both mean squares.
      eps: added under both roots.
      weight_decay: as for `sgd`.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012; the form of `optax.adadelta`.
    """

    name: ClassVar[str] = "adadelta"
    _states: ClassVar[tuple[str, ...]] = ("v", "u")  # the mean squares of each column's gradients and of its updates
    rho: float = share(0.9)
    eps: float = positive(1e-6)
    weight_decay: float = not_negative(0.0)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (v, u), _, (learning_rate, _) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        v = average(v, gradient * gradient, self.rho)
        update = jnp.sqrt(u + self.eps) / jnp.sqrt(v + self.eps) * gradient
        return RowOutputs(row - learning_rate * update, (v, average(u, update * update, self.rho)))


@dataclasses.dataclass(frozen=True)
class AdagradDecay(Limited):
    """Adagrad whose accumulator shrinks periodically, so that steps of a long training do not vanish.

    In updates `decay_step`, `2 · decay_step`, ... of the collection `acc = max(acc · decay_rate, initial)`; in every
    update that uses the row `acc += g²; row -= lr · g / sqrt(acc)`.

    Exact without weight decay: when a row is used again it makes up for all missed decays at once,
    `max(acc · decay_rate^missed, initial)`; DeepRec's own for one a use at most. Weight decay is coupled and lazy.

    Args:
      initial_accumulator_value: the accumulators of a new row, and their least value; positive.
      decay_step: updates of the collection from one decay to the next.
      decay_rate: the share that a decay leaves, in (0, 1).
      weight_decay: as for `sgd`.

    Source: DeepRec's AdagradDecayOptimizer.
    """

    name: ClassVar[str] = "adagrad_decay"
    initial_accumulator_value: float = positive(0.1)
    decay_step: int = checks.declare(100_000, checks.integer, low=1, high=2**32 - 1, wanted=_DECAY_STEP)
    decay_rate: float = checks.declare(
        0.9, checks.number, low=checks.ABOVE_ZERO, high=1 - 2.0**-24, wanted="a number in (0.0, 1.0)"
    )
    weight_decay: float = not_negative(0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return (RowState("accumulator", dim, self.initial_accumulator_value), RowState("num_decays", 1, 0.0))

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        # (step + 1) // decay_step, where step + 1 may be 2**32.
        step, decay_step = jnp.asarray(step).astype(jnp.uint32), jnp.uint32(self.decay_step)
        before = step // decay_step
        num_due = before + (step % decay_step == decay_step - jnp.uint32(1)).astype(jnp.uint32)
        return (learning_rate, jnp.maximum(before, num_due).astype(jnp.float32))

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (accumulator, num_decays), _, (learning_rate, num_due) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        # max(max(a r, f) r, f) is max(a r², f), as f r <= f: all missed decays are one. A new row, with a = f, has
        # none to make up for, though its count begins at 0. It is ahead only if decay_step was another before.
        missed = jnp.maximum(num_due - num_decays, 0.0)
        decayed = accumulator * jnp.power(self.decay_rate, missed)
        accumulator = jnp.maximum(decayed, self.initial_accumulator_value) + gradient * gradient
        num_decays = jnp.broadcast_to(num_due, num_decays.shape)
        return RowOutputs(row - learning_rate * (gradient / jnp.sqrt(accumulator)), (accumulator, num_decays))


rmsprop = function_of(RmsProp)
adadelta = function_of(Adadelta)
adagrad_decay = function_of(AdagradDecay)
