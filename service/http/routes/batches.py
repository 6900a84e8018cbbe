"""The routes of batches, as OpenAI's clients call them."""

import asyncio
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from mlcd.service.http.access import AppResources
from mlcd.service.http.auth import needs
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.routes.files import owner_of, require_batches
from mlcd.service.jobs.batch_inputs import check_endpoint
from mlcd.service.jobs.batches import StoredBatch
from mlcd.service.timings import DAY_S
from mlcd.wire.batches import (
    BatchFault,
    BatchFaults,
    BatchList,
    BatchObject,
    BatchRequest,
    RequestCounts,
)

router = APIRouter(tags=["batches"], route_class=JsonRoute)

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {409: {}, 503: {}}
_ONE: Final[dict[int | str, dict[str, Any]]] = {404: {}, **_REFUSALS}
_UNITS: Final = {"h": 3600.0, "d": DAY_S}


@router.post("/v1/batches", dependencies=[needs("jobs")], responses=_ONE)
async def create(body: BatchRequest, request: Request, resources: AppResources) -> BatchObject:
    """Answers the requests of an uploaded file, one by one, with the model that is served now. The
    file holds requests as JSONL, or images: then each image is a request, and its `custom_id` is
    the image's name.

    The answers are those of the endpoint itself, in the order of the requests. A request that is
    refused is in the error file, and the others go on.
    """
    check_endpoint(body.input_file_id, body.endpoint)
    window = body.completion_window
    make = partial(
        require_batches(resources).create,
        owner_of(request),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=window,
        window_s=int(window[:-1]) * _UNITS[window[-1]],
        metadata=body.metadata,
        fingerprint=resources.encoder.fingerprint,
    )
    return _describe(await asyncio.to_thread(make))


@router.get("/v1/batches", dependencies=[needs("jobs")], responses=_REFUSALS)
async def list_batches(
    request: Request,
    resources: AppResources,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> BatchList:
    """Lists the batches of this key, newest first."""
    look = partial(require_batches(resources).page, owner_of(request), limit=limit, after=after)
    batches, has_more = await asyncio.to_thread(look)
    return BatchList(
        object="list",
        data=[_describe(batch) for batch in batches],
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=has_more,
    )


@router.get("/v1/batches/{batch_id}", dependencies=[needs("jobs")], responses=_ONE)
async def describe(batch_id: str, request: Request, resources: AppResources) -> BatchObject:
    """Describes a batch as it stands."""
    find = require_batches(resources).find
    return _describe(await asyncio.to_thread(find, batch_id, owner_of(request)))


@router.post("/v1/batches/{batch_id}/cancel", dependencies=[needs("jobs")], responses=_ONE)
async def cancel(batch_id: str, request: Request, resources: AppResources) -> BatchObject:
    """Ends a batch soon. Requests that are answered stay in its files; the rest are errors."""
    end = require_batches(resources).cancel
    return _describe(await asyncio.to_thread(end, batch_id, owner_of(request)))


def _describe(batch: StoredBatch) -> BatchObject:
    def at(state: str) -> int | None:
        return int(batch.times[state]) if state in batch.times else None

    faults = [
        BatchFault(code=fault.code, message=fault.message, line=fault.line)
        for fault in batch.faults
    ]
    has_files = batch.has_ended
    return BatchObject(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        errors=BatchFaults(object="list", data=faults) if faults else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.window,
        status=batch.state,
        output_file_id=batch.output_file_id if has_files and batch.output_bytes else None,
        error_file_id=batch.error_file_id if has_files and batch.error_bytes else None,
        created_at=int(batch.created_s),
        in_progress_at=at("in_progress"),
        expires_at=int(batch.expires_s),
        finalizing_at=at("finalizing"),
        completed_at=at("completed"),
        failed_at=at("failed"),
        expired_at=at("expired"),
        cancelling_at=at("cancelling"),
        cancelled_at=at("cancelled"),
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        metadata=batch.metadata,
    )
