import io
import sys

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_image

from mlcd.errors import ConfigInvalid, ImageRejected
from mlcd.images.decode import decode, decode_scaled
from mlcd.images.transform import PreprocessSpec

PHOTO = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427


def jpeg(image=PHOTO, *, orientation=1, **options):
    exif = Image.Exif()
    exif[274] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, exif=exif, **options)
    return buffer.getvalue()


SMALL = [
    jpeg(PHOTO.resize((96, 64)), orientation=6, **options)
    for options in ({}, {"progressive": True})
]


def both(data, side, crop=None, **options):
    specs = [
        PreprocessSpec(side, crop or side, decode=mode, **options) for mode in ("exact", "fast")
    ]
    return [spec.prepare(data).astype(np.int64) for spec in specs]


def outcome(prepare, data):
    try:
        return prepare(data).shape
    except ImageRejected as rejection:
        return rejection.reason, rejection.message


@pytest.mark.parametrize("shortest", [1, 53, 54, 55, 107, 108, 214, 300, 374])
def test_the_scale_is_the_smallest_eighth_that_leaves_enough(shortest):
    eighths = next(n for n in range(1, 9) if -(-427 * n // 8) >= shortest)
    scaled = decode_scaled(jpeg(), shortest=shortest)
    assert scaled.image.size == (80 * eighths, -(-427 * eighths // 8))
    assert scaled.region == (0, 0, 80 * eighths, 427 * eighths / 8)
    assert scaled.full_size == (640, 427)


def test_with_nothing_to_gain_the_pixels_are_the_exact_ones():
    for side in (188, 214, 400):  # seven eighths of 427 leave 374 pixels, less than twice 188
        exact, fast = both(jpeg(), side)
        assert (exact == fast).all()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("RGB", {}),
        ("RGB", {"progressive": True}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"keep_rgb": True}),
        ("L", {}),
        ("L", {"progressive": True}),
    ],
)
def test_fast_pixels_are_close_to_exact_ones_and_are_others(source, options):
    exact, fast = both(jpeg(PHOTO.convert(source), **options), 64)
    assert 0 < np.abs(exact - fast).mean() < 1


@pytest.mark.parametrize("exif", ["apply", "ignore"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_square_is_the_same_at_every_orientation_and_odd_size(orientation, exif):
    # At three eighths of 603 x 413 the last column and row are covered in part: half a pixel off
    # would show.
    exact, fast = both(jpeg(PHOTO.resize((603, 413)), orientation=orientation), 64, 48, exif=exif)
    assert np.abs(exact - fast).mean() < 0.6


@pytest.mark.parametrize("size", [(4003, 30), (30, 4003), (1999, 37), (37, 1999)])
def test_strips_are_cut_where_the_full_size_says(size):
    exact, fast = both(jpeg(PHOTO.resize(size)), 8)
    assert np.abs(exact - fast).mean() < 2


def test_every_kind_but_plain_jpeg_takes_the_exact_path():
    cmyk = PHOTO.convert("CMYK")
    pixels = np.ascontiguousarray(np.asarray(cmyk))
    files = [jpeg(cmyk), simplejpeg.encode_jpeg(pixels, colorspace="CMYK")]
    for kind, picture in (
        ("PNG", PHOTO),
        ("WEBP", PHOTO),
        ("TIFF", PHOTO),
        ("PNG", PHOTO.convert("LA")),
    ):
        buffer = io.BytesIO()
        picture.save(buffer, kind)
        files.append(buffer.getvalue())
    for data in files:
        exact, fast = both(data, 32)
        assert (exact == fast).all()


def test_the_first_picture_of_several_is_scaled():
    buffer = io.BytesIO()
    PHOTO.save(buffer, "MPO", save_all=True, append_images=[Image.new("RGB", PHOTO.size)])
    exact, fast = both(buffer.getvalue(), 64)
    assert 0 < np.abs(exact - fast).mean() < 1


def test_arithmetic_coding_and_two_headers_are_left_to_pillow():
    data = jpeg()
    frame = data.index(b"\xff\xc0")
    arithmetic = data[:frame] + b"\xff\xc9" + data[frame + 2 :]
    length = 2 + int.from_bytes(data[frame + 2 : frame + 4], "big")
    taller = data[frame : frame + 5] + (854).to_bytes(2, "big") + data[frame + 7 : frame + length]
    twice = data[:frame] + taller + data[frame:]
    for odd in (arithmetic, twice):
        prepared = [
            outcome(PreprocessSpec(32, 32, decode=mode).prepare, odd) for mode in ("exact", "fast")
        ]
        assert prepared[0] == prepared[1]


def test_an_arithmetic_picture_takes_the_exact_path(shared_data):
    exact, fast = both(
        (shared_data / "nasty_images" / "libjpeg-turbo" / "testimgari.jpg").read_bytes(), 16
    )
    assert (exact == fast).all()


def test_what_pillow_forgives_is_accepted_with_the_exact_pixels():
    data = jpeg()
    cut = (
        data[: len(data) // 2] + b"\xff\xd9"
    )  # an end that comes too early: a warning, the rest is gray
    tables = data.index(b"\xff\xdb")
    junk = data[:tables] + b"\0\0\0" + data[tables:]
    for odd in (cut, junk):
        exact, fast = both(odd, 32)
        assert (exact == fast).all()


@settings(max_examples=400, deadline=None)
@given(
    which=st.integers(0, 1),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=3), st.integers(0, 4)), min_size=1, max_size=3
    ),
)
def test_both_modes_accept_and_refuse_the_same_bytes(which, edits):
    data = SMALL[which]
    for where, put, drop in edits:
        at = int(where * len(data))
        data = data[:at] + put + data[at + drop :]
    exact, fast = (
        outcome(PreprocessSpec(16, 16, decode=mode).prepare, data) for mode in ("exact", "fast")
    )
    assert exact == fast


def test_without_the_decoder_the_extra_is_named_when_the_spec_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    spec = PreprocessSpec(32, 32, decode="fast")
    with pytest.raises(ConfigInvalid, match=r"simplejpeg.*\[serve\]"):
        spec.prepare(jpeg())
    assert PreprocessSpec(32, 32).prepare(jpeg()).shape == (3, 32, 32)


def test_scaled_and_whole_pictures_are_the_same_size_of_scene():
    data = jpeg(PHOTO.resize((603, 413)), orientation=6)
    scaled = decode_scaled(data, shortest=100)
    assert scaled.full_size == decode(data).size == (413, 603)
    left, top, right, bottom = scaled.region
    assert ((right - left) / (bottom - top)) == pytest.approx(413 / 603)
    assert (
        right == scaled.image.width
    )  # turned clockwise, the last row of the file stands at the left
    assert left == pytest.approx(scaled.image.width - 413 * 2 / 8)


def test_squares_are_alike_in_both_modes():
    exact, fast = both(jpeg(), 64, resize="square")
    assert fast.shape == (3, 64, 64)
    assert np.abs(exact - fast).mean() < 3
