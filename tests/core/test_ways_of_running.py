"""Execution modes (docs/compiled_steps.md) give the result of the plain donated step, or an error with the reason."""

import dataclasses
import functools
import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok

NUM_SAMPLES = 16
DIM = 4


@functools.cache
def declare(capacity=64, max_capacity=None):
    """Declares two stores, one of them with bags."""
    tables = [
        jaxsok.TableSpec("user", DIM, jaxsok.optim.adagrad(0.1), capacity=capacity, max_capacity=max_capacity),
        jaxsok.TableSpec("item", 3, jaxsok.optim.adam(0.1), capacity=capacity, max_capacity=max_capacity),
    ]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item", combiner="mean")]
    return jaxsok.Collection(tables, features)


def raw_of(seed, num_samples=NUM_SAMPLES, num_keys=40):
    """Returns keys with repeats."""
    rng = np.random.default_rng(seed)
    return {"user": rng.integers(0, num_keys, num_samples), "item": rng.integers(0, num_keys, (num_samples, 3))}


def features_of(collection, seed, **options):
    """Returns one batch."""
    return collection.batch(raw_of(seed, **options)).features


def loss_of(embeddings):
    """Returns a mean over samples, as in training."""
    return jnp.mean(jnp.tanh(embeddings["user"]).sum(axis=1) * jnp.sin(embeddings["item"]).sum(axis=1))


def step_of(collection, loss=loss_of):
    """Returns the plain step."""

    def step(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.grad(loss)(embeddings)
        state, stats = collection.update(state, plan, gradients)
        return state, stats

    return step


def linear_loss(embeddings):
    """Returns a loss whose gradient has the same bits however it is compiled."""
    return sum(jnp.sum(embedding) for embedding in embeddings.values())


def donate(step):
    """Returns the jitted step with a donated state."""
    return jax.jit(step, donate_argnums=0, compiler_options=programs.quickly())


def stack_trees(trees):
    """Stacks trees of equal shapes along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack_tree(tree, number):
    """Reverses `stack_trees` for one tree."""

    def take_leaf(i):
        return jax.tree.map(lambda leaf: leaf[i], tree)

    return [take_leaf(i) for i in range(number)]


def assert_same(collection, first, second):
    """Checks that both stores have equal bits."""
    programs.assert_same_state(first, second)
    assert collection.num_rows(first) == collection.num_rows(second)


# ------------------------------------------------------------------------------------------------------- accumulation


def micro_batches(raw, number):
    """Splits a raw batch into equal parts."""
    parts = {name: np.split(column, number) for name, column in raw.items()}
    return [{name: parts[name][i] for name in raw} for i in range(number)]


@pytest.mark.parametrize("way", ["loop", "scan"])
def test_accumulated_micro_batches_are_one_batch(way):
    """One update with the plans of four lookups, each with a quarter of the gradient, gives rows with equal bits."""
    collection, number = declare(), 4
    raw = raw_of(1)
    whole, _ = donate(step_of(collection))(collection.init(seed=0), collection.batch(raw).features)
    parts = [collection.batch(part).features for part in micro_batches(raw, number)]

    def look_up(state, features):
        embeddings, state, plan = collection.lookup(state, features)
        gradients = jax.tree.map(lambda g: g / number, jax.grad(loss_of)(embeddings))
        return state, (plan, gradients)

    def loop(state, parts):
        plans, gradients = [], []
        for features in parts:
            state, (plan, gradient) = look_up(state, features)
            plans.append(plan)
            gradients.append(gradient)
        return collection.update(state, plans, gradients)

    def scan(state, parts):
        state, (plans, gradients) = jax.lax.scan(look_up, state, stack_trees(parts))
        plans, gradients = unstack_tree(plans, number), unstack_tree(gradients, number)
        return collection.update(state, plans, gradients)

    state, stats = donate({"loop": loop, "scan": scan}[way])(collection.init(seed=0), parts)
    stats.check()
    assert int(state.step) == 1
    # A GPU's compiler fuses the loss differently in a loop: its gradients differ in the last bit.
    programs.assert_same_tables(collection, whole, state, rtol=0 if jax.default_backend() == "cpu" else 1e-5)
    counts = stats.to_dict()
    assert counts["user"]["num_inserted"] == len(set(raw["user"].tolist()))


# ---------------------------------------------------------------------------------------------------- mixed precision


def test_dense_model_in_bfloat16():
    """Embeddings are cast at the model's input; gradients return in float32, and rows and state stay float32."""
    collection = declare()
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(DIM, 3)), jnp.float32)

    def loss(kernel, embeddings, dtype):
        user, item, kernel = (x.astype(dtype) for x in (embeddings["user"], embeddings["item"], kernel))
        return jnp.mean(jnp.square(user @ kernel - item).astype(jnp.float32).sum(axis=1))

    def step(state, features, dtype):
        embeddings, state, plan = collection.lookup(state, features)
        dense, gradients = jax.grad(loss, (0, 1))(kernel, embeddings, dtype)
        state, stats = collection.update(state, plan, gradients)
        return state, dense, gradients, stats

    results = {}
    for dtype in ("float32", "bfloat16"):
        jitted = jax.jit(functools.partial(step, dtype=dtype), donate_argnums=0)
        results[dtype] = jitted(collection.init(seed=0), features_of(collection, 2))
        text = jitted.lower(collection.init(seed=0), features_of(collection, 2)).as_text()
        assert (re.search(r"dot_general.*bf16", text) is not None) == (dtype == "bfloat16")
    state, dense, gradients, stats = results["bfloat16"]
    stats.check()
    assert {leaf.dtype for leaf in jax.tree.leaves((dense, gradients, [s.rows for s in state.stores]))} == {
        jnp.dtype("float32")
    }
    for name, gradient in gradients.items():
        exact = np.asarray(results["float32"][2][name])
        assert not np.array_equal(gradient, exact)
        np.testing.assert_allclose(gradient, exact, atol=0.02 * np.abs(exact).max())


# ---------------------------------------------------------------------------------------------------------- lax.scan


def test_scan_over_steps():
    """K steps in one program give the same bits, and `grow(steps=K)` makes room for the worst case of all of them."""
    num_steps = 5
    plain, scanned = declare(8), jaxsok.Collection(declare(8).tables, declare(8).features)
    features = [features_of(plain, seed, num_keys=400) for seed in range(num_steps)]
    state, step = plain.init(seed=0), donate(step_of(plain))
    for feature in features:
        state, stats = step(plain.grow(state), feature)
        stats.check()

    @donate
    def run(state, features):
        return jax.lax.scan(step_of(scanned), state, features)

    features = stack_trees([features_of(scanned, seed, num_keys=400) for seed in range(num_steps)])
    small, stats = run(scanned.init(seed=0), features)
    assert np.asarray(stats.num_refused).sum() > 0, "8 rows are too few: without grow keys are refused, and counted"
    roomy = scanned.grow(scanned.init(seed=0), steps=num_steps)
    assert all(store.capacity >= num_steps * NUM_SAMPLES for store in roomy.stores)
    roomy, stats = run(roomy, features)
    assert np.asarray(stats.num_refused).sum() == 0
    programs.assert_same_tables(plain, state, roomy)
    assert int(roomy.step) == num_steps


# ----------------------------------------------------------------------------------------------------------- jax.Ref


def ref_step_of(collection, loss=loss_of):
    """Returns a step over references: it reads them, and writes the new state back."""

    def step(refs, features):
        state, stats = step_of(collection, loss)(jax.tree.map(lambda ref: ref[...], refs), features)
        jax.tree.map(lambda ref, leaf: ref.__setitem__(..., leaf), refs, state)
        return stats

    return step


def test_state_in_references():
    """`jax.Ref`s need no donation: they give the bits of a donated step, nothing is copied, and they grow."""
    collection = declare(8)
    features = [features_of(collection, seed, num_keys=60) for seed in range(4)]
    state, step = collection.init(seed=0, salt=0), donate(step_of(collection))
    for feature in features:
        state, _ = step(collection.grow(state), feature)

    refs = jax.tree.map(jax.new_ref, collection.init(seed=0, salt=0))
    ref_step = jax.jit(ref_step_of(collection), compiler_options=programs.quickly())
    for feature in features:
        # Frozen references are arrays again, and the references are consumed.
        grown = collection.grow(jax.tree.map(jax.freeze, refs))
        refs = jax.tree.map(jax.new_ref, grown)
        ref_step(refs, feature)
    held = jax.tree.map(lambda ref: ref[...], refs)
    if jax.default_backend() == "cpu":
        assert_same(collection, state, held)
    else:  # a GPU's compiler fuses the loss differently if state is read from references: the last bit differs
        programs.assert_same_tables(collection, state, held, rtol=1e-5)


def test_references_are_changed_in_place():
    """The program copies no table, and the arrays keep their addresses."""
    collection = declare(1 << 12)
    refs = jax.tree.map(jax.new_ref, collection.init(seed=0))
    features = features_of(collection, 0)
    compiled = jax.jit(ref_step_of(collection)).lower(refs, features).compile()
    assert not [line for line in compiled.as_text().splitlines() if re.search(r"f32\[4096,.* copy\(", line)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(collection.init(seed=0).stores))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_references_on_a_mesh():
    """References give the same results over two devices."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    table = jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), capacity=64)
    collection = programs.over(2, [table], [jaxsok.FeatureSpec("user", "user")])
    features = collection.batch({"user": np.arange(8) % 5}).features
    loss = programs.loss_of
    state, _ = donate(step_of(collection, loss))(collection.init(seed=0), features)
    refs = jax.tree.map(jax.new_ref, collection.init(seed=0))

    jax.jit(ref_step_of(collection, loss), compiler_options=programs.quickly())(refs, features).check()
    programs.assert_same_tables(collection, state, jax.tree.map(lambda ref: ref[...], refs))


# ----------------------------------------------------------------------------------------------------------- profiles


def test_operations_are_named():
    """Profilers read the metadata of operations: the call and the store."""
    collection = declare()
    state, features = collection.init(seed=0), features_of(collection, 0)

    def everything(state, features):
        plan = collection.plan(features)
        embeddings, state, plan = collection.lookup(state, plan)
        fused, state, fused_plan = collection.lookup(state, features)
        clipped, _, norm = collection.clip_by_global_norm(state, [plan, fused_plan], [embeddings, fused], 1.0)
        state, stats = collection.update(state, [plan, fused_plan], clipped)
        found, _ = collection.find(state, features)
        state, _ = collection.erase(state, "user", np.array([7]))
        return state, found, norm

    text = jax.jit(everything).lower(state, features).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*)"', text))
    for call, stores in {
        "jaxsok.lookup": ["store[user]", "store[item]"],
        "jaxsok.find": ["store[user]", "store[item]"],
        "jaxsok.update": ["store[user]", "store[item]"],
        "jaxsok.clip_by_global_norm/jaxsok.gradient_norm": ["store[user]", "store[item]"],
        "jaxsok.erase": [""],
    }.items():
        for store in stores:
            assert any(f"{call}/{store}" in name for name in names), (call, store)
    calls = re.findall(r'custom_call_target="jaxsok_\w+".*?op_name="([^"]*)"', text)
    assert calls and all("jaxsok." in name for name in calls)


def test_exchange_is_named():
    """Collectives and rounds are named as well."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    table = jaxsok.TableSpec("user", DIM, jaxsok.optim.sgd(0.1), capacity=64)
    collection = programs.over(2, [table], [jaxsok.FeatureSpec("user", "user")])
    features = collection.batch({"user": np.arange(8)}).features
    text = jax.jit(collection.lookup).lower(collection.init(seed=0), features).as_text(debug_info=True)
    for name in ("jaxsok.lookup", "store[user]", "round", "to_owners/all_to_all", "to_askers/all_to_all"):
        assert name in text, name
    assert "jaxsok.plan" in jax.jit(collection.plan).lower(features).as_text(debug_info=True)


def test_calls_are_named_on_the_host(tmp_path):
    """A trace shows the work of the host: packing, growing, tracing of a step."""
    collection = jaxsok.Collection(declare().tables, declare().features)
    state = collection.init(seed=0)
    with jax.profiler.trace(str(tmp_path)):
        features = features_of(collection, 0)
        state = collection.grow(state)
        state, _ = donate(step_of(collection))(state, features)
        jax.block_until_ready(state)
    (path,) = tmp_path.glob("**/*.trace.json.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    for name in ("jaxsok.batch", "jaxsok.grow", "jaxsok.lookup", "jaxsok.update"):
        assert f'"{name}"' in text, name


# ------------------------------------------------------------------------------------- transformations that are refused


def with_rows(state, rows):
    """Returns the state with other rows in its first store."""
    first, *others = state.stores
    return dataclasses.replace(state, stores=(dataclasses.replace(first, rows=(rows,)), *others))


def refused_cases():
    """Returns, by name, a request to JAX, and the op and argument that the message names."""
    collection = declare()
    state, features = collection.init(seed=0), features_of(collection, 0)
    rows = state.stores[0].rows[0]
    embeddings, after, plan = collection.lookup(state, features)

    def total(rows, op):
        return sum(e.sum() for e in getattr(collection, op)(with_rows(state, rows), features)[0].values())

    def move_rows(gradients, **options):
        return collection.update(after, plan, gradients, **options)[0].stores[0].rows[0].sum()

    two = functools.partial(jax.tree.map, lambda leaf: jnp.stack([leaf, leaf]))
    return {
        "grad of lookup": (lambda: jax.grad(lambda r: total(r, "lookup"))(rows), "lookup: state: got a derivative"),
        "grad of find": (lambda: jax.jit(jax.grad(lambda r: total(r, "find")))(rows), "find: state: got a derivative"),
        "jvp of lookup": (
            lambda: jax.jvp(lambda r: total(r, "lookup"), (rows,), (rows,)),
            "lookup: state: got a deriv",
        ),
        "grad through update": (lambda: jax.grad(move_rows)(embeddings), "update: gradients: got a derivative"),
        "grad in a scan": (
            lambda: jax.grad(
                lambda r: jax.lax.scan(lambda c, _: (c + total(r, "lookup"), None), jnp.float32(0), None, length=2)[0]
            )(rows),
            "lookup: state: got a derivative",
        ),
        "grad of the norm": (
            lambda: jax.grad(lambda g: collection.gradient_norm(after, plan, g))(embeddings),
            "gradient_norm: gradients: got a derivative",
        ),
        "vmap over states": (
            lambda: jax.vmap(lambda s: collection.lookup(s, features)[0])(two(state)),
            "lookup: state: got arrays that jax.vmap maps over \\(2",
        ),
        "vmap over features": (
            lambda: jax.jit(jax.vmap(lambda f: collection.lookup(state, f)[0]))(two(features)),
            "lookup: features: got arrays that jax.vmap maps over",
        ),
        "vmap of find": (
            lambda: jax.vmap(lambda f: collection.find(state, f)[0])(two(features)),
            "find: features: got arrays that jax.vmap maps over",
        ),
        "vmap over learning rates": (
            lambda: jax.vmap(lambda rate: move_rows(embeddings, learning_rate=rate))(jnp.ones(2)),
            "update: learning_rate: got arrays that jax.vmap maps over",
        ),
        "grad by the learning rate": (
            lambda: jax.grad(lambda rate: move_rows(embeddings, learning_rate=rate))(1.0),
            "update: learning_rate: got a derivative",
        ),
        "vmap of plan": (
            lambda: jax.vmap(lambda f: collection.plan(f).features)(two(features)),
            "plan: features: got arrays that jax.vmap maps over",
        ),
        "vmap of update": (
            lambda: jax.vmap(lambda g: collection.update(after, plan, g)[0].step)(two(embeddings)),
            "update: gradients: got arrays that jax.vmap maps over",
        ),
        "vmap of erase": (
            lambda: jax.vmap(lambda s: collection.erase(s, "user", np.array([7]))[1])(two(state)),
            "erase: state: got arrays that jax.vmap maps over",
        ),
    }


@pytest.mark.parametrize("name", refused_cases())
def test_derivatives_and_maps_are_refused(name):
    """The message uses the terms of the call, not those of FFI, however deeply nested the call is."""
    provoke, message = refused_cases()[name]
    with pytest.raises(TypeError, match=message):
        provoke()


def test_transformations_around_a_whole_step_that_need_no_derivative_of_it():
    """A lookup inside a differentiated function is allowed if no derivative with respect to the state is requested."""
    collection = declare()
    state, features = collection.init(seed=0), features_of(collection, 0)

    @jax.jit
    def step(scale, state):
        def loss(scale, state):
            embeddings, state, plan = collection.lookup(state, features)
            return loss_of(jax.tree.map(lambda e: e * scale, embeddings)), (state, plan, embeddings)

        (_, (state, plan, embeddings)), gradient = jax.value_and_grad(loss, has_aux=True)(scale, state)
        state, _ = collection.update(state, plan, embeddings)
        return gradient, jax.vmap(jnp.sum)(embeddings["user"]), state

    gradient, sums, _ = step(jnp.float32(2), state)
    embeddings, _, _ = collection.lookup(state, features)
    want = jax.grad(lambda scale: loss_of(jax.tree.map(lambda e: e * scale, embeddings)))(jnp.float32(2))
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    np.testing.assert_allclose(sums, np.asarray(embeddings["user"]).sum(axis=1), rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- checkpoint


def test_lookup_under_checkpoint_runs_twice():
    """A trace cannot detect recomputation: the result is right, but the work is done twice.

    Outside the checkpointed function it is done once. If JAX starts to keep the first result, this test fails.
    """
    collection = declare()

    def inside(scale, state, features):
        def loss(scale):
            embeddings, new, plan = collection.lookup(state, features)
            return loss_of(jax.tree.map(lambda e: jnp.sin(e * scale), embeddings)), (embeddings, new, plan)

        (_, (embeddings, new, plan)), gradient = jax.value_and_grad(jax.checkpoint(loss), has_aux=True)(scale)
        return gradient, collection.update(new, plan, embeddings)

    def outside(scale, state, features):
        embeddings, new, plan = collection.lookup(state, features)

        def loss(scale, embeddings):
            return loss_of(jax.tree.map(lambda e: jnp.sin(e * scale), embeddings))

        gradient = jax.grad(jax.checkpoint(loss))(scale, embeddings)
        return gradient, collection.update(new, plan, embeddings)

    results = {}
    for name, function, times in (("inside", inside, 2), ("outside", outside, 1)):
        jitted = jax.jit(function, donate_argnums=1)
        args = jnp.float32(0.5), collection.init(seed=0, salt=0), features_of(collection, 3)
        assert jitted.lower(*args).as_text().count("@jaxsok_lookup(") == times * len(collection.stores)
        results[name] = jitted(*args)
    np.testing.assert_allclose(results["inside"][0], results["outside"][0], rtol=1e-5)
    (inside_state, inside_stats), (outside_state, outside_stats) = (results[name][1] for name in results)
    assert inside_stats.to_dict() == outside_stats.to_dict()
    programs.assert_same_state(inside_state, outside_state, index=False)
    assert collection.num_rows(inside_state) == collection.num_rows(outside_state)


# ------------------------------------------------------------------------------------------------------- not donated


@pytest.mark.parametrize("name", ["not donated", "not jitted"])
def test_a_state_that_is_copied_gives_the_same_results(name):
    """Without donation every step copies the rows; `grow` takes the copy."""
    collection = jaxsok.Collection(declare().tables, declare().features)
    plain = step_of(collection, linear_loss)
    step = {"not donated": jax.jit(plain, compiler_options=programs.quickly()), "not jitted": plain}[name]
    states = []
    for each in (step, donate(plain)):
        state = collection.init(seed=0)
        for i in range(4):
            features = features_of(collection, i)
            state, _ = each(collection.grow(state), features)
        states.append(state)
    programs.assert_same_tables(collection, *states)


# ------------------------------------------------------------------------------------------------------------ shapes


def test_each_shape_of_a_batch_is_a_program():
    """A smaller last batch traces the step again; a padded batch does not, and gives the same rows."""
    collection, sizes, traced = declare(256), [16, 16, 9], []
    step = step_of(collection, lambda e: jnp.sum(e["user"] ** 2) + jnp.sum(e["item"] ** 2))

    def count_traces(state, features):
        traced.append(features.stores[0].keys.shape)
        return step(state, features)

    unpadded, padded = (jax.jit(lambda *args: count_traces(*args), donate_argnums=0) for _ in range(2))
    state = collection.init(seed=0)
    for seed, size in enumerate(sizes):
        state, _ = unpadded(state, features_of(collection, seed, num_samples=size))
    assert len(traced) == len(set(traced)) == 2
    other = collection.init(seed=0)
    for seed, size in enumerate(sizes):
        other, _ = padded(other, collection.batch(raw_of(seed, num_samples=size), pad_to=16).features)
    assert len(traced) == 3
    programs.assert_same_tables(collection, state, other)


def test_ragged_batches_share_programs_by_powers_of_two():
    """Without max_keys the buffer is the next power of two of the batch's keys; with it the buffer is constant."""
    table = jaxsok.TableSpec("item", DIM, jaxsok.optim.sgd(0.1), capacity=64)
    programs_of = {}
    for max_keys in (None, 32):
        feature = jaxsok.FeatureSpec("item", "item", combiner="sum", max_keys=max_keys)
        collection = jaxsok.Collection([table], [feature])
        step = jax.jit(step_of(collection, programs.loss_of), donate_argnums=0, compiler_options=programs.quickly())
        state = collection.init(seed=0)
        for num_keys in (5, 7, 8, 9, 16, 20):
            bags = jaxsok.Bags(np.arange(num_keys), lengths=np.array([num_keys - 2, 2]))
            state, _ = step(state, collection.batch({"item": bags}).features)
        programs_of[max_keys] = step._cache_size()
    assert programs_of == {None: 3, 32: 1}
