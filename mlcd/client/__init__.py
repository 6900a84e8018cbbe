"""The Python client of `mlcd serve`: images in, numpy arrays out, over the public REST contract
alone.

It needs httpx (`pip install mlcd[client]`), and neither torch nor faiss nor the server.
"""

from mlcd.client.answers import (
    Added,
    Center,
    CenterSet,
    Collection,
    Embedded,
    Example,
    Found,
    Info,
    Item,
    Label,
    Labeled,
    Match,
    Origin,
)
from mlcd.client.asynchronous import AsyncClient
from mlcd.client.images import ImageInput
from mlcd.client.problems import (
    AnswerInvalid,
    Problem,
    Refused,
    RefusedAccess,
    RefusedConflict,
    RefusedInput,
    RefusedLate,
    RefusedNotFound,
    RefusedOverload,
    RefusedUnavailable,
)
from mlcd.client.synchronous import Client

__all__ = [
    "Added",
    "AnswerInvalid",
    "AsyncClient",
    "Center",
    "CenterSet",
    "Client",
    "Collection",
    "Embedded",
    "Example",
    "Found",
    "ImageInput",
    "Info",
    "Item",
    "Label",
    "Labeled",
    "Match",
    "Origin",
    "Problem",
    "Refused",
    "RefusedAccess",
    "RefusedConflict",
    "RefusedInput",
    "RefusedLate",
    "RefusedNotFound",
    "RefusedOverload",
    "RefusedUnavailable",
]
