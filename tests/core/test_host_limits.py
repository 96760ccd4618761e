"""Limits of host memory as Linux reports them, and their division among processes, with simulated system files."""

import pathlib

import jax
import pytest

from jaxsok import host_limits, processes, shards
from jaxsok.host_limits import HostLimit, least_share

GIB = 1 << 30
NONE_1, NONE_2 = "9223372036854771712", "max"  # no limit, by version of control groups


@pytest.fixture
def root(tmp_path):
    """Returns the root of a host with 8 GiB available, without control groups."""
    write(tmp_path / "proc/sys/kernel/random/boot_id", "host")
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 100 kB\nMemAvailable: {8 << 20} kB\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_1(root, path, limit, used, cache=0):
    """Makes a control group of version 1, with file pages that can be dropped."""
    folder = root / "sys/fs/cgroup/memory" / path
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(
        folder / "memory.stat",
        f"inactive_file 77\ntotal_inactive_file {cache // 4}\ntotal_active_file {cache - cache // 4}",
    )


def group_2(root, path, limit, used, cache=0):
    """Makes a control group of version 2."""
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(
        folder / "memory.stat",
        f"anon 55\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}\ntotal_active_file 66",
    )


def find_limits(root):
    return {limit.name: limit.num_bytes for limit in host_limits.limits(root)}


HOST = {"MemAvailable of /proc/meminfo": 8 * GIB}


def test_a_host_without_control_groups(root):
    assert find_limits(root) == HOST
    write(root / "proc/self/cgroup", "0::/")
    assert find_limits(root) == HOST


def test_a_system_that_reports_nothing(tmp_path, monkeypatch):
    assert host_limits.limits(tmp_path) == []
    monkeypatch.setattr(host_limits, "limits", list)
    assert host_limits.available_bytes() is None
    assert host_limits.share_of_device(shards.ONE_DEVICE) is None


def test_nested_groups_of_version_2(root):
    """Ancestors of a process's group limit it too; groups without a limit and sibling groups do not."""
    write(root / "proc/self/cgroup", "0::/jobs/mine/inner")
    group_2(root, "jobs", 6 * GIB, 4 * GIB, cache=GIB)
    group_2(root, "jobs/mine", 5 * GIB, 3 * GIB)
    group_2(root, "jobs/mine/inner", NONE_2, GIB)
    group_2(root, "jobs/other", GIB, GIB)
    assert find_limits(root) == HOST | {
        "/sys/fs/cgroup/jobs/memory.max": 3 * GIB,
        "/sys/fs/cgroup/jobs/mine/memory.max": 2 * GIB,
    }


def test_nested_groups_of_version_1(root):
    """The folder of version 2 also exists, without memory."""
    write(root / "proc/self/cgroup", "9:pids:/jobs/wrong\n4:cpu,memory:/jobs/mine\n0::/jobs/mine")
    group_1(root, ".", NONE_1, 9 * GIB)
    group_1(root, "jobs", 6 * GIB, 4 * GIB, cache=GIB)
    group_1(root, "jobs/mine", GIB, 2 * GIB)
    group_1(root, "jobs/wrong", GIB, GIB)
    (root / "sys/fs/cgroup/unified/jobs/mine").mkdir(parents=True)
    assert find_limits(root) == HOST | {
        "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": 3 * GIB,
        "/sys/fs/cgroup/memory/jobs/mine/memory.limit_in_bytes": 0,
    }


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../0123", "/gone (deleted)"])
def test_a_container(root, path):
    """The kernel's path has another root; the container's own group is the mounted one."""
    write(root / "proc/self/cgroup", f"0::{path}")
    group_2(root, ".", 3 * GIB, GIB)
    assert find_limits(root) == HOST | {"/sys/fs/cgroup/memory.max": 2 * GIB}


def test_this_machine():
    """The limits of the test's machine can be read, and have distinct names."""
    limits = host_limits.limits()
    assert len({limit.name for limit in limits}) == len(limits)
    if pathlib.Path("/proc/meminfo").exists():
        assert 0 < host_limits.available_bytes() < 2**50


# Shared --------------------------------------------------------------------------------------------------------------


def test_processes_of_a_host_divide_its_memory(root, tmp_path):
    """A process on another host, or with a group of its own, does not share its memory."""
    write(root / "proc/self/cgroup", "0::/a")
    group_2(root, "a", 6 * GIB, 0)
    group_2(root, "b", 6 * GIB, 0)
    in_a = host_limits.limits(root)
    write(root / "proc/self/cgroup", "0::/b")
    in_b = host_limits.limits(root)
    write(root / "proc/sys/kernel/random/boot_id", "other host")
    elsewhere = host_limits.limits(root)
    assert least_share([(1, in_a)]).num_bytes == 6 * GIB
    assert least_share([(1, in_a), (1, in_a)]).num_bytes == 3 * GIB
    assert least_share([(1, in_a), (2, in_a)]).num_bytes == 2 * GIB
    assert least_share([(1, in_a), (1, in_b)]).num_bytes == 4 * GIB  # of the host; each process has 6 in its own group
    assert least_share([(1, in_a), (1, elsewhere)]).num_bytes == 6 * GIB
    share = least_share([(3, in_a), (1, in_a), (1, in_b)])
    assert share.num_bytes == 6 * GIB // 4
    assert share.name == f"/sys/fs/cgroup/a/memory.max: {6 * GIB} bytes for 4 devices"
    assert least_share([(1, []), (1, [])]) is None


def test_all_processes_compute_the_same_share(monkeypatch):
    """The least of the values that processes read, at different times, counts."""
    mine, other = ([HostLimit("MemAvailable", num_bytes, "host")] for num_bytes in (1000, 900))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    asked = []

    def gather(topic, message):
        asked.append(message)
        return [message, message.replace("1000", "900")]

    monkeypatch.setattr(shards.MeshShards, "num_processes", 2)
    monkeypatch.setattr(processes, "gather", gather)
    monkeypatch.setattr(host_limits, "limits", lambda: mine)
    share = host_limits.share_of_device(shards.MeshShards(mesh, ("data",)))
    assert share == least_share([(2, mine), (2, other)]) and share.num_bytes == 225 and len(asked) == 1
    assert host_limits.share_of_device(shards.MeshShards(mesh, ("data",)), is_agreed=False).num_bytes == 500
