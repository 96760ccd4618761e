"""Tests the life of a running server: its options, its limits, slow clients, and its end."""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import prometheus_client
import pytest
import server_cases as cases
from server_cases import (
    JSON,
    LOOKUP,
    ROOT,
    TENSORS,
    is_closed,
    is_well,
    num_taken,
    pack,
)
from waiting import wait_until

from jaxsok import __main__ as command_line
from jaxsok.serving.http import running, server, wire

# The command ---------------------------------------------------------------------------------------------------------


def test_options_of_the_command():
    """Options take only valid numbers."""
    with pytest.raises(ValueError, match="--max-body-bytes: got 0"):
        server.ServerOptions.of({"max_body_bytes": 0})
    with pytest.raises(ValueError, match="--timeout-s: got nan"):
        server.ServerOptions(timeout_s=float("nan"))
    assert server.ServerOptions.of({"drain_s": 0.0}).drain_s == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "99999"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--watch", "/nowhere"], '"/nowhere"'),
        (["--max-keys", "-1"], "--max-keys: got -1"),
        (["--watch-interval-s", "0"], "--watch-interval-s: got 0"),
        (["--watch-interval-s", "nan"], "--watch-interval-s: got nan"),
        (["--watch-interval-s", "inf"], "--watch-interval-s: got inf"),
    ],
)
def test_the_command_refuses_in_words(arguments, words, tmp_path, capsys):
    assert command_line.main(["serve", str(tmp_path / "config.json"), *arguments]) == 2
    got = capsys.readouterr().err
    assert words in got and "Traceback" not in got


def test_two_servers_cannot_have_one_port():
    with running.bind("127.0.0.1", 0) as where, pytest.raises(OSError, match="--port"):
        running.bind(*where.getsockname()).close()


# Limits --------------------------------------------------------------------------------------------------------------


def test_too_many_requests_are_sent_away():
    """Requests beyond the limit get 503 and a time to retry; later requests are answered."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, max_requests=3, num_workers=1) as found:
        with (
            httpx.Client(base_url=found.address, timeout=20) as client,
            concurrent.futures.ThreadPoolExecutor(3) as threads,
        ):
            asked = [threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}}) for _ in range(3)]
            wait_until(lambda: num_taken(client) == 3)
            sent_away = client.post(LOOKUP, json={"keys": {"user": [4]}})
            assert sent_away.status_code == 503 and sent_away.headers["retry-after"] == "1"
            assert sent_away.json()["error"]["code"] == "busy"
            assert client.get("/healthz").status_code == 200, "the event loop was blocked"
            hold.set()
            assert [future.result().status_code for future in asked] == [200] * 3
            assert is_well(client)


def test_bodies_that_are_held_have_a_limit():
    """Large bodies that are held at one time have a limit."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    body = pack({"user": np.arange(4000, dtype="<u8")})
    with cases.serving(session, max_held_bytes=70_000) as found:
        with (
            httpx.Client(base_url=found.address, timeout=20) as client,
            concurrent.futures.ThreadPoolExecutor(2) as threads,
        ):
            asked = [threads.submit(client.post, LOOKUP, content=body, headers=TENSORS) for _ in range(2)]
            wait_until(lambda: num_taken(client) == 2)
            refused = client.post(LOOKUP, content=body, headers=TENSORS)
            assert refused.status_code == 503 and "70000 bytes" in refused.text
            hold.set()
            assert [future.result().status_code for future in asked] == [200] * 2
            assert client.post(LOOKUP, content=body, headers=TENSORS).status_code == 200


def test_a_call_that_takes_too_long():
    """A call that takes too long gives an error; then the queue empties, and others are answered."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, timeout_s=1.0, num_workers=1) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client:
            for _ in range(2):
                late = client.post(LOOKUP, json={"keys": {"user": [4]}})
                assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
            hold.set()
            assert is_well(client)
            assert len(session.calls) == 2, "a request that was given up was run"


def test_bodies_that_take_too_long_to_read_or_write(monkeypatch):
    """Reading a body and writing a response count towards the time limit of an answer."""
    hold, slow = threading.Event(), set()
    for name in ("read_tensors", "tensors_body"):
        work = getattr(wire, name)

        def hold_back(*arguments, name=name, work=work):
            assert name not in slow or hold.wait(20)
            return work(*arguments)

        monkeypatch.setattr(wire, name, hold_back)
    body = pack({"user": np.ones([4096], "<u8"), "item": np.ones([2048], "<u8")})  # Large enough for the threads.
    with cases.serving(cases.Session(), timeout_s=1.0) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client:
            for name in ("read_tensors", "tensors_body"):
                slow.add(name)
                late = client.post(LOOKUP, content=body, headers=TENSORS)
                assert late.status_code == 504 and late.json()["error"]["code"] == "timeout", late.text
                hold.set()
                slow.clear()
                wait_until(lambda: client.post(LOOKUP, content=body, headers=TENSORS).status_code == 200)
                hold.clear()
            hold.set()


def test_how_long_a_response_may_take():
    """The time that a response may take grows with its size."""
    options = server.ServerOptions(send_timeout_s=2.0, min_send_rate=100)
    assert [server.send_limit_s(size, options) for size in (0, 100, 1000)] == [2.0, 3.0, 12.0]


# Slow clients --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deaf(address, body):
    """A client that sends a request and reads nothing of the response."""
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        line.settimeout(20)
        line.connect((host, int(port)))
        start = f"POST {LOOKUP} HTTP/1.1\r\nHost: a\r\nContent-Type: {TENSORS['Content-Type']}\r\n"
        line.sendall(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield line


@pytest.fixture
def large(monkeypatch):
    """Returns a body whose response has 16 MB, more than the kernel buffers for a connection."""
    monkeypatch.setitem(cases.MAX_KEYS, "user", 1 << 20)
    return pack({"user": np.arange(1 << 20, dtype="<u8")})


def test_responses_that_nobody_reads_are_counted(large):
    """A response counts as a request with its bytes until the client reads it or leaves."""
    with cases.serving(cases.Session(), max_requests=2) as found, httpx.Client(base_url=found.address) as client:
        answered = "jaxsok_requests_total", "200", "lookup", "ranker"
        with deaf(found.address, large) as reader, deaf(found.address, large):
            wait_until(lambda: cases.samples_of(client.get("/metrics").text).get(answered) == 2)
            assert num_taken(client) == 2 and found.app.held.num_bytes > 2 << 24
            assert client.post(LOOKUP, json={"keys": {"user": [4]}}).status_code == 503
            got = b""
            while b"\r\n\r\n" not in got:
                got += reader.recv(1 << 10)
            start, _, body = got.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200")
            rest = int(re.search(rb"content-length: (\d+)", start.lower())[1]) - len(body)
            while rest:
                rest -= len(reader.recv(1 << 20))
            wait_until(lambda: num_taken(client) == 1)
            assert is_well(client)
        wait_until(lambda: num_taken(client) == 0)
        assert found.app.held.num_bytes == 0


def test_clients_that_do_not_read_are_cut_off(large):
    with cases.serving(cases.Session(), max_requests=1, send_timeout_s=0.5) as found:
        with httpx.Client(base_url=found.address) as client, deaf(found.address, large) as line:
            wait_until(lambda: cases.samples_of(client.get("/metrics").text)["jaxsok_unread_responses_total",] == 1)
            wait_until(lambda: num_taken(client) == 0)
            num_bytes = 0
            with contextlib.suppress(ConnectionError):
                while part := line.recv(1 << 20):
                    num_bytes += len(part)
            assert num_bytes < 1 << 24, "the connection ended before the response did"
            assert is_well(client) and found.app.held.num_bytes == 0


def raw_line(address):
    """Opens a connection whose client takes little at a time."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    host, port = address.removeprefix("http://").split(":")
    line.connect((host, int(port)))
    line.settimeout(5)
    return line


def connections_of(found):
    """Returns the connections that a server holds."""
    return len(found.server_state.connections)


def test_the_end_of_a_response_that_nobody_reads_is_cut_off():
    """The last bytes of a response lie in the server's buffer when it is sent; its connection ends all the same."""
    options = {"send_timeout_s": 0.5, "keep_alive_s": 0.2}
    body = json.dumps({"keys": {"user": [7] * 10_000}}).encode()
    head = f"POST {LOOKUP} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with cases.serving(cases.Session(), **options) as found, raw_line(found.address) as line:
        line.sendall(head.encode() + body)
        wait_until(lambda: found.app.held.num_requests == 0 and connections_of(found) == 1)
        wait_until(lambda: connections_of(found) == 0, 10)
        with httpx.Client(base_url=found.address) as client:
            assert is_well(client)


def test_pages_that_nobody_reads_are_cut_off():
    """Also those that are not the models'."""
    with cases.serving(cases.Session(), send_timeout_s=0.5, keep_alive_s=0.5) as found, raw_line(found.address) as line:
        registry = found.app.metrics.registry
        prometheus_client.Gauge("large", "x" * (1 << 24), registry=registry)  # more than the kernel buffers
        line.sendall(2 * b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")  # the second response waits for the first
        wait_until(lambda: registry.get_sample_value("jaxsok_unread_responses_total") == 1)
        wait_until(lambda: connections_of(found) == 0, 10)
        with httpx.Client(base_url=found.address) as client:
            assert is_well(client)


def test_a_connection_without_a_request_is_closed():
    with cases.serving(cases.Session(), keep_alive_s=0.3) as found, raw_line(found.address) as line:
        assert line.recv(1) == b""


def test_little_of_a_response_is_on_its_way(large, monkeypatch):
    """A connection never buffers more of a response than a client may take one timeout to read."""
    given, send_all, most = [0], server.App.send, 1 << 19

    async def send_counted(app, response, send):
        async def count_sent(message):
            given[0] += len(message.get("body", b""))
            await send(message)

        await send_all(app, response, count_sent)

    monkeypatch.setattr(server.App, "send", send_counted)
    with cases.serving(cases.Session()) as found, deaf(found.address, large) as line:
        got = line.recv(1 << 16)
        start, _, body = got.partition(b"\r\n\r\n")
        rest = int(re.search(rb"content-length: (\d+)", start.lower())[1]) - len(body)
        assert rest > 16 * most
        num_read = len(body)
        while rest:
            wanted = num_read + min(rest, 1 << 16)
            wait_until(lambda wanted=wanted: given[0] >= wanted)
            assert given[0] - num_read <= most
            part = line.recv(min(rest, 1 << 16))
            rest, num_read = rest - len(part), num_read + len(part)
        with httpx.Client(base_url=found.address) as client:
            wait_until(lambda: num_taken(client) == 0)


def test_clients_that_read_for_too_long_are_cut_off(large):
    """A client that reads a whole response too slowly is cut off, although each piece is in time."""
    options = {"send_timeout_s": 1.0, "min_send_rate": 1 << 30}
    with cases.serving(cases.Session(), **options) as found, deaf(found.address, large) as line:
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while part := line.recv(1 << 16):
                num_bytes += len(part)
                time.sleep(0.02)  # 16 MB take at least 5 s.
        assert num_bytes < 1 << 24, "the connection ended before the response did"
        with httpx.Client(base_url=found.address) as client:
            assert cases.samples_of(client.get("/metrics").text)["jaxsok_unread_responses_total",] == 1
            wait_until(lambda: num_taken(client) == 0)
            assert is_well(client) and found.app.held.num_bytes == 0


def test_clients_that_read_nothing_take_bounded_memory(large):
    """Sixteen clients that read nothing of 16 MB each take bounded memory: some wait, the others are refused."""
    with cases.serving(cases.Session(), max_requests=64, max_held_bytes=60 << 20) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client, contextlib.ExitStack() as stack:
            before = None
            for number in range(16):
                stack.enter_context(deaf(found.address, large))
                wait_until(lambda number=number: num_answered(client) > number)
                assert found.app.held.num_bytes <= 60 << 20
                if number == 4:
                    before = cases.resident_bytes(os.getpid())
            assert cases.resident_bytes(os.getpid()) - before < 60 << 20
            assert (
                cases.samples_of(client.get("/metrics").text)["jaxsok_requests_total", "503", "lookup", "ranker"] >= 12
            )
            assert is_well(client)


def num_answered(client):
    """Returns the number of answered lookups, of any status."""
    found = cases.samples_of(client.get("/metrics").text)
    return sum(value for name, value in found.items() if name[0] == "jaxsok_requests_total")


# The end -------------------------------------------------------------------------------------------------------------


def test_what_was_taken_is_finished():
    """On a stop the server is not ready but answers; then it refuses connections, finishes requests and closes."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, drain_s=2.0) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(client.post, LOOKUP, json={"keys": {"user": [i]}}) for i in range(8)]
            wait_until(lambda: num_taken(client) == 8)
            found.stop()
            unready = client.get("/readyz")
            assert unready.status_code == 503 and unready.json()["error"]["code"] == "stopping"
            wait_until(lambda: is_closed(found.address))
            assert not session.is_closed
            hold.set()
            assert [future.result().json()["rows"]["user"][0] for future in asked] == [
                cases.row_of("user", i, 1) for i in range(8)
            ]
    assert session.is_closed
    assert 0 < session.close_timeout_s <= found.app.options.shutdown_s and found.app.is_closed


def test_the_wait_for_requests_is_bounded():
    """A call that does not return is cut off at the stop: its client gets an error, and the server ends."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, shutdown_s=0.5) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}})
            wait_until(lambda: num_taken(client) == 1)
            begin = time.monotonic()
            found.stop()
            late = asked.result()
            assert late.status_code == 503 and late.json()["error"]["code"] == "stopping"
            assert time.monotonic() - begin < 20
    assert found.app.num_running == 1 and not session.is_closed, "closed while it is used"
    hold.set()


def test_a_second_interrupt_ends_the_wait():
    """After a second SIGINT the server waits neither for requests nor for the balancer."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, drain_s=60.0, shutdown_s=60.0) as found:
        with httpx.Client(base_url=found.address) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}}, timeout=20)
            wait_until(lambda: num_taken(client) == 1)
            for _ in range(2):
                time.sleep(0.3)
                found.handle_exit(signal.SIGINT, None)
            found.thread.join(30)
            assert not found.thread.is_alive(), "the drain goes on"
            hold.set()
            with contextlib.suppress(httpx.HTTPError):
                asked.result()


def connect(address):
    """Opens a kept-alive connection of the standard library, which never reconnects by itself."""
    host, port = address.removeprefix("http://").split(":")
    line = http.client.HTTPConnection(host, int(port), timeout=20)
    line.connect()
    line.auto_open = 0
    return line


def ask_on(line, key):
    """Sends one request on a connection; returns the status, and whether the server closes the connection."""
    line.request("POST", LOOKUP, json.dumps({"keys": {"user": [key]}}), JSON)
    response = line.getresponse()
    body = json.loads(response.read())
    if response.status == 200:
        assert body["rows"]["user"] == [cases.row_of("user", key, body["version"])]
    return response.status, response.will_close


@pytest.mark.parametrize("drain_s", [0.0, 0.5])
def test_connections_that_are_kept_alive_lose_no_request(drain_s):
    """SIGTERM loses no request of 32 kept-alive connections: 16 busy ones, and 16 idle ones that send once more."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests/serving/server_cases.py"), "0.05", str(drain_s)]
    stopped = threading.Event()

    def busy(number, line):
        found = []
        while not found or not found[-1][1]:
            found.append(ask_on(line, number))
        return found

    def idle(number, line):
        found = [ask_on(line, number)]
        assert stopped.wait(20)
        time.sleep(0.06 * number)  # Up to 0.9 s into the stop.
        return [*found, ask_on(line, number)]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip()
            with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(32) as threads:
                lines = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(32)]
                asked = [threads.submit(busy if i < 16 else idle, i % 16, line) for i, line in enumerate(lines)]
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                begin = time.monotonic()
                stopped.set()
                found = [future.result() for future in asked]
            output, _ = process.communicate(timeout=20)
            took_s = time.monotonic() - begin
        finally:
            process.kill()
    assert process.returncode == 0 and output == "ended\n"
    assert {status for response in found for status, _ in response} <= {200, 503}
    assert all(response[-1][1] for response in found), "the server kept a connection open and then closed it"
    assert all(len(response) > 1 for response in found)
    assert took_s < 10 + drain_s


def test_connections_that_are_made_are_answered_or_refused():
    """While the server stops, each new connection is answered or refused, and none is reset."""
    asked, is_first = collections.Counter(), threading.Barrier(33)

    def ask(address, number):
        is_first.wait(20)
        while True:
            with contextlib.closing(connect(address)) as line:
                asked[ask_on(line, number)[0]] += 1

    session = cases.Session()
    with cases.serving(session) as found, concurrent.futures.ThreadPoolExecutor(32) as threads:
        asks = [threads.submit(ask, found.address, number) for number in range(32)]
        is_first.wait(20)
        time.sleep(0.5)
        found.stop()
        ends = collections.Counter(type(future.exception()) for future in asks)
    assert set(asked) <= {200, 503} and asked[200] > 0
    # The end follows the last look into the kernel's queue by microseconds.
    assert ends[ConnectionRefusedError] >= 30, ends


@pytest.mark.parametrize("is_used", [True, False])
def test_idle_connections_do_not_hold_up_the_end(is_used):
    """A stop closes idle connections after their usual idle time, not before it and not much later."""
    with (
        cases.serving(cases.Session(), keep_alive_s=1.0) as found,
        contextlib.closing(connect(found.address)) as line,
    ):
        if is_used:
            assert ask_on(line, 4) == (200, False)
        begin = time.monotonic()
        found.stop()
        assert line.sock.recv(1) == b""
        assert 0.8 < time.monotonic() - begin < 5
        found.thread.join(20)
        assert not found.thread.is_alive() and time.monotonic() - begin < 10


def test_the_end_of_idle_connections_is_within_the_bound_of_the_stop():
    with (
        cases.serving(cases.Session(), keep_alive_s=60.0, shutdown_s=0.5) as found,
        contextlib.closing(connect(found.address)) as line,
    ):
        assert ask_on(line, 4) == (200, False)
        begin = time.monotonic()
        found.stop()
        found.thread.join(20)
        assert not found.thread.is_alive() and time.monotonic() - begin < 10


def test_a_signal_ends_the_process_in_order():
    """SIGINT ends the process in order; test_server_load.py covers SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests/serving/server_cases.py"), "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip()
            with httpx.Client(base_url=address, timeout=20) as client:
                assert is_well(client)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and output == "ended\n"
