# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # DLRM on clicks
#
# After this notebook you can train a ranking model on a click log in Criteo's format, with a dynamic table for each of
# its 26 categories, and measure its AUC. It needs `pip install 'jaxsok[demo]'` and takes half a minute on a CPU.
#
# The log here is synthetic, with a planted signal. For a log of your own, set `log` to its path.
# [examples/train_dlrm.py](../../examples/train_dlrm.py) is the same as a program, with checkpoints and many devices.

# %%
import functools
import itertools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import jaxsok
from jaxsok import data
from jaxsok.data import criteo

EXAMPLES = next(folder / "examples" for folder in pathlib.Path.cwd().parents if (folder / "examples").exists())
sys.path.append(str(EXAMPLES))  # for the synthetic log; a log of your own does not need it
import synthetic_log  # noqa: E402

# %% [markdown]
# ## The data
#
# A source gives samples by number: the label, 13 integers, and 26 keys named `C1` to `C26`. `Batches` forms batches,
# and leaves the last rows for the evaluation.

# %%
BATCH_SIZE = 1024
NUM_ROWS, NUM_HELD_OUT = 40_960, 8_192

log = pathlib.Path(tempfile.mkdtemp()) / "clicks.tsv"
synthetic_log.write_log(log, NUM_ROWS, seed=0, max_cardinality=5_000)
source = criteo.TextSource(log)
training = data.Batches(source, BATCH_SIZE, seed=0, stop=NUM_ROWS - NUM_HELD_OUT)
held_out = data.Batches(source, BATCH_SIZE, start=NUM_ROWS - NUM_HELD_OUT)
print(
    {
        name: (column.dtype.name, column.shape)
        for name, column in source[0].items()
        if name in ("label", "integers", "C1")
    }
)

# %% [markdown]
# ## The model
#
# A bottom MLP turns the integers into a vector like those of the tables. The dot products of all pairs of vectors go
# through a top MLP to one logit. Tables are not part of the dense parameters: they have an optimizer of their own.

# %%
DIM = 8
adagrad = jaxsok.optim.adagrad(0.05, initial_accumulator_value=0.0)
tables = [jaxsok.TableSpec(name, DIM, adagrad, capacity=1024) for name in criteo.CATEGORY_NAMES]
features = [jaxsok.FeatureSpec(name, table=name) for name in criteo.CATEGORY_NAMES]
collection = jaxsok.Collection(tables, features)
LEFT, RIGHT = np.tril_indices(len(tables) + 1, k=-1)


def make_mlp(key, widths):
    shapes = list(itertools.pairwise(widths))
    keys = jax.random.split(key, len(shapes))
    weights = [jax.random.normal(key, shape) * np.sqrt(2 / shape[0]) for key, shape in zip(keys, shapes, strict=True)]
    return [(weight, jnp.zeros(weight.shape[1])) for weight in weights]


def apply_mlp(mlp, x):
    for i, (weight, bias) in enumerate(mlp):
        x = (jax.nn.relu(x) if i else x) @ weight + bias
    return x


def predict(params, embeddings, integers):
    dense = jax.nn.relu(apply_mlp(params["bottom"], integers))
    vectors = jnp.stack([dense, *(embeddings[name] for name in criteo.CATEGORY_NAMES)], axis=1)
    dots = jnp.einsum("bid,bjd->bij", vectors, vectors)[:, LEFT, RIGHT]
    return apply_mlp(params["top"], jnp.concatenate([dense, dots], axis=1))[:, 0]


def loss_fn(params, embeddings, batch):
    logits = predict(params, embeddings, batch["integers"])
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


# %% [markdown]
# ## Train
#
# One lookup serves all 26 tables, and one update steps them. `pipeline` packs and copies batches while earlier steps
# run.

# %%
tx = optax.adam(2e-3)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def step(state, params, opt_state, batch, plan):
    embeddings, state, plan = collection.lookup(state, plan)
    loss, (dense, rows) = jax.value_and_grad(loss_fn, (0, 1))(params, embeddings, batch)
    state, stats = collection.update(state, plan, rows)
    changes, opt_state = tx.update(dense, opt_state)
    return state, optax.apply_updates(params, changes), opt_state, loss, stats


bottom, top = jax.random.split(jax.random.key(0))
params = {
    "bottom": make_mlp(bottom, [criteo.NUM_INTEGERS, 32, DIM]),
    "top": make_mlp(top, [DIM + len(LEFT), 64, 1]),
}
state, opt_state = collection.init(seed=0), tx.init(params)
losses = []
for batch, plan in collection.pipeline(data.iterate(training.repeat(2))):
    state = collection.grow(state, batch)
    state, params, opt_state, loss, stats = step(state, params, opt_state, batch, plan)
    losses.append(float(loss))
stats.check()
rows = collection.num_rows(state)
print(f"{len(losses)} steps, loss {np.mean(losses[:8]):.3f} at first, {np.mean(losses[-8:]):.3f} at the end")
print("rows:", {name: rows[name] for name in ("C1", "C2", "C3")}, "and", sum(rows.values()), "in all")

# %% [markdown]
# ## Evaluate
#
# `find` inserts nothing. A key without a row reads the row that it would get.


# %%
@jax.jit
def evaluate(state, params, batch):
    embeddings, stats = collection.find(state, batch.features)
    return jax.nn.sigmoid(predict(params, embeddings, batch["integers"]))


labels, probabilities = [], []
for raw in data.iterate(held_out):
    probabilities.append(evaluate(state, params, collection.batch(raw)))
    labels.append(raw["label"])
auc = roc_auc_score(np.concatenate(labels), np.concatenate(probabilities))
print(f"AUC on {NUM_HELD_OUT} held-out rows: {auc:.3f}")
assert auc > 0.6
