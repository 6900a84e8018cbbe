"""The changing facts about a collection: its metadata fields, and the last audit of its index.

They are stored in a partition of their own. Each field is a record that is only ever added, so
concurrent servers never overwrite each other's fields; the audit is one record, and the last write
wins.
"""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.expressions import ALL_ITEMS, field_token
from mlcd.collections.milvus.item_records import Record, draw_number
from mlcd.collections.milvus.schemas import FACTS
from mlcd.indexes.tuning import Recall

_AUDIT: Final = "audit"
_MAX_AGE_S: Final = 5.0  # of the cached facts; another server may have stored an audit since


@dataclass(frozen=True)
class LastAudit:
    """The result of the last audit. items: number of items at that time."""

    generation: int = 0
    items: int = 0
    effort: int | None = None
    recall: dict[str, Any] | None = None

    def after(self, items: int, audited: tuple[int, Recall] | None) -> "LastAudit":
        """Returns the next audit. audited: (effort, recall); None without an index."""
        effort, recall = (audited[0], asdict(audited[1])) if audited else (None, None)
        return LastAudit(self.generation + 1, items, effort, recall)


@dataclass
class KnownFacts:
    """The facts about one collection that this process read last."""

    connection: MilvusConnection
    identity: str
    dimension: int
    fields: frozenset[str] = frozenset()
    audit: LastAudit = LastAudit()
    _read_at_s: float = field(default=-_MAX_AGE_S, repr=False)
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def refresh(self, *, consistent: bool = True) -> None:
        """Reads the facts. consistent: see all earlier writes; otherwise the writes of the last
        seconds may be missed.
        """
        records = self.connection.query(
            self.identity, ALL_ITEMS, ["key", "metadata"], FACTS, consistent=consistent
        )
        with self._changing:
            names = {
                json.loads(record["metadata"]) for record in records if record["key"] != _AUDIT
            }
            self.fields |= names
            audits = [
                LastAudit(**json.loads(record["metadata"]))
                for record in records
                if record["key"] == _AUDIT
            ]
            self.audit = max([self.audit, *audits], key=lambda audit: audit.generation)
            self._read_at_s = time.monotonic()

    def refresh_if_old(self) -> None:
        if time.monotonic() - self._read_at_s > _MAX_AGE_S:
            self.refresh(consistent=False)

    def add_fields(self, names: Iterable[str]) -> None:
        """Stores the names of fields that are not stored yet."""
        new_names = sorted(set(names) - self.fields)
        if not new_names:
            return
        self.connection.upsert(
            self.identity, [self._record(field_token(name), name) for name in new_names], FACTS
        )
        with self._changing:
            self.fields |= set(new_names)

    def store_audit(self, audit: LastAudit) -> None:
        self.connection.upsert(self.identity, [self._record(_AUDIT, asdict(audit))], FACTS)
        with self._changing:
            self.audit = audit

    def _record(self, key: str, value: Any) -> Record:
        unused_vector = np.zeros(self.dimension, dtype=np.float32)
        unused_vector[0] = 1
        return {
            "key": key,
            "id": "",
            "row": 0,
            "version": draw_number(),
            "metadata": json.dumps(value),
            "tokens": [],
            "spans": {},
            "vector": unused_vector,
        }
