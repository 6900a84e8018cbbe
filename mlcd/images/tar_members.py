"""Lists the members of a tar file with the offsets of their bytes, and resolves hard links."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Final

from mlcd.images.tar_spans import NOWHERE

_TAR_BLOCK: Final = 512


@dataclass
class TarMember:
    """A member other than a folder.

    offset: offset of its `size` bytes. NOWHERE without readable bytes: a symbolic link, a device, a
    sparse file, a name outside the archive, or a link to any of these. target: target of a hard
    link, None for other members.
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

    is_damaged: whether the pass stopped before the archive's end marker; valid after the pass.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.is_damaged = False

    def __iter__(self) -> Iterator[TarMember]:
        """Yields all members except folders, in order. Raises tarfile's errors.

        A link to a later member stays NOWHERE until the pass is over.
        """
        files: dict[PurePosixPath, TarMember] = {}
        unresolved: list[TarMember] = []
        with tarfile.open(fileobj=self._raw, mode="r:") as archive:
            for info in archive:
                # tarfile would keep all members in memory, a kilobyte each
                archive.members.clear()  # type: ignore[attr-defined]
                if info.isdir():
                    continue
                member = _to_member(info)
                if member.target is not None and not _resolve(member, files):
                    unresolved.append(member)
                if member.is_file:
                    files[member.name] = member
                yield member
            # tarfile stops at anything that is not a header; the end marker is a block of zeros.
            self._raw.seek(archive.offset)
            self.is_damaged = self._raw.read(_TAR_BLOCK) != bytes(_TAR_BLOCK)
        while resolved := [member for member in unresolved if _resolve(member, files)]:
            files |= {member.name: member for member in resolved}
            unresolved = [member for member in unresolved if not member.is_file]


def _to_member(info: tarfile.TarInfo) -> TarMember:
    name = PurePosixPath(info.name)
    is_readable = info.isreg() and not info.issparse() and ".." not in name.parts
    offset, size = (info.offset_data, info.size) if is_readable else (NOWHERE, 0)
    target = PurePosixPath(info.linkname) if info.islnk() else None
    return TarMember(name, offset, size, target)


def _resolve(link: TarMember, files: dict[PurePosixPath, TarMember]) -> bool:
    """Copies offset and size of a link's target; returns False if the target is not in `files`."""
    target = None if link.target is None else files.get(link.target)
    if target is None or ".." in link.name.parts:
        return False
    link.offset, link.size = target.offset, target.size
    return True
