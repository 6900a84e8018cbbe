"""Search in collections of indexed images."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from mlcd.collections.snapshot import Snapshot
from mlcd.errors import NotFound
from service.api.access import Opened
from service.api.answers import json_answer, provenance
from service.api.bodies import media_type, openapi_body, read_json
from service.api.queries import JSON_SCHEMA, Queries, queries_from_json, read_queries
from service.problems import BadRequest, TooLarge, item_error
from service.resources import Resources

router = APIRouter(tags=["collections"])

_SEARCH_SCHEMA = {
    **JSON_SCHEMA,
    "properties": {
        **JSON_SCHEMA["properties"],
        "id": {"type": "string", "description": "the key of an indexed item"},
    },
}


@router.get("/v1/collections")
async def list_collections(resources: Opened) -> dict[str, Any]:
    return {"collections": [_describe(name, snapshot) for name, snapshot in resources.collections.items()]}


@router.get("/v1/collections/{name}")
async def describe_collection(name: str, resources: Opened) -> dict[str, Any]:
    return _describe(name, _opened(name, resources))


@router.post("/v1/collections/{name}/search", response_class=Response, openapi_extra=openapi_body(_SEARCH_SCHEMA))
async def search(name: str, request: Request, resources: Opened, top: Annotated[int, Query(ge=1)] = 10) -> Response:
    """The items most similar to each image, embedding, or indexed item (JSON `id`)."""
    snapshot = _opened(name, resources)
    if top > resources.settings.limits.max_top:
        raise TooLarge(f"top={top} is more than {resources.settings.limits.max_top}", limit="max_top")
    queries = await _read_queries(request, resources, snapshot)
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(resources.compute, snapshot.search, queries.embeddings, top)
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
        }
    )


async def _read_queries(request: Request, resources: Resources, snapshot: Snapshot) -> Queries:
    if media_type(request) != "application/json":
        return await read_queries(request, resources)
    content = await read_json(request, resources.compute)
    if "id" not in content:
        return await queries_from_json(content, resources)
    if "images" in content or "embeddings" in content or not isinstance(content["id"], str):
        raise BadRequest("give one of `images`, `embeddings` and `id` (a string)")
    return Queries(snapshot.embedding_of(content["id"]), [0], {})


def _opened(name: str, resources: Resources) -> Snapshot:
    if name not in resources.collections:
        raise NotFound(f"there is no collection {name[:100]!r}", remedy="GET /v1/collections lists them")
    return resources.collections[name]


def _describe(name: str, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "name": name,
        "items": snapshot.index.num_rows,
        "dimension": snapshot.index.dimension,
        "index": snapshot.artifact.summary["kind"],
        "fingerprint": snapshot.fingerprint,
    }
