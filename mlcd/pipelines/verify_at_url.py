"""Verifies artifacts at URLs: reads every byte once, and stores nothing."""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.listed_files import for_files, read_listed
from mlcd.artifacts.manifest import GROWN, Artifact, Parent
from mlcd.errors import ArtifactInvalid, NotFound
from mlcd.locations import is_url
from mlcd.pipelines.verify import Finding

_EXTERNAL_ROLES: Final = frozenset({"captions", "images", "texts", "vectors", "weights"})
_NOT_IN_STORE: Final = "not in this store, not checked"
_NO_ARTIFACT: Final = "not an artifact, not checked"


def verify_at_url(url: str) -> Iterator[Finding]:
    """Yields a finding for the artifact at a URL, and for its inputs in the same store.

    Raises ArtifactInvalid naming the first file that differs, NotFound without an artifact.
    """
    yield from _walk(url.rstrip("/"), {})


def _walk(url: str, visited: dict[str, Artifact]) -> Iterator[Finding]:
    if url in visited:
        return
    artifact = visited[url] = _check_files(Directory.at(url))
    facts = f"{len(artifact.files)} files, digest {artifact.digest[:12]}"
    yield Finding(url, artifact.kind, True, facts)
    for parent in artifact.parents:
        yield from _walk_parent(url, artifact, parent, visited)


def _check_files(directory: Directory) -> Artifact:
    """Reads every file of the artifact and compares its checksum with the manifests."""
    listed = read_listed(directory)
    for name, actual in zip(listed.files, for_files(directory.measure, listed.files), strict=True):
        directory.check(name, actual, listed.files[name])
    return listed.artifact


def _walk_parent(
    url: str, artifact: Artifact, parent: Parent, visited: dict[str, Artifact]
) -> Iterator[Finding]:
    parent_url = parent.path if is_url(parent.path) else _resolve_relative(url, parent.path)
    if parent.role in _EXTERNAL_ROLES:
        yield Finding(parent.path, parent.role, False, _NO_ARTIFACT)
        return
    if parent_url is None:
        yield Finding(parent.path, parent.role, False, _NOT_IN_STORE)
        return
    try:
        yield from _walk(parent_url, visited)
    except NotFound:
        yield Finding(parent.path, parent.role, False, _NOT_IN_STORE)
        return
    parent_artifact = visited[parent_url]
    if parent.digest not in (
        parent_artifact.digest,
        *parent_artifact.config.get(GROWN, {}).values(),
    ):
        raise ArtifactInvalid(
            f"{parent_url} is not the {parent.role} that {artifact.path} was made from",
            remedy="make the later artifact again, or restore the earlier one",
        )


def _resolve_relative(url: str, path: str) -> str | None:
    """Returns the URL of a path relative to the artifact at `url`; None outside of the store."""
    if Path(path).is_absolute():
        return None
    store, _, key = url.partition("://")
    joined = posixpath.normpath(posixpath.join(key, path))
    return None if joined.startswith("..") else f"{store}://{joined}"
