"""The routes that create, list, describe and delete collections; other routes open them here.

A job or a command may add a collection to the server's own while it runs; it is opened when a
request names it. Changes are made off the event loop, and are durable before they are answered.
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
from mlcd.service.http.access import Opened, check_seen, sees
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
_MOST_LISTED: Final = 1000
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

    Raises what is wrong with it in the raw path: a%2Fitems%2Fb must not name the item b of a.
    """
    if (wrong := find_name_error(request)) is not None:
        raise wrong
    return name


Name = Annotated[str, Depends(_check_name_in_path)]
_ONE: Final[dict[int | str, dict[str, Any]]] = {status: {} for status in (404, 409, 422, 504)}
_MADE: Final[dict[int | str, dict[str, Any]]] = {
    201: {"model": DescribedCollection, "description": "made now"},
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
    resources: Opened,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = _MOST_LISTED,
    cursor: str | None = None,
) -> Response:
    """Lists all collections by name, page by page; those that are not `usable` hold embeddings of
    another model.

    Those that cannot be opened at all stand apart, with the reason.
    """
    store = resources.model.data.store
    if store is not None:
        await open_all_arrived(store, request, resources)
    every = {} if store is None else store.all()
    names = sorted(name for name in every if sees(name, request))
    if cursor is not None:
        (last,) = read_cursor(cursor, str)
        names = names[bisect_right(names, last) :]
    page = names[:limit]
    described = [await _describe(name, every[name], request, resources) for name in page]
    reasons = {} if store is None else store.unusable()
    unusable = [
        UnusableCollection(name=name, reason=reason)
        for name, reason in sorted(reasons.items())[:_MOST_LISTED]
        if sees(name, request)
    ]
    following = {"next": write_cursor(page[-1])} if len(names) > len(page) else {}
    return await compute_answer(
        partial(CollectionList, collections=described, unusable=unusable, **following),
        request,
        resources,
        exclude_unset=True,
    )


@router.put("/v1/collections/{name}", dependencies=[needs("write")], responses=_MADE)
async def create_collection(
    name: Name,
    body: Annotated[CreateRequest, Body(default_factory=CreateRequest)],
    request: Request,
    response: Response,
    resources: Opened,
) -> DescribedCollection:
    """Creates an empty collection for the served model's embeddings.

    A collection of this name for the same model stays as it is.
    """
    if not sees(name, request):
        raise OutsideKey(param="name")
    dimension = resources.encoder.dimension
    if body.dimension not in (None, dimension):
        raise InvalidInput(
            f"dimension must be that of the served model, {dimension}, got {body.dimension}",
            remedy="leave `dimension` out",
        )
    store, fingerprint = resources.model.data.require_store(), resources.encoder.fingerprint
    collection, is_new = await change(
        request,
        resources,
        lambda: store.create(
            name, fingerprint=fingerprint, dimension=dimension, recall=body.recall
        ),
    )
    response.status_code = 201 if is_new else 200
    response.headers.update(headers(resources))
    return await _describe(name, collection, request, resources)


@router.get("/v1/collections/{name}", dependencies=[needs("search")], responses=_ONE)
async def describe_collection(
    name: Name, request: Request, response: Response, resources: Opened
) -> DescribedCollection:
    """Describes a collection's size and its index: how it was tuned, and its measured recall."""
    collection = await require_collection(name, request, resources)
    response.headers.update(headers(resources))
    return await _describe(name, collection, request, resources)


@router.delete("/v1/collections/{name}", dependencies=[needs("write")], responses={**_ONE, 503: {}})
async def delete_collection(name: Name, request: Request, resources: Opened) -> DeletedCollection:
    """Deletes a collection with all its items for good, also one of another model."""
    store = resources.model.data.require_store()
    await open_arrived(name, request, resources)
    await change(request, resources, lambda: store.delete(name))
    return DeletedCollection(collection=name, outcome="deleted")


async def _describe(
    name: str, collection: CollectionPort, request: Request, resources: Resources
) -> DescribedCollection:
    description = await _within(request, resources.compute, collection.describe)
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
        else "it could not be made; the log says why",
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
    """Returns the collection. Raises Conflict where it exists and cannot be opened.

    Raises what `ModelData.require_collection` raises, too.
    """
    await open_arrived(name, request, resources)
    return resources.model.data.require_collection(name)


async def open_arrived(name: str, request: Request, resources: Resources) -> None:
    """Opens the collection if there is one that is not open.

    A name without a collection costs a look into the folder, and waits for no other request.
    Raises NotFound where the key does not see it.
    """
    check_seen(name, request)
    store = resources.model.data.store
    if store is None or store.find(name) is not None:
        return
    if await _within(request, resources.compute, partial(store.has_arrived, name)):
        await _within(request, resources.opening, partial(store.open_arrived, name))


async def open_all_arrived(store: CollectionsPort, request: Request, resources: Resources) -> None:
    """Opens all collections that are not open, and skips those that cannot be opened."""
    if await _within(request, resources.compute, store.find_arrivals):
        await _within(request, resources.opening, store.open_all_arrived)


async def _within(
    request: Request, pool: ThreadPoolExecutor, work: Callable[[], _Result]
) -> _Result:
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(pool, work), request.state.deadline
    )


async def change(request: Request, resources: Resources, work: Callable[[], _Result]) -> _Result:
    """Returns what `work` returns, a change on the disk, within the request's deadline.

    After the deadline the change may still be made; it is idempotent. Raises Unavailable where the
    disk is full or no more files can be opened; nothing has changed then.
    """
    running = asyncio.get_running_loop().run_in_executor(
        resources.writing, _without_file_names, work
    )
    with time_stage("store"):
        return await within_deadline(running, request.state.deadline)


def _without_file_names(work: Callable[[], _Result]) -> _Result:
    """Does `work`; only the log, and not the client, sees the file names of a disk's error."""
    try:
        return work()
    except (StoreUnreachable, TooManyOpenFiles) as error:
        _log.error("a change cannot be stored: %s", error)
        raise
    except Unavailable as error:
        _log.error("a change cannot be stored: %s", error)
        raise Unavailable(
            "the server's disk is full or fails",
            remedy="send the request again when there is space; what was acknowledged is kept",
        ) from error
