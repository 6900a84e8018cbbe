"""JPEGs whose end is missing: decoded where every pixel is there, refused where one is not."""

import io

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import decode
from mlcd.images.transform import PreprocessSpec

OPTIONS = [
    {},
    {"progressive": True},
    {"restart_marker_blocks": 3},
    {"quality": 95, "subsampling": 0},
]
MODES = pytest.mark.parametrize("mode", ["exact", "fast"])


@pytest.fixture(params=OPTIONS, ids=str)
def jpeg(request, photo):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).resize((150, 100)).save(buffer, "JPEG", **request.param)
    return buffer.getvalue()


@MODES
@pytest.mark.parametrize(
    "end", [b"", b"\xff", b"\0\0", b"\xff\xff\xff", b"cut off here", bytes(99)], ids=len
)
def test_a_jpeg_without_its_end_is_decoded(jpeg, end, mode):
    spec = PreprocessSpec(16, 16, decode=mode)  # irregular, so that fast gives the exact pixels
    assert np.array_equal(spec.prepare(jpeg[:-2] + end), PreprocessSpec(16, 16).prepare(jpeg))


def test_a_progressive_jpeg_without_its_last_scan_is_refused(photo):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    for cut in (data.rindex(b"\xff\xda"), data.rindex(b"\xff\xc4")):
        with pytest.raises(ImageRejected) as caught:
            decode(data[:cut])
        assert caught.value.reason == "undecodable"


def test_a_jpeg_that_ends_before_a_restart_is_refused(photo):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).save(buffer, "JPEG", restart_marker_blocks=5)
    data = buffer.getvalue()
    last = max(data.rfind(bytes([0xFF, marker])) for marker in range(0xD0, 0xD8))
    for cut in (last, last + 1, last + 2, last + 3):
        with pytest.raises(ImageRejected):
            decode(data[:cut])
