"""What Redis may still be given, where the operator has set a bound."""

import time
from typing import Final

from redis.asyncio import Redis

_FRESH_S: Final = 1.0
"""Of an answer: a writer asks once a second at most. What all of them write in a second may go beyond the bound."""


class Room:
    """By what Redis says that it uses as a whole, whoever filled it: it does not count one client's share."""

    def __init__(self, client: Redis, max_bytes: int | None) -> None:
        """max_bytes: None knows no bound, and asks nothing."""
        self._client, self._max_bytes = client, max_bytes
        self._used_bytes = 0
        self._asked = -_FRESH_S

    async def left(self) -> bool:
        """Raises what the client does."""
        if self._max_bytes is None:
            return True
        if time.monotonic() - self._asked >= _FRESH_S:
            self._used_bytes = (await self._client.info("memory"))["used_memory"]
            self._asked = time.monotonic()
        return self._used_bytes < self._max_bytes
