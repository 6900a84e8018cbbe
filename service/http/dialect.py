"""The dialects: formats of error answers, chosen by the route's prefix.

Our own routes follow RFC 9457. The routes of OpenAI, Cohere and KServe answer all errors, also
those of validation, as the original servers do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette

# OpenAI's and Cohere's clients have no error class for these statuses, so code that catches their
# classes would miss them.
STATUSES_WITHOUT_ERROR_CLASS: Final = frozenset({413, 415})
_BAD_REQUEST: Final = 400


@dataclass(frozen=True)
class Refusal:
    """A refusal, independent of the dialect.

    name: stable, see docs/reference/rest.md. param: name of the wrong field. index: index of the
    wrong item. limit: name of a limit of /v1/info.
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
    """The format of refusals on some routes.

    prefixes: path prefixes of the routes. media_type, schema: of the refusals' bodies.
    render: returns a refusal's body. unknown: statuses that the dialect lacks; 400 replaces them.
    """

    prefixes: tuple[str, ...]
    media_type: str
    schema: type[BaseModel]
    render: Callable[[Refusal], dict[str, Any]]
    unknown: frozenset[int] = frozenset()

    def speaks(self, path: str) -> bool:
        return any(path == prefix or path.startswith(prefix + "/") for prefix in self.prefixes)

    def status(self, status: int) -> int:
        """Returns the status to answer a refusal with."""
        return _BAD_REQUEST if status in self.unknown else status


def dialect_of(app: Starlette, path: str) -> Dialect:
    """Returns the first dialect whose prefixes cover a path, or the last dialect.

    path: a route's pattern or the path of a request.
    """
    dialects: Sequence[Dialect] = app.state.dialects
    return next((dialect for dialect in dialects if dialect.speaks(path)), dialects[-1])
