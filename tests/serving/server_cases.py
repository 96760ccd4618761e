"""A session in memory, of which every answer can be foretold, and a server over it; for tests of the server alone.

`python tests/serving/server_cases.py SECONDS [DRAIN_S [NUM_PROCESSES]]` runs one as a process of its own: the versions
of its tables rise meanwhile.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
import threading
import time

import numpy as np
import prometheus_client.parser

from jaxsok.serving import artifact, errors
from jaxsok.serving.http import processes, running, security, server

DIMS = {"user": 4, "item": 3}
DEFAULT = -7.0
MAX_KEYS = {"user": 4096, "item": 2048}
MAX_BATCH_SIZE = 64


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
        if num_processes > 1:
            found = processes.Processes(session, given, sockets, **watched, **ran)
        else:
            app = server.App(session, given, **watched)
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
    if num_processes > 1:
        processes.Processes(session, options, sockets, **ran).run()
    else:
        running.Server(server.App(session, options), sockets[0], **ran).run()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
