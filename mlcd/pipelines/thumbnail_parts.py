"""The thumbnails of an index job: a parquet file (key, picture) for each part of the embeddings, so
that all workers of the job make some.
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
_BATCH_IMAGES: Final = 256


@dataclass(frozen=True)
class ThumbnailChoice:
    """Settings for the thumbnails of a collection.

    side: longest side, pixels. max_bytes: limit on all thumbnails; further items get none.
    """

    side: int
    max_bytes: int


def write_thumbnails(
    draft: Draft,
    part: int,
    thumbnails: Iterable[tuple[Entry, Thumbnail | None]],
    on_each: Callable[[], None],
) -> None:
    """Writes the thumbnails of a part.

    thumbnails: (image, its thumbnail or None), in order. on_each: called after each image; if it
    raises, nothing is written.
    """
    with draft.write(_file_name(part)) as path, pq.ParquetWriter(path, _SCHEMA) as writer:
        for batch in _batches(thumbnails, on_each):
            columns = {
                "key": list(batch),
                "picture": [thumbnail.data for thumbnail in batch.values()],
            }
            writer.write_table(pa.table(columns, schema=_SCHEMA))


def read_thumbnails(folder: Path, part: int) -> Iterator[dict[SampleKey, Thumbnail]]:
    """Yields the thumbnails of a part by key, in batches; nothing if they were not made."""
    path = folder / _file_name(part)
    if not path.is_file():
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_IMAGES):
            thumbnails = map(Thumbnail, batch["picture"].to_pylist())
            yield dict(zip(batch["key"].to_pylist(), thumbnails, strict=True))


def _file_name(part: int) -> str:
    return f"thumbnails-{part:05d}.parquet"


def _batches(
    thumbnails: Iterable[tuple[Entry, Thumbnail | None]], on_each: Callable[[], None]
) -> Iterator[dict[SampleKey, Thumbnail]]:
    batch: dict[SampleKey, Thumbnail] = {}
    for entry, thumbnail in thumbnails:
        if thumbnail is not None:
            batch[entry.key] = thumbnail
        if len(batch) >= _BATCH_IMAGES:
            yield batch
            batch = {}
        on_each()
    yield batch
