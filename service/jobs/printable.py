"""Names of files, as text for logs, terminals and JSON."""

from typing import Final

_BYTES: Final = range(0xDC80, 0xDD00)
"""What stands for bytes of a name that are no UTF-8."""


def printable(text: str) -> str:
    """One line without escapes of a terminal: what cannot be printed, or is no valid UTF-8, by its number."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
