"""Several views of an image: each has the image's labels."""

import pytest
import torch

from mlcd.errors import ConfigInvalid
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.colors import draw_colors
from mlcd.training.data.drop_path import branch_scales
from mlcd.training.data.recoloring import recolor
from mlcd.world import World
from tests.unit.training import replicas


def test_the_loss_of_classes_is_the_mean_over_views():
    """Each view by itself, with its own changes of color and its own left-out branches."""
    counts = ((5,),)
    found = replicas.view_gradients(World(), counts)
    config, state = replicas.with_views(), replicas.new_state(World())
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("augment.local_size=8", "require each other"),
        (
            "augment={views: 2, local_views: 2, local_size: 9}",
            "must be a multiple of model.patch_size=8",
        ),
        ("augment.jitter=0.5", "augment.jitter requires"),
        ("augment.blur=[1.0]", "1 for each of 2 kinds of views, got 1"),
        ("augment.blur_sigma=[2.0, 1.0]", "smallest, largest"),
    ],
)
def test_options_that_contradict_each_other_are_refused(config, override, message):
    with pytest.raises(ConfigInvalid, match=message):
        config("run", "augment.views=2", override)


def test_views_are_counted_in_what_a_run_takes(config):
    from mlcd.training.plan import DeviceProfile, plan_training

    def plan(*options):
        return plan_training(config("run", *options), 20, 1000, 1, DeviceProfile(1.0))

    one, two = plan(), plan("augment.views=2")
    assert two.flops_per_image == pytest.approx(2 * one.flops_per_image)
    assert two.memory.activations == one.memory.activations


def test_the_kinds_of_views_have_their_sizes_and_areas():
    config = AugmentConfig(views=2, local_views=3, local_size=96, min_area=0.3)
    assert [config.size_of(view, 224) for view in range(config.num_views)] == [224] * 2 + [96] * 3
    assert (config.area_of(1), config.area_of(4)) == ((0.3, 1.0), (0.05, 0.32))
