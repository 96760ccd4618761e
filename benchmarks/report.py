"""Writes the results of runs into the documentation: plots, targets, and a page of tables for each run.

    python -m benchmarks.report [results.json ...]

The default is all files in benchmarks/results, by name. Where two have measured the same, the later one counts in the
plots and the targets. Each run gets a page of its own in the folder results next to the document. In the document each
part goes between two markers; the text outside of them is left alone.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from . import bench_dcnv2, limits, plots, records, tables, targets, workloads

ROOT = pathlib.Path(__file__).resolve().parents[1]

PARTS = PLOTS, TARGETS, RUNS = "plots", "targets", "runs"
"""The parts of the document that are written here."""


def markers(part: str) -> tuple[str, str]:
    """Returns the lines before and after a part."""
    return (
        f"<!-- {part}: begin. Written by benchmarks/report.py; edits here are lost. -->",
        f"<!-- {part}: end -->",
    )


def page(path: pathlib.Path) -> str:
    """Renders one results file as a page: the device, the command, the tables, the failures."""
    about, found, failures = records.load(path)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    one_device = (
        ""
        if "copy_gb_per_s" not in about
        else f" Device copy {about['copy_gb_per_s']:.0f} GB/s (read + write); limits by {about['limits_by']}; "
        f"FBGEMM {about['fbgemm']};"
    )
    options = about["options"]
    lines = [
        f"# Run {path.stem}",
        "",
        "Written by `python -m benchmarks.report`; [How times are measured](../measuring.md) explains the columns, and "
        "[benchmarks/README.md](../../benchmarks/README.md) the parts and workloads.",
        "",
        f"`{_command(options)}` on {_devices(about, found)}.",
        "",
        f"Commit `{about['commit']}`; Python {about['python']}, {versions}"
        + (f"; driver {about['driver']}" if about["driver"] else f"; {about['cpu_count']} CPU cores")
        + f".{one_device} Scale {options['scale']:g}; {_protocol(options)}{about['wall_s']:.0f} s in all.",
        "",
    ]
    is_full_size = options["scale"] == 1 and about["platform"] != "cpu"
    for title, columns, table in tables.all_of(found, is_full_size):
        # The text quotes the published times of other systems, once.
        keep = [i for i, column in enumerate(columns) if "TorchRec" not in column]
        short = [[row[i] for i in keep] for row in table]
        lines += [f"## {title.rstrip(':')}", "", tables.format_table([columns[i] for i in keep], short), ""]
    note = tables.host_bound_note(found)
    lines += [note.replace("*", "\\*", 1), ""] if note else []
    skipped = about.get("skipped", [])
    if skipped:
        lines += ["## Skipped", "", *(f"- {entry['what']}: {_one_line(entry['why'])}" for entry in skipped), ""]
    if failures:
        lines += ["## What failed", "", *(f"- {entry['what']}: {_one_line(entry['why'])}" for entry in failures), ""]
    return "\n".join(lines).rstrip() + "\n"


def runs_section(paths: Sequence[pathlib.Path]) -> str:
    """Lists the pages of runs, newest first."""
    rows = []
    for path in reversed(paths):
        about, found, _ = records.load(path)
        parts = ", ".join(f"`{part}`" for part in about["options"]["parts"])
        rows.append((f"[{path.stem}](results/{path.stem}.md)", _devices(about, found), f"`{about['commit']}`", parts))
    return tables.format_table(("run", "device", "commit", "parts"), rows)


def floor_rows(gigabytes_per_s: float) -> list[tuple[str, ...]]:
    """Computes the bytes that each workload must move under uniform keys, and their milliseconds at a bandwidth."""
    table = []
    for workload in workloads.WORKLOADS.values():
        unique = workload.num_tables * workloads.expected_unique(
            "uniform", workload.num_rows, workload.num_bags * workload.hotness
        )
        num_bags = workload.num_tables * workload.num_bags
        shape = (workload.num_keys, round(unique), num_bags, workload.dim)
        for run in workload.runs:
            if run.optimizer == workloads.LIFTED_ADAM:  # moves the same bytes as the fused one
                continue
            evaluation = limits.forward_bytes(*shape, training=False)
            step = limits.forward_bytes(*shape, training=True)
            step += limits.update_bytes(*shape, workloads.state_dims(run.optimizer, workload.dim))
            table.append(
                (
                    workload.name,
                    run.optimizer,
                    f"{workload.num_keys * 1e-6:.2f}",
                    f"{unique * 1e-6:.2f}",
                    *(f"{value * 1e-9:.2f}" for value in (evaluation, step)),
                    *(f"{value / gigabytes_per_s * 1e-6:.2f}" for value in (evaluation, step)),
                )
            )
    return table


FLOOR_COLUMNS = ("workload", "optimizer", "M keys", "M unique", "forward GB", "step GB", "forward ms", "step ms")


def targets_section(paths: Sequence[pathlib.Path]) -> str:
    """Renders the table of targets and what was reached."""
    results = [records.load(path)[:2] for path in paths]
    rows = targets.rows(results)
    counts = {
        verdict: sum(row[-1] == verdict for row in rows) for verdict in ("pass", "**miss**", targets.NOT_MEASURED)
    }
    return "\n".join(
        [
            f"{counts['pass']} reached, {counts['**miss**']} missed, {counts[targets.NOT_MEASURED]} not measured. "
            "Targets were set for H200s. Each row is of the newest run that measured it, on the device named; [the "
            "runs](#runs) have their commits. A speed over a peer is its time over jaxsok's.",
            "",
            tables.format_table(targets.COLUMNS, rows),
        ]
    )


def plots_section(paths: Sequence[pathlib.Path], folder: pathlib.Path) -> str:
    """Draws the plots of full-size runs on a GPU and links them; prints why if no plot can be drawn."""
    found = []
    for path in paths:
        about, loaded, _ = records.load(path)
        if about["platform"] != "cpu" and about["options"]["scale"] == 1.0:
            found += loaded
    why = plots.why_none()
    if why:
        print(f"report: no plots are drawn: {why}")
        return ""
    return "".join(f"![{shows}](images/{name})\n\n" for name, shows in plots.draw(found, folder))


def replace_between_markers(document: str, text: str, part: str) -> str:
    """Returns the document with `text` between the markers of a part.

    Raises:
      ValueError: the document does not have each marker once, in order.
    """
    begin, end = markers(part)
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"report: the document must have {begin!r} and then {end!r}, each once.")
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads results files, draws the plots, rewrites the document, and writes a page for each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=pathlib.Path, nargs="*", help="default: all in benchmarks/results")
    parser.add_argument("--floors", type=float, metavar="GB_PER_S", help="print the floors at this bandwidth instead")
    parser.add_argument("--document", type=pathlib.Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args(arguments)
    if options.floors:
        print(tables.format_table(FLOOR_COLUMNS, floor_rows(options.floors)))
        return
    paths = options.results or sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    if not paths:
        parser.error("got no results file, and there is none in benchmarks/results")
    document = options.document.read_text()
    texts = plots_section(paths, options.document.parent / "images"), targets_section(paths), runs_section(paths)
    for part, text in zip(PARTS, texts, strict=True):
        document = replace_between_markers(document, text, part)
    options.document.write_text(document)
    folder = options.document.parent / "results"
    folder.mkdir(exist_ok=True)
    for path in paths:
        (folder / f"{path.stem}.md").write_text(page(path))


def _command(options: dict[str, Any]) -> str:
    """Returns the command that makes such a run: options whose values are those of any run are left out."""
    given = {
        "workloads": "workloads",
        "keys": "keys",
        "optimizers": "optimizers",
        "parts": "only",
        "devices": "devices",
    }
    given |= {"exchange": "exchange", "seconds": "seconds", "train": "train", "repetitions": "repetitions"}
    given |= {"batch_ms": "batch-ms", "scale": "scale"}
    words = ["python -m jaxsok bench"] + (["--quick"] if options["quick"] else [])
    if "processes" in options:  # a process for each device, which process 0 names
        given = {name: option for name, option in given.items() if name != "parts"} | {"wires": "wires"}
        words = [f"python -m benchmarks.processes --num-processes {options['processes']} --process-id …"]
    for name, option in given.items():
        value = options.get(name)
        if (
            not value
            or (name == "workloads" and set(value) >= set(workloads.WORKLOADS))
            or (name, value) == ("scale", 1)
        ):
            continue
        text = f"{value:g}" if isinstance(value, float) else str(value)
        text = ",".join(map(str, value)) if isinstance(value, list) else text
        words.append(f'--{option}="{text}"' if " " in text else f"--{option} {text}")
    return " ".join(words)


def _devices(about: dict[str, Any], found: Sequence[records.Record]) -> str:
    """Names the device, and how many of them a run on a mesh used."""
    numbers = {each.num_devices or each.notes.get("num_devices") or each.notes.get("on") or 0 for each in found}
    if about["platform"] == "cpu":
        return f"{about['cpu_count']} CPU cores"
    number = ", ".join(map(str, sorted(numbers))) if max(numbers, default=0) > 1 else "one"
    return f"{number} {about['device']}"


def _protocol(options: dict[str, Any]) -> str:
    """Formats the repetitions, if the run recorded them; for training from files also its duration and options."""
    if "repetitions" not in options:
        return ""
    training = ""
    if "seconds" in options:
        given = f", `{options['train']}`" if options["train"] else ""
        training = f"training {bench_dcnv2.NUM_RUNS} runs of {options['seconds']:g} s{given}; parts "
    of = f" of {options['batch_ms']:g} ms" if "batch_ms" in options else ""
    return f"{training}{options['repetitions']} repetitions{of}; "


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main()
