"""Changes of collections: off the event loop, and durable before they are answered."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from mlcd.errors import TooManyOpenFiles, Unavailable
from service.deadline import within_deadline
from service.resources import Resources
from service.telemetry.request import timed

_Result = TypeVar("_Result")
_log = logging.getLogger("mlcd.service")


async def change(request: Request, resources: Resources, work: Callable[[], _Result]) -> _Result:
    """What `work` returns, by the request's deadline. Past it, the change may still be made: it is idempotent.

    Raises Unavailable where the disk is full or no more files can be opened; nothing has changed then.
    """
    running = asyncio.get_running_loop().run_in_executor(resources.writing, _without_places, work)
    with timed("store"):
        return await within_deadline(running, request.state.deadline)


def _without_places(work: Callable[[], _Result]) -> _Result:
    """What the disk refuses names files: that is for the log, not for the client."""
    try:
        return work()
    except TooManyOpenFiles as error:
        _log.error("a collection cannot be changed: %s", error)
        raise
    except Unavailable as error:
        _log.error("a collection cannot be changed: %s", error)
        raise Unavailable(
            "the server's disk is full or fails",
            remedy="send the request again when there is space; what was acknowledged is kept",
        ) from error
