"""The forward path: keys to embeddings.

Question: how near does a dynamic table come to a bare gather of the same rows, and to static tables?
Workload: W1 to W6; evaluation (`Collection.find`) and training (`Collection.lookup`), all keys present.
Limit:    the bare gather, row ids given (`limits.gather`); bytes of `limits.forward_bytes`.
Command:  `python -m jaxsok bench --only lookup --workloads W1`
Last result: docs/performance.md (H200, commit 3ba843f4).
"""

from . import records
from .fill import Filled
from .limits import forward_bytes
from .records import Batches, Recorder
from .timing import Protocol


def measure(filled: Filled, batches: Batches, recorder: Recorder, protocol: Protocol) -> None:
    """Measures both forwards under one key distribution."""
    sets = [filled.features(key_set.ids) for key_set in batches.key_sets]
    idle = filled.features(batches.key_sets[0].ids[:, :1])
    filled.check(sets, f"{filled.workload.name} {batches.distribution}")
    load = filled.load
    for what in (records.EVALUATION, records.TRAINING):
        timing = filled.measure(what, sets, protocol, idle)
        moved = forward_bytes(*batches.shape, training=what == records.TRAINING)
        notes = {"num_rows": filled.workload.num_tables * filled.workload.num_rows}
        recorder.add(batches.record(what, "jaxsok", timing, moved_bytes=moved, load=load, notes=notes))
