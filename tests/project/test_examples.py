"""The examples run on a small scale; the DLRM learns on dynamic tables as on dense ones."""

import dataclasses
import gzip
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from interrupting import press_ctrl_c_after
from waiting import free_port

import jaxsok
from jaxsok.data import criteo

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import click_training  # noqa: E402
import serve_fused  # noqa: E402
import synthetic_log  # noqa: E402
import train_dcnv2  # noqa: E402
import train_dlrm  # noqa: E402
import training  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def promotion_of_users():
    """Allows dtype promotion: Optax's Adam raises a Python float to an int32, which these tests otherwise forbid."""
    with jax.numpy_dtype_promotion("standard"):
        yield


NUMBERED = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_examples_run(name, capsys):
    """They end without an error and print something."""
    spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert capsys.readouterr().out.strip()


# -------------------------------------------------------------------------------------------------------- serve_fused


def test_fused_and_unfused_tables_give_the_same_bits(tmp_path):
    config = serve_fused.Config(tables=3, rows=50, dim=5, batch_size=4, keys=6, iterations=3, folder=tmp_path)
    result = serve_fused.run(config)
    assert result.is_equal
    assert len(result.fused_ms) == len(result.unfused_ms) == 3
    assert result.session_difference is None or result.session_difference < 1e-5
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"ps_config.json", "model/model.stablehlo", "sparse_embedding2/key"} <= written
    assert "the same bits: yes" in serve_fused.format_result(config, result)
    rows = np.fromfile(tmp_path / "sparse_embedding1" / "emb_vector", "<f4").reshape(50, 5)
    tables = serve_fused.read_tables(tmp_path, config)
    (keys, *_) = serve_fused.make_batches(config)
    words = keys["sparse_embedding1"]
    np.testing.assert_array_equal(
        serve_fused.lookup_unfused(tables, {"sparse_embedding1": jnp.asarray(words)})["sparse_embedding1"],
        rows[words[..., 0]],
    )


def test_a_second_run_of_the_fused_example_replaces_the_first(tmp_path):
    for dim in (5, 3):
        config = serve_fused.Config(1, rows=9, dim=dim, batch_size=2, keys=2, iterations=1, folder=tmp_path)
        assert serve_fused.run(config).is_equal
        assert (tmp_path / "sparse_embedding0" / "emb_vector").stat().st_size == 9 * dim * 4


def test_every_option_of_the_fused_example_is_a_field():
    assert serve_fused.parse_arguments([]) == serve_fused.Config()
    assert serve_fused.parse_arguments(["--tables", "2", "--folder", "x"]).folder == pathlib.Path("x")


# --------------------------------------------------------------------------------------------------------- train_dlrm

SMALL = train_dlrm.Config(
    batch_size=256,
    dim=8,
    capacity=64,
    bottom=(16,),
    top=(32,),
    plot=None,
    checkpoint_dir=None,
    show_progress=False,
    num_devices=1,
)

ROOMY = dataclasses.replace(SMALL, capacity=1024)
"""Without growth: one step to compile."""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Makes a synthetic log of 12,000 rows with few enough keys that 12,000 rows train them."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    synthetic_log.write_log(path, 12_000, seed=1, max_cardinality=500)
    return path


def columns_of(log):
    """Returns all rows of a log."""
    source = criteo.TextSource(log)
    return source.take(slice(0, len(source)))


def categories_of(columns):
    """Returns int64 `[num_rows, 26]`."""
    return np.stack([columns[name] for name in criteo.CATEGORY_NAMES], axis=1)


@pytest.fixture(scope="module")
def result(log):
    """Runs a small training."""
    return train_dlrm.train(dataclasses.replace(SMALL, data=(log,), held_out_rows=2000))


def test_all_rows_are_trained_on_or_held_out(log, result):
    assert result.num_samples % SMALL.batch_size == 0
    assert 2000 <= result.num_held_out < 2000 + SMALL.batch_size
    assert result.num_samples + result.num_held_out == 12_000
    assert len(result.losses) == result.num_samples // SMALL.batch_size


def test_tables_grow_to_the_keys_that_were_trained_on(log, result):
    categories = categories_of(columns_of(log))
    for i, name in enumerate(criteo.CATEGORY_NAMES):
        keys = categories[: result.num_samples, i]
        distinct = set(keys.tolist()) - {-1}
        assert result.num_rows[name] == len(distinct)
        assert result.growth[0][i] == len(set(keys[: SMALL.batch_size].tolist()) - {-1})
    np.testing.assert_array_equal(result.growth[-1], list(result.num_rows.values()))
    assert (np.diff(result.growth, axis=0) >= 0).all()
    assert sum(result.num_rows.values()) > 26 * SMALL.capacity, "small tables: this run has to grow them"
    held_out = categories[result.num_samples :]
    num_new = sum(int((~np.isin(held_out[:, i], [*categories[: result.num_samples, i], -1])).sum()) for i in range(26))
    assert result.missing_keys == pytest.approx(num_new / (held_out != -1).sum())


def test_the_planted_signal_is_learnt(log, result):
    columns, held_out = columns_of(log), slice(result.num_samples, None)
    logits = synthetic_log.planted_logit(columns["integers"][held_out], categories_of(columns)[held_out])
    best = training.auc_of(columns["label"][held_out], logits)
    assert result.losses[-8:].mean() < result.losses[:4].mean()
    assert 0.62 < result.auc < best


def test_ctrl_c_gives_what_was_done(log, tmp_path, monkeypatch, capsys):
    press_ctrl_c_after(monkeypatch, training.CtrlC, 3)
    before = signal.getsignal(signal.SIGINT)
    result = train_dlrm.train(dataclasses.replace(ROOMY, data=(log,), held_out_rows=1000))
    assert signal.getsignal(signal.SIGINT) is before
    assert result.is_interrupted
    assert result.num_samples == 3 * SMALL.batch_size
    assert len(result.losses) == 3
    assert 1000 <= result.num_held_out < 1000 + SMALL.batch_size
    assert np.isfinite(result.auc)
    monkeypatch.setattr(train_dlrm, "train", lambda config: result)
    assert train_dlrm.main(["--data", str(log), "--plot", str(tmp_path / "plot.png")]) == 130
    report = capsys.readouterr()
    assert "Interrupted; what was done:" in report.out and "held-out AUC" in report.out
    assert "Traceback" not in report.err
    assert (tmp_path / "plot.png").exists()


@pytest.mark.usefixtures("looks_ahead")
@pytest.mark.parametrize(
    ("options", "pressed", "restored"),
    [
        pytest.param({}, (3, 8), [0, 3, 8], marks=pytest.mark.slow, id="plain"),
        pytest.param({"lookahead": 1}, (3, 8), [0, 4, 9], id="lookahead"),
        pytest.param({"steps_per_call": 2}, (4, 8), [0, 4, 8], marks=pytest.mark.slow, id="steps_per_call"),
        pytest.param({"steps_per_call": 2, "lookahead": 1}, (4, 8), [0, 6, 10], marks=pytest.mark.slow, id="both"),
    ],
)
def test_an_interrupted_run_goes_on_at_the_next_batch(log, tmp_path, monkeypatch, options, pressed, restored):
    """Losses, keys and AUC of a run with two interruptions and changing devices are those of an uninterrupted run.

    With a lookup ahead, a run stops a step later, when the state is drained; the uninterrupted run has none.
    """
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=2000, held_out_rows=400, shuffle=True, epochs=2)
    whole = train_dlrm.train(config)
    config = dataclasses.replace(config, checkpoint_dir=tmp_path / "run", checkpoint_every=5, **options)
    press_ctrl_c_after(monkeypatch, training.CtrlC, *pressed)
    results = [
        train_dlrm.train(dataclasses.replace(config, num_devices=number))
        for number in (1, min(2, jax.device_count()), 1)
    ]
    assert [result.is_interrupted for result in results] == [True, True, False]
    assert [result.num_restored // SMALL.batch_size for result in results] == restored
    last = results[-1]
    np.testing.assert_allclose(last.losses, whole.losses, rtol=2e-5)
    np.testing.assert_array_equal(last.growth, whole.growth)
    assert (last.num_rows, last.num_samples) == (whole.num_rows, whole.num_samples)
    assert last.auc == pytest.approx(whole.auc, abs=1e-3)
    assert not (tmp_path / "run").exists(), "a run that came to its end leaves nothing"


def test_an_interrupted_run_does_not_go_on_with_other_settings(log, tmp_path, monkeypatch):
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=2000, held_out_rows=400, checkpoint_dir=tmp_path / "run")
    press_ctrl_c_after(monkeypatch, training.CtrlC, 1)
    assert train_dlrm.train(config).is_interrupted
    # The second cannot even be restored: tables and parameters have other sizes.
    for name, saved, given in (("learning_rate", config.learning_rate, 0.1), ("dim", config.dim, 2 * config.dim)):
        wanted = f"other settings (saved, given): {{'{name}': ({saved}, {given})}}"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            train_dlrm.train(dataclasses.replace(config, **{name: given}))


def test_shuffled_batches_belong_to_a_number_of_streams(log, tmp_path, monkeypatch):
    """Otherwise a run that resumes with other processes would take other batches, and some samples twice."""
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=2000, held_out_rows=400, checkpoint_dir=tmp_path / "run")
    config = dataclasses.replace(config, shuffle=True)
    press_ctrl_c_after(monkeypatch, training.CtrlC, 1)
    assert train_dlrm.train(dataclasses.replace(config, num_streams=2)).is_interrupted
    with pytest.raises(ValueError, match=r"\{'num_streams': \(2, 1\)\}"):
        train_dlrm.train(config)
    assert not train_dlrm.train(dataclasses.replace(config, num_streams=2)).is_interrupted


def test_a_run_to_its_end_leaves_what_it_did_not_write(log, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "3.orbax-checkpoint-tmp-1").mkdir()  # left by a process that ended while writing
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=1024, held_out_rows=0, checkpoint_dir=tmp_path)
    result = train_dlrm.train(dataclasses.replace(config, checkpoint_every=2))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (result.num_samples, result.num_held_out) == (1024, 0) and np.isnan(result.auc)
    assert "0 rows" in click_training.format_result(result)


def test_the_checkpoint_stays_until_the_report(log, tmp_path, monkeypatch):
    """A run whose evaluation fails resumes from its last checkpoint, at the end of the data."""
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=1024, held_out_rows=256, checkpoint_dir=tmp_path / "run")
    config = dataclasses.replace(config, checkpoint_every=3)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(click_training, "evaluate", interrupt)
        train_dlrm.train(config)
    result = train_dlrm.train(config)
    assert (result.num_restored, result.num_samples, result.is_interrupted) == (768, 768, False)
    assert np.isfinite(result.held_out_loss) and not (tmp_path / "run").exists()


def test_ctrl_c_that_stopped_nothing_is_no_interruption(monkeypatch):
    """Processes ask each other every 20 steps, so a signal after the last question stops none of them."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(training.multihost_utils, "process_allgather", lambda array: np.array([array, False]))
    with training.CtrlC() as ctrl_c:
        assert not ctrl_c.asks_to_stop(20)
        signal.raise_signal(signal.SIGINT)
        assert not ctrl_c.asks_to_stop(21)
        assert not ctrl_c.has_stopped
        assert ctrl_c.asks_to_stop(40) and ctrl_c.has_stopped


def test_the_error_of_a_step_is_raised_as_it_is():
    """The error is raised even if steps before it, recorded at the same time, were good."""

    class Stats:
        stores, capacities, num_rows = (0,), (8,), np.array([1])

        def __init__(self, number):
            self.number = number

        def check(self):
            if self.number == 5:
                raise jaxsok.TableFullError("full")

    with pytest.raises(jaxsok.TableFullError), training.History(30, False) as history:
        for number in range(30):
            history.add(np.float32(1.0), Stats(number), [1])


def test_compressed_and_converted_logs_train_as_text(log, tmp_path):
    config = dataclasses.replace(ROOMY, data=(log,), max_rows=2000, held_out_rows=400, cache_dir=tmp_path)
    (tmp_path / "log.gz").write_bytes(gzip.compress(log.read_bytes()))
    wanted = train_dlrm.train(config)
    for other in ({"convert": True}, {"data": (tmp_path / "log.gz",)}):
        result = train_dlrm.train(dataclasses.replace(config, **other))
        np.testing.assert_array_equal(result.losses, wanted.losses)
        assert result.auc == wanted.auc


def test_logs_that_cannot_be_trained_on_are_refused(log, tmp_path):
    with pytest.raises(ValueError, match="too few for a step of 256 rows and 12000 held-out rows"):
        train_dlrm.train(dataclasses.replace(SMALL, data=(log,), held_out_rows=12_000))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="0 rows are too few"):
        train_dlrm.train(dataclasses.replace(SMALL, data=(tmp_path / "empty.txt",)))
    unlabelled = tmp_path / "test.txt"
    unlabelled.write_text("".join(line.split("\t", 1)[1] for line in log.read_text().splitlines(True)[:500]))
    with pytest.raises(ValueError, match="no labels"):
        train_dlrm.train(dataclasses.replace(SMALL, data=(unlabelled,)))


def test_log_loss_is_that_of_the_model():
    logits = jnp.linspace(-3.0, 3.0, 7)
    label = jnp.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    expected = optax.sigmoid_binary_cross_entropy(logits, label).mean()
    assert training.log_loss_of(np.asarray(label), np.asarray(nnx.sigmoid(logits))) == pytest.approx(
        float(expected), rel=1e-5
    )


# ------------------------------------------------------------------------------------------------------- many devices

FEW = dataclasses.replace(ROOMY, max_rows=3000, held_out_rows=700)
"""Eight steps, and three batches to evaluate on, of which the last is short."""


@pytest.fixture(scope="module")
def one_device(log):
    return train_dlrm.train(dataclasses.replace(FEW, data=(log,)))


def _assert_same_training(many: click_training.Result, single: click_training.Result) -> None:
    # Sums in another order, in all layers and over eight steps, change some units of the last of seven digits.
    np.testing.assert_allclose(many.losses, single.losses, rtol=2e-5)
    np.testing.assert_array_equal(many.growth, single.growth)
    assert many.num_rows == single.num_rows
    assert (many.num_samples, many.num_held_out) == (single.num_samples, single.num_held_out)
    assert many.missing_keys == single.missing_keys
    assert many.auc == pytest.approx(single.auc, abs=1e-3)


def test_many_devices_train_as_one(log, one_device):
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices; there are {len(jax.devices())}")
    _assert_same_training(train_dlrm.train(dataclasses.replace(FEW, data=(log,), num_devices=4)), one_device)


def test_batches_that_cannot_be_shared_are_refused(log):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices; there is one")
    with pytest.raises(ValueError, match="cannot share batches of 255 samples evenly"):
        train_dlrm.train(dataclasses.replace(FEW, data=(log,), batch_size=255, num_devices=2))
    with pytest.raises(ValueError, match="fewer than num_devices=1000"):
        train_dlrm.train(dataclasses.replace(FEW, data=(log,), batch_size=1000, num_devices=1000))


def _variables_of(launcher: str, process: int, port: int) -> dict[str, str]:
    """Returns the variables that a launcher sets for the first or the second of two processes."""
    if launcher == "slurm":
        names = {"JOB_ID": port, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": process, "LOCALID": process}
        return {f"SLURM_{name}": str(value) for name, value in names.items()}
    if launcher == "open mpi":
        names = {"SIZE": 2, "RANK": process, "LOCAL_RANK": process}
        own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        return own | {"OMPI_MCA_orte_hnp_uri": f"{port * 2**12}.0;tcp://127.0.0.1:1"}
    return {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "NUM_PROCESSES": "2", "PROCESS_ID": str(process)}


def _start_two(launcher: str, *arguments, program: str = "train_dlrm.py") -> list[subprocess.Popen]:
    port = free_port()
    # One CPU device each; more threads would compete for the cores of a small machine.
    plain = _environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return [
        subprocess.Popen(
            _command("--distributed", *arguments, program=program),
            env=plain | _variables_of(launcher, process, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


LAUNCHERS = ("slurm", "open mpi", "variables")
# Each launcher needs two processes: JAX is loaded once before the fork, and each process starts its back end.
MEET = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import click_training, jax
children = []
for launcher, variables in json.loads(sys.argv[2]):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(variables)
        click_training.join_processes(click_training.Config())
        os.write(1, f"{launcher}: {jax.process_index()} of {jax.device_count()}\\n".encode())
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_processes_find_each_other():
    """The variables of SLURM or Open MPI suffice; without them, three variables are needed."""
    ports = {launcher: free_port() for launcher in LAUNCHERS}
    variables = [(name, _variables_of(name, process, ports[name])) for name in LAUNCHERS for process in range(2)]
    done = subprocess.run(
        [sys.executable, "-c", MEET, str(EXAMPLES), json.dumps(variables)],
        env=_environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    wanted = [f"{launcher}: {process} of 2" for launcher in LAUNCHERS for process in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(wanted), done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_train_as_one_device(log, one_device, tmp_path):
    arguments = ["--data", log, "--max-rows", 3000, "--held-out-rows", 700, "--batch-size", 256, "--dim", 8]
    small = ["--capacity", 1024, "--bottom", 16, "--top", 32, "--plot", tmp_path / "plot.png", "--no-progress"]
    small += ["--checkpoint-dir", tmp_path / "run"]
    first, second = _start_two("variables", *arguments, *small)
    try:
        output, errors = first.communicate(timeout=300)
        others, more_errors = second.communicate(timeout=100)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (0, 0), (errors, more_errors)
    assert "Device: 2 x cpu" in output and "in 2 processes" in output
    report = click_training.format_result(one_device).splitlines()
    # Trained rows, held-out rows and keys equal those of one device. Times differ, and AUC in the last digit.
    for line in (report[1], *report[4:]):
        assert line in output
    auc = float(output.split("held-out AUC")[1].split()[0])
    assert auc == pytest.approx(one_device.auc, abs=1e-3)
    assert "Done." not in others and "AUC" not in others, "one process speaks"
    assert (tmp_path / "plot.png").exists()


@pytest.mark.slow
def test_two_processes_fill_and_train_dcnv2_as_one_device(tmp_path):
    arguments = ["--scale", 2e-5, "--num-rows", 3000, "--held-out-rows", 900, "--batch-size", 128, "--dim", 8, "--fill"]
    arguments += ["--bottom", 16, "--top", 16, "--rank", 8, "--dense-dtype", "float32", "--cache-dir", tmp_path]
    arguments += ["--plot", tmp_path / "plot.png", "--checkpoint-dir", tmp_path / "run", "--num-threads", 1]
    first, second = _start_two("variables", *arguments, program="train_dcnv2.py")
    try:
        output, errors = first.communicate(timeout=300)
        _, more_errors = second.communicate(timeout=100)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (0, 0), (errors, more_errors)
    alone = ["--num-devices", 1, "--no-progress"]
    one_device = train_dcnv2.train(train_dcnv2.parse_arguments([str(word) for word in (*arguments, *alone)]))
    assert f"trained on       {one_device.num_samples:,} rows" in output
    assert f"{sum(one_device.num_rows.values()):,} in 26 tables" in output
    auc = float(output.split("held-out AUC")[1].split()[0])
    assert auc == pytest.approx(one_device.auc, abs=1e-3)


@pytest.mark.slow
def test_ctrl_c_of_one_process_stops_all_at_one_step(tmp_path):
    synthetic_log.write_log(tmp_path / "log.tsv", 200_000, max_cardinality=500)
    arguments = ["--data", tmp_path / "log.tsv", "--plot", tmp_path / "plot.png", "--held-out-rows", 1000]
    arguments += ["--checkpoint-dir", tmp_path / "run"]
    small = ["--batch-size", 128, "--dim", 4, "--capacity", 1024, "--bottom", 8, "--top", 8]
    first, second = _start_two("variables", *arguments, *small)
    try:
        seen = ""
        while "keys=" not in seen:  # the progress bar after some steps
            letter = first.stderr.read(1)
            assert letter, seen
            seen += letter
        second.send_signal(signal.SIGINT)
        output, errors = first.communicate(timeout=200)
        second.communicate(timeout=100)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (130, 130), errors
    assert "Interrupted; what was done:" in output


# ------------------------------------------------------------------------------------------------------- command line


def _command(*arguments, program: str = "train_dlrm.py") -> list[str]:
    return [sys.executable, str(EXAMPLES / program), *map(str, arguments)]


def _environment() -> dict[str, str]:
    # The sources are used, wherever the tests were started.
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_demo_writes_a_log_a_report_and_a_plot(tmp_path):
    arguments = ["--num-rows", 6000, "--cache-dir", tmp_path / "cache", "--plot", tmp_path / "plot.png"]
    small = ["--batch-size", 256, "--dim", 8, "--capacity", 512, "--bottom", 16, "--top", 16]
    demo = [sys.executable, "-m", "jaxsok", "demo", *map(str, (*arguments, *small))]
    done = subprocess.run(demo, env=_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for words in ("Device: ", "held-out AUC", "samples/s", "in 26 tables", "C26 ", "plot.png"):
        assert words in done.stdout
    assert "samples/s" in done.stderr, "a progress bar"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_command_cleanly(tmp_path):
    """A signal from another process acts as in `test_ctrl_c_gives_what_was_done`."""
    synthetic_log.write_log(tmp_path / "log.tsv", 200_000, max_cardinality=500)
    arguments = ["--data", tmp_path / "log.tsv", "--plot", tmp_path / "plot.png", "--held-out-rows", 1000]
    arguments += ["--checkpoint-dir", tmp_path / "run"]
    small = ["--batch-size", 128, "--dim", 4, "--capacity", 1024, "--bottom", 8, "--top", 8]
    process = subprocess.Popen(
        _command(*arguments, *small), env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        seen = b""
        while b"keys=" not in seen:  # the progress bar after some steps
            letter = process.stderr.read1(256)
            assert letter, seen.decode()
            seen += letter
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, (output, errors)
    assert b"Interrupted; what was done:" in output
    assert b"held-out AUC" in output
    assert b"Traceback" not in errors
    assert (tmp_path / "plot.png").exists() and (tmp_path / "run").exists()


def test_errors_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.tsv").write_text("1\t2\t3\n")
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", "--no-progress", "--data", str(tmp_path / "log.tsv")])
    assert train_dlrm.main() == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "log.tsv, row 1: got 3 columns" in error
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(tmp_path / "nowhere")])
    assert train_dlrm.main() == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in error


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--batch-size", "0", "batch_size: got 0, wanted at least 1"),
        ("--checkpoint-every", "0", "checkpoint_every: got 0, wanted at least 1"),
        ("--num-devices", "0", "num_devices: got 0, wanted at least 1"),
        ("--max-rows", "0", "max_rows: got 0, wanted at least 1"),
        ("--bottom", "0", "bottom: got (0,), wanted at least 1"),
        ("--held-out-rows", "-1", "held_out_rows: got -1, wanted at least 0"),
        ("--seed", "-1", "seed: got -1, wanted at least 0"),
        ("--plot", "nowhere/plot.png", "plot: got nowhere/plot.png, wanted a file"),
        ("--plot", "plot.txt", "plot: got plot.txt, wanted a file .png, .svg or .pdf"),
        ("--learning-rate", "nan", "learning_rate: got nan"),
        ("--checkpoint-dir", "taken", "taken"),
    ],
)
def test_options_are_refused_before_the_training(log, tmp_path, monkeypatch, capsys, option, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(training, "fit", lambda *_: pytest.fail("trained"))
    arguments = ["train_dlrm.py", "--no-progress", "--data", str(log), "--batch-size", "64", option, given]
    monkeypatch.setattr(sys, "argv", arguments)
    assert train_dlrm.main() == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_every_option_is_a_field():
    config = train_dlrm.parse_arguments([])
    assert config == train_dlrm.Config()
    config = train_dlrm.parse_arguments(["--data", "a", "b.gz", "--top", "8", "4", "--bottom", "--plot", "x.svg"])
    assert config.data == (pathlib.Path("a"), pathlib.Path("b.gz"))
    assert (config.top, config.bottom, config.plot) == ((8, 4), (), pathlib.Path("x.svg"))


# ------------------------------------------------------------------------------------------------------- dense parity


def _vocabularies(path: pathlib.Path) -> list[np.ndarray]:
    """Returns all keys of each category in a log, sorted, which dense tables need beforehand."""
    columns = columns_of(path)
    return [np.setdiff1d(columns[name], [criteo.MISSING_KEY]) for name in criteo.CATEGORY_NAMES]


def _initial_rows(config: train_dlrm.Config, vocabularies: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the rows that `find` reads for these keys from dynamic tables without rows."""
    longest = max(map(len, vocabularies))
    collection = train_dlrm.make_collection(config)
    raw = {
        name: np.append(keys, np.full(longest - len(keys), criteo.MISSING_KEY))
        for name, keys in zip(criteo.CATEGORY_NAMES, vocabularies, strict=True)
    }
    embeddings, stats = collection.find(collection.init(seed=config.seed), collection.batch(raw).features)
    assert int(np.asarray(stats.num_missing).sum()) == sum(map(len, vocabularies))
    return [
        np.asarray(embeddings[name])[: len(keys)]
        for name, keys in zip(criteo.CATEGORY_NAMES, vocabularies, strict=True)
    ]


def _make_dense_step(config: train_dlrm.Config, graphdef, tables_graphdef):
    """Returns the same model on an `nnx.Embed` per category; a missing category contributes zeros."""

    def embed(tables, places):
        embeds = nnx.merge(tables_graphdef, tables)
        return {
            name: embed(jnp.maximum(places[:, i], 0)) * (places[:, i, None] >= 0)
            for i, (name, embed) in enumerate(zip(criteo.CATEGORY_NAMES, embeds, strict=True))
        }

    def loss_fn(params, tables, batch):
        return click_training.log_loss(params, embed(tables, batch["places"]), batch, graphdef)

    dense_tx, tables_tx = optax.adam(config.dense_learning_rate), optax.adagrad(config.learning_rate, 0.0)

    def init(params, tables):
        return params, tables, dense_tx.init(params), tables_tx.init(tables)

    @jax.jit
    def step(state, batch):
        params, tables, dense_state, tables_state = state
        loss, (params_gradient, tables_gradient) = jax.value_and_grad(loss_fn, (0, 1))(params, tables, batch)
        params_updates, dense_state = dense_tx.update(params_gradient, dense_state, params)
        tables_updates, tables_state = tables_tx.update(tables_gradient, tables_state, tables)
        params, tables = optax.apply_updates(params, params_updates), optax.apply_updates(tables, tables_updates)
        return (params, tables, dense_state, tables_state), loss

    @jax.jit
    def predict(state, batch):
        return nnx.sigmoid(nnx.merge(graphdef, state[0])(batch["integers"], embed(state[1], batch["places"])))

    return init, step, predict


def _train_dense(config: train_dlrm.Config, vocabularies: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Trains on the batches of `train_dlrm.train`; returns the losses and the AUC on its held-out rows."""
    graphdef, params = nnx.split(train_dlrm.make_model(config))
    initial_rows = _initial_rows(config, vocabularies)
    embeds = nnx.List([nnx.Embed(*rows.shape, rngs=nnx.Rngs(0)) for rows in initial_rows])
    for embed, rows in zip(embeds, initial_rows, strict=True):
        embed.embedding[...] = jnp.asarray(rows)
    init, step, predict = _make_dense_step(config, graphdef, nnx.graphdef(embeds))
    state = init(params, nnx.state(embeds))

    columns = columns_of(config.data[0])
    places = [
        np.where(columns[name] == criteo.MISSING_KEY, -1, np.searchsorted(vocabulary, columns[name]))
        for name, vocabulary in zip(criteo.CATEGORY_NAMES, vocabularies, strict=True)
    ]
    log = {
        "label": columns["label"],
        "integers": columns["integers"],
        "places": np.stack(places, axis=1).astype(np.int32),
    }
    num_rows, size, losses = len(log["label"]), config.batch_size, []
    num_trained = (num_rows - config.held_out_rows) // size * size
    for start in range(0, num_trained, size):
        state, loss = step(state, {name: column[start : start + size] for name, column in log.items()})
        losses.append(loss)
    held_out = {name: column[num_trained:] for name, column in log.items()}
    return np.array(losses), training.auc_of(held_out["label"], predict(state, held_out))


def _assert_parity(config: train_dlrm.Config, num_seeds: int) -> None:
    vocabularies = _vocabularies(config.data[0])
    assert config.optimizer == "adagrad", "the optimizer that Optax has too"
    differences = []
    for seed in range(num_seeds):
        config = dataclasses.replace(config, seed=seed)
        dynamic = train_dlrm.train(config)
        dense_losses, dense_auc = _train_dense(config, vocabularies)
        # Rows and model are equal in the first step, so only the order of sums may differ.
        np.testing.assert_allclose(dynamic.losses[0], dense_losses[0], rtol=1e-6)
        print(f"seed {seed}: AUC {dynamic.auc:.5f} dynamic, {dense_auc:.5f} dense")
        differences.append(dynamic.auc - dense_auc)
    assert abs(np.mean(differences)) < 0.003, differences


@pytest.mark.slow
def test_dynamic_tables_learn_as_dense_ones_do(log):
    _assert_parity(dataclasses.replace(ROOMY, data=(log,), held_out_rows=2000, optimizer="adagrad"), num_seeds=1)


@pytest.mark.slow
def test_dynamic_tables_learn_as_dense_ones_do_on_many_keys(tmp_path):
    synthetic_log.write_log(tmp_path / "log.tsv", 200_000, seed=7, max_cardinality=20_000)
    roomy = train_dlrm.Config(plot=None, checkpoint_dir=None, show_progress=False, num_devices=1)
    config = dataclasses.replace(roomy, data=(tmp_path / "log.tsv",), held_out_rows=40_000)
    _assert_parity(config, num_seeds=3)
