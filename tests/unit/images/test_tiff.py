"""Gray TIFFs of every depth: right by their tags, or refused; never a negative, never dark."""

import numpy as np
import pytest

from mlcd.errors import ImageRejected
from mlcd.images.decode import decode
from tests.unit.images.tiff_files import tiff_file

UP_TO_A_BYTE = {(bits, photometric) for bits in (1, 2, 4, 8) for photometric in (0, 1)}
READ = UP_TO_A_BYTE | {(12, 1), (16, 0), (16, 1)}
READ_BIG_ENDIAN = UP_TO_A_BYTE | {(16, 1)}
ORDERS = pytest.mark.parametrize("order", ["<", ">"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "deflate"])


@PACKED
@ORDERS
@pytest.mark.parametrize("photometric", [0, 1], ids=["white is zero", "black is zero"])
@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8, 10, 12, 14, 16, 24])
def test_gray_of_any_depth_is_right_by_its_tags_or_refused(bits, photometric, order, packed):
    white = 2**bits - 1
    values = np.random.default_rng(bits).integers(0, white + 1, (5, 8))
    values[0, :3] = [0, white, white // 2]
    shown = values if photometric else white - values
    data = tiff_file(values, bits, photometric, order=order, packed=packed)
    if (bits, photometric) in READ and (order == "<" or (bits, photometric) in READ_BIG_ENDIAN):
        pixels = np.asarray(decode(data))[..., 0]
        assert pixels.tolist() == np.floor(shown * 255 / white + 0.5).astype(int).tolist()
    else:
        with pytest.raises(ImageRejected, match=f"TIFF of {bits} bits") as caught:
            decode(data)
        assert caught.value.reason == "unsupported-format"


@PACKED
@ORDERS
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("bits", [8, 16])
def test_colors_in_planes_are_right_or_refused(bits, planes, order, packed):
    values = np.random.default_rng(1).integers(0, 2**bits, (5, 8, 3))
    data = tiff_file(values, bits, 2, order=order, packed=packed, planes=planes)
    if (bits, planes, packed) == (16, 2, False):  # Pillow takes half the bytes of each value
        with pytest.raises(ImageRejected, match="16 bits") as caught:
            decode(data)
        assert caught.value.reason == "unsupported-format"
    else:
        assert np.asarray(decode(data)).tolist() == (values >> bits - 8).tolist()


@PACKED
@ORDERS
@pytest.mark.parametrize("bits", [16, 32])
def test_signed_integers_are_scaled_or_refused(bits, order, packed):
    values = np.array([[0, 1, 256, 32767]])
    data = tiff_file(values, bits, 1, order=order, packed=packed, sample_format=2)
    if packed and order == ">":  # Pillow reads the bytes in the wrong order
        with pytest.raises(ImageRejected) as caught:
            decode(data)
        assert caught.value.reason == "unsupported-format"
    else:
        assert np.asarray(decode(data))[0, :, 0].tolist() == [0, 0, 1, 127]


def test_a_tiff_that_is_cut_is_damaged_and_not_of_another_format():
    data = tiff_file(np.full((5, 8, 3), 9), 8, 2)
    for keep in range(8, len(data) - 100):
        with pytest.raises(ImageRejected) as caught:
            decode(data[:keep])
        assert caught.value.reason == "undecodable"
