"""The unit of work of a batch job: one shard of what `mlcd label`, `mlcd embed` and `mlcd index` make.

`open_shards` lists the input and writes nothing. Then any process can make any shard, at any time and as often as it
likes: what it leaves has the same bytes. Once all are made, `publish` gives the artifact its place. Who gives out the
shards, a queue or another engine, is unknown here.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from mlcd.artifact import Artifact, Draft, Request, draft_path, find_published, refuse_full_disk
from mlcd.clustering.centers import Centers
from mlcd.collections.collection import LEDGER
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.encoders.base import Encoder
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput
from mlcd.images.entries import Entries
from mlcd.images.sources import Source, open_source
from mlcd.pipelines.embed import Embedding
from mlcd.pipelines.encoded import PART_ENTRIES, OnDone, check_source, num_errors
from mlcd.pipelines.index import index
from mlcd.pipelines.label import LabelOptions, labeling_of
from mlcd.pipelines.label_inputs import ImagesInput
from mlcd.progress import Reporter

_OWNER: Final = ".owner.json"
_EMBEDDINGS: Final = ".embeddings"
_DISCARDED: Final = ".discarded"


class InputChanged(Conflict):
    """What is listed now is not what the shards were planned for: none of them can be made any more."""


@dataclass(frozen=True)
class Recipe:
    """What is made, in plain values that travel as JSON.

    source: images. out: of label and embed the artifact, of index a collection, whose embeddings stand beside it at
    OUT.embeddings. owner: whose work the unfinished output is. part_entries: images of one shard.
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
    """Centers, and the artifact that they were read from."""

    artifact: Artifact
    centers: Centers


@dataclass(frozen=True)
class Equipment:
    """What a process opens once, for all shards that it makes.

    num_threads: that decode. in_flight: batches that the encoder is given at one time.
    """

    encoder: Encoder
    centers: CenterSet | None
    num_threads: int
    in_flight: int = 1


class Shards(Protocol):
    """A recipe with its input listed. `on_done` may raise, to stop: no part is half made then."""

    sizes: list[int]
    """Images of each shard."""

    def plan(self) -> None:
        """Begin the output. Raises Conflict where something else stands there, or is being made."""
        ...

    def make(self, shard: int, on_done: OnDone) -> int:
        """Write one shard; does nothing where it is there. Returns how many of its images have no result.

        Raises InputChanged, and Conflict where a file of its images changed meanwhile.
        """
        ...

    def publish(self, on_done: OnDone) -> None:
        """The output at its place, made whole first where a shard is missing; does nothing where it is there.

        Raises InvalidInput where no image could be used.
        """
        ...


def open_shards(
    recipe: Recipe, equipment: Equipment, *, check_files: Callable[[Sequence[str]], None] = lambda _: None
) -> Shards:
    """check_files: told which files a shard is made of, before they are read; what it raises, `make` raises.

    Raises NotFound or InvalidInput where there is no input, ConfigInvalid where labels lack centers of the model.
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
        return _Made(_labeling(recipe, rows, equipment, out), rows, out, recipe.owner, check_files)
    place = out if recipe.kind == "embed" else out.with_name(out.name + _EMBEDDINGS)
    embedding = Embedding(
        source,
        equipment.encoder,
        place,
        num_threads=equipment.num_threads,
        part_entries=recipe.part_entries,
        in_flight=equipment.in_flight,
    )
    made = _Made(embedding, embedding, place, recipe.owner, check_files)
    return made if recipe.kind == "embed" else _Indexed(made, place, out)


def _labeling(recipe: Recipe, rows: ImagesInput, equipment: Equipment, out: Path) -> "_Making":
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


class _Making(Protocol):
    """`Labeling`, `Embedding`."""

    request: Request
    sizes: list[int]

    def has(self, draft: Draft, part: int) -> bool: ...

    def make(self, draft: Draft, part: int, on_done: OnDone) -> None: ...

    def publish(self, draft: Draft) -> Artifact: ...


class _Images(Protocol):
    """`ImagesInput`, `Embedding`."""

    source: Source

    def entries(self, part: int) -> Entries: ...


class _Made:
    """The `Shards` protocol over an artifact made in parts of `images`."""

    def __init__(
        self, making: _Making, images: _Images, out: Path, owner: str, check_files: Callable[[Sequence[str]], None]
    ) -> None:
        self._making, self._images, self._out, self._owner = making, images, out, owner
        self._check_files = check_files
        self.sizes = making.sizes

    def plan(self) -> None:
        if not self._published():
            with self._entered():
                pass

    def make(self, shard: int, on_done: OnDone) -> int:
        if self._published():
            return 0
        with self._entered() as draft:
            self._make(draft, shard, on_done)
            return num_errors(draft, shard)

    def _make(self, draft: Draft, shard: int, on_done: OnDone) -> None:
        if not self._making.has(draft, shard):
            self._check_files(self._images.source.files_of(self._images.entries(shard)))
            self._making.make(draft, shard, self._checking(shard, on_done))

    def publish(self, on_done: OnDone) -> None:
        if self._published():
            return
        try:
            with self._entered() as draft:
                for shard in range(len(self.sizes)):
                    on_done(0, 0)
                    self._make(draft, shard, on_done)
                self._making.publish(draft)
        except InvalidInput:
            _discard_draft(self._out, self._owner)  # nothing in it can ever be finished
            raise

    def _published(self) -> bool:
        return find_published(self._out, self._making.request) is not None

    @contextmanager
    def _entered(self) -> Iterator[Draft]:
        draft = Draft(self._out, self._making.request, shared=True)
        self._check_begun(draft)
        try:
            with draft:
                if _owner_of(draft.path) != self._owner:
                    draft.write_json(_OWNER, self._owner)
                yield draft
        except OSError as error:  # while it was entered
            refuse_full_disk(error, self._out)
            raise

    def _check_begun(self, draft: Draft) -> None:
        begun = draft.begun()
        if begun is None or _owner_of(draft.path) != self._owner:
            return  # the draft itself refuses what is somebody else's
        ours = json.loads(json.dumps(self._making.request.identity()))
        if begun["parents"] != ours["parents"]:
            raise InputChanged(
                "the input has changed since the work was planned", remedy="begin again, with another output"
            )
        if begun != ours:
            raise ConfigInvalid(
                f"{draft.path} was begun with another engine, precision or size of shards",
                remedy="start every worker with the same settings",
            )

    def _checking(self, shard: int, on_done: OnDone) -> OnDone:
        """Looks at the files once more when all are read, and nothing is written."""
        checked = False

        def told(done: int, errors: int) -> None:
            nonlocal checked
            if done == self.sizes[shard] and not checked:
                checked = True
                self._images.source.check_unchanged(self._images.entries(shard))
            on_done(done, errors)

        return told


class _Indexed:
    """The `Shards` protocol: embeddings, and when they are published a collection of them."""

    def __init__(self, embeddings: _Made, place: Path, out: Path) -> None:
        self._embeddings, self._place, self._out = embeddings, place, out
        self.sizes = embeddings.sizes

    def plan(self) -> None:
        _check_free(self._out)
        self._embeddings.plan()

    def make(self, shard: int, on_done: OnDone) -> int:
        return self._embeddings.make(shard, on_done)

    def publish(self, on_done: OnDone) -> None:
        self._embeddings.publish(on_done)
        _collect(EmbeddingsArtifact.open(self._place), self._out)


def _check_free(out: Path) -> None:
    """Whether a collection is the one that is asked for is seen when it is filled."""
    if out.exists() and not (out / LEDGER).is_file():
        raise Conflict(f"{out} exists and is not a collection", remedy="give another output directory")


def _collect(embeddings: EmbeddingsArtifact, out: Path) -> None:
    """A collection of these rows at `out`, all of them or none."""
    silent = Reporter("silent")
    if out.exists():  # published by an attempt that could not tell it
        index(embeddings, out, silent, recall=None)
        return
    building = draft_path(out)
    try:
        index(embeddings, building, silent, recall=None)
        building.rename(out)
    except OSError as error:
        refuse_full_disk(error, out)
        raise


def discard(recipe: Recipe) -> None:
    """Remove the unfinished output of this owner; one that is finished, or another's, stays."""
    out = Path(recipe.out)
    if recipe.kind != "index":
        _discard_draft(out, recipe.owner)
        return
    _discard_draft(out.with_name(out.name + _EMBEDDINGS), recipe.owner)
    _finish_removal(draft_path(out))
    if (draft_path(out) / LEDGER).is_file():
        _remove(draft_path(out))


def _discard_draft(out: Path, owner: str) -> None:
    path = draft_path(out)
    _finish_removal(path)
    if _owner_of(path) == owner:
        _remove(path)


def _remove(path: Path) -> None:
    """At once for everybody who looks, then file by file."""
    path.rename(_leaving(path))
    _finish_removal(path)


def _finish_removal(path: Path) -> None:
    """Also of one that was interrupted."""
    shutil.rmtree(_leaving(path), ignore_errors=True)


def _leaving(path: Path) -> Path:
    return path.with_name(f".{path.name}{_DISCARDED}")


def _owner_of(path: Path) -> Any:
    try:
        return json.loads((path / _OWNER).read_text())
    except FileNotFoundError:
        return None
