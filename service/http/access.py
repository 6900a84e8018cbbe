"""The resources that a route works with."""

from typing import Annotated, cast

from fastapi import Depends, Request

from mlcd.errors import NotFound
from service.resources import Resources


# Async, because FastAPI would run a plain function on a thread, for which the request would wait.
async def _resources(request: Request) -> Resources:
    return cast(Resources, request.state.resources)


Opened = Annotated[Resources, Depends(_resources)]


def check_model(name: str, resources: Resources) -> None:
    """Raises NotFound unless `name` is the served model."""
    if name != resources.encoder.name:
        raise NotFound("there is no such model", remedy=f"use {resources.encoder.name}")
