"""Loads the batches of pairs, a few steps ahead of the trainer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.training.data.ahead import ahead
from mlcd.training.data.loader import Batch, Loader, StepBatches
from mlcd.training.data.order import locate, step_shares
from mlcd.training.pairs.pairs_config import PairsConfig
from mlcd.training.pairs.pairs_dataset import PairSet
from mlcd.training.pairs.tokens import CaptionTokens
from mlcd.training.processes import Processes
from mlcd.types import SampleKey


@dataclass(frozen=True)
class PairBatch:
    """One process's share of a micro-batch.

    images: uint8 [b, 3, S, S], one crop of each image, or float32 [b, D], the images' embeddings.
    ids: int64 [b, T], token ids of one caption of each image. positions: int64 [b], in the endless
    stream of samples.
    """

    images: Tensor
    ids: Tensor
    positions: NDArray[np.int64]
    keys: tuple[SampleKey, ...]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the step computes with, by name."""
        positions = torch.from_numpy(self.positions)
        return {"images": self.images, "ids": self.ids, "positions": positions}


class PairedRows(Protocol):
    """Precomputed embeddings of a run's images."""

    @property
    def artifact(self) -> Artifact: ...

    def at(self, indices: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the embeddings of images `indices` at stream `positions`, float32 [b, D].

        Rows of images that cannot be decoded are NaN.
        """
        ...


@dataclass(frozen=True)
class Features:
    """The embeddings of whole images, without augmentation.

    rows: int64 [n], row of each image in the artifact.
    """

    embeddings: EmbeddingsArtifact
    rows: NDArray[np.int64]

    @property
    def artifact(self) -> Artifact:
        return self.embeddings.artifact

    def at(self, indices: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the embeddings of images `indices`, float32 [b, D]; ignores positions."""
        del positions
        return torch.from_numpy(self.embeddings.rows_at(self.rows[indices]))


@dataclass(frozen=True)
class PairReader:
    """Reads the batches of pairs.

    features: the embeddings of the images; None to decode and crop the images themselves.
    """

    pairs: PairSet
    tokens: CaptionTokens
    features: PairedRows | None
    config: PairsConfig
    processes: Processes

    @contextmanager
    def open(self, start_step: int) -> Iterator[Iterator[StepBatches[PairBatch]]]:
        """Opens the batches of `start_step` and all later steps."""
        num, device = self.config.data.prefetch_steps, self.processes.device
        if self.features is not None:
            with ahead(self._iterate_embedded(self.features, start_step), num, device) as steps:
                yield steps
            return
        world = self.processes.world
        loader = Loader(
            self.pairs.as_dataset(),
            self.config,
            rank=world.rank,
            size=world.size,
            start_step=start_step,
            cores=self.processes.cores,
            device=device,
        )
        with loader, ahead(self._iterate_cropped(loader), num, device) as steps:
            yield steps

    def _iterate_embedded(
        self, features: PairedRows, start_step: int
    ) -> Iterator[StepBatches[PairBatch]]:
        config, world = self.config, self.processes.world
        for step in range(start_step, config.schedule.steps):
            shares = step_shares(
                step,
                config.schedule.batch_size,
                config.compute.accumulation,
                world.rank,
                world.size,
            )
            yield StepBatches(step, tuple(self._batch(features, share) for share in shares), 0.0)

    def _batch(self, features: PairedRows, positions: NDArray[np.int64]) -> PairBatch:
        _, rows = locate(positions, (len(self.pairs),), (1.0,), self.config.seed)
        images = features.at(rows, positions)
        usable = ~torch.isnan(images[:, 0])
        rows, positions = rows[usable.numpy()], positions[usable.numpy()]
        keys = tuple(self.pairs.entries[int(row)].key for row in rows)
        return PairBatch(self._pin(images[usable]), self._ids(rows, positions), positions, keys)

    def _iterate_cropped(
        self, loader: Iterable[StepBatches[Batch]]
    ) -> Iterator[StepBatches[PairBatch]]:
        for step in loader:
            parts = tuple(map(self._add_captions, step.parts))
            yield StepBatches(step.step, parts, 0.0, step.num_on_cpu)

    def _add_captions(self, part: Batch) -> PairBatch:
        ids = self._ids(part.labels[:, 0].numpy(), part.positions)
        return PairBatch(part.images, ids, part.positions, part.keys)

    def _ids(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        return self._pin(self.tokens.ids(self.pairs.draw(rows, positions, self.config.seed)))

    def _pin(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in pinned memory if the device is a GPU."""
        return tensor.pin_memory() if self.processes.device.type == "cuda" else tensor
