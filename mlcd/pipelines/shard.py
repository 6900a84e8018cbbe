"""Shards: the units of work of `mlcd label`, `mlcd embed`, `mlcd index` and `mlcd curate`.

`open_shards` lists the input and writes nothing. Then any process can make any shard at any time;
making a shard is idempotent and writes the same bytes. Once all shards are made, `publish` moves
the artifact to its output path. The caller leases the shards: a queue or another engine.
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
from mlcd.images.source import Source
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
    """The resources that a process opens once, for all its shards.

    num_threads: number of decoding threads. in_flight: number of batches in the encoder at once.
    thumbnails: settings of the collections' thumbnails; None for no thumbnails. urls: settings for
    fetching images; None if images are not fetched.
    """

    encoder: Encoder
    centers: OpenedCenters | None
    num_threads: int
    in_flight: int = 1
    thumbnails: ThumbnailChoice | None = None
    urls: UrlOptions | None = None


class Shards(Protocol):
    """A job whose input is listed. `on_done` may raise to stop; no part is half written then."""

    sizes: list[int]  # images of each shard
    damaged_files: int  # input files whose listing failed part way

    def plan(self) -> None:
        """Starts the output. Raises Conflict if another output, finished or not, is at its path."""
        ...

    def check(self) -> None:
        """Checks that the input has not changed since `plan`. Raises InputChanged, OtherSettings,
        OutputGone.
        """
        ...

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        """Writes one shard unless it exists. Returns the number of its images without a result.

        Raises InputChanged, OtherSettings, OutputGone, and Conflict if an image file changed
        meanwhile. If the file system failed to read some images, raises Unavailable so that the
        caller retries; at the last try, these images stay without a result.
        """
        ...

    def publish(self, on_done: OnDone) -> None:
        """Makes missing shards, then moves the output to its path; does nothing if it is published.

        For a collection `on_done` is called with (done, 0): first with the images that it holds,
        those without an embedding included, and then, from the number of all images on, with those
        that its index is made of.

        Raises InvalidInput if no image was usable.
        """
        ...


def open_shards(
    job: LabelJob,
    equipment: Equipment,
    *,
    owner: str,
    part_entries: int | None = None,
    check_files: Callable[[Sequence[str]], None] = lambda _: None,
    source: Source | None = None,
) -> Shards:
    """Lists the input of a job and splits it into shards of `part_entries` images, by default
    `choose_part_entries`; a `curate` job is one shard.

    owner: owner of the unfinished output, which is entirely in `draft_path(job.output)`.
    check_files: called with the files of a shard before they are read; its errors pass through
    `make`. source: the images at `job.input`; None opens them.

    Raises NotFound or InvalidInput for a missing or empty input, ConfigInvalid if labels lack
    centers of the model, or if images are at URLs and fetching is off.
    """
    out = artifact_path(job.output)
    if job.kind == "curate":
        return SelectionShards(job, _curate_inputs(job, equipment), owner, check_files)
    source = source or open_source(job.input, urls=_urls(job, equipment))
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
    """Returns the settings for fetching a job's images; None if fetching is off."""
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
    """Removes this owner's unfinished output; a finished output or another owner's output stays.

    Raises Conflict if another process works in it, NotRemoved if the file system refuses.
    """
    out = artifact_path(job.output)
    ownership.discard_uploads(out, owner)
    ownership.discard(draft_path(out), owner)
