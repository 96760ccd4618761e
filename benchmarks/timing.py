"""The measurement of times: dispatches back to back, in batches, and the median over the batches.

Fed by the benchmarks; feeds `records.py`. JAX has no device events in Python, so the host measures the wall time of a
batch of asynchronous dispatches, from an idle device to an idle device. The batch is long (`Protocol.batch_s`) against
the one wait at its end, so this is the device's time, as long as the device is slower than the host that feeds it.
Whether it is, is measured too: `Timing.host_ms` is the time of the same program with next to no keys. Where that comes
near the time itself, one program with several steps in a row, unrolled, is measured as well; see `Step`.

Not here: what is timed. `fbgemm.py` takes CUDA events instead, batch by batch in the same protocol.
"""

import contextlib
import dataclasses
import itertools
import math
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

HOST_SHARE = 0.5
"""Above this share of a step's time the host may set the time, so the unrolled program is measured as well."""

HOST_MS_AT_MOST = 1.0
"""No dispatch of one program took a host longer, by far (0.2 ms): for longer steps the host is not measured."""

HOST_BOUND = 0.8
"""Above this share, a published time is marked as the host's."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The number and length of repetitions."""

    repetitions: int = 10
    """Batches; the median is taken over them."""
    warmups: int = 2
    """Rounds over all key sets before anything is measured; the first of them compiles."""
    batch_s: float = 0.03
    """A batch has as many dispatches as this needs, and at least one."""
    num_key_sets: int = 3
    """Key sets in rotation, so that no batch meets a warm cache."""
    max_s: float = 20.0
    """A step so slow that its repetitions would take longer gets fewer, never under five; the record says how many."""
    profile: bool = False
    """True to list a step's kernels by JAX's profiler after the step was timed."""

    def brief(self) -> "Protocol":
        """Returns the protocol with fewer and shorter repetitions, for sweeps over many shapes."""
        return dataclasses.replace(
            self,
            repetitions=min(self.repetitions, 7),
            warmups=1,
            batch_s=min(self.batch_s, 0.015),
            max_s=self.max_s / 4,
        )

    def dispatches(self, step_s: float) -> int:
        """Returns the number of dispatches in one batch, for a step of this length."""
        return max(1, math.ceil(self.batch_s / max(step_s, 1e-7)))

    def affordable(self, step_s: float) -> int:
        """Returns the number of repetitions within `max_s`."""
        batch_s = step_s * self.dispatches(step_s)
        return min(self.repetitions, max(5, int(self.max_s / max(batch_s, 1e-9))))


QUICK = Protocol(repetitions=7, warmups=1, batch_s=0.01, max_s=2.0)
"""Enough to see that everything runs; no number of it is worth quoting."""

UNSTEADY = 1.0
"""Above this spread the median says little: times are printed as a range."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one step."""

    ms: float
    """Median."""
    low_ms: float
    """10th percentile."""
    high_ms: float
    """90th percentile."""
    repetitions: int
    dispatches: int
    """Dispatches of each repetition."""
    host_ms: float | None = None
    """The time of the same program with one bag a feature: the cost of a dispatch with no work. None on a CPU."""
    dispatch_ms: float | None = None
    """Median with one step a program, where `ms` is that of the unrolled program; else None."""
    kernels: dict[str, float] | None = None
    """Milliseconds a step of each kernel on the device, if the protocol asks for them."""
    call_ms: float | None = None
    """Median until the call of a step returns, on an idle device: what a step costs the thread that dispatches it. None
    where steps are not measured one by one."""

    @property
    def spread(self) -> float:
        """The width of the middle 80% of the repetitions, as a share of the median."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms else 0.0

    @property
    def is_unsteady(self) -> bool:
        """Returns whether the repetitions differ by more than their median."""
        return self.spread > UNSTEADY

    @property
    def spread_text(self) -> str:
        """The spread for a column of a table; a single time has none."""
        if self.repetitions == 1:
            return "-"
        return f"over {UNSTEADY:.0%}" if self.is_unsteady else f"{self.spread:.0%}"

    def __str__(self) -> str:
        """Returns the median and the spread, or the range of the repetitions if they differ much."""
        if self.is_unsteady:
            return f"{self.ms:.4g} ms ({self.low_ms:.3g} to {self.high_ms:.3g})"
        return f"{self.ms:.4g} ms" + (f" ±{self.spread / 2:.0%}" if self.repetitions > 1 else "")

    @property
    def is_host_bound(self) -> bool:
        """Returns whether the host, not the device, may have set the time."""
        return self.host_ms is not None and self.dispatch_ms is None and self.host_ms >= HOST_BOUND * self.ms


def summary(samples_ms: Sequence[float], dispatches: int) -> Timing:
    """Summarizes repeated measurements by the median and the middle 80%.

    Example:
      >>> summary([3.0, 1.0, 2.0], dispatches=1).ms
      2.0
    """
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return Timing(
        ms=statistics.median(ordered),
        low_ms=ordered[round(0.1 * last)],
        high_ms=ordered[round(0.9 * last)],
        repetitions=len(ordered),
        dispatches=dispatches,
    )


def scale(timing: Timing, factor: float) -> Timing:
    """Returns a time derived from a measured time, multiplied by a factor.

    Example:
      >>> scale(summary([1.0, 2.0, 3.0], dispatches=1), 2.0).ms
      4.0
    """
    return dataclasses.replace(
        timing, ms=timing.ms * factor, low_ms=timing.low_ms * factor, high_ms=timing.high_ms * factor
    )


class Step:
    """A pure function of (carry, inputs) as two programs: one step each, and several steps in a row.

    `function(carry, inputs) -> (carry, outputs)` with `donates=True` (state in, state out, in place), or
    `function(carry, inputs) -> outputs` with `donates=False` (read only). The second program runs over all key sets,
    unrolled and without a loop (on a GPU each test of a `while_loop` costs a round trip to the host), and returns all
    outputs, so that nothing of it can be left out.
    """

    def __init__(self, function: Callable[[Any, Any], Any], donates: bool, is_compiled: bool = False):
        """Declares both programs; neither is compiled before it is run.

        Args:
          function: one step.
          donates: whether it takes its carry's buffers and returns a new carry.
          is_compiled: the function dispatches programs of its own, and is left as it is.
        """
        self.function, self.donates = function, donates

        def unroll(carry, all_inputs):
            all_outputs = []
            for inputs in all_inputs:
                if donates:
                    carry, outputs = function(carry, inputs)
                else:
                    outputs = function(carry, inputs)
                all_outputs.append(outputs)
            return (carry, all_outputs) if donates else all_outputs

        self._host: Timing | None = None
        donated = (0,) if donates else ()
        self._single = function if is_compiled else jax.jit(function, donate_argnums=donated)
        self._unrolled = unroll if is_compiled else jax.jit(unroll, donate_argnums=donated)

    def run(self, carry: Any, inputs: Any) -> tuple[Any, Any]:
        """Dispatches one step."""
        return self._call(self._single, carry, inputs)

    def measure(self, carry: Any, sets: Sequence[Any], protocol: Protocol, idle: Any = None) -> tuple[Timing, Any]:
        """Measures the time of one step.

        Args:
          carry: what the step threads or reads. Donated if the step donates.
          sets: inputs in rotation.
          protocol: how often.
          idle: inputs of the same structure with next to nothing to do, to measure the host; None leaves that out.

        Returns:
          The timing of one step, and the carry after the last of them.
        """
        timing, carry = self._batches(self._single, carry, sets, protocol)
        if protocol.profile:
            kernels, carry = self.kernels(carry, sets)
            timing = dataclasses.replace(timing, kernels={name: ms for name, (_, ms) in kernels.items()})
        if idle is None or jax.default_backend() == "cpu":
            return timing, carry
        if timing.ms > HOST_MS_AT_MOST:
            return timing, carry
        if self._host is None:  # once for all key sets: the program of an empty step is the same
            few = dataclasses.replace(protocol, repetitions=min(5, protocol.repetitions))
            self._host, carry = self._batches(self._single, carry, [idle], few)
        timing = dataclasses.replace(timing, host_ms=self._host.ms)
        if self._host.ms < HOST_SHARE * timing.ms:
            return timing, carry
        in_a_row, carry = self.measure_in_a_row(carry, sets, protocol)
        if in_a_row.ms >= timing.ms:
            return timing, carry
        return dataclasses.replace(
            in_a_row, host_ms=timing.host_ms, dispatch_ms=timing.ms, kernels=timing.kernels
        ), carry

    def measure_in_a_row(
        self, carry: Any, sets: Sequence[Any], protocol: Protocol, length: int | None = None
    ) -> tuple[Timing, Any]:
        """Measures one step of a program that runs `length` sets in a row (all of them for None).

        The host dispatches once for all of them. `length` divides the number of sets.
        """
        length = length or len(sets)
        groups = [tuple(sets[begin : begin + length]) for begin in range(0, len(sets), length)]
        timing, carry = self._batches(self._unrolled, carry, groups, protocol)
        return scale(timing, 1.0 / length), carry

    def kernels(self, carry: Any, sets: Sequence[Any]) -> tuple[dict[str, tuple[float, float]], Any]:
        """Returns a step's kernels on the device: for each, its launches and milliseconds (`list_launched`)."""

        def steps():
            nonlocal carry
            for inputs in sets:
                carry, outputs = self._call(self._single, carry, inputs)
            jax.block_until_ready((carry, outputs) if self.donates else outputs)

        return list_launched(steps, len(sets)), carry

    def measure_calls(self, carry: Any, sets: Sequence[Any], protocol: Protocol) -> tuple[float, Any]:
        """Measures `Timing.call_ms`; the steps have run before. Returns it, and the carry after the last step."""
        samples = []
        for number in range(max(len(sets), protocol.repetitions)):
            jax.block_until_ready(carry)
            begin = time.perf_counter()
            carry, outputs = self._call(self._single, carry, sets[number % len(sets)])
            samples.append((time.perf_counter() - begin) * 1e3)
            jax.block_until_ready(outputs)
        return statistics.median(samples), carry

    def _call(self, program, carry, inputs):
        if self.donates:
            return program(carry, inputs)
        return carry, program(carry, inputs)

    def _batches(self, program, carry, sets, protocol) -> tuple[Timing, Any]:
        position = 0

        def batch(count):
            nonlocal carry, position
            outputs = None
            begin = time.perf_counter()
            for _ in range(count):
                outputs = None  # Its buffers are free for the next step: two outputs of a large batch may not fit.
                carry, outputs = self._call(program, carry, sets[position % len(sets)])
                position += 1
            jax.block_until_ready((carry, outputs) if self.donates else outputs)
            return time.perf_counter() - begin

        for _ in range(protocol.warmups):
            batch(len(sets))
        step_s = batch(len(sets)) / len(sets)
        # The wait weighs on the estimate of a short step; a second, longer measurement corrects it.
        look = min(20, protocol.dispatches(step_s))
        step_s = batch(look) / look
        count = protocol.dispatches(step_s)
        samples = [batch(count) * 1e3 / count for _ in range(protocol.affordable(step_s))]
        return summary(samples, count), carry


def list_launched(function: Callable[[], Any], num_steps: int) -> dict[str, tuple[float, float]]:
    """Returns the kernels that ran on the device, by JAX's profiler, the longest first.

    Args:
      function: dispatches `num_steps` steps and waits for them.
      num_steps: over how many steps the sums are divided.

    Returns:
      By the kernel's name, launches a step and milliseconds a step; empty on a backend without device lines (a CPU).
    """
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function()
        for path in pathlib.Path(folder).rglob(PROFILES):
            for streams in read_streams(path).values():
                for begin, end, name in itertools.chain(*streams.values()):
                    counts[name] += 1
                    totals[name] += (end - begin) / num_steps
    return {name: (counts[name] / num_steps, ms) for name, ms in totals.most_common()}


PROFILES = "*.xplane.pb"
"""The names of the files of JAX's profiler."""


def read_streams(path: pathlib.Path) -> dict[str, dict[str, list[tuple[float, float, str]]]]:
    """Reads from a profile what ran on each device, by stream: begin and end in milliseconds, and the name."""
    devices: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:"):
            continue
        streams = devices[plane.name.removeprefix("/device:")] = {}
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # other lines repeat the same work by op and by module
                continue
            events = streams[line.name] = []
            for event in line.events:
                with contextlib.suppress(UnicodeDecodeError):
                    events.append((event.start_ns * 1e-6, (event.start_ns + event.duration_ns) * 1e-6, event.name))
    return devices
