"""Encoded images to squashed squares: the whole picture, whatever its aspect, as uint8 [3, R, R]."""

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mlcd.errors import ImageRejected
from mlcd.images.decode import Scaled, decode, decode_scaled
from mlcd.images.entries import Entry
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.images.transform import DecodeMode

# Somewhat larger than the model's input, so that a random crop does not have to enlarge.
_OVERSIZE: Final = 1.25


def square_side(image_size: int) -> int:
    return math.ceil(_OVERSIZE * image_size)


@dataclass(frozen=True)
class Sample:
    """What it takes to decode one sample. sha256: that the image must have, None where it was checked before."""

    part: int
    row: int
    entry: Entry
    sha256: bytes | None


@dataclass(frozen=True)
class Squares:
    """Some samples, decoded. pixels: uint8 [k, 3, R, R]; aspects (width / height of the picture): float32 [k].

    kept: the k samples' places among those asked for. rejected: the others, by place, with the reason. changed: the
    places of images that are not those that were labeled; they are among the kept.
    """

    pixels: Tensor
    aspects: Tensor
    kept: tuple[int, ...]
    rejected: dict[int, str]
    changed: tuple[int, ...]


class SquareReader(Protocol):
    """Decodes samples; safe to call from several threads."""

    def read(self, samples: Sequence[Sample]) -> Squares: ...


def squash(data: bytes, side: int, mode: DecodeMode) -> tuple[NDArray[np.uint8], float]:
    """uint8 [3, side, side] and the upright picture's width / height; raises ImageRejected."""
    if mode == "fast":
        picture = decode_scaled(data, shortest=side)
    else:
        image = decode(data)
        picture = Scaled(image, (0, 0, *image.size), image.size)
    square = picture.image.resize((side, side), Image.Resampling.BICUBIC, box=picture.region)
    width, height = picture.full_size
    return np.asarray(square, dtype=np.uint8).transpose(2, 0, 1), width / height


class DecodingReader:
    """Reads and decodes every time."""

    def __init__(self, sources: Sequence[Source], side: int, mode: DecodeMode) -> None:
        self._sources, self._side, self._mode = sources, side, mode

    @classmethod
    def open(cls, locations: Sequence[str], side: int, mode: DecodeMode) -> "DecodingReader":
        """For a process of its own: the sources are opened but not listed, as samples carry their entries."""
        return cls([open_source(location) for location in locations], side, mode)

    def read(self, samples: Sequence[Sample]) -> Squares:
        pixels = np.empty((len(samples), 3, self._side, self._side), dtype=np.uint8)
        aspects = np.empty(len(samples), dtype=np.float32)
        kept: list[int] = []
        rejected: dict[int, str] = {}
        changed: list[int] = []
        for place, sample in enumerate(samples):
            try:
                data = self._sources[sample.part].read(sample.entry)
                pixels[len(kept)], aspects[len(kept)] = squash(data, self._side, self._mode)
            except ImageRejected as rejection:
                rejected[place] = rejection.message
                continue
            kept.append(place)
            if sample.sha256 is not None and hashlib.sha256(data).digest() != sample.sha256:
                changed.append(place)
        return Squares(
            torch.from_numpy(pixels[: len(kept)]),
            torch.from_numpy(aspects[: len(kept)]),
            tuple(kept),
            rejected,
            tuple(changed),
        )


class HoldingReader:
    """Decodes each sample the first time that it is asked for, and keeps it, or the reason why it has no pixels."""

    def __init__(self, reader: SquareReader, sizes: Sequence[int], side: int) -> None:
        self._reader = reader
        self._starts = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
        num = sum(sizes)
        # The system gives memory page by page, as squares are written.
        self._pixels = torch.empty((num, 3, side, side), dtype=torch.uint8)
        self._aspects = torch.empty(num, dtype=torch.float32)
        self._rejected: dict[int, str] = {}
        self._held = np.zeros(num, dtype=np.bool_)
        self._lock = threading.Lock()

    def read(self, samples: Sequence[Sample]) -> Squares:
        indices = [self._starts[sample.part] + sample.row for sample in samples]
        with self._lock:
            new = [place for place, index in enumerate(indices) if not self._held[index]]
        changed = self._hold([samples[place] for place in new], [indices[place] for place in new])
        kept = tuple(place for place, index in enumerate(indices) if index not in self._rejected)
        rows = torch.tensor([indices[place] for place in kept], dtype=torch.int64)
        return Squares(
            self._pixels[rows],
            self._aspects[rows],
            kept,
            {place: self._rejected[index] for place, index in enumerate(indices) if index in self._rejected},
            tuple(new[place] for place in changed),
        )

    def _hold(self, samples: Sequence[Sample], indices: Sequence[int]) -> tuple[int, ...]:
        if not samples:
            return ()
        squares = self._reader.read(samples)
        with self._lock:  # two threads may have met the same sample; both write the same
            for row, place in enumerate(squares.kept):
                self._pixels[indices[place]] = squares.pixels[row]
                self._aspects[indices[place]] = squares.aspects[row]
            self._rejected.update({indices[place]: reason for place, reason in squares.rejected.items()})
            self._held[list(indices)] = True
        return squares.changed
