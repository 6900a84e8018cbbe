"""Copies items into a collection: from and to a store at a URL or a folder, or from a file.

A repeated command resumes: items that the target already has are `unchanged`. Items that only the
target has stay.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.collections.collection import Collection
from mlcd.collections.folder import LEDGER
from mlcd.collections.item import Item
from mlcd.collections.parquet_items import ParquetItems
from mlcd.collections.places import open_store
from mlcd.collections.port import DEFAULT_RECALL, CollectionPort, Description
from mlcd.collections.store_urls import is_store, split_collection
from mlcd.errors import Conflict
from mlcd.pipelines.index import fill, items_of
from mlcd.progress import Stages
from mlcd.types import Fingerprint

_BLOCK_ROWS = 2048  # rows per transaction in a store


@dataclass(frozen=True)
class CopiedItems:
    """The items to copy, their number, and the model and dimension of their rows."""

    fingerprint: Fingerprint
    dimension: int
    num_items: int
    blocks: Iterator[list[Item]]


def is_copy(source: str | Path, out: str | Path) -> bool:
    """Returns whether either is a store, or `source` is another collection than `out`."""
    places = (str(source), str(out))
    return any(map(is_store, places)) or (source != out and (Path(source) / LEDGER).is_file())


def copy_items(
    source: str, out: str, reporter: Stages, *, recall: float | None, thumbnails: bool = True
) -> Description:
    """Adds all items of embeddings, a parquet file or a collection to the collection at `out`, new
    or of the same model, and indexes them.

    thumbnails: also copy the thumbnails of a source collection.
    """
    if source == out:
        with _open_collection(source) as collection:
            return collection.describe()
    with (
        _open_source(source, thumbnails=thumbnails) as items,
        _open_target(out, items, recall) as target,
    ):
        return fill(target, items.blocks, items.num_items, reporter)


@contextmanager
def _open_source(place: str, *, thumbnails: bool) -> Iterator[CopiedItems]:
    with ExitStack() as stack:
        if is_store(place) or (Path(place) / LEDGER).is_file():
            collection = stack.enter_context(_open_collection(place))
            description = collection.describe()
            blocks = collection.items(_BLOCK_ROWS)
            if thumbnails:
                blocks = (_with_thumbnails(collection, block) for block in blocks)
            yield CopiedItems(
                collection.fingerprint, collection.dimension, description.items, blocks
            )
        elif place.endswith(".parquet"):
            file = ParquetItems.open(Path(place))
            yield CopiedItems(file.fingerprint, file.dimension, file.num_items, file.blocks())
        else:
            embeddings = EmbeddingsArtifact.open(Path(place))
            blocks = (
                items_of(embeddings, start, block)
                for start, block in embeddings.blocks(_BLOCK_ROWS)
            )
            yield CopiedItems(
                embeddings.fingerprint, embeddings.dimension, embeddings.num_rows, blocks
            )


def _with_thumbnails(collection: CollectionPort, items: list[Item]) -> list[Item]:
    thumbnails_by_id = collection.read_thumbnails([item.id for item in items])
    return [replace(item, thumbnail=thumbnails_by_id.get(item.id)) for item in items]


@contextmanager
def _open_collection(place: str) -> Iterator[CollectionPort]:
    if not is_store(place):
        with Collection.open(Path(place), background=False, read_only=True) as collection:
            yield collection
        return
    url, name = split_collection(place)
    with closing(open_store(url, background=False)) as store:
        yield store.get(name)


@contextmanager
def _open_target(out: str, items: CopiedItems, recall: float | None) -> Iterator[CollectionPort]:
    if is_store(out):
        url, name = split_collection(out)
        with closing(open_store(url, background=False)) as store:
            yield store.create(
                name, fingerprint=items.fingerprint, dimension=items.dimension, recall=recall
            )[0]
        return
    path = Path(out)
    if not (path / LEDGER).is_file():
        target_recall = DEFAULT_RECALL if recall is None else recall
        Collection.create(
            path, fingerprint=items.fingerprint, dimension=items.dimension, recall=target_recall
        ).close()
    with Collection.open(path, background=False) as collection:
        collection.check_fingerprint(items.fingerprint)
        if recall not in (None, collection.recall_target):
            raise Conflict(
                f"--recall must be that of the existing collection {out}"
                f" ({collection.recall_target:g}), got {recall:g}",
                remedy="leave out --recall, or give another directory",
            )
        yield collection
