"""Triton's extensions of KServe's protocol that tell of the model: configuration, repository index, statistics.

Of Triton's model control there is none here: `POST /v1/models/{name}/load` is the way to another version.
"""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.http.access import Opened
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import read_optional_json, validated
from service.http.dialects.kserve.metadata import VERSION, check_version
from service.http.dialects.kserve.tensors import EMBEDDING, IMAGE, LABEL_IDS, LABEL_SCORES, PIXELS
from service.http.dialects.kserve.wire import IndexRequest, ModelConfig, ModelIndex, ModelStatistics
from service.http.openapi import json_body
from service.resources import Resources
from service.telemetry.statistics import inference_statistics

router = APIRouter(tags=["kserve"])

_MICROSECONDS: Final = 1_000_000
_CONFIG: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelConfig}, 404: {}}
_INDEX: Final[dict[int | str, dict[str, Any]]] = {200: {"model": list[ModelIndex]}}
_STATISTICS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelStatistics}, 404: {}}


@router.get("/v2/models/{model}/config", dependencies=[needs()], response_class=Response, responses=_CONFIG)
@router.get(
    "/v2/models/{model}/versions/{version}/config", dependencies=[needs()], response_class=Response, responses=_CONFIG
)
async def describe_config(model: str, resources: Opened, version: str = VERSION) -> Response:
    """In the names of Triton's ModelConfig, what holds here of batches, tensors and the queue."""
    check_version(model, version, resources)
    encoder, limits = resources.encoder, resources.settings.limits
    size = encoder.preprocess.crop
    outputs = [_tensor(EMBEDDING, "TYPE_FP32", encoder.dimension)]
    if resources.lookup is not None:
        outputs += [_tensor(LABEL_IDS, "TYPE_INT32", -1), _tensor(LABEL_SCORES, "TYPE_FP32", -1)]
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
                {**_tensor(IMAGE, "TYPE_STRING", 1), "optional": True},
                {**_tensor(PIXELS, "TYPE_UINT8", 3, size, size), "optional": True},
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
    """The one model that is served, and whether it is ready; its other versions in Triton are not listed."""
    content = await read_optional_json(request, resources)
    asked = validated(IndexRequest, content)
    model = {"name": resources.encoder.name, "version": VERSION}
    if await resources.readiness.check():
        return json_answer([{**model, "state": "READY"}])
    return json_answer([] if asked.ready else [{**model, "state": "UNAVAILABLE", "reason": "it cannot serve now"}])


@router.get("/v2/models/stats", dependencies=[needs()], response_class=Response, responses=_STATISTICS)
async def all_statistics(resources: Opened) -> Response:
    """Answers with the statistics of the served model, summed over all server processes."""
    return _statistics(resources)


@router.get("/v2/models/{model}/stats", dependencies=[needs()], response_class=Response, responses=_STATISTICS)
@router.get(
    "/v2/models/{model}/versions/{version}/stats",
    dependencies=[needs()],
    response_class=Response,
    responses=_STATISTICS,
)
async def statistics(model: str, resources: Opened, version: str = VERSION) -> Response:
    """Requests with images of every dialect, by all server processes together, since the server started."""
    check_version(model, version, resources)
    return _statistics(resources)


def _statistics(resources: Resources) -> Response:
    model = {"name": resources.encoder.name, "version": VERSION}
    return json_answer({"model_stats": [{**model, **inference_statistics(resources.metrics.counted())}]})


def _tensor(name: str, data_type: str, *dims: int) -> dict[str, Any]:
    """Returns a tensor as Triton's configuration has it: without the batch's own dimension."""
    return {"name": name, "data_type": data_type, "dims": list(dims)}
