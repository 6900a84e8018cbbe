"""Crops and resizes pictures, in one operation, to the model's input: uint8 [3, S, S] per view."""

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
    """Decoded and cropped samples.

    views: for each view uint8 [k, 3, S, S]. usable: indices of the k samples in the request.
    rejected: reasons by index of the remaining samples. changed: those of the usable indices whose
    image differs from the labeled image. num_on_cpu: number of samples that the device left to the
    CPU, with data.decode=device.
    """

    views: tuple[Tensor, ...]
    usable: tuple[int, ...]
    rejected: dict[int, str]
    changed: tuple[int, ...]
    num_on_cpu: int = 0


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
        """Opens the sources in a worker, without listing them: samples contain their entries."""
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
    """Returns the crops of each view, uint8 [n, 3, S, S]; a crop depends only on its picture,
    position and view.
    """
    config = augmentation.config
    widths = np.array([picture.width for picture in pictures], dtype=np.int64)
    heights = np.array([picture.height for picture in pictures], dtype=np.int64)
    stream_positions = np.array(positions, dtype=np.int64)
    sizes = [config.size_of(view, augmentation.image_size) for view in range(config.num_views)]
    boxes = [
        crop_boxes(widths, heights, stream_positions, config, augmentation.seed, view)
        for view in range(config.num_views)
    ]
    views = [np.empty((len(pictures), 3, size, size), dtype=np.uint8) for size in sizes]
    for index, picture in enumerate(pictures):
        image = Image.fromarray(picture.pixels)
        for pixels, size, view_boxes in zip(views, sizes, boxes, strict=True):
            crop = _crop(image, picture, view_boxes.corners(index), size)
            mirrored = view_boxes.mirrored[index]
            pixels[index] = (crop[:, ::-1] if mirrored else crop).transpose(2, 0, 1)
    return tuple(torch.from_numpy(pixels) for pixels in views)


def _crop(
    image: Image.Image, picture: Picture, box: tuple[float, float, float, float], size: int
) -> NDArray[np.uint8]:
    """Returns the crop, uint8 [size, size, 3].

    image: the pixels of `picture`, maybe shrunk. box: in pixels of the picture's full size.
    """
    width, height = image.size
    x, y = width / picture.width, height / picture.height
    left, top, right, bottom = box
    region = (left * x, top * y, min(right * x, width), min(bottom * y, height))
    return np.asarray(
        image.resize((size, size), Image.Resampling.BICUBIC, box=region), dtype=np.uint8
    )
