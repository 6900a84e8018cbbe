"""Thumbnails: small, upright, without metadata, and never of a file that our decoders refuse."""

import csv
import io
import random

import numpy as np
import pytest
from PIL import ExifTags, Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import decode
from mlcd.images.thumbnail import thumbnail


def opened(data, **options):
    return Image.open(io.BytesIO(thumbnail(data, **options).data))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_the_longest_side_shrinks_and_small_images_keep_their_size(photo):
    picture = opened(photo)
    assert (picture.format, picture.mode, picture.size) == ("WEBP", "RGB", (160, 107))
    assert opened(photo, side=64).size == (64, 43)
    assert opened(encoded(Image.new("RGB", (5, 3)))).size == (5, 3)
    assert opened(encoded(Image.new("L", (4000, 1)))).size == (160, 1)


def test_it_looks_like_the_whole_image(photo):
    whole = decode(photo).resize((160, 107), Image.Resampling.BICUBIC)
    difference = np.abs(np.asarray(opened(photo), float) - np.asarray(whole, float))
    assert difference.mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_is_applied_and_left_out(orientation):
    marked = Image.new("RGB", (400, 200), "white")
    marked.paste("red", (0, 0, 100, 100))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.Artist] = "somebody"
    data = encoded(marked, "JPEG", exif=exif, quality=95, icc_profile=b"x" * 500)
    picture, whole = opened(data), decode(data)
    assert picture.size == ((160, 80) if orientation < 5 else (80, 160))
    assert not picture.getexif()
    assert not {"exif", "icc_profile", "xmp"} & picture.info.keys()
    expected = whole.resize(picture.size, Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(picture, float) - np.asarray(expected, float)).mean() < 6


def test_transparency_is_white():
    picture = opened(encoded(Image.new("RGBA", (300, 300), (255, 0, 0, 0))))
    assert np.asarray(picture).min() > 250


def test_equal_images_have_equal_thumbnails(photo):
    first, second = thumbnail(photo), thumbnail(photo)
    assert first == second
    assert first.version == second.version
    assert len(bytes.fromhex(first.version)) == 8
    assert thumbnail(photo, side=64).version != first.version


@pytest.mark.parametrize("data", [b"", b"RIFF\0\0\0\0WEBP", b"<svg/>", b"\xff\xd8\xff" * 9])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(ImageRejected):
        thumbnail(data)


def test_odd_and_hostile_files_are_refused_as_by_the_decoder(shared_data):
    folder = shared_data / "nasty_images"
    with (folder / "expected.csv").open(newline="") as file:
        names = [row["path"] for row in csv.DictReader(file)]
    made = 0
    for name in random.Random(0).sample(sorted(names), 150):
        data = (folder / name).read_bytes()
        assert reason_of(thumbnail, data) == reason_of(decode, data), name
        if reason_of(decode, data) is None:
            picture = opened(data)
            assert picture.format == "WEBP"
            assert max(picture.size) <= 160
            made += 1
    assert made > 50


def reason_of(work, data):
    try:
        work(data)
    except ImageRejected as rejection:
        return rejection.reason
    return None
