"""The binary extension, by bytes written by hand."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcd.service.errors import BadRequest
from mlcd.service.http.dialects.kserve_tensors import read_bytes_elements, read_pixels, split, write


def packed(*elements):
    return memoryview(b"".join(struct.pack("<I", len(element)) + element for element in elements))


def test_the_header_divides_the_body():
    assert [bytes(part) for part in split(b'{"a":1}xyz', "7")] == [b'{"a":1}', b"xyz"]
    assert [bytes(part) for part in split(b"xyz", "0")] == [b"", b"xyz"]
    assert [bytes(part) for part in split(b"xyz", None)] == [b"xyz", b""]


@pytest.mark.parametrize(
    "stated", ["", "4", "-1", "+1", "1.0", "1e0", "0x1", " 1", "1_0", "٣", "9" * 5000, "nan"]
)
def test_a_hostile_length_is_refused(stated):
    with pytest.raises(BadRequest):
        split(b"xyz", stated)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_bytes_elements_come_back(elements):
    assert read_bytes_elements(packed(*elements), len(elements)) == elements


@given(st.binary(max_size=60), st.integers(0, 6))
def test_any_bytes_are_read_whole_or_refused(tensor, num):
    try:
        elements = read_bytes_elements(memoryview(tensor), num)
    except BadRequest:
        return
    assert bytes(packed(*elements)) == tensor


@pytest.mark.parametrize(
    ("tensor", "num"),
    [
        (packed(b"ab"), 2),
        (packed(b"ab", b"c"), 1),
        (packed(b"ab")[:5], 1),
        (memoryview(b"\xff\xff\xff\xffab"), 1),
        (memoryview(b"\x00\x00\x00"), 1),
        (memoryview(b""), 1),
    ],
)
def test_a_tensor_of_another_length_is_refused(tensor, num):
    with pytest.raises(BadRequest):
        read_bytes_elements(tensor, num)


def test_pixels_are_as_many_as_the_shape_says():
    assert read_pixels(memoryview(bytes(range(6))), [1, 3, 2]).tolist() == [
        [[0, 1], [2, 3], [4, 5]]
    ]
    assert read_pixels([0, 255, 7], [1, 3]).tolist() == [[0, 255, 7]]
    assert read_pixels([[[0, 255, 7]]], [3]).dtype == np.uint8
    with pytest.raises(BadRequest):
        read_pixels(memoryview(b"12345"), [1, 3, 2])
    wrong = [[0, 256, 1], [-1, 0, 1], [0.5, 1, 2], [10**30, 1, 2], [[1], [2, 3]], [1], 7, {}, None]
    for data in (*wrong, [True, False, True], ["1", "2", "3"]):
        with pytest.raises(BadRequest):
            read_pixels(data, [1, 3])


def test_an_answer_is_its_json_part_and_then_the_binary_tensors_in_order():
    outputs = {
        "embedding": np.array([[0.5, -1]], np.float32),
        "label_ids": np.array([[3]], np.int32),
        "label_scores": np.array([[0.25]], np.float32),
    }
    body, length = write({"model_name": "m"}, outputs, frozenset({"embedding", "label_scores"}))
    embedding, scores = (
        {"name": name, "datatype": "FP32", "shape": [1, num], "parameters": {"binary_data_size": 4 * num}}
        for name, num in (("embedding", 2), ("label_scores", 1))
    )  # fmt: skip
    ids = {"name": "label_ids", "datatype": "INT32", "shape": [1, 1], "data": [3]}
    expected = {"model_name": "m", "outputs": [embedding, ids, scores]}
    assert json.loads(body[:length]) == expected
    assert body[length:] == struct.pack("<fff", 0.5, -1, 0.25)
