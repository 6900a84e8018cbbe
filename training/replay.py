"""Replays a saved batch on the state before its step, to find what first was not finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlcd.artifacts.centers import Centers
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS, Servable
from mlcd.training.bad_batch import FOLDER, bad_state_path, read_bad_batch
from mlcd.training.head.snapshot import load_checkpoint
from mlcd.training.head.state import TrainState
from mlcd.training.optim.clip import clip_global_norm
from mlcd.training.processes import open_processes
from mlcd.training.run.run_files import read_run_config, run_directory
from mlcd.training.run.run_training import initial_state
from mlcd.training.step import backward
from mlcd.training.tower import initial_model


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    not_finite: names of weights that are not finite. first_output: name of the first module with
    an output that is not finite. first_gradient: name of the first parameter, in the order of the
    backward pass, with such a gradient. Both are None if all are finite.
    """

    step: int
    loss: float
    grad_norm: float
    center_grad_norm: float
    not_finite: list[str]
    first_output: str | None
    first_gradient: str | None

    def facts(self) -> dict[str, Any]:
        """Returns the result as JSON fields; numbers that are not finite become strings."""
        fields = asdict(self)
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }

    def __str__(self) -> str:
        norms = (
            f"gradient norms {self.grad_norm:.6g} (backbone) and {self.center_grad_norm:.6g} "
            "(centers)"
        )
        lines = [
            f"step {self.step}: loss {self.loss:.6g}, {norms}",
            f"weights that are not finite: {', '.join(self.not_finite) or 'none'}",
            f"first output that is not finite: {self.first_output or 'none'}",
            f"first gradient that is not finite: {self.first_gradient or 'none'}",
        ]
        return "\n".join(lines)


def replay(run: Path, batch: Path) -> Replay:
    """Runs the batch at `batch` (RUN/bad_batches/step_N-rank0) forward and backward on this
    process.

    The run is not changed. Raises ArtifactInvalid if batch or state cannot be read.
    """
    config = read_run_config(run)
    directory = run_directory(run)
    step, parts = read_bad_batch(batch if batch.is_dir() else directory / FOLDER / batch.name)
    state_path = bad_state_path(directory, step)
    num_classes = len(Centers.open(state_path / "centers").sizes)
    with open_processes(config.device, config.num_threads) as processes:
        # Weights that are not finite cannot be opened as a model; load_checkpoint reads them.
        preprocess = PreprocessSpec.read(state_path / "weights" / PREPROCESS)
        model = Servable(initial_model(config.model, config.seed).trunk, preprocess)
        state = initial_state(config, num_classes, processes, model)
        load_checkpoint(state, state_path)
        counts = [len(part.labels) for part in parts]
        shares = [count / max(1, sum(counts)) for count in counts]
        with _watch_outputs(state) as outputs:
            loss, _ = backward(state, parts, shares, config)
        first_gradient = next(
            (
                name
                for name, parameter in _iter_backward_order(state)
                if not _is_finite(parameter.grad)
            ),
            None,
        )
        norms = clip_global_norm(state.replicated, state.sharded, float("inf"), processes.world)
    return Replay(
        step=step,
        loss=loss.item(),
        grad_norm=norms[0].item(),
        center_grad_norm=norms[1].item(),
        not_finite=[
            name
            for name, parameter in reversed(list(_iter_backward_order(state)))
            if not _is_finite(parameter)
        ],
        first_output=outputs[0] if outputs else None,
        first_gradient=first_gradient,
    )


@contextmanager
def _watch_outputs(state: TrainState) -> Iterator[list[str]]:
    """Yields a list that collects the names of modules with an output that is not finite, in the
    order of the forward pass.
    """
    names: list[str] = []

    def watch(module: nn.Module, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            # The head's output is not a tensor but the loss with its meters.
            if not _is_finite(output if torch.is_tensor(output) else output.loss):
                names.append(name)

        return module.register_forward_hook(look)

    modules = [
        (f"trunk.{name}".rstrip("."), module) for name, module in state.model.trunk.named_modules()
    ]
    handles = [
        watch(module, name)
        for name, module in (*modules, ("centers", state.head))
        if not _is_list(module)
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def _iter_backward_order(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters in the order in which the backward pass reaches them."""
    yield "centers.weight", state.head.weight
    for name, parameter in reversed(list(state.model.trunk.named_parameters())):
        yield f"trunk.{name}", parameter


def _is_finite(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return bool(torch.isfinite(values).all())
