"""The route that switches to another version of the served model, without a restart."""

from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Request, Response

from mlcd.service.http.access import AppResources, check_model
from mlcd.service.http.answers import headers, provenance
from mlcd.service.http.auth import needs
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.inference.model import ServedModel
from mlcd.service.resources import Resources
from mlcd.wire.served_model import Foreign, LoadedModel, LoadRequest

router = APIRouter(tags=["info"], route_class=JsonRoute)

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {404: {}, 409: {}}


@router.post("/v1/models/{name}/load", dependencies=[needs("admin")], responses=_ERRORS)
async def load(
    name: str,
    body: Annotated[LoadRequest, Body(default_factory=LoadRequest)],
    request: Request,
    response: Response,
    resources: AppResources,
) -> LoadedModel:
    """Has Triton load a version of the served model, then serves it.

    The previous version answers the requests in progress, and stays if anything fails. After an
    answer 504, the load continues. The headers of this answer still name the previous version.
    """
    check_model(name, resources)

    def publish(model: ServedModel) -> None:
        request.app.state.resources = replace(resources, model=model)

    version = await resources.switch.load(
        body.version, unload=body.unload, publish=publish, deadline=request.state.deadline
    )
    current: Resources = request.app.state.resources
    data = current.model.data
    response.headers.update(headers(current))
    return LoadedModel(
        **provenance(current),
        version=version,
        centers=None if current.centers is None else current.centers.digest,
        collections=sorted(current.collections),
        foreign=Foreign(centers=data.foreign_centers, collections=data.foreign_collections),
    )
