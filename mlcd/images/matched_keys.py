"""Rows of tables beside images (captions, labels, splits), matched with the images by their keys.

One rule for all of them: a row's key is compared as it stands, and only where no image has it, in
the form of `mlcd.keys.normalize_key`. What matches no image is counted, and the first is named.
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
_ALLOW: Final = "pass --allow-unmatched to leave such rows out"


@dataclass(frozen=True)
class Unmatched:
    """The keys of a table that match no image, each counted once.

    num_keys: of the table. first: None where all match.
    """

    num: int = 0
    num_keys: int = 0
    first: str | None = None

    def __str__(self) -> str:
        """Returns the fault for people, after the name of the table."""
        return f"no image has the key {self.first!r} ({self.num} of {self.num_keys} keys)"

    @property
    def are_all(self) -> bool:
        return self.num == self.num_keys > 0

    def check(self, table: str, images: str, *, may_be_unmatched: bool = False) -> None:
        """Raises InvalidInput where a key matches no image; if that is allowed, only where none
        match.
        """
        if not self.num or (may_be_unmatched and not self.are_all):
            return
        hint = (
            "; it is written with \\, and keys with /"
            if self.are_all and "\\" in str(self.first)
            else ""
        )
        raise InvalidInput(
            f"{table}: no image of {images} has the key {self.first!r} ({self.num} of "
            f"{self.num_keys} keys{hint})",
            remedy="keys are as `mlcd embed` lists them, in a folder the path inside of it"
            if self.are_all
            else f"give the images that the table was made for, or {_ALLOW}",
        )


@dataclass(frozen=True)
class MatchedKeys:
    """The images that the keys of a table mean.

    indices: int64 [n], -1 for the key of no image.
    """

    indices: NDArray[np.int64]
    unmatched: Unmatched


def match_keys(table_keys: Keys, keys: Keys, table: str) -> MatchedKeys:
    """Matches the n keys that a table states with those of images.

    Raises InvalidInput for a key that two images share in the normal form and that is neither's
    own.
    """
    rows, own = _array(table_keys), _array(keys)
    indices = _find(rows, own)
    missing = np.flatnonzero(indices < 0)
    if len(missing):
        distinct = pc.unique(rows.take(pa.array(missing)))
        normal, own_normal = _normalize(distinct), _normalize(own)
        indices_of_distinct = _find(normal, own_normal)
        _check_distinct(distinct, normal, indices_of_distinct, own, own_normal, table)
        places = _find(rows.take(pa.array(missing)), pa.chunked_array([distinct]))
        indices[missing] = indices_of_distinct[places]
        strange = distinct.filter(pa.array(indices_of_distinct < 0))
        first = strange[0].as_py() if len(strange) else None
        return MatchedKeys(indices, Unmatched(len(strange), pc.count_distinct(rows).as_py(), first))
    return MatchedKeys(indices, Unmatched(0, pc.count_distinct(rows).as_py()))


def _check_distinct(
    table_keys: Any, normal: Any, indices: NDArray[np.int64], own: Any, own_normal: Any, table: str
) -> None:
    """Raises InvalidInput where a key that is matched in its normal form means two images."""
    meant = own_normal.take(pa.array(np.unique(indices[indices >= 0])))
    sharing = pc.is_in(own_normal, value_set=meant)
    if pc.sum(sharing).as_py() == len(meant) or not len(meant):
        return
    places = np.flatnonzero(np.asarray(sharing))
    first_of: dict[str, int] = {}
    for place, name in zip(
        places.tolist(), own_normal.take(pa.array(places)).to_pylist(), strict=True
    ):
        first = first_of.setdefault(name, place)
        if first != place:
            row = pc.index(normal, name).as_py()
            raise InvalidInput(
                # the spellings of a letter look the same
                f"{table}: {table_keys[row].as_py()!a} may be {own[first].as_py()!a} or "
                f"{own[place].as_py()!a}",
                remedy="write the key of one of these images, letter by letter",
            )


def _find(values: Any, keys: Any) -> NDArray[np.int64]:
    places = pc.fill_null(pc.index_in(values, value_set=keys), -1)
    return np.asarray(places).astype(np.int64)


def _array(keys: Keys) -> Any:
    if isinstance(keys, pa.ChunkedArray):
        return keys
    try:
        return pa.chunked_array([pa.array(keys, pa.large_string())])
    except UnicodeEncodeError:  # names that are not valid UTF-8 come from JSON so
        return pa.chunked_array([pa.array([_storable(key) for key in keys], pa.large_string())])


def _storable(key: str) -> str:
    try:
        return printable(key)
    except UnicodeEncodeError:  # half a surrogate pair, which no file is named by
        return key.encode("utf-8", "backslashreplace").decode()


def _normalize(keys: Any) -> Any:
    """Returns the keys in the form in which they are compared."""
    odd = pc.or_(pc.invert(pc.string_is_ascii(keys)), pc.match_substring_regex(keys, _NOT_NORMAL))
    places = np.flatnonzero(np.asarray(odd))
    if not len(places):
        return keys
    changed = [normalize_key(key) for key in keys.take(pa.array(places)).to_pylist()]
    return pc.replace_with_mask(_whole(keys), _whole(odd), pa.array(changed, pa.large_string()))


def _whole(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
