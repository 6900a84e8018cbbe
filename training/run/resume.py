"""The settings of a resumed run: those it was started with, except a few that may change."""

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
    merge_changes,
    read_identity,
)
from mlcd.training.run.run_files import CHECKPOINTS, read_run_fields, write_config
from mlcd.world import is_first

# These settings change neither the samples of a step nor their order. Only schedule.steps changes
# the learning rate: from the resumed step on, it follows the schedule of the new total.
_MAY_CHANGE: Final = ("compute.accumulation", "checkpoint.every_steps", "schedule.steps")


def resume_config(run: Path, overrides: Sequence[str]) -> RunConfig | PairsConfig:
    """Returns the configuration of the resumed run, and records its changes in the run's draft.

    Raises Conflict naming each setting that must not change.
    """
    out = final_path(run)
    config = change_config(read_run_fields(out), overrides).model_copy(update={"out": str(out)})
    settings = config.identity()
    stored = read_identity(out)
    if stored is None or stored["config"].get("arithmetic") != ARITHMETIC:
        return config  # run_training raises for a run of another version
    changes = find_changes(stored["config"], settings)
    if refused := {name: pair for name, pair in changes.items() if name not in _MAY_CHANGE}:
        raise Conflict(
            f"{out} was started with other settings: {describe_changes(refused)}",
            remedy="leave them out or give another output directory; on resume"
            f" {', '.join(_MAY_CHANGE)} and optim.max_skips may change",
        )
    if changes and (out / MANIFEST).is_file():
        raise Conflict(
            f"{out} is finished and cannot be resumed with other settings: "
            f"{describe_changes(changes)}",
            remedy=f"start another run from it: model.start={out}",
        )
    if "schedule.steps" in changes:
        _check_steps(out, config.schedule.steps)
    if changes and is_first():
        # change_begun comes first, because it raises if a process works on the run. After a crash
        # between the two calls, the next --resume reverts the draft.
        change_begun(out, merge_changes(stored["config"], settings))
        write_config(config, draft_path(out))
    return config


def _check_steps(out: Path, num_steps: int) -> None:
    latest = max(checkpoint_steps(draft_path(out) / CHECKPOINTS), default=0)
    if num_steps < latest:
        raise ConfigInvalid(
            f"schedule.steps must be at least step {latest}, which {out} has reached, got"
            f" {num_steps}",
            remedy=f"give at least {latest}",
        )
