"""The interface of sparse optimizers: their per-row state, and the step of one row.

An optimizer is a frozen, hashable declaration. The arrays live in the store, and hyper-parameters reach the kernel as
an operand, so changing them recompiles nothing.

A step is a pure JAX function of one row, `step_row`. It is compiled to a row program (program.py) that the update
kernel runs on each used row, in the same pass that sums its gradients. The commonest optimizers also name their own
kernel, which does the same and is used where no limits are set.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxsok import checks
from jaxsok.types import NUM_HYPER

PROGRAM: int = 4
"""The number in `ffi/core/row_update.h` of the row program."""

LearningRate = float | Callable[[Any], Any]
"""A number, or an Optax schedule: a function of the step, 0 at the first update."""


@dataclasses.dataclass(frozen=True)
class RowState:
    """A piece of optimizer state, with `initial_value` in new rows."""

    name: str
    dim: int
    """Numbers per row: the table's dim, or 1."""
    initial_value: float


class RowInputs(NamedTuple):
    """The inputs of a step of one row, float32; `hyper` is the result of `Optimizer.hyper`."""

    gradient: Float[Array, " dim"]
    """The row's gradient, summed over its uses and scaled by row_gradient."""
    row: Float[Array, " dim"]
    states: tuple[Float[Array, " _"], ...]
    """Optimizer state, in the order of `state_specs`: `[dim]` or `[1]`."""
    num_uses: Float[Array, ""]
    """Uses of the row in the step, on all shards."""
    hyper: tuple[Float[Array, ""], ...]


class RowOutputs(NamedTuple):
    """The results of a step of one row, in the shapes of its inputs."""

    row: Float[Array, " dim"]
    states: tuple[Float[Array, " _"], ...]


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """A rule by which the rows of a table move."""

    name: ClassVar[str]
    """The name of its function in `jaxsok.optim`."""

    learning_rate: LearningRate

    def __post_init__(self) -> None:
        rate = self.learning_rate
        name = f"optim.{self.name}"
        if isinstance(rate, jax.core.Tracer):
            raise TypeError(
                f"{name}: learning_rate: got a traced value; an optimizer is declared outside jit. Pass the "
                "traced rate to collection.update(..., learning_rate=rate)."
            )
        if isinstance(rate, (np.ndarray, np.generic, jax.Array)):
            if np.ndim(rate) != 0:
                raise ValueError(f"{name}: learning_rate: got shape {list(np.shape(rate))}, wanted a scalar.")
            rate = float(rate)
            object.__setattr__(self, "learning_rate", rate)
        if not callable(rate) and not (checks.is_number(rate) and abs(rate) <= checks.LARGEST_FLOAT32):
            raise TypeError(f"{name}: learning_rate: got {rate!r}, wanted a finite number or an Optax schedule.")

    @property
    def kernel(self) -> int:
        """The number of the row update in `ffi/core/row_update.h`; PROGRAM if only `step_row` exists."""
        return PROGRAM

    def state_form(self, dim: int) -> str:
        """Returns a text, the same in every run, by which its state differs from that of others with equal names."""
        return type(self).__name__

    def describe(self) -> str:
        """Returns a text that processes compare, line by line: its numbers, and a schedule's at some steps."""
        with jax.ensure_compile_time_eval():
            rates = [float(self.rate_at(step)) for step in (0, 1, 1000, 10**6) if callable(self.learning_rate)]
        return f"{self!r}{f', rates {rates}' if rates else ''}"

    @abc.abstractmethod
    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        """Returns the per-row state of a table of the given dim."""

    @abc.abstractmethod
    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        """Returns the scalars of step uint32[], the updates before this one: make it a float before you subtract."""

    @abc.abstractmethod
    def step_row(self, inputs: RowInputs) -> RowOutputs:
        """Steps one row: a pure JAX function that treats rows alike.

        It may use operations on each column (arithmetic, comparisons, `jnp.where`, roots, powers, exp, log) and sums,
        means, norms, maxima and minima over the columns.
        """

    def usable_states(self, dim: int, names: Sequence[str]) -> tuple[str, ...]:
        """Returns those of the states of these names that rows can go on with where the others start over."""
        return tuple(names)

    def init_globals(self, dim: int) -> tuple[np.ndarray, ...]:
        """Returns the initial optimizer state that belongs to no row; only lifted optimizers have any."""
        return ()

    def global_names(self, dim: int) -> tuple[str | None, ...]:
        """Returns the names by which a restore finds `init_globals`; None: of the declaration, so never restored."""
        return tuple(map(str, range(len(self.init_globals(dim)))))

    def advance(
        self, globals_: tuple[Any, ...], step: Any, learning_rate: Any, dim: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the hyper for `step_row`, and the globals after step uint32[]; a rate replaces the declared one."""
        return self.hyper(step, self.rate_at(step, learning_rate)), globals_

    def hyper_shapes(self, dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the hyper that `step_row` gets."""
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return tuple(scalar for _ in self.hyper(np.int32(0), np.float32(0)))

    def rate_at(self, step: Any, learning_rate: Any = None) -> Any:
        """Returns a step's learning rate, or the scalar in its place; schedules see 2**31 - 1 at most."""
        if learning_rate is not None:
            return learning_rate
        if not callable(self.learning_rate):
            return self.learning_rate
        # Schedules subtract from the step: an unsigned one would wrap.
        last = jnp.uint32(2**31 - 1)
        step = jnp.minimum(jnp.asarray(step).astype(jnp.uint32), last).astype(jnp.int32)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # those of Optax mix dtypes
            rate = self.learning_rate(step)
        checks.scalar(f"optim.{self.name}: learning_rate: result of the schedule", rate)
        return rate

    def hyper_operand(self, step: Any, learning_rate: Any = None) -> Float[Array, " num_hyper"]:
        """Returns the hyper-parameter operand of one step, for a kernel of its own."""
        words = self._kernel_hyper(*self.hyper(step, self.rate_at(step, learning_rate)))
        return jnp.stack([jnp.asarray(word, jnp.float32) for word in words + (0.0,) * (NUM_HYPER - len(words))])

    def _kernel_hyper(self, *hyper: Any) -> tuple[Any, ...]:
        """Returns what a kernel of its own reads, made of the hyper: at most NUM_HYPER words."""
        return hyper
