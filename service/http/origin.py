"""Web pages of other origins: what a visitor's browser asks of a server that it reaches, and the page does not.

A server without keys takes whoever reaches it for its user. A page from elsewhere makes a browser
send requests to it, and with a name of its own that resolves to the server's address (DNS
rebinding) even reads the answers. Two headers that no page can forge tell: Host, which must be a
name that the server is known by, and Sec-Fetch-Site or Origin.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlcd.errors import MlcdError
from service.errors import BadRequest, ForeignOrigin, Misdirected
from service.hosts import allows, canonical_host
from service.http.problems import handle_mlcd_error
from service.settings import Settings

_LOCAL: Final = ("localhost", "*.localhost")


class OriginMiddleware:
    """Refuses requests that a web page of another origin makes, and HTTP/1.1 without one Host (RFC 9112, 3.2)."""

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._keyed = settings.auth.keys_file is not None
        self._open = settings.auth.mode == "open"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if is_link and request.method in ("GET", "HEAD"):
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
