"""Requests that are being answered."""

import asyncio


class InFlight:
    """Counts them; use from one event loop."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    def began(self) -> None:
        self._num += 1
        self._none.clear()

    def ended(self) -> None:
        self._num -= 1
        if not self._num:
            self._none.set()

    async def none(self) -> None:
        """Until there are none."""
        await self._none.wait()
