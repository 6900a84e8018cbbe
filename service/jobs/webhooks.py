"""Webhooks: URLs that the ends of batches and jobs are told to, by Standard Webhooks.

An event is a row for each webhook that wants it. Rows of a batch are written in the transaction
that ends it. The id of an event follows from what it tells: a row is written once, and a receiver
that meets an id again may leave it aside. A process claims a row before it sends the event; where
it dies meanwhile, the row is due again soon.
"""

import base64
import hashlib
import hmac
import random
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self, cast, get_args

import orjson
from pydantic import TypeAdapter

from mlcd.errors import Conflict, NotFound
from mlcd.service.errors import BadRequest
from mlcd.service.jobs.files import FileStore, new_id
from mlcd.service.timings import (
    WEBHOOK_KEEP_S,
    WEBHOOK_LEASE_S,
    WEBHOOK_PAUSES_S,
    WEBHOOK_SECRET_S,
)
from mlcd.wire.webhooks import DeliveryState, EventType, SentType

EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)
_MOST_WEBHOOKS: Final = 100  # of one owner
_SECRET_BYTES: Final = 32
_SECRET_SIZES: Final = range(24, 65)
_PREFIX: Final = "whsec_"  # of a secret
_JITTER: Final = 0.1  # of a pause is added to it at most
GONE: Final = 410  # the status that disables a webhook
# the delivery of each webhook that has been due longest; SQLite takes the columns beside MIN from
# its row
_DUE: Final = """
SELECT w.record, d.event_id, d.event_type, d.object_id, d.created_s, d.attempts, MIN(d.due_s)
FROM webhook_deliveries d JOIN webhooks w ON w.id = d.webhook_id
WHERE d.due_s <= ? GROUP BY d.webhook_id ORDER BY MIN(d.due_s)
"""
_LAST: Final = """
SELECT event_id, event_type, state, status_code, attempts, MAX(attempted_s)
FROM webhook_deliveries WHERE webhook_id = ? AND attempted_s IS NOT NULL
"""


@dataclass(frozen=True)
class Webhook:
    """A URL that an owner's events are sent to. Times are seconds since the epoch.

    owner: the id of the API key that made it; None without keys. old_secret: signs, too, until
    old_until_s.
    """

    id: str
    owner: str | None
    url: str = field(repr=False)
    name: str
    event_types: tuple[EventType, ...]
    created_s: float
    secret: str = field(repr=False)
    old_secret: str | None = field(default=None, repr=False)
    old_until_s: float = 0.0
    is_enabled: bool = True

    def rotate(self, *, keep_old: bool) -> "Webhook":
        """Returns the webhook with a new secret."""
        return replace(
            self,
            secret=_new_secret(),
            old_secret=self.secret if keep_old else None,
            old_until_s=time.time() + WEBHOOK_SECRET_S,
        )

    def sign(self, event: "WebhookEvent") -> list[tuple[bytes, bytes]]:
        """Returns the headers of an attempt to send an event now."""
        timestamp = int(time.time())
        keys = [self.secret]
        if self.old_secret is not None and timestamp < self.old_until_s:
            keys.append(self.old_secret)
        message = b"%b.%d.%b" % (event.id.encode(), timestamp, event.body)
        return [
            (b"webhook-id", event.id.encode()),
            (b"webhook-timestamp", b"%d" % timestamp),
            (b"webhook-signature", b" ".join(_signature(key, message) for key in keys)),
        ]


@dataclass(frozen=True)
class WebhookEvent:
    """An event. object_id: of the batch or job. created_s: when it happened."""

    id: str
    type: SentType
    object_id: str
    created_s: float

    @classmethod
    def of_end(cls, event_type: str, object_id: str, ended_s: float) -> Self:
        """Returns the event of an end, whose id follows from it."""
        digest = hashlib.sha256(f"{event_type} {object_id} {ended_s!r}".encode()).hexdigest()
        return cls(f"evt_{digest[:32]}", cast(EventType, event_type), object_id, ended_s)

    @property
    def body(self) -> bytes:
        """The message, the same bytes at each attempt."""
        return orjson.dumps(
            {
                "id": self.id,
                "object": "event",
                "created_at": int(self.created_s),
                "type": self.type,
                "data": {"id": self.object_id},
            }
        )


@dataclass(frozen=True)
class Delivery:
    """An event that this process has to send now. attempts: with this one."""

    webhook: Webhook
    event: WebhookEvent
    attempts: int


@dataclass(frozen=True)
class LastDelivery:
    """The delivery that was attempted last."""

    event_id: str
    event_type: EventType
    state: DeliveryState
    status_code: int | None
    attempts: int
    attempted_s: float


_WEBHOOK: Final = TypeAdapter(Webhook)


class WebhookStore:
    """The webhooks beside the files of a store. Its methods block."""

    def __init__(self, files: FileStore) -> None:
        self.files = files

    def create(
        self,
        owner: str | None,
        url: str,
        name: str,
        event_types: Sequence[EventType] | None,
        secret: str | None,
    ) -> Webhook:
        """Adds a webhook. event_types: None for all. secret: None for a new one.

        Raises BadRequest for a secret that cannot sign, and Conflict where there are too many.
        """
        webhook = Webhook(
            new_id("webhook_"),
            owner,
            url,
            name,
            EVENT_TYPES if event_types is None else tuple(event_types),
            time.time(),
            _new_secret() if secret is None else _check_secret(secret),
        )
        with self.files.database.writing() as writer:
            ((num,),) = writer.execute(
                "SELECT COUNT(*) FROM webhooks WHERE owner IS ?", (owner,)
            ).fetchall()
            if num >= _MOST_WEBHOOKS:
                raise Conflict(
                    f"an API key may have at most {_MOST_WEBHOOKS} webhooks", remedy="delete one"
                )
            writer.execute(
                "INSERT INTO webhooks VALUES (?, ?, ?)", (webhook.id, owner, _to_json(webhook))
            )
        return webhook

    def find(self, webhook_id: str, owner: str | None) -> Webhook:
        """Returns the webhook. Raises NotFound where this owner lacks a webhook of this id."""
        rows = self.files.database.rows(
            "SELECT record FROM webhooks WHERE id = ? AND owner IS ?", webhook_id, owner
        )
        if not rows:
            raise NotFound("unknown webhook", remedy="GET /v1/webhook_endpoints lists yours")
        return _WEBHOOK.validate_json(rows[0][0])

    def page(
        self, owner: str | None, *, limit: int, after: str | None
    ) -> tuple[list[Webhook], bool]:
        """Returns up to `limit` webhooks, newest first, and whether more follow.

        after: id of the last webhook of the previous page; None for the first page.
        """
        rows = self.files.database.rows(
            "SELECT record FROM webhooks WHERE owner IS ? AND (? IS NULL OR id < ?)"
            " ORDER BY id DESC LIMIT ?",
            *(owner, after, after, limit + 1),
        )
        return [_WEBHOOK.validate_json(record) for (record,) in rows[:limit]], len(rows) > limit

    def update(
        self, webhook_id: str, owner: str | None, change: Callable[[Webhook], Webhook]
    ) -> Webhook:
        """Changes a webhook, and returns it as it is then. Raises NotFound."""
        with self.files.database.writing() as writer:
            webhook = change(self.find(webhook_id, owner))
            _put(writer, webhook)
        return webhook

    def delete(self, webhook_id: str, owner: str | None) -> None:
        """Deletes a webhook with the events that wait for it. Raises NotFound."""
        self.find(webhook_id, owner)
        with self.files.database.writing() as writer:
            writer.execute("DELETE FROM webhooks WHERE id = ?", (webhook_id,))
            writer.execute("DELETE FROM webhook_deliveries WHERE webhook_id = ?", (webhook_id,))

    def describe_deliveries(self, webhook_id: str) -> tuple[int, LastDelivery | None]:
        """Returns the number of events that wait, and the delivery that was attempted last."""
        ((num_waiting,),) = self.files.database.rows(
            "SELECT COUNT(*) FROM webhook_deliveries WHERE webhook_id = ? AND due_s IS NOT NULL",
            webhook_id,
        )
        ((event_id, *last),) = self.files.database.rows(_LAST, webhook_id)
        return num_waiting, None if event_id is None else LastDelivery(event_id, *last)

    @property
    def is_empty(self) -> bool:
        return not self.files.database.rows("SELECT 1 FROM webhooks LIMIT 1")

    def add_events(self, events: Iterable[tuple[str | None, WebhookEvent]]) -> None:
        """Adds events with their owners; those that were added before stay as they are."""
        with self.files.database.writing() as writer:
            for owner, event in events:
                add_event(writer, owner, event)

    def claim(self, limit: int, *, exclude: Collection[str]) -> list[Delivery]:
        """Returns deliveries that are due, at most one of a webhook; no other process has them.

        exclude: ids of webhooks to leave out.
        """
        now_s = time.time()
        due = [
            (_WEBHOOK.validate_json(record), *columns)
            for record, *columns in self.files.database.rows(_DUE, now_s)
        ]
        due = [row for row in due if row[0].id not in exclude][:limit]
        claimed = []
        if due:
            with self.files.database.writing() as writer:
                for webhook, *columns, attempts, due_s in due:
                    event = WebhookEvent(*columns)
                    changed = writer.execute(
                        "UPDATE webhook_deliveries SET due_s = ?, attempts = ?"
                        " WHERE webhook_id = ? AND event_id = ? AND due_s = ?",
                        (now_s + WEBHOOK_LEASE_S, attempts + 1, webhook.id, event.id, due_s),
                    )
                    if changed.rowcount:  # no other process was first
                        claimed.append(Delivery(webhook, event, attempts + 1))
        return claimed

    def settle(
        self, delivery: Delivery, status: int | None, retry_after_s: float = 0.0
    ) -> DeliveryState:
        """Notes the result of an attempt, and returns what becomes of the delivery.

        status: of the answer; None where there was none. A webhook that answers 410 is disabled.
        """
        now_s, pause_s = time.time(), _pause_s(delivery.attempts, retry_after_s)
        state: DeliveryState
        if status is not None and 200 <= status < 300:
            state, due_s = "delivered", None
        elif status == GONE or pause_s is None:
            state, due_s = "given_up", None
        else:
            state, due_s = "waiting", now_s + pause_s
        webhook_id = delivery.webhook.id
        with self.files.database.writing() as writer:
            writer.execute(
                "UPDATE webhook_deliveries SET state = ?, due_s = ?, status_code = ?,"
                " attempted_s = ? WHERE webhook_id = ? AND event_id = ? AND due_s IS NOT NULL",
                (state, due_s, status, now_s, webhook_id, delivery.event.id),
            )
            if status == GONE:
                _disable(writer, webhook_id)
        return state

    def sweep(self) -> None:
        """Removes deliveries that ended long ago."""
        with self.files.database.writing() as writer:
            writer.execute(
                "DELETE FROM webhook_deliveries WHERE due_s IS NULL AND created_s < ?",
                (time.time() - WEBHOOK_KEEP_S,),
            )


def add_event(writer: sqlite3.Connection, owner: str | None, event: WebhookEvent) -> None:
    """Adds an event to the owner's webhooks that want it, in a transaction of the files' table."""
    rows = writer.execute("SELECT record FROM webhooks WHERE owner IS ?", (owner,)).fetchall()
    for webhook in (_WEBHOOK.validate_json(record) for (record,) in rows):
        is_wanted = webhook.is_enabled and event.type in webhook.event_types
        if is_wanted and webhook.created_s <= event.created_s:
            writer.execute(
                "INSERT OR IGNORE INTO webhook_deliveries"
                " VALUES (?, ?, ?, ?, ?, 'waiting', ?, 0, NULL, NULL)",
                (webhook.id, event.id, event.type, event.object_id, event.created_s, time.time()),
            )


def _disable(writer: sqlite3.Connection, webhook_id: str) -> None:
    """Disables a webhook, and gives up what waits for it."""
    rows = writer.execute("SELECT record FROM webhooks WHERE id = ?", (webhook_id,)).fetchall()
    for (record,) in rows:  # none where it was deleted
        _put(writer, replace(_WEBHOOK.validate_json(record), is_enabled=False))
    writer.execute(
        "UPDATE webhook_deliveries SET state = 'given_up', due_s = NULL"
        " WHERE webhook_id = ? AND due_s IS NOT NULL",
        (webhook_id,),
    )


def _put(writer: sqlite3.Connection, webhook: Webhook) -> None:
    writer.execute("UPDATE webhooks SET record = ? WHERE id = ?", (_to_json(webhook), webhook.id))


def _pause_s(attempts: int, retry_after_s: float) -> float | None:
    """Returns the seconds before the next attempt; None where there is none."""
    if attempts > len(WEBHOOK_PAUSES_S):
        return None
    # jitter spreads load; it needs no secure randomness
    pause_s = WEBHOOK_PAUSES_S[attempts - 1] * (1 + _JITTER * random.random())  # noqa: S311
    return max(pause_s, min(retry_after_s, max(WEBHOOK_PAUSES_S)))


def _new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def _check_secret(secret: str) -> str:
    try:
        num_bytes = len(base64.b64decode(secret.removeprefix(_PREFIX), validate=True))
    except ValueError:
        num_bytes = 0
    if not secret.startswith(_PREFIX) or num_bytes not in _SECRET_SIZES:
        raise BadRequest(
            "signing_secret must be whsec_ and 24 to 64 bytes in base64", param="signing_secret"
        )
    return secret


def _signature(secret: str, message: bytes) -> bytes:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    return b"v1," + base64.b64encode(hmac.digest(key, message, "sha256"))


def _to_json(webhook: Webhook) -> str:
    return _WEBHOOK.dump_json(webhook).decode()
