"""The errors of serving, all `ValueError`s, by kind: a server answers each kind with a status of its own.

Damaged files raise `jaxsok.checkpoint.CorruptFileError` or `ValueError`, as where the files are read.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any


class ServingError(ValueError):
    """The error of everything that serving refuses."""


class ConfigError(ServingError):
    """A configuration that is malformed or names something missing.

    `path` names the key in the JSON, as `models[0].gpucacheper`; "": the whole configuration.

    Example:
      >>> ConfigError("config: models: got [], wanted at least one model.", path="models").path
      'models'
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class UnknownModelError(ServingError):
    """A model that the configuration does not name."""

    @classmethod
    def of(cls, op: str, got: object, known: Iterable[str]) -> "UnknownModelError":
        return cls(f"{op}: model: got {got!r}, wanted one of {sorted(known)}.")


class UnknownTableError(ServingError):
    """A table that a model, or a folder of saved tables, does not have."""


class RequestError(ServingError):
    """Keys or inputs of the wrong type, shape or value."""


class RequestTooLargeError(RequestError):
    """More keys, samples or bytes than the configuration allows."""


class DatabaseError(ServingError):
    """A database that does not answer, or has rows of another form."""


class StreamFullError(ServingError):
    """A stream without room for another version, since servers have not read its versions."""


def require_table(op: str, table: Any, known: Collection[str], where: str = "") -> None:
    """Refuses a table that is not among the known ones; `where` says whose these are."""
    if not isinstance(table, str) or table not in known:
        got = table[:80] if isinstance(table, str) else table  # a client may send any name
        of_whom = f", the tables of {where}" if where else ""
        raise UnknownTableError(f"{op}: table: got {got!r}, wanted one of {sorted(known)}{of_whom}.")


def require_mapping(what: str, value: Any, wanted: str) -> None:
    """Refuses a request that is no mapping; `wanted` names its keys and values."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{what}: got {type(value).__name__}, wanted a mapping from {wanted}.")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns refusals of training's code into a RequestError."""
    try:
        yield
    except ServingError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error
