"""The seal of a ledger: what it states about its own content.

It is changed in the transaction that changes the content, and compared when the ledger is opened.
A copy of a file that is written meanwhile, or one whose pages are of different moments, states
something else than it holds.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Final

SEAL: Final = "seal"  # its name among the facts
_MODULUS: Final = 2**64
_ROW: Final = struct.Struct("<qqq")


@dataclass
class Seal:
    """The seal, which goes along with each change of a row.

    items: their number. rows: the sum of the rows' digests modulo 2^64, which is the same in every
    order. last_row: the greatest row number that was ever given. facts: the checksum of the other
    facts.
    """

    items: int = 0
    rows: int = 0
    last_row: int = 0
    facts: int = 0

    @classmethod
    def from_json(cls, text: str) -> "Seal":
        """Raises ValueError or TypeError for what is not a seal."""
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
    """Returns the checksum of facts as the ledger keeps them: JSON, by name."""
    return zlib.crc32(json.dumps(sorted(facts.items())).encode())


def _digest(row: int, item_checksum: int, vector_checksum: int) -> int:
    packed = _ROW.pack(row, item_checksum, vector_checksum)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
