"""Images and texts to embeddings, and the names that fit an image."""

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
    """Embeddings of the images that succeeded and errors of the others, by index in the request."""

    dimension: int
    results: list[EmbeddedImage]
    errors: list[ItemError]


class TextsRequest(WireRequest):
    """Texts to embed; each may fail alone."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["a dog", "a red car"]}]})

    texts: Annotated[list[str | Any], Field(min_length=1)]


class EmbeddedText(WireAnswer):
    """The embedding of one text, of unit length."""

    index: int
    embedding: list[float]


class TextVectors(Provenance):
    """Embeddings of the texts that succeeded and errors of the others, by index in the request.

    tokens: of the texts together, without padding; of each at most the model's context.
    """

    dimension: int
    tokens: int
    results: list[EmbeddedText]
    errors: list[ItemError]


class QueryRequest(BaseModel):
    """Queries as images, as texts or as embeddings.

    images: data-URIs or URLs. texts: for a model that takes them. Each may fail alone. embeddings:
    rows of the model's dimension.
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

    With a bias each pair is judged alone: sigmoid(scale * cosine + bias). With null the texts of an
    image compete: softmax over scale * cosine.
    """

    scale: float
    bias: float | None


class ClassifyOptions(WireRequest):
    """The options of a classification.

    names: each once, because equal names would share a probability. templates: a set of templates,
    or templates of your own with the name's place {}; without them a name is a text as it is. top:
    names per image.
    """

    names: Annotated[list[str], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
    templates: (
        Literal["simple", "clip"] | Annotated[list[str], Field(min_length=1, max_length=256)] | None
    ) = None
    top: Annotated[WholeNumber, Field(ge=1)] = 10


class ClassifyRequest(ClassifyOptions):
    """Names, and one of images and embeddings to classify by them."""

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
    """A name with its probability for an image, and the cosine behind it."""

    name: str
    probability: float
    similarity: float


class ClassifiedImage(WireAnswer):
    """The names that fit one image, best first."""

    index: int
    names: list[FittingName]


class ClassifiedImages(Provenance):
    """The names of each image. calibration: how probabilities come from similarities."""

    calibration: PairCalibration
    results: list[ClassifiedImage]
    errors: list[ItemError]
