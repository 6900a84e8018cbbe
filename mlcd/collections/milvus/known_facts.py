"""The facts about a collection that change: the fields of its metadata, and its index.

They lie in a partition of its own. A field is a record that is only ever added, so that two servers
lose nothing of each other; the audit is one record, of which the last stays.
"""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.expressions import EVERY, field_token
from mlcd.collections.milvus.item_records import Record, new_row
from mlcd.collections.milvus.schemas import FACTS
from mlcd.indexes.tuning import Recall

_AUDIT: Final = "audit"
_FRESH_S: Final = 5.0  # after which another server's audit is looked for


@dataclass(frozen=True)
class LastAudit:
    """The findings of the last audit. items: how many there were."""

    generation: int = 0
    items: int = 0
    effort: int | None = None
    recall: dict[str, Any] | None = None

    def after(self, items: int, audited: tuple[int, Recall] | None) -> "LastAudit":
        """Returns the next audit."""
        effort, recall = (audited[0], asdict(audited[1])) if audited else (None, None)
        return LastAudit(self.generation + 1, items, effort, recall)


@dataclass
class KnownFacts:
    """The facts about one collection as this process knows them."""

    connection: MilvusConnection
    identity: str
    dimension: int
    fields: frozenset[str] = frozenset()
    audit: LastAudit = LastAudit()
    _read: float = field(default=-_FRESH_S, repr=False)
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def refresh(self, *, fresh: bool = True) -> None:
        """Reads them. fresh: false may miss the last seconds, and does not wait."""
        records = self.connection.query(
            self.identity, EVERY, ["key", "metadata"], FACTS, fresh=fresh
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
            self._read = time.monotonic()

    def refresh_where_old(self) -> None:
        if time.monotonic() - self._read > _FRESH_S:
            self.refresh(fresh=False)

    def know(self, names: Iterable[str]) -> None:
        """Makes sure that these fields are known to every server."""
        new = sorted(set(names) - self.fields)
        if not new:
            return
        self.connection.upsert(
            self.identity, [self._record(field_token(name), name) for name in new], FACTS
        )
        with self._changing:
            self.fields |= set(new)

    def settle(self, audit: LastAudit) -> None:
        self.connection.upsert(self.identity, [self._record(_AUDIT, asdict(audit))], FACTS)
        with self._changing:
            self.audit = audit

    def _record(self, key: str, value: Any) -> Record:
        anywhere = np.zeros(self.dimension, dtype=np.float32)
        anywhere[0] = 1
        return {
            "key": key,
            "id": "",
            "row": 0,
            "version": new_row(),
            "metadata": json.dumps(value),
            "tokens": [],
            "spans": {},
            "vector": anywhere,
        }
