"""Prefetches batches with their plans, and chooses send capacities.

A thread reads raw batches and packs them. When batch k is handed out, the next one is packed and its copy to the
devices has begun, and the one after that is read and packed while the caller dispatches step k. On a GPU a copy waits
for the programs that were dispatched before it, and runs at the same time as later ones: the copy of batch k + 1 runs
during step k. Therefore nothing that reads a batch is dispatched before the step that follows its packing.

With `prefetch=0` the same happens without that thread. The calling thread reads, and begins to pack batch k + 2 just
before it hands out batch k: the library's threads then pack while the caller dispatches step k.

On a mesh, when batch k is handed out, the plans of the next two are running on the devices, and batches k + 3 and k + 4
are on their way. When the caller, having dispatched step k, asks for batch k + 1, the host reads the counts of its
plan, which ran before step k - 1, so it does not wait. On one device plans are left to the lookup.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from jaxsok.annotations import annotate
from jaxsok.checks import not_none
from jaxsok.exchange import default_send_capacity, most_send_capacity, rounded_capacity
from jaxsok.features import Batch, Features
from jaxsok.growth import GrowthTracker
from jaxsok.pack import Packer, Packing, PadTo
from jaxsok.plan import Loads, Plan
from jaxsok.settings import current_settings, in_settings
from jaxsok.shards import Shards, view_on_host
from jaxsok.specs import StoreSpec

HEADROOM = 1.03  # a new capacity over its load: similar batches differ by a few per cent
PACKED_AHEAD = 2  # batches that are packed or being packed, in addition to those with plans, when one is handed out
PLANS_AHEAD = 2  # on a mesh, batches whose plans are under way when one is handed out, beyond those looked up ahead
SPARE = 1.5  # a capacity in use is kept for loads down to this part of it: fewer programs


class Planner(Protocol):
    """The parts of a collection that the pipeline needs."""

    stores: tuple[StoreSpec, ...]
    shards: Shards
    growth: GrowthTracker
    packer: Packer

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


_Read = tuple[Packing, Any] | None
"""A batch on its way to the devices, and the iterator's state after it; None: there is no further batch."""


class _Stages:
    """A future that has no thread: the caller that needs its result runs its stages.

    Ctrl-C is raised at once, and again for a later loop, which would otherwise go on without the batch.
    """

    def __init__(self, stages: Generator[None, None, _Read]):
        self._stages, self._result, self._error, self._is_done = stages, None, None, False
        self.run_next()

    def run_next(self) -> None:
        """Runs up to the next yield, if there is one left."""
        if self._is_done:
            return
        try:
            next(self._stages)
        except StopIteration as end:
            self._result, self._is_done = end.value, True
        except BaseException as error:
            self._error, self._is_done = error, True
            if not isinstance(error, Exception):
                raise

    def exception(self) -> BaseException | None:
        """Runs all stages; returns what one of them raised."""
        while not self._is_done:
            self.run_next()
        return self._error

    def result(self) -> _Read:
        """Runs all stages; returns their result."""
        if error := self.exception():
            raise error
        return self._result


class Pipeline:
    """An iterator of (batch, plan), made by `Collection.pipeline`; nothing runs before the first batch is requested."""

    def __init__(
        self,
        collection: Planner,
        batches: Iterable[Mapping[str, Any]],
        pad_to: PadTo = None,
        ahead: LookAhead = LookAhead(),
        prefetch: int = PACKED_AHEAD,
    ):
        self._collection, self._ahead, self._prefetch = collection, ahead, prefetch
        self._batches = iter(batches)
        self._pad_to = pad_to
        self._in_use: list[set[int]] = [set() for _ in collection.stores]
        self._next: list[int | None] = [None] * len(collection.stores)
        # Batches that are being read and packed, or are packed; with the iterator's state after each.
        self._packed: deque[concurrent.futures.Future[_Read] | _Stages] = deque()
        # Batches with plans under way, then with plans whose capacities suffice, and the iterator's state after each.
        # After a loop that breaks off a second one goes on with them.
        self._under_way: deque[tuple[Batch, Plan, Loads]] = deque()
        self._ready: deque[tuple[Batch, Plan]] = deque()
        self._states: deque[Any] = deque()
        self._num_handed_out = 0
        self._state = self._state_of_batches()
        self._is_read = False  # nothing is read any more: there is no more, or reading failed, or the loop is over
        self._failed: BaseException | None = None  # raised in its turn: the batches before it are handed out first
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "jaxsok.pipeline") if prefetch else None
        self.num_replanned = 0
        """Batches that had more keys for one owner than their capacity, and were planned again."""

    @property
    def send_capacities(self) -> list[list[int]]:
        """The send capacities in use, by store; each combination is a program of the step."""
        return [sorted(sizes) for sizes in self._in_use]

    def get_state(self) -> Any:
        """Returns the state of the iterator of batches after the batch handed out last; None if it reports none."""
        return self._state

    def _state_of_batches(self) -> Any:
        get_state = getattr(self._batches, "get_state", None)
        return None if get_state is None else get_state()

    def __iter__(self) -> Iterator[tuple[Batch, Plan]]:
        ready, self._is_read = self._ready, False
        try:
            self._make_ready(1)
            while ready:
                self._make_ready(1 + self._ahead.reach)
                self._pack(self._prefetch or PACKED_AHEAD)
                batch, plan = ready.popleft()
                plan = self._with_following(batch, plan)
                self._state = self._states.popleft()
                yield batch, plan
                self._make_ready(1)
        finally:  # when it returns, nothing reads the caller's iterator any more
            self._is_read = True
            ended = [packed for packed in self._packed if packed.exception() or packed.result()]
            self._packed.clear()
            self._packed.extend(ended)
        if self._failed is not None:
            raise self._failed

    def _make_ready(self, num_batches: int) -> None:
        """Checks the plans of the next batches; the plans of those behind them are under way then."""
        under_way, is_planned = self._under_way, self._collection.shards.num_shards > 1
        # On one device, too, a batch that is looked up ahead begins its copy before the step before that one.
        num_under_way = PLANS_AHEAD if is_planned else min(1, self._ahead.num_batches)
        while len(self._ready) < num_batches:
            if not under_way:
                under_way.extend(self._dispatch_next(is_planned))
            if not under_way:
                return
            batch, plan, loads = under_way.popleft()
            # Before the next batch is planned, since this one's counts choose its capacities.
            self._ready.append((batch, self._check(batch, plan, loads) if is_planned else plan))
            while len(under_way) < num_under_way and (following := self._dispatch_next(is_planned)):
                under_way.extend(following)

    def _with_following(self, batch: Batch, plan: Plan) -> Plan:
        """Gives a plan the plans that its lookup looks up ahead, and notes their keys for the growth of the tables."""
        self._num_handed_out += 1
        if not self._ahead.num_batches:
            return plan
        coming = tuple(ready.features for ready, _ in itertools.islice(self._ready, self._ahead.reach))
        following = [ready_plan for _, ready_plan in itertools.islice(self._ready, self._ahead.num_batches)]
        # Requests that need rounds are looked up when their turn comes, and so are those behind them.
        plans = tuple(itertools.takewhile(_is_in_one_round, following))
        handed_out = [pair for pair in self._collection.growth.following if pair[0]() is not None]
        self._collection.growth.following = [*handed_out, (weakref.ref(batch.features), coming if plans else ())]
        if not plans:
            return plan
        is_updated = self._num_handed_out % self._ahead.micro_batches == 0
        return dataclasses.replace(
            plan, following=plans, staleness=self._ahead.staleness, updates_before=int(is_updated)
        )

    def _pack(self, num_batches: int) -> None:
        """Reads and packs until there are `num_batches` batches, or no more; waits for the first."""
        packed = self._packed
        while len(packed) < num_batches and not self._is_read:
            if self._reader is not None:
                packed.append(self._reader.submit(_run, self._read_and_pack(), current_settings()))
                continue
            if packed and isinstance(last := packed[-1], _Stages):
                last.run_next()  # until it is packed, since the reader may fill its arrays again
            packed.append(_Stages(self._read_and_pack()))
        if packed:
            packed[0].exception()

    def _read_and_pack(self) -> Generator[None, None, _Read]:
        """Returns the next batch. While it is packed, there is other work to do, and so there is before it is sent."""
        if self._is_read:
            return None
        packer = self._collection.packer
        try:
            raw = next(self._batches)
            state = self._state_of_batches()
            begun = packer.begin(raw, self._pad_to)
            yield
            packed = packer.complete(begun)
            # The reader may fill its own arrays again before the batch is handed out.
            copies = {name: np.array(value) for name, value in packed.rest.items() if isinstance(value, np.ndarray)}
            if copies:
                packed = dataclasses.replace(packed, rest=packed.rest | copies)
            yield
            return packer.send(packed), state
        except StopIteration:
            self._is_read = True
            return None
        except BaseException:
            self._is_read = True
            raise

    def _dispatch_next(self, is_planned: bool) -> list[tuple[Batch, Plan, Loads]]:
        """Returns the next batch, its plan dispatched at the capacities that served last; nothing at the end."""
        self._pack(1)
        if not self._packed:
            return []
        packed = self._packed.popleft()
        if (error := packed.exception()) or (found := packed.result()) is None:
            self._failed = self._failed or error
            return []
        packing, state = found
        self._states.append(state)
        batch = self._collection.packer.finish(packing)
        self._collection.growth.record_features([batch.features])
        if not is_planned:
            return [(batch, Plan(batch.features), ())]
        sizes = [
            default_send_capacity(spec, part) if size is None else size
            for spec, part, size in zip(self._collection.stores, batch.features.stores, self._next, strict=True)
        ]
        return [(batch, *self._collection.plan_with_loads(batch.features, sizes))]

    @annotate("jaxsok.pipeline")
    def _check(self, batch: Batch, plan: Plan, loads: Loads) -> Plan:
        """Returns a plan whose capacities suffice, and chooses the capacities of the next one."""
        sizes, is_short, is_first, is_too_skewed = [], False, False, False
        for s, (asked, load) in enumerate(zip(not_none(plan.asked), loads, strict=True)):
            if asked is None or load is None:
                sizes.append(1)
                continue
            most_sent, most_received = view_on_host(load.addressable_data(0))[0].tolist()  # all parts are equal
            if not self._collection.stores[s].sends_bags:  # uses repeat keys; `batch` has counted them
                self._collection.growth.record_batch(s, most_received)
            is_first = is_first or self._next[s] is None
            most = most_send_capacity(self._collection.stores[s], batch.features.stores[s])
            is_too_skewed = is_too_skewed or most_sent > most
            size = min(self._choose(s, most_sent), most) if most_sent <= most else most
            is_short = is_short or asked.send_capacity < most_sent
            self._next[s] = size
            sizes.append(size)
        if is_too_skewed:  # one round would take the memory of several batches
            self.num_replanned += 1
            return self._collection.plan(batch.features)
        if is_short or is_first:
            self.num_replanned += is_short
            plan, _ = self._collection.plan_with_loads(batch.features, sizes)  # the program that plans later batches
        return plan

    def _choose(self, s: int, load: int) -> int:
        """Chooses a capacity for a load: one in use that is not much too large, or a new one."""
        least = len(self._collection.stores[s].tables)
        fitting = [size for size in self._in_use[s] if max(load, least) <= size <= max(SPARE * load, 16)]
        if fitting:
            return min(fitting)
        size = max(least, rounded_capacity(int(load * HEADROOM)))
        self._in_use[s].add(size)
        return size


def _run(stages: Generator[None, None, _Read], settings: tuple | None) -> _Read:
    """Runs all stages in the reader's thread, in the settings of the caller's."""
    with contextlib.nullcontext() if settings is None else in_settings(settings):
        return _Stages(stages).result()


def _is_in_one_round(plan: Plan) -> bool:
    return all(getattr(asked, "listed", None) is None for asked in plan.asked or ())
