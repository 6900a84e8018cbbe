"""The queue of a server as its users see it: over HTTP, one request after the other."""

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from mlcd.client.connection import authorization, checked_url
from mlcd.client.problems import not_our_api, refused
from mlcd.errors import InvalidInput, Unavailable
from service.timings import JOBS_CLIENT_S, JOBS_WATCH_PAUSE_S

_KEY: Final = re.compile(r"[!-~]{1,255}")
_PATIENCE: Final = 60
"""Streams in a row that bring nothing at all."""


class JobsClient:
    """Use as a context manager. Raises ConfigInvalid, Unavailable, and the errors of `mlcd.client.problems`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._http = httpx.Client(
            base_url=checked_url(url),
            headers=authorization(api_key),
            timeout=JOBS_CLIENT_S,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def submit(self, asked: Mapping[str, Any], *, key: str | None = None) -> dict[str, Any]:
        """Raises InvalidInput for a key that no header can hold."""
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidInput(
                "the idempotency key cannot be sent",
                remedy="give 1 to 255 printable characters of ASCII, no spaces",
            )
        return self._ask(
            "POST", "", json=dict(asked), headers={} if key is None else {"Idempotency-Key": key}
        )

    def show(self, job_id: str) -> dict[str, Any]:
        return self._ask("GET", _path(job_id))

    def failures(self, job_id: str, *, page_size: int = 200) -> Iterator[dict[str, Any]]:
        """All shards that were left aside, with reasons."""
        place, given = f"{_path(job_id)}/failures", {"limit": page_size}
        page = self._ask("GET", place, params=given)
        yield from page["failures"]
        while page["cursor"] is not None:
            page = self._ask("GET", place, params={**given, "cursor": page["cursor"]})
            yield from page["failures"]

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self._ask("DELETE", _path(job_id))

    def retry(self, job_id: str) -> dict[str, Any]:
        return self._ask("POST", f"{_path(job_id)}/retry")

    def each(self, *, state: str | None = None, page_size: int = 200) -> Iterator[dict[str, Any]]:
        """All jobs, newest first."""
        given = {"limit": page_size} | ({} if state is None else {"state": state})
        page = self._ask("GET", "", params=given)
        yield from page["jobs"]
        while page["cursor"] is not None:
            page = self._ask("GET", "", params={**given, "cursor": page["cursor"]})
            yield from page["jobs"]

    def watch(self, job_id: str) -> Iterator[dict[str, Any]]:
        """The job as it stands, and after each change, until it has ended; over any number of streams."""
        last: str | None = None
        in_vain = 0
        while True:
            try:
                for number, job in self._changes(job_id, last):
                    last, in_vain = number, 0
                    yield job
                    if job["ended"] is not None:
                        return
            except Unavailable:
                if (in_vain := in_vain + 1) > _PATIENCE:
                    raise
            time.sleep(JOBS_WATCH_PAUSE_S)

    def _changes(
        self, job_id: str, last: str | None
    ) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Of one stream; where the server has no more, the job as it stands."""
        headers = {
            "Accept": "text/event-stream",
            **({} if last is None else {"Last-Event-ID": last}),
        }
        try:
            with self._http.stream(
                "GET", f"/v1/jobs{_path(job_id)}/events", headers=headers
            ) as response:
                if not response.is_success:
                    response.read()
                    raise refused(response, request_id="")
                if response.status_code == httpx.codes.NO_CONTENT:
                    yield None, self.show(job_id)
                    return
                data = number = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "data":
                        data = value
                    elif name == "id":
                        number = value
                    elif not line and data:
                        yield number, _job(data)
                        data = ""
        except httpx.TransportError as error:
            raise self._unreachable() from error

    def _ask(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        request_id = uuid.uuid4().hex
        sent["headers"] = {**sent.get("headers", {}), "X-Request-Id": request_id}
        try:
            response = self._http.request(method, f"/v1/jobs{path}", **sent)
        except httpx.TransportError as error:
            raise self._unreachable() from error
        except httpx.RequestError as error:
            raise not_our_api() from error
        if not response.is_success:
            raise refused(response, request_id=request_id)
        return _job(response.text)

    def _unreachable(self) -> Unavailable:
        return Unavailable(
            "the server cannot be reached", remedy=f"is it at {self._http.base_url}?"
        )


def _path(job_id: str) -> str:
    return f"/{quote(job_id, safe='')}"


def _job(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        raise not_our_api() from None
    if not isinstance(content, dict):
        raise not_our_api()
    return content
