"""The records of items in Milvus, and their keys.

key       the primary key, a digest of the id: it has a fixed length, an order that does not depend
          on the server's rules, and needs no escaping in expressions; keys are evenly distributed,
          so a range of keys is a known share of the items
id        the item's id
row       a random number that always means the same vector
version   a random number that always means the same state of the item
metadata  canonical JSON
tokens, spans   what filter expressions compare: see `expressions`
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
# approximate size of a record, without vector and metadata
RECORD_BYTES: Final = 1200
WHOLE: Final = ("id", "row", "version", "metadata", "vector")
_ROW_BITS: Final = 62
Record = dict[str, Any]


def key_of(item_id: str) -> str:
    """Returns the key of an item: 128 bits of the SHA-256 of its id, in hexadecimal."""
    return hashlib.sha256(item_id.encode()).hexdigest()[:KEY_CHARS]


def draw_number() -> int:
    """Returns a random number for a vector or version. Among a million numbers, two are equal with
    probability 1e-7.
    """
    return secrets.randbits(_ROW_BITS)


def record_of(item_id: str, row: int, vector: Embeddings, metadata: str) -> Record:
    """Returns a record of a new version of an item. vector: unit vector [D]. metadata: canonical
    JSON.
    """
    parsed = {} if metadata == "{}" else json.loads(metadata)
    return {
        "key": key_of(item_id),
        "id": item_id,
        "row": row,
        "version": draw_number(),
        "metadata": metadata,
        "tokens": tokens_of(parsed),
        "spans": spans_of(parsed),
        "vector": vector,
    }


def read_rows(records: Sequence[Record], dimension: int) -> FetchedRows:
    """Returns the rows of records that have all fields of `WHOLE`."""
    vectors = np.empty((len(records), dimension), dtype=np.float32)
    for index, record in enumerate(records):
        vectors[index] = record["vector"]
    return FetchedRows(
        np.array([record["row"] for record in records], dtype=np.int64),
        [record["id"] for record in records],
        [record["metadata"] for record in records],
        vectors,
    )
