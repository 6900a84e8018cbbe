"""The client that fetches an image: every hop is checked, and hosts take turns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final, Self, TypeAlias, cast
from weakref import WeakValueDictionary

import httpcore

from mlcd.errors import MlcdError
from mlcd.fetching.connection_pool import ConnectionPool
from mlcd.fetching.domain_places import DomainPlaces
from mlcd.fetching.fetch_refusals import fetch_failed, host_refused
from mlcd.fetching.hosts import allows
from mlcd.fetching.network import CheckedNetwork, MeteredStream
from mlcd.fetching.policy import FetchPolicy
from mlcd.fetching.resolver import LookUp, Resolver, system_addresses
from mlcd.fetching.urls import Url
from mlcd.too_many_files import refuse_too_many_files

# Yields for one answer what is called with its total size whenever more is known, and may raise.
Receiving: TypeAlias = Callable[[], AbstractContextManager[Callable[[int], None]]]
# Times the connections of a host: the threads that resolve names, at least.
_DOMAINS: Final = 4
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_OK: Final = 200
_BINARY: Final = (b"application/octet-stream", b"binary/octet-stream")
_REQUEST_HEADERS: Final = (
    (b"User-Agent", b"mlcd"),
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),
)


class UrlClient:
    """The client, used as an async context manager."""

    def __init__(self, policy: FetchPolicy, *, look_up: LookUp = system_addresses) -> None:
        self._policy = policy
        most, of_host = policy.max_connections, policy.max_connections_per_host
        self._resolver = Resolver(look_up, num_threads=max(most, _DOMAINS * of_host))
        # A bound per host above half of all places says that one host may take them all.
        self._places = DomainPlaces(most, least=of_host if 2 * of_host > most else 0)
        self._host_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        policy = self._policy
        self.kept = ConnectionPool(
            CheckedNetwork(policy.networks, self._resolver),
            # The certificates of the system and of certifi, which take long to load: once, and only
            # where images are fetched.
            httpcore.default_ssl_context() if policy.hosts else None,
            most=policy.max_connections,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kept.aclose()
        self._resolver.close()

    def check_allowed(self, url: Url) -> Url:
        """Returns the URL. Raises ImageRejected where the policy does not have its host or port."""
        if url.port not in self._policy.ports or not allows(self._policy.hosts, url.host):
            raise host_refused(f"{url.authority} is not an allowed host and port")
        return url

    async def fetch(self, url: Url, receiving: Receiving) -> bytes:
        """Fetches a URL and follows redirects, each of which is checked like the first URL.

        Raises ImageRejected, what `receiving` raises, and TimeoutError where an answer takes longer
        than the policy allows.
        """
        for _ in range(1 + self._policy.max_redirects):
            async with self._turn(url.host), asyncio.timeout(self._policy.turn_s):
                image_or_target = await self._hop(url, receiving)
            if isinstance(image_or_target, bytes):
                return image_or_target
            target = self.check_allowed(url.join(image_or_target))
            if url.scheme == "https" and target.scheme == "http":
                raise fetch_failed(
                    "the URL leads from https to http", f"{url.host} leads from https to http"
                )
            url = target
        raise fetch_failed("the URL redirects too often", f"{url.host} redirects too often")

    async def _hop(self, url: Url, receiving: Receiving) -> bytes | str:
        """Returns the image, or the URL of a redirect."""
        try:
            return await self._ask(url, receiving)
        except MlcdError:
            raise
        # Hosts may send anything, and the libraries raise many errors at it.
        except Exception as error:
            refuse_too_many_files(error)  # for which the host is not to blame
            raise fetch_failed(
                "the URL's host could not be reached, or broke off",
                f"{url.host} could not be reached, or broke off ({type(error).__name__})",
            ) from error

    async def _ask(self, url: Url, receiving: Receiving) -> bytes | str:
        # The URL is given in parts: another parser would parse a text a second time.
        target = httpcore.URL(
            scheme=url.scheme.encode(),
            host=url.host.encode(),
            port=url.port,
            target=url.target.encode(),
        )
        headers = [(b"Host", url.authority.encode()), *_REQUEST_HEADERS]
        async with (
            self.kept.connection(url) as connection,
            connection.stream("GET", target, headers=headers) as answer,
        ):
            fields = {name.lower(): value for name, value in answer.headers}
            if answer.status in _REDIRECTS and b"location" in fields:
                return fields[b"location"].decode("latin-1")
            if answer.status != _OK or not _is_image(fields):
                answered = "no image" if answer.status == _OK else str(answer.status)
                raise fetch_failed(
                    "the URL's host did not answer with an image",
                    f"{url.host} answered with {answered}",
                )
            return await _read(answer, receiving)

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """Waits for a turn at the host, then for one of the connections that domains share.

        In this order, waiting for a slow host takes no connection from other hosts.
        """
        of_host = self._host_turns.setdefault(
            host, asyncio.Semaphore(self._policy.max_connections_per_host)
        )
        async with of_host:
            await self._places.take(host)
            try:
                yield
            finally:
                self._places.leave(host)


def _is_image(fields: dict[bytes, bytes]) -> bool:
    """Tells by the headers whether an answer is an image; the decoder checks the bytes.

    A compressed answer is refused: it could be of any size.
    """
    kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    coding = fields.get(b"content-encoding", b"").strip().lower()
    return coding in (b"", b"identity") and (kind.startswith(b"image/") or kind in _BINARY)


async def _read(answer: httpcore.Response, receiving: Receiving) -> bytes:
    """Reads the body, and stops as soon as it is too long by its stated or its real length."""
    connection = cast(MeteredStream, answer.extensions["network_stream"])
    image = bytearray()
    with receiving() as reach:
        reach(
            max(
                (int(value) for name, value in answer.headers if name.lower() == b"content-length"),
                default=0,
            )
        )
        async for chunk in answer.aiter_stream():
            connection.account(len(chunk))
            reach(len(image) + len(chunk))
            image += chunk
    return bytes(image)
