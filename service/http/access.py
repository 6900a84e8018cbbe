"""The resources of a route, and checks that a request may use a collection or a model."""

from dataclasses import replace
from typing import Annotated, cast

from fastapi import Depends, Query, Request

from mlcd.errors import NotFound
from mlcd.service.inference.model_data import missing_collection
from mlcd.service.keys.file import Key
from mlcd.service.resources import Resources


# Async: FastAPI runs a plain function on a thread, and the request would wait for that thread.
async def _get_resources(request: Request) -> Resources:
    return cast(Resources, request.state.resources)


AppResources = Annotated[Resources, Depends(_get_resources)]

# the query parameter of routes whose body has no field for it
ModelName = Annotated[str | None, Query(alias="model", description="One of /v1/models.")]


def sees(name: str, request: Request) -> bool:
    """Tells whether the request's key may see the collection."""
    key: Key | None = request.state.key
    return key is None or key.sees(name)


def check_seen(name: str, request: Request) -> None:
    """Raises NotFound for a collection that the key does not see, as if it did not exist."""
    if not sees(name, request):
        raise missing_collection()


def check_model(name: str, resources: Resources) -> None:
    """Raises NotFound unless `name` is the served model."""
    if name != resources.encoder.name:
        raise NotFound("this server serves another model", remedy=f"use {resources.encoder.name}")


def check_model_name(name: str, resources: Resources) -> None:
    """Raises NotFound unless `name` is the served model or a further one."""
    names = [resources.encoder.name, *resources.further.names]
    if name not in names:
        raise NotFound(
            f"this server serves {'another model' if len(names) == 1 else 'other models'}",
            remedy=f"use {' or '.join(names)}",
        )


async def use_model(name: str | None, request: Request, resources: Resources) -> Resources:
    """Returns the resources with the model of this name, until the end of the request.

    name: of the served model or of a further one; None for the served one. Raises NotFound for
    another name, and the errors of `FurtherModels.begin`.
    """
    if name is None or name == resources.encoder.name:
        return resources
    check_model_name(name, resources)
    opened, end = await resources.further.begin(name, deadline=request.state.deadline)
    selected = replace(
        resources, model=opened.model, admission=opened.admission, metrics=opened.metrics
    )
    request.state.resources, request.state.end_of_model = selected, end
    return selected
