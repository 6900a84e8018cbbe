"""`mlcd sync`: copies an artifact from one location to another, byte for byte.

On this machine the copy is made in TARGET.partial and appears by one rename. An object store
cannot rename, so the manifest is written last, and only where none exists: without it the
files are not an artifact. Files that an earlier attempt copied are compared, not copied again.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.disk import lock_directory, sync_path, write_synced
from mlcd.artifacts.listed_files import ListedFiles, copy_files, read_listed
from mlcd.artifacts.manifest import MANIFEST, draft_path, parse_manifest
from mlcd.errors import Conflict, InvalidInput
from mlcd.locations import Location
from mlcd.progress import Stages

_COPY_OF: Final = ".copy-of"  # in a draft: the digest of the artifact that is being copied


@dataclass(frozen=True)
class Synced:
    """The result of a sync.

    files: number of files in the artifact. copied, copied_bytes: number of newly copied files, and
    their bytes.
    """

    digest: str
    kind: str
    files: int
    copied: int
    copied_bytes: int


def sync(source: Location, target: Location, reporter: Stages) -> Synced:
    """Copies the artifact at `source` to `target`, and compares every byte there with the manifest.

    Unlisted files in the source, such as names that users gave to clusters, are copied if the
    target lacks them.
    Raises NotFound if the source is missing, ArtifactInvalid if it is damaged,
    Conflict if the target contains something else, InvalidInput if the target is inside the source,
    Unavailable if a store is unreachable.
    """
    origin, destination = Directory.at(source), Directory.at(target)
    if origin.contains(destination):
        raise InvalidInput(f"{target} is inside {source}", remedy="give a target outside of it")
    listed = read_listed(origin)
    if destination.local_path is not None:
        return _sync_to_disk(origin, destination.local_path, listed, reporter)
    sizes = destination.sizes()
    _check_target(destination, sizes, listed)
    destination.abort_uploads()
    synced = _copy(origin, destination, sizes, listed, reporter)
    if MANIFEST not in sizes and not destination.create(MANIFEST, listed.manifest):
        _check_target(destination, destination.sizes(), listed)  # another process was first
    return synced


def _sync_to_disk(origin: Directory, out: Path, listed: ListedFiles, reporter: Stages) -> Synced:
    if (out / MANIFEST).is_file():
        copy = Directory.at(out)
        _check_target(copy, copy.sizes(), listed)
        return _copy(origin, copy, copy.sizes(), listed, reporter)
    if out.exists():
        raise Conflict(
            f"the target must be new or an artifact, got {out}", remedy="give another target"
        )
    draft = draft_path(out)
    with _hold_draft(draft, listed.artifact.digest):
        copy = Directory.at(draft)
        synced = _copy(origin, copy, copy.sizes(), listed, reporter)
        write_synced(draft / MANIFEST, listed.manifest)
        (draft / _COPY_OF).unlink()
        draft.rename(out)
        sync_path(out.parent)
    return synced


@contextmanager
def _hold_draft(draft: Path, digest: str) -> Iterator[None]:
    """Locks the draft of a copy of this artifact. Raises Conflict for any other draft."""
    draft.parent.mkdir(parents=True, exist_ok=True)
    descriptor = lock_directory(draft, fcntl.LOCK_EX)
    try:
        mark = draft / _COPY_OF
        if not any(draft.iterdir()):
            write_synced(mark, digest.encode())
        elif not mark.is_file() or mark.read_bytes() != digest.encode():
            raise Conflict(
                f"{draft} must be empty or an unfinished copy of artifact {digest[:12]}",
                remedy="finish it, remove it or give another target",
            )
        yield
    finally:
        os.close(descriptor)


def _check_target(target: Directory, sizes: dict[str, int], listed: ListedFiles) -> None:
    """Raises Conflict if the target contains another artifact or unlisted files."""
    if MANIFEST in sizes:
        artifact = parse_manifest(target.read(MANIFEST), Path(target.location))
        if artifact.digest != listed.artifact.digest:
            raise Conflict(
                f"{target.location} contains another artifact, with digest {artifact.digest[:12]}",
                remedy="give another target, or remove it",
            )
        return
    unlisted = sorted(sizes.keys() - listed.files.keys())
    if unlisted:
        raise Conflict(
            f"{target.location} contains other files, such as {unlisted[0]}",
            remedy="give an empty or new target",
        )


def _copy(
    origin: Directory,
    target: Directory,
    sizes: dict[str, int],
    listed: ListedFiles,
    reporter: Stages,
) -> Synced:
    """Copies every file except the manifest, and returns the counts."""

    def is_copied(name: str) -> bool:
        entry = listed.files[name]
        if sizes.get(name) == entry.size_bytes and target.measure(name) == entry:
            return True
        if MANIFEST not in sizes or name not in sizes:
            return False
        if listed.is_in_manifest(name):
            target.check(name, target.measure(name), entry)
        raise Conflict(
            f"{target.location}/{name} differs from {origin.location}/{name}",
            remedy="remove the outdated file, and run the same command again",
        )

    num_copied, copied_bytes = copy_files(listed, origin, target, is_copied, reporter)
    artifact = listed.artifact
    num_files = len(listed.files) + 1  # the manifest
    return Synced(artifact.digest, artifact.kind, num_files, num_copied, copied_bytes)
