"""The service without a socket: its application on a loop of this thread, with an engine that
computes nothing.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from mlcd.service.http.app import create_app
from mlcd.service.inference.find_model import find_model
from mlcd.service.resources import open_resources
from mlcd.service.settings import Settings


@dataclass(frozen=True)
class Answer:
    status: int
    media_type: str
    body: bytes


class Service:
    """Use as a context; `ask` sends what no HTTP library would."""

    def __enter__(self):
        self._loop, self._stack = asyncio.new_event_loop(), AsyncExitStack()
        settings = Settings(
            model="fake:latency_ms=0", engine="fake", limits={"max_pixels": 10**6, "max_images": 8}
        )
        self._resources = self._loop.run_until_complete(
            self._stack.enter_async_context(open_resources(settings, find_model(settings)))
        )
        self._app = create_app(self._resources)
        self.model = self._resources.encoder.name
        return self

    def __exit__(self, *error):
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()

    def ask(self, path, body, *headers, method="POST"):
        """headers: pairs of bytes. Raises AssertionError where an exchange leaves
        something held.
        """
        answer = self._loop.run_until_complete(
            asyncio.wait_for(self._exchange(method, path, headers, body), 20)
        )
        text = self._resources.metrics.exposition().decode()
        for of in ("images", "pixels", "bytes"):
            assert f'mlcd_held{{of="{of}"}}' not in text or f'mlcd_held{{of="{of}"}} 0.0' in text
        return answer

    async def _exchange(self, method, path, headers, body):
        sent, received = [], [body[: len(body) // 2], body[len(body) // 2 :]]

        async def receive():
            if not received:
                await asyncio.Event().wait()  # the client stays
            return {"type": "http.request", "body": received.pop(0), "more_body": bool(received)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self._app(scope, receive, send)
        given = dict(sent[0]["headers"])
        media_type = given.get(b"content-type", b"").decode().split(";")[0]
        return Answer(
            sent[0]["status"], media_type, b"".join(part.get("body", b"") for part in sent[1:])
        )
