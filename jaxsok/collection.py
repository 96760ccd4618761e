"""What a user declares and calls: tables and features. A collection holds no arrays; the state does."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from jaxsok import ahead as ahead_lib
from jaxsok import export as export_lib
from jaxsok import features as features_lib
from jaxsok import grow as grow_lib
from jaxsok import keys as keys_lib
from jaxsok import lookup as lookup_lib
from jaxsok import plan as plan_lib
from jaxsok import table as table_lib
from jaxsok import update as update_lib
from jaxsok.features import Batch, Features
from jaxsok.kernels import library
from jaxsok.lookup import Embeddings
from jaxsok.plan import Plan
from jaxsok.specs import FeatureSpec, StoreSpec, TableSpec, fingerprint, group_into_stores
from jaxsok.stats import Stats
from jaxsok.store import State, init_store, num_buckets_of
from jaxsok.types import COUNTERS, COUNTS, MAX_CAPACITY, MAX_FEATURES


class Collection:
    """Tables, and the features that read them.

    Tables of one dim, dtype, optimizer and row_gradient share a store; all features over a store cost one FFI call
    per lookup and one per update.

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

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec]):
        """Declares; allocates nothing.

        Args:
          tables: at least one; names are unique.
          features: names are unique; each names a table. Their order is the order of keys in a batch.
        """
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
        self.tables: tuple[TableSpec, ...] = tuple(tables)
        self.features: tuple[FeatureSpec, ...] = tuple(features)
        self.stores: tuple[StoreSpec, ...] = group_into_stores(self.tables)
        self.fingerprint: str = fingerprint(self.stores)
        self.growth = grow_lib.GrowthTracker.of(len(self.stores))
        for s, store in enumerate(self.stores):
            names = [table.name for table in store.tables]
            num_features = sum(feature.table in names for feature in self.features)
            if num_features > MAX_FEATURES:
                raise ValueError(
                    f"Collection: features: got {num_features} over the store of tables {names}, wanted at most "
                    f"{MAX_FEATURES}; use two collections."
                )
            if store.capacity > MAX_CAPACITY:
                raise ValueError(
                    f"Collection: tables {[table.name for table in store.tables]}: capacity: got "
                    f"{store.capacity} rows in "
                    f"store {s}, wanted at most {MAX_CAPACITY}."
                )

    def init(self, seed: int = 0) -> State:
        """Allocates empty stores of the declared capacity.

        Args:
          seed: new rows are functions of (seed, table name, key, column); 0 to 2**64 - 1.

        Raises:
          MemoryError: the stores will not fit; says the bytes asked and the bytes that a row costs.
          ImportError: a built library is missing or does not load; says which and what to do.

        Example:
          `state = collection.init(seed=0)`
        """
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise ValueError(f"init: seed: got {seed!r}, wanted an integer from 0 to 2**64 - 1.")
        library.register()
        grow_lib.require_memory([(store, store.capacity) for store in self.stores], "init")
        # Salts differ between stores and seeds; they are hidden from whoever chooses keys.
        salts = np.random.SeedSequence(int(seed)).generate_state(len(self.stores), np.uint64)
        state = State(
            stores=tuple(init_store(store, int(salt)) for store, salt in zip(self.stores, salts, strict=True)),
            step=jnp.zeros((), jnp.uint32),
            seed=jnp.asarray(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)),
            fingerprint=self.fingerprint,
        )
        self.growth.forget()
        return state

    def batch(self, raw: Mapping[str, Any]) -> Batch:
        """Packs a raw batch: features into few arrays of static size, everything else untouched.

        Args:
          raw: for each feature an integer array `[num_bags]` or `[num_bags, hotness]`, or `Bags`; other entries are
            carried along (`batch["label"]`).

        Raises:
          TypeError, ValueError: names the feature, the argument, what was got and wanted.

        Cost:
          Host work for NumPy input: one copy of the keys and one transfer per store.

        Example:
          `batch = collection.batch({"user": user_ids, "history": Bags(ids, lengths=lengths), "label": clicks})`
        """
        batch = features_lib.pack(raw, self.stores, self.features, self.fingerprint)
        self._note_keys([batch.features])
        return batch

    def plan(self, features: Features) -> Plan:
        """Makes the keys of a batch distinct. Reads no table, so it can run a batch ahead of the lookup.

        Cost:
          One pass over the keys and a scratch index of 32 bytes a key.

        Example:
          `embeddings, state, plan = collection.lookup(state, collection.plan(batch.features))`
        """
        self._check_features("plan", features)
        distinct = tuple(
            plan_lib.distinct_keys(part) if part.layouts else plan_lib.empty_distinct() for part in features.stores
        )
        return Plan(features, distinct)

    def lookup(self, state: State, features: Features | Plan) -> tuple[Embeddings, State, Plan]:
        """Looks up a batch; unseen keys get rows, in order of first occurrence.

        Args:
          state: donated: the result has its buffers.
          features: of `batch`, or a plan made of them.

        Returns:
          Embeddings by feature, the state, and the plan that `update` takes.

        Raises:
          ValueError: a state or features of another collection. Raised when traced.

        Cost:
          One FFI call per store. Per key 8 bytes, one 64-byte bucket and its row read, an embedding written.

        Example:
          `embeddings, state, plan = collection.lookup(state, batch.features)`
        """
        self._check_state("lookup", state)
        plan = features if isinstance(features, Plan) else Plan(features)
        self._check_features("lookup", plan.features)
        self._note_keys([plan.features])
        with jax.named_scope("jaxsok.lookup"):
            return lookup_lib.lookup(self.stores, state, plan)

    def find(self, state: State, features: Features) -> tuple[Embeddings, Stats]:
        """The evaluation lookup: reads only. Keys without a row read what their table's `unknown` says.

        Example:
          `embeddings, stats = collection.find(state, batch.features)`
        """
        self._check_state("find", state)
        self._check_features("find", features)
        with jax.named_scope("jaxsok.find"):
            embeddings, counts = lookup_lib.find(self.stores, state, features)
        nonfinite = [jnp.zeros(len(store.tables), jnp.int32) for store in self.stores]
        return embeddings, self._stats(state, [counts], nonfinite, jnp.zeros((), jnp.int32))

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
          its state once.

        Example:
          `state, stats = collection.update(state, plan, g_embeddings)`
        """
        self._check_state("update", state)
        plans = [plan] if isinstance(plan, Plan) else list(plan)
        grads = [gradients] if isinstance(gradients, Mapping) else list(gradients)
        if not plans or len(plans) != len(grads):
            raise ValueError(
                f"update: gradients: got {len(grads)} for {len(plans)} plans, wanted one for each, at least 1."
            )
        for one in plans:
            if not isinstance(one, Plan) or one.found is None:
                raise TypeError(
                    f"update: plan: got {type(one).__name__} that no lookup returned, wanted lookup's third result."
                )
            self._check_features("update", one.features)
        if learning_rate is not None:
            _check_rate(learning_rate)
        self._note_keys([one.features for one in plans])
        with jax.named_scope("jaxsok.update"):
            state, nonfinite, stale = update_lib.update(self.stores, state, plans, grads, learning_rate)
        counts = [[found.counts for found in one.found] for one in plans]
        return state, self._stats(state, counts, nonfinite, stale)

    def grow(self, state: State, *, steps: int = 1) -> State:
        """Makes room, between steps, for what the next `steps` steps may insert; almost always returns at once.

        Growing appends a slab to every per-row array and copies no row; the step's program is compiled anew for the
        larger state. The worst case is every key of a step new: `steps` times the keys per step of each store is held
        in reserve. A collection follows one state at a time; `init` starts anew.

        Args:
          state: consumed if it grows: its index is freed first, so that the peak is the new size.
          steps: how many steps are dispatched until the next call; the length of a `lax.scan` over steps.

        Raises:
          MemoryError: the larger store will not fit; says the bytes asked and the bytes that a row costs.

        Example:
          `state = collection.grow(state)` before each step.
        """
        self._check_state("grow", state)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"grow: steps: got {steps!r}, wanted an integer of at least 1.")
        return grow_lib.grow(self.stores, self.growth, state, steps)

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
          ...     state, stats = step(collection.grow(state), features)
          >>> state.stores[0].capacity, step.num_compiled, step.num_hits_ahead
          (16, 1, 2)
        """
        return ahead_lib.Ahead(step, self.stores, self.growth, state_argnum)

    def erase(self, state: State, table: str, keys: Any) -> tuple[State, UInt32[Array, ""]]:
        """Takes the rows of keys away; absent keys are passed over. Plans made before become stale.

        Args:
          state: donated: the result has its buffers.
          table: its name.
          keys: NumPy integers, or words, `[num_keys]`.

        Returns:
          The state, and how many rows went.

        Cost:
          Streams the records and rewrites the index of the table's store: 48 bytes a row of capacity.

        Example:
          `state, num_erased = collection.erase(state, "user", np.array([7]))`
        """
        self._check_state("erase", state)
        s, number = self._locate("erase", table)
        words = keys_lib.words_of(keys, "int64", "erase")
        if words.ndim != 2:
            raise ValueError(f"erase: keys: got shape {list(words.shape[:-1])}, wanted [num_keys].")
        ids = jnp.asarray(table_lib.table_ids_of(number, words.shape[0]))
        store, num_erased = table_lib.erase(self.stores[s], state.stores[s], jnp.asarray(words), ids)
        stores = (*state.stores[:s], store, *state.stores[s + 1 :])
        return dataclasses.replace(state, stores=stores), num_erased

    def export_table(self, state: State, table: str) -> dict[str, Any]:
        """A table's keys, rows, row ids and optimizer state as NumPy arrays, in the order of the row ids.

        Waits for the device and holds the whole table in host memory.

        Example:
          `rows = collection.export_table(state, "user")["rows"]`
        """
        self._check_state("export_table", state)
        s, number = self._locate("export_table", table)
        return export_lib.export_table(self.stores[s], state.stores[s], number)

    def num_rows(self, state: State) -> dict[str, int]:
        """Rows in use by table (waits for the device).

        Example:
          `collection.num_rows(state)` → `{"user": 1000, "item": 250}`
        """
        self._check_state("num_rows", state)
        return {
            table.name: int(rows)
            for store, one in zip(self.stores, state.stores, strict=True)
            for table, rows in zip(store.tables, np.asarray(one.table_rows), strict=True)
        }

    def memory_estimate(self, state: State | None = None) -> dict[str, int]:
        """Bytes of the stores, by what they hold, on one device.

        Args:
          state: of which capacity; None: as `init` makes it.

        Returns:
          "rows", "optimizer_state", "records", "index", "total".

        Example:
          `collection.memory_estimate()["total"]`
        """
        sizes = dict.fromkeys(("rows", "optimizer_state", "records", "index"), 0)
        for s, store in enumerate(self.stores):
            capacity = store.capacity if state is None else state.stores[s].capacity
            sizes["rows"] += 4 * store.dim * capacity
            sizes["optimizer_state"] += 4 * sum(one.dim for one in store.state_specs) * capacity
            sizes["records"] += 16 * capacity
            sizes["index"] += 64 * num_buckets_of(capacity)
        return sizes | {"total": sum(sizes.values())}

    def _note_keys(self, features: Sequence[Features]) -> None:
        for s in range(len(self.stores)):
            self.growth.saw_batch(s, sum(part.stores[s].keys.shape[0] for part in features))

    def _locate(self, op: str, table: str) -> tuple[int, int]:
        for s, store in enumerate(self.stores):
            names = [one.name for one in store.tables]
            if table in names:
                return s, names.index(table)
        raise ValueError(f"{op}: table: got {table!r}, wanted one of {[one.name for one in self.tables]}.")

    def _check_state(self, op: str, state: State) -> None:
        if not isinstance(state, State):
            raise TypeError(f"{op}: state: got {type(state).__name__}, wanted the State that Collection.init made.")
        if state.fingerprint != self.fingerprint:
            raise ValueError(
                f"{op}: state: got one of other specs (fingerprint {state.fingerprint}), wanted "
                f"{self.fingerprint}; use "
                "the collection that made it, or declare the same tables."
            )

    def _check_features(self, op: str, features: Features) -> None:
        if not isinstance(features, Features):
            raise TypeError(
                f"{op}: features: got {type(features).__name__}, wanted Features; make them with "
                "collection.batch(raw).features."
            )
        if features.fingerprint != self.fingerprint:
            raise ValueError(
                f"{op}: features: got those of a collection with other specs; make them with this one's batch."
            )

    def _stats(
        self, state: State, counts: Sequence[Sequence[Array]], nonfinite: Sequence[Array], stale: Int32[Array, ""]
    ) -> Stats:
        names = [table.name for store in self.stores for table in store.tables]
        order = np.array([names.index(table.name) for table in self.tables])
        by_plan = [jnp.concatenate(list(one)) for one in counts]
        total = sum(by_plan[1:], by_plan[0])[order]
        word = {name: i for i, name in enumerate(COUNTERS)}
        rows = jnp.concatenate([store.table_rows for store in state.stores]).astype(jnp.int32)
        counters = jnp.stack([store.counters for store in state.stores]).astype(jnp.int32)
        place = [self._locate("stats", table.name)[0] for table in self.tables]
        return Stats(
            **{name: total[:, i] for i, name in enumerate(COUNTS)},
            num_nonfinite=jnp.concatenate(list(nonfinite))[order],
            num_rows=rows[order],
            longest_probe=counters[:, word["longest_probe"]],
            num_unplaced=counters[:, word["num_unplaced"]],
            num_stale=stale,
            tables=tuple(table.name for table in self.tables),
            capacities=tuple(state.stores[s].capacity for s in place),
            stores=tuple(place),
        )


def _check_rate(rate: Any) -> None:
    is_number = isinstance(rate, (int, float, np.number, np.ndarray, jax.Array)) and not isinstance(rate, bool)
    if not is_number or np.shape(rate) != ():
        got = f"shape {list(np.shape(rate))}" if is_number else repr(rate)
        raise TypeError(f"update: learning_rate: got {got}, wanted a scalar.")
