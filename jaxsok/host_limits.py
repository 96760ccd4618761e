"""Limits of host memory: what the system and its control groups leave, and the share that one device has in it.

Processes on one host share its memory. Each process reports its limits and its number of devices to the others, and
all of them compute the same share. They compare what they ask with it before any of them takes memory.
"""

import collections
import dataclasses
import json
import pathlib
import socket
from collections.abc import Iterator, Sequence

from jaxsok import processes
from jaxsok.shards import Shards

NO_LIMIT = 1 << 62  # version 1 of control groups writes a number near 2**63 for "no limit"

# Each version of control groups has its files: path of the mount, the files with the limit and with what is used, and
# how the lines of memory.stat begin. The kernel can drop pages of files, active ones, which were read twice, as well.
_VERSION_1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "sys/fs/cgroup", "memory.max", "memory.current", ""


@dataclasses.dataclass(frozen=True)
class HostLimit:
    """A limit of host memory."""

    name: str
    """Name for messages."""
    num_bytes: int
    """Bytes that are still available below it."""
    owner: str
    """The name of what sets the limit; processes with the same owner share the bytes."""


def limits(root: pathlib.Path = pathlib.Path("/")) -> list[HostLimit]:
    """Returns the limits of this process that Linux reports: of the host, and of its control group and those above."""
    host = _read(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()
    found = []
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":  # without swapping; pages of files that the kernel can drop are included
            found.append(HostLimit("MemAvailable of /proc/meminfo", 1024 * int(value.split()[0]), host))
    for folder, (_, limit_file, used_file, begin) in _groups(root):
        limit, used = _read(folder / limit_file), _read(folder / used_file)
        if not limit.isdigit() or not used.isdigit() or int(limit) >= NO_LIMIT:
            continue
        stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
        pages = sum(int(stat.get(f"{begin}{kind}_file", 0)) for kind in ("inactive", "active"))
        available = max(0, int(limit) - int(used) + pages)
        name, inode = f"/{folder.relative_to(root) / limit_file}", folder.stat()
        found.append(HostLimit(name, available, f"{host} {inode.st_dev} {inode.st_ino}"))
    return found


def available_bytes() -> int | None:
    """Returns what this process could take if it were alone; None: the system reports nothing."""
    return min((limit.num_bytes for limit in limits()), default=None)


def share_of_device(shards: Shards, *, is_agreed: bool = True) -> HostLimit | None:
    """Returns the limit that leaves least for a device, the same in all processes, with these bytes; None: unknown."""
    report = len(shards.mesh.local_devices) if shards.is_mesh else 1, limits()
    if not is_agreed or shards.num_processes == 1:
        return least_share([report])
    texts = processes.gather(
        "host_memory", json.dumps([report[0], [dataclasses.astuple(limit) for limit in report[1]]])
    )
    reports = [(num_devices, [HostLimit(*limit) for limit in found]) for num_devices, found in map(json.loads, texts)]
    return least_share(reports)


def least_share(reports: Sequence[tuple[int, Sequence[HostLimit]]]) -> HostLimit | None:
    """Divides each limit among the devices of the processes that share it (number and limits); returns the least."""
    num_devices = collections.Counter[str]()
    for number, found in reports:
        num_devices.update(dict.fromkeys((limit.owner for limit in found), number))
    shares = []
    for limit in {limit for _, found in reports for limit in found}:
        number = num_devices[limit.owner]
        devices = f"{number} devices" if number > 1 else "the device"
        name = f"{limit.name}: {limit.num_bytes} bytes for {devices}"
        shares.append(HostLimit(name, limit.num_bytes // number, limit.owner))
    return min(shares, key=lambda share: (share.num_bytes, share.name), default=None)


def _groups(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str, str]]]:
    """Yields the folders of this process's control groups, innermost first, with the names of their files."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version = _VERSION_2 if number == "0" else _VERSION_1
        mount = root / version[0]
        parts = [part for part in pathlib.PurePosixPath(path).parts if part not in ("/", "..")]
        for length in range(len(parts), -1, -1):
            if (mount.joinpath(*parts[:length]) / version[1]).exists():
                yield mount.joinpath(*parts[:length]), version


def _read(path: pathlib.Path) -> str:
    """Returns the text of a file of the system; empty, where there is none or it must not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
