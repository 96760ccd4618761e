"""The command line: arguments passed on, refusals, and its start from any folder."""

import pathlib
import shlex
import subprocess
import sys
import types

import pytest

from jaxsok import __main__ as command_line
from jaxsok.kernels import library

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_bench_gets_its_arguments_as_they_were_written(monkeypatch):
    given = []
    benchmarks = types.SimpleNamespace(main=lambda arguments: given.append(arguments) or recorder)
    monkeypatch.setattr(command_line, "_find_benchmarks", lambda: benchmarks)
    arguments = ["--quick", "--only", "small", "--workloads", "W1,W5", "--help", "--time", "9"]
    for failures, status in (([], 0), ([{"what": "x", "why": "y"}], 1)):
        recorder = types.SimpleNamespace(failures=failures)
        assert command_line.main(["bench", *arguments]) == status
    assert given == [arguments, arguments]


@pytest.mark.parametrize("arguments", [[], ["banquet"]])
def test_an_unknown_command_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        command_line.main(arguments)
    assert refused.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_without_benchmarks_the_command_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_line, "_SOURCES", tmp_path)
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["bench"]) == 2
    assert "benchmarks/" in capsys.readouterr().err


def test_the_command_starts_outside_the_checkout(tmp_path):
    command = [sys.executable, "-m", "jaxsok", "bench", "--help"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "usage: python -m jaxsok bench" in found.stdout
    assert "--workloads" in found.stdout


def test_names_that_the_locale_cannot_encode(tmp_path):
    """A specification is UTF-8 in any locale, and what cannot be printed as it is must not fail a command."""
    source = 'import jaxsok\ntables = [jaxsok.TableSpec("\xe9t\xe9", 64, jaxsok.optim.adam(0.1))]'
    (tmp_path / "tables.py").write_text(source, "utf-8")
    command = [sys.executable, "-m", "jaxsok", "estimate", "tables.py"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "\\xe9t\\xe9" in found.stdout


def test_flags_are_words_of_a_shell(monkeypatch, capsys, tmp_path):
    """Also where the package lies in a folder with a space in its name."""
    folder = tmp_path / "with a space"
    monkeypatch.setattr(library, "require", lambda back_end: folder / f"libjaxsok_{back_end}.so")
    assert command_line.main(["flags"]) == 0
    include, path, run_path, name = shlex.split(capsys.readouterr().out)
    assert (path, run_path, name) == (f"-L{folder}", f"-Wl,-rpath,{folder}", "-ljaxsok_cpu")
    assert pathlib.Path(include.removeprefix("-I"), "jaxsok.h").is_file()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_ended_is_no_error(unbuffered):
    """As in `python -m jaxsok flags | true`."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); from jaxsok.__main__ import main; main(['flags'])"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = unbuffered
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        process.stdout.close()  # before there is anything to read
        process.stdin.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, "")


def test_without_examples_the_demo_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_line, "_SOURCES", tmp_path)
    assert command_line.main(["demo"]) == 2
    assert "make demo" in capsys.readouterr().err


def test_a_demo_without_its_extra_names_it(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "jaxsok_tools" / "examples"
    folder.mkdir(parents=True)
    (folder / "train_dlrm.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.setattr(command_line, "_SOURCES", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train_dlrm", raising=False)
    assert command_line.main(["demo"]) == 2
    assert "a_package_that_is_missing" in (said := capsys.readouterr().err) and "jaxsok[demo]" in said
