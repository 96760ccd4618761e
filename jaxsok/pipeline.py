"""Prefetches batches with their plans, and chooses send capacities.

When batch k is handed out, the next one is packed and its copy to the devices has begun (see `batch_reader`). On a GPU
a copy waits for the programs that were dispatched before it, and runs at the same time as later ones: the copy of batch
k + 1 runs during step k. Therefore nothing that reads a batch is dispatched before the step that follows its packing.

On a mesh, when batch k is handed out, the plans of the next two are running on the devices, and batches k + 3 and k + 4
are on their way. When the caller, having dispatched step k, asks for batch k + 1, the host reads the counts of its
plan, which ran before step k - 1, so it does not wait. On one device plans are left to the lookup.

A step made by `Pipeline.jit` also makes the plan of batch k + 3, in the same program: the host then dispatches one
program a step in place of two. What such a step leaves undone is planned by a program of its own.

With `steps_per_call` all this holds of calls in place of batches: the batches of a call are stacked on the devices, and
planned by one program.
"""

import dataclasses
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsok import processes
from jaxsok.annotations import annotate
from jaxsok.batch_reader import BatchReader
from jaxsok.checks import not_none
from jaxsok.exchange import default_send_capacity, most_send_capacity, rounded_capacity
from jaxsok.features import NO_FEATURES, Batch, FeatureLayout, Features
from jaxsok.growth import GrowthTracker
from jaxsok.pack import Packer, PadTo
from jaxsok.plan import Loads, Plan
from jaxsok.settings import mesh_of_thread
from jaxsok.shards import Shards, view_on_host
from jaxsok.specs import StoreSpec

HEADROOM = 1.03  # a new capacity over its load: similar batches differ by a few per cent
PACKED_AHEAD = 2  # batches that are packed or being packed, in addition to those with plans, when one is handed out
PLANS_AHEAD = 2  # on a mesh, batches whose plans are under way when one is handed out, beyond those looked up ahead
JOINED_AHEAD = 3  # the same where steps make plans: the host reads counts of the step before last
SPARE = 1.5  # a capacity in use is kept for loads down to this part of it: fewer programs


class Planner(Protocol):
    """The parts of a collection that the pipeline needs."""

    stores: tuple[StoreSpec, ...]
    shards: Shards
    growth: GrowthTracker
    packer: Packer
    step_with_plan: Callable[[Callable, tuple[int, ...]], Callable]
    """`step_with_plan` of this module; for the same step it gives the same function, whose programs JAX has."""

    def plan(self, features: Features, *, send_capacity: Any = None) -> Plan:
        """Makes keys distinct and sends them to their owners."""
        ...

    def plan_with_loads(self, features: Features, send_capacity: Any) -> tuple[Plan, Loads]:
        """Does `plan` on a mesh, and gives the loads for the host."""
        ...


@dataclasses.dataclass(frozen=True)
class LookAhead:
    """The number of lookups that run ahead; see `Collection.pipeline`."""

    num_batches: int = 0
    staleness: int = 0
    micro_batches: int = 1

    @property
    def reach(self) -> int:
        """Batches for whose keys there must be room, the next step's included, since no row leaves within a step."""
        return self.num_batches and max(self.num_batches, self.micro_batches)


class _Sizes(NamedTuple):
    """What follows from the layouts of a batch, which are the same objects in batches of one form."""

    layouts: tuple[tuple[FeatureLayout, ...], ...]
    """Those of each store."""
    default_capacities: list[int]
    most_capacities: list[int]
    """The largest send capacity of each store."""


@dataclasses.dataclass
class _Coming:
    """A batch on the devices, and its plan as soon as a program makes it."""

    batch: Batch
    structure: tuple
    """The structure of its features, and the shape and dtype of each array."""
    sizes: _Sizes
    capacities: tuple[int, ...]
    """The send capacity of each store, which the program of its plan is compiled for."""
    state: Any
    """The iterator's state after it."""
    plan: Plan | None = None
    loads: Loads = ()


class Pipeline:
    """An iterator of (batch, plan), made by `Collection.pipeline`; nothing runs before the first batch is requested.

    Ctrl-C loses no batch. Batches wait in tuples, and move from one to the next by a single assignment without a call:
    what may be interrupted or fail, as a plan, is done before, and a later loop does it again.
    """

    def __init__(
        self,
        collection: Planner,
        batches: Iterable[Mapping[str, Any]],
        pad_to: PadTo = None,
        ahead: LookAhead = LookAhead(),
        prefetch: int = PACKED_AHEAD,
        steps_per_call: int = 1,
    ):
        self._collection, self._ahead = collection, ahead
        self._steps_per_call, self._num_packed = steps_per_call, (prefetch or PACKED_AHEAD) * steps_per_call
        collection.packer.batches_per_call = max(collection.packer.batches_per_call, steps_per_call)
        self._reader = BatchReader(collection.packer, batches, pad_to, has_thread=bool(prefetch))
        self._in_use: list[set[int]] = [set() for _ in collection.stores]
        self._next: list[int | None] = [None] * len(collection.stores)
        # Batches of the next call, perhaps one of another form after them; with the iterator's state after each.
        self._taken: tuple[tuple[Batch, Any, tuple | None], ...] = ()
        # Batches with plans under way, then with plans whose capacities suffice. After a loop that breaks off a second
        # one goes on with them.
        self._under_way: tuple[_Coming, ...] = ()
        self._ready: tuple[_Coming, ...] = ()
        self._num_handed_out = 0
        self._state = self._reader.state_of_batches()
        self._failed: BaseException | None = None  # raised in its turn: the batches before it are handed out first
        self._joins = False  # steps made by `jit` plan later batches
        self._left: _Coming | None = None  # the last batch read, whose plan is left to the next such step
        self._handed_out: _Coming | None = None  # None: its plan needs rounds
        self._sizes = _Sizes((), [], [])  # of the batch read last
        self._layouts_met: set[tuple] = set()  # those that other processes have, too
        self._num_dispatched, self._has_ended = 0, False
        self._loop: object = None  # the newest one
        self.num_replanned = 0
        """Batches that had more keys for one owner than their capacity, and were planned again."""

    def jit(
        self,
        step: Callable,
        *,
        jit: Callable = jax.jit,
        donate_argnums: int | Sequence[int] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Callable:
        """Does `jax.jit(step, ...)`; on a mesh the program also makes the plan of the batch three steps later.

        The host then dispatches one program for a step and a plan in place of two, which pays where it sets the pace:
        where a step takes about a millisecond (docs/results/many_gpus.md). Results have the bits of `jax.jit`. On one
        device it is `jax.jit`.

        Call the result once for each batch, as the loop hands it out. Where a batch is not stepped, that plan is made
        by a program of its own; so it is for a batch whose shapes differ from those of the one three later, whose step
        is then compiled once more, without a plan. Another pipeline of the collection uses the same programs for the
        same function.

        Args:
          step: the function of a step. It may take and return anything.
          jit: what compiles it: `jax.jit`, `nnx.jit`, or, with `Collection.ahead`,
            `lambda step, **options: collection.ahead(jax.jit(step, **options))`.
          donate_argnums: as of `jax.jit`.
          static_argnums: as of `jax.jit`.
          options: others of `jax.jit`, but not `in_shardings` or `out_shardings`.

        Raises:
          TypeError: for these two options; a step of them is jitted without the pipeline.
          ValueError: when called with lookups ahead on a mesh, if an argument with the plan is donated: it holds plans
            of batches to come, which the next step would find deleted.

        Example:
          >>> import jaxsok
          >>> tables = [jaxsok.TableSpec("item", dim=4, optimizer=jaxsok.optim.sgd(0.1), capacity=64)]
          >>> collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", table="item")])
          >>> pipeline = collection.pipeline({"clicked": np.arange(i, i + 4)} for i in range(3))
          >>> def step(state, plan):
          ...     embeddings, state, plan = collection.lookup(state, plan)
          ...     return collection.update(state, plan, embeddings)
          >>> step, state = pipeline.jit(step, donate_argnums=0), collection.init(seed=0)
          >>> for batch, plan in pipeline:
          ...     state, stats = step(state, plan)
          >>> collection.num_rows(state)
          {'item': 6}
        """
        if refused := sorted({"in_shardings", "out_shardings"} & set(options)):
            raise TypeError(
                f"pipeline.jit: {refused[0]}: got one, wanted none, since the program also takes and returns arrays of "
                "the pipeline; use jax.lax.with_sharding_constraint in the step, or jax.jit without the pipeline."
            )
        options |= {"donate_argnums": donate_argnums, "static_argnums": static_argnums}
        alone = jit(step, **options)
        if self._collection.shards.num_shards == 1:
            return alone
        self._joins = True
        donated_of = _donated_by(step, donate_argnums, options.get("donate_argnames") or ())

        @functools.cache
        def program_of(capacities: tuple[int, ...]) -> Callable:
            return jit(self._collection.step_with_plan(step, capacities), **options)

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._ahead.num_batches and _has_following(donated_of(args, kwargs)):
                raise ValueError(
                    "pipeline.jit: donate_argnums, donate_argnames: got an argument with a plan with lookups ahead, "
                    "wanted others: it holds the plans of batches to come, whose memory a step must leave them."
                )
            left, current = self._left, self._handed_out
            is_traced = mesh_of_thread() is None  # within another program there is nothing to plan
            if current is None or is_traced or (left is not None and left.structure != current.structure):
                return alone(*args, **kwargs)
            taken = left if left is not None and left.capacities == current.capacities else None
            # With nothing to plan, it plans its own batch again, in vain: that costs less than to compile without. It
            # takes a copy, since the step may be given the memory of its own plan.
            features = taken.batch.features if taken is not None else jax.tree.map(jnp.copy, current.batch.features)
            results, plan, loads = program_of(current.capacities)(*args, jaxsok_features=features, **kwargs)
            if taken is not None:
                taken.plan, taken.loads = dataclasses.replace(plan, features=features), loads
                self._under_way, self._left = (*self._under_way, taken), None
            return results

        return call

    @property
    def send_capacities(self) -> list[list[int]]:
        """The send capacities in use, by store; each combination is a program of the step."""
        return [sorted(sizes) for sizes in self._in_use]

    def get_state(self) -> Any:
        """Returns the state of the iterator of batches after the batch handed out last; None if it reports none."""
        return self._state

    def __iter__(self) -> Iterator[tuple[Batch, Plan]]:
        self._reader.is_over, self._has_ended, self._loop = False, False, (loop := object())
        is_finalizing = sys.is_finalizing  # when a script ends, modules may be gone
        try:
            self._make_ready(1)
            while self._ready:
                self._make_ready(1 + self._ahead.reach)
                # All of the next call: copies that begin later would wait for the call that is handed out now.
                self._reader.pack(self._num_packed, self._steps_per_call)
                coming = self._ready[0]
                plan = self._with_following(coming.batch, not_none(coming.plan))
                handed_out = coming if self._joins and _is_in_one_round(plan) else None
                self._ready, self._state, self._handed_out = self._ready[1:], coming.state, handed_out
                self._num_handed_out += 1
                yield coming.batch, plan
                if self._loop is not loop:  # a newer loop has begun, and perhaps ended
                    self._reader.is_over, self._loop = False, loop
                self._plan_left()
                self._make_ready(1)
        finally:  # when it returns, nothing reads the caller's iterator any more
            self._collection.growth.loops.discard(loop)
            if self._loop is loop:
                self._reader.is_over, self._handed_out = True, None
                if not is_finalizing():
                    self._reader.stop()
        if (error := self._failed) is not None:
            self._failed = None  # a later loop goes on behind it
            raise error

    def _make_ready(self, num_batches: int) -> None:
        """Checks the plans of the next batches; the plans of those behind them are under way then."""
        is_planned = self._collection.shards.num_shards > 1
        # On one device, too, a batch that is looked up ahead begins its copy before the step before that one.
        num_under_way = PLANS_AHEAD if is_planned else min(1, self._ahead.num_batches)
        if self._joins:
            num_under_way = JOINED_AHEAD
        while len(self._ready) < num_batches:
            if not self._under_way:
                self._plan_left()
            if not self._under_way:
                self._dispatch_next(is_planned)
            if not self._under_way:
                return
            coming = self._under_way[0]
            if is_planned:  # before the next batch is planned, since this one's counts choose its capacities
                self._check(coming)
            self._ready, self._under_way = (*self._ready, coming), self._under_way[1:]
            while len(self._under_way) + (self._left is not None) < num_under_way:
                self._plan_left()
                is_left = self._joins and len(self._under_way) + 1 == num_under_way
                if not self._dispatch_next(is_planned, is_left):
                    break

    def _with_following(self, batch: Batch, plan: Plan) -> Plan:
        """Gives a plan the plans that its lookup looks up ahead, and notes their keys for the growth of the tables."""
        if not self._ahead.num_batches:
            return plan
        behind = self._ready[1:]
        coming = tuple(ready.batch.features for ready in behind[: self._ahead.reach])
        following = [not_none(ready.plan) for ready in behind[: self._ahead.num_batches]]
        # Requests that need rounds are looked up when their turn comes, and so are those behind them.
        plans = tuple(itertools.takewhile(_is_in_one_round, following))
        if plans and self._steps_per_call > 1:
            # Each step looks up the batch of the next one, the last step that of the next call.
            is_same = _is_in_one_round(plan) and _form_of(plan, 1) == _form_of(plans[0], 1)
            plans = (_following_in_calls(self._collection.shards, plan, plans[0]),) if is_same else ()
        growth, own = self._collection.growth, batch.features
        handed_out = [pair for pair in growth.following if (other := pair[0]()) is not None and other is not own]
        growth.following = [*handed_out, (weakref.ref(own), coming if plans else ())]
        growth.loops.add(self._loop)
        if not plans:
            return plan
        is_updated = (self._num_handed_out + 1) % self._ahead.micro_batches == 0
        return dataclasses.replace(
            plan, following=plans, staleness=self._ahead.staleness, updates_before=int(is_updated)
        )

    def _dispatch_next(self, is_planned: bool, is_left: bool = False) -> bool:
        """Sends the next batch on its way, its plan dispatched or left to a step; returns False at the end."""
        if not (num_batches := self._take_call()):
            if not self._has_ended:
                self._meet_at_end()
            return False
        batches, states, _ = zip(*self._taken[:num_batches], strict=True)
        batch = batches[0] if self._steps_per_call == 1 else _stack(self._collection.shards, batches)
        number = self._num_dispatched + num_batches
        sizes = self._sizes_of(batch.features, number, num_batches)
        leaves, structure = jax.tree.flatten(batch.features)
        structure = structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
        rest = self._taken[num_batches:]
        if not is_planned:
            coming = _Coming(batch, structure, sizes, (), states[-1], Plan(batch.features))
            self._under_way, self._taken, self._num_dispatched = (*self._under_way, coming), rest, number
            return True
        capacities = [  # those that served last
            default if size is None else size
            for default, size in zip(sizes.default_capacities, self._next, strict=True)
        ]
        coming = _Coming(batch, structure, sizes, tuple(capacities), states[-1])
        self._left, self._taken, self._num_dispatched = coming, rest, number
        if not is_left:
            self._plan_left()
        return True

    def _take_call(self) -> int:
        """Takes the batches of the next call from the packer; returns their number. 0: there is no further batch.

        A batch of another form behind them waits for the call after it.
        """
        while len(self._taken) < self._steps_per_call and self._are_of_one_form() and self._take_batch():
            pass
        return len(self._taken) - (not self._are_of_one_form())

    def _are_of_one_form(self) -> bool:
        """Returns whether the last batch taken has the form of the first; those between have."""
        return not self._taken or self._taken[-1][2] == self._taken[0][2]

    def _take_batch(self) -> bool:
        """Takes the next batch from the packer; returns False if there is none."""
        found, reader = None, self._reader
        while found is None:
            reader.pack(1)
            if not reader.packed or self._failed is not None:
                return False
            packed = reader.packed[0]
            if (error := packed.exception()) is not None:
                self._failed, reader.packed = error, reader.packed[1:]
                return False
            if (found := packed.result()) is None:  # there was no more, or a loop that ended read no more
                reader.packed = reader.packed[1:]
        packing, state = found
        batch, form = self._collection.packer.finish(packing), None
        if self._steps_per_call > 1:
            if (error := _refusal_of(self._collection.shards, batch)) is not None:
                reader.is_over, self._failed, reader.packed = True, error, reader.packed[1:]
                return False
            form = _form_of(batch)
        self._taken, reader.packed = (*self._taken, (batch, state, form)), reader.packed[1:]
        return True

    def _sizes_of(self, features: Features, number: int, num_batches: int) -> _Sizes:
        layouts = tuple(part.layouts for part in features.stores)
        # Of several layouts, another process may have another one, and a shorter call where this one's is short.
        is_short = num_batches < self._steps_per_call
        may_differ = is_short or layouts not in self._layouts_met or len(self._layouts_met) > 1
        if may_differ and self._collection.shards.num_processes > 1:
            parts = {layout.name: (layout.num_bags, layout.num_keys) for of_store in layouts for layout in of_store}
            what = f"batch {number}, in a call of {num_batches}, with (bags, keys) {parts} for a shard"
            self._meet(what, self._failed if is_short else None)  # which may be why the call is short
            self._layouts_met.add(layouts)
        if layouts != self._sizes.layouts:
            pairs = list(zip(self._collection.stores, features.stores, strict=True))
            default = [default_send_capacity(*pair) for pair in pairs]
            self._collection.growth.record_features([features])
            self._sizes = _Sizes(layouts, default, [most_send_capacity(*pair) for pair in pairs])
        return self._sizes

    def _meet(self, what: str, failure: BaseException | None = None) -> ValueError | None:
        """Sees to it that other processes are as far, and have batches of the same form."""
        if self._collection.shards.num_processes == 1:
            return None
        try:
            return processes.meet("pipeline", what, failure)
        except Exception:  # at once, also the failure itself: steps of this process would meet other collectives
            self._failed, self._has_ended = None, True
            raise

    def _meet_at_end(self) -> None:
        """Does so where there is no further batch. What a reader has raised is raised in its turn, in all processes.

        With other numbers of batches none may go on: its collectives would be others.
        """
        differs = self._meet(f"no batch after {self._num_dispatched}", self._failed)
        self._failed, self._has_ended = self._failed or differs, True

    def _plan_left(self) -> None:
        """Plans the batch whose plan was left to a step, if no step has made it."""
        if (coming := self._left) is not None:
            self._plan(coming, coming.capacities)
            self._under_way, self._left = (*self._under_way, coming), None

    def _plan(self, coming: _Coming, capacities: Sequence[int]) -> None:
        capacities = tuple(capacities)
        plan, loads = self._collection.plan_with_loads(coming.batch.features, capacities)
        coming.plan, coming.loads, coming.capacities = plan, loads, capacities

    @annotate("jaxsok.pipeline")
    def _check(self, coming: _Coming) -> None:
        """Plans a batch again if its capacities do not suffice, and chooses the capacities of the next one."""
        capacities = list(coming.capacities)
        is_short, is_first, is_too_skewed = False, False, False
        for s, (asked, load) in enumerate(zip(not_none(not_none(coming.plan).asked), coming.loads, strict=True)):
            if asked is None or load is None:
                continue
            most_sent, most_received = view_on_host(load.addressable_data(0))[0].tolist()  # all parts are equal
            if not self._collection.stores[s].sends_bags:  # uses repeat keys; `batch` has counted them
                self._collection.growth.record_batch(s, most_received)
            is_first = is_first or self._next[s] is None
            most = coming.sizes.most_capacities[s]
            is_too_skewed = is_too_skewed or most_sent > most
            self._next[s] = capacities[s] = min(self._choose(s, most_sent), most) if most_sent <= most else most
            is_short = is_short or asked.send_capacity < most_sent
        if is_too_skewed:  # one round would take the memory of several batches
            self.num_replanned += 1
            coming.plan = self._collection.plan(coming.batch.features)
        elif is_short or is_first:
            self.num_replanned += is_short
            self._plan(coming, capacities)  # by the program that plans later batches

    def _choose(self, s: int, load: int) -> int:
        """Chooses a capacity for a load: one in use that is not much too large, or a new one."""
        least = len(self._collection.stores[s].tables)
        fitting = [size for size in self._in_use[s] if max(load, least) <= size <= max(SPARE * load, 16)]
        if fitting:
            return min(fitting)
        size = max(least, rounded_capacity(int(load * HEADROOM)))
        self._in_use[s].add(size)
        return size


def _form_of(tree: Batch | Plan, first_axis: int = 0) -> tuple:
    """Returns the structure of a batch or a plan, and of each entry the kind, and the shape from an axis on."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype.kind for leaf in leaves]
    return structure, kinds, [np.shape(leaf)[first_axis:] for leaf in leaves]


def _refusal_of(shards: Shards, batch: Batch) -> TypeError | None:
    """Returns an error if a batch has entries of one process, by which calls of other processes might end elsewhere."""
    for name, value in batch.rest.items() if shards.num_processes > 1 else ():
        for leaf in jax.tree.leaves(value):
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                return TypeError(
                    f'pipeline: steps_per_call: entry "{name}" of a batch: got one of this process alone (shape '
                    f"{list(np.shape(leaf))}), wanted a line for each sample, with several processes."
                )
    return None


def _stack(shards: Shards, batches: Sequence[Batch]) -> Batch:
    """Stacks batches of one form along a new leading axis; what is in NumPy stays there."""
    parts = [jax.tree.flatten((batch.rest, batch.mask)) for batch in batches]
    entries = list(zip(*(leaves for leaves, _ in parts), strict=True))
    is_array = [isinstance(values[0], jax.Array) for values in entries]
    on_devices = list(itertools.compress(entries, is_array))
    features, arrays = _stack_on_devices(shards, [batch.features for batch in batches], on_devices)
    arrays = iter(arrays)
    stacked = [next(arrays) if there else np.stack(values) for values, there in zip(entries, is_array, strict=True)]
    return Batch(features, *jax.tree.unflatten(parts[0][1], stacked))


@functools.partial(jax.jit, static_argnums=0)
def _stack_on_devices(
    shards: Shards, features: Sequence[Features], entries: Sequence[Sequence[Any]]
) -> tuple[Features, list[Any]]:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *features)
    return shards.split_stacked(stacked), [jnp.stack(values) for values in entries]


@functools.partial(jax.jit, static_argnums=0)
def _following_in_calls(shards: Shards, plan: Plan, next_plan: Plan) -> Plan:
    """Stacks the plans of the batches that follow those of a call; the last one is the first of the next call."""

    def shift(plan: Plan, next_plan: Plan) -> Plan:
        return jax.tree.map(lambda stack, after: jnp.concatenate([stack[1:], after[:1]]), plan, next_plan)

    return shards.run(shift, (plan, next_plan), (shards.stacked_spec,) * 2, shards.stacked_spec)


def _is_in_one_round(plan: Plan) -> bool:
    return all(getattr(asked, "listed", None) is None for asked in plan.asked or ())


def _donated_by(
    step: Callable, numbers: int | Sequence[int] | None, names: str | Sequence[str]
) -> Callable[[tuple, dict], list]:
    """Returns what finds the donated arguments of a call, by number or by name, as `jax.jit` does."""
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
    try:
        parameters = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):  # it has no signature that Python knows
        parameters = []
    given = {names} if isinstance(names, str) else {*names}
    by_name, by_number = given, {*numbers}
    if not (numbers and names):  # JAX derives one from the other
        by_name = given | {parameters[number] for number in numbers if -len(parameters) <= number < len(parameters)}
        by_number = by_number | {parameters.index(name) for name in given & {*parameters}}

    def find(args: tuple, kwargs: dict) -> list:
        positional = [args[number] for number in by_number if -len(args) <= number < len(args)]
        return positional + [value for name, value in kwargs.items() if name in by_name]

    return find


def _has_following(tree: Any) -> bool:
    """Returns whether one of the plans in lists, tuples and dicts has those of batches to come."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: not isinstance(node, list | tuple | dict))
    return any(isinstance(node, Plan) and bool(node.following) for node in nodes)


def step_with_plan(step: Callable, collection: Planner, capacities: tuple[int, ...]) -> Callable:
    """Returns a function that does a step, and plans the features given besides."""

    @functools.wraps(step)
    def step_and_plan(*args: Any, jaxsok_features: Features, **kwargs: Any) -> tuple[Any, Plan, Loads]:
        results = step(*args, **kwargs)
        # One after the other: XLA's CPU client may block where many collectives are under way, and the copy of the
        # loads to the host, which ends a CUDA graph, has to come last.
        features, _ = lax.optimization_barrier((jaxsok_features, results))
        plan, loads = collection.plan_with_loads(features, capacities)
        # The features do not pass through the program: its results would be copies.
        return results, dataclasses.replace(plan, features=NO_FEATURES), loads

    return step_and_plan
