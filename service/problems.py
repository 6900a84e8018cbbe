"""Error class to status and body: the only place with status codes.

Own routes speak RFC 9457 (`application/problem+json`), the OpenAI route speaks OpenAI's shape.
"""

import logging
from typing import Any, Final

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    Conflict,
    DeadlineExceeded,
    Diverged,
    ImageRejected,
    InvalidInput,
    MlcdError,
    NotFound,
    Overloaded,
    Unavailable,
)

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


class NotAcceptable(InvalidInput):
    """The Accept header asks for what this route cannot give."""


class Unsupported(InvalidInput):
    """The body is of a media type that this route does not take."""


class StrictBatch(InvalidInput):
    """One image of a batch failed on a route that knows no partial answer."""

    def __init__(self, index: int, rejection: ImageRejected) -> None:
        super().__init__(f"image {index}: {rejection.message}", remedy=rejection.remedy)
        self.index, self.rejection = index, rejection


STATUS: Final[dict[type[MlcdError], int]] = {
    BadRequest: 400,
    NotFound: 404,
    NotAcceptable: 406,
    Conflict: 409,
    TooLarge: 413,
    Unsupported: 415,
    InvalidInput: 422,
    Overloaded: 429,
    Unavailable: 503,
    DeadlineExceeded: 504,
    # Faults of the server's own configuration or artifacts; training's own error cannot happen here.
    ArtifactInvalid: 500,
    ConfigInvalid: 500,
    Diverged: 500,
    MlcdError: 500,
}
_IMAGE_STATUS: Final = {"too-many-bytes": 413, "too-many-pixels": 413, "unsupported-format": 415}
_UNPROCESSABLE: Final = 422
_SERVER_FAULT: Final = 500
_RETRY_AFTER_S: Final = "1"
_TITLES: Final = {
    400: "Malformed request",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    422: "Cannot be processed",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
    504: "Deadline exceeded",
}


def status_of(error: MlcdError) -> int:
    if isinstance(error, StrictBatch):
        return status_of(error.rejection)
    if isinstance(error, ImageRejected):
        return _IMAGE_STATUS.get(error.reason, _UNPROCESSABLE)
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def item_error(index: int, rejection: ImageRejected) -> dict[str, Any]:
    """One entry of `errors` in a batch answer."""
    return {
        "index": index,
        "type": rejection.reason,
        "title": _TITLES[status_of(rejection)],
        "detail": str(rejection),
    }


async def handle_mlcd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlcdError)
    status = status_of(error)
    if status >= _SERVER_FAULT:
        _log.error("request %s: %s", _request_id(request), error, exc_info=error)
    # The text of a server fault names files and versions: that is for the log, not for the client.
    detail = str(error) if status != _SERVER_FAULT else "the server is misconfigured; its log says how"
    extra: dict[str, Any] = {}
    if isinstance(error, TooLarge):
        extra["limit"] = error.limit
    if isinstance(error, StrictBatch):
        extra["index"] = error.index
    return _respond(request, status, detail, extra, param=_param(error))


async def handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return _respond(request, 400, f"{where}: {first['msg']}", {}, param=where or None)


async def handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    details = {404: "there is no such route", 405: "this route does not take that method"}
    detail = details.get(error.status_code, "the request cannot be read")
    return _respond(request, error.status_code, detail, {}, param=None, headers=dict(error.headers or {}))


async def handle_unexpected(request: Request, error: Exception) -> Response:
    _log.error("request %s failed", _request_id(request), exc_info=error)
    return _respond(request, _SERVER_FAULT, "the server failed; its log knows why under the request id", {}, param=None)


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


def _param(error: MlcdError) -> str | None:
    if isinstance(error, StrictBatch):
        return f"input[{error.index}]"
    return error.param if isinstance(error, BadRequest) else None


def _respond(
    request: Request,
    status: int,
    detail: str,
    extra: dict[str, Any],
    *,
    param: str | None,
    headers: dict[str, str] | None = None,
) -> Response:
    request_id = _request_id(request)
    if request.url.path.removeprefix("/v1") == "/embeddings":
        kind = "server_error" if status >= _SERVER_FAULT else "invalid_request_error"
        body: dict[str, Any] = {"error": {"message": detail, "type": kind, "param": param, "code": None}}
        media_type = "application/json"
    else:
        body = {
            "type": "about:blank",
            "title": _TITLES.get(status, "Error"),
            "status": status,
            "detail": detail,
            "instance": request.url.path,
            "request_id": request_id,
            **extra,
        }
        media_type = "application/problem+json"
    headers = {
        "X-Request-Id": request_id,
        **(headers or {}),
        **({"Retry-After": _RETRY_AFTER_S} if status in (429, 503) else {}),
    }
    return Response(orjson.dumps(body), status, headers, media_type)
