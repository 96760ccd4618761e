"""Updates make no request wait for a compiler: what was compiled for a version is compiled for the next one first."""

import contextlib
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
import weakref

import jax
import numpy as np
import pytest
from serving_cases import PLATFORMS, config_of, expect, model_of, records_of, rows_of, write
from waiting import wait_until

import jaxsok
from jaxsok.serving import ready as ready_lib
from jaxsok.serving.artifact import ArrayInput, BagsInput, KeysInput, export_model
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.serving.session import open

DIMS = {"user": 4, "ad": 3}
TIERS = {
    "device": {"jaxsok": {"spare_rows": 16}},
    "host": {"gpucache": False, "jaxsok": {"spare_rows": 16}},
    "cache": {"gpucacheper": 0.3, "hit_rate_threshold": 1.1},
}
NUMBERS = {
    case: number
    for number, case in enumerate(
        (*way, what, warm_up)
        for way in [("device", False), ("device", True), ("host", False), ("host", True), ("cache", False)]
        for what in ("dense", "tables", "both")
        for warm_up in (False, True)
    )
}
QUICK = [
    ("device", False, "dense", True),
    ("device", False, "both", False),
    ("device", True, "tables", False),
    ("host", True, "both", False),
    ("cache", False, "dense", False),
    ("cache", False, "both", True),
]
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in NUMBERS]


class Compilations:
    """A record of the threads that compiled, and of whether readers of some versions were kept out meanwhile."""

    def __init__(self):
        self.versions, self.threads, self.are_kept_out = None, [], []
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event, seconds, **_):
        if "backend_compile" in event:
            self.threads.append(threading.get_ident())
            if self.versions is not None:
                self.are_kept_out.append(self.versions._gate._is_closed)

    def since(self, start):
        """Returns this thread's compilations since the given count."""
        return self.threads[start:].count(threading.get_ident())


COMPILATIONS = Compilations()


def content_of(version, num_rows):
    return {name: rows_of(range(num_rows + 10 * n), dim, version=version) for n, (name, dim) in enumerate(DIMS.items())}


def folders_of(path, content):
    return {name: (write(path / name, mine), DIMS[name]) for name, mine in content.items()}


def export(path, content, scale, is_per_sample=True):
    """Exports a model of keys, bags and numbers, whose result states its scale."""
    sources = [(FrozenTable(name, dim), records_of(content[name], dim)) for name, dim in DIMS.items()]
    tables, _ = freeze_records([(table, SizedRecords(source.num_rows, [source])) for table, source in sources])

    def model(tables, inputs):
        bag = LookupInput("ad", inputs["bag"].keys, "sum", offsets=inputs["bag"].offsets)
        found = lookup(tables, {"user": LookupInput("user", inputs["user"]), "bag": bag})
        out = {"user": found["user"], "bag": found["bag"], "scale": inputs["number"] * 0 + scale}
        return out if is_per_sample else {**out, "total": found["bag"].sum()}

    inputs = {"user": KeysInput("user", (2,)), "bag": BagsInput("ad"), "number": ArrayInput()}
    export_model(path, model, tables, inputs, platforms=PLATFORMS)
    return str(path)


def request(num_samples, hotness, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, 50, (num_samples, 2)),
        "bag": jaxsok.Bags(rng.integers(0, 50, (num_samples, hotness))),
        "number": np.ones(num_samples, np.float32),
    }


def ask(session, contents, seed=0):
    """Sends lookups and predictions of several sizes and checks them; returns the versions that answered."""
    versions = set()

    def check(answer, keys):
        versions.add(answer.version)
        content = contents[answer.version]
        for name, (table, mine) in keys.items():
            np.testing.assert_array_equal(answer[name], expect(content[table], mine, 0.0, DIMS[table]))

    rng = np.random.default_rng(seed)
    for size in (7, 150):
        keys = {name: rng.integers(0, 200, size) for name in DIMS}
        check(session.lookup(keys), {name: (name, mine) for name, mine in keys.items()})
    for num_samples, hotness in ((3, 1), (19, 5)):
        given = request(num_samples, hotness, seed)
        answer = session.predict(given)
        check(answer, {"user": ("user", given["user"])})
        bags = expect(contents[answer.version]["ad"], given["bag"].keys, 0.0, 3).sum(axis=1)
        np.testing.assert_array_equal(answer["bag"], bags)
        assert set(answer["scale"].tolist()) == {contents[answer.version]["scale"]}
    return versions


@pytest.mark.parametrize(("tier", "in_place", "what", "warm_up"), CASES)
def test_an_update_compiles_before_it_is_served(tmp_path, tier, in_place, what, warm_up):
    """Requests repeated during and after an update compile nothing, and the update's compiler does not block them."""
    odd = 37 + 7 * NUMBERS[tier, in_place, what, warm_up]  # Its programs belong to this case alone.
    first = content_of(0, odd)
    tables = folders_of(tmp_path / "0", first)
    second = first if what == "dense" else content_of(1, odd + (4 if in_place else 100))
    folders_of(tmp_path / "1", second)
    dense = [export(tmp_path / f"model{n}", first, float(n + 1)) for n in range(2)]
    contents = {1: {**first, "scale": 1.0}, 2: {**second, "scale": 1.0 if what == "tables" else 2.0}}
    model = model_of(tables, max_batch_size=32, dense_file=dense[0], num_of_worker_buffer_in_pool=4, **TIERS[tier])
    with open(config_of(model), warm_up=warm_up) as session:
        assert ask(session, contents) == {1}
        ask(session, contents)
        seen, failed, is_done = [set()], [], threading.Event()

        def read():
            try:
                start = len(COMPILATIONS.threads)
                while not is_done.is_set():
                    seen[0] |= ask(session, contents)
                failed.extend(["compiled"] * COMPILATIONS.since(start))
            except BaseException as error:
                failed.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        COMPILATIONS.versions, COMPILATIONS.are_kept_out = session._models["dlrm"].versions, []
        try:
            source = None if what == "dense" else {name: tmp_path / "1" / name for name in DIMS}
            new = None if what == "tables" else dense[1]
            assert session.update(source, dense_file=new, in_place=in_place) == 2
            wait_until(lambda: failed or 2 in seen[0])
        finally:
            COMPILATIONS.versions = None
            is_done.set()
            reader.join()
        assert not failed, failed[0]
        assert not any(COMPILATIONS.are_kept_out)
        start = len(COMPILATIONS.threads)
        assert ask(session, contents) == {2}
        assert COMPILATIONS.since(start) == 0


@pytest.mark.parametrize("tier", list(TIERS))
def test_requests_for_some_tables_wait_for_no_compiler(tmp_path, tier):
    """A request for some tables compiles nothing; over a cache a larger program answers until its own is there."""
    content = content_of(0, 410 + 10 * list(TIERS).index(tier))
    model = model_of(folders_of(tmp_path, content), per_sample=40, max_batch_size=64, **TIERS[tier])
    with open(config_of(model)) as session:
        served = session._models["dlrm"]
        for size in (7, 300, 600, 1200):  # A fetch compiles its own program below the cache.
            session.lookup({name: np.arange(10_000, 10_000 + size) for name in DIMS})
        for names in (["ad"], ["user"]):
            for size in (0, 7, 600, 1200):
                keys = {name: np.arange(size) for name in names}
                start = len(COMPILATIONS.threads)
                first = session.lookup(keys)
                assert COMPILATIONS.since(start) == 0
                if tier == "cache":
                    served.readers[0].cache.drain()
                again = session.lookup(keys)
                assert COMPILATIONS.since(start) == 0
                for name in names:
                    np.testing.assert_array_equal(first[name], expect(content[name], keys[name], 0.0, DIMS[name]))
                    assert first[name].tobytes() == again[name].tobytes()
        if tier == "cache":
            assert {(size, 256) for size in (256, 1024, 2048)} <= served.readers[0].cache.stores.compiled.query_sizes
            assert {(256, size) for size in (256, 1024, 2048)} <= served.readers[0].cache.stores.compiled.query_sizes


def test_models_with_a_batch_of_its_own(tmp_path):
    """Models with a batch size of their own compile each size that came for the next model."""
    content = content_of(0, 29)
    dense = [export(tmp_path / f"model{n}", content, float(n + 1), is_per_sample=False) for n in range(2)]
    with open(config_of(model_of(folders_of(tmp_path, content), dense_file=dense[0]))) as session:
        for num_samples in (3, 5):
            session.predict(request(num_samples, 2))
        session.update(None, dense_file=dense[1])
        start = len(COMPILATIONS.threads)
        for num_samples in (3, 5):
            assert session.predict(request(num_samples, 2))["scale"].tolist() == [2.0] * num_samples
        assert COMPILATIONS.since(start) == 0
        session.predict(request(6, 2))
        assert COMPILATIONS.since(start) > 0


def test_warm_up_compiles_the_dense_model_over_a_cache(tmp_path):
    content = content_of(0, 31)
    dense = export(tmp_path / "model", content, 1.0)
    options = {"dense_file": dense, "max_batch_size": 32, "per_sample": 2, **TIERS["cache"]}
    with open(config_of(model_of(folders_of(tmp_path, content), **options))) as session:
        served = session._models["dlrm"]
        compiled = {
            id(served.readers[0].ready): len(served.readers[0].ready._made[None, served.versions.current.served])
        }
        for num_samples in (32, 9, 1):
            session.predict(request(num_samples, 1))
        assert compiled == {
            id(served.readers[0].ready): len(served.readers[0].ready._made[None, served.versions.current.served])
        }
        assert session.stats()["lookups"] == 0 and session.stats()["cache"]["lookups"] == 3


def test_programs_that_are_remembered_are_bounded():
    """Only the last programs are remembered, and those of versions that were replaced are freed."""
    made = []
    ready = ready_lib.Ready(lambda where, program: made.append((where, program)))
    for number in range(ready_lib.MOST_USED + 5):
        assert not ready.has("a", number)
        ready.make("a", number)
        assert ready.has("a", number)
    assert ready.list_used() == list(range(5, ready_lib.MOST_USED + 5))
    ready.keep(["b"])
    assert not ready.has("a", 7) and ready.list_used()[-1] == 7
    ready.make("b", 7)
    ready.make("b", 7)
    assert made[-1] == ("b", 7) and made.count(("b", 7)) == 1


def other_sizes(ready, monkeypatch):
    """Sends a prediction of another size during each compilation; returns what was compiled."""
    made = []

    def compile_one(where, program):
        made.append(program)
        assert len(made) < 10 * ready_lib.MOST_USED
        sizes = tuple((size + 1024 * len(made), bags) for size, bags in program.sizes)
        ready.has(where, dataclasses.replace(program, sizes=sizes))

    monkeypatch.setattr(ready, "_compile", compile_one)
    return made


@pytest.mark.parametrize("in_place", [False, True])
def test_an_update_ends_whatever_requests_bring_meanwhile(tmp_path, monkeypatch, in_place):
    """An update compiles for two rounds at most, and other models do not wait for its compiler."""
    content = content_of(0, 33)
    dense = [export(tmp_path / f"model{n}", content, float(n + 1)) for n in range(2)]
    model = model_of(folders_of(tmp_path, content), dense_file=dense[0], **TIERS["device"])
    with open(config_of(model), warm_up=False) as session:
        for size in (7, 50):
            session.predict(request(size, 2))
        served = session._models["dlrm"]
        made, are_held = other_sizes(served.readers[0].ready, monkeypatch), []
        compile_one = served.readers[0].ready._compile

        def note_program(where, program):
            are_held.append(served.versions._memory.lock.locked())
            compile_one(where, program)

        monkeypatch.setattr(served.readers[0].ready, "_compile", note_program)
        folders_of(tmp_path / "1", content_of(1, 33))
        source = {name: tmp_path / "1" / name for name in DIMS}
        assert session.update(source, dense_file=dense[1], in_place=in_place) == 2
        assert len(made) == 4  # Two sizes, and those that came while these were compiled.
        assert are_held == [False] * 4


def test_a_process_may_end_while_something_is_compiled():
    """A process may end without `close` while a thread compiles; Python would otherwise kill it in the compiler."""
    program = """
import subprocess
import sys
import threading
import jax, jax.numpy as jnp
from jaxsok.serving.ready import Background

has_begun = threading.Event()

def compile_some():
    lowered = [jax.jit(lambda x: jnp.sin(x + number)).lower(jnp.ones(8)) for number in range(40)]
    has_begun.set()
    for one in lowered:
        one.compile()

Background().offer("some", compile_some)
assert has_begun.wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "tier", ["device", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("host", "cache"))]
)
def test_dense_models_that_went_are_freed(tmp_path, tier):
    """Dense models that were replaced, and those that an update refused, are freed."""
    content = content_of(0, 35)
    dense = [export(tmp_path / f"model{n}", content, float(n + 1)) for n in range(2)]
    tables = folders_of(tmp_path, content)
    model = model_of(tables, max_batch_size=16, dense_file=dense[0], **TIERS[tier])
    with open(config_of(model), warm_up=False) as session:
        session.predict(request(3, 1))
        served, refused = session._models["dlrm"], []
        first = weakref.ref(served.versions.current.served)
        real = served.readers[0].ready._compile

        def refuse(where, program):
            refused.append(weakref.ref(where[1]))
            raise MemoryError("injected")

        served.readers[0].ready._compile = refuse
        with contextlib.suppress(MemoryError):  # `pytest.raises` would keep the refused model.
            session.update(None, dense_file=dense[1])
        served.readers[0].ready._compile = real
        gc.collect()
        assert [reference() for reference in refused] == [None] and first() is not None
        session.update(None, dense_file=dense[1])
        for _ in range(5):  # A cache keeps the models of the last versions, for predictions that run.
            session.update({"user": tables["user"][0]})
        gc.collect()
        assert first() is None
        assert session.predict(request(3, 1))["scale"].tolist() == [2.0] * 3


def test_what_is_compiled_for_a_version_that_went_is_not_remembered(monkeypatch):
    """Programs compiled for a version that was replaced, or beyond the limit, are not remembered."""
    ready = ready_lib.Ready(lambda where, program: ready.keep(["b"]) if program == "last" else None)
    ready.make("a", "last")
    ready.make("a", "later")
    assert not ready._made.get("a")
    monkeypatch.setattr(ready_lib, "MOST_MADE", 3)
    for number in range(6):
        ready.make("b", number)
        assert ready.has("b", number) and ready.has("b", 0)  # The programs that were called last stay.
    assert [number for number in range(6) if ready.has("b", number)] == [0, 4, 5]


def test_who_needs_another_program_waits_for_no_compiler():
    """Only requests for the same program wait for its compiler, and it is compiled once, also in the background."""
    begun, is_quick_done, made = threading.Event(), threading.Event(), []

    def compile_one(where, program):
        made.append(program)
        if program == "slow":
            begun.set()
            assert is_quick_done.wait(30)

    ready = ready_lib.Ready(compile_one)
    ready_lib.Background().offer(None, functools.partial(ready.make, "a", "slow"))
    assert begun.wait(30)
    same = [threading.Thread(target=ready.make, args=("a", "slow")) for _ in range(2)]
    for thread in same:
        thread.start()
    ready.make("a", "quick")
    is_quick_done.set()
    for thread in same:
        thread.join()
    assert made == ["slow", "quick"] and ready.has("a", "slow")


def test_who_waited_for_a_compilation_that_failed_tries_it():
    begun, may_fail, made = threading.Event(), threading.Event(), []

    def compile_one(where, program):
        made.append(program)
        if len(made) == 1:
            begun.set()
            assert may_fail.wait(30)
            raise MemoryError("injected")

    ready = ready_lib.Ready(compile_one)
    ready_lib.Background().offer(None, functools.partial(ready.make, "a", "one"))
    assert begun.wait(30)
    other = threading.Thread(target=ready.make, args=("a", "one"))
    other.start()
    may_fail.set()
    other.join()
    assert made == ["one", "one"] and ready.has("a", "one")
    with pytest.raises(MemoryError):
        made.clear()
        ready.make("a", "another")


def test_a_thread_that_does_not_start(monkeypatch, caplog):
    """A thread that does not start is logged and tried again with the next offer; no request waits for it."""
    done, background = [], ready_lib.Background()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        background.offer("one", lambda: done.append("one"))
    assert "can't start new thread" in caplog.text and background._thread is None
    background.offer("one", lambda: done.append("one"))
    background.drain()
    assert done == ["one"]
    background.close()


def test_closing_waits_no_longer_than_it_may(tmp_path):
    """Closing waits a bounded time for background compilations, and starts no more, of any model."""
    tables = folders_of(tmp_path, content_of(0, 39))
    models = [model_of(tables, name=name, max_batch_size=16, **TIERS["cache"]) for name in "ab"]
    session, begun, may_end = open(config_of(*models), warm_up=False), [], threading.Event()

    def compile_one(name):
        begun.append(name)
        assert may_end.wait(30)

    threads = []
    for name, served in session._models.items():
        threads.append(served.readers[0].cache.stores.compiled.background)
        threads[-1].offer("now", functools.partial(compile_one, name))
        threads[-1].offer("later", functools.partial(begun.append, "later"))
    wait_until(lambda: len(begun) == 2)
    assert not session.close(timeout_s=0.05)
    assert all(background._is_closed for background in threads)
    may_end.set()
    for background in threads:
        assert background.close(30)
    assert sorted(begun) == ["a", "b"]


def test_turns_are_short_while_one_of_several_wants_them_so():
    """Updates of several models overlap in any order; after the last, failed or not, the interval is what it was."""
    turns, before = ready_lib.ShortTurns(), sys.getswitchinterval()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(turns)
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    second.enter_context(turns)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    with contextlib.suppress(KeyError), second:
        raise KeyError
    assert sys.getswitchinterval() == before
    sys.setswitchinterval(1e-5)
    try:
        with turns:
            assert sys.getswitchinterval() == pytest.approx(1e-5)  # already shorter
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)
