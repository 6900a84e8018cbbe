"""Matches rows of tables (captions, labels, splits) with images by their keys.

A row's key is compared unchanged and, if no image has it, in the form of `mlcd.keys.normalize_key`.
Keys without an image are counted, and errors name the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.images.names import printable
from mlcd.keys import normalize_key
from mlcd.types import SampleKey

Keys: TypeAlias = pa.ChunkedArray | Sequence[SampleKey]

_NOT_NORMAL: Final = r"(^|/)\.{0,2}(/|$)"  # a path that `posixpath.normpath` would change
_ALLOW: Final = "pass --allow-unmatched to skip such rows"


@dataclass(frozen=True)
class Unmatched:
    """The keys of a table that match no image.

    num: number of distinct unmatched keys. num_keys: number of distinct keys in the table. first:
    first unmatched key, None if all match.
    """

    num: int = 0
    num_keys: int = 0
    first: str | None = None

    def __str__(self) -> str:
        """Returns the problem as text; callers put the name of the table before it."""
        return f"no image has the key {self.first!r} ({self.num} of {self.num_keys} keys)"

    @property
    def are_all(self) -> bool:
        return self.num == self.num_keys > 0

    def check(self, table: str, images: str, *, may_be_unmatched: bool = False) -> None:
        """Raises InvalidInput if a key matches no image; with may_be_unmatched, only if no key
        matches.
        """
        if not self.num or (may_be_unmatched and not self.are_all):
            return
        hint = (
            "; it contains \\, but keys are written with /"
            if self.are_all and "\\" in str(self.first)
            else ""
        )
        raise InvalidInput(
            f"{table}: no image of {images} has the key {self.first!r} ({self.num} of "
            f"{self.num_keys} keys{hint})",
            remedy="use the keys that `mlcd embed` lists; for a folder, paths relative to it"
            if self.are_all
            else f"give the images that the table was made for, or {_ALLOW}",
        )


@dataclass(frozen=True)
class MatchedKeys:
    """The images of a table's keys.

    indices: int64 [n], index of each key's image, -1 if no image matches.
    """

    indices: NDArray[np.int64]
    unmatched: Unmatched


def match_keys(table_keys: Keys, keys: Keys, table: str) -> MatchedKeys:
    """Matches the n keys of a table with the keys of images.

    Raises InvalidInput for a key that equals no image's key and equals two in the normal form.
    """
    rows, image_keys = _to_array(table_keys), _to_array(keys)
    indices = _find(rows, image_keys)
    missing = np.flatnonzero(indices < 0)
    if len(missing):
        distinct = pc.unique(rows.take(pa.array(missing)))
        normal, normal_image_keys = _normalize(distinct), _normalize(image_keys)
        image_indices = _find(normal, normal_image_keys)
        _check_unambiguous(distinct, normal, image_indices, image_keys, normal_image_keys, table)
        positions = _find(rows.take(pa.array(missing)), pa.chunked_array([distinct]))
        indices[missing] = image_indices[positions]
        unmatched = distinct.filter(pa.array(image_indices < 0))
        first = unmatched[0].as_py() if len(unmatched) else None
        num_keys = pc.count_distinct(rows).as_py()
        return MatchedKeys(indices, Unmatched(len(unmatched), num_keys, first))
    return MatchedKeys(indices, Unmatched(0, pc.count_distinct(rows).as_py()))


def _check_unambiguous(
    table_keys: Any,
    normal: Any,
    indices: NDArray[np.int64],
    image_keys: Any,
    normal_image_keys: Any,
    table: str,
) -> None:
    """Raises InvalidInput if a key that is matched in the normal form matches two images."""
    matched = normal_image_keys.take(pa.array(np.unique(indices[indices >= 0])))
    is_candidate = pc.is_in(normal_image_keys, value_set=matched)
    if pc.sum(is_candidate).as_py() == len(matched) or not len(matched):
        return
    candidates = np.flatnonzero(np.asarray(is_candidate))
    first_index: dict[str, int] = {}
    for index, name in zip(
        candidates.tolist(), normal_image_keys.take(pa.array(candidates)).to_pylist(), strict=True
    ):
        other = first_index.setdefault(name, index)
        if other != index:
            row = pc.index(normal, name).as_py()
            raise InvalidInput(
                # ASCII escapes, because different spellings of a letter look the same
                f"{table}: {table_keys[row].as_py()!a} may be {image_keys[other].as_py()!a} or "
                f"{image_keys[index].as_py()!a}",
                remedy="write the exact key of one of these images",
            )


def _find(values: Any, keys: Any) -> NDArray[np.int64]:
    """Returns the index of each value in `keys`, -1 if it is missing."""
    indices = pc.fill_null(pc.index_in(values, value_set=keys), -1)
    return np.asarray(indices).astype(np.int64)


def _to_array(keys: Keys) -> Any:
    if isinstance(keys, pa.ChunkedArray):
        return keys
    try:
        return pa.chunked_array([pa.array(keys, pa.large_string())])
    except UnicodeEncodeError:  # JSON contains surrogates for names that are not valid UTF-8
        return pa.chunked_array([pa.array([_storable(key) for key in keys], pa.large_string())])


def _storable(key: str) -> str:
    try:
        return printable(key)
    except UnicodeEncodeError:  # half a surrogate pair, which cannot be in a file name
        return key.encode("utf-8", "backslashreplace").decode()


def _normalize(keys: Any) -> Any:
    """Returns the keys in the normal form."""
    may_change = pc.or_(
        pc.invert(pc.string_is_ascii(keys)), pc.match_substring_regex(keys, _NOT_NORMAL)
    )
    indices = np.flatnonzero(np.asarray(may_change))
    if not len(indices):
        return keys
    normalized = [normalize_key(key) for key in keys.take(pa.array(indices)).to_pylist()]
    return pc.replace_with_mask(
        _combine(keys), _combine(may_change), pa.array(normalized, pa.large_string())
    )


def _combine(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
