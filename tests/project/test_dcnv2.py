"""DLRM-DCNv2: the generated files, the model against NumPy and torch, and training against dense tables."""

import dataclasses
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from interrupting import press_ctrl_c_after
from running import run_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import synthetic_bags  # noqa: E402
import synthetic_log  # noqa: E402
import train_dcnv2  # noqa: E402
import training  # noqa: E402

import jaxsok  # noqa: E402
from jaxsok.data import criteo  # noqa: E402

CONFIG = train_dcnv2.Config(
    scale=2e-5,  # the largest tables have 800 rows
    num_rows=3000,
    held_out_rows=900,
    batch_size=128,
    dim=8,
    learning_rate=0.01,
    dense_learning_rate=0.005,
    bottom=(16,),
    rank=12,
    top=(32, 16),
    dense_dtype="float32",
    num_threads=1,
    plot=None,
    checkpoint_dir=None,
    show_progress=False,
    num_devices=1,
)


@pytest.fixture(scope="module", autouse=True)
def promotion_of_users():
    """Allows dtype promotion: Optax raises a Python float to an int32, which these tests otherwise forbid."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return dataclasses.replace(CONFIG, cache_dir=tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def source(config):
    return train_dcnv2.open_log(config)


@pytest.fixture(scope="module")
def result(config):
    return train_dcnv2.train(config)


# -------------------------------------------------------------------------------------------------------------- files


def test_the_tables_are_those_of_the_benchmark():
    rows = train_dcnv2.Config().table_rows
    assert len(rows) == 26 and sum(rows.values()) == 204_184_588
    assert sum(train_dcnv2.BAG_SIZES.values()) == 214
    assert (rows["C1"], rows["C6"], rows["C21"], train_dcnv2.BAG_SIZES["C21"]) == (40_000_000, 3, 40_000_000, 100)
    small = CONFIG.table_rows
    assert (small["C1"], small["C6"], small["C2"]) == (800, 3, 16)


def _bag(key: int, category: int, rows: int, size: int) -> list[int]:
    """Returns a key's bag in Python's integers: Murmur3's finalizer of category, key and place, scaled to the rows."""
    bag = [key]
    for place in range(1, size):
        x = (key * size + place) % 2**32 ^ (0x9E3779B9 * (category + 1)) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ x >> shift) * factor % 2**32
        bag.append((x ^ x >> 16) * rows >> 32)
    return bag


@pytest.mark.parametrize(("rows", "size"), [(40_000_000, 100), (40_000_000, 3), (3, 1), (155, 5)])
def test_a_bag_is_a_function_of_its_first_key(rows, size):
    keys = np.array([0, 1, 2, rows - 1, rows // 2])
    got = synthetic_bags.bag_of(keys, 20, rows, size)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, [_bag(int(key), 20, rows, size) for key in keys])


def test_keys_of_bags_are_uniform_over_the_table():
    bags = synthetic_bags.bag_of(np.arange(50_000), 3, 50_000, 9)[:, 1:]
    counts = np.histogram(bags, bins=100, range=(0, 50_000))[0]
    assert np.abs(counts - bags.size / 100).max() < 5 * np.sqrt(bags.size / 100)  # five deviations of a Poisson count
    other = synthetic_bags.bag_of(np.arange(50_000), 4, 50_000, 9)[:, 1:]
    assert (bags == other).mean() < 1e-3, "another category has other bags"


def test_files_have_bags_that_come_back(config, source):
    columns = source.take(slice(0, len(source)))
    assert len(source) == config.num_rows
    assert columns["integers"].shape == (3000, 13) and columns["integers"].dtype == np.float32
    assert set(np.unique(columns["label"])) == {0.0, 1.0}
    for i, (name, rows) in enumerate(config.table_rows.items()):
        keys = columns[name]
        assert keys.dtype == np.int32 and keys.shape == (3000, train_dcnv2.BAG_SIZES[name])
        assert keys.min() >= 0 and keys.max() < rows
        np.testing.assert_array_equal(keys[7], _bag(int(keys[7, 0]), i, rows, keys.shape[1]))


def test_first_keys_follow_the_power_law(tmp_path):
    """The most frequent keys of a large table have the shares that the law predicts."""
    rows = [100_000] * 26
    synthetic_log.write_bags(tmp_path / "bags", 200_000, seed=3, table_rows=rows, bag_sizes=[1] * 26)
    keys = criteo.binary_source(tmp_path / "bags").take(slice(0, 200_000))["C5"]
    shares = np.sort(np.unique(keys, return_counts=True)[1])[::-1] / keys.size
    edges = np.arange(1.0, rows[0] + 2) ** -0.05
    wanted = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    np.testing.assert_allclose(shares[:20], wanted[:20], rtol=0.1)
    assert np.unique(keys).size == pytest.approx(np.sum(-np.expm1(keys.size * np.log1p(-wanted))), rel=0.02)


def test_uniform_files_repeat_nothing(config, tmp_path):
    config = dataclasses.replace(config, uniform=True, cache_dir=tmp_path)
    keys = train_dcnv2.open_log(config).take(slice(0, 3000))["C21"]
    assert keys.shape == (3000, 100) and keys.dtype == np.int32
    counts = np.bincount(keys.ravel(), minlength=800)
    assert np.abs(counts - keys.size / 800).max() < 5 * np.sqrt(keys.size / 800)
    assert len(np.unique(keys, axis=0)) == 3000, "bags are drawn one by one"


def test_files_do_not_depend_on_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_log, "DAY_SAMPLES", 64)
    arguments = {"num_rows": 300, "seed": 5, "table_rows": [1000] * 26, "bag_sizes": [2] * 26}
    for threads in (1, 3):
        synthetic_log.write_bags(tmp_path / str(threads), num_threads=threads, **arguments)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) == 5 * 3 and names == sorted(path.name for path in (tmp_path / "3").iterdir())
    single, three = (criteo.binary_source(tmp_path / str(threads)).take(slice(0, 300)) for threads in (1, 3))
    for name, column in single.items():
        np.testing.assert_array_equal(column, three[name])


def test_files_that_fail_leave_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(OSError, match="912,000,000 bytes are needed, 5 are free"):
        patched.setattr(synthetic_log.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5}))
        synthetic_log.write_bags(tmp_path / "bags", 1_000_000)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(synthetic_log, "_draw_labels", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        synthetic_log.write_bags(tmp_path / "bags", 10)
    assert not list(tmp_path.iterdir())


def test_bags_that_two_processes_write_at_once(tmp_path, monkeypatch):
    """The second one finds the folder of the first at the end, and takes it."""
    arguments = {"cache_dir": tmp_path, "table_rows": [5] * 26, "bag_sizes": [1] * 26}
    replace = os.replace

    def late(partial, folder):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 0)
        assert synthetic_log.cached_bags(10, **arguments) == folder
        replace(partial, folder)

    monkeypatch.setattr(os, "replace", late)
    folder = synthetic_log.cached_bags(10, **arguments)
    assert len(criteo.binary_source(folder)) == 10
    assert [path for path in tmp_path.rglob("*") if path.is_dir() and path != folder.parent] == [folder]


# -------------------------------------------------------------------------------------------------------------- model


def _arrays(model: train_dcnv2.DCNv2) -> dict[str, list[tuple[np.ndarray, np.ndarray | None]]]:
    """Returns weights [in, out] and biases of each layer in float64."""

    def arrays(layers):
        return [
            (np.float64(layer.kernel[...]), None if layer.bias is None else np.float64(layer.bias[...]))
            for layer in layers
        ]

    return {name: arrays(getattr(model, name)) for name in ("bottom", "down", "up", "top")}


def _inputs(num_samples: int, dim: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    embeddings = {name: rng.normal(size=(num_samples, dim)).astype(np.float32) for name in criteo.CATEGORY_NAMES}
    return rng.normal(size=(num_samples, 13)).astype(np.float32), embeddings


def test_the_model_is_that_of_the_reference():
    """NumPy in float64 computes x' = x0 * (W V x + b) + x between two MLPs."""
    model = train_dcnv2.make_model(CONFIG)
    for layer in model.up:  # biases start at zero, which would hide a forgotten one
        layer.bias[...] = jax.random.normal(jax.random.key(1), layer.bias.shape)
    layers, (integers, embeddings) = _arrays(model), _inputs(5, CONFIG.dim)
    x = np.float64(integers)
    for weights, biases in layers["bottom"]:
        x = np.maximum(x @ weights + biases, 0)
    x = first = np.concatenate([x, *(np.float64(rows) for rows in embeddings.values())], axis=1)
    assert x.shape == (5, 27 * CONFIG.dim) and len(layers["up"]) == 3
    for (v, _), (w, b) in zip(layers["down"], layers["up"], strict=True):
        assert v.shape == (27 * CONFIG.dim, 12) and w.shape == (12, 27 * CONFIG.dim)
        x = first * ((x @ v) @ w + b) + x
    for i, (weights, biases) in enumerate(layers["top"]):
        x = (np.maximum(x, 0) if i else x) @ weights + biases
    with jax.default_matmul_precision("highest"):  # a GPU would round the factors
        np.testing.assert_allclose(model(integers, embeddings), x[:, 0], rtol=2e-5, atol=1e-6)


def test_the_whole_model_has_the_shapes_of_the_benchmark():
    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: train_dcnv2.make_model(train_dcnv2.Config()))))
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}
    mlps = [(13, 512), (512, 256), (256, 128), (3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    wanted = sum(before * after + after for before, after in mlps) + 3 * (2 * 3456 * 512 + 3456)
    assert sum(leaf.size for leaf in leaves) == wanted


def test_bfloat16_is_near():
    model = train_dcnv2.make_model(dataclasses.replace(CONFIG, dense_dtype="bfloat16"))
    logits = model(*_inputs(64, CONFIG.dim))
    exact = train_dcnv2.make_model(CONFIG)(*_inputs(64, CONFIG.dim))
    assert logits.dtype == jnp.float32
    # The bound is a unit of the last of eight bits in each of some twenty products and sums.
    assert 0 < np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


# ----------------------------------------------------------------------------------------------------------- training


def _initial_rows(config: train_dcnv2.Config, source) -> dict[str, np.ndarray]:
    """Returns the rows that the dynamic tables read for each key before they have rows."""
    collection = train_dcnv2.make_collection(config, source)
    longest = max(config.table_rows.values())
    keys = {name: np.arange(longest, dtype=np.int32) % rows for name, rows in config.table_rows.items()}
    embeddings, _ = collection.find(collection.init(seed=config.seed), collection.batch(keys).features)
    return {name: np.asarray(embeddings[name])[:rows] for name, rows in config.table_rows.items()}


def _batches(config: train_dcnv2.Config, source):
    """Returns the batches of the training."""
    for stop in range(config.batch_size, len(source) - config.held_out_rows + 1, config.batch_size):
        yield source.take(slice(stop - config.batch_size, stop))


def _dense_training(config: train_dcnv2.Config, source) -> tuple[np.ndarray, float]:
    """Trains the same model on an `nnx.Embed` per category with Optax's Adagrad; returns the losses and the AUC."""
    initial = _initial_rows(config, source)
    tables = nnx.Dict({name: nnx.Embed(*rows.shape, rngs=nnx.Rngs(0)) for name, rows in initial.items()})
    for name, rows in initial.items():
        tables[name].embedding[...] = jnp.asarray(rows)
    graphdef, params = nnx.split(nnx.Dict(dense=train_dcnv2.make_model(config), tables=tables))
    optimizers = {
        "dense": optax.adagrad(config.dense_learning_rate, 0.0, eps=1e-20),
        "tables": optax.adagrad(config.learning_rate, 0.0, eps=1e-16),
    }
    tx = optax.partition(optimizers, {"dense": "dense", "tables": "tables"})
    params = {part: params[part] for part in ("dense", "tables")}

    def logits_of(params, columns):
        model = nnx.merge(graphdef, nnx.State(params))
        embeddings = {name: model.tables[name](columns[name]).sum(axis=1) for name in criteo.CATEGORY_NAMES}
        return model.dense(columns["integers"], embeddings)

    def loss_of(params, columns):
        return optax.sigmoid_binary_cross_entropy(logits_of(params, columns), columns["label"]).mean()

    @jax.jit
    def step(params, opt_state, columns):
        loss, gradients = jax.value_and_grad(loss_of)(params, columns)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for columns in _batches(config, source):
        params, opt_state, loss = step(params, opt_state, columns)
        losses.append(loss)
    held_out = source.take(slice(len(losses) * config.batch_size, len(source)))
    return np.array(losses), training.auc_of(held_out["label"], np.asarray(logits_of(params, held_out)))


def test_dynamic_tables_train_as_dense_ones_step_by_step(config, source, result):
    losses, auc = _dense_training(config, source)
    assert len(losses) == len(result.losses) == 2100 // 128
    # Rows, model and optimizer are the same; sums in another order accumulate over sixteen steps.
    np.testing.assert_allclose(result.losses[0], losses[0], rtol=1e-6)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
    assert result.auc == pytest.approx(auc, abs=1e-3)
    assert result.num_held_out == 3000 - 2100 // 128 * 128


def test_the_planted_signal_is_learnt(config, source, result):
    held_out = source.take(slice(result.num_samples, len(source)))
    firsts = np.stack([held_out[name][:, 0] for name in criteo.CATEGORY_NAMES], axis=1).astype(np.int64)
    best = training.auc_of(held_out["label"], synthetic_log.planted_logit(held_out["integers"], firsts))
    assert result.losses[-4:].mean() < result.losses[:2].mean()
    assert 0.6 < result.auc < best


@pytest.mark.parametrize(("number", "placement"), [(2, "auto"), (4, "sharded")])
def test_many_devices_train_as_one(config, result, number, placement):
    if len(jax.devices()) < number:
        pytest.skip(f"needs {number} devices; there are {len(jax.devices())}")
    many = train_dcnv2.train(dataclasses.replace(config, num_devices=number, placement=placement))
    np.testing.assert_allclose(many.losses, result.losses, rtol=1e-4)
    assert many.num_rows == result.num_rows
    assert many.auc == pytest.approx(result.auc, abs=1e-3)


def test_the_planner_sums_long_bags_before_they_travel(config, source):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices; there is one")
    config = dataclasses.replace(config, scale=0.01, batch_size=1024, dim=128)
    wide = train_dcnv2.open_log(config)
    collection = train_dcnv2.make_collection(config, wide, training.make_mesh(config.batch_size, 2))
    form = {feature.name: feature.exchange for feature in collection.features}
    assert form["C21"] == "bags" and form["C6"] == "rows", form


@pytest.mark.parametrize("number", [1, 2])
def test_all_rows_are_resident_before_the_first_step(config, result, number):
    if len(jax.devices()) < number:
        pytest.skip(f"needs {number} devices; there are {len(jax.devices())}")
    filled = train_dcnv2.train(dataclasses.replace(config, fill=True, num_devices=number))
    assert filled.num_rows == config.table_rows
    np.testing.assert_array_equal(filled.growth, [list(config.table_rows.values())] * len(result.losses))
    # A row has the same initial numbers whenever its key comes.
    np.testing.assert_allclose(filled.losses, result.losses, rtol=1e-4)


def test_tables_without_room_are_not_called_filled(config, source):
    config = dataclasses.replace(config, capacity=4)
    collection = train_dcnv2.make_collection(config, source)
    with pytest.raises(ValueError, match=r"C1.*800.*pass another seed or a --capacity"):
        train_dcnv2.fill(config, collection)


def test_tables_grow_from_a_small_capacity(config, result, by_doubling):
    grown = train_dcnv2.train(dataclasses.replace(config, capacity=8))
    assert grown.capacity[0] < grown.capacity[-1]
    np.testing.assert_allclose(grown.losses, result.losses, rtol=1e-4)


@pytest.mark.slow  # DLRM's run by the same loop is interrupted twice in test_examples.py
def test_an_interrupted_run_goes_on_at_the_next_batch(config, result, tmp_path, monkeypatch):
    config = dataclasses.replace(config, checkpoint_dir=tmp_path / "run")
    press_ctrl_c_after(monkeypatch, training.CtrlC, 5)
    first, second = train_dcnv2.train(config), train_dcnv2.train(config)
    assert (first.is_interrupted, second.is_interrupted) == (True, False)
    assert second.num_restored == 5 * config.batch_size
    np.testing.assert_allclose(second.losses, result.losses, rtol=2e-5)
    assert not (tmp_path / "run").exists()


def _torch_training(config: train_dcnv2.Config, source, eps: tuple[float, float]) -> tuple[np.ndarray, float]:
    """Trains in torch from equal rows and parameters; `eps` of tables and dense part is added to the root."""
    torch = pytest.importorskip("torch")
    model = _arrays(train_dcnv2.make_model(config))
    tables = {name: torch.tensor(rows, requires_grad=True) for name, rows in _initial_rows(config, source).items()}

    def tensors(layers):
        return [
            [None if array is None else torch.tensor(np.float32(array), requires_grad=True) for array in layer]
            for layer in layers
        ]

    dense = {name: tensors(layers) for name, layers in model.items()}
    weights = [array for layers in dense.values() for layer in layers for array in layer if array is not None]
    optimizers = [
        torch.optim.Adagrad(tables.values(), lr=config.learning_rate, eps=eps[0]),
        torch.optim.Adagrad(weights, lr=config.dense_learning_rate, eps=eps[1]),
    ]

    def logits_of(columns):
        x = torch.tensor(columns["integers"])
        for kernel, bias in dense["bottom"]:
            x = torch.relu(x @ kernel + bias)
        bags = [
            torch.nn.functional.embedding_bag(torch.tensor(np.int64(columns[name])), tables[name], mode="sum")
            for name in criteo.CATEGORY_NAMES
        ]
        x = first = torch.cat([x, *bags], dim=1)
        for (v, _), (w, b) in zip(dense["down"], dense["up"], strict=True):
            x = first * ((x @ v) @ w + b) + x
        for i, (kernel, bias) in enumerate(dense["top"]):
            x = (torch.relu(x) if i else x) @ kernel + bias
        return x[:, 0]

    losses = []
    for columns in _batches(config, source):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_of(columns), torch.tensor(columns["label"]))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    held_out = source.take(slice(len(losses) * config.batch_size, len(source)))
    return np.array(losses), training.auc_of(held_out["label"], logits_of(held_out).detach().numpy())


def test_torch_learns_the_same(config, source, monkeypatch):
    """The eps is too small to matter: torch adds it to the root, Optax and jaxsok under it."""
    pytest.importorskip("torch")
    adagrad = functools.partial(jaxsok.optim.adagrad, initial_accumulator_value=0.0, eps=1e-24)
    monkeypatch.setitem(train_dcnv2.OPTIMIZERS, "adagrad", adagrad)
    with jax.default_matmul_precision("highest"):  # a GPU would round the factors
        result = train_dcnv2.train(config)
    losses, auc = _torch_training(config, source, (1e-12, 1e-12))
    np.testing.assert_allclose(result.losses[0], losses[0], rtol=1e-6)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
    assert result.auc == pytest.approx(auc, abs=1e-3)


@pytest.mark.slow
def test_three_seeds_reach_the_auc_of_dense_tables_and_of_torch(tmp_path):
    """Each implementation uses the reference's eps, on 60,000 samples."""
    differences = []
    for seed in range(3):
        config = dataclasses.replace(CONFIG, num_rows=60_000, held_out_rows=20_000, seed=seed, cache_dir=tmp_path)
        source = train_dcnv2.open_log(config)
        aucs = [
            train_dcnv2.train(config).auc,
            _dense_training(config, source)[1],
            _torch_training(config, source, (1e-8, 1e-10))[1],
        ]
        print(f"seed {seed}: AUC {aucs[0]:.5f} dynamic, {aucs[1]:.5f} dense, {aucs[2]:.5f} torch")
        differences.append(aucs[0] - np.array(aucs[1:]))
    mean, deviation = np.mean(differences, axis=0), np.std(differences, axis=0)
    print(f"difference to dense and to torch: {mean}, deviation {deviation}")
    assert np.abs(mean).max() < 0.003


# ------------------------------------------------------------------------------------------------------- command line


def test_every_option_is_a_field():
    assert train_dcnv2.parse_arguments([]) == train_dcnv2.Config()
    given = train_dcnv2.parse_arguments(["--fill", "--wire", "bfloat16", "--top", "8", "4", "--scale", "0.5"])
    assert (given.fill, given.wire, given.top, given.scale) == (True, "bfloat16", (8, 4), 0.5)


def test_the_memory_of_the_whole_model_is_counted_without_devices(capsys):
    """By hand, a row has 128 floats and as many accumulators, or one accumulator with rowwise Adagrad."""
    assert train_dcnv2.main(["--estimate", "--num-devices", "4"]) == 0
    assert "on each of 4 devices" in capsys.readouterr().out
    whole = train_dcnv2.estimate(train_dcnv2.Config())
    rowwise = train_dcnv2.estimate(train_dcnv2.Config(optimizer="rowwise_adagrad"))
    num_rows = 204_184_588
    assert whole.stores[0].state["rows"] == whole.stores[0].state["optimizer_state"] == num_rows * 512
    assert rowwise.stores[0].state["optimizer_state"] == num_rows * 4
    assert whole.stores[0].num_keys == 65_536 * 214


def test_the_command_trains_reports_and_draws(tmp_path, monkeypatch, capsys):
    arguments = ["--scale", 2e-5, "--num-rows", 2000, "--held-out-rows", 500, "--batch-size", 128, "--dim", 8]
    arguments += ["--bottom", 16, "--top", 16, "--rank", 8, "--cache-dir", tmp_path / "cache", "--fill"]
    arguments += ["--plot", tmp_path / "plot.png", "--checkpoint-dir", tmp_path / "run", "--num-devices", 1]
    assert run_program(ROOT / "examples/train_dcnv2.py", arguments, monkeypatch) == 0
    printed = capsys.readouterr().out
    for words in (
        "Device: ",
        "Rows: float32; on the wire rows float32",
        "Distinct keys of",
        "held-out AUC",
        "samples/s",
    ):
        assert words in printed
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
