"""Bounds on HTTP connections: their number, their waiting times, and the bytes outside of bodies.

uvicorn itself waits forever for a request's headers, for the rest of a body that nobody reads, and
for a client that does not read its answer. It accepts headers of any size and any number of
connections.
"""

import asyncio
import socket
from collections import deque
from itertools import chain
from typing import Any, Final, cast

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlcd.service.http.middleware import PROBES
from mlcd.service.http.presence import ClientPresence
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import (
    ANSWER_READ_S,
    BODY_REST_S,
    CLIENT_POLL_S,
    CROWDED_RETRY_S,
    HALF_CLOSED_S,
    REQUEST_HEADERS_S,
)

# Headers, chunk framing and trailers of one request; a larger overhead needs as many body bytes.
MAX_OVERHEAD_BYTES: Final = 64 * 2**10
_MAX_PIPELINED: Final = 16
MAX_PROBE_CONNECTIONS: Final = 16  # above the limit, for health and metrics
_PROBES: Final = frozenset(path.encode() for path in PROBES)
# HTTP/1.1 clients skip this response, also if they did not request it.
_CONTINUE: Final = STATUS_LINE[100] + b"\r\n"
_CROWDED: Final = orjson.dumps(
    {
        "type": "urn:mlcd:problem:unavailable",
        "title": "Unavailable",
        "status": 503,
        "detail": "the server has its maximum number of connections: try again in a moment",
    }
)


class ConnectionBounds:
    """The limits and lists that all connections of a server share."""

    def __init__(self, *, max_connections: int, exchange_s: float, metrics: Metrics) -> None:
        """max_connections: more than these are closed. exchange_s: seconds from a request's last
        header until its answer is ready.
        """
        self.max_connections, self.exchange_s = max_connections, exchange_s + ANSWER_READ_S
        # Connections whose client still sends a body that was answered, or does not read its
        # answer; the oldest first.
        self.answered: dict[HttpConnection, None] = {}
        # Connections between two requests; the longest wait first.
        self.waiting: dict[HttpConnection, None] = {}
        self.num = 0
        self._metrics = metrics
        metrics.track_held("connections", lambda: self.num)

    def make_room(self, newest: "HttpConnection", num: int) -> None:
        """Closes the oldest connection without a request in progress.

        If all `num` connections are at work, keeps up to 16 above the limit open, for probes; then
        closes the newest.
        """
        oldest = next(chain(self.answered, self.waiting), None)
        if oldest is None and num <= self.max_connections + MAX_PROBE_CONNECTIONS:
            return
        # `connection_lost` also removes it, but later: more connections may arrive before that.
        self.forget(oldest or newest)
        self.count_closed("too-many")
        (oldest or newest).transport.abort()

    def forget(self, connection: "HttpConnection") -> None:
        """Removes a connection from the lists because it is at work, or closed."""
        self.answered.pop(connection, None)
        self.waiting.pop(connection, None)

    def count_closed(self, reason: str) -> None:
        self._metrics.count_rejected(f"connection-{reason}")


class HttpConnection(HttpToolsProtocol):
    """A connection of uvicorn on which a timer always runs; when it ends, the connection closes."""

    def __init__(self, *, bounds: ConnectionBounds, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None
        self._client_poll: asyncio.TimerHandle | None = None
        self._received_bytes = self._body_bytes = 0
        self._message_complete = True
        self._lingering = False
        self._presences: deque[ClientPresence] = deque()  # of requests whose answer is not complete

    # uvloop's transport has the methods of asyncio.Transport without being a subclass.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bounds.num = len(self.connections)
        if len(self.connections) > self._bounds.max_connections:
            self._bounds.make_room(self, len(self.connections))
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.forget(self)
        for timer in (self._timer, self._client_poll):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        for presence in self._presences:
            presence.leave()
        self._bounds.num = len(self.connections)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        if (
            self._received_bytes - self._body_bytes > MAX_OVERHEAD_BYTES + self._body_bytes
            and not self.transport.is_closing()
        ):
            self._refuse_overhead()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open if an answer is due. The client may have left, or only have
        finished sending, as `nc -N` does; its reaction to bytes from the server tells which.
        """
        if not self._awaits_answer():
            return False
        if self._client_poll is None:
            self.cycle.keep_alive = False  # closes after the last request
            self._client_poll = self.loop.call_later(HALF_CLOSED_S, self._probe_client)
        return True

    def _awaits_answer(self) -> bool:
        return self._message_complete and bool(self._presences) and not self._presences[0].answered

    def _probe_client(self) -> None:
        if self._awaits_answer() and self.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)
        self._poll_client()

    def _poll_client(self) -> None:
        """Closes the connection once the client's system has rejected bytes from the server."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._client_poll = self.loop.call_later(CLIENT_POLL_S, self._poll_client)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bounds.answered[self] = None

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._bounds.forget(self)

    def on_message_begin(self) -> None:
        self._message_complete = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._bounds.forget(self)
        self._restart_timer(self._bounds.exchange_s)
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests at once")  # the parser answers 400
        is_crowded = (
            len(self.connections) > self._bounds.max_connections
            and self.url.partition(b"?")[0] not in _PROBES
        )
        if is_crowded:
            self._bounds.count_closed("crowded")
        self.app = _refuse_crowded if is_crowded else self.config.loaded_app
        super().on_headers_complete()
        # `_LingeringTransport` has every method of a transport that a cycle uses.
        self.cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]
        presence = ClientPresence(self.cycle)
        presence.enter(cast(Scope, self.scope))
        self._presences.append(presence)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._message_complete = True
        self._received_bytes = self._body_bytes = 0
        super().on_message_complete()
        if self._lingering:
            self.transport.close()
            return
        if self.cycle.response_complete:
            self._await_request()

    def close_after_answer(self) -> None:
        """Closes the connection after the client has sent the rest of its request.

        Closing with unread bytes would reset the connection, and many clients would never read the
        refusal.
        """
        if self._message_complete or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingering = True
        self.transport.write_eof()

    def send_400_response(self, msg: str) -> None:
        if self._lingering:
            self.transport.abort()
            return
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._presences.popleft()  # answers come in the order of their requests
        has_next_request = bool(self.pipeline)
        super().on_response_complete()
        if has_next_request:
            self._restart_timer(self._bounds.exchange_s)
        elif self.transport.is_closing():
            return
        elif self._message_complete:
            self._await_request()
        else:
            self._bounds.answered[self] = None
            self._restart_timer(BODY_REST_S)

    def _await_request(self) -> None:
        self._bounds.forget(self)
        if self.transport.get_write_buffer_size():  # the client has not received the whole answer
            self._bounds.answered[self] = None
            self._restart_timer(self._bounds.exchange_s)
            return
        self._bounds.waiting[self] = None
        self._restart_timer(REQUEST_HEADERS_S)

    def _restart_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._abort_late)

    def _abort_late(self) -> None:
        self._bounds.count_closed("late")
        self.transport.abort()

    def _refuse_overhead(self) -> None:
        self._bounds.count_closed("overhead")
        if self._lingering or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.abort()
            return
        self.transport.write(STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


async def _refuse_crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 503; used for all requests but probes while there are too many connections."""
    headers = {"Retry-After": str(CROWDED_RETRY_S), "Connection": "close"}
    await Response(_CROWDED, 503, headers, "application/problem+json")(scope, receive, send)


class _LingeringTransport:
    """The transport that a cycle gets; `close` waits for the rest of the request."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def write(self, content: bytes) -> None:
        self._connection.transport.write(content)

    def close(self) -> None:
        self._connection.close_after_answer()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()
