"""Operations on tables, between steps and by key: what a collection offers beside lookup and update.

`TableOperations` is the part of `Collection` that works on one table of a state: sizes, erasing, exporting. It holds
nothing of its own.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, UInt32

from jaxsok import annotations, checks, guards, policies, tickets
from jaxsok import evict as evict_lib
from jaxsok import export as export_lib
from jaxsok import imports as imports_lib
from jaxsok import keys as keys_lib
from jaxsok import plan as plan_lib
from jaxsok import table as table_lib
from jaxsok.checks import there
from jaxsok.features import Features
from jaxsok.grow import GrowthTracker
from jaxsok.records import Records
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec, TableSpec
from jaxsok.store import State, StoreState
from jaxsok.types import COUNTS, NO_ROW, PADDING_KEY

_INSERTED, _REFUSED = COUNTS.index("num_inserted"), COUNTS.index("num_refused")


class TableOperations:
    """What a collection offers on its tables. `Collection` is the only one; it sets what is declared here."""

    shards: Shards
    exchange: ExchangeSpec
    tables: tuple[TableSpec, ...]
    stores: tuple[StoreSpec, ...]
    fingerprint: str
    growth: GrowthTracker
    _jitted: dict[str, Any]

    @annotations.annotated("jaxsok.erase")
    def erase(self, state: State, table: str, keys: Any) -> tuple[State, UInt32[Array, ""]]:
        """Takes the rows of keys away; absent keys are passed over. Plans made before become stale.

        Args:
          state: donated: the result has its buffers.
          table: its name.
          keys: NumPy integers, or words, `[num_keys]`.

        Returns:
          The state, and how many rows went.

        On a mesh the keys are the same everywhere, in all processes.

        Cost:
          A search for each key and a byte a row of capacity; if any goes, also 64 bytes a row: the records of the
          table's store twice, and its index once.

        Example:
          `state, num_erased = collection.erase(state, "user", np.array([7]))`
        """
        check_state("erase", self, state)
        s, number = locate("erase", self, table)
        words = _words("erase", keys)
        state, words = guards.whole("erase", state=state, keys=words)
        return self._in_store("erase", state, s, number, words)

    @annotations.annotated("jaxsok.contains")
    def contains(self, state: State, table: str, keys: Any) -> Bool[Array, " num_keys"]:
        """Whether each key has a row.

        Args:
          state: read only.
          table: its name.
          keys: NumPy integers, or words, `[num_keys]`; on a mesh the same everywhere, in all processes.

        Returns:
          For each key; False for PADDING_KEY.

        Cost:
          One search for each key, on a mesh by every shard, and an all-reduce of 4 bytes a key.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> features = collection.batch({"clicked": np.array([7, 9])}).features
          >>> _, state, _ = collection.lookup(collection.init(seed=0), features)
          >>> collection.contains(state, "item", np.array([9, 8])).tolist()
          [True, False]
        """
        (is_there,) = self._on_keys("contains", state, table, keys)
        return is_there

    @annotations.annotated("jaxsok.rows_of")
    def rows_of(
        self, state: State, table: str, keys: Any
    ) -> tuple[Float[Array, "num_keys dim"], Bool[Array, " num_keys"]]:
        """The rows of keys as they are stored; nothing is inserted, and nothing noted.

        `find` gives embeddings of a batch, and a key without a row its initial one. This is for a look at single rows.

        Args:
          state: read only.
          table: its name.
          keys: NumPy integers, or words, `[num_keys]`; on a mesh the same everywhere, in all processes.

        Returns:
          A row for each key in the dtype of the table, zeros where there is none; and whether there is one.

        Cost:
          A search and a row for each key; on a mesh by every shard, and an all-reduce of the rows.

        Example:
          `rows, is_there = collection.rows_of(state, "user", np.array([7, 9]))`
        """
        rows, is_there = self._on_keys("rows_of", state, table, keys)
        return rows, is_there

    @annotations.annotated("jaxsok.assign")
    def assign(
        self, state: State, table: str, keys: Any, rows: Any, *, clock: Any = None
    ) -> tuple[State, UInt32[Array, ""], UInt32[Array, ""]]:
        """Sets the rows of keys; keys without one get one, whatever the table's admission says.

        The optimizer state of rows that were there stays, and is initial for new ones. Where statistics are kept, the
        last step of the rows becomes `clock`; their frequency stays.

        Args:
          state: donated: the result has its buffers.
          table: its name.
          keys: NumPy integers, or words, `[num_keys]`; of one that stands more than once the last row counts.
            PADDING_KEY is passed over. On a mesh the same everywhere, in all processes.
          rows: `[num_keys, dim]` of any float dtype, rounded to nearest; on a mesh the same everywhere.
          clock: a uint32 scalar, perhaps traced; None: `state.step`.

        Returns:
          The state, how many keys were new, and how many were refused because their shard was full: call `grow` first,
          which keeps room for so many keys more once it has seen a call. `import_table` makes room by itself.

        Raises:
          TypeError, ValueError: rows of another shape. Raised when traced.

        Cost:
          A search and a sort of the keys, on a mesh by every shard; each row is written once.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=1, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> state = collection.init(seed=0)
          >>> state, num_inserted, _ = collection.assign(state, "item", np.array([7, 9]), np.array([[1.0], [2.0]]))
          >>> int(num_inserted), collection.rows_of(state, "item", np.array([9, 8]))[0].tolist()
          (2, [[2.0], [0.0]])
        """
        check_state("assign", self, state)
        s, number = locate("assign", self, table)
        words = _words("assign", keys)
        rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        wanted = (words.shape[0], self.stores[s].dim)
        if not jnp.issubdtype(rows.dtype, jnp.floating) or rows.shape != wanted:
            raise ValueError(f"assign: rows: got {rows.dtype}{list(rows.shape)}, wanted floats{list(wanted)}.")
        if rows.dtype != jnp.dtype(self.stores[s].dtype):
            rows = rows.astype(np.float32)
        now = clock_of("assign", clock)
        now = state.step if now is None else now
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, words)))
        if is_traced:
            self.growth.saw_assign(s, words.shape[0])
        else:
            self.growth.forget()  # its bound on the rows in use holds for steps alone
        state, words, rows, now = guards.whole("assign", state=state, keys=words, rows=rows, clock=now)
        state, (num_inserted, num_refused) = self._on_store("assign", state, s, number, words, rows, now)
        return state, num_inserted, num_refused

    @annotations.annotated("jaxsok.clear")
    def clear(self, state: State, table: str) -> tuple[State, UInt32[Array, ""]]:
        """Takes all rows of a table away; other tables of its store keep theirs. Plans made before become stale.

        Args:
          state: donated: the result has its buffers.
          table: its name.

        Returns:
          The state, and how many rows there were.

        Cost:
          16 bytes a row of capacity, and if there are rows 64 more: the records of the table's store thrice, and its
          index once. Also the optimizer state and statistics of the rows that go.

        Example:
          `state, num_erased = collection.clear(state, "user")`
        """
        check_state("clear", self, state)
        s, number = locate("clear", self, table)
        (state,) = guards.whole("clear", state=state)
        state, (num_erased,) = self._on_store("clear", state, s, number)
        return state, num_erased

    @annotations.annotated("jaxsok.evict")
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
        `num_rows` of them: those of lowest score go, ties in the order of (table, key). One that tells whose time has
        come (`TimeToLive`, `SmallNorm`) takes those. What belonged to a row goes with it: a key that comes back starts
        anew, with its initial row. Freed rows are handed out again in ascending order.

        Args:
          state: donated: the result has its buffers.
          table: its name; None: all tables of every store that has a policy, or, with `policy`, of all stores.
          policy: from `jaxsok.policies`; None: the table's own `eviction`.
          num_rows: how many rows of the table may stay, on all shards together; with `table=None` how many rows of each
            store whose policy ranks rows, while stores of other policies lose the rows whose time has come, however
            many. Shards keep as equal shares as they can, in all exactly so many; each shard takes its own lowest.
            None where no policy ranks rows.
          clock: now, an integer or a uint32 scalar; None: `state.step`.
          hand_over: called with the name of a table and some of its rows (`Records`: keys, rows, optimizer state,
            statistics) until it has had all that leave, before anything changes. Between steps only, not under
            `jax.jit`. In several processes each hands over the rows of its own shards; replicated rows come once.

        Returns:
          The state, and how many rows of each table went, of all shards.

        Raises:
          TypeError, ValueError: no such table, no policy, a budget that does not fit the policy, statistics that the
            policy needs and nobody keeps. Nothing has changed then.

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
        check_state("evict", self, state)
        leaving = self._leaving(table, policy, num_rows)
        now = clock_of("evict", clock)
        num_rows = None if num_rows is None else _word("evict: num_rows", num_rows)
        if hand_over is not None:
            if not callable(hand_over):
                raise TypeError(
                    f"evict: hand_over: got {hand_over!r}, wanted a function of a table's name and Records."
                )
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, now, num_rows))):
                raise TypeError(
                    "evict: hand_over: got one under a trace (jax.jit, shard_map), wanted None there: rows are read by "
                    "the host. Call evict between steps."
                )
        (state,) = guards.whole("evict", state=state)
        now = state.step if now is None else now
        budgets = {} if num_rows is None else dict.fromkeys(leaving, num_rows)
        stores, by_store = evict_lib.evict(leaving, state.stores, now, budgets, hand_over)
        counts = {
            spec.name: count
            for s, by_table in by_store.items()
            for spec, count in zip(self.stores[s].tables, by_table, strict=True)
        }
        none = jnp.zeros((), jnp.uint32)
        evicted = jnp.stack([counts.get(spec.name, none) for spec in self.tables])
        names = tuple(spec.name for spec in self.tables)
        return dataclasses.replace(state, stores=stores), evict_lib.Evicted(evicted, names)

    @annotations.annotated("jaxsok.export_table")
    def export_table(self, state: State, table: str) -> dict[str, Any]:
        """A table's keys, rows, row ids and optimizer state as NumPy arrays, in the order of the row ids.

        Waits for the device and holds the whole table in host memory; `export_chunks` gives it in parts. Where
        statistics are kept they are there too, as `last_step` and `frequency`, and on a mesh the `shards` of the rows.
        In several processes each gives the rows of its own shards; of a replicated table every process gives all.

        Example:
          `rows = collection.export_table(state, "user")["rows"]`
        """
        check_state("export_table", self, state)
        check_untraced("export_table", state)
        s, number = locate("export_table", self, table)
        return export_lib.export_table(self.stores[s], state.stores[s], number)

    def export_chunks(
        self,
        state: State,
        table: str,
        *,
        chunk_rows: int | None = None,
        since: int | None = None,
        with_state: bool = True,
    ) -> Iterator[Records]:
        """Streams a table to the host: keys, rows, optimizer state, and statistics where they are kept.

        The order is that of the row ids, shard after shard. In several processes each gives the rows of its own shards;
        of a replicated table every process gives all. The next chunks are on their way while one is in the caller's
        hands, so the host holds a few of them, whatever the table.

        Args:
          state: not donated; it must not be donated to anything before the last chunk was given.
          table: its name.
          chunk_rows: rows of a chunk at most; None: about 64 MiB of them.
          since: only rows whose `last_step` is at least so much. The table's store must keep statistics.
          with_state: whether the optimizer state comes along.

        Returns:
          An iterator of `Records`, whose arrays may be read-only; none of an empty table.

        Raises:
          TypeError, ValueError: before anything is read; `since` of a table without statistics.

        Cost:
          Reads 16 bytes a row of capacity (24 with statistics), and the rows exported, all of which cross to the host.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> batch = collection.batch({"clicked": np.array([7, 9, 8])})
          >>> _, state, _ = collection.lookup(collection.init(seed=0), batch.features)
          >>> [chunk.keys.tolist() for chunk in collection.export_chunks(state, "item", chunk_rows=2)]
          [[7, 9], [8]]
        """
        check_state("export_chunks", self, state)
        check_untraced("export_chunks", state)
        s, number = locate("export_chunks", self, table)
        spec = self.stores[s]
        if chunk_rows is not None:
            checks.integer("export_chunks: chunk_rows", chunk_rows, 1, wanted="at least 1", kind="an integer or None")
        if since is not None:
            checks.integer("export_chunks: since", since, kind="an integer or None")
            if not spec.keeps_statistics:
                raise ValueError(
                    f'export_chunks: since: got {since} for table "{table}", whose rows have no last step; declare '
                    "TableSpec(statistics=True), or export all."
                )
        chunks = export_lib.export_chunks(
            spec, state.stores[s], number, chunk_rows=chunk_rows, since=since, with_state=with_state
        )
        return (chunk.records for chunk in chunks)

    @annotations.annotated("jaxsok.import_table")
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

        A key that has a row gets the record's row; one that has none gets a new row, whatever the table's admission
        says. Keys that are not among the records stay as they are. The store grows as it must, up to its
        `max_capacity`. Plans made before become stale.

        In several processes all pass the same records in the same chunks, and each enters those of its shards.

        Args:
          state: donated: the result has its buffers, but for what growing replaces.
          table: its name.
          chunks: `Records`, or several, one after the other; of chunks that have a key in common the last one counts.
            Rows of another float dtype are converted, to 16 bits by rounding to nearest. Optimizer state goes by name;
            what the records lack stays as it is, and is initial for new rows. So do statistics, but for the last step;
            they are passed over where the table keeps none.
          num_rows: how many rows will come, if that is known: room is made at once, as far as the store may grow.
          reset_state: whether optimizer state that the records lack is set back to its initial value for rows that were
            there, too.
          clock: the `last_step` of rows whose records have none, a uint32 scalar; None: `state.step`.

        Raises:
          TypeError, ValueError: a chunk of another dim, or with state that the table's optimizer has not, PADDING_KEY,
            or a key twice in one chunk. TableFullError: a shard would have more rows than `max_capacity`. MemoryError:
            the larger store will not fit. Nothing of that chunk is entered then. If chunks before it were, the state
            is the attribute `state` of the error.

        Cost:
          A record crosses to the device once, and is written once, in calls of about 64 MiB to a shard; what the
          fullest shard gets is padded by an eighth at most. The host sorts the keys of a chunk, and holds two chunks.

        Example:
          >>> import jaxsok
          >>> from jaxsok import Records
          >>> tables = [jaxsok.TableSpec("item", dim=1, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> records = Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32))
          >>> state = collection.import_table(collection.init(seed=0), "item", records)
          >>> collection.export_table(state, "item")["rows"].tolist()
          [[1.0], [2.0]]
        """
        check_state("import_table", self, state)
        s, number = locate("import_table", self, table)
        check_untraced("import_table", state, "inside a jitted function use assign")
        if num_rows is not None:
            checks.integer("import_table: num_rows", num_rows, 0, wanted="at least 0", kind="an integer or None")
        checks.flag("import_table: reset_state", reset_state)
        if isinstance(chunks, Records):
            chunks = [chunks]
        if not isinstance(chunks, Iterable):
            raise TypeError(
                f"import_table: chunks: got {type(chunks).__name__}, wanted jaxsok.Records, or several of them."
            )
        now = clock_of("import_table", clock)
        try:
            return imports_lib.import_table(
                self.stores,
                state,
                s,
                number,
                chunks,
                clock=now,
                num_rows=num_rows,
                reset_state=reset_state,
                shards=self.shards,
            )
        finally:
            self.growth.forget()  # its bound on the rows in use holds for steps alone

    @annotations.annotated("jaxsok.num_rows")
    def num_rows(self, state: State) -> dict[str, int]:
        """Rows in use by table (waits for the device).

        Example:
          `collection.num_rows(state)` → `{"user": 1000, "item": 250}`
        """
        check_state("num_rows", self, state)
        check_untraced("num_rows", state, "inside a jitted function use the Stats of update")
        by_store = [
            _rows_by_table(self.shards.read(one.table_rows), store)
            for store, one in zip(self.stores, state.stores, strict=True)
        ]
        return {
            table.name: int(rows)
            for store, one in zip(self.stores, by_store, strict=True)
            for table, rows in zip(store.tables, one, strict=True)
        }

    # On one shard's part of a state, and on global arrays, where the former is called on every shard.

    def _erase_part(
        self, old: StoreState, words: Array, *, store: int, number: int
    ) -> tuple[StoreState, UInt32[Array, ""]]:
        spec = self.stores[store]
        ids = jnp.asarray(table_lib.table_ids_of(number, words.shape[0]))
        new, num_erased = table_lib.erase(spec, old, words, ids)
        num_erased = self.shards.total(num_erased, is_replicated=spec.is_replicated)
        return new.advanced(old.generation, num_erased), num_erased

    def _erase_global(
        self, old: StoreState, words: Array, *, store: int, number: int
    ) -> tuple[StoreState, UInt32[Array, ""]]:
        part, of_store = functools.partial(self._erase_part, store=store, number=number), self.shards.spec
        return self.shards.run(part, (old, words), (of_store, P()), (of_store, P()))

    # The same for operations on one store that `_ON_STORE` has.

    def _on_keys(self, op: str, state: State, table: str, keys: Any) -> tuple[Array, ...]:
        """An operation that reads the rows of some keys."""
        check_state(op, self, state)
        s, number = locate(op, self, table)
        state, words = guards.whole(op, state=state, keys=_words(op, keys))
        _, results = self._on_store(op, state, s, number, words)
        return results

    def _on_store(self, op: str, state: State, s: int, number: int, *args: Any) -> tuple[State, tuple[Array, ...]]:
        """The state, as it was if the operation only reads, and the results: the same on all shards."""
        words = (state.seed, state.partition_owners)
        return self._in_store("read" if op in _READING else "write", state, s, number, *words, *args, op=op)

    def _in_store(self, name: str, state: State, s: int, number: int, *args: Any, **static: Any) -> tuple[State, Any]:
        """The state with what a program made of one of its stores; between steps, one that donates the store."""
        static |= {"store": s, "number": number}
        old = state.stores[s]
        # Under a trace there is nothing to donate: whoever runs the whole decides.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, args)))
        if self.shards.sees_parts() and (self.shards.is_mesh or is_traced):
            part = self._erase_part if name == "erase" else self._store_part
            new, results = part(old, *map(jnp.asarray, args), **static)
        else:
            new, results = self._jitted[name](old, *args, **static)
        if new is None:
            return state, results
        return dataclasses.replace(state, stores=(*state.stores[:s], new, *state.stores[s + 1 :])), results

    def _store_part(
        self, old: StoreState, seed: Array, owners: Array, *args: Array, op: str, store: int, number: int
    ) -> tuple[StoreState | None, tuple[Array, ...]]:
        return _ON_STORE[op](_Place(self.stores[store], number, self.shards, seed, owners), old, *args)

    def _store_global(
        self, old: StoreState, *args: Array, op: str, store: int, number: int
    ) -> tuple[StoreState | None, tuple[Array, ...]]:
        def part(old: StoreState, *args: Array) -> tuple[StoreState | None, tuple[Array, ...]]:
            return self._store_part(old, *args, op=op, store=store, number=number)

        of_store = self.shards.spec
        out = (None if op in _READING else of_store, P())
        return self.shards.run(part, (old, *args), (of_store, *[P()] * len(args)), out)

    def _leaving(self, table: str | None, policy: Any, num_rows: Any) -> dict[int, evict_lib.Leaving]:
        """Who may leave, by the number of the store; refuses what cannot be meant."""
        if policy is not None and (not isinstance(policy, policies.Eviction) or type(policy) is policies.Eviction):
            raise TypeError(f"evict: policy: got {policy!r}, wanted None or one of jaxsok.policies that evicts.")
        if table is None:
            numbers = {s: None for s, spec in enumerate(self.stores) if policy or spec.tables[0].eviction}
        else:
            s, number = locate("evict", self, table)
            numbers = {s: number} if policy or self.stores[s].tables[0].eviction else {}
        if not numbers:
            whose = "every table" if table is None else f'table "{table}"'
            raise ValueError(
                f"evict: policy: got None, and {whose} was declared without one; pass a policy, or declare "
                "TableSpec(..., eviction=policies.LeastRecentlyUsed())."
            )
        rules = {s: there(policy or self.stores[s].tables[0].eviction) for s in numbers}
        ranking = [rule for rule in rules.values() if rule.has_score]
        if ranking and num_rows is None:
            raise ValueError(f"evict: num_rows: got None with {ranking[0]!r}, wanted how many rows may stay.")
        if not ranking and num_rows is not None:
            rule = next(iter(rules.values()))
            raise ValueError(
                f"evict: num_rows: got {num_rows!r} with {rule!r}, wanted None: it takes the rows whose time has come, "
                "however many."
            )
        return {s: evict_lib.Leaving(self.stores[s], rules[s], number, self.shards) for s, number in numbers.items()}


def _is_deleted(array: Any) -> bool:
    # NumPy's arrays and shapes cannot be; the method of a traced array raises.
    return hasattr(array, "is_deleted") and not isinstance(array, jax.core.Tracer) and array.is_deleted()


# Parts of a state ----------------------------------------------------------------------------------------------------


def specs_of(shards: Shards, state: State) -> Any:
    """How each array of a state lies on the mesh, as `shard_map` takes it."""
    same = dict.fromkeys(("step", "seed", "partition_owners", "lineage", "num_refused"), P())
    return dataclasses.replace(state, stores=shards.spec, tickets=shards.spec, **same)


def lineage_of(shards: Shards, words: np.ndarray) -> Array:
    """Where steps leave what is the same everywhere; made by a program, since memory of NumPy's is not donated."""
    return shards.make(lambda: jnp.array(words), is_split=False)


def no_tickets(shards: Shards) -> Array:
    """The tickets of a state that begins: no plan is open."""

    def make() -> Array:
        return tickets.no_tickets(shards.num_shards)

    return shards.make(make)


# On one shard --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an operation on one table works."""

    spec: StoreSpec
    number: int
    """Of the table in the store."""
    shards: Shards
    seed: UInt32[Array, "2"]
    partition_owners: UInt32[Array, " num_partitions"]

    def ids(self, words: Array) -> np.ndarray:
        return table_lib.table_ids_of(self.number, words.shape[0])

    def total(self, words: Array) -> Array:
        """Of all shards; of a replicated store, whose shards all have the same, of one."""
        return self.shards.total(words, is_replicated=self.spec.is_replicated)

    def is_own(self, words: Array) -> Array | None:
        """Which keys this shard has to do with; None: all."""
        if self.spec.num_shards == 1 or self.spec.is_replicated:
            return None
        owners = plan_lib.owner_of(self.spec, self.number, words, self.partition_owners)
        return owners == self.shards.index().astype(jnp.uint32)


def _contains(place: _Place, store: StoreState, words: Array) -> tuple[None, tuple[Array]]:
    row_ids = table_lib.find(store, words, place.ids(words))
    return None, (place.total((row_ids != jnp.uint32(NO_ROW)).astype(jnp.uint32)) > 0,)


def _rows_of(place: _Place, store: StoreState, words: Array) -> tuple[None, tuple[Array, Array]]:
    row_ids = table_lib.find(store, words, place.ids(words))
    is_there = row_ids != jnp.uint32(NO_ROW)
    requests = jnp.concatenate([words, jnp.asarray(place.ids(words))[:, None], jnp.ones_like(words[:, :1])], axis=1)
    _, rows, _ = table_lib.gather(place.spec, store, place.seed, requests, row_ids, is_find=True)
    # As words of 32 bits, of which all shards but one have zeros: their sum has the bits of the row, whatever they say.
    itemsize = place.spec.itemsize
    bits = lax.bitcast_convert_type(rows, jnp.uint32 if itemsize == 4 else jnp.uint16).astype(jnp.uint32)
    bits = place.total(jnp.where(is_there[:, None], bits, jnp.uint32(0)))
    rows = lax.bitcast_convert_type(bits if itemsize == 4 else bits.astype(jnp.uint16), rows.dtype)
    return None, (rows, place.total(is_there.astype(jnp.uint32)) > 0)


def _assign(
    place: _Place, store: StoreState, words: Array, rows: Array, clock: Array
) -> tuple[StoreState, tuple[Array, Array]]:
    is_own = place.is_own(words)
    if is_own is not None:
        words = jnp.where(is_own[:, None], words, jnp.uint32(PADDING_KEY & 0xFFFFFFFF))
    store, _, counts = table_lib.assign(place.spec, store, place.seed, clock, words, place.ids(words), rows, {})
    of_table = counts[place.number].astype(jnp.uint32)
    return store, (place.total(of_table[_INSERTED]), place.total(of_table[_REFUSED]))


def _clear(place: _Place, store: StoreState) -> tuple[StoreState, tuple[Array]]:
    generation = store.generation
    store, num_erased = table_lib.clear(place.spec, store, place.number)
    num_erased = place.total(num_erased)
    return store.advanced(generation, num_erased), (num_erased,)


_ON_STORE = {"contains": _contains, "rows_of": _rows_of, "assign": _assign, "clear": _clear}
_READING = ("contains", "rows_of")


# What is checked before ----------------------------------------------------------------------------------------------


def check_state(op: str, collection: "TableOperations", state: State) -> None:
    """Refuses a state that another collection made, or that is gone."""
    if not isinstance(state, State):
        raise TypeError(f"{op}: state: got {type(state).__name__}, wanted the State that Collection.init made.")
    if state.mesh != str(collection.shards):
        raise ValueError(
            f"{op}: state: got one made for {place_of(state.mesh)}, wanted one for {place_of(str(collection.shards))}; "
            "use the collection that made it."
        )
    if state.fingerprint != collection.fingerprint:
        dims = [store.rows[0].shape[-1] for store in state.stores]
        own = [spec.dim for spec in collection.stores]
        differ = f"fingerprint {state.fingerprint}), wanted {collection.fingerprint}"
        if dims != own:
            differ = f"dims {dims} by store), wanted {own}"
        raise ValueError(
            f"{op}: state: got one of other specs ({differ}; use the collection that made it, or declare the same "
            "tables."
        )
    if any(store.counters.ndim != 1 for store in state.stores):
        remedy = "collection.unstack(state)" if collection.shards.is_mesh else "one of its parts"
        raise ValueError(
            f"{op}: state: got one whose arrays have one more axis in front, as stack and jax.pmap give them, "
            f"wanted those of init; pass {remedy}."
        )
    # To ask a deleted array whether it is ready ends the process (jaxlib 0.10.2). A step that takes the state takes
    # all of its arrays, and growing takes the index: two of each store tell, at little cost.
    if any(_is_deleted(array) for store in state.stores for array in (store.counters, store.index)):
        raise ValueError(
            f"{op}: state: got one whose arrays are deleted: it was donated to a step, or consumed by grow; wanted "
            "the one that this call returned, as in state = collection.grow(state, batch)."
        )


def check_untraced(op: str, state: State, remedy: str = "call it between steps") -> None:
    """Refuses the state of a trace, for what runs on the host."""
    if any(isinstance(store.counters, jax.core.Tracer) for store in state.stores):
        raise TypeError(
            f"{op}: state: got one that is traced (in jax.jit, lax.scan or shard_map), wanted arrays, because {op} "
            f"runs on the host; {remedy}."
        )


def check_features(op: str, collection: "TableOperations", features: Features) -> None:
    """Refuses features that another collection packed."""
    if not isinstance(features, Features):
        raise TypeError(
            f"{op}: features: got {type(features).__name__}, wanted Features; make them with "
            "collection.batch(raw).features."
        )
    num_parts = collection.shards.num_shards
    if features.num_parts != num_parts:
        raise ValueError(
            f"{op}: features: got those packed for {features.num_parts} shards, wanted {num_parts} "
            f"({place_of(str(collection.shards))}); make them with this collection's batch."
        )
    if features.fingerprint != collection.fingerprint:
        raise ValueError(
            f"{op}: features: got those of a collection with other specs; make them with this one's batch."
        )


def locate(op: str, collection: "TableOperations", table: str) -> tuple[int, int]:
    """The number of a table's store, and the table's number in it; refuses a name that is none."""
    for s, store in enumerate(collection.stores):
        names = [one.name for one in store.tables]
        if table in names:
            return s, names.index(table)
    raise ValueError(f"{op}: table: got {table!r}, wanted one of {[one.name for one in collection.tables]}.")


def _words(op: str, keys: Any) -> Any:
    """The words of keys that were given by themselves."""
    words = keys_lib.words_of(keys, "int64", op)
    if words.ndim != 2:
        raise ValueError(f"{op}: keys: got shape {list(words.shape[:-1])}, wanted [num_keys].")
    return words


def clock_of(op: str, clock: Any) -> UInt32[Array, ""] | None:
    """A user's time as it goes into an op; None stays None.

    Raises:
      TypeError, ValueError: no scalar, or no uint32; names the op.

    Example:
      >>> clock_of("lookup", 1_700_000_000).dtype
      dtype('uint32')
    """
    return None if clock is None else _word(f"{op}: clock", clock)


def _word(what: str, value: Any) -> Any:
    """A uint32 scalar, checked; `what`: the operation and its argument."""
    if isinstance(value, (jax.Array, np.ndarray)):
        if value.shape != () or value.dtype != np.uint32:
            raise TypeError(f"{what}: got {value.dtype}{list(value.shape)}, wanted an integer or a uint32 scalar.")
        return jnp.asarray(value)
    return jnp.uint32(checks.integer(what, value, 0, 2**32 - 1, "0 to 2**32 - 1", "an integer or a uint32 scalar"))


def place_of(mesh_name: str) -> str:
    """Where a state is, as messages name it."""
    return f"the mesh axes {mesh_name}" if mesh_name else "one device"


def _rows_by_table(table_rows: Any, store: StoreSpec) -> np.ndarray:
    """Rows of each table of a store, of all shards: int64, since all shards together may have more than 2**31."""
    by_shard = np.asarray(table_rows).astype(np.int64).reshape(store.num_shards, len(store.tables))
    return by_shard[0] if store.is_replicated else by_shard.sum(axis=0)
