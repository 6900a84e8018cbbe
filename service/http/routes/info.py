"""What is served, and within which limits."""

from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

import mlcd
from mlcd.images.decode import FORMATS
from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer, provenance
from service.http.auth import needs
from service.http.dialects.openai_wire import Model, ModelList
from service.http.dialects.own.wire import Info
from service.inference.lookup import Lookup
from service.resources import Resources

router = APIRouter()

_INFO: Final[dict[int | str, dict[str, Any]]] = {200: {"model": Info}}
_MODELS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ModelList}}
_MODEL: Final[dict[int | str, dict[str, Any]]] = {200: {"model": Model}, 404: {}}


@router.get("/v1/info", dependencies=[needs()], response_class=Response, responses=_INFO, tags=["info"])
async def info(resources: Opened) -> Response:
    """Model, preprocessing, engine, centers, collections and every limit."""
    encoder = resources.encoder
    return json_answer(
        {
            **provenance(resources),
            "version": mlcd.__version__,
            "dimension": encoder.dimension,
            "engine": encoder.engine,
            "precision": encoder.precision,
            "preprocess": asdict(encoder.preprocess),
            "image_formats": FORMATS,
            "centers": None if resources.lookup is None else _center_set(resources.lookup),
            "collections": sorted(resources.collections),
            "limits": resources.settings.limits.model_dump(),
        },
        headers(resources),
    )


@router.get("/v1/models", dependencies=[needs()], response_class=Response, responses=_MODELS, tags=["openai"])
async def models(resources: Opened) -> Response:
    """OpenAI's shape of the model list."""
    return json_answer({"object": "list", "data": [_model(resources)]}, headers(resources))


@router.get("/v1/models/{model}", dependencies=[needs()], response_class=Response, responses=_MODEL, tags=["openai"])
async def model(model: str, resources: Opened) -> Response:
    """OpenAI's shape of one model."""
    check_model(model, resources)
    return json_answer(_model(resources), headers(resources))


def _model(resources: Resources) -> dict[str, Any]:
    return {"id": resources.encoder.name, "object": "model", "created": 0, "owned_by": "mlcd"}


def _center_set(lookup: Lookup) -> dict[str, Any]:
    return {
        "digest": lookup.centers.digest,
        "num_centers": len(lookup.centers.vectors),
        "modes": lookup.modes,
        "audit": None if lookup.approximation is None else lookup.approximation.audit,
    }
