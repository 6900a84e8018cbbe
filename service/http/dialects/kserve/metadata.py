"""The routes of KServe and Triton for metadata, readiness, configuration, index and statistics.

There is no route for Triton's model control: `POST /v1/models/{name}/load` switches versions.
"""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.errors import NotFound
from mlcd.version import __version__
from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import read_optional_json, validated
from service.http.dialects.kserve.tensors import EMBEDDING, IMAGE, LABEL_IDS, LABEL_SCORES, PIXELS
from service.http.dialects.kserve.wire import (
    IndexRequest,
    LiveAnswer,
    ModelConfig,
    ModelIndex,
    ModelMetadata,
    ModelReadyAnswer,
    ModelStatistics,
    ReadyAnswer,
    ServerMetadata,
)
from service.http.openapi import json_body
from service.resources import Resources
from service.telemetry.statistics import inference_statistics

router = APIRouter(tags=["kserve"])

_MICROSECONDS: Final = 1_000_000
_CONFIG: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelConfig}, 404: {}}
_INDEX: Final[dict[int | str, dict[str, Any]]] = {200: {"model": list[ModelIndex]}}
_STATISTICS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelStatistics}, 404: {}}
VERSION: Final = "1"
# Triton's names. Its model_repository is not listed, because only the index is implemented.
_EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "schedule_policy", "statistics")
_OK: Final = 200
_UNAVAILABLE: Final = 503
_METADATA: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelMetadata}, 404: {}}
_READY: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": ModelReadyAnswer},
    404: {},
    503: {"model": ModelReadyAnswer},
}


@router.get(
    "/v2/models/{model}/config", dependencies=[needs()], response_class=Response, responses=_CONFIG
)
@router.get(
    "/v2/models/{model}/versions/{version}/config",
    dependencies=[needs()],
    response_class=Response,
    responses=_CONFIG,
)
async def describe_config(model: str, resources: Opened, version: str = VERSION) -> Response:
    """Describes batches, tensors and the queue with the field names of Triton's ModelConfig."""
    check_version(model, version, resources)
    encoder, limits = resources.encoder, resources.settings.limits
    size = encoder.preprocess.crop
    outputs = [_configured(EMBEDDING, "TYPE_FP32", encoder.dimension)]
    if resources.lookup is not None:
        outputs += [
            _configured(LABEL_IDS, "TYPE_INT32", -1),
            _configured(LABEL_SCORES, "TYPE_FP32", -1),
        ]
    parameters = {
        "engine": encoder.engine,
        "fingerprint": encoder.fingerprint,
        "precision": encoder.precision,
        "preprocess_version": str(encoder.preprocess.version),
    }
    return json_answer(
        {
            "name": encoder.name,
            "platform": "mlcd",
            "version_policy": {"specific": {"versions": [int(VERSION)]}},
            "max_batch_size": limits.max_images,
            "input": [
                # A request carries one of them.
                {**_configured(IMAGE, "TYPE_STRING", 1), "optional": True},
                {**_configured(PIXELS, "TYPE_UINT8", 3, size, size), "optional": True},
            ],
            "output": outputs,
            "dynamic_batching": {
                "priority_levels": 0,
                "default_queue_policy": {
                    "timeout_action": "REJECT",
                    "default_timeout_microseconds": round(_MICROSECONDS * limits.deadline_s),
                    "allow_timeout_override": True,
                    "max_queue_size": limits.max_queued_images,
                },
            },
            "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        },
        headers(resources),
    )


@router.post(
    "/v2/repository/index",
    dependencies=[needs()],
    response_class=Response,
    responses=_INDEX,
    openapi_extra={"requestBody": {**json_body(IndexRequest)["requestBody"], "required": False}},
)
async def index(request: Request, resources: Opened) -> Response:
    """Lists the one served model with its state; its other versions in Triton are not listed."""
    content = await read_optional_json(request, resources)
    asked = validated(IndexRequest, content)
    model = {"name": resources.encoder.name, "version": VERSION}
    if await resources.readiness.check():
        return json_answer([{**model, "state": "READY"}])
    return json_answer(
        [] if asked.ready else [{**model, "state": "UNAVAILABLE", "reason": "it cannot serve now"}]
    )


@router.get(
    "/v2/models/stats", dependencies=[needs()], response_class=Response, responses=_STATISTICS
)
async def all_statistics(resources: Opened) -> Response:
    """Answers with the statistics of the served model, summed over all server processes."""
    return _statistics(resources)


@router.get(
    "/v2/models/{model}/stats",
    dependencies=[needs()],
    response_class=Response,
    responses=_STATISTICS,
)
@router.get(
    "/v2/models/{model}/versions/{version}/stats",
    dependencies=[needs()],
    response_class=Response,
    responses=_STATISTICS,
)
async def statistics(model: str, resources: Opened, version: str = VERSION) -> Response:
    """Counts requests with images in every dialect since the server started, in all processes."""
    check_version(model, version, resources)
    return _statistics(resources)


def _statistics(resources: Resources) -> Response:
    model = {"name": resources.encoder.name, "version": VERSION}
    return json_answer(
        {"model_stats": [{**model, **inference_statistics(resources.metrics.counted())}]}
    )


def _configured(name: str, data_type: str, *dims: int) -> dict[str, Any]:
    """Returns a tensor in Triton's configuration format, without the dimension of the batch."""
    return {"name": name, "data_type": data_type, "dims": list(dims)}


@router.get("/v2/health/live", responses={200: {"model": LiveAnswer}})
async def live() -> dict[str, bool]:
    """Answers as long as the process lives."""
    return {"live": True}


@router.get(
    "/v2/health/ready", responses={status: {"model": ReadyAnswer} for status in (_OK, _UNAVAILABLE)}
)
async def ready(resources: Opened, response: Response) -> dict[str, bool]:
    """Answers whether the server can serve, as /health/ready does."""
    return {"ready": await _is_ready(resources, response)}


@router.get(
    "/v2",
    dependencies=[needs()],
    response_class=Response,
    responses={200: {"model": ServerMetadata}},
)
async def server() -> Response:
    """Answers with the server's name, version and extensions."""
    return json_answer({"name": "mlcd", "version": __version__, "extensions": _EXTENSIONS})


@router.get(
    "/v2/models/{model}", dependencies=[needs()], response_class=Response, responses=_METADATA
)
@router.get(
    "/v2/models/{model}/versions/{version}",
    dependencies=[needs()],
    response_class=Response,
    responses=_METADATA,
)
async def describe_model(model: str, resources: Opened, version: str = VERSION) -> Response:
    """Describes the inputs, of which a request carries one, the outputs and the fingerprint."""
    check_version(model, version, resources)
    encoder = resources.encoder
    size = encoder.preprocess.crop
    outputs = [_tensor(EMBEDDING, "FP32", -1, encoder.dimension)]
    if resources.lookup is not None:
        outputs += [_tensor(LABEL_IDS, "INT32", -1, -1), _tensor(LABEL_SCORES, "FP32", -1, -1)]
    return json_answer(
        {
            "name": encoder.name,
            "versions": [VERSION],
            "platform": "mlcd",
            "inputs": [_tensor(IMAGE, "BYTES", -1), _tensor(PIXELS, "UINT8", -1, 3, size, size)],
            "outputs": outputs,
            "parameters": {
                "fingerprint": encoder.fingerprint,
                "preprocess_version": str(encoder.preprocess.version),
            },
        },
        headers(resources),
    )


@router.get("/v2/models/{model}/ready", dependencies=[needs()], responses=_READY)
@router.get("/v2/models/{model}/versions/{version}/ready", dependencies=[needs()], responses=_READY)
async def model_ready(
    model: str, resources: Opened, response: Response, version: str = VERSION
) -> dict[str, Any]:
    """Answers whether the served model is ready, as /health/ready does."""
    check_version(model, version, resources)
    return {"name": model, "ready": await _is_ready(resources, response)}


def check_version(model: str, version: str, resources: Resources) -> None:
    """Raises NotFound unless this is the one version of the served model."""
    check_model(model, resources)
    if version != VERSION:
        raise NotFound("there is no such version of the model", remedy=f"use {VERSION}")


async def _is_ready(resources: Resources, response: Response) -> bool:
    is_ready = await resources.readiness.check()
    response.status_code = _OK if is_ready else _UNAVAILABLE
    return is_ready


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}
