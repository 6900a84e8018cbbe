"""The training set: images joined with their labels by key, decoded once and held in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import Source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import held_out, split_positions
from mlcd.labels.table import LabelTable
from mlcd.types import SampleKey

# Decoded somewhat larger than the model's input, so that a random crop does not have to enlarge.
_OVERSIZE: Final = 1.25


@dataclass(frozen=True)
class Samples:
    """pixels: uint8 [N, 3, R, R]. labels: int64 [N, L], -1 for none. keys: N."""

    pixels: Tensor
    labels: Tensor
    keys: tuple[SampleKey, ...]
    num_unlabeled: int
    num_rejected: int

    def __len__(self) -> int:
        return len(self.keys)


def load_samples(
    source: Source,
    table: LabelTable,
    *,
    image_size: int,
    labels_per_image: int,
    hold_out: float,
    memory_gib: float,
    on_sample: Callable[[], None] = lambda: None,
) -> Samples:
    """Every image that is not held out, has labels and can be decoded; the others are counted, not replaced."""
    row_of_key = {key: row for key, row in table.row_of_key().items() if (table.ids[row] >= 0).any()}
    entries = source.entries
    positions = split_positions([entry.key for entry in entries], [entry.class_name for entry in entries])
    kept_out = held_out(positions, hold_out)
    offered = [entry for entry, out in zip(entries, kept_out, strict=True) if not out]
    chosen = [entry for entry in offered if entry.key in row_of_key]
    side = int(_OVERSIZE * image_size)
    needed_gib = len(chosen) * 3 * side * side / 2**30
    if needed_gib > memory_gib:
        raise ConfigInvalid(
            f"{len(chosen)} images of {side} px take {needed_gib:.1f} GiB of memory",
            remedy=f"raise data.memory_gib (now {memory_gib}), lower model.image_size, or give fewer images",
        )
    pixels = np.empty((len(chosen), 3, side, side), dtype=np.uint8)
    num_changed = 0
    rows: list[int] = []
    keys: list[SampleKey] = []
    spec = PreprocessSpec(resize_shortest=side, crop=side)
    for prepared in prepare_all(source, chosen, spec, num_threads=available_cores()):
        row = row_of_key[prepared.entry.key]
        if prepared.pixels is not None and prepared.sha256 == table.image_sha256[row]:
            pixels[len(keys)] = prepared.pixels
            rows.append(row)
            keys.append(prepared.entry.key)
        elif prepared.pixels is not None:
            num_changed += 1
        on_sample()
    if num_changed:
        raise InvalidInput(
            f"{num_changed} of {len(chosen)} images are not those that were labeled, though their keys are the same",
            remedy="give the labeled images, or embed and label these",
        )
    if not keys:
        raise InvalidInput("no image has both pixels and labels", remedy="were the labels made from these images?")
    labels = torch.from_numpy(table.ids[rows][:, :labels_per_image].astype(np.int64))
    return Samples(
        pixels=torch.from_numpy(pixels[: len(keys)]),
        labels=labels,
        keys=tuple(keys),
        num_unlabeled=len(offered) - len(chosen),
        num_rejected=len(chosen) - len(keys),
    )
