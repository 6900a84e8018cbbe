"""Copies images to a GPU while it computes with the previous images.

The copies have their own CUDA stream: in the stream of the computation, a copy would wait for all
operations queued before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mlcd.training.data.ahead import ahead
from mlcd.training.data.loader import StepBatches, StepPart


class _ImagePart(StepPart, Protocol):
    @property
    def images(self) -> Tensor: ...


_Part = TypeVar("_Part", bound=_ImagePart)


@dataclass(frozen=True)
class _Copy:
    """A copy in progress; keeps its source, so that no other tensor gets the same id()."""

    source: Tensor
    copied: Tensor
    done: torch.cuda.Event


class DeviceCopies:
    """Copies tensors from the host to a device ahead of their use.

    At most two copies exist ahead: the step's next tensor, and the next step's first tensor. On a
    CPU, tensors are returned without a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._started: dict[int, _Copy] = {}

    def start(self, tensor: Tensor) -> None:
        """Starts copying a tensor for a later `take`; any thread may call it."""
        # An empty micro-batch may never be taken, so it is not copied.
        if self._stream is None or not len(tensor):
            return
        with torch.cuda.stream(self._stream):
            copied = tensor.to(self._device, non_blocking=True)
            self._started[id(tensor)] = _Copy(tensor, copied, self._stream.record_event())

    def take(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the device; only the device waits for the copy, not the host."""
        copy = self._started.pop(id(tensor), None)
        if copy is None:
            return tensor.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copy.done)
        # Allocated in the copy stream; may be reused only after the computation has used it.
        copy.copied.record_stream(computing)
        return copy.copied

    def iter_on_device(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the tensors on the device; while one is used, the next one is copied."""
        for tensor, following in pairwise([*tensors, None]):
            assert tensor is not None
            on_device = self.take(tensor)
            if following is not None:
                self.start(following)
            yield on_device

    @contextmanager
    def prefetch_first_images(
        self, steps: Iterator[StepBatches[_Part]]
    ) -> Iterator[Iterator[StepBatches[_Part]]]:
        """Starts copying the first images of each step while the previous step computes."""
        if self._stream is None:
            yield steps
            return
        with ahead(self._start_first(steps), 1, self._device) as prefetched:
            yield prefetched

    def _start_first(self, steps: Iterator[StepBatches[_Part]]) -> Iterator[StepBatches[_Part]]:
        for step in steps:
            self.start(step.parts[0].images)
            yield step
