"""The command line: `python -m jaxsok bench`. Thin: a command finds what it runs, and hands its arguments on."""

import argparse
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

_SOURCES = pathlib.Path(__file__).resolve().parents[1]
"""The checkout, or the folder into which a wheel was installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: those of the command line; None: of this process.

    Returns:
      The exit status.

    Example:
      `main(["bench", "--quick"])`
    """
    parser = argparse.ArgumentParser(prog="python -m jaxsok", description="Dynamic embedding tables for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # The benchmarks have a parser of their own, which is found with them.
    commands.add_parser("bench", add_help=False, help="times jaxsok here, beside its limits and peers (bench --help)")
    options, rest = parser.parse_known_args(arguments)
    return {"bench": _bench}[options.command](rest)


def _bench(arguments: Sequence[str]) -> int:
    try:
        benchmarks = _find_benchmarks()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if benchmarks.main(arguments).failures else 0


def _find_benchmarks() -> ModuleType:
    """The benchmarks of the checkout that this package lies in, or those that the wheel brought along.

    Raises:
      ImportError: there are none; says where they are to be had.
    """
    if (_SOURCES / "benchmarks" / "run.py").exists() and (_SOURCES / "pyproject.toml").exists():
        if str(_SOURCES) not in sys.path:
            sys.path.insert(0, str(_SOURCES))
        return importlib.import_module("benchmarks.run")
    if importlib.util.find_spec("jaxsok_tools") is None:
        raise ImportError(
            "jaxsok bench: got no benchmarks beside the installed package, wanted jaxsok_tools of the same wheel; "
            "install the wheel again, or run `make bench` in a checkout of the sources, where they are in benchmarks/."
        )
    return importlib.import_module("jaxsok_tools.benchmarks.run")


if __name__ == "__main__":
    sys.exit(main())
