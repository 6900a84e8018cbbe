"""The unit of work of a batch job: one shard of what `mlcd label`, `mlcd embed`, `mlcd index`
and `mlcd curate` make.

`open_shards` lists the input and writes nothing. Then any process can make any shard, at any time
and as often as it likes: what it leaves has the same bytes. Once all are made, `publish` puts the
artifact in its place. This module does not know who leases the shards: a queue or another
engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, draft_path
from mlcd.encoders.encoder import Encoder
from mlcd.errors import ConfigInvalid
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from mlcd.label_job import LabelJob
from mlcd.locations import artifact_path
from mlcd.pipelines import ownership
from mlcd.pipelines.curate import CurateInputs
from mlcd.pipelines.embed import Embedder
from mlcd.pipelines.encoded import OnDone, check_source
from mlcd.pipelines.label import LabelOptions, labeling_of
from mlcd.pipelines.label_inputs import ImagesInput
from mlcd.pipelines.ownership import NotRemoved
from mlcd.pipelines.shard_collection import EMBEDDINGS, CollectionShards
from mlcd.pipelines.shard_parts import InputChanged, Making, OtherSettings, OutputGone, PartShards
from mlcd.pipelines.shard_selection import SelectionShards
from mlcd.pipelines.thumbnail_parts import ThumbnailChoice

__all__ = [
    "Equipment",
    "InputChanged",
    "NotRemoved",
    "OpenedCenters",
    "OtherSettings",
    "OutputGone",
    "Shards",
    "ThumbnailChoice",
    "discard",
    "open_shards",
]


@dataclass(frozen=True)
class OpenedCenters:
    """The centers, and the artifact that they were read from."""

    artifact: Artifact
    centers: Centers


@dataclass(frozen=True)
class Equipment:
    """The parts that a process opens once, for all its shards. num_threads: threads that decode.
    in_flight: batches that the encoder is given at one time. thumbnails: those of the collections
    that it makes; None for none. urls: how images are fetched; None where they are not.
    """

    encoder: Encoder
    centers: OpenedCenters | None
    num_threads: int
    in_flight: int = 1
    thumbnails: ThumbnailChoice | None = None
    urls: UrlOptions | None = None


class Shards(Protocol):
    """A job with its input listed. `on_done` may raise, to stop: no part is half made then."""

    sizes: list[int]  # images of each shard
    damaged_files: int  # files of the input that could not be listed to their end

    def plan(self) -> None:
        """Begins the output. Raises Conflict where something else is, or is being made."""
        ...

    def check(self) -> None:
        """Checks that the input is the one that was planned. Raises InputChanged, OtherSettings,
        OutputGone.
        """
        ...

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        """Writes one shard; does nothing where it is there. Returns how many of its images have no
        result.

        Raises InputChanged, OtherSettings, OutputGone, and Conflict where a file of its images
        changed meanwhile. Raises Unavailable, except at the last try, where the file system did not
        give some: a passing fault must not cost them.
        """
        ...

    def publish(self, on_done: OnDone) -> None:
        """Puts the output in its place, and makes missing shards first; does nothing where it is
        there.

        For a collection `on_done` is called with (done, 0): first with the images that it holds,
        those without an embedding included, and then, from the number of all images on, with those
        that its index is made of.

        Raises InvalidInput where no image could be used.
        """
        ...


def open_shards(
    job: LabelJob,
    equipment: Equipment,
    *,
    owner: str,
    part_entries: int | None = None,
    check_files: Callable[[Sequence[str]], None] = lambda _: None,
) -> Shards:
    """Lists the input of a job and cuts it into shards of `part_entries` images, or as many as
    `choose_part_entries` says; that of `curate` is one shard.

    owner: owner of the unfinished output, all of which is in `draft_path(job.output)`.
    check_files: called with the files of a shard before they are read; `make` passes on what it
    raises.

    Raises NotFound or InvalidInput for a missing or empty input, ConfigInvalid where labels lack
    centers of the model or images are at URLs and fetching is off.
    """
    out = artifact_path(job.output)
    if job.kind == "curate":
        return SelectionShards(job, _curate_inputs(job, equipment), owner, check_files)
    source = open_source(job.input, urls=_urls(job, equipment))
    if job.kind == "label":
        check_source(source, out)
        rows = ImagesInput(
            source,
            equipment.encoder,
            part_entries=part_entries,
            num_threads=equipment.num_threads,
            in_flight=equipment.in_flight,
        )
        return PartShards(
            _labeling(job, rows, equipment, part_entries), rows, out, owner, check_files
        )
    embeddings_out = out if job.kind == "embed" else draft_path(out) / EMBEDDINGS
    thumbnails = equipment.thumbnails if job.kind == "index" else None
    embedding = Embedder(
        source,
        equipment.encoder,
        embeddings_out,
        num_threads=equipment.num_threads,
        part_entries=part_entries,
        in_flight=equipment.in_flight,
        thumbnail_side=thumbnails.side if thumbnails else None,
    )
    embeddings = PartShards(embedding, embedding, embeddings_out, owner, check_files)
    if job.kind == "embed":
        return embeddings
    max_bytes = thumbnails.max_bytes if thumbnails else 0
    return CollectionShards(embeddings, source, out, owner, max_thumbnail_bytes=max_bytes)


def _labeling(
    job: LabelJob, rows: ImagesInput, equipment: Equipment, part_entries: int | None
) -> Making:
    if equipment.centers is None:
        raise ConfigInvalid("labeling needs centers, got none", remedy="give --centers")
    artifact, centers = equipment.centers.artifact, equipment.centers.centers
    options = LabelOptions(
        job.input,
        str(artifact.path),
        top=job.top,
        threshold=job.threshold,
        embeddings=job.embeddings,
        part_entries=part_entries,
    )
    return labeling_of(options, rows, artifact, centers, artifact_path(job.output))


def _urls(job: LabelJob, equipment: Equipment) -> UrlOptions | None:
    """Returns how the images of a job are fetched; None where they are not."""
    if equipment.urls is not None:
        return replace(equipment.urls, column=job.url_column)
    if job.url_column is not None:
        raise ConfigInvalid(
            "no images are fetched from URLs here",
            remedy="name the hosts to ask in MLCD_FETCH__ALLOW",
        )
    return None


def _curate_inputs(job: LabelJob, equipment: Equipment) -> CurateInputs:
    embeddings = EmbeddingsArtifact.open(fetch_copy(job.input))
    if embeddings.fingerprint != equipment.encoder.fingerprint:
        raise ConfigInvalid(
            f"{job.input} are embeddings of another model", remedy="embed the images by this one"
        )
    centers = equipment.centers if job.needs_centers else None
    return CurateInputs(embeddings, None if centers is None else centers.artifact)


def discard(job: LabelJob, *, owner: str) -> None:
    """Removes the unfinished output of this owner; one that is finished, or another's, stays.

    Raises Conflict where another process works in it, NotRemoved where the file system keeps it.
    """
    out = artifact_path(job.output)
    ownership.discard_uploads(out, owner)
    ownership.discard(draft_path(out), owner)
