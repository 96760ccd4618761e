"""Sparse optimizers: declared here, stepped in the update kernel. Seen as `jaxsok.optim`."""

from jaxsok.optimizers.fused import adagrad, adam, rowwise_adagrad, sgd
from jaxsok.optimizers.lift import lift
from jaxsok.optimizers.protocol import Optimizer, RowInputs, RowOutputs, RowState

__all__ = ["Optimizer", "RowInputs", "RowOutputs", "RowState", "adagrad", "adam", "lift", "rowwise_adagrad", "sgd"]
