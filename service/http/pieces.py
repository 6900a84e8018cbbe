"""Large JSON answers, written piece by piece off the event loop: none of them exists as a whole."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from service.http.answers import JSON, json_answer, to_json
from service.resources import Resources

_LARGE_ITEMS: Final = 2048  # entries of an answer: so many are written in about a millisecond
_LARGE_BYTES: Final = 2**20


def listed_answer(
    content: dict[str, Any],
    results: Sequence[Callable[[], Any]],
    stamp: dict[str, str],
    resources: Resources,
    *,
    num_items: int,
    num_bytes: int = 0,
) -> Response:
    """Returns `content` with the field `results` last, each of them made when it is written.

    num_items, num_bytes: about how much there is in all results together; a small answer goes out
    in one piece.
    """
    if num_items <= _LARGE_ITEMS and num_bytes <= _LARGE_BYTES:
        return json_answer({**content, "results": [make() for make in results]}, stamp)
    return StreamingResponse(_written(content, results, resources), headers=stamp, media_type=JSON)


async def _written(
    content: dict[str, Any], results: Sequence[Callable[[], Any]], resources: Resources
) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    yield to_json({**content, "results": []})[: -len(b"]}")]
    for index, make in enumerate(results):
        yield await loop.run_in_executor(resources.compute, _piece, index, make)
    yield b"]}"


def _piece(index: int, make: Callable[[], Any]) -> bytes:
    return (b"," if index else b"") + to_json(make())
