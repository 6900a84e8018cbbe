"""OpenAI's wire models, with what NIM, Infinity, vLLM and Jina add to them.

Of answers these are the documentation: vectors go out without passing through them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.http.dialects.example import EXAMPLE_IMAGE
from service.http.dialects.schema import exactly_one

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class EmbeddingsRequest(BaseModel):
    """Images in one of four ways; give `input` or `messages`.

    `input`: a data-URI or URL, a list of them, or a list of objects with `image` (base64, a data-URI or URL),
    `image_url`, `url` or `bytes` (base64). `messages`: one message with one `image_url`; one embedding comes back.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"model": "mlcd-vit", "input": [EXAMPLE_IMAGE], "encoding_format": "float"},
                {"model": "mlcd-vit", "input": [{"image": EXAMPLE_IMAGE}], "dimensions": 8},
                {
                    "model": "mlcd-vit",
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": EXAMPLE_IMAGE}}]}
                    ],
                },
            ],
            **exactly_one(input=("string", "array"), messages="array"),
        },
    )

    model: str
    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    modality: Literal["image"] | Annotated[list[Literal["image"]], Field(max_length=1024)] | None = None
    """Infinity, NIM: this model embeds images only."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: the row as little-endian float32. openai-python asks for it by itself and decodes it."""
    embedding_type: EmbeddingType | None = None
    """Jina; goes before `encoding_format`. binary: 8 components in an int8, ubinary: in a uint8, bit = value >= 0."""
    encoding_type: EmbeddingType | None = None
    """The former name of `embedding_type`."""
    dimensions: Annotated[int, Field(ge=1, strict=True)] | None = None
    """So many first components, normalized again."""
    normalized: Literal[True] | None = None
    """Jina: rows have unit length here, always."""
    user: str | None = None
    """OpenAI: who asks; not used."""
    task: str | None = None
    """Jina: about texts; images are embedded in one way."""
    input_type: str | None = None
    """NIM: about texts, as `task`."""
    truncate: str | None = None
    """NIM: about texts."""


class Embedding(BaseModel):
    """One row: floats, base64 text or packed words, as asked."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(BaseModel):
    """Images have no tokens; clients require the fields."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One embedding per image, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """The one model that is served."""

    object: Literal["list"]
    data: list[Model]


class OpenAIErrorBody(BaseModel):
    """code: the stable name of docs/reference/rest.md."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's shape of a refusal."""

    error: OpenAIErrorBody
