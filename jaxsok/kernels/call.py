"""Calls an FFI target: operands and results by name, some operands returned in their buffers.

ffi/handlers/call.h reads a call in the same order: first the operands; then, as results, the operands that come back,
and new arrays. The arrays of a store come first, in the order of `STORE_ARRAYS`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, UInt32

from jaxsok.kernels import library
from jaxsok.types import Counters

# Slabs of one array differ in capacity. Rows are float32, bfloat16 or float16; optimizer state is as wide as its row
# or 1.
Slab = Float[Array, "_ dim"]
StateSlab = Float32[Array, "_ _"]
RecordSlab = UInt32[Array, "_ 4"]
StatisticsSlab = UInt32[Array, "_ 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoreArrays:
    """The arrays of a store that kernels read and write. Doors take them and return them, some of them changed."""

    index: UInt32[Array, "num_buckets 16"]
    """(table, key) → row id: 64-byte buckets of four entries, whose order is not deterministic on a GPU."""
    counters: Counters
    """See `jaxsok.types.COUNTERS`."""
    table_rows: UInt32[Array, " num_tables"]
    rows: tuple[Slab, ...]
    """Rows in the dtype of the tables."""
    records: tuple[RecordSlab, ...]
    """(table, key) of each row: key low, key high, table, and one entry of the list of freed rows."""
    states: tuple[tuple[StateSlab, ...], ...] = ()
    """Optimizer state, in the order of the optimizer's `state_specs`."""
    statistics: tuple[StatisticsSlab, ...] = ()
    """Last step and frequency of each row, in slabs as the rows; empty if no table keeps them."""
    sightings: tuple[UInt32[Array, "_ 16"], ...] = ()
    """One array if a table admits by count: (table, key) → occurrences so far, in buckets as the index."""
    bloom: tuple[UInt32[Array, " _"], ...] = ()
    """One array if a table admits by Bloom filter: counters of one byte, four in a word."""
    table_evicted: tuple[UInt32[Array, " num_tables"], ...] = ()
    """One array: the evicted rows of each table to date, modulo 2**32; empty if no table has a policy."""


STORE_ARRAYS = tuple(field.name for field in dataclasses.fields(StoreArrays))
"""`StoreArray` in ffi/handlers/buffers.h."""

Store = TypeVar("Store", bound=StoreArrays)


def result(like: Array, shape: tuple[Any, ...], dtype: Any) -> Any:
    """Makes a result type that varies over the mesh as `like` does."""
    return jax.typeof(like).update(shape=shape, dtype=np.dtype(dtype))


def workspace(like: Array, size_of: str, *sizes: int) -> Any:
    """Makes the type of a workspace; a function of the library gives its size."""
    return result(like, (getattr(library.register(), size_of)(*sizes),), "uint8")


def call(
    target: str,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    in_place: Collection[str] = (),
    **attributes: Any,
) -> dict[str, Any]:
    """Calls one of `library.TARGETS`; returns the operands that come back and the results, by name.

    Operands and results are arrays, types, and trees of them, in the order in which the handler reads them. Operands in
    `in_place` are donated, and come back in their buffers. Attributes are numbers and NumPy arrays.
    """
    library.register()
    types = {name: jax.tree.map(jax.typeof, operands[name]) for name in operands if name in in_place} | dict(results)
    leaves, structure = jax.tree.flatten(tuple(types.values()))
    aliases: dict[int, int] = {}
    position = 0
    for name, operand in operands.items():
        size = len(jax.tree.leaves(operand))
        if name in in_place:
            aliases |= {position + i: len(aliases) + i for i in range(size)}
        position += size
    numbers = {name: np.int32(value) if isinstance(value, int) else value for name, value in attributes.items()}
    run = jax.ffi.ffi_call(target, leaves, input_output_aliases=aliases)
    out = run(*jax.tree.leaves(tuple(operands.values())), **numbers)
    return dict(zip(types, jax.tree.unflatten(structure, out), strict=True))


def call_on(
    target: str,
    arrays: Mapping[str, Any],
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    in_place: Collection[str] = (),
    **attributes: Any,
) -> dict[str, Any]:
    """Does `call` for a handler that reads arrays of a store, by name (`ReadStore` in ffi/handlers/buffers.h)."""
    ordered = {name: arrays[name] for name in STORE_ARRAYS if name in arrays}
    counts = [len(jax.tree.leaves(arrays.get(name, ()))) for name in STORE_ARRAYS]
    bits = sum(1 << STORE_ARRAYS.index(name) for name in in_place)
    layout = {"store": np.array(counts, np.int32), "store_in_place": bits}
    return call(target, ordered | dict(operands), results, in_place=in_place, **layout, **attributes)


def call_on_store(
    target: str,
    store: Store,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    reads: Collection[str] = (),
    changes: Collection[str] = (),
    **attributes: Any,
) -> tuple[Store, dict[str, Any]]:
    """Does `call_on` with the arrays that a handler reads and changes; returns the new store, and the results."""
    arrays = {name: getattr(store, name) for name in (*reads, *changes)}
    out = call_on(target, arrays, operands, results, in_place=changes, **attributes)
    changed = {name: out.pop(name) for name in changes}
    return dataclasses.replace(store, **changed), out
