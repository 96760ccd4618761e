"""A workload as a jaxsok collection, on one device or a mesh, its tables filled with all their rows.

Fed by `workloads.py`; feeds all benchmarks of W1 to W6. Filling looks keys up, as training does: there is no other way
in that would be measured honestly. Keys are mixed on the devices in the same program, so that the host sends nothing.
`Filled` also has the three measured programs, and threads its state through them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxsok

from . import peers
from .limits import varied_floats
from .records import EVALUATION, LOSS_STEP, STEP, TRAINING
from .timing import Protocol, Step, Timing
from .workloads import LIFTED_ADAM, Workload, mix

_FILL_BYTES = 2 << 30
"""Bytes of embeddings that one filling step makes on a device, at most."""

_FILL_KEYS = 16 << 20
"""Keys of one filling step on a device, at most."""

AXIS = "data"
"""The axis of the mesh."""


@dataclasses.dataclass
class Filled:
    """A collection and its state, all rows of the workload in use."""

    workload: Workload
    optimizer: str
    collection: jaxsok.Collection
    state: jaxsok.State
    """Replaced by whatever donates it."""
    programs: dict[str, Step] = dataclasses.field(init=False)
    """Programs by the measured part; each serves all batches, whatever their distribution."""

    def __post_init__(self) -> None:
        """Declares the programs; none is compiled before it is run."""
        self.programs = programs_of(self.collection)

    @property
    def load(self) -> float:
        """The load: used entries ÷ entries of the index."""
        return load_of(self.collection, self.state)

    @contextlib.contextmanager
    def view_as(self, workload: Workload, collection: jaxsok.Collection | None = None) -> Iterator["Filled"]:
        """Yields the same state for batches of another shape, or under other features on the same tables."""
        other = Filled(workload, self.optimizer, collection or self.collection, self.state)
        if collection is None:
            other.programs = self.programs
        try:
            yield other
        finally:
            self.state = other.state

    def features(self, ids: np.ndarray) -> jaxsok.Features:
        """Packs a batch of ids [num_tables, num_bags, hotness]."""
        return pack(self.collection, self.workload, ids)

    def inputs(self, what: str, id_sets: Sequence[np.ndarray]) -> list[Any]:
        """Returns batches of ids as the program of `what` takes them; all have one shape and share one gradient."""
        sets = [self.features(ids) for ids in id_sets]
        if what != STEP:
            return sets
        gradients = self.gradients(id_sets[0].shape[1])
        return [(features, gradients) for features in sets]

    def check(self, sets: Sequence[Any], where: str) -> None:
        """Raises if a key of the first batch of features has no row."""
        _, (_, stats) = self.programs[EVALUATION].run(self.state, sets[0])
        stats.check()
        missing = int(jax.device_get(stats.num_missing).sum())
        if missing:
            raise RuntimeError(f"{where}: {missing} keys have no row after filling.")

    def measure(self, what: str, sets: Sequence[Any], protocol: Protocol, idle: Any = None) -> Timing:
        """Times the program of `what` on batches in rotation."""
        timing, self.state = self.programs[what].measure(self.state, sets, protocol, idle)
        return timing

    def measure_in_a_row(self, what: str, sets: Sequence[Any], protocol: Protocol, length: int | None = None) -> Timing:
        """Times one step of a program that runs `length` batches (all for None), unrolled."""
        timing, self.state = self.programs[what].measure_in_a_row(self.state, sets, protocol, length)
        return timing

    def gradients(self, num_bags: int) -> dict[str, jax.Array]:
        """Returns a fixed gradient for the embeddings of `num_bags` bags a feature, sharded as they are."""

        def make():
            return {
                spec.name: varied_floats((num_bags, self.workload.dim)) * jnp.float32(1.0 + 0.01 * number)
                for number, spec in enumerate(self.collection.features)
            }

        return self.collection.shards.make(make)


def programs_of(collection: jaxsok.Collection) -> dict[str, Step]:
    """Returns the programs: evaluation forward, training forward, a step with a given gradient, and one with a loss.

    All but the last hand the embeddings of each feature out; the last multiplies them all by a vector of ones.
    """

    def train(state, features):
        embeddings, state, _ = collection.lookup(state, features)
        return state, embeddings

    def step(state, inputs):
        features, gradients = inputs
        embeddings, state, plan = collection.lookup(state, features)
        state, stats = collection.update(state, plan, gradients)
        return state, (embeddings, stats)

    def loss_step(state, features):
        embeddings, state, plan = collection.lookup(state, features)

        def loss_of(embeddings):
            joined = jnp.concatenate(list(embeddings.values()), axis=1)
            return (joined @ jnp.ones(joined.shape[1])).mean()

        loss, gradients = jax.value_and_grad(loss_of)(embeddings)
        state, stats = collection.update(state, plan, gradients)
        return state, (loss, stats)

    return {
        EVALUATION: Step(collection.find, donates=False),
        TRAINING: Step(train, donates=True),
        STEP: Step(step, donates=True),
        LOSS_STEP: Step(loss_step, donates=True),
    }


def optimizer_of(name: str) -> jaxsok.optim.Optimizer:
    """Returns the optimizer of this name, with the constants that the peers use."""
    if name == LIFTED_ADAM:
        return jaxsok.optim.lift(optax.adam(peers.LEARNING_RATE, **peers.ADAM))
    constants = {"adagrad": peers.ADAGRAD, "rowwise_adagrad": peers.ROWWISE_ADAGRAD, "adam": peers.ADAM}.get(name, {})
    return getattr(jaxsok.optim, name)(peers.LEARNING_RATE, **constants)


def collection_of(
    workload: Workload,
    optimizer: str,
    mesh: Mesh | None = None,
    exchange: jaxsok.ExchangeSpec | None = None,
    form: Literal["rows", "bags"] = "rows",
    **options: Any,
) -> jaxsok.Collection:
    """Returns a collection with a table and a feature for each table of the workload, in one store, sharded on a mesh.

    Args:
      workload: whose shape.
      optimizer: by name.
      mesh: None: one device.
      exchange: between shards.
      form: what the features exchange.
      **options: of every TableSpec.
    """
    made = optimizer_of(optimizer)
    tables = [
        jaxsok.TableSpec(f"table_{number:02}", dim=workload.dim, optimizer=made, capacity=workload.num_rows, **options)
        for number in range(workload.num_tables)
    ]
    features = [
        jaxsok.FeatureSpec(f"feature_{number:02}", table=table.name, combiner=workload.combiner, exchange=form)
        for number, table in enumerate(tables)
    ]
    return jaxsok.Collection(tables, features, mesh=mesh, axis=None if mesh is None else AXIS, exchange=exchange)


def pack(collection: jaxsok.Collection, workload: Workload, ids: np.ndarray) -> jaxsok.Features:
    """Packs ids [num_tables, num_bags, hotness] as the features of a batch."""
    return collection.batch(raw_of(collection, workload, ids)).features


def raw_of(collection: jaxsok.Collection, workload: Workload, ids: np.ndarray) -> dict[str, Any]:
    """Returns the raw batch of ids [num_tables, num_bags, hotness], one feature for each table."""
    raw = {}
    numbers = {table.name: number for number, table in enumerate(collection.tables)}
    for spec, of_feature in zip(collection.features, ids, strict=True):
        keys = mix(numbers[spec.table], of_feature).view(np.uint64)[..., 0]
        raw[spec.name] = keys if workload.hotness > 1 else keys[:, 0]
    return raw


def fill_tables(workload: Workload, optimizer: str, mesh: Mesh | None = None, **options: Any) -> Filled:
    """Makes the collection and gives every id of every table its row; on a mesh at its owner.

    Args:
      workload: whose shape.
      optimizer: by name.
      mesh: None: one device.
      **options: of every TableSpec. What they say of admission does not count here.

    Raises:
      RuntimeError: the tables do not hold what was inserted.
    """
    collection = collection_of(workload, optimizer, mesh, **options)
    # Tables without admission have the same state, except for the keys that wait.
    plain = collection_of(workload, optimizer, mesh, **{**options, "admission": None})
    state = collection.init(seed=0)
    waiting, fingerprint = [(store.sightings, store.bloom) for store in state.stores], state.fingerprint
    stores = tuple(dataclasses.replace(store, sightings=(), bloom=()) for store in state.stores)
    state = dataclasses.replace(state, stores=stores, fingerprint=plain.fingerprint)
    bags = _fill_bags(workload, 1 if mesh is None else mesh.size)
    shape = (bags, workload.hotness) if workload.hotness > 1 else (bags,)
    num_ids = bags * workload.hotness

    def insert(state, begin):
        raw = {spec.name: _keys(shape, workload.num_rows, number, begin) for number, spec in enumerate(plain.features)}
        return plain.lookup(state, plain.batch(raw).features)[1]

    insert = jax.jit(insert, donate_argnums=0)
    for begin in range(0, workload.num_rows, num_ids):
        # The last step begins early enough to have full length; keys that come again insert nothing.
        state = insert(state, jnp.uint32(min(begin, max(0, workload.num_rows - num_ids))))
    stores = tuple(
        dataclasses.replace(store, sightings=sightings, bloom=bloom)
        for store, (sightings, bloom) in zip(state.stores, waiting, strict=True)
    )
    state = jax.block_until_ready(dataclasses.replace(state, stores=stores, fingerprint=fingerprint))
    short = {name: count for name, count in collection.num_rows(state).items() if count != workload.num_rows}
    if short:
        raise RuntimeError(f"{workload.name}: tables hold {short} rows after filling, wanted {workload.num_rows} each.")
    return Filled(workload, optimizer, collection, state)


def _keys(shape, num_rows, table, begin):
    """Returns keys of the ids from `begin` on; after the last id they continue with the first."""
    count = int(np.prod(shape))
    ids = (begin + jnp.arange(count, dtype=jnp.uint32)) % jnp.uint32(num_rows)
    return mix(table, ids, jnp).reshape(*shape, 2)


def _fill_bags(workload: Workload, num_devices: int) -> int:
    """Returns the bags of each feature in a filling step, over all devices."""
    rows_per_bag = workload.hotness
    by_bytes = _FILL_BYTES // (workload.num_tables * workload.dim * 4)
    by_keys = _FILL_KEYS // (workload.num_tables * rows_per_bag)
    needed = -(-workload.num_rows // (rows_per_bag * num_devices))
    return max(1, min(by_bytes, by_keys, needed)) * num_devices


def load_of(collection: jaxsok.Collection, state: jaxsok.State) -> float:
    """Returns the load of the (first and only) store: used entries ÷ entries of the index."""
    (store,) = state.stores
    entries = store.index.shape[0] * 4
    return sum(collection.num_rows(state).values()) / entries
