"""What a user declares and calls: tables, features, a mesh. A collection holds no arrays; the state does."""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Int32

from jaxsok import ahead as ahead_lib
from jaxsok import annotations, checks, guards, lives, processes
from jaxsok import coming as coming_lib
from jaxsok import evict as evict_lib
from jaxsok import exchange as exchange_lib
from jaxsok import features as features_lib
from jaxsok import gradients as gradients_lib
from jaxsok import grow as grow_lib
from jaxsok import lookup as lookup_lib
from jaxsok import memory as memory_lib
from jaxsok import norms as norms_lib
from jaxsok import pipeline as pipeline_lib
from jaxsok import plan as plan_lib
from jaxsok import sources as sources_lib
from jaxsok import split as split_lib
from jaxsok import stats as stats_lib
from jaxsok import update as update_lib
from jaxsok.features import Batch, Features
from jaxsok.kernels import library
from jaxsok.lookup import Embeddings
from jaxsok.operations import (
    TableOperations,
    check_features,
    check_state,
    check_untraced,
    clock_of,
    lineage_of,
    locate,
    no_tickets,
    specs_of,
)
from jaxsok.plan import Found, Plan
from jaxsok.printed import listed
from jaxsok.shards import Shards
from jaxsok.specs import (
    ExchangeSpec,
    FeatureSpec,
    StoreSpec,
    TableSpec,
    described,
    fingerprint,
    group_into_stores,
)
from jaxsok.stats import Stats
from jaxsok.store import State, StoreState, init_store
from jaxsok.types import COUNTERS, ENTRIES_PER_BUCKET, MAX_CAPACITY, MAX_FEATURES


class Collection(TableOperations):
    """Tables, and the features that read them.

    Tables of one dim, dtype, embedding_dtype, rounding, optimizer, row_gradient and eviction share a store; all
    features over a store cost one FFI call per lookup and one per update.

    With a mesh the samples of a batch and the rows of the tables are split over the named axis: keys travel to the
    shards that own them, rows travel back (docs/many_devices.md). Methods take and give global arrays, under `jit` or
    not; inside `shard_map` or `pmap` over the axis they take and give a shard's part.

    Raises:
      TypeError, ValueError: two tables or features of one name, a feature on an unknown table, no tables.

    Example:
      >>> import jaxsok
      >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
      >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
      >>> state = collection.init(seed=0)
      >>> batch = collection.batch({"clicked": np.array([7, 9, 7])})
      >>> embeddings, state, plan = collection.lookup(state, batch.features)
      >>> embeddings["clicked"].shape
      (3, 4)
      >>> state, stats = collection.update(state, plan, embeddings)
      >>> stats.to_dict()["item"]["num_inserted"], stats.to_dict()["item"]["num_found"]
      (2, 1)
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        *,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        exchange: ExchangeSpec | None = None,
    ):
        """Declares; allocates nothing.

        Args:
          tables: at least one; names are unique.
          features: names are unique; each names a table. Their order is the order of keys in a batch.
          mesh: the devices; None: one.
          axis: the axis of the mesh over which batches and tables are split, or several as a tuple. Along other axes
            of the mesh both are repeated.
          exchange: how rows and gradients travel between shards; None: rows as they are stored, gradients as float32.
        """
        _check_declared(tables, features, exchange)
        self.shards: Shards = Shards.of(mesh, axis)
        num_shards = self.shards.num_shards
        self.exchange: ExchangeSpec = exchange or ExchangeSpec()
        self.tables: tuple[TableSpec, ...] = tuple(tables)
        self.features: tuple[FeatureSpec, ...] = tuple(features)
        self._check_placements(num_shards)
        self.stores: tuple[StoreSpec, ...] = group_into_stores(self.tables, num_shards)
        self._check_stores(num_shards)
        self.fingerprint: str = fingerprint(self.stores)
        # One shard has all partitions; an array without elements would be refused by Orbax.
        self.partition_owners: np.ndarray = plan_lib.default_owners(num_shards)[: None if num_shards > 1 else 1]
        self._jitted = self._programs()
        self.growth = grow_lib.GrowthTracker.of(len(self.stores))

    def __repr__(self) -> str:
        """The tables, the features and the mesh."""
        tables = [f"{table.name} ({table.dim} {table.dtype}, {table.optimizer.name})" for table in self.tables]
        features = [f"{feature.name} ({feature.table}, {feature.combiner})" for feature in self.features]
        place = f"mesh {self.shards!s}" if str(self.shards) else "one device"
        return f"Collection(tables: {listed(tables)}; features: {listed(features)}; {place})"

    def _check_placements(self, num_shards: int) -> None:
        """Refuses a table on a device that the mesh does not have."""
        for table in self.tables if self.shards.is_mesh else ():
            if table.placement.kind == "on" and table.placement.shard >= num_shards:
                raise ValueError(
                    f'Collection: table "{table.name}": placement: got {table.placement}, wanted a device from 0 to '
                    f"{num_shards - 1} along the axis ({self.shards})."
                )

    def _check_stores(self, num_shards: int) -> None:
        """Refuses stores with more rows, features, or tables for one round of the exchange, than there may be."""
        for s, store in enumerate(self.stores):
            names = [table.name for table in store.tables]
            least = self.exchange.send_capacity
            if least is not None and num_shards > 1 and least < len(names):
                raise ValueError(
                    f"Collection: exchange: send_capacity: got {least}, wanted at least {len(names)}, the tables of "
                    f"store {s}: so many keys may share a hash, and go in one round."
                )
            num_features = sum(feature.table in names for feature in self.features)
            if num_features > MAX_FEATURES:
                raise ValueError(
                    f"Collection: features: got {num_features} over the store of tables {names}, wanted at most "
                    f"{MAX_FEATURES}; use two collections."
                )
            if store.capacity > MAX_CAPACITY:
                raise ValueError(
                    f"Collection: tables {names}: capacity: got {store.capacity} rows in store {s}, wanted at most "
                    f"{MAX_CAPACITY}."
                )

    def _programs(self) -> dict[str, Any]:
        """The methods that run as programs, also outside jit."""
        # On a mesh; on one device they run as they are.
        of_mesh = {
            name: jax.jit(functools.partial(self._everywhere, name))
            for name in ("lookup", "find", "update", "gradient_norm")
        }
        of_mesh["plan"] = jax.jit(self._plan_everywhere, static_argnums=1)
        # On one device too, so that a store keeps its buffers between steps.
        of_one = ("op", "store", "number")
        of_store = {
            "erase": jax.jit(self._erase_global, static_argnames=of_one[1:], donate_argnums=0),
            "write": jax.jit(self._store_global, static_argnames=of_one, donate_argnums=0),
            "read": jax.jit(self._store_global, static_argnames=of_one),
        }
        return of_mesh | of_store

    @annotations.annotated("jaxsok.init")
    def init(self, seed: int = 0, *, salt: int | None = None) -> State:
        """Allocates empty stores of the declared capacity.

        Args:
          seed: new rows are functions of (seed, table name, key, column); 0 to 2**64 - 1.
          salt: the salts of the stores' hashes are functions of it; 0 to 2**64 - 1. None: they are drawn at random, the
            same in all processes, so that nobody can choose keys that collide. No row, row id or count of keys depends
            on them, only where entries lie in the index, and `longest_probe`. Give one where these must be the same
            on every run, and where keys come from people that you trust.

        Raises:
          MemoryError: the stores will not fit; says the bytes asked and the bytes that a row costs.
          ImportError: a built library is missing or does not load; says which and what to do.

        Example:
          `state = collection.init(seed=0)`
        """
        for name, value in ({"seed": seed} | ({} if salt is None else {"salt": salt})).items():
            checks.integer(f"init: {name}", value, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1")
        library.register()
        shards = self.shards
        if shards.num_processes > 1:
            sizes = [f"capacity of {table.name}: {table.capacity}, {table.max_capacity}" for table in self.tables]
            features = [repr(feature) for feature in self.features]
            processes.require_same(
                "init",
                [f"mesh: {shards}", f"seed: {seed}", f"salt: {salt}", *described(self.stores), *sizes, *features],
            )
        free = grow_lib.agreed_free_bytes(shards)
        grow_lib.require_memory([(store, store.capacity) for store in self.stores], "init", free)
        # What is drawn names the state's life in exports, which are read by others, so that the salts are drawn apart.
        drawn = processes.drawn(is_shared=shards.num_processes > 1, num_words=6)
        entropy = drawn[2:].tolist() if salt is None else int(salt)
        salts = np.random.SeedSequence(entropy).generate_state(len(self.stores), np.uint64)

        def make_stores() -> tuple[StoreState, ...]:
            return tuple(init_store(store, int(salt)) for store, salt in zip(self.stores, salts, strict=True))

        def make_rest() -> tuple[Array, ...]:
            words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
            refused = jnp.zeros(len(self.tables), jnp.uint32)
            return jnp.zeros((), jnp.uint32), jnp.asarray(words), jnp.asarray(self.partition_owners), refused

        step, seed_words, owners, refused = shards.make(make_rest, is_split=False)
        # Of the seed, so that two runs have the same bits. Exports tell lives of one word apart all the same.
        lineage = np.random.SeedSequence([int(seed), int(self.fingerprint, 16)]).generate_state(2)
        lives.IN_THIS_PROCESS.begin(lineage, drawn[:2])
        state = State(
            stores=shards.make(make_stores),
            tickets=no_tickets(self.shards),
            step=step,
            seed=seed_words,
            partition_owners=owners,
            lineage=lineage_of(self.shards, lineage),
            num_refused=refused,
            fingerprint=self.fingerprint,
            mesh=str(self.shards),
        )
        self.growth.forget()
        return state

    @annotations.annotated("jaxsok.batch")
    def batch(self, raw: Mapping[str, Any], *, pad_to: int | None = None) -> Batch:
        """Packs a raw batch: features into few arrays of static size, everything else untouched.

        On a mesh this process's samples are split over its shards in order, and so are entries of `raw` that have a
        line for each sample. In several processes each passes its own samples, all the same number of them.

        Args:
          raw: for each feature an integer array `[num_bags]` or `[num_bags, hotness]`, or `Bags`; also `Coo` (or a
            `tf.SparseTensor`), a column of integers or of lists of them (Arrow, Polars), a
            `jax.experimental.sparse.BCOO`. All have one number of samples. Other entries are carried along
            (`batch["label"]`); a column, `[n]` or `[n, 1]`, must have a line for each sample too. Pass an array that is
            no data of samples in a tuple.
          pad_to: adds samples without keys until there are so many: for the last batch of a log. `batch.mask` tells
            which are real.

        Raises:
          TypeError, ValueError: names the feature, the argument, what was got and wanted.

        Cost:
          Host work for NumPy input: one copy of the keys and one transfer per store.

        Example:
          `batch = collection.batch({"user": user_ids, "history": Bags(ids, lengths=lengths), "label": clicks})`
        """
        mask: Any = None
        raw = sources_lib.converted(raw, self.features)
        features_lib.require_features(raw, self.features)
        features_lib.require_samples(raw, self.features)
        if pad_to is not None:
            raw, mask = split_lib.pad(raw, self.features, pad_to)
        if not self.shards.sees_parts():
            batch = split_lib.pack_sharded(raw, self.stores, self.features, self.fingerprint, self.shards, mask)
        else:
            batch = features_lib.pack(raw, self.stores, self.features, self.fingerprint)
            features = dataclasses.replace(batch.features, num_parts=self.shards.num_shards)
            batch = dataclasses.replace(batch, features=features, mask=None if mask is None else jnp.asarray(mask))
        self._note_keys([batch.features])
        return batch

    @annotations.annotated("jaxsok.plan")
    def plan(self, features: Features, *, send_capacity: Sequence[int] | None = None) -> Plan:
        """Makes the keys of a batch distinct. Reads no table, so it can run a batch ahead of the lookup.

        On a mesh, with `send_capacity`, it also sends the keys to their owners, in one round: the lookup and the
        update then have no loop, and the host waits for nothing. Keys beyond the capacity are not sent, read their
        initial rows and are counted as refused: compare `plan.asked[s].load[0, 0]` with it first, or let
        `collection.pipeline` do so. Without it the exchange goes in as many rounds as it takes.

        Args:
          features: of `batch`.
          send_capacity: for each store the keys for one destination; on a mesh only.

        Cost:
          One pass over the keys and a scratch index of 32 bytes a key; on a mesh also a sort by owner.

        Example:
          `embeddings, state, plan = collection.lookup(state, collection.plan(batch.features))`
        """
        check_features("plan", self, features)
        if send_capacity is not None:
            self._check_send_capacity(send_capacity)
            send_capacity = tuple(int(capacity) for capacity in send_capacity)
        (features,) = guards.whole("plan", features=features)
        if self.shards.sees_parts():
            return self._plan(features, send_capacity)
        return self._jitted["plan"](features, send_capacity)

    def pipeline(self, batches: Iterable[Mapping[str, Any]], *, pad_to: int | None = None) -> "pipeline_lib.Pipeline":
        """Gives batches with their plans, made two batches ahead, while earlier steps run.

        On a mesh the keys are exchanged with the plan, and its counts choose the send capacity: the step has no loop,
        the host never waits for a step, and results are those of `lookup(state, batch.features)`. Few capacities are
        used, each a program of the step. On one device plans are left to the lookup, which is faster.

        Args:
          batches: raw batches, as `batch` takes them.
          pad_to: as for `batch`.

        Returns:
          An iterator of (batch, plan).

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> state = collection.init(seed=0)
          >>> for batch, plan in collection.pipeline({"clicked": np.arange(i, i + 4)} for i in range(3)):
          ...     state = collection.grow(state, batch)
          ...     embeddings, state, plan = collection.lookup(state, plan)
          ...     state, stats = collection.update(state, plan, embeddings)
          >>> collection.num_rows(state)
          {'item': 6}
        """
        return pipeline_lib.Pipeline(self, batches, pad_to)

    @annotations.annotated("jaxsok.lookup")
    def lookup(self, state: State, features: Features | Plan, *, clock: Any = None) -> tuple[Embeddings, State, Plan]:
        """Looks up a batch; unseen keys get rows, in order of first occurrence.

        Where statistics are kept (`TableSpec.statistics`, or an eviction that needs them), the `last_step` of every row
        used becomes `clock`, and its `frequency` grows by the occurrences of its key, of all shards.

        Args:
          state: donated: the result has its buffers.
          features: of `batch`, or a plan made of them.
          clock: a uint32 scalar, perhaps traced: the user's own time, the same on all shards. None: `state.step`.

        Returns:
          Embeddings by feature, the state, and the plan that `update` takes.

        Raises:
          ValueError: a state or features of another collection, a clock out of range. Raised when traced.
          TypeError: a clock that is no uint32 scalar.

        Cost:
          Two FFI calls per store, and one more where statistics are kept. Per key 16 bytes, one 64-byte bucket and its
          row read, an embedding written. On a mesh also 16 bytes and a row on the wire for each distinct key, and what
          padding takes.

        Example:
          `embeddings, state, plan = collection.lookup(state, batch.features)`
        """
        check_state("lookup", self, state)
        plan = features if isinstance(features, Plan) else Plan(features)
        check_features("lookup", self, plan.features)
        now = clock_of("lookup", clock)
        self._note_keys([plan.features])
        state, plan, now = guards.whole("lookup", state=state, features=plan, clock=now)
        return self._run("lookup", state, plan, now)

    @annotations.annotated("jaxsok.find")
    def find(self, state: State, features: Features | Plan) -> tuple[Embeddings, Stats]:
        """The evaluation lookup: reads only. Keys without a row read what their table's `unknown` says.

        Example:
          `embeddings, stats = collection.find(state, batch.features)`
        """
        check_state("find", self, state)
        plan = features if isinstance(features, Plan) else Plan(features)
        check_features("find", self, plan.features)
        state, plan = guards.whole("find", state=state, features=plan)
        return self._run("find", state, plan)

    @annotations.annotated("jaxsok.update")
    def update(
        self,
        state: State,
        plan: Plan | Sequence[Plan],
        gradients: Mapping[str, Array] | Sequence[Mapping[str, Array]],
        *,
        learning_rate: Any = None,
    ) -> tuple[State, Stats]:
        """Steps every row that the plans used, once, with the sum of its gradients; advances `state.step`.

        Args:
          state: donated: the result has its buffers.
          plan: of a lookup, or those of several (micro-batches, several lookups in one step).
          gradients: with respect to the embeddings, by feature; one mapping for each plan.
          learning_rate: a scalar, perhaps traced, in place of the optimizers' own.

        Returns:
          The state, and what depended on the data of the step.

        Raises:
          TypeError, ValueError: plans and gradients that do not fit. Raised when traced.

        Cost:
          One FFI call per store: sorts the uses by row, reads each bag gradient, reads and writes each used row and
          its state once. On a mesh also a row gradient on the wire for each distinct key, and what padding takes.

        Example:
          `state, stats = collection.update(state, plan, g_embeddings)`
        """
        check_state("update", self, state)
        plans, grads = self._plans_and_gradients("update", plan, gradients)
        if learning_rate is not None:
            check_scalar("update: learning_rate", learning_rate)
        self._note_keys([one.features for one in plans])
        state, plans, grads = guards.whole("update", state=state, plan=plans, gradients=grads)
        self._check_gradients("update", plans, grads)
        return self._run("update", state, plans, [dict(of_plan) for of_plan in grads], learning_rate)

    @annotations.annotated("jaxsok.gradient_norm")
    def gradient_norm(
        self,
        state: State,
        plan: Plan | Sequence[Plan],
        gradients: Mapping[str, Array] | Sequence[Mapping[str, Array]],
    ) -> Float32[Array, ""]:
        """The norm of the row gradients that `update` would step by, of all tables together.

        A row counts once, with the sum of its gradients over all uses, plans and shards, scaled as its table's
        `row_gradient` says: with "sum" this is the norm of the gradient that a dense table would have. Rows that the
        update leaves alone (refused keys, stale plans, a sum that is not finite) do not count. What the optimizer's own
        limits would cut off does. Numbers of any size are squared without overflow, and two runs give the same bits.

        Args:
          state: read only.
          plan: of a lookup, or those of several; as for `update`.
          gradients: with respect to the embeddings; as for `update`.

        Raises:
          TypeError, ValueError: plans and gradients that do not fit. Raised when traced.

        Cost:
          About that of an update: sorts the uses by row, reads each bag gradient, writes and reads a float32 row
          gradient for each key. On a mesh gradients go over the wire a second time.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=1, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> batch = collection.batch({"clicked": np.array([7, 9, 7])})
          >>> _, state, plan = collection.lookup(collection.init(seed=0), batch.features)
          >>> gradients = {"clicked": jnp.array([[1.0], [4.0], [2.0]])}  # 3 for key 7, 4 for key 9
          >>> collection.gradient_norm(state, plan, gradients)
          Array(5., dtype=float32)
        """
        check_state("gradient_norm", self, state)
        plans, grads = self._plans_and_gradients("gradient_norm", plan, gradients)
        self._check_gradients("gradient_norm", plans, grads)
        state, plans, grads = guards.whole("gradient_norm", state=state, plan=plans, gradients=grads)
        return self._run("gradient_norm", state, plans, [dict(of_plan) for of_plan in grads])

    @annotations.annotated("jaxsok.clip_by_global_norm")
    def clip_by_global_norm(
        self,
        state: State,
        plan: Plan | Sequence[Plan],
        gradients: Mapping[str, Array] | Sequence[Mapping[str, Array]],
        max_norm: Any,
        dense: Any = None,
    ) -> tuple[Any, Any, Float32[Array, ""]]:
        """Scales the gradients of rows and of dense parameters together until their norm is at most `max_norm`.

        As `optax.clip_by_global_norm` of all of them would, if tables were dense: below `max_norm` nothing changes,
        not a bit; else each number is multiplied by `max_norm / norm`. Give the results to `update` and to the dense
        optimizer, whose own clipping is left out.

        A row gradient that is not finite does not count, since `update` skips and counts it. A dense gradient that is
        not finite does: as in Optax, a norm of NaN makes all gradients NaN, and then no row moves.

        Args:
          state: read only.
          plan: of a lookup, or those of several; as for `update`.
          gradients: with respect to the embeddings; as for `update`.
          max_norm: a positive scalar, perhaps traced.
          dense: any tree of float gradients. Inside `shard_map` those of the whole batch, the same on all shards.

        Returns:
          Gradients and dense gradients in the form and dtypes in which they came, and the norm before clipping,
          float32.

        Raises:
          TypeError, ValueError: plans and gradients that do not fit, `max_norm` not a positive scalar.

        Cost:
          `gradient_norm`, and one pass over all gradients.

        Source:
          R. Pascanu, T. Mikolov and Y. Bengio, On the difficulty of training recurrent neural networks, 2013.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=1, optimizer=jaxsok.optim.sgd(0.1), capacity=16)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> batch = collection.batch({"clicked": np.array([7, 7])})
          >>> _, state, plan = collection.lookup(collection.init(seed=0), batch.features)
          >>> gradients = {"clicked": jnp.array([[1.0], [2.0]])}  # 3 for key 7
          >>> gradients, dense, norm = collection.clip_by_global_norm(
          ...     state, plan, gradients, 2.5, dense={"bias": jnp.array(4.0)}
          ... )
          >>> norm.item(), gradients["clicked"].tolist(), dense["bias"].item()
          (5.0, [[0.5], [1.0]], 2.0)
        """
        check_scalar("clip_by_global_norm: max_norm", max_norm)
        if not isinstance(max_norm, jax.Array) and not max_norm > 0:
            raise ValueError(f"clip_by_global_norm: max_norm: got {max_norm}, wanted a positive number.")
        of_rows = self.gradient_norm(state, plan, gradients)
        norm = norms_lib.tree_norm([of_rows, norms_lib.tree_norm(dense)])
        gradients, dense = norms_lib.scaled((gradients, dense), norms_lib.factor_of(norm, max_norm))
        return gradients, dense, norm

    # What runs on every shard, on its parts of states, batches, plans and gradients.

    def _plan(self, features: Features, send_capacities: tuple[int, ...] | None) -> Plan:
        shards = self.shards
        if shards.num_shards > 1:
            sizes = send_capacities or (None,) * len(self.stores)
            owners, per_round = jnp.asarray(self.partition_owners), self.exchange.send_capacity
            asked = tuple(
                exchange_lib.ask(shards, store, part, owners, size, per_round) if part.layouts else None
                for store, part, size in zip(self.stores, features.stores, sizes, strict=True)
            )
            return Plan(features, asked=asked)
        if shards.is_mesh:
            return Plan(features)  # the lookup is fused; what a plan counts would be no array with a part in each shard
        distinct = tuple(
            plan_lib.distinct_keys(part) if part.layouts else plan_lib.empty_distinct() for part in features.stores
        )
        return Plan(features, distinct)

    def _lookup(self, state: State, plan: Plan, clock: Array | None) -> tuple[Embeddings, State, Plan]:
        return lookup_lib.lookup(self.stores, state, plan, self.shards, self.exchange, clock)

    def _find(self, state: State, plan: Plan) -> tuple[Embeddings, Stats]:
        embeddings, found = lookup_lib.find(self.stores, state, plan, self.shards, self.exchange)
        nonfinite = [jnp.zeros(len(store.tables), jnp.int32) for store in self.stores]
        none = jnp.zeros((), jnp.int32)
        words = self._words(state, [found], nonfinite, none, none)
        return embeddings, self._stats(state, words)

    def _update(
        self, state: State, plans: Sequence[Plan], gradients: Sequence[Mapping[str, Array]], learning_rate: Any
    ) -> tuple[State, Stats]:
        state, *counts = update_lib.update(
            self.stores, state, plans, gradients, learning_rate, self.shards, self.exchange
        )
        stats = self._stats(state, self._words(state, [one.found for one in plans], *counts))
        # `grow` sees the state, and warns a caller who never looks at Stats.
        refused = (stats.num_refused - stats.num_unadmitted).astype(jnp.uint32)
        return dataclasses.replace(state, num_refused=state.num_refused + refused), stats

    def _gradient_norm(
        self, state: State, plans: Sequence[Plan], gradients: Sequence[Mapping[str, Array]]
    ) -> Float32[Array, ""]:
        return norms_lib.row_gradient_norm(self.stores, state, plans, gradients, self.shards, self.exchange)

    def _run(self, name: str, state: State, *args: Any) -> Any:
        """A method of the above; where arrays are global, as a program that calls it on every shard."""
        if self.shards.sees_parts():
            return getattr(self, f"_{name}")(state, *args)
        return self._jitted[name](state, *args)

    def _everywhere(self, name: str, state: State, *args: Any) -> Any:
        """Calls a method on every shard of a mesh."""
        split, same, of_state = self.shards.spec, P(), specs_of(self.shards, state)
        in_specs, out_specs = {
            "lookup": ((split, same), (split, of_state, split)),
            "find": ((split,), (split, same)),
            "update": ((split, split, same), (of_state, same)),
            "gradient_norm": ((split, split), same),
        }[name]
        return self.shards.run(getattr(self, f"_{name}"), (state, *args), (of_state, *in_specs), out_specs)

    def _plan_everywhere(self, features: Features, send_capacities: tuple[int, ...] | None) -> Plan:
        split = self.shards.spec
        return self.shards.run(lambda part: self._plan(part, send_capacities), (features,), (split,), split)

    @annotations.annotated("jaxsok.grow")
    def grow(
        self,
        state: State,
        batch: Any = None,
        *,
        steps: int = 1,
        clock: Any = None,
        hand_over: evict_lib.HandOver | None = None,
    ) -> State:
        """Makes room, between steps, for the keys that are coming; almost always returns at once.

        Growing appends a slab to every per-row array and copies no row; the step's program is compiled anew for the
        larger state. Where the key positions of the batch fit beside the rows in use, nothing is done and nothing is
        waited for. Otherwise the device counts the distinct keys of the batch that have no row, and that number
        decides. A collection follows one state at a time; `init` starts anew.

        A store that has reached its `max_capacity`, and whose tables have an `eviction`, does not refuse: rows leave by
        that policy, a sixteenth of the capacity more than the new keys need, so that this is rare (docs/growth.md).
        Rows that the batch asks for stay. `TimeToLive` and `SmallNorm` may find too few; a warning tells so once.

        Another warning tells, once for each table, that updates counted keys that were refused for want of room.

        Args:
          state: consumed if it grows: its index is freed before the larger one is made, so that the peak is the new
            size. Consumed too if rows are evicted: the result has its buffers then. Unchanged if an error is raised,
            unless the device fails, or runs out of memory for the new index.
          batch: what the next step looks up: a Batch, its Features, a Plan, or a number of keys. A list of these if
            there are several until the next call of `grow`: micro-batches, or the batches of several steps. A Batch
            stacked along a leading axis, as `lax.scan` takes it, stands for so many steps. None: the steps are taken
            to be as the largest of the batches so far; before there was one, nothing is known, and a warning says so.
          steps: how many steps like this batch are dispatched until the next call, if it is one batch or None.
          clock: now, for eviction: an integer or a uint32 scalar; None: `state.step`.
          hand_over: is given the rows that are evicted, as by `evict`.

        Raises:
          TypeError, ValueError: a batch that is none of these, or of another collection.
          MemoryError: the larger store will not fit; says the bytes asked and the bytes that a row costs.

        Cost:
          Some microseconds of host time for each feature. Only if positions do not fit: a wait for the steps under way,
          and a count of the batch's keys on the device (a collective on a mesh).

        Example:
          `state = collection.grow(state, batch)` before each step.
        """
        check_state("grow", self, state)
        check_untraced("grow", state)
        steps = checks.integer("grow: steps", steps, 1)
        coming = self.growth.seen(steps) if batch is None else self._coming(batch, steps)
        if batch is None and not any(coming.positions) and "batch" not in self.growth.told:
            self.growth.told.add("batch")
            warnings.warn(
                "grow: batch: got none, and no batch was packed or looked up yet, so that nothing is known of the keys "
                "that are coming; tables may refuse some of them. Pass what the next step looks up: "
                "collection.grow(state, batch).",
                RuntimeWarning,
                stacklevel=3,  # the caller, behind the annotation
            )
        now = clock_of("grow", clock)
        return grow_lib.grow(
            self.stores, self.growth, state, coming, steps, self.shards, now, hand_over, tables=self.tables
        )

    def _coming(self, batch: Any, steps: int) -> coming_lib.Coming:
        """What a caller of `grow` says is coming."""
        is_list = isinstance(batch, (list, tuple))
        positions, uncounted = [0] * len(self.stores), [0] * len(self.stores)
        counted, num_steps = [], 0
        for one in batch if is_list else (batch,):
            features = one.features if isinstance(one, (Batch, Plan)) else one
            num_stacked = 0
            if isinstance(features, Features):
                check_features("grow", self, features)
                num_stacked = coming_lib.num_stacked(features)
                keys = [
                    max(1, num_stacked) * grow_lib.keys_at_most(spec, coming_lib.num_keys_of(features, s))
                    for s, spec in enumerate(self.stores)
                ]
                counted.append(features)
            elif checks.is_integer(features, 0):
                keys = [grow_lib.keys_of_total(spec, int(features)) for spec in self.stores]
            else:
                got = repr(one) if isinstance(one, (int, float)) else type(one).__name__
                raise TypeError(
                    f"grow: batch: got {got}, wanted a Batch, its Features, a Plan, a number of keys, or a list of "
                    "these; pack raw features first: batch = collection.batch(raw)."
                )
            is_one = not is_list and num_stacked == 0
            if not is_one and steps not in (1, max(1, num_stacked)):
                raise ValueError(
                    f"grow: steps: got {steps} with {'a list of' if is_list else 'several stacked'} batches, wanted "
                    "none: the batches say how many steps come."
                )
            times = steps if is_one else 1
            num_steps += max(times, num_stacked)
            for s, num_keys in enumerate(keys):
                positions[s] += times * num_keys
                uncounted[s] += (times - isinstance(features, Features)) * num_keys
        for s, num_assigned in enumerate(self.growth.assigned_per_step):
            positions[s] += num_steps * num_assigned
            uncounted[s] += num_steps * num_assigned
        return coming_lib.Coming(positions, tuple(counted), uncounted)

    def ahead(self, step: Any, *, state_argnum: int = 0) -> ahead_lib.Ahead:
        """Wraps a jitted step, so that the program for the next capacity is there when the state grows.

        Call the result as you call the step: results and donation are those of the step. It holds a program for each
        set of shapes, dtypes and places of the arguments; a set that is new is compiled on the spot, as `jax.jit` does
        it. Once a store is more than half full, a thread traces and compiles the step for the state that `grow` will
        make next; if growth comes before that is done, the call waits for the rest of it. Where growth goes elsewhere
        (memory ran short, another batch size came along), the call compiles on the spot.

        The step is traced in another thread, under the settings of the calling one (`jax.set_mesh`,
        `jax.default_device`, `jax.enable_x64`, matmul precision, type promotion, random bits; not the deprecated
        `with mesh:`). It must not change anything outside itself when traced. A program that fails in the background
        is told by a `RuntimeWarning` of the next call, and compiled where it is first called. At its end the
        interpreter waits for a program under way.

        Args:
          step: what `jax.jit` returned, without static arguments: bind those with `functools.partial` or a closure.
          state_argnum: which positional argument is the state.

        Returns:
          A callable; its `num_compiled`, `num_ahead`, `num_hits_ahead` and `stalls_s` say what was compiled, where,
          and how long calls waited. Each program is logged, at level INFO, to "jaxsok.ahead".

        Raises:
          TypeError, ValueError: a step that is not jitted; when called, no state at `state_argnum`, static arguments.

        Cost:
          One to two microseconds for each array among the arguments of a call. In the background one compilation
          for each capacity, of which the last is in vain; on a GPU XLA may time kernels there while steps run.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=4)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> def step(state, features):
          ...     embeddings, state, plan = collection.lookup(state, features)
          ...     return collection.update(state, plan, embeddings)
          >>> step = collection.ahead(jax.jit(step, donate_argnums=0))
          >>> state = collection.init(seed=0)
          >>> for start in range(0, 16, 2):  # two new keys a step: from 4 rows to 8, then to 16
          ...     features = collection.batch({"clicked": np.arange(start, start + 2)}).features
          ...     state, stats = step(collection.grow(state, features), features)
          >>> state.stores[0].capacity, step.num_compiled + step.num_hits_ahead  # three programs were called
          (16, 3)
        """
        return ahead_lib.Ahead(step, self.stores, self.growth, state_argnum)

    @annotations.annotated("jaxsok.stack")
    def stack(self, tree: Any) -> Any:
        """Global arrays as `pmap` takes them: each `[num_shards * n, ...]` as `[num_shards, n, ...]`.

        What is the same everywhere (a state's seed and step) is given to each shard. `unstack` is the way back.

        Args:
          tree: a state, features, or any arrays split over the axis; consumed.

        Example:
          `state = collection.stack(collection.init(seed=0))`, then `jax.pmap(step, axis_name="data")(state, ...)`.
        """
        return self._restacked("stack", tree, is_stacking=True)

    @annotations.annotated("jaxsok.unstack")
    def unstack(self, tree: Any) -> Any:
        """What `pmap` gave, as global arrays: the way back from `stack`.

        Example:
          `collection.export_table(collection.unstack(state), "user")`
        """
        return self._restacked("unstack", tree, is_stacking=False)

    def _restacked(self, op: str, tree: Any, *, is_stacking: bool) -> Any:
        if not self.shards.is_mesh:
            raise ValueError(f"{op}: tree: got arrays of one device, wanted a collection with a mesh.")
        nodes, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, State))
        is_split = jax.tree.leaves([_is_split(node) for node in nodes])
        leaves, inner = jax.tree.flatten(nodes)
        # All is compiled before anything is consumed. One array may stand in several places.
        programs = {
            id(leaf): _restack.lower(leaf, self.shards, is_part, is_stacking).compile()
            for leaf, is_part in zip(leaves, is_split, strict=True)
        }
        new = {}
        for old in leaves:
            if id(old) not in new:
                new[id(old)] = programs[id(old)](old)
                old.delete()  # one by one: never two copies of everything
        return jax.tree.unflatten(structure, jax.tree.unflatten(inner, [new[id(old)] for old in leaves]))

    def memory_estimate(
        self,
        state: State | None = None,
        batch: Batch | Features | None = None,
        *,
        num_rows: int | Mapping[str, int] | None = None,
        steps: int = 1,
        device_bytes: int | None = None,
        memory_fraction: float = memory_lib.MEMORY_FRACTION,
    ) -> memory_lib.MemoryEstimate:
        """Counts the bytes that the collection takes on each device. `print` the result.

        Args:
          state: of which capacities; None: as `init` makes it, or as `grow` makes it for `num_rows`.
          batch: what a step works on: of `batch`, or its features. None: the state alone is counted.
          num_rows: rows that the tables have (`collection.num_rows(state)`) or will come to have; see
            `jaxsok.memory_estimate`.
          steps: between two calls of `grow`.
          device_bytes: memory of one device: whether the total fits, and how many rows would.
          memory_fraction: of `device_bytes`, what XLA gives to arrays: XLA_CLIENT_MEM_FRACTION, by default 0.75.

        Example:
          `collection.memory_estimate(state, batch).total`
        """
        num_shards = self.shards.num_shards
        features = batch.features if isinstance(batch, Batch) else batch
        if features is None:
            parts = [features_lib.shaped(store, (), {}) for store in self.stores]
        else:
            check_features("memory_estimate", self, features)
            parts = [features_lib.part_shape(part, features.num_parts) for part in features.stores]
        if state is not None:
            check_state("memory_estimate", self, state)
        return memory_lib.estimated(
            self.tables,
            parts,
            num_shards=num_shards,
            capacities=None if state is None else [store.capacity // num_shards for store in state.stores],
            num_rows=num_rows,
            exchange=self.exchange,
            steps=steps,
            device_bytes=device_bytes,
            memory_fraction=memory_fraction,
        )

    def _note_keys(self, features: Sequence[Features]) -> None:
        for s, spec in enumerate(self.stores):
            layouts = [layout for part in features for layout in part.stores[s].layouts]
            keys = grow_lib.keys_at_most(spec, [(layout.table, layout.num_keys) for layout in layouts])
            self.growth.saw_batch(s, keys)

    def _allocated(self, state: State, store: int) -> int:
        """Rows that a store has for different keys, on all shards; the state may be a shard's part or all of it."""
        spec, capacity = self.stores[store], state.stores[store].capacity
        if not self.shards.sees_parts():
            capacity //= spec.num_shards
        return capacity if spec.is_replicated else capacity * spec.num_shards

    def _entries(self, state: State, store: int) -> int:
        """Entries of a store's index for different keys, on all shards; as `_allocated`."""
        one = state.stores[store]
        return self._allocated(state, store) * ENTRIES_PER_BUCKET * one.index.shape[0] // one.capacity

    def _check_send_capacity(self, send_capacity: Sequence[int]) -> None:
        what = "plan: send_capacity"
        if not self.shards.is_mesh:
            raise ValueError(f"{what}: got one without a mesh, wanted None; nothing is sent on one device.")
        if not isinstance(send_capacity, (tuple, list)) or len(send_capacity) != len(self.stores):
            raise ValueError(f"{what}: got {send_capacity!r}, wanted one number for each of {len(self.stores)} stores.")
        for capacity in send_capacity:
            checks.integer(what, capacity, 1, wanted="a number of keys, at least 1")

    def _plans_and_gradients(self, op: str, plan: Any, gradients: Any) -> tuple[list[Plan], list[Mapping[str, Array]]]:
        """What an op on lookups was given, as lists of one length."""
        plans = [plan] if isinstance(plan, Plan) else list(plan)
        grads = [gradients] if isinstance(gradients, Mapping) else list(gradients)
        if not plans or len(plans) != len(grads):
            raise ValueError(
                f"{op}: gradients: got {len(grads)} for {len(plans)} plans, wanted one for each, at least 1."
            )
        for one in plans:
            if not isinstance(one, Plan) or one.found is None:
                raise TypeError(
                    f"{op}: plan: got {type(one).__name__} that no lookup returned, wanted lookup's third result."
                )
            check_features(op, self, one.features)
        return plans, grads

    def _check_gradients(self, op: str, plans: Sequence[Plan], gradients: Sequence[Mapping[str, Array]]) -> None:
        num_parts = 1 if self.shards.sees_parts() else self.shards.num_shards
        for plan, of_plan in zip(plans, gradients, strict=True):
            gradients_lib.check_gradients(self.stores, plan, of_plan, num_parts, op)

    def _stats(self, state: State, words: Int32[Array, " num_words"]) -> Stats:
        """The counts of one step, of this shard's words; on a mesh of all shards: one small all-reduce."""
        stores = [locate("stats", self, table.name)[0] for table in self.tables]
        return Stats(
            self.shards.sum(words),
            tables=tuple(table.name for table in self.tables),
            capacities=tuple(self._allocated(state, s) for s in stores),
            stores=tuple(stores),
            entries=tuple(self._entries(state, s) for s in stores),
            num_shards=self.shards.num_shards,
        )

    def _words(
        self,
        state: State,
        found: Sequence[Sequence[Found]],
        nonfinite: Sequence[Array],
        num_stale: Int32[Array, ""],
        num_misused_plans: Int32[Array, ""],
    ) -> Int32[Array, " num_words"]:
        """What one shard adds to the counts of a step, as Stats hold them."""
        num_shards = self.shards.num_shards
        # The words of all shards are added up: what all of them have alike is that of the first.
        place = 0 if num_shards == 1 else self.shards.index()
        is_first = place == 0
        is_own = [is_first | (not spec.is_replicated) for spec in self.stores]
        word = {name: i for i, name in enumerate(COUNTERS)}
        counters = jnp.stack([store.counters for store in state.stores]).astype(jnp.int32)
        rounds = jnp.stack([jnp.concatenate([one.num_rounds for one in plan]) for plan in found]).max(axis=0)
        evicted = [
            one.table_evicted[0] if one.table_evicted else jnp.zeros(len(spec.tables), jnp.uint32)
            for spec, one in zip(self.stores, state.stores, strict=True)
        ]
        of_stores = lambda values: jnp.concatenate(  # noqa: E731
            [jnp.where(own, value.astype(jnp.int32), 0) for own, value in zip(is_own, values, strict=True)]
        )
        longest = jnp.zeros((num_shards, len(self.stores)), jnp.int32).at[place].set(counters[:, word["longest_probe"]])
        return stats_lib.pack_words(
            counts=sum(jnp.concatenate([one.counts for one in plan]) for plan in found),
            num_nonfinite=jnp.concatenate(list(nonfinite)),
            num_rows=of_stores([store.table_rows for store in state.stores]),
            num_evicted=of_stores(evicted),
            num_unplaced=of_stores([line[word["num_unplaced"]][None] for line in counters]),
            num_rounds=jnp.where(is_first, rounds, 0),
            num_stale=num_stale,
            num_misused_plans=jnp.where(is_first, num_misused_plans, 0),
            longest_probe=longest,
        )


def _check_declared(
    tables: Sequence[TableSpec], features: Sequence[FeatureSpec], exchange: ExchangeSpec | None
) -> None:
    """Refuses specs that are none, names that stand twice, and features of tables that are not there."""
    for kind, specs, wanted in (("tables", tables, TableSpec), ("features", features, FeatureSpec)):
        for spec in specs:
            if not isinstance(spec, wanted):
                raise TypeError(f"Collection: {kind}: got {spec!r}, wanted {wanted.__name__}s.")
        names = [spec.name for spec in specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Collection: {kind}: got {twice} more than once, wanted one spec for each name.")
    if not tables:
        raise ValueError("Collection: tables: got none, wanted at least one TableSpec.")
    known = [table.name for table in tables]
    for feature in features:
        if feature.table not in known:
            raise ValueError(
                f'Collection: feature "{feature.name}": table: got "{feature.table}", wanted one of {known}.'
            )
    if exchange is not None and not isinstance(exchange, ExchangeSpec):
        raise TypeError(f"Collection: exchange: got {exchange!r}, wanted a jaxsok.ExchangeSpec.")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _restack(leaf: Array, shards: Shards, is_split: bool, is_stacking: bool) -> Array:
    """An array with a leading axis of shards, or without it."""
    if is_stacking:
        return shards.run(lambda part: part[None], (leaf,), (shards.spec if is_split else P(),), shards.spec)

    def unstacked(part: Array) -> Array:
        # What all have alike is that of the first.
        return part[0] if is_split else lax.psum(jnp.where(shards.index() == 0, part[0], 0), shards.axis)

    return shards.run(unstacked, (leaf,), (shards.spec,), shards.spec if is_split else P())


def _is_split(node: Any) -> Any:
    """For each array of a state, or of anything else, whether each shard has a part of it."""
    if not isinstance(node, State):
        return True
    others = dict.fromkeys(("step", "seed", "partition_owners", "lineage", "num_refused"), False)
    return dataclasses.replace(node, stores=jax.tree.map(lambda _: True, node.stores), tickets=True, **others)


def check_scalar(what: str, value: Any) -> None:
    """Refuses what is no number, traced or not, of one element; `what`: the operation and its argument."""
    is_number = checks.is_number(value) or isinstance(value, (np.ndarray, jax.Array))
    if not is_number or np.shape(value) != ():
        got = f"shape {list(np.shape(value))}" if is_number else repr(value)
        raise TypeError(f"{what}: got {got}, wanted a scalar.")
