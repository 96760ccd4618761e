"""Training, sessions and C tables at once in the threads of one process, each compared with a dict or a plain run.

JAXSOK_SLOW=1 enables it on a CPU, JAXSOK_SOAK_S sets its seconds (20). On a GPU it always runs: while threads record
CUDA graphs, others allocate memory of the device and of the host, and free it.
"""

import collections
import os
import threading

import jax
import numpy as np
import pytest
from c_interface_cases import Gpu, Request, open_tables
from serving_cases import config_of, expect, model_of, records_of, rows_of, write

import jaxsok
from jaxsok import serving
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records

pytestmark = [] if jax.default_backend() == "gpu" else [pytest.mark.slow]
SECONDS = float(os.environ.get("JAXSOK_SOAK_S", "20"))
NUM_KEYS, DIM, NUM_STEPS = 300, 4, 30
VERSIONS = [rows_of(range(NUM_KEYS), DIM, version=version) for version in range(2)]
TIERS = {
    "device": ({}, (False, True, "auto")),
    "host rows that the device reads": ({"embedding_cache_type": "uvm", "gpucacheper": 0.3}, (True, "auto")),
    "cache": ({"gpucacheper": 0.3, "hit_rate_threshold": 1.1}, (False,)),
    "host": ({"gpucache": False}, (False,)),
}


class Workers:
    """Threads that run until the time is over, or until one of them fails."""

    def __init__(self):
        self.is_over, self.counts, self._threads, self._errors = threading.Event(), collections.Counter(), [], []

    def start(self, name, work, *arguments):
        """Runs `work(*arguments)` again and again."""

        def run():
            try:
                while not self.is_over.is_set():
                    work(*arguments)
                    self.counts[name] += 1
            except BaseException as error:
                self._errors.append(error)
                self.is_over.set()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def wait(self):
        """Returns at the end of the time, and raises the first error."""
        self.is_over.wait(SECONDS)
        self.is_over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def look_up(session, rng):
    """Compares an answer with the dict of its version."""
    keys = rng.integers(0, NUM_KEYS + 20, rng.integers(1, 9))
    answer = session.lookup({"user": keys})
    np.testing.assert_array_equal(answer["user"], expect(VERSIONS[(answer.version - 1) % 2], keys, 0.0, DIM))


def update(session, folders, modes):
    """Makes the next version."""
    version = session.models["dlrm"].version
    session.update({"user": folders[version % 2]}, in_place=modes[version % len(modes)])


def open_and_close(folder, content, rng):
    """Compares lookups through the C interface with a dict."""
    is_on_gpu = jax.default_backend() == "gpu"
    with open_tables(folder, back_end="cuda" if is_on_gpu else "cpu") as tables:
        for is_graph in (False, True):
            keys = rng.integers(0, NUM_KEYS + 20, 30)
            request = Request("user", keys)
            (found,) = Gpu().lookup(tables, request, is_graph=is_graph) if is_on_gpu else tables.lookup(request)
            np.testing.assert_array_equal(found, expect(content, keys, 0.0, DIM))


class Training:
    """Runs of tables in host memory and on the device, which must have the same bits."""

    def __init__(self):
        self._collections = {share: self._declare(share) for share in (None, 0.1, 0.5)}
        self._seed = 0

    def _declare(self, share):
        memory = None if share is None else jaxsok.HostMemory(share)
        table = jaxsok.TableSpec("user", 8, jaxsok.optim.adam(0.1), capacity=256, max_capacity=1024, memory=memory)
        return jaxsok.Collection([table], [jaxsok.FeatureSpec("user", table="user")])

    def _run(self, share, raws, **options):
        collection = self._collections[share]

        @jax.jit
        def step(state, plan):
            embeddings, state, plan = collection.lookup(state, plan)
            return collection.update(state, plan, jax.tree.map(lambda rows: rows - 1, embeddings))

        state = collection.init(seed=3)
        for batch, plan in collection.pipeline(raws, **options):
            state, stats = step(collection.grow(state, batch), plan)
            stats.check()
        return state

    def compare(self):
        """Trains on the same batches with all rows on the device, and with caches of two sizes."""
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        raws = [{"user": rng.zipf(1.1, 96) % 900} for _ in range(NUM_STEPS)]
        runs = ((None, {}), (0.5, {}), (0.1, {"lookahead": 1, "prefetch": 2}))
        exported = [
            self._collections[share].export_table(self._run(share, raws, **options), "user") for share, options in runs
        ]
        for other in exported[1:]:
            for name in ("keys", "rows"):
                order, others = np.argsort(exported[0]["keys"]), np.argsort(other["keys"])
                np.testing.assert_array_equal(exported[0][name][order], other[name][others])


def test_everything_at_once(tmp_path):
    folders = [write(tmp_path / str(version), content) for version, content in enumerate(VERSIONS)]
    workers, sessions = Workers(), []
    try:
        for name, (tier, modes) in TIERS.items():
            model = model_of({"user": (folders[0], DIM)}, max_batch_size=8, num_of_worker_buffer_in_pool=4, **tier)
            sessions.append(serving.open(config_of(model), warm_up=False))
            for seed in range(2):
                workers.start(f"lookups, {name}", look_up, sessions[-1], np.random.default_rng(seed))
            workers.start(f"updates, {name}", update, sessions[-1], folders, modes)
        for version, content in enumerate(VERSIONS):
            source = SizedRecords(NUM_KEYS, [records_of(content, DIM)])
            tables, _ = freeze_records([(FrozenTable("user", DIM), source)], device_share=(1.0, 0.3)[version])
            serving.export_frozen(tmp_path / f"c{version}", tables)
            workers.start("C", open_and_close, tmp_path / f"c{version}", content, np.random.default_rng(version))
        workers.start("trainings", Training().compare)
        workers.wait()
    finally:
        workers.is_over.set()
        for session in sessions:
            session.close()
    assert len(workers.counts) == 2 * len(TIERS) + 2  # each has done its work once at least
