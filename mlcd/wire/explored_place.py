"""The exploration of a place of pictures: how far it is, and what it skipped."""

from typing import Annotated, Literal

from pydantic import Field

from mlcd.wire.shapes import WireAnswer, WireRequest


class NewPicture(WireAnswer):
    """A picture taken in of late. thumbnail: the version of its thumbnail."""

    id: str
    thumbnail: str | None


class ExplorationStatus(WireAnswer):
    """How far an exploration is.

    done, total: of the present stage; total is null where it is unknown. pictures: those in
    `collection`. skipped: files that cannot be used. clusters: the number of the present clusters;
    null until there are any. considered: the numbers that it was chosen from; empty where it was
    asked for. newest: the pictures taken in last. error: why it stopped. commands: those that make
    the same, one by one.
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
    """A file that cannot be used. reason: stable, as in errors.jsonl."""

    key: str
    reason: str
    detail: str


class SkippedFiles(WireAnswer):
    """The first files that cannot be used, of `total`."""

    total: int
    files: list[SkippedFile]


class ClusterAgainRequest(WireRequest):
    """How many clusters are wanted; null has the number chosen."""

    clusters: Annotated[int | None, Field(ge=1)] = None
