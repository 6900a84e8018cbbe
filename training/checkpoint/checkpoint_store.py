"""The checkpoints of a run: `checkpoints/step_000100/`, each a self-contained artifact.

state/    all that resuming needs, by torch.distributed.checkpoint: one file per process
weights/  model.safetensors, config.json, preprocess.json: input of export and evaluation
centers/  the head's unit centers as a Centers artifact in the trained space, if it has any
text/     the text tower and its tokenizer, if the run trains on pairs

When all processes have written their part of state/, process 0 derives the other directories from
it and publishes the checkpoint by one rename.
"""

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from mlcd.artifacts.disk import raise_if_disk_full
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid, Unavailable
from mlcd.models.runs import checkpoint_name, checkpoint_steps
from mlcd.training.checkpoint.checkpoint_config import CheckpointConfig
from mlcd.training.checkpoint.files import STATE, write_tensors
from mlcd.training.processes import Processes
from mlcd.types import Fingerprint

# Layouts 1 and 2 had their own file format instead of torch.distributed.checkpoint's.
LAYOUT: Final = 3
_POLL_S: Final = 0.02
_CLOSE_S: Final = 30.0


class StateCopy(Protocol):
    """A copy of a training's state in the host's memory; see `mlcd.training.head.snapshot`."""

    @property
    def step(self) -> int: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...


_Copy = TypeVar("_Copy", bound=StateCopy)


class Contents(Protocol[_Copy]):
    """The part of a checkpoint that depends on the kind of training."""

    def copy(self, state: Any) -> _Copy:
        """Copies the state, so that training cannot change the copy; every process calls it."""
        ...

    def restore(self, state: Any, directory: Path, step: int, group: Any) -> None:
        """Restores the state bit for bit from files of `write_tensors`; every process calls it."""
        ...

    def write(self, copy: _Copy, directory: Path) -> Fingerprint:
        """Writes the models into `directory`, whose `state/` has the files of `write_tensors`.

        Returns the identity of the image tower.
        """
        ...


class CheckpointStore:
    """Saves, finds, loads and deletes the checkpoints of one run, writing one at a time."""

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
        """True if this process failed to write its part of the last checkpoint; `join` raises the
        error.
        """
        return self._error is not None

    def save(self, state: Any, out: Path | None = None) -> None:
        """Copies `state` and writes the copy in a thread; every process calls it.

        Waits for the previous save, and raises its error. out: a path outside of the run's
        checkpoints, which is replaced if it exists; the checkpoint is neither resumed from nor
        deleted later.
        """
        self.join()
        copy = self._contents.copy(state)
        path = out or self._folder / checkpoint_name(state.step)
        self._processes.meet(f"the checkpoint of step {state.step}")
        with ExitStack() as stack:
            request = Request("checkpoint", {"step": state.step, "layout": LAYOUT}, self._parents)
            draft = Draft(path, request, fresh=True)
            # All processes wait until process 0 has removed the files of an earlier attempt.
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
        """Waits until all processes have finished the current save. Raises Unavailable if the disk
        is full.
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
        """Waits up to 30 s for the current save, then abandons it, as it may wait for a lost
        process. Raises nothing.
        """
        if self._writer is not None:
            self._writer.join(_CLOSE_S)
        self._writer, self._error = None, None

    def load(self, state: Any, step: int) -> None:
        """Restores `state` from checkpoint `step`, bit for bit; every process calls it.

        Raises ArtifactInvalid if the checkpoint is damaged or of another layout.
        """
        path = self._folder / checkpoint_name(step)
        with self._processes.failing_together():
            open_checkpoint(path, verify_files=self._processes.world.rank == 0)
        with self._processes.failing_together():
            self._contents.restore(state, path / STATE, step, self._processes.saving)

    def tidy(self, newest: int) -> None:
        """Deletes the checkpoints that a process, killed after the newest one, left to delete."""
        with self._processes.failing_together():
            if self._processes.world.rank == 0:
                self._retire(newest)

    def _write(self, copy: StateCopy, draft: Draft, cleanup: ExitStack) -> None:
        try:
            with cleanup:
                self._write_part(copy, draft)
        except Exception as error:  # noqa: BLE001 - `join` raises it in the trainer
            try:
                raise_if_disk_full(error, draft.out)
            except Unavailable as refusal:
                self._error = refusal
            else:
                self._error = error

    def _write_part(self, copy: StateCopy, draft: Draft) -> None:
        write_tensors(copy.tensors, draft.path / STATE, self._processes.saving)
        if self._processes.world.rank:
            return
        draft.publish(fingerprint=self._contents.write(copy, draft.path))
        if draft.out.parent == self._folder:
            self._retire(copy.step)

    def _retire(self, newest: int) -> None:
        """Deletes all checkpoints but step 0, the newest, the last regular ones and those of
        keep_every.

        A checkpoint saved on an interruption is deleted when the next one is published.
        """
        steps = checkpoint_steps(self._folder)
        regular = [step for step in steps if self.is_due(step)]
        remaining = {0, newest, *regular[-self._config.keep_last :]}
        if self._config.keep_every is not None:
            remaining |= {step for step in regular if step % self._config.keep_every == 0}
        names = {checkpoint_name(step) for step in remaining}
        for path in self._folder.glob("step_*"):
            if path.name not in names:
                # The manifest goes first: if the deletion is interrupted, the rest is not taken
                # for a checkpoint.
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
            remedy="upgrade mlcd to resume from it"
            if newer
            else "resume with the version of mlcd that wrote it",
        )
    return artifact
