import itertools

import pytest
import torch

from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import RowAdamW
from mlcd.training.head.row_gradients import distinct_rows, sum_duplicate_rows
from mlcd.training.head.shards import Shard
from mlcd.training.optim.clip import clip_global_norm
from mlcd.world import World


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


def test_touched_rows_move_as_adamw_and_the_others_not_at_all():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((6, 4), generator=generator, dtype=torch.float64)
    options = {"lr": 0.05, "betas": (0.9, 0.98), "eps": 0.3, "weight_decay": 0.1}
    ours = start.clone().requires_grad_()
    optimizer = RowAdamW([ours], **options)
    theirs = [start[row].clone().requires_grad_() for row in range(6)]
    references = [torch.optim.AdamW([row], **options) for row in theirs]
    for step in range(12):
        rows = [row for row in range(5) if (step + row) % 3]  # row 5 never
        values = torch.randn((len(rows), 4), generator=generator, dtype=torch.float64)
        before = ours.detach().clone()
        ours.grad = sparse(rows, values, (6, 4))
        optimizer.step()
        for row, value in zip(rows, values, strict=True):
            theirs[row].grad = value
            references[row].step()
        for row in set(range(6)) - set(rows):
            assert torch.equal(ours[row], before[row])
    assert torch.allclose(ours, torch.stack(theirs), atol=1e-12)
    assert optimizer.state[ours]["row_steps"].tolist() == [8, 8, 8, 8, 8, 0]


def test_gradients_of_several_micro_batches_add_up_before_the_step():
    weight = torch.zeros((4, 2), requires_grad=True)
    optimizer = RowAdamW([weight], lr=0.1)
    weight.grad = sparse([0, 1], torch.ones(2, 2), (4, 2)) + sparse(
        [1, 2], torch.ones(2, 2), (4, 2)
    )
    sum_duplicate_rows(weight)
    optimizer.step()
    assert optimizer.state[weight]["row_steps"].tolist() == [1, 1, 1, 0]
    assert optimizer.state[weight]["exp_avg"][:, 0].tolist() == pytest.approx([0.1, 0.2, 0.1, 0.0])


def test_rows_are_made_distinct_by_their_number_alone():
    rows = torch.tensor([5, 2, 5, 2, 9, 5])
    for most, padding in ((10, 3), (4, 1), (3, 0)):
        distinct, places = distinct_rows(rows, most)
        assert distinct.tolist() == [2, 5, 9] + padding * [9]
        assert torch.equal(distinct[places], rows)


def test_dense_update_moves_rows_that_nobody_touched():
    """The documented difference: dense AdamW's stale momentum."""
    for update, moves in (("sparse", False), ("dense", True)):
        head = PartialFC(50, 4, HeadConfig(negative_ratio=0.1, center_update=update))
        head.initialize(0)
        kind = RowAdamW if update == "sparse" else torch.optim.AdamW
        optimizer = kind(head.parameters(), lr=0.1, weight_decay=0.0)
        z = torch.randn((3, 4), generator=torch.Generator().manual_seed(0))
        moved_untouched = False
        for step in range(2):
            optimizer.zero_grad()
            head(z, torch.tensor([[1], [2], [3]]), step).loss.backward()
            gradient = head.weight.grad.to_dense()
            before = head.weight.detach().clone()
            optimizer.step()
            untouched = gradient.abs().sum(dim=1) == 0
            moved_untouched |= not torch.equal(head.weight[untouched], before[untouched])
        assert moved_untouched == moves


def test_one_norm_over_everything():
    dense, shard = torch.zeros(3, requires_grad=True), torch.zeros((4, 2), requires_grad=True)
    dense.grad = torch.tensor([3.0, 0.0, 0.0])
    shard.grad = sparse([1, 1], torch.tensor([[2.0, 0.0], [2.0, 0.0]]), (4, 2))  # adds up to 4
    sum_duplicate_rows(shard)
    norms = clip_global_norm([dense], [shard], 1.0, World())
    assert [norm.item() for norm in norms] == pytest.approx([3.0, 4.0])
    assert dense.grad.tolist() == pytest.approx([0.6, 0, 0], abs=1e-5)
    assert shard.grad.to_dense()[1].tolist() == pytest.approx([0.8, 0], abs=1e-5)
    assert [n.item() for n in clip_global_norm([dense], [shard], 9.0, World())] == pytest.approx(
        [0.6, 0.8], abs=1e-5
    )


def test_clipping_equals_torch_s():
    tensors = [
        torch.randn(5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for seed in range(3)
    ]
    copies = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.grad, copy.grad = tensor.detach() * 2, tensor.detach() * 2
    clip_global_norm(tensors, [], 0.7, World())
    torch.nn.utils.clip_grad_norm_(copies, 0.7)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.allclose(tensor.grad, copy.grad, rtol=1e-5)


@pytest.mark.parametrize(("num_classes", "size"), [(11, 4), (8, 4), (3, 4), (5, 4), (1_000_003, 7)])
def test_shards_are_contiguous_complete_and_cut_as_torch_cuts(num_classes, size):
    shards = [Shard.of(rank, size, num_classes) for rank in range(size)]
    assert shards[0].start == 0
    assert shards[-1].stop == num_classes
    assert all(left.stop == right.start for left, right in itertools.pairwise(shards))
    cut = [len(piece) for piece in torch.empty(num_classes).chunk(size)]
    assert [len(shard) for shard in shards] == cut + [0] * (size - len(cut))
