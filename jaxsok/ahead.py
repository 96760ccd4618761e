"""Compiles the step for the state that growth makes next, before it is needed (decision D9).

Capacities are shapes, so each growth of a store needs the step's program anew. While a store fills up, a thread traces
and compiles the step for the capacity that `grow.next_capacity` names; the first call after the growth finds the
program. Larger `sightings` are not foreseen: the step is compiled on the spot then. The thread works on shapes alone:
it holds no array and never waits for the device. A wrong prediction costs a compilation, never a wrong result.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxsok import checks
from jaxsok.annotations import annotated
from jaxsok.grow import LOOK_EVERY, GrowthTracker, free_bytes, next_capacity
from jaxsok.host_limits import HostLimit, share_of_device
from jaxsok.settings import current_settings, in_settings
from jaxsok.shards import HOST_KIND, host_place
from jaxsok.specs import StoreSpec
from jaxsok.store import Slab, State, StoreState, capacities_of, num_buckets_of, with_slab

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Program:
    """A compiled step, or one that is being compiled."""

    capacities: tuple[int, ...]
    is_ahead: bool
    compiled: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
    seconds: float = 0.0


class Ahead:
    """A jitted step that has its program for the next capacity compiled ahead; `Collection.ahead` makes it."""

    num_compiled: int
    """Programs compiled on the spot: each held a call up for all of its compilation."""
    num_ahead: int
    """Programs compiled in the background."""
    num_hits_ahead: int
    """Programs compiled in the background that a call then used."""
    stalls_s: list[float]
    """Seconds that the first call of each program waited for it."""

    def __init__(self, step: Any, specs: Sequence[StoreSpec], tracker: GrowthTracker, state_argnum: int):
        if not isinstance(step, jax.stages.Wrapped):
            raise TypeError(
                f"ahead: step: got {_described(step)}, which has no .lower, wanted a jitted function: "
                "collection.ahead(jax.jit(step, donate_argnums=0))."
            )
        self.num_compiled = self.num_ahead = self.num_hits_ahead = 0
        self.stalls_s = []
        self._step = step
        self._specs = tuple(specs)
        self._tracker = tracker
        self._state_argnum = checks.integer("ahead: state_argnum", state_argnum, 0)
        self._programs: dict[Any, _Program] = {}
        self._ready: dict[Any, jax.stages.Compiled] = {}  # the programs that were called
        self._failed: list[tuple[_Program, BaseException]] = []
        self._thread: threading.Thread | None = None
        self._looked: dict[Any, int] = {}

    def __call__(self, *args, **kwargs):
        """Calls the step's program for these arguments, compiled on the spot if there is none."""
        settings = current_settings()
        # Inside a trace there is no program to call; a compiled one cannot run operation by operation.
        is_debugging = jax.config.jax_disable_jit or jax.debug_nans.value or jax.debug_infs.value
        if settings is None or is_debugging:
            return self._step(*args, **kwargs)
        state = self._state_of(args)
        self._warn_of_failures()
        leaves, tree = jax.tree.flatten((args, kwargs))
        signature = _signature(leaves, tree, settings)
        compiled = self._ready.get(signature)
        if compiled is None:
            compiled = self._first_call(signature, args, kwargs)
        # Shapes are taken down before the call, which may delete the arrays, and the thread starts after it, so that
        # tracing does not compete with dispatching.
        job = self._next_job(signature, state, args, kwargs, settings)
        results = compiled(*args, **kwargs)
        if job is not None:
            self._start(*job)
        return results

    def wait(self) -> None:
        """Waits for the compilation in the background, if there is one."""
        if self._thread is not None:
            self._thread.join()

    # What a call needs

    def _state_of(self, args: tuple) -> State:
        place = self._state_argnum
        if place >= len(args) or not isinstance(args[place], State):
            got = _described(args[place]) if place < len(args) else f"{len(args)} positional arguments"
            raise TypeError(
                f"ahead: state: got {got}, wanted the State as positional argument {place}; say with state_argnum "
                "which one it is."
            )
        return args[place]

    def _first_call(self, signature: Any, args: tuple, kwargs: dict) -> jax.stages.Compiled:
        """Waits for the program of a signature that was never called, or compiles it."""
        start = time.perf_counter()
        capacities = capacities_of(args[self._state_argnum])
        mine = _Program(capacities, is_ahead=False)
        program = self._programs.setdefault(signature, mine)
        if program is not mine and program.compiled.exception() is not None:  # waits if it is under way
            program = self._programs[signature] = mine
        if program is mine:
            try:
                self._compile(mine, args, kwargs)
            except BaseException:
                self._programs.pop(signature, None)  # its traceback holds the arguments
                raise
        compiled = self._ready[signature] = program.compiled.result()
        self.stalls_s.append(time.perf_counter() - start)
        self.num_hits_ahead += program.is_ahead
        _log.info(
            "ahead: program %d, for capacities %s, compiled in %.2f s %s; the call waited %.2f s",
            len(self.stalls_s),
            list(capacities),
            program.seconds,
            "in the background" if program.is_ahead else "on the spot",
            self.stalls_s[-1],
        )
        return compiled

    @annotated("jaxsok.ahead")
    def _compile(self, program: _Program, args: tuple, kwargs: dict) -> None:
        """Compiles for arrays or shapes; calls that wait for the program get it, or the error."""
        start = time.perf_counter()
        try:
            compiled = self._step.lower(*args, **kwargs).compile()
            if compiled.in_tree != jax.tree.structure((args, kwargs)):
                raise TypeError(
                    f"ahead: step: got static arguments (its program takes {compiled.in_tree}), wanted none; bind "
                    "them before jax.jit, with functools.partial or a closure."
                )
        except BaseException as error:
            program.compiled.set_exception(error)
            raise
        program.seconds = time.perf_counter() - start
        self.num_ahead += program.is_ahead
        self.num_compiled += not program.is_ahead
        program.compiled.set_result(compiled)

    # What happens ahead

    def _next_job(self, signature: Any, state: State, args: tuple, kwargs: dict, settings: tuple) -> tuple | None:
        """Chooses what the thread compiles next; None: it is at work, no store fills up, or every program is there."""
        if self._thread is not None and self._thread.is_alive():
            return None
        filling = self._filling(state)
        look, turn = (signature, tuple(filling)), self._tracker.num_calls // LOOK_EVERY
        if not filling or self._looked.get(look) == turn:  # a look asks for free memory, which may have changed
            return None
        abstract_args, abstract_kwargs = jax.tree.map(_abstract, (args, kwargs))
        place = self._state_argnum
        for grown in self._futures(abstract_args[place], filling):
            future_args = (*abstract_args[:place], grown, *abstract_args[place + 1 :])
            leaves, tree = jax.tree.flatten((future_args, abstract_kwargs))
            future_signature = _signature(leaves, tree, settings)
            if future_signature not in self._programs:
                return future_signature, future_args, abstract_kwargs, settings
        self._looked[look] = turn
        return None

    def _filling(self, state: State) -> dict[int, int]:
        """Returns the rows that each store more than half full may need soon, by its number; fullest store first."""
        tracker, capacities = self._tracker, capacities_of(state)
        if tracker.signature != capacities:  # not the state that `grow` knows
            return {}
        needed = {}
        for s, capacity in enumerate(capacities):
            capacity //= self._specs[s].num_shards
            reserve, known, bound = tracker.coming[s], tracker.known[s], tracker.bound(s)
            # By the rows last seen: the bound passes the half of every large store now and then, until `grow`, which
            # then asks for newer counters, has them.
            if known is not None and bound is not None and reserve and 2 * (known[0] + reserve) > capacity:
                needed[s] = min(bound + reserve, capacity) + reserve  # the step under way, and the one after growth
        return dict(sorted(needed.items(), key=lambda item: -item[1] / capacities[item[0]]))

    def _futures(self, state: State, filling: dict[int, int]) -> Iterator[State]:
        """Yields states that growth may make next: the fullest store grown, the two fullest together, and so on."""
        stores = list(state.stores)
        for s, needed in filling.items():
            num_shards = self._specs[s].num_shards
            old = stores[s].capacity // num_shards
            capacity = next_capacity(self._specs[s], old, needed, *self._free(self._specs[s]))
            if capacity > old and len(stores[s].rows) < self._specs[s].max_slabs:
                stores[s] = _grown(stores[s], num_shards, capacity)
                yield dataclasses.replace(state, stores=tuple(stores))

    def _free(self, spec: StoreSpec) -> tuple[int | None, HostLimit | None]:
        """Guesses the free bytes by which `grow` will decide, on the device and in host memory."""
        host_share = share_of_device(self._tracker.shards, is_agreed=False) if spec.memory is not None else None
        return free_bytes(), host_share

    def _start(self, signature: Any, args: tuple, kwargs: dict, settings: tuple) -> None:
        program = _Program(capacities_of(args[self._state_argnum]), is_ahead=True)
        if self._programs.setdefault(signature, program) is not program:
            return
        # Not a daemon: at its end the interpreter waits for the thread. A daemon would come back from XLA into an
        # interpreter that is gone, which aborts the process (seen with jax 0.10.2 and 0.12.0.1).
        self._thread = threading.Thread(
            target=self._compile_ahead, args=(program, args, kwargs, settings), name="jaxsok.ahead", daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is at its end
            self._thread = None
            program.compiled.set_exception(error)
            self._failed.append((program, error))

    def _compile_ahead(self, program: _Program, args: tuple, kwargs: dict, settings: tuple) -> None:
        try:
            with in_settings(settings):
                self._compile(program, args, kwargs)
        except BaseException as error:  # what a thread raises is not seen: the next call warns of it
            if not program.compiled.done():  # a call may be waiting
                program.compiled.set_exception(error)
            self._failed.append((program, error))

    def _warn_of_failures(self) -> None:
        while self._failed:
            program, error = self._failed.pop(0)
            warnings.warn(
                f"ahead: step: the program for capacities {list(program.capacities)} did not compile in the "
                f"background ({type(error).__name__}: {error}); it is compiled where it is first called.",
                RuntimeWarning,
                stacklevel=3,
            )


# Shapes ---------------------------------------------------------------------------------------------------------------


def _signature(leaves: Sequence[Any], tree: Any, settings: tuple) -> Any:
    """Returns what a program depends on: structure, shapes, dtypes, places and settings."""
    types, places = [], []
    for leaf in leaves:
        aval, place = _type_and_place(leaf)
        types.append((aval.shape, aval.dtype, aval.weak_type))
        places.append(place)
    # On one device it does not matter which arrays were put there and which only came to lie there. A new slab is of
    # the second kind until the step returns it as the first: without this, growth would compile twice.
    chosen = {place for place in places if place is not None}
    devices = {device for place in chosen for device in place.device_set}
    where = None
    if len(devices) == 1:
        usual = next(iter(devices)).default_memory().kind
        where = *devices, *(usual if place is None else place.memory_kind for place in places)
    return tree, settings, tuple(types), (where or tuple(places)) if chosen else None


def _type_and_place(leaf: Any) -> tuple[Any, Any]:
    """Returns shape, dtype and weak type, and the sharding of an array that was put somewhere (None: it may move)."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf, leaf.sharding
    aval = getattr(leaf, "aval", None)  # what jax.typeof gives, in a tenth of the time
    if aval is not None:
        return aval, leaf.sharding if getattr(leaf, "committed", False) else None
    try:
        return jax.typeof(leaf), None
    except TypeError:
        raise TypeError(
            f"ahead: step: an argument: got {_described(leaf)}, wanted arrays and numbers alone; bind static arguments "
            "before jax.jit, with functools.partial or a closure."
        ) from None


def _abstract(leaf: Any) -> Any:
    """Removes an argument's contents. Numbers stay: JAX treats them in a way of its own."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf
    aval, place = _type_and_place(leaf)
    if isinstance(place, SingleDeviceSharding) and place.memory_kind == HOST_KIND:
        place = host_place(*place.device_set)  # of another place JAX believes, without an array, that it is the device
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=place)


def _grown(store: StoreState, num_shards: int, capacity: int) -> StoreState:
    """Returns the shapes of a store after `grow`: one more slab, another index; `capacity` is that of a shard."""

    def resize(leaf: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
        return leaf.update(shape=(size, *leaf.shape[1:]))

    first = Slab(
        store.rows[:1],
        store.records[0],
        tuple(slabs[0] for slabs in store.states),
        store.statistics[:1],
        store.tier[0].places[:1] if store.tier else (),
    )
    slab = jax.tree.map(lambda leaf: resize(leaf, num_shards * capacity - store.capacity), first)
    index = resize(store.index, num_shards * num_buckets_of(capacity))
    return dataclasses.replace(with_slab(store, slab), index=index)


def _described(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__
