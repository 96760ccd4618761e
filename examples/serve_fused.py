"""Several tables in one lookup: HPS's demonstration of table fusion, compared with its unfused twin.

    python examples/serve_fused.py

Writes 8 tables of 10,000 rows of 128 floats as HPS directories with their configuration, then serves a model over
them: 26 keys of each table for each of 256 samples, and one dense layer over all that they read. The model runs 100
times with one lookup for all tables, and 100 times with a lookup for each; what both give is compared bit by bit. The
tables have the same keys: fusion does not ask for disjoint ones, nor for all tables in each request.

Then the model is exported, the tables stay outside, and a session that is opened from the configuration alone gives the
same scores. Published for HPS: 9.44 ms a batch on a V100 (TensorFlow), fused, with no unfused twin.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok
from jaxsok import keys as keys_lib
from jaxsok.interchange import hps
from jaxsok.serving import artifact, frozen
from jaxsok.serving.artifact.model import MANIFEST
from jaxsok.serving.fused import LookupInput, lookup


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; the command line has an option for each field."""

    tables: int = 8
    rows: int = 10_000
    dim: int = 128
    batch_size: int = 256
    keys: int = 26
    """Keys of each table for a sample."""
    iterations: int = 100
    folder: pathlib.Path | None = None
    """Where tables, model and configuration are written; None: a temporary folder."""

    @property
    def names(self) -> list[str]:
        """The names of the tables, as HPS names those that have none."""
        return [f"sparse_embedding{i}" for i in range(self.tables)]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run."""

    fused_ms: list[float]
    """Milliseconds of each iteration, from keys on the host to scores on the device."""
    unfused_ms: list[float]
    is_equal: bool
    """Whether fused and unfused embeddings have the same bits, in every iteration."""
    session_difference: float | None
    """Largest difference between the scores of the session and those of the model; None without a session."""


# What is served ------------------------------------------------------------------------------------------------------


def write_tables(folder: pathlib.Path, config: Config) -> None:
    """An HPS directory for each table: keys from 0 on, the same in all of them."""
    rng = np.random.default_rng(0)
    for name in config.names:
        rows = rng.normal(size=(config.rows, config.dim)).astype(np.float32)
        records = jaxsok.Records(np.arange(config.rows, dtype=np.uint64), rows)
        hps.write_hps(folder / name, records, overwrite=True)  # of a run before


def write_configuration(folder: pathlib.Path, config: Config) -> pathlib.Path:
    """The JSON of HPS; `dense_file` is the exported model."""
    model = {
        "model": "fused",
        "sparse_files": [str(folder / name) for name in config.names],
        "dense_file": str(folder / "model"),
        "embedding_table_names": config.names,
        "embedding_vecsize_per_table": [config.dim] * config.tables,
        "maxnum_catfeature_query_per_table_per_sample": [config.keys] * config.tables,
        "default_value_for_each_table": [0.0] * config.tables,
        "deployed_device_list": [0],
        "max_batch_size": config.batch_size,
        "gpucache": True,
        "gpucacheper": 1.0,
    }
    path = folder / "ps_config.json"
    path.write_text(json.dumps({"supportlonglong": True, "fuse_embedding_table": True, "models": [model]}, indent=1))
    return path


def read_tables(folder: pathlib.Path, config: Config) -> frozen.FrozenTables:
    """The tables, on the device: of one dim and dtype, so in one store."""
    sources = [
        (frozen.FrozenTable(name, config.dim), hps.read_hps(folder / name, dim=config.dim)) for name in config.names
    ]
    return frozen.freeze_records(sources)[0]


# The model -----------------------------------------------------------------------------------------------------------


def lookup_fused(tables: frozen.FrozenTables, keys: dict) -> dict:
    """All tables in one call."""
    return lookup(tables, {name: LookupInput(name, table_keys) for name, table_keys in keys.items()})


def lookup_unfused(tables: frozen.FrozenTables, keys: dict) -> dict:
    """A call for each table."""
    return {name: lookup(tables, {name: LookupInput(name, table_keys)})[name] for name, table_keys in keys.items()}


def make_model(kernel: jax.Array, look_up: Callable) -> Callable:
    """One dense layer over the concatenated embeddings, as a function of tables and keys by table."""

    def model(tables, keys):
        embeddings = look_up(tables, keys)
        x = jnp.concatenate([embedding.reshape(embedding.shape[0], -1) for embedding in embeddings.values()], axis=-1)
        return x @ kernel

    return model


def make_batches(config: Config) -> list[dict]:
    """Keys of each iteration as words: uint32[batch_size, keys, 2] by table."""
    rng = np.random.default_rng(1)
    shape = (config.batch_size, config.keys)
    return [
        {name: keys_lib.to_words(rng.integers(0, config.rows, shape), name) for name in config.names}
        for _ in range(config.iterations)
    ]


def time_calls(function: Callable, tables: frozen.FrozenTables, batches: Sequence[dict]) -> list[float]:
    """Milliseconds of each call, waited for; the first one compiles and is not timed."""
    jax.block_until_ready(function(tables, batches[0]))
    found = []
    for keys in batches:
        begin = time.perf_counter()
        jax.block_until_ready(function(tables, keys))
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def run(config: Config) -> Result:
    """Writes, serves, compares."""
    if config.folder is not None:
        return _run(config, config.folder)
    with tempfile.TemporaryDirectory() as folder:
        return _run(config, pathlib.Path(folder))


def _run(config: Config, folder: pathlib.Path) -> Result:
    write_tables(folder, config)
    tables, batches = read_tables(folder, config), make_batches(config)
    width = config.tables * config.keys * config.dim
    kernel = jax.random.normal(jax.random.key(0), (width, 1), jnp.float32) / width**0.5
    models = {look_up: jax.jit(make_model(kernel, look_up)) for look_up in (lookup_fused, lookup_unfused)}
    times = {look_up: time_calls(model, tables, batches) for look_up, model in models.items()}
    of_both = jax.jit(lambda tables, keys: (lookup_fused(tables, keys), lookup_unfused(tables, keys)))
    is_equal = True
    for keys in batches:
        first, second = of_both(tables, keys)
        is_equal &= all(np.array_equal(first[name], second[name]) for name in config.names)

    inputs = {name: artifact.KeysInput(name, shape=(config.keys,)) for name in config.names}
    if (folder / "model" / MANIFEST).is_file():
        shutil.rmtree(folder / "model")
    artifact.export_model(folder / "model", make_model(kernel, lookup_fused), tables, inputs)
    path = write_configuration(folder, config)
    difference = session_difference(path, models[lookup_fused](tables, batches[0]), batches[0])
    return Result(times[lookup_fused], times[lookup_unfused], is_equal, difference)


def session_difference(path: pathlib.Path, scores: jax.Array, words: dict) -> float | None:
    """Largest difference between a session's scores and these; None where this version has no sessions."""
    if importlib.util.find_spec("jaxsok.serving.session") is None:
        return None
    from jaxsok.serving import session as sessions

    with sessions.open(path) as session:
        answer = session.predict(
            {name: keys_lib.from_words(table_words).astype(np.int64) for name, table_words in words.items()}
        )
    return float(np.abs(answer["output"] - np.asarray(scores)).max())


def format_result(config: Config, result: Result) -> str:
    """The result in lines."""
    keys = config.batch_size * config.keys
    lines = [
        f"{config.tables} tables of {config.rows} rows of {config.dim} floats, {keys} keys each, on "
        f"{jax.devices()[0].device_kind}"
    ]
    for name, found in (("fused", result.fused_ms), ("unfused", result.unfused_ms)):
        lines.append(
            f"{name:8} {len(found)} iterations in {sum(found) / 1e3:.3f} s; a batch {statistics.median(found):.3f} ms "
            f"(median)"
        )
    lines.append(f"the same bits: {'yes' if result.is_equal else 'NO'}")
    if result.session_difference is None:
        lines.append("no session in this version: the exported model was written, and not served")
    else:
        lines.append(f"a session over the exported model: scores differ by {result.session_difference:.1e} at most")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    default = Config()
    parser.add_argument("--tables", type=int, default=default.tables, help="how many")
    parser.add_argument("--rows", type=int, default=default.rows, help="of each table")
    parser.add_argument("--dim", type=int, default=default.dim, help="floats in a row")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="samples")
    parser.add_argument("--keys", type=int, default=default.keys, help="keys of each table for a sample")
    parser.add_argument("--iterations", type=int, default=default.iterations, help="that are timed")
    parser.add_argument("--folder", type=pathlib.Path, help="what is written stays here (default: nothing stays)")
    return Config(**vars(parser.parse_args(arguments)))


def main() -> int:
    config = parse_arguments()
    result = run(config)
    print(format_result(config, result))
    return 0 if result.is_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
