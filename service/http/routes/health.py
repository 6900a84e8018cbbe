"""The routes for probes and metrics."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.service.http.access import AppResources, ModelName, check_model_name
from mlcd.service.http.auth import collection_filter
from mlcd.service.timings import COLLECTIONS_SCRAPE_S

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
router = APIRouter(tags=["health"])


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """Answers 200 while the process is running."""
    return {"status": "live"}


@router.get("/health/ready", responses={503: {"model": dict[str, str]}})
async def ready(resources: AppResources, response: Response) -> dict[str, Any]:
    """Answers 200 if an inference succeeded in the last half second and the server is not stopping.

    If no request needed an inference in that time, the server runs one.
    """
    is_ready = await resources.readiness.check()
    response.status_code = 200 if is_ready else 503
    return {"status": "ready" if is_ready else "not ready"}


@router.get("/metrics", response_class=Response, responses={404: {}})
async def metrics(request: Request, resources: AppResources, model: ModelName = None) -> Response:
    """Returns metrics in Prometheus' text format; with `model`, those of a further model, which are
    empty while it is closed.

    On a server with keys, names of collections are visible only to keys with the scope `search`,
    and only for collections that the key may see. Metrics of collections are left out if their
    store does not answer within a second.
    """
    if model is not None and model != resources.encoder.name:
        check_model_name(model, resources)
        opened = resources.further.find_opened(model)
        return Response(b"" if opened is None else opened.metrics.exposition(), media_type=_TEXT)
    is_visible = collection_filter(request, "search")
    exposition = resources.metrics.exposition()
    collection_metrics = asyncio.get_running_loop().run_in_executor(
        resources.scraping, partial(resources.metrics.of_collections, is_visible)
    )
    # The store of collections may have just become unreachable.
    with suppress(TimeoutError):
        async with asyncio.timeout(COLLECTIONS_SCRAPE_S):
            exposition += await collection_metrics
    return Response(exposition, media_type=_TEXT)
