"""The thumbnails of an index job: a parquet file (key, picture) for each part, beside its
embeddings, so that all workers take part.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft
from mlcd.images.entries import Entry
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import SampleKey

_SCHEMA: Final = pa.schema([("key", pa.string()), ("picture", pa.binary())])
_BATCH: Final = 256


@dataclass(frozen=True)
class ThumbnailChoice:
    """The thumbnails that a collection gets. side: pixels of the longest side. max_bytes: above
    this, items have none.
    """

    side: int
    max_bytes: int


def write_thumbnails(
    draft: Draft,
    part: int,
    thumbnails: Iterable[tuple[Entry, Thumbnail | None]],
    on_each: Callable[[], None],
) -> None:
    """Writes the thumbnails of a part. thumbnails: of its images in order, None for an image
    without.

    `on_each` is called after each image and may raise, to stop: nothing is written then.
    """
    with draft.write(_name(part)) as path, pq.ParquetWriter(path, _SCHEMA) as writer:
        for batch in _batches(thumbnails, on_each):
            columns = {
                "key": list(batch),
                "picture": [thumbnail.data for thumbnail in batch.values()],
            }
            writer.write_table(pa.table(columns, schema=_SCHEMA))


def read_thumbnails(folder: Path, part: int) -> Iterator[dict[SampleKey, Thumbnail]]:
    """Yields the thumbnails of a part by key, some at a time; none where they were not made."""
    path = folder / _name(part)
    if not path.is_file():
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH):
            pictures = map(Thumbnail, batch["picture"].to_pylist())
            yield dict(zip(batch["key"].to_pylist(), pictures, strict=True))


def _name(part: int) -> str:
    return f"thumbnails-{part:05d}.parquet"


def _batches(
    thumbnails: Iterable[tuple[Entry, Thumbnail | None]], on_each: Callable[[], None]
) -> Iterator[dict[SampleKey, Thumbnail]]:
    batch: dict[SampleKey, Thumbnail] = {}
    for entry, picture in thumbnails:
        if picture is not None:
            batch[entry.key] = picture
        if len(batch) >= _BATCH:
            yield batch
            batch = {}
        on_each()
    yield batch
