"""What browsers and caches on the way may do with an answer."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DOCS: Final = "/docs"
_DATA_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"
# The page has one script in it and styles of its own; all else is ours, and nothing may be loaded from elsewhere.
_DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class SecurityHeadersMiddleware:
    """Adds to every answer what its route did not state itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        defaults = _DOCS_DEFAULTS if scope["path"] == _DOCS else _DEFAULTS

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                stated = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in defaults if name not in stated),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _with_policy(policy: str) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"x-content-type-options", b"nosniff"),
        # An embedding tells of its image, and a cache on the way does not know that X-API-Key tells clients apart.
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"content-security-policy", policy.encode()),
    )


_DEFAULTS: Final = _with_policy(_DATA_POLICY)
_DOCS_DEFAULTS: Final = _with_policy(_DOCS_POLICY)
