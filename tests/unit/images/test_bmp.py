import struct

import numpy as np
import pytest

from mlcd.images.decode import decode

RGB = np.random.default_rng(4).integers(0, 256, (5, 7, 3), np.uint8)
BGRA, RGBA, NONE = (
    (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
    (0xFF, 0xFF00, 0xFF0000, 0xFF000000),
    (0, 0, 0, 0),
)


def bmp(alpha, header_bytes, masks):
    colors = RGB if masks == RGBA else RGB[..., ::-1]
    pixels = np.dstack([colors, alpha])[::-1].astype(np.uint8).tobytes()
    header = struct.pack("<IiiHHIIiiII", header_bytes, 7, 5, 1, 32, 3, len(pixels), 0, 0, 0, 0)
    header = (header + struct.pack("<IIII", *masks)).ljust(header_bytes, b"\0")
    start = 14 + len(header)
    return b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + header + pixels


@pytest.mark.parametrize("masks", [BGRA, RGBA, NONE], ids=["BGRA", "RGBA", "none"])
@pytest.mark.parametrize("header_bytes", [56, 108, 124])
def test_a_bmp_whose_alpha_is_zero_everywhere_is_opaque(header_bytes, masks):
    data = bmp(np.zeros((5, 7)), header_bytes, masks)
    assert np.array_equal(decode(data), RGB)


def test_one_pixel_of_alpha_makes_the_others_transparent():
    alpha = np.zeros((5, 7))
    alpha[2, 3] = 255
    pixels = np.asarray(decode(bmp(alpha, 124, BGRA)))
    assert pixels[2, 3].tolist() == RGB[2, 3].tolist()
    assert (pixels == 255).all(axis=2).sum() >= 34
