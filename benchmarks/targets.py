"""The targets as data: each with its wanted value and the function that reads it from the records of a run.

Fed by `records.py`; feeds `report.py`. Targets of a GPU are read from full-size runs on any GPU, those of a CPU from
runs on a CPU; a target whose records are missing is reported as not measured. The printed numbers are compared: two
digits after the point. Not here: why a target was missed (docs/performance.md).
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import records as names
from .bench_cpu import DISTRIBUTIONS
from .bench_dcnv2 import SECONDS
from .bench_skew import ONE_A_TABLE, ONE_IN_ALL
from .bench_tiers import AHEAD, CALLS
from .records import BAGS, EVALUATION, FIND_AND_GATHER, GATHER, PROCESSES, STEP, TRAINING, Record
from .tables import PEER_WHAT
from .workloads import LIFTED_ADAM

NOT_MEASURED = "not measured"


class Found:
    """The records of several runs; where two runs measured the same, the later record counts."""

    def __init__(self, found: Iterable[Record]):
        """Takes the records, oldest run first."""
        self._records = list(found)[::-1]
        self.used: list[Record] = []  # the newest of each question so far: their runs gave the answer

    def all(
        self, what: str, subject: str = "jaxsok", notes: dict[str, Any] | None = None, **fields: Any
    ) -> list[Record]:
        """Returns the records with these fields and notes, newest first; without a part, those of no part's table."""
        notes = {"part": ""} | (notes or {})
        chosen = [
            record
            for record in self._records
            if record.what == what
            and record.subject == subject
            and all(record.notes.get(name, "" if name == "part" else None) == value for name, value in notes.items())
            and all(getattr(record, name) == value for name, value in fields.items())
        ]
        self.used += chosen[:1]
        return chosen

    def by_run(self) -> Iterator["Found"]:
        """Yields the records of each run alone, newest run first."""
        for run in dict.fromkeys(record.notes.get("run") for record in self._records):
            yield Found([record for record in self._records[::-1] if record.notes.get("run") == run])

    def ms(
        self, what: str, subject: str = "jaxsok", notes: dict[str, Any] | None = None, **fields: Any
    ) -> float | None:
        """Returns the time of the newest such record, or None."""
        found = self.all(what, subject, notes, **fields)
        return found[0].timing.ms if found else None


Reading = Callable[[Found], float | None]


@dataclasses.dataclass(frozen=True)
class Target:
    """A number to reach."""

    name: str
    wanted: float
    reading: Reading
    is_least: bool = True
    """True if more is better, and `wanted` is the least; otherwise it is the most."""
    unit: str = ""
    platform: str = "gpu"
    """"gpu", "cpu", or "any"."""
    instead: Reading | None = None
    """Another measured number to report where this one is missing; it is never judged."""
    of_instead: str = ""
    remark: Callable[["Found"], str] = lambda found: ""
    """A text to report in addition to the reached number."""
    tested_by: str = ""
    """The tests that show it, where it is no number of a run; `wanted` is none of it then."""

    @property
    def wanted_text(self) -> str:
        """The wanted number as the table shows it."""
        if self.tested_by:
            return "none"
        return f"{'≥' if self.is_least else '≤'} {self.wanted:g}{self.unit}"

    def row(self, found: Found, devices: Sequence[str] = ()) -> tuple[str, str, str, str, str]:
        """Returns its row of the table: target, wanted, reached, where, and a verdict.

        The verdict is "pass", "**miss**", "not measured" or "tested". `devices` are those of the runs, by number.
        """
        if self.tested_by:
            return self.name, self.wanted_text, self.tested_by, "", "tested"
        found.used.clear()
        reached = self.reading(found)
        if reached is None:
            found.used.clear()
            other = self.instead(found) if self.instead else None
            shown = f"({self.of_instead}: {other:.2f}{self.unit})" if other is not None else "-"
            return self.name, self.wanted_text, shown, self._where(found, devices), NOT_MEASURED
        value = round(reached, 2)
        is_reached = value >= self.wanted if self.is_least else value <= self.wanted
        text = f"{value:.2f}{self.unit}{self.remark(found)}"
        return self.name, self.wanted_text, text, self._where(found, devices), "pass" if is_reached else "**miss**"

    def _where(self, found: Found, devices: Sequence[str]) -> str:
        runs = {record.notes["run"] for record in found.used if "run" in record.notes}
        return ", ".join(sorted({devices[run] for run in runs}))


COLUMNS = ("target", "wanted", "reached", "on", "")


def rows(results: Sequence[tuple[dict[str, Any], Sequence[Record]]]) -> list[tuple[str, str, str, str, str]]:
    """Makes the table of all targets from runs, each (about, records), in any order."""
    results = sorted(results, key=lambda result: (result[0]["date"], result[0].get("time", "")))
    # The number of its run tells the records of one run from those of another.
    marked = [
        (about, [dataclasses.replace(record, notes=record.notes | {"run": number}) for record in records])
        for number, (about, records) in enumerate(results)
    ]
    is_full = {"cpu": lambda about: True, "gpu": lambda about: about["options"]["scale"] == 1.0}
    found = {
        platform: Found(
            record
            for about, records in marked
            for kind in ("cpu" if about["platform"] == "cpu" else "gpu",)
            if platform in (kind, "any") and is_full[kind](about)
            for record in records
        )
        for platform in ("gpu", "cpu", "any")
    }
    devices = [_brief(about["device"]) for about, _ in results]
    return [target.row(found[target.platform], devices) for target in TARGETS]


def _brief(device: str) -> str:
    """Shortens the name of a device: "NVIDIA H100 80GB HBM3" to "H100"."""
    model = re.search(r"\b[A-Z]{1,3}\d+\b", device)
    return model[0] if model else device.upper() if device == "cpu" else device


def _over(first: float | None, second: float | None) -> float | None:
    """Returns the ratio of two times; None if one of them was not measured."""
    return first / second if first is not None and second is not None else None


def _share_of_bare_gather(dim: int) -> Reading:
    place = {"workload": "H1", "variant": f"D {dim}, 4 Mi keys"}
    return lambda found: _over(found.ms(GATHER, "limit", **place), found.ms(FIND_AND_GATHER, **place))


def _faster_than(peer: str, workload: str, what: str, distribution: str = "uniform", optimizer: str = "") -> Reading:
    place = {"workload": workload, "distribution": distribution, "optimizer": optimizer, "num_devices": 0}

    def reading(found: Found) -> float | None:
        return _over(found.ms(PEER_WHAT.get(what, what), peer, **place), found.ms(what, **place))

    return reading


def _step_ms(workload: str) -> Reading:
    place = {"workload": workload, "distribution": "uniform", "optimizer": "rowwise_adagrad", "num_devices": 0}
    return lambda found: found.ms(STEP, **place)


def _read_lifted(distribution: str) -> Reading:
    place = {"workload": "W1", "distribution": distribution, "num_devices": 0}
    return lambda found: _over(
        found.ms(STEP, optimizer=LIFTED_ADAM, **place), found.ms(STEP, optimizer="adam", **place)
    )


def _small_step(found: Found) -> float | None:
    """Returns the dispatched milliseconds of the smallest batch."""
    for record in found.all(names.LOSS_STEP, notes={"part": "small", "num_samples": 256}):
        return record.timing.dispatch_ms
    return None


def _read_inserted(found: Found) -> float | None:
    """Returns the G keys/s of inserting rows of one float, without the time of a copy of their bytes."""
    for record in found.all(names.INSERT_NEW, notes={"part": "insert", "dim": 1}):
        return record.num_keys / (record.timing.ms - record.notes["row_bytes_ms"]) * 1e-6
    return None


def _inserted_with_rows(found: Found) -> float | None:
    for record in found.all(names.INSERT_NEW, workload="H1", variant="D 8, 4 Mi keys"):
        return record.num_keys / record.timing.ms * 1e-6
    return None


def _on_mesh(
    num_devices: int,
    program: str = "pipelined",
    what: str = STEP,
    subject: str = "jaxsok",
    *,
    workload: str = "M1",
    wire: str = "float32",
    distribution: str = "uniform",
    front_end: str = "jit",
) -> Reading:
    scaling = "weak" if workload == "M1" else "strong"
    notes = {"program": program, "wire": wire, "front_end": front_end, "scaling": scaling}
    place = {"workload": workload, "distribution": distribution, "num_devices": num_devices}
    return lambda found: found.ms(what, subject, notes, **place)


def _in_one_run(reading: Reading) -> Reading:
    """Reads from the newest run alone that has all that is needed."""

    def of_newest(found: Found) -> float | None:
        for of_run in found.by_run():
            if (value := reading(of_run)) is not None:
                found.used += of_run.used
                return value
        return None

    return of_newest


def _least_of(readings: Iterable[Reading]) -> Reading:
    readings = tuple(readings)
    return lambda found: min((ms for reading in readings if (ms := reading(found)) is not None), default=None)


def _most_of(readings: Iterable[Reading]) -> Reading:
    readings = tuple(readings)
    return lambda found: max((ratio for reading in readings if (ratio := reading(found)) is not None), default=None)


def _ratio(above: Reading, below: Reading) -> Reading:
    return lambda found: _over(above(found), below(found))


def _on_four() -> Iterable["Target"]:
    """Yields the targets of steps on four GPUs, with plan, rowwise Adagrad, and all keys present."""
    ways = {"a process for each": PROCESSES, "one process": "jit"}
    steps = (
        ("M1", "uniform", "a process for each", {"float32": 1.0, "bfloat16": 0.8}),
        ("M1", "uniform", "one process", {"float32": 1.2, "bfloat16": 1.0}),
        ("W1", "uniform", "", {"float32": 0.83, "bfloat16": 0.65}),
        ("W1", "zipf1.05", "", {"float32": 0.60, "bfloat16": 0.50}),
        ("W5", "uniform", "", {f"{BAGS}float32": 1.5, f"{BAGS}bfloat16": 1.1}),
    )
    for workload, distribution, way, by_wire in steps:
        for wire, most in by_wire.items():
            place = {"workload": workload, "wire": wire, "distribution": distribution}
            front_ends = [ways[name] for name in ([way] if way else ways)]
            programs = itertools.product(("pipelined", "stacked"), front_ends)
            fastest = _least_of(_on_mesh(4, program, front_end=front_end, **place) for program, front_end in programs)
            name = ", ".join(filter(None, (f"{workload} {distribution} on 4 GPUs", way, f"{wire} on the wire")))
            yield Target(f"plan and step, {name}", most, fastest, is_least=False, unit=" ms")
    name = "M1 on 4 GPUs, forward with its plan ready, speed over a row-sharded `jnp.take`"
    yield Target(name, 3.0, _best_way(("take", names.FORWARD, "xla"), ("planned", EVALUATION)))
    one, programs = _on_mesh(1, "single", names.DLRM), itertools.product(("pipelined", "stacked"), ways.values())
    four = _least_of(_on_mesh(4, program, names.DLRM, front_end=front_end) for program, front_end in programs)
    name = "MLPerf's DLRM on M1's tables, samples/s on 4 GPUs over those of one"
    yield Target(name, 2.3, _in_one_run(lambda found: _over(_times(4, one(found)), four(found))))
    for how, program, least in (("an exact lookup ahead", "exact ahead", 1.2), ("`staleness=1`", "stale ahead", 1.5)):
        name = f"the same, with {how}, speed over none"
        yield Target(name, least, _best_way(("pipelined", names.DLRM), (program, names.DLRM)))


def _best_way(above: tuple, below: tuple) -> Reading:
    """Returns the ratio of two times on four devices, each of one run, in one process or a process for each."""
    ways = (PROCESSES, "jit")
    return _most_of(
        _in_one_run(_ratio(*(_on_mesh(4, *what, front_end=way) for what in (above, below)))) for way in ways
    )


def _times(factor: float, ms: float | None) -> float | None:
    return None if ms is None else factor * ms


def _in_tiers() -> Iterable["Target"]:
    """Yields the targets of tables in host memory."""
    for workload, what in (("M1", "128 floats, rowwise Adagrad"), ("M1-64", "64 floats, Adam")):
        for share, least in (("50%", 0.95), ("10%", 0.75), ("2%", 0.45)):
            cached = _least_of([_tiers(workload, f"{share} in the cache{ahead}") for ahead in ("", AHEAD)])
            reading = _ratio(_tiers(workload, "all on the device"), cached)
            name = f"DLRM, tables in host memory, {share} of their rows cached, {what}: throughput over all on the GPU"
            yield Target(name, least, _in_one_run(reading))
    cached = f"10% in the cache{AHEAD}"
    programs = (f"10% cached, exact ahead{calls}" for calls in ("", ", stacked"))
    of_processes = {"distribution": "zipf1.05", "front_end": PROCESSES}
    on_four = [_on_mesh(4, program, names.DLRM, **of_processes) for program in programs]
    four = _least_of([_tiers("M1", cached, ", 4 devices"), *on_four])

    def speedup(found: Found) -> float | None:
        return _over(_times(4, _tiers("M1", cached)(found)), four(found))

    yield Target("the same, 10% cached, rowwise Adagrad, 4 GPUs: samples/s over those of one", 3, speedup)


def _tiers(workload: str, rows: str, devices: str = "") -> Reading:
    """Returns the faster of a step a call and of several, where rows lie as told."""
    place = {"notes": {"part": "tiers"}, "workload": workload, "distribution": "zipf1.05"}

    def way(calls: str) -> Reading:
        return lambda found: found.ms(names.DLRM, variant=f"{rows}{calls}{devices}", **place)

    return _least_of((way(""), way(CALLS)))


def _efficiency(num_devices: int) -> Reading:
    """Returns the time on 2 devices over that on more, both of one run, the newest that has them."""
    return _in_one_run(_ratio(_on_mesh(2), _on_mesh(num_devices)))


def _forward_on_mesh(num_devices: int) -> Reading:
    return _ratio(_on_mesh(num_devices, "take", names.FORWARD, "xla"), _on_mesh(num_devices, what=EVALUATION))


def _skew(what: str, distribution: str) -> Reading:
    place = {"notes": {"part": "skew"}, "workload": "W1"}

    def reading(found: Found) -> float | None:
        return _over(
            found.ms(what, distribution=distribution, **place), found.ms(what, distribution="uniform", **place)
        )

    return reading


def _rate(found: Found, dim: int, what: str, optimizer: str, dtype: str = "float32") -> float | None:
    """Returns the GB/s of one dim."""
    notes = {"part": "dims", "dim": dim, "dtype": dtype}
    measured = found.all(what, notes=notes, optimizer=optimizer)
    return measured[0].gigabytes_per_s if measured else None


_DIM_WORK = ((FIND_AND_GATHER, ""), (STEP, "rowwise_adagrad"), (STEP, "sgd"))


def _make_training_target(name: str, wanted: float, num_devices: int, optimizer: str) -> Target:
    """Returns M samples/s from files, with repeated bags and a float32 exchange; short runs are marked."""
    notes = {"part": "dcnv2", "num_devices": num_devices, "wire": "-" if num_devices == 1 else "float32, float32"}

    def newest(found: Found) -> list[Record]:
        return found.all(names.TRAIN, notes=notes, distribution="zipf1.05", optimizer=optimizer)[:1]

    def reading(found: Found) -> float | None:
        for record in newest(found):
            return record.notes["num_samples"] / record.timing.ms * 1e-3
        return None

    def remark(found: Found) -> str:
        (timing,) = (record.timing for record in newest(found))
        seconds = timing.ms * timing.dispatches * 1e-3  # Roughly: a median, and the steps of the last run.
        return f" (short: {timing.repetitions} runs of {seconds:.0f} s)" if seconds < 0.9 * SECONDS else ""

    return Target(name, wanted, reading, remark=remark)


def _least(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known) if known else None


def _odd_dims(found: Found) -> float | None:
    """Returns the smallest ratio of a dim's GB/s to those of the next multiple of 4."""
    return _least(
        _over(_rate(found, dim, *work), _rate(found, -(-dim // 4) * 4, *work))
        for dim in (33, 63, 65, 126, 127)
        for work in _DIM_WORK
    )


def _wide_dims(dim: int) -> Reading:
    return lambda found: _least(_over(_rate(found, dim, *work), _rate(found, 256, *work)) for work in _DIM_WORK)


def _narrow(what: str, optimizer: str) -> Reading:
    def reading(found: Found) -> float | None:
        times = {}
        for dtype in ("float32", "bfloat16"):
            times[dtype] = found.ms(what, notes={"part": "dims", "dim": 128, "dtype": dtype}, optimizer=optimizer)
        return _over(times["float32"], times["bfloat16"])

    return reading


def _by_size(found: Found) -> float | None:
    """Returns the slowest lookup from 16 M rows on over the fastest."""
    times = {}
    for record in found.all(FIND_AND_GATHER, notes={"part": "scale"}):
        if record.notes["num_rows"] >= 16_000_000:
            times.setdefault(record.variant, record.timing.ms)
    return max(times.values()) / min(times.values()) if len(times) > 1 else None


def _peak_of_growth(found: Found) -> float | None:
    """Returns the peak of the first growth over the bytes in use after it; None where an earlier peak hides it."""
    for record in found.all(names.GROW, notes={"part": "scale"}, variant="first"):
        notes = record.notes
        if notes["peak_after"] and notes["peak_after"] > notes["peak_before"]:
            return notes["peak_after"] / notes["in_use_after"]
    return None


def _share_of_memory(found: Found) -> float | None:
    for record in found.all(names.FILL, notes={"part": "scale"}):
        return record.notes["bytes"] / record.notes["memory"] if record.notes["memory"] else None
    return None


def _after_churn(found: Found) -> float | None:
    times = {name: found.ms(names.CHURN, notes={"part": "scale"}, variant=name) for name in ("fresh", "churned")}
    return _over(times["fresh"], times["churned"])


def _served_device_ms(found: Found) -> float | None:
    """Returns the device's time for the fused lookup of S1: in a row with others, or its kernels and as many launches.

    Both are above it: the first where the host is slow to hand out results, the second since kernels without work are
    work too. The smaller one counts.
    """
    notes = {"part": "serving", "way": "fused"}
    times = [record.notes["in_a_row_ms"] for record in found.all(names.SERVED, notes=notes, workload="S1")[:1]]
    for record in found.all(names.SERVED_KERNELS, notes=notes, workload="S1")[:1]:
        if "launches_ms" in record.notes:
            times.append(record.timing.ms + record.notes["launches_ms"])
    return min(times, default=None)


def _served_over_floor(found: Found) -> float | None:
    floor = found.ms(names.SERVED_FLOOR, "limit", {"part": "serving"}, workload="S1")
    return _over(_served_device_ms(found), floor)


def _delay_s(found: Found) -> float | None:
    """Returns the longest delay of a version; None where training did not change a million rows a second."""
    delays = found.all(names.FRESH, notes={"part": "fresh"})[:1]
    return next((delay.notes["max_ms"] / 1e3 for delay in delays if delay.notes["rows_per_s"] >= 1e6), None)


def _lookups_under_updates(found: Found) -> float | None:
    p99 = [
        next(
            (
                record.notes["p99_ms"]
                for record in found.all(names.FRESH_LOOKUP, notes={"part": "fresh", "updates": is_with})
            ),
            None,
        )
        for is_with in (True, False)
    ]
    return _over(*p99)


def _in_host_memory(what: str, hit_rate: float) -> Reading:
    """Returns the reading of the share of the link or of the whole limit, of lookups from C back to back."""

    def reading(found: Found) -> float | None:
        some = found.all(names.FROM_C, notes={"part": "cache", "to_host": False, "wanted": hit_rate})
        largest = _newest_of_largest(some)
        limits = (record.notes["link_ms"] if what == "link" else record.limit_ms for record in largest)
        shares = (_over(ms, record.notes["back_to_back_ms"]) for ms, record in zip(limits, largest, strict=True))
        return max((share for share in shares if share is not None), default=None)

    return reading


def _newest_of_largest(found: Sequence[Record]) -> list[Record]:
    """Returns the newest record of each way of doing the lookup with the most keys; `found` has the newest first."""
    most = max((one.num_keys or 0 for one in found), default=0)
    return list({one.by: one for one in reversed(found) if one.num_keys == most}.values())


def _over_nve(hit_rate: float, *, in_a_row: bool = False) -> Reading:
    """Returns the reading of the time of NVE's fastest way over our fastest where the device reads host memory.

    Both are called from C, back to back. With `in_a_row` ours are lookups of JAX in a row, with keys on the device.
    """
    what = names.FROM_HOST if in_a_row else names.FROM_C

    def ms_of(record: Record) -> float | None:
        return record.notes.get("on_device_ms" if in_a_row else "back_to_back_ms")

    def reading(found: Found) -> float | None:
        notes = {"part": "cache", "to_host": False, "wanted": hit_rate}
        ours = _newest_of_largest(found.all(what, notes=notes))
        num_keys = ours[0].num_keys if ours else None
        theirs = _newest_of_largest(found.all(names.CACHED, "nve", notes, num_keys=num_keys))
        fastest = [min((ms for one in some if (ms := ms_of(one)) is not None), default=None) for some in (theirs, ours)]
        return _over(*fastest)

    return reading


def _requests_per_s(found: Found) -> float | None:
    """Returns the most requests a second whose 99th percentile is at most 10 ms, of the newest run."""
    loads = [one.notes for one in found.all(names.HTTP, notes={"part": "http"})]
    newest = [one for one in loads if one.get("run") == loads[0].get("run")]
    return max((one["requests_per_s"] for one in newest if one["p99_ms"] <= 10), default=None)


def _growth_of_server(found: Found) -> float | None:
    """Returns the per cent by which memory grew from minute 10 to minute 60; None after a shorter run."""
    lengths = found.all(names.HTTP_MEMORY, notes={"part": "http"})
    return next((100 * one.notes["growth"] for one in lengths if one.notes["minutes"] >= 60), None)


def _deployed(num_devices: int, way: str) -> Reading:
    """Reads the newest time of each size of requests; the best of them counts."""
    notes = {"part": "devices", "on": num_devices, "way": way}

    def read(found: Found) -> float | None:
        newest: dict[int, float | None] = {}
        for one in found.all(names.DEPLOYED, notes=notes):
            newest.setdefault(one.num_keys, one.notes["over_one"])
        return max((over_one for over_one in newest.values() if over_one is not None), default=None)

    return read


def _on_cpu(distribution: str, peer: str) -> Reading:
    place = {"notes": {"part": "cpu"}, "distribution": distribution}
    return lambda found: _over(found.ms(STEP, **place), found.ms(STEP, peer, **place))


UNCHECKED, DEFAULT = "fbgemm_unchecked", "fbgemm_default"

PEER_NAMES = {UNCHECKED: "FBGEMM without its bounds check", DEFAULT: "FBGEMM with its bounds check (its default)"}


def _forwards() -> Iterable[Target]:
    wanted = {
        (EVALUATION, UNCHECKED): {"W1": 1.1, "W2": 1.1, "W3": 1.25, "W4": 1.15},
        (EVALUATION, DEFAULT): {"W1": 2.5, "W2": 1.9, "W3": 4.0, "W4": 3.3},
        (TRAINING, UNCHECKED): {"W1": 0.95, "W2": 1.0},
        (TRAINING, DEFAULT): {"W1": 2.0, "W2": 1.7},
    }
    for (what, peer), by_workload in wanted.items():
        for workload, least in by_workload.items():
            name = f"{what}, {workload} uniform, speed over {PEER_NAMES[peer]}"
            yield Target(name, least, _faster_than(peer, workload, what))


def _steps() -> Iterable[Target]:
    wanted = (
        ("W1", "uniform", "rowwise_adagrad", 1.4),
        ("W1", "uniform", "adam", 2.0),
        ("W5", "uniform", "rowwise_adagrad", 1.2),
        ("W1", "zipf1.05", "rowwise_adagrad", 1.3),
        ("W5", "zipf1.15", "rowwise_adagrad", 1.3),
        ("W6", "zipf1.05", "sgd", 1.3),
        ("W6", "zipf1.05", "adam", 1.3),
    )
    for workload, distribution, optimizer, least in wanted:
        name = f"forward + update, {workload} {distribution} {optimizer}, speed over {PEER_NAMES[UNCHECKED]}"
        yield Target(name, least, _faster_than(UNCHECKED, workload, STEP, distribution, optimizer))
    for workload, floor_ms in (("W1", 0.56), ("W5", 2.0)):
        name = f"forward + update, {workload} uniform rowwise_adagrad, 1.35 times its floor of {floor_ms:g} ms"
        yield Target(name, round(1.35 * floor_ms, 2), _step_ms(workload), is_least=False, unit=" ms")


TARGETS: tuple[Target, ...] = (
    *(
        Target(f"find + gather, share of a bare gather, {dim} floats, 4 Mi keys", least, _share_of_bare_gather(dim))
        for dim, least in ((128, 0.90), (64, 0.83), (32, 0.70), (8, 0.50))
    ),
    *_forwards(),
    *_steps(),
    Target(
        "forward + update, W1 uniform, lifted Optax Adam over the fused one",
        1.5,
        _read_lifted("uniform"),
        is_least=False,
    ),
    Target("the same, Zipf 1.05 (no number was set)", 1.5, _read_lifted("zipf1.05"), is_least=False),
    Target(
        "256 samples of W1, a step with its loss, dispatched by itself", 0.1, _small_step, is_least=False, unit=" ms"
    ),
    Target(
        "find_or_insert, all-new keys, the rows' bytes apart",
        3.0,
        _read_inserted,
        unit=" G keys/s",
        instead=_inserted_with_rows,
        of_instead="rows of 8 floats written",
    ),
    Target(
        "M1 on 8 GPUs, plan and step",
        2.0,
        _on_mesh(8),
        is_least=False,
        unit=" ms",
        instead=_on_mesh(4),
        of_instead="on 4, one process for all",
    ),
    Target(
        "M1, weak scaling from 2 to 8 GPUs",
        0.7,
        _efficiency(8),
        instead=_efficiency(4),
        of_instead="to 4, one process for all",
    ),
    Target(
        "M1 on 8 GPUs, forward, speed over a row-sharded `jnp.take`",
        2.0,
        _forward_on_mesh(8),
        instead=_forward_on_mesh(4),
        of_instead="on 4, one process for all",
    ),
    *_on_four(),
    *_in_tiers(),
    *(
        Target(f"{what}, W1's shape, {distribution}: time over uniform keys", 1.0, _skew(what, distribution), False)
        for distribution in (ONE_A_TABLE, ONE_IN_ALL)
        for what in (EVALUATION, STEP)
    ),
    Target(
        "copies of a table in a step, host synchronisations of its kernels",
        0.0,
        lambda found: None,
        tested_by="`tests/kernels/test_compiled.py`, `tests/project/test_architecture.py`",
    ),
    Target("widths that are no multiple of 4, worst GB/s over those of the next", 0.75, _odd_dims),
    *(Target(f"rows of {dim} floats, GB/s over those of 256, the worst", 0.95, _wide_dims(dim)) for dim in (512, 1024)),
    *(
        Target(
            f"bfloat16 rows of 128, {what}{f', {optimizer}' if optimizer else ''}, speed over float32",
            1.6,
            reading,
        )
        for what, optimizer in _DIM_WORK
        for reading in (_narrow(what, optimizer),)
    ),
    Target("lookups of 1 Mi keys from 16 M rows on, slowest over fastest", 1.15, _by_size, is_least=False),
    Target("peak of growing a 10 GB store over its new size", 1.05, _peak_of_growth, is_least=False),
    Target("share of the GPU's memory that a store grows to", 0.8, _share_of_memory),
    Target("find + gather after 1,000 rounds of 10% churn, over a fresh store's", 0.9, _after_churn),
    Target(
        "8 frozen tables, 6,656 keys each, fused lookup over its bytes and one launch",
        1.5,
        _served_over_floor,
        is_least=False,
    ),
    Target("a changed row reaches an answer, at 1,000,000 rows/s", 5.0, _delay_s, is_least=False, unit=" s"),
    Target("99th percentile of lookups with such updates, over that without", 1.1, _lookups_under_updates, False),
    Target(
        "65,536 keys from C, half of them of rows in host memory, share of the link for these",
        0.8,
        _in_host_memory("link", 0.5),
    ),
    Target("the same, a tenth of them, share of the link and the device's copy", 0.8, _in_host_memory("both", 0.9)),
    Target("65,536 keys from C, half of them of rows in host memory, speed over NVE's cache", 1.0, _over_nve(0.5)),
    Target("the same, a tenth of them", 1.0, _over_nve(0.9)),
    *(
        Target(
            f"{what}, lookups in a row of keys on the device, speed over NVE's cache",
            1.0,
            _over_nve(rate, in_a_row=True),
        )
        for rate, what in (
            (0.5, "65,536 keys, half of them of rows in host memory"),
            (0.9, "the same, a tenth of them"),
        )
    ),
    Target("HTTP server, requests of 26 keys a second with a 99th percentile of 10 ms", 5000, _requests_per_s),
    Target("memory of the HTTP server from minute 10 to 60", 1.0, _growth_of_server, False, " %", "any"),
    Target(
        "a session on 4 devices, keys a second over those of one, the better size of requests",
        3.5,
        _deployed(4, "replicas"),
        instead=_deployed(2, "replicas"),
        of_instead="on 2",
    ),
    _make_training_target("DLRM-DCNv2 from files, M samples/s, rowwise Adagrad", 2.5, 1, "rowwise_adagrad"),
    _make_training_target("DLRM-DCNv2 from files, M samples/s, Adagrad, 4 H200s", 7.5, 4, "adagrad"),
    *(
        Target(
            f"CPU: lookup + update, SGD, {distribution}, over {what}",
            most,
            _on_cpu(distribution, peer),
            is_least=False,
            platform="cpu",
        )
        for peer, what, most in (
            ("xla", "static `jnp.take` + `.at[].add`", 1.5),
            ("torch", "torch's `EmbeddingBag` on a static table", 1.0),
        )
        for distribution in DISTRIBUTIONS
    ),
)
"""The project's targets, set for one H200 unless stated otherwise; ratios against a peer are its time over jaxsok's."""
