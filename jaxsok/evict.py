"""Eviction: rows leave by policy, ranked exactly over a whole shard, between steps.

A policy (policies.py) gives each row a score, or marks it as expired; XLA computes that slab by slab, at 4 to 8 bytes a
row (1 where rows expire). Two kernels do the rest: `select` finds the rows of lowest (score, table, key) down to a
budget, `release` takes them away as erase does. Between the two the host may read the rows that leave, in chunks.

Called by `Collection.evict`, and by `grow` for a store that is full at its maximum.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, UInt8, UInt32

from jaxsok import annotations, processes, table as table_lib
from jaxsok.kernels import evict as kernels
from jaxsok.policies import Eviction, RowFacts
from jaxsok.records import Records
from jaxsok.rows import RowLines, RowSlab, numbers_in_host_memory, slabs_of
from jaxsok.shards import ONE_DEVICE, Shards, parts_of, read_on_host, without_mesh
from jaxsok.specs import StoreSpec
from jaxsok.store import StoreState, host_row_bytes, row_bytes
from jaxsok.table_export import fetch, gather_rows, places_of, to_records
from jaxsok.types import Clock, RowFlags, Seed

CHUNK_BYTES = 32 << 20  # rows handed over at a time: bounds host memory
READ_ROWS = 1 << 16  # rows in host memory that a policy reads at a time

HandOver = Callable[[str, Records], None]
"""A function that takes some rows of a table, by its name, before they go."""


def check_hand_over(op: str, given: Any) -> None:
    """Refuses what is not a function, before the first rows go."""
    if given is not None and not callable(given):
        raise TypeError(f"{op}: hand_over: got {given!r}, wanted a function of a table's name and Records.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evicted:
    """The number of rows that an eviction took away, by table, summed over the shards.

    Example:
      >>> Evicted(jnp.array([3, 0], jnp.uint32), ("user", "item")).to_dict()
      {'user': 3, 'item': 0}
    """

    num_evicted: UInt32[Array, " num_tables"]
    """Rows of each table, in the order of `tables`."""
    tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def to_dict(self) -> dict[str, int]:
        """Returns the counts by table as Python integers (waits for the device)."""
        return {table: int(count) for table, count in zip(self.tables, np.asarray(self.num_evicted), strict=True)}


@dataclasses.dataclass(frozen=True)
class Leaving:
    """The rows that may leave one store, and the rule: hashable, a program is compiled for each."""

    spec: StoreSpec
    policy: Eviction
    number: int | None = None
    """The number of a table in the store; None: all its tables."""
    shards: Shards = ONE_DEVICE
    is_shared: bool = True
    """True if `num_rows` is a budget of all shards together, not of each."""

    def __post_init__(self) -> None:
        names = [self.spec.tables[self.number]] if self.number is not None else self.spec.tables
        if self.policy.needs_statistics and not self.spec.keeps_statistics:
            raise ValueError(
                f"evict: policy: got {self.policy!r} for tables {[table.name for table in names]} that keep no "
                "statistics; declare TableSpec(..., statistics=True), or an eviction that needs them."
            )


# On one shard --------------------------------------------------------------------------------------------------------


@annotations.annotate_store
def _select_part(
    leaving: Leaving, store: StoreState, is_used: Array | None, seed: Seed, clock: Clock, num_kept: UInt32[Array, ""]
) -> tuple[RowFlags, UInt32[Array, " num_tables"]]:
    """Selects the rows that leave, and counts those that the policy chose by table; changes nothing.

    `num_kept` rows may stay, of one table or of all; a policy without a score ignores it. Rows with `is_used`, which
    the coming batch asks for, get no flag even if too few others leave. They are still counted.
    """
    spec, policy, shards, number = leaving.spec, leaving.policy, leaving.shards, leaving.number
    if policy.has_score and leaving.is_shared and shards.is_mesh and not spec.is_replicated:
        mine = store.table_rows if number is None else store.table_rows[number]
        num_kept = share_of(shards, num_kept, mine.sum(dtype=jnp.uint32))
    judge = policy.scores if policy.has_score else policy.expired
    scores: list[list[Array]] = []
    mask: list[Array] = []
    for slab in slabs_of(spec, store, seed):
        num_rows, start = slab.size, slab.start
        stays = None if is_used is None else is_used[start : start + num_rows]
        judged = _judge(
            slab, clock, lambda facts: policy.check_judged("evict: policy", judge(facts), facts.keys.shape[0])
        )
        if policy.has_score:
            words = _score_above_others(stays, judged)
            scores = scores or [[] for _ in words]
            for array, word in zip(scores, words, strict=True):
                array.append(word)
        else:
            mask += judged
    table = kernels.ALL_TABLES if number is None or len(spec.tables) == 1 else number
    flags, num_selected = kernels.select(num_kept, store.records, scores, mask, len(spec.tables), table)
    return flags if is_used is None else jnp.where(is_used, jnp.uint8(0), flags), num_selected


def _judge(slab: RowSlab, clock: Clock, judge: Callable[[RowFacts], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Runs a policy on every row of a slab."""
    statistics = jnp.zeros((slab.size, 2), jnp.uint32) if slab.statistics is None else slab.statistics

    def facts_of(records: Array, statistics: Array, rows: Any) -> RowFacts:
        return RowFacts(records[:, :2], statistics[:, 0], statistics[:, 1], rows, clock)

    if not slab.store.tier:
        return judge(facts_of(slab.records, statistics, slab.rows))
    like = jax.ShapeDtypeStruct((slab.size, slab.spec.dim), slab.spec.dtype)
    closed, forms = jax.make_jaxpr(lambda rows: judge(facts_of(slab.records, statistics, rows)), return_shape=True)(
        like
    )
    (rows,) = closed.jaxpr.invars
    if not any(rows is used for equation in closed.jaxpr.eqns for used in equation.invars):
        return judge(facts_of(slab.records, statistics, jnp.zeros(like.shape, like.dtype)))
    size = min(slab.size, READ_ROWS)

    def judge_some(i: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        start = jnp.minimum(i * size, slab.size - size)  # the last ones begin where they still fit
        records, seen = (lax.dynamic_slice_in_dim(array, start, size) for array in (slab.records, statistics))
        row_ids = (slab.start + start + jnp.arange(size, dtype=jnp.int32)).astype(jnp.uint32)
        rows, _ = numbers_in_host_memory(slab.spec, slab.store, jnp.asarray(slab.seed), row_ids)
        words = judge(facts_of(records, seen, rows))
        return tuple(
            lax.dynamic_update_slice_in_dim(array, word, start, 0) for array, word in zip(done, words, strict=True)
        )

    none = tuple(jnp.zeros_like(slab.records[:, 0], dtype=form.dtype) for form in forms)
    return lax.fori_loop(0, -(-slab.size // size), judge_some, none)


def _score_above_others(stays: Bool[Array, " _"] | None, words: tuple[Array, ...]) -> tuple[Array, ...]:
    """Changes scores so that the rows that stay are the last to leave."""
    if stays is None:
        return words
    if len(words) == 1:  # the kernel takes two words at most: this order is exact, that of two words only nearly
        return stays.astype(jnp.uint32), *words
    return tuple(jnp.where(stays, jnp.uint32(0xFFFFFFFF), word) for word in words)


def share_of(shards: Shards, num_rows: UInt32[Array, ""], mine: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """Returns how many rows (of `mine`) this shard may keep: shards with 2, 9, 9 and a budget of 13 keep 2, 5, 6."""
    num_shards = shards.num_shards
    rows = lax.psum(jnp.zeros(num_shards, jnp.uint32).at[shards.index()].set(mine), shards.axis)
    order = jnp.argsort(rows, stable=True)

    def give(left: Array, taken: tuple[Array, Array]) -> tuple[Array, Array]:
        has, num_left = taken
        share = jnp.minimum(has, left // num_left)
        return left - share, share

    _, shares = lax.scan(give, num_rows, (rows[order], jnp.arange(num_shards, 0, -1, dtype=jnp.uint32)))
    return jnp.zeros(num_shards, jnp.uint32).at[order].set(shares)[shards.index()]


# On whole stores -----------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _select(
    leaving: Leaving, store: StoreState, seed: Array, clock: Array, num_rows: Array, is_used: Array | None
) -> tuple[Array, Array]:
    """Returns flags for all shards, and by shard and table how many rows the policy chose."""
    split = leaving.shards.spec
    args = (store, is_used, seed, clock, num_rows)
    return leaving.shards.run(functools.partial(_select_part, leaving), args, (split, split, P(), P(), P()), split)


# One program for all stores: if it cannot be made, no store has changed.
@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _release(
    leaving: tuple[Leaving, ...], stores: tuple[StoreState, ...], flags: tuple[Array, ...]
) -> tuple[tuple[StoreState, Array], ...]:
    released = []
    for rule, store, of_store in zip(leaving, stores, flags, strict=True):
        split = rule.shards.spec
        part = functools.partial(table_lib.release, rule.spec, shards=rule.shards, is_eviction=True)
        released.append(rule.shards.run(part, (store, of_store), (split, split), (split, P())))
    return tuple(released)


def choose(
    op: str,
    leaving: Mapping[int, Leaving],
    stores: Sequence[StoreState],
    seed: Seed,
    clock: Any,
    num_rows: Mapping[int, Any],
    hand_over: HandOver | None = None,
    is_used: Mapping[int, Array] | None = None,
) -> tuple[RowFlags, ...]:
    """Marks the rows that leave the stores named in `leaving`, for `release`; `hand_over` gets them, on the host.

    `num_rows` may stay in each store; a policy without a score ignores it. Rows with `is_used` stay.
    """
    used = is_used or {}
    flags = []
    with jax.transfer_guard("allow"):  # of these scalars
        clock = jnp.asarray(clock, jnp.uint32)
        for s, rule in leaving.items():
            num_kept = jnp.asarray(num_rows.get(s, 0), jnp.uint32)
            flags.append(_select(rule, stores[s], seed, clock, num_kept, used.get(s))[0])
    if hand_over is not None:
        is_shared = any(rule.shards.num_processes > 1 for rule in leaving.values())
        with processes.fail_together(op, is_shared=is_shared):  # before any of them releases rows
            for (s, rule), of_store in zip(leaving.items(), flags, strict=True):
                for name, records in selected_records(rule.spec, stores[s], seed, of_store):
                    hand_over(name, records)
    return tuple(flags)


def release(
    leaving: Mapping[int, Leaving], stores: Sequence[StoreState], flags: tuple[RowFlags, ...]
) -> tuple[tuple[StoreState, ...], dict[int, UInt32[Array, " num_tables"]]]:
    """Takes the marked rows out; returns all stores, and the rows that went by store and table.

    The stores named in `leaving` are donated.
    """
    results = _release(tuple(leaving.values()), tuple(stores[s] for s in leaving), flags)
    new, counts = list(stores), {}
    for s, (store, num_evicted) in zip(leaving, results, strict=True):
        new[s], counts[s] = store, num_evicted
    return tuple(new), counts


# Leaving rows, on the host -------------------------------------------------------------------------------------------


def selected_records(spec: StoreSpec, store: StoreState, seed: Seed, flags: RowFlags) -> Iterator[tuple[str, Records]]:
    """Yields the rows with a flag in chunks by table, each process those of its own shards; replicated rows once."""
    names = [declared.name for declared in spec.state_specs]
    # A power of two, or a whole slab.
    line_bytes = row_bytes(spec) + host_row_bytes(spec)
    most = 1 << max(0, (CHUNK_BYTES // line_bytes).bit_length() - 1)

    def gather() -> Iterator[tuple[None, RowLines, slice]]:
        for shard, (of_shard, shard_flags) in parts_of((store, flags), spec.num_shards, is_once=True):
            if shard != 0 and spec.is_replicated:
                continue
            for slab in slabs_of(spec, of_shard, read_on_host(seed)):
                marks = _pack_flags(shard_flags, np.int32(slab.start), slab.size)
                for places in places_of(marks, slab.size, min(slab.size, most)):
                    yield None, gather_rows(slab, places, min(slab.size, most)), slice(0, len(places))

    for _, lines in fetch(gather()):
        records = to_records(lines, names)
        for number in np.unique(lines.records[:, 2]).tolist():
            is_mine = lines.records[:, 2] == number
            yield spec.tables[number].name, records if is_mine.all() else records.take(is_mine)


@without_mesh
@functools.partial(jax.jit, static_argnums=2)
def _pack_flags(flags: RowFlags, start: Array, size: int) -> UInt8[Array, " _"]:
    return jnp.packbits(lax.dynamic_slice_in_dim(flags, start, size) != 0)
