"""scripts/endurance.py on a small scale: growth, eviction, checkpoints, kills, resumes and refusals."""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxsok

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/endurance.py"
SMALL = ["--devices", "4", "--samples", "64", "--window", "600", "--new", "5", "--capacity", "1000"]

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="four devices are made of a CPU")
pytest.importorskip("pyarrow")

_SPEC = importlib.util.spec_from_file_location("endurance", SCRIPT)
endurance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(endurance)


def run(*arguments, timeout_s=600):
    """Runs the script, which must succeed; returns its output."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def raws_of(**options):
    """Returns the batches of a small run."""
    return endurance.Raws(
        argparse.Namespace(**{"samples": 8, "window": 50, "new": 3, "steps": 40, "hot": 0.0} | options)
    )


def test_a_run_of_100_steps():
    """The run grows, evicts and saves, and reports each."""
    reported = run("--steps", "100", "--every", "25")
    assert reported.rstrip().endswith("endurance: ok")
    values = {line.split(":")[0].strip(): line.split(":", 1)[1] for line in reported.splitlines() if ":" in line}
    assert int(values["growths"]) >= 1
    assert "'full': 1, 'delta': 3" in values["checkpoints"] and "'times': 0" not in values["evictions"]


def test_the_step_of_a_growth_in_which_a_process_dies_is_reached(monkeypatch):
    """The slow tests kill a process there; this one needs no process."""
    spec = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=8)
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("user", "user")])
    killed = []
    monkeypatch.setattr(endurance.os, "kill", lambda *given: killed.append(given))
    with endurance.die_in_growth(), pytest.raises(AttributeError):  # what is returned is no store
        collection.grow(collection.init(seed=0), 1000)
    assert killed == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.slow
def test_a_hot_key_with_a_process_for_each_device(tmp_path):
    """The run with a hot key is compared with the plain one; the report has a line for each run."""
    report = tmp_path / "report.jsonl"
    more = ["--processes", "2", "--hot", "0.3", "--twice", "--most-ratio", "100", "--report", str(report)]
    reported = run("--devices", "2", "--steps", "30", "--every", "10", *more)
    assert "twice: the same digest, and with one process" in reported and "hot key: time of a step" in reported
    runs = [json.loads(line) for line in report.read_text().splitlines()]
    assert [run["processes"] for run in runs] == [2, 2, 1, 2]
    assert len({run["digest"] for run in runs}) == 2
    for result in runs:
        assert result["step_ms"] > 0 and [len(numbers) for numbers in result["memory"]["end"]] == [4, 4]


@pytest.mark.slow
def test_the_same_bits_and_a_job_that_resumes():
    """A repeated run, four processes and a resumed job give the same bits; two devices agree within rounding."""
    # The first call of `grow` makes room for many small batches; the next growth is after 60 steps.
    small = ["--samples", "16", "--new", "16", "--capacity", "512"]
    reported = run("--steps", "80", "--every", "20", "--twice", "--kill", "growth", *small)
    assert "twice: the same digest, and with a process for each device" in reported
    assert "killed in growth: all ended after" in reported and "resumed after growth: 2 devices" in reported
    reported = run("--steps", "20", "--every", "5", "--kill", "step", "--devices", "2", "--resume-devices", "2")
    assert "killed in step: all ended after" in reported and "resumed after step: 2 devices" in reported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raws.seen['user'][0] = True", '"user" has '),
        ("raws.rows[raws.is_row] *= 1.01", "country at step "),
        ("raws.keys_seen = lambda name: np.arange(5).astype(np.uint64)", '"user" lost '),
    ],
)
def test_a_run_that_differs_from_what_the_host_knows_fails(tmp_path, fault, message):
    """Keys without a row and rows that differ from NumPy's are reported."""
    options = {"devices": 2, "processes": 1, "process": 0, "folder": str(tmp_path), "kill": None, "hot": 0.0}
    options |= {"samples": 16, "window": 100, "new": 1, "steps": 4, "every": 2, "capacity": 500}
    program = f"""
import argparse, json, sys
import numpy as np
sys.path.insert(0, {str(SCRIPT.parent)!r})
import endurance
class Faulty(endurance.Raws):
    def note(raws, step):
        super().note(step)
        {fault}
endurance.Raws = Faulty
endurance.work(argparse.Namespace(**json.loads({json.dumps(json.dumps(options))})))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and message in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("hot", [0.0, 0.3])
def test_batches_are_split_over_processes_and_counted(hot):
    """The parts of two processes form the whole batch; its counts are those of a set and a loop."""
    raws = raws_of(hot=hot)
    keys, rows = {"user": set(), "page": set()}, np.full((endurance.NUM_COUNTRIES, 4), 0.5)
    for step in range(raws.options.steps):
        whole, parts = raws.part(step, 0, 1), [raws.part(step, process, 2) for process in range(2)]
        for name, values in whole.items():
            got = [part[name] for part in parts]
            if name == "page":
                np.testing.assert_array_equal(np.concatenate([array.keys for array in got]), values.keys)
                np.testing.assert_array_equal(np.concatenate([array.lengths for array in got]), values.lengths)
            else:
                np.testing.assert_array_equal(np.concatenate(got), values)
        keys["user"] |= set(whole["user"].tolist())
        keys["page"] |= set(whole["page"].keys.tolist())
        gradients = np.zeros_like(rows)
        for key, label in zip(whole["country"], whole["label"], strict=True):
            gradients[key] += (rows[key] - label * np.array([0.25, 0.5, 0.75, 1.0])) / len(whole["label"])
        rows -= endurance.RATE * gradients
        raws.note(step)
    for name, seen in keys.items():
        assert set(raws.keys_seen(name).tolist()) == seen
        assert raws.seen[name].sum() == len(seen)
    np.testing.assert_allclose(raws.rows, rows, rtol=1e-12)
    uses = np.mean([(raws.ids("user", step) == 0).mean() for step in range(raws.options.steps)])
    assert (uses > 0.2) == (hot == 0.3)


def test_what_is_compared(capsys):
    """Another key, another row and another bit are noticed."""
    names = ("user", "page", "item", "query", "country")
    tables = {name: {"key": np.arange(3, dtype=np.uint64), "row": np.ones((3, 2), np.float32)} for name in names}
    changed = {name: dict(columns) for name, columns in tables.items()}
    endurance.compare("same", tables, changed)
    changed["page"]["row"] = np.nextafter(changed["page"]["row"], np.float32(2))
    endurance.compare("rounded", tables, changed)
    assert endurance.digest_of(tables) != endurance.digest_of(changed)
    changed["page"]["row"] = changed["page"]["row"] + np.float32(0.01)
    with pytest.raises(AssertionError, match=r"page\.row"):
        endurance.compare("other", tables, changed)
    changed["page"] = {"key": np.arange(1, 4, dtype=np.uint64), "row": tables["page"]["row"]}
    with pytest.raises(SystemExit, match='"page" has other keys'):
        endurance.compare("other", tables, changed)
