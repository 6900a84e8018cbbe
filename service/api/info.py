"""What is served, and within which limits."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

import mlcd
from service.api.access import Opened
from service.api.answers import provenance

router = APIRouter(tags=["info"])


@router.get("/v1/info")
async def info(resources: Opened) -> dict[str, Any]:
    """Model, preprocessing, engine, centers, collections and every limit."""
    encoder, centers = resources.encoder, resources.centers
    return {
        **provenance(resources),
        "version": mlcd.__version__,
        "dimension": encoder.dimension,
        "engine": encoder.engine,
        "precision": encoder.precision,
        "preprocess": asdict(encoder.preprocess),
        "centers": None if centers is None else {"digest": centers.digest, "num_centers": len(centers.vectors)},
        "collections": sorted(resources.collections),
        "limits": resources.settings.limits.model_dump(),
    }


@router.get("/v1/models")
async def models(resources: Opened) -> dict[str, Any]:
    """OpenAI's shape of the model list."""
    model = {"id": resources.encoder.name, "object": "model", "created": 0, "owned_by": "mlcd"}
    return {"object": "list", "data": [model]}
