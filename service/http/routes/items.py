"""The routes that add, read, update and delete the items of a collection."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from mlcd.collections.item import Item, check_new_id, encode_metadata, unit_embedding
from mlcd.collections.port import CollectionPort
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.thumbnail import Thumbnail
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest
from mlcd.service.fetch.image_url import RequestImage
from mlcd.service.http.access import AppResources
from mlcd.service.http.answers import compute_answer, headers, json_answer, provenance
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import check_count, media_type, parse_json, read_form, read_json
from mlcd.service.http.data_uris import image_from_uri
from mlcd.service.http.encoding import encode
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.new_thumbnails import thumbnails_of
from mlcd.service.http.openapi import BINARY, json_body
from mlcd.service.http.problems import item_error
from mlcd.service.http.queries import check_names, drop_nulls
from mlcd.service.http.routes.collections import Name, apply_change, require_collection
from mlcd.service.http.unknown_names import unknown_name
from mlcd.service.inference.outcomes import Encoded
from mlcd.service.resources import Resources
from mlcd.types import Embeddings
from mlcd.wire.stored_items import (
    AddedItems,
    AddRequest,
    ChangedItem,
    DeletedItems,
    DeleteRequest,
    DescribedItem,
    MetadataRequest,
)

router = APIRouter(tags=["collections"], route_class=JsonRoute)

ItemId = Annotated[
    str,
    Path(
        description="percent-encoded; a slash needs no encoding, except before `thumbnail`",
        json_schema_extra={"minLength": 1},
    ),
]
_FIELDS: Final = frozenset({"id", "image", "embedding", "metadata"})
_FORM: Final[dict[str, Any]] = {
    "schema": {
        "type": "object",
        "required": ["files", "items"],
        "properties": {
            "files": {"type": "array", "minItems": 1, "items": BINARY["schema"]},
            "items": {
                "type": "string",
                "description": "a JSON list with one entry for each file:"
                ' [{"id": "a.jpg", "metadata": {"album": "sea"}}]',
            },
        },
    }
}
_ADDED: Final[dict[int | str, dict[str, Any]]] = {200: {"model": AddedItems}, 404: {}, 409: {}}
_ITEM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": DescribedItem},
    **{status: {} for status in (404, 409, 422, 504)},
}
_CHANGED: Final[dict[int | str, dict[str, Any]]] = {
    status: {} for status in (404, 409, 422, 503, 504)
}


@dataclass(frozen=True)
class _NewItem:
    """A validated item of a request. source: an image to embed, or a unit embedding [D]."""

    id: str
    metadata: dict[str, Any]
    source: RequestImage | Embeddings


@dataclass(frozen=True)
class _Batch:
    """The items to add, and the errors of invalid items, by index in the request."""

    items: dict[int, _NewItem]
    errors: dict[int, InvalidInput]


@dataclass(frozen=True)
class _Embedded:
    """The embeddings and thumbnails of a batch by index. encoded: None if no image was encoded."""

    rows: dict[int, Embeddings]
    thumbnails: dict[int, Thumbnail]
    encoded: Encoded | None


@router.post(
    "/v1/collections/{name}/items",
    dependencies=[needs("write")],
    response_class=Response,
    responses=_ADDED,
    openapi_extra=json_body(AddRequest, **{"multipart/form-data": _FORM}),
)
async def add_items(name: Name, request: Request, resources: AppResources) -> Response:
    """Adds items, or replaces items with the same ids: `created`, `updated` or `unchanged`.

    The items are durable before the answer. An invalid item is listed in `errors`; the valid items
    are added.
    """
    collection = await require_collection(name, request, resources)
    collection.check_writable()
    batch = await _read_batch(request, resources)
    with_thumbnails = resources.settings.thumbnails.enabled and collection.takes_thumbnails
    embedded = await _embed(request, resources, batch, with_thumbnails=with_thumbnails)
    items = [
        Item(new_item.id, embedded.rows[index], new_item.metadata, embedded.thumbnails.get(index))
        for index, new_item in batch.items.items()
    ]
    outcomes = (
        await apply_change(request, resources, lambda: collection.add(items)) if items else []
    )
    versions = await _thumbnail_versions(
        request, resources, collection, [item.id for item in items]
    )
    added = zip(batch.items, items, outcomes, versions, strict=True)
    return json_answer(
        {
            **provenance(resources),
            "collection": name,
            "thumbnails": collection.describe_thumbnails(),
            "results": [
                {"index": index, "id": item.id, "outcome": outcome, "thumbnail": version}
                for index, item, outcome, version in added
            ],
            "errors": [item_error(index, batch.errors[index]) for index in sorted(batch.errors)],
        },
        headers(resources, embedded.encoded),
    )


@router.get(
    "/v1/collections/{name}/items/{id:path}",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_ITEM,
)
async def get_item(
    name: Name,
    id: ItemId,  # noqa: A002 - as in the path
    request: Request,
    resources: AppResources,
    *,
    embedding: Annotated[bool, Query()] = False,
) -> Response:
    """Returns an item's metadata and, with `embedding`, its unit embedding."""
    collection = await require_collection(name, request, resources)
    item = await within_deadline(
        asyncio.get_running_loop().run_in_executor(resources.compute, collection.get, id),
        request.state.deadline,
    )
    (version,) = await _thumbnail_versions(request, resources, collection, [id])
    return json_answer(
        {
            "collection": name,
            "id": item.id,
            "metadata": item.metadata,
            "embedding": item.embedding if embedding else None,
            "thumbnail": version,
        },
        headers(resources),
    )


@router.patch(
    "/v1/collections/{name}/items/{id:path}",
    dependencies=[needs("write")],
    responses=_CHANGED,
)
async def update_item(
    name: Name,
    id: ItemId,  # noqa: A002 - as in the path
    body: MetadataRequest,
    request: Request,
    resources: AppResources,
) -> ChangedItem:
    """Replaces an item's metadata; its embedding does not change."""
    collection = await require_collection(name, request, resources)
    outcome = await apply_change(
        request, resources, lambda: collection.update_metadata(id, body.metadata)
    )
    return ChangedItem(collection=name, id=id, outcome=outcome)


@router.delete(
    "/v1/collections/{name}/items/{id:path}",
    dependencies=[needs("write")],
    responses=_CHANGED,
)
async def delete_item(
    name: Name,
    id: ItemId,  # noqa: A002 - as in the path
    request: Request,
    resources: AppResources,
) -> ChangedItem:
    """Deletes an item; searches that start after the answer do not find it."""
    collection = await require_collection(name, request, resources)
    await apply_change(request, resources, lambda: collection.delete(id))
    return ChangedItem(collection=name, id=id, outcome="deleted")


@router.post(
    "/v1/collections/{name}/delete",
    dependencies=[needs("write")],
    response_model=DeletedItems,
    responses=_CHANGED,
)
async def delete_items(
    name: Name, body: DeleteRequest, request: Request, resources: AppResources
) -> Response:
    """Deletes items in one transaction; ids that do not exist are `missing`."""
    collection = await require_collection(name, request, resources)
    outcomes = await apply_change(request, resources, lambda: collection.delete_all(body.ids))
    results = [
        {"id": item_id, "outcome": outcome}
        for item_id, outcome in zip(body.ids, outcomes, strict=True)
    ]
    content = {"collection": name, "results": results}
    return await compute_answer(lambda: content, request, resources)


async def _read_batch(request: Request, resources: Resources) -> _Batch:
    loop, limits = asyncio.get_running_loop(), resources.settings.limits
    images: list[bytes] | None = None
    if media_type(request) == "multipart/form-data":
        with resources.dispatcher.expect_item():
            images, texts = await read_form(request, limits, texts=("items",))
        values = await _parse_list(texts.get("items"), resources)
        if len(values) != len(images):
            raise BadRequest(
                f"`items` must have an entry for each of {len(images)} files, got {len(values)}",
                param="items",
            )
    else:
        content = drop_nulls(await read_json(request, resources))
        check_names(content, ("items",), request)
        entries = content.get("items")
        if not isinstance(entries, list) or not entries:
            raise BadRequest(
                "`items` must be a list of items",
                remedy="for example"
                ' {"items": [{"id": "a.jpg", "image": "data:image/jpeg;base64,…"}]}',
                param="items",
            )
        check_count(len(entries), limits)
        values = entries
    return await loop.run_in_executor(
        resources.compute, _check_values, values, images, resources.encoder.dimension
    )


async def _parse_list(text: str | None, resources: Resources) -> list[Any]:
    if text is None:
        raise BadRequest(
            "the form must have a field `items`",
            remedy='send a JSON list, for example [{"id": "a.jpg"}]',
            param="items",
        )
    try:
        values = await parse_json(text.encode(), resources)
    except BadRequest as error:
        raise BadRequest("the field `items` of the form must be JSON", param="items") from error
    if not isinstance(values, list):
        raise BadRequest("the field `items` of the form must be a list", param="items")
    return values


def _check_values(values: list[Any], images: list[bytes] | None, dimension: int) -> _Batch:
    batch = _Batch({}, {})
    ids: set[str] = set()
    for index, value in enumerate(values):
        try:
            new_item = _parse_item(value, None if images is None else images[index], dimension)
        except InvalidInput as error:
            batch.errors[index] = error
            continue
        if new_item.id in ids:
            batch.errors[index] = InvalidInput(
                "an earlier item of this request has the same id", remedy="send each id once"
            )
        else:
            batch.items[index] = new_item
            ids.add(new_item.id)
    return batch


def _parse_item(value: object, image: bytes | None, dimension: int) -> _NewItem:
    if not isinstance(value, dict):
        raise InvalidInput("an item must be a JSON object")
    fields = drop_nulls(value)
    if unknown := fields.keys() - _FIELDS:
        raise InvalidInput(str(unknown_name(unknown, sorted(_FIELDS), where="the item")))
    item_id, metadata = check_new_id(fields.get("id")), fields.get("metadata", {})
    encode_metadata(item_id, metadata)
    if ("image" in fields) + ("embedding" in fields) + (image is not None) != 1:
        raise InvalidInput("the item must have either an image or an embedding")
    if "embedding" in fields:
        return _NewItem(
            item_id, metadata, unit_embedding(item_id, _to_vector(fields["embedding"]), dimension)
        )
    source = image_from_uri(fields["image"]) if image is None else image
    if isinstance(source, ImageRejected):
        raise source
    return _NewItem(item_id, metadata, source)


def _to_vector(value: object) -> Embeddings:
    if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
        raise InvalidInput("the embedding must be a list of numbers")
    return np.asarray(value, dtype=np.float64)


async def _embed(
    request: Request, resources: Resources, batch: _Batch, *, with_thumbnails: bool
) -> _Embedded:
    """Returns the embedding of each item; moves items with unusable images to `batch.errors`.

    with_thumbnails: render thumbnails for items with images.
    """
    embedded: dict[int, Embeddings] = {}
    images: dict[int, RequestImage] = {}
    for index, new_item in batch.items.items():
        if isinstance(new_item.source, np.ndarray):
            embedded[index] = new_item.source
        else:
            images[index] = new_item.source
    if not images:
        await resources.rate_limiter.take(request.state.key, len(embedded))
        return _Embedded(embedded, {}, None)
    indexes, thumbnails = list(images), dict[int, Thumbnail]()

    async def add_thumbnails(
        fetched_images: Sequence[bytes | ImageRejected], encoded: Encoded
    ) -> None:
        usable = {
            indexes[row]: image
            for row in encoded.rows
            if isinstance(image := fetched_images[row], bytes)
        }
        thumbnails.update(await thumbnails_of(request, resources, usable))

    encoded = await encode(
        request,
        resources,
        list(images.values()),
        num_beside=len(embedded),
        after=add_thumbnails if with_thumbnails else None,
    )
    embedded |= {
        indexes[row]: vector for row, vector in zip(encoded.rows, encoded.embeddings, strict=True)
    }
    for row, rejection in encoded.errors.items():
        batch.errors[indexes[row]] = rejection
        del batch.items[indexes[row]]
    return _Embedded(embedded, thumbnails, encoded)


async def _thumbnail_versions(
    request: Request, resources: Resources, collection: CollectionPort, ids: list[str]
) -> list[str | None]:
    """Returns the version of each item's thumbnail, None for items without one."""
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(
            resources.compute, collection.thumbnail_versions, ids
        ),
        request.state.deadline,
    )
