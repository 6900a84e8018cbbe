"""The Python client of `mlcd serve`: images and texts in, numpy arrays out, over the public REST
contract alone.

Needs httpx and httpx-sse (extra client); neither torch nor faiss nor the server.
"""

from mlcd.client.asynchronous import AsyncClient
from mlcd.client.batch_jobs import AsyncJobs, Jobs
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
from mlcd.image_bytes import ImageInput
from mlcd.wire.item_search import ItemMatch as Match
from mlcd.wire.item_search import LayoutItems
from mlcd.wire.nearest_centers import Audit, Example, Label, ListedCenter, Member, RenamedCenter
from mlcd.wire.queued_jobs import FailedShard, Job, JobFailure, JobProgress, UploadedImages
from mlcd.wire.served_model import CenterSet, DescribedTexts, Info
from mlcd.wire.stored_items import DeletedItem
from mlcd.wire.stored_items import DescribedCollection as Collection
from mlcd.wire.webhooks import WebhookTestResult

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
    "RenamedCenter",
    "UploadedImages",
    "WebhookTestResult",
]
