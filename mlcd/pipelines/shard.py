"""The task of a batch job: a share of the work of `mlcd label`, `mlcd embed` or `mlcd index`.

`open_shards` lists the input and writes nothing. Then any process can make any shard, at any time
and as often as it likes; its files always have the same bytes. Once all are made, `publish` moves
the artifact to its final path. This module does not know what distributes the shards, a queue or
another engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import Artifact, draft_path
from mlcd.encoders.base import Encoder
from mlcd.errors import ConfigInvalid
from mlcd.images.sources import open_source
from mlcd.parts import ownership
from mlcd.parts.encoded import PART_ENTRIES, OnDone, check_source
from mlcd.parts.label_inputs import ImagesInput
from mlcd.parts.ownership import NotRemoved
from mlcd.pipelines.embed import Embedding
from mlcd.pipelines.label import LabelOptions, labeling_of
from mlcd.pipelines.shard_collection import EMBEDDINGS, CollectionShards
from mlcd.pipelines.shard_parts import InputChanged, Making, OtherSettings, OutputGone, PartShards

__all__ = [
    "CenterSet",
    "Equipment",
    "InputChanged",
    "NotRemoved",
    "OtherSettings",
    "OutputGone",
    "Recipe",
    "Shards",
    "discard",
    "open_shards",
]


@dataclass(frozen=True)
class Recipe:
    """The description of a result, in plain values that travel as JSON.

    source: images. out: the artifact of label and embed, the collection of index. owner: the owner
    of the unfinished output, all of which is in `draft_path(out)`. part_entries: images of one
    shard.
    """

    kind: Literal["label", "embed", "index"]
    source: str
    out: str
    owner: str
    top: int = 8
    threshold: float | None = None
    embeddings: bool = False
    part_entries: int = PART_ENTRIES


@dataclass(frozen=True)
class CenterSet:
    """The centers, and the artifact that they were read from."""

    artifact: Artifact
    centers: Centers


@dataclass(frozen=True)
class Equipment:
    """The things that a process opens once for all shards that it makes.

    num_threads: those that decode. in_flight: batches that the encoder gets at one time.
    """

    encoder: Encoder
    centers: CenterSet | None
    num_threads: int
    in_flight: int = 1


class Shards(Protocol):
    """A recipe with its input listed. `on_done` may raise to stop the work, and then leaves no part
    half made.
    """

    # images of each shard
    sizes: list[int]
    # files of the input that could not be listed, or not to their end
    damaged_files: int

    def plan(self) -> None:
        """Begins the output. Raises Conflict where something else is there, or is being made."""
        ...

    def check(self) -> None:
        """Checks that the input is as it was planned. Raises InputChanged, OtherSettings,
        OutputGone.
        """
        ...

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        """Writes one shard, unless it exists, and returns how many of its images have no result.

        Raises InputChanged, OtherSettings, OutputGone, and Conflict where a file of its images
        changed meanwhile. Except on the last try it raises Unavailable where the file system failed
        to give some images, so that a passing fault does not lose them.
        """
        ...

    def publish(self, on_done: OnDone) -> None:
        """Publishes the output, unless it is there; a missing shard is made first.

        For a collection `on_done` gets (done, 0). It first counts the images in the collection,
        those without an embedding included, and then, from the number of all images on, those in
        its index.

        Raises InvalidInput where no image could be used.
        """
        ...


def open_shards(
    recipe: Recipe,
    equipment: Equipment,
    *,
    check_files: Callable[[Sequence[str]], None] = lambda _: None,
) -> Shards:
    """Lists the input of a recipe.

    check_files: is called with the files of a shard before they are read; `make` raises what it
    raises.

    Raises NotFound or InvalidInput where there is no input, ConfigInvalid where labels lack centers
    of the model.
    """
    out = Path(recipe.out)
    source = open_source(recipe.source)
    if recipe.kind == "label":
        check_source(source, out)
        rows = ImagesInput(
            source,
            equipment.encoder,
            part_entries=recipe.part_entries,
            num_threads=equipment.num_threads,
            in_flight=equipment.in_flight,
        )
        return PartShards(
            _labeling(recipe, rows, equipment, out), rows, out, recipe.owner, check_files
        )
    place = out if recipe.kind == "embed" else draft_path(out) / EMBEDDINGS
    embedding = Embedding(
        source,
        equipment.encoder,
        place,
        num_threads=equipment.num_threads,
        part_entries=recipe.part_entries,
        in_flight=equipment.in_flight,
    )
    made = PartShards(embedding, embedding, place, recipe.owner, check_files)
    return made if recipe.kind == "embed" else CollectionShards(made, source, out, recipe.owner)


def _labeling(recipe: Recipe, rows: ImagesInput, equipment: Equipment, out: Path) -> Making:
    if equipment.centers is None:
        raise ConfigInvalid("there are no centers to label with", remedy="give --centers")
    artifact, centers = equipment.centers.artifact, equipment.centers.centers
    options = LabelOptions(
        recipe.source,
        str(artifact.path),
        top=recipe.top,
        threshold=recipe.threshold,
        embeddings=recipe.embeddings,
        part_entries=recipe.part_entries,
    )
    return labeling_of(options, rows, artifact, centers, out)


def discard(recipe: Recipe) -> None:
    """Removes the unfinished output of this owner; a finished output, or that of another owner,
    stays.

    Raises Conflict where another process works in it, NotRemoved where the file system keeps it.
    """
    ownership.discard(draft_path(Path(recipe.out)), recipe.owner)
