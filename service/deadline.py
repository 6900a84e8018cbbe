"""The deadline: the moment by which a request must be answered."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from mlcd.errors import DeadlineExceeded

_Result = TypeVar("_Result")


async def within_deadline(awaitable: Awaitable[_Result], deadline: float) -> _Result:
    """Returns the result of the work; when the loop's clock passes `deadline`, cancels the work and
    raises DeadlineExceeded.
    """
    try:
        async with asyncio.timeout_at(deadline):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the time for a request has passed", remedy="send fewer images at once"
        ) from error
