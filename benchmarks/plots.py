"""The plots of docs/performance.md, as small SVG files, drawn from the records of a run.

Fed by `records.py`; `report.py` writes them into docs/images, `run.py` next to its results. A plot whose records are
missing is not drawn. Colours are those of Okabe and Ito, which colour-blind readers distinguish; shapes say the same.
"""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from . import records as names
from .one_table import count
from .records import EVALUATION, FIND_AND_GATHER, STEP, TRAINING, Record
from .tables import PEER_WHAT

BLUE, ORANGE, GREEN, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#333333"

PEERS = ("fbgemm_unchecked", "fbgemm_default")

STYLE = {
    "svg.fonttype": "none",  # Text stays text: small files, and the reader's font.
    "svg.hashsalt": "jaxsok",  # The same records give the same bytes.
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": BLACK,
    "axes.labelcolor": BLACK,
    "text.color": BLACK,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def why_none() -> str | None:
    """Returns why nothing can be drawn here, or None if plots can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not importable here"
    return None


def draw(records: Sequence[Record], folder: pathlib.Path) -> list[tuple[str, str]]:
    """Draws the plots that the records allow, and deletes the other plots.

    Args:
      records: of one run or several; where two have measured the same, the later one counts.
      folder: is made if it is not there.

    Returns:
      The file names with what each shows: the alternative text of the image.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    drawn = []
    with matplotlib.rc_context(STYLE):
        for name, (function, shows) in PLOTS.items():
            path = folder / name
            figure = function(pyplot, records)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            drawn.append((name, shows))
    return drawn


def _against_fbgemm(pyplot: Any, records: Sequence[Record]) -> Any:
    one_device = [record for record in records if not record.num_devices and not record.part]
    found = {_place(record): record for record in one_device}
    ours = sorted((record for place, record in found.items() if place[0] == "jaxsok"), key=_place)
    panels = []
    for whats in ((EVALUATION, TRAINING), (STEP,)):
        series: dict[tuple[str, str], tuple[list[float], list[int]]] = {}
        lines: dict[str, int] = {}
        for what, peer, record in itertools.product(whats, PEERS, ours):
            of_peer = found.get((peer, *_place(record)[1:-1], PEER_WHAT.get(what, what)))
            if record.what == what and of_peer is not None:
                label = " ".join(part for part in (record.workload, record.distribution, record.optimizer) if part)
                xs, ys = series.setdefault((what, peer), ([], []))
                xs.append(of_peer.timing.ms / record.timing.ms)
                ys.append(lines.setdefault(label, len(lines)))
        panels.append((series, lines))
    if not all(lines for _, lines in panels):
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 2.0 + 0.27 * max(len(lines) for _, lines in panels)))
    for plot, title, (series, lines) in zip(axes, ("forward", "forward + update"), panels, strict=True):
        for (what, peer), (xs, ys) in series.items():
            colour, marker = {EVALUATION: (BLUE, "o"), TRAINING: (ORANGE, "s"), STEP: (GREEN, "o")}[what]
            face = colour if peer == PEERS[0] else "white"
            label = f"{what}, {'without' if peer == PEERS[0] else 'with'} the bounds check"
            plot.plot(xs, ys, marker, color=colour, markerfacecolor=face, markersize=6, label=label)
        plot.axvline(1.0, color=BLACK, linewidth=1)
        plot.set_yticks(range(len(lines)), list(lines))
        plot.set_ylim(len(lines) - 0.5, -0.5)
        plot.set_xlim(left=0)
        plot.set_title(title, loc="left")
        plot.set_xlabel("FBGEMM's time over jaxsok's")
        plot.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), fontsize=8)
    return figure


def _by_dim(pyplot: Any, records: Sequence[Record]) -> Any:
    lines = {
        ("find + gather", BLUE, "o-"): _dims(records, FIND_AND_GATHER, ""),
        ("step, rowwise Adagrad", GREEN, "s-"): _dims(records, STEP, "rowwise_adagrad"),
        ("step, SGD", ORANGE, "^-"): _dims(records, STEP, "sgd"),
        ("find + gather, bfloat16", RED, "D"): _dims(records, FIND_AND_GATHER, "", "bfloat16"),
    }
    of = "the bytes at the bandwidth of a copy"
    if not any(lines.values()):
        lines, of = (
            {("find + gather, 4 Mi keys", BLUE, "o-"): _share_of_bare_gather(records)},
            "a bare gather of the same rows",
        )
    return _curves(pyplot, lines, "numbers in a row", f"share of the limit:\n{of}", 2, apart=lambda dim: dim % 4 != 0)


def _dims(records: Sequence[Record], what: str, optimizer: str, dtype: str = "float32") -> dict[float, float]:
    return {
        record.notes["dim"]: record.limit_ms / record.timing.ms
        for record in records
        if record.part == "dims"
        and (record.what, record.optimizer, record.notes["dtype"]) == (what, optimizer, dtype)
        and record.limit_ms
    }


def _share_of_bare_gather(records: Sequence[Record]) -> dict[float, float]:
    found = {(record.subject, record.what, record.variant): record.timing.ms for record in records}
    shares = {}
    for subject, what, variant in found:
        bare = found.get(("limit", names.GATHER, variant))
        if subject == "jaxsok" and what == FIND_AND_GATHER and bare and variant.endswith(", 4 Mi keys"):
            shares[float(variant.split(",")[0].removeprefix("D "))] = bare / found[subject, what, variant]
    return shares


def _by_size(pyplot: Any, records: Sequence[Record]) -> Any:
    sizes = {
        record.notes["num_rows"]: record.timing.ms
        for record in records
        if record.part == "scale" and record.what == FIND_AND_GATHER
    }
    keys = {count(record.num_keys) for record in records if record.part == "scale" and record.what == FIND_AND_GATHER}
    lines = {(f"find + gather of {', '.join(sorted(keys))} keys, 64 floats", BLUE, "o-"): sizes}
    return _curves(pyplot, lines, "rows in the table", "ms", 10)


def _by_batch(pyplot: Any, records: Sequence[Record]) -> Any:
    small = [record for record in records if record.part == "small" and record.subject == "jaxsok"]
    lines: dict[tuple[str, str, str], dict[float, float]] = {}
    for what, colour, marker in ((EVALUATION, BLUE, "o"), (TRAINING, ORANGE, "^"), (STEP, GREEN, "s")):
        for name, dash, ms in (
            ("one program a step", "-", lambda record: record.timing.dispatch_ms),
            ("several steps a program", "--", lambda record: record.notes["device_ms"]),
        ):
            lines[f"{what}, {name}", colour, marker + dash] = {
                record.notes["num_samples"]: ms(record) for record in small if record.what == what
            }
    return _curves(pyplot, lines, "samples of 26 keys", "ms", 2)


def _curves(
    pyplot: Any,
    lines: dict[tuple[str, str, str], dict[float, float]],
    across: str,
    up: str,
    base: int,
    apart: Callable[[float], bool] = lambda x: False,
) -> Any:
    """Draws curves over a logarithmic axis; returns None if no curve has two points.

    Points that stand `apart` are hollow and belong to no curve: widths that are no multiple of 4.
    """
    if not any(len(points) > 1 for points in lines.values()):
        return None
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for (label, colour, form), points in lines.items():
        if points:
            for hollow in (False, True):
                xs = sorted(x for x in points if apart(x) == hollow)
                style = {"marker": form[0], "linestyle": "none" if hollow else form[1:] or "none", "color": colour}
                style |= {"markerfacecolor": "white"} if hollow else {"label": label}
                axes.plot(xs, [points[x] for x in xs], markersize=5, **style)
    axes.set_xscale("log", base=base)
    if base == 2:
        ticks = sorted({x for points in lines.values() for x in points if not x % 1 and (int(x) & (int(x) - 1)) == 0})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(fontsize=8)
    return figure


def _place(record: Record) -> tuple[str, str, str, str, str]:
    return record.subject, record.workload, record.distribution, record.optimizer, record.what


PLOTS = {
    "fbgemm.svg": (
        _against_fbgemm,
        "FBGEMM's time over jaxsok's by workload, with FBGEMM's bounds check and without: forwards on the left, steps "
        "on the right. Right of 1 jaxsok is the faster; the numbers are in the tables below.",
    ),
    "dims.svg": (_by_dim, "Share of the limit that is reached, by the numbers in a row; hollow: no multiple of 4."),
    "scale.svg": (_by_size, "Milliseconds of a lookup of 1 Mi keys, by the rows in the table."),
    "small.svg": (_by_batch, "Milliseconds of small batches, by their samples: dispatched one by one, and in a row."),
}
"""The drawing function and the alternative text of each file."""
