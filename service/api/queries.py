"""Unit embeddings to look up: encoded from images, or sent as they are."""

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from mlcd.errors import ImageRejected
from mlcd.types import Embeddings
from service.api.bodies import (
    check_count,
    embeddings_from_json,
    image_from_uri,
    media_type,
    read_images,
    read_json,
)
from service.middleware import within_deadline
from service.problems import BadRequest
from service.resources import Resources

JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "images": {"type": "array", "items": {"type": "string"}, "description": "data-URIs"},
        "embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    },
}


@dataclass(frozen=True)
class Queries:
    """embeddings: [M, D] unit rows; rows: their indexes in the request; errors: of the other indexes."""

    embeddings: Embeddings
    rows: list[int]
    errors: dict[int, ImageRejected]


async def read_queries(request: Request, resources: Resources) -> Queries:
    """From a multipart form, a raw image, or JSON with `images` or `embeddings`."""
    if media_type(request) == "application/json":
        return await queries_from_json(await read_json(request, resources.compute), resources)
    with resources.batcher.announced():
        images = await read_images(request, resources.settings.limits)
    return await encode_queries(images, resources)


async def queries_from_json(content: dict[str, Any], resources: Resources) -> Queries:
    limits = resources.settings.limits
    if ("images" in content) == ("embeddings" in content):
        raise BadRequest("give either `images` or `embeddings`")
    if "embeddings" in content:
        rows = embeddings_from_json(content["embeddings"], resources.encoder.dimension, limits)
        return Queries(rows, list(range(len(rows))), {})
    images = content["images"]
    if not isinstance(images, list) or not images:
        raise BadRequest("images must be a list of data-URIs", param="images")
    check_count(len(images), limits)
    loop = asyncio.get_running_loop()
    decoded = await loop.run_in_executor(resources.compute, lambda: [image_from_uri(image) for image in images])
    return await encode_queries(decoded, resources)


async def encode_queries(images: list[bytes | ImageRejected], resources: Resources) -> Queries:
    encoded = await within_deadline(resources.pipeline.encode(images), resources.settings.limits.deadline_s)
    return Queries(encoded.embeddings, encoded.rows, encoded.errors)
