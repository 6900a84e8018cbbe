"""The Python client of `mlcd serve`: images in, numpy arrays out, over the public REST contract
alone.

Needs httpx and httpx-sse (`pip install mlcd[client]`); neither torch nor faiss nor the server.
"""

from mlcd.client.answers import (
    Added,
    Center,
    CenterSet,
    Collection,
    Embedded,
    Example,
    FailedShard,
    Found,
    Info,
    Item,
    Job,
    JobFailure,
    JobProgress,
    Label,
    Labeled,
    Match,
    Origin,
)
from mlcd.client.asynchronous import AsyncClient
from mlcd.client.images import ImageInput
from mlcd.client.jobs import AsyncJobs, Jobs
from mlcd.client.problems import (
    AnswerInvalid,
    Problem,
    Refused,
    RefusedAccess,
    RefusedConflict,
    RefusedInput,
    RefusedLate,
    RefusedNotFound,
    RefusedOverload,
    RefusedUnavailable,
)
from mlcd.client.synchronous import Client

__all__ = [
    "Added",
    "AnswerInvalid",
    "AsyncClient",
    "AsyncJobs",
    "Center",
    "CenterSet",
    "Client",
    "Collection",
    "Embedded",
    "Example",
    "FailedShard",
    "Found",
    "ImageInput",
    "Info",
    "Item",
    "Job",
    "JobFailure",
    "JobProgress",
    "Jobs",
    "Label",
    "Labeled",
    "Match",
    "Origin",
    "Problem",
    "Refused",
    "RefusedAccess",
    "RefusedConflict",
    "RefusedInput",
    "RefusedLate",
    "RefusedNotFound",
    "RefusedOverload",
    "RefusedUnavailable",
]
