"""A session in memory whose answers are known in advance, a server over it, and requests and checks for its clients.

Only tests of the server itself use them.

`python tests/serving/server_cases.py SECONDS [DRAIN_S [NUM_PROCESSES]]` runs one as a process of its own: the versions
of its tables rise meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import socket
import struct
import sys
import threading
import time

import httpx
import numpy as np
import prometheus_client.parser

from jaxsok.serving import artifact, errors
from jaxsok.serving.http import processes, running, security, server

DIMS = {"user": 4, "item": 3}
DEFAULT = -7.0
MAX_KEYS = {"user": 4096, "item": 2048}
MAX_BATCH_SIZE = 64

ROOT = pathlib.Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}
TENSORS = {"Content-Type": "application/vnd.jaxsok.v1+safetensors"}
LOOKUP, PREDICT = "/v1/models/ranker/lookup", "/v1/models/ranker/predict"
MIXED = "/v1/models/mixed/predict"
DTYPES = {"U64": "<u8", "I64": "<i8", "U32": "<u4", "I32": "<i4", "F32": "<f4", "F64": "<f8"}
KEYS = {
    "user": [[1, -1], [2**63 + 7, "18446744073709551614"], [-(2**63), 3], [1, 1]],
    "item": [5, 2**53 + 1, "-2", 6],
}


def samples_of(text):
    """Returns the values in Prometheus' text by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclasses.dataclass(frozen=True)
class Table:
    name: str
    dim: int
    default: float = DEFAULT
    dtype: str = "float32"
    initial: object = None


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    version: int
    inputs: dict | None
    outputs: dict | None
    tables: dict = dataclasses.field(default_factory=lambda: {name: Table(name, dim) for name, dim in DIMS.items()})
    num_rows: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(DIMS, 0))
    max_batch_size: int = MAX_BATCH_SIZE
    max_keys: dict = dataclasses.field(default_factory=lambda: dict(MAX_KEYS))
    key_bits: int = 64
    exports: dict = dataclasses.field(default_factory=dict)
    opened: dict = dataclasses.field(default_factory=dict)


class Answer(dict):
    version: int


def row_of(table, key, version):
    """Returns the row of a key: missing for one key in three, else the version, the key and the table's number."""
    key, dim = int(key) % 2**64, DIMS[table]
    if key % 3 == 0:
        return [DEFAULT] * dim
    return [float(version), float(key % 1009), float(key >> 54), float(len(table))][:dim]


INPUTS = {
    "ranker": {"user": artifact.BagsInput("user"), "dense": artifact.ArrayInput((2,))},
    "mixed": {
        "user": artifact.BagsInput("user", is_weighted=True),
        "pair": artifact.KeysInput("item", (2,)),
        "flag": artifact.ArrayInput((), "bool"),
        "count": artifact.ArrayInput((), "int8"),
        "half": artifact.ArrayInput((1,), "bfloat16"),
    },
    "tables_only": None,
}

OUTPUTS = {
    name: None
    if inputs is None
    else {
        "logits": artifact.OutputSpec(("b",), "float32"),
        "version": artifact.OutputSpec(("b", 1), "int32"),
    }
    for name, inputs in INPUTS.items()
}


class Session:
    """A stand-in for jaxsok.serving.Session that computes its rows; `hold` and `error` make it slow or broken."""

    def __init__(self):
        self._versions = dict.fromkeys(INPUTS, 1)
        self.calls, self.is_closed, self.hold, self.error = [], False, None, None
        self.key_bits, self.exports = 64, {}
        self._lock = threading.Lock()

    @property
    def models(self):
        return {
            name: Model(name, version, INPUTS[name], OUTPUTS[name], key_bits=self.key_bits, exports=self.exports)
            for name, version in self._versions.items()
        }

    def _begin(self, op, model, size):
        assert not self.is_closed
        with self._lock:
            self.calls.append((op, model, size))
        if self.hold is not None:
            assert self.hold.wait(20)
        if self.error is not None:
            self.error(op, model, size)
        return self._versions[model]

    def lookup(self, keys, model=None):
        version = self._begin("lookup", model, {name: len(array) for name, array in keys.items()})
        answer = Answer()
        answer.version = version
        for name, array in keys.items():
            if array.dtype != np.uint64 or array.ndim != 1:
                raise AssertionError(f"got {array.dtype}{array.shape}")
            if len(array) > MAX_KEYS[name]:
                raise errors.RequestTooLargeError("the batch is larger than a call may be")
            missing, high = array % np.uint64(3) == 0, array >> np.uint64(54)
            rows = np.stack(
                [np.full(len(array), version), array % np.uint64(1009), high, np.full(len(array), len(name))], 1
            )
            rows = rows[:, : DIMS[name]].astype(np.float32)
            answer[name] = np.where(missing[:, None], np.float32(DEFAULT), rows)
        return answer

    def predict(self, inputs, model=None):
        num_samples = len(inputs["user"].lengths)
        version = self._begin("predict", model, {"samples": num_samples})
        if num_samples > MAX_BATCH_SIZE:
            raise errors.RequestTooLargeError("the batch is larger than a call may be")
        if len(inputs["user"].keys) > MAX_KEYS["user"]:
            raise errors.RequestTooLargeError("the batch has more keys than a call may have")
        arrays = {name: value for name, value in inputs.items() if name != "user"}
        wanted = {name: "uint64" if name == "pair" else INPUTS[model][name].dtype for name in arrays}
        if {name: array.dtype.name for name, array in arrays.items()} != wanted:
            raise AssertionError(f"got {arrays}")
        user = inputs["user"]
        numbers = (user.keys % np.uint64(1009)).astype(np.float64) * (1 if user.weights is None else user.weights)
        answer = Answer()
        answer.version = version
        ends = [0, *itertools.accumulate(user.lengths)]
        logits = np.array([numbers[begin:end].sum() for begin, end in itertools.pairwise(ends)])
        for array in arrays.values():
            logits = logits + array.astype(np.float64).reshape(num_samples, -1).sum(axis=1)
        answer["logits"] = logits.astype(np.float32)
        answer["version"] = np.full([num_samples, 1], version, np.int32)
        return answer

    def update(self, source=None, *, model=None, dense_file=None):
        self._versions = {**self._versions, model: self._versions[model] + 1}
        return self._versions[model]

    def stats(self, model=None):
        keys = sum(sum(size.values()) for op, name, size in self.calls if op == "lookup" and name == model)
        return {"lookups": len(self.calls), "keys": keys, "missing": keys // 3, "hit_rate": 0.5, "bytes": 1024}

    def report(self):
        return "two models"

    def close(self, timeout_s=None):
        self.is_closed, self.close_timeout_s = True, timeout_s
        return True


@contextlib.contextmanager
def serving(session, watch=None, num_processes=1, of_clients=security.OPEN, **options):
    """Runs a real server on a port of its own, in a thread, with its front ends; yields the server."""
    ready = threading.Event()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(where) for where in processes.bind("127.0.0.1", 0, num_processes)]
        given, watched = (
            server.ServerOptions(**{"max_delay_ms": 1.0, **options}),
            dict(watch=watch, watch_interval_s=0.05),
        )
        ran = {"security": of_clients, "on_ready": lambda _: ready.set()}
        app = server.App(session, given, has_front_ends=num_processes > 1, **watched)
        if num_processes > 1:
            found = processes.Processes(app, sockets, **ran)
        else:
            found = running.Server(app, sockets[0], **ran)
        found.thread = thread = threading.Thread(target=found.run, daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            yield found
        finally:
            found.stop()
            thread.join(20)
            assert not thread.is_alive()


# Clients -------------------------------------------------------------------------------------------------------------


def pack(arrays, metadata=None, **header):
    """Packs a binary body, written from the description of the format alone."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    data = io.BytesIO()
    entries = {} if metadata is None else {"__metadata__": metadata}
    for name, array in arrays.items():
        begin = data.tell()
        data.write(array.tobytes())
        entries[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, data.tell()],
            **header,
        }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data.getvalue()


def unpack(body):
    """Returns the arrays and the metadata of a binary body."""
    (size,) = struct.unpack("<Q", body[:8])
    header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
    metadata = header.pop("__metadata__")
    found = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    return found, metadata


def rows_of(table, keys, version):
    """Returns the rows that the session has for nested keys."""
    if isinstance(keys, list):
        return [rows_of(table, key, version) for key in keys]
    return row_of(table, keys, version)


def is_well(client):
    """Checks that the server still answers correctly."""
    found = client.post(LOOKUP, json={"keys": {"user": [4]}})
    version = found.json()["version"]
    return found.status_code == 200 and found.json()["rows"]["user"] == [row_of("user", 4, version)]


def num_taken(client):
    """Returns the number of requests that the server has and has not answered."""
    return samples_of(client.get("/metrics").text)["jaxsok_requests_in_flight",]


def is_closed(address):
    """Checks that the server accepts no connection."""
    try:
        httpx.get(f"{address}/healthz")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # The kernel queued it during the stop, and the server never accepted it.
        return False
    return False


def talk(address, *parts, pause_s=0.0):
    """Sends bytes to the server as they are; returns what it sends until it closes or stays silent."""
    host, port = address.removeprefix("http://").split(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=20) as line:
        with contextlib.suppress(OSError):
            for part in parts:
                line.sendall(part)
                time.sleep(pause_s)
        line.settimeout(8)
        with contextlib.suppress(OSError):
            while part := line.recv(1 << 16):
                got += part
    return got


def head(path=LOOKUP, **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{lines}\r\n".encode()


async def ask_in_parallel(address, num_clients, num_requests, make, check):
    """Sends each client's requests one after the other, all clients at a time."""
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=30) as client:

        async def ask_often(number):
            rng = np.random.default_rng(number)
            for _ in range(num_requests):
                path, body = make(rng)
                found = await client.post(path, json=body)
                check(body, found)

        await asyncio.gather(*(ask_often(number) for number in range(num_clients)))


def ask_at_once(address, requests):
    """Returns the statuses of requests that are sent at once, and the texts of their answers."""

    async def ask():
        async with httpx.AsyncClient(base_url=address, timeout=20) as client:
            found = await asyncio.gather(
                *(client.post(path, content=content, headers=headers) for path, headers, content in requests)
            )
        return [response.status_code for response in found], [response.text for response in found]

    return asyncio.run(ask())


def make_request(rng):
    """Draws a lookup or a prediction."""
    if rng.random() < 0.3:
        num = int(rng.integers(1, 4))
        user = rng.integers(0, 2**40, [num, 2]).tolist()
        return PREDICT, {"inputs": {"user": user, "dense": rng.integers(-9, 9, [num, 2]).tolist()}}
    sizes = rng.integers(0, 6, 2)
    keys = {name: rng.integers(-(2**40), 2**40, size).tolist() for name, size in zip(DIMS, sizes, strict=True)}
    return LOOKUP, {"keys": keys}


def check_answer(body, found):
    """Checks that the answer is the oracle's, of the version that it states."""
    assert found.status_code == 200, found.text
    got = found.json()
    version = got["version"]
    if "keys" in body:
        assert got["rows"] == {name: rows_of(name, keys, version) for name, keys in body["keys"].items()}
    else:
        inputs = body["inputs"]
        logits = [sum(key % 1009 for key in bag) + sum(row) for bag, row in zip(*inputs.values(), strict=True)]
        assert got["outputs"] == {"logits": logits, "version": [[version]] * len(logits)}


def config_of(sources, dim, **options):
    model = {
        "model": "ranker",
        "sparse_files": [str(source) for source in sources.values()],
        "embedding_table_names": list(sources),
        "embedding_vecsize_per_table": [dim] * len(sources),
        "maxnum_catfeature_query_per_table_per_sample": [4] * len(sources),
        "default_value_for_each_table": [-1.0] * len(sources),
        "deployed_device_list": [0],
        "max_batch_size": 64,
        "gpucacheper": 1.0,
        **options,
    }
    return {"supportlonglong": True, "models": [model]}


def resident_bytes(pid):
    """Returns the resident bytes of a process."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(interval_s, drain_s=0.0, num_processes=1):
    session = Session()

    def update():
        while not session.is_closed:
            time.sleep(interval_s)
            session.update(model="ranker")
            session.calls.clear()

    threading.Thread(target=update, daemon=True).start()
    options, sockets = server.ServerOptions(drain_s=drain_s), processes.bind("127.0.0.1", 0, int(num_processes))
    ran = {"on_ready": lambda found: print(found.address, flush=True)}
    app = server.App(session, options, has_front_ends=len(sockets) > 1)
    if len(sockets) > 1:
        processes.Processes(app, sockets, **ran).run()
    else:
        running.Server(app, sockets[0], **ran).run()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
