"""OpenAI's routes for embeddings and models, with the additions of NIM, Infinity, vLLM and Jina.

The pydantic models of answers with vectors only document them: the vectors are written directly.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from mlcd.errors import ImageRejected
from mlcd.service.errors import BadRequest
from mlcd.service.fetch.image_url import RequestImage
from mlcd.service.http.access import AppResources, check_model_name, use_model
from mlcd.service.http.answers import headers, list_answer
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import check_count
from mlcd.service.http.data_uris import image_from_field, image_from_uri, is_image
from mlcd.service.http.dialect import STATUSES_WITHOUT_ERROR_CLASS, Dialect, Refusal
from mlcd.service.http.dialects.quantization import as_base64, as_binary, as_ubinary
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
from mlcd.service.resources import Resources
from mlcd.service.settings import Limits
from mlcd.types import Embeddings
from mlcd.wire.shapes import EXAMPLE_IMAGE, WholeNumber, exactly_one

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
Modality = Literal["image", "text"]


class EmbeddingsRequest(BaseModel):
    """Images and texts, in either `input` or `messages`.

    `input`: a string, a list of strings, or a list of objects with `image` (base64, a data-URI or
    URL), `image_url`, `url`, `bytes` (base64) or `text`. A string that is a data-URI or a URL is an
    image, any other a text, unless `modality` states it; texts require a model with a text tower.
    `messages`: one message with one `image_url` or text; the answer has one embedding.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"model": "mlcd-vit", "input": [EXAMPLE_IMAGE], "encoding_format": "float"},
                {"model": "mlcd-vit", "input": [{"image": EXAMPLE_IMAGE}], "dimensions": 8},
                {"model": "clip", "input": ["a red car", EXAMPLE_IMAGE]},
                {
                    "model": "mlcd-vit",
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "image_url", "image_url": {"url": EXAMPLE_IMAGE}}],
                        }
                    ],
                },
            ],
            **exactly_one(input=("string", "array"), messages="array"),
        },
    )

    model: str
    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    # Infinity, NIM: the kind of the strings in `input`, one for all or one for each.
    modality: Modality | Annotated[list[Modality], Field(max_length=2048)] | None = None
    # With base64, a row is little-endian float32; openai-python requests and decodes it.
    encoding_format: Literal["float", "base64"] | None = None
    # Jina's field, which takes precedence over `encoding_format`. With binary, an int8 packs 8
    # components, with ubinary a uint8; a bit is set if the value is at least 0.
    embedding_type: EmbeddingType | None = None
    encoding_type: EmbeddingType | None = None  # the former name of `embedding_type`
    # Return only this number of first components, normalized again.
    dimensions: Annotated[WholeNumber, Field(ge=1)] | None = None
    normalized: Literal[True] | None = None  # Jina: rows always have unit length here
    user: str | None = None  # OpenAI: the end user; not used
    task: str | None = None  # Jina: not used; the embedding does not depend on it
    input_type: str | None = None  # NIM: not used, like `task`
    # NIM: with NONE, a text that exceeds the model's context is refused; else it is truncated.
    truncate: Literal["NONE", "START", "END"] | None = None


class Embedding(BaseModel):
    """One row: floats, base64 or packed integers, depending on the requested format."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(BaseModel):
    """The number of the texts' tokens, after truncation; images count as 0."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One embedding per image or text, in the order of the request."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model. loaded: whether it is open; others are opened at their first use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool


class ModelList(BaseModel):
    """The models that a request may choose."""

    object: Literal["list"]
    data: list[Model]


class OpenAIErrorBody(BaseModel):
    """The content of a refusal. code: its stable name, listed in docs/reference/rest.md."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """A refusal in OpenAI's format."""

    error: OpenAIErrorBody


_SERVER_FAULT: Final = 500
_TOO_MANY: Final = 429


def _render_refusal(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= _SERVER_FAULT else "invalid_request_error"
    if refusal.status == _TOO_MANY:
        kind = "rate_limit_error"
    return {
        "error": {
            "message": refusal.detail,
            "type": kind,
            "param": refusal.param,
            "code": refusal.name,
        }
    }


DIALECT: Final = Dialect(
    (
        "/embeddings",
        "/v1/embeddings",
        "/v1/models",
        "/v1/files",
        "/v1/uploads",
        "/v1/batches",
        "/v1/webhook_endpoints",
    ),
    "application/json",
    OpenAIError,
    _render_refusal,
    unknown=STATUSES_WITHOUT_ERROR_CLASS,
)
router = APIRouter(tags=["openai"], route_class=JsonRoute)

# Image fields of an object in `input`, as Jina and older versions of LlamaIndex name them.
_IMAGE_FIELDS: Final = ("image", "image_url", "url", "bytes")
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": EmbeddingsResponse}, 404: {}}


@router.post(
    "/v1/embeddings",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
@router.post(
    "/embeddings",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
async def create_embeddings(
    body: EmbeddingsRequest, request: Request, resources: AppResources
) -> Response:
    """Embeds images and texts in OpenAI's format.

    If an image or text is invalid, the whole request is refused, and the error has its index. A
    text sent to a model without a text tower is answered 422.
    """
    resources = await use_model(body.model, request, resources)
    loop = asyncio.get_running_loop()
    items, param = await loop.run_in_executor(
        resources.compute, _read_items, body, resources.settings.limits
    )
    reject_long = rejects_long(body.truncate)
    encoded_items = await encode_items_strictly(
        request, resources, items, param=param, reject_long=reject_long
    )
    rows = shorten(encoded_items.encoded.embeddings, body.dimensions, param="dimensions")
    usage = {"prompt_tokens": encoded_items.num_tokens, "total_tokens": encoded_items.num_tokens}
    return list_answer(
        {"object": "list", "model": resources.encoder.name, "usage": usage},
        [
            partial(dict, object="embedding", index=index, embedding=row)
            for index, row in enumerate(_encode_rows(rows, body))
        ],
        headers(resources, encoded_items.encoded),
        resources,
        num_items=len(rows),
        num_bytes=NUMBER_BYTES * rows.size,
        field="data",
    )


@router.get("/v1/models", dependencies=[needs()])
async def models(resources: AppResources, response: Response) -> ModelList:
    """Returns the models that a request may choose, the server's own first."""
    response.headers.update(headers(resources))
    names = [resources.encoder.name, *resources.further.names]
    return ModelList(object="list", data=[_describe_model(name, resources) for name in names])


@router.get("/v1/models/{model}", dependencies=[needs()], responses={404: {}})
async def model(model: str, resources: AppResources, response: Response) -> Model:
    """Returns one of the models in OpenAI's format."""
    check_model_name(model, resources)
    response.headers.update(headers(resources))
    return _describe_model(model, resources)


def _read_items(body: EmbeddingsRequest, limits: Limits) -> tuple[list[RequestItem], str]:
    """Returns the images and texts, and the template of an item's field name for errors."""
    if (body.input is None) == (body.messages is None):
        raise BadRequest("the body must have either `input` or `messages`", param="input")
    if body.messages is not None:
        return [_read_messages(body.messages)], "messages"
    items = [body.input] if isinstance(body.input, str) else body.input or []
    if not items:
        raise BadRequest("input must have at least 1 item, got 0", param="input")
    if any(isinstance(item, int | list) for item in items):
        raise BadRequest(
            "input must be strings or images, got token ids",
            remedy="send strings; in LangChain set check_embedding_ctx_length=False",
            param="input",
        )
    kinds = _item_modalities(body.modality, len(items))
    parsed = [_read_item(item, kind) for item, kind in zip(items, kinds, strict=True)]
    num_texts = sum(isinstance(item, RequestText) for item in parsed)
    check_num_texts(num_texts, limits)
    check_count(len(parsed) - num_texts, limits)
    return parsed, "input[{index}]"


def _item_modalities(modality: Modality | list[Modality] | None, num: int) -> list[Modality | None]:
    """Returns the stated modality of each item; None if it is not stated."""
    if not isinstance(modality, list):
        return [modality] * num
    if len(modality) != num:
        raise BadRequest(
            f"modality must have {num} entries, one for each input, got {len(modality)}",
            param="modality",
        )
    return [*modality]


def _read_item(item: Any, modality: Modality | None) -> RequestItem:
    if isinstance(item, str) and (modality or ("image" if is_image(item) else "text")) == "text":
        return RequestText(item)
    if not isinstance(item, dict):
        return image_from_uri(item)
    if item.keys() == {"text"}:
        return RequestText(item["text"])
    fields = [field for field in _IMAGE_FIELDS if item.get(field) is not None]
    if len(fields) != 1 or len(item) != 1:
        return ImageRejected(
            "unreadable", f"an object must have exactly one of {', '.join(_IMAGE_FIELDS)}, text"
        )
    value = item[fields[0]]
    if fields[0] == "image_url":
        return _read_image_url(value)
    return image_from_field(value)


def _read_image_url(value: Any) -> RequestImage:
    """Reads a data-URI or URL, or OpenAI's object with one."""
    return image_from_uri(value.get("url") if isinstance(value, dict) else value)


def _read_messages(messages: list[Any]) -> RequestItem:
    """Reads the only image or text of a conversation.

    vLLM embeds a whole conversation; this model embeds one image or one text.
    """
    contents = [
        message.get("content") if isinstance(message, dict) else None for message in messages
    ]
    parts = [
        part
        for content in contents
        for part in (content if isinstance(content, list) else [content])
    ]
    part = parts[0] if len(parts) == 1 else None
    if isinstance(part, str):
        return RequestText(part)
    if isinstance(part, dict) and part.get("type") == "text":
        return RequestText(part.get("text"))
    if not isinstance(part, dict) or part.get("type") != "image_url":
        raise BadRequest(
            "messages must contain exactly one image or one text",
            remedy="send one message whose content is"
            ' [{"type": "image_url", "image_url": {"url": "data:…"}}]',
            param="messages",
        )
    return _read_image_url(part.get("image_url"))


def _encode_rows(rows: Embeddings, body: EmbeddingsRequest) -> Iterable[Any]:
    match body.embedding_type or body.encoding_type or body.encoding_format:
        case "base64":
            return as_base64(rows)
        case "binary":
            return as_binary(rows, param="embedding_type")
        case "ubinary":
            return as_ubinary(rows, param="embedding_type")
        case _:
            return rows


def _describe_model(name: str, resources: Resources) -> Model:
    further = resources.further
    loaded = name not in further.names or further.find_opened(name) is not None
    return Model(id=name, object="model", created=0, owned_by="mlcd", loaded=loaded)
