"""Several views of an image: each with its labels before the head, or told from other images'."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from mlcd.errors import ConfigInvalid
from mlcd.export.model_artifact import find_weights
from mlcd.models.runs import find_checkpoint
from mlcd.models.zoo import LoadOptions
from mlcd.world import World
from tests.unit.training import replicas
from tests.unit.training.running import SILENT, read_log
from training.config import AugmentConfig
from training.data.colors import draw_colors
from training.data.drop_path import branch_scales
from training.data.recoloring import recolor
from training.evaluation.while_training import open_evaluation
from training.head.instance_head import InstanceConfig, InstanceHead
from training.run.run_training import run_training

TWO = ("augment.views=2", "loss={kind: instance_softmax}")


def test_the_loss_of_classes_is_the_mean_over_views():
    """Each view by itself, with its own changes of color and its own left-out branches."""
    counts = ((5,),)
    found = replicas.view_gradients(World(), "classes", counts)
    config, state = replicas.with_views("classes"), replicas.new_state(World())
    (part,), _ = replicas.micro_batches(counts, 0)
    crops = (part.images, part.images.flip(3), part.images[:, :, :4, :4])
    losses = []
    for view, pixels in enumerate(crops):
        colors = draw_colors(part.positions, config.augment, config.seed, view)
        scales = branch_scales(config.model, part.positions, config.seed, view).double()
        embedding = state.backbone.embed(recolor(pixels.float().clone(), colors), scales)
        losses.append(state.head(embedding, part.labels, state.step).loss)
    loss = torch.stack(losses).mean()
    loss.backward()
    assert found["loss"].item() == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in state.model.trunk.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("kind", ["instance_softmax", "instance_sigmoid"])
def test_instances_are_told_apart_by_the_definition(kind):
    """Two global views and one local: the mean over the three pairs, by loops in float64."""
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn((5, 4), generator=generator, dtype=torch.float64) for _ in range(3)]
    head = InstanceHead(InstanceConfig(kind, 7.0, bias=-1.5)).double()
    output = head(views, 2)
    unit = [normalize(each, dim=1) for each in views]
    expected = 0.0
    for a, b in ((0, 1), (0, 2), (1, 2)):
        logits = 7.0 * unit[a] @ unit[b].T
        for i in range(5):
            if kind == "instance_softmax":
                for row in (logits[i], logits[:, i]):
                    expected -= math.log(math.exp(row[i]) / sum(map(math.exp, row))) / 30
                continue
            for j in range(5):
                sign = 1 if i == j else -1
                expected += math.log1p(math.exp(-sign * (float(logits[i, j]) - 1.5))) / 15
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    cosines = torch.stack([unit[a] @ unit[b].T for a, b in ((0, 1), (0, 2), (1, 2))])
    own = cosines.diagonal(dim1=1, dim2=2)
    assert output.meters["positive_cosine"].item() == pytest.approx(own.mean().item())
    others = (cosines.sum() - own.sum()).item() / 60
    assert output.meters["negative_cosine"].item() == pytest.approx(others)


def test_local_views_are_compared_with_global_ones_only():
    views = [torch.randn((3, 4)).requires_grad_() for _ in range(4)]
    InstanceHead(InstanceConfig("instance_softmax", 5.0))(views, 1).loss.backward()
    alone = views[0].detach().requires_grad_()
    pairs = [
        InstanceHead(InstanceConfig("instance_softmax", 5.0))([alone, each.detach()], 1).loss
        for each in views[1:]
    ]
    torch.stack(pairs).mean().backward()
    assert torch.allclose(views[0].grad, alone.grad, atol=1e-6)


def test_a_learned_scale_stays_within_clip_s_limit():
    head = InstanceHead(InstanceConfig("instance_softmax", 10.0, learn_scale=True))
    with torch.no_grad():
        head.log_scale.fill_(7.0)
    head.limit()
    assert head.log_scale.exp().item() == pytest.approx(100.0, rel=1e-6)


def test_a_run_without_centers_learns_and_is_used_as_any_other(config, tmp_path):
    options = (*TWO, "loss.learn_scale=true", "schedule.steps=30", "log_every=1")
    options += ("evaluation.every_steps=30",)
    run = run_training(config("run", *options), SILENT, open_evaluation=open_evaluation)
    *log, measured = read_log(run)
    assert "knn" in str(measured)
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert log[-1]["positive_cosine"] > log[-1]["negative_cosine"] + 0.1
    assert log[-1]["scale"] != pytest.approx(1 / 0.07, abs=1e-3)
    assert not (find_checkpoint(run.path) / "centers").exists()
    weights = find_weights(str(run.path), tmp_path, LoadOptions())
    assert weights.centers is None
    assert weights.load().fingerprint() == run.fingerprint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("augment.views=1", "compares views of an image"),
        ("compute.accumulation=2", "would split the negatives"),
        ("loss.margin=0.1", "loss.margin has no effect on instance_softmax"),
        ("loss.bias=1", "loss.bias has no effect on instance_softmax"),
        ("data.centers=C", "data.centers has no effect"),
        ("compute.head_products=bf16", "compute.head_products has no effect"),
        ("model.freeze=tower", "leaves nothing"),
        ("augment.local_size=8", "have no effect alone"),
        ("augment={views: 2, local_views: 2, local_size: 9}", "not a multiple of patches of 8"),
        ("augment.jitter=0.5", "augment.jitter has no effect without"),
        ("augment.blur=[1.0]", "has 1 numbers, and there are 2 kinds of views"),
        ("augment.blur_sigma=[2.0, 1.0]", "ends before it begins"),
    ],
)
def test_options_that_contradict_each_other_are_refused(config, override, message):
    with pytest.raises(ConfigInvalid, match=message):
        config("run", *TWO, override)


def test_the_batch_sets_the_bias_of_the_sigmoid(config):
    loss = config("run", "augment.views=2", "loss={kind: instance_sigmoid}").loss
    assert InstanceConfig.of(loss, 512).bias == pytest.approx(-math.log(511))
    assert (InstanceConfig.of(loss, 512).scale, loss.num_labels) == (10.0, 1)


def test_views_are_counted_in_what_a_run_takes(config):
    from training.plan import DeviceProfile, plan_training

    def plan(*options):
        return plan_training(config("run", *options), 20, 1000, 1, DeviceProfile(1.0))

    one, two = plan(), plan("augment.views=2")
    assert two.flops_per_image == pytest.approx(2 * one.flops_per_image)
    assert two.memory.activations == one.memory.activations
    instances = plan(*TWO)
    assert (instances.memory.centers, instances.num_classes) == (0, 0)
    assert instances.memory.activations == 2 * one.memory.activations
    assert instances.checkpoint_bytes < one.checkpoint_bytes


def test_the_kinds_of_views_have_their_sizes_and_areas():
    config = AugmentConfig(views=2, local_views=3, local_size=96, min_area=0.3)
    assert [config.size_of(view, 224) for view in range(config.num_views)] == [224] * 2 + [96] * 3
    assert (config.area_of(1), config.area_of(4)) == ((0.3, 1.0), (0.05, 0.32))
    assert config.num_pairs == 1 + 6
