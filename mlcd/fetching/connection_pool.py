"""A pool of idle connections to hosts.

httpcore's own pool permanently loses a slot if a request is canceled before it uses the connection
that the pool opened for it. Here a connection belongs to the request that uses it.
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import httpcore

from mlcd.fetching.urls import Url

_Origin: TypeAlias = tuple[str, str, int]
# Shorter than the idle timeout of most hosts, so that hosts rarely close a connection in use.
_MAX_IDLE_S: Final = 2.0


class ConnectionPool:
    """The idle connections. most: maximum number of idle connections."""

    def __init__(
        self, network: httpcore.AsyncNetworkBackend, context: ssl.SSLContext | None, *, most: int
    ) -> None:
        self._network, self._context, self._most = network, context, most
        self._idle: list[tuple[_Origin, httpcore.AsyncHTTPConnection]] = []  # oldest first
        self._to_close: list[httpcore.AsyncHTTPConnection] = []

    def __len__(self) -> int:
        return len(self._idle)

    @asynccontextmanager
    async def connection(self, url: Url) -> AsyncIterator[httpcore.AsyncHTTPConnection]:
        """Yields a connection to the origin of a URL, for one request."""
        origin = url.scheme, url.host, url.port
        connection = self._take_idle(origin) or self._open_new(origin)
        try:
            yield connection
        finally:
            if connection.is_available():  # the response was read in full
                self._idle.append((origin, connection))
            else:
                self._to_close.append(connection)
            self._to_close += [excess for _, excess in self._idle[: -self._most]]
            del self._idle[: -self._most]
            await self._close()

    async def aclose(self) -> None:
        self._to_close += [connection for _, connection in self._idle]
        self._idle.clear()
        await self._close()

    async def _close(self) -> None:
        while self._to_close:  # if canceled here, the next request closes the remaining ones
            await self._to_close.pop().aclose()

    def _take_idle(self, origin: _Origin) -> httpcore.AsyncHTTPConnection | None:
        """Takes the newest idle connection to an origin; schedules expired ones for closing."""
        self._to_close += [connection for _, connection in self._idle if connection.has_expired()]
        self._idle = [entry for entry in self._idle if entry[1] not in self._to_close]
        newest = next((entry for entry in reversed(self._idle) if entry[0] == origin), None)
        if newest is not None:
            self._idle.remove(newest)
        return None if newest is None else newest[1]

    def _open_new(self, origin: _Origin) -> httpcore.AsyncHTTPConnection:
        scheme, host, port = origin
        return httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme.encode(), host.encode(), port),
            ssl_context=self._context,
            keepalive_expiry=_MAX_IDLE_S,
            network_backend=self._network,
        )
