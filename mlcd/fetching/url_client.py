"""The client that fetches images and posts events: checks every address and redirect, and limits
connections per host.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
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

# Per response, yields a function that is called with the size known so far; it may raise.
Receiving: TypeAlias = Callable[[], AbstractContextManager[Callable[[int], None]]]
# Resolver threads per connection of a host, at least
_DOMAINS: Final = 4
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_OK: Final = 200
_BINARY: Final = (b"application/octet-stream", b"binary/octet-stream")
_Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
_USER_AGENT: Final = (b"User-Agent", b"mlcd")
_IMAGE_HEADERS: Final = ((b"Accept", b"image/*"), (b"Accept-Encoding", b"identity"))
_MAX_POST_ANSWER_BYTES: Final = 64 * 2**10


@dataclass(frozen=True)
class PostAnswer:
    """The answer to a POST. fields: its headers, names in lower case."""

    status: int
    fields: dict[bytes, bytes]


class UrlClient:
    """The client, used as an async context manager."""

    def __init__(self, policy: FetchPolicy, *, look_up: LookUp = system_addresses) -> None:
        self._policy = policy
        total, per_host = policy.max_connections, policy.max_connections_per_host
        self._resolver = Resolver(look_up, num_threads=max(total, _DOMAINS * per_host))
        # A limit per host above half of all slots means that one host may take all slots.
        self._places = DomainPlaces(total, least=per_host if 2 * per_host > total else 0)
        self._host_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        policy = self._policy
        self.kept = ConnectionPool(
            CheckedNetwork(policy.networks, self._resolver),
            # Loading the certificates of the system and of certifi is slow: done once, if needed.
            httpcore.default_ssl_context() if policy.hosts else None,
            most=policy.max_connections,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kept.aclose()
        self._resolver.close()

    def check_allowed(self, url: Url) -> Url:
        """Returns the URL. Raises ImageRejected if the policy lacks its host or port."""
        if url.port not in self._policy.ports or not allows(self._policy.hosts, url.host):
            raise host_refused(f"{url.authority} is not an allowed host and port")
        return url

    async def fetch(self, url: Url, receiving: Receiving) -> bytes:
        """Fetches a URL and follows redirects, checking each target like the first URL.

        Raises ImageRejected, the errors of `receiving`, and TimeoutError if a response takes longer
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

    async def post(self, url: Url, content: bytes, headers: _Headers) -> PostAnswer:
        """Posts to a URL once. A redirect is an answer like others, and is not followed; of a body
        at most 64 KiB are read.

        Raises ImageRejected, and TimeoutError if the response takes longer than the policy allows.
        """
        self.check_allowed(url)
        length = (b"Content-Length", str(len(content)).encode())
        async with (
            self._turn(url.host),
            asyncio.timeout(self._policy.turn_s),
            self._request("POST", url, [length, *headers], content) as answer,
            aclosing(_chunks(answer)) as chunks,
        ):
            num_bytes = 0
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > _MAX_POST_ANSWER_BYTES:
                    break
            return PostAnswer(answer.status, _fields(answer))

    async def _hop(self, url: Url, receiving: Receiving) -> bytes | str:
        """Returns the image, or the URL of a redirect."""
        async with self._request("GET", url, _IMAGE_HEADERS) as answer:
            fields = _fields(answer)
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
    async def _request(
        self, method: str, url: Url, headers: _Headers, content: bytes | None = None
    ) -> AsyncIterator[httpcore.Response]:
        """Yields the answer to a request. Raises ImageRejected where the host breaks off."""
        # The URL is passed in parts: as text, httpcore would parse it again.
        target = httpcore.URL(
            scheme=url.scheme.encode(),
            host=url.host.encode(),
            port=url.port,
            target=url.target.encode(),
        )
        all_headers = [(b"Host", url.authority.encode()), _USER_AGENT, *headers]
        with _translate_errors(url):
            async with (
                self.kept.connection(url) as connection,
                connection.stream(method, target, headers=all_headers, content=content) as answer,
            ):
                yield answer

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """Waits for a turn at the host, then for one of the connections shared by all domains.

        In this order, requests waiting for a slow host occupy no shared connection.
        """
        host_turns = self._host_turns.setdefault(
            host, asyncio.Semaphore(self._policy.max_connections_per_host)
        )
        async with host_turns:
            await self._places.take(host)
            try:
                yield
            finally:
                self._places.leave(host)


@contextmanager
def _translate_errors(url: Url) -> Iterator[None]:
    try:
        yield
    except MlcdError:
        raise
    # Hosts may send anything, which makes the libraries raise many kinds of errors.
    except Exception as error:
        refuse_too_many_files(error)  # not the host's fault
        raise fetch_failed(
            "the URL's host could not be reached, or the connection failed",
            f"{url.host} could not be reached, or the connection failed ({type(error).__name__})",
        ) from error


def _fields(answer: httpcore.Response) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in answer.headers}


def _is_image(fields: dict[bytes, bytes]) -> bool:
    """Returns whether the headers announce an image; the decoder checks the bytes.

    A compressed response is refused: it could decompress to any size.
    """
    kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    coding = fields.get(b"content-encoding", b"").strip().lower()
    return coding in (b"", b"identity") and (kind.startswith(b"image/") or kind in _BINARY)


async def _read(answer: httpcore.Response, receiving: Receiving) -> bytes:
    """Reads the body, and stops as soon as its stated or its actual length is too large."""
    image = bytearray()
    with receiving() as count_bytes:
        count_bytes(
            max(
                (int(value) for name, value in answer.headers if name.lower() == b"content-length"),
                default=0,
            )
        )
        async for chunk in _chunks(answer):
            count_bytes(len(image) + len(chunk))
            image += chunk
    return bytes(image)


async def _chunks(answer: httpcore.Response) -> AsyncGenerator[bytes, None]:
    connection = cast(MeteredStream, answer.extensions["network_stream"])
    async for chunk in answer.aiter_stream():
        connection.subtract_body_bytes(len(chunk))
        yield chunk
