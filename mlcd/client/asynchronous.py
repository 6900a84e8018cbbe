"""The client for programs with an asyncio event loop."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from mlcd.client.base import Ask, BaseClient, check_one_given, checked_rows
from mlcd.client.batch_jobs import AsyncJobs
from mlcd.client.batches import Adder, Additions, Batch, Images, answers_async, rows_in_batches
from mlcd.client.call import Call
from mlcd.client.reading import origin_of
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
    Row,
)
from mlcd.client.text_batches import Texts, check_texts
from mlcd.errors import Rejection
from mlcd.image_bytes import ImageInput, check_images, image_bytes
from mlcd.wire.found_items import LayoutItems
from mlcd.wire.nearest_centers import Label, LabelMode, ListedCenter, Member, RenamedCenter
from mlcd.wire.served_model import Info
from mlcd.wire.stored_items import DeletedItem, DescribedCollection

ImageSeries = Iterable[ImageInput] | AsyncIterable[ImageInput]
TextSeries = Iterable[str] | AsyncIterable[str]
_Batch = TypeVar("_Batch")
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


class AsyncClient(BaseClient):
    """The asynchronous form of `Client`, to be used from one event loop; a series of images may be
    asynchronous too.
    """

    async def embed(self, images: ImageSeries, *, strict: bool = False) -> Embedded:
        check_images(images)
        items, origin = await self._gathered(self._cut(images), self._server.embed, strict=strict)
        return Embedded.of(items, origin, dimension=(await self._server.known_info()).dimension)

    def embed_each(
        self, images: ImageSeries, *, strict: bool = False
    ) -> AsyncGenerator[Row | Rejection, None]:
        check_images(images)
        return self._each(self._call(strict=strict), self._cut(images), self._server.embed)

    async def embed_texts(self, texts: TextSeries, *, strict: bool = False) -> Embedded:
        check_texts(texts)
        items, origin = await self._gathered(
            self._cut_texts(texts), self._server.embed_texts, strict=strict
        )
        return Embedded.of(items, origin, dimension=(await self._server.known_info()).dimension)

    def embed_texts_each(
        self, texts: TextSeries, *, strict: bool = False
    ) -> AsyncGenerator[Row | Rejection, None]:
        check_texts(texts)
        return self._each(
            self._call(strict=strict), self._cut_texts(texts), self._server.embed_texts
        )

    async def classify(
        self,
        images: ImageSeries | None = None,
        *,
        names: Sequence[str],
        embeddings: ArrayLike | None = None,
        templates: str | Sequence[str] | None = None,
        top: int = 10,
        strict: bool = False,
    ) -> Classified:
        check_one_given(images=images, embeddings=embeddings)
        check_texts(names)
        ask = partial(self._server.classify, names=names, templates=templates, top=top)
        batches = self._batches(images, embeddings)
        return Classified.of(*await self._gathered(batches, ask, strict=strict))

    async def labels(
        self,
        images: ImageSeries | None = None,
        *,
        texts: TextSeries | None = None,
        embeddings: ArrayLike | None = None,
        top: int = 8,
        threshold: float | None = None,
        mode: LabelMode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> Labeled:
        check_one_given(images=images, texts=texts, embeddings=embeddings)
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        batches = self._batches(images, embeddings, texts=texts)
        return Labeled.of(*await self._gathered(batches, ask, strict=strict))

    def labels_each(
        self,
        images: ImageSeries,
        *,
        top: int = 8,
        threshold: float | None = None,
        mode: LabelMode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> AsyncGenerator[list[Label] | Rejection, None]:
        check_images(images)
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        return self._each(self._call(strict=strict), self._cut(images), ask)

    async def search(
        self,
        collection: str,
        images: ImageSeries | None = None,
        *,
        text: str | None = None,
        texts: TextSeries | None = None,
        embeddings: ArrayLike | None = None,
        key: str | None = None,
        top: int = 10,
        # named like the field of the request
        filter: Mapping[str, Any] | None = None,  # noqa: A002
        threshold: float | None = None,
        exact: bool = False,
        metadata: bool = True,
        without: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> Found:
        ask = partial(
            self._server.search,
            collection=collection,
            top=top,
            condition=filter,
            threshold=threshold,
            exact=exact,
            metadata=metadata,
            without=without,
        )
        check_one_given(images=images, text=text, texts=texts, embeddings=embeddings, key=key)
        batches = self._batches(images, embeddings, key, text=text, texts=texts)
        return Found.of(*await self._gathered(batches, ask, strict=strict))

    async def collections(self) -> list[DescribedCollection]:
        return await self._server.collections()

    async def collection(self, name: str) -> DescribedCollection:
        return await self._server.collection(name)

    async def create_collection(
        self, name: str, *, recall: float | None = None
    ) -> DescribedCollection:
        return await self._server.create_collection(name, recall=recall)

    async def delete_collection(self, name: str) -> None:
        await self._server.delete_collection(name)

    async def add(
        self,
        collection: str,
        ids: Sequence[str],
        images: ImageSeries | None = None,
        *,
        embeddings: ArrayLike | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> Added:
        additions = self._additions(Adder(ids, metadata), images, embeddings)
        return Added.of(
            *await self._gathered(
                additions, partial(self._server.add, collection=collection), strict=strict
            )
        )

    async def item(self, collection: str, key: str) -> Item:
        return await self._server.item(collection, key)

    async def update_item(self, collection: str, key: str, metadata: Mapping[str, Any]) -> None:
        await self._server.update_item(collection, key, metadata)

    async def delete_item(self, collection: str, key: str) -> None:
        await self._server.delete_item(collection, key)

    async def duplicates(
        self, collection: str, *, similarity: float | None = None
    ) -> list[list[str]]:
        return await self._server.duplicates(collection, similarity=similarity)

    async def center(self, center: int) -> Center:
        return await self._server.center(center)

    async def rename_center(self, center: int, name: str | None) -> RenamedCenter:
        return await self._server.rename_center(center, name)

    async def delete_items(self, collection: str, keys: Sequence[str]) -> list[DeletedItem]:
        return await self._server.delete_items(collection, keys)

    async def thumbnail(self, collection: str, key: str) -> bytes:
        return await self._server.thumbnail(collection, key)

    async def layout(self, collection: str, *, first: int | None = None) -> Layout:
        return await self._server.layout(collection, first=first)

    async def layout_items(
        self,
        collection: str,
        *,
        positions: Sequence[int] | None = None,
        polygon: Sequence[Sequence[float]] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as in the contract
        limit: int = 60,
    ) -> LayoutItems:
        return await self._server.layout_items(
            collection, positions=positions, polygon=polygon, condition=filter, limit=limit
        )

    async def centers(
        self,
        collection: str | None = None,
        *,
        num: int = 60,
        sort: str | None = None,
        name: str | None = None,
        query: str | None = None,
        examples: int = 4,
    ) -> list[ListedCenter]:
        return await self._server.centers(
            num=num,
            collection=collection,
            sort=sort,
            name=name,
            query=query,
            examples=examples,
        )

    async def members(self, center: int, collection: str, *, num: int = 60) -> list[Member]:
        return await self._server.members(center, collection=collection, num=num)

    async def info(self) -> Info:
        return await self._server.info()

    @property
    def jobs(self) -> AsyncJobs:
        return self._jobs

    async def aclose(self) -> None:
        await self._server.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _gathered(
        self, batches: AsyncIterator[_Batch], ask: Ask[_Batch, _Value], *, strict: bool
    ) -> tuple[list[_Value | Rejection], Origin]:
        call: Call[_Value] = self._call(strict=strict)
        items = [item async for item in self._each(call, batches, ask)]
        return items, call.origin or origin_of(await self._server.known_info())

    async def _each(
        self, call: Call[_Value], batches: AsyncIterator[_Batch], ask: Ask[_Batch, _Value]
    ) -> AsyncGenerator[_Value | Rejection, None]:
        async with aclosing(answers_async(batches, ask, in_flight=self.in_flight)) as answers:
            async for answer in answers:
                for item in call.items(answer):
                    yield item

    async def _batches(
        self,
        images: ImageSeries | None,
        embeddings: ArrayLike | None,
        key: str | None = None,
        *,
        text: str | None = None,
        texts: TextSeries | None = None,
    ) -> AsyncIterator[Batch]:
        if key is not None:
            yield key
        elif text is not None:
            async for some in self._cut_texts([text]):
                yield some
        elif texts is not None:
            check_texts(texts)
            async for some in self._cut_texts(texts):
                yield some
        elif images is not None:
            check_images(images)
            async for batch in self._cut(images):
                yield batch
        else:
            bounds = await self._server.bounds()
            for rows in rows_in_batches(checked_rows(embeddings), num=self._num_items(bounds)):
                yield rows

    async def _additions(
        self, adder: Adder, images: ImageSeries | None, embeddings: ArrayLike | None
    ) -> AsyncIterator[Additions]:
        check_one_given(images=images, embeddings=embeddings)
        async for batch in self._batches(images, embeddings):
            assert not isinstance(batch, str | Texts)
            yield adder.push(batch)
        adder.end()

    async def _cut_texts(self, texts: TextSeries) -> AsyncIterator[Texts]:
        cutter = self._text_cutter(await self._server.bounds())
        async for text in _series(texts):
            if batch := cutter.push(text):
                yield batch
        if batch := cutter.rest():
            yield batch

    async def _cut(self, images: ImageSeries) -> AsyncIterator[Images]:
        bounds = await self._server.bounds()
        cutter = self._cutter(bounds)
        async for image in _series(images):
            # Encoded before the next image is requested: a caller that yields arrays may reuse one
            # buffer for all.
            data = await asyncio.to_thread(image_bytes, image, max_bytes=bounds.max_image_bytes)
            if batch := cutter.push(data):
                yield batch
        if batch := cutter.rest():
            yield batch


async def _series(items: Iterable[_Item] | AsyncIterable[_Item]) -> AsyncIterator[_Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
