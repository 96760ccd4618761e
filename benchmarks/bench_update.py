"""A training step without a model: lookup, then update with a given gradient.

Question: what does a step of a dynamic table cost, against static tables and against moving the bytes?
Workload: W1 to W6 under each of their optimizers; all keys present, one fixed gradient.
Limit:    the bare gather, then read-modify-write of the unique rows (`limits.py`), state included, sorting not.
Command:  `python -m benchmarks.run --only update --workloads W1`
Last result: not yet measured.
"""

from collections.abc import Sequence

from benchmarks import records
from benchmarks.fill import Filled
from benchmarks.limits import forward_bytes, update_bytes
from benchmarks.records import Record, Recorder
from benchmarks.timing import Protocol, Step
from benchmarks.workloads import KeySet, state_dims


class Update:
    """The step of one filled collection."""

    def __init__(self, filled: Filled):
        """Declares the program; it serves every key distribution, since the shapes are the same."""
        self.filled = filled
        collection = filled.collection

        def step(state, inputs):
            features, gradients = inputs
            embeddings, state, plan = collection.lookup(state, features)
            state, stats = collection.update(state, plan, gradients)
            return state, (embeddings, stats)

        self._step = Step(step, donates=True)
        self._gradients = filled.gradients(filled.workload.num_bags)

    def measure(self, distribution: str, key_sets: Sequence[KeySet], recorder: Recorder, protocol: Protocol) -> None:
        """Measures the step under one key distribution."""
        filled, workload = self.filled, self.filled.workload
        sets = [(filled.features(key_set.ids), self._gradients) for key_set in key_sets]
        idle = (filled.features(key_sets[0].ids[:, :1]), {name: one[:1] for name, one in self._gradients.items()})
        filled.state, (_, stats) = self._step.run(filled.state, sets[0])
        stats.check()
        load = filled.load
        timing, filled.state = self._step.measure(filled.state, sets, protocol, idle)
        num_unique = round(sum(key_set.num_unique for key_set in key_sets) / len(key_sets))
        num_bags = workload.num_tables * workload.num_bags
        shape = (workload.num_keys, num_unique, num_bags, workload.dim)
        recorder.add(
            Record(
                workload=workload.name,
                what=records.STEP,
                subject="jaxsok",
                timing=timing,
                distribution=distribution,
                optimizer=filled.optimizer,
                num_keys=workload.num_keys,
                num_unique=num_unique,
                moved_bytes=forward_bytes(*shape, training=True)
                + update_bytes(*shape, state_dims(filled.optimizer, workload.dim)),
                load=load,
                notes={"num_rows": workload.num_tables * workload.num_rows},
            )
        )
