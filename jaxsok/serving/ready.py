"""Threads in the background, and programs that are compiled before the first request or a new version needs them.

A request decides which program it needs (sizes); a version, for what it is compiled: its tables (`Form`) and model.
"""

import atexit
import collections
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

import jax

from jaxsok.shards import HOST_KIND

Program = TypeVar("Program", bound=Hashable)

_log = logging.getLogger(__name__)

MOST_WAITING = 256  # programs that wait for the thread, at most
MOST_USED = 64  # programs that an update compiles for the new version, at most: those that were called last
MOST_MADE = 4096  # programs of a place that are known to be compiled, at most: those that were called last


class Background:
    """A thread that works while requests go on: it compiles better programs, or fetches rows for later lookups."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # All below is read and changed under `_changed`. There is a thread while something waits or runs.
        self._known: set[Hashable] = set()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def offer(self, name: Hashable | None, work: Callable[[], None]) -> bool:
        """Runs the work, unless too many wait or no thread starts; returns whether it will.

        Work of one name runs once, also after a failure; without a name (None) it runs each time.
        """
        with self._changed:
            if self._is_closed or name in self._known or len(self._waiting) >= MOST_WAITING:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxsok-background", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # too many threads, or Python ends
                    _log.warning("no program is compiled in the background: %s; larger ones do its work", error)
                    self._thread = None
                    return False
                _started.add(self)
            if name is not None:
                self._known.add(name)
            self._waiting.append(work)
            return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` for all work, and returns whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def stop(self) -> None:
        """Drops waiting work, and takes no more; what runs goes on."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()

    def close(self, timeout_s: float | None = None) -> bool:
        self.stop()
        return self.drain(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                _log.exception("a program could not be compiled; larger ones do its work")


_started: "weakref.WeakSet[Background]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Waits for compiling threads: Python kills the process if it ends while a thread is in the compiler."""
    started = list(_started)
    for thread in started:
        thread.stop()
    for thread in started:
        thread.close()


class ShortTurns:
    """While it is entered, a thread that wants Python's lock gets it after 0.2 ms at most, in place of 5 by default.

    Updates enter it, so that lookups need not wait until they give the lock up by themselves. Short turns cost threads
    that all want the lock up to a fifth of their rate. The interval is that of the process (`sys.setswitchinterval`).
    """

    _INTERVAL_S = 2e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_entered, self._before_s = 0, 0.0  # under `_lock`

    def __enter__(self) -> None:
        with self._lock:
            self._num_entered += 1
            if self._num_entered == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, self._INTERVAL_S))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_entered -= 1
            if not self._num_entered:
                sys.setswitchinterval(self._before_s)


SHORT_TURNS = ShortTurns()  # of this process, as the interval


class Repeated:
    """A thread that does some work again and again: after `wait_s`, then after the seconds that `work` returns."""

    def __init__(self, name: str, work: Callable[[], float], wait_s: float = 0.0) -> None:
        self._work, self._wait_s, self._stopping = work, wait_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.is_alive, self.is_stopping = self._thread.is_alive, self._stopping.is_set
        self.stop = self._stopping.set  # the work that runs is the last

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._wait_s):
            self._wait_s = self._work()

    def close(self, until: float | None = None) -> bool:
        """Stops, and waits until a time of `time.monotonic` (None: any); returns whether the thread has ended."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(rest_s(until))
        return not self._thread.is_alive()


def rest_s(until: float | None) -> float | None:
    """Returns the seconds until a time of `time.monotonic`; None stays None."""
    return None if until is None else max(0.0, until - time.monotonic())


class Ready(Generic[Program]):
    """A record of which programs are compiled where, and which were called last."""

    def __init__(self, compile: Callable[[Any, Program], None]) -> None:
        self._compile = compile
        self._lock = threading.Lock()
        # All below is read and changed under `_lock`, which is free while a program is compiled. A thread that compiles
        # a program holds its lock in `_compiling` until the program is in `_made`, or could not be compiled.
        self._made: dict[Any, collections.OrderedDict[Program, None]] = {}
        self._places: Collection[Any] | None = None  # remembered places; None: all
        self._used: collections.OrderedDict[Program, None] = collections.OrderedDict()
        self._compiling: weakref.WeakValueDictionary[tuple[Any, Program], Any] = weakref.WeakValueDictionary()

    def has(self, where: Any, program: Program) -> bool:
        """Checks for a compiled program, which the caller is about to call."""
        with self._lock:
            _put_last(self._used, program, MOST_USED)
            is_made = program in self._made.get(where, ())
            if is_made:
                _put_last(self._made[where], program, MOST_MADE)
            return is_made

    def need(self, where: Any, program: Program) -> None:
        if not self.has(where, program):
            self.make(where, program)

    def make(self, where: Any, program: Program) -> None:
        """Compiles a program unless it is compiled; waits for another thread that compiles it."""
        with self._lock:
            compiling = self._compiling.setdefault((where, program), threading.Lock())
        with compiling:
            with self._lock:
                if program in self._made.get(where, ()):
                    return
            self._compile(where, program)
            with self._lock:
                if self._places is None or where in self._places:
                    _put_last(self._made.setdefault(where, collections.OrderedDict()), program, MOST_MADE)

    def list_used(self) -> list[Program]:
        """Lists the last `MOST_USED` programs that were called; the latest last."""
        with self._lock:
            return list(self._used)

    def keep(self, places: Collection[Any]) -> None:
        """Forgets the programs of other places, compiled and future ones."""
        with self._lock:
            self._places = tuple(places)
            self._made = {where: made for where, made in self._made.items() if where in self._places}


def _put_last(programs: collections.OrderedDict[Any, None], program: Any, most: int) -> None:
    """Makes a program the last one, and forgets the first ones beyond `most`."""
    programs[program] = None
    programs.move_to_end(program)
    while len(programs) > most:
        programs.popitem(last=False)


class Form:
    """Shapes and places of the arrays of a pytree, as a value: a program is compiled for each."""

    def __init__(self, tree: Any) -> None:
        shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
        )
        leaves, structure = jax.tree.flatten(shapes)
        self._key = structure, tuple(leaves)
        # Only an array itself has the type that says that it lies in host memory. It may have been donated since.
        is_in_host = lambda array: array.sharding is not None and array.sharding.memory_kind == HOST_KIND  # noqa: E731
        self.tree = jax.tree.map(lambda array, shape: array if is_in_host(array) else shape, tree, shapes)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (self is other or self._key == other._key)
