"""Slabs of rows in host memory: records of bytes, one for each row, that kernels of a device read and write.

They are made outside of programs, beside the arrays of a slab that lie on the device. On a CPU they are ordinary
arrays.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsok.specs import StoreSpec
from jaxsok.store import Slab, StoreState, host_row_bytes


def with_host_slabs(specs: Sequence[StoreSpec], stores: Sequence[StoreState]) -> tuple[StoreState, ...]:
    """Gives new stores whose rows lie in host memory their first host slabs."""
    return tuple(
        store if spec.memory is None else dataclasses.replace(store, rows=(_new_host_slab(spec, store.records[0]),))
        for spec, store in zip(specs, stores, strict=True)
    )


def with_host_slab(spec: StoreSpec, slab: Slab) -> Slab:
    """Completes a new slab: with a host slab, where rows lie in host memory."""
    return slab if spec.memory is None else slab._replace(rows=(_new_host_slab(spec, slab.records),))


def _new_host_slab(spec: StoreSpec, records: Array) -> Array:
    """Makes the host slab for the rows of new records, on their devices and split as they are."""
    shape = (records.shape[0], host_row_bytes(spec))
    place = records.sharding if records.committed else None
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=place)(shape, "uint8")
