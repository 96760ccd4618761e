"""Steps on a mesh with one process for each GPU, where every process dispatches for its own device.

Question: what does a step cost when no host feeds several GPUs? `--gpus-each 4` asks the same for one that does.
Workload: as in `bench_exchange.py`: M1 (8,192 samples a device), W1 and W5 (their bags shared out); rowwise Adagrad,
          all keys present, gradients are the embeddings.
Limit:    the wire, in `bench_exchange.py`, and the step with its plan ready.
Command:  one process a GPU, started together, each with its own number:
          `python -m benchmarks.processes --num-processes 4 --process-id 0 --coordinator localhost:23454
          --out results.json` and so on; process 0 writes the file, which `benchmarks.report` reads
Last result: docs/results/many_gpus.md, "Four H200s"; fed steps: docs/results/raw_batches.md.

Wall time of 48 steps, the host waiting after the last; the median of the repetitions. All processes take the same
number of steps, so nothing is adapted to the times. *plan*: the plan alone; *planned*: the step with its plan ready;
*pipelined*: plan and step, in one program by `Pipeline.jit`, with batches packed beforehand; *two programs*: the same,
where the pipeline dispatches plans; *stacked*: as *pipelined*, eight steps a call (`steps_per_call`); *fed*: from a
reader's batches, which are packed meanwhile; *forward*: an evaluation lookup with its plan ready, next to that of a
row-sharded `jnp.take`; *DLRM*: the step of `dlrm.py`, pipelined.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxsok
from jaxsok.features import Batch
from jaxsok.pipeline import LookAhead, Pipeline

from . import bench_tiers, dlrm, fill, peers, records, workloads
from .bench_exchange import Packed, default_scaling, mesh_of
from .bench_tiers import PER_CALL
from .limits import varied_floats
from .records import BAGS, PROCESSES, Record, Recorder
from .timing import list_launched, summary

NUM_KEY_SETS = 4
STEPS = 48
CACHE_STEPS = 16
"""Steps of a repetition; with rows in host memory each has keys of its own."""
CACHE_WAYS = {
    "": (LookAhead(), 1),
    ", exact ahead": (LookAhead(1), 1),
    ", stacked": (LookAhead(), PER_CALL),
    ", exact ahead, stacked": (LookAhead(1), PER_CALL),
}
"""Lookups ahead, and the steps of a call, where rows are in host memory."""
REPETITIONS = 7
OPTIMIZER = "rowwise_adagrad"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the processes; process 0 prints and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__.split("\n")[0])
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--coordinator", required=True, help="address and port of process 0, as localhost:23454")
    parser.add_argument("--workloads", default="M1", help="of M1, M1-64, W1 and W5, as in M1,W1:zipf1.05,W5")
    parser.add_argument("--wires", default="float32,bfloat16", help="dtypes of rows and gradients between devices")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows and samples")
    parser.add_argument("--gpus-each", type=int, default=1, help="GPUs of each process")
    parser.add_argument("--cache", type=float, help="rows in host memory, this share of them cached: DLRM alone")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--profile", action="store_true", help="also print the kernels of process 0")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results; default: none")
    parser.add_argument("--commit", help="commit of the code, where there is no repository to ask")
    options = parser.parse_args(arguments)
    first = options.process_id * options.gpus_each
    local = list(range(first, first + options.gpus_each)) if jax.config.jax_platforms != "cpu" else None
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id, local_device_ids=local)
    shown = {"processes": options.num_processes, "workloads": options.workloads, "wires": options.wires}
    shown |= {"scale": options.scale, "repetitions": options.repetitions, "quick": False, "parts": ["exchange"]}
    recorder = Recorder(options.out, records.describe(shown, options.commit)) if options.process_id == 0 else None
    for asked in options.workloads.split(","):
        name, _, distribution = asked.partition(":")
        measured = Measured(name, distribution or "uniform", options, recorder)
        if options.cache is None:
            measured.measure(options.wires.split(","))
        else:
            measured.measure_cache(options.cache)
        if recorder is not None:
            recorder.write()
    jax.distributed.shutdown()


class Measured:
    """One workload on the devices of all processes, its tables filled, this process's samples packed."""

    def __init__(self, name: str, distribution: str, options: argparse.Namespace, recorder: Recorder | None):
        """Fills the tables and draws the keys; `recorder` is that of process 0."""
        whole = workloads.on_mesh(name).scale(options.scale)
        self.workload = whole.on_devices(jax.device_count(), default_scaling(name))
        self.distribution, self.options, self.recorder = distribution, options, recorder
        self.mesh, num_key_sets = mesh_of(jax.device_count()), NUM_KEY_SETS
        self.memory, self.wire = None, "float32"
        if options.cache is not None:
            self.workload = dataclasses.replace(self.workload, num_rows=bench_tiers.NUM_ROWS).scale(options.scale)
            self.memory = jaxsok.HostMemory(device_rows=options.cache)
            num_key_sets = CACHE_STEPS * (options.repetitions + 2) * len(CACHE_WAYS)
        self.filled = fill.fill_tables(self.workload, OPTIMIZER, self.mesh, memory=self.memory)
        drawn = workloads.draw_batches(self.workload, distribution, num_key_sets, seed=0)
        mine = self.workload.num_bags // options.num_processes
        self.ids = [ids[:, options.process_id * mine : (options.process_id + 1) * mine] for ids in drawn]

    def measure(self, wires: Sequence[str]) -> None:
        """Times the programs for each dtype on the wire; for M1 also DLRM, and a forward by XLA alone."""
        forms = ("rows",) if self.workload.hotness == 1 else ("rows", "bags")
        for form, wire in itertools.product(forms, wires):
            if (form, wire) == ("rows", "bfloat16") and len(forms) > 1:
                continue  # rows of bags of several keys are there to compare
            self.wire = (BAGS if form == "bags" else "") + wire
            exchange = jaxsok.ExchangeSpec(rows=wire, gradients=wire)
            collection = fill.collection_of(self.workload, OPTIMIZER, self.mesh, exchange, form=form)
            self.measure_steps(collection)
        self.wire = "float32"
        if self.workload.name.startswith("M1"):
            self.measure_dlrm(fill.collection_of(self.workload, OPTIMIZER, self.mesh))
            self.measure_take()

    def measure_steps(self, collection: jaxsok.Collection) -> None:
        """Times plan, step and forward of a collection; also steps whose batches are packed as they go."""
        raws = [fill.raw_of(collection, self.workload, ids) for ids in self.ids]
        batches = [collection.batch(raw) for raw in raws]

        def train(state: jaxsok.State, features: Any) -> tuple[jaxsok.State, jaxsok.Stats]:
            embeddings, state, plan = collection.lookup(state, features)
            return collection.update(state, plan, embeddings)

        def call(state: jaxsok.State, plans: Any) -> tuple[jaxsok.State, jaxsok.Stats]:
            return lax.scan(train, state, plans)

        def time_pipeline(program: str, pipeline: Pipeline, jit: Callable, per_call: int = 1) -> None:
            pairs, step = iter(pipeline), jit(train if per_call == 1 else call, donate_argnums=0)
            self.time(records.STEP, program, step, lambda _: next(pairs)[1], per_call=per_call)
            pairs.close()

        for program in ("pipelined", "two programs"):
            pipeline = Pipeline(Packed(collection), itertools.cycle(batches), prefetch=0)
            time_pipeline(program, pipeline, pipeline.jit if program == "pipelined" else jax.jit)
        stacked = Pipeline(Packed(collection), itertools.cycle(batches), prefetch=0, steps_per_call=PER_CALL)
        time_pipeline("stacked", stacked, stacked.jit, PER_CALL)
        if self.wire.endswith("float32"):
            for per_call, prefetch in itertools.product((1, PER_CALL), (0, 2)):
                fed = collection.pipeline(itertools.cycle(raws), prefetch=prefetch, steps_per_call=per_call)
                name = "fed" if per_call == 1 else "fed, stacked"
                time_pipeline(f"{name}, prefetch={prefetch}", fed, fed.jit, per_call)
        step, forward = jax.jit(train, donate_argnums=0), jax.jit(collection.find)
        sizes = tuple(max(sizes) for sizes in pipeline.send_capacities)
        plans = [collection.plan(batch.features, send_capacity=sizes) for batch in batches]
        self.time(records.STEP, "planned", step, lambda i: plans[i % NUM_KEY_SETS])
        self.time_reads(records.PLAN, "plan", lambda i: collection.plan(batches[i].features, send_capacity=sizes))
        self.time_reads(records.EVALUATION, "planned", lambda i: forward(self.filled.state, plans[i])[0])

    def measure_dlrm(self, collection: jaxsok.Collection) -> None:
        """Times the step of MLPerf's DLRM: alone, with an exact lookup ahead, and with one that is an update stale."""
        batches = itertools.cycle(self.dlrm_batches(collection))
        programs = {"pipelined": (LookAhead(), 1), "stacked": (LookAhead(), PER_CALL)}
        programs |= {"exact ahead": (LookAhead(1), 1), "stale ahead": (LookAhead(1, 1), 1)}
        self.time_dlrm(collection, programs, lambda: batches, STEPS)

    def measure_cache(self, share: float) -> None:
        """Times the same with rows in host memory, on batches with keys of their own."""
        collection = fill.collection_of(self.workload, OPTIMIZER, self.mesh, memory=self.memory)
        batches = iter(self.dlrm_batches(collection))
        programs = {f"{share:.0%} cached{name}": way for name, way in CACHE_WAYS.items()}
        num_each = len(self.ids) // len(programs)
        self.time_dlrm(collection, programs, lambda: itertools.islice(batches, num_each), CACHE_STEPS)

    def dlrm_batches(self, collection: jaxsok.Collection) -> list[Batch]:
        """Packs this process's samples, with dense numbers and labels."""
        rng = np.random.default_rng(self.options.process_id)
        num_samples = self.ids[0].shape[1]
        rest = {
            "dense": rng.random((num_samples, dlrm.NUM_DENSE), np.float32),
            "label": rng.integers(0, 2, num_samples).astype(np.float32),
        }
        return [collection.batch(fill.raw_of(collection, self.workload, ids) | rest) for ids in self.ids]

    def time_dlrm(
        self,
        collection: jaxsok.Collection,
        programs: Mapping[str, tuple[LookAhead, int]],
        batches_of: Callable[[], Iterable[Batch]],
        steps: int,
    ) -> None:
        """Times the step of MLPerf's DLRM in each program: its lookups ahead, and the steps of a call."""
        dense_part = dlrm.init_for(collection, self.workload.dim)
        for program, (ahead, per_call) in programs.items():
            pipeline = Pipeline(Packed(collection), batches_of(), ahead=ahead, prefetch=0, steps_per_call=per_call)
            make = dlrm.step_of if per_call == 1 else dlrm.call_of
            pairs, step = iter(pipeline), make(collection, pipeline.jit)

            def run(state: jaxsok.State, pair: Any, step: Callable = step) -> tuple[jaxsok.State, jaxsok.Stats]:
                nonlocal dense_part
                batch, plan = pair
                (state, *dense_part), (_, stats) = step((state, *dense_part), plan, batch["dense"], batch["label"])
                return state, stats

            self.time(records.DLRM, program, run, lambda _, pairs=pairs: next(pairs), steps, per_call)
            while self.filled.state.ahead:
                self.filled.state, _ = run(collection.drain(self.filled.state), next(pairs))

    def measure_take(self) -> None:
        """Times a forward of the table that a user of JAX writes today: `jnp.take` of an array split by its rows."""
        split = NamedSharding(self.mesh, P(fill.AXIS))
        num_rows = -(-self.workload.num_tables * self.workload.num_rows // self.mesh.size) * self.mesh.size
        shape = (num_rows, self.workload.dim)
        table = jax.jit(lambda: varied_floats(shape), out_shardings=split)()
        base = np.arange(self.workload.num_tables, dtype=np.int32) * self.workload.num_rows
        rows = [
            jax.make_array_from_process_local_data(split, (ids + base[:, None, None]).reshape(-1, ids.shape[-1]))
            for ids in self.ids
        ]
        read = jax.jit(peers.forward, out_shardings=split)
        self.time_reads(records.FORWARD, "take", lambda i: read(table, rows[i]), subject="xla")

    def time(
        self,
        what: str,
        program: str,
        step: Callable[..., tuple],
        plan_of: Callable[[int], Any],
        steps: int = STEPS,
        per_call: int = 1,
    ) -> None:
        """Times steps, which donate the state; prints the kernels of one if asked."""

        def run(count: int) -> None:
            state, stats = self.filled.state, None
            for i in range(count // per_call):
                state, stats = step(state, plan_of(i))
            self.filled.state = state
            jax.block_until_ready((state, stats))
            assert stats is not None
            self.stats = stats

        self._time(what, program, run, steps=steps, optimizer=OPTIMIZER)
        self.stats.check()

    def time_reads(self, what: str, program: str, run_one: Callable[[int], Any], subject: str = "jaxsok") -> None:
        """Times calls that change nothing."""

        def run(count: int) -> None:
            results = None
            for i in range(count):
                results = run_one(i % NUM_KEY_SETS)
            jax.block_until_ready(results)

        self._time(what, program, run, subject=subject)

    def _time(
        self,
        what: str,
        program: str,
        run: Callable[[int], None],
        steps: int = STEPS,
        subject: str = "jaxsok",
        **more: Any,
    ) -> None:
        run(3 * PER_CALL if steps == STEPS else 2 * steps)  # the latter also fill caches
        times = []
        for _ in range(self.options.repetitions):
            begin = time.perf_counter()
            run(steps)
            times.append((time.perf_counter() - begin) / steps * 1e3)
        # Every process runs the steps of the profile, since all of them meet in each.
        launched = list_launched(functools.partial(run, PER_CALL), PER_CALL) if self.options.profile else {}
        if self.recorder is None:
            return
        workload, scaling = self.workload, default_scaling(self.workload.name)
        num_rows = workload.num_tables * workload.num_rows
        notes = {"scaling": scaling, "num_samples": workload.num_bags, "num_rows": num_rows}
        front_end = PROCESSES if self.options.num_processes > 1 else "jit"
        notes |= {"program": program, "wire": self.wire, "front_end": front_end, "least_ms": min(times)}
        self.recorder.add(
            Record(
                workload.name,
                what,
                subject,
                summary(times, steps),
                distribution=self.distribution,
                variant=f"{scaling} x{self.mesh.size} {program} {self.wire}",
                num_keys=workload.num_keys,
                num_devices=self.mesh.size,
                notes=notes,
                **more,
            )
        )
        for kernel, (count, ms) in itertools.islice(launched.items(), 24):
            self.recorder.say(f"    {ms * 1e3:8.1f} us {count:6.1f} x {kernel[:90]}")


if __name__ == "__main__":
    main()
