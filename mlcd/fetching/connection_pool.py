"""Connections to hosts, kept for a while for the next request.

httpcore's own pool loses a place for good when a request is canceled before it uses the connection
that was made for it. Here a connection belongs to the request that uses it.
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import httpcore

from mlcd.fetching.urls import Url

_Place: TypeAlias = tuple[str, str, int]
# A connection without a request is kept for less than hosts commonly allow, so that they seldom
# close it under a request.
_KEPT_S: Final = 2.0


class ConnectionPool:
    """The connections that no request uses now. most: how many are kept."""

    def __init__(
        self, network: httpcore.AsyncNetworkBackend, context: ssl.SSLContext | None, *, most: int
    ) -> None:
        self._network, self._context, self._most = network, context, most
        self._kept: list[tuple[_Place, httpcore.AsyncHTTPConnection]] = []  # the oldest first
        self._to_close: list[httpcore.AsyncHTTPConnection] = []

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def connection(self, url: Url) -> AsyncIterator[httpcore.AsyncHTTPConnection]:
        """Yields a connection to the place of a URL, for one request."""
        place = url.scheme, url.host, url.port
        connection = self._take_kept(place) or self._open_new(place)
        try:
            yield connection
        finally:
            if connection.is_available():  # the answer was read to its end
                self._kept.append((place, connection))
            else:
                self._to_close.append(connection)
            self._to_close += [
                connection_to_close for _, connection_to_close in self._kept[: -self._most]
            ]
            del self._kept[: -self._most]
            await self._close()

    async def aclose(self) -> None:
        self._to_close += [connection for _, connection in self._kept]
        self._kept.clear()
        await self._close()

    async def _close(self) -> None:
        while self._to_close:  # a request that is canceled here leaves the others to the next
            await self._to_close.pop().aclose()

    def _take_kept(self, place: _Place) -> httpcore.AsyncHTTPConnection | None:
        """Takes the newest connection to a place; those that have expired are to be closed."""
        self._to_close += [connection for _, connection in self._kept if connection.has_expired()]
        self._kept = [entry for entry in self._kept if entry[1] not in self._to_close]
        newest = next((entry for entry in reversed(self._kept) if entry[0] == place), None)
        if newest is not None:
            self._kept.remove(newest)
        return None if newest is None else newest[1]

    def _open_new(self, place: _Place) -> httpcore.AsyncHTTPConnection:
        scheme, host, port = place
        return httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme.encode(), host.encode(), port),
            ssl_context=self._context,
            keepalive_expiry=_KEPT_S,
            network_backend=self._network,
        )
