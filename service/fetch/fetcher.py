"""Fetches a request's images in parallel within its deadline; an image may fail by itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from mlcd.errors import ImageRejected, Overloaded
from mlcd.fetching.resolver import LookUp, system_addresses
from mlcd.fetching.urls import Url, parse_url
from mlcd.service.fetch.budget import Budget, Share
from mlcd.service.fetch.image_url import ImageUrl, RequestImage
from mlcd.service.settings import Fetch, Limits
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.telemetry.request import took

if TYPE_CHECKING:  # imported only if URLs may be fetched
    from mlcd.fetching.url_client import UrlClient

_Outcome: TypeAlias = bytes | ImageRejected


class Fetcher:
    """The fetcher that all routes share; an async context manager.

    A request may fetch as many bytes as its body may have. Without hosts in `settings.allow`, the
    fetcher opens nothing and refuses every URL.
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
        self._client = _new_client(settings, look_up) if settings.allow else None

    async def __aenter__(self) -> Self:
        if self._client is not None:
            await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.__aexit__()

    def screen(self, images: Sequence[RequestImage]) -> list[bytes | ImageRejected | Url]:
        """Parses the URLs without fetching; a URL that is not allowed becomes ImageRejected."""
        return [self._screen(image) if isinstance(image, ImageUrl) else image for image in images]

    @asynccontextmanager
    async def fetch(
        self, images: Sequence[bytes | ImageRejected | Url], *, deadline: float
    ) -> AsyncIterator[list[_Outcome]]:
        """Yields all images; each URL is replaced by the image's bytes or its error.

        The bytes count against the budget until the context ends. deadline: time of the running
        loop's clock. Raises Overloaded if the server is at its limit of fetches.
        """
        urls = [image for image in images if isinstance(image, Url)]
        with self._count_waiting(len(urls)), self._budget.share() as share:
            end_time = min(deadline, asyncio.get_running_loop().time() + self._settings.timeout_s)
            outcomes = iter(
                await _gather_or_cancel([self._fetch_one(url, share, end_time) for url in urls])
            )
            yield [next(outcomes) if isinstance(image, Url) else image for image in images]

    def _screen(self, image: ImageUrl) -> Url | ImageRejected:
        if self._client is None:
            remedy = (
                "send the image itself as a data-URI, or start the server with MLCD_FETCH__ALLOW"
            )
            return ImageRejected("unreadable", "fetching URLs is off", remedy=remedy)
        try:
            return self._client.check_allowed(parse_url(image.text))
        except ImageRejected as rejection:
            self._metrics.fetch(rejection.reason, 0.0)
            return _strip_trace(rejection)

    async def _fetch_one(self, url: Url, share: Share, end_time: float) -> _Outcome:
        assert self._client is not None  # else no URL was allowed
        started, outcome = time.perf_counter(), "cancelled"
        try:
            async with asyncio.timeout_at(end_time):
                image = await self._client.fetch(url, share.image)
            outcome = "fetched"
        except TimeoutError:
            outcome = "fetch-late"
            return ImageRejected("fetch-late", "the URL's host did not send the image in time")
        except ImageRejected as rejection:
            outcome = rejection.reason
            return _strip_trace(rejection)
        except Overloaded:
            outcome = "overloaded"
            raise
        else:
            return image
        finally:
            ended = time.perf_counter()
            self._metrics.fetch(outcome, ended - started)
            took("fetch", started, ended)

    @contextmanager
    def _count_waiting(self, num: int) -> Iterator[None]:
        if num and self._num_waiting + num > self._limits.max_queued_images:
            raise Overloaded(
                "the server is at its limit of fetched images", remedy="try again in a moment"
            )
        self._num_waiting += num
        try:
            yield
        finally:
            self._num_waiting -= num


def _new_client(settings: Fetch, look_up: LookUp) -> "UrlClient":
    # Importing the HTTP client takes a tenth of a server's import time.
    from mlcd.fetching.policy import FetchPolicy
    from mlcd.fetching.url_client import UrlClient

    policy = FetchPolicy(
        hosts=settings.allow,
        networks=settings.networks,
        ports=settings.ports,
        max_redirects=settings.max_redirects,
        max_connections=settings.max_connections,
        max_connections_per_host=settings.max_connections_per_host,
    )
    return UrlClient(policy, look_up=look_up)


async def _gather_or_cancel(fetches: Sequence[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
    """Returns all outcomes. If a fetch raises, cancels the others first, to free their bytes."""
    tasks = [asyncio.ensure_future(fetch) for fetch in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _strip_trace(rejection: ImageRejected) -> ImageRejected:
    """Returns a copy of the rejection without its traceback, whose frames keep the fetched bytes in
    memory, and without its causes.
    """
    return ImageRejected(rejection.reason, rejection.message, remedy=rejection.remedy)
