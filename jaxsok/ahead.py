"""Compiles the step for the state that growth makes next, before it is needed (decision D9, record 0026).

Capacities are shapes, so each growth of a store needs a new program of the step. As a store fills up, a thread lowers
and compiles the step for the capacity that `grow.next_capacity` names. JAX keeps what it compiles, so the first call
after the growth finds the program. Steps of `jax.jit` and of `nnx.jit` both have `lower`, which is all that this needs;
the state may lie anywhere in their arguments. Larger `sightings` are not foreseen: the step is compiled on the spot
then. The thread works on shapes alone: it holds no array and never waits for the device. A wrong prediction costs a
compilation, never a wrong result.
"""

import dataclasses
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsok.annotations import annotate
from jaxsok.checks import not_none
from jaxsok.enlarge import free_bytes, next_capacity
from jaxsok.grow import LOOK_EVERY
from jaxsok.host_limits import share_of_device
from jaxsok.operations import Declared
from jaxsok.settings import current_settings, in_settings
from jaxsok.shards import HOST_KIND, host_place
from jaxsok.store import State, StoreState, capacities_of, first_slab, num_buckets_of, with_slab

_log = logging.getLogger(__name__)
_compiled = threading.local()  # `number`: the programs that XLA compiled in this thread


def _count_compiled(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.number = _num_compiled() + 1


def _num_compiled() -> int:
    return getattr(_compiled, "number", 0)


jax.monitoring.register_event_duration_secs_listener(_count_compiled)


@dataclasses.dataclass
class _Program:
    """A program that was compiled in the background, or is being compiled."""

    capacities: list[list[int]]
    """Rows allocated, by collection and store."""
    compiled: Any = None
    """The program, where JAX would not find it: its place for rows in host memory of one device is of another type."""
    thread: threading.Thread | None = None
    """The one that compiles it; None: it could not be started."""
    is_called: bool = False


class Ahead:
    """A jitted step that has its program for the next capacity compiled ahead; `Collection.ahead` makes it."""

    num_compiled: int
    """Calls that compiled on the spot: each waited for all of the compilation."""
    num_ahead: int
    """Programs compiled in the background."""
    num_hits_ahead: int
    """Programs compiled in the background that a call then used."""
    stalls_s: list[float]
    """Seconds that the first call of each program took until it returned."""

    def __init__(self, step: Any, collections: Sequence[Declared]):
        if not isinstance(step, jax.stages.Wrapped):
            raise TypeError(
                f"ahead: step: got {_name_of(step)}, which has no .lower, wanted a jitted function: "
                "collection.ahead(jax.jit(step, donate_argnums=0))."
            )
        self.num_compiled = self.num_ahead = self.num_hits_ahead = 0
        self.stalls_s = []
        self._step = step
        self._collections = tuple(collections)
        self._programs: dict[Any, _Program] = {}  # those of the background
        self._failed: list[tuple[_Program, BaseException]] = []
        self._thread: threading.Thread | None = None
        self._looked: dict[Any, int] = {}
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step; JAX compiles on the spot what was not compiled ahead."""
        settings = current_settings()
        # Inside a trace there is no program to compile; while debugging JAX runs operation by operation.
        is_debugging = jax.config.jax_disable_jit or jax.debug_nans.value or jax.debug_infs.value
        if settings is None or is_debugging:
            return self._step(*args, **kwargs)
        self._check((args, kwargs))
        self._warn_of_failures()
        start, num_compiled = time.perf_counter(), _num_compiled()
        capacities = self._capacities()
        filling, program, job = self._rows_needed_soon(), None, None
        if filling or any(
            made.compiled is not None or (made.capacities == capacities and not made.is_called)
            for made in self._programs.values()
        ):
            key = _key((args, kwargs), settings)
            program = self._programs.get(key)
            if program is not None and program.thread is not None:
                program.thread.join()
            # Shapes are taken down before the call, which may delete the arrays, and the thread starts after it, so
            # that tracing does not compete with dispatching.
            job = self._next_job(key, filling, (args, kwargs), settings)
        compiled = None if program is None else program.compiled
        try:
            results = (compiled or self._step)(*args, **kwargs)
        except TypeError:
            if compiled is None:
                raise
            results = self._step(*args, **kwargs)  # it has static arguments, which JAX refuses before it runs
        self._record(program, capacities, num_compiled < _num_compiled(), time.perf_counter() - start)
        if job is not None:
            self._start(*job, settings)
        return results

    def wait(self) -> None:
        """Waits for the compilation in the background, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def _check(self, arguments: Any) -> None:
        """Refuses arguments without a state, at the first call: nothing could be compiled ahead."""
        if self._is_checked:
            return
        ours, found = {collection.fingerprint for collection in self._collections}, []

        def look(node: Any) -> Any:
            if isinstance(node, State) and node.fingerprint in ours:
                found.append(node)
            return node

        _map_nodes(look, arguments)
        if not found:
            got = [_name_of(argument) for argument in (*arguments[0], *arguments[1].values())]
            raise TypeError(f"ahead: state: got arguments {got}, wanted the State of the collection in one of them.")
        self._is_checked = True

    def _record(self, program: _Program | None, capacities: list[list[int]], is_compiled: bool, seconds: float) -> None:
        """Counts the call, if it was the first one of a program."""
        is_hit = program is not None and not program.is_called and not is_compiled
        if program is not None:
            program.is_called = True
        if not (is_hit or is_compiled):
            return
        self.num_compiled += is_compiled
        self.num_hits_ahead += is_hit
        self.stalls_s.append(seconds)
        _log.info(
            "ahead: program %d, for capacities %s, compiled %s; its first call took %.2f s",
            len(self.stalls_s),
            _shorten(capacities),
            "in the background" if is_hit else "on the spot",
            seconds,
        )

    # What happens ahead

    def _rows_needed_soon(self) -> dict[tuple[int, int], int]:
        """Returns the rows that each store more than half full may need soon, by collection and store, fullest first.

        Empty while the thread is at work.
        """
        needed, shares = {}, {}
        if self._thread is not None and self._thread.is_alive():
            return needed
        for c, collection in enumerate(self._collections):
            tracker = collection.growth
            for s, capacity in enumerate(tracker.signature or ()):
                capacity //= tracker.specs[s].num_shards
                reserve, known, bound = tracker.coming[s], tracker.known[s], tracker.bound(s)
                # By the rows last seen: the bound passes the half of every large store now and then, until `grow`,
                # which then asks for newer counters, has them.
                if known is not None and bound is not None and reserve and 2 * (known[0] + reserve) > capacity:
                    # For the step under way, and the one after growth.
                    needed[c, s] = min(bound + reserve, capacity) + reserve
                    shares[c, s] = needed[c, s] / capacity
        return {place: needed[place] for place in sorted(needed, key=lambda place: -shares[place])}

    def _next_job(self, key: Any, filling: Mapping[tuple[int, int], int], arguments: Any, settings: tuple) -> Any:
        """Chooses what the thread compiles next: its key and arguments; None: every program is there."""
        # A look asks for free memory, which may have changed.
        look = key, tuple(filling)
        turn = sum(collection.growth.num_calls for collection in self._collections) // LOOK_EVERY
        if not filling or self._looked.get(look) == turn:
            return None
        for capacities in self._futures(filling):
            future = self._abstract_arguments(arguments, capacities)
            future_key = _key(future, settings)
            if future_key not in self._programs and future_key != key:
                program = _Program(self._capacities())
                for (c, s), capacity in capacities.items():
                    program.capacities[c][s] = capacity * self._collections[c].stores[s].num_shards
                return future_key, program, future
        self._looked[look] = turn
        return None

    def _futures(self, filling: Mapping[tuple[int, int], int]) -> Iterator[dict[tuple[int, int], int]]:
        """Yields what growth may make next: the fullest store grown, the two fullest together, and so on."""
        capacities = {}
        for (c, s), needed in filling.items():
            tracker = self._collections[c].growth
            spec = tracker.specs[s]
            old = not_none(tracker.signature)[s] // spec.num_shards
            host_share = share_of_device(tracker.shards, is_agreed=False) if spec.memory is not None else None
            capacity = next_capacity(spec, old, needed, free_bytes(), host_share)
            if capacity > old:
                capacities[c, s] = capacity
                yield capacities

    def _abstract_arguments(self, arguments: Any, capacities: Mapping[tuple[int, int], int]) -> Any:
        """Removes the contents of arguments; the states among them that `grow` knows get the capacities of a shard."""
        unmatched = {c: (each.fingerprint, each.growth.signature) for c, each in enumerate(self._collections)}

        def abstract(node: Any) -> Any:
            if not isinstance(node, State):
                return _abstract(node)
            state, ours = jax.tree.map(_abstract, node), (node.fingerprint, capacities_of(node))
            owner = next((c for c, names in unmatched.items() if names == ours), -1)
            unmatched.pop(owner, None)
            stores = list(state.stores)
            for (c, s), capacity in capacities.items():
                if c == owner:
                    stores[s] = _grow_shapes(stores[s], self._collections[c].stores[s].num_shards, capacity)
            return dataclasses.replace(state, stores=tuple(stores))

        return _map_nodes(abstract, arguments)

    def _capacities(self) -> list[list[int]]:
        """Returns the rows allocated as `grow` last saw them, by collection and store."""
        return [list(collection.growth.signature or ()) for collection in self._collections]

    def _start(self, key: Any, program: _Program, arguments: Any, settings: tuple) -> None:
        self._programs[key] = program
        # Not a daemon: at its end the interpreter waits for the thread. A daemon would come back from XLA into an
        # interpreter that is gone, which aborts the process (seen with jax 0.10.2 and 0.12.0.1).
        self._thread = threading.Thread(
            target=self._compile, args=(program, arguments, settings), name="jaxsok.ahead", daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is at its end
            self._thread = None
            self._failed.append((program, error))
        program.thread = self._thread

    @annotate("jaxsok.ahead")
    def _compile(self, program: _Program, arguments: Any, settings: tuple) -> None:
        args, kwargs = arguments
        try:
            with in_settings(settings):
                compiled = self._step.lower(*args, **kwargs).compile()
            if any(_is_in_host_memory(leaf) for leaf in jax.tree.leaves(arguments)):
                program.compiled = compiled
            self.num_ahead += 1
        except BaseException as error:  # what a thread raises is not seen: the next call warns of it
            self._failed.append((program, error))

    def _warn_of_failures(self) -> None:
        while self._failed:
            program, error = self._failed.pop(0)
            warnings.warn(
                f"ahead: step: the program for capacities {_shorten(program.capacities)} did not compile in the "
                f"background ({type(error).__name__}: {error}); it is compiled where it is first called.",
                RuntimeWarning,
                stacklevel=3,
            )


# Shapes ---------------------------------------------------------------------------------------------------------------


def _map_nodes(function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the states and the other leaves of a pytree. Flax's modules stay graphs, whose parts may be shared."""
    nnx = sys.modules.get("flax.nnx")  # A caller that passes modules has imported it.

    def is_module(node: Any) -> bool:
        return nnx is not None and isinstance(node, nnx.Pytree)

    def is_state(node: Any) -> bool:
        return isinstance(node, State)

    def map_node(node: Any) -> Any:
        if not is_module(node):
            return function(node)
        graphdef, leaves = nnx.split(node)  # pyright: ignore[reportOptionalMemberAccess]
        return nnx.merge(graphdef, jax.tree.map(function, leaves, is_leaf=is_state))  # pyright: ignore[reportOptionalMemberAccess]

    return jax.tree.map(map_node, tree, is_leaf=lambda node: is_state(node) or is_module(node))


def _key(arguments: Any, settings: tuple) -> Any:
    """Returns what distinguishes programs of one step: structure, shapes, dtypes and settings."""
    leaves, structure = jax.tree.flatten(arguments)
    return settings, structure, tuple(map(_shape, leaves))


def _shape(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", leaf)  # what jax.typeof gives, in a tenth of the time
    if hasattr(aval, "shape"):
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    return leaf if isinstance(leaf, str) else type(leaf)  # a static argument, or a number


def _abstract(leaf: Any) -> Any:
    """Removes an array's contents. Numbers stay: JAX treats them in a way of its own."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf
    aval = jax.typeof(leaf)
    place = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None  # None: it may move
    if _is_in_host_memory(leaf):
        place = host_place(
            *leaf.sharding.device_set
        )  # of another place JAX believes, without an array, that it is the device
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=place)


def _is_in_host_memory(leaf: Any) -> bool:
    """Returns whether an array, or what stands for it, lies in the host memory of a single device."""
    place = getattr(leaf, "sharding", None)
    return place is not None and place.memory_kind == HOST_KIND and place.num_devices == 1


def _grow_shapes(store: StoreState, num_shards: int, capacity: int) -> StoreState:
    """Returns the shapes of a store after `grow`: one more slab, another index; `capacity` is that of a shard."""

    def resize(leaf: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
        return leaf.update(shape=(size, *leaf.shape[1:]))

    slab = jax.tree.map(lambda leaf: resize(leaf, num_shards * capacity - store.capacity), first_slab(store))
    index = resize(store.index, num_shards * num_buckets_of(capacity))
    return dataclasses.replace(with_slab(store, slab), index=index)


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__


def _shorten(capacities: list[list[int]]) -> list[Any]:
    return capacities[0] if len(capacities) == 1 else capacities
