"""Cohere's embed route."""

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.errors import ImageRejected
from mlcd.types import Embeddings
from service.errors import BadRequest
from service.fetch.urls import GivenImage
from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import check_count, read_json, validated
from service.http.data_uris import image_from_uri
from service.http.dialects.cohere_wire import CohereType, EmbedRequest, EmbedResponse
from service.http.dialects.quantization import as_base64, as_binary, as_int8, as_ubinary, as_uint8
from service.http.encoding import encode_strictly, shortened
from service.http.openapi import json_body
from service.settings import Limits

router = APIRouter(tags=["cohere"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": EmbedResponse}, 404: {}}


@router.post(
    "/v2/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=json_body(EmbedRequest),
)
async def embed(request: Request, resources: Opened) -> Response:
    """Embed images in Cohere's shapes; one bad image refuses the request, naming its index."""
    body = validated(EmbedRequest, await read_json(request, resources))
    check_model(body.model, resources)
    loop = asyncio.get_running_loop()
    images = await loop.run_in_executor(resources.compute, _images, body, resources.settings.limits)
    encoded = await encode_strictly(request, resources, images)
    rows = shortened(encoded.embeddings, body.output_dimension, param="output_dimension")
    return json_answer(
        {
            "id": request.state.request_id,
            "embeddings": {kind: _as_type(rows, kind) for kind in body.embedding_types},
            "texts": [],
            "images": [],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"images": len(images)}},
        },
        headers(resources, encoded),
    )


def _images(body: EmbedRequest, limits: Limits) -> list[GivenImage]:
    if body.texts:
        raise BadRequest("this model embeds images, not texts", remedy="send `images` or `inputs`", param="texts")
    if bool(body.images) == bool(body.inputs):
        raise BadRequest("give either `images` or `inputs`", param="images")
    items = body.images or body.inputs or []
    check_count(len(items), limits)
    return [image_from_uri(item) if body.images else _of_input(item) for item in items]


def _of_input(item: Any) -> GivenImage:
    """One entry of `inputs`; Cohere fuses several parts into one embedding, which an image model cannot."""
    content = item.get("content") if isinstance(item, dict) else None
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    address = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    if not isinstance(address, dict):
        return ImageRejected("unreadable", "an input must have one content part, of type image_url")
    return image_from_uri(address.get("url"))


def _as_type(rows: Embeddings, kind: CohereType) -> Any:
    match kind:
        case "float":
            return rows
        case "base64":
            return as_base64(rows)
        case "int8":
            return as_int8(rows)
        case "uint8":
            return as_uint8(rows)
        case "binary":
            return as_binary(rows, param="embedding_types")
        case "ubinary":
            return as_ubinary(rows, param="embedding_types")
