# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Train to serve
#
# After this notebook you can export a trained model with its tables, serve it from another process, and send updates
# while it is served. It needs `pip install 'jaxsok[demo,serving]'` and runs in seconds on a CPU.
#
# [The complete recipe](../recipe.md) has the same way with files, checkpoints and resumption.

# %%
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsok
from jaxsok import checkpoint, serving
from jaxsok.serving import artifact, frozen

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Train
#
# Users and items have a table each; the score of a pair is a product with a dense matrix between the two rows.
# Statistics let a table export what changed.

# %%
adagrad = jaxsok.optim.adagrad(0.3, initial_accumulator_value=0.0)
tables = [jaxsok.TableSpec(name, 4, adagrad, capacity=256, statistics=True) for name in ("user", "item")]
features = [jaxsok.FeatureSpec(name, table=name) for name in ("user", "item")]
collection = jaxsok.Collection(tables, features)
tx = optax.adam(0.02)


def score(embeddings, matrix):
    return jax.nn.sigmoid(jnp.sum((embeddings["user"] @ matrix) * embeddings["item"], axis=-1))


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def step(state, matrix, opt_state, batch):
    def loss_fn(embeddings, matrix):
        return jnp.mean((score(embeddings, matrix) - batch["clicked"]) ** 2)

    embeddings, state, plan = collection.lookup(state, batch.features)
    loss, (rows, dense) = jax.value_and_grad(loss_fn, (0, 1))(embeddings, matrix)
    state, stats = collection.update(state, plan, rows)
    changes, opt_state = tx.update(dense, opt_state)
    return state, optax.apply_updates(matrix, changes), opt_state, loss


def train(training, num_steps, users, seed):
    rng, (state, matrix, opt_state) = np.random.default_rng(seed), training
    for _ in range(num_steps):
        user, item = rng.integers(*users, 256), rng.integers(0, 100, 256)
        clicked = (user % 2 == item % 2).astype(np.float32)
        batch = collection.batch({"user": user, "item": item, "clicked": clicked})
        state = collection.grow(state, batch)
        state, matrix, opt_state, loss = step(state, matrix, opt_state, batch)
    print(f"loss {loss:.3f}", collection.num_rows(state))
    return state, matrix, opt_state


matrix = jnp.eye(4)
training = train((collection.init(seed=0), matrix, tx.init(matrix)), 150, users=(0, 200), seed=0)

# %% [markdown]
# ## Export
#
# The tables become a folder, and the model another one: a compiled program for every batch size, with the dense
# parameters inside and the tables outside. `serving.lookup` reads tables that neither grow nor learn.

# %%
state, matrix, _ = training
checkpoint.export_full(folder / "tables-1", collection, state)


def model(tables, inputs):
    return {"score": score(serving.lookup(tables, inputs), matrix)}


inputs = {name: artifact.KeysInput(name) for name in ("user", "item")}
artifact.export_model(folder / "model", model, frozen.freeze(collection, state), inputs, platforms=["cpu", "cuda"])
print(sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# ## Serve
#
# The configuration is the JSON of HugeCTR's HPS. `python -m jaxsok serve serving.json` would serve the same over HTTP;
# here a session in this process does.

# %%
config = {
    "supportlonglong": True,
    "models": [
        {
            "model": "clicks",
            "sparse_files": [str(folder / "tables-1")] * 2,
            "dense_file": str(folder / "model"),
            "embedding_table_names": ["user", "item"],
            "embedding_vecsize_per_table": [4, 4],
            "maxnum_catfeature_query_per_table_per_sample": [1, 1],
            "default_value_for_each_table": [None, None],
            "deployed_device_list": [0],
            "max_batch_size": 64,
            "gpucacheper": 1.0,
        }
    ],
}
session = serving.open(config)
asked = {"user": np.array([1, 1, 2]), "item": np.array([5, 6, 6])}
answer = session.predict(asked)
print("version", answer.version, "scores", answer["score"].round(2))
assert (answer["score"].round() == [1, 0, 1]).all()

# %% [markdown]
# ## Update
#
# Training goes on with new users. A delta has the rows that changed and no others. Lookups do not wait for the update,
# and each answer is of one version.

# %%
training = train(training, 50, users=(200, 300), seed=1)
delta = checkpoint.export_delta(folder / "tables-2", collection, training[0], base=folder / "tables-1")
version = session.update(folder / "tables-2")
rows, _ = collection.rows_of(training[0], "user", np.array([250]))
print("version", version, "after a delta of", delta.num_rows, "rows")
assert np.array_equal(session.lookup({"user": np.array([250])})["user"], rows)
session.close()
