"""Bounds on JSON, checked before it is parsed.

orjson holds the GIL until it is done: 60 MB of `[],[],…` would stop every thread of the server for
seconds and become gigabytes of objects. So this module first counts the values and the text with
numpy, which releases the GIL.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.errors import TooLarge
from mlcd.service.settings import Limits

_BLOCK_BYTES: Final = 2**18  # fits into a core's cache
# The number of values that each byte counts as: lists, objects and fields take ten times as long.
_COSTS: Final = {b",": 1, b'"': 1, b":": 10, b"[": 10, b"{": 10}
_LONG_BYTES: Final = 4096  # images in base64 are longer; a shorter string counts as text
_SLASH, _BACKSLASH, _QUOTE = b'/\\"'
_FIRST_NON_ASCII: Final = 0x80


def check_json(body: bytes | bytearray | memoryview, limits: Limits) -> None:
    """Raises TooLarge for JSON that would take too long or too much memory to parse."""
    if len(body) > limits.max_json_bytes:
        raise TooLarge(
            f"the JSON must have at most {limits.max_json_bytes} bytes, got {len(body)}",
            limit="max_json_bytes",
        )
    octets = np.frombuffer(body, np.uint8)
    if _count_values(octets) > limits.max_json_values:
        raise TooLarge(
            f"the JSON must have at most {limits.max_json_values} values",
            limit="max_json_values",
        )
    max_text = limits.max_json_text_bytes
    if len(octets) > max_text and _has_more_text(octets, max_text):
        raise TooLarge(
            f"the JSON must have at most {max_text} bytes, not counting numbers and base64 images",
            limit="max_json_text_bytes",
        )


def _iterate_blocks(octets: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields the position of each block's first byte, and the block plus one byte."""
    for start in range(0, len(octets), _BLOCK_BYTES):
        yield start, octets[start : start + _BLOCK_BYTES + 1]


def _count_values(octets: NDArray[np.uint8]) -> int:
    """Returns an upper bound on the number of values; characters inside strings count, too."""
    return sum(
        cost * int(np.count_nonzero(block[:_BLOCK_BYTES] == ord(byte)))
        for _, block in _iterate_blocks(octets)
        for byte, cost in _COSTS.items()
    )


def _has_more_text(octets: NDArray[np.uint8], max_bytes: int) -> bool:
    """Tells whether more than `max_bytes` are neither numbers nor long strings of plain ASCII.

    Images in base64 are such strings. Python stores a string with 1, 2 or 4 bytes for each
    character, depending on its widest character, so a single emoji makes a long string take four
    times as much memory. All other text is therefore bounded in total.
    """
    specials = _find_specials(octets, max_bytes)
    if len(specials) > max_bytes:
        return True
    quotes = [
        start + np.flatnonzero(block[:_BLOCK_BYTES] == _QUOTE)
        for start, block in _iterate_blocks(octets)
    ]
    # There is no quote between two consecutive edges.
    edges = np.concatenate([[-1], *quotes, [len(octets)]])
    lengths = np.diff(edges) - 1
    is_plain = np.diff(np.searchsorted(specials, edges)) == 0
    # What follows an escaped quote is the rest of a string, which does not count as plain.
    is_plain[1:] &= octets[edges[1:-1] - 1] != _BACKSLASH
    return len(octets) - int(lengths[is_plain & (lengths >= _LONG_BYTES)].sum()) > max_bytes


def _find_specials(octets: NDArray[np.uint8], max_bytes: int) -> NDArray[np.int64]:
    r"""Returns the positions of bytes that plain strings cannot have; stops soon after `max_bytes`.

    These are non-ASCII bytes and backslashes, except in `\/`, which PHP writes for a slash.
    """
    positions: list[NDArray[np.int64]] = []
    num = 0
    for start, block in _iterate_blocks(octets):
        special = block >= _FIRST_NON_ASCII
        special[:-1] |= (block[:-1] == _BACKSLASH) & (block[1:] != _SLASH)
        positions.append(start + np.flatnonzero(special[:_BLOCK_BYTES]))
        num += len(positions[-1])
        if num > max_bytes:
            break
    return np.concatenate(positions)
