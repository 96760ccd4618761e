"""A picture of a step on the devices, from a profile: which kernels run when, on each stream, and where nothing runs.

Question: where does a step's time go, and what are the gaps?
Command:  `python -m jaxsok bench --only dcnv2 --trace FOLDER` writes a profile of steps that are fed from files;
          `python -m benchmarks.timeline FOLDER --steps 8 --out step.svg` draws one of them, and prints its gaps.
Last result: docs/results/dcnv2.md.

A profile is an `xplane.pb` file of JAX's profiler. The picture shows one of its steps on all devices, the middle one by
default. The profiler slows kernels and the host, so the times of `bench` are the ones to quote.
"""

import argparse
import dataclasses
import itertools
import pathlib
from collections import Counter
from collections.abc import Sequence

from . import plots, timing

GROUPS = {
    "plan": (
        "::Plan",
        "::ListOwners",
        "::Owners",
        "::MoveOwners",
        "::Place",
        "::MoveInverse",
        "::PushKernel",
        "::Take",
    ),
    "waiting for other devices": ("::BarrierKernel", "::SumKernel("),
    "sums over devices (NCCL)": ("nccl",),
    "tables": ("jaxsok::",),
    "matrix products": ("gemm", "nvjet", "cutlass", "sm90_xmma"),
    "copies": ("Memcpy", "Memset", "memcpy"),
}
"""Words in the names of kernels, by what they do; the first group that fits counts."""

OTHERS = "the rest of the model"
COLOURS = dict(
    zip(
        (*GROUPS, OTHERS),
        (plots.GREEN, "#CC79A7", plots.RED, plots.BLUE, plots.ORANGE, "#999999", "#F0E442"),
        strict=True,
    )
)
LEAST_GAP_MS = 0.01
"""Shorter gaps are not listed."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel or a copy; times are milliseconds."""

    begin: float
    end: float
    name: str

    @property
    def group(self) -> str:
        """The group of `GROUPS` to which it belongs."""
        return next((group for group, words in GROUPS.items() if any(word in self.name for word in words)), OTHERS)


Streams = dict[str, list[Event]]
"""The events of a device by the name of their stream, ordered by their begin."""


def read(path: pathlib.Path) -> dict[str, Streams]:
    """Reads the streams of each device from a profile, or from the only one in a folder."""
    files = [path] if path.is_file() else list(path.rglob(timing.PROFILES))
    if len(files) != 1:
        names = ", ".join(map(str, files)) or "none"
        raise ValueError(f"timeline: path: got {path}, wanted one xplane.pb file in it; name it. There are: {names}.")
    devices = {
        device: {name: [Event(*event) for event in sorted(events)] for name, events in streams.items()}
        for device, streams in timing.read_streams(files[0]).items()
    }
    if not any(devices.values()):
        raise ValueError(f"timeline: path: got {files[0]}, whose devices ran no kernel, wanted a profile of a GPU.")
    return devices


def step_of(devices: dict[str, Streams], num_steps: int, number: int | None = None) -> tuple[float, float]:
    """Returns the begin and the end of one of so many steps, by its number from 0; None: the middle one.

    A step begins with the kernel that takes most of the time among those that run once in each step on the first
    device, so that the last one has no end. ValueError: no kernel runs as often as there are steps, which are two or
    more; or no such step.
    """
    events: dict[str, list[Event]] = {}
    for event in itertools.chain(*next(iter(devices.values())).values()):
        events.setdefault(event.name, []).append(event)
    once = [mine for mine in events.values() if len(mine) == num_steps]
    if num_steps < 2 or not once:
        raise ValueError(f"timeline: steps: got {num_steps}, wanted at least 2, as many as some kernel has runs.")
    longest = max(once, key=lambda mine: sum(event.end - event.begin for event in mine))
    begins = sorted(event.begin for event in longest)
    number = (num_steps - 1) // 2 if number is None else number
    if not 0 <= number < num_steps - 1:
        raise ValueError(f"timeline: step: got {number}, wanted 0 to {num_steps - 2}.")
    return begins[number], begins[number + 1]


def cut(streams: Streams, begin: float, end: float) -> Streams:
    """Returns the events of a time, which begins at 0; those at its ends are shortened."""
    return {
        name: [
            Event(max(event.begin, begin) - begin, min(event.end, end) - begin, event.name)
            for event in events
            if event.begin < end and event.end > begin
        ]
        for name, events in streams.items()
    }


def gaps_of(streams: Streams, length: float) -> list[Event]:
    """Returns the times in which no stream of a device works; each is named by the events around it."""
    gaps, at, before = [], 0.0, "the step's begin"
    for event in sorted(itertools.chain(*streams.values()), key=lambda event: event.begin):
        if event.begin > at:
            gaps.append(Event(at, event.begin, f"{_short(before)} … {_short(event.name)}"))
        if event.end > at:
            at, before = event.end, event.name
    return [*gaps, Event(at, length, f"{_short(before)} … the step's end")] if at < length else gaps


def describe(device: str, streams: Streams, length: float) -> str:
    """Formats how long each group of kernels runs, and the gaps."""
    busy: Counter[str] = Counter()
    for event in itertools.chain(*streams.values()):
        busy[event.group] += event.end - event.begin
    gaps = gaps_of(streams, length)
    idle = sum(gap.end - gap.begin for gap in gaps)
    lines = [f"{device}: a step of {length:.2f} ms; nothing runs for {idle:.2f} ms"]
    lines += [f"  {group}: {ms:.2f} ms" for group, ms in busy.most_common()]
    longest = sorted(gaps, key=lambda gap: gap.begin - gap.end)
    for gap in longest:
        if gap.end - gap.begin >= LEAST_GAP_MS:
            lines.append(f"  gap at {gap.begin:.2f} ms, {gap.end - gap.begin:.3f} ms: {gap.name}")
    return "\n".join(lines)


def draw(devices: dict[str, Streams], length: float, path: pathlib.Path) -> None:
    """Draws two rows for each device, of its busiest stream and of the others, as a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = []
    for device, streams in devices.items():
        busiest, *others = sorted(
            streams.values(), key=lambda events: -sum(event.end - event.begin for event in events)
        )
        rows.append((device, busiest))
        if any(others):
            rows.append(("other streams", list(itertools.chain(*others))))
    with matplotlib.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(10, 1.2 + 0.55 * len(rows)))
        for y, (_, events) in enumerate(rows):
            for group, colour in COLOURS.items():
                bars = [(event.begin, event.end - event.begin) for event in events if event.group == group]
                axes.broken_barh(bars, (y - 0.4, 0.8), color=colour, linewidth=0)
        used = {event.group for _, events in rows for event in events}
        shown = [Patch(color=colour, label=group) for group, colour in COLOURS.items() if group in used]
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, length)
        axes.set_xlabel("ms")
        figure.legend(handles=shown, loc="outside upper center", ncols=4, fontsize=8)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _short(name: str) -> str:
    """Returns a kernel's name without its namespaces, templates and arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return plain.split("::")[-1].strip() or name


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws a step of a profile, and prints where its time goes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.split("\n")[0])
    parser.add_argument("profile", type=pathlib.Path, help="an xplane.pb file, or a folder with one of them")
    parser.add_argument("--steps", type=int, required=True, help="steps in the profile")
    parser.add_argument("--step", type=int, help="the step to draw, from 0; default: the middle one")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("step.svg"), help="PNG or SVG file")
    options = parser.parse_args(arguments)
    devices = read(options.profile)
    begin, end = step_of(devices, options.steps, options.step)
    step = {device: cut(streams, begin, end) for device, streams in devices.items()}
    for device, streams in step.items():
        print(describe(device, streams, end - begin))
    draw(step, end - begin, options.out)


if __name__ == "__main__":
    main()
