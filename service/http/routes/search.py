"""The routes that search a collection and find near-duplicates in it."""

import asyncio
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
import orjson
from fastapi import APIRouter, Body, Query, Request, Response

from mlcd.collections.duplicates import Group
from mlcd.collections.item import FoundItem
from mlcd.collections.port import CollectionPort
from mlcd.collections.relevance import move_away
from mlcd.collections.searcher import SearchAnswer
from mlcd.errors import DeadlineExceeded
from mlcd.types import Embeddings
from mlcd.wire.found_items import (
    DuplicatesRequest,
    FoundDuplicates,
    FoundItems,
    SearchOptions,
    SearchRequest,
)
from service.deadline import within_deadline
from service.errors import BadRequest
from service.http.access import Opened
from service.http.answers import (
    check_answer_bytes,
    headers,
    listed_answer,
    pieces_answer,
    provenance,
)
from service.http.auth import needs
from service.http.bodies import check_count, media_type, read_json, validated
from service.http.json_route import JsonRoute
from service.http.openapi import image_body
from service.http.problems import item_error
from service.http.queries import (
    KINDS,
    Queries,
    check_fields,
    check_filter,
    check_names,
    check_top,
    given_fields,
    queries_from_json,
    read_queries,
)
from service.http.routes.collections import Name, opened_collection
from service.inference.duplicate_searches import FoundGroups
from service.resources import Resources
from service.telemetry.request import timed

router = APIRouter(tags=["search"], route_class=JsonRoute)

_OPTIONS: Final = tuple(SearchOptions.model_fields)
_IDS: Final = ("id", "ids")
_MATCH_BYTES: Final = 60  # the names of a match's fields, and its similarity
_FOUND: Final[dict[int | str, dict[str, Any]]] = {200: {"model": FoundItems}, 404: {}, 409: {}}
_REMEDY: Final = (
    "run `mlcd curate EMBEDDINGS OUT --duplicates 0.95`, which takes its time, or stop the server"
    " and run `mlcd index COLLECTION OUT.jsonl --duplicates 0.95`"
)


@router.post(
    "/v1/collections/{name}/search",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_FOUND,
    openapi_extra=image_body(SearchRequest),
)
async def search(
    name: Name,
    request: Request,
    resources: Opened,
    *,
    top: Annotated[int | None, Query(ge=1)] = None,
    filter: Annotated[  # noqa: A002 - the parameter's name
        str | None, Query(description="JSON, as the field of a JSON body")
    ] = None,
    threshold: Annotated[float | None, Query(ge=-1, le=1)] = None,
    exact: Annotated[bool | None, Query()] = None,
    metadata: Annotated[bool | None, Query()] = None,
    without: Annotated[str | None, Query(description="JSON, as the field of a JSON body")] = None,
) -> Response:
    """Finds the items most similar to each image, text, embedding or item (JSON `ids`).

    It finds `top` items (10) that fulfill `filter` and are at least as similar as `threshold`. The
    options go into the query string or into a JSON body. `without` moves the queries away from the
    mean of stored items. `exact` compares with all items, whatever the index; the answer says
    whether that was done, and how many items the filter leaves.
    `metadata=false` leaves the matches' metadata out (null): an answer of more than
    `max_answer_bytes` is refused before it is made.
    """
    collection = await opened_collection(name, request, resources)
    given = given_fields(
        {
            "top": top,
            "filter": _parsed(filter, "filter"),
            "threshold": threshold,
            "exact": exact,
            "metadata": metadata,
            "without": _parsed(without, "without"),
        }
    )
    content = None
    if media_type(request) == "application/json":
        content = given_fields(await read_json(request, resources))
        if twice := given.keys() & content.keys():
            raise BadRequest(
                f"{min(twice)} is given in the query string and in the body", param=min(twice)
            )
        given |= {option: content.pop(option) for option in _OPTIONS if option in content}
    options = validated(SearchOptions, given)
    check_filter(options.filter)
    if content is not None:
        check_names(content, (*_OPTIONS, *KINDS, *_IDS), request)
        _check_queries(content, request)
    check_top(options.top, resources)
    if content is None:
        queries = await read_queries(request, resources)
    elif content.keys() & {*_IDS}:
        queries = await _queries_of_items(request, content, resources, collection)
    else:
        queries = await queries_from_json(request, content, resources)
    wanted = queries.embeddings
    if options.without is not None:
        unwanted = await _embeddings(options.without.ids, request, resources, collection)
        wanted = move_away(wanted, unwanted, options.without.weight)
    searching = partial(
        collection.search,
        wanted,
        options.top,
        filter=options.filter,
        threshold=options.threshold,
        exact=options.exact,
    )
    with resources.metrics.searching(), timed("search"):
        found = await within_deadline(
            asyncio.get_running_loop().run_in_executor(resources.compute, searching),
            request.state.deadline,
        )
    num_bytes = _num_bytes(found, metadata=options.metadata)
    check_answer_bytes(
        num_bytes,
        resources.settings.limits,
        remedy="give a smaller `top`, or metadata=false",
    )
    return listed_answer(
        {
            **provenance(resources),
            "collection": name,
            "exact": found.exact,
            "matching": found.matching,
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        },
        [
            partial(_result, collection, index, matches, metadata=options.metadata)
            for index, matches in zip(queries.rows, found.matches, strict=True)
        ],
        headers(resources, queries.encoded),
        resources,
        num_items=sum(map(len, found.matches)),
        num_bytes=num_bytes,
        # A folder's metadata are in memory in any case; other stores send a copy.
        held_bytes=0 if collection.promises.store == "folder" else num_bytes,
    )


def _num_bytes(found: SearchAnswer, *, metadata: bool) -> int:
    """Returns the approximate size of the matches in an answer."""
    return sum(
        _MATCH_BYTES + len(match.id) + metadata * len(match.metadata_json)
        for matches in found.matches
        for match in matches
    )


def _result(
    collection: CollectionPort, index: int, matches: list[FoundItem], *, metadata: bool
) -> dict[str, Any]:
    versions = collection.thumbnail_versions([match.id for match in matches])
    return {
        "index": index,
        "matches": (
            {
                "id": match.id,
                "similarity": match.similarity,
                "metadata": orjson.Fragment(match.metadata_json) if metadata else None,
                "thumbnail": version,
            }
            for match, version in zip(matches, versions, strict=True)
        ),
    }


def _parsed(text: str | None, name: str) -> object:
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{name} is not JSON, or nested too deep", param=name) from error


def _check_queries(content: dict[str, Any], request: Request) -> None:
    """Raises BadRequest unless a JSON body names the queries in one way."""
    if not content.keys() & {*_IDS}:
        check_fields(content, request)
        return
    if len(content) > 1:
        raise BadRequest("give one of `images`, `texts`, `embeddings`, `id` and `ids`")
    ids = _ids(content)
    if not isinstance(ids, list) or not ids or not all(isinstance(item_id, str) for item_id in ids):
        raise BadRequest(
            "`id` is a string, `ids` a list of strings", param="ids" if "ids" in content else "id"
        )


def _ids(content: dict[str, Any]) -> Any:
    return content.get("ids", [content.get("id")])


async def _queries_of_items(
    request: Request, content: dict[str, Any], resources: Resources, collection: CollectionPort
) -> Queries:
    """Returns the embeddings of stored items; an id that is not stored refuses the request."""
    ids = _ids(content)
    check_count(len(ids), resources.settings.limits)
    await resources.rate_limiter.take(request.state.key, len(ids))
    return Queries.given(await _embeddings(ids, request, resources, collection))


async def _embeddings(
    ids: list[str], request: Request, resources: Resources, collection: CollectionPort
) -> Embeddings:
    """Returns the embeddings of stored items, [n, D]. Raises NotFound."""

    def read() -> Embeddings:
        return np.concatenate([collection.embedding_of(item_id) for item_id in ids])

    reading = asyncio.get_running_loop().run_in_executor(resources.compute, read)
    return await within_deadline(reading, request.state.deadline)


@router.post(
    "/v1/collections/{name}/duplicates",
    dependencies=[needs("search")],
    response_model=FoundDuplicates,
    responses={404: {}, 409: {}},
)
async def find_duplicates(
    name: Name,
    asked: Annotated[DuplicatesRequest, Body(default_factory=DuplicatesRequest)],
    request: Request,
    resources: Opened,
) -> Response:
    """Finds groups of items whose pictures are copies of one, or of at least this `similarity`.

    A group is what chains of pairs join. It ends within the deadline; `mlcd curate` and `mlcd index
    --duplicates` have none. One search runs at a time, and one waits; a further one is answered
    429. The last results are kept.
    """
    collection = await opened_collection(name, request, resources)
    key, deadline = request.state.key, request.state.deadline
    owner = None if key is None else key.id
    try:
        with timed("compare"):
            found = await resources.duplicates.find(
                collection, asked.similarity, owner=owner, deadline=deadline
            )
    except DeadlineExceeded as error:
        raise DeadlineExceeded("the time for a request has passed", remedy=_REMEDY) from error
    looking = asyncio.get_running_loop().run_in_executor(
        resources.compute, partial(_group_bytes, collection, found)
    )
    num_bytes = await within_deadline(looking, deadline)
    check_answer_bytes(
        num_bytes, resources.settings.limits, remedy=f"give a higher `similarity`, or {_REMEDY}"
    )
    return pieces_answer(
        {
            "collection": name,
            "similarity": asked.similarity,
            "groups": (_described(collection, group, found.ids) for group in found.groups),
            "nearest": found.nearest and _described(collection, found.nearest, found.ids),
        },
        headers(resources),
        resources,
        num_items=sum(len(group.rows) for group in found.groups),
        num_bytes=num_bytes,
    )


def _group_bytes(collection: CollectionPort, found: FoundGroups) -> int:
    """Returns the approximate size of the groups in an answer."""
    state = collection.state
    return sum(
        _MATCH_BYTES
        + len(found.ids[row])
        + (0 if (at := state.find(found.ids[row])) is None else len(state.metadata[at]))
        for group in found.groups
        for row in group.rows.tolist()
    )


def _described(collection: CollectionPort, group: Group, ids: list[str]) -> dict[str, Any]:
    """Adds what is known of the items now: one may be gone since it was compared."""
    record, state = group.record(ids), collection.state
    places = map(state.find, record["ids"])
    return {
        **{field: iter(values) for field, values in record.items()},
        "metadata": (
            None if place is None else orjson.Fragment(state.metadata[place]) for place in places
        ),
        "thumbnails": iter(collection.thumbnail_versions(record["ids"])),
    }
