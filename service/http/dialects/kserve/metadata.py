"""KServe's Open Inference Protocol (v2) over HTTP: what is there and whether it is ready. `inference` is its work."""

from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

import mlcd
from mlcd.errors import NotFound
from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.dialects.kserve.tensors import EMBEDDING, IMAGE, LABEL_IDS, LABEL_SCORES, PIXELS
from service.http.dialects.kserve.wire import LiveAnswer, ModelMetadata, ModelReadyAnswer, ReadyAnswer, ServerMetadata
from service.resources import Resources

router = APIRouter(tags=["kserve"])

VERSION: Final = "1"
# Triton's names of them. Of its model_repository there is the index alone, so it is not told.
_EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "schedule_policy", "statistics")
_OK: Final = 200
_UNAVAILABLE: Final = 503
_METADATA: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelMetadata}, 404: {}}
_READY: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": ModelReadyAnswer},
    404: {},
    503: {"model": ModelReadyAnswer},
}


@router.get("/v2/health/live", responses={200: {"model": LiveAnswer}})
async def live() -> dict[str, bool]:
    """The process answers."""
    return {"live": True}


@router.get("/v2/health/ready", responses={status: {"model": ReadyAnswer} for status in (_OK, _UNAVAILABLE)})
async def ready(resources: Opened, response: Response) -> dict[str, bool]:
    """As /health/ready."""
    return {"ready": await _is_ready(resources, response)}


@router.get("/v2", dependencies=[needs()], response_class=Response, responses={200: {"model": ServerMetadata}})
async def server() -> Response:
    """Name, version, extensions."""
    return json_answer({"name": "mlcd", "version": mlcd.__version__, "extensions": _EXTENSIONS})


@router.get("/v2/models/{model}", dependencies=[needs()], response_class=Response, responses=_METADATA)
@router.get(
    "/v2/models/{model}/versions/{version}", dependencies=[needs()], response_class=Response, responses=_METADATA
)
async def describe_model(model: str, resources: Opened, version: str = VERSION) -> Response:
    """Inputs, of which a request carries one, and outputs; the fingerprint as a parameter."""
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
async def model_ready(model: str, resources: Opened, response: Response, version: str = VERSION) -> dict[str, Any]:
    """As /health/ready, of the served model."""
    check_version(model, version, resources)
    return {"name": model, "ready": await _is_ready(resources, response)}


def check_version(model: str, version: str, resources: Resources) -> None:
    """Raises NotFound for any but the one version of the served model."""
    check_model(model, resources)
    if version != VERSION:
        raise NotFound("there is no such version of the model", remedy=f"use {VERSION}")


async def _is_ready(resources: Resources, response: Response) -> bool:
    is_ready = await resources.readiness.check()
    response.status_code = _OK if is_ready else _UNAVAILABLE
    return is_ready


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}
