"""A step on one store: fused calls on one shard, the exchange on several (decision 0014).

A shard calls these on its part of states, batches and plans. steps.py loops over the stores.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from jaxsok import annotations, exchange as exchange_lib, lookup, norms, partial_bags, plan as plan_lib, update
from jaxsok.checks import not_none
from jaxsok.exchange import Exchange
from jaxsok.features import Features, StoreFeatures
from jaxsok.gradients import Used
from jaxsok.norms import Squares
from jaxsok.plan import Plan, Requests, Uses
from jaxsok.shards import Shards
from jaxsok.specs import ExchangeSpec, StoreSpec
from jaxsok.store import State, StoreState
from jaxsok.types import ByTable, Clock
from jaxsok.windows import windows_of


@dataclasses.dataclass(frozen=True)
class Fused:
    """The execution mode of one shard: every store costs one call, which is faster than the exchange."""

    shards: Shards
    wire: ClassVar[str] = ""
    """The name of the wire between shards; empty where nothing travels."""

    def plan(self, specs: Sequence[StoreSpec], features: Features, send_capacities: Sequence[int] | None) -> Plan:
        """Requests the keys of a batch from their owners, with send capacities at once; here there are no others."""
        return Plan(features)

    def reader(
        self, spec: StoreSpec, s: int, state: State, plan: Plan, step: Clock | None = None, clock: Clock | None = None
    ) -> lookup.Here:
        """Returns the reader of a batch for a store that has features; without a step it changes nothing."""
        return lookup.Here(spec, plan.features.stores[s], state.seed, step, clock)

    def update(
        self, spec: StoreSpec, s: int, state: State, used: Used, inputs: update.StepInputs
    ) -> tuple[StoreState, ByTable, Int32[Array, ""]]:
        """Steps the rows that were used; also counts rows with non-finite gradients, and uses of stale plans."""
        return update.update_here(spec, state.stores[s], s, used, inputs)

    def add_squares(self, spec: StoreSpec, s: int, state: State, used: Used, squares: Squares) -> Squares:
        """Adds the squares of the row gradients by which `update` would step."""
        return norms.with_squares(squares, norms.row_gradients_here(spec, state.stores[s], s, used))

    def norm(self, squares: Squares) -> Float32[Array, ""]:
        """Returns the norm over all shards."""
        # On a mesh of one device the sum marks the norm as the same everywhere.
        return jnp.sqrt(norms.sum_over_shards(self.shards, squares) if self.shards.is_mesh else squares)

    def sum(self, words: Int32[Array, " _"], same: Array) -> Int32[Array, " _"]:
        """Returns the sum of the words of all shards, which is the same everywhere, as `same` is."""
        return self.shards.sum(words)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The execution mode of several shards: distinct keys go to their owners, rows come back, gradients follow.

    Its methods are those of `Fused`.
    """

    shards: Shards
    exchange: Exchange

    @property
    def wire(self) -> str:
        return "dense" if self.exchange.windows is None else "window"

    def plan(self, specs: Sequence[StoreSpec], features: Features, send_capacities: Sequence[int] | None) -> Plan:
        owners = self._after_meeting(jnp.asarray(plan_lib.default_owners(self.shards.num_shards)))
        sizes = send_capacities or (None,) * len(specs)
        asked = [
            self._ask(spec, part, owners, size) if part.layouts else None
            for spec, part, size in zip(specs, features.stores, sizes, strict=True)
        ]
        return Plan(features, asked=tuple(asked))

    def _after_meeting(self, words: UInt32[Array, " _"]) -> UInt32[Array, " _"]:
        """Returns the words, which are known once the threads of all devices have met, if there are windows.

        Calls that exchange wait for the meeting by themselves. What reads these words does so too, and so the rest of a
        program is one CUDA graph.
        """
        if self.exchange.windows is None:
            return words
        met = self.exchange.windows.meeting(words)
        return jnp.minimum(words, jnp.maximum(met, jnp.uint32(0xFFFFFFFF)))

    def reader(
        self, spec: StoreSpec, s: int, state: State, plan: Plan, step: Clock | None = None, clock: Clock | None = None
    ) -> lookup.Here | lookup.Owner:
        features = plan.features.stores[s]
        if spec.is_replicated and step is None:  # all rows are here
            return lookup.Here(spec, features, state.seed, step, clock)
        kind = partial_bags.BagsOwner if spec.sends_bags else lookup.Owner
        of_batch = spec, features, self._after_meeting(state.seed), step, clock
        return kind(*of_batch, self._asked(spec, s, state, plan), self.exchange)

    def _ask(
        self, spec: StoreSpec, features: StoreFeatures, owners: Array, send_capacity: int | None = None
    ) -> Requests | Uses:
        ask = partial_bags.ask if spec.sends_bags else exchange_lib.ask
        return ask(self.exchange, spec, features, owners, send_capacity)

    @annotations.annotate_store
    def _asked(self, spec: StoreSpec, s: int, state: State, plan: Plan) -> Requests | Uses:
        """Returns what was sent when the batch was planned, or sends it now."""
        features = plan.features.stores[s]
        if plan.asked is None:
            return self._ask(spec, features, self._after_meeting(state.partition_owners))
        asked = not_none(plan.asked[s])
        if isinstance(asked, Uses) != spec.sends_bags:
            form, other = ("bags", "rows") if spec.sends_bags else ("rows", "bags")
            names = [layout.name for layout in features.layouts]
            raise ValueError(
                f'lookup: plan: got one in which features {names} exchange "{other}", wanted "{form}", as this '
                "collection declares; plan with the collection that looks up."
            )
        return asked

    def update(
        self, spec: StoreSpec, s: int, state: State, used: Used, inputs: update.StepInputs
    ) -> tuple[StoreState, ByTable, Int32[Array, ""]]:
        form = partial_bags if spec.sends_bags else update
        return form.update_exchanged(self.exchange, spec, state.stores[s], s, used, inputs)

    def add_squares(self, spec: StoreSpec, s: int, state: State, used: Used, squares: Squares) -> Squares:
        if spec.sends_bags:
            return partial_bags.add_squares(self.exchange, spec, s, used, squares)
        return norms.add_exchanged(self.exchange, spec, state.stores[s], s, used, squares)

    def norm(self, squares: Squares) -> Float32[Array, ""]:
        return jnp.sqrt(norms.sum_over_shards(self.shards, squares))

    def sum(self, words: Int32[Array, " _"], same: Array) -> Int32[Array, " _"]:
        if self.exchange.windows is None:
            return self.shards.sum(words)
        return self.exchange.windows.sum(words, same)  # without a collective of XLA the whole step is one CUDA graph


Strategy = Fused | Exchanged
"""A way to request keys, return rows, deliver gradients and take a step, for one store."""


def strategy_of(shards: Shards, spec: ExchangeSpec) -> Strategy:
    """Returns fused calls on one shard, else the exchange."""
    if shards.num_shards == 1:
        return Fused(shards)
    return Exchanged(shards, Exchange(shards, spec, windows_of(shards, spec.wire)))
