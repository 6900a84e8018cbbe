"""Base classes of requests and answers, errors, and common field types."""

from typing import Annotated, Final

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
)

from mlcd.errors import ImageReason, TextReason

# A PNG of 4 x 4 pixels, black and white in columns.
EXAMPLE_IMAGE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAFElEQVR42mNg+M/wn4mB"
    "gYEBQQAAIi4CBSsxuAQAAAAA"
    "SUVORK5CYII="
)


def exactly_one(**types: str | tuple[str, ...]) -> dict[str, JsonValue]:
    """Returns a JSON schema that requires exactly one of these fields, not null.

    types: JSON type or types of each field.
    """
    return {
        "oneOf": [
            _require(name, [kind] if isinstance(kind, str) else list(kind))
            for name, kind in types.items()
        ]
    }


def _require(name: str, json_types: list[str]) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": [*json_types]}}}


def read_whole(value: object) -> object:
    """Returns 256 for 256.0, which is the same number in JSON; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# an integer in the body of a request; rejects true and "256"
WholeNumber = Annotated[int, Field(strict=True), BeforeValidator(read_whole)]


class WireAnswer(BaseModel):
    """An answer, or a part of an answer."""

    model_config = ConfigDict(frozen=True)


class WireRequest(BaseModel):
    """The body of a request; unknown fields and values of other types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Problem(WireAnswer):
    """An error as a problem by RFC 9457.

    type: urn:mlcd:problem: and a stable name. limit, index, param: the limit, item or parameter
    that the error is about, if any.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:mlcd:problem:too-large",
                    "title": "Too large",
                    "status": 413,
                    "detail": "65 items in one request, more than 64:"
                    " the limit max_images is stated in /v1/info",
                    "instance": "/v1/images/embed",
                    "request_id": "3f0c",
                    "limit": "max_images",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    limit: str | None = None
    index: int | None = None
    param: str | None = None


class ItemError(WireAnswer):
    """The error of one image or text of a batch; the other items are processed."""

    index: int
    type: SkipValidation[ImageReason | TextReason]
    title: str
    detail: str


class Provenance(WireAnswer):
    """The model that gave an answer."""

    model: str
    fingerprint: str
    preprocess_version: int
