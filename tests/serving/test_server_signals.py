"""Signals while a server starts, and a terminal that goes away: it ends soon, and leaves nothing behind."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import httpx
import numpy as np
import pytest
from redis_servers import Server, running
from serving_cases import Trained, config_of, model_of, rows_of, write
from waiting import wait_until

from jaxsok.serving import streams

pytest.importorskip("uvicorn")

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_DELTAS = 40


class Run:
    """A process that serves a configuration, and the lines that it has written."""

    def __init__(self, tmp_path, config, *arguments, before="pass"):
        """`before` is code that runs first."""
        (tmp_path / "config.json").write_text(json.dumps(config))
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._folder = tempfile.TemporaryDirectory(prefix="s")  # sockets have short names alone
        self.temporary = pathlib.Path(self._folder.name)
        where = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        code = f"import sys\nfrom jaxsok.__main__ import main\n{before}\nsys.exit(main())"
        command = [sys.executable, "-c", code, "serve", str(tmp_path / "config.json"), "--port", "0", *arguments]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, **out, env={**os.environ, **where})
        self.lines = []
        self._thread = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self._thread.join()
        self.process.stdout.close()
        self.process.wait()
        self._folder.cleanup()

    def wait_for(self, text):
        def is_there():
            assert self.process.poll() is None, "".join(self.lines)
            return any(text in line for line in list(self.lines))

        wait_until(is_there)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_ready(client):
    with contextlib.suppress(httpx.TransportError):
        return client.get("/readyz").status_code == 200
    return False


@pytest.fixture
def trained():
    trained = Trained({"user": 2})
    trained.set("user", rows_of(range(50), 2))
    return trained


def write_deltas(trained, folder):
    """Writes a full export and deltas that follow it; returns their paths."""
    paths = [trained.full(folder / "000")]
    for number in range(1, NUM_DELTAS + 1):
        trained.set("user", rows_of([number], 2, number))
        paths.append(trained.delta(folder / f"{number:03d}", paths[-1]))
    return paths


@pytest.mark.parametrize("num_processes", [1, 2])
def test_no_further_folder_is_applied_after_a_signal(tmp_path, num_processes):
    """Each folder brings one table of many rows, so that all of them take far longer than one."""
    rows = {key: np.full(16, key, np.float32) for key in range(30_000)}
    write(tmp_path / "rows", rows)
    names = [f"t{number}" for number in range(20)]
    for name in names:
        for where in ("first", f"watched/{name}"):
            (tmp_path / where).mkdir(parents=True, exist_ok=True)
            (tmp_path / where / name).symlink_to(tmp_path / "rows")
    config = config_of(model_of({name: (tmp_path / "first" / name, 16) for name in names}))
    options = ["--watch", str(tmp_path / "watched"), "--processes", str(num_processes)]
    with Run(tmp_path, config, *options, "--drain-s", "0", "--shutdown-s", "20") as run:
        run.wait_for("is at version 2")
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(60) == 0
        run._thread.join()
        assert 1 <= sum("is at version" in line for line in run.lines) < len(names)
        assert run.lines[-1] == "serve: ended\n"
        assert not list(run.temporary.glob("jaxsok*"))


def test_a_signal_before_the_first_request_leaves_no_files(trained, tmp_path):
    """Versions that a stream has are being applied, from files of their own."""
    first, *deltas = write_deltas(trained, tmp_path / "written")
    with running(Server, tmp_path) as server:
        url = f"redis://{server.address}"
        publisher = streams.Publisher(url, "dlrm")
        for delta in deltas:
            publisher.publish(delta)
        publisher.close()
        source = {"type": "redis_stream", "brokers": url, "jaxsok": {"consumer": "a"}}
        config = config_of(model_of({"user": (first, 2)}), update_source=source)
        with Run(tmp_path, config) as run:
            wait_until(lambda: list(run.temporary.glob("jaxsok-stream-*/*")))
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(60) == -signal.SIGTERM
            assert not list(run.temporary.glob("jaxsok*"))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_terminal_that_goes_away_ends_the_server_in_order(trained, tmp_path, num_processes):
    config = config_of(model_of({"user": (trained.full(tmp_path / "full"), 2)}))
    options = ["--processes", str(num_processes), "--drain-s", "0", "--shutdown-s", "5"]
    with Run(tmp_path, config, *options) as run:
        run.wait_for("answers at")
        time.sleep(0.1)
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(60) == 0
        run._thread.join()
        assert run.lines[-1] == "serve: ended\n"
        assert not list(run.temporary.glob("jaxsok*"))


@pytest.mark.parametrize(("out", "num_processes"), [("a pipe that ends", 2), ("/dev/full", 1), ("closed", 1)])
def test_a_server_needs_no_reader(trained, tmp_path, num_processes, out):
    """It answers, and ends with 0, though what it prints reaches none."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(model_of({"user": (trained.full(tmp_path / "f"), 2)}))))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    port = free_port()
    command = [sys.executable, "-m", "jaxsok", "serve", str(tmp_path / "config.json"), "--port", str(port)]
    command += ["--processes", str(num_processes), "--drain-s", "0"]
    where = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    with open("/dev/full", "w") as full, open(tmp_path / "log", "w+") as log:
        stdout = full if out == "/dev/full" else subprocess.PIPE
        if out == "closed":
            command, stdout = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], None
        process = subprocess.Popen(command, env=where, stdout=stdout, stderr=log)
        try:
            if process.stdout is not None:
                process.stdout.readline()  # the first of the report
                process.stdout.close()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait_until(lambda: is_ready(client))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        assert "Traceback" not in log.read()


# Sends a signal when the tables are loaded and the server has no handlers yet.
EARLY_SIGNAL = """
import os, signal
from jaxsok.serving.http import server
from jaxsok.serving.session import Session

def early(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)

server.App.__init__ = early
close = Session.close
Session.close = lambda *arguments: print("closed", close(*arguments))
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_between_loading_and_the_first_request_closes_the_session(trained, tmp_path, num_processes):
    config = config_of(model_of({"user": (trained.full(tmp_path / "full"), 2)}))
    with Run(tmp_path, config, "--processes", str(num_processes), before=EARLY_SIGNAL) as run:
        assert run.process.wait(60) == -signal.SIGTERM
        run._thread.join()
        assert run.lines[-1] == "closed True\n"
        assert not list(run.temporary.glob("jaxsok-*"))


def test_a_second_signal_before_the_first_request_ends_the_process(trained, tmp_path):
    """The session takes an hour to close."""
    slow = 'import time\nSession.close = lambda *_: (print("closes", flush=True), time.sleep(3600))'
    config = config_of(model_of({"user": (trained.full(tmp_path / "full"), 2)}))
    with Run(tmp_path, config, before=EARLY_SIGNAL + slow) as run:
        run.wait_for("closes")
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(60) == -signal.SIGHUP


# Has each update take an hour.
SLOW_UPDATES = """
import time
from jaxsok.serving.session import Session

def update(*_, **__):
    print("begins", flush=True)
    time.sleep(3600)

Session.update = update
"""


@pytest.mark.parametrize(
    ("kind", "num_processes"),
    [
        ("two interrupts", 1),
        ("a stop", 2),
        pytest.param("two interrupts", 2, marks=pytest.mark.slow),
        pytest.param("a stop", 1, marks=pytest.mark.slow),
    ],
)
def test_an_update_that_takes_long_does_not_hold_up_the_end(trained, tmp_path, num_processes, kind):
    """A second Ctrl-C ends the server at once, and a single signal after `--drain-s` and `--shutdown-s`."""
    path = trained.full(tmp_path / "full")
    trained.set("user", rows_of([1], 2, 1))
    trained.delta(tmp_path / "watched" / "delta", path)
    config = config_of(model_of({"user": (path, 2)}))
    shutdown_s = "1000" if kind == "two interrupts" else "1"
    options = ["--watch", str(tmp_path / "watched"), "--drain-s", "0.1", "--shutdown-s", shutdown_s]
    with Run(tmp_path, config, *options, "--processes", str(num_processes), before=SLOW_UPDATES) as run:
        run.wait_for("begins")
        for _ in range(2 if kind == "two interrupts" else 1):
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert run.process.wait(30) == 0
        assert not list(run.temporary.glob("jaxsok-*"))
