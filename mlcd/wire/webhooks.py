"""Webhooks, as OpenAI's API has them. Times are whole seconds since the epoch."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mlcd.wire.shapes import WireAnswer, WireRequest

EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "job.succeeded",
    "job.failed",
    "job.canceled",
]
SentType = EventType | Literal["webhook.test"]
DeliveryState = Literal["waiting", "delivered", "given_up"]
_Url = Annotated[str, Field(min_length=1, max_length=2048)]
_Name = Annotated[str, Field(max_length=255)]
_EventTypes = Annotated[list[EventType], Field(min_length=1)]


class WebhookRequest(WireRequest):
    """A URL to send events to. event_types: all where they are missing. signing_secret: of your
    own, `whsec_` and 24 to 64 bytes in base64; else the server makes one.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"url": "https://example.com/hook", "event_types": ["batch.completed"]}]
        }
    )

    url: _Url
    name: _Name = ""
    event_types: _EventTypes | None = None
    signing_secret: Annotated[str, Field(max_length=128)] | None = None


class WebhookUpdate(WireRequest):
    """Changes of a webhook, which is enabled again. What is missing stays as it is."""

    url: _Url | None = None
    name: _Name | None = None
    event_types: _EventTypes | None = None


class RotateRequest(WireRequest):
    """The way in which a secret is replaced."""

    keep_old_secret_active_for_24_hours: bool = False


class WebhookTestRequest(WireRequest):
    """The event of a test."""

    event_type: SentType = "webhook.test"


class WebhookDelivery(WireAnswer):
    """The delivery of an event. status_code: of the last answer; null where there was none."""

    event_id: str
    event_type: EventType
    status: DeliveryState
    status_code: int | None
    attempts: int
    attempted_at: int


class WebhookEndpoint(WireAnswer):
    """A webhook. status: `disabled` once its URL has answered 410. waiting: events to be sent."""

    id: str
    object: Literal["webhook_endpoint"]
    created_at: int
    event_types: list[EventType]
    name: str
    url: str
    status: Literal["enabled", "disabled"]
    waiting: int
    last_delivery: WebhookDelivery | None


class WebhookEndpointWithSecret(WebhookEndpoint):
    """A webhook and its secret, which is shown only here."""

    signing_secret: str


class WebhookEndpointList(WireAnswer):
    """Webhooks, newest first, and the ids of the first and the last of them."""

    object: Literal["list"]
    data: list[WebhookEndpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedWebhookEndpoint(WireAnswer):
    """The id of a webhook that is gone."""

    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: Literal[True]


class WebhookTestResult(WireAnswer):
    """The answer to a test. status_code: the receiver's, which may be a refusal."""

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: SentType
    status_code: int
    success: Literal[True]
