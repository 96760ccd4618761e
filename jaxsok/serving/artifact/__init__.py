"""A whole model as a file: the program and its dense parameters, for any batch size; the tables stay outside.

A folder of two files. `model.stablehlo` has what `jax.export` wrote; `model.json` has inputs, outputs, the wanted
tables, and checksums. The program takes the arrays of tables as arguments: a table can be replaced by a larger one, or
by one in another store or order, of the same name, dim and row dtype. Loading needs jaxsok and JAX alone.
"""

from jaxsok.serving.artifact.inputs import ArrayInput, BagsInput, KeysInput, OutputSpec
from jaxsok.serving.artifact.model import ArtifactError, ServedModel, load_model
from jaxsok.serving.artifact.model_export import export_model

__all__ = [
    "ArrayInput",
    "ArtifactError",
    "BagsInput",
    "KeysInput",
    "OutputSpec",
    "ServedModel",
    "export_model",
    "load_model",
]
