"""Uploads in parts, for files that one request cannot bring: OpenAI's Uploads.

A part is a file of its own until the upload is complete; then the parts become one file. A client
that lost its connection sends the part again and leaves out the id of the broken one.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pydantic import TypeAdapter

from mlcd.errors import Conflict, InvalidInput, NotFound
from mlcd.service.jobs.files import FileDraft, FileStore, StoredFile, new_id
from mlcd.service.timings import UPLOAD_S
from mlcd.wire.batches import FilePurpose

UploadState = Literal["pending", "completed", "cancelled", "expired"]
_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True)
class Upload:
    """An upload in parts. bytes: those of the whole file. part_ids: of the parts that are there.

    created_s, expires_s: seconds since the epoch.
    """

    id: str
    owner: str | None
    filename: str
    bytes: int
    keep_s: float | None
    created_s: float
    expires_s: float
    purpose: FilePurpose = "batch"
    state: UploadState = "pending"
    part_ids: tuple[str, ...] = ()
    file_id: str | None = None


_UPLOAD: Final = TypeAdapter(Upload)


class UploadStore:
    """The uploads to a store of files. Its methods block."""

    def __init__(self, files: FileStore) -> None:
        self.files = files

    def create(
        self,
        owner: str | None,
        filename: str,
        num_bytes: int,
        *,
        purpose: FilePurpose,
        keep_s: float | None,
    ) -> Upload:
        """Begins an upload. Raises QuotaExceeded, StorageFull where the file would not fit."""
        self.files.check_room(owner, num_bytes)
        now_s = time.time()
        upload = Upload(
            new_id("upload_"),
            owner,
            filename,
            num_bytes,
            keep_s,
            now_s,
            now_s + UPLOAD_S,
            purpose,
        )
        with self.files.database.writing() as writer:
            writer.execute("DELETE FROM uploads WHERE expires_s < ?", (now_s - UPLOAD_S,))
            writer.execute(
                "INSERT INTO uploads VALUES (?, ?, ?, ?)",
                (upload.id, owner, upload.expires_s, _to_json(upload)),
            )
        return upload

    def find(self, upload_id: str, owner: str | None) -> Upload:
        """Returns the upload. Raises NotFound where this owner lacks an upload of this id."""
        rows = self.files.database.rows(
            "SELECT record FROM uploads WHERE id = ? AND owner IS ?", upload_id, owner
        )
        if not rows:
            raise NotFound("unknown upload", remedy="POST /v1/uploads begins one")
        upload = _UPLOAD.validate_json(rows[0][0])
        is_late = upload.state == "pending" and time.time() > upload.expires_s
        return replace(upload, state="expired") if is_late else upload

    def begin_part(self, upload_id: str, owner: str | None) -> FileDraft:
        """Begins a part. Raises NotFound, and Conflict where the upload has ended."""
        upload = self._find_pending(upload_id, owner)
        return self.files.begin(owner, max_bytes=upload.bytes)

    def add_part(self, upload_id: str, owner: str | None, draft: FileDraft) -> str:
        """Finishes a part, and returns its id."""
        upload = self._find_pending(upload_id, owner)
        part = draft.finish("part", "upload_part", max(1.0, upload.expires_s - time.time()))
        part_id = part.id.replace("file-", "part_", 1)
        with self.files.database.writing() as writer:
            ((record,),) = writer.execute(
                "SELECT record FROM uploads WHERE id = ?", (upload_id,)
            ).fetchall()
            stored = _UPLOAD.validate_json(record)
            stored = replace(stored, part_ids=(*stored.part_ids, part_id))
            writer.execute(
                "UPDATE uploads SET record = ? WHERE id = ?", (_to_json(stored), upload_id)
            )
        return part_id

    def complete(
        self, upload_id: str, owner: str | None, part_ids: Sequence[str], md5: str | None
    ) -> tuple[Upload, StoredFile]:
        """Makes one file of the parts, in this order. md5: the expected MD5 of the file; None skips
        the check.

        Raises InvalidInput for parts that are not those of the file.
        """
        upload = self._find_pending(upload_id, owner)
        if unknown := sorted({*part_ids} - {*upload.part_ids}):
            raise InvalidInput(f"part_ids must be parts of this upload, got {unknown[0]}")
        paths = [self.files.path(_file_id(part_id)) for part_id in part_ids]
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes != upload.bytes:
            raise InvalidInput(
                f"the parts must have {upload.bytes} bytes together, got {num_bytes}",
                remedy="name all parts, in order",
            )
        digest = hashlib.md5(usedforsecurity=False)
        with self.files.begin(owner) as draft:
            for path in paths:
                with path.open("rb") as part:
                    while piece := part.read(_PIECE_BYTES):
                        digest.update(piece)
                        draft.write(piece)
            if md5 is not None and md5.lower() != digest.hexdigest():
                raise InvalidInput(f"md5 of the parts must be {md5}, got {digest.hexdigest()}")
            file = draft.finish(upload.filename, upload.purpose, upload.keep_s)
        return self._end(upload, "completed", file.id), file

    def cancel(self, upload_id: str, owner: str | None) -> Upload:
        """Ends the upload and removes its parts. Raises NotFound, Conflict."""
        return self._end(self._find_pending(upload_id, owner), "cancelled", None)

    def _find_pending(self, upload_id: str, owner: str | None) -> Upload:
        upload = self.find(upload_id, owner)
        if upload.state != "pending":
            raise Conflict(f"the upload is {upload.state}", remedy="begin another")
        return upload

    def _end(self, upload: Upload, state: UploadState, file_id: str | None) -> Upload:
        ended = replace(upload, state=state, file_id=file_id)
        with self.files.database.writing() as writer:
            writer.execute(
                "UPDATE uploads SET record = ? WHERE id = ?", (_to_json(ended), upload.id)
            )
        for part_id in upload.part_ids:
            self.files.discard(_file_id(part_id))
        return ended


def _file_id(part_id: str) -> str:
    return part_id.replace("part_", "file-", 1)


def _to_json(upload: Upload) -> str:
    return _UPLOAD.dump_json(upload).decode()
