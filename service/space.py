"""Centers and collections: usable only in the space of the model that they were made with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mlcd.artifact import MANIFEST
from mlcd.clustering.centers import Centers
from mlcd.collections.snapshot import Snapshot
from mlcd.errors import ConfigInvalid, Conflict, NotFound
from mlcd.types import Fingerprint
from service.lookup import Lookup
from service.settings import Settings

_SHOWN: Final = 12
"""Digits of a fingerprint, for people who read a terminal."""


@dataclass(frozen=True)
class Space:
    """What is there for the vectors of one model; what is there for another's is told apart, and refused."""

    fingerprint: Fingerprint
    lookup: Lookup | None
    """Of the centers."""
    collections: dict[str, Snapshot]
    foreign_centers: Fingerprint | None = None
    """Whose space they are in, where it is not this one."""
    foreign_collections: dict[str, Fingerprint] = field(default_factory=dict)

    def opened_lookup(self) -> Lookup:
        """Raises NotFound where there are no centers, Conflict where they are in another model's space."""
        if self.foreign_centers is not None:
            raise self._foreign("the centers are", self.foreign_centers, "cluster its embeddings or export its centers")
        if self.lookup is None:
            raise NotFound("this model was started without centers", remedy="start the server with --centers")
        return self.lookup

    def opened_collection(self, name: str) -> Snapshot:
        """Raises NotFound where there is none of that name, Conflict where it is in another model's space."""
        if name in self.foreign_collections:
            raise self._foreign("this collection is", self.foreign_collections[name], "index its embeddings")
        if name not in self.collections:
            raise NotFound("there is no such collection", remedy="GET /v1/collections lists them")
        return self.collections[name]

    def _foreign(self, what: str, fingerprint: Fingerprint, way: str) -> Conflict:
        return Conflict(
            f"{what} in the space of the model {fingerprint}, and {self.fingerprint} is served",
            remedy=f"{way}, then load the served version again; or go back to the version they were made with",
        )


def open_space(settings: Settings, folder: str, fingerprint: Fingerprint, *, strict: bool) -> Space:
    """What `settings` name, or ships in the model's `folder`; slow.

    strict: raise ConfigInvalid for what is of another model, in place of telling it apart. Raises ConfigInvalid, too,
    where approximate labels cannot be audited.
    """
    centers = _open_centers(settings, folder, fingerprint, strict=strict)
    collections = _open_collections(settings)
    if strict:
        for snapshot in collections.values():
            snapshot.check_fingerprint(fingerprint)
    ours = {name: snapshot for name, snapshot in collections.items() if snapshot.fingerprint == fingerprint}
    lookup = Lookup(centers) if centers is not None and centers.fingerprint == fingerprint else None
    if settings.approximate and lookup is not None:
        lookup.approximate(ours.values())
    return Space(
        fingerprint,
        lookup,
        ours,
        None if centers is None or lookup is not None else centers.fingerprint,
        {name: snapshot.fingerprint for name, snapshot in collections.items() if name not in ours},
    )


def _open_centers(settings: Settings, folder: str, fingerprint: Fingerprint, *, strict: bool) -> Centers | None:
    shipped = Path(folder) / "centers"
    if settings.centers is None and not (shipped / MANIFEST).is_file():
        return None
    path = Path(settings.centers) if settings.centers is not None else shipped
    centers = Centers.open(path)
    if strict and centers.fingerprint != fingerprint:
        raise ConfigInvalid(
            f"the centers {path} are in the space of another model ({centers.fingerprint[:_SHOWN]}, served"
            f" {fingerprint[:_SHOWN]})",
            remedy="use the centers shipped with the model, or cluster its own embeddings",
        )
    return centers


def _open_collections(settings: Settings) -> dict[str, Snapshot]:
    if settings.state_dir is None:
        return {}
    folder = Path(settings.state_dir) / "collections"
    return {path.parent.name: Snapshot.open(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))}
