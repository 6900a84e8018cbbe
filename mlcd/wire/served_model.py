"""The served model and its limits."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation, WithJsonSchema

from mlcd.wire.embedding import PairCalibration
from mlcd.wire.nearest_centers import Audit, LabelMode
from mlcd.wire.shapes import Provenance, WholeNumber, WireAnswer, WireRequest


class LoadRequest(WireRequest):
    """A request to switch to another version of the model.

    version: as in Triton's repository; null: the newest there. unload: Triton then unloads all
    other versions; set it to false where other servers still use them.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2}]})

    version: Annotated[WholeNumber, Field(ge=1)] | None = None
    unload: bool = True


class Foreign(WireAnswer):
    """Centers and collections of other models, with their fingerprints.

    Requests for them are refused while this model is served.
    """

    centers: str | None
    collections: dict[str, str]


class LoadedModel(Provenance):
    """The model that is served now. centers: digest of those in use."""

    version: int
    centers: str | None
    collections: list[str]
    foreign: Foreign


class CenterSet(WireAnswer):
    """The centers in use.

    modes: exact, and approximate where the server's settings allow it; then with its audit.
    labels_by: engine where it has these centers to find exact labels of images together with their
    embeddings, as a Triton with their ensemble; else server, which also finds what the engine
    cannot at the moment.
    """

    digest: str
    num_centers: int
    modes: list[SkipValidation[LabelMode]]
    audit: Audit | None
    labels_by: Literal["server", "engine"] = "server"


class DescribedTexts(WireAnswer):
    """The tower of texts. context_length: tokens of one text that the model reads."""

    context_length: int
    engine: str
    precision: str
    calibration: PairCalibration


class Info(Provenance):
    """The served model and the limits.

    texts: null where the model embeds images only. creates_collections: the server has a place to
    keep new ones.
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
        description="by name; errors carry the name of the one that was exceeded"
    )
