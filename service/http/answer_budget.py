"""The budget of answers: bytes that the server has made and their clients have not read.

Every answer of the application passes the middleware here, so a new route is within the budget
without a line of its own. An answer that finds no room is refused before it begins. Larger ones go
out in parts of a mebibyte, each after the client has read the one before: beside the answer itself
a connection holds one part.
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
# The connection itself takes as much without a wait. Such answers are not counted: probes, refusals
# and most others are never refused for others' sake.
_SMALL_BYTES: Final = 2**16
_ANNOUNCED: Final = "announced_answer_bytes"


def announce_answer(scope: Scope, num: int) -> None:
    """Reserves `num` bytes before an answer begins whose later parts need them."""
    scope["state"][_ANNOUNCED] = num


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
        self._reserved = 0
        self._owner: str | None = None
        self._refused = False

    async def send(self, message: Message) -> None:
        if self._refused:
            await asyncio.sleep(0)  # a stream hears of the end of its answer
        elif message["type"] == "http.response.start":
            self._start = message  # until it is known whether there is room for what follows
        elif message["type"] != "http.response.body":
            await self._send(message)
        else:
            await self._send_body(message.get("body", b""), more=message.get("more_body", False))

    def release(self) -> None:
        self._resources.admission.answers.release(self._reserved, owner=self._owner)
        self._reserved = 0

    async def _send_body(self, body: Any, *, more: bool) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            try:
                self._admit(len(body), more=more)
            except MlcdError as error:
                self._refused = True
                refusal = await handle_mlcd_error(Request(self._scope), error)
                await refusal(self._scope, self._receive, self._send)
                return
            await self._send(start)
        elif len(body) > max(self._reserved, _SMALL_BYTES):
            await self._wait_for_room(len(body))
        if len(body) <= _SMALL_BYTES:
            await self._pass(body, more=more)
            return
        for begin in range(0, len(body), PART_BYTES):
            await self._pass(body[begin : begin + PART_BYTES], more=True)
        # The server below waits for the client at the next message, and not after the last one.
        await self._pass(b"", more=more)

    def _admit(self, num: int, *, more: bool) -> None:
        """Reserves the answer's bytes. Raises Overloaded without room for them, and TooLarge for
        an answer that is too long to be in memory.
        """
        limit = self._resources.settings.limits.max_answer_bytes
        if num > limit and not more:
            raise TooLarge(f"the answer has more than {limit} bytes", limit="max_answer_bytes")
        announced = self._scope["state"].get(_ANNOUNCED, 0)
        key = self._scope["state"].get("key")
        self._owner = None if key is None else key.id
        needed = max(min(announced, limit), num)
        if needed > _SMALL_BYTES:
            self._resources.admission.answers.reserve(needed, owner=self._owner)
            self._reserved = needed

    async def _wait_for_room(self, num: int) -> None:
        """Reserves as much for an answer that has begun, which cannot be refused any more.

        The connection's timer ends the wait, with the connection.
        """
        answers, more = self._resources.admission.answers, num - self._reserved
        while not answers.has_room(more, owner=self._owner):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(ANSWER_POLL_S)
        answers.reserve(more, owner=self._owner)
        self._reserved = num

    async def _pass(self, body: Any, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
