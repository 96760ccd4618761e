"""The collection that a user declares and calls: tables, features, a mesh. It holds no arrays; the state does."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, UInt32

from jaxsok import (
    ahead as ahead_lib,
    annotations,
    checks,
    declaration,
    enlarge,
    evict as evict_lib,
    gradients as gradients_lib,
    guards,
    lives,
    memory as memory_lib,
    norms as norms_lib,
    operations,
    pack as pack_lib,
    pipeline as pipeline_lib,
    plan as plan_lib,
    policies,
    processes,
    raw_features,
    specs as specs_lib,
    stacking,
    table_export,
    table_import,
)
from jaxsok.caches import CacheStats
from jaxsok.checks import LARGEST_FLOAT32
from jaxsok.coming import num_stacked
from jaxsok.features import Batch, Features
from jaxsok.growth import GrowthTracker
from jaxsok.host_slabs import commit_to_device, with_host_slabs
from jaxsok.interrupts import Held
from jaxsok.kernels import library
from jaxsok.keys import to_words
from jaxsok.lookup import Embeddings
from jaxsok.operations import (
    check_features,
    check_placed,
    check_state,
    clock_of,
    lineage_of,
)
from jaxsok.plan import Loads, Plan
from jaxsok.printed import join_items
from jaxsok.records import Records
from jaxsok.shards import MeshShards, Shards
from jaxsok.specs import ExchangeSpec, FeatureSpec, StoreSpec, TableSpec
from jaxsok.stats import Stats
from jaxsok.steps import Steps
from jaxsok.store import State, init_stores
from jaxsok.strategy import strategy_of
from jaxsok.tickets import no_tickets

Plans = Plan | Sequence[Plan]
PlanGradients = Mapping[str, Array] | Sequence[Mapping[str, Array]]
"""Gradients by feature: one mapping for each plan."""


class Collection:
    """Tables, and the features that read them.

    Tables of one dim, dtype, embedding_dtype, rounding, optimizer, row_gradient and eviction share a store; all
    features over a store cost one FFI call per lookup and one per update.

    With a mesh the samples of a batch and the rows of the tables are split over the named axis: keys travel to the
    shards that own them, rows travel back (docs/many_devices.md). Methods take and give global arrays, under `jit` or
    not; inside `shard_map` or `pmap` over the axis they take and give a shard's part.

    Methods refuse a state or features of another collection with a ValueError, also when traced. Where a state is
    donated, the result has its buffers. Keys that `erase`, `contains`, `rows_of` and `assign` take are NumPy integers,
    or words, `[num_keys]`; on a mesh they are the same everywhere, in all processes.

    Args:
      tables: at least one; names are unique.
      features: names are unique; each names a table. Their order is the order of keys in a batch.
      mesh: the devices; None: one.
      axis: the axis of the mesh over which batches and tables are split, or several as a tuple. Along other axes of the
        mesh both are repeated.
      exchange: how rows and gradients travel between shards; None: rows as they are stored, gradients as float32.

    Raises:
      TypeError, ValueError: two tables or features of one name, a feature on an unknown table, no tables.

    Example (those of the methods continue it):
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
        self.shards: Shards = Shards.of(mesh, axis)
        num_shards = self.shards.num_shards
        specs_lib.check_declarations("Collection", tables, features, num_shards, exchange)
        self.exchange: ExchangeSpec = exchange or ExchangeSpec()
        self.tables: tuple[TableSpec, ...] = tuple(tables)
        self.features: tuple[FeatureSpec, ...] = tuple(features)
        self.stores: tuple[StoreSpec, ...] = specs_lib.group_into_stores(
            self.tables, num_shards, specs_lib.bag_tables(self.features)
        )
        declaration.check_stores("Collection", self.stores, self.features, self.exchange, num_shards)
        self.fingerprint: str = specs_lib.fingerprint(self.stores)
        # One shard has all partitions; an array without elements would be refused by Orbax.
        self.partition_owners: np.ndarray = plan_lib.default_owners(num_shards)[: None if num_shards > 1 else 1]
        self.growth = GrowthTracker.of(self.stores, self.tables, self.shards)
        of_tables = [(table.name, operations.locate("Collection", self, table.name).store) for table in self.tables]
        self.packer: pack_lib.Packer = pack_lib.Packer(self.stores, self.features, self.fingerprint, self.shards)
        self.step_with_plan = functools.lru_cache(maxsize=16)(
            lambda step, capacities: pipeline_lib.step_with_plan(step, self, capacities)
        )
        self._steps = Steps(self.stores, tuple(of_tables), strategy_of(self.shards, self.exchange))

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles that are declared in the same way, without compiled steps or what `grow` learned."""
        mesh, axis = (self.shards.mesh, self.shards.axis) if isinstance(self.shards, MeshShards) else (None, None)
        declare = functools.partial(type(self), mesh=mesh, axis=axis, exchange=self.exchange)
        return declare, (self.tables, self.features)

    def __repr__(self) -> str:
        tables = [f"{table.name} ({table.dim} {table.dtype}, {table.optimizer.name})" for table in self.tables]
        features = [f"{feature.name} ({feature.table}, {feature.combiner})" for feature in self.features]
        place = f"mesh {self.shards!s}" if str(self.shards) else "one device"
        place += f", {self._steps.strategy.wire} wire" if self._steps.strategy.wire else ""
        return f"Collection(tables: {join_items(tables)}; features: {join_items(features)}; {place})"

    @annotations.annotate("jaxsok.init")
    def init(self, seed: int = 0, *, salt: int | None = None) -> State:
        """Allocates empty stores of the declared capacity.

        Args:
          seed: new rows are functions of (seed, table name, key, column); 0 to 2**64 - 1.
          salt: the salts of the stores' hashes are functions of it; 0 to 2**64 - 1. None: they are drawn at random, the
            same in all processes, so that colliding keys cannot be crafted. They change only where entries lie in the
            index, and `longest_probe`. Give one where these must be the same on every run and you trust the source of
            the keys.

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
            given = [f"mesh: {shards}", f"seed: {seed}", f"salt: {salt}", f"exchange: {self.exchange}"]
            features = [repr(feature) for feature in self.features]
            tables = [*specs_lib.describe(self.stores), *specs_lib.declarations(self.tables)]
            processes.require_same("init", [*given, *tables, *features])
        free, host_share = enlarge.agree_on_room(self.stores, shards)
        asked = [(store, store.capacity) for store in self.stores]
        enlarge.require_memory(asked, "init", free, host_share, is_new=True)
        enlarge.warn_of_max_capacity(self.stores, host_share)
        # The first words name the state's life in exports, which others read, so the salts come from other words.
        drawn = processes.draw_words("init", is_shared=shards.num_processes > 1, num_words=6)
        entropy = drawn[2:].tolist() if salt is None else int(salt)
        salts = to_words(np.random.SeedSequence(entropy).generate_state(len(self.stores), np.uint64))
        operands = to_words(np.array([seed], np.uint64))[0], self.partition_owners
        step, seed_words, owners, refused = shards.make(_make_rest, len(self.tables), operands=operands, is_split=False)
        # Not drawn, so two runs have the same bits. Exports still distinguish lives with the same words.
        own = int(seed), int(self.fingerprint, 16), shards.num_processes
        if isinstance(step, jax.core.Tracer) and shards.num_processes == 1:
            # When the program runs: words of now would be those of all states that it makes.
            words = functools.partial(processes.draw_words, "init", is_shared=False)
            begin = lambda: lives.IN_THIS_PROCESS.begin_init(own, words())  # noqa: E731
            lineage = io_callback(begin, jax.ShapeDtypeStruct((2,), np.uint32))
        else:
            lineage = lives.IN_THIS_PROCESS.begin_init(own, drawn[:2])
        with processes.fail_together("init", is_shared=shards.num_processes > 1):
            stores = shards.make(init_stores, self.stores, operands=(salts,))
            stores = with_host_slabs(self.stores, stores, shards)
        state = State(
            stores=stores,
            tickets=shards.make(no_tickets, shards.num_shards),
            step=step,
            seed=seed_words,
            partition_owners=owners,
            lineage=lineage_of(self.shards, lineage),
            num_refused=refused,
            fingerprint=self.fingerprint,
            mesh=str(self.shards),
        )
        self.growth.forget()
        return commit_to_device(state)

    def batch(self, raw: Mapping[str, Any], *, pad_to: pack_lib.PadTo = None) -> Batch:
        """Packs a raw batch: features into few arrays of static size, everything else untouched.

        On a mesh this process's samples are split over its shards in order, and so are entries of `raw` with a row per
        sample. In several processes each passes its own samples, all the same number of them.

        Args:
          raw: for each feature an integer array `[num_bags]` or `[num_bags, hotness]`, or `Bags`; also `Coo` (or a
            `tf.SparseTensor`), a `tf.RaggedTensor`, a column of integers or of lists of them (Arrow, Polars), a
            `jax.experimental.sparse.BCOO`. All have one number of samples. Other entries are carried along
            (`batch["label"]`); an array that is a column, `[n]` or `[n, 1]`, must have a row per sample too. Pass
            an array that is no data of samples in a tuple. Lists and Arrow columns are neither checked nor padded.
          pad_to: adds samples without keys until there are so many: for the last batch of a log. "auto": until they can
            be split over the shards. `batch.mask` marks the real ones.

        Raises:
          TypeError, ValueError: names the feature, the argument, what was got and wanted.

        Cost:
          NumPy input is read once, by several threads, and written to where the devices copy from; one transfer per
          store, which the call does not wait for. On GPUs this memory is pinned, and keys of 32 bits travel as such.
          It is kept for the next batches: per batch in use twice the batch at most. Features with `inverse` take
          several passes of one thread.

        Example:
          `batch = collection.batch({"user": user_ids, "history": Bags(ids, lengths=lengths), "label": clicks})`
        """
        packer = self.packer
        batch = packer.finish(packer.send(packer.complete(packer.begin(raw, pad_to))))
        self.growth.record_features([batch.features])
        return batch

    @annotations.annotate("jaxsok.plan")
    def plan(self, features: Features, *, send_capacity: Sequence[int] | None = None) -> Plan:
        """Makes the keys of a batch distinct and orders them by owner, on a mesh. Reads no table, so it can run ahead.

        On one device a lookup needs no such step: the plan has nothing but the features. On a mesh, with
        `send_capacity` (for each store the keys for one destination), it also sends the keys to their owners, in one
        round: the lookup and the update then have no loop, and the host waits for nothing. Keys beyond the capacity are
        not sent, read what refused keys read (in partial bags: zeros) and are counted as refused: compare it with
        `plan.asked[s].load[0, 0]` first, or let `collection.pipeline` do so. Without it the lookup and the update go in
        as many rounds as it takes.

        Cost:
          Few passes over the keys and a scratch index of 32 bytes a key; on more than 64 shards also a sort by owner.

        Example:
          `embeddings, state, plan = collection.lookup(state, collection.plan(batch.features))`
        """
        return self._steps.call("plan", *self._checked_for_plan(features, send_capacity))

    @annotations.annotate("jaxsok.plan")
    def plan_with_loads(self, features: Features, send_capacity: Sequence[int]) -> tuple[Plan, Loads]:
        """Does `plan` on a mesh for a pipeline: also gives `plan.asked[s].load` by store, to be read by the host."""
        return self._steps.plan_with_loads(*self._checked_for_plan(features, send_capacity))

    def _checked_for_plan(self, features: Features, send_capacity: Any) -> tuple[Features, Any]:
        """Returns the checked arguments of `plan`, with capacities that can be hashed."""
        check_features("plan", self, features)
        if send_capacity is not None:
            what, num_stores = "plan: send_capacity", len(self.stores)
            if not self.shards.is_mesh:
                raise ValueError(f"{what}: got one without a mesh, wanted None; nothing is sent on one device.")
            if not isinstance(send_capacity, (tuple, list)) or len(send_capacity) != num_stores:
                raise ValueError(f"{what}: got {send_capacity!r}, wanted one number for each of {num_stores} stores.")
            wanted = "a number of keys, at least 1"
            send_capacity = tuple(checks.integer(what, capacity, 1, wanted=wanted) for capacity in send_capacity)
        (features,) = guards.refuse_transforms("plan", features=features)
        return features, send_capacity

    def pipeline(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        pad_to: pack_lib.PadTo = None,
        lookahead: int = 0,
        staleness: int = 0,
        micro_batches: int = 1,
        steps_per_call: int = 1,
        prefetch: int = pipeline_lib.PACKED_AHEAD,
    ) -> "pipeline_lib.Pipeline":
        """Iterates over (batch, plan) of raw batches, made while earlier steps run.

        On a mesh, two batches ahead, the keys are exchanged with the plan, and its counts choose the send capacity: the
        step has no loop, the host never waits for a step, and results are those of `lookup(state, batch.features)`. Few
        capacities are used, each a program of the step. On one device plans are left to the lookup, which is faster.

        Args:
          batches: raw batches; what their iterator raises is raised after the batches before it were handed out.
          pad_to: that of `batch`.
          lookahead: 1: the lookup of a batch also looks up the next one, except for the numbers of its rows, which are
            read after the update. Results have the bits of a loop without it (decision 0023). On one device whose
            tables all lie in its own memory nothing is looked up ahead: there a model cannot hide it.
          staleness: d: the next d batches are looked up before the updates between them, so that the rows of a batch
            miss d updates (fewer for the first batches, and after `drain`). It includes lookahead.
          micro_batches: how many batches one update takes, where there are lookups ahead.
          steps_per_call: n: each (batch, plan) is of up to n steps, stacked along a leading axis, for a `lax.scan` over
            them: one call for n steps, which pays where the host sets the pace (docs/compiled_steps.md). Batches of
            another form, and the last ones, come as shorter stacks, each length a program of the step.
          prefetch: batches (with `steps_per_call` calls) that a thread reads and packs further ahead. 0: no thread. The
            calling thread then reads two of them ahead, and the library's threads pack the second while it dispatches
            a step. Python threads that wait for each other cost 0.1 to 0.3 ms a batch
            (docs/results/many_gpus.md): try 0 where steps take about a millisecond and the next raw batch is there when
            it is asked for.

        Returns:
          An iterator. Its `get_state()` is that of a Grain iterator as it was after the batch handed out last.

        While lookups are in flight the state has them (`state.ahead`): `lookup`, `update` and `grow` go on with them,
        other operations raise a ValueError until the state is drained (`drain`), as it is after the last batch.
        `num_rows` and `cache_stats` count them.

        Example:
          >>> for batch, plan in collection.pipeline({"clicked": np.arange(i, i + 4)} for i in range(3)):
          ...     state = collection.grow(state, batch)
          ...     embeddings, state, plan = collection.lookup(state, plan)
          ...     state, stats = collection.update(state, plan, embeddings)
          >>> collection.num_rows(state)
          {'item': 8}
        """
        checks.integer("pipeline: lookahead", lookahead, 0)
        checks.integer("pipeline: staleness", staleness, 0)
        checks.integer("pipeline: micro_batches", micro_batches, 1)
        checks.integer("pipeline: steps_per_call", steps_per_call, 1)
        checks.integer("pipeline: prefetch", prefetch, 0)
        if lookahead > max(1, staleness):
            raise ValueError(
                f"pipeline: lookahead: got {lookahead} with staleness {staleness}, wanted at most {max(1, staleness)}: "
                "an exact lookup runs one batch ahead."
            )
        if staleness and micro_batches > 1:
            raise ValueError(f"pipeline: micro_batches: got {micro_batches} with staleness {staleness}, wanted 1.")
        if steps_per_call > 1 and (staleness or (lookahead and micro_batches > 1)):
            other = f"staleness {staleness}" if staleness else f"micro_batches {micro_batches} and lookups ahead"
            raise ValueError(f"pipeline: steps_per_call: got {steps_per_call} with {other}, wanted 1.")
        lookahead = lookahead if self._can_hide_lookups else 0
        ahead = pipeline_lib.LookAhead(max(lookahead, staleness), staleness, micro_batches)
        return pipeline_lib.Pipeline(self, batches, pad_to, ahead, prefetch, steps_per_call)

    @property
    def _can_hide_lookups(self) -> bool:
        """True if a part of a lookup can run while a model does: an exchange, or a transfer of rows from the host."""
        return self.shards.is_mesh or any(store.memory is not None for store in self.stores)

    @annotations.annotate("jaxsok.lookup")
    def lookup(self, state: State, features: Features | Plan, *, clock: Any = None) -> tuple[Embeddings, State, Plan]:
        """Looks up a batch; unseen keys get rows, in order of first occurrence, on a mesh shard after shard.

        Returns embeddings by feature, the state, and the plan that `update` takes. The state is donated. `features` may
        be a plan made of them.

        Where statistics are kept (`TableSpec.statistics`, or an eviction that needs them), the `last_step` of every row
        used becomes `clock`, and its `frequency` grows by the occurrences of its key, over all shards. `clock` is a
        uint32 scalar, perhaps traced: the user's own time, the same on all shards. None: `state.step`.

        Raises:
          TypeError, ValueError: a clock that is no uint32 scalar, or out of range. Raised when traced.

        Cost:
          An FFI call per store, and one for all; more for rows in host memory and on a mesh. Per key 16 bytes, one
          64-byte bucket and its row read, an embedding written. On a mesh also 16 bytes and a row on the wire for each
          distinct key, plus padding.

        Example:
          `embeddings, state, plan = collection.lookup(state, batch.features)`
        """
        check_state("lookup", self, state)
        plan = features if isinstance(features, Plan) else Plan(features)
        check_features("lookup", self, plan.features)
        now = clock_of("lookup", clock)
        if now is not None and (plan.following or state.ahead):
            raise ValueError(
                "lookup: clock: got one with lookups ahead, wanted None: the batches that are looked up ahead have the "
                "state's step as their time."
            )
        if state.ahead and self.shards.num_shards > 1 and plan.asked is None:
            raise ValueError(
                "lookup: features: got those of a batch where lookups are in flight, wanted the plan that the pipeline "
                "gave with the batch."
            )
        self.growth.record_features([plan.features])
        # After the last batch no lookup takes the place of this one, and a smaller batch leaves smaller arrays.
        guards.expect_the_end_of(state.ahead, self.shards.num_shards)
        state, plan, now = guards.refuse_transforms("lookup", state=state, features=plan, clock=now)
        return self._steps.call("lookup", state, plan, now)

    @annotations.annotate("jaxsok.find")
    def find(self, state: State, features: Features | Plan) -> tuple[Embeddings, Stats]:
        """Looks up a batch for evaluation: reads only. A key without a row reads what its table's `unknown` says.

        Example:
          `embeddings, stats = collection.find(state, batch.features)`
        """
        check_state("find", self, state)
        plan = features if isinstance(features, Plan) else Plan(features)
        check_features("find", self, plan.features)
        state, plan = guards.refuse_transforms("find", state=state, features=plan)
        return self._steps.call("find", state, plan)

    @annotations.annotate("jaxsok.update")
    def update(
        self, state: State, plan: Plans, gradients: PlanGradients, *, learning_rate: Any = None
    ) -> tuple[State, Stats]:
        """Steps every row that the plans used, once, with the sum of its gradients; advances `state.step`.

        Args:
          state: donated.
          plan: of a lookup, or those of several (micro-batches, several lookups in one step).
          gradients: with respect to the embeddings, by feature; one mapping for each plan.
          learning_rate: a scalar, perhaps traced, in place of the optimizers' own; the same on all shards.

        Raises:
          TypeError, ValueError: plans and gradients that do not fit. Raised when traced.

        Cost:
          One FFI call per store: sorts the uses by row, reads each bag gradient, reads and writes each used row and its
          state once. On a mesh also a row gradient on the wire for each distinct key, plus padding.

        Example:
          `state, stats = collection.update(state, plan, g_embeddings)`
        """
        check_state("update", self, state)
        plans, grads = self._plans_and_gradients("update", plan, gradients)
        if learning_rate is not None:
            checks.scalar("update: learning_rate", learning_rate)
            if not isinstance(learning_rate, jax.core.Tracer):
                checks.number("update: learning_rate", float(learning_rate), -LARGEST_FLOAT32, LARGEST_FLOAT32)
        self.growth.record_features([plan.features for plan in plans])
        state, plans, grads, learning_rate = guards.refuse_transforms(
            "update", state=state, plan=plans, gradients=grads, learning_rate=learning_rate
        )
        return self._steps.call("update", state, plans, [*map(dict, grads)], learning_rate)

    @annotations.annotate("jaxsok.gradient_norm")
    def gradient_norm(self, state: State, plan: Plans, gradients: PlanGradients) -> Float32[Array, ""]:
        """Computes the norm of the row gradients that `update` would step by, of all tables together.

        A row counts once, with the sum of its gradients over all uses, plans and shards, scaled as its table's
        `row_gradient` says: with "sum" this is the norm of the gradient that a dense table would have. Rows that the
        update leaves alone (refused keys, stale plans, a sum that is not finite) do not count. The optimizer's own
        limits are not applied. Squares are added in float32, as in `optax.tree.norm`: gradients of 2e19 and more have
        an infinite norm. Two runs give the same bits. Arguments and errors are those of `update`.

        Cost:
          About that of an update: sorts the uses by row, reads each bag gradient, writes and reads a float32 row
          gradient for each key. On a mesh gradients go over the wire a second time.

        Example:
          >>> _, state, plan = collection.lookup(state, batch.features)
          >>> gradients = {"clicked": jnp.zeros((3, 4)).at[:, 0].set(jnp.array([1, 4, 2]))}  # 3 for key 7, 4 for key 9
          >>> collection.gradient_norm(state, plan, gradients)
          Array(5., dtype=float32)
        """
        check_state("gradient_norm", self, state)
        plans, grads = self._plans_and_gradients("gradient_norm", plan, gradients)
        state, plans, grads = guards.refuse_transforms("gradient_norm", state=state, plan=plans, gradients=grads)
        return self._steps.call("gradient_norm", state, plans, [*map(dict, grads)])

    @annotations.annotate("jaxsok.clip_by_global_norm")
    def clip_by_global_norm(
        self, state: State, plan: Plans, gradients: PlanGradients, max_norm: Any, dense: Any = None
    ) -> tuple[Any, Any, Float32[Array, ""]]:
        """Scales the gradients of rows and of dense parameters together until their norm is at most `max_norm`.

        Does what `optax.clip_by_global_norm` of all of them would, if tables were dense: below `max_norm` no bit
        changes; else each number is multiplied by `max_norm / norm`. Give the results to `update` and to the dense
        optimizer, whose own clipping is left out.

        A row gradient that is not finite does not count, since `update` skips and counts it. A dense gradient that is
        not finite does: as in Optax, a norm of NaN makes all gradients NaN, and then no row moves.

        Args:
          state: read only.
          plan: as for `update`.
          gradients: as for `update`.
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
          >>> _, state, plan = collection.lookup(state, batch.features)
          >>> gradients = {"clicked": jnp.zeros((3, 4)).at[:, 0].set(jnp.array([1, 0, 2]))}  # 3 for key 7
          >>> gradients, dense, norm = collection.clip_by_global_norm(
          ...     state, plan, gradients, 2.5, dense={"bias": jnp.array(4.0)}
          ... )
          >>> norm.item(), gradients["clicked"][:, 0].tolist(), dense["bias"].item()
          (5.0, [0.5, 0.0, 1.0], 2.0)
        """
        lookups = [(self, state, plan, gradients)]
        (gradients, dense), norm = clip_by_global_norm(lookups, (gradients, dense), max_norm, dense)
        return gradients, dense, norm

    @annotations.annotate("jaxsok.erase")
    def erase(self, state: State, table: str, keys: Any) -> tuple[State, UInt32[Array, ""]]:
        """Takes the rows of keys away; absent keys are passed over. Plans made before become stale if any row went.

        Keys that wait for admission by count are forgotten: nothing of a key is in later full exports and checkpoints;
        a delta names the keys of rows that went. A Bloom filter, whose counters keys share, keeps what it has counted.

        Returns the state, which is donated, and how many rows went.

        Cost:
          A search for each key and a byte a row of capacity; if any goes, also 64 bytes a row: the records of the
          table's store twice, and its index once. With admission by count also some 40 bytes for each entry of the
          counts.

        Example:
          `state, num_erased = collection.erase(state, "user", np.array([7]))`
        """
        return operations.on_keys("erase", self, state, table, keys)

    @annotations.annotate("jaxsok.contains")
    def contains(self, state: State, table: str, keys: Any) -> Bool[Array, " num_keys"]:
        """Returns whether each key has a row; False for PADDING_KEY. Reads only.

        Cost:
          One search for each key, on a mesh by every shard, and an all-reduce of 4 bytes a key.

        Example:
          >>> collection.contains(state, "item", np.array([9, 8])).tolist()
          [True, False]
        """
        return operations.on_keys("contains", self, state, table, keys)

    @annotations.annotate("jaxsok.rows_of")
    def rows_of(
        self, state: State, table: str, keys: Any
    ) -> tuple[Float[Array, "num_keys dim"], Bool[Array, " num_keys"]]:
        """Returns the rows of keys in the dtype of the table, zeros where there is none; and whether there is one.

        Nothing is inserted, and nothing noted. `find` gives embeddings of a batch, and a key without a row its initial
        one; this is for a look at single rows.

        Cost:
          A search and a row for each key; on a mesh by every shard, and an all-reduce of the rows.

        Example:
          `rows, is_there = collection.rows_of(state, "user", np.array([7, 9]))`
        """
        return operations.on_keys("rows_of", self, state, table, keys)

    @annotations.annotate("jaxsok.assign")
    def assign(
        self, state: State, table: str, keys: Any, rows: Any, *, clock: Any = None
    ) -> tuple[State, UInt32[Array, ""], UInt32[Array, ""]]:
        """Sets the rows of keys; keys without one get one, whatever the table's admission says.

        The optimizer state of rows that were there stays, and is initial for new ones. Where statistics are kept, the
        last step of the rows becomes `clock`; their frequency stays.

        Args:
          state: donated.
          table: its name.
          keys: of a repeated key the last row counts. PADDING_KEY is passed over.
          rows: `[num_keys, dim]` of any float dtype, rounded to nearest, float64 to float32 first; on a mesh the same
            everywhere.
          clock: a uint32 scalar, perhaps traced; None: `state.step`.

        Returns:
          The state, how many keys were new, and how many were refused because their shard was full, a repeated key each
          time: call `grow(state, num_keys)` first. `grow(state, batch)` keeps room for the keys of an `assign` within
          a jitted step, once it has seen the step traced. `import_table` makes room by itself. If some are refused,
          keys that wait for admission get rows first, then others, each in their order.

        Raises:
          TypeError, ValueError: rows of another shape; raised when traced. ValueError: `rows` is a NumPy array
            with a finite number that float32 cannot hold.

        Cost:
          A search and a sort of the keys, on a mesh by every shard; each row is written once.

        Example:
          >>> state, num_inserted, _ = collection.assign(state, "item", np.array([8, 9]), np.ones((2, 4)))
          >>> int(num_inserted), collection.rows_of(state, "item", np.array([9, 5]))[0].sum(axis=1).tolist()
          (1, [4.0, 0.0])
        """
        return operations.assign(self, state, table, keys, rows, clock)

    @annotations.annotate("jaxsok.clear")
    def clear(self, state: State, table: str) -> tuple[State, UInt32[Array, ""]]:
        """Takes all rows of a table away; other tables of its store keep theirs.

        Plans made before become stale if any row went. Keys that wait for admission are forgotten, too. Returns the
        state, which is donated, and how many rows there were.

        Cost:
          16 bytes a row of capacity, and if there are rows 64 more: the records of the table's store three times, and
          its index once. Also the optimizer state and statistics of the rows that go.

        Example:
          `state, num_erased = collection.clear(state, "user")`
        """
        return operations.clear(self, state, table)

    @annotations.annotate("jaxsok.evict")
    def evict(
        self,
        state: State,
        table: str | None = None,
        policy: policies.Eviction | None = None,
        *,
        num_rows: Any = None,
        clock: Any = None,
        hand_over: evict_lib.HandOver | None = None,
    ) -> tuple[State, evict_lib.Evicted]:
        """Takes rows away by policy, exactly over all rows of a shard. Plans made before become stale if any went.

        A policy that ranks rows (least recently used, least frequently used, a score of the user's own) leaves
        `num_rows` of them: those of lowest score go, ties in the order of (table, key). A policy that marks rows as
        expired (`TimeToLive`, `SmallNorm`) takes those. State and statistics go with a row: a key that comes back
        starts with its initial row. Freed rows are handed out again in ascending order.

        Args:
          state: donated.
          table: its name; None: all tables of every store that has a policy, or, with `policy`, of all stores.
          policy: from `jaxsok.policies`; None: the table's own `eviction`.
          num_rows: how many rows of the table may stay, on all shards together; with `table=None` how many rows of each
            store whose policy ranks rows, while stores of other policies lose all expired rows. Shards keep as equal
            shares as they can, in all exactly so many; each shard takes its own lowest. None where no policy ranks
            rows.
          clock: now, an integer or a uint32 scalar; None: `state.step`.
          hand_over: called with the name of a table and some of its rows (`Records`: keys, rows, optimizer state,
            statistics) until it has had all that leave, before anything changes. Between steps only, not under
            `jax.jit`. In several processes each hands over the rows of its own shards; replicated rows come once.

        Raises:
          TypeError, ValueError: no such table, no policy, a budget that does not fit the policy, missing statistics
            that the policy needs. Nothing has changed then.

        Cost:
          Streams what the policy reads, and 16 bytes a row of capacity for its record. If anything goes, also 32 bytes
          a row of records and 32 of index. Memory: 1 byte a row, and 4 or 8 for scores. With `hand_over` the host
          waits, and reads the rows that leave and a byte a row of capacity.

        Source: HierarchicalKV's scores and DeepRec's GlobalStepEvict and L2WeightEvict, here over all rows at once.

        Example:
          >>> import jaxsok
          >>> from jaxsok.policies import LeastRecentlyUsed
          >>> tables = [jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=16, eviction=LeastRecentlyUsed())]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> features = collection.batch({"clicked": np.array([9, 7, 8])}).features
          >>> _, state, _ = collection.lookup(collection.init(seed=0), features)
          >>> state, evicted = collection.evict(state, num_rows=1)  # all used at one step: by key
          >>> evicted.to_dict(), collection.export_table(state, "item")["keys"].tolist()
          ({'item': 2}, [9])
        """
        return operations.evict(self, state, table, policy, num_rows, clock, hand_over)

    @annotations.annotate("jaxsok.export_table")
    def export_table(self, state: State, table: str) -> dict[str, Any]:
        """Returns a table's keys, rows, row ids and optimizer state as NumPy arrays, in the order of the row ids.

        Waits for the device and holds the whole table in host memory; `export_chunks` gives it in parts. Where
        statistics are kept they are there too, as `last_step` and `frequency`, and on a mesh the `shards` of the rows.
        In several processes each gives the rows of its own shards; of a replicated table every process gives all.

        Example:
          `rows = collection.export_table(state, "user")["rows"]`
        """
        check_placed("export_table", self, state)
        found = operations.locate("export_table", self, table)
        return table_export.export_table(found.spec, state.stores[found.store], state.seed, found.number)

    def export_chunks(
        self,
        state: State,
        table: str,
        *,
        chunk_rows: int | None = None,
        since: int | None = None,
        with_state: bool = True,
    ) -> Iterator[Records]:
        """Streams a table to the host as `Records`: keys, rows, optimizer state, and statistics where they are kept.

        The order is that of the row ids, shard after shard. In several processes each gives the rows of its own shards;
        of a replicated table every process gives all. The next chunks are on their way while the caller holds one, so
        the host has a few of them, whatever the table. Arrays may be read-only; an empty table gives none.

        Args:
          state: must not be donated to anything before the last chunk was given.
          table: its name.
          chunk_rows: rows of a chunk at most; None: about 64 MiB of them.
          since: only rows whose `last_step` is at least so much. The table's store must keep statistics.
          with_state: whether the optimizer state comes along.

        Raises:
          TypeError, ValueError: before anything is read; `since` of a table without statistics.

        Cost:
          Reads 16 bytes a row of capacity (24 with statistics) on the device; a bit for each, and the rows exported,
          cross to the host.

        Example:
          >>> [chunk.keys.tolist() for chunk in collection.export_chunks(state, "item", chunk_rows=1)]
          [[7], [9]]
        """
        check_placed("export_chunks", self, state)
        resolved = operations.locate("export_chunks", self, table)
        spec, store = resolved.spec, state.stores[resolved.store]
        if chunk_rows is not None:
            checks.integer("export_chunks: chunk_rows", chunk_rows, 1, wanted="at least 1", kind="an integer or None")
        if since is not None:
            checks.integer("export_chunks: since", since, kind="an integer or None")
            if not spec.keeps_statistics:
                raise ValueError(
                    f'export_chunks: since: got {since} for table "{table}", whose rows have no last step; declare '
                    "TableSpec(statistics=True), or export all."
                )
        chunks = table_export.export_chunks(
            spec, store, state.seed, resolved.number, chunk_rows=chunk_rows, since=since, with_state=with_state
        )
        return (chunk.records for chunk in chunks)

    @annotations.annotate("jaxsok.import_table")
    def import_table(
        self,
        state: State,
        table: str,
        chunks: Records | Iterable[Records],
        *,
        num_rows: int | None = None,
        reset_state: bool = False,
        clock: Any = None,
    ) -> State:
        """Enters records into a table, whatever mesh, capacity or store they came from: each is placed by its key.

        A key that has a row gets the record's row; a key that has none gets a new row, whatever the table's admission
        says. Other keys stay as they are. The store grows as it must, up to its `max_capacity`. Plans made before
        become stale. In several processes all pass the same records in the same chunks (they are compared), and each
        enters those of its shards.

        Args:
          state: donated, except for what growing replaces.
          table: its name.
          chunks: `Records`, or several, one after the other; of chunks that have a key in common the last one counts.
            Rows of another float dtype are converted, to 16 bits by rounding to nearest, float64 to float32 first.
            Optimizer state goes by name; what the records lack stays as it is, and is initial for new rows. So do
            statistics, except the last step; they come together, and are passed over where the table keeps none.
          num_rows: how many rows will come, if that is known: room is made at once, as far as the store may grow.
          reset_state: whether optimizer state that the records lack is set to its initial value for existing rows, too.
          clock: the `last_step` of rows whose records have none, a uint32 scalar; None: `state.step`.

        Raises:
          TypeError, ValueError: a chunk of another dim, or with state that the table's optimizer has not, PADDING_KEY,
            or a key twice in one chunk. TableFullError: a shard would have more rows than `max_capacity`. MemoryError:
            the larger store will not fit. Nothing of that chunk is entered then. If chunks before it were, the state is
            the attribute `state` of the error.

        Cost:
          A record crosses to the device once, and is written once, in calls of about 64 MiB to a shard; what the
          fullest shard gets is padded by an eighth at most. The host sorts the keys of a chunk, and holds two chunks.

        Example:
          >>> records = jaxsok.Records(np.array([7, 8], np.uint64), np.ones((2, 4), np.float32))
          >>> collection.num_rows(collection.import_table(state, "item", records))
          {'item': 3}
        """
        check_placed("import_table", self, state, "inside a jitted function use assign")
        if num_rows is not None:
            checks.integer("import_table: num_rows", num_rows, 0, wanted="at least 0", kind="an integer or None")
        checks.flag("import_table: reset_state", reset_state)
        if isinstance(chunks, Records):
            chunks = [chunks]
        if not isinstance(chunks, Iterable):
            raise TypeError(
                f"import_table: chunks: got {type(chunks).__name__}, wanted jaxsok.Records, or several of them."
            )
        how = {"clock": clock_of("import_table", clock), "num_rows": num_rows, "reset_state": reset_state}
        resolved = operations.locate("import_table", self, table)
        self.growth.forget()  # its bound on the rows in use holds for steps alone
        held = Held(state)
        table_import.import_table(self.stores, held, resolved, chunks, **how)
        return held.state

    @annotations.annotate("jaxsok.num_rows")
    def num_rows(self, state: State) -> dict[str, int]:
        """Counts the rows in use by table, as `{"user": 1000, "item": 250}` (waits for the device)."""
        return operations.num_rows(self, state)

    @annotations.annotate("jaxsok.cache_stats")
    def cache_stats(self, state: State) -> tuple[CacheStats, ...]:
        """Reads what the caches of tables in host memory have done, for each store (waits for the device).

        Counts begin with the state; the difference of two readings is what happened between them.

        Cost:
          Reads 4 bytes for each row of a cache on its device; a few numbers cross to the host.

        Example:
          >>> import jaxsok
          >>> adam, memory = jaxsok.optim.adam(0.01), jaxsok.HostMemory(device_rows=4)
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=adam, capacity=16, memory=memory)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> state, readings = collection.init(seed=0), []
          >>> for keys in ([1, 2], [3, 4], [5, 4], [1, 2]):  # 5 takes the place of 1, which comes back for 3
          ...     batch = collection.batch({"clicked": np.array(keys)})
          ...     embeddings, state, plan = collection.lookup(state, batch.features)
          ...     readings += collection.cache_stats(state)
          >>> print(readings[-1])
          item: 5 rows in host memory, 4 of them in a cache of 4; hit rate 0.667, 1 rows read (48 B), 2 written (96 B)
          >>> last = readings[-1] - readings[-2]
          >>> last.num_hits, last.num_read, last.bytes_read, last.hit_rate
          (1, 1, 48, 0.5)
        """
        return operations.cache_stats(self, state)

    @annotations.annotate("jaxsok.grow")
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

        With lookups ahead (`pipeline`) that includes the keys of the next batches. No row leaves while a lookup is in
        flight: if rows must leave, the next step looks nothing up ahead, and they leave before the step after it.

        Growing appends a slab to every per-row array and copies no row; the step is compiled again for the larger
        state. If the rows in use and the key positions of the batch fit, nothing is done and nothing is waited for.
        Otherwise the device counts the distinct keys of the batch that have no row, and that number decides. A store
        without rows gets room for 32 batches like its first one, within a sixteenth of the free memory, so that later
        steps need no growth. A collection follows one state at a time; `init` starts over.

        A store that has reached its `max_capacity`, and whose tables have an `eviction`, does not refuse: rows leave by
        that policy, a sixteenth of the capacity more than the new keys need, so that this is rare (docs/growth.md).
        Rows that the batch asks for stay. `TimeToLive` and `SmallNorm` may find too few, and then a warning says so
        once. Another warning says, once for each table, that updates counted keys that were refused for want of room.

        Args:
          state: consumed if it grows: its index is freed before the larger one is made, so that the peak is the new
            size. Consumed too if rows are evicted. If an error is raised it is unchanged, or the error has what there
            is now as `state`, unless the device fails, or runs out of memory for the new index. So does Ctrl-C, unless
            it comes in the moment in which the call returns.
          batch: what the next step looks up: a Batch, its Features, a Plan, or a number of keys. A list of these if
            there are several until the next call of `grow`: micro-batches, or the batches of several steps. A Batch
            stacked along a leading axis, as `lax.scan` takes it, stands for so many steps. None: the steps are taken to
            be as the largest of the batches so far; before there was one, nothing is known, and a warning says so.
          steps: how many steps like this batch are dispatched until the next call, if it is one batch or None.
          clock: now, for eviction: an integer or a uint32 scalar; None: `state.step`.
          hand_over: is given the rows that are evicted, as by `evict`.

        Raises:
          TypeError, ValueError: a batch that is none of these, or of another collection.
          MemoryError: the larger store will not fit; says the bytes asked and the bytes that a row costs.

        Cost:
          Some microseconds of host time for each feature. Only if positions do not fit: a wait for the steps under way,
          and a count of the batch's keys on the device (a collective on a mesh). Stores that evict, and are large
          against the batch, need neither.

        Example:
          `state = collection.grow(state, batch)` before each step.
        """
        return operations.grow(self, state, batch, steps, clock, hand_over)

    def drain(self, state: State) -> State:
        """Has the next steps look nothing up ahead, until no lookup is in flight; no program runs.

        Call it before the step after which the state is saved, evaluated or changed by hand; with `staleness=d`, before
        the last d steps. Afterwards lookups ahead begin again by themselves. The steps that begin and end them are
        programs of their own. Without lookups ahead leave it out: the next step would be compiled once more, and
        `lax.scan`, unlike `jaxsok.scan`, refuses such a state.

        Example:
          `state = collection.drain(state)`, then the step, then `collection.find(state, batch.features)`
        """
        check_state("drain", self, state)
        return state.drain()

    def discard(self, state: State) -> State:
        """Ends a step whose update is skipped: rows that its lookups inserted stay, and have learned nothing.

        Call it in place of `update`: draining (`drain`) ends with a step, also one without an update, and both branches
        of a `lax.cond` must return states of one structure. `state.step`, which counts updates, does not advance.

        Example:
          `state = lax.cond(is_finite, lambda s: collection.update(s, plan, gradients)[0], collection.discard, state)`
        """
        check_state("discard", self, state)
        return state.end_step()

    def ahead(self, step: Any, *others: "Collection") -> ahead_lib.Ahead:
        """Wraps a jitted step, so that the program for the next capacity is there when the state grows.

        Call the result as you call the step: arguments, results and donation are those of the step. The state may lie
        anywhere in the arguments: by itself, in a train state of Linen, in the layer of an NNX model. Once a store is
        more than half full, a thread lowers and compiles the step for the state that `grow` will make next, and the
        step finds the program, as if it had been called with that state before. If growth comes before that is done,
        the call waits for the rest of it. Where growth goes elsewhere (memory ran short, another batch size came
        along), the call compiles on the spot.

        The step is traced in another thread, under the settings of the calling one (`jax.set_mesh`,
        `jax.default_device`, `jax.enable_x64`, matmul precision, type promotion, random bits, modes of Flax; not the
        deprecated `with mesh:`). It must not change anything outside itself when traced. If a program fails in the
        background, the next call gives a `RuntimeWarning`, and the program is compiled where it is first called. At its
        end the interpreter waits for a program under way.

        Args:
          step: what `jax.jit` or `nnx.jit` returned.
          others: the other collections of a model that has several layers, if the step takes their states too.

        Returns:
          A callable with the counts `num_compiled`, `num_ahead` and `num_hits_ahead` of its programs, and `stalls_s`,
          the waits of calls. Each program is logged, at level INFO, to "jaxsok.ahead".

        Raises:
          TypeError: a step that is not jitted; at the first call, arguments without a state of the collection.

        Cost:
          Some microseconds a call; one to two for each array among the arguments while a store is more than half full.
          In the background one compilation for each capacity, of which the last is in vain; on a GPU XLA may time
          kernels there while steps run.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> def step(state, features):
          ...     embeddings, state, plan = collection.lookup(state, features)
          ...     return collection.update(state, plan, embeddings)
          >>> step = collection.ahead(jax.jit(step, donate_argnums=0))
          >>> state = collection.init(seed=0)
          >>> for start in range(0, 100, 2):  # two new keys a step: from 64 rows to 128
          ...     features = collection.batch({"clicked": np.arange(start, start + 2)}).features
          ...     state, stats = step(collection.grow(state, features), features)
          >>> state.stores[0].capacity, step.num_compiled, step.num_hits_ahead
          (128, 1, 1)
        """
        return ahead_lib.Ahead(step, [self, *others])

    @annotations.annotate("jaxsok.stack")
    def stack(self, tree: Any) -> Any:
        """Reshapes global arrays for `pmap`, each from `[num_shards * n, ...]` to `[num_shards, n, ...]`.

        A state is consumed. What is the same everywhere (its seed and step) is given to each shard. `unstack` is the
        way back.

        Raises:
          ValueError: a collection of one device, or arrays that are deleted; the others are as they were.

        Example:
          `state = collection.stack(collection.init(seed=0))`, then `jax.pmap(step, axis_name="data")(state, ...)`.
        """
        return stacking.restack("stack", self.shards, tree, is_stacking=True)

    @annotations.annotate("jaxsok.unstack")
    def unstack(self, tree: Any) -> Any:
        """Makes global arrays of the results of `pmap`: the way back from `stack`.

        Example:
          `collection.export_table(collection.unstack(state), "user")`
        """
        return stacking.restack("unstack", self.shards, tree, is_stacking=False)

    def memory_estimate(
        self,
        state: State | None = None,
        batch: Batch | Features | None = None,
        *,
        num_rows: int | Mapping[str, int] | None = None,
        steps: int = 1,
        lookahead: int = 0,
        steps_per_call: int = 1,
        device_bytes: int | None = None,
        memory_fraction: float = memory_lib.MEMORY_FRACTION,
    ) -> memory_lib.MemoryEstimate:
        """Counts the bytes that the collection takes on each device. `print` the result.

        Args:
          state: whose capacities are counted; None: as `init` makes it, or as `grow` makes it for `num_rows`.
          batch: the batch of a step, or of several stacked ones, or its features. None: the state alone is counted.
          num_rows: rows that the tables will come to have, as for `jaxsok.memory_estimate`.
          steps: between two calls of `grow`.
          lookahead: batches that are looked up ahead, as for `pipeline`.
          steps_per_call: that of `pipeline`; for stacked batches their number is the default.
          device_bytes: memory of one device: whether the total fits, and how many rows would.
          memory_fraction: the part of `device_bytes` that XLA gives to arrays.

        Example:
          `collection.memory_estimate(state, batch).total`
        """
        num_shards = self.shards.num_shards
        features = batch.features if isinstance(batch, Batch) else batch
        if features is None:
            parts = [raw_features.shapes_of(store, (), {}) for store in self.stores]
        else:
            check_features("memory_estimate", self, features)
            if num_stacked(features):
                steps_per_call = max(steps_per_call, num_stacked(features))
                features = jax.tree.map(lambda words: jax.ShapeDtypeStruct(words.shape[1:], words.dtype), features)
            num_parts = features.num_parts_here
            parts = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // num_parts, *leaf.shape[1:]), leaf.dtype), features
            ).stores
        if state is not None:
            check_state("memory_estimate", self, state)
        known = None
        if state is not None:
            sizes = [sum(words.nbytes for words in store.sightings) for store in state.stores]
            known = [
                (s.capacity // num_shards, size // num_shards) for s, size in zip(state.stores, sizes, strict=True)
            ]
        of_step, of_device = (steps, lookahead, steps_per_call), (device_bytes, memory_fraction)
        exchange = dataclasses.replace(self.exchange, wire=self._steps.strategy.wire or "dense")  # it is known here
        return memory_lib.estimate(self.tables, self.stores, parts, known, num_rows, exchange, *of_step, *of_device)

    def _plans_and_gradients(self, op: str, plan: Any, gradients: Any) -> tuple[list[Plan], list[Mapping[str, Array]]]:
        """Checks the plans and gradients of an op; returns them as lists of one length."""
        plans = list(plan) if isinstance(plan, Iterable) and not isinstance(plan, Mapping) else [plan]
        is_one = isinstance(gradients, Mapping) or hasattr(gradients, "shape") or not isinstance(gradients, Iterable)
        grads = [gradients] if is_one else list(gradients)
        if not plans or len(plans) != len(grads):
            raise ValueError(
                f"{op}: gradients: got {len(grads)} for {len(plans)} plans, wanted one for each, at least 1."
            )
        num_parts = 1 if self.shards.sees_parts() else self.shards.num_shards
        for plan, of_plan in zip(plans, grads, strict=True):
            if not isinstance(plan, Plan) or plan.found is None:
                raise TypeError(
                    f"{op}: plan: got {type(plan).__name__} that no lookup returned, wanted lookup's third result."
                )
            if not isinstance(of_plan, Mapping):
                raise TypeError(
                    f"{op}: gradients: got {type(of_plan).__name__}, wanted a dict of arrays by feature, as lookup's "
                    "embeddings are."
                )
            check_features(op, self, plan.features)
            gradients_lib.check_gradients(self.stores, plan, of_plan, num_parts, op)
        return plans, grads


def _make_rest(num_tables: int, seed: Array, partition_owners: Array) -> tuple[Array, ...]:
    """Makes step, seed, owners of partitions and refused keys of a new state, each its own buffer, to be donated."""
    step, num_refused = jnp.zeros((), jnp.uint32), jnp.zeros(num_tables, jnp.uint32)
    return step, jnp.array(seed), jnp.array(partition_owners), num_refused


def clip_by_global_norm(
    lookups: Sequence[tuple[Collection, State, Any, Any]], gradients: Any, max_norm: Any, dense: Any
) -> tuple[Any, Float32[Array, ""]]:
    """Scales a tree of gradients by the norm over `lookups` (arguments of `gradient_norm`) and `dense`."""
    checks.scalar("clip_by_global_norm: max_norm", max_norm)
    if not isinstance(max_norm, jax.core.Tracer) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm: got {max_norm}, wanted a positive number.")
    for leaf in jax.tree.leaves(dense):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact):
            raise TypeError(
                f"clip_by_global_norm: dense: got a leaf of {jnp.asarray(leaf).dtype}, wanted floats: integers "
                "that are scaled down would become zeros."
            )
    of_rows = [collection.gradient_norm(state, plans, grads) for collection, state, plans, grads in lookups]
    norm = norms_lib.tree_norm([*of_rows, norms_lib.tree_norm(dense)])
    return norms_lib.clip(gradients, norm, max_norm), norm
