"""OpenAI's embeddings route, with images as NIM, Infinity, vLLM and Jina send them."""

import asyncio
from collections.abc import Iterable
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
from service.http.data_uris import image_from_field, image_from_uri
from service.http.dialects.openai_wire import EmbeddingsRequest, EmbeddingsResponse
from service.http.dialects.quantization import as_base64, as_binary, as_ubinary
from service.http.encoding import encode_strictly, shortened
from service.http.openapi import json_body
from service.settings import Limits

router = APIRouter(tags=["openai"])

# Of an object that stands for an image: Jina's, and those of older LlamaIndex.
_IMAGE_FIELDS: Final = ("image", "image_url", "url", "bytes")
_BODY: Final = json_body(EmbeddingsRequest)
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": EmbeddingsResponse}, 404: {}}


@router.post(
    "/v1/embeddings", dependencies=[needs("embed")], response_class=Response, responses=_ANSWERS, openapi_extra=_BODY
)
@router.post(
    "/embeddings", dependencies=[needs("embed")], response_class=Response, responses=_ANSWERS, openapi_extra=_BODY
)
async def create_embeddings(request: Request, resources: Opened) -> Response:
    """Embed images in OpenAI's shapes; one bad image refuses the request, naming its index."""
    body = validated(EmbeddingsRequest, await read_json(request, resources))
    check_model(body.model, resources)
    loop = asyncio.get_running_loop()
    images, param = await loop.run_in_executor(resources.compute, _images, body, resources.settings.limits)
    encoded = await encode_strictly(request, resources, images, param=param)
    rows = shortened(encoded.embeddings, body.dimensions, param="dimensions")
    data = [
        {"object": "embedding", "index": index, "embedding": row}
        for index, row in enumerate(_in_wire_format(rows, body))
    ]
    # Images have no tokens; clients require the field.
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return json_answer(
        {"object": "list", "data": data, "model": resources.encoder.name, "usage": usage},
        headers(resources, encoded),
    )


def _images(body: EmbeddingsRequest, limits: Limits) -> tuple[list[GivenImage], str]:
    """The images, and how the client names one of them."""
    if (body.input is None) == (body.messages is None):
        raise BadRequest("give either `input` or `messages`", param="input")
    if body.messages is not None:
        return [_of_messages(body.messages)], "messages"
    items = [body.input] if isinstance(body.input, str) else body.input or []
    if not items:
        raise BadRequest("input is empty", param="input")
    if any(isinstance(item, int | list) for item in items):
        raise BadRequest(
            "this model embeds images, not tokens",
            remedy="send data-URIs; in LangChain set check_embedding_ctx_length=False",
            param="input",
        )
    check_count(len(items), limits)
    return [_of_item(item) for item in items], "input[{index}]"


def _of_item(item: Any) -> GivenImage:
    if not isinstance(item, dict):
        return image_from_uri(item)
    given = [field for field in _IMAGE_FIELDS if item.get(field) is not None]
    if len(given) != 1 or len(item) != 1:
        return ImageRejected("unreadable", f"an object needs exactly one of {', '.join(_IMAGE_FIELDS)}")
    value = item[given[0]]
    if given[0] == "image_url":
        return _of_image_url(value)
    return image_from_field(value)


def _of_image_url(value: Any) -> GivenImage:
    """The address itself, or OpenAI's object around it."""
    return image_from_uri(value.get("url") if isinstance(value, dict) else value)


def _of_messages(messages: list[Any]) -> GivenImage:
    """VLLM embeds a whole conversation at once; of an image model's there can be one image and nothing else."""
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    part = parts[0] if len(parts) == 1 else None
    if not isinstance(part, dict) or part.get("type") != "image_url":
        raise BadRequest(
            "messages must hold exactly one image and no text",
            remedy='one message whose content is [{"type": "image_url", "image_url": {"url": "data:…"}}]',
            param="messages",
        )
    return _of_image_url(part.get("image_url"))


def _in_wire_format(rows: Embeddings, body: EmbeddingsRequest) -> Iterable[Any]:
    match body.embedding_type or body.encoding_type or body.encoding_format:
        case "base64":
            return as_base64(rows)
        case "binary":
            return as_binary(rows, param="embedding_type")
        case "ubinary":
            return as_ubinary(rows, param="embedding_type")
        case _:
            return rows
