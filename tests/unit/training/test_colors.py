"""Changes of color: draws as torchvision's, operations as Pillow's and SciPy's, any batch alike."""

import colorsys
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import gaussian_filter
from scipy.stats import chisquare, kstest

from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.colors import JITTERS, draw_colors
from mlcd.training.data.recoloring import recolor

ALL = {"brightness": 0.4, "contrast": 1.2, "saturation": 0.2, "hue": 0.1, "grayscale": 0.2}
ALL |= {"blur": 0.5, "solarize": 0.2}
NUM = 4000


def drawn(num=NUM, seed=3, view=0, **config):
    return draw_colors(np.arange(num), AugmentConfig(**config), seed, view)


def test_factors_and_shares_are_distributed_as_torchvision_s():
    """ColorJitter.get_params, RandomApply, RandomGrayscale, GaussianBlur.get_params and
    RandomSolarize, restated: torchvision cannot be imported beside this torch.
    """
    colors = drawn(**ALL)
    ranges = {name: (max(0.0, 1.0 - ALL[name]), 1.0 + ALL[name]) for name in JITTERS[:3]}
    ranges["hue"] = (-0.1, 0.1)
    for number, name in enumerate(JITTERS):
        low, high = ranges[name]
        assert kstest(colors.factors[:, number], "uniform", (low, high - low)).pvalue > 1e-3, name
    assert kstest(colors.sigma, "uniform", (0.1, 1.9)).pvalue > 1e-3
    _, counts = np.unique(colors.order @ [1, 4, 16, 64], return_counts=True)
    assert len(counts) == math.factorial(4)
    assert chisquare(counts).pvalue > 1e-3
    shares = {"jittered": 0.8, "gray": 0.2, "blurred": 0.5, "solarized": 0.2}
    for name, share in shares.items():
        spread = 4 * math.sqrt(share * (1 - share) / NUM)
        assert getattr(colors, name).mean() == pytest.approx(share, abs=spread), name
    columns = np.column_stack(
        [colors.factors, colors.sigma, *(getattr(colors, name) for name in shares)]
    )
    assert np.abs(np.corrcoef(columns.T) - np.eye(9)).max() < 0.08


def test_a_view_depends_on_seed_position_and_its_number_alone():
    config = AugmentConfig(views=2, **ALL)
    whole = draw_colors(np.arange(50), config, 3, 1)
    part = draw_colors(np.arange(20, 30), config, 3, 1)
    for name in ("jittered", "order", "factors", "gray", "blurred", "sigma", "solarized"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[20:30])
    for seed, view in ((4, 1), (3, 0)):
        other = draw_colors(np.arange(50), config, seed, view)
        assert abs(np.corrcoef(other.factors[:, 0], whole.factors[:, 0])[0, 1]) < 0.5
    images = pictures(50)
    together = recolor(images.clone(), whole)
    alone = recolor(images[20:30].clone(), part)
    # A blur is a product of matrices, whose last bit may depend on the batch.
    assert torch.allclose(alone, together[20:30], atol=1e-3)
    sharp = ~whole.blurred[20:30]
    assert torch.equal(alone[sharp], together[20:30][sharp])
    assert not torch.equal(together, images)


def test_each_view_has_its_own_share():
    """DINO's: the first view is always blurred, the second rarely, and it alone is solarized."""
    shares = {"views": 2, "local_views": 3, "local_size": 8, "blur": (1.0, 0.1, 0.5)}
    for view, (blur, solarize) in enumerate([(1, 0), (0.1, 0.2), (0.5, 0), (0.5, 0), (0.5, 0)]):
        colors = drawn(view=view, **shares, solarize=(0, 0.2, 0))
        assert colors.blurred.mean() == pytest.approx(blur, abs=0.03)
        assert colors.solarized.mean() == pytest.approx(solarize, abs=0.03)


@pytest.mark.parametrize(
    "config", [{}, {"brightness": 0.4, "jitter": 0.0}, {"views": 2, "blur": (0.0, 1.0)}]
)
def test_where_nothing_changes_nothing_is_drawn(config):
    assert drawn(num=5, **config) is None


def pictures(num, side=24, seed=0):
    """Photograph-like values with gray, black, white and saturated places."""
    values = np.random.default_rng(seed).integers(0, 256, (num, 3, side, side))
    values[:, :, :2] = values[:, :1, :2]
    values[:, :, 2, :3] = [0, 255, 128]
    return torch.from_numpy(values.astype(np.float32))


def always(num=8, **config):
    """Draws of one change at full share, and `num` pictures before and after."""
    images = pictures(num)
    whole = {"jitter": 1.0} if config.keys() <= set(JITTERS) else {}
    colors = drawn(num=num, **whole, **config)
    return colors, images, recolor(images.clone(), colors)


def as_pil(image):
    return Image.fromarray(image.numpy().astype(np.uint8).transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_jitter_is_pillow_s_up_to_its_rounding(name, enhance):
    colors, before, after = always(**{name: 0.7})
    for image, changed, factor in zip(
        before, after, colors.factors[:, JITTERS.index(name)], strict=True
    ):
        expected = np.asarray(enhance(as_pil(image)).enhance(factor)).transpose(2, 0, 1)
        # Pillow rounds the gray, and cuts off the result.
        assert np.abs(changed.numpy() - expected).max() < 1.6


def test_gray_and_solarized_are_pillow_s():
    _, before, after = always(grayscale=1.0)
    for image, changed in zip(before, after, strict=True):
        expected = np.asarray(ImageOps.grayscale(as_pil(image)))
        assert np.abs(changed.numpy() - expected).max() < 0.51
    _, before, after = always(solarize=1.0)
    for image, changed in zip(before, after, strict=True):
        expected = np.asarray(ImageOps.solarize(as_pil(image), 128)).transpose(2, 0, 1)
        assert np.array_equal(changed.numpy(), expected)


def test_all_changes_apply_in_the_drawn_order_to_the_drawn_images():
    """One after the other in float64, against all at once in float32."""
    colors = drawn(num=60, **ALL)
    images = pictures(60)
    after = recolor(images.clone(), colors)
    assert 0 < sum((after == images).flatten(1).all(dim=1)) < 30  # untouched by chance
    luma = np.array([0.299, 0.587, 0.114])
    for index, image in enumerate(images.double().numpy()):
        x = image
        for number in colors.order[index] if colors.jittered[index] else ():
            factor = colors.factors[index, number]
            gray = np.tensordot(luma, x, 1)[None]
            if JITTERS[number] == "hue":
                x = np.apply_along_axis(turned, 0, x, factor)
                continue
            other = {"brightness": 0.0, "contrast": gray.mean(), "saturation": gray}
            x = (factor * x + (1 - factor) * other[JITTERS[number]]).clip(0, 255)
        if colors.gray[index]:
            x = np.broadcast_to(np.tensordot(luma, x, 1), x.shape)
        if colors.blurred[index]:
            sigma = colors.sigma[index]
            x = gaussian_filter(x, (0, sigma, sigma), mode="mirror", radius=(0, 20, 20))
        if colors.solarized[index]:
            # Float32 may be on the other side of the step.
            clear = np.abs(x - 128) > 0.05
            x = np.where(x >= 128, 255 - x, x)
            x = np.where(clear, x, after[index].numpy())
        assert np.abs(after[index].numpy() - x).max() < 0.05, index


def turned(pixel, turn):
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
    return np.array(colorsys.hsv_to_rgb((hue + turn) % 1.0, saturation, value))
