"""Which key a route asks for: declared where the route is, checked before anything of the request is read."""

from collections.abc import Iterable
from typing import Any, Final

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.params import Security as Declared
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.routing import BaseRoute

from mlcd.errors import Unavailable
from service.errors import Forbidden, Unauthorized
from service.keys.file import Scope
from service.resources import Resources

EXEMPT: Final = frozenset(
    {
        # Probes and scrapers; what they are told names no client and no image.
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v2/health/live",
        "/v2/health/ready",
        # The same for everybody who installs this: documents, and a page that asks with the key it is given.
        "/",
        "/docs",
        "/openapi.json",
        "/swagger/swagger-ui-bundle.js",
        "/swagger/swagger-ui.css",
        "/swagger/favicon-32x32.png",
    }
)
"""The only routes that nobody needs a key for."""

BEARER: Final = "bearer"
HEADER: Final = "header"
HEADER_NAME: Final = "X-API-Key"
_SCHEME: Final = "bearer "


class _Gate(SecurityBase):
    """Raises Unauthorized and Forbidden; puts the key that came in into `request.state.key`, None where all may."""

    def __init__(self) -> None:
        self.model = HTTPBearer(description="a key of `mlcd keys create`")
        self.scheme_name = BEARER

    async def __call__(self, request: Request, asked: SecurityScopes) -> None:
        resources: Resources = request.app.state.resources
        request.state.key = None
        if resources.keys is None:
            return
        key = resources.keys.identify(_shown(request))
        for scope in asked.scopes:
            if not key.grants(scope):
                raise Forbidden(scope)
        request.state.key = key


_GATE: Final = _Gate()


def needs(scope: Scope | None = None) -> Any:
    """Among a route's `dependencies`: it takes keys of this scope; None: every valid key."""
    return Security(_GATE, scopes=[] if scope is None else [scope])


def shows_key(request: Request, scope: Scope) -> bool:
    """Tells whether a request to a route that needs no key shows one of this scope; true where all may enter."""
    resources: Resources = request.app.state.resources
    if resources.keys is None:
        return True
    try:
        return resources.keys.identify(_shown(request)).grants(scope)
    except (Unauthorized, Unavailable):
        return False


def check_declared(routes: Iterable[BaseRoute]) -> None:
    """Raises ValueError for a route that neither declares its scope nor is exempt, and for one that does both."""
    for route in routes:
        path = getattr(route, "path", "")
        declared = isinstance(route, APIRoute) and any(
            isinstance(given, Declared) and given.dependency is _GATE for given in route.dependencies
        )
        if declared == (path in EXEMPT):
            raise ValueError(f"the route {path} needs either `dependencies=[needs(…)]` or a place in EXEMPT")


def _shown(request: Request) -> str | None:
    """X-API-Key goes first: some clients send an Authorization of their own that no one asked for."""
    if (key := request.headers.get(HEADER_NAME)) is not None:
        return key.strip()
    given = request.headers.get("authorization", "")
    return given[len(_SCHEME) :].strip() if given.lower().startswith(_SCHEME) else None
