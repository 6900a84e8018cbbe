"""Collections that a job or a command has put among the server's own since it started: opened when asked for."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import Request

from mlcd.collections.collection import Collection
from mlcd.collections.store import Collections
from service.deadline import within_deadline
from service.resources import Resources

_Result = TypeVar("_Result")


async def opened_collection(name: str, request: Request, resources: Resources) -> Collection:
    """As `Space.opened_collection`. Raises Conflict, too, where it is there and cannot be opened."""
    await open_arrived(name, request, resources)
    return resources.model.space.opened_collection(name)


async def open_arrived(name: str, request: Request, resources: Resources) -> None:
    """Have the collection open if there is one. A name of none costs a look into the folder, and waits for nobody."""
    store = resources.model.space.store
    if store is None or store.find(name) is not None:
        return
    if await _within(request, resources.compute, partial(store.has_arrived, name)):
        await _within(request, resources.opening, partial(store.open_arrived, name))


async def open_all_arrived(store: Collections, request: Request, resources: Resources) -> None:
    """What cannot be opened is left aside."""
    if await _within(request, resources.compute, store.arrived):
        await _within(request, resources.opening, store.open_all_arrived)


async def _within(request: Request, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
    return await within_deadline(asyncio.get_running_loop().run_in_executor(pool, work), request.state.deadline)
