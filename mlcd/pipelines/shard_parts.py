"""The shards of an artifact that is made in parts of images: embeddings, labels."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from mlcd.artifacts.disk import raise_if_disk_full
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import ERRORS
from mlcd.artifacts.manifest import Artifact, Request, draft_path
from mlcd.errors import ConfigInvalid, Conflict, Unavailable
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.pipelines.encoded import NoUsableImage, OnDone, num_errors, num_listed
from mlcd.pipelines.ownership import OWNER, discard_uploads, give_up, owner_of_draft
from mlcd.types import SampleKey


class InputChanged(Conflict):
    """The input has changed since the shards were planned, so no shard can be made any more."""

    name = "input-changed"


class OutputGone(Conflict):
    """The unfinished output is missing from its path: its disk may be unmounted or replaced."""

    name = "output-gone"

    @classmethod
    def of(cls, draft: Path) -> "OutputGone":
        return cls(
            f"{draft} does not contain this work any more",
            remedy="check that its disk is mounted, then retry the job",
        )


class OtherSettings(ConfigInvalid):
    """The shards were planned with another engine, precision or size; only workers with the same
    settings can continue.
    """

    name = "other-settings"


class Making(Protocol):
    """The common interface of `Labeling` and `Embedder`."""

    request: Request
    sizes: list[int]

    def prepare(self, draft: Draft) -> None:
        """Makes what every part needs, once before the first part."""
        ...

    def has(self, draft: Draft, part: int) -> bool: ...

    def make(self, draft: Draft, part: int, on_done: OnDone) -> None: ...

    def publish(self, draft: Draft) -> Artifact: ...


class Images(Protocol):
    """The common interface of `ImagesInput` and `Embedder`."""

    source: Source

    def entries(self, part: int) -> Entries: ...


class DraftShards:
    """The `Shards` protocol over an artifact that is made in parts."""

    def __init__(self, making: Making, out: Path, owner: str, *, damaged_files: int) -> None:
        self._making, self._out, self._owner = making, out, owner
        self.sizes, self.damaged_files = making.sizes, damaged_files

    def plan(self) -> None:
        if self.find_artifact() is None:
            with self._enter(starts=True) as draft:
                self._making.prepare(draft)

    def missing(self) -> list[int]:
        """Returns the ids of the shards that are not made yet."""
        draft = self._draft()
        return [shard for shard in range(len(self.sizes)) if not self._making.has(draft, shard)]

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        if (artifact := self.find_artifact()) is not None:
            return self._num_failed_of(artifact, shard)
        with self._enter() as draft:
            self._make(draft, shard, on_done, is_last_try=is_last_try)
            return self._num_failed(draft, shard)

    def _make(self, draft: Draft, shard: int, on_done: OnDone, *, is_last_try: bool) -> None:
        del is_last_try
        if not self._making.has(draft, shard):
            self._making.make(draft, shard, on_done)

    def _num_failed(self, draft: Draft, shard: int) -> int:
        """Returns the number of images of a shard that failed."""
        del draft, shard
        return 0

    def _num_failed_of(self, artifact: Artifact, shard: int) -> int:
        """Returns `_num_failed` from the published artifact."""
        del artifact, shard
        return 0

    def publish(self, on_done: OnDone) -> None:
        if self.find_artifact() is not None:
            return
        try:
            with self._enter() as draft:
                draft.fetch_all()
                for shard in range(len(self.sizes)):
                    on_done(0, 0)
                    self._make(draft, shard, on_done, is_last_try=True)
                self._making.publish(draft)
        except NoUsableImage:
            discard_uploads(self._out, self._owner)
            give_up(draft_path(self._out), self._owner)  # nothing in it can be finished
            raise

    def check(self) -> None:
        if self.find_artifact() is None:
            draft = self._draft()
            if owner_of_draft(draft) != self._owner:
                raise OutputGone.of(draft.path)

    def find_artifact(self) -> Artifact | None:
        """Returns the finished artifact; None before it is published."""
        return find_published(self._out, self._making.request)

    def _draft(self) -> Draft:
        """Returns the draft; raises InputChanged or OtherSettings if it was started for other
        input or settings.
        """
        draft = Draft(self._out, self._making.request, shared=True)
        self._check_request(draft)
        return draft

    @contextmanager
    def _enter(self, *, starts: bool = False) -> Iterator[Draft]:
        draft = self._draft()
        if not starts and owner_of_draft(draft) != self._owner:
            raise OutputGone.of(draft.path)
        try:
            with draft:
                if owner_of_draft(draft) != self._owner:
                    draft.write_json(OWNER, self._owner)
                yield draft
        except OSError as error:  # raised while the draft was entered
            raise_if_disk_full(error, self._out)
            raise

    def _check_request(self, draft: Draft) -> None:
        stored = draft.read_request()
        if stored is None or owner_of_draft(draft) != self._owner:
            return  # entering the draft refuses another owner's work
        ours = json.loads(json.dumps(self._making.request.identity()))
        if stored["parents"] != ours["parents"]:
            raise InputChanged(
                "the input has changed since the work was planned",
                remedy="start again, with another output",
            )
        if stored != ours:
            raise OtherSettings(
                f"the work was started with {_settings_of(stored)},"
                f" this worker has {_settings_of(ours)}",
                remedy="start a worker with the settings that the work was started with",
            )


class PartShards(DraftShards):
    """The shards of an artifact made in parts of `images`."""

    def __init__(
        self,
        making: Making,
        images: Images,
        out: Path,
        owner: str,
        check_files: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        super().__init__(making, out, owner, damaged_files=len(images.source.problems))
        self._images, self._check_files = images, check_files

    def keys(self, shard: int) -> Iterable[SampleKey]:
        """Returns the keys of the images of a shard."""
        return self._images.entries(shard).keys()

    def _num_failed(self, draft: Draft, shard: int) -> int:
        return num_errors(draft, shard)

    def _num_failed_of(self, artifact: Artifact, shard: int) -> int:
        return num_listed(artifact.file(ERRORS), self.keys(shard))

    def _make(self, draft: Draft, shard: int, on_done: OnDone, *, is_last_try: bool) -> None:
        if not self._making.has(draft, shard):
            self._check_files(self._images.source.files_of(self._images.entries(shard)))
            self._making.make(draft, shard, self._checking(shard, on_done, is_last_try=is_last_try))

    def _checking(self, shard: int, on_done: OnDone, *, is_last_try: bool) -> OnDone:
        """Returns an `on_done` that checks the files again when all are read, before anything is
        written.
        """
        source, is_checked = self._images.source, False
        num_faults_before = len(source.faults)

        def check_and_report(done: int, errors: int) -> None:
            nonlocal is_checked
            if done == self.sizes[shard] and not is_checked:
                is_checked = True
                source.check_unchanged(self._images.entries(shard))
                if len(source.faults) > num_faults_before and not is_last_try:
                    raise Unavailable(
                        f"{len(source.faults) - num_faults_before} images could not be read,"
                        f" the first {source.faults[num_faults_before]}",
                        remedy="check that their disk is mounted,"
                        " and that the worker may read them",
                    )
            on_done(done, errors)

        return check_and_report


def _settings_of(identity: dict[str, Any]) -> str:
    """Returns the settings of a request's identity in words."""
    return ", ".join(f"{name} {value}" for name, value in sorted(identity["config"].items()))
