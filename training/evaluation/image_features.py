"""Encodes images of known class; each process encodes its share.

Batches are cut by the images' positions in their source, whatever the number of processes, so that
a row does not depend on that number: matrix products round differently in batches of other sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.artifacts.labels import DIGEST_BYTES
from mlcd.errors import ConfigInvalid
from mlcd.images.entries import Entries
from mlcd.images.prefetch import prepare_all
from mlcd.images.source import Source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import split_positions
from mlcd.models.servable import Servable
from mlcd.world import World
from training.data.order import own_part
from training.evaluation.listed_keys import ListedKeys
from training.evaluation.splits import (
    Split,
    folder_split,
    key_split,
    split_samples,
    with_validation,
)

# embedding: of unit length, as served. pooled: the class token after the last norm, before the
# projection and not normalized, as in CLIP's protocol.
Features = Literal["embedding", "pooled"]

_BATCH: Final = 128


@dataclass(frozen=True)
class ImageSet:
    """The images of known class in a source.

    entries, splits (see mlcd.keys) and class_names: N each. given: the split that its folders make
    if they are called train, val, valid and test.
    """

    source: Source
    entries: Entries
    splits: NDArray[np.float64]
    class_names: tuple[str, ...]
    given: Split | None = None

    def split(self, hold_out: float) -> Split:
        """Splits the images as `LabeledRows.split` does."""
        return (
            split_samples(self.splits, hold_out)
            if self.given is None
            else with_validation(self.given, self.splits)
        )

    @property
    def location(self) -> str:
        return self.source.location

    @classmethod
    def of(cls, source: Source) -> Self:
        """Lists the images of `source`. Raises ConfigInvalid if no image has a known class."""
        entries = source.entries
        splits = split_positions(entries.keys(), entries.class_names())
        known = np.flatnonzero([name is not None for name in entries.class_names()])
        if not len(known):
            raise ConfigInvalid(
                f"no image of {source.location} has a known class",
                remedy="put the images into one sub-folder per class to evaluate",
            )
        class_names = [name for name in entries.class_names() if name is not None]
        given = None
        if (folders := folder_split(class_names, source.location)) is not None:
            given, class_names = folders
        return cls(source, entries.select(known), splits[known], tuple(class_names), given)

    @classmethod
    def listed(cls, source: Source, listed: ListedKeys) -> Self:
        """Lists the images of these keys, whatever their class is.

        Raises InvalidInput as `ListedKeys.places` does.
        """
        places = listed.places(source.entries.key_column(), source.location)
        entries = source.entries.select(places)
        keys = list(entries.keys())
        positions = split_positions(keys, [None] * len(keys))
        return cls(source, entries, positions, ("",) * len(keys), key_split(keys))


@dataclass(frozen=True)
class _DecodedBatch:
    """A batch of decoded images.

    pixels: uint8 [b, 3, S, S] and sha256: uint8 [b, 32], of the usable images. usable: bool, for
    all images.
    """

    pixels: NDArray[np.uint8]
    sha256: NDArray[np.uint8]
    usable: NDArray[np.bool_]


class PreparedImages:
    """An image set in batches of pixels.

    This process's share is kept in memory if it fits into `memory_bytes`.
    """

    def __init__(self, images: ImageSet, spec: PreprocessSpec, *, memory_bytes: float = 0) -> None:
        self.images, self._spec, self._memory_bytes = images, spec, memory_bytes
        self._kept: dict[tuple[int, int], list[_DecodedBatch]] = {}

    def batches(
        self, world: World, on_image: Callable[[], None] = lambda: None
    ) -> Iterator[_DecodedBatch]:
        """Yields this process's batches in order; they are decoded the first time."""
        share = (world.rank, world.size)
        if share in self._kept:
            yield from self._kept[share]
            return
        num_batches = -(-len(self.images.entries) // _BATCH)
        own = own_part(num_batches, world.rank, world.size)
        entries = self.images.entries[own.start * _BATCH : own.stop * _BATCH]
        kept: list[_DecodedBatch] = []
        fits = len(entries) * 3 * self._spec.crop**2 <= self._memory_bytes
        for batch in self._decoded(entries, on_image):
            if fits:
                kept.append(batch)
            yield batch
        if fits:
            self._kept[share] = kept

    def _decoded(self, entries: Entries, on_image: Callable[[], None]) -> Iterator[_DecodedBatch]:
        pixels: list[NDArray[np.uint8]] = []
        digests: list[bytes] = []
        usable: list[bool] = []
        # These threads are this process's share of the cores.
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

    rows: float32 [n, D] and sha256: uint8 [n, 32], of the n such images, in order. usable: bool
    [N], for all images.
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
    """Encodes all images; every process gets all rows."""
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
