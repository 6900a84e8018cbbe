"""The seal of a ledger: a checksum of its content.

It is updated in the transaction that changes the content, and verified when the ledger is opened.
In a copy that was made while the file was written, whose pages are from different moments, seal and
content do not match.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Final

SEAL: Final = "seal"  # its name in the table of facts
_MODULUS: Final = 2**64
_ROW: Final = struct.Struct("<qqq")


@dataclass
class Seal:
    """The seal, updated with each change of a row.

    items: number of items. rows: sum of the rows' digests modulo 2^64, independent of their order.
    last_row: highest row number ever used. facts: checksum of the other facts.
    """

    items: int = 0
    rows: int = 0
    last_row: int = 0
    facts: int = 0

    @classmethod
    def from_json(cls, text: str) -> "Seal":
        """Parses a seal. Raises ValueError or TypeError if the text is not a seal."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def add(self, row: int, item_checksum: int, vector_checksum: int) -> None:
        self.items += 1
        self.rows = (self.rows + _digest(row, item_checksum, vector_checksum)) % _MODULUS

    def remove(self, row: int, item_checksum: int, vector_checksum: int) -> None:
        self.items -= 1
        self.rows = (self.rows - _digest(row, item_checksum, vector_checksum)) % _MODULUS


def facts_checksum(facts: Mapping[str, str]) -> int:
    """Returns the checksum of facts. facts: JSON by name, as in the ledger."""
    return zlib.crc32(json.dumps(sorted(facts.items())).encode())


def _digest(row: int, item_checksum: int, vector_checksum: int) -> int:
    packed = _ROW.pack(row, item_checksum, vector_checksum)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
