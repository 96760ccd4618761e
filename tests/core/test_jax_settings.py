"""The loop of the README under settings of JAX: x64, `disable_jit`, `transfer_guard`, strict promotion, axis types."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import optax
import programs
import pytest
from jax.sharding import AxisType

import jaxsok

STEPS = 4


def declare(mesh=None, exchange="rows", learning_rate=0.1, **options):
    """Declares a table that grows, with bags of two keys."""
    table = jaxsok.TableSpec("t", 4, jaxsok.optim.adam(learning_rate), capacity=64, **options)
    place = {} if mesh is None else {"mesh": mesh, "axis": "data"}
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("f", "t", combiner="sum", exchange=exchange)], **place)


def train(collection, setting=contextlib.nullcontext):
    """Trains under a setting; returns the rows by key, and the last Stats."""
    step = jax.jit(
        lambda s, f: (lambda e, s, p: collection.update(s, p, e))(*collection.lookup(s, f)), donate_argnums=0
    )
    state = collection.init(seed=0)
    with setting():
        for number in range(STEPS):
            batch = collection.batch({"f": np.arange(40).reshape(20, 2) + 30 * number})
            state = collection.grow(state, batch)
            state, stats = step(state, batch.features)
    stats.check()
    records = collection.export_table(state, "t")
    return dict(zip(records["keys"].tolist(), records["rows"].tolist(), strict=True)), stats


@functools.cache
def plain_rows(num_shards=None, **options):
    """Trains under the settings of all tests; returns the rows by key."""
    return train(declare(num_shards and programs.mesh(num_shards), **options))[0]


@pytest.mark.parametrize(("num_shards", "exchange"), [(None, "rows"), (2, "rows"), (2, "bags")])
def test_x64_changes_nothing(num_shards, exchange):
    """The rows have the same bits, and all counts 32 bits, with strict promotion too, which the tests set."""
    rows = plain_rows(num_shards, exchange=exchange)
    under, stats = train(declare(num_shards and programs.mesh(num_shards), exchange), lambda: jax.enable_x64(True))
    assert under == rows and len(rows) == 130
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} <= {np.dtype(np.int32), np.dtype(np.uint32)}


@pytest.mark.parametrize("admission", [None, jaxsok.policies.AdmitByCount(2)])
def test_a_state_grows_without_jit(admission):
    """Programs that are compiled before a state is consumed are compiled also then."""
    rows = plain_rows(admission=admission)
    under, _ = train(declare(admission=admission), jax.disable_jit)
    assert under.keys() == rows.keys()
    np.testing.assert_allclose([under[key] for key in rows], list(rows.values()), rtol=1e-5, atol=1e-7)


def test_a_state_that_grew_without_jit_lies_where_others_do():
    """On a mesh all arrays are split as they are otherwise, before any step puts them there."""
    states = []
    for setting in (contextlib.nullcontext, jax.disable_jit):
        collection = declare(programs.mesh(2))
        batch = collection.batch({"f": np.arange(400).reshape(200, 2)})
        with setting():
            state = collection.grow(collection.init(seed=0), batch)
            records = collection.export_table(state, "t")
        assert state.stores[0].capacity > 64 and len(records["keys"]) == 0
        states.append(jax.tree.map(lambda leaf: leaf.sharding, state))
    assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


def test_find_in_host_memory_has_no_nans_to_debug():
    """Lines that an op leaves unwritten, since their rows are cached, are no result: memory is used again here."""
    collection = declare(memory=jaxsok.HostMemory(device_rows=16))
    features = collection.batch({"f": np.arange(32).reshape(16, 2)}).features
    embeddings, state, plan = collection.lookup(collection.init(seed=0), features)
    state, _ = collection.update(state, plan, embeddings)
    wanted = collection.find(state, features)[0]["f"]
    for _ in range(20):
        [np.asarray(jax.numpy.full(shape, np.nan)) for shape in ((32, 4), (32, 4), (32, 4), (16, 4))]
        with jax.debug_nans(True):
            found, _ = collection.find(state, features)
        np.testing.assert_array_equal(found["f"], wanted)


@pytest.mark.parametrize("options", [{}, {"max_capacity": 64, "eviction": jaxsok.policies.LeastRecentlyUsed()}])
@pytest.mark.parametrize("num_shards", [None, 2])
def test_the_loop_makes_no_hidden_transfer_to_devices(num_shards, options):
    """Only transfers to devices are forbidden: `grow` and `check` read counts from them."""
    mesh = num_shards and programs.mesh(num_shards)
    rows = plain_rows(num_shards, **options)
    assert train(declare(mesh, **options), lambda: jax.transfer_guard_host_to_device("disallow"))[0] == rows


def test_schedules_of_optax_mix_dtypes():
    """The tests set strict promotion, under which Optax's own arithmetic of schedules fails."""
    rates = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    with pytest.raises(jax.dtypes.TypePromotionError):
        rates(np.int32(1))
    rows, _ = train(declare(learning_rate=rates))
    with jax.numpy_dtype_promotion("standard"):
        assert train(declare(learning_rate=rates))[0] == rows


def test_manual_axes_are_refused():
    with pytest.raises(ValueError, match=r"axis: got axes of the type Manual, .*, wanted Auto or Explicit"):
        declare(programs.mesh(2, axis_type=AxisType.Manual))


def test_features_of_other_collections_of_the_same_tables_are_refused():
    table = declare().tables
    feature = jaxsok.FeatureSpec("f", "t", combiner="mean")
    mean = jaxsok.Collection(table, [feature])
    more = jaxsok.Collection(table, [feature, jaxsok.FeatureSpec("g", "t")])
    state, features = mean.init(seed=0), mean.batch({"f": np.array([[1, 2]])}).features
    for other in (declare(), more):
        with pytest.raises(ValueError, match=r"find: features: got those of a collection with other features"):
            other.find(state, features)
    other_table = dataclasses.replace(table[0], name="other")
    ways = [jaxsok.Collection([*table, other_table], [jaxsok.FeatureSpec("f", name)]) for name in ("t", "other")]
    with pytest.raises(ValueError, match=r"find: features: .*'f': \('other', 'sum', False\)"):
        ways[0].find(ways[0].init(seed=0), ways[1].batch({"f": np.array([1])}).features)
    weighted = jaxsok.Collection(table, [jaxsok.FeatureSpec("f", "t", combiner="mean", weighted=True)])
    of_weighted = weighted.batch({"f": jaxsok.Bags(np.array([[1, 2]]), weights=np.ones((1, 2), np.float32))}).features
    with pytest.raises(ValueError, match=r"find: features: .*'f': \('t', 'mean', True\)"):
        mean.find(state, of_weighted)
    same = jaxsok.Collection(table, [jaxsok.FeatureSpec("f", "t", combiner="mean", max_keys=64)])
    assert same.find(state, features)[0].keys() == {"f"}
