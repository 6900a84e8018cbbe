"""The access checks: the API key that a route needs, and the web pages that may send requests.

A route declares its scope, and the key is checked before the request's body is read.

A server without keys trusts every client that reaches it, so a foreign web page could make its
visitor's browser send requests to the server. With a host name that resolves to the server's
address (DNS rebinding) the page could even read the answers. Headers that no page can forge reveal
this: Host, which must name the server, and Sec-Fetch-Site or Origin.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeGuard

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.params import Depends
from fastapi.params import Security as SecurityDependency
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from mlcd.errors import MlcdError, Unavailable
from mlcd.fetching.hosts import allows, canonical_host
from mlcd.service.errors import BadRequest, Forbidden, ForeignOrigin, Misdirected, Unauthorized
from mlcd.service.http.problems import handle_mlcd_error
from mlcd.service.http.unknown_names import check_query
from mlcd.service.keys.file import Scope
from mlcd.service.resources import Resources
from mlcd.service.settings import Settings

# The only routes that need no key.
EXEMPT: Final = frozenset(
    {
        # For probes and scrapers: these answers contain nothing about clients or images.
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v2/health/live",
        "/v2/health/ready",
        # The same in every installation: documents, and a page that asks the user for a key.
        "/",
        "/assets/{name}",
        "/docs",
        "/openapi.json",
        "/swagger/swagger-ui-bundle.js",
        "/swagger/swagger-ui.css",
        "/swagger/favicon-32x32.png",
    }
)

BEARER: Final = "bearer"
HEADER: Final = "header"
HEADER_NAME: Final = "X-API-Key"
_SCHEME: Final = "bearer "
# The entry of an ASGI scope with an API key's id, for requests that the server sends to itself on
# behalf of the key. No client can set it: uvicorn creates the scopes of requests that arrive.
CALLER: Final = "mlcd.caller"
# The entry of a request that joins some of one image each; one with an error is sent again, alone.
JOINED: Final = "mlcd.joined"
_LOCAL_NAMES: Final = ("localhost", "*.localhost")
_MAX_CACHED: Final = 256  # Host headers whose check is cached
_MAX_CACHED_CHARS: Final = 256  # longest header in the cache; DNS names have at most 253


class _Gate(SecurityBase):
    """Checks a request's key and stores it in `request.state.key`; None on a server without keys.

    Also checks the names of query parameters, for every route that needs a key. Raises
    Unauthorized, Forbidden, or BadRequest for a parameter that the route does not have.
    """

    def __init__(self) -> None:
        self.model = HTTPBearer(description="a key of `mlcd keys create`")
        self.scheme_name = BEARER

    async def __call__(self, request: Request, scopes: SecurityScopes) -> None:
        resources: Resources = request.app.state.resources
        request.state.key = None
        if resources.keys is not None:
            if CALLER in request.scope:
                key = resources.keys.find(request.scope[CALLER])
            else:
                key = resources.keys.identify(_find_key(request))
            for scope in scopes.scopes:
                if not key.grants(scope):
                    raise Forbidden(scope)
            request.state.key = key
        check_query(request)


_GATE: Final = _Gate()


async def check_access(route: APIRoute, request: Request) -> None:
    """Applies the gate of the route, and raises the errors of `_Gate`."""
    for dependency in route.dependencies:
        if _is_gate(dependency):
            await _GATE(request, SecurityScopes([*(dependency.scopes or ())]))


def needs(scope: Scope | None = None) -> Any:
    """Returns the entry for a route's `dependencies` that requires a key with this scope.

    scope: None accepts every valid key.
    """
    return Security(_GATE, scopes=[] if scope is None else [scope])


def collection_filter(request: Request, scope: Scope) -> Callable[[str], bool] | None:
    """Returns a predicate for the collections that a request may see on a route without a gate;
    None if the request lacks a key with this scope. A server without keys shows all collections.
    """
    resources: Resources = request.app.state.resources
    if resources.keys is None:
        return lambda _: True
    try:
        key = resources.keys.identify(_find_key(request))
    except (Unauthorized, Unavailable):
        return None
    return key.sees if key.grants(scope) else None


def check_declared(routes: Iterable[BaseRoute]) -> None:
    """Raises ValueError unless each route either declares a scope or is exempt."""
    for route in routes:
        path = getattr(route, "path", "")
        declared = isinstance(route, APIRoute) and any(map(_is_gate, route.dependencies))
        if declared == (path in EXEMPT):
            raise ValueError(
                f"the route {path} needs either `dependencies=[needs(…)]` or an entry in EXEMPT"
            )


def _is_gate(dependency: Depends) -> TypeGuard[SecurityDependency]:
    return isinstance(dependency, SecurityDependency) and dependency.dependency is _GATE


def _find_key(request: Request) -> str | None:
    """Returns the key in X-API-Key or, without that header, in Authorization.

    X-API-Key goes first, because some clients always send an Authorization header.
    """
    if (key := request.headers.get(HEADER_NAME)) is not None:
        return key.strip()
    authorization = request.headers.get("authorization", "")
    return (
        authorization[len(_SCHEME) :].strip() if authorization.lower().startswith(_SCHEME) else None
    )


class OriginMiddleware:
    """Refuses requests from web pages of other origins.

    It also refuses HTTP/1.1 requests without exactly one Host header (RFC 9112, 3.2).
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._requires_keys = settings.auth.keys_file is not None
        self._is_open = settings.auth.mode == "open"
        self._is_own_host_cached = lru_cache(_MAX_CACHED)(self._is_own_host)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except MlcdError as error:
            answer = await handle_mlcd_error(Request(scope), error)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: AsgiScope) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise BadRequest(f"an HTTP/1.1 request must have one Host header, got {len(hosts)}")
        is_known_host = (
            self._is_own_host_cached
            if hosts and len(hosts[0]) <= _MAX_CACHED_CHARS
            else self._is_own_host
        )
        if hosts and not is_known_host(hosts[0]):
            raise Misdirected(
                "the Host header must have a name of this server",
                remedy="use localhost or the server's address, or add the name to MLCD_HOSTS",
            )
        if not self._requires_keys and _is_foreign(Request(scope)):
            raise ForeignOrigin(
                "a server without keys refuses requests from web pages of other origins",
                remedy="send the request from the server's own page, or give the server keys",
            )

    def _is_own_host(self, host: str) -> bool:
        if self._requires_keys and not self._hosts:
            return True
        name = canonical_host(_strip_port(host))
        if name is None:
            return False
        address = _parse_address(name)
        if allows((*_LOCAL_NAMES, *self._hosts), name) or (
            address is not None and address.is_loopback
        ):
            return True
        # Names in the public DNS have a dot, so a name without a dot comes from the local network.
        return self._is_open and (address is not None or "." not in name)


def _parse_address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _strip_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _is_foreign(request: Request) -> bool:
    """Tells whether a web page of another origin made the request.

    A link from another page is allowed: it changes nothing, and no page can read what it opens.
    """
    headers = request.headers
    is_link = (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    if is_link and request.method in ("GET", "HEAD"):
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
