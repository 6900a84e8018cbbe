"""The application: middleware, problems, routers."""

from functools import cache, partial
from typing import Final

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_swagger import patch_fastapi
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlcd.errors import MlcdError
from mlcd.version import __version__
from service.api import (
    centers,
    cohere,
    collections,
    document,
    duplicates,
    embeddings,
    extensions,
    health,
    images,
    inference,
    info,
    items,
    jobs,
    kserve,
    labels,
    models,
    search,
)
from service.head import HeadMiddleware
from service.middleware import BodyLimitMiddleware, RequestMiddleware
from service.problems import handle_http_error, handle_mlcd_error, handle_unexpected, handle_validation_error
from service.resources import Resources
from service.security.gate import check_declared
from service.security.headers import SecurityHeadersMiddleware
from service.security.origin import OriginMiddleware
from service.web import explorer

_ROOMS: Final = (
    health,
    info,
    models,
    embeddings,
    cohere,
    extensions,  # before kserve, whose {model} would be "stats"
    kserve,
    inference,
    images,
    labels,
    centers,
    collections,
    items,
    search,
    duplicates,
    jobs,
    explorer,
)


def create_app(resources: Resources | None) -> FastAPI:
    """An ASGI application over open resources; their owner closes them. None: to be described, as it is with keys.

    Raises ValueError for a route of which nobody said who may enter.
    """
    app = FastAPI(
        title="mlcd",
        version=__version__,
        summary="Image embeddings, nearest-cluster labels and search.",
        # FastAPI's own pages load their scripts from elsewhere; ours come with the package.
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A redirect would name the server as the client does, whoever that is, and loses the method with some.
        redirect_slashes=False,
    )
    # A page that remembers a key would hand it to whoever opens it next.
    parameters = {"tryItOutEnabled": True, "filter": True, "persistAuthorization": False}
    patch_fastapi(app, redirect_from_root_to_docs=False, swagger_ui_parameters=parameters)
    check_declared(app.routes)
    app.state.resources = resources
    app.add_middleware(BodyLimitMiddleware)
    if resources is not None:
        app.add_middleware(OriginMiddleware, settings=resources.settings)
    app.add_middleware(RequestMiddleware)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_exception_handler(MlcdError, handle_mlcd_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(Exception, handle_unexpected)
    app.state.routes = []
    for room in _ROOMS:
        check_declared(room.router.routes)
        app.include_router(room.router)
        app.state.routes += room.router.routes
    keyed = resources is None or resources.keys is not None
    app.openapi = cache(partial(document.describe, app, keyed=keyed))  # type: ignore[method-assign]  # FastAPI's own way
    _serve_document_once_written(app)
    return app


def _serve_document_once_written(app: FastAPI) -> None:
    """Replaces FastAPI's route, which writes the same 200 kB of JSON for everybody who asks, without a key too."""

    @cache
    def written() -> bytes:
        return orjson.dumps(app.openapi())

    async def openapi(_: Request) -> Response:
        return Response(written(), media_type="application/json")

    app.router.routes = [route for route in app.routes if getattr(route, "path", "") != app.openapi_url]
    app.add_route("/openapi.json", openapi, include_in_schema=False)
