"""Sent images show the same pixels, by the service's own decoder."""

import io

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.image_bytes import check_images, image_bytes
from mlcd.images.decode import decode

MAX = 2**20


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (30, 20, 4), np.uint8)


def shown(image):
    return np.asarray(decode(image_bytes(image, max_bytes=MAX)))


def test_files_and_bytes_are_sent_as_they_are(tmp_path, photo):
    path = tmp_path / "photo.jpg"
    path.write_bytes(photo)
    for image in (path, str(path), photo, bytearray(photo), memoryview(photo)):
        assert image_bytes(image, max_bytes=MAX) == photo


def test_arrays_keep_every_pixel(pixels):
    assert (shown(pixels[..., :3]) == pixels[..., :3]).all()
    assert (shown(pixels[::-1, ::-1, 2::-1]) == pixels[::-1, ::-1, 2::-1]).all()
    assert (shown(pixels[..., 0]) == pixels[..., :1]).all()
    opaque = pixels | np.array([0, 0, 0, 255], np.uint8)
    assert (shown(opaque) == pixels[..., :3]).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pillow_images_keep_every_pixel(pixels, mode):
    image = Image.fromarray(pixels).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    assert (shown(image) == np.asarray(decode(buffer.getvalue()))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pillow_image_is_turned_as_its_file_is(photo, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).resize((24, 16)).save(buffer, "JPEG", exif=exif)
    image = Image.open(io.BytesIO(buffer.getvalue()))
    expected = np.asarray(decode(buffer.getvalue()))
    assert expected.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    assert (shown(image) == expected).all()


@pytest.mark.parametrize(
    ("image", "reason", "message"),
    [
        ("absent.jpg", "unreadable", "absent.jpg cannot be read"),
        ("a\0b", "unreadable", "cannot be read"),
        (".", "unreadable", "cannot be read"),
        (None, "unreadable", "got NoneType"),
        (np.zeros((4, 4, 3)), "unreadable", "must be uint8 [H, W, 3], got float64 (4, 4, 3)"),
        (np.zeros((4, 4, 2), np.uint8), "unreadable", "got uint8 (4, 4, 2)"),
        (np.zeros((0, 4, 3), np.uint8), "unreadable", "got uint8 (0, 4, 3)"),
        (np.zeros(4, np.uint8), "unreadable", "got uint8 (4,)"),
        (Image.new("CMYK", (4, 4)), "unreadable", "mode CMYK cannot be sent: convert them to RGB"),
        (b"x" * (MAX + 1), "too-many-bytes", "1048577 bytes, more than the 1048576"),
    ],
)
def test_what_is_no_image_is_an_error_of_that_image(image, reason, message):
    rejection = image_bytes(image, max_bytes=MAX)
    assert isinstance(rejection, ImageRejected)
    assert rejection.reason == reason
    assert message in str(rejection)


def test_a_pillow_image_of_a_damaged_file_is_an_error_of_that_image(photo):
    rejection = image_bytes(Image.open(io.BytesIO(photo[:5000])), max_bytes=MAX)
    assert rejection.reason == "undecodable"


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: reading it would end the test
    assert image_bytes(path, max_bytes=MAX).reason == "too-many-bytes"


@pytest.mark.parametrize(
    "single",
    ["a.jpg", b"bytes", bytearray(b"x"), np.zeros((4, 4, 3), np.uint8), Image.new("L", (2, 2)), 7],
)
def test_one_image_is_not_taken_for_a_series(single):
    with pytest.raises(InvalidInput, match="put the one image into a list"):
        check_images(single)


def test_series_are_taken():
    for series in ([], (b"a",), iter([b"a"]), np.zeros((2, 4, 4, 3), np.uint8)):
        check_images(series)
