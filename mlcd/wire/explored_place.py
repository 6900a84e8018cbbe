"""The exploration of a set of photos: its progress, and the files that it skipped."""

from typing import Annotated, Literal

from pydantic import Field

from mlcd.wire.shapes import WireAnswer, WireRequest


class NewPicture(WireAnswer):
    """A recently added photo. thumbnail: version of its thumbnail, null without one."""

    id: str
    thumbnail: str | None


class ExplorationStatus(WireAnswer):
    """The progress of an exploration.

    done, total: photos of the current stage; total is null if unknown. pictures: number of photos
    in `collection`. skipped: number of files that cannot be used. clusters: current number of
    clusters; null until there are any. considered: numbers of clusters that were compared; empty if
    the number was requested. newest: photos added last. error: why the exploration stopped.
    commands: commands that give the same result step by step.
    """

    place: str
    collection: str
    stage: Literal["list", "embed", "cluster", "name", "label", "done", "failed"]
    done: int
    total: int | None
    seconds_left: float | None
    pictures: int
    skipped: int
    clusters: int | None
    considered: list[int]
    newest: list[NewPicture]
    error: str | None
    commands: list[str]


class SkippedFile(WireAnswer):
    """A file that cannot be used. reason: stable code, as in errors.jsonl."""

    key: str
    reason: str
    detail: str


class SkippedFiles(WireAnswer):
    """The first of the `total` files that cannot be used."""

    total: int
    files: list[SkippedFile]


class ClusterAgainRequest(WireRequest):
    """A request to cluster again. clusters: number of clusters; null chooses it automatically."""

    clusters: Annotated[int | None, Field(ge=1)] = None
