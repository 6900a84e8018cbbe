"""How a route reaches what was opened at start."""

from typing import Annotated, cast

from fastapi import Depends, Request

from service.resources import Resources


def _resources(request: Request) -> Resources:
    return cast(Resources, request.app.state.resources)


Opened = Annotated[Resources, Depends(_resources)]
