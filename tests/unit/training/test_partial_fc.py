"""The head against Eq. 5 written out, and any number of processes against one."""

from functools import partial

import numpy as np
import pytest
import torch

from mlcd.errors import ConfigInvalid
from mlcd.losses.negatives import draw_negatives
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.types import unit_rows
from mlcd.world import World
from tests.ranks import run_ranks
from tests.unit.training import distributed

CONFIG = HeadConfig(scale=16.0, negative_ratio=1.0, margin_grad="exact")


def test_padding_never_reads_a_center_and_e_equal_w_is_finite():
    head = PartialFC(23, 8, CONFIG)
    head.initialize(1)
    with torch.no_grad():
        head.weight[-1] = head.weight[0]
    z = head.weight[:1].detach().clone().requires_grad_()
    loss = head(z, torch.tensor([[0, -1]]), 0).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(head.weight.grad.to_dense()).all()


def test_a_poisoned_last_center_harms_only_those_who_name_or_draw_it():
    config = HeadConfig(scale=16.0, negative_ratio=0.3)
    step = next(step for step in range(50) if 19 not in draw_negatives(20, 0.3, seed=0, step=step))
    head = PartialFC(20, 8, config)
    head.initialize(1)
    with torch.no_grad():
        head.weight[-1] = torch.nan
    z = torch.randn((3, 8), generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[0, -1], [-1, -1], [3, 3]])
    loss = head(z, labels, step).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()
    assert torch.isnan(head(z, torch.tensor([[19, -1]] * 3), step).loss)


def test_bfloat16_embeddings_are_computed_in_float32():
    head = PartialFC(23, 8, HeadConfig(negative_ratio=1.0))
    head.initialize(1)
    z = torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([[1, 2]] * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(z, labels, 0).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(head(z.float(), labels, 0).loss.item(), rel=1e-6)


def test_meters_tell_what_happened():
    head = PartialFC(100, 8, HeadConfig(negative_ratio=0.2, scale=16.0))
    head.initialize(1)
    labels = torch.arange(100).view(4, 25)
    meters = head(torch.randn((4, 8), generator=torch.Generator().manual_seed(0)), labels, 3).meters
    assert meters["unique_positives"] == 100
    assert meters["effective_negatives"] == 15  # of 20 drawn, 5 are on average the sample's own
    assert -1 < meters["negative_cosine"] < 1
    assert 0 < meters["sigma_negative"] < 1


def test_it_starts_from_centers_of_its_own_dimension_only():
    vectors = unit_rows(np.random.default_rng(0).standard_normal((20, 8)))
    head = PartialFC(20, 8, CONFIG)
    head.initialize_from(vectors)
    assert torch.allclose(head.unit_centers(), torch.from_numpy(vectors), atol=1e-6)
    for num_classes, dimension in ((21, 8), (20, 9)):
        with pytest.raises(ConfigInvalid, match="the head must start from"):
            PartialFC(num_classes, dimension, CONFIG).initialize_from(vectors)


@pytest.mark.parametrize("update", ["sparse", "dense"])
def test_rows_from_centers_turn_as_far_a_step_as_random_ones(update):
    """Their norm is that of random rows: at norm 1, with 1,280 numbers, they turned 0.36 times as
    far.
    """
    num_classes, dimension = 50, 1280
    vectors = unit_rows(np.random.default_rng(0).standard_normal((num_classes, dimension)))
    turned = []
    for start in ("random", "centers"):
        head = PartialFC(
            num_classes, dimension, HeadConfig(scale=16.0, negative_ratio=1.0, center_update=update)
        )
        if start == "random":
            head.initialize(0)
        else:
            head.initialize_from(vectors)
        before = head.unit_centers()
        optimizer = center_optimizer(head, OptimConfig(lr=1e-4))
        z = torch.randn((8, dimension), generator=torch.Generator().manual_seed(0))
        head(z, torch.arange(8)[:, None], 0).loss.backward()
        optimizer.step()
        turned.append((head.unit_centers() - before).norm(dim=1).mean().item())
    assert turned[1] == pytest.approx(turned[0], rel=0.05)


def test_initial_centers_do_not_depend_on_the_number_of_processes():
    whole = PartialFC(10_001, 4, CONFIG)
    whole.initialize(3)
    parts = [PartialFC(10_001, 4, CONFIG, world=World(rank, 3)) for rank in range(3)]
    for part in parts:
        part.initialize(3)
    assert torch.equal(torch.cat([part.weight for part in parts]), whole.weight)
    assert whole.weight.std().item() == pytest.approx(0.01, rel=0.02)


@pytest.fixture(scope="module")
def one_process():
    alike = distributed.forms()
    return {size: reference(size) | alike for size in (1, 2, 3)}


def reference(size):
    """The same batches on one process, in memory."""
    world, results = World(), {}
    for name, config, num_classes, num_labels in distributed.cases():
        results[name] = distributed.head_step(
            world, config, num_classes, *distributed.batch(num_classes, num_labels)
        )
    x, labels = distributed.batch(11, 3)
    config = HeadConfig(scale=16.0, negative_ratio=1.0)
    results["one-owner"] = distributed.head_step(world, config, 11, x, torch.zeros_like(labels))
    x, labels = distributed.batch(11, 4, num=8 * size)
    whole = distributed.head_step(world, HeadConfig(scale=16.0, negative_ratio=0.4), 11, x, labels)
    results |= {f"accumulate-{n}": whole for n in (1, 2, 4)}
    x, y = distributed.batch(3, 1)[0], distributed.batch(3, 1, seed=9)[0]
    results["clipping"] = distributed.clip_step(world)
    return results | {
        kind: distributed.contrastive_step(world, kind, x, y) for kind in ("clip", "siglip")
    }


def test_backward_works_inside_an_outer_autocast():
    z = torch.randn((4, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2], [3, -1], [4, 5], [0, 7]])
    gradients = []
    for enabled in (False, True):
        head = PartialFC(23, 8, CONFIG)
        head.initialize(1)
        leaf = z.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            head(leaf, labels, 0).loss.backward()
        gradients.append((leaf.grad, head.weight.grad.to_dense()))
    for plain, under_autocast in zip(*gradients, strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_processes_equals_one(size, one_process, tmp_path):
    run_ranks(distributed.run, size, str(tmp_path))
    results = [
        torch.load(tmp_path / f"results-{size}-{rank}.pt", weights_only=False)
        for rank in range(size)
    ]
    close = partial(torch.allclose, rtol=1e-12, atol=1e-12)
    for name, expected in one_process[size].items():
        for rank, result in enumerate(results):
            got, at = result[name], (name, rank)
            assert got["loss"] == pytest.approx(expected["loss"], abs=1e-12), at
            if "gradients" in got:
                assert close(got["gradients"], expected["gradients"]), at
                continue
            assert close(got["trunk"], expected["trunk"]), at
            start, stop = got["shard"]
            assert close(got["centers"], expected["centers"][start:stop]), at
            if "scalars" in expected:
                assert torch.equal(got["scalars"], results[0][name]["scalars"]), at
                assert close(got["scalars"], expected["scalars"]), at
            if "meters" in expected and not name.startswith("accumulate"):
                assert got["meters"] == pytest.approx(expected["meters"], abs=1e-9, nan_ok=True), at
        if "shard" in results[0][name]:
            assert results[-1][name]["shard"][1] == len(expected["centers"])


def test_centers_saved_by_four_processes_go_on_alike_on_any_number(tmp_path):
    run_ranks(distributed.save, 4, str(tmp_path))
    saved = [torch.load(tmp_path / f"saved-{rank}.pt") for rank in range(4)]
    for size in (1, 3):
        run_ranks(distributed.load, size, str(tmp_path))
        loaded = [torch.load(tmp_path / f"loaded-{size}-{rank}.pt") for rank in range(size)]
        assert torch.equal(
            torch.cat([one["weight"] for one in loaded]),
            torch.cat([one["weight"] for one in saved]),
        )
        assert sum(len(one["row_steps"]) for one in loaded) == 11
        for one in loaded:
            assert one["loss"] == pytest.approx(saved[0]["loss"], abs=1e-12)
