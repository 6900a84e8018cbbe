"""The routes of the server, each for one batch."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import httpx
import numpy as np

from mlcd.client.batches import PART_BYTES, Additions, Batch, Images
from mlcd.client.connection import Connection, encode_name
from mlcd.client.reading import (
    read_added,
    read_center,
    read_centers,
    read_classified,
    read_collection,
    read_collections,
    read_deleted,
    read_embedded,
    read_embedded_texts,
    read_found,
    read_groups,
    read_info,
    read_item,
    read_labeled,
    read_layout,
    read_layout_items,
    read_members,
    read_renamed,
    read_rows,
)
from mlcd.client.refusals import RefusedInput, not_our_api
from mlcd.client.results import Answer, Center, Item, Layout, Row
from mlcd.client.text_batches import Texts
from mlcd.errors import Rejection
from mlcd.wire.embedding import FittingName
from mlcd.wire.item_search import ItemMatch, LayoutItems
from mlcd.wire.nearest_centers import Label, LabelMode, ListedCenter, Member, RenamedCenter
from mlcd.wire.served_model import Info
from mlcd.wire.stored_items import DeletedItem, DescribedCollection

_Value = TypeVar("_Value")
_Sent = TypeVar("_Sent", bytes, str)
_RAW: Final = "application/octet-stream"
_TOO_LARGE: Final = 413
# entries of one page, as many as a server takes
_PAGE: Final = 500


class _Read(Protocol[_Value]):
    """A reader of an answer for `num` items."""

    def __call__(
        self, response: httpx.Response, num: int, *, of_texts: bool = False
    ) -> Answer[_Value]: ...


@dataclass(frozen=True)
class RequestBounds:
    """The limits of one request, from /v1/info."""

    max_items: int
    max_body_bytes: int
    max_texts: int
    max_text_chars: int | None

    @property
    def max_image_bytes(self) -> int:
        return self.max_body_bytes - PART_BYTES


class Server:
    """A caller of the routes of the public contract and no others; use it from one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._info: Info | None = None

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def info(self) -> Info:
        self._info = read_info(await self._connection.ask("GET", "/v1/info"))
        return self._info

    async def last_info(self) -> Info:
        """Returns the last known info; limits and shapes rarely change, so a call does not request
        them anew.
        """
        return self._info or await self.info()

    async def bounds(self) -> RequestBounds:
        limits = (await self.last_info()).limits
        try:
            return RequestBounds(
                max_items=int(limits["max_images"]),
                max_body_bytes=int(limits["max_body_bytes"]),
                # a server that is older than these says by itself that it takes no texts
                max_texts=int(limits.get("max_texts", 1)),
                max_text_chars=int(limits["max_text_chars"])
                if "max_text_chars" in limits
                else None,
            )
        except KeyError as error:
            raise not_our_api() from error

    async def center(self, center: int) -> Center:
        return read_center(await self._connection.ask("GET", f"/v1/centers/{center:d}"))

    async def rename_center(self, center: int, name: str | None) -> RenamedCenter:
        answer = await self._connection.ask("PATCH", f"/v1/centers/{center:d}", json={"name": name})
        return read_renamed(answer)

    async def centers(
        self,
        *,
        num: int,
        collection: str | None,
        sort: str | None,
        name: str | None,
        query: str | None,
        examples: int,
    ) -> list[ListedCenter]:
        """Returns the first `num` centers, read page by page."""
        filters = {
            "collection": collection,
            "sort": sort,
            "name": name,
            "query": query,
            "examples": examples,
        }

        async def page(cursor: str | None, limit: int) -> tuple[list[ListedCenter], str | None]:
            params = _without_none({**filters, "limit": limit, "cursor": cursor})
            return read_centers(await self._connection.ask("GET", "/v1/centers", params=params))

        return await _first(num, page)

    async def members(self, center: int, *, collection: str, num: int) -> list[Member]:
        """Returns the first `num` members of a center, read page by page."""

        async def page(cursor: str | None, limit: int) -> tuple[list[Member], str | None]:
            params = _without_none({"collection": collection, "limit": limit, "cursor": cursor})
            path = f"/v1/centers/{center:d}/members"
            return read_members(await self._connection.ask("GET", path, params=params))

        return await _first(num, page)

    async def thumbnail(self, collection: str, key: str) -> bytes:
        path = f"{_path(collection, key)}/thumbnail"
        return (await self._connection.ask("GET", path, accept="image/webp")).content

    async def layout(self, collection: str, *, first: int | None) -> Layout:
        path = f"{_path(collection)}/layout"
        return read_layout(
            await self._connection.ask(
                "GET", path, params=_without_none({"first": first}), accept=_RAW
            )
        )

    async def layout_items(
        self,
        collection: str,
        *,
        positions: Sequence[int] | None,
        polygon: Sequence[Sequence[float]] | None,
        condition: Mapping[str, Any] | None,
        limit: int,
    ) -> LayoutItems:
        selection = {
            "positions": None if positions is None else [*positions],
            "polygon": None if polygon is None else [[*corner] for corner in polygon],
            "filter": condition,
        }
        path = f"{_path(collection)}/layout/items"
        return read_layout_items(
            await self._post(path, json={**_without_none(selection), "limit": limit})
        )

    async def delete_items(self, collection: str, keys: Sequence[str]) -> list[DeletedItem]:
        path = f"{_path(collection)}/delete"
        return read_deleted(await self._post(path, json={"ids": [*keys]}))

    async def embed(self, images: Images) -> Answer[Row]:
        """Returns the rows as float32 where every image can be used; otherwise reads JSON, which
        also has each error.
        """
        return await _of_sendable(images, self._embed, bytes)

    async def embed_texts(self, texts: Texts) -> Answer[Row]:
        """Returns the rows as float32 where every text can be used, as `embed` does."""
        return await _of_sendable(texts.items, self._embed_texts, str)

    async def classify(
        self,
        batch: Batch,
        *,
        names: Sequence[str],
        templates: str | Sequence[str] | None,
        top: int,
    ) -> Answer[list[FittingName]]:
        options = _without_none({"names": [*names], "templates": templates, "top": top})
        if isinstance(batch, np.ndarray):
            content = {**options, "embeddings": batch.tolist()}
            return read_classified(await self._post("/v1/classify", json=content), len(batch))
        assert isinstance(batch, list)
        form = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in options.items()
        }

        async def ask(images: list[bytes]) -> Answer[list[FittingName]]:
            sent = await self._post("/v1/classify", images=images, form=form)
            return read_classified(sent, len(images))

        return await _of_sendable(batch, ask, bytes)

    async def labels(
        self, batch: Batch, *, top: int, threshold: float | None, mode: LabelMode, examples: int
    ) -> Answer[list[Label]]:
        options = {"top": top, "mode": mode, "threshold": threshold, "examples": examples or None}
        return await self._look_up("/v1/labels", _without_none(options), batch, read_labeled)

    async def search(
        self,
        batch: Batch,
        *,
        collection: str,
        top: int,
        condition: Mapping[str, Any] | None,
        threshold: float | None,
        exact: bool,
        metadata: bool,
        without: Mapping[str, Any] | None,
    ) -> Answer[list[ItemMatch]]:
        options = {
            "top": top,
            "filter": None if condition is None else json.dumps(condition),
            "threshold": threshold,
            "exact": "true" if exact else None,
            "metadata": None if metadata else "false",
            "without": None if without is None else json.dumps(without),
        }
        return await self._look_up(
            f"{_path(collection)}/search", _without_none(options), batch, read_found
        )

    async def collections(self) -> list[DescribedCollection]:
        collections: list[DescribedCollection] = []
        params: dict[str, str] = {}
        while True:
            answer = await self._connection.ask("GET", "/v1/collections", params=params)
            page = read_collections(answer)
            collections += page.collections
            if page.next is None:
                return collections
            params = {"cursor": page.next}

    async def collection(self, name: str) -> DescribedCollection:
        return read_collection(await self._connection.ask("GET", _path(name)))

    async def create_collection(self, name: str, *, recall: float | None) -> DescribedCollection:
        return read_collection(
            await self._connection.ask("PUT", _path(name), json=_without_none({"recall": recall}))
        )

    async def delete_collection(self, name: str) -> None:
        await self._connection.ask("DELETE", _path(name))

    async def add(self, additions: Additions, *, collection: str) -> Answer[str]:
        path, batch = f"{_path(collection)}/items", additions.batch
        additions_in_order = zip(additions.ids, additions.metadata, batch, strict=True)
        if isinstance(batch, np.ndarray):
            items = [
                {"id": key, "metadata": {**about}, "embedding": row.tolist()}
                for key, about, row in additions_in_order
            ]
            return read_added(await self._post(path, json={"items": items}), len(batch))
        sendable = [
            {"id": key, "metadata": {**about}}
            for key, about, image in additions_in_order
            if isinstance(image, bytes)
        ]

        async def ask(images: list[bytes]) -> Answer[str]:
            form = {"items": json.dumps(sendable)}
            return read_added(await self._post(path, images=images, form=form), len(images))

        assert isinstance(batch, list)
        return await _of_sendable(batch, ask, bytes)

    async def item(self, collection: str, key: str) -> Item:
        return read_item(
            await self._connection.ask("GET", _path(collection, key), params={"embedding": "true"})
        )

    async def update_item(self, collection: str, key: str, metadata: Mapping[str, Any]) -> None:
        await self._connection.ask("PATCH", _path(collection, key), json={"metadata": {**metadata}})

    async def delete_item(self, collection: str, key: str) -> None:
        await self._connection.ask("DELETE", _path(collection, key))

    async def duplicates(self, collection: str, *, similarity: float | None) -> list[list[str]]:
        return read_groups(
            await self._post(f"{_path(collection)}/duplicates", json={"similarity": similarity})
        )

    async def _embed(self, images: list[bytes]) -> Answer[Row]:
        try:
            return read_rows(
                await self._post("/v1/images/embed", images=images, accept=_RAW), len(images)
            )
        except RefusedInput as refused:
            if refused.problem.index is None:
                raise
        return read_embedded(await self._post("/v1/images/embed", images=images), len(images))

    async def _embed_texts(self, texts: list[str]) -> Answer[Row]:
        content = {"texts": texts}
        try:
            return read_rows(
                await self._post("/v1/texts/embed", json=content, accept=_RAW), len(texts)
            )
        except RefusedInput as refused:
            if refused.problem.index is None:
                raise
        return read_embedded_texts(await self._post("/v1/texts/embed", json=content), len(texts))

    async def _look_up(
        self, path: str, params: dict[str, Any], batch: Batch, read: _Read[_Value]
    ) -> Answer[_Value]:
        if isinstance(batch, str):
            return read(await self._post(path, params=params, json={"id": batch}), 1)
        if isinstance(batch, np.ndarray):
            return read(
                await self._post(path, params=params, json={"embeddings": batch.tolist()}),
                len(batch),
            )

        if isinstance(batch, Texts):

            async def look_up(texts: list[str]) -> Answer[_Value]:
                sent = await self._post(path, params=params, json={"texts": texts})
                return read(sent, len(texts), of_texts=True)

            return await _of_sendable(batch.items, look_up, str)

        async def ask(images: list[bytes]) -> Answer[_Value]:
            return read(await self._post(path, params=params, images=images), len(images))

        return await _of_sendable(batch, ask, bytes)

    async def _post(self, path: str, **sent: Any) -> httpx.Response:
        try:
            return await self._connection.ask("POST", path, **sent)
        except RefusedInput as refused:
            if refused.problem.status == _TOO_LARGE:
                self._info = None  # a restarted server may have other limits
            raise


async def _first(
    num: int, page: Callable[[str | None, int], Awaitable[tuple[list[_Value], str | None]]]
) -> list[_Value]:
    """Returns the first `num` entries of a list that is read page by page."""
    entries_so_far: list[_Value] = []
    cursor: str | None = None
    while len(entries_so_far) < num:
        entries, cursor = await page(cursor, min(num - len(entries_so_far), _PAGE))
        entries_so_far += entries
        if cursor is None:
            break
    return entries_so_far


def _path(collection: str, key: str | None = None) -> str:
    parts = [
        "/v1/collections",
        encode_name(collection),
        *([] if key is None else ["items", encode_name(key)]),
    ]
    return "/".join(parts)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


async def _of_sendable(
    items: Sequence[_Sent | Rejection],
    ask: Callable[[list[_Sent]], Awaitable[Answer[_Value]]],
    kind: type[_Sent],
) -> Answer[_Value]:
    """Returns the answer for the items that can be sent, and puts the errors of the others in their
    positions. kind: the type of those that can be sent.
    """
    sendable = [item for item in items if isinstance(item, kind)]
    if not sendable:
        return Answer([item for item in items if isinstance(item, Rejection)], None)
    answer = await ask(sendable)
    answered = iter(answer.items)
    return Answer(
        [item if isinstance(item, Rejection) else next(answered) for item in items], answer.origin
    )
