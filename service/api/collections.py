"""Search in collections of indexed images."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from mlcd.collections.snapshot import Snapshot
from service.api.access import Opened
from service.api.answers import headers, json_answer, provenance
from service.api.bodies import media_type, read_json
from service.api.document import image_body
from service.api.queries import Queries, check_top, given_fields, queries_from_json, read_queries
from service.api.schemas.own import Collection, CollectionList, FoundItems, SearchRequest
from service.middleware import within_deadline
from service.observability.request import timed
from service.problems import BadRequest, item_error
from service.resources import Resources
from service.security.gate import needs

router = APIRouter(tags=["collections"])

_LIST: Final[dict[int | str, dict[str, Any]]] = {200: {"model": CollectionList}}
_ONE: Final[dict[int | str, dict[str, Any]]] = {200: {"model": Collection}, 404: {}, 409: {}}
_FOUND: Final[dict[int | str, dict[str, Any]]] = {200: {"model": FoundItems}, 404: {}, 409: {}}


@router.get("/v1/collections", dependencies=[needs("search")], response_class=Response, responses=_LIST)
async def list_collections(resources: Opened) -> Response:
    """Everything that can be searched."""
    described = [_describe(name, snapshot) for name, snapshot in resources.collections.items()]
    return json_answer({"collections": described}, headers(resources))


@router.get("/v1/collections/{name}", dependencies=[needs("search")], response_class=Response, responses=_ONE)
async def describe_collection(name: str, resources: Opened) -> Response:
    """Its size and index."""
    return json_answer(_describe(name, _opened(name, resources)), headers(resources))


@router.post(
    "/v1/collections/{name}/search",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_FOUND,
    openapi_extra=image_body(SearchRequest),
)
async def search(name: str, request: Request, resources: Opened, top: Annotated[int, Query(ge=1)] = 10) -> Response:
    """The items most similar to each image, embedding, or indexed item (JSON `id`)."""
    snapshot = _opened(name, resources)
    check_top(top, resources)
    queries = await _read_queries(request, resources, snapshot)
    loop = asyncio.get_running_loop()
    with resources.metrics.searching(), timed("search"):
        found = await within_deadline(
            loop.run_in_executor(resources.compute, snapshot.search, queries.embeddings, top), request.state.deadline
        )
    return json_answer(
        {
            **provenance(resources),
            "collection": name,
            "results": [
                {
                    "index": index,
                    "matches": [
                        {"id": match.key, "similarity": match.similarity, "class_name": match.class_name}
                        for match in matches
                    ],
                }
                for index, matches in zip(queries.rows, found, strict=True)
            ],
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        },
        headers(resources, queries.encoded),
    )


async def _read_queries(request: Request, resources: Resources, snapshot: Snapshot) -> Queries:
    if media_type(request) != "application/json":
        return await read_queries(request, resources)
    content = given_fields(await read_json(request, resources.compute))
    if "id" not in content:
        return await queries_from_json(request, content, resources)
    if len(content) > 1 or not isinstance(content["id"], str):
        raise BadRequest("give one of `images`, `embeddings` and `id` (a string)")
    return Queries.given(snapshot.embedding_of(content["id"]))


def _opened(name: str, resources: Resources) -> Snapshot:
    return resources.model.space.opened_collection(name)


def _describe(name: str, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "name": name,
        "items": snapshot.index.num_rows,
        "dimension": snapshot.index.dimension,
        "index": snapshot.artifact.summary["kind"],
        "fingerprint": snapshot.fingerprint,
    }
