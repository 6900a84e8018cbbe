"""The files of an artifact as its manifests list them, and their copies in another directory."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.disk import sync_path
from mlcd.artifacts.manifest import (
    MANIFEST,
    Artifact,
    FileEntry,
    measure,
    open_artifact,
    parse_manifest,
)
from mlcd.errors import ArtifactInvalid, NotFound
from mlcd.progress import Stages

_Result = TypeVar("_Result")
_NUM_THREADS: Final = 8  # concurrent requests, to hide the latency of an object store


@dataclass(frozen=True)
class ListedFiles:
    """The files of an artifact and its nested artifacts; its own manifest is separate because it is
    written last.
    """

    artifact: Artifact
    manifest: bytes
    files: dict[str, FileEntry]

    def is_in_manifest(self, name: str) -> bool:
        """Tells whether a manifest lists the file, or the file is a nested manifest."""
        return (
            name in self.artifact.files
            or name in self.artifact.logs
            or name.endswith(f"/{MANIFEST}")
        )


def read_listed(origin: Directory) -> ListedFiles:
    """Reads the manifests, and lists the other files to copy.

    Raises NotFound without a finished artifact, ArtifactInvalid if a file is missing.
    """
    sizes = origin.sizes()
    if MANIFEST not in sizes:
        raise NotFound(
            f"{origin.location} must contain a finished artifact, found no {MANIFEST}",
            remedy="give a directory that contains a manifest.json",
        )
    manifest = origin.read(MANIFEST)
    artifact = parse_manifest(manifest, Path(origin.location))
    files = dict(_list_files(origin, artifact, ""))
    for name in files.keys() - sizes.keys():
        raise ArtifactInvalid(
            f"{origin.location}/{name} is missing", remedy="make the artifact again"
        )
    unlisted = [name for name in sizes.keys() - files.keys() - {MANIFEST} if not is_hidden(name)]
    files |= {name: origin.measure(name) for name in sorted(unlisted)}
    return ListedFiles(artifact, manifest, files)


def _list_files(
    origin: Directory, artifact: Artifact, prefix: str
) -> Iterator[tuple[str, FileEntry]]:
    """Yields the files of the artifact and, below their folders, the files of its children."""
    for name, entry in {**artifact.files, **artifact.logs}.items():
        yield prefix + name, entry
    for child, digest in artifact.children.items():
        inside = f"{prefix}{child}/"
        name = inside + MANIFEST
        inner = parse_manifest(origin.read(name), Path(origin.location) / inside)
        if inner.digest != digest:
            raise ArtifactInvalid(
                f"{origin.location}/{name} must have the digest {digest}, got {inner.digest}",
                remedy="make the artifact again",
            )
        yield name, origin.measure(name)
        yield from _list_files(origin, inner, inside)


def inventory(
    folder: Path, measured: Mapping[str, FileEntry]
) -> tuple[dict[str, FileEntry], dict[str, str]]:
    """Returns the entries for a manifest of the folder and the digests of nested artifacts; syncs
    every file to disk.

    measured: entries of files that were measured before.
    """
    files: dict[str, FileEntry] = {}
    children: dict[str, str] = {}
    for below, folders, names in os.walk(folder):
        directory = Path(below)
        relative = directory.relative_to(folder)
        if directory != folder and MANIFEST in names:
            children[relative.as_posix()] = open_artifact(directory, verify_files=False).digest
            folders.clear()
            continue
        folders.sort()
        for name in sorted(names):
            key = (relative / name).as_posix()
            if key != MANIFEST and not name.startswith("."):
                files[key] = measured.get(key) or measure(directory / name)
                sync_path(directory / name)
    return files, children


def is_hidden(name: str) -> bool:
    """Tells whether a file is a working note, which does not belong to the artifact."""
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def copy_files(
    listed: ListedFiles,
    origin: Directory,
    target: Directory,
    is_there: Callable[[str], bool],
    reporter: Stages,
) -> tuple[int, int]:
    """Copies every missing file except the manifest; returns the number of copied files and bytes.

    is_there: tells whether the target has the file. Called once per file, from several threads; an
    error that it raises ends the copy.
    """

    def copy_file(name: str) -> int:
        if is_there(name):
            return -1
        target.copy(name, origin, listed.files[name])
        return listed.files[name].size_bytes

    num, num_bytes = 0, 0
    with reporter.stage("files", len(listed.files)) as meter:
        for size in for_files(copy_file, sorted(listed.files)):
            num, num_bytes = num + (size >= 0), num_bytes + max(size, 0)
            meter.advance(1, bytes=num_bytes)
    return num, num_bytes


def for_files(work: Callable[[str], _Result], names: Iterable[str]) -> Iterator[_Result]:
    """Yields work(name) for each file, in order; runs up to 8 in parallel."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="files") as pool:
        try:
            yield from pool.map(work, names)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
