"""A DLRM trained in TorchRec continues in jaxsok with the same losses and rows.

Without torch, torchrec and fbgemm-gpu-cpu the tests are skipped; docs/porting_torchrec.md says how to install them.
"""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsok
from jaxsok import optim
from jaxsok.interchange import torch_files, torchrec

pytest.importorskip("torchrec", reason="needs torchrec", exc_type=ImportError)
pytest.importorskip("fbgemm_gpu", reason="needs fbgemm-gpu-cpu", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torchrec as there  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.sharding_plan import (  # noqa: E402
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.models.dlrm import DLRM  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

RATE, DIM, NUM_SAMPLES, NUM_DENSE = 0.05, 8, 64, 4
TABLES = {  # rows, sharding, optimizers of TorchRec and jaxsok
    "user": (300, row_wise(), there.optim.RowWiseAdagrad, optim.rowwise_adagrad(RATE)),
    "item": (200, column_wise([0, 0]), there.optim.Adagrad, optim.adagrad(RATE, 0.0, 1e-8, eps_in_sqrt=False)),
    "shop": (20, table_wise(0), there.optim.SGD, optim.sgd(RATE)),
}


def batch_of(number):
    """Makes a batch: bags of up to three keys, some of them frequent, and labels that depend on all features."""
    rng = np.random.default_rng([7, number])
    # Every batch has the same number of keys, so that the step is compiled once.
    lengths = {name: rng.permutation(np.arange(NUM_SAMPLES) % 4) for name in TABLES}
    values = {name: np.minimum(rng.zipf(1.3, lengths[name].sum()), rows) - 1 for name, (rows, *_) in TABLES.items()}
    dense = rng.normal(size=(NUM_SAMPLES, NUM_DENSE)).astype(np.float32)
    starts = np.cumsum(lengths["user"]) - lengths["user"]
    taste = np.sin(np.append(values["user"], 0)[starts]) * (lengths["user"] > 0)
    labels = (dense.sum(axis=1) + taste + rng.normal(size=NUM_SAMPLES) > 0).astype(np.float32)
    return values, lengths, dense, labels


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """Starts a job of one process."""
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_there():
    """Makes the TorchRec model with its fused optimizers, and a step of both."""
    torch.manual_seed(0)
    configs = [
        there.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, (rows, *_) in TABLES.items()
    ]
    bags = there.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = DLRM(bags, NUM_DENSE, [16, DIM], [16, 1], dense_device=torch.device("cpu"))
    for name, parameter in bags.named_parameters():
        there.optim.apply_optimizer_in_backward(TABLES[name.split(".")[1]][2], [parameter], {"lr": RATE})
    kinds = {name: kind for name, (_, kind, *_) in TABLES.items()}
    plan = construct_module_sharding_plan(bags, kinds, local_size=1, world_size=1, device_type="cpu")
    plan = ShardingPlan({"sparse_arch.embedding_bag_collection": plan})
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adagrad(params, lr=RATE))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

    def step(batch):
        values, lengths, numbers, labels = batch
        jagged = there.KeyedJaggedTensor(
            keys=list(TABLES),
            values=torch.from_numpy(np.concatenate(list(values.values()))),
            lengths=torch.from_numpy(np.concatenate(list(lengths.values()))),
        )
        optimizer.zero_grad()
        logits = model(torch.from_numpy(numbers), jagged).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


def layers_of(tensors, prefix):
    """Returns the weights and biases of a DLRM's two stacks of layers."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {
        arch: [
            (jnp.asarray(tensors[name]), jnp.asarray(tensors[name.replace("weight", "bias")]))
            for name in sorted(names)
            if f"{arch}_arch" in name and "weight" in name and not name.endswith("step")
        ]
        for arch in ("dense", "over")
    }


def stack(layers, x, is_last_linear=False):
    """Runs layers, each with ReLU."""
    for number, (weight, bias) in enumerate(layers):
        x = x @ weight.T + bias[None]
        if not (is_last_linear and number == len(layers) - 1):
            x = jax.nn.relu(x)
    return x


def loss_fn(layers, embeddings, dense, labels):
    """Returns the loss of TorchRec's DLRM."""
    x = stack(layers["dense"], dense)
    rows = jnp.stack([x, *(embeddings[name] for name in TABLES)], axis=1)
    first, second = np.triu_indices(len(TABLES) + 1, 1)
    products = (rows @ rows.swapaxes(1, 2))[:, first, second]
    logits = stack(layers["over"], jnp.concatenate([x, products], axis=1), is_last_linear=True)[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def make_here(folder):
    """Makes the collection and its state from the checkpoint, and a step that also moves the dense layers."""
    tables = [jaxsok.TableSpec(name, DIM, optimizer, capacity=64) for name, (*_, optimizer) in TABLES.items()]
    features = [jaxsok.FeatureSpec(name, table=name, combiner="sum") for name in TABLES]
    collection = jaxsok.Collection(tables, features)
    state = torchrec.load(collection, collection.init(), folder, step=500)
    tensors = torchrec.read_dense(folder)
    held = {"layers": layers_of(tensors, "model."), "sums": None}
    held["sums"] = layers_of(
        {name.removesuffix(".sum"): array for name, array in tensors.items() if name.endswith(".sum")}, "optimizer."
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, layers, sums, features, dense, labels):
        embeddings, state, plan = collection.lookup(state, features)
        loss, gradients = jax.value_and_grad(loss_fn, argnums=(0, 1))(layers, embeddings, dense, labels)
        state, _ = collection.update(state, plan, gradients[1])
        sums = jax.tree.map(lambda total, g: total + g * g, sums, gradients[0])
        layers = jax.tree.map(
            lambda weight, g, total: weight - RATE * g / (jnp.sqrt(total) + 1e-10), layers, gradients[0], sums
        )
        return state, layers, sums, loss

    def step(state, batch):
        values, lengths, dense, labels = batch
        jagged = jaxsok.from_kjt(
            np.concatenate(list(values.values())), np.concatenate(list(lengths.values())), list(TABLES)
        )
        packed = collection.batch({**jagged})
        state, held["layers"], held["sums"], loss = train_step(
            state, held["layers"], held["sums"], packed.features, dense, labels
        )
        return state, loss

    return collection, state, step


@pytest.fixture(scope="module")
def stopped(process_group, tmp_path_factory):
    """Trains 500 steps in TorchRec and saves them."""
    model, optimizer, step = make_there()
    for number in range(500):
        step(batch_of(number))
    folder = tmp_path_factory.mktemp("stopped") / "checkpoint"
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return folder, model, step


def test_training_goes_on(stopped):
    """The losses of steps 501 to 600 agree within 1e-5, and rows after each step as well; a changed row is noticed."""
    folder, model, step_there = stopped
    collection, state, step_here = make_here(folder)
    batches = [batch_of(number) for number in range(500, 600)]
    rows = torchrec.rows_of(model)
    found = jaxsok.parity(collection, state, step_here, step_there, rows, batches, rtol=1e-4, atol=1e-5)
    assert found.table is None and found.num_steps == 100, str(found)
    np.testing.assert_allclose(found.losses[:, 0], found.losses[:, 1], rtol=1e-5)
    assert len(set(found.losses[:, 0].round(6))) > 90, "losses that do not move compare nothing"
    names = [name for name in model.state_dict() if name.endswith("item.weight")]
    with torch.no_grad():
        model.state_dict()[names[0]].local_shards()[0].tensor[17, 3] += 1
    found = jaxsok.parity(collection, found.state, step_here, step_there, rows, batches)
    assert (found.num_steps, found.table, found.key) == (0, "item", 17)
    assert abs(found.theirs - found.ours).argmax() == 3


def test_chunks_are_those_that_torch_reads(stopped):
    """The reader without torch gives the bits that torch's own reader gives."""
    folder, model, _ = stopped
    tensors = torch_files.read_tensors("test", folder)
    dense = {name: tensor for name, tensor in model.state_dict().items() if not hasattr(tensor, "local_shards")}
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in dense.items()}}
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state["model"].items():
        np.testing.assert_array_equal(tensors[f"model.{name}"].read(), tensor.numpy())
    assert len(state["model"]) == 8


def test_golden_checkpoint_is_made_again(tmp_path):
    """Four processes write the files of tests/golden, chunk by chunk."""
    script = pathlib.Path(__file__).parents[1] / "golden" / "make_torchrec.py"
    subprocess.run([sys.executable, "-W", "ignore", str(script), str(tmp_path / "made")], check=True, timeout=300)
    made, kept = (
        torch_files.read_tensors("test", folder) for folder in (tmp_path / "made", script.parent / "torchrec")
    )
    assert made.keys() == kept.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(made[name].read(), tensor.read())
        assert [sizes for sizes, *_ in made[name].chunks.values()] == [sizes for sizes, *_ in tensor.chunks.values()]
