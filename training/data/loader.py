"""Loads the batches of decoded images, a few steps ahead of the trainer."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.cores import available_cores
from mlcd.errors import InvalidInput
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.crops import Crops, PictureCrops
from mlcd.training.data.dataset import Dataset
from mlcd.training.data.decoders import (
    Decoders,
    ProcessDecoders,
    ThreadDecoders,
    block_stop_signals,
)
from mlcd.training.data.device_crops import DeviceCrops
from mlcd.training.data.drawing import draw_columns, label_weights
from mlcd.training.data.order import locate, part_counts, part_indices, step_shares
from mlcd.training.data.pictures import CachedPictures, DecodedPictures, Sample, picture_side
from mlcd.training.data.settings import BatchSettings
from mlcd.types import SampleKey

_log = logging.getLogger(__name__)

# Images decoded in one chunk: few enough to spread a step over all workers, enough to keep the
# transfer cheap.
_MAX_CHUNK: Final = 32
_MAX_REJECTED: Final = 1000  # the run stops if so many images are rejected before one is decoded
_FIRST_REPORTS: Final = 10
_HOST: Final = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """One process's share of a micro-batch.

    images: uint8 [b, 3, S, S], one crop of each sample. labels: int64 [b, L], -1 for none.
    positions: int64 [b], in the endless stream of samples. num_skipped: number of further samples,
    which could not be decoded. weights: float32 [b, L], of the labels; None for equal weights.
    more_views: further crops of the same samples; the smaller local views come last. num_on_cpu:
    number of samples that the device left to the CPU, with data.decode=device.
    """

    images: Tensor
    labels: Tensor
    positions: NDArray[np.int64]
    keys: tuple[SampleKey, ...]
    num_skipped: int
    weights: Tensor | None = None
    more_views: tuple[Tensor, ...] = ()
    num_on_cpu: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the step computes with, by name."""
        tensors = {
            "images": self.images,
            "labels": self.labels,
            "positions": torch.from_numpy(self.positions),
        }
        if self.weights is not None:
            tensors["weights"] = self.weights
        views = enumerate(self.more_views, start=1)
        return {**tensors, **{f"views.{view}": pixels for view, pixels in views}}


class StepPart(Protocol):
    """A micro-batch of any training."""

    @property
    def keys(self) -> tuple[SampleKey, ...]: ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the step computes with, by name."""
        ...


_Part = TypeVar("_Part", bound=StepPart)


@dataclass(frozen=True)
class StepBatches(Generic[_Part]):
    """One process's work in a step.

    parts: micro-batches. wait_s: seconds that the trainer waited for them. num_on_cpu: the sum of
    the parts'; None without data.decode=device.
    """

    step: int
    parts: tuple[_Part, ...]
    wait_s: float
    num_on_cpu: int | None = None


class Loader:
    """The batches of all steps from `start_step` to the last one, for process `rank` of `size`.

    Iterate once, then close. A batch depends only on dataset, config and step: a sample that cannot
    be decoded is left out and counted, never replaced. The SHA-256 of each image is checked against
    the labels until the first complete epoch after the start ends. num_labels: number of labels
    drawn each time a sample is seen; None takes all. cores: CPU cores for decoding; None takes this
    process's share of the machine. crop_seed: seed of the crops; None takes the run's seed.

    Iterating raises InvalidInput if an image differs from the labeled image or no image can be
    decoded, and Unavailable if a worker process is killed.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: BatchSettings,
        *,
        rank: int,
        size: int,
        start_step: int,
        num_labels: int | None = None,
        cores: int | None = None,
        crop_seed: int | None = None,
        device: torch.device = _HOST,
    ) -> None:
        self._device = device
        self._dataset, self._config = dataset, config
        self._rank, self._size, self._start_step = rank, size, start_step
        self._labels_per_sample = dataset.parts[0].labels.shape[1]
        self._num_labels = num_labels or self._labels_per_sample
        self._num_decoders = config.data.workers or cores or max(1, available_cores() // size)
        seed = config.seed if crop_seed is None else crop_seed
        self._augmentation = Augmentation(config.model.image_size, config.augment, seed)
        first = start_step * config.schedule.batch_size
        sizes = np.array(dataset.sizes)
        # Images are checked until a complete epoch has ended: an interrupted epoch continues with
        # only some of the images.
        epochs = -(-part_counts(first, dataset.weights, config.seed) // sizes) + 1
        self._checked_until = epochs * sizes
        self._rejections = _Rejections(min(_MAX_REJECTED, len(dataset)))
        self._decoders = self._open_decoders()
        self._assembler = ThreadPoolExecutor(
            1, thread_name_prefix="assemble", initializer=prepare_thread, initargs=(device,)
        )

    def __iter__(self) -> Iterator[StepBatches[Batch]]:
        assembled = self._assemble()
        steps = iter(range(self._start_step, self._config.schedule.steps))

        def submit() -> Future[tuple[Batch, ...]]:
            return self._assembler.submit(next, assembled)

        waiting = deque(
            (step, submit()) for step in islice(steps, self._config.data.prefetch_steps)
        )
        while waiting:
            step, future = waiting.popleft()
            start = time.perf_counter()
            parts = future.result()
            wait_s = time.perf_counter() - start
            waiting.extend((step, submit()) for step in islice(steps, 1))
            on_device = self._config.data.decode == "device"
            num_on_cpu = sum(part.num_on_cpu for part in parts) if on_device else None
            yield StepBatches(step, parts, wait_s, num_on_cpu)

    def close(self) -> None:
        """Stops the decoding threads and processes."""
        self._assembler.shutdown(cancel_futures=True)
        self._decoders.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def holds_images(self) -> bool:
        """True if all decoded images fit in memory, so that only the first epoch decodes."""
        return len(self._dataset) * 3 * self._side**2 <= self._config.data.memory_gib * 2**30

    @property
    def _side(self) -> int:
        return picture_side(self._config.model.image_size, self._config.augment)

    def _open_decoders(self) -> Decoders:
        mode = self._config.data.decode
        if mode == "device":
            sources = [part.source for part in self._dataset.parts]
            device_crops = DeviceCrops(sources, self._augmentation, self._device)
            return ThreadDecoders(device_crops, self._num_decoders)
        if not self.holds_images and self._config.data.workers != 0:
            locations = [part.source.location for part in self._dataset.parts]
            return ProcessDecoders(locations, mode, self._augmentation, self._num_decoders)
        decoded = DecodedPictures([part.source for part in self._dataset.parts], self._side, mode)
        pictures = CachedPictures(decoded) if self.holds_images else decoded
        return ThreadDecoders(PictureCrops(pictures, self._augmentation), self._num_decoders)

    def _assemble(self) -> Iterator[tuple[Batch, ...]]:
        planned: deque[_Plan] = deque()
        decoded = self._decoders.decode(self._chunks(planned))
        for _ in range(self._start_step, self._config.schedule.steps):
            yield tuple(
                self._batch(planned, decoded) for _ in range(self._config.compute.accumulation)
            )

    def _chunks(self, planned: deque["_Plan"]) -> Iterator[Sequence[Sample]]:
        """Yields the samples of all batches in chunks for the decoders.

        The plan of each batch is appended to `planned`.
        """
        for step in range(self._start_step, self._config.schedule.steps):
            for positions in self._shares(step):
                samples = self._samples(positions)
                size = max(1, min(_MAX_CHUNK, -(-len(samples) // self._num_decoders)))
                # A share without samples gets one empty chunk: every batch needs a chunk.
                starts = range(0, max(len(samples), 1), size)
                planned.append(_Plan(positions, samples, len(starts)))
                for start in starts:
                    yield samples[start : start + size]

    def _shares(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Yields the positions of this process's share of each micro-batch of a step."""
        config = self._config
        return step_shares(
            step,
            config.schedule.batch_size,
            config.compute.accumulation,
            self._rank,
            self._size,
        )

    def _samples(self, positions: NDArray[np.int64]) -> list[Sample]:
        dataset = self._dataset
        parts, rows = locate(positions, dataset.sizes, dataset.weights, self._config.seed)
        _, indices = part_indices(positions, dataset.weights, self._config.seed)
        checks = indices < self._checked_until[parts]
        return [
            self._sample(part, row, position, check=check)
            for part, row, position, check in zip(
                parts.tolist(), rows.tolist(), positions.tolist(), checks.tolist(), strict=True
            )
        ]

    def _sample(self, part: int, row: int, position: int, *, check: bool) -> Sample:
        labeled = self._dataset.parts[part]
        digest = labeled.sha256[row].tobytes() if check and labeled.sha256 is not None else None
        return Sample(part, row, labeled.entries[row], digest, position)

    def _batch(self, planned: deque["_Plan"], decoded: Iterator[Crops]) -> Batch:
        # The decoders plan a batch when they take its first chunk, so the chunk is read first.
        first_chunk = next(decoded)
        plan = planned.popleft()
        chunks = [first_chunk, *islice(decoded, plan.num_chunks - 1)]
        usable, rejected, changed = _collect_indices(plan, chunks)
        self._check_unchanged(plan, changed)
        self._rejections.count(
            len(usable),
            {plan.samples[index].entry.key: reason for index, reason in rejected.items()},
        )
        samples = [plan.samples[index] for index in usable]
        positions = plan.positions[usable]
        stored_labels = np.array(
            [self._dataset.parts[sample.part].labels[sample.row] for sample in samples],
            dtype=np.int32,
        )
        stored_labels = stored_labels.reshape(-1, self._labels_per_sample)
        columns = draw_columns(stored_labels, positions, self._num_labels, self._config.seed)
        labels = (
            stored_labels if columns is None else np.take_along_axis(stored_labels, columns, axis=1)
        )
        images, *more_views = (
            self._join_rows(view_chunks)
            for view_chunks in zip(*(chunk.views for chunk in chunks), strict=True)
        )
        return Batch(
            images=images,
            labels=self._join_rows([torch.from_numpy(labels.astype(np.int64))]),
            positions=positions,
            keys=tuple(sample.entry.key for sample in samples),
            num_skipped=len(rejected),
            weights=self._weights(samples, labels, columns),
            more_views=tuple(more_views),
            num_on_cpu=sum(chunk.num_on_cpu for chunk in chunks),
        )

    def _weights(
        self,
        samples: Sequence[Sample],
        labels: NDArray[np.int32],
        columns: NDArray[np.int64] | None,
    ) -> Tensor | None:
        if self._dataset.parts[0].scores is None:
            return None
        scores = np.zeros((len(samples), self._labels_per_sample), dtype=np.float16)
        for place, sample in enumerate(samples):
            stored_scores = self._dataset.parts[sample.part].scores
            assert stored_scores is not None
            scores[place] = stored_scores[sample.row]
        if columns is not None:
            scores = np.take_along_axis(scores, columns, axis=1)
        return self._join_rows([torch.from_numpy(label_weights(scores, labels))])

    def _join_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Concatenates tensors; those of the host in pinned memory if the device is a GPU."""
        if self._device.type != "cuda":
            return torch.cat(list(rows))
        if rows[0].is_cuda:
            for part in rows:
                # Allocated in another stream; may be reused only after this one has copied it.
                part.record_stream(torch.cuda.current_stream(self._device))
            return torch.cat(list(rows))
        shape = (sum(map(len, rows)), *rows[0].shape[1:])
        return torch.cat(list(rows), out=_allocate_pinned(shape, rows[0].dtype))

    def _check_unchanged(self, plan: "_Plan", changed: Sequence[int]) -> None:
        if changed:
            sample = plan.samples[changed[0]]
            raise InvalidInput(
                f"{sample.entry.key} in {self._dataset.parts[sample.part].source.location} differs "
                "from the image that was labeled under this key; further images may differ",
                remedy="give the labeled images, or embed and label the new ones",
            )


def prepare_thread(device: torch.device) -> None:
    """Prepares a helper thread of the trainer: blocks stop signals and selects the GPU."""
    block_stop_signals()
    # A device without an index is every thread's default GPU.
    if device.type == "cuda" and device.index is not None:
        # Otherwise the thread would pin memory for GPU 0, and allocate a context there.
        torch.cuda.set_device(device)


def _allocate_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


@dataclass(frozen=True)
class _Plan:
    """One process's share of a micro-batch before it is decoded, in `num_chunks` chunks."""

    positions: NDArray[np.int64]
    samples: list[Sample]
    num_chunks: int


def _collect_indices(
    plan: _Plan, chunks: Sequence[Crops]
) -> tuple[list[int], dict[int, str], list[int]]:
    """Returns indices into the plan's samples: usable, rejected (with reasons) and changed."""
    usable: list[int] = []
    rejected: dict[int, str] = {}
    changed: list[int] = []
    start = 0
    for chunk in chunks:
        usable += [start + index for index in chunk.usable]
        rejected |= {start + index: reason for index, reason in chunk.rejected.items()}
        changed += [start + index for index in chunk.changed]
        start += len(chunk.usable) + len(chunk.rejected)
    assert start == len(plan.samples)
    return usable, rejected, changed


class _Rejections:
    """Logs samples that cannot be decoded: the first ten, then ever more rarely.

    It raises if no sample can be decoded.
    """

    def __init__(self, max_rejected: int) -> None:
        self._max_rejected, self._num_decoded, self._num_rejected = max_rejected, 0, 0
        self._keys: set[SampleKey] = set()

    def count(self, num_decoded: int, rejected: Mapping[SampleKey, str]) -> None:
        """Raises InvalidInput if `max_rejected` samples were rejected before one was decoded."""
        self._num_decoded += num_decoded
        self._num_rejected += len(rejected)
        for key, reason in rejected.items():
            if key not in self._keys:
                self._keys.add(key)
                self._report(key, reason)
        if rejected and not self._num_decoded and self._num_rejected >= self._max_rejected:
            key, reason = list(rejected.items())[-1]
            raise InvalidInput(
                f"none of the first {self._num_rejected} images can be read, the last one {key}: "
                f"{reason}",
                remedy="put the images back where they were when the run started",
            )

    def _report(self, key: SampleKey, reason: str) -> None:
        num = len(self._keys)
        if num <= _FIRST_REPORTS:
            _log.warning("%s is left out: %s", key, reason)
        elif num % 10 ** (len(str(num)) - 1) == 0:  # 20, 30, … 100, 200, …
            _log.warning("%d images are left out so far, the last one %s: %s", num, key, reason)
