"""Operations on tables, between steps and by key: what a collection offers beside lookup and update.

`TableOperations` is the part of `Collection` that works on one table of a state: sizes, erasing, exporting. It holds
nothing of its own.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from jaxsok import annotations, guards
from jaxsok import export as export_lib
from jaxsok import keys as keys_lib
from jaxsok import table as table_lib
from jaxsok.records import Records
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec, TableSpec
from jaxsok.store import State
from jaxsok.types import COUNTERS


class TableOperations:
    """What a collection offers on its tables. `Collection` is the only one; it sets what is declared here."""

    shards: Shards | None
    tables: tuple[TableSpec, ...]
    stores: tuple[StoreSpec, ...]
    fingerprint: str
    _between: tuple[Shards | None, ExchangeSpec | None]
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
          Streams the records and rewrites the index of the table's store: 48 bytes a row of capacity.

        Example:
          `state, num_erased = collection.erase(state, "user", np.array([7]))`
        """
        self._check_state("erase", state)
        s, number = self._locate("erase", table)
        words = keys_lib.words_of(keys, "int64", "erase")
        if words.ndim != 2:
            raise ValueError(f"erase: keys: got shape {list(words.shape[:-1])}, wanted [num_keys].")
        state, words = guards.whole("erase", state=state, keys=words)
        if self.shards is None or self.shards.is_manual():
            return self._erase_part(state, jnp.asarray(words), store=s, number=number)
        return self._jitted["erase"](state, words, store=s, number=number)

    @annotations.annotated("jaxsok.export_table")
    def export_table(self, state: State, table: str) -> dict[str, Any]:
        """A table's keys, rows, row ids and optimizer state as NumPy arrays, in the order of the row ids.

        Waits for the device and holds the whole table in host memory; `export_chunks` gives it in parts. Where
        statistics are kept they are there too, as `last_step` and `frequency`, and on a mesh the `shards` of the rows.

        Example:
          `rows = collection.export_table(state, "user")["rows"]`
        """
        self._check_state("export_table", state)
        s, number = self._locate("export_table", table)
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
        self._check_state("export_chunks", state)
        s, number = self._locate("export_chunks", table)
        spec = self.stores[s]
        if chunk_rows is not None and (isinstance(chunk_rows, bool) or not isinstance(chunk_rows, (int, np.integer))):
            raise TypeError(f"export_chunks: chunk_rows: got {chunk_rows!r}, wanted an integer or None.")
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"export_chunks: chunk_rows: got {chunk_rows}, wanted at least 1.")
        if since is not None:
            if isinstance(since, bool) or not isinstance(since, (int, np.integer)):
                raise TypeError(f"export_chunks: since: got {since!r}, wanted an integer or None.")
            if not spec.keeps_statistics:
                raise ValueError(
                    f'export_chunks: since: got {since} for table "{table}", whose rows have no last step; declare '
                    "TableSpec(statistics=True), or export all."
                )
        chunks = export_lib.export_chunks(
            spec, state.stores[s], number, chunk_rows=chunk_rows, since=since, with_state=with_state
        )
        return (chunk.records for chunk in chunks)

    @annotations.annotated("jaxsok.num_rows")
    def num_rows(self, state: State) -> dict[str, int]:
        """Rows in use by table (waits for the device).

        Example:
          `collection.num_rows(state)` → `{"user": 1000, "item": 250}`
        """
        self._check_state("num_rows", state)
        by_store = [
            _rows_by_table(self.shards.gathered(one.table_rows) if self._spans_processes else one.table_rows, store)
            for store, one in zip(self.stores, state.stores, strict=True)
        ]
        return {
            table.name: int(rows)
            for store, one in zip(self.stores, by_store, strict=True)
            for table, rows in zip(store.tables, one, strict=True)
        }

    # On one shard's part of a state, and on global arrays, where the former is called on every shard.

    def _erase_part(self, state: State, words: Array, *, store: int, number: int) -> tuple[State, UInt32[Array, ""]]:
        spec, old = self.stores[store], state.stores[store]
        ids = jnp.asarray(table_lib.table_ids_of(number, words.shape[0]))
        new, num_erased = table_lib.erase(spec, old, words, ids)
        shards, _ = self._between
        if shards is not None:
            # A plan is stale on all shards or on none: those without an erased row advance with the others.
            is_counted = (shards.index() == 0) | (not spec.is_replicated)
            num_erased = lax.psum(jnp.where(is_counted, num_erased, 0), shards.axis)
            generation = old.generation + (num_erased > 0).astype(jnp.uint32)
            new = dataclasses.replace(new, counters=new.counters.at[COUNTERS.index("generation")].set(generation))
        stores = (*state.stores[:store], new, *state.stores[store + 1 :])
        return dataclasses.replace(state, stores=stores), num_erased

    def _erase_global(self, state: State, words: Array, *, store: int, number: int) -> tuple[State, UInt32[Array, ""]]:
        of_state = self._specs_of(state)
        total = P() if self.stores[store].num_shards > 1 else self.shards.spec

        def part(state: State, words: Array) -> tuple[State, Array]:
            state, num_erased = self._erase_part(state, words, store=store, number=number)
            return state, num_erased if total == P() else num_erased[None]

        state, num_erased = self.shards.run(part, (state, words), (of_state, P()), (of_state, total))
        return state, num_erased.reshape(())

    def _specs_of(self, state: State) -> Any:
        """How each array of a state lies on the mesh, as `shard_map` takes it."""
        return dataclasses.replace(state, stores=self.shards.spec, step=P(), seed=P(), partition_owners=P())

    @property
    def _mesh_name(self) -> str:
        return "" if self.shards is None else str(self.shards)

    @property
    def _spans_processes(self) -> bool:
        return self.shards is not None and self.shards.num_processes > 1

    def _locate(self, op: str, table: str) -> tuple[int, int]:
        for s, store in enumerate(self.stores):
            names = [one.name for one in store.tables]
            if table in names:
                return s, names.index(table)
        raise ValueError(f"{op}: table: got {table!r}, wanted one of {[one.name for one in self.tables]}.")

    def _check_state(self, op: str, state: State) -> None:
        if not isinstance(state, State):
            raise TypeError(f"{op}: state: got {type(state).__name__}, wanted the State that Collection.init made.")
        if state.mesh != self._mesh_name:
            raise ValueError(
                f"{op}: state: got one made for {place_of(state.mesh)}, wanted one for {place_of(self._mesh_name)}; "
                "use the collection that made it."
            )
        if state.fingerprint != self.fingerprint:
            raise ValueError(
                f"{op}: state: got one of other specs (fingerprint {state.fingerprint}), wanted "
                f"{self.fingerprint}; use "
                "the collection that made it, or declare the same tables."
            )


def clock_of(op: str, clock: Any) -> UInt32[Array, ""] | None:
    """A user's time as it goes into an op; None stays None.

    Raises:
      TypeError, ValueError: no scalar, or no uint32; names the op.

    Example:
      >>> clock_of("lookup", 1_700_000_000).dtype
      dtype('uint32')
    """
    if clock is None:
        return None
    if isinstance(clock, (int, np.integer)) and not isinstance(clock, bool):
        if not 0 <= clock < 2**32:
            raise ValueError(f"{op}: clock: got {clock}, wanted 0 to 2**32 - 1.")
        return jnp.uint32(clock)
    if isinstance(clock, (np.ndarray, jax.Array)) and clock.dtype == np.uint32 and clock.shape == ():
        return jnp.asarray(clock)
    got = f"{clock.dtype}{list(clock.shape)}" if hasattr(clock, "shape") else repr(clock)
    raise TypeError(f"{op}: clock: got {got}, wanted a uint32 scalar or an integer.")


def place_of(mesh_name: str) -> str:
    """Where a state is, as messages name it."""
    return f"the mesh axes {mesh_name}" if mesh_name else "one device"


def _rows_by_table(table_rows: Any, store: StoreSpec) -> np.ndarray:
    """Rows of each table of a store, of all shards: int64, since all shards together may have more than 2**31."""
    by_shard = np.asarray(table_rows).astype(np.int64).reshape(store.num_shards, len(store.tables))
    return by_shard[0] if store.is_replicated else by_shard.sum(axis=0)
