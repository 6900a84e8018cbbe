"""A fast path around FastAPI, for routes that need only the request and the resources.

FastAPI tries the routes one by one, opens three exit stacks and resolves dependencies, which takes
more CPU time than a small model needs for an image. Here a table finds the route of a fixed path,
and its function is called directly.
"""

from collections.abc import Iterable
from inspect import signature

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from mlcd.errors import MlcdError
from mlcd.service.http.auth import check_access
from mlcd.service.http.problems import handle_mlcd_error


class FastPathMiddleware:
    """Calls the functions of plain routes; passes every other request to FastAPI.

    Requests with a query also go to FastAPI, which validates the query.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, APIRoute) and _is_plain(route)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http" and not scope["query_string"]:
            route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # as FastAPI's router does
        request = Request(scope, receive, send)
        try:
            await check_access(route, request)
            answer: Response = await route.endpoint(request, request.state.resources)
        except MlcdError as error:
            answer = await handle_mlcd_error(request, error)
            # The traceback refers to the future that raised, which keeps the images in memory.
            error.__traceback__ = None
        await answer(scope, receive, send)


def _is_plain(route: APIRoute) -> bool:
    """Tells whether a route's function takes the request and the resources, has defaults for all
    other parameters, reads the body itself, and returns a Response.
    """
    function = signature(route.endpoint)
    required, optional = [*function.parameters.values()][:2], [*function.parameters.values()][2:]
    return (
        not route.param_convertors
        and route.body_field is None
        and function.return_annotation is Response
        and [parameter.name for parameter in required] == ["request", "resources"]
        and all(parameter.default is not parameter.empty for parameter in optional)
    )
