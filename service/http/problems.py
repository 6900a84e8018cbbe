"""Error class to status and name: the only place with status codes. `service.http.dialects` gives them their shape."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final
from urllib.parse import unquote

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from mlcd.collections.items import check_name
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    Conflict,
    DeadlineExceeded,
    DiskFull,
    Diverged,
    ImageRejected,
    InvalidInput,
    MlcdError,
    NotFound,
    Overloaded,
    TooManyOpenFiles,
    Unavailable,
)
from service.http.dialects.dialect import Refusal, dialect_of
from service.telemetry.faults import places

_log = logging.getLogger("mlcd.service")


class BadRequest(InvalidInput):
    """The request itself is malformed: body, parameter or encoding."""

    def __init__(self, message: str, *, remedy: str | None = None, param: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class TooLarge(InvalidInput):
    """A limit of /v1/info is exceeded."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message, remedy=f"the limit {limit} is stated in /v1/info")
        self.limit = limit


class TooSlow(InvalidInput):
    """A body comes so slowly that it would hold its place for nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="send the request again over a better connection")
        self.headers = {"Connection": "close"}


class Misdirected(InvalidInput):
    """The Host header names a server that this one is not known as."""


class ForeignOrigin(MlcdError):
    """A web page of another origin has its visitor's browser ask a server that knows no keys."""


class NotAcceptable(InvalidInput):
    """The Accept header asks for what this route cannot give."""


class Unsupported(InvalidInput):
    """The body is of a media type that this route does not take."""


class Unauthorized(MlcdError):
    """No key, or none that the server knows as valid; shown: one was sent."""

    def __init__(self, message: str, *, remedy: str, shown: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        # RFC 6750: which scheme, and what is wrong with what came.
        self.headers = {"WWW-Authenticate": 'Bearer realm="mlcd"' + (', error="invalid_token"' if shown else "")}


class Forbidden(MlcdError):
    """The key is valid and its scopes do not reach so far."""

    def __init__(self, scope: str) -> None:
        super().__init__(f"the API key lacks the scope {scope}", remedy="use one that has it")
        self.headers = {"WWW-Authenticate": f'Bearer realm="mlcd", error="insufficient_scope", scope="{scope}"'}


class OutsideRoots(MlcdError):
    """A job names a place that jobs may not use; whether there is anything is not told."""

    def __init__(self, param: str) -> None:
        super().__init__(
            f"the {param} is not in a folder that jobs may use", remedy="the server's MLCD_JOBS__ROOTS says which"
        )
        self.param = param


class RecordDamaged(ArtifactInvalid):
    """What is kept of one job is not what was written; the others are sound. Its text names no file."""

    def __init__(self) -> None:
        super().__init__("the job queue holds something that is no job", remedy="DELETE of that job removes it")


class RateExceeded(Overloaded):
    """The key has sent as many images as it may for now."""

    def __init__(self, rate: int, *, retry_after_s: int) -> None:
        super().__init__(
            f"the API key is over its rate of {rate} images a minute", remedy=f"come back in {retry_after_s} s"
        )
        self.headers = {"Retry-After": str(retry_after_s)}


class StrictBatch(InvalidInput):
    """One image of a batch failed on a route that knows no partial answer."""

    def __init__(self, index: int, rejection: ImageRejected, *, param: str) -> None:
        super().__init__(f"image {index}: {rejection.message}", remedy=rejection.remedy)
        self.index, self.rejection = index, rejection
        self.param = param

    @classmethod
    def first_of(cls, errors: Mapping[int, ImageRejected], *, param: str = "input[{index}]") -> "StrictBatch":
        """param: the field's name in the client's own words."""
        index = min(errors)
        return cls(index, errors[index], param=param.format(index=index))


STATUS: Final[dict[type[MlcdError], int]] = {
    BadRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    ForeignOrigin: 403,
    OutsideRoots: 403,
    NotFound: 404,
    NotAcceptable: 406,
    TooSlow: 408,
    Conflict: 409,
    TooLarge: 413,
    Unsupported: 415,
    Misdirected: 421,
    InvalidInput: 422,
    RateExceeded: 429,
    Overloaded: 429,
    Unavailable: 503,
    DiskFull: 503,
    TooManyOpenFiles: 503,
    DeadlineExceeded: 504,
    # Faults of the server's own configuration or artifacts; training's own error cannot happen here.
    ArtifactInvalid: 500,
    RecordDamaged: 500,
    ConfigInvalid: 500,
    Diverged: 500,
    MlcdError: 500,
}
_COLLECTION: Final = re.compile(rb"/v1/collections/([^/]+)")
_RECORD_DAMAGED: Final = "job-damaged"
_IMAGE_STATUS: Final = {"too-many-bytes": 413, "too-many-pixels": 413, "unsupported-format": 415}
_IMAGE_LIMIT: Final = {"too-many-bytes": "max_body_bytes", "too-many-pixels": "max_pixels"}
_UNPROCESSABLE: Final = 422
_SERVER_FAULT: Final = 500
COMES_BACK: Final = (429, 503)
"""Statuses after which a client should try again; with Retry-After."""
TITLES: Final = {
    400: "Malformed request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    408: "Request timeout",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    421: "Misdirected request",
    422: "Cannot be processed",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
    504: "Deadline exceeded",
}
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_BRANCHES: Final = ("str", "int", "float", "bool")
_OTHER_FAULT: Final = "is not what it can be"
# What pydantic finds wrong, in our words: its own may hold what the client sent.
_FAULTS: Final = {
    "missing": "is required",
    "extra_forbidden": "is not known here",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def status_of(error: MlcdError) -> int:
    if isinstance(error, StrictBatch):
        return status_of(error.rejection)
    if isinstance(error, ImageRejected):
        return _IMAGE_STATUS.get(error.reason, _UNPROCESSABLE)
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def item_error(index: int, error: InvalidInput) -> dict[str, Any]:
    """One entry of `errors` in a batch answer; of what is no image, the type is the name of its status."""
    status = status_of(error)
    return {
        "index": index,
        "type": error.reason if isinstance(error, ImageRejected) else name_of(status),
        "title": TITLES[status],
        "detail": str(error),
    }


def name_of(status: int) -> str:
    """Stable: what programs may compare."""
    return TITLES.get(status, "Error").lower().replace(" ", "-")


def bad_field(errors: Iterable[Mapping[str, Any]]) -> BadRequest:
    """The first of pydantic's findings, naming the field and nothing that the client sent."""
    first = next(iter(errors))
    places = [part for part in first["loc"] if part not in ("body", "query", "path", "header")]
    # Of a union each branch has a finding of its own, under a name that is no field.
    field = list(takewhile(lambda part: isinstance(part, int) or _is_field(part), places))
    fault = _FAULTS.get(first["type"], _OTHER_FAULT) if len(field) == len(places) else _OTHER_FAULT
    param = ".".join(str(part) for part in field) or None
    return BadRequest(f"{param or 'a field'} {fault.format_map(first.get('ctx', {}))}", param=param)


def _is_field(part: str) -> bool:
    return part not in _BRANCHES and _FIELD.fullmatch(part) is not None


async def handle_mlcd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlcdError)
    status = status_of(error)
    if status >= _SERVER_FAULT and not isinstance(error, Unavailable):  # those are counted: load must not fill a log
        _log.error("request %s: %s (%s)", _request_id(request), error, places(error))
    # The text of a server fault names files and versions: that is for the log, not for the client.
    is_shown = status != _SERVER_FAULT or isinstance(error, RecordDamaged)
    detail = str(error) if is_shown else "the server is misconfigured; its log says how"
    refusal = replace(
        _refusal(request, status, detail), param=getattr(error, "param", None), limit=getattr(error, "limit", None)
    )
    if isinstance(error, RecordDamaged):
        refusal = replace(refusal, name=_RECORD_DAMAGED)
    if isinstance(error, StrictBatch):
        reason = error.rejection.reason
        refusal = replace(refusal, name=reason, index=error.index, limit=_IMAGE_LIMIT.get(reason))
    return _respond(refusal, getattr(error, "headers", None))


async def handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await handle_mlcd_error(request, bad_field(error.errors()))


async def handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if (wrong := misnamed(request)) is not None:
        return await handle_mlcd_error(request, wrong)
    details = {404: "there is no such route", 405: "this route does not take that method"}
    detail = details.get(error.status_code, "the request cannot be read")
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        headers = {"Allow": ", ".join(sorted(methods))}
    return _respond(_refusal(request, error.status_code, detail), headers)


def misnamed(request: Request) -> InvalidInput | None:
    """Returns the fault of a collection's name in the path as it came in; None where it has none.

    Routes are found by the decoded path, in which a name with a slash is two of its parts.
    """
    path = request.scope.get("raw_path", b"").partition(b"?")[0]
    if found := _COLLECTION.match(path):
        try:
            check_name(unquote(found[1].decode("latin-1")))
        except InvalidInput as error:
            return error
    return None


def _methods(request: Request) -> set[str]:
    """Of all routes at this path: the framework names those of one of them alone."""
    routes: list[Route] = request.app.state.routes
    return {
        method for route in routes if route.matches(request.scope)[0] != Match.NONE for method in route.methods or ()
    }


async def handle_unexpected(request: Request, error: Exception) -> Response:
    # Where it happened and not what the library said: that text may hold what the client sent.
    _log.error("request %s failed: %s (%s)", _request_id(request), type(error).__name__, places(error))
    return _respond(_refusal(request, _SERVER_FAULT, "the server failed; its log knows where, under the request id"))


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


def _refusal(request: Request, status: int, detail: str) -> Refusal:
    return Refusal(
        status=status,
        name=name_of(status),
        title=TITLES.get(status, "Error"),
        detail=detail,
        instance=request.url.path,
        request_id=_request_id(request),
    )


def _respond(refusal: Refusal, headers: dict[str, str] | None = None) -> Response:
    dialect = dialect_of(refusal.instance)
    headers = {"X-Request-Id": refusal.request_id, **(headers or {})}
    return Response(orjson.dumps(dialect.render(refusal)), dialect.status(refusal.status), headers, dialect.media_type)
