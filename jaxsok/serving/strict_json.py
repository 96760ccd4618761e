"""A strict parser of JSON, for configurations and for bodies of requests."""

import collections
import json
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """Parses JSON; ValueError: malformed or deeply nested, a name twice in an object, NaN, or thousands of digits."""
    try:
        return json.loads(text, object_pairs_hook=_to_object, parse_constant=_refuse_constant)
    except ValueError as error:
        if "int_max_str_digits" in str(error):  # the advice is for who runs the program
            raise ValueError("an integer has thousands of digits") from None
        raise
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"one object has the name {name[:60]!r} twice")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; write one out")
