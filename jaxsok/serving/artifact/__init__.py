"""A whole model as a file: the program and its dense parameters, for any batch size; the tables stay outside.

A folder of two files. `model.stablehlo` has what `jax.export` wrote; `model.json` says what goes in and comes out,
which tables are wanted, and the checksums. The program takes the arrays of the tables as arguments, of any number of
rows and buckets, and their defaults and numbers likewise: tables can be replaced by larger ones, by ones that lie
beside others in their stores, or in another order. What is fixed is the name, the dim and the row dtype of each.

Loading needs jaxsok and JAX, and nothing of the code that made the model.
"""

from jaxsok.serving.artifact.export import export_model
from jaxsok.serving.artifact.files import ArtifactError
from jaxsok.serving.artifact.inputs import ArrayInput, BagsInput, KeysInput, OutputSpec
from jaxsok.serving.artifact.model import ServedModel, load_model

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
