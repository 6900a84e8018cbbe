"""The client for programs with an asyncio event loop."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from mlcd.client.base import Ask, check_one_given, check_rows
from mlcd.client.batches import Additions, Batch, IdAssigner, Images, rows_in_batches
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
from mlcd.client.waiting import AsyncBase, AsyncSeries
from mlcd.errors import Rejection
from mlcd.image_bytes import ImageInput, check_images
from mlcd.wire.item_search import LayoutItems
from mlcd.wire.nearest_centers import Label, LabelMode, ListedCenter, Member, RenamedCenter
from mlcd.wire.served_model import Info
from mlcd.wire.stored_items import DeletedItem, DescribedCollection

_Batch = TypeVar("_Batch")
_Value = TypeVar("_Value")


class AsyncClient(AsyncBase):
    async def embed(self, images: AsyncSeries[ImageInput], *, strict: bool = False) -> Embedded:
        """Returns unit rows for a series of images, of any length; images that fail are listed in
        `errors`.

        strict: raise ImageRejected for the first that fails. Raises Conflict where the server's
        model changed in between, and the errors of `mlcd.client.refusals`.
        """
        check_images(images)
        items, origin = await self._gather(
            self._batch_images(images), self._server.embed, strict=strict
        )
        info = await self._wait(self._server.last_info())
        return Embedded.of(items, origin, dimension=info.dimension)

    def embed_each(
        self, images: AsyncSeries[ImageInput], *, strict: bool = False
    ) -> AsyncGenerator[Row | Rejection, None]:
        """Yields what `embed` returns, one row at a time in order.

        It takes images only as far ahead as it has requests in flight.
        """
        check_images(images)
        return self._each(self._call(strict=strict), self._batch_images(images), self._server.embed)

    async def embed_texts(self, texts: AsyncSeries[str], *, strict: bool = False) -> Embedded:
        """Returns unit rows for a series of texts, in the space of the images; texts that fail are
        listed in `errors`.

        strict: raise TextRejected for the first that fails. Raises RefusedInput where the server's
        model embeds images only, and the errors of `embed`.
        """
        check_texts(texts)
        items, origin = await self._gather(
            self._batch_texts(texts), self._server.embed_texts, strict=strict
        )
        info = await self._wait(self._server.last_info())
        return Embedded.of(items, origin, dimension=info.dimension)

    def embed_texts_each(
        self, texts: AsyncSeries[str], *, strict: bool = False
    ) -> AsyncGenerator[Row | Rejection, None]:
        """Yields what `embed_texts` returns, one row at a time in order, as `embed_each` does."""
        check_texts(texts)
        return self._each(
            self._call(strict=strict), self._batch_texts(texts), self._server.embed_texts
        )

    async def classify(
        self,
        images: AsyncSeries[ImageInput] | None = None,
        *,
        names: Sequence[str],
        embeddings: ArrayLike | None = None,
        templates: str | Sequence[str] | None = None,
        top: int = 10,
        strict: bool = False,
    ) -> Classified:
        """Returns the `top` names that fit images, or embeddings [N, D], with their probabilities.

        templates: "simple", "clip", or prompts of your own with the name's place {}; a name then
        stands for the mean of its prompts. Without them it is a text as it is. Raises RefusedInput
        where the server's model embeds images only, and the errors of `embed`.
        """
        check_one_given(images=images, embeddings=embeddings)
        check_texts(names)
        ask = partial(self._server.classify, names=names, templates=templates, top=top)
        batches = self._batches(images, embeddings)
        return Classified.of(*await self._gather(batches, ask, strict=strict))

    async def labels(
        self,
        images: AsyncSeries[ImageInput] | None = None,
        *,
        texts: AsyncSeries[str] | None = None,
        embeddings: ArrayLike | None = None,
        top: int = 8,
        threshold: float | None = None,
        mode: LabelMode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> Labeled:
        """Returns the `top` nearest centers of images, of texts, or of embeddings [N, D].

        threshold: only centers at least so similar. examples: so many of each center, if the
        server has them. Raises RefusedNotFound if the server is without centers, and the errors of
        `embed`.
        """
        check_one_given(images=images, texts=texts, embeddings=embeddings)
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        batches = self._batches(images, embeddings, texts=texts)
        return Labeled.of(*await self._gather(batches, ask, strict=strict))

    def labels_each(
        self,
        images: AsyncSeries[ImageInput],
        *,
        top: int = 8,
        threshold: float | None = None,
        mode: LabelMode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> AsyncGenerator[list[Label] | Rejection, None]:
        """Yields what `labels` returns, one image at a time in order, as `embed_each` does."""
        check_images(images)
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        return self._each(self._call(strict=strict), self._batch_images(images), ask)

    async def search(
        self,
        collection: str,
        images: AsyncSeries[ImageInput] | None = None,
        *,
        text: str | None = None,
        texts: AsyncSeries[str] | None = None,
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
        """Returns the items of a collection most similar to images, to one text or several, to
        embeddings [N, D], or to the indexed item `key`.

        filter: only items that fulfill it. threshold: only items at least so similar. exact:
        compares all items, whatever the index. metadata: False leaves the matches' metadata out,
        where the answer would be too large with them. without: items that the matches are to be
        less like, such as {"ids": ["sea/a.jpg"], "weight": 0.5}.
        """
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
        return Found.of(*await self._gather(batches, ask, strict=strict))

    async def collections(self) -> list[DescribedCollection]:
        """Returns all collections of the server."""
        return await self._wait(self._server.collections())

    async def collection(self, name: str) -> DescribedCollection:
        """Returns one collection in its present state.

        Raises RefusedNotFound; RefusedConflict where it belongs to another model.
        """
        return await self._wait(self._server.collection(name))

    async def create_collection(
        self, name: str, *, recall: float | None = None
    ) -> DescribedCollection:
        """Returns the collection, which is created where it does not exist.

        recall: the recall@10 that its index has to reach.
        """
        return await self._wait(self._server.create_collection(name, recall=recall))

    async def delete_collection(self, name: str) -> None:
        """Deletes a collection with all its items. Raises RefusedNotFound."""
        await self._wait(self._server.delete_collection(name))

    async def add(
        self,
        collection: str,
        ids: Sequence[str],
        images: AsyncSeries[ImageInput] | None = None,
        *,
        embeddings: ArrayLike | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> Added:
        """Adds items, given as images or as embeddings [N, D]; they are on the server's disk when
        it returns.

        An existing item is replaced, metadata included. Raises InvalidInput where there are more or
        fewer ids.
        """
        additions = self._additions(IdAssigner(ids, metadata), images, embeddings)
        return Added.of(
            *await self._gather(
                additions, partial(self._server.add, collection=collection), strict=strict
            )
        )

    async def item(self, collection: str, key: str) -> Item:
        """Returns an item. Raises RefusedNotFound."""
        return await self._wait(self._server.item(collection, key))

    async def update_item(self, collection: str, key: str, metadata: Mapping[str, Any]) -> None:
        """Replaces the item's metadata. Raises RefusedNotFound."""
        await self._wait(self._server.update_item(collection, key, metadata))

    async def delete_item(self, collection: str, key: str) -> None:
        """Deletes an item; no search that begins later finds it. Raises RefusedNotFound."""
        await self._wait(self._server.delete_item(collection, key))

    async def duplicates(
        self, collection: str, *, similarity: float | None = None
    ) -> list[list[str]]:
        """Returns groups of ids whose pictures are copies of one, or whose embeddings are at least
        so similar.
        """
        return await self._wait(self._server.duplicates(collection, similarity=similarity))

    async def center(self, center: int) -> Center:
        """Returns one center with its examples and its nearest others."""
        return await self._wait(self._server.center(center))

    async def rename_center(self, center: int, name: str | None) -> RenamedCenter:
        """Gives a center a name, or takes it away; the server has it on its disk when it returns.

        Raises RefusedNotFound; RefusedConflict where the server can only read its centers.
        """
        return await self._wait(self._server.rename_center(center, name))

    async def delete_items(self, collection: str, keys: Sequence[str]) -> list[DeletedItem]:
        """Deletes items; those that do not exist are `missing`."""
        return await self._wait(self._server.delete_items(collection, keys))

    async def thumbnail(self, collection: str, key: str) -> bytes:
        """Returns the thumbnail of an item as WebP. Raises RefusedNotFound."""
        return await self._wait(self._server.thumbnail(collection, key))

    async def layout(self, collection: str, *, first: int | None = None) -> Layout:
        """Returns a point in the plane for each item, or for the first ones."""
        return await self._wait(self._server.layout(collection, first=first))

    async def layout_items(
        self,
        collection: str,
        *,
        positions: Sequence[int] | None = None,
        polygon: Sequence[Sequence[float]] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as in the contract
        limit: int = 60,
    ) -> LayoutItems:
        """Returns the number of items, and the first `limit` of them: those in these rows of the
        layout, inside a polygon, or all.
        """
        return await self._wait(
            self._server.layout_items(
                collection, positions=positions, polygon=polygon, condition=filter, limit=limit
            )
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
        """Returns the first `num` centers, those with most members in the collection first, unless
        `sort` names another order.

        name: a part of the name. query: words, each in the name or one of its alternates.
        """
        return await self._wait(
            self._server.centers(
                num=num,
                collection=collection,
                sort=sort,
                name=name,
                query=query,
                examples=examples,
            )
        )

    async def members(self, center: int, collection: str, *, num: int = 60) -> list[Member]:
        """Returns the first `num` items whose nearest center this is, the nearest first."""
        return await self._wait(self._server.members(center, collection=collection, num=num))

    async def info(self) -> Info:
        """Returns the served model and its limits."""
        return await self._wait(self._server.info())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _gather(
        self, batches: AsyncIterator[_Batch], ask: Ask[_Batch, _Value], *, strict: bool
    ) -> tuple[list[_Value | Rejection], Origin]:
        call: Call[_Value] = self._call(strict=strict)
        pending = self._each(call, batches, ask)
        items = [item async for item in pending]
        return items, call.origin or origin_of(await self._wait(self._server.last_info()))

    async def _each(
        self, call: Call[_Value], batches: AsyncIterator[_Batch], ask: Ask[_Batch, _Value]
    ) -> AsyncGenerator[_Value | Rejection, None]:
        async with aclosing(self._answers(batches, ask)) as answers:
            async for answer in answers:
                for item in call.items(answer):
                    yield item

    async def _batches(
        self,
        images: AsyncSeries[ImageInput] | None,
        embeddings: ArrayLike | None,
        key: str | None = None,
        *,
        text: str | None = None,
        texts: AsyncSeries[str] | None = None,
    ) -> AsyncIterator[Batch]:
        texts = texts if text is None else [text]
        if key is not None:
            yield key
        elif texts is not None:
            check_texts(texts)
            async for text_batch in self._batch_texts(texts):
                yield text_batch
        elif images is not None:
            check_images(images)
            async for batch in self._batch_images(images):
                yield batch
        else:
            bounds = await self._wait(self._server.bounds())
            for rows in rows_in_batches(check_rows(embeddings), num=self._num_items(bounds)):
                yield rows

    async def _additions(
        self,
        assigner: IdAssigner,
        images: AsyncSeries[ImageInput] | None,
        embeddings: ArrayLike | None,
    ) -> AsyncIterator[Additions]:
        check_one_given(images=images, embeddings=embeddings)
        async for batch in self._batches(images, embeddings):
            assert not isinstance(batch, str | Texts)
            yield assigner.push(batch)
        assigner.end()

    async def _batch_texts(self, texts: AsyncSeries[str]) -> AsyncIterator[Texts]:
        batcher = self._text_batcher(await self._wait(self._server.bounds()))
        async for text in self._series(texts):
            if batch := batcher.push(text):
                yield batch
        if batch := batcher.take_rest():
            yield batch

    async def _batch_images(self, images: AsyncSeries[ImageInput]) -> AsyncIterator[Images]:
        bounds = await self._wait(self._server.bounds())
        batcher = self._image_batcher(bounds)
        async for image in self._series(images):
            # Encoded before the next image is requested: a caller that yields arrays may reuse one
            # buffer for all.
            data = await self._encode(image, max_bytes=bounds.max_image_bytes)
            if batch := batcher.push(data):
                yield batch
        if batch := batcher.take_rest():
            yield batch
