"""Caches the clusters and layouts of collections while the collections do not change."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

from mlcd.collections.clusters import Clusters
from mlcd.collections.plane import Plane
from mlcd.collections.port import CollectionPort
from mlcd.service.deadline import within_deadline
from mlcd.service.inference.lookup import Lookup


class CollectionViews:
    """The clusters and layouts of requested collections, computed on one thread.

    After a change, only new items of a collection are processed. The work continues if a request
    reaches its deadline, and a later request gets the result.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        """thread: pool with one thread."""
        self._thread = thread
        self._clusters = WeakKeyDictionary[CollectionPort, tuple[str, Clusters]]()
        self._layouts = WeakKeyDictionary[CollectionPort, Plane]()
        self._lock = threading.Lock()

    async def clusters(
        self, collection: CollectionPort, lookup: Lookup, *, deadline: float
    ) -> Clusters:
        """Returns the clusters of the collection's present state. Raises DeadlineExceeded."""
        # on a thread: reading the collection's state may block on a network call to its store
        current = await asyncio.to_thread(self._find_clusters, collection, lookup)
        if current is not None:
            return current
        make = partial(self._make_clusters, collection, lookup)
        making = asyncio.get_running_loop().run_in_executor(self._thread, make)
        return await within_deadline(making, deadline)

    async def layout(self, collection: CollectionPort, *, deadline: float) -> Plane:
        """Returns the layout of the collection's present state. Raises DeadlineExceeded."""
        current = await asyncio.to_thread(self._find_layout, collection)
        if current is not None:
            return current
        make = partial(self._make_layout, collection)
        making = asyncio.get_running_loop().run_in_executor(self._thread, make)
        return await within_deadline(making, deadline)

    def _make_clusters(self, collection: CollectionPort, lookup: Lookup) -> Clusters:
        # an earlier request may have computed them meanwhile
        if (current := self._find_clusters(collection, lookup)) is not None:
            return current
        digest = lookup.centers.digest
        clusters = collection.clusters(
            digest,
            num_centers=len(lookup.centers.vectors),
            nearest=partial(lookup.nearest, top=1),
        )
        with self._lock:
            self._clusters[collection] = (digest, clusters)
        return clusters

    def _make_layout(self, collection: CollectionPort) -> Plane:
        if (current := self._find_layout(collection)) is not None:
            return current
        plane = collection.layout()
        with self._lock:
            self._layouts[collection] = plane
        return plane

    def _find_clusters(self, collection: CollectionPort, lookup: Lookup) -> Clusters | None:
        with self._lock:
            cached = self._clusters.get(collection)
        if cached is None or cached[0] != lookup.centers.digest:
            return None
        return cached[1] if cached[1].state is collection.state else None

    def _find_layout(self, collection: CollectionPort) -> Plane | None:
        with self._lock:
            cached = self._layouts.get(collection)
        return cached if cached is not None and cached.state is collection.state else None
