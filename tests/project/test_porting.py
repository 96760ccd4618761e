"""The programs of docs/porting_*.md in several processes, on other devices, and with distinct rows."""

import functools
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import free_port, wait_for_end

import jaxsok
from jaxsok import serving
from jaxsok.serving import artifact, errors, hps, nnx

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOSSES = [30.0, 27.0258, 24.9137]  # printed by SOK


def test_sok_in_two_processes_with_their_own_rows(tmp_path):
    """The page's function is unchanged; each process has one of the two samples and two of the four devices."""
    page = (ROOT / "docs/porting_sok.md").read_text()
    program = next(
        code for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.M) if "def train" in code
    )
    script = f"""
import os, jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("localhost:{free_port()}", 2, int(os.environ["NUMBER"]))
{program}
print([train(jax.devices(), target_gpu) for target_gpu in (-1, 3)])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = []
    for number in range(2):
        with (tmp_path / f"{number}.out").open("wb") as out, (tmp_path / f"{number}.err").open("wb") as err:
            command, variables = [sys.executable, "-c", script], {**environment, "NUMBER": str(number)}
            processes.append(subprocess.Popen(command, env=variables, stdout=out, stderr=err))
    assert wait_for_end(processes, tmp_path, timeout_s=180) == [0, 0], (tmp_path / "0.err").read_text()[-1500:]
    for number in range(2):
        *_, printed = (tmp_path / f"{number}.out").read_text().splitlines()
        assert json.loads(printed) == [LOSSES, LOSSES]


# Table fusion --------------------------------------------------------------------------------------------------------

NUM_TABLES, NUM_ROWS, DIM, NUM_KEYS, BATCH_SIZE, NUM_ITERS = 8, 300, 16, 3, 32, 100


def rows_of(table, keys):
    """Returns the row of each key, in the same places."""
    return np.sin(np.asarray(keys)[..., None] * 0.7 + np.arange(DIM) + table).astype(np.float32)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Writes the demo's files of 8 tables with keys of their own by `struct.pack`, and its JSON."""
    folder = tmp_path_factory.mktemp("hps")
    model = {
        "model": "8_table",
        "sparse_files": [],
        "num_of_worker_buffer_in_pool": NUM_TABLES,
        "embedding_table_names": [f"table{i}" for i in range(NUM_TABLES)],
        "embedding_vecsize_per_table": [DIM] * NUM_TABLES,
        "maxnum_catfeature_query_per_table_per_sample": [NUM_KEYS] * NUM_TABLES,
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": BATCH_SIZE,
        "cache_refresh_percentage_per_iteration": 1.0,
        "hit_rate_threshold": 1.0,
        "gpucacheper": 1.0,
        "gpucache": True,
        "embedding_cache_type": "dynamic",
        "use_context_stream": True,
    }
    for i in range(NUM_TABLES):
        path = folder / f"table{i}"
        path.mkdir()
        with open(path / "key", "wb") as key_file, open(path / "emb_vector", "wb") as vec_file:
            for key in range(i * NUM_ROWS, (i + 1) * NUM_ROWS):
                key_file.write(struct.pack("q", key))
                vec_file.write(struct.pack(f"{DIM}f", *rows_of(i, key)))
        model["sparse_files"].append(str(path))
    config = {"supportlonglong": False, "fuse_embedding_table": True, "models": [model]}
    (folder / "8_table.json").write_text(json.dumps(config))
    return folder, config


class Model(flax.nnx.Module):
    """The demo's model, with weights in the dense layer that make columns distinct."""

    def __init__(self, file):
        self.lookups = hps.LookupLayers("8_table", file)
        self.kernel = flax.nnx.Param(np.linspace(-1, 1, NUM_TABLES * NUM_KEYS * DIM, dtype=np.float32)[:, None])

    def __call__(self, **inputs):
        found = [rows.reshape(-1, NUM_KEYS * DIM) for rows in self.lookups(inputs).values()]
        return jnp.matmul(jnp.concatenate(found, axis=1), self.kernel.get_value(), precision="highest")


@pytest.mark.parametrize("back_end", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_demo_of_table_fusion(demo, tmp_path, back_end):
    """100 batches of int32 keys agree with NumPy, in layers, saved model and session; the JSON may say no to fusion."""
    folder, config = demo
    device = jax.local_devices(backend=back_end)[0]
    rng, file = np.random.default_rng(0), tmp_path / "8_table.json"
    inputs_seq = [
        {
            f"table{i}": rng.integers(i * NUM_ROWS - 5, (i + 1) * NUM_ROWS, (BATCH_SIZE, NUM_KEYS), np.int32)
            for i in range(NUM_TABLES)
        }
        for _ in range(NUM_ITERS)
    ]
    for inputs in inputs_seq:
        inputs["table0"] = np.maximum(inputs["table0"], 0)
    with jax.default_device(device):
        file.write_text((folder / "8_table.json").read_text())
        model = Model(file)
        specs = {f"table{i}": artifact.KeysInput(f"table{i}", shape=(NUM_KEYS,)) for i in range(NUM_TABLES)}
        artifact.export_model(tmp_path / "saved", model, serving.load_tables(file), specs)
        tables, saved = serving.load_tables(file, device=device), artifact.load_model(tmp_path / "saved", device)
        predictions = [np.asarray(saved.call(tables, inputs)["output"]) for inputs in inputs_seq]
        nnx.set_tables(model, tables)
        of_model = model(**inputs_seq[0])
    np.testing.assert_allclose(of_model, predictions[0], rtol=1e-5, atol=1e-5)
    assert tables.stores[0].rows.devices() == {device}
    lowered = saved._program.lower(*saved._bind(tables), saved.read(inputs_seq[0])[0]).as_text()
    assert lowered.count("stablehlo.custom_call @jaxsok_lookup_frozen") == 1
    served = {**config, "models": [{**config["models"][0], "dense_file": str(tmp_path / "saved")}]}
    for is_fused in (True, False):
        with serving.open({**served, "fuse_embedding_table": is_fused}, device, warm_up=False) as session:
            np.testing.assert_array_equal(session.predict(inputs_seq[0])["output"], predictions[0])
            found = session.lookup({"table3": inputs_seq[0]["table3"]})["table3"]
    kernel = np.asarray(model.kernel.get_value())
    for inputs, prediction in zip(inputs_seq, predictions, strict=True):
        rows = []
        for i in range(NUM_TABLES):
            keys = inputs[f"table{i}"]
            is_there = (keys >= i * NUM_ROWS) & (keys < (i + 1) * NUM_ROWS)
            rows.append(np.where(is_there[..., None], rows_of(i, keys), 0.0).reshape(BATCH_SIZE, -1))
        # The outputs are sums of 384 products in float32.
        np.testing.assert_allclose(prediction, np.concatenate(rows, axis=1) @ kernel, rtol=1e-4, atol=1e-4)
    keys = inputs_seq[0]["table3"]
    np.testing.assert_array_equal(found[keys >= 3 * NUM_ROWS], rows_of(3, keys[keys >= 3 * NUM_ROWS]))


def test_layers_with_the_arguments_of_hps(demo):
    """NumPy computes the same from rows and bags of one table, with weights of their own."""
    folder, _ = demo
    make = functools.partial(hps.LookupLayer, ps_config_file=folder / "8_table.json")
    keys = np.array([[600, 601, 7]])  # 7 is a key of another table
    want = np.stack([rows_of(2, 600), rows_of(2, 601), np.zeros(DIM)])[None]
    for dtype in (np.float32, "float32", jnp.float32, np.dtype("float32")):
        np.testing.assert_array_equal(make("8_table", 2, DIM, dtype)(keys), want)
    sparse = hps.SparseLookupLayer("8_table", 2, DIM, np.float32, folder / "8_table.json", global_batch_size=64)
    indices, ids, weights = [[0, 0], [0, 1], [2, 0]], np.array([600, 601, 602]), np.float32([1.0, 3.0, 2.0])
    sp_ids = jaxsok.Coo(indices, ids, shape=(3, 2))
    mean = np.stack([(rows_of(2, 600) + 3 * rows_of(2, 601)) / 4, np.zeros(DIM), rows_of(2, 602)])
    weighted = jaxsok.Coo(indices, ids, weights=weights, shape=(3, 2))
    np.testing.assert_allclose(sparse(weighted), mean, rtol=1e-6, atol=1e-7)
    bags = jaxsok.Bags(ids, lengths=np.array([2, 0, 1]))
    of_bags = jaxsok.Bags(weights, lengths=np.array([2, 0, 1]))
    sp_weights = jaxsok.Coo(indices, weights, shape=(3, 2))
    for given in ((sp_ids, sp_weights), (sp_ids, weights), (bags, of_bags), (bags, weights)):
        np.testing.assert_allclose(sparse(*given), mean, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"sp_weights: indices: got .*, wanted those of sp_ids"):
        sparse(sp_ids, jaxsok.Coo(indices[::-1], weights, shape=(3, 2)))
    total = np.stack([rows_of(2, 600) + rows_of(2, 601), np.zeros(DIM), rows_of(2, 602)])
    np.testing.assert_allclose(sparse(sp_ids, combiner="sum"), total, rtol=1e-6, atol=1e-7)


def test_arguments_that_do_not_fit_the_configuration_are_refused(demo):
    folder, _ = demo
    file = folder / "8_table.json"
    for kind, message, arguments in [
        (ValueError, f'emb_vec_size: got 128, wanted {DIM}.*"table2"', ("8_table", 2, 128)),
        (ValueError, "table_id: got 8, wanted", ("8_table", 8, DIM)),
        (ValueError, "emb_vec_dtype: got float16", ("8_table", 2, DIM, np.float16)),
        (errors.UnknownModelError, "model: got 'dlrm', wanted one of", ("dlrm", 2, DIM)),
    ]:
        for layer in (hps.LookupLayer, hps.SparseLookupLayer):
            with pytest.raises(kind, match=f"{layer.__name__}: {message}"):
                layer(*arguments, ps_config_file=file)
    with pytest.raises(errors.UnknownTableError, match="load_tables: table: got 'user', wanted one of"):
        serving.load_tables(file, tables=["user"])


def test_tensors_of_tensorflow_in_the_sparse_layer(demo):
    """The layer takes SparseTensor ids and weights, as HPS's own layer does."""
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    folder, _ = demo
    sparse = hps.SparseLookupLayer("8_table", 2, DIM, tf.float32, folder / "8_table.json")
    indices, ids, weights = [[0, 0], [0, 1], [2, 0]], np.array([600, 601, 602]), np.float32([1.0, 3.0, 2.0])
    sp_ids, sp_weights = tf.SparseTensor(indices, ids, (3, 2)), tf.SparseTensor(indices, weights, (3, 2))
    table = tf.constant(np.stack([rows_of(2, key) for key in range(603)]))
    for combiner in ("sum", "mean", "sqrtn"):
        want = tf.nn.safe_embedding_lookup_sparse(table, sp_ids, sp_weights, combiner=combiner)
        np.testing.assert_allclose(sparse(sp_ids, sp_weights, combiner=combiner), want, rtol=1e-5, atol=1e-6)
