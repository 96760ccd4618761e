"""The results of a run: one record per measurement, the failures, and the device.

Fed by `bench_*.py`, `limits.py`, `peers.py` and the peers' own files (`fbgemm.py`, `dynamicemb.py`, `nve.py`); feeds
`report.py` through a JSON file. A record names no other record: what is compared with what (a time, its limit, its
peers) is decided in `tables.py`, once, for the terminal and for the documentation.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .timing import Timing
from .workloads import KeySet, Workload

SCHEMA = 1
"""Version of the JSON file."""

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "cupy-cuda13x", "torch", "fbgemm-gpu")

# The measured part ("what") and the measured system ("subject"). The subject of a limit is "limit".
EVALUATION = "evaluation forward"
TRAINING = "training forward"
STEP = "forward + update"
LOSS_STEP = "forward + loss + update"
FORWARD = "forward"
GATHER = "bare gather"
LINE_AND_GATHER = "a line, then the row"
READ_MODIFY_WRITE = "read-modify-write"
PLAN = "plan"
TICKETS = "step; its limit: without tickets"
COMBINE = "combine"
FIND = "find"
FIND_AND_GATHER = "find + gather"
INSERT_NEW = "find_or_insert, all new"
INSERT_PRESENT = "find_or_insert, all present"
EMPTY = "an empty program"
NO_WORK = "kernels without work"
GROW = "grow"
BUILD = "build"
FILL = "fill to the memory's share"
CHURN = "churn"
FULL = "step of a full table"
SELECT = "select"
RELEASE = "release"
EVICT = "select + release"
REBUILD = "rebuild of the index alone"
HAND_OVER = "hand-over to the host"
EXPORT = "export to the host"
IMPORT = "import from the host"
LIFE = "step over a long life"
SERVED = "frozen lookup, latency"
SERVED_KERNELS = "frozen lookup, kernels"
SERVED_FLOOR = "bytes and one launch"
FRESH = "from training to an answer"
FRESH_LOOKUP = "lookup of a session"
PACK = "pack a batch"
HOST_COPY = "copy on the host"
LINK = "copy to the device"
READ = "read, pack and copy"
BRING = "bring random rows"
CACHED = "lookup through a cache"
FROM_HOST = "lookup that reads host memory"
FROM_C = "lookup that reads host memory, from C"
FETCH = "rows of host memory"
TO_HOST = "copy to the host"
HTTP = "requests over HTTP"
HTTP_UPDATE = "requests while versions come"
HTTP_RESTART = "requests while the server restarts"
HTTP_MEMORY = "memory of a server"
DEPLOYED = "lookup of a session on devices"

# The parts of a step on a mesh, and the measurements around it.
DISTINCT = "distinct keys"
KEY_EXCHANGE = "key exchange"
OWNER_LOOKUP = "find + gather at the owner"
ROW_EXCHANGE = "row exchange"
TRANSPOSE = "combine, transposed"
GRADIENT_EXCHANGE = "gradient exchange"
OWNER_UPDATE = "update at the owner"
ALL_TO_ALL = "all-to-all of the step's bytes"
DLRM = "DLRM step"

# Values of notes on a mesh.
BAGS = "bags "  # of wires: before the dtype, if they carry partial bags
PROCESSES = "processes"  # of front ends: a process for each device

# Training from files.
TRAIN = "train from files"
DENSE = "dense part"


@dataclasses.dataclass(frozen=True)
class Record:
    """One measurement."""

    workload: str
    what: str
    subject: str
    """"jaxsok", "xla", "torch", "fbgemm_unchecked", "fbgemm_default", "fbgemm", "nve", "dynamicemb", "torchrec",
    "limit", or "plain": simple code, no bound."""
    timing: Timing
    distribution: str = ""
    optimizer: str = ""
    """Empty where no optimizer takes part."""
    variant: str = ""
    """Fields that distinguish records of one workload: the dim and keys per call of H1, the samples of a batch."""
    num_keys: int = 0
    num_unique: int = 0
    moved_bytes: int = 0
    """Bytes that the work must move, each unique row and index line once (`limits.py`); on a mesh those that a device
    sends, padding included."""
    limit_ms: float | None = None
    """A limit that belongs to this record alone."""
    by: str = ""
    """The fastest method, if several were tried."""
    load: float | None = None
    """The load of the index, if there is one."""
    num_devices: int = 0
    """Devices of the mesh; 0 without a mesh."""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """On a mesh: scaling, program ("single", "planned", "pipelined", "plan", "apart", …), wire, front_end. "part": the
    part that a record belongs to, where that has a table of its own; with what the part reports apart from the time."""

    @property
    def part(self) -> str:
        """The part whose table holds the record; empty for the table of all workloads."""
        return self.notes.get("part", "")

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes that had to move over the measured time, in GB/s."""
        return self.moved_bytes / self.timing.ms * 1e-6 if self.timing.ms else 0.0

    @property
    def rate_text(self) -> str:
        """GB/s in printed form: below 10 with two digits."""
        if not self.moved_bytes:
            return "-"
        return f"{self.gigabytes_per_s:.0f}" if self.gigabytes_per_s >= 10 else f"{self.gigabytes_per_s:.2g}"


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of one workload under one key distribution, with the fields that their records share."""

    workload: Workload
    distribution: str
    key_sets: Sequence[KeySet]

    @property
    def num_unique(self) -> int:
        """The average number of distinct (table, id) pairs of a batch."""
        return round(sum(key_set.num_unique for key_set in self.key_sets) / len(self.key_sets))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Keys, unique keys, bags and dim: the first arguments of the formulas of `limits.py`."""
        return self.workload.num_keys, self.num_unique, self.workload.num_embeddings, self.workload.dim

    def record(self, what: str, subject: str, timing: Timing, **more: Any) -> Record:
        """Makes a record of these batches."""
        return Record(
            self.workload.name,
            what,
            subject,
            timing,
            distribution=self.distribution,
            num_keys=self.workload.num_keys,
            num_unique=self.num_unique,
            **more,
        )


class Recorder:
    """A collector of a run's records and failures; a failure ends only its own measurement."""

    def __init__(
        self,
        path: pathlib.Path | None,
        about: dict[str, Any],
        begin: float | None = None,
        budget_s: float | None = None,
    ):
        """Starts a run, at `begin` of time.perf_counter; `path` is written after each workload.

        After `budget_s` seconds nothing is begun any more; None: no end.
        """
        self.path = path
        self.budget_s = budget_s
        self.about = about
        self.records: list[Record] = []
        self.failures: list[dict[str, str]] = []
        self._begin = time.perf_counter() if begin is None else begin

    def add(self, record: Record) -> Record:
        """Adds a record and prints it."""
        self.records.append(record)
        who = f"{record.subject}{f' ({record.by})' if record.by else ''}"
        rate = f", {record.rate_text} GB/s" if record.moved_bytes else ""
        self.say(f"{_label(record)} | {who}: {record.timing}{rate}")
        for name, ms in list((record.timing.kernels or {}).items())[:12]:
            self.say(f"    {ms:9.4f} ms  {name[:120]}")
        return record

    def has_time(self, what: str, needs_s: float = 0.0) -> bool:
        """Returns whether `needs_s` seconds are left for `what`; if not, records it as skipped."""
        if self.budget_s is None or time.perf_counter() - self._begin + needs_s < self.budget_s:
            return True
        self.skip(what, "out of time (--time)")
        return False

    def skip(self, what: str, why: str) -> None:
        """Records that a measurement was left out, which is no failure."""
        self.about.setdefault("skipped", []).append({"what": what, "why": why})
        self.say(f"skipped {what}: {why}")

    def say(self, line: str) -> None:
        """Prints a line with the seconds since the run began."""
        print(f"[{time.perf_counter() - self._begin:6.1f} s] {line}", flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Records an exception as a failure of `what`, and goes on."""
        try:
            yield
        except Exception as error:
            self.fail(what, f"{type(error).__name__}: {error}")
            traceback.print_exc()

    def fail(self, what: str, why: str) -> None:
        """Records that a measurement failed."""
        why = why.replace(str(pathlib.Path(__file__).resolve().parent.parent), ".")[:2000]  # Results name no machine.
        self.failures.append({"what": what, "why": why})
        self.say(f"FAILED {what}: {why}")

    def write(self) -> None:
        """Writes the file, if the run has one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.perf_counter() - self._begin, 1)
        document = {"schema": SCHEMA, "about": self.about | {"wall_s": seconds}, "failures": self.failures}
        document["records"] = [dataclasses.asdict(record) for record in self.records]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self.path)


def load(path: pathlib.Path) -> tuple[dict[str, Any], list[Record], list[dict[str, str]]]:
    """Reads a results file: its description, records and failures."""
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {document.get('schema')!r}, wanted {SCHEMA}; measure again.")
    records = [Record(**entry | {"timing": Timing(**entry["timing"])}) for entry in document["records"]]
    return document["about"], records, document["failures"]


def describe(options: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """Describes a run: device, versions, commit, options."""
    import jax

    device = jax.devices()[0]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "time": time.strftime("%H:%M", time.gmtime()),
        "commit": commit or commit_of(pathlib.Path(__file__).resolve().parent),
        "platform": device.platform,
        "device": device.device_kind,
        "driver": _driver(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "options": options,
    }


def commit_of(folder: pathlib.Path) -> str:
    """Returns the git commit of a folder, with "+" if tracked files differ from it; "unknown" outside a repository."""
    try:
        commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
        changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _label(record: Record) -> str:
    parts = (record.workload, record.variant, record.distribution, record.optimizer, record.what)
    return " ".join(part for part in parts if part)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
