"""The names of files, which need not be valid UTF-8, and what they state."""

from pathlib import PurePath, PurePosixPath
from typing import Final

# Files that lie beside images and are none; every other file is tried, and listed when it fails.
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
    """Tells whether a file at this path below a folder counts as an image; hidden files and
    sidecars do not.
    """
    return not _is_hidden(path) and path.suffix.lower() not in _SIDECARS


def is_sidecar(path: PurePath, *suffixes: str) -> bool:
    """Tells whether a file in an archive is one beside images with one of the suffixes."""
    return path.suffix in suffixes and not _is_hidden(path)


def _is_hidden(path: PurePath) -> bool:
    return any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)


def printable(name: str) -> str:
    """Returns a unique, storable key, also for names that are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def class_of_path(relative: PurePosixPath) -> str | None:
    """Returns the class that a path states."""
    parent = relative.parent.as_posix()
    return None if parent == "." else printable(parent)


def encode_path(path: str) -> bytes:
    """Returns a file name as bytes: it need not be valid UTF-8, which columns of text must be."""
    return path.encode("utf-8", "surrogateescape")


def decode_path(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
