"""The images of a request, before URLs are fetched."""

from dataclasses import dataclass, field
from typing import TypeAlias

from mlcd.errors import ImageRejected


@dataclass(frozen=True)
class ImageUrl:
    """A string that looks like an image's URL; not parsed yet, and never shown in logs."""

    text: str = field(repr=False)


# An image of a request: its bytes, the error why it cannot be used, or its URL.
RequestImage: TypeAlias = bytes | ImageRejected | ImageUrl
