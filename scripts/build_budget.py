"""Compares a build of the GPU back end with ffi/build_budget.toml: bytes of each object, seconds of each compiler.

The same compiler makes the same bytes anywhere. Seconds are those of one core (user and system), whatever else the
machine does meanwhile. They still depend on the machine: on a slow day a source took 92 s for a budget of 60 that it
had kept before. So a source may take `--slack` times its budget.

Usage: python scripts/build_budget.py BUILD_FOLDER [--library PATH] [--slack 3] [--write]
       python scripts/build_budget.py --run COMPILER ARGUMENT ... (as CMAKE_CUDA_COMPILER_LAUNCHER: records seconds)
"""

import argparse
import pathlib
import resource
import subprocess
import sys
import tomllib

BUDGET = pathlib.Path(__file__).parent.parent / "ffi/build_budget.toml"
OBJECTS = "CMakeFiles/jaxsok_cuda_kernels.dir"
ROOM = 1.1  # over the measurements when a budget is written


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of each object of kernels, by the name of its source."""
    return {
        path.name.removesuffix(".o"): path.stat().st_size for path in sorted(folder.glob(f"{OBJECTS}/**/*_cuda.cu.o"))
    }


def run(command: list[str]) -> int:
    """Runs a compiler and writes its seconds next to its object, as OBJECT.seconds."""
    status = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "-o" in command:
        pathlib.Path(command[command.index("-o") + 1] + ".seconds").write_text(f"{used.ru_utime + used.ru_stime:.1f}\n")
    return status


def seconds(folder: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of one core that each object took, by the name of its source."""
    notes = sorted(folder.glob(f"{OBJECTS}/**/*_cuda.cu.o.seconds"))
    return {path.name.removesuffix(".o.seconds"): float(path.read_text()) for path in notes}


def write_budget(found: dict[str, int], library_bytes: int, most_seconds: float) -> str:
    """Returns a budget with some room over the measurements."""
    lines = [
        "# What compiling one GPU architecture may cost (scripts/build_budget.py --write; make check-build compares).",
        "",
        f"library_bytes = {library_bytes}  # of the stripped library",
        f"most_seconds = {most_seconds:g}  # of any source",
        "",
        "[bytes]  # of each object",
        *(f'"{name}" = {int(size * ROOM) // 1000 * 1000 + 1000}' for name, size in found.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints a table; the exit status is 1 if a source exceeds its budget, or has none."""
    if sys.argv[1:2] == ["--run"]:
        return run(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where CMake built")
    parser.add_argument("--library", type=pathlib.Path, help="the stripped library; checked too")
    parser.add_argument("--slack", type=float, default=3, help="times the seconds of the budget")
    parser.add_argument("--write", action="store_true", help="writes what was found as the new budget")
    options = parser.parse_args()
    found, took = sizes(options.folder), seconds(options.folder)
    if not found:
        print(f"build_budget: got no objects in {options.folder / OBJECTS}, wanted a finished build.", file=sys.stderr)
        return 1
    budget = tomllib.loads(BUDGET.read_text())
    if options.write:
        BUDGET.write_text(write_budget(found, budget["library_bytes"], budget["most_seconds"]))
        return 0
    failures = []
    print(f"{'source':42}{'bytes':>12}{'budget':>12}{'seconds':>9}")
    for name in sorted(found.keys() | budget["bytes"].keys()):
        size, limit, time = found.get(name, 0), budget["bytes"].get(name), took.get(name, 0.0)
        print(f"{name:42}{size:12,}{limit or 0:12,}{time:9.1f}")
        if limit is None or name not in found:
            failures.append(f"{name}: {'no budget' if limit is None else 'a budget, and no such source'}")
        elif size > limit:
            failures.append(f"{name}: {size:,} bytes, wanted at most {limit:,}")
        if time > budget["most_seconds"] * options.slack:
            failures.append(
                f"{name}: {time:.0f} s, wanted at most {budget['most_seconds']:g} (times {options.slack:g})"
            )
    print(f"{'all':42}{sum(found.values()):12,}{'':12}{sum(took.values()):9.1f}")
    if options.library is not None:
        size = options.library.stat().st_size
        print(f"{options.library.name}, stripped: {size:,} bytes")
        if size > budget["library_bytes"]:
            failures.append(f"{options.library.name}: {size:,} bytes, wanted at most {budget['library_bytes']:,}")
    for failure in failures:
        print(f"build_budget: {failure}.", file=sys.stderr)
    if failures:
        print("build_budget: make it smaller, or change ffi/build_budget.toml and say why.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
