"""The application: middleware, error handlers, routers."""

from functools import cache, partial
from typing import Final

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_swagger import patch_fastapi
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlcd.errors import MlcdError
from mlcd.service.http import openapi
from mlcd.service.http.answer_budget import AnswerMiddleware
from mlcd.service.http.auth import OriginMiddleware, check_declared
from mlcd.service.http.dialects import cohere, kserve, openai, own
from mlcd.service.http.explorer import page
from mlcd.service.http.fast_path import FastPathMiddleware
from mlcd.service.http.middleware import (
    BodyLimitMiddleware,
    HeadMiddleware,
    RequestMiddleware,
    SecurityHeadersMiddleware,
)
from mlcd.service.http.problems import (
    handle_http_error,
    handle_mlcd_error,
    handle_unexpected,
    handle_validation_error,
)
from mlcd.service.http.routes import (
    batches,
    centers,
    classify,
    collections,
    exploration,
    files,
    health,
    images,
    info,
    items,
    jobs,
    labels,
    layout,
    models,
    search,
    texts,
    thumbnails,
    usage,
    webhooks,
)
from mlcd.service.resources import Resources
from mlcd.version import __version__
from mlcd.wire.embedding import ClassifyRequest, QueryRequest
from mlcd.wire.item_search import SearchRequest
from mlcd.wire.stored_items import AddRequest

_DIALECTS: Final = (openai.DIALECT, cohere.DIALECT, kserve.DIALECT, own.DIALECT)
_ROUTES: Final = (
    health,
    info,
    usage,
    models,
    openai,
    cohere,
    kserve,
    images,
    texts,
    classify,
    labels,
    centers,
    collections,
    thumbnails,
    items,
    layout,
    search,
    exploration,
    jobs,
    files,
    batches,
    webhooks,
    page,
)
# Bodies of routes that also read other media types than JSON, and so validate JSON themselves.
_SELF_VALIDATED_BODIES: Final = (
    kserve.InferRequest,
    ClassifyRequest,
    QueryRequest,
    SearchRequest,
    AddRequest,
)


def create_app(resources: Resources | None) -> FastAPI:
    """Returns an ASGI application over open resources; the caller closes them.

    With None the application can only write its OpenAPI document, for a server that requires keys.
    Raises ValueError for a route that declares no scope.
    """
    app = FastAPI(
        title="mlcd",
        version=__version__,
        summary="Image and text embeddings, nearest-cluster labels and search.",
        # FastAPI's own pages load scripts from other hosts; fastapi-swagger ships them.
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A redirect would repeat the Host header that the client sent, and some clients change the
        # method when they follow one.
        redirect_slashes=False,
        # The service has its own tracing; FastAPI would look for providers at every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    # A page that stores a key would show it to the next person who opens the page.
    parameters = {"tryItOutEnabled": True, "filter": True, "persistAuthorization": False}
    patch_fastapi(app, redirect_from_root_to_docs=False, swagger_ui_parameters=parameters)
    check_declared(app.routes)
    app.state.resources, app.state.dialects = resources, _DIALECTS
    app.state.routes = []
    app.add_middleware(FastPathMiddleware, routes=app.state.routes)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(AnswerMiddleware)
    if resources is not None:
        app.add_middleware(OriginMiddleware, settings=resources.settings)
    app.add_middleware(RequestMiddleware)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_exception_handler(MlcdError, handle_mlcd_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(Exception, handle_unexpected)
    for module in _ROUTES:
        check_declared(module.router.routes)
        app.include_router(module.router)
        app.state.routes += module.router.routes
    requires_keys = resources is None or resources.keys is not None
    # FastAPI documents this assignment as the way to replace its document.
    described = cache(
        partial(openapi.describe, app, keyed=requires_keys, requests=_SELF_VALIDATED_BODIES)
    )
    app.openapi = described  # type: ignore[method-assign]
    _serve_cached_document(app)
    return app


def _serve_cached_document(app: FastAPI) -> None:
    """Replaces FastAPI's route, which writes the same 200 kB of JSON for every request.

    The route needs no key, so any client could keep the server busy with it.
    """

    @cache
    def write_document() -> bytes:
        return orjson.dumps(app.openapi())

    async def document(_: Request) -> Response:
        return Response(write_document(), media_type="application/json")

    app.router.routes = [
        route for route in app.routes if getattr(route, "path", "") != app.openapi_url
    ]
    app.add_route("/openapi.json", document, include_in_schema=False)
