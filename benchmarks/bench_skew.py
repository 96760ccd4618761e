"""Skew: one key repeated, and bags of very different lengths.

Question: does a batch that repeats one key, or puts all keys into few bags, take a slow path?
Workload: W1's shape with uniform keys, with one key repeated in each table, and with one key of one table in all
          places; W5's tables with bags of 1, 20 and 500 keys and the same number of keys. Rowwise Adagrad.
Limit:    the bytes at the bandwidth of a copy. The target: a repeated key is no slower than uniform ones.
Command:  `python -m jaxsok bench --only skew`
Last result: docs/performance.md (H200, commit 7db9096).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

import jaxsok

from . import limits, records
from .bench_update import step_bytes
from .fill import Filled
from .records import Batches, Recorder
from .timing import Protocol
from .workloads import KeySet, Workload

WORKLOADS = ("W1", "W5")

HOTNESS = (1, 20, 500)

KEYS = UNIFORM, ONE_A_TABLE, ONE_IN_ALL = "uniform", "one key a table", "one key in all"


def measure(
    filled: Filled, key_sets: Sequence[KeySet], recorder: Recorder, protocol: Protocol, copy_gb_s: float
) -> None:
    """Measures one key repeated on W1's tables, bags on W5's; the tables are filled already."""
    if filled.workload.hotness == 1:
        _measure_repeated(filled, key_sets, recorder, protocol, copy_gb_s)
    else:
        _bags(filled, key_sets, recorder, protocol, copy_gb_s)


def _measure_repeated(filled, key_sets, recorder, protocol, copy_gb_s) -> None:
    workload = filled.workload
    same = [_same_ids(workload, number) for number in range(len(key_sets))]
    for distribution, sets in ((UNIFORM, key_sets), (ONE_A_TABLE, same)):
        _measure(filled, Batches(workload, distribution, sets), recorder, protocol, copy_gb_s)
    single = [dataclasses.replace(key_set, unique_rows=key_set.unique_rows[:1]) for key_set in same]
    with filled.view_as(workload, _on_one_table(filled.collection)) as view:
        _measure(view, Batches(workload, ONE_IN_ALL, single), recorder, protocol, copy_gb_s)


def _bags(filled, key_sets, recorder, protocol, copy_gb_s) -> None:
    num_keys = filled.workload.num_bags * filled.workload.hotness
    for hotness in HOTNESS:
        num_bags = max(1, num_keys // hotness)
        workload = dataclasses.replace(filled.workload, num_bags=num_bags, hotness=hotness)
        label = f"{workload.name} bags of {hotness}"
        if not recorder.has_time(label):
            continue
        sets = [_cut(key_set, num_bags, hotness) for key_set in key_sets]
        with filled.view_as(workload) as bags:
            _measure(bags, Batches(workload, UNIFORM, sets), recorder, protocol, copy_gb_s, f"bags of {hotness}")


def _measure(filled, batches, recorder, protocol, copy_gb_s, variant="") -> None:
    for what in (records.EVALUATION, records.STEP):
        is_step = what == records.STEP
        with recorder.attempt(f"{batches.workload.name} {variant} {batches.distribution} {what}"):
            timing = filled.measure(what, filled.inputs(what, [key_set.ids for key_set in batches.key_sets]), protocol)
            if is_step:
                moved = step_bytes(batches, filled.optimizer)
            else:
                moved = limits.forward_bytes(*batches.shape, training=False)
            recorder.add(
                batches.record(
                    what,
                    "jaxsok",
                    timing,
                    optimizer=filled.optimizer if is_step else "",
                    variant=variant,
                    moved_bytes=moved,
                    limit_ms=moved / copy_gb_s * 1e-6,
                    notes={"part": "skew", "hotness": batches.workload.hotness},
                )
            )


def _same_ids(workload: Workload, number: int) -> KeySet:
    """Returns one id in all places of each table, a different id in each set."""
    row = (1 + number) * workload.num_rows // 7
    ids = np.full((workload.num_tables, workload.num_bags, workload.hotness), row, np.int32)
    unique = np.arange(workload.num_tables, dtype=np.int32) * workload.num_rows + row
    return KeySet(ids, workload.num_rows, unique)


def _on_one_table(collection: jaxsok.Collection) -> jaxsok.Collection:
    """Returns the same tables, so that a state serves both, with all features on the first."""
    first = collection.tables[0].name
    features = [dataclasses.replace(feature, table=first) for feature in collection.features]
    return jaxsok.Collection(collection.tables, features)


def _cut(key_set: KeySet, num_bags: int, hotness: int) -> KeySet:
    """Cuts the same keys into as many bags of another length as fit; fewer keys than one bag has are repeated."""
    num_tables = key_set.ids.shape[0]
    ids = np.stack([np.resize(of_table, (num_bags, hotness)) for of_table in key_set.ids])
    if ids.size == key_set.ids.size:
        return dataclasses.replace(key_set, ids=ids)
    base = np.arange(num_tables, dtype=np.int32) * key_set.num_rows
    return KeySet(ids, key_set.num_rows, np.unique(ids + base[:, None, None]))
