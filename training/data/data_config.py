"""The settings of reading: which images and labels, and how they are read."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mlcd.images.transform import DecodeMode
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.training.section import Section


class MixedSource(Section):
    """One of several data sets; each step takes a share of its samples from it."""

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

    decode: DecodeMode = "exact"
    """fast: decodes large JPEGs at a fraction of their size, with slightly different pixels."""
    memory_gib: Annotated[float, Field(ge=0)] = 4.0
    """The memory in GiB of each process for decoded images; others are decoded again in each epoch.
    An image counts as at most 3 (1.75 S)² / augment.min_area bytes, where S is model.image_size.
    """
    workers: Annotated[int, Field(ge=0)] | None = None
    """Decoding processes for each training process, where images are not held in memory. None: its
    share of the cores.
    """
    prefetch_steps: Annotated[int, Field(ge=1)] = 4
    """Steps that are decoded ahead."""


class DataConfig(ReadingConfig):
    """The data that the run trains on."""

    images: str | None = None
    """A folder, tar shards, parquet files or a zip."""
    labels: str | None = None
    """A labels artifact made from the same images."""
    selection: str | None = None
    """A selection of the same images by `mlcd curate`: the run is trained on those that it keeps.
    None: on all.
    """
    mix: tuple[MixedSource, ...] = ()
    """Several data sets with weights, instead of images and labels."""
    centers: str | None = None
    """Centers of the embedding's dimension that the classifier starts from. None: random ones, or
    those of model.start.
    """
    hold_out: Annotated[float, Field(ge=0, lt=1)] = HELD_OUT_FRACTION
    """The share of each class (or of all images) kept for evaluation, chosen by the hash of the
    key.
    """

    @model_validator(mode="after")
    def _one_form(self) -> Self:
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
