import contextlib
import csv
import io
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import DecodeLimits, decode


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(data, **options):
    return decode(data, **options).getpixel((0, 0))


def solid(mode, color):
    return Image.new(mode, (4, 4), color)


def test_transparency_goes_over_white():
    assert pixel(encode(solid("RGBA", (0, 0, 0, 0)))) == (255, 255, 255)
    assert pixel(encode(solid("RGBA", (255, 0, 0, 128)))) == pytest.approx((255, 127, 127), abs=1)
    assert pixel(encode(solid("LA", (0, 0)))) == (255, 255, 255)


def test_a_palette_with_transparency_goes_over_white():
    palette = solid("P", 0)
    palette.putpalette([0, 0, 0, 255, 0, 0] + [0] * 762)
    assert pixel(encode(palette, transparency=0)) == (255, 255, 255)
    assert pixel(encode(palette)) == (0, 0, 0)


def test_gray_one_bit_and_cmyk_become_rgb():
    assert pixel(encode(solid("L", 77))) == (77, 77, 77)
    assert pixel(encode(solid("1", 1))) == (255, 255, 255)
    assert pixel(encode(solid("CMYK", (0, 255, 255, 0)), "TIFF")) == (255, 0, 0)


def test_sixteen_bits_are_scaled_to_eight():
    for value, expected in ((0, 0), (65535, 255), (32768, 128), (257, 1)):
        data = encode(Image.fromarray(np.full((4, 4), value, np.uint16)))
        assert pixel(data) == (expected,) * 3


def test_floats_have_no_defined_range_and_are_refused():
    with pytest.raises(ImageRejected) as caught:
        decode(encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))
    assert caught.value.reason == "unsupported-format"


def test_an_animation_gives_its_first_frame():
    frames = [solid("RGB", (255, 0, 0)), solid("RGB", (0, 0, 255))]
    for kind in ("GIF", "WEBP"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert pixel(data) == pytest.approx((255, 0, 0), abs=2)


def test_exif_orientation_is_applied_or_ignored():
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 0, 0))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        data = encode(image, exif=exif)
        assert decode(data).size == ((2, 4) if orientation >= 5 else (4, 2))
        assert decode(data, exif="ignore").size == (4, 2)
    exif[274] = 6  # the camera was turned: the first pixel belongs at the top right
    assert decode(encode(image, exif=exif)).getpixel((1, 0)) == (255, 0, 0)


def test_the_pixel_cap_is_read_from_the_header():
    data = encode(Image.new("1", (3000, 3000)))
    with pytest.raises(ImageRejected, match="3000 x 3000") as caught:
        decode(data, limits=DecodeLimits(max_pixels=1_000_000))
    assert caught.value.reason == "too-many-pixels"


def test_empty_foreign_and_oversized_bytes_have_their_reasons():
    cases = {b"": "empty", b"no image": "unsupported-format", b"%!PS-Adobe-3.0 EPSF": "unsupported-format"}
    for data, reason in cases.items():
        with pytest.raises(ImageRejected) as caught:
            decode(data)
        assert caught.value.reason == reason
    with pytest.raises(ImageRejected) as caught:
        decode(b"x" * 100, limits=DecodeLimits(max_bytes=99))
    assert caught.value.reason == "too-many-bytes"


@pytest.mark.parametrize("percent", range(1, 100, 7))
def test_a_truncated_file_is_refused_and_says_nothing_of_the_library(photo, percent):
    with pytest.raises(ImageRejected) as caught:
        decode(photo[: len(photo) * percent // 100])
    assert "PIL" not in str(caught.value)
    assert "truncated (" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_a_picture_or_a_typed_error(position, bit):
    data = bytearray(encode(Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)), "PNG"))
    data[position % len(data)] ^= 1 << bit
    with contextlib.suppress(ImageRejected):
        assert decode(bytes(data)).mode == "RGB"


def test_every_nasty_file_decodes_or_is_refused_with_a_reason(shared_data):
    folder = shared_data / "nasty_images"
    kinds = {"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"}
    without_range = {"F", "LAB"}
    wrong = []
    with (folder / "expected.csv").open() as file:
        for row in csv.DictReader(file):
            data = (folder / row["path"]).read_bytes()
            try:
                decoded = decode(data).mode == "RGB"
            except ImageRejected:
                decoded = False
            pixels = int(row["width"] or 0) * int(row["height"] or 0)
            should = (
                row["status"] == "ok"
                and row["format"] in kinds
                and row["mode"] not in without_range
                and pixels <= DecodeLimits().max_pixels
                # Three files open, but are damaged further on, where their EXIF is looked for.
                and row["exif_orientation"] != "error"
            )
            if decoded != should:
                wrong.append(row["path"])
    assert wrong == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20  # KiB


def test_the_eight_orientations_agree(shared_data):
    pictures = []
    for orientation in range(1, 9):
        path = next((shared_data / "nasty_images" / "exif_orientation").glob(f"Landscape_{orientation}.jpg"))
        pictures.append(np.asarray(decode(path.read_bytes()).convert("L").resize((64, 64)), np.float64).ravel())
    cosines = np.corrcoef(pictures)
    assert cosines.min() > 0.8
