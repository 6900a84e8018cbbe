"""Finds the model and the centers that an engine opens, from the settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.manifest import MANIFEST
from mlcd.encoders import has_text
from mlcd.errors import NotFound
from mlcd.pipelines.resolve import BUILT_IN, resolve_model
from mlcd.service.settings import Settings

# Resident memory of an engine's process without weights: Python, numpy and OpenVINO.
_ENGINE_BYTES: Final = 200 << 20


def find_model(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> str:
    """Returns the model that the engine opens, exporting foreign weights first.

    An export takes minutes and must not run in an event loop. announce: called with a message
    before an export.
    """
    if settings.engine in ("fake", "triton"):
        return settings.model
    return resolve_model(settings.model, announce)


def find_centers(settings: Settings, folder: str) -> Path | None:
    """Returns the path of the centers of `settings`, otherwise of those in the model's folder."""
    if settings.centers is not None:
        return fetch_copy(settings.centers)
    centers = Path(folder) / "centers"
    return centers if (centers / MANIFEST).is_file() else None


def check_model_exists(settings: Settings) -> None:
    """Raises NotFound for a path that does not exist. Names, URLs and names of the hub pass."""
    spec = settings.model
    if ":" not in spec and spec not in BUILT_IN and not Path(spec).exists():
        raise NotFound(
            f"the model {spec} does not exist",
            remedy=f"correct its path, or use {', '.join(BUILT_IN)}",
        )


def estimate_engine_bytes(settings: Settings) -> int:
    """Estimates the resident memory of a model's engines from the size of its files.

    An artifact holds its weights twice, for two engines; one engine needs them about twice.
    """
    folder = Path(find_model(settings))
    files = folder.rglob("*") if folder.is_dir() else [folder]
    num_bytes = sum(path.stat().st_size for path in files if path.is_file())
    num_towers = 2 if has_text(str(folder)) else 1
    return num_towers * _ENGINE_BYTES + num_bytes
