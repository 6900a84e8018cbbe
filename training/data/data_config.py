"""The settings of the data: which images and labels a run reads, and how."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mlcd.images.transform import DecodeMode
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.training.section import Section

TrainingDecodeMode = Literal[DecodeMode, "device"]


class MixedSource(Section):
    """One of several data sets that each step takes samples from."""

    images: str
    """The images, as in data.images."""
    labels: str
    """The labels, as in data.labels. All data sets of a mixture must share the same centers."""
    selection: str | None = None
    """The selection, as in data.selection."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The share of the samples, relative to the other weights."""


class ReadingConfig(Section):
    """The way images are read."""

    decode: TrainingDecodeMode = "exact"
    """fast: decodes large JPEGs at a fraction of their size, with slightly different pixels.
    device: decodes and crops JPEGs on the GPU in each epoch, by nvImageCodec (extra train-gpu); the
    CPU decodes the other images, in data.workers threads.
    """
    memory_gib: Annotated[float, Field(ge=0)] = 4.0
    """The memory in GiB of each process for decoded images. If they fit, each is decoded once, else
    in each epoch. An image counts as 3 (1.75 S)² / A bytes, where S is the side and A the smallest
    area share of a view, here model.image_size and augment.min_area.
    """
    workers: Annotated[int, Field(ge=0)] | None = None
    """The number of decoding processes of each training process, if the images do not fit in
    memory_gib. None: its share of the cores.
    """
    prefetch_steps: Annotated[int, Field(ge=1)] = 4
    """The number of steps whose images are decoded ahead."""


class DataConfig(ReadingConfig):
    """The data that the run trains on."""

    images: str | None = None
    """A folder, tar shards, parquet files or a zip."""
    labels: str | None = None
    """A labels artifact made from the same images."""
    selection: str | None = None
    """A selection of the same images by `mlcd curate`: the run is trained on the selected images.
    None: on all.
    """
    mix: tuple[MixedSource, ...] = ()
    """Several data sets with weights, instead of images and labels."""
    centers: str | None = None
    """Centers that the classifier starts from, of the embedding's dimension. None: random centers,
    or the centers of model.start.
    """
    hold_out: Annotated[float, Field(ge=0, lt=1)] = HELD_OUT_FRACTION
    """The share of each class, or of all images without classes, that is held out for evaluation,
    chosen by the hash of the key.
    """

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        single = (self.images, self.labels)
        if self.mix and (*single, self.selection) != (None, None, None):
            raise ValueError("give data.images and data.labels, or data.mix, not both")
        if not self.mix and None in single:
            missing = [
                name
                for name, location in zip(("images", "labels"), single, strict=True)
                if location is None
            ]
            raise PydanticCustomError("missing", "not set", {"names": missing})
        return self

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        """The data sets of the run, one or several."""
        if self.mix:
            return self.mix
        assert self.images is not None
        assert self.labels is not None
        return (MixedSource(images=self.images, labels=self.labels, selection=self.selection),)
