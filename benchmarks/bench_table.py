"""One table without bags: keys in, row ids or rows out.

Question: what does finding a key cost beside reading its row, and how fast do new keys get rows?
Workload: H1; find and find_or_insert of keys drawn at random from those in the table, the index at load 0.5; find +
          gather (`Collection.find`, no combiner) at each dim; find_or_insert of new keys from load 0 to 0.5.
Limit:    find: one 64-byte line a key (`limits.probe`). Find + gather: the bare gather of the same rows. New keys: the
          bytes they must move (`limits.insert_bytes`), their rows included.
Command:  `python -m benchmarks.run --only table`
Last result: not yet measured.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok
from benchmarks import limits, records
from benchmarks.fill import optimizer_of
from benchmarks.records import Record, Recorder
from benchmarks.timing import Protocol, Step, summary
from benchmarks.workloads import HashWorkload, mix
from jaxsok import table

_INSERT_ROUNDS = 7
"""Rounds of filling an empty table; a round is as many calls as fit."""


def measure(workload: HashWorkload, recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float) -> None:
    """Measures H1 at every dim; row ids alone at the first, since they do not depend on it."""
    for dim in workload.dims:
        with recorder.attempt(f"{workload.name} D {dim}"):
            bench = _Table(workload, dim)
            bench.insert_new(recorder, protocol, copy_gb_s)
            bench.fill()
            sets = {
                num_keys: [
                    jax.device_put(
                        np.random.default_rng((seed, number, num_keys)).integers(
                            0, workload.num_rows, num_keys, dtype=np.uint32
                        )
                    )
                    for number in range(protocol.num_key_sets)
                ]
                for num_keys in workload.keys_per_call
            }
            for num_keys, id_sets in sets.items():
                if dim == workload.dims[0]:
                    bench.find(num_keys, id_sets, recorder, protocol)
                bench.find_and_gather(num_keys, id_sets, recorder, protocol)
            del bench


class _Table:
    """One table of one dim."""

    def __init__(self, workload: HashWorkload, dim: int):
        self.workload, self.dim = workload, dim
        spec = jaxsok.TableSpec("items", dim=dim, optimizer=optimizer_of("sgd"), capacity=workload.num_rows)
        feature = jaxsok.FeatureSpec("item", table="items", combiner=None)
        self.collection = jaxsok.Collection([spec], [feature])
        (self.store_spec,) = self.collection.stores
        self.state = None
        self._insert = jax.jit(self._find_or_insert, donate_argnums=0)

    def _find_or_insert(self, store, seed, keys):
        store, row_ids, _ = table.find_or_insert(self.store_spec, store, seed, keys, _table_ids(keys))
        return store, row_ids

    def insert_new(self, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
        """Times rounds of calls that take an empty table to load 0.5; every key is new."""
        num_keys = self.workload.keys_per_call[-1]
        calls = max(1, self.workload.num_rows // num_keys)
        key_sets = [_keys(jnp.arange(num_keys, dtype=jnp.uint32) + jnp.uint32(i * num_keys)) for i in range(calls)]
        samples = []
        rounds = min(_INSERT_ROUNDS, protocol.repetitions)
        for _ in range(1 + rounds):  # the first compiles
            state = self.collection.init(seed=0)
            store, seed = state.stores[0], state.seed
            jax.block_until_ready((store, key_sets))
            begin = time.perf_counter()
            for keys in key_sets:
                store, row_ids = self._insert(store, seed, keys)
            jax.block_until_ready((store, row_ids))
            samples.append((time.perf_counter() - begin) * 1e3 / calls)
            del state
        if int(store.num_rows()) != calls * num_keys:
            raise RuntimeError(f"{self.workload.name}: {int(store.num_rows())} rows of {calls * num_keys} new keys.")
        timing = summary(samples[1:], calls)
        moved = limits.insert_bytes(num_keys, self.dim)
        self._add(recorder, records.INSERT_NEW, num_keys, timing, moved, limit_ms=moved / copy_gb_s * 1e-6)

    def fill(self) -> None:
        """Gives every id its row."""
        self.state = self.collection.init(seed=0)
        store = self.state.stores[0]
        num_keys = min(self.workload.keys_per_call[-1], self.workload.num_rows)
        for begin in range(0, self.workload.num_rows, num_keys):
            begin = min(begin, self.workload.num_rows - num_keys)
            keys = _keys(jnp.arange(num_keys, dtype=jnp.uint32) + jnp.uint32(begin))
            store, _ = self._insert(store, self.state.seed, keys)
        self.state = dataclasses.replace(self.state, stores=(store,))
        if int(store.num_rows()) != self.workload.num_rows:
            raise RuntimeError(f"{self.workload.name}: {int(store.num_rows())} rows, wanted {self.workload.num_rows}.")

    @property
    def load(self) -> float:
        """Entries in use over entries of the index."""
        return self.workload.num_rows / (self.state.stores[0].index.shape[0] * 4)

    def find(self, num_keys: int, id_sets: list[jax.Array], recorder: Recorder, protocol: Protocol) -> None:
        """Times find and find_or_insert of present keys: row ids alone."""
        key_sets = [_keys(ids) for ids in id_sets]
        idle = key_sets[0][:1]
        num_lines = self.state.stores[0].index.shape[0]
        lines = limits.varied_floats((num_lines, 16))
        line_sets = [(ids % jnp.uint32(num_lines)).astype(jnp.int32) for ids in id_sets]
        limit, by = limits.probe(lines, line_sets, protocol)
        del lines
        find_bytes = num_keys * (limits.KEY_BYTES + limits.ROW_ID_BYTES + limits.INDEX_LINE_BYTES + limits.ROW_ID_BYTES)
        probe_bytes = num_keys * (limits.ROW_ID_BYTES + limits.INDEX_LINE_BYTES + limits.FLOAT_BYTES)
        self._add(recorder, "probe of one line", num_keys, limit, probe_bytes, subject="limit", by=by)

        find = Step(lambda store, keys: table.find(store, keys, _table_ids(keys)), donates=False)
        store = self.state.stores[0]
        _, row_ids = find.run(store, key_sets[0])
        if int(jax.device_get((row_ids == jnp.uint32(jaxsok.NO_ROW)).sum())):
            raise RuntimeError(f"{self.workload.name}: keys have no row; filling went wrong.")
        timing, _ = find.measure(store, key_sets, protocol, idle)
        self._add(recorder, records.FIND, num_keys, timing, find_bytes, limit_ms=limit.ms, load=self.load)

        seed = self.state.seed

        def find_or_insert(store, keys):
            store, row_ids, _ = table.find_or_insert(self.store_spec, store, seed, keys, _table_ids(keys))
            return store, row_ids

        timing, store = Step(find_or_insert, donates=True).measure(store, key_sets, protocol, idle)
        self.state = dataclasses.replace(self.state, stores=(store,))
        self._add(recorder, records.INSERT_PRESENT, num_keys, timing, find_bytes, limit_ms=limit.ms, load=self.load)

    def find_and_gather(self, num_keys: int, id_sets: list[jax.Array], recorder: Recorder, protocol: Protocol) -> None:
        """Times `Collection.find` beside the bare gather of the same rows, from the same buffer."""
        row_sets = [table.find(self.state.stores[0], _keys(ids), _table_ids(ids)) for ids in id_sets]
        # Row ids of distinct keys differ, so these are the distinct keys too.
        num_unique = round(sum(np.unique(row_ids).size for row_ids in row_sets) / len(row_sets))
        sets = [self.collection.batch({"item": _keys(ids)}).features for ids in id_sets]
        idle = self.collection.batch({"item": _keys(id_sets[0][:1])}).features
        timing, _ = Step(self.collection.find, donates=False).measure(self.state, sets, protocol, idle)
        shape = (num_keys, num_unique, num_keys, self.dim)
        moved = limits.forward_bytes(*shape, training=False)

        (rows,) = self.state.stores[0].rows
        row_sets = [row_ids.astype(jnp.int32)[:, None] for row_ids in row_sets]
        limit, by = limits.gather(rows, row_sets, protocol)
        self._add(recorder, records.GATHER, num_keys, limit, limits.gather_bytes(*shape), subject="limit", by=by)
        take = Step(lambda rows, row_ids: jnp.take(rows, row_ids[:, 0], axis=0), donates=False)
        xla, _ = take.measure(rows, row_sets, protocol, row_sets[0][:1])
        self._add(recorder, records.FIND_AND_GATHER, num_keys, xla, limits.gather_bytes(*shape), subject="xla")
        self._add(recorder, records.FIND_AND_GATHER, num_keys, timing, moved, load=self.load, num_unique=num_unique)

    def _add(self, recorder, what, num_keys, timing, moved_bytes, subject="jaxsok", **more) -> None:
        recorder.add(
            Record(
                workload=self.workload.name,
                what=what,
                subject=subject,
                timing=timing,
                variant=f"D {self.dim}, {_count(num_keys)} keys",
                num_keys=num_keys,
                moved_bytes=moved_bytes,
                notes={"num_rows": self.workload.num_rows},
                **more,
            )
        )


@jax.jit
def _keys(ids: jax.Array) -> jax.Array:
    return mix(0, ids, jnp)


def _table_ids(keys: jax.Array) -> jax.Array:
    return jnp.zeros(keys.shape[0], jnp.uint32)


def _count(number: int) -> str:
    return f"{number >> 20} Mi" if number >= 1 << 20 else str(number)
