"""Writes tests/golden/torchrec: a checkpoint of TorchRec with a table of every sharding type.

Run it with torch 2.13, torchrec 1.8 and fbgemm-gpu-cpu 1.8 as `python tests/golden/make_torchrec.py FOLDER`. Four
processes of two hosts shard the tables. Each number says where it belongs: in row r and column c of a table is
`r + c / 16`, in optimizer state `100 + r + c / 16`; rowwise state of column blocks counts rows through, block by block.
"""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torchrec
from torchrec.distributed import sharding_plan
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

WORLD_SIZE, LOCAL_SIZE, ROWS, DIM = 4, 2, 5, 8


def grid():
    """Shards both rows and columns; TorchRec's own `grid_shard` does not split tables as narrow as these."""
    top, part = (ROWS + 1) // 2, DIM // 2
    sizes = [[top, part], [ROWS - top, part]]
    shards = [(sizes[rank % 2], [top * (rank % 2), part * (rank // 2)], rank) for rank in range(WORLD_SIZE)]
    return lambda param, local_size, world_size, device, sharder: sharding_plan._get_parameter_sharding(
        param, "grid_shard", shards, local_size, device, sharder
    )


BAGS = {
    "tw": (sharding_plan.table_wise(rank=1), torchrec.optim.SGD),
    "rw": (sharding_plan.row_wise(), torchrec.optim.RowWiseAdagrad),
    "cw": (sharding_plan.column_wise(ranks=[0, 2]), torchrec.optim.Adagrad),
    "twcw": (sharding_plan.column_wise(ranks=[2, 3]), torchrec.optim.RowWiseAdagrad),
    "twrw": (sharding_plan.table_row_wise(host_index=1), torchrec.optim.Adagrad),
    "grid": (grid(), torchrec.optim.RowWiseAdagrad),
    "dp": (sharding_plan.data_parallel(), None),  # The optimizer of the dense parameters updates it.
}
SEQUENCES = {"seq": (sharding_plan.table_wise(rank=0), torchrec.optim.RowWiseAdagrad)}


class Model(torch.nn.Module):
    """A model with a collection of bags, a collection of sequences, and a dense layer."""

    def __init__(self):
        super().__init__()
        options = {"embedding_dim": DIM, "num_embeddings": ROWS}
        bags = [torchrec.EmbeddingBagConfig(name=name, feature_names=[name], **options) for name in BAGS]
        sequences = [torchrec.EmbeddingConfig(name=name, feature_names=[name], **options) for name in SEQUENCES]
        self.bags = torchrec.EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
        self.sequences = torchrec.EmbeddingCollection(tables=sequences, device=torch.device("meta"))
        self.over = torch.nn.Linear(2, 3)


def fill(tensor, base):
    """Writes the numbers of all shards, by their offsets."""
    shards = [((0, 0), tensor)]
    if hasattr(tensor, "local_shards"):
        shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in tensor.local_shards()]
    for first, shard in shards:
        numbers = base + first[0] + torch.arange(shard.shape[0])
        if shard.ndim == 2:
            numbers = numbers[:, None] + (first[1] + torch.arange(shard.shape[1])) / 16
        shard.detach().copy_(numbers)


def run(rank, folder, store):
    """Runs one of the four processes."""
    os.environ.update(LOCAL_RANK=str(rank % LOCAL_SIZE), LOCAL_WORLD_SIZE=str(LOCAL_SIZE))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    model, plans = Model(), {}
    for path, module, tables in (("bags", model.bags, BAGS), ("sequences", model.sequences, SEQUENCES)):
        for name, parameter in module.named_parameters():
            optimizer = tables[name.split(".")[1]][1]
            if optimizer is not None:
                torchrec.optim.apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1})
        kinds = {name: kind for name, (kind, _) in tables.items()}
        plans[path] = sharding_plan.construct_module_sharding_plan(
            module, kinds, local_size=LOCAL_SIZE, world_size=WORLD_SIZE, device_type="cpu"
        )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=ShardingPlan(plans))
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adagrad(params, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    for name, tensor in model.state_dict().items():
        fill(tensor, 0.0) if "over" not in name else tensor.detach().fill_(7.0)
    for states in optimizer.state_dict()["state"].values():
        for name, tensor in states.items():
            fill(tensor, 100.0) if name != "step" else tensor.fill_(500.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "data": {"epoch": 3, "files": ("a", "b")},
    }
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    target = sys.argv[1]
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(run, (target, os.path.join(scratch, "store")), WORLD_SIZE)
