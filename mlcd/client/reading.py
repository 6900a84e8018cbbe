"""Parses answers from their wire formats with the models of `mlcd.wire`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar, cast

import httpx
import numpy as np

from mlcd.client.refusals import not_our_api
from mlcd.client.results import Answer, Center, Item, Layout, Origin, Row
from mlcd.errors import ImageReason, ImageRejected, Rejection, TextReason, TextRejected
from mlcd.wire.batches import FileObject, UploadObject, UploadPart
from mlcd.wire.embedding import ClassifiedImages, EmbeddedImages, FittingName, TextVectors
from mlcd.wire.item_search import FoundDuplicates, FoundItems, ItemMatch, LayoutItems
from mlcd.wire.nearest_centers import (
    Audit,
    CenterList,
    DescribedCenter,
    Label,
    LabeledImages,
    ListedCenter,
    Member,
    MemberList,
    RenamedCenter,
)
from mlcd.wire.queued_jobs import FailedShard, FailureList, Job, JobList
from mlcd.wire.served_model import Info
from mlcd.wire.shapes import ItemError
from mlcd.wire.stored_items import (
    AddedItems,
    CollectionList,
    DeletedItem,
    DeletedItems,
    DescribedCollection,
    DescribedItem,
    RefusedItem,
)
from mlcd.wire.webhooks import WebhookEndpoint, WebhookEndpointList, WebhookTestResult

_Value = TypeVar("_Value")
_FLOAT: Final = np.dtype("<f4")


class _Indexed(Protocol):
    """A result or an error. index: position of its item in the request."""

    @property
    def index(self) -> int: ...


_Result = TypeVar("_Result", bound=_Indexed)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        raise not_our_api() from error


@_translate_errors()
def read_rows(response: httpx.Response, num: int) -> Answer[Row]:
    """Reads an octet-stream of `num` rows of little-endian float32."""
    dimension = int(response.headers["x-mlcd-dimension"])
    rows = np.frombuffer(response.content, _FLOAT).reshape(num, dimension).astype(np.float32)
    return Answer(list(rows), _origin(response))


@_translate_errors()
def read_embedded(response: httpx.Response, num: int) -> Answer[Row]:
    """Reads JSON with a row or an error for each of `num` images."""
    answer = EmbeddedImages.model_validate_json(response.content)
    items = _order_by_index(
        answer.results, answer.errors, num, lambda result: np.asarray(result.embedding, np.float32)
    )
    return Answer(items, _origin(response))


@_translate_errors()
def read_embedded_texts(response: httpx.Response, num: int) -> Answer[Row]:
    """Reads JSON with a row or an error for each of `num` texts."""
    answer = TextVectors.model_validate_json(response.content)
    items = _order_by_index(
        answer.results,
        answer.errors,
        num,
        lambda result: np.asarray(result.embedding, np.float32),
        of_texts=True,
    )
    return Answer(items, _origin(response))


@_translate_errors()
def read_classified(response: httpx.Response, num: int) -> Answer[list[FittingName]]:
    answer = ClassifiedImages.model_validate_json(response.content)
    items = _order_by_index(answer.results, answer.errors, num, lambda result: result.names)
    return Answer(items, _origin(response))


@_translate_errors()
def read_labeled(
    response: httpx.Response, num: int, *, of_texts: bool = False
) -> Answer[list[Label]]:
    answer = LabeledImages.model_validate_json(response.content)
    items = _order_by_index(
        answer.results, answer.errors, num, lambda result: result.labels, of_texts=of_texts
    )
    return Answer(items, _origin(response, audit=answer.audit))


@_translate_errors()
def read_found(
    response: httpx.Response, num: int, *, of_texts: bool = False
) -> Answer[list[ItemMatch]]:
    answer = FoundItems.model_validate_json(response.content)
    items = _order_by_index(
        answer.results, answer.errors, num, lambda result: result.matches, of_texts=of_texts
    )
    return Answer(items, _origin(response))


@_translate_errors()
def read_added(response: httpx.Response, num: int) -> Answer[str]:
    answer = AddedItems.model_validate_json(response.content)
    items = _order_by_index(answer.results, answer.errors, num, lambda result: str(result.outcome))
    return Answer(items, _origin(response))


@_translate_errors()
def read_collection(response: httpx.Response) -> DescribedCollection:
    return DescribedCollection.model_validate_json(response.content)


@_translate_errors()
def read_collections(response: httpx.Response) -> CollectionList:
    return CollectionList.model_validate_json(response.content)


@_translate_errors()
def read_item(response: httpx.Response) -> Item:
    item = DescribedItem.model_validate_json(response.content)
    return Item(item.id, item.metadata, np.asarray(item.embedding, np.float32))


@_translate_errors()
def read_groups(response: httpx.Response) -> list[list[str]]:
    return [group.ids for group in FoundDuplicates.model_validate_json(response.content).groups]


@_translate_errors()
def read_center(response: httpx.Response) -> Center:
    center = DescribedCenter.model_validate_json(response.content)
    return Center(
        center.id,
        center.size,
        center.name,
        center.nearest,
        center.examples,
        _origin(response),
        center.alternates,
    )


@_translate_errors()
def read_renamed(response: httpx.Response) -> RenamedCenter:
    return RenamedCenter.model_validate_json(response.content)


@_translate_errors()
def read_centers(response: httpx.Response) -> tuple[list[ListedCenter], str | None]:
    """Reads one page, and the cursor of the next page."""
    page = CenterList.model_validate_json(response.content)
    return page.centers, page.next


@_translate_errors()
def read_members(response: httpx.Response) -> tuple[list[Member], str | None]:
    """Reads one page, and the cursor of the next page."""
    page = MemberList.model_validate_json(response.content)
    return page.members, page.next


@_translate_errors()
def read_deleted(response: httpx.Response) -> list[DeletedItem]:
    return DeletedItems.model_validate_json(response.content).results


@_translate_errors()
def read_layout(response: httpx.Response) -> Layout:
    """Reads an octet-stream of points."""
    method, digest = response.headers["x-mlcd-layout"].split(";")
    points = np.frombuffer(response.content, _FLOAT).reshape(-1, 2).astype(np.float32)
    return Layout(points, method, digest)


@_translate_errors()
def read_layout_items(response: httpx.Response) -> LayoutItems:
    return LayoutItems.model_validate_json(response.content)


@_translate_errors()
def read_info(response: httpx.Response) -> Info:
    return Info.model_validate_json(response.content)


@_translate_errors()
def read_job(content: bytes | str) -> Job:
    return Job.model_validate_json(content)


@_translate_errors()
def read_file(response: httpx.Response) -> FileObject:
    return FileObject.model_validate_json(response.content)


@_translate_errors()
def read_upload(response: httpx.Response) -> UploadObject:
    return UploadObject.model_validate_json(response.content)


@_translate_errors()
def read_part(response: httpx.Response) -> UploadPart:
    return UploadPart.model_validate_json(response.content)


@_translate_errors()
def read_jobs(response: httpx.Response) -> tuple[list[Job], str | None]:
    """Reads one page, and the cursor of the next page."""
    page = JobList.model_validate_json(response.content)
    return page.jobs, page.cursor


@_translate_errors()
def read_failures(response: httpx.Response) -> tuple[list[FailedShard], int | None]:
    """Reads one page, and the cursor of the next page."""
    page = FailureList.model_validate_json(response.content)
    return page.failures, page.cursor


@_translate_errors()
def read_webhooks(response: httpx.Response) -> list[WebhookEndpoint]:
    return WebhookEndpointList.model_validate_json(response.content).data


@_translate_errors()
def read_webhook(response: httpx.Response) -> WebhookEndpoint:
    return WebhookEndpoint.model_validate_json(response.content)


@_translate_errors()
def read_webhook_test(response: httpx.Response) -> WebhookTestResult:
    return WebhookTestResult.model_validate_json(response.content)


def origin_of(info: Info) -> Origin:
    centers = None if info.centers is None else info.centers.digest
    return Origin(info.model, info.fingerprint, info.preprocess_version, centers)


def _order_by_index(
    results: Sequence[_Result],
    errors: Sequence[ItemError | RefusedItem],
    num: int,
    value: Callable[[_Result], _Value],
    *,
    of_texts: bool = False,
) -> list[_Value | Rejection]:
    """Puts each result's value and each error at its index; every index must have one."""
    items: dict[int, _Value | Rejection] = {result.index: value(result) for result in results}
    for error in errors:
        items[error.index] = (
            TextRejected(cast(TextReason, error.type), error.detail)
            if of_texts
            else ImageRejected(cast(ImageReason, error.type), error.detail)
        )
    return [items[index] for index in range(num)]


def _origin(response: httpx.Response, audit: Audit | None = None) -> Origin:
    headers = response.headers
    return Origin(
        model=headers["x-mlcd-model"],
        fingerprint=headers["x-mlcd-fingerprint"],
        preprocess_version=int(headers["x-mlcd-preprocess-version"]),
        centers=headers.get("x-mlcd-centers"),
        audit=audit,
        rounded=headers.get("x-mlcd-rounded"),
    )
