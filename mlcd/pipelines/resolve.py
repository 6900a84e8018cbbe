"""Turns a user's model spec into a path that an engine can open. Weights that no engine opens
directly are exported once, into a cache.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.disk import hold_lock, translate_os_errors
from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.encoders.endpoint_forms import is_endpoint
from mlcd.errors import ConfigInvalid, NotFound, Unavailable
from mlcd.export.starter.artifact import STARTER, starter_digest
from mlcd.extras import install_command
from mlcd.locations import is_url
from mlcd.models import hub
from mlcd.models.runs import find_checkpoint, holds_checkpoints
from mlcd.models.weight_files import check_is_whole_model, digest_of_weights
from mlcd.version import __version__

_USER_ERROR: Final = 2  # exit status of `mlcd` for errors that the user can fix
_CLASSICAL: Final = ("hog", "pixels")
BUILT_IN: Final = (STARTER, *_CLASSICAL)  # names of models that need no files
_SERVED: Final = ("model", "embeddings")  # kinds of artifacts; embeddings stand for their model
_MESSAGE_PREFIX: Final = "mlcd: "  # of lines to show to the user


def resolve_model(spec: str, announce: Callable[[str], None] = lambda _: None) -> str:
    """Returns a model for `mlcd.encoders.open_encoder`: `spec` itself, or a cached artifact of it.

    A run, a checkpoint, a directory or a file of weights, `hub:ORGANIZATION/MODEL`, or `starter` is
    exported the first time, in a separate process, so that the caller never imports torch. An
    artifact at a URL is downloaded. Embeddings stand for their model, which is absent. announce:
    called with a message when an export starts. Raises the errors of `mlcd export`.
    """
    if is_endpoint(spec):
        return spec
    if is_url(spec):
        spec = str(fetch_copy(spec))
    path = Path(spec)
    if spec in _CLASSICAL or path.suffix == ".onnx":
        return spec
    if spec == STARTER:
        return _export_once(spec, STARTER, starter_digest(), announce)
    if (path / MANIFEST).is_file() and open_artifact(path, verify_files=False).kind in _SERVED:
        return spec
    check_is_whole_model(spec)
    return _export_once(spec, _derive_name(spec), _digest_of_weights(spec, path), announce)


def make_portable_spec(spec: str) -> str:
    """Returns a spec that other machines can open: names and URLs unchanged, paths absolute."""
    is_portable = spec in BUILT_IN or is_url(spec) or not Path(spec).exists()
    return spec if is_portable else str(Path(spec).resolve())


def _digest_of_weights(spec: str, path: Path) -> str:
    if holds_checkpoints(path):
        return open_artifact(find_checkpoint(path), verify_files=False).digest
    return digest_of_weights(spec)


def _export_once(spec: str, name: str, identity: str, announce: Callable[[str], None]) -> str:
    """Returns the cached export of these weights by this version of mlcd; exports it if missing."""
    # "both towers": exports of earlier versions had only the image tower
    digest = hashlib.sha256(f"{__version__} both towers {identity}".encode()).hexdigest()
    out = user_cache_path("mlcd", appauthor=False) / "models" / f"{name}-{digest[:16]}"
    with translate_os_errors(out, remedy="name another cache with XDG_CACHE_HOME"):
        out.parent.mkdir(parents=True, exist_ok=True)
        # concurrent processes wait for the one that exports
        with hold_lock(out.with_name(f".{out.name}.lock")):
            if not (out / MANIFEST).is_file():
                announce(f"exporting {spec} once, into {out}")
                _export(spec, out, name, announce)
    return str(out)


def _derive_name(spec: str) -> str:
    """Returns a file name from the last part of `spec`."""
    stem = Path(spec.removeprefix(hub.PREFIX)).resolve().name
    return (
        re.sub(r"[^A-Za-z0-9._-]+", "-", stem.removesuffix(".safetensors")).strip(".-_") or "model"
    )


def _export(spec: str, out: Path, name: str, announce: Callable[[str], None]) -> None:
    if spec != STARTER and importlib.util.find_spec("torch") is None:
        raise ConfigInvalid(
            f"{spec} must be exported first, which needs torch; torch is not installed",
            remedy=f"{install_command('train')}; or run `mlcd export` on a machine with torch, and"
            " give the directory it writes",
        )
    command = [sys.executable, "-m", "mlcd", "export", spec, str(out), "--name", name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == _USER_ERROR:
        raise ConfigInvalid(process.stderr.strip().splitlines()[-1].removeprefix(_MESSAGE_PREFIX))
    if process.returncode != 0:
        raise Unavailable(
            f"the export of {spec} failed", remedy=f"run `mlcd export {spec} OUT` to see why"
        )
    if not (out / MANIFEST).is_file():
        raise NotFound(f"the export of {spec} did not write a model to {out}")
    for line in process.stderr.splitlines():
        if line.startswith(_MESSAGE_PREFIX):
            announce(line.removeprefix(_MESSAGE_PREFIX))
