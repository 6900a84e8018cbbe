"""The schemas of our collections in Milvus.

mlcd_items_N     one collection: its items in the partition `items`, its changing facts in the
                 partition `facts`; N is random, and the collection's name is an alias, which
                 Milvus keeps unique
mlcd_pictures_N  the thumbnails of the items of mlcd_items_N
mlcd_audit_N     the temporary collection of an audit, for minutes
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlcd.collections.item import MAX_ID_BYTES, MAX_METADATA_BYTES
from mlcd.collections.milvus.expressions import MAX_TOKENS, TOKEN_CHARS
from mlcd.collections.milvus.item_records import KEY_CHARS
from mlcd.types import Fingerprint

PINNED: Final = "mlcd.pinned"
ITEMS, FACTS, DEFAULT = "items", "facts", "_default"
_ALIAS: Final = "mlcd_"
_ITEMS_NAME: Final = re.compile(r"mlcd_items_[0-9a-f]{16}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9]")


@dataclass(frozen=True)
class Schema:
    """The fields of a Milvus collection without its vector: type and options of each field."""

    fields: Mapping[str, tuple[str, Mapping[str, Any]]]
    partitions: tuple[str, ...] = ()
    description: str = ""


@dataclass(frozen=True)
class PinnedCollection:
    """The fixed properties of a collection. identity: its name in Milvus."""

    name: str
    identity: str
    fingerprint: Fingerprint
    dimension: int
    recall: float
    index: str

    def schema(self) -> Schema:
        facts = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "dimension": self.dimension,
            "recall": self.recall,
            "index": self.index,
        }
        return Schema(_ITEM_FIELDS, (ITEMS, FACTS), json.dumps(facts))


def read_pinned(described: Mapping[str, Any]) -> PinnedCollection | None:
    """Returns the properties in Milvus's description of a collection; None if it is not ours."""
    identity = described["collection_name"]
    if not is_items(identity):
        return None
    facts = json.loads(described["description"] or described["properties"][PINNED])
    return PinnedCollection(identity=identity, **facts)


def new_name(kind: str) -> str:
    return f"mlcd_{kind}_{secrets.token_hex(8)}"


def pictures_of(identity: str) -> str:
    """Returns the name of the Milvus collection with the thumbnails."""
    return identity.replace("_items_", "_pictures_", 1)


def is_items(name: str) -> bool:
    return _ITEMS_NAME.fullmatch(name) is not None


def alias_of(name: str) -> str:
    """Returns the alias of a collection: letters, digits and underscores, as Milvus requires."""
    plain = "".join(
        char if _PLAIN.match(char) else f"_{ord(char):02x}"
        for char in name  # escapes . - _
    )
    return f"{_ALIAS}{plain}"


def _text(max_bytes: int) -> tuple[str, Mapping[str, Any]]:
    return "VARCHAR", {"max_length": max_bytes}


_ITEM_FIELDS: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    "key": ("VARCHAR", {"max_length": KEY_CHARS, "is_primary": True}),
    "id": _text(MAX_ID_BYTES),
    "row": ("INT64", {}),
    "version": ("INT64", {}),
    "metadata": _text(MAX_METADATA_BYTES),
    "tokens": (
        "ARRAY",
        {"element_type": "VARCHAR", "max_capacity": MAX_TOKENS, "max_length": TOKEN_CHARS},
    ),
    "spans": ("JSON", {}),
}
AUDITED: Final = Schema({"row": ("INT64", {"is_primary": True})})
