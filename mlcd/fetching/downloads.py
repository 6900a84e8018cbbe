"""Downloads single images at URLs for callers without an event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, Self

from fsspec.asyn import get_loop

from mlcd.errors import ImageRejected
from mlcd.fetching.fetch_refusals import FetchRejected
from mlcd.fetching.policy import FetchPolicy
from mlcd.fetching.url_client import UrlClient
from mlcd.fetching.urls import parse_url

_MAX_BYTES: Final = 32 << 20  # per image
_MAX_BUFFERED_BYTES: Final = 256 << 20  # of all images that wait to be decoded


class Downloads:
    """A client in fsspec's event loop, used as a context manager; safe to share among threads."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy, self._client, self._loop = policy, UrlClient(policy), get_loop()
        self._lock, self._buffered_bytes = threading.Lock(), 0
        self._running: set[Future[Any]] = set()

    def __enter__(self) -> Self:
        asyncio.run_coroutine_threadsafe(self._client.__aenter__(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        for future in list(self._running):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._client.__aexit__(), self._loop).result()

    def is_full(self) -> bool:
        """Returns whether the buffered images reach the limit of bytes."""
        return self._buffered_bytes >= _MAX_BUFFERED_BYTES

    def begin(self, text: str) -> Callable[[], bytes]:
        """Starts to fetch a URL. Returns a function that waits for the image; it raises
        ImageRejected if the fetch fails.
        """
        future = asyncio.run_coroutine_threadsafe(self._fetch(text), self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

        def take() -> bytes:
            image = future.result()
            self._add_bytes(-len(image))
            return image

        return take

    async def _fetch(self, text: str) -> bytes:
        url = parse_url(text)
        try:
            return await self._client.fetch(self._client.check_allowed(url), self._receiving)
        except TimeoutError:
            raise ImageRejected(
                "fetch-late", f"{url.shown}: no image within {self._policy.turn_s:g} s"
            ) from None
        except FetchRejected as rejection:
            shown = rejection.message if self._policy.private else rejection.detail
            raise ImageRejected(rejection.reason, f"{url.shown}: {shown}") from None

    @contextmanager
    def _receiving(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts the bytes of one image; a failure releases them."""
        num_buffered = 0

        def count_bytes(num: int) -> None:
            nonlocal num_buffered
            if num > _MAX_BYTES:
                raise ImageRejected(
                    "too-many-bytes", f"an image of more than {_MAX_BYTES >> 20} MiB"
                )
            self._add_bytes(max(0, num - num_buffered))
            num_buffered = max(num_buffered, num)

        try:
            yield count_bytes
        except BaseException:
            self._add_bytes(-num_buffered)
            raise

    def _add_bytes(self, num: int) -> None:
        with self._lock:
            self._buffered_bytes += num
