"""Modules of open_clip, by file: the package itself asks for torchvision and timm."""

import importlib.metadata
import importlib.util
from types import ModuleType

import pytest


def open_clip_module(name: str) -> ModuleType:
    """Loads a module of open_clip; skips the test where the package is not installed."""
    try:
        package = importlib.metadata.distribution("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("open_clip_torch is not installed")
    path = package.locate_file(f"open_clip/{name}.py")
    spec = importlib.util.spec_from_file_location(f"open_clip_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
