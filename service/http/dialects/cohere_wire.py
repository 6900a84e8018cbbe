"""Cohere's wire models of `POST /v2/embed`."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from service.http.dialects.example import EXAMPLE_IMAGE
from service.http.dialects.schema import exactly_one

Floats: TypeAlias = list[list[float]]
Integers: TypeAlias = list[list[int]]
CohereType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbedRequest(BaseModel):
    """Images as data-URIs or URLs: `images`, or `inputs` with one `image_url` each. `texts` are refused."""

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
    input_type: Literal["image", "search_document", "search_query", "classification", "clustering"] | None = None
    """About texts; images are embedded in one way."""
    images: list[Any] | None = None
    inputs: list[Any] | None = None
    texts: list[Any] | None = None
    embedding_types: Annotated[list[CohereType], Field(min_length=1, max_length=64)] = ["float"]
    output_dimension: Annotated[int, Field(ge=1, strict=True)] | None = None
    """So many first components, normalized again."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """About texts."""
    max_tokens: int | None = None
    """About texts."""
    priority: int | None = None
    """Not used: requests are served in the order of their arrival."""


class EmbedTypes(BaseModel):
    """Of each type that was asked for, one row per image.

    int8: 127 times the row over its largest component, rounded; uint8: that and 128. binary, ubinary: 8 components in
    one byte, most significant bit first, bit = value >= 0; binary is that byte less 128. base64: little-endian float32.
    """

    float: Floats | None = None
    base64: list[str] | None = None
    int8: Integers | None = None
    uint8: Integers | None = None
    binary: Integers | None = None
    ubinary: Integers | None = None


class ApiVersion(BaseModel):
    """Of Cohere's interface."""

    version: Literal["2"]


class BilledUnits(BaseModel):
    """Nobody is billed; clients show it."""

    images: int


class Meta(BaseModel):
    """What clients read beside the embeddings."""

    api_version: ApiVersion
    billed_units: BilledUnits


class EmbedResponse(BaseModel):
    """id: of the request."""

    id: str
    embeddings: EmbedTypes
    texts: list[str]
    images: list[dict[str, Any]]
    meta: Meta


class CohereError(BaseModel):
    """Cohere's shape of a refusal. id: of the request."""

    id: str
    message: str
