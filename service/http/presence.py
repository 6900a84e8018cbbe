"""The client of a request, as its connection knows it without waiting for a message.

A body that has come needs no time limit, and a request that its connection tells of the client's
end needs no task that waits for it.
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
        """Tells whether the whole body has come: the next message is there, and the last one."""
        return not self._cycle.more_body

    @property
    def answered(self) -> bool:
        """Tells whether its answer has begun."""
        return self._cycle.response_started

    def watch(self, on_leave: Callable[[], None]) -> None:
        """Calls `on_leave` when the client leaves."""
        self._cycle.flow.resume_reading()  # a connection that is not read hears of no end
        self._on_leave = on_leave

    def forget(self) -> None:
        """Ends `watch`."""
        self._on_leave = None

    @property
    def sends_nothing(self) -> bool:
        """Tells whether the client keeps its body until it is told to go on, which it was not."""
        return self._cycle.waiting_for_100_continue

    def leave(self) -> None:
        """Tells who watches, and who waits for a message, that the client has left."""
        # uvicorn tells the newest request of a connection alone.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._on_leave is not None:
            self._on_leave()

    def enter(self, scope: Scope) -> None:
        """Makes `presence_of` find it."""
        scope["extensions"] = {_KEY: self}


def presence_of(scope: Scope) -> ClientPresence | None:
    """Returns the client of a request; None where another server than ours runs the application."""
    presence: ClientPresence | None = scope.get("extensions", {}).get(_KEY)
    return presence
