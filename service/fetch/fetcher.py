"""The fetcher of images at URLs: in parallel, within the deadline; each image may fail alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Self, TypeAlias, cast
from weakref import WeakValueDictionary

import httpcore

from mlcd.errors import ImageRejected, MlcdError, Overloaded
from service.fetch.budget import Budget, Share
from service.fetch.network import CheckedNetwork, MeteredStream, host_refused
from service.fetch.resolver import LookUp, Resolver, system_addresses
from service.fetch.urls import GivenImage, ImageUrl, Url, parse_url
from service.hosts import allows
from service.settings import Fetch, Limits
from service.telemetry.metrics import Metrics
from service.telemetry.request import took
from service.timings import FETCH_KEPT_S

_Outcome: TypeAlias = bytes | ImageRejected
# Domains whose name servers do not answer, before names of other domains wait for them.
_DOMAINS: Final = 4
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_OK: Final = 200
_BINARY: Final = (b"application/octet-stream", b"binary/octet-stream")
_REQUEST_HEADERS: Final = (
    (b"User-Agent", b"mlcd"),
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),
)


class Fetcher:
    """The fetcher that all routes share, used as an async context manager.

    The limits on what a request fetches are those of a body. Without hosts in `settings.allow` it
    opens nothing and refuses every URL.
    """

    def __init__(
        self,
        settings: Fetch,
        limits: Limits,
        metrics: Metrics,
        *,
        look_up: LookUp = system_addresses,
    ) -> None:
        self._settings, self._limits, self._metrics = settings, limits, metrics
        self._num_waiting = 0
        self._budget = Budget(limits, metrics)
        of_domain = settings.max_connections_per_host
        num_threads = max(settings.max_connections, _DOMAINS * of_domain)
        self._resolver = Resolver(look_up, num_threads=num_threads, most_per_domain=of_domain)
        self._turns = asyncio.Semaphore(settings.max_connections)
        self._host_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        settings = self._settings
        self._pool = httpcore.AsyncConnectionPool(
            # The certificates of the system and of certifi, which take long to load: once, and only
            # where images are fetched.
            ssl_context=httpcore.default_ssl_context() if settings.allow else None,
            max_connections=settings.max_connections,
            keepalive_expiry=FETCH_KEPT_S,
            network_backend=CheckedNetwork(settings.networks, self._resolver),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()
        self._resolver.close()

    def screened(self, images: Sequence[GivenImage]) -> list[bytes | ImageRejected | Url]:
        """Parses the URLs without any request; a URL that must be refused becomes its refusal."""
        return [self._screen(image) if isinstance(image, ImageUrl) else image for image in images]

    @asynccontextmanager
    async def fetched(
        self, images: Sequence[bytes | ImageRejected | Url], *, deadline: float
    ) -> AsyncIterator[list[_Outcome]]:
        """Yields every image; one at a URL becomes its bytes or the reason why it failed.

        The bytes count against the budget until the context ends. deadline: by the running loop's
        clock. Raises Overloaded where the server is at its limit of fetches.
        """
        urls = [image for image in images if isinstance(image, Url)]
        with self._waiting(len(urls)), self._budget.share() as share:
            until = min(deadline, asyncio.get_running_loop().time() + self._settings.timeout_s)
            found = iter(await _all_or_none([self._outcome(url, share, until) for url in urls]))
            yield [next(found) if isinstance(image, Url) else image for image in images]

    def _screen(self, image: ImageUrl) -> Url | ImageRejected:
        if not self._settings.allow:
            remedy = (
                "send the image itself as a data-URI, or start the server with MLCD_FETCH__ALLOW"
            )
            return ImageRejected("unreadable", "fetching URLs is off", remedy=remedy)
        try:
            return self._allowed(parse_url(image.text))
        except ImageRejected as rejection:
            self._metrics.fetch(rejection.reason, 0.0)
            return _untraced(rejection)

    def _allowed(self, url: Url) -> Url:
        if url.port not in self._settings.ports or not allows(self._settings.allow, url.host):
            raise host_refused()
        return url

    async def _outcome(self, url: Url, share: Share, until: float) -> _Outcome:
        started, outcome = time.perf_counter(), "cancelled"
        try:
            async with asyncio.timeout_at(until):
                image = await self._follow(url, share)
            outcome = "fetched"
        except TimeoutError:
            outcome = "fetch-late"
            return ImageRejected("fetch-late", "the URL's host did not give the image in time")
        except ImageRejected as rejection:
            outcome = rejection.reason
            return _untraced(rejection)
        except Overloaded:
            outcome = "overloaded"
            raise
        else:
            return image
        finally:
            ended = time.perf_counter()
            self._metrics.fetch(outcome, ended - started)
            took("fetch", started, ended)

    async def _follow(self, url: Url, share: Share) -> bytes:
        """Fetches a URL and follows redirects, each of which is checked like the first URL."""
        for _ in range(1 + self._settings.max_redirects):
            async with self._turn(url.host):
                found = await self._hop(url, share)
            if isinstance(found, bytes):
                return found
            target = self._allowed(url.joined(found))
            if url.scheme == "https" and target.scheme == "http":
                raise _failed("the URL leads from https to http")
            url = target
        raise _failed("the URL redirects too often")

    async def _hop(self, url: Url, share: Share) -> bytes | str:
        """Returns the image, or the URL of a redirect."""
        try:
            return await self._ask(url, share)
        except MlcdError:
            raise
        # Hosts may send anything, and the libraries raise many errors at it.
        except Exception as error:
            raise _failed("the URL's host could not be reached, or broke off") from error

    async def _ask(self, url: Url, share: Share) -> bytes | str:
        # The URL is given in parts: another parser would parse a text a second time.
        target = httpcore.URL(
            scheme=url.scheme.encode(),
            host=url.host.encode(),
            port=url.port,
            target=url.target.encode(),
        )
        headers = [(b"Host", url.authority.encode()), *_REQUEST_HEADERS]
        async with self._pool.stream("GET", target, headers=headers) as answer:
            stated = {name.lower(): value for name, value in answer.headers}
            if answer.status in _REDIRECTS and b"location" in stated:
                return stated[b"location"].decode("latin-1")
            if answer.status != _OK or not _is_image(stated):
                raise _failed("the URL's host did not answer with an image")
            return await _read(answer, share)

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """Waits for a turn at the host, then for one of all connections.

        In this order, waiting for a slow host takes no connection from other hosts.
        """
        of_host = self._host_turns.setdefault(
            host, asyncio.Semaphore(self._settings.max_connections_per_host)
        )
        async with of_host, self._turns:
            yield

    @contextmanager
    def _waiting(self, num: int) -> Iterator[None]:
        if num and self._num_waiting + num > self._limits.max_queued_images:
            raise Overloaded(
                "the server is at its limit of fetched images", remedy="try again in a moment"
            )
        self._num_waiting += num
        try:
            yield
        finally:
            self._num_waiting -= num


async def _all_or_none(fetches: Sequence[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
    """Returns all outcomes; when a fetch raises, it first ends the others, which release theirs."""
    tasks = [asyncio.ensure_future(fetch) for fetch in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_image(stated: dict[bytes, bytes]) -> bool:
    """Tells by the headers whether an answer is an image; the decoder checks the bytes.

    A compressed answer is refused: it could be of any size.
    """
    kind = stated.get(b"content-type", b"").partition(b";")[0].strip().lower()
    coding = stated.get(b"content-encoding", b"").strip().lower()
    return coding in (b"", b"identity") and (kind.startswith(b"image/") or kind in _BINARY)


async def _read(answer: httpcore.Response, share: Share) -> bytes:
    """Reads the body, and stops as soon as it is too long by its stated or its real length."""
    connection = cast(MeteredStream, answer.extensions["network_stream"])
    image = bytearray()
    with share.image() as reach:
        reach(
            max(
                (int(value) for name, value in answer.headers if name.lower() == b"content-length"),
                default=0,
            )
        )
        async for chunk in answer.aiter_stream():
            connection.accounted(len(chunk))
            reach(len(image) + len(chunk))
            image += chunk
    return bytes(image)


def _failed(message: str) -> ImageRejected:
    return ImageRejected("fetch-failed", message)


def _untraced(rejection: ImageRejected) -> ImageRejected:
    """Returns the rejection without its traceback, whose frames keep the fetched bytes."""
    return ImageRejected(rejection.reason, rejection.message, remedy=rejection.remedy)
