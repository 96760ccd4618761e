"""The server's process: its socket, uvicorn around the application, and the handling of signals."""

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxsok.serving.http.responses import CLOSE, Refusal, make_response
from jaxsok.serving.http.security import OPEN, Security
from jaxsok.serving.http.server import DISCARD_S, App, discard, send_limit_s

MAX_HEAD_BYTES = 1 << 16  # a request's first line and headers
MAX_PIPELINED = 16  # requests of a connection that wait for the responses before theirs: all that came are parsed
# Unsent bytes of a connection in the kernel. Its buffer would grow to megabytes, and it reports room when a third is
# free; with less the server sees early what a client reads.
_UNSENT_BYTES = 1 << 17
_ABORT = "jaxsok.abort"  # an extension of an ASGI scope: closes the connection without sending what it holds


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Listens at an address, before anything is loaded; port 0: any that is free. Clients wait until it accepts."""
    if not 0 <= port < 2**16:
        raise ValueError(f"serve: --port: got {port}, wanted 0 to 65535.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family == socket.AF_INET6
        return socket.create_server(address, family=family, dualstack_ipv6=is_dual, reuse_port=reuse_port)
    except OSError as error:
        raise OSError(f"serve: got {host}:{port}: {error}; give another --host or --port.") from None


def address_of(where: socket.socket, scheme: str = "http") -> str:
    host, port = where.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, refuses in the form of the application, and lets that cut a connection off.

    A client that does not read would hold its response for ever, and one that sends nothing its connection.
    """

    def __init__(self, send_timeout_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._send_timeout_s = send_timeout_s
        self._refusal: Refusal | None = None  # the connection's last response
        self._running: Any = None  # uvicorn's record of the request that is being answered
        self._is_upgrade = False  # whether this head asks for another protocol, and is read again without that
        self._num_bytes, self._is_long = 0, False  # bytes of a head, or of what is around chunks, and whether too many

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gives every request the means to close the connection."""
        super().connection_made(transport)
        connection, app = transport.get_extra_info("socket"), self.app
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        transport.set_write_buffer_limits(1 << 16)  # TLS would hold 512 KiB

        async def call(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})[_ABORT] = transport.abort
            self._running = receive.__self__
            await app(scope, receive, send)

        self.app = call
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request that is being answered; uvicorn tells the last one that was read."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # reads on for a while: else a client may see a reset before the answer
            return
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._num_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._is_long = True
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        """Parses bytes; a request for another protocol is answered in this one, body and all (RFC 9110, 7.8)."""
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade as found:
            # httptools ends a request with its head if that asks for an upgrade, and would read the body as a request.
            parser, self._is_upgrade = self.parser, False
            lines = [b"%s %s HTTP/%s" % (parser.get_method(), self.url, parser.get_http_version().encode())]
            for name, value in self.headers:
                if name == b"connection":
                    tokens = [token.strip() for token in value.split(b",")]
                    value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
                if name != b"upgrade":
                    lines.append(b"%s: %s" % (name, value))
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(b"\r\n".join([*lines, b"\r\n"]) + data[found.args[0] :])

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()  # pyright: ignore[reportOptionalMemberAccess]
        rest = method, self.url, b"  HTTP/1.1\r\n\r\n"
        num_bytes = sum(map(len, rest)) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._num_bytes, self._is_long = 0, num_bytes > MAX_HEAD_BYTES
        if self._is_long or method == b"CONNECT" or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError  # the parser stops, and the request is refused
        self._is_upgrade = self.parser.should_upgrade()  # pyright: ignore[reportOptionalMemberAccess]
        if not self._is_upgrade:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        if not self._is_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, and a long head: now, or behind the responses of earlier requests."""
        message = "the request is no HTTP/1.1."
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection; ask for less at a time."
        self._refusal = Refusal(400, "bad_request", message, CLOSE)
        if self._is_long:
            message = f"the head of a request: got more than {MAX_HEAD_BYTES} bytes, at most so many are taken."
            self._refusal = Refusal(431, "head_too_large", message, CLOSE)
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(self._refusal)
        elif self.cycle.more_body and self.pipeline:  # a request that waits is damaged: those before it are answered
            self.pipeline[0] = self.cycle, make_response(self._refusal)
        elif self.cycle.more_body:  # the request that is being answered is damaged
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.timeout_keep_alive_handler()
            else:
                self._refuse(self._refusal)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_closed()
        if self._refusal is not None and self.cycle.response_complete and not self.transport.is_closing():
            self._refuse(self._refusal)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_closed()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_closed()

    def _end_closed(self) -> None:
        """Ends a closed connection whose client does not read, or answer the end of TLS: idle ones of pools do not."""
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self.loop.call_later(self._send_timeout_s, self.transport.abort)
            if self.scheme == "https":
                self.loop.call_later(DISCARD_S, self._abort_if_sent)

    def _abort_if_sent(self) -> None:
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, refusal: Refusal) -> None:
        response = make_response(refusal)
        head = [STATUS_LINE[response.status_code]]
        for name, value in [*self.server_state.default_headers, *response.raw_headers]:
            head.append(b"%s: %s\r\n" % (name, value))
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self.loop.call_later(DISCARD_S, self.timeout_keep_alive_handler)


class Server(uvicorn.Server):
    """A server that is not ready before it stops, and whose signals end `run`, not the process.

    `run` answers until SIGTERM, SIGINT or `stop`; then it finishes what it took and closes the session. `where` comes
    from `bind`. `access_log` writes to the logger "uvicorn.access"; `on_ready` is called when connections are accepted.
    """

    def __init__(
        self,
        app: App,
        where: socket.socket,
        *,
        security: Security = OPEN,
        access_log: bool = False,
        on_ready: Callable[["Server"], None] | None = None,
    ) -> None:
        self.app, self._where, self._security, self._on_ready = app, where, security, on_ready
        self.address = address_of(where, security.scheme)
        config = uvicorn.Config(
            self._asgi,
            interface="asgi3",
            http=functools.partial(_Protocol, app.options.send_timeout_s),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
        )
        config.load()
        config.ssl = security.context()  # uvicorn would read files
        # Both are fractions of a second, too, where uvicorn declares integers.
        config.timeout_keep_alive = app.options.keep_alive_s  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(config)

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        """Calls the application for clients that may ask, and cuts off those that read their response too slowly.

        While it stops, each response closes its connection.
        """
        loop, options = asyncio.get_running_loop(), self.app.options
        until, is_cut_off = 0.0, False  # until when the client may read the response

        async def send_in_time(message: Any) -> None:
            nonlocal until, is_cut_off
            if is_cut_off:
                return
            if message["type"] == "http.response.start":
                num_bytes = int(dict(message["headers"]).get(b"content-length", 0))
                until = loop.time() + send_limit_s(num_bytes, options)
                if self.app.is_stopping:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            try:
                async with asyncio.timeout_at(min(until, loop.time() + options.send_timeout_s)):
                    await send(message)
            except TimeoutError:
                is_cut_off = True
                self.app.metrics.unread.inc()
                scope["extensions"][_ABORT]()
                await asyncio.sleep(0)  # lets the protocol run

        if scope["type"] != "http":
            return await self.app.asgi(scope, receive, send)
        refusal = self._security.refusal_of(scope)
        if refusal is None:
            return await self.app.asgi(scope, receive, send_in_time)
        request = Request(scope, receive)
        if "100-continue" not in request.headers.get("expect", "").lower():  # else the client has not sent its body
            await discard(request, options)
        response = make_response(refusal)
        self.app.metrics.add(("", ""), response.status_code, 0.0, 0, len(response.body))
        await response(scope, receive, send_in_time)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._where])

    def stop(self) -> None:
        """Stops as a signal does; may be called from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Records the signal; the loop sees it within 0.1 s. A second SIGINT ends at once; the session stays open.

        uvicorn would also raise the signal again at the end, which would kill the process before it reports.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = self.app.ends_at_once = True
        self.should_exit = self.app.is_stopping = True  # no more than this: a signal may come while a lock is held

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        if self.should_exit:
            await self.shutdown(sockets)  # of which older uvicorn would do nothing
            self.started = False  # newer uvicorn would do it again
        elif self._on_ready is not None:
            self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops being ready, drains, refuses connections, lets idle ones ask once more, then closes.

        A kept connection that is closed loses the request under way. So each stays until a response has said that it
        closes, or until it has been idle for `keep_alive_s`.
        """
        self.app.stop_taking()
        options, loop = self.app.options, asyncio.get_running_loop()
        await self._wait(options.drain_s, lambda: True)
        begin = loop.time()
        await self._stop_listening(sockets or [])
        await self._wait(min(options.keep_alive_s, options.shutdown_s), lambda: bool(self.server_state.connections))
        rest_s = max(0.0, options.shutdown_s - (loop.time() - begin))
        self.config.timeout_graceful_shutdown = rest_s  # pyright: ignore[reportAttributeAccessIssue]
        await super().shutdown(sockets)

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Accepts the connections that wait in the kernel, which would be reset; then refuses others."""
        loop, waiting = asyncio.get_running_loop(), list[socket.socket]()
        for where in sockets:
            with contextlib.suppress(OSError):  # no connection is left
                for _ in range(self.config.backlog):
                    waiting.append(where.accept()[0])
            with contextlib.suppress(OSError):  # it does not listen any more
                where.shutdown(socket.SHUT_RDWR)  # to close it would leave it open in another process that has it
        for server in self.servers:
            server.close()
        tls = {} if self.config.ssl is None else {"ssl": self.config.ssl, "ssl_handshake_timeout": DISCARD_S}
        make = functools.partial(self.config.http_protocol_class, self.config, self.server_state, self.lifespan.state)
        accepted = (loop.connect_accepted_socket(make, connection, **tls) for connection in waiting)
        await asyncio.gather(*accepted, return_exceptions=True)  # of clients that have left

    async def _wait(self, timeout_s: float, goes_on: Callable[[], bool]) -> None:
        """Waits until there is nothing more to wait for, the time is over, or a second SIGINT came."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not self.force_exit and goes_on() and (rest_s := until - loop.time()) > 0:
            await asyncio.sleep(min(rest_s, 0.05))
