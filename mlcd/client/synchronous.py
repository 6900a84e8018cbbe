"""The client for programs without an event loop."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from mlcd.client.answers import (
    Added,
    Answer,
    Center,
    Collection,
    Embedded,
    Found,
    Info,
    Item,
    Label,
    Labeled,
    Mode,
    Origin,
    Row,
)
from mlcd.client.base import Ask, BaseClient, check_one_given, checked_rows
from mlcd.client.batches import Adder, Additions, Batch, Images, answers_sync, rows_in_batches
from mlcd.client.call import Call
from mlcd.client.images import ImageInput, check_images, image_bytes
from mlcd.client.jobs import Jobs
from mlcd.client.loop import LoopThread
from mlcd.errors import ImageRejected

_Batch = TypeVar("_Batch")
_Value = TypeVar("_Value")


@dataclass(eq=False, repr=False)
class Client(BaseClient):
    """Requests run in a thread of the client's own; images are taken from the caller's series in the caller's.

    Threads may share a client. Close it, or use it in a `with`.
    """

    _loop: LoopThread = field(init=False)

    def __post_init__(self, *given: Any) -> None:
        super().__post_init__(*given)
        self._loop = LoopThread(self._server.aclose)

    def embed(self, images: Iterable[ImageInput], *, strict: bool = False) -> Embedded:
        """Unit rows of a series of images, of any length; those that fail are listed in `errors`.

        strict: raise ImageRejected for the first that fails. Raises Conflict where the server's model changed
        in between, and the errors of `mlcd.client.problems`.
        """
        check_images(images)
        items, origin = self._gathered(self._cut(images), self._server.embed, strict=strict)
        return Embedded.of(
            items, origin, dimension=self._loop.run(self._server.known_info()).dimension
        )

    def embed_each(
        self, images: Iterable[ImageInput], *, strict: bool = False
    ) -> Generator[Row | ImageRejected, None, None]:
        """As `embed`, one by one in order: takes images only as far ahead as it has requests in flight."""
        check_images(images)
        return self._each(self._call(strict=strict), self._cut(images), self._server.embed)

    def labels(
        self,
        images: Iterable[ImageInput] | None = None,
        *,
        embeddings: ArrayLike | None = None,
        top: int = 8,
        threshold: float | None = None,
        mode: Mode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> Labeled:
        """The `top` nearest centers of images, or of embeddings [N, D]; with threshold only those so similar; with so
        many examples of each as the server has.

        Raises RefusedNotFound where the server has no centers; else as `embed`.
        """
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        return Labeled.of(*self._gathered(self._batches(images, embeddings), ask, strict=strict))

    def labels_each(
        self,
        images: Iterable[ImageInput],
        *,
        top: int = 8,
        threshold: float | None = None,
        mode: Mode = "exact",
        examples: int = 0,
        strict: bool = False,
    ) -> Generator[list[Label] | ImageRejected, None, None]:
        """As `labels`, one by one in order, as `embed_each`."""
        check_images(images)
        ask = partial(
            self._server.labels, top=top, threshold=threshold, mode=mode, examples=examples
        )
        return self._each(self._call(strict=strict), self._cut(images), ask)

    def search(
        self,
        collection: str,
        images: Iterable[ImageInput] | None = None,
        *,
        embeddings: ArrayLike | None = None,
        key: str | None = None,
        top: int = 10,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - the word of the field, as in the request
        threshold: float | None = None,
        exact: bool = False,
        metadata: bool = True,
        strict: bool = False,
    ) -> Found:
        """The items of a collection most similar to images, to embeddings [N, D], or to the indexed item `key`: those
        that fulfill the filter and are at least so similar. exact: compare all, whatever the index. metadata: False
        leaves the matches' metadata out, where the answer would be too large with them.
        """
        ask = partial(
            self._server.search,
            collection=collection,
            top=top,
            condition=filter,
            threshold=threshold,
            exact=exact,
            metadata=metadata,
        )
        return Found.of(*self._gathered(self._batches(images, embeddings, key), ask, strict=strict))

    def collections(self) -> list[Collection]:
        """All that the server has."""
        return self._loop.run(self._server.collections())

    def collection(self, name: str) -> Collection:
        """One of them, as it is now. Raises RefusedNotFound; RefusedConflict where it is of another model."""
        return self._loop.run(self._server.collection(name))

    def create_collection(self, name: str, *, recall: float | None = None) -> Collection:
        """The collection, which is made where there is none. recall: recall@10 that its index has to show."""
        return self._loop.run(self._server.create_collection(name, recall=recall))

    def delete_collection(self, name: str) -> None:
        """With all its items, for good. Raises RefusedNotFound."""
        self._loop.run(self._server.delete_collection(name))

    def add(
        self,
        collection: str,
        ids: Sequence[str],
        images: Iterable[ImageInput] | None = None,
        *,
        embeddings: ArrayLike | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> Added:
        """Items that are there afterward, of images or of embeddings [N, D], on the server's disk when this returns.

        One that is there is replaced, metadata included. Raises InvalidInput where there are more or fewer ids.
        """
        additions = self._additions(Adder(ids, metadata), images, embeddings)
        return Added.of(
            *self._gathered(
                additions, partial(self._server.add, collection=collection), strict=strict
            )
        )

    def item(self, collection: str, key: str) -> Item:
        """Raises RefusedNotFound."""
        return self._loop.run(self._server.item(collection, key))

    def update_item(self, collection: str, key: str, metadata: Mapping[str, Any]) -> None:
        """Other metadata in place of the item's. Raises RefusedNotFound."""
        self._loop.run(self._server.update_item(collection, key, metadata))

    def delete_item(self, collection: str, key: str) -> None:
        """Found by no search that begins after this returns. Raises RefusedNotFound."""
        self._loop.run(self._server.delete_item(collection, key))

    def duplicates(self, collection: str, *, similarity: float = 0.95) -> list[list[str]]:
        """Groups of ids whose embeddings are at least so similar."""
        return self._loop.run(self._server.duplicates(collection, similarity=similarity))

    def center(self, center: int) -> Center:
        """What one center stands for."""
        return self._loop.run(self._server.center(center))

    def info(self) -> Info:
        """What is served now, and within which limits."""
        return self._loop.run(self._server.info())

    @property
    def jobs(self) -> Jobs:
        """The batch jobs of the server. Its methods raise RefusedConflict where the server takes no jobs."""
        return Jobs(self._jobs, self._loop)

    def close(self) -> None:
        """Ends what is in flight."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _gathered(
        self, batches: Iterator[_Batch], ask: Ask[_Batch, _Value], *, strict: bool
    ) -> tuple[list[_Value | ImageRejected], Origin]:
        call: Call[_Value] = self._call(strict=strict)
        each = self._each(call, batches, ask)
        return list(each), call.origin or self._loop.run(self._server.known_info()).origin

    def _each(
        self, call: Call[_Value], batches: Iterator[_Batch], ask: Ask[_Batch, _Value]
    ) -> Generator[_Value | ImageRejected, None, None]:
        def start(batch: _Batch) -> Future[Answer[_Value]]:
            return self._loop.start(ask(batch))

        with closing(answers_sync(batches, start, in_flight=self.in_flight)) as answers:
            for answer in answers:
                yield from call.items(answer)

    def _batches(
        self,
        images: Iterable[ImageInput] | None,
        embeddings: ArrayLike | None,
        key: str | None = None,
    ) -> Iterator[Batch]:
        check_one_given(images=images, embeddings=embeddings, key=key)
        if key is not None:
            yield key
        elif images is not None:
            check_images(images)
            yield from self._cut(images)
        else:
            bounds = self._loop.run(self._server.bounds())
            yield from rows_in_batches(checked_rows(embeddings), num=self._num_items(bounds))

    def _additions(
        self, adder: Adder, images: Iterable[ImageInput] | None, embeddings: ArrayLike | None
    ) -> Iterator[Additions]:
        for batch in self._batches(images, embeddings):
            assert not isinstance(batch, str)
            yield adder.push(batch)
        adder.end()

    def _cut(self, images: Iterable[ImageInput]) -> Iterator[Images]:
        bounds = self._loop.run(self._server.bounds())
        cutter = self._cutter(bounds)
        for image in images:
            if batch := cutter.push(image_bytes(image, max_bytes=bounds.max_image_bytes)):
                yield batch
        if batch := cutter.rest():
            yield batch
