"""The thumbnails of a collection's items, made from the images behind its embeddings."""

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

_BATCH: Final = 256


@dataclass(frozen=True)
class MadeThumbnails:
    """The outcome of a run.

    items: number with a thumbnail now. unusable: images that cannot be shown. missing: items that
    lack a thumbnail because the source lacks their image. full: the collection takes no more bytes.
    """

    items: int
    unusable: int
    missing: int
    full: bool


def open_images(source: str | Path, images: str | None) -> Source | None:
    """Opens the images that embeddings were made from: those given, or those that the embeddings
    name. Returns None where nothing names any, as for a collection.

    Raises NotFound where they are not where they were.
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
            f"the images of {source} are not at {_name_of(parents[0])} any more",
            remedy="run the command again with --images",
        )
    return open_source(location)


def make_thumbnails(
    out: str, source: Source, reporter: Stages, *, side: int = DEFAULT_SIDE, max_bytes: int
) -> MadeThumbnails:
    """Makes the thumbnails that items of the collection at `out` lack; an item's id is the key of
    its image.

    It continues where an earlier attempt was stopped. max_bytes: bytes of all thumbnails of a
    collection in a folder.
    """
    with _open_collection(out, max_bytes) as collection:
        lacking = set(collection.without_thumbnail())
        entries = [entry for entry in source.entries if entry.key in lacking] if lacking else []
        unusable, batch = 0, dict[str, Thumbnail]()
        with reporter.stage("thumbnails", len(entries)) as meter:
            thumbnails = thumbnails_all(source, entries, side=side, num_threads=available_cores())
            for num, (entry, picture) in enumerate(thumbnails, 1):
                if picture is None:
                    unusable += 1
                else:
                    batch[entry.key] = picture
                if len(batch) >= _BATCH or num == len(entries):
                    collection.add_thumbnails(batch)
                    batch = {}
                    if not collection.takes_thumbnails:
                        break
                meter.advance(1, errors=int(picture is None))
        items = len(collection) - len(collection.without_thumbnail())
        return MadeThumbnails(
            items, unusable, len(lacking) - len(entries), not collection.takes_thumbnails
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
