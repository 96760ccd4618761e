"""Runs programs of the repository inside of the test's own process, which has imported JAX already."""

import runpy
import sys

import pytest


def run_program(path, arguments, monkeypatch):
    """Runs a Python file as `python PATH ARGUMENT ...` would, and returns its exit status."""
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code
