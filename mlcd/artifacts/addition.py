"""Adds parts to finished artifacts: writes the new files, then replaces the manifest by a rename.

Existing files stay unchanged. The earlier manifest is kept under another name, so results made from
the earlier state can still be compared with it.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.copies import send_addition
from mlcd.artifacts.disk import replacing, translate_os_errors, write_synced
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import (
    GROWN,
    MANIFEST,
    SCHEMA,
    Artifact,
    Parent,
    Request,
    measure,
    open_artifact,
    read_manifest,
    seal_manifest,
    verify_file,
)
from mlcd.errors import ArtifactInvalid, Conflict
from mlcd.version import __version__

_EARLIER: Final = "manifest-{:05d}.json"


def first_part_after(artifact: Artifact, digest: str) -> int | None:
    """Returns the first part that was added since the artifact had this digest; None if it
    never had it.

    Raises ArtifactInvalid if files of that state have changed or are missing.
    """
    for first_part, earlier in artifact.config.get(GROWN, {}).items():
        if earlier == digest:
            _read_earlier_state(artifact, _EARLIER.format(int(first_part)), digest)
            return int(first_part)
    return None


def state_with_digest(artifact: Artifact, digest: str) -> Artifact | None:
    """Returns the artifact as it was when it had this digest, before parts were added; None if
    it never had.

    Raises ArtifactInvalid if files of that state have changed or are missing.
    """
    if artifact.digest == digest:
        return artifact
    first_part = first_part_after(artifact, digest)
    return (
        None
        if first_part is None
        else _read_earlier_state(artifact, _EARLIER.format(first_part), digest)
    )


def _read_earlier_state(artifact: Artifact, name: str, digest: str) -> Artifact:
    """Reads the earlier manifest of this name; the current manifest must list all its files
    unchanged.
    """
    verify_file(artifact, name)
    earlier = read_manifest(artifact.path, name)
    is_unchanged = all(artifact.files.get(file) == entry for file, entry in earlier.files.items())
    if earlier.digest != digest or not is_unchanged:
        raise ArtifactInvalid(
            f"{artifact.path / name} has changed since it was written",
            remedy="make the artifact again",
        )
    return earlier


@contextmanager
def open_addition(
    artifact: Artifact, parents: tuple[Parent, ...], first_part: int
) -> Iterator["Addition"]:
    """Opens a draft beside the artifact for additions to it, from part `first_part` on.

    Continues a draft of the same addition, and discards a draft of any other. Raises Conflict if
    another process is adding to the artifact, or has just done so.
    """
    request = Request(
        artifact.kind,
        {"to": artifact.digest, "first_part": first_part},
        parents,
        artifact.fingerprint,
    )
    draft = Draft(artifact.path, request, upload=False)  # `publish` uploads its files
    if draft.read_request() not in (None, request.identity()):
        draft = Draft(artifact.path, request, fresh=True, upload=False)
    with draft:
        if open_artifact(artifact.path, verify_files=False).digest != artifact.digest:
            shutil.rmtree(draft.path)
            raise Conflict(
                f"{artifact.path} has grown meanwhile", remedy="run the same command again"
            )
        # left by a process that was killed in its last step
        for leftover in artifact.path.glob(".*.tmp"):
            leftover.unlink()
        yield Addition(artifact, draft, parents, first_part)


class Addition:
    """New parts of a finished artifact, in a draft until `publish`."""

    def __init__(
        self, artifact: Artifact, draft: Draft, parents: tuple[Parent, ...], first_part: int
    ) -> None:
        self.draft = draft
        self._artifact, self._parents, self._first_part = artifact, parents, first_part

    def publish(self, summary: Mapping[str, Any]) -> Artifact:
        """Links the draft's files into the artifact, then replaces the manifest by one that lists
        all files. An artifact at a URL is updated there first.

        If the process is killed before the manifest is replaced, the artifact is unchanged: files
        without an entry in the manifest do not belong to it.
        """
        old, out = self._artifact, self._artifact.path
        with translate_os_errors(out):
            shutil.copyfile(out / MANIFEST, self.draft.path / _EARLIER.format(self._first_part))
            files = {}
            for path in sorted(self.draft.path.iterdir()):
                if not path.name.startswith("."):
                    files[path.name] = asdict(measure(path))
                    with replacing(out / path.name) as target:
                        _link(path, target)
            grown = {**old.config.get(GROWN, {}), str(self._first_part): old.digest}
            manifest = {
                "schema": SCHEMA,
                "kind": old.kind,
                "config": {**old.config, GROWN: grown},
                "parents": [asdict(parent) for parent in self._parents],
                "fingerprint": old.fingerprint,
                "files": {name: asdict(entry) for name, entry in old.files.items()} | files,
                "children": old.children,
                "logs": {name: asdict(entry) for name, entry in old.logs.items()},
                "summary": dict(summary),
                "code_version": __version__,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            grown_manifest = seal_manifest(manifest)
            send_addition(out, old.digest, sorted(files), grown_manifest)
            write_synced(out / MANIFEST, grown_manifest)
            self.discard()
        return open_artifact(out, verify_files=False)

    def discard(self) -> None:
        """Removes the draft."""
        shutil.rmtree(self.draft.path)


def _link(path: Path, target: Path) -> None:
    """Links a file, so that the draft stays complete until the end; copies it on file systems
    without links.
    """
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
