"""The routes of centers: their list, one of them, its members in a collection and their values."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response
from numpy.typing import NDArray

from mlcd.artifacts.given_names import checked_name
from mlcd.collections.clusters import Clusters
from mlcd.collections.collection import Collection
from mlcd.collections.item import MAX_FIELD_BYTES
from mlcd.errors import Conflict, InvalidInput, NotFound
from mlcd.types import Embeddings
from mlcd.wire.nearest_centers import (
    CenterList,
    CountedValues,
    DescribedCenter,
    Example,
    Label,
    ListedCenter,
    MemberList,
    NameRequest,
    RenamedCenter,
)
from service.deadline import within_deadline
from service.http.access import Opened
from service.http.answers import headers, json_answer, provenance
from service.http.auth import needs
from service.http.cursors import read_cursor, write_cursor
from service.http.json_route import JsonRoute
from service.http.member_pages import counted_values, listed_members
from service.http.routes.collections import change, opened_collection
from service.http.routes.labels import example_members, opened_lookup
from service.inference.lookup import Lookup
from service.resources import Resources

router = APIRouter(tags=["labels"], route_class=JsonRoute)

_Result = TypeVar("_Result")
Sort = Literal["size", "members", "name", "spread", "novelty", "id"]
_NUM_NEIGHBORS: Final = 8
_MOST_EXAMPLES: Final = 12
_MOST_LISTED: Final = 500
_MOST_ASKED: Final = 500  # characters of a query
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {status: {} for status in (404, 409, 422, 504)}
_CHANGED: Final[dict[int | str, dict[str, Any]]] = {**_ERRORS, 503: {}}
Center = Annotated[int, Path(ge=0)]
Named = Annotated[str, Query(alias="collection", description="the name of a collection")]
OrNone = Annotated[str | None, Query(alias="collection", description="the name of a collection")]
Limit = Annotated[int, Query(ge=1, le=_MOST_LISTED)]


@dataclass(frozen=True)
class _Clustered:
    """The clusters of the collection that a request names."""

    name: str
    collection: Collection
    clusters: Clusters


@dataclass(frozen=True)
class _Listing:
    """The options of a list of centers; see `list_centers`."""

    sort: Sort
    descending: bool
    name: str | None
    query: str | None
    least: dict[str, int]
    most: dict[str, int]
    examples: int
    limit: int
    cursor: str | None


@router.get("/v1/centers", dependencies=[needs("search")], responses=_ERRORS)
async def list_centers(
    request: Request,
    response: Response,
    resources: Opened,
    *,
    in_collection: OrNone = None,
    sort: Annotated[
        Sort | None, Query(description="members, or size without a collection, by default")
    ] = None,
    descending: Annotated[
        bool | None, Query(description="true, but for names and ids, by default")
    ] = None,
    name: Annotated[str | None, Query(description="a part of the name, whatever its case")] = None,
    query: Annotated[
        str | None,
        Query(max_length=_MOST_ASKED, description="words, each in the name or an alternate"),
    ] = None,
    min_size: Annotated[int | None, Query(ge=0)] = None,
    max_size: Annotated[int | None, Query(ge=0)] = None,
    min_members: Annotated[int | None, Query(ge=0)] = None,
    max_members: Annotated[int | None, Query(ge=0)] = None,
    examples: Annotated[int, Query(ge=0, le=_MOST_EXAMPLES)] = 4,
    limit: Limit = 60,
    cursor: str | None = None,
) -> CenterList:
    """Lists the centers page by page, with the nearest items of a collection as examples.

    Without a collection the examples are those that ship with the centers. Centers whose value is
    unknown come last.
    """
    lookup = opened_lookup(resources)
    clustered = await _clustered(request, resources, in_collection)
    sort = sort or ("size" if clustered is None else "members")
    if clustered is None and sort in ("members", "spread", "novelty"):
        raise InvalidInput(f"{sort} is that of a collection", remedy="name a collection")
    if clustered is None and (min_members, max_members) != (None, None):
        raise InvalidInput("members are those of a collection", remedy="name a collection")
    listing = _Listing(
        sort=sort,
        descending=sort not in ("name", "id") if descending is None else descending,
        name=name,
        query=query,
        least=_stated(size=min_size, members=min_members),
        most=_stated(size=max_size, members=max_members),
        examples=examples,
        limit=limit,
        cursor=cursor,
    )
    response.headers.update(headers(resources))
    return await _computed(
        request, resources, partial(_listed, resources, lookup, clustered, listing)
    )


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
    resources: Opened,
    in_collection: OrNone = None,
) -> DescribedCenter:
    """Describes a center: size, name, the nearest other centers, and examples.

    The examples are its nearest members, then items of each collection, or of the one that is
    named. With a collection its members there are counted, too.
    """
    lookup = _lookup_of(center, resources)
    clustered = await _clustered(request, resources, in_collection)
    response.headers.update(headers(resources))
    return await _computed(
        request, resources, partial(_describe, center, resources, lookup, clustered)
    )


@router.patch("/v1/centers/{center}", dependencies=[needs("write")], responses=_CHANGED)
async def rename_center(
    center: Center, asked: NameRequest, request: Request, resources: Opened
) -> RenamedCenter:
    """Gives a center a name, or takes it away; it is on the disk when this is answered.

    Later names from evidence leave it alone. A center whose name was taken away is free for them.
    """
    lookup = _lookup_of(center, resources)
    if resources.settings.processes > 1:
        raise Conflict(
            "several processes cannot change a name at one moment",
            remedy="name the centers by `mlcd name --set` and restart the server",
        )
    name = checked_name(asked.name)
    names = await change(request, resources, partial(lookup.rename, center, name))
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
    resources: Opened,
    in_collection: Named,
    limit: Limit = 60,
    cursor: str | None = None,
) -> Response:
    """Lists the items of a collection whose nearest center this is, the nearest first."""
    lookup = _lookup_of(center, resources)
    clustered = await _named_clusters(request, resources, lookup, in_collection)
    content = await _computed(
        request,
        resources,
        partial(
            listed_members,
            clustered.collection,
            clustered.clusters,
            center,
            limit=limit,
            cursor=cursor,
        ),
    )
    about = {"collection": in_collection, "centers": lookup.centers.digest, "id": center}
    return json_answer({**about, **content}, headers(resources))


@router.get("/v1/centers/{center}/values", dependencies=[needs("search")], responses=_ERRORS)
async def count_values(
    request: Request,
    response: Response,
    center: Center,
    resources: Opened,
    in_collection: Named,
    field: Annotated[str, Query(min_length=1, max_length=MAX_FIELD_BYTES)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> CountedValues:
    """Counts the values of a metadata field among a center's members in a collection.

    An item with a list counts for each of its entries.
    """
    lookup = _lookup_of(center, resources)
    clustered = await _named_clusters(request, resources, lookup, in_collection)
    response.headers.update(headers(resources))
    counts, others, missing = await _computed(
        request, resources, partial(counted_values, clustered.clusters, center, field, limit)
    )
    return CountedValues(
        collection=in_collection,
        centers=lookup.centers.digest,
        id=center,
        field=field,
        counts=counts,
        others=others,
        missing=missing,
    )


def _lookup_of(center: int, resources: Resources) -> Lookup:
    lookup = opened_lookup(resources)
    num = len(lookup.centers.vectors)
    if center >= num:
        raise NotFound("there is no such center", remedy=f"ids go from 0 to {num - 1}")
    return lookup


async def _clustered(request: Request, resources: Resources, name: str | None) -> _Clustered | None:
    if name is None:
        return None
    return await _named_clusters(request, resources, opened_lookup(resources), name)


async def _named_clusters(
    request: Request, resources: Resources, lookup: Lookup, name: str
) -> _Clustered:
    collection = await opened_collection(name, request, resources)
    clusters = await resources.views.clusters(collection, lookup, deadline=request.state.deadline)
    return _Clustered(name, collection, clusters)


async def _computed(request: Request, resources: Resources, work: Callable[[], _Result]) -> _Result:
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(resources.compute, work),
        request.state.deadline,
    )


def _stated(**given: int | None) -> dict[str, int]:
    return {name: value for name, value in given.items() if value is not None}


def _listed(
    resources: Resources, lookup: Lookup, clustered: _Clustered | None, listing: _Listing
) -> CenterList:
    centers = lookup.centers
    values = _values(lookup, clustered)
    order = _ordered(lookup, values, listing)
    first = 0
    if listing.cursor is not None:
        (last,) = read_cursor(listing.cursor, int)
        found = np.flatnonzero(order == last)
        if not len(found):
            raise InvalidInput("the cursor is not of this list", remedy="begin again")
        first = int(found[0]) + 1
    page = order[first : first + listing.limit]
    examples = _examples(lookup, clustered, page.tolist(), listing.examples)
    return CenterList(
        **provenance(resources),
        digest=centers.digest,
        novelty_from=_novelty_from(lookup, clustered),
        collection=None if clustered is None else clustered.name,
        centers=[
            ListedCenter(
                id=center,
                name=centers.name(center),
                alternates=lookup.names.alternates(center),
                size=int(centers.sizes[center]),
                members=None if clustered is None else int(values["members"][center]),
                spread=_known(values["spread"][center]),
                novelty=_known(values["novelty"][center]),
                examples=shown,
            )
            for center, shown in zip(page.tolist(), examples, strict=True)
        ],
        next=write_cursor(int(page[-1])) if first + len(page) < len(order) else None,
        total=len(order),
    )


def _values(lookup: Lookup, clustered: _Clustered | None) -> dict[str, NDArray[Any]]:
    num = len(lookup.centers.vectors)
    unknown = np.full(num, np.nan)
    values: dict[str, NDArray[Any]] = {"size": lookup.centers.sizes, "id": np.arange(num)}
    if clustered is None:
        return {**values, "spread": unknown, "novelty": unknown}
    clusters = clustered.clusters
    farthest = lookup.ordinary_distance or clusters.ordinary_distance
    return {
        **values,
        "members": clusters.num_members,
        "spread": clusters.spread,
        "novelty": unknown if farthest is None else clusters.novelty(farthest),
    }


def _novelty_from(
    lookup: Lookup, clustered: _Clustered | None
) -> Literal["centers", "collection"] | None:
    """Returns the images whose distances are the ordinary ones."""
    if clustered is None:
        return None
    if lookup.ordinary_distance is not None:
        return "centers"
    return None if clustered.clusters.ordinary_distance is None else "collection"


def _ordered(
    lookup: Lookup, values: dict[str, NDArray[Any]], listing: _Listing
) -> NDArray[np.int64]:
    """Returns the centers that the filters leave, in order."""
    wanted = np.ones(len(lookup.centers.vectors), dtype=np.bool_)
    for name, bound in listing.least.items():
        wanted &= values[name] >= bound
    for name, bound in listing.most.items():
        wanted &= values[name] <= bound
    if listing.name is not None:
        part = listing.name.casefold()
        wanted &= np.fromiter((part in name for name in lookup.names.folded), np.bool_)
    if listing.query is not None:
        words = listing.query.casefold().split()
        texts = lookup.names.searched
        wanted &= np.fromiter((all(word in text for word in words) for text in texts), np.bool_)
    if listing.sort == "name":
        rank = lookup.names.ranks.astype(np.float64)
        key = np.where(np.isfinite(rank) & listing.descending, -rank, rank)
    else:
        key = values[listing.sort].astype(np.float64)
        key = -key if listing.descending else key
    chosen = np.flatnonzero(wanted)
    # unknown values come last in either direction
    return chosen[np.argsort(np.nan_to_num(key[chosen], nan=np.inf), kind="stable")]


def _examples(
    lookup: Lookup, clustered: _Clustered | None, page: list[int], num: int
) -> list[list[Example]]:
    if clustered is None:
        return [
            [Example(**example) for example in example_members(lookup.centers, center, num)]
            for center in page
        ]
    clusters = clustered.clusters
    ids = clusters.searcher.ids
    parts = [range(clusters.members(c).start, clusters.members(c).stop)[:num] for c in page]
    shown = [ids[clusters.positions[place]] for part in parts for place in part]
    versions = iter(clustered.collection.thumbnail_versions(shown))
    return [
        [
            Example(
                collection=clustered.name,
                id=ids[clusters.positions[place]],
                similarity=float(clusters.similarities[place]),
                thumbnail=next(versions),
            )
            for place in part
        ]
        for part in parts
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _describe(
    center: int, resources: Resources, lookup: Lookup, clustered: _Clustered | None
) -> DescribedCenter:
    centers = lookup.centers
    vector = centers.vectors[center : center + 1]
    near = lookup.scan.nearest(vector, min(_NUM_NEIGHBORS + 1, len(centers.vectors)))
    neighbors = [
        Label(id=int(other), similarity=float(score), name=centers.name(int(other)))
        for other, score in zip(near.ids[0], near.scores[0], strict=True)
        if other != center
    ]
    members = [Example(**example) for example in example_members(centers, center)]
    if clustered is None:
        items, counted = _nearest_items(resources, lookup, vector), {}
    else:
        (items,) = _examples(lookup, clustered, [center], _NUM_NEIGHBORS)
        values = _values(lookup, clustered)
        counted = {
            "members": int(values["members"][center]),
            "spread": _known(values["spread"][center]),
            "novelty": _known(values["novelty"][center]),
        }
    return DescribedCenter(
        **provenance(resources),
        centers=centers.digest,
        id=center,
        size=int(centers.sizes[center]),
        name=centers.name(center),
        alternates=lookup.names.alternates(center),
        **counted,
        nearest=neighbors[:_NUM_NEIGHBORS],
        examples=[*members, *items],
    )


def _nearest_items(resources: Resources, lookup: Lookup, vector: Embeddings) -> list[Example]:
    """Returns the items of each collection that are nearest to a center."""
    if lookup.centers.mean is not None:
        # Centers with a mean compare embeddings less the mean: a search is not in that space.
        return []
    items = []
    for name, collection in resources.collections.items():
        matches = collection.search(vector, _NUM_NEIGHBORS).matches[0]
        versions = collection.thumbnail_versions([match.id for match in matches])
        items += [
            Example(collection=name, id=match.id, similarity=match.similarity, thumbnail=version)
            for match, version in zip(matches, versions, strict=True)
        ]
    return items
