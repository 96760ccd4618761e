"""Programs of a model, compiled before they are needed: by whoever asks first, and for a new version by its update.

A program is told from others by what a request decides: sizes. Where it is compiled is what a version decides: the
sizes of its tables (`Form`), its dense model. Who compiles holds up nobody who needs no program.
"""

import collections
import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

import jax

Program = TypeVar("Program", bound=Hashable)

MOST_USED = 64
"""Programs that an update compiles for the new version, at most: those that were called last."""


class Ready(Generic[Program]):
    """Which programs are compiled where, and which were called last.

    Example:
      >>> made = []
      >>> ready = Ready(lambda where, program: made.append((where, program)))
      >>> for program in ("a", "b", "a"):
      ...     ready.make("8 rows", program)
      >>> made, ready.has("8 rows", "a"), ready.has("9 rows", "b")
      ([('8 rows', 'a'), ('8 rows', 'b')], True, False)
      >>> ready.used()
      ['a', 'b']
    """

    def __init__(self, compile: Callable[[Any, Program], None]) -> None:
        """Of none; `compile(where, program)` makes one, so that calling it compiles nothing."""
        self._compile = compile
        self._made: dict[Any, set[Program]] = {}
        self._used: collections.OrderedDict[Program, None] = collections.OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def has(self, where: Any, program: Program) -> bool:
        """Whether it is compiled; who asks is about to call it."""
        with self._lock:
            self._used[program] = None
            self._used.move_to_end(program)
            while len(self._used) > MOST_USED:
                self._used.popitem(last=False)
            return program in self._made.get(where, ())

    def make(self, where: Any, program: Program) -> None:
        """Compiles it, unless it is."""
        if self._is_made(where, program):
            return
        with self._compiling:
            if not self._is_made(where, program):
                self._compile(where, program)
                with self._lock:
                    self._made.setdefault(where, set()).add(program)

    def used(self) -> list[Program]:
        """Those that were called, the last `MOST_USED` of them; the latest last."""
        with self._lock:
            return list(self._used)

    def keep(self, places: Collection[Any]) -> None:
        """Forgets what is compiled elsewhere: nobody will call it."""
        with self._lock:
            self._made = {where: made for where, made in self._made.items() if where in places}

    def _is_made(self, where: Any, program: Program) -> bool:
        with self._lock:
            return program in self._made.get(where, ())


class Form:
    """Shapes and places of the arrays of a pytree, as a value: a program is compiled for each.

    Example:
      >>> import numpy as np
      >>> one, other = (Form(jax.device_put(np.zeros(size))) for size in (3, 4))
      >>> one == other, one == Form(jax.device_put(np.ones(3))), one.tree.shape
      (False, True, (3,))
    """

    def __init__(self, tree: Any) -> None:
        """Of arrays, or of `jax.ShapeDtypeStruct`."""
        self.tree = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), tree)
        leaves, structure = jax.tree.flatten(self.tree)
        self._key = structure, tuple((one.shape, one.dtype, one.sharding) for one in leaves)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        """Of the shapes."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether all are equal."""
        return isinstance(other, Form) and (self is other or self._key == other._key)
