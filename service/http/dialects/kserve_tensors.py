"""Tensors in KServe's wire format: a JSON part, then the binary tensors one after the other.

Inference-Header-Content-Length is the length of the JSON part; with 0, the body is one raw tensor.
Each element of a binary BYTES tensor consists of its length, a little-endian uint32, and its bytes.
Every size that a client states is compared with the data before it is used.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.errors import BadRequest
from mlcd.service.http.answers import to_json
from mlcd.types import ImageBatch

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_DATATYPES: Final = {np.dtype(np.float32): "FP32", np.dtype(np.int32): "INT32"}
_MAX_U8: Final = 255
_DIGITS: Final = re.compile(r"[0-9]{1,15}")
_LENGTH: Final = struct.Struct("<I")


def split(body: bytes, json_bytes: str | None) -> tuple[memoryview, memoryview]:
    """Returns the JSON part and the binary part. json_bytes: the header, or None."""
    view = memoryview(body)
    if json_bytes is None:
        return view, view[len(view) :]
    if not _DIGITS.fullmatch(json_bytes) or int(json_bytes) > len(view):
        raise BadRequest(f"{LENGTH_HEADER} must be an integer in 0..{len(view)}")
    return view[: int(json_bytes)], view[int(json_bytes) :]


def read_bytes_elements(tensor: memoryview, num: int) -> list[bytes]:
    """Returns the `num` elements of a binary BYTES tensor. Raises BadRequest unless they fit."""
    elements: list[bytes] = []
    offset = 0
    while len(elements) < num and offset + _LENGTH.size <= len(tensor):
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(tensor, offset)[0]
        elements.append(bytes(tensor[start:offset]))
    if len(elements) < num or offset != len(tensor):
        raise BadRequest(f"a BYTES tensor must consist of exactly {num} elements", param="inputs")
    return elements


def read_pixels(data: Any, shape: Sequence[int]) -> ImageBatch:
    """Returns a UINT8 tensor, read from bytes or from a nested or flat list of JSON numbers."""
    is_binary = isinstance(data, memoryview)
    try:
        values = np.frombuffer(data, np.uint8) if is_binary else np.asarray(data)
    except (ValueError, OverflowError):
        values = np.empty(0)
    fills_shape = values.dtype.kind in "iu" and values.size == math.prod(shape)
    if not fills_shape or not (is_binary or 0 <= values.min() <= values.max() <= _MAX_U8):
        raise BadRequest(
            "image_u8 must contain integers in 0..255, as many as its shape states", param="inputs"
        )
    return values.astype(np.uint8, copy=False).reshape(shape)


def write(
    content: dict[str, Any], outputs: Mapping[str, NDArray[Any]], binary: frozenset[str]
) -> tuple[bytes, int]:
    """Returns the body of an answer and the length of its JSON part.

    content: the JSON part without outputs. outputs: float32 or int32 arrays. binary: names of the
    outputs to send in binary.
    """
    descriptions, tensors = [], []
    for name, array in outputs.items():
        tensor = {"name": name, "datatype": _DATATYPES[array.dtype], "shape": list(array.shape)}
        if name in binary:
            tensors.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            descriptions.append({**tensor, "parameters": {"binary_data_size": len(tensors[-1])}})
        else:
            descriptions.append({**tensor, "data": np.ascontiguousarray(array).ravel()})
    head = to_json({**content, "outputs": descriptions})
    return b"".join([head, *tensors]), len(head)
