"""Applies the changes of a collection: first on disk, then in memory; then the writers return.

All waiting changes are written in one transaction. Readers see the new state only after it is on
the disk, and before any writer returns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mlcd.collections.changes import Change, Outcome, WriteRequest, commit
from mlcd.collections.folder import OpenedFolder
from mlcd.collections.growth import Growth
from mlcd.collections.searcher import Searcher
from mlcd.collections.waiting_changes import WaitingChanges
from mlcd.errors import Conflict
from mlcd.images.thumbnail import Thumbnail

_COMMITTED_CHANGES: Final = 256


class WriteQueue:
    """The writers of one collection.

    state: the current state for readers, immutable; each write replaces it.
    """

    def __init__(self, name: str, folder: OpenedFolder) -> None:
        self._changes = WaitingChanges(self._write, batch_size=_COMMITTED_CHANGES)
        self.lock, self.waiting = self._changes.lock, self._changes.waiting
        self.growth = folder.growth
        self.state = folder.growth.searcher()
        self._name, self._dimension = name, folder.facts["dimension"]
        self._ledger, self._thumbnails = folder.ledger, folder.thumbnails
        self._closed, self._broken = False, False

    def submit(self, request: WriteRequest) -> list[Outcome]:
        """Returns the outcomes once the request is durable and visible to readers."""
        return self._changes.submit(request)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Excludes other writers from the block. Raises Conflict if the collection is closed."""
        with self.lock:
            self.check_open()
            yield

    def replace(self, before: Searcher, growth: Growth) -> None:
        """Continues with a new generation, which was built from the state `before`."""
        with self.lock:
            growth.catch_up(before, self.state)
            self.growth, self.state = growth, growth.searcher()

    def close(self) -> bool:
        """Refuses all later changes; returns False if it was closed already."""
        with self.lock:
            was_open, self._closed = not self._closed, True
        return was_open

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raises Conflict if the collection is closed, or a write failed."""
        if self._closed:
            raise Conflict(
                f"the collection {self._name} was closed or deleted meanwhile",
                remedy="open it again",
            )
        if self._broken:
            raise Conflict(
                f"the collection {self._name} cannot be changed after a failure",
                remedy="open it again",
            )

    def _write(self, changes: list[Change]) -> None:
        try:
            self.check_open()
            commit(self._ledger, changes, self._dimension)
            freed_rows: list[int] = []
            pictures: dict[int, Thumbnail] = {}
            for change in changes:
                freed_rows += self.growth.apply(change.effects)
                if change.error is None:
                    shown = change.request.thumbnails.items()
                    pictures |= {self.growth.row_of(item_id): picture for item_id, picture in shown}
            self._thumbnails.change(
                removed_rows=freed_rows,
                added={row: pictures[row] for row in pictures.keys() - set(freed_rows)},
            )
            self.state = self.growth.searcher()
        except BaseException as error:
            # Disk and memory may differ now, so no later change may be written.
            self._broken = self._broken or not isinstance(error, Conflict)
            raise
