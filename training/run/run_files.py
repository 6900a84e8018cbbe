"""The files of a run besides its checkpoints: its config, logs, and the final summary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mlcd.artifacts.disk import write_synced
from mlcd.artifacts.manifest import draft_path
from mlcd.errors import ConfigInvalid
from mlcd.training.config import RunConfig, TrainingConfig, validate_config
from mlcd.training.loop import TrainingProgress
from mlcd.training.telemetry.step_logs import read_losses

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


def write_config(config: TrainingConfig, run: Path) -> None:
    """Writes the run's config.yaml atomically."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_synced(run / CONFIG, text.encode())


def read_run_config(run: Path) -> RunConfig:
    """Reads the config of a run with labels, finished or interrupted."""
    return validate_config(read_run_fields(run))


def read_run_fields(run: Path) -> dict[str, Any]:
    """Returns the fields of the config of any run, finished or interrupted.

    Raises ConfigInvalid.
    """
    path = run_directory(run) / CONFIG
    try:
        fields = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigInvalid(
            f"{path} cannot be read",
            remedy="run the command that started the run again, with its recipe",
        )
    return fields


def run_directory(run: Path) -> Path:
    """Returns the directory of a run, finished or interrupted. Raises ConfigInvalid."""
    for directory in (run, draft_path(run)):
        if (directory / CONFIG).is_file():
            return directory
    raise ConfigInvalid(f"{run} is not a run", remedy="give the directory out=RUN of `mlcd train`")


def summarize_outcome(run: Path, state: TrainingProgress) -> dict[str, Any]:
    """Returns the summary of any run for its manifest: skipped samples and steps, last metrics."""
    logged = read_losses(run)
    return {
        "skipped_samples": state.skipped_samples,
        "skipped_steps": state.skipped_steps,
        "final": logged[-1] if logged else {"step": state.step, "loss": None},
    }


def log_paths(run: Path) -> tuple[str, ...]:
    """Returns the paths of all files except the checkpoints.

    They record how the run was made, and are not part of its result.
    """
    names: Sequence[str] = [
        path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()
    ]
    return tuple(sorted(name for name in names if not name.startswith(f"{CHECKPOINTS}/")))
