"""Versions of tables through Redis: training publishes exports and deltas, and each server follows at its own position.

The model `dlrm` has the stream `jaxsok:{dlrm}`, with one entry for each version: its uuid, its base, its tables, and
the names and sizes of the files of its folder. Their bytes are a list of chunks, `jaxsok:{dlrm}:<token>`. The entry is
added after all chunks, so what a publisher that died has left is never read, and expires. Each server has a consumer
group, whose last delivered entry is the last version that its tables hold. The braces keep all of it on one node of a
cluster.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import multiprocessing.spawn
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxsok import checks
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.saved import Source
from jaxsok.manifests import check_value, entries, integer, list_of, optional, text, tuple_of
from jaxsok.serving import stream_files
from jaxsok.serving.config import UpdateSource
from jaxsok.serving.config.keys import URL_OF_REDIS, is_url_of_redis
from jaxsok.serving.databases.redis import redis
from jaxsok.serving.errors import DatabaseError, ServingError, StreamFullError
from jaxsok.serving.ready import Repeated
from jaxsok.serving.stream_files import (
    CAN_FAIL,
    GONE,
    KEYS_AWAY,
    TIMEOUT_S,
    UNWRITTEN,
    WANTED_KEYS,
    connect,
    text_of,
    with_nodes,
)

__all__ = ["Publisher"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Redis answers others between two chunks.
CHUNK_BYTES = 256 << 10
UNFINISHED_S = 600  # for which Redis keeps chunks without an entry
BATCH_BYTES = 2 * 2**30  # versions up to this many bytes are applied as one version
WAIT_S = 0.5  # for the next version; `stop` waits as long
WAIT_AHEAD_S = 0.05  # the same while versions are applied, whose end waits as long
RETRY_S = 1.0  # after a failure
_REFUSALS = "NoPermissionError", "ReadOnlyError", "ResponseError"  # kinds of answers that stay the same
_UNREACHED = redis.ConnectionError, redis.TimeoutError, OSError
# Adds a version and removes old ones, if the last version is the one of this id. KEYS: the stream, the chunks of the
# new version, those of the old ones. ARGV: the id or nothing, the entry, the ids of the old ones.
_ADD = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if (last and last[1] or '') ~= ARGV[1] then return 0 end
redis.call('PERSIST', KEYS[2])
redis.call('XADD', KEYS[1], '*', 'version', ARGV[2])
for i = 3, #KEYS do
  redis.call('XDEL', KEYS[1], ARGV[i])
  redis.call('UNLINK', KEYS[i])
end
return 1
"""

_UUID = text(r"[0-9a-f]{32}", "the uuid of an export")
_FILE = tuple_of(text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", "the name of a file"), integer(0, 2**62))
_ENTRY = entries(
    {
        "uuid": _UUID,
        "base": optional(_UUID),
        "payload": text(r"[0-9a-f]{16}", "16 hexadecimal digits"),
        "path": optional(text(r"/.*", "the path of a folder")),
        "files": list_of(_FILE),
        "tables": list_of(text(".+", "the name of a table")),
    }
)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A version in a stream."""

    id: str  # milliseconds of Redis' clock, and a number
    uuid: str
    base: str | None  # the uuid of the version before it; None: a full export
    payload: str  # the key of its chunks
    path: str | None  # where servers find the folder; None: its files are the payload
    files: Sequence[tuple[str, int]]  # names and sizes
    tables: Sequence[str]  # which it changes

    @property
    def order(self) -> tuple[int, ...]:
        return _order(self.id)

    def find_changed(self, names: Collection[str]) -> list[str]:
        """Finds the tables of a model that it changes; all if it has none of them, so that it is refused."""
        return [name for name in names if name in self.tables] or list(names)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.order[0] / 1000)


class _Stream:
    """The stream of one model. DatabaseError: Redis does not answer."""

    def __init__(self, op: str, url: str, model: str) -> None:
        if not is_url_of_redis(url):
            raise ServingError(f"{op}: url: got something else (not shown), wanted {URL_OF_REDIS}.")
        self._op, self.url, self.name = op, url, f"jaxsok:{{{model}}}"
        self.what = f'{op}: stream "{self.name}": '  # how errors begin

    @functools.cached_property
    def _client(self) -> Any:
        client = connect(self.url)
        weakref.finalize(self, client.close).atexit = False  # where `close` is not called, before sockets are collected
        return client

    def url_now(self) -> str:
        """Returns a URL that also names the nodes a cluster has by now: the one that was named may have gone."""
        client = vars(self).get("_client")
        if not isinstance(client, redis.RedisCluster):
            return self.url
        name = lambda node: f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"  # noqa: E731
        return with_nodes(self.url, map(name, client.get_nodes()))

    def call(self, run: Callable[[Any], T]) -> T:
        client = None
        try:
            client = self._client
            return run(client)
        except CAN_FAIL as error:
            if isinstance(client, redis.RedisCluster) and isinstance(error, _UNREACHED):
                with contextlib.suppress(*CAN_FAIL):  # a replica may have taken over from a node that is gone
                    client.nodes_manager.initialize()
            raise self.failure(type(error).__name__, text_of(error)) from error

    def failure(self, kind: str, text: str) -> DatabaseError:
        """Makes the error of a call that failed with an exception of this kind and text."""
        host = urllib.parse.urlsplit(self.url)._replace(query="").geturl().rpartition("@")[2]
        wanted = f"an answer in {TIMEOUT_S:g} s; see that it runs and has memory, then try again"
        if kind in KEYS_AWAY:
            wanted = WANTED_KEYS
        elif kind == "AuthenticationError":
            wanted = "the user and password of its URL to be right"
        elif kind == "ValueError":
            wanted = "parameters in its URL that redis.Redis.from_url takes"
        elif kind in _REFUSALS:
            wanted = "it to do what it was asked; see what it says"
        elif stream_files.is_of_tls(text):
            wanted = "TLS on both sides, and certificates that both accept (rediss://host:port?ssl_ca_certs=/path)"
        return DatabaseError(f'{self.what}got {kind} of Redis at "{host}" ({text}), wanted {wanted}.')

    def entries(self, after: str = "0-0", wait_s: float = 0.0) -> list[_Entry]:
        """Reads the versions behind an entry; waits for one if there is none."""
        if wait_s:
            self.call(lambda client: self._wait(client, after, wait_s))
        return [self._entry(*found) for found in self.call(lambda client: client.xrange(self.name, f"({after}"))]

    def _wait(self, client: Any, after: str, wait_s: float) -> None:
        """Waits for an entry; of a cluster at its own node: to find that, the client would ask any, also a dead one."""
        command = "XREAD", "COUNT", 1, "BLOCK", int(wait_s * 1000), "STREAMS", self.name, after
        is_cluster = isinstance(client, redis.RedisCluster)
        client.execute_command(*command, **{"target_nodes": client.get_node_from_key(self.name)} if is_cluster else {})

    def _entry(self, name: bytes, fields: Mapping[bytes, bytes]) -> _Entry:
        number, value = name.decode(), {}
        with contextlib.suppress(ValueError, RecursionError):  # `check_value` refuses what is missing
            value = json.loads(fields.get(b"version", b"{}"))
        check_value(self._op, f"{self.name}, entry {number}", value, _ENTRY, ServingError)
        payload = f"{self.name}:{value['payload']}"
        return _Entry(number, value["uuid"], value["base"], payload, value["path"], value["files"], value["tables"])

    def last_id(self) -> str:
        """Reads the id of the last version that was ever added."""
        there = self.call(lambda client: client.xinfo_stream(self.name) if client.exists(self.name) else {})
        return _to_text(there.get("last-generated-id", "0-0"))

    def positions(self) -> dict[str, str]:
        """Reads the last version of each server, by its name."""
        groups = self.call(lambda client: client.xinfo_groups(self.name) if client.exists(self.name) else [])
        return {_to_text(group["name"]): _to_text(group["last-delivered-id"]) for group in groups}

    def note(self, consumer: str, position: str) -> None:
        """Sets the position of a server, which a Redis that has lost its memory does not know."""

        def run(client: Any) -> None:
            try:
                client.xgroup_setid(self.name, consumer, position)
            except redis.ResponseError:
                client.xgroup_create(self.name, consumer, position, mkstream=True)

        self.call(run)

    def close(self) -> None:
        if "_client" in vars(self):
            self._client.close()


class Publisher:
    """Publishes the exports and deltas of one model to the servers that follow its stream.

    One publisher at a time publishes a model; of a job with several processes, the first. Where several publish a
    version at once, it is added once. `url` is that of Redis, as `redis://host:6379`, `rediss://` with TLS; of a
    cluster, some of its nodes, as `redis://host:6379,other:6379`. The stream has versions of at most `max_bytes`, while
    one is published also that one: give Redis memory for twice as much, and no eviction.

    Example:
      >>> Publisher("redis://10.0.0.1:6379", "dlrm", max_bytes=8 << 30).name  # connects when it publishes
      'jaxsok:{dlrm}'
    """

    def __init__(self, url: str, model: str, *, max_bytes: int = 4 << 30, timeout_s: float = 60.0) -> None:
        if not checks.is_integer(max_bytes, 1):
            raise ServingError(f"Publisher: max_bytes: got {max_bytes!r}, wanted a number of bytes above 0.")
        self._stream, self._max_bytes, self._timeout_s = _Stream("publish", url, model), max_bytes, timeout_s
        self.name = self._stream.name  # the key of the stream

    def publish(self, folder: str | os.PathLike[str], *, by_path: bool = False) -> None:
        """Adds a version: a folder that `export_full` or `export_delta` wrote.

        With `by_path` only its path goes through Redis, for servers that find the folder there: for full exports.
        Before anything is sent, the sizes of such a folder's files are checked, or all bytes where these are sent.

        Servers see all of it or nothing. The last version of the stream is not added again: an answer of Redis that was
        lost may have been a success. The first versions go if later full exports have all of their tables, and where
        there is no room, the oldest ones that all servers have read. If these are too few, it waits for servers,
        `timeout_s` at most.

        Raises:
          ServingError: a delta that does not rest on the last version of the stream, or a version that is before it.
          StreamFullError: servers are too far behind; it names the last one.
          DatabaseError: Redis does not answer, or has no memory.
          CorruptFileError, FileNotFoundError: the folder.

        Cost:
          Reads all files of the folder against their checksums, then sends them; holds a batch of rows, or CHUNK_BYTES.
        """
        path, stream = pathlib.Path(folder), self._stream
        source = Source.of("publish", path)
        manifest = source.manifest
        source.check(list(manifest["tables"]))
        files = [file for table in manifest["tables"].values() for kind in manifest_lib.KINDS for file in table[kind]]
        names = [*(file["name"] for file in (*files, *manifest[manifest_lib.BLOOM])), manifest_lib.NAME]
        sizes = [] if by_path else [(name, (path / name).stat().st_size) for name in names]
        base = manifest["base"] if manifest["kind"] == "delta" else None
        make_room = functools.partial(self._make_room, path, manifest["uuid"], base, sum(size for _, size in sizes))
        if make_room() is None:
            return
        if not by_path:  # servers would refuse it, and no repaired one could take its place
            source.verify(list(manifest["tables"]))
        token, num_chunks = secrets.token_hex(8), sum(-(-size // CHUNK_BYTES) for _, size in sizes)
        payload = f"{stream.name}:{token}"
        entry = {"uuid": manifest["uuid"], "base": base, "payload": token, "files": sizes}
        entry |= {"path": str(path.absolute()) if by_path else None, "tables": list(manifest["tables"])}
        may_be_there = False  # whether it was added, or an answer that says so was lost
        try:
            for chunk in _chunks(path, [name for name, _ in sizes]):
                stream.call(functools.partial(_push, payload, chunk))
            # There is none where another publisher has added the version meanwhile.
            while (room := make_room(is_sent=True)) is not None:
                last, leaving = room
                if stream.call(lambda client: client.llen(payload)) != num_chunks:
                    raise ServingError(
                        f'publish: folder: got "{path}", whose chunks Redis has dropped meanwhile, wanted all '
                        f"{num_chunks}; give Redis memory and the policy noeviction, then publish it again."
                    )
                keys = stream.name, payload, *(old.payload for old in leaving)
                values = last, json.dumps(entry), *(old.id for old in leaving)
                may_be_there = True
                if stream.call(lambda client, keys=keys, values=values: client.eval(_ADD, len(keys), *keys, *values)):
                    return
                may_be_there = False
        finally:
            if not may_be_there:
                self._forget(payload)

    def _forget(self, payload: str) -> None:
        """Drops the chunks of a version that was not added: they would take the room of later ones."""
        with contextlib.suppress(DatabaseError):
            self._stream.call(lambda client: client.unlink(payload))

    def _make_room(
        self, path: pathlib.Path, uuid: str, base: str | None, num_bytes: int, *, is_sent: bool = False
    ) -> tuple[str, list[_Entry]] | None:
        """Waits until a version has room; returns the id of the last version and those that leave for the new one.

        None: it is the last one there; if its chunks are sent, another publisher may have added later ones, too.
        """
        if num_bytes > self._max_bytes:
            raise StreamFullError(
                f'publish: folder: got "{path}" of {num_bytes} bytes, wanted at most max_bytes, {self._max_bytes}; '
                "take more, or publish by_path."
            )
        until = time.monotonic() + self._timeout_s
        while True:
            there, positions = self._stream.entries(), self._stream.positions()
            if uuid in [entry.uuid for entry in (there if is_sent else there[-1:])]:
                return None
            if uuid in [entry.uuid for entry in there]:
                raise ServingError(f'publish: folder: got "{path}", which was published, wanted the next version.')
            if base and there and there[-1].uuid != base:
                raise ServingError(
                    f'publish: folder: got the delta "{path}", which rests on {base}, wanted one on {there[-1].uuid}, '
                    f'the last version in "{self.name}"; publish deltas in order, or a full export.'
                )
            read = min(map(_order, positions.values()), default=there[-1].order if there else ())
            full = _find_start(there)
            excess = sum(entry.num_bytes for entry in there) + num_bytes - self._max_bytes
            leaving = []
            for number, entry in enumerate(there):
                if number >= full and (excess <= 0 or entry.order > read):
                    break
                leaving.append(entry)
                excess -= entry.num_bytes
            if excess <= 0:
                return there[-1].id if there else "", leaving
            if time.monotonic() >= until:
                slow = min(positions, key=lambda name: _order(positions[name]), default="")
                raise StreamFullError(
                    f'publish: folder: got "{path}" of {num_bytes} bytes, wanted {excess} fewer, to have at most '
                    f'{self._max_bytes} in "{self.name}" with what servers have not read; the last one is "{slow}", at '
                    f"{positions.get(slow, 'no position')}. Wait for it, take larger max_bytes, publish a full export, "
                    f'or, if it is gone for good: XGROUP DESTROY {self.name} "{slow}".'
                )
            time.sleep(0.1)

    def close(self) -> None:
        """Disconnects."""
        self._stream.close()


class _Gone(ServingError):
    """Redis no longer has the files of a version."""


class _Fetcher:
    """Writes the files of versions, in a process that starts with the first one, and again after it has ended."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._process: subprocess.Popen[str] | None = None
        self.folder: pathlib.Path | None = None  # of all files; made with the process, which removes it

    def write_files(self, entry: _Entry) -> pathlib.Path:
        """Writes the files of a version into a new folder, and returns it; one call at a time.

        _Gone: they were trimmed. DatabaseError: Redis does not answer. ServingError: the folder cannot take them.
        """
        self.folder = self.folder or pathlib.Path(tempfile.mkdtemp(prefix="jaxsok-stream-"))
        process = self._process = self._process or self._start(self.folder)
        path = self.folder / entry.uuid
        try:
            path.mkdir(parents=True)  # a system may remove old temporary folders
            kind, got = self._ask(process, entry.payload, entry.files, str(path))
            if kind == GONE:
                raise _Gone(f"follow: version {entry.uuid}: {got}; it was trimmed meanwhile, or Redis has lost it.")
            if kind == UNWRITTEN:
                what = f'its {entry.num_bytes} bytes written to "{path}"; make room there, or set TMPDIR'
                raise ServingError(f"follow: version {entry.uuid}: files: got {got}, wanted {what}.")
            if kind is not None:
                raise self._stream.failure(kind, got)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    def _ask(self, process: subprocess.Popen[str], *version: Any) -> tuple[str | None, str]:
        """Sends a version to the process; returns its answer: the kind of what went wrong, and what was got."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # the process has ended
            print(json.dumps([self._stream.url_now(), *version]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if answer.endswith("\n"):
            return json.loads(answer)
        self._end()
        return "no answer", f"the process that reads from it has ended with {process.returncode}; its output says why"

    def _start(self, folder: pathlib.Path) -> subprocess.Popen[str]:
        command = [multiprocessing.spawn.get_executable(), "-P", stream_files.__file__, str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it finds what this process finds
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def close(self) -> None:
        """Ends the process, and removes all files."""
        self._end()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _find_start(entries: Sequence[_Entry], names: Collection[str] = ()) -> int:
    """Finds the first version that is needed: it changes tables that no later full export has.

    With `names` those of a model count alone.
    """
    start, replaced = 0, set[str]()
    for number, entry in reversed(list(enumerate(entries))):
        own = set(entry.find_changed(names) if names else entry.tables)
        if not own <= replaced:
            start = number
        if not entry.base:
            replaced |= own
    return start


def _find_next(pending: Sequence[_Entry], held: Mapping[str, str | None]) -> tuple[int, Sequence[str], bool]:
    """Finds the next version that tables lack, by the versions that they hold, which may differ.

    Returns its place among `pending`, whose number if there is none; these tables; and whether other tables hold it or
    a later one. Then those that lack it catch up, one version at a time.
    """
    counts = {entry.uuid: number for number, entry in enumerate(pending, 1)}
    done = {name: counts.get(uuid, 0) for name, uuid in held.items()}
    lacking = [[name for name in entry.find_changed(held) if done[name] <= n] for n, entry in enumerate(pending)]
    first = max(_find_start(pending, held), next((n for n, names in enumerate(lacking) if names), len(pending)))
    return first, lacking[first] if first < len(pending) else (), max(done.values()) > first


class Follower(Repeated):
    """Brings one model of a server to each new version of its stream, in a thread of its own that `start` starts.

    It goes on from what the tables hold, so a server that was opened again replays what it lacks. A process writes the
    files of versions (`_Fetcher`); while some are applied, another thread has it write those of the next ones.
    """

    def __init__(self, source: UpdateSource, model: str, served: Any) -> None:
        """Takes the model of a session (`model.served.Served`)."""
        super().__init__("jaxsok-follow", self._follow)
        self._stream, self._consumer, self._served = _Stream("follow", source.brokers, model), source.consumer, served
        # All of these are set by `look` alone; `stats` reads them.
        self._position = "0-0"  # the last version that the tables hold
        self._pending: list[_Entry] = []  # those after it
        self._error, self._delay_s, self._is_careful = "", 0.0, False
        self._unnoted = ""  # why Redis did not take the position
        self._fetcher = _Fetcher(self._stream)
        # The files of versions that are to be applied, by uuid; `look` waits until no other thread adds some.
        self._fetched: dict[str, pathlib.Path] = {}

    def start(self) -> None:
        """Applies what is there, then starts the thread; after a failure the tables are served as they are."""
        while self._try(0.0):
            pass
        super().start()

    def close(self, until: float | None = None) -> bool:
        has_ended = super().close(until)
        if has_ended:
            self._stream.close()
            self._fetcher.close()
        return has_ended

    def stats(self) -> dict[str, Any]:
        """Counts the versions that the tables lack; ages are by the clocks of Redis and of this host."""
        pending = self._pending
        return {
            "lag_versions": len(pending),
            "lag_s": pending[0].age_s if pending else 0.0,
            "delay_s": self._delay_s,
            "is_following": not (self._error or self._unnoted),
        }

    def _follow(self) -> float:
        return RETRY_S if self._try(WAIT_S) is None else 0.0

    def _try(self, wait_s: float) -> int | None:
        try:
            num_applied, number = self.look(wait_s), self._served.versions.current.number
            if num_applied or self._error:
                _log.info('follow: stream "%s": goes on; version %d is served', self._stream.name, number)
            self._error = ""
            return num_applied
        except Exception as error:
            if str(error) != self._error and not self.is_stopping():  # logged once, not each second
                _log.error('follow: stream "%s": %s', self._stream.name, str(error).removeprefix(self._stream.what))
            self._error = str(error)
            return None

    def look(self, wait_s: float = 0.0) -> int:
        """Applies versions that the tables lack, as one version; returns how many they were.

        ServingError: the next one is not there any more, or an update was refused. DatabaseError: Redis.
        """
        last = self._pending[-1].id if self._pending else self._position
        pending = [*self._pending, *self._stream.entries(last, 0.0 if self._pending else wait_s)]
        if not pending and _order(self._stream.last_id()) < _order(last):
            # Another Redis, whose clock is behind, or an older copy: what it has may be new.
            self._position, pending = "0-0", self._stream.entries()
        held = self._served.versions.current.uuids
        first, lacking, is_for_some = _find_next(pending, held)
        self._pending = pending[first:]
        self._forget(self._fetched.keys() - {entry.uuid for entry in self._pending})
        if first:
            self._position = pending[first - 1].id
        base = self._pending[0].base if self._pending else None
        is_lost = base is not None and any(held[name] != base for name in lacking)
        # A server that needs another export does not keep the publisher from going on.
        self._note(self._pending[-1].id if is_lost else self._position)
        if is_lost:
            raise ServingError(
                f'follow: stream "{self._stream.name}": got the delta {self._pending[0].uuid} next, which rests on '
                f"{base}, but the tables hold {sorted({uuid or 'none' for uuid in held.values()})}: the versions "
                "between were trimmed, or Session.update has set the tables back, or keys were cut to 32 bits, or "
                "initialize_after_startup: false read no export (none). "
                "Wanted a full export: publish one, or load an export of then or later, by Session.update or as "
                "sparse_files."
            )
        if not self._pending:
            return 0
        # A full export is an update of its own: it follows no other version.
        chain = [self._pending[0], *itertools.takewhile(lambda entry: entry.base, self._pending[1:])]
        sizes = itertools.accumulate(entry.num_bytes for entry in chain)
        most = 1 if self._is_careful or is_for_some else max(1, sum(size <= BATCH_BYTES for size in sizes))
        num_fetched = sum(1 for _ in itertools.takewhile(lambda entry: entry.uuid in self._fetched, self._pending))
        batch = self._pending[: min(most, num_fetched or most)]  # others are fetched while these are applied
        self._is_careful = True  # if they are refused together, the next attempt takes the first alone
        try:
            for entry in batch:
                self._fetch(entry)
        except _Gone:
            self._position, self._pending = "0-0", []  # what is there now is read again
            raise
        try:
            with self._fetching(after=batch[-1].id):
                paths = [self._fetched[entry.uuid] for entry in batch]
                self._served.update(dict.fromkeys(lacking, paths[0]) if is_for_some else paths, None, "auto")
        except DatabaseError:  # it may have some of the rows: the next attempt is the same update
            self._is_careful = False
            raise
        except BaseException:
            self._forget([entry.uuid for entry in batch])  # what is refused is fetched again
            raise
        self._forget([entry.uuid for entry in batch])
        self._is_careful, self._delay_s = False, batch[0].age_s
        self._position, self._pending = batch[-1].id, self._pending[len(batch) :]
        self._note(self._position)
        return len(batch)

    def _note(self, position: str) -> None:
        """Notes the position. If Redis refuses it, as without memory, the publisher may wait, but this one goes on."""
        try:
            self._stream.note(self._consumer, position)
            self._unnoted = ""
        except DatabaseError as error:
            if not isinstance(error.__cause__, redis.ResponseError):
                raise
            if not self._unnoted:
                _log.error("%s; versions are read, but their publisher does not learn it", str(error).rstrip("."))
            self._unnoted = str(error)

    @contextlib.contextmanager
    def _fetching(self, after: str) -> Iterator[None]:
        """Fetches versions behind an entry until the caller is done, `BATCH_BYTES` of them at most.

        What fails is left for `look`, which tries it again in its turn.
        """
        is_over = threading.Event()

        def run() -> None:
            at, num_bytes = after, 0
            while not is_over.is_set():
                for entry in self._stream.entries(at, WAIT_AHEAD_S):
                    num_bytes += entry.num_bytes
                    if is_over.is_set() or num_bytes > BATCH_BYTES:
                        return
                    self._fetch(entry)
                    at = entry.id

        with concurrent.futures.ThreadPoolExecutor(1, "jaxsok-fetch") as thread:
            thread.submit(run)
            try:
                yield
            finally:
                is_over.set()

    def _forget(self, uuids: Iterable[str]) -> None:
        """Removes the files of versions."""
        folder = self._fetcher.folder
        for uuid in uuids:
            path = self._fetched.pop(uuid, None)
            if folder is not None and path == folder / uuid:  # and not a folder that a publisher has named
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, entry: _Entry) -> None:
        """Writes the files of a version into a folder; their checksums are those of the manifest."""
        if entry.path is not None:
            self._fetched[entry.uuid] = pathlib.Path(entry.path)
        elif entry.uuid not in self._fetched or not self._fetched[entry.uuid].exists():
            self._fetched[entry.uuid] = self._fetcher.write_files(entry)


def _push(payload: str, chunk: bytes, client: Any) -> None:
    client.pipeline(transaction=True).rpush(payload, chunk).expire(payload, UNFINISHED_S).execute()


def _chunks(folder: pathlib.Path, names: Sequence[str]) -> Iterator[bytes]:
    for name in names:
        with (folder / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


def _order(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


def _to_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
