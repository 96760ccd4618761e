"""The sharded step: keys to their owners, rows back, gradients to the owners, on 1, 2, 4 and 8 devices.

Question: what does a step on a mesh cost, how does it scale, and how much of it is the wire?
Workload: M1 and M1-64 (8,192 samples a device: weak scaling), W1 and W5 (their bags shared out: strong scaling).
Limit:    one all-to-all of as many bytes as the step sends, in float32 (`wire_limit`), measured in the same run.
Command:  `python -m jaxsok bench --only exchange --workloads M1,W1,W5 [--devices 2]`
Last result: docs/results/many_gpus.md (4 x H100, commit abef7e2).

Two programs. *Planned*: the plan, which exchanges the keys, is a program of its own, with the send capacity that
`Collection.pipeline` chooses; the step has one round and no loop. It is measured without its plan ("planned"), the plan
alone ("plan"), and both as the pipeline dispatches them, plan k + 1 and then step k ("pipelined"): the pipeline itself
does it here, with batches that are packed already. *Single*: `lookup(state, features)`, with further rounds in a loop.
Only "pipelined" and "single" are whole steps, and only they are compared with peers. "bags": the same with partial bags
in place of rows (`FeatureSpec(exchange="bags")`), where bags have several keys.

Peer: the row-sharded table that a user of JAX writes today: one array [tables * rows, dim] split by its rows,
`jnp.take` under `jit`, `.at[].add` of the row gradients (SGD), left to XLA's partitioner.

The forward alone hands out the embeddings of each feature; a step keeps them in its program, as with a model.

"Call ms" is the time until the call of a step returns, the devices being idle before it: what one thread needs to
dispatch the step to all devices of the process (pipelined: the next plan too).

The parts of a step ("split") are measured apart, as programs of the same sizes, one after the other: their sum is not
the step, in which XLA may overlap them.
"""

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxsok
from jaxsok import (
    exchange as exchange_lib,
    gradients as gradients_lib,
    plan as plan_lib,
    table as table_lib,
)
from jaxsok.exchange import Route
from jaxsok.features import Batch
from jaxsok.kernels import combine as combine_kernels, lookup as lookup_kernels, update as update_kernels
from jaxsok.pack import Packing
from jaxsok.pipeline import LookAhead, Pipeline
from jaxsok.types import COUNTERS, NO_ROW, REQUEST_WORDS, ROUNDINGS, ROW_GRADIENTS

from . import fill, limits, peers, records, workloads
from .fill import AXIS, Filled
from .records import BAGS, Record, Recorder
from .timing import Protocol, Step, Timing
from .workloads import KeySet, Workload

MORE_PARTS_OF = ("M1", "M1-64")
"""The workloads that have a second front end and a model around them; the others would say the same again, at the price
of compiling."""

METHODS = ("single", "planned", "bfloat16", "split", "bags", "dlrm", "pmap")
"""The parts that a filled collection measures, in their order; "pmap" takes the state for good."""

DEVICES = (1, 2, 4, 8)

KEY_BYTES_SENT = 4 * REQUEST_WORDS
"""A key, its table and the number of its uses."""


def mesh_of(num_devices: int) -> Mesh:
    """Returns the first devices as a mesh of one axis."""
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])


def devices_at_hand(asked: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the numbers of devices to measure; there must be as many devices as were asked for.

    Raises:
      ValueError: more devices were asked for than there are.
    """
    there = len(jax.devices())
    if asked and max(asked) > there:
        raise ValueError(f"--devices: got {max(asked)}, there are {there}.")
    return tuple(asked) if asked else tuple(number for number in DEVICES if number <= there)


def default_scaling(name: str) -> str:
    """Returns "weak" for M1, whose bags are those of a device, and "strong" for the others."""
    return "weak" if name in workloads.MESH_WORKLOADS else "strong"


def measure(
    workload: Workload,
    run: workloads.Run,
    num_devices: int,
    scaling: str,
    parts: Sequence[str],
    recorder: Recorder,
    protocol: Protocol,
    seed: int,
) -> None:
    """Measures one workload on one number of devices under one scaling, under each key distribution of the run.

    Args:
      workload: of one device, or of all together, as `scaling` says.
      run: the optimizer, and the key distributions.
      num_devices: how many of the first devices to use.
      scaling: "weak" or "strong".
      parts: of METHODS, and "xla".
      recorder: takes the records; each part that fails is recorded as failed, and ends nothing else.
      protocol: how often.
      seed: of the keys.
    """
    workload = workload.on_devices(num_devices, scaling)
    if workload.name not in MORE_PARTS_OF:
        parts = [part for part in parts if part not in ("dlrm", "pmap")]
    # Bags of several keys have both wire dtypes in "bags".
    parts = [part for part in parts if part != ("bags" if workload.hotness == 1 else "bfloat16")]
    if num_devices == 1:  # Nothing is exchanged: one device's step is the base of the scaling.
        parts = [part for part in parts if part in ("single", "dlrm", "xla")]
    mesh = mesh_of(num_devices)
    for distribution in run.distributions:
        label = f"{workload.name} {distribution} {scaling} on {num_devices}"
        key_sets = workloads.key_sets(workload, distribution, protocol.num_key_sets, seed)
        if set(parts) - {"xla"}:
            with recorder.attempt(label):
                bench = Sharded(workload, run.optimizer, distribution, mesh, scaling, key_sets, recorder, protocol)
                for part in (part for part in METHODS if part in parts):
                    with recorder.attempt(f"{label} {part}"):
                        getattr(bench, part)()
            bench = None
            gc.collect()
        if "xla" in parts:
            common = _common(workload, distribution, scaling, num_devices, key_sets)
            with recorder.attempt(f"{label} xla table"):
                measure_xla(workload, mesh, key_sets, common, recorder, protocol, label)
            gc.collect()


def _common(workload, distribution, scaling, num_devices, key_sets) -> dict[str, Any]:
    """Returns the fields that all records of one workload on one mesh share."""
    return {
        "workload": workload.name,
        "distribution": distribution,
        "num_devices": num_devices,
        "num_keys": workload.num_keys,
        "num_unique": round(sum(key_set.num_unique for key_set in key_sets) / len(key_sets)),
        "notes": {
            "scaling": scaling,
            "num_samples": workload.num_bags,
            "num_rows": workload.num_tables * workload.num_rows,
        },
    }


class Packed:
    """A collection whose batches are packed already, with the interface that a `Pipeline` needs."""

    def __init__(self, collection: jaxsok.Collection):
        """Shares all attributes of the collection."""
        self.stores, self.shards, self.growth = collection.stores, collection.shards, collection.growth
        self.plan, self.plan_with_loads = collection.plan, collection.plan_with_loads
        self.step_with_plan = collection.step_with_plan
        self.packer, self.batches_per_call = self, 1

    def begin(self, raw: Batch, pad_to: int | None) -> Batch:
        """Returns the batch itself."""
        return raw

    def complete(self, begun: Batch) -> Batch:
        """Returns the batch itself."""
        return begun

    def send(self, packed: Batch) -> Packing:
        """Returns the batch itself."""
        return Packing(packed, ())

    def finish(self, packing: Packing) -> Batch:
        """Returns the batch itself."""
        return packing.batch


class Sharded:
    """One workload on one mesh, with filled tables and packed batches; each part of the benchmark has a method."""

    def __init__(
        self,
        workload: Workload,
        optimizer: str,
        distribution: str,
        mesh: Mesh,
        scaling: str,
        key_sets: Sequence[KeySet],
        recorder: Recorder,
        protocol: Protocol,
    ):
        """Fills the tables, packs the batches and lets the pipeline choose the send capacity."""
        self.workload, self.optimizer, self.protocol, self.recorder = workload, optimizer, protocol, recorder
        self.mesh, self.num_devices = mesh, mesh.size
        self.common = _common(workload, distribution, scaling, mesh.size, key_sets)
        self.filled: Filled = fill.fill_tables(workload, optimizer, mesh)
        self.collection = self.filled.collection
        (self.spec,) = self.collection.stores
        recorder.say(f"{workload.name} on {mesh.size}: {self.common['notes']['num_rows']} rows filled")
        rng = np.random.default_rng(0)
        self.batches = [
            self.collection.batch(
                fill.raw_of(self.collection, workload, key_set.ids)
                | {
                    "dense": rng.random((workload.num_bags, 13), np.float32),
                    "label": rng.integers(0, 2, workload.num_bags).astype(np.float32),
                }
            )
            for key_set in key_sets
        ]
        self.features = [batch.features for batch in self.batches]
        self.steps = _steps_of(self.collection)
        self.send_capacity = 0
        self.plans: list[Any] = self.features
        if self.num_devices > 1:
            self._plan_all()

    def _plan_all(self) -> None:
        jax.block_until_ready(self.filled.state)
        pipeline = Pipeline(Packed(self.collection), self.batches, prefetch=0)
        for _ in pipeline:
            pass
        # The largest chosen capacity: one program serves all sets.
        self.send_capacity = pipeline.send_capacities[0][-1]
        self.plans = [jax.block_until_ready(self._plan(None, features)) for features in self.features]

    def single(self) -> None:
        """Measures one program from features: plan, exchange in rounds, and on one device neither of them."""
        for what, step in self.steps.items():
            num_rounds = self._check_step(what, step, self.features)
            timing = self._time_step(step, self.features)
            sent = 0
            if self.num_devices > 1:
                store_features = self._features_of_a_shard()
                capacity = exchange_lib.default_send_capacity(self.spec, store_features)
                # The update asks the owners again: rows of an earlier round are not kept.
                keys, rows = (2, 2) if what == records.STEP else (1, 1)
                sent = num_rounds * self._count_sent_bytes(capacity, "float32", keys=keys, rows=rows)
            self._add(what, timing, program="single", sent_bytes=sent, num_rounds=num_rounds)

    def planned(self, wire: str = "float32") -> None:
        """Measures the plan alone, steps without their plans, and pipelined steps; then the wire's limit."""
        if wire in ("float32", BAGS + "float32"):
            plan = Step(self._plan, donates=False, is_compiled=True)
            timing, _ = plan.measure((), self.features, self.protocol)
            call_ms, _ = plan.measure_calls((), self.features, self.protocol)
            timing = dataclasses.replace(timing, call_ms=call_ms)
            sent = self._count_sent_bytes(self.send_capacity, wire, keys=1)
            self._add(records.PLAN, timing, program="plan", wire=wire, sent_bytes=sent)
        self._add_limit(wire)
        for what, step in self.steps.items():
            rows = 2 if what == records.STEP else 1
            num_rounds = self._check_step(what, step, self.plans)
            timing = self._time_step(step, self.plans)
            sent = self._count_sent_bytes(self.send_capacity, wire, rows=rows)
            self._add(what, timing, program="planned", wire=wire, sent_bytes=sent, num_rounds=num_rounds)
            timing, chosen = self._time_pipeline(step)
            sent = self._count_sent_bytes(self.send_capacity, wire, keys=1, rows=rows)
            self._add(what, timing, program="pipelined", wire=wire, sent_bytes=sent, num_rounds=num_rounds, **chosen)

    def bfloat16(self) -> None:
        """Measures planned steps with rows and gradients as bfloat16 on the wire; tables and plans stay the same."""
        exchange = jaxsok.ExchangeSpec(rows="bfloat16", gradients="bfloat16")
        steps = self.steps
        self.steps = _steps_of(fill.collection_of(self.workload, self.optimizer, self.mesh, exchange))
        try:
            self.planned("bfloat16")
        finally:
            self.steps = steps

    def bags(self) -> None:
        """Measures planned steps with partial bags instead of rows, in float32 and bfloat16, on the same tables."""
        before = self.collection, self.steps, self.send_capacity, self.plans
        try:
            for dtype in ("float32", "bfloat16"):
                exchange = jaxsok.ExchangeSpec(rows=dtype, gradients=dtype)
                self.collection = fill.collection_of(self.workload, self.optimizer, self.mesh, exchange, form="bags")
                self.steps = _steps_of(self.collection)
                self._plan_all()
                self.planned(BAGS + dtype)
        finally:
            self.collection, self.steps, self.send_capacity, self.plans = before

    def split(self) -> None:
        """Measures the parts of a planned step as programs of their own, of the same sizes."""
        collection, spec, shards, capacity = self.collection, self.spec, self.collection.shards, self.send_capacity
        route = Route(shards, False, capacity)
        owners = jnp.asarray(collection.partition_owners)
        split = P(AXIS)

        def on_shards(body: Callable, in_specs: Sequence[Any], out_specs: Any = split) -> Callable:
            return lambda *args: shards.run(body, args, in_specs, out_specs)

        def time_part(what: str, body: Callable, sets: Sequence[tuple], sent_bytes: int = 0, state: Any = None) -> None:
            """Times `body(*parts)`, or `body(state, *parts)`, which returns the state and whose state is donated."""
            if state is None:
                run = jax.jit(on_shards(body, (split,) * len(sets[0])))

                step = Step(lambda _, args: _waited_on_cpu(run(*args)), donates=False, is_compiled=True)
                timing, _ = step.measure((), sets, self.protocol)
            else:
                run = on_shards(body, ((split, P()), *(split,) * len(sets[0])), (split, P()))
                step = Step(lambda carry, args: (run(carry, *args), ()), donates=True)
                timing, (store, count) = step.measure(state, sets, self.protocol)
                self.filled.state = dataclasses.replace(self.filled.state, stores=(store,), step=count)
            self._add(what, timing, program="apart", sent_bytes=sent_bytes)

        num_lines = self.num_devices * route.num_sent
        rows = jax.jit(lambda: limits.varied_floats((num_lines, spec.dim)), out_shardings=shards.split)()
        received = [plan.asked[0].received for plan in self.plans]
        features = [features.stores[0] for features in self.features]

        def distinct(part):
            return plan_lib.requests_of(spec, part, owners)[:3]

        def combine(part, slots, answers):
            of_key = jnp.where(slots >= 0, slots.astype(jnp.uint32), jnp.uint32(NO_ROW))
            shapes = [(*layout.embedding_shape, spec.dim) for layout in part.layouts]
            counters = jnp.zeros(len(COUNTERS), jnp.uint32)  # They pass through.
            reading = lookup_kernels.Reading(spec.table_words(), self._seed, part.operands(), part.num_tiles, shapes)
            return lookup_kernels.lookup_planned(counters, reading, of_key, (answers,))[2]

        def transpose(part, slots, gradients):
            _, offsets, weights, words = part.operands()
            flat = [gradients[layout.name] for layout in part.layouts]
            return combine_kernels.combine_transpose(
                flat, slots, (offsets, weights, words), route.num_sent, part.num_tiles
            )

        def owner_lookup(store, requests):
            row_ids = table_lib.find(store, requests[:, :2], requests[:, 2])
            rows = table_lib.gather(spec, store, self._seed, requests, row_ids, is_find=True, dtype="float32")[1]
            return row_ids, rows

        def update(carry, requests, row_ids, sums):
            store, count = carry
            batch, num_tiles = gradients_lib.as_features([requests.shape[0]])
            hyper = spec.optimizer.hyper_operand(count, None)
            row_step = update_kernels.RowStep(
                spec.optimizer.kernel, hyper, ROW_GRADIENTS["sum"], ROUNDINGS[spec.rounding]
            )
            step = update_kernels.Step(
                spec.table_words(),
                self._seed,
                count,
                (requests[:, :2], *batch),
                num_tiles,
                row_ids,
                jnp.ones(1, jnp.bool_),
                row_step,
                requests[:, 2] if spec.dtype != "float32" else None,
            )
            store, _, _ = update_kernels.update(store, step, [sums])
            return store, count + 1

        keys_sent = self._count_sent_bytes(capacity, "float32", keys=1)
        rows_sent = self._count_sent_bytes(capacity, "float32", rows=1)
        time_part(records.DISTINCT, distinct, [(part,) for part in features])
        time_part(records.KEY_EXCHANGE, route.to_owners, [(part,) for part in received], keys_sent)
        store = self.filled.state.stores[0]
        time_part(records.OWNER_LOOKUP, owner_lookup, [(store, part) for part in received])

        def to_askers(part):
            return exchange_lib.send_rows(part, "float32", route.to_askers)

        def to_owners(part):
            return exchange_lib.send_rows(part, "float32", route.to_owners)

        time_part(records.ROW_EXCHANGE, to_askers, [(rows,)], rows_sent)
        slots = [plan.asked[0].slots for plan in self.plans]
        pairs = list(zip(features, slots, strict=True))
        time_part(records.COMBINE, combine, [(*pair, rows) for pair in pairs])
        gradients = self.filled.gradients(self.workload.num_bags)
        time_part(records.TRANSPOSE, transpose, [(*pair, gradients) for pair in pairs])
        time_part(records.GRADIENT_EXCHANGE, to_owners, [(rows,)], rows_sent)
        find = jax.jit(on_shards(lambda *args: owner_lookup(*args)[0], (split, split)))
        row_ids = [find(store, part) for part in received]
        sets = [(part, ids, rows) for part, ids in zip(received, row_ids, strict=True)]
        state, self.filled.state = (store, self.filled.state.step), self.filled.state
        time_part(records.OWNER_UPDATE, update, sets, state=state)

    def dlrm(self) -> None:
        """Measures a whole pipelined step of MLPerf's DLRM: replicated dense parameters, Adagrad, global mean.

        Then the same with lookups ahead, exact and one update stale.
        """
        from benchmarks import dlrm

        collection = self.collection

        def run_next(step, batches, carry):
            batch, plan = next(batches)
            return step(carry, plan, batch["dense"], batch["label"])

        carry = (self.filled.state, *dlrm.init_for(collection, self.workload.dim))
        sent = self._count_sent_bytes(self.send_capacity, "float32", keys=1, rows=2)
        whole = "pipelined" if self.num_devices > 1 else "single"
        for program, ahead in ((whole, LookAhead()), ("exact ahead", LookAhead(1)), ("stale ahead", LookAhead(1, 1))):
            pipeline = Pipeline(Packed(collection), itertools.cycle(self.batches), ahead=ahead, prefetch=0)
            batches = iter(pipeline)
            run = functools.partial(run_next, dlrm.step_of(collection, pipeline.jit), batches)
            for _ in range(2):  # The first step is a program of its own.
                carry, (loss, stats) = run(carry)
            stats.check()
            if not np.isfinite(float(loss)):
                raise RuntimeError(f"{self.workload.name}: the loss of the second step is {float(loss)}.")
            measured = Step(lambda carry, _, run=run: run(carry), donates=True, is_compiled=True)
            timing, carry = measured.measure(carry, [None] * len(self.batches), self.protocol)
            while carry[0].ahead:
                carry, _ = run((collection.drain(carry[0]), *carry[1:]))
            batches.close()
            self._add(records.DLRM, timing, program=program, sent_bytes=sent, **_choices(pipeline))
        self.filled.state = carry[0]

    def pmap(self) -> None:
        """Measures the planned step under `pmap`; it keeps the state, so it comes last.

        `pmap` gives each device its part with an axis of one in front. Where XLA takes that axis away by copying, all
        rows are copied in each step (as it does on CPUs with JAX 0.10): what is measured is that too.
        """
        num, collection = self.num_devices, self.collection
        first = NamedSharding(self.mesh, P(AXIS))

        @functools.partial(jax.jit, out_shardings=first)
        def stack(tree):
            return jax.tree.map(lambda x: x.reshape(num, x.shape[0] // num, *x.shape[1:]), tree)

        @functools.partial(jax.jit, out_shardings=first)
        def stacked_state(state):
            def repeat(x):
                return jnp.broadcast_to(x[None], (num, *x.shape))

            names = ("step", "seed", "partition_owners", "lineage", "num_refused")
            same = {name: repeat(getattr(state, name)) for name in names}
            tickets = stack(state.tickets)
            return dataclasses.replace(state, stores=stack(state.stores), tickets=tickets, **same)

        state = jax.block_until_ready(stacked_state(self.filled.state))
        self.filled.state = None
        inputs = [stack(plan) for plan in self.plans]
        devices = list(self.mesh.devices.flat)
        run = jax.pmap(functools.partial(_step, collection), axis_name=AXIS, devices=devices, donate_argnums=0)
        step = Step(run, donates=True, is_compiled=True)
        state, (_, stats) = step.run(state, inputs[0])
        jax.tree.map(lambda x: x[0], stats).check()
        timing, _ = step.measure(state, inputs, self.protocol)
        sent = self._count_sent_bytes(self.send_capacity, "float32", rows=2)
        self._add(records.STEP, timing, program="planned", front_end="pmap", sent_bytes=sent)

    # What they share ---------------------------------------------------------------------------------------------

    @property
    def _seed(self) -> jax.Array:
        return jnp.zeros(2, jnp.uint32)  # There are no new rows.

    def _plan(self, _, features):
        return self.collection.plan(features, send_capacity=(self.send_capacity,))

    def _features_of_a_shard(self):
        """Returns one shard's part of a batch, as the collection sees it inside `shard_map`: shapes, no arrays."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // self.num_devices, *x.shape[1:]), x.dtype),
            self.features[0].stores[0],
        )

    def _check_step(self, what: str, step: Step, inputs: Sequence[Any]) -> int:
        """Runs one step and checks its counts; returns its number of rounds."""
        self.filled.state, outputs = step.run(self.filled.state, inputs[0])
        if what == records.TRAINING:
            return 1 if self.num_devices > 1 else 0
        stats = outputs[1]
        stats.check()
        missing = int(np.asarray(stats.num_missing).sum() + np.asarray(stats.num_inserted).sum())
        if missing:
            raise RuntimeError(f"{self.workload.name} {what}: {missing} keys had no row after filling.")
        return int(np.asarray(stats.num_rounds).max())

    def _time_step(self, step: Step, inputs: Sequence[Any]) -> Timing:
        timing, self.filled.state = step.measure(self.filled.state, inputs, self.protocol)
        return self._with_calls(step, timing, inputs)

    def _with_calls(self, step: Step, timing: Timing, inputs: Sequence[Any]) -> Timing:
        call_ms, self.filled.state = step.measure_calls(self.filled.state, inputs, self.protocol)
        return dataclasses.replace(timing, call_ms=call_ms)

    def _time_pipeline(self, step: Step) -> tuple[Timing, dict[str, Any]]:
        pipeline = Pipeline(Packed(self.collection), itertools.cycle(self.batches), prefetch=0)
        batches = iter(pipeline)
        program = pipeline.jit(step.function, donate_argnums=0 if step.donates else ())

        def run(state, _):
            _, plan = next(batches)
            return program(state, plan)

        pipelined = Step(run, donates=step.donates, is_compiled=True)
        inputs = [None] * len(self.batches)
        timing, self.filled.state = pipelined.measure(self.filled.state, inputs, self.protocol)
        return self._with_calls(pipelined, timing, inputs), _choices(pipeline)

    def _count_sent_bytes(self, send_capacity: int, wire: str, *, keys: int = 0, rows: int = 0) -> int:
        """Returns the bytes that a device sends to the others: its keys, and for each key its rows, with padding.

        With partial bags it sends a row for each bag instead.
        """
        if wire.startswith(BAGS):
            num_bags = self.workload.num_tables * self.workload.num_bags // self.num_devices
            rows_sent = num_bags * rows * exchange_lib.wire_bytes(self.spec.dim, wire.removeprefix(BAGS))
            return (self.num_devices - 1) * (send_capacity * keys * KEY_BYTES_SENT + rows_sent)
        line = keys * KEY_BYTES_SENT + rows * exchange_lib.wire_bytes(self.spec.dim, wire)
        return (self.num_devices - 1) * send_capacity * line

    def _add_limit(self, wire: str) -> None:
        sent = self._count_sent_bytes(self.send_capacity, wire, keys=1, rows=2)
        timing = wire_limit(self.mesh, sent, self.protocol)
        self._add(records.ALL_TO_ALL, timing, subject="limit", program="alone", wire=wire, sent_bytes=sent)

    def _add(self, what: str, timing: Timing, *, subject: str = "jaxsok", sent_bytes: int = 0, **notes: Any) -> None:
        notes = {"wire": "float32", "front_end": "jit", "send_capacity": self.send_capacity} | notes
        common = self.common | {"notes": self.common["notes"] | notes}
        variant = f"{common['notes']['scaling']} x{self.num_devices} {notes['program']}"
        for name, usual in (("wire", "float32"), ("front_end", "jit")):
            variant += f" {notes[name]}" if notes[name] != usual else ""
        optimizer = self.optimizer if what in (records.STEP, records.DLRM, records.OWNER_UPDATE) else ""
        shown = {"timing": timing, "optimizer": optimizer, "variant": variant, "moved_bytes": sent_bytes}
        self.recorder.add(Record(what=what, subject=subject, **shown, **common))


def _choices(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the capacities that a pipeline chose while it was timed, warm-ups included.

    More than one capacity, or batches planned again and again, are part of its time.
    """
    return {"send_capacities": pipeline.send_capacities[0], "num_replanned": pipeline.num_replanned}


def _steps_of(collection: jaxsok.Collection) -> dict[str, Step]:
    """Returns the three programs that are timed, each for features and for plans."""
    return {
        records.EVALUATION: Step(collection.find, donates=False),
        records.TRAINING: Step(functools.partial(_train, collection), donates=True),
        records.STEP: Step(functools.partial(_step, collection), donates=True),
    }


def _train(collection, state, features):
    embeddings, state, _ = collection.lookup(state, features)
    return state, embeddings


def _step(collection, state, features):
    embeddings, state, plan = collection.lookup(state, features)
    # The gradient of half the sum of squares: as in a model, it exists only after the lookup. With a given gradient
    # nothing orders the gather of a planned step before its update, so XLA copies all rows to be safe.
    state, stats = collection.update(state, plan, embeddings)
    return state, ((), stats)  # embeddings stay in the program, as in a step with a model


def _waited_on_cpu(arrays: Any) -> Any:
    """Waits for arrays on a CPU.

    XLA's CPU back end (jaxlib 0.10.2) locks up when many collectives that do not depend on each other are under way.
    """
    return jax.block_until_ready(arrays) if jax.default_backend() == "cpu" else arrays


def wire_limit(mesh: Mesh, sent_bytes: int, protocol: Protocol) -> Timing:
    """Returns the time of one float32 all-to-all in which each device sends this many bytes to the others."""
    num = mesh.size
    floats = -(-sent_bytes // (limits.FLOAT_BYTES * (num - 1)))
    make = jax.jit(lambda: limits.varied_floats((num * num, floats)), out_shardings=NamedSharding(mesh, P(AXIS)))
    exchange = jax.jit(
        jax.shard_map(
            lambda lines: lax.all_to_all(lines, AXIS, 0, 0, tiled=True), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
        )
    )
    step = Step(lambda _, lines: _waited_on_cpu(exchange(lines)), donates=False, is_compiled=True)
    timing, _ = step.measure((), [make()], protocol)
    return timing


def measure_xla(
    workload: Workload,
    mesh: Mesh,
    key_sets: Sequence[KeySet],
    common: dict[str, Any],
    recorder: Recorder,
    protocol: Protocol,
    label: str,
) -> None:
    """Times the row-sharded `jnp.take` and, with it, `.at[].add` of its row gradients.

    Samples are split as the collection's are: a device asks for the rows of its own. The output is split by samples,
    as a data-parallel model wants it.
    """
    split = NamedSharding(mesh, P(AXIS))
    num_rows = -(-workload.num_tables * workload.num_rows // mesh.size) * mesh.size
    table = jax.jit(lambda: limits.varied_floats((num_rows, workload.dim)), out_shardings=split)()
    row_sets = [
        jax.device_put(key_set.stacked_rows.transpose(1, 0, 2).reshape(-1, workload.hotness), split)
        for key_set in key_sets
    ]
    notes = {"program": "take", "front_end": "jit", "wire": "float32"}
    common = common | {
        "subject": "xla",
        "notes": common["notes"] | notes,
        "variant": f"{common['notes']['scaling']} x{mesh.size} take",
    }
    read = jax.jit(peers.forward, out_shardings=split)
    with recorder.attempt(f"{label} xla forward"):
        forward = Step(read, donates=False, is_compiled=True)
        timing, _ = forward.measure(table, row_sets, protocol)
        recorder.add(Record(what=records.FORWARD, timing=timing, **common))
    shapes = (row_sets[0].shape[0], workload.dim)
    gradients = jax.jit(lambda: limits.varied_floats(shapes), out_shardings=split)()

    @functools.partial(jax.jit, donate_argnums=0)
    def write(table, rows, gradients):
        carry = (table, (), jnp.zeros((), jnp.int32))
        return lax.with_sharding_constraint(peers.update("sgd", carry, (rows, gradients))[0], split)

    def step(table, rows):
        embeddings = read(table, rows)
        return write(table, rows, gradients), embeddings

    with recorder.attempt(f"{label} xla forward + update"):
        timing, _ = Step(step, donates=True, is_compiled=True).measure(table, row_sets, protocol)
        recorder.add(Record(what=records.STEP, timing=timing, optimizer="sgd", **common))
