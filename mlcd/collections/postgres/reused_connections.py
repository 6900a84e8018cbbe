"""A pool of Postgres connections that reconnects in the request itself.

A pool that reconnects in the background makes a request wait while Postgres is unreachable, and for
a while after it is back. Here a request without an idle connection opens one, and so gets the
reason for a failure immediately.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

_READ_ONLY: Final = (errors.ReadOnlySqlTransaction, errors.CannotConnectNow)
_CHECK_AFTER_S: Final = 0.5  # idle time after which a connection is tested before it is lent
Connection = psycopg.Connection[tuple[Any, ...]]


class ReusedConnections:
    """Up to `max_connections` connections. All methods are thread-safe."""

    def __init__(self, connect: Callable[[], Connection], max_connections: int) -> None:
        self._connect, self._free = connect, threading.BoundedSemaphore(max_connections)
        self._idle: deque[tuple[float, Connection]] = deque()  # (idle since, connection)
        self._closed = False
        # Connections of earlier generations are closed: their server may be down or read-only.
        self._generation = 0

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lends a working connection; waits if all are lent."""
        with self._free:
            generation, connection = self._generation, self._take_working()
            try:
                yield connection
            except _READ_ONLY:
                # After a failover, the URL leads to a new server; idle connections lead to the old.
                self._discard_idle()
                raise
            finally:
                status = connection.info.transaction_status
                if self._closed or status != TransactionStatus.IDLE:
                    connection.close()
                    self._discard_idle()  # the server may be down
                elif generation != self._generation:
                    connection.close()
                else:
                    self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        self._closed = True
        self._discard_idle()

    def _discard_idle(self) -> None:
        self._generation += 1
        while self._idle:
            self._idle.pop()[1].close()

    def _take_working(self) -> Connection:
        while True:
            try:
                since, connection = self._idle.pop()
            except IndexError:
                return self._connect()
            try:
                if time.monotonic() - since > _CHECK_AFTER_S:
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:  # the server was restarted or closed the connection
                connection.close()
