"""The optimizers that have kernels of their own: one pass over the touched rows.

With momentum, weight decay or limits they run as row programs, like all others. All are lazy: a row that no key of the
step uses does not move, nor does its state. Each row steps once, by the sum of its gradients.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsok.optimizers.limits import Limited, flag, function_of, not_negative, share
from jaxsok.optimizers.protocol import RowInputs, RowOutputs, RowState


@dataclasses.dataclass(frozen=True)
class Sgd(Limited):
    """Gradient descent: `row -= lr * g`; with momentum `trace = g + momentum * trace; row -= lr * trace`.

    Nesterov's form moves by `g + momentum * trace`, with the new trace. Weight decay is coupled: `g` is
    `g + weight_decay * row` from the start.

    Without momentum and weight decay it is exact: dense gradient descent does not move an unused row either. With them
    it is lazy: the trace of an unused row neither decays nor moves the row, and the row does not shrink.

    Args:
      momentum: decay of the trace; None: no trace.
      nesterov: whether to look one step ahead; needs momentum.
      weight_decay: the share of the row that is added to its gradient.

    Example:
      >>> sgd(0.1).state_specs(dim=64), sgd(0.1, momentum=0.9).state_specs(dim=64)
      ((), (RowState(name='trace', dim=64, initial_value=0.0),))

    Source: Polyak, "Some Methods of Speeding Up the Convergence of Iteration Methods", 1964; Sutskever et al., "On the
    Importance of Initialization and Momentum in Deep Learning", 2013; the form of `optax.sgd`.
    """

    _own_kernel: ClassVar[int] = 0
    name: ClassVar[str] = "sgd"
    momentum: float | None = share(None)
    nesterov: bool = flag(False)
    weight_decay: float = not_negative(0.0)

    def _is_plain(self) -> bool:
        return self.momentum is None and self.weight_decay == 0

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return () if self.momentum is None else (RowState("trace", dim, 0.0),)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, states, _, (learning_rate, _) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        if self.momentum is None:
            return RowOutputs(row - learning_rate * gradient, ())
        gradient, trace = with_momentum(gradient, states[0], self.momentum, self.nesterov)
        return RowOutputs(row - learning_rate * gradient, (trace,))


@dataclasses.dataclass(frozen=True)
class Adagrad(Limited):
    """Adagrad: `acc += g²; row -= lr * g / sqrt(acc + eps)`, zero where `acc` is 0.

    Without weight decay it is exact: dense Adagrad does not move a row whose gradient is zero. Weight decay is coupled
    (`g` is `g + weight_decay * row` from the start) and lazy: unused rows do not shrink.

    Args:
      initial_accumulator_value: the accumulators of a new row.
      eps: added under the root, or to the root.
      weight_decay: as for `sgd`.
      eps_in_sqrt: whether eps is under the root, as in Optax; False: `sqrt(acc) + eps`, as in PyTorch and FBGEMM.

    Example:
      >>> adagrad(0.1).state_specs(dim=64)
      (RowState(name='accumulator', dim=64, initial_value=0.1),)

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011; the form of `optax.adagrad`.
    """

    _own_kernel: ClassVar[int] = 1
    name: ClassVar[str] = "adagrad"
    initial_accumulator_value: float = not_negative(0.1)
    eps: float = not_negative(1e-7)
    weight_decay: float = not_negative(0.0)
    eps_in_sqrt: bool = flag(True)

    def _is_plain(self) -> bool:
        return self.weight_decay == 0 and self.eps_in_sqrt == type(self).eps_in_sqrt

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return (RowState("accumulator", dim, self.initial_accumulator_value),)

    def _kernel_hyper(self, learning_rate: Any, count: Float[Array, ""]) -> tuple[Any, ...]:
        return (learning_rate, self.eps)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (accumulator,), _, (learning_rate, _) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        accumulator = accumulator + gradient * gradient
        inverse = jnp.where(accumulator > 0, 1 / self._root(accumulator), 0.0)
        return RowOutputs(row - learning_rate * (gradient * inverse), (accumulator,))

    def _root(self, squares: Array) -> Array:
        return jnp.sqrt(squares + self.eps) if self.eps_in_sqrt else jnp.sqrt(squares) + self.eps


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one accumulator a row: `acc += mean(g²); row -= lr * g / (sqrt(acc) + eps)`.

    Exact and lazy as `adagrad`, with the same arguments; but `eps` is added to the root, unless `eps_in_sqrt`. With
    `eps=0` a gradient of zero makes a row NaN whose accumulator is zero, as in FBGEMM.

    Source: Gupta, Gangrade et al., "Training Recommender Systems at Scale", 2021; the form of FBGEMM's
    EXACT_ROWWISE_ADAGRAD, with its weight decay mode L2.
    """

    _own_kernel: ClassVar[int] = 2
    name: ClassVar[str] = "rowwise_adagrad"
    initial_accumulator_value: float = not_negative(0.0)
    eps: float = not_negative(1e-8)
    eps_in_sqrt: bool = flag(False)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return (RowState("accumulator", 1, self.initial_accumulator_value),)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, (accumulator,), _, (learning_rate, _) = inputs
        gradient = with_decay(gradient, row, self.weight_decay)
        accumulator = accumulator + jnp.mean(gradient * gradient)
        return RowOutputs(row - learning_rate / self._root(accumulator) * gradient, (accumulator,))


@dataclasses.dataclass(frozen=True)
class Adam(Limited):
    """Lazy Adam: the moments of a row move only when the row is used.

    `m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; row -= lr · m̂ / (sqrt(v̂) + eps)` with `m̂ = m / (1 - b1^t)`, `v̂ =
    v / (1 - b2^t)` and t the number of updates of the collection, this one included. Dense Adam also moves unused rows
    and decays their moments; a row used in every step is equal in both.

    Args:
      b1, b2: decays of the first and the second moment.
      eps: added to the root. With 0, a gradient of zero makes a row NaN whose moments are zero, as in Optax.

    Example:
      >>> [state.name for state in adam(1e-3).state_specs(dim=64)]
      ['m', 'v']

    Source: Kingma, Ba, "Adam", 2015; the form of `optax.adam`, lazy as TensorFlow's LazyAdam.
    """

    _own_kernel: ClassVar[int] = 3
    name: ClassVar[str] = "adam"
    _states: ClassVar[tuple[str, ...]] = ("m", "v")  # first and second moment of each column
    b1: float = share(0.9)
    b2: float = share(0.999)
    eps: float = not_negative(1e-8)

    def _kernel_hyper(self, learning_rate: Any, count: Float[Array, ""]) -> tuple[Any, ...]:
        corrections = bias_correction(count, self.b1), bias_correction(count, self.b2)
        return (learning_rate, self.b1, self.b2, self.eps, *corrections, 1 - self.b1, 1 - self.b2)

    def _step(self, inputs: RowInputs) -> RowOutputs:
        update, states = self._update(inputs)
        return RowOutputs(inputs.row - inputs.hyper[0] * update, states)

    def _update(self, inputs: RowInputs) -> tuple[Array, tuple[Array, Array]]:
        """Returns the update before the learning rate, and the moments."""
        gradient, _, (m, v), _, (_, count) = inputs
        m = average(m, gradient, self.b1)
        v = average(v, self._squares(gradient), self.b2)
        root = jnp.sqrt(v / bias_correction(count, self.b2)) + self.eps
        return self._direction(m, gradient, count) / root, (m, v)

    def _squares(self, gradient: Array) -> Array:
        """Returns the squares that the second moment averages."""
        return gradient * gradient

    def _direction(self, m: Array, gradient: Array, count: Array) -> Array:
        """Returns the first moment, corrected."""
        return m / bias_correction(count, self.b1)


def bias_correction(count: Float[Array, ""], decay: float) -> Float[Array, ""]:
    """Returns 1 - decay^count; in a row program XLA computes it, once a step."""
    return 1 - jnp.float32(decay) ** count


def average(old: Array, new: Array, decay: float) -> Array:
    """Steps a moving average."""
    return decay * old + (1 - decay) * new


def with_decay(gradient: Array, row: Array, weight_decay: float) -> Array:
    """Adds the gradient of `weight_decay / 2 * ||row||²`."""
    return gradient if weight_decay == 0 else gradient + weight_decay * row


def with_momentum(update: Array, trace: Array, momentum: float, nesterov: bool) -> tuple[Array, Array]:
    """Returns the update after momentum, and the trace."""
    trace = update + momentum * trace
    return (update + momentum * trace if nesterov else trace), trace


sgd = function_of(Sgd)
adagrad = function_of(Adagrad)
rowwise_adagrad = function_of(RowwiseAdagrad)
adam = function_of(Adam)
