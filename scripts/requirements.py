"""Prints what an extra of pyproject.toml installs, jaxsok itself apart, one requirement a word.

`pip install` of these installs the tools of an extra without building the package again. pip's own answer,
dependency groups, needs a pip newer than the one that comes with the oldest supported Python.

Usage: python scripts/requirements.py EXTRA [EXTRA ...]; "build" stands for what the build itself needs.
"""

import pathlib
import re
import sys
import tomllib

PYPROJECT = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())


def requirements(extra: str) -> list[str]:
    """The requirements of one extra, with those of the extras it names."""
    if extra == "build":  # jaxlib comes with jax, in the version that this environment runs
        required = [r for r in PYPROJECT["build-system"]["requires"] if not r.startswith("jaxlib")]
        jax = [r for r in PYPROJECT["project"]["dependencies"] if re.match(r"jax\b", r)]
        return [*required, *jax, "cmake" + PYPROJECT["tool"]["scikit-build"]["cmake"]["version"], "ninja"]
    found = []
    for requirement in PYPROJECT["project"]["optional-dependencies"][extra]:
        own = re.fullmatch(r"jaxsok\[(.+)\]", requirement)
        found += [r for name in own[1].split(",") for r in requirements(name)] if own else [requirement]
    return found


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(r for extra in sys.argv[1:] for r in requirements(extra))))
