"""JSON files with their own checksum, because no manifest lists them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.disk import raise_if_disk_full, translate_os_errors, write_synced
from mlcd.errors import ArtifactInvalid

_CHECKSUM: Final = "checksum"


def seal_bytes(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the file: the content as JSON, with its checksum."""
    sealed = {**content, _CHECKSUM: _checksum(content)}
    return (json.dumps(sealed, indent=2, ensure_ascii=False) + "\n").encode()


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the content with its checksum, atomically."""
    try:
        with translate_os_errors(path):
            path.parent.mkdir(exist_ok=True)
            write_synced(path, seal_bytes(content))
    except OSError as error:
        raise_if_disk_full(error, path)
        raise


def read_sealed(path: Path, *, remedy: str) -> dict[str, Any] | None:
    """Returns the content, without the checksum; None for a missing file.

    Raises ArtifactInvalid with this remedy for a file that is damaged or was edited.
    """
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_intact = stored.pop(_CHECKSUM) == _checksum(stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage_error(path, remedy) from error
    if not is_intact:
        raise _damage_error(path, remedy)
    return stored


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _damage_error(path: Path, remedy: str) -> ArtifactInvalid:
    return ArtifactInvalid(f"{path} is damaged or was edited", remedy=remedy)
