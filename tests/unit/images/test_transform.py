import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec


def clip_by_hand(image, size):
    """HF's CLIP image processor before normalization, written from its documentation."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    new_long = int(size * long / short)
    new = (size, new_long) if width <= height else (new_long, size)
    pixels = np.asarray(image.resize(new, Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size].transpose(2, 0, 1)


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (333, 333), (8, 8), (225, 224), (1000, 31)])
def test_apply_equals_the_reference_bit_for_bit(size):
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    got = PreprocessSpec(resize_shortest=224, crop=224).apply(image)
    assert got.dtype == np.uint8
    assert (got == clip_by_hand(image, 224)).all()


def test_a_strip_of_a_pixel_is_no_bomb():
    spec = PreprocessSpec(resize_shortest=224, crop=224)
    assert spec.apply(Image.new("RGB", (1, 65535), (9, 8, 7))).shape == (3, 224, 224)
    assert spec.apply(Image.new("RGB", (65535, 1), (9, 8, 7)))[:, 5, 5].tolist() == [9, 8, 7]


def test_a_larger_resize_than_crop_keeps_the_middle():
    image = Image.new("RGB", (512, 256))
    image.paste((255, 255, 255), (192, 64, 320, 192))
    assert PreprocessSpec(resize_shortest=256, crop=128).apply(image).min() == 255


def test_json_round_trips_and_is_canonical(tmp_path):
    spec = PreprocessSpec(resize_shortest=256, crop=224, exif="ignore")
    (tmp_path / "preprocess.json").write_text(spec.to_json())
    assert PreprocessSpec.read(tmp_path / "preprocess.json") == spec
    assert PreprocessSpec.read(tmp_path / "preprocess.json").to_json() == spec.to_json()


@pytest.mark.parametrize(
    "fields",
    [
        {"resize_shortest": 10, "crop": 20},
        {"resize_shortest": 10, "crop": 10, "interpolation": "nearest"},
        {"resize_shortest": 10, "crop": 10, "colour": 1},
        {"crop": 10},
    ],
)
def test_an_impossible_spec_cannot_be_built(fields):
    with pytest.raises(ConfigInvalid):
        PreprocessSpec.from_dict(fields)
