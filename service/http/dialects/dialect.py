"""How a refusal looks in each client's own language: the one place that knows, by the route's prefix.

Our own routes speak RFC 9457; OpenAI's, Cohere's and KServe's speak as their servers do, validation included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from service.http.dialects.cohere_wire import CohereError
from service.http.dialects.kserve.wire import KServeError
from service.http.dialects.openai_wire import OpenAIError
from service.http.dialects.own.wire import Problem

PROBLEM_PREFIX: Final = "urn:mlcd:problem:"
_SERVER_FAULT: Final = 500
_TOO_MANY: Final = 429
# OpenAI's and Cohere's clients have a class of error for 400 and none for these: who catches classes would miss them.
_WITHOUT_CLASS: Final = frozenset({413, 415})
_BAD_REQUEST: Final = 400


@dataclass(frozen=True)
class Refusal:
    """What a client is told, before it is put in a shape.

    name: stable, see docs/reference/rest.md. param: the field at fault. index: of the item at fault. limit: the name
    of a limit of /v1/info.
    """

    status: int
    name: str
    title: str
    detail: str
    instance: str
    request_id: str
    param: str | None = None
    index: int | None = None
    limit: str | None = None


@dataclass(frozen=True)
class Dialect:
    """media_type and schema: of every refusal; render: its body; unknown: statuses that it has 400 for."""

    media_type: str
    schema: type[BaseModel]
    render: Callable[[Refusal], dict[str, Any]]
    unknown: frozenset[int] = frozenset()

    def status(self, status: int) -> int:
        """Returns the status that a refusal is answered with."""
        return _BAD_REQUEST if status in self.unknown else status


def dialect_of(path: str) -> Dialect:
    """Of a route's pattern or of a request's path."""
    for prefix, dialect in _BY_PREFIX:
        if path == prefix or path.startswith(prefix + "/"):
            return dialect
    return _OWN


def _problem(refusal: Refusal) -> dict[str, Any]:
    extra = {"limit": refusal.limit, "index": refusal.index, "param": refusal.param}
    return {
        "type": PROBLEM_PREFIX + refusal.name,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
        "instance": refusal.instance,
        "request_id": refusal.request_id,
        **{name: value for name, value in extra.items() if value is not None},
    }


def _openai(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= _SERVER_FAULT else "invalid_request_error"
    if refusal.status == _TOO_MANY:
        kind = "rate_limit_error"
    return {"error": {"message": refusal.detail, "type": kind, "param": refusal.param, "code": refusal.name}}


def _cohere(refusal: Refusal) -> dict[str, Any]:
    return {"id": refusal.request_id, "message": refusal.detail}


def _kserve(refusal: Refusal) -> dict[str, Any]:
    return {"error": refusal.detail}


_OWN: Final = Dialect("application/problem+json", Problem, _problem)
_OPENAI: Final = Dialect("application/json", OpenAIError, _openai, _WITHOUT_CLASS)
_COHERE: Final = Dialect("application/json", CohereError, _cohere, _WITHOUT_CLASS)
# The first prefix that fits.
_BY_PREFIX: Final = (
    ("/embeddings", _OPENAI),
    ("/v1/embeddings", _OPENAI),
    ("/v1/models", _OPENAI),
    ("/v2/embed", _COHERE),
    ("/v2", Dialect("application/json", KServeError, _kserve)),
)
DIALECTS: Final = (_OWN, *dict.fromkeys(dialect for _, dialect in _BY_PREFIX))
