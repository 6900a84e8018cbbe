"""Whether the process lives, whether it can serve, what it has done."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.http.access import Opened
from service.http.auth import shows_key

router = APIRouter(tags=["health"])


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """The process answers."""
    return {"status": "live"}


@router.get("/health/ready", responses={503: {"model": dict[str, str]}})
async def ready(resources: Opened, response: Response) -> dict[str, Any]:
    """An inference succeeded within half a second (if none was asked for, one is tried), and no stop is under way."""
    healthy = await resources.readiness.check()
    response.status_code = 200 if healthy else 503
    return {"status": "ready" if healthy else "not ready"}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, resources: Opened) -> Response:
    """Prometheus text format. On a server with keys, collections are named to whoever shows one of scope `search`."""
    exposition = resources.metrics.exposition(names=shows_key(request, "search"))
    return Response(exposition, media_type="text/plain; version=0.0.4; charset=utf-8")
