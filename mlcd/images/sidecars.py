"""The names of files beside images, such as captions and classes."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import PurePosixPath

from mlcd.keys import normalize_key


def sample_of(name: PurePosixPath) -> str:
    """Returns webdataset's key: the path up to the first dot of the file name."""
    return (name.parent / name.name.split(".", 1)[0]).as_posix()


def stem_of(name: PurePosixPath) -> str:
    """Returns the path up to the last dot of the file name."""
    return name.with_suffix("").as_posix()


def stems_of(name: PurePosixPath) -> Iterator[str]:
    """Yields the stems that files beside an image may have, the image's own stem first.

    For `a/22.05.png`: `a/22.05`, then webdataset's key `a/22`.
    """
    stem, sample = stem_of(name), sample_of(name)
    yield stem
    while len(stem) > len(sample):
        stem = stem[: stem.rindex(".")]
        yield stem


class Spellings:
    """A set of names that finds a name in any Unicode normalization (NFC or NFD)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)

    def find(self, name: str) -> str | None:
        """Returns the equal name of the set, or else one that differs only by normalization."""
        if name in self._names:
            return name
        return None if name.isascii() else self._by_normal.get(normalize_key(name))

    @cached_property
    def _by_normal(self) -> dict[str, str]:
        return {normalize_key(name): name for name in sorted(self._names, reverse=True)}
