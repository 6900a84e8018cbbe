"""Routes with a typed JSON body."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from mlcd.service.http.auth import check_access
from mlcd.service.http.bodies import read_json, read_optional_json
from mlcd.service.resources import Resources


class JsonRoute(APIRoute):
    """A route whose body FastAPI validates.

    FastAPI itself would read a body of any size before it checks the key, and parse it on the event
    loop. This route checks the key first, then reads and parses the body within the server's
    bounds, and passes the parsed content to FastAPI. A route without a typed body reads its own.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        read = read_json if self.body_field.field_info.is_required() else read_optional_json

        async def read_and_handle(request: Request) -> Response:
            await check_access(self, request)
            resources: Resources = request.state.resources
            return await handle(_ParsedRequest(request, await read(request, resources)))

        return read_and_handle


class _ParsedRequest(Request):
    """A request with its parsed body; None if it had no body."""

    def __init__(self, request: Request, content: dict[str, Any] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content

    async def body(self) -> bytes:
        """Returns a placeholder: FastAPI only checks whether the body is empty."""
        return b"" if self._content is None else b"{}"

    async def json(self) -> Any:
        return self._content
