"""Collects the requests of many clients into few calls, and splits the results."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

Payload = TypeVar("Payload")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class ClosedError(Exception):
    """The error of a request to a server that stops."""


@dataclasses.dataclass(eq=False)
class _Job(Generic[Payload]):
    payload: Payload
    costs: Mapping[str, int]
    arrived: float
    answer: asyncio.Future[Any]

    def settle(self, result: Any) -> None:
        """Answers, unless there is an answer or the caller was cancelled."""
        if self.answer.done():
            return
        if isinstance(result, BaseException):
            self.answer.set_exception(ClosedError() if isinstance(result, asyncio.CancelledError) else result)
        else:
            self.answer.set_result(result)


class Batcher(Generic[Payload, Result]):
    """Runs payloads together, in the order in which they came, on one event loop.

    A payload that finds no call under way begins one at once. Others wait until no call is under way. If a worker is
    free, they begin earlier: when they fill a call, or when the first of them has waited `max_delay_s`. All payloads of
    a call see one version of the tables. Any number may wait: the server takes no more than `max_requests`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Payload]], Awaitable[Sequence[Result]]],
        limits: Mapping[str, int],
        *,
        max_delay_s: float = 0.002,
        num_workers: int = 1,
        observe: Callable[[Sequence[Payload], bool], None] | None = None,
        observe_depth: Callable[[int], None] = lambda depth: None,
    ) -> None:
        """Takes requests from now on; work begins with the first.

        `run` gives a result for each payload, and must not hold up the event loop; if it fails for several payloads, it
        is called with each alone. `limits` bound the costs of a call; a payload above a limit goes alone. `observe`
        gets the payloads of each call, and whether it was split; `observe_depth` the number that wait, when it changes.
        """
        self._run, self._limits, self._observe = run, dict(limits), observe
        self._max_delay_s, self._num_workers, self._observe_depth = max_delay_s, num_workers, observe_depth
        self._waiting: collections.deque[_Job[Payload]] = collections.deque()
        self._num_counted, self._totals = 0, dict.fromkeys(limits, 0)  # the first that wait, and what they cost
        self._arrived, self._turn = asyncio.Event(), asyncio.Lock()
        self._workers: list[asyncio.Task[None]] = []
        self._num_running = 0  # calls under way
        self._closed = False

    async def submit(self, payload: Payload, costs: Mapping[str, int]) -> Result:
        """Waits for the payload's result, or raises its error; a cancelled caller takes its payload back."""
        if self._closed:
            raise ClosedError
        loop = asyncio.get_running_loop()
        job = _Job(payload, costs, loop.time(), loop.create_future())
        self._waiting.append(job)
        self._observe_depth(len(self._waiting))
        self._arrived.set()
        if not self._workers:
            self._workers = [loop.create_task(self._work()) for _ in range(self._num_workers)]
        try:
            return await job.answer
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
                self._forget_count()
                self._arrived.set()
            raise

    async def close(self, timeout_s: float = 30.0) -> bool:
        """Takes no more, waits until all calls have ended, and returns whether they have."""
        self._closed, running = True, set()
        self._arrived.set()
        if self._workers:
            _, running = await asyncio.wait(self._workers, timeout=timeout_s)
        for job in self._waiting:
            if not job.answer.done():
                job.answer.set_exception(ClosedError())
        self._waiting.clear()
        self._forget_count()
        return not running

    async def _work(self) -> None:
        while not self._closed or self._waiting:
            async with self._turn:  # one free worker at a time gathers; payloads wait while all are busy
                jobs = await self._gather(asyncio.get_running_loop())
            if jobs:
                await self._answer(jobs)

    async def _gather(self, loop: asyncio.AbstractEventLoop) -> list[_Job[Payload]]:
        """Returns the next payloads, once they are enough or have waited enough; none if all were cancelled."""
        while not self._waiting and not self._closed:
            self._arrived.clear()
            await self._arrived.wait()
        while self._waiting:
            num_jobs, is_full = self._count_fitting()
            rest_s = self._waiting[0].arrived + self._max_delay_s - loop.time()
            if is_full or rest_s <= 0 or self._num_running == 0 or self._closed:
                jobs = [self._waiting.popleft() for _ in range(num_jobs)]
                self._forget_count()
                return jobs
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._arrived.wait()
        return []

    def _count_fitting(self) -> tuple[int, bool]:
        """Counts the first payloads that fit into one call; also returns whether they fill it.

        Goes on where the last count ended: counting all at each arrival would take the square of their number.
        """
        limits, totals = self._limits, self._totals
        for job in itertools.islice(self._waiting, self._num_counted, None):
            costs = [(name, totals[name] + cost) for name, cost in job.costs.items() if name in limits]
            for name, total in costs:
                if total > limits[name]:
                    return max(self._num_counted, 1), True
            totals.update(costs)
            self._num_counted += 1
        return self._num_counted, any(totals[name] == limit for name, limit in limits.items())

    def _forget_count(self) -> None:
        """Forgets the count, since some of those that were counted do not wait any more."""
        self._num_counted, self._totals = 0, dict.fromkeys(self._limits, 0)
        self._observe_depth(len(self._waiting))

    async def _answer(self, jobs: Sequence[_Job[Payload]]) -> None:
        payloads = [job.payload for job in jobs]
        self._num_running += 1
        try:
            results = await self._try(payloads)
            is_split = len(results) < len(payloads)
            if self._observe is not None:
                self._observe(payloads, is_split)
            if is_split:
                _log.warning("a call with %d requests failed, each is run alone: %s", len(payloads), results[0])
                for job in jobs:  # each gets its answer at once: one may wait long for a database
                    if not job.answer.done():
                        job.settle((await self._try([job.payload]))[0])
            else:
                for job, result in zip(jobs, results, strict=True):
                    job.settle(result)
        except BaseException as error:  # of the call itself, as of an executor that is shut down
            self._closed |= isinstance(error, asyncio.CancelledError)  # a cancelled worker has to end
            for job in jobs:
                job.settle(error)
        finally:
            self._num_running -= 1
            self._arrived.set()  # the worker that gathers looks again: no call may be under way now

    async def _try(self, payloads: Sequence[Payload]) -> Sequence[Result | BaseException]:
        """Returns the results of a call, or its error alone."""
        try:
            return await self._run(payloads)
        except Exception as error:
            return [error]
