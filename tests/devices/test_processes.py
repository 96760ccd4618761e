"""Several processes: the tables of a single process, refusals in all of them, and an end when a process dies."""

import collections
import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import process_worker
import programs
import pytest
from waiting import free_port, wait_for_end, wait_until

import jaxsok
from jaxsok import processes as processes_lib

WORKER = pathlib.Path(__file__).with_name("process_worker.py")
END_S = 60  # the limit for a process to end after another has died

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="processes share CPUs, not a GPU")


def start(jobs, folder, num_processes, num_devices):
    """Starts processes with `num_devices` devices each, which run the jobs; several jobs get a folder each."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": f"{pathlib.Path(jaxsok.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PORT": str(free_port()),
        "NUM_PROCESSES": str(num_processes),
        "NUM_DEVICES": str(num_devices),
    }
    processes = []
    for number in range(num_processes):
        with (folder / f"{number}.err").open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), jobs, str(folder)],
                    env={**environment, "PROCESS_ID": str(number)},
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    return processes


def results_of(job, folder, num_processes, num_devices, timeout_s=180):
    """Returns the results that each process wrote."""
    codes = wait_for_end(start(job, folder, num_processes, num_devices), folder, timeout_s=timeout_s)
    assert codes == [0] * num_processes, [(folder / f"{n}.err").read_text()[-1500:] for n in range(num_processes)]
    return [dict(np.load(folder / f"{number}.npz")) for number in range(num_processes)]


def results_of_jobs(jobs, folder, num_devices, timeout_s):
    """Returns each job's results from two processes, which start only once."""
    for job in jobs:
        (folder / job).mkdir()
    codes = wait_for_end(start(",".join(jobs), folder, 2, num_devices), folder, timeout_s=timeout_s)
    assert codes == [0, 0], [(folder / f"{n}.err").read_text()[-1500:] for n in range(2)]
    return {job: [dict(np.load(folder / job / f"{number}.npz")) for number in range(2)] for job in jobs}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Returns the results of jobs of two processes with two devices each."""
    jobs = ("train", "operations", "evict", "host memory", "other meshes")
    return results_of_jobs(jobs, tmp_path_factory.mktemp("together"), 2, timeout_s=240)


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Returns the errors of two processes with one device each; those of checkpoints only where Orbax is installed."""
    jobs = ("refusals", "errors") if importlib.util.find_spec("orbax") else ("refusals",)
    return results_of_jobs(jobs, tmp_path_factory.mktemp("raised"), 1, timeout_s=400)


@functools.cache
def one_process(num_shards, wire="float32"):
    """Runs the same training in this process over four devices; with None, on one device without a mesh."""
    mesh = None if num_shards is None else programs.mesh(num_shards)
    axis = None if num_shards is None else "data"
    exchange = process_worker.WIRES[wire]
    tables, features = process_worker.TABLES, process_worker.FEATURES
    collection = jaxsok.Collection(tables, features, mesh=mesh, axis=axis, exchange=exchange)
    state, results = process_worker.train(collection)
    return collection, state, results


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("train", id="2 processes x 2 devices"),
        pytest.param(
            ("train stacked", 2, 2), id="2 processes x 2 devices, several steps a call", marks=pytest.mark.slow
        ),
        pytest.param(("train narrow", 4, 1), id="4 processes x 1 device, narrow on the wire", marks=pytest.mark.slow),
        pytest.param(("train ahead", 2, 2), id="2 processes x 2 devices, lookups ahead", marks=pytest.mark.slow),
    ],
)
def trained(request, tmp_path_factory):
    """Returns the wire, and a training with growth over four devices in several processes."""
    if isinstance(request.param, str):
        return "float32", request.getfixturevalue("together")[request.param]
    job, *sizes = request.param
    return "narrow" if job == "train narrow" else "float32", results_of(job, tmp_path_factory.mktemp("trained"), *sizes)


def union(results, table, columns):
    """Returns a table over all processes by key."""
    parts = {column: [result[f"{table.name}.{column}"] for result in results] for column in columns}
    if table.placement == jaxsok.REPLICATED:
        for column in columns:
            for part in parts[column][1:]:
                np.testing.assert_array_equal(part, parts[column][0])
        whole = {column: parts[column][0] for column in columns}
    else:
        whole = {column: np.concatenate(parts[column]) for column in columns}
    assert len(np.unique(whole["keys"])) == len(whole["keys"]), "two processes have a row of one key"
    order = np.argsort(whole["keys"])
    return {column: values[order] for column, values in whole.items()}


def test_the_least_number_of_all_processes(monkeypatch):
    monkeypatch.setattr(processes_lib, "gather", lambda op, own: [own, str(7 * 2**31 + 1), str(2**32 + 5)])
    assert processes_lib.least("grow", 2**40) == 2**32 + 5
    assert processes_lib.least("grow", 3) == 3


def test_a_call_that_was_interrupted_is_made_again(monkeypatch):
    """It gives what it gave before, which others may have read; windows go on to the next gathering."""
    given = {}

    def read(key, timeout_ms):
        if key not in given:
            raise KeyboardInterrupt
        return given[key]

    client = types.SimpleNamespace(
        key_value_set=lambda key, value, allow_overwrite: given.update({key: value}),
        key_value_delete=lambda key: given.pop(key, None),
        blocking_key_value_get=read,
    )
    for name, value in {"_client": lambda: client, "_num_gathered": collections.Counter(), "_given": {}}.items():
        monkeypatch.setattr(processes_lib, name, value)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for topic in ("init", "window"):
        for message in ("first", "second \udcff"):
            with pytest.raises(KeyboardInterrupt):
                processes_lib.gather(topic, message)
    assert sorted(given) == ["jaxsok/gather/calls/0/0", "jaxsok/gather/window/0/0", "jaxsok/gather/window/1/0"]
    given["jaxsok/gather/calls/0/1"] = ":init:other: one"
    assert processes_lib.gather("init", "third") == ["first", "other: one"]
    given["jaxsok/gather/calls/1/1"] = ":grow:1"
    with pytest.raises(ValueError, match='init: got a call of "grow" in process 1, wanted the same calls'):
        processes_lib.gather("init", "fourth \udcff")
    given["jaxsok/gather/calls/2/1"] = ":init:"
    assert processes_lib.gather("init", "fifth \udcff") == ["fifth \\udcff", ""]


@pytest.mark.parametrize("num_shards", [process_worker.NUM_SHARDS, None], ids=["one process", "one device"])
def test_tables_of_processes_are_those_of(num_shards, trained):
    """Rows and optimizer state by key equal those of one process: four devices to the bit, one within rounding."""
    wire, processes = trained
    collection, state, _ = one_process(num_shards, wire if num_shards else "float32")
    for table in process_worker.TABLES:
        want = programs.by_key(collection, state, table.name)
        got = union(processes, table, tuple(want))
        np.testing.assert_array_equal(got.pop("keys"), want.pop("keys"), err_msg=table.name)
        if num_shards is None and wire == "narrow":
            continue  # single-process meshes test the rounding of a narrow wire (test_many_devices.py)
        tolerance = {"rtol": 0, "atol": 0} if num_shards else {"rtol": 1e-4, "atol": 1e-5}
        for column, values in want.items():
            np.testing.assert_allclose(got[column], values, err_msg=f"{table.name}: {column}", **tolerance)


def test_results_are_the_same_in_all_processes(trained):
    """Losses, counts, rows and growth agree in all processes, and with one device."""
    wire, processes = trained
    collection, state, results = one_process(None)
    first = processes[0]
    for result in processes:
        for name in ("losses", "inserted", "capacities", "num_grown", "num_rows"):
            np.testing.assert_array_equal(result[name], first[name], err_msg=name)
    # The mean is over 32 samples of embeddings from bfloat16 rows with 8 bits.
    rtol = 1e-5 if wire == "float32" else 0.02
    np.testing.assert_allclose(first["losses"], [loss for loss, _ in results], rtol=rtol)
    np.testing.assert_array_equal(first["inserted"], [inserted for _, inserted in results])
    num_rows = collection.num_rows(state)
    assert first["num_rows"].tolist() == [num_rows[table.name] for table in process_worker.TABLES]
    assert first["num_grown"] >= 1


def test_all_processes_have_the_salts_that_the_first_drew(trained):
    """The salts agree in the initial states and after an index is rebuilt."""
    _, processes = trained
    for name in ("salts", "salts_after_rebuild"):
        everywhere = np.concatenate([result[name] for result in processes], axis=1)  # [store, shard, word]
        np.testing.assert_array_equal(everywhere, np.broadcast_to(everywhere[:, :1], everywhere.shape))
    first, second = (processes[0][name][:, 0] for name in ("salts", "salts_after_rebuild"))
    assert (first[0] != second[0]).all() and (first[1:] == second[1:]).all()


def test_operations_of_processes_are_those_of_one(together):
    """Records enter the shards that own them, whichever process has the records; reads agree everywhere."""
    results = together["operations"]
    tables, features = process_worker.TABLES, process_worker.FEATURES
    declared = jaxsok.Collection(tables, features, mesh=programs.mesh(process_worker.NUM_SHARDS), axis="data")
    state, read = process_worker.operate(declared)
    for name, values in read.items():
        for i, want in enumerate(values):
            for result in results:
                np.testing.assert_array_equal(result[f"read.{name}.{i}"], want)
    assert read["user"][3].sum() >= 78 and read["num_erased"][0] > 700
    for table in tables:
        names = [state.name for state in table.optimizer.state_specs(table.dim)]
        got, want = union(results, table, ["keys", "rows", *names]), declared.export_table(state, table.name)
        assert set(got["keys"].tolist()) == set(want["keys"].tolist())
        order, ordered = np.argsort(got["keys"]), np.argsort(want["keys"])
        np.testing.assert_array_equal(got["rows"][order], want["rows"][ordered])
        for name in names:
            np.testing.assert_array_equal(got[name][order], want["state"][name][ordered])
        for result in results:
            for column in ("keys", "rows"):
                np.testing.assert_array_equal(
                    result[f"exported.{table.name}.{column}"], result[f"{table.name}.{column}"]
                )


def test_eviction_in_several_processes(together):
    """Rows leave as in one process; each process receives those of its own shards, and replicated ones come once."""
    processes = together["evict"]
    collection = process_worker.evicting(programs.mesh(4))
    state, gone, handed = process_worker.evict_by_name(collection)
    assert all(handed.values())
    for table in collection.tables:
        want = programs.by_key(collection, state, table.name)
        got = union(processes, table, ("keys", "rows"))
        for column, values in got.items():
            np.testing.assert_array_equal(values, want[column], err_msg=table.name)
        parts = np.concatenate([process[f"handed.{table.name}"] for process in processes]).tolist()
        assert sorted(parts) == sorted(handed[table.name])
    for worker in processes:
        np.testing.assert_array_equal(worker["gone"], gone.num_evicted)


def test_refusals_in_all_processes(raised):
    """Different specs are named in every process at the start; then all processes continue with equal specs."""
    for result in raised["refusals"]:
        messages = {name: str(message) for name, message in result.items()}
        assert messages.pop("same") == messages.pop("whole") == "nothing raised"
        for name, wanted in {
            "keys": r"'chunks of table \"user\": .*keys of checksum .* in process 1 and 'chunks .*: 2 records",
            "rows": r"got 'chunks of table .*: 2 records .*rows of checksum .* in process 1 and 'chunks .*: 2 records",
            "num_rows": "2 records .*num_rows=3, .* in process 1 and 'chunks of table .* 2 records .*num_rows=2,",
            "handed": "evict: got 'hand_over: True' in process 1 and 'hand_over: False' in process 0",
            "clocks": r"grow: got 'clock: \d+' in process 1 and 'clock: \d+' in process 0",
            "order": 'init: got a call of "grow" in process 1|grow: got a call of "init" in process 0',
            "chunks": '"user": 1 rec.* in process 1 and .*"user": (1 rec|no further chunk)',
            "unread": "^cannot be read|import_table: process 0 failed: ValueError: cannot be read",
        }.items():
            assert re.search(wanted, messages.pop(name)), name
        ragged = messages.pop("ragged")
        assert 'batch: feature "user": max_keys: got None in 2 processes, wanted a number' in ragged
        for name, (first, second) in {
            "dim": (":user:4:", ":user:8:"),
            "capacity": ("capacity of user: 32", "capacity of user: 64"),
            "seed": ("seed: 0", "seed: 1"),
            "feature": ("'sum'", "'mean'"),
            "rate": ("Sgd(learning_rate=0.1,", "Sgd(learning_rate=0.2,"),
            "schedule": ("rates [0.5, 0.25,", "rates [0.25, 0.16"),
            "lifted": ("-0.1", "-0.2"),
            "injected": ("optimizer of user: [0", "optimizer of user: [0"),
            "array": ("-0.5", "-1.0"),
            "row_gradient": ("row_gradient of user: 'sum'", "row_gradient of user: 'mean'"),
            "eviction": ("LeastRecentlyUsed()", "LeastFrequentlyUsed("),
            "admission": ("num_sightings=2", "num_sightings=3"),
            "exchange": ("rows='float32'", "rows='bfloat16'"),
        }.items():
            message = messages.pop(name)
            assert message.startswith("init: got ") and "in process 1 and" in message and "give the same" in message
            assert second in message.split("in process 1")[0] and first in message.split("in process 1")[1], message
        assert not messages


# Case by case: the process that fails, and the error text that all processes receive
ERRORS = {
    "export: write_part": (1, "OSError: [Errno 28] No space left"),
    "export: join_parts": (0, "OSError: [Errno 28] No space left"),
    "export: folder": (0, "NotADirectoryError: "),
    "export: taken": (0, "FileExistsError: export_full: path: got "),
    "async: clocks": (0, "ValueError: TablesSave: clock: got 1 in process 1 and 0 in process 0"),
    "async: elsewhere": (1, "FileNotFoundError: TablesSave: path: got "),
    "sync: elsewhere": (1, "FileNotFoundError: TablesSave: path: got "),
    "sync: clocks": (0, "ValueError: TablesSave: clock: got 1 in process 1 and 0 in process 0"),
    "export: elsewhere": (1, "FileNotFoundError: export_full: path: got "),
    "delta: base": (1, "CorruptFileError: export_delta: file "),
    "delta: nowhere": (1, "FileNotFoundError: export_delta: base: got "),
    "load: rows": (1, "CorruptFileError: load: file "),
    "load: nowhere": (1, "FileNotFoundError: load: path: got "),
    "load: live": (1, "CorruptFileError: load: file "),
    "apply": (1, "CorruptFileError: apply_delta: file "),
    "async: write_part": (1, "OSError: [Errno 28] No space left"),
    "async: join_parts": (0, "OSError: [Errno 28] No space left"),
    "async: refused": (1, "ValueError: TablesSave: compression: got 'zip'"),
    "sync: write_part": (1, "OSError: [Errno 28] No space left"),
    "sync: join_parts": (0, "OSError: [Errno 28] No space left"),
    "sync: refused": (1, "ValueError: TablesSave: compression: got 'zip'"),
    "manager: refused": (1, "ValueError: TablesSave: compression: got 'zip'"),
    "manager: copy": (1, "MemoryError: no memory for a piece"),
    "restore": (1, "CorruptFileError: TablesRestore: file "),
}


def test_an_error_of_one_process_ends_a_call_in_all(raised):
    """After full disks, damaged files or missing files, all processes raise within seconds and continue in step."""
    pytest.importorskip("orbax.checkpoint")
    results = raised["errors"]
    for name, (process, message) in ERRORS.items():
        own, other = (results[number].pop(name) for number in (process, 1 - process))
        assert own[0].startswith(message), (name, own)
        assert f": process {process} failed: {message}" in other[0], (name, other)
        assert float(own[1]) < END_S and float(other[1]) < END_S, (name, own, other)
    for result in reversed(results):
        for name, op, given in (
            ("export: clocks", "export_full", "'clock: 1002' in process 1 and 'clock: 1001'"),
            ("export: earlier", "export_full", "'clock: 999' in process 1 and 'clock: 1000'"),
            ("delta: bases", "export_delta", '"bases: .*" in process 1 and "bases: .*"'),
            ("load: other", "load", '"exports: .*" in process 1 and "exports: .*"'),
            ("apply: other", "apply_delta", '"exports: .*" in process 1 and "exports: .*"'),
            ("restore: other", "TablesRestore", "'clock: 7' in process 1 and 'clock: 0'"),
            ("evict", "evict", "'num_rows: 8' in process 1 and 'num_rows: 7'"),
        ):
            message = str(result.pop(name)[0])
            assert re.match(rf"ValueError: {op}: got {given} in process 0, wanted the same in all 2", message), message
        assert result["grown"].tolist() == results[0]["grown"].tolist() and result["grown"].min() >= 2000
        assert result.pop("left in user").item() > 0
        del result["grown"]
        assert result.pop("left").tolist() == [[]] and result.pop("managed").tolist() == [3]
        assert result.pop("unchanged").tolist() == result.pop("again").tolist() == ["True"]
        assert not result


def test_meshes_that_are_not_over_all_processes_once(together):
    """The first of several states is saved, repeated shards count once, and what needs all rows is refused."""
    first, second = together["other meshes"]
    assert first["own"].tolist() == ["True"] and second["own"].tolist() == ["False"]
    for result in (first, second):
        assert result["repeated"].tolist() == result["frozen here"].tolist() == ["True"]
        assert result["own rows"].tolist() == result["repeated rows"].tolist() == ["40"]
        assert "freeze: collection: got a mesh over 2 processes, wanted one process" in str(result["freeze"])
        assert "No space left on device" in str(result["evict"])
        assert float(result["evict"][1]) < END_S and result["unchanged"].tolist() == ["True"]


def test_host_memory_of_processes_on_one_host(together):
    """The sum of all requests is compared with the memory; a failure in one process reaches all and changes nothing."""
    results = together["host memory"]
    asked = int(results[0]["asked"][0])
    short = f"MemoryError: {{}}: capacity: got {asked // 2} bytes of host memory for a device "
    limit = f"(MemAvailable: {2 * asked - 1} bytes for 4 devices)"
    for number, result in enumerate(results):
        messages = {name: str(words[0]) for name, words in result.items()}
        assert max(float(words[1]) for words in result.values() if len(words) > 1) < END_S
        assert messages["init: both fit"] == messages["init: apart"] == "nothing raised"
        for op in ("init", "grow"):
            message = messages[f"{op}: one fits"]
            assert message.startswith(short.format(op)) and limit in message
            assert message == str(results[0][f"{op}: one fits"][0])
            for process in range(2):
                prefix = "" if process == number else f"{op}: process {process} failed: MemoryError: "
                wanted = f"MemoryError: {prefix}host memory: out of memory"
                assert messages[f"{op}: pinning {process}"] == wanted
        assert messages["capacity"] == "2.0" and messages["same bits"] == "True"


@pytest.mark.parametrize("job", ["uneven batches", "uneven samples"])
def test_other_numbers_of_batches_or_samples_are_not_silent(job, tmp_path):
    """Each process says what it waits for, or that the others have something else; none ends as if all were well."""
    processes = start(job, tmp_path, 2, 2)
    texts = lambda: [(tmp_path / f"{number}.err").read_text() for number in range(2)]  # noqa: E731
    try:
        wait_until(lambda: any(re.search("give (all processes|them) as many batches", text) for text in texts()))
        time.sleep(2)  # time to end as if all were well
        assert all(process.poll() != 0 for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    wanted = (
        "no batch after 3"
        if job == "uneven batches"
        else r"batch 4, in a call of 1, with \(bags, keys\) {'user': \(2, 2\)}"
    )
    assert any(re.search(wanted, text) for text in texts()), texts()  # one may have ended in a collective


@pytest.mark.parametrize(
    ("job", "got"), [("uneven later", "batch 3, in a call of 1"), ("uneven calls", "batch [45], in a call of [12]")]
)
def test_calls_that_may_differ_are_compared(job, got, tmp_path):
    """Batches of two sizes that both know would train with a loss of their own; short calls wait for each other."""
    codes = wait_for_end(start(job, tmp_path, 2, 2), tmp_path, timeout_s=120)
    texts = [(tmp_path / f"{number}.err").read_text() for number in range(2)]
    wanted = f"ValueError: pipeline: batches: got {got}, with"
    assert all(codes) and all(re.search(wanted, text) for text in texts), texts


def test_all_raise_what_one_reader_raises_after_the_batches_before_it(tmp_path):
    codes = wait_for_end(start("uneven failures", tmp_path, 2, 2), tmp_path, timeout_s=120)
    texts = [(tmp_path / f"{number}.err").read_text() for number in range(2)]
    assert all(codes) and all("steps: 4" in text for text in texts), texts
    assert "ValueError: pipeline: batches: got no batch after 4 in process 0" in texts[0], texts
    assert "OSError: cannot be read" in texts[1], texts


def test_what_a_reader_raises_is_told_where_its_call_is_short(tmp_path):
    """It is why the call is short, and reaches both processes."""
    codes = wait_for_end(start("uneven calls and a failure", tmp_path, 2, 2), tmp_path, timeout_s=120)
    texts = [(tmp_path / f"{number}.err").read_text() for number in range(2)]
    assert all(codes) and all("but OSError: cannot be read" in text for text in texts), texts


def test_what_a_reader_raises_in_one_process_alone_is_raised_and_ends_all(tmp_path):
    """The others wait for it in a collective, where no time-out of theirs would end them.

    It takes no further step either, whose collectives would be others than theirs.
    """
    codes = wait_for_end(start("uneven failure alone", tmp_path, 2, 2), tmp_path, timeout_s=120)
    text = (tmp_path / "1.err").read_text()
    assert all(codes) and "OSError: cannot be read" in text, text
    assert "has no batch after 2, but OSError: cannot be read. It waits for process 0 to come as far" in text


def test_a_process_that_dies_ends_the_others(tmp_path):
    """If a process is killed during training, the others end with an error soon after their heartbeat."""
    processes = start("killed", tmp_path, 2, 2)
    try:
        assert processes[1].wait(timeout=120) == -signal.SIGKILL
        started = time.monotonic()
        assert processes[0].wait(timeout=END_S) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert time.monotonic() - started < END_S
    assert not (tmp_path / "0.npz").exists()
    assert (tmp_path / "0.err").read_text().strip()
