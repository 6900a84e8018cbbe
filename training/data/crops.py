"""Crops of pictures as the model's input: one for each view, resized in one go, uint8 [3, S, S]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mlcd.errors import ImageRejected
from mlcd.images.sources import open_source
from mlcd.images.transform import DecodeMode
from mlcd.training.data.augment import Augmentation, crop_boxes
from mlcd.training.data.pictures import DecodedPictures, Picture, Pictures, Sample, picture_side


@dataclass(frozen=True)
class Crops:
    """Some samples, decoded and cropped.

    views: for each view uint8 [k, 3, S, S]. usable: the indices of the k samples among the
    requested ones. rejected: the remaining ones, by index, with the reason. changed: the indices of
    images that differ from those that were labeled; they are among the usable.
    """

    views: tuple[Tensor, ...]
    usable: tuple[int, ...]
    rejected: dict[int, str]
    changed: tuple[int, ...]


class CropReader(Protocol):
    """Crops samples; safe to call from several threads."""

    def read(self, samples: Sequence[Sample]) -> Crops: ...


class PictureCrops:
    """Reads pictures and crops them."""

    def __init__(self, pictures: Pictures, augmentation: Augmentation) -> None:
        self._pictures, self._augmentation = pictures, augmentation

    @classmethod
    def open(
        cls, locations: Sequence[str], mode: DecodeMode, augmentation: Augmentation
    ) -> "PictureCrops":
        """Opens the reader in a process of its own.

        The sources are opened but not listed, because samples carry their entries.
        """
        side = picture_side(augmentation.image_size, augmentation.config)
        sources = [open_source(location) for location in locations]
        return cls(DecodedPictures(sources, side, mode), augmentation)

    def read(self, samples: Sequence[Sample]) -> Crops:
        pictures: dict[int, Picture] = {}
        rejected: dict[int, str] = {}
        for index, sample in enumerate(samples):
            try:
                pictures[index] = self._pictures.read(sample)
            except ImageRejected as rejection:
                rejected[index] = rejection.message
        positions = [samples[index].position for index in pictures]
        return Crops(
            crop_pictures(list(pictures.values()), positions, self._augmentation),
            tuple(pictures),
            rejected,
            tuple(index for index, picture in pictures.items() if picture.changed),
        )


def crop_pictures(
    pictures: Sequence[Picture], positions: Sequence[int], augmentation: Augmentation
) -> tuple[Tensor, ...]:
    """Returns the crops of each view, uint8 [n, 3, S, S]; each depends on its own picture, position
    and view only.
    """
    config = augmentation.config
    widths = np.array([picture.width for picture in pictures], dtype=np.int64)
    heights = np.array([picture.height for picture in pictures], dtype=np.int64)
    drawn = np.array(positions, dtype=np.int64)
    sizes = [config.size_of(view, augmentation.image_size) for view in range(config.num_views)]
    boxes = [
        crop_boxes(widths, heights, drawn, config, augmentation.seed, view)
        for view in range(config.num_views)
    ]
    views = [np.empty((len(pictures), 3, size, size), dtype=np.uint8) for size in sizes]
    for index, picture in enumerate(pictures):
        image = Image.fromarray(picture.pixels)
        for pixels, size, of_view in zip(views, sizes, boxes, strict=True):
            crop = _crop(image, picture, of_view.corners(index), size)
            mirrored = of_view.mirrored[index]
            pixels[index] = (crop[:, ::-1] if mirrored else crop).transpose(2, 0, 1)
    return tuple(torch.from_numpy(pixels) for pixels in views)


def _crop(
    image: Image.Image, picture: Picture, box: tuple[float, float, float, float], size: int
) -> NDArray[np.uint8]:
    """Returns uint8 [size, size, 3] for the box, which is in the full picture's pixels.

    image: the pixels of `picture`.
    """
    width, height = image.size
    x, y = width / picture.width, height / picture.height
    left, top, right, bottom = box
    region = (left * x, top * y, min(right * x, width), min(bottom * y, height))
    return np.asarray(
        image.resize((size, size), Image.Resampling.BICUBIC, box=region), dtype=np.uint8
    )
