"""Files of vectors that other programs wrote: .npy, .parquet, .safetensors, an index of faiss, a
Lance dataset, or a folder of clip-retrieval or FiftyOne. Rows are read in blocks.
"""

import base64
import bisect
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mlcd.artifacts.manifest import measure
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.extras import install_command

Rows = NDArray[np.floating[Any]]
_KEY_COLUMNS: Final = ("key", "id", "image_path", "path", "filename", "url")
_FORMS: Final = (
    "give a .npy, .parquet, .safetensors or .faiss file, a .lance dataset, or a folder of"
    " clip-retrieval or FiftyOne"
)
_VECTORS, _KEYS = "img_emb/*.npy", "metadata/*.parquet"  # of clip-retrieval
_SAMPLES: Final = "samples.json"  # of FiftyOne
_FIFTYONE_MEDIA: Final = "data/"
_MAX_ARRAY_BYTES: Final = 1 << 20  # of one FiftyOne vector, decompressed


@dataclass(frozen=True)
class VectorFile:
    """Vectors [num_rows, dimension] in one or several files.

    keys: the key of each row; None where the files have none. read: returns rows [start, stop).
    """

    path: Path
    num_rows: int
    dimension: int
    keys: list[str] | None
    read: Callable[[int, int], Rows]


def open_vectors(path: Path, *, column: str | None = None) -> VectorFile:
    """Opens the vectors at `path`.

    column: the parquet or Lance column, the tensor of a .safetensors file, or the field of
    FiftyOne's samples; None where only one has vectors. Raises NotFound, and InvalidInput for files
    of another form.
    """
    if not path.exists():
        raise NotFound(f"no vectors at {path}", remedy=_FORMS)
    if path.is_dir() and path.suffix.lower() != ".lance":
        if (path / _SAMPLES).is_file():
            return _open_fiftyone(path, column)
        return _open_clip_retrieval(path)
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise InvalidInput(f"vectors must be in a file of a known form, got {path}", remedy=_FORMS)
    try:
        return opener(path, column)
    except (OSError, ValueError, EOFError, RuntimeError, pa.ArrowException, SafetensorError) as e:
        raise InvalidInput(f"{path} cannot be read as {path.suffix}: {e}") from e


def digest_of_vectors(path: Path) -> str:
    """Returns the SHA-256 of a file, or of the digests of a folder's vectors and keys."""
    if path.is_file():
        return measure(path).sha256
    if (path / _SAMPLES).is_file():
        return measure(path / _SAMPLES).sha256
    if path.suffix.lower() == ".lance":
        parts = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        parts = [*_numbered(path, _VECTORS), *_numbered(path, _KEYS)]
    digests = "".join(measure(part).sha256 for part in parts)
    return hashlib.sha256(digests.encode()).hexdigest()


def read_keys(path: Path) -> list[str]:
    """Reads keys: the lines of a .txt file, or the key column of a .parquet file."""
    if not path.is_file():
        raise NotFound(f"the file of keys {path} does not exist")
    try:
        if path.suffix == ".parquet":
            keys = _keys_of(pq.ParquetFile(path))
            if keys is None:
                raise InvalidInput(f"{path} must have a column {' or '.join(_KEY_COLUMNS)}")
            return keys
        # not `splitlines`, which divides at U+2028 and its like, too
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInput(f"{path} cannot be read as a file of keys: {error}") from error


def _open_npy(path: Path, column: str | None) -> VectorFile:
    del column
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    _check_rows(path, rows.shape, rows.dtype)
    num_rows, dimension = rows.shape
    return VectorFile(
        path, num_rows, dimension, None, lambda start, stop: np.asarray(rows[start:stop])
    )


def _open_safetensors(path: Path, column: str | None) -> VectorFile:
    with safe_open(path, framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        matrices = [name for name, shape in shapes.items() if len(shape) == 2]
        name = _choose(path, column, matrices, "tensor [N, D]")
        _check_rows(path, shapes[name], file.get_slice(name)[:0].dtype)

    def read(start: int, stop: int) -> Rows:
        with safe_open(path, framework="np") as file:
            rows: Rows = file.get_slice(name)[start:stop]
            return rows

    num_rows, dimension = shapes[name]
    return VectorFile(path, num_rows, dimension, None, read)


def _open_parquet(path: Path, column: str | None) -> VectorFile:
    file = pq.ParquetFile(path, memory_map=True)
    name = _choose(path, column, _vector_columns(file.schema_arrow), "column of float lists")
    starts = [
        0,
        *accumulate(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)),
    ]

    @lru_cache(maxsize=2)
    def group(number: int) -> Rows:
        return _to_rows(path, file.read_row_group(number, columns=[name]).column(0))

    if not starts[-1]:
        raise InvalidInput(f"{path} must have at least 1 row, got 0")
    dimension = group(next(i for i in range(len(starts) - 1) if starts[i + 1])).shape[1]
    return VectorFile(
        path, starts[-1], dimension, _keys_of(file), _from_pieces(path, starts, group)
    )


def _open_lance(path: Path, column: str | None) -> VectorFile:
    """Opens the newest version of a Lance dataset."""
    try:
        import lance
    except ImportError as error:
        raise ConfigInvalid(
            f"{path} needs the package pylance", remedy=install_command("lance")
        ) from error
    dataset = lance.dataset(str(path))
    name = _choose(path, column, _vector_columns(dataset.schema), "column of float lists")
    num_rows = dataset.count_rows()
    if not num_rows:
        raise InvalidInput(f"{path} must have at least 1 row, got 0")

    def read(start: int, stop: int) -> Rows:
        table = dataset.to_table(columns=[name], offset=start, limit=stop - start)
        return _to_rows(path, table.column(0))

    key_column = _key_column(dataset.schema)
    keys = None if key_column is None else dataset.to_table(columns=[key_column]).column(0)
    return VectorFile(
        path,
        num_rows,
        read(0, 1).shape[1],
        None if keys is None else keys.cast(pa.string()).to_pylist(),
        read,
    )


def _open_fiftyone(path: Path, column: str | None) -> VectorFile:
    """Opens FiftyOne's export `FiftyOneDataset`. Files below its `data/` are the keys, or else the
    paths of the samples. A sample without a vector becomes a row of NaN.
    """
    source = path / _SAMPLES
    try:
        samples = json.loads(source.read_bytes())["samples"]
        fields = {name for sample in samples for name, value in sample.items() if _is_array(value)}
        name = _choose(source, column, sorted(fields), "field of vectors")
        arrays = [_read_array(sample.get(name)) for sample in samples]
        keys = [str(sample["filepath"]) for sample in samples]
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{source} cannot be read as FiftyOne's samples: {error!r}") from error
    shapes = {array.shape for array in arrays if array is not None}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        raise InvalidInput(f"the vectors {name} of {source} must have one length")
    dtype = np.result_type(*{array.dtype for array in arrays if array is not None})
    rows = np.full((len(arrays), *shape), np.nan, dtype)
    for row, array in zip(rows, arrays, strict=True):
        if array is not None:
            row[:] = array
    if all(key.startswith(_FIFTYONE_MEDIA) for key in keys):
        keys = [key.removeprefix(_FIFTYONE_MEDIA) for key in keys]
    num_rows, dimension = rows.shape
    return VectorFile(path, num_rows, dimension, keys, lambda start, stop: rows[start:stop])


def _is_array(value: object) -> bool:
    return isinstance(value, dict) and "$binary" in value


def _read_array(value: Any) -> Rows | None:
    """Reads a vector of FiftyOne: an .npy file, compressed by zlib, in base64."""
    if value is None:
        return None
    compressed = base64.b64decode(value["$binary"]["base64"], validate=True)
    data = zlib.decompressobj().decompress(compressed, _MAX_ARRAY_BYTES)
    array: Rows = np.load(io.BytesIO(data), allow_pickle=False)
    if array.dtype.kind != "f":
        raise ValueError(f"vectors must be floats, got {array.dtype}")
    return array


def _vector_columns(schema: pa.Schema) -> list[str]:
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
    return [
        field.name
        for field in schema
        if isinstance(field.type, lists) and pa.types.is_floating(field.type.value_type)
    ]


def _key_column(schema: pa.Schema) -> str | None:
    return next((name for name in _KEY_COLUMNS if name in schema.names), None)


def _to_rows(path: Path, column: pa.ChunkedArray) -> Rows:
    """Returns lists of equal length as rows; a null list becomes a row of NaN."""
    lengths = pc.unique(pc.list_value_length(column).drop_null()).to_pylist()
    if len(lengths) > 1:
        raise InvalidInput(f"the vectors of {path} must have one length, got {sorted(lengths)}")
    values = column.combine_chunks()
    rows = np.full((len(column), *lengths), np.nan, values.type.value_type.to_pandas_dtype())
    rows[np.asarray(pc.is_valid(values))] = (
        pc.list_flatten(values).to_numpy(zero_copy_only=False).reshape(-1, *lengths)
    )
    return rows


def _keys_of(file: pq.ParquetFile) -> list[str] | None:
    name = _key_column(file.schema_arrow)
    if name is None:
        return None
    keys: list[str] = file.read(columns=[name]).column(0).cast(pa.string()).to_pylist()
    return keys


def _open_faiss(path: Path, column: str | None) -> VectorFile:
    """Opens an index that holds its vectors exactly. Its ids become the keys."""
    del column
    import faiss

    whole = faiss.read_index(str(path))
    index, keys = faiss.downcast_index(whole), None
    if isinstance(index, faiss.IndexIDMap):
        keys = [str(number) for number in faiss.vector_to_array(index.id_map)]
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexHNSWFlat):
        index = faiss.downcast_index(index.storage)
    if isinstance(index, faiss.IndexIVFFlat):
        index.make_direct_map()
    elif not isinstance(index, faiss.IndexFlat):
        raise InvalidInput(
            f"{path} must hold its vectors exactly, got {type(index).__name__}",
            remedy="give a Flat, HNSWFlat or IVFFlat index, or the vectors that it was made from",
        )

    def read(start: int, stop: int, owner: Any = whole) -> Rows:
        del owner  # which frees `index` with itself
        rows: Rows = index.reconstruct_n(start, stop - start)
        return rows

    return VectorFile(path, index.ntotal, index.d, keys, read)


def _open_clip_retrieval(path: Path) -> VectorFile:
    """Opens `img_emb/*.npy` with the keys of `metadata/*.parquet`, ordered by their numbers."""
    files, tables = _numbered(path, _VECTORS), _numbered(path, _KEYS)
    if not files:
        raise InvalidInput(f"{path} must have the folder img_emb with .npy files", remedy=_FORMS)
    pieces = [_open_npy(file, None) for file in files]
    keys = [key for table in tables for key in read_keys(table)]
    starts = [0, *accumulate(piece.num_rows for piece in pieces)]
    return VectorFile(
        path,
        starts[-1],
        pieces[0].dimension,
        keys or None,
        _from_pieces(path, starts, lambda number: pieces[number].read(0, pieces[number].num_rows)),
    )


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Returns the matching files, ordered by the numbers at the ends of their names."""

    def order(path: Path) -> tuple[int, str]:
        digits = re.findall(r"\d+", path.stem)
        return int(digits[-1]) if digits else -1, path.name

    return sorted(folder.glob(pattern), key=order)


def _from_pieces(
    path: Path, starts: Sequence[int], piece: Callable[[int], Rows]
) -> Callable[[int, int], Rows]:
    """Returns `VectorFile.read` over pieces. starts: the first row of each, and the number of
    rows.
    """

    def parts(start: int, stop: int) -> Iterator[Rows]:
        number = bisect.bisect_right(starts, start) - 1
        while start < stop:
            end = min(stop, starts[number + 1])
            if end > start:
                yield piece(number)[start - starts[number] : end - starts[number]]
            start, number = end, number + 1

    def read(start: int, stop: int) -> Rows:
        rows = list(parts(start, stop))
        if len({part.shape[1] for part in rows}) > 1:
            raise InvalidInput(f"the vectors of {path} must have one length")
        return np.concatenate(rows)

    return read


def _check_rows(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    if len(shape) != 2 or dtype.kind != "f" or dtype.itemsize > 8:
        raise InvalidInput(
            f"{path} must hold floats of shape [N, D], got {dtype} of shape {list(shape)}"
        )


def _choose(path: Path, wanted: str | None, names: list[str], kind: str) -> str:
    if wanted is not None and wanted in names:
        return wanted
    if wanted is not None:
        raise InvalidInput(f"{path} has no {kind} {wanted}", remedy=f"it has {', '.join(names)}")
    if len(names) != 1:
        raise InvalidInput(
            f"{path} must have one {kind}, got {len(names)}",
            remedy=f"name one with --column: {', '.join(names)}" if names else _FORMS,
        )
    return names[0]


_OPENERS: Final[dict[str, Callable[[Path, str | None], VectorFile]]] = {
    ".npy": _open_npy,
    ".parquet": _open_parquet,
    ".safetensors": _open_safetensors,
    ".faiss": _open_faiss,
    ".index": _open_faiss,
    ".lance": _open_lance,
}
