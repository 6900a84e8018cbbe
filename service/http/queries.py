"""Queries: unit embeddings to look up, encoded from images or texts, or sent by the client."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request

from mlcd.collections.filters import parse_filter
from mlcd.errors import InvalidInput, Rejection
from mlcd.service.errors import BadRequest, InvalidField, TooLarge
from mlcd.service.fetch.image_url import RequestImage
from mlcd.service.http.bodies import (
    check_count,
    embeddings_from_json,
    media_type,
    read_images,
    read_json,
)
from mlcd.service.http.data_uris import image_from_uri
from mlcd.service.http.encoding import encode
from mlcd.service.http.text_encoding import encode_texts
from mlcd.service.http.unknown_names import request_query_names, unknown_name
from mlcd.service.inference.outcomes import Encoded
from mlcd.service.resources import Resources
from mlcd.types import Embeddings

# fields of a query and the type of their entries
KINDS: Final = {"images": "data-URIs or URLs", "texts": "strings", "embeddings": "vectors"}


@dataclass(frozen=True)
class Queries:
    """The embeddings of one request to look up.

    embeddings: unit rows [M, D]. rows: their indexes in the request. errors: by the indexes of
    failed items. encoded: encoded images or texts; None if the client sent embeddings. name: field
    of the request.
    """

    embeddings: Embeddings
    rows: list[int]
    errors: dict[int, Rejection]
    encoded: Encoded | None = None
    name: str = "images"

    @property
    def are_images(self) -> bool:
        return self.encoded is not None and self.name == "images"

    @classmethod
    def from_embeddings(cls, embeddings: Embeddings) -> "Queries":
        return cls(embeddings, list(range(len(embeddings))), {})


async def read_queries(request: Request, resources: Resources) -> Queries:
    """Reads queries from a multipart form, a raw image, or JSON with one of `KINDS`."""
    if media_type(request) == "application/json":
        return await queries_from_json(request, await read_json(request, resources), resources)
    with resources.dispatcher.expect_item():
        images = await read_images(request, resources.settings.limits)
    return await _encode(request, images, resources)


async def queries_from_json(
    request: Request, content: dict[str, Any], resources: Resources
) -> Queries:
    """Reads queries from `content`, whose only field must be in `KINDS`. Raises BadRequest."""
    limits = resources.settings.limits
    content = drop_nulls(content)
    check_names(content, KINDS, request)
    if len(content) != 1:
        raise BadRequest(
            f"exactly one of `images`, `texts` and `embeddings` is required, got {len(content)}"
        )
    ((kind, items),) = content.items()
    if not isinstance(items, list) or not items:
        raise BadRequest(f"{kind} must be a list of {KINDS[kind]}", param=kind)
    loop = asyncio.get_running_loop()
    if "embeddings" in content:
        vectors = content["embeddings"]
        rows = await loop.run_in_executor(
            resources.compute, embeddings_from_json, vectors, resources.encoder.dimension, limits
        )
        await resources.rate_limiter.take(request.state.key, len(rows))
        return Queries.from_embeddings(rows)
    if "texts" in content:
        encoded = (await encode_texts(request, resources, content["texts"])).encoded
        return Queries(encoded.embeddings, encoded.rows, encoded.errors, encoded, "texts")
    images = content["images"]
    check_count(len(images), limits)
    decoded = await loop.run_in_executor(
        resources.compute, lambda: [image_from_uri(image) for image in images]
    )
    return await _encode(request, decoded, resources)


def check_names(content: dict[str, Any], names: Collection[str], request: Request) -> None:
    """Raises BadRequest if a body has a field that is not in `names`."""
    if unknown := content.keys() - {*names}:
        raise unknown_name(unknown, names, where="the body", elsewhere=request_query_names(request))


def drop_nulls(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null: some clients send null to leave a field out."""
    return {name: value for name, value in content.items() if value is not None}


def check_filter(condition: object) -> None:
    """Raises InvalidField, with the fault, for an invalid filter of a search."""
    if condition is None:
        return
    try:
        parse_filter(condition)
    except InvalidInput as error:
        raise InvalidField(error, param="filter") from error


def check_top(top: int, resources: Resources) -> None:
    if top > resources.settings.limits.max_top:
        raise TooLarge(
            f"top must be at most {resources.settings.limits.max_top}, got {top}", limit="max_top"
        )


async def _encode(
    request: Request, images: Sequence[RequestImage], resources: Resources
) -> Queries:
    encoded = await encode(request, resources, images)
    return Queries(encoded.embeddings, encoded.rows, encoded.errors, encoded)
