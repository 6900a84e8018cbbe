"""The checkpoints of a run: `checkpoints/step_000100/`, each an artifact that is complete by
itself.

state/    all that training needs to go on; torch.distributed.checkpoint, one file a process
weights/  model.safetensors, config.json, preprocess.json: input of export and evaluation
centers/  the head's unit centers as a Centers artifact in the trained space, if it has any
text/     of a training on pairs: the text tower and its tokenizer

When all processes have written their part, the first makes the rest from it and publishes by one
rename.
"""

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from mlcd.artifacts.disk import refuse_full_disk
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid, Unavailable
from mlcd.models.runs import checkpoint_name, checkpoint_steps
from mlcd.training.checkpoint.checkpoint_config import CheckpointConfig
from mlcd.training.checkpoint.files import STATE, write_tensors
from mlcd.training.processes import Processes
from mlcd.types import Fingerprint

# Layouts 1 and 2 had files of our own instead of torch.distributed.checkpoint's.
LAYOUT: Final = 3
_POLL_S: Final = 0.02
_CLOSE_S: Final = 30.0


class Copied(Protocol):
    """A copy of a training's state in the host's memory; see `mlcd.training.head.snapshot`."""

    @property
    def step(self) -> int: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...


_Copy = TypeVar("_Copy", bound=Copied)


class Contents(Protocol[_Copy]):
    """The part of a checkpoint that depends on the kind of training."""

    def copy(self, state: Any) -> _Copy:
        """Copies the state, so that training cannot change the copy; every process calls it."""
        ...

    def restore(self, state: Any, directory: Path, step: int, group: Any) -> None:
        """Restores the state from the files of `write_tensors`, bit for bit; every process calls
        it.
        """
        ...

    def write(self, copy: _Copy, directory: Path) -> Fingerprint:
        """Writes the models into `directory`, which holds the files of `write_tensors` in `state/`;
        returns the identity of the image tower.
        """
        ...


class CheckpointStore:
    """Saves, finds, loads and retires the checkpoints of one run directory.

    One checkpoint is written at a time.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        processes: Processes,
        *,
        parents: tuple[Parent, ...],
        contents: Contents[Any],
    ) -> None:
        self._folder = run / "checkpoints"
        self._config, self._processes, self._parents = config, processes, parents
        self._contents = contents
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def is_due(self, step: int) -> bool:
        return step % self._config.every_steps == 0

    def latest(self) -> int | None:
        return max(checkpoint_steps(self._folder), default=None)

    @property
    def failed(self) -> bool:
        """Tells if this process could not write its part of the last checkpoint; `join` raises the
        reason.
        """
        return self._error is not None

    def save(self, state: Any, out: Path | None = None) -> None:
        """Copies `state` and writes the copy while training goes on; every process calls it.

        out: a path outside of the run's checkpoints, ignored by resuming and retiring; an existing
        one is replaced. It waits for the save before and raises that one's error.
        """
        self.join()
        copy = self._contents.copy(state)
        path = out or self._folder / checkpoint_name(state.step)
        self._processes.meet(f"the checkpoint of step {state.step}")
        with ExitStack() as stack:
            request = Request("checkpoint", {"step": state.step, "layout": LAYOUT}, self._parents)
            draft = Draft(path, request, fresh=True)
            # Nobody writes before the leftovers of an earlier attempt are gone.
            with self._processes.failing_together():
                if self._processes.world.rank == 0:
                    if out is not None and out.exists():
                        shutil.rmtree(out)
                    stack.enter_context(draft)
            cleanup = stack.pop_all()
        self._writer = threading.Thread(
            target=self._write,
            args=(copy, draft, cleanup),
            name=f"checkpoint-{state.step}",
            daemon=True,
        )
        self._writer.start()
        if not self._config.asynchronous:
            self.join()

    def join(self) -> None:
        """Waits until the current save is done on every process. Raises Unavailable if the disk is
        full.
        """
        if self._writer is None:
            return
        world = self._processes.world
        while True:
            running = self._writer.is_alive()
            any_failed, any_running = world.max(
                torch.tensor([int(self.failed), int(running)])
            ).tolist()
            if any_failed or not any_running:
                break
            self._writer.join(_POLL_S)
        error = self._error
        self.close()
        with self._processes.failing_together():
            if error is not None:
                raise error

    def close(self) -> None:
        """Lets the current save finish, or abandons it if it waits for a lost process; raises
        nothing.
        """
        if self._writer is not None:
            self._writer.join(_CLOSE_S)
        self._writer, self._error = None, None

    def load(self, state: Any, step: int) -> None:
        """Restores `state` from checkpoint `step`, bit for bit; every process calls it.

        Raises ArtifactInvalid if it is damaged or of a newer layout.
        """
        path = self._folder / checkpoint_name(step)
        with self._processes.failing_together():
            open_checkpoint(path, verify_files=self._processes.world.rank == 0)
        with self._processes.failing_together():
            self._contents.restore(state, path / STATE, step, self._processes.saving)

    def tidy(self, newest: int) -> None:
        """Deletes what the newest checkpoint made superfluous, where its process was killed before
        it had.
        """
        with self._processes.failing_together():
            if self._processes.world.rank == 0:
                self._retire(newest)

    def _write(self, copy: Copied, draft: Draft, cleanup: ExitStack) -> None:
        try:
            with cleanup:
                self._write_part(copy, draft)
        except Exception as error:  # noqa: BLE001 - it is raised where the trainer asks
            try:
                refuse_full_disk(error, draft.out)
            except Unavailable as refusal:
                self._error = refusal
            else:
                self._error = error

    def _write_part(self, copy: Copied, draft: Draft) -> None:
        write_tensors(copy.tensors, draft.path / STATE, self._processes.saving)
        if self._processes.world.rank:
            return
        draft.publish(fingerprint=self._contents.write(copy, draft.path))
        if draft.out.parent == self._folder:
            self._retire(copy.step)

    def _retire(self, newest: int) -> None:
        """Keeps step 0, the newest, the last regular ones and those of keep_every.

        A checkpoint of an interruption is deleted with the next one, like the leftovers of a crash.
        """
        steps = checkpoint_steps(self._folder)
        regular = [step for step in steps if self.is_due(step)]
        remaining = {0, newest, *regular[-self._config.keep_last :]}
        if self._config.keep_every is not None:
            remaining |= {step for step in regular if step % self._config.keep_every == 0}
        names = {checkpoint_name(step) for step in remaining}
        for path in self._folder.glob("step_*"):
            if path.name not in names:
                # Without its manifest it is no checkpoint any more, even if the deletion is
                # interrupted.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)


def open_checkpoint(path: Path, *, verify_files: bool = True) -> Artifact:
    """Opens the checkpoint at `path`. Raises ArtifactInvalid if damaged or of another layout."""
    artifact = open_artifact(path, "checkpoint", verify_files=verify_files)
    layout = artifact.config.get("layout", 1)
    if layout != LAYOUT:
        newer = layout > LAYOUT
        raise ArtifactInvalid(
            f"{path} is a checkpoint of layout {layout}, this version reads layout {LAYOUT}",
            remedy="upgrade mlcd to go on from it"
            if newer
            else "go on with the version that wrote it",
        )
    return artifact
