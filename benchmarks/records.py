"""What a run found: one record per measured thing, the failures, and the device that it ran on.

Fed by `bench_*.py`, `limits.py`, `peers.py` and `fbgemm.py`; feeds `report.py` through a JSON file. A record names no
other record: what stands beside what (a time, its limit, its peers) is decided in `rows`, once, for the terminal and
for the documentation.
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

from benchmarks.timing import HOST_BOUND, Timing

SCHEMA = 1
"""Version of the JSON file."""

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "cupy-cuda13x", "torch", "fbgemm-gpu")

# What is measured ("what"), by whom ("subject"). The subject of a limit is "limit".
EVALUATION = "evaluation forward"
TRAINING = "training forward"
STEP = "forward + update"
FORWARD = "forward"
GATHER = "bare gather"
READ_MODIFY_WRITE = "read-modify-write"
PLAN = "plan"
COMBINE = "combine"
FIND = "find"
FIND_AND_GATHER = "find + gather"
INSERT_NEW = "find_or_insert, all new"
INSERT_PRESENT = "find_or_insert, all present"

# The parts of a step on a mesh, and what is measured around it.
DISTINCT = "distinct keys"
KEY_EXCHANGE = "key exchange"
OWNER_LOOKUP = "find + gather at the owner"
ROW_EXCHANGE = "row exchange"
TRANSPOSE = "combine, transposed"
GRADIENT_EXCHANGE = "gradient exchange"
OWNER_UPDATE = "update at the owner"
ALL_TO_ALL = "all-to-all of the step's bytes"
DLRM = "DLRM step"

WHOLE = ("single", "pipelined")
"""The programs that leave nothing of a step out: only they stand beside peers."""

TORCHREC = {
    ("M1", TRAINING): (5.02, 3.16),
    ("M1", STEP): (8.23, 4.90),
    ("M1-64", TRAINING): (3.79, 3.12),
    ("M1-64", STEP): (5.49, 4.67),
}
"""Milliseconds of TorchRec 1.6.1 (FBGEMM 1.6.0) on 8 H200s, row-wise and table-wise: published, not measured here."""

TORCHREC_DEVICES = 8

PEER_WHAT = {EVALUATION: FORWARD, TRAINING: FORWARD}
"""The name under which a peer's record of the same work stands, where it has another."""

LIMIT_WHAT = {
    EVALUATION: (GATHER,),
    TRAINING: (GATHER,),
    FORWARD: (GATHER,),
    STEP: (GATHER, READ_MODIFY_WRITE),
    FIND_AND_GATHER: (GATHER,),
}
"""The limits whose times, one after the other, no version of this work undercuts."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured thing."""

    workload: str
    what: str
    subject: str
    """"jaxsok", "xla", "fbgemm_unchecked", "fbgemm_default" or "limit"."""
    timing: Timing
    distribution: str = ""
    optimizer: str = ""
    """Empty where no optimizer takes part."""
    variant: str = ""
    """What else tells records of one workload apart: the dim and the keys per call of H1."""
    num_keys: int = 0
    num_unique: int = 0
    moved_bytes: int = 0
    """What the work must move, each unique row and index line once (`limits.py`); on a mesh what a device sends to the
    others, padding included."""
    limit_ms: float | None = None
    """A limit that belongs to this record alone."""
    by: str = ""
    """Which way of doing it this is, where several were tried: the fastest one."""
    load: float | None = None
    """Of the index, where there is one."""
    num_devices: int = 0
    """Of the mesh; 0 where there is none."""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """On a mesh: scaling, program ("single", "planned", "pipelined", "plan", "apart", …), wire, front_end."""

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes that had to be moved over the time that it took."""
        return self.moved_bytes / self.timing.ms * 1e-6 if self.timing.ms else 0.0


class Recorder:
    """Collects the records and failures of a run and writes them; a failure ends nothing but its own measurement."""

    def __init__(self, path: pathlib.Path | None, about: dict[str, Any], begin: float | None = None):
        """Starts a run, at `begin` of time.perf_counter; `path` is written after each workload."""
        self.path = path
        self.about = about
        self.records: list[Record] = []
        self.failures: list[dict[str, str]] = []
        self._begin = time.perf_counter() if begin is None else begin

    def add(self, record: Record) -> Record:
        """Adds a record and says so."""
        self.records.append(record)
        timing = record.timing
        self.say(
            f"{_label(record)} | {record.subject}{f' ({record.by})' if record.by else ''}: {timing.ms:.4g} ms"
            f" ±{50 * timing.spread:.0f}%, {record.gigabytes_per_s:.0f} GB/s"
        )
        for name, ms in list((timing.kernels or {}).items())[:12]:
            self.say(f"    {ms:9.4f} ms  {name[:120]}")
        return record

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
        """Records that something could not be measured."""
        why = why.replace(str(pathlib.Path(__file__).resolve().parent.parent), ".")[:2000]  # results name no machine
        self.failures.append({"what": what, "why": why})
        self.say(f"FAILED {what}: {why}")

    def write(self) -> None:
        """Writes the file, if there is one to write."""
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
    """Reads a results file: what it is about, its records, its failures."""
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {document.get('schema')!r}, wanted {SCHEMA}; measure again.")
    records = [Record(**entry | {"timing": Timing(**entry["timing"])}) for entry in document["records"]]
    return document["about"], records, document["failures"]


def describe(options: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """What must be known about a run to believe its numbers: device, versions, commit, options."""
    import jax

    device = jax.devices()[0]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
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
    """The git commit of a folder, with "+" if tracked files differ from it; "unknown" outside a repository."""
    try:
        commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
        changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


NOTHING = "-"
"""In a table: not measured, or it has no meaning."""

COLUMNS = (
    "workload",
    "what",
    "ms",
    "spread",
    "host ms",
    "M keys/s",
    "GB/s",
    "limit ms",
    "of limit",
    "XLA ÷",
    "FBGEMM unchecked ÷",
    "FBGEMM default ÷",
)
"""Of the table: `host ms` is an empty step; the last three are the peer's time over jaxsok's, so above 1 jaxsok is the
faster."""

KEY_COLUMNS = ("workload", "keys", "unique", "rows", "load")
"""Of the table of keys: of one batch; the load is that of the index."""


PEER_COLUMNS = ("workload", "what", "who", "ms", "spread", "GB/s")


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The table: each of jaxsok's records beside its limit and its peers, as text."""
    found = {}
    for record in records:
        found[(record.subject, record.workload, record.distribution, record.optimizer, record.variant, record.what)] = (
            record
        )

    def peer(record: Record, subject: str) -> Record | None:
        what = PEER_WHAT.get(record.what, record.what)
        place = (record.workload, record.distribution)
        return found.get((subject, *place, record.optimizer, record.variant, what))

    table = []
    for record in records:
        if record.subject != "jaxsok" or record.num_devices:
            continue
        ms = record.timing.ms
        limit_ms = limit_of(record, found)
        ratios = [peer(record, subject) for subject in ("xla", "fbgemm_unchecked", "fbgemm_default")]
        table.append(
            (
                " ".join(part for part in (record.workload, record.variant, record.distribution) if part),
                f"{record.what}{f', {record.optimizer}' if record.optimizer else ''}",
                f"{ms:.4g}{'*' if record.timing.is_host_bound else ''}",
                f"{100 * record.timing.spread:.0f}%",
                NOTHING if record.timing.host_ms is None else f"{record.timing.host_ms:.3g}",
                f"{record.num_keys / ms * 1e-3:.4g}",
                f"{record.gigabytes_per_s:.0f}",
                NOTHING if limit_ms is None else f"{limit_ms:.4g}",
                NOTHING if limit_ms is None else f"{limit_ms / ms:.2f}",
                *(NOTHING if other is None else f"{other.timing.ms / ms:.2f}" for other in ratios),
            )
        )
    return table


def key_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What the batches looked like: workload and distribution, keys, unique keys, rows of the store, load."""
    table = {}
    for record in records:
        if record.subject == "jaxsok" and record.load is not None:
            name = " ".join(part for part in (record.workload, record.variant, record.distribution) if part)
            numbers = (record.num_keys, record.num_unique, record.notes.get("num_rows", 0))
            table[name] = (name, *(f"{number:,}" if number else NOTHING for number in numbers), f"{record.load:.3f}")
    return list(table.values())


def limit_of(record: Record, found: dict[tuple[str, ...], Record]) -> float | None:
    """The sum of the limits of a record's work; None if one of them was not measured."""
    if record.limit_ms is not None:
        return record.limit_ms
    parts = []
    for what in LIMIT_WHAT.get(record.what, ()):
        # A gather has no optimizer; a read-modify-write has: its state is part of what moves.
        optimizer = record.optimizer if what == READ_MODIFY_WRITE else ""
        part = found.get(("limit", record.workload, record.distribution, optimizer, record.variant, what))
        if part is None:
            return None
        parts.append(part.timing.ms)
    return sum(parts) if parts else None


def peer_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The peers and the limits by themselves: workload, what, subject, ms, spread, GB/s."""
    return [
        (
            " ".join(part for part in (record.workload, record.variant, record.distribution) if part),
            f"{record.what}{f', {record.optimizer}' if record.optimizer else ''}",
            f"{record.subject}{f' ({record.by})' if record.by else ''}",
            f"{record.timing.ms:.4g}",
            f"{100 * record.timing.spread:.0f}%",
            f"{record.gigabytes_per_s:.0f}" if record.moved_bytes else NOTHING,
        )
        for record in records
        if record.subject != "jaxsok" and not record.num_devices
    ]


EXCHANGE_COLUMNS = (
    "workload",
    "devices",
    "what",
    "program",
    "ms",
    "spread",
    "k samples/s",
    "MB sent",
    "GB/s sent",
    "of the wire",
    "efficiency",
    "XLA ÷",
    "TorchRec row-wise, published, 8 GPUs",
    "TorchRec table-wise, published, 8 GPUs",
)
"""Of the table of meshes: sent by one device to the others; `of the wire` is that rate over the one of the bare
all-to-all; efficiency is against two devices; TorchRec's times, with their ratio where there are as many devices."""


def exchange_rows(records: Sequence[Record], is_full_size: bool) -> list[tuple[str, ...]]:
    """The table of meshes: each record beside the wire, two devices, and the peers, as text.

    Args:
      records: of one run or of several, each on another number of devices.
      is_full_size: at full scale on GPUs, which TorchRec's times ask for.
    """
    found = {}
    for record in records:
        notes = record.notes
        if record.num_devices:
            found[(*_mesh_place(record), record.what, notes["program"], notes["wire"], notes["front_end"])] = record
    table = []
    for key, record in found.items():
        (workload, distribution, scaling, num_devices), what, notes = key[:4], record.what, record.notes
        ms = record.timing.ms
        is_step = notes["program"] in (*WHOLE, "planned", "take")
        is_peer_of = notes["program"] in WHOLE and record.subject == "jaxsok"
        limit = found.get((*key[:4], ALL_TO_ALL, "alone", notes["wire"], "jit"))
        base = found.get((workload, distribution, scaling, 2, *key[4:]))
        peer = found.get((*key[:4], PEER_WHAT.get(what, what), "take", "float32", "jit")) if is_peer_of else None
        ideal = 1.0 if scaling == "weak" else num_devices / 2
        program = " ".join(
            part for part in (notes["program"], *(notes[n] for n in ("wire", "front_end"))) if part not in USUAL
        )
        sent = record.moved_bytes
        table.append(
            (
                f"{workload} {distribution} {scaling}",
                f"{num_devices}",
                f"{record.subject} {what}" if record.subject != "jaxsok" else what,
                program,
                f"{ms:.4g}",
                f"{100 * record.timing.spread:.0f}%",
                f"{notes['num_samples'] / ms:.4g}" if is_step else NOTHING,
                f"{sent * 1e-6:.4g}" if sent else NOTHING,
                f"{record.gigabytes_per_s:.3g}" if sent else NOTHING,
                f"{record.gigabytes_per_s / limit.gigabytes_per_s:.2f}" if sent and limit else NOTHING,
                f"{base.timing.ms / ms / ideal:.2f}" if base and num_devices >= 2 else NOTHING,
                f"{peer.timing.ms / ms:.2f}" if peer else NOTHING,
                *_torchrec_cells(record, is_peer_of and is_full_size and notes["wire"] == "float32"),
            )
        )
    return table


USUAL = ("float32", "jit")
"""Wire and front end that a table does not name."""


def _mesh_place(record: Record) -> tuple[str, str, str, int]:
    return record.workload, record.distribution, record.notes["scaling"], record.num_devices


def _torchrec_cells(record: Record, is_comparable: bool) -> tuple[str, str]:
    """TorchRec's time for the same work; the ratio too, where the number of devices is the same."""
    times = TORCHREC.get((record.workload, record.what))
    if times is None or not is_comparable or record.notes["scaling"] != "weak" or record.num_devices < 2:
        return NOTHING, NOTHING
    ratio = record.num_devices == TORCHREC_DEVICES
    row_wise, table_wise = (f"{ms} ms{f', {ms / record.timing.ms:.2f}' if ratio else ''}" for ms in times)
    return row_wise, table_wise


def host_bound_note(records: Sequence[Record]) -> str:
    """Explains the asterisk, if a row has one."""
    if not any(record.timing.is_host_bound for record in records):
        return ""
    return f"* an empty step takes at least {HOST_BOUND:.0%} of this time: the host, not the device, may have set it."


def format_table(columns: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its columns aligned so that a terminal shows it too."""
    widths = [max(len(row[i]) for row in (columns, *table)) for i in range(len(columns))]

    def line(cells):
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(columns), rule, *(line(row) for row in table)])


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
