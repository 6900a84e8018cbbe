"""The evidence for the names of centers: numbered files beside those of the Centers artifact.

    names/0001.json  {"centers": digest of the artifact, "made_of": what the names rest on,
                     "clusters": [k] of the name, its alternates and its evidence, or why there is
                     no name, "checksum": SHA-256 of the rest}

Each naming adds a file and changes none. `given-names.json` names the one that holds.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.manifest import Artifact
from mlcd.artifacts.sealed_json import read_sealed, seal_bytes, write_sealed
from mlcd.errors import ArtifactInvalid

FOLDER: Final = "names"
_NUMBERED: Final = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True)
class NameEvidence:
    """The names of all centers and what they rest on, as the file holds them."""

    made_of: dict[str, Any]
    clusters: list[dict[str, Any]]

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(cluster["name"] for cluster in self.clusters)


def write_evidence(artifact: Artifact, evidence: NameEvidence) -> str:
    """Writes the next file and returns its name; where the newest holds just this, its name."""
    folder = artifact.path / FOLDER
    numbers = _numbers(folder)
    content = {
        "centers": artifact.digest,
        "made_of": evidence.made_of,
        "clusters": evidence.clusters,
    }
    if numbers and (folder / _file(numbers[-1])).read_bytes() == seal_bytes(content):
        return _file(numbers[-1])
    name = _file(numbers[-1] + 1 if numbers else 1)
    write_sealed(folder / name, content)
    return name


def read_evidence(artifact: Artifact, name: str) -> NameEvidence:
    """Reads a file of evidence. Raises ArtifactInvalid where it is missing, damaged or of other
    centers.
    """
    path = artifact.path / FOLDER / name
    remedy = "name the centers again by `mlcd name`"
    stored = read_sealed(path, remedy=f"remove it, and {remedy}")
    if stored is None:
        raise ArtifactInvalid(f"{path} is missing", remedy=remedy)
    if stored["centers"] != artifact.digest:
        raise ArtifactInvalid(f"{path} is of other centers", remedy=f"remove it, and {remedy}")
    return NameEvidence(stored["made_of"], stored["clusters"])


def _numbers(folder: Path) -> list[int]:
    matches = (_NUMBERED.fullmatch(path.name) for path in folder.glob("*.json"))
    return sorted(int(match[1]) for match in matches if match)


def _file(number: int) -> str:
    return f"{number:04d}.json"
