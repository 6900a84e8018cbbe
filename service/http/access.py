"""The resources that a route works with."""

from typing import Annotated, cast

from fastapi import Depends, Request

from mlcd.errors import NotFound
from mlcd.service.inference.model_data import missing_collection
from mlcd.service.keys.file import Key
from mlcd.service.resources import Resources


# Async, because FastAPI would run a plain function on a thread, for which the request would wait.
async def _resources(request: Request) -> Resources:
    return cast(Resources, request.state.resources)


Opened = Annotated[Resources, Depends(_resources)]


def sees(name: str, request: Request) -> bool:
    """Tells whether the key of a request sees the collection."""
    key: Key | None = request.state.key
    return key is None or key.sees(name)


def check_seen(name: str, request: Request) -> None:
    """Raises NotFound, as where there is none, for a collection that the key does not see."""
    if not sees(name, request):
        raise missing_collection()


def check_model(name: str, resources: Resources) -> None:
    """Raises NotFound unless `name` is the served model."""
    if name != resources.encoder.name:
        raise NotFound("this server serves another model", remedy=f"use {resources.encoder.name}")
