"""The HTTP server under load: requests a second and their times, while versions come, while it restarts, its memory.

Question: how many small requests does a server answer, of one process and with front ends, and how long do they take?
          What do clients see while new versions come, and while the server is restarted? Does its memory grow?
Workload: `python -m jaxsok serve`, with `--processes 1` and then with a front end for each two cores, with 26 tables
          of 10,000 rows of 16 floats, all on the device. A request has 26 keys: one of each table, or 26 of one table.
          1, 8, 64 and 256 clients in processes of their own, each of which asks again when it has its answer, in JSON
          and in the binary format. And 64 clients that ask 5,500 and 11,000 requests a second together.
Limit:    the same clients asking servers that do nothing but send as many bytes (`http_load.py`): no server that is
          faster could be told from these. On a machine with few cores the clients take time from the server.
Command:  `python -m jaxsok bench --only http [--minutes 60]`
Last result: docs/results/serving.md (one H100, commits f373908 and 103c5ad).

The median, 99th and 99.9th percentile are of single requests, from the first byte that is sent to the last that
arrives, after a first fifth of the time. Clients that ask again at once drive the server to its most requests a second,
where times are the number of clients divided by that; the times that clients see below it are those of a fixed rate,
counted from when each request is due. "Late" is how long after that it was sent: these clients were too slow, or the
answer before it was. Versions, restarts and memory are measured with front ends. While versions
come, the server reads a new version of all rows of the 26 tables, each second, from a folder that it watches. A restart
is SIGTERM, the end of the process, and a new one on the same port; "without an answer" is the longest time in which no
client got one. Memory is what is resident in all processes of the server, as a median over a tenth of the time, after
one sixth of the minutes and at their end.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsok import Records
from jaxsok.interchange.hps import write_hps

from . import http_load, records
from .records import Record, Recorder
from .timing import summary

NUM_TABLES, NUM_ROWS, DIM, NUM_KEYS = 26, 10_000, 16, 26
CLIENTS, QUICK_CLIENTS = (1, 8, 64, 256), (1, 8)
FORMATS = {"json": "application/json", "binary": "application/vnd.jaxsok.v1+safetensors"}
SHAPES = {"26 tables": "many", "one table": "single"}
"""The models by the shape of a request for them."""
SECONDS, QUICK_SECONDS = 3.0, 0.6
"""Seconds of one measurement."""
RATES, QUICK_RATES = (5_500.0, 11_000.0), (100.0,)
"""Requests a second: a tenth above the 5,000 that are wanted, and twice as many."""
RATE_CLIENTS = 64
"""Connections over which requests of a fixed rate are spread."""
UNDER_LOAD = 64, "json"
"""Clients and format while versions come, and while the server restarts."""
UPDATE_S, QUICK_UPDATE_S = 12.0, 2.5
"""Seconds in which versions come, one each `INTERVAL_S`."""
INTERVAL_S = 1.0
RESTART_AFTER_S, QUICK_RESTART_AFTER_S = 2.0, 0.5
MINUTES, QUICK_MINUTES = 0.5, 0.05
"""Minutes of load in which the growth of memory is measured, unless the command line gives another number."""
ROUND_S = 30.0
"""Seconds after which new clients are started while memory is measured."""
SAMPLE_S = 0.1
READY_S = 240.0
"""Seconds until a server answers, at most."""
NUM_REQUESTS = 200
"""Requests in rotation."""

_ADDRESS = re.compile(r"answers at http://[^ ]*:([0-9]+)\s")
_SKIPPED = 0.2
"""The share of the time of a measurement that is left out at its begin."""
_ROOT = pathlib.Path(__file__).resolve().parents[1]


def measure(recorder: Recorder, seed: int, scale: float, is_quick: bool = False, minutes: float | None = None) -> None:
    """Measures the load by clients and format, then updates, a restart, and memory."""
    try:
        import jaxsok.serving.http.processes  # noqa: F401
    except ImportError as error:
        recorder.skip("http", f"{error}; the server needs jaxsok[serving]")
        return
    minutes = minutes or (QUICK_MINUTES if is_quick else MINUTES)
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(recorder, pathlib.Path(folder), seed, max(64, round(NUM_ROWS * scale)), is_quick)
        run.write()
        with run.server(num_front_ends()) as server:
            steps = {
                "rates": (0.0, run.rates),
                "load": (0.0, run.load),
                "updates": (2 * UPDATE_S, run.updates),
                "memory": (60 * minutes, lambda server: run.memory(server, minutes)),
                "restart": (2 * server.seconds, run.restart),
            }
            for name, (needs_s, step) in steps.items():
                if recorder.has_time(f"http {name}", needs_s):
                    with recorder.attempt(f"http {name}"):
                        step(server)
                    recorder.write()
        if recorder.has_time("http load of one process", server.seconds):
            with run.server(1) as server, recorder.attempt("http load of one process"):
                run.load(server)


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    num_processes: int
    """The processes that answer requests."""
    port: int
    seconds: float
    """From its start until it took connections."""

    def resident_bytes(self) -> int:
        """Returns the resident memory of all its processes; what they share counts for each."""
        pages = [int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _tree(self.process.pid)]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> tuple[float, float]:
        """Returns the seconds that all its processes have used processor cores, and those of the tables' process."""
        used = []
        for pid in _tree(self.process.pid):
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return sum(used), used[0]


@dataclasses.dataclass(frozen=True)
class _Run:
    """The objects that all measurements share."""

    recorder: Recorder
    folder: pathlib.Path
    seed: int
    num_rows: int
    is_quick: bool

    def __post_init__(self) -> None:
        (self.folder / "watched" / "many").mkdir(parents=True)

    def write(self) -> None:
        """Writes tables and the configuration."""
        self._write_tables(self.folder / "tables", 0)
        models = []
        for name, tables, per_sample in (("many", _NAMES, 1), ("single", _NAMES[:1], NUM_KEYS)):
            models.append(
                {
                    "model": name,
                    "sparse_files": [str(self.folder / "tables" / table) for table in tables],
                    "embedding_table_names": tables,
                    "embedding_vecsize_per_table": [DIM] * len(tables),
                    "maxnum_catfeature_query_per_table_per_sample": [per_sample] * len(tables),
                    "default_value_for_each_table": [0.0] * len(tables),
                    "deployed_device_list": [0],
                    "max_batch_size": 256,
                    "gpucacheper": 1.0,
                    "num_of_worker_buffer_in_pool": 4,
                }
            )
        (self.folder / "config.json").write_text(json.dumps({"supportlonglong": True, "models": models}))

    def _write_tables(self, folder: pathlib.Path, version: int) -> None:
        """Writes HPS directories whose rows all begin with the number of a version."""
        keys = np.arange(self.num_rows, dtype=np.uint64)
        rows = np.random.default_rng(self.seed).random((self.num_rows, DIM), np.float32)
        rows[:, 0] = version
        for name in _NAMES:
            write_hps(folder / name, Records(keys, rows))

    @contextlib.contextmanager
    def server(self, num_processes: int, port: int = 0) -> Iterator[Server]:
        """Runs the command line until it answers; stops it at the end."""
        server = self.start(num_processes, port)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    def start(self, num_processes: int, port: int = 0) -> Server:
        """Starts a server, and waits until it takes connections."""
        # The process that measures may hold the device's memory: the server takes only what it needs.
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.04",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "jaxsok", "serve", str(self.folder / "config.json"), "--port", str(port)]
        command += ["--watch", str(self.folder / "watched"), "--watch-interval-s", "0.1"]
        command += ["--processes", str(num_processes)]
        begin, log = time.monotonic(), self.folder / "server.log"
        with log.open("wb") as out:  # an unread pipe would hold up the server
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None and time.monotonic() - begin < READY_S:
            if (found := _ADDRESS.search(log.read_text())) is not None:
                return Server(process, num_processes, int(found[1]), time.monotonic() - begin)
            time.sleep(0.01)
        process.kill()
        raise RuntimeError(f"bench_http: the server ended with {process.wait()}: {log.read_text()[-1000:]}")

    def requests(self, shape: str, given: str) -> list[bytes]:
        """Makes requests of one shape and format."""
        rng = np.random.default_rng(self.seed)
        made = []
        for _ in range(NUM_REQUESTS):
            keys = rng.integers(0, self.num_rows, NUM_KEYS)
            by_table = {name: keys[number : number + 1] for number, name in enumerate(_NAMES)}
            made.append(request_of(SHAPES[shape], by_table if shape == "26 tables" else {_NAMES[0]: keys}, given))
        return made

    # Load ------------------------------------------------------------------------------------------------------------

    def load(self, server: Server) -> None:
        """Measures each shape and format by the number of clients, and the clients alone."""
        clients = QUICK_CLIENTS if self.is_quick else CLIENTS
        seconds = QUICK_SECONDS if self.is_quick else SECONDS
        for shape, given in itertools.product(SHAPES, FORMATS):
            requests = self.requests(shape, given)
            answer = self._ask(server, 1, 0.3, requests)["checked"][0]
            limits = self._limits(clients, 0.3 * seconds, requests, len(answer))
            for num_clients in clients:
                number = server.num_processes
                variant = f"{shape}, {given}, {f'{number} front ends' if number > 1 else 'one process'}"
                what = f"http {variant}, {num_clients} clients"
                if self.recorder.has_time(what, seconds):
                    found, notes = self._ask_checked(server, num_clients, seconds, requests, given)
                    notes |= {"clients_alone_per_s": limits[num_clients], "shape": shape}
                    self.add(records.HTTP, variant, num_clients, found, seconds, **notes)
            self.recorder.write()

    def rates(self, server: Server) -> None:
        """Measures each shape and format at fixed rates."""
        seconds = QUICK_SECONDS if self.is_quick else SECONDS
        for shape, given, rate in itertools.product(SHAPES, FORMATS, QUICK_RATES if self.is_quick else RATES):
            variant = f"{shape}, {given}, {server.num_processes} front ends, {rate:,.0f} requests/s"
            if self.recorder.has_time(f"http {variant}", seconds):
                requests = self.requests(shape, given)
                found, notes = self._ask_checked(server, RATE_CLIENTS, seconds, requests, given, rate)
                notes |= {"shape": shape, "rate": rate, "late_p99_ms": 1e3 * float(np.percentile(found["late"], 99))}
                self.add(records.HTTP, variant, RATE_CLIENTS, found, seconds, **notes)

    def _ask_checked(
        self,
        server: Server,
        num_clients: int,
        seconds: float,
        requests: Sequence[bytes],
        given: str,
        rate: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Asks, and checks some answers; returns what was found, and notes about the server meanwhile."""
        before = server.cpu_s()
        found = self._ask(server, num_clients, seconds, requests, rate)
        cpu_s, of_tables_s = (now - then for now, then in zip(server.cpu_s(), before, strict=True))
        for checked in found["checked"]:
            check_answer(checked, given)
        notes = {"format": given, "processes": server.num_processes, "cores": cpu_s / seconds}
        of_each = {"cpu_us": cpu_s, "tables_us": of_tables_s}
        return found, notes | {name: 1e6 * s / len(found["ends"]) for name, s in of_each.items()}

    def _limits(
        self, clients: Sequence[int], seconds: float, requests: Sequence[bytes], answer_bytes: int
    ) -> dict[int, float]:
        """Measures how many requests a second the clients can ask at most."""
        size = max(map(len, requests))
        same = [request + b" " * (size - len(request)) for request in requests]
        limits = {}
        with contextlib.ExitStack() as stack:
            servers = [http_load.trivial_server(answer_bytes, size) for _ in range(num_processes())]
            ports = [stack.enter_context(server) for server in servers]
            for num_clients in clients:
                with http_load.asking(ports, num_clients, seconds, same, num_processes()) as asking:
                    limits[num_clients] = rate_of(asking.wait(), seconds)
        return limits

    def _ask(
        self, server: Server, num_clients: int, seconds: float, requests: Sequence[bytes], rate: float | None = None
    ) -> dict[str, Any]:
        with http_load.asking([server.port], num_clients, seconds, requests, num_processes(), rate) as asking:
            return asking.wait()

    def add(
        self, what: str, variant: str, num_clients: int, found: dict[str, Any], seconds: float, **notes: Any
    ) -> Record:
        """Adds the record of a load."""
        ms = latencies_ms(found, seconds, with_lost="rate" in notes)
        return self.recorder.add(
            Record(
                "http",
                what,
                "jaxsok",
                summary(ms, 1),
                variant=f"{variant}, {num_clients} clients",
                num_keys=NUM_KEYS,
                notes={
                    "part": "http",
                    "num_clients": num_clients,
                    "requests_per_s": rate_of(found, seconds),
                    "p99_ms": float(np.percentile(ms, 99)),
                    "p999_ms": float(np.percentile(ms, 99.9)),
                    "max_ms": max(ms),
                    "errors": sum(status != 200 for status in found["statuses"]),
                    **notes,
                },
            )
        )

    # Updates, restarts, memory ---------------------------------------------------------------------------------------

    def updates(self, server: Server) -> None:
        """Measures a load while versions come, after one without."""
        num_clients, given = UNDER_LOAD
        seconds, requests = QUICK_UPDATE_S if self.is_quick else UPDATE_S, self.requests("26 tables", given)
        found = self._ask(server, num_clients, seconds, requests)
        self.add(records.HTTP_UPDATE, "without", num_clients, found, seconds, num_versions=0)
        with http_load.asking([server.port], num_clients, seconds, requests, num_processes()) as asking:
            begin, count = time.monotonic(), 0
            while time.monotonic() < begin + seconds - INTERVAL_S:
                count += 1
                written = self.folder / "watched" / "many" / f"{count}.tmp"
                self._write_tables(written, count)
                written.rename(written.with_suffix(""))
                time.sleep(max(0.0, begin + count * INTERVAL_S - time.monotonic()))
            found = asking.wait()
        seen = {check_answer(answer, given) for answer in found["checked"]}
        versions = self._version(server)
        if versions < 2:
            raise RuntimeError(f"bench_http: {count} versions were written, the server is at version {versions}.")
        self.recorder.say(f"http: versions seen in checked answers: {sorted(seen)}; served: {versions}")
        self.add(
            records.HTTP_UPDATE, "with versions", num_clients, found, seconds, num_versions=versions - 1, written=count
        )

    def _version(self, server: Server) -> int:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET /v1/models/many HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return int(json.loads(answer.partition(b"\r\n\r\n")[2])["version"])

    def restart(self, first: Server) -> None:
        """Measures what clients see while a server ends and another one begins on its port."""
        num_clients, given = UNDER_LOAD
        after_s = QUICK_RESTART_AFTER_S if self.is_quick else RESTART_AFTER_S
        requests = self.requests("26 tables", given)
        with contextlib.ExitStack() as stack:
            seconds = 2 * after_s + 2 * first.seconds + 3.0  # The stop takes a second or so.
            asking = stack.enter_context(
                http_load.asking([first.port], num_clients, seconds, requests, num_processes())
            )
            time.sleep(after_s)
            begin = time.monotonic()
            first.process.send_signal(signal.SIGTERM)
            first.process.wait(timeout=READY_S)
            has_ended = time.monotonic()
            second = stack.enter_context(self.server(first.num_processes, first.port))
            is_ready = time.monotonic()
            found = asking.wait()
        ends = np.array(found["ends"])[np.array(found["statuses"]) == 200]
        ends.sort()
        later = ends[ends > has_ended]
        if not later.size:
            raise RuntimeError("bench_http: no client got an answer of the second server.")
        gaps = np.diff(ends)
        statuses = found["statuses"]
        self.add(
            records.HTTP_RESTART,
            "restart",
            num_clients,
            found,
            seconds,
            lost=sum(status == 0 for status in statuses),
            refused_connections=found["refused"],
            stop_s=has_ended - begin,
            start_s=is_ready - has_ended,
            first_answer_s=float(later[0]) - has_ended,
            without_answer_s=float(gaps.max()),
            load_s=second.seconds,
        )

    def memory(self, server: Server, minutes: float) -> None:
        """Measures the growth of resident memory between a sixth of the minutes and their end."""
        num_clients, _ = UNDER_LOAD
        requests = [r for shape, given in itertools.product(SHAPES, FORMATS) for r in self.requests(shape, given)]
        begin, seconds = time.monotonic(), 60 * minutes
        samples: list[tuple[float, int]] = []
        total: dict[str, Any] = {"statuses": 0, "errors": 0}
        ms: list[float] = []
        while (rest_s := begin + seconds - time.monotonic()) > 0.5:
            round_s = min(ROUND_S, rest_s)
            with http_load.asking([server.port], num_clients, round_s, requests, num_processes()) as asking:
                until = time.monotonic() + round_s
                while time.monotonic() < until:
                    samples.append((time.monotonic() - begin, server.resident_bytes()))
                    time.sleep(SAMPLE_S if seconds < 600 else 1.0)
                found = asking.wait()
            total["statuses"] += len(found["statuses"])
            total["errors"] += sum(status != 200 for status in found["statuses"])
            ms = latencies_ms(found, round_s)
        early, late = (_median_between(samples, share * seconds, 0.1 * seconds) for share in (1 / 6, 0.9))
        self.recorder.add(
            Record(
                "http",
                records.HTTP_MEMORY,
                "jaxsok",
                summary(ms, 1),
                variant=f"{minutes:g} minutes, {num_clients} clients",
                num_keys=NUM_KEYS,
                notes={
                    "part": "http",
                    "num_clients": num_clients,
                    "minutes": minutes,
                    "requests_per_s": total["statuses"] / seconds,
                    "p99_ms": float(np.percentile(ms, 99)),
                    "p999_ms": float(np.percentile(ms, 99.9)),
                    "max_ms": max(ms),
                    "errors": total["errors"],
                    "early_bytes": early,
                    "late_bytes": late,
                    "growth": late / early - 1,
                },
            )
        )


_NAMES = [f"table{number:02}" for number in range(NUM_TABLES)]


def num_processes() -> int:
    """Returns how many processes of clients this machine has room for."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


def num_front_ends() -> int:
    """Returns how many front ends are measured: they leave room for the tables' process and for clients."""
    return max(2, len(os.sched_getaffinity(0)) // 2)


def _tree(pid: int) -> Iterator[int]:
    """Yields a process, then those that it started, and so on."""
    yield pid
    with contextlib.suppress(OSError):  # it has ended
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def request_of(model: str, keys: dict[str, np.ndarray], given: str) -> bytes:
    """Returns a whole request for the rows of keys.

    Example:
      >>> request_of("m", {"user": np.array([7])}, "json").splitlines()[-1]
      b'{"keys":{"user":[7]}}'
    """
    if given == "json":
        body = json.dumps({"keys": {name: array.tolist() for name, array in keys.items()}}, separators=(",", ":"))
        body = body.encode()
    else:
        header, data = {}, b""
        for name, array in keys.items():
            part = array.astype("<i8").tobytes()
            offsets = [len(data), len(data) + len(part)]
            header[name] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": offsets}
            data += part
        text = json.dumps(header, separators=(",", ":")).encode()
        body = struct.pack("<Q", len(text)) + text + data
    head = f"POST /v1/models/{model}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORMATS[given]}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check_answer(answer: bytes, given: str) -> int:
    """Checks that all rows of an answer are of one version, which each row begins with; returns it."""
    body = answer.partition(b"\r\n\r\n")[2]
    if given == "json":
        first = {row[0] for rows in json.loads(body)["rows"].values() for row in rows}
    else:
        (size,) = struct.unpack("<Q", body[:8])
        header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
        parts = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        first = {n for begin, end in parts for n in np.frombuffer(data[begin:end], "<f4").reshape(-1, DIM)[:, 0]}
    if len(first) != 1:
        raise RuntimeError(f"bench_http: an answer has rows of versions {sorted(first)}, wanted one.")
    return int(first.pop())


def latencies_ms(found: dict[str, Any], seconds: float, *, with_lost: bool = False) -> list[float]:
    """Returns the times of answered requests, without those at the begin; with those of lost ones if asked."""
    rows = list(zip(found["ends"], found["latencies"], found["statuses"], strict=True))
    begin = min((end - latency for end, latency, _ in rows), default=0.0) + _SKIPPED * seconds
    wanted = (200, 0) if with_lost else (200,)
    kept = [1e3 * latency for end, latency, status in rows if status in wanted and end >= begin]
    if not kept:
        statuses = sorted(set(found["statuses"]))
        raise RuntimeError(f"bench_http: no request was answered: statuses {statuses}, {found['refused']} refused.")
    return kept


def rate_of(found: dict[str, Any], seconds: float) -> float:
    """Returns answered requests a second."""
    return len(latencies_ms(found, seconds)) / ((1 - _SKIPPED) * seconds)


def _median_between(samples: Sequence[tuple[float, int]], begin: float, length: float) -> float:
    inside = [size for at, size in samples if begin <= at <= begin + length]
    return float(np.median(inside or [size for _, size in samples]))
