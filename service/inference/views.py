"""The clusters and layouts of collections, kept for the state that each was made of."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

from mlcd.collections.clusters import Clusters
from mlcd.collections.plane import Plane
from mlcd.collections.port import CollectionPort
from service.deadline import within_deadline
from service.inference.lookup import Lookup


class CollectionViews:
    """The views of every collection that was asked for, made on one thread.

    Of a collection that has changed only new items are looked at. A request that cannot wait leaves
    the work going on, and a later one finds it done.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        """thread: a pool of one thread."""
        self._thread = thread
        self._clusters = WeakKeyDictionary[CollectionPort, tuple[str, Clusters]]()
        self._layouts = WeakKeyDictionary[CollectionPort, Plane]()
        self._changing = threading.Lock()

    async def clusters(
        self, collection: CollectionPort, lookup: Lookup, *, deadline: float
    ) -> Clusters:
        """Returns the clusters of the collection's present state. Raises DeadlineExceeded."""
        # a store behind a network is asked for its state
        found = await asyncio.to_thread(self._found_clusters, collection, lookup)
        if found is not None:
            return found
        make = partial(self._make_clusters, collection, lookup)
        making = asyncio.get_running_loop().run_in_executor(self._thread, make)
        return await within_deadline(making, deadline)

    async def layout(self, collection: CollectionPort, *, deadline: float) -> Plane:
        """Returns the layout of the collection's present state. Raises DeadlineExceeded."""
        found = await asyncio.to_thread(self._found_layout, collection)
        if found is not None:
            return found
        make = partial(self._make_layout, collection)
        making = asyncio.get_running_loop().run_in_executor(self._thread, make)
        return await within_deadline(making, deadline)

    def _make_clusters(self, collection: CollectionPort, lookup: Lookup) -> Clusters:
        # a request before this one may have made them
        if (found := self._found_clusters(collection, lookup)) is not None:
            return found
        digest = lookup.centers.digest
        made = collection.clusters(
            digest,
            num_centers=len(lookup.centers.vectors),
            nearest=partial(lookup.nearest, top=1),
        )
        with self._changing:
            self._clusters[collection] = (digest, made)
        return made

    def _make_layout(self, collection: CollectionPort) -> Plane:
        if (found := self._found_layout(collection)) is not None:
            return found
        made = collection.layout()
        with self._changing:
            self._layouts[collection] = made
        return made

    def _found_clusters(self, collection: CollectionPort, lookup: Lookup) -> Clusters | None:
        with self._changing:
            kept = self._clusters.get(collection)
        if kept is None or kept[0] != lookup.centers.digest:
            return None
        return kept[1] if kept[1].searcher is collection.state else None

    def _found_layout(self, collection: CollectionPort) -> Plane | None:
        with self._changing:
            kept = self._layouts.get(collection)
        return kept if kept is not None and kept.searcher is collection.state else None
