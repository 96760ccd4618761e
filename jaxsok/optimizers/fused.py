"""Optimizers whose step runs inside the update kernel, in one pass over the touched rows.

All are lazy: a row that no key of the step uses does not move, and neither does its state. Row gradients are summed
over all uses of the row before the step, so each row steps once.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxsok.optimizers.protocol import LearningRate, Optimizer, RowInputs, RowOutputs, RowState


@dataclasses.dataclass(frozen=True)
class Sgd(Optimizer):
    """See `sgd`."""

    kernel: ClassVar[int] = 0
    name: ClassVar[str] = "sgd"

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """None."""
        return ()

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """The learning rate."""
        return (learning_rate,)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        """`row -= lr * g`."""
        gradient, row, _, _, (learning_rate,) = inputs
        return RowOutputs(row - learning_rate * gradient, ())


@dataclasses.dataclass(frozen=True)
class Adagrad(Optimizer):
    """See `adagrad`."""

    kernel: ClassVar[int] = 1
    name: ClassVar[str] = "adagrad"
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check("initial_accumulator_value", 0.0)
        self._check("eps", 0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """One accumulator for each column."""
        return (RowState("accumulator", dim, self.initial_accumulator_value),)

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Learning rate, eps."""
        return (learning_rate, self.eps)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        """`acc += g²; row -= lr * g / sqrt(acc + eps)`, zero where `acc` is 0."""
        gradient, row, (accumulator,), _, (learning_rate, eps) = inputs
        accumulator = accumulator + gradient * gradient
        inverse = jnp.where(accumulator > 0, 1 / jnp.sqrt(accumulator + eps), 0.0)
        return RowOutputs(row - learning_rate * (gradient * inverse), (accumulator,))


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """See `rowwise_adagrad`."""

    kernel: ClassVar[int] = 2
    name: ClassVar[str] = "rowwise_adagrad"
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check("initial_accumulator_value", 0.0)
        self._check("eps", 0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """One accumulator for the row."""
        return (RowState("accumulator", 1, self.initial_accumulator_value),)

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Learning rate, eps."""
        return (learning_rate, self.eps)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        """`acc += mean(g²); row -= lr * g / (sqrt(acc) + eps)`."""
        gradient, row, (accumulator,), _, (learning_rate, eps) = inputs
        accumulator = accumulator + jnp.mean(gradient * gradient)
        return RowOutputs(row - learning_rate / (jnp.sqrt(accumulator) + eps) * gradient, (accumulator,))


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """See `adam`."""

    kernel: ClassVar[int] = 3
    name: ClassVar[str] = "adam"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuses hyper-parameters that cannot be meant."""
        super().__post_init__()
        self._check("b1", 0.0, 1.0)
        self._check("b2", 0.0, 1.0)
        self._check("eps", 0.0)

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """First and second moment of each column."""
        return (RowState("m", dim, 0.0), RowState("v", dim, 0.0))

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Learning rate, b1, b2, eps, the bias corrections, 1 - b1, 1 - b2."""
        count = jnp.asarray(step).astype(jnp.float32) + jnp.float32(1)
        correct1 = 1 - jnp.float32(self.b1) ** count
        correct2 = 1 - jnp.float32(self.b2) ** count
        return (learning_rate, self.b1, self.b2, self.eps, correct1, correct2, 1 - self.b1, 1 - self.b2)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        """`m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; row -= lr * m̂ / (sqrt(v̂) + eps)`."""
        gradient, row, (m, v), _, (learning_rate, b1, b2, eps, correct1, correct2, rest1, rest2) = inputs
        m = b1 * m + rest1 * gradient
        v = b2 * v + rest2 * (gradient * gradient)
        return RowOutputs(row - learning_rate * ((m / correct1) / (jnp.sqrt(v / correct2) + eps)), (m, v))


def sgd(learning_rate: LearningRate) -> Sgd:
    """Plain gradient descent: `row -= lr * g`.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule.

    Example:
      >>> sgd(0.1).state_specs(dim=64)
      ()

    Source: as `optax.sgd` without momentum.
    """
    return Sgd(learning_rate)


def adagrad(learning_rate: LearningRate, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> Adagrad:
    """Adagrad: `acc += g²; row -= lr * g / sqrt(acc + eps)`, zero where `acc` is 0.

    Exact on touched rows and untouched alike: dense Adagrad does not move a row whose gradient is zero.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule.
      initial_accumulator_value: what the accumulators of a new row hold.
      eps: added under the root.

    Example:
      >>> adagrad(0.1).state_specs(dim=64)
      (RowState(name='accumulator', dim=64, initial_value=0.1),)

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011; the form of `optax.adagrad`.
    """
    return Adagrad(learning_rate, initial_accumulator_value, eps)


def rowwise_adagrad(
    learning_rate: LearningRate, initial_accumulator_value: float = 0.0, eps: float = 1e-8
) -> RowwiseAdagrad:
    """Adagrad with one accumulator a row: `acc += mean(g²); row -= lr * g / (sqrt(acc) + eps)`.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule.
      initial_accumulator_value: what the accumulator of a new row holds.
      eps: added to the root.

    Example:
      >>> rowwise_adagrad(0.1).state_specs(dim=64)
      (RowState(name='accumulator', dim=1, initial_value=0.0),)

    Source: Gupta, Gangrade et al., "Training Recommender Systems at Scale", 2021; the form of FBGEMM's
    EXACT_ROWWISE_ADAGRAD.
    """
    return RowwiseAdagrad(learning_rate, initial_accumulator_value, eps)


def adam(learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Adam:
    """Lazy Adam: the moments of a row move only when the row is used.

    `m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; row -= lr · m̂ / (sqrt(v̂) + eps)` with
    `m̂ = m / (1 - b1^t)`, `v̂ = v / (1 - b2^t)` and t the number of updates of the collection, this one included.
    Dense Adam also decays the moments of unused rows and moves them: a row used in every step is equal in both.

    Args:
      learning_rate: a number, a 0-d array, or an Optax schedule.
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.

    Example:
      >>> [state.name for state in adam(1e-3).state_specs(dim=64)]
      ['m', 'v']

    Source: Kingma, Ba, "Adam", 2015; the form of `optax.adam`, lazy as TensorFlow's LazyAdam.
    """
    return Adam(learning_rate, b1, b2, eps)
