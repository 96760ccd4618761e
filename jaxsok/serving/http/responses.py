"""Responses in JSON, and refusals: `{"error": {"code", "message"}}`. The log has the reason of internal errors."""

import logging
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxsok.serving import errors
from jaxsok.serving.http import wire
from jaxsok.serving.http.batching import ClosedError

_log = logging.getLogger(__name__)

_STATUSES: dict[type, tuple[int, str]] = {  # the first that fits
    errors.UnknownModelError: (404, "unknown_model"),
    errors.UnknownTableError: (404, "unknown_table"),
    errors.RequestTooLargeError: (413, "too_large"),
    errors.ServingError: (400, "bad_request"),
}
CLOSE: Mapping[str, str] = {"Connection": "close"}  # for a response before the request was read


class Refusal(Exception):
    """An error that becomes a response with its own status."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


class Busy(Refusal):
    """The error of too many requests at one time; the client may try again."""

    def __init__(self, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(503, "busy", f"{why}; ask again later.", {"Retry-After": "1", **(headers or {})})


def make_response(refusal: Refusal) -> Response:
    error = {"code": refusal.code, "message": str(refusal)}
    return JSONResponse({"error": error}, refusal.status, refusal.headers)


def refusal_of(error: Exception, op: str) -> Refusal:
    """Makes the refusal of an error: a client's own error with its reason, an internal one without."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ClientDisconnect):
        return Refusal(499, "client_closed", "the client left")
    if isinstance(error, errors.DatabaseError):
        _log.error("%s: %s", op, error)
        return Refusal(503, "database", f"{op}: a database does not answer; ask again later.", {"Retry-After": "1"})
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            return Refusal(status, code, str(error))
    if isinstance(error, ClosedError):
        return Refusal(503, "stopping", f"{op}: the server stops.", CLOSE)
    _log.error("%s failed", op, exc_info=error)
    return Refusal(500, "internal", f"{op}: failed in the server, for no fault of the request; its log has the reason.")


async def http_error(request: Request, error: Exception) -> Response:
    """Answers where no route matches."""
    status = getattr(error, "status_code", 500)
    code, message = {
        404: ("not_found", "there is nothing at this path."),
        405: ("method_not_allowed", f"this path does not take {request.method[:20]}."),
    }.get(status, ("refused", "the request was refused."))
    return make_response(Refusal(status, code, message, getattr(error, "headers", None)))


def formats(request: Request, op: str) -> tuple[str, str]:
    """Chooses the formats of the body and of the response; raises a Refusal of 415 or 406."""
    content_type, refused_type = request.headers.get("content-type"), (415, "unsupported_media_type")
    given = wire.media_type_of(content_type)
    if given is None:
        wanted = " or ".join(wire.MEDIA_TYPES.values())
        raise Refusal(*refused_type, f"{op}: got Content-Type {wire.brief(content_type)}, wanted {wanted}.")
    for name, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        encoding = request.headers.get(name, plain).strip().lower()
        if encoding != plain:
            raise Refusal(*refused_type, f"{op}: got {name} {wire.brief(encoding)}, wanted {plain}, or none.")
    wanted = wire.choose_format(",".join(request.headers.getlist("accept")), given)
    if wanted is None:
        message = f"{op}: Accept allows neither {' nor '.join(wire.MEDIA_TYPES.values())}."
        raise Refusal(406, "not_acceptable", message)
    return given, wanted
