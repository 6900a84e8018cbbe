"""The dialects: shapes of refusals, chosen by the route's prefix.

Our own routes answer by RFC 9457. Those of OpenAI, Cohere and KServe answer as their servers do,
also where validation fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette

# OpenAI's and Cohere's clients have no error class for these: code that catches classes would miss
# them.
WITHOUT_CLASS: Final = frozenset({413, 415})
_BAD_REQUEST: Final = 400


@dataclass(frozen=True)
class Refusal:
    """A refusal before a dialect gives it its shape.

    name: stable, see docs/reference/rest.md. param: the field at fault. index: that of the item at
    fault. limit: the name of a limit of /v1/info.
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
    """The shape of refusals on some routes.

    prefixes: those of the routes' paths. media_type, schema: those of every refusal.
    render: makes a refusal's body. unknown: statuses that the dialect lacks; 400 replaces them.
    """

    prefixes: tuple[str, ...]
    media_type: str
    schema: type[BaseModel]
    render: Callable[[Refusal], dict[str, Any]]
    unknown: frozenset[int] = frozenset()

    def speaks(self, path: str) -> bool:
        return any(path == prefix or path.startswith(prefix + "/") for prefix in self.prefixes)

    def status(self, status: int) -> int:
        """Returns the status that a refusal is answered with."""
        return _BAD_REQUEST if status in self.unknown else status


def dialect_of(app: Starlette, path: str) -> Dialect:
    """Returns the first dialect that covers a path, else the last.

    path: a route's pattern or the path of a request.
    """
    dialects: Sequence[Dialect] = app.state.dialects
    return next((dialect for dialect in dialects if dialect.speaks(path)), dialects[-1])
