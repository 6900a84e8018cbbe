"""The routes of centers: the list, one center, its members in a collection and their values."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response

from mlcd.artifacts.given_names import check_name
from mlcd.collections.item import MAX_FIELD_BYTES
from mlcd.errors import InvalidInput, NotFound
from mlcd.service.deadline import within_deadline
from mlcd.service.http.access import AppResources, sees
from mlcd.service.http.answers import compute_answer, headers
from mlcd.service.http.auth import needs
from mlcd.service.http.center_pages import (
    Clustered,
    ListOptions,
    Sort,
    build_center_list,
    build_described_center,
)
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.member_pages import build_member_page, rank_values
from mlcd.service.http.routes.collections import apply_change, require_collection
from mlcd.service.http.routes.labels import require_lookup
from mlcd.service.inference.lookup import Lookup
from mlcd.service.resources import Resources
from mlcd.wire.nearest_centers import (
    CenterList,
    CountedValues,
    DescribedCenter,
    MemberList,
    NameRequest,
    RenamedCenter,
)

router = APIRouter(tags=["labels"], route_class=JsonRoute)

_Result = TypeVar("_Result")
_MAX_EXAMPLES: Final = 12
_MAX_LISTED: Final = 500
_MAX_QUERY_CHARS: Final = 500
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {} for status in (404, 409, 422, 429, 504)
}
_CHANGED: Final[dict[int | str, dict[str, Any]]] = {**_ERRORS, 503: {}}
Center = Annotated[int, Path(ge=0)]
RequiredCollection = Annotated[
    str, Query(alias="collection", description="the name of a collection")
]
OptionalCollection = Annotated[
    str | None, Query(alias="collection", description="the name of a collection")
]
Limit = Annotated[int, Query(ge=1, le=_MAX_LISTED)]


@router.get(
    "/v1/centers",
    dependencies=[needs("search")],
    response_model=CenterList,
    responses=_ERRORS,
)
async def list_centers(
    request: Request,
    resources: AppResources,
    *,
    in_collection: OptionalCollection = None,
    sort: Annotated[
        Sort | None, Query(description="default: members; without a collection, size")
    ] = None,
    descending: Annotated[
        bool | None, Query(description="default: true, except for sort=name and sort=id")
    ] = None,
    name: Annotated[str | None, Query(description="a part of the name, in any case")] = None,
    query: Annotated[
        str | None,
        Query(
            max_length=_MAX_QUERY_CHARS,
            description="words that must all occur in the name or its alternates",
        ),
    ] = None,
    min_size: Annotated[int | None, Query(ge=0)] = None,
    max_size: Annotated[int | None, Query(ge=0)] = None,
    min_members: Annotated[int | None, Query(ge=0)] = None,
    max_members: Annotated[int | None, Query(ge=0)] = None,
    examples: Annotated[int, Query(ge=0, le=_MAX_EXAMPLES)] = 4,
    limit: Limit = 60,
    cursor: str | None = None,
) -> Response:
    """Lists the centers in pages, with the nearest items of a collection as examples.

    sort=recent: by the novelty of the most recently labeled images.

    Without a collection, the examples are those stored with the centers. Centers without the value
    to sort by come last.
    """
    lookup = require_lookup(resources)
    clustered = await _find_clusters(request, resources, in_collection)
    sort = sort or ("size" if clustered is None else "members")
    if clustered is None and sort in ("members", "spread", "novelty"):
        raise InvalidInput(f"sort={sort} requires a collection", remedy="add `collection`")
    if clustered is None and (min_members, max_members) != (None, None):
        raise InvalidInput(
            "min_members and max_members require a collection", remedy="add `collection`"
        )
    options = ListOptions(
        sort=sort,
        descending=sort not in ("name", "id") if descending is None else descending,
        name=name,
        query=query,
        minimums=_drop_missing(size=min_size, members=min_members),
        maximums=_drop_missing(size=max_size, members=max_members),
        examples=examples,
        limit=limit,
        cursor=cursor,
    )
    build_page = partial(build_center_list, resources, lookup, clustered, options)
    return await compute_answer(build_page, request, resources, headers(resources))


@router.get(
    "/v1/centers/{center}",
    dependencies=[needs("search")],
    responses=_ERRORS,
    response_model_exclude_unset=True,
)
async def describe_center(
    request: Request,
    response: Response,
    center: Center,
    resources: AppResources,
    in_collection: OptionalCollection = None,
) -> DescribedCenter:
    """Describes a center: size, name, the nearest other centers, and examples.

    The examples are the members stored with the center, then the nearest items of `collection` or,
    without it, of the first four collections by name, which the field `collections` lists. With
    `collection`, the answer also has the number of the center's members in it.
    """
    lookup = _require_center(center, resources)
    clustered = await _find_clusters(request, resources, in_collection)
    response.headers.update(headers(resources))
    return await _compute(
        request,
        resources,
        partial(
            build_described_center,
            center,
            resources,
            lookup,
            clustered,
            is_visible=lambda name: sees(name, request),
        ),
    )


@router.patch("/v1/centers/{center}", dependencies=[needs("write")], responses=_CHANGED)
async def rename_center(
    center: Center, body: NameRequest, request: Request, resources: AppResources
) -> RenamedCenter:
    """Names a center, or removes its name; the change is on disk before the answer, and every
    server process shows it from then on.

    Names that are later computed from evidence do not replace it, but may fill a removed name.
    """
    lookup = _require_center(center, resources)
    name = check_name(body.name)
    names = await apply_change(request, resources, partial(lookup.rename, center, name))
    return RenamedCenter(centers=lookup.centers.digest, id=center, name=name, version=names.version)


@router.get(
    "/v1/centers/{center}/members",
    dependencies=[needs("search")],
    response_class=Response,
    responses={200: {"model": MemberList}, **_ERRORS},
)
async def list_members(
    request: Request,
    center: Center,
    resources: AppResources,
    in_collection: RequiredCollection,
    limit: Limit = 60,
    cursor: str | None = None,
) -> Response:
    """Lists the items of a collection whose nearest center is this one, nearest items first."""
    lookup = _require_center(center, resources)
    clustered = await _require_clusters(request, resources, lookup, in_collection)

    def build_page() -> dict[str, Any]:
        page = build_member_page(
            clustered.collection, clustered.clusters, center, limit=limit, cursor=cursor
        )
        subject = {"collection": in_collection, "centers": lookup.centers.digest, "id": center}
        return {**subject, **page}

    return await compute_answer(build_page, request, resources, headers(resources))


@router.get(
    "/v1/centers/{center}/values",
    dependencies=[needs("search")],
    response_model=CountedValues,
    responses=_ERRORS,
)
async def count_values(
    request: Request,
    center: Center,
    resources: AppResources,
    in_collection: RequiredCollection,
    field: Annotated[str, Query(min_length=1, max_length=MAX_FIELD_BYTES)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """Counts the values of a metadata field among a center's members in a collection.

    An item whose value is a list counts once for each distinct entry.
    """
    lookup = _require_center(center, resources)
    clustered = await _require_clusters(request, resources, lookup, in_collection)

    def count() -> CountedValues:
        counts, num_others, num_missing = rank_values(clustered.clusters, center, field, limit)
        return CountedValues(
            collection=in_collection,
            centers=lookup.centers.digest,
            id=center,
            field=field,
            counts=counts,
            others=num_others,
            missing=num_missing,
        )

    return await compute_answer(count, request, resources, headers(resources))


def _require_center(center: int, resources: Resources) -> Lookup:
    lookup = require_lookup(resources)
    num = len(lookup.centers.vectors)
    if center >= num:
        raise NotFound(f"the center must be in 0..{num - 1}, got {center}")
    return lookup


async def _find_clusters(
    request: Request, resources: Resources, name: str | None
) -> Clustered | None:
    if name is None:
        return None
    return await _require_clusters(request, resources, require_lookup(resources), name)


async def _require_clusters(
    request: Request, resources: Resources, lookup: Lookup, name: str
) -> Clustered:
    collection = await require_collection(name, request, resources)
    clusters = await resources.views.clusters(collection, lookup, deadline=request.state.deadline)
    return Clustered(name, collection, clusters)


async def _compute(request: Request, resources: Resources, work: Callable[[], _Result]) -> _Result:
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(resources.compute, work),
        request.state.deadline,
    )


def _drop_missing(**bounds: int | None) -> dict[str, int]:
    return {name: value for name, value in bounds.items() if value is not None}
