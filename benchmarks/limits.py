"""The lower bounds: what the work must move, and how fast this device moves it, measured in the same run.

The *bytes* of a step over the bandwidth of a large device copy: no version can be faster, and none comes near it if
rows are short, since memory is read in sectors. The *bare gather* of the same rows (no keys, no index: row ids given)
is the limit of a forward. *Read-modify-write* of the same unique rows with a streamed gradient, after a bare gather,
is the limit of a step.

A *line, then the row* is no lower bound, but a plain kernel to compare with: the cost of a table that reads one line
of an index for each key and then the row, in the simplest code.

A limit is only as good as the code that measures it. XLA's gather is one method; on a GPU with CuPy, a plain CUDA
kernel (`cuda_kernels.py`) is another. The faster method is the limit, and the record names it; without CuPy, the run
reports that its limits are XLA's.

Fed by the rows of the workload; feeds `records.py`. Not here: peers, which do more than a limit does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from . import cuda_kernels
from .timing import Protocol, Step, Timing

KEY_BYTES = 8
ROW_ID_BYTES = 4
INDEX_LINE_BYTES = 64
"""Bytes of one bucket: at load 0.5 a probe run is about one line long."""
FLOAT_BYTES = 4
SECTOR_BYTES = 32
"""The least that a GPU moves: a 4-byte accumulator costs the sector that it lies in."""

_NUM_COPIED_BYTES = {"cpu": 128 << 20, "gpu": 4 << 30}
"""Several times the last-level cache."""


def forward_bytes(
    num_keys: int, num_unique: int, num_bags: int, dim: int, *, training: bool, itemsize: int = FLOAT_BYTES
) -> int:
    """Returns the bytes that a forward must move.

    Every key is read once (8 B), every unique key's index line (64 B) and row (`itemsize` B a column) once, every
    embedding is written once. A training forward also writes the row id of every key (4 B) for the update.

    Example:
      >>> forward_bytes(num_keys=3, num_unique=2, num_bags=3, dim=64, training=False)  # 24 + 128 + 512 + 768
      1432
    """
    row_bytes = dim * itemsize
    moved = num_keys * KEY_BYTES + num_unique * (INDEX_LINE_BYTES + row_bytes) + num_bags * row_bytes
    return moved + (num_keys * ROW_ID_BYTES if training else 0)


def gather_bytes(num_keys: int, num_unique: int, num_bags: int, dim: int) -> int:
    """Returns the bytes that a bare gather must move: row ids and unique rows in, embeddings out.

    Example:
      >>> gather_bytes(num_keys=3, num_unique=2, num_bags=3, dim=64)  # 12 + 512 + 768
      1292
    """
    row_bytes = dim * FLOAT_BYTES
    return num_keys * ROW_ID_BYTES + (num_unique + num_bags) * row_bytes


def insert_bytes(num_keys: int, dim: int) -> int:
    """Returns the bytes that inserting new keys must move.

    In: the key and its table's number (12 B), the index line (64 B). Out: the line, the record of the row's key (16 B),
    the row id (4 B), and the row.

    Example:
      >>> insert_bytes(num_keys=1, dim=8)  # 12 + 128 + 16 + 4 + 32
      192
    """
    return num_keys * (KEY_BYTES + ROW_ID_BYTES + 2 * INDEX_LINE_BYTES + 16 + ROW_ID_BYTES + dim * FLOAT_BYTES)


def plan_bytes(num_keys: int) -> int:
    """Returns the bytes that a plan must move: keys in (8 B); requests (16 B) and inverse out.

    Example:
      >>> plan_bytes(num_keys=2)
      56
    """
    return num_keys * (KEY_BYTES + KEY_BYTES + 3 * ROW_ID_BYTES)


def update_bytes(
    num_keys: int,
    num_unique: int,
    num_bags: int,
    dim: int,
    state_dims: Sequence[int],
    itemsize: int = FLOAT_BYTES,
) -> int:
    """Returns the bytes of an update: row ids and gradients in, each unique row and its optimizer state in and out.

    Grouping the uses of a row (a sort, say) is not counted: a better way may need less of it. A state narrower than a
    sector counts as one.

    Example:
      >>> update_bytes(num_keys=3, num_unique=2, num_bags=3, dim=64, state_dims=(1,))  # 12 + 768 + 1024 + 128
      1932
    """
    row_bytes = dim * itemsize
    state_bytes = sum(max(width * FLOAT_BYTES, SECTOR_BYTES) for width in state_dims)
    return num_keys * ROW_ID_BYTES + num_bags * row_bytes + num_unique * 2 * (row_bytes + state_bytes)


def copy_gigabytes_per_s(protocol: Protocol) -> tuple[float, Timing]:
    """Returns the bandwidth of a large copy on the device: bytes read plus bytes written."""
    num_bytes = _NUM_COPIED_BYTES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    # Not zeros: a memory system may treat them better than data.
    source = jnp.arange(num_bytes // FLOAT_BYTES, dtype=jnp.float32)
    # In place: on a CPU a fresh buffer costs more than the copy, in page faults.
    step = Step(lambda x, term: (x + term, ()), donates=True)
    timing, _ = step.measure(source, [jnp.float32(1.0)], protocol)
    return 2 * num_bytes / timing.ms * 1e-6, timing


def link_gigabytes_per_s(protocol: Protocol) -> tuple[Timing, Timing, int]:
    """Measures copies between pinned host memory and the device: to the device, to the host, and their bytes.

    On a CPU both are copies in memory.
    """
    num_bytes = _NUM_COPIED_BYTES["cpu" if jax.default_backend() == "cpu" else "gpu"] // 8
    device = jax.devices()[0]
    on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(jnp.arange(num_bytes // FLOAT_BYTES, dtype=jnp.float32), on_device)
    pinned = jax.block_until_ready(jax.device_put(source, on_host))
    timings = []
    for array, place in ((pinned, on_device), (source, on_host)):
        step = Step(lambda carry, place: jax.device_put(carry, place, may_alias=False), donates=False, is_compiled=True)
        timings.append(step.measure(array, [place], protocol)[0])
    return timings[0], timings[1], num_bytes


@functools.partial(jax.jit, static_argnums=0)
def varied_floats(shape: tuple[int, int]) -> jax.Array:
    """Returns floats in [-0.05, 0.05) that look like data and are cheap to make: a function of row and column."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    words = (row * jnp.uint32(0x9E3779B1)) ^ (column * jnp.uint32(0x85EBCA77))
    words = (words ^ (words >> jnp.uint32(15))) * jnp.uint32(0x2C1B3C6D)
    return ((words >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24) - jnp.float32(0.5)) * jnp.float32(0.1)


def gather(table: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol) -> tuple[Timing, str]:
    """Measures the bare gather: rows [num_bags, hotness] of a table into [num_bags, dim], each bag added up.

    Args:
      table: float32 [num_rows, dim].
      row_sets: int32 [num_bags, hotness] in rotation, all of one shape.
      protocol: how often.

    Returns:
      The faster of XLA's gather and the CUDA kernel, and the name of the winner.
    """
    step = Step(lambda table, rows: table.at[rows].get(mode="promise_in_bounds").sum(axis=1), donates=False)

    def by_xla(protocol):
        timing, _ = step.measure(table, row_sets, protocol)
        return timing

    kernels = cuda_kernels.load_kernels(table.shape[1])
    return _faster(by_xla, kernels and functools.partial(kernels.gather, table, row_sets), protocol)


def line_and_gather(table: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol) -> tuple[Timing, str]:
    """Measures a bare gather of single keys, each row read after one index line; there are half as many lines as rows.

    Args:
      table: float32 [num_rows, dim].
      row_sets: int32 [num_keys] in rotation, all of one shape.
      protocol: how often.

    Returns:
      The faster of XLA and the CUDA kernel, and the name of the winner.
    """
    lines = jnp.zeros((max(table.shape[0] // 2, 1), INDEX_LINE_BYTES // 4), jnp.int32)

    def both(carry, rows):
        lines, table = carry
        at = (rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)) % jnp.uint32(lines.shape[0])
        found = rows + lines.at[at].get(mode="promise_in_bounds").sum(axis=1)
        return table.at[found].get(mode="promise_in_bounds")

    step = Step(both, donates=False)

    def by_xla(protocol):
        timing, _ = step.measure((lines, table), row_sets, protocol)
        return timing

    kernels = cuda_kernels.load_kernels(table.shape[1])
    return _faster(by_xla, kernels and functools.partial(kernels.line_and_gather, lines, table, row_sets), protocol)


def read_modify_write(
    table: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol
) -> tuple[Timing, str, jax.Array]:
    """Measures adding a streamed gradient to rows that occur once each.

    Args:
      table: float32 [num_rows, dim]. Donated: the result has its buffer.
      row_sets: int32 [num_unique] in rotation, all of one shape, no row twice in one of them.
      protocol: how often.

    Returns:
      The faster of XLA's scatter and the CUDA kernel, the name of the winner, and the table.
    """

    # The gradient is an operand: as a constant it would be embedded in the program, hundreds of megabytes.
    def add(carry, rows):
        table, gradients = carry
        table = table.at[rows].add(gradients, mode="promise_in_bounds", unique_indices=True)
        return (table, gradients), ()

    step = Step(add, donates=True)
    carry = (table, varied_floats((row_sets[0].shape[0], table.shape[1])))

    def by_xla(protocol):
        nonlocal carry
        timing, carry = step.measure(carry, row_sets, protocol)
        return timing

    def by_cuda(protocol):
        return kernels.read_modify_write(*carry, row_sets, protocol)

    kernels = cuda_kernels.load_kernels(table.shape[1])
    timing, by = _faster(by_xla, kernels and by_cuda, protocol)
    return timing, by, carry[0]


def probe(lines: jax.Array, row_sets: Sequence[jax.Array], protocol: Protocol) -> tuple[Timing, str]:
    """Measures reading one whole 64-byte line and writing 4 bytes for each key: the limit of finding row ids.

    Args:
      lines: float32 [num_lines, 16], as many as the index has buckets.
      row_sets: int32 [num_keys] in rotation.
      protocol: how often.

    Returns:
      The faster of XLA and the CUDA kernel, and the name of the winner.
    """
    step = Step(lambda lines, rows: lines.at[rows].get(mode="promise_in_bounds").sum(axis=1), donates=False)

    def by_xla(protocol):
        timing, _ = step.measure(lines, row_sets, protocol)
        return timing

    kernels = cuda_kernels.load_kernels(lines.shape[1])
    return _faster(by_xla, kernels and functools.partial(kernels.probe, lines, row_sets), protocol)


def _faster(
    by_xla: Callable[[Protocol], Timing], by_cuda: Callable[[Protocol], Timing] | None, protocol: Protocol
) -> tuple[Timing, str]:
    """Returns the faster time and its name; the slower one gets only a short measurement."""
    if by_cuda is None:
        return by_xla(protocol), "xla"
    cuda = by_cuda(protocol)
    look = by_xla(dataclasses.replace(protocol, repetitions=min(5, protocol.repetitions)))
    if look.ms >= cuda.ms:
        return cuda, "cuda"
    xla = by_xla(protocol)
    return (xla, "xla") if xla.ms < cuda.ms else (cuda, "cuda")


def has_cuda_kernels() -> bool:
    """Returns whether the limits of this run are tried with CUDA kernels as well."""
    return cuda_kernels.load_kernels(4) is not None
