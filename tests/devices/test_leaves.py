"""The number of arrays of a step: each costs host time on every device, at every dispatch (10 to 25 us)."""

import re

import jax
import numpy as np
import programs
import pytest

import jaxsok

NUM_SHARDS, NUM_SAMPLES = 4, 16
SEND_CAPACITY = (64,)


def shaped_like_w1(i):
    """Returns a feature of one key per sample."""
    return jaxsok.FeatureSpec(f"t{i}", f"t{i}"), np.arange(NUM_SAMPLES) + i


def shaped_like_w5(i):
    """Returns a feature of ragged bags."""
    bags = jaxsok.Bags(np.arange(4 * NUM_SAMPLES) + i, lengths=np.full(NUM_SAMPLES, 4))
    return jaxsok.FeatureSpec(f"t{i}", f"t{i}", max_keys=4 * NUM_SAMPLES), bags


def collection_and_raw(make, num_tables):
    """Returns tables of one store over four devices, each with its feature, and a raw batch."""
    made = [make(i) for i in range(num_tables)]
    rowwise = jaxsok.optim.rowwise_adagrad(0.1)
    tables = [jaxsok.TableSpec(feature.name, 16, rowwise, capacity=64) for feature, _ in made]
    collection = programs.over(NUM_SHARDS, tables, [feature for feature, _ in made])
    return collection, {feature.name: keys for feature, keys in made}


def num_arrays(lowered):
    """Counts the arrays that a program reads, and those that it returns."""
    (signature,) = re.findall(r"func\.func public @main\((.*)\) -> \((.*)\) \{", lowered.as_text())
    return len(re.findall(r"%arg\d+: tensor", signature[0])), len(re.findall(r"tensor<", signature[1]))


@pytest.mark.parametrize(
    ("make", "num_tables", "in_batch"), [(shaped_like_w1, 8, 1), (shaped_like_w5, 32, 2)], ids=["W1", "W5"]
)
def test_arrays_of_a_planned_step(make, num_tables, in_batch):
    """The numbers may decrease; an increase needs a reason."""
    collection, raw = collection_and_raw(make, num_tables)
    batch, state = collection.batch(raw), collection.init(seed=0)
    assert len(jax.tree.leaves(batch)) == in_batch  # keys, and offsets of ragged features
    plan = collection.plan(batch.features, send_capacity=SEND_CAPACITY)
    assert len(jax.tree.leaves(plan.asked)) == 4  # received, slots, load and digest
    assert len(jax.tree.leaves(plan)) == in_batch + 4

    def step(state, batch, plan):
        del batch  # its labels would be read
        return programs.train_step(collection)(state, plan)

    # Index, counters, rows by table; rows, records, optimizer state; step, seed, owners, tickets, lineage, refused
    in_state = len(jax.tree.leaves(state))
    assert in_state == 12
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch, plan)
    assert num_arrays(lowered) == (in_state + in_batch + 3, in_state + 2)  # the load of the batch; loss and statistics


@pytest.mark.parametrize(("make", "num_tables", "in_batch"), [(shaped_like_w1, 8, 1), (shaped_like_w5, 32, 2)])
def test_features_do_not_pass_through_the_program_of_a_plan(make, num_tables, in_batch):
    """They would come out as copies, so the plan keeps the arrays that went in."""
    collection, raw = collection_and_raw(make, num_tables)
    features = collection.batch(raw).features
    plan = collection.plan(features, send_capacity=SEND_CAPACITY)
    for array, given in zip(jax.tree.leaves(plan.features), jax.tree.leaves(features), strict=True):
        assert array is given
    assert len(jax.tree.leaves(features)) == in_batch
