"""The sender of events to webhooks: one event of a webhook at a time, several webhooks at once."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeVar

from mlcd.backoff import read_retry_after
from mlcd.errors import ImageRejected, InvalidInput, MlcdError, NotFound
from mlcd.fetching.resolver import LookUp, system_addresses
from mlcd.service.errors import BadRequest, RecordDamaged, Unauthorized
from mlcd.service.jobs.queue import Queue
from mlcd.service.jobs.webhooks import GONE, Delivery, Webhook, WebhookEvent, WebhookStore
from mlcd.service.settings import Webhooks
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import (
    FILES_SWEEP_S,
    WEBHOOK_ANSWER_S,
    WEBHOOK_JOBS_S,
    WEBHOOK_PAST_S,
    WEBHOOK_POLL_S,
)

if TYPE_CHECKING:  # opened only where webhooks are allowed
    from mlcd.fetching.url_client import PostAnswer, UrlClient
    from mlcd.fetching.urls import Url

_log = logging.getLogger("mlcd.webhooks")
_MOST_AT_ONCE: Final = 32
_HEADERS: Final = (
    (b"Content-Type", b"application/json"),
    (b"Connection", b"close"),  # the next event comes in minutes
)
_FAULTS: Final = {
    "url-refused": "the URL's host is not one that webhooks may be at",
    "fetch-failed": "the URL's host could not be reached, or the connection failed",
}
_Answer = TypeVar("_Answer")


class WebhookSender:
    """Sends what a store holds, used as an async context manager; it sends while `run` runs."""

    def __init__(
        self,
        store: WebhookStore,
        settings: Webhooks,
        metrics: Metrics,
        *,
        queue: Queue | None,
        check_owner: Callable[[str | None], object],
        look_up: LookUp = system_addresses,
    ) -> None:
        """queue: that of jobs, whose ends are events, too. check_owner: raises Unauthorized for an
        owner whose events are not to be sent any more.
        """
        self.store, self._metrics, self._queue = store, metrics, queue
        self._check_owner = check_owner
        self._client = _new_client(settings, look_up)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="webhooks")
        self._running: dict[str, asyncio.Task[None]] = {}  # by the id of the webhook
        self._noted: set[tuple[str, float]] = set()  # ends of jobs whose events were added
        self._jobs_due_s = self._sweep_due_s = 0.0

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_url(self, text: str) -> "Url":
        """Returns the URL. Raises BadRequest for one that no webhook may be at."""
        from mlcd.fetching.urls import parse_url

        try:
            return self._client.check_allowed(parse_url(text))
        except ImageRejected as rejection:
            raise BadRequest(
                "url must be http(s)://host/path, at a host and port that webhooks may be at",
                remedy="the server's MLCD_WEBHOOKS__ALLOW and MLCD_WEBHOOKS__PORTS say which",
                param="url",
            ) from rejection

    async def send(self, webhook: Webhook, event: WebhookEvent) -> "PostAnswer":
        """Sends an event once. Raises InvalidInput where its URL may not be asked, or gives no
        answer in time.
        """
        url = self.check_url(webhook.url)
        headers = [*_HEADERS, *webhook.sign(event)]
        try:
            async with asyncio.timeout(WEBHOOK_ANSWER_S):
                return await self._client.post(url, event.body, headers)
        except TimeoutError:
            raise InvalidInput(
                f"the URL's host did not answer within {WEBHOOK_ANSWER_S:g} s"
            ) from None
        except ImageRejected as rejection:
            raise InvalidInput(_FAULTS[rejection.reason]) from None

    async def run(self) -> None:
        """Sends events until it is cancelled. While the store cannot be read, none are sent."""
        try:
            while True:
                if self.store.files.exists:
                    with suppress(MlcdError):
                        await self._add_ends_of_jobs()
                        await self._begin_deliveries()
                        await self._sweep()
                await self._pause()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _pause(self) -> None:
        """Waits for the next look, or until a delivery has ended: another may follow it."""
        if self._running:
            tasks = self._running.values()
            await asyncio.wait(tasks, timeout=WEBHOOK_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            self._running = {key: task for key, task in self._running.items() if not task.done()}
        else:
            await asyncio.sleep(WEBHOOK_POLL_S)

    async def _begin_deliveries(self) -> None:
        num_free = _MOST_AT_ONCE - len(self._running)
        claim = partial(self.store.claim, num_free, exclude=self._running)
        for delivery in await self._in_thread(claim):
            task = asyncio.create_task(self._deliver(delivery))
            self._running[delivery.webhook.id] = task

    async def _deliver(self, delivery: Delivery) -> None:
        """Sends one event and notes what came of it. Where that fails, the claim ends by itself."""
        webhook, event = delivery.webhook, delivery.event
        try:
            status, retry_after_s = await self._attempt(delivery)
            settle = partial(self.store.settle, delivery, status, retry_after_s)
            result = await self._in_thread(settle)
        except MlcdError as error:
            _log.error("%s cannot be sent now: %s", event.id, error.name)
            return
        self._metrics.count_webhook(result)
        if result == "given_up":
            _log.warning("%s of %s is given up", event.id, webhook.id)

    async def _attempt(self, delivery: Delivery) -> tuple[int | None, float]:
        """Returns the status of the answer, if there was one, and its Retry-After in seconds or 0.

        Of an owner whose key is not valid any more nothing is sent. Raises Unavailable where that
        cannot be told.
        """
        try:
            self._check_owner(delivery.webhook.owner)
        except Unauthorized:
            return GONE, 0.0
        try:
            answer = await self.send(delivery.webhook, delivery.event)
        except InvalidInput:
            return None, 0.0
        header = answer.fields.get(b"retry-after", b"").decode("latin-1")
        return answer.status, read_retry_after(header) or 0.0

    async def _add_ends_of_jobs(self) -> None:
        if self._queue is not None and time.monotonic() >= self._jobs_due_s:
            self._jobs_due_s = time.monotonic() + WEBHOOK_JOBS_S
            await self._in_thread(partial(self._find_ends_of_jobs, self._queue))

    def _find_ends_of_jobs(self, queue: Queue) -> None:
        if self.store.is_empty:
            return
        oldest_s = time.time() - WEBHOOK_PAST_S
        ends = {(each.job_id, each.ended_s) for each in queue.list_ended()}
        ends = {end for end in ends if end[1] > oldest_s}
        events = []
        for job_id, ended_s in ends - self._noted:
            with suppress(NotFound, RecordDamaged):
                job = queue.get(job_id)
                event = WebhookEvent.of_end(f"job.{job.state}", job.id, ended_s)
                if job.ended_s == ended_s:  # it was not begun again meanwhile
                    events.append((job.owner, event))
        if events:
            self.store.add_events(events)
        self._noted = ends

    async def _sweep(self) -> None:
        if time.monotonic() >= self._sweep_due_s:
            self._sweep_due_s = time.monotonic() + FILES_SWEEP_S
            await self._in_thread(self.store.sweep)

    async def _in_thread(self, call: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _new_client(settings: Webhooks, look_up: LookUp) -> "UrlClient":
    # The HTTP client takes a tenth of a server's imports.
    from mlcd.fetching.policy import FetchPolicy
    from mlcd.fetching.url_client import UrlClient

    policy = FetchPolicy(settings.allow, settings.networks, settings.ports)
    return UrlClient(policy, look_up=look_up)
