"""Pictures of what `report`, `memory_estimate` and `cache_estimate` found. Needs Matplotlib, and no display."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import checks
from jaxsok.caches import CacheEstimate
from jaxsok.inspection.counts import Bin
from jaxsok.inspection.report import TableReport
from jaxsok.memory import STATE, STEP, MemoryEstimate
from jaxsok.printed import format_bytes, name_devices

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999", "#000000")
_INCHES = 3.4, 2.6  # of a panel
_MOST_TICKS = 4  # that fit under a panel, of up to eight characters each


def draw_reports(reports: Sequence[TableReport], path: str | os.PathLike[str]) -> None:
    """Draws the histograms of tables: a row for each table; norms, frequencies and ages side by side.

    `reports`, at least one, are of `report` or `inspect`. The ending of `path` is the format: .png, .svg, .pdf. An
    ImportError says that Matplotlib is missing.

    Example:
      `draw_reports(inspect("exports/monday").tables, "monday.png")`
    """
    lines = [_panels(table) for table in reports]
    width = max(len(line) for line in lines)
    figure = _figure((_INCHES[0] * width, _INCHES[1] * len(lines)))
    all_axes = figure.subplots(len(lines), width, squeeze=False)
    for axes, table, line in zip(all_axes, reports, lines, strict=True):
        for number, panel in enumerate(axes):
            if number >= len(line):
                panel.set_axis_off()
                continue
            what, bins, colour = line[number]
            _bars(panel, bins, colour)
            panel.set_xlabel(what, parse_math=False)
            if number == 0:
                panel.set_ylabel("rows")
                title = f"{table.name}: {table.num_rows:,} rows of {table.dim} {table.dtype}"
                panel.set_title(title, loc="left", parse_math=False)
    figure.savefig(path)


def draw_estimate(estimate: MemoryEstimate, path: str | os.PathLike[str]) -> None:
    """Draws the bytes of an estimate: a bar for the state and one for the step of each store; as `draw_reports`.

    Example:
      `draw_estimate(memory_estimate(tables), "memory.png")`
    """
    bars: list[tuple[str, Mapping[str, int]]] = []
    for store in estimate.stores:
        names = " ".join(store.tables)
        names = names if len(names) <= 30 else f"{names[:27]}..."
        bars.append((f"{names}: state", {part: store.state.get(part, 0) for part in STATE}))
        if any(store.step.values()):
            bars.append((f"{names}: step", {part: store.step.get(part, 0) for part in STEP}))
    power = max(0, (max(sum(sizes.values()) for _, sizes in bars).bit_length() - 1) // 10)
    scale, unit = 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    figure = _figure((8.0, 1.6 + 0.4 * len(bars)))
    axes = figure.subplots()
    ends = np.zeros(len(bars))
    for part, colour in (*zip(STATE, _COLOURS, strict=False), *zip(STEP, _COLOURS, strict=False)):
        widths = np.array([sizes.get(part, 0) for _, sizes in bars]) / scale
        (lines,) = widths.nonzero()
        if lines.size:
            how = {"color": colour, "hatch": "//" if part in STEP else None, "edgecolor": "white"}
            axes.barh(lines, widths[lines], left=ends[lines], label=part.replace("_", " "), **how)
        ends += widths
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    title = f"{format_bytes(estimate.total)} on {name_devices(estimate.num_shards)}"
    if estimate.memory_bytes is not None:
        title += f", of {format_bytes(estimate.memory_bytes)} for arrays"
    if estimate.host_bytes:
        title += f"; {format_bytes(estimate.host_bytes)} of host memory"
    axes.set_title(title, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(path)


def draw_cache_estimates(estimates: Sequence[CacheEstimate], path: str | os.PathLike[str]) -> None:
    """Draws hit rates by the rows of the cache, a panel for each store; as `draw_reports`.

    The area is between the rate that takes first uses as reads and the one that leaves them out; the line is the
    declared cache.

    Example:
      `draw_cache_estimates(cache_estimate(tables, features, batches), "caches.png")`
    """
    figure = _figure((1.6 * _INCHES[0], _INCHES[1] * len(estimates)))
    for axes, estimate in zip(figure.subplots(len(estimates), squeeze=False)[:, 0], estimates, strict=True):
        # More points than a picture can show would take long.
        rows = np.unique(np.geomspace(1, max(1, estimate.num_keys), 500).astype(np.int64))[: estimate.num_keys]
        rates, least = estimate.hit_rates[rows], estimate.least_hit_rates[rows]
        axes.fill_between(rows, least, rates, color=_COLOURS[5], alpha=0.4, label="first uses are reads, or left out")
        axes.plot(rows, rates, color=_COLOURS[0])
        if estimate.device_rows is not None:
            axes.axvline(estimate.device_rows, color=_COLOURS[3], label=f"declared, {estimate.device_rows:,}")
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel("rows of the cache")
        axes.set_ylabel("hit rate")
        names = ", ".join(estimate.tables)
        axes.set_title(names if len(names) <= 60 else f"{names[:57]}...", loc="left", parse_math=False)
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.savefig(path)


def _panels(table: TableReport) -> list[tuple[str, Sequence[Bin], str]]:
    norms = {"rows": table.norms, **table.states}
    panels = [(f"norm of {name}", of.bins, _COLOURS[min(i, 1)]) for i, (name, of) in enumerate(norms.items())]
    if table.uses is not None:
        panels.append(("frequency", table.uses.bins, _COLOURS[2]))
    if table.ages is not None:
        panels.append((f"steps since the last use, at {table.ages.clock:,}", table.ages.bins, _COLOURS[3]))
    return panels


def _bars(axes: Any, bins: Sequence[Bin], colour: str) -> None:
    """Draws a histogram over a logarithmic axis; a bin that begins at 0 stands half an octave below 1."""
    if not bins:
        axes.text(0.5, 0.5, "none above 0", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        axes.set_xticks([])
        return
    lows = [counted.low or 0.5 for counted in bins]
    edges, heights = [*lows, bins[-1].high], [counted.num for counted in bins]
    widths = [counted.high - low for counted, low in zip(bins, lows, strict=True)]
    axes.bar(lows, heights, width=widths, align="edge", color=colour, edgecolor="white", linewidth=0.5)
    axes.set_xscale("log")
    if edges[-1] < 100 * edges[0]:
        # Over less than two decades Matplotlib names ticks between the powers of ten as well, one across the other.
        names = [f"{edge:.3g}" for edge in (bins[0].low, *edges[1:])]
        step = -(-len(edges) // _MOST_TICKS)
        axes.set_xticks(edges[::step], names[::step])
        axes.minorticks_off()


def _figure(size: tuple[float, float]) -> Any:
    """Makes an empty figure without pyplot, which keeps figures and asks for a display."""
    wanted = "to draw; pip install matplotlib, or leave the picture out"
    return checks.module("inspection: picture: matplotlib", "matplotlib.figure", wanted).Figure(
        figsize=size, layout="constrained"
    )
