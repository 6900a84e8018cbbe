"""The resources of a route, and checks that a request may use a collection or a model."""

from typing import Annotated, cast

from fastapi import Depends, Request

from mlcd.errors import NotFound
from mlcd.service.inference.model_data import missing_collection
from mlcd.service.keys.file import Key
from mlcd.service.resources import Resources


# Async: FastAPI runs a plain function on a thread, and the request would wait for that thread.
async def _get_resources(request: Request) -> Resources:
    return cast(Resources, request.state.resources)


AppResources = Annotated[Resources, Depends(_get_resources)]


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
