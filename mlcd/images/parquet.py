"""The source that reads a column of images in parquet files."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.caption_files import CAPTION_COLUMNS, captions_of
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import refuse_fault
from mlcd.images.names import decoded, encoded, printable
from mlcd.images.shard_index import Listing, list_once
from mlcd.images.source import FilesSource, ListingProblem
from mlcd.types import SampleKey

_IMAGE_COLUMNS: Final = ("image", "jpg", "jpeg", "png", "webp", "bytes")
_CLASS_COLUMNS: Final = ("class_name", "label", "class", "cls")
_BATCH_ROWS: Final = 64
_BUFFER_BYTES: Final = 1 << 20
_ROW_DIGITS: Final = 8
# the rows of a parquet file; key is null where the row has none of its own
_ROWS: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("class_name", pa.string()),
        ("size_bytes", pa.int64()),
        ("group", pa.int32()),
        ("row", pa.int32()),
    ]
)


class ParquetSource(FilesSource):
    """A binary image column (or a struct with `bytes`, as Hugging Face writes it); one row group is
    in memory.
    """

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location, filesystem, paths)
        self._lock = threading.Lock()
        self._group: tuple[tuple[str, int], Any] | None = None

    def _list(self) -> Iterator[pa.Table]:
        for path, name in self._names_to_list():
            listing = list_once(self._filesystem, path, partial(self._list_rows, path))
            if listing.damaged:
                self.problems.append(
                    ListingProblem(name, "the parquet file is damaged or cut short")
                )
                continue
            rows = listing.members
            yield pa.table(
                {
                    "key": _keys(rows["key"], name),
                    "class_name": rows["class_name"],
                    "size_bytes": rows["size_bytes"],
                    "path": constant(encoded(path), len(rows)),
                    "group": rows["group"],
                    "row": rows["row"],
                }
            )

    def _list_rows(self, path: str) -> Listing:
        """Lists the rows of a file.

        Sizes help to tell whether a file is the same, and only the images themselves state them:
        all images are read, a few at a time.
        """
        try:
            with self._filesystem.open(path, "rb") as raw:
                # otherwise a column's whole group is in memory
                file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
                batches = [_listed_batch(*batch) for batch in _batches(file, path)]
        except (OSError, pa.ArrowException) as error:
            refuse_fault(path, error)
            return Listing(_ROWS.empty_table(), damaged=True)
        return Listing(pa.Table.from_batches(batches, schema=_ROWS), damaged=False)

    def captions(self) -> Iterator[tuple[SampleKey, str]]:
        for path, name in self._names():
            try:
                with self._filesystem.open(path, "rb") as raw:
                    rows = _captioned_rows(pq.ParquetFile(raw))
            except (OSError, pa.ArrowException) as error:
                refuse_fault(path, error)
                continue  # its images are not listed either
            keys = _keys(rows["key"], name)
            for number, (key, texts) in enumerate(zip(keys, rows["captions"], strict=True)):
                item = f"{printable(path)}, row {number},"
                for text in captions_of(_value(texts, item), item):
                    yield key.as_py(), text

    def _read(self, entry: Entry) -> bytes:
        path, (group, row) = decoded(entry.locator[0]), entry.locator[1:]
        with self._lock:
            if self._group is None or self._group[0] != (path, group):
                self._group = None  # dropped before the next one is in memory
                try:
                    with self._filesystem.open(path, "rb") as raw:
                        file = pq.ParquetFile(raw)
                        column = file.read_row_group(
                            group, columns=[_image_column(file, path)]
                        ).column(0)
                except (OSError, pa.ArrowException) as error:
                    raise ImageRejected("unreadable", "the row group cannot be read") from error
                self._group = ((path, group), _image_bytes(column))
            return self._group[1][row].as_py() or b""


def _batches(file: Any, path: str) -> Iterator[tuple[int, int, Any, Any, Any]]:
    """Yields (row group, first row in it, images, keys, class names) of a few rows each; None for
    missing columns.
    """
    columns = file.schema_arrow.names
    image = _image_column(file, path)
    key = "key" if "key" in columns else None
    class_name = next((column for column in _CLASS_COLUMNS if column in columns), None)
    names = _class_names(file, class_name)
    wanted = [column for column in (image, key, class_name) if column is not None]
    for group in range(file.num_row_groups):
        start = 0
        for batch in file.iter_batches(
            _BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False
        ):
            keys, classes = (
                None if column is None else batch.column(column) for column in (key, class_name)
            )
            yield (
                group,
                start,
                batch.column(image),
                keys,
                classes if names is None else _named(classes, names),
            )
            start += batch.num_rows


def _captioned_rows(file: Any) -> pa.Table:
    """Returns the columns key, null where a row has none of its own, and captions of a file; no
    rows if it has no captions.
    """
    columns = file.schema_arrow.names
    captions = next((column for column in CAPTION_COLUMNS if column in columns), None)
    if captions is None:
        return pa.table({"key": pa.array([], pa.large_string()), "captions": pa.array([])})
    rows = file.read([column for column in ("key", captions) if column in columns])
    keys = _texts(rows["key"] if "key" in columns else None, len(rows))
    return pa.table(
        {
            "key": pa.array([text or None for text in keys], pa.large_string()),
            "captions": rows[captions],
        }
    )


def _value(cell: Any, item: str) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"a caption of {item} is no text", remedy="write the column in UTF-8"
        ) from error


def _keys(own: Any, name: str) -> Any:
    """Returns the keys of all rows of a file: their own, or else the file's name and the row."""
    numbers = pc.utf8_lpad(
        pa.array(np.arange(len(own))).cast(pa.string()), _ROW_DIGITS, padding="0"
    )
    return pc.coalesce(own, pc.binary_join_element_wise(name, numbers, "/"))


def _class_names(file: Any, column: str | None) -> list[str] | None:
    """Returns the names of the numbers in a column of classes, where the file states them as
    Hugging Face does.
    """
    try:
        facts = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"][column]
        return list(map(str, facts["names"])) if facts["_type"] == "ClassLabel" else None
    except (KeyError, ValueError, TypeError):
        return None


def _listed_batch(
    group: int, start: int, images: Any, keys: Any, class_names: Any
) -> pa.RecordBatch:
    num = len(images)
    return pa.record_batch(
        [
            pa.array([text or None for text in _texts(keys, num)], pa.large_string()),
            pa.array(_texts(class_names, num), pa.string()),
            pc.fill_null(pc.binary_length(_image_bytes(images)), 0).cast(pa.int64()),
            pa.array(np.full(num, group), pa.int32()),
            pa.array(np.arange(start, start + num), pa.int32()),
        ],
        schema=_ROWS,
    )


def _named(numbers: Any, names: list[str]) -> Any:
    """Returns the name of each number; null for -1, which marks images without a class, and for
    unnamed numbers.
    """
    known = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
    return pa.array(names, pa.string()).take(pc.if_else(known, numbers, None))


def _image_column(file: Any, path: str) -> str:
    column = next((column for column in _IMAGE_COLUMNS if column in file.schema_arrow.names), None)
    if column is None:
        raise InvalidInput(
            f"{printable(path)} has no image column",
            remedy=f"name it one of {', '.join(_IMAGE_COLUMNS)}",
        )
    return column


def _texts(values: Any, num: int) -> list[str | None]:
    return [
        None if value is None else str(value)
        for value in ([None] * num if values is None else values.to_pylist())
    ]


def _image_bytes(column: Any) -> Any:
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise InvalidInput(
            f"the image column holds {column.type}",
            remedy="it must hold the encoded files, as binary",
        )
    return column
