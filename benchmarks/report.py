"""Writes the results of a run into the documentation, between two markers.

    python -m benchmarks.report results.json --document docs/performance.md

Several files are told one after the other. What stands outside the markers is left alone.
"""

import argparse
import pathlib
from collections.abc import Sequence

from . import limits, records, tables, workloads

BEGIN = "<!-- benchmarks: begin. Written by benchmarks/report.py; edits here are lost. -->"
END = "<!-- benchmarks: end -->"


def section(path: pathlib.Path) -> str:
    """One results file as Markdown: where it ran, the table, the peers and limits, the failures."""
    about, found, failures = records.load(path)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    is_on_mesh = all(record.num_devices for record in found)
    one_device = (
        ""
        if is_on_mesh
        else f" Device copy {about['copy_gb_per_s']:.0f} GB/s (read + write); limits by {about['limits_by']}; "
        f"FBGEMM {about['fbgemm']};"
    )
    lines = [
        f"### {about['device']}, {about['date']}" + (", several" if is_on_mesh else ""),
        "",
        f"Commit `{about['commit']}`; Python {about['python']}, {versions}"
        + (f"; driver {about['driver']}" if about["driver"] else f"; {about['cpu_count']} CPU cores")
        + f".{one_device} Scale {about['options']['scale']:g}; {about['wall_s']:.0f} s in all.",
        "",
    ]
    is_full_size = about["options"]["scale"] == 1 and about["platform"] != "cpu"
    for title, columns, table in tables.all_of(found, is_full_size):
        # What is published of other systems stands in the text, once.
        keep = [i for i, column in enumerate(columns) if "TorchRec" not in column]
        short = [[row[i] for i in keep] for row in table]
        lines += [title, "", tables.format_table([columns[i] for i in keep], short), ""]
    note = tables.host_bound_note(found)
    lines += [note.replace("*", "\\*", 1), ""] if note else []
    skipped = about.get("skipped", [])
    if skipped:
        lines += ["Skipped:", "", *(f"- {entry['what']}: {_one_line(entry['why'])}" for entry in skipped), ""]
    if failures:
        lines += ["What failed:", "", *(f"- {entry['what']}: {_one_line(entry['why'])}" for entry in failures), ""]
    return "\n".join(lines)


def floor_rows(gigabytes_per_s: float) -> list[tuple[str, ...]]:
    """The bytes that each workload must move under uniform keys, and the milliseconds that they take at a bandwidth."""
    table = []
    for workload in workloads.WORKLOADS.values():
        unique = workload.num_tables * workloads.expected_unique(
            "uniform", workload.num_rows, workload.num_bags * workload.hotness
        )
        num_bags = workload.num_tables * workload.num_bags
        shape = (workload.num_keys, round(unique), num_bags, workload.dim)
        for run in workload.runs:
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


def replace_between_markers(document: str, text: str) -> str:
    """The document with `text` between its markers.

    Raises:
      ValueError: the document does not have each marker once, in order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"report: the document must have {BEGIN!r} and then {END!r}, each once.")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads results files and rewrites the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=pathlib.Path, nargs="*")
    parser.add_argument("--floors", type=float, metavar="GB_PER_S", help="print the floors at this bandwidth instead")
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--document", type=pathlib.Path, default=root / "docs" / "performance.md")
    options = parser.parse_args(arguments)
    if options.floors:
        print(tables.format_table(FLOOR_COLUMNS, floor_rows(options.floors)))
        return
    if not options.results:
        parser.error("name a results file, or --floors")
    text = "\n\n".join(section(path) for path in options.results)
    options.document.write_text(replace_between_markers(options.document.read_text(), text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main()
