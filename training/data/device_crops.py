"""Decodes JPEGs on the device of the run, by NVIDIA's nvImageCodec, and crops them there.

It takes JPEGs of which all decoders have the same idea. The others, and those that it refuses, take
the way of `data.decode=exact`, pixel for pixel, so that the same images are accepted. The boxes of
the crops depend on seed, position and size alone: they are the same whatever decodes. Pictures are
shrunk and cropped in the two steps of the CPU, by Pillow's filter in float64, which leaves the
rounding of sums, and so the batch, without effect.

A run on the CPU decodes by nvImageCodec's libjpeg-turbo, which is of use for tests.
"""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mlcd.errors import ImageRejected
from mlcd.images.decode import (
    BOTTOM_TO_TOP,
    RIGHT_TO_LEFT,
    SIDEWAYS,
    OpenedImage,
    open_image,
    turn_of,
)
from mlcd.images.jpeg import is_plain, require_simplejpeg
from mlcd.images.nvimgcodec import NvDecoder, require_nvimgcodec
from mlcd.images.source import Source
from mlcd.training.data.augment import Augmentation, crop_boxes
from mlcd.training.data.crops import Crops, crop_pictures
from mlcd.training.data.data_config import TrainingDecodeMode
from mlcd.training.data.pictures import (
    Picture,
    Sample,
    open_picture,
    picture_side,
    shrunk_size,
)

# Larger images are decoded on the CPU. They bound the memory of a chunk: 32 decoded pictures, and
# one of them in float64.
_MAX_PIXELS: Final = 1 << 24
_MAX_SIDE: Final = 1 << 13

_Span = tuple[NDArray[np.float64], NDArray[np.float64]]  # starts and lengths, [B] each


def require_decoder(mode: TrainingDecodeMode) -> None:
    """Raises ConfigInvalid, with the install command, if the package of a mode is missing."""
    if mode == "fast":
        require_simplejpeg()
    if mode == "device":
        require_nvimgcodec()


class _DevicePicture(NamedTuple):
    """An upright picture: uint8 [h, w, 3] on the device, maybe shrunk; its full size in pixels."""

    pixels: Tensor
    width: int
    height: int


class DeviceCrops:
    """Reads samples, decodes and crops them; safe to call from several threads.

    Raises ConfigInvalid if the device decodes no JPEG.
    """

    def __init__(
        self, sources: Sequence[Source], augmentation: Augmentation, device: torch.device
    ) -> None:
        self._sources, self._augmentation, self._device = sources, augmentation, device
        self._side = picture_side(augmentation.image_size, augmentation.config)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One thread at a time decodes on the device: a chunk is decoded in parallel anyway, and its
        # memory is bounded.
        self._lock = threading.Lock()
        self._decoder = (
            NvDecoder(None)
            if self._stream is None
            else NvDecoder(self._stream.device_index, self._stream.cuda_stream)
        )

    def read(self, samples: Sequence[Sample]) -> Crops:
        """Returns the crops of the samples, on the device."""
        opened: dict[int, OpenedImage] = {}
        rejected: dict[int, str] = {}
        changed: set[int] = set()
        for index, sample in enumerate(samples):
            try:
                data = self._sources[sample.part].read(sample.entry)
                opened[index] = open_image(data)
            except ImageRejected as rejection:
                rejected[index] = rejection.message
                continue
            if sample.sha256 is not None and hashlib.sha256(data).digest() != sample.sha256:
                changed.add(index)
        with self._lock, torch.cuda.stream(self._stream):
            decoded = self._decode(opened)
            views = self._crop(decoded, [samples[index].position for index in decoded])
        pictures: dict[int, Picture] = {}
        for index in sorted(opened.keys() - decoded.keys()):
            try:
                pictures[index] = open_picture(opened[index], self._side, "exact")
            except ImageRejected as rejection:
                rejected[index] = rejection.message
        positions = [samples[index].position for index in pictures]
        on_host = crop_pictures(list(pictures.values()), positions, self._augmentation)
        indices = [*decoded, *pictures]
        with torch.cuda.stream(self._stream):
            order = torch.from_numpy(np.argsort(indices)).to(self._device)
            views = [
                torch.cat([crops, host.to(self._device)])[order]
                for crops, host in zip(views, on_host, strict=True)
            ]
            if self._stream is not None:
                self._stream.synchronize()
        usable = tuple(sorted(indices))
        return Crops(
            tuple(views),
            usable,
            rejected,
            tuple(sorted(changed.intersection(usable))),
            len(pictures),
        )

    def _decode(self, images: Mapping[int, OpenedImage]) -> dict[int, _DevicePicture]:
        """Returns the pictures that the device decodes, by index."""
        plain = {index: image for index, image in images.items() if _is_for_device(image)}
        decoded = {}
        arrays = self._decoder.decode(list(plain.values()))
        for (index, image), array in zip(plain.items(), arrays, strict=True):
            if array is not None:
                # On the host its DLPack needs a CUDA driver.
                on_host = self._stream is None
                pixels = torch.from_numpy(np.asarray(array)) if on_host else from_dlpack(array)
                decoded[index] = _shrink(_turn_upright(pixels, image.file), self._side)
        return decoded

    def _crop(
        self, pictures: Mapping[int, _DevicePicture], positions: Sequence[int]
    ) -> list[Tensor]:
        """Returns the crops of each view in the order of the pictures, uint8 [n, 3, S, S]."""
        config, seed = self._augmentation.config, self._augmentation.seed
        rows = list(pictures.values())
        groups: dict[torch.Size, list[int]] = defaultdict(list)
        for place, picture in enumerate(rows):
            groups[picture.pixels.shape].append(place)
        stacks = [torch.stack([rows[place].pixels for place in group]) for group in groups.values()]
        widths, heights = (
            np.array([getattr(picture, name) for picture in rows], dtype=np.int64)
            for name in ("width", "height")
        )
        stream_positions = np.array(positions, dtype=np.int64)
        views = []
        for view in range(config.num_views):
            size = config.size_of(view, self._augmentation.image_size)
            boxes = crop_boxes(widths, heights, stream_positions, config, seed, view)
            crops = torch.empty((len(rows), 3, size, size), dtype=torch.uint8, device=self._device)
            for (shape, group), pixels in zip(groups.items(), stacks, strict=True):
                left, width = _scale(boxes.left[group], boxes.width[group], widths[group], shape[1])
                down = _scale(boxes.top[group], boxes.height[group], heights[group], shape[0])
                # a mirrored crop runs from the right edge to the left
                mirrored = boxes.mirrored[group]
                across = left + mirrored * width, np.where(mirrored, -width, width)
                crops[group] = _resize(pixels, across, down, (size, size))
            views.append(crops)
        return views


def _is_for_device(image: OpenedImage) -> bool:
    fits = image.num_pixels <= _MAX_PIXELS and max(image.file.size) <= _MAX_SIDE
    return fits and is_plain(image.data, image.file)


def _turn_upright(pixels: Tensor, image: Image.Image) -> Tensor:
    turn = turn_of(image)
    if turn in SIDEWAYS:
        pixels = pixels.transpose(0, 1)
    axes = [axis for axis, turns in enumerate((BOTTOM_TO_TOP, RIGHT_TO_LEFT)) if turn in turns]
    return pixels.flip(axes) if axes else pixels


def _shrink(pixels: Tensor, side: int) -> _DevicePicture:
    height, width, _ = pixels.shape
    size = shrunk_size(width, height, side)
    if size != (width, height):
        across, down = ((np.zeros(1), np.array([float(num)])) for num in (width, height))
        (crop,) = _resize(pixels[None], across, down, size)
        pixels = crop.permute(1, 2, 0)
    return _DevicePicture(pixels, width, height)


def _scale(
    starts: NDArray[np.float64],
    lengths: NDArray[np.float64],
    full_sizes: NDArray[np.int64],
    num_pixels: int,
) -> _Span:
    """Returns the span of boxes, in pixels of the full size, in a picture of `num_pixels`."""
    scale = num_pixels / full_sizes
    return starts * scale, np.minimum(lengths * scale, num_pixels - starts * scale)


def _resize(x_BHWC: Tensor, across: _Span, down: _Span, size: tuple[int, int]) -> Tensor:
    """Resizes the boxes of pictures as Pillow does: across, rounded, then down. (Pillow begins with
    the other axis in some tall pictures, which changes single values by 1 or 2.)

    across, down: starts and lengths of the boxes, [B] each; a negative length mirrors. size: width
    and height of the result, uint8 [B, 3, h, w].
    """
    height, width = x_BHWC.shape[1:3]
    pixels = x_BHWC.permute(0, 3, 1, 2).double()
    across_B1WO = _filter_weights(*across, width, size[0], pixels.device)[:, None].mT
    down_B1OH = _filter_weights(*down, height, size[1], pixels.device)[:, None]
    resized = down_B1OH @ _round_to_bytes(pixels @ across_B1WO)
    return _round_to_bytes(resized).to(torch.uint8)


def _round_to_bytes(x: Tensor) -> Tensor:
    return x.round_().clamp_(0.0, 255.0)


def _filter_weights(
    starts: NDArray[np.float64],
    lengths: NDArray[np.float64],
    num_in: int,
    num_out: int,
    device: torch.device,
) -> Tensor:
    """Returns the weights of Pillow's bicubic filter, float64 [B, num_out, num_in]."""
    scale = torch.from_numpy(lengths / num_out).to(device)[:, None]
    start = torch.from_numpy(starts).to(device)[:, None]
    centers, pixels = (
        torch.arange(num, dtype=torch.float64, device=device) + 0.5 for num in (num_out, num_in)
    )
    support = scale.abs().clamp(min=1.0)[:, None]
    x = (pixels - (start + centers * scale)[..., None]).abs_() / support
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    weights = torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))
    return weights / weights.sum(dim=-1, keepdim=True)
