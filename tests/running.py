"""Helpers that run the repository's programs inside the test's process, which has already imported JAX."""

import runpy
import sys

import pytest


def run_program(path, arguments, monkeypatch):
    """Runs a Python file as `python PATH ARGUMENT ...` would, and returns its exit status."""
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code
