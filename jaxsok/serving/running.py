"""The server's process: its socket, uvicorn around the application, and what signals do."""

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxsok.serving.server import ABORT, App

_MAX_HEAD_BYTES = 1 << 16
_UNSENT_BYTES = 1 << 17
"""That the kernel takes of a connection beyond what is on the wire: it tells little by little what a client reads."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, before anything is loaded; port 0: any that is free.

    Who connects before the server accepts waits.

    Raises:
      OSError: the address is taken, or not of this machine.
      ValueError: no port.

    Example:
      >>> with bind("127.0.0.1", 0) as found:
      ...     found.getsockname()[0]
      '127.0.0.1'
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"serve: --port: got {port}, wanted 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen()  # else another socket could be bound here until one of them listens
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise OSError(f"serve: got {host}:{port}: {error}; give another --host or --port.") from None
    return made


def serve(
    app: App, where: socket.socket, *, access_log: bool = False, on_ready: Callable[["Server"], None] | None = None
) -> None:
    """Answers until SIGTERM, SIGINT or `Server.stop`; then finishes what it took and closes the session.

    Args:
      app: over a session.
      where: of `bind`.
      access_log: a line for each request, by the logger "uvicorn.access".
      on_ready: called when connections are accepted.
    """
    Server(app, where, access_log=access_log, on_ready=on_ready).run()


class _Protocol(H11Protocol):
    """Lets the application close a connection whose client does not read: else what it holds would wait for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tells every request of it."""
        super().connection_made(transport)
        _tell_early(transport.get_extra_info("socket"))
        app = self.app

        async def call(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})[ABORT] = transport.abort
            await app(scope, receive, send)

        self.app = call


def _tell_early(connection: Any) -> None:
    """Else a third of the kernel's buffer, which grows to megabytes, has to go before it says that there is room."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


class Server(uvicorn.Server):
    """One that is not ready before it stops, and whose signals end `run`, not the process."""

    def __init__(
        self,
        app: App,
        where: socket.socket,
        *,
        access_log: bool = False,
        on_ready: Callable[["Server"], None] | None = None,
    ) -> None:
        """Declares; `run` runs. `address` is `http://host:port`, with the port that was found."""
        self.app, self._where, self._on_ready = app, where, on_ready
        host, port = where.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            app.asgi,
            # h11 bounds the bytes of a request's head, httptools does not.
            http=_Protocol,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(app.options.shutdown_s),
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all is closed."""
        super().run(sockets or [self._where])

    def stop(self) -> None:
        """As a signal does; from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes note; the loop sees it within 0.1 s. A second SIGINT waits for nothing, and leaves the session open."""
        self.app.is_stopping = True  # no more than this: a signal may come while a lock is held
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, then tells."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Not ready, drains, then closes."""
        self.app.stop_taking()
        loop = asyncio.get_running_loop()
        until = loop.time() + self.app.options.drain_s
        while not self.force_exit and (rest_s := until - loop.time()) > 0:
            await asyncio.sleep(min(rest_s, 0.1))
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not raised again at the end, as uvicorn does: the process would be killed before it says so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
