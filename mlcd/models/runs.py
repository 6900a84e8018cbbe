"""The checkpoints of a run: `RUN/checkpoints/step_000100/`, each with `weights/` and `centers/`."""

import glob
import os
from pathlib import Path

from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, draft_path
from mlcd.errors import ArtifactInvalid, NotFound
from mlcd.locations import is_url


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of the finished checkpoints in `folder`, ascending."""
    suffixes = [
        path.name.removeprefix("step_")
        for path in folder.glob("step_*")
        if (path / MANIFEST).is_file()
    ]
    # A crash between manifest and rename leaves the unfinished `step_000100.partial`.
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())


def holds_checkpoints(path: Path) -> bool:
    """Tells whether `path` is a run or one of its checkpoints."""
    return (path / "weights").is_dir() or (path / "checkpoints").is_dir()


def refuse_unfinished(path: Path) -> None:
    """Raises NotFound, naming the run's draft, if the run at `path` has not finished training."""
    draft = draft_path(path)
    if not path.exists() and holds_checkpoints(draft):
        raise NotFound(
            f"{path} has not finished training",
            remedy=f"continue the training, or give its saved checkpoints: {draft}",
        )


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at `path`, or the newest checkpoint of the run at `path`.

    Raises NotFound if nothing is there, and ArtifactInvalid if the run lacks a checkpoint.
    """
    refuse_unfinished(path)
    if not path.is_dir():
        raise NotFound(
            f"{path} does not exist", remedy="give a run or one of its checkpoints/step_N"
        )
    if (path / "weights").is_dir():
        return path
    steps = checkpoint_steps(path / "checkpoints")
    if not steps:
        raise ArtifactInvalid(
            f"{path} must hold a checkpoint, found none",
            remedy="give a run or one of its checkpoints/step_N",
        )
    return path / "checkpoints" / checkpoint_name(steps[-1])


def find_training_images(checkpoint: Artifact) -> str | None:
    """Returns the path or URL of a checkpoint's training images, None if they no longer exist."""
    paths = (
        parent_path(checkpoint, parent) for parent in checkpoint.parents if parent.role == "images"
    )
    return next((path for path in paths if path is not None), None)


def parent_path(child: Artifact, parent: Parent) -> str | None:
    """Returns the path or URL of a parent of an artifact, None if it no longer exists.

    A parent's path is relative to the artifact; for a checkpoint (RUN/checkpoints/step_N), to RUN.
    """
    if is_url(parent.path):
        return parent.path
    base = child.path.resolve()
    location = Path(
        os.path.normpath((base.parents[1] if child.kind == "checkpoint" else base) / parent.path)
    )
    # any part of the path may have wildcards
    if location.exists() or next(glob.iglob(str(location), recursive=True), None):  # noqa: PTH207
        return str(location)
    return None
