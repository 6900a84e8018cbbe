"""The names of centers, assigned by people or from evidence: a file in the folder of the Centers
artifact that is not part of its identity.

    given-names.json  {"centers": digest of the artifact, "version": the number of changes so far,
                      "names": [k] of name or null, "by_hand": ids of the centers named by people,
                      "evidence": the file of `mlcd.artifacts.name_evidence` that explains the
                      other names, or null, "history": the last changes by people, each with
                      version, center, old name and new name, "checksum": SHA-256 of the other
                      fields}

No manifest lists the file, so naming changes no digest; it has its own checksum instead.
"""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.disk import hold_lock, translate_os_errors
from mlcd.artifacts.manifest import MANIFEST, Artifact, read_manifest
from mlcd.artifacts.sealed_json import read_sealed, write_sealed
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, NotFound
from mlcd.text_tables import decode_text, split_lines

GIVEN_NAMES: Final = "given-names.json"
ORIGINAL_NAMES: Final = "names.json"  # a file of the artifact itself
MAX_NAME: Final = 200  # characters, because a name is shown in one line
_HEADER: Final = ("id", "name")
_MAX_HISTORY: Final = 1000  # changes by people in the file, which each change rewrites

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Renaming:
    """A change of one name by a person. version: the version that the change created."""

    version: int
    center: int
    before: str | None
    since: str | None


@dataclass(frozen=True)
class GivenNames:
    """The name of each center, the ids of the centers named by people, and the file of evidence for
    the other names, if any.

    version: number of changes so far. history: the last changes by people.
    """

    names: Names
    by_hand: frozenset[int]
    evidence: str | None = None
    version: int = 0
    history: tuple[Renaming, ...] = ()

    def set_by_hand(self, changes: Mapping[int, str | None]) -> "GivenNames":
        """Returns the names with these changes applied.

        A center whose name is removed can get a name from evidence again.
        """
        names = tuple(changes.get(center, name) for center, name in enumerate(self.names))
        named_centers = {center for center, name in changes.items() if name is not None}
        renamings = [
            Renaming(self.version + 1, center, self.names[center], name)
            for center, name in changes.items()
            if self.names[center] != name
        ]
        return self._with_next_version(
            replace(
                self,
                names=names,
                by_hand=(self.by_hand - changes.keys()) | named_centers,
                history=(*self.history, *renamings)[-_MAX_HISTORY:],
            )
        )

    def set_from(self, evidence: str, names: Names) -> "GivenNames":
        """Returns the names from the evidence, except where people named the center."""
        merged = tuple(
            current if center in self.by_hand else name
            for center, (current, name) in enumerate(zip(self.names, names, strict=True))
        )
        return self._with_next_version(replace(self, names=merged, evidence=evidence))

    def _with_next_version(self, changed: "GivenNames") -> "GivenNames":
        return self if changed == self else replace(changed, version=self.version + 1)


def current_names(artifact: Artifact) -> GivenNames:
    """Returns the current names of centers: the assigned names, otherwise the original names.

    Raises ArtifactInvalid as `read_given_names` does.
    """
    sizes = np.load(artifact.file("sizes.npy"), mmap_mode="r", allow_pickle=False)
    given_names = read_given_names(artifact, len(sizes))
    return given_names or GivenNames(original_names(artifact) or (None,) * len(sizes), frozenset())


def original_names(artifact: Artifact) -> Names | None:
    """Returns the names stored in the artifact itself; None if it has none."""
    if ORIGINAL_NAMES not in artifact.files:
        return None
    return tuple(json.loads(artifact.file(ORIGINAL_NAMES).read_text()))


def change_names(
    artifact: Artifact, change: Callable[[GivenNames], GivenNames]
) -> tuple[GivenNames, GivenNames]:
    """Changes the names on disk and returns the old and the new names.

    A lock serializes changes. Raises Conflict if the artifact was replaced by other centers.
    """
    manifest = artifact.path / MANIFEST
    with translate_os_errors(artifact.path), hold_lock(manifest):
        if read_manifest(artifact.path).digest != artifact.digest:
            raise Conflict(
                "other centers have taken the place of these", remedy="open them and name them"
            )
        before = current_names(artifact)
        since = change(before)
        if since != before:
            write_given_names(artifact, since)
    return before, since


def read_given_names(artifact: Artifact, num_centers: int) -> GivenNames | None:
    """Returns the assigned names; None if there are none.

    Raises ArtifactInvalid for a file that is damaged or belongs to other centers.
    """
    path = artifact.path / GIVEN_NAMES
    stored = read_sealed(path, remedy="remove it, and name the centers again by `mlcd name`")
    if stored is None:
        return None
    names = tuple(stored["names"])
    if stored["centers"] != artifact.digest or len(names) != num_centers:
        raise ArtifactInvalid(
            f"{path} must hold names of the centers {artifact.digest}, got names of other centers",
            remedy="remove it, and name these by `mlcd name`",
        )
    # files without "by_hand" predate evidence: people assigned all names
    by_hand = stored.get("by_hand", [c for c, name in enumerate(names) if name is not None])
    return GivenNames(
        names,
        frozenset(by_hand),
        stored.get("evidence"),
        stored.get("version", 0),
        tuple(Renaming(**entry) for entry in stored.get("history", ())),
    )


def write_given_names(artifact: Artifact, names: GivenNames) -> None:
    """Writes the names atomically."""
    content = {
        "centers": artifact.digest,
        "version": names.version,
        "names": list(names.names),
        "by_hand": sorted(names.by_hand),
        "evidence": names.evidence,
        "history": [asdict(renaming) for renaming in names.history],
    }
    write_sealed(artifact.path / GIVEN_NAMES, content)


def read_names_file(
    path: Path, num_centers: int, *, digest: str | None = None
) -> dict[int, str | None]:
    """Reads {center: name, or None to remove it} from a JSON object, from lines `id<TAB>name` or
    `id,name`, or from what a server keeps in STATE/names.

    digest: digest of the centers; a server's file for other centers is refused. Raises NotFound, or
    InvalidInput naming the first id or name that is not allowed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read", remedy="give a file of names") from error
    text = decode_text(data, str(path))
    is_json = text.lstrip().startswith("{")
    pairs = _json_pairs(path, text, digest) if is_json else _line_pairs(path, text)
    changes: dict[int, str | None] = {}
    for identifier, name in pairs:
        center = _parse_id(path, identifier, num_centers)
        if center in changes:
            raise InvalidInput(
                f"{path} names center {center} twice", remedy="give each center one name"
            )
        try:
            changes[center] = check_name(name)
        except InvalidInput as error:
            raise InvalidInput(
                f"{path}: the name of center {center} cannot be used", remedy=error.remedy
            ) from error
    if not changes:
        raise InvalidInput(
            f"{path} must name at least one center",
            remedy='give JSON like {"3": "cat"}, or lines of id<TAB>name',
        )
    return changes


def check_name(name: object) -> str | None:
    """Returns the name without surrounding spaces, or None if it is empty. Raises InvalidInput."""
    if name is None:
        return None
    if not isinstance(name, str) or not fits_a_name(name.strip()):
        raise InvalidInput(
            f"a name must be printable text of at most {MAX_NAME} characters, got {name!r:.80}",
            remedy="shorten it and remove control characters",
        )
    return name.strip() or None


def fits_a_name(text: str) -> bool:
    """Tells whether the text can be shown as a name, in one line."""
    return len(text) <= MAX_NAME and text.isprintable()


def _json_pairs(path: Path, text: str, digest: str | None) -> list[tuple[str, Any]]:
    try:
        # a dict would hide duplicate keys
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise InvalidInput(
            f"{path} must be valid JSON: {error}", remedy='give an object like {"3": "cat"}'
        ) from error
    content = dict(pairs)
    if not {"centers", "changes"} <= content.keys():
        return pairs
    if digest not in (None, content["centers"]):
        raise InvalidInput(
            f"{path} must hold names of the centers {digest}, got names of {content['centers']}",
            remedy=f"give STATE/names/{digest}.json",
        )
    return [(center, dict(change)["name"]) for center, change in content["changes"]]


def _line_pairs(path: Path, text: str) -> list[tuple[str, Any]]:
    lines = [line for line in split_lines(text) if line.strip()]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise InvalidInput(
            f"{path} must be a table: {error}", remedy="give lines of id<TAB>name"
        ) from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(_HEADER):
            raise InvalidInput(
                f"line {number} of {path} must have an id and a name, got {len(row)} fields",
                remedy="give lines of id<TAB>name",
            )
    if rows and tuple(cell.strip().lower() for cell in rows[0]) == _HEADER:
        del rows[0]
    return [(identifier, name) for identifier, name in rows]


def _parse_id(path: Path, identifier: str, num_centers: int) -> int:
    plain = identifier.strip()
    if not (plain.isascii() and plain.isdecimal() and int(plain) < num_centers):
        raise InvalidInput(
            f"the ids in {path} must be those of centers, got {identifier!r}",
            remedy=f"use ids from 0 to {num_centers - 1}",
        )
    return int(plain)
