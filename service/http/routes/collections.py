"""The routes that create, list, describe and delete collections; other routes open them here.

A job or a command may add a collection while the server runs; the server opens it when a request
names it. Changes run off the event loop, and are durable before they are answered.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response

from mlcd.collections.port import CollectionPort, CollectionsPort
from mlcd.errors import InvalidInput, StoreUnreachable, TooManyOpenFiles, Unavailable
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import OutsideKey
from mlcd.service.http.access import AppResources, check_seen, sees
from mlcd.service.http.answers import compute_answer, headers
from mlcd.service.http.auth import needs
from mlcd.service.http.cursors import read_cursor, write_cursor
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.problems import find_name_error
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import time_stage
from mlcd.wire.stored_items import (
    CollectionList,
    CreateRequest,
    DeletedCollection,
    DescribedCollection,
    DescribedIndex,
    DescribedStore,
    DescribedThumbnails,
    IndexRecall,
    UnusableCollection,
)

router = APIRouter(tags=["collections"], route_class=JsonRoute)
_Result = TypeVar("_Result")
_MAX_LISTED: Final = 1000
_log = logging.getLogger("mlcd.service")


def _check_name_in_path(
    request: Request,
    name: Annotated[
        str,
        Path(
            description="letters, digits, . _ -",
            json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
        ),
    ],
) -> str:
    """Returns the collection's name in the path.

    Raises InvalidInput if the name is invalid in the raw path: a%2Fitems%2Fb must not refer to the
    item b of the collection a.
    """
    if (error := find_name_error(request)) is not None:
        raise error
    return name


Name = Annotated[str, Depends(_check_name_in_path)]
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {status: {} for status in (404, 409, 422, 504)}
_CREATED: Final[dict[int | str, dict[str, Any]]] = {
    201: {"model": DescribedCollection, "description": "created"},
    404: {},
    409: {},
}


@router.get(
    "/v1/collections",
    dependencies=[needs("search")],
    response_model=CollectionList,
    responses={422: {}, 429: {}, 504: {}},
)
async def list_collections(
    request: Request,
    resources: AppResources,
    limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = _MAX_LISTED,
    cursor: str | None = None,
) -> Response:
    """Lists all collections by name, in pages; a collection with embeddings of another model is
    not `usable`.

    Collections that cannot be opened are listed in `unusable`, with the reason.
    """
    store = resources.model.data.store
    if store is not None:
        await open_all_arrived(store, request, resources)
    collections = {} if store is None else store.all()
    names = sorted(name for name in collections if sees(name, request))
    if cursor is not None:
        (last_name,) = read_cursor(cursor, str)
        names = names[bisect_right(names, last_name) :]
    page = names[:limit]
    described = [await _describe(name, collections[name], request, resources) for name in page]
    reasons = {} if store is None else store.unusable()
    unusable = [
        UnusableCollection(name=name, reason=reason)
        for name, reason in sorted(reasons.items())[:_MAX_LISTED]
        if sees(name, request)
    ]
    next_page = {"next": write_cursor(page[-1])} if len(names) > len(page) else {}
    return await compute_answer(
        partial(CollectionList, collections=described, unusable=unusable, **next_page),
        request,
        resources,
        exclude_unset=True,
    )


@router.put("/v1/collections/{name}", dependencies=[needs("write")], responses=_CREATED)
async def create_collection(
    name: Name,
    body: Annotated[CreateRequest, Body(default_factory=CreateRequest)],
    request: Request,
    response: Response,
    resources: AppResources,
) -> DescribedCollection:
    """Creates an empty collection for the served model's embeddings.

    An existing collection of this name for the same model does not change.
    """
    if not sees(name, request):
        raise OutsideKey(param="name")
    dimension = resources.encoder.dimension
    if body.dimension not in (None, dimension):
        raise InvalidInput(
            f"dimension must be {dimension}, like the served model's, got {body.dimension}",
            remedy="leave `dimension` out",
        )
    store, fingerprint = resources.model.data.require_store(), resources.encoder.fingerprint
    collection, is_new = await apply_change(
        request,
        resources,
        lambda: store.create(
            name, fingerprint=fingerprint, dimension=dimension, recall=body.recall
        ),
    )
    response.status_code = 201 if is_new else 200
    response.headers.update(headers(resources))
    return await _describe(name, collection, request, resources)


@router.get("/v1/collections/{name}", dependencies=[needs("search")], responses=_ERRORS)
async def describe_collection(
    name: Name, request: Request, response: Response, resources: AppResources
) -> DescribedCollection:
    """Describes a collection: its size, and its index with settings and measured recall."""
    collection = await require_collection(name, request, resources)
    response.headers.update(headers(resources))
    return await _describe(name, collection, request, resources)


@router.delete(
    "/v1/collections/{name}", dependencies=[needs("write")], responses={**_ERRORS, 503: {}}
)
async def delete_collection(
    name: Name, request: Request, resources: AppResources
) -> DeletedCollection:
    """Permanently deletes a collection with all its items, also if it belongs to another model."""
    store = resources.model.data.require_store()
    await open_arrived(name, request, resources)
    await apply_change(request, resources, lambda: store.delete(name))
    return DeletedCollection(collection=name, outcome="deleted")


async def _describe(
    name: str, collection: CollectionPort, request: Request, resources: Resources
) -> DescribedCollection:
    description = await _run_in_pool(request, resources.compute, collection.describe)
    promises = collection.promises
    index = DescribedIndex(
        kind=description.kind,
        generation=description.generation,
        indexed=description.indexed,
        unindexed=description.unindexed,
        effort=description.effort,
        target=description.recall_target,
        recall=None if description.recall is None else IndexRecall(**description.recall),
        damaged=description.index_damaged,
        error=None
        if description.indexing_error is None
        else "the index could not be built; see the server's log",
    )
    thumbnails = collection.describe_thumbnails()
    return DescribedCollection(
        name=name,
        items=description.items,
        dimension=description.dimension,
        fingerprint=description.fingerprint,
        usable=description.fingerprint == resources.encoder.fingerprint,
        writable=description.writable,
        fields=description.fields,
        index=index,
        thumbnails=None if thumbnails is None else DescribedThumbnails(**asdict(thumbnails)),
        store=DescribedStore(
            kind=promises.store,
            writers=promises.writers,
            consistency=promises.consistency,
            cannot=list(promises.cannot),
        ),
    )


async def require_collection(name: str, request: Request, resources: Resources) -> CollectionPort:
    """Returns the collection. Raises Conflict if it exists but cannot be opened, and the errors of
    `ModelData.require_collection`.
    """
    await open_arrived(name, request, resources)
    return resources.model.data.require_collection(name)


async def open_arrived(name: str, request: Request, resources: Resources) -> None:
    """Opens the collection if it exists and is not open yet.

    For a name without a collection this only checks the folder, without waiting for other requests.
    Raises NotFound if the key may not see the collection.
    """
    check_seen(name, request)
    store = resources.model.data.store
    if store is None or store.find(name) is not None:
        return
    if await _run_in_pool(request, resources.compute, partial(store.has_arrived, name)):
        await _run_in_pool(request, resources.opening, partial(store.open_arrived, name))


async def open_all_arrived(store: CollectionsPort, request: Request, resources: Resources) -> None:
    """Opens all collections that are not open yet, and skips those that cannot be opened."""
    if await _run_in_pool(request, resources.compute, store.find_arrivals):
        await _run_in_pool(request, resources.opening, store.open_all_arrived)


async def _run_in_pool(
    request: Request, pool: ThreadPoolExecutor, work: Callable[[], _Result]
) -> _Result:
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(pool, work), request.state.deadline
    )


async def apply_change(
    request: Request, resources: Resources, work: Callable[[], _Result]
) -> _Result:
    """Runs `work`, which changes files, within the request's deadline, and returns its result.

    The change must be idempotent: it may still finish after the deadline. Raises Unavailable, with
    nothing changed, if the disk is full or no more files can be opened.
    """
    running = asyncio.get_running_loop().run_in_executor(resources.writing, _hide_file_names, work)
    with time_stage("store"):
        return await within_deadline(running, request.state.deadline)


def _hide_file_names(work: Callable[[], _Result]) -> _Result:
    """Runs `work`; logs the file names in a disk's error, and hides them from the client."""
    try:
        return work()
    except (StoreUnreachable, TooManyOpenFiles) as error:
        _log.error("a change cannot be stored: %s", error)
        raise
    except Unavailable as error:
        _log.error("a change cannot be stored: %s", error)
        raise Unavailable(
            "the server's disk is full or fails",
            remedy="retry when there is space; acknowledged changes are kept",
        ) from error
