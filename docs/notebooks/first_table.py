# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # First table
#
# After this notebook you can declare a table, train its rows, and see what happened in it. It needs `pip install
# jaxsok` and runs in seconds on a CPU.
#
# The task: each user has a hidden rating, and a model that is nothing but a table of one number for each user finds
# it. The keys are any 64-bit integers; there is no vocabulary and no size to choose.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsok

print("jaxsok", jaxsok.__version__, "with JAX", jax.__version__)

# %% [markdown]
# ## Declare
#
# A `TableSpec` names a table and its optimizer, a `FeatureSpec` says which part of a batch reads it. The collection
# holds no arrays: `init` makes them, as a pytree that `jax.jit` takes and returns.

# %%
tables = [jaxsok.TableSpec("user", dim=1, optimizer=jaxsok.optim.adagrad(1.0), capacity=64)]
features = [jaxsok.FeatureSpec("user", table="user")]
collection = jaxsok.Collection(tables, features)
state = collection.init(seed=0)
print("rows at first:", collection.num_rows(state))

# %% [markdown]
# ## One step
#
# `lookup` gives embeddings, and rows to keys that are new. Embeddings are ordinary arrays, so `jax.grad` gives their
# gradients, and `update` steps each row that was used. The state is donated, so the tables are changed in place.


# %%
def loss_fn(embeddings, rating):
    return jnp.sum((embeddings["user"][:, 0] - rating) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, batch):
    embeddings, state, plan = collection.lookup(state, batch.features)
    loss, gradients = jax.value_and_grad(loss_fn)(embeddings, batch["rating"])
    state, stats = collection.update(state, plan, gradients)
    return state, loss, stats


# %% [markdown]
# ## Train
#
# `batch` packs the features on the host; everything else in the batch passes through. `grow` runs between steps and
# makes room for keys that are coming: the table began with 64 rows and will have 500.

# %%
rng = np.random.default_rng(0)
users = rng.integers(0, 2**63, 500)
ratings = rng.integers(1, 6, 500).astype(np.float32)

for i in range(101):
    chosen = rng.integers(0, 500, 256)
    batch = collection.batch({"user": users[chosen], "rating": ratings[chosen]})
    state = collection.grow(state, batch)
    state, loss, stats = step(state, batch)
    if i % 20 == 0:
        print(f"step {i:3d}  mean loss {loss / 256:7.4f}  rows {collection.num_rows(state)['user']}")

stats.check()  # raises if the step lost anything
assert loss / 256 < 0.01

# %% [markdown]
# ## Look inside
#
# `find` reads without inserting anything: the last of these keys was never trained, so it counts as missing. `rows_of`
# reads rows by key, and `erase` takes them away.

# %%
asked = np.array([users[0], users[1], 12345])
embeddings, stats = collection.find(state, collection.batch({"user": asked}).features)
print("hidden ", ratings[:2])
print("learned", np.asarray(embeddings["user"][:2, 0]).round(2))
print(stats.to_dict()["user"])

# %%
state, num_erased = collection.erase(state, "user", users[:100])
print("erased", int(num_erased), "and left", collection.num_rows(state))
assert collection.num_rows(state)["user"] == 400

# %% [markdown]
# ## Next
#
# [DLRM on clicks](dlrm_on_clicks.py) trains a ranking model with many tables; [One lookup](../one_lookup.md) shows
# every array of a step; [Growth](../growth.md) tells when tables get larger.
