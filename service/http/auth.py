"""The checks of access: the API key that a route needs, and the web pages that may send requests.

A route declares its scope, and the key is checked before the request's body is read.

A server without keys trusts every client that reaches it. A foreign web page can make a browser
send requests to it. With a host name that resolves to the server's address (DNS rebinding) the page
can even read the answers. Two headers that no page can forge reveal this: Host, which must be a
name of the server, and Sec-Fetch-Site or Origin.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeGuard

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.params import Depends
from fastapi.params import Security as Declared
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Exchange

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
        # Probes and scrapers: these answers name no client and no image.
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v2/health/live",
        "/v2/health/ready",
        # These are the same in every installation: documents, and a page that asks for a key.
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
# The entry of an ASGI scope with the id of the API key for which the server itself sends a request.
# No client can set it: a server makes the scope of each request that arrives.
CALLER: Final = "mlcd.caller"
_LOCAL: Final = ("localhost", "*.localhost")
_REMEMBERED: Final = 256  # names of Host headers whose check is remembered
_REMEMBERED_CHARS: Final = 256  # the longest of them; names in the DNS have at most 253


class _Gate(SecurityBase):
    """Checks a request's key and puts it into `request.state.key`; None on a server without keys.

    Every route that needs a key inherits the check of its query's names from here. Raises
    Unauthorized and Forbidden, and BadRequest for a query parameter that the route does not have.
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
    """Raises what the gate of the route raises."""
    for dependency in route.dependencies:
        if _is_gate(dependency):
            await _GATE(request, SecurityScopes([*(dependency.scopes or ())]))


def needs(scope: Scope | None = None) -> Any:
    """Returns the entry of a route's `dependencies` that asks for a key of this scope.

    scope: None accepts every valid key.
    """
    return Security(_GATE, scopes=[] if scope is None else [scope])


def names_seen(request: Request, scope: Scope) -> Callable[[str], bool] | None:
    """Returns a predicate of the collections that a request may see on a route open to all; None
    for a request without a key of this scope. A server without keys shows all of them.
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
    """Raises ValueError unless every route either declares a scope or is exempt, and not both."""
    for route in routes:
        path = getattr(route, "path", "")
        declared = isinstance(route, APIRoute) and any(map(_is_gate, route.dependencies))
        if declared == (path in EXEMPT):
            raise ValueError(
                f"the route {path} needs either `dependencies=[needs(…)]` or a place in EXEMPT"
            )


def _is_gate(dependency: Depends) -> TypeGuard[Declared]:
    return isinstance(dependency, Declared) and dependency.dependency is _GATE


def _find_key(request: Request) -> str | None:
    """Returns the key in X-API-Key, else the one in Authorization.

    X-API-Key goes first, because some clients send an Authorization of their own.
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
        self._keyed = settings.auth.keys_file is not None
        self._open = settings.auth.mode == "open"
        self._remembered = lru_cache(_REMEMBERED)(self._is_known)

    async def __call__(self, scope: Exchange, receive: Receive, send: Send) -> None:
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

    def _check(self, scope: Exchange) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise BadRequest("HTTP/1.1 needs exactly one Host header")
        is_known_host = (
            self._remembered if hosts and len(hosts[0]) <= _REMEMBERED_CHARS else self._is_known
        )
        if hosts and not is_known_host(hosts[0]):
            raise Misdirected(
                "the Host header must have a name of this server",
                remedy="call it by localhost or its address, or add the name to MLCD_HOSTS",
            )
        if not self._keyed and _is_foreign(Request(scope)):
            raise ForeignOrigin(
                "a server without keys refuses requests from web pages of other origins",
                remedy="ask from the server's own page, or give the server keys",
            )

    def _is_known(self, host: str) -> bool:
        if self._keyed and not self._hosts:
            return True
        name = canonical_host(_without_port(host))
        if name is None:
            return False
        address = _address(name)
        if allows((*_LOCAL, *self._hosts), name) or (address is not None and address.is_loopback):
            return True
        # Names in the public DNS have a dot; the owner of this network gave a name without one.
        return self._open and (address is not None or "." not in name)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _without_port(host: str) -> str:
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
