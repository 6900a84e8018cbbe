"""The fields of a batch job: the request, the stored spec and the recipe of a worker are all this
one class.

A new option is one line in `LabelJob` and one in `JobOptions`. The REST request and the Python
client offer it, the queue stores it, and `mlcd.pipelines.label` is given it.
"""

from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, TypedDict

from pydantic import Field

JobKind = Literal["label", "embed", "index"]


@dataclass(frozen=True)
class LabelJob:
    """The work that a job does on its input. Fields with a default are options of `label` jobs;
    other kinds ignore them.

    input: a folder, a glob of tar shards or parquet files, or one file. output: the artifact of
    `label` and `embed`, or the collection of `index`. threshold: only labels at least so similar.
    embeddings: written beside the labels.
    """

    kind: JobKind
    input: str
    output: str
    _: KW_ONLY
    top: Annotated[int, Field(ge=1)] = 8
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    embeddings: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The values of `OPTIONS`, by name."""
        return {name: getattr(self, name) for name in OPTIONS}


# The name and type of each option of a label job.
OPTIONS: Final[dict[str, Any]] = {
    field.name: field.type for field in fields(LabelJob) if field.default is not MISSING
}


class JobOptions(TypedDict, total=False):
    """The options of a label job in the Python client; None leaves the choice to the server."""

    top: int | None
    threshold: float | None
    embeddings: bool | None
