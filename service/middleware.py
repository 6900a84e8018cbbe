"""Around every request: an id, the body cap, the deadline, the measurement."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcd.errors import DeadlineExceeded
from service.problems import BadRequest, TooLarge

_Result = TypeVar("_Result")
_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """Gives each request an id (its own X-Request-Id where that is harmless) and counts it when it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed_ms = 1000 * (time.perf_counter() - started)
                message["headers"] = [
                    *((name, value) for name, value in message.get("headers", []) if name != b"x-request-id"),
                    (b"x-request-id", request_id.encode()),
                    (b"server-timing", f"total;dur={elapsed_ms:.1f}".encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            metrics = scope["app"].state.resources.metrics
            metrics.request(_route_of(scope), status, time.perf_counter() - started)


class BodyLimitMiddleware:
    """Refuses a body over the limit: by its stated length at once, else while it streams in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = scope["app"].state.resources.settings.limits.max_body_bytes
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            if not stated.isdigit():
                raise BadRequest("the Content-Length header is not a number")
            if int(stated) > limit:
                raise _too_large(limit)
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, receive_limited, send)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes", limit="max_body_bytes")


async def within_deadline(awaitable: Awaitable[_Result], seconds: float) -> _Result:
    """The result, or DeadlineExceeded; the work is cancelled."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineExceeded(f"not answered within {seconds:g} s", remedy="send fewer images at once") from error


def _route_of(scope: Scope) -> str:
    """The route's pattern, not the path: a metric label must not grow with what clients type."""
    return str(getattr(scope.get("route"), "path", "other"))
