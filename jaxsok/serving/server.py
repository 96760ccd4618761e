"""HTTP over a session: lookups and predictions, what is served, health, metrics; docs/server.md tells the formats.

Fed by clients, none of whom is trusted: sizes are bounded while they are read, every input is checked before it joins
a batch, and nothing that a client sends names a file. Updates come from the operator (watch.py). The event loop reads,
checks and answers small bodies; what asks the session, and bodies that take time, run in threads.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxsok.serving import wire
from jaxsok.serving.batching import Batcher, ClosedError, QueueFullError
from jaxsok.serving.errors import (
    RequestError,
    RequestTooLargeError,
    ServingError,
    UnknownModelError,
    UnknownTableError,
)
from jaxsok.serving.metrics import Metrics
from jaxsok.serving.watch import Watcher, require_folder

__all__ = ["App", "ServerOptions", "Uvicorn", "bind", "require_folder", "serve"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_INLINE_BYTES = 1 << 15
"""Bodies up to this are read and made on the event loop: a thread would cost more than the work."""
_MAX_HEAD_BYTES = 1 << 16
_DISCARD_S = 2.0
"""How long the rest of a refused body is read, so that the client reads the answer, not a closed connection."""


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """What a server takes at most, and how long it waits."""

    max_delay_ms: float = 2.0
    """A request waits so long for others to share its call."""
    max_body_bytes: int = 16 << 20
    """Of one request."""
    max_held_bytes: int = 512 << 20
    """Bodies of all requests that are not answered."""
    max_requests: int = 256
    """Requests that are not answered."""
    max_keys: int = 1 << 20
    """Keys of one request, over all its tables; the model's own limits by table hold as well."""
    max_json_values: int = 1 << 22
    """Numbers in one JSON response; the binary format has no such limit."""
    body_timeout_s: float = 15.0
    """For the body to arrive."""
    timeout_s: float = 30.0
    """For the session to answer, the time in the queue included."""
    num_workers: int = 2
    """Calls of the session at the same time, by model and endpoint."""
    drain_s: float = 0.0
    """After a signal: still takes requests, while /readyz says that it will not."""
    shutdown_s: float = 30.0
    """After that: finishes what it took; then it is cut off."""

    def __post_init__(self) -> None:
        """Refuses numbers that would take nothing."""
        for field in dataclasses.fields(self):
            value, may_be_zero = getattr(self, field.name), field.name in ("max_delay_ms", "drain_s")
            if not (value >= 0 if may_be_zero else value > 0) or not math.isfinite(value):
                option, wanted = field.name.replace("_", "-"), "0 or more" if may_be_zero else "a number above 0"
                raise ValueError(f"serve: --{option}: got {value}, wanted {wanted}.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ServerOptions":
        """Those of the command line; what is None, or not there, is as by default.

        Example:
          >>> ServerOptions.of({"max_keys": 7, "timeout_s": None, "port": 80}).max_keys
          7
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names and value is not None})


class _Refusal(Exception):
    """A response that is an error."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclasses.dataclass
class _Taken:
    """What a request that was taken holds."""

    num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Samples:
    """The inputs of one predict request."""

    inputs: Mapping[str, np.ndarray | wire.Ragged]
    num_samples: int


class App:
    """The ASGI application over one session, with its batchers, threads and counters.

    `App(session).asgi` runs under any ASGI server; `serve` runs it under uvicorn.
    """

    def __init__(
        self,
        session: Any,
        options: ServerOptions | None = None,
        *,
        watch: str | os.PathLike[str] | None = None,
        watch_interval_s: float = 2.0,
    ) -> None:
        """Nothing runs before the application's lifespan begins; the session is closed when it ends.

        Args:
          session: what `jaxsok.serving.open` gives.
          options: limits and times.
          watch: a folder of exports and deltas, see `jaxsok.serving.watch`; those that are there are applied before the
            first request, those that appear as they come.
          watch_interval_s: between two looks.

        Raises:
          FileNotFoundError: no folder to watch.
        """
        self.session, self.options = session, options or ServerOptions()
        self.metrics = Metrics(self._stats, self._depths)
        self._watcher = None
        if watch is not None:
            self._watcher = Watcher(session, watch, interval_s=watch_interval_s, observe=self._count_watched)
        self.is_stopping = False
        self._taken: list[_Taken] = []
        self._held_bytes = 0
        self._batchers: dict[tuple[str, str], Batcher[Any, Any]] = {}
        self._running, self._lock = 0, threading.Lock()
        self._calls: concurrent.futures.ThreadPoolExecutor | None = None
        self._bodies: concurrent.futures.ThreadPoolExecutor | None = None
        self.asgi = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._endpoint("models", self._models)),
                Route("/v1/models/{model}", self._endpoint("model", self._model_page)),
                Route("/v1/models/{model}/lookup", self._endpoint("lookup", self._lookup), methods=["POST"]),
                Route("/v1/models/{model}/predict", self._endpoint("predict", self._predict), methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_error},
            lifespan=self._lifespan,
        )
        self.asgi.router.redirect_slashes = False

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._calls is not None and not self.is_stopping

    @property
    def num_running(self) -> int:
        """Calls of the session that have begun and not ended, also those that nobody waits for any more."""
        return self._running

    # Life ----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._calls = concurrent.futures.ThreadPoolExecutor(2 * self.options.num_workers, "jaxsok-call")
        self._bodies = concurrent.futures.ThreadPoolExecutor(2, "jaxsok-body")
        if self._watcher is not None:
            await asyncio.to_thread(self._watcher.look)
            self._watcher.start()
        self.metrics.is_ready.set(1)
        try:
            yield
        finally:
            await self._stop()

    async def _stop(self) -> None:
        self.stopping()
        closing = [batcher.close() for batcher in self._batchers.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing), self.options.shutdown_s)
        for pool in (self._calls, self._bodies):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._calls = self._bodies = None
        has_ended = self._watcher is None or await asyncio.to_thread(self._watcher.stop, self.options.shutdown_s)
        if has_ended and self._running == 0:  # else somebody uses it, and the process ends anyway
            await asyncio.to_thread(self.session.close)

    def stopping(self) -> None:
        """Readiness is false from now on."""
        self.is_stopping = True
        self.metrics.is_ready.set(0)

    # Around every endpoint -----------------------------------------------------------------------------------------

    def _endpoint(
        self, name: str, answer: Callable[[Request, _Taken], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            begin, taken = time.perf_counter(), _Taken()
            model = request.path_params.get("model", "")
            # A client may ask for any name; only those that exist become labels.
            labels = (name, model if model in self.session.models else "")
            is_taken = False
            try:
                if len(self._taken) >= self.options.max_requests:
                    raise _busy(f"{len(self._taken)} requests are being answered, the most that are taken")
                self._taken.append(taken)
                is_taken = True
                self.metrics.in_flight.set(len(self._taken))
                response = await answer(request, taken)
            except ClientDisconnect:
                response = _error(_Refusal(499, "client_closed", "the client left"))
            except asyncio.CancelledError:
                if not self.is_stopping:
                    raise
                response = _error(_Refusal(503, "stopping", f"{name}: cut off: the server stops.", _CLOSE))
            except Exception as error:
                response = _error(_refusal_of(error, name))
            finally:
                if is_taken:
                    self._taken.remove(taken)
                    self._held_bytes -= taken.num_bytes
                    self.metrics.in_flight.set(len(self._taken))
            self.metrics.requests.labels(*labels, str(response.status_code)).inc()
            self.metrics.latency.labels(*labels).observe(time.perf_counter() - begin)
            self.metrics.received.labels(*labels).inc(taken.num_bytes)
            self.metrics.sent.labels(*labels).inc(len(response.body))
            return response

        return call

    async def _body(self, request: Request, taken: _Taken) -> bytes:
        """All of it; refused as soon as it is too long."""
        options = self.options
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise _Refusal(
                415, "unsupported_media_type", f"body: got Content-Encoding {wire.brief(encoding)}, wanted none."
            )
        declared = int(request.headers.get("content-length", "0"))
        if declared > options.max_body_bytes:
            if "100-continue" not in request.headers.get("expect", "").lower():
                await _discard(request, options.max_body_bytes)
            raise _body_too_large(f"{declared} bytes", options)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(options.body_timeout_s):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    taken.num_bytes += len(part)
                    self._held_bytes += len(part)
                    if taken.num_bytes > options.max_body_bytes:
                        parts.clear()
                        await _discard(request, options.max_body_bytes) if more else None
                        raise _body_too_large("more", options)
                    if self._held_bytes > options.max_held_bytes:
                        parts.clear()
                        await _discard(request, options.max_body_bytes) if more else None
                        raise _busy(f"requests hold {options.max_held_bytes} bytes, the most that are held", _CLOSE)
        except TimeoutError:
            message = f"body: it did not arrive within {options.body_timeout_s:g} s."
            raise _Refusal(408, "body_timeout", message, _CLOSE) from None
        return b"".join(parts)

    async def _off_loop(self, num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """Runs it, in a thread if it has much to do."""
        if num_bytes <= _INLINE_BYTES:
            return work(*arguments)
        if self._bodies is None:
            raise ClosedError
        return await asyncio.get_running_loop().run_in_executor(self._bodies, functools.partial(work, *arguments))

    async def _submit(self, endpoint: str, model: Any, payload: Any, costs: Mapping[str, int]) -> Any:
        batcher = self._batchers.get((endpoint, model.name))
        if batcher is None:
            batcher = self._batchers[endpoint, model.name] = self._batcher(endpoint, model)
        try:
            return await asyncio.wait_for(batcher.submit(payload, costs), self.options.timeout_s)
        except TimeoutError:
            message = f"{endpoint}: no answer within {self.options.timeout_s:g} s."
            raise _Refusal(504, "timeout", message) from None

    def _batcher(self, endpoint: str, model: Any) -> Batcher[Any, Any]:
        if self._calls is None:
            raise ClosedError
        if endpoint == "lookup":
            run, limits = self._run_lookup, dict(model.max_keys)
        else:
            run, limits = self._run_predict, {"samples": model.max_batch_size}
        counted = self.metrics.batch_requests.labels(endpoint, model.name)
        sized = self.metrics.batch_size.labels(endpoint, model.name)
        splits = self.metrics.splits.labels(endpoint, model.name)

        def observe(payloads: Sequence[Any], is_split: bool) -> None:
            counted.observe(len(payloads))
            sized.observe(sum(map(_size_of, payloads)))
            splits.inc(is_split)

        return Batcher(
            functools.partial(self._counted, run, model.name),
            limits,
            executor=self._calls,
            max_delay_s=self.options.max_delay_ms / 1000,
            max_waiting=self.options.max_requests,
            num_workers=self.options.num_workers,
            observe=observe,
        )

    def _counted(
        self, run: Callable[[str, Sequence[Any]], list[Any]], model: str, payloads: Sequence[Any]
    ) -> list[Any]:
        with self._lock:
            self._running += 1
        try:
            return run(model, payloads)
        finally:
            with self._lock:
                self._running -= 1

    # Lookup --------------------------------------------------------------------------------------------------------

    async def _lookup(self, request: Request, taken: _Taken) -> Response:
        model = self._model(request, "lookup")
        given, wanted = _formats(request, "lookup")
        body = await self._body(request, taken)
        keys = await self._off_loop(len(body), self._read_lookup, body, given, model)
        if wanted == "json":
            num_values = sum(array.size * model.tables[name].dim for name, array in keys.items())
            self._check_json(num_values, "lookup")
        rows, version = await self._submit("lookup", model, keys, {name: array.size for name, array in keys.items()})
        return await self._reply(wanted, "rows", rows, model.name, version)

    def _read_lookup(self, body: bytes, given: str, model: Any) -> dict[str, np.ndarray]:
        op = "lookup"
        if given == "json":
            found: Mapping[str, Any] = wire.object_of(wire.read_json(body, op, ["keys"])["keys"], f"{op}: keys")
            read = wire.keys_from_json
        else:
            found, read = wire.read_tensors(body, op), wire.keys_from_tensor
            if not found:
                raise RequestError(f"{op}: got no tensor, wanted the keys of at least one table.")
        for name in found:
            if name not in model.tables:
                raise UnknownTableError.of(op, name[:80], model.tables, f'model "{model.name}"')
        keys = {name: read(value, f'{op}: keys of table "{name}"') for name, value in found.items()}
        for name, array in keys.items():
            limit = model.max_keys.get(name, self.options.max_keys)
            if array.size > limit:
                raise RequestTooLargeError(f'{op}: table "{name}": got {array.size} keys, at most {limit} are taken.')
        self._check_keys(sum(array.size for array in keys.values()), op)
        return keys

    def _run_lookup(self, model: str, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Any]:
        """All requests in one call of the session."""
        names = list(dict.fromkeys(name for request in requests for name in request))
        joined = {
            name: np.concatenate([request[name].reshape(-1) for request in requests if name in request])
            for name in names
        }
        answer = self.session.lookup(joined, model=model)
        rows = {name: np.asarray(answer[name], np.float32) for name in names}
        places = dict.fromkeys(names, 0)
        results = []
        for request in requests:
            parts = {}
            for name, keys in request.items():
                begin = places[name]
                places[name] = begin + keys.size
                parts[name] = rows[name][begin : places[name]].reshape(*keys.shape, rows[name].shape[-1])
            results.append((parts, answer.version))
        return results

    # Predict -------------------------------------------------------------------------------------------------------

    async def _predict(self, request: Request, taken: _Taken) -> Response:
        model = self._model(request, "predict")
        if model.inputs is None:
            raise _Refusal(
                404, "no_predict", f'predict: model "{model.name}" has tables only, no dense_file; use lookup.'
            )
        given, wanted = _formats(request, "predict")
        body = await self._body(request, taken)
        samples = await self._off_loop(len(body), self._read_predict, body, given, model)
        outputs, version = await self._submit("predict", model, samples, {"samples": samples.num_samples})
        if wanted == "json":
            self._check_json(sum(array.size for array in outputs.values()), "predict")
        return await self._reply(wanted, "outputs", outputs, model.name, version)

    def _read_predict(self, body: bytes, given: str, model: Any) -> _Samples:
        op, specs = "predict", model.inputs
        if given == "json":
            found: Mapping[str, Any] = wire.object_of(wire.read_json(body, op, ["inputs"])["inputs"], f"{op}: inputs")
        else:
            found = _with_ragged(wire.read_tensors(body, op), specs, op)
        for name in found:
            if name not in specs:
                raise RequestError(f"{op}: input: got {wire.brief(name)}, wanted {sorted(specs)}.")
        missing = sorted(set(specs) - set(found))
        if missing:
            raise RequestError(f"{op}: inputs: got none for {missing}, wanted {sorted(specs)}.")
        inputs, sizes, num_keys = {}, {}, 0
        for name, value in found.items():
            inputs[name] = array = _read_input(value, specs[name], given, f'{op}: input "{name}"')
            sizes[name] = len(array.lengths if isinstance(array, wire.Ragged) else array)
            if _has_keys(specs[name]):
                num_keys += (array.values if isinstance(array, wire.Ragged) else array).size
        if len(set(sizes.values())) > 1:
            raise RequestError(f"{op}: inputs must have one number of samples, got {sizes}.")
        num_samples = next(iter(sizes.values()))
        if num_samples > model.max_batch_size:
            raise RequestTooLargeError(f"{op}: got {num_samples} samples, at most {model.max_batch_size} are taken.")
        if num_samples == 0:
            raise RequestError(f"{op}: got 0 samples, wanted at least 1.")
        self._check_keys(num_keys, op)
        return _Samples(inputs, num_samples)

    def _run_predict(self, model: str, requests: Sequence[_Samples]) -> list[Any]:
        """Requests whose samples have the same shape in one call of the session."""
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_signature(request), []).append(number)
        results: list[Any] = [None] * len(requests)
        for numbers in groups.values():
            for number, result in zip(
                numbers, self._predict_joined(model, [requests[i] for i in numbers]), strict=True
            ):
                results[number] = result
        return results

    def _predict_joined(self, model: str, requests: Sequence[_Samples]) -> list[Any]:
        joined = {name: _join([request.inputs[name] for request in requests]) for name in requests[0].inputs}
        answer = self.session.predict(joined, model=model)
        outputs = {name: np.asarray(value) for name, value in answer.items()}
        outputs = {
            name: value
            if value.dtype in (np.float32, np.float64) or value.dtype.kind in "iu"
            else value.astype(np.float32)
            for name, value in outputs.items()
        }
        if len(requests) == 1:
            return [(outputs, answer.version)]
        total = sum(request.num_samples for request in requests)
        for name, value in outputs.items():
            if value.ndim == 0 or len(value) != total:
                raise ValueError(f'predict: output "{name}" is {value.shape} for {total} samples: it cannot be split.')
        results, begin = [], 0
        for request in requests:
            end = begin + request.num_samples
            results.append(({name: value[begin:end] for name, value in outputs.items()}, answer.version))
            begin = end
        return results

    # What is served ------------------------------------------------------------------------------------------------

    async def _models(self, request: Request, taken: _Taken) -> Response:
        found = [{"name": name, "version": int(model.version)} for name, model in self.session.models.items()]
        return _json(200, {"models": found})

    async def _model_page(self, request: Request, taken: _Taken) -> Response:
        model, options = self._model(request, "model"), self.options
        tables = {
            name: {"dim": table.dim, "default": float(table.default), "row_dtype": str(table.dtype)}
            for name, table in model.tables.items()
        }
        for name, num_rows in dict(getattr(model, "num_rows", None) or {}).items():
            tables[name]["num_rows"] = int(num_rows)
        for name, limit in model.max_keys.items():
            tables[name]["max_keys"] = int(limit)
        inputs = None if model.inputs is None else {name: _told(spec) for name, spec in model.inputs.items()}
        limits = {
            "max_batch_size": model.max_batch_size,
            "max_keys": options.max_keys,
            "max_body_bytes": options.max_body_bytes,
            "max_json_values": options.max_json_values,
        }
        rest = {"tables": tables, "inputs": inputs, "limits": limits, "formats": list(wire.MEDIA_TYPES)}
        return _json(200, {"name": model.name, "version": int(model.version), **rest})

    async def _healthz(self, request: Request) -> Response:
        return _json(200, {"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        if self.is_ready:
            return _json(200, {"status": "ready"})
        return _error(_Refusal(503, "stopping", "the server stops."))

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, headers={"Content-Type": self.metrics.content_type})

    def _stats(self) -> dict[str, dict[str, Any]]:
        found = {}
        for name, model in self.session.models.items():
            try:
                found[name] = {**self.session.stats(name), "version": model.version}
            except Exception as error:  # one that is closed meanwhile spoils no scrape
                _log.warning("metrics: model %s tells nothing: %s", name, error)
        return found

    def _count_watched(self, model: str, result: str) -> None:
        self.metrics.watched.labels(model, result).inc()

    def _depths(self) -> dict[tuple[str, str], int]:
        return {labels: batcher.num_waiting for labels, batcher in list(self._batchers.items())}

    # Parts ---------------------------------------------------------------------------------------------------------

    def _model(self, request: Request, op: str) -> Any:
        name = request.path_params["model"]
        model = self.session.models.get(name)
        if model is None:
            raise UnknownModelError.of(op, name[:80], self.session.models)
        return model

    def _check_keys(self, num_keys: int, op: str) -> None:
        if num_keys > self.options.max_keys:
            raise RequestTooLargeError(f"{op}: got {num_keys} keys, at most {self.options.max_keys} are taken.")

    def _check_json(self, num_values: int, op: str) -> None:
        if num_values > self.options.max_json_values:
            raise RequestTooLargeError(
                f"{op}: the response has {num_values} numbers, JSON is made of at most {self.options.max_json_values}; "
                f"ask for it with Accept: {wire.TENSORS}."
            )

    async def _reply(
        self, wanted: str, name: str, arrays: Mapping[str, np.ndarray], model: str, version: int
    ) -> Response:
        num_bytes = sum(array.nbytes for array in arrays.values())
        if wanted == "json":
            rest = {"model": model, "version": int(version)}
            body = await self._off_loop(num_bytes, wire.json_body, name, arrays, rest)
            return Response(body, media_type=wire.JSON)
        metadata = {"model": model, "version": str(int(version))}
        body = await self._off_loop(num_bytes, wire.tensors_body, arrays, metadata)
        return Response(body, media_type=wire.TENSORS)


# Inputs of predict -----------------------------------------------------------------------------------------------


def _has_keys(spec: Any) -> bool:
    return spec.table is not None


def _read_input(value: Any, spec: Any, given: str, what: str) -> np.ndarray | wire.Ragged:
    if _has_keys(spec):
        if isinstance(value, wire.Ragged):
            return value
        if isinstance(value, dict):
            return wire.ragged_from_json(value, what)
        array = wire.keys_from_json(value, what) if given == "json" else wire.keys_from_tensor(value, what)
    else:
        array = wire.floats_from_json(value, what) if given == "json" else wire.floats_from_tensor(value, what)
    wanted = spec.shape
    if len(wanted) != array.ndim or any(
        isinstance(size, int) and size != got for size, got in zip(wanted, array.shape, strict=True)
    ):
        told = ", ".join("any" if not isinstance(size, int) else str(size) for size in wanted)
        raise RequestError(f"{what}: got shape {list(array.shape)}, wanted [{told}].")
    return array


def _with_ragged(found: Mapping[str, np.ndarray], specs: Mapping[str, Any], op: str) -> dict[str, Any]:
    """Tensors "x.values" and "x.lengths" become the ragged input "x"."""
    made: dict[str, Any] = dict(found)
    for name in specs:
        values, lengths = f"{name}.values", f"{name}.lengths"
        if values in made and lengths in made and name not in made and _has_keys(specs[name]):
            what = f'{op}: input "{name}"'
            keys = wire.keys_from_tensor(made.pop(values), f"{what}.values")
            made[name] = wire.ragged(keys, wire.keys_from_tensor(made.pop(lengths), f"{what}.lengths"), what)
    return made


def _signature(samples: _Samples) -> Any:
    return tuple(
        (name, "ragged" if isinstance(value, wire.Ragged) else value.shape[1:])
        for name, value in sorted(samples.inputs.items())
    )


def _join(values: Sequence[Any]) -> Any:
    if isinstance(values[0], wire.Ragged):
        return wire.Ragged(
            np.concatenate([value.values for value in values]), np.concatenate([value.lengths for value in values])
        )
    return np.concatenate(values)


def _size_of(payload: Any) -> int:
    if isinstance(payload, _Samples):
        return payload.num_samples
    return sum(array.size for array in payload.values())


def _told(spec: Any) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else None for size in spec.shape]
    return {"shape": shape, "table": spec.table}


# Responses -------------------------------------------------------------------------------------------------------

_CLOSE = {"Connection": "close"}


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(body, status, headers=dict(headers or {}), media_type=wire.JSON)


def _error(refusal: _Refusal) -> Response:
    error = {"code": refusal.code, "message": str(refusal)}
    return _json(refusal.status, {"error": error}, refusal.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What no route takes."""
    status = getattr(error, "status_code", 500)
    code, message = {
        404: ("not_found", "there is nothing at this path; docs/server.md has those that exist."),
        405: ("method_not_allowed", f"this path does not take {request.method[:20]}."),
    }.get(status, ("refused", "the request was refused."))
    return _error(_Refusal(status, code, message, getattr(error, "headers", None)))


def _refusal_of(error: Exception, op: str) -> _Refusal:
    """What a client is told of an error: its own ones in words, of ours that there was one."""
    if isinstance(error, _Refusal):
        return error
    for kind, status, code in (
        (UnknownModelError, 404, "unknown_model"),
        (UnknownTableError, 404, "unknown_table"),
        (RequestTooLargeError, 413, "too_large"),
        (ServingError, 400, "bad_request"),
    ):
        if isinstance(error, kind):
            return _Refusal(status, code, str(error))
    if isinstance(error, QueueFullError):
        return _busy("the queue of this model is full")
    if isinstance(error, ClosedError):
        return _Refusal(503, "stopping", f"{op}: the server stops.", _CLOSE)
    _log.error("%s failed", op, exc_info=error)
    return _Refusal(
        500, "internal", f"{op}: failed in the server, for no fault of the request; its log has the reason."
    )


def _busy(why: str, headers: Mapping[str, str] | None = None) -> _Refusal:
    return _Refusal(503, "busy", f"{why}; ask again later.", {"Retry-After": "1", **(headers or {})})


def _body_too_large(got: str, options: ServerOptions) -> _Refusal:
    message = f"body: got {got}, at most {options.max_body_bytes} bytes are taken."
    return _Refusal(413, "too_large", message, _CLOSE)


async def _discard(request: Request, max_bytes: int) -> None:
    """Reads on for a while: a client that still sends would see its connection reset before it reads an answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            num_bytes = 0
            while num_bytes <= 4 * max_bytes:
                message = await request.receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _formats(request: Request, op: str) -> tuple[str, str]:
    """The format of the body, and that of the response."""
    content_type = request.headers.get("content-type")
    given = wire.media_type_of(content_type)
    if given is None:
        wanted = " or ".join(wire.MEDIA_TYPES)
        message = f"{op}: got Content-Type {wire.brief(content_type)}, wanted {wanted}."
        raise _Refusal(415, "unsupported_media_type", message)
    wanted = wire.accepted(",".join(request.headers.getlist("accept")), given)
    if wanted is None:
        message = f"{op}: Accept allows neither {' nor '.join(wire.MEDIA_TYPES)}."
        raise _Refusal(406, "not_acceptable", message)
    return given, wanted


# Running ---------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything is loaded; port 0: any that is free.

    Raises:
      OSError: the address is taken, or not of this machine.

    Example:
      >>> with bind("127.0.0.1", 0) as found:
      ...     found.getsockname()[0]
      '127.0.0.1'
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"serve: {host}:{port}: {error.strerror}; give another --host or --port.") from None
    return made


def serve(
    app: App,
    where: socket.socket,
    *,
    access_log: bool = False,
    on_ready: Callable[["Uvicorn"], None] | None = None,
) -> None:
    """Answers until SIGTERM, SIGINT or `Uvicorn.stop`; then finishes what it took and closes the session.

    Args:
      app: over a session.
      where: of `bind`.
      access_log: a line for each request, by the logger "uvicorn.access".
      on_ready: called when connections are accepted.
    """
    Uvicorn(app, where, access_log=access_log, on_ready=on_ready).run()


class Uvicorn(uvicorn.Server):
    """uvicorn, with readiness that goes first and signals that end `run`, not the process."""

    def __init__(
        self,
        app: App,
        where: socket.socket,
        *,
        access_log: bool = False,
        on_ready: Callable[["Uvicorn"], None] | None = None,
    ) -> None:
        """Declares; `run` runs."""
        self.app, self.where, self._on_ready = app, where, on_ready
        config = uvicorn.Config(
            app.asgi,
            # h11 bounds the bytes of a request's head, httptools does not.
            http="h11",
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

    @property
    def address(self) -> str:
        """`http://host:port`, with the port that was found."""
        host, port = self.where.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all is closed."""
        super().run(sockets or [self.where])

    def stop(self) -> None:
        """As a signal does; from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes note; the loop sees it within 0.1 s. A second SIGINT does not wait for requests."""
        self.app.is_stopping = True  # no more than this: a signal may come while a lock is held
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, then tells."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Not ready, drains, then closes."""
        self.app.stopping()
        await asyncio.sleep(self.app.options.drain_s)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end `run`: uvicorn raises a signal again when it has ended, which would kill the process before it says so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
