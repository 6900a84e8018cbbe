"""Runs searches for near-duplicates: one at a time, clients in turn, with a cache of results.

A search compares all items of a collection, which takes minutes for a large collection. It stops
when no request waits for it.
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

_CACHE_SIZE: Final = 4  # results; each takes about 30 bytes per item
_MAX_COMPARED: Final = 10_000  # pictures; takes 15 s of one core, and a request has 30 s


@dataclass(frozen=True)
class FoundGroups:
    """The groups of near-duplicates in one state of a collection.

    ids: ids of all rows. nearest: the most similar pair if no group exists; None if there are
    groups, or too many items to search for the pair.
    """

    ids: list[str]
    groups: list[Group]
    nearest: Group | None


@dataclass(frozen=True, eq=False)
class _Subject:
    """The input of a search.

    state: state of the collection when the request arrived. similarity: threshold; None searches
    for copies of pictures.
    """

    state: Searcher
    similarity: float | None

    def matches(self, state: Searcher | None, similarity: float | None) -> bool:
        return state is self.state and similarity == self.similarity


class DuplicateSearches:
    """The searches of a server. Use from one event loop."""

    def __init__(self, thread: Executor, metrics: Metrics) -> None:
        """thread: executor with one thread."""
        self._thread, self._metrics = thread, metrics
        self._running: _Search | None = None
        self._waiting: _Search | None = None
        self._cached: deque[_CachedGroups] = deque(maxlen=_CACHE_SIZE)

    async def find(
        self,
        collection: CollectionPort,
        similarity: float | None,
        *,
        owner: object | None,
        deadline: float,
    ) -> FoundGroups:
        """Returns the groups of the collection's present state; equal requests share one search.

        similarity: minimum cosine of a pair; None finds copies of pictures instead
        (`mlcd.collections.picture_copies`). owner: the client. Raises Overloaded while another
        search waits, DeadlineExceeded, and InvalidInput for too many pictures.
        """
        # on a thread, because a store may be requested over the network
        subject = _Subject(await asyncio.to_thread(lambda: collection.state), similarity)
        for cached in self._cached:
            if subject.matches(cached.state(), cached.similarity):
                return cached.groups
        search = self._find_search(subject) or self._start(collection, subject, owner, deadline)
        search.join(deadline)
        try:
            return await within_deadline(asyncio.shield(search.result), deadline)
        finally:
            search.leave()

    def _find_search(self, subject: _Subject) -> "_Search | None":
        for search in (self._running, self._waiting):
            is_same = search is not None and subject.matches(
                search.subject.state, search.similarity
            )
            if search is not None and is_same and not search.is_over:
                return search
        return None

    def _start(
        self, collection: CollectionPort, subject: _Subject, owner: object | None, deadline: float
    ) -> "_Search":
        """Returns a new search, which runs now or waits. Raises Overloaded if another one waits.

        If the waiting search belongs to the client of the running search, it is refused in favor of
        a new search of another client.
        """
        result = asyncio.get_running_loop().create_future()
        search = _Search(collection, subject, owner, result, deadline)
        if self._running is None:
            self._run(search)
            return search
        waiting = self._waiting
        if waiting is not None and not waiting.is_over:
            if waiting.owner != self._running.owner or waiting.owner == owner:
                raise self._refusal()
            waiting.fail(self._refusal())
        self._waiting = search
        return search

    def _refusal(self) -> Overloaded:
        self._metrics.count_rejected("overloaded")
        return Overloaded(
            "a search for near-duplicates is running, and another one is waiting",
            remedy="try again in a moment",
        )

    def _run(self, search: "_Search") -> None:
        self._running = search
        future = asyncio.get_running_loop().run_in_executor(self._thread, search.work)
        future.add_done_callback(partial(self._end, search))

    def _end(self, search: "_Search", future: "asyncio.Future[FoundGroups]") -> None:
        if future.cancelled():  # the server is stopping
            search.fail(DeadlineExceeded("the server is stopping"))
            return
        if (error := future.exception()) is not None:
            search.fail(error)
        else:
            search.finish(future.result())
            self._cached.append(
                _CachedGroups(ref(search.subject.state), search.similarity, future.result())
            )
        self._running = None
        next_search, self._waiting = self._waiting, None
        if next_search is not None and not next_search.is_over:
            self._run(next_search)


@dataclass(frozen=True)
class _CachedGroups:
    """A result, valid while the collection is in this state."""

    state: "ref[Searcher]"
    similarity: float | None
    groups: FoundGroups


@dataclass(eq=False)
class _Search:
    """One search and the requests that wait for it.

    It stops when no request waits any more, or when the latest deadline of them has passed.
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
            self.result.exception()  # avoids asyncio's warning if no request waits any more

    def work(self) -> FoundGroups:
        ids, take = self.subject.state.list_rows()
        if self.similarity is None:
            if len(ids) > _MAX_COMPARED:
                raise InvalidInput(
                    f"a request compares the pictures of at most {_MAX_COMPARED} items, got"
                    f" {len(ids)}",
                    remedy="give a `similarity`, or stop the server and run"
                    " `mlcd index COLLECTION OUT.jsonl --duplicates copies`",
                )
            copies = copy_groups(len(ids), take, thumbnails_of(self.collection, ids), meter=self)
            return FoundGroups(ids, copies.groups, copies.nearest)
        groups = duplicate_groups(len(ids), take, self.similarity, meter=self)
        has_time = len(ids) <= _MAX_COMPARED
        nearest = nearest_pair(len(ids), take, meter=self) if has_time and not groups else None
        return FoundGroups(ids, groups, nearest)

    def advance(self, num: int = 1, **facts: object) -> None:  # noqa: ARG002 - of the protocol
        """Raises DeadlineExceeded in the work, which calls this as its meter, if no request waits.

        The deadline is by the loop's clock, which is time.monotonic.
        """
        if self._abandoned.is_set() or time.monotonic() > self.deadline:
            raise DeadlineExceeded("the time for a request has passed")
