"""The state of a request's client, which its connection knows without waiting for a message.

A body that was received needs no time limit, and a request that its connection notifies of a
disconnect needs no task that waits for one.
"""

from collections.abc import Callable
from typing import Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY: Final = "mlcd.presence"


class ClientPresence:
    """The client of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_leave: Callable[[], None] | None = None

    @property
    def sent_all(self) -> bool:
        """Tells whether the whole body was received, so that the next message is the last part."""
        return not self._cycle.more_body

    @property
    def answered(self) -> bool:
        """Tells whether the answer has started."""
        return self._cycle.response_started

    def watch(self, on_leave: Callable[[], None]) -> None:
        """Calls `on_leave` when the client leaves."""
        self._cycle.flow.resume_reading()  # a paused connection does not notice a disconnect
        self._on_leave = on_leave

    def forget(self) -> None:
        """Ends `watch`."""
        self._on_leave = None

    @property
    def awaits_continue(self) -> bool:
        """Tells whether the client still waits for `100 Continue` before it sends its body."""
        return self._cycle.waiting_for_100_continue

    def leave(self) -> None:
        """Notifies `on_leave` and a pending `receive` that the client has left."""
        # uvicorn notifies only the newest request of a connection.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._on_leave is not None:
            self._on_leave()

    def enter(self, scope: Scope) -> None:
        """Registers this object in a scope, for `presence_of`."""
        scope["extensions"] = {_KEY: self}


def presence_of(scope: Scope) -> ClientPresence | None:
    """Returns the client of a request; None if another server runs the application."""
    presence: ClientPresence | None = scope.get("extensions", {}).get(_KEY)
    return presence
