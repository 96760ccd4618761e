"""The choice between the two wires of an exchange, and the windows of this process's devices (decision 0018).

The dense wire is XLA's all-to-all: it serves every platform. The window wire writes lines straight into the memory of
peers; it serves GPUs of one process that reach each other's memory. Windows belong to the process: collections on the
same devices share them, they grow when a program is traced that needs more, and they live until the process ends.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array

from jaxsok.kernels import window as kernels
from jaxsok.shards import MeshShards, Shards

MOST_SHARDS = 32  # kMostWindowShards in ffi/kernels/window.h
MOST_SECONDS = 100  # that a shard waits for the others: the heartbeat time-out of jax.distributed

_numbers: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}
"""The number of the windows of each set of devices; the library keeps the windows (decision 0018)."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of the devices of a mesh."""

    platform: str
    number: int

    def reserve(self, num_bytes: int) -> None:
        """Makes room for an exchange in which a shard receives so many bytes; called while a program is traced."""
        kernels.reserve(self.platform, self.number, num_bytes)

    def exchange(self, lines: Array) -> Array:
        """Sends equal parts of lines to the shards and receives theirs, as `lax.all_to_all` over the first axis."""
        self.reserve(math.prod(lines.shape) * lines.dtype.itemsize)
        return kernels.exchange(self.number, lines)

    @property
    def num_bytes(self) -> int:
        """Bytes that the window of a device takes now."""
        return kernels.window_bytes(self.platform, self.number)


def windows_of(shards: Shards, wire: str) -> Windows | None:
    """Returns the windows of the shards' devices, or None for the dense wire, as `ExchangeSpec.wire` asks.

    ValueError: windows are asked for, and cannot be had.
    """
    if wire == "dense" or shards.num_shards == 1:
        return None
    reason = _why_not(shards)
    if reason is None:
        try:
            return _opened(shards)
        except RuntimeError as error:
            reason = str(error)
    if wire == "auto":
        return None
    raise ValueError(f"Collection: exchange: got ExchangeSpec(wire='window'), but {reason}; pass wire='auto'.")


def _why_not(shards: Shards) -> str | None:
    if not isinstance(shards, MeshShards):
        return "there is no mesh"
    devices = list(shards.mesh.devices.flat)
    platform = devices[0].platform
    if platform != "gpu":
        return f"the devices are of platform {platform!r}, wanted GPUs"
    if not _are_local(devices):
        return "not all devices belong to this process"
    if shards.num_shards > MOST_SHARDS:
        return f"there are {shards.num_shards} shards, at most {MOST_SHARDS} can share windows"
    return None


def _are_local(devices: Sequence[jax.Device]) -> bool:
    try:
        local = jax.local_devices(backend=devices[0].platform)
    except RuntimeError:  # programs are compiled for devices that are not here
        return False
    return all(device in local for device in devices)


def _opened(shards: MeshShards) -> Windows:
    """Opens the windows of the groups of devices that exchange with each other, one for each place on other axes."""
    names = shards.mesh.axis_names
    others = [name for name in names if name not in shards.axis]
    order = [names.index(name) for name in (*others, *shards.axis)]
    devices = np.transpose(shards.mesh.devices, order).reshape(-1, shards.num_shards)
    groups = tuple(tuple(device.local_hardware_id for device in group) for group in devices)
    return opened(devices.flat[0].platform, groups)


def opened(platform: str, groups: tuple[tuple[int, ...], ...]) -> Windows:
    """Opens the windows of groups of devices, given by their ordinals; those that are open stay as they are."""
    number = _numbers.get((platform, groups))
    if number is None:
        taken = set(_numbers.values())
        number = next(n for n in itertools.count() if n not in taken)
        kernels.open_windows(platform, number, groups, MOST_SECONDS)
        _numbers[platform, groups] = number
    return Windows(platform, number)
