"""Host memory for packed batches, which is used again once JAX has read it.

`HostBuffers.take` lends memory as a ctypes array. NumPy views of it keep it alive, and JAX keeps a NumPy array alive
for as long as it reads it: until the copy to a GPU has ended, and on a CPU, where a jax.Array may be a view of it, as
long as that array lives. The memory is free for the next batch when nothing refers to the lent array, and not before.

For GPUs the memory is pinned through JAX's own client, so that JAX copies straight from it. Otherwise JAX first copies
to pinned memory of its own, with one thread.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import queue
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

LEAST_BYTES = 64 << 10
ALIGNMENT = 64
"""Bytes at whose multiples arrays should begin: JAX's CPU client reads arrays in place that lie so."""

_MOST_BLOCKS = 6
"""Blocks of one size at first: batches that are copied, that are packed, and that are being packed."""

_CALLS = 4
"""Calls of several steps for whose batches there are blocks at first: their copies wait for whole calls."""

_PATIENCE_S = 0.25
"""Seconds to wait for pinned memory in use before one more block is pinned, for good, which takes milliseconds: copies
to a GPU wait for the programs that were dispatched before them, and a host that is ahead would pin memory for every
batch."""
_POLL_S = 0.0005


class HostBuffers:
    """Blocks of memory in sizes of powers of two, each lent to one batch at a time, for calls from any thread.

    With JAX's client of a GPU (`device.client`) the memory is pinned.
    """

    def __init__(self, client: Any = None):
        self.process_id = os.getpid()
        """A forked process needs buffers of its own."""
        self._client = client
        # Memory comes back whenever, and in whichever thread, Python collects an array: a lock might be held by the
        # thread that waits for it. A SimpleQueue may be put to from there, and changes of a set are atomic.
        self._free: dict[int, queue.SimpleQueue[_Block]] = {}
        self._lent: dict[int, set[int]] = {}
        self._most: dict[int, int] = {}

    @property
    def is_pinned(self) -> bool:
        """True if new memory is pinned."""
        return self._client is not None

    @property
    def num_free(self) -> int:
        """Blocks that wait for a batch."""
        return sum(blocks.qsize() for blocks in self._free.values())

    def take(self, num_bytes: int, batches_per_call: int = 1) -> ctypes.Array:
        """Lends memory of undefined contents until nothing refers to it; may wait _PATIENCE_S for pinned memory."""
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, queue.SimpleQueue())
        used = self._lent.setdefault(size, set())
        self._most[size] = most = max(self._most.get(size, _MOST_BLOCKS), _CALLS * batches_per_call)
        patience = time.monotonic() + _PATIENCE_S if self.is_pinned and len(used) >= most else 0.0
        while True:
            try:
                block = free.get(block=patience > 0, timeout=_POLL_S)
                break
            except queue.Empty:
                if time.monotonic() >= patience:
                    self._most[size] = max(most, len(used) + 1 if patience else 0)
                    block = self._make(size)
                    break
                gc.collect(0)  # JAX releases arrays that it has read when it is called, or at a garbage collection
        lent = (ctypes.c_char * num_bytes).from_address(block.address)
        used.add(block.address)
        weakref.finalize(lent, _give_back, free, used, self._most, block).atexit = False
        return lent

    def _make(self, size: int) -> "_Block":
        block = _Block(size)
        if self._client is None:
            return block
        try:
            block.pin(self._client)
        except Exception as error:  # of JAX's client, which says only in its text what happened
            self._client = None
            warnings.warn(
                f"batch: the memory that batches are packed into cannot be pinned ({error}): copies to the device take "
                "several times as long. If that is the limit of locked memory, raise it (ulimit -l).",
                RuntimeWarning,
                stacklevel=2,
            )
        return block


def _give_back(free: "queue.SimpleQueue[_Block]", used: set[int], most: Mapping[int, int], block: "_Block") -> None:
    used.discard(block.address)
    if free.qsize() < most[block.size]:
        free.put(block)


class _Block:
    """Memory of its own pages."""

    def __init__(self, size: int):
        self.size = size
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def pin(self, client: Any) -> None:
        self._pages.madvise(mmap.MADV_DONTFORK)  # a copy on write would part these pages from those the GPU reads
        client.dma_map(self.address, self.size)
        # Before the pages go. At the end of the process the driver frees both, whatever the order.
        weakref.finalize(self, client.dma_unmap, self.address).atexit = False
