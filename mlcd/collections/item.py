"""The items of a collection, and the checks of ids, embeddings and metadata.

Item       an item to add: id, embedding, metadata
FoundItem  a search result: id, similarity, metadata
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings

# A JSON object. Filters use strings, finite numbers, booleans and lists of these; other values are
# stored only.
Metadata = Mapping[str, Any]

MAX_ID_BYTES: Final = 1024
MAX_METADATA_BYTES: Final = 16_384
MAX_FIELDS: Final = 128
MAX_FIELD_BYTES: Final = 128
# Larger integers are not exact in float64, which JSON readers and our comparisons use.
EXACT_INTEGER: Final = 2**53
_DOTS: Final = frozenset({".", ".."})  # RFC 3986, 5.2.4: removed from URLs, even percent-encoded
# Unicode's control characters, and the two other characters that some readers treat as a line break
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_DEPTH: Final = 8
# A name may not end in `.partial`: the draft of NAME is the folder NAME.partial beside it.
_NAME: Final = re.compile(r"(?!.*\.partial$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_SHOWN_CHARS: Final = 80
# A vector with |norm - 1| up to this is stored bit for bit: an item that is read from a collection
# and added again does not change.
_UNIT_ROUNDING: Final = 1e-6


@dataclass(frozen=True)
class Item:
    """An item to add.

    embedding: [D], with a nonzero norm; stored with norm 1. metadata: see `Metadata`. thumbnail:
    None keeps the stored thumbnail if the embedding is unchanged.
    """

    id: str
    embedding: NDArray[np.floating] = field(repr=False)
    metadata: Metadata = field(default_factory=dict)
    thumbnail: Thumbnail | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FoundItem:
    """A search result.

    similarity: cosine, computed in float32 for every kind of index. metadata_json: stored ASCII
    JSON, so that a caller that only passes it on need not parse it.
    """

    id: str
    similarity: float
    metadata_json: str

    @cached_property
    def metadata(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.metadata_json)
        return parsed


def is_name(name: str) -> bool:
    """Returns whether a name is valid for a collection: it names a folder and is part of URLs."""
    return _NAME.fullmatch(name) is not None


def check_name(name: object) -> str:
    """Returns `name` if it is valid for a collection. Raises InvalidInput."""
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInput(
            f"{_shorten(name)} cannot name a collection",
            remedy="use at most 128 letters, digits, dots, dashes and underscores, the first a"
            " letter or digit",
        )
    return name


def check_id(item_id: object) -> str:
    """Returns `item_id` if it is valid for an item. Raises InvalidInput."""
    if not isinstance(item_id, str) or not item_id:
        raise InvalidInput("each item needs an id", remedy="ids are strings of 1 to 1,024 bytes")
    try:
        size = len(item_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the id {_shorten(item_id)} is not valid Unicode") from error
    if size > MAX_ID_BYTES or "\0" in item_id:
        raise InvalidInput(
            f"the id {_shorten(item_id)} must have at most {MAX_ID_BYTES} bytes, none of them zero",
            remedy="give the item another id",
        )
    return item_id


def check_new_id(item_id: object) -> str:
    """Returns `item_id` if a new item may have it: it must fit in a URL and in one line. Raises
    InvalidInput.
    """
    item_id = check_id(item_id)
    if item_id in _DOTS:
        raise InvalidInput(
            f"an item cannot have the id {item_id!r}: clients remove this path segment from URLs",
            remedy="give it another id",
        )
    if (control := _CONTROL.search(item_id)) is not None:
        raise InvalidInput(
            f"the id {_shorten(item_id)} has the control character U+{ord(control[0]):04X}",
            remedy="leave control characters and line breaks out of ids",
        )
    return item_id


def unit_embedding(item_id: str, embedding: NDArray[np.floating], dimension: int) -> Embeddings:
    """Returns the embedding scaled to norm 1, [D] float32. Raises InvalidInput naming the item."""
    vector = np.asarray(embedding)
    if vector.shape != (dimension,) or vector.dtype.kind not in "fiu":
        raise InvalidInput(
            f"the embedding of {_shorten(item_id)} must have shape [{dimension}], got"
            f" {list(vector.shape)}",
            remedy="embed the image with the collection's own model",
        )
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector.astype(np.float64)))
    if not math.isfinite(norm) or norm == 0:
        raise InvalidInput(
            f"the embedding of {_shorten(item_id)} must have a finite norm above 0, got {norm}",
            remedy="leave out NaN, Inf and zero",
        )
    if vector.dtype == np.float32 and abs(norm - 1) <= _UNIT_ROUNDING:
        return np.ascontiguousarray(vector)
    return np.ascontiguousarray((vector / norm).astype(np.float32))


def encode_metadata(item_id: str, metadata: object) -> str:
    """Returns canonical JSON: equal metadata give equal strings. Raises InvalidInput naming item
    and field.
    """
    subject = f"the metadata of {_shorten(item_id)}"
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"{subject} must be a JSON object, got a {type(metadata).__name__}")
    if len(metadata) > MAX_FIELDS:
        raise InvalidInput(
            f"{subject} must have at most {MAX_FIELDS} fields, got {len(metadata)}",
            remedy="leave some out",
        )
    for name, value in metadata.items():
        if (
            not isinstance(name, str)
            or not 0 < len(name.encode(errors="replace")) <= MAX_FIELD_BYTES
        ):
            raise InvalidInput(
                f"field names of {subject} must be strings of 1 to {MAX_FIELD_BYTES} bytes, got"
                f" {_shorten(name)}",
                remedy="rename the field",
            )
        _check_value(value, f"field {_shorten(name)} of {subject}", 1)
    text = json.dumps(
        dict(metadata), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidInput(
            f"{subject} must have at most {MAX_METADATA_BYTES} bytes of JSON, got {len(text)}",
            remedy="leave fields out",
        )
    return text


def is_exact(number: float) -> bool:
    """Returns whether all JSON readers read the number exactly: finite, and an integer only within
    ±2^53.
    """
    if isinstance(number, int):
        return abs(number) <= EXACT_INTEGER
    return math.isfinite(number)


def _check_value(value: object, place: str, depth: int) -> None:
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int | float):
        if not is_exact(value):
            raise InvalidInput(
                f"{place} must be a finite number, and within ±2^53 if it is an integer",
                remedy="give it as a string",
            )
        return
    if depth < _MAX_DEPTH and isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_value(inner, place, depth + 1)
        if isinstance(value, list) or all(isinstance(name, str) for name in value):
            return
    raise InvalidInput(
        f"{place} must be a JSON value, nested at most {_MAX_DEPTH} deep", remedy="leave it out"
    )


def _shorten(value: object) -> str:
    """Returns the repr of an id for a message, shortened to 80 characters."""
    text = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…'"
