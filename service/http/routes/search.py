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
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest
from mlcd.service.http.access import AppResources
from mlcd.service.http.answers import (
    check_answer_bytes,
    headers,
    list_answer,
    provenance,
    stream_json_response,
)
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import check_count, media_type, read_json, validate
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.openapi import image_body
from mlcd.service.http.problems import item_error
from mlcd.service.http.queries import (
    KINDS,
    Queries,
    check_filter,
    check_names,
    check_top,
    drop_nulls,
    queries_from_json,
    read_queries,
)
from mlcd.service.http.routes.collections import Name, require_collection
from mlcd.service.inference.duplicate_searches import FoundGroups
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import time_stage
from mlcd.types import Embeddings
from mlcd.wire.item_search import (
    DuplicatesRequest,
    FoundDuplicates,
    FoundItems,
    SearchOptions,
    SearchRequest,
)

router = APIRouter(tags=["search"], route_class=JsonRoute)

_OPTIONS: Final = tuple(SearchOptions.model_fields)
_IDS: Final = ("id", "ids")
_MATCH_BYTES: Final = 60  # field names and similarity of a match in JSON
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": FoundItems}, 404: {}, 409: {}}
_REMEDY: Final = (
    "run `mlcd curate EMBEDDINGS OUT --duplicates 0.95`, which has no deadline, or stop the server"
    " and run `mlcd index COLLECTION OUT.jsonl --duplicates 0.95`"
)


@router.post(
    "/v1/collections/{name}/search",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=image_body(SearchRequest),
)
async def search(
    name: Name,
    request: Request,
    resources: AppResources,
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

    The answer has at most `top` items (default 10) that match `filter` and whose similarity is at
    least `threshold`. Options may be in the query string or in a JSON body. `without` moves the
    queries away from the mean of stored items. `exact` compares with all items instead of using the
    index; the answer states whether it did, and how many items match the filter.
    `metadata=false` sends null instead of the matches' metadata. An answer of more than
    `max_answer_bytes` is refused before it is built.
    """
    collection = await require_collection(name, request, resources)
    content, options = await _read_options(
        request,
        resources,
        top=top,
        filter=_parse_json(filter, "filter"),
        threshold=threshold,
        exact=exact,
        metadata=metadata,
        without=_parse_json(without, "without"),
    )
    queries = await _read_queries(request, content, resources, collection)
    embeddings = queries.embeddings
    if options.without is not None:
        unwanted = await _load_embeddings(options.without.ids, request, resources, collection)
        embeddings = move_away(embeddings, unwanted, options.without.weight)
    find = partial(
        collection.search,
        embeddings,
        options.top,
        filter=options.filter,
        threshold=options.threshold,
        exact=options.exact,
    )
    with resources.metrics.searching(), time_stage("search"):
        answer = await within_deadline(
            asyncio.get_running_loop().run_in_executor(resources.compute, find),
            request.state.deadline,
        )
    resources.metrics.count_search(answer.by)
    num_bytes = _estimate_bytes(answer, metadata=options.metadata)
    check_answer_bytes(
        num_bytes,
        resources.settings.limits,
        remedy="give a smaller `top`, or metadata=false",
    )
    return list_answer(
        {
            **provenance(resources),
            "collection": name,
            "exact": answer.exact,
            "matching": answer.matching,
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        },
        [
            partial(_build_result, collection, index, matches, metadata=options.metadata)
            for index, matches in zip(queries.rows, answer.matches, strict=True)
        ],
        headers(resources, queries.encoded),
        resources,
        num_items=sum(map(len, answer.matches)),
        num_bytes=num_bytes,
        # A folder's metadata are in memory in any case; other stores send a copy.
        held_bytes=0 if collection.promises.store == "folder" else num_bytes,
    )


async def _read_options(
    request: Request, resources: Resources, **query: object
) -> tuple[dict[str, Any] | None, SearchOptions]:
    """Returns the queries of a JSON body, None for a body of images, and the options.

    Raises BadRequest, also for an option that is both in the query string and in the body.
    """
    options, content = drop_nulls(query), None
    if media_type(request) == "application/json":
        content = drop_nulls(await read_json(request, resources))
        if repeated := options.keys() & content.keys():
            raise BadRequest(
                f"{min(repeated)} must be in the query string or in the body, got both",
                param=min(repeated),
            )
        options |= {name: content.pop(name) for name in _OPTIONS if name in content}
        check_names(content, (*_OPTIONS, *KINDS, *_IDS), request)
    valid_options = validate(SearchOptions, options)
    check_filter(valid_options.filter)
    check_top(valid_options.top, resources)
    return content, valid_options


async def _read_queries(
    request: Request,
    content: dict[str, Any] | None,
    resources: Resources,
    collection: CollectionPort,
) -> Queries:
    """Returns the queries of `content` or, if it is None, of a body of images.

    Raises BadRequest, and NotFound for an id that is not stored.
    """
    if content is None:
        return await read_queries(request, resources)
    if not content.keys() & {*_IDS}:
        return await queries_from_json(request, content, resources)
    if len(content) > 1:
        raise BadRequest(
            "the body must have exactly one of `images`, `texts`, `embeddings`, `id` and `ids`"
        )
    ids = content.get("ids", [content.get("id")])
    if not isinstance(ids, list) or not ids or not all(isinstance(item_id, str) for item_id in ids):
        raise BadRequest(
            "`id` must be a string, `ids` a list of strings", param=next(iter(content))
        )
    check_count(len(ids), resources.settings.limits)
    await resources.rate_limiter.take(request.state.key, len(ids))
    return Queries.from_embeddings(await _load_embeddings(ids, request, resources, collection))


def _estimate_bytes(answer: SearchAnswer, *, metadata: bool) -> int:
    """Returns the approximate size of the matches in an answer."""
    return sum(
        _MATCH_BYTES + len(match.id) + metadata * len(match.metadata_json)
        for matches in answer.matches
        for match in matches
    )


def _build_result(
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


def _parse_json(text: str | None, name: str) -> object:
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{name} must be JSON, not nested too deeply", param=name) from error


async def _load_embeddings(
    ids: list[str], request: Request, resources: Resources, collection: CollectionPort
) -> Embeddings:
    """Returns the embeddings of stored items, [n, D]. Raises NotFound for an unknown id."""

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
    body: Annotated[DuplicatesRequest, Body(default_factory=DuplicatesRequest)],
    request: Request,
    resources: AppResources,
) -> Response:
    """Finds groups of items whose pictures are copies, or have at least this `similarity`.

    Pairs that share an item are joined to one group. The search must finish within the request's
    deadline; `mlcd curate` and `mlcd index --duplicates` have none. One search runs at a time and
    one waits; any other is answered 429. The latest results are cached.
    """
    collection = await require_collection(name, request, resources)
    key, deadline = request.state.key, request.state.deadline
    owner = None if key is None else key.id
    try:
        with time_stage("compare"):
            groups = await resources.duplicates.find(
                collection, body.similarity, owner=owner, deadline=deadline
            )
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            "the search took longer than a request may", remedy=_REMEDY
        ) from error
    measuring = asyncio.get_running_loop().run_in_executor(
        resources.compute, partial(_estimate_group_bytes, collection, groups)
    )
    num_bytes = await within_deadline(measuring, deadline)
    check_answer_bytes(
        num_bytes, resources.settings.limits, remedy=f"give a higher `similarity`, or {_REMEDY}"
    )
    return stream_json_response(
        {
            "collection": name,
            "similarity": body.similarity,
            "groups": (_describe_group(collection, group, groups.ids) for group in groups.groups),
            "nearest": groups.nearest and _describe_group(collection, groups.nearest, groups.ids),
        },
        headers(resources),
        resources,
        num_items=sum(len(group.rows) for group in groups.groups),
        num_bytes=num_bytes,
    )


def _estimate_group_bytes(collection: CollectionPort, groups: FoundGroups) -> int:
    """Returns the approximate size of the groups in an answer."""
    state = collection.state
    return sum(
        _MATCH_BYTES
        + len(groups.ids[row])
        + (0 if (at := state.find(groups.ids[row])) is None else len(state.metadata[at]))
        for group in groups.groups
        for row in group.rows.tolist()
    )


def _describe_group(collection: CollectionPort, group: Group, ids: list[str]) -> dict[str, Any]:
    """Returns a group with the current metadata of its items; None for items deleted meanwhile."""
    record, state = group.record(ids), collection.state
    positions = map(state.find, record["ids"])
    return {
        **{field: iter(values) for field, values in record.items()},
        "metadata": (
            None if position is None else orjson.Fragment(state.metadata[position])
            for position in positions
        ),
        "thumbnails": iter(collection.thumbnail_versions(record["ids"])),
    }
