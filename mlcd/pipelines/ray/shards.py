"""Embeds and labels on a Ray cluster, in the same shards as the workers of a job.

Each node opens the shards from a recipe; so does the driver, which plans and publishes. The
unfinished output is the only state, so a repeated command resumes.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, Self

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.artifacts.selection import Selection
from mlcd.cores import available_cores
from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from mlcd.locations import artifact_path, is_url, location_of
from mlcd.pipelines.embed import Embedder
from mlcd.pipelines.label import LabelOptions, open_labeling
from mlcd.pipelines.label_inputs import ImagesInput
from mlcd.pipelines.ray.session import RayOptions, centers_at_once, gpus_hidden, ray_session
from mlcd.pipelines.ray.workers import make_shards
from mlcd.pipelines.resolve import make_portable_spec, resolve_model
from mlcd.pipelines.shard_parts import DraftShards, PartShards
from mlcd.progress import Reporter

# owner of unfinished output; the same for every driver, so any driver can resume it
_OWNER: Final = "ray"
_DRIVER_CENTERS: Final = 65_536  # centers in the driver's memory at a time
# memory per component of a center in a scan: its value, its rounded value, and data for checks
_COMPONENT_BYTES: Final = 8


class Recipe(Protocol):
    """The work as plain values. Every node opens it as shards that give the same bytes."""

    @property
    def stage(self) -> str: ...

    def within(self, memory_bytes: float) -> Self:
        """Returns the recipe for a worker with this much memory."""
        ...

    def open(self, num_threads: int) -> Iterator[DraftShards]: ...


@dataclass(frozen=True)
class EmbedRecipe:
    """The recipe of `mlcd embed`; every node must be able to read its locations."""

    images: str
    model: str
    out: str
    encoder: EncoderOptions
    urls: UrlOptions | None
    selection: str | None
    part_entries: int | None
    stage: str = "embed"

    def within(self, memory_bytes: float) -> Self:
        del memory_bytes  # a part needs little memory
        return self

    def open(self, num_threads: int) -> Iterator[DraftShards]:
        out = artifact_path(self.out)
        selection = None if self.selection is None else Selection.open(fetch_copy(self.selection))
        source = open_source(self.images, urls=self.urls)
        options = replace(self.encoder, num_threads=num_threads)
        with closing(open_encoder(resolve_model(self.model), options)) as encoder:
            embedding = Embedder(
                source,
                encoder,
                out,
                num_threads=num_threads,
                part_entries=self.part_entries,
                selection=selection,
            )
            yield PartShards(embedding, embedding, out, _OWNER)


@dataclass(frozen=True)
class LabelRecipe:
    """The recipe of `mlcd label`; every node must be able to read its locations."""

    options: LabelOptions
    out: str
    stage: str = "label"

    def within(self, memory_bytes: float) -> Self:
        if self.options.mode == "approximate":
            return self
        artifact = open_artifact(fetch_copy(self.options.centers), "centers")
        num, dimension = Centers.read(artifact, mapped=True).vectors.shape
        at_once = centers_at_once(num, _COMPONENT_BYTES * dimension, memory_bytes)
        block_centers = None if at_once >= num else at_once
        return replace(self, options=replace(self.options, centers_at_once=block_centers))

    def open(self, num_threads: int) -> Iterator[DraftShards]:
        options, out = self.options, artifact_path(self.out)
        resolved = replace(options, centers=str(fetch_copy(options.centers)))
        if options.model is None:
            resolved = replace(resolved, source=str(fetch_copy(options.source)))
        else:
            resolved = replace(resolved, model=resolve_model(options.model))
        with open_labeling(resolved, out, num_threads=num_threads) as labeling:
            if isinstance(labeling.rows, ImagesInput):
                yield PartShards(labeling, labeling.rows, out, _OWNER)
            else:
                yield DraftShards(labeling, out, _OWNER, damaged_files=0)


def embed_on_ray(
    images: str,
    model: str,
    out: Path,
    ray_options: RayOptions,
    reporter: Reporter,
    *,
    encoder: EncoderOptions,
    urls: UrlOptions | None = None,
    selection: Path | None = None,
    part_entries: int | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Artifact:
    """Runs `mlcd.pipelines.embed.embed` with workers on Ray; gives the same bytes."""
    recipe = EmbedRecipe(
        images=_make_absolute(images),
        model=make_portable_spec(model),
        out=location_of(out),
        encoder=encoder,
        urls=urls,
        selection=None if selection is None else location_of(selection),
        part_entries=part_entries,
    )
    return _run(recipe, out, ray_options, reporter, announce)


def label_on_ray(
    options: LabelOptions,
    out: Path,
    ray_options: RayOptions,
    reporter: Reporter,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> Artifact:
    """Runs `mlcd.pipelines.label.label` with workers on Ray; gives the same bytes.

    The model in the options must be as the user named it: every node resolves it itself.
    """
    has_images = options.model is not None
    node_options = replace(
        options,
        source=_make_absolute(options.source) if has_images else location_of(Path(options.source)),
        centers=location_of(Path(options.centers)),
        model=None if options.model is None else make_portable_spec(options.model),
        # the driver makes no part
        centers_at_once=_DRIVER_CENTERS if options.mode == "exact" else None,
    )
    recipe = LabelRecipe(node_options, location_of(out))
    return _run(recipe, out, ray_options, reporter, announce)


def _run(
    recipe: Recipe,
    out: Path,
    ray_options: RayOptions,
    reporter: Reporter,
    announce: Callable[[str], None],
) -> Artifact:
    with (
        gpus_hidden(ray_options.gpus),  # the driver must choose the same engine as the workers
        contextmanager(recipe.open)(available_cores()) as shards,
    ):
        if shards.find_artifact() is None:
            shards.plan()
            _make_missing(recipe, shards, ray_options, reporter, announce)
            shards.publish(lambda _done, _errors: None)
    return open_artifact(out, verify_files=False)


def _make_missing(
    recipe: Recipe,
    shards: DraftShards,
    ray_options: RayOptions,
    reporter: Reporter,
    announce: Callable[[str], None],
) -> None:
    sizes, missing = shards.sizes, shards.missing()
    if not missing:
        return
    done, errors = sum(sizes) - sum(sizes[shard] for shard in missing), 0
    with reporter.stage(recipe.stage, sum(sizes), done=done) as meter:

        def show(shard: int, failed: int) -> None:
            nonlocal errors
            errors += failed
            meter.advance(sizes[shard], errors=errors)

        with ray_session(ray_options.address) as ray:
            memory = ray_options.memory_bytes(ray.cluster_resources())
            opener = contextmanager(recipe.within(memory).open)
            make_shards(ray, opener, missing, ray_options, on_made=show, on_wait=announce)


def _make_absolute(images: str) -> str:
    """Returns the location of images as other machines can open it."""
    return images if is_url(images) else str(Path(images).absolute())
