"""Images as text: data-URIs, URLs, and plain base64 where a field says that it is an image."""

import binascii
import re
from typing import Any, Final

import pybase64

from mlcd.errors import ImageRejected
from mlcd.service.fetch.image_url import GivenImage, ImageUrl

_SAYS_BASE64: Final = re.compile(r"; *base64 *$", re.IGNORECASE)
_WHITESPACE: Final = " \t\r\n\f"
_BEHIND: Final = "=" + _WHITESPACE
_FOREIGN: Final = re.compile(rf"[^A-Za-z0-9+/_\-{_WHITESPACE}]")
_TO_STANDARD: Final = str.maketrans("-_", "+/", _WHITESPACE)
_MOST_REWRITTEN: Final = 2**24  # characters; rewriting takes twice their memory
_REMEDY: Final = "data:image/jpeg;base64,…"


def image_from_uri(value: Any) -> GivenImage:
    """Returns the bytes of a data-URI; a URL stays a URL.

    Anything else is refused: a string is never a path.
    """
    if not isinstance(value, str):
        return ImageRejected("unreadable", "an image must be a data-URI", remedy=_REMEDY)
    if is_url(value):
        return ImageUrl(value)
    if not is_data_uri(value):
        return ImageRejected(
            "unreadable", "an image is a data-URI or a URL, not a text", remedy=f"send {_REMEDY}"
        )
    head, separator, payload = value.partition(",")
    if not separator or not _SAYS_BASE64.search(head):
        return ImageRejected("unreadable", "the data-URI does not say base64", remedy=_REMEDY)
    return image_from_base64(payload)


def image_from_field(value: Any) -> GivenImage:
    """Reads a field that can hold only an image; unlike `image_from_uri` it also takes base64."""
    if not isinstance(value, str) or is_url(value) or is_data_uri(value):
        return image_from_uri(value)
    return image_from_base64(value)


def image_from_base64(text: str) -> bytes | ImageRejected:
    """Decodes base64, also in lines, without its padding or in the alphabet of URLs.

    Any other character is refused and never skipped.
    """
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return _decode_other_forms(text)


def _decode_other_forms(text: str) -> bytes | ImageRejected:
    if len(text) > _MOST_REWRITTEN:
        return ImageRejected(
            "unreadable",
            f"the image is not valid base64: of more than {_MOST_REWRITTEN} characters it has to"
            " be in one line, padded, in the standard alphabet",
        )
    content = text.rstrip(_BEHIND)
    if (foreign := _FOREIGN.search(content)) is not None:
        number, character = foreign.start() + 1, f"U+{ord(foreign[0]):04X}"
        return ImageRejected(
            "unreadable", f"the image is not valid base64: its character {number} is {character}"
        )
    digits = content.translate(_TO_STANDARD)
    if len(digits) % 4 == 1:
        return ImageRejected(
            "unreadable",
            f"the image is not valid base64: no bytes end after {len(digits)} characters, so some"
            " are missing",
        )
    return pybase64.b64decode(digits + "=" * (-len(digits) % 4))


def is_data_uri(value: str) -> bool:
    return value[:5].lower() == "data:"


def is_url(value: str) -> bool:
    return value[:8].lower().startswith(("http://", "https://"))


def is_image(value: object) -> bool:
    """Tells whether a value is the data-URI or the URL of an image."""
    return isinstance(value, str) and (is_data_uri(value) or is_url(value))
