"""The application: middleware, problems, routers."""

from functools import cache, partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_swagger import patch_fastapi
from starlette.exceptions import HTTPException

import mlcd
from mlcd.errors import MlcdError
from service.api import (
    centers,
    cohere,
    collections,
    document,
    embeddings,
    health,
    images,
    inference,
    info,
    kserve,
    labels,
)
from service.middleware import BodyLimitMiddleware, RequestMiddleware
from service.problems import handle_http_error, handle_mlcd_error, handle_unexpected, handle_validation_error
from service.resources import Resources
from service.web import explorer


def create_app(resources: Resources) -> FastAPI:
    """An ASGI application over open resources; their owner closes them."""
    app = FastAPI(
        title="mlcd",
        version=mlcd.__version__,
        summary="Image embeddings, nearest-cluster labels and search.",
        # FastAPI's own pages load their scripts from elsewhere; ours come with the package.
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    patch_fastapi(app, redirect_from_root_to_docs=False)
    app.state.resources = resources
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(RequestMiddleware)
    app.add_exception_handler(MlcdError, handle_mlcd_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(Exception, handle_unexpected)
    for module in (health, info, embeddings, cohere, kserve, inference, images, labels, centers, collections, explorer):
        app.include_router(module.router)
    app.openapi = cache(partial(document.describe, app))  # type: ignore[method-assign]  # FastAPI's own way
    return app
