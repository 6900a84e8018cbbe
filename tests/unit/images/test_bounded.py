"""The work that a file may make has bounds, and real files are far from them."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.bounded import MAX_SCANS, BoundedFile, check_scans
from mlcd.images.decode import decode, num_pixels
from tests import hostile


@pytest.mark.parametrize("read", [decode, num_pixels])
@pytest.mark.parametrize(
    "name",
    [
        "JPEG of 500,000 comments",
        "JPEG of 2,000 scans",
        "PNG of 300,000 chunks",
        "GIF of 5 MB of comment",
    ],
)
def test_much_work_for_few_bytes_is_refused_by_the_header(labyrinths, name, read):
    with pytest.raises(ImageRejected) as caught:
        read(labyrinths[name])
    assert caught.value.reason == "undecodable"


def test_pixels_in_very_many_pieces_are_refused(labyrinths):
    with pytest.raises(ImageRejected, match="too many parts"):
        decode(labyrinths["PNG in chunks of a byte"])


@pytest.fixture(scope="module")
def labyrinths():
    return dict(hostile.labyrinths())


def test_a_file_cannot_have_itself_read_for_ever():
    file = BoundedFile(b"x" * 1000)
    with pytest.raises(ImageRejected, match="too many parts"):
        for _ in itertools.count():
            file.seek(0)
            file.read()
    file = BoundedFile(b"x" * 2**20)
    file.allow_pixels()
    for _ in range(2**14):
        file.read(64)
    assert file.read() == b""


def progressive(size=(64, 48)):
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return hostile.encoded(Image.fromarray(noise), "JPEG", progressive=True)


def test_as_many_scans_as_there_may_be():
    jpeg = progressive()
    scans = jpeg.count(b"\xff\xda")
    check_scans(hostile._repeated_scan(jpeg, MAX_SCANS - scans))
    with pytest.raises(ImageRejected, match="more than 64 scans"):
        check_scans(hostile._repeated_scan(jpeg, MAX_SCANS - scans + 1))


def test_what_looks_like_scans_in_metadata_or_behind_the_picture_counts_for_nothing():
    jpeg = progressive()
    segment = b"\xff\xe5" + (2 + 3 * 1000).to_bytes(2, "big") + b"\xff\xda\x00" * 1000
    for data in (jpeg[:2] + segment + jpeg[2:], jpeg + b"\xff\xda\x00\x02" * 1000):
        check_scans(data)
        assert decode(data).size == (64, 48)


def test_scans_behind_fill_bytes_count_too():
    jpeg = progressive()
    fillers = hostile._repeated_scan(jpeg, 2 * MAX_SCANS).replace(b"\xff\xda", b"\xff\xff\xff\xda")
    with pytest.raises(ImageRejected, match="scans"):
        check_scans(fillers)


def test_a_large_png_in_the_pieces_that_encoders_write():
    noise = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), np.uint8)
    png = hostile.encoded(Image.fromarray(noise), compress_level=0)
    assert decode(png).size == (1500, 1500)
    assert io.BytesIO(png).getvalue().count(b"IDAT") > 100
