"""Patches as colors: two regions told apart, signs that do not move, positions of another size."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mlcd.errors import InvalidInput
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig, resize_positions
from mlcd.training.evaluation.patches.pca import border_of, color_patches, components
from mlcd.training.evaluation.patches.picture import embed_patches
from tests.conftest import refuse, succeed

SIDE = 8  # patches
INSIDE = ~border_of(SIDE).reshape(SIDE, SIDE)
INSIDE[1], INSIDE[:, 1], INSIDE[-2], INSIDE[:, -2] = False, False, False, False  # 4 x 4


def two_regions():
    """Features [1, 64, 4] of a square in the middle, which differ within both regions."""
    rows = np.zeros((SIDE, SIDE, 4))
    rows[..., 0] = np.where(INSIDE, 3.0, -1.0)
    rows[..., 1] = np.linspace(-1, 1, SIDE)[:, None]
    rows[..., 2] = np.linspace(-0.5, 0.5, SIDE)[None, :]
    return rows.reshape(1, SIDE * SIDE, 4)


def test_the_colors_of_two_regions_are_these():
    found = color_patches(two_regions(), SIDE, foreground=False)
    red, green, blue = (found.colors[0, :, at].reshape(SIDE, SIDE) for at in range(3))
    assert np.unique(red).tolist() == [0, 255]
    assert (red == 255).tolist() == INSIDE.tolist()
    # The border is on neither side of the others, so their largest entries are positive.
    assert green[:, 0].tolist() == [0, 36, 73, 109, 146, 182, 219, 255]
    assert blue[0].tolist() == [0, 36, 73, 109, 146, 182, 219, 255]
    assert found.shares == tuple(sorted(found.shares, reverse=True))
    assert np.isclose(sum(found.shares), 1)
    assert found.foreground.all()


def test_the_foreground_has_components_of_its_own():
    found = color_patches(two_regions(), SIDE, foreground=True)
    assert found.foreground.reshape(SIDE, SIDE).tolist() == INSIDE.tolist()
    squares = found.colors.reshape(SIDE, SIDE, 3)
    assert not squares[~INSIDE].any()
    # Rows differ most within the square, then columns, and nothing else does.
    assert squares[2:6, 2, 0].tolist() == [0, 85, 170, 255]
    assert squares[2, 2:6, 1].tolist() == [0, 85, 170, 255]


def test_the_border_is_on_the_negative_side_whatever_the_signs_are():
    rng = np.random.default_rng(0)
    rows, border = rng.standard_normal((SIDE * SIDE, 6)), border_of(SIDE)
    rows[border] += 0.5
    found, turned = components(rows, border), components(-rows, border)
    assert (found.project(rows[border]).mean(axis=0) < 0).all()
    assert np.allclose(found.project(rows), turned.project(-rows))
    with pytest.raises(InvalidInput, match="all equal"):
        components(np.ones((9, 4)), border_of(3))


@pytest.fixture
def tower(tmp_path):
    """A tower with random weights for 32 pixels, patches of 8."""
    trunk = ViT(ViTConfig(32, 8, 32, 2, 2, 64))
    trunk.initialize(torch.Generator().manual_seed(0))
    model = Servable(trunk, PreprocessSpec(resize_shortest=32, crop=32)).eval()
    (tmp_path / "tower").mkdir()
    model.write(tmp_path / "tower")
    return tmp_path / "tower", model


def write_square(folder):
    """Writes a photograph of 64 pixels with a red square in the middle of a blue ground."""
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[..., 2] = 200
    pixels[16:48, 16:48] = (220, 30, 0)
    folder.mkdir()
    Image.fromarray(pixels).save(folder / "square.png")
    return pixels


def test_a_tower_tells_a_square_from_its_ground_at_twice_its_size(tower, tmp_path):
    path, _ = tower
    pixels = write_square(tmp_path / "images")
    command = ("evaluate", "pca", path, tmp_path / "images", "--side", 64, "--foreground")
    pictures = [tmp_path / f"{name}.png" for name in "ab"]
    for picture in pictures:
        told = succeed(*command, "--out", picture, "--json")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    drawn = np.asarray(Image.open(pictures[0]))
    assert drawn.shape == (128, 64, 3)
    assert np.array_equal(drawn[:64], pixels)
    assert drawn[64:].any(axis=2)[4::8, 4::8].tolist() == INSIDE.tolist()
    facts = json.loads(told.stdout.splitlines()[-1])
    assert (facts["protocol"]["grid"], facts["images"]) == (8, ["square.png"])


def test_positions_are_resized_to_the_grid(tower, tmp_path):
    _, model = tower
    pixels = write_square(tmp_path / "images").transpose(2, 0, 1)[None].copy()
    larger = ViT(ViTConfig(64, 8, 32, 2, 2, 64))
    state = dict(model.trunk.state_dict())
    state["pos"] = resize_positions(state["pos"], (8, 8))
    larger.load_state_dict(state)
    there = Servable(larger, PreprocessSpec(resize_shortest=64, crop=64)).eval()
    assert np.allclose(embed_patches(model, pixels), embed_patches(there, pixels), atol=1e-6)


def test_what_cannot_be_drawn_is_refused(tower, tmp_path):
    path, _ = tower
    write_square(tmp_path / "images")
    command = ("evaluate", "pca", path, tmp_path / "images")
    for options, refusal in (
        (("--out", tmp_path / "a.png", "--side", 60), "give --side 56"),
        (("--out", tmp_path / "a.txt"), "call it a.png"),
    ):
        refuse(*command, *options, contains=refusal)
