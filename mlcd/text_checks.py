"""The check of one text, before any tokenizer sees it."""

from mlcd.errors import TextRejected


def checked_text(text: object, *, max_chars: int | None) -> str | TextRejected:
    """Returns the text, or why no tokenizer takes it.

    max_chars: the longest that is taken; None where no limit is known.
    """
    if not isinstance(text, str):
        return TextRejected("not-a-string", "a text must be a string")
    if max_chars is not None and len(text) > max_chars:
        return too_long(max_chars, "characters")
    if not text.strip():
        return TextRejected("empty", "the text is empty")
    if not is_unicode(text):
        return TextRejected("not-unicode", "the text is no valid Unicode")
    return text


def is_unicode(text: str) -> bool:
    """Tells whether the text can be encoded: it has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_long(most: int, units: str) -> TextRejected:
    return TextRejected("too-long", f"the text has more than {most} {units}", remedy="shorten it")
