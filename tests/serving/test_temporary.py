"""Temporary folders of processes that were killed: a later one removes them, and nothing else."""

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from jaxsok.serving import temporary

HOLDER = """
import sys, time
from jaxsok.serving.temporary import TemporaryFolder
folder = TemporaryFolder("stream")
open(f"{folder.name}/file", "w").close()
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Yields a function that starts a process with a folder, and gives both."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = pathlib.Path(__file__).resolve().parents[2]
    started = []

    def start():
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        where = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": where}
        started.append(subprocess.Popen([sys.executable, "-c", HOLDER], **pipes))
        return started[-1], pathlib.Path(started[-1].stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_system_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "not allowed", path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        folder = temporary.TemporaryFolder("stream")
    with folder as name:
        assert pathlib.Path(name).is_dir()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_removed(holder, tmp_path, monkeypatch):
    process, left = holder()
    living, kept = holder()
    process.kill()
    process.wait()
    others = [tmp_path / name for name in ("jaxsok-stream-", "jaxsok-stream-of-mine", "jaxsok-serve-abcdefgh")]
    for other in others:
        other.mkdir()
    (tmp_path / "jaxsok-stream-abcdefgh").symlink_to(others[0])
    (tmp_path / "jaxsok-stream-12345678").write_text("")
    with temporary.TemporaryFolder("stream"):
        assert left.exists(), "a process may not have locked it yet"
    monkeypatch.setattr(temporary, "_YOUNG_S", 0.0)
    before = set(tmp_path.iterdir())
    with temporary.TemporaryFolder("stream") as mine:
        with temporary.TemporaryFolder("stream") as second:
            assert pathlib.Path(mine).is_dir() and pathlib.Path(second).is_dir(), "each has its own"
        assert before - set(tmp_path.iterdir()) == {left}
    assert set(tmp_path.iterdir()) == before - {left}
    assert (kept / "file").exists()
    living.communicate("")  # it ends by itself, and takes its folder along
    assert living.returncode == 0 and not kept.exists()
