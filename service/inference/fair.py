"""Fair queues: by number of items for the engine, by cost for the decoders."""

import heapq
import itertools
from collections import OrderedDict, deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """A queue that serves requests in turn, one item each; first in, first out within a request."""

    def __init__(self) -> None:
        self._queues: OrderedDict[object, deque[_Item]] = OrderedDict()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def put(self, request: object, item: _Item) -> None:
        self._queues.setdefault(request, deque()).append(item)
        self._num += 1

    def take(self) -> _Item:
        request, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        self._num -= 1
        if queue:
            self._queues.move_to_end(request)
        else:
            del self._queues[request]
        return item


class CostQueue(Generic[_Item]):
    """A self-clocked fair queue: an item is due when every waiting owner has been served its cost.

    A small item of one owner comes before a large item of another owner, however many large items
    wait. A large item comes eventually, whatever is added meanwhile. Within an owner the order is
    first in, first out.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, object, _Item]] = []
        # the virtual time at which the last item of each waiting owner is due
        self._due: dict[object, float] = {}
        self._now = 0.0
        self._numbers = itertools.count()

    def put(self, owner: object, cost: float, item: _Item) -> None:
        due = self._due[owner] = self._due.get(owner, self._now) + cost
        heapq.heappush(self._heap, (due, next(self._numbers), owner, item))

    def take(self) -> _Item:
        self._now, _, owner, item = heapq.heappop(self._heap)
        if self._due[owner] == self._now:
            del self._due[owner]
        return item
