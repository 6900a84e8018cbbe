"""HEAD, which probes and caches ask with, wherever there is a GET."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadMiddleware:
    """Answers HEAD as GET would be; the server below leaves the body out, by the request's own method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
