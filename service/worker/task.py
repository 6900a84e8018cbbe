"""Performs one task of a job on a separate thread, which stops between images when requested."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifacts.copies import forget
from mlcd.errors import Overloaded, Unavailable
from mlcd.locations import artifact_path, is_url
from mlcd.pipelines.shard import Equipment, Shards, discard, open_shards
from mlcd.service.jobs.job import MAX_ATTEMPTS, JobSpec, Work
from mlcd.service.jobs.roots import Roots
from mlcd.service.jobs.uploaded_images import open_upload
from mlcd.service.worker.failures import EngineDown, OtherCenters, Stopped
from mlcd.service.worker.upload_results import UploadResults
from mlcd.types import Fingerprint

_MOST_OPENED: Final = 4  # jobs of several keys take turns


@dataclass
class Watch:
    """The state that the computing thread shares with the thread that calls the queue.

    until_s: end of the lease, by the monotonic clock. done: images of the task done so far. stop:
    whether the task must stop. moved_s: time of the last progress; None outside of image
    processing, because listing and publishing may take long. thread: id of the computing thread.
    """

    until_s: float
    done: int = 0
    stop: bool = False
    moved_s: float | None = None
    thread: int | None = None
    _num: int = 0

    @contextmanager
    def images(self, num: int) -> Iterator[None]:
        """Expects progress on `num` images within the context."""
        self.moved_s, self._num = time.monotonic(), num
        try:
            yield
        finally:
            self.moved_s = None

    def stalls(self, limit_s: float) -> bool:
        """Tells whether no image was done for limit_s seconds while images are to be done."""
        moved_s = self.moved_s
        return moved_s is not None and time.monotonic() - moved_s > limit_s

    def on_progress(self, done: int, errors: int) -> None:
        """Updates the number of images done. Raises Stopped if the task must stop or its lease has
        expired.
        """
        del errors
        self.done = max(self.done, done)
        if self.moved_s is not None:
            self.moved_s = time.monotonic() if done < self._num else None
        if self.stop or time.monotonic() > self.until_s:
            raise Stopped


@dataclass(frozen=True)
class Outcome:
    """The result of a task.

    sizes, damaged_files: set by the stage `plan`. failed_items: set by a shard.
    """

    sizes: list[int] | None = None
    damaged_files: int = 0
    failed_items: int = 0


class TaskRunner:
    """Performs the tasks of a worker with the equipment of this process. Use from one thread."""

    def __init__(
        self,
        equipment: Equipment,
        roots: Roots,
        uploads: UploadResults,
        *,
        shard_images: int | None,
    ) -> None:
        self._equipment, self._roots, self._shard_images = equipment, roots, shard_images
        self._uploads = uploads
        self._opened: dict[str, Shards] = {}  # by job, the last used last
        self._output: str | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        return self._equipment.encoder.fingerprint

    def perform(self, work: Work, watch: Watch) -> Outcome:
        """Performs a task.

        Raises Stopped, EngineDown if the task is not the cause, and the errors of
        `mlcd.pipelines.shard`.
        """
        watch.thread = threading.get_ident()
        try:
            return self._perform(work, watch)
        except Exception as error:
            self._opened.pop(work.job_id, None)
            is_busy = isinstance(error, Overloaded)  # with requests of servers
            if is_busy or (type(error) is Unavailable and not self._engine_works(watch)):
                raise EngineDown from error
            raise

    def _perform(self, work: Work, watch: Watch) -> Outcome:
        self._roots_of(work.spec).check_places(work.spec.input, work.spec.output)
        self._switch_output(work.spec.output)
        if work.stage == "discard":
            self._opened.pop(work.job_id, None)
            discard(work.spec, owner=work.job_id)
            return Outcome()
        upload = work.spec.upload
        if work.stage == "publish" and upload is not None and self._uploads.are_written(upload):
            self._uploads.clear(work.spec)  # a crash came between this and the report
            return Outcome()
        shards = self._open_shards(work)
        watch.on_progress(0, 0)
        if work.stage == "plan":
            shards.plan()
            return Outcome(sizes=shards.sizes, damaged_files=shards.damaged_files)
        if work.stage == "publish":
            shards.publish(watch.on_progress)
            if upload is not None:
                self._uploads.write(work.spec)
                self._uploads.clear(work.spec)
            self.forget()
            return Outcome()
        assert work.shard is not None
        with watch.images(shards.sizes[work.shard]):
            is_last_try = work.attempt >= MAX_ATTEMPTS
            return Outcome(
                failed_items=shards.make(work.shard, watch.on_progress, is_last_try=is_last_try)
            )

    def _roots_of(self, spec: JobSpec) -> Roots:
        return self._roots if spec.upload is None else self._uploads.roots_of(spec)

    def _switch_output(self, output: str) -> None:
        """Removes the local copies of the previous output at a URL, if the output changes."""
        if output != self._output:
            self.forget()
            self._output = output

    def forget(self) -> None:
        """Removes the local copies of the current output at a URL."""
        if self._output is not None and is_url(self._output):
            forget(artifact_path(self._output))
            self._opened.clear()
        self._output = None

    def _open_shards(self, work: Work) -> Shards:
        """Returns the shards of a job; lists its input only once, unless a task fails or several
        other jobs come between.
        """
        shards = self._opened.pop(work.job_id, None)
        if shards is None or work.stage == "plan":
            self._check_centers(work)
            source, roots = work.spec.input, self._roots_of(work.spec)
            upload = work.spec.upload
            reads_images = work.spec.kind != "curate"
            if reads_images:
                roots.check_archives(source)
            shards = open_shards(
                work.spec,
                self._equipment,
                owner=work.job_id,
                part_entries=self._shard_images,
                check_files=roots.check_files_of(source) if reads_images else roots.check_files,
                source=None if upload is None else open_upload(Path(source), upload.filename),
            )
            if work.stage != "plan":
                shards.check()
        self._opened[work.job_id] = shards
        while len(self._opened) > _MOST_OPENED:
            del self._opened[next(iter(self._opened))]
        return shards

    def _check_centers(self, work: Work) -> None:
        centers = self._equipment.centers
        if work.spec.needs_centers and (
            centers is None or centers.centers.digest != work.spec.centers
        ):
            raise OtherCenters(
                "this worker has other centers than the job's ids refer to",
                remedy="start a worker with the job's centers, or submit the job again",
            )

    def _engine_works(self, watch: Watch) -> bool:
        encoder = self._equipment.encoder
        side = encoder.preprocess.crop
        try:
            with watch.images(1):
                encoder.encode(np.zeros((1, 3, side, side), np.uint8))
        except Unavailable:
            return False
        return True
