"""The way down: keys to embeddings.

Question: how near does a dynamic table come to a bare gather of the same rows, and to static tables?
Workload: W1 to W6; evaluation (`Collection.find`) and training (`Collection.lookup`), all keys present.
Limit:    the bare gather, row ids given (`limits.gather`); bytes of `limits.forward_bytes`.
Command:  `python -m benchmarks.run --only lookup --workloads W1`
Last result: not yet measured.
"""

from collections.abc import Sequence

import jax

from benchmarks import records
from benchmarks.fill import Filled
from benchmarks.limits import forward_bytes
from benchmarks.records import Record, Recorder
from benchmarks.timing import Protocol, Step
from benchmarks.workloads import KeySet


class Lookup:
    """The two forwards of one filled collection."""

    def __init__(self, filled: Filled):
        """Declares the programs; they serve every key distribution, since the shapes are the same."""
        self.filled = filled
        collection = filled.collection

        def train(state, features):
            embeddings, state, _ = collection.lookup(state, features)
            return state, embeddings

        self._evaluate = Step(collection.find, donates=False)
        self._train = Step(train, donates=True)

    def measure(self, distribution: str, key_sets: Sequence[KeySet], recorder: Recorder, protocol: Protocol) -> None:
        """Measures both forwards under one key distribution."""
        filled = self.filled
        sets = [filled.features(key_set.ids) for key_set in key_sets]
        idle = filled.features(key_sets[0].ids[:, :1])
        _, (_, stats) = self._evaluate.run(filled.state, sets[0])
        stats.check()
        missing = int(jax.device_get(stats.num_missing).sum())
        if missing:
            raise RuntimeError(f"{filled.workload.name} {distribution}: {missing} keys have no row after filling.")
        load = filled.load

        timing, _ = self._evaluate.measure(filled.state, sets, protocol, idle)
        self._add(recorder, records.EVALUATION, distribution, key_sets, timing, load)
        timing, filled.state = self._train.measure(filled.state, sets, protocol, idle)
        self._add(recorder, records.TRAINING, distribution, key_sets, timing, load)

    def _add(self, recorder, what, distribution, key_sets, timing, load) -> None:
        workload = self.filled.workload
        num_unique = round(sum(key_set.num_unique for key_set in key_sets) / len(key_sets))
        num_bags = workload.num_tables * workload.num_bags
        recorder.add(
            Record(
                workload=workload.name,
                what=what,
                subject="jaxsok",
                timing=timing,
                distribution=distribution,
                num_keys=workload.num_keys,
                num_unique=num_unique,
                moved_bytes=forward_bytes(
                    workload.num_keys, num_unique, num_bags, workload.dim, training=what == records.TRAINING
                ),
                load=load,
                notes={"num_rows": workload.num_tables * workload.num_rows},
            )
        )
