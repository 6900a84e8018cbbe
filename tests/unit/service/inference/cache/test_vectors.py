import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mlcd.service.inference.cache.vectors import VectorFormat
from mlcd.types import unit_rows

KEY = bytes(range(32))
EXACT, ROUNDED = VectorFormat(5), VectorFormat(5, "float16")


def unit(*numbers):
    return unit_rows(np.array([numbers], np.float64))[0]


vectors = (
    arrays(np.float64, 5, elements=st.floats(-1, 1))
    .filter(lambda v: np.linalg.norm(v) > 0.1)
    .map(lambda v: unit(*v))
)


@settings(deadline=None)
@given(vectors)
def test_float32_comes_back_bit_for_bit(vector):
    sealed = EXACT.seal(KEY, EXACT.pack(vector))
    assert EXACT.unpack(EXACT.unseal(KEY, sealed)).tobytes() == vector.tobytes()


@settings(deadline=None)
@given(vectors)
def test_float16_is_near_unit_and_the_same_from_memory_and_from_redis(vector):
    packed = ROUNDED.pack(vector)
    assert len(packed) == 10
    found = ROUNDED.unpack(ROUNDED.unseal(KEY, ROUNDED.seal(KEY, packed)))
    assert found.tobytes() == ROUNDED.unpack(packed).tobytes()
    assert np.linalg.norm(found.astype(np.float64)) == pytest.approx(1, abs=1e-6)
    assert float(found @ vector) > 1 - 1e-6


@settings(deadline=None)
@given(st.data(), vectors)
def test_every_damaged_bit_is_found(data, vector):
    sealed = bytearray(EXACT.seal(KEY, EXACT.pack(vector)))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert EXACT.unseal(KEY, bytes(sealed)) is None


@settings(deadline=None)
@given(
    st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.binary(min_size=56, max_size=56))
)
def test_what_others_wrote_is_nothing(value):
    assert EXACT.unseal(KEY, value) is None


@pytest.mark.parametrize(
    "vector",
    [[np.nan, 1, 0, 0, 0], [np.inf, 0, 0, 0, 0], [0, 0, 0, 0, 0], [2, 0, 0, 0, 0], [3e38] * 5],
)
def test_a_sealed_vector_that_is_none_is_nothing(vector):
    packed = np.array(vector, "<f4").tobytes()
    assert EXACT.unseal(KEY, EXACT.seal(KEY, packed)) is None


def test_the_vector_of_another_image_type_or_length_is_nothing():
    packed = EXACT.pack(unit(1, 2, 3, 4, 5))
    assert EXACT.unseal(bytes(32), EXACT.seal(KEY, packed)) is None
    assert EXACT.unseal(KEY, ROUNDED.seal(KEY, ROUNDED.pack(unit(1, 2, 3, 4, 5)))) is None
    assert VectorFormat(4).unseal(KEY, EXACT.seal(KEY, packed)) is None
