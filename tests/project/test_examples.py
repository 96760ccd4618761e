"""The examples run, small; the DLRM on dynamic tables learns as the same model on dense tables does."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from waiting import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import criteo  # noqa: E402
import serve_fused  # noqa: E402
import train_dlrm  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def promotion_of_users():
    """Optax's Adam raises a Python float to an int32: it does not run under the strict promotion of these tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


NUMBERED = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_examples_run(name, capsys):
    """They end without an error, and show something."""
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
    assert "the same bits: yes" in serve_fused.told(config, result)
    rows = np.fromfile(tmp_path / "sparse_embedding1" / "emb_vector", "<f4").reshape(50, 5)
    tables = serve_fused.read_tables(tmp_path, config)
    (keys, *_) = serve_fused.make_batches(config)
    words = keys["sparse_embedding1"]
    np.testing.assert_array_equal(
        serve_fused.unfused(tables, {"sparse_embedding1": jnp.asarray(words)})["sparse_embedding1"], rows[words[..., 0]]
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
    show_progress=False,
    num_devices=1,
)

ROOMY = dataclasses.replace(SMALL, capacity=1024)
"""Without growth: one step to compile."""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A synthetic log of 12,000 rows with few enough keys that 12,000 rows teach something."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    criteo.write_log(path, 12_000, seed=1, max_cardinality=500)
    return path


@pytest.fixture(scope="module")
def result(log):
    """One small training run."""
    return train_dlrm.train(dataclasses.replace(SMALL, data=(log,), held_out_rows=2000))


def test_all_rows_are_trained_on_or_held_out(log, result):
    assert result.num_samples % SMALL.batch_size == 0
    assert 2000 <= result.num_held_out < 2000 + SMALL.batch_size
    assert result.num_samples + result.num_held_out == 12_000
    assert len(result.losses) == result.num_samples // SMALL.batch_size


def test_tables_grow_to_the_keys_that_were_trained_on(log, result):
    (rows,) = criteo.read_log(log, 20_000)
    for i, name in enumerate(criteo.CATEGORY_NAMES):
        keys = rows.categories[: result.num_samples, i]
        distinct = set(keys.tolist()) - {-1}
        assert result.num_rows[name] == len(distinct)
        assert result.growth[0][i] == len(set(keys[: SMALL.batch_size].tolist()) - {-1})
    np.testing.assert_array_equal(result.growth[-1], list(result.num_rows.values()))
    assert (np.diff(result.growth, axis=0) >= 0).all()
    assert sum(result.num_rows.values()) > 26 * SMALL.capacity, "small tables: this run has to grow them"
    held_out = rows.categories[result.num_samples :]
    num_new = sum(
        int((~np.isin(held_out[:, i], [*rows.categories[: result.num_samples, i], -1])).sum()) for i in range(26)
    )
    assert result.missing_keys == pytest.approx(num_new / (held_out != -1).sum())


def test_the_planted_signal_is_learnt(log, result):
    (rows,) = criteo.read_log(log, 20_000)
    held_out = slice(result.num_samples, None)
    best = train_dlrm.auc_of(
        rows.label[held_out], criteo.planted_logit(rows.integers[held_out], rows.categories[held_out])
    )
    assert result.losses[-8:].mean() < result.losses[:4].mean()
    assert 0.62 < result.auc < best


def test_ctrl_c_gives_what_was_done(log, tmp_path, monkeypatch, capsys):
    hold_back = train_dlrm.hold_back

    def press_ctrl_c_in_the_third_step(*arguments):
        for i, rows in enumerate(hold_back(*arguments)):
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield rows

    monkeypatch.setattr(train_dlrm, "hold_back", press_ctrl_c_in_the_third_step)
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


def test_logs_that_cannot_be_trained_on_are_refused(log, tmp_path):
    with pytest.raises(ValueError, match="too few for a step of 256 rows beside 12000 held-out rows"):
        train_dlrm.train(dataclasses.replace(SMALL, data=(log,), held_out_rows=12_000))
    unlabelled = tmp_path / "test.txt"
    unlabelled.write_text("".join(line.split("\t", 1)[1] for line in log.read_text().splitlines(True)[:500]))
    with pytest.raises(ValueError, match="no labels"):
        train_dlrm.train(dataclasses.replace(SMALL, data=(unlabelled,)))


@pytest.mark.parametrize(
    ("num_rows", "held", "given"), [(100, 0, 90), (100, 1, 90), (95, 5, 90), (95, 6, 80), (9, 0, 0)]
)
def test_hold_back_keeps_the_last_rows(num_rows, held, given):
    stream = [
        criteo.Batch(np.zeros(size), np.full((size, 13), start), np.zeros((size, 26)))
        for start in range(0, num_rows, 10)
        for size in [min(10, num_rows - start)]
    ]
    held_out = train_dlrm.collections.deque()
    trained = list(train_dlrm.hold_back(stream, held, held_out))
    assert sum(rows.num_rows for rows in trained) == given
    assert [rows.integers[0, 0] for rows in [*trained, *held_out]] == list(range(0, num_rows, 10))


def test_log_loss_is_that_of_the_model():
    logits = jnp.linspace(-3.0, 3.0, 7)
    label = jnp.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    expected = optax.sigmoid_binary_cross_entropy(logits, label).mean()
    assert train_dlrm.log_loss_of(np.asarray(label), np.asarray(nnx.sigmoid(logits))) == pytest.approx(
        float(expected), rel=1e-5
    )


# ------------------------------------------------------------------------------------------------------- many devices

FEW = dataclasses.replace(ROOMY, max_rows=3000, held_out_rows=700)
"""Eight steps, and three batches to evaluate on, of which the last is short."""


@pytest.fixture(scope="module")
def one_device(log):
    return train_dlrm.train(dataclasses.replace(FEW, data=(log,)))


def _assert_same_training(many: train_dlrm.Result, one: train_dlrm.Result) -> None:
    # The same sums in another order, in all layers and over eight steps: some units of the last of seven digits.
    np.testing.assert_allclose(many.losses, one.losses, rtol=2e-5)
    np.testing.assert_array_equal(many.growth, one.growth)
    assert many.num_rows == one.num_rows
    assert (many.num_samples, many.num_held_out) == (one.num_samples, one.num_held_out)
    assert many.missing_keys == one.missing_keys
    assert many.auc == pytest.approx(one.auc, abs=1e-3)


def test_many_devices_train_as_one(log, one_device):
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices; there are {len(jax.devices())}")
    _assert_same_training(train_dlrm.train(dataclasses.replace(FEW, data=(log,), num_devices=4)), one_device)


def test_batches_that_cannot_be_shared_are_refused(log):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices; there is one")
    with pytest.raises(ValueError, match="cannot share batches of 255 rows evenly"):
        train_dlrm.train(dataclasses.replace(FEW, data=(log,), batch_size=255, num_devices=2))
    with pytest.raises(ValueError, match="fewer than num_devices=1000"):
        train_dlrm.train(dataclasses.replace(FEW, data=(log,), batch_size=1000, num_devices=1000))


def test_ctrl_c_stops_after_what_the_pipeline_has_read():
    with train_dlrm._CtrlC() as ctrl_c:
        batches = ctrl_c.until_pressed(iter(range(10)))
        assert [next(batches), next(batches)] == [0, 1]
        signal.raise_signal(signal.SIGINT)
        assert list(batches) == []


def _variables_of(launcher: str, process: int, port: int) -> dict[str, str]:
    """What a launcher tells the second of two processes, or the first."""
    if launcher == "slurm":
        names = {"JOB_ID": port, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": process, "LOCALID": process}
        return {f"SLURM_{name}": str(value) for name, value in names.items()}
    if launcher == "open mpi":
        names = {"SIZE": 2, "RANK": process, "LOCAL_RANK": process}
        own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        return own | {"OMPI_MCA_orte_hnp_uri": f"{port * 2**12}.0;tcp://127.0.0.1:1"}
    return {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "NUM_PROCESSES": "2", "PROCESS_ID": str(process)}


def _start_two(launcher: str, *arguments) -> list[subprocess.Popen]:
    port = free_port()
    # One CPU device each; several threads would fight over the cores of a small machine.
    plain = _environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return [
        subprocess.Popen(
            _command("--distributed", *arguments),
            env=plain | _variables_of(launcher, process, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


LAUNCHERS = ("slurm", "open mpi", "variables")
# Two processes for each launcher: JAX is loaded once, and starts its back end in each of them.
MEET = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import jax, train_dlrm
children = []
for launcher, variables in json.loads(sys.argv[2]):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(variables)
        train_dlrm.join_processes(train_dlrm.Config())
        os.write(1, f"{launcher}: {jax.process_index()} of {jax.device_count()}\\n".encode())
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_processes_find_each_other():
    """What SLURM and Open MPI set is enough; without them, three variables."""
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
    first, second = _start_two("variables", *arguments, *small)
    try:
        output, errors = first.communicate(timeout=300)
        others, more_errors = second.communicate(timeout=100)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (0, 0), (errors, more_errors)
    assert "Device: 2 x cpu" in output and "in 2 processes" in output
    report = train_dlrm.format_result(one_device).splitlines()
    # The rows trained on and held out, and every key: as one device has them. Times differ, AUC in the last digit.
    for line in (report[1], *report[4:]):
        assert line in output
    auc = float(output.split("held-out AUC")[1].split()[0])
    assert auc == pytest.approx(one_device.auc, abs=1e-3)
    assert "Done." not in others and "AUC" not in others, "one process speaks"
    assert (tmp_path / "plot.png").exists()


@pytest.mark.slow
def test_ctrl_c_of_one_process_stops_all_at_one_step(tmp_path):
    criteo.write_log(tmp_path / "log.tsv", 200_000, max_cardinality=500)
    arguments = ["--data", tmp_path / "log.tsv", "--plot", tmp_path / "plot.png", "--held-out-rows", 1000]
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


def _command(*arguments) -> list[str]:
    return [sys.executable, str(EXAMPLES / "train_dlrm.py"), *map(str, arguments)]


def _environment() -> dict[str, str]:
    # From the sources, wherever the tests were started.
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_demo_writes_a_log_a_report_and_a_plot(tmp_path):
    arguments = ["--num-rows", 6000, "--cache-dir", tmp_path / "cache", "--plot", tmp_path / "plot.png"]
    small = ["--batch-size", 256, "--dim", 8, "--capacity", 512, "--bottom", 16, "--top", 16]
    demo = [sys.executable, "-m", "jaxsok", "demo", *map(str, (*arguments, *small))]
    done = subprocess.run(demo, env=_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for words in ("Device: ", "held-out AUC", "samples/s", "in 26 tables", "C26 ", "plot.png"):
        assert words in done.stdout
    assert "rows" in done.stderr, "a progress bar"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_command_cleanly(tmp_path):
    """As `test_ctrl_c_gives_what_was_done`, with a signal from another process."""
    criteo.write_log(tmp_path / "log.tsv", 200_000, max_cardinality=500)
    arguments = ["--data", tmp_path / "log.tsv", "--plot", tmp_path / "plot.png", "--held-out-rows", 1000]
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
    assert (tmp_path / "plot.png").exists()


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


def test_every_option_is_a_field():
    config = train_dlrm.parse_arguments([])
    assert config == train_dlrm.Config()
    config = train_dlrm.parse_arguments(["--data", "a", "b.gz", "--top", "8", "4", "--bottom", "--plot", "x.svg"])
    assert config.data == (pathlib.Path("a"), pathlib.Path("b.gz"))
    assert (config.top, config.bottom, config.plot) == ((8, 4), (), pathlib.Path("x.svg"))


# ------------------------------------------------------------------------------------------------------- dense parity


def _vocabularies(path: pathlib.Path) -> list[np.ndarray]:
    """All keys of each category in a log, sorted: what dense tables must know beforehand."""
    (rows,) = criteo.read_log(path, 10**7)
    return [np.setdiff1d(rows.categories[:, i], [criteo.MISSING_KEY]) for i in range(criteo.NUM_CATEGORIES)]


def _initial_rows(config: train_dlrm.Config, vocabularies: list[np.ndarray]) -> list[np.ndarray]:
    """What the dynamic tables would give these keys: `find` on tables that have no rows yet."""
    longest = max(map(len, vocabularies))
    padded = np.full((longest, criteo.NUM_CATEGORIES), criteo.MISSING_KEY)
    for i, keys in enumerate(vocabularies):
        padded[: len(keys), i] = keys
    collection = train_dlrm.make_collection(config)
    raw = train_dlrm.to_raw(criteo.Batch(np.zeros(longest), np.zeros((longest, 13)), padded))
    embeddings, stats = collection.find(collection.init(seed=config.seed), collection.batch(raw).features)
    assert int(np.asarray(stats.num_missing).sum()) == sum(map(len, vocabularies))
    return [
        np.asarray(embeddings[name])[: len(keys)]
        for name, keys in zip(criteo.CATEGORY_NAMES, vocabularies, strict=True)
    ]


def _make_dense_step(config: train_dlrm.Config, graphdef, tables_graphdef):
    """The same model on an `nnx.Embed` a category; a missing category contributes zeros."""

    def embed(tables, places):
        embeds = nnx.merge(tables_graphdef, tables)
        return {
            name: embed(jnp.maximum(places[:, i], 0)) * (places[:, i, None] >= 0)
            for i, (name, embed) in enumerate(zip(criteo.CATEGORY_NAMES, embeds, strict=True))
        }

    def loss_fn(params, tables, batch):
        return train_dlrm.log_loss(params, embed(tables, batch["places"]), batch, graphdef)

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
    """Trains on the batches of `train_dlrm.train`; gives the losses and the AUC on its held-out rows."""
    graphdef, params = train_dlrm.make_model(config)
    initial_rows = _initial_rows(config, vocabularies)
    embeds = nnx.List([nnx.Embed(*rows.shape, rngs=nnx.Rngs(0)) for rows in initial_rows])
    for embed, rows in zip(embeds, initial_rows, strict=True):
        embed.embedding[...] = jnp.asarray(rows)
    init, step, predict = _make_dense_step(config, graphdef, nnx.graphdef(embeds))
    state = init(params, nnx.state(embeds))

    def to_batch(rows):
        places = [
            np.where(keys == criteo.MISSING_KEY, -1, np.searchsorted(vocabulary, keys))
            for keys, vocabulary in zip(rows.categories.T, vocabularies, strict=True)
        ]
        return {"label": rows.label, "integers": rows.integers, "places": np.stack(places, axis=1).astype(np.int32)}

    held_out, losses = train_dlrm.collections.deque(), []
    for rows in train_dlrm.hold_back(criteo.read_log(config.data, config.batch_size), config.held_out_rows, held_out):
        state, loss = step(state, to_batch(rows))
        losses.append(loss)
    label = np.concatenate([rows.label for rows in held_out])
    return np.array(losses), train_dlrm.auc_of(label, np.concatenate([predict(state, to_batch(r)) for r in held_out]))


def _assert_parity(config: train_dlrm.Config, num_seeds: int) -> None:
    vocabularies = _vocabularies(config.data[0])
    assert config.optimizer == "adagrad", "the optimizer that Optax has too"
    differences = []
    for seed in range(num_seeds):
        config = dataclasses.replace(config, seed=seed)
        dynamic = train_dlrm.train(config)
        dense_losses, dense_auc = _train_dense(config, vocabularies)
        # The first step has the same rows and the same model: sums of another order are all that may differ.
        np.testing.assert_allclose(dynamic.losses[0], dense_losses[0], rtol=1e-6)
        print(f"seed {seed}: AUC {dynamic.auc:.5f} dynamic, {dense_auc:.5f} dense")
        differences.append(dynamic.auc - dense_auc)
    assert abs(np.mean(differences)) < 0.003, differences


@pytest.mark.slow
def test_dynamic_tables_learn_as_dense_ones_do(log):
    _assert_parity(dataclasses.replace(ROOMY, data=(log,), held_out_rows=2000, optimizer="adagrad"), num_seeds=1)


@pytest.mark.slow
def test_dynamic_tables_learn_as_dense_ones_do_on_many_keys(tmp_path):
    criteo.write_log(tmp_path / "log.tsv", 200_000, seed=7, max_cardinality=20_000)
    config = train_dlrm.Config(
        data=(tmp_path / "log.tsv",), held_out_rows=40_000, plot=None, show_progress=False, num_devices=1
    )
    _assert_parity(config, num_seeds=3)
