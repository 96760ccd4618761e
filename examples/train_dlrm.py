"""Trains a DLRM on dynamic tables from a click log in Criteo's format.

Each of the 26 categories has a table that begins small and gets a row when a key is first seen; there is no
vocabulary. Without `--data` the example writes (once) and reads a synthetic log of the same format, so that it runs
anywhere, on CPU or GPU:

    python examples/train_dlrm.py
    python examples/train_dlrm.py --data train.txt
    python examples/train_dlrm.py --data day_0.gz day_1.gz --dim 64 --batch-size 65536 --bottom 512 256 --top 512 256

It uses all devices of the machine: the tables and each batch are split over them, the MLPs are on each. With
`--distributed` it uses those of all processes that a launcher started; SLURM and Open MPI number the processes,
otherwise three environment variables do (docs/many_devices.md):

    srun python examples/train_dlrm.py --distributed --data train.txt
    JAX_COORDINATOR_ADDRESS=host:1234 NUM_PROCESSES=2 PROCESS_ID=0 python examples/train_dlrm.py --distributed

It ends with the AUC on held-out rows, the keys of each table, samples per second, and a plot of loss and table growth.
Ctrl-C stops after the current step, saves, and ends in the same way with what was done (exit code 130); the same
command then goes on at the next batch. A second Ctrl-C aborts.

The model: M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import sys
from collections.abc import Sequence

import click_training
import jax
import jax.numpy as jnp
import numpy as np
import optax
import synthetic_log
import training
from flax import nnx

import jaxsok
from jaxsok import data
from jaxsok.data import criteo

OPTIMIZERS = {
    # From 0: gradients of a mean over a batch are small, and Optax's 0.1 would hold rows back for thousands of steps.
    "adagrad": functools.partial(jaxsok.optim.adagrad, initial_accumulator_value=0.0),
    "rowwise_adagrad": jaxsok.optim.rowwise_adagrad,
}


@dataclasses.dataclass(frozen=True)
class Config(click_training.Config):
    """The model and the data to train; the command line has an option for each field."""

    data: tuple[pathlib.Path, ...] = ()
    """Logs in Criteo's format, read in order, or one folder of binary files; none: a synthetic log."""
    convert: bool = False
    """Whether text becomes binary files first, which are read many times faster. Text with gzip always does."""
    capacity: int = 4096
    """Rows that each table begins with: small, so that growth is seen."""
    plot: pathlib.Path | None = pathlib.Path("train_dlrm.png")
    checkpoint_dir: pathlib.Path | None = pathlib.Path("train_dlrm.checkpoint")


# -------------------------------------------------------------------------------------------------------------- model


class DLRM(nnx.Module):
    """Bottom MLP over the integers, dot products of all pairs of vectors, top MLP to one logit."""

    def __init__(self, dim: int, bottom: Sequence[int], top: Sequence[int], rngs: nnx.Rngs):
        """Makes the dense parameters; the tables are not part of the model.

        Args:
          dim: dim of the tables.
          bottom: hidden widths of the MLP over the integers.
          top: hidden widths of the MLP over the interactions.
          rngs: where the initial parameters come from.
        """
        num_vectors = criteo.NUM_CATEGORIES + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.bottom = click_training.make_mlp([criteo.NUM_INTEGERS, *bottom, dim], rngs)
        self.top = click_training.make_mlp([dim + num_pairs, *top, 1], rngs)

    def __call__(self, integers: jax.Array, embeddings: dict[str, jax.Array]) -> jax.Array:
        """Gives the logit of each sample.

        Args:
          integers: float32 [batch, 13].
          embeddings: float32 [batch, dim] for each category.

        Returns:
          float32 [batch].
        """
        dense = nnx.relu(click_training.apply_mlp(self.bottom, integers))
        vectors = jnp.stack([dense, *(embeddings[name] for name in criteo.CATEGORY_NAMES)], axis=1)
        dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
        left, right = np.tril_indices(vectors.shape[1], k=-1)
        return click_training.apply_mlp(self.top, jnp.concatenate([dense, dots[:, left, right]], axis=1))[:, 0]


def make_model(config: Config) -> DLRM:
    """Makes the dense model of a configuration."""
    return DLRM(config.dim, config.bottom, config.top, nnx.Rngs(config.seed))


# ------------------------------------------------------------------------------------------------------------- tables


def make_collection(config: Config, mesh: jax.sharding.Mesh | None = None) -> jaxsok.Collection:
    """Declares a table and a feature for each category; with a mesh they are split over its devices."""
    optimizer = OPTIMIZERS[config.optimizer](config.learning_rate)
    tables = [
        jaxsok.TableSpec(name, config.dim, optimizer, capacity=config.capacity, memory=config.memory)
        for name in criteo.CATEGORY_NAMES
    ]
    features = [jaxsok.FeatureSpec(name, table=name) for name in criteo.CATEGORY_NAMES]
    if mesh is None:
        return jaxsok.Collection(tables, features)
    if config.placement == "auto":
        proposal = jaxsok.propose(tables, features, num_shards=mesh.size, keys_per_step=config.batch_size // mesh.size)
        tables = proposal.tables
        if config.show_progress and jax.process_index() == 0:
            print(proposal)
    return jaxsok.Collection(tables, features, mesh=mesh, axis="data")


# ----------------------------------------------------------------------------------------------------------- training


def train(config: Config) -> click_training.Result:
    """Trains on the rows of a log but the last ones, and evaluates on those.

    Args:
      config: what to train, on what.

    Returns:
      The result; if Ctrl-C came, of the part that was trained.

    Raises:
      ValueError: the log has no labels, or too few rows for one step; an interrupted run has other settings.
      criteo.LogFormatError: a row of the log is not in Criteo's format.
    """
    config = config.for_process()
    mesh = training.make_mesh(config.batch_size, config.num_devices)
    source = open_log(config)
    tx = optax.adam(config.dense_learning_rate)
    return click_training.train(config, source, make_collection(config, mesh), make_model(config), tx)


def open_log(config: Config) -> data.Source:
    """Opens the log: text as it is, compressed text as binary files that are written once, binary files."""
    cache_dir = synthetic_log.cache_folder(config.cache_dir)
    paths = config.data or (
        click_training.once(config, "log", lambda: synthetic_log.cached_log(config.num_rows, config.seed, cache_dir)),
    )
    if len(paths) == 1 and (paths[0].is_dir() or paths[0].suffix == ".bin"):
        return criteo.binary_source(paths[0])
    if not (config.convert or any(path.suffix == ".gz" for path in paths)):
        source: data.Source = criteo.TextSource(paths)
    else:
        name = hashlib.sha256("\n".join(f"{path.absolute()} {path.stat().st_mtime_ns}" for path in paths).encode())
        folder = cache_dir / f"binary-{name.hexdigest()[:16]}"

        def convert() -> pathlib.Path:
            if not folder.exists():
                if config.show_progress:
                    print(f"Writing binary files to {folder}: the first run does it, later ones read them.")
                with contextlib.suppress(FileExistsError):  # another process of this machine was faster
                    criteo.convert(paths, folder, num_threads=config.num_threads)
            return folder

        source = criteo.binary_source(click_training.once(config, "convert", convert))
    if len(source) and "label" not in source[0]:
        raise ValueError("train: the log has 39 columns, so no labels (Kaggle's test.txt?); pass one of 40.")
    return source


# ------------------------------------------------------------------------------------------------------- command line


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The configuration.
    """
    parser = argparse.ArgumentParser(
        description="Train a DLRM on dynamic tables from a click log in Criteo's format.",
        formatter_class=training.HelpFormatter,
    )
    add = parser.add_argument
    add("--data", nargs="+", type=pathlib.Path, default=(), metavar="FILE",
        help="logs in Criteo's format, plain or gzip, read in order, or a folder of binary files (default: a "
        "synthetic log)")  # fmt: skip
    add("--convert", action="store_true", help="write binary files first, and read those")
    add("--capacity", type=int, default=Config.capacity, help="rows that each table begins with")
    click_training.add_options(parser, Config(), OPTIMIZERS)
    return click_training.parse(parser, Config, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the command line says, and prints the result.

    Args:
      arguments: the words after the program's name; None takes those of this process.

    Returns:
      The exit code: 0, or 130 (as shells expect of SIGINT) if Ctrl-C ended the training.
    """
    return click_training.run("train_dlrm", "DLRM", parse_arguments(arguments), train)


if __name__ == "__main__":
    sys.exit(main())
