"""KServe's Open Inference Protocol (v2) over HTTP: health, metadata, infer with binary tensors."""

import asyncio
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from mlcd.errors import NotFound
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest
from mlcd.service.http.access import AppResources, check_model_name, use_model
from mlcd.service.http.answers import JSON, RAW, headers
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import check_count, load_json, read_body, require_object, validate
from mlcd.service.http.data_uris import image_from_field
from mlcd.service.http.dialect import Dialect
from mlcd.service.http.dialects import kserve_tensors as tensors
from mlcd.service.http.encoding import encode_pixels
from mlcd.service.http.openapi import BINARY, json_body
from mlcd.service.http.queries import check_top
from mlcd.service.http.text_encoding import (
    RequestItem,
    RequestText,
    check_num_texts,
    encode_items_strictly,
    require_texts,
)
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import time_stage
from mlcd.types import ImageBatch
from mlcd.version import __version__
from mlcd.wire.shapes import EXAMPLE_IMAGE

router = APIRouter(tags=["kserve"])

ONE_IMAGE: Final[dict[str, Any]] = {"name": "image", "shape": [1], "datatype": "BYTES"}
_EXAMPLE: Final[dict[str, Any]] = {
    "id": "1",
    "inputs": [{**ONE_IMAGE, "data": [EXAMPLE_IMAGE.partition(",")[2]]}],
    "outputs": [{"name": "embedding"}],
}
_MODEL: Final = "/v2/models/{model}"
_VERSIONED: Final = _MODEL + "/versions/{version}"
_VERSION: Final = "1"
_READY: Final[dict[int | str, dict[str, Any]]] = {503: {"model": dict[str, bool]}}
_MODEL_READY: Final[dict[int | str, dict[str, Any]]] = {404: {}, 503: {"model": dict[str, Any]}}
_RAW_IMAGE: Final = {"inputs": [ONE_IMAGE], "parameters": {"binary_data_output": True}}


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputParameters(_StrictModel):
    """Parameters of an input. binary_data_size: bytes of the tensor after the JSON part."""

    binary_data_size: Annotated[StrictInt, Field(ge=0)] | None = None


class InputTensor(_StrictModel):
    """An input tensor.

    `image`: BYTES [n], image files; in JSON as base64 or URLs. `image_u8`: UINT8 [n, 3, S, S],
    preprocessed pixels. `text`: BYTES [n], texts in UTF-8, in JSON as strings; requires a model
    with a text tower.
    """

    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=16)]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(_StrictModel):
    """Parameters of an output. binary_data: send this output after the JSON part."""

    binary_data: StrictBool | None = None


class RequestedOutput(_StrictModel):
    """An output to return: embedding, label_ids or label_scores."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(_StrictModel):
    """binary_data_output: send every output after the JSON part. top: labels per image."""

    binary_data_output: StrictBool = False
    top: Annotated[StrictInt, Field(ge=1)] = 8


class InferRequest(_StrictModel):
    """A request with one input; without `outputs` every output is returned."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[str, Field(max_length=256)] | None = None
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=64)] | None = None


class KServeError(BaseModel):
    """A refusal in the protocol's format."""

    error: str


DIALECT: Final = Dialect(
    ("/v2",), "application/json", KServeError, lambda refusal: {"error": refusal.detail}
)
_LENGTH: Final[dict[str, Any]] = {
    "name": tensors.LENGTH_HEADER,
    "in": "header",
    "description": "bytes of the JSON part, which the binary tensors follow; 0: the body is one"
    " image file; absent: the whole body is JSON",
    "schema": {"type": "integer", "minimum": 0},
}
_OBJECT: Final = {"schema": {"type": "object"}}
_DOCUMENTED: Final[dict[str, Any]] = {
    "response_class": Response,
    "responses": {200: {"content": {JSON: _OBJECT, RAW: BINARY}}, 404: {}, 409: {}},
    "openapi_extra": {**json_body(InferRequest, **{RAW: BINARY}), "parameters": [_LENGTH]},
}


@router.get("/v2/health/live")
async def live() -> dict[str, bool]:
    """Answers 200 while the process is running."""
    return {"live": True}


@router.get("/v2/health/ready", responses=_READY)
async def ready(resources: AppResources, response: Response) -> dict[str, bool]:
    """Reports whether the server is ready, like /health/ready."""
    is_ready = await resources.readiness.check()
    response.status_code = 200 if is_ready else 503
    return {"ready": is_ready}


@router.get("/v2", dependencies=[needs()])
async def server() -> dict[str, Any]:
    """Answers with the server's name, version and extensions."""
    return {"name": "mlcd", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.get(_MODEL, dependencies=[needs()], responses={404: {}})
@router.get(_VERSIONED, dependencies=[needs()], responses={404: {}})
async def describe_model(
    request: Request,
    model: str,
    resources: AppResources,
    response: Response,
    version: str = _VERSION,
) -> dict[str, Any]:
    """Describes the inputs, of which a request has one, the outputs and the fingerprint."""
    resources = await _use_version(model, version, request, resources)
    response.headers.update(headers(resources))
    return {
        "name": model,
        "versions": [_VERSION],
        "platform": "mlcd",
        "inputs": _describe_inputs(resources),
        "outputs": _describe_outputs(resources),
        "parameters": {
            "fingerprint": resources.encoder.fingerprint,
            "preprocess_version": str(resources.encoder.preprocess.version),
        },
    }


@router.get(_MODEL + "/ready", dependencies=[needs()], responses=_MODEL_READY)
@router.get(_VERSIONED + "/ready", dependencies=[needs()], responses=_MODEL_READY)
async def model_ready(
    model: str, resources: AppResources, response: Response, version: str = _VERSION
) -> dict[str, Any]:
    """Reports whether a model is ready, like /health/ready. A further model that is closed counts
    as ready, because a request opens it.
    """
    _check_version(model, version, resources)
    if model in resources.further.names:
        response.status_code = 200 if await resources.further.is_ready(model) else 503
        return {"name": model, "status": "ready" if response.status_code == 200 else "not ready"}
    return {"name": model, **await ready(resources, response)}


@router.post(_MODEL + "/infer", dependencies=[needs("embed")], **_DOCUMENTED)
@router.post(_VERSIONED + "/infer", dependencies=[needs("embed")], **_DOCUMENTED)
async def infer(
    request: Request, model: str, resources: AppResources, version: str = _VERSION
) -> Response:
    """Returns embeddings and, if the model has centers, labels.

    If an image or text is invalid, the whole request is refused, and the error has its index.
    """
    resources = await _use_version(model, version, request, resources)
    json_bytes = request.headers.get(tensors.LENGTH_HEADER)
    read = partial(_read_request, await read_body(request), json_bytes, resources)
    loop = asyncio.get_running_loop()
    inference, items = await loop.run_in_executor(resources.parsing, read)
    names = _select_outputs(inference, resources)
    check_top(inference.parameters.top, resources)
    if isinstance(items, list):
        encoded = (await encode_items_strictly(request, resources, items, param="inputs")).encoded
    else:
        encoded = await encode_pixels(request, resources, items, param="inputs")
    outputs: dict[str, NDArray[Any]] = {"embedding": encoded.embeddings}
    if resources.lookup is not None and names != ["embedding"]:
        found = resources.lookups.nearest(
            resources.lookup, encoded.embeddings, inference.parameters.top
        )
        with resources.metrics.looking_up("exact"), time_stage("labels"):
            labels, _ = await within_deadline(found, request.state.deadline)
        outputs |= {"label_ids": labels.ids.astype(np.int32), "label_scores": labels.scores}
    outputs = {name: outputs[name] for name in names}
    content = {"model_name": model, "model_version": version}
    content |= {} if inference.id is None else {"id": inference.id}
    write = partial(tensors.write, content, outputs, _select_binary_outputs(inference, names))
    is_large = len(encoded.rows) > resources.settings.limits.max_images  # many texts
    writing = loop.run_in_executor(resources.compute, write) if is_large else None
    answer, head_bytes = write() if writing is None else await writing
    answer_headers = headers(resources, encoded)
    if head_bytes == len(answer):
        return Response(answer, 200, answer_headers, JSON)
    return Response(answer, 200, {**answer_headers, tensors.LENGTH_HEADER: str(head_bytes)}, RAW)


def _read_request(
    body: bytes, json_bytes: str | None, resources: Resources
) -> tuple[InferRequest, list[RequestItem] | ImageBatch]:
    """Returns the request, and its image files and texts or its preprocessed pixels."""
    head, binary = tensors.split(body, json_bytes)
    if json_bytes is not None and not head:  # one raw tensor: a single image without a length
        return validate(InferRequest, _RAW_IMAGE), [bytes(binary)]
    content = require_object(load_json(head, resources.settings.limits))
    inference = validate(InferRequest, content)
    tensor = inference.inputs[0]
    _check_tensor(tensor, len(binary), resources)
    if tensor.name == "image_u8":
        data = binary if tensor.data is None else tensor.data
        return inference, tensors.read_pixels(data, tensor.shape)
    return inference, _read_items(tensor, binary)


def _check_tensor(tensor: InputTensor, num_bytes: int, resources: Resources) -> None:
    """Raises BadRequest unless the model accepts this tensor and its data is complete."""
    if tensor.name == "text":
        require_texts(resources, param="inputs")
    inputs = _describe_inputs(resources)
    is_accepted = any(
        (accepted["name"], accepted["datatype"]) == (tensor.name, tensor.datatype)
        and tensor.shape[1:] in (accepted["shape"][1:], accepted["shape"][1:] or [1])
        for accepted in inputs
    )
    if not is_accepted or not tensor.shape:
        choices = " or ".join("{name} {datatype} {shape}".format(**i) for i in inputs)
        raise BadRequest(f"the input must be {choices}", param="inputs")
    if tensor.shape[0] == 0:
        raise BadRequest("the input must have at least 1 item, got 0", param="inputs")
    check = check_num_texts if tensor.name == "text" else check_count
    check(tensor.shape[0], resources.settings.limits)
    size = tensor.parameters.binary_data_size
    if (size is None) == (tensor.data is None):
        raise BadRequest("the input must have either `data` or `binary_data_size`", param="inputs")
    if (size or 0) != num_bytes:
        raise BadRequest(
            f"binary_data_size must be {num_bytes}, the bytes after the JSON part, got {size}",
            param="inputs",
        )


def _read_items(tensor: InputTensor, binary: memoryview) -> list[RequestItem]:
    is_text, num = tensor.name == "text", tensor.shape[0]
    if tensor.data is None:
        elements = tensors.read_bytes_elements(binary, num)
        # Invalid UTF-8 becomes lone surrogates, which the validation of texts refuses.
        texts = (RequestText(item.decode(errors="surrogateescape")) for item in elements if is_text)
        return [*texts] if is_text else [*elements]
    if not isinstance(tensor.data, list) or len(tensor.data) != num:
        raise BadRequest(f"data must be a list of {num} strings", param="inputs")
    return [RequestText(item) if is_text else image_from_field(item) for item in tensor.data]


def _select_outputs(inference: InferRequest, resources: Resources) -> list[str]:
    available = [output["name"] for output in _describe_outputs(resources)]
    if inference.outputs is None:
        return available
    names = list(dict.fromkeys(output.name for output in inference.outputs))
    if {"label_ids", "label_scores"}.intersection(names) and resources.model.data.foreign_centers:
        resources.model.data.require_lookup()  # raises Conflict
    if not names or not set(names) <= set(available):
        raise BadRequest(f"outputs must be among {', '.join(available)}", param="outputs")
    return names


def _select_binary_outputs(inference: InferRequest, names: list[str]) -> frozenset[str]:
    """Returns the outputs to send in binary: chosen per output, else by the request's default."""
    default = inference.parameters.binary_data_output
    choices = {output.name: output.parameters.binary_data for output in inference.outputs or []}
    return frozenset(n for n in names if (default if choices.get(n) is None else choices[n]))


async def _use_version(
    model: str, version: str, request: Request, resources: Resources
) -> Resources:
    """Returns the resources with this model. Raises NotFound like `_check_version`."""
    _check_version(model, version, resources)
    return await use_model(model, request, resources)


def _check_version(model: str, version: str, resources: Resources) -> None:
    """Raises NotFound unless this server has the model, and `version` is its only version."""
    check_model_name(model, resources)
    if version != _VERSION:
        raise NotFound(f"the version must be {_VERSION}", remedy=f"use {_VERSION}, or leave it out")


def _describe_inputs(resources: Resources) -> list[dict[str, Any]]:
    size = resources.encoder.preprocess.crop
    images = [
        _describe_tensor("image", "BYTES", -1),
        _describe_tensor("image_u8", "UINT8", -1, 3, size, size),
    ]
    return images if resources.texts is None else [*images, _describe_tensor("text", "BYTES", -1)]


def _describe_outputs(resources: Resources) -> list[dict[str, Any]]:
    embedding = [_describe_tensor("embedding", "FP32", -1, resources.encoder.dimension)]
    labels = [
        _describe_tensor("label_ids", "INT32", -1, -1),
        _describe_tensor("label_scores", "FP32", -1, -1),
    ]
    return embedding if resources.lookup is None else embedding + labels


def _describe_tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    """Returns the protocol's description of a tensor; -1 in its shape means any size."""
    return {"name": name, "datatype": datatype, "shape": [*shape]}
