"""The test images of zero-shot and retrieval: a source of images, or an embeddings artifact."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, Parent
from mlcd.errors import ConfigInvalid
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.pipelines.encoded import images_parent
from mlcd.progress import Reporter
from mlcd.training.evaluation.representations import digest_rows
from mlcd.training.evaluation.splits import folder_split
from mlcd.training.evaluation.texts.images_and_texts import ImageRows, TextImageModel
from mlcd.types import SampleKey


class TestImages(Protocol):
    """All images at a location, from which the test images are chosen.

    class_names: None for images of unknown class.
    """

    location: str

    @property
    def keys(self) -> list[SampleKey]: ...

    @property
    def class_names(self) -> list[str | None]: ...

    def parent(self, out: Path) -> Parent: ...

    def rows(
        self, model: TextImageModel, indices: NDArray[np.int64], reporter: Reporter
    ) -> ImageRows:
        """Returns the embeddings of the images at `indices`, except of undecodable ones."""
        ...


class SourceTestImages:
    """Implements `TestImages` for a source, whose images are encoded."""

    def __init__(self, source: Source) -> None:
        self.source, self.location = source, source.location

    @cached_property
    def keys(self) -> list[SampleKey]:
        return list(self.source.entries.keys())

    @cached_property
    def class_names(self) -> list[str | None]:
        return list(self.source.entries.class_names())

    def parent(self, out: Path) -> Parent:
        return images_parent(self.source, out)

    def rows(
        self, model: TextImageModel, indices: NDArray[np.int64], reporter: Reporter
    ) -> ImageRows:
        return model.image_rows(self.source, self.source.entries.select(indices), reporter)


class EmbeddedTestImages:
    """Implements `TestImages` for an embeddings artifact of the same model."""

    def __init__(self, embeddings: EmbeddingsArtifact) -> None:
        self.embeddings, self.location = embeddings, str(embeddings.artifact.path)

    @property
    def keys(self) -> list[SampleKey]:
        return self.embeddings.keys

    @property
    def class_names(self) -> list[str | None]:
        return self.embeddings.class_names

    def parent(self, out: Path) -> Parent:
        return self.embeddings.artifact.as_parent_of(out, "images")

    def rows(
        self, model: TextImageModel, indices: NDArray[np.int64], reporter: Reporter
    ) -> ImageRows:
        del reporter  # reading is fast
        if self.embeddings.fingerprint != model.texts.fingerprint:
            raise ConfigInvalid(
                f"{self.location} was not made by {model.artifact.path}",
                remedy="embed the images with this model, or give the images themselves",
            )
        digests = self.embeddings.image_sha256
        return ImageRows(
            self.embeddings.load()[indices],
            [self.keys[row] for row in indices.tolist()],
            digest_rows([digests[row] for row in indices.tolist()]),
        )


def open_test_images(location: str) -> TestImages:
    """Opens an embeddings artifact, or a source of images."""
    if (Path(location) / MANIFEST).is_file():
        return EmbeddedTestImages(EmbeddingsArtifact.open(Path(location)))
    source = open_source(location)
    source.check_not_empty()
    return SourceTestImages(source)


@dataclass(frozen=True)
class LabeledTestImages:
    """The n test images of known class.

    indices: [n], among all images of the location. class_names: [n]. all_classes: sorted class
    names of all images, including those of other parts of a split.
    """

    indices: NDArray[np.int64]
    class_names: list[str]
    all_classes: list[str]


def choose_classes(test_images: TestImages) -> LabeledTestImages:
    """Returns the images of known class.

    If the top folders are the parts of a split (train, test, …), returns only those of the test
    part.
    """
    labeled_indices = np.flatnonzero([name is not None for name in test_images.class_names])
    if not len(labeled_indices):
        raise ConfigInvalid(
            f"no image of {test_images.location} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    class_names = [name for name in test_images.class_names if name is not None]
    if (split := folder_split(class_names, test_images.location)) is None:
        return LabeledTestImages(labeled_indices, class_names, sorted(set(class_names)))
    folder_parts, classes_in_parts = split
    indices = np.flatnonzero(folder_parts.test)
    return LabeledTestImages(
        labeled_indices[indices],
        [classes_in_parts[index] for index in indices.tolist()],
        sorted(set(classes_in_parts)),
    )
