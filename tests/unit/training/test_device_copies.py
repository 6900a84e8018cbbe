"""Batches on their way to a device: in order, unchanged, and under way while the step before
computes.
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from mlcd.errors import InvalidInput
from mlcd.training.data.ahead import ahead
from mlcd.training.data.device_copies import DeviceCopies
from mlcd.training.data.loader import StepBatches
from tests.unit.training.waiting import no_waiting

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    images: torch.Tensor
    keys: tuple[str, ...] = ()

    def tensors(self):
        return {"images": self.images}


def steps_of(*steps):
    """Steps with parts of these images."""
    for number, parts in enumerate(steps):
        yield StepBatches(number, tuple(map(Part, parts)), 0.0)


class OnHost(torch.Tensor):
    """A tensor whose copy to a GPU is written into the log, and stays on the CPU."""

    @staticmethod
    def of(value, log):
        tensor = torch.full((2, 3), value).as_subclass(OnHost)
        tensor.log = log
        return tensor

    def to(self, device, *, non_blocking):
        assert device.type == "cuda"
        assert non_blocking
        value = int(self[0, 0])
        self.log.append(("copy", value, Stream.current_name()))
        Stream.inside.copied = value
        return OnHost.of(value, self.log)

    def record_stream(self, stream):
        self.log.append(("keep", int(self[0, 0]), stream.name))


@dataclass
class Stream:
    """A stream that records in the log what it waits for; its event is its thread's last copy."""

    name: str
    log: list = field(default_factory=list)
    # Each thread has its own current stream, as with CUDA.
    inside: ClassVar = threading.local()

    @classmethod
    def current_name(cls):
        return getattr(cls.inside, "name", "computing")

    def record_event(self):
        return self.inside.copied

    def wait_event(self, event):
        self.log.append(("wait", event, self.name))


@pytest.fixture
def log(monkeypatch):
    """The log of a GPU that there is not."""
    entries = []
    computing = Stream("computing", entries)

    @contextmanager
    def current(stream):
        Stream.inside.name = stream.name
        yield
        Stream.inside.name = "computing"

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying", entries))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    return entries


def test_on_a_cpu_nothing_is_touched():
    copies = DeviceCopies(CPU)
    tensors = [torch.ones(2), torch.zeros(0)]
    copies.start(tensors[0])
    taken = list(copies.iter_on_device(tensors))
    assert all(one is other for one, other in zip(taken, tensors, strict=True))
    steps = steps_of([torch.ones(1)])
    with copies.prefetch_first_images(steps) as same:
        assert same is steps


def test_the_next_images_are_copied_before_those_at_hand_are_computed_with(log):
    """The first of a step before the step before ends, on a stream that the computation waits
    for."""
    values = [(1, 2), (3, 4), (5, 6)]
    steps = steps_of(*([OnHost.of(value, log) for value in step] for step in values))
    copies, taken = DeviceCopies(torch.device("cuda")), []
    with copies.prefetch_first_images(steps) as prefetched:
        for step in prefetched:
            for images in copies.iter_on_device([part.images for part in step.parts]):
                taken.append(int(images[0, 0]))
                log.append(("compute", taken[-1], "computing"))
    assert taken == [1, 2, 3, 4, 5, 6]
    assert sorted(entry for entry in log if entry[0] == "copy") == [
        ("copy", value, "copying") for value in taken
    ]
    for value in taken:
        computed = log.index(("compute", value, "computing"))
        before = log[:computed]
        assert ("wait", value, "computing") in before
        assert ("keep", value, "computing") in before
        if value % 2:
            assert ("copy", value + 1, "copying") in before


def test_empty_and_unannounced_images_are_copied_where_they_are_needed(log):
    copies = DeviceCopies(torch.device("cuda"))
    copies.start(OnHost.of(7, log)[:0])
    assert log == []
    copies.take(OnHost.of(8, log))
    assert log == [("copy", 8, "computing")]


def test_steps_made_ahead_keep_order_end_and_errors():
    def failing():
        yield from steps_of([torch.ones(1)], [torch.ones(2)])
        raise InvalidInput("away", remedy="bring it back")

    with ahead(steps_of([], [], []), 2, CPU) as steps:
        assert [step.step for step in steps] == [0, 1, 2]
    with ahead(failing(), 3, CPU) as steps:
        assert [len(next(steps).parts[0].images) for _ in range(2)] == [1, 2]
        with pytest.raises(InvalidInput, match="away"):
            next(steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gets_what_plain_copies_give_and_waits_for_nothing():
    """Each copy is used up before its memory is used again."""
    gpu = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    shape = (10, 2, 64, 3, 96, 96)
    hosts = torch.randint(256, shape, dtype=torch.uint8, generator=generator).pin_memory()
    plain = hosts.to(gpu).float().sum(dim=(3, 4, 5)).flatten(0, 1)
    work = torch.randn(2048, 2048, device=gpu)
    copies, sums = DeviceCopies(gpu), []
    torch.cuda.synchronize()
    with copies.prefetch_first_images(steps_of(*hosts)) as prefetched:
        for step in prefetched:
            with no_waiting():
                for images in copies.iter_on_device([part.images for part in step.parts]):
                    work = torch.nn.functional.normalize(work @ work)
                    sums.append(images.float().sum(dim=(1, 2, 3)))
    assert torch.equal(torch.stack(sums), plain)
