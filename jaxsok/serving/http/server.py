"""The HTTP application over a session: lookups, predictions, models, health, metrics. docs/server.md has the formats.

No client is trusted: sizes are bounded while bodies are read, every input is checked before it joins a batch, and no
input names a file. The event loop handles small bodies; large ones, and calls of a session in this process, run in
threads.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxsok import checks
from jaxsok.serving.artifact.inputs import input_to_json
from jaxsok.serving.errors import RequestTooLargeError, UnknownModelError
from jaxsok.serving.http import wire
from jaxsok.serving.http.batching import Batcher, ClosedError
from jaxsok.serving.http.calls import Arrays, Lookups, ParsedRequest, Predictions, Results, finish
from jaxsok.serving.http.metrics import Metrics
from jaxsok.serving.http.responses import CLOSE, Busy, Refusal, formats, http_error, make_response, refusal_of
from jaxsok.serving.http.watch import Watcher

_log = logging.getLogger(__name__)
T = TypeVar("T")

_INLINE_BYTES = 1 << 15  # smaller bodies are handled on the event loop: a thread would cost more than the work
_PIECE_BYTES = 1 << 16  # of a response, sent at a time; its connection holds as many more
DISCARD_S = 2.0  # how long the rest of a refused body is read, so that the client reads the answer


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The limits of a server: sizes, counts and times."""

    max_delay_ms: float = 2.0  # a request waits this long for others to share its call
    max_body_bytes: int = 16 << 20  # in one request; less where its model cannot need so many (`wire.body_bytes`)
    max_held_bytes: int = 512 << 20  # bodies of unanswered requests, then of their responses until they are sent
    max_requests: int = 256  # requests whose response is not sent
    max_keys: int = 1 << 20  # keys of one request, over all its tables; the model's own limits by table hold as well
    max_json_values: int = 1 << 22  # numbers in one JSON response; the binary format has no such limit
    max_response_bytes: int = 256 << 20  # in the arrays of one response
    body_timeout_s: float = 15.0  # for the body to arrive
    timeout_s: float = 30.0  # for an answer, from the last byte of the body on
    send_timeout_s: float = 30.0  # for a client's system to take 64 KiB of its response; then its connection is cut off
    min_send_rate: float = 1 << 18  # bytes a second of a response after `send_timeout_s`, or the client is cut off
    keep_alive_s: float = 5.0  # after which a connection without a request is closed; while the server stops, too
    num_workers: int = 2  # calls of the session at the same time, by model and endpoint
    drain_s: float = 0.0  # after a signal: still takes requests, while /readyz says that it will not
    shutdown_s: float = 30.0  # after that: answers kept connections, and finishes what it took; then cuts off

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            may_be_zero, what = field.name in ("max_delay_ms", "drain_s"), f"serve: --{field.name.replace('_', '-')}"
            low, wanted = (0, "0 or more") if may_be_zero else (checks.ABOVE_ZERO, "a number above 0")
            checks.number(what, getattr(self, field.name), low, wanted=wanted)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ServerOptions":
        """Takes the options of the command line; those that are None or missing have their defaults."""
        names = [field.name for field in dataclasses.fields(cls) if given.get(field.name) is not None]
        return cls(**{name: given[name] for name in names})


class Held:
    """The requests that are not answered and the bytes that they hold, of all processes that answer requests.

    `counts` has two numbers for each process, which only that process writes; others may read them a moment late.
    """

    def __init__(self, counts: Any = None, number: int = 0) -> None:
        self._counts, self._first = [0, 0] if counts is None else counts, 2 * number

    def add(self, num_requests: int, num_bytes: int) -> None:
        self._counts[self._first] += num_requests
        self._counts[self._first + 1] += num_bytes

    @property
    def num_requests(self) -> int:
        return sum(self._counts[0::2])

    @property
    def num_bytes(self) -> int:
        return sum(self._counts[1::2])


class _Request(Request):
    num_bytes = 0  # that it holds: of its body, then of its response


class _Endpoint:
    """An ASGI application for a route, which sends its response itself and counts the request until then."""

    def __init__(self, app: "App", name: str, answer: "Answer") -> None:
        self._app, self._name, self._answer = app, name, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, request = self._app, _Request(scope, receive)
        app.held.add(1, 0)
        app.metrics.in_flight.inc()
        try:
            response = await app.respond(self._name, self._answer, request)
            await app.send(response, send)
        finally:
            app.held.add(-1, -request.num_bytes)
            app.metrics.in_flight.dec()


Answer: TypeAlias = Callable[[_Request], Awaitable[Response]]


class App:
    """The ASGI application (`asgi`) over one session, with its batchers, threads and counters.

    Work begins with the application's lifespan, whose end closes the session. `watch` is a folder of exports and deltas
    (watch.py): those in it are applied before the first request, later ones as they come. Of a server of several
    processes (processes.py), a front end is given what all of them hold, and a remote session; the process of the
    session `has_front_ends`, which count in files of its `folder`.
    """

    def __init__(
        self,
        session: Any,
        options: ServerOptions | None = None,
        *,
        watch: str | os.PathLike[str] | None = None,
        watch_interval_s: float = 2.0,
        held: Held | None = None,
        has_front_ends: bool = False,
    ) -> None:
        self.session, self.options, self.held = session, options or ServerOptions(), held or Held()
        self._names = frozenset(session.models)  # to describe all models for each request would take time
        self._watcher = None
        if watch is not None:
            count = lambda model, result: self.metrics.watched.labels(model, result).inc()  # noqa: E731
            self._watcher = Watcher(session, watch, interval_s=watch_interval_s, observe=count)
        # Only this user may open it.
        self.folder = tempfile.TemporaryDirectory(prefix="jaxsok-serve-") if has_front_ends else None
        self.metrics = Metrics(self._stats, self.folder and self.folder.name)
        self.is_stopping = self.ends_at_once = False
        self.is_closed = False  # then nothing of the session runs any more
        self.num_running = 0  # calls of the session that have not ended, also those whose clients have gone
        self._batchers: dict[tuple[str, str], Batcher[ParsedRequest, Any]] = {}
        self._lock = threading.Lock()  # guards num_running
        self._pools: list[concurrent.futures.ThreadPoolExecutor] = []
        self._bodies: concurrent.futures.ThreadPoolExecutor | None = None
        self._is_front_end = held is not None
        kinds, most = (Lookups, Predictions), self.options.max_keys
        self.kinds = {kind.op: kind(session, most, self._is_front_end) for kind in kinds}
        routes = [
            Route("/healthz", lambda _: JSONResponse({"status": "ok"})),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            Route("/v1/models", _Endpoint(self, "models", self._models), methods=["GET"]),
            Route("/v1/models/{model}", _Endpoint(self, "model", self._model_page), methods=["GET"]),
        ]
        for op, kind in self.kinds.items():
            endpoint = _Endpoint(self, op, functools.partial(self._ask, kind))
            routes.append(Route(f"/v1/models/{{model}}/{op}", endpoint, methods=["POST"]))
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: http_error}, lifespan=self.lifespan)
        self.asgi.router.redirect_slashes = False

    @property
    def is_ready(self) -> bool:
        return self._bodies is not None and not self.is_stopping

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette | None = None) -> AsyncIterator[None]:
        self._bodies = self._pool(2, "jaxsok-body")
        if self._watcher is not None:
            self._watcher.start()  # if its first look fails, the loaded tables are served all the same
            while not self._watcher.has_looked.is_set():
                if self.is_stopping:
                    self._watcher.stop()  # the update that runs is the last
                    break
                await asyncio.sleep(0.05)
        self.metrics.is_ready.set(int(not self.is_stopping))
        try:
            yield
        finally:
            await self._end()

    def stop_taking(self) -> None:
        self.is_stopping = True
        self.metrics.is_ready.set(0)

    async def _end(self) -> None:
        self.stop_taking()
        # uvicorn has waited for the requests: calls that still run have lost theirs.
        await asyncio.gather(*(batcher.close(1.0) for batcher in self._batchers.values()))
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self._pools, self._bodies = [], None
        until = time.monotonic() + self.options.shutdown_s
        has_ended = self._watcher is None or await self._ends(self._watcher.close, until)
        if has_ended and self.num_running == 0:  # else it is in use, and the process ends anyway
            self.is_closed = await self._ends(self.session.close, max(0.0, until - time.monotonic()))

    async def _ends(self, close: Callable[[float], bool], limit: float) -> bool:
        """Returns whether something has ended, as `close` says; waits in a thread that holds nothing up."""
        ended = list[bool]()
        thread = threading.Thread(target=lambda: ended.append(bool(close(limit))), daemon=True)
        thread.start()
        while thread.is_alive() and not self.ends_at_once:
            await asyncio.sleep(0.01)
        return ended == [True]

    async def respond(self, name: str, answer: Answer, request: _Request) -> Response:
        """Makes the response, also of errors; from now on the request holds its bytes."""
        begin, model = time.perf_counter(), request.path_params.get("model", "")
        # A client may ask for any name; only those that exist become labels.
        labels = (name, model if model in self._names else "")
        try:
            if self.held.num_requests > self.options.max_requests:
                raise Busy(f"{self.options.max_requests} requests are being answered, the most that are taken")
            response = await answer(request)
            _check_held(self.held.num_bytes - request.num_bytes, len(response.body), self.options, name)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            response = make_response(refusal_of(ClosedError(), name))
        except Exception as error:
            response = make_response(refusal_of(error, name))
        seconds, sent = time.perf_counter() - begin, len(response.body)
        self.metrics.add(labels, response.status_code, seconds, request.num_bytes, sent)
        self.held.add(0, sent - request.num_bytes)
        request.num_bytes = sent
        return response

    async def send(self, response: Response, send: Send) -> None:
        """Sends in pieces, each when the client has taken most of those before."""
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        body = response.body
        for begin in range(0, max(1, len(body)), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            await send({"type": "http.response.body", "body": body[begin:end], "more_body": end < len(body)})

    async def _ask(self, kind: Lookups | Predictions, request: _Request) -> Response:
        model, options = self._model(request, kind.op), self.options
        if isinstance(kind, Predictions) and model.inputs is None:
            message = f'predict: model "{model.name}" has tables only, no dense_file; use lookup.'
            raise Refusal(404, "no_predict", message)
        given, wanted = formats(request, kind.op)
        body = await self._body(request, self._most_bytes(kind, model, given))
        try:
            async with asyncio.timeout(options.timeout_s) as limit:
                return await self._answer(kind, model, body, given, wanted)
        except TimeoutError:
            if not limit.expired():  # raised by the session
                raise
            raise Refusal(504, "timeout", f"{kind.op}: no answer within {options.timeout_s:g} s.") from None

    async def _answer(self, kind: Lookups | Predictions, model: Any, body: bytes, given: str, wanted: str) -> Response:
        options = self.options
        payload = await self.off_loop(len(body), kind.read, body, given, model)
        if isinstance(kind, Lookups):  # its bytes are known before it is made
            arrays = payload.arrays.items()
            num_values = sum(wire.extent(array.shape) * model.tables[name].dim for name, array in arrays)
            _check_response(num_values, 4 * num_values, wanted, options, kind.op)
        arrays, version = await self.submit(kind, model, payload)
        num_values = sum(wire.extent(array.shape) for array in arrays.values())
        num_bytes = sum(wire.extent(array.shape) * array.itemsize for array in arrays.values())
        _check_response(num_values, num_bytes, wanted, options, kind.op)
        about = {"model": model.name, "version": version}
        work = functools.partial(wire.tensors_body, arrays, {**about, "version": str(version)})
        if wanted == "json":
            work = functools.partial(wire.json_body, kind.field, arrays, about)
        return Response(await self.off_loop(num_bytes, work), media_type=wire.MEDIA_TYPES[wanted])

    async def submit(self, kind: Lookups | Predictions, model: Any, payload: ParsedRequest) -> tuple[Arrays, int]:
        """Lets a request share a call of the session; gives its arrays, and their version."""
        batcher = self._batchers.get((kind.op, model.name)) or self._batcher(kind, model)
        return await batcher.submit(payload, payload.costs)

    def _model(self, request: Request, op: str) -> Any:
        name, models = request.path_params["model"], self.session.models
        if name not in models:
            raise UnknownModelError.of(op, name[:80], models)
        return models[name]

    def _most_bytes(self, kind: Lookups | Predictions, model: Any, given: str) -> int:
        return min(self.options.max_body_bytes, wire.body_bytes(given, *kind.most_values(model)))

    async def _body(self, request: _Request, most: int) -> bytes:
        """Reads the body, and refuses it as soon as it is too long."""
        options = self.options
        declared = int(request.headers.get("content-length", "0"))
        if declared > most:
            # A client that asks before it sends is refused now.
            if "100-continue" not in request.headers.get("expect", "").lower():
                await discard(request, options)
            raise Refusal(413, "too_large", _too_large(f"{declared} bytes", most), CLOSE)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(options.body_timeout_s):
                async for part in request.stream():
                    parts.append(part)
                    request.num_bytes += len(part)
                    self.held.add(0, len(part))
                    is_long, is_much = request.num_bytes > most, self.held.num_bytes > options.max_held_bytes
                    if is_long or is_much:
                        parts.clear()
                        await discard(request, options)
                        if is_long:
                            raise Refusal(413, "too_large", _too_large("more", most), CLOSE)
                        raise Busy(f"requests hold {options.max_held_bytes} bytes, the most that are held", CLOSE)
        except TimeoutError:
            message = f"body: it did not arrive within {options.body_timeout_s:g} s."
            raise Refusal(408, "body_timeout", message, CLOSE) from None
        return b"".join(parts)

    async def off_loop(self, num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """Runs the work, in a thread if its body is large."""
        if num_bytes <= _INLINE_BYTES:
            return work(*arguments)
        if self._bodies is None:
            raise ClosedError
        return await asyncio.get_running_loop().run_in_executor(self._bodies, work, *arguments)

    def _pool(self, num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
        self._pools.append(concurrent.futures.ThreadPoolExecutor(num_threads, name))
        return self._pools[-1]

    def _batcher(self, kind: Lookups | Predictions, model: Any) -> Batcher[ParsedRequest, Any]:
        if self._bodies is None:
            raise ClosedError
        labels = kind.op, model.name

        async def call(payloads: Sequence[ParsedRequest]) -> Results:
            with self._lock:
                self.num_running += 1
            try:
                return await kind.run(model.name, payloads)
            finally:
                with self._lock:
                    self.num_running -= 1

        # Threads for each model, so that a slow model delays no other.
        pool = None if kind.is_remote else self._pool(self.options.num_workers, "jaxsok-call")

        async def run(payloads: Sequence[ParsedRequest]) -> Results:
            if pool is None:
                return await call(payloads)
            return await asyncio.get_running_loop().run_in_executor(pool, lambda: finish(call(payloads)))

        def observe(payloads: Sequence[ParsedRequest], is_split: bool) -> None:
            self.metrics.batch_requests.labels(*labels).observe(sum(payload.num_requests for payload in payloads))
            self.metrics.batch_size.labels(*labels).observe(sum(payload.size for payload in payloads))
            self.metrics.splits.labels(*labels).inc(is_split)

        self._batchers[labels] = Batcher(
            run,
            {"": model.max_batch_size, **model.max_keys},  # by the names of `ParsedRequest.costs`
            max_delay_s=self.options.max_delay_ms / 1000,
            num_workers=self.options.num_workers,
            observe=None if kind.is_remote else observe,  # counted where the calls are made
            observe_depth=self.metrics.depth.labels(*labels).set,
        )
        return self._batchers[labels]

    async def _models(self, request: _Request) -> Response:
        found = [{"name": name, "version": int(model.version)} for name, model in self.session.models.items()]
        return JSONResponse({"models": found})

    async def _model_page(self, request: _Request) -> Response:
        model, options = self._model(request, "model"), self.options
        tables = {
            name: {
                "dim": table.dim,
                "default": float(table.default) if table.initial is None else str(table.initial),
                "row_dtype": str(table.dtype),
                "num_rows": int(model.num_rows[name]),
                "max_keys": int(model.max_keys[name]),
            }
            for name, table in model.tables.items()
        }
        page = {
            "name": model.name,
            "version": int(model.version),
            "tables": tables,
            "inputs": model.inputs and {name: input_to_json(spec) for name, spec in model.inputs.items()},
            "limits": {
                "max_batch_size": model.max_batch_size,
                "max_keys": options.max_keys,
                "max_body_bytes": {
                    kind.op: {name: self._most_bytes(kind, model, given) for given, name in wire.MEDIA_TYPES.items()}
                    for kind in self.kinds.values()
                    if kind.op == "lookup" or model.inputs is not None
                },
                "max_json_values": options.max_json_values,
                "max_response_bytes": options.max_response_bytes,
            },
            "formats": list(wire.MEDIA_TYPES.values()),
        }
        return JSONResponse(page)

    async def _readyz(self, request: Request) -> Response:
        if not self.is_ready:
            return make_response(refusal_of(ClosedError(), "readyz"))
        return JSONResponse({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        text = await (self.session.scrape() if self._is_front_end else asyncio.to_thread(self.metrics.text))
        return Response(text, headers={"Content-Type": self.metrics.content_type})

    def _stats(self) -> dict[str, dict[str, Any]]:
        found = {}
        for name, model in self.session.models.items():
            try:
                found[name] = {**self.session.stats(name), "version": model.version}
            except Exception as error:  # a model that is closed meanwhile must not fail the scrape
                _log.warning("metrics: model %s tells nothing: %s", name, error)
        return found


def _check_response(num_values: int, num_bytes: int, wanted: str, options: ServerOptions, op: str) -> None:
    if num_bytes > options.max_response_bytes:
        most = f"at most {options.max_response_bytes} are made"
        raise RequestTooLargeError(f"{op}: the response has {num_bytes} bytes, {most}; ask for less.")
    if wanted == "json" and num_values > options.max_json_values:
        most = f"JSON is made of at most {options.max_json_values}; ask for it with Accept: {wire.TENSORS}"
        raise RequestTooLargeError(f"{op}: the response has {num_values} numbers, {most}.")


def _check_held(held_bytes: int, num_bytes: int, options: ServerOptions, op: str) -> None:
    """Refuses a response that would exceed `max_held_bytes` with the others; one of a single piece always passes."""
    if num_bytes <= _PIECE_BYTES:
        return
    if num_bytes > options.max_held_bytes:
        most = f"at most {options.max_held_bytes} are held"
        raise RequestTooLargeError(f"{op}: the response has {num_bytes} bytes, {most}; ask for less.")
    if held_bytes + num_bytes > options.max_held_bytes:
        raise Busy(f"requests hold {options.max_held_bytes} bytes, the most that are held")


def send_limit_s(num_bytes: int, options: ServerOptions) -> float:
    """Limits the time to send a response: a client that reads piece by piece would hold its bytes for hours."""
    return options.send_timeout_s + num_bytes / options.min_send_rate


def _too_large(got: str, most: int) -> str:
    why = "the model's keys and inputs need no more, or --max-body-bytes"
    return f"body: got {got}, at most {most} bytes are taken: {why}."


async def discard(request: Request, options: ServerOptions) -> None:
    """Reads on for a while: otherwise a client that still sends sees a reset before it reads the answer."""
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: all of it was read
        async with asyncio.timeout(DISCARD_S):
            num_bytes = 0
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > 4 * options.max_body_bytes:
                    return
