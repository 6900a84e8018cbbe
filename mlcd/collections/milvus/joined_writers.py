"""The writers of one collection in one process: the first of them writes for all that wait.

Before a change Milvus is asked what it has of the items, which takes as long for many as for one.
"""

import threading
from collections import deque
from typing import Final

from mlcd.collections.changes import Change, Outcome, WriteRequest, commit
from mlcd.collections.milvus.keyed_batch import KeyedBatch
from mlcd.collections.milvus.known_facts import KnownFacts
from mlcd.collections.milvus.milvus_connection import MilvusConnection

_MOST_ITEMS: Final = 4096


class JoinedWriters:
    """The changes that wait. Every method may be called from many threads."""

    def __init__(self, connection: MilvusConnection, facts: KnownFacts) -> None:
        self._connection, self._facts = connection, facts
        self._waiting: deque[Change] = deque()
        self._writing = threading.Lock()

    def submit(self, request: WriteRequest) -> list[Outcome]:
        """Returns the request's outcomes once Milvus has acknowledged it."""
        change = Change(request)
        self._waiting.append(change)
        with self._writing:
            while not change.settled:
                self._write_for_all()
        if change.error is not None:
            raise change.error
        return change.outcomes

    def _write_for_all(self) -> None:
        changes: list[Change] = []
        ids: list[str] = []
        while self._waiting and len(ids) < _MOST_ITEMS:
            changes.append(self._waiting.popleft())
            ids += changes[-1].request.ids
        try:
            batch = KeyedBatch(self._connection, self._facts, ids)
            commit(batch, changes, self._facts.dimension)
        except BaseException as error:
            for change in changes:
                change.error = error
            raise
        finally:
            for change in changes:
                change.settled = True
