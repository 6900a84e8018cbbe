"""The status of each error, and the handlers that answer errors in the route's dialect."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, get_args
from urllib.parse import unquote

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from mlcd.collections.item import check_name
from mlcd.errors import InvalidInput, MlcdError, Unavailable
from mlcd.service.errors import BadRequest, RecordDamaged, StrictBatch
from mlcd.service.http.dialect import Refusal, dialect_of
from mlcd.service.http.unknown_names import is_safe_to_echo, unknown_name
from mlcd.service.telemetry.logs import places

_log = logging.getLogger("mlcd.service")


# By error name; an error whose name is missing has the status of its base class.
STATUS: Final[dict[str, int]] = {
    "malformed-request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "not-acceptable": 406,
    "request-timeout": 408,
    "conflict": 409,
    "collection-unusable": 409,
    "too-large": 413,
    "too-many-bytes": 413,
    "too-many-pixels": 413,
    "unsupported-media-type": 415,
    "unsupported-format": 415,
    "misdirected-request": 421,
    "cannot-be-processed": 422,
    "no-text-tower": 422,
    "too-many-requests": 429,
    "unavailable": 503,
    "deadline-exceeded": 504,
    "insufficient-storage": 507,
    # Faults in the server's configuration or artifacts; errors of training cannot occur here.
    "internal-error": 500,
    "job-damaged": 500,
}
_COLLECTION: Final = re.compile(rb"/v1/collections/([^/]+)")
_ITEM_LIMIT: Final = {"too-many-bytes": "max_body_bytes", "too-many-pixels": "max_pixels"}
_SERVER_FAULT: Final = 500
RETRYABLE_STATUSES: Final = (429, 503)  # a client should try again; the answer has Retry-After
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
    507: "Insufficient storage",
}
_UNION_BRANCHES: Final = ("str", "int", "float", "bool")
_OTHER_FAULT: Final = "has an invalid value"
# Messages for pydantic's error types: pydantic's own messages may contain the client's data.
_FAULTS: Final = {
    "missing": "is required",
    "extra_forbidden": "is not known here",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def status_of(error: MlcdError) -> int:
    kinds = (kind.name for kind in type(error).__mro__ if issubclass(kind, MlcdError))
    return next(STATUS[name] for name in (error.name, *kinds) if name in STATUS)


def item_error(index: int, error: InvalidInput) -> dict[str, Any]:
    """Returns one entry of `errors` in a batch answer."""
    return {
        "index": index,
        "type": error.name,
        "title": TITLES[status_of(error)],
        "detail": str(error),
    }


def name_of(status: int) -> str:
    """Returns the name of a refusal that does not come from an `MlcdError`."""
    return TITLES.get(status, "Error").lower().replace(" ", "-")


def bad_field(
    errors: Iterable[Mapping[str, Any]], model: type[BaseModel] | None = None
) -> BadRequest:
    """Returns the refusal for one of pydantic's errors; it names the field, but repeats no value.

    model: model of the body, whose fields are suggested for an unknown name.
    """
    reported = list(errors)
    unknown = (error for error in reported if error["type"] == "extra_forbidden")
    # a missing field was often sent under another name
    error = next(unknown, reported[0]) if reported[0]["type"] == "missing" else reported[0]
    path = [part for part in error["loc"] if part not in ("body", "query", "path", "header")]
    # Pydantic reports an error for each branch of a union, under the branch's name.
    if error["type"] == "extra_forbidden" and (names := _find_fields(model, path[:-1])):
        inner = ".".join(map(str, path[:-1]))
        where = f"`{inner}` of the body" if inner else "the body"
        return unknown_name([str(path[-1])], names, where=where, within=path[:-1])
    field = list(takewhile(lambda part: isinstance(part, int) or _is_field(part), path))
    fault = _FAULTS.get(error["type"], _OTHER_FAULT) if len(field) == len(path) else _OTHER_FAULT
    param = ".".join(str(part) for part in field) or None
    return BadRequest(f"{param or 'a field'} {fault.format_map(error.get('ctx', {}))}", param=param)


def _is_field(part: str) -> bool:
    return part not in _UNION_BRANCHES and is_safe_to_echo(part)


def _find_fields(model: Any, path: Sequence[int | str]) -> list[str]:
    """Returns the fields of the object at a path in a body, or [] if its type is ambiguous."""
    for step in path:
        if isinstance(step, str):
            fields = getattr(model, "model_fields", {})
            model = fields[step].annotation if step in fields else None
        model = next((part for part in _walk_types(model) if hasattr(part, "model_fields")), None)
    return list(getattr(model, "model_fields", {}))


def _walk_types(annotation: Any) -> Iterator[Any]:
    """Yields a type and, recursively, its type arguments."""
    yield annotation
    for inner in get_args(annotation):
        yield from _walk_types(inner)


async def handle_mlcd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlcdError)
    status = status_of(error)
    # Unavailable is only counted: overload must not fill the log.
    if status >= _SERVER_FAULT and not isinstance(error, Unavailable):
        _log.error("request %s: %s (%s)", _request_id(request), error, places(error))
    # The text of a server fault can name files and versions, which only the log may show.
    is_shown = status != _SERVER_FAULT or isinstance(error, RecordDamaged)
    detail = str(error) if is_shown else "the server is misconfigured; see its log"
    param, limit = getattr(error, "param", None), getattr(error, "limit", None)
    refusal = replace(
        _build_refusal(request, status, detail), name=error.name, param=param, limit=limit
    )
    if isinstance(error, StrictBatch):
        refusal = replace(refusal, index=error.index, limit=_ITEM_LIMIT.get(error.name))
    return _answer_refusal(request, refusal, getattr(error, "headers", None))


async def handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    body = getattr(request.scope.get("route"), "body_field", None)
    model = None if body is None else body.field_info.annotation
    return await handle_mlcd_error(request, bad_field(error.errors(), model))


async def handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if (name_error := find_name_error(request)) is not None:
        return await handle_mlcd_error(request, name_error)
    details = {404: "unknown route", 405: "this route does not support that method"}
    detail = details.get(error.status_code, "the request cannot be read")
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _find_methods(request)):
        headers = {"Allow": ", ".join(sorted(methods))}
    return _answer_refusal(request, _build_refusal(request, error.status_code, detail), headers)


def find_name_error(request: Request) -> InvalidInput | None:
    """Returns the error of an invalid collection name in the raw path; None if it is valid.

    Routes match the decoded path, in which a slash in a name splits the name in two.
    """
    path = request.scope.get("raw_path", b"").partition(b"?")[0]
    if match := _COLLECTION.match(path):
        try:
            check_name(unquote(match[1].decode("latin-1")))
        except InvalidInput as error:
            return error
    return None


def _find_methods(request: Request) -> set[str]:
    """Returns the methods of all routes at this path; Starlette lists those of one route only.

    The first matching route determines the path pattern: a later route may match more loosely.
    """
    routes: list[Route] = request.app.state.routes
    matching = next(
        (route for route in routes if route.matches(request.scope)[0] != Match.NONE), None
    )
    if matching is None:
        return set()
    return {
        method for route in routes if route.path == matching.path for method in route.methods or ()
    }


async def handle_unexpected(request: Request, error: Exception) -> Response:
    # The log has the code lines of the failure, but not the error's text, which may contain data
    # of the client.
    _log.error(
        "request %s failed: %s (%s)", _request_id(request), type(error).__name__, places(error)
    )
    return _answer_refusal(
        request,
        _build_refusal(
            request, _SERVER_FAULT, "the server failed; its log has the cause, under the request id"
        ),
    )


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


def _build_refusal(request: Request, status: int, detail: str) -> Refusal:
    return Refusal(
        status=status,
        name=name_of(status),
        title=TITLES.get(status, "Error"),
        detail=detail,
        instance=request.url.path,
        request_id=_request_id(request),
    )


def _answer_refusal(
    request: Request, refusal: Refusal, headers: dict[str, str] | None = None
) -> Response:
    dialect = dialect_of(request.app, refusal.instance)
    headers = {"X-Request-Id": refusal.request_id, **(headers or {})}
    return Response(
        orjson.dumps(dialect.render(refusal)),
        dialect.status(refusal.status),
        headers,
        dialect.media_type,
    )
