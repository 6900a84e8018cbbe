"""Searches for near-duplicates: one at a time, clients in turn, the last results kept.

A search compares all items of a collection, which takes minutes for a large one. It ends when
nobody waits for it.
"""

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import ref

from mlcd.collections.duplicates import Group, duplicate_groups
from mlcd.collections.picture_copies import copy_groups, nearest_pair, thumbnails_of
from mlcd.collections.port import CollectionPort
from mlcd.collections.searcher import Searcher
from mlcd.errors import DeadlineExceeded, InvalidInput, Overloaded
from mlcd.service.deadline import within_deadline
from mlcd.service.telemetry.metrics import Metrics

_CACHED: Final = 4  # results; each takes about 30 bytes an item
_MOST_COMPARED: Final = 10_000  # pictures: 15 s of one core, of the 30 s that a request has


@dataclass(frozen=True)
class FoundGroups:
    """The groups of a collection's state.

    ids: of all rows. nearest: without any group, the most similar pair; None where there are too
    many items to look for it.
    """

    ids: list[str]
    groups: list[Group]
    nearest: Group | None


@dataclass(frozen=True, eq=False)
class _Subject:
    """The search itself. state: that of the collection when the request came. similarity: None for
    copies of pictures.
    """

    state: Searcher
    similarity: float | None

    def is_of(self, state: Searcher | None, similarity: float | None) -> bool:
        return state is self.state and similarity == self.similarity


class DuplicateSearches:
    """The searches of a server. Use from one event loop."""

    def __init__(self, thread: Executor, metrics: Metrics) -> None:
        """thread: an executor of one thread."""
        self._thread, self._metrics = thread, metrics
        self._running: _Search | None = None
        self._waiting: _Search | None = None
        self._cached: deque[_CachedGroups] = deque(maxlen=_CACHED)

    async def find(
        self,
        collection: CollectionPort,
        similarity: float | None,
        *,
        owner: object | None,
        deadline: float,
    ) -> FoundGroups:
        """Returns the groups of the collection's present state; requests for the same share one
        search.

        similarity: the least cosine of a pair, whatever the pictures; None: the pictures are copies
        (`mlcd.collections.picture_copies`). owner: the client. Raises Overloaded while another
        search waits, DeadlineExceeded, and InvalidInput for more pictures than it has time for.
        """
        # a store behind a network is asked for its state
        subject = _Subject(await asyncio.to_thread(lambda: collection.state), similarity)
        for cached in self._cached:
            if subject.is_of(cached.state(), cached.similarity):
                return cached.groups
        search = self._find_search(subject) or self._begin(collection, subject, owner, deadline)
        search.join(deadline)
        try:
            return await within_deadline(asyncio.shield(search.result), deadline)
        finally:
            search.leave()

    def _find_search(self, subject: _Subject) -> "_Search | None":
        for search in (self._running, self._waiting):
            is_same = search is not None and subject.is_of(search.subject.state, search.similarity)
            if search is not None and is_same and not search.is_over:
                return search
        return None

    def _begin(
        self, collection: CollectionPort, subject: _Subject, owner: object | None, deadline: float
    ) -> "_Search":
        """Returns a new search, which runs now or is the one that waits.

        A client whose other search runs gives the place to the first other client that comes.
        """
        result = asyncio.get_running_loop().create_future()
        search = _Search(collection, subject, owner, result, deadline)
        if self._running is None:
            self._run(search)
            return search
        first = self._waiting
        if first is not None and not first.is_over:
            if first.owner != self._running.owner or first.owner == owner:
                raise self._refusal()
            first.fail(self._refusal())
        self._waiting = search
        return search

    def _refusal(self) -> Overloaded:
        self._metrics.count_rejected("overloaded")
        return Overloaded(
            "a search for near-duplicates runs, and another one waits",
            remedy="try again in a moment",
        )

    def _run(self, search: "_Search") -> None:
        self._running = search
        working = asyncio.get_running_loop().run_in_executor(self._thread, search.work)
        working.add_done_callback(partial(self._end, search))

    def _end(self, search: "_Search", working: "asyncio.Future[FoundGroups]") -> None:
        if working.cancelled():  # the server ends
            search.fail(DeadlineExceeded("the server ends"))
            return
        if (error := working.exception()) is not None:
            search.fail(error)
        else:
            search.finish(working.result())
            self._cached.append(
                _CachedGroups(ref(search.subject.state), search.similarity, working.result())
            )
        self._running = None
        following, self._waiting = self._waiting, None
        if following is not None and not following.is_over:
            self._run(following)


@dataclass(frozen=True)
class _CachedGroups:
    """A result, of use while the collection has the state that it is of."""

    state: "ref[Searcher]"
    similarity: float | None
    groups: FoundGroups


@dataclass(eq=False)
class _Search:
    """One search and those who wait for it.

    It ends when they have left, or when the deadline of the last of them has passed.
    """

    collection: CollectionPort
    subject: _Subject
    owner: object | None
    result: "asyncio.Future[FoundGroups]"
    deadline: float
    _num_waiting: int = 0
    _abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def similarity(self) -> float | None:
        return self.subject.similarity

    @property
    def is_over(self) -> bool:
        return self._abandoned.is_set() or self.result.done()

    def join(self, deadline: float) -> None:
        self._num_waiting += 1
        self.deadline = max(self.deadline, deadline)

    def leave(self) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._abandoned.set()

    def finish(self, groups: FoundGroups) -> None:
        if not self.result.done():
            self.result.set_result(groups)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # perhaps nobody waits any more

    def work(self) -> FoundGroups:
        ids, take = self.subject.state.list_rows()
        if self.similarity is None:
            if len(ids) > _MOST_COMPARED:
                raise InvalidInput(
                    f"pictures of at most {_MOST_COMPARED} items are compared in one request, got"
                    f" {len(ids)}",
                    remedy="give a `similarity`, or stop the server and run"
                    " `mlcd index COLLECTION OUT.jsonl --duplicates copies`",
                )
            copies = copy_groups(len(ids), take, thumbnails_of(self.collection, ids), meter=self)
            return FoundGroups(ids, copies.groups, copies.nearest)
        groups = duplicate_groups(len(ids), take, self.similarity, meter=self)
        is_few = len(ids) <= _MOST_COMPARED
        nearest = nearest_pair(len(ids), take, meter=self) if is_few and not groups else None
        return FoundGroups(ids, groups, nearest)

    def advance(self, num: int = 1, **facts: object) -> None:  # noqa: ARG002 - of the protocol
        """Ends the work, of which the search itself is the meter, when nobody waits for it.

        The deadline is by the loop's clock, which is time.monotonic.
        """
        if self._abandoned.is_set() or time.monotonic() > self.deadline:
            raise DeadlineExceeded("the time for a request has passed")
