"""The server under load: a process of its own, 64 connections, and tables that change while they are read.

Each update writes its number into the first column of every row of all tables: a response with two numbers mixes two
versions. The other columns are a function of the key alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import server_cases as cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIMS = {"user": 8, "item": 4}
NUM_ROWS = 3000
DEFAULT = -1.0
CONNECTIONS = 64
LEAST_UPDATES = 3
TENSORS = "application/vnd.jaxsok.v1+safetensors"


def columns_of(table, keys):
    """Returns a table's other columns for its keys: every odd key below 2 * NUM_ROWS has a row."""
    keys = np.asarray(keys, np.int64)[:, None]
    columns = np.arange(1, DIMS[table])
    return ((keys * 31 + columns * 7 + len(table)) % 1021).astype(np.float32)


def write_tables(folder, number):
    """Writes HPS directories of all tables, from the format's documentation: int64 keys, float32 rows."""
    for table, dim in DIMS.items():
        (folder / table).mkdir(parents=True)
        keys = np.arange(1, 2 * NUM_ROWS, 2, dtype="<i8")
        rows = np.full([len(keys), dim], number, "<f4")
        rows[:, 1:] = columns_of(table, keys)
        (folder / table / "key").write_bytes(keys.tobytes())
        (folder / table / "emb_vector").write_bytes(rows.tobytes())


def write_config(path, folder):
    model = {
        "model": "ranker",
        "sparse_files": [str(folder / table) for table in DIMS],
        "embedding_table_names": list(DIMS),
        "embedding_vecsize_per_table": list(DIMS.values()),
        "maxnum_catfeature_query_per_table_per_sample": [4, 4],
        "default_value_for_each_table": [DEFAULT, DEFAULT],
        "deployed_device_list": [0],
        "max_batch_size": 256,
        "gpucacheper": 1.0,
    }
    path.write_text(json.dumps({"supportlonglong": True, "models": [model]}))


@contextlib.contextmanager
def serve(tmp_path, *arguments):
    """Runs the command line on tables of number 0; yields its process, port and folder to watch."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    write_tables(tmp_path / "tables", 0)
    write_config(tmp_path / "config.json", tmp_path / "tables")
    watched = tmp_path / "watched"
    watched.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "jaxsok", "serve", str(tmp_path / "config.json"), "--port", "0"]
    command += ["--watch", str(watched), "--watch-interval-s", "0.1", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            lines = []
            while not lines or "answers at" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            assert any('table "user"' in line for line in lines), "no report"
            yield process, int(lines[-1].rsplit(":", 1)[1]), watched
        finally:
            process.kill()


@dataclasses.dataclass
class Seen:
    """The responses that the clients received."""

    num_requests: int = 0
    numbers: dict = dataclasses.field(default_factory=dict)
    latencies_s: list = dataclasses.field(default_factory=list)
    resident: list = dataclasses.field(default_factory=list)


async def exchange(reader, writer, request):
    """Sends one request over a kept-alive connection; returns status and body."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


def make_request(rng):
    """Draws a request for keys of both tables, some of them missing, in one of the formats."""
    keys = {table: rng.integers(0, 2 * NUM_ROWS + 100, rng.integers(1, 40)) for table in DIMS}
    if rng.random() < 0.5:
        body, kind = (
            json.dumps({"keys": {table: array.tolist() for table, array in keys.items()}}).encode(),
            "application/json",
        )
    else:
        header, data = {}, b""
        for table, array in keys.items():
            offsets = [len(data), len(data) + array.nbytes]
            header[table] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": offsets}
            data += array.tobytes()
        text = json.dumps(header).encode()
        body, kind = struct.pack("<Q", len(text)) + text + data, TENSORS
    head = f"POST /v1/models/ranker/lookup HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: "
    return keys, kind == TENSORS, f"{head}{len(body)}\r\n\r\n".encode() + body


def read_response(body, is_binary):
    if not is_binary:
        found = json.loads(body)
        return {table: np.array(rows, np.float32) for table, rows in found["rows"].items()}, found["version"]
    (size,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + size])
    version = int(header.pop("__metadata__")["version"])
    data = body[8 + size :]
    rows = {
        table: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for table, entry in header.items()
    }
    return rows, version


def check(keys, rows, version, seen, least):
    """Checks that rows are those of the keys, of one version, and no older than the connection's last response."""
    numbers = set()
    for table, array in keys.items():
        assert rows[table].shape == (len(array), DIMS[table])
        is_there = (array % 2 == 1) & (array < 2 * NUM_ROWS)
        np.testing.assert_array_equal(rows[table][~is_there], DEFAULT)
        np.testing.assert_array_equal(rows[table][is_there][:, 1:], columns_of(table, array[is_there]))
        numbers |= set(rows[table][is_there][:, 0].tolist())
    assert len(numbers) <= 1, f"versions are mixed: {numbers}"
    for number in numbers:
        assert seen.numbers.setdefault(version, number) == number, "one version, two contents"
    assert version >= least


async def load(port, pid, watched, seconds, update_s):
    """Runs all clients while tables change, for a time that a slow machine extends; returns `Seen`, number of updates.

    The next update is written once a client has received the last one.
    """
    seen, until, are_done = Seen(), time.monotonic() + seconds, asyncio.Event()

    async def client(number):
        rng, least = np.random.default_rng(number), 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not are_done.is_set():
            keys, is_binary, request = make_request(rng)
            begin = time.perf_counter()
            status, body = await exchange(reader, writer, request)
            seen.latencies_s.append(time.perf_counter() - begin)
            assert status == 200, body
            rows, version = read_response(body, is_binary)
            check(keys, rows, version, seen, least)
            least, seen.num_requests = version, seen.num_requests + 1
        writer.close()

    async def wait_for(number):
        while number not in seen.numbers.values():
            await asyncio.sleep(0.01)

    async def update():
        number = 0
        await wait_for(number)
        while time.monotonic() < until or number < LEAST_UPDATES or seen.num_requests < 10 * CONNECTIONS:
            await asyncio.sleep(update_s)
            number += 1
            await asyncio.to_thread(write_tables, watched / f"{number}.tmp", number)
            (watched / f"{number}.tmp").rename(watched / str(number))
            await wait_for(number)
        are_done.set()
        return number

    async def measure():
        while not are_done.is_set():
            seen.resident.append(cases.resident_bytes(pid))
            await asyncio.sleep(0.1)

    async with asyncio.timeout(seconds + 60):
        *_, num_updates, _ = await asyncio.gather(*map(client, range(CONNECTIONS)), update(), measure())
    return seen, num_updates


async def scrape(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, body = await exchange(reader, writer, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    writer.close()
    return body.decode().splitlines()


@pytest.mark.parametrize(
    ("seconds", "update_s", "num_processes"),
    [(3, 0.3, 1), (2, 0.3, 2), *(pytest.param(60, 2.0, number, marks=pytest.mark.slow) for number in (1, 2))],
)
def test_load(tmp_path, seconds, update_s, num_processes, record_property):
    """Under load no request fails, no response mixes two versions, memory stays, and the process ends in order."""
    with serve(tmp_path, "--processes", str(num_processes)) as (process, port, watched):
        seen, num_updates = asyncio.run(load(port, process.pid, watched, seconds, update_s))
        metrics = asyncio.run(scrape(port))
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and rest.endswith("serve: ended\n"), rest
    counted = [line for line in metrics if line.startswith("jaxsok_requests_total")]
    assert counted == [f'jaxsok_requests_total{{endpoint="lookup",model="ranker",status="200"}} {seen.num_requests}.0']
    assert [seen.numbers[version] for version in sorted(seen.numbers)] == list(range(num_updates + 1))
    # Two versions exist at a time, plus what malloc keeps; a leak would add tables with every update.
    half = len(seen.resident) // 2
    growth = max(seen.resident[half:]) - max(seen.resident[:half])
    latencies_ms = np.percentile(seen.latencies_s, [50, 99]) * 1e3
    summary = (
        f"{seen.num_requests} requests in {seconds} s, {len(seen.numbers)} versions, "
        f"p50 {latencies_ms[0]:.1f} ms, p99 {latencies_ms[1]:.1f} ms, resident memory "
        f"{max(seen.resident[:half]) >> 20} MiB in the first half, {growth / 2**20:+.1f} MiB in the second"
    )
    print(summary)
    record_property("load", summary)
    assert growth < 32 * 2**20, summary
