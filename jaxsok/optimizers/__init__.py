"""Sparse optimizers: declared here, stepped in the update kernel. Seen as `jaxsok.optim`.

All take a `learning_rate` (a number, a 0-d array, or an Optax schedule) and, except `lift`, `limits` around the step.
"""

from jaxsok.optimizers.fused import adagrad, adam, rowwise_adagrad, sgd
from jaxsok.optimizers.lift import lift
from jaxsok.optimizers.limits import AdaptiveClip, Limits
from jaxsok.optimizers.moments import adamax, adamw, lion, nadam, rowwise_adam
from jaxsok.optimizers.program import NotARowProgram
from jaxsok.optimizers.protocol import Optimizer, RowInputs, RowOutputs, RowState
from jaxsok.optimizers.sparse import ftrl, group_adam, group_ftrl
from jaxsok.optimizers.squares import adadelta, adagrad_decay, rmsprop
from jaxsok.optimizers.trust import lamb, lars

__all__ = [
    "AdaptiveClip",
    "Limits",
    "NotARowProgram",
    "Optimizer",
    "RowInputs",
    "RowOutputs",
    "RowState",
    "adadelta",
    "adagrad",
    "adagrad_decay",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "group_adam",
    "group_ftrl",
    "lamb",
    "lars",
    "lift",
    "lion",
    "nadam",
    "rmsprop",
    "rowwise_adagrad",
    "rowwise_adam",
    "sgd",
]
