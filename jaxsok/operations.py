"""Operations on one table of a state, as plain functions, and the checks of what callers pass.

The name of a table is resolved to a `TableRef`. Between steps an operation is a program of its own, which donates the
store that it changes; inside a jitted step it is a part of that program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from jaxsok import (
    checks,
    coming,
    evict as evict_lib,
    grow as grow_lib,
    guards,
    keys as keys_lib,
    plan as plan_lib,
    policies,
    processes,
    table as table_lib,
)
from jaxsok.caches import CacheStats
from jaxsok.checks import not_none
from jaxsok.features import Batch, Features
from jaxsok.growth import GrowthTracker, keys_at_most, keys_of_total
from jaxsok.interrupts import Held
from jaxsok.kernels import table as kernels
from jaxsok.records import convert_to
from jaxsok.shards import Shards
from jaxsok.specs import FeatureSpec, StoreSpec, TableRef, TableSpec
from jaxsok.store import State, StoreState
from jaxsok.types import COUNTS, NO_ROW, PADDING_KEY, RowDtype

_INSERTED, _REFUSED = COUNTS.index("num_inserted"), COUNTS.index("num_refused")
_OPS_WITH_LOOKUPS_AHEAD = frozenset(
    "lookup update discard gradient_norm grow drain num_rows cache_stats memory_estimate".split()
)


class Declared(Protocol):
    """The parts of a collection that these functions read."""

    shards: Shards
    tables: tuple[TableSpec, ...]
    stores: tuple[StoreSpec, ...]
    features: tuple[FeatureSpec, ...]
    fingerprint: str
    growth: GrowthTracker


# Calls of Collection -------------------------------------------------------------------------------------------------


def on_keys(op: str, collection: Declared, state: State, table: str, keys: Any) -> Any:
    """Does `Collection.erase`, `contains` or `rows_of`, by its name."""
    body = {"erase": _erase, "contains": _contains, "rows_of": _rows_of}[op]
    found = resolve(op, collection, state, table)
    state, words = guards.refuse_transforms(op, state=state, keys=_words(op, keys))
    return _run(body, found, state, words, is_write=op == "erase")


def assign(
    collection: Declared, state: State, table: str, keys: Any, rows: Any, clock: Any
) -> tuple[State, UInt32[Array, ""], UInt32[Array, ""]]:
    """Sets rows; see `Collection.assign`."""
    found, words = resolve("assign", collection, state, table), _words("assign", keys)
    keys_lib.require_unmasked("assign", {"rows": rows})
    rows = rows if isinstance(rows, jax.Array) else np.array(rows)  # a copy, as of `_words`
    wanted = (words.shape[0], found.spec.dim)
    if not jnp.issubdtype(rows.dtype, jnp.floating) or rows.shape != wanted:
        raise ValueError(f"assign: rows: got {rows.dtype}{list(rows.shape)}, wanted floats{list(wanted)}.")
    if rows.dtype != jnp.dtype(found.spec.dtype):
        is_host = isinstance(rows, np.ndarray)
        rows = convert_to("assign: rows", rows, np.dtype(np.float32)) if is_host else rows.astype(np.float32)
    now = clock_of("assign", clock)
    now = state.step if now is None else now
    if _is_traced((state, words)):
        collection.growth.record_assign(found.store, words.shape[0])
    else:
        collection.growth.forget()  # its bound on the rows in use holds only for steps
    state, words, rows, now = guards.refuse_transforms("assign", state=state, keys=words, rows=rows, clock=now)
    state, (num_inserted, num_refused) = _run(_assign, found, state, words, rows, now, is_write=True)
    return state, num_inserted, num_refused


def clear(collection: Declared, state: State, table: str) -> tuple[State, UInt32[Array, ""]]:
    """Clears tables; see `Collection.clear`."""
    found = resolve("clear", collection, state, table)
    (state,) = guards.refuse_transforms("clear", state=state)
    return _run(_clear, found, state, is_write=True)


def evict(
    collection: Declared,
    state: State,
    table: str | None,
    policy: policies.Eviction | None,
    num_rows: Any,
    clock: Any,
    hand_over: evict_lib.HandOver | None,
) -> tuple[State, evict_lib.Evicted]:
    """Evicts rows; see `Collection.evict`."""
    check_state("evict", collection, state)
    leaving = _choose_leaving(collection, table, policy, num_rows)
    now = clock_of("evict", clock)
    num_rows = None if num_rows is None else _word("evict: num_rows", num_rows)
    if hand_over is not None:
        evict_lib.check_hand_over("evict", hand_over)
        if _is_traced((state, now, num_rows)):
            raise TypeError(
                "evict: hand_over: got one under a trace (jax.jit, shard_map), wanted None there: rows are read by "
                "the host. Call evict between steps."
            )
        check_placed("evict", collection, state)
    (state,) = guards.refuse_transforms("evict", state=state)
    if collection.shards.num_processes > 1 and not _is_traced((state, now, num_rows)):
        given = {
            "table": table,
            "policy": policy,
            "num_rows": num_rows,
            "clock": now,
            "hand_over": hand_over is not None,
        }
        processes.require_same("evict", [f"{name}: {value}" for name, value in given.items()])
    now = state.step if now is None else now
    budgets = {} if num_rows is None else dict.fromkeys(leaving, num_rows)
    flags = evict_lib.choose("evict", leaving, state.stores, state.seed, now, budgets, hand_over)
    stores, by_store = evict_lib.release(leaving, state.stores, flags)
    counts = {
        spec.name: count
        for s, by_table in by_store.items()
        for spec, count in zip(collection.stores[s].tables, by_table, strict=True)
    }
    names, none = tuple(spec.name for spec in collection.tables), jnp.zeros((), jnp.uint32)
    evicted = jnp.stack([counts.get(name, none) for name in names])
    return dataclasses.replace(state, stores=stores), evict_lib.Evicted(evicted, names)


def grow(
    collection: Declared, state: State, batch: Any, steps: int, clock: Any, hand_over: evict_lib.HandOver | None
) -> State:
    """Makes room for the keys that are coming; see `Collection.grow`."""
    check_placed("grow", collection, state)
    steps = checks.integer("grow: steps", steps, 1)
    now = clock_of("grow", clock)
    evict_lib.check_hand_over("grow", hand_over)
    own = collection.growth.extrapolate(steps) if batch is None else coming_of(collection, batch, steps)
    if state.awaits_grow and not state.ahead:
        state = dataclasses.replace(state, awaits_grow=False)
    following = following_of(collection, state, batch) if state.looks_ahead else ()
    if batch is None and not following and not any(own.positions):
        collection.growth.warn_once(
            "batch",
            "grow: batch: got none, and no batch was packed or looked up yet, so that nothing is known of the keys "
            "that are coming; tables may refuse some of them. Pass what the next step looks up: "
            "collection.grow(state, batch).",
            stacklevel=4,  # the caller of Collection.grow, behind its annotation
        )
    held, num_in_flight = Held(state), len(state.ahead)
    make_room = functools.partial(grow_lib.grow, collection.growth, held, steps=steps, clock=now)
    with held.kept_on_errors("grow: the state was donated: it has lost rows or grown."):
        if not (following and num_in_flight):
            make_room(own, hand_over=hand_over, untaken=None if num_in_flight else own)
        if following:
            num_given = len(batch) if isinstance(batch, (list, tuple)) else 1
            own = with_following(collection, batch, steps, own, following, num_in_flight)
            num_taken = max(0, num_in_flight - num_given)
            untaken = coming_of(collection, list(following[num_taken:]), 1)
            is_missed = num_in_flight != num_given + num_taken
            try:
                make_room(own, is_ahead=True, untaken=untaken, is_missed=is_missed)
            except MemoryError:  # there is room for this step; without lookups ahead the next one would raise
                held.state = held.state.drain_for_grow()
    return held.state


def num_rows(collection: Declared, state: State) -> dict[str, int]:
    """Counts rows; see `Collection.num_rows`."""
    check_state("num_rows", collection, state)
    check_untraced("num_rows", state, "inside a jitted function use the Stats of update")
    in_use = {}
    for spec, store in zip(collection.stores, state.stores, strict=True):
        # int64: all shards together may have more than 2**31 rows.
        by_shard = collection.shards.read(store.table_rows).astype(np.int64).reshape(spec.num_shards, len(spec.tables))
        by_table = by_shard[0] if spec.is_replicated else by_shard.sum(axis=0)
        in_use |= {table.name: int(rows) for table, rows in zip(spec.tables, by_table, strict=True)}
    return in_use


def cache_stats(collection: Declared, state: State) -> tuple[CacheStats, ...]:
    """Reads the caches' counts; see `Collection.cache_stats`."""
    check_state("cache_stats", collection, state)
    check_untraced("cache_stats", state)
    in_use, shards, found = num_rows(collection, state), collection.shards, []
    for spec, store in zip(collection.stores, state.stores, strict=True):
        for tier in store.tier:
            names = tuple(table.name for table in spec.tables)
            found.append(
                CacheStats(
                    tables=names,
                    num_rows=sum(in_use[name] for name in names),
                    num_slots=tier.rows.shape[0] if spec.num_slots else 0,
                    num_cached=int(shards.read(_num_cached(shards, tier.last_use)).sum(dtype=np.int64)),
                    record_bytes=store.rows[0].shape[-1],
                    words=tuple(map(tuple, shards.read(tier.counters).reshape(spec.num_shards, -1).tolist())),
                )
            )
    return tuple(found)


@functools.partial(jax.jit, static_argnums=0)
def _num_cached(shards: Shards, last_use: UInt32[Array, " num_lines"]) -> UInt32[Array, " num_shards"]:
    count = lambda part: (part != 0).sum(dtype=jnp.uint32, keepdims=True)  # noqa: E731
    return shards.run(count, (last_use,), (shards.spec,), shards.spec)


def coming_of(collection: Declared, batch: Any, steps: int) -> coming.Coming:
    """Reads the batches that a caller of `grow` announces; refuses `steps` that contradict them."""
    is_list, growth = isinstance(batch, (list, tuple)), collection.growth
    positions, uncounted = [0] * len(collection.stores), [0] * len(collection.stores)
    counted, num_steps = [], 0
    for given in batch if is_list else (batch,):
        features = _features_of(given)
        num_stacked = 0
        if isinstance(features, Features):
            check_features("grow", collection, features)
            num_stacked = coming.num_stacked(features)
            keys = [
                max(1, num_stacked) * keys_at_most(spec, [(layout.table, layout.num_keys) for layout in part.layouts])
                for spec, part in zip(collection.stores, features.stores, strict=True)
            ]
            counted.append(features)
        elif checks.is_integer(features, 0):
            total = int(features)
            if collection.shards.num_processes > 1:
                total = processes.greatest("grow", total)
            keys = [keys_of_total(spec, total) for spec in collection.stores]
        else:
            got = repr(given) if isinstance(given, (int, float)) else type(given).__name__
            raise TypeError(
                f"grow: batch: got {got}, wanted a Batch, its Features, a Plan, a number of keys, or a list of "
                "these; pack raw features first: batch = collection.batch(raw)."
            )
        is_single = not is_list and num_stacked == 0
        if not is_single and steps not in (1, max(1, num_stacked)):
            raise ValueError(
                f"grow: steps: got {steps} with {'a list of' if is_list else 'several stacked'} batches, wanted "
                "none: the batches say how many steps come."
            )
        times = steps if is_single else 1
        num_steps += max(times, num_stacked)
        for s, num_keys in enumerate(keys):
            positions[s] += times * num_keys
            uncounted[s] += (times - isinstance(features, Features)) * num_keys
    for s, num_assigned in enumerate(growth.assigned_per_step):
        positions[s] += num_steps * num_assigned
        uncounted[s] += num_steps * num_assigned
    return coming.Coming(positions, tuple(counted), uncounted)


def following_of(collection: Declared, state: State, batch: Any) -> tuple[Features, ...]:
    """Returns the batches after those that `grow` takes, some of which their step looks up ahead."""
    last = batch[-1] if isinstance(batch, (list, tuple)) and batch else batch
    features = _features_of(last)
    noted = collection.growth.following
    for handed_out, following in noted:
        if handed_out() is features:
            return following
    if isinstance(last, plan_lib.Plan) and _is_one_batch(features):
        return tuple(plan.features for plan in last.following)
    # A batch of which the caller made other arrays, as by jax.tree.map, counts as the one that was handed out last. If
    # no lookup is in flight, a loop over a pipeline must go on, and its batches be stacked in the same way.
    following = noted[-1][1] if noted else ()
    if state.ahead or not following:
        return following
    is_alike = not isinstance(features, Features) or coming.num_stacked(features) == coming.num_stacked(following[0])
    return following if is_alike and collection.growth.loops else ()


def with_following(
    collection: Declared, batch: Any, steps: int, own: coming.Coming, following: Sequence[Features], num_in_flight: int
) -> coming.Coming:
    """Adds the following batches to the needs of those that `grow` takes (`own`), which may be in flight."""
    given = batch if isinstance(batch, (list, tuple)) else [batch]
    if steps == 1 and all(_is_one_batch(_features_of(each)) for each in given):
        known = coming_of(collection, [*given, *following][num_in_flight:], 1)
        num_unknown = len(given) - len(following)
    else:
        known = own.plus(coming_of(collection, list(following), 1))
        num_unknown = steps - len(following) - num_in_flight
    if num_unknown <= 0:
        return known
    # Rows may leave only when all steps of the next call have run, of which not all batches are known.
    last = coming_of(collection, list(following[-1:]), 1).positions
    evicts = [spec.tables[0].eviction is not None for spec in collection.stores]
    positions = [num_unknown * num_keys * is_evicting for num_keys, is_evicting in zip(last, evicts, strict=True)]
    return known.plus(coming.Coming(positions, (), positions))


def _features_of(given: Any) -> Any:
    return given.features if isinstance(given, (Batch, plan_lib.Plan)) else given


def _is_one_batch(features: Any) -> bool:
    return isinstance(features, Features) and not coming.num_stacked(features)


# On every shard ------------------------------------------------------------------------------------------------------


Body = Callable[..., Any]
"""A function for one shard: `body(table, store, (seed, partition_owners), *args)`. Results are the same on all shards;
a writing body returns the store before them."""


def _run(body: Body, table: TableRef, state: State, *args: Any, is_write: bool = False) -> Any:
    """Runs a body on every shard's part of a table's store; returns its results, after the state if it writes."""
    operands = (state.stores[table.store], (state.seed, state.partition_owners), *args)
    # Under a trace there is nothing to donate: the enclosing program decides.
    if table.shards.sees_parts() and (table.shards.is_mesh or _is_traced(operands)):
        results = _run_on_shards(body, is_write, table, *jax.tree.map(jnp.asarray, operands))
    else:
        results = (_writing if is_write else _reading)(body, is_write, table, *operands)
    if not is_write:
        return results
    (new, results), s = results, table.store
    return dataclasses.replace(state, stores=(*state.stores[:s], new, *state.stores[s + 1 :])), results


def _run_on_shards(body: Body, is_write: bool, table: TableRef, *operands: Any) -> Any:
    split = table.shards.spec
    in_specs = (split, *[P()] * (len(operands) - 1))
    return table.shards.run(functools.partial(body, table), operands, in_specs, (split, P()) if is_write else P())


_reading = jax.jit(_run_on_shards, static_argnums=(0, 1, 2))
_writing = jax.jit(_run_on_shards, static_argnums=(0, 1, 2), donate_argnums=3)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _erase(table: TableRef, store: StoreState, _: Any, words: Array) -> tuple[StoreState, Array]:
    return table_lib.erase(table.spec, store, words, jnp.asarray(table.ids(len(words))), table.shards)


def _contains(table: TableRef, store: StoreState, _: Any, words: Array) -> Array:
    row_ids = kernels.find(store.index, store.counters, words, jnp.asarray(table.ids(len(words))))
    return table.total((row_ids != jnp.uint32(NO_ROW)).astype(jnp.uint32)) > 0


def _rows_of(table: TableRef, store: StoreState, state_words: Any, words: Array) -> tuple[Array, Array]:
    spec, (seed, _) = table.spec, state_words
    num_keys = len(words)
    row_ids = table_lib.find(store, words, table.ids(num_keys))
    is_there = row_ids != jnp.uint32(NO_ROW)
    requests = jnp.concatenate([words, jnp.asarray(table.ids(num_keys))[:, None], jnp.ones_like(words[:, :1])], axis=1)
    _, rows, _ = table_lib.gather(spec, store, seed, requests, row_ids, is_find=True, dtype=spec.dtype)
    # All shards but one have zeros, so the sum of the words has the bits of the row.
    bits = lax.bitcast_convert_type(rows, jnp.uint32 if spec.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
    bits = table.total(jnp.where(is_there[:, None], bits, jnp.uint32(0)))
    rows = lax.bitcast_convert_type(bits if spec.itemsize == 4 else bits.astype(jnp.uint16), rows.dtype)
    return rows, table.total(is_there.astype(jnp.uint32)) > 0


def _assign(
    table: TableRef, store: StoreState, state_words: Any, words: Array, rows: Array, clock: Array
) -> tuple[StoreState, tuple[Array, Array]]:
    spec, (seed, partition_owners) = table.spec, state_words
    if spec.num_shards > 1 and not spec.is_replicated:
        owners = plan_lib.owner_of(spec, table.number, words, partition_owners)
        is_own = owners == table.shards.index().astype(jnp.uint32)
        words = jnp.where(is_own[:, None], words, jnp.uint32(PADDING_KEY & 0xFFFFFFFF))
    store, _, counts = table_lib.assign(spec, store, seed, clock, words, table.ids(len(words)), rows, {})
    counts = counts[table.number].astype(jnp.uint32)
    return store, (table.total(counts[_INSERTED]), table.total(counts[_REFUSED]))


def _clear(table: TableRef, store: StoreState, _: Any) -> tuple[StoreState, Array]:
    return table_lib.clear(table.spec, store, table.number, table.shards)


def _choose_leaving(
    collection: Declared, table: str | None, policy: Any, num_rows: Any
) -> dict[int, evict_lib.Leaving]:
    """Chooses the rows that may leave, by store number; refuses arguments that contradict each other."""
    stores = collection.stores
    if policy is not None and (not isinstance(policy, policies.Eviction) or type(policy) is policies.Eviction):
        raise TypeError(f"evict: policy: got {policy!r}, wanted None or one of jaxsok.policies that evicts.")
    if table is None:
        numbers = {s: None for s, spec in enumerate(stores) if policy or spec.tables[0].eviction}
    else:
        found = locate("evict", collection, table)
        numbers = {found.store: found.number} if policy or found.spec.tables[0].eviction else {}
    if not numbers:
        whose = "every table" if table is None else f'table "{table}"'
        raise ValueError(
            f"evict: policy: got None, and {whose} was declared without one; pass a policy, or declare "
            "TableSpec(..., eviction=policies.LeastRecentlyUsed())."
        )
    rules = {s: not_none(policy or stores[s].tables[0].eviction) for s in numbers}
    ranking = [rule for rule in rules.values() if rule.has_score]
    if ranking and num_rows is None:
        raise ValueError(f"evict: num_rows: got None with {ranking[0]!r}, wanted how many rows may stay.")
    if not ranking and num_rows is not None:
        rule = next(iter(rules.values()))
        raise ValueError(
            f"evict: num_rows: got {num_rows!r} with {rule!r}, wanted None: it takes the rows whose time has come, "
            "however many."
        )
    return {s: evict_lib.Leaving(stores[s], rules[s], number, collection.shards) for s, number in numbers.items()}


# Parts of a state ----------------------------------------------------------------------------------------------------


def specs_of(shards: Shards, state: State) -> Any:
    """Returns the partition of each array of a state, as `shard_map` takes it."""
    same = dict.fromkeys(("step", "seed", "partition_owners", "lineage", "num_refused"), P())
    return dataclasses.replace(state, stores=shards.spec, tickets=shards.spec, ahead=shards.spec, **same)


def lineage_of(shards: Shards, words: np.ndarray) -> Array:
    """Puts a lineage on the devices; by a program, since NumPy's memory is not donated."""
    return shards.make(jnp.array, operands=(words,), is_split=False)


def is_deleted(array: Any) -> bool:
    """Returns whether an array was donated or deleted."""
    # NumPy's arrays and shapes cannot be; the method of a traced array raises.
    return hasattr(array, "is_deleted") and not isinstance(array, jax.core.Tracer) and array.is_deleted()


# Checks --------------------------------------------------------------------------------------------------------------


_ROW_DTYPES = {name: jnp.dtype(name) for name in get_args(RowDtype)}


def check_state(op: str, collection: Declared, state: State) -> None:
    """Refuses a state that another collection made, or whose arrays are deleted."""
    if not isinstance(state, State):
        raise TypeError(f"{op}: state: got {type(state).__name__}, wanted the State that Collection.init made.")
    if state.mesh != str(collection.shards):
        raise ValueError(
            f"{op}: state: got one made for {place_of(state.mesh)}, wanted one for {place_of(str(collection.shards))}; "
            "use the collection that made it."
        )
    if state.fingerprint != collection.fingerprint:
        dims = [(store.tier[0].rows if store.tier else store.rows[0]).shape[-1] for store in state.stores]
        own = [spec.dim for spec in collection.stores]
        differ = f"fingerprint {state.fingerprint}), wanted {collection.fingerprint}"
        if dims != own:
            differ = f"dims {dims} by store), wanted {own}"
        raise ValueError(
            f"{op}: state: got one of other specs ({differ}; use the collection that made it, or declare the same "
            "tables."
        )
    if any(store.counters.ndim != 1 for store in state.stores):
        remedy = "collection.unstack(state)" if collection.shards.is_mesh else "one of its parts"
        raise ValueError(
            f"{op}: state: got one whose arrays have one more axis in front, as stack and jax.pmap give them, "
            f"wanted those of init; pass {remedy}."
        )
    # Asking a deleted array whether it is ready ends the process (jaxlib 0.10.2). A step donates all arrays of a
    # state, and growing the index, so it is enough to check these two of each store.
    if any(is_deleted(array) for store in state.stores for array in (store.counters, store.index)):
        raise ValueError(
            f"{op}: state: got one whose arrays are deleted: it was donated to a step, or consumed by grow, assign, "
            "erase, clear, evict or an import; wanted the one that this call returned, as in state = "
            "collection.grow(state, batch)."
        )

    for spec, store in zip(collection.stores, state.stores, strict=True):
        if store.tier:
            rows, states = store.tier[0].rows, store.tier[0].states[:1]  # who casts one, casts all
        else:
            rows, states = store.rows[0], store.states[0][:1] if store.states else ()
        if rows.dtype != _ROW_DTYPES[spec.dtype] or (states and states[0].dtype != _ROW_DTYPES["float32"]):
            got, wanted = [str(array.dtype) for array in (rows, *states)], [spec.dtype, "float32"][: 1 + len(states)]
            raise ValueError(
                f"{op}: state: got rows and optimizer state of dtypes {got}, wanted {wanted}; cast the parameters of "
                "the model alone (of Flax's NNX nnx.state(model, nnx.Param)), not its tables."
            )
    if state.ahead and op not in _OPS_WITH_LOOKUPS_AHEAD:
        raise ValueError(
            f"{op}: state: got one with {len(state.ahead)} lookups in flight, whose batches are counted in it, but "
            "have not been stepped; wanted one without. Call state = collection.drain(state) before the step (of d "
            "lookups in flight the last d steps) after which you need it."
        )


def check_untraced(op: str, state: State, remedy: str = "call it between steps") -> None:
    """Refuses a traced state, for operations that run on the host."""
    if any(isinstance(store.counters, jax.core.Tracer) for store in state.stores):
        raise TypeError(
            f"{op}: state: got one that is traced (in jax.jit, lax.scan or shard_map), wanted arrays, because {op} "
            f"runs on the host; {remedy}."
        )


def check_placed(op: str, collection: Declared, state: State, if_traced: str = "call it between steps") -> None:
    """Does `check_state`; refuses also a state that is traced, of NumPy arrays, or not split over the shards."""
    check_state(op, collection, state)
    check_untraced(op, state, if_traced)
    counters = [store.counters for store in state.stores]
    remedy = (
        "put it back with jax.device_put(copy, jax.tree.map(lambda leaf: leaf.sharding, state)), of the state that was "
        "copied."
    )
    if any(isinstance(array, np.ndarray) for array in (state.seed, *counters)):
        raise TypeError(
            f"{op}: state: got one of NumPy arrays, as jax.device_get gives it, wanted arrays of JAX; {remedy}"
        )
    num_shards = collection.shards.num_shards
    if any(array.sharding.shard_shape(array.shape)[0] * num_shards != array.size for array in counters):
        raise ValueError(
            f"{op}: state: got one whose arrays are whole on a device, as pickle and jnp.asarray put them, wanted "
            f"a part of each on each of {num_shards} shards; {remedy}"
        )


def check_features(op: str, collection: Declared, features: Features) -> None:
    """Refuses features that another collection packed."""
    if not isinstance(features, Features):
        raise TypeError(
            f"{op}: features: got {type(features).__name__}, wanted Features; make them with "
            "collection.batch(raw).features."
        )
    num_parts = collection.shards.num_shards
    if features.num_parts != num_parts:
        raise ValueError(
            f"{op}: features: got those packed for {features.num_parts} shards, wanted {num_parts} "
            f"({place_of(str(collection.shards))}); make them with this collection's batch."
        )
    if features.fingerprint != collection.fingerprint:
        raise ValueError(
            f"{op}: features: got those of a collection with other specs; make them with this one's batch."
        )
    # By name: table, combiner, and whether it has weights.
    got = {
        layout.name: (store.tables[layout.table].name, layout.combiner, layout.weights_start >= 0)
        for store, of_store in zip(collection.stores, features.stores, strict=False)
        for layout in of_store.layouts
    }
    wanted = {spec.name: (spec.table, spec.combiner, spec.weighted) for spec in collection.features}
    if len(features.stores) != len(collection.stores) or got != wanted:
        raise ValueError(
            f"{op}: features: got those of a collection with other features (table, combiner and whether with weights: "
            f"{got}), wanted {wanted}; make them with this one's batch."
        )


def resolve(op: str, collection: Declared, state: State, table: str) -> TableRef:
    """Checks a state, and finds a table by its name."""
    check_state(op, collection, state)
    return locate(op, collection, table)


def locate(op: str, collection: Declared, table: str) -> TableRef:
    """Finds a table by its name; refuses unknown names."""
    for s, store in enumerate(collection.stores):
        names = [spec.name for spec in store.tables]
        if table in names:
            return TableRef(store, s, names.index(table), collection.shards)
    raise ValueError(f"{op}: table: got {table!r}, wanted one of {[spec.name for spec in collection.tables]}.")


def _words(op: str, keys: Any) -> Any:
    words = keys_lib.words_of(keys, "int64", op)
    if words.ndim != 2:
        raise ValueError(f"{op}: keys: got shape {list(words.shape[:-1])}, wanted [num_keys].")
    # A copy: programs on a CPU read NumPy arrays where they lie, and the caller may fill them again before that.
    return words.copy() if isinstance(words, np.ndarray) else words


def clock_of(op: str, clock: Any) -> UInt32[Array, ""] | None:
    """Converts a user's clock to a uint32 scalar; None stays None. Errors (TypeError, ValueError) name `op`."""
    return None if clock is None else _word(f"{op}: clock", clock)


def _word(what: str, value: Any) -> Any:
    """Converts to a uint32 scalar; `what` names the operation and its argument."""
    if isinstance(value, (jax.Array, np.ndarray)):
        if value.shape != () or value.dtype != np.uint32:
            got = f"{value.dtype}{list(value.shape)}"
            raise TypeError(f"{what}: got {got}, wanted an integer of Python or a uint32 scalar, as np.uint32 makes.")
        return jnp.asarray(value)
    return jnp.uint32(checks.integer(what, value, 0, 2**32 - 1, "0 to 2**32 - 1", "an integer or a uint32 scalar"))


def place_of(mesh_name: str) -> str:
    """Names a state's devices for messages."""
    return f"the mesh axes {mesh_name}" if mesh_name else "one device"
