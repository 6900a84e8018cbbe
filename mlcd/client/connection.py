"""The connection to the server: sends requests with retries, within a deadline."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, BinaryIO, Final
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, SSEError, aconnect_sse

from mlcd.backoff import Backoff
from mlcd.client.refusals import Refused, not_our_api, refusal_of
from mlcd.errors import ConfigInvalid, DeadlineExceeded, Unavailable
from mlcd.version import __version__

_KEY: Final = re.compile(r"[!-~]+")
# Pauses before retries, and the largest random addition to a pause.
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 8.0
_JITTER_S: Final = 2.0
# How long connections may fail before the first answer. A server that answered before may be
# restarting; one that never answered is taken as absent.
_MAX_UNREACHABLE_S: Final = 2.0


class Connection:
    """A connection to a server. All requests are idempotent, so every request can be retried.

    Retries if the server or a proxy answers 429, 502 or 503, or if the connection breaks before the
    answer. Gives up on a server that has never answered after two seconds without a connection.

    has_answered: whether the server has ever answered.
    """

    has_answered: bool = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        deadline_s: float,
        retries: int,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._deadline_s, self._retries = deadline_s, retries
        # No proxy, key or certificate comes from the environment, only from the caller.
        self._http = httpx.AsyncClient(
            base_url=check_url(url),
            headers={"User-Agent": f"mlcd/{__version__}", **authorization(api_key)},
            timeout=None,  # noqa: S113 - the deadline covers the whole request
            transport=transport,
            trust_env=False,
        )

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | float] | None = None,
        images: Sequence[bytes] = (),
        part: bytes | None = None,
        form: Mapping[str, str] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> httpx.Response:
        """Sends a request and returns the answer, which is always a success.

        images: the multipart field `files`, with the fields of `form`. part: the multipart field
        `data`, a part of an upload. Raises Refused for an error response, Unavailable without an
        answer, DeadlineExceeded after the deadline.
        """
        request_id = uuid.uuid4().hex
        files = [
            ("files", (str(i), image, "application/octet-stream")) for i, image in enumerate(images)
        ]
        if part is not None:
            files.append(("data", ("part", part, "application/octet-stream")))
        request = {
            "method": method,
            "url": path,
            "params": params,
            "files": files or None,
            "data": form,
            "json": json,
            "headers": {"Accept": accept, "X-Request-Id": request_id, **(headers or {})},
        }
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                return await self._retry(request, request_id, deadline)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer within {self._deadline_s:g} s (request {request_id})",
                remedy="give a longer deadline_s, or a smaller batch_size",
            ) from None

    async def download(self, path: str, out: BinaryIO) -> None:
        """Writes the body of an answer to `out`, without retries. Raises as `ask`, but for the
        deadline.
        """
        request_id = uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        try:
            async with self._http.stream("GET", path, headers=headers) as response:
                self.has_answered = True
                if not response.is_success:
                    await response.aread()
                    raise refusal_of(response, request_id=request_id)
                async for data in response.aiter_bytes():
                    out.write(data)
        except httpx.TransportError as error:
            raise self._unreachable() from error
        except httpx.RequestError as error:
            raise not_our_api() from error

    @asynccontextmanager
    async def events(
        self, path: str, *, headers: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[EventSource]:
        """Opens a stream of server-sent events, without retries; a 204 is empty.

        silence_s: longest time in seconds without a byte. Raises as `ask`, also while reading.
        """
        request_id = uuid.uuid4().hex
        sent = {"X-Request-Id": request_id, **headers}
        try:
            async with aconnect_sse(
                self._http, "GET", path, headers=sent, timeout=silence_s
            ) as source:
                self.has_answered = True
                if not source.response.is_success:
                    await source.response.aread()
                    raise refusal_of(source.response, request_id=request_id)
                yield source
        except SSEError as error:
            raise not_our_api() from error
        except httpx.TransportError as error:
            raise self._unreachable() from error
        except httpx.RequestError as error:
            raise not_our_api() from error

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _retry(
        self, request: dict[str, Any], request_id: str, deadline: asyncio.Timeout
    ) -> httpx.Response:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter_s=_JITTER_S)
        attempt = 0
        started_s = monotonic()
        while True:
            try:
                return await self._attempt(request, request_id)
            except DeadlineExceeded:
                raise
            except Unavailable as failure:
                retry_after_s = (
                    failure.problem.retry_after_s if isinstance(failure, Refused) else None
                )
                wait_s = backoff.next_s(at_least=retry_after_s or 0.0)
                if attempt >= self._retries or _is_too_late(deadline, wait_s):
                    raise
                has_no_server = isinstance(failure.__cause__, httpx.ConnectError)
                waited_s = monotonic() - started_s + wait_s
                if has_no_server and not self.has_answered and waited_s > _MAX_UNREACHABLE_S:
                    raise
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _attempt(self, request: dict[str, Any], request_id: str) -> httpx.Response:
        try:
            response = await self._http.request(**request)
        except httpx.TransportError as error:
            raise self._unreachable() from error
        except httpx.RequestError as error:
            raise not_our_api() from error
        self.has_answered = True
        if not response.is_success:
            raise refusal_of(response, request_id=request_id)
        return response

    def _unreachable(self) -> Unavailable:
        return Unavailable(
            f"the server at {self._http.base_url} cannot be reached",
            remedy="start it with `mlcd serve`, or give its URL",
        )


def _is_too_late(deadline: asyncio.Timeout, wait_s: float) -> bool:
    """Tells whether the deadline passes during a wait of `wait_s` seconds.

    The last failure is then raised, because it explains more than a missed deadline.
    """
    when = deadline.when()
    return when is not None and asyncio.get_running_loop().time() + wait_s >= when


def encode_name(name: str) -> str:
    """Encodes a name as one segment of a path; dots too, because httpx resolves `..`."""
    return quote(name, safe="").replace(".", "%2E")


def check_url(url: str) -> httpx.URL:
    """Parses a URL; raises ConfigInvalid if it is invalid or contains a user or password."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise _bad_url() from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _bad_url()
    if parsed.userinfo:
        raise ConfigInvalid("the URL holds a user or password", remedy="give the key as api_key")
    return parsed


def _bad_url() -> ConfigInvalid:
    return ConfigInvalid(
        "the server's URL cannot be used", remedy="give one such as http://127.0.0.1:8000"
    )


def authorization(api_key: str | None) -> dict[str, str]:
    """Returns the headers that carry a key. Raises ConfigInvalid for an invalid key."""
    if api_key is None:
        return {}
    if not _KEY.fullmatch(api_key):
        raise ConfigInvalid("the API key is empty or holds characters that no key has")
    return {"Authorization": f"Bearer {api_key}"}
