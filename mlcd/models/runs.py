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
    numbers = [
        path.name.removeprefix("step_")
        for path in folder.glob("step_*")
        if (path / MANIFEST).is_file()
    ]
    # A crash between manifest and rename leaves `step_000100.partial`, which is no checkpoint.
    return sorted(int(number) for number in numbers if number.isdecimal())


def holds_checkpoints(path: Path) -> bool:
    """Tells whether `path` is a run or one of its checkpoints."""
    return (path / "weights").is_dir() or (path / "checkpoints").is_dir()


def refuse_unfinished(path: Path) -> None:
    """Raises NotFound where a run that will be at `path` has not finished, and names the draft
    beside it.
    """
    saved = draft_path(path)
    if not path.exists() and holds_checkpoints(saved):
        raise NotFound(
            f"{path} has not finished training",
            remedy=f"go on with it, or give what it has saved: {saved}",
        )


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at `path`, or the newest of the run at `path`; raises
    ArtifactInvalid.
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
    """Returns the images that a checkpoint was trained on, where they are still there."""
    paths = (
        parent_path(checkpoint, parent) for parent in checkpoint.parents if parent.role == "images"
    )
    return next((path for path in paths if path is not None), None)


def parent_path(child: Artifact, parent: Parent) -> str | None:
    """Returns the path or URL of what an artifact was made from; None where it no longer exists.

    Paths are relative to the artifact; those of a checkpoint, which is at RUN/checkpoints/step_N,
    to the run.
    """
    if is_url(parent.path):
        return parent.path
    base = child.path.resolve()
    location = Path(
        os.path.normpath((base.parents[1] if child.kind == "checkpoint" else base) / parent.path)
    )
    # any part may have wildcards
    if location.exists() or next(glob.iglob(str(location), recursive=True), None):  # noqa: PTH207
        return str(location)
    return None
