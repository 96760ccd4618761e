"""One table without bags: keys in, row ids or rows out.

Question: what does finding a key cost compared with reading its row, and how fast do new keys get rows?
Workload: H1; find and find_or_insert of keys drawn at random from those in the table, the index at load 0.5; find +
          gather (`Collection.find`, no combiner) at each dim; find_or_insert of new keys from load 0 to 0.5.
Limit:    find: one 64-byte line a key (`limits.probe`). Find + gather: the bare gather of the same rows. New keys: the
          bytes they must move (`limits.insert_bytes`), their rows included.
Command:  `python -m jaxsok bench --only table`
Last result: docs/performance.md (H200, commit 3ba843f4).
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok
from jaxsok import table

from . import limits, records
from .one_table import OneTable, count, draw, keys_from, keys_of, table_ids
from .records import Record, Recorder
from .timing import Protocol, Step, summary
from .workloads import HashWorkload

_INSERT_ROUNDS = 7
"""Rounds of filling an empty table; a round is as many calls as fit."""


def measure(workload: HashWorkload, recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float) -> None:
    """Measures H1 at every dim; row ids alone at the first, since they do not depend on it."""
    for dim in workload.dims:
        if not recorder.has_time(f"{workload.name} D {dim}"):
            continue
        with recorder.attempt(f"{workload.name} D {dim}"):
            bench = HashTable(workload, dim)
            bench.insert_new(recorder, protocol, copy_gb_s)
            bench.fill(workload.keys_per_call[-1])
            for num_keys in workload.keys_per_call:
                id_sets = draw(workload.num_rows, num_keys, protocol.num_key_sets, seed)
                if dim == workload.dims[0]:
                    bench.find(num_keys, id_sets, recorder, protocol)
                bench.find_and_gather(num_keys, id_sets, recorder, protocol)
            del bench


class HashTable(OneTable):
    """The table of H1 at one dim."""

    def __init__(self, workload: HashWorkload, dim: int):
        """Declares the table."""
        super().__init__(workload.num_rows, dim)
        self.workload = workload

    def insert_new(self, recorder: Recorder, protocol: Protocol, copy_gb_s: float, part: str = "") -> None:
        """Times rounds of calls that take an empty table to load 0.5; every key is new.

        Args:
          recorder: takes the record.
          protocol: how often.
          copy_gb_s: what a copy reaches: the limit is the bytes at this rate.
          part: in whose table it stands.
        """
        num_keys = self.workload.keys_per_call[-1]
        calls = max(1, self.workload.num_rows // num_keys)
        key_sets = [keys_from(i * num_keys, num_keys) for i in range(calls)]
        samples = []
        rounds = min(_INSERT_ROUNDS, protocol.repetitions)
        for _ in range(1 + rounds):  # The first call compiles.
            state = self.collection.init(seed=0)
            store, seed = state.stores[0], state.seed
            jax.block_until_ready((store, key_sets))
            begin = time.perf_counter()
            for keys in key_sets:
                store, row_ids = self.insert(store, seed, keys)
            jax.block_until_ready((store, row_ids))
            samples.append((time.perf_counter() - begin) * 1e3 / calls)
            del state
        if int(store.num_rows()) != calls * num_keys:
            raise RuntimeError(f"{self.workload.name}: {int(store.num_rows())} rows of {calls * num_keys} new keys.")
        timing = summary(samples[1:], calls)
        moved = limits.insert_bytes(num_keys, self.dim)
        row_bytes_ms = num_keys * self.dim * limits.FLOAT_BYTES / copy_gb_s * 1e-6
        notes = {"dim": self.dim, "row_bytes_ms": row_bytes_ms} | ({"part": part} if part else {})
        limit_ms = moved / copy_gb_s * 1e-6
        self._add(recorder, records.INSERT_NEW, num_keys, timing, moved, notes=notes, limit_ms=limit_ms)

    def find(self, num_keys: int, id_sets: list[jax.Array], recorder: Recorder, protocol: Protocol) -> None:
        """Times find and find_or_insert of present keys: row ids alone."""
        key_sets = [keys_of(ids) for ids in id_sets]
        idle = key_sets[0][:1]
        num_lines = self.store.index.shape[0]
        lines = limits.varied_floats((num_lines, 16))
        line_sets = [(ids % jnp.uint32(num_lines)).astype(jnp.int32) for ids in id_sets]
        limit, by = limits.probe(lines, line_sets, protocol)
        del lines
        find_bytes = num_keys * (limits.KEY_BYTES + limits.ROW_ID_BYTES + limits.INDEX_LINE_BYTES + limits.ROW_ID_BYTES)
        probe_bytes = num_keys * (limits.ROW_ID_BYTES + limits.INDEX_LINE_BYTES + limits.FLOAT_BYTES)
        self._add(recorder, "probe of one line", num_keys, limit, probe_bytes, subject="limit", by=by)

        find = Step(lambda store, keys: table.find(store, keys, table_ids(keys)), donates=False)
        _, row_ids = find.run(self.store, key_sets[0])
        if int(jax.device_get((row_ids == jnp.uint32(jaxsok.NO_ROW)).sum())):
            raise RuntimeError(f"{self.workload.name}: keys have no row; filling went wrong.")
        timing, _ = find.measure(self.store, key_sets, protocol, idle)
        self._add(recorder, records.FIND, num_keys, timing, find_bytes, limit_ms=limit.ms, load=self.load)

        seed = self.state.seed
        find_or_insert = Step(lambda store, keys: self.find_or_insert(store, seed, keys), donates=True)
        timing, self.store = find_or_insert.measure(self.store, key_sets, protocol, idle)
        self._add(recorder, records.INSERT_PRESENT, num_keys, timing, find_bytes, limit_ms=limit.ms, load=self.load)

    def find_and_gather(self, num_keys: int, id_sets: list[jax.Array], recorder: Recorder, protocol: Protocol) -> None:
        """Times `Collection.find` and the bare gather of the same rows, from the same buffer."""
        row_sets = [table.find(self.store, keys_of(ids), table_ids(ids)) for ids in id_sets]
        # Row ids of distinct keys differ, so this also counts the distinct keys.
        num_unique = round(sum(np.unique(row_ids).size for row_ids in row_sets) / len(row_sets))
        sets = self.inputs(records.FIND_AND_GATHER, id_sets)
        timing = self.measure(records.FIND_AND_GATHER, sets, protocol, self.features(id_sets[0][:1]))
        shape = (num_keys, num_unique, num_keys, self.dim)
        moved = limits.forward_bytes(*shape, training=False)

        (rows,) = self.store.rows
        row_sets = [row_ids.astype(jnp.int32)[:, None] for row_ids in row_sets]
        limit, by = limits.gather(rows, row_sets, protocol)
        self._add(recorder, records.GATHER, num_keys, limit, limits.gather_bytes(*shape), subject="limit", by=by)
        take = Step(lambda rows, row_ids: jnp.take(rows, row_ids[:, 0], axis=0), donates=False)
        xla, _ = take.measure(rows, row_sets, protocol, row_sets[0][:1])
        self._add(recorder, records.FIND_AND_GATHER, num_keys, xla, limits.gather_bytes(*shape), subject="xla")
        self._add(recorder, records.FIND_AND_GATHER, num_keys, timing, moved, load=self.load, num_unique=num_unique)

    def _add(self, recorder, what, num_keys, timing, moved_bytes, subject="jaxsok", notes=None, **more) -> None:
        recorder.add(
            Record(
                workload=self.workload.name,
                what=what,
                subject=subject,
                timing=timing,
                variant=f"D {self.dim}, {count(num_keys)} keys",
                num_keys=num_keys,
                moved_bytes=moved_bytes,
                notes={"num_rows": self.workload.num_rows} | (notes or {}),
                **more,
            )
        )
