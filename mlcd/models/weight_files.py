"""The location of weights: a file, a directory of Hugging Face or open_clip, or the hub.

This module finds and identifies weights and loads nothing.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

from mlcd.artifacts.manifest import MANIFEST, near
from mlcd.errors import ArtifactInvalid, NotFound
from mlcd.models import hub
from mlcd.models.runs import refuse_unfinished

HF_CONFIG: Final = "config.json"
OPEN_CLIP_CONFIG: Final = "open_clip_config.json"
HF_PREPROCESSING: Final = ("preprocessor_config.json", "processor_config.json")
_KINDS: Final = ("model", "checkpoint", "run")
_WEIGHTS: Final = (
    "model.safetensors", "model.safetensors.index.json", "open_clip_model.safetensors",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "open_clip_pytorch_model.bin",
)  # fmt: skip


def locate(spec: str) -> Path:
    """Returns the directory or file that `spec` names, fetched where it is on the hub; raises
    NotFound.
    """
    if spec.startswith(hub.PREFIX):
        return hub.fetch(spec)
    path = Path(spec)
    refuse_unfinished(path)
    if not path.exists():
        remedy = (
            "give a directory made by `mlcd export` or of Hugging Face's layout, "
            "or a file of weights"
        )
        if hub.looks_like_hub_name(spec):
            remedy = f"for Hugging Face's hub write {hub.PREFIX}{spec}"
        raise NotFound(f"there is no model {spec}", remedy=remedy)
    return path


def refuse_part(spec: str) -> None:
    """Raises ArtifactInvalid for a folder inside a model, a checkpoint or a run.

    Such a folder alone lacks what is beside it.
    """
    path = Path(spec)
    if path.is_dir() and not (path / MANIFEST).is_file() and near(path, *_KINDS) == path.parent:
        raise ArtifactInvalid(f"{path} is a part of a model", remedy=f"did you mean {path.parent}?")


def source_files(spec: str) -> list[Path]:
    """Returns the files that decide which model `spec` is, in a fixed order; raises ArtifactInvalid
    where there are none.
    """
    path = locate(spec)
    if path.is_file():
        beside = [path.with_name(name) for name in (HF_CONFIG, OPEN_CLIP_CONFIG, *HF_PREPROCESSING)]
        return [path, *(name for name in beside if name.is_file())]
    configs = [name for name in path.glob("*.json") if name.is_file()]
    return sorted({*configs, *weight_files(weights_in(path))})


def weights_in(folder: Path) -> Path:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    meant = near(folder, *_KINDS)
    remedy = f"it needs one of {', '.join(_WEIGHTS)}" if meant is None else f"did you mean {meant}?"
    raise ArtifactInvalid(f"{folder} holds no weights", remedy=remedy)


def weight_files(path: Path) -> list[Path]:
    """Returns the shards of an index, or the file itself."""
    if not path.name.endswith(".index.json"):
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactInvalid(
            f"{path} is no index of weights", remedy="restore the file"
        ) from error
    if any("/" in name for name in names):
        raise ArtifactInvalid(f"{path} names files elsewhere", remedy="restore the file")
    return [path.with_name(name) for name in names]


def digest_of_weights(spec: str) -> str:
    """Returns the SHA-256 over names and bytes of the source files; it does not depend on where
    they are.
    """
    sha256 = hashlib.sha256()
    for path in source_files(spec):
        sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            sha256.update(hashlib.file_digest(file, "sha256").digest())
    return sha256.hexdigest()
