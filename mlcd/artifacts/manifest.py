"""Directory artifacts: complete, verified and identified by their content, or absent.

An artifact is a directory with a `manifest.json`. It is built in a draft, `NAME.partial`, beside
its final path and appears by one rename, so no reader sees an incomplete artifact:
`mlcd.artifacts.draft`.

`digest`, the artifact's identity, covers kind, config, fingerprint, the digests of parents and
children and the SHA-256 of every file. Times, summaries, paths and logs are listed in the manifest
but excluded from the digest: two runs with the same result have the same digest.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlcd.errors import ArtifactInvalid
from mlcd.locations import relative_location
from mlcd.too_many_files import refuse_too_many_files
from mlcd.types import Fingerprint

SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
# config key of an artifact with additions: maps the first part of each addition to the digest
# before it
GROWN: Final = "grown"
_PARTIAL: Final = ".partial"
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Parent:
    """An input that an artifact was made from. `path` is a hint, relative to the artifact or, from
    another place, a URL or a whole path; `digest` is the identity.
    """

    role: str
    path: str
    digest: str


@dataclass(frozen=True)
class FileEntry:
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Request:
    """The identity of a result, known before the work starts, by which a draft or a result can be
    reused.
    """

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    fingerprint: Fingerprint | None = None

    def identity(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "config": dict(self.config),
            "parents": sorted((parent.role, parent.digest) for parent in self.parents),
            "fingerprint": self.fingerprint,
        }

    def canonical(self) -> str:
        """Returns the identity as JSON, the same text for the same request."""
        return canonical_json(self.identity())


@dataclass(frozen=True, repr=False)
class Artifact:
    """A complete artifact at `path`, as its manifest states it."""

    path: Path
    kind: str
    config: dict[str, Any]
    parents: tuple[Parent, ...]
    fingerprint: Fingerprint | None
    files: dict[str, FileEntry]
    children: dict[str, str]
    logs: dict[str, FileEntry]
    summary: dict[str, Any]
    code_version: str
    created_at: str
    digest: str

    def __repr__(self) -> str:
        return f"<{self.kind} artifact at {self.path}>"

    def request(self) -> Request:
        return Request(self.kind, self.config, self.parents, self.fingerprint)

    def file(self, name: str) -> Path:
        """Returns the path of a listed file; raises ArtifactInvalid for another name."""
        if name not in self.files and name not in self.logs:
            raise ArtifactInvalid(
                f"{self.path} must contain {name}", remedy="it was made by another step or version"
            )
        return self.path / name

    def as_parent_of(self, out: Path, role: str) -> Parent:
        return Parent(role, relative_location(self.path, out), self.digest)


def open_artifact(path: Path, kind: str | None = None, *, verify_files: bool = True) -> Artifact:
    """Opens the artifact at `path` and checks its manifest and, with `verify_files`, every byte
    of its files.

    Raises ArtifactInvalid naming the first file that does not match.
    """
    if (
        kind is not None
        and not (path / MANIFEST).is_file()
        and (nearby_artifact := near(path, kind)) is not None
    ):
        raise ArtifactInvalid(
            f"{path} is not a finished artifact", remedy=f"did you mean {nearby_artifact}?"
        )
    artifact = read_manifest(path)
    if kind is not None and artifact.kind != kind:
        nearby_artifact = near(path, kind)
        remedy = (
            f"give the directory of the {kind}"
            if nearby_artifact is None
            else f"did you mean {nearby_artifact}?"
        )
        raise ArtifactInvalid(f"{path} holds {artifact.kind}, not {kind}", remedy=remedy)
    for name, entry in {**artifact.files, **artifact.logs}.items():
        if verify_files:
            verify_file(artifact, name)
        elif not (path / name).is_file():
            raise ArtifactInvalid(f"{path / name} is missing", remedy="make the artifact again")
        elif (path / name).stat().st_size != entry.size_bytes:
            raise ArtifactInvalid(
                f"{path / name} differs from its manifest", remedy="it is damaged; make it again"
            )
    for name, digest in artifact.children.items():
        if open_artifact(path / name, verify_files=verify_files).digest != digest:
            raise ArtifactInvalid(
                f"{path / name / MANIFEST} belongs to another artifact",
                remedy="make the artifact again",
            )
    return artifact


def near(path: Path, *kinds: str) -> Path | None:
    """Returns the first artifact of one of these kinds one level away, above `path` or in it; None
    if there is none.
    """
    for folder in (
        path.parent,
        *sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST}")),
    ):
        with suppress(ArtifactInvalid):
            if folder != path and read_manifest(folder).kind in kinds:
                return folder
    return None


def verify_file(artifact: Artifact, name: str) -> None:
    """Checks the size and SHA-256 of one file against the manifest."""
    entry = artifact.files.get(name) or artifact.logs[name]
    path = artifact.path / name
    try:
        actual = measure(path)
    except OSError as error:
        refuse_too_many_files(error)
        raise ArtifactInvalid(
            f"{path} cannot be read", remedy="restore it, or make the artifact again"
        ) from error
    if actual != entry:
        raise ArtifactInvalid(
            f"{path} differs from its manifest", remedy="it is damaged or was edited; make it again"
        )


def draft_path(out: Path) -> Path:
    """Returns the path at which the artifact for `out` is built."""
    return out.parent / (out.name + _PARTIAL)


def final_path(path: Path) -> Path:
    """Returns the final path of what is built at `path`; any other path is returned unchanged."""
    return path.with_name(path.name.removesuffix(_PARTIAL)) if path.name != _PARTIAL else path


def read_manifest(path: Path, name: str = MANIFEST) -> Artifact:
    """Reads the manifest of this name of the artifact at `path`, without checking its other files.

    Raises ArtifactInvalid if the manifest is missing or damaged.
    """
    file = path / name
    if not file.is_file():
        partial = draft_path(path)
        remedy = (
            "its creation was interrupted; run the same command again to finish it"
            if partial.is_dir()
            else "give a directory that contains a manifest.json"
        )
        raise ArtifactInvalid(f"{path} is not a finished artifact", remedy=remedy)
    try:
        raw = file.read_bytes()
    except OSError as error:
        refuse_too_many_files(error)
        raise _damage_error(file) from error
    return parse_manifest(raw, path, name)


def parse_manifest(raw: bytes, path: Path, name: str = MANIFEST) -> Artifact:
    """Returns the artifact at `path` that the manifest `raw` describes. Raises ArtifactInvalid if
    it is damaged.
    """
    file = path / name
    try:
        manifest = json.loads(raw)
        if manifest["schema"] > SCHEMA:
            raise ArtifactInvalid(
                f"{file} is of schema {manifest['schema']}", remedy="upgrade mlcd to read it"
            )
        intact = raw == _pretty(manifest) and manifest["checksum"] == _checksum(manifest)
        artifact = Artifact(
            path=path,
            kind=manifest["kind"],
            config=manifest["config"],
            parents=tuple(Parent(**parent) for parent in manifest["parents"]),
            fingerprint=manifest["fingerprint"],
            files={name: FileEntry(**entry) for name, entry in manifest["files"].items()},
            children=manifest["children"],
            logs={name: FileEntry(**entry) for name, entry in manifest["logs"].items()},
            summary=manifest["summary"],
            code_version=manifest["code_version"],
            created_at=manifest["created_at"],
            digest=manifest["digest"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage_error(file) from error
    if not intact:
        raise _damage_error(file)
    return artifact


def _damage_error(file: Path) -> ArtifactInvalid:
    return ArtifactInvalid(f"{file} is damaged", remedy="restore it, or make the artifact again")


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Returns the content of the manifest file, with digest and checksum."""
    with_digest = {**manifest, "digest": _digest(manifest)}
    return _pretty({**with_digest, "checksum": _checksum(with_digest)})


def _digest(manifest: Mapping[str, Any]) -> str:
    identity = {
        "schema": manifest["schema"],
        "kind": manifest["kind"],
        "config": manifest["config"],
        "parents": sorted((parent["role"], parent["digest"]) for parent in manifest["parents"]),
        "fingerprint": manifest["fingerprint"],
        "files": manifest["files"],
        "children": manifest["children"],
    }
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _pretty(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode()


def measure(path: Path) -> FileEntry:
    sha256 = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            size += len(chunk)
    return FileEntry(size, sha256.hexdigest())
