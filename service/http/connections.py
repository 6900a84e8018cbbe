"""Bounds on HTTP connections: their number, their waiting times, and the bytes outside of bodies.

uvicorn alone waits forever for a request's headers, for the rest of a body that nobody reads, and
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

# Headers, chunk framing and trailers of one request; more is allowed only beside as much body.
MAX_OVERHEAD_BYTES: Final = 64 * 2**10
_MAX_PIPELINED: Final = 16
PLACES_FOR_PROBES: Final = 16  # connections above the limit, for health and metrics
_PROBES: Final = frozenset(path.encode() for path in PROBES)
# Every client of HTTP/1.1 reads past it, also where it did not ask for it.
_CONTINUE: Final = STATUS_LINE[100] + b"\r\n"
_CROWDED: Final = orjson.dumps(
    {
        "type": "urn:mlcd:problem:unavailable",
        "title": "Unavailable",
        "status": 503,
        "detail": "the server has as many connections as it may: try again in a moment",
    }
)


class ConnectionBounds:
    """The state that all connections of a server share."""

    def __init__(self, *, most: int, exchange_s: float, metrics: Metrics) -> None:
        """Prepares empty bounds.

        most: connections. exchange_s: seconds from a request's last header until its answer is
        ready.
        """
        self.most, self.exchange_s = most, exchange_s + ANSWER_READ_S
        # Connections whose client still sends an answered body, or does not read its answer; the
        # oldest first.
        self.answered: dict[HttpConnection, None] = {}
        # Connections between two requests; the one that has waited longest comes first.
        self.waiting: dict[HttpConnection, None] = {}
        self.num = 0
        self._metrics = metrics
        metrics.track_held("connections", lambda: self.num)

    def make_room(self, newest: "HttpConnection", num: int) -> None:
        """Closes the connection that is needed least; the newest of `num` where all others work.

        A few connections above the limit stay open then, for probes.
        """
        oldest = next(chain(self.answered, self.waiting), None)
        if oldest is None and num <= self.most + PLACES_FOR_PROBES:
            return
        # `connection_lost` forgets it, too, but runs later, when more connections may have come.
        self.forget(oldest or newest)
        self.count_closed("too-many")
        (oldest or newest).transport.abort()

    def forget(self, connection: "HttpConnection") -> None:
        """Removes the connection from the lists: it is at work, or gone."""
        self.answered.pop(connection, None)
        self.waiting.pop(connection, None)

    def count_closed(self, reason: str) -> None:
        self._metrics.count_rejected(f"connection-{reason}")


class HttpConnection(HttpToolsProtocol):
    """A connection of uvicorn with a timer that runs at every moment of its life."""

    def __init__(self, *, bounds: ConnectionBounds, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None
        self._client_poll: asyncio.TimerHandle | None = None
        self._received = self._body = 0
        self._message_complete = True
        self._lingering = False
        self._presences: deque[ClientPresence] = deque()  # of requests without an answer

    # uvloop's transport has the methods of asyncio's, and is none of its subclasses.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bounds.num = len(self.connections)
        if len(self.connections) > self._bounds.most:
            self._bounds.make_room(self, len(self.connections))
        self._wait()

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
        self._received += len(data)
        super().data_received(data)
        if (
            self._received - self._body > MAX_OVERHEAD_BYTES + self._body
            and not self.transport.is_closing()
        ):
            self._refuse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open where an answer is due: the client may only have sent all that
        it will send, as `nc -N` does, or have left. Only its reaction to what it is sent tells.
        """
        if not self._awaits_answer():
            return False
        if self._client_poll is None:
            self.cycle.keep_alive = False  # of the last request
            self._client_poll = self.loop.call_later(HALF_CLOSED_S, self._ask_client)
        return True

    def _awaits_answer(self) -> bool:
        return self._message_complete and bool(self._presences) and not self._presences[0].answered

    def _ask_client(self) -> None:
        if self._awaits_answer() and self.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)
        self._poll_client()

    def _poll_client(self) -> None:
        """Ends the connection once the client's system has refused what it was sent."""
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
        self._within(self._bounds.exchange_s)
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests at once")  # the parser answers 400
        crowded = (
            len(self.connections) > self._bounds.most and self.url.partition(b"?")[0] not in _PROBES
        )
        if crowded:
            self._bounds.count_closed("crowded")
        self.app = _refuse if crowded else self.config.loaded_app
        super().on_headers_complete()
        # It has every method of a transport that a cycle uses.
        self.cycle.transport = _Closing(self)  # type: ignore[assignment]
        presence = ClientPresence(self.cycle)
        presence.enter(cast(Scope, self.scope))
        self._presences.append(presence)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._message_complete = True
        self._received = self._body = 0
        super().on_message_complete()
        if self._lingering:
            self.transport.close()
            return
        if self.cycle.response_complete:
            self._wait()

    def close_after_answer(self) -> None:
        """Ends the connection after the client has sent the rest of its request.

        Closing it with unread bytes would reset it, and many clients would never read why they
        were refused.
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
        follows = bool(self.pipeline)
        super().on_response_complete()
        if follows:
            self._within(self._bounds.exchange_s)
        elif self.transport.is_closing():
            return
        elif self._message_complete:
            self._wait()
        else:
            self._bounds.answered[self] = None
            self._within(BODY_REST_S)

    def _wait(self) -> None:
        self._bounds.forget(self)
        if self.transport.get_write_buffer_size():  # the client has not received the whole answer
            self._bounds.answered[self] = None
            self._within(self._bounds.exchange_s)
            return
        self._bounds.waiting[self] = None
        self._within(REQUEST_HEADERS_S)

    def _within(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._bounds.count_closed("late")
        self.transport.abort()

    def _refuse(self) -> None:
        self._bounds.count_closed("overhead")
        if self._lingering or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.abort()
            return
        self.transport.write(STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 503, except to probes, while there are too many connections."""
    headers = {"Retry-After": str(CROWDED_RETRY_S), "Connection": "close"}
    await Response(_CROWDED, 503, headers, "application/problem+json")(scope, receive, send)


class _Closing:
    """The transport that an answer sees: closing it waits for the rest of the request."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def write(self, content: bytes) -> None:
        self._connection.transport.write(content)

    def close(self) -> None:
        self._connection.close_after_answer()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()
