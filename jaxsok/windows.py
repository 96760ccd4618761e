"""The choice between the two wires of an exchange, and the windows of the devices of a mesh (decision 0018).

The dense wire is XLA's all-to-all: it serves every platform. The window wire writes lines straight into the memory of
peers; it serves GPUs of one host that reach each other's memory, in one process or several. Windows belong to the
process: collections on the same devices share them, larger ones are added when a program is traced that needs more, and
they live until the process ends.
"""

import dataclasses
import functools
import math
import os
import socket
import threading
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32, UInt32

from jaxsok import processes
from jaxsok.kernels import window as kernels
from jaxsok.shards import MeshShards, Shards
from jaxsok.types import Digest

MOST_SHARDS = 32  # kMostWindowShards in ffi/kernels/window.h
MOST_SECONDS = 100
"""Seconds that a shard waits for others, if all are of this process: the heartbeat time-out of `jax.distributed`."""
MOST_SECONDS_OF_PROCESSES = 86_400
"""Seconds with several processes: one may compile for long, and JAX's coordination service ends all if one dies."""
_PROBE_BYTES = 4096
_CONCURRENT = "xla_gpu_command_buffer_scheduling_mode=CONCURRENT"

_numbers: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}
"""The number of the windows of each set of devices; the library keeps the windows (decision 0018)."""
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of the devices of a mesh."""

    platform: str
    number: int
    num_windows: int
    """Windows on all devices of all processes."""
    is_shared: bool = False
    """True if there are several processes."""

    def reserve(self, num_bytes: int) -> None:
        """Makes room for an exchange in which a shard receives `num_bytes` bytes; called while a program is traced."""
        if not self.is_shared:
            kernels.reserve(self.platform, self.number, num_bytes)
            return
        with _lock:  # threads that trace take turns
            if num_bytes > kernels.room(self.platform, self.number):
                self._grow(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Adds larger windows in several processes; after each step they wait for each other."""
        growth = kernels.Growth(self.platform, self.number)
        # Threads may trace in another order in each process.
        num_bytes = max(int(text) for text in processes.gather(_TOPIC, str(num_bytes)))
        with _together():
            own = growth.take(num_bytes, self.num_windows)
        # A handle is zeros except in the process that has the window.
        handles = [np.frombuffer(bytes.fromhex(text), np.uint8) for text in processes.gather(_TOPIC, own.hex())]
        is_mapped = False
        try:
            with _together():
                growth.map(functools.reduce(np.bitwise_or, handles).tobytes())
            is_mapped = True
        finally:
            growth.settle(is_mapped=is_mapped)
            processes.gather(_TOPIC, "")

    def meeting(self, like: Array) -> UInt32[Array, "1"]:
        """Returns an array without content once the threads of this process's devices all run the program."""
        return kernels.after_meeting(self.number, like)["met"]

    def exchange(self, lines: Array) -> Array:
        """Sends equal parts of `lines` to the shards and receives theirs, as `lax.all_to_all` over the first axis."""
        self.reserve(math.prod(lines.shape) * lines.dtype.itemsize)
        return kernels.exchange(self.number, lines)

    def send_lines(
        self,
        lines: UInt32[Array, "num_lines line_words"],
        starts: Int32[Array, " num_shards_plus_1"],
        digest: Digest,
        offsets: Int32[Array, "num_shards num_offsets"],
        send_capacity: int,
    ) -> kernels.ReceivedLines:
        """Sends each shard its lines, at most `send_capacity`, and offsets."""
        num_shards, num_offsets = offsets.shape
        parts = (send_capacity * lines.shape[1], 2 + num_shards + num_offsets)  # words, padded to 16 bytes
        self.reserve(num_shards * sum(-(-num_words // 4) * 16 for num_words in parts))
        return kernels.send_lines(self.number, lines, starts, digest, offsets, send_capacity)

    def sum(self, words: Int32[Array, " _"], same: Array) -> Int32[Array, " _"]:
        """Adds the words of all shards; `same` is an array that is the same on all shards, as the sums are."""
        self.reserve(1)
        return kernels.sum_words(self.number, words, same)


_TOPIC = "window"
_together = functools.partial(processes.fail_together, _TOPIC)


def windows_of(shards: Shards, wire: str) -> Windows | None:
    """Returns the windows of the shards' devices, or None for the dense wire; ValueError: there are none to have."""
    if wire == "dense" or not isinstance(shards, MeshShards) or shards.num_shards == 1:
        return None
    reason = _why_not(shards)
    if reason is None:
        try:
            return _open(shards)
        except RuntimeError as error:
            reason = str(error)
    if wire == "auto":
        return None
    raise ValueError(f"Collection: exchange: got ExchangeSpec(wire='window'), but {reason}; pass wire='auto'.")


def _why_not(shards: MeshShards) -> str | None:
    devices = list(shards.mesh.devices.flat)
    platform = devices[0].platform
    if platform != "gpu":
        return f"the devices are of platform {platform!r}, wanted GPUs"
    if not _is_here(devices[0]):
        return "the devices are those of a topology, which programs are only compiled for"
    if _CONCURRENT in os.environ.get("XLA_FLAGS", ""):
        return f"XLA_FLAGS has {_CONCURRENT}: exchanges of several stores would run at once, in one window"
    if shards.num_shards > MOST_SHARDS:
        return f"there are {shards.num_shards} shards, at most {MOST_SHARDS} can share windows"
    if shards.num_processes > 1 and len(set(processes.gather(_TOPIC, socket.gethostname()))) > 1:
        return "the processes are on several hosts"
    return None


def _is_here(device: Any) -> bool:
    """Returns whether programs run on a device; those of a topology they are only compiled for."""
    try:
        return getattr(device, "client", None) is jax.devices(device.platform)[0].client
    except RuntimeError:  # there is no device of the platform
        return False


def _open(shards: MeshShards) -> Windows:
    """Opens the windows of the groups of devices that exchange with each other, one for each place on other axes."""
    mesh = shards.mesh
    others = [name for name in mesh.axis_names if name not in shards.axis]
    order = [mesh.axis_names.index(name) for name in (*others, *shards.axis)]
    devices = np.transpose(mesh.devices, order).reshape(-1, shards.num_shards)
    own = jax.process_index()
    groups = tuple(
        tuple(device.local_hardware_id if device.process_index == own else -1 for device in group) for group in devices
    )
    is_shared = shards.num_processes > 1
    if not is_shared:
        return open_windows(devices.flat[0].platform, groups)
    with _together():
        windows = open_windows(devices.flat[0].platform, groups, is_shared=True)
    windows.reserve(_PROBE_BYTES)  # fails where processes cannot share memory
    return windows


def open_windows(platform: str, groups: tuple[tuple[int, ...], ...], *, is_shared: bool = False) -> Windows:
    """Opens the windows of groups of devices, given by their ordinals; those that are open stay as they are."""
    with _lock:
        number = _numbers.get((platform, groups))
        if number is None:
            number = len(_numbers)
            kernels.open_windows(platform, number, groups, MOST_SECONDS_OF_PROCESSES if is_shared else MOST_SECONDS)
            _numbers[platform, groups] = number
    return Windows(platform, number, sum(len(group) for group in groups), is_shared)
