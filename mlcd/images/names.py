"""Classifies and encodes file names, which need not be valid UTF-8."""

from pathlib import PurePath, PurePosixPath
from typing import Final

# Non-image files that commonly accompany images. Any other file is decoded, and reported if that
# fails.
_SIDECARS: Final = frozenset(
    [
        ".txt",
        ".json",
        ".jsonl",
        ".csv",
        ".tsv",
        ".md",
        ".yaml",
        ".yml",
        ".xml",
        ".html",
        ".npy",
        ".npz",
        ".parquet",
        ".cls",
        ".pkl",
        ".py",
        ".db",
        ".ini",
        ".log",
        ".zip",
        ".tar",
    ]
)


def is_candidate(path: PurePath) -> bool:
    """Returns whether a file at this path below a folder counts as an image; hidden files and
    sidecars do not.
    """
    return not _is_hidden(path) and path.suffix.lower() not in _SIDECARS


def is_sidecar(path: PurePath, *suffixes: str) -> bool:
    """Returns whether a file in an archive is a non-hidden sidecar with one of these suffixes."""
    return path.suffix in suffixes and not _is_hidden(path)


def _is_hidden(path: PurePath) -> bool:
    return any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)


def printable(name: str) -> str:
    """Returns the name as valid UTF-8; invalid bytes become backslash escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def class_of_path(relative: PurePosixPath) -> str | None:
    """Returns the parent folder as the class name, None for a file at the top level."""
    parent = relative.parent.as_posix()
    return None if parent == "." else printable(parent)


def encode_path(path: str) -> bytes:
    """Returns a file name as bytes: text columns cannot store names that are not valid UTF-8."""
    return path.encode("utf-8", "surrogateescape")


def decode_path(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
