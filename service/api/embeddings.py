"""OpenAI's embeddings route, with images as data-URIs."""

import asyncio
import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from mlcd.errors import ImageRejected, NotFound
from mlcd.types import Embeddings, unit_rows
from service.api.access import Opened
from service.api.answers import json_answer
from service.api.bodies import check_count, image_from_uri, read_json
from service.middleware import within_deadline
from service.problems import BadRequest, StrictBatch

router = APIRouter(tags=["openai"])


class EmbeddingsRequest(BaseModel):
    """`input`: one data-URI or a list of them."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[Any]
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


_OPENAPI = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": EmbeddingsRequest.model_json_schema()}},
    }
}


@router.post("/v1/embeddings", response_class=Response, openapi_extra=_OPENAPI)
@router.post("/embeddings", response_class=Response, include_in_schema=False)
async def create_embeddings(request: Request, resources: Opened) -> Response:
    """Embed images in OpenAI's request and answer shapes; one bad image refuses the request, naming its index."""
    body = _parse(await read_json(request, resources.compute))
    if body.model != resources.encoder.name:
        raise NotFound(f"there is no model {body.model[:100]!r}", remedy=f"use {resources.encoder.name}")
    if body.dimensions is not None and body.dimensions > resources.encoder.dimension:
        raise BadRequest(f"dimensions is at most {resources.encoder.dimension}", param="dimensions")
    limits = resources.settings.limits
    items = [body.input] if isinstance(body.input, str) else body.input
    check_count(len(items), limits)
    loop = asyncio.get_running_loop()
    images = await loop.run_in_executor(resources.compute, _images, items)
    for index, image in enumerate(images):
        if isinstance(image, ImageRejected):
            raise StrictBatch(index, image)
    encoded = await within_deadline(resources.pipeline.encode(images), limits.deadline_s)
    if encoded.errors:
        raise StrictBatch(*next(iter(encoded.errors.items())))
    rows = encoded.embeddings
    if body.dimensions is not None:
        rows = unit_rows(rows[:, : body.dimensions])
    data = [
        {"object": "embedding", "index": index, "embedding": row}
        for index, row in enumerate(_encode(rows, body.encoding_format))
    ]
    # Images have no tokens; clients require the field.
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return json_answer({"object": "list", "data": data, "model": resources.encoder.name, "usage": usage})


def _parse(content: dict[str, Any]) -> EmbeddingsRequest:
    try:
        return EmbeddingsRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise BadRequest(f"{name}: {first['msg'].lower()}", param=name) from error


def _images(items: list[Any]) -> list[bytes | ImageRejected]:
    if not items:
        raise BadRequest("input is empty", param="input")
    if any(isinstance(item, int | list) for item in items):
        raise BadRequest(
            "this model embeds images, not tokens",
            remedy="send data-URIs; in LangChain set check_embedding_ctx_length=False",
            param="input",
        )
    return [image_from_uri(item) for item in items]


def _encode(rows: Embeddings, encoding_format: str | None) -> list[Any]:
    if encoding_format != "base64":
        return list(rows)
    return [base64.b64encode(np.ascontiguousarray(row, dtype="<f4").tobytes()).decode() for row in rows]
