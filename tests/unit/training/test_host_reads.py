"""How often the host reads what a GPU computed: each time the GPU has nothing to do until the host
has read and gone on.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mlcd.training.head.partial_fc as head_module
import mlcd.training.step as step_module
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.world import World
from tests.unit.training import replicas
from tests.unit.training.waiting import no_waiting

_READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "unique_consecutive",
    "_unique", "_unique2", "_coalesce",
}  # fmt: skip


class HostReads(TorchDispatchMode):
    """Counts the operations that read numbers or have a result of unknown size."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        plain = torch.Tensor.tolist

        def tolist(tensor):  # no operation that a mode sees
            self.count += 1
            return plain(tensor)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.Tensor, "tolist", tolist)
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in {"index", "index_put_"} else ()
        masked = any(torch.is_tensor(each) and each.dtype == torch.bool for each in indices)
        self.count += masked or name in _READS
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class OneOfTwo(World):
    """The first of two processes, of which the other has no samples."""

    size: int = 2

    def _reduce(self, tensor, operation):
        return tensor

    def gather_rows(self, rows, counts=None):
        return rows


def reads(head, num_labels, step=0):
    """The reads of the head in one part of a step, and of its backward pass."""
    labels = torch.arange(4 * num_labels).view(4, num_labels) % 200
    with HostReads() as mode:
        head(
            torch.ones((4, 8), requires_grad=True), labels, step, row_counts=(4, 0)
        ).loss.backward()
    return mode.count


def new_head(world=None, **options):
    head = PartialFC(200, 8, HeadConfig(scale=16.0, **options), world=world)
    head.initialize(0)
    return head


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["mlcd", "mlc", "cd"])
def test_a_process_that_has_all_centers_reads_nothing(monkeypatch, kind, ratio):
    """In many chunks as in one."""
    for entries in (1 << 20, 80):
        monkeypatch.setattr(head_module, "CHUNK_ENTRIES", entries)
        assert reads(new_head(kind=kind, negative_ratio=ratio), 3) == 0


def test_the_policy_partialfc_reads_where_a_step_has_more_labels_than_are_drawn():
    head = new_head(policy="partialfc", negative_ratio=0.1)
    assert [reads(head, num_labels) for num_labels in (5, 6)] == [0, 1]


def test_one_of_several_processes_reads_once_a_step_how_many_it_owns_of_the_drawn():
    head = new_head(OneOfTwo(), negative_ratio=0.3)
    assert [reads(head, 3, step) for step in (0, 0, 0, 1, 1)] == [1, 0, 0, 1, 0]
    head = new_head(OneOfTwo(), negative_ratio=1.0)
    assert reads(head, 3) == 0


def test_a_step_reads_once_if_all_is_finite(monkeypatch):
    """It has four micro-batches, whose class ids are checked on the host before they are copied."""
    state = replicas.new_state(World(), precision="fp32")
    counts = [(sum(each),) for each in replicas.COUNTS[2]]
    parts, shares = replicas.micro_batches(counts, 0, torch.float32)
    monkeypatch.setattr(step_module, "check_labels", lambda labels, num_classes: None)
    # torch's AdamW counts its steps on the host.
    monkeypatch.setattr(state.optimizer, "step", lambda: None)
    for _ in range(2):
        with HostReads() as mode:
            step_module.train_step(state, parts, shares, replicas.CONFIG, counts)
        assert mode.count == 1
        state.step += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["mlcd", "mlc", "cd"])
def test_a_gpu_never_waits(kind, ratio):
    head = PartialFC(200, 8, HeadConfig(kind=kind, scale=16.0, negative_ratio=ratio)).cuda()
    with torch.no_grad():
        head.weight.normal_()
    embeddings = torch.randn((4, 8), device="cuda", requires_grad=True)
    labels = torch.arange(12, device="cuda").view(4, 3)
    head(embeddings, labels, 0).loss.backward()
    with no_waiting():
        head(embeddings, labels, 1).loss.backward()
