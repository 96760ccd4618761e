"""MovieLens: the reader against plain loops; both models learn on dynamic tables as on dense ones.

The log is synthetic. JAXSOK_ML100K may name the folder of a real copy, which may not be redistributed.
"""

import dataclasses
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupting import press_ctrl_c_after
from running import run_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import movielens  # noqa: E402
import train_movielens  # noqa: E402
import training  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def promotion_of_users():
    """Allows dtype promotion: Optax's Adam raises a Python float to an int32, which these tests otherwise forbid."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a synthetic log: 90 users, 120 items, 6,000 ratings."""
    folder = tmp_path_factory.mktemp("movielens")
    movielens.write_log(folder, 6000, num_users=90, num_items=120, seed=3)
    return folder


@pytest.fixture
def small(folder):
    """Returns a configuration without growth, so that a single step compiles."""
    return train_movielens.Config(
        data=folder / "u.data", batch_size=256, capacity=512, epochs=3, num_devices=1, show_progress=False,
        checkpoint_dir=None,
    )  # fmt: skip


trained = functools.cache(train_movielens.train)
"""A run of a configuration, once for all tests that look at it."""


# ------------------------------------------------------------------------------------------------------------- reader


def test_ratings_come_in_the_order_of_their_times(folder):
    ratings = movielens.read_ratings(folder / "u.data")
    lines = [tuple(map(int, line.split("\t"))) for line in (folder / "u.data").read_text().splitlines()]
    assert [line[3] for line in lines] != sorted(line[3] for line in lines), "the file itself has no order"
    lines.sort(key=lambda line: line[3])
    columns = zip(ratings.user, ratings.item, ratings.rating, ratings.seconds, strict=True)
    assert [tuple(map(int, column)) for column in columns] == lines
    assert ratings.liked.tolist() == [float(line[2] >= 4) for line in lines]
    assert 0.2 < ratings.liked.mean() < 0.8


def test_equal_times_keep_the_order_of_the_file(tmp_path):
    (tmp_path / "u.data").write_text("9\t1\t5\t3600\n7\t2\t3\t86399\n8\t1\t4\t3600\n7\t3\t1\t-1\n")
    ratings = movielens.read_ratings(tmp_path / "u.data")
    assert ratings.user.tolist() == [7, 9, 8, 7]
    assert ratings.hour.tolist() == [23, 1, 1, 23]
    assert ratings.liked.tolist() == [0, 1, 1, 0]
    assert ratings.part(1, 3).user.tolist() == [9, 8]


def test_genres_are_bags(folder):
    genres = movielens.read_genres(folder / "u.item")
    of_item = {}
    for line in (folder / "u.item").read_text().splitlines():
        fields = line.split("|")
        of_item[int(fields[0])] = [i for i, flag in enumerate(fields[5:]) if flag == "1"]
    asked = np.array([*of_item, 10**12, -5, 0, *reversed(of_item)])
    keys, lengths = genres.bags(asked)
    cuts = np.split(keys, np.cumsum(lengths)[:-1])
    assert [cut.tolist() for cut in cuts] == [of_item.get(int(item), []) for item in asked]
    assert genres.most == max(map(len, of_item.values())) > 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("u.data", "1\t2\t3\n", "line 1: got '1\\\\t2\\\\t3', wanted user, item, rating and seconds"),
        ("u.data", "1\t2\t3\t4\n1\t2\tx\t4\n", "line 2: got"),
        ("u.data", "1\t2\t6\t4\n", "line 1: rating: got 6, wanted 1 to 5"),
        ("u.item", "1|Toy Story|||" + "|0" * 18 + "\n", "line 1: got"),
        ("u.item", "1|Toy Story|||" + "|2" * 19 + "\n", "line 1: got"),
        ("u.item", ("7|Toy Story|||" + "|0" * 19 + "\n") * 2, "line 2: item: got 7 twice"),
    ],
)
def test_lines_of_another_format_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    read = movielens.read_ratings if name == "u.data" else movielens.read_genres
    with pytest.raises(movielens.LogFormatError, match=message):
        read(tmp_path / name)


def test_titles_are_latin_1(tmp_path):
    (tmp_path / "u.item").write_bytes("3|Misérables, Les|||".encode("latin-1") + b"|0" * 18 + b"|1\n")
    genres = movielens.read_genres(tmp_path / "u.item")
    assert genres.items.tolist() == [3] and genres.keys.tolist() == [18]


# ----------------------------------------------------------------------------------------------------------- training


def test_tables_grow_to_the_keys_that_were_trained_on(small):
    small = dataclasses.replace(small, capacity=32, epochs=2)
    result = train_movielens.train(small)
    log, genres = train_movielens.read_log(small)
    trained = log.part(0, 5400)
    assert result.num_held_out == 600 and result.num_samples == 2 * 5400
    assert result.losses.shape == (2 * 22,)
    distinct = {"user": set(trained.user.tolist()), "item": set(trained.item.tolist()), "hour": set(trained.hour)}
    distinct["genre"] = set(genres.bags(trained.item)[0].tolist())
    assert result.num_rows == {name: len(distinct[name]) for name in train_movielens.FEATURE_NAMES}
    assert sum(result.num_rows.values()) > 4 * 32, "small tables: this run has to grow them"
    held_out = log.part(5400, 6000)
    num_new = sum(user not in distinct["user"] for user in held_out.user.tolist())
    assert result.new_keys["user"] == pytest.approx(num_new / 600) and num_new > 0


def embeddings_of(samples):
    """Makes random rows for both models."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(samples, 6)).astype(np.float32) for name in train_movielens.FEATURE_NAMES}


def test_factorization_is_that_of_all_pairs():
    """The formula with the square of the sum agrees with a loop over pairs."""
    config = train_movielens.Config(dim=6)
    graphdef, params = train_movielens.make_model(config)
    params["bias"][...] = jnp.float32(0.25)
    embeddings = embeddings_of(3)
    logits = train_movielens.nnx.merge(graphdef, params)({name: jnp.asarray(e) for name, e in embeddings.items()})
    for i, logit in enumerate(np.asarray(logits)):
        rows = [embeddings[name][i].astype(np.float64) for name in train_movielens.FEATURE_NAMES]
        pairs = [rows[a][1:] @ rows[b][1:] for a in range(4) for b in range(a)]
        assert logit == pytest.approx(0.25 + sum(row[0] for row in rows) + sum(pairs), rel=1e-5)


def test_towers_meet_in_a_dot_product():
    """User and hour move one tower, item and genres the other."""
    config = train_movielens.Config(dim=6, model="two_tower", hidden=(5,))
    graphdef, params = train_movielens.make_model(config)
    model, embeddings = train_movielens.nnx.merge(graphdef, params), embeddings_of(2)
    logits = np.asarray(model({name: jnp.asarray(e) for name, e in embeddings.items()}))

    def tower(layers, x):
        kernels = [(np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])) for layer in layers]
        hidden = np.maximum(x @ kernels[0][0] + kernels[0][1], 0)
        return hidden @ kernels[1][0] + kernels[1][1]

    user = tower(model.user, np.concatenate([embeddings["user"], embeddings["hour"]], axis=1))
    item = tower(model.item, np.concatenate([embeddings["item"], embeddings["genre"]], axis=1))
    np.testing.assert_allclose(logits, (user * item).sum(axis=1), rtol=1e-4, atol=1e-5)


def test_padding_of_the_last_batch_counts_nothing():
    config = train_movielens.Config(dim=6)
    graphdef, params = train_movielens.make_model(config)
    embeddings = {name: jnp.asarray(e) for name, e in embeddings_of(4).items()}
    few = {name: e[:3] for name, e in embeddings.items()}
    label, mask = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.array([True, True, True, False])
    padded = train_movielens.log_loss(params, embeddings, label, mask, graphdef)
    whole = train_movielens.log_loss(params, few, label[:3], mask[:3], graphdef)
    assert float(padded) == pytest.approx(float(whole), rel=1e-6)


def assert_parity(config, num_seeds):
    """Asserts equal first losses and equal mean AUC of dynamic and dense tables; returns both AUCs."""
    aucs = []
    for seed in range(num_seeds):
        config = dataclasses.replace(config, seed=seed)
        dynamic = trained(config)
        dense = train_movielens.train(dataclasses.replace(config, dense=True))
        # Rows and model are equal in the first step, so only the order of sums may differ.
        np.testing.assert_allclose(dynamic.losses[0], dense.losses[0], rtol=1e-6)
        # A GPU multiplies matrices with fewer bits, and differently in the two programs.
        tolerance = 1e-4 if jax.default_backend() == "cpu" else 1e-2
        np.testing.assert_allclose(dynamic.losses[:20], dense.losses[:20], rtol=tolerance)
        print(f"seed {seed}: AUC {dynamic.auc:.5f} dynamic, {dense.auc:.5f} dense")
        aucs.append((dynamic.auc, dense.auc))
    dynamic, dense = np.mean(aucs, axis=0)
    # On a GPU the sums of the dense model also differ from run to run, and its AUC by 0.002.
    assert abs(dynamic - dense) < (0.003 if jax.default_backend() == "cpu" else 0.01), aucs
    return dynamic, dense


def test_an_interrupted_run_goes_on_at_the_next_batch(small, tmp_path, monkeypatch):
    """It stops at the last batch of an epoch, which is smaller, and in the middle of the next epoch."""
    whole = trained(small)
    press_ctrl_c_after(monkeypatch, training.CtrlC, 22, 30)
    config = dataclasses.replace(small, checkpoint_dir=tmp_path / "run")
    results = [train_movielens.train(config) for _ in range(3)]
    assert [result.is_interrupted for result in results] == [True, True, False]
    last = results[-1]
    assert last.num_samples == whole.num_samples and 0 < last.num_restored < last.num_samples
    np.testing.assert_array_equal(last.losses, whole.losses)
    np.testing.assert_array_equal(last.growth, whole.growth)
    assert (last.auc, last.num_rows) == (whole.auc, whole.num_rows)


@pytest.mark.parametrize("model", sorted(train_movielens.MODELS))
def test_dynamic_tables_learn_as_dense_ones_do(small, model):
    dynamic, _ = assert_parity(dataclasses.replace(small, model=model), num_seeds=1)
    assert dynamic > 0.6


@pytest.mark.slow
def test_two_devices_learn_as_one(small):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    single, two = (trained(dataclasses.replace(small, num_devices=number)) for number in (1, 2))
    np.testing.assert_allclose(single.losses, two.losses, rtol=1e-4)
    assert single.num_rows == two.num_rows
    assert single.auc == pytest.approx(two.auc, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(train_movielens.MODELS))
def test_parity_on_the_real_log(model):
    """The mean AUC of five seeds is that of docs/large_examples.md, and equals that of dense tables."""
    if "JAXSOK_ML100K" not in os.environ:
        pytest.skip("set JAXSOK_ML100K to the folder of MovieLens 100K (its licence forbids handing it on)")
    data = pathlib.Path(os.environ["JAXSOK_ML100K"]) / "u.data"
    config = train_movielens.Config(
        data=data, model=model, num_devices=1, show_progress=False, checkpoint_dir=None
    )  # fmt: skip
    dynamic, dense = assert_parity(config, num_seeds=5)
    print(f"{model}: mean AUC {dynamic:.5f} dynamic, {dense:.5f} dense")
    assert dynamic > 0.72


# ------------------------------------------------------------------------------------------------------- command line


def test_command_line(folder, tmp_path, monkeypatch, capsys):
    """It runs as a program, and reports an invalid log in one line."""
    program, options = ROOT / "examples/train_movielens.py", ["--epochs", 1, "--num-devices", 1]
    small = ["--model", "two_tower", "--hidden", 8, "--batch-size", 512]
    monkeypatch.chdir(tmp_path)
    assert run_program(program, [*options, "--data", folder / "u.data", *small], monkeypatch) == 0
    printed = capsys.readouterr()
    assert "held-out AUC" in printed.out and "samples/s" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["train_movielens.png"]
    assert run_program(program, [*options, "--data", folder / "u.item"], monkeypatch) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("train_movielens: read_ratings: ")


def test_every_field_has_an_option():
    names = [field.name for field in dataclasses.fields(train_movielens.Config)]
    words = ["--data", "u.data", "--hidden", "4", "5", "--dense", "--no-progress"]
    config = train_movielens.parse_arguments(words)
    assert config.hidden == (4, 5) and config.dense and not config.show_progress and config.data.name == "u.data"
    assert train_movielens.parse_arguments([]) == train_movielens.Config()
    assert set(vars(config)) == set(names)


def test_nothing_to_train_on_is_refused(small):
    with pytest.raises(ValueError, match="got 6000 ratings to train on, 0 held out"):
        train_movielens.train(dataclasses.replace(small, held_out=0.0))
    with pytest.raises(ValueError, match="devices cannot share batches of 256 samples evenly"):
        train_movielens.train(dataclasses.replace(small, num_devices=3))
