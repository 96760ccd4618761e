"""Prints the requirements of jaxsok and some of its extras, without jaxsok itself, one per line.

`pip install` of these sets up an environment without building the package. pip's own feature for this, dependency
groups, needs a newer pip than that of the oldest supported Python.

Usage: python scripts/requirements.py EXTRA [EXTRA ...]; "build" stands for the requirements of the build.
"""

import pathlib
import re
import sys
import tomllib

PYPROJECT = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())


def requirements(extra: str) -> list[str]:
    """Returns the requirements of one extra, with those of the extras that it names."""
    if extra == "build":  # jaxlib comes with jax, in the version that this environment runs
        required = [text for text in PYPROJECT["build-system"]["requires"] if not text.startswith("jaxlib")]
        return [*required, "cmake" + PYPROJECT["tool"]["scikit-build"]["cmake"]["version"], "ninja"]
    found = []
    for text in PYPROJECT["project"]["optional-dependencies"][extra]:
        own = re.fullmatch(r"jaxsok\[(.+)\]", text)
        found += [more for name in own[1].split(",") for more in requirements(name)] if own else [text]
    return found


if __name__ == "__main__":
    needed = [text for extra in sys.argv[1:] for text in requirements(extra)]
    print("\n".join(dict.fromkeys([*PYPROJECT["project"]["dependencies"], *needed])))
