"""The naming of a clustering's centers."""

from dataclasses import dataclass
from pathlib import Path

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.given_names import read_names_file, renamed, write_given_names
from mlcd.artifacts.manifest import open_artifact


@dataclass(frozen=True)
class Naming:
    """The result of a naming.

    num_changed: centers that have another name now. num_named: those of `num_centers` that have a
    name.
    """

    digest: str
    num_changed: int
    num_named: int
    num_centers: int


def set_names(path: Path, file: Path) -> Naming:
    """Gives the centers at `path` the names in `file`; all other centers keep theirs."""
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact)
    num_centers = len(centers.sizes)
    names = renamed(centers.names, read_names_file(file, num_centers), num_centers)
    write_given_names(artifact, names)
    before = centers.names or (None,) * num_centers
    return Naming(
        artifact.digest,
        sum(old != new for old, new in zip(before, names, strict=True)),
        sum(name is not None for name in names),
        num_centers,
    )
