"""Takes the pictures of the explorer from a running server, in a browser without a screen.

    mlcd explore caltech101_20/ --no-browser
    python docs/screenshots.py http://127.0.0.1:8000 docs/assets

Wait until the groups have names. Only photographs that may be shown stand in the docs: those of
Caltech 101, CC BY 4.0, with the credit that README and docs/how-to/explore.md give. Chromium has
to be installed.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.chromium import Page, browsing

_WIDTH, _HEIGHT = 1280, 800
_PICTURES_SEEN = """
(all => all.length > 0 && all.every(e => e.complete && e.naturalWidth))(
  [...document.querySelectorAll('main img')]
    .filter(e => e.getBoundingClientRect().top < innerHeight))"""
_FADED_S = 0.5  # what fades in is there


def main(url: str, folder: Path) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("chromium is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, browsing(program, Path(state)) as page:
        page.resize(_WIDTH, _HEIGHT)
        _take(page, f"{url}/#/clusters", folder / "explorer-clusters.webp")
        page.click(".wall a")
        _take(page, None, folder / "explorer-cluster.webp")
        page.click(".tiles a")
        page.until("document.querySelectorAll('dialog .neighbors img').length")
        _take(page, None, folder / "explorer-picture.webp")
        _take(page, f"{url}/#/search?text=a+motorbike", folder / "explorer-search.webp")
        page.shade("dark")
        page.open(f"{url}/#/map")
        page.until("+document.querySelector('.chart')?.dataset.drawn > 0")
        left, top, width, height = page.value(
            "(b => [b.x, b.y, b.width, b.height])"
            "(document.querySelector('.chart').getBoundingClientRect())"
        )
        page.click(".lasso-tools button", "Lasso")
        around = [(0.3, 0.25), (0.6, 0.2), (0.62, 0.5), (0.45, 0.62), (0.28, 0.5)]
        page.drag(*((left + x * width, top + y * height) for x, y in around))
        _take(page, None, folder / "explorer-map.webp")
        page.shade("light")
        page.open("about:blank")
        page.open(f"{url}/#/map?at=-0.05,0,1800")
        page.until("document.querySelectorAll('.map-pictures img').length")
        _take(page, None, folder / "explorer-map-pictures.webp")
        _take(page, f"{url}/#/duplicates", folder / "explorer-duplicates.webp")


def _take(page: Page, url: str | None, path: Path) -> None:
    if url is not None:
        page.open("about:blank")
        page.open(url)
    page.until(_PICTURES_SEEN)
    time.sleep(_FADED_S)
    page.screenshot(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
