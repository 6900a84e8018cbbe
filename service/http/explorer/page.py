"""The explorer: a page that shows the labels and neighbors of a dropped image."""

from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)
_PAGE = (resources.files("service.http.explorer") / "explorer.html").read_text(encoding="utf-8")
# The page contains everything that it needs; it may load nothing from other hosts.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@router.get("/")
async def explorer() -> HTMLResponse:
    return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})
