"""Batches with a loss or gradient that was not finite, saved in a run's `bad_batches/`.

step_000007-rank0/  one process's part of the batch
  batch.safetensors   for each micro-batch i: images.i uint8, labels.i, positions.i, weights.i if
                      the labels have weights, and views.1.i, views.2.i, … if there are more views;
                      with captions ids.i instead of labels.i
  batch.json          step, keys, loss and gradient norms
step_000007-state/  a checkpoint of the state before that step
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlcd.artifacts.disk import replacing, sync_path
from mlcd.errors import ArtifactInvalid
from mlcd.models.runs import checkpoint_name
from mlcd.training.data.loader import StepBatches
from mlcd.training.telemetry.step_meters import StepMeters

FOLDER: Final = "bad_batches"
_BATCH, _FACTS = "batch.safetensors", "batch.json"
_NAME: Final = re.compile(r"step_(\d+)-(rank\d+|state)")


@dataclass(frozen=True)
class BadPart:
    """A micro-batch of all processes; see `mlcd.training.data.loader.Batch`."""

    images: Tensor
    labels: Tensor
    positions: NDArray[np.int64]
    weights: Tensor | None
    more_views: tuple[Tensor, ...]


def bad_batch_path(run: Path, step: int, rank: int) -> Path:
    return run / FOLDER / f"{checkpoint_name(step)}-rank{rank}"


def bad_state_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"{checkpoint_name(step)}-state"


def clear_bad_batch(run: Path, step: int) -> None:
    """Removes the parts of this step that an earlier attempt, maybe on more processes, saved."""
    # The leading * also matches drafts, whose names start with a dot.
    for leftover in (run / FOLDER).glob(f"*{checkpoint_name(step)}-rank*"):
        shutil.rmtree(leftover, ignore_errors=True)


def keep_bad_batch(path: Path, batch: StepBatches[Any], meters: StepMeters) -> None:
    """Writes this process's part of the batch atomically."""
    shutil.rmtree(path, ignore_errors=True)
    tensors: dict[str, Tensor] = {}
    for index, part in enumerate(batch.parts):
        tensors |= {f"{name}.{index}": tensor for name, tensor in part.tensors().items()}
    # The norms are strings because JSON has no NaN.
    facts = {"step": batch.step, "keys": [part.keys for part in batch.parts]}
    facts |= {name: str(value.item()) for name, value in meters.norms.items()}
    with replacing(path) as draft:
        draft.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft / _BATCH)
        (draft / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for name in (_BATCH, _FACTS):
            sync_path(draft / name)


def read_bad_batch(path: Path) -> tuple[int, list[BadPart]]:
    """Returns the step and its micro-batches, joined from the parts of all processes.

    path: one of the parts; the others are its siblings.

    Raises ArtifactInvalid.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise ArtifactInvalid(
            f"{path} is not a saved batch", remedy="give RUN/bad_batches/step_N-rank0"
        )
    folders = sorted(
        path.parent.glob(f"step_{match[1]}-rank*"),
        key=lambda folder: int(folder.name.split("rank")[1]),
    )
    try:
        stored = [load_file(folder / _BATCH) for folder in folders]
        if any(key.startswith("aspects.") for key in stored[0]):
            raise ArtifactInvalid(
                f"{path} must contain crops, but contains whole pictures",
                remedy="replay it with the version of mlcd that saved it",
            )
        step = int(json.loads((folders[0] / _FACTS).read_text())["step"])
        num_parts = sum(key.startswith("images.") for key in stored[0])
        return step, [_join_part(stored, index) for index in range(num_parts)]
    except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read", remedy="give RUN/bad_batches/step_N-rank0"
        ) from error


def _join_part(stored: Sequence[dict[str, Tensor]], index: int) -> BadPart:
    def join(name: str) -> Tensor:
        return torch.cat([tensors[name] for tensors in stored])

    num_views = sum(name.startswith("views.") and name.endswith(f".{index}") for name in stored[0])
    return BadPart(
        images=join(f"images.{index}"),
        labels=join(f"labels.{index}"),
        positions=join(f"positions.{index}").numpy(),
        weights=join(f"weights.{index}") if f"weights.{index}" in stored[0] else None,
        more_views=tuple(join(f"views.{view}.{index}") for view in range(1, num_views + 1)),
    )
