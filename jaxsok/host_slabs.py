"""Slabs of rows in host memory: records of bytes, one for each row, that kernels of a device read and write.

They are made outside of programs, as the arrays of a slab on the device are. For GPUs they are pinned memory of the
library's own (ffi/kernels/host_memory.h), of JAX's memory kind `pinned_host`; on a CPU they are ordinary arrays.
"""

import contextlib
import ctypes
import dataclasses
import resource
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxsok.host_limits import limits
from jaxsok.kernels.host_memory import HostBytes
from jaxsok.shards import HOST_KIND, Shards, mark_host_memory
from jaxsok.specs import StoreSpec
from jaxsok.store import Slab, StoreState, host_row_bytes


def with_host_slabs(specs: Sequence[StoreSpec], stores: Sequence[StoreState], shards: Shards) -> tuple[StoreState, ...]:
    """Gives new stores whose rows lie in host memory their first host slabs. MemoryError: the system gives no more."""
    return tuple(
        dataclasses.replace(store, rows=(_new_host_slab(spec, store.records[0], shards),)) if spec.memory else store
        for spec, store in zip(specs, stores, strict=True)
    )


def with_host_slab(spec: StoreSpec, slab: Slab, shards: Shards) -> Slab:
    """Completes a new slab: with a host slab, where rows lie in host memory. MemoryError: the system gives no more."""
    return commit_to_device(slab._replace(rows=(_new_host_slab(spec, slab.records, shards),))) if spec.memory else slab


def commit_to_device(tree: Any) -> Any:
    """Commits all arrays to their device if one is a pinned host slab; otherwise every step would compile twice."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, jax.core.Tracer)]
    devices = {device for leaf in leaves if leaf.sharding.memory_kind == HOST_KIND for device in leaf.devices()}
    if len(devices) != 1:  # on a mesh they are
        return tree
    (device,) = devices
    return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, device), tree)


def _new_host_slab(spec: StoreSpec, records: Array, shards: Shards) -> Array:
    """Makes the host slab for the rows of new records, on their devices and split as they are."""
    shape = (records.shape[0], host_row_bytes(spec))
    if not _is_pinned(records):
        with _as_memory_error(*shape):
            return shards.make(_zeros, *shape)
    if isinstance(records, jax.core.Tracer):  # in a program there is only XLA's own pool
        return jax.device_put(shards.make(_zeros, *shape), jax.memory.Space.Host)
    parts = [_allocate_pinned(part.device, (part.data.shape[0], shape[1])) for part in records.addressable_shards]
    if not shards.is_mesh:
        return mark_host_memory(*parts)
    return jax.make_array_from_single_device_arrays(shape, records.sharding.with_memory_kind(HOST_KIND), parts)


def new_host_rows(device: Any, num_rows: int, width: int) -> Array:
    """Makes zeros, uint8[num_rows, width], in host memory that a device reads and writes; MemoryError: no room."""
    if device.platform == "cpu":
        with _as_memory_error(num_rows, width):
            return jax.device_put(_zeros(num_rows, width), device)
    return mark_host_memory(_allocate_pinned(device, (num_rows, width)))


def bytes_of(slab: Array) -> np.ndarray:
    """Gives the bytes of an array of `new_host_rows` where they lie, once what writes them is done; copies nothing."""
    pointer = ctypes.cast(jax.block_until_ready(slab).unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, slab.shape)


def _zeros(num_rows: int, width: int) -> Array:
    return jnp.zeros((num_rows, width), jnp.uint8)


@contextlib.contextmanager
def _as_memory_error(num_rows: int, width: int) -> Iterator[None]:
    """Raises what XLA says where a CPU has no memory as the error of a GPU's host memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"host memory: got {num_rows * width} bytes ({num_rows} rows of {width}), wanted what the system gives: "
            f"{str(error).rstrip('.')}. Ask for fewer rows, or raise the limit (ulimit -v)."
        ) from error


def _is_pinned(records: Array) -> bool:
    """Returns whether the devices of new records, or those of a program, need host memory to be pinned."""
    is_traced = isinstance(records, jax.core.Tracer)
    return (jax.default_backend() if is_traced else next(iter(records.devices())).platform) != "cpu"


def _allocate_pinned(device: Any, shape: tuple[int, int]) -> Array:
    try:
        return jax.dlpack.from_dlpack(HostBytes(device.platform, device.local_hardware_id, *shape))
    except RuntimeError as error:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        available = "; ".join(f"{limit.name}: {limit.num_bytes} bytes" for limit in limits())
        raise MemoryError(
            f"host memory: got {shape[0] * shape[1]} bytes ({shape[0]} rows of {shape[1]}) for {device}, wanted what "
            f"the system gives and the driver pins: {error}. Available are {available or 'unknown numbers of bytes'}; "
            f"RLIMIT_MEMLOCK: {'no limit' if locked == resource.RLIM_INFINITY else f'{locked} bytes'}. Ask for "
            "fewer rows, or raise the limit (ulimit -l)."
        ) from error
