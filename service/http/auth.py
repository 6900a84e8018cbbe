"""Who may enter: which key a route asks for, and which web pages may make a browser ask.

A key is declared where the route is, and checked before anything of the request is read.

A server without keys takes whoever reaches it for its user. A page from elsewhere makes a browser send requests to it,
and with a name of its own that resolves to the server's address (DNS rebinding) even reads the answers. Two headers
that no page can forge tell: Host, which must be a name that the server is known by, and Sec-Fetch-Site or Origin.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.params import Security as Declared
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Exchange

from mlcd.errors import MlcdError, Unavailable
from service.errors import BadRequest, Forbidden, ForeignOrigin, Misdirected, Unauthorized
from service.hosts import allows, canonical_host
from service.http.problems import handle_mlcd_error
from service.keys.file import Scope
from service.resources import Resources
from service.settings import Settings

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
_LOCAL: Final = ("localhost", "*.localhost")


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
            isinstance(given, Declared) and given.dependency is _GATE
            for given in route.dependencies
        )
        if declared == (path in EXEMPT):
            raise ValueError(
                f"the route {path} needs either `dependencies=[needs(…)]` or a place in EXEMPT"
            )


def _shown(request: Request) -> str | None:
    """X-API-Key goes first: some clients send an Authorization of their own that no one asked for."""
    if (key := request.headers.get(HEADER_NAME)) is not None:
        return key.strip()
    given = request.headers.get("authorization", "")
    return given[len(_SCHEME) :].strip() if given.lower().startswith(_SCHEME) else None


class OriginMiddleware:
    """Refuses requests that a web page of another origin makes, and HTTP/1.1 without one Host (RFC 9112, 3.2)."""

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._keyed = settings.auth.keys_file is not None
        self._open = settings.auth.mode == "open"

    async def __call__(self, scope: Exchange, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Request(scope))
        except MlcdError as error:
            answer = await handle_mlcd_error(Request(scope), error)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) > 1 or (not hosts and request.scope["http_version"] == "1.1"):
            raise BadRequest("HTTP/1.1 needs exactly one Host header")
        if hosts and not self._is_known(hosts[0]):
            raise Misdirected(
                "this server is not known by the name in the Host header",
                remedy="call it by localhost or its address, or add the name to MLCD_HOSTS",
            )
        if not self._keyed and _is_foreign(request):
            raise ForeignOrigin(
                "a web page of another origin asks, and this server knows no keys",
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
        # Names of the public DNS have a dot: one without was given by this network's owner.
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
    """A link from elsewhere may still be followed: nothing changes, and no page reads what it opens."""
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
