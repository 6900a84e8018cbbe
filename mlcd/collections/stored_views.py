"""The clusters and the layout of a collection in a folder, cached in this folder."""

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
    """The clusters and the layout of one collection; only new items are computed."""

    def __init__(self, path: Path, writes: WriteQueue, *, writable: bool) -> None:
        self.assigner, self.placer = Assigner(path), Placer(path)
        self._name, self._writes, self._writable = path.name, writes, writable
        self._viewing = threading.Lock()

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        """Returns the members of each center; see `Collection.clusters`."""

        def check_and_compare(vectors: Embeddings) -> Neighbors:
            self._writes.check_open()
            return nearest(vectors)

        with self._viewing:
            clusters = self.assigner.clusters(
                self._writes.state, digest, num_centers=num_centers, nearest=check_and_compare
            )
            if self._writable and self.assigner.is_worth_writing:
                self._write_clusters()
        return clusters

    def layout(self) -> Plane:
        """Returns a point for each item; see `Collection.layout`."""
        with self._viewing:
            return self.placer.layout(self._writes.state)

    def _write_clusters(self) -> None:
        """Writes the cache; a failure is only logged, because clusters can be computed again."""
        try:
            with self._writes.exclusively():  # raises Conflict if the collection was deleted
                self.assigner.write()
        except (OSError, Conflict) as error:
            _log.warning("the clusters of %s could not be written: %s", self._name, error)
