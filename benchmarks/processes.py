"""M1 with one process for each GPU: the sharded step where every process dispatches for its own device.

Question: what does a step cost when no host feeds several GPUs?
Workload: M1 (26 tables of 2,000,000 rows, 128 floats, 8,192 samples a device, uniform keys), rowwise Adagrad; all keys
          present; gradients are the embeddings.
Limit:    the wire, in `bench_exchange.py`.
Command:  one process a GPU, started together, each with its own number:
          `python -m benchmarks.processes --num-processes 4 --process-id 0 --coordinator localhost:23454` and so on
Last result: docs/performance.md, "Many GPUs".

Wall time of 50 steps, the host waiting after the last; the median of five such batches. *planned*: the step with its
plan ready; *pipelined*: plan and step, as `Collection.pipeline` dispatches them, with batches packed beforehand;
*single*: `lookup(state, features)`, which loops for further rounds.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType

import jaxsok
from jaxsok.pipeline import Pipeline

from .bench_exchange import Packed
from .workloads import MESH_WORKLOADS

NUM_KEY_SETS = 4
STEPS = 50
BATCHES = 5
FILL_SAMPLES = 65_536  # keys per feature and device in a step that fills the tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the processes; process 0 prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__.split("\n")[0])
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--coordinator", required=True, help="address and port of process 0, as localhost:23454")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows and samples")
    parser.add_argument("--repetitions", type=int, default=BATCHES)
    options = parser.parse_args(arguments)
    local = [options.process_id] if jax.config.jax_platforms != "cpu" else None
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id, local_device_ids=local)
    measure(options)
    jax.distributed.shutdown()


def measure(options: argparse.Namespace) -> None:
    """Fills the tables, then times the programs."""
    workload = MESH_WORKLOADS["M1"].scale(options.scale)
    num_local, process = jax.local_device_count(), options.process_id
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    names = [f"t{i}" for i in range(workload.num_tables)]
    optimizer = jaxsok.optim.rowwise_adagrad(0.01)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec(name, workload.dim, optimizer, capacity=workload.num_rows) for name in names],
        [jaxsok.FeatureSpec(name, name) for name in names],
        mesh=mesh,
        axis="data",
    )
    state = collection.init(seed=0)
    fill = jax.jit(lambda state, features: collection.lookup(state, features)[1], donate_argnums=0)
    mine = min(FILL_SAMPLES, workload.num_rows) * num_local
    for begin in range(0, workload.num_rows, mine * options.num_processes):
        ids = np.minimum(np.arange(mine) + begin + process * mine, workload.num_rows - 1)
        state = fill(state, collection.batch(dict.fromkeys(names, ids)).features)
    rng = np.random.default_rng(process)
    num_samples = workload.num_bags * num_local
    batches = [
        collection.batch({name: rng.integers(0, workload.num_rows, num_samples) for name in names})
        for _ in range(NUM_KEY_SETS)
    ]
    pipeline = Pipeline(Packed(collection), itertools.cycle(batches))
    pairs = iter(pipeline)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, embeddings)

    def time_step(name: str, run: Callable[[jaxsok.State, int], tuple]) -> None:
        nonlocal state
        state, _ = run(state, 0)
        state, stats = run(state, 1)
        stats.check()
        times = []
        for _ in range(options.repetitions):
            jax.block_until_ready(state)
            begin = time.perf_counter()
            for i in range(STEPS):
                state, waited = run(state, i)
            jax.block_until_ready((state, waited))
            times.append((time.perf_counter() - begin) / STEPS * 1e3)
        if process == 0:
            rounds = np.asarray(stats.num_rounds).tolist()
            print(f"{name}: {statistics.median(times):.3f} ms (least {min(times):.3f}), rounds {rounds}", flush=True)

    if process == 0:
        rows = sum(collection.num_rows(state).values())
        print(f"{options.num_processes} processes, {jax.device_count()} devices, {rows} rows, {jax.devices()[0]}")
    else:
        collection.num_rows(state)  # It is a collective, so every process calls it.
    time_step("pipelined", lambda state, i: step(state, next(pairs)[1]))
    sizes = tuple(max(sizes) for sizes in pipeline.send_capacities)
    plans = [collection.plan(batch.features, send_capacity=sizes) for batch in batches]
    time_step("planned", lambda state, i: step(state, plans[i % NUM_KEY_SETS]))
    time_step("single", lambda state, i: step(state, batches[i % NUM_KEY_SETS].features))


if __name__ == "__main__":
    main()
