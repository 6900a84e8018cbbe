"""Records which pictures of an explored folder or URL were processed, so that the next run
processes only changes.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlcd.artifacts.disk import replacing
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.types import SampleKey


@dataclass(frozen=True)
class FileStamp:
    """Size and modification time of a picture's file; a picture is unchanged while both stay equal.

    modified_ns: None if the file is not on this machine.
    """

    size_bytes: int
    modified_ns: int | None


@dataclass(frozen=True)
class SeenPicture:
    """A processed picture. reason, detail: why it cannot be used; None for a usable picture."""

    stamp: FileStamp
    sha256: str
    reason: str | None = None
    detail: str | None = None


class SeenPictures:
    """The processed pictures by key, in a file to which changes are appended.

    Ignores a line that a crash cut short, so that its picture is processed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_key: dict[SampleKey, SeenPicture] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    self._apply(json.loads(line))
        self._rewrite()

    def _apply(self, fields: dict[str, object]) -> None:
        key, stamp = str(fields.pop("key")), fields.pop("stamp", None)
        if stamp is None:
            self.by_key.pop(key, None)
        else:
            self.by_key[key] = SeenPicture(FileStamp(**stamp), **fields)  # type: ignore[arg-type]

    def _rewrite(self) -> None:
        with replacing(self._path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(key, picture) for key, picture in self.by_key.items())

    def add(self, pictures: Mapping[SampleKey, SeenPicture]) -> None:
        self.by_key.update(pictures)
        self._append(_line(key, picture) for key, picture in pictures.items())

    def forget(self, keys: Iterable[SampleKey]) -> None:
        removed = [key for key in keys if self.by_key.pop(key, None) is not None]
        self._append(json.dumps({"key": key}) + "\n" for key in removed)

    def list_skipped(self) -> list[tuple[SampleKey, SeenPicture]]:
        """Returns the pictures that cannot be used."""
        return [
            (key, picture) for key, picture in self.by_key.items() if picture.reason is not None
        ]

    def _append(self, lines: Iterable[str]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def read_stamps(source: Source, entries: Entries) -> list[FileStamp]:
    """Returns the stamp of each picture, in the order of the entries."""
    times: dict[str, int | None] = {}
    stamps = []
    for entry in entries:
        path = next(iter(source.files_of([entry])), "")
        if path not in times:
            times[path] = _read_modified_ns(path)
        stamps.append(FileStamp(entry.size_bytes, times[path]))
    return stamps


def _read_modified_ns(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except (OSError, ValueError):
        return None


def _line(key: SampleKey, picture: SeenPicture) -> str:
    return json.dumps({"key": key, **asdict(picture)}, ensure_ascii=False) + "\n"
