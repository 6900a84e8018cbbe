"""Collections from one place into another: a store behind a URL, a folder, a file.

The same command goes on where it was stopped: items that are there are `unchanged`. What is in the
target and not in the source stays.
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

_BLOCK_ROWS = 2048  # of one transaction in a store


@dataclass(frozen=True)
class CopiedItems:
    """The items to copy, and what they are of."""

    fingerprint: Fingerprint
    dimension: int
    num_items: int
    blocks: Iterator[list[Item]]


def is_copy(source: str | Path, out: str | Path) -> bool:
    """Tells whether one of both is a store, or the source is a collection."""
    places = (str(source), str(out))
    return any(map(is_store, places)) or (source != out and (Path(source) / LEDGER).is_file())


def copy_items(
    source: str, out: str, reporter: Stages, *, recall: float | None, thumbnails: bool = True
) -> Description:
    """Puts all items of embeddings, a parquet file or a collection into the collection at `out`,
    new or of the same model, and indexes them. thumbnails: those of a collection are copied.
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
            facts = collection.describe()
            blocks = collection.items(_BLOCK_ROWS)
            if thumbnails:
                blocks = (_with_thumbnails(collection, block) for block in blocks)
            yield CopiedItems(collection.fingerprint, collection.dimension, facts.items, blocks)
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
    pictures = collection.read_thumbnails([item.id for item in items])
    return [replace(item, thumbnail=pictures.get(item.id)) for item in items]


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
                f"{out} exists with a recall of {collection.recall_target:g}, got --recall"
                f" {recall:g}",
                remedy="leave --recall out, or give another directory",
            )
        yield collection
