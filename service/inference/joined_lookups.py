"""Joins look-ups of concurrent requests into one scan of the centers.

A scan of a few rows reads the centers once and takes little longer than a scan of one row.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.lookup import Lookup, LookupMode
from mlcd.types import Embeddings, Neighbors

_MOST_ROWS: Final = 64  # of several requests; a larger request is scanned alone


class _Options(NamedTuple):
    """The options of a request; requests with equal options are joined.

    engine_labels: labels that the engine returned for one request, which is then scanned alone.
    """

    lookup: Lookup
    top: int
    threshold: float | None
    mode: LookupMode
    are_images: bool
    engine_labels: EngineLabels | None


@dataclass(frozen=True)
class _Waiting:
    embeddings: Embeddings
    future: "Future[tuple[Neighbors, int | None]]"


class JoinedLookups:
    """Look-ups on threads: those that wait for a thread, and have equal options, share a scan."""

    def __init__(self, threads: Executor) -> None:
        self._threads, self._lock = threads, threading.Lock()
        self._waiting: dict[_Options, list[_Waiting]] = {}

    async def nearest(
        self,
        lookup: Lookup,
        embeddings: Embeddings,
        top: int,
        threshold: float | None = None,
        *,
        mode: LookupMode = "exact",
        are_images: bool = False,
        engine_labels: EngineLabels | None = None,
    ) -> tuple[Neighbors, int | None]:
        """Returns the result of `Lookup.nearest`, and the number of novel images: images farther
        from their center than its members usually are. None if that is unknown, or for texts.
        """
        options = _Options(lookup, top, threshold, mode, are_images, engine_labels or None)
        waiting = _Waiting(embeddings, Future())
        with self._lock:
            queue = self._waiting.setdefault(options, [])
            queue.append(waiting)
            if len(queue) == 1:
                self._threads.submit(self._scan, options)
        return await asyncio.wrap_future(waiting.future)

    def _scan(self, options: _Options) -> None:
        with self._lock:
            queue = self._waiting.pop(options)
            num = _num_joined([len(waiting.embeddings) for waiting in queue])
            if queue[num:]:
                self._waiting[options] = queue[num:]
                self._threads.submit(self._scan, options)
        joined = [item for item in queue[:num] if item.future.set_running_or_notify_cancel()]
        if not joined:
            return
        try:
            answers = _look_up(options, [waiting.embeddings for waiting in joined])
        except BaseException as error:  # noqa: BLE001 - the waiters raise it
            for waiting in joined:
                waiting.future.set_exception(error)
            return
        for waiting, answer in zip(joined, answers, strict=True):
            waiting.future.set_result(answer)


def _num_joined(num_rows: Sequence[int]) -> int:
    """Returns how many of the first requests are scanned together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(num_rows), _MOST_ROWS, side="right")))


def _look_up(options: _Options, parts: Sequence[Embeddings]) -> list[tuple[Neighbors, int | None]]:
    lookup, top, threshold, mode, are_images, engine_labels = options
    lookup.follow_names()
    joined = lookup.nearest(
        parts[0] if len(parts) == 1 else np.concatenate(parts),
        top,
        threshold,
        mode=mode,
        engine_labels=engine_labels,
    )
    answers, start = list[tuple[Neighbors, int | None]](), 0
    for embeddings in parts:
        rows = slice(start, start + len(embeddings))
        neighbors = Neighbors(joined.ids[rows], joined.scores[rows])
        novel = lookup.remember(embeddings, neighbors) if are_images else None
        answers.append((neighbors, novel))
        start = rows.stop
    return answers
