"""Tables with a column of images: parquet and Hugging Face's datasets.

The names of columns are those of published data sets.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.caption_files import CAPTION_COLUMNS, captions_of
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import raise_if_file_system_error
from mlcd.images.names import decode_path, encode_path, printable
from mlcd.images.shard_index import Listing, list_once
from mlcd.images.source import FilesSource, ListingProblem
from mlcd.images.text_columns import CLASS_COLUMNS, TextColumn, check_single

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
_KEY_COLUMN: Final = "key"
_ROW_DIGITS: Final = 8
_MAX_LISTED: Final = 20  # columns in an error message
# the rows of a file; key is null if the table has no key for the row
_ROWS: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("class_name", pa.string()),
        ("size_bytes", pa.int64()),
        ("group", pa.int32()),
        ("row", pa.int32()),
    ]
)


class TableRows(Protocol):
    """An open file of rows, divided into groups; a group is read as a whole."""

    schema: pa.Schema
    num_groups: int

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a group in small batches."""
        ...

    def column(self, group: int, name: str) -> pa.ChunkedArray: ...

    def read(self, columns: Sequence[str]) -> pa.Table: ...


class ColumnsSource(FilesSource):
    """A binary image column (or a struct with `bytes`, as in Hugging Face's datasets) in files.

    Keeps one group of rows in memory.
    """

    def __init__(
        self,
        location: str,
        filesystem: Any,
        paths: list[str],
        part_of: Mapping[str, str] | None = None,
    ) -> None:
        """part_of: the split of each file by its path, such as train or test; class names get it
        as a prefix.
        """
        super().__init__(location, filesystem, paths)
        self._part_of = part_of or {}
        self._url_column: str | None = None
        self._lock = threading.Lock()
        self._group: tuple[tuple[str, int], Any] | None = None

    def use_url_column(self, column: str) -> None:
        """Switches to reading the URLs in a text column instead of images."""
        self._url_column = column

    @abstractmethod
    def _open(self, path: str) -> AbstractContextManager[TableRows]:
        """Opens a file. Raises OSError or ArrowException for a damaged file."""

    def entry_tables(self) -> Iterator[pa.Table]:
        for path, name in self._names_to_list():
            listing = self._listing(path)
            if listing.damaged:
                self.problems.append(ListingProblem(name, "the file is damaged or cut short"))
                continue
            rows = listing.members
            yield pa.table(
                {
                    "key": _keys(rows["key"], name),
                    "class_name": _prepend(self._part_of.get(path), rows["class_name"]),
                    "size_bytes": rows["size_bytes"],
                    "path": constant(encode_path(path), len(rows)),
                    "group": rows["group"],
                    "row": rows["row"],
                }
            )

    def _listing(self, path: str) -> Listing:
        if self._url_column is not None:  # the index stores the sizes of images, not of URLs
            return self._list_rows(path)
        return list_once(self._filesystem, path, partial(self._list_rows, path))

    def _list_rows(self, path: str) -> Listing:
        """Lists the rows of a file.

        Reads all images, in small batches, for their sizes: these help to detect changed files and
        are stored nowhere else.
        """
        try:
            with self._open(path) as rows:
                image = self._column(rows.schema, path)
                batches = [
                    _list_batch(group, start, self._bytes(images, path), keys, class_names)
                    for group, start, images, keys, class_names in _Columns(
                        rows.schema, image, path
                    ).read_batches(rows)
                ]
        except (OSError, pa.ArrowException) as error:
            raise_if_file_system_error(path, error)
            return Listing(_ROWS.empty_table(), damaged=True)
        return Listing(pa.Table.from_batches(batches, schema=_ROWS), damaged=False)

    def captions(self) -> Iterator[tuple[str, str]]:
        for path, name in self._names():
            try:
                with self._open(path) as opened:
                    rows = _read_captions(opened, path)
            except (OSError, pa.ArrowException) as error:
                raise_if_file_system_error(path, error)
                continue  # its images are not listed either
            keys = _keys(rows["key"], name)
            for row_number, (key, texts) in enumerate(zip(keys, rows["captions"], strict=True)):
                item = f"{printable(path)}, row {row_number},"
                for text in captions_of(_to_python(texts, item), item):
                    yield key.as_py(), text

    def _read(self, entry: Entry) -> bytes:
        path, (group, row) = decode_path(entry.locator[0]), entry.locator[1:]
        with self._lock:
            if self._group is None or self._group[0] != (path, group):
                self._group = None  # frees the previous group before reading the next
                try:
                    with self._open(path) as rows:
                        column = rows.column(group, self._column(rows.schema, path))
                except (OSError, pa.ArrowException) as error:
                    raise ImageRejected("unreadable", "the row group cannot be read") from error
                self._group = ((path, group), self._bytes(column, path))
            return self._group[1][row].as_py() or b""

    def _bytes(self, column: Any, path: str) -> Any:
        if self._url_column is None:
            return _image_bytes(column, path)
        return column.cast(pa.large_string()).cast(pa.large_binary())

    def _column(self, schema: pa.Schema, path: str) -> str:
        """Returns the column of images or of URLs. Raises InvalidInput if it is missing."""
        if self._url_column is None:
            return _image_column(schema, path)
        if self._url_column not in schema.names:
            raise InvalidInput(
                f"{printable(path)} lacks the column {self._url_column}",
                remedy=f"give one of {', '.join(schema.names[:_MAX_LISTED])}",
            )
        if not _is_text(schema.field(self._url_column).type):
            raise InvalidInput(
                f"the column {self._url_column} of {printable(path)} must hold texts",
                remedy="give the column of URLs",
            )
        return self._url_column


def _prepend(part: str | None, class_names: Any) -> Any:
    """Returns the class names as folders inside a part of the data set; null stays null."""
    return class_names if part is None else pc.binary_join_element_wise(part, class_names, "/")


class _Columns:
    """The columns of images, keys and classes in a file."""

    def __init__(self, schema: pa.Schema, image: str, path: str) -> None:
        """Raises InvalidInput for keys or classes that cannot be read as text, and for two columns
        of one name.
        """
        check_single(schema, image, path)
        names = set(schema.names)
        label = next((name for name in CLASS_COLUMNS if name in names), None)
        self._image = image
        self._key = TextColumn(schema, _KEY_COLUMN, path) if _KEY_COLUMN in names else None
        self._class = None if label is None else TextColumn(schema, label, path)

    def read_batches(self, rows: TableRows) -> Iterator[tuple[int, int, Any, Any, Any]]:
        """Yields small batches of rows: group, first row in the group, images, keys, class names.

        Keys and class names are large_string, null if missing.
        """
        texts = [column for column in (self._key, self._class) if column is not None]
        column_names = [self._image, *(column.name for column in texts)]
        for group in range(rows.num_groups):
            start = 0
            for batch in rows.batches(group, column_names):
                keys, classes = (_texts(column, batch) for column in (self._key, self._class))
                yield group, start, batch.column(self._image), keys, classes
                start += batch.num_rows


def _read_captions(rows: TableRows, path: str) -> pa.Table:
    """Returns the columns key (null if missing) and captions of a file; an empty table if it has
    no captions.
    """
    columns = rows.schema.names
    captions = next((column for column in CAPTION_COLUMNS if column in columns), None)
    if captions is None:
        return pa.table({"key": pa.array([], pa.large_string()), "captions": pa.array([])})
    check_single(rows.schema, captions, path)
    table = rows.read([column for column in (_KEY_COLUMN, captions) if column in columns])
    key = TextColumn(rows.schema, _KEY_COLUMN, path) if _KEY_COLUMN in columns else None
    return pa.table({"key": _texts(key, table), "captions": table[captions]})


def _texts(column: TextColumn | None, rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """Returns the texts of a column; all null if the column is None."""
    if column is None:
        return pa.nulls(rows.num_rows, pa.large_string())
    return column.read(rows.column(column.name))


def _to_python(cell: Any, item: str) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"a caption must be UTF-8, got other bytes in {item}",
            remedy="write the column in UTF-8",
        ) from error


def _keys(table_keys: Any, name: str) -> Any:
    """Returns the keys of all rows of a file; a null key becomes the file's name and the row."""
    row_numbers = pc.utf8_lpad(
        pa.array(np.arange(len(table_keys))).cast(pa.string()), _ROW_DIGITS, padding="0"
    )
    return pc.coalesce(table_keys, pc.binary_join_element_wise(name, row_numbers, "/"))


def _list_batch(group: int, start: int, images: Any, keys: Any, class_names: Any) -> pa.RecordBatch:
    num = len(images)
    return pa.record_batch(
        [
            keys,
            class_names.cast(pa.string()),
            pc.fill_null(pc.binary_length(images), 0).cast(pa.int64()),
            pa.array(np.full(num, group), pa.int32()),
            pa.array(np.arange(start, start + num), pa.int32()),
        ],
        schema=_ROWS,
    )


def _image_column(schema: pa.Schema, path: str) -> str:
    column = next((column for column in _IMAGE_COLUMNS if column in schema.names), None)
    if column is None:
        raise InvalidInput(
            f"{printable(path)} lacks an image column",
            remedy=f"name it one of {', '.join(_IMAGE_COLUMNS)}; `mlcd embed` and `mlcd label`"
            " fetch images from the URLs of a --url-column",
        )
    return column


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _image_bytes(column: Any, path: str) -> Any:
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    if pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise InvalidInput(
            f"{printable(path)}: the image column must hold encoded files as binary, got"
            f" {column.type}",
        )
    return column
