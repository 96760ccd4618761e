"""The list of seeded faults fits the sources, and covers every law and every handler. `make test-faults` seeds them."""

import pathlib
import re
import tomllib

import pytest

from jaxsok.kernels import library

ROOT = pathlib.Path(__file__).parents[2]
FAULTS = tomllib.loads((ROOT / "tests/faults.toml").read_text())["fault"]
LAWS = {f"law {number}" for number in range(1, 15)}
HANDLERS = {target.removeprefix("jaxsok_") for target, _ in library.TARGETS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_fits_the_sources(fault):
    """Its snippet occurs once, and its tests exist."""
    assert fault.keys() == {"name", "violates", "why", "file", "was", "now", "tests"}
    assert (ROOT / fault["file"]).read_text().count(fault["was"]) == 1, f"seed this fault in the new {fault['file']}"
    assert fault["was"] != fault["now"]
    assert set(fault["violates"]) <= LAWS | HANDLERS and fault["violates"]
    assert fault["tests"]
    for test in fault["tests"]:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE), test


def test_every_law_and_every_handler_has_a_fault():
    """A new target also needs a fault that its tests catch."""
    assert len({fault["name"] for fault in FAULTS}) == len(FAULTS) >= 60
    assert {name for fault in FAULTS for name in fault["violates"]} == LAWS | HANDLERS
