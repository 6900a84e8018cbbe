"""The members of a tar file, with the place of each one's bytes; hard links are followed."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Final

from mlcd.images.tar_spans import NOWHERE

_TAR_BLOCK: Final = 512


@dataclass
class TarMember:
    """A file, or what is to be one.

    offset: of its `size` bytes; NOWHERE where it has none that can be read: a symbolic link, a
    device, a sparse file, a name that leads out of the archive, or a link to such.
    target: what a hard link is a name of.
    """

    name: PurePosixPath
    offset: int
    size: int
    target: PurePosixPath | None = None

    @property
    def is_file(self) -> bool:
        return self.offset != NOWHERE


class TarMembers:
    """One pass over an archive.

    is_damaged: after the pass, whether it ended at something that is not the archive's end.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.is_damaged = False

    def __iter__(self) -> Iterator[TarMember]:
        """Yields all members but folders, in order. Raises as tarfile does.

        A link to a later member is NOWHERE until the pass is over.
        """
        place_of: dict[PurePosixPath, TarMember] = {}
        waiting: list[TarMember] = []
        with tarfile.open(fileobj=self._raw, mode="r:") as archive:
            for info in archive:
                # tarfile would keep them all, a kilobyte each
                archive.members.clear()  # type: ignore[attr-defined]
                if info.isdir():
                    continue
                member = _member(info)
                if member.target is not None and not _follow(member, place_of):
                    waiting.append(member)
                if member.is_file:
                    place_of[member.name] = member
                yield member
            # tarfile takes anything that is not a header for the end, but only zeros are.
            self._raw.seek(archive.offset)
            self.is_damaged = self._raw.read(_TAR_BLOCK) != bytes(_TAR_BLOCK)
        while resolved := [member for member in waiting if _follow(member, place_of)]:
            place_of |= {member.name: member for member in resolved}
            waiting = [member for member in waiting if not member.is_file]


def _member(info: tarfile.TarInfo) -> TarMember:
    name = PurePosixPath(info.name)
    is_read = info.isreg() and not info.issparse() and ".." not in name.parts
    target = PurePosixPath(info.linkname) if info.islnk() else None
    return TarMember(name, *((info.offset_data, info.size) if is_read else (NOWHERE, 0)), target)


def _follow(link: TarMember, place_of: dict[PurePosixPath, TarMember]) -> bool:
    """Gives a link the place of its target, where that is known."""
    target = None if link.target is None else place_of.get(link.target)
    if target is None or ".." in link.name.parts:
        return False
    link.offset, link.size = target.offset, target.size
    return True
