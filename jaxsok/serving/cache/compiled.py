"""The programs of one device cache (programs.py), compiled before they are called, while its lock is free."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok.serving.cache import programs
from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTables
from jaxsok.serving.padding import padded_size
from jaxsok.serving.ready import Form, Ready
from jaxsok.store import num_buckets_of
from jaxsok.types import BUCKET_WORDS, COUNTERS

LEAST_KEYS = 256  # keys of the smallest programs; others have powers of two, so that programs are few

_MOST_PADDING = 4  # a lookup is padded to this many times its keys at most, while its own program is compiled,
_FEW_KEYS = 1 << 14  # or to this many in all: they cost a few milliseconds

Sizes = tuple[int, ...]  # keys of each store

_PROGRAMS = dict(vars(programs))


class CompiledPrograms:
    """The compiled programs of a cache, by a function of programs.py and the sizes that `_operands` takes."""

    def __init__(self, spec: FrozenSpec, layout: programs.Layout, stores: Sequence[programs.CacheStore]) -> None:
        self._spec, self._layout = spec, layout
        self._forms = Form(tuple(stores)).tree
        self._place = self._forms[0].index.sharding
        self._ready: Ready[tuple[Any, ...]] = Ready(self._compile)
        self.background = self._ready.background
        self.query_sizes: set[Sizes] = set()  # for which the query of `lookup` is compiled; only grows

    def has(self, name: str, *sizes: Any) -> bool:
        return self._ready.has(None, (name, *sizes))

    def make(self, name: str, *sizes: Any) -> None:
        self._ready.need(None, (name, *sizes))

    def _compile(self, _: None, program: tuple[Any, ...]) -> None:
        name, *sizes = program
        _PROGRAMS[name].lower(*self._operands(name, *sizes)).compile()
        if name == "query" and sizes[0]:
            self.query_sizes.add(sizes[1])

    def _operands(self, name: str, of: Any, *sizes: Any) -> tuple[Any, ...]:
        """Describes a program's operands, which are neither read nor donated; `of` is a store, but of a query."""
        if name == "query":  # of `lookup`, which gives each position its row, or of `lookup_tables`
            statistics = tuple(form.statistics for form in self._forms)
            stores = tuple((form.index, form.counters, form.slabs) for form in self._forms)
            batches = tuple(map(self._keys, *sizes))
            return self._layout, of, statistics, stores, batches, np.uint32(0), np.zeros(2, np.uint32)
        form = self._forms[of]
        match name, sizes:
            case "insert", (must_leave, size):
                return must_leave, form, *self._keys(size), self._lines(of, size), np.uint32(0)
            case "overwrite", (size,):
                return form, *self._keys(size), self._lines(of, size)
            case "drop", (size,):
                return form, *self._keys(size)
            case "find", (size,):
                return form.index, form.counters, *self._keys(size)
            case "copy", (field,):
                return (getattr(form, field),)
            case "merge", (num_rows, num_lines):  # of fetched rows into those of a lookup
                return self._slabs(of, num_rows), self._shape((num_rows,), np.int32), self._slabs(of, num_lines)
        (num_rows,) = sizes  # "hide"
        return self._index(num_rows), self._shape((num_rows,), np.bool_)

    def choose_sizes(self, least: Sizes) -> Sizes:
        """Chooses the sizes of a lookup: the least, or while those are compiled a query that is not much larger."""
        if least in self.query_sizes:
            return least
        most = max(_MOST_PADDING * sum(least), _FEW_KEYS)
        larger = [
            sizes
            for sizes in tuple(self.query_sizes)
            if sum(sizes) <= most and all(a >= b for a, b in zip(sizes, least, strict=True))
        ]
        if not larger:
            return least
        self._ready.make_in_background(None, ("query", True, least))
        return min(larger, key=lambda sizes: (sum(sizes), sizes))

    def warm_up(self, sizes: Sequence[Sequence[int]], capacities: Sequence[int], *, as_tables: bool) -> None:
        """Compiles lookups of these numbers of keys by store, and the insertion of their misses."""
        for of_store in sizes:
            padded = tuple(padded_size(count, LEAST_KEYS) for count in of_store)
            self.make("query", not as_tables, padded)
            for s, size in enumerate(padded) if as_tables else ():
                if self._spec.stores[s][0].is_quantized:
                    self.make("hide", s, size)
                for step in range((size // LEAST_KEYS).bit_length()):
                    self.make("merge", s, size, LEAST_KEYS << step)
        for s, most in enumerate(map(max, zip(*sizes, strict=True))):
            last = padded_size(min(most, capacities[s]), LEAST_KEYS)
            for step in range((last // LEAST_KEYS).bit_length() if most else 0):
                for must_leave in (False, True):
                    self.make("insert", s, must_leave, LEAST_KEYS << step)

    def tables_like(self, sizes: Sequence[int]) -> FrozenTables:
        """Describes the result of `lookup_tables` for these numbers of keys by store, as shapes."""
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

    def _lines(self, s: int, size: int) -> tuple[Any, ...]:
        return tuple(self._shape((size, slab.shape[1]), slab.dtype) for slab in self._forms[s].slabs)

    def _keys(self, size: int) -> tuple[Any, Any]:
        return self._shape((size, 2), np.uint32), self._shape((size,), np.uint32)

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)
