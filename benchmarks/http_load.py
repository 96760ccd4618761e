"""Load for an HTTP server: processes of clients that ask again and again over kept connections.

Fed by `bench_http.py`, which runs `python -m benchmarks.http_load`; feeds it one line of JSON. The standard library
alone: a process starts at once, and takes nothing of the device. What this can ask at most is measured against a server
that answers the same bytes each time (`--trivial`); no faster server can be told from one that is that fast.

Without a rate, a client sends its next request when it has the last answer. So the number of clients is the number of
requests under way, and their times are that number divided by what the server answers at most. With a rate, each
request has a time at which it is due, and clients take turns. A request's time is counted from when it is due, also if
its client still waits for the answer before it: otherwise a slow server would be asked less, and look faster. For the
same reason those that were due and have no answer at the end are counted, as lost, with the time that they have waited.

Not here: what the requests are, and what their times mean.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import pathlib
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]

RETRY_S = 0.02
"""Time between two attempts to connect."""

CONNECT_S = 0.1
"""Time for clients to connect before the first request is due."""

CHECK_EVERY = 97
"""One answer in this many is kept whole for the caller; a prime, so that it meets all requests in turn."""


class Client(asyncio.Protocol):
    """A client of one connection; it connects again when the server closes it."""

    def __init__(self, load: "Load", requests: Iterator[bytes], due: Iterator[float] | None):
        """Takes the requests that it sends, and when each is due; None: at once."""
        self._load, self._requests, self._due = load, requests, due
        self._transport: asyncio.Transport | None = None
        self._begin: float | None = None
        self._next: float | None = None  # when the next request is due, if it waits for that
        self._last_end, self._is_done = 0.0, False
        self._received, self._wanted = bytearray(), 0
        self._status, self._is_last = 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        now = time.monotonic()
        due = now if self._due is None else next(self._due)
        self._next = None if self._due is None else due
        if self._load.is_over(max(now, due)):
            self._is_done = True
            self._transport.close()
        elif self._due is None:
            self._send(due)
        else:
            asyncio.get_running_loop().call_later(max(0.0, due - now), self._send, due)

    def _send(self, due: float) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._begin, self._next = due, None
            self._load.late.append(time.monotonic() - max(due, self._last_end))
            self._transport.write(next(self._requests))

    def _dues(self) -> Iterator[float] | None:
        """Returns when further requests are due, with one that waits for it."""
        return self._due if self._due is None or self._next is None else itertools.chain([self._next], self._due)

    def give_up(self) -> None:
        """Closes the connection; at a fixed rate counts what was due and has no answer at the end of the time."""
        self._is_done = True
        if self._transport is not None:
            self._transport.abort()
        if (dues := self._dues()) is None:
            self._begin = None
            return
        if self._begin is not None:
            self._end(0)
        for due in itertools.takewhile(lambda due: not self._load.is_over(due), dues):
            self._load.add(due, 0, b"")

    def data_received(self, data: bytes) -> None:
        """Takes a part of an answer."""
        self._received += data
        if not self._wanted:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            self._status, self._wanted = int(head[9:12]), end + 4 + length
            self._is_last = b"\r\nconnection: close" in head
        if len(self._received) < self._wanted:
            return
        answer, self._wanted = bytes(self._received), 0
        self._received.clear()
        self._end(self._status, answer)
        if self._is_last:
            assert self._transport is not None
            self._transport.close()
        else:
            self._ask()

    def _end(self, status: int, answer: bytes = b"") -> None:
        assert self._begin is not None
        self._load.add(self._begin, status, answer)
        self._begin, self._last_end = None, time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts the request that was lost, if there was one, and connects again."""
        if self._begin is not None:
            self._end(0)
        self._received.clear()
        self._wanted = 0
        if not self._is_done and not self._load.is_over():
            self._load.connect(self._requests, self._dues(), self)


class Load:
    """The clients of one process, and the times of their requests."""

    def __init__(
        self,
        port: int,
        num_clients: int,
        seconds: float,
        requests: Sequence[bytes],
        rate: float | None,
        delay_s: float = 0.0,
    ):
        """Declares the load, of requests a second or as many as are answered (None); nothing is sent yet.

        The first request is due after `delay_s`, by which processes of clients take turns.
        """
        self._port, self._num_clients, self._seconds, self._all = port, num_clients, seconds, requests
        self._rate, self._delay_s = rate, delay_s
        self._end, self._tasks = 0.0, set[asyncio.Task[None]]()
        self._clients: set[Client] = set()
        self.ends: list[float] = []
        self.latencies: list[float] = []
        self.statuses: list[int] = []
        self.late: list[float] = []
        """How long after it was due, or after the answer before it, each request was sent, in seconds."""
        self.refused = 0
        self.checked: list[bytes] = []

    def is_over(self, at: float | None = None) -> bool:
        """Returns whether the time is over, now or at another time."""
        return (time.monotonic() if at is None else at) >= self._end

    def add(self, begin: float, status: int, answer: bytes) -> None:
        """Adds a request; status 0: its connection was closed before the answer."""
        now = time.monotonic()
        self.ends.append(now)
        self.latencies.append(now - begin)
        self.statuses.append(status)
        if status == 200 and len(self.ends) % CHECK_EVERY == 1 and len(self.checked) < 8:
            self.checked.append(answer)

    def connect(self, requests: Iterator[bytes], due: Iterator[float] | None, instead: Client | None = None) -> None:
        """Connects a client in the background, as often as it takes; in place of another whose connection ended."""
        client = Client(self, requests, due)
        self._clients.discard(instead)
        self._clients.add(client)
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: Client) -> None:
        while not self.is_over():
            try:
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: client, "127.0.0.1", self._port)
                return
            except OSError:
                self.refused += 1
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Asks until the time is over."""
        begin = time.monotonic() + (0.0 if self._rate is None else CONNECT_S)
        self._end = begin + self._seconds
        for number in range(self._num_clients):
            first, due = number * len(self._all) // self._num_clients, None
            if self._rate is not None:
                first_due = begin + self._delay_s + number / self._rate
                due = itertools.count(first_due, self._num_clients / self._rate)
            self.connect(itertools.cycle([*self._all[first:], *self._all[:first]]), due)
        await asyncio.sleep(self._end - time.monotonic() + 0.05)
        await asyncio.sleep(min(0.5, 0.05 * self._seconds))  # Requests under way end.
        for client in self._clients:
            client.give_up()


class _Trivial(asyncio.Protocol):
    """A server's connection that gives each request the same answer, without reading it."""

    def __init__(self, answer: bytes, request_bytes: int):
        self._answer, self._request_bytes, self._num_bytes = answer, request_bytes, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        while self._num_bytes >= self._request_bytes:
            self._num_bytes -= self._request_bytes
            self._transport.write(self._answer)


async def _serve(answer_bytes: int, request_bytes: int) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {answer_bytes}\r\n\r\n".encode()
    answer = head + b"x" * answer_bytes
    server = await asyncio.get_running_loop().create_server(lambda: _Trivial(answer, request_bytes), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


# For the caller ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def trivial_server(answer_bytes: int, request_bytes: int) -> Iterator[int]:
    """Runs a server that answers the same bytes to each request of a size, in a process of its own; yields its port."""
    options = ["--trivial", str(answer_bytes), "--request-bytes", str(request_bytes)]
    with _started(options) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def _started(options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"{__package__}.http_load", *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


class Asking:
    """Processes of clients that ask for some seconds; started by `asking`."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]):
        """Takes processes that have begun."""
        self._processes = processes

    def wait(self) -> dict[str, Any]:
        """Waits for the end; returns ends, latencies (seconds), statuses, refused connections, and checked answers.

        `late` has the seconds by which requests were sent after they were due, or after the answer before them.
        """
        found: dict[str, Any] = {"ends": [], "latencies": [], "statuses": [], "late": [], "refused": 0, "checked": []}
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"http_load: a process of clients ended with {process.wait()}.")
            for name, value in json.loads(line).items():
                found[name] += value
        found["checked"] = [base64.b64decode(answer) for answer in found["checked"]]
        return found


@contextlib.contextmanager
def asking(
    ports: Sequence[int],
    num_clients: int,
    seconds: float,
    requests: Sequence[bytes],
    num_processes: int,
    rate: float | None = None,
) -> Iterator[Asking]:
    """Starts the clients, divided among processes; process i asks port i, modulo the number of ports.

    They ask `rate` requests a second together; None: each asks again when it has its answer.
    """
    num_processes = max(1, min(num_processes, num_clients))
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(num_processes):
            mine = num_clients * (number + 1) // num_processes - num_clients * number // num_processes
            options = ["--port", str(ports[number % len(ports)]), "--clients", str(mine), "--seconds", str(seconds)]
            if rate is not None:
                options += ["--rate", str(rate * mine / num_clients), "--delay-s", str(number / rate)]
            process = stack.enter_context(_started(options))
            assert process.stdin is not None and process.stdout is not None
            # Each process begins elsewhere among the requests.
            first = number * len(requests) // num_processes
            order = [*requests[first:], *requests[:first]]
            print(json.dumps([base64.b64encode(request).decode() for request in order]), file=process.stdin, flush=True)
            processes.append(process)
        for process in processes:
            if process.stdout.readline() != "ready\n":  # pyright: ignore[reportOptionalMemberAccess]
                raise RuntimeError(f"http_load: a process of clients ended with {process.wait()}.")
        for process in processes:
            print("go", file=process.stdin, flush=True)
        yield Asking(processes)


def main() -> None:
    """Asks a port, or is the trivial server."""
    parser = argparse.ArgumentParser()
    for name in ("port", "clients", "trivial", "request-bytes"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("seconds", "rate"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--delay-s", type=float, default=0.0)
    options = parser.parse_args()
    if options.trivial is not None:
        asyncio.run(_serve(options.trivial, options.request_bytes))
        return
    requests = [base64.b64decode(request) for request in json.loads(sys.stdin.readline())]
    load = Load(options.port, options.clients, options.seconds, requests, options.rate, options.delay_s)
    # The timers of epoll have whole milliseconds, those of select microseconds.
    select = selectors.DefaultSelector if options.rate is None else selectors.SelectSelector
    print("ready", flush=True)
    sys.stdin.readline()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(select())) as runner:
        runner.run(load.run())
    found: dict[str, Any] = {"ends": load.ends, "latencies": load.latencies, "statuses": load.statuses}
    found["late"] = load.late
    checked = [base64.b64encode(answer).decode() for answer in load.checked]
    print(json.dumps({**found, "refused": load.refused, "checked": checked}), flush=True)


if __name__ == "__main__":
    main()
