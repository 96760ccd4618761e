"""Tests bad calls of operations: each raises a clear error that names the op and the argument, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from bad_input_cases import BAD_KIND, DIM, SGD, over_one_table, over_two, raises

import jaxsok

KEYS = np.arange(6)
ONES = np.ones((2, DIM), np.float32)


@pytest.fixture(scope="module")
def collection():
    """Returns a collection of one plain feature, ragged or not, of at most eight keys."""
    return programs.one_table(max_keys=8)


@pytest.fixture(scope="module")
def two_features():
    return over_one_table()


@pytest.fixture(scope="module")
def step(two_features):
    """Returns a state and a plan for bad calls."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    _, state, plan = two_features.lookup(two_features.init(seed=0), features)
    return state, plan


# --------------------------------------------------------------------------------------------------------------
# Steps fail when they are traced


@pytest.mark.parametrize(
    ("kind", "gradients", "parts"),
    [
        (ValueError, {"user": ONES}, ("friend",)),
        (ValueError, {"user": ONES, "friend": ONES, "enemy": ONES}, ("enemy",)),
        (ValueError, {"user": ONES, "friend": ONES[:1]}, ("friend", "1,4")),
        (ValueError, {"user": ONES, "friend": ONES[:, :3]}, ("friend", "2,3")),
        (ValueError, {"user": ONES, "friend": ONES[None]}, ("friend", "1,2,4")),
        (TypeError, {"user": ONES, "friend": ONES.astype(np.int32)}, ("friend", "int32")),
        (TypeError, [ONES, ONES, ONES], ()),
        (TypeError, ONES, ("wantedadictofarraysbyfeature",)),
    ],
)
def test_gradients(two_features, step, kind, gradients, parts):
    """Gradients that are missing, unknown, of another shape or of another dtype are refused."""
    state, plan = step
    before = jax.tree.map(np.array, state)
    with pytest.raises((kind, ValueError) if isinstance(gradients, list) else kind) as error:
        two_features.update(state, plan, jax.tree.map(jnp.asarray, gradients))
    message = str(error.value).replace(" ", "")
    for part in ("update", "gradients", *parts):
        assert part in message, f"{part!r} is not in: {error.value}"
    programs.assert_same_state(before, state)


def test_plans_without_their_gradients(two_features, step):
    """There must be as many gradients as plans, and at least one."""
    state, plan = step
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises(ValueError, "update", "2", "1"):
        two_features.update(state, [plan, plan], [gradients])
    with raises(ValueError, "update", "plan"):
        two_features.update(state, [], [])


def test_update_needs_a_plan_of_a_lookup(two_features, step):
    """A plan made ahead is refused, since it has no rows yet."""
    state, _ = step
    ahead = two_features.plan(programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3])))
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises(TypeError, "update", "plan", "lookup"):
        two_features.update(state, ahead, gradients)
    with raises(TypeError, "update", "plan: got dict"):  # embeddings in its place
        two_features.update(state, gradients, ahead)


@pytest.mark.parametrize(
    "rate",
    ["fast", np.ones(3), np.nan, np.float32("inf"), np.array(np.nan), jnp.array(jnp.nan), np.array(1j), 1e300],
)
def test_learning_rate_of_update(two_features, step, rate):
    """The learning rate must be a finite number or a 0-d array."""
    state, plan = step
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises((TypeError, ValueError), "update", "learning_rate"):
        two_features.update(state, plan, gradients, learning_rate=rate)


OTHERS = {
    "dim": [jaxsok.TableSpec("user", 8, SGD, capacity=16)],
    "optimizer": [jaxsok.TableSpec("user", DIM, jaxsok.optim.adam(0.1), capacity=16)],
    "name": [jaxsok.TableSpec("usr", DIM, SGD, capacity=16)],
    "initializer": [jaxsok.TableSpec("user", DIM, SGD, capacity=16, initializer=jaxsok.initializers.zeros())],
    "tables": [jaxsok.TableSpec("user", DIM, SGD, capacity=16), jaxsok.TableSpec("item", DIM, SGD, capacity=16)],
}


@pytest.mark.parametrize("difference", OTHERS)
def test_a_state_of_other_specs(two_features, step, difference):
    """The fingerprint detects other specs in every op; the state does not change."""
    state, plan = step
    before = jax.tree.map(np.array, state)
    tables = OTHERS[difference]
    other = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, tables[0].name) for name in ("user", "friend")])
    features = programs.batch(other, user=np.array([1, 2]), friend=np.array([2, 3]))
    dim = tables[0].dim
    gradients = {name: jnp.ones((2, dim)) for name in ("user", "friend")}
    for op, call in {
        "lookup": lambda: other.lookup(state, features),
        "find": lambda: other.find(state, features),
        "update": lambda: other.update(state, plan, gradients),
        "grow": lambda: other.grow(state),
        "erase": lambda: other.erase(state, tables[0].name, np.array([1])),
        "export_table": lambda: other.export_table(state, tables[0].name),
        "num_rows": lambda: other.num_rows(state),
    }.items():
        with raises(ValueError, op, "state"):
            call()
    programs.assert_same_state(before, state)


def test_features_of_another_collection(two_features):
    """Features are valid only for the collection that packed them."""
    other = programs.one_table(dim=8)
    features = programs.batch(other, user=np.array([1, 2]))
    with raises(ValueError, "lookup", "features"):
        two_features.lookup(two_features.init(seed=0), features)


@pytest.mark.parametrize("op", ["lookup", "find"])
def test_raw_input_instead_of_features(two_features, op):
    """Raw batches are refused."""
    with raises(TypeError, op, "dict"):
        getattr(two_features, op)(two_features.init(seed=0), {"user": KEYS, "friend": KEYS})


@pytest.mark.parametrize("op", ["lookup", "find", "num_rows", "grow"])
def test_something_else_than_a_state(two_features, op):
    """Swapped embeddings and states are detected."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    arguments = (features,) if op in ("lookup", "find") else ()
    with raises(TypeError, op, "state", "dict"):
        getattr(two_features, op)({"user": ONES}, *arguments)


def test_a_state_of_another_dim(two_features):
    """The message names the dims, since the fingerprint alone does not help."""
    state = programs.one_table(dim=8).init(seed=0)
    for op in ("grow", "num_rows"):
        with raises(ValueError, op, "state", "dims [8]", f"wanted [{DIM}]", "use the collection that made it"):
            getattr(two_features, op)(state)


@pytest.mark.parametrize("memory", [None, jaxsok.HostMemory(8)], ids=["device", "host"])
@pytest.mark.parametrize(
    ("declared", "cast"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_a_state_that_was_cast(declared, cast, memory):
    """As the parameters of a model are, all at once."""
    tables = [jaxsok.TableSpec("user", DIM, jaxsok.optim.adagrad(0.1), capacity=16, dtype=declared, memory=memory)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("user", "user")])

    def to_cast(leaf):
        return leaf.astype(cast) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    state, features = jax.tree.map(to_cast, collection.init(seed=0)), programs.batch(collection, user=np.array([1]))
    wanted = "cast the parameters of the model alone"
    got = [cast, cast], [declared, "float32"]
    for op, call in {
        "lookup": lambda: collection.lookup(state, features),
        "find": lambda: jax.jit(collection.find)(state, features),
        "grow": lambda: collection.grow(state),
        "export_table": lambda: collection.export_table(state, "user"),
    }.items():
        with raises(ValueError, f"{op}: state", *map(str, got), wanted):
            call()


HOST_OPS = {
    "grow": lambda collection, state: collection.grow(state),
    "num_rows": lambda collection, state: collection.num_rows(state),
    "export_table": lambda collection, state: collection.export_table(state, "user"),
    "export_chunks": lambda collection, state: list(collection.export_chunks(state, "user")),
}


@pytest.mark.parametrize("op", HOST_OPS)
def test_a_traced_state_in_an_operation_of_the_host(two_features, op):
    """The operation runs between steps, so a traced state is refused."""
    state = two_features.init(seed=0)
    programs.batch(two_features, user=np.array([1]), friend=np.array([2]))  # without one `grow` warns
    with raises(TypeError, f"{op}: state", "traced", "jax.jit", "runs on the host"):
        jax.jit(lambda state: HOST_OPS[op](two_features, state))(state)
    HOST_OPS[op](two_features, state)


@pytest.mark.parametrize("op", [*HOST_OPS, "find", "erase"])
def test_a_state_that_was_donated(two_features, op):
    """An error is raised, although jaxlib ends the process if `is_ready` is called; the new state still works."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    call = HOST_OPS | {
        "find": lambda collection, state: collection.find(state, features),
        "erase": lambda collection, state: collection.erase(state, "user", np.array([1])),
    }
    old = two_features.init(seed=0)
    state, *_ = programs.donated_step(two_features)(old, features)
    with raises(ValueError, f"{op}: state", "deleted", "donated"):
        call[op](two_features, old)
    call[op](two_features, state)


@pytest.mark.parametrize("op", ["erase", "export_table"])
def test_unknown_table_of_an_op(two_features, step, op):
    """The message names the declared tables."""
    state, _ = step
    arguments = (np.array([1]),) if op == "erase" else ()
    with raises(ValueError, op, "usr", "user"):
        getattr(two_features, op)(state, "usr", *arguments)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (TypeError, np.array([1.0])),
        (TypeError, jnp.arange(3, dtype=jnp.int32)),
        (TypeError, np.array([True])),
        (ValueError, np.int64(3)),
    ],
)
def test_keys_of_erase(two_features, step, kind, keys):
    """Keys of erase follow the rules of batches."""
    state, _ = step
    before = jax.tree.map(np.array, state)
    with raises(kind, "erase", "keys"):
        two_features.erase(state, "user", keys)
    programs.assert_same_state(before, state)


@pytest.mark.parametrize(("kind", "steps"), [(ValueError, 0), (ValueError, -1), (BAD_KIND, 1.5)])
def test_steps_of_grow(two_features, step, kind, steps):
    """`steps` must be at least one."""
    with raises(kind, "grow", "steps", steps):
        two_features.grow(step[0], steps=steps)


@pytest.mark.parametrize(("kind", "seed"), [(BAD_KIND, 1.5), (BAD_KIND, "0"), (ValueError, -1), (ValueError, 2**64)])
def test_seed_of_init(two_features, kind, seed):
    """A seed must be an unsigned integer; none is truncated."""
    with raises(kind, "init", "seed", seed):
        two_features.init(seed=seed)


def test_unknown_feature_of_offsets_and_mask(two_features):
    """Unknown names of features are refused."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    with raises((KeyError, ValueError), "features", "usr"):
        features.mask("usr")
    with raises((KeyError, ValueError), "features", "usr"):
        features.offsets("usr")


# --------------------------------------------------------------------------------------------------------------
# Memory


def test_memory_that_will_not_fit():
    """Four tebibytes are refused before any allocation, with the requested bytes and the bytes of a row."""
    num_rows, dim = 2**30, 1024
    collection = programs.one_table(dim=dim, capacity=num_rows)
    with pytest.raises((MemoryError, ValueError)) as error:
        collection.init(seed=0)
    message = str(error.value).replace(",", "").replace("_", "")
    numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in message).split()]
    assert "init" in message and "user" in message
    # The message states the total, in bytes or in a larger unit; a row costs 4,096 bytes, its key and its index share.
    assert any(n >= num_rows * dim * 4 for n in numbers) or "TiB" in message or "GiB" in message, message
    assert any(4096 < n < 4096 + 256 for n in numbers), message


def test_growth_that_will_not_fit():
    """A reserve beyond all memory is refused, and the state still works."""
    collection = programs.one_table(dim=1024, capacity=16, combiner="sum")
    state = programs.insert(collection, collection.init(seed=0), np.arange(16))
    with pytest.raises((MemoryError, ValueError, OverflowError), match="grow"):
        collection.grow(state, steps=2**40)
    state = programs.insert(collection, collection.grow(state), np.arange(20))
    assert collection.num_rows(state) == {"user": 20}


# --------------------------------------------------------------------------------------------------------------
# On a mesh


def test_states_and_features_of_another_mesh():
    """States and features of one device, of two devices, and of two devices of another axis are never confused."""
    one_device = programs.one_table(capacity=16)
    collections = {
        "one device": one_device,
        "data=2": over_two(),
        "rank=2": over_two(("rank",), "rank"),
    }
    made = {
        name: (collection.init(seed=0), programs.batch(collection, user=np.array([1, 2])))
        for name, collection in collections.items()
    }
    for name, declared in collections.items():
        for other, (state, features) in made.items():
            if name == other:
                continue
            own_state, own_features = made[name]
            for op, call in {
                "lookup": lambda declared=declared, own=own_features, state=state: declared.lookup(state, own),
                "find": lambda declared=declared, own=own_features, state=state: declared.find(state, own),
                "grow": lambda declared=declared, state=state: declared.grow(state),
                "erase": lambda declared=declared, state=state: declared.erase(state, "user", np.array([1])),
                "export_table": lambda declared=declared, state=state: declared.export_table(state, "user"),
                "num_rows": lambda declared=declared, state=state: declared.num_rows(state),
            }.items():
                with raises(ValueError, op, "state", other, name, "use the collection that made it"):
                    call()
            if "one device" in (name, other):
                with raises(ValueError, "find", "features", "batch"):
                    declared.find(own_state, features)


@pytest.mark.parametrize(
    ("send_capacity", "parts"),
    [(4, ("4", "1 stores")), ((4, 4), ("(4, 4)", "1 stores")), ((0,), ("0", "at least 1")), ((2.0,), ("2.0",))],
)
def test_send_capacity_of_plan(collection, send_capacity, parts):
    """The send capacity is one number for each store, on a mesh only."""
    declared = over_two()
    with raises(ValueError, "plan", "send_capacity", *parts):
        declared.plan(programs.batch(declared, user=np.arange(2)), send_capacity=send_capacity)
    with raises(ValueError, "plan", "send_capacity", "without a mesh"):
        collection.plan(programs.batch(collection, user=np.arange(2)), send_capacity=(4,))


def test_unlike_plans_in_one_update():
    """A plan with one round and a plan with several rounds cannot share an update."""
    declared = over_two()
    features = programs.batch(declared, user=np.arange(2))
    _, state, first = declared.lookup(declared.init(seed=0), features)
    embeddings, state, second = declared.lookup(state, declared.plan(features, send_capacity=(4,)))
    with raises(ValueError, "update", "plan", "send capacity", "all of one kind"):
        declared.update(state, [first, second], [embeddings, embeddings])


@pytest.mark.parametrize("op", ["stack", "unstack"])
def test_stack_on_one_device(collection, op):
    """On one device `stack` is refused, since pmap needs a mesh."""
    with raises(ValueError, op, "tree", "mesh"):
        getattr(collection, op)(collection.init(seed=0))


@pytest.mark.parametrize("op", ["grow", "num_rows", "find"])
def test_a_stacked_state_outside_of_pmap(op):
    """The message names `unstack`; `grow` changes nothing."""
    declared = over_two()
    features = programs.batch(declared, user=np.arange(2))
    _, state, _ = declared.lookup(declared.init(seed=0), features)
    state = declared.stack(state)
    arguments = (features,) if op == "find" else ()
    with raises(ValueError, f"{op}: state", "one more axis", "collection.unstack(state)"):
        getattr(declared, op)(state, *arguments)
    assert declared.num_rows(declared.unstack(state)) == {"user": 2}


def test_pmap_over_an_axis_of_another_name():
    """The axis of pmap must be the collection's axis."""
    declared = over_two()
    state, features = declared.stack(declared.init(seed=0)), declared.stack(programs.batch(declared, user=np.arange(2)))
    for name in ({"axis_name": "batch"}, {}):
        step = jax.pmap(lambda state, features: declared.find(state, features)[0], devices=jax.devices()[:2], **name)
        with raises(ValueError, "Collection: axis", "pmap over other axes alone", "axis_name='data'"):
            step(state, features)
