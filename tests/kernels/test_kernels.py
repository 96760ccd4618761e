"""One contract suite over all targets, on the CPU and on CUDA: the exact bits of kernel_model.py.

Each case is a script of calls on one store (`cases_<noun>.py`), named after its function. Each back end runs it twice.
`pytest tests/kernels/test_kernels.py -k small`: quick cases that launch every kernel, for compute-sanitizer.
"""

import dataclasses
import functools
import itertools
import re

import cases_combine
import cases_evict
import cases_lookup
import cases_plan
import cases_table
import cases_tier
import cases_update
import jax
import jax.numpy as jnp
import kernel_model
import kernel_scripts
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import given, strategies as st

from jaxsok.kernels import combine, evict, library, lookup, plan, table, tier, update
from jaxsok.store import StoreState

# Importing them adds their scripts to `kernel_scripts.CASES`.
CASES_OF_NOUNS = (cases_combine, cases_evict, cases_lookup, cases_plan, cases_table, cases_tier, cases_update)
BACK_ENDS = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


# --------------------------------------------------------------------------------------------------------------
# Calls. `static` is (op, attributes): one compilation for each pair and each set of shapes.


def _batch(x, features):
    return x["keys"], x["offsets"], x["weights"], np.array(features, np.int32)


def _bags(x, features):
    return x["offsets"], x["weights"], np.array(features, np.int32)


def _find(s, x):
    return {"row_ids": table.find(s.index, s.counters, x["keys"], x["table_ids"])}, s


def _admission(x, refused):
    return None if refused is None else table.Admission(x["step"], np.array(refused, np.uint32), x.get("uses"))


def _find_or_insert(s, x, tables, refused=None):
    tables, admission = np.array(tables, np.uint32), _admission(x, refused)
    s, row_ids, counts = table.find_or_insert(s, tables, x["seed"], x["keys"], x["table_ids"], admission)
    return {"row_ids": row_ids, "counts": counts}, s


def _gather(s, x, tables, is_find, dtype):
    tables = np.array(tables, np.uint32)
    counters, rows, num_absent = table.gather(
        s.counters, tables, x["seed"], x["requests"], x["row_ids"], s.rows, is_find=is_find, dtype=dtype
    )
    return {"rows": rows, "num_absent": num_absent}, dataclasses.replace(s, counters=counters)


def _scatter(s, x):
    return {"slabs": table.scatter(x["row_ids"], x["lines"], x["slabs"])}, s


def _touch(s, x):
    return {"statistics": table.touch(x["row_ids"], x["uses"], x["clock"], x["statistics"])}, s


def _rebuild(s, x, num_buckets):
    counters = jnp.concatenate(
        [s.counters[: kernel_model.SALT_LOW], x["salt"], s.counters[kernel_model.SALT_HIGH + 1 :]]
    )
    index, counters = table.rebuild(counters, s.records, num_buckets)
    return {}, dataclasses.replace(s, index=index, counters=counters)


def _forget(s, x):
    return {}, dataclasses.replace(s, sightings=(table.forget(s.sightings[0], x["floors"]),))


def _wait(s, x, floors, num_buckets):
    entries = jnp.concatenate([s.sightings[0].reshape(-1, 4), x["entries"]])
    sightings, counters = table.wait(s.counters, np.array(floors, np.uint32), entries, num_buckets)
    return {}, dataclasses.replace(s, sightings=(sightings,), counters=counters)


def _evict_select(s, x, num_tables, table):
    names = ("flags", "num_selected")
    found = evict.select(x["num_kept"], s.records, x["scores"], x["mask"], num_tables, table)
    return dict(zip(names, found, strict=True)), s


def _evict_release(s, x, initial):
    outside = {name: x[name] for name in ("statistics", "table_evicted")}
    after, num_released = evict.release(dataclasses.replace(s, **outside), x["flags"], initial, counts_evicted=True)
    outputs = {name: getattr(after, name) for name in outside} | {"num_released": num_released}
    return outputs, dataclasses.replace(after, statistics=(), table_evicted=())


def _plan_requests(s, x, tables, features, **attributes):
    names = ("requests", "inverse", "starts", "hashes", "slots", "digest")
    tables = np.array(tables, np.uint32)
    return dict(zip(names, plan.plan_requests(_batch(x, features), tables, x["owners"], **attributes), strict=True)), s


def _plan_uses(s, x, tables, features, **attributes):
    names, tables = ("uses", "starts", "offsets", "scales"), np.array(tables, np.uint32)
    return dict(zip(names, plan.plan_uses(_batch(x, features), tables, x["owners"], **attributes), strict=True)), s


def _lookup(s, x, tables, features, num_tiles, shapes, embedding_dtype, refused=None):
    tables = np.array(tables, np.uint32)
    after, out = lookup.lookup(
        dataclasses.replace(s, statistics=x.get("statistics", ())),
        lookup.Reading(tables, x["seed"], _batch(x, features), num_tiles, shapes, embedding_dtype),
        _admission(x, refused),
        x.get("clock"),
    )
    noted = {"statistics": after.statistics} if after.statistics else {}
    return out._asdict() | noted, dataclasses.replace(after, statistics=())


def _lookup_find(s, x, tables, features, num_tiles, shapes, embedding_dtype):
    tables = np.array(tables, np.uint32)
    reading = lookup.Reading(tables, x["seed"], _batch(x, features), num_tiles, shapes, embedding_dtype)
    counts, embeddings = lookup.lookup_find(s, reading)
    return {"counts": counts, "embeddings": embeddings}, s


def _lookup_planned(s, x, tables, features, num_tiles, shapes, embedding_dtype):
    tables = np.array(tables, np.uint32)
    reading = lookup.Reading(tables, x["seed"], _batch(x, features), num_tiles, shapes, embedding_dtype)
    counters, counts, embeddings = lookup.lookup_planned(s.counters, reading, x["row_ids"], s.rows, x.get("table_ids"))
    return {"counts": counts, "embeddings": embeddings}, dataclasses.replace(s, counters=counters)


def _update(s, x, tables, features, optimizer, row_gradient, rounding, num_tiles, program=(0,), num_registers=0):
    program = np.array(program, np.int32)
    step = update.Step(
        np.array(tables, np.uint32),
        x["seed"],
        x["step"],
        _batch(x, features),
        num_tiles,
        x["row_ids"],
        x["is_live"],
        update.RowStep(optimizer, x["hyper"], row_gradient, rounding, program, num_registers),
        x["table_ids"],
        x.get("num_uses"),
    )
    s, num_nonfinite, num_stale = update.update(s, step, x["gradients"])
    return {"num_nonfinite": num_nonfinite, "num_stale": num_stale}, s


def _combine_transpose(s, x, features, num_unique, num_tiles, dtype):
    names, bags = ("row_gradients", "num_uses"), _bags(x, features)
    results = combine.combine_transpose(x["gradients"], x["inverse"], bags, num_unique, num_tiles, dtype)
    return dict(zip(names, results, strict=True)), s


def _tier_bring(s, x, tables, initial, num_slots, is_number, keeps=True):
    tables = np.array(tables, np.uint32)
    moved, host, counters, brought = tier.bring(
        s.tier[0],
        s.rows,
        s.records,
        s.counters,
        tables,
        x["seed"],
        x["row_ids"],
        initial,
        num_slots,
        keeps=keeps,
        known=x.get("known"),
    )
    # The content of these rows is unspecified.
    is_used = (brought.staged_owners[:, 3] != jnp.uint32(kernel_model.NO_ROW))[:, None]
    staged = {name: getattr(brought, name) for name in STAGED}
    staged = jax.tree.map(lambda lines: jnp.where(is_used, lines, jnp.zeros_like(lines)), staged)
    owners = jnp.where(is_used, brought.staged_owners, jnp.uint32(kernel_model.NO_ROW))
    outputs = {"slots": brought.slots, **staged, "staged_owners": owners, "known": brought.known}
    return outputs, _with_tier(dataclasses.replace(s, counters=counters), moved, host, is_number)


def _tier_peek(s, x, **statics):
    return _tier_bring(s, x, **statics, keeps=False)


def _tier_give_back(s, x, is_number):
    changed = dataclasses.replace(s.tier[0], rows=x["rows"], states=x["states"])
    return {}, _with_tier(s, *tier.give_back(changed, s.rows, *(x[name] for name in STAGED)), is_number)


STAGED = ("staged_rows", "staged_states", "staged_owners")


def _tier_bring_ahead(s, x, num_slots, is_number):
    moved, host, counters, known = tier.bring_ahead(s.tier[0], s.rows, s.records, s.counters, x["row_ids"], num_slots)
    return {"known": known}, _with_tier(dataclasses.replace(s, counters=counters), moved, host, is_number)


def _tier_flush(s, x, is_number):
    (cache,) = s.tier
    host = tier.give_back(cache, s.rows, cache.rows, cache.states, cache.owners)[1]
    return {"host": _numbers_of(host, is_number)}, _with_tier(s, cache, host, is_number)


def _with_tier(s, moved, host, is_number):
    """Returns a store after a call; bytes of host memory that hold no number are zeros."""
    return dataclasses.replace(s, tier=(moved,), rows=_numbers_of(host, is_number))


def _numbers_of(host, is_number):
    return tuple(slab * jnp.array(is_number, jnp.uint8)[None, :] for slab in host)


OPS = {
    "jaxsok_table_find": _find,
    "jaxsok_table_find_or_insert": _find_or_insert,
    "jaxsok_table_gather": _gather,
    "jaxsok_table_scatter": _scatter,
    "jaxsok_table_touch": _touch,
    "jaxsok_table_rebuild": _rebuild,
    "jaxsok_table_forget": _forget,
    "jaxsok_table_wait": _wait,
    "jaxsok_evict_select": _evict_select,
    "jaxsok_evict_release": _evict_release,
    "jaxsok_plan_requests": _plan_requests,
    "jaxsok_plan_uses": _plan_uses,
    "jaxsok_combine_transpose": _combine_transpose,
    "jaxsok_lookup": _lookup,
    "jaxsok_lookup_find": _lookup_find,
    "jaxsok_lookup_planned": _lookup_planned,
    "jaxsok_update": _update,
    "jaxsok_tier_bring": _tier_bring,
    "jaxsok_tier_bring_ahead": _tier_bring_ahead,
    "jaxsok_tier_peek": _tier_peek,
    "jaxsok_tier_write": _tier_give_back,
}
JUDGED_ELSEWHERE = {
    "jaxsok_tier_read",  # the last part of bring
    "jaxsok_tier_write_ahead",  # parts of bring_ahead
    "jaxsok_tier_read_ahead",
    "jaxsok_tier_wait",  # on a CPU there is nothing to wait for: devices/test_tiers.py
    "jaxsok_lookup_frozen",  # several stores in one call: test_lookup_frozen.py
    "jaxsok_tickets_digest",  # it has no store: test_tickets.py
    "jaxsok_tickets_issue",
    "jaxsok_tickets_redeem",
    "jaxsok_window_exchange",  # all shards call it: devices/test_windows.py
    "jaxsok_window_lines",
    "jaxsok_window_meet",
    "jaxsok_window_sum",
    "jaxsok_lookup_window",
    "jaxsok_update_window",
    "jaxsok_lookup_bags_window",
    "jaxsok_update_bags_window",
}
_BY_NAME = {op.__name__[1:]: op for op in (*OPS.values(), _tier_flush)}


@functools.partial(jax.jit, static_argnums=2)
def call(state, inputs, static):
    """Makes one call of one target; returns the outputs by name, and the state after it."""
    op, attributes = static
    return _BY_NAME[op](state, inputs, **dict(attributes))


# --------------------------------------------------------------------------------------------------------------
# Runs


def on(device, tree):
    """Copies every array to a device, to which all results computed from it are committed."""
    return jax.tree.map(lambda array: jax.device_put(np.array(array), device), tree)


def flat(tree) -> dict[str, np.ndarray]:
    """Returns every array by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def _with_meaning(result: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Puts records of host memory in the order of row ids, with zeros for those without content, and for the homes."""
    names = [name for name in result if name.startswith("state.tier.0.places.")]
    if not names:
        return result
    places = np.concatenate([result[name][:, 0] for name in names])
    homes = [name.replace("places", "homes") for name in names]
    ids = np.arange(len(places), dtype=np.uint32)
    records, row_ids = (np.concatenate([result[name] for name in homes]) + ids[:, None]).T
    row_ids &= 2**31 - 1  # the other bit is a hint
    np.testing.assert_array_equal(row_ids[records], ids, err_msg="each row has a record of its own")
    ends = np.cumsum([len(result[name]) for name in names])[:-1]
    is_in_host = (places >= cases_tier.HISTORY) & (places != cases_tier.FRESH)
    for kind, has_content in (("state.rows", is_in_host), ("host", places != cases_tier.FRESH)):
        slabs = [f"{kind}.{number}" for number in range(len(names))]
        if slabs[0] in result:
            lines = np.concatenate([result[name] for name in slabs])[records] * has_content[:, None]
            result |= dict(zip(slabs, np.split(lines.astype(np.uint8), ends), strict=True))
    return result | {name: np.zeros_like(result[name]) for name in homes}


def state_arrays(state: StoreState) -> dict:
    """Returns a state in the model's form."""
    names = ("index", "counters", "table_rows", "rows", "records", "states", "sightings", "bloom", "tier")
    return {name: getattr(state, name) for name in names}


def run(script: kernel_scripts.Script, back_end: str) -> list[dict[str, np.ndarray]]:
    """Returns all outputs and states of a script, call by call.

    Calls that bring rows get the slots that the last call with the same rows returned; some those of other rows.
    """
    device = jax.devices("cpu" if back_end == "cpu" else "gpu")[0]
    tiers = tuple(tier.Tier(**arrays) for arrays in script.initial.get("tier", ()))
    state = StoreState(**on(device, script.initial | {"tier": tiers}))
    results, lists = [], {}
    for number, step in enumerate(script.steps):
        static = (step.op, tuple(sorted(step.statics.items())))
        inputs, row_ids = on(device, step.inputs), np.asarray(step.inputs.get("row_ids", ()))
        if step.op == "tier_bring":
            of_others = lists.get(row_ids.shape)
            inputs["known"] = lists.get(row_ids.tobytes(), of_others) if number % 5 else of_others
        outputs, state = call(state, inputs, static)
        if (slots := outputs.pop("known", None)) is not None:
            lists[row_ids.tobytes()] = lists[row_ids.shape] = slots
        results.append(_with_meaning(flat({**outputs, "state": state_arrays(state)})))
    return results


# --------------------------------------------------------------------------------------------------------------
# Comparisons


def entries(index: np.ndarray) -> np.ndarray:
    """Returns the entries of an index in a sorted order, since their places are unspecified."""
    lines = index.reshape(-1, 4)
    return lines[np.lexsort(lines.T)]


def comparable(result: dict[str, np.ndarray], *, probes: bool) -> dict[str, np.ndarray]:
    """Removes what may differ: the order of entries, and the longest walk if it depends on that order."""
    result = dict(result)
    for name in ("state.index", "state.sightings.0"):
        if name in result:
            result[name] = entries(result[name])
    if not probes:
        result["state.counters"] = np.delete(result["state.counters"], kernel_model.LONGEST_PROBE)
    return result


def is_float(array: np.ndarray) -> bool:
    """Returns whether an array has floats of 32 or 16 bits."""
    return array.dtype in (np.float32, kernel_model.F16, kernel_model.BF16)


def bits(array: np.ndarray) -> np.ndarray:
    """Returns floats as the words that hold them."""
    return array.view(f"u{array.dtype.itemsize}") if is_float(array) else array


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: str) -> None:
    """Checks that every array is equal in type, shape and bits."""
    assert got.keys() == want.keys(), what
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, f"{what}: {name}"
        if not np.array_equal(bits(got[name]), bits(array)):
            np.testing.assert_array_equal(got[name], array, err_msg=f"{what}: {name}")
            raise AssertionError(f"{what}: {name}: equal numbers, other bits (signed zeros or NaN)")


def walks(index: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Returns the number of buckets in the walk to each entry in use, after checking that every walk arrives."""
    num_buckets = len(index)
    lines = index.reshape(num_buckets, 4, 4)
    is_used = ~(lines[:, :, :2] == kernel_model.EMPTY).all(axis=2)
    # A walk stops at the first empty entry: none precedes a used entry in its bucket or in an earlier bucket.
    assert (is_used[:, :-1] | ~is_used[:, 1:]).all(), "an empty entry before one in use"
    num_full_before = np.zeros(num_buckets, np.int64)
    for _ in range(kernel_model.MAX_PROBES):
        is_full = is_used.all(axis=1)
        num_full_before = np.where(np.roll(is_full, 1), np.roll(num_full_before, 1) + 1, 0)
    buckets, places = np.nonzero(is_used)
    used = lines[buckets, places]
    salt = int(counters[kernel_model.SALT_LOW]) | int(counters[kernel_model.SALT_HIGH]) << 32
    homes = kernel_model.home_buckets(kernel_model.from_words(used[:, :2]), used[:, 3], salt, num_buckets).astype(
        np.int64
    )
    distance = (buckets - homes) % num_buckets
    assert (distance < kernel_model.MAX_PROBES).all(), "an entry out of reach"
    assert (num_full_before[buckets] >= distance).all(), "an entry behind an empty one"
    return distance + 1


# --------------------------------------------------------------------------------------------------------------
# Tests


CPU_DIMS = (1, 3, 33, 1024)  # on a CPU the columns of a row are one loop, on a GPU they are divided among lanes
GPU_SIZES = (31, 32, 255, 257)  # next to those of warps and blocks, which a CPU has not; it gets 33 and 256 keys


def contract_cases():
    """Makes a parameter of each case and back end; dims and sizes that only a GPU distinguishes are slow on the CPU."""
    for name in kernel_scripts.CASES:
        dim, size = re.search(r"_dims-.*dim_(\d+)", name), re.search(r"_sizes-num_keys_(\d+)", name)
        is_slow = (dim and int(dim[1]) not in CPU_DIMS) or (size and int(size[1]) in GPU_SIZES)
        yield pytest.param(name, "cpu", id=f"{name}-cpu", marks=pytest.mark.slow if is_slow else ())
        yield pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "back_end"), [*contract_cases()])
def test_contract(name, back_end):
    """Each call of a case keeps the contract (`assert_contract`)."""
    script = kernel_scripts.CASES[name]()
    has_exact_probes = back_end == "cpu" or script.has_exact_probes
    for number, (step, *results) in enumerate(
        zip(script.steps, *(run(script, back_end) for _ in range(2)), strict=True)
    ):
        what = f"call {number} of {len(script.steps)}, {step.op}"
        assert_contract(step, *results, has_exact_probes=has_exact_probes, is_cpu=back_end == "cpu", what=what)


def assert_contract(step, got, again, *, has_exact_probes, is_cpu, what):
    """Checks that every output and the whole state equal the model's bits, so CPU and CUDA are equal (law 10).

    Every walk ends at its entry within the bound; the longest is counted. A second run gives equal bits (law 3).
    """
    want = flat({**step.want, "state": step.state})
    assert_same_bits(*(comparable(result, probes=has_exact_probes) for result in (got, want)), what)
    assert_same_bits(*(comparable(result, probes=is_cpu) for result in (again, got)), f"second run: {what}")
    index, counters = got["state.index"], got["state.counters"]
    longest = max(walks(index, counters), default=0)
    assert longest <= counters[kernel_model.LONGEST_PROBE] <= kernel_model.MAX_PROBES, what
    if "state.sightings.0" in got:
        num_taken = len(walks(got["state.sightings.0"], counters))
        assert num_taken == counters[kernel_model.NUM_SIGHTINGS], what


def test_every_target_has_cases():
    """All targets are called, even in the small selection; a new target needs cases."""
    assert set(OPS) | JUDGED_ELSEWHERE == {target for target, _ in library.TARGETS}
    called = {step.op for name, build in kernel_scripts.CASES.items() if "small" in name for step in build().steps}
    assert called == set(_BY_NAME)


def test_home_bucket():
    """strategies.home_bucket, which aims keys at one place, is the hash of the index."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 1000, np.uint64)
    tables = rng.integers(0, 2**24, 1000).astype(np.uint32)
    for salt, num_buckets in ((0, 1), (2**64 - 1, 12345), (77, 2**31 - 1)):
        got = strategies.home_bucket(kernel_model.words(keys), tables, salt=salt, num_buckets=num_buckets)
        np.testing.assert_array_equal(got, kernel_model.home_buckets(keys, tables, salt, num_buckets))


some_rows = st.lists(st.one_of(st.integers(0, 29), st.just(kernel_model.NO_ROW)), min_size=12, max_size=12)
tier_calls = st.lists(st.tuples(some_rows, *[st.booleans()] * 6), min_size=1, max_size=8)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("num_slots", [0, 1, 7, 30])
@given(calls=tier_calls, seed=st.integers(0, 2**32 - 1))
def test_brought_rows_are_those_of_a_dict(back_end, num_slots, calls, seed):
    """Whatever the cache holds, a row's numbers are those last given back, for any calls (law 11)."""
    script = cases_tier.TierScript(seed=seed, slabs=(5, 25), dim=3, optimizer=kernel_model.ADAGRAD, num_slots=num_slots)
    script.begin(30)
    columns = script.store.values()
    for row_ids, is_foreseen, turns, keeps, gives_back, comes_again, flushes in calls:
        if is_foreseen:
            script.bring_ahead(row_ids)
        if turns:  # the list of slots is wrong for it
            script.bring(row_ids[::-1])
        (script.bring if keeps else script.peek)(row_ids)
        if gives_back:
            script.give_back()
        if comes_again:  # as for an update
            script.bring(row_ids)
            script.give_back()
        if flushes:
            script.flush()
    for number, (step, got) in enumerate(zip(script.steps, run(script, back_end), strict=True)):
        what = f"call {number}, {step.op}"
        assert_same_bits(got, flat({**step.want, "state": step.state}), what)
        if step.op in ("tier_bring", "tier_peek"):
            is_row = step.inputs["row_ids"] < 30
            row_ids, slots = step.inputs["row_ids"][is_row], got["slots"][is_row]
            for name, column in columns.items():
                brought = np.concatenate([got[f"state.tier.0.{name}"], got[f"staged_{name}"]])[slots]
                assert_same_bits({name: brought}, {name: column[row_ids]}, what)
        if step.op == "tier_give_back":
            given_back = flat(step.inputs)
            for name, column in columns.items():
                column[row_ids] = np.concatenate([given_back[name], given_back[f"staged_{name}"]])[slots]


def _cache_of(back_end: str, num_slots: int):
    """Returns a state, its rows in the cache and others, and calls that bring rows of a copy, ahead or not."""
    script = cases_tier.TierScript(slabs=(5, 55), dim=3, optimizer=kernel_model.ADAGRAD, num_slots=num_slots)
    script.begin(60, cached=1.0, free=0.0, fresh=0.0, ages=60)
    script.bring_ahead(script.some(np.arange(60), num_slots))
    script.bring(script.some(np.arange(60), num_slots))
    device = jax.devices("cpu" if back_end == "cpu" else "gpu")[0]
    tiers = tuple(tier.Tier(**arrays) for arrays in script.initial["tier"])
    state = StoreState(**on(device, script.initial | {"tier": tiers}))
    ahead, bring = ((step.op, tuple(sorted(step.statics.items()))) for step in script.steps[:2])
    seed = script.steps[1].inputs["seed"]

    def bring_ahead(state, row_ids):
        return call(jax.tree.map(jnp.copy, state), on(device, {"row_ids": row_ids}), ahead)

    def bring_rows(state, row_ids, known=None):
        inputs = on(device, {"row_ids": row_ids, "seed": seed})
        return call(jax.tree.map(jnp.copy, state), {**inputs, "known": known}, bring)

    is_here = np.concatenate(state.tier[0].places)[:, 0] < cases_tier.HISTORY
    here, away = (np.flatnonzero(rows).astype(np.uint32) for rows in (is_here, ~is_here))
    return state, here, away, bring_ahead, bring_rows


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_list_of_slots_of_another_branch(back_end):
    """Two branches foresee rows in the same call: the list of the one names some of those of the other, not all."""
    state, _, away, bring_ahead, bring_rows = _cache_of(back_end, 12)
    few, more = np.r_[away[:3], [away[2]] * 9], np.r_[away[:6], [away[2]] * 6]
    known = bring_ahead(state, few)[0]["known"]
    _, other = bring_ahead(state, more)
    with_list, without = bring_rows(other, few, known), bring_rows(other, few)
    got, want = ({"slots": out["slots"], "state": state_arrays(after)} for out, after in (with_list, without))
    assert_same_bits(flat(got), flat(want), "bring")
    # All slots can be taken.
    assert sorted(np.asarray(bring_rows(with_list[1], away[6:18])[0]["slots"])) == list(range(12))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_list_of_slots_spares_the_search(back_end):
    """With a list that holds, the places of rows are not read: wrong ones are not noticed."""
    state, here, _, _, bring_rows = _cache_of(back_end, 12)
    want, state = bring_rows(state, here)
    places = tuple(jnp.full_like(slab, cases_tier.IN_HOST) for slab in state.tier[0].places)
    broken = dataclasses.replace(state, tier=(dataclasses.replace(state.tier[0], places=places),))
    got, _ = bring_rows(broken, here, want["known"])
    assert np.array_equal(got["slots"], want["slots"])


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_rebuild_under_a_salt_that_aims(back_end):
    """300 keys have one home under the new salt: 256 are found, the rest counted; a better salt finds all."""
    script = kernel_scripts.Script(slabs=(5, 395), num_buckets=512, salt=1)
    aimed = script.keys_of_homes([9], 300)
    script.store = kernel_model.Store(slabs=(5, 395), num_buckets=512, salt=2)
    script.fill(aimed)
    script.find(aimed)
    script.rebuild(512, salt=1)
    script.find(aimed)  # the model's row ids are those of the records
    script.rebuild(512, salt=2)
    script.find(aimed)
    before, bad, found, _, again = run(script, back_end)
    assert bad["state.counters"][kernel_model.NUM_UNPLACED] == 300 - 256
    assert bad["state.counters"][kernel_model.LONGEST_PROBE] == kernel_model.MAX_PROBES
    is_found = found["row_ids"] != kernel_model.NO_ROW
    assert is_found.sum() == 256
    np.testing.assert_array_equal(found["row_ids"][is_found], before["row_ids"][is_found])
    np.testing.assert_array_equal(again["row_ids"], before["row_ids"])
    assert again["state.counters"][kernel_model.NUM_UNPLACED] == 0


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_rebuild_into_too_few_buckets(back_end):
    """As many rows as entries are found, the others are counted; the longest walk belongs to a row that was found."""
    script = kernel_scripts.Script(slabs=(5, 307), num_buckets=64)
    script.fill(np.arange(33))
    script.find(np.arange(33))
    script.rebuild(2)
    script.find(np.arange(33))
    before, small, found = run(script, back_end)
    is_found = found["row_ids"] != kernel_model.NO_ROW
    assert is_found.sum() == 8
    np.testing.assert_array_equal(found["row_ids"][is_found], before["row_ids"][is_found])
    assert small["state.counters"][kernel_model.NUM_UNPLACED] == 33 - 8
    assert small["state.counters"][kernel_model.LONGEST_PROBE] <= 2


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((60, 60, 60, 60), r"got 4 arrays, wanted one for each of 6 features, or one for several"),
        ((120, 121), r"got 121 lines, wanted 3 equal parts"),
        ((), r"got 0 arrays, wanted one for each of 6 features"),
    ],
)
def test_arrays_that_features_cannot_share(back_end, sizes, message):
    """Embeddings and gradients must come in equal parts, each for the same number of features."""
    script = kernel_scripts.CASES["small_planned_tables-dim_4"]()
    lookup_step, update_step = script.steps
    lookup_step.statics["shapes"] = tuple((size, 4) for size in sizes)
    update_step.inputs["gradients"] = [np.zeros((size, 4), np.float32) for size in sizes]
    for step, name in ((lookup_step, "embeddings"), (update_step, "gradients")):
        script.steps = [step]
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}: {message}"):
            run(script, back_end)


# --------------------------------------------------------------------------------------------------------------
# The model against the oracle: two independently written meanings agree.

COMBINERS = {kernel_model.NONE: None, kernel_model.SUM: "sum", kernel_model.MEAN: "mean", kernel_model.SQRTN: "sqrtn"}
OPTIMIZERS = {
    kernel_model.SGD: oracle.Sgd(),
    kernel_model.ADAGRAD: oracle.Adagrad(eps=1e-3),
    kernel_model.ROWWISE_ADAGRAD: oracle.RowwiseAdagrad(eps=1e-3),
    kernel_model.ADAM: oracle.Adam(0.9, 0.99, 1e-3),
}
ROW_GRADIENTS = ("sum", "mean", "sqrt")
MEANT = ("bags_", "batch_few_rows_left", "batch_kinds", "batch_dims-dim_12", "small_batch", "small_update", "table_")
# The oracle has no index, so it has no keys without an entry.
NOT_MEANT = ("table_crowded_index", "table_aimed", "table_large", "small_batch_refusing-crowded")


def factors_of(batch: kernel_model.Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns the oracle's factor of each position, and which bags' divisors are zero: their keys are not used."""
    factors, is_used = np.zeros(len(batch.keys)), np.full(len(batch.keys), True)
    for f, feature in enumerate(batch.features):
        weights = np.ones(feature.num_keys) if feature.weights is None else feature.weights.astype(np.float64)
        bounds, start = feature.bounds(), batch.starts[f]
        for first, last in itertools.pairwise(bounds):
            keys, bag = feature.keys[first:last].tolist(), slice(start + first, start + last)
            combiner, weighted = COMBINERS[feature.combiner], feature.weights is not None
            factors[bag] = oracle.bag_factors(keys, weights[first:last].tolist(), combiner, weighted)
            is_used[bag] = combiner not in ("mean", "sqrtn") or factors[bag].any()
    return factors, is_used


@pytest.mark.parametrize(
    "name", [n for n in kernel_scripts.CASES if n.startswith(MEANT) and not n.startswith(NOT_MEANT)]
)
def test_the_model_agrees_with_the_oracle(name):
    """Row ids and counts are equal; embeddings and steps within the rounding of float32 sums of 1,100 such terms."""
    script = kernel_scripts.CASES[name]()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    judge = store_of(script.store, script.initial) if name.startswith("table_") else None
    for number, step in enumerate(script.steps):
        what = f"call {number}, {step.op}"
        if judge is not None and step.op in ("find", "find_or_insert"):
            assert_table_agrees(step, judge, what)
        if judge is not None and step.op == "evict_release":
            assert_release_agrees(step, judge, what)
        if step.op == "lookup":
            batch, values = step.meaning["batch"], step.meaning["values"].astype(np.float64)
            factors, _ = factors_of(batch)
            for f, feature in enumerate(batch.features):
                want = np.zeros((feature.num_bags, script.store.dim))
                part, bags = batch.part(f), feature.bags()
                np.add.at(want, bags[bags >= 0], (factors[part, None] * values[part])[bags >= 0])
                close(step.want["embeddings"][f], want, err_msg=f"{what}: feature {f}")
        if step.op == "update":
            assert_update_agrees(step, script.store, close)


def store_of(store: kernel_model.Store, state: dict) -> oracle.StoreOracle:
    """Returns the oracle of a store in this state; its rows are not read."""
    tables = {t: oracle.TableOracle(str(t), lambda key: np.zeros(1)) for t in range(store.num_tables)}
    judge = oracle.StoreOracle(1, oracle.Sgd(), 1.0, store.capacity, tables)
    records = np.concatenate(state["records"])
    judge.num_allocated = int(state["counters"][kernel_model.NUM_ALLOCATED])
    for row_id, record in enumerate(records[: judge.num_allocated]):
        key = int(kernel_model.from_words(record[None, :2])[0])
        assert key != kernel_model.PADDING_KEY  # no script starts with freed rows
        tables[int(record[2])].row_ids[key] = row_id
        judge.rows[row_id], judge.states[row_id] = np.zeros(1), []
    return judge


def assert_table_agrees(step: kernel_scripts.Step, judge: oracle.StoreOracle, what: str) -> None:
    """Compares find or find_or_insert, key by key."""
    keys, tables = kernel_model.from_words(step.inputs["keys"]).tolist(), step.inputs["table_ids"].tolist()
    pairs = [(t, key) for t, key in zip(tables, keys, strict=True)]
    is_real = [key != kernel_model.PADDING_KEY and t in judge.tables for t, key in pairs]
    row_ids, counts = [], np.zeros((len(judge.tables), len(oracle.COUNTS)), np.int32)
    for (t, key), real in zip(pairs, is_real, strict=True):
        row_id, outcome = None, "padding"
        if real and step.op == "find":
            row_id = judge.find(t, key)
        elif real:
            row_id, outcome = judge.find_or_insert(t, key)
        row_ids.append(kernel_model.NO_ROW if row_id is None else row_id)
        if t in judge.tables:
            counts[t, oracle.COUNTS.index(f"num_{outcome}")] += 1
    np.testing.assert_array_equal(step.want["row_ids"], row_ids, err_msg=what)
    if step.op == "find_or_insert":
        np.testing.assert_array_equal(step.want["counts"][:, : len(oracle.COUNTS)], counts, err_msg=what)


def assert_release_agrees(step: kernel_scripts.Step, judge: oracle.StoreOracle, what: str) -> None:
    """Compares the erased keys, whose rows are flagged, and their number by table."""
    flags = step.inputs["flags"]
    num_erased = [
        judge.erase(t, [key for key, row_id in judge.tables[t].row_ids.items() if flags[row_id]]) for t in judge.tables
    ]
    np.testing.assert_array_equal(step.want["num_released"], num_erased, err_msg=what)


def assert_update_agrees(step, store, close):
    """Compares one update of the model with the oracle's optimizers."""
    batch, (rows, states) = step.meaning["batch"], step.meaning["before"]
    judge = oracle.StoreOracle(
        store.dim,
        OPTIMIZERS[store.optimizer],
        step.meaning["learning_rate"],
        store.capacity,
        {},
        ROW_GRADIENTS[step.statics["row_gradient"]],
        dict(enumerate(rows.astype(np.float64))),
        {row_id: [state[row_id].astype(np.float64) for state in states] for row_id in range(store.capacity)},
    )
    (factors, is_used), row_ids = factors_of(batch), step.inputs["row_ids"]
    sums, num_uses = np.zeros((store.capacity, store.dim)), np.zeros(store.capacity, np.int64)
    for f, feature in enumerate(batch.features):
        if not step.inputs["is_live"][feature.plan]:
            continue
        part = batch.part(f)
        uses = np.flatnonzero(batch.is_asked[part] & (row_ids[part] < store.capacity) & is_used[part])
        gradients = step.inputs["gradients"][f][feature.bags()[uses]].astype(np.float64)
        np.add.at(sums, row_ids[part][uses], factors[part][uses, None] * gradients)
        np.add.at(num_uses, row_ids[part][uses], 1)
    num_nonfinite = sum(
        not judge.apply(row_id, sums[row_id], int(num_uses[row_id]), 1) for row_id in np.flatnonzero(num_uses).tolist()
    )
    assert num_nonfinite == step.want["num_nonfinite"].sum()
    close(np.concatenate(step.state["rows"]), np.stack([judge.rows[r] for r in range(store.capacity)]))
    for k, state in enumerate(step.state["states"]):
        close(np.concatenate(state), np.stack([judge.states[r][k] for r in range(store.capacity)]))
