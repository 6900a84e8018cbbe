"""The route that switches to another version of the served model, without a restart."""

from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.http.access import Opened, check_model
from service.http.answers import headers, json_answer, provenance
from service.http.auth import needs
from service.http.bodies import read_optional_json, validated
from service.http.dialects.own.wire import LoadedModel, LoadRequest
from service.http.openapi import json_body
from service.inference.model import ServedModel
from service.resources import Resources

router = APIRouter(tags=["info"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": LoadedModel}, 404: {}, 409: {}}


@router.post(
    "/v1/models/{name}/load",
    dependencies=[needs("admin")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra={"requestBody": {**json_body(LoadRequest)["requestBody"], "required": False}},
)
async def load(name: str, request: Request, resources: Opened) -> Response:
    """Has Triton load a version of the served model, then serves it.

    Requests under way are answered by the version before, which stays where anything fails. After
    an answer 504 the load goes on. The headers of this answer name the version before, under which
    the request came in.
    """
    check_model(name, resources)
    content = await read_optional_json(request, resources)
    asked = validated(LoadRequest, content)

    def publish(model: ServedModel) -> None:
        request.app.state.resources = replace(resources, model=model)

    version = await resources.switch.load(
        asked.version, unload=asked.unload, publish=publish, deadline=request.state.deadline
    )
    current: Resources = request.app.state.resources
    space = current.model.space
    return json_answer(
        {
            **provenance(current),
            "version": version,
            "centers": None if current.centers is None else current.centers.digest,
            "collections": sorted(current.collections),
            "foreign": {"centers": space.foreign_centers, "collections": space.foreign_collections},
        },
        headers(current),
    )
