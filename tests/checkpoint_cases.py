"""Collections, training steps, tables as arrays and other processes, for the tests of checkpoints."""

import functools
import os
import pathlib
import random
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import AxisType

import jaxsok
from jaxsok import optim, policies

DIM = 4
NUM_SAMPLES = 24  # divisible by every mesh that is used
ADAM, ROWWISE = optim.adam(0.1), optim.rowwise_adagrad(0.1)


def mesh_of(num_devices):
    """Returns a mesh of the first devices. Both axis types occur, so that files move from one to the other."""
    return programs.mesh(num_devices, axis_type=AxisType.Auto if num_devices in (3, 4) else AxisType.Explicit)


def collection_of(tables, num_devices=None):
    """Returns a collection with a feature per table, cached by tables; without a device count it has no mesh."""
    return _collection_of(tuple(tables), num_devices)


@functools.cache
def _collection_of(tables, num_devices):
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    options = {} if num_devices is None else {"mesh": mesh_of(num_devices), "axis": "data"}
    return jaxsok.Collection(tables, features, **options)


def tables_of(*, capacity=240, **options):
    """Returns two tables in one store, a 16-bit table on every shard, and a table on one shard that admits by count."""
    options = {"statistics": True, "capacity": capacity, **options}
    return [
        jaxsok.TableSpec("user", DIM, ADAM, **options),
        jaxsok.TableSpec("item", DIM, ADAM, **options),
        jaxsok.TableSpec("day", 2 * DIM, ROWWISE, dtype="bfloat16", placement=jaxsok.REPLICATED, **options),
        jaxsok.TableSpec("ad", DIM, ROWWISE, placement=jaxsok.on(0), admission=policies.AdmitByCount(2), **options),
    ]


def one_batch(collection, step, num_keys=200):
    """Returns the keys of a step: some repeat earlier keys, some are new, and a few are large."""
    rng = np.random.default_rng(step)
    keys = rng.integers(0, num_keys, (len(collection.tables), NUM_SAMPLES)).astype(np.uint64)
    keys[:, ::5] += np.uint64(2**63)
    return {table.name: keys[i] for i, table in enumerate(collection.tables)}


@functools.cache
def train_step(collection):
    """Returns a step: lookup, a gradient that depends on the embedding, and update."""

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = {name: embedding * 0.5 + 0.1 for name, embedding in embeddings.items()}
        return collection.update(state, plan, gradients)

    # There are few steps of small batches, so compilation takes most of the time.
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def train(collection, state, num_steps):
    """Trains for `num_steps` steps; the state's step determines their batches."""
    for _ in range(num_steps):
        batch = collection.batch(one_batch(collection, int(state.step)))
        state = collection.grow(state)
        state, _ = train_step(collection)(state, batch.features)
    return state


def parts_of(array, num_parts):
    """Returns the parts of an array that this process has, by shard."""
    size = array.shape[0] // num_parts
    return {(part.index[0].start or 0) // size: np.asarray(part.data) for part in array.addressable_shards}


def content(collection, state):
    """Reads every table from this process's shards, in ascending order of keys: {"<table>.<column>": array}."""
    columns = {}
    for spec, store in zip(collection.stores, state.stores, strict=True):
        slabs = {"records": store.records, "rows": store.rows}
        slabs |= {
            f"state.{state_spec.name}": arrays
            for state_spec, arrays in zip(spec.state_specs, store.states, strict=True)
        }
        if store.statistics:
            slabs["statistics"] = store.statistics
        parts = {name: [parts_of(slab, spec.num_shards) for slab in arrays] for name, arrays in slabs.items()}
        shards = sorted(parts["records"][0])
        for table in spec.tables:
            number = [table.name for table in spec.tables].index(table.name)
            found = {name: [] for name in ("keys", *parts)}
            for shard in shards[:1] if spec.is_replicated else shards:
                whole = {name: np.concatenate([part[shard] for part in slab]) for name, slab in parts.items()}
                words = whole["records"].astype(np.uint64)
                keys = words[:, 0] | words[:, 1] << np.uint64(32)
                is_mine = (keys != np.uint64(jaxsok.PADDING_KEY)) & (words[:, 2] == number)
                for name, values in {"keys": keys, **whole}.items():
                    found[name].append(values[is_mine])
            found.pop("records")
            joined = {name: np.concatenate(values) for name, values in found.items()}
            order = np.argsort(joined["keys"])
            columns |= {f"{table.name}.{name}": values[order] for name, values in joined.items()}
    return columns


def waiting(collection, state, table):
    """Reads the keys of a table that wait for a row from the arrays alone: {key: count}."""
    found = {}
    for spec, store in zip(collection.stores, state.stores, strict=True):
        for number, table_spec in enumerate(spec.tables):
            if table_spec.name != table:
                continue
            for array in store.sightings:
                for shard, part in parts_of(array, spec.num_shards).items():
                    entries = part.reshape(-1, 4).astype(np.uint64)
                    keys = entries[:, 0] | entries[:, 1] << np.uint64(32)
                    is_mine = (keys != np.uint64(jaxsok.PADDING_KEY)) & (entries[:, 3] == number)
                    is_mine &= (entries[:, 2] > 0) & (entries[:, 2] < table_spec.admission.num_sightings)
                    if shard == 0 or not spec.is_replicated:
                        found |= dict(zip(keys[is_mine].tolist(), entries[is_mine, 2].tolist(), strict=True))
    return found


def assert_same(got, want, *, names=None):
    """Checks bitwise equality."""
    assert got.keys() == want.keys() if names is None else names
    for name in want if names is None else names:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(bits(got[name]), bits(want[name]), err_msg=name)


def bits(array):
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


# Programs of other processes ------------------------------------------------------------------------------------------


def counting():
    """Returns a table whose rows equal the number of steps, whatever their keys."""
    zeros = jaxsok.initializers.constant(0.0)
    return collection_of([jaxsok.TableSpec("item", 16, optim.sgd(1.0), initializer=zeros, capacity=4096)])


NUM_COUNTED = 3000


def save_for_ever(folder):
    """Trains and saves after each step, starting where the previous process was killed."""
    import orbax.checkpoint as ocp

    from jaxsok import checkpoint

    collection = counting()
    features = collection.batch({"item": np.arange(NUM_COUNTED)}).features

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        embeddings, state, plan = collection.lookup(state, features)
        return collection.update(state, plan, {"item": -jnp.ones_like(embeddings["item"])})[0]

    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        last = manager.latest_step()
        if last is None:
            state = collection.init(seed=0)
        else:
            restore = ocp.args.Composite(tables=checkpoint.TablesRestore(collection))
            state = manager.restore(last, args=restore)["tables"]
        while True:
            state = step(state)
            number = int(state.step)
            items = ocp.args.Composite(
                tables=checkpoint.TablesSave(collection, state),
                params=ocp.args.StandardSave({"steps": np.full(3, number)}),
            )
            # One byte for each save that begins. The previous save has ended, since `save` waits for it.
            manager.wait_until_finished()
            os.write(1, b".")
            manager.save(number, args=items)


def killed_again_and_again(folder, seed):
    """Starts a process that saves without end for each line of standard input, and kills it after it has begun.

    The modules are loaded once; JAX's back end begins in each child.
    """
    import orbax.checkpoint  # noqa: F401

    import jaxsok.checkpoint.handler  # noqa: F401

    rng = random.Random(seed)
    for _ in sys.stdin:
        ready, begun = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(begun, 1)
            save_for_ever(folder)
        os.close(begun)
        os.read(ready, 1)
        started = time.monotonic()
        os.read(ready, 1)
        # The process is somewhere in a save, since all saves take about as long.
        time.sleep(rng.uniform(0.0, 1.2) * (time.monotonic() - started))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        print("killed", flush=True)


def in_processes(folder):
    """Trains, saves with and without Orbax, restores and continues, as one of several processes."""
    import orbax.checkpoint as ocp

    from jaxsok import checkpoint

    number = int(os.environ["PROCESS_ID"])
    jax.config.update("jax_num_cpu_devices", int(os.environ["NUM_DEVICES"]))
    jax.distributed.initialize(
        f"localhost:{os.environ['PORT']}", num_processes=int(os.environ["NUM_PROCESSES"]), process_id=number
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    folder = pathlib.Path(folder)

    def collection(**options):
        tables = [table for table in tables_of(**options)]
        features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
        return jaxsok.Collection(tables, features, mesh=mesh, axis="data")

    def batch_of(declared, step):
        share = NUM_SAMPLES // jax.process_count()
        raw = one_batch(declared, step)
        return declared.batch({name: keys[number * share : (number + 1) * share] for name, keys in raw.items()})

    first = collection()
    state = first.init(seed=11)

    def train_steps(state, num_steps):
        for _ in range(num_steps):
            batch = batch_of(first, int(state.step))
            state = first.grow(state)
            state, _ = train_step(first)(state, batch.features)
        return state

    state = train_steps(state, 3)
    checkpoint.export_full(folder / "full", first, state)
    state = train_steps(state, 2)
    state, _ = first.erase(state, "user", one_batch(first, 1)["user"][:6])
    checkpoint.export_delta(folder / "delta", first, state, folder / "full")
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(5, args=ocp.args.Composite(tables=checkpoint.TablesSave(first, state, compression="zstd")))
        manager.wait_until_finished()
        other = collection(capacity=40)
        again = manager.restore(5, args=ocp.args.Composite(tables=checkpoint.TablesRestore(other)))["tables"]
    loaded = checkpoint.load(folder / "delta", other)
    for name, saved_state in {"trained": state, "restored": again, "loaded": loaded}.items():
        np.savez(folder / f"{name}.{number}.npz", **_plain(content(first, saved_state)))


def writes_on_request(folder, number):
    """Writes this process's part for each line of standard input, "<format> <path> <overwrite>".

    Several processes receive the lines at once: they are writers that share a path.
    """
    from jaxsok import Records, checkpoint
    from jaxsok.interchange import columns, hps, npz, sok
    from jaxsok.serving import artifact

    keys = np.arange(1, 40, dtype=np.uint64)
    rows = np.full((keys.size, 2), int(number), np.float32)
    statistics = np.full(keys.size, int(number), np.uint32)
    records = Records(keys, rows, {"m": rows, "v": rows}, statistics, statistics)
    table = jaxsok.TableSpec("item", 2, optim.sgd(1.0), initializer=jaxsok.initializers.constant(float(number)))
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("item", "item")])
    _, state, _ = collection.lookup(collection.init(seed=0), collection.batch({"item": keys}).features)
    program = number.encode() * 100_000
    writers = {
        "export": lambda path, overwrite: checkpoint.export_full(path, collection, state),
        "model": lambda path, overwrite: artifact.model.write_files(path, program, {"of": number}),
        "hps": lambda path, overwrite: hps.write_hps(path, records, hotness=True, overwrite=overwrite),
        "sok": lambda path, overwrite: sok.write_sok(path, "item", records, optimizer="adam", overwrite=overwrite),
        "npz": lambda path, overwrite: npz.write_npz(path, records, overwrite=overwrite),
        "parquet": lambda path, overwrite: columns.write_parquet(path, records, overwrite=overwrite),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        name, path, overwrite = line.split()
        try:
            writers[name](pathlib.Path(folder, path), overwrite == "True")
            print("written", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


def _plain(columns):
    """Converts columns to the form that `np.savez` takes."""
    return {name: bits(values) for name, values in columns.items()}


# A training run that can be interrupted and resumed


NEW_KEYS = 6  # per step; the others come from recent steps or from a few keys that are always requested


def living(form):
    """Returns tables that evict, admit by count and grow, on one device or on a mesh of two; see `Life`."""
    num_rows = 30 if form == "mesh" else 60  # shards have additional room for an uneven hash
    full = {"capacity": num_rows, "max_capacity": num_rows, "eviction": policies.LeastRecentlyUsed()}
    tables = [
        jaxsok.TableSpec("user", DIM, ADAM, admission=policies.AdmitByCount(2), **full),
        jaxsok.TableSpec("item", 2 * DIM, ROWWISE, capacity=75),
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    options = {"mesh": mesh_of(2), "axis": "data"} if form == "mesh" else {}
    return jaxsok.Collection(tables, features, **options)


class Life:
    """Steps with evictions, admission and growth, saved after each step; each returns columns to compare.

    In the forms "batch" and "mesh", `grow` gets the batch of the step; in "seen" it is called before the batch exists.
    """

    FORMS = ("batch", "seen", "mesh")

    def __init__(self, form, folder):
        """Continues from the last save in the folder, or begins."""
        from jaxsok import checkpoint

        self.checkpoint, self.form, self.folder = checkpoint, form, pathlib.Path(folder)
        self.collection = living(form)
        saved = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        self.step = max(saved, default=0)
        if saved:
            self.state = checkpoint.load(self.folder / str(self.step), self.collection)
        else:
            self.state = self.collection.init(seed=5)
        # Each number separately, so that the bits do not depend on how a back end splits a sum.
        self.run = jax.jit(
            self._run,
            donate_argnums=0,
            compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
        )

    def _run(self, state, features):
        embeddings, state, plan = self.collection.lookup(state, features)
        gradients = jax.tree.map(lambda rows: jnp.tanh(rows) + 0.25, embeddings)
        state, stats = self.collection.update(state, plan, gradients)
        return state, embeddings, stats

    def batch(self):
        """Returns the keys of a step, which are a function of its number."""
        rng = np.random.default_rng(self.step)
        keys = {}
        for table in self.collection.tables:
            new = 1000 + NEW_KEYS * self.step + np.arange(NEW_KEYS)
            old = rng.integers(0, 12, NUM_SAMPLES // 2 - NEW_KEYS)
            late = np.maximum(0, 1000 + NEW_KEYS * self.step - rng.integers(0, 70, NUM_SAMPLES // 2))
            keys[table.name] = np.where(rng.random(NUM_SAMPLES) < 0.1, -1, np.concatenate([new, old, late]))
        return self.collection.batch(keys)

    def advance(self, *, saves):
        """Makes one step and returns its embeddings and counts as columns."""
        if self.form == "seen":
            self.state = self.collection.grow(self.state)
        batch = self.batch()
        if self.form != "seen":
            self.state = self.collection.grow(self.state, batch)
        self.state, embeddings, stats = self.run(self.state, batch.features)
        self.step += 1
        if saves:
            self.checkpoint.export_full(self.folder / str(self.step), self.collection, self.state)
        counts = {f"{table}.counts": np.array(list(line.values())) for table, line in stats.to_dict().items()}
        return {name: np.asarray(rows) for name, rows in embeddings.items()} | counts


def live(folder, num_steps):
    """Makes steps of each form that has a folder, saving and printing a line after each, until killed or done."""
    jax.config.update("jax_num_cpu_devices", 2)
    lives = {path.name: Life(path.name, path) for path in sorted(pathlib.Path(folder).iterdir())}
    for _ in range(int(num_steps)):
        for life in lives.values():
            columns = life.advance(saves=True)
            np.savez(life.folder / f"{life.step}.npz", **_plain(columns))
        print("step", flush=True)
    for life in lives.values():
        np.savez(life.folder / "last.npz", **_plain(content(life.collection, life.state)))


if __name__ == "__main__":
    commands = {"killed": killed_again_and_again, "processes": in_processes, "writes": writes_on_request, "live": live}
    commands[sys.argv[1]](*sys.argv[2:])
