"""A server of several processes: it answers as one process does, within the same limits, and survives its parts.

The session is that of server_cases, in this process; front ends are processes of their own. test_server_load.py has the
same server over real tables.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types

import httpx
import ml_dtypes
import numpy as np
import pytest
import server_cases as cases
from server_cases import JSON, LOOKUP, PREDICT, TENSORS
from waiting import wait_until

from jaxsok import Bags
from jaxsok.serving import errors
from jaxsok.serving.http import batching, processes

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def session():
    return cases.Session()


@pytest.fixture(scope="module")
def found(session):
    with cases.serving(session, num_processes=2, max_body_bytes=1 << 20) as server:
        yield server


def post(found, path, number=1, **request):
    """Returns the answers to a request over connections of their own: the kernel divides them among the processes."""
    answers = []
    for _ in range(number):
        with httpx.Client(base_url=found.address, timeout=20) as client:
            answers.append(client.post(path, **request))
    return answers


def ask(found):
    """Returns a connection over which a lookup has been sent."""
    client, body = (
        socket.create_connection(("127.0.0.1", int(found.address.rsplit(":", 1)[1]))),
        b'{"keys":{"user":[4]}}',
    )
    client.sendall(cases.head(Content_Length=len(body)) + body)
    return client


def samples(found):
    return cases.samples_of(httpx.get(f"{found.address}/metrics").text)


def test_all_front_ends_answer(found):
    """Every front end answers in both formats, knows the models, and counts into the same metrics."""
    assert len(set(found.pids)) == 2
    before, name = samples(found), ("jaxsok_requests_total", "200", "lookup", "ranker")
    for answer in post(found, LOOKUP, 12, json={"keys": cases.KEYS}):
        rows, version = answer.json()["rows"], answer.json()["version"]
        assert rows == {table: cases.rows_of(table, keys, version) for table, keys in cases.KEYS.items()}
    keys = np.array([[7, 8, 9], [2**63, 3, 5]], np.uint64)
    for answer in post(found, LOOKUP, 12, content=cases.pack({"item": keys}), headers=TENSORS):
        rows, about = cases.unpack(answer.content)
        assert rows["item"].tolist() == cases.rows_of("item", keys.tolist(), int(about["version"]))
    body = {"inputs": {"user": [[1, 2], [3, 4]], "dense": [[5, 6], [7, 8]]}}
    for answer in post(found, PREDICT, 4, json=body):
        cases.check_answer(body, answer)
    mixed = {"user": {"values": [4], "lengths": [1], "weights": [0.5]}, "pair": [[1, 2]]}
    mixed |= {"flag": [True], "count": [3], "half": [[0.5]]}
    for answer in post(found, cases.MIXED, 4, json={"inputs": mixed}):
        assert answer.json()["outputs"]["logits"] == [2 + 3 + 1 + 3 + 0.5]
    after = samples(found)
    assert after[name] - before.get(name, 0) == 24
    assert after["jaxsok_batch_requests_sum", "lookup", "ranker"] >= 24
    assert after["jaxsok_ready",] == 1 and after["jaxsok_requests_in_flight",] == 0
    assert after["jaxsok_queue_depth", "lookup", "ranker"] == 0


@pytest.mark.parametrize(
    ("path", "request_", "status"),
    [
        ("/v1/models/no/lookup", {"json": {"keys": {"user": [1]}}}, 404),
        (LOOKUP, {"json": {"keys": {"no": [1]}}}, 404),
        (LOOKUP, {"content": b"{", "headers": JSON}, 400),
        (LOOKUP, {"json": {"keys": {"user": [1] * 5000}}}, 413),
        (LOOKUP, {"content": b" " * (1 << 20), "headers": JSON}, 413),
    ],
)
def test_requests_are_refused(found, path, request_, status):
    assert {answer.status_code for answer in post(found, path, 4, **request_)} == {status}


def test_versions_are_not_mixed(found, session):
    """While versions change, each answer is of one, calls join requests, and all front ends see new versions."""
    stop = threading.Event()

    def update():
        while not stop.wait(0.02):
            session.update(model="ranker")

    versions, updates = set(), threading.Thread(target=update)

    def check(body, answer):
        cases.check_answer(body, answer)
        versions.add(answer.json()["version"])

    session.calls.clear()
    updates.start()
    try:
        asyncio.run(cases.ask_in_parallel(found.address, 32, 8, cases.make_request, check))
    finally:
        stop.set()
        updates.join()
    assert len(versions) > 3
    assert max(size["samples"] for op, _, size in session.calls if op == "predict") > 3, "no two ran together"
    newest = session.models["ranker"].version
    wait_until(lambda: {a.json()["version"] for a in post(found, LOOKUP, 8, json={"keys": {"user": [1]}})} == {newest})
    for _ in range(8):
        wait_until(lambda: httpx.get(f"{found.address}/v1/models/ranker").json()["version"] == newest)


@pytest.mark.parametrize(("kind", "status"), [(errors.RequestError, 400), (errors.DatabaseError, 503), (KeyError, 500)])
def test_errors_reach_those_who_caused_them(found, session, kind, status):
    """An error of the session is that of its request alone; an internal one keeps its reason."""

    def error(op, model, size):
        if size.get("item"):
            raise kind("a reason")

    session.error = error
    try:
        bodies = [b'{"keys":{"%s":[4]}}' % name for name in (b"user", b"item", b"user", b"user") * 4]
        statuses, texts = cases.ask_at_once(found.address, [(LOOKUP, JSON, body) for body in bodies])
    finally:
        session.error = None
    assert statuses == [200, status, 200, 200] * 4
    assert ("a reason" in texts[1]) == (status == 400)


def test_limits_hold_for_all_together():
    """The number of requests is bounded over all front ends, and one that dies gives its share back."""
    session = cases.Session()
    session.hold = threading.Event()
    with cases.serving(session, num_processes=2, max_requests=6) as found, contextlib.ExitStack() as stack:
        try:
            clients = [stack.enter_context(ask(found)) for _ in range(6)]
            wait_until(lambda: sum(found._counts[0::2]) == 6)
            refused = post(found, LOOKUP, 8, json={"keys": {"user": [1]}})
            assert {answer.status_code for answer in refused} == {503} and '"busy"' in refused[0].text
        finally:
            session.hold.set()
        assert all(b" 200 OK" in client.recv(4096) for client in clients)
        wait_until(lambda: sum(found._counts) == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_front_end_that_ends_is_replaced(found, session, number):
    """One that is killed loses its own requests alone, one that is stopped none; metrics keep what it has counted."""
    post(found, LOOKUP, 8, json={"keys": {"user": [1]}})
    before, name = samples(found), ("jaxsok_requests_total", "200", "lookup", "ranker")
    first, session.hold = list(found.pids), threading.Event()
    folder = pathlib.Path(found._folder.name)
    files = {file.name: file.stat().st_blocks for file in folder.iterdir()}
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ask(found)) for _ in range(16)]
        wait_until(lambda: sum(found._counts[0::2]) == 16)
        os.kill(first[0], number)
        if number == signal.SIGKILL:
            wait_until(lambda: first[0] not in found.pids)
        session.hold.set()
        answered = sum(b" 200 OK" in client.recv(4096) for client in clients)
    session.hold = None
    assert answered == 16 if number == signal.SIGTERM else 0 < answered < 16
    wait_until(lambda: first[0] not in found.pids and len(found.pids) == 2)
    assert {answer.status_code for answer in post(found, LOOKUP, 8, json={"keys": {"user": [1]}})} == {200}
    after = samples(found)
    assert after[name] == before[name] + answered + 8 and after["jaxsok_requests_in_flight",] == 0
    assert after["jaxsok_ready",] == 1
    assert {file.name: file.stat().st_blocks for file in folder.iterdir()} == files  # it takes no room on the disk


def test_front_ends_that_have_ended_leave_nothing():
    """The connections of a front end that was killed end, also the one that waits for new versions."""
    with cases.serving(cases.Session(), num_processes=2) as found:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            first = found.pids[0]
            os.kill(first, signal.SIGKILL)
            wait_until(lambda first=first: first not in found.pids and len(found.pids) == 2)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert len(found.pids) == 2


def test_a_lost_connection_is_made_again(monkeypatch):
    """A failure in an answer fails its request alone."""
    pack, fails = processes.pack, iter([True] * 2)

    def fail_first(head, found, *how):
        if found and next(fails, False):
            raise MemoryError
        return pack(head, found, *how)

    with cases.serving(cases.Session(), num_processes=2) as found:
        monkeypatch.setattr(processes, "pack", fail_first)
        post(found, LOOKUP, 12, json={"keys": {"user": [1]}})
        assert {answer.status_code for answer in post(found, LOOKUP, 24, json={"keys": {"user": [1]}})} == {200}


def start(*arguments):
    """Starts a server in a process; returns it and its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests/serving/server_cases.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    return process, process.stdout.readline().strip()


def test_front_ends_end_with_the_session():
    """When the process of the session is killed, its front ends end at once; the port is free, and no file is left."""
    process, address = start("60", "5", "2")
    folders = set(pathlib.Path(tempfile.gettempdir()).glob("jaxsok-*"))
    try:
        with httpx.Client(base_url=address, timeout=20) as client:
            assert cases.is_well(client)
            process.kill()
            wait_until(lambda: cases.is_closed(address), 10)
    finally:
        process.kill()
        process.communicate()
    with processes.bind("127.0.0.1", int(address.rsplit(":", 1)[1]), 1)[0]:
        pass
    wait_until(lambda: not all(folder.exists() for folder in folders))


def tree(pid):
    """Returns a process and all that it started."""
    children = [path.read_text().split() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(found for child in itertools.chain(*children) for found in tree(int(child)))]


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_ends_all_processes_in_order(to_all):
    """Kept connections lose no request in a stop, also of all processes, as by systemd; the command returns 0."""
    process, address = start("60", "0.5", "2")
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=address, timeout=20)) for _ in range(6)]
            assert all(cases.is_well(client) for client in clients)
            for pid in tree(process.pid) if to_all else [process.pid]:
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: clients[0].get("/readyz").status_code == 503)
            assert all(cases.is_well(client) for client in clients)
            wait_until(lambda: cases.is_closed(address))
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0 and output == "ended\n"


def test_a_folder_whose_name_is_too_long_for_sockets(tmp_path):
    """Sockets of Unix have at most 107 characters."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    code = "from jaxsok.serving.http import processes; processes.prepare()"
    environment = {**os.environ, "TMPDIR": str(folder), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert f"OSError: serve: TMPDIR: got {folder}: AF_UNIX path too long; wanted a folder" in done.stderr


def test_a_file_of_counts_that_is_gone_ends_no_server(session):
    """Programs that remove old files take it; then a front end is replaced as ever."""
    with cases.serving(session, num_processes=2) as found:
        for file in pathlib.Path(found._folder.name).glob("gauge_*"):
            file.unlink()
        first = found.pids[0]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in found.pids and len(found.pids) == 2)
        assert {answer.status_code for answer in post(found, LOOKUP, 8, json={"keys": {"user": [1]}})} == {200}


def test_files_of_counts_have_their_room_from_the_start(found):
    """A process that writes to a file without a block while the disk is full is ended by SIGBUS."""
    files = list(pathlib.Path(found._folder.name).glob("*.db"))
    assert len(files) == 8
    for file in files:
        status = file.stat()
        assert status.st_blocks * 512 >= status.st_size >= 1 << 16


def test_a_full_disk_is_reported_before_the_start(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(where) for where in processes.bind("127.0.0.1", 0, 2)]
        with pytest.raises(OSError, match=r"serve: TMPDIR: got /.*: .*No space left on device; wanted room"):
            processes.Processes(app := cases.server.App(cases.Session(), has_front_ends=True), sockets)
    assert not os.path.exists(app.folder.name)


def test_front_ends_that_cannot_start_are_reported(monkeypatch):
    async def refuse(self, reader, writer):
        writer.close()

    monkeypatch.setattr(processes.Processes, "_serve", refuse)
    sockets = processes.bind("127.0.0.1", 0, 2)
    found = processes.Processes(cases.server.App(cases.Session(), has_front_ends=True), sockets)
    with pytest.raises(OSError, match=r"front end \d: it ended with 1 before all were ready"):
        found.run()
    assert all(where.fileno() == -1 for where in sockets)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C reaches the caller again


def test_a_port_belongs_to_one_server():
    sockets = processes.bind("127.0.0.1", 0, 3)
    with contextlib.ExitStack() as stack:
        ports = {stack.enter_context(where).getsockname()[1] for where in sockets}
        assert len(ports) == 1
        for number in (1, 2):
            with pytest.raises(OSError, match="give another --host or --port"):
                processes.bind("127.0.0.1", *ports, number)


def test_frames_keep_all_arrays():
    given = {
        "a": np.arange(6, dtype=np.uint64).reshape(2, 3)[:, ::2],
        "none": np.zeros((0, 4), np.float32),
        "half": np.array([[1.5]], ml_dtypes.bfloat16),
        "bags": Bags(np.arange(3, dtype=np.uint64), lengths=np.array([1, 2], np.int32)),
    }
    frame = processes.pack(("head", 7), given)
    size, data_size = processes.SIZES.unpack(frame[: processes.SIZES.size])
    text = frame[processes.SIZES.size :][:size]
    head, got = processes.unpack(text, frame[processes.SIZES.size + size :])
    assert head == ("head", 7) and len(frame) == processes.SIZES.size + size + data_size
    for name in ("a", "none", "half"):
        assert got[name].dtype == given[name].dtype
        np.testing.assert_array_equal(got[name], given[name])
    assert got["bags"].keys.tolist() == [0, 1, 2] and got["bags"].lengths.tolist() == [1, 2]
    assert got["bags"].weights is None


def test_joined_arrays_come_apart_again():
    given = {"a": np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2], "none": np.zeros((0, 4), np.float32)}
    given["b"] = np.array([[7.0, 8.0]], np.float32)
    frame = processes.pack("head", given, joins=True)
    size, data_size = processes.SIZES.unpack(frame[: processes.SIZES.size])
    head, got = processes.unpack(frame[processes.SIZES.size :][:size], frame[processes.SIZES.size + size :])
    assert head == "head" and list(got) == [""] and data_size == got[""].nbytes == 8 * 4
    apart = processes.split(got[""], {name: array.size for name, array in given.items()})
    assert list(apart) == list(given)
    for name, array in given.items():
        np.testing.assert_array_equal(apart[name], array.reshape(-1))


def test_a_frame_that_is_given_up_answers_no_other(tmp_path):
    """An answer whose caller was cancelled, which comes in pieces or not at all, is never that of the next caller."""
    path = str(tmp_path / "session")

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                sizes = processes.SIZES.unpack(await reader.readexactly(processes.SIZES.size))
                (_, about), _ = processes.unpack(*[await reader.readexactly(size) for size in sizes])
                if about == "end":
                    break
                await asyncio.sleep(0.2 * (about == "slow"))
                for byte in processes.pack(about, {"rows": np.arange(3, dtype=np.float32)}):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
        writer.close()

    async def ask():
        session = processes.Remote(path, {})
        async with await asyncio.start_unix_server(serve, path):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session._send("lookup", "slow"), 0.05)
            for about in ("first", "second"):
                head, found = await asyncio.wait_for(session._send("lookup", about), 20)
                assert head == about and found["rows"].tolist() == [0, 1, 2] and not found["rows"].flags.writeable
            assert len(session._free) == 1
            with pytest.raises(batching.ClosedError):
                await asyncio.wait_for(session._send("lookup", "end"), 20)
            assert session._free == []

    asyncio.run(ask())


def test_a_front_end_follows_versions_over_one_connection(tmp_path):
    """It needs no descriptor for another version, since its clients may have taken all of them."""
    path, asked, connections = str(tmp_path / "session"), [], []

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.closing(writer):
            for version in range(7):  # then the process of the session ends
                sizes = processes.SIZES.unpack(await reader.readexactly(processes.SIZES.size))
                (op, about), _ = processes.unpack(*[await reader.readexactly(size) for size in sizes])
                asked.append((op, about))
                writer.write(processes.pack({"model": types.SimpleNamespace(version=version)}, {}))

    async def follow():
        session = processes.Remote(path, {"model": types.SimpleNamespace(version=0)})
        async with await asyncio.start_unix_server(serve, path):
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(path)
            with pytest.raises(batching.ClosedError):
                await asyncio.wait_for(session.follow(3, connected), 20)
        assert session.models["model"].version == 6

    asyncio.run(follow())
    assert asked == [("ready", 3), *(("models", {"model": version}) for version in range(6))]
    assert len(connections) == 1
