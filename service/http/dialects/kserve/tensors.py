"""Tensors on KServe's wire: a JSON part, then the binary tensors one after the other.

The header Inference-Header-Content-Length says where the JSON part ends; 0 means that the whole
body is one raw tensor. An element of a binary BYTES tensor is its length as little-endian uint32,
followed by its bytes. Every size that a client states is compared with the data before it is used.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.types import ImageBatch
from service.errors import BadRequest
from service.http.answers import to_json

IMAGE: Final = "image"
PIXELS: Final = "image_u8"
TEXT: Final = "text"
EMBEDDING: Final = "embedding"
LABEL_IDS: Final = "label_ids"
LABEL_SCORES: Final = "label_scores"
LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_DATATYPES: Final = {np.dtype(np.float32): "FP32", np.dtype(np.int32): "INT32"}
_MAX_U8: Final = 255
_LENGTH: Final = struct.Struct("<I")
_DIGITS: Final = re.compile(r"[0-9]{1,15}")


def split(body: bytes, stated: str | None) -> tuple[memoryview, memoryview]:
    """Returns the JSON part and what follows it.

    stated: the header's text, None where it is absent. Raises BadRequest where it is no length or
    longer than the body.
    """
    view = memoryview(body)
    if stated is None:
        return view, view[len(view) :]
    if not _DIGITS.fullmatch(stated) or int(stated) > len(view):
        raise BadRequest(f"{LENGTH_HEADER} must be a number of bytes inside the body")
    return view[: int(stated)], view[int(stated) :]


def read_bytes_elements(tensor: memoryview, num: int) -> list[bytes]:
    """Returns the `num` elements of a binary BYTES tensor.

    Raises BadRequest where they do not fill it exactly.
    """
    elements, place = [], 0
    for _ in range(num):
        if place + _LENGTH.size > len(tensor):
            raise BadRequest("a BYTES tensor ends before its last element", param="inputs")
        (length,) = _LENGTH.unpack_from(tensor, place)
        place += _LENGTH.size
        elements.append(bytes(tensor[place : place + length]))
        place += length
    if place != len(tensor):
        raise BadRequest("a BYTES tensor does not end with its last element", param="inputs")
    return elements


def read_pixels(tensor: memoryview, shape: Sequence[int]) -> ImageBatch:
    """Returns a binary UINT8 tensor. Raises BadRequest where its size does not fit `shape`."""
    if len(tensor) != math.prod(shape):
        raise BadRequest("a UINT8 tensor is not as long as its shape says", param="inputs")
    return np.frombuffer(tensor, np.uint8).reshape(shape)


def pixels_from_json(data: Any, shape: Sequence[int]) -> ImageBatch:
    """Returns a UINT8 tensor from its numbers in JSON, nested or flat.

    Raises BadRequest where they do not fit `shape` or are not integers in 0..255.
    """
    try:
        values = np.asarray(data)
    except (ValueError, OverflowError):
        values = np.empty(0)
    if (
        values.dtype.kind not in "iu"
        or values.size != math.prod(shape)
        or values.min() < 0
        or values.max() > _MAX_U8
    ):
        raise BadRequest(
            "data must be as many integers in 0..255 as the shape says", param="inputs"
        )
    return values.astype(np.uint8).reshape(shape)


def write(
    content: dict[str, Any], outputs: Mapping[str, NDArray[Any]], binary: frozenset[str]
) -> tuple[bytes, int]:
    """Returns the body of an answer and the length of its JSON part.

    content: the JSON part without its outputs. outputs: float32 or int32. binary: names of the
    outputs to send in binary.
    """
    described, tensors = [], []
    for name, array in outputs.items():
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": _DATATYPES[array.dtype],
            "shape": list(array.shape),
        }
        if name in binary:
            tensors.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            described.append({**tensor, "parameters": {"binary_data_size": len(tensors[-1])}})
        else:
            described.append({**tensor, "data": np.ascontiguousarray(array).ravel()})
    head = to_json({**content, "outputs": described})
    return b"".join([head, *tensors]), len(head)
