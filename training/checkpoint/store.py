"""Checkpoints of a run: `checkpoints/step_000100/`, each an artifact that stands alone.

weights/           model.safetensors, config.json, preprocess.json: what export and evaluation read
centers/           the head's unit centers as a Centers artifact in the trained space
state.safetensors  raw centers and the optimizer's moments: what resume reads besides
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from mlcd.artifact import Draft, Parent, Request, open_artifact
from mlcd.clustering.centers import Centers
from mlcd.models.runs import checkpoint_name, checkpoint_steps
from mlcd.models.servable import Servable
from training.state import TrainState


class CheckpointStore:
    """Saves, finds, loads and retires the checkpoints of one run directory."""

    def __init__(
        self,
        run: Path,
        *,
        every_steps: int,
        keep_last: int,
        names: Sequence[str | None] | None,
        sizes: NDArray[np.int64],
    ) -> None:
        self._folder = run / "checkpoints"
        self._every_steps, self._keep_last = every_steps, keep_last
        self._names, self._sizes = names, sizes

    def is_due(self, step: int) -> bool:
        return step % self._every_steps == 0

    def latest(self) -> int | None:
        return max(checkpoint_steps(self._folder), default=None)

    def save(self, state: TrainState, parents: tuple[Parent, ...]) -> Path:
        """Atomic: the checkpoint is there complete, or not at all."""
        out = self._folder / checkpoint_name(state.step)
        if out.exists():
            return out
        fingerprint = state.model.fingerprint()
        request = Request("checkpoint", {"step": state.step}, parents, fingerprint)
        with Draft(out, request, fresh=True) as draft:
            weights = draft.path / "weights"
            weights.mkdir(exist_ok=True)
            state.model.write(weights)
            self._save_centers(state, draft.path / "centers", fingerprint)
            with draft.write("state.safetensors") as path:
                save_file(_tensors(state), path)
            draft.publish()
        self._retire(state.step)
        return out

    def load(self, state: TrainState, step: int) -> None:
        """Put checkpoint `step` into `state`, bit for bit."""
        path = self._folder / checkpoint_name(step)
        open_artifact(path, "checkpoint")
        trained = Servable.read(path / "weights")
        state.model.trunk.load_state_dict(trained.trunk.state_dict())
        tensors = load_file(path / "state.safetensors")
        with torch.no_grad():
            state.centers.weight.copy_(tensors["centers.weight"])
        for name, (parameter, optimizer) in state.optimized().items():
            moments = {
                key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")
            }
            if moments:
                # AdamW keeps its step counter on the CPU.
                optimizer.state[parameter] = {
                    kind: moment if kind == "step" else moment.to(parameter.device) for kind, moment in moments.items()
                }
        state.step = step

    def _save_centers(self, state: TrainState, out: Path, fingerprint: str) -> None:
        request = Request("centers", {"origin": "training", "step": state.step}, (), fingerprint)
        with Draft(out, request, fresh=True) as draft:
            vectors = state.centers.unit_centers().cpu().numpy()
            names = None if self._names is None else tuple(self._names)
            Centers(vectors=vectors, sizes=self._sizes, fingerprint=fingerprint, names=names).write(draft)
            draft.publish()

    def _retire(self, newest: int) -> None:
        """Keep step 0, the newest, and the last regular ones; a checkpoint of an interruption goes with the next."""
        regular = sorted(step for step in checkpoint_steps(self._folder) if step % self._every_steps == 0)
        kept = {0, newest, *regular[-self._keep_last :]}
        for step in checkpoint_steps(self._folder):
            if step not in kept:
                shutil.rmtree(self._folder / checkpoint_name(step))


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    tensors = {"centers.weight": state.centers.weight.detach().cpu().contiguous()}
    for name, (parameter, optimizer) in state.optimized().items():
        for kind, moment in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{kind}"] = moment.detach().cpu().contiguous()
    return tensors
