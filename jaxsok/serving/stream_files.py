"""A process that writes the files of versions: `python -P stream_files.py FOLDER` of `streams.Follower`.

Redis's client holds Python's lock while it copies a chunk. In the process that answers requests, lookups would wait
for it; here nothing does. This module imports no other one of jaxsok, so its process starts fast, and has no JAX.

Each line of its input is a version, in JSON: the URL of Redis, the key of its chunks, the names and sizes of its files,
and the folder for them. It answers with a line: the kind of what went wrong, and what was got, or two times null.
When its input ends, also because the server was killed, it removes FOLDER, in which all of these folders are.
"""

import json
import pathlib
import re
import shutil
import signal
import sys
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

TIMEOUT_S = 5.0  # for an answer of Redis
CAN_FAIL = redis.RedisError, RedisClusterException, OSError, ValueError  # ValueError: the URL's parameters
GONE, UNWRITTEN = "gone", "unwritten"  # kinds: Redis no longer has the files, or this host cannot write them
KEYS_AWAY = "AskError", "ClusterDownError", "MasterDownError", "MovedError", "TryAgainError"  # kinds, of a cluster
WANTED_KEYS = "a cluster whose servers run and have all keys; try again when none is missing or being moved"


def text_of(error: Exception) -> str:
    """Returns the text of an error, in which a pipeline has a command with its arguments: keys and rows."""
    return re.sub(r"(?s)^(Command # \d+) \(\w+ .*\) of", r"\1 of", str(error))


def is_of_tls(text: str) -> bool:
    """Returns whether an error is one of TLS, by its text, which is what the client hands on."""
    return "[SSL" in text


def with_nodes(url: str, nodes: Iterable[str]) -> str:
    """Returns a URL that also names these nodes of a cluster.

    Example:
      >>> with_nodes("redis://user:secret@a:1", ["b:2", "a:1"])
      'redis://user:secret@a:1,b:2'
    """
    return _at(url, dict.fromkeys([*_nodes_of(url), *nodes]))


def _nodes_of(url: str) -> list[str]:
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2].split(",")


def _at(url: str, nodes: Iterable[str]) -> str:
    """Returns a URL that names these nodes instead."""
    parts = urllib.parse.urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=user + at + ",".join(nodes)).geturl()


def connect(url: str) -> Any:
    """Connects to a Redis, or to a cluster by the first node that answers of those that the URL names."""
    nodes = _nodes_of(url)
    for node in nodes[:-1]:
        try:
            return _connect(_at(url, [node]))
        except (redis.ConnectionError, redis.TimeoutError, RedisClusterException, OSError):
            pass  # the next node may answer
    return _connect(url if len(nodes) == 1 else _at(url, nodes[-1:]))


def _connect(url: str) -> Any:
    options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    try:
        client = redis.Redis.from_url(url, **options)
        is_cluster = client.info("cluster")["cluster_enabled"]  # connects, by the URL's parameters
    except TypeError as error:
        raise ValueError(str(error)) from error
    if not is_cluster:
        return client
    client.close()
    # A command that had no answer is not sent again: it might be carried out twice.
    return redis.RedisCluster.from_url(url, retry=Retry(NoBackoff(), 0), **options)


def write_files(client: Any, payload: str, files: Sequence[tuple[str, int]], folder: pathlib.Path) -> str | None:
    """Writes the chunks of a version to files of these names and sizes; returns what was got in place of one."""
    number = 0
    for name, size in files:
        with (folder / name).open("wb") as file:
            while (rest := size - file.tell()) > 0:
                chunk = client.lindex(payload, number)
                if chunk is None or len(chunk) > rest:
                    return f'file "{name}": got {len(chunk or b"")} bytes, wanted the last {rest}'
                file.write(chunk)
                number += 1
    return None


def main() -> None:
    """Writes files as long as there are lines of input, then removes them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the process that answers requests, which ends this one
    client = None
    try:
        for line in sys.stdin:
            url, payload, files, folder = json.loads(line)
            try:
                client = client or connect(url)
                got = write_files(client, payload, files, pathlib.Path(folder))
                kind = got and GONE
            except OSError as error:
                kind, got = UNWRITTEN, str(error)
            except CAN_FAIL as error:
                kind, got = type(error).__name__, text_of(error)
            print(json.dumps([kind, got]), flush=True)
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
