"""The build of the explorer, the page of the service: a hook of the wheel, and `make explorer`.

The wheel holds the build of the very sources that it is packed with. Hashes tell whether that is
so, never times: every checkout and every sdist has its own. Where they agree, no node is needed.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXPLORER: Final = Path(__file__).parent / "mlcd" / "service" / "http" / "explorer"
_SOURCES: Final = (
    "index.html",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "vite.config.ts",
    "src/**/*",
)
_HASHES: Final = "SOURCE.sha256"


class ExplorerHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        # An editable installation serves the files of the checkout, whatever they are.
        if version != "editable":
            ensure_built(EXPLORER)


def ensure_built(explorer: Path) -> None:
    """Builds the page if its sources, or the files of its build, are others than were hashed.

    Raises RuntimeError where it has to and there is no npm.
    """
    hashes = explorer / "static" / _HASHES
    if hashes.is_file() and hashes.read_text(encoding="utf-8") == _hashes(explorer):
        return
    if (npm := shutil.which("npm")) is None:
        raise RuntimeError(
            f"{explorer}/static is not the build of the sources beside it, and npm is not on the"
            " PATH to build it: install Node 20.19 or newer, or take static/ from the repository"
        )
    for command in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        subprocess.run([npm, *command], cwd=explorer, check=True)
    hashes.write_text(_hashes(explorer), encoding="utf-8")


def _hashes(explorer: Path) -> str:
    """Returns the content of the file of hashes, for the files as they are."""
    static = explorer / "static"
    sources = (path for pattern in _SOURCES for path in explorer.glob(pattern))
    build = (path for path in static.rglob("*") if path.name != _HASHES)
    return f"{_digest(sources, explorer)}  sources\n{_digest(build, static)}  build\n"


def _digest(paths: Iterable[Path], folder: Path) -> str:
    """Returns the SHA-256 of what `sha256sum` prints of these files, by name."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in sorted(paths)
        if path.is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    ensure_built(EXPLORER)
