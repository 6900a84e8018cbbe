"""The dialect of Cohere, with its route `POST /v2/embed`."""

import asyncio
from typing import Annotated, Any, Final, Literal, TypeAlias

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.responses import Response

from mlcd.errors import ImageRejected
from mlcd.types import Embeddings
from mlcd.wire import EXAMPLE_IMAGE, exactly_one
from service.errors import BadRequest
from service.fetch.urls import GivenImage
from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import check_count
from service.http.data_uris import image_from_uri
from service.http.dialect import WITHOUT_CLASS, Dialect, Refusal
from service.http.dialects.quantization import as_base64, as_binary, as_int8, as_ubinary, as_uint8
from service.http.encoding import encode_strictly, shortened
from service.http.json_route import JsonRoute
from service.settings import Limits

Floats: TypeAlias = list[list[float]]
Integers: TypeAlias = list[list[int]]
CohereType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbedRequest(BaseModel):
    """A request with images as data-URIs or URLs: `images`, or `inputs` with one `image_url` each.

    `texts` are refused.
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
                }
            ],
            **exactly_one(images="array", inputs="array"),
        },
    )

    model: str
    input_type: (
        Literal["image", "search_document", "search_query", "classification", "clustering"] | None
    ) = None  # about texts; images are embedded in one way
    images: list[Any] | None = None
    inputs: list[Any] | None = None
    texts: list[Any] | None = None
    embedding_types: Annotated[list[CohereType], Field(min_length=1, max_length=64)] = ["float"]
    # The number of first components to return, normalized again.
    output_dimension: Annotated[int, Field(ge=1, strict=True)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None  # about texts
    max_tokens: StrictInt | None = None  # about texts
    priority: StrictInt | None = None  # not used: requests are served in the order of their arrival


class EmbedTypes(BaseModel):
    """The embeddings in each type that was asked for, one row per image.

    int8: 127 times the row over its largest component, rounded; uint8: that plus 128.
    binary, ubinary: 8 components in one byte, most significant bit first, bit = value >= 0; binary
    is that byte less 128. base64: little-endian float32.
    """

    float: Floats | None = None
    base64: list[str] | None = None
    int8: Integers | None = None
    uint8: Integers | None = None
    binary: Integers | None = None
    ubinary: Integers | None = None


class ApiVersion(BaseModel):
    """The version of Cohere's interface."""

    version: Literal["2"]


class BilledUnits(BaseModel):
    """The number of images; nobody is billed, but clients show it."""

    images: int


class Meta(BaseModel):
    """The fields that clients read besides the embeddings."""

    api_version: ApiVersion
    billed_units: BilledUnits


class EmbedResponse(BaseModel):
    """The answer with embeddings. id: that of the request."""

    id: str
    embeddings: EmbedTypes
    texts: list[str]
    images: list[dict[str, Any]]
    meta: Meta


class CohereError(BaseModel):
    """A refusal in Cohere's format. id: that of the request."""

    id: str
    message: str


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {"id": refusal.request_id, "message": refusal.detail}


DIALECT: Final = Dialect(("/v2/embed",), "application/json", CohereError, _refusal, WITHOUT_CLASS)
router = APIRouter(tags=["cohere"], route_class=JsonRoute)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": EmbedResponse}, 404: {}}


@router.post(
    "/v2/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
async def embed(body: EmbedRequest, request: Request, resources: Opened) -> Response:
    """Embeds images in Cohere's format; one bad image refuses the request, naming its index."""
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
        raise BadRequest(
            "this model embeds images, not texts", remedy="send `images` or `inputs`", param="texts"
        )
    if bool(body.images) == bool(body.inputs):
        raise BadRequest("give either `images` or `inputs`", param="images")
    items = body.images or body.inputs or []
    check_count(len(items), limits)
    return [image_from_uri(item) if body.images else _of_input(item) for item in items]


def _of_input(item: Any) -> GivenImage:
    """Reads one entry of `inputs`, which must have one part.

    Cohere fuses several parts into one embedding, which an image model cannot do.
    """
    content = item.get("content") if isinstance(item, dict) else None
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    address = (
        part.get("image_url")
        if isinstance(part, dict) and part.get("type") == "image_url"
        else None
    )
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
