"""Verifies an artifact and everything it was made from: compares every byte with the manifests."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from mlcd.artifacts.addition import first_part_after
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.given_names import read_given_names
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, open_artifact
from mlcd.artifacts.name_evidence import read_evidence
from mlcd.collections.collection import Collection
from mlcd.errors import ArtifactInvalid, Conflict, ImageRejected, NotFound
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from mlcd.locations import is_url
from mlcd.models.weight_files import digest_of_weights
from mlcd.pipelines.vector_files import digest_of_vectors


@dataclass(frozen=True)
class Finding:
    """One checked item. `checked` is False for a parent that is not on this machine."""

    path: str
    kind: str
    checked: bool
    detail: str


def verify(directory: Path) -> Iterator[Finding]:
    """Yields a finding for the artifact, or all artifacts below a directory, and for their parents.

    Raises ArtifactInvalid at the first mismatch, naming the file.
    """
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory")
    manifests = (
        sorted(directory.rglob(MANIFEST))
        if not (directory / MANIFEST).is_file()
        else [directory / MANIFEST]
    )
    if not manifests:
        raise ArtifactInvalid(
            f"{directory} must contain an artifact, found no {MANIFEST}",
            remedy="give a directory made by an mlcd command",
        )
    visited: dict[Path, Artifact] = {}
    for manifest in manifests:
        yield from _walk(manifest.parent, visited)


def _walk(path: Path, visited: dict[Path, Artifact]) -> Iterator[Finding]:
    resolved = path.resolve()
    if resolved in visited:
        return
    artifact = open_artifact(path)
    visited[resolved] = artifact
    yield Finding(
        str(path),
        artifact.kind,
        True,
        f"{len(artifact.files)} files, digest {artifact.digest[:12]}",
    )
    if artifact.kind == "centers":
        _check_given_names(artifact)
    if artifact.kind == "triton":
        _check_triton_config(artifact)
    if artifact.kind == "collection-index":
        yield _check_collection(artifact.path.resolve().parents[1])
    for parent in artifact.parents:
        yield from _walk_parent(artifact, parent, visited)


def _check_given_names(centers: Artifact) -> None:
    """Checks given names and their evidence by reading them, because no manifest lists them."""
    num_centers = len(np.load(centers.file("sizes.npy"), allow_pickle=False))
    given_names = read_given_names(centers, num_centers)
    if given_names is not None and given_names.evidence is not None:
        read_evidence(centers, given_names.evidence)


def _check_triton_config(version: Artifact) -> None:
    """Checks the config.pbtxt that Triton reads, above the versions: it must equal the newest
    version's config.pbtxt.
    """
    versions = [int(path.parent.name) for path in version.path.parent.glob(f"[0-9]*/{MANIFEST}")]
    served_config, newest_config = (
        version.path.parent / "config.pbtxt",
        version.file("config.pbtxt"),
    )
    if version.config["version"] == max(versions) and (
        not served_config.is_file() or served_config.read_bytes() != newest_config.read_bytes()
    ):
        raise ArtifactInvalid(
            f"{served_config} must equal the newest version's, {newest_config}",
            remedy=f"copy {newest_config} there",
        )


def _walk_parent(
    artifact: Artifact, parent: Parent, visited: dict[Path, Artifact]
) -> Iterator[Finding]:
    # A checkpoint is inside its run, and its manifest gives parents relative to the run.
    bases = (
        (artifact.path, *artifact.path.resolve().parents[:2])
        if artifact.kind == "checkpoint"
        else (artifact.path,)
    )
    if parent.role == "images":
        yield _check_images(
            artifact, [os.path.normpath(base.resolve() / parent.path) for base in bases], parent
        )
        return
    if parent.role == "weights":
        yield _check_weights([base / parent.path for base in bases], artifact, parent)
        return
    if parent.role in ("captions", "texts", "vectors"):
        yield _check_file(artifact, parent)
        return
    path = next((base / parent.path for base in bases if (base / parent.path).exists()), None)
    if path is None:
        yield Finding(parent.path, parent.role, False, "not on this machine, not checked")
    else:
        yield from _walk(path.resolve(), visited)
        parent_artifact = visited[path.resolve()]
        if (
            parent_artifact.digest != parent.digest
            and first_part_after(parent_artifact, parent.digest) is None
        ):
            raise ArtifactInvalid(
                f"{path.resolve() / MANIFEST} is not the {parent.role} that {artifact.path} was"
                " made from",
                remedy="make the later artifact again, or restore the earlier one",
            )


def _check_collection(path: Path) -> Finding:
    """Checks the vector of every item in the index, and every thumbnail."""
    try:
        with Collection.open(path, read_only=True) as collection:
            collection.check_vectors()
            collection.check_thumbnails()
            return Finding(str(path), "collection", True, f"{len(collection)} items")
    except Conflict:
        return Finding(str(path), "collection", False, "open in another process, not checked")


def _check_weights(places: list[Path], artifact: Artifact, parent: Parent) -> Finding:
    """Checks third-party weights by the digest over all files that determine the model."""
    path = next((place.resolve() for place in places if place.exists()), None)
    if path is None:
        return Finding(parent.path, "weights", False, "not on this machine, not checked")
    if digest_of_weights(str(path)) != parent.digest:
        raise ArtifactInvalid(
            f"{path} does not contain the weights that {artifact.path} was made from"
        )
    return Finding(str(path), "weights", True, f"digest {parent.digest[:12]}")


def _check_file(artifact: Artifact, parent: Parent) -> Finding:
    """Checks the file of texts or vectors that an artifact was made from, byte for byte."""
    path = Path(os.path.normpath(artifact.path.resolve() / parent.path))
    if not path.exists():
        return Finding(parent.path, parent.role, False, "not on this machine, not checked")
    if digest_of_vectors(path) != parent.digest:
        raise ArtifactInvalid(
            f"{path} does not contain the {parent.role} that {artifact.path} was made from"
        )
    return Finding(str(path), parent.role, True, f"digest {parent.digest[:12]}")


def _check_urls(artifact: Artifact, location: str, parent: Parent) -> Finding:
    """Checks that a table or a list holds the same URLs; the images are not fetched again."""
    try:
        source = open_source(location, urls=UrlOptions(**artifact.config["urls"]))
    except NotFound:
        return Finding(parent.path, "images", False, "not on this machine, not checked")
    if source.listing_digest() != parent.digest:
        raise ArtifactInvalid(
            f"{location} does not contain the URLs that {artifact.path} was made from"
        )
    return Finding(location, "images", True, f"{len(source.entries)} URLs, nothing fetched")


def _check_images(artifact: Artifact, locations: list[str], parent: Parent) -> Finding:
    """Checks each image against the digest stored with its embedding; for a collection, checks only
    the names and sizes of its images.
    """
    if artifact.kind not in ("embeddings", "labels", "collection-index"):
        return Finding(
            parent.path, "images", False, "checked through the embeddings made from them"
        )
    if is_url(parent.path):
        return Finding(parent.path, "images", False, "not on this machine, not checked")
    location = locations[0]
    if "urls" in artifact.config:
        return _check_urls(artifact, location, parent)
    try:
        source = open_source(location)
    except NotFound:
        return Finding(parent.path, "images", False, "not on this machine, not checked")
    if artifact.kind == "collection-index":
        if source.listing_digest() != parent.digest:
            raise ArtifactInvalid(
                f"{location} does not contain the images that {artifact.path} was made from"
            )
        return Finding(location, "images", True, f"names and sizes of {len(source.entries)} images")
    table = (LabelTable if artifact.kind == "labels" else EmbeddingsArtifact).open(artifact.path)
    indices = source.entries.find(pa.chunked_array([table.keys], pa.large_string()))
    for index, (key, digest) in zip(indices.tolist(), table.image_digests(), strict=True):
        try:
            intact = (
                index >= 0 and hashlib.sha256(source.read(source.entries[index])).digest() == digest
            )
        except ImageRejected:
            intact = False
        if not intact:
            raise ArtifactInvalid(
                f"{Path(location) / key} is not the image that {artifact.path} was made from"
            )
    return Finding(location, "images", True, f"{len(indices)} images")
