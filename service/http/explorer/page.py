"""The explorer's files: one page, and assets whose names contain a hash of their content.

`make explorer` builds the files from the sources in this folder; they ship with the package.
"""

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.errors import NotFound

router = APIRouter(include_in_schema=False)
# The page loads files of this server, and thumbnails that it has fetched with a key (blob:).
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_REVALIDATED: Final = "no-cache"
_FOREVER: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class _File:
    """A file of the build. packed: its content in gzip. digest: of its content, for the ETag."""

    content: bytes
    packed: bytes
    media_type: str
    digest: str


@router.get("/")
async def page(request: Request) -> Response:
    return _answer(request, _files()["index.html"], _REVALIDATED)


@router.get("/assets/{name}")
async def asset(name: str, request: Request) -> Response:
    if (file := _files().get(f"assets/{name}")) is None:
        raise NotFound("unknown file", remedy="reload the page")
    return _answer(request, file, _FOREVER)


def _answer(request: Request, file: _File, caching: str) -> Response:
    accepts_gzip = "gzip" in request.headers.get("accept-encoding", "")
    tag = f'"{file.digest}{"-gzip" if accepts_gzip else ""}"'
    headers = {
        "Content-Security-Policy": _POLICY,
        "Cache-Control": caching,
        "ETag": tag,
        "Vary": "Accept-Encoding",
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if accepts_gzip:
        headers["Content-Encoding"] = "gzip"
    content = file.packed if accepts_gzip else file.content
    return Response(content, headers=headers, media_type=file.media_type)


@cache
def _files() -> dict[str, _File]:
    """Returns the files of the build by their paths in it."""
    built = resources.files("mlcd.service.http.explorer") / "static"
    paths = {"index.html": built / "index.html"}
    paths |= {f"assets/{file.name}": file for file in (built / "assets").iterdir()}
    return {path: _read(path, file.read_bytes()) for path, file in paths.items()}


def _read(path: str, content: bytes) -> _File:
    media_type, _ = mimetypes.guess_type(path)
    packed = gzip.compress(content, mtime=0)
    digest = hashlib.sha256(content).hexdigest()[:32]
    return _File(content, packed, media_type or "application/octet-stream", digest)
