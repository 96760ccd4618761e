"""A server of several processes: front ends answer HTTP, and ask the process that has the session (docs/server.md).

    clients ── sockets of one port ── front ends: `server.App` over a `Remote` session: HTTP, checks, joining, encoding
                                          │ frames over a Unix socket, each the keys of some requests
                                       this process: joins frames to calls of the session, watches, counts

A front end that ends is started again. If this process ends, all front ends end. Both are of one user, and the socket
is in a folder that only this user may open. So heads of frames are pickled; what clients sent is in them only as
checked names, numbers and arrays. A frame is

    u32, u64    bytes of the head, bytes of the data, little-endian
    head        a pickle: what is asked or answered, and (name, dtype, shape) of each array
    data        the arrays, one behind the other
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import prometheus_client.values
import uvloop

from jaxsok.checks import not_none
from jaxsok.features import Bags
from jaxsok.serving.errors import ServingError
from jaxsok.serving.http import metrics, running
from jaxsok.serving.http.batching import ClosedError
from jaxsok.serving.http.calls import ParsedRequest
from jaxsok.serving.http.security import OPEN, Security
from jaxsok.serving.http.server import App, Held, ServerOptions
from jaxsok.serving.model.served import Answer

_log = logging.getLogger(__name__)

RESTART_S = 1.0  # between the end of a front end and its next start
GRACE_S = 5.0  # for front ends to end, beyond `drain_s` and `shutdown_s`; then they are killed
LOOK_S = 0.02  # between two looks for new versions
LAST_WORDS_S = 0.2  # for the refusals of a front end whose session is gone
SIZES = struct.Struct("<IQ")
_PARTS = ("keys", "lengths", "weights")  # of bags


def prepare() -> None:
    """Starts the process from which front ends are forked, in the background; it has no device and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:  # of its socket, which lies there
        raise _error_of_folder(error, "a folder to write to, with a short name") from None


def _error_of_folder(error: OSError, wanted: str) -> OSError:
    return OSError(f"serve: TMPDIR: got {tempfile.gettempdir()}: {error}; wanted {wanted}.")


def bind(host: str, port: int, num_processes: int) -> list[socket.socket]:
    """Listens at an address with a socket for each process, between which the kernel divides connections."""
    first = running.bind(host, port)  # refuses an address that is taken, which the others would share
    if num_processes == 1:
        return [first]
    with first:
        port = first.getsockname()[1]
    return [running.bind(host, port, reuse_port=True) for _ in range(num_processes)]


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for name in ("jaxsok", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.INFO)


class Processes:
    """A front end for each socket of `bind`, over one application; `run` and `stop` are those of `running.Server`.

    The application `has_front_ends`. Its options hold for all of them together, also the limits of requests and bytes.
    """

    def __init__(
        self,
        app: App,
        sockets: Sequence[socket.socket],
        *,
        security: Security = OPEN,
        access_log: bool = False,
        on_ready: Callable[["Processes"], None] = lambda server: None,
    ) -> None:
        self.app, self._folder = app, not_none(app.folder)
        self.address = running.address_of(sockets[0], security.scheme)
        self._path = os.path.join(self._folder.name, "session")
        self._sockets, self._on_ready = sockets, on_ready
        self._of_clients = {"security": security, "access_log": access_log}
        self._context = multiprocessing.get_context("forkserver")
        self._counts = self._context.RawArray("q", 2 * len(sockets))
        self._running: dict[int, Any] = {}
        self._unready, self._models = set(range(len(sockets))), dict(app.session.models)  # models: as of the last look
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        try:
            metrics.reserve_files(self._folder.name, len(sockets), len(self._models))
        except OSError as error:
            self._folder.cleanup()
            wanted = "room for the counts of front ends; free some, or choose another folder"
            raise _error_of_folder(error, wanted) from None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    def run(self) -> None:
        """Answers until SIGTERM, SIGINT or `stop`; then lets the front ends finish, and closes the session."""
        with self._folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            prepare()
            runner.run(self._run())

    def stop(self) -> None:
        """Stops as a signal does; may be called from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop, signal.SIGTERM)

    def _stop(self, number: int) -> None:
        if self._stopping.is_set() and number == signal.SIGINT:
            self._signal(signal.SIGKILL)
            self._folder.cleanup()
            os._exit(0)
        self._stopping.set()
        self.app.is_stopping = True

    async def _run(self) -> None:
        self._loop, options = asyncio.get_running_loop(), self.app.options
        is_main = threading.current_thread() is threading.main_thread()
        async with contextlib.AsyncExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
                self._loop.add_signal_handler(number, self._stop, number)
                stack.callback(self._loop.remove_signal_handler, number)  # uvloop's would outlive the loop
            await stack.enter_async_context(self.app.lifespan())
            # A connection that finds the backlog full is refused; all front ends may connect at once.
            server = await asyncio.start_unix_server(self._serve, self._path, limit=1 << 20, backlog=4096)
            keepers = [self._loop.create_task(self._keep(number)) for number in range(len(self._sockets))]
            stopped = self._loop.create_task(self._stopping.wait())
            await asyncio.wait([*keepers, stopped], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self.app.stop_taking()
            self._signal(signal.SIGTERM)
            _, late = await asyncio.wait(keepers, timeout=options.drain_s + options.shutdown_s + GRACE_S)
            if late:
                self._signal(signal.SIGKILL)
            server.close()
            await asyncio.gather(*keepers)

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _keep(self, number: int) -> None:
        where = self._sockets[number]
        settings = where, self._path, self._counts, self.app.options, self._of_clients
        with where:  # a front end that ends leaves its socket, and the connections that wait there, to the next
            while not self._stopping.is_set():
                process = self._context.Process(target=_work, args=(number, self._models, *settings), daemon=True)
                await asyncio.to_thread(process.start)
                self._running[number] = process
                if self._stopping.is_set():
                    process.terminate()
                await _wait_for_end(process.pid)
                process.join()
                del self._running[number]
                self._counts[2 * number : 2 * number + 2] = 0, 0
                metrics.clear_gauges(self._folder.name, number)
                if not self._stopping.is_set():
                    what = f"serve: front end {number}: it ended with {process.exitcode}"
                    if self._unready:
                        raise OSError(f"{what} before all were ready; its output has the reason.")
                    _log.error("%s, and is started again", what)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), RESTART_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the frames of a connection, one after the other."""
        ends = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        with contextlib.closing(writer), contextlib.suppress(*ends):
            while True:
                sizes = SIZES.unpack(await reader.readexactly(SIZES.size))
                (op, about), arrays = unpack(*[await reader.readexactly(size) for size in sizes])
                try:
                    head, found = await self._answer(op, about, arrays, reader)
                    num_bytes = sum(array.nbytes for array in found.values())
                    frame = await self.app.off_loop(num_bytes, pack, head, found, op == "lookup")
                except Exception as error:
                    head: Exception = error
                    if not isinstance(error, ServingError | ClosedError):
                        _log.error("%s failed", op, exc_info=error)
                        head = RuntimeError(f"{op}: {error!r}")
                    frame = pack(head, {})
                writer.write(frame)
                await writer.drain()

    async def _answer(
        self, op: str, about: Any, arrays: Mapping[str, Any], reader: asyncio.StreamReader
    ) -> tuple[Any, Mapping[str, Any]]:
        """Answers what `Remote` asks: with a head and arrays."""
        if op == "models":
            while {name: model.version for name, model in self._models.items()} == about and not reader.at_eof():
                await asyncio.sleep(LOOK_S)
                self._models = self.app.session.models
            return self._models, {}
        if op == "scrape":
            return await asyncio.to_thread(self.app.metrics.text), {}
        if op == "ready":
            if self._unready == {about}:
                self._on_ready(self)
            self._unready.discard(about)
            return None, {}
        name, num_keys, *rest = about
        arrays = split(arrays[""], num_keys) if op == "lookup" else arrays
        request = ParsedRequest(arrays, num_keys, *rest)
        values, version = await self.app.submit(self.app.kinds[op], self._models[name], request)
        return version, values


async def _wait_for_end(pid: int) -> None:
    """Waits for a front end itself: the process that it is forked from may end first, if a signal is sent to all."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


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
        version, found = await self._send(op, about, arrays)
        rows = split(found[""], {name: size * dims[name] for name, size in request.num_keys.items()})
        return Answer({name: row.reshape(-1, dims[name]) for name, row in rows.items()}, version=version)

    async def scrape(self) -> bytes:
        return (await self._send("scrape", None))[0]

    async def follow(self, number: int, connected: socket.socket) -> None:
        """Reports that this front end is ready, then keeps `models` as they are served, until the other process ends.

        All frames take one connection, made before: clients may have taken all other descriptors.
        """
        _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, sock=connected)
        self._free.append(connection)
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
            text, data = await connection.ask(pack((op, about), arrays or {}, op == "lookup"))
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


def _work(
    number: int,
    models: Mapping[str, Any],
    where: socket.socket,
    path: str,
    counts: Any,
    options: ServerOptions,
    of_clients: Mapping[str, Any],
) -> None:
    os.setpgid(0, 0)  # an interrupt from a terminal is for the process of the session, which stops this one
    folder = os.environ["PROMETHEUS_MULTIPROC_DIR"] = os.path.dirname(path)
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: number)
    log_to_stderr()
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(path)
    session, tasks = Remote(path, models), list[asyncio.Task[None]]()
    # Requests wait for company where those of all front ends meet.
    app = App(session, dataclasses.replace(options, max_delay_ms=0.0), held=Held(counts, number))

    async def follow() -> None:
        """Ends this process with that of the session; removes the folder if that one was killed."""
        with contextlib.suppress(Exception):
            await session.follow(number, connected)
        await asyncio.sleep(LAST_WORDS_S)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    def begin(_: running.Server) -> None:
        gc.collect()
        gc.freeze()
        tasks.append(asyncio.get_running_loop().create_task(follow()))

    running.Server(app, where, **of_clients, on_ready=begin).run()
    if app.num_running or not app.is_closed:
        os._exit(int(app.num_running > 0))


def pack(head: Any, arrays: Mapping[str, Any], joins: bool = False) -> bytes:
    """Writes a frame; the arrays may be Bags with lengths.

    `joins` makes arrays of one dtype a single one without shape, named "", which is read in less time; `split` takes it
    apart.
    """
    spec, data, num_bytes = [], [], 0
    for name, value in arrays.items():
        of_bags = [(part, getattr(value, part)) for part in _PARTS] if isinstance(value, Bags) else [("", value)]
        for part, array in of_bags:
            if array is not None:
                spec.append((name, part, array.dtype, array.shape))
                # Most arrays are copied into the frame as they are; those of 16-bit floats give no buffer.
                is_plain = array.flags.c_contiguous and array.dtype.kind != "V"
                data.append(array if is_plain else array.tobytes())
                num_bytes += array.nbytes
    if joins and spec:
        dtype = spec[0][2]
        spec = [("", "", dtype, (num_bytes // dtype.itemsize,))]
    text = pickle.dumps((head, spec), pickle.HIGHEST_PROTOCOL)
    return b"".join([SIZES.pack(len(text), num_bytes), text, *data])


def unpack(text: bytes | memoryview, data: bytes | memoryview) -> tuple[Any, dict[str, Any]]:
    """Reads the head and the arrays of a frame; the arrays share its memory, and are read-only."""
    head, spec = pickle.loads(text)
    arrays, bags, place = dict[str, Any](), collections.defaultdict[str, dict[str, Any]](dict), 0
    for name, part, dtype, shape in spec:
        array = np.ndarray(shape, dtype, data, place)
        place += array.nbytes
        (bags[name] if part else arrays)[part or name] = array
    return head, arrays | {name: Bags(**parts) for name, parts in bags.items()}


def split(joined: np.ndarray, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Splits an array that `pack` has joined; shares its memory."""
    ends = itertools.accumulate(sizes.values())
    return {name: joined[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}
