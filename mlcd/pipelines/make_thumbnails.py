"""Makes thumbnails for the items of a collection from the images of its embeddings."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.manifest import Parent, open_artifact
from mlcd.collections.collection import Collection
from mlcd.collections.folder import LEDGER
from mlcd.collections.places import open_store
from mlcd.collections.port import CollectionPort
from mlcd.collections.store_urls import is_store, split_collection
from mlcd.cores import available_cores
from mlcd.errors import NotFound
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.images.thumbnail import DEFAULT_SIDE, Thumbnail
from mlcd.models.runs import parent_path
from mlcd.progress import Stages

_BATCH_IMAGES: Final = 256


@dataclass(frozen=True)
class MadeThumbnails:
    """The result of a run.

    items: number of items with a thumbnail now. unusable: number of images that cannot be decoded.
    missing: number of items without a thumbnail whose image the source lacks. full: whether the
    limit of bytes was reached.
    """

    items: int
    unusable: int
    missing: int
    full: bool


def open_images(source: str | Path, images: str | None) -> Source | None:
    """Opens the images at `images`, or else the images that the embeddings were made from. Returns
    None if neither is known, such as for a collection.

    Raises NotFound if the images of the embeddings have moved.
    """
    if images is not None:
        return open_source(images)
    folder = Path(source)
    if is_store(str(source)) or not folder.is_dir() or (folder / LEDGER).is_file():
        return None
    artifact = open_artifact(folder, "embeddings", verify_files=False)
    parents = [parent for parent in artifact.parents if parent.role == "images"]
    if not parents:
        return None
    location = parent_path(artifact, parents[0])
    if location is None:
        raise NotFound(
            f"the images of {source} are no longer at {_name_of(parents[0])}",
            remedy="run the command again with --images",
        )
    return open_source(location)


def make_thumbnails(
    out: str, source: Source, reporter: Stages, *, side: int = DEFAULT_SIDE, max_bytes: int
) -> MadeThumbnails:
    """Makes the missing thumbnails of the collection at `out`; an item's id is its image's key.

    A repeated call resumes. max_bytes: limit on all thumbnails of a collection in a folder, bytes.
    """
    with _open_collection(out, max_bytes) as collection:
        missing_ids = set(collection.without_thumbnail())
        entries = (
            [entry for entry in source.entries if entry.key in missing_ids] if missing_ids else []
        )
        unusable, batch = 0, dict[str, Thumbnail]()
        with reporter.stage("thumbnails", len(entries)) as meter:
            thumbnails = thumbnails_all(source, entries, side=side, num_threads=available_cores())
            for num, (entry, thumbnail) in enumerate(thumbnails, 1):
                if thumbnail is None:
                    unusable += 1
                else:
                    batch[entry.key] = thumbnail
                if len(batch) >= _BATCH_IMAGES or num == len(entries):
                    collection.add_thumbnails(batch)
                    batch = {}
                    if not collection.takes_thumbnails:
                        break
                meter.advance(1, errors=int(thumbnail is None))
        items = len(collection) - len(collection.without_thumbnail())
        return MadeThumbnails(
            items, unusable, len(missing_ids) - len(entries), not collection.takes_thumbnails
        )


@contextmanager
def _open_collection(place: str, max_bytes: int) -> Iterator[CollectionPort]:
    if is_store(place):
        url, name = split_collection(place)
        with closing(open_store(url, background=False)) as store:
            yield store.get(name)
        return
    path = Path(place)
    with Collection.open(path, background=False, max_thumbnail_bytes=max_bytes) as collection:
        yield collection


def _name_of(parent: Parent) -> str:
    return Path(parent.path).name or parent.path
