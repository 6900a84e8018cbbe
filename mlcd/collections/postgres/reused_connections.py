"""Connections to Postgres that wait to be used again.

A pool that reconnects in the background lets a request wait while Postgres is away, and goes on
waiting for a while after it is back. Here the request that finds no connection opens one, and
learns at once why it cannot.
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
_SURE_S: Final = 0.5  # after which a connection is tried before it is lent
Connection = psycopg.Connection[tuple[Any, ...]]


class ReusedConnections:
    """Up to `most` connections. Every method may be called from many threads."""

    def __init__(self, connect: Callable[[], Connection], most: int) -> None:
        self._connect, self._free = connect, threading.BoundedSemaphore(most)
        self._idle: deque[tuple[float, Connection]] = deque()  # since when
        self._closed = False
        self._generation = 0  # of connections: one ends when a server goes, or takes no writes

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lends a connection that works, and waits for one where all are lent."""
        with self._free:
            generation, connection = self._generation, self._working()
            try:
                yield connection
            except _READ_ONLY:
                # After a failover the URL leads to another server, and these still to the old one.
                self._forget()
                raise
            finally:
                status = connection.info.transaction_status
                if self._closed or status != TransactionStatus.IDLE:
                    connection.close()
                    self._forget()  # the server may have gone
                elif generation != self._generation:
                    connection.close()
                else:
                    self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        self._closed = True
        self._forget()

    def _forget(self) -> None:
        self._generation += 1
        while self._idle:
            self._idle.pop()[1].close()

    def _working(self) -> Connection:
        while True:
            try:
                since, connection = self._idle.pop()
            except IndexError:
                return self._connect()
            try:
                if time.monotonic() - since > _SURE_S:
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:  # the server was started again, or has closed it
                connection.close()
