"""One process among those of a torchrun; known before torch, which takes seconds to import."""

import os


class Elsewhere(Exception):
    """Another process tells what went wrong; this one ends without a word."""


def place(name: str, default: int) -> int:
    """RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE; the default where there is no torchrun."""
    return int(os.environ.get(name, default))  # noqa: TID251 - torchrun tells a process its place in no other way


def is_first() -> bool:
    """Whether this is the only process, or the first of a torchrun: the one that speaks."""
    return place("RANK", 0) == 0
