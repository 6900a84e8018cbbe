"""OpenAI's embeddings route, with images as data-URIs."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from mlcd.errors import ImageRejected, NotFound
from mlcd.types import Embeddings, unit_rows
from service.api.access import Opened
from service.api.answers import json_answer
from service.api.bodies import check_count, image_from_uri
from service.middleware import within_deadline
from service.problems import BadRequest, StrictBatch

router = APIRouter(tags=["openai"])


class EmbeddingsRequest(BaseModel):
    """`input`: one data-URI or a list of them."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[Any]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


@router.post("/v1/embeddings", response_class=Response)
@router.post("/embeddings", response_class=Response, include_in_schema=False)
async def create_embeddings(body: EmbeddingsRequest, resources: Opened) -> Response:
    """Embed images in OpenAI's request and answer shapes; one bad image refuses the request, naming its index."""
    if body.model != resources.encoder.name:
        raise NotFound(f"there is no model {body.model[:100]!r}", remedy=f"use {resources.encoder.name}")
    if body.dimensions is not None and body.dimensions > resources.encoder.dimension:
        raise BadRequest(f"dimensions is at most {resources.encoder.dimension}", param="dimensions")
    limits = resources.settings.limits
    images = _images(body.input)
    check_count(len(images), limits)
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


def _images(value: str | list[Any]) -> list[bytes | ImageRejected]:
    items = [value] if isinstance(value, str) else value
    if not items:
        raise BadRequest("input is empty", param="input")
    if any(isinstance(item, int | list) for item in items):
        raise BadRequest(
            "this model embeds images, not tokens",
            remedy="send data-URIs; in LangChain set check_embedding_ctx_length=False",
            param="input",
        )
    return [image_from_uri(item) for item in items]


def _encode(rows: Embeddings, encoding_format: str) -> list[Any]:
    if encoding_format == "float":
        return list(rows)
    return [base64.b64encode(np.ascontiguousarray(row, dtype="<f4").tobytes()).decode() for row in rows]
