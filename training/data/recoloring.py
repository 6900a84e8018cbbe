"""Applies the changes of color that `mlcd.training.data.colors` draws, on any device.

Shapes: B images, C = 3 channels, H = W the side. Values are float, in 0..255, and are not rounded.
The operations are torchvision's for floating-point images.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.training.data.colors import JITTERS, Colors

_WHITE = 255.0
_SOLARIZED_FROM = 128.0


def recolor(x_BCHW: Tensor, colors: Colors) -> Tensor:
    """Changes the images in place, and returns them.

    The order is that of SimCLR, BYOL and DINO: jitter, gray, blur, solarize. The host knows which
    images change, so it does not wait for the device.
    """
    for slot in range(len(JITTERS)):
        for jitter, name in enumerate(JITTERS):
            if name in colors.jitters:
                chosen = colors.jittered & (colors.order[:, slot] == jitter)
                _change(x_BCHW, chosen, _JITTERING[name], colors.factors[:, jitter])
    _change(x_BCHW, colors.gray, _gray)
    _change(x_BCHW, colors.blurred, _blur, colors.sigma)
    _change(x_BCHW, colors.solarized, _solarize)
    return x_BCHW


def _change(
    x_BCHW: Tensor,
    chosen: NDArray[np.bool_],
    operation: Callable[..., Tensor],
    factors: NDArray[np.float64] | None = None,
) -> None:
    """Applies an operation to the chosen images, each with its own factor."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return
    device = x_BCHW.device
    index = torch.from_numpy(rows).to(device, non_blocking=True)
    arguments = []
    if factors is not None:
        row_factors = torch.from_numpy(factors[rows]).to(device, x_BCHW.dtype, non_blocking=True)
        arguments.append(row_factors[:, None, None, None])
    x_BCHW.index_copy_(0, index, operation(x_BCHW.index_select(0, index), *arguments))


def _brighten(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    return (factor * x_BCHW).clamp_(0.0, _WHITE)


def _change_contrast(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    return _blend(x_BCHW, _gray(x_BCHW).mean(dim=(1, 2, 3), keepdim=True), factor)


def _saturate(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    return _blend(x_BCHW, _gray(x_BCHW), factor)


def _turn_hue(x_BCHW: Tensor, turn: Tensor) -> Tensor:
    """Turns the hue of HSV by a share of the circle; value and saturation stay."""
    red, green, blue = x_BCHW.split(1, dim=1)
    value = x_BCHW.amax(dim=1, keepdim=True)
    chroma = value - x_BCHW.amin(dim=1, keepdim=True)
    # A gray pixel has no hue; any value works, because its chroma is 0.
    divisor = torch.where(chroma == 0.0, torch.ones_like(chroma), chroma)
    sextant = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0),
    )
    # The closed form of the conversion back to red, green and blue.
    phase = torch.cat([sextant + offset for offset in (5.0, 3.0, 1.0)], dim=1)
    phase.add_(6.0 * turn).remainder_(6.0)
    share = torch.minimum(phase, 4.0 - phase).clamp_(0.0, 1.0)
    turned: Tensor = torch.addcmul(value, chroma, share, value=-1.0)
    return turned


def _gray(x_BCHW: Tensor) -> Tensor:
    """Returns the luma (ITU-R 601) in each of the three channels."""
    red, green, blue = x_BCHW.split(1, dim=1)
    luma: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return luma.expand_as(x_BCHW)


def _blur(x_BCHW: Tensor, sigma: Tensor) -> Tensor:
    """Convolves with a Gaussian in both directions; the border is reflected.

    Each direction is one product with a matrix of the weights, including the reflection. For images
    of this size this is as fast as a convolution, and it allows one sigma per image.
    """
    side = x_BCHW.shape[-1]
    position = torch.arange(side, device=x_BCHW.device, dtype=x_BCHW.dtype)
    target, source = position[:, None], position[None, :]
    last = side - 1.0
    weight = _gaussian(target - source, sigma)
    # Position -j reflects to j, and last + j to last - j; border pixels are not repeated.
    weight += _gaussian(target + source, sigma) * (source > 0.0)
    weight += _gaussian(target - (2.0 * last - source), sigma) * (source < last)
    weight /= weight.sum(dim=-1, keepdim=True)
    return weight @ x_BCHW @ weight.transpose(-1, -2)


def _gaussian(distance: Tensor, sigma: Tensor) -> Tensor:
    return torch.exp(-0.5 * (distance / sigma).square())


def _solarize(x_BCHW: Tensor) -> Tensor:
    return torch.where(x_BCHW >= _SOLARIZED_FROM, _WHITE - x_BCHW, x_BCHW)


def _blend(x_BCHW: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    return torch.addcmul((1.0 - factor) * base, factor, x_BCHW).clamp_(0.0, _WHITE)


_JITTERING: dict[str, Callable[..., Tensor]] = {
    "brightness": _brighten,
    "contrast": _change_contrast,
    "saturation": _saturate,
    "hue": _turn_hue,
}
