"""The budget of answers: the bytes that the server has written and the clients have not read yet.

Every answer passes this middleware, so a new route needs no code for the budget. An answer that
exceeds the budget is refused before it starts. A large answer is sent in parts of 1 MiB, each after
the client has read the previous part, so that its connection buffers only one part.
"""

import asyncio
from typing import Any, Final

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcd.errors import MlcdError
from mlcd.service.errors import TooLarge
from mlcd.service.http.problems import handle_mlcd_error
from mlcd.service.resources import Resources
from mlcd.service.timings import ANSWER_POLL_S

PART_BYTES: Final = 2**20
# A connection buffers this much without waiting. Smaller answers do not count against the budget,
# so probes, refusals and most other answers are never refused because of large ones.
_SMALL_BYTES: Final = 2**16
_ANNOUNCED: Final = "announced_answer_bytes"


def announce_answer(scope: Scope, num_bytes: int) -> None:
    """Announces that an answer needs `num_bytes`, to be reserved before its first part is sent."""
    scope["state"][_ANNOUNCED] = num_bytes


class AnswerMiddleware:
    """Counts answers against the budget until their clients have read them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.release()


class _Answer:
    """The answer to one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._resources: Resources = scope["state"]["resources"]
        self._start: Message | None = None
        self._reserved_bytes = 0
        self._owner: str | None = None
        self._is_refused = False

    async def send(self, message: Message) -> None:
        if self._is_refused:
            await asyncio.sleep(0)  # lets a stream notice that its answer has ended
        elif message["type"] == "http.response.start":
            self._start = message  # sent once the bytes of the body are reserved
        elif message["type"] != "http.response.body":
            await self._send(message)
        else:
            await self._send_body(message.get("body", b""), more=message.get("more_body", False))

    def release(self) -> None:
        self._resources.admission.answers.release(self._reserved_bytes, owner=self._owner)
        self._reserved_bytes = 0

    async def _send_body(self, body: Any, *, more: bool) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            try:
                self._admit(len(body), more=more)
            except MlcdError as error:
                self._is_refused = True
                refusal = await handle_mlcd_error(Request(self._scope), error)
                await refusal(self._scope, self._receive, self._send)
                return
            await self._send(start)
        elif len(body) > max(self._reserved_bytes, _SMALL_BYTES):
            await self._wait_for_room(len(body))
        if len(body) <= _SMALL_BYTES:
            await self._send_part(body, more=more)
            return
        for offset in range(0, len(body), PART_BYTES):
            await self._send_part(body[offset : offset + PART_BYTES], more=True)
        # uvicorn waits for the client before each message, not after the last, hence an empty one.
        await self._send_part(b"", more=more)

    def _admit(self, num_bytes: int, *, more: bool) -> None:
        """Reserves the answer's bytes. Raises Overloaded if the budget has too few left, and
        TooLarge for an answer in one part that exceeds `max_answer_bytes`.
        """
        limit = self._resources.settings.limits.max_answer_bytes
        if num_bytes > limit and not more:
            raise TooLarge(
                f"the answer must have at most {limit} bytes, got {num_bytes}",
                limit="max_answer_bytes",
            )
        announced_bytes = self._scope["state"].get(_ANNOUNCED, 0)
        key = self._scope["state"].get("key")
        self._owner = None if key is None else key.id
        needed_bytes = max(min(announced_bytes, limit), num_bytes)
        if needed_bytes > _SMALL_BYTES:
            self._resources.admission.answers.reserve(needed_bytes, owner=self._owner)
            self._reserved_bytes = needed_bytes

    async def _wait_for_room(self, num_bytes: int) -> None:
        """Waits until `num_bytes` can be reserved: an answer that has started cannot be refused.

        The connection's timer ends the wait by closing the connection.
        """
        answers, missing_bytes = self._resources.admission.answers, num_bytes - self._reserved_bytes
        while not answers.has_room(missing_bytes, owner=self._owner):  # noqa: ASYNC110 - no event
            await asyncio.sleep(ANSWER_POLL_S)
        answers.reserve(missing_bytes, owner=self._owner)
        self._reserved_bytes = num_bytes

    async def _send_part(self, body: Any, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
