"""How a route reaches what is open for its request."""

from typing import Annotated, cast

from fastapi import Depends, Request

from mlcd.errors import NotFound
from service.resources import Resources


async def _resources(
    request: Request,
) -> Resources:  # not async, every request would wait for a thread to say it
    return cast(Resources, request.state.resources)


Opened = Annotated[Resources, Depends(_resources)]


def check_model(name: str, resources: Resources) -> None:
    """Raises NotFound for any model but the one that is served."""
    if name != resources.encoder.name:
        raise NotFound("there is no such model", remedy=f"use {resources.encoder.name}")
