"""A worker process of a training run; test_processes.py starts it: `process_worker.py <jobs> <folder>`.

The place of the process among the others comes from the environment: PORT, NUM_PROCESSES, PROCESS_ID and NUM_DEVICES
(of this process). Results go to `<folder>/<process>.npz`, errors to standard error.
"""

import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jaxsok
from jaxsok import enlarge, processes
from jaxsok.types import COUNTERS

NUM_SHARDS, NUM_SAMPLES, NUM_STEPS, DIM = 4, 32, 5, 4
KILLED_IN_STEP = 2
HEARTBEAT_S = 10
ADAGRAD, ADAM = jaxsok.optim.adagrad(0.1), jaxsok.optim.adam(0.05)
WIRES = {
    "float32": jaxsok.ExchangeSpec(),
    "narrow": jaxsok.ExchangeSpec(rows="bfloat16", gradients="float8_e4m3fn"),
}
# The capacity suffices for a first step only: the first store grows in training, and each growth recompiles the step.
TABLES = (
    jaxsok.TableSpec("user", DIM, ADAM, row_gradient="mean", capacity=256),
    jaxsok.TableSpec("item", DIM, ADAM, row_gradient="mean", capacity=96, placement=jaxsok.on(3)),
    jaxsok.TableSpec("ad", DIM, ADAGRAD, capacity=128, placement=jaxsok.REPLICATED),
)
FEATURES = (
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("item", "item", combiner="mean", max_keys=3 * NUM_SAMPLES, exchange="bags"),
    jaxsok.FeatureSpec("ad", "ad"),
)


def raw_batch(step, process=0, num_processes=1):
    """Returns one process's part of a step's batch: the samples of `process` among all."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4, NUM_SAMPLES)
    keys = rng.integers(0, 60, int(lengths.sum()))
    user, ad = rng.integers(0, 1000, NUM_SAMPLES), rng.integers(-1, 40, NUM_SAMPLES)
    label = rng.normal(size=NUM_SAMPLES).astype(np.float32)
    first, last = (NUM_SAMPLES * number // num_processes for number in (process, process + 1))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return {
        "user": user[first:last],
        "item": jaxsok.Bags(keys[offsets[first] : offsets[last]], lengths=lengths[first:last]),
        "ad": ad[first:last],
        "label": label[first:last],
    }


def train_step(collection):
    """Returns a jitted step on a global mean."""

    def loss_of(embeddings, label):
        score = sum(jnp.tanh(embedding).sum(axis=1) for embedding in embeddings.values())
        return jnp.mean((score - label) ** 2)

    def step(state, asked, label):
        embeddings, state, plan = collection.lookup(state, asked)
        loss, gradients = jax.value_and_grad(loss_of)(embeddings, label)
        state, stats = collection.update(state, plan, gradients)
        return state, loss, stats

    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def train_stacked(collection, process, num_processes):
    """Does the same as `train` with three steps a call."""
    state, step, results = collection.init(seed=4), train_step(collection).__wrapped__, []
    raws = (raw_batch(number, process, num_processes) for number in range(NUM_STEPS))
    pipeline = collection.pipeline(raws, steps_per_call=3)

    def scanned(state, inputs):
        state, loss, stats = step(state, *inputs)
        return state, (loss, stats)

    call = pipeline.jit(lambda *args: jax.lax.scan(scanned, *args), donate_argnums=0)
    for batch, plans in pipeline:
        state, (losses, stats) = call(collection.grow(state, batch), (plans, batch["label"]))
        stats.check()
        inserted = np.asarray(stats.num_inserted).tolist()
        results += zip(np.asarray(losses).tolist(), inserted, strict=True)
    return state, results


def train(collection, process=0, num_processes=1, *, in_step=lambda step: None, lookahead=0):
    """Trains some steps with growth through the pipeline; returns state, losses and counts."""
    state, step, results = collection.init(seed=4), train_step(collection), []
    raws = (raw_batch(number, process, num_processes) for number in range(NUM_STEPS))
    for number, (batch, plan) in enumerate(collection.pipeline(raws, lookahead=lookahead)):
        in_step(number)
        state = collection.grow(state)
        state, loss, stats = step(state, plan, batch["label"])
        stats.check()
        results.append((float(loss), [int(rows) for rows in np.asarray(stats.num_inserted)]))
    return state, results


def operate(collection):
    """Imports with growth, assigns, clears and reads, with the same calls in all processes; returns state and reads."""
    state, read = collection.init(seed=6), {}
    rng = np.random.default_rng(8)
    for table in TABLES:
        chunks = []
        for size in (700, 1, 90):
            keys = np.unique(rng.integers(0, 2**63, size, np.uint64))
            rows = rng.normal(size=(len(keys), DIM)).astype(np.float32)
            names = [state_spec.name for state_spec in table.optimizer.state_specs(DIM)]
            chunks.append(jaxsok.Records(keys, rows, {name: rows + 1 for name in names}))
        state = collection.import_table(state, table.name, chunks)
        asked = np.concatenate([chunks[0].keys[::9], rng.integers(0, 2**63, 9, np.uint64)])
        state, inserted, refused = collection.assign(
            state, table.name, asked[9:], np.arange(DIM * (len(asked) - 9)).reshape(-1, DIM).astype(np.float32)
        )
        rows, is_there = collection.rows_of(state, table.name, asked)
        also = collection.contains(state, table.name, asked)
        read[table.name] = [np.asarray(array) for array in (inserted, refused, rows, is_there, also)]
    state, num_erased = collection.clear(state, "item")
    read["num_erased"] = [np.asarray(num_erased)]
    return state, read


def export_tables(collection, state):
    """Returns the same as `local_tables`, from the stream of records."""
    columns = {}
    for table in TABLES:
        chunks = list(collection.export_chunks(state, table.name, chunk_rows=100))
        for name in ("keys", "rows"):
            columns[f"exported.{table.name}.{name}"] = np.concatenate(
                [np.zeros((0, *(DIM,) * (name == "rows")))] * (not chunks) + [getattr(chunk, name) for chunk in chunks]
            )
    return columns


def local_tables(collection, state):
    """Returns this process's records: {"<table>.<column>": array}, replicated tables from its first shard."""
    columns = {}
    for spec, store in zip(collection.stores, state.stores, strict=True):
        names = [state_spec.name for state_spec in spec.state_specs]
        slabs = {"records": store.records, "rows": store.rows, **dict(zip(names, store.states, strict=True))}
        num_local = len(store.counters.addressable_shards)
        for place in range(1 if spec.is_replicated else num_local):
            parts = {
                name: np.concatenate([np.asarray(parts_of(array)[place]) for array in arrays])
                for name, arrays in slabs.items()
            }
            records = parts.pop("records")
            parts["keys"] = records[:, 0].astype(np.uint64) | records[:, 1].astype(np.uint64) << np.uint64(32)
            for number, table in enumerate(spec.tables):
                is_used = (records[:, 2] == number) & (parts["keys"] != np.uint64(jaxsok.PADDING_KEY))
                for name, values in parts.items():
                    columns.setdefault(f"{table.name}.{name}", []).append(values[is_used])
    return {name: np.concatenate(values) for name, values in columns.items()}


def salts_of(state):
    """Returns the salt words of each store on each shard of this process."""
    words = [COUNTERS.index("salt_low"), COUNTERS.index("salt_high")]
    return [[np.asarray(part)[words] for part in parts_of(store.counters)] for store in state.stores]


def parts_of(array):
    """Returns the parts of an array that this process has, shard by shard."""
    return [part.data for part in sorted(array.addressable_shards, key=lambda part: part.index[0].start or 0)]


def main(jobs, folder):
    """Joins the other processes, runs each job and writes its results; several jobs get a folder each."""
    number, num_processes = int(os.environ["PROCESS_ID"]), int(os.environ["NUM_PROCESSES"])
    jax.config.update("jax_num_cpu_devices", int(os.environ["NUM_DEVICES"]))
    jax.distributed.initialize(
        f"localhost:{os.environ['PORT']}",
        num_processes=num_processes,
        process_id=number,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=HEARTBEAT_S,
    )
    names = jobs.split(",")
    for job in names:
        do_job(job, number, num_processes, pathlib.Path(folder, job if len(names) > 1 else ""))


def other_meshes(number, folder):
    """Saves and restores over meshes of each process's own devices, and over one with an axis that is not named.

    Also freezes, and evicts with a `hand_over` that fails in the second process, over a mesh of all.
    """
    from jaxsok import checkpoint, policies, serving

    found = {}

    def train(collection, state, keys):
        batch = collection.batch({"user": keys})
        return collection.lookup(collection.grow(state, batch), batch.features)[1]

    def content(collection, state):
        keys = np.arange(100)
        return collection.num_rows(state)["user"], np.asarray(collection.rows_of(state, "user", keys)[0]).tobytes()

    def collection_over(devices, names):
        mesh = jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        table = jaxsok.TableSpec("user", DIM, ADAGRAD, capacity=64, statistics=True)
        return jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")], mesh=mesh, axis="data")

    own = collection_over(np.array(jax.local_devices()), ("data",))
    repeated = collection_over(np.array(jax.devices()).reshape(2, -1), ("model", "data"))
    for name, collection, of_process in (("own", own, 20 * number), ("repeated", repeated, 0)):
        state = train(collection, collection.init(seed=0), of_process + np.arange(40))
        full = checkpoint.export_full(folder / f"{name}-full", collection, state)
        state = train(collection, state, of_process + np.arange(50))
        delta = checkpoint.export_delta(folder / f"{name}-delta", collection, state, base=full)
        found[name] = [str(content(collection, checkpoint.load(delta.path, collection)) == content(collection, state))]
        found[f"{name} rows"] = [str(collection.num_rows(checkpoint.load(full.path, collection))["user"])]

    whole = collection_over(np.array(jax.devices()), ("data",))
    state = train(whole, whole.init(seed=0), number * 20 + np.arange(20))
    before = content(whole, state)
    alone = jaxsok.Collection(whole.tables, whole.features)
    frozen = serving.freeze(alone, train(alone, alone.init(seed=0), np.arange(9)))
    (held_by,) = frozen.stores[0].rows.devices()
    found["frozen here"] = [str(held_by == jax.local_devices()[0])]
    found["freeze"] = outcome_of(lambda: serving.freeze(whole, state, device=jax.local_devices()[0]))

    def hand_over(name, records):
        if number == 1:
            raise OSError(28, "No space left on device")

    lru = policies.LeastRecentlyUsed()
    found["evict"] = outcome_of(lambda: whole.evict(state, "user", policy=lru, num_rows=10, hand_over=hand_over))
    found["unchanged"] = [str(content(whole, state) == before)]
    np.savez(folder / f"{number}.npz", **{name: np.array(words) for name, words in found.items()})


def do_job(job, number, num_processes, folder):
    """Runs one job and writes its results to the folder."""
    axis_type = AxisType.Explicit if job in ("operations", "evict") else AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(axis_type,))
    if job == "refusals":
        refusals(mesh, number, folder)
        return
    if job == "operations":
        collection = jaxsok.Collection(TABLES, FEATURES, mesh=mesh, axis="data")
        state, read = operate(collection)
        read = {f"read.{name}.{i}": value for name, values in read.items() for i, value in enumerate(values)}
        parts = {**local_tables(collection, state), **export_tables(collection, state)}
        np.savez(folder / f"{number}.npz", **read, **parts)
        return
    if job == "errors":
        errors_of_one(mesh, number, folder)
        return
    if job == "other meshes":
        other_meshes(number, folder)
        return
    if job.startswith("uneven"):
        uneven(mesh, job, number)
        return
    if job == "host memory":
        host_memory(mesh, number, num_processes, folder)
        return
    if job == "evict":
        evict_by_need(mesh, number, num_processes, folder)
        return
    wire = WIRES["narrow" if job == "train narrow" else "float32"]
    collection = jaxsok.Collection(TABLES, FEATURES, mesh=mesh, axis="data", exchange=wire)

    def in_step(step):
        if job == "killed" and number == 1 and step == KILLED_IN_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    if job == "train stacked":
        state, results = train_stacked(collection, number, num_processes)
    else:
        state, results = train(collection, number, num_processes, in_step=in_step, lookahead=int(job == "train ahead"))
    losses, inserted = zip(*results, strict=True)
    capacities = [store.capacity for store in state.stores]
    num_rows = collection.num_rows(state)
    np.savez(
        folder / f"{number}.npz",
        losses=losses,
        inserted=inserted,
        capacities=capacities,
        num_grown=collection.growth.num_grown,
        num_rows=[num_rows[table.name] for table in TABLES],
        salts=salts_of(state),
        **local_tables(collection, state),
        salts_after_rebuild=salts_of(enlarge.resalt_index(collection.stores, state, 0, collection.shards)),
    )


def uneven(mesh, job, number):
    """Trains on batches of which the second process has fewer, or one that is smaller there."""

    processes.POLL_S, processes.END_POLLS = 1, 3
    collection = jaxsok.Collection(TABLES[:1], FEATURES[:1], mesh=mesh, axis="data")

    def train_on(state, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        return collection.update(state, plan, embeddings)[0]

    def train_on_all(state, plans):
        return jax.lax.scan(lambda state, plan: (train_on(state, plan), None), state, plans)[0]

    num_at_once = 3 if job.startswith("uneven calls") else 1
    step = jax.jit(train_on if num_at_once == 1 else train_on_all, donate_argnums=0)
    state, sizes = collection.init(seed=0), [8] * (5 if num_at_once > 1 else 4)
    if number == 1:
        sizes = {
            "uneven batches": sizes[:3],
            "uneven calls": sizes[:4],
            "uneven calls and a failure": sizes[:4],
            "uneven failure alone": sizes[:2],
            "uneven samples": [*sizes[:3], 4],
        }.get(job, sizes)
    if job == "uneven later":
        sizes = [8, 4, 8 >> number, 8]

    def read():
        for size in sizes:
            yield {"user": np.arange(size)}
        if "failure" in job and number == 1:
            raise OSError("cannot be read")

    num_steps = 0
    try:
        for _, plan in collection.pipeline(read(), steps_per_call=num_at_once):
            state = step(state, plan)
            num_steps += 1
    finally:
        print("steps:", num_steps, file=sys.stderr, flush=True)


def evicting(mesh):
    """Returns a sharded and a replicated table that fill up soon and evict their least recently used rows."""
    lru = {"capacity": 96, "max_capacity": 96, "eviction": jaxsok.policies.LeastRecentlyUsed()}
    tables = [
        jaxsok.TableSpec("user", DIM, ADAGRAD, **lru),
        jaxsok.TableSpec("ad", DIM, ADAGRAD, placement=jaxsok.REPLICATED, **lru),
    ]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(t.name, t.name) for t in tables], mesh=mesh, axis="data")


def evict_by_name(collection, process=0, num_processes=1, late=0):
    """Brings new keys into full stores, then evicts by name; returns the state and the evicted records."""
    state, handed = collection.init(seed=0), {"user": [], "ad": []}

    def hand_over(name, records):
        handed[name] += records.keys.tolist()

    lookup = jax.jit(collection.lookup, donate_argnums=0)
    for step in range(9):
        keys = np.random.default_rng(step).integers(0, 30, 16) + 20 * step
        mine = np.split(keys, num_processes)[process]
        features = collection.batch({"user": mine, "ad": mine + 7}).features
        state = collection.grow(state, features, clock=step + late, hand_over=hand_over)
        _, state, _ = lookup(state, features)
    state, gone = collection.evict(state, "user", num_rows=30, clock=9, hand_over=hand_over)
    return state, gone, handed


def evict_by_need(mesh, number, num_processes, folder):
    """Returns the records that each process received, and those that its shards still have."""
    collection = evicting(mesh)
    state, gone, handed = evict_by_name(collection, number, num_processes)
    np.savez(
        pathlib.Path(folder) / f"{number}.npz",
        gone=np.asarray(gone.num_evicted),
        **{f"handed.{name}": np.array(keys, np.uint64) for name, keys in handed.items()},
        **local_tables(collection, state),
    )


def outcome_of(call):
    """Calls a function; returns the error that it raised, as text, and the seconds that it took."""
    began = time.monotonic()
    try:
        call()
        message = "nothing raised"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return [message, f"{time.monotonic() - began}"]


def errors_of_saves(collection, state, number, folder, full_disk):
    """Runs saves of Orbax that fail in one process; returns their errors and seconds, and the steps kept."""
    from unittest import mock

    import orbax.checkpoint as ocp

    from jaxsok import checkpoint
    from jaxsok.checkpoint import save as save_lib

    found = {}
    for kind, checkpointer in (("async", ocp.AsyncCheckpointer), ("sync", ocp.Checkpointer)):

        def save(case, kind=kind, checkpointer=checkpointer, compression="none", clock=None):
            arguments = checkpoint.TablesSave(collection, state, compression=compression, clock=clock)
            with checkpointer(checkpoint.TablesCheckpointHandler()) as saver:
                saver.save(folder / f"{kind} {case}", args=arguments)
                if kind == "async":
                    saver.wait_until_finished()

        for case, process in (("write_part", 1), ("join_parts", 0)):
            with full_disk(case, process):
                found[f"{kind}: {case}"] = outcome_of(functools.partial(save, case))
        found[f"{kind}: refused"] = outcome_of(functools.partial(save, "refused", compression=["none", "zip"][number]))
        found[f"{kind}: clocks"] = outcome_of(functools.partial(save, "clocks", clock=number))
        found[f"{kind}: elsewhere"] = outcome_of(functools.partial(save, f"elsewhere {number}"))
    with ocp.CheckpointManager(folder / "managed") as manager:

        def save_managed(step, copy=None, **options):
            with mock.patch.object(save_lib, "pieces", copy or save_lib.pieces):
                arguments = checkpoint.TablesSave(collection, state, **options)
                manager.save(step, args=ocp.args.Composite(tables=arguments))
            manager.wait_until_finished()

        no_memory = mock.Mock(side_effect=MemoryError("no memory for a piece"))
        found["manager: refused"] = outcome_of(functools.partial(save_managed, 1, compression=["none", "zip"][number]))
        found["manager: copy"] = outcome_of(functools.partial(save_managed, 2, [None, no_memory][number]))
        save_managed(3)
        found["managed"] = manager.all_steps()
    return found


def errors_of_one(mesh, number, folder):
    """Runs exports, loads and checkpoints that fail in one process; returns every process's error and its seconds."""
    import shutil
    from unittest import mock

    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    from jaxsok import checkpoint
    from jaxsok.checkpoint import manifest

    tables = [
        jaxsok.TableSpec(name, DIM, ADAGRAD, capacity=64, statistics=True, **placement)
        for name, placement in (("user", {}), ("ad", {"placement": jaxsok.REPLICATED}))
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    collection = jaxsok.Collection(tables, features, mesh=mesh, axis="data")
    step = jax.jit(lambda state, asked: collection.lookup(state, asked)[1], donate_argnums=0)
    found, wait = {}, multihost_utils.sync_global_devices

    def run_step(state, keys):
        mine = np.split(keys, 2)[number]
        return step(state, collection.batch({"user": mine, "ad": mine}).features)

    def note(name, call):
        found[name] = outcome_of(call)

    def rows_of(state):
        return [np.asarray(collection.rows_of(state, table.name, np.arange(40))[0]).tobytes() for table in tables]

    def full_disk(name="write_part", process=1):
        """Raises an error in one process."""
        no_space = OSError(28, "No space left on device")
        return mock.patch.object(manifest, name, side_effect=no_space if number == process else getattr(manifest, name))

    def damage(path):
        """Returns the path; in process 1, that of a copy whose rows have a changed byte."""
        if number == 0:
            return path
        copy = path.with_name(f"{path.name}.damaged")
        shutil.copytree(path, copy, dirs_exist_ok=True)
        file = copy / "table_0000.process_00001.arrow"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return copy

    state = run_step(collection.init(seed=3), np.arange(20))
    for name, process in (("write_part", 1), ("join_parts", 0)):
        with full_disk(name, process):
            note(f"export: {name}", lambda: checkpoint.export_full(folder / "failed", collection, state))
    (folder / "file").write_bytes(b"")
    note("export: folder", lambda: checkpoint.export_full(folder / "file" / "failed", collection, state))
    wait("exported")
    found["left"] = [sorted(path.name for path in folder.glob("failed*"))]
    checkpoint.export_full(folder / "full", collection, state)
    state = run_step(state, np.arange(10, 30))
    delta = folder / "delta"
    nowhere = [folder / "full", folder / "nowhere"][number]
    broken = damage(folder / "full")
    wait("damaged")
    # Rows went since the base: so all processes search its keys for those that are gone.
    state, _ = collection.erase(state, "user", np.arange(3, dtype=np.int64))
    note("delta: base", lambda: checkpoint.export_delta(delta, collection, state, broken))
    note("delta: nowhere", lambda: checkpoint.export_delta(delta, collection, state, nowhere))
    checkpoint.export_delta(delta, collection, state, folder / "full")
    note("load: rows", lambda: checkpoint.load(broken, collection))
    note("load: nowhere", lambda: checkpoint.load(nowhere, collection))
    note("export: taken", lambda: checkpoint.export_full(delta, collection, state))
    timed = collection.assign(collection.init(seed=1), "user", np.arange(3), np.ones((3, DIM)), clock=1000)[0]
    for name, clocks in (("earlier", (1000, 999)), ("clocks", (1001, 1002))):
        to = functools.partial(checkpoint.export_full, folder / name, collection, timed, clock=clocks[number])
        note(f"export: {name}", to)
    # Equal rows, so nothing but the names of the exports differs.
    checkpoint.export_full(folder / "twin", collection, state)
    other = [delta, folder / "twin"][number]
    note("delta: bases", lambda: checkpoint.export_delta(folder / "mixed", collection, state, other))
    note("load: other", lambda: checkpoint.load([[folder / "full", delta], folder / "twin"][number], collection))
    checkpoint.export_delta(folder / "second", collection, state, folder / "full")
    base, link = checkpoint.load(folder / "full", collection), [delta, folder / "second"][number]
    note("apply: other", lambda: checkpoint.apply_delta(link, collection, base, after=folder / "full"))
    note("evict", lambda: collection.evict(state, "user", jaxsok.policies.LeastRecentlyUsed(), num_rows=7 + number))
    grown = collection.grow(collection.init(seed=2), 1000 * (1 + number))
    # An address of its own in each process makes no difference.
    lowest = jaxsok.policies.LowestScore(lambda facts: facts.last_step)
    evicted = collection.evict(jax.tree.map(jnp.copy, state), "user", lowest, num_rows=7)[1]
    found["left in user"] = [int(multihost_utils.process_allgather(evicted.num_evicted, tiled=True)[0])]
    found["grown"] = [store.capacity for store in grown.stores]
    note("export: elsewhere", lambda: checkpoint.export_full([folder / "new", delta][number], collection, state))
    before = rows_of(state)
    note("load: live", lambda: checkpoint.load(broken, collection, state=state))
    broken_delta = damage(delta)
    loaded = checkpoint.load(folder / "full", collection)
    note("apply", lambda: checkpoint.apply_delta(broken_delta, collection, loaded, after=folder / "full"))
    found["unchanged"] = [str(rows_of(state) == before)]
    found |= errors_of_saves(collection, state, number, folder, full_disk)
    items = folder / "items"
    ocp.Checkpointer(checkpoint.TablesCheckpointHandler()).save(items, args=checkpoint.TablesSave(collection, state))
    broken = damage(items)
    handler = checkpoint.TablesCheckpointHandler()
    note("restore", lambda: handler.restore(broken, checkpoint.TablesRestore(collection)))
    lines = checkpoint.TablesRestore(collection, state=state, tables=["user"], clock=7 * number)
    note("restore: other", lambda: handler.restore(items, lines))
    # All processes are still in step.
    again = checkpoint.load(delta, collection)
    found["again"] = [
        str(rows_of(again) == rows_of(state) == rows_of(handler.restore(items, checkpoint.TablesRestore(collection))))
    ]
    np.savez(folder / f"{number}.npz", **{name: np.array(words) for name, words in found.items()})


def refusals(mesh, number, folder):
    """Returns each process's errors about different specs, and about ragged keys without a declared size."""
    tables = {
        "dim": [jaxsok.TableSpec("user", DIM + 4 * number, ADAGRAD, capacity=32)],
        "capacity": [jaxsok.TableSpec("user", DIM, ADAGRAD, capacity=32 << number)],
        "same": [jaxsok.TableSpec("user", DIM, ADAGRAD, capacity=32)],
    }
    messages = {}

    def note(name, call):
        try:
            call()
            messages[name] = "nothing raised"
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)

    features = [jaxsok.FeatureSpec("user", "user")]
    # Nothing of these is in the form of a state; each would train with numbers or programs of its own.
    factor, policies = 1 + number, jaxsok.policies
    for name, options in {
        "rate": {"optimizer": jaxsok.optim.sgd(0.1 * factor)},
        "schedule": {"optimizer": jaxsok.optim.sgd(lambda step: 0.5 / (step + factor))},
        "lifted": {"optimizer": jaxsok.optim.lift(optax.sgd(0.1 * factor))},
        "injected": {"optimizer": jaxsok.optim.lift(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * factor))},
        "array": {"optimizer": jaxsok.optim.lift(optax.sgd(jnp.float32(0.5 * factor)))},
        "row_gradient": {"row_gradient": ["sum", "mean"][number]},
        "eviction": {"eviction": [policies.LeastRecentlyUsed(), policies.LeastFrequentlyUsed()][number]},
        "admission": {"admission": policies.AdmitByCount(1 + factor)},
    }.items():
        tables[name] = [dataclasses.replace(tables["same"][0], **options)]
    for name in sorted(tables.keys() - {"same"}):  # in the same order in all processes
        note(name, jaxsok.Collection(tables[name], features, mesh=mesh, axis="data").init)
    wires = jaxsok.ExchangeSpec(rows=["float32", "bfloat16"][number])
    note("exchange", jaxsok.Collection(tables["same"], features, mesh=mesh, axis="data", exchange=wires).init)
    same = jaxsok.Collection(tables["same"], features, mesh=mesh, axis="data")
    note("seed", lambda: same.init(seed=number))
    other = [jaxsok.FeatureSpec("user", "user", combiner=("sum", "mean")[number])]
    note("feature", jaxsok.Collection(tables["same"], other, mesh=mesh, axis="data").init)
    note("ragged", lambda: same.batch({"user": jaxsok.Bags(np.arange(2), lengths=np.array([1, 1]))}))
    note("same", same.init)

    def importing(*chunks, value=1, **options):
        def read():
            for keys in chunks:
                if keys is None:
                    raise ValueError("cannot be read")
                yield jaxsok.Records(np.array(keys, np.uint64), np.full((len(keys), DIM), value, np.float32))

        return lambda: same.import_table(same.init(seed=0), "user", read(), **options)

    note("keys", importing([1, 2], [3, 4 + number]))
    note("rows", importing([1, 2], value=number))
    note("num_rows", importing([1, 2], num_rows=2 + number))
    hand_over = (lambda *args: None) if number else None
    note("handed", lambda: same.evict(same.init(seed=0), "user", policies.SmallNorm(1.0), hand_over=hand_over))
    note("clocks", lambda: evict_by_name(evicting(mesh), number, jax.process_count(), late=number))
    note("order", lambda: processes.least("grow" if number else "init", 1))
    note("chunks", importing(*([1], [2])[number:]))
    note("unread", importing([1], [2] if number else None))
    note("whole", importing([1], [2, 3]))
    np.savez(pathlib.Path(folder) / f"{number}.npz", **messages)


def host_memory(mesh, number, num_processes, folder):
    """Divides a host's memory for tables among its processes; returns the errors of all when an allocation fails.

    Afterwards it trains; each process compares its rows with those of tables on the device.
    """
    from unittest import mock

    from jaxsok import host_limits, host_slabs

    tables = [jaxsok.TableSpec("user", DIM, ADAM, capacity=256, memory=jaxsok.HostMemory(device_rows=8))]
    features = [jaxsok.FeatureSpec("user", "user")]
    collection = jaxsok.Collection(tables, features, mesh=mesh, axis="data")
    asked = collection.memory_estimate().host_bytes * len(mesh.local_devices)  # requested by one process
    found = {"asked": [f"{asked}"]}

    def note(name, call):
        found[name] = outcome_of(call)

    def set_limits(num_bytes, owner="host"):
        """Sets the limits that each process reads; the second process reads a little less."""
        limit = host_limits.HostLimit("MemAvailable", num_bytes - number, owner)
        return mock.patch.object(host_limits, "limits", lambda: [limit])

    enlarge.free_bytes = lambda: None  # a CPU device's memory is the host's too

    def pinning(process):
        """Simulates memory that the driver does not pin in one process."""
        error = MemoryError("host memory: out of memory")
        made = mock.Mock(side_effect=error) if number == process else place_array
        return mock.patch.multiple(host_slabs, _is_pinned=lambda records: True, _allocate_pinned=made)

    def place_array(device, shape):
        place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        made = jax.device_put(np.zeros(shape, np.uint8), place)
        return jax.make_array_from_single_device_arrays(shape, place, [made])

    def grown(state):
        larger = {0: 2 * state.stores[0].capacity // collection.stores[0].num_shards}
        return enlarge.grow_to("grow", collection.stores, state, larger, collection.shards)

    for name, num_bytes, owner in (
        ("both fit", 2 * asked + 1, "host"),
        ("one fits", 2 * asked, "host"),
        ("apart", asked + 1, f"host {number}"),
    ):
        with set_limits(num_bytes, owner):
            note(f"init: {name}", collection.init)
    state = collection.init(seed=1)
    with set_limits(2 * asked):
        note("grow: one fits", lambda: grown(state))
    for process in range(num_processes):
        with pinning(process):
            note(f"init: pinning {process}", collection.init)
            note(f"grow: pinning {process}", lambda: grown(state))
    found["capacity"] = [f"{grown(state).stores[0].capacity / state.stores[0].capacity}"]
    results = []
    for memory in (None, jaxsok.HostMemory(device_rows=24)):
        in_memory = [
            dataclasses.replace(table, memory=memory) for table in TABLES if table.placement != jaxsok.REPLICATED
        ]
        asking = [feature for feature in FEATURES if feature.table != "ad"]
        declared = jaxsok.Collection(in_memory, asking, mesh=mesh, axis="data")
        trained, out = train(declared, number, num_processes)
        chunks = [list(declared.export_chunks(trained, table.name)) for table in in_memory]
        arrays = jax.tree.leaves([[vars(part) for part in parts] for parts in chunks])
        results.append((out, [np.asarray(array).tobytes() for array in arrays]))
        assert declared.growth.num_grown and any(parts[0].num_rows for parts in chunks if parts)
    found["same bits"] = [str(results[0] == results[1])]
    np.savez(pathlib.Path(folder) / f"{number}.npz", **{name: np.array(words) for name, words in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
