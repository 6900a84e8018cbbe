"""The names of served centers on disk: the artifact's names, and users' changes on a server.

    STATE/names/DIGEST.json   {"centers": DIGEST of the artifact, "version": number of changes so
                              far, "changes": {center: {"name": the name or null, "before": the
                              artifact's name at that time}}, "checksum": SHA-256 of the other
                              fields}

The artifact may be read-only and is replaced with its model; the changes stay, and other centers
have other files. A server without a state directory writes beside the centers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.disk import hold_lock, translate_os_errors
from mlcd.artifacts.given_names import (
    GIVEN_NAMES,
    GivenNames,
    change_names,
    current_names,
    original_names,
)
from mlcd.artifacts.manifest import Artifact, read_manifest
from mlcd.artifacts.sealed_json import read_sealed, write_sealed
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput

FOLDER: Final = "names"
_LOCK: Final = ".lock"
_REMEDY: Final = "restore it, or move it away and enter the names again"
_log = logging.getLogger("mlcd.service")

FileVersions = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class ReadNames:
    """The names that could be read. damaged: name of a file that could not be read, else None."""

    names: GivenNames
    damaged: str | None = None


class StoredNames:
    """The names of one Centers artifact. Several processes may share the files."""

    def __init__(self, artifact: Artifact, state_dir: Path | None = None) -> None:
        """state_dir: directory for changes; None stores them beside the centers."""
        self._artifact = artifact
        self._changes = (
            None if state_dir is None else state_dir / FOLDER / f"{artifact.digest}.json"
        )

    def read(self) -> ReadNames:
        """Reads the names; skips and logs a damaged file."""
        names, damaged = self._read_artifact_names()
        try:
            return ReadNames(self._apply_changes(names, self._read_changes()), damaged)
        except ArtifactInvalid as error:
            _log.error("the changed names of centers cannot be read: %s", error)
            assert self._changes is not None
            return ReadNames(names, f"{FOLDER}/{self._changes.name}")

    def rename(self, center: int, name: str | None) -> GivenNames:
        """Sets a center's name durably, or removes it for None; returns the new names.

        Raises Conflict if the names are damaged or cannot be written, or if the centers are being
        replaced.
        """
        if not self.is_in_place():
            raise Conflict("these centers are being replaced", remedy="try again in a moment")
        if (damaged := self.read().damaged) is not None:
            raise Conflict(
                f"the names of the centers cannot be changed: {damaged} is damaged", remedy=_REMEDY
            )
        try:
            if self._changes is None:
                return change_names(
                    self._artifact, lambda before: before.set_by_hand({center: name})
                )[1]
            return self._change(self._changes, center, name)
        except InvalidInput as error:
            raise Conflict(
                "the names of the centers cannot be written",
                remedy="let the server write into its state directory"
                if self._changes is not None
                else "start it with --state, or let it write beside the centers",
            ) from error

    def is_in_place(self) -> bool:
        """Tells whether the centers are still at their path: neither removed nor replaced."""
        try:
            return read_manifest(self._artifact.path).digest == self._artifact.digest
        except ArtifactInvalid:
            return False

    def versions(self) -> FileVersions:
        """Returns a value that changes whenever one of the files changes."""
        paths = [self._artifact.path / GIVEN_NAMES, self._changes]
        return tuple(None if path is None else _version(path) for path in paths)

    def _change(self, path: Path, center: int, name: str | None) -> GivenNames:
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(path.with_name(_LOCK)):
                base = current_names(self._artifact)
                content = self._read_changes()
                before = self._apply_changes(base, content)
                if before.names[center] != name:
                    change = {"name": name, "before": base.names[center]}
                    content = {
                        "centers": self._artifact.digest,
                        "version": content["version"] + 1,
                        "changes": {**content["changes"], str(center): change},
                    }
                    write_sealed(path, content)
                return self._apply_changes(base, content)

    def _read_artifact_names(self) -> tuple[GivenNames, str | None]:
        """Returns the artifact's names, and the name of their file if it is damaged."""
        try:
            return current_names(self._artifact), None
        except ArtifactInvalid as error:
            _log.error("the names of centers cannot be read: %s", error)
            sizes = np.load(self._artifact.file("sizes.npy"), mmap_mode="r", allow_pickle=False)
            names = original_names(self._artifact) or (None,) * len(sizes)
            return GivenNames(names, frozenset()), GIVEN_NAMES

    def _read_changes(self) -> dict[str, Any]:
        stored = None if self._changes is None else read_sealed(self._changes, remedy=_REMEDY)
        return stored or {"version": 0, "changes": {}}

    def _apply_changes(self, base: GivenNames, content: Mapping[str, Any]) -> GivenNames:
        """Returns the artifact's names with the changes.

        A removed name stays removed until the artifact has a different name for the center.
        """
        if content.get("centers", self._artifact.digest) != self._artifact.digest:
            raise ArtifactInvalid(
                f"{self._changes} must hold names of the centers {self._artifact.digest}, got names"
                f" of {content['centers']}",
                remedy=_REMEDY,
            )
        names, by_hand = list(base.names), set(base.by_hand)
        for key, change in content["changes"].items():
            center, name = int(key), change["name"]
            if name is not None:
                names[center] = name
                by_hand.add(center)
            elif names[center] == change["before"]:
                names[center] = None
                by_hand.discard(center)
        return replace(
            base,
            names=tuple(names),
            by_hand=frozenset(by_hand),
            version=base.version + content["version"],
        )


def _version(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
