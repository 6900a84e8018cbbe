"""The routes of webhooks, as OpenAI's clients call them."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from mlcd.errors import Conflict
from mlcd.service.http.access import AppResources
from mlcd.service.http.auth import needs
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.routes.files import owner_of, require_batches
from mlcd.service.jobs.files import new_id
from mlcd.service.jobs.webhook_sender import WebhookSender
from mlcd.service.jobs.webhooks import Webhook, WebhookEvent, WebhookStore
from mlcd.service.resources import Resources
from mlcd.wire.webhooks import (
    DeletedWebhookEndpoint,
    RotateRequest,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointList,
    WebhookEndpointWithSecret,
    WebhookRequest,
    WebhookTestRequest,
    WebhookTestResult,
    WebhookUpdate,
)

router = APIRouter(tags=["webhooks"], route_class=JsonRoute)

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {409: {}, 503: {}}
_ONE: Final[dict[int | str, dict[str, Any]]] = {404: {}, **_REFUSALS}
_ROUTE: Final = "/v1/webhook_endpoints"


@router.post(_ROUTE, dependencies=[needs("jobs")], responses=_REFUSALS)
async def create(
    body: WebhookRequest, request: Request, resources: AppResources
) -> WebhookEndpointWithSecret:
    """Sends the ends of this key's batches and jobs to a URL from now on, by Standard Webhooks.

    The secret is in this answer alone.
    """
    sender = _require_sender(resources)
    sender.check_url(body.url)
    make = partial(
        sender.store.create,
        owner_of(request),
        body.url,
        body.name,
        body.event_types,
        body.signing_secret,
    )
    webhook = await asyncio.to_thread(make)
    return await asyncio.to_thread(_describe_with_secret, sender.store, webhook)


@router.get(_ROUTE, dependencies=[needs("jobs")], responses=_REFUSALS)
async def list_webhooks(
    request: Request,
    resources: AppResources,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> WebhookEndpointList:
    """Lists the webhooks of this key, newest first, each with its last delivery."""
    store, owner = _require_sender(resources).store, owner_of(request)
    webhooks, has_more = await asyncio.to_thread(
        partial(store.page, owner, limit=limit, after=after)
    )
    described = await asyncio.to_thread(lambda: [_describe(store, each) for each in webhooks])
    return WebhookEndpointList(
        object="list",
        data=described,
        first_id=described[0].id if described else None,
        last_id=described[-1].id if described else None,
        has_more=has_more,
    )


@router.get(_ROUTE + "/{webhook_id}", dependencies=[needs("jobs")], responses=_ONE)
async def describe(webhook_id: str, request: Request, resources: AppResources) -> WebhookEndpoint:
    """Describes a webhook and its last delivery."""
    store = _require_sender(resources).store
    webhook = await asyncio.to_thread(store.find, webhook_id, owner_of(request))
    return await asyncio.to_thread(_describe, store, webhook)


@router.post(_ROUTE + "/{webhook_id}", dependencies=[needs("jobs")], responses=_ONE)
async def update(
    webhook_id: str, body: WebhookUpdate, request: Request, resources: AppResources
) -> WebhookEndpoint:
    """Changes a webhook, and enables it again where it was disabled."""
    sender = _require_sender(resources)
    if body.url is not None:
        sender.check_url(body.url)
    changes = body.model_dump(exclude_none=True)
    if body.event_types is not None:
        changes["event_types"] = tuple(body.event_types)

    def change(webhook: Webhook) -> Webhook:
        return replace(webhook, is_enabled=True, **changes)

    webhook = await asyncio.to_thread(sender.store.update, webhook_id, owner_of(request), change)
    return await asyncio.to_thread(_describe, sender.store, webhook)


@router.delete(_ROUTE + "/{webhook_id}", dependencies=[needs("jobs")], responses=_ONE)
async def delete(
    webhook_id: str, request: Request, resources: AppResources
) -> DeletedWebhookEndpoint:
    """Deletes a webhook with the events that wait for it."""
    store = _require_sender(resources).store
    await asyncio.to_thread(store.delete, webhook_id, owner_of(request))
    return DeletedWebhookEndpoint(id=webhook_id, object="webhook_endpoint.deleted", deleted=True)


@router.post(_ROUTE + "/{webhook_id}/rotate_secret", dependencies=[needs("jobs")], responses=_ONE)
async def rotate_secret(
    webhook_id: str, request: Request, resources: AppResources, body: RotateRequest | None = None
) -> WebhookEndpointWithSecret:
    """Gives a webhook a new secret. On request the old one also signs for 24 hours."""
    store = _require_sender(resources).store
    keep_old = body is not None and body.keep_old_secret_active_for_24_hours

    def change(webhook: Webhook) -> Webhook:
        return webhook.rotate(keep_old=keep_old)

    webhook = await asyncio.to_thread(store.update, webhook_id, owner_of(request), change)
    return await asyncio.to_thread(_describe_with_secret, store, webhook)


@router.post(_ROUTE + "/{webhook_id}/test", dependencies=[needs("jobs")], responses=_ONE)
async def send_test(
    webhook_id: str,
    request: Request,
    resources: AppResources,
    body: WebhookTestRequest | None = None,
) -> WebhookTestResult:
    """Sends an event to a webhook now, once, and answers with the status of its receiver.

    A receiver that cannot be reached is a refusal that says so.
    """
    sender = _require_sender(resources)
    webhook = await asyncio.to_thread(sender.store.find, webhook_id, owner_of(request))
    event_type = WebhookTestRequest().event_type if body is None else body.event_type
    event = WebhookEvent(new_id("evt_"), event_type, webhook.id, time.time())
    answer = await sender.send(webhook, event)
    return WebhookTestResult(
        object="webhook_endpoint.test",
        webhook_endpoint_id=webhook.id,
        event_type=event_type,
        status_code=answer.status,
        success=True,
    )


def _require_sender(resources: Resources) -> WebhookSender:
    """Returns the sender. Raises Conflict where the server sends none."""
    require_batches(resources)
    if resources.webhooks is None:
        raise Conflict(
            "this server sends no webhooks",
            remedy="set MLCD_WEBHOOKS__ALLOW to the hosts that they may be at",
        )
    return resources.webhooks


def _describe_with_secret(store: WebhookStore, webhook: Webhook) -> WebhookEndpointWithSecret:
    shown = _describe(store, webhook).model_dump()
    return WebhookEndpointWithSecret(**shown, signing_secret=webhook.secret)


def _describe(store: WebhookStore, webhook: Webhook) -> WebhookEndpoint:
    num_waiting, last = store.describe_deliveries(webhook.id)
    return WebhookEndpoint(
        id=webhook.id,
        object="webhook_endpoint",
        created_at=int(webhook.created_s),
        event_types=[*webhook.event_types],
        name=webhook.name,
        url=webhook.url,
        status="enabled" if webhook.is_enabled else "disabled",
        waiting=num_waiting,
        last_delivery=None
        if last is None
        else WebhookDelivery(
            event_id=last.event_id,
            event_type=last.event_type,
            status=last.state,
            status_code=last.status_code,
            attempts=last.attempts,
            attempted_at=int(last.attempted_s),
        ),
    )
