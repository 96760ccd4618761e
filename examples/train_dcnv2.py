"""Trains MLPerf's DLRM-DCNv2 on dynamic tables from binary files.

The model of the benchmark: 26 tables of 128 floats with 204,184,588 rows, 214 keys a sample, a bottom MLP 512-256-128,
three cross layers of rank 512, a top MLP 1024-1024-512-256-1, batches of 65,536 samples, Adagrad with learning rate
0.005. The dense part computes in bfloat16 and has float32 parameters. Criteo's data set is not needed: without `--data`
the example writes (once) and reads files of the same form with a planted signal. Small, on any machine:

    python examples/train_dcnv2.py --scale 0.0005 --dim 16 --batch-size 1024 --num-rows 262144 --num-threads 2
    python examples/train_dcnv2.py --estimate --num-devices 4     # the memory of the whole model on each of 4 devices

The whole model on four GPUs, all rows resident before the first step; and on one, where there is room for one
accumulator a row:

    python examples/train_dcnv2.py --fill --num-threads 8
    python examples/train_dcnv2.py --fill --optimizer rowwise_adagrad --num-devices 1

`--data` reads MLPerf's own multi-hot files, or TorchRec's. Devices, processes, Ctrl-C, plot and report are those of
`train_dlrm.py`. `python -m jaxsok bench --only dcnv2` measures this program.

The model: R. Wang et al., DCN V2: Improved Deep & Cross Network, 2021. Sizes, optimizer and initial values: MLPerf
Training's reference, github.com/mlcommons/training, recommendation_v2/torchrec_dlrm.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

import click_training
import jax
import jax.numpy as jnp
import numpy as np
import optax
import synthetic_bags
import synthetic_log
import training
from flax import nnx

import jaxsok
from jaxsok import data
from jaxsok.data import criteo

OPTIMIZERS = {
    # The reference (FBGEMM) adds 1e-8 to the root of the accumulator; here it is added under the root.
    "adagrad": functools.partial(jaxsok.optim.adagrad, initial_accumulator_value=0.0, eps=1e-16),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad,
}

_DENSE_EPS = 1e-20  # the reference (torch) adds 1e-10 to the root


@dataclasses.dataclass(frozen=True)
class Config(click_training.Config):
    """The model and the data to train; the command line has an option for each field. The defaults are MLPerf's."""

    data: pathlib.Path | None = None
    """A folder of binary files (`criteo.binary_source`); None: synthetic ones."""
    num_rows: int = 134 << 16
    """Samples of the synthetic files, 912 bytes each: 8 GB."""
    uniform: bool = False
    """Whether all keys of the synthetic files are equally likely, in place of bags that come back."""
    scale: float = 1.0
    """Share of each table's rows."""
    capacity: int | None = None
    """Rows that each table begins with, to grow later; None: all of its rows."""
    fill: bool = False
    """Whether all rows are in the tables before the first step."""
    estimate: bool = False
    """Whether to print the memory that this configuration needs, and end."""
    batch_size: int = 65_536
    dim: int = 128
    learning_rate: float = 0.005
    dense_learning_rate: float = 0.005
    """Learning rate of the dense part (Adagrad)."""
    bottom: tuple[int, ...] = (512, 256)
    cross_layers: int = 3
    """Layers of the cross network."""
    rank: int = 512
    """Rank of a cross layer's matrix."""
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    dense_dtype: str = "bfloat16"
    """Dtype in which the dense part computes."""
    row_dtype: str = "float32"
    """Dtype of the rows."""
    wire: str | None = None
    """Dtype of rows and gradients between devices; None: rows as they are stored, gradients as float32."""
    replicate_rows: int = 0
    """With placement "auto": tables of at most so many rows are on every device, whatever the planner says."""
    plot: pathlib.Path | None = pathlib.Path("train_dcnv2.png")
    checkpoint_dir: pathlib.Path | None = pathlib.Path("train_dcnv2.checkpoint")

    @property
    def table_rows(self) -> dict[str, int]:
        """The rows of each table."""
        return dict(zip(criteo.CATEGORY_NAMES, synthetic_bags.scale_rows(self.scale), strict=True))


BAG_SIZES = dict(zip(criteo.CATEGORY_NAMES, synthetic_bags.BAG_SIZES, strict=True))
"""Keys of a sample in each category of the synthetic files."""


# -------------------------------------------------------------------------------------------------------------- model


class DCNv2(nnx.Module):
    """Bottom MLP over the integers; cross network over all vectors, one after the other; top MLP to one logit."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        """Makes the dense parameters, float32; the tables are not part of the model."""
        width = config.dim * (criteo.NUM_CATEGORIES + 1)
        # torch's initial values of a Linear: weights and biases uniform up to the inverse root of the inputs.
        linear = {
            "dtype": jnp.dtype(config.dense_dtype),
            "kernel_init": nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
        }
        cross = {"dtype": jnp.dtype(config.dense_dtype), "kernel_init": nnx.initializers.glorot_normal()}
        self.bottom = click_training.make_mlp([criteo.NUM_INTEGERS, *config.bottom, config.dim], rngs, **linear)
        self.down = nnx.List(
            [nnx.Linear(width, config.rank, use_bias=False, rngs=rngs, **cross) for _ in range(config.cross_layers)]
        )
        self.up = nnx.List([nnx.Linear(config.rank, width, rngs=rngs, **cross) for _ in range(config.cross_layers)])
        self.top = click_training.make_mlp([width, *config.top, 1], rngs, **linear)
        for mlp in (self.bottom, self.top):
            for layer in mlp:
                layer.bias[...] = jax.random.uniform(rngs.params(), layer.bias.shape, minval=-1, maxval=1) / math.sqrt(
                    layer.in_features
                )

    def __call__(self, integers: jax.Array, embeddings: dict[str, jax.Array]) -> jax.Array:
        """Gives the logit of each sample.

        Args:
          integers: float32 [batch, 13].
          embeddings: float32 [batch, dim] for each category.

        Returns:
          float32 [batch].
        """
        dense = nnx.relu(click_training.apply_mlp(self.bottom, integers))
        vectors = [dense, *(embeddings[name].astype(dense.dtype) for name in criteo.CATEGORY_NAMES)]
        x = first = jnp.concatenate(vectors, axis=1)
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return click_training.apply_mlp(self.top, x)[:, 0].astype(jnp.float32)


def make_model(config: Config) -> DCNv2:
    """Makes the dense model of a configuration."""
    return DCNv2(config, nnx.Rngs(config.seed))


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Makes the optimizer of the dense part: Adagrad from 0, as for the tables."""
    return optax.adagrad(config.dense_learning_rate, initial_accumulator_value=0.0, eps=_DENSE_EPS)


# ------------------------------------------------------------------------------------------------------------- tables


def declare(config: Config) -> tuple[list[jaxsok.TableSpec], list[jaxsok.FeatureSpec], jaxsok.ExchangeSpec]:
    """Declares a table and a feature for each category, and what travels between devices."""
    optimizer = OPTIMIZERS[config.optimizer](config.learning_rate)
    tables = [
        jaxsok.TableSpec(
            name,
            config.dim,
            optimizer,
            capacity=config.capacity or rows,
            dtype=config.row_dtype,
            embedding_dtype="float32",
            initializer=jaxsok.initializers.uniform(-1 / math.sqrt(rows), 1 / math.sqrt(rows)),
            memory=config.memory,
        )
        for name, rows in config.table_rows.items()
    ]
    features = [jaxsok.FeatureSpec(name, table=name) for name in criteo.CATEGORY_NAMES]
    return tables, features, jaxsok.ExchangeSpec(rows=config.wire, gradients=config.wire)


def make_collection(config: Config, source: data.Source, mesh: jax.sharding.Mesh | None = None) -> jaxsok.Collection:
    """Makes the collection of the tables; with a mesh they are split over its devices.

    With placement "auto" the planner counts the keys of a first batch, and chooses where each table lives and whether
    its rows or sums of its bags travel.
    """
    tables, features, exchange = declare(config)
    if mesh is None:
        return jaxsok.Collection(tables, features)
    if config.placement == "auto":
        columns = first_batch(source, min(len(source), config.batch_size) // mesh.size * mesh.size)
        sample = {name: columns[name] for name in criteo.CATEGORY_NAMES}
        small = {name: jaxsok.REPLICATED for name, rows in config.table_rows.items() if rows <= config.replicate_rows}
        proposal = jaxsok.propose(
            tables, features, num_shards=mesh.size, sample=sample, exchange=exchange, overrides=small
        )
        tables, features = proposal.tables, proposal.features
        if config.show_progress:
            print(proposal)
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data", exchange=exchange)


def fill(config: Config, collection: jaxsok.Collection) -> jaxsok.State:
    """Makes the state of the tables with a row for every key: lookups ask for all keys, batch by batch.

    Raises:
      ValueError: a table has no room for all of its rows.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def insert(state, plan):
        return collection.lookup(state, plan)[1]

    state = collection.init(seed=config.seed)
    for _, plan in collection.pipeline(_all_keys(config)):
        state = insert(state, plan)
    if (found := collection.num_rows(state)) != config.table_rows:
        short = {name: (found[name], rows) for name, rows in config.table_rows.items() if found[name] != rows}
        raise ValueError(f"fill: these tables have (rows, wanted rows) {short}; pass another seed or a --capacity.")
    return state


def _all_keys(config: Config) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of this process that together have all keys of each table."""
    num_bags, index, count = config.batch_size // jax.process_count(), jax.process_index(), jax.process_count()
    num_batches = max(-(-rows // (config.batch_size * BAG_SIZES[name])) for name, rows in config.table_rows.items())
    for number in range(num_batches):
        raw = {}
        for name, rows in config.table_rows.items():
            size = num_bags * BAG_SIZES[name]
            keys = np.arange(size, dtype=np.int32) + np.int32((number * count + index) * size % rows)
            raw[name] = (keys % np.int32(rows)).reshape(num_bags, BAG_SIZES[name])  # later keys are met again
        yield raw


def estimate(config: Config, collection: jaxsok.Collection | None = None) -> jaxsok.MemoryEstimate:
    """Counts the memory of tables and step on each device, without the dense part.

    Args:
      config: what to train; without a collection it need not fit on devices at hand.
      collection: as it was made, or None: as it is declared, on `num_devices` or one.
    """
    tables, features, exchange = declare(config)
    num_shards = config.num_devices or 1
    if collection is not None:
        tables, features, num_shards = collection.tables, collection.features, collection.shards.num_shards
    num_samples = config.batch_size // num_shards
    keys = {name: num_samples * size for name, size in BAG_SIZES.items()}
    return jaxsok.memory_estimate(
        tables, features, num_shards=num_shards, num_samples=num_samples, keys_per_step=keys, exchange=exchange
    )


# ----------------------------------------------------------------------------------------------------------- training


def log_folder(config: Config) -> pathlib.Path:
    """Returns the folder of the files; synthetic ones are written once."""

    def write() -> pathlib.Path:
        return synthetic_log.cached_bags(
            config.num_rows,
            config.seed,
            config.cache_dir,
            table_rows=tuple(config.table_rows.values()),
            is_uniform=config.uniform,
        )

    return config.data or click_training.once(config, "files", write)


def open_log(config: Config) -> data.Source:
    """Opens the files."""
    return criteo.binary_source(log_folder(config))


def first_batch(source: data.Source, batch_size: int) -> dict[str, np.ndarray]:
    """Reads the first samples."""
    return source.take(slice(0, min(len(source), batch_size)))


def distinct_keys(columns: dict[str, np.ndarray]) -> int:
    """Counts the distinct keys of a batch, over all tables."""
    return sum(len(np.unique(columns[name])) for name in criteo.CATEGORY_NAMES)


def train(config: Config) -> click_training.Result:
    """Trains on the rows of the files but the last ones, and evaluates on those.

    Args:
      config: what to train, on what.

    Returns:
      The result; if Ctrl-C came, of the part that was trained.

    Raises:
      ValueError: too few rows for one step; an interrupted run has other settings; files of another form.
    """
    config = config.for_process()
    mesh = training.make_mesh(config.batch_size, config.num_devices)
    source = open_log(config)
    collection = make_collection(config, source, mesh)
    if config.show_progress:
        exchange = collection.exchange
        print(f"Rows: {config.row_dtype}; on the wire rows {exchange.rows or config.row_dtype}, gradients "
              f"{exchange.gradients or 'float32'}.")  # fmt: skip
        print(f"Distinct keys of the first batch: {distinct_keys(first_batch(source, config.batch_size)):,}")
        print(estimate(config, collection))
    return click_training.train(
        config,
        source,
        collection,
        make_model(config),
        make_optimizer(config),
        init=functools.partial(fill, config, collection) if config.fill else None,
        grows=config.capacity is not None,
    )


# ------------------------------------------------------------------------------------------------------- command line


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The configuration.
    """
    default = Config()
    parser = argparse.ArgumentParser(
        description="Train MLPerf's DLRM-DCNv2 on dynamic tables from binary files.",
        formatter_class=training.HelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=pathlib.Path, metavar="FOLDER", help="MLPerf's or TorchRec's files (default: synthetic ones)")
    add("--uniform", action="store_true", help="synthetic files in which all keys are equally likely")
    add("--scale", type=float, default=default.scale, help="share of each table's rows")
    add("--capacity", type=int, help="rows that each table begins with, to grow later (default: all of its rows)")
    add("--fill", action="store_true", help="put all rows into the tables before the first step")
    add("--estimate", action="store_true", help="print the memory that each device needs, and end")
    add("--cross-layers", type=int, default=default.cross_layers, help="layers of the cross network")
    add("--rank", type=int, default=default.rank, help="rank of a cross layer's matrix")
    add("--dense-dtype", choices=("bfloat16", "float32"), default=default.dense_dtype, help="of the dense part")
    add("--row-dtype", choices=("float32", "bfloat16", "float16"), default=default.row_dtype, help="of the rows")
    add("--wire", choices=("float32", "bfloat16", "float16", "float8_e4m3fn"),
        help="dtype of rows and gradients between devices (default: rows as stored, gradients float32)")  # fmt: skip
    add("--replicate-rows", type=int, default=default.replicate_rows,
        help="tables of at most so many rows are on every device")  # fmt: skip
    click_training.add_options(parser, default, OPTIMIZERS)
    return click_training.parse(parser, Config, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the command line says, and prints the result.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The exit code: 0, or 130 (as shells expect of SIGINT) if Ctrl-C ended the training.
    """
    config = parse_arguments(arguments)
    if config.estimate:
        print(estimate(config))
        return 0
    return click_training.run("train_dcnv2", "DLRM-DCNv2", config, train)


if __name__ == "__main__":
    sys.exit(main())
