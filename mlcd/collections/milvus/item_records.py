"""The records of items in Milvus, and their keys.

key       the primary key: a digest of the id, so that no id is too long, ordered by the server's
          rules or misread in an expression; keys are spread evenly, so that a range of them is a
          share of the items
id        as it was given
row       a random number that stands for one vector for ever
version   a random number that stands for one state of the item for ever
metadata  canonical JSON, as it was given
tokens, spans   what filters ask about: see `expressions`
vector    float32, of norm 1
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mlcd.collections.fetched_rows import FetchedRows
from mlcd.collections.milvus.expressions import spans_of, tokens_of
from mlcd.types import Embeddings

KEY_CHARS: Final = 32
# of a record beside vector and metadata, about
RECORD_BYTES: Final = 1200
WHOLE: Final = ("id", "row", "version", "metadata", "vector")
_ROW_BITS: Final = 62
Record = dict[str, Any]


def key_of(item_id: str) -> str:
    """Returns the key of an item: 128 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(item_id.encode()).hexdigest()[:KEY_CHARS]


def new_row() -> int:
    """Returns a number that no other vector or version has: two of a million share one with a
    chance of 1e-7.
    """
    return secrets.randbits(_ROW_BITS)


def record_of(item_id: str, row: int, vector: Embeddings, metadata: str) -> Record:
    """Returns a new version of an item. vector: unit [D]. metadata: canonical JSON."""
    described = {} if metadata == "{}" else json.loads(metadata)
    return {
        "key": key_of(item_id),
        "id": item_id,
        "row": row,
        "version": new_row(),
        "metadata": metadata,
        "tokens": tokens_of(described),
        "spans": spans_of(described),
        "vector": vector,
    }


def read_rows(records: Sequence[Record], dimension: int) -> FetchedRows:
    """Returns the rows of records with all of `WHOLE`."""
    vectors = np.empty((len(records), dimension), dtype=np.float32)
    for index, record in enumerate(records):
        vectors[index] = record["vector"]
    return FetchedRows(
        np.array([record["row"] for record in records], dtype=np.int64),
        [record["id"] for record in records],
        [record["metadata"] for record in records],
        vectors,
    )
