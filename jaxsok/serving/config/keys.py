"""Kinds of values of a configuration, and the declaration of its keys as fields of a dataclass."""

import dataclasses
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxsok import checks
from jaxsok.checks import LARGEST_FLOAT32

WRONG = object()  # what `Kind.parse` gives for a value of another kind
SECRETS = ("password", "brokers")  # keys whose values are never shown: a URL may have a password
REQUIRED = object()  # the default of a key without one
HPS_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")  # of a model, and of a table in a database
URL_OF_REDIS = 'a URL, as "redis://10.0.0.1:6379", with a password as urllib.parse.quote(password, safe="") writes it'
_INT_MAX = 2**31 - 1  # of HPS's int, and of an XLA dimension


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a key may have."""

    wanted: str  # in words
    parse: Callable[[Any], Any]  # the value as a field has it; WRONG if it is none
    items: "Kind | None" = None  # of a list: what its entries may be
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # values that only HPS has, with what to do


def instance(kind: type, wanted: str) -> Kind:
    return Kind(wanted, lambda value: value if isinstance(value, kind) else WRONG)


def integer(least: int, most: int = _INT_MAX) -> Kind:
    wanted = f"an integer of {least} to {most}"
    return Kind(wanted, lambda value: int(value) if checks.is_integer(value, least, most) else WRONG)


def number(least: float = -math.inf, most: float = math.inf) -> Kind:
    within = {(True, True): "a number", (False, True): f"a number of {least:g} or more"}
    wanted = within.get((least == -math.inf, most == math.inf), f"a number of {least:g} to {most:g}")

    def parse(value: Any) -> Any:
        # Python's JSON makes integers of any size; a float holds them, or says that they are too large.
        try:
            parsed = float(value) if checks.is_number(value) else math.nan
        except OverflowError:
            return WRONG
        return parsed if math.isfinite(parsed) and least <= parsed <= most else WRONG

    return Kind(wanted, parse)


def among(names: Mapping[str, Sequence[str]] | Sequence[str], **refused: str) -> Kind:
    """Allows one of some names, but for `refused` ones; a mapping gives the other names of each, as HPS takes them."""
    meant = {name: name for name in names}
    if isinstance(names, Mapping):
        meant |= {other: name for name, others in names.items() for other in others}
    wanted = "one of " + ", ".join(f'"{name}"' for name in names if name not in refused)
    return Kind(wanted, lambda value: meant.get(value, WRONG) if isinstance(value, str) else WRONG, refused=refused)


def list_of(items: Kind, wanted: str) -> Kind:
    return Kind(wanted, lambda value: value if isinstance(value, list | tuple) else WRONG, items)


def _parse_path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return text if isinstance(text, str) else WRONG


def _parse_any(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    return WRONG if any(isinstance(item, list | tuple | Mapping) for item in items) else value


def is_url_of_redis(text: str) -> bool:
    """Returns whether a text is a URL of Redis; errors of other parsers may show a part of its password."""
    try:
        url = urllib.parse.urlsplit(text)
        nodes = url.netloc.rpartition("@")[2].split(",")
        can_connect = text.startswith(("redis://", "rediss://", "unix://")) and (len(nodes) == 1 or all(nodes))
        can_connect = can_connect and 0 not in [url._replace(netloc=node).port for node in nodes]
    except ValueError:
        return False
    return can_connect and "@" not in url.path + url.query + url.fragment  # else it cut a password


BOOL = instance(bool, "true or false")
TEXT = instance(str, "a string")
TEXTS = list_of(TEXT, "a list of strings")
SOME_TEXT = Kind("a string that is not empty", lambda value: value if isinstance(value, str) and value else WRONG)
NAME = Kind(
    "1 to 120 letters, digits, _ and -",
    lambda value: value if isinstance(value, str) and HPS_NAME.fullmatch(value) else WRONG,
)
BLOCK = instance(Mapping, "an object")
FILE = Kind("a path", lambda value: _parse_path(value) or WRONG)
OPTIONAL_FILE = Kind("a path", _parse_path)
POSITIVE, COUNT, SIZE, FRACTION = integer(1), integer(0), integer(0, 2**64 - 1), number(0.0, 1.0)
FLOAT32 = number(-LARGEST_FLOAT32, LARGEST_FLOAT32)
OPTIONAL_FLOAT32 = Kind(f"{FLOAT32.wanted}, or null", lambda value: None if value is None else FLOAT32.parse(value))
WHOLE_SECONDS = Kind(  # a fraction is cut off, as in HPS
    COUNT.wanted,
    lambda value: COUNT.parse(math.trunc(value) if isinstance(value, float) and math.isfinite(value) else value),
)
UNREAD = Kind("a number, a string, true, false, null, or a list of them", _parse_any)  # of a key that is not read
_DATABASES = {
    "disabled": ("disable", "none"),
    "hash_map": ("hashmap", "hash", "map"),
    "parallel_hash_map": ("parallel_hashmap", "parallel_hash", "parallel_map"),
    "multi_process_hash_map": ("multi_process_hashmap", "multi_process_hash", "multi_process_map"),
    "redis_cluster": ("redis",),
    "rocks_db": ("rocksdb", "rocks"),
}
VOLATILE_TYPE = among(
    _DATABASES,
    multi_process_hash_map="memory shared by processes is not there: take redis_cluster, or serve from one",
    rocks_db="RocksDB is no volatile database: take it as the type of persistent_db",
)
_NOT_PERSISTENT = "it is no persistent database: leave the block out, or take the type for volatile_db"
PERSISTENT_TYPE = among(
    _DATABASES, **{name: _NOT_PERSISTENT for name in _DATABASES if name not in ("disabled", "rocks_db")}
)
OVERFLOW_POLICY = among({"evict_random": ["random"], "evict_least_used": ["least_used"], "evict_oldest": ["oldest"]})
_STREAM = among({"redis_stream": (), "kafka_message_queue": ("kafka_mq", "kafka")})
_NO_KAFKA = "Kafka is not there: take redis_stream, or leave the block out, and bring updates by Session.update or by "
UPDATE_TYPE = Kind(
    'null or "redis_stream"',
    lambda value: None if isinstance(value, str | None) and value in (None, "null", "none") else _STREAM.parse(value),
    refused={"kafka_message_queue": f"{_NO_KAFKA}`python -m jaxsok serve --watch`"},
)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a block."""

    kind: Kind
    default: Any = None
    reason: str = ""  # why it has no effect; "": it is honoured, or looked at apart


Keys: TypeAlias = Mapping[str, "Key | Keys"]
"""The keys of a block by name, and the keys of the blocks below it."""


def without_effect(reason: str, kind: Kind, *names: str) -> dict[str, Key]:
    """Gives keys that are checked and then set nothing, all for one reason."""
    return dict.fromkeys(names, Key(kind, reason=reason))


def declare(kind: Kind, default: Any = REQUIRED, *, block: str = "", repr: bool = True) -> Any:
    """Declares a field of a dataclass as a key of the same name, in a block of the JSON below that of the dataclass."""
    metadata = {"key": Key(kind, default), "block": block}
    return dataclasses.field(
        default=dataclasses.MISSING if default is REQUIRED else default, repr=repr, metadata=metadata
    )


def column(name: str, kind: Kind, entries: str, default: Any = REQUIRED) -> Any:
    """Declares a field of a table as an entry of one of HPS's lists."""
    values = list_of(kind, f"a list of {entries}, one for each table")
    return dataclasses.field(metadata={"key": Key(values, default), "block": "", "name": name})


def keys_of(kind: type) -> Keys:
    """Gives the keys of a block, and those of the blocks below it, as the fields of a dataclass declare them."""
    blocks: dict[str, Any] = {"": {}}
    for field in dataclasses.fields(kind):
        if "key" in field.metadata:
            keys = blocks.setdefault(field.metadata["block"], {})
            keys[field.metadata.get("name", field.name)] = field.metadata["key"]
    return {**blocks.pop(""), **blocks}
