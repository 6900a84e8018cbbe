"""`mlcd sync`: an artifact copied from one location to another, byte for byte.

On this machine the copy is made in TARGET.partial and appears by one rename. In an object store,
which has no rename, the manifest is written last, and only where there is none: without it nothing
is an artifact. What an earlier attempt has copied is compared and not copied again.
"""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from mlcd.artifacts.disk import sync_path, write_synced
from mlcd.artifacts.draft import lock_directory
from mlcd.artifacts.manifest import (
    MANIFEST,
    Artifact,
    FileEntry,
    draft_path,
    parse_manifest,
)
from mlcd.directories import Directory
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, NotFound
from mlcd.locations import Location
from mlcd.progress import Stages

_NUM_THREADS: Final = 8  # requests at one time: an object store answers each after a while
_COPY_OF: Final = ".copy-of"  # in a draft: the digest of the artifact that is being copied


@dataclass(frozen=True)
class Synced:
    """The outcome. files: of the artifact. copied, copied_bytes: those that were not there yet."""

    digest: str
    kind: str
    files: int
    copied: int
    copied_bytes: int


@dataclass(frozen=True)
class _Contents:
    """The files of an artifact and of those inside it, and its own manifest, which comes last."""

    artifact: Artifact
    manifest: bytes
    files: dict[str, FileEntry]


def sync(source: Location, target: Location, reporter: Stages) -> Synced:
    """Copies the artifact at `source` to `target`, and compares every byte there with the manifest.

    Files beside it that no manifest lists, such as given names, are copied where they are missing.
    Raises NotFound where there is no artifact, ArtifactInvalid for one that is damaged, Conflict
    where something else is at the target, InvalidInput for one inside the source, Unavailable
    where a store cannot be reached.
    """
    origin, destination = Directory.at(source), Directory.at(target)
    if origin.contains(destination):
        raise InvalidInput(f"{target} is inside {source}", remedy="give a target outside of it")
    contents = _read(origin)
    if destination.local_path is not None:
        return _sync_to_disk(origin, destination.local_path, contents, reporter)
    there = destination.sizes()
    _check_target(destination, there, contents)
    destination.abort_uploads()
    synced = _copy(origin, destination, there, contents, reporter)
    if MANIFEST not in there and not destination.create(MANIFEST, contents.manifest):
        _check_target(destination, destination.sizes(), contents)  # another process was first
    return synced


def _sync_to_disk(origin: Directory, out: Path, contents: _Contents, reporter: Stages) -> Synced:
    if (out / MANIFEST).is_file():
        there = Directory.at(out)
        _check_target(there, there.sizes(), contents)
        return _copy(origin, there, there.sizes(), contents, reporter)
    if out.exists():
        raise Conflict(f"{out} exists and is no artifact", remedy="give another target")
    draft = draft_path(out)
    with _held(draft, contents.artifact.digest):
        copied = Directory.at(draft)
        synced = _copy(origin, copied, copied.sizes(), contents, reporter)
        write_synced(draft / MANIFEST, contents.manifest)
        (draft / _COPY_OF).unlink()
        draft.rename(out)
        sync_path(out.parent)
    return synced


@contextmanager
def _held(draft: Path, digest: str) -> Iterator[None]:
    """Holds the draft of a copy of this artifact. Raises Conflict where it is something else's."""
    draft.parent.mkdir(parents=True, exist_ok=True)
    descriptor = lock_directory(draft, fcntl.LOCK_EX)
    try:
        mark = draft / _COPY_OF
        if not any(draft.iterdir()):
            write_synced(mark, digest.encode())
        elif not mark.is_file() or mark.read_bytes() != digest.encode():
            raise Conflict(
                f"{draft} holds the unfinished work of something else",
                remedy="finish it, remove it or give another target",
            )
        yield
    finally:
        os.close(descriptor)


def _read(origin: Directory) -> _Contents:
    """Reads the manifests, and what else there is to copy."""
    there = origin.sizes()
    if MANIFEST not in there:
        raise NotFound(
            f"there is no finished artifact at {origin.location}",
            remedy="give a directory that holds a manifest.json",
        )
    manifest = origin.read(MANIFEST)
    artifact = parse_manifest(manifest, Path(origin.location))
    files = dict(_listed(origin, artifact, ""))
    for name in files.keys() - there.keys():
        raise ArtifactInvalid(
            f"{origin.location}/{name} is missing", remedy="make the artifact again"
        )
    beside = [name for name in there.keys() - files.keys() - {MANIFEST} if not _is_hidden(name)]
    files |= {name: origin.measure(name) for name in sorted(beside)}
    return _Contents(artifact, manifest, files)


def _listed(origin: Directory, artifact: Artifact, prefix: str) -> Iterator[tuple[str, FileEntry]]:
    """Yields the files of the artifact and, below their folders, those of its children."""
    for name, entry in {**artifact.files, **artifact.logs}.items():
        yield prefix + name, entry
    for child, digest in artifact.children.items():
        inside = f"{prefix}{child}/"
        name = inside + MANIFEST
        found = parse_manifest(origin.read(name), Path(origin.location) / inside)
        if found.digest != digest:
            raise ArtifactInvalid(
                f"{origin.location}/{name} is of another artifact",
                remedy="make the artifact again",
            )
        yield name, origin.measure(name)
        yield from _listed(origin, found, inside)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _check_target(target: Directory, there: dict[str, int], contents: _Contents) -> None:
    """Raises Conflict where there are files of anything else."""
    if MANIFEST in there:
        found = parse_manifest(target.read(MANIFEST), Path(target.location))
        if found.digest != contents.artifact.digest:
            raise Conflict(
                f"{target.location} holds another artifact, of digest {found.digest[:12]}",
                remedy="give another target, or remove it",
            )
        return
    strange = sorted(there.keys() - contents.files.keys())
    if strange:
        raise Conflict(
            f"{target.location} holds other files, such as {strange[0]}",
            remedy="give a target of its own",
        )


def _copy(
    origin: Directory,
    target: Directory,
    there: dict[str, int],
    contents: _Contents,
    reporter: Stages,
) -> Synced:
    """Makes every file but the manifest the same, and returns what it took."""
    is_published = MANIFEST in there
    listed = {*contents.artifact.files, *contents.artifact.logs}

    def copied(name: str) -> int:
        entry = contents.files[name]
        if there.get(name) == entry.size_bytes and target.measure(name) == entry:
            return -1
        if is_published and name in there:
            if name in listed or name.endswith(f"/{MANIFEST}"):
                target.check(name, target.measure(name), entry)
            raise Conflict(
                f"{target.location}/{name} differs from {origin.location}/{name}",
                remedy="remove the one that is out of date, and run the same command again",
            )
        target.copy(name, origin, entry)
        return entry.size_bytes

    num, num_bytes = 0, 0
    with (
        reporter.stage("files", len(contents.files)) as meter,
        ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="sync") as pool,
    ):
        try:
            for size in pool.map(copied, sorted(contents.files)):
                num, num_bytes = num + (size >= 0), num_bytes + max(size, 0)
                meter.advance(1, bytes=num_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    artifact = contents.artifact
    return Synced(artifact.digest, artifact.kind, len(contents.files) + 1, num, num_bytes)
