"""The served model and its limits."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation, WithJsonSchema

from mlcd.wire.embedding import PairCalibration
from mlcd.wire.nearest_centers import Audit, LabelMode
from mlcd.wire.shapes import Provenance, WholeNumber, WireAnswer, WireRequest


class LoadRequest(WireRequest):
    """A request to switch to another version of the model.

    version: version in Triton's repository; null means the newest. unload: whether Triton then
    unloads all other versions; set it to false if other servers still use them.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2}]})

    version: Annotated[WholeNumber, Field(ge=1)] | None = None
    unload: bool = True


class Foreign(WireAnswer):
    """Centers and collections of other models.

    centers: fingerprint of the centers; null if they are of this model. collections: fingerprint by
    name. Requests for them are refused while this model is served.
    """

    centers: str | None
    collections: dict[str, str]


class LoadedModel(Provenance):
    """The model that is served now. centers: digest of the centers in use."""

    version: int
    centers: str | None
    collections: list[str]
    foreign: Foreign


class CenterSet(WireAnswer):
    """The centers in use.

    modes: exact, and approximate if the server's settings allow it. audit: recall of approximate
    labels. labels_by: engine if the engine finds exact labels together with the embeddings, such as
    Triton with an ensemble of these centers; otherwise server. The server also finds labels that
    the engine cannot find at the moment.
    """

    digest: str
    num_centers: int
    modes: list[SkipValidation[LabelMode]]
    audit: Audit | None
    labels_by: Literal["server", "engine"] = "server"


class DescribedTexts(WireAnswer):
    """The text tower. context_length: maximum number of tokens that the model reads of a text."""

    context_length: int
    engine: str
    precision: str
    calibration: PairCalibration


class Info(Provenance):
    """The served model and the limits.

    texts: null if the model embeds images only. creates_collections: whether the server can store
    new collections.
    """

    version: str
    dimension: int
    engine: str
    precision: str
    preprocess: dict[str, Any]
    image_formats: list[str]
    texts: DescribedTexts | None = None
    centers: CenterSet | None
    collections: list[str]
    creates_collections: bool = False
    limits: dict[str, Annotated[int | float, WithJsonSchema({"type": "number"})]] = Field(
        description="limits by name; an error contains the name of the limit that was exceeded"
    )
