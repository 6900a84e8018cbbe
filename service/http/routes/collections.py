"""Collections of images: made, listed, described, deleted."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response

from mlcd.collections.collection import Collection
from mlcd.errors import InvalidInput
from service.http.access import Opened
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import read_optional_json, validated
from service.http.dialects.own.wire import CollectionList, CreateRequest, DeletedCollection, DescribedCollection
from service.http.openapi import json_body
from service.http.problems import misnamed
from service.http.queries import given_fields
from service.http.routes.arrivals import open_all_arrived, open_arrived, opened_collection
from service.http.routes.changes import change
from service.resources import Resources

router = APIRouter(tags=["collections"])


def _named(
    request: Request,
    name: Annotated[
        str,
        Path(
            description="letters, digits, . _ -",
            json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
        ),
    ],
) -> str:
    """The name in the path, and not what is before a slash in it: a%2Fitems%2Fb is no item of a."""
    if (wrong := misnamed(request)) is not None:
        raise wrong
    return name


Name = Annotated[str, Depends(_named)]
_LIST: Final[dict[int | str, dict[str, Any]]] = {200: {"model": CollectionList}, 504: {}}
_ONE: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": DescribedCollection},
    **{status: {} for status in (404, 409, 422, 504)},
}
_MADE: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": DescribedCollection},
    201: {"model": DescribedCollection, "description": "made now"},
    404: {},
    409: {},
}
_DELETED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": DeletedCollection},
    **{status: {} for status in (404, 409, 422, 503, 504)},
}


@router.get("/v1/collections", dependencies=[needs("search")], response_class=Response, responses=_LIST)
async def list_collections(request: Request, resources: Opened) -> Response:
    """All there are: those that are not `usable` hold embeddings of another model than is served."""
    store = resources.model.space.store
    if store is not None:
        await open_all_arrived(store, request, resources)
    every = {} if store is None else store.all()
    return json_answer({"collections": [_describe(name, one, resources) for name, one in every.items()]})


@router.put(
    "/v1/collections/{name}",
    dependencies=[needs("write")],
    response_class=Response,
    responses=_MADE,
    openapi_extra={"requestBody": {**json_body(CreateRequest)["requestBody"], "required": False}},
)
async def create_collection(name: Name, request: Request, resources: Opened) -> Response:
    """An empty collection for the served model's embeddings; one that is there for the same stays as it is."""
    content = await read_optional_json(request, resources)
    asked, dimension = validated(CreateRequest, given_fields(content)), resources.encoder.dimension
    if asked.dimension not in (None, dimension):
        raise InvalidInput(
            f"the served model gives {dimension} numbers, not {asked.dimension}", remedy="leave `dimension` out"
        )
    store, fingerprint = resources.model.space.opened_store(), resources.encoder.fingerprint
    collection, made = await change(
        request,
        resources,
        lambda: store.create(name, fingerprint=fingerprint, dimension=dimension, recall=asked.recall),
    )
    return json_answer(_describe(name, collection, resources), headers(resources), status=201 if made else 200)


@router.get("/v1/collections/{name}", dependencies=[needs("search")], response_class=Response, responses=_ONE)
async def describe_collection(name: Name, request: Request, resources: Opened) -> Response:
    """Its size, and its index: how it was tuned, and how much of the truth it finds."""
    collection = await opened_collection(name, request, resources)
    return json_answer(_describe(name, collection, resources), headers(resources))


@router.delete("/v1/collections/{name}", dependencies=[needs("write")], response_class=Response, responses=_DELETED)
async def delete_collection(name: Name, request: Request, resources: Opened) -> Response:
    """With all its items, for good; of another model's embeddings, too."""
    store = resources.model.space.opened_store()
    await open_arrived(name, request, resources)
    await change(request, resources, lambda: store.delete(name))
    return json_answer({"collection": name, "outcome": "deleted"})


def _describe(name: str, collection: Collection, resources: Resources) -> dict[str, Any]:
    described = collection.describe()
    return {
        "name": name,
        "items": described.items,
        "dimension": described.dimension,
        "fingerprint": described.fingerprint,
        "usable": described.fingerprint == resources.encoder.fingerprint,
        "writable": described.writable,
        "fields": described.fields,
        "index": {
            "kind": described.kind,
            "generation": described.generation,
            "indexed": described.indexed,
            "unindexed": described.unindexed,
            "effort": described.effort,
            "target": described.recall_target,
            "recall": described.recall,
            "damaged": described.index_damaged,
            "error": None if described.indexing_error is None else "it could not be made; the log says why",
        },
    }
