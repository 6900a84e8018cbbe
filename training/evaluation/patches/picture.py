"""Draws images, each above the colors of its patches."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mlcd.artifacts.disk import translate_os_errors, write_synced
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.export.model_artifact import find_weights, load_weights
from mlcd.images.prefetch import Prepared, prepare_all
from mlcd.images.quiet import silence_decoders
from mlcd.images.sources import open_source
from mlcd.models.servable import Servable
from mlcd.models.zoo import LoadOptions, at_resolution
from mlcd.training.evaluation.patches.pca import ColoredPatches, color_patches

_SUFFIXES: Final = {".png": "PNG", ".webp": "WEBP", ".jpg": "JPEG"}


@dataclass(frozen=True)
class DrawnPicture:
    """A picture that was drawn, and its contents.

    shares: of the variance, by component.
    """

    path: Path
    keys: list[str]
    protocol: dict[str, Any]
    shares: tuple[float, ...]

    def facts(self) -> dict[str, Any]:
        return {
            "picture": str(self.path),
            "images": self.keys,
            "variance": list(self.shares),
            "protocol": self.protocol,
        }

    def __str__(self) -> str:
        shares = ", ".join(f"{100 * share:.1f}" for share in self.shares)
        protocol = ", ".join(f"{name} {value}" for name, value in self.protocol.items())
        return f"{self.path}: {len(self.keys)} images, {shares} % of variance\nprotocol: {protocol}"


def draw(
    spec: str, location: str, path: Path, *, side: int, num: int, foreground: bool
) -> DrawnPicture:
    """Draws the patches of the first `num` images at a location, each `side` pixels wide.

    Raises ConfigInvalid for a side that is not a multiple of the patch size or an unknown suffix,
    and InvalidInput if no image can be decoded.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigInvalid(
            f"--out must have one of the suffixes {', '.join(_SUFFIXES)}, got {path}",
            remedy=f"call it {path.stem}.png",
        )
    model = load_weights(find_weights(spec, path.parent, LoadOptions(), text=False), spec)
    config = model.trunk.config
    if side % config.patch_size:
        below = side // config.patch_size * config.patch_size
        raise ConfigInvalid(
            f"--side must be a multiple of the patch size {config.patch_size} of {spec}, got"
            f" {side}",
            remedy=f"give --side {below or config.patch_size}",
        )
    fingerprint = model.fingerprint()
    model = at_resolution(model, side)
    images = list(_prepare_images(location, model, num))
    pixels = np.stack([image.pixels for image in images if image.pixels is not None])
    grid = side // config.patch_size
    colored = color_patches(embed_patches(model, pixels), grid, foreground=foreground)
    buffer = io.BytesIO()
    _render(pixels, colored, grid).save(buffer, _SUFFIXES[path.suffix.lower()])
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, buffer.getvalue())
    protocol = {
        "kind": "pca",
        "features": "patches after the last norm",
        "side": side,
        "grid": grid,
        "colored": "foreground" if foreground else "all patches",
        "fingerprint": fingerprint,
        "split": _digest(images),
    }
    return DrawnPicture(path, [image.entry.key for image in images], protocol, colored.shares)


@torch.no_grad()
def embed_patches(model: Servable, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns patch features [N, P, W], after the last norm, of pixels [N, 3, S, S]."""
    rows = [
        model.trunk.norm_post(model.embed(torch.from_numpy(image[None]), "patches"))
        for image in pixels
    ]
    patches: NDArray[np.float32] = torch.cat(rows).float().numpy()
    return patches


def _prepare_images(location: str, model: Servable, num: int) -> Iterator[Prepared]:
    """Yields the first `num` images that can be decoded."""
    silence_decoders()
    source = open_source(location)
    source.check_not_empty()
    num_missing = num
    for image in prepare_all(
        source, source.entries, model.preprocess, num_threads=available_cores(), ahead=num
    ):
        if image.pixels is not None:
            yield image
            num_missing -= 1
            if not num_missing:
                return
    if num_missing == num:
        raise InvalidInput(f"no image of {location} can be decoded")


def _render(pixels: NDArray[np.uint8], colored: ColoredPatches, grid: int) -> Image.Image:
    side = pixels.shape[-1]
    photographs = np.concatenate(list(pixels.transpose(0, 2, 3, 1)), axis=1)
    squares = colored.colors.reshape(len(pixels), grid, grid, 3)
    scale = side // grid
    colors = np.concatenate(list(squares.repeat(scale, axis=1).repeat(scale, axis=2)), axis=1)
    return Image.fromarray(np.concatenate([photographs, colors]))


def _digest(images: list[Prepared]) -> str:
    return hashlib.sha256(b"".join(image.sha256 for image in images)).hexdigest()
