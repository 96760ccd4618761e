"""`Pipeline.jit`: a step that makes the plan of a later batch changes no bit, and the host plans nothing by itself."""

import functools
import inspect
import itertools

import jax
import numpy as np
import programs
import pytest
import test_pipeline
from test_pipeline import GRADIENTS, NUM_SHARDS, collection, even, make_skewed

import jaxsok

BAGS = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("ad", "ad", combiner="mean")]


@functools.cache
def rectangular():
    """Returns a collection whose batches all have one form."""
    return programs.over(NUM_SHARDS, test_pipeline.TABLES, BAGS)


def bags_of_three(step):
    """Makes evenly spread keys, three of them in each bag."""
    rng = np.random.default_rng(step)
    return {"user": rng.integers(0, 2**40, 128), "ad": rng.integers(0, 60, (128, 3))}


def step_of(declared, traced):
    """Returns a step, which notes when it is traced."""

    def step(state, plan, scale=1.0):
        traced.append(plan)
        embeddings, state, plan = declared.lookup(state, plan)
        state, stats = declared.update(state, plan, jax.tree.map(lambda rows: scale * rows, GRADIENTS))
        return state, embeddings, stats

    return step


@functools.cache
def step_apart(declared):
    """Returns the jitted step of pipelines that plan by programs of their own."""
    return jax.jit(step_of(declared, []), donate_argnums=0, compiler_options=programs.quickly())


def train(declared, raws, is_joined, *, skipped=(), traced=None, **options):
    """Trains on all batches but the skipped ones; returns the state, embeddings and statistics, and the pipeline."""
    state, pipeline, results = declared.init(seed=3), declared.pipeline(raws, **options), []
    step = step_apart(declared)
    if is_joined:
        body = step_of(declared, [] if traced is None else traced)
        step = pipeline.jit(body, donate_argnums=0, compiler_options=programs.quickly())
    for number, (_, plan) in enumerate(pipeline):
        if number not in skipped:
            state, embeddings, stats = step(state, plan)
            stats.check()
            results.append((jax.tree.map(np.asarray, embeddings), stats.to_dict()))
    return state, results, pipeline


def assert_same_training(declared, raws, **options):
    """Trains with joined steps and with steps and plans apart, and compares all bits; returns the joined pipeline."""
    state, results, pipeline = train(declared, raws, True, **options)
    other, wanted, apart = train(declared, raws, False, **options)
    jax.tree.map(np.testing.assert_array_equal, results, wanted)
    programs.assert_same_state(state, other, index=False)
    assert pipeline.send_capacities == apart.send_capacities
    assert pipeline.num_replanned == apart.num_replanned
    return pipeline


@pytest.mark.parametrize(("num_shards", "prefetch"), [(None, 0), (1, 2), (NUM_SHARDS, 0), (NUM_SHARDS, 2)])
def test_no_bit_changes(num_shards, prefetch):
    """Batches of several forms, one of them so skewed that it is planned again, or goes in rounds."""
    assert_same_training(collection(num_shards), [even(0), even(1), make_skewed(2), *map(even, range(3, 9))])


@pytest.mark.parametrize("options", [{"lookahead": 1}, {"staleness": 2}])
def test_no_bit_changes_with_lookups_ahead(options):
    assert_same_training(rectangular(), [bags_of_three(step) for step in range(6)], **options)


def test_no_bit_changes_with_micro_batches():
    """A step takes the plans of two batches; it plans one later batch, and the pipeline the other."""
    declared, states = rectangular(), []
    for is_joined in (True, False):
        pipeline = declared.pipeline([bags_of_three(step) for step in range(6)], lookahead=1, micro_batches=2)
        jit = pipeline.jit if is_joined else jax.jit

        def step(state, plans):
            looked_up = []
            for plan in plans:
                _, state, plan = declared.lookup(state, plan)
                looked_up.append(plan)
            return declared.update(state, looked_up, [GRADIENTS] * len(looked_up))

        step, state, plans = jit(step, donate_argnums=0), declared.init(seed=0), []
        for _, plan in pipeline:
            plans.append(plan)
            if len(plans) == 2:
                state, stats = step(state, plans)
                stats.check()
                plans = []
        states.append(state)
    programs.assert_same_state(*states, index=False)


def count_plans(monkeypatch, declared):
    """Returns a list that gets True for each plan made in a trace, and False for each by a program of its own."""
    counted, plan = [], type(declared).plan_with_loads

    def counting(self, features, *args, **kwargs):
        counted.append(isinstance(features.stores[0].keys, jax.core.Tracer))
        return plan(self, features, *args, **kwargs)

    monkeypatch.setattr(type(declared), "plan_with_loads", counting)
    return counted


def test_batches_of_one_form_are_planned_by_one_program(monkeypatch):
    """The first three plans, of which one is made twice, have their own; then one traced step makes all, to the end."""
    traced, counted = [], count_plans(monkeypatch, rectangular())
    _, results, _ = train(rectangular(), [bags_of_three(0)] * 9, True, traced=traced)
    assert len(results) == 9
    assert len(traced) == 1
    assert counted.count(False) == 4 and counted.count(True) == 1


def test_another_pipeline_compiles_nothing():
    """The second epoch of one step, in a pipeline of its own, uses the programs of the first."""
    declared, traced = rectangular(), []
    body, state = step_of(declared, traced), rectangular().init(seed=3)
    for epoch in range(2):
        pipeline = declared.pipeline([bags_of_three(step) for step in range(6)])
        step = pipeline.jit(body, donate_argnums=0)
        for _, plan in pipeline:
            state, _, stats = step(state, plan)
            stats.check()
        assert len(traced) == 1, f"epoch {epoch}"


def test_steps_apart_plan_each_batch(monkeypatch):
    """The count of the test above would see plans that are not joined."""
    counted = count_plans(monkeypatch, rectangular())
    train(rectangular(), [bags_of_three(0)] * 9, False)
    assert counted == [False] * 10


def test_batches_that_are_not_stepped_are_planned():
    """The batch that such a step would have planned comes with its plan; so do those after a loop that broke off."""
    raws = [bags_of_three(step) for step in range(9)]
    assert_same_training(rectangular(), raws, skipped=(1, 2, 5))
    state, pipeline, seen = rectangular().init(seed=3), rectangular().pipeline(raws), 0
    step = pipeline.jit(step_of(rectangular(), []), donate_argnums=0)
    for most in (2, 3, 9):
        for _, plan in itertools.islice(pipeline, most):
            state, _, stats = step(state, plan)
            stats.check()
            seen += 1
    wanted, _, _ = train(rectangular(), raws, False)
    assert seen == 9
    programs.assert_same_state(state, wanted, index=False)


def test_a_step_that_fails_leaves_its_plan_to_the_pipeline():
    """An error in a step loses no batch."""
    raws, counted = [bags_of_three(step) for step in range(8)], 0
    state, pipeline = rectangular().init(seed=3), rectangular().pipeline(raws)
    step = pipeline.jit(step_of(rectangular(), []), donate_argnums=0)
    for number, (_, plan) in enumerate(pipeline):
        if number == 2:
            with pytest.raises(TypeError, match="scale"):
                step(state, plan, scale="much")
        state, _, stats = step(state, plan)
        stats.check()
        counted += 1
    wanted, _, _ = train(rectangular(), raws, False)
    assert counted == 8
    programs.assert_same_state(state, wanted, index=False)


def test_a_step_may_be_given_the_memory_of_its_plan():
    """The program that has nothing left to plan does not read what it was given."""
    raws, declared = [bags_of_three(step) for step in range(7)], rectangular()

    def step(state, plan):
        _, state, plan = declared.lookup(state, plan)
        state, stats = declared.update(state, plan, GRADIENTS)
        return state, plan, stats

    state, pipeline = declared.init(seed=3), declared.pipeline(raws)
    program = pipeline.jit(step, donate_argnums=(0, 1))
    for _, plan in pipeline:
        state, _, stats = program(state, plan)
        stats.check()
    wanted, _, _ = train(declared, raws, False)
    programs.assert_same_state(state, wanted, index=False)


@pytest.mark.parametrize("ahead", [{"lookahead": 1}, {"staleness": 1}])
@pytest.mark.parametrize("spelling", ["number", "negative", "name", "names", "keyword", "nested"])
def test_a_step_may_not_be_given_the_memory_of_plans_to_come(ahead, spelling):
    """With lookups ahead a plan holds those of the batches that follow, which later steps get."""
    raws, declared = [bags_of_three(step) for step in range(7)], rectangular()
    state, pipeline = declared.init(seed=3), declared.pipeline(raws, **ahead)
    one_step, options = step_of(declared, []), {"donate_argnums": (0, 1)}
    function = one_step
    if spelling == "nested":
        function = lambda state, given: one_step(state, given["plans"][0])  # noqa: E731
    if spelling == "negative":
        options = {"donate_argnums": -1}
    if spelling in ("name", "names"):
        name = list(inspect.signature(one_step).parameters)[1]
        options = {"donate_argnames": name if spelling == "name" else [name]}
    step = pipeline.jit(function, **options)
    (_, plan), *_ = pipeline
    with pytest.raises(ValueError, match="donate_argnums, donate_argnames: got an argument with a plan with lookups"):
        if spelling == "keyword":
            step(state, **{list(inspect.signature(one_step).parameters)[1]: plan})
        else:
            step(state, {"plans": [plan]} if spelling == "nested" else plan)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, plan)))


def test_within_another_trace_nothing_is_planned():
    raws, declared, shapes = [bags_of_three(step) for step in range(7)], rectangular(), []
    state, pipeline = declared.init(seed=3), declared.pipeline(raws)
    step = pipeline.jit(step_of(declared, []), donate_argnums=0)
    for _, plan in pipeline:
        shapes.append(jax.eval_shape(step, state, plan))
        state, _, stats = step(state, plan)
        stats.check()
    wanted, _, _ = train(declared, raws, False)
    assert len(shapes) == len(raws)
    programs.assert_same_state(state, wanted, index=False)


@pytest.mark.parametrize("num_shards", [None, NUM_SHARDS])
def test_it_takes_the_options_of_jit(num_shards):
    """Arguments are donated and static by number and by name, and others may follow; so with `Collection.ahead`."""
    declared = rectangular() if num_shards else collection(None)
    raws = [bags_of_three(step) if num_shards else even(step) for step in range(4)]

    def step(ignored, state, features, name, scale=1.0):
        assert ignored == "static" and name == "too"
        return step_of(declared, [])(state, features, scale)

    def ahead(step, **options):
        return declared.ahead(jax.jit(step, **options))

    plain = jax.jit(step_of(declared, []))
    for jit in (jax.jit, ahead):
        state, pipeline = declared.init(seed=3), declared.pipeline(raws)
        program = pipeline.jit(step, jit=jit, static_argnums=0, static_argnames="name", donate_argnums=(1,))
        for _, plan in pipeline:
            before = state
            state, _, stats = program("static", state, plan, name="too", scale=0.5)
            stats.check()
            assert before.stores[0].index.is_deleted()
        states = declared.init(seed=3)
        for _, plan in declared.pipeline(raws):
            states, _, _ = plain(states, plan, 0.5)
        programs.assert_same_state(state, states, index=False)


def test_shardings_are_refused():
    """They would have to name those of the pipeline's arrays, too."""
    with pytest.raises(TypeError, match=r"pipeline.jit: out_shardings: got one, wanted none"):
        rectangular().pipeline([]).jit(lambda state: state, out_shardings=None)


def test_nnx():
    """`nnx.jit` compiles a step of layers in the same way."""
    nnx = pytest.importorskip("flax.nnx")
    from jaxsok.layers import nnx as layers

    declared, states = rectangular(), []
    for is_joined in (True, False):
        pipeline = declared.pipeline([bags_of_three(step) for step in range(6)])
        layer = layers.Embeddings(declared, seed=3)

        def step(layer, plan):
            loss = layers.value_and_grad(lambda layer: sum(rows.sum() for rows in layer(plan).values()))
            _, gradients = loss(layer)
            return layer.update(gradients)

        step = pipeline.jit(step, jit=nnx.jit) if is_joined else nnx.jit(step)
        for _, plan in pipeline:
            step(layer, plan).check()
        states.append(layer.tables.get_value())
    programs.assert_same_state(*states, index=False)
