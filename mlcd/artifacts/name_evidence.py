"""The evidence for the names of centers: numbered files in the folder of the Centers artifact.

    names/0001.json  {"centers": digest of the artifact, "made_of": inputs of the naming,
                     "clusters": [k] objects with the name, its alternates and its evidence, or the
                     reason for no name, "checksum": SHA-256 of the other fields}

Each naming adds a file and changes none. `given-names.json` refers to the current file.
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
    """The content of a file: the names of all centers, with their evidence and inputs."""

    made_of: dict[str, Any]
    clusters: list[dict[str, Any]]

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(cluster["name"] for cluster in self.clusters)


def write_evidence(artifact: Artifact, evidence: NameEvidence) -> str:
    """Writes the next file and returns its name; if the newest file is equal, only returns its
    name.
    """
    folder = artifact.path / FOLDER
    numbers = _list_numbers(folder)
    content = {
        "centers": artifact.digest,
        "made_of": evidence.made_of,
        "clusters": evidence.clusters,
    }
    if numbers and (folder / _file_name(numbers[-1])).read_bytes() == seal_bytes(content):
        return _file_name(numbers[-1])
    name = _file_name(numbers[-1] + 1 if numbers else 1)
    write_sealed(folder / name, content)
    return name


def read_evidence(artifact: Artifact, name: str) -> NameEvidence:
    """Reads a file of evidence. Raises ArtifactInvalid if it is missing, is damaged, or belongs to
    other centers.
    """
    path = artifact.path / FOLDER / name
    remedy = "name the centers again with `mlcd name`"
    stored = read_sealed(path, remedy=f"remove it, and {remedy}")
    if stored is None:
        raise ArtifactInvalid(f"{path} is missing", remedy=remedy)
    if stored["centers"] != artifact.digest:
        raise ArtifactInvalid(f"{path} belongs to other centers", remedy=f"remove it, and {remedy}")
    return NameEvidence(stored["made_of"], stored["clusters"])


def _list_numbers(folder: Path) -> list[int]:
    matches = (_NUMBERED.fullmatch(path.name) for path in folder.glob("*.json"))
    return sorted(int(match[1]) for match in matches if match)


def _file_name(number: int) -> str:
    return f"{number:04d}.json"
