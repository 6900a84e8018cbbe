"""The inference route of KServe's protocol, in JSON and with the binary extension."""

import asyncio
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from mlcd.types import ImageBatch
from service.deadline import within_deadline
from service.errors import BadRequest
from service.http.access import Opened
from service.http.answers import JSON, RAW, headers
from service.http.auth import needs
from service.http.bodies import check_count, checked_object, parsed_json, read_body, validated
from service.http.data_uris import image_from_field
from service.http.dialects.kserve.messages import InferRequest, InferResponse, InputTensor
from service.http.dialects.kserve.metadata import VERSION, check_version
from service.http.dialects.kserve.tensors import (
    EMBEDDING,
    IMAGE,
    LABEL_IDS,
    LABEL_SCORES,
    LENGTH_HEADER,
    PIXELS,
    TEXT,
    pixels_from_json,
    read_bytes_elements,
    read_pixels,
    split,
    write,
)
from service.http.encoding import encode_pixels
from service.http.openapi import BINARY, json_body
from service.http.queries import check_top
from service.http.text_encoding import (
    GivenItem,
    GivenText,
    check_num_texts,
    encode_items_strictly,
    opened_texts,
)
from service.resources import Resources
from service.telemetry.request import timed

router = APIRouter(tags=["kserve"])

_MICROSECONDS: Final = 1_000_000
_RAW_REQUEST: Final[dict[str, Any]] = {
    "inputs": [{"name": IMAGE, "shape": [1], "datatype": "BYTES"}],
    "parameters": {"binary_data_output": True},
}
_LENGTH: Final[dict[str, Any]] = {
    "name": LENGTH_HEADER,
    "in": "header",
    "description": "bytes of the JSON part, tensors follow; 0: the body is one encoded image;"
    " without it all is JSON",
    "schema": {"type": "integer", "minimum": 0},
}
_BODY: Final = {**json_body(InferRequest, **{RAW: BINARY}), "parameters": [_LENGTH]}
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": InferResponse, "content": {RAW: BINARY}},
    404: {},
    409: {},
}


@router.post(
    "/v2/models/{model}/infer",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
@router.post(
    "/v2/models/{model}/versions/{version}/infer",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
async def infer(
    request: Request, model: str, resources: Opened, version: str = VERSION
) -> Response:
    """Returns embeddings, and labels where there are centers.

    One bad image or text refuses the request, naming its index.
    """
    check_version(model, version, resources)
    body = await read_body(request)
    loop = asyncio.get_running_loop()
    stated = request.headers.get(LENGTH_HEADER)
    asked, given = await loop.run_in_executor(resources.parsing, _read, body, stated, resources)
    wanted = _wanted(asked, resources)
    check_top(asked.parameters.top, resources)
    _bound_wait(request, asked.parameters.timeout)
    if isinstance(given, list):
        items = encode_items_strictly(request, resources, given, param="inputs")
        encoded = (await items).encoded
    else:
        encoded = await encode_pixels(request, resources, given, param="inputs")
    outputs: dict[str, NDArray[Any]] = {EMBEDDING: encoded.embeddings}
    if resources.lookup is not None and wanted != [EMBEDDING]:
        find = partial(resources.lookup.nearest, encoded.embeddings, asked.parameters.top)
        with resources.metrics.looking_up("exact"), timed("labels"):
            labels = await within_deadline(
                loop.run_in_executor(resources.compute, find), request.state.deadline
            )
        outputs |= {LABEL_IDS: labels.ids.astype(np.int32), LABEL_SCORES: labels.scores}
    outputs = {name: outputs[name] for name in wanted}
    content = {
        "model_name": model,
        "model_version": version,
        **({} if asked.id is None else {"id": asked.id}),
    }
    writing = partial(write, content, outputs, _binary(asked, wanted))
    if len(encoded.rows) > resources.settings.limits.max_images:  # many texts take long to write
        answer, head_bytes = await loop.run_in_executor(resources.compute, writing)
    else:
        answer, head_bytes = writing()
    stamp = headers(resources, encoded)
    if head_bytes == len(answer):
        return Response(answer, 200, stamp, JSON)
    return Response(answer, 200, {**stamp, LENGTH_HEADER: str(head_bytes)}, RAW)


def _bound_wait(request: Request, timeout_us: int) -> None:
    """Brings the deadline forward to the client's own, which counts from the body's arrival."""
    if timeout_us:
        own = asyncio.get_running_loop().time() + timeout_us / _MICROSECONDS
        request.state.deadline = min(request.state.deadline, own)


def _read(
    body: bytes, stated: str | None, resources: Resources
) -> tuple[InferRequest, list[GivenItem] | ImageBatch]:
    """Returns the request, and its encoded images, prepared pixels or texts."""
    head, tensors = split(body, stated)
    if stated is not None and not head:  # one raw tensor: a single image, without its length
        return validated(InferRequest, _RAW_REQUEST), [bytes(tensors)]
    asked = validated(InferRequest, checked_object(parsed_json(head, resources.settings.limits)))
    tensor = asked.inputs[0]
    _check(tensor, len(tensors), resources)
    if tensor.name == TEXT:
        return asked, _texts(tensor, tensors)
    return asked, _images(tensor, tensors) if tensor.name == IMAGE else _pixels(tensor, tensors)


def _check(tensor: InputTensor, num_bytes: int, resources: Resources) -> None:
    """Raises BadRequest unless the model takes this tensor and all of its data came with it."""
    size = resources.encoder.preprocess.crop
    if tensor.name == TEXT:
        opened_texts(resources, param="inputs")
    shapes = {
        IMAGE: ("BYTES", ([], [1])),
        TEXT: ("BYTES", ([], [1])),
        PIXELS: ("UINT8", ([3, size, size],)),
    }
    datatype, row_shapes = shapes.get(tensor.name, ("", ()))
    if tensor.datatype != datatype or not tensor.shape or tensor.shape[1:] not in row_shapes:
        raise BadRequest(
            f"the input is {IMAGE} or {TEXT}, BYTES of shape [n],"
            f" or {PIXELS}, UINT8 of shape [n, 3, {size}, {size}]",
            param="inputs",
        )
    if tensor.shape[0] == 0:
        raise BadRequest("the input is empty", param="inputs")
    check = check_num_texts if tensor.name == TEXT else check_count
    check(tensor.shape[0], resources.settings.limits)
    stated = tensor.parameters.binary_data_size
    if (stated is None) == (tensor.data is None):
        raise BadRequest("the input carries either `data` or `binary_data_size`", param="inputs")
    if (stated or 0) != num_bytes:
        raise BadRequest("binary_data_size is not what follows the JSON part", param="inputs")


def _texts(tensor: InputTensor, binary: memoryview) -> list[GivenItem]:
    if tensor.data is None:
        return [_text(element) for element in read_bytes_elements(binary, tensor.shape[0])]
    if not isinstance(tensor.data, list) or len(tensor.data) != tensor.shape[0]:
        raise BadRequest("data must be a list of as many strings", param="inputs")
    return [GivenText(item) for item in tensor.data]


def _text(element: bytes) -> GivenItem:
    # What is no UTF-8 becomes halves of surrogate pairs, which are refused as a text is.
    return GivenText(element.decode(errors="surrogateescape"))


def _images(tensor: InputTensor, binary: memoryview) -> list[GivenItem]:
    if tensor.data is None:
        return list(read_bytes_elements(binary, tensor.shape[0]))
    if not isinstance(tensor.data, list) or len(tensor.data) != tensor.shape[0]:
        raise BadRequest("data must be a list of as many images, in base64", param="inputs")
    return [image_from_field(item) for item in tensor.data]


def _pixels(tensor: InputTensor, binary: memoryview) -> ImageBatch:
    if tensor.data is None:
        return read_pixels(binary, tensor.shape)
    return pixels_from_json(tensor.data, tensor.shape)


def _wanted(asked: InferRequest, resources: Resources) -> list[str]:
    known = [EMBEDDING] if resources.lookup is None else [EMBEDDING, LABEL_IDS, LABEL_SCORES]
    if asked.outputs is None:
        return known
    wanted = list(dict.fromkeys(output.name for output in asked.outputs))
    if resources.model.data.foreign_centers is not None and {LABEL_IDS, LABEL_SCORES} & set(wanted):
        resources.model.data.opened_lookup()
    if not wanted or not set(wanted) <= set(known):
        raise BadRequest(f"outputs are {', '.join(known)}", param="outputs")
    return wanted


def _binary(asked: InferRequest, wanted: list[str]) -> frozenset[str]:
    """Returns the outputs to send in binary: each output's own choice, else the request's."""
    said = {output.name: output.parameters.binary_data for output in asked.outputs or []}
    default = asked.parameters.binary_data_output
    return frozenset(name for name in wanted if (default if said.get(name) is None else said[name]))
