"""The errors that the server returns instead of a result, each also an error of `mlcd.errors`.

    MlcdError
    ├── AnswerInvalid                          the URL's server does not speak this API
    └── Refused                                the server answered with a `problem`
        ├── RefusedInput(InvalidInput)         400, 405, 406, 413, 415, 422
        ├── RefusedAccess                      401, 403, 421
        ├── RefusedNotFound(NotFound)          404
        ├── RefusedConflict(Conflict)          409
        ├── RefusedOverload(Overloaded)        429
        ├── RefusedUnavailable(Unavailable)    502, 503
        └── RefusedLate(DeadlineExceeded)      408, 504

An unreachable server raises `Unavailable`, a missed deadline of the client `DeadlineExceeded`, one
bad image `ImageRejected`.
"""

from dataclasses import dataclass
from typing import Any, Final

import httpx

from mlcd.backoff import read_retry_after
from mlcd.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    MlcdError,
    NotFound,
    Overloaded,
    Unavailable,
)

_URN: Final = "urn:mlcd:problem:"
_UNNAMED: Final = "about:blank"


@dataclass(frozen=True)
class Problem:
    """A problem by RFC 9457, as the server sent it.

    name: stable code of the problem. request_id: id of the request in the server's log. limit: the
    limit of /v1/info that was exceeded. index, param: the invalid part of the request, if known.
    retry_after_s: seconds to wait before the next request, if the server sent them.
    """

    status: int
    name: str
    detail: str
    request_id: str
    limit: str | None = None
    index: int | None = None
    param: str | None = None
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.detail} (status {self.status}, request {self.request_id})"


class AnswerInvalid(MlcdError):
    """The server at the URL does not speak this API."""


class Refused(MlcdError):
    """The server answered with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class RefusedInput(Refused, InvalidInput):
    """The request is invalid."""


class RefusedAccess(Refused):
    """The API key is missing, wrong or not allowed to do this, or the server has another name."""


class RefusedNotFound(Refused, NotFound):
    """The server does not know the center, collection, item or route."""


class RefusedConflict(Refused, Conflict):
    """The request conflicts with the current state."""


class RefusedOverload(Refused, Overloaded):
    """The server, or the key's rate, was exhausted during all retries."""


class RefusedUnavailable(Refused, Unavailable):
    """The engine was down or the server was stopping during all retries."""


class RefusedLate(Refused, DeadlineExceeded):
    """The server's own deadline for one request has passed, or its body came too slowly."""


_CLASSES: Final[dict[int, type[Refused]]] = {
    **dict.fromkeys((400, 405, 406, 413, 415, 422), RefusedInput),
    **dict.fromkeys((401, 403, 421), RefusedAccess),
    404: RefusedNotFound,
    409: RefusedConflict,
    429: RefusedOverload,
    **dict.fromkeys((502, 503), RefusedUnavailable),
    **dict.fromkeys((408, 504), RefusedLate),
}


def refusal_of(response: httpx.Response, *, request_id: str) -> Refused:
    """Returns the error for a response without success; request_id: the id that was sent."""
    return _CLASSES.get(response.status_code, Refused)(_parse_problem(response, request_id))


def not_our_api() -> AnswerInvalid:
    return AnswerInvalid(
        "the answer does not follow this API", remedy="check the URL and the server's version"
    )


def _parse_problem(response: httpx.Response, request_id: str) -> Problem:
    content = _parse_content(response)
    # A proxy answers with its own page, which contains no detail for the user.
    detail = (
        content.get("detail")
        or f"the server answered {response.status_code} {response.reason_phrase}".rstrip()
    )
    return Problem(
        status=response.status_code,
        name=str(content.get("type") or _UNNAMED).removeprefix(_URN),
        detail=str(detail),
        request_id=response.headers.get("x-request-id", request_id),
        limit=content.get("limit"),
        index=content.get("index"),
        param=content.get("param"),
        retry_after_s=read_retry_after(response.headers.get("retry-after")),
    )


def _parse_content(response: httpx.Response) -> dict[str, Any]:
    """Returns a problem by the names of our own routes; those of files answer in OpenAI's."""
    try:
        content = response.json()
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    error = content.get("error")  # of OpenAI's routes
    if isinstance(error, dict):
        return {**error, "type": error.get("code"), "detail": error.get("message")}
    return content
