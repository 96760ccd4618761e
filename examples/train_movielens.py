"""Trains a factorisation or a two-tower model on MovieLens ratings, by raw ids in the order in which they came.

User, item, the item's genres (a bag) and the hour of the day each have a table that begins small and gets a row when a
key is first seen. The model predicts whether a rating is 4 or 5; the last tenth of the log, by time, is held out.
Without `--data` the example reads a synthetic log of the same format, so that it runs anywhere, on CPU or GPU:

    python examples/train_movielens.py
    python examples/train_movielens.py --data ml-100k/u.data --model two_tower
    python examples/train_movielens.py --data ml-100k/u.data --dense

`u.item` is read from the folder of `u.data`. `--dense` trains the same model from the same initial rows on the usual
dense tables: `nnx.Embed` over a vocabulary that was counted before, and Optax's Adagrad over all of its rows.

It ends with the AUC on the held-out ratings, the keys of each table and a plot. Ctrl-C stops after the current step and
saves; the same command then goes on at the next batch. By default it uses all devices of the machine;
`--dense` uses one.

The models: S. Rendle, Factorization Machines, 2010; P. Covington, J. Adams and E. Sargin, Deep Neural Networks for
YouTube Recommendations, 2016 (two towers that meet in a dot product).
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import movielens
import numpy as np
import optax
import training
from flax import nnx

import jaxsok
from jaxsok import data

FEATURE_NAMES = ("user", "item", "genre", "hour")


@dataclasses.dataclass(frozen=True)
class Config:
    """The model and the data to train; the command line has an option for each field."""

    data: pathlib.Path | None = None
    """`u.data`, with `u.item` in the same folder; None: a synthetic log."""
    num_ratings: int = 50_000
    """Ratings of the synthetic log."""
    model: str = "factorization"
    """A name in MODELS."""
    dense: bool = False
    """Whether tables are `nnx.Embed` over a known vocabulary, in place of jaxsok's."""
    epochs: int = 3
    """How often the log is gone through, each time in its order."""
    batch_size: int = 512
    """Ratings in a step, on all devices together."""
    dim: int = 16
    """Numbers in a row of a table."""
    capacity: int = 64
    """Rows that each table begins with: small, so that tables grow."""
    learning_rate: float = 0.05
    """Learning rate of the tables (Adagrad)."""
    dense_learning_rate: float = 1e-3
    """Learning rate of the dense parameters (Adam)."""
    hidden: tuple[int, ...] = (32,)
    """Hidden widths of each tower."""
    held_out: float = 0.1
    """Share of the log, its last part, that is not trained on."""
    seed: int = 0
    """Seed of the tables, of the dense parameters and of the synthetic log."""
    num_devices: int | None = None
    """How many devices to use; None: all."""
    lookahead: int = 0
    """1: each step looks the next batch up too, with the same results (docs/lookups_ahead.md). Not with `dense`."""
    staleness: int = 0
    """Updates that the rows of a batch may miss. Not with `dense`."""
    plot: pathlib.Path | None = pathlib.Path("train_movielens.png")
    """File for the plot; None: no plot."""
    checkpoint_dir: pathlib.Path | None = pathlib.Path("train_movielens.checkpoint")
    """Where Ctrl-C leaves the run, so that the same command goes on; removed at the end. Not with `dense`."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: only on Ctrl-C."""
    show_progress: bool = True
    """Whether to show a progress bar."""


FREE = {"checkpoint_dir", "checkpoint_every", "lookahead", "num_devices", "plot", "show_progress"}
"""Fields that may change when a run goes on."""


@dataclasses.dataclass(frozen=True)
class Result(training.Curves):
    """The result of a training run."""

    auc: float
    """AUC of "the rating is 4 or 5" on the held-out ratings; NaN if they are of one class."""
    num_held_out: int
    """How many there are."""
    new_keys: dict[str, float]
    """By feature, the share of its held-out keys that training never saw."""
    is_interrupted: bool
    """Whether Ctrl-C ended the training."""


# ------------------------------------------------------------------------------------------------------------- models


class Factorization(nnx.Module):
    """A factorisation machine: of each feature's row the first number is a weight, the others are a vector.

    The logit is a bias, the weights, and the dot products of all pairs of vectors.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        """Makes the bias; the tables are not part of the model."""
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, embeddings: dict[str, jax.Array]) -> jax.Array:
        """Gives the logit of each sample, float32 [batch], from float32 [batch, dim] for each feature."""
        rows = jnp.stack([embeddings[name] for name in FEATURE_NAMES], axis=1)
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        # The products of all pairs are half of what the square of the sum has in addition to the squares.
        pairs = jnp.square(vectors.sum(axis=1)) - jnp.square(vectors).sum(axis=1)
        return self.bias[...] + weights.sum(axis=1) + 0.5 * pairs.sum(axis=1)


class TwoTower(nnx.Module):
    """One tower over user and hour, one over item and genres; the logit is their dot product and a bias."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        """Makes the towers; the tables are not part of the model."""
        widths = [2 * config.dim, *config.hidden, config.dim]
        self.user, self.item = (
            nnx.List([nnx.Linear(before, after, rngs=rngs) for before, after in itertools.pairwise(widths)])
            for _ in range(2)
        )
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, embeddings: dict[str, jax.Array]) -> jax.Array:
        """Gives the logit of each sample, float32 [batch], from float32 [batch, dim] for each feature."""

        def tower(layers: nnx.List, names: Sequence[str]) -> jax.Array:
            x = jnp.concatenate([embeddings[name] for name in names], axis=1)
            for i, layer in enumerate(layers):
                x = layer(nnx.relu(x) if i else x)
            return x

        vectors = tower(self.user, ("user", "hour")) * tower(self.item, ("item", "genre"))
        return self.bias[...] + vectors.sum(axis=1)


MODELS = {"factorization": Factorization, "two_tower": TwoTower}


def make_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes the dense model of a configuration, split into its definition and its parameters."""
    return nnx.split(MODELS[config.model](config, nnx.Rngs(config.seed)))


def log_loss(
    params: nnx.State, embeddings: dict[str, jax.Array], label: jax.Array, mask: jax.Array, graphdef: nnx.GraphDef
) -> jax.Array:
    """Gives the mean log loss of the real samples: a scalar to differentiate by parameters and embeddings."""
    losses = optax.sigmoid_binary_cross_entropy(nnx.merge(graphdef, params)(embeddings), label)
    return jnp.where(mask, losses, 0.0).sum() / mask.sum()


# ----------------------------------------------------------------------------------------------------- dynamic tables


def make_collection(config: Config, most_genres: int, mesh: jax.sharding.Mesh | None = None) -> jaxsok.Collection:
    """Declares a table and a feature for each of FEATURE_NAMES; ids of users and items may be equal, rows are not."""
    # From 0: gradients of a mean over a batch are small, and Optax's 0.1 would hold rows back for thousands of steps.
    optimizer = jaxsok.optim.adagrad(config.learning_rate, initial_accumulator_value=0.0)
    initializer = jaxsok.initializers.normal(0.01)
    tables = [
        jaxsok.TableSpec(name, config.dim, optimizer, initializer=initializer, capacity=config.capacity)
        for name in FEATURE_NAMES
    ]
    features = [
        jaxsok.FeatureSpec("user", table="user"),
        jaxsok.FeatureSpec("item", table="item"),
        # Static room for the keys of a batch, whatever its bags are; a mesh has a part of it on each device.
        jaxsok.FeatureSpec("genre", table="genre", combiner="mean", max_keys=config.batch_size * most_genres),
        jaxsok.FeatureSpec("hour", table="hour"),
    ]
    return jaxsok.Collection(tables, features, mesh=mesh, axis=None if mesh is None else "data")


def source_of(rows: movielens.Ratings, genres: movielens.Genres) -> data.ArraySource:
    """Names the columns of ratings; the collection packs the features and carries the label."""
    keys, lengths = genres.bags(rows.item)
    bags = jaxsok.Bags(keys, lengths=lengths)
    columns = {"user": rows.user, "item": rows.item, "genre": bags, "hour": rows.hour, "label": rows.liked}
    return data.ArraySource(columns)


def batches_of(rows: movielens.Ratings, batch_size: int) -> Iterator[movielens.Ratings]:
    """Cuts ratings into batches; the last one may be smaller."""
    for start in range(0, len(rows), batch_size):
        yield rows.part(start, start + batch_size)


def train_dynamic(
    config: Config, log: movielens.Ratings, held_out: movielens.Ratings, genres: movielens.Genres
) -> tuple[np.ndarray, dict[str, int], bool, dict[str, Any]]:
    """Trains on jaxsok's tables.

    Returns:
      The probability of each held-out rating to be 4 or 5, the rows of each table, whether Ctrl-C came, and what was
      recorded of each step.
    """
    collection = make_collection(config, genres.most, training.make_mesh(config.batch_size, config.num_devices))
    graphdef, params = make_model(config)
    tx = optax.adam(config.dense_learning_rate)
    dense = collection.shards.replicate((params, tx.init(params)))

    def step(state, params, opt_state, batch, plan):
        embeddings, state, plan = collection.lookup(state, plan)
        loss, (params_gradient, embeddings_gradient) = jax.value_and_grad(log_loss, (0, 1))(
            params, embeddings, batch["label"], batch.mask, graphdef
        )
        state, stats = collection.update(state, plan, embeddings_gradient)
        updates, opt_state = tx.update(params_gradient, opt_state, params)
        return state, optax.apply_updates(params, updates), opt_state, loss, stats

    @jax.jit
    def predict(state, params, features):
        embeddings, _ = collection.find(state, features)  # a key without a row reads its initial one; nothing changes
        return nnx.sigmoid(nnx.merge(graphdef, params)(embeddings))

    batches = data.Batches(source_of(log, genres), config.batch_size, drop_remainder=False)
    iterator = data.iterate(batches.repeat(config.epochs), num_threads=1)
    checkpoints = training.Checkpoints(
        config.checkpoint_dir, config.checkpoint_every, training.settings_of(config, FREE)
    )
    fitted = training.fit(
        collection,
        step,
        functools.partial(collection.init, seed=config.seed),
        dense,
        iterator,
        training.History(config.epochs * len(log), config.show_progress),
        checkpoints,
        # The last batch of an epoch is shorter. The mask says so too, but is on the device: reading it would wait.
        num_samples=lambda step: min(config.batch_size, len(log) - step % len(batches) * config.batch_size),
        pad_to=config.batch_size,
        lookahead=config.lookahead,
        staleness=config.staleness,
    )

    probabilities = []
    for raw in data.Batches(source_of(held_out, genres), config.batch_size, drop_remainder=False):
        batch = collection.batch(raw, pad_to=config.batch_size)
        probabilities.append(np.asarray(predict(fitted.tables, fitted.dense[0], batch.features))[: len(raw["label"])])
    if not fitted.is_interrupted:
        checkpoints.remove()
    return np.concatenate(probabilities), collection.num_rows(fitted.tables), fitted.is_interrupted, fitted.summary


# ------------------------------------------------------------------------------------------------------- dense tables


class DenseTables(nnx.Module):
    """The same tables as `nnx.Embed`: a row for each key of a vocabulary, counted beforehand."""

    def __init__(self, initial_rows: dict[str, np.ndarray]):
        """Begins with the given rows, float32 [keys, dim] for each table."""
        self.embeds = nnx.Dict({name: nnx.Embed(*rows.shape, rngs=nnx.Rngs(0)) for name, rows in initial_rows.items()})
        for name, rows in initial_rows.items():
            self.embeds[name].embedding[...] = jnp.asarray(rows)

    def __call__(self, places: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Gives float32 [batch, dim] for each feature; of genres, padded with -1, the mean of the rows."""
        embeddings = {name: self.embeds[name](places[name]) for name in ("user", "item", "hour")}
        is_genre = places["genre"] >= 0
        rows = self.embeds["genre"](jnp.maximum(places["genre"], 0)) * is_genre[:, :, None]
        embeddings["genre"] = rows.sum(axis=1) / jnp.maximum(is_genre.sum(axis=1), 1).astype(jnp.float32)[:, None]
        return embeddings


def vocabulary_of(log: movielens.Ratings) -> dict[str, np.ndarray]:
    """Counts the keys of each table, ascending."""
    genres, hours = np.arange(movielens.NUM_GENRES), np.arange(24)
    return {"user": np.unique(log.user), "item": np.unique(log.item), "genre": genres, "hour": hours}


def initial_rows(config: Config, vocabulary: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows that jaxsok's tables would give these keys: `find` on tables that have no rows yet."""
    longest = max(map(len, vocabulary.values()))
    raw = {}
    for name, keys in vocabulary.items():
        raw[name] = np.full(longest, -1)
        raw[name][: len(keys)] = keys
    collection = make_collection(dataclasses.replace(config, batch_size=longest), most_genres=1)
    embeddings, _ = collection.find(collection.init(seed=config.seed), collection.batch(raw).features)
    return {name: np.asarray(embeddings[name])[: len(keys)] for name, keys in vocabulary.items()}


def to_places(
    rows: movielens.Ratings, genres: movielens.Genres, vocabulary: dict[str, np.ndarray], batch_size: int
) -> dict[str, np.ndarray]:
    """Numbers the keys of a batch by the vocabulary; the samples that are missing to a full batch have the first."""
    keys, lengths = genres.bags(rows.item)
    places = {"user": rows.user, "item": rows.item, "hour": rows.hour}
    places = {name: np.searchsorted(vocabulary[name], column) for name, column in places.items()}
    places["genre"] = np.full((len(rows), genres.most), -1)
    places["genre"][np.arange(genres.most) < lengths[:, None]] = keys
    columns = {**places, "label": rows.liked, "mask": np.ones(len(rows), bool)}
    more = batch_size - len(rows)
    return {
        name: np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]).astype(
            np.int32 if column.dtype == np.int64 else column.dtype
        )
        for name, column in columns.items()
    }


def train_dense(
    config: Config, log: movielens.Ratings, held_out: movielens.Ratings, genres: movielens.Genres
) -> tuple[np.ndarray, dict[str, int], bool, dict[str, Any]]:
    """Trains on dense tables of all keys, those that only the held-out ratings have included. Returns as above."""
    both = movielens.Ratings(
        *(np.concatenate(columns) for columns in zip(_columns(log), _columns(held_out), strict=True))
    )
    vocabulary = vocabulary_of(both)
    graphdef, params = make_model(config)
    tables_graphdef, tables = nnx.split(DenseTables(initial_rows(config, vocabulary)))
    tx = optax.adam(config.dense_learning_rate)
    tables_tx = optax.adagrad(config.learning_rate, initial_accumulator_value=0.0)
    state = (params, tables, tx.init(params), tables_tx.init(tables))

    def loss_fn(params, tables, batch):
        return log_loss(params, nnx.merge(tables_graphdef, tables)(batch), batch["label"], batch["mask"], graphdef)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, tables, opt_state, tables_opt_state = state
        loss, (params_gradient, tables_gradient) = jax.value_and_grad(loss_fn, (0, 1))(params, tables, batch)
        updates, opt_state = tx.update(params_gradient, opt_state, params)
        tables_updates, tables_opt_state = tables_tx.update(tables_gradient, tables_opt_state, tables)
        params, tables = optax.apply_updates(params, updates), optax.apply_updates(tables, tables_updates)
        return (params, tables, opt_state, tables_opt_state), loss

    @jax.jit
    def predict(state, batch):
        return nnx.sigmoid(nnx.merge(graphdef, state[0])(nnx.merge(tables_graphdef, state[1])(batch)))

    history = training.History(config.epochs * len(log), config.show_progress, list(map(len, vocabulary.values())))
    with history, training.CtrlC() as ctrl_c:
        for rows in itertools.chain.from_iterable(batches_of(log, config.batch_size) for _ in range(config.epochs)):
            state, loss = step(state, to_places(rows, genres, vocabulary, config.batch_size))
            history.add(loss, None, [len(rows)])
            if ctrl_c.asks_to_stop(history.num_steps):
                break
    probabilities = [
        np.asarray(predict(state, to_places(rows, genres, vocabulary, config.batch_size)))[: len(rows)]
        for rows in batches_of(held_out, config.batch_size)
    ]
    num_rows = {name: len(keys) for name, keys in vocabulary.items()}
    return np.concatenate(probabilities), num_rows, ctrl_c.has_stopped, history.summary()


def _columns(rows: movielens.Ratings) -> tuple[np.ndarray, ...]:
    return tuple(getattr(rows, field.name) for field in dataclasses.fields(rows))


# ----------------------------------------------------------------------------------------------------------- training


def read_log(config: Config) -> tuple[movielens.Ratings, movielens.Genres]:
    """Reads the log of a configuration, or makes one."""
    if config.data is not None:
        return movielens.read_ratings(config.data), movielens.read_genres(config.data.parent / "u.item")
    with tempfile.TemporaryDirectory() as folder:
        num_users, num_items = max(config.num_ratings // 100, 1), max(config.num_ratings // 60, 1)
        movielens.write_log(folder, config.num_ratings, num_users=num_users, num_items=num_items, seed=config.seed)
        return read_log(dataclasses.replace(config, data=pathlib.Path(folder, "u.data")))


def train(config: Config) -> Result:
    """Trains on the first part of a log, and evaluates on the last.

    Args:
      config: what to train, on what.

    Raises:
      ValueError: nothing to train on, or nothing held out.
      movielens.LogFormatError: a line is not in the format.
      OSError: a file is not there.
    """
    ratings, genres = read_log(config)
    num_trained = len(ratings) - int(len(ratings) * config.held_out)
    log, held_out = ratings.part(0, num_trained), ratings.part(num_trained, len(ratings))
    if not len(log) or not len(held_out) or config.epochs < 1:
        raise ValueError(
            f"train: got {len(log)} ratings to train on, {len(held_out)} held out and {config.epochs} epochs, wanted "
            "at least 1 of each; pass another held_out or epochs."
        )
    run = train_dense if config.dense else train_dynamic
    probabilities, num_rows, is_interrupted, recorded = run(config, log, held_out, genres)
    return Result(
        auc=training.auc_of(held_out.liked, probabilities),
        held_out_loss=training.log_loss_of(held_out.liked, probabilities),
        num_held_out=len(held_out),
        new_keys={
            "user": float((~np.isin(held_out.user, log.user)).mean()),
            "item": float((~np.isin(held_out.item, log.item)).mean()),
        },
        num_rows=num_rows,
        is_interrupted=is_interrupted,
        **recorded,
    )


# ------------------------------------------------------------------------------------------------------- command line


def format_result(result: Result) -> str:
    """Says in words what a run did."""
    new = ", ".join(f"{share:.1%} of the {name}s" for name, share in result.new_keys.items())
    keys = ", ".join(f"{name} {count:,}" for name, count in result.num_rows.items())
    return "\n".join(
        [
            "Interrupted; what was done:" if result.is_interrupted else "Done.",
            f"  trained on       {result.num_samples:,} ratings, {len(result.losses):,} steps",
            f"  held-out AUC     {result.auc:.4f}  ({result.num_held_out:,} ratings, {new} in them new)",
            f"  samples/s        {result.samples_per_s:,.0f}  "
            f"({result.steady_samples_per_s:,.0f} without compilation and growth)",
            f"  keys             {sum(result.num_rows.values()):,}: {keys}",
        ]
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line.

    Args:
      arguments: the words after the program's name; None takes those of this process.
    """
    default = Config()
    parser = argparse.ArgumentParser(
        description="Train a factorisation or a two-tower model on MovieLens ratings.",
        formatter_class=training.HelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="FILE",
        help="u.data, with u.item in its folder (default: a synthetic log)",
    )
    add("--num-ratings", type=int, default=default.num_ratings, help="ratings of the synthetic log")
    add("--model", choices=sorted(MODELS), default=default.model, help="what the embeddings go through")
    add("--dense", action="store_true", help="train on nnx.Embed over a vocabulary counted before, to compare")
    add("--epochs", type=int, default=default.epochs, help="how often the log is gone through")
    add("--batch-size", type=int, default=default.batch_size, help="ratings in a step, on all devices together")
    add("--dim", type=int, default=default.dim, help="dim of the tables")
    add("--capacity", type=int, default=default.capacity, help="rows that each table begins with")
    add("--learning-rate", type=float, default=default.learning_rate, help="learning rate of the tables (Adagrad)")
    add("--dense-learning-rate", type=float, default=default.dense_learning_rate,
        help="learning rate of the dense parameters (Adam)")  # fmt: skip
    add("--hidden", nargs="*", type=int, default=default.hidden, metavar="WIDTH", help="hidden widths of each tower")
    add("--held-out", type=float, default=default.held_out, help="share of the log, at its end, to evaluate on")
    add("--seed", type=int, default=default.seed, help="seed of tables, dense parameters and synthetic log")
    add("--num-devices", type=int, help="how many devices to use (default: all)")
    add("--lookahead", type=int, default=default.lookahead, choices=(0, 1),
        help="batches that are looked up ahead, with the same results")  # fmt: skip
    add("--staleness", type=int, default=default.staleness, help="updates that the rows of a batch may miss")
    add("--plot", type=pathlib.Path, default=default.plot, metavar="FILE", help="file for the plot")
    add("--checkpoint-dir", type=pathlib.Path, default=default.checkpoint_dir, metavar="FOLDER",
        help="where Ctrl-C leaves the run; the same command goes on from there")  # fmt: skip
    add("--checkpoint-every", type=int, metavar="STEPS", help="save every so many steps too")
    add("--no-progress", dest="show_progress", action="store_false", default=argparse.SUPPRESS,
        help="show no progress bar")  # fmt: skip
    values = vars(parser.parse_args(arguments))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def main() -> int:
    """Trains as the command line says, and prints the result."""
    config = parse_arguments()
    device, number = jax.devices()[0], 1 if config.dense else len(jax.devices()[: config.num_devices])
    print(f"Device: {f'{number} x ' if number > 1 else ''}{device.platform} ({device.device_kind})")
    try:
        training.check_options(config)
        result = train(config)
    except (ValueError, TypeError, OSError) as error:
        print(f"train_movielens: {error}", file=sys.stderr)
        return 1
    print(format_result(result))
    if config.plot is not None:
        training.save_plot(result, f"{config.model} on MovieLens: held-out AUC {result.auc:.4f}", config.plot)
        print(f"  plot             {config.plot}")
    return 130 if result.is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
