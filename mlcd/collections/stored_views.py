"""The clusters and the layout of a collection in a folder, kept beside it."""

import logging
import threading
from pathlib import Path

from mlcd.collections.clusters import Assigner, Clusters, Nearest
from mlcd.collections.plane import Placer, Plane
from mlcd.collections.write_queue import WriteQueue
from mlcd.errors import Conflict
from mlcd.types import Embeddings, Neighbors

_log = logging.getLogger("mlcd.collections")


class StoredViews:
    """The views of one collection; of its items only new ones are looked at."""

    def __init__(self, path: Path, writes: WriteQueue, *, writable: bool) -> None:
        self.assigner, self.placer = Assigner(path), Placer(path)
        self._name, self._writes, self._writable = path.name, writes, writable
        self._viewing = threading.Lock()

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        """Returns the members of each center; see `Collection.clusters`."""

        def go_on(vectors: Embeddings) -> Neighbors:
            self._writes.check_open()
            return nearest(vectors)

        with self._viewing:
            clusters = self.assigner.clusters(
                self._writes.state, digest, num_centers=num_centers, nearest=go_on
            )
            if self._writable and self.assigner.is_worth_writing:
                self._keep()
        return clusters

    def layout(self) -> Plane:
        """Returns a point for each item; see `Collection.layout`."""
        with self._viewing:
            return self.placer.layout(self._writes.state)

    def _keep(self) -> None:
        """Writes what can be computed again; where that fails, it is computed again."""
        try:
            with self._writes.exclusively():  # a collection that is deleted is closed under it
                self.assigner.write()
        except (OSError, Conflict) as error:
            _log.warning("the clusters of %s could not be kept: %s", self._name, error)
