"""Embeddings of images and texts, and classification of images by names."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlcd.wire.shapes import (
    EXAMPLE_IMAGE,
    ItemError,
    Provenance,
    WholeNumber,
    WireAnswer,
    WireRequest,
    exactly_one,
)


class EmbeddedImage(WireAnswer):
    """The embedding of one image, of unit length."""

    index: int
    embedding: list[float]


class EmbeddedImages(Provenance):
    """Embeddings of usable images and errors of the other images, by index in the request."""

    dimension: int
    results: list[EmbeddedImage]
    errors: list[ItemError]


class TextsRequest(WireRequest):
    """Texts to embed; each text may fail separately."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["a dog", "a red car"]}]})

    texts: Annotated[list[str | Any], Field(min_length=1)]


class EmbeddedText(WireAnswer):
    """The embedding of one text, of unit length."""

    index: int
    embedding: list[float]


class TextVectors(Provenance):
    """Embeddings of usable texts and errors of the other texts, by index in the request.

    tokens: number of tokens of all texts, without padding; at most the model's context per text.
    """

    dimension: int
    tokens: int
    results: list[EmbeddedText]
    errors: list[ItemError]


class QueryRequest(BaseModel):
    """Queries as images, as texts or as embeddings.

    images: data-URIs or URLs. texts: for models with a text tower. Each image or text may fail
    separately. embeddings: rows of the model's dimension.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"images": [EXAMPLE_IMAGE]}],
            **exactly_one(images="array", texts="array", embeddings="array"),
        },
    )

    images: list[Any] | None = None
    texts: list[str | Any] | None = None
    embeddings: list[list[float]] | None = None


class PairCalibration(WireAnswer):
    """How the model turns the cosine of an image and a text into a probability.

    With a bias, each pair has an independent probability: sigmoid(scale * cosine + bias). If bias
    is null, the texts of an image compete: softmax(scale * cosine).
    """

    scale: float
    bias: float | None


class ClassifyOptions(WireRequest):
    """The options of a classification.

    names: distinct names, because equal names would split a probability. templates: a named set of
    templates, or templates with {} in place of the name; by default the name itself is the text.
    top: maximum number of names per image.
    """

    names: Annotated[list[str], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
    templates: (
        Literal["simple", "clip"] | Annotated[list[str], Field(min_length=1, max_length=256)] | None
    ) = None
    top: Annotated[WholeNumber, Field(ge=1)] = 10


class ClassifyRequest(ClassifyOptions):
    """Names, and either images or embeddings to classify by the names."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"images": [EXAMPLE_IMAGE], "names": ["stripes", "a dog"], "templates": "simple"}
            ],
            **exactly_one(images="array", embeddings="array"),
        }
    )

    images: list[Any] | None = None
    embeddings: list[list[float]] | None = None


class FittingName(WireAnswer):
    """A name with its probability for an image. similarity: cosine that gives the probability."""

    name: str
    probability: float
    similarity: float


class ClassifiedImage(WireAnswer):
    """The most probable names of one image, best first."""

    index: int
    names: list[FittingName]


class ClassifiedImages(Provenance):
    """The names of each image. calibration: how probabilities are computed from similarities."""

    calibration: PairCalibration
    results: list[ClassifiedImage]
    errors: list[ItemError]
