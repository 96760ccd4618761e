"""One table without bags, filled with ids from 0 on, which H1 and the sweeps over dims and sizes share.

Fed by `workloads.py` (the keys); feeds `bench_table.py`, `bench_insert.py`, `bench_dims.py`, `bench_scale.py`. Keys are
made on the device. Filling takes the door `jaxsok.table.find_or_insert`, so that no embeddings are made.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok
from jaxsok import table

from .fill import optimizer_of, programs_of
from .limits import varied_floats
from .records import FIND_AND_GATHER, STEP
from .timing import Protocol, Step, Timing
from .workloads import mix


class OneTable:
    """A collection of one table and one feature without a combiner, and its state."""

    def __init__(self, num_rows: int, dim: int, optimizer: str = "sgd", dtype: str = "float32", **options: Any):
        """Declares the table; allocates nothing.

        Args:
          num_rows: capacity at first.
          dim: numbers in a row.
          optimizer: name of a function of `jaxsok.optim`.
          dtype: of the rows.
          **options: of TableSpec.
        """
        if dtype != "float32":
            options["dtype"] = dtype
        spec = jaxsok.TableSpec("items", dim=dim, optimizer=optimizer_of(optimizer), capacity=num_rows, **options)
        feature = jaxsok.FeatureSpec("item", table="items", combiner=None)
        self.num_rows, self.dim, self.optimizer = num_rows, dim, optimizer
        self.collection = jaxsok.Collection([spec], [feature])
        (self.store_spec,) = self.collection.stores
        self.state: Any = None
        # It binds the spec alone: bound to this object, the arrays would live until the garbage collector runs.
        self.find_or_insert = functools.partial(_find_or_insert, self.store_spec)
        self.insert = jax.jit(self.find_or_insert, donate_argnums=0)
        """(store, seed, keys) -> store, row ids."""
        programs = programs_of(self.collection)
        self.programs: dict[str, Step] = {FIND_AND_GATHER: Step(self.collection.find, donates=False)}
        self.programs[STEP] = programs[STEP]

    @property
    def store(self) -> jaxsok.StoreState:
        """The state's store; assigning replaces it."""
        return self.state.stores[0]

    @store.setter
    def store(self, store: jaxsok.StoreState) -> None:
        self.state = dataclasses.replace(self.state, stores=(store,))

    @property
    def load(self) -> float:
        """The load: used entries ÷ entries of the index."""
        return int(self.store.num_rows()) / (self.store.index.shape[0] * 4)

    def insert_ids(self, begin: int, num_keys: int) -> None:
        """Gives the ids from `begin` on their rows; ids that have a row keep it."""
        self.store, _ = self.insert(self.store, self.state.seed, keys_from(begin, num_keys))

    def fill(self, keys_per_call: int) -> None:
        """Makes the state and gives every id its row.

        Raises:
          RuntimeError: the table does not hold what was inserted.
        """
        self.state = self.collection.init(seed=0)
        num_keys = min(keys_per_call, self.num_rows)
        for begin in range(0, self.num_rows, num_keys):
            self.insert_ids(min(begin, self.num_rows - num_keys), num_keys)
        self.require_rows(self.num_rows)

    def require_rows(self, num_rows: int) -> None:
        """Raises unless exactly this number of rows is in use."""
        found = int(self.store.num_rows())
        if found != num_rows:
            raise RuntimeError(f"one table of {self.dim} columns: {found} rows in use, wanted {num_rows}.")

    def inputs(self, what: str, id_sets: Sequence[jax.Array]) -> list[Any]:
        """Returns batches of ids as the program of `what` takes them; gradients have the dtype of the embeddings."""
        sets = [self.features(ids) for ids in id_sets]
        if what != STEP:
            return sets
        embeddings = jax.eval_shape(self.collection.find, self.state, sets[0])[0]["item"]
        gradients = {"item": _gradients(embeddings.shape, embeddings.dtype)}
        return [(features, gradients) for features in sets]

    def features(self, ids: jax.Array) -> jaxsok.Features:
        """Packs a batch of ids [num_keys]."""
        return self.collection.batch({"item": keys_of(ids)}).features

    def measure(self, what: str, sets: Sequence[Any], protocol: Protocol, idle: Any = None) -> Timing:
        """Times the program of `what` on batches in rotation."""
        timing, self.state = self.programs[what].measure(self.state, sets, protocol, idle)
        return timing

    def measure_in_a_row(self, what: str, sets: Sequence[Any], protocol: Protocol) -> Timing:
        """Times one step of a program that runs all batches, unrolled."""
        timing, self.state = self.programs[what].measure_in_a_row(self.state, sets, protocol)
        return timing


def _find_or_insert(spec, store, seed, keys):
    store, row_ids, _ = table.find_or_insert(spec, store, seed, keys, table_ids(keys))
    return store, row_ids


def draw(num_rows: int, num_keys: int, num_sets: int, seed: int) -> list[jax.Array]:
    """Draws sets of uniform ids uint32 [num_keys] below `num_rows` on the device; a seed fixes the sets."""
    return [
        jax.device_put(np.random.default_rng((seed, number, num_keys)).integers(0, num_rows, num_keys, dtype=np.uint32))
        for number in range(num_sets)
    ]


@jax.jit
def keys_of(ids: jax.Array) -> jax.Array:
    """Returns the keys of ids."""
    return mix(0, ids, jnp)


def keys_from(begin: int, num_keys: int) -> jax.Array:
    """Returns the keys of the ids from `begin` on."""
    return _keys_from(jnp.uint32(begin), num_keys)


def _iota(begin, num_keys):
    return mix(0, begin + jax.lax.iota(jnp.uint32, num_keys), jnp)


_keys_from = jax.jit(_iota, static_argnums=1)


def table_ids(keys: jax.Array) -> jax.Array:
    """Returns the table number of each key: that of the one table."""
    return jnp.zeros(keys.shape[0], jnp.uint32)


def _gradients(shape, dtype) -> jax.Array:
    return varied_floats(shape).astype(dtype)


def count(number: int) -> str:
    """Formats a number of keys or rows.

    Example:
      >>> count(4 << 20), count(16_000_000), count(250)
      ('4 Mi', '16 M', '250')
    """
    if number >= 1 << 20 and number % (1 << 20) == 0:
        return f"{number >> 20} Mi"
    if number >= 1_000_000:
        return f"{number / 1e6:.4g} M"
    return f"{number / 1e3:g} k" if number >= 10_000 and number % 1000 == 0 else str(number)
