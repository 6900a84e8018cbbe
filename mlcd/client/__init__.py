"""The Python client of `mlcd serve`: images and texts in, numpy arrays out, over the public REST
contract alone.

Needs httpx and httpx-sse (`pip install mlcd[client]`); neither torch nor faiss nor the server.
"""

from mlcd.client.asynchronous import AsyncClient
from mlcd.client.batch_jobs import AsyncJobs, Jobs
from mlcd.client.image_bytes import ImageInput
from mlcd.client.refusals import (
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
from mlcd.client.results import (
    Added,
    Center,
    Classified,
    Embedded,
    Found,
    Item,
    Labeled,
    Layout,
    Origin,
)
from mlcd.client.synchronous import Client
from mlcd.wire import (
    Audit,
    CenterSet,
    DeletedItem,
    DescribedTexts,
    Example,
    FailedShard,
    Info,
    Job,
    JobFailure,
    JobProgress,
    Label,
    LayoutItems,
    ListedCenter,
    Member,
)
from mlcd.wire import DescribedCollection as Collection
from mlcd.wire import ItemMatch as Match

__all__ = [
    "Added",
    "AnswerInvalid",
    "AsyncClient",
    "AsyncJobs",
    "Audit",
    "Center",
    "CenterSet",
    "Classified",
    "Client",
    "Collection",
    "DeletedItem",
    "DescribedTexts",
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
    "Layout",
    "LayoutItems",
    "ListedCenter",
    "Match",
    "Member",
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
