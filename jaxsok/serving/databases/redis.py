"""Redis as HPS lays rows out in it: each table in `num_partitions` hashes of rows, with hashes of their uses.

Partition p of a table is the hash `hps_et{<table>/p<p>}v`. With an overflow policy that looks at uses,
`hps_et{<table>/p<p>}t` has of each key a decimal count (evict_least_used) or 8 bytes of Unix time (evict_oldest). The
braces put both on one node.
"""

import contextlib
import functools
import logging
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from jaxsok import checks
from jaxsok.serving.config import VolatileDb
from jaxsok.serving.databases.rows import CircuitBreaker, Database, bytes_of
from jaxsok.serving.errors import DatabaseError, ServingError
from jaxsok.serving.padding import slices
from jaxsok.serving.stream_files import KEYS_AWAY, WANTED_KEYS, is_of_tls, text_of

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException
    from redis.retry import Retry
except ImportError as error:
    wanted = "for a configuration or a Publisher that names Redis; pip install 'jaxsok[databases]'"
    raise checks.import_error("redis", error, wanted) from error

_log = logging.getLogger(__name__)

# One command for all keys: after a time-out, the client asks a cluster for each command of a pipeline by itself.
_COUNT_USES = "for _, key in ipairs(ARGV) do redis.call('HINCRBY', KEYS[1], key, 1) end"


@final
class RedisDatabase(Database):
    """A Redis cluster, or one server, as `volatile_db` of a configuration declares it.

    `num_node_connections` calls run at the same time, each to all nodes at once; others wait. The next call restores a
    lost connection. A node that hangs fails a call after a few times `timeout_s`; for a second all reads
    then fail at once.

    Source: HPS of HugeCTR 24.06, `HugeCTR/src/hps/redis_backend.cpp`. Other than there, evict_random evicts (HPS looks
    for the keys where it does not put them), and no more rows leave than the target says.
    """

    def __init__(self, config: VolatileDb) -> None:
        super().__init__(config.max_batch_size)
        self._config = config
        self._places = threading.BoundedSemaphore(config.num_node_connections)
        self._hung_at = 0.0  # when a call has waited in vain last
        self._breaker = CircuitBreaker(lambda error: _is_late(error.__cause__))  # of reads
        self._writing, self._is_unsettled = threading.Lock(), False  # the second is written under the first
        self._name = f"jaxsok-{uuid.uuid4()}"
        options: dict[str, Any] = {"socket_timeout": config.timeout_s, "socket_connect_timeout": config.timeout_s}
        if config.password:  # else HPS sends no name either
            options |= {"username": config.user_name, "password": config.password}
        if config.enable_tls:
            for key in ("tls_ca_certificate", "tls_client_certificate", "tls_client_key"):
                if (path := getattr(config, key)) and not os.path.exists(path):
                    none = "" if key == "tls_ca_certificate" else ', or "" where the server asks for none'
                    raise ServingError(
                        f'volatile_db: {key}: got "{path}", wanted the path of a file that exists{none}.'
                    )
            ca = "ssl_ca_path" if os.path.isdir(config.tls_ca_certificate) else "ssl_ca_certs"
            options |= {"ssl": True, ca: config.tls_ca_certificate, "ssl_check_hostname": False}  # nor does HPS
            options |= {"ssl_certfile": config.tls_client_certificate, "ssl_keyfile": config.tls_client_key}
        nodes = [_node(text) for text in re.split("[,;]", config.address)]
        self._client: Any = self._call(lambda: _connect(nodes, self._name, options))

    def read(self, name: str, keys: np.ndarray) -> list[bytes | None]:
        parts = list(self._parts(name, keys))
        with self._breaker.unless_open() as is_asked:
            if not is_asked:
                raise self._failure(TimeoutError("calls before this one had no answer"))
            replies = self._run([("HMGET", f"{part}v", *fields) for part, _, fields in parts])
        values, uses = np.full(len(keys), None, object), []
        for (part, where, fields), found in zip(parts, replies, strict=True):
            values[where] = np.array(found, object)
            uses += self._uses(part, [field for field, value in zip(fields, found, strict=True) if value is not None])
        if uses:
            self.background.offer(None, functools.partial(self._note, uses))
        return values.tolist()

    def _note(self, uses: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._run(uses)
        except DatabaseError as error:
            _log.warning("RedisDatabase: uses of keys were not noted, which may be evicted early: %s", error)

    def _uses(self, part: str, fields: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Makes the commands that note one use of each key, now."""
        if self._config.overflow_policy == "evict_least_used":
            return [("EVAL", _COUNT_USES, 1, f"{part}t", *fields)] if fields else []
        if self._config.overflow_policy == "evict_oldest" and fields:
            return [_set(f"{part}t", fields, [int(time.time()).to_bytes(8, "little")] * len(fields))]
        return []

    def write(self, name: str, keys: np.ndarray, values: Sequence[bytes]) -> None:
        commands, parts = [], []
        for part, where, fields in self._parts(name, keys):
            parts.append(part)
            commands += [*self._uses(part, fields), _set(f"{part}v", fields, [values[place] for place in where])]
        self._change(commands)
        if self._config.overflow_margin < 2**64 - 1:
            sizes = self._run([("HLEN", f"{part}v") for part in parts])
            for part, size in zip(parts, sizes, strict=True):
                if size > self._config.overflow_margin:
                    self._evict(part)

    def _evict(self, part: str) -> None:
        policy, noted_keys = self._config.overflow_policy, list[bytes]()
        if policy != "evict_random":
            (noted_keys,) = self._run([("HKEYS", f"{part}t")])
        target = int(self._config.overflow_margin * self._config.overflow_resolution_target + 0.5)
        (fields,) = self._run([("HKEYS", f"{part}v")])
        random.shuffle(fields)
        if policy != "evict_random":
            noted = [use or b"" for some in self._cut(fields) for use in self._run([("HMGET", f"{part}t", *some)])[0]]
            is_count = policy == "evict_least_used"
            uses = [int(use.isdigit() and use) if is_count else int.from_bytes(use[:8], "little") for use in noted]
            order = np.argsort(uses, kind="stable")
            fields = [fields[place] for place in order]
            if is_count and 0 < target < len(fields):  # so that old uses count less, as in HPS
                half = uses[order[-target]] // 2
                self._run([_set(f"{part}t", some, [half] * len(some)) for some in self._cut(fields[-target:])])
        for some in self._cut(fields[: max(0, len(fields) - target)]):
            self._change([("HDEL", f"{part}t", *some), ("HDEL", f"{part}v", *some)])
        for some in self._cut(list(set(noted_keys).difference(fields))):  # uses that were noted after a row had left
            self._run([("HDEL", f"{part}t", *some)])

    def erase(self, name: str, keys: np.ndarray) -> None:
        parts = self._parts(name, keys)
        self._change([("HDEL", f"{part}{kind}", *fields) for part, _, fields in parts for kind in "vt"])

    def count(self, name: str) -> int:
        return sum(self._run([("HLEN", f"{part}v") for part in self._names(name)]))

    def keys(self, name: str) -> Iterator[Sequence[bytes]]:
        return (self._run([("HKEYS", f"{part}v")])[0] for part in self._names(name))

    def close(self, until: float | None = None) -> bool:
        has_ended = super().close(until)
        self._client.close()
        return has_ended

    def _names(self, name: str) -> list[str]:
        return [f"hps_et{{{name}/p{part}}}" for part in range(self._config.num_partitions)]

    def _parts(self, name: str, keys: np.ndarray) -> Iterator[tuple[str, np.ndarray, list[bytes]]]:
        """Groups keys by partition: its name, the places of its keys, and these as bytes."""
        parts, fields, names = partition_of(keys, self._config.num_partitions), bytes_of(keys), self._names(name)
        for part in np.unique(parts):
            where = np.flatnonzero(parts == part)
            yield names[part], where, [fields[place] for place in where]

    def _cut(self, fields: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        return (fields[part] for part in slices(len(fields), self.max_batch_size))

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return self._call(pipeline.execute) if commands else []

    def _change(self, commands: Sequence[tuple[Any, ...]]) -> None:
        """Runs commands that write, after what was sent before them, even if that had no answer."""
        with self._writing:
            if self._is_unsettled:
                self._call(self._end_connections)
                self._is_unsettled = False
            try:
                self._run(commands)
            except BaseException as error:
                # A plain refusal is an answer; in a cluster, another server may have given none.
                is_refusal = isinstance(error.__cause__, redis.ResponseError)
                if not is_refusal or isinstance(self._client, redis.RedisCluster):
                    self._is_unsettled = True
                raise
        self._breaker.reset()  # it answers again, and who writes rows may read them next

    def _end_connections(self) -> None:
        """Ends all connections of this object: a server that hung could still carry out what they had sent.

        What it has read of them is done when it answers this, and the rest is dropped.
        """
        client, servers = self._client, [self._client]
        if isinstance(client, redis.RedisCluster):
            client.nodes_manager.initialize()  # a replica may have taken over from one that is gone
            servers = [client.get_redis_connection(node) for node in client.get_primaries()]
        for server in servers:
            try:
                own = [each["id"] for each in server.client_list() if each["name"] == self._name]
                for number in own:
                    server.client_kill_filter(_id=number, skipme=True)
            except redis.ResponseError as error:
                wanted = "wanted it to end connections; allow CLIENT SETNAME, LIST and KILL"
                _log.warning("RedisDatabase: what had no answer may be carried out later: got %s, %s.", error, wanted)

    def _call(self, run: Callable[[], Any]) -> Any:
        """Runs a call as soon as there is a connection for it; time-outs hold for that, too."""
        began = time.monotonic()
        has_place = self._places.acquire(timeout=self._config.timeout_s)
        try:
            # It has waited for calls that had no answer, and would wait as long again.
            if began < self._hung_at or not has_place:
                late = TimeoutError("calls before this one had no answer")
                raise self._failure(late) from late
            try:
                return run()
            except (redis.RedisError, RedisClusterException, OSError) as error:
                if _is_late(error):
                    self._hung_at = time.monotonic()
                raise self._failure(error) from error
        finally:
            if has_place:
                self._places.release()

    def _failure(self, error: Exception) -> DatabaseError:
        wanted = f"answers in {self._config.timeout_s:g} s; see that its servers run, then try again"
        if type(error).__name__ in KEYS_AWAY:
            wanted = WANTED_KEYS
        elif isinstance(error, redis.ResponseError | redis.AuthenticationError):
            wanted = "it to do what it was asked; see what it says, and the keys of volatile_db"
        elif is_of_tls(str(error)):
            wanted = "TLS on both sides, and certificates that both accept: see the tls_... keys of volatile_db"
        return DatabaseError(
            f'volatile_db: address: got {type(error).__name__} of Redis at "{self._config.address}" '
            f"({text_of(error)}), wanted {wanted}."
        )


def partition_of(keys: np.ndarray, num_partitions: int) -> np.ndarray:
    """Computes the partition of each key: HPS's hash, rrxmrrxmsx_0 of Pelle Evensen, modulo their number.

    Example:
      >>> partition_of(np.arange(6, dtype=np.uint64), 8).tolist()
      [0, 3, 6, 0, 5, 5]
    """
    mixed = keys.astype(np.uint64)
    for first, second, factor in ((25, 50, 0xA24BAED4963EE407), (24, 49, 0x9FB21C651E98DF25)):
        rotated = [mixed >> np.uint64(bits) | mixed << np.uint64(64 - bits) for bits in (first, second)]
        mixed = (mixed ^ rotated[0] ^ rotated[1]) * np.uint64(factor)
    return ((mixed ^ mixed >> np.uint64(28)) % np.uint64(num_partitions)).astype(np.int64)


def _is_late(error: BaseException | None) -> bool:
    """Returns whether Redis did not answer in time, or no node of a cluster did, of which the client then tells."""
    late = redis.TimeoutError, TimeoutError
    return isinstance(error, late) or (isinstance(error, RedisClusterException) and isinstance(error.__cause__, late))


def _set(name: str, fields: Sequence[bytes], values: Sequence[Any]) -> tuple[Any, ...]:
    return "HSET", name, *(word for pair in zip(fields, values, strict=True) for word in pair)


def _node(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*(?:\[([^\]]+)\]|([^:\s]+))(?::(\d{1,5}))?\s*", text)
    if found is None:
        raise ServingError(f'volatile_db: address: got "{text}", wanted "host:port"; several with commas between them.')
    return found[1] or found[2], int(found[3] or 6379)


def _connect(nodes: Sequence[tuple[str, int]], name: str, options: dict[str, Any]) -> Any:
    """Connects to the first node that answers, and to its cluster, if it is in one; the server knows the name."""

    def give_name(connection: Any) -> None:
        connection.send_command("CLIENT", "SETNAME", name)
        with contextlib.suppress(redis.ResponseError):  # a user who may not; see `_end_connections`
            connection.read_response()

    def greet(connection: Any) -> None:
        connection.on_connect()
        give_name(connection)

    for number, (host, port) in enumerate(nodes, 1):
        try:
            # A connection that was lost is made again; a server that does not answer is not asked twice.
            retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
            server = redis.Redis(host, port, retry=retry, redis_connect_func=greet, **options)
            if not server.info("cluster")["cluster_enabled"]:
                return server
            server.close()
            retry = Retry(NoBackoff(), 0)
            return redis.RedisCluster(host=host, port=port, retry=retry, redis_connect_func=give_name, **options)
        except (redis.ConnectionError, redis.TimeoutError, RedisClusterException):
            if number == len(nodes):
                raise
