"""The input of evaluations: rows of an embeddings artifact, or images to encode.

Each process encodes its share. Batch boundaries depend only on the images' positions in their
source, so a row does not depend on the number of processes: matrix products round differently for
other batch sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import DIGEST_BYTES
from mlcd.artifacts.manifest import MANIFEST, Artifact, open_artifact
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.entries import Entries
from mlcd.images.prefetch import prepare_all
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import split_positions
from mlcd.models.runs import find_checkpoint, find_training_images, refuse_unfinished
from mlcd.models.servable import Servable
from mlcd.training.data.order import own_part
from mlcd.training.evaluation.splits import (
    LabeledRows,
    ListedKeys,
    Sides,
    Split,
    choose_split,
    folder_split,
    join_sides,
    key_split,
)
from mlcd.world import World

# embedding: of unit length, as served. pooled: the class token after the last norm, before the
# projection and not normalized, as in CLIP's protocol.
Features = Literal["embedding", "pooled"]

_BATCH: Final = 128


@dataclass(frozen=True)
class ImageSet:
    """The N images of known class in a source.

    splits: positions within the class, see mlcd.keys. own_split: the split of the source's folders
    if they are called train, val, valid or test.
    """

    source: Source
    entries: Entries
    splits: NDArray[np.float64]
    class_names: tuple[str, ...]
    own_split: Split | None = None

    def split(self, hold_out: float) -> Split:
        """Returns the split, like `LabeledRows.split`."""
        return choose_split(self.own_split, self.splits, hold_out)

    @property
    def location(self) -> str:
        return self.source.location

    @classmethod
    def of(cls, source: Source) -> Self:
        """Lists the images of `source`. Raises ConfigInvalid if no image has a known class."""
        entries = source.entries
        splits = split_positions(entries.keys(), entries.class_names())
        rows = np.flatnonzero([name is not None for name in entries.class_names()])
        if not len(rows):
            raise ConfigInvalid(
                f"no image of {source.location} has a known class",
                remedy="put the images into one sub-folder per class to evaluate",
            )
        class_names = [name for name in entries.class_names() if name is not None]
        split = None
        if (folders := folder_split(class_names, source.location)) is not None:
            split, class_names = folders
        return cls(source, entries.select(rows), splits[rows], tuple(class_names), split)

    @classmethod
    def of_keys(cls, source: Source, listed_keys: ListedKeys) -> Self:
        """Lists the images with these keys, with or without a class.

        Raises the errors of `ListedKeys.places`.
        """
        places = listed_keys.places(source.entries.key_column(), source.location)
        entries = source.entries.select(places)
        keys = list(entries.keys())
        positions = split_positions(keys, [None] * len(keys))
        return cls(source, entries, positions, ("",) * len(keys), key_split(keys))


@dataclass(frozen=True)
class _DecodedBatch:
    """A batch of decoded images.

    pixels: uint8 [b, 3, S, S], sha256: uint8 [b, 32], of the b images that can be decoded. usable:
    bool, for every image, whether it can be decoded.
    """

    pixels: NDArray[np.uint8]
    sha256: NDArray[np.uint8]
    usable: NDArray[np.bool_]


class PreparedImages:
    """Decodes an image set in batches; caches this process's share if it fits in `memory_bytes`."""

    def __init__(self, images: ImageSet, spec: PreprocessSpec, *, memory_bytes: float = 0) -> None:
        self.images, self._spec, self._memory_bytes = images, spec, memory_bytes
        self._cached: dict[tuple[int, int], list[_DecodedBatch]] = {}

    def batches(
        self, world: World, on_image: Callable[[], None] = lambda: None
    ) -> Iterator[_DecodedBatch]:
        """Yields this process's batches in order."""
        share = (world.rank, world.size)
        if share in self._cached:
            yield from self._cached[share]
            return
        num_batches = -(-len(self.images.entries) // _BATCH)
        batch_range = own_part(num_batches, world.rank, world.size)
        entries = self.images.entries[batch_range.start * _BATCH : batch_range.stop * _BATCH]
        decoded: list[_DecodedBatch] = []
        fits = len(entries) * 3 * self._spec.crop**2 <= self._memory_bytes
        for batch in self._decode(entries, on_image):
            if fits:
                decoded.append(batch)
            yield batch
        if fits:
            self._cached[share] = decoded

    def _decode(self, entries: Entries, on_image: Callable[[], None]) -> Iterator[_DecodedBatch]:
        pixels: list[NDArray[np.uint8]] = []
        digests: list[bytes] = []
        usable: list[bool] = []
        # torch's number of threads is this process's share of the cores.
        threads = torch.get_num_threads()
        for prepared in prepare_all(self.images.source, entries, self._spec, num_threads=threads):
            on_image()
            usable.append(prepared.pixels is not None)
            if prepared.pixels is not None:
                pixels.append(prepared.pixels)
                digests.append(prepared.sha256)
            if len(usable) == _BATCH:
                yield self._batch(pixels, digests, usable)
                pixels, digests, usable = [], [], []
        if usable:
            yield self._batch(pixels, digests, usable)

    def _batch(
        self, pixels: list[NDArray[np.uint8]], digests: list[bytes], usable: list[bool]
    ) -> _DecodedBatch:
        side = self._spec.crop
        stacked = np.stack(pixels) if pixels else np.empty((0, 3, side, side), dtype=np.uint8)
        return _DecodedBatch(stacked, digest_rows(digests), np.array(usable))


def digest_rows(digests: Sequence[bytes]) -> NDArray[np.uint8]:
    """Returns n SHA-256 digests as uint8 [n, 32]."""
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


@dataclass(frozen=True)
class ImageFeatures:
    """The features of the images that can be decoded.

    rows: float32 [n, D], sha256: uint8 [n, 32], of these n images, in order. usable: bool [N], for
    every image, whether it can be decoded.
    """

    rows: NDArray[np.float32]
    sha256: NDArray[np.uint8]
    usable: NDArray[np.bool_]


@torch.no_grad()
def encode(
    model: Servable,
    prepared: PreparedImages,
    *,
    features: Features,
    world: World,
    on_image: Callable[[], None] = lambda: None,
) -> ImageFeatures:
    """Encodes the images, each process its share; every process gets all rows."""
    config = model.trunk.config
    dimension = config.output_dim if features == "embedding" else config.width
    rows = [torch.empty((0, dimension))]
    digests = [digest_rows([])]
    usable = [np.empty(0, dtype=np.bool_)]
    for batch in prepared.batches(world, on_image):
        usable.append(batch.usable)
        digests.append(batch.sha256)
        if len(batch.pixels):
            rows.append(
                _features(
                    model, torch.from_numpy(batch.pixels).to(model.mean.device), features
                ).cpu()
            )
    all_usable = world.gather_rows(torch.from_numpy(np.concatenate(usable).astype(np.uint8)))
    return ImageFeatures(
        world.gather_rows(torch.cat(rows)).numpy(),
        world.gather_rows(torch.from_numpy(np.concatenate(digests))).numpy(),
        all_usable.numpy().astype(np.bool_),
    )


def _features(model: Servable, image_u8: Tensor, features: Features) -> Tensor:
    if features == "embedding":
        embedding: Tensor = model(image_u8)
        return embedding
    return model.embed(image_u8, "pooled").float()


@dataclass(frozen=True)
class Representation:
    """The samples with their features by one artifact.

    digest: of the artifact. train, test: names of the two sides.
    """

    digest: str
    samples: LabeledRows
    train: str
    test: str


def locate(path: Path) -> Artifact:
    """Opens the embeddings artifact, checkpoint or newest checkpoint of the run at `path`, without
    verifying its files.
    """
    refuse_unfinished(path)
    if not path.is_dir():
        raise NotFound(
            f"{path} does not exist", remedy="give checkpoints, runs or embeddings artifacts"
        )
    if (path / MANIFEST).is_file():
        artifact = open_artifact(path, verify_files=False)
        if artifact.kind == "embeddings":
            return artifact
    return open_artifact(find_checkpoint(path), "checkpoint", verify_files=False)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest suffix of each path such that all are distinct."""
    resolved = [path.resolve() for path in paths]
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]


def open_representation(
    artifact: Artifact,
    *,
    images: str | None = None,
    sides: Sides | None = None,
    features: Features = "embedding",
    world: World | None = None,
    device: torch.device | None = None,
    on_image: Callable[[], None] = lambda: None,
    listed: ListedKeys | None = None,
    may_be_unmatched: bool = False,
) -> Representation:
    """Reads an embeddings artifact, or encodes images.

    Each process encodes its share; every process gets all rows. artifact: with embeddings in
    `sides`, the test side. images: location; None uses the run's training images. device: None uses
    the CPU. listed: the samples, with or without a class; None takes all images of known class.
    """
    if artifact.kind == "embeddings":
        samples = _read_embeddings(artifact, sides, features, listed)
        name = images_name(artifact, None)
    else:
        open_artifact(artifact.path, verify_files=True)
        model = Servable.read(artifact.path / "weights").to(device or torch.device("cpu"))

        def encode_at(source: Source) -> LabeledRows:
            chosen = ImageSet.of(source) if listed is None else ImageSet.of_keys(source, listed)
            prepared = PreparedImages(chosen, model.preprocess)
            return encode_images(
                model, prepared, features=features, world=world or World(), on_image=on_image
            )

        if sides is not None and sides.kind == "images":
            samples, name = (
                join_sides(
                    *(encode_at(open_source(location)) for location in (sides.train, sides.test))
                ),
                "",
            )
        else:
            samples, name = encode_at(images_of(artifact, images)), images_name(artifact, images)
    if sides is not None and sides.kind == "keys":
        samples = sides.choose(samples, may_be_unmatched=may_be_unmatched)
    return Representation(artifact.digest, samples, *_side_names(name, samples, sides))


def _read_embeddings(
    artifact: Artifact,
    sides: Sides | None,
    features: Features,
    listed: ListedKeys | None,
) -> LabeledRows:
    test = EmbeddingsArtifact.open(artifact.path)
    if listed is not None:
        return _select_stored(test, listed, features)
    if sides is None or sides.kind != "embeddings":
        return _read_stored(test, features)
    train = EmbeddingsArtifact.open(Path(sides.train))
    if train.fingerprint != test.fingerprint:
        raise ConfigInvalid(
            f"{sides.train} and {sides.test} must be by the same model",
            remedy="embed both with one model",
        )
    return join_sides(_read_stored(train, features), _read_stored(test, features))


def _side_names(name: str, samples: LabeledRows, sides: Sides | None) -> tuple[str, str]:
    """Returns the names of the known and of the tested samples."""
    if sides is not None:
        return sides.names
    if samples.own_split is None or samples.own_split.folders is None:
        return name, name
    train, test = samples.own_split.folders
    return f"{name}/{train}", f"{name}/{test}"


def images_of(artifact: Artifact, images: str | None) -> Source:
    """Opens the images to evaluate a checkpoint on: `images`, or its training images if None."""
    location = images or find_training_images(artifact)
    if location is None:
        raise NotFound(
            f"the training images of {artifact.path} are no longer at their path",
            remedy="give their location with --images",
        )
    return open_source(location)


def images_name(artifact: Artifact, images: str | None) -> str:
    """Returns the name of the evaluated images: the last part of their path."""
    paths = [parent.path for parent in artifact.parents if parent.role == "images"]
    return PurePosixPath(images or (paths[0] if paths else artifact.path.name)).name


def encode_images(
    model: Servable,
    prepared: PreparedImages,
    *,
    features: Features,
    world: World,
    on_image: Callable[[], None] = lambda: None,
) -> LabeledRows:
    """Returns the features of the images that can be decoded."""
    encoded = encode(model, prepared, features=features, world=world, on_image=on_image)
    images = prepared.images
    usable = np.flatnonzero(encoded.usable)
    if len(usable) == 0:
        raise InvalidInput(f"no image of {images.location} can be decoded")
    return LabeledRows(
        encoded.rows,
        list(images.entries.select(usable).keys()),
        images.splits[usable],
        [images.class_names[index] for index in usable],
        None if images.own_split is None else images.own_split.of(usable),
        encoded.sha256,
    )


def _select_stored(
    stored: EmbeddingsArtifact, listed: ListedKeys, features: Features
) -> LabeledRows:
    _check_features(stored, features)
    rows = listed.places(stored.keys, str(stored.artifact.path)).tolist()
    keys = [stored.keys[row] for row in rows]
    return LabeledRows(
        stored.load()[rows],
        keys,
        split_positions(keys, [None] * len(keys)),
        [""] * len(keys),
        key_split(keys),
        digest_rows([stored.image_sha256[row] for row in rows]),
    )


def _check_features(stored: EmbeddingsArtifact, features: Features) -> None:
    if features != "embedding":
        raise ConfigInvalid(
            f"--features {features} requires a checkpoint or a run, got the embeddings"
            f" {stored.artifact.path}",
            remedy="give a checkpoint or a run",
        )


def _read_stored(stored: EmbeddingsArtifact, features: Features) -> LabeledRows:
    _check_features(stored, features)
    rows = [row for row, class_name in enumerate(stored.class_names) if class_name is not None]
    if not rows:
        raise ConfigInvalid(
            f"no image of {stored.artifact.path} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    class_names, split = [str(stored.class_names[row]) for row in rows], None
    if (folders := folder_split(class_names)) is not None:
        split, class_names = folders
    return LabeledRows(
        stored.load()[rows],
        [stored.keys[row] for row in rows],
        stored.splits[rows],
        class_names,
        split,
        digest_rows([stored.image_sha256[row] for row in rows]),
    )
