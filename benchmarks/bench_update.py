"""A training step without a model: lookup, then update with a given gradient.

Question: what does a step of a dynamic table cost, against static tables and against moving the bytes?
Workload: W1 to W6 under each of their optimizers; all keys present, one fixed gradient.
Limit:    the bare gather, then read-modify-write of the unique rows (`limits.py`), state included, sorting not.
Command:  `python -m jaxsok bench --only update --workloads W1`
Last result: docs/performance.md (H200, commit 3ba843f4).
"""

from . import records
from .fill import Filled
from .limits import forward_bytes, update_bytes
from .records import Batches, Recorder
from .timing import Protocol
from .workloads import state_dims


def measure(filled: Filled, batches: Batches, recorder: Recorder, protocol: Protocol) -> None:
    """Measures the step under one key distribution."""
    workload = filled.workload
    sets = filled.inputs(records.STEP, [key_set.ids for key_set in batches.key_sets])
    (idle,) = filled.inputs(records.STEP, [batches.key_sets[0].ids[:, :1]])
    filled.state, (_, stats) = filled.programs[records.STEP].run(filled.state, sets[0])
    stats.check()
    load = filled.load
    timing = filled.measure(records.STEP, sets, protocol, idle)
    recorder.add(
        batches.record(
            records.STEP,
            "jaxsok",
            timing,
            optimizer=filled.optimizer,
            moved_bytes=step_bytes(batches, filled.optimizer),
            load=load,
            notes={"num_rows": workload.num_tables * workload.num_rows},
        )
    )


def step_bytes(batches: Batches, optimizer: str) -> int:
    """Returns the bytes that a step must move: a training forward and an update."""
    states = state_dims(optimizer, batches.workload.dim)
    return forward_bytes(*batches.shape, training=True) + update_bytes(*batches.shape, states)
