"""Files, uploads in parts and batches, as OpenAI's API has them. Times are whole seconds since the
epoch.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from mlcd.wire.shapes import WholeNumber, WireAnswer, WireRequest

FilePurpose = Literal["batch", "images"]
StoredPurpose = Literal["batch", "batch_output", "images", "job_output"]
Endpoint = Literal["/v1/embeddings", "/v1/labels", "/v1/classify"]
BatchState = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
_Seconds = Annotated[WholeNumber, Field(ge=1, le=2**31)]


class FileObject(WireAnswer):
    """A file. purpose: `batch` and `images` of an upload, `batch_output` and `job_output` of what a
    batch or a job wrote.
    """

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: StoredPurpose
    status: Literal["processed"]  # OpenAI's field; a file is listed once it is complete
    sha256: str


class FileList(WireAnswer):
    """Files, and the ids of the first and the last of them."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(WireAnswer):
    """The id of a file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class ExpiresAfter(WireRequest):
    """The life of a file: seconds from its creation."""

    anchor: Literal["created_at"]
    seconds: _Seconds


class UploadRequest(WireRequest):
    """A file that comes in parts, of at most an hour together. bytes: of the whole file."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "filename": "requests.jsonl",
                    "purpose": "batch",
                    "bytes": 2147483648,
                    "mime_type": "application/jsonl",
                }
            ]
        }
    )

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: FilePurpose
    bytes: Annotated[WholeNumber, Field(ge=1)]
    mime_type: Annotated[str, Field(max_length=255)] | None = None
    expires_after: ExpiresAfter | None = None


class UploadObject(WireAnswer):
    """An upload in parts. file: once it is completed."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None


class UploadPart(WireAnswer):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class CompleteUpload(WireRequest):
    """The parts of the file, in order. md5: of the whole file, which is then checked."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=10_000)]
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


class BatchRequest(WireRequest):
    """A batch over an uploaded file: JSON lines, each with `custom_id`, `method` (POST), `url` (the
    endpoint) and `body` (a request to it).
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": "file-000654bd8c6f3a0b1c2d3e4f",
                    "endpoint": "/v1/embeddings",
                    "completion_window": "24h",
                }
            ]
        }
    )

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}[hd]$")]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class BatchFault(WireAnswer):
    """A fault of a line of the input."""

    code: str
    message: str
    line: int | None
    param: None = None


class BatchFaults(WireAnswer):
    """The faults of an input, at most 50."""

    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(WireAnswer):
    """The requests of a batch: all, those with an answer, and those in the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(WireAnswer):
    """A batch. errors: why it failed before its first request."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None


class BatchList(WireAnswer):
    """Batches, newest first, and the ids of the first and the last of them."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
