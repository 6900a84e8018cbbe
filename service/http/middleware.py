"""The work around every request: id, deadline, bounds on its body, measurement and cancellation.

HEAD is answered on every route with a GET. Every answer has headers that tell browsers and caches
how to treat it.
"""

import asyncio
import logging
import random
import re
import time
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcd.errors import DeadlineExceeded
from mlcd.service.errors import BadRequest, TooLarge, TooSlow
from mlcd.service.http.auth import JOINED
from mlcd.service.http.presence import presence_of
from mlcd.service.http.problems import RETRYABLE_STATUSES, handle_unexpected
from mlcd.service.inference.cache.cached import CachedPipeline
from mlcd.service.inference.contract import refuse_when_down
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import RequestRecord, begin_request, read_trace
from mlcd.service.timings import BODY_PATIENCE_S

_log = logging.getLogger("mlcd.access")
_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# Request ids must be unique, not secret: os.urandom would make a system call for each.
_ids: Final = random.Random()  # noqa: S311 - nothing depends on an id being secret
_FIRST_ERROR: Final = 400  # of HTTP's statuses
_CLIENT_GONE: Final = 499  # nginx's status, used in metrics and logs only
_IMAGE_TYPES: Final = (b"image/", b"multipart/form-data", b"application/octet-stream")
# Bodies of these routes contain images, also as JSON. If the model has a text tower, JSON may
# contain texts, which are admitted although the capacity for images is used up.
_IMAGE_ROUTES: Final = ("/v1/embeddings", "/embeddings", "/v2/embed", "/v2/models/")
_SERVER_TIMING: Final = b"server-timing"
_RETRY_AFTER: Final = b"retry-after"
# Probes are frequent, so they are logged at debug and not traced.
PROBES: Final = ("/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready")
_RESERVED_BYTES: Final = 64 * 2**10  # reserved when a body starts; the rest as it arrives
MIN_BYTES_PER_S: Final = 4096  # slower bodies are refused after BODY_PATIENCE_S
# Routes that write their bodies to disk as they arrive instead of keeping them in memory.
_STORED: Final = re.compile(r"/v1/(files|uploads/[^/]+/parts)")
_FORM_BYTES: Final = 2**16  # allowed in a form beside its file
_OWN_HEADERS: Final = (b"x-request-id", _RETRY_AFTER, _SERVER_TIMING)
_DOCS: Final = "/docs"
_DATA_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"
# The page has an inline script and inline styles; everything else comes from this server.
_DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'none'"
)


class RequestMiddleware:
    """Gives each request an id and a deadline, and counts its answer.

    A valid X-Request-Id becomes the id. `request.state.deadline` is a time of the loop's clock,
    counted from the request's first byte; a body that is incomplete by then is answered 504. The
    request is canceled if its client disconnects.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not exchange.client_gone:
                raise
        except Exception as error:
            # If re-raised, the server would log it, with message text of third-party libraries.
            if exchange.answered:
                raise
            answer = await handle_unexpected(Request(scope), error)
            await answer(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._resources: Resources = scope["app"].state.resources
        self._state: dict[str, Any] = scope.setdefault("state", {})
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        self._id = (
            request_id.decode() if _ID.fullmatch(request_id) else f"{_ids.getrandbits(128):032x}"
        )
        self._record = RequestRecord(self._id, read_trace(headers))
        self._is_probe = scope["path"] in PROBES
        tracer = self._resources.tracer
        self._span = None if tracer is None or self._is_probe else tracer.begin(self._record)
        begin_request(self._record)
        self._deadline = (
            asyncio.get_running_loop().time() + self._resources.settings.limits.deadline_s
        )
        # Stored with the request: the served model may change before the answer.
        self._state.update(request_id=self._id, deadline=self._deadline, resources=self._resources)
        self._started = time.perf_counter()
        self._status = 500
        self._handler = asyncio.current_task()
        self._is_complete = self._is_late = False
        self.answered = False
        self._presence = presence_of(scope)
        self._watcher: asyncio.Task[None] | None = None
        self.client_gone = False
        if self._presence is not None and self._presence.sent_all:
            self._presence.watch(self._cancel)  # a route without a body never calls `receive`
        self._resources.model.requests.begin()

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        message = await self._within_deadline()
        if message["type"] == "http.disconnect":
            self.client_gone = True
            return message
        self._record.used["bytes"] += len(message.get("body", b""))
        if not message.get("more_body", False):
            self._is_complete = True
            if self._presence is not None:
                self._presence.watch(self._cancel)
            else:
                self._watcher = asyncio.create_task(self._await_disconnect(), name="client-watcher")
        return message

    async def _within_deadline(self) -> Message:
        if self._presence is not None and self._presence.sent_all:
            return await self._receive()  # returns at once
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError as error:
            self._is_late = True
            raise DeadlineExceeded(
                "the request's body did not arrive before the deadline",
                remedy="send fewer images at once",
            ) from error

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answered, self._status = True, message["status"]
            headers = message.get("headers", [])
            stages = [value for name, value in headers if name == _SERVER_TIMING]
            retry_after = next((value for name, value in headers if name == _RETRY_AFTER), None)
            app_headers = [(name, value) for name, value in headers if name not in _OWN_HEADERS]
            limits = await self._resources.rate_limiter.headers(
                self._state.get("key"), None if retry_after is None else int(retry_after)
            )
            message["headers"] = [*app_headers, *limits, *self._build_headers(stages, retry_after)]
            if self._presence is not None and self._presence.awaits_continue:
                # The client never sent its body: uvicorn would read the next request as the body.
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    def end(self) -> None:
        if self._presence is not None:
            self._presence.forget()
        if self._watcher is not None:
            self._watcher.cancel()
        self._resources.model.requests.end()
        if (end_of_model := self._state.get("end_of_model")) is not None:
            end_of_model()
        status, route = _CLIENT_GONE if self.client_gone else self._status, _find_route(self._scope)
        seconds, method = time.perf_counter() - self._started, self._scope["method"]
        self._resources.metrics.request(route, status, seconds)
        if self._record.counts:
            self._resources.metrics.inference_request(status, seconds, self._record.stages)
            if status < _FIRST_ERROR:
                self._resources.metrics.count_body_bytes(self._record.used["bytes"])
                num = self._record.used["images"] if JOINED in self._scope else 1
                used = {"requests": num, **self._record.used}
                self._resources.usage.count(self._state.get("key"), used)
        tracer = self._resources.tracer
        if tracer is not None and self._span is not None:
            fingerprint = self._state["resources"].encoder.fingerprint
            tracer.end(
                self._span,
                self._record,
                method=method,
                route=route,
                status=status,
                fingerprint=fingerprint,
            )
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 1),
            **self._record.counts,
        }
        _log.log(
            logging.DEBUG if self._is_probe else logging.INFO, "request", extra={"fields": fields}
        )

    async def _await_disconnect(self) -> None:
        """Waits for the disconnect, on servers that report it to a pending receive() only."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._cancel()

    def _cancel(self) -> None:
        """Cancels the request because its client has left."""
        if not self.answered and self._handler is not None:
            self.client_gone = True
            self._handler.cancel()

    def _build_headers(
        self, stages: list[bytes], retry_after: bytes | None
    ) -> list[tuple[bytes, bytes]]:
        """Returns the headers that every answer gets.

        retry_after: value set by the error; None uses the estimate from the current load.
        """
        resources: Resources = self._state["resources"]
        total_ms = 1000 * (time.perf_counter() - self._started)
        timing = b", ".join([*stages, f"total;dur={total_ms:.1f}".encode()])
        headers = [
            (b"x-request-id", self._id.encode()),
            (_SERVER_TIMING, timing),
            *resources.stamp,
        ]
        if self._status in RETRYABLE_STATUSES:
            headers.append((_RETRY_AFTER, retry_after or str(resources.retry_after_s).encode()))
        if self._is_late:
            headers.append((b"connection", b"close"))
        return headers


class BodyLimitMiddleware:
    """Refuses a body that exceeds its limit or the free memory for bodies.

    A body whose Content-Length is too large is refused before it is read, any other while it
    arrives. A request that can only contain images is refused before its body is read, as long as
    no image would be admitted.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _Body:
    """The body of one request, counted against the limits of a request and of the server."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self._resources: Resources = scope["state"]["resources"]
        settings = self._resources.settings
        self._is_stored = scope["method"] == "POST" and bool(_STORED.fullmatch(scope["path"]))
        self._limit = (
            settings.files.max_file_bytes + _FORM_BYTES
            if self._is_stored
            else settings.limits.max_body_bytes
        )
        headers = dict(scope["headers"])
        self._stated_length = headers.get(b"content-length", b"0")
        kind = headers.get(b"content-type", b"").lower()
        self._has_images = kind.startswith(_IMAGE_TYPES) or (
            scope["path"].startswith(_IMAGE_ROUTES) and self._resources.texts is None
        )
        if self._resources.further.names and b"model=" in (scope["query_string"] or b"model="):
            self._has_images = False  # it may be of another model, which its body names
        self._deadline: float = scope["state"]["deadline"]
        self._presence = presence_of(scope)
        self._is_checked = self._is_complete = False
        self._key: str | None = None
        self._received_bytes = self._reserved_bytes = 0
        self._patience_s = BODY_PATIENCE_S

    async def receive(self) -> Message:
        if self._is_complete:  # only http.disconnect can follow
            return await self._receive()
        if not self._is_checked:
            self._check_headers()
            self._is_checked = True
        message = await self._receive_part()
        self._is_complete = not message.get("more_body", False)
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes > self._limit:
            raise _too_large(self._limit)
        if not self._is_stored:
            self._reserve(self._received_bytes)
        return message

    def release(self) -> None:
        self._resources.admission.bytes.release(self._reserved_bytes, owner=self._key)

    async def _receive_part(self) -> Message:
        """Returns the next part of the body. Raises TooSlow if the client sends too slowly.

        Waiting uses up `_patience_s`; every byte that arrives restores some of it.
        """
        if self._presence is not None and self._presence.sent_all:
            return await self._receive()
        now = asyncio.get_running_loop().time
        start_s = now()
        try:
            async with asyncio.timeout(self._patience_s):
                message = await self._receive()
        except TimeoutError as error:
            self._resources.metrics.count_rejected("too-slow")
            raise TooSlow(
                f"a body must arrive at no less than {MIN_BYTES_PER_S} bytes per second"
            ) from error
        restored_s = len(message.get("body", b"")) / MIN_BYTES_PER_S
        self._patience_s = min(BODY_PATIENCE_S, self._patience_s - (now() - start_s) + restored_s)
        return message

    def _check_headers(self) -> None:
        if not self._stated_length.isdigit():
            raise BadRequest("the Content-Length header must be a number")
        if int(self._stated_length) > self._limit:
            raise _too_large(self._limit)
        if self._has_images:
            refuse_when_down(self._resources.engine, self._resources.metrics)
            if not self._has_room():
                raise self._resources.admission.images.refusal()
        key = self._scope["state"].get("key")  # the route sets it before it reads the body
        self._key = None if key is None else key.id
        if self._is_stored:
            return
        # The stated length is only checked; bytes are reserved when they arrive.
        self._resources.admission.bytes.check(int(self._stated_length), owner=self._key)
        self._reserve(min(int(self._stated_length), _RESERVED_BYTES))

    def _has_room(self) -> bool:
        admission = self._resources.admission
        # Cached images need no capacity, and only the body shows which images they are.
        if isinstance(self._resources.pipeline, CachedPipeline):
            return not admission.images.full
        return admission.images.has_room(1, deadline=self._deadline)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self._reserved_bytes:
            self._resources.admission.bytes.reserve(
                num_bytes - self._reserved_bytes, owner=self._key
            )
            self._reserved_bytes = num_bytes


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body must have at most {limit} bytes", limit="max_body_bytes")


def _find_route(scope: Scope) -> str:
    """Returns the route's pattern: raw paths would create an unbounded number of metric labels."""
    return str(getattr(scope.get("route"), "path", "other"))


class HeadMiddleware:
    """Handles HEAD like GET; the ASGI server still sees HEAD and drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class SecurityHeadersMiddleware:
    """Adds to every answer the security headers that its route did not set itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        defaults = _DOCS_DEFAULTS if scope["path"] == _DOCS else _DEFAULTS

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in defaults if name not in names),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _security_headers(policy: str) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"x-content-type-options", b"nosniff"),
        # Embeddings reveal their images, and a shared cache would ignore X-API-Key and serve one
        # client's answer to another.
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"content-security-policy", policy.encode()),
    )


_DEFAULTS: Final = _security_headers(_DATA_POLICY)
_DOCS_DEFAULTS: Final = _security_headers(_DOCS_POLICY)
