"""Images as text: data-URIs, URLs, and plain base64 in fields that can only contain an image."""

import binascii
import re
from typing import Any, Final

import pybase64

from mlcd.errors import ImageRejected
from mlcd.service.fetch.image_url import ImageUrl, RequestImage

_BASE64_MARK: Final = re.compile(r"; *base64 *$", re.IGNORECASE)
_WHITESPACE: Final = " \t\r\n\f"
_PADDING: Final = "=" + _WHITESPACE
_INVALID_CHARACTER: Final = re.compile(rf"[^A-Za-z0-9+/_\-{_WHITESPACE}]")
_TO_STANDARD: Final = str.maketrans("-_", "+/", _WHITESPACE)
_MAX_REWRITTEN: Final = 2**24  # characters; rewriting takes twice their memory
_REMEDY: Final = "data:image/jpeg;base64,…"


def image_from_uri(value: Any) -> RequestImage:
    """Returns the bytes of a data-URI, or the URL.

    Anything else is refused: a string is never a path.
    """
    if not isinstance(value, str):
        return ImageRejected("unreadable", "an image must be a data-URI", remedy=_REMEDY)
    if is_url(value):
        return ImageUrl(value)
    if not is_data_uri(value):
        return ImageRejected(
            "unreadable", "an image must be a data-URI or a URL", remedy=f"send {_REMEDY}"
        )
    head, separator, payload = value.partition(",")
    if not separator or not _BASE64_MARK.search(head):
        return ImageRejected("unreadable", "the data-URI must be in base64", remedy=_REMEDY)
    return image_from_base64(payload)


def image_from_field(value: Any) -> RequestImage:
    """Reads a field that can only contain an image; unlike `image_from_uri`, takes base64, too."""
    if not isinstance(value, str) or is_url(value) or is_data_uri(value):
        return image_from_uri(value)
    return image_from_base64(value)


def image_from_base64(text: str) -> bytes | ImageRejected:
    """Decodes base64, also with line breaks, without padding, or in the URL-safe alphabet.

    Text with any other character is refused; no character is skipped.
    """
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return _decode_other_forms(text)


def _decode_other_forms(text: str) -> bytes | ImageRejected:
    if len(text) > _MAX_REWRITTEN:
        return ImageRejected(
            "unreadable",
            f"the image is not valid base64: with more than {_MAX_REWRITTEN} characters it must be"
            " in one line, padded, in the standard alphabet",
        )
    content = text.rstrip(_PADDING)
    if (invalid := _INVALID_CHARACTER.search(content)) is not None:
        number, character = invalid.start() + 1, f"U+{ord(invalid[0]):04X}"
        return ImageRejected(
            "unreadable", f"the image is not valid base64: its character {number} is {character}"
        )
    digits = content.translate(_TO_STANDARD)
    if len(digits) % 4 == 1:
        return ImageRejected(
            "unreadable",
            f"the image is not valid base64: it has {len(digits)} characters, so some are missing",
        )
    return pybase64.b64decode(digits + "=" * (-len(digits) % 4))


def is_data_uri(value: str) -> bool:
    return value[:5].lower() == "data:"


def is_url(value: str) -> bool:
    return value[:8].lower().startswith(("http://", "https://"))


def is_image(value: object) -> bool:
    """Tells whether a value is the data-URI or the URL of an image."""
    return isinstance(value, str) and (is_data_uri(value) or is_url(value))
