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
from service.http import openapi
from service.http.auth import OriginMiddleware, check_declared
from service.http.dialects import cohere, openai
from service.http.dialects.cohere import EmbedRequest
from service.http.dialects.kserve import infer, metadata
from service.http.dialects.kserve import wire as kserve
from service.http.dialects.kserve.wire import IndexRequest, InferRequest
from service.http.dialects.openai import EmbeddingsRequest
from service.http.dialects.own import wire as own
from service.http.dialects.own.job_wire import JobRequest
from service.http.dialects.own.wire import (
    AddRequest,
    CreateRequest,
    DuplicatesRequest,
    LoadRequest,
    MetadataRequest,
    QueryRequest,
    SearchRequest,
)
from service.http.explorer import page
from service.http.middleware import (
    BodyLimitMiddleware,
    HeadMiddleware,
    RequestMiddleware,
    SecurityHeadersMiddleware,
)
from service.http.problems import (
    handle_http_error,
    handle_mlcd_error,
    handle_unexpected,
    handle_validation_error,
)
from service.http.routes import (
    centers,
    collections,
    health,
    images,
    info,
    items,
    jobs,
    labels,
    models,
    search,
)
from service.resources import Resources

_DIALECTS: Final = (openai.DIALECT, cohere.DIALECT, kserve.DIALECT, own.DIALECT)
_ROOMS: Final = (
    health,
    info,
    models,
    openai,
    cohere,
    metadata,
    infer,
    images,
    labels,
    centers,
    collections,
    items,
    search,
    jobs,
    page,
)
_REQUESTS: Final = (
    EmbeddingsRequest,
    EmbedRequest,
    InferRequest,
    IndexRequest,
    QueryRequest,
    SearchRequest,
    LoadRequest,
    CreateRequest,
    AddRequest,
    MetadataRequest,
    DuplicatesRequest,
    JobRequest,
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
    app.state.resources, app.state.dialects = resources, _DIALECTS
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
    app.openapi = cache(partial(openapi.describe, app, keyed=keyed, requests=_REQUESTS))  # type: ignore[method-assign]  # FastAPI's own way
    _serve_document_once_written(app)
    return app


def _serve_document_once_written(app: FastAPI) -> None:
    """Replaces FastAPI's route, which writes the same 200 kB of JSON for everybody who asks, without a key too."""

    @cache
    def written() -> bytes:
        return orjson.dumps(app.openapi())

    async def document(_: Request) -> Response:
        return Response(written(), media_type="application/json")

    app.router.routes = [
        route for route in app.routes if getattr(route, "path", "") != app.openapi_url
    ]
    app.add_route("/openapi.json", document, include_in_schema=False)
