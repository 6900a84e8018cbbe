"""The thumbnails of a collection's items, made from the images behind its embeddings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.collections.collection import Collection
from mlcd.collections.thumbnail_store import Stored
from mlcd.cores import available_cores
from mlcd.errors import Conflict
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.images.thumbnail import DEFAULT_SIDE, Thumbnail
from mlcd.progress import Stages

_BATCH: Final = 256


@dataclass(frozen=True)
class MadeThumbnails:
    """The outcome of a run.

    stored: what the collection has now. unusable: images that have no thumbnail. missing: items
    without one that the source has no image of.
    """

    stored: Stored | None
    unusable: int
    missing: int


def make_thumbnails(
    path: Path,
    source: Source,
    reporter: Stages,
    *,
    side: int = DEFAULT_SIDE,
    max_bytes: int,
) -> MadeThumbnails:
    """Makes the thumbnails that items of the collection at `path` lack; an item's id is the key of
    its image.

    It continues where an earlier attempt was stopped. Raises Conflict where they would be more than
    `max_bytes`; what fits is kept.
    """
    with Collection.open(path, background=False, max_thumbnail_bytes=max_bytes) as collection:
        lacking = set(collection.without_thumbnail())
        entries = [entry for entry in source.entries if entry.key in lacking] if lacking else []
        unusable, batch = 0, dict[str, Thumbnail]()
        with reporter.stage("thumbnails", len(entries)) as meter:
            made = thumbnails_all(source, entries, side=side, num_threads=available_cores())
            for num, (entry, picture) in enumerate(made, 1):
                if picture is None:
                    unusable += 1
                else:
                    batch[entry.key] = picture
                if len(batch) >= _BATCH or num == len(entries):
                    _keep(collection, batch)
                    batch = {}
                meter.advance(1, errors=int(picture is None))
        stored = collection.described_thumbnails()
    return MadeThumbnails(stored, unusable, len(lacking) - len(entries))


def _keep(collection: Collection, batch: dict[str, Thumbnail]) -> None:
    collection.add_thumbnails(batch)
    stored = collection.described_thumbnails()
    if stored is not None and stored.full:
        raise Conflict(
            f"the thumbnails of {collection.path.name} are full: {stored.items} items have one, of"
            f" {stored.bytes} bytes together, and {stored.max_bytes} are allowed",
            remedy="allow more by --thumbnail-bytes, and by MLCD_THUMBNAILS__MAX_BYTES where it is"
            " served; or delete thumbnails.sqlite and give a smaller --thumbnail-side",
        )
