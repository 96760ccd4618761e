"""The programs of one device cache (programs.py), compiled before they are called, while its lock is free."""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok.serving.cache import programs
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTables
from jaxsok.serving.padding import padded_size
from jaxsok.serving.ready import Beside
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, COUNTERS

LEAST_KEYS = 256  # keys of the smallest programs; others have powers of two, so that programs are few

_MOST_PADDING = 4  # a lookup is padded to so many times its keys at most, while its own program is compiled,
_FEW_KEYS = 1 << 14  # or to so many in all: they cost a few milliseconds

Sizes = tuple[int, ...]  # keys of each store

_NAMES = ("query", "insert", "merged", "hidden", "find", "copied", "overwrite", "drop", "emptied")
_PROGRAMS = {name: getattr(programs, name) for name in _NAMES}


class CompiledPrograms:
    """Knows which programs of a cache are compiled. Its methods compile one unless it is; JAX keeps what that makes."""

    def __init__(self, spec: FrozenSpec, layout: programs.Layout, stores: Sequence[programs.CacheStore]) -> None:
        self._spec, self._layout = spec, layout
        self.forms = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tuple(stores)
        )
        self._place = self.forms[0].index.sharding
        self._lock = threading.Lock()
        # Both grow under `_lock`, which is held while a program is compiled; what is in them is compiled.
        self._made: set[tuple[Any, ...]] = set()
        self.query_sizes: frozenset[Sizes] = frozenset()
        """Sizes for which the query of `lookup` is compiled."""
        self.beside = Beside()

    def make(self, key: tuple[Any, ...], *operands: Any) -> None:
        """Compiles a program for operands like these (or their shapes), which are neither read nor donated.

        `key` begins with the program's name, and tells its operands apart.
        """
        if key in self._made:
            return
        with self._lock:
            if key not in self._made:
                _PROGRAMS[key[0]].lower(*operands).compile()
                self._made.add(key)

    def query(self, is_expanded: bool, sizes: Sizes) -> None:
        """Compiles the query of `lookup`, which gives each position its row, or of `lookup_tables`."""
        self.make(
            ("query", is_expanded, sizes),
            self._layout,
            is_expanded,
            tuple(form.statistics for form in self.forms),
            tuple((form.index, form.counters, form.slabs) for form in self.forms),
            tuple(self._keys(size) for size in sizes),
            np.uint32(0),
            np.zeros(2, np.uint32),
        )
        if is_expanded and sizes not in self.query_sizes:
            with self._lock:
                self.query_sizes |= {sizes}

    def padded_sizes(self, least: Sizes) -> Sizes:
        """The sizes to pad a lookup to: those of a compiled query that is not much larger, else the least.

        In the first case the query of the least sizes is compiled in the background.
        """
        if least in self.query_sizes:
            return least
        most = max(_MOST_PADDING * sum(least), _FEW_KEYS)
        larger = [
            sizes
            for sizes in self.query_sizes
            if sum(sizes) <= most and all(a >= b for a, b in zip(sizes, least, strict=True))
        ]
        if not larger:
            return least
        self.beside.offer(least, functools.partial(self.query, True, least))
        return min(larger, key=lambda sizes: (sum(sizes), sizes))

    def insert(self, s: int, must_leave: bool, size: int) -> None:
        """Compiles an insertion of so many rows into a store, with room or without."""
        lines = tuple(self._shape((size, slab.shape[1]), slab.dtype) for slab in self.forms[s].slabs)
        key = ("insert", s, must_leave, size)
        self.make(key, must_leave, self.forms[s], *self._keys(size), lines, np.uint32(0))

    def has_insert(self, s: int, must_leave: bool, size: int) -> bool:
        return ("insert", s, must_leave, size) in self._made

    def merge(self, s: int, num_rows: int, num_lines: int) -> None:
        """Compiles the merge of fetched rows into those of a lookup."""
        slots = self._shape((num_rows,), np.int32)
        self.make(("merged", s, num_rows, num_lines), self._slabs(s, num_rows), slots, self._slabs(s, num_lines))

    def hide(self, s: int, num_rows: int) -> None:
        """Compiles hiding rows from an index."""
        self.make(("hidden", s, num_rows), self._index(num_rows), self._shape((num_rows,), np.bool_))

    def warm_up(self, sizes: Sequence[Sequence[int]], capacities: Sequence[int], *, as_tables: bool) -> None:
        """Compiles lookups of so many keys of each store, and the insertion of their misses."""
        for of_store in sizes:
            padded = tuple(padded_size(count, LEAST_KEYS) for count in of_store)
            self.query(not as_tables, padded)
            for s, size in enumerate(padded) if as_tables else ():
                if self._spec.stores[s][0].is_quantized:
                    self.hide(s, size)
                for step in range((size // LEAST_KEYS).bit_length()):
                    self.merge(s, size, LEAST_KEYS << step)
        for s, most in enumerate(map(max, zip(*sizes, strict=True))):
            size, last = LEAST_KEYS, padded_size(min(most, capacities[s]), LEAST_KEYS)
            while most and size <= last:
                for must_leave in (False, True):
                    self.insert(s, must_leave, size)
                size *= 2

    def tables_like(self, sizes: Sequence[int]) -> FrozenTables:
        """What `lookup_tables` gives for so many keys of each store, as shapes without arrays."""
        stores = []
        for s, count in enumerate(sizes):
            size = padded_size(count, LEAST_KEYS)
            rows, *scales = self._slabs(s, size)
            rows = self._shape(rows.shape, jnp.dtype(self._spec.stores[s][0].dtype))
            counters = self._shape((len(COUNTERS),), np.uint32)
            stores.append(FrozenStore(self._index(size), counters, rows, tuple(scales)))
        return FrozenTables(tuple(stores), self._spec)

    def _index(self, num_rows: int) -> Any:
        return self._shape((num_buckets_of(num_rows), BUCKET_WORDS), np.uint32)

    def _slabs(self, s: int, size: int) -> tuple[Any, ...]:
        table = self._spec.stores[s][0]
        if not table.is_quantized:
            return (self._shape((size, table.dim), np.float32),)
        return self._shape((size, table.dim), jnp.dtype(table.dtype)), self._shape((size,), np.float32)

    def _keys(self, size: int) -> tuple[Any, Any]:
        """The shapes of words and table ids."""
        return self._shape((size, 2), np.uint32), self._shape((size,), np.uint32)

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)
