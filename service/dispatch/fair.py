"""A queue that serves requests in turn: one with many images does not hold up one with a single image."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """First in, first out within a request; one of each request in turn."""

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
