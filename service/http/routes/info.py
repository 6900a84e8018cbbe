"""The route that describes the served model and the limits."""

from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from mlcd.images.decode import FORMATS
from mlcd.version import __version__
from service.http.access import Opened
from service.http.answers import headers, json_answer, provenance
from service.http.auth import needs
from service.http.dialects.own.wire import Info
from service.inference.lookup import Lookup

router = APIRouter(tags=["info"])

_INFO: Final[dict[int | str, dict[str, Any]]] = {200: {"model": Info}}


@router.get("/v1/info", dependencies=[needs()], response_class=Response, responses=_INFO)
async def info(resources: Opened) -> Response:
    """Describes the model, preprocessing, engine, centers, collections and every limit."""
    encoder = resources.encoder
    return json_answer(
        {
            **provenance(resources),
            "version": __version__,
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


def _center_set(lookup: Lookup) -> dict[str, Any]:
    return {
        "digest": lookup.centers.digest,
        "num_centers": len(lookup.centers.vectors),
        "modes": lookup.modes,
        "audit": None if lookup.approximation is None else lookup.approximation.audit,
    }
