"""Finds and identifies weights, without loading them: a file, a directory of Hugging Face or
open_clip, or the hub.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Final

from mlcd.artifacts.manifest import MANIFEST, near
from mlcd.errors import ArtifactInvalid, NotFound
from mlcd.models import hub
from mlcd.models.runs import refuse_unfinished

HF_CONFIG: Final = "config.json"
OPEN_CLIP_CONFIG: Final = "open_clip_config.json"
HF_PREPROCESSING: Final = ("preprocessor_config.json", "processor_config.json")
_LFS: Final = b"version https://git-lfs"
_SEPARATORS: Final = re.compile(r"[/\\\0]")
_KINDS: Final = ("model", "checkpoint", "run")
_WEIGHTS: Final = (
    "model.safetensors", "model.safetensors.index.json", "open_clip_model.safetensors",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "open_clip_pytorch_model.bin",
)  # fmt: skip


def locate(spec: str) -> Path:
    """Returns the directory or file of `spec`, downloading a model of the hub; raises NotFound."""
    if spec.startswith(hub.PREFIX):
        return hub.fetch(spec)
    path = Path(spec)
    refuse_unfinished(path)
    if not path.exists():
        remedy = (
            "give starter, a directory of `mlcd export` or in Hugging Face's layout, "
            "or a file of weights"
        )
        if hub.looks_like_hub_name(spec):
            remedy = f"for Hugging Face's hub write {hub.PREFIX}{spec}"
        raise NotFound(f"the model {spec} does not exist", remedy=remedy)
    return path


def check_is_whole_model(spec: str) -> None:
    """Raises ArtifactInvalid for a folder inside a model, a checkpoint or a run, because it lacks
    the files beside it.
    """
    path = Path(spec)
    if path.is_dir() and not (path / MANIFEST).is_file() and near(path, *_KINDS) == path.parent:
        raise ArtifactInvalid(
            f"{path} must be a whole model, got a folder inside one",
            remedy=f"did you mean {path.parent}?",
        )


def source_files(spec: str) -> list[Path]:
    """Returns the files that identify the model `spec`, in a fixed order; raises ArtifactInvalid
    if there are none.
    """
    path = locate(spec)
    if path.is_file():
        beside = [path.with_name(name) for name in (HF_CONFIG, OPEN_CLIP_CONFIG, *HF_PREPROCESSING)]
        return list(
            dict.fromkeys([path, *weight_files(path), *(name for name in beside if name.is_file())])
        )
    configs = [name for name in path.glob("*.json") if name.is_file()]
    return sorted({*configs, *weight_files(weights_in(path))})


def weights_in(folder: Path) -> Path:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    model = near(folder, *_KINDS)
    remedy = f"it needs one of {', '.join(_WEIGHTS)}" if model is None else f"did you mean {model}?"
    raise ArtifactInvalid(f"{folder} must hold weights, found none", remedy=remedy)


def weight_files(path: Path) -> list[Path]:
    """Returns the shards of an index, or the file itself.

    Raises ArtifactInvalid naming the file that is missing or a pointer of Git LFS.
    """
    names = sorted(set((read_index(path) or {}).values()))
    files = [path.with_name(name) for name in names] or [path]
    for file in files:
        _check_file(file, None if file == path else path.name)
    return files


def read_index(path: Path) -> dict[str, str] | None:
    """Returns the name of each tensor's shard from an index; None for other files.

    Raises ArtifactInvalid if the index is damaged.
    """
    if not path.name.endswith(".index.json"):
        return None
    _check_file(path, None)
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read as an index of weights", remedy="restore the file"
        ) from error
    for tensor, name in index.items():
        if not isinstance(name, str) or name in ("", ".", "..") or _SEPARATORS.search(name):
            raise ArtifactInvalid(
                f"{path} must place {tensor} in a file beside it, got {name!r}",
                remedy="restore the file",
            )
    if not index:
        raise ArtifactInvalid(f"{path} must list at least one tensor", remedy="restore the file")
    return index


def _check_file(path: Path, index: str | None) -> None:
    """Raises ArtifactInvalid if weights are missing, a directory or a pointer of Git LFS."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS))
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else "it cannot be read"
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"is unusable: {reason}"
        listing = f", which {index} names" if index else ""
        raise ArtifactInvalid(
            f"{path}{listing}, {problem}" if listing else f"{path} {problem}",
            remedy="restore the file, or download the model again",
        ) from error
    if start == _LFS:
        raise ArtifactInvalid(
            f"{path} is a Git LFS pointer, not the weights",
            remedy="run `git lfs pull` in its repository, or download the file itself",
        )


def digest_of_weights(spec: str) -> str:
    """Returns the SHA-256 of names and bytes of the source files; their folder does not count."""
    sha256 = hashlib.sha256()
    for path in source_files(spec):
        sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            sha256.update(hashlib.file_digest(file, "sha256").digest())
    return sha256.hexdigest()
