"""Batches: requests of one file, answered into an output and an error file.

A batch is a row beside its owner's files. One process at a time works on it, which holds the lock
of `<id>.lock`; the operating system frees the lock of a dead process, and another continues. The
results of a window of lines are synced to the drafts of both files before the row counts them, and
drafts are cut to the counted bytes before a batch continues: after a crash no line is missing and
none is there twice.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import TypeAdapter

from mlcd.errors import Conflict, NotFound
from mlcd.service.errors import BadRequest
from mlcd.service.jobs.files import FileStore, new_id
from mlcd.service.jobs.webhooks import WebhookEvent, add_event
from mlcd.service.timings import DAY_S
from mlcd.types import Fingerprint
from mlcd.wire.batches import BatchState, Endpoint

_INPUTS: Final = ("batch", "images")
_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True)
class InputFault:
    """A line of the input that is not a request. line: from 1; None for the file as a whole."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True)
class StoredBatch:
    """A batch as it is stored. Times are seconds since the epoch; those in `times` are by state.

    owner: the id of the API key that made it; None without keys. total: lines of the input, 0
    until it is validated. completed, failed: lines with an answer in the output, in the error file.
    output_bytes, error_bytes: the bytes of both drafts that are counted.
    """

    id: str
    owner: str | None
    endpoint: Endpoint
    input_file_id: str
    window_s: float
    window: str
    metadata: dict[str, str] | None
    fingerprint: Fingerprint
    state: BatchState
    created_s: float
    output_file_id: str
    error_file_id: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    times: dict[str, float] = field(default_factory=dict)
    faults: tuple[InputFault, ...] = ()

    @property
    def done(self) -> int:
        return self.completed + self.failed

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def expires_s(self) -> float:
        return self.created_s + self.window_s

    def become(self, state: BatchState) -> "StoredBatch":
        times = {**self.times, state: time.time()}
        return self if state == self.state else replace(self, state=state, times=times)


_BATCH: Final = TypeAdapter(StoredBatch)


class BatchStore:
    """The batches over the files of a store. Its methods block."""

    def __init__(self, files: FileStore) -> None:
        self.files = files

    def create(
        self,
        owner: str | None,
        *,
        endpoint: Endpoint,
        input_file_id: str,
        window: str,
        window_s: float,
        metadata: dict[str, str] | None,
        fingerprint: Fingerprint,
    ) -> StoredBatch:
        """Adds a batch. Raises NotFound for a file that the owner does not have, BadRequest for one
        of another purpose.
        """
        purpose = self.files.find(input_file_id, owner).purpose
        if purpose not in _INPUTS:
            raise BadRequest(
                f"the file must have the purpose batch or images, got {purpose}",
                param="input_file_id",
            )
        batch = StoredBatch(
            new_id("batch_"),
            owner,
            endpoint,
            input_file_id,
            window_s,
            window,
            metadata,
            fingerprint,
            "validating",
            time.time(),
            new_id("file-"),
            new_id("file-"),
        )
        with self.files.database.writing() as writer:
            writer.execute(
                "INSERT INTO batches VALUES (?, ?, 1, NULL, ?)", (batch.id, owner, _to_json(batch))
            )
        return batch

    def find(self, batch_id: str, owner: str | None) -> StoredBatch:
        """Returns the batch. Raises NotFound where this owner lacks a batch of this id."""
        rows = self.files.database.rows(
            "SELECT record FROM batches WHERE id = ? AND owner IS ?", batch_id, owner
        )
        if not rows:
            raise NotFound("unknown batch", remedy="GET /v1/batches lists yours")
        return _BATCH.validate_json(rows[0][0])

    def page(
        self, owner: str | None, *, limit: int, after: str | None
    ) -> tuple[list[StoredBatch], bool]:
        """Returns some batches, newest first, and whether more follow. after: the last before."""
        rows = self.files.database.rows(
            "SELECT record FROM batches WHERE owner IS ? AND (? IS NULL OR id < ?)"
            " ORDER BY id DESC LIMIT ?",
            *(owner, after, after, limit + 1),
        )
        return [_BATCH.validate_json(record) for (record,) in rows[:limit]], len(rows) > limit

    def open_batches(self) -> list[StoredBatch]:
        """Returns the batches that have not ended, oldest first."""
        rows = self.files.database.rows("SELECT record FROM batches WHERE is_open ORDER BY id")
        return [_BATCH.validate_json(record) for (record,) in rows]

    def cancel(self, batch_id: str, owner: str | None) -> StoredBatch:
        """Asks for the end of a batch; what is answered already stays in its files.

        Raises NotFound, and Conflict where it has ended otherwise.
        """
        self.find(batch_id, owner)

        def ask(batch: StoredBatch) -> StoredBatch:
            if batch.has_ended and batch.state != "cancelled":
                raise Conflict(f"the batch is {batch.state} already")
            return batch if batch.state == "cancelled" else batch.become("cancelling")

        return self.update(batch_id, ask)

    def update(self, batch_id: str, change: Callable[[StoredBatch], StoredBatch]) -> StoredBatch:
        """Changes a batch in one transaction, and returns it as it is then.

        The transaction that ends a batch adds the event of its end for webhooks.
        """
        with self.files.database.writing() as writer:
            ((record,),) = writer.execute(
                "SELECT record FROM batches WHERE id = ?", (batch_id,)
            ).fetchall()
            before = _BATCH.validate_json(record)
            batch = change(before)
            writer.execute(
                "UPDATE batches SET is_open = ?, ended_s = ?, record = ? WHERE id = ?",
                (
                    not batch.has_ended,
                    batch.times.get(batch.state) if batch.has_ended else None,
                    _to_json(batch),
                    batch_id,
                ),
            )
            if batch.has_ended and not before.has_ended:
                ended_s = batch.times[batch.state]
                event = WebhookEvent.of_end(f"batch.{batch.state}", batch.id, ended_s)
                add_event(writer, batch.owner, event)
        return batch

    @contextmanager
    def hold(self, batch_id: str) -> Iterator[bool]:
        """Holds the lock of a batch; yields False where another process or task has it."""
        path = self.files.folder / f"{batch_id}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
                if self._has_ended(batch_id):
                    path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def sweep(self, keep_days: float) -> None:
        """Removes batches that ended long ago; their files expire by themselves."""
        with self.files.database.writing() as writer:
            writer.execute(
                "DELETE FROM batches WHERE ended_s < ?", (time.time() - keep_days * DAY_S,)
            )

    def _has_ended(self, batch_id: str) -> bool:
        rows = self.files.database.rows("SELECT is_open FROM batches WHERE id = ?", batch_id)
        return not (rows and rows[0][0])


def _to_json(batch: StoredBatch) -> str:
    return _BATCH.dump_json(batch).decode()
