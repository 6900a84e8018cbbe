"""Copies of images to a GPU that are under way while it computes with the images before.

They have a stream of their own; on that of the computation a copy would begin when all that was
asked for before is done.
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
    """A copy that was begun; its source is kept, so that no other tensor gets its id."""

    source: Tensor
    copied: Tensor
    done: torch.cuda.Event


class DeviceCopies:
    """The tensors of a host on their way to a device.

    At most two are under way or waiting: the next one of a step, and the first one of the next
    step. On a CPU all pass through untouched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: dict[int, _Copy] = {}

    def begin(self, tensor: Tensor) -> None:
        """Begins to copy a tensor, which is taken later; any thread may call it."""
        # An empty micro-batch may never be taken.
        if self._stream is None or not len(tensor):
            return
        with torch.cuda.stream(self._stream):
            copied = tensor.to(self._device, non_blocking=True)
            self._begun[id(tensor)] = _Copy(tensor, copied, self._stream.record_event())

    def take(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the device; the computation waits for its copy, the host does not."""
        begun = self._begun.pop(id(tensor), None)
        if begun is None:
            return tensor.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(begun.done)
        # Its memory was taken on the other stream, and is given back when this one is done with it.
        begun.copied.record_stream(computing)
        return begun.copied

    def in_turn(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields tensors on the device, each while the next one is copied."""
        for tensor, following in pairwise([*tensors, None]):
            assert tensor is not None
            on_device = self.take(tensor)
            if following is not None:
                self.begin(following)
            yield on_device

    @contextmanager
    def first_ahead(
        self, steps: Iterator[StepBatches[_Part]]
    ) -> Iterator[Iterator[StepBatches[_Part]]]:
        """Begins to copy the first images of a step while the step before computes."""
        if self._stream is None:
            yield steps
            return
        with ahead(self._first_begun(steps), 1, self._device) as begun:
            yield begun

    def _first_begun(self, steps: Iterator[StepBatches[_Part]]) -> Iterator[StepBatches[_Part]]:
        for step in steps:
            self.begin(step.parts[0].images)
            yield step
