import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec


@pytest.fixture(scope="module")
def clip():
    """transformers' own image processor, PIL backend, up to normalization: RGB picture to uint8 [3,
    224, 224].
    """
    module = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = module.CLIPImageProcessorPil(do_rescale=False, do_normalize=False)
    return lambda image: np.asarray(processor(image, return_tensors="np")["pixel_values"][0])


def siglip(image, *, resample):
    """transformers' processor of SigLIP, PIL backend, up to normalization."""
    module = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
    processor = module.SiglipImageProcessorPil(
        do_rescale=False, do_normalize=False, resample=resample
    )
    return np.asarray(processor(image, return_tensors="np")["pixel_values"][0])


def noise(size):
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


SIZES = [
    (640, 427),
    (427, 640),
    (333, 333),
    (224, 224),
    (225, 224),
    (223, 225),
    (449, 447),
    (8, 8),
    (1, 1),
    (3, 7),
    (200, 150),
    (1999, 1001),
    (1001, 1999),
    (230, 3001),
    (1000, 31),
    (31, 1000),
    (64, 1),
    (1, 64),
    (320, 5),
    (5, 320),
    (225 * 64, 225),
    (225, 225 * 64),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_equals_the_clip_image_processor_bit_for_bit(clip, size):
    got, expected = PreprocessSpec(224, 224).apply(noise(size)), clip(noise(size))
    assert got.dtype == expected.dtype == np.uint8
    assert (got == expected).all()


@pytest.mark.parametrize(
    "size",
    [(5, 321), (321, 5), (2, 331), (1, 999), (999, 1), (223, 20000), (225, 20000), (20000, 230)],
    ids=str,
)
def test_strips_beyond_the_aspect_limit_are_within_one_level(clip, size):
    # Only the part that the crop keeps is computed there, with coordinates that round otherwise.
    difference = np.abs(PreprocessSpec(224, 224).apply(noise(size)).astype(int) - clip(noise(size)))
    assert difference.max() <= 1
    assert difference.mean() < 1e-3


def test_exact_equals_the_clip_image_processor_on_photographs(clip, shared_data):
    photographs = sorted((shared_data / "caltech101_20").glob("*/*.jpg"))[::67]
    assert len(photographs) >= 10
    for path in photographs:
        with Image.open(path) as image:
            expected = clip(image.convert("RGB"))
        assert (PreprocessSpec(224, 224).prepare(path.read_bytes()) == expected).all(), path.name


@pytest.mark.parametrize(("interpolation", "resample"), [("bicubic", 3), ("bilinear", 2)])
@pytest.mark.parametrize("size", [*SIZES, (1, 20000), (20000, 3)], ids=str)
def test_a_square_equals_the_siglip_image_processor_bit_for_bit(size, interpolation, resample):
    spec = PreprocessSpec(224, 224, resize="square", interpolation=interpolation)
    got, expected = spec.apply(noise(size)), siglip(noise(size), resample=resample)
    assert got.shape == expected.shape == (3, 224, 224)
    assert (got == expected).all()


@pytest.mark.parametrize("size", [(640, 427), (301, 999), (5, 20000)], ids=str)
def test_bilinear_with_a_crop_is_pillow_s(size):
    image = noise(size)
    width, height = size
    scale = 224 / min(size)
    whole = image.resize(
        (max(224, int(width * scale)), max(224, int(height * scale))), Image.Resampling.BILINEAR
    )
    left, top = (whole.width - 224) // 2, (whole.height - 224) // 2
    expected = np.asarray(whole.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
    got = PreprocessSpec(224, 224, interpolation="bilinear").apply(image)
    assert np.abs(got.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("resize", ["shortest", "square"])
def test_a_strip_of_a_pixel_is_no_bomb(resize):
    spec = PreprocessSpec(resize_shortest=224, crop=224, resize=resize)
    assert spec.apply(Image.new("RGB", (1, 65535), (9, 8, 7))).shape == (3, 224, 224)
    assert spec.apply(Image.new("RGB", (65535, 1), (9, 8, 7)))[:, 5, 5].tolist() == [9, 8, 7]


def test_a_larger_resize_than_crop_keeps_the_middle():
    image = Image.new("RGB", (512, 256))
    image.paste((255, 255, 255), (192, 64, 320, 192))
    assert PreprocessSpec(resize_shortest=256, crop=128).apply(image).min() == 255


@pytest.mark.parametrize(
    ("sizes", "stated"),
    [
        ((256, 224), {"exif": "ignore"}),
        ((256, 224), {"decode": "fast"}),
        ((224, 224), {"resize": "square", "interpolation": "bilinear"}),
    ],
)
def test_a_spec_states_its_choices_and_round_trips(sizes, stated, tmp_path):
    spec, file = PreprocessSpec(*sizes, **stated), tmp_path / "preprocess.json"
    file.write_text(spec.to_json())
    assert stated.items() <= json.loads(spec.to_json()).items()
    assert PreprocessSpec.read(file) == spec
    assert PreprocessSpec.read(file).to_json() == spec.to_json()


def test_an_exact_spec_is_written_as_before_the_field_decode():
    text = PreprocessSpec(resize_shortest=256, crop=224).to_json()
    assert list(json.loads(text)) == [
        "crop",
        "exif",
        "interpolation",
        "mean",
        "resize_shortest",
        "std",
        "version",
    ]
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "8c859299ec3e4169a8d7f7f4d21f08b0f24de0a8ee56dcc4901fd1705996806a"
    )
    assert PreprocessSpec.from_dict({**json.loads(text), "decode": "exact"}).to_json() == text


@pytest.mark.parametrize(
    "fields",
    [
        {"resize_shortest": 10, "crop": 20},
        {"resize_shortest": 10, "crop": 8, "resize": "square"},
        {"resize_shortest": 10, "crop": 10, "resize": "longest"},
        {"resize_shortest": 10, "crop": 10, "interpolation": "nearest"},
        {"resize_shortest": 10, "crop": 10, "colour": 1},
        {"resize_shortest": 10, "crop": 10, "decode": "draft"},
        {"resize_shortest": 10, "crop": 10, "decode": None},
        {"crop": 10},
    ],
)
def test_an_impossible_spec_cannot_be_built(fields):
    with pytest.raises(ConfigInvalid):
        PreprocessSpec.from_dict(fields)
