"""The dialect of Cohere, with its route `POST /v2/embed`."""

import asyncio
from typing import Annotated, Any, Final, Literal, TypeAlias

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from mlcd.errors import ImageRejected
from mlcd.service.errors import BadRequest
from mlcd.service.http.access import AppResources, use_model
from mlcd.service.http.answers import headers, stream_json_response
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import check_count
from mlcd.service.http.data_uris import image_from_uri
from mlcd.service.http.dialect import STATUSES_WITHOUT_ERROR_CLASS, Dialect, Refusal
from mlcd.service.http.dialects.quantization import (
    as_base64,
    as_binary,
    as_int8,
    as_ubinary,
    as_uint8,
)
from mlcd.service.http.embedding_answers import NUMBER_BYTES
from mlcd.service.http.encoding import shorten
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.text_encoding import (
    RequestItem,
    RequestText,
    check_num_texts,
    encode_items_strictly,
    rejects_long,
)
from mlcd.service.settings import Limits
from mlcd.types import Embeddings
from mlcd.wire.shapes import EXAMPLE_IMAGE, WholeNumber, exactly_one

Floats: TypeAlias = list[list[float]]
Integers: TypeAlias = list[list[int]]
CohereType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbedRequest(BaseModel):
    """A request with `texts`, with `images` as data-URIs or URLs, or with `inputs`.

    An entry of `inputs` has one part, of type `text` or `image_url`. Texts require a model with a
    text tower.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": "mlcd-vit",
                    "input_type": "image",
                    "images": [EXAMPLE_IMAGE],
                    "embedding_types": ["float", "int8"],
                },
                {"model": "clip", "input_type": "search_query", "texts": ["a red car"]},
            ],
            **exactly_one(images="array", texts="array", inputs="array"),
        },
    )

    model: str
    input_type: (
        Literal["image", "search_document", "search_query", "classification", "clustering"] | None
    ) = None  # not used: the embedding does not depend on the use
    images: list[Any] | None = None
    inputs: list[Any] | None = None
    texts: list[Any] | None = None
    embedding_types: Annotated[list[CohereType], Field(min_length=1, max_length=64)] = ["float"]
    # Return only this number of first components, normalized again.
    output_dimension: Annotated[WholeNumber, Field(ge=1)] | None = None
    # With NONE, a text that exceeds the model's context is refused; else it is truncated.
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: WholeNumber | None = None  # not used: the model's context is fixed
    priority: WholeNumber | None = None  # not used: requests are served as they arrive


class EmbedTypes(BaseModel):
    """The embeddings in each requested type, one row per image or text.

    int8: the row divided by its largest absolute component, times 127, rounded; uint8: the same
    plus 128. ubinary: 8 components in one byte, most significant bit first, bit = value >= 0;
    binary: the same minus 128. base64: little-endian float32.
    """

    float: Floats | None = None
    base64: list[str] | None = None
    int8: Integers | None = None
    uint8: Integers | None = None
    binary: Integers | None = None
    ubinary: Integers | None = None


class ApiVersion(BaseModel):
    """The version of Cohere's API."""

    version: Literal["2"]


class BilledUnits(BaseModel):
    """The number of images and of the texts' tokens. Nothing is billed, but clients show it."""

    images: int | None = None
    input_tokens: int | None = None


class Meta(BaseModel):
    """The metadata that Cohere's clients read."""

    api_version: ApiVersion
    billed_units: BilledUnits


class EmbedResponse(BaseModel):
    """The answer with embeddings. id: the request's id."""

    id: str
    embeddings: EmbedTypes
    texts: list[str]
    images: list[dict[str, Any]]
    meta: Meta


class CohereError(BaseModel):
    """A refusal in Cohere's format. id: the request's id."""

    id: str
    message: str


def _render_refusal(refusal: Refusal) -> dict[str, Any]:
    return {"id": refusal.request_id, "message": refusal.detail}


DIALECT: Final = Dialect(
    ("/v2/embed",),
    "application/json",
    CohereError,
    _render_refusal,
    unknown=STATUSES_WITHOUT_ERROR_CLASS,
)
router = APIRouter(tags=["cohere"], route_class=JsonRoute)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": EmbedResponse}, 404: {}}


@router.post(
    "/v2/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
async def embed(body: EmbedRequest, request: Request, resources: AppResources) -> Response:
    """Embeds images and texts in Cohere's format.

    If an image or text is invalid, the whole request is refused, and the error has its index. A
    text sent to a model without a text tower is answered 422.
    """
    resources = await use_model(body.model, request, resources)
    loop = asyncio.get_running_loop()
    items = await loop.run_in_executor(
        resources.compute, _read_items, body, resources.settings.limits
    )
    reject_long = rejects_long(body.truncate)
    encoded_items = await encode_items_strictly(request, resources, items, reject_long=reject_long)
    rows = shorten(
        encoded_items.encoded.embeddings, body.output_dimension, param="output_dimension"
    )
    num_images = sum(not isinstance(item, RequestText) for item in items)
    billed = {"images": num_images, "input_tokens": encoded_items.num_tokens}
    kinds = dict.fromkeys(body.embedding_types)
    return stream_json_response(
        {
            "id": request.state.request_id,
            "embeddings": {kind: iter(_encode_rows(rows, kind)) for kind in kinds},
            "texts": body.texts or [],
            "images": [],
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {name: num for name, num in billed.items() if num},
            },
        },
        headers(resources, encoded_items.encoded),
        resources,
        num_items=len(rows) * len(kinds),
        num_bytes=NUMBER_BYTES * rows.size * len(kinds),
    )


def _read_items(body: EmbedRequest, limits: Limits) -> list[RequestItem]:
    lists = [items for items in (body.images, body.texts, body.inputs) if items]
    if len(lists) != 1:
        raise BadRequest(
            f"exactly one of `images`, `texts` and `inputs` is required, got {len(lists)}",
            param="images",
        )
    if body.texts:
        items: list[RequestItem] = [RequestText(text) for text in body.texts]
    elif body.images:
        items = [image_from_uri(image) for image in body.images]
    else:
        items = [_read_input(item) for item in lists[0]]
    num_texts = sum(isinstance(item, RequestText) for item in items)
    check_num_texts(num_texts, limits)
    check_count(len(items) - num_texts, limits)
    return items


def _read_input(item: Any) -> RequestItem:
    """Reads one entry of `inputs`, which must have one part.

    Cohere fuses several parts into one embedding, which this model cannot do.
    """
    content = item.get("content") if isinstance(item, dict) else None
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    if isinstance(part, dict) and part.get("type") == "text":
        return RequestText(part.get("text"))
    image_url = (
        part.get("image_url")
        if isinstance(part, dict) and part.get("type") == "image_url"
        else None
    )
    if not isinstance(image_url, dict):
        return ImageRejected(
            "unreadable", "an input must have one content part, of type text or image_url"
        )
    return image_from_uri(image_url.get("url"))


def _encode_rows(rows: Embeddings, kind: CohereType) -> Any:
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
