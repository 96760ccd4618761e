"""Seeds the faults of tests/faults.toml, one after the other, and checks that their tests catch each of them.

Works on a copy of the tree, in build/faults. The tests must pass there without a fault. Then each fault is applied, the
CPU library is built if the fault is in C++, the tests of the fault are run, and the file is restored. A fault is caught
if a test fails: a build that fails, a test that cannot be collected or a process that dies does not count.

Usage: python scripts/test_faults.py [--list] [NAME ...]: all faults, or those whose names contain one of the words
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRATCH = ROOT / "build/faults"
TREE, BUILD, LIBRARIES = SCRATCH / "tree", SCRATCH / "cmake", SCRATCH / "tree/jaxsok/_lib"
BUILT = {BUILD: SCRATCH / "clean/cmake", LIBRARIES: SCRATCH / "clean/_lib"}  # what builds change, and its copy
TIMEOUT_S = 600  # for the tests of one fault; most take a few seconds
TOGETHER = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
CAUGHT = 1  # pytest's exit status when tests were run and some failed

SITE = SCRATCH / "site"  # of processes that run tests, and of those that tests start

# An editable install would import jaxsok from its installed location, not from the copy.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
PYTEST = """
import importlib.util, sys
found = importlib.util.find_spec("jaxsok").origin
assert found == sys.argv[1], f"got jaxsok of {found}, wanted {sys.argv[1]}"
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


class Failure(Exception):
    """An error that prevents the faults from being tried."""


def is_compiled(fault: dict) -> bool:
    """Returns whether the library must be built for a fault."""
    return fault["file"].startswith("ffi/")


def copy_tree() -> None:
    """Updates the copy; unchanged files keep their times, so that builds are incremental."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, copy = ROOT / name, TREE / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    for path in TREE.rglob("*"):
        place = path.relative_to(TREE).as_posix()
        is_made = "__pycache__" in place or path.is_relative_to(LIBRARIES)
        if path.is_file() and place not in names and not is_made:
            path.unlink()


def configure() -> None:
    """Prepares the build of the CPU library, with -O1: it takes a third of the time, and gives the same bits."""
    command = ["cmake", "-S", TREE / "ffi", "-B", BUILD, f"-DPython_EXECUTABLE={sys.executable}", "-DJAXSOK_CUDA=OFF"]
    command += ["-DCMAKE_BUILD_TYPE=Faults", "-DCMAKE_CXX_FLAGS_FAULTS=-O1 -DNDEBUG"]
    command += [f"-DJAXSOK_OUTPUT_DIR={LIBRARIES}"]
    command += [f"-DJAXSOK_XLA_INCLUDE_DIR={os.environ.get('JAXSOK_XLA_INCLUDE_DIR', '')}"]
    command += ["-GNinja"] if shutil.which("ninja") else []
    run_checked(command, "cmake")


def build() -> None:
    """Builds what has changed."""
    run_checked(["cmake", "--build", BUILD, "--parallel", str(os.cpu_count())], "build")


def keep_build() -> None:
    """Saves the build without a fault."""
    for folder, copy in BUILT.items():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)


def restore_build() -> None:
    """Restores the saved build, with its times: a later build need not recompile what a fault had compiled."""
    for folder, copy in BUILT.items():
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)


def run_checked(command: list, what: str) -> None:
    """Runs a command, and raises with the errors that it printed if it fails."""
    done = subprocess.run(command, text=True, **TOGETHER)
    if done.returncode:
        lines = done.stdout.splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines[-15:]
        raise Failure(f"{what} failed:\n" + "\n".join(errors))


def run_tests(tests: list[str]) -> tuple[int, str]:
    """Runs tests of the copy; returns the exit status of pytest and its output."""
    SITE.mkdir(exist_ok=True)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = [TREE, SITE, *filter(lambda path: path and pathlib.Path(path).resolve() != ROOT, python_path())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", PYTEST, TREE / "jaxsok/__init__.py", "-q", "-x", "-p", "no:cacheprovider"]
    # Hypothesis tries the same examples each time.
    command += ["--hypothesis-seed=0", *tests]
    try:
        done = subprocess.run(command, cwd=TREE, env=environment, text=True, timeout=TIMEOUT_S, **TOGETHER)
    except subprocess.TimeoutExpired as error:
        return -1, f"no end after {TIMEOUT_S} s\n{error.stdout or ''}"
    return done.returncode, done.stdout


def python_path() -> list[str]:
    """Returns the folders of PYTHONPATH."""
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def try_fault(fault: dict) -> str:
    """Applies a fault, runs its tests and restores the file. Returns "" if it was caught, otherwise what happened."""
    path = TREE / fault["file"]
    text, times = path.read_text(), path.stat()
    if text.count(fault["was"]) != 1:
        return f"`was` is there {text.count(fault['was'])} times in {fault['file']}, wanted once"
    path.write_text(text.replace(fault["was"], fault["now"]))
    try:
        if is_compiled(fault):
            build()
        status, output = run_tests(fault["tests"])
    except Failure as error:
        return str(error)
    finally:
        path.write_text(text)
        if is_compiled(fault):
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            restore_build()
    if status == CAUGHT:
        return ""
    if status == 0:
        return "NOT CAUGHT: the tests passed"
    return f"pytest ended with {status}, wanted {CAUGHT}:\n" + "\n".join(output.splitlines()[-15:])


def main() -> int:
    """Prints a line for each fault; the exit status is 1 if one was not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; none: all faults")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    arguments = parser.parse_args()
    start = time.perf_counter()
    faults = tomllib.loads((ROOT / "tests/faults.toml").read_text())["fault"]
    if arguments.names:
        faults = [fault for fault in faults if any(name in fault["name"] for name in arguments.names)]
    if arguments.list or not faults:
        print("\n".join(f"{fault['name']:45} {', '.join(fault['violates'])}" for fault in faults) or "no such fault")
        return 0 if faults else 1
    try:
        copy_tree()
        configure()
        build()
        keep_build()
        status, output = run_tests(sorted({test for fault in faults for test in fault["tests"]}))
        if status:
            raise Failure(f"the tests fail without a fault (pytest ended with {status}):\n{output}")
    except Failure as error:
        print(error)
        return 1
    print(f"{len(faults)} faults; their tests pass without them ({time.perf_counter() - start:.0f} s)", flush=True)
    missed = {}
    for fault in faults:
        began = time.perf_counter()
        if problem := try_fault(fault):
            missed[fault["name"]] = problem
        outcome = "MISSED" if problem else "caught"
        seconds = time.perf_counter() - began
        print(f"{outcome} {seconds:5.1f} s  {fault['name']:45} {', '.join(fault['violates'])}", flush=True)
    for name, problem in missed.items():
        print(f"\n{name}: {problem}")
    print(f"\n{len(faults) - len(missed)} of {len(faults)} faults caught in {time.perf_counter() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
