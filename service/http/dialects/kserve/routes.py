"""The routes of KServe's protocol: health, metadata, and inference in JSON or in binary."""

import asyncio
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from mlcd.errors import NotFound
from mlcd.types import ImageBatch
from mlcd.version import __version__
from service.deadline import within_deadline
from service.errors import BadRequest
from service.http.access import Opened, check_model
from service.http.answers import JSON, RAW, headers
from service.http.auth import needs
from service.http.bodies import check_count, checked_object, parsed_json, read_body, validated
from service.http.data_uris import image_from_field
from service.http.dialects.kserve import tensors
from service.http.dialects.kserve.messages import ONE_IMAGE, InferRequest, InputTensor
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

_MODEL: Final = "/v2/models/{model}"
_VERSIONED: Final = _MODEL + "/versions/{version}"
_VERSION: Final = "1"
_MISSING: Final[dict[int | str, dict[str, Any]]] = {404: {}}
_READY: Final[dict[int | str, dict[str, Any]]] = {503: {"model": dict[str, bool]}}
_MODEL_READY: Final[dict[int | str, dict[str, Any]]] = {404: {}, 503: {"model": dict[str, Any]}}
_RAW_IMAGE: Final = {"inputs": [ONE_IMAGE], "parameters": {"binary_data_output": True}}
_OBJECT: Final = {"schema": {"type": "object"}}
_LENGTH: Final[dict[str, Any]] = {
    "name": tensors.LENGTH_HEADER,
    "in": "header",
    "description": "bytes of the JSON part, tensors follow; 0: the body is one encoded image;"
    " without it all is JSON",
    "schema": {"type": "integer", "minimum": 0},
}
_DOCUMENTED: Final[dict[str, Any]] = {
    "response_class": Response,
    "responses": {200: {"content": {JSON: _OBJECT, RAW: BINARY}}, 404: {}, 409: {}},
    "openapi_extra": {**json_body(InferRequest, **{RAW: BINARY}), "parameters": [_LENGTH]},
}


@router.get("/v2/health/live")
async def live() -> dict[str, bool]:
    """Answers as long as the process lives."""
    return {"live": True}


@router.get("/v2/health/ready", responses=_READY)
async def ready(resources: Opened, response: Response) -> dict[str, bool]:
    """Answers whether the server can serve, as /health/ready does."""
    return {"ready": await _is_ready(resources, response)}


@router.get("/v2", dependencies=[needs()])
async def server() -> dict[str, Any]:
    """Answers with the server's name, version and extensions."""
    return {"name": "mlcd", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.get(_MODEL, dependencies=[needs()], responses=_MISSING)
@router.get(_VERSIONED, dependencies=[needs()], responses=_MISSING)
async def describe_model(
    model: str, resources: Opened, response: Response, version: str = _VERSION
) -> dict[str, Any]:
    """Describes the inputs, of which a request carries one, the outputs and the fingerprint."""
    _check_version(model, version, resources)
    encoder = resources.encoder
    response.headers.update(headers(resources))
    return {
        "name": model,
        "versions": [_VERSION],
        "platform": "mlcd",
        "inputs": _inputs(resources),
        "outputs": _outputs(resources),
        "parameters": {
            "fingerprint": encoder.fingerprint,
            "preprocess_version": str(encoder.preprocess.version),
        },
    }


@router.get(_MODEL + "/ready", dependencies=[needs()], responses=_MODEL_READY)
@router.get(_VERSIONED + "/ready", dependencies=[needs()], responses=_MODEL_READY)
async def model_ready(
    model: str, resources: Opened, response: Response, version: str = _VERSION
) -> dict[str, Any]:
    """Answers whether the served model is ready, as /health/ready does."""
    _check_version(model, version, resources)
    return {"name": model, "ready": await _is_ready(resources, response)}


@router.post(_MODEL + "/infer", dependencies=[needs("embed")], **_DOCUMENTED)
@router.post(_VERSIONED + "/infer", dependencies=[needs("embed")], **_DOCUMENTED)
async def infer(
    request: Request, model: str, resources: Opened, version: str = _VERSION
) -> Response:
    """Returns embeddings, and labels where there are centers.

    One bad image or text refuses the request, naming its index.
    """
    _check_version(model, version, resources)
    body = await read_body(request)
    loop = asyncio.get_running_loop()
    stated = request.headers.get(tensors.LENGTH_HEADER)
    asked, given = await loop.run_in_executor(resources.parsing, _read, body, stated, resources)
    wanted = _wanted(asked, resources)
    check_top(asked.parameters.top, resources)
    if isinstance(given, list):
        items = encode_items_strictly(request, resources, given, param="inputs")
        encoded = (await items).encoded
    else:
        encoded = await encode_pixels(request, resources, given, param="inputs")
    outputs: dict[str, NDArray[Any]] = {"embedding": encoded.embeddings}
    if resources.lookup is not None and wanted != ["embedding"]:
        find = partial(resources.lookup.nearest, encoded.embeddings, asked.parameters.top)
        with resources.metrics.looking_up("exact"), timed("labels"):
            labels = await within_deadline(
                loop.run_in_executor(resources.compute, find), request.state.deadline
            )
        outputs |= {"label_ids": labels.ids.astype(np.int32), "label_scores": labels.scores}
    outputs = {name: outputs[name] for name in wanted}
    content = {"model_name": model, "model_version": version}
    content |= {} if asked.id is None else {"id": asked.id}
    writing = partial(tensors.write, content, outputs, _binary(asked, wanted))
    if len(encoded.rows) > resources.settings.limits.max_images:  # many texts take long to write
        answer, head_bytes = await loop.run_in_executor(resources.compute, writing)
    else:
        answer, head_bytes = writing()
    stamp = headers(resources, encoded)
    if head_bytes == len(answer):
        return Response(answer, 200, stamp, JSON)
    return Response(answer, 200, {**stamp, tensors.LENGTH_HEADER: str(head_bytes)}, RAW)


def _read(
    body: bytes, stated: str | None, resources: Resources
) -> tuple[InferRequest, list[GivenItem] | ImageBatch]:
    """Returns the request, and its encoded images and texts, or prepared pixels."""
    head, binary = tensors.split(body, stated)
    if stated is not None and not head:  # one raw tensor: a single image, without its length
        return validated(InferRequest, _RAW_IMAGE), [bytes(binary)]
    asked = validated(InferRequest, checked_object(parsed_json(head, resources.settings.limits)))
    tensor = asked.inputs[0]
    _check(tensor, len(binary), resources)
    if tensor.name == "image_u8":
        data = binary if tensor.data is None else tensor.data
        return asked, tensors.read_pixels(data, tensor.shape)
    return asked, _items(tensor, binary)


def _check(tensor: InputTensor, num_bytes: int, resources: Resources) -> None:
    """Raises BadRequest unless the model takes this tensor and all of its data came with it."""
    if tensor.name == "text":
        opened_texts(resources, param="inputs")
    fitting = [
        known
        for known in _inputs(resources)
        if (known["name"], known["datatype"]) == (tensor.name, tensor.datatype)
        and tensor.shape[1:] in (known["shape"][1:], known["shape"][1:] or [1])
    ]
    if not fitting or not tensor.shape:
        takes = " or ".join("{name} {datatype} {shape}".format(**i) for i in _inputs(resources))
        raise BadRequest(f"the input must be {takes}", param="inputs")
    if tensor.shape[0] == 0:
        raise BadRequest("the input is empty", param="inputs")
    check = check_num_texts if tensor.name == "text" else check_count
    check(tensor.shape[0], resources.settings.limits)
    stated = tensor.parameters.binary_data_size
    if (stated is None) == (tensor.data is None):
        raise BadRequest("the input carries either `data` or `binary_data_size`", param="inputs")
    if (stated or 0) != num_bytes:
        raise BadRequest("binary_data_size is not what follows the JSON part", param="inputs")


def _items(tensor: InputTensor, binary: memoryview) -> list[GivenItem]:
    is_text, num = tensor.name == "text", tensor.shape[0]
    if tensor.data is None:
        elements = tensors.read_bytes_elements(binary, num)
        # Bytes outside UTF-8 become halves of surrogate pairs, which are refused as a text is.
        texts = (GivenText(one.decode(errors="surrogateescape")) for one in elements if is_text)
        return [*texts] if is_text else [*elements]
    if not isinstance(tensor.data, list) or len(tensor.data) != num:
        raise BadRequest(f"data must be a list of {num} strings", param="inputs")
    return [GivenText(item) if is_text else image_from_field(item) for item in tensor.data]


def _wanted(asked: InferRequest, resources: Resources) -> list[str]:
    known = [output["name"] for output in _outputs(resources)]
    if asked.outputs is None:
        return known
    wanted = list(dict.fromkeys(output.name for output in asked.outputs))
    if resources.model.data.foreign_centers is not None and {"label_ids", "label_scores"} & set(
        wanted
    ):
        resources.model.data.opened_lookup()
    if not wanted or not set(wanted) <= set(known):
        raise BadRequest(f"outputs must be of {', '.join(known)}", param="outputs")
    return wanted


def _binary(asked: InferRequest, wanted: list[str]) -> frozenset[str]:
    """Returns the outputs to send in binary: each output's own choice, else the request's."""
    said = {output.name: output.parameters.binary_data for output in asked.outputs or []}
    default = asked.parameters.binary_data_output
    return frozenset(name for name in wanted if (default if said.get(name) is None else said[name]))


def _check_version(model: str, version: str, resources: Resources) -> None:
    """Raises NotFound unless this is the one version of the served model."""
    check_model(model, resources)
    if version != _VERSION:
        raise NotFound("there is no such version of the model", remedy=f"use {_VERSION}")


def _inputs(resources: Resources) -> list[dict[str, Any]]:
    size = resources.encoder.preprocess.crop
    images = [_tensor("image", "BYTES", -1), _tensor("image_u8", "UINT8", -1, 3, size, size)]
    return images if resources.texts is None else [*images, _tensor("text", "BYTES", -1)]


def _outputs(resources: Resources) -> list[dict[str, Any]]:
    embedding = [_tensor("embedding", "FP32", -1, resources.encoder.dimension)]
    labels = [_tensor("label_ids", "INT32", -1, -1), _tensor("label_scores", "FP32", -1, -1)]
    return embedding if resources.lookup is None else embedding + labels


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    """Returns a tensor as the protocol describes it; -1 in its shape stands for any size."""
    return {"name": name, "datatype": datatype, "shape": [*shape]}


async def _is_ready(resources: Resources, response: Response) -> bool:
    is_ready = await resources.readiness.check()
    response.status_code = 200 if is_ready else 503
    return is_ready
