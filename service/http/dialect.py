"""How a refusal looks in each client's own language: by the route's prefix, as the application lists them.

Our own routes speak RFC 9457; OpenAI's, Cohere's and KServe's speak as their servers do, validation included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette

WITHOUT_CLASS: Final = frozenset({413, 415})
"""Statuses that OpenAI's and Cohere's clients have no class of error for: who catches classes would miss them."""
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
    """prefixes: of its routes. media_type and schema: of every refusal; render: its body; unknown: statuses that it has
    400 for.
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
    """Returns the first dialect that speaks there, else the last. path: a route's pattern, or of a request."""
    dialects: Sequence[Dialect] = app.state.dialects
    return next((dialect for dialect in dialects if dialect.speaks(path)), dialects[-1])
