"""The session of a front end: it asks the process that has the tables, over a Unix socket.

Both ends are processes of one server, of one user, and the socket is in a folder that only this user may open. So heads
are pickled; what clients sent is in them only as checked names, numbers and arrays. A frame is

    u32, u64    bytes of the head, bytes of the data, little-endian
    head        a pickle: what is asked or answered, and (name, dtype, shape) of each array
    data        the arrays, one behind the other
"""

import asyncio
import collections
import itertools
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from jaxsok.features import Bags
from jaxsok.serving.http.batching import ClosedError
from jaxsok.serving.http.calls import ParsedRequest
from jaxsok.serving.model.served import Answer

SIZES = struct.Struct("<IQ")
_PARTS = ("keys", "lengths", "weights")  # of bags


def pack(head: Any, arrays: Mapping[str, Any]) -> bytes:
    """Writes a frame; the arrays may be Bags with lengths."""
    spec, data = [], []
    for name, value in arrays.items():
        of_bags = [(part, getattr(value, part)) for part in _PARTS] if isinstance(value, Bags) else [("", value)]
        for part, array in of_bags:
            if array is not None:
                spec.append((name, part, array.dtype, array.shape))
                data.append(array.tobytes())
    text = pickle.dumps((head, spec), pickle.HIGHEST_PROTOCOL)
    return b"".join([SIZES.pack(len(text), sum(map(len, data))), text, *data])


def unpack(text: bytes | memoryview, data: bytes | memoryview) -> tuple[Any, dict[str, Any]]:
    """Reads the head and the arrays of a frame; the arrays share its memory, and are read-only."""
    head, spec = pickle.loads(text)
    arrays, bags, place = dict[str, Any](), collections.defaultdict[str, dict[str, Any]](dict), 0
    for name, part, dtype, shape in spec:
        array = np.ndarray(shape, dtype, data, place)
        place += array.nbytes
        (bags[name] if part else arrays)[part or name] = array
    return head, arrays | {name: Bags(**parts) for name, parts in bags.items()}


def join(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Joins arrays of one dtype, as numbers without shape."""
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


def split(joined: np.ndarray, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Splits what `join` has joined."""
    ends = itertools.accumulate(sizes.values())
    return {name: joined[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


class Remote:
    """A session whose tables are in another process; lookups and predictions wait for it on the event loop.

    A thread keeps `models` as they are served, and calls `on_end` when the other process has ended.
    """

    def __init__(self, path: str, on_end: Callable[[], None]) -> None:
        self._path, self._on_end = path, on_end
        self._free: list[_Connection] = []  # connections of the event loop without a frame under way
        self.models: Mapping[str, Any] = self._ask("models", None)[0]
        self._following = self._connect()
        threading.Thread(target=self._follow, name="jaxsok-models", daemon=True).start()

    async def lookup(self, request: ParsedRequest, model: str) -> Answer:
        """Looks up keys without shape; all are one array on the way, and all rows: tens of tables take less time so."""
        tables = self.models[model].tables
        version, found = await self._send("lookup", _about(request, model), {"": join(request.arrays)})
        rows = split(found[""], {name: size * tables[name].dim for name, size in request.num_keys.items()})
        return Answer({name: row.reshape(-1, tables[name].dim) for name, row in rows.items()}, version=version)

    async def predict(self, request: ParsedRequest, model: str) -> Answer:
        version, arrays = await self._send("predict", _about(request, model), request.arrays)
        return Answer(arrays, version=version)

    async def _send(self, op: str, about: Any, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Asks on the event loop: to hand a frame to a thread and its answer back would take longer than both."""
        connection = self._free.pop() if self._free else _Connection()
        try:
            if connection.transport is None:
                await asyncio.get_running_loop().create_unix_connection(lambda: connection, self._path)
            answer = await connection.ask(pack((op, about), arrays))
        except BaseException as error:  # also a caller that is cancelled: the answer would be the next one's
            connection.close()
            if isinstance(error, OSError):
                raise ClosedError from None
            raise
        self._free.append(connection)
        return _open(answer)

    def scrape(self) -> bytes:
        return self._ask("scrape", None)[0]

    def close(self, timeout_s: float | None = None) -> bool:
        """Does nothing: the connections end with the process."""
        return True

    def report_ready(self, number: int) -> None:
        self._ask("ready", number)

    def _ask(self, op: str, about: Any, connection: socket.socket | None = None) -> tuple[Any, dict[str, Any]]:
        """Asks, and waits for the answer in this thread; without a connection over one of its own."""
        try:
            if connection is None:
                with self._connect() as connection:
                    return self._ask(op, about, connection)
            connection.sendall(pack((op, about), {}))
            with connection.makefile("rb") as file:  # no more than the answer comes, so it reads nothing beyond
                answer = [_receive(file, size) for size in SIZES.unpack(_receive(file, SIZES.size))]
        except OSError:
            raise ClosedError from None
        return _open(answer)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _follow(self) -> None:
        """Keeps `models` as they are served; its connection is kept, since all descriptors may be taken by clients."""
        try:
            with self._following as connection:
                while True:
                    versions = {name: model.version for name, model in self.models.items()}
                    self.models = self._ask("models", versions, connection)[0]  # answers when they are others
        finally:
            self._on_end()


class _Connection(asyncio.BufferedProtocol):
    """A connection of the event loop, which reads frames where they stay; one frame is under way at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._parts, self._place = [_buffer(SIZES.size)], 0  # sizes, head and data of a frame, as far as they came
        self._answer: asyncio.Future[Sequence[memoryview]] | None = None

    async def ask(self, frame: bytes) -> Sequence[memoryview]:
        """Sends a frame; waits for the head and the data of the answer."""
        if self.transport.is_closing():
            raise OSError("the process of the session has ended")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(frame)
        return await self._answer

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parts[-1][self._place :]

    def buffer_updated(self, nbytes: int) -> None:
        self._place += nbytes
        while self._place == len(self._parts[-1]):  # also of a part without bytes
            self._place = 0
            if len(self._parts) < 3:
                self._parts.append(_buffer(SIZES.unpack(self._parts[0])[len(self._parts) - 1]))
                continue
            (_, *answer), self._parts = self._parts, [_buffer(SIZES.size)]
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError())


def _about(request: ParsedRequest, model: str) -> tuple[Any, ...]:
    return model, request.num_keys, request.num_samples, request.num_requests


def _buffer(num_bytes: int) -> memoryview:
    """Makes a buffer that is not zeroed: the event loop would stand still meanwhile."""
    return memoryview(np.empty(num_bytes, np.uint8)) if num_bytes else memoryview(bytearray())


def _open(answer: Sequence[bytes | memoryview]) -> tuple[Any, dict[str, Any]]:
    """Reads an answer; raises the error of the other process."""
    text, data = answer
    head, found = unpack(text, memoryview(data).toreadonly())
    if isinstance(head, BaseException):
        raise head
    return head, found


def _receive(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise OSError("the process of the session has ended")
    return data
