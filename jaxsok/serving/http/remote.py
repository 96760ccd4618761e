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
import struct
from collections.abc import Mapping, Sequence
from typing import Any

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
    """A session whose tables are in another process; the event loop waits for it, and `follow` keeps its `models`."""

    def __init__(self, path: str, models: Mapping[str, Any]) -> None:
        self._path, self.models = path, models
        self._free: list[_Connection] = []  # without a frame under way; the last one is taken first

    async def ask(self, op: str, model: str, request: ParsedRequest) -> Answer:
        """Looks up keys without shape, or predicts; keys are one array on the way, and rows: that takes less time."""
        about, arrays = (model, request.num_keys, request.num_samples, request.num_requests), request.arrays
        if op != "lookup":
            version, found = await self._send(op, about, arrays)
            return Answer(found, version=version)
        dims = {name: table.dim for name, table in self.models[model].tables.items()}
        version, found = await self._send(op, about, {"": join(arrays)})
        rows = split(found[""], {name: size * dims[name] for name, size in request.num_keys.items()})
        return Answer({name: row.reshape(-1, dims[name]) for name, row in rows.items()}, version=version)

    async def scrape(self) -> bytes:
        return (await self._send("scrape", None))[0]

    async def follow(self, number: int) -> None:
        """Reports that this front end is ready, then keeps `models` as they are served, until the other process ends.

        All frames take one connection, since clients may have taken all other descriptors.
        """
        await self._send("ready", number)
        while True:
            versions = {name: model.version for name, model in self.models.items()}
            self.models = (await self._send("models", versions))[0]  # answers when they are others

    def close(self, timeout_s: float | None = None) -> bool:
        """Does nothing: the connections end with the process."""
        return True

    async def _send(self, op: str, about: Any, arrays: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Asks on the event loop: to hand a frame to a thread and its answer back would take longer than both."""
        connection = None
        try:
            if self._free:
                connection = self._free.pop()
            else:
                _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, self._path)
            text, data = await connection.ask(pack((op, about), arrays or {}))
        except BaseException as error:  # also a caller that is cancelled: the answer would be the next one's
            if connection is not None:
                connection.transport.abort()
            if isinstance(error, OSError):
                raise ClosedError from None
            raise
        self._free.append(connection)
        head, found = unpack(text, data.toreadonly())
        if isinstance(head, BaseException):  # of the other process
            raise head
        return head, found


class _Connection(asyncio.BufferedProtocol):
    """A connection of the event loop, which reads frames where they stay; one frame is under way at a time."""

    def __init__(self) -> None:
        self.transport: Any = None  # from the beginning of the connection on
        self._parts, self._place = [_buffer(SIZES.size)], 0  # sizes, head and data of a frame, as far as they came
        self._answer: asyncio.Future[Sequence[memoryview]] | None = None

    async def ask(self, frame: bytes) -> Sequence[memoryview]:
        """Sends a frame; waits for the head and the data of the answer."""
        if self.transport.is_closing():
            raise OSError("the process of the session has ended")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(frame)
        return await self._answer

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


def _buffer(num_bytes: int) -> memoryview:
    """Makes a buffer that is not zeroed: the event loop would stand still meanwhile."""
    return memoryview(np.empty(num_bytes, np.uint8))
