"""Loads the dense model of a served model, checks it against the tables, and prepares its requests."""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxsok import keys as keys_lib
from jaxsok.kernels import table as table_kernels
from jaxsok.keys import PADDING_WORD
from jaxsok.serving import artifact
from jaxsok.serving.artifact.inputs import LEAST_BATCH, BagsInput
from jaxsok.serving.artifact.model import require_fit
from jaxsok.serving.config import ModelConfig
from jaxsok.serving.errors import ServingError
from jaxsok.serving.frozen import FrozenTable, FrozenTables
from jaxsok.serving.padding import padded_size
from jaxsok.types import NO_ROW


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A program of a dense model."""

    inputs: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[int, int], ...]  # `artifact.ServedModel.sizes`

    @classmethod
    def list_first(cls, served: artifact.ServedModel | None, levels: Sequence[int]) -> "list[Prediction]":
        """Lists the programs to compile before a request needs them, one for each number of samples."""
        if served is None or not served.is_per_sample:  # other models are compiled for each size
            return []
        inputs = tuple(served.inputs.items())
        sizes = [padded_size(level, LEAST_BATCH) for level in levels]  # also as many keys of bags
        has_bags = [isinstance(spec, BagsInput) for _, spec in inputs]
        return [cls(inputs, tuple((size, size * bags) for bags in has_bags)) for size in sizes]

    def fits(self, served: artifact.ServedModel | None) -> bool:
        return served is not None and self.inputs == tuple(served.inputs.items())


@dataclasses.dataclass(frozen=True)
class PredictRequest:
    """A checked prediction, in its program's form."""

    served: artifact.ServedModel
    leaves: Mapping[str, Any]
    num_samples: int

    @property
    def program(self) -> Prediction:
        return Prediction(tuple(self.served.inputs.items()), self.served.sizes(self.leaves))

    def keys(self) -> dict[str, np.ndarray]:
        """Reads the known keys of each table, without padding."""
        return {
            table: np.concatenate([keys_in(self.leaves[name])[: self._num_keys(name)] for name in names])
            for table, names in self.served.known_lookups
        }

    def _num_keys(self, name: str) -> int:
        leaves = self.leaves[name]
        return int(leaves[1][-1]) if isinstance(leaves, tuple) else self.num_samples * math.prod(leaves.shape[1:-1])

    def cut(self, out: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """Copies the results of the program to the host, without the rows of padding samples."""
        return self.served.cut({name: np.asarray(value) for name, value in out.items()}, self.num_samples)


def load_dense_model(
    op: str, config: ModelConfig, path: str | os.PathLike[str], tables: Mapping[str, FrozenTable], device: Any
) -> artifact.ServedModel:
    """Loads an artifact; refuses one that does not fit the tables, their tier or their device."""
    served = artifact.load_model(path, device)
    served = served if config.is_fused else served.unfuse()
    what = f'{op}: model "{config.model}": dense_file: "{path}"'
    require_fit(f"{what}: tables", served.tables.values(), tables)
    if config.is_split:
        raise ServingError(
            f"{what}: got a dense model over tables that are split over devices (jaxsok.split), wanted none: it reads "
            "tables of one device. Look rows up, or serve replicas, or a cache."
        )
    if config.device_share < 1:
        raise ServingError(
            f"{what}: got a dense model over tables some of whose rows the device reads in host memory (uvm), wanted "
            "none: exported models read tables whose rows are all on the device. Take a dynamic cache."
        )
    unknown = [name for name, inputs in served.lookups.items() if inputs is None]
    if config.tier == "cache" and unknown:
        raise ServingError(
            f"{what}: got a model that reads {unknown} by keys that are not the keys of an input (it works them out, "
            "or was exported before that was written down), wanted inputs alone: over a cache only their rows are "
            "fetched. Give those keys as a KeysInput or BagsInput and export again, or take a gpucacheper of 1.0, "
            "where all rows are on the device."
        )
    return served


def words_in(leaves: Any) -> Any:
    return leaves[0] if isinstance(leaves, tuple) else leaves


def keys_in(leaves: Any) -> np.ndarray:
    return keys_lib.from_words(words_in(leaves)).reshape(-1)


@functools.partial(jax.jit, static_argnums=2)
def count_found(
    tables: FrozenTables, leaves: Mapping[str, Any], lookups: tuple[tuple[str, tuple[str, ...]], ...]
) -> jaxtyping.Int32[Array, "num_lookups 2"]:
    """Counts, by lookup, the keys of a prediction's inputs that are there and that are not."""
    counts = []
    for table, names in lookups:
        words = jnp.concatenate([jnp.reshape(words_in(leaves[name]), (-1, 2)) for name in names])
        s, number = tables.spec.places[table]
        store, ids = tables.stores[s], jnp.full(words.shape[0], np.uint32(number))
        is_there = table_kernels.find(store.index, store.counters, words, ids) != np.uint32(NO_ROW)
        is_real = (words != PADDING_WORD).any(axis=1)
        counts.append([jnp.sum(is_there, dtype=jnp.int32), jnp.sum(is_real & ~is_there, dtype=jnp.int32)])
    return jnp.array(counts, jnp.int32).reshape(-1, 2)
