"""The check of one text, before any tokenizer sees it."""

from mlcd.errors import TextRejected


def check_text(text: object, *, max_chars: int | None) -> str | TextRejected:
    """Returns the text, or the reason why it cannot be tokenized.

    max_chars: largest number of characters; None for no limit.
    """
    if not isinstance(text, str):
        return TextRejected("not-a-string", "a text must be a string")
    if max_chars is not None and len(text) > max_chars:
        return too_long(max_chars, "characters")
    if not text.strip():
        return TextRejected("empty", "the text is empty")
    if not is_unicode(text):
        return TextRejected(
            "not-unicode", "the text must be valid Unicode, got half of a surrogate pair"
        )
    return text


def is_unicode(text: str) -> bool:
    """Tells whether the text can be encoded as UTF-8: surrogates must come in pairs."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_long(limit: int, units: str) -> TextRejected:
    return TextRejected("too-long", f"the text has more than {limit} {units}", remedy="shorten it")
