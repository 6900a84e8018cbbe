"""Centers and collections: usable only in the space of the model that they were made with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import MANIFEST
from mlcd.collections.collection import Collection
from mlcd.collections.store import Collections
from mlcd.errors import ConfigInvalid, Conflict, NotFound
from mlcd.types import Fingerprint
from service.inference.lookup import Lookup
from service.settings import Settings

_SHOWN: Final = 12
"""Digits of a fingerprint, for people who read a terminal."""


@dataclass(frozen=True)
class Space:
    """What is there for the vectors of one model; what is there for another's is told apart, and refused."""

    fingerprint: Fingerprint
    lookup: Lookup | None
    """Of the centers."""
    store: Collections | None
    """Of collections of all models."""
    foreign_centers: Fingerprint | None = None
    """Whose space they are in, where it is not this one."""

    @property
    def collections(self) -> dict[str, Collection]:
        """Those of this model, as of now."""
        return {
            name: one for name, one in self._all().items() if one.fingerprint == self.fingerprint
        }

    @property
    def foreign_collections(self) -> dict[str, Fingerprint]:
        """Whose space the others are in."""
        return {
            name: one.fingerprint
            for name, one in self._all().items()
            if one.fingerprint != self.fingerprint
        }

    def opened_lookup(self) -> Lookup:
        """Raises NotFound where there are no centers, Conflict where they are in another model's space."""
        if self.foreign_centers is not None:
            raise self._foreign(
                "the centers are",
                self.foreign_centers,
                "cluster its embeddings or export its centers",
            )
        if self.lookup is None:
            raise NotFound(
                "this model was started without centers", remedy="start the server with --centers"
            )
        return self.lookup

    def opened_collection(self, name: str) -> Collection:
        """Raises NotFound where there is none of that name, Conflict where it is in another model's space."""
        found = None if self.store is None else self.store.find(name)
        if found is None:
            raise NotFound("there is no such collection", remedy="GET /v1/collections lists them")
        if found.fingerprint != self.fingerprint:
            raise self._foreign(
                "this collection is", found.fingerprint, "embed its images by the served model"
            )
        return found

    def opened_store(self) -> Collections:
        """Raises Conflict where the server has no place for collections."""
        if self.store is None:
            raise Conflict("this server keeps no collections", remedy="start it with --state DIR")
        return self.store

    def _all(self) -> dict[str, Collection]:
        return {} if self.store is None else self.store.all()

    def _foreign(self, what: str, fingerprint: Fingerprint, way: str) -> Conflict:
        return Conflict(
            f"{what} in the space of the model {fingerprint}, and {self.fingerprint} is served",
            remedy=f"{way}, then load the served version again; or go back to the version they were made with",
        )


def open_space(
    settings: Settings,
    folder: str,
    collections: Collections | None,
    fingerprint: Fingerprint,
    *,
    strict: bool,
) -> Space:
    """What `settings` name, or ships in the model's `folder`, and what was put among `collections` meanwhile; slow.

    strict: raise ConfigInvalid for centers of another model, in place of telling them apart. Raises ConfigInvalid, too,
    where approximate labels cannot be audited.
    """
    centers = _open_centers(settings, folder, fingerprint, strict=strict)
    if collections is not None:
        collections.find_new()
    lookup = Lookup(centers) if centers is not None and centers.fingerprint == fingerprint else None
    foreign_centers = None if centers is None or lookup is not None else centers.fingerprint
    space = Space(fingerprint, lookup, collections, foreign_centers)
    if settings.approximate and lookup is not None:
        lookup.approximate(space.collections.values())
    return space


def open_collections(settings: Settings) -> Collections | None:
    """All that are in the state folder, None without one; slow. Several processes may only search them."""
    if settings.state_dir is None:
        return None
    return Collections.open(
        Path(settings.state_dir) / "collections",
        read_only=settings.processes > 1,
        max_collections=settings.limits.max_collections,
    )


def _open_centers(
    settings: Settings, folder: str, fingerprint: Fingerprint, *, strict: bool
) -> Centers | None:
    path = find_centers(settings, folder)
    if path is None:
        return None
    centers = Centers.open(path)
    if strict:
        check_centers(path, centers, fingerprint)
    return centers


def find_centers(settings: Settings, folder: str) -> Path | None:
    """Those that are named, else those that the model's folder holds."""
    if settings.centers is not None:
        return Path(settings.centers)
    shipped = Path(folder) / "centers"
    return shipped if (shipped / MANIFEST).is_file() else None


def check_centers(path: Path, centers: Centers, fingerprint: Fingerprint) -> None:
    """Raises ConfigInvalid for centers of another model."""
    if centers.fingerprint != fingerprint:
        raise ConfigInvalid(
            f"the centers {path} are in the space of another model ({centers.fingerprint[:_SHOWN]}, served"
            f" {fingerprint[:_SHOWN]})",
            remedy="use the centers shipped with the model, or cluster its own embeddings",
        )
