"""The routes of KServe and Triton for metadata, readiness, configuration, index and statistics.

There is no route for Triton's model control: `POST /v1/models/{name}/load` switches versions.
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Response

from mlcd.errors import NotFound
from mlcd.version import __version__
from service.http.access import Opened, check_model
from service.http.answers import headers
from service.http.auth import needs
from service.http.dialects.kserve.messages import (
    ConfiguredTensor,
    IndexRequest,
    LiveAnswer,
    ModelConfig,
    ModelIndex,
    ModelMetadata,
    ModelReadyAnswer,
    ModelStatistics,
    ReadyAnswer,
    ServerMetadata,
    TensorMetadata,
    VersionStatistics,
)
from service.http.dialects.kserve.tensors import (
    EMBEDDING,
    IMAGE,
    LABEL_IDS,
    LABEL_SCORES,
    PIXELS,
    TEXT,
)
from service.http.json_route import JsonRoute
from service.resources import Resources
from service.telemetry.statistics import inference_statistics

router = APIRouter(tags=["kserve"], route_class=JsonRoute)

_MICROSECONDS: Final = 1_000_000
VERSION: Final = "1"
# Triton's names. Its model_repository is not listed, because only the index is implemented.
_EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "schedule_policy", "statistics")
_OK: Final = 200
_UNAVAILABLE: Final = 503
_MISSING: Final[dict[int | str, dict[str, Any]]] = {404: {}}
_READY: Final[dict[int | str, dict[str, Any]]] = {404: {}, 503: {"model": ModelReadyAnswer}}


@router.get(
    "/v2/models/{model}/config",
    dependencies=[needs()],
    responses=_MISSING,
    response_model_exclude_unset=True,
)
@router.get(
    "/v2/models/{model}/versions/{version}/config",
    dependencies=[needs()],
    responses=_MISSING,
    response_model_exclude_unset=True,
)
async def describe_config(
    model: str, resources: Opened, response: Response, version: str = VERSION
) -> ModelConfig:
    """Describes batches, tensors and the queue with the field names of Triton's ModelConfig."""
    check_version(model, version, resources)
    encoder, limits = resources.encoder, resources.settings.limits
    size = encoder.preprocess.crop
    outputs = [ConfiguredTensor(name=EMBEDDING, data_type="TYPE_FP32", dims=[encoder.dimension])]
    if resources.lookup is not None:
        outputs += [
            ConfiguredTensor(name=LABEL_IDS, data_type="TYPE_INT32", dims=[-1]),
            ConfiguredTensor(name=LABEL_SCORES, data_type="TYPE_FP32", dims=[-1]),
        ]
    parameters = {
        "engine": encoder.engine,
        "fingerprint": encoder.fingerprint,
        "precision": encoder.precision,
        "preprocess_version": str(encoder.preprocess.version),
    }
    response.headers.update(headers(resources))
    return ModelConfig(
        name=encoder.name,
        platform="mlcd",
        version_policy={"specific": {"versions": [int(VERSION)]}},
        max_batch_size=limits.max_images,
        input=[
            # A request carries one of them.
            ConfiguredTensor(name=IMAGE, data_type="TYPE_STRING", dims=[1], optional=True),
            ConfiguredTensor(
                name=PIXELS, data_type="TYPE_UINT8", dims=[3, size, size], optional=True
            ),
            *(
                []
                if resources.texts is None
                else [ConfiguredTensor(name=TEXT, data_type="TYPE_STRING", dims=[1], optional=True)]
            ),
        ],
        output=outputs,
        dynamic_batching={
            "priority_levels": 0,
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": round(_MICROSECONDS * limits.deadline_s),
                "allow_timeout_override": True,
                "max_queue_size": limits.max_queued_images,
            },
        },
        parameters={name: {"string_value": value} for name, value in parameters.items()},
    )


@router.post("/v2/repository/index", dependencies=[needs()], response_model_exclude_unset=True)
async def index(
    asked: Annotated[IndexRequest, Body(default_factory=IndexRequest)], resources: Opened
) -> list[ModelIndex]:
    """Lists the one served model with its state; its other versions in Triton are not listed."""
    name = resources.encoder.name
    if await resources.readiness.check():
        return [ModelIndex(name=name, version=VERSION, state="READY")]
    if asked.ready:
        return []
    reason = "it cannot serve now"
    return [ModelIndex(name=name, version=VERSION, state="UNAVAILABLE", reason=reason)]


@router.get("/v2/models/stats", dependencies=[needs()], responses=_MISSING)
async def all_statistics(resources: Opened) -> ModelStatistics:
    """Answers with the statistics of the served model, summed over all server processes."""
    return _statistics(resources)


@router.get("/v2/models/{model}/stats", dependencies=[needs()], responses=_MISSING)
@router.get(
    "/v2/models/{model}/versions/{version}/stats", dependencies=[needs()], responses=_MISSING
)
async def statistics(model: str, resources: Opened, version: str = VERSION) -> ModelStatistics:
    """Counts requests with images or texts in every dialect since the server's start."""
    check_version(model, version, resources)
    return _statistics(resources)


def _statistics(resources: Resources) -> ModelStatistics:
    counted = inference_statistics(resources.metrics.counted())
    served = VersionStatistics(name=resources.encoder.name, version=VERSION, **counted)
    return ModelStatistics(model_stats=[served])


@router.get("/v2/health/live")
async def live() -> LiveAnswer:
    """Answers as long as the process lives."""
    return LiveAnswer(live=True)


@router.get("/v2/health/ready", responses={_UNAVAILABLE: {"model": ReadyAnswer}})
async def ready(resources: Opened, response: Response) -> ReadyAnswer:
    """Answers whether the server can serve, as /health/ready does."""
    return ReadyAnswer(ready=await _is_ready(resources, response))


@router.get("/v2", dependencies=[needs()])
async def server() -> ServerMetadata:
    """Answers with the server's name, version and extensions."""
    return ServerMetadata(name="mlcd", version=__version__, extensions=[*_EXTENSIONS])


@router.get("/v2/models/{model}", dependencies=[needs()], responses=_MISSING)
@router.get("/v2/models/{model}/versions/{version}", dependencies=[needs()], responses=_MISSING)
async def describe_model(
    model: str, resources: Opened, response: Response, version: str = VERSION
) -> ModelMetadata:
    """Describes the inputs, of which a request carries one, the outputs and the fingerprint."""
    check_version(model, version, resources)
    encoder = resources.encoder
    size = encoder.preprocess.crop
    outputs = [TensorMetadata(name=EMBEDDING, datatype="FP32", shape=[-1, encoder.dimension])]
    if resources.lookup is not None:
        outputs += [
            TensorMetadata(name=LABEL_IDS, datatype="INT32", shape=[-1, -1]),
            TensorMetadata(name=LABEL_SCORES, datatype="FP32", shape=[-1, -1]),
        ]
    response.headers.update(headers(resources))
    return ModelMetadata(
        name=encoder.name,
        versions=[VERSION],
        platform="mlcd",
        inputs=[
            TensorMetadata(name=IMAGE, datatype="BYTES", shape=[-1]),
            TensorMetadata(name=PIXELS, datatype="UINT8", shape=[-1, 3, size, size]),
            *(
                []
                if resources.texts is None
                else [TensorMetadata(name=TEXT, datatype="BYTES", shape=[-1])]
            ),
        ],
        outputs=outputs,
        parameters={
            "fingerprint": encoder.fingerprint,
            "preprocess_version": str(encoder.preprocess.version),
        },
    )


@router.get("/v2/models/{model}/ready", dependencies=[needs()], responses=_READY)
@router.get("/v2/models/{model}/versions/{version}/ready", dependencies=[needs()], responses=_READY)
async def model_ready(
    model: str, resources: Opened, response: Response, version: str = VERSION
) -> ModelReadyAnswer:
    """Answers whether the served model is ready, as /health/ready does."""
    check_version(model, version, resources)
    return ModelReadyAnswer(name=model, ready=await _is_ready(resources, response))


def check_version(model: str, version: str, resources: Resources) -> None:
    """Raises NotFound unless this is the one version of the served model."""
    check_model(model, resources)
    if version != VERSION:
        raise NotFound("there is no such version of the model", remedy=f"use {VERSION}")


async def _is_ready(resources: Resources, response: Response) -> bool:
    is_ready = await resources.readiness.check()
    response.status_code = _OK if is_ready else _UNAVAILABLE
    return is_ready
