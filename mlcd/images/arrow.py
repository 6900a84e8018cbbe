"""The source for datasets written by Hugging Face's `save_to_disk`.

    NAME/dataset_dict.json           {"splits": ["train", "test"]}, if it has parts
    NAME/train/state.json            {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    NAME/train/data-00000-of-00001.arrow

Without parts, state.json lies in NAME itself. The files are memory-mapped, so they must be on this
machine. The package datasets is not needed.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import pyarrow as pa

from mlcd.errors import InvalidInput, NotFound
from mlcd.images.dataset_parts import part_folder
from mlcd.images.image_columns import ColumnsSource, TableRows

_PARTS: Final = "dataset_dict.json"
_STATE: Final = "state.json"
_SAVE_AGAIN: Final = "save the dataset again with save_to_disk"


@final
class ArrowSource(ColumnsSource):
    """A source of Arrow streams; each stream is one group."""

    @contextmanager
    def _open(self, path: str) -> Iterator[TableRows]:
        with pa.memory_map(path) as mapped, pa.ipc.open_stream(mapped) as reader:
            yield _Stream(_validate(reader.read_all()))


def _validate(table: pa.Table) -> pa.Table:
    """Returns the table. Raises ArrowInvalid if an offset leads outside of the file.

    The Arrow reader does not check offsets and names.
    """
    try:
        table.validate(full=True)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid("a column's name must be UTF-8") from error
    return table


class _Stream:
    """The `TableRows` protocol over a mapped table."""

    num_groups = 1

    def __init__(self, table: pa.Table) -> None:
        self._table, self.schema = table, table.schema

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        del group
        yield from self._table.select(list(columns)).to_batches()

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        del group
        return self._table.column(name)

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self._table.select(list(columns))


def find_saved(location: str, filesystem: Any, path: str) -> ArrowSource | None:
    """Returns the source of the dataset saved at a folder; None if the folder has none.

    Raises InvalidInput if the dataset cannot be read, and NotFound naming a missing file.
    """
    has_parts = filesystem.isfile(f"{path}/{_PARTS}")
    if not has_parts and not filesystem.isfile(f"{path}/{_STATE}"):
        return None
    if "file" not in _protocols(filesystem):
        raise InvalidInput(
            f"a saved dataset must be on this machine, got {location}", remedy="copy it"
        )
    parts = _read_list(filesystem, f"{path}/{_PARTS}", "splits") if has_parts else [""]
    files = {
        file: part_folder(part)
        for part in map(str, parts)
        for file in _files(filesystem, f"{path}/{part}".rstrip("/"))
    }
    part_of = files if has_parts and len(set(files.values())) > 1 else {}
    return ArrowSource(location, filesystem, sorted(files), part_of)


def _files(filesystem: Any, folder: str) -> list[str]:
    state = f"{folder}/{_STATE}"
    if not filesystem.isfile(state):
        raise NotFound(f"{state} does not exist", remedy=_SAVE_AGAIN)
    state_content = _read(filesystem, state)
    if state_content.get("_indices_data_files"):
        raise InvalidInput(
            f"{folder} keeps a selection of rows apart",
            remedy="save the result of flatten_indices() with save_to_disk",
        )
    files = []
    for file in _read_list(filesystem, state, "_data_files"):
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or not name or "/" in name:
            raise InvalidInput(f"{state} must name files beside it", remedy=_SAVE_AGAIN)
        if not filesystem.isfile(f"{folder}/{name}"):
            raise NotFound(
                f"{folder}/{name} does not exist, but {_STATE} names it", remedy=_SAVE_AGAIN
            )
        files.append(f"{folder}/{name}")
    return files


def _read_list(filesystem: Any, file: str, name: str) -> list[Any]:
    values = _read(filesystem, file).get(name)
    if not isinstance(values, list) or not values:
        raise InvalidInput(f"{file} must hold a list {name}", remedy=_SAVE_AGAIN)
    return values


def _read(filesystem: Any, file: str) -> dict[str, Any]:
    try:
        content = json.loads(filesystem.cat_file(file))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON", remedy=_SAVE_AGAIN) from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} must hold a JSON object", remedy=_SAVE_AGAIN)
    return content


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
