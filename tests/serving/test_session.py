"""Sessions: what a configuration opens answers like the dicts from which its folders were written."""

import collections
import concurrent.futures
import dataclasses
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import server_cases
from serving_cases import (
    ASKED,
    KNOWN,
    PLATFORMS,
    TRACED,
    UNKNOWN_DIM,
    config_of,
    declare_untrained,
    expect,
    find_in_training,
    model_of,
    records_of,
    rows_of,
    write,
)
from waiting import wait_until

import jaxsok
from jaxsok import checkpoint
from jaxsok.interchange.hps import write_hps
from jaxsok.serving import cache as cache_lib, folders as folders_lib
from jaxsok.serving.artifact import ArrayInput, BagsInput, KeysInput, export_model, load_model
from jaxsok.serving.errors import (
    ConfigError,
    RequestError,
    RequestTooLargeError,
    ServingError,
    UnknownModelError,
    UnknownTableError,
)
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.fused import LookupInput, find_rows, lookup
from jaxsok.serving.model.served import Answer
from jaxsok.serving.session import open

DIMS = {"user": 4, "item": 4, "ad": 3}
DEFAULTS = {"user": -1.0, "item": 0.5}
CONTENT = {
    "user": rows_of([*range(40), 2**63, 2**64 - 2], 4),
    "item": rows_of(range(20, 70), 4),  # The tables share some keys.
    "ad": rows_of(range(5), 3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return {name: (write(folder / name, content), DIMS[name]) for name, content in CONTENT.items()}


@pytest.fixture(scope="module")
def session(folders):
    with open(config_of(model_of(folders, defaults=DEFAULTS))) as session:
        yield session


def check(answer, keys, content=None):
    content = CONTENT if content is None else content
    assert list(answer) == list(keys)
    for name, mine in keys.items():
        wanted = expect(content[name], mine, DEFAULTS.get(name, 0.0), DIMS[name])
        assert answer[name].dtype == np.float32
        np.testing.assert_array_equal(answer[name], wanted)


def test_keys_without_effect_are_logged_once(folders, caplog):
    """A configuration of an older HPS serves, and one log line names its keys without effect."""
    model = model_of(folders, defaults=DEFAULTS, mixed_precision=True, num_of_refresher_buffer_in_pool=0)
    given = config_of(model, volatile_db={"type": "hash_map", "max_get_batch_size": 10_000})
    with open(given, warm_up=False) as session:
        check(session.lookup({"user": np.array([1, 99])}), {"user": np.array([1, 99])})
        (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("jaxsok")]
        for path in ("models[0].mixed_precision", "models[0].num_of_refresher_buffer_in_pool", "max_get_batch_size"):
            assert path in line and f"{path} = " in session.report()


def test_rows_defaults_and_padding(session):
    keys = {
        "ad": np.array([[[0, 4, 5]]], np.int16),
        "user": np.array([1, 41, -1, -2, 2**63 - 1, -(2**63)]),
        "item": np.array([[1, 20], [69, 70]], np.uint64),
    }
    answer = session.lookup(keys)
    check(answer, keys)
    assert isinstance(answer, Answer) and answer.version == 1


@hypothesis.given(st.data())
def test_any_request(session, data):
    """Requests may have any shapes, any subset of tables, or no keys."""
    names = data.draw(st.lists(st.sampled_from(list(DIMS)), min_size=1, unique=True))
    keys = {}
    for name in names:
        shape = data.draw(st.sampled_from([(0,), (1,), (7,), (3, 5), (2, 0), (512,), (2, 3, 4)]))
        seed = data.draw(st.integers(0, 100))
        keys[name] = np.random.default_rng(seed).integers(-3, 75, shape)
    check(session.lookup(keys), keys)


def test_a_request_has_the_bits_of_a_request_for_each_table(session):
    """So `fuse_embedding_table: false` has no effect (decision 0039)."""
    for seed in range(5):
        keys = {name: np.random.default_rng(seed).integers(0, 75, (seed * 3 + 1,)) for name in DIMS}
        answer = session.lookup(keys)
        check(answer, keys)
        for name in DIMS:
            assert session.lookup({name: keys[name]})[name].tobytes() == answer[name].tobytes()


UVM = {"embedding_cache_type": "uvm", "gpucacheper": 0.3}


@pytest.mark.parametrize("tier", [{"gpucacheper": 1.5}, {"embedding_cache_type": "static"}, {"gpucache": False}, UVM])
def test_tiers_that_hold_all_rows(folders, tier):
    keys = {name: np.arange(75) for name in DIMS}
    with open(config_of(model_of(folders, defaults=DEFAULTS, **tier)), jax.devices()[-1], warm_up=False) as session:
        check(session.lookup(keys), keys)
        found = session._models["dlrm"].versions.current.tables.stores[0].rows.devices()
        assert found == ({jax.devices("cpu")[0]} if tier == {"gpucache": False} else {jax.devices()[-1]})


@pytest.mark.parametrize("options", [{}, UVM, {"gpucache": False}])
def test_lookups_compile_nothing(folders, options):
    """A lookup runs no program of JAX, whatever its size and its tables, so no request waits for a compiler."""
    compiled = []
    config = config_of(model_of(folders, per_sample=3, max_batch_size=100, defaults=DEFAULTS, **options))
    with open(config, warm_up=False) as session:
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: compiled.append(event) if "compile" in event else None
        )
        for size in (0, 1, 47, 48, 49, 190, 300):
            for names in (["user"], ["item", "ad"], list(DIMS)):
                keys = {name: np.arange(size) for name in names}
                check(session.lookup(keys), keys)
    assert not compiled


def test_lookups_are_counted(folders):
    with open(config_of(model_of(folders, defaults=DEFAULTS, per_sample=100, max_batch_size=1))) as session:
        keys = {name: np.arange(-1, 7 + number).reshape(1, -1) for number, name in enumerate(DIMS)}
        check(session.lookup(keys), keys)
        check(session.lookup({"ad": keys["ad"]}), {"ad": keys["ad"]})
        stats = session.stats()
    times = {"user": 1, "item": 1, "ad": 2}
    assert stats["keys"] == sum(times[name] * array.size for name, array in keys.items())
    assert stats["padding"] == sum(times.values())
    assert {name: table["hits"] for name, table in stats["tables"].items()} == {
        name: times[name] * np.isin(array, list(CONTENT[name])).sum() for name, array in keys.items()
    }


def test_no_thread_keeps_others_out(folders):
    """With one lookup at a time, a thread that asks again at once does not keep another one from its answer."""
    keys, stop = {name: np.arange(60) for name in DIMS}, threading.Event()
    with open(config_of(model_of(folders, defaults=DEFAULTS, per_sample=60)), warm_up=False) as session:
        assert session._models["dlrm"].config.num_of_worker_buffer_in_pool == 1

        def ask():
            while not stop.is_set():
                session.lookup(keys)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            begin = time.monotonic()
            for _ in range(100):
                check(session.lookup(keys), keys)
            assert time.monotonic() - begin < 30
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_an_answer_stays(folders):
    """An answer is read-only, and keeps its rows during later lookups and after the session."""
    keys = {name: np.arange(60).reshape(3, 20) for name in DIMS}
    with open(config_of(model_of(folders, defaults=DEFAULTS, per_sample=60)), warm_up=False) as session:
        answers = [session.lookup(keys) for _ in range(30)]
        for _ in range(10):
            session.lookup({name: np.full(60, 2**40) for name in DIMS})
    for answer in answers:
        check(answer, keys)
        with pytest.raises(ValueError, match="read-only"):
            answer["user"][0] = 0


def test_keys_of_32_bits(tmp_path):
    content = rows_of([1, 2, 2**32 - 1], 2)
    folder = write(tmp_path / "user", content)
    config = {**config_of(model_of({"user": (folder, 2)}, defaults={"user": 9.0})), "supportlonglong": False}
    with open(config, warm_up=False) as session:
        keys = np.array([1, 2**32 - 1, 7, -1])
        np.testing.assert_array_equal(session.lookup({"user": keys})["user"], expect(content, keys, 9.0, 2))
        assert session.models["dlrm"].key_bits == 32
        for wrong in (np.array([1, 2**32]), np.array([-2]), np.array([2**63], np.uint64)):
            with pytest.raises(RequestError, match=r"wanted 0 to 4294967295: .* supportlonglong is false"):
                session.lookup({"user": wrong})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_other_dtypes(folders, dtype):
    with open(config_of(model_of(folders, jaxsok={"row_dtype": dtype})), warm_up=False) as session:
        keys = {name: np.arange(5) for name in DIMS}
        for name, rows in session.lookup(keys).items():
            wanted = expect(CONTENT[name], keys[name], 0.0, DIMS[name])
            np.testing.assert_allclose(rows, wanted, rtol=2**-8)
        assert {table.dtype for table in session.models["dlrm"].tables.values()} == {dtype}


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ([1, 2], RequestError, "keys: got list, wanted a mapping"),
        ({}, RequestError, "got no tables, wanted at least one of"),
        ({"usr": np.array([1])}, UnknownTableError, r"table: got 'usr', wanted one of .*'user'.* model \"dlrm\""),
        ({3: np.array([1])}, UnknownTableError, "table: got 3"),
        ({"user": np.array([True])}, RequestError, r'table "user": keys must be integers, got bool\[1\]'),
        ({"user": np.array([1.0])}, RequestError, r"keys must be integers, got float64\[1\]"),
        ({"user": np.array([1], "m8[s]")}, RequestError, r"keys must be integers, got timedelta64"),
        ({"user": np.ma.masked_array(np.array([1, 2], np.uint64), [True, False])}, RequestError, "got a masked array"),
        ({"user": np.array(["1"])}, RequestError, r"keys must be integers, got <U1\[1\]; hash strings"),
        ({"user": [[1], [2, 3]]}, RequestError, "keys: got lists of different lengths"),
        ({"user": [2**70]}, RequestError, r"keys must be integers, got object\[1\]"),
        ({"user": np.int64(3)}, RequestError, "keys: got a scalar"),
        ({"user": jax.numpy.arange(3)}, RequestError, "got a jax.Array"),
        ({"user": np.zeros(513, int)}, RequestTooLargeError, r"got 513, wanted at most 512: max_batch_size \(64\)"),
        ({"user": np.zeros(1, int), "ad": np.zeros((600, 1), int)}, RequestTooLargeError, 'table "ad": keys: got 600'),
    ],
)
def test_bad_requests(session, keys, kind, message):
    """Bad requests are refused before any dispatch, and the session keeps answering."""
    before = session.stats()
    with pytest.raises(kind, match=message) as caught:
        session.lookup(keys)
    assert type(caught.value) is kind
    assert session.stats() == before
    check(session.lookup({"ad": np.arange(3)}), {"ad": np.arange(3)})


def test_models_by_name(tmp_path):
    folders = [write(tmp_path / str(number), rows_of(range(10), 2, version=number)) for number in range(2)]
    models = [model_of({"user": (folder, 2)}, name=f"model{number}") for number, folder in enumerate(folders)]
    with open(config_of(*models), warm_up=False) as session:
        assert list(session.models) == ["model0", "model1"]
        for number in range(2):
            rows = session.lookup({"user": np.arange(3)}, model=f"model{number}")["user"]
            np.testing.assert_array_equal(rows, expect(rows_of(range(10), 2, version=number), np.arange(3), 0, 2))
        for model in (None, "model2", 3):
            with pytest.raises(UnknownModelError, match=r"lookup: model: got .* wanted one of \['model0', 'model1'\]"):
                session.lookup({"user": np.arange(3)}, model=model)
        with pytest.raises(UnknownModelError, match='predict: model: got "model0", which has no dense_file'):
            session.predict({}, model="model0")


def test_counts(folders):
    with open(config_of(model_of(folders)), warm_up=False) as session:
        session.lookup({"user": np.array([0, 1, 41, -1]), "ad": np.array([9])})
        session.lookup({"user": np.array([[0]])})
        stats = session.stats()
        assert (stats["version"], stats["lookups"], stats["updates"]) == (1, 2, 0)
        assert (stats["keys"], stats["hits"], stats["missing"], stats["padding"]) == (6, 3, 2, 1)
        assert stats["hit_rate"] == 3 / 5
        assert stats["tables"]["ad"]["missing"] == 1 and stats["tables"]["ad"]["hit_rate"] == 0.0
        assert stats["tables"]["item"]["keys"] == 0 and stats["tables"]["item"]["num_rows"] == 50
        assert stats["bytes"] == session._models["dlrm"].versions.current.tables.num_bytes > 0
        assert stats["source"]["ad"] == folders["ad"][0]


def test_report(folders):
    with open(config_of(model_of(folders, thread_pool_size=3)), warm_up=False) as session:
        report = session.report()
    assert 'model "dlrm", version 1' in report
    assert report.count('table "item": ') == 1 and 'table "item": 50 rows of 4 x float32, default ' in report
    assert "models[0].thread_pool_size" in report
    assert folders["ad"][0] in report


def test_what_is_known_of_a_model(session):
    model = session.models["dlrm"]
    assert model.max_keys == {"user": 512, "item": 512, "ad": 512} and model.max_batch_size == 64
    assert dict(model.num_rows) == {name: len(content) for name, content in CONTENT.items()}
    assert model.tables["user"].default == -1.0 and model.inputs is None and model.key_bits == 64


def test_closed(folders):
    session = open(config_of(model_of(folders)), warm_up=False)
    session.close()
    session.close()
    for call in (lambda: session.lookup({"user": np.arange(3)}), session.stats, session.report):
        with pytest.raises(ServingError, match="session: got one that is closed"):
            call()


def test_closing_again_waits_for_what_has_not_ended(folders, monkeypatch):
    session = open(config_of(model_of(folders)), warm_up=False)
    reader, begun, goes_on = session._models["dlrm"].readers[0], threading.Event(), threading.Event()
    lookup = reader.lookup

    def wait(keys):
        begun.set()
        goes_on.wait(60)
        return lookup(keys)

    monkeypatch.setattr(reader, "lookup", wait)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.lookup, {"user": np.arange(3)})
        assert begun.wait(60)
        assert not session.close(0.05) and not session.close(0.05)
        goes_on.set()
        assert running.result()["user"].shape == (3, 4)
    assert session.close(60) and session.close(60)


FORKED = """
import os, signal, sys
import numpy as np
from jaxsok import serving
from jaxsok.serving.errors import ServingError

with serving.open(sys.argv[1]) as session:
    session.lookup({"user": np.array([1])})
    if (child := os.fork()) == 0:
        signal.alarm(30)
        try:
            session.lookup({"user": np.array([1])})
        except ServingError as error:
            print(error, session.close(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(session.lookup({"user": np.array([1])})["user"].tolist())
"""


def test_a_fork_is_refused_a_cache_whose_threads_it_has_not(tmp_path):
    """It would wait for ever, as under a server that forks its workers after it has opened the session."""
    folder = write(tmp_path / "user", rows_of(range(40), 3))
    config = config_of(model_of({"user": (folder, 3)}, gpucacheper=0.5, hit_rate_threshold=1.1))
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "config.json")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    refusal, answer = ran.stdout.splitlines()
    assert re.fullmatch(
        r"lookup: session: got one of process \d+, which was forked .* none of its threads\. True", refusal
    )
    assert answer == str(rows_of([1], 3)[1][None].tolist())


def test_what_cannot_be_opened(folders, tmp_path):
    wrong = {**folders, "ad": (folders["ad"][0], 4)}
    with pytest.raises(ValueError, match="emb_vector"):
        open(config_of(model_of(wrong)))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open(config_of(model_of({"user": (tmp_path / "nowhere", 4)})))
    with pytest.raises(ConfigError, match=r"models\[0\].deployed_device_list: got 99"):
        open(config_of(model_of(folders, deployed_device_list=[99])))
    with pytest.raises(ServingError, match=r"memory: got 1000 bytes free on .* wanted [0-9]+ for its tables"):
        open(config_of(model_of(folders)), memory_limit=1000)
    with pytest.raises(ConfigError, match="memory_limit"):
        open(config_of(model_of(folders)), memory_limit=-1)


# A cache on the device over rows in host memory ----------------------------------------------------------------------


def test_a_cache_that_waits_is_exact(folders):
    """A cache with a threshold above 1, which no hit rate reaches, waits for all misses."""
    options = {"gpucacheper": 0.2, "hit_rate_threshold": 1.1}
    with open(config_of(model_of(folders, defaults=DEFAULTS, **options)), warm_up=False) as session:
        for seed in range(6):
            keys = {name: np.random.default_rng(seed).integers(-2, 75, (seed, 3)) for name in DIMS}
            check(session.lookup(keys), keys)
        stats = session.stats()
        assert stats["cache"]["sync"] > 0 and stats["cache"]["background"] == 0
        assert 0 < stats["hit_rate"] < 1 and stats["bytes"] > 0
        session.refresh()
        check(session.lookup(keys), keys)


def test_a_cache_that_does_not_wait(folders):
    """A cache with a threshold of 0 returns the default for a miss, and later its row."""
    options = {"gpucacheper": 0.9, "hit_rate_threshold": 0.0}
    with open(config_of(model_of(folders, defaults=DEFAULTS, **options)), warm_up=False) as session:
        keys = {"user": np.arange(10)}
        check(session.lookup(keys), keys, {"user": {}})
        session._models["dlrm"].readers[0].cache.drain()
        check(session.lookup(keys), keys)
        with pytest.raises(RequestTooLargeError):
            session.lookup({"user": np.zeros(513, int)})


def test_a_cache_is_filled_and_refreshed_by_the_clock(folders):
    options = {"gpucacheper": 0.9, "hit_rate_threshold": 0.0, "cache_refresh_percentage_per_iteration": 0.5}
    with open(config_of(model_of(folders, defaults=DEFAULTS, refresh_interval=1, **options))) as session:
        keys = {"user": np.arange(10)}
        check(session.lookup(keys), keys)
        wait_until(lambda: session.stats()["cache"]["refreshed"] > 0)
        clock = session._models["dlrm"].readers[0].clock
    assert not clock.is_alive()


def test_memory_of_a_cache(folders):
    with pytest.raises(ServingError, match=r"memory: got 1000 bytes free on .* wanted [0-9]+ for its cache"):
        open(config_of(model_of(folders, gpucacheper=0.5)), memory_limit=1000)


CACHED = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1}

# The dense model -----------------------------------------------------------------------------------------------------

WEIGHTS = {name: np.linspace(-1, 1, dim, dtype=np.float32) for name, dim in DIMS.items()}


def export(path, folders, scale=1.0, platforms=PLATFORMS):
    """Exports a model of three inputs: keys, bags of keys, and numbers."""
    tables, _ = freeze_records(
        [(FrozenTable(name, dim, default=DEFAULTS.get(name, 0.0)), _source(name)) for name, (_, dim) in folders.items()]
    )

    def model(tables, inputs):
        found = lookup(
            tables,
            {
                "user": LookupInput("user", inputs["user"]),
                "bag": LookupInput("ad", inputs["bag"].keys, "sum", offsets=inputs["bag"].offsets),
            },
        )
        score = (found["user"] @ WEIGHTS["user"]).sum(axis=1) + found["bag"] @ WEIGHTS["ad"]
        return {"score": scale * (score + inputs["dense"]), "bag": found["bag"]}

    inputs = {"user": KeysInput("user", (2,)), "bag": BagsInput("ad"), "dense": ArrayInput()}
    export_model(path, model, tables, inputs, platforms=platforms)
    return str(path)


def _source(name):
    records = records_of(CONTENT[name], DIMS[name])
    return SizedRecords(records.num_rows, [records])


def predict(inputs, scale=1.0, content=None):
    content = CONTENT if content is None else content
    user = expect(content["user"], inputs["user"], DEFAULTS["user"], 4)
    ad = expect(content["ad"], inputs["bag"].keys, 0.0, 3)
    offsets = inputs["bag"].offsets
    bag = np.array([ad[a:b].sum(axis=0) for a, b in itertools.pairwise(offsets)], np.float32).reshape(-1, 3)
    score = (user * WEIGHTS["user"]).sum(axis=(1, 2)) + (bag * WEIGHTS["ad"]).sum(axis=1)
    return {"score": np.float32(scale) * (score + inputs["dense"]), "bag": bag}


def request(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, num_samples)
    return {
        "user": rng.integers(-2, 50, (num_samples, 2)),
        "bag": jaxsok.Bags(rng.integers(0, 8, lengths.sum()), offsets=np.concatenate([[0], np.cumsum(lengths)])),
        "dense": rng.normal(size=num_samples).astype(np.float32),
    }


@pytest.fixture(scope="module")
def artifacts(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifacts")
    return [export(folder / str(number), folders, scale=number + 1.0) for number in range(2)]


@pytest.mark.parametrize("tier", [{}, {"gpucache": False}, {"gpucacheper": 0.3, "hit_rate_threshold": 1.1}])
def test_predictions(folders, artifacts, tier):
    """Predictions over all tiers agree, and the dense model can be replaced during use."""
    model = model_of(folders, defaults=DEFAULTS, max_batch_size=12, dense_file=artifacts[0], **tier)
    with open(config_of(model), warm_up=False) as session:
        assert set(session.models["dlrm"].inputs) == {"user", "bag", "dense"}
        for number in range(2):
            for size in (1, 11):
                answer, wanted = (
                    session.predict(request(size, seed=size)),
                    predict(request(size, seed=size), number + 1),
                )
                assert answer.version == number + 1 and answer.keys() == {"score", "bag"}
                for name in wanted:
                    np.testing.assert_allclose(answer[name], wanted[name], rtol=1e-5, atol=1e-3)
            if number == 0:
                assert session.update(None, dense_file=artifacts[1]) == 2
        assert session.stats()["predicts"] == 4 and session.stats()["dense_file"] == artifacts[1]
        assert artifacts[1] in session.report()


def test_bad_predictions(folders, artifacts):
    model = model_of(folders, defaults=DEFAULTS, max_batch_size=24, per_sample=2, dense_file=artifacts[0])
    with open(config_of(model), warm_up=False) as session:
        good = request(3)
        many = jaxsok.Bags(np.zeros(60, int), offsets=np.array([0, 20, 40, 60]))
        for inputs, kind, message in (
            ({"user": good["user"]}, RequestError, "inputs: got"),
            ({**good, "dense": np.zeros(2, np.float32)}, RequestError, "batch sizes"),
            ({**good, "user": np.zeros((3, 2))}, RequestError, "integers"),
            (request(25), RequestTooLargeError, "got 25 samples, wanted at most 24"),
            ({**good, "bag": many}, RequestTooLargeError, 'table "ad": keys: got 60, wanted at most 48'),
        ):
            with pytest.raises(kind, match=message):
                session.predict(inputs)
        np.testing.assert_allclose(session.predict(good)["score"], predict(good)["score"], rtol=1e-5, atol=1e-3)


def test_models_that_do_not_fit(folders, artifacts, tmp_path):
    with pytest.raises(ServingError, match=r'dense_file: .* got "user" of bfloat16\[4\], wanted float32\[4\]'):
        open(config_of(model_of(folders, dense_file=artifacts[0], jaxsok={"row_dtype": "bfloat16"})))
    only = {"user": folders["user"]}
    with pytest.raises(UnknownTableError, match=r'dense_file: .* tables: got \[.*\], wanted "'):
        open(config_of(model_of(only, dense_file=artifacts[0])))
    with open(config_of(model_of(folders)), warm_up=False) as session:
        with pytest.raises(FileNotFoundError):
            session.update(None, dense_file=tmp_path / "nowhere")
        assert session.stats()["version"] == 1


@pytest.mark.parametrize(("tier", "place"), [({"gpucache": False}, 0), ({}, 1), (CACHED, 1)])
def test_the_dense_model_runs_where_the_tables_are(folders, tmp_path, monkeypatch, tier, place):
    """A dense model runs on the tables' platform, whatever the process's default is."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")  # Nothing may read it.
    device = jax.devices("cpu")[place]
    path = export(tmp_path / "model", folders, platforms=["cpu"])
    model = model_of(folders, defaults=DEFAULTS, max_batch_size=12, dense_file=path, **tier)
    with open(config_of(model), device, warm_up=False) as session:
        np.testing.assert_allclose(
            session.predict(request(5))["score"], predict(request(5))["score"], rtol=1e-5, atol=1e-3
        )
        session.update(None, dense_file=path)
        out = session._models["dlrm"].versions.current.tables.stores[0].rows.devices()
        assert out == ({jax.devices("cpu")[0]} if tier else {device})

    class Gpu:
        platform = "gpu"

        def __str__(self):
            return "cuda:3"

    with pytest.raises(
        ServingError, match=r"got a program for \['cpu'\], wanted one for 'cuda', the platform of cuda:3"
    ):
        load_model(path, Gpu())


def export_of(path, folders, model, inputs, dtype="float32"):
    """Exports a small model over the tables of the folders."""
    given = [
        (FrozenTable(name, dim, default=DEFAULTS.get(name, 0.0), dtype=dtype), _source(name))
        for name, (_, dim) in folders.items()
    ]
    export_model(path, model, freeze_records(given)[0], inputs, platforms=PLATFORMS)
    return str(path)


def test_dense_models_over_rows_in_host_memory_are_refused(folders, artifacts):
    """Also where an update brings them."""
    with open(config_of(model_of(folders, defaults=DEFAULTS, **UVM)), warm_up=False) as session:
        with pytest.raises(ServingError, match=r"update: .* the device reads in host memory \(uvm\)"):
            session.update(None, dense_file=artifacts[0])
        assert session.models["dlrm"].inputs is None


@pytest.mark.parametrize("tier", [{}, {"gpucacheper": 0.3, "hit_rate_threshold": 1.1}])
def test_models_that_reduce_over_the_batch_see_no_padding(folders, tmp_path, tier):
    def model(tables, inputs):
        rows = lookup(tables, {"user": LookupInput("user", inputs["user"])})["user"]
        return {"rows": rows, "mean": rows.mean(axis=0)}

    path = export_of(tmp_path / "model", folders, model, {"user": KeysInput("user")})
    options = {"max_batch_size": 12, "dense_file": path, **tier}
    with open(config_of(model_of(folders, defaults=DEFAULTS, **options)), warm_up=True) as session:
        for keys in (np.array([1, 2, 41]), np.arange(11)):
            answer, wanted = session.predict({"user": keys}), expect(CONTENT["user"], keys, DEFAULTS["user"], 4)
            np.testing.assert_array_equal(answer["rows"], wanted)
            np.testing.assert_allclose(answer["mean"], wanted.mean(axis=0), rtol=1e-6)


def _two_tables(tables, inputs):
    """Reads one input in two tables, with keys that are picked and masked; one table has no input."""
    user, words = inputs["user"], inputs["pairs"]
    masked = jax.numpy.where((inputs["flag"] > 0)[:, None], words[:, 1], np.uint32(2**32 - 1))
    found = lookup(
        tables,
        {
            "a": LookupInput("user", user),
            "b": LookupInput("item", user),
            "c": LookupInput("item", masked),
            "d": LookupInput("ad", jax.numpy.concatenate([user, words[:, 0]])),
        },
    )
    return {name: found[name] for name in "abc"} | {"d": found["d"].reshape(2, -1, 3).transpose(1, 0, 2)}


@pytest.mark.parametrize("tier", [{}, CACHED])
def test_one_input_read_in_two_tables(folders, tmp_path, tier):
    inputs = {"user": KeysInput("user"), "pairs": KeysInput("item", (2,)), "flag": ArrayInput((), "int32")}
    path = export_of(tmp_path / "model", folders, _two_tables, inputs)
    with open(config_of(model_of(folders, defaults=DEFAULTS, dense_file=path, **tier)), warm_up=False) as session:
        served = session._models["dlrm"].versions.current.served
        assert served.lookups == {"user": ("user",), "item": ("pairs", "user"), "ad": ("pairs", "user")}
        for seed in range(3):
            rng = np.random.default_rng(seed)
            user, pairs, flag = rng.integers(0, 60, 7), rng.integers(0, 60, (7, 2)), rng.integers(0, 2, 7)
            got = session.predict({"user": user, "pairs": pairs, "flag": flag.astype(np.int32)})
            wanted = {
                "a": ("user", user),
                "b": ("item", user),
                "c": ("item", np.where(flag > 0, pairs[:, 1], -1)),
                "d": ("ad", np.stack([user, pairs[:, 0]], 1)),
            }
            for name, (table, keys) in wanted.items():
                rows = expect(CONTENT[table], keys, DEFAULTS.get(table, 0.0), DIMS[table])
                np.testing.assert_array_equal(got[name], rows, err_msg=name)


def _hash_keys(tables, inputs):
    return lookup(tables, {"user": LookupInput("user", inputs["user"] % np.uint32(5))})["user"]


def _constant(tables, inputs):
    found = lookup(tables, {"user": LookupInput("user", inputs["user"]), "one": LookupInput("user", np.array([3]))})
    return found["user"] + found["one"]


def _swap_keys(tables, inputs):
    return lookup(tables, {"user": LookupInput("user", inputs["user"][:, ::-1])})["user"]


def _half_masked(tables, inputs):
    keys = jax.numpy.where(inputs["user"] > 3, inputs["user"], np.uint32(2**32 - 1))
    return lookup(tables, {"user": LookupInput("user", keys)})["user"]


def _in_a_loop(tables, inputs):
    def step(total, words):
        return total, lookup(tables, {"user": LookupInput("user", words[None])})["user"][0]

    return jax.lax.scan(step, 0.0, inputs["user"])[1]


def _raw(tables, inputs):
    store, _ = tables.spec.places["user"]
    rows = lookup(tables, {"user": LookupInput("user", inputs["user"])})["user"]
    return rows + tables.stores[store].rows.max()


@pytest.mark.parametrize("model", [_hash_keys, _constant, _swap_keys, _half_masked, _in_a_loop, _raw])
def test_models_that_work_out_keys_are_refused_over_a_cache(folders, tmp_path, model):
    """A model that computes keys is refused over a cache, which cannot fetch them, and served over full tables."""
    only = {"user": folders["user"]}
    path = export_of(tmp_path / "model", only, model, {"user": KeysInput("user")})
    with pytest.raises(ServingError, match=r"dense_file: .* reads \['user'\] by keys that are not .* gpucacheper"):
        open(config_of(model_of(only, dense_file=path, **CACHED)), warm_up=False)
    with open(config_of(model_of(only, **CACHED)), warm_up=False) as session:
        with pytest.raises(ServingError, match=r"update: model .* by keys that are not"):
            session.update(None, dense_file=path)
        assert session.stats()["version"] == 1
    with open(config_of(model_of(only, dense_file=path)), warm_up=False) as session:
        session.predict({"user": np.arange(3)})


@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
@pytest.mark.parametrize("tier", [{}, CACHED, {"gpucache": False}], ids=["device", "cached", "read"])
def test_models_know_which_keys_have_rows(folders, tmp_path, tier, row_dtype):
    """Wherever the rows are; and they may pick their keys from those of an input."""
    only = {"user": folders["user"]}

    def knows(tables, inputs):
        keys = jax.numpy.take(inputs["user"], np.array([1, 0, 7]), axis=1)  # beyond the end: padding
        return find_rows(tables, "user", keys)[1].astype(jax.numpy.int32).reshape(-1, 3)

    path = export_of(tmp_path / "model", only, knows, {"user": KeysInput("user", (2,))}, dtype=row_dtype)
    model = model_of(only, dense_file=path, **{**tier, "jaxsok": {"row_dtype": row_dtype}})
    with open(config_of(model), warm_up=False) as session:
        for _ in range(2):
            found = session.predict({"user": np.array([[3, 10**6], [-1, 5]])})
            assert next(iter(found.values())).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_dense_model_that_reads_other_tables_may_come_during_a_prediction(folders, tmp_path, monkeypatch):
    """Keys gathered for an old dense model are gathered again if a model that reads other tables replaces it."""

    def reads(table):
        return lambda tables, inputs: lookup(tables, {"rows": LookupInput(table, inputs["user"])})["rows"]

    paths = [
        export_of(tmp_path / table, folders, reads(table), {"user": KeysInput(table)}) for table in ("user", "item")
    ]
    model = model_of(folders, defaults=DEFAULTS, dense_file=paths[0], **CACHED)
    with open(config_of(model), warm_up=False) as session:
        cache, keys = session._models["dlrm"].readers[0].cache, np.arange(30, 36)
        lookup_tables, asked = cache.lookup_tables, []

        def updated_first(found):
            asked.append(sorted(found))
            if len(asked) == 1:
                session.update(None, dense_file=paths[1])
            return lookup_tables(found)

        monkeypatch.setattr(cache, "lookup_tables", updated_first)
        answer = session.predict({"user": keys})
        assert answer.version == 2 and asked == [["user"], ["item"]]
        np.testing.assert_array_equal(answer["output"], expect(CONTENT["item"], keys, DEFAULTS["item"], 4))


def test_versions_that_went_are_not_held(folders, tmp_path):
    """Host rows of versions that were replaced are freed."""
    with open(config_of(model_of(folders, **CACHED)), warm_up=False) as session:
        first = weakref.ref(session._models["dlrm"].versions.current.tables.stores[0].rows)
        for number in range(2):
            session.update({"user": write(tmp_path / str(number), rows_of(range(40), 4, version=number + 1))})
            session.lookup({"user": np.arange(3)})
        session._models["dlrm"].readers[0].cache.drain()
        gc.collect()
        assert first() is None


def _threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("jaxsok")}


@pytest.mark.parametrize("step", ["fill", "lookup"])
def test_an_open_that_fails_leaves_no_thread(folders, monkeypatch, step):
    """An open that fails leaves no cache and no thread that fills or compiles."""

    def fails(*args, **more):
        raise RuntimeError("out of memory")

    before, closed = _threads(), []
    close = cache_lib.DeviceCache.close
    monkeypatch.setattr(cache_lib.DeviceCache, step, fails)
    monkeypatch.setattr(
        cache_lib.DeviceCache, "close", lambda self, *rest: (closed.append(self), close(self, *rest))[1]
    )
    options = {"refresh_interval": 1, "cache_refresh_percentage_per_iteration": 0.5}
    with pytest.raises(RuntimeError, match="out of memory"):
        open(config_of(model_of(folders, **options, **CACHED)))
    assert _threads() == before and len(closed) == 1


def test_a_refresh_that_fails_is_logged_and_tried_again(folders, monkeypatch, caplog):
    options = {"refresh_interval": 1, "cache_refresh_percentage_per_iteration": 0.5}
    with open(config_of(model_of(folders, **options, **CACHED)), warm_up=False) as session:
        served, asked = session._models["dlrm"], threading.Semaphore(0)

        def fails():
            asked.release()
            raise ServingError("the disk is gone") if len(caplog.records) else OSError("the disk is gone")

        monkeypatch.setattr(served.readers[0].cache, "refresh", fails)
        for _ in range(3):
            assert asked.acquire(timeout=30)
        assert served.readers[0].clock.is_alive() and "the disk is gone" in caplog.text
    assert not served.readers[0].clock.is_alive()


def asked_of(rng, number):
    """Returns the keys of a lookup by table, or the inputs of a prediction."""
    if number % 2:
        return {name: rng.integers(-2, 75, (number, 3)) for name in DIMS if number % 3 or name != "item"}
    return request(int(rng.integers(0, 12)), seed=number)


def read_of(asked):
    """Returns the keys read of each table; in a prediction, those of the inputs that look it up."""
    if "bag" in asked:
        begin, end = asked["bag"].offsets[0], asked["bag"].offsets[-1]
        asked = {"user": asked["user"], "ad": asked["bag"].keys[begin:end]}
    return {name: [int(key) % 2**64 for key in keys.reshape(-1)] for name, keys in asked.items()}


@pytest.mark.parametrize("tier", [{}, {"gpucache": False}])
def test_all_keys_that_are_read_are_counted(folders, artifacts, tier):
    """Counts hold each occurrence by table, in lookups and predictions: present keys, missing keys, and padding."""
    wanted = {name: collections.Counter(keys=0, hits=0, missing=0, padding=0) for name in DIMS}
    rng = np.random.default_rng(0)
    part = {**request(3), "bag": jaxsok.Bags(np.array([0, 1, 7, 2, 3]), offsets=np.array([1, 1, 3, 4]))}
    model = model_of(folders, max_batch_size=12, dense_file=artifacts[0], **tier)
    with open(config_of(model), warm_up=False) as session:
        for number in range(1, 10):
            asked = part if number == 8 else asked_of(rng, number)
            (session.predict if "bag" in asked else session.lookup)(asked)
            for name, keys in read_of(asked).items():
                for key in keys:
                    kind = "padding" if key == 2**64 - 1 else "hits" if key in CONTENT[name] else "missing"
                    wanted[name].update(["keys", kind])
        stats = session.stats()
    assert (stats["lookups"], stats["predicts"]) == (5, 4)
    for name, array in wanted.items():
        assert {kind: stats["tables"][name][kind] for kind in array} == array, name
    total = sum(wanted.values(), collections.Counter())
    assert {kind: stats[kind] for kind in total} == total and min(total.values()) > 0
    assert stats["hit_rate"] == total["hits"] / (total["hits"] + total["missing"])


@pytest.mark.parametrize("threshold", [1.1, 0.0])
def test_all_keys_that_are_read_over_a_cache_are_counted(folders, artifacts, threshold):
    """Over a cache, counts by table hold occurrences, and each call's distinct keys in the cache and in no tier."""
    names = ("keys", "padding", "distinct", "hits", "misses", "missing")
    wanted, cached = (
        {name: collections.Counter(dict.fromkeys(names, 0)) for name in DIMS},
        {name: set() for name in DIMS},
    )
    options = {"gpucacheper": 0.9, "hit_rate_threshold": threshold}
    model = model_of(folders, max_batch_size=12, dense_file=artifacts[0], **options)
    rng = np.random.default_rng(0)
    with open(config_of(model), warm_up=False) as session:
        for number in range(1, 10):
            asked = asked_of(rng, number)
            (session.predict if "bag" in asked else session.lookup)(asked)
            session._models["dlrm"].readers[0].cache.drain()
            for name, keys in read_of(asked).items():
                distinct = set(keys) - {2**64 - 1}
                misses = distinct - cached[name]
                found = {key for key in misses if key in CONTENT[name]}
                cached[name] |= found
                counts = len(keys), keys.count(2**64 - 1), len(distinct), len(distinct - misses), len(misses)
                wanted[name].update(dict(zip(names, (*counts, len(misses - found)), strict=True)))
        stats = session.stats()
    for name, array in wanted.items():
        assert {kind: stats["tables"][name][kind] for kind in names} == array, name
        assert stats["tables"][name]["hit_rate"] == array["hits"] / array["distinct"]
    total = sum(wanted.values(), collections.Counter())
    assert {kind: stats[kind] for kind in names} == total and min(total.values()) > 0


@pytest.mark.parametrize("warm_up", [True, False])
def test_counts_of_a_cache(folders, warm_up):
    """Counts over a cache are by table, as over other tiers, and exclude the warm-up."""
    with open(config_of(model_of(folders, gpucacheper=0.9, hit_rate_threshold=1.1)), warm_up=warm_up) as session:
        before = session.stats()
        assert (before["lookups"], before["keys"], before["padding"], before["cache"]["lookups"]) == (0, 0, 0, 0)
        session.lookup({"user": np.array([0, 1, 41, -1]), "ad": np.array([9])})
        session.lookup({"user": np.array([[0]])})
        stats = session.stats()
        assert (stats["lookups"], stats["keys"], stats["padding"], stats["missing"]) == (2, 6, 1, 2)
        assert (stats["hits"], stats["misses"], stats["cache"]["lookups"]) == (1, 4, 2)
        user, ad = stats["tables"]["user"], stats["tables"]["ad"]
        assert (user["keys"], user["padding"], ad["keys"], ad["padding"]) == (5, 1, 1, 0)
        assert (user["hits"], user["misses"], user["missing"]) == (1, 3, 1)
        assert (ad["hits"], ad["misses"], ad["missing"], ad["hit_rate"]) == (0, 1, 1, 0.0)


def test_a_cache_is_filled_by_the_hotness_of_hps(tmp_path):
    """`meta` decides which rows fill a cache; a table without it starts with its first rows."""
    rng, tables = np.random.default_rng(5), {}
    hot = {name: rng.permutation(1000).astype(np.uint32) for name in ("user", "item", "ad")}
    for name, frequency in hot.items():
        records = dataclasses.replace(records_of(rows_of(range(1000), 4), 4), frequency=frequency)
        write_hps(tmp_path / name, records, hotness=name != "item")
        tables[name] = tmp_path / name, 4
    hot["item"] = np.arange(1000)[::-1]
    options = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1, "cache_refresh_percentage_per_iteration": 0.5}
    with open(config_of(model_of(tables, **options)), warm_up=False) as session:
        for name, keys in session._models["dlrm"].readers[0].cache.cached_keys().items():
            assert set(keys.tolist()) == set(np.flatnonzero(hot[name] >= 700).tolist())


@pytest.mark.parametrize("options", [{}, {"gpucache": False}, {"gpucacheper": 0.5}], ids=["device", "host", "cache"])
def test_the_hotness_of_hps_is_not_read_for_nothing(tmp_path, options):
    """A broken `meta` fails neither `open` nor an update if it fills no cache."""
    content = rows_of(range(100), 4)
    write(tmp_path / "user", content)
    (tmp_path / "user" / "meta").write_bytes(b"short")
    with open(config_of(model_of({"user": (tmp_path / "user", 4)}, **options)), warm_up=False) as session:
        assert session.update({"user": tmp_path / "user"}) == 2
    filled = {"gpucacheper": 0.5, "cache_refresh_percentage_per_iteration": 0.5}
    with pytest.raises(ValueError, match=r"^open: .*meta: byte 5.*init_ec: false"):
        open(config_of(model_of({"user": (tmp_path / "user", 4)}, **filled)), warm_up=False)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_cache_is_filled_with_what_is_hot(tmp_path, monkeypatch, is_known):
    """A cache is filled with the most frequent rows if files have frequencies, otherwise with the first rows."""
    content, open_table = rows_of(range(2000), 4), folders_lib.open_table

    def open_counted(*args, **options):
        source = open_table(*args, **options)

        def chunks():
            for records in source.chunks():
                yield dataclasses.replace(records, frequency=np.asarray(records.keys, np.uint32) if is_known else None)

        return dataclasses.replace(source, chunks=chunks)

    monkeypatch.setattr(folders_lib, "open_table", open_counted)
    tables = {"user": (write(tmp_path / "user", content), 4)}
    options = {"gpucacheper": 0.5, "hit_rate_threshold": 1.1, "cache_refresh_percentage_per_iteration": 0.5}
    with open(config_of(model_of(tables, **options)), warm_up=False) as session:
        cached = session._models["dlrm"].readers[0].cache.cached_keys()["user"]
        assert len(cached) > 300
        if is_known:
            assert (cached >= 900).mean() > 0.9
        else:
            assert (cached < 1100).mean() > 0.9
        session.lookup({"user": np.arange(100)})


# Keys without a row: serving reads what `find` reads -----------------------------------------------------------------

TIERS = {"device": {}, "cache": CACHED, "host": {"gpucache": False}}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Returns full exports of `declare_untrained`, by the dtype of rows."""
    folder = tmp_path_factory.mktemp("unknown")
    for dtype in ("float32", "bfloat16"):
        checkpoint.export_full(folder / dtype, *declare_untrained(dtype))
    return {dtype: folder / dtype for dtype in ("float32", "bfloat16")}


def as_trained(folder, names=None, **options):
    """Returns a configuration without a default value, so that of training applies."""
    names = names or [*find_in_training(*declare_untrained())]
    return model_of({name: (folder, UNKNOWN_DIM) for name in names}, default_value_for_each_table=[], **options)


# A tier reads what the record of its tables says, whatever the dtype is: each dtype once, and each tier twice.
@pytest.mark.parametrize(
    ("tier", "dtype", "row_dtype"),
    [
        ("device", "float32", None),
        ("host", "bfloat16", None),
        ("cache", "float32", None),
        ("device", "float32", "int8"),
        ("host", "float32", "float8_e4m3fn"),
        ("cache", "bfloat16", None),
    ],
)
def test_missing_keys_read_what_find_reads(exports, tier, dtype, row_dtype):
    """Missing keys read the bits of `find`, for every initializer and both values of `unknown`."""
    more = {} if row_dtype is None else {"jaxsok": {"row_dtype": row_dtype}}
    wanted = find_in_training(*declare_untrained(dtype))
    with open(config_of(as_trained(exports[dtype], **TIERS[tier], **more)), warm_up=False) as session:
        for _ in range(2):  # The second time a cache has the rows.
            answer = session.lookup({name: ASKED for name in wanted})
            for name, rows in wanted.items():
                counts = np.ones(len(ASKED), bool) if row_dtype is None else ~np.isin(ASKED, KNOWN)
                np.testing.assert_array_equal(answer[name][counts], rows[counts], err_msg=name)
        described = session.models["dlrm"].tables
        assert described["uniform"].initial.table == "uniform" and described["normal_zeros"].initial is None
        assert 'the initial row: uniform(-1, 2) of table "uniform", seed 1099511627783' in session.report()


@pytest.mark.parametrize("row_dtype", [None, "int8"])
@pytest.mark.parametrize("tier", TIERS)
def test_models_read_what_find_reads(exports, tmp_path, tier, row_dtype):
    """A dense model reads what `find` reads, in bags too."""
    names = ["normal", "uniform", "normal_zeros"]
    more = {} if row_dtype is None else {"jaxsok": {"row_dtype": row_dtype}}
    collection, state = declare_untrained()
    tables = jaxsok.serving.freeze(collection, state, tables=names, dtype=row_dtype)

    def model(tables, inputs):
        bags = LookupInput("normal", inputs["bag"].keys, "sum", offsets=inputs["bag"].offsets)
        return lookup(tables, {**{name: inputs[name] for name in names}, "bag": bags})

    inputs = {**{name: KeysInput(name) for name in names}, "bag": BagsInput("normal")}
    export_model(tmp_path / "model", model, tables, inputs, platforms=PLATFORMS)
    assert load_model(tmp_path / "model").tables == tables.tables
    missing = ASKED[~np.isin(ASKED, KNOWN)]
    request = {name: missing for name in names}
    request["bag"] = jaxsok.Bags(missing, offsets=np.arange(len(missing) + 1))
    wanted = find_in_training(collection, state, missing)
    wanted["bag"] = wanted["normal"]
    config = as_trained(exports["float32"], names, dense_file=str(tmp_path / "model"), **TIERS[tier], **more)
    with open(config_of(config), warm_up=False) as session:
        answer = session.predict(request)
        for name in request:
            np.testing.assert_array_equal(answer[name], wanted[name], err_msg=name)


def test_http_reads_what_find_reads(exports):
    httpx = pytest.importorskip("httpx")
    wanted = find_in_training(*declare_untrained())
    session = open(config_of(as_trained(exports["float32"])), warm_up=False)
    with server_cases.serving(session) as found, httpx.Client(base_url=found.address, timeout=30) as client:
        pages = client.get("/v1/models/dlrm").json()["tables"]
        for name in ("uniform", "normal_zeros"):
            assert str(pages[name]["default"]).startswith("the initial row" if name == "uniform" else "0.0")
            answer = client.post("/v1/models/dlrm/lookup", json={"keys": {name: ASKED.tolist()}}).json()
            np.testing.assert_array_equal(np.float32(answer["rows"][name]), wanted[name])


def test_a_default_that_is_configured_counts(exports):
    """A configured default takes precedence; tables that no other program could serve need it."""
    collection = jaxsok.Collection(
        [
            jaxsok.TableSpec(name, UNKNOWN_DIM, jaxsok.optim.sgd(0.1), initializer=initializer, capacity=8)
            for name, initializer in TRACED.items()
        ],
        [],
    )
    folder = exports["float32"].parent / "traced"
    checkpoint.export_full(folder, collection, collection.init())
    for name in TRACED:
        with pytest.raises(ServingError, match=rf"default_value_for_each_table: got no number, .* reads {name}\("):
            open(config_of(as_trained(folder, [name])))
    model = {**as_trained(folder, [*TRACED]), "default_value_for_each_table": [0.5, -0.5]}
    with open(config_of(model), warm_up=False) as session:
        answer = session.lookup({name: np.array([5]) for name in TRACED})
        assert [answer[name].tolist() for name in TRACED] == [[[0.5] * 4], [[-0.5] * 4]]
    model = {**as_trained(exports["float32"], ["normal", "uniform"]), "default_value_for_each_table": [0.25, None]}
    with open(config_of(model), warm_up=False) as session:
        answer = session.lookup({"normal": np.array([5]), "uniform": np.array([5])})
        assert answer["normal"].tolist() == [[0.25] * 4]
        np.testing.assert_array_equal(
            answer["uniform"], find_in_training(*declare_untrained(), np.array([5]))["uniform"]
        )


@pytest.mark.parametrize("tier", TIERS)
def test_updates_keep_what_missing_keys_read(exports, tmp_path, tier):
    """Updates keep what missing keys read: a delta brings rows, and an export of other initial rows is refused."""
    names = ["normal", "constant"]
    collection, state = declare_untrained()
    rows = np.full((1, UNKNOWN_DIM), 8.0, np.float32)
    base = tmp_path / "base"
    checkpoint.export_full(base, collection, state)
    state, _, _ = collection.assign(jax.tree.map(jnp.copy, state), "normal", np.array([5], np.uint64), rows)
    checkpoint.export_delta(tmp_path / "delta", collection, state, base)
    checkpoint.export_full(tmp_path / "other", *declare_untrained(seed=1))
    wanted = find_in_training(collection, state)
    with open(config_of(as_trained(base, names, **TIERS[tier])), warm_up=False) as session:
        assert session.update(tmp_path / "delta") == 2
        answer = session.lookup({name: ASKED for name in names})
        for name in names:
            np.testing.assert_array_equal(answer[name], wanted[name])
        assert answer["normal"][1].tolist() == [8.0] * 4
        with pytest.raises(ServingError, match=r"seed 1, wanted the initial row: .*1099511627783, .*another session"):
            session.update(tmp_path / "other")
        assert session.lookup({"normal": ASKED}).version == 2
