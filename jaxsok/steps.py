"""The parts of a training step on a whole state: plan, lookup, find, update and gradient norm, store by store.

`Steps` runs each on every shard. Where the caller sees parts of arrays already (on one device, inside of `shard_map`)
that is a plain call; elsewhere it is a program over the mesh. strategy.py handles one store.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok import lookup as lookup_lib, stats as stats_lib, tickets, tiers
from jaxsok.checks import not_none
from jaxsok.coming import num_stacked
from jaxsok.features import NO_FEATURES, Features
from jaxsok.gradients import Gradients, Used
from jaxsok.kernels.tickets import Ticket
from jaxsok.lookup import Embeddings
from jaxsok.operations import specs_of
from jaxsok.plan import Found, InFlight, Loads, Plan
from jaxsok.shards import MeshShards, Shards
from jaxsok.specs import StoreSpec
from jaxsok.stats import Stats
from jaxsok.store import State
from jaxsok.strategy import Strategy
from jaxsok.types import COUNTERS, COUNTS, ENTRIES_PER_BUCKET, Clock, Digest
from jaxsok.update import StepInputs


@dataclasses.dataclass(frozen=True)
class Steps:
    """The parts of a step, for the stores of one collection; hashable, since programs are compiled for it."""

    stores: tuple[StoreSpec, ...]
    tables: tuple[tuple[str, int], ...]
    """The name of each table, and the number of its store."""
    strategy: Strategy

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.stores, self.tables, self.strategy))

    def __hash__(self) -> int:
        """Hashes the declarations once: each call of a jitted function hashes its static arguments."""
        return self._hash

    @property
    def shards(self) -> Shards:
        """The shards that run the steps."""
        return self.strategy.shards

    def plan(self, features: Features, send_capacities: tuple[int, ...] | None) -> Plan:
        """Makes the keys of a batch distinct and orders them by owner or sends them, on several shards."""
        return self.strategy.plan(self.stores, features, send_capacities)

    def lookup(self, state: State, plan: Plan, clock: Clock | None) -> tuple[Embeddings, State, Plan]:
        """Looks up a batch, or takes its lookup in flight out of the state, then the following batches."""
        lands_exact = bool(state.ahead) and state.ahead[0].embeddings is None
        embeddings, state, plan = self._land(state, plan) if state.ahead else self._look_up(state, plan, clock)[:3]
        following_plans = plan.following[len(state.ahead) :] if state.looks_ahead else ()
        if lands_exact and (plan.staleness or not following_plans):
            state = dataclasses.replace(state, stores=tuple(map(tiers.finish_moves, state.stores)))
        for following in following_plans:
            if plan.staleness:
                values, state, done, digests = self._look_up(state, following, None)
                in_flight = InFlight(not_none(done.found), not_none(done.ticket), digests, following.form(), values)
            else:
                state, in_flight = self._index(state, following, _step_after(state, plan.updates_before))
            state = dataclasses.replace(state, ahead=(*state.ahead, in_flight))
        if following_plans and any(store.tier for store in state.stores):
            stores, embeddings = tiers.begin_after_moves(state.stores, embeddings)
            state = dataclasses.replace(state, stores=tuple(stores))
        return embeddings, state, plan

    def _look_up(
        self, state: State, plan: Plan, clock: Clock | None
    ) -> tuple[Embeddings, State, Plan, tuple[Digest, ...]]:
        embeddings: Embeddings = {}
        stores, found, asked, digests = list(state.stores), [], [], []
        now = state.step if clock is None else clock
        for s, (spec, features) in enumerate(zip(self.stores, plan.features.stores, strict=True)):
            if not features.layouts:
                found.append(lookup_lib.find_nothing(spec))
                asked.append(None if plan.asked is None else plan.asked[s])
                continue
            reader = self.strategy.reader(spec, s, state, plan, state.step, now)
            stores[s], of_store, values, digest = reader.lookup(state.stores[s])
            found.append(of_store)
            asked.append(reader.asked)
            digests.append(digest)
            embeddings |= lookup_lib.by_name(features, values)
        after, ticket = tickets.issue(state, stores, plan.features, digests)
        state = dataclasses.replace(state, stores=tuple(stores), tickets=after)
        sent = tuple(asked) if self.shards.num_shards > 1 else None
        plan = dataclasses.replace(plan, asked=sent, found=tuple(found), ticket=ticket)
        return embeddings, state, plan, tuple(digests)

    def _index(self, state: State, plan: Plan, step: Clock) -> tuple[State, InFlight]:
        """Does the part of a lookup that reads no row's numbers, as of a step that is to come."""
        stores, found, digests = list(state.stores), [], []
        for s, (spec, features) in enumerate(zip(self.stores, plan.features.stores, strict=True)):
            if not features.layouts:
                found.append(lookup_lib.find_nothing(spec))
                stores[s] = tiers.finish_moves(stores[s])
                continue
            reader = self.strategy.reader(spec, s, state, plan, step, step)
            stores[s], of_store = reader.index(state.stores[s])
            stores[s], slots = tiers.bring_rows_ahead(spec, stores[s], of_store.row_ids)
            found.append(dataclasses.replace(of_store, slots=slots))
            digests.append(reader.digest())
        after, ticket = tickets.issue(state, stores, plan.features, digests)
        state = dataclasses.replace(state, stores=tuple(stores), tickets=after)
        return state, InFlight(tuple(found), ticket, tuple(digests), plan.form())

    def _read(self, state: State, plan: Plan) -> tuple[Embeddings, State, Plan]:
        """Does the rest of a lookup: reads and combines the rows that a plan has found."""
        stores, found = list(state.stores), list(not_none(plan.found))
        embeddings: Embeddings = {}
        for s, (spec, features) in enumerate(zip(self.stores, plan.features.stores, strict=True)):
            if features.layouts:
                reader = self.strategy.reader(spec, s, state, plan, state.step, state.step)  # it inserts nothing more
                stores[s], found[s], values = reader.read(state.stores[s], found[s])
                embeddings |= lookup_lib.by_name(features, values)
        state = dataclasses.replace(state, stores=tuple(stores))
        return embeddings, state, dataclasses.replace(plan, found=tuple(found))

    def _land(self, state: State, plan: Plan) -> tuple[Embeddings, State, Plan]:
        """Takes the oldest lookup out of those in flight; an exact one reads its rows now, after all updates."""
        in_flight, *ahead = state.ahead
        if plan.form() != in_flight.form:
            raise ValueError(
                f"lookup: features: got {plan.features!r}, wanted the batch in flight, which has another size; go on "
                "with the pipeline that looked it up, or call drain before its last step."
            )
        state = dataclasses.replace(state, ahead=tuple(ahead))
        plan = dataclasses.replace(plan, found=in_flight.found, ticket=_ticket_for(plan, in_flight))
        if in_flight.embeddings is None:
            return self._read(state, plan)
        return in_flight.embeddings, state, plan

    def find(self, state: State, plan: Plan) -> tuple[Embeddings, Stats]:
        """Looks up a batch and changes nothing; keys without a row read what their table's `unknown` says."""
        embeddings: Embeddings = {}
        found = []
        for s, (spec, features) in enumerate(zip(self.stores, plan.features.stores, strict=True)):
            if not features.layouts:
                found.append(lookup_lib.find_nothing(spec))
                continue
            of_store, values = self.strategy.reader(spec, s, state, plan).find(state.stores[s])
            found.append(of_store)
            embeddings |= lookup_lib.by_name(features, values)
        nonfinite = [jnp.zeros(len(store.tables), jnp.int32) for store in self.stores]
        none = jnp.zeros((), jnp.int32)
        return embeddings, self._stats(state, [found], nonfinite, none, none)

    def update(
        self, state: State, plans: Sequence[Plan], gradients: Sequence[Gradients], learning_rate: Any
    ) -> tuple[State, Stats]:
        """Steps every row that the plans used, once, and advances the step."""
        after, is_live, num_misused = tickets.redeem(state, plans)
        stores, nonfinite = [], []
        num_stale = jnp.zeros((), jnp.int32)
        for s, (spec, store) in enumerate(zip(self.stores, state.stores, strict=True)):
            # Optimizer state that belongs to no row, as a count of steps, advances even if no row is used.
            inputs, globals_ = StepInputs.of(spec, store.globals_, state.seed, state.step, learning_rate)
            used = _select_used(s, plans, gradients, is_live)
            if used is None:
                stores.append(dataclasses.replace(store, globals_=globals_))
                nonfinite.append(jnp.zeros(len(spec.tables), jnp.int32))
                continue
            store, num_nonfinite, num_stale_uses = self.strategy.update(spec, s, state, used, inputs)
            stores.append(dataclasses.replace(store, globals_=globals_))
            nonfinite.append(num_nonfinite)
            num_stale = num_stale + num_stale_uses
        step = _step_after(state, 1)
        state = dataclasses.replace(state.end_step(), stores=tuple(stores), step=step, tickets=after)
        found = [not_none(plan.found) for plan in plans]
        stats = self._stats(state, found, nonfinite, num_stale, num_misused)
        # `grow` reads the state, and warns even if the caller ignores Stats.
        refused = (stats.num_refused - stats.num_unadmitted).astype(jnp.uint32)
        return dataclasses.replace(state, num_refused=state.num_refused + refused), stats

    def gradient_norm(self, state: State, plans: Sequence[Plan], gradients: Sequence[Gradients]) -> Float32[Array, ""]:
        """Returns the norm of all row gradients that `update` would step by."""
        _, is_live, _ = tickets.redeem(state, plans)
        squares = jnp.float32(0)
        for s, spec in enumerate(self.stores):
            used = _select_used(s, plans, gradients, is_live)
            if used is not None:
                squares = self.strategy.add_squares(spec, s, state, used, squares)
        return self.strategy.norm(squares)

    def _stats(
        self,
        state: State,
        found: Sequence[Sequence[Found]],
        nonfinite: Sequence[Array],
        num_stale: Int32[Array, ""],
        num_misused_plans: Int32[Array, ""],
    ) -> Stats:
        """Counts a step: this shard's counts, added to those of the others."""
        num_shards = self.shards.num_shards
        # The words are summed over shards, so only the first adds numbers that are the same everywhere.
        place = 0 if num_shards == 1 else self.shards.index()
        is_first = place == 0
        is_own = [is_first | (not spec.is_replicated) for spec in self.stores]
        word = {name: i for i, name in enumerate(COUNTERS)}
        counters = jnp.stack([store.counters for store in state.stores]).astype(jnp.int32)
        rounds = jnp.stack([jnp.concatenate([store.num_rounds for store in plan]) for plan in found]).max(axis=0)
        evicted = [
            store.table_evicted[0] if store.table_evicted else jnp.zeros(len(spec.tables), jnp.uint32)
            for spec, store in zip(self.stores, state.stores, strict=True)
        ]

        def join_own(values: Sequence[Array]) -> Array:
            parts = zip(is_own, values, strict=True)
            return jnp.concatenate([jnp.where(own, value.astype(jnp.int32), 0) for own, value in parts])

        is_own_line = (jnp.arange(num_shards, dtype=jnp.int32) == place)[:, None]
        longest = jnp.where(is_own_line, counters[None, :, word["longest_probe"]], 0)
        words = stats_lib.pack_words(
            counts=sum(jnp.concatenate([store.counts for store in plan]) for plan in found),
            num_nonfinite=jnp.concatenate(list(nonfinite)),
            num_rows=join_own([self._rows_so_far(state, s) for s in range(len(self.stores))]),
            num_evicted=join_own(evicted),
            num_unplaced=join_own([line[word["num_unplaced"]][None] for line in counters]),
            num_rounds=jnp.where(is_first, rounds, 0),
            num_stale=num_stale,
            num_misused_plans=jnp.where(is_first, num_misused_plans, 0),
            longest_probe=longest,
        )
        # Rows for different keys, on all shards; a shard sees its part of the state.
        num_copies = [1 if spec.is_replicated else spec.num_shards for spec in self.stores]
        capacities = [store.capacity * copies for store, copies in zip(state.stores, num_copies, strict=True)]
        entries = [
            rows * ENTRIES_PER_BUCKET * store.index.shape[0] // store.capacity
            for rows, store in zip(capacities, state.stores, strict=True)
        ]
        stores = tuple(s for _, s in self.tables)
        return Stats(
            self.strategy.sum(words, state.step),
            tables=tuple(name for name, _ in self.tables),
            capacities=tuple(capacities[s] for s in stores),
            stores=stores,
            entries=tuple(entries[s] for s in stores),
            num_shards=num_shards,
        )

    def _rows_so_far(self, state: State, s: int) -> Array:
        """Returns this shard's rows of a store by table, without those that lookups in flight have inserted."""
        num_rows = state.stores[s].table_rows.astype(jnp.int32)
        for in_flight in state.ahead:
            num_rows = num_rows - in_flight.found[s].counts[:, COUNTS.index("num_inserted")]
        return num_rows

    def call(self, name: str, *args: Any) -> Any:
        """Calls one of the methods above on every shard."""
        # `find` leaves the lines of cached rows unwritten, where `jax.debug_nans` would find NaNs. Of a program it
        # looks at the results alone.
        has_unwritten_lines = name == "find" and any(store.tier for store in args[0].stores)
        if self.shards.sees_parts() and not has_unwritten_lines:
            return getattr(self, name)(*args)
        if name == "plan":
            features, send_capacities = args
            # The features do not pass through the program: its results would be copies.
            plan, _ = _plan_on_shards(self, features, send_capacities, False)
            return dataclasses.replace(plan, features=features)
        return _run_on_shards(self, name, *args)

    def plan_with_loads(self, features: Features, send_capacities: tuple[int, ...]) -> tuple[Plan, Loads]:
        """Plans on a mesh; also returns the load of each store that has features, where the host reads it cheaply."""
        plan, loads = _plan_on_shards(self, features, send_capacities, True)
        return dataclasses.replace(plan, features=features), loads


def _step_after(state: State, num_updates: int) -> UInt32[Array, ""]:
    """Returns the step after some updates. It stops at its maximum: after a wrap, new rows would seem the oldest."""
    return jnp.maximum(state.step, state.step + jnp.uint32(num_updates))


def _ticket_for(plan: Plan, in_flight: InFlight) -> Ticket:
    """Returns the ticket of a lookup in flight for the plan of its batch; for others one that no lookup opened."""
    is_same = [(a == b).all() for a, b in zip(plan.digests(), in_flight.digests, strict=True)]
    return jnp.where(jnp.stack(is_same).all(), in_flight.ticket, ~in_flight.ticket)


def _select_used(s: int, plans: Sequence[Plan], gradients: Sequence[Gradients], is_live: Array) -> Used | None:
    """Selects the plans that use a store; None if there are none."""
    numbers = [i for i, plan in enumerate(plans) if plan.features.stores[s].layouts]
    if not numbers:
        return None
    some_live = is_live if len(numbers) == len(plans) else is_live[np.array(numbers)]
    return Used([plans[i] for i in numbers], [gradients[i] for i in numbers], some_live)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_on_shards(steps: Steps, name: str, state: State, *args: Any) -> Any:
    split, same, of_state = steps.shards.spec, P(), specs_of(steps.shards, state)
    updated = dataclasses.replace(of_state, drains=state.end_step().drains)
    in_specs, out_specs = {
        "lookup": ((split, same), (split, of_state, split)),
        "find": ((split,), (split, same)),
        "update": ((split, split, same), (updated, same)),
        "gradient_norm": ((split, split), same),
    }[name]
    return steps.shards.run(getattr(steps, name), (state, *args), (of_state, *in_specs), out_specs)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _plan_on_shards(
    steps: Steps, features: Features, send_capacities: tuple[int, ...] | None, with_loads: bool
) -> tuple[Plan, Loads]:
    """Returns a plan without its features, and its loads if asked; on GPUs they lie in pinned memory of the host.

    A copy that the host asks for costs the thread that dispatches 0.2 ms (docs/results/many_gpus.md). Stacked batches
    get stacked plans, and the largest load of them all.
    """
    is_stacked = num_stacked(features) > 0
    split = steps.shards.stacked_spec if is_stacked else steps.shards.spec

    def plan_part(part: Features) -> Plan:
        return dataclasses.replace(steps.plan(part, send_capacities), features=NO_FEATURES)

    plan_parts = functools.partial(lax.map, plan_part) if is_stacked else plan_part
    plan = steps.shards.run(plan_parts, (features,), (split,), split)
    if not with_loads:
        return plan, ()
    assert isinstance(steps.shards, MeshShards)
    loads = tuple(asked and asked.load for asked in not_none(plan.asked))
    if is_stacked:
        loads = jax.tree.map(lambda load: load.max(axis=0), loads)
    # A copy to the host ends a CUDA graph, so it comes last.
    loads, _ = lax.optimization_barrier((loads, plan))
    return plan, steps.shards.to_host(loads)
