import base64

import numpy as np
import pytest

from mlcd.service.errors import BadRequest
from mlcd.service.http.dialects.quantization import (
    as_base64,
    as_binary,
    as_int8,
    as_ubinary,
    as_uint8,
)
from mlcd.types import unit_rows

ROWS = unit_rows(np.random.default_rng(0).standard_normal((5, 768)))


def test_base64_is_little_endian_float32():
    assert [
        np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in as_base64(ROWS)
    ] == ROWS.tolist()


def test_int8_uses_the_whole_range_and_keeps_the_direction():
    rows = as_int8(ROWS)
    assert rows.dtype == np.int8
    assert np.abs(rows).max(axis=1).tolist() == [127] * 5
    cosines = (unit_rows(rows.astype(np.float64)) * ROWS).sum(axis=1)
    assert cosines.min() > 0.9999
    assert (as_uint8(ROWS).astype(int) - 128 == rows).all()


def test_bits_are_signs_with_the_first_in_the_highest_place():
    row = np.array([[1, -1, 0, -1, -1, -1, -1, -1]], np.float32)
    assert as_ubinary(row, param="x").tolist() == [[0b10100000]]
    assert as_binary(row, param="x").tolist() == [[0b10100000 - 128]]
    assert (np.unpackbits(as_ubinary(ROWS, param="x"), axis=1) == (ROWS >= 0)).all()


def test_bits_need_whole_bytes():
    with pytest.raises(BadRequest, match="divisible by 8, got 12") as caught:
        as_ubinary(ROWS[:, :12], param="dimensions")
    assert caught.value.param == "dimensions"
