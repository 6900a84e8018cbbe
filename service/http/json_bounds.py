"""Bounds on JSON that are checked before it is parsed.

orjson holds the interpreter's lock from the first byte to the last: 60 MB of `[],[],…` would stop
every thread of the server for seconds and become gigabytes of objects. This module first counts
with numpy, which lets other threads run, what makes parsing slow.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.errors import TooLarge
from mlcd.service.settings import Limits

_BLOCK_BYTES: Final = 2**18  # fits into a core's cache
# The values that a byte announces; lists, objects and their fields take ten times as long to parse.
_COSTS: Final = {b",": 1, b'"': 1, b":": 10, b"[": 10, b"{": 10}
_LONG_BYTES: Final = 4096  # an image in base64 is longer; a shorter string counts as text
_SLASH, _BACKSLASH, _QUOTE = b'/\\"'
_FIRST_NOT_ASCII: Final = 0x80


def check_json(body: bytes | bytearray | memoryview, limits: Limits) -> None:
    """Raises TooLarge for JSON that would take long to parse, or much memory."""
    if len(body) > limits.max_json_bytes:
        raise TooLarge(
            f"the JSON is larger than {limits.max_json_bytes} bytes", limit="max_json_bytes"
        )
    octets = np.frombuffer(body, np.uint8)
    if _cost(octets) > limits.max_json_values:
        raise TooLarge("the JSON holds more values than the server parses", limit="max_json_values")
    if len(octets) > limits.max_json_text_bytes and _holds_more_text(
        octets, limits.max_json_text_bytes
    ):
        raise TooLarge(
            f"the JSON holds more than {limits.max_json_text_bytes} bytes beside numbers and images"
            " in base64",
            limit="max_json_text_bytes",
        )


def _blocks(octets: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields each block with one byte more, and the position of its first byte."""
    for start in range(0, len(octets), _BLOCK_BYTES):
        yield start, octets[start : start + _BLOCK_BYTES + 1]


def _cost(octets: NDArray[np.uint8]) -> int:
    """Returns an upper bound on the number of values; characters inside strings count, too."""
    return sum(
        cost * int(np.count_nonzero(block[:_BLOCK_BYTES] == ord(byte)))
        for _, block in _blocks(octets)
        for byte, cost in _COSTS.items()
    )


def _holds_more_text(octets: NDArray[np.uint8], most: int) -> bool:
    """Tells whether more than `most` bytes are neither numbers nor long strings of plain ASCII.

    Base64 is such a string. Python stores a string at one, two or four bytes a character, by its
    widest one: a single emoji makes a long string take four times as much memory. All other text
    is therefore bounded as a whole.
    """
    specials = _specials(octets, most)
    if len(specials) > most:
        return True
    quotes = [
        start + np.flatnonzero(block[:_BLOCK_BYTES] == _QUOTE) for start, block in _blocks(octets)
    ]
    # No quote lies between two neighboring edges.
    edges = np.concatenate([[-1], *quotes, [len(octets)]])
    lengths = np.diff(edges) - 1
    plain = np.diff(np.searchsorted(specials, edges)) == 0
    # An escaped quote opens no string: it may be followed by the rest of one that is not plain.
    plain[1:] &= octets[edges[1:-1] - 1] != _BACKSLASH
    return len(octets) - int(lengths[plain & (lengths >= _LONG_BYTES)].sum()) > most


def _specials(octets: NDArray[np.uint8], most: int) -> NDArray[np.int64]:
    r"""Returns the positions of bytes that no plain string has; it stops soon after `most` of them.

    These are bytes outside of ASCII and backslashes, except in `\/`, which PHP writes for a slash.
    """
    positions: list[NDArray[np.int64]] = []
    num = 0
    for start, block in _blocks(octets):
        special = block >= _FIRST_NOT_ASCII
        special[:-1] |= (block[:-1] == _BACKSLASH) & (block[1:] != _SLASH)
        positions.append(start + np.flatnonzero(special[:_BLOCK_BYTES]))
        num += len(positions[-1])
        if num > most:
            break
    return np.concatenate(positions)
