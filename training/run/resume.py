"""The settings with which a run goes on: those that it began with, but for a few."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mlcd.artifacts.draft import change_begun
from mlcd.artifacts.manifest import MANIFEST, draft_path, final_path
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.models.runs import checkpoint_steps
from mlcd.training.config import ARITHMETIC, RunConfig
from mlcd.training.pairs.pairs_config import PairsConfig, change_config
from mlcd.training.run.changed_settings import (
    describe_changes,
    find_changes,
    read_identity,
    with_changes,
)
from mlcd.training.run.run_files import CHECKPOINTS, read_run_fields, write_config
from mlcd.world import is_first

# The samples of a step and their order stay the same, and so does the learning rate of each step,
# but for another schedule.steps: from the resumed step on it is that of the new total.
_MAY_CHANGE: Final = ("compute.accumulation", "checkpoint.every_steps", "schedule.steps")


def resume_config(run: Path, overrides: Sequence[str]) -> RunConfig | PairsConfig:
    """Returns the configuration with which the run goes on, and notes its changes with the run.

    Raises Conflict naming each setting that may not change.
    """
    out = final_path(run)
    config = change_config(read_run_fields(out), overrides).model_copy(update={"out": str(out)})
    settings = config.identity()
    begun = read_identity(out)
    if begun is None or begun["config"].get("arithmetic") != ARITHMETIC:
        return config  # which `run_training` refuses, if that is to be
    changes = find_changes(begun["config"], settings)
    if fixed := {name: pair for name, pair in changes.items() if name not in _MAY_CHANGE}:
        raise Conflict(
            f"{out} was begun with other settings: {describe_changes(fixed)}",
            remedy="leave them out or give another output directory; on resume"
            f" {', '.join(_MAY_CHANGE)} and optim.max_skips may change",
        )
    if changes and (out / MANIFEST).is_file():
        raise Conflict(
            f"{out} is finished, with other settings: {describe_changes(changes)}",
            remedy=f"start another run from it: model.start={out}",
        )
    if "schedule.steps" in changes:
        _check_steps(out, config.schedule.steps)
    if changes and is_first():
        # First what is refused while a process works on the run. After a crash between the two,
        # the next --resume changes the draft back.
        change_begun(out, with_changes(begun["config"], settings))
        write_config(config, draft_path(out))
    return config


def _check_steps(out: Path, num_steps: int) -> None:
    latest = max(checkpoint_steps(draft_path(out) / CHECKPOINTS), default=0)
    if num_steps < latest:
        raise ConfigInvalid(
            f"schedule.steps={num_steps}, but {out} has reached step {latest}",
            remedy=f"give at least {latest}",
        )
