"""The fields of a batch job. One class serves as the request, the stored spec and the worker's
recipe.

A new option is one line in `LabelJob` and one in `JobOptions`; options of kinds other than `curate`
are also listed in `_OF_LABELS` or `_OF_IMAGES`. The REST request and the Python client then offer
it, the queue stores it, and the pipeline of its kind receives it.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, TypedDict

from pydantic import Field

from mlcd.types import Issue

JobKind = Literal["label", "embed", "index", "curate"]
_Share = Annotated[float, Field(gt=0, lt=1)]
_Number = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class LabelJob:
    """The input, output and options of a job. `OPTIONS_OF` lists the options of each kind; other
    kinds ignore them.

    input: a folder, a glob of tar shards or parquet files, or a file; for `curate` an embeddings
    artifact. output: the artifact, or for `index` the collection. top: maximum number of labels per
    image. threshold: minimum cosine of a label. embeddings: also write the embeddings. url_column:
    the input is a table with image URLs in this column. For all other options see `mlcd curate`.
    """

    kind: JobKind
    input: str
    output: str
    _: KW_ONLY
    top: _Number = 8
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    embeddings: bool = False
    url_column: Annotated[str, Field(min_length=1)] | None = None
    issues: Annotated[tuple[Issue, ...], Field(strict=False)] = ()  # JSON has lists, not tuples
    duplicates: Annotated[float, Field(gt=0, le=1)] | None = None
    keep: Literal["first", "best", "largest"] = "first"
    outliers: _Share | None = None
    balance: _Number | None = None
    hierarchical: _Number | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    report: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Returns the values of the options of its kind, by name."""
        return {name: getattr(self, name) for name in OPTIONS_OF[self.kind]}

    @property
    def needs_centers(self) -> bool:
        """Returns whether the job depends on the served centers."""
        samples = (self.outliers, self.balance, self.hierarchical)
        return self.kind == "label" or (self.kind == "curate" and samples != (None, None, None))


OPTIONS: Final[dict[str, Any]] = {
    field.name: field.type for field in fields(LabelJob) if field.default is not MISSING
}
_OF_LABELS: Final = ("top", "threshold", "embeddings")
_OF_IMAGES: Final = ("url_column",)
OPTIONS_OF: Final[Mapping[JobKind, tuple[str, ...]]] = {
    "label": (*_OF_LABELS, *_OF_IMAGES),
    "embed": _OF_IMAGES,
    "index": _OF_IMAGES,
    "curate": tuple(name for name in OPTIONS if name not in (*_OF_LABELS, *_OF_IMAGES)),
}


class JobOptions(TypedDict, total=False):
    """The options of a job in the Python client; None leaves the choice to the server."""

    top: int | None
    threshold: float | None
    embeddings: bool | None
    url_column: str | None
    issues: tuple[Issue, ...] | None
    duplicates: float | None
    keep: Literal["first", "best", "largest"] | None
    outliers: float | None
    balance: int | None
    hierarchical: int | None
    seed: int | None
    report: bool | None
