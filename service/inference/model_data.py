"""The centers and collections of a model, which are usable only with this model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.collections.places import open_place
from mlcd.collections.port import CollectionPort, CollectionsPort
from mlcd.errors import ConfigInvalid, Conflict, NotFound
from mlcd.service.inference.find_model import find_centers
from mlcd.service.inference.lookup import Lookup
from mlcd.service.settings import Settings
from mlcd.types import Fingerprint

_SHOWN_DIGITS: Final = 12  # of a fingerprint in a message


def missing_collection() -> NotFound:
    return NotFound("the collection does not exist", remedy="GET /v1/collections lists them")


@dataclass(frozen=True)
class ModelData:
    """The centers and collections of one model; data of other models is refused.

    lookup: look-up of the model's centers. store: collections of all models. foreign_centers:
    fingerprint of the centers' model if it is another model.
    """

    fingerprint: Fingerprint
    lookup: Lookup | None
    store: CollectionsPort | None
    foreign_centers: Fingerprint | None = None

    @property
    def collections(self) -> dict[str, CollectionPort]:
        """The open collections of this model."""
        return {
            name: collection
            for name, collection in self._all().items()
            if collection.fingerprint == self.fingerprint
        }

    @property
    def foreign_collections(self) -> dict[str, Fingerprint]:
        """The fingerprints of the models of all other collections, by name."""
        return {
            name: collection.fingerprint
            for name, collection in self._all().items()
            if collection.fingerprint != self.fingerprint
        }

    def require_lookup(self) -> Lookup:
        """Returns the look-up of the centers.

        Raises NotFound without centers, Conflict for centers of another model.
        """
        if self.foreign_centers is not None:
            raise self._foreign_error(
                "the centers are",
                self.foreign_centers,
                "cluster the served model's embeddings or export its centers",
                "the centers",
            )
        if self.lookup is None:
            raise NotFound(
                "this model was started without centers", remedy="start the server with --centers"
            )
        return self.lookup

    def require_collection(self, name: str) -> CollectionPort:
        """Returns an open collection.

        Raises NotFound for an unknown name, Conflict for a collection of another model.
        """
        collection = None if self.store is None else self.store.find(name)
        if collection is None:
            raise missing_collection()
        if collection.fingerprint != self.fingerprint:
            raise self._foreign_error(
                "this collection is",
                collection.fingerprint,
                "embed the collection's images with the served model",
                "the collection",
            )
        return collection

    def require_store(self) -> CollectionsPort:
        """Returns the collections. Raises Conflict without a state directory."""
        if self.store is None:
            raise Conflict(
                "collections need a state directory or a store, and this server has neither",
                remedy="start it with --state DIR, or set MLCD_COLLECTIONS__STORE",
            )
        return self.store

    def _all(self) -> Mapping[str, CollectionPort]:
        return {} if self.store is None else self.store.all()

    def _foreign_error(
        self, subject: str, fingerprint: Fingerprint, remedy: str, data: str
    ) -> Conflict:
        return Conflict(
            f"{subject} in the space of the model {fingerprint}, and {self.fingerprint} is served",
            remedy=f"{remedy}, then load the served version again; or switch back to the model that"
            f" made {data}",
        )


def open_model_data(
    settings: Settings,
    folder: str,
    collections: CollectionsPort | None,
    fingerprint: Fingerprint,
    *,
    strict: bool,
) -> ModelData:
    """Opens the centers and finds new `collections`; slow.

    The centers are those of `settings`, otherwise those in the model's `folder`. strict: whether
    centers of another model raise ConfigInvalid. Also raises ConfigInvalid if approximate labels
    cannot be audited.
    """
    opened_centers = _open_centers(settings, folder, fingerprint, strict=strict)
    if collections is not None:
        collections.find_new()
    foreign_centers, lookup = None, None
    if opened_centers is not None:
        artifact, centers = opened_centers
        if centers.fingerprint == fingerprint:
            state_dir = None if settings.state_dir is None else Path(settings.state_dir)
            lookup = Lookup(centers, artifact, state_dir)
        else:
            foreign_centers = centers.fingerprint
    data = ModelData(fingerprint, lookup, collections, foreign_centers)
    if settings.approximate and lookup is not None:
        lookup.approximate(data.collections.values())
    return data


def open_collections(settings: Settings) -> CollectionsPort | None:
    """Opens all collections in the store or the state directory; slow. Returns None without either.

    With several server processes, collections in a state directory are read-only.
    """
    if (store := settings.collections.store) is not None:
        return open_place(store.get_secret_value(), max_collections=settings.limits.max_collections)
    if settings.state_dir is None:
        return None
    return open_place(
        str(Path(settings.state_dir) / "collections"),
        read_only=settings.processes > 1,
        max_thumbnail_bytes=settings.thumbnails.max_bytes,
        max_collections=settings.limits.max_collections,
    )


def _open_centers(
    settings: Settings, folder: str, fingerprint: Fingerprint, *, strict: bool
) -> tuple[Artifact, Centers] | None:
    path = find_centers(settings, folder)
    if path is None:
        return None
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact, with_names=False)  # the look-up reads their names
    if strict:
        check_centers(path, centers, fingerprint)
    return artifact, centers


def check_centers(path: Path, centers: Centers, fingerprint: Fingerprint) -> None:
    """Raises ConfigInvalid for centers of another model."""
    if centers.fingerprint != fingerprint:
        raise ConfigInvalid(
            f"the centers {path} are in the space of another model"
            f" ({centers.fingerprint[:_SHOWN_DIGITS]}, served {fingerprint[:_SHOWN_DIGITS]})",
            remedy="use the centers shipped with the model, or cluster its own embeddings",
        )
