"""The images of a request before anything is fetched."""

from dataclasses import dataclass, field
from typing import TypeAlias

from mlcd.errors import ImageRejected


@dataclass(frozen=True)
class ImageUrl:
    """A string that looks like a URL in place of an image; it is not parsed, and never shown."""

    text: str = field(repr=False)


# An image of a request: its bytes, why it cannot be used, or its URL.
GivenImage: TypeAlias = bytes | ImageRejected | ImageUrl
