"""Reads JSON that jaxsok wrote: of bounded size, with each value checked before anything uses it.

A check is a function that raises `Wrong` for a bad value. Checks of lists and objects are built from those of their
items, so that the required form of a file stands in one place, as data. Fields that a check does not name are ignored.
"""

import json
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

MOST_BYTES = 256 << 20  # the manifest of 10 TB of rows has about 150 MB
_MOST_CHARACTERS = 1 << 16  # of a text, by default

Check = Callable[[Any], None]


class Wrong(ValueError):
    """An invalid value in a manifest."""

    def __init__(self, got: Any, wanted: str, field: str = "") -> None:
        self.got, self.wanted, self.field = got, wanted, field
        super().__init__(f"{field or 'content'}: got {reprlib.repr(got)}, wanted {wanted}")

    def below(self, field: str) -> "Wrong":
        """Returns the same error with its field inside another one."""
        return Wrong(
            self.got, self.wanted, f"{field}{self.field and ('' if self.field[0] == '[' else '.')}{self.field}"
        )


def read_json(op: str, path: Any, error: type[ValueError]) -> dict[str, Any]:
    """Reads the JSON object in a file; anything else raises an `error` that names the file and the byte."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise damage_error(op, path, "byte 0: got no regular file, wanted the JSON that was written", error)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        data = file.read(min(size, MOST_BYTES))
    try:
        value = json.loads(data.decode()) if size <= MOST_BYTES else None
        if isinstance(value, dict):
            return value
        byte, got = 0, f"a {type(value).__name__} in place of an object"
        if size > MOST_BYTES:
            byte, got = MOST_BYTES, f"{size} bytes, more than any manifest has"
    except UnicodeDecodeError as wrong:
        byte, got = wrong.start, "no text"
    except json.JSONDecodeError as wrong:
        byte, got = wrong.pos, wrong.msg
    except (ValueError, RecursionError) as wrong:  # thousands of digits, or deeply nested brackets
        byte, got = 0, str(wrong)
    raise damage_error(op, path, f"byte {byte}: got {got}, wanted the JSON that was written", error)


def check_value(op: str, path: Any, value: Any, check: Check, error: type[ValueError]) -> None:
    """Raises an `error` that names the file and the field, if the check refuses the value."""
    try:
        check(value)
    except Wrong as wrong:
        raise damage_error(op, path, str(wrong), error) from wrong


def damage_error(op: str, path: Any, what: str, error: type[ValueError]) -> ValueError:
    """Makes an error about a damaged file."""
    return error(f'{op}: file "{path}", {what}; the file is damaged, use another copy.')


# Checks --------------------------------------------------------------------------------------------------------------


def integer(least: int = 0, most: int = 2**63 - 1) -> Check:
    """Checks for an integer in a range."""

    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Wrong(value, f"an integer from {least} to {most}")

    return check


def _require(is_right: Callable[[Any], bool], wanted: str) -> Check:
    def check(value: Any) -> None:
        if not is_right(value):
            raise Wrong(value, wanted)

    return check


number = _require(lambda value: type(value) is float or (type(value) is int and abs(value) < 2**1023), "a number")
"""Checks for a number; infinities and NaN are allowed."""
boolean = _require(lambda value: type(value) is bool, "true or false")
"""Checks for true or false."""
_is_object = _require(lambda value: isinstance(value, dict), "an object")


def text(pattern: str = r".*", wanted: str = "text", most: int = _MOST_CHARACTERS) -> Check:
    """Checks for a text that a regular expression matches as a whole."""
    compiled, surrogate = re.compile(pattern, re.DOTALL), re.compile("[\ud800-\udfff]")

    def is_text(value: Any) -> bool:
        # Files and hashes cannot encode half of a surrogate pair.
        return isinstance(value, str) and len(value) <= most and not surrogate.search(value)

    matches = _require(lambda value: compiled.fullmatch(value) is not None, wanted)
    return also(_require(is_text, f"{wanted} of at most {most} characters"), matches)


def one_of(choices: Collection[str]) -> Check:
    """Checks for one of some texts."""
    return _require(lambda value: isinstance(value, str) and value in choices, f"one of {list(choices)}")


def optional(item: Check) -> Check:
    """Allows None and the values that another check allows."""
    return lambda value: None if value is None else item(value)


def list_of(item: Check) -> Check:
    """Checks for a list, and each of its items."""
    is_list = _require(lambda value: isinstance(value, list), "a list")
    return also(is_list, lambda value: _check_all((place, item, entry) for place, entry in enumerate(value)))


def tuple_of(*items: Check) -> Check:
    """Checks for a list with one item for each check."""
    is_list = _require(lambda value: isinstance(value, list) and len(value) == len(items), f"a list of {len(items)}")
    return also(is_list, lambda value: _check_all(zip(range(len(items)), items, value, strict=True)))


def by_name(item: Check) -> Check:
    """Checks for an object, and each of its values, under any names."""
    is_name = text(".+", "a name")

    def check_items(value: Any) -> None:
        for name in value:
            is_name(name)
        _check_all((f"[{reprlib.repr(name)}]", item, entry) for name, entry in value.items())

    return also(_is_object, check_items)


def entries(required: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """Checks for an object with all required values, and perhaps others."""
    known = {**required, **(others or {})}

    def check_items(value: Any) -> None:
        for name in required:
            if name not in value:
                raise Wrong(None, "a value", name)
        _check_all((name, item, value[name]) for name, item in known.items() if name in value)

    return also(_is_object, check_items)


def also(*checks: Check) -> Check:
    """Applies several checks, one after the other."""

    def all_of(value: Any) -> None:
        for check in checks:
            check(value)

    return all_of


def _check_all(values: Iterable[tuple[str | int, Check, Any]]) -> None:
    for field, check, value in values:
        try:
            check(value)
        except Wrong as wrong:
            raise wrong.below(f"[{field}]" if isinstance(field, int) else field) from None
